//! Standard error: JSON lines if requested, with the causes of every error.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use sqlx::Connection;

use crate::processes::{Server, command};

/// Returns the lines of a log, each parsed as JSON.
fn lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))).collect()
}

#[tokio::test]
async fn errors_in_a_log_of_json_have_their_causes() {
    let dir = tempfile::tempdir().unwrap();
    let (data, log) = (dir.path().join("data"), dir.path().join("log"));
    let mut serve = command(&data, "none");
    let server = Server::start_by(serve.args(["--log-format", "json"]).stderr(File::create(&log).unwrap()));
    // Polling of the outbox produces errors continuously.
    let options = sqlx::sqlite::SqliteConnectOptions::new().filename(data.join("rlood.db"));
    let mut database = sqlx::SqliteConnection::connect_with(&options).await.unwrap();
    sqlx::query("ALTER TABLE deliveries RENAME TO elsewhere").execute(&mut database).await.unwrap();
    let begun = Instant::now();
    let error = loop {
        // The last line may be incomplete.
        let text = std::fs::read_to_string(&log).unwrap();
        let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
        let found = lines(whole)
            .into_iter()
            .find(|line| line["fields"]["message"] == "the queued webhook messages cannot be read");
        if let Some(line) = found {
            break line["fields"]["error"].as_str().unwrap().to_owned();
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "{text}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    assert!(error.contains("deliveries") && error.contains("no such"), "{error}");
    drop(server);
}

#[test]
fn a_worker_without_a_server_says_in_json_why_it_cannot_reach_it() {
    let scratch = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_rlood"));
    command
        .args(["worker", "--server", "http://127.0.0.1:1", "--log", "debug", "--log-format", "json"])
        .arg("--scratch-dir")
        .arg(scratch.path())
        .env("RLOOD_WORKER_TOKEN", "sixteen-letters!")
        .env("NO_PROXY", "127.0.0.1")
        .stdin(Stdio::null())
        .stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let stderr = BufReader::new(child.stderr.take().unwrap());
    let again = stderr.lines().map_while(Result::ok).find(|line| line.contains("trying again"));
    child.kill().unwrap();
    child.wait().unwrap();
    let line: Value = serde_json::from_str(&again.expect("it tries again")).unwrap();
    let error = line["fields"]["error"].as_str().unwrap();
    assert!(error.contains("the server cannot be reached") && error.contains("refused"), "{error}");
}

/// Returns exit code and standard error of a process that fails to start.
fn refused(command: &mut Command) -> (Option<i32>, String) {
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("RLOOD_")) {
        command.env_remove(name);
    }
    let output = command.stdin(Stdio::null()).output().unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

fn rlood(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rlood"));
    command.args(words);
    command
}

#[test]
fn what_ends_a_process_is_a_line_of_json_where_the_log_is() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    let data = dir.path().join("data");
    let at = |path: &Path| path.to_str().unwrap().to_owned();
    let (file, data) = (at(&file), at(&data));
    let listen = ["--listen", "127.0.0.1:0", "--devices", "none"];
    let cases: [(&[&str], i32, &str); 6] = [
        // A directory cannot replace a file: the cause comes from the system.
        (&["serve", "--data-dir", &file], 1, "(os error "),
        (&["backup", "/nowhere/at/all", "--data-dir", &file], 1, ""),
        (&["serve", "--data-dir", &data, "--allow-outgoing", "10.0.0.0/99"], 1, "10.0.0.0/99"),
        (&["serve", "--data-dir", &data, "--log", "a=b=c"], 2, "is not a log filter"),
        (&["serve", "--data-dir", &data, "--max-connections", "few"], 2, "--max-connections"),
        (&["serves"], 2, "serves"),
    ];
    for (words, code, part) in cases {
        let mut all = words.to_vec();
        if words[0] == "serve" {
            all.extend(listen);
        }
        let mut json = rlood(&all);
        let (found, text) = refused(json.args(["--log-format", "json"]));
        let last = lines(&text).pop().unwrap_or_else(|| panic!("{words:?} said nothing"));
        assert_eq!((found, &last["level"]), (Some(code), &"ERROR".into()), "{words:?}: {text}");
        let message = last["fields"]["message"].as_str().unwrap();
        assert!(message.contains(part) && !message.starts_with("error:"), "{words:?}: {message}");
        assert!(last["timestamp"].as_str().unwrap().parse::<jiff::Timestamp>().is_ok(), "{last}");
        // The text format contains the same information.
        let (found, text) = refused(&mut rlood(&all));
        assert_eq!(found, Some(code), "{words:?}: {text}");
        assert!(text.contains(message.lines().next().unwrap()), "{words:?}: {text} {message}");
    }
    let mut by_variable = rlood(&["serves"]);
    by_variable.env("RLOOD_LOG_FORMAT", "json");
    let output = by_variable.output().unwrap();
    assert_eq!(lines(&String::from_utf8_lossy(&output.stderr)).len(), 1);
}
