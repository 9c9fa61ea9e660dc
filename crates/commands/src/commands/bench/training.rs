//! Forward and backward passes over the completions of a step, and log-probs without gradient, split into micro-batches
//! as in a job.

use std::num::NonZeroUsize;

use serde::{Deserialize, Serialize};

use super::decode::{device_peak_mib, peak_mib, policy};
use super::job::estimate_of_training_mib;
use super::profile::{ProfileFigures, profile};
use super::timing::{Timing, repeat, repeat_reporting};
use super::{BenchError, Setting};
use crate::config::Device;
use crate::engine::memory::micro_batches;
use crate::engine::model::{Adapter, RowScore, Trajectory};
use crate::spec::{MICRO_BATCH_TOKENS, MICRO_BATCH_TOKENS_ON_CPU};

/// Minimum duration of a measurement, in seconds per `--steps`.
const MIN_SECONDS: f64 = 0.1;

/// Results of the training part.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct TrainingFigures {
    /// Number of tokens as TRL counts them, with each prompt once per completion: completions · (prompt + completion).
    pub tokens: u64,
    /// Number of tokens when each prompt is counted once: prompts · prompt + completions · completion.
    pub shared_tokens: u64,
    /// Whether any repetition was measured; false = the figures are those of the warm-up run.
    pub warm: bool,
    /// Number of measured repetitions.
    pub repetitions: usize,
    /// Maximum number of tokens per forward and backward pass; a single group may exceed it.
    pub micro_batch_tokens: usize,
    /// Duration of forward and backward in the fastest repetition, in seconds.
    pub seconds: f64,
    /// Median duration in seconds.
    pub median_seconds: f64,
    /// `tokens` per second of the fastest repetition.
    pub tok_s: f64,
    /// Speed of the forward pass and dX in the fastest repetition, in 1e9 FLOPs per second. Counts each prompt once and the
    /// output head only at completion tokens, and no recomputation.
    pub gflop_s: f64,
    /// Duration of log-probs without gradient and without adapter in the fastest repetition, in seconds; None until measured.
    pub score_seconds: Option<f64>,
    /// `tokens` per second of log-probs without gradient.
    pub score_tok_s: Option<f64>,
    /// Peak memory of the process, in MiB.
    pub peak_mib: f64,
    /// Peak memory of the GPU in MiB; None on the CPU.
    pub device_peak_mib: Option<f64>,
    /// The server's estimate in MiB for a job with these settings, for the memory whose peak is measured, without optimizer
    /// moments, which this part does not have. None if the server would refuse the job.
    pub estimate_mib: Option<f64>,
    /// Kernel times of one forward and backward pass; None without `--profile` or on the CPU.
    pub profile: Option<ProfileFigures>,
}

/// Measures forward and backward passes, then log-probs.
///
/// # Errors
/// Fails when the engine fails.
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
    // Gradients of both signs, like real advantages; with zero gradients the engine could skip the backward pass.
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
    let trained = repeat_reporting(times, seconds, &mut train, |timing| setting.report_figures(&figures(timing)))?;
    let mut figures = figures(trained);
    setting.report_figures(&figures)?;
    if args.profile {
        figures.profile = profile(&policy, &mut train)?;
        setting.report_figures(&figures)?;
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
