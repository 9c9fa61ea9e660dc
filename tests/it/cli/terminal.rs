//! Commands in a pseudo-terminal: output, prompts, and Ctrl-C.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use serde_json::json;

use super::pull::Proxy;
use super::{User, endless, named, start};
use crate::processes::{Server, binary, command};

/// Time limit for a command to show something.
const PATIENCE: Duration = Duration::from_secs(60);

/// A command with its own terminal.
struct Terminal {
    child: Child,
    keyboard: File,
    screen: Arc<Mutex<Vec<u8>>>,
}

impl Terminal {
    fn run(user: &User, arguments: &[&str]) -> Self {
        let main = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&main).unwrap();
        unlockpt(&main).unwrap();
        tcsetwinsize(&main, Winsize { ws_row: 40, ws_col: 100, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
        let name = ptsname(&main, Vec::new()).unwrap().into_string().unwrap();
        let end = || Stdio::from(OwnedFd::from(File::options().read(true).write(true).open(&name).unwrap()));
        // Its own session with this terminal, so that Ctrl-C sends a signal to the command.
        let mut command = Command::new("setsid");
        user.prepare(&mut command);
        command.args(["--ctty", "--wait"]).arg(binary()).args(arguments).env("TERM", "xterm-256color");
        let child = command.stdin(end()).stdout(end()).stderr(end()).spawn().unwrap();
        drop(command);
        let mut main = File::from(main);
        let keyboard = main.try_clone().unwrap();
        let screen = Arc::new(Mutex::new(Vec::new()));
        let shown = screen.clone();
        std::thread::spawn(move || {
            let mut piece = [0; 4096];
            while let Ok(count @ 1..) = main.read(&mut piece) {
                shown.lock().unwrap().extend_from_slice(&piece[..count]);
            }
        });
        Self { child, keyboard, screen }
    }

    fn screen(&self) -> String {
        String::from_utf8_lossy(&self.screen.lock().unwrap()).into_owned()
    }

    /// Waits until this text is on the screen.
    fn shows(&self, text: &str) {
        let begun = Instant::now();
        while !self.screen().contains(text) {
            assert!(begun.elapsed() < PATIENCE, "no '{text}' in {:?}", self.screen());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn types(&mut self, text: &str) {
        self.keyboard.write_all(text.as_bytes()).unwrap();
    }

    /// Returns the exit code and all output.
    fn ends(mut self) -> (i32, String) {
        let begun = Instant::now();
        let code = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status.code().unwrap_or(-1);
            }
            if begun.elapsed() > PATIENCE {
                let _ = self.child.kill();
                panic!("it does not end: {:?}", self.screen());
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        // The last output may not have reached the reader yet.
        std::thread::sleep(Duration::from_millis(100));
        (code, self.screen())
    }
}

#[tokio::test]
async fn ctrl_c_detaches_and_the_job_goes_on() {
    let (server, user) = start("cpu");
    let id = user.submit(&endless("goes on"));
    for arguments in [vec!["watch", "@last"], vec!["logs", "-f", &id], vec!["events", "-f", &id], vec!["wait", &id]] {
        let mut terminal = Terminal::run(&user, &arguments);
        if arguments[0] == "wait" {
            std::thread::sleep(Duration::from_secs(2));
        } else {
            terminal.shows(if arguments[0] == "logs" { "20" } else { "step" });
        }
        terminal.types("\u{3}");
        let (code, shown) = terminal.ends();
        assert_eq!(code, 130, "{arguments:?}: {shown}");
        assert!(shown.contains("the job keeps running") && shown.contains(&format!("rlood cancel {id}")), "{shown}");
    }
    let before = server.get(&format!("/jobs/{id}")).await;
    assert!(before["state"] == "running" && before["requested"].is_null(), "{before}");
    server.job_when(&id, "more steps", |job| job["step"].as_u64() > before["step"].as_u64()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ctrl_c_stops_the_download_of_a_merged_model_and_keeps_what_arrived() {
    let (server, user) = start("cpu");
    let id = user.submit(&named("merged", 2));
    server.job_in_state(&id, "succeeded").await;
    let checkpoint = server.get(&format!("/jobs/{id}/checkpoints")).await["data"][0]["id"].as_str().unwrap().to_owned();
    let body = json!({"format": "merged", "dtype": "float32"});
    let mut export = server.post(&format!("/checkpoints/{checkpoint}/exports"), &body).await;
    let begun = Instant::now();
    while export["state"] != "succeeded" {
        assert!(begun.elapsed() < PATIENCE, "{export}");
        tokio::time::sleep(Duration::from_millis(100)).await;
        export = server.get(&format!("/exports/{}", export["id"].as_str().unwrap())).await;
    }
    let files = export["files"].as_array().unwrap();
    let total: u64 = files.iter().map(|file| file["size_bytes"].as_u64().unwrap()).sum();
    let proxy = Proxy::start(&server.url, total / 2).await;
    let arguments = [
        "export",
        checkpoint.as_str(),
        "--merged",
        "--dtype",
        "float32",
        "-o",
        "whole",
        "--server",
        proxy.url.as_str(),
    ];
    let part = user.path(&format!(".whole.{}.part", export["id"].as_str().unwrap()));
    let arrived = || -> u64 {
        let entries = std::fs::read_dir(&part).into_iter().flatten().flatten();
        entries.map(|entry| entry.metadata().unwrap().len()).sum()
    };
    let mut terminal = Terminal::run(&user, &arguments);
    let begun = Instant::now();
    while arrived() < total / 4 {
        assert!(begun.elapsed() < PATIENCE, "{} of {total}: {}", arrived(), terminal.screen());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    terminal.types("\u{3}");
    let (code, shown) = terminal.ends();
    assert!(code == 130 && shown.contains("stopped; run the command again to continue"), "{code}: {shown}");
    assert!(arrived() >= total / 4 && !user.path("whole").exists());
    proxy.allowance.store(u64::MAX, Ordering::SeqCst);
    user.run(&arguments).ok();
    assert!(user.path("whole/model.safetensors").is_file() && !part.exists());
}

#[tokio::test]
async fn a_terminal_shows_a_live_table_of_several_jobs() {
    let (_server, user) = start("cpu");
    let mut job = named("drawn", 6);
    job["eval"] = json!({"dataset": {"records": [{"prompt": "Say nine."}]}, "every_steps": 2, "before_start": true});
    let first = user.submit(&job);
    let second = user.submit(&named("second", 4));
    let (code, shown) = Terminal::run(&user, &["watch", &first, &second]).ends();
    assert_eq!(code, 0, "{shown}");
    for part in ["drawn", "second", "step 6/6", "━━━━━━━━━━━━━━━━━━━━", "eval reward", "tokens/s", "KL", "succeeded"]
    {
        assert!(shown.contains(part), "no '{part}' in {shown}");
    }
    assert!(shown.contains(['▁', '▄', '█']) && shown.contains('\u{1b}'), "{shown}");
    user.write("job.json", named("followed", 2).to_string());
    let (code, shown) = Terminal::run(&user, &["submit", "job.json", "--watch"]).ends();
    assert!(code == 0 && shown.contains("step 2/2") && shown.contains("succeeded"), "{shown}");
    let (_, shown) = Terminal::run(&user, &["list"]).ends();
    assert!(shown.contains("\u{1b}[1m"), "bold headings: {shown}");
    let (_, shown) = Terminal::run(&user, &["list", "--color", "never"]).ends();
    assert!(!shown.contains("\u{1b}[1m"), "{shown}");
    let mut plain = User { dir: user.dir, variables: user.variables };
    plain.variables.push(("NO_COLOR".to_owned(), "1".to_owned()));
    let (_, shown) = Terminal::run(&plain, &["list"]).ends();
    assert!(!shown.contains("\u{1b}[1m"), "{shown}");
}

#[tokio::test]
async fn a_terminal_is_asked_before_something_is_deleted() {
    let (server, user) = start("none");
    let id = user.submit(&named("deleted", 2));
    user.run(&["cancel", &id]).ok();
    for (answer, code, is_there) in [("\n", 2, true), ("n\n", 2, true), ("y\n", 0, false)] {
        let mut terminal = Terminal::run(&user, &["delete", &id]);
        terminal.shows("[y/N]");
        terminal.types(answer);
        let (found, shown) = terminal.ends();
        assert_eq!(found, code, "{shown}");
        let jobs = server.get("/jobs").await["data"].as_array().unwrap().len();
        assert_eq!(jobs, usize::from(is_there), "{answer:?}");
    }
}

#[tokio::test]
async fn a_key_is_typed_unseen() {
    const KEY: &str = "operator-key-0123456789";
    let user = User::new();
    let server = Server::start_by(command(&user.path("data"), "none").env("RLOOD_API_KEY", KEY));
    let mut terminal = Terminal::run(&user, &["login", &server.url, "--name", "here"]);
    terminal.shows("API key: ");
    terminal.types(&format!("{KEY}\n"));
    let (code, shown) = terminal.ends();
    assert!(code == 0 && !shown.contains(KEY) && shown.contains("signed in"), "{shown}");
    user.run(&["list"]).ok();
}
