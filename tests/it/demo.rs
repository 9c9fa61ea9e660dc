//! `rlood demo` as a newcomer runs it, with few steps: what it prints, what it leaves, how it ends. Its goal takes two
//! minutes and has a run of its own (`rlood demo --exit`).

use std::io::{BufRead, BufReader, Lines};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

/// A demo that is killed when the test is over, however it ends.
struct Demo {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Demo {
    fn start(data_dir: &Path, extra: &[&str]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_rlood"))
            .args(["demo", "--listen", "127.0.0.1:0", "--steps", "2", "--seed", "1", "--data-dir"])
            .arg(data_dir)
            .args(extra)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines }
    }

    /// Everything up to the first line that contains `text`.
    fn read_until(&mut self, text: &str) -> String {
        let mut read = String::new();
        for line in self.lines.by_ref() {
            let line = line.unwrap();
            read.push_str(&line);
            read.push('\n');
            if line.contains(text) {
                return read;
            }
        }
        panic!("the demo ended without saying '{text}':\n{read}");
    }
}

impl Drop for Demo {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn it_serves_at_once_shows_what_it_did_and_leaves_on_ctrl_c() {
    let dir = tempfile::tempdir().unwrap();
    let begun = Instant::now();
    let mut demo = Demo::start(dir.path(), &[]);
    let first = demo.read_until("listening on ");
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    let base = first.strip_prefix("listening on ").unwrap().trim().to_owned();
    assert!(base.starts_with("http://127.0.0.1:"), "{first}");

    let said = demo.read_until("serving until Ctrl-C");
    assert!(said.contains("held-out exact match, greedy, 256 prompts"), "{said}");
    let answers = said.lines().filter(|line| line.contains('✓') || line.contains('✗')).count();
    assert_eq!(answers, 5, "five prompts before and after:\n{said}");
    assert!(said.contains(&format!("{base}/docs")), "{said}");
    let weights = std::fs::read(dir.path().join("adapter/adapter_model.safetensors")).unwrap();
    let sha256: String = Sha256::digest(&weights).iter().map(|byte| format!("{byte:02x}")).collect();
    assert!(said.contains(&sha256), "{said}");
    assert!(dir.path().join("adapter/adapter_config.json").is_file());

    let mut connection = std::net::TcpStream::connect(base.strip_prefix("http://").unwrap()).unwrap();
    std::io::Write::write_all(&mut connection, b"GET /livez HTTP/1.0\r\nhost: localhost\r\n\r\n").unwrap();
    let mut status = String::new();
    BufReader::new(connection).read_line(&mut status).unwrap();
    assert!(status.contains(" 200 "), "it keeps serving: {status}");

    let interrupted = Command::new("kill").args(["-INT", &demo.child.id().to_string()]).status().unwrap();
    assert!(interrupted.success());
    assert!(demo.child.wait().unwrap().success());
}

#[test]
fn with_exit_two_steps_are_not_enough_for_code_0() {
    let dir = tempfile::tempdir().unwrap();
    let mut demo = Demo::start(dir.path(), &["--exit"]);
    let said = demo.read_until("goal missed");
    assert!(said.contains("try more --steps"), "{said}");
    assert_eq!(demo.child.wait().unwrap().code(), Some(1));
}
