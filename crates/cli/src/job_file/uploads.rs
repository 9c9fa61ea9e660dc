//! Uploads the local files that a job names as datasets; files with the same content are uploaded once. Registers a local model
//! folder if the server runs on the same machine.

use std::io::Read;
use std::path::Path;

use rlood_client::{Content, DatasetUpload, RawAnswer};
use rlood_types::dataset::{Format, MAX_ROW_BYTES, PROMPT, Recipe, RowReader};
use rlood_types::id::DatasetId;
use serde_json::{Map, Value, json};

use super::JobFile;
use super::dry_run::DryRun;
use super::local_rows::{CACHE, LocalRows, unreadable};
use crate::context::Context;
use crate::error::CliError;
use crate::follow::text;
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

/// Number of bytes that are read at a time to find the first row of a file.
const FIRST_ROW_BYTES: usize = 64 << 10;
/// Status of the server's response if it created something, and not found it.
const CREATED: u16 = 201;
/// Columns that contain chat messages in most datasets. The server takes them as the prompt of a warm-up's rows.
const CHAT_COLUMNS: [&str; 2] = ["messages", "conversations"];

/// Uploads the local files that a job names and replaces them by dataset ids, and replaces a local model folder by the name under
/// which it is registered. A dry run replaces small files by their rows, and notes what has to be removed after it.
///
/// # Errors
/// Fails when a file is missing, or the server rejects it.
pub async fn replace_local_files(
    context: &Context,
    job: &mut JobFile,
    mut dry_run: Option<&mut DryRun>,
) -> Result<(), CliError> {
    map_warm_up_file(&mut job.document);
    for field in DATASET_FIELDS {
        let mut document = std::mem::take(&mut job.document);
        let at = field.iter().try_fold(&mut document, |at, key| at.get_mut(*key));
        let name = field.join(".");
        let replaced = match at {
            Some(Value::Array(sources)) => {
                let mut replaced = Ok(());
                for (index, source) in sources.iter_mut().enumerate() {
                    let name = format!("{name}[{index}]");
                    replaced = replaced.and(replace(context, job, &name, source, dry_run.as_deref_mut()).await);
                }
                replaced
            }
            Some(source) => replace(context, job, &name, source, dry_run.as_deref_mut()).await,
            None => Ok(()),
        };
        job.document = document;
        replaced?;
    }
    register_folder(context, job, dry_run).await
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
async fn replace(
    context: &Context,
    job: &JobFile,
    field: &str,
    source: &mut Value,
    dry_run: Option<&mut DryRun>,
) -> Result<(), CliError> {
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
    let mut mapping = match mapping.is_empty() {
        true => None,
        false => {
            let recipe = serde_json::from_value::<Recipe>(Value::Object(mapping));
            Some(recipe.map_err(|error| CliError::Usage(format!("{field}: {error}")))?)
        }
    };
    if field.starts_with("warm_up") {
        mapping = with_chat_prompt(&path, mapping).map_err(|error| unreadable(&path, &error))?;
    }
    let rows = LocalRows::open(context, &path, mapping)?;
    let uploaded = match dry_run {
        None => upload_once(context, &rows, None).await.map(|id| ("id", Value::String(id))),
        Some(dry_run) => rows_for_check(context, &rows, dry_run).await,
    };
    let (key, value) = uploaded.inspect_err(|_| {
        // The first row of a compressed file or a Parquet file is not read here.
        if field.starts_with("warm_up") && Format::of_file_name(&file).is_none() {
            context.out.note("if the chats are in a column such as messages, give {\"file\": …, \"map\": {\"prompt\": \"messages\"}}");
        }
    })?;
    let mut replaced = Map::from_iter([(key.to_owned(), value)]);
    replaced.extend(rest);
    *source = Value::Object(replaced);
    Ok(())
}

/// Adds to the mapping of a warm-up's file that the column with the chat messages is the prompt, if the first row has one and no
/// prompt. The server does the same with rows inside a job. Without this mapping it rejects the upload, because rows to sample
/// from need a prompt.
fn with_chat_prompt(path: &Path, mapping: Option<Recipe>) -> std::io::Result<Option<Recipe>> {
    let names_prompt = mapping.as_ref().and_then(|recipe| recipe.map.as_ref()).is_some_and(|map| map.prompt.is_some());
    let row = if names_prompt { None } else { first_row(path)? };
    let Some(Value::Object(row)) = row.filter(|row| row.get(PROMPT).is_none()) else { return Ok(mapping) };
    let is_chat = |name: &&str| row.get(*name).is_some_and(Value::is_array);
    let Some(chat) = CHAT_COLUMNS.into_iter().find(is_chat) else { return Ok(mapping) };
    let mut recipe = mapping.unwrap_or_default();
    let map = recipe.map.get_or_insert_default();
    map.prompt = Some(chat.to_owned());
    // The server does not keep these messages under their old name.
    match &mut map.keep {
        Some(keep) => keep.retain(|name| name != chat),
        None if map.columns.contains_key(chat) => {}
        None => {
            let drop = map.drop.get_or_insert_default();
            if !drop.iter().any(|name| name == chat) {
                drop.push(chat.to_owned());
            }
        }
    }
    Ok(Some(recipe))
}

/// Returns the first row of a file; `None` when the file is not plain text, is empty, or its first row is not valid.
fn first_row(path: &Path) -> std::io::Result<Option<Value>> {
    let Some(format) = Format::of_file_name(&path.to_string_lossy()) else { return Ok(None) };
    let mut rows = RowReader::new(format, MAX_ROW_BYTES);
    let (mut file, mut piece) = (std::fs::File::open(path)?, vec![0; FIRST_ROW_BYTES]);
    let mut first = None;
    while first.is_none() {
        let count = file.read(&mut piece)?;
        match count {
            0 => rows.finish(&mut |_, row| {
                first.get_or_insert(row);
            }),
            _ => rows.push(&piece[..count], &mut |_, row| {
                first.get_or_insert(row);
            }),
        }
        if count == 0 {
            break;
        }
    }
    Ok(first.and_then(Result::ok))
}

/// Returns the dataset id of a local file. Uploads the file unless the server has the same content already.
///
/// # Errors
/// Fails when the file cannot be read, or the server rejects it.
pub async fn upload_once(context: &Context, rows: &LocalRows, name: Option<&str>) -> Result<String, CliError> {
    if let Some(Known { id, is_recorded }) = find_uploaded(context, rows).await? {
        if !is_recorded {
            rows.record(context, &id);
        }
        return Ok(id);
    }
    let id = text(&upload(context, rows, name).await?.value, "id").to_owned();
    rows.record(context, &id);
    Ok(id)
}

/// Returns the field of a dataset in the job, and its value, with which a dry run checks the rows of a local file.
async fn rows_for_check(
    context: &Context,
    rows: &LocalRows,
    dry_run: &mut DryRun,
) -> Result<(&'static str, Value), CliError> {
    if let Some(Known { id, .. }) = find_uploaded(context, rows).await? {
        return Ok(("id", Value::String(id)));
    }
    if let Some(records) = dry_run.inline(rows).map_err(|error| unreadable(&rows.path, &error))? {
        return Ok(("records", Value::Array(records)));
    }
    let answer = upload(context, rows, None).await?;
    let id = text(&answer.value, "id");
    // With another status the server had the same rows before, which it finds only when it has converted them.
    if answer.status == CREATED {
        dry_run.uploaded(id);
    }
    Ok(("id", Value::String(id.to_owned())))
}

/// A dataset that the server has already.
struct Known {
    id: String,
    /// Whether the state file on this machine records it.
    is_recorded: bool,
}

async fn find_uploaded(context: &Context, rows: &LocalRows) -> Result<Option<Known>, CliError> {
    let mut known = None;
    if let Some(id) = profiles::read_state(CACHE, &rows.state_key) {
        match context.client.raw_get(&["datasets", &id]).send().await {
            Ok(_) => known = Some(Known { id, is_recorded: true }),
            // The recorded dataset no longer exists: it was deleted, or the server has a new data directory.
            Err(error) if matches!(error.status(), Some(403 | 404)) => {}
            Err(error) => return Err(error.into()),
        }
    }
    if known.is_none()
        && let Some(sha256) = rows.canonical_hash()?
    {
        let listed =
            context.client.raw_get(&["datasets"]).query("sha256", sha256).query("limit", 1).page(None).await?.0;
        known = listed.data.first().map(|dataset| Known { id: text(dataset, "id").to_owned(), is_recorded: false });
    }
    if let Some(Known { id, .. }) = &known {
        context.out.note(format!("the dataset {} was uploaded before, as {id}", rows.name));
    }
    Ok(known)
}

async fn upload(context: &Context, rows: &LocalRows, name: Option<&str>) -> Result<RawAnswer, CliError> {
    let LocalRows { path, name: file, size_bytes, state_key: _, mapping } = rows;
    context.out.note(format!("uploading {file} ({})", format_bytes(*size_bytes)));
    let upload = upload_of(path, name.unwrap_or(file), mapping.clone());
    let answer = context.client.raw_post(&["datasets"]).upload(&upload).await?.send().await.inspect_err(|_| {
        context.out.note(format!("the server rejected the dataset {}:", path.display()));
    })?;
    let id = shown(&answer.value["id"]);
    context.out.note(format!("uploaded the dataset {file} as {id}, {} rows", shown(&answer.value["num_rows"])));
    Ok(answer)
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

/// Registers a local model folder under the folder's name, and puts that name into the job.
async fn register_folder(context: &Context, job: &mut JobFile, dry_run: Option<&mut DryRun>) -> Result<(), CliError> {
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
    let id = text(&answer.value, "id");
    match dry_run {
        Some(dry_run) if answer.status == CREATED => dry_run.registered(id),
        Some(_) => {}
        None => context.out.note(format!("registered {given} as {}", clean(id))),
    }
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

    #[test]
    fn the_chat_of_a_warm_up_row_is_its_prompt() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        let recipe = |mapping: Value| serde_json::from_value::<Recipe>(mapping).unwrap();
        let chat = "[{\"role\": \"user\", \"content\": \"?\"}]";
        let messages = file("chat.jsonl", &format!("\n{{\"messages\": {chat}, \"n\": 1}}\n"));
        for (given, expected) in [
            (None, json!({"map": {"prompt": "messages", "drop": ["messages"]}})),
            (Some(json!({"limit": 3})), json!({"map": {"prompt": "messages", "drop": ["messages"]}, "limit": 3})),
            (
                Some(json!({"map": {"completion": "n"}})),
                json!({"map": {"prompt": "messages", "completion": "n", "drop": ["messages"]}}),
            ),
            (Some(json!({"map": {"keep": ["messages", "n"]}})), json!({"map": {"prompt": "messages", "keep": ["n"]}})),
            (Some(json!({"map": {"prompt": "n"}})), json!({"map": {"prompt": "n"}})),
        ] {
            let mapped = with_chat_prompt(&messages, given.clone().map(recipe)).unwrap();
            assert_eq!(mapped, Some(recipe(expected)), "{given:?}");
        }
        for (name, text) in [
            ("prompt.jsonl", format!("{{\"prompt\": \"?\", \"messages\": {chat}}}")),
            ("text.jsonl", "{\"messages\": \"?\"}".to_owned()),
            ("rows.csv", "messages\n[]\n".to_owned()),
            ("broken.jsonl", "{".to_owned()),
            ("empty.json", "[]".to_owned()),
            ("chat.parquet", format!("{{\"messages\": {chat}}}")),
        ] {
            assert_eq!(with_chat_prompt(&file(name, &text), None).unwrap(), None, "{name}");
        }
        let listed = file("chat.json", &format!("[{{\"conversations\": {chat}}}]"));
        let mapped = with_chat_prompt(&listed, None).unwrap().unwrap().map.unwrap();
        assert_eq!(mapped.prompt.as_deref(), Some("conversations"));
    }
}
