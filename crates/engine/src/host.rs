//! The interface between the engine and its host. The worker implements [`Host`]; tests implement it in twenty lines.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tempfile::TempDir;

use super::error::EngineError;
use crate::environment::{EpisodeCall, Reply};
use crate::event::{Event, Metrics};
use crate::job::Failure;
use crate::protocol::FileEntry;
pub use rlood_types::rollout::{
    Generated, RewardSample, RewardValue, RolloutCompletion, RolloutId, RolloutPart, SampledGroup, Score,
};

/// The services that a run needs from its host. The engine's thread makes all calls, one at a time and in order.
pub trait Host {
    /// Returns the rewards of whole groups: one [`Score`] per sample, in order, each with one value per reward, in the
    /// plan's order. Blocks until all are there; returns [`RunEnd::Stopped`] if a stop arrived meanwhile.
    fn score(&mut self, request: &ScoreRequest<'_>) -> Result<Vec<Score>, RunEnd>;

    /// Announces samples that [`Host::score`] will request later under the same id. A host that can score in the
    /// background starts now. Returns immediately.
    fn begin_score(&mut self, _request: &ScoreRequest<'_>) -> Result<(), RunEnd> {
        Ok(())
    }

    /// Reports an event. Must not block for long.
    fn event(&mut self, event: Event) -> Result<(), RunEnd>;

    /// Publishes the complete checkpoint in `checkpoint.dir`; returns when that is done.
    fn saved(&mut self, checkpoint: &SavedCheckpoint<'_>) -> Result<(), RunEnd>;

    /// Returns a stop request, if any. The engine polls it between tokens, micro-batches and phases.
    fn stop(&self) -> Option<StopReason>;

    /// Returns completions that an earlier attempt sampled for this rollout (from its journal), which are scored
    /// instead of sampling again. Completions of other rows or of another number are ignored.
    fn recorded(&mut self, _id: RolloutId) -> Result<Option<Vec<SampledGroup>>, RunEnd> {
        Ok(None)
    }

    /// Reports newly sampled groups before they are scored, so that a host with a journal can store them. Not called
    /// for groups from [`Host::recorded`].
    fn sampled(&mut self, _id: RolloutId, _groups: &[SampledGroup]) -> Result<(), RunEnd> {
        Ok(())
    }

    /// Samples completions on rollout servers: for each prompt, in order, as many as requested. Called instead of the engine's own
    /// sampler in jobs whose plan has a rollout section. Blocks until all are there, or returns
    /// [`RunEnd::Stopped`] if a stop arrived meanwhile.
    fn sample(&mut self, _request: &SampleRequest<'_>) -> Result<Vec<Vec<Generated>>, RunEnd> {
        Err(RunEnd::Failed(EngineError::Input("this host has no rollout servers".to_owned())))
    }

    /// Asks the job's environment about episodes of a rollout; returns one reply for each call, in order. Answers that an earlier
    /// attempt received are given again, without asking. Blocks until all are there, or returns [`RunEnd::Stopped`] if a stop arrived
    /// meanwhile. [`Ask::Close`](crate::environment::Ask::Close) is not waited for.
    fn environment(&mut self, _id: RolloutId, _calls: &[EpisodeCall]) -> Result<Vec<Reply>, RunEnd> {
        Err(RunEnd::Failed(EngineError::Input("this host has no environment".to_owned())))
    }

    /// Whether to write a checkpoint after this step although the plan does not ask for one (because the
    /// journal has grown large).
    fn wants_checkpoint(&self) -> bool {
        false
    }

    /// Returns a recorded rollout for the block that begins with this optimizer step (1-based), to be used instead
    /// of sampling and scoring.
    fn rollout(&mut self, _step: u64) -> Option<Rollout> {
        None
    }

    /// Receives the internals of an optimizer step after the update, for tests.
    fn observe(&mut self, _trace: &StepTrace<'_>) {}
}

/// Samples to score: whole groups in block order.
#[derive(Debug)]
pub struct ScoreRequest<'a> {
    /// The rollout (training step or evaluation) that the samples belong to.
    pub id: RolloutId,
    /// The samples, in block order.
    pub samples: &'a [RewardSample],
}

/// A request for completions from rollout servers.
#[derive(Debug)]
pub struct SampleRequest<'a> {
    /// The rollout that the completions belong to.
    pub id: RolloutId,
    /// The prompts, in order.
    pub prompts: &'a [SamplePrompt<'a>],
    /// Number of completions per prompt.
    pub num_generations: NonZeroUsize,
    /// The sampling temperature; 0 = greedy.
    pub temperature: f64,
    /// Maximum number of tokens of a completion, including the end-of-sequence token.
    pub max_completion_length: usize,
    /// All tokens that end a completion.
    pub eos_token_ids: &'a [u32],
    /// Number of different token ids of the model.
    pub vocab_size: usize,
    /// The weights to sample with.
    pub adapter: &'a ExportedAdapter,
}

/// A prompt to sample from.
#[derive(Debug, Clone, Copy)]
pub struct SamplePrompt<'a> {
    /// Dataset row of the prompt.
    pub row: u64,
    /// Token ids of the prompt; at least one.
    pub ids: &'a [u32],
    /// Seed of the first completion; the seeds of the others follow it. A function of the job's seed, the rollout and the row.
    pub seed: u64,
}

/// The current adapter as a PEFT directory, and the log-probs by which a server's copy of it is checked.
#[derive(Debug)]
pub struct ExportedAdapter {
    /// Number of optimizer updates behind the weights.
    pub updates: u64,
    /// Number of optimizer steps done when the adapter was exported.
    pub step: u64,
    /// Directory of the adapter. It lasts as long as this value.
    pub dir: TempDir,
    /// Number of tokens that a server must be able to read: the longest prompt with its completion, or a probe.
    pub max_tokens: usize,
    /// Sequences of token ids, each with at least 2.
    pub probes: Vec<Vec<u32>>,
    /// Log-probs in nats of each token but the first of each probe, under the base model.
    pub base_logps: Vec<Vec<f32>>,
    /// The same under the exported adapter.
    pub logps: Vec<Vec<f32>>,
}

/// A checkpoint on disk that is not published yet.
#[derive(Debug)]
pub struct SavedCheckpoint<'a> {
    /// Directory of the checkpoint; the engine removes it after `saved` returns.
    pub dir: &'a Path,
    /// Number of optimizer steps done.
    pub step: u64,
    /// All files of the checkpoint, `manifest.json` last.
    pub files: &'a [FileEntry],
    /// Metrics of the step and of the last evaluation.
    pub metrics: &'a Metrics,
    /// Whether this is the last checkpoint of the run.
    pub last: bool,
}

/// The reason why the host asks the engine to stop at the next safe point.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StopReason {
    /// Cancel: discard the work since the last checkpoint.
    Cancel,
    /// Pause: finish or drop the current step, write a checkpoint, return.
    Pause {
        /// The cause of the pause, such as `reward_outage`; None = requested by the user.
        reason: Option<String>,
    },
    /// Shutdown of the worker process: like a pause, but within 30 s.
    Shutdown,
    /// The worker lost its claim on the job: return immediately and write nothing.
    LeaseLost,
}

/// The reason why a run ends before its last step. The engine returns it; a host returns it from a call to end the run.
#[derive(Debug, thiserror::Error)]
pub enum RunEnd {
    /// The run stopped as requested. For Pause and Shutdown a checkpoint was saved first.
    #[error("stopped: {0:?}")]
    Stopped(StopReason),
    /// The run failed and cannot continue.
    #[error(transparent)]
    Failed(#[from] EngineError),
    /// The engine's thread panicked. The engine itself never returns this.
    #[error("the training engine panicked")]
    Panicked,
}

impl From<Failure> for RunEnd {
    fn from(failure: Failure) -> Self {
        RunEnd::Failed(EngineError::Host(failure))
    }
}

impl dyn Host + '_ {
    /// Ends the run if a stop was requested.
    pub(crate) fn poll(&self) -> Result<(), RunEnd> {
        match self.stop() {
            None => Ok(()),
            Some(reason) => Err(RunEnd::Stopped(reason)),
        }
    }

    /// The end of a run that saw a stop request a moment ago. If the host has withdrawn it meanwhile, the run ends as
    /// for a shutdown: it is saved and can resume later.
    pub(crate) fn stopped(&self) -> RunEnd {
        RunEnd::Stopped(self.stop().unwrap_or(StopReason::Shutdown))
    }
}

/// A recorded rollout of one generation block.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Rollout {
    /// Whole groups (prompts with all their completions), in block order.
    pub groups: Vec<RolloutGroup>,
    /// The position in the prompts after this block, and counts of completions sampled outside of the block.
    #[serde(default)]
    pub drawn: BlockSampling,
}

/// How a block was filled: prompts used, refills, additional tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockSampling {
    /// Position in the shuffled prompts after this block, counted over all epochs; None means the position
    /// that applies without refills.
    pub next_prompt: Option<u64>,
    /// Number of refill rounds in which tied groups were replaced.
    pub refills: u32,
    /// Number of groups sampled in all refill rounds.
    pub sampled_groups: u64,
    /// Number of sampled groups whose rewards differ.
    pub informative_groups: u64,
    /// Number of prompt and completion tokens outside of the block: replaced groups and greedy completions.
    pub extra_tokens: u64,
    /// Number of completion tokens outside of the block.
    pub extra_completion_tokens: u64,
}

/// One prompt with its completions.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RolloutGroup {
    /// Index of the dataset row, from 0.
    pub row: u64,
    /// Token ids of the prompt.
    pub prompt_ids: Vec<u32>,
    /// The G completions of the prompt.
    pub completions: Vec<RolloutCompletion>,
    /// The greedy completion, which is the baseline of remax; never trained.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub greedy: Option<RolloutCompletion>,
}

/// The internals of one optimizer step; rows in block order.
#[derive(Debug)]
pub struct StepTrace<'a> {
    /// The optimizer step, 1-based.
    pub step: u64,
    /// Dataset rows of the step's completions.
    pub rows: &'a [u64],
    /// Token ids of each completion, without its prompt.
    pub completion_ids: &'a [Vec<u32>],
    /// Log-probs of the model tokens under the sampling policy.
    pub old_logps: &'a [Vec<f32>],
    /// Per-token log-probs of the reference; empty when beta = 0.
    pub ref_logps: &'a [Vec<f32>],
    /// Per-token log-probs in this step's training forward.
    pub new_logps: &'a [Vec<f32>],
    /// Final advantages, one per completion.
    pub advantages: &'a [f64],
    /// The flat gradient of the step after clipping.
    pub gradient: &'a super::backend::Flat,
    /// The flat parameters after the update.
    pub parameters: &'a super::backend::Flat,
    /// PEFT names, shapes and offsets of the tensors in the flat buffers.
    pub parameter_info: &'a [super::lora::ParameterInfo],
}

/// The input of a training run.
#[derive(Debug)]
pub struct TrainInput<'a> {
    /// The plan of the job.
    pub plan: &'a crate::spec::Plan,
    /// Directory with the base model's files.
    pub model_dir: &'a Path,
    /// The value of `base_model_name_or_path` in the adapter's config.
    pub model_name: &'a str,
    /// The dataset rows to train on.
    pub rows: Vec<PromptRow>,
    /// The evaluation rows; empty without evaluation.
    pub eval_rows: Vec<PromptRow>,
    /// The rows of the warm-up; empty if the job has no warm-up, or it is over.
    pub warm_up_rows: Vec<PromptRow>,
    /// Keys of prompts that only the verdict reads and the warm-up therefore leaves out; empty if the job has no
    /// warm-up, or it is over.
    pub judged_keys: Vec<crate::spec::PromptKey>,
    /// A verified checkpoint to resume from.
    pub resume: Option<PathBuf>,
    /// The checkpoint of a warm start: a PEFT adapter, or all weights in full fine-tuning. The plan says which
    /// weights are the reference.
    pub initial_adapter: Option<PathBuf>,
    /// The directory in which checkpoints are written before they are published.
    pub scratch_dir: &'a Path,
    /// The device, such as `cpu` or `cuda:0`.
    pub device: &'a str,
    /// The backend; None selects the default of the device.
    pub backend: Option<super::backend::BackendKind>,
}

/// One row of a dataset.
#[derive(Debug, Clone, PartialEq)]
pub struct PromptRow {
    /// The prompt: a string, or a list of chat messages.
    pub prompt: Value,
    /// All other columns of the row, which rewards can read.
    pub columns: Map<String, Value>,
}
