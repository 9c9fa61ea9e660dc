//! Lifecycle messages: what a subscriber can be told, and when a message is tried again (Standard Webhooks).

pub mod message;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

macro_rules! message_types {
    // The words are `tt`: inside a `literal` utoipa does not see them.
    ($($(#[$doc:meta])* $variant:ident = $word:tt;)+) => {
        /// What a message tells.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
        pub enum MessageType {
            $($(#[$doc])* #[serde(rename = $word)] $variant,)+
        }

        impl MessageType {
            /// All of them.
            pub const ALL: &'static [MessageType] = &[$(MessageType::$variant),+];

            /// Its word.
            pub fn as_str(self) -> &'static str {
                match self { $(MessageType::$variant => $word,)+ }
            }
        }
    };
}

// The trigger events_outbox (migrations/0008_trust.sql) makes them of a job's events.
message_types! {
    /// A job waits for a worker: new, taken back from one, or resumed.
    JobQueued = "job.queued";
    /// A worker has begun, or goes on.
    JobStarted = "job.started";
    /// It stopped at a checkpoint; `detail.reason` says why.
    JobPaused = "job.paused";
    /// It is done.
    JobSucceeded = "job.succeeded";
    /// It failed; `detail.failure` says why.
    JobFailed = "job.failed";
    /// Somebody ended it.
    JobCancelled = "job.cancelled";
    /// A checkpoint can be downloaded.
    CheckpointCreated = "checkpoint.created";
    /// A reward does not answer: the job waits for it.
    RewardDegraded = "reward.degraded";
    /// It answers again.
    RewardRecovered = "reward.recovered";
}

/// What a test of a subscription sends.
pub const TEST_TYPE: &str = "webhook.test";

/// After each failed try, until the next, ms: 5 s, 5 min, 30 min, 2 h, 5 h, 10 h, 14 h, 20 h, 24 h; then the message is given
/// up after three days and some.
pub const RETRY_MS: [i64; 9] = {
    const MINUTE: i64 = 60_000;
    const HOUR: i64 = 60 * MINUTE;
    [5_000, 5 * MINUTE, 30 * MINUTE, 2 * HOUR, 5 * HOUR, 10 * HOUR, 14 * HOUR, 20 * HOUR, 24 * HOUR]
};

/// Until the next try after this many failed ones, ms; None = there is none. `spread` in 0..1 adds up to a tenth, so that
/// endpoints that came back are not asked for everything at once.
pub fn retry_in_ms(tries: u64, spread: f64) -> Option<i64> {
    let pause = RETRY_MS.get(usize::try_from(tries.checked_sub(1)?).ok()?)?;
    Some(pause + (*pause as f64 * 0.1 * spread.clamp(0.0, 1.0)) as i64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ten_tries_in_three_days_and_some() {
        assert_eq!(retry_in_ms(1, 0.0), Some(5_000));
        assert_eq!(retry_in_ms(2, 1.0), Some(330_000));
        assert_eq!(retry_in_ms(9, 0.0), Some(86_400_000));
        assert_eq!((retry_in_ms(10, 0.0), retry_in_ms(0, 0.0)), (None, None));
        assert_eq!(RETRY_MS.iter().sum::<i64>() / 3_600_000, 75);
    }
}
