//! `rlood judge`: scores the answers of the base model and of a checkpoint to the same rows, in its own process. It reads a task
//! from standard input (one line of JSON) and writes lines to standard output: progress, each judged row, and finally the
//! report. The rewards are computed as in an evaluation.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::Arc;

use futures::future::BoxFuture;

use crate::args::OneShotArgs;
use crate::engine::advantage::{RewardWeight, combine_rewards};
use crate::one_shot::{self, OneShotError};
use crate::outgoing::OutgoingPolicy;
use crate::reward::{JobContext, Rewards};
use crate::reward_model::LocalRewardModels;
use crate::rollout::{RewardSample, RolloutId};
use crate::spec::{RewardPlan, RewardSecrets, eval_secret_name, guard_secret_name};
use crate::verdict::{
    AnsweredRow, Answers, JudgeLine, JudgeReport, JudgeTask, JudgedText, RowSet, SampledText, VerdictError,
    VerdictResult, VerdictRow, guarding_rewards, judging_rewards,
};

/// Number of completions scored between two lines that report the progress. The completions of a row are kept together.
const CHUNK_COMPLETIONS: usize = 256;
/// Maximum size in bytes of a prompt or completion in the stored result.
const MAX_TEXT_BYTES: usize = 64 * 1024;

/// Runs `rlood judge`: reads the task, judges the answers, and writes the report. The exit code is 0 even if the report
/// contains an error.
///
/// # Errors
/// Fails when standard input has no valid task, or the report cannot be written to standard output.
pub fn run(args: OneShotArgs) -> BoxFuture<'static, Result<ExitCode, OneShotError>> {
    Box::pin(async move {
        let task: JudgeTask = one_shot::read_task()?;
        let report = match judge(task, &args.device.to_string()).await {
            Ok(result) => JudgeReport::Judged(Box::new(result)),
            Err(error) => JudgeReport::Failed(error),
        };
        one_shot::write_report(&JudgeLine::Report(report))?;
        Ok(ExitCode::SUCCESS)
    })
}

fn failed(code: &str, message: impl std::fmt::Display) -> VerdictError {
    VerdictError { code: code.to_owned(), message: message.to_string() }
}

/// Counts the answers of rows that were scored, and reports the progress.
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

async fn judge(mut task: JudgeTask, device: &str) -> Result<VerdictResult, VerdictError> {
    let (guard, test): (Vec<_>, Vec<_>) =
        std::mem::take(&mut task.rows).into_iter().partition(|row| row.set == RowSet::Guard);
    // A row counts four times in the progress: it is sampled and scored with each of the two models.
    let rows = (test.len() + guard.len()) as u64;
    let mut progress = Progress { done: 2 * rows, total: 4 * rows };
    let sets = [(RowSet::Test, test), (RowSet::Guard, guard)];
    let mut prepared = Vec::new();
    for (set, rows) in sets.into_iter().filter(|(set, rows)| *set == RowSet::Test || !rows.is_empty()) {
        let rewards = build_rewards(&task, device, set)?;
        rewards.prepare().await.map_err(|failure| {
            let failure = failure.to_failure(task.step);
            failed(&failure.code, failure.message)
        })?;
        prepared.push((set, rewards, rows));
    }
    let mut judged = Vec::new();
    for (set, rewards, rows) in prepared {
        score(&task, &rewards, (set, rows), &mut progress, &mut judged).await?;
    }
    Ok(VerdictResult::of(&judged, &task.plan, task.rows_from, task.sampling))
}

fn build_rewards(task: &JudgeTask, device: &str, set: RowSet) -> Result<Rewards, VerdictError> {
    let policy = OutgoingPolicy::parse(&task.allow_outgoing).map_err(|error| failed("setting", error))?;
    let models = LocalRewardModels::new(device, task.reward_models.clone(), &task.plan);
    Rewards::with_models(plans_of(task, set), &secrets_of(task, set), &policy, None, Some(Arc::new(models)))
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
    let secret = |reward: &RewardPlan| {
        let secret = task.secrets.get(&secret_name(&reward.name))?.clone();
        Some((reward.name.clone(), secret))
    };
    plans_of(task, set).iter().filter_map(secret).collect()
}

/// The rewards that score a set of rows.
fn plans_of(task: &JudgeTask, set: RowSet) -> &[RewardPlan] {
    match set {
        RowSet::Guard => guarding_rewards(&task.plan),
        RowSet::Test => judging_rewards(&task.plan),
    }
}

/// Computes the rewards of both models' completions, and reports each row.
async fn score(
    task: &JudgeTask,
    rewards: &Rewards,
    (set, rows): (RowSet, Vec<AnsweredRow>),
    progress: &mut Progress,
    judged: &mut Vec<VerdictRow>,
) -> Result<(), VerdictError> {
    let weights = RewardWeight::of_plan(plans_of(task, set));
    let answers_of: [fn(&AnsweredRow) -> &Vec<SampledText>; 2] = [|row| &row.base, |row| &row.trained];
    let mut scored = Vec::new();
    let mut round = 0;
    for answers_of in answers_of {
        let mut of_model = Vec::with_capacity(rows.len());
        let mut left = rows.as_slice();
        while !left.is_empty() {
            let mut count = 0;
            let fits = left.iter().take_while(|row| {
                count += answers_of(row).len();
                count <= CHUNK_COMPLETIONS
            });
            let (chunk, later) = left.split_at(fits.count().max(1));
            left = later;
            let samples = reward_samples(task, chunk, answers_of);
            let job = JobContext { job: task.job, rollout: RolloutId::eval(task.step).round(round), probe: false };
            round += 1;
            let scores = rewards.score(&job, &samples).await.map_err(|failure| {
                let failure = failure.to_failure(task.step);
                failed(&failure.code, failure.message)
            })?;
            let mut values = scores.scores.into_iter();
            progress.advance(chunk.len());
            for row in chunk {
                let texts = answers_of(row).iter().zip(values.by_ref()).map(|(answer, score)| JudgedText {
                    reward: combine_rewards(&score.values, &weights, task.plan.rloo.combine),
                    num_tokens: answer.ids.len() as u64,
                    finish_reason: answer.finish_reason,
                    completion: truncated(answer.text.clone()),
                });
                of_model.push(Answers::new(texts.collect()));
            }
        }
        scored.push(of_model);
    }
    let (Some(trained), Some(base)) = (scored.pop(), scored.pop()) else { return Ok(()) };
    for ((row, base), trained) in rows.into_iter().zip(base).zip(trained) {
        let row = VerdictRow::new(set, row.row, truncated(row.prompt), base, trained);
        one_shot::write_report(&JudgeLine::Item(row.clone())).map_err(|error| failed("server_gone", error))?;
        judged.push(row);
    }
    Ok(())
}

fn reward_samples(
    task: &JudgeTask,
    rows: &[AnsweredRow],
    answers_of: fn(&AnsweredRow) -> &Vec<SampledText>,
) -> Vec<RewardSample> {
    let eval = task.plan.eval.as_ref();
    let mut samples = Vec::new();
    for (index, row) in rows.iter().enumerate() {
        let dataset = match row.set {
            RowSet::Guard => eval.and_then(|eval| eval.guard.as_ref()).map(|guard| &guard.dataset),
            RowSet::Test => eval.map(|eval| eval.judged_dataset(&task.plan.dataset)),
        };
        for answer in answers_of(row) {
            samples.push(RewardSample {
                sample_id: format!("s_{}", samples.len()),
                group_id: format!("g_{index}"),
                prompt_id: format!("row_{}", row.row),
                source: dataset.and_then(|dataset| dataset.source_of(row.row)).map(str::to_owned),
                prompt: row.prompt.clone(),
                messages: row.messages.clone(),
                completion: answer.text.clone(),
                finish_reason: answer.finish_reason,
                num_tokens: answer.ids.len() as u32,
                columns: row.columns.clone(),
                completion_ids: Some(answer.ids.clone()),
                episode: None,
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
