//! The seam between the engine and whoever runs it. The worker implements [`Host`]; tests do in twenty lines.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::error::EngineError;
use crate::event::{Event, Metrics};
use crate::job::Failure;
use crate::protocol::FileEntry;
pub use crate::sample::{RewardSample, RewardValue, RolloutCompletion, RolloutId, RolloutPart, SampledGroup, Score};

/// What a run asks of its surroundings. Calls come from the engine's thread, one at a time, in order.
pub trait Host {
    /// Rewards for whole groups: one [`Score`] a sample, in order, each with one value a reward of the plan, in the
    /// plan's order. Blocks until all are there; returns [`RunEnd::Stopped`] when a stop arrived meanwhile.
    fn score(&mut self, request: &ScoreRequest<'_>) -> Result<Vec<Score>, RunEnd>;

    /// These samples will be asked for by [`Host::score`], under the same id, after other work: a host that can begins now, and
    /// returns at once.
    fn begin_score(&mut self, _request: &ScoreRequest<'_>) -> Result<(), RunEnd> {
        Ok(())
    }

    /// Something happened. Must not block for long.
    fn event(&mut self, event: Event) -> Result<(), RunEnd>;

    /// A complete checkpoint lies in `checkpoint.dir`; returns when it is published.
    fn saved(&mut self, checkpoint: &SavedCheckpoint<'_>) -> Result<(), RunEnd>;

    /// Polled between tokens, between micro-batches and between phases.
    fn stop(&self) -> Option<StopReason>;

    /// What a former attempt sampled for this rollout (its journal), to be scored instead of sampling again. Completions of
    /// other rows or of another number are not used.
    fn recorded(&mut self, _id: RolloutId) -> Result<Option<Vec<SampledGroup>>, RunEnd> {
        Ok(None)
    }

    /// These were sampled just now and are scored next: whoever keeps a journal writes them down. Not called for what
    /// [`Host::recorded`] gave.
    fn sampled(&mut self, _id: RolloutId, _groups: &[SampledGroup]) -> Result<(), RunEnd> {
        Ok(())
    }

    /// True when a checkpoint is wanted after this step though the plan asks for none (the journal has grown large).
    fn wants_checkpoint(&self) -> bool {
        false
    }

    /// A recorded rollout for the block that begins with this optimizer step (1-based), instead of sampling and scoring.
    fn rollout(&mut self, _step: u64) -> Option<Rollout> {
        None
    }

    /// The inside of an optimizer step, for tests: called after the update.
    fn observe(&mut self, _trace: &StepTrace<'_>) {}
}

/// Samples to score, whole groups in block order.
#[derive(Debug)]
pub struct ScoreRequest<'a> {
    /// Which rollout of the run.
    pub id: RolloutId,
    /// The samples.
    pub samples: &'a [RewardSample],
}

/// A checkpoint on disk, not yet published.
#[derive(Debug)]
pub struct SavedCheckpoint<'a> {
    /// Where it lies; the engine removes it after `saved` returns.
    pub dir: &'a Path,
    /// Optimizer steps done.
    pub step: u64,
    /// Every file, `manifest.json` last.
    pub files: &'a [FileEntry],
    /// Metrics of its step and of the last evaluation.
    pub metrics: &'a Metrics,
    /// The last one of the run.
    pub last: bool,
}

/// Why the engine should stop at the next safe point.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StopReason {
    /// Drop the work since the last checkpoint.
    Cancel,
    /// Finish or drop the step, checkpoint, return.
    Pause {
        /// `reward_outage`, …; None = the user's wish.
        reason: Option<String>,
    },
    /// As pause, within 30 s: the process goes away.
    Shutdown,
    /// The claim is lost: return at once, write nothing.
    LeaseLost,
}

/// Why a run ends before all its steps are done. The engine returns it; a host returns it from a call to end the run.
#[derive(Debug, thiserror::Error)]
pub enum RunEnd {
    /// A stop was honoured; for Pause and Shutdown a checkpoint was saved first.
    #[error("stopped: {0:?}")]
    Stopped(StopReason),
    /// The run cannot go on.
    #[error(transparent)]
    Failed(#[from] EngineError),
    /// The thread that ran the engine panicked. The engine itself never returns it.
    #[error("the engine panicked")]
    Panicked,
}

impl From<Failure> for RunEnd {
    fn from(failure: Failure) -> Self {
        RunEnd::Failed(EngineError::Host(failure))
    }
}

impl dyn Host + '_ {
    /// Ends the run if a stop was asked for.
    pub(crate) fn poll(&self) -> Result<(), RunEnd> {
        match self.stop() {
            None => Ok(()),
            Some(reason) => Err(RunEnd::Stopped(reason)),
        }
    }

    /// The end of a run that saw a stop a moment ago. If the host took it back, the run is put down as for a shutdown: saved, to
    /// go on later.
    pub(crate) fn stopped(&self) -> RunEnd {
        RunEnd::Stopped(self.stop().unwrap_or(StopReason::Shutdown))
    }
}

/// A recorded rollout of one generation block.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Rollout {
    /// Whole groups, in block order.
    pub groups: Vec<RolloutGroup>,
    /// Where the prompts ended, and what was sampled beside them.
    #[serde(default)]
    pub drawn: Drawn,
}

/// What it took to fill a block.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Drawn {
    /// The cursor behind its prompts, counted in prompts over all epochs; None = where it is without refills.
    pub next_prompt: Option<u64>,
    /// Rounds in which tied groups were replaced.
    pub refills: u32,
    /// Groups sampled in all rounds.
    pub sampled_groups: u64,
    /// Of these, the ones whose rewards differ.
    pub informative_groups: u64,
    /// Prompt and completion tokens that are not part of the block: replaced groups and greedy completions.
    pub extra_tokens: u64,
    /// The completions' share of these.
    pub extra_completion_tokens: u64,
}

/// One prompt with its completions.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RolloutGroup {
    /// Dataset row, from 0.
    pub row: u64,
    /// Token ids of the prompt.
    pub prompt_ids: Vec<u32>,
    /// G of them.
    pub completions: Vec<RolloutCompletion>,
    /// The baseline of remax; never trained.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub greedy: Option<RolloutCompletion>,
}

/// The inside of one optimizer step; rows in block order.
#[derive(Debug)]
pub struct StepTrace<'a> {
    /// Optimizer step, 1-based.
    pub step: u64,
    /// Dataset rows of the step's completions.
    pub rows: &'a [u64],
    /// Token ids of what followed the prompts.
    pub completion_ids: &'a [Vec<u32>],
    /// Log-probs of the model tokens by the sampling policy.
    pub old_logps: &'a [Vec<f32>],
    /// Per-token log-probs of the reference; empty when beta = 0.
    pub ref_logps: &'a [Vec<f32>],
    /// Per-token log-probs in this step's training forward.
    pub new_logps: &'a [Vec<f32>],
    /// Final advantages.
    pub advantages: &'a [f64],
    /// The gradient after clipping.
    pub gradient: &'a super::backend::Flat,
    /// The parameters after the update.
    pub parameters: &'a super::backend::Flat,
    /// PEFT names, shapes and offsets of the flat buffers.
    pub parameter_info: &'a [super::lora::ParameterInfo],
}

/// What to train, and from where.
#[derive(Debug)]
pub struct TrainInput<'a> {
    /// What to do.
    pub plan: &'a crate::spec::Plan,
    /// The model's directory.
    pub model_dir: &'a Path,
    /// `base_model_name_or_path` in the adapter's config.
    pub model_name: &'a str,
    /// The training rows.
    pub rows: Vec<PromptRow>,
    /// The evaluation rows; empty without evaluation.
    pub eval_rows: Vec<PromptRow>,
    /// The rows of the warm-up; empty without one, and where it is over.
    pub warm_up_rows: Vec<PromptRow>,
    /// A verified checkpoint to go on from.
    pub resume: Option<PathBuf>,
    /// The checkpoint of a warm start: a PEFT adapter, or all weights in full fine-tuning; the plan says what the reference is.
    pub initial_adapter: Option<PathBuf>,
    /// Where checkpoints are written before they are published.
    pub scratch_dir: &'a Path,
    /// `cpu`, `cuda:0`.
    pub device: &'a str,
    /// What computes; None = what the device runs.
    pub backend: Option<super::backend::BackendKind>,
}

/// One row of a dataset.
#[derive(Debug, Clone, PartialEq)]
pub struct PromptRow {
    /// A string, or a list of chat messages.
    pub prompt: Value,
    /// Every other column; rewards see them.
    pub columns: Map<String, Value>,
}
