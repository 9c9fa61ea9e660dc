//! The monotonic clock that measures outages. Tests can advance the clock of their own thread.

use std::time::Instant;

/// Returns the current time, plus the time by which a test has advanced the clock.
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

/// Advances the clock of this thread.
#[cfg(test)]
pub(super) fn advance(by: std::time::Duration) {
    AHEAD.set(AHEAD.get() + by);
}
