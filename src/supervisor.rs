//! Runs one worker process per device: starts it, restarts it with back-off, and forwards the shutdown.
//!
//! A child process gets its token in the environment and a pipe as standard input. When the server dies for any reason, the pipe
//! closes and the child exits. The child's standard error is forwarded, and its last lines are kept for the report of a crash.

pub mod one_shot;
pub mod serving;

use std::collections::VecDeque;
use std::io::Write;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::config::{COMPUTE_THREADS, Device, GPU_MEMORY, Isa, LogFormat, TrlArgs};
use crate::id::WorkerId;

/// Initial delay before a worker process is restarted; it doubles after each early exit.
const FIRST_RESTART_DELAY: Duration = Duration::from_millis(250);
/// Maximum delay before a worker process is restarted.
const MAX_RESTART_DELAY: Duration = Duration::from_secs(30);
/// A child that ran this long did not fail at startup: the delay of the next restart is reset. Killed children must not delay jobs;
/// repeated crashes are counted per job.
const STABLE: Duration = Duration::from_secs(2);
/// Number of lines kept of a child's standard error.
const TAIL_LINES: usize = 30;
/// Number of bytes kept of each line of standard error.
const TAIL_LINE_BYTES: usize = 1000;
/// Maximum length in bytes of a log line that is forwarded whole. Longer ones are split, which makes a JSON line invalid.
const LINE_BYTES: u64 = 64 << 10;

/// Settings with which worker processes are started.
#[derive(Debug, Clone)]
pub struct Children {
    /// Path of the `rlood` binary.
    pub program: PathBuf,
    /// URL of the server, `http://127.0.0.1:PORT`.
    pub server: String,
    /// Token that worker processes present to the server.
    pub token: String,
    /// Devices, with one child each.
    pub devices: Vec<Device>,
    /// Number of compute threads of each child.
    pub threads: u32,
    /// Directory that contains a working folder for each child.
    pub scratch_dir: PathBuf,
    /// Folder of adapters for rollout servers, passed on to the children.
    pub adapter_dir: PathBuf,
    /// Grace period in seconds, passed on to the children.
    pub grace_s: u64,
    /// Factor for reward delays, passed on to the children.
    pub reward_pace: f64,
    /// Instruction set, passed on to the children.
    pub isa: Isa,
    /// GPU memory limit in bytes, passed on to the children.
    pub gpu_memory_bytes: Option<u64>,
    /// Settings of the runtime `trl`, passed on to the children.
    pub trl: TrlArgs,
    /// Log filter, passed on to the children.
    pub log: String,
    /// Log format, passed on to the children.
    pub log_format: LogFormat,
}

impl Children {
    /// The file through which workers on the CPU lend cores to the serving process.
    fn lending(&self) -> PathBuf {
        self.scratch_dir.join("lending")
    }
}

/// A worker process that exited without being asked to.
#[derive(Debug)]
pub struct Lost {
    /// The id that the child registered with, if it got that far.
    pub worker: WorkerId,
    /// Device of the child.
    pub device: Device,
    /// Exit status: `exit status: 101`, `signal: 9 (SIGKILL)`.
    pub status: String,
    /// The last lines of the child's standard error.
    pub tail: String,
}

/// The running worker processes.
pub struct Supervisor {
    tasks: JoinSet<()>,
    stop: CancellationToken,
}

impl Supervisor {
    /// Starts one worker process per device. Each unexpected exit is sent to `lost` immediately.
    pub fn start(children: Children, lost: &mpsc::UnboundedSender<Lost>) -> Self {
        let stop = CancellationToken::new();
        let children = Arc::new(children);
        let mut tasks = JoinSet::new();
        for (slot, device) in children.devices.iter().copied().enumerate() {
            tasks.spawn(keep_alive(children.clone(), slot, device, lost.clone(), stop.clone()));
        }
        Self { tasks, stop }
    }

    /// Sends SIGTERM to every child and waits for their end; kills those that still run after `limit`.
    pub async fn stop(mut self, limit: Duration) {
        self.stop.cancel();
        if tokio::time::timeout(limit, async { while self.tasks.join_next().await.is_some() {} }).await.is_err() {
            tracing::warn!("some workers did not stop within {} s; the server kills them", limit.as_secs());
            // Dropping the tasks drops the process handles, which kills the worker processes that still run.
            self.tasks.shutdown().await;
        }
    }
}

async fn keep_alive(
    children: Arc<Children>,
    slot: usize,
    device: Device,
    lost: mpsc::UnboundedSender<Lost>,
    stop: CancellationToken,
) {
    let mut delay = FIRST_RESTART_DELAY;
    while !stop.is_cancelled() {
        let worker = WorkerId::new();
        let born = Instant::now();
        let tail = Tail::default();
        let status = match spawn(&children, slot, device, worker) {
            Ok(child) => {
                let Some(status) = attend(child, &tail, &stop).await else { return };
                status.map_or_else(
                    |error| format!("the server could not wait for the worker process to end: {error}"),
                    |status| status.to_string(),
                )
            }
            Err(error) => format!("the worker process could not be started: {error}"),
        };
        let tail = tail.text();
        tracing::error!(%worker, %device, status, "a worker process ended unexpectedly; the server restarts it");
        // Sending fails only during shutdown, when the receiver is dropped.
        let _ = lost.send(Lost { worker, device, status, tail });
        if born.elapsed() >= STABLE {
            delay = FIRST_RESTART_DELAY;
        }
        tokio::select! {
            () = tokio::time::sleep(delay) => {}
            () = stop.cancelled() => return,
        }
        delay = (delay * 2).min(MAX_RESTART_DELAY);
    }
}

fn spawn(children: &Children, slot: usize, device: Device, worker: WorkerId) -> std::io::Result<Child> {
    let scratch_dir = children.scratch_dir.join(format!("worker-{slot}"));
    // Empties the working folder: files that a killed worker process left there are not needed.
    match std::fs::remove_dir_all(&scratch_dir) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        Ok(()) | Err(_) => std::fs::create_dir_all(&scratch_dir)?,
    }
    let mut command = Command::new(&children.program);
    command
        .args(["worker", "--child", "--server", &children.server])
        .args(["--device", &device.to_string(), "--id", &worker.to_string()])
        .args(["--threads", &children.threads.to_string()])
        .env(COMPUTE_THREADS, children.threads.to_string())
        .args(["--log", &children.log, "--log-format", children.log_format.as_str()])
        .arg("--scratch-dir")
        .arg(scratch_dir)
        .env("RLOOD_ADAPTER_DIR", &children.adapter_dir)
        .env("RLOOD_WORKER_TOKEN", &children.token)
        .env("RLOOD_GRACE_S", children.grace_s.to_string())
        .env("RLOOD_REWARD_PACE", children.reward_pace.to_string())
        .env("RLOOD_ISA", children.isa.as_str())
        .env(GPU_MEMORY, children.gpu_memory_bytes.unwrap_or(0).to_string())
        .env_remove("RLOOD_API_KEY")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        // A Ctrl-C in the terminal reaches only the server, which then stops its children in order.
        .process_group(0)
        .kill_on_drop(true);
    if device == Device::Cpu {
        command.arg("--lending").arg(children.lending()).args(["--lending-slot", &slot.to_string()]);
    }
    if let Some(python) = &children.trl.trl_python {
        command.env("RLOOD_TRL_PYTHON", python);
    }
    if let Some(devices) = &children.trl.trl_devices {
        command.env("RLOOD_TRL_DEVICES", devices);
    }
    command.spawn()
}

/// Waits until the worker process exits; None if it exited because it was asked to.
async fn attend(mut child: Child, tail: &Tail, stop: &CancellationToken) -> Option<std::io::Result<ExitStatus>> {
    // The pipe stays open as long as this server lives: its end tells the child to exit.
    let stdin = child.stdin.take();
    let reading = child.stderr.take().map(|stderr| tokio::spawn(pass_on(stderr, tail.clone())));
    let status = tokio::select! {
        status = child.wait() => Some(status),
        () = stop.cancelled() => {
            terminate(&child);
            // This wait has no time limit, because the caller has one.
            if let Err(error) = child.wait().await {
                tracing::warn!(%error, "the server could not wait for a worker process to end");
            }
            None
        }
    };
    drop(stdin);
    if let Some(reading) = reading {
        // Waiting for the end of standard error has a time limit, because a process started by the worker may keep the pipe
        // open.
        let _ = tokio::time::timeout(Duration::from_secs(1), reading).await;
    }
    status
}

/// Sends SIGTERM: the child finishes or aborts the step, saves a checkpoint, requeues its job and exits.
fn terminate(child: &Child) {
    // The process has not been waited for yet, so its id cannot belong to another process.
    let pid = child.id().and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?));
    if let Some(Err(error)) = pid.map(|pid| kill_process(pid, Signal::TERM)) {
        tracing::warn!(%error, "could not send the signal SIGTERM to a worker process");
    }
}

/// The last lines of a child's standard error.
#[derive(Clone, Default)]
struct Tail(Arc<Mutex<VecDeque<String>>>);

impl Tail {
    fn push(&self, line: String) {
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

/// Forwards lines to the server's standard error and keeps the last ones. A line without end is split.
async fn pass_on(stderr: impl AsyncRead + Unpin, tail: Tail) {
    let mut reader = BufReader::new(stderr);
    let mut line = Vec::new();
    loop {
        line.clear();
        match (&mut reader).take(LINE_BYTES).read_until(b'\n', &mut line).await {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        let mut text = String::from_utf8_lossy(&line).trim_end().to_owned();
        // Write errors are ignored, because a closed standard error must not end the server.
        let _ = writeln!(std::io::stderr(), "{text}");
        text.truncate(text.floor_char_boundary(TAIL_LINE_BYTES));
        tail.push(text);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn children(dir: &std::path::Path, script: &str) -> Children {
        let program = dir.join("child.sh");
        std::fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        Children {
            program,
            server: "http://127.0.0.1:1".into(),
            token: "a-token-of-some-length".into(),
            devices: vec![Device::Cpu],
            threads: 1,
            scratch_dir: dir.join("scratch"),
            adapter_dir: dir.join("adapters"),
            grace_s: 24,
            reward_pace: 1.0,
            isa: Isa::Auto,
            gpu_memory_bytes: None,
            trl: crate::config::TrlArgs::default(),
            log: "info".into(),
            log_format: LogFormat::Text,
        }
    }

    #[tokio::test]
    async fn a_dead_child_is_reported_with_its_last_words_and_started_again() {
        let dir = tempfile::tempdir().unwrap();
        let (sender, mut lost) = mpsc::unbounded_channel();
        let script = "echo started >>\"$0.log\"\nfor i in $(seq 50); do echo word $i >&2; done\nexit 7";
        let supervisor = Supervisor::start(children(dir.path(), script), &sender);
        let first = lost.recv().await.unwrap();
        let second = lost.recv().await.unwrap();
        assert_eq!(first.status, "exit status: 7");
        assert_eq!(first.tail.lines().count(), TAIL_LINES);
        assert_eq!(first.tail.lines().last(), Some("word 50"));
        assert_ne!(first.worker, second.worker);
        supervisor.stop(Duration::from_secs(5)).await;
        assert!(std::fs::read_to_string(dir.path().join("child.sh.log")).unwrap().lines().count() >= 2);
    }

    #[tokio::test]
    async fn a_long_line_of_a_child_is_one_line_and_its_beginning_is_kept() {
        let tail = Tail::default();
        pass_on(format!("{}\nshort\n", "é".repeat(2000)).as_bytes(), tail.clone()).await;
        assert_eq!(tail.text(), format!("{}\nshort", "é".repeat(500)));
    }

    #[tokio::test]
    async fn a_child_told_to_stop_may_finish_and_is_not_reported() {
        let dir = tempfile::tempdir().unwrap();
        let (sender, mut lost) = mpsc::unbounded_channel();
        let script = "trap 'echo finished >\"$0.log\"; exit 0' TERM\n: >\"$0.ready\"\nwhile :; do sleep 0.05; done";
        let supervisor = Supervisor::start(children(dir.path(), script), &sender);
        while !dir.path().join("child.sh.ready").exists() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        supervisor.stop(Duration::from_secs(5)).await;
        assert_eq!(std::fs::read_to_string(dir.path().join("child.sh.log")).unwrap(), "finished\n");
        assert!(lost.try_recv().is_err());
    }

    #[tokio::test]
    async fn a_child_that_ignores_the_signal_is_killed() {
        let dir = tempfile::tempdir().unwrap();
        let (sender, _lost) = mpsc::unbounded_channel();
        let script = "trap '' TERM\necho $$ >\"$0.pid\"\nwhile :; do sleep 0.05; done";
        let supervisor = Supervisor::start(children(dir.path(), script), &sender);
        let pid_file = dir.path().join("child.sh.pid");
        while !std::fs::read_to_string(&pid_file).is_ok_and(|pid| pid.ends_with('\n')) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let pid = std::fs::read_to_string(&pid_file).unwrap();
        supervisor.stop(Duration::from_millis(300)).await;
        let gone = || !std::path::Path::new(&format!("/proc/{}", pid.trim())).exists();
        for _ in 0..200 {
            if gone() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("the child still runs");
    }
}
