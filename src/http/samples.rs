//! A job's completions, with rewards and advantages: pages, search, and downloads as NDJSON or CSV.

use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use futures::stream;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::AppState;
use super::auth::Caller;
use super::error::{Problem, ProblemBody, chain};
use super::extract::{Json, Path, Query, count};
use super::heavy::{self, Slot};
use super::jobs::bad_query;
use super::list;
use crate::event::{FinishReason, Sample, SamplePhase};
use crate::id::JobId;
use crate::store::{self, SampleQuery, SamplesRemoved};

/// Number of rows that a download reads at a time and holds in memory.
const DOWNLOAD_ROWS: u32 = 500;

/// Maximum number of concurrent searches: the number of database connections reserved for them.
pub(super) const SEARCHES: usize = 2;
/// Time limit for one page of a search. The page then contains the results found so far.
const SEARCH_WITHIN: Duration = Duration::from_secs(5);

pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(list_samples))
}

/// The order of samples.
#[derive(Debug, Clone, Copy, Default, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum SampleSort {
    /// The latest sample comes first.
    #[default]
    Recent,
    /// Highest reward first; unscorable samples last.
    Best,
    /// Lowest reward first; unscorable samples last.
    Worst,
}

/// The format of the response.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum Form {
    /// A page as a JSON object `{data, next}`.
    #[default]
    Json,
    /// Every matching sample, one JSON object per line, exactly as stored.
    Ndjson,
    /// Every matching sample as a CSV line, for spreadsheets: a text that a spreadsheet would interpret as a formula (it begins
    /// with `=`, `+`, `-`, `@`, a tab or a carriage return) gets an apostrophe in front.
    Csv,
}

/// Selects samples, their order and the format.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct SamplesQuery {
    /// Only samples of this optimizer step; 0 = before training.
    #[serde(default, deserialize_with = "count")]
    step: Option<u64>,
    /// Only samples from this step on, inclusive.
    #[serde(default, deserialize_with = "count")]
    min_step: Option<u64>,
    /// Only samples up to this step, inclusive.
    #[serde(default, deserialize_with = "count")]
    max_step: Option<u64>,
    /// Only training or only evaluation samples.
    #[param(inline)]
    phase: Option<SamplePhase>,
    /// Only samples of this dataset row: `row_N`, N counted from 0.
    prompt_id: Option<String>,
    /// Only samples of this group.
    group_id: Option<String>,
    /// Only completions that ended for this reason.
    #[param(inline)]
    finish_reason: Option<FinishReason>,
    /// Minimum reward; unscorable samples are left out.
    min_reward: Option<f64>,
    /// Maximum reward; unscorable samples are left out.
    max_reward: Option<f64>,
    /// The order of the samples.
    #[serde(default)]
    #[param(inline)]
    sort: SampleSort,
    /// Only samples whose prompt or completion contains this text, ignoring case.
    q: Option<String>,
    /// The format of the response; ndjson and csv are complete downloads.
    #[serde(default)]
    #[param(inline)]
    format: Form,
    /// The cursor `next` of the previous page.
    after: Option<String>,
    /// Items per page, 1 to 100. For a download: maximum number of rows; default: all.
    #[serde(default, deserialize_with = "count")]
    #[param(minimum = 1, default = 20)]
    limit: Option<u64>,
}

/// A page of samples.
#[derive(Debug, Serialize, ToSchema)]
struct SamplePage {
    /// The samples of this page.
    data: Vec<Sample>,
    /// The cursor to send as `after` for the next page; null on the last page. A page of a search ends after 5 s with the results
    /// found by then, possibly none: continue while there is a `next`.
    next: Option<String>,
    /// Samples that were removed to stay within the server's limit per job; absent if none were.
    #[serde(skip_serializing_if = "Option::is_none")]
    removed: Option<RemovedSamples>,
}

/// Samples that were removed in favor of newer ones.
#[derive(Debug, Serialize, ToSchema)]
struct RemovedSamples {
    /// Number of removed samples.
    samples: u64,
    /// Their size, in bytes.
    size_bytes: u64,
    /// Samples up to this training step (inclusive) were removed.
    to_step: Option<u64>,
}

/// List a job's completions, with rewards and advantages.
#[utoipa::path(get, path = "/jobs/{id}/samples", tag = "Jobs", params(("id" = JobId, Path, description = "The job"), SamplesQuery), responses(
    (status = 200, description = "A page of samples, or a download of all samples",
        content((SamplePage = "application/json"), (String = "application/x-ndjson"), (String = "text/csv"))),
    (status = 400, description = "A query parameter is not valid", body = ProblemBody),
    (status = 404, description = "There is no such job", body = ProblemBody),
    (status = 429, description = "Too many sample searches with this API key are waiting", body = ProblemBody),
    (status = 503, description = "The server is busy with other sample searches, or is shutting down", body = ProblemBody)))]
async fn list_samples(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<JobId>,
    Query(query): Query<SamplesQuery>,
) -> Result<Response, Problem> {
    let (form, limit) = (query.format, query.limit);
    let wanted = wanted(query)?;
    let row = state.store.job_get(id).await?;
    if form != Form::Json {
        let names = row.plan()?.rewards.into_iter().map(|reward| reward.name).collect();
        return download(state, caller, id, Download { wanted, form, left: limit.unwrap_or(u64::MAX), names }).await;
    }
    let limit = limit.map(|limit| u32::try_from(limit).unwrap_or(u32::MAX));
    let wanted = SampleQuery { limit: list::limit(limit)?, ..wanted };
    let _slot = search_slot(&state, &caller, &wanted).await?;
    let wanted = SampleQuery { until: Some(Instant::now() + SEARCH_WITHIN), ..wanted };
    let page = heavy::unless_stopping(&state, async { Ok(state.store.sample_page(id, &wanted).await?) }).await?;
    let removed = state.store.samples_removed(id).await?;
    let data = page.data.into_iter().map(|row| row.sample).collect();
    let removed =
        removed.map(|SamplesRemoved { samples, size_bytes, to_step }| RemovedSamples { samples, size_bytes, to_step });
    Ok(Json(SamplePage { data, next: page.next, removed }).into_response())
}

/// Waits for one of the search slots if the request searches texts. Other pages need no slot.
pub(super) async fn search_slot(
    state: &AppState,
    caller: &Caller,
    query: &SampleQuery,
) -> Result<Option<Slot>, Problem> {
    if !query.is_search() {
        return Ok(None);
    }
    heavy::slot(state, &state.searches, caller).await.map(Some)
}

/// Converts the HTTP query to the database query.
fn wanted(query: SamplesQuery) -> Result<SampleQuery, Problem> {
    if query.q.as_ref().is_some_and(|text| text.chars().count() > 1000) {
        return Err(bad_query("q", "out_of_range", "must be at most 1000 characters long"));
    }
    if let (Some(_), Some(_)) = (query.step, query.min_step.or(query.max_step)) {
        return Err(bad_query("step", "conflict", "set either step, or min_step and max_step"));
    }
    for (name, reward) in [("min_reward", query.min_reward), ("max_reward", query.max_reward)] {
        if reward.is_some_and(|reward| !reward.is_finite()) {
            return Err(bad_query(name, "out_of_range", "must be a finite number"));
        }
    }
    if query.limit == Some(0) {
        return Err(bad_query("limit", "out_of_range", "must be at least 1"));
    }
    Ok(SampleQuery {
        min_step: query.step.or(query.min_step),
        max_step: query.step.or(query.max_step),
        phase: query.phase,
        prompt_id: query.prompt_id,
        group_id: query.group_id,
        finish_reason: query.finish_reason,
        min_reward: query.min_reward,
        max_reward: query.max_reward,
        sort: match query.sort {
            SampleSort::Recent => store::SampleSort::Recent,
            SampleSort::Best => store::SampleSort::Best,
            SampleSort::Worst => store::SampleSort::Worst,
        },
        contains: query.q.filter(|text| !text.is_empty()),
        after: query.after,
        limit: 0,
        until: None,
    })
}

struct Download {
    wanted: SampleQuery,
    form: Form,
    left: u64,
    /// Names of the job's rewards, in the order of the job.
    names: Vec<String>,
}

/// Streams a download of samples page by page. A page is read from the database when the client has received the previous one.
async fn download(state: AppState, caller: Caller, id: JobId, download: Download) -> Result<Response, Problem> {
    let (kind, extension) = match download.form {
        Form::Csv => ("text/csv; charset=utf-8", "csv"),
        Form::Ndjson | Form::Json => ("application/x-ndjson", "ndjson"),
    };
    // The first page of a download is read before the status is sent, so that an invalid cursor still causes an error response.
    let first = piece(&state, &caller, id, download).await?;
    let pieces = stream::try_unfold(Some(first), move |pieces: Option<(Bytes, Option<Download>)>| {
        let (state, caller) = (state.clone(), caller.clone());
        async move {
            let Some((bytes, rest)) = pieces else { return Ok(None) };
            let next = match rest {
                None => None,
                Some(rest) => Some(piece(&state, &caller, id, rest).await.map_err(|problem| {
                    tracing::warn!(job = %id, detail = problem.detail(), "a download of samples ended early");
                    std::io::Error::other("the job's stored samples could not be read")
                })?),
            };
            Ok::<_, std::io::Error>(Some((bytes, next)))
        }
    });
    let disposition = format!("attachment; filename=\"{id}-samples.{extension}\"");
    let headers = [(header::CONTENT_TYPE, kind.to_owned()), (header::CONTENT_DISPOSITION, disposition)];
    Ok((headers, Body::from_stream(pieces)).into_response())
}

/// Returns the next chunk of the download, and the state from which the rest continues. The first chunk of a CSV begins
/// with its header line.
async fn piece(
    state: &AppState,
    caller: &Caller,
    id: JobId,
    mut download: Download,
) -> Result<(Bytes, Option<Download>), Problem> {
    let first = download.wanted.limit == 0;
    download.wanted.limit = DOWNLOAD_ROWS.min(u32::try_from(download.left).unwrap_or(u32::MAX));
    let page = loop {
        let _slot = search_slot(state, caller, &download.wanted).await?;
        download.wanted.until = Some(Instant::now() + SEARCH_WITHIN);
        let reading = async { Ok(state.store.sample_page(id, &download.wanted).await?) };
        let page = heavy::unless_stopping(state, reading).await?;
        // A search without a result so far releases its slot and queues behind other waiting searches.
        if !page.data.is_empty() || page.next.is_none() {
            break page;
        }
        download.wanted.after = page.next;
    };
    download.left -= page.data.len() as u64;
    let samples = page.data.iter().map(|row| &row.sample);
    let bytes = match download.form {
        Form::Csv => csv_of(samples, &download.names, first).map_err(|error| Problem::internal(chain(&*error)))?,
        Form::Ndjson | Form::Json => {
            let mut lines = Vec::new();
            for sample in samples {
                serde_json::to_writer(&mut lines, sample).map_err(Problem::internal)?;
                lines.push(b'\n');
            }
            lines
        }
    };
    let more = page.next.is_some() && download.left > 0;
    download.wanted.after = page.next;
    Ok((bytes.into(), more.then_some(download)))
}

fn csv_of<'s>(
    samples: impl Iterator<Item = &'s Sample>,
    names: &[String],
    with_header: bool,
) -> Result<Vec<u8>, Box<dyn std::error::Error + Send + Sync>> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    if with_header {
        let rewards = names.iter().map(|name| format!("rewards/{name}"));
        let head = ["step", "phase", "group_id", "prompt_id", "prompt", "completion", "reward"].map(str::to_owned);
        let tail = ["kl", "advantage", "finish_reason", "num_tokens"].map(str::to_owned);
        writer.write_record(head.into_iter().chain(rewards).chain(tail))?;
    }
    // Numbers in CSV are written by serde_json, with the shortest digits that read back as the same number; a missing value is
    // empty.
    let number = |value: Option<f64>| value.map(|value| serde_json::Value::from(value).to_string()).unwrap_or_default();
    for sample in samples {
        let Sample {
            step,
            phase,
            group_id,
            prompt_id,
            prompt,
            completion,
            rewards,
            reward,
            kl,
            advantage,
            finish_reason,
            num_tokens,
            episode: _,
        } = sample;
        let head = [
            step.to_string(),
            match phase {
                SamplePhase::Train => "train".to_owned(),
                SamplePhase::Eval => "eval".to_owned(),
            },
            escape_formula(group_id),
            escape_formula(prompt_id),
            escape_formula(prompt),
            escape_formula(completion),
            number(*reward),
        ];
        let values = names.iter().map(|name| number(rewards.get(name).copied().flatten()));
        let reason = match finish_reason {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
        };
        let tail = [number(*kl), number(*advantage), reason.to_owned(), num_tokens.to_string()];
        writer.write_record(head.into_iter().chain(values).chain(tail))?;
    }
    Ok(writer.into_inner()?)
}

/// Escapes a text that a spreadsheet would interpret as a formula (OWASP, CSV injection).
fn escape_formula(text: &str) -> String {
    if text.starts_with(['=', '+', '-', '@', '\t', '\r']) { format!("'{text}") } else { text.to_owned() }
}
