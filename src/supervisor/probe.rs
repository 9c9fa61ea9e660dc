//! A probe: a child that lives for one task, which it reads from standard input, and one report, which it writes to
//! standard output. It dies with the wish for its answer.

use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, Command};
use tokio::sync::Semaphore;

use super::{Tail, pass_on};
use crate::config::{Device, Isa, LogFormat};
use crate::probe::{ProbeError, ProbeReport, ProbeTask};

/// Probes at once: each holds a model of its own in memory, beside those of the workers.
const MAX_PROBES: usize = 1;
/// What a probe may take beyond its limit, to write its report.
const GRACE: Duration = Duration::from_secs(15);
/// The longest report.
const MAX_REPORT_BYTES: u64 = 16 * 1024 * 1024;

/// How probes are started.
#[derive(Debug, Clone)]
pub struct Probes {
    program: PathBuf,
    device: Device,
    threads: u32,
    isa: Isa,
    log: String,
    log_format: LogFormat,
    places: Arc<Semaphore>,
}

/// Why there is no report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NoReport {
    /// As many as may run at once do.
    Busy,
    /// The child could not be started, or ended without a report.
    Failed(ProbeError),
}

impl Probes {
    /// Probes on the first of the workers' devices, with the threads of one worker.
    pub fn new(children: &super::Children) -> Self {
        Self {
            program: children.program.clone(),
            device: children.devices.first().copied().unwrap_or(Device::Cpu),
            threads: children.threads,
            isa: children.isa,
            log: children.log.clone(),
            log_format: children.log_format,
            places: Arc::new(Semaphore::new(MAX_PROBES)),
        }
    }

    /// Runs one probe to its end; dropping the future kills it.
    pub async fn run(self, task: ProbeTask) -> Result<ProbeReport, NoReport> {
        let Ok(_place) = self.places.clone().try_acquire_owned() else { return Err(NoReport::Busy) };
        let tail = Tail::default();
        let limit = Duration::from_millis(task.limit_ms) + GRACE;
        match tokio::time::timeout(limit, self.attend(&task, &tail)).await {
            Ok(report) => report.map_err(NoReport::Failed),
            Err(_) => {
                let message = format!("the probe did not end within {} s and was killed", limit.as_secs());
                Err(NoReport::Failed(ProbeError { code: "probe_timeout".to_owned(), message }))
            }
        }
    }

    async fn attend(&self, task: &ProbeTask, tail: &Tail) -> Result<ProbeReport, ProbeError> {
        let failed = |error: std::io::Error| probe_failed(format!("the probe cannot be run: {error}"));
        let mut line = serde_json::to_vec(task).map_err(|error| failed(error.into()))?;
        line.push(b'\n');
        let mut child = self.spawn().map_err(failed)?;
        let (Some(mut stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(probe_failed("the probe has no pipes".to_owned()));
        };
        let reading = child.stderr.take().map(|stderr| tokio::spawn(pass_on(stderr, tail.clone())));
        // A child that died already is explained by how it ended, not by the broken pipe.
        let written = stdin.write_all(&line).await;
        let mut report = Vec::new();
        stdout.take(MAX_REPORT_BYTES).read_to_end(&mut report).await.map_err(failed)?;
        let status = child.wait().await.map_err(failed)?;
        drop(stdin);
        if let Some(reading) = reading {
            let _ = tokio::time::timeout(Duration::from_secs(1), reading).await;
        }
        match serde_json::from_slice(&report) {
            Ok(report) => Ok(report),
            Err(error) => {
                tracing::warn!(%status, %error, ?written, tail = tail.text(), "a probe ended without a report");
                Err(probe_failed(ending(status)))
            }
        }
    }

    fn spawn(&self) -> std::io::Result<Child> {
        Command::new(&self.program)
            .args(["probe", "--device", &self.device.to_string(), "--threads", &self.threads.to_string()])
            .args(["--log", &self.log, "--log-format", self.log_format.as_str()])
            .env("RLOOD_ISA", self.isa.as_str())
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

fn probe_failed(message: String) -> ProbeError {
    ProbeError { code: "probe_failed".to_owned(), message }
}

fn ending(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt;
    match status.signal() {
        Some(libc::SIGKILL | libc::SIGABRT) => format!(
            "the probe was killed ({status}): most likely memory ran out; a smaller model, shorter completions or fewer generations need less"
        ),
        _ => format!("the probe ended without a report ({status}); the server's log has its last words"),
    }
}
