//! An errand, as the child sees it: a task on standard input, one report on standard output, and an end as soon as nobody
//! wants the report any more. The other side is `supervisor::errand`.

use std::io::{BufRead, Write};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

/// The code of a process whose server is gone, or wants no answer any more.
const EXIT_ORPHAN: i32 = 3;

/// Why there is no report at all.
#[derive(Debug, thiserror::Error)]
pub enum ErrandError {
    /// Standard input or output is gone.
    #[error("cannot {doing}")]
    Pipe {
        /// What was being done.
        doing: &'static str,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// What came is no task, or the report cannot be written as JSON.
    #[error("the task cannot be read")]
    Task(#[source] serde_json::Error),
}

fn pipe(doing: &'static str) -> impl FnOnce(std::io::Error) -> ErrandError {
    move |source| ErrandError::Pipe { doing, source }
}

/// The task: the first line. From then on this process ends at once when standard input does.
///
/// # Errors
/// When there is none.
pub fn take<T: DeserializeOwned>() -> Result<T, ErrandError> {
    // The first to go when memory runs out: not the server, not a worker with a job. Elsewhere there is no such file.
    let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
    let line = read_line().map_err(pipe("read the task"))?;
    let task = serde_json::from_str(&line).map_err(ErrandError::Task)?;
    leave_with_server().map_err(pipe("watch for the server's end"))?;
    Ok(task)
}

/// The report.
///
/// # Errors
/// When nobody is there to read it.
pub fn give<R: Serialize>(report: &R) -> Result<(), ErrandError> {
    let text = serde_json::to_string(report).map_err(ErrandError::Task)?;
    let mut stdout = std::io::stdout().lock();
    writeln!(stdout, "{text}").and_then(|()| stdout.flush()).map_err(pipe("write the report"))
}

fn read_line() -> std::io::Result<String> {
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line)?;
    Ok(line)
}

fn leave_with_server() -> std::io::Result<()> {
    let watch = || {
        while read_line().is_ok_and(|line| !line.is_empty()) {}
        end(EXIT_ORPHAN);
    };
    std::thread::Builder::new().name("orphan-watch".to_owned()).spawn(watch).map(drop)
}

/// Seconds that what a library does at the end may take.
const PATIENCE: Duration = Duration::from_secs(5);

/// End this process while its other threads are at work. What the driver of a GPU does at the end may wait for ever for a
/// thread that is in one of its calls: then the system ends the process.
pub fn end(code: i32) -> ! {
    let last_resort = || {
        std::thread::sleep(PATIENCE);
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    };
    let _ = std::thread::Builder::new().name("last-resort".to_owned()).spawn(last_resort);
    std::process::exit(code)
}
