//! `POST /jobs/{id}/generate`: completes a prompt with the base model and with a checkpoint of the job. The models run
//! in a separate process.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::State;
use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::AppState;
use super::auth::Caller;
use super::error::{Code, Problem, ProblemBody};
use super::extract::{Json, Path};
use super::job_models::{find, find_model};
use super::jobs::invalid;
use super::v1::{self, Chosen, Collected, Facts, Whole};
use crate::error_text::with_causes;
use crate::generate::{GeneratedText, RenderedPrompt};
use crate::id::{CheckpointId, JobId};
use crate::modelcard::text::{Prompt, TextError};
use crate::serving::ServedRequest;
use crate::spec::{FieldError, GenerateDocument, GenerateSpec, Plan, SamplingPlan};
use crate::store::background::spawn_blocking;
use crate::store::{CheckpointRow, StoreError};

/// Time limit for both models together, including loading.
const LIMIT: Duration = Duration::from_secs(120);

pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(generate))
}

/// Kind of the weights in a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum Weights {
    /// A LoRA adapter on top of the base model.
    Adapter,
    /// All weights of the model, from full fine-tuning.
    Model,
}

/// Completions of the base model and of a checkpoint for the same prompt, sampled with the same seed.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = GenerationResult)]
struct GenerationView {
    /// The job's id, `job_…`.
    job_id: JobId,
    /// Id of the base model.
    model: String,
    /// The checkpoint that was used.
    checkpoint_id: CheckpointId,
    /// Optimizer step of the checkpoint.
    step: u64,
    /// Kind of the checkpoint's weights.
    weights: Weights,
    /// The sampling parameters that were used: the job's, with the overrides of the request.
    sampling: SamplingPlan,
    /// The random seed that was used.
    seed: u64,
    /// The prompt as both models saw it.
    prompt: RenderedPrompt,
    /// Completions of the base model.
    base: Vec<GeneratedText>,
    /// Completions of the checkpoint.
    trained: Vec<GeneratedText>,
    /// Total time in seconds, including loading.
    seconds: f64,
}

/// Generate completions of a prompt with the base model and with a checkpoint.
///
/// Nothing is stored. Sampling parameters default to the job's. The seed defaults to the job's too, so the same request gives the
/// same response, and both models use the same random numbers. Runs in the process of the served models, beside training, for at
/// most two minutes. The request stops when the client disconnects.
#[utoipa::path(post, path = "/jobs/{id}/generate", tag = "Jobs", params(("id" = JobId, Path)),
    request_body = GenerateDocument,
    responses(
        (status = 200, description = "The completions of the base model and of the trained model", body = GenerationView),
        (status = 404, description = "There is no such job, or it has no checkpoint: `no_checkpoint` = not yet, `no_such_checkpoint` = no longer", body = ProblemBody),
        (status = 410, description = "The checkpoint was removed in the meantime", body = ProblemBody),
        (status = 422, description = "The request is not valid, or the model's files cannot be used", body = ProblemBody),
        (status = 429, description = "All places of served models are taken; see `Retry-After`", body = ProblemBody),
        (status = 503, description = "The process that ran the models ended unexpectedly", body = ProblemBody),
        (status = 504, description = "The completions took longer than two minutes, the time limit", body = ProblemBody)))]
async fn generate(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<JobId>,
    Json(body): Json<Value>,
) -> Result<Json<GenerationView>, Problem> {
    let begun = Instant::now();
    let job = state.store.job_get(id).await?;
    let mut plan = job.plan()?;
    let spec = GenerateSpec::read(&body, &plan).map_err(|errors| invalid(Code::InvalidBody, errors))?;
    let GenerateSpec { prompt, checkpoint, num_generations, seed, sampling } = spec;
    let row = find(&state, &job, checkpoint).await?;
    let model = find_model(&state, &caller, &plan).await?;
    plan.sampling = sampling;
    let facts = state.texts.of(model.clone(), plan.model.sha256.clone()).await?;
    let (prompt, ids) = tokenized(&facts, &plan, prompt).await?;
    let request = request(&plan.sampling, ids, num_generations, seed);
    let of_base = Chosen::of_plan(&state, &plan, model.clone(), None, facts.clone());
    let of_checkpoint = Chosen::of_plan(&state, &plan, model, Some(row.clone()), facts.clone());
    let both = async {
        let base = v1::collect(v1::start(&state, &caller, &of_base, request.clone())?, &request);
        let trained = v1::collect(v1::start(&state, &caller, &of_checkpoint, request.clone())?, &request);
        tokio::try_join!(base, trained).map_err(v1::problem)
    };
    let (base, trained) = match tokio::time::timeout(LIMIT, both).await {
        Err(_) => return Err(too_slow()),
        Ok(Ok(both)) => both,
        Ok(Err(problem)) => return Err(refused(&state, &row, &plan, problem).await),
    };
    Ok(Json(GenerationView {
        job_id: id,
        checkpoint_id: row.id,
        step: row.step,
        weights: if plan.lora.is_some() { Weights::Adapter } else { Weights::Model },
        model: plan.model.id,
        sampling: plan.sampling,
        seed,
        prompt,
        base: texts(&base, &facts)?,
        trained: texts(&trained, &facts)?,
        seconds: (begun.elapsed().as_secs_f64() * 1e3).round() / 1e3,
    }))
}

/// Tokenizes the prompt, and checks that prompt and completions fit into the model's context.
async fn tokenized(facts: &Arc<Facts>, plan: &Plan, prompt: Value) -> Result<(RenderedPrompt, Vec<u32>), Problem> {
    let (facts, sampling) = (facts.clone(), plan.sampling.clone());
    let refused =
        |code: &str, detail: String| invalid(Code::InvalidBody, vec![FieldError::new("/prompt", code, detail)]);
    let encode = move || {
        let prompt = Prompt::from_value(&prompt)?;
        let kwargs = &sampling.chat_template_kwargs;
        let ids = facts.text.prompt_ids(&prompt, kwargs)?;
        let text = match prompt {
            Prompt::Text(text) => text,
            Prompt::Chat(messages) => facts.text.render_chat(&messages, true, kwargs)?,
        };
        Ok::<_, TextError>((text, ids, facts.card.max_position_embeddings as u64))
    };
    let encoded = spawn_blocking(encode).await.map_err(Problem::internal)?;
    let (text, ids, positions) = encoded.map_err(|error| {
        refused("prompt_not_encodable", format!("the prompt cannot be used: {}", with_causes(&error)))
    })?;
    let num_tokens = ids.len() as u64;
    let completion = u64::from(plan.sampling.max_completion_length);
    if num_tokens == 0 {
        return Err(refused("empty_prompt", "the prompt has no tokens; write some text".to_owned()));
    }
    if num_tokens + completion > positions {
        let room = positions.saturating_sub(completion);
        let detail = format!(
            "the prompt has {num_tokens} tokens, but the maximum is {room} (max_position_embeddings {positions} − max_completion_length {completion}): shorten the prompt, or lower sampling.max_completion_length"
        );
        return Err(refused("prompt_too_long", detail));
    }
    Ok((RenderedPrompt { num_tokens, text }, ids))
}

/// The request of both models.
pub(super) fn request(sampling: &SamplingPlan, ids: Vec<u32>, num_generations: u32, seed: u64) -> ServedRequest {
    ServedRequest {
        ids,
        num_choices: num_generations,
        max_tokens: sampling.max_completion_length,
        temperature: sampling.temperature,
        top_p: sampling.top_p,
        top_k: sampling.top_k,
        min_p: sampling.min_p,
        repetition_penalty: sampling.repetition_penalty,
        seed,
        stop: sampling.stop.clone(),
        ..ServedRequest::default()
    }
}

fn texts(collected: &Collected, facts: &Facts) -> Result<Vec<GeneratedText>, Problem> {
    let shown = |whole: &Whole| {
        Ok(GeneratedText {
            num_tokens: whole.ids.len() as u64,
            finish_reason: whole.finish_reason(),
            completion: whole.sample_text(facts)?,
        })
    };
    let texts: Result<_, TextError> = collected.answers.iter().map(shown).collect();
    texts.map_err(Problem::internal)
}

/// The problem for a request that the serving process refused: with the names of the job's settings, and with the reason if the
/// checkpoint was removed meanwhile.
async fn refused(state: &AppState, row: &CheckpointRow, plan: &Plan, problem: Problem) -> Problem {
    match problem.code() {
        Code::InvalidModel => unusable(state, row, plan, problem.detail()).await,
        Code::InvalidBody => {
            let detail = problem.detail().to_owned();
            let error = FieldError::new("/sampling/max_completion_length", "not_enough_memory", detail);
            invalid(Code::InvalidBody, vec![error])
        }
        _ => problem,
    }
}

fn too_slow() -> Problem {
    let detail = format!(
        "the models gave no answer within {} s: lower sampling.max_completion_length or num_generations, or try again when no job runs",
        LIMIT.as_secs()
    );
    Problem::new(Code::GenerationTimeout, detail)
}

/// Creates the problem for files that the generating process could not read: the checkpoint may have been deleted meanwhile.
async fn unusable(state: &AppState, row: &CheckpointRow, plan: &Plan, why: &str) -> Problem {
    match state.store.checkpoint_get(row.id).await {
        Err(StoreError::NotFound { .. }) => {
            let detail = format!("the checkpoint of step {} was removed in the meantime; choose another one", row.step);
            Problem::new(Code::Gone, detail)
        }
        Err(error) => error.into(),
        Ok(_) => {
            let detail =
                format!("the model '{}' or the checkpoint of step {} cannot be used: {why}", plan.model.id, row.step);
            Problem::new(Code::InvalidModel, detail)
        }
    }
}
