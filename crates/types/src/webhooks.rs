//! Lifecycle messages: which messages a webhook can subscribe to, and when delivery is retried (Standard Webhooks).

pub mod message;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

macro_rules! message_types {
    // The macro takes the message names as `tt`, because utoipa does not see a text inside a `literal`.
    ($($(#[$doc:meta])* $variant:ident = $word:tt;)+) => {
        /// Type of a lifecycle message.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
        pub enum MessageType {
            $($(#[$doc])* #[serde(rename = $word)] $variant,)+
        }

        impl MessageType {
            /// All message types that exist.
            pub const ALL: &'static [MessageType] = &[$(MessageType::$variant),+];

            /// Returns the type's name in the API.
            pub fn as_str(self) -> &'static str {
                match self { $(MessageType::$variant => $word,)+ }
            }
        }
    };
}

// The trigger events_outbox (migrations/0008_trust.sql) creates the messages from a job's events.
message_types! {
    /// A job waits for a worker: it is new, was returned to the queue, or was resumed.
    JobQueued = "job.queued";
    /// A worker started or resumed the job.
    JobStarted = "job.started";
    /// The job stopped at a checkpoint; `detail.reason` has the reason.
    JobPaused = "job.paused";
    /// The job completed successfully.
    JobSucceeded = "job.succeeded";
    /// The job failed; `detail.failure` has the reason.
    JobFailed = "job.failed";
    /// A user cancelled the job.
    JobCancelled = "job.cancelled";
    /// A checkpoint can be downloaded.
    CheckpointCreated = "checkpoint.created";
    /// A reward service does not answer, and the job waits for it.
    RewardDegraded = "reward.degraded";
    /// The reward service answers again.
    RewardRecovered = "reward.recovered";
}

/// Type of the message that tests a webhook.
pub const TEST_TYPE: &str = "webhook.test";

/// Delays after each failed delivery, in milliseconds: 5 s, 5 min, 30 min, 2 h, 5 h, 10 h, 14 h, 20 h, 24 h. The delivery is
/// abandoned after a little more than three days.
pub const RETRY_MS: [i64; 9] = {
    const MINUTE: i64 = 60_000;
    const HOUR: i64 = 60 * MINUTE;
    [5_000, 5 * MINUTE, 30 * MINUTE, 2 * HOUR, 5 * HOUR, 10 * HOUR, 14 * HOUR, 20 * HOUR, 24 * HOUR]
};

/// Returns the delay until the next delivery after this many failures, in milliseconds; `None` = no more deliveries. `spread` (0 to
/// 1) lengthens it by up to a tenth, so that an endpoint that recovers does not receive all pending messages at once.
pub fn retry_in_ms(tries: u64, spread: f64) -> Option<i64> {
    let pause = RETRY_MS.get(usize::try_from(tries.checked_sub(1)?).ok()?)?;
    Some(pause + (*pause as f64 * 0.1 * spread.clamp(0.0, 1.0)) as i64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_ten_deliveries_in_a_little_over_three_days() {
        assert_eq!(retry_in_ms(1, 0.0), Some(5_000));
        assert_eq!(retry_in_ms(2, 1.0), Some(330_000));
        assert_eq!(retry_in_ms(9, 0.0), Some(86_400_000));
        assert_eq!((retry_in_ms(10, 0.0), retry_in_ms(0, 0.0)), (None, None));
        assert_eq!(RETRY_MS.iter().sum::<i64>() / 3_600_000, 75);
    }
}
