//! Python functions as rewards, and Python classes as environments: a child process that serves them by contract v1, for
//! `rlood reward serve`, for rewards of type `python`, and for `rlood env serve`.
//!
//! The process runs the program in `python/`, which is embedded in this binary. It inherits a listening socket as standard
//! output and one end of a socket pair as standard input. The pair carries the program and its settings to the process and one
//! line of JSON back. When the pair closes, the process exits, so it never outlives its parent. The functions here block.

mod function;
mod targets;

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

pub use function::{PythonFunction, PythonFunctions};
pub use targets::{Target, Wanted, read_targets};

/// The embedded Python program: the files of `python/`, concatenated.
const PROGRAM: &str = concat!(
    include_str!("python/functions.py"),
    "\n\n",
    include_str!("python/processes.py"),
    "\n\n",
    include_str!("python/server.py"),
    "\n\n",
    include_str!("python/tools.py"),
    "\n\n",
    include_str!("python/games.py"),
    "\n\n",
    include_str!("python/episodes.py"),
    "\n\nmain()\n"
);

/// Python code passed with `-c`: reads the embedded program from standard input, a socket, and runs it. This code must run in any
/// Python version, to report which version is required.
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

/// Environment variable that names the Python program to run reward functions with.
pub const PYTHON: &str = "RLOOD_PYTHON";
/// Time limit for the start of the Python process, which loads the user's file.
const LOAD_TIMEOUT: Duration = Duration::from_secs(300);
/// Time limit for a graceful exit of the Python process: 10 s for running calls, and a margin.
const STOP_TIMEOUT: Duration = Duration::from_secs(15);
/// Time limit for an immediate exit of the Python process.
const KILL_TIMEOUT: Duration = Duration::from_secs(5);
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Number of lines of standard error that are kept for the error of a Python process that could not start.
const TAIL_LINES: usize = 12;
/// Maximum length in bytes of one logged line of the Python process's output; a longer line is logged in pieces.
const MAX_LINE_BYTES: u64 = 8 << 10;

/// Error of a process that serves Python functions.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PythonError {
    /// A file, function name or setting is not valid.
    #[error("{0}")]
    Setting(String),
    /// No Python program was found.
    #[error(
        "no Python found (tried {tried}): install Python 3.8 or newer, or set its path with --python PATH or RLOOD_PYTHON"
    )]
    NoPython {
        /// Names of the Python programs that were tried, separated by commas.
        tried: String,
    },
    /// The Python process could not be started, or exited before it was ready.
    #[error("Python could not be started: {0}")]
    NotStarted(String),
    /// The Python process reports that the user's file or a function in it cannot be used.
    #[error("{message}")]
    Failed {
        /// Stable error code: `load_failed`, `function_not_found`, `class_not_found`, `class_not_usable`, `tool_not_usable`,
        /// `state_in_use`, `file_not_found`, `file_changed` or `python_too_old`.
        code: String,
        /// Human-readable description of the error.
        message: String,
    },
}

/// The kind of service of a Python process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Service {
    /// Functions that score completions as rewards.
    Rewards,
    /// Classes whose objects are environments of episodes.
    Environments {
        /// Directory that keeps the requests and answers of each episode; `None` keeps them in memory alone.
        state: Option<PathBuf>,
        /// Time without a request after which the object of an episode is dropped.
        forget_after: Duration,
    },
}

/// Settings of a Python process that serves reward functions or environments.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The kind of service that the process offers.
    pub service: Service,
    /// Path of the Python program; `None` uses `RLOOD_PYTHON`, else python3 or python.
    pub python: Option<PathBuf>,
    /// Python files, and the functions or classes in them to serve.
    pub targets: Vec<Target>,
    /// Number of processes that run the functions concurrently.
    pub processes: u32,
    /// Maximum number of samples per function call; `None` passes all samples of a request.
    pub batch_size: Option<u32>,
    /// Time limit for one call of a function.
    pub call_timeout: Duration,
    /// Whether to reload Python files when they change.
    pub reload: bool,
    /// Signing secrets, `whsec_…`. A request must be signed with one of them; an empty list accepts unsigned requests.
    pub secrets: Vec<String>,
    /// Host names that clients may use in the `Host` header, besides the server's addresses.
    pub allowed_hosts: Vec<String>,
    /// Maximum number of concurrent connections to the Python process.
    pub max_connections: u32,
    /// Working directory of the Python process; `None` keeps the directory of this process.
    pub directory: Option<PathBuf>,
    /// Name under which output of the Python functions is logged; `None` passes the output to standard error.
    pub log_as: Option<String>,
}

impl Settings {
    /// Returns the default settings: one worker process, all samples of a request in one call, and no practical time
    /// limit for a call.
    pub fn new(targets: Vec<Target>) -> Self {
        Self {
            service: Service::Rewards,
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
        let (role, state, forget_after) = match &self.service {
            Service::Rewards => ("server", None, None),
            Service::Environments { state, forget_after } => ("environments", state.as_ref(), Some(forget_after)),
        };
        json!({
            "role": role, "state": state, "forget_after_s": forget_after.map(Duration::as_secs_f64), "boot": BOOT, "targets": self.targets, "processes": self.processes.max(1),
            "batch_size": self.batch_size.unwrap_or(0), "call_timeout_s": self.call_timeout.as_secs_f64(),
            "load_timeout_s": LOAD_TIMEOUT.as_secs(), "reload": self.reload, "secrets": self.secrets,
            "allowed_hosts": self.allowed_hosts, "max_connections": self.max_connections,
        })
    }
}

/// Line of JSON that the Python process sends when it has started or failed to start.
#[derive(Debug, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
enum Started {
    Ready { functions: Vec<String>, python: String },
    Failed { code: String, message: String },
}

/// A running Python process that serves reward functions or environments. Dropping this value stops the process.
#[derive(Debug)]
pub struct PythonServer {
    child: Option<Child>,
    channel: UnixStream,
    /// Address on which the Python process listens.
    pub address: SocketAddr,
    /// Names of the Python functions or classes; the URL path of each is its name.
    pub functions: Vec<String>,
    /// Version of the Python that runs them, such as 3.12.1.
    pub version: String,
}

impl PythonServer {
    /// Starts the Python process, which answers on `listener`, and waits until it has loaded the functions.
    ///
    /// # Errors
    /// Fails when there is no Python, or a file or function cannot be used; the message names it.
    pub fn start(listener: &TcpListener, settings: &Settings) -> Result<Self, PythonError> {
        let failed = |doing: &str, error: std::io::Error| PythonError::NotStarted(format!("cannot {doing}: {error}"));
        let address = listener
            .local_addr()
            .map_err(|error| failed("get the address of the socket that the Python process listens on", error))?;
        let (mut channel, child_end) =
            UnixStream::pair().map_err(|error| failed("create a pair of sockets for the Python process", error))?;
        let mut child = spawn(listener, child_end, settings)?;
        let tail = Tail::default();
        if let (Some(stderr), Some(name)) = (child.stderr.take(), &settings.log_as) {
            let (tail, name) = (tail.clone(), name.clone());
            std::thread::spawn(move || tail.follow(stderr, &name));
        }
        let started = send_program(&mut channel, settings).and_then(|()| read_started(&channel));
        let mut server = Self { child: Some(child), channel, address, functions: Vec::new(), version: String::new() };
        match started {
            Ok(Some(Started::Ready { functions, python })) => {
                (server.functions, server.version) = (functions, python);
                Ok(server)
            }
            Ok(Some(Started::Failed { code, message })) => Err(PythonError::Failed { code, message }),
            Ok(None) => Err(server.start_error(None, &tail)),
            Err(error) => Err(server.start_error(Some(error), &tail)),
        }
    }

    /// Returns the exit status if the Python process has exited.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.as_mut()?.try_wait().ok().flatten()
    }

    /// Stops the Python process after it has answered its running requests.
    pub fn stop(mut self) {
        // The write fails if the Python process has already exited.
        let _ = self.channel.write_all(b"s");
        if let Some(child) = &mut self.child {
            wait_or_kill(child, STOP_TIMEOUT);
        }
    }

    /// Returns the error for a Python process that exited or timed out before it was ready.
    fn start_error(mut self, error: Option<std::io::Error>, tail: &Tail) -> PythonError {
        let late = error
            .is_some_and(|error| matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut));
        if late {
            return PythonError::NotStarted(format!(
                "the Python process was not ready within {} s",
                LOAD_TIMEOUT.as_secs()
            ));
        }
        let status = self.child.as_mut().and_then(|child| {
            wait_or_kill(child, KILL_TIMEOUT);
            child.try_wait().ok().flatten()
        });
        let status = status.map_or_else(|| "exit status unknown".to_owned(), |status| status.to_string());
        let output = tail.text();
        PythonError::NotStarted(if output.is_empty() {
            format!("the Python process ended before it was ready ({status})")
        } else {
            format!("the Python process ended before it was ready ({status}); its last output: {output}")
        })
    }
}

impl Drop for PythonServer {
    fn drop(&mut self) {
        let _ = self.channel.shutdown(std::net::Shutdown::Both);
        if let Some(mut child) = self.child.take() {
            // The Python process exits by itself when its socket closes. A thread waits for it, so that it does not become a
            // zombie.
            std::thread::spawn(move || wait_or_kill(&mut child, KILL_TIMEOUT));
        }
    }
}

fn wait_or_kill(child: &mut Child, within: Duration) {
    let until = Instant::now() + within;
    while Instant::now() < until {
        match child.try_wait() {
            Ok(None) => std::thread::sleep(POLL_INTERVAL),
            Ok(Some(_)) | Err(_) => return,
        }
    }
    let _ = child.kill();
    let _ = child.wait();
}

/// Starts the first of the candidate Python programs that exists.
fn spawn(listener: &TcpListener, child_end: UnixStream, settings: &Settings) -> Result<Child, PythonError> {
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
            .stdin(OwnedFd::from(child_end.try_clone().map_err(failed)?))
            .stdout(OwnedFd::from(listener.try_clone().map_err(failed)?))
            .stderr(if settings.log_as.is_some() { Stdio::piped() } else { Stdio::inherit() })
            // The Python process gets its own process group: it kills the group's children when it exits, and Ctrl-C in the
            // terminal does not reach it.
            .process_group(0);
        // API keys and tokens in this process's environment must not be visible to the user's functions.
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

/// Sends the embedded program and its settings to the Python process.
fn send_program(channel: &mut UnixStream, settings: &Settings) -> std::io::Result<()> {
    let settings = settings.message().to_string();
    let length = u32::try_from(settings.len()).map_err(std::io::Error::other)?;
    channel.write_all(format!("{:08x}", PROGRAM.len()).as_bytes())?;
    channel.write_all(PROGRAM.as_bytes())?;
    channel.write_all(&length.to_be_bytes())?;
    channel.write_all(settings.as_bytes())
}

/// Waits for the line of JSON that reports the start; `None` if the Python process exited without one.
fn read_started(channel: &UnixStream) -> std::io::Result<Option<Started>> {
    channel.set_read_timeout(Some(LOAD_TIMEOUT + Duration::from_secs(30)))?;
    let mut line = String::new();
    BufReader::new(channel).take(1 << 20).read_line(&mut line)?;
    Ok(serde_json::from_str(&line).ok())
}

/// The last lines that the Python process wrote to standard error.
#[derive(Debug, Clone, Default)]
struct Tail(Arc<Mutex<std::collections::VecDeque<String>>>);

impl Tail {
    /// Logs the lines of the process's standard error until the stream ends.
    fn follow(&self, stderr: ChildStderr, name: &str) {
        let mut reader = BufReader::new(stderr);
        let mut line = Vec::new();
        while let Ok(1..) = (&mut reader).take(MAX_LINE_BYTES).read_until(b'\n', &mut line) {
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
        // The last lines of standard error may not have been read yet.
        std::thread::sleep(POLL_INTERVAL);
        let lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        lines.iter().map(String::as_str).collect::<Vec<_>>().join(" / ")
    }
}
