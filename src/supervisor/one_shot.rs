//! Child processes that answer one request each: a task on their standard input, one report on their standard output. A child is
//! killed when its request is cancelled. The child's side is `rlood_worker::one_shot`.

use std::marker::PhantomData;
use std::os::unix::process::ExitStatusExt;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::{Semaphore, mpsc};
use tokio_util::sync::CancellationToken;

use rlood_types::certificate::{CertifyReport, CertifyTask};

use super::{Children, Tail, pass_on};
use crate::config::{COMPUTE_THREADS, Device, GPU_MEMORY};
use crate::export::{ExportLine, ExportTask};
use crate::one_shot::{ChildLine, OneShotError};
use crate::preflight::{PreflightReport, PreflightTask};
use crate::verdict::{JudgeReport, JudgeTask, VerdictRow};

/// Maximum size of a report, in bytes.
const MAX_REPORT_BYTES: u64 = 16 * 1024 * 1024;
/// Maximum number of concurrent children of one kind: each holds its own model in memory, in addition to those of the workers.
const MAX_CHILDREN: usize = 1;
/// Extra time after the limit in which a child process may write its report.
const PREFLIGHT_GRACE: Duration = Duration::from_secs(15);
/// Time limit for child processes that report progress; it is long, because users can cancel them.
const LONG_WORK: Duration = Duration::from_secs(7 * 24 * 3600);

/// Runs child processes of one kind. Cheap to clone.
pub struct OneShot<Task: ?Sized, Report> {
    kind: Arc<Kind>,
    types: PhantomData<fn(&Task) -> Report>,
}

/// Runs preflights: `rlood probe`.
pub type Preflights = OneShot<PreflightTask, PreflightReport>;

/// Computes certificates of checkpoints: `rlood certifier`.
pub type Certifications = OneShot<CertifyTask, CertifyReport>;

/// Compares checkpoints with their base models: `rlood judge`.
pub type Verdicts = OneShot<JudgeTask, ChildLine<VerdictRow, JudgeReport>>;

/// Converts checkpoints to other formats: `rlood export-checkpoint`.
pub type Exports = OneShot<ExportTask, ExportLine>;

impl<Task: ?Sized, Report> Clone for OneShot<Task, Report> {
    fn clone(&self) -> Self {
        Self::of(self.kind.clone())
    }
}

impl Preflights {
    /// Creates a runner for preflights, on the first of the workers' devices with the threads of one worker.
    pub fn new(children: &Children) -> Self {
        let device = children.devices.first().copied().unwrap_or(Device::Cpu);
        // This token is never cancelled: a preflight that runs when the server stops may complete, like a request.
        let stop = CancellationToken::new();
        Self::of(Arc::new(Kind::new(children, "probe", device, PREFLIGHT_GRACE, stop)))
    }
}

impl Certifications {
    /// Runs on the CPU, with the threads of one worker; `stop` kills the children.
    pub fn new(children: &Children, stop: CancellationToken) -> Self {
        Self::of(Arc::new(Kind::new(children, "certifier", Device::Cpu, Duration::ZERO, stop)))
    }
}

impl Verdicts {
    /// Creates a runner for comparisons, on the first of the workers' devices with the threads of one worker;
    /// `stop` kills its processes.
    pub fn new(children: &Children, stop: CancellationToken) -> Self {
        let device = children.devices.first().copied().unwrap_or(Device::Cpu);
        Self::of(Arc::new(Kind::new(children, "judge", device, Duration::ZERO, stop)))
    }
}

impl Exports {
    /// Runs on the CPU, with the threads of one worker; `stop` kills the children.
    pub fn new(children: &Children, stop: CancellationToken) -> Self {
        Self::of(Arc::new(Kind::new(children, "export-checkpoint", Device::Cpu, Duration::ZERO, stop)))
    }
}

impl<Task: ?Sized, Report> OneShot<Task, Report> {
    fn of(kind: Arc<Kind>) -> Self {
        Self { kind, types: PhantomData }
    }
}

impl<Task: Serialize + ?Sized, Report: DeserializeOwned> OneShot<Task, Report> {
    /// Runs one child to its end within `limit`. Dropping the future kills the child.
    ///
    /// # Errors
    /// Fails when the child writes no report.
    pub async fn run(&self, task: &Task, limit: Duration) -> Result<Report, OneShotError> {
        let line = serde_json::to_vec(task).map_err(|error| OneShotError::Failed(error.to_string()))?;
        let ended = self.kind.run(line, limit).await?;
        serde_json::from_slice(&ended.report).map_err(|error| ended.without_report(self.kind.role, &error))
    }
}

impl<Task, Item, Report> OneShot<Task, ChildLine<Item, Report>>
where
    Task: Serialize + ?Sized,
    Item: DeserializeOwned,
    Report: DeserializeOwned,
{
    /// Runs one child to its end and forwards its progress lines. Dropping the future kills the child.
    ///
    /// # Errors
    /// Fails when the child writes no report.
    pub async fn follow(
        &self,
        task: &Task,
        tell: mpsc::Sender<ChildLine<Item, Report>>,
    ) -> Result<Report, OneShotError> {
        let line = serde_json::to_vec(task).map_err(|error| OneShotError::Failed(error.to_string()))?;
        let (lines, mut received) = mpsc::channel::<Vec<u8>>(64);
        let role = self.kind.role;
        let pass_on = async {
            let mut report = None;
            while let Some(line) = received.recv().await {
                match serde_json::from_slice(&line) {
                    Ok(ChildLine::Report(last)) => report = Some(last),
                    // Sending a line fails only when the receiver no longer needs the lines.
                    Ok(line) => drop(tell.send(line).await),
                    Err(error) => tracing::warn!(role, %error, "a child process wrote an invalid line"),
                }
            }
            report
        };
        let (ended, report) = tokio::join!(self.kind.run_lines(line, LONG_WORK, lines), pass_on);
        let ended = ended?;
        report.ok_or_else(|| ended.without_report(role, &"the child process wrote no report"))
    }
}

/// Settings that child processes of one kind share.
struct Kind {
    children: Children,
    /// The `rlood` subcommand that the child process runs.
    role: &'static str,
    device: Device,
    grace: Duration,
    places: Semaphore,
    stop: CancellationToken,
}

/// A child process that exited by itself.
struct Ended {
    report: Vec<u8>,
    status: ExitStatus,
    written: std::io::Result<()>,
    tail: Tail,
}

impl Kind {
    fn new(children: &Children, role: &'static str, device: Device, grace: Duration, stop: CancellationToken) -> Self {
        Self { children: children.clone(), role, device, grace, places: Semaphore::new(MAX_CHILDREN), stop }
    }

    async fn run(&self, line: Vec<u8>, limit: Duration) -> Result<Ended, OneShotError> {
        self.run_with(line, limit, None).await
    }

    /// Like [`Kind::run`], but forwards each line of the child's standard output immediately and keeps none.
    async fn run_lines(
        &self,
        line: Vec<u8>,
        limit: Duration,
        lines: mpsc::Sender<Vec<u8>>,
    ) -> Result<Ended, OneShotError> {
        self.run_with(line, limit, Some(lines)).await
    }

    async fn run_with(
        &self,
        mut line: Vec<u8>,
        limit: Duration,
        lines: Option<mpsc::Sender<Vec<u8>>>,
    ) -> Result<Ended, OneShotError> {
        let _place = self.places.try_acquire().map_err(|_| OneShotError::Busy)?;
        line.push(b'\n');
        let limit = limit + self.grace;
        let run = async {
            let child = self.spawn().map_err(failed)?;
            let attended = tokio::time::timeout(limit, attend(child, &line, lines)).await;
            attended.unwrap_or(Err(OneShotError::TimedOut(limit)))
        };
        tokio::select! {
            biased;
            () = self.stop.cancelled() => Err(OneShotError::Stopping),
            ended = run => ended,
        }
    }

    fn spawn(&self) -> std::io::Result<Child> {
        let children = &self.children;
        Command::new(&children.program)
            .args([self.role, "--device", &self.device.to_string(), "--threads", &children.threads.to_string()])
            .args(["--log", &children.log, "--log-format", children.log_format.as_str()])
            .env(COMPUTE_THREADS, children.threads.to_string())
            .env("RLOOD_ISA", children.isa.as_str())
            .env(GPU_MEMORY, children.gpu_memory_bytes.unwrap_or(0).to_string())
            .env_remove("RLOOD_API_KEY")
            .env_remove("RLOOD_WORKER_TOKEN")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
    }
}

fn failed(error: std::io::Error) -> OneShotError {
    OneShotError::Failed(error.to_string())
}

async fn attend(mut child: Child, line: &[u8], lines: Option<mpsc::Sender<Vec<u8>>>) -> Result<Ended, OneShotError> {
    let (Some(mut stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
        return Err(OneShotError::Failed("the child process has no standard input or output".to_owned()));
    };
    let tail = Tail::default();
    let reading = child.stderr.take().map(|stderr| tokio::spawn(pass_on(stderr, tail.clone())));
    // If the child died early, its exit status explains more than the broken pipe.
    let written = stdin.write_all(line).await;
    let mut report = Vec::new();
    match lines {
        None => drop(stdout.take(MAX_REPORT_BYTES).read_to_end(&mut report).await.map_err(failed)?),
        Some(lines) => {
            let mut stdout = BufReader::new(stdout);
            loop {
                let mut line = Vec::new();
                let read = (&mut stdout).take(MAX_REPORT_BYTES).read_until(b'\n', &mut line).await.map_err(failed)?;
                if read == 0 || lines.send(line).await.is_err() {
                    break;
                }
            }
        }
    }
    let status = child.wait().await.map_err(failed)?;
    drop(stdin);
    if let Some(reading) = reading {
        let _ = tokio::time::timeout(Duration::from_secs(1), reading).await;
    }
    Ok(Ended { report, status, written, tail })
}

impl Ended {
    /// Creates the error for output of a child process that is not a report.
    fn without_report(&self, role: &str, error: &dyn std::fmt::Display) -> OneShotError {
        let Self { report: _, status, written, tail } = self;
        tracing::warn!(role, %status, %error, ?written, tail = tail.text(), "a child process ended without a report");
        match status.signal() {
            Some(libc::SIGKILL | libc::SIGABRT) => OneShotError::Killed(status.to_string()),
            _ => OneShotError::Ended(status.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::config::{Isa, LogFormat};

    /// Creates a kind of child process that runs a shell script, for tests; the task is a text and the report a number.
    fn children(dir: &std::path::Path, script: &str, grace: Duration, stop: &CancellationToken) -> OneShot<str, u64> {
        let program = dir.join("child.sh");
        std::fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let children = Children {
            program,
            server: String::new(),
            token: String::new(),
            devices: vec![Device::Cpu],
            threads: 1,
            scratch_dir: dir.to_owned(),
            adapter_dir: dir.join("adapters"),
            grace_s: 24,
            reward_pace: 1.0,
            isa: Isa::Auto,
            gpu_memory_bytes: None,
            trl: crate::config::TrlArgs::default(),
            log: "info".into(),
            log_format: LogFormat::Text,
        };
        OneShot::of(Arc::new(Kind::new(&children, "count", Device::Cpu, grace, stop.clone())))
    }

    #[tokio::test]
    async fn a_child_answers_a_task_or_says_how_it_ended() {
        let cases = [
            ("read task; echo ${#task}", Ok(6)),
            ("read task; echo none; exit 7", Err(OneShotError::Ended("exit status: 7".into()))),
            ("kill -KILL $$", Err(OneShotError::Killed("signal: 9 (SIGKILL)".into()))),
            ("kill -TERM $$", Err(OneShotError::Ended("signal: 15 (SIGTERM)".into()))),
            ("read task; sleep 30", Err(OneShotError::TimedOut(Duration::from_millis(600)))),
        ];
        for (script, expected) in cases {
            let dir = tempfile::tempdir().unwrap();
            let grace = if script.contains("sleep") { Duration::from_millis(100) } else { Duration::from_secs(60) };
            let children = children(dir.path(), script, grace, &CancellationToken::new());
            assert_eq!(children.run("four", Duration::from_millis(500)).await, expected, "{script}");
        }
    }

    #[tokio::test]
    async fn one_child_runs_at_a_time_and_dies_with_the_wish_for_its_answer() {
        let dir = tempfile::tempdir().unwrap();
        let stop = CancellationToken::new();
        let script = "echo $$ >\"$0.pid\"; read task; exec sleep 60";
        let children = children(dir.path(), script, Duration::from_secs(60), &stop);
        let pid_file = dir.path().join("child.sh.pid");
        let begun = || std::fs::read_to_string(&pid_file).is_ok_and(|pid| pid.ends_with('\n'));
        let limit = Duration::from_secs(60);
        let first = tokio::spawn({
            let children = children.clone();
            async move { children.run("one", limit).await }
        });
        while !begun() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert_eq!(children.run("two", limit).await, Err(OneShotError::Busy));
        first.abort();
        assert!(first.await.unwrap_err().is_cancelled());
        let pid = std::fs::read_to_string(&pid_file).unwrap();
        let is_gone = || !std::path::Path::new(&format!("/proc/{}", pid.trim())).exists();
        for _ in 0..500 {
            if is_gone() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert!(is_gone(), "the child outlived the wish for its answer");
        stop.cancel();
        assert_eq!(children.run("three", limit).await, Err(OneShotError::Stopping));
    }
}
