//! Follows jobs until they finish, even if the server restarts, and reports their outcome.

use std::time::{Duration, Instant};

use rlood_client::Error;
use rlood_types::id::JobId;
use serde_json::Value;

use crate::context::Context;
use crate::error::{CliError, EXIT_CANCELLED, EXIT_FAILED, EXIT_PAUSED};
use crate::output::{Out, between, clean_lines, format_duration, shown};

pub mod job_metrics;
pub mod live;

/// How long requests are retried if a server that was reachable before is unreachable.
const MAX_OUTAGE: Duration = Duration::from_secs(600);
/// Pause between two attempts while the server is unreachable.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// Time limit for the request of a job's verdict after the job has ended.
const VERDICT_WAIT: Duration = Duration::from_secs(5);
/// Seconds that the server may hold a request that waits for the end of a job.
const WAIT_S: u64 = 30;

/// Lets a loop of requests continue while the server is unreachable, for up to ten minutes.
#[derive(Debug, Default)]
pub struct OutageRetry {
    since: Option<Instant>,
}

impl OutageRetry {
    /// Returns the answer of a request. Returns `None`, after a pause, when the request failed with a retryable error.
    ///
    /// # Errors
    /// Returns permanent errors immediately, and retryable errors after ten minutes without an answer.
    pub async fn unwrap_or_wait<T>(&mut self, out: &Out, result: Result<T, Error>) -> Result<Option<T>, CliError> {
        match result {
            Ok(answer) => {
                if self.since.take().is_some() {
                    out.note("reconnected");
                }
                Ok(Some(answer))
            }
            Err(error) if error.is_retryable() => {
                if self.since.is_none() {
                    out.note(format!("{error}; retrying"));
                }
                if self.since.get_or_insert_with(Instant::now).elapsed() > MAX_OUTAGE {
                    return Err(error.into());
                }
                tokio::time::sleep(RETRY_INTERVAL).await;
                Ok(None)
            }
            Err(error) => Err(error.into()),
        }
    }
}

/// Returns a string field of a JSON object; an empty string when the field is missing or not a string.
pub fn text<'v>(value: &'v Value, field: &str) -> &'v str {
    value[field].as_str().unwrap_or_default()
}

/// Returns whether a job has finished.
pub fn is_finished(job: &Value) -> bool {
    matches!(text(job, "state"), "succeeded" | "failed" | "cancelled")
}

/// Returns whether a job has finished, or is paused and `until_paused` is set.
pub fn is_settled(job: &Value, until_paused: bool) -> bool {
    is_finished(job) || (until_paused && text(job, "state") == "paused")
}

/// Waits until a job finishes, or is paused if `until_paused` is set.
///
/// # Errors
/// Fails when the job does not exist, or the server is unreachable for too long.
pub async fn wait_for(context: &Context, id: JobId, until_paused: bool) -> Result<Value, CliError> {
    let mut outage = OutageRetry::default();
    let mut is_pause_reported = false;
    loop {
        let call = context.client.raw_get(&["jobs", &id.to_string()]);
        let begun = Instant::now();
        let call = call.query("wait", WAIT_S).work(Duration::from_secs(WAIT_S));
        let Some(answer) = outage.unwrap_or_wait(&context.out, call.send().await).await? else { continue };
        let job = answer.value;
        if is_settled(&job, until_paused) {
            return Ok(job);
        }
        let is_paused = text(&job, "state") == "paused";
        if is_paused && !is_pause_reported {
            context.out.note(format!(
                "job {id} is paused ({}); resume it with `rlood resume {id}`",
                shown(&job["status_reason"])
            ));
        }
        is_pause_reported = is_paused;
        // The server answers immediately if a job is paused or the server shuts down, so the loop waits between requests.
        if begun.elapsed() < RETRY_INTERVAL {
            tokio::time::sleep(RETRY_INTERVAL).await;
        }
    }
}

/// Prints the outcome of jobs to standard error: how each one ended, and its verdict if it has one.
pub async fn report_outcomes(context: &Context, jobs: &[Value]) {
    for job in jobs {
        print_outcome(&context.out, job);
        if let Some(line) = verdict_line(context, job).await {
            context.out.note(format!("  {line}"));
        }
    }
}

/// Returns the verdict of a job in one line; `None` when the job has none, or the server does not return it.
async fn verdict_line(context: &Context, job: &Value) -> Option<String> {
    if text(job, "state") != "succeeded" || !job["plan"]["eval"].is_object() {
        return None;
    }
    let id = text(job, "id");
    let answer = context.client.raw_get(&["jobs", id, "verdict"]).send();
    let verdict = tokio::time::timeout(VERDICT_WAIT, answer).await.ok()?.ok()?.value;
    match (text(&verdict, "state"), verdict["result"]["summary"].as_str()) {
        ("queued" | "running", _) => Some(format!(
            "the trained model is being compared with the base model; `rlood verdict {id}` waits for the result"
        )),
        (_, Some(summary)) => Some(format!("verdict: {}", clean_lines(summary))),
        (_, None) => None,
    }
}

fn print_outcome(out: &Out, job: &Value) {
    let (id, state) = (text(job, "id"), text(job, "state"));
    let took = between(&job["started_at"], &job["finished_at"]);
    let took = took.map(|seconds| format!(" after {}", format_duration(seconds))).unwrap_or_default();
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
        "succeeded" => out.note(format!("  download the trained weights with `rlood pull {id}`")),
        "failed" => out
            .note(format!("  read the job's log with `rlood logs {id}`, or run the job again with `rlood retry {id}`")),
        "paused" => out.note(format!("  {}; resume it with `rlood resume {id}`", shown(&job["status_reason"]))),
        _ => {}
    }
}

/// Returns the exit code for finished or paused jobs: the most severe one of all jobs.
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

/// Runs `work` until it is done or the user presses Ctrl-C. Ctrl-C ends only this program, not the jobs.
///
/// # Errors
/// Returns [`CliError::Interrupted`] on Ctrl-C, with the commands that follow or cancel the jobs.
pub async fn detached<T>(
    ids: &[JobId],
    again: &str,
    work: impl Future<Output = Result<T, CliError>>,
) -> Result<T, CliError> {
    let names = ids.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
    let still_running = if ids.len() == 1 { "the job keeps running" } else { "the jobs keep running" };
    let them = if ids.len() == 1 { "it" } else { "them" };
    let message = || {
        format!(
            "detached, {still_running}: follow {them} again with `rlood {again} {names}`, or cancel {them} with `rlood cancel {names}`"
        )
    };
    until_interrupted(message, work).await
}

/// Prints the progress of a verdict, an export or another resource of the server, if the progress changed since the last call.
pub fn report_progress(context: &Context, resource: &Value, last_line: &mut String) {
    let progress = &resource["progress"];
    let line = match (progress["done"].as_u64(), progress["total"].as_u64()) {
        (Some(done), Some(total)) if total > 0 => {
            format!("{} {} %", shown(&resource["state"]), (done as f64 / total as f64 * 100.0) as u64)
        }
        _ => shown(&resource["state"]),
    };
    if *last_line != line {
        context.out.note(format!("{}: {line}", shown(&resource["id"])));
        *last_line = line;
    }
}

/// Runs `work` until it is done or the user presses Ctrl-C. Ctrl-C ends only this program, not the work on the server.
///
/// # Errors
/// Returns [`CliError::Interrupted`] on Ctrl-C, with the command that continues.
pub async fn interruptible<T>(again: &str, work: impl Future<Output = Result<T, CliError>>) -> Result<T, CliError> {
    let message = || format!("detached, the server keeps working: continue with `{again}`");
    until_interrupted(message, work).await
}

/// Runs `work` on this machine until it is done or the user presses Ctrl-C. This function must run the rest of a command that has
/// waited for Ctrl-C before, because from then on the signal no longer ends the program.
///
/// # Errors
/// Returns [`CliError::Interrupted`] on Ctrl-C, with the message.
pub async fn stoppable<T>(message: &str, work: impl Future<Output = Result<T, CliError>>) -> Result<T, CliError> {
    until_interrupted(|| message.to_owned(), work).await
}

async fn until_interrupted<T>(
    message: impl FnOnce() -> String,
    work: impl Future<Output = Result<T, CliError>>,
) -> Result<T, CliError> {
    tokio::select! {
        done = work => done,
        pressed = tokio::signal::ctrl_c() => {
            pressed.map_err(CliError::local("listen for the signal of Ctrl-C"))?;
            Err(CliError::Interrupted(message()))
        }
    }
}

/// Runs `work` with a time limit; `None` means no limit.
///
/// # Errors
/// Returns [`CliError::Timeout`] at the limit, or the error of `work`.
pub async fn within<T>(
    limit: Option<Duration>,
    work: impl Future<Output = Result<T, CliError>>,
) -> Result<T, CliError> {
    let Some(limit) = limit else { return work.await };
    let over = |_| {
        CliError::Timeout(format!(
            "the command has not finished after {} (--timeout)",
            format_duration(limit.as_secs_f64())
        ))
    };
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
