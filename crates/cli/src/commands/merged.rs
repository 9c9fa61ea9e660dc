//! Converts a checkpoint on the server, merged into its base model or for llama.cpp, then downloads and verifies the result.

use std::path::{Path, PathBuf};
use std::time::Duration;

use rlood_types::protocol::FileEntry;
use serde_json::{Value, json};

use crate::context::Context;
use crate::error::CliError;
use crate::files::hash_of;
use crate::follow::{OutageRetry, interruptible, report_progress, stoppable, text};
use crate::listing::Listing;
use crate::names;
use crate::output::{clean_lines, format_bytes, shown};
use crate::transfer::{Staging, is_downloaded, with_bar};

/// Names of the precisions (dtypes) of an export; q8_0 is for llama.cpp only.
pub const DTYPES: [&str; 4] = ["float32", "float16", "bfloat16", "q8_0"];
/// How often the server is asked for the state of an export (the merge of a checkpoint).
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// The export to make.
#[derive(Debug, Clone, Copy)]
pub struct Wanted<'a> {
    /// The format's name in the API.
    pub format: &'a str,
    /// The precision; None = the server's default for the format.
    pub dtype: Option<&'a str>,
    /// The context length to write; None = the model's.
    pub context_length: Option<u64>,
}

/// Converts a checkpoint on the server and downloads the result. An existing export of the checkpoint is used again.
///
/// # Errors
/// Fails when the checkpoint does not exist, the server cannot merge it, or the download fails.
pub async fn pull(context: &Context, name: &str, wanted: Wanted<'_>, output: Option<&Path>) -> Result<u8, CliError> {
    let Wanted { format, dtype, context_length } = wanted;
    let checkpoint = names::checkpoint(context, name).await?;
    let (id, step, job) = (checkpoint.id.to_string(), checkpoint.step, checkpoint.job_id);
    context.out.note(format!("{id}: step {step} of {job}{}", if checkpoint.best { ", the best" } else { "" }));
    let export = match existing(context, &id, wanted).await? {
        Some(export) => export,
        None => {
            let mut body = json!({"format": format, "dtype": dtype});
            if let Some(length) = context_length {
                body["context_length"] = length.into();
            }
            context.client.raw_post(&["checkpoints", &id, "exports"]).body(&body).send().await?.value
        }
    };
    let export_id = text(&export, "id").to_owned();
    let again = format!("rlood export --{} {id}", format.replace('_', "-"));
    let (export, document) = interruptible(&again, finished(context, &export_id)).await?;
    if text(&export, "state") != "succeeded" {
        let error = &export["error"];
        let why = format!("{}: {}", shown(&error["code"]), clean_lines(text(error, "message")));
        return Err(CliError::Failed(format!("{export_id} {}: {why}", shown(&export["state"]))));
    }
    report_surviving_update(context, &export);
    let files = files_of(&export)?;
    let target =
        output.map_or_else(|| PathBuf::from(format!("{job}-step{step}-{}", format.replace('_', "-"))), Path::to_owned);
    stoppable("stopped; run the command again to continue", download(context, &export_id, files, &target)).await?;
    if context.out.json {
        context.out.json(&document)?;
    } else {
        context.out.line(target.display().to_string())?;
    }
    Ok(0)
}

/// Downloads the files of an export to a folder, unless the folder contains them already.
async fn download(context: &Context, export: &str, files: Vec<FileEntry>, target: &Path) -> Result<(), CliError> {
    let (folder, listed) = (target.to_owned(), files.clone());
    if on_thread(move || is_downloaded(&folder, &listed)).await?? {
        context.out.note("already downloaded");
        return Ok(());
    }
    let staging = Staging::beside(target, export)?;
    let total = files.iter().map(|file| file.size_bytes).sum();
    with_bar(context, total, &staging.path, fetch(context, export, &files, &staging.path)).await?;
    context.out.note(format!(
        "downloaded {} files, {}; all hashes match the server's list",
        files.len(),
        format_bytes(total)
    ));
    staging.publish(target)
}

/// Reads files on a thread of its own. A merged model is large, and Ctrl-C must stop the command while its files are hashed.
async fn on_thread<T: Send + 'static>(read: impl FnOnce() -> T + Send + 'static) -> Result<T, CliError> {
    let read = tokio::task::spawn_blocking(read).await;
    read.map_err(|error| CliError::Failed(format!("cannot read the downloaded files: {error}")))
}

/// Finds a queued, running or finished export of a checkpoint with the requested precision.
async fn existing(context: &Context, checkpoint: &str, wanted: Wanted<'_>) -> Result<Option<Value>, CliError> {
    let Wanted { format, dtype, context_length } = wanted;
    let listing = Listing::whole(context.client.raw_get(&["checkpoints", checkpoint, "exports"])).await?;
    let is_usable = |export: &Value| {
        text(export, "format") == format
            && context_length.is_none()
            // If no dtype is requested, the server chooses one, and returns an existing export if there is one.
            && dtype.is_some_and(|dtype| text(export, "dtype") == dtype)
            && matches!(text(export, "state"), "queued" | "running" | "succeeded")
    };
    Ok(listing.items.into_iter().find(is_usable))
}

/// Asks the server for the state of an export until the export has finished. Returns the export as JSON and as the response's text.
async fn finished(context: &Context, id: &str) -> Result<(Value, String), CliError> {
    let mut outage = OutageRetry::default();
    let mut last_line = String::new();
    loop {
        let answer = context.client.raw_get(&["exports", id]).send().await;
        let Some(answer) = outage.unwrap_or_wait(&context.out, answer).await? else { continue };
        match text(&answer.value, "state") {
            "queued" | "running" => report_progress(context, &answer.value, &mut last_line),
            _ => return Ok((answer.value, answer.text)),
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Reports how much of the adapter's weight update survived the rounding to the export's precision.
fn report_surviving_update(context: &Context, export: &Value) {
    if let (Some(fraction), Some(cosine)) =
        (export["survived"]["fraction"].as_f64(), export["survived"]["cosine"].as_f64())
    {
        let dtype = shown(&export["dtype"]);
        context.out.note(format!(
            "{:.1} % of the weight update survives rounding to {dtype}, cosine similarity {cosine:.3}",
            fraction * 100.0
        ));
    }
    if let Some(advice) = export["advice"].as_str() {
        context.out.note(clean_lines(advice));
    }
}

/// Reads the files of an export, and rejects a path that leaves the export's folder.
fn files_of(export: &Value) -> Result<Vec<FileEntry>, CliError> {
    let wrong = || {
        CliError::Failed(
            "the server's list of files cannot be read; the server may have a different version of rlood".to_owned(),
        )
    };
    let file = |file: &Value| {
        let name = file["name"].as_str().filter(|path| is_inside(path)).ok_or_else(wrong)?.to_owned();
        let sha256 = file["sha256"].as_str().and_then(|hash| hash.parse().ok()).ok_or_else(wrong)?;
        Ok(FileEntry { name, size_bytes: file["size_bytes"].as_u64().ok_or_else(wrong)?, sha256 })
    };
    export["files"].as_array().ok_or_else(wrong)?.iter().map(file).collect()
}

fn is_inside(path: &str) -> bool {
    use std::path::Component;
    !path.is_empty() && Path::new(path).components().all(|part| matches!(part, Component::Normal(_)))
}

async fn fetch(context: &Context, export: &str, files: &[FileEntry], folder: &Path) -> Result<(), CliError> {
    for file in files {
        let to = folder.join(&file.name);
        let path = to.clone();
        if on_thread(move || hash_of(&path)).await?.ok() == Some((file.sha256, file.size_bytes)) {
            continue;
        }
        if let Some(parent) = to.parent() {
            std::fs::create_dir_all(parent)
                .map_err(CliError::local(format!("create the folder {}", parent.display())))?;
        }
        let mut path = vec!["exports", export, "files"];
        path.extend(file.name.split('/'));
        context.client.raw_get(&path).download(&to, Some(file.sha256)).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_files_of_an_export_stay_inside_its_folder() {
        let hash = "0".repeat(64);
        let with = |name: &str| json!({"files": [{"name": name, "size_bytes": 3, "sha256": hash}]});
        assert_eq!(files_of(&with("a/model.safetensors")).unwrap()[0].size_bytes, 3);
        for path in ["", "/etc/passwd", "../x", "a/../../x", "./x"] {
            assert!(files_of(&with(path)).is_err(), "{path}");
        }
        assert!(files_of(&json!({})).is_err());
    }
}
