//! A one-shot child, as it sees itself: a task on standard input, one report on standard output, and an end as soon as nobody
//! wants the report any more. The other side is `supervisor::one_shot`.

use std::fmt::Display;
use std::io::{BufRead, Write};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::causes::with_causes;
use crate::engine::error::EngineError;
use crate::exit::end_process;

pub use rlood_types::one_shot::OneShotError;

/// The code of a process whose server is gone, or wants no answer any more.
const EXIT_ORPHAN: i32 = 3;

/// Reads the task: the first line. From then on this process ends at once when standard input does.
///
/// # Errors
/// When there is none.
pub fn take_task<Task: DeserializeOwned>() -> Result<Task, OneShotError> {
    let line = first_line()?;
    let task = serde_json::from_str(&line).map_err(failed("the task cannot be read"))?;
    leave_with_server().map_err(failed("cannot watch for the server's end"))?;
    Ok(task)
}

/// Writes the report, or a line of it.
///
/// # Errors
/// When nobody is there to read it.
pub fn give_report<Report: Serialize>(report: &Report) -> Result<(), OneShotError> {
    write_line(&serde_json::to_string(report).map_err(failed("the report cannot be written"))?)
}

/// An error of the engine and its causes, without paths of this machine.
pub(crate) fn error_text(error: &EngineError) -> String {
    match error {
        EngineError::Io { source, .. } => format!("a file cannot be read: {source}"),
        other => with_causes(other),
    }
}

fn failed<E: Display>(what: &'static str) -> impl FnOnce(E) -> OneShotError {
    move |error| OneShotError::Failed(format!("{what}: {error}"))
}

fn first_line() -> Result<String, OneShotError> {
    // The first to go when memory runs out: not the server, not a worker with a job. Elsewhere there is no such file.
    let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
    read_line().map_err(failed("cannot read the task"))
}

fn write_line(text: &str) -> Result<(), OneShotError> {
    let mut stdout = std::io::stdout().lock();
    writeln!(stdout, "{text}").and_then(|()| stdout.flush()).map_err(failed("cannot write the report"))
}

fn read_line() -> std::io::Result<String> {
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line)?;
    Ok(line)
}

fn leave_with_server() -> std::io::Result<()> {
    let watch = || {
        while read_line().is_ok_and(|line| !line.is_empty()) {}
        end_process(EXIT_ORPHAN);
    };
    std::thread::Builder::new().name("orphan-watch".to_owned()).spawn(watch).map(drop)
}
