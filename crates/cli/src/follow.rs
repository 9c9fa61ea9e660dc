//! A job as it goes on: waiting for its end through restarts of the server, its figures, and how it ended.

use std::time::{Duration, Instant};

use rlood_client::Error;
use rlood_types::id::JobId;
use serde_json::Value;

use crate::context::Context;
use crate::error::{CliError, EXIT_CANCELLED, EXIT_FAILED, EXIT_PAUSED};
use crate::output::{Out, between, clean_lines, shown, span};

pub mod figures;
pub mod live;

/// How long a server that answered before may be away.
const OUTAGE: Duration = Duration::from_secs(600);
/// Between two tries meanwhile.
const RETRY: Duration = Duration::from_secs(1);
/// How long a waiting request is held.
const WAIT_S: u64 = 30;

/// Bears a server that is away for a while.
#[derive(Debug, Default)]
pub struct Patience {
    since: Option<Instant>,
}

impl Patience {
    /// The answer; `None` when the request failed in a way that passes, after a pause.
    ///
    /// # Errors
    /// Those that stand, and any once the server was away for ten minutes.
    pub async fn take<T>(&mut self, out: &Out, result: Result<T, Error>) -> Result<Option<T>, CliError> {
        match result {
            Ok(answer) => {
                if self.since.take().is_some() {
                    out.note("the server is back");
                }
                Ok(Some(answer))
            }
            Err(error) if error.is_retryable() => {
                if self.since.is_none() {
                    out.note(format!("{error}; trying again"));
                }
                if self.since.get_or_insert_with(Instant::now).elapsed() > OUTAGE {
                    return Err(error.into());
                }
                tokio::time::sleep(RETRY).await;
                Ok(None)
            }
            Err(error) => Err(error.into()),
        }
    }
}

/// The text of a field; empty when it is no string.
pub fn text<'v>(value: &'v Value, field: &str) -> &'v str {
    value[field].as_str().unwrap_or_default()
}

/// Whether a job is over.
pub fn is_over(job: &Value) -> bool {
    matches!(text(job, "state"), "succeeded" | "failed" | "cancelled")
}

/// Whether a job is over, or paused and that counts as an end.
pub fn is_settled(job: &Value, until_paused: bool) -> bool {
    is_over(job) || (until_paused && text(job, "state") == "paused")
}

/// Waits until a job is over, or paused if `until_paused`.
///
/// # Errors
/// When the job does not exist, or the server is away for too long.
pub async fn wait_for(context: &Context, id: JobId, until_paused: bool) -> Result<Value, CliError> {
    let mut patience = Patience::default();
    let mut is_told = false;
    loop {
        let call = context.client.raw_get(&["jobs", &id.to_string()]);
        let begun = Instant::now();
        let call = call.query("wait", WAIT_S).work(Duration::from_secs(WAIT_S));
        let Some(answer) = patience.take(&context.out, call.send().await).await? else { continue };
        let job = answer.value;
        if is_settled(&job, until_paused) {
            return Ok(job);
        }
        let is_paused = text(&job, "state") == "paused";
        if is_paused && !is_told {
            context
                .out
                .note(format!("{id} is paused ({}); `rlood resume {id}` lets it go on", shown(&job["status_reason"])));
        }
        is_told = is_paused;
        // A paused job is answered at once, and so is every request of a server that stops.
        if begun.elapsed() < RETRY {
            tokio::time::sleep(RETRY).await;
        }
    }
}

/// Says how a job ended, on standard error.
pub fn report_outcome(out: &Out, job: &Value) {
    let (id, state) = (text(job, "id"), text(job, "state"));
    let took = between(&job["started_at"], &job["finished_at"]);
    let took = took.map(|seconds| format!(" after {}", span(seconds))).unwrap_or_default();
    out.note(format!("{id} {state}{took}, step {}/{}", shown(&job["step"]), shown(&job["total_steps"])));
    let failure = &job["failure"];
    if failure.is_object() {
        out.note(format!("  {}: {}", shown(&failure["code"]), clean_lines(text(failure, "message"))));
        if let Some(suggestion) = failure["suggestion"].as_str() {
            out.note(format!("  {}", clean_lines(suggestion)));
        }
    }
    if let Some(message) = job["ending"]["message"].as_str() {
        out.note(format!("  {}", clean_lines(message)));
    }
    match state {
        "succeeded" => out.note(format!("  `rlood pull {id}` fetches what it trained")),
        "failed" => out.note(format!("  `rlood logs {id}` has its log, `rlood retry {id}` runs it again")),
        "paused" => out.note(format!("  {}; `rlood resume {id}` lets it go on", shown(&job["status_reason"]))),
        _ => {}
    }
}

/// The exit code of jobs that are over or paused: the worst of them.
pub fn exit_code<'j>(jobs: impl IntoIterator<Item = &'j Value>) -> u8 {
    let code = |job: &Value| match text(job, "state") {
        "succeeded" => 0,
        "cancelled" => EXIT_CANCELLED,
        "paused" => EXIT_PAUSED,
        _ => EXIT_FAILED,
    };
    let mut worst = 0;
    for job in jobs {
        worst = match (worst, code(job)) {
            (EXIT_FAILED, _) | (_, EXIT_FAILED) => EXIT_FAILED,
            (EXIT_CANCELLED, _) | (_, EXIT_CANCELLED) => EXIT_CANCELLED,
            (one, other) => one.max(other),
        };
    }
    worst
}

/// Runs until it is done or the user presses Ctrl-C, which stops nothing but this program.
///
/// # Errors
/// [`CliError::Interrupted`], which says what goes on and what would end it.
pub async fn detached<T>(
    ids: &[JobId],
    again: &str,
    work: impl Future<Output = Result<T, CliError>>,
) -> Result<T, CliError> {
    let names = ids.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
    let goes_on = if ids.len() == 1 { "the job goes on" } else { "the jobs go on" };
    tokio::select! {
        done = work => done,
        pressed = tokio::signal::ctrl_c() => {
            pressed.map_err(CliError::local("listen for Ctrl-C"))?;
            Err(CliError::Interrupted(format!(
                "detached, {goes_on}: `rlood {again} {names}` comes back, `rlood cancel {names}` ends {}",
                if ids.len() == 1 { "it" } else { "them" }
            )))
        }
    }
}

/// Says how far something of the server is, when that has changed.
pub fn say_progress(context: &Context, resource: &Value, told: &mut String) {
    let progress = &resource["progress"];
    let line = match (progress["done"].as_u64(), progress["total"].as_u64()) {
        (Some(done), Some(total)) if total > 0 => {
            format!("{} {} %", shown(&resource["state"]), (done as f64 / total as f64 * 100.0) as u64)
        }
        _ => shown(&resource["state"]),
    };
    if *told != line {
        context.out.note(format!("{}: {line}", shown(&resource["id"])));
        *told = line;
    }
}

/// Runs until it is done or the user presses Ctrl-C, which stops nothing on the server.
///
/// # Errors
/// [`CliError::Interrupted`], which says how to come back.
pub async fn interruptible<T>(again: &str, work: impl Future<Output = Result<T, CliError>>) -> Result<T, CliError> {
    tokio::select! {
        done = work => done,
        pressed = tokio::signal::ctrl_c() => {
            pressed.map_err(CliError::local("listen for Ctrl-C"))?;
            Err(CliError::Interrupted(format!("detached, the server goes on: `{again}` comes back")))
        }
    }
}

/// Ends with a timeout after `limit`.
///
/// # Errors
/// [`CliError::Timeout`], or what the work says.
pub async fn within<T>(
    limit: Option<Duration>,
    work: impl Future<Output = Result<T, CliError>>,
) -> Result<T, CliError> {
    let Some(limit) = limit else { return work.await };
    let over = |_| CliError::Timeout(format!("--timeout: not over after {}", span(limit.as_secs_f64())));
    tokio::time::timeout(limit, work).await.map_err(over)?
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_worst_job_gives_the_exit_code() {
        let code = |states: &[&str]| {
            let jobs: Vec<Value> = states.iter().map(|state| json!({"state": state})).collect();
            exit_code(&jobs)
        };
        assert_eq!(code(&["succeeded", "succeeded"]), 0);
        assert_eq!(code(&["succeeded", "paused"]), 7);
        assert_eq!(code(&["paused", "cancelled", "succeeded"]), 6);
        assert_eq!(code(&["cancelled", "failed", "paused"]), 1);
    }
}
