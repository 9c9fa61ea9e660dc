//! Forward and backward over the completions of a step, and log-probs without gradient, cut as a job cuts them.

use std::num::NonZeroUsize;

use serde::{Deserialize, Serialize};

use super::decode::{device_peak_mib, peak_mib, policy};
use super::job::estimate_of_training_mib;
use super::profile::{ProfileFigures, profile};
use super::timing::{Timing, repeat, repeat_telling};
use super::{BenchError, Setting};
use crate::config::Device;
use crate::engine::memory::micro_batches;
use crate::engine::model::{Adapter, RowScore, Trajectory};
use crate::spec::{MICRO_BATCH_TOKENS, MICRO_BATCH_TOKENS_ON_CPU};

/// Shortest measurement, seconds for each of `--steps`.
const MIN_SECONDS: f64 = 0.1;

/// What training reached.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct TrainingFigures {
    /// Tokens as TRL counts them: completions · (prompt + completion).
    pub tokens: u64,
    /// Tokens without repetition: prompts · prompt + completions · completion.
    pub shared_tokens: u64,
    /// Whether a repetition was measured; false: what is here is of the one that warms up.
    pub warm: bool,
    /// Measured repetitions.
    pub repetitions: usize,
    /// Tokens of a forward and backward, at most, but for one group.
    pub micro_batch_tokens: usize,
    /// Forward and backward: the fastest.
    pub seconds: f64,
    /// The median.
    pub median_seconds: f64,
    /// `tokens` over the fastest seconds.
    pub tok_s: f64,
    /// Forward and dX of the unrepeated tokens, the head at completions only, nothing recomputed, over the fastest seconds.
    pub gflop_s: f64,
    /// Log-probs without gradient, adapter off: the fastest; None while that was not measured.
    pub score_seconds: Option<f64>,
    /// `tokens` over that.
    pub score_tok_s: Option<f64>,
    /// The process's peak, MiB.
    pub peak_mib: f64,
    /// The device's peak, MiB, where it is not the processor.
    pub device_peak_mib: Option<f64>,
    /// What the server says that a job with these settings takes, MiB, of the memory whose peak is measured; without the
    /// moments, which this part has none of. None where it would refuse the job.
    pub estimate_mib: Option<f64>,
    /// With `--profile` on a GPU: the kernels of one forward and backward.
    pub profile: Option<ProfileFigures>,
}

/// Forward and backward, then log-probs.
///
/// # Errors
/// When the engine fails.
pub fn measure(setting: &Setting<'_>) -> Result<TrainingFigures, BenchError> {
    let policy = policy(setting)?;
    let args = setting.args;
    let (prompts, generations) = (args.prompts as usize, args.generations as usize);
    let (prompt_len, completion) = (args.prompt_len as usize, args.completion as usize);
    let prompt_ids = setting.prompts(prompts);
    let completion_ids: Vec<Vec<u32>> =
        (0..prompts * generations).map(|row| setting.tokens((1 << 32) + row as u64, completion)).collect();
    let rows: Vec<Trajectory<'_>> = completion_ids
        .iter()
        .enumerate()
        .map(|(row, completion)| Trajectory::of_completion(&prompt_ids[row / generations], completion))
        .collect();
    let lengths = vec![prompt_len + completion; rows.len()];
    let by_default = match args.device {
        Device::Cpu => MICRO_BATCH_TOKENS_ON_CPU,
        Device::Cuda(_) => MICRO_BATCH_TOKENS,
    };
    let most = args.micro_batch_tokens.unwrap_or(by_default) as usize;
    let batches = micro_batches(&lengths, NonZeroUsize::new(generations).unwrap_or(NonZeroUsize::MIN), most);
    let mut gradient = policy.zero_gradient()?;
    // Both signs, as advantages have: a backward pass of nothing could be skipped.
    let mut loss = |scores: &[RowScore]| {
        let of_row = |(row, score): (usize, &RowScore)| {
            vec![if row.is_multiple_of(2) { 1e-3 } else { -1e-3 }; score.logps.len()]
        };
        Ok(scores.iter().enumerate().map(of_row).collect())
    };
    let (times, seconds) = (args.steps as usize, MIN_SECONDS * f64::from(args.steps));
    let tokens = (rows.len() * (prompt_len + completion)) as u64;
    let scored_tokens = (rows.len() * completion) as u64;
    let shared_tokens = (prompts * prompt_len) as u64 + scored_tokens;
    let estimate_mib = estimate_of_training_mib(setting, most as u64);
    let figures = |trained: Timing| TrainingFigures {
        tokens,
        shared_tokens,
        warm: trained.warm(),
        repetitions: trained.repetitions,
        micro_batch_tokens: most,
        seconds: trained.min_s,
        median_seconds: trained.median_s,
        tok_s: tokens as f64 / trained.min_s,
        gflop_s: setting.weights.training_flops(shared_tokens, scored_tokens) / trained.min_s / 1e9,
        score_seconds: None,
        score_tok_s: None,
        peak_mib: peak_mib(),
        device_peak_mib: device_peak_mib(&policy),
        estimate_mib,
        profile: None,
    };
    let mut train = || -> Result<(), BenchError> {
        batches.iter().try_for_each(|batch| {
            policy.forward_backward(&rows[batch.clone()], 1.0, &mut loss, &mut gradient).map(drop)
        })?;
        Ok(gradient.settle()?)
    };
    let trained = repeat_telling(times, seconds, &mut train, |timing| setting.tell(&figures(timing)))?;
    let mut figures = figures(trained);
    setting.tell(&figures)?;
    if args.profile {
        figures.profile = profile(&policy, &mut train)?;
        setting.tell(&figures)?;
    }
    let scored = repeat(times, seconds, || {
        batches.iter().try_for_each(|batch| policy.score(&rows[batch.clone()], 1.0, Adapter::Off).map(drop))
    })?;
    figures.score_seconds = Some(scored.min_s);
    figures.score_tok_s = Some(tokens as f64 / scored.min_s);
    figures.peak_mib = peak_mib();
    figures.device_peak_mib = device_peak_mib(&policy);
    Ok(figures)
}
