//! Python functions as rewards: the process that serves them by contract v1, for `rlood reward serve` and for rewards of
//! type `python`.
//!
//! The process runs the program in `python/`, which is part of this binary. It inherits a listening socket as standard output
//! and one end of a socket pair as standard input. The pair carries the program and its settings there and one line of JSON
//! back; its end is the order to leave, so that the process never outlives the one that started it. Everything here blocks.

mod find;
mod function;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::Deserialize;
use serde_json::{Value, json};

pub use find::{Target, read_targets};
pub use function::{PythonFunction, PythonFunctions};

/// The program: three files that are one.
const PROGRAM: &str = concat!(
    include_str!("python/functions.py"),
    "\n\n",
    include_str!("python/processes.py"),
    "\n\n",
    include_str!("python/server.py"),
    "\n\nmain()\n"
);

/// Reads the program from standard input, a socket, and runs it. It must run in any Python, to say which one is needed.
const BOOT: &str = r#"
import os, sys
def read(n):
    data = b""
    while len(data) < n:
        piece = os.read(0, n - len(data))
        if not piece:
            os._exit(0)
        data += piece
    return data
if sys.version_info < (3, 8):
    text = '{"event": "failed", "code": "python_too_old", "message": "%s is Python %d.%d, and 3.8 or newer is needed: give --python PATH, or set RLOOD_PYTHON"}\n'
    os.write(0, (text % ((sys.executable or "python",) + tuple(sys.version_info[:2]))).encode())
    os._exit(3)
source = read(int(read(8), 16)).decode()
exec(compile(source, "<rlood reward serve>", "exec"), {"__name__": "rlood_reward_serve", "__file__": "<rlood reward serve>", "SOURCE": source})
"#;

/// Names the Python that runs functions, where none is given.
pub const PYTHON: &str = "RLOOD_PYTHON";
/// How long a file may take to be loaded.
const LOAD_WITHIN: Duration = Duration::from_secs(300);
/// What a process has to end in good order: what is under way (10 s) and a little more.
const STOP_WITHIN: Duration = Duration::from_secs(15);
/// What a process has to end at once.
const END_WITHIN: Duration = Duration::from_secs(5);
const POLL: Duration = Duration::from_millis(20);
/// Lines of standard error that are kept for the report of a process that could not start.
const TAIL_LINES: usize = 12;
/// A longer line of standard error is logged in pieces.
const LINE_BYTES: u64 = 8 << 10;

/// Why functions cannot be served.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PythonError {
    /// What was asked for cannot be read.
    #[error("{0}")]
    Setting(String),
    /// There is no Python to run them.
    #[error(
        "no Python was found (tried {tried}): install Python 3.8 or newer, or name it with --python PATH or RLOOD_PYTHON"
    )]
    NoPython {
        /// The programs, separated by commas.
        tried: String,
    },
    /// The process could not be started, or left before it was ready.
    #[error("Python could not be started: {0}")]
    NotStarted(String),
    /// The file or a function cannot be used: the process says why.
    #[error("{message}")]
    Failed {
        /// Stable, snake_case: `load_failed`, `function_not_found`, `file_not_found`, `file_changed`, `python_too_old`.
        code: String,
        /// In words.
        message: String,
    },
}

/// How functions are served.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The Python program; None = that of `RLOOD_PYTHON`, else python3 or python.
    pub python: Option<PathBuf>,
    /// Files and functions.
    pub targets: Vec<Target>,
    /// Worker processes.
    pub processes: u32,
    /// Most samples of one call; None = those of a request.
    pub batch_size: Option<u32>,
    /// The longest call.
    pub call_timeout: Duration,
    /// Load files again when they change.
    pub reload: bool,
    /// `whsec_…`; requests must be signed with one of them. Empty = everybody is answered.
    pub secrets: Vec<String>,
    /// Names by which clients may call the server, besides its addresses.
    pub allowed_hosts: Vec<String>,
    /// Connections at once.
    pub max_connections: u32,
    /// The working directory; None = this process's.
    pub directory: Option<PathBuf>,
    /// What the functions print goes to the log under this name; None = to standard error as it is.
    pub log_as: Option<String>,
}

impl Settings {
    /// One process, requests not divided, calls as long as their requests.
    pub fn new(targets: Vec<Target>) -> Self {
        Self {
            python: None,
            targets,
            processes: 1,
            batch_size: None,
            call_timeout: Duration::from_secs(86_400),
            reload: false,
            secrets: Vec::new(),
            allowed_hosts: Vec::new(),
            max_connections: 256,
            directory: None,
            log_as: None,
        }
    }

    fn message(&self) -> Value {
        json!({
            "role": "server", "boot": BOOT, "targets": self.targets, "processes": self.processes.max(1),
            "batch_size": self.batch_size.unwrap_or(0), "call_timeout_s": self.call_timeout.as_secs_f64(),
            "load_timeout_s": LOAD_WITHIN.as_secs(), "reload": self.reload, "secrets": self.secrets,
            "allowed_hosts": self.allowed_hosts, "max_connections": self.max_connections,
        })
    }
}

/// The line of a process that has started, or could not.
#[derive(Debug, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
enum Started {
    Ready { functions: Vec<String>, python: String },
    Failed { code: String, message: String },
}

/// A process that serves functions; it ends when this is dropped.
#[derive(Debug)]
pub struct PythonServer {
    child: Option<Child>,
    channel: UnixStream,
    /// Where it listens.
    pub address: SocketAddr,
    /// The functions, each of which has an endpoint of its name.
    pub functions: Vec<String>,
    /// Python's version.
    pub version: String,
}

impl PythonServer {
    /// Starts the process, which answers on `listener`, and waits until it has loaded the functions.
    ///
    /// # Errors
    /// When there is no Python, or a file or function cannot be used; says which.
    pub fn start(listener: &TcpListener, settings: &Settings) -> Result<Self, PythonError> {
        let failed = |doing: &str, error: std::io::Error| PythonError::NotStarted(format!("cannot {doing}: {error}"));
        let address = listener.local_addr().map_err(|error| failed("tell the address", error))?;
        let (mut channel, theirs) = UnixStream::pair().map_err(|error| failed("make a socket pair", error))?;
        let mut child = spawn(listener, theirs, settings)?;
        let tail = Tail::default();
        if let (Some(stderr), Some(name)) = (child.stderr.take(), &settings.log_as) {
            let (tail, name) = (tail.clone(), name.clone());
            std::thread::spawn(move || tail.follow(stderr, &name));
        }
        let started = tell(&mut channel, settings).and_then(|()| listen(&channel));
        let mut server = Self { child: Some(child), channel, address, functions: Vec::new(), version: String::new() };
        match started {
            Ok(Some(Started::Ready { functions, python })) => {
                (server.functions, server.version) = (functions, python);
                Ok(server)
            }
            Ok(Some(Started::Failed { code, message })) => Err(PythonError::Failed { code, message }),
            Ok(None) => Err(server.stillborn(None, &tail)),
            Err(error) => Err(server.stillborn(Some(error), &tail)),
        }
    }

    /// Whether the process has ended, and how.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.as_mut()?.try_wait().ok().flatten()
    }

    /// Ends the process in good order: what is under way is answered.
    pub fn stop(mut self) {
        // A process that is gone already cannot be told.
        let _ = self.channel.write_all(b"s");
        if let Some(child) = &mut self.child {
            wait_or_kill(child, STOP_WITHIN);
        }
    }

    /// Why there is no line of a process that should have started.
    fn stillborn(mut self, error: Option<std::io::Error>, tail: &Tail) -> PythonError {
        let late = error
            .is_some_and(|error| matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut));
        if late {
            return PythonError::NotStarted(format!("it was not ready within {} s", LOAD_WITHIN.as_secs()));
        }
        let status = self.child.as_mut().and_then(|child| {
            wait_or_kill(child, END_WITHIN);
            child.try_wait().ok().flatten()
        });
        let status = status.map_or_else(|| "it left".to_owned(), |status| status.to_string());
        let said = tail.text();
        PythonError::NotStarted(if said.is_empty() {
            format!("it ended before it was ready ({status})")
        } else {
            format!("it ended before it was ready ({status}); its last words: {said}")
        })
    }
}

impl Drop for PythonServer {
    fn drop(&mut self) {
        let _ = self.channel.shutdown(std::net::Shutdown::Both);
        if let Some(mut child) = self.child.take() {
            // The process ends by itself; a thread waits for it, so that it leaves no zombie.
            std::thread::spawn(move || wait_or_kill(&mut child, END_WITHIN));
        }
    }
}

fn wait_or_kill(child: &mut Child, within: Duration) {
    let until = Instant::now() + within;
    while Instant::now() < until {
        match child.try_wait() {
            Ok(None) => std::thread::sleep(POLL),
            Ok(Some(_)) | Err(_) => return,
        }
    }
    let _ = child.kill();
    let _ = child.wait();
}

/// Starts the first Python that there is.
fn spawn(listener: &TcpListener, theirs: UnixStream, settings: &Settings) -> Result<Child, PythonError> {
    let failed = |error: std::io::Error| PythonError::NotStarted(error.to_string());
    let named = settings.python.clone().or_else(|| std::env::var_os(PYTHON).map(PathBuf::from));
    let programs = match named.filter(|path| !path.as_os_str().is_empty()) {
        Some(program) => vec![program],
        None => vec![PathBuf::from("python3"), PathBuf::from("python")],
    };
    for program in &programs {
        let mut command = Command::new(program);
        command
            .args(["-c", BOOT])
            .stdin(OwnedFd::from(theirs.try_clone().map_err(failed)?))
            .stdout(OwnedFd::from(listener.try_clone().map_err(failed)?))
            .stderr(if settings.log_as.is_some() { Stdio::piped() } else { Stdio::inherit() })
            // Of a group of its own: it ends what a function has started along with itself, and Ctrl-C is not for it.
            .process_group(0);
        // Keys and tokens of this process are not for the functions.
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("RLOOD_")) {
            command.env_remove(name);
        }
        if let Some(directory) = &settings.directory {
            command.current_dir(directory);
        }
        match command.spawn() {
            Ok(child) => return Ok(child),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(PythonError::NotStarted(format!("{}: {error}", program.display()))),
        }
    }
    let tried = programs.iter().map(|program| program.display().to_string()).collect::<Vec<_>>().join(", ");
    Err(PythonError::NoPython { tried })
}

/// Sends the program and its settings.
fn tell(channel: &mut UnixStream, settings: &Settings) -> std::io::Result<()> {
    let settings = settings.message().to_string();
    let length = u32::try_from(settings.len()).map_err(std::io::Error::other)?;
    channel.write_all(format!("{:08x}", PROGRAM.len()).as_bytes())?;
    channel.write_all(PROGRAM.as_bytes())?;
    channel.write_all(&length.to_be_bytes())?;
    channel.write_all(settings.as_bytes())
}

/// Waits for the line; None = the process left without one.
fn listen(channel: &UnixStream) -> std::io::Result<Option<Started>> {
    channel.set_read_timeout(Some(LOAD_WITHIN + Duration::from_secs(30)))?;
    let mut line = String::new();
    BufReader::new(channel).take(1 << 20).read_line(&mut line)?;
    Ok(serde_json::from_str(&line).ok())
}

/// The last lines of a process's standard error.
#[derive(Debug, Clone, Default)]
struct Tail(Arc<Mutex<std::collections::VecDeque<String>>>);

impl Tail {
    /// Logs what comes, to its end.
    fn follow(&self, stderr: ChildStderr, name: &str) {
        let mut reader = BufReader::new(stderr);
        let mut line = Vec::new();
        while let Ok(1..) = (&mut reader).take(LINE_BYTES).read_until(b'\n', &mut line) {
            let text = String::from_utf8_lossy(&line).trim_end().to_owned();
            line.clear();
            tracing::info!(rewards = name, "{text}");
            let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            if lines.len() == TAIL_LINES {
                lines.pop_front();
            }
            lines.push_back(text);
        }
    }

    fn text(&self) -> String {
        // What was written last may still be on its way.
        std::thread::sleep(POLL);
        let lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        lines.iter().map(String::as_str).collect::<Vec<_>>().join(" / ")
    }
}
