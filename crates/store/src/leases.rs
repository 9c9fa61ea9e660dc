//! Leases are kept in the time of day, which is set now and then; and a server may itself be away for a while (stopped,
//! suspended, starved). Neither may cost a worker its job, or leave a dead one with it.

use crate::id::JobId;
use crate::{Store, StoreError};

/// Between two ticks the server was away, ms: it could not take heartbeats either.
const AWAY_MS: i64 = 10_000;
/// The clock was set, ms: as far as that, it did not go with the steady one.
const SET_MS: i64 = 5_000;

/// Takes jobs from workers that fell silent. One a server; its times are Unix ms and ms of a clock that nobody sets.
#[derive(Debug)]
pub struct LeaseWatch {
    wall_ms: i64,
    steady_ms: i64,
    lease_ms: i64,
}

impl LeaseWatch {
    /// For a server that has just renewed all leases.
    pub fn new(wall_ms: i64, steady_ms: i64, lease_ms: i64) -> Self {
        Self { wall_ms, steady_ms, lease_ms }
    }

    /// To be called every second or so; returns the jobs it took back.
    ///
    /// # Errors
    /// When the database cannot be used; the next call makes up for it.
    pub async fn tick(&mut self, store: &Store, wall_ms: i64, steady_ms: i64) -> Result<Vec<JobId>, StoreError> {
        let went = steady_ms - self.steady_ms;
        let set_by = wall_ms - self.wall_ms - went;
        if went > AWAY_MS || set_by.abs() > SET_MS {
            tracing::warn!(target: "rlood::serve::leases", away_ms = went, clock_set_by_ms = set_by, "every claim gets a whole lease");
            store.leases_renew(wall_ms, self.lease_ms).await?;
        }
        (self.wall_ms, self.steady_ms) = (wall_ms, steady_ms);
        store.leases_reap(wall_ms).await
    }
}
