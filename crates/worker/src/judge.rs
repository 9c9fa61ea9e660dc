//! `rlood judge`: compares the base model and a checkpoint on the same rows, in its own process. It reads a task from standard
//! input (one line of JSON) and writes lines to standard output: progress, each judged row, and finally the report.
//!
//! Both models are sampled first, one after the other, with the same random numbers. Then the rewards are
//! computed as in an evaluation.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::process::ExitCode;
use std::sync::Arc;

use serde_json::{Map, Value};

use crate::args::OneShotArgs;
use crate::engine::advantage::{RewardWeight, combine_rewards};
use crate::engine::backend::BackendKind;
use crate::engine::error::EngineError;
use crate::engine::generate::{GeneratePrompt, GenerateRequest, generate};
use crate::engine::host::PromptRow;
use crate::engine::memory::generation_rows;
use crate::engine::model::{Adapter, Policy};
use crate::engine::prompts::{TokenizedPrompt, tokenize};
use crate::engine::random::{Key, Stream};
use crate::engine::sampling::Sampler;
use crate::engine::text::Text;
use crate::modelcard;
use crate::one_shot::{self, OneShotError, error_text};
use crate::outgoing::OutgoingPolicy;
use crate::reward::{JobContext, Rewards};
use crate::reward_model::LocalRewardModels;
use crate::rollout::{Generated, RewardSample, RolloutId};
use crate::spec::footprint::Footprint;
use crate::spec::{EvalPlan, Plan, RewardPlan, RewardSecrets, eval_secret_name, guard_secret_name};
use crate::verdict::{
    Answers, JudgeLine, JudgeReport, JudgeTask, JudgedText, RowSet, VerdictError, VerdictResult, VerdictRow,
    guarding_rewards, judging_rewards,
};

/// Number of prompts sampled between two lines that report the progress.
const CHUNK_PROMPTS: usize = 32;
/// Number of completions scored between two lines that report the progress. The completions of a row are kept together.
const CHUNK_COMPLETIONS: usize = 256;
/// Maximum size in bytes of a prompt or completion in the stored result.
const MAX_TEXT_BYTES: usize = 64 * 1024;

/// Runs `rlood judge`: reads the task, compares the models, and writes the report. The exit code is 0 even if the
/// report contains an error.
///
/// # Errors
/// Fails when standard input has no valid task, or the report cannot be written to standard output.
pub async fn run(args: OneShotArgs) -> Result<ExitCode, OneShotError> {
    let task: JudgeTask = one_shot::read_task()?;
    let report = match judge(task, &args.device.to_string()).await {
        Ok(result) => JudgeReport::Judged(Box::new(result)),
        Err(error) => JudgeReport::Failed(error),
    };
    one_shot::write_report(&JudgeLine::Report(report))?;
    Ok(ExitCode::SUCCESS)
}

fn failed(code: &str, message: impl std::fmt::Display) -> VerdictError {
    VerdictError { code: code.to_owned(), message: message.to_string() }
}

fn of_engine(error: &EngineError) -> VerdictError {
    let code = match error {
        EngineError::Prompts(_) => "prompts_invalid",
        EngineError::Model(_) | EngineError::ModelNotFinite { .. } => "model_invalid",
        EngineError::OutOfMemory(_) => "out_of_memory",
        _ => "engine",
    };
    failed(code, error_text(error))
}

/// Counts the rows that were sampled and scored with each model, and reports the progress.
struct Progress {
    done: u64,
    total: u64,
}

impl Progress {
    fn advance(&mut self, parts: usize) {
        self.done += parts as u64;
        // A failed write of the progress is ignored: if the server is gone, the closed standard input ends this process.
        let _ = one_shot::write_report(&JudgeLine::Progress { done: self.done, total: self.total });
    }
}

/// The dataset rows of one set (test rows or guard set) with the completions of both models.
struct Sampled {
    set: RowSet,
    /// Indices of these rows in their dataset.
    numbers: Vec<u64>,
    prompts: Vec<TokenizedPrompt>,
    /// Completions of the base model, `[row][completion]`.
    base: Vec<Vec<Completion>>,
    /// Completions of the trained model, `[row][completion]`.
    trained: Vec<Vec<Completion>>,
}

struct Completion {
    text: String,
    generated: Generated,
}

async fn judge(task: JudgeTask, device: &str) -> Result<VerdictResult, VerdictError> {
    let Some(eval) = task.plan.eval.clone() else {
        return Err(failed("no_evaluation", "the job has no evaluation"));
    };
    let rewards = [
        (RowSet::Test, build_rewards(&task, device, judging_rewards(&task.plan), RowSet::Test)?),
        (RowSet::Guard, build_rewards(&task, device, guarding_rewards(&task.plan), RowSet::Guard)?),
    ];
    for (_, rewards) in rewards.iter().filter(|(set, _)| *set == RowSet::Test || !task.guard_rows.is_empty()) {
        rewards.prepare().await.map_err(|failure| {
            let failure = failure.to_failure(task.step);
            failed(&failure.code, failure.message)
        })?;
    }
    let device = device.to_owned();
    let sampling = tokio::task::spawn_blocking(move || sample_both(task, &eval, &device));
    let (task, sampled, mut progress) =
        sampling.await.map_err(|error| failed("panicked", format!("the sampling thread panicked: {error}")))??;
    let mut rows = Vec::new();
    for sampled in sampled {
        let Some((_, rewards)) = rewards.iter().find(|(set, _)| *set == sampled.set) else { continue };
        score(&task, rewards, sampled, &mut progress, &mut rows).await?;
    }
    Ok(VerdictResult::of(&rows, &task.plan, task.rows_from, task.sampling))
}

fn build_rewards(task: &JudgeTask, device: &str, plans: &[RewardPlan], set: RowSet) -> Result<Rewards, VerdictError> {
    let policy = OutgoingPolicy::parse(&task.allow_outgoing).map_err(|error| failed("setting", error))?;
    let models = LocalRewardModels::new(device, task.reward_models.clone(), &task.plan);
    Rewards::with_models(plans, &secrets_of(task, set), &policy, None, Some(Arc::new(models)))
        .map_err(|error| failed("reward_not_usable", error))
}

/// Returns the secrets of the rewards that score a set of rows, by reward name. The task stores the secrets of rewards that only
/// the evaluation or the guard has under other names.
fn secrets_of(task: &JudgeTask, set: RowSet) -> BTreeMap<String, RewardSecrets> {
    let plan = &task.plan;
    let secret_name = |name: &str| match set {
        RowSet::Guard if plan.guard_rewards().is_some() => guard_secret_name(name),
        _ if plan.eval_rewards().is_some() => eval_secret_name(name),
        RowSet::Test | RowSet::Guard => name.to_owned(),
    };
    let plans = if set == RowSet::Guard { guarding_rewards(plan) } else { judging_rewards(plan) };
    let secret = |reward: &RewardPlan| {
        let secret = task.secrets.get(&secret_name(&reward.name))?.clone();
        Some((reward.name.clone(), secret))
    };
    plans.iter().filter_map(secret).collect()
}

fn prompt_rows(rows: &[(u64, Map<String, Value>)]) -> Result<Vec<PromptRow>, VerdictError> {
    let read = |(number, row): &(u64, Map<String, Value>)| {
        let mut columns = row.clone();
        let prompt = columns.shift_remove("prompt");
        let prompt =
            prompt.ok_or_else(|| failed("prompts_invalid", format!("row {number} of the dataset has no prompt")))?;
        Ok(PromptRow { prompt, columns })
    };
    rows.iter().map(read).collect()
}

/// Samples completions with the base model, then with the checkpoint. Blocks.
fn sample_both(
    task: JudgeTask,
    eval: &EvalPlan,
    device: &str,
) -> Result<(JudgeTask, Vec<Sampled>, Progress), VerdictError> {
    let plan = &task.plan;
    let error = |error: EngineError| of_engine(&error);
    let backend = BackendKind::of_device(device).map_err(error)?;
    let text = Text::load(&task.model_dir).map_err(|source| of_engine(&source.into()))?;
    let card = modelcard::read(&task.model_dir).map_err(|source| of_engine(&source.into()))?;
    let mut sets = Vec::new();
    for (set, rows) in [(RowSet::Test, &task.rows), (RowSet::Guard, &task.guard_rows)] {
        let prompts = tokenize(&text, prompt_rows(rows)?, &plan.sampling, card.max_position_embeddings);
        let prompts = prompts.map_err(error)?;
        let numbers = rows.iter().map(|(number, _)| *number).collect();
        sets.push(Sampled { set, numbers, prompts, base: Vec::new(), trained: Vec::new() });
    }
    let longest = sets.iter().flat_map(|set| &set.prompts).map(|prompt| prompt.ids.len()).max().unwrap_or_default();
    check_memory(&task, &card, longest as u64)?;
    // A row counts four times in the progress: it is sampled and scored with each of the two models.
    let total = 4 * sets.iter().map(|set| set.prompts.len() as u64).sum::<u64>();
    let mut progress = Progress { done: 0, total };
    let eval = EvalPlan { temperature: task.sampling.temperature, ..eval.clone() };
    let sampler = Sampler::for_evaluation(&plan.sampling, &eval);
    let run = SamplingRun { task: &task, text: &text, sampler, longest };
    let mut policy = Policy::load_dtype(&task.model_dir, backend, &plan.training).map_err(error)?;
    for set in &mut sets {
        set.base = run.completions(&policy, &set.prompts, &mut progress).map_err(error)?;
    }
    match plan.lora {
        Some(_) => policy.load_lora(&task.checkpoint_dir).map_err(error)?,
        None => policy.load_full(&task.checkpoint_dir).map_err(error)?,
    }
    for set in &mut sets {
        set.trained = run.completions(&policy, &set.prompts, &mut progress).map_err(error)?;
    }
    drop(policy);
    Ok((task, sets, progress))
}

/// Checks that the sampling with both models fits into memory.
fn check_memory(task: &JudgeTask, card: &modelcard::ModelCard, longest: u64) -> Result<(), VerdictError> {
    let mut plan = task.plan.clone();
    plan.rloo.num_generations = task.sampling.num_generations.try_into().unwrap_or(plan.rloo.num_generations);
    let needed = Footprint::of_generation(&plan, card.num_parameters, &card.shape(), longest);
    match task.memory_limit_bytes {
        Some(limit) if needed > limit => {
            let mib = |bytes: u64| bytes.div_ceil(1 << 20);
            let message = format!(
                "the comparison needs about {} MiB, but a process may use only {} MiB (--memory-limit): lower num_generations",
                mib(needed),
                mib(limit)
            );
            Err(failed("not_enough_memory", message))
        }
        Some(_) | None => Ok(()),
    }
}

/// The sampling request, which is run with both models.
struct SamplingRun<'a> {
    task: &'a JudgeTask,
    text: &'a Text,
    sampler: Sampler,
    /// Number of tokens of the longest prompt, which determines the memory.
    longest: usize,
}

impl SamplingRun<'_> {
    fn completions(
        &self,
        policy: &Policy,
        prompts: &[TokenizedPrompt],
        progress: &mut Progress,
    ) -> Result<Vec<Vec<Completion>>, EngineError> {
        let plan: &Plan = &self.task.plan;
        let max_completion_length = plan.sampling.max_completion_length as usize;
        let num_generations =
            NonZeroUsize::new(self.task.sampling.num_generations as usize).unwrap_or(NonZeroUsize::MIN);
        let mut rows = Vec::with_capacity(prompts.len());
        for (chunk, prompts) in prompts.chunks(CHUNK_PROMPTS).enumerate() {
            let first = chunk * CHUNK_PROMPTS;
            let asked: Vec<GeneratePrompt<'_>> =
                (first as u64..).zip(prompts).map(|(row, prompt)| GeneratePrompt { row, ids: &prompt.ids }).collect();
            let request = GenerateRequest {
                prompts: &asked,
                num_generations,
                sampler: self.sampler,
                max_completion_length,
                stop: &plan.sampling.stop,
                key: Key::new(plan.training.seed, Stream::Verdict),
                eos_token_ids: self.text.eos_token_ids(),
                adapter: Adapter::On,
                max_rows: generation_rows(policy, plan.optimizer.kind, self.longest + max_completion_length),
            };
            let groups = generate(policy, self.text, &request, &|| false)?.unwrap_or_default();
            for group in groups {
                let decoded = group.into_iter().map(|generated| {
                    let text = self.text.decode(generated.segments.completion()?, true)?;
                    Ok(Completion { text, generated })
                });
                rows.push(decoded.collect::<Result<_, EngineError>>()?);
            }
            progress.advance(prompts.len());
        }
        Ok(rows)
    }
}

/// Computes the rewards of both models' completions, and reports each row.
async fn score(
    task: &JudgeTask,
    rewards: &Rewards,
    sampled: Sampled,
    progress: &mut Progress,
    rows: &mut Vec<VerdictRow>,
) -> Result<(), VerdictError> {
    let Sampled { set, numbers, prompts, base, trained } = sampled;
    let asked =
        |answers: Vec<Vec<Completion>>| -> Vec<(usize, Vec<Completion>)> { answers.into_iter().enumerate().collect() };
    let mut scored = Vec::new();
    let mut round = 0;
    for answers in [asked(base), asked(trained)] {
        let mut of_model = Vec::with_capacity(answers.len());
        let mut left = answers.into_iter().peekable();
        while left.peek().is_some() {
            let mut chunk: Vec<(usize, Vec<Completion>)> = Vec::new();
            let mut count = 0;
            while let Some((_, group)) = left.peek()
                && (chunk.is_empty() || count + group.len() <= CHUNK_COMPLETIONS)
            {
                count += group.len();
                chunk.extend(left.next());
            }
            let samples = reward_samples(task, set, &chunk, &numbers, &prompts);
            let id = RolloutId::eval(task.step).round(round);
            round += 1;
            let job = JobContext { job: task.job, rollout: id, probe: false };
            let scores = rewards.score(&job, &samples).await.map_err(|failure| {
                let failure = failure.to_failure(task.step);
                failed(&failure.code, failure.message)
            })?;
            let plans = if set == RowSet::Guard { guarding_rewards(&task.plan) } else { judging_rewards(&task.plan) };
            let weights = RewardWeight::of_plan(plans);
            let mut values = scores.scores.into_iter();
            progress.advance(chunk.len());
            for (_, group) in chunk {
                let texts = group.into_iter().zip(values.by_ref()).map(|(completion, score)| JudgedText {
                    reward: combine_rewards(&score.values, &weights, task.plan.rloo.combine),
                    num_tokens: completion.generated.segments.num_model_tokens() as u64,
                    finish_reason: completion.generated.finish_reason,
                    completion: truncated(completion.text),
                });
                of_model.push(Answers::new(texts.collect()));
            }
        }
        scored.push(of_model);
    }
    let (Some(trained), Some(base)) = (scored.pop(), scored.pop()) else { return Ok(()) };
    for (((number, prompt), base), trained) in numbers.into_iter().zip(prompts).zip(base).zip(trained) {
        let row = VerdictRow::new(set, number, truncated(prompt.text), base, trained);
        one_shot::write_report(&JudgeLine::Item(row.clone())).map_err(|error| failed("server_gone", error))?;
        rows.push(row);
    }
    Ok(())
}

fn reward_samples(
    task: &JudgeTask,
    set: RowSet,
    chunk: &[(usize, Vec<Completion>)],
    numbers: &[u64],
    prompts: &[TokenizedPrompt],
) -> Vec<RewardSample> {
    let eval = task.plan.eval.as_ref();
    let dataset = match set {
        RowSet::Guard => eval.and_then(|eval| eval.guard.as_ref()).map(|guard| &guard.dataset),
        RowSet::Test => eval.map(|eval| eval.judged_dataset(&task.plan.dataset)),
    };
    let mut samples = Vec::new();
    for (index, (place, group)) in chunk.iter().enumerate() {
        let (Some(row), Some(prompt)) = (numbers.get(*place), prompts.get(*place)) else { continue };
        for completion in group {
            samples.push(RewardSample {
                sample_id: format!("s_{}", samples.len()),
                group_id: format!("g_{index}"),
                prompt_id: format!("row_{row}"),
                source: dataset.and_then(|dataset| dataset.source_of(*row)).map(str::to_owned),
                prompt: prompt.text.clone(),
                messages: prompt.messages.clone(),
                completion: completion.text.clone(),
                finish_reason: completion.generated.finish_reason,
                num_tokens: completion.generated.segments.num_model_tokens() as u32,
                columns: prompt.columns.clone(),
                completion_ids: completion.generated.segments.completion().ok().map(<[u32]>::to_vec),
            });
        }
    }
    samples
}

/// Truncates a prompt or completion to [`MAX_TEXT_BYTES`].
fn truncated(mut text: String) -> String {
    if text.len() > MAX_TEXT_BYTES {
        let end = text.floor_char_boundary(MAX_TEXT_BYTES);
        text.truncate(end);
        text.push('…');
    }
    text
}
