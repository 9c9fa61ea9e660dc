//! An errand: a child that lives for one task, which it reads from standard input, and one report, which it writes to
//! standard output. It dies with the wish for its answer. The child's side is `crate::errand`.

use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, Command};

use super::{Children, Tail, pass_on};
use crate::config::{Device, GPU_MEMORY};

/// The longest report.
const MAX_REPORT_BYTES: u64 = 16 * 1024 * 1024;

/// Why there is no report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Lost {
    /// It did not end in time and was killed.
    TimedOut,
    /// It could not be started or talked to.
    NotRun(String),
    /// Somebody killed it, or it ran out of memory.
    Killed(String),
    /// It ended without a report; how.
    Ended(String),
}

/// Runs the role of this name on a device; dropping the future kills the child.
pub async fn run_errand<T: Serialize, R: DeserializeOwned>(
    children: &Children,
    (role, device): (&'static str, Device),
    task: &T,
    limit: Duration,
) -> Result<R, Lost> {
    let failed = |error: std::io::Error| Lost::NotRun(error.to_string());
    let mut line = serde_json::to_vec(task).map_err(|error| failed(error.into()))?;
    line.push(b'\n');
    let child = spawn(children, role, device).map_err(failed)?;
    tokio::time::timeout(limit, attend(child, role, &line)).await.unwrap_or(Err(Lost::TimedOut))
}

async fn attend<R: DeserializeOwned>(mut child: Child, role: &'static str, line: &[u8]) -> Result<R, Lost> {
    let failed = |error: std::io::Error| Lost::NotRun(error.to_string());
    let (Some(mut stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
        return Err(Lost::NotRun("it has no pipes".to_owned()));
    };
    let tail = Tail::default();
    let reading = child.stderr.take().map(|stderr| tokio::spawn(pass_on(stderr, tail.clone())));
    // A child that died already is explained by how it ended, not by the broken pipe.
    let written = stdin.write_all(line).await;
    let mut report = Vec::new();
    stdout.take(MAX_REPORT_BYTES).read_to_end(&mut report).await.map_err(failed)?;
    let status = child.wait().await.map_err(failed)?;
    drop(stdin);
    if let Some(reading) = reading {
        let _ = tokio::time::timeout(Duration::from_secs(1), reading).await;
    }
    serde_json::from_slice(&report).map_err(|error| {
        tracing::warn!(role, %status, %error, ?written, tail = tail.text(), "a child ended without a report");
        ending(status)
    })
}

fn spawn(children: &Children, role: &'static str, device: Device) -> std::io::Result<Child> {
    Command::new(&children.program)
        .args([role, "--device", &device.to_string(), "--threads", &children.threads.to_string()])
        .args(["--log", &children.log, "--log-format", children.log_format.as_str()])
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

fn ending(status: ExitStatus) -> Lost {
    use std::os::unix::process::ExitStatusExt;
    match status.signal() {
        Some(libc::SIGKILL | libc::SIGABRT) => Lost::Killed(status.to_string()),
        _ => Lost::Ended(status.to_string()),
    }
}
