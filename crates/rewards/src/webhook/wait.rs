//! Waits between two attempts to send a request to a reward service.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::Duration;

/// First and longest wait between two attempts, of which each actual wait is a random part ("full jitter").
const FIRST_WAIT: Duration = Duration::from_millis(500);
pub(super) const MAX_WAIT: Duration = Duration::from_secs(30);

/// Returns the wait after the nth failure (from 1): a random part of 0.5 s, 1 s, 2 s … 30 s.
pub(crate) fn jitter(failures: u32) -> Duration {
    doubled(FIRST_WAIT, failures.saturating_sub(1), MAX_WAIT).mul_f64(random_fraction())
}

pub(super) fn doubled(first: Duration, times: u32, longest: Duration) -> Duration {
    first.saturating_mul(1 << times.min(16)).min(longest)
}

/// Returns 64 random bits for spreading retries over time. Not suitable for secrets.
pub(super) fn random_bits() -> u64 {
    RandomState::new().build_hasher().finish()
}

pub(super) fn random_fraction() -> f64 {
    (random_bits() >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_from_half_a_second_to_thirty() {
        assert_eq!(doubled(FIRST_WAIT, 0, MAX_WAIT), Duration::from_millis(500));
        assert_eq!(doubled(FIRST_WAIT, 3, MAX_WAIT), Duration::from_secs(4));
        assert_eq!(doubled(FIRST_WAIT, 60, MAX_WAIT), MAX_WAIT);
        let waits: Vec<_> = (0..200).map(|_| jitter(3)).collect();
        assert!(waits.iter().all(|wait| *wait <= Duration::from_secs(2)));
        assert!(waits.iter().any(|wait| *wait < Duration::from_secs(1)));
        assert!(waits.iter().any(|wait| *wait > Duration::from_secs(1)));
    }
}
