//! How a process that computes ends.

use std::time::Duration;

/// Seconds that what a library does at the end may take.
const PATIENCE: Duration = Duration::from_secs(5);

/// Ends this process while its other threads are at work. What the driver of a GPU does at the end may wait for ever for a
/// thread that is in one of its calls: then the system ends the process.
pub fn end_process(code: i32) -> ! {
    let last_resort = || {
        std::thread::sleep(PATIENCE);
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    };
    let _ = std::thread::Builder::new().name("last-resort".to_owned()).spawn(last_resort);
    std::process::exit(code)
}
