//! The client commands of the real binary, in a pipe and in a pseudo-terminal.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::processes::{Server, binary, model_copy, spec};

mod jobs;
mod judging;
mod names;
mod pages;
mod pull;
mod records;
mod resources;
mod signing_in;
mod submitting;
mod terminal;
mod verify;

/// A user with an empty home directory, and optionally a server.
pub struct User {
    pub dir: TempDir,
    pub variables: Vec<(String, String)>,
}

/// The result of a command.
#[derive(Debug)]
pub struct Done {
    pub code: i32,
    pub out: String,
    pub err: String,
}

impl Done {
    /// Standard output of a command that succeeded.
    pub fn ok(self) -> String {
        assert_eq!(self.code, 0, "{self:?}");
        self.out
    }

    pub fn json(self) -> Value {
        let text = self.ok();
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
    }

    /// Asserts the exit code, and that standard error contains this text.
    #[track_caller]
    pub fn failed(&self, code: i32, said: &str) {
        assert!(self.code == code && self.err.contains(said), "not {code} with '{said}': {self:?}");
    }
}

impl User {
    pub fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap(), variables: Vec::new() }
    }

    /// A user whose environment variable names this server.
    pub fn of(url: &str) -> Self {
        let user = Self::new();
        Self { variables: vec![("RLOOD_SERVER".to_owned(), url.to_owned())], ..user }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        std::fs::write(&path, content).unwrap();
        path
    }

    /// The binary in the user's folder, with only the user's rlood variables.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(binary());
        self.prepare(&mut command);
        command.args(arguments);
        command
    }

    pub fn prepare(&self, command: &mut Command) {
        for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("RLOOD_")) {
            command.env_remove(name);
        }
        for name in [
            "XDG_CONFIG_HOME",
            "XDG_STATE_HOME",
            "XDG_CACHE_HOME",
            "NO_COLOR",
            "COMPLETE",
            "HF_TOKEN",
            "HF_TOKEN_PATH",
            "HF_HOME",
        ] {
            command.env_remove(name);
        }
        command.env("HOME", self.dir.path()).current_dir(self.dir.path()).stdin(Stdio::null());
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
    }

    pub fn run(&self, arguments: &[&str]) -> Done {
        self.run_with(arguments, "")
    }

    /// Runs a command with this standard input.
    pub fn run_with(&self, arguments: &[&str], input: &str) -> Done {
        let mut command = self.command(arguments);
        if !input.is_empty() {
            command.stdin(Stdio::piped());
        }
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        if let Some(mut stdin) = child.stdin.take() {
            stdin.write_all(input.as_bytes()).unwrap();
        }
        let output = child.wait_with_output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        Done { code: output.status.code().unwrap_or(-1), out: text(output.stdout), err: text(output.stderr) }
    }

    /// Submits a document; returns the job's id.
    pub fn submit(&self, document: &Value) -> String {
        self.write("job.json", document.to_string());
        self.run(&["submit", "job.json"]).ok().trim().to_owned()
    }
}

/// A server with a model called `tiny`, and a user of it. `devices` are its workers'.
pub fn start(devices: &str) -> (Server, User) {
    let user = User::new();
    let server = Server::start(&user.path("data"), devices);
    let user = User { variables: vec![("RLOOD_SERVER".to_owned(), server.url.clone())], ..user };
    let model = model_copy(&user.path("model"));
    user.run(&["models", "add", "tiny", model.to_str().unwrap()]).ok();
    (server, user)
}

/// A job with this name and number of steps.
pub fn named(name: &str, max_steps: u64) -> Value {
    let mut job = spec("tiny", max_steps);
    job["name"] = json!(name);
    job
}

/// A job that does not end by itself.
pub fn endless(name: &str) -> Value {
    let mut job = named(name, 1_000_000);
    job["checkpoints"]["every_steps"] = json!(2);
    job
}

pub fn mode_of(path: &Path) -> u32 {
    use std::os::unix::fs::PermissionsExt;
    std::fs::metadata(path).unwrap().permissions().mode() & 0o777
}
