//! The child's side of a one-shot process (a child process of the server that answers one request): it reads a task
//! from standard input, writes one report to standard output, and exits when the server closes standard input. The
//! parent's side is `supervisor::one_shot`.

use std::fmt::Display;
use std::io::{BufRead, Write};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::engine::error::EngineError;
use crate::error_text::with_causes;
use crate::exit::end_process;

pub use rlood_types::one_shot::OneShotError;

/// Exit code when the server is gone or no longer waits for an answer.
pub(crate) const EXIT_ORPHAN: i32 = 3;

/// Reads the task from the first line of standard input. From then on the process exits as soon as standard input closes.
///
/// # Errors
/// Fails when the line is not a valid task.
pub fn read_task<Task: DeserializeOwned>() -> Result<Task, OneShotError> {
    let line = first_line()?;
    let task = serde_json::from_str(&line).map_err(failed("the task on standard input is not valid"))?;
    exit_with_server().map_err(failed("cannot start the thread that watches standard input"))?;
    Ok(task)
}

/// Writes the report, or another line such as progress, to standard output.
///
/// # Errors
/// Fails when standard output is closed.
pub fn write_report<Report: Serialize>(report: &Report) -> Result<(), OneShotError> {
    write_line(&serde_json::to_string(report).map_err(failed("cannot write the report to standard output"))?)
}

/// Formats an engine error with its causes, without paths of this machine.
pub(crate) fn error_text(error: &EngineError) -> String {
    match error {
        EngineError::Io { source, .. } => format!("a file of the model or checkpoint cannot be read: {source}"),
        other => with_causes(other),
    }
}

pub(crate) fn failed<E: Display>(what: &'static str) -> impl FnOnce(E) -> OneShotError {
    move |error| OneShotError::Failed(format!("{what}: {error}"))
}

/// Makes this process the first one that the kernel kills when memory runs out, before the server and workers with a job. Only
/// Linux has the file `oom_score_adj`.
pub(crate) fn be_killed_first() {
    let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
}

fn first_line() -> Result<String, OneShotError> {
    be_killed_first();
    read_line().map_err(failed("cannot read the task from standard input"))
}

fn write_line(text: &str) -> Result<(), OneShotError> {
    let mut stdout = std::io::stdout().lock();
    writeln!(stdout, "{text}")
        .and_then(|()| stdout.flush())
        .map_err(failed("cannot write the report to standard output"))
}

fn read_line() -> std::io::Result<String> {
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line)?;
    Ok(line)
}

fn exit_with_server() -> std::io::Result<()> {
    let watch = || {
        while read_line().is_ok_and(|line| !line.is_empty()) {}
        end_process(EXIT_ORPHAN);
    };
    std::thread::Builder::new().name("orphan-watch".to_owned()).spawn(watch).map(drop)
}
