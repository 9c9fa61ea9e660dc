//! Computes built-in rewards on a blocking thread with a time limit. A thread cannot be killed: a grader that exceeds the limit
//! fails the job with an error that names it, and the worker process exits after
//! the job has ended ([`crate::Rewards::is_grading`]).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use super::Builtin;
use crate::rollout::RewardSample;
use crate::{Judgement, RewardFailure};

/// Time limit of a built-in reward for one completion.
pub(super) const SAMPLE_LIMIT: Duration = Duration::from_secs(10);
/// Time limit of a built-in reward for all completions of one call.
const BATCH_LIMIT: Duration = Duration::from_secs(600);
/// Interval at which the watchdog checks the time limits. A longer gap counts as at most twice this interval, because then the
/// machine was suspended and the grader is not slow.
const CHECK_INTERVAL: Duration = Duration::from_millis(200);

/// State shared by the grading thread and its watchdog.
#[derive(Default)]
struct Progress {
    stop: AtomicBool,
    graded: AtomicUsize,
}

struct StopOnDrop(Arc<Progress>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.stop.store(true, Ordering::Relaxed);
    }
}

/// Guard that counts a grading thread as running until it is dropped.
struct Running(Arc<AtomicUsize>);

impl Running {
    fn new(count: Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Computes the built-in reward of every sample on a blocking thread. Dropping the future stops the thread before its next sample.
pub(super) async fn judge(
    builtin: &Builtin,
    samples: &[RewardSample],
    sample_limit: Duration,
) -> Result<Vec<Judgement>, RewardFailure> {
    let progress = Arc::new(Progress::default());
    let _stop = StopOnDrop(progress.clone());
    let running = Running::new(builtin.running.clone());
    let (grader, samples, shared) = (builtin.clone(), samples.to_vec(), progress.clone());
    let mut grading = tokio::task::spawn_blocking(move || {
        let _running = running;
        let mut judgements = Vec::with_capacity(samples.len());
        for sample in &samples {
            if shared.stop.load(Ordering::Relaxed) {
                break;
            }
            judgements.push(grader.judge_one(sample));
            shared.graded.fetch_add(1, Ordering::Relaxed);
        }
        judgements
    });
    let mut ticks = tokio::time::interval(CHECK_INTERVAL);
    let (mut last, mut graded, mut of_sample, mut of_batch) = (Instant::now(), 0, Duration::ZERO, Duration::ZERO);
    loop {
        tokio::select! {
            done = &mut grading => {
                return done.map_err(|error| match error.try_into_panic() {
                    Ok(panic) => std::panic::resume_unwind(panic),
                    Err(_) => too_slow(builtin, "the worker process is shutting down".to_owned()),
                });
            }
            now = ticks.tick() => {
                let passed = (now - last).min(2 * CHECK_INTERVAL);
                last = now;
                of_batch += passed;
                of_sample = if progress.graded.load(Ordering::Relaxed) == graded { of_sample + passed } else { Duration::ZERO };
                graded = progress.graded.load(Ordering::Relaxed);
                if of_sample > sample_limit {
                    let detail = format!("computing the reward of one completion takes more than {} s", sample_limit.as_secs());
                    return Err(too_slow(builtin, detail));
                }
                if of_batch > BATCH_LIMIT {
                    let limit_s = BATCH_LIMIT.as_secs();
                    let detail = format!("computing the rewards of the completions of one rollout takes more than {limit_s} s");
                    return Err(too_slow(builtin, detail));
                }
            }
        }
    }
}

fn too_slow(builtin: &Builtin, detail: String) -> RewardFailure {
    RewardFailure::TooSlow { reward: builtin.name.clone(), detail }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::Reward;
    use crate::builtin::tests::sample;
    use crate::spec::{RegexPlan, RewardKind};

    /// Returns a pattern that takes seconds on its text, because the regex engine follows thousands of states in parallel.
    fn slow() -> (Builtin, RewardSample) {
        let mut state = 1_u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            if state >> 63 == 0 { 'a' } else { 'b' }
        };
        let text: String = (0..200_000).map(|_| next()).collect();
        let kind = RewardKind::Regex(RegexPlan { pattern: "a[ab]{5000}[cd]".to_owned() });
        (Builtin::new("pattern", &kind, crate::spec::BlankReference::NotApplicable).unwrap(), sample(&text))
    }

    async fn grading_ends(builtin: &Builtin) {
        while builtin.is_grading() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn a_grader_that_takes_too_long_fails_the_job_with_its_name() {
        let (builtin, sample) = slow();
        let begun = std::time::Instant::now();
        let failure = judge(&builtin, &[sample], Duration::ZERO).await.unwrap_err();
        assert!(builtin.is_grading(), "the thread cannot be killed; {:?}", begun.elapsed());
        let failure = failure.to_failure(3);
        assert_eq!((failure.code.as_str(), json!(failure.class)), ("reward_too_slow", json!("user")));
        assert!(failure.message.contains("'pattern'") && failure.suggestion.is_some(), "{failure:?}");
        grading_ends(&builtin).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn an_abandoned_grader_stops_before_the_next_sample() {
        let (builtin, sample) = slow();
        let samples = vec![sample; 1000];
        let judging = judge(&builtin, &samples, SAMPLE_LIMIT);
        assert!(tokio::time::timeout(Duration::from_millis(50), judging).await.is_err());
        assert!(builtin.is_grading());
        // Computing the reward of all 1000 samples would take an hour.
        tokio::time::timeout(Duration::from_secs(60), grading_ends(&builtin)).await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_grader_that_is_fast_gives_one_judgement_a_sample() {
        let kind = RewardKind::Regex(RegexPlan { pattern: "^b".to_owned() });
        let builtin = Builtin::new("pattern", &kind, crate::spec::BlankReference::NotApplicable).unwrap();
        let judged = judge(&builtin, &[sample("a"), sample("b")], SAMPLE_LIMIT).await.unwrap();
        assert_eq!(judged.iter().map(|judgement| judgement.value.number()).collect::<Vec<_>>(), [Some(0.0), Some(1.0)]);
        grading_ends(&builtin).await;
    }
}
