//! Runs queued pushes of checkpoints to the hub.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::super::AppState;
use super::super::models::hub::build;
use super::super::tasks::{self, Work};
use super::facts::{Base, facts};
use super::failure::{Failure, failure, internal};
use super::{Stored, TokenOf, card, repo_of};
use crate::error_text::with_causes;
use crate::export::{ExportError, ExportResult};
use crate::hub::{Hub, HubError, Progress, Push as HubPush, PushContent, PushFile, Pushed};
use crate::protocol::FileEntry;
use crate::push::{PushFormat, PushResult};
use crate::store::{CheckpointRow, StoreError, TaskEnd, TaskKind, TaskRow};
use crate::task::TaskState;

/// Maximum number of concurrent pushes.
const MAX_CONCURRENT: usize = 2;
/// Interval at which the progress of an upload is stored.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(500);
/// Interval at which the export that a push waits for is checked even without a notification.
const POLL_INTERVAL: Duration = Duration::from_secs(10);
/// Retries of a push while the hub cannot be reached: delay, and the time after which the push fails.
const RETRY_DELAY: Duration = Duration::from_secs(10);
const GIVE_UP_AFTER: Duration = Duration::from_secs(600);

const CARD: &str = "README.md";
const ADAPTER_CONFIG: &str = "adapter_config.json";
const ADAPTER_WEIGHTS: &str = "adapter_model.safetensors";

/// Runs queued pushes of checkpoints until the server stops.
pub(crate) async fn run(state: AppState) {
    let runners = (0..MAX_CONCURRENT).map(|_| tasks::run(state.clone(), Pushing));
    futures::future::join_all(runners).await;
}

struct Pushing;

impl Work for Pushing {
    const KIND: TaskKind = TaskKind::Push;

    async fn run(&self, state: &AppState, row: &TaskRow) -> Result<Option<TaskEnd>, StoreError> {
        match push(state, row).await {
            Ok(Pushed { commit, url, is_new }) => {
                Ok(Some(TaskEnd::Succeeded(json!(PushResult { commit, url, is_new }), None)))
            }
            Err(Failure::Store(error)) => Err(error),
            Err(Failure::Push(error)) => Ok(Some(TaskEnd::Failed(json!(error)))),
        }
    }
}

async fn push(state: &AppState, row: &TaskRow) -> Result<Pushed, Failure> {
    let stored = Stored::of(row).map_err(|problem| internal(problem.detail()))?;
    let token = match stored.token_of {
        TokenOf::Request => state.push_tokens.take(&row.id).ok_or_else(|| {
            failure(
                "no_hub_token",
                "the server was restarted and does not store the token of a request: push again; what was uploaded is kept",
            )
        })?,
        TokenOf::Server => state.config.hub.environment.token.clone().ok_or_else(|| {
            failure("no_hub_token", "the server has no hub token any more: set HF_TOKEN, or push with x-hub-token")
        })?,
    };
    let hub = build(state, Some(token)).await.map_err(|problem| failure("hub_unreachable", problem.detail()))?;
    let checkpoint = state.store.checkpoint_get(row.checkpoint).await?;
    let facts = facts(state, &stored, &checkpoint).await?;
    let (mut files, export) = match stored.export {
        None => (adapter_files(state, &checkpoint, &facts.base).await?, None),
        Some(export) => {
            let export = exported(state, &export.to_string()).await?;
            let (files, result) = export_files(state, &export)?;
            (files, Some(result))
        }
    };
    if stored.request.card {
        let text = card::card(&facts, export.as_ref());
        files.push(PushFile { path: CARD.to_owned(), content: PushContent::Bytes(text.into_bytes()) });
    }
    let push = HubPush {
        repo: repo_of(&stored.request).map_err(|(_, why)| internal(&why))?,
        is_private: stored.request.private,
        message: format!("Step {} of {}, trained with rlood", row.step, facts.job_name()),
        files,
        is_stale: match stored.format {
            PushFormat::Adapter => |_| false,
            PushFormat::Merged => is_weight_file,
        },
        is_foreign: match stored.format {
            PushFormat::Adapter => is_weight_file,
            PushFormat::Merged => |path| matches!(path, ADAPTER_CONFIG | ADAPTER_WEIGHTS),
        },
    };
    upload(state, row, &hub, &push).await
}

/// Returns whether a file has weights of a complete model, whole or as `model-00001-of-00002.safetensors`, or is their index.
fn is_weight_file(path: &str) -> bool {
    let is_number = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    let shard = path.strip_prefix("model-").and_then(|rest| rest.strip_suffix(".safetensors")?.split_once("-of-"));
    matches!(path, "model.safetensors" | "model.safetensors.index.json")
        || shard.is_some_and(|(number, count)| is_number(number) && is_number(count))
}

/// Uploads the files, and stores the progress meanwhile. Errors that may pass are retried for some minutes.
async fn upload(state: &AppState, row: &TaskRow, hub: &Hub, push: &HubPush) -> Result<Pushed, Failure> {
    let (begun, progress, total) = (Instant::now(), Progress::default(), push.total_bytes());
    loop {
        let mut uploading = std::pin::pin!(hub.push(push, &progress));
        let pushed = loop {
            tokio::select! {
                pushed = &mut uploading => break pushed,
                () = tokio::time::sleep(PROGRESS_INTERVAL) => {}
            }
            let done = progress.done_bytes().min(total);
            state.store.task_progress(&row.id, row.attempt, done, total).await?;
        };
        match pushed {
            Ok(pushed) => {
                state.store.task_progress(&row.id, row.attempt, total, total).await?;
                return Ok(pushed);
            }
            Err(error) if error.is_transient() && begun.elapsed() < GIVE_UP_AFTER => {
                let error = with_causes(&error);
                tracing::warn!(push = row.id, error, "a push failed temporarily; the server will retry it");
                tokio::time::sleep(RETRY_DELAY).await;
            }
            Err(error) => return Err(refused(&error)),
        }
    }
}

fn refused(error: &HubError) -> Failure {
    let code = match error {
        error if error.is_transient() => "hub_unreachable",
        HubError::BadToken => "bad_token",
        HubError::MayNotWrite { .. } => "may_not_write",
        HubError::NoRoom { .. } => "no_room",
        HubError::OtherContent { .. } => "other_content",
        HubError::Public { .. } => "public",
        HubError::Changed { .. } | HubError::Disk { .. } => "removed",
        _ => "hub_refused",
    };
    match error {
        // The path on the server is not shown, because not every caller may see it.
        HubError::Disk { .. } => {
            tracing::warn!(error = with_causes(error), "a file of a push cannot be read");
            failure(code, "a file of the checkpoint or the export was removed in the meantime: push again")
        }
        error if error.is_transient() => {
            failure(code, format!("{error}; push again to continue: what was uploaded is kept"))
        }
        error => failure(code, error.to_string()),
    }
}

/// The adapter's files. Its config names the base model as the hub does.
async fn adapter_files(state: &AppState, checkpoint: &CheckpointRow, base: &Base) -> Result<Vec<PushFile>, Failure> {
    let mut files = Vec::new();
    for name in [ADAPTER_CONFIG, ADAPTER_WEIGHTS] {
        let entry = checkpoint.files.iter().find(|file| file.name == name);
        let entry = entry.ok_or_else(|| internal(&format!("the checkpoint has no {name}")))?;
        let CheckpointRow { job, step, attempt, .. } = *checkpoint;
        let path = state.files.checkpoint_file(job, step, attempt, name);
        let path = path.map_err(|error| internal(&with_causes(&error)))?;
        let FileEntry { size_bytes, sha256, .. } = *entry;
        let mut content = PushContent::File { path: path.clone(), size_bytes, sha256 };
        if name == ADAPTER_CONFIG {
            let bytes = tokio::fs::read(&path).await.map_err(|error| internal(&error.to_string()))?;
            let renamed = with_base(&bytes, base).map_err(|error| internal(&error.to_string()))?;
            if let Some(bytes) = renamed {
                content = PushContent::Bytes(bytes);
            }
        }
        files.push(PushFile { path: name.to_owned(), content });
    }
    Ok(files)
}

/// Returns the adapter's config with the base model's name in it; `None` if it has that name already.
fn with_base(config: &[u8], base: &Base) -> serde_json::Result<Option<Vec<u8>>> {
    let mut config: Value = serde_json::from_slice(config)?;
    let name = &mut config["base_model_name_or_path"];
    if *name == base.name.as_str() {
        return Ok(None);
    }
    *name = base.name.clone().into();
    Ok(Some(format!("{config:#}\n").into_bytes()))
}

/// Waits until the export that the push needs is complete.
async fn exported(state: &AppState, id: &str) -> Result<TaskRow, Failure> {
    let mut changed = state.store.tasks_changed();
    loop {
        changed.mark_unchanged();
        let export = state.store.task_get(TaskKind::Export, id).await?;
        match export.state {
            TaskState::Succeeded => return Ok(export),
            TaskState::Cancelled => {
                return Err(failure("export_cancelled", format!("the export {id} was cancelled: push again")));
            }
            TaskState::Failed => {
                let error = export.error.and_then(|error| serde_json::from_value::<ExportError>(error).ok());
                let ExportError { code, message } =
                    error.ok_or_else(|| internal(&format!("the export {id} failed without an error")))?;
                return Err(failure(&code, message));
            }
            TaskState::Queued | TaskState::Running => {}
        }
        let _ = tokio::time::timeout(POLL_INTERVAL, changed.changed()).await;
    }
}

/// The files of a complete export, and its result.
fn export_files(state: &AppState, export: &TaskRow) -> Result<(Vec<PushFile>, ExportResult), Failure> {
    let result = export.result.clone().map(serde_json::from_value::<ExportResult>);
    let result =
        result.and_then(Result::ok).ok_or_else(|| internal("the stored result of an export cannot be read"))?;
    let file = |FileEntry { name, size_bytes, sha256 }: &FileEntry| {
        let path = state.files.export_file(&export.id, name).map_err(|error| internal(&with_causes(&error)))?;
        Ok(PushFile {
            path: name.clone(),
            content: PushContent::File { path, size_bytes: *size_bytes, sha256: *sha256 },
        })
    };
    let files = result.files.iter().map(file).collect::<Result<_, Failure>>()?;
    Ok((files, result))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_names_of_a_merged_model_are_its_weights() {
        for path in ["model.safetensors", "model.safetensors.index.json", "model-00001-of-00002.safetensors"] {
            assert!(is_weight_file(path), "{path}");
        }
        for path in
            ["adapter_model.safetensors", "model-fp8.safetensors", "model-1-of-2.safetensors", "a/model.safetensors"]
        {
            assert!(!is_weight_file(path), "{path}");
        }
    }

    #[test]
    fn the_config_names_the_base_model_as_the_hub_does_and_keeps_the_rest() {
        let config = "{\n  \"r\": 8,\n  \"base_model_name_or_path\": \"/srv/models/x\",\n  \"bias\": \"none\"\n}\n";
        let base = |name: &str| Base { name: name.to_owned(), commit: None };
        let renamed = with_base(config.as_bytes(), &base("org/x")).unwrap().unwrap();
        assert_eq!(String::from_utf8(renamed).unwrap(), config.replace("/srv/models/x", "org/x"));
        assert_eq!(with_base(config.as_bytes(), &base("/srv/models/x")).unwrap(), None);
        assert!(with_base(b"no json", &base("org/x")).is_err());
    }
}
