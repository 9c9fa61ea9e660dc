//! The processes of the ranks: starts them, reads their connections, kills them.
//!
//! Each rank is a process group of its own. A rank is never asked to end: it is killed with its group, and it ends by itself when its
//! connection closes or this process dies.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::{Value, json};

use super::environment::Environment;
use super::message::Message;

/// Maximum length of a message: the completions of a rank's part of a large block, with the state of its sampler.
const MAX_MESSAGE_BYTES: u64 = 64 << 20;
/// Number of messages that wait to be handled. A rank that sends more has to wait.
const MAX_WAITING_MESSAGES: usize = 64;
/// Number of lines kept of each rank's output.
const TAIL_LINES: usize = 100;
/// Number of bytes kept of each line of a rank's output.
const TAIL_LINE_BYTES: usize = 1000;
/// Variables that ranks inherit. The worker's own, which hold its token, are not among them.
const INHERITED: [&str; 8] = ["HOME", "USER", "LANG", "LD_LIBRARY_PATH", "LD_PRELOAD", "TMPDIR", "TZ", "VIRTUAL_ENV"];
const INHERITED_PREFIXES: [&str; 7] = ["LC_", "CUDA_", "NCCL_", "NVIDIA_", "TORCH_", "PYTORCH_", "GLOO_"];

/// A message of a connection, or its end.
pub(super) enum Incoming {
    /// A message that was understood.
    Message(Box<Message>),
    /// The connection sent bytes that are not a message: why.
    Malformed(String),
    /// The connection was closed by the rank.
    Closed,
}

/// The processes of all ranks and their connections.
pub(super) struct Ranks {
    listener: UnixListener,
    children: Vec<Child>,
    connections: Vec<UnixStream>,
    sender: SyncSender<(usize, Incoming)>,
    receiver: Receiver<(usize, Incoming)>,
    tails: Vec<Tail>,
    /// The directory of the socket, short enough for the limit of 107 bytes.
    _socket_dir: tempfile::TempDir,
}

/// The settings with which the ranks are started.
pub(super) struct Launch<'a> {
    /// The Python environment of the ranks.
    pub(super) environment: &'a Environment,
    /// Directory for the runner, its configuration and caches.
    pub(super) dir: &'a Path,
    /// Configuration of the runner.
    pub(super) config: &'a Value,
    /// Number of processes that train together.
    pub(super) ranks: usize,
    /// Number of compute threads of each process.
    pub(super) threads: u32,
}

impl Ranks {
    /// Starts one process for each rank.
    ///
    /// # Errors
    /// Fails if a file cannot be written or a process cannot be started.
    pub(super) fn start(launch: &Launch<'_>) -> std::io::Result<Self> {
        let socket_dir = tempfile::Builder::new().prefix("rlood-trl-").tempdir()?;
        let socket = socket_dir.path().join("s");
        let listener = UnixListener::bind(&socket)?;
        std::fs::set_permissions(&socket, std::fs::Permissions::from_mode(0o600))?;
        listener.set_nonblocking(true)?;
        let runner = launch.dir.join("runner.py");
        std::fs::write(&runner, launch.environment.runner)?;
        let config = launch.dir.join("runner.json");
        std::fs::write(&config, serde_json::to_vec(launch.config)?)?;
        let (sender, receiver) = sync_channel(MAX_WAITING_MESSAGES);
        let mut ranks = Self {
            listener,
            children: Vec::new(),
            connections: Vec::new(),
            sender,
            receiver,
            tails: Vec::new(),
            _socket_dir: socket_dir,
        };
        let port = free_port()?;
        for rank in 0..launch.ranks {
            let mut command = command(launch, rank, port);
            command.arg(&runner).env("RLOOD_RUNNER_SOCKET", &socket).env("RLOOD_RUNNER_CONFIG", &config);
            let (reader, writer) = std::io::pipe()?;
            command.stdout(writer.try_clone()?).stderr(writer);
            let child = command.spawn()?;
            // The command holds the pipe's writing end, which must close for the reader to end.
            drop(command);
            ranks.children.push(child);
            ranks.tails.push(Tail::read(reader)?);
        }
        Ok(ranks)
    }

    /// Accepts connections that wait. Each is read by its own thread.
    pub(super) fn accept(&mut self) -> std::io::Result<()> {
        loop {
            match self.listener.accept() {
                Ok((stream, _)) if self.connections.len() < self.children.len() => {
                    stream.set_nonblocking(false)?;
                    let (connection, sender) = (self.connections.len(), self.sender.clone());
                    let reader = stream.try_clone()?;
                    self.connections.push(stream);
                    std::thread::Builder::new()
                        .name("trl-rank".to_owned())
                        .spawn(move || read_messages(reader, connection, &sender))?;
                }
                // More connections than ranks: they are closed.
                Ok(_) => {}
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Waits for the next message, and returns it with the number of its connection; `None` if none arrived in time.
    pub(super) fn next(&self, timeout: Duration) -> Option<(usize, Incoming)> {
        // This value holds a sender, so the channel is never closed, and an error means that the time has passed.
        self.receiver.recv_timeout(timeout).ok()
    }

    /// Answers a question of a connection.
    pub(super) fn answer(&self, connection: usize, question: u64, mut answer: Value) -> std::io::Result<()> {
        answer["re"] = json!(question);
        let mut line = serde_json::to_vec(&answer)?;
        line.push(b'\n');
        match self.connections.get(connection) {
            Some(mut stream) => stream.write_all(&line),
            None => Err(std::io::ErrorKind::NotConnected.into()),
        }
    }

    /// Returns the number and status of a rank that has ended.
    pub(super) fn ended(&mut self) -> Option<(usize, ExitStatus)> {
        let statuses = self.children.iter_mut().enumerate();
        statuses.filter_map(|(rank, child)| Some((rank, child.try_wait().ok()??))).find(|(_, status)| !status.success())
    }

    /// Returns whether all ranks have ended.
    pub(super) fn all_ended(&mut self) -> bool {
        self.children.iter_mut().all(|child| !matches!(child.try_wait(), Ok(None)))
    }

    /// Returns the last lines that a rank printed.
    pub(super) fn tail(&self, rank: usize) -> String {
        self.tails.get(rank).map(Tail::text).unwrap_or_default()
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.children {
            if matches!(child.try_wait(), Ok(Some(status)) if status.success()) {
                // It ended by itself some time ago, so its id may belong to another process by now.
                continue;
            }
            if let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
                // A group that has ended needs no kill.
                let _ = kill_process_group(pid, Signal::KILL);
            }
            let _ = child.kill();
            let _ = child.wait();
        }
        for connection in &self.connections {
            // Ends the thread that reads the connection. A closed connection needs no shutdown.
            let _ = connection.shutdown(Shutdown::Both);
        }
        // A thread may wait for room in the channel.
        while self.receiver.try_recv().is_ok() {}
    }
}

fn command(launch: &Launch<'_>, rank: usize, port: u16) -> Command {
    let environment = launch.environment;
    let mut command = Command::new(&environment.python);
    command.env_clear().stdin(Stdio::null()).current_dir(launch.dir).process_group(0);
    let inherits =
        |name: &str| INHERITED.contains(&name) || INHERITED_PREFIXES.iter().any(|prefix| name.starts_with(prefix));
    command.envs(std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(inherits)));
    let mut path: Vec<PathBuf> = environment.python.parent().map(Path::to_owned).into_iter().collect();
    path.extend(std::env::var_os("PATH").iter().flat_map(std::env::split_paths));
    if let Ok(path) = std::env::join_paths(path) {
        command.env("PATH", path);
    }
    let visible: Vec<String> = environment.gpus.iter().take(launch.ranks).map(u32::to_string).collect();
    command
        .env("RANK", rank.to_string())
        .env("WORLD_SIZE", launch.ranks.to_string())
        .env("LOCAL_WORLD_SIZE", launch.ranks.to_string())
        .env("MASTER_ADDR", "127.0.0.1")
        .env("MASTER_PORT", port.to_string())
        .env("OMP_NUM_THREADS", launch.threads.to_string())
        .env("CUDA_VISIBLE_DEVICES", visible.join(","))
        .env("HF_HOME", launch.dir.join("hf"))
        // Nothing may be fetched: the model's files are here, and packages would ask the hub for kernels.
        .env("HF_HUB_OFFLINE", "1")
        .env("TOKENIZERS_PARALLELISM", "false")
        .env("PYTHONUNBUFFERED", "1");
    let is_simulated = launch.config["simulate_gpu_ranks"] == Value::Bool(true);
    if is_simulated {
        command.env("DS_ACCELERATOR", "cpu");
    }
    if launch.ranks > 1 || is_simulated || !launch.config["rloo"]["deepspeed"].is_null() {
        // A single rank without this variable trains without a process group.
        command.env("LOCAL_RANK", rank.to_string());
    }
    command
}

/// Returns a port of the loopback address that was free a moment ago.
fn free_port() -> std::io::Result<u16> {
    Ok(std::net::TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port())
}

fn read_messages(stream: UnixStream, connection: usize, sender: &SyncSender<(usize, Incoming)>) {
    let mut reader = BufReader::new(stream);
    let mut line = Vec::new();
    loop {
        line.clear();
        let incoming = match (&mut reader).take(MAX_MESSAGE_BYTES).read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => Incoming::Closed,
            Ok(_) if line.last() != Some(&b'\n') => {
                Incoming::Malformed(format!("a message without end, or longer than {MAX_MESSAGE_BYTES} bytes"))
            }
            Ok(_) => match serde_json::from_slice(&line) {
                Ok(message) => Incoming::Message(Box::new(message)),
                Err(error) => Incoming::Malformed(format!("a message that is not understood: {error}")),
            },
        };
        let is_last = !matches!(incoming, Incoming::Message(_));
        // Sending fails when the run has ended.
        if sender.send((connection, incoming)).is_err() || is_last {
            return;
        }
    }
}

/// The last lines that a rank printed.
#[derive(Clone, Default)]
struct Tail(Arc<Mutex<VecDeque<String>>>);

impl Tail {
    /// Starts to read a rank's output, however much it is.
    fn read(output: std::io::PipeReader) -> std::io::Result<Self> {
        let tail = Self::default();
        let lines = tail.clone();
        std::thread::Builder::new().name("trl-output".to_owned()).spawn(move || {
            let mut reader = BufReader::new(output);
            let mut line = Vec::new();
            loop {
                line.clear();
                match (&mut reader).take(TAIL_LINE_BYTES as u64).read_until(b'\n', &mut line) {
                    Ok(0) | Err(_) => return,
                    Ok(_) => lines.push(String::from_utf8_lossy(&line).trim_end().to_owned()),
                }
            }
        })?;
        Ok(tail)
    }

    fn push(&self, line: String) {
        tracing::debug!(line, "a rank printed");
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.len() == TAIL_LINES {
            lines.pop_front();
        }
        lines.push_back(line);
    }

    fn text(&self) -> String {
        let lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        lines.iter().map(String::as_str).collect::<Vec<_>>().join("\n")
    }
}
