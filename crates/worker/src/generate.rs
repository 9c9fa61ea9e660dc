//! `rlood generator`: generates completions of one prompt with the base model and with a checkpoint, in its own process. It
//! reads a task from standard input (one line of JSON) and writes a report to standard output.
//!
//! A request that exceeds the model's context or the memory is rejected before any weight is read.

use std::num::NonZeroUsize;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use rlood_types::generate::{GenerateReport, GenerateTask, GeneratedText, Generation, RenderedPrompt};

use crate::args::OneShotArgs;
use crate::engine::backend::BackendKind;
use crate::engine::error::EngineError;
use crate::engine::generate::{GeneratePrompt, GenerateRequest, generate};
use crate::engine::host::PromptRow;
use crate::engine::model::{Adapter, Policy};
use crate::engine::prompts::{TokenizedPrompt, tokenize_row};
use crate::engine::random::{Key, Stream};
use crate::engine::sampling::Sampler;
use crate::engine::text::Text;
use crate::modelcard::{self, ModelCard};
use crate::one_shot::{self, OneShotError, error_text};
use crate::spec::FieldError;
use crate::spec::footprint::Footprint;

/// Reason why the model generated no completions.
enum GenerateError {
    Refused(FieldError),
    Failed(EngineError),
    TimedOut,
}

impl From<EngineError> for GenerateError {
    fn from(error: EngineError) -> Self {
        GenerateError::Failed(error)
    }
}

/// Runs `rlood generator`: reads the task, generates completions, and writes the report. The exit code is 0 even if the
/// report contains an error.
///
/// # Errors
/// Fails when standard input has no valid task, or the report cannot be written to standard output.
pub fn run(args: &OneShotArgs) -> Result<ExitCode, OneShotError> {
    let begun = Instant::now();
    let task: GenerateTask = one_shot::read_task()?;
    let deadline = begun + Duration::from_millis(task.limit_ms);
    let report = match compare(&task, &args.device.to_string(), deadline) {
        Ok(generation) => GenerateReport::Generated(generation),
        Err(GenerateError::Refused(error)) => GenerateReport::Refused(error),
        Err(GenerateError::Failed(error)) => GenerateReport::Unusable(error_text(&error)),
        Err(GenerateError::TimedOut) => GenerateReport::TimedOut,
    };
    one_shot::write_report(&report)?;
    Ok(ExitCode::SUCCESS)
}

fn compare(task: &GenerateTask, device: &str, deadline: Instant) -> Result<Generation, GenerateError> {
    let plan = &task.plan;
    let backend = BackendKind::of_device(device)?;
    let text = Text::load(&task.model_dir).map_err(EngineError::from)?;
    let row = PromptRow { prompt: task.prompt.clone(), columns: serde_json::Map::new() };
    let prompt = tokenize_row(&text, row, &plan.sampling).map_err(|error| {
        let detail = format!("the prompt cannot be used: {}", error_text(&error));
        GenerateError::Refused(FieldError::new("/prompt", "prompt_not_encodable", detail))
    })?;
    let card = modelcard::read(&task.model_dir).map_err(EngineError::from)?;
    check_limits(task, &card, prompt.ids.len() as u64).map_err(GenerateError::Refused)?;

    let run = GenerateRun { task, text: &text, prompt: &prompt, deadline };
    let load = |dir: &Path| Policy::load_dtype(dir, backend, &plan.training);
    let mut policy = load(&task.model_dir)?;
    let base = run.completions(&policy)?;
    match plan.lora {
        Some(_) => policy.load_lora(&task.checkpoint_dir)?,
        None => policy.load_full(&task.checkpoint_dir)?,
    }
    let trained = run.completions(&policy)?;
    let prompt = RenderedPrompt { num_tokens: prompt.ids.len() as u64, text: prompt.text };
    Ok(Generation { prompt, base, trained })
}

/// Checks that prompt and completions fit into the model's context and the memory.
fn check_limits(task: &GenerateTask, card: &ModelCard, prompt_tokens: u64) -> Result<(), FieldError> {
    let plan = &task.plan;
    let completion = u64::from(plan.sampling.max_completion_length);
    let positions = card.max_position_embeddings as u64;
    if prompt_tokens == 0 {
        return Err(FieldError::new("/prompt", "empty_prompt", "the prompt has no tokens; write some text"));
    }
    if prompt_tokens + completion > positions {
        let room = positions.saturating_sub(completion);
        let detail = format!(
            "the prompt has {prompt_tokens} tokens, but the maximum is {room} (max_position_embeddings {positions} − max_completion_length {completion}): shorten the prompt, or lower sampling.max_completion_length"
        );
        return Err(FieldError::new("/prompt", "prompt_too_long", detail));
    }
    let needed = Footprint::of_generation(plan, card.num_parameters, &card.shape(), prompt_tokens);
    match task.memory_limit_bytes {
        Some(limit) if needed > limit => {
            let mib = |bytes: u64| bytes.div_ceil(1 << 20);
            let detail = format!(
                "generating needs about {} MiB, but a process may use only {} MiB (--memory-limit): \
                 lower sampling.max_completion_length or num_generations, or shorten the prompt",
                mib(needed),
                mib(limit)
            );
            Err(FieldError::new("/sampling/max_completion_length", "not_enough_memory", detail))
        }
        Some(_) | None => Ok(()),
    }
}

/// The sampling request, which is run with the base model and then with the checkpoint.
struct GenerateRun<'a> {
    task: &'a GenerateTask,
    text: &'a Text,
    prompt: &'a TokenizedPrompt,
    deadline: Instant,
}

impl GenerateRun<'_> {
    /// Generates completions of the prompt with one model.
    fn completions(&self, policy: &Policy) -> Result<Vec<GeneratedText>, GenerateError> {
        let sampling = &self.task.plan.sampling;
        let num_generations = NonZeroUsize::new(self.task.num_generations as usize).unwrap_or(NonZeroUsize::MIN);
        let request = GenerateRequest {
            prompts: &[GeneratePrompt { row: 0, ids: &self.prompt.ids }],
            num_generations,
            sampler: Sampler::new(sampling, sampling.temperature),
            max_completion_length: sampling.max_completion_length as usize,
            stop: &sampling.stop,
            key: Key::new(self.task.seed, Stream::Generate),
            eos_token_ids: self.text.eos_token_ids(),
            adapter: Adapter::On,
            max_rows: num_generations.get(),
        };
        let groups = generate(policy, self.text, &request, &|| Instant::now() >= self.deadline)?;
        let completions = groups.ok_or(GenerateError::TimedOut)?.into_iter().flatten();
        let shown = completions.map(|completion| {
            Ok(GeneratedText {
                completion: self
                    .text
                    .decode(completion.segments.completion().map_err(EngineError::from)?, true)
                    .map_err(EngineError::from)?,
                num_tokens: completion.segments.num_model_tokens() as u64,
                finish_reason: completion.finish_reason,
            })
        });
        shown.collect()
    }
}
