//! Ends a process that may use a GPU, while its threads are still running.

use std::time::Duration;

/// Time limit for the exit handlers of libraries, such as a GPU driver.
const EXIT_TIMEOUT: Duration = Duration::from_secs(5);

/// Exits this process while its other threads are running. The exit handler of a GPU driver may wait forever for a thread that is
/// inside a driver call, so the process kills itself after the time limit.
pub fn end_process(code: i32) -> ! {
    let last_resort = || {
        std::thread::sleep(EXIT_TIMEOUT);
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    };
    let _ = std::thread::Builder::new().name("last-resort".to_owned()).spawn(last_resort);
    std::process::exit(code)
}
