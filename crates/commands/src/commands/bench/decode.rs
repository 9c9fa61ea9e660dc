//! Generation: prefills the prompts, then decodes one token at a time until every completion has its length.

use std::num::NonZeroUsize;

use std::process::{Child, Command};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::profile::{ProfileFigures, profile};
use super::timing::{Timing, repeat, repeat_reporting};
use super::{BenchError, Setting, io, job};
use crate::engine::backend::BackendKind;
use crate::engine::backend::Module;
use crate::engine::generate::{GeneratePrompt, GenerateRequest, generate};
use crate::engine::memory::peak_resident_bytes;
use crate::engine::model::{Adapter, Policy, Precision};
use crate::engine::random::{Key, Stream};
use crate::engine::sampling::Sampler;
use crate::engine::text::Text;
use crate::spec::LoraPlan;

/// Batch sizes to measure in addition to that of a training step, as (prompts, completions per prompt).
const BATCHES: [(usize, usize); 3] = [(1, 1), (1, 4), (4, 4)];

/// Number of tokens per completion in these additional batches.
const SHORT_COMPLETION: usize = 32;

/// Maximum number of tokens per completion with `--profile`, because each kernel launch records two CUDA events.
const PROFILED_COMPLETION: usize = 128;

/// Minimum duration of measuring a batch, in seconds; multiplied by `--steps`.
const MIN_SECONDS: f64 = 0.1;

/// How long the busy process runs before generation next to it is measured.
const SETTLE: Duration = Duration::from_millis(300);

/// Results of the generation part.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct DecodeFigures {
    /// All measured batches; the last one has the size of a training step's batch.
    pub batches: Vec<Batch>,
    /// Peak memory of the process, in MiB.
    pub peak_mib: f64,
    /// Peak memory of the GPU in MiB; None on the CPU.
    pub device_peak_mib: Option<f64>,
    /// Memory of the base model's matrices; None on a GPU.
    #[serde(default)]
    pub base: Option<BaseMemory>,
    /// Kernel times while the batch of a training step is generated, with at most 128 tokens per completion; None without
    /// `--profile` or on the CPU.
    pub profile: Option<ProfileFigures>,
}

/// Memory of the base model's matrices, as the backend holds them.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct BaseMemory {
    /// Memory of the linear layers in MiB, padding included.
    pub linear_mib: f64,
    /// The same as a share of their size in bf16.
    pub linear_of_bf16: f64,
    /// Memory of embedding and head in MiB.
    pub others_mib: f64,
    /// The whole as a share of the server's estimate of it.
    pub of_estimate: f64,
}

/// Results of generating one batch.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Batch {
    /// Number of prompts per step.
    pub prompts: usize,
    /// Number of completions per prompt.
    pub generations: usize,
    /// Number of tokens per completion.
    pub completion: usize,
    /// Whether any repetition was measured; false = the durations are those of the warm-up run.
    pub warm: bool,
    /// Number of measured repetitions.
    pub repetitions: usize,
    /// Duration of the fastest repetition in seconds, including prefill.
    pub seconds: f64,
    /// Median duration in seconds.
    pub median_seconds: f64,
    /// Completion tokens per second of the fastest repetition.
    pub tok_s: f64,
    /// Duration of prefill and the first token, in seconds.
    pub prefill_s: f64,
    /// Duration of one decode step without prefill, in seconds.
    pub decode_step_s: f64,
    /// Tokens per second without prefill.
    pub pure_tok_s: f64,
    /// Weights read per second without prefill, in 1e9 bytes: every matrix once per step, KV cache not counted.
    pub gb_s: f64,
}

/// Results of generation next to a process that keeps a core busy.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct BusyFigures {
    /// Tokens per second without the busy process.
    pub idle_tok_s: f64,
    /// Tokens per second next to the busy process.
    pub busy_tok_s: f64,
    /// Ratio of busy to idle speed.
    pub ratio: f64,
}

/// Measures generation with each batch size.
///
/// # Errors
/// Fails when the engine fails.
pub fn measure(setting: &Setting<'_>) -> Result<DecodeFigures, BenchError> {
    let bench = Generation::load(setting)?;
    let own = (setting.args.prompts as usize, setting.args.generations as usize);
    let figures = |batches: &[Batch]| DecodeFigures {
        batches: batches.to_vec(),
        peak_mib: peak_mib(),
        device_peak_mib: device_peak_mib(&bench.policy),
        base: base_memory(setting, &bench.policy),
        profile: None,
    };
    let mut batches = Vec::new();
    for (prompts, generations) in BATCHES.into_iter().filter(|batch| *batch != own) {
        let completion = SHORT_COMPLETION.min(setting.args.completion as usize);
        batches.push(bench.batch((prompts, generations), completion, 2, |_| Ok(()))?);
    }
    let times = setting.args.steps as usize;
    // Progress is reported only for the last batch, which has the size of a training step and is the one that results are
    // compared by.
    let tell = |batch| setting.report_figures(&figures(&[batches.as_slice(), &[batch]].concat()));
    let last = bench.batch(own, setting.args.completion as usize, times, tell)?;
    batches.push(last);
    let mut figures = figures(&batches);
    if setting.args.profile {
        setting.report_figures(&figures)?;
        let completion = PROFILED_COMPLETION.min(setting.args.completion as usize);
        let ids = setting.prompts(own.0);
        figures.profile = profile(&bench.policy, || bench.generate(&ids, own.1, completion))?;
    }
    Ok(figures)
}

/// Measures generation of a training step's batch, alone and next to a busy process.
///
/// # Errors
/// Fails when the engine fails, or no process can be started.
pub fn beside_a_busy_process(setting: &Setting<'_>) -> Result<BusyFigures, BenchError> {
    let bench = Generation::load(setting)?;
    let (prompts, generations) = (setting.args.prompts as usize, setting.args.generations as usize);
    let (completion, times) = (setting.args.completion as usize, setting.args.steps as usize);
    // The medians are compared: the fastest repetition would be the one that the busy process disturbed least.
    let tokens = (prompts * generations * completion) as f64;
    let idle_tok_s = tokens / bench.batch((prompts, generations), completion, times, |_| Ok(()))?.median_seconds;
    let busy = BusyProcess::start()?;
    std::thread::sleep(SETTLE);
    let busy_tok_s = tokens / bench.batch((prompts, generations), completion, times, |_| Ok(()))?.median_seconds;
    drop(busy);
    Ok(BusyFigures { idle_tok_s, busy_tok_s, ratio: busy_tok_s / idle_tok_s })
}

/// The memory of the base model's matrices; None if the backend does not know it, or the server would refuse such a job.
fn base_memory(setting: &Setting<'_>, policy: &Policy) -> Option<BaseMemory> {
    let (linear, others) = policy.matrix_bytes()?;
    let mib = |bytes: usize| bytes as f64 / (1 << 20) as f64;
    Some(BaseMemory {
        linear_mib: mib(linear),
        linear_of_bf16: linear as f64 / (2 * setting.weights.linear) as f64,
        others_mib: mib(others),
        of_estimate: mib(linear + others) / job::estimate_of_base_mib(setting)?,
    })
}

/// Peak of the process's resident memory so far, in MiB; 0 if the system does not report it.
pub(super) fn peak_mib() -> f64 {
    peak_resident_bytes().unwrap_or(0) as f64 / (1 << 20) as f64
}

/// Peak of the device's memory so far, in MiB; None if the policy computes on the CPU.
pub(super) fn device_peak_mib(policy: &Policy) -> Option<f64> {
    policy.device_peak_bytes().map(|bytes| bytes as f64 / (1 << 20) as f64)
}

/// A shell that runs an endless loop to keep a core busy; killed when dropped.
struct BusyProcess(Child);

impl BusyProcess {
    fn start() -> Result<Self, BenchError> {
        let child = Command::new("sh").args(["-c", "while :; do :; done"]).spawn();
        child.map(BusyProcess).map_err(io("start a process that keeps a CPU core busy"))
    }
}

impl Drop for BusyProcess {
    fn drop(&mut self) {
        // Killing the busy process fails only if it has already exited.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Generation with a loaded model.
pub(super) struct Generation<'a> {
    setting: &'a Setting<'a>,
    policy: Policy,
    text: Text,
}

impl<'a> Generation<'a> {
    pub(super) fn load(setting: &'a Setting<'a>) -> Result<Generation<'a>, BenchError> {
        let text = Text::load(&setting.model_dir).map_err(crate::engine::error::EngineError::from)?;
        Ok(Generation { setting, policy: policy(setting)?, text })
    }

    /// Generates `generations` completions of `tokens` tokens for each prompt.
    fn generate(&self, prompts: &[Vec<u32>], generations: usize, tokens: usize) -> Result<(), BenchError> {
        let prompts: Vec<GeneratePrompt<'_>> =
            prompts.iter().zip(0..).map(|(ids, row)| GeneratePrompt { row, ids, given: &[] }).collect();
        let request = GenerateRequest {
            prompts: &prompts,
            num_generations: NonZeroUsize::new(generations).unwrap_or(NonZeroUsize::MIN),
            sampler: Sampler { temperature: 1.0, top_p: 1.0, top_k: 0, min_p: 0.0, repetition_penalty: 1.0 },
            max_completion_length: tokens,
            stop: &[],
            key: Key::new(0, Stream::Train),
            eos_token_ids: &[],
            adapter: Adapter::On,
            max_rows: prompts.len() * generations,
        };
        Ok(generate(&self.policy, &self.text, &request, &|| false).map(drop)?)
    }

    /// Measures generation of one batch, given as (prompts, completions per prompt), and reports the
    /// figures after each repetition.
    pub(super) fn batch(
        &self,
        (prompts, generations): (usize, usize),
        completion: usize,
        times: usize,
        mut tell: impl FnMut(Batch) -> Result<(), BenchError>,
    ) -> Result<Batch, BenchError> {
        let ids = self.setting.prompts(prompts);
        let seconds = MIN_SECONDS * f64::from(self.setting.args.steps);
        let first = repeat(times, seconds / 5.0, || self.generate(&ids, generations, 1))?;
        let tokens = (prompts * generations * completion) as f64;
        let bytes = self.setting.weights.bytes_per_step(self.setting.value_bytes(), self.setting.four_bit());
        let batch = |all: Timing| {
            // The duration is at least a nanosecond, because it is a divisor: with a tiny model, noise can make the difference
            // of two measurements zero.
            let decode_step_s = ((all.min_s - first.min_s) / completion.saturating_sub(1).max(1) as f64).max(1e-9);
            Batch {
                prompts,
                generations,
                completion,
                warm: all.warm(),
                repetitions: all.repetitions,
                seconds: all.min_s,
                median_seconds: all.median_s,
                tok_s: tokens / all.min_s,
                prefill_s: first.min_s,
                decode_step_s,
                pure_tok_s: (prompts * generations) as f64 / decode_step_s,
                gb_s: bytes as f64 / decode_step_s / 1e9,
            }
        };
        let all = repeat_reporting(
            times,
            seconds,
            || self.generate(&ids, generations, completion),
            |timing| tell(batch(timing)),
        )?;
        Ok(batch(all))
    }
}

/// Loads the model with a new adapter on every linear layer.
pub(super) fn policy(setting: &Setting<'_>) -> Result<Policy, BenchError> {
    let kind = BackendKind::of_device(&setting.args.device.to_string())?;
    let mut policy = Policy::load_dtype(
        &setting.model_dir,
        kind,
        Precision { dtype: setting.dtype(), load_in_4bit: setting.four_bit() },
    )?;
    policy.set_gradient_checkpointing(setting.args.gradient_checkpointing);
    let rank = setting.args.lora_r;
    let config = policy.card().config.clone();
    let target_modules = Module::of_model(&config).iter().map(|module| module.name().to_owned()).collect();
    policy.add_lora(&LoraPlan { target_modules, ..LoraPlan::all_linear(rank, f64::from(rank)) }, 0)?;
    Ok(policy)
}
