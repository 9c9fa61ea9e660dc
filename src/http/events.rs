//! The events of a job, as pages or as a stream that replays and follows, and the log lines of its workers.

use std::time::Duration;

use axum::extract::State;
use axum::http::{HeaderMap, HeaderName};
use axum::response::sse;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::{Value, json};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::AppState;
use super::error::{Code, Problem, ProblemBody};
use super::event_stream::{self, Sender, ServerSentEvent, send, wants_stream};
use super::extract::{Json, Path, Query};
use super::list::{self, List, PageQuery, Time};
use super::{metrics, samples, summary};
use crate::id::JobId;
use crate::store::background::spawn;
use crate::store::{EventRow, LogRow, TaskKind};

/// Number of past events that a stream reads from the database at a time.
const REPLAY_PAGE: u32 = 100;
/// Delay after which a browser reconnects a broken stream (`retry` of the server-sent events).
const RECONNECT: Duration = Duration::from_secs(3);
const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");

/// The routes of this module, of metrics, samples and summary.
pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        .routes(routes!(list_events))
        .routes(routes!(list_logs))
        .merge(metrics::routes())
        .merge(samples::routes())
        .merge(summary::routes())
}

/// An event of a job.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
pub struct Event {
    /// Sequence number: counts from 1 per job without gaps. Also the id of the server-sent event.
    seq: i64,
    /// Type of the event; also the name of the server-sent event.
    #[serde(rename = "type")]
    kind: String,
    /// When the event happened.
    time: Time,
    /// The attempt that the event belongs to; 0 before the first claim.
    attempt: u64,
    /// Details; the fields depend on the type.
    data: Value,
}

impl From<EventRow> for Event {
    fn from(EventRow { seq, kind, attempt, time, data }: EventRow) -> Self {
        Self { seq, kind, time: Time(time), attempt, data }
    }
}

/// A page of events.
#[derive(Debug, Serialize, ToSchema)]
struct EventPage {
    /// The events, in order.
    data: Vec<Event>,
    /// The `after` for the next page; null = no more events.
    next: Option<String>,
    /// The range of requested events that retention has removed; absent if all exist.
    #[serde(skip_serializing_if = "Option::is_none")]
    removed: Option<RemovedEvents>,
}

/// Events that retention has removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
struct RemovedEvents {
    /// Sequence number of the last removed event.
    to_seq: i64,
}

impl RemovedEvents {
    /// Returns the gap between the last known event and the first one found. Events count without gaps up to `newest`.
    fn between(after: i64, found: &[EventRow], newest: i64) -> Option<Self> {
        let to_seq = found.first().map_or(newest, |row| row.seq - 1);
        (to_seq > after).then_some(Self { to_seq })
    }
}

/// List or follow a job's events.
///
/// Returns JSON pages in order; `after` is the last known `seq`. With `Accept: text/event-stream` the response is a stream: all
/// events after `after` or `Last-Event-ID`, then new events as they happen, without gaps or duplicates; a comment every 15 s; an
/// event `end` when the job has ended and its newest verdict, if it has one, is complete. A client that does not need the verdict
/// may close the stream after `job.succeeded`, `job.failed` or `job.cancelled`. If retention has removed events of a finished job,
/// the page has a `removed` field and the stream an event `removed`. A number that the job has not reached (for example because the server was restored from a backup) is
/// rejected with `invalid_cursor`: start again without it.
#[utoipa::path(get, path = "/jobs/{id}/events", tag = "Jobs",
    params(("id" = JobId, Path, description = "The job"), PageQuery,
        ("Last-Event-ID" = Option<u64>, Header, description = "The `seq` of the last event that the client has; it overrides `after`")),
    responses(
        (status = 200, description = "A page of events, or the stream of events", content((EventPage = "application/json"), (ServerSentEvent = "text/event-stream"))),
        (status = 400, description = "A query parameter is not valid", body = ProblemBody),
        (status = 404, description = "There is no such job", body = ProblemBody),
        (status = 429, description = "The API key or the connection has too many open event streams; see `Retry-After`", body = ProblemBody)))]
async fn list_events(
    State(state): State<AppState>,
    Path(id): Path<JobId>,
    Query(query): Query<PageQuery>,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    let (name, after) = match headers.get(LAST_EVENT_ID) {
        Some(last) => ("Last-Event-ID", Some(last.to_str().unwrap_or("?"))),
        None => ("?after", query.after.as_deref()),
    };
    let after = parse_seq(after, name)?;
    let newest = state.store.job_get(id).await?.last_seq;
    // The client's number is beyond the job's events, as after restoring a backup. The same numbers will belong to other
    // events, so the request is rejected.
    if after > newest {
        let detail = format!("the job's newest event has the number {newest}: start again without 'after'");
        return Err(invalid_seq(name, &detail));
    }
    if !wants_stream(&headers) {
        let limit = query.limit.map_or(Ok(REPLAY_PAGE), |limit| list::limit(Some(limit)))?;
        let rows = state.store.event_page(id, after, limit).await?;
        let next = (rows.len() == limit as usize).then(|| rows.last().map(|row| row.seq.to_string())).flatten();
        let removed = RemovedEvents::between(after, &rows, newest);
        return Ok(Json(EventPage { data: rows.into_iter().map(Event::from).collect(), next, removed }).into_response());
    }
    let (sender, response) = event_stream::open();
    spawn(async move {
        if let Err(problem) = follow(&state, id, after, &sender).await {
            tracing::debug!(job = %id, detail = problem.detail(), "a client's stream of job events ended early");
        }
    });
    Ok(response)
}

fn parse_seq(text: Option<&str>, name: &str) -> Result<i64, Problem> {
    let Some(text) = text else { return Ok(0) };
    // Only digits are accepted, although `parse` accepts a leading `+` too.
    let seq = text.parse().ok().filter(|_| text.bytes().all(|byte| byte.is_ascii_digit()));
    seq.ok_or_else(|| invalid_seq(name, "must be the number (seq) of an event: start again without it"))
}

fn invalid_seq(name: &str, detail: &str) -> Problem {
    Problem::new(Code::InvalidCursor, format!("{name}: {detail}")).item(name, "invalid_cursor", detail)
}

/// Sends all events after `after`, then new ones, until the job and its verdict have ended, or the client has disconnected or reads too
/// slowly.
async fn follow(state: &AppState, id: JobId, mut after: i64, sender: &Sender) -> Result<(), Problem> {
    let mut changes = state.store.changed(id);
    if !send(sender, sse::Event::default().retry(RECONNECT).comment("events of the job follow")).await {
        return Ok(());
    }
    loop {
        changes.borrow_and_update();
        // The job and its verdict are read before the events: if both are final, the last event is among those read next.
        let row = state.store.job_get(id).await?;
        let is_over = row.state.is_terminal() && is_judged(state, id).await?;
        loop {
            let page = state.store.event_page(id, after, REPLAY_PAGE).await?;
            let full = page.len() == REPLAY_PAGE as usize;
            if let Some(removed) = RemovedEvents::between(after, &page, row.last_seq) {
                let event = sse::Event::default().id(removed.to_seq.to_string()).event("removed");
                if !send(sender, event.json_data(removed).map_err(Problem::internal)?).await {
                    return Ok(());
                }
                after = removed.to_seq;
            }
            for row in page {
                after = row.seq;
                let event = sse::Event::default().id(row.seq.to_string()).event(row.kind.clone());
                let event = event.json_data(Event::from(row)).map_err(Problem::internal)?;
                if !send(sender, event).await {
                    return Ok(());
                }
            }
            if !full {
                break;
            }
        }
        if is_over {
            let end =
                sse::Event::default().event("end").json_data(json!({"state": row.state})).map_err(Problem::internal)?;
            send(sender, end).await;
            return Ok(());
        }
        tokio::select! {
            changed = changes.changed() => if changed.is_err() { return Ok(()) },
            () = sender.closed() => return Ok(()),
        }
    }
}

/// Whether a job has no verdict that is queued or running.
async fn is_judged(state: &AppState, id: JobId) -> Result<bool, Problem> {
    Ok(state.store.task_newest(TaskKind::Verdict, id).await?.is_none_or(|task| task.state.is_final()))
}

/// A line that a worker logged about a job.
#[derive(Debug, Serialize, ToSchema)]
struct LogLine {
    /// The attempt during which the line was logged.
    attempt: u64,
    /// When the line was logged.
    time: Time,
    /// The text of the line.
    line: String,
}

/// List the log lines that workers wrote about a job, oldest first.
#[utoipa::path(get, path = "/jobs/{id}/logs", tag = "Jobs", params(("id" = JobId, Path, description = "The job"), PageQuery), responses(
    (status = 200, description = "A page", body = List<LogLine>), (status = 404, description = "There is no such job", body = ProblemBody)))]
async fn list_logs(
    State(state): State<AppState>,
    Path(id): Path<JobId>,
    Query(query): Query<PageQuery>,
) -> Result<Json<List<LogLine>>, Problem> {
    state.store.job_get(id).await?;
    let page = state.store.log_page(id, query.after.as_deref(), query.limit()?).await?;
    Ok(Json(List::of(page, |LogRow { id: _, attempt, time, line }| LogLine { attempt, time: Time(time), line })))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_is_digits() {
        for text in ["+5", "-0", "-1", " 5", "", "5.0", "x", "99999999999999999999"] {
            assert!(parse_seq(Some(text), "?after").is_err(), "{text}");
        }
        assert!(matches!(parse_seq(Some("5"), "?after"), Ok(5)) && matches!(parse_seq(None, "?after"), Ok(0)));
    }
}
