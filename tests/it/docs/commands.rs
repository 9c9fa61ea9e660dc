//! Runs the shell blocks that are marked `sh,test`: those of a page in order, as one script, in an empty directory, with `rlood` of this
//! build on PATH. In them `localhost:8080` is a free port, which `rlood` gets through its variables.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use pulldown_cmark::{CodeBlockKind, Event, Parser, Tag, TagEnd};

use super::{pages, read, root};

/// A page's commands must end within this time.
const LIMIT: Duration = Duration::from_secs(600);

fn marked_blocks(text: &str) -> String {
    let mut script = String::new();
    let mut is_inside = false;
    for event in Parser::new(text) {
        match event {
            Event::Start(Tag::CodeBlock(CodeBlockKind::Fenced(info))) => is_inside = *info == *"sh,test",
            Event::End(TagEnd::CodeBlock) => is_inside = false,
            Event::Text(part) if is_inside => script.push_str(&part),
            _ => {}
        }
    }
    script
}

fn is_installed(program: &str) -> bool {
    let output = Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    output.is_ok_and(|status| status.success())
}

fn run(page: &Path, script: &str) {
    let name = page.strip_prefix(root()).unwrap().display();
    let folder = tempfile::tempdir().unwrap();
    let home = tempfile::tempdir().unwrap();
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let script = format!(
        "trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT\n{}",
        script.replace("localhost:8080", &format!("localhost:{port}"))
    );
    let binaries = Path::new(env!("CARGO_BIN_EXE_rlood")).parent().unwrap();
    let mut path = binaries.as_os_str().to_owned();
    path.push(":");
    path.push(std::env::var_os("PATH").unwrap());
    let mut command = Command::new("bash");
    command.args(["-euo", "pipefail", "-c", &script]).current_dir(folder.path());
    for (variable, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("RLOOD_")) {
        command.env_remove(variable);
    }
    let log = std::fs::File::create(home.path().join("log")).unwrap();
    command.env("PATH", path).env("HOME", home.path()).env_remove("XDG_CONFIG_HOME").env_remove("XDG_STATE_HOME");
    command.env("RLOOD_LISTEN", format!("127.0.0.1:{port}")).env("RLOOD_SERVER", format!("http://127.0.0.1:{port}"));
    command.env("RLOOD_DEVICES", "cpu").stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
    let mut child = command.spawn().unwrap();
    let began = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if began.elapsed() > LIMIT {
            child.kill().unwrap();
            panic!("{name} takes longer than {LIMIT:?}:\n{}", read(&home.path().join("log")));
        }
        std::thread::sleep(Duration::from_millis(100));
    };
    let log = read(&home.path().join("log"));
    assert!(status.success(), "the commands of {name} fail with {status}:\n{log}");
    println!("{name}: {:?}\n{log}", began.elapsed());
}

#[test]
fn the_commands_of_every_page_work() {
    if let Some(missing) = ["bash", "curl", "python3"].into_iter().find(|program| !is_installed(program)) {
        println!("NOT RUN: there is no {missing}");
        return;
    }
    let scripts: Vec<_> = pages().into_iter().map(|page| (marked_blocks(&read(&page)), page)).collect();
    let mut number = 0;
    for (script, page) in scripts.iter().filter(|(script, _)| !script.is_empty()) {
        run(page, script);
        number += 1;
    }
    assert!(number >= 1, "no page has a block that is marked sh,test");
}

#[test]
fn only_marked_blocks_are_run() {
    let text = "```sh\na\n```\n\n```sh,test\nb\nc\n```\n\n```python\nd\n```\n\n- x\n\n  ```sh,test\n  e\n  ```\n";
    assert_eq!(marked_blocks(text), "b\nc\ne\n");
}
