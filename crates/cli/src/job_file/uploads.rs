//! Uploads the local files that a job names as datasets; files with the same content are uploaded once. Registers a local model
//! folder if the server runs on the same machine.

use std::path::Path;

use rlood_client::{Content, DatasetUpload};
use rlood_types::dataset::{Format, Reader, Recipe};
use rlood_types::digest::Sha256Digest;
use rlood_types::id::DatasetId;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use super::JobFile;
use crate::context::Context;
use crate::error::CliError;
use crate::files::{hash_of, read_pieces};
use crate::output::{clean, format_bytes, shown};
use crate::profiles;
use crate::target::is_loopback;

/// Fields of a job file that name datasets.
const DATASET_FIELDS: [&[&str]; 5] = [
    &["dataset"],
    &["eval", "dataset"],
    &["eval", "test_dataset"],
    &["eval", "guard", "dataset"],
    &["warm_up", "dataset"],
];
/// Field of a dataset in a job file that contains the path of a local file.
const FILE: &str = "file";
/// Fields of a dataset in a job file that say how the local file's rows are converted. The upload uses these fields, and the job
/// does not contain them.
const MAPPING_FIELDS: [&str; 3] = ["map", "limit", "seed"];
/// Name of the state file on this machine that records under which dataset id each local file was uploaded.
const CACHE: &str = "datasets.toml";
/// Maximum size of a local file whose rows are hashed to find an existing upload on the server. Larger files are
/// uploaded without this check.
const MAX_CANONICAL_BYTES: u64 = 1 << 30;

/// Uploads the local files that a job names and replaces them by dataset ids, and replaces a local model folder by the name under
/// which it is registered.
///
/// # Errors
/// Fails when a file is missing, or the server rejects it.
pub async fn replace_local_files(context: &Context, job: &mut JobFile) -> Result<(), CliError> {
    map_warm_up_file(&mut job.document);
    for field in DATASET_FIELDS {
        let mut document = std::mem::take(&mut job.document);
        let at = field.iter().try_fold(&mut document, |at, key| at.get_mut(*key));
        let replaced = match at {
            Some(Value::Array(sources)) => {
                let mut replaced = Ok(());
                for (index, source) in sources.iter_mut().enumerate() {
                    replaced =
                        replaced.and(replace(context, job, &format!("{}[{index}]", field.join(".")), source).await);
                }
                replaced
            }
            Some(source) => replace(context, job, &field.join("."), source).await,
            None => Ok(()),
        };
        job.document = document;
        replaced?;
    }
    register_folder(context, job).await
}

/// Moves the column mapping of a warm-up dataset into the upload of its file, because the server applies a mapping on upload and
/// may not find the prompts without one.
fn map_warm_up_file(document: &mut Value) {
    let Some(warm_up) = document.get_mut("warm_up").and_then(Value::as_object_mut) else { return };
    let file = match warm_up.get("dataset") {
        Some(Value::String(text)) if text.parse::<DatasetId>().is_err() => json!({FILE: text}),
        Some(Value::Object(fields)) if fields.contains_key(FILE) && !fields.contains_key("map") => json!(fields),
        _ => return,
    };
    if let Some(map) = warm_up.shift_remove("map") {
        warm_up.insert("dataset".to_owned(), file);
        warm_up["dataset"]["map"] = map;
    }
}

/// Uploads the local file that a dataset field of the job names, if it names one.
async fn replace(context: &Context, job: &JobFile, field: &str, source: &mut Value) -> Result<(), CliError> {
    let (file, mut rest) = match source {
        Value::String(text) if text.parse::<DatasetId>().is_ok() => {
            *source = json!({"id": text});
            return Ok(());
        }
        Value::String(text) => (text.clone(), Map::new()),
        Value::Object(fields) => match fields.get(FILE) {
            None => return Ok(()),
            Some(Value::String(file)) => (file.clone(), fields.clone()),
            Some(_) => return Err(CliError::Usage(format!("{field}.{FILE} must be the path of a file"))),
        },
        _ => return Ok(()),
    };
    let path = job.path(&file);
    if !path.is_file() {
        let advice = "a dataset of the Hub is {\"hub\": \"org/name\"}, an uploaded dataset {\"id\": \"ds_…\"}";
        return Err(CliError::Usage(format!("{field}: file {} not found; {advice}", path.display())));
    }
    rest.shift_remove(FILE);
    let mut mapping = Map::new();
    for key in MAPPING_FIELDS {
        if let Some(value) = rest.shift_remove(key) {
            mapping.insert(key.to_owned(), value);
        }
    }
    let mapping = match mapping.is_empty() {
        true => None,
        false => {
            let recipe = serde_json::from_value::<Recipe>(Value::Object(mapping));
            Some(recipe.map_err(|error| CliError::Usage(format!("{field}: {error}")))?)
        }
    };
    let id = upload_once(context, &path, None, mapping).await?;
    let mut replaced = Map::from_iter([("id".to_owned(), Value::String(id))]);
    replaced.extend(rest);
    *source = Value::Object(replaced);
    Ok(())
}

/// Returns the dataset id of a local file. Uploads the file unless the server has the same content already.
///
/// # Errors
/// Fails when the file cannot be read, or the server rejects it.
pub async fn upload_once(
    context: &Context,
    path: &Path,
    name: Option<&str>,
    mapping: Option<Recipe>,
) -> Result<String, CliError> {
    let unreadable = |error: std::io::Error| CliError::Usage(format!("cannot read {}: {error}", path.display()));
    let (hash, size_bytes) = hash_of(path).map_err(unreadable)?;
    let recipe = mapping.as_ref().map(|mapping| json!(mapping).to_string()).unwrap_or_default();
    let state_key = format!("{} {}", context.target.name(), Sha256Digest::of(format!("{hash} {recipe}")));
    let file = path.file_name().map_or_else(|| path.to_string_lossy(), |name| name.to_string_lossy()).into_owned();
    if let Some(id) = profiles::read_state(CACHE, &state_key) {
        match context.client.raw_get(&["datasets", &id]).send().await {
            Ok(_) => return report_existing(context, &file, id),
            // The recorded dataset no longer exists: it was deleted, or the server has a new data directory.
            Err(error) if matches!(error.status(), Some(403 | 404)) => {}
            Err(error) => return Err(error.into()),
        }
    }
    if mapping.is_none()
        && size_bytes <= MAX_CANONICAL_BYTES
        && let Some(sha256) = canonical_hash(path).map_err(unreadable)?
        && let Some(id) = find_by_hash(context, &sha256).await?
    {
        profiles::write_state(CACHE, &state_key, &id)?;
        return report_existing(context, &file, id);
    }
    context.out.note(format!("uploading {file} ({})", format_bytes(size_bytes)));
    let upload = upload_of(path, name.unwrap_or(&file), mapping);
    let answer = context.client.raw_post(&["datasets"]).upload(&upload).await?.send().await.inspect_err(|_| {
        context.out.note(format!("the server rejected the dataset {}:", path.display()));
    })?;
    let id = answer.value["id"].as_str().unwrap_or_default().to_owned();
    context.out.note(format!("uploaded the dataset {file} as {id}, {} rows", shown(&answer.value["num_rows"])));
    profiles::write_state(CACHE, &state_key, &id)?;
    Ok(id)
}

fn report_existing(context: &Context, file: &str, id: String) -> Result<String, CliError> {
    context.out.note(format!("the dataset {file} was uploaded before, as {id}"));
    Ok(id)
}

/// Prepares the upload of a local file. The media type follows from the file's name, because the content does
/// not identify every format.
pub fn upload_of(path: &Path, name: &str, mapping: Option<Recipe>) -> DatasetUpload {
    let media_type = match Format::of_file_name(&path.to_string_lossy()) {
        Some(Format::Csv) => "text/csv",
        Some(Format::Tsv) => "text/tab-separated-values",
        Some(Format::Json) => "application/json",
        Some(Format::Ndjson) => "application/x-ndjson",
        None => "application/octet-stream",
    };
    // The server accepts at most 200 characters in a dataset's name.
    let name = name.chars().take(200).collect();
    DatasetUpload { name: Some(name), media_type: media_type.to_owned(), rows: Content::from(path), mapping }
}

/// Returns the hash that the server computes for the rows of a local file; `None` when the file is not plain text
/// or has invalid rows.
fn canonical_hash(path: &Path) -> std::io::Result<Option<String>> {
    let Some(format) = Format::of_file_name(&path.to_string_lossy()) else { return Ok(None) };
    let (mut reader, mut hash, mut rows) = (Reader::new(format), Sha256::new(), Vec::new());
    read_pieces(path, |piece| {
        reader.push(piece, &mut rows);
        hash.update(&rows);
        rows.clear();
    })?;
    let summary = reader.finish(&mut rows);
    hash.update(&rows);
    Ok(summary.is_ok().then(|| Sha256Digest::from(hash).to_string()))
}

async fn find_by_hash(context: &Context, sha256: &str) -> Result<Option<String>, CliError> {
    let mut pages = context.client.raw_get(&["datasets"]).query("limit", 100).pages();
    while let Some(page) = pages.next_page().await? {
        if let Some(found) = page.data.iter().find(|dataset| dataset["sha256"].as_str() == Some(sha256)) {
            return Ok(found["id"].as_str().map(str::to_owned));
        }
    }
    Ok(None)
}

/// Registers a local model folder under the folder's name, and puts that name into the job.
async fn register_folder(context: &Context, job: &mut JobFile) -> Result<(), CliError> {
    let Some(given) = job.document["model"].as_str().filter(|model| model.starts_with(['.', '/'])) else {
        return Ok(());
    };
    let (path, given) = (job.path(given), clean(given));
    let folder = std::fs::canonicalize(&path).ok().filter(|folder| folder.is_dir());
    let folder = folder.ok_or_else(|| CliError::Usage(format!("model: folder {} not found", path.display())))?;
    if !is_loopback(&context.target.server) {
        return Err(CliError::Usage(format!(
            "model: '{given}' is a local folder, and model files are not uploaded: copy the folder to the server's machine, register it with `rlood models add NAME PATH`, and use that name in the job"
        )));
    }
    let name = folder.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let body = json!({"id": name, "source": folder});
    let answer = context.client.raw_post(&["models"]).body(&body).send().await?;
    context.out.note(format!("registered {given} as {}", shown(&answer.value["id"])));
    job.document["model"] = answer.value["id"].clone();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mapping_of_a_warm_up_moves_to_its_file() {
        let map = json!({"prompt": "question", "completion": "answer"});
        for (dataset, moves) in [
            (json!("rows.jsonl"), true),
            (json!({"file": "rows.jsonl", "limit": 5}), true),
            (json!({"file": "rows.jsonl", "map": {"prompt": "q"}}), false),
            (json!({"id": "ds_01jd0000000000000000000000"}), false),
            (json!("ds_01jd0000000000000000000000"), false),
        ] {
            let mut document = json!({"warm_up": {"dataset": dataset, "map": map, "steps": 3}});
            map_warm_up_file(&mut document);
            assert_eq!(document["warm_up"].get("map").is_none(), moves, "{dataset}");
            if moves {
                assert_eq!(
                    (&document["warm_up"]["dataset"]["file"], &document["warm_up"]["dataset"]["map"]),
                    (&json!("rows.jsonl"), &map)
                );
            }
        }
    }
}
