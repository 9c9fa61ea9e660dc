//! The environment test endpoint: plays episodes with an environment before a job depends on it.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::State;
use serde::Serialize;
use serde_json::Value;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::AppState;
use super::auth::Caller;
use super::error::{Code, Problem, ProblemBody};
use super::extract::Json;
use super::generate::request;
use super::heavy;
use super::jobs::invalid;
use super::reach;
use super::reward_test_journal::TestJournal;
use super::v1::{self, Chosen};
use crate::engine::episodes::{Episodes, Table, play};
use crate::engine::error::EngineError;
use crate::engine::generate::GeneratePrompt;
use crate::engine::host::{PromptRow, RunEnd, StopReason};
use crate::engine::prompts::{TokenizedPrompt, tokenize};
use crate::engine::random::{Key, Stream};
use crate::environment::{Episode, EpisodeCall, Reply};
use crate::error_text::with_causes;
use crate::event::Event;
use crate::id::JobId;
use crate::reward::client::RewardClient;
use crate::reward::journal::Journal;
use crate::reward::webhook::{EnvironmentClient, Exchange};
use crate::rollout::{Generated, RolloutId, Segment, Segments};
use crate::spec::{EnvironmentPlan, EnvironmentTestSpec, FieldError, SamplingPlan, ServicePlan};
use crate::store::background::spawn_blocking;

/// Maximum timeout of a request to the environment in ms.
const MAX_TIMEOUT_MS: u64 = 30_000;
/// Time limit for all episodes together, including loading the model.
const LIMIT: Duration = Duration::from_secs(120);

pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(test_environment))
}

/// The result of an environment test.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = EnvironmentTest)]
struct Report {
    /// Whether every episode ended with a reward, and nothing went wrong.
    ok: bool,
    /// Id of the model that played.
    model: String,
    /// One episode for each row, in order. Empty if they could not be played to their end; `problems` says why.
    episodes: Vec<Episode>,
    /// What went wrong, in words: answers that are not valid, episodes without a reward, a server that does not answer.
    problems: Vec<String>,
    /// The requests to the environment with their responses, in order. Values of headers are not shown.
    exchanges: Vec<Exchange>,
    /// Total time, in ms.
    latency_ms: f64,
}

/// Test an environment
///
/// Plays one episode for each row (1 to 8, as in a dataset) with a model of this server, by the same rules as a job: rendering, parsing of
/// tool calls, limits. `model` is a name of `GET /v1/models`, so a checkpoint can play too; it may be left out if one model is registered.
/// `sampling` and `seed` are as in a job. Nothing is stored. Each request is sent once, and waits up to 30 s for its answer; all
/// episodes together may take two minutes.
#[utoipa::path(
    post, path = "/environments/test", tag = "Rewards", operation_id = "test_environment",
    request_body(content = Object, example = json!({
        "environment": {"url": "https://env.example/play", "secret": "whsec_…", "max_turns": 4},
        "model": "tiny", "rows": [{"prompt": "Let us begin.", "level": 3}], "sampling": {"max_completion_length": 64}
    })),
    responses(
        (status = 200, description = "The episodes, also if the environment gave no valid answer", body = Report),
        (status = 404, description = "There is no such model", body = ProblemBody, content_type = "application/problem+json"),
        (status = 422, description = "The environment, the model or the rows are not valid", body = ProblemBody, content_type = "application/problem+json"),
        (status = 429, description = "Too many requests with this API key wait for expensive work, or all places of served models are taken", body = ProblemBody, content_type = "application/problem+json"),
        (status = 501, description = "This server serves no models", body = ProblemBody, content_type = "application/problem+json"),
        (status = 503, description = "The server is busy or is shutting down", body = ProblemBody, content_type = "application/problem+json"),
        (status = 504, description = "The episodes took longer than two minutes, the time limit", body = ProblemBody, content_type = "application/problem+json"),
    )
)]
async fn test_environment(
    State(state): State<AppState>,
    caller: Caller,
    Json(body): Json<Value>,
) -> Result<Json<Report>, Problem> {
    let spec = EnvironmentTestSpec::read(&body).map_err(|errors| invalid(Code::InvalidBody, errors))?;
    let model = match &spec.model {
        Some(model) => model.clone(),
        None => only_model(&state, &caller).await?,
    };
    let chosen = v1::resolve(&state, &caller, &model).await?;
    let outgoing = reach::outgoing(&state).await?;
    let journal: Arc<dyn Journal> = Arc::new(TestJournal::new(&state).await?);
    let EnvironmentTestSpec { environment, secrets, rows, seed, sampling, .. } = spec;
    let plan = EnvironmentPlan { service: once(environment.service.clone()), ..environment };
    let unusable =
        |detail: String| invalid(Code::InvalidBody, vec![FieldError::new("/environment", "unusable", detail)]);
    let client = RewardClient::new(&outgoing).map_err(unusable)?;
    let client = EnvironmentClient::new(&plan, &secrets, &client, JobId::new())
        .map_err(|error| unusable(error.detail))?
        .with_journal(Some(journal))
        .recording();
    let slot = heavy::slot(&state, &state.service_tests, &caller).await?;
    let test = Test { state: state.clone(), caller, chosen, client, plan, sampling, seed };
    let playing = async move { tokio::time::timeout(LIMIT, test.run(rows)).await };
    match heavy::drive(&state, slot, playing).await? {
        Ok(report) => report.map(Json),
        Err(_) => {
            let detail = format!(
                "the episodes were not over within {} s: send fewer rows, or lower max_turns or sampling.max_completion_length",
                LIMIT.as_secs()
            );
            Err(Problem::new(Code::GenerationTimeout, detail))
        }
    }
}

/// The only model that the caller may use.
async fn only_model(state: &AppState, caller: &Caller) -> Result<String, Problem> {
    let models = state.store.model_list(caller.sees(), None, 2).await?.data;
    let mut own = models.into_iter();
    match (own.next(), own.next()) {
        (Some(row), None) => Ok(row.id),
        (only, _) => {
            let detail = match only {
                None => "no model is registered: register one with POST /models",
                Some(_) => "several models are registered: name the one that plays",
            };
            Err(invalid(Code::InvalidBody, vec![FieldError::new("/model", "required", detail)]))
        }
    }
}

/// Limits the settings of an environment under test to one try of each request.
fn once(mut service: ServicePlan) -> ServicePlan {
    service.max_tries = 1;
    service.max_invalid_tries = 0;
    service.max_outage_s = 0;
    service.timeout_ms = service.timeout_ms.min(MAX_TIMEOUT_MS);
    service.deadline_ms = service.deadline_ms.min(MAX_TIMEOUT_MS);
    service
}

/// A test that is running.
struct Test {
    state: AppState,
    caller: Caller,
    chosen: Chosen,
    client: EnvironmentClient,
    plan: EnvironmentPlan,
    sampling: SamplingPlan,
    seed: u64,
}

impl Test {
    /// Plays the episodes on a thread for blocking work, since the rules of episodes are the engine's, which does not wait.
    async fn run(self, rows: Vec<(Value, serde_json::Map<String, Value>)>) -> Result<Report, Problem> {
        let left = CancellationToken::new();
        let _leave = left.clone().drop_guard();
        let (start, runtime) = (Instant::now(), Handle::current());
        let played = spawn_blocking(move || {
            let model = self.chosen.id.clone();
            let prompts = self.prompts(rows)?;
            let mut place = Place { test: &self, runtime, left, problems: Vec::new(), refused: None };
            let episodes = place.play(&prompts);
            let Place { mut problems, refused, .. } = place;
            if let Some(problem) = refused {
                return Err(problem);
            }
            let episodes = episodes.unwrap_or_else(|error| {
                problems.push(error);
                Vec::new()
            });
            for (index, episode) in episodes.iter().enumerate() {
                if episode.total.is_none() {
                    problems.push(format!(
                        "the episode of row {index} has no reward (stop reason {}): it would be left out of training",
                        episode.stop.name()
                    ));
                }
            }
            let exchanges = self.client.exchanges();
            let ok = problems.is_empty();
            Ok(Report { ok, model, episodes, problems, exchanges, latency_ms: 0.0 })
        });
        let mut report = played.await.map_err(Problem::internal)??;
        report.latency_ms = (start.elapsed().as_secs_f64() * 1e6).round() / 1e3;
        Ok(report)
    }

    fn prompts(&self, rows: Vec<(Value, serde_json::Map<String, Value>)>) -> Result<Vec<TokenizedPrompt>, Problem> {
        let facts = &self.chosen.facts;
        let refused = |at: &str, detail: String| {
            invalid(Code::InvalidBody, vec![FieldError::new(at, "prompt_not_encodable", detail)])
        };
        if facts.text.chat_template().is_none() {
            let detail = "episodes are chats, but the model has no chat template".to_owned();
            return Err(refused("/model", detail));
        }
        let rows = rows.into_iter().map(|(prompt, columns)| PromptRow { prompt, columns }).collect();
        // An episode needs room for its prompt and for all of its tokens.
        let sampling = SamplingPlan {
            max_completion_length: self.sampling.max_completion_length.max(self.plan.max_episode_tokens),
            ..self.sampling.clone()
        };
        tokenize(&facts.text, rows, &sampling, facts.card.max_position_embeddings)
            .map_err(|error| refused("/rows", with_causes(&error)))
    }
}

/// The services that the episodes of a test need. Each waits on this thread.
struct Place<'t> {
    test: &'t Test,
    runtime: Handle,
    /// Cancelled when the client has left or the time is up.
    left: CancellationToken,
    problems: Vec<String>,
    /// Why the model cannot play.
    refused: Option<Problem>,
}

impl Place<'_> {
    fn play(&mut self, prompts: &[TokenizedPrompt]) -> Result<Vec<Episode>, String> {
        let test = self.test;
        let episodes = Episodes {
            sampling: &test.sampling,
            environment: &test.plan,
            text: &test.chosen.facts.text,
            prompts,
            num_generations: NonZeroUsize::MIN,
            keys: (Key::new(test.seed, Stream::Generate), Key::new(test.seed, Stream::Environment)),
            max_positions: test.chosen.facts.card.max_position_embeddings,
        };
        let rows: Vec<u64> = (0..prompts.len() as u64).collect();
        let groups = play(self, &episodes, &rows).map_err(|error| with_causes(&error))?;
        let completions = groups.into_iter().flat_map(|group| group.completions);
        Ok(completions.filter_map(|completion| completion.episode.map(|episode| *episode)).collect())
    }

    /// Waits for a future, unless the client has left.
    fn wait<T>(&self, future: impl Future<Output = T>) -> Result<T, RunEnd> {
        let left = &self.left;
        self.runtime.block_on(async {
            tokio::select! {
                done = future => Ok(done),
                () = left.cancelled() => Err(RunEnd::Stopped(StopReason::Cancel)),
            }
        })
    }
}

impl Table for Place<'_> {
    fn generate(&mut self, prompts: &[GeneratePrompt<'_>], max_tokens: usize) -> Result<Vec<Generated>, RunEnd> {
        let test = self.test;
        let mut sampled = Vec::with_capacity(prompts.len());
        for prompt in prompts {
            let ids = [prompt.ids, prompt.given].concat();
            // Each turn draws other random numbers than the one before.
            let seed =
                Key::new(test.seed, Stream::Generate).with(prompt.row).with(prompt.given.len() as u64).bits() >> 11;
            let mut request = request(&test.sampling, ids, 1, seed);
            request.max_tokens = u32::try_from(max_tokens).unwrap_or(u32::MAX);
            let answer = v1::start(&test.state, &test.caller, &test.chosen, request.clone());
            let collected = match answer {
                Ok(answers) => self.wait(v1::collect(answers, &request))?.map_err(v1::problem),
                Err(problem) => Err(problem),
            };
            let collected = collected.map_err(|problem| {
                let message = problem.detail().to_owned();
                self.refused = Some(problem);
                RunEnd::Failed(EngineError::Input(message))
            })?;
            sampled.extend(collected.answers.into_iter().map(|whole| Generated {
                finish_reason: whole.finish_reason(),
                segments: Segments(vec![Segment::Model { ids: whole.ids, logps: None }]),
                episode: None,
            }));
        }
        Ok(sampled)
    }

    fn ask(&mut self, calls: &[EpisodeCall]) -> Result<Vec<Reply>, RunEnd> {
        let asked = self.wait(self.test.client.ask(RolloutId::train(0), calls))?;
        let replies = asked.map_err(|failure| RunEnd::Failed(EngineError::Input(failure.to_string())))?;
        for (call, reply) in calls.iter().zip(&replies) {
            let row = call.episode.row;
            match reply {
                Reply::Failed { code, message } => {
                    self.problems.push(format!("the answer for row {row} cannot be used ({code}): {message}"));
                }
                Reply::Lost => self.problems.push(format!("the environment has forgotten the episode of row {row}")),
                Reply::Reset(_) | Reply::Step(_) | Reply::Closed => {}
            }
        }
        Ok(replies)
    }

    fn event(&mut self, event: Event) -> Result<(), RunEnd> {
        if let Event::Warning { message, .. } = event {
            self.problems.push(message);
        }
        Ok(())
    }
}
