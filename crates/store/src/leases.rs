//! Monitoring of leases. Lease times use the wall clock, which can be set, and the server itself may be unavailable for a while
//! (stopped, suspended, starved of CPU). Neither may take a job from a live worker, or leave it with a dead one.

use crate::id::JobId;
use crate::{Store, StoreError};

/// Time between two ticks after which the server counts as having been unavailable, in milliseconds. It
/// could not receive heartbeats either.
const MIN_UNAVAILABLE_MS: i64 = 10_000;
/// Difference between the wall clock and the steady clock from which the wall clock counts as having been set, in milliseconds.
const MIN_CLOCK_JUMP_MS: i64 = 5_000;

/// Takes jobs from workers that stopped sending heartbeats. There is one per server. Its times are Unix time in milliseconds, and
/// milliseconds of a monotonic clock.
#[derive(Debug)]
pub struct LeaseWatch {
    wall_ms: i64,
    steady_ms: i64,
    lease_ms: i64,
}

impl LeaseWatch {
    /// Creates the monitor of a server that has just renewed all leases.
    pub fn new(wall_ms: i64, steady_ms: i64, lease_ms: i64) -> Self {
        Self { wall_ms, steady_ms, lease_ms }
    }

    /// Checks the leases; call it about every second. Returns the jobs that it took back.
    ///
    /// # Errors
    /// Fails if the database cannot be used; the next call catches up.
    pub async fn tick(&mut self, store: &Store, wall_ms: i64, steady_ms: i64) -> Result<Vec<JobId>, StoreError> {
        let went = steady_ms - self.steady_ms;
        let set_by = wall_ms - self.wall_ms - went;
        if went > MIN_UNAVAILABLE_MS || set_by.abs() > MIN_CLOCK_JUMP_MS {
            tracing::warn!(
                target: "rlood::serve::leases", away_ms = went, clock_set_by_ms = set_by,
                "the server renews the lease of every worker's job, because the server was unavailable or the clock was set"
            );
            store.leases_renew(wall_ms, self.lease_ms).await?;
        }
        (self.wall_ms, self.steady_ms) = (wall_ms, steady_ms);
        store.leases_reap(wall_ms).await
    }
}
