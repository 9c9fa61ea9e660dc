//! Samples the base model and a checkpoint for a verdict, in the process of the served models.

use std::sync::Arc;

use futures::{StreamExt, TryStreamExt, stream};
use serde_json::{Map, Value};

use super::super::generate::request;
use super::super::v1::{self, Chosen, Facts};
use super::super::{AppState, error::Problem};
use crate::error_text::with_causes;
use crate::modelcard::text::{Prompt, TextError};
use crate::serving::{ServedModel, ServedPurpose, ServedRequest, ServingError};
use crate::spec::{Plan, VerdictSampling};
use crate::store::background::spawn_blocking;
use crate::store::{CheckpointRow, ModelRow, TaskRow};
use crate::supervisor::serving::{Asker, Serving, StartError};
use crate::verdict::{AnsweredRow, RowSet, SampledText, VerdictError};

/// A dataset row with its number.
pub(super) type Row = (u64, Map<String, Value>);

/// Number of prompts between two reports of the progress.
const PROGRESS_PROMPTS: usize = 32;

pub(super) fn failed(code: &str, message: impl Into<String>) -> VerdictError {
    VerdictError { code: code.to_owned(), message: message.into() }
}

/// Why no row was judged.
pub(super) enum Unanswered {
    /// The verdict failed.
    Failed(VerdictError),
    /// The server is shutting down.
    Stopping,
}

impl From<VerdictError> for Unanswered {
    fn from(error: VerdictError) -> Self {
        Self::Failed(error)
    }
}

impl From<ServingError> for Unanswered {
    fn from(error: ServingError) -> Self {
        Self::Failed(match error {
            ServingError::Stopping => return Self::Stopping,
            ServingError::Refused(item) => failed("not_enough_memory", item.detail),
            ServingError::OutOfMemory(why) => failed("not_enough_memory", why),
            ServingError::Unusable(why) => failed("model_invalid", why),
            ServingError::Failed(why) => failed("process_failed", why),
            ServingError::Killed(_) => failed(
                "killed",
                "the process that sampled the models was killed, most likely because it ran out of memory; try again when no job runs, or with fewer num_generations",
            ),
        })
    }
}

/// The models of a verdict, and how they are sampled.
pub(super) struct Compared<'a> {
    pub state: &'a AppState,
    /// The verdict, which learns the progress.
    pub task: &'a TaskRow,
    pub plan: &'a Plan,
    pub model: ModelRow,
    pub checkpoint: CheckpointRow,
    pub sampling: VerdictSampling,
}

impl Compared<'_> {
    /// Samples completions of all rows with the base model, then with the checkpoint, with the same random numbers.
    ///
    /// # Errors
    /// Fails if a prompt cannot be used, or a model cannot be sampled.
    pub async fn answer(self, sets: [(RowSet, Vec<Row>); 2]) -> Result<Vec<AnsweredRow>, Unanswered> {
        let Self { state, task, plan, model, checkpoint, sampling } = self;
        let facts = state.texts.of(model.clone(), plan.model.sha256.clone()).await;
        let facts = facts.map_err(|problem| of_problem(&problem))?;
        let (of, of_plan) = (facts.clone(), plan.clone());
        let tokenizing = spawn_blocking(move || tokenize(&of, &of_plan, sets));
        let prompts =
            tokenizing.await.map_err(|error| failed("panicked", format!("tokenizing panicked: {error}")))??;
        let mut settings = plan.sampling.clone();
        if let Some(eval) = &plan.eval {
            settings = eval.sampling(&settings);
        }
        settings.temperature = sampling.temperature;
        let num_generations = sampling.num_generations.max(1);
        // Half of the places, so that requests of clients do not wait for a verdict.
        let at_once = (state.config.serving.max_rows / 2 / num_generations as usize).max(1);
        let serving =
            state.serving.as_ref().ok_or_else(|| failed("internal", "this server has no serving processes"))?;
        let total = 4 * prompts.len() as u64;
        let mut done = 0;
        let mut both = Vec::new();
        for checkpoint in [None, Some(checkpoint)] {
            let model = Chosen::of_plan(state, plan, model.clone(), checkpoint, facts.clone()).served;
            let mut requests = Vec::with_capacity(prompts.len());
            for prompt in &prompts {
                let request = request(&settings, prompt.ids.clone(), num_generations, plan.training.seed);
                let request = ServedRequest { purpose: ServedPurpose::Verdict(prompt.number), ..request };
                requests.push(complete(serving, &facts, model.clone(), request));
            }
            let mut sampled = stream::iter(requests).buffered(at_once).try_ready_chunks(PROGRESS_PROMPTS);
            let mut answers = Vec::with_capacity(prompts.len());
            while let Some(chunk) = sampled.next().await {
                let chunk = chunk.map_err(|error| error.1)?;
                done += chunk.len() as u64;
                answers.extend(chunk);
                // A failed write is ignored: the next one repeats the numbers, and the end of the verdict is stored anyway.
                drop(state.store.task_progress(&task.id, task.attempt, done, total).await);
            }
            both.push(answers);
        }
        let (Some(trained), Some(base)) = (both.pop(), both.pop()) else { return Ok(Vec::new()) };
        let rows = prompts.into_iter().zip(base).zip(trained);
        Ok(rows.map(|((prompt, base), trained)| AnsweredRow { base, trained, ..prompt.row }).collect())
    }
}

/// A prompt with its tokens.
struct Tokenized {
    /// Number of the prompt within its set, which is part of its random numbers.
    number: u64,
    ids: Vec<u32>,
    /// The row, without answers.
    row: AnsweredRow,
}

/// Tokenizes the prompts of all rows. Blocking.
fn tokenize(facts: &Arc<Facts>, plan: &Plan, sets: [(RowSet, Vec<Row>); 2]) -> Result<Vec<Tokenized>, VerdictError> {
    let kwargs = &plan.sampling.chat_template_kwargs;
    let positions = facts.card.max_position_embeddings;
    let room = positions.saturating_sub(plan.sampling.max_completion_length as usize);
    let mut prompts = Vec::new();
    for (set, rows) in sets {
        for (number, (row, mut columns)) in (0..).zip(rows) {
            let invalid = |why: String| failed("prompts_invalid", format!("row {row} of the dataset {why}"));
            let value = columns.shift_remove("prompt").ok_or_else(|| invalid("has no prompt".to_owned()))?;
            let unusable = |error: TextError| invalid(format!("has an unusable prompt: {}", with_causes(&error)));
            let prompt = Prompt::from_value(&value).map_err(unusable)?;
            let ids = facts.text.prompt_ids(&prompt, kwargs).map_err(unusable)?;
            let (text, messages) = match prompt {
                Prompt::Text(text) => (text, None),
                Prompt::Chat(messages) => {
                    (facts.text.render_chat(&messages, true, kwargs).map_err(unusable)?, Some(value))
                }
            };
            match ids.len() {
                0 => return Err(invalid("has a prompt without tokens: drop it".to_owned())),
                tokens if tokens > room => {
                    return Err(invalid(format!(
                        "has a prompt of {tokens} tokens, but the maximum is {room} (max_position_embeddings {positions} − max_completion_length {}): shorten or drop it",
                        plan.sampling.max_completion_length
                    )));
                }
                _ => {}
            }
            let row = AnsweredRow { set, row, prompt: text, messages, columns, base: Vec::new(), trained: Vec::new() };
            prompts.push(Tokenized { number, ids, row });
        }
    }
    Ok(prompts)
}

/// Samples the completions of one prompt.
async fn complete(
    serving: &Serving,
    facts: &Facts,
    model: ServedModel,
    request: ServedRequest,
) -> Result<Vec<SampledText>, Unanswered> {
    let answers = serving.start(Asker::Verdict, model, request.clone()).map_err(|error| match error {
        StartError::Stopping => Unanswered::Stopping,
        StartError::Full(why) | StartError::Failed(why) => Unanswered::Failed(failed("process_failed", why)),
    })?;
    let collected = v1::collect(answers, &request).await?;
    let sampled = collected.answers.into_iter().map(|whole| {
        let text = whole.sample_text(facts).map_err(|error| failed("model_invalid", with_causes(&error)))?;
        Ok(SampledText { finish_reason: whole.finish_reason(), text, ids: whole.ids })
    });
    sampled.collect()
}

fn of_problem(problem: &Problem) -> VerdictError {
    failed("model_invalid", problem.detail())
}
