//! POST /jobs/{id}/generate: what the base model says to a prompt, beside what a checkpoint of the job says. The models run in
//! a process of its own.

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use axum::extract::State;
use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::AppState;
use super::artifacts::no_checkpoint;
use super::auth::Caller;
use super::error::{Code, Problem, ProblemBody};
use super::extract::{Json, Path};
use super::jobs::invalid;
use super::models::is_as_registered;
use crate::generation::{GeneratedText, Generation, GenerationReport, GenerationTask, RenderedPrompt};
use crate::id::{CheckpointId, JobId};
use crate::modelcard;
use crate::one_shot::OneShotError;
use crate::spec::{CheckpointChoice, FieldError, GenerationDocument, GenerationSpec, Plan, SamplingPlan};
use crate::store::{CheckpointRow, JobRow, ModelRow, StoreError};

/// What both models may take together, loading included.
const LIMIT: Duration = Duration::from_secs(120);
/// After a refusal because another one is under way, s.
const RETRY_S: u64 = 5;

/// The routes of this module.
pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(generate))
}

/// Which weights a checkpoint holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum Weights {
    /// A LoRA adapter over the base model.
    Adapter,
    /// All of them: full fine-tuning.
    Model,
}

/// Completions of the base model and of a checkpoint, to the same prompt, with the same random numbers.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = GenerationResult)]
struct GenerationView {
    /// The job.
    job_id: JobId,
    /// The base model.
    model: String,
    /// The checkpoint that was asked.
    checkpoint_id: CheckpointId,
    /// Its step.
    step: u64,
    /// What it holds.
    weights: Weights,
    /// As used: the job's, with what was asked for.
    sampling: SamplingPlan,
    /// As used.
    seed: u64,
    /// The prompt as both saw it.
    prompt: RenderedPrompt,
    /// Of the base model.
    base: Vec<GeneratedText>,
    /// Of the checkpoint.
    trained: Vec<GeneratedText>,
    /// Of the whole, loading included, s.
    seconds: f64,
}

/// Try a prompt on the base model and on a checkpoint.
///
/// Nothing is stored. Sampling is the job's own but for what is asked for; the seed is the job's too, so that the same question
/// gives the same answer, and both models draw the same random numbers. Runs on the server's processor beside the jobs, one
/// question at a time, for two minutes at most; it ends when the client goes away.
#[utoipa::path(post, path = "/jobs/{id}/generate", tag = "Jobs", params(("id" = JobId, Path)),
    request_body = GenerationDocument,
    responses(
        (status = 200, description = "What both said", body = GenerationView),
        (status = 404, description = "No such job, or it has no checkpoint: `no_checkpoint` = not yet, `no_such_checkpoint` = not any more", body = ProblemBody),
        (status = 410, description = "The checkpoint was removed in the meantime", body = ProblemBody),
        (status = 422, description = "The question is not valid, or the model's files cannot be used", body = ProblemBody),
        (status = 429, description = "Another question is being answered; see `Retry-After`", body = ProblemBody),
        (status = 503, description = "The process that ran the models was lost", body = ProblemBody),
        (status = 504, description = "It took too long", body = ProblemBody)))]
async fn generate(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<JobId>,
    Json(body): Json<Value>,
) -> Result<Json<GenerationView>, Problem> {
    let begun = Instant::now();
    let job = state.store.job_get(id).await?;
    let mut plan = job.plan()?;
    let spec = GenerationSpec::read(&body, &plan).map_err(|errors| invalid(Code::InvalidBody, errors))?;
    let GenerationSpec { prompt, checkpoint, num_generations, seed, sampling } = spec;
    let row = find(&state, &job, checkpoint).await?;
    let model = find_model(&state, &caller, &plan).await?;
    let Some(generations) = &state.generations else {
        let detail = "this server starts no processes of its own, so it cannot generate: download the adapter instead";
        return Err(Problem::new(Code::NotImplemented, detail));
    };
    plan.sampling = sampling;
    plan.rloo.num_generations = NonZeroU32::new(num_generations).unwrap_or(plan.rloo.num_generations);
    let task = GenerationTask {
        plan: plan.clone(),
        model_dir: model.source.into(),
        checkpoint_dir: state.files.checkpoint_dir(row.job, row.step, row.attempt),
        prompt,
        num_generations,
        seed,
        memory_limit_bytes: state.config.memory_per_worker(),
        limit_ms: LIMIT.as_secs() * 1000,
    };
    let report = generations.run(&task, LIMIT).await.map_err(|error| without_report(&error))?;
    let Generation { prompt, base, trained } = match report {
        GenerationReport::Generated(generation) => generation,
        GenerationReport::Refused(error) => return Err(invalid(Code::InvalidBody, vec![error])),
        GenerationReport::TimedOut => return Err(too_slow()),
        GenerationReport::Unusable(why) => return Err(unusable(&state, &row, &plan, &why).await),
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
        base,
        trained,
        seconds: (begun.elapsed().as_secs_f64() * 1e3).round() / 1e3,
    }))
}

/// The checkpoint of a job that a request chose.
pub(super) async fn find(state: &AppState, job: &JobRow, choice: CheckpointChoice) -> Result<CheckpointRow, Problem> {
    let found = match choice {
        CheckpointChoice::Id(id) => match state.store.checkpoint_get(id).await {
            Ok(row) if row.job == job.id => Some(row),
            Ok(_) | Err(StoreError::NotFound { .. }) => {
                let detail =
                    format!("the job has no checkpoint '{id}': GET /jobs/{}/checkpoints lists those it has", job.id);
                return Err(invalid(
                    Code::InvalidBody,
                    vec![FieldError::new("/checkpoint", "unknown_checkpoint", detail)],
                ));
            }
            Err(error) => return Err(error.into()),
        },
        CheckpointChoice::Result => state.store.checkpoint_result(job.id, job.ending.as_ref()).await?,
        CheckpointChoice::Last => state.store.checkpoint_latest(job.id).await?,
        CheckpointChoice::Best => state.store.checkpoint_best(job.id).await?,
        CheckpointChoice::Step(step) => {
            let rows = state.store.checkpoint_list(job.id).await?;
            let mut steps: Vec<u64> = rows.iter().map(|row| row.step).collect();
            steps.sort_unstable();
            let found = rows.into_iter().find(|row| row.step == step);
            if found.is_none() && !steps.is_empty() {
                let steps: Vec<String> = steps.iter().map(u64::to_string).collect();
                let detail =
                    format!("the job has no checkpoint of step {step}; there are those of {}", steps.join(", "));
                return Err(invalid(
                    Code::InvalidBody,
                    vec![FieldError::new("/checkpoint", "unknown_checkpoint", detail)],
                ));
            }
            found
        }
    };
    found.ok_or_else(|| no_checkpoint(state, job))
}

/// The job's model as it was when the job was accepted.
async fn find_model(state: &AppState, caller: &Caller, plan: &Plan) -> Result<ModelRow, Problem> {
    let id = plan.model.id.clone();
    let refused = |detail: String| Problem::new(Code::InvalidModel, detail);
    let row = match state.store.model_get(&id).await {
        Ok(row) if caller.may_use_model(&row.owner) => row,
        Ok(_) | Err(StoreError::NotFound { .. }) => {
            return Err(refused(format!(
                "the job's model '{id}' is not registered any more: register it again with POST /models"
            )));
        }
        Err(error) => return Err(error.into()),
    };
    unchanged(row, plan.model.sha256.clone()).await
}

/// The row of a model whose files are still those of the hash.
pub(super) async fn unchanged(row: ModelRow, sha256: String) -> Result<ModelRow, Problem> {
    let refused = |detail: String| Problem::new(Code::InvalidModel, detail);
    let check = move || {
        // Where it lies on the server is not for everybody who may ask.
        let unusable = |error: &dyn std::fmt::Display| {
            format!("the model '{}' cannot be used: {}", row.id, error.to_string().replace(&row.source, "its folder"))
        };
        let card = modelcard::read(std::path::Path::new(&row.source)).map_err(|error| unusable(&error))?;
        match is_as_registered(&row, &card.files) {
            Ok(true) if row.sha256 == sha256 => Ok(row),
            Ok(_) => Err(format!(
                "the files of model '{}' are not those that the job was trained with: restore them, and register the model again",
                row.id
            )),
            Err(error) => Err(unusable(&error)),
        }
    };
    tokio::task::spawn_blocking(check).await.map_err(Problem::internal)?.map_err(refused)
}

fn without_report(error: &OneShotError) -> Problem {
    match error {
        OneShotError::Busy => {
            let detail = "another prompt is being answered; try again when it is done";
            Problem::new(Code::TooManyRequests, detail).retry_after(RETRY_S)
        }
        OneShotError::Stopping => {
            let detail = "the server is stopping; ask again when it is back";
            Problem::new(Code::NotReady, detail).retry_after(RETRY_S)
        }
        OneShotError::TimedOut(_) => too_slow(),
        OneShotError::Killed(_) => {
            let detail = "the process that ran the models was killed: most likely memory ran out; lower sampling.max_completion_length or num_generations, or try again when no job runs";
            Problem::new(Code::GenerationFailed, detail).retry_after(RETRY_S)
        }
        OneShotError::Ended(cause) | OneShotError::Failed(cause) => {
            let detail = "the process that ran the models ended without an answer; try again, and see the server's log";
            Problem::new(Code::GenerationFailed, detail).retry_after(RETRY_S).because(cause)
        }
    }
}

fn too_slow() -> Problem {
    let detail = format!(
        "no answer within {} s: lower sampling.max_completion_length or num_generations, or try again when no job runs",
        LIMIT.as_secs()
    );
    Problem::new(Code::GenerationTimeout, detail)
}

/// Files that the process could not use: the checkpoint's may have been rotated away under its hands.
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
