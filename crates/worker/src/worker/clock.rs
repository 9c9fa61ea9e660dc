//! The steady clock by which an outage is measured; a test moves its own thread's ahead.

use std::time::Instant;

/// Now, and what the test added.
pub(super) fn now() -> Instant {
    #[cfg(test)]
    return Instant::now() + AHEAD.get();
    #[cfg(not(test))]
    Instant::now()
}

#[cfg(test)]
thread_local! {
    static AHEAD: std::cell::Cell<std::time::Duration> = const { std::cell::Cell::new(std::time::Duration::ZERO) };
}

/// Lets time pass on this thread.
#[cfg(test)]
pub(super) fn advance(by: std::time::Duration) {
    AHEAD.set(AHEAD.get() + by);
}
