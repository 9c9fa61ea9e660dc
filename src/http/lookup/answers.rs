//! Loads the rows of a job's warm-up (supervised training before RLOO): found like prompts, mapped if the job has a mapping,
//! and checked for answers.

use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::Value;

use super::{
    AppState, Caller, Found, MAX_COUNTED_BYTES, MAX_COUNTED_ROWS, Model, UseOfHub, not_downloaded, renamed, text_bytes,
};
use crate::dataset::{Answered, COMPLETION, PROMPT, Recipe, answered};
use crate::http::error::{Problem, chain};
use crate::http::prompts::{Place, Prompts, files_of};
use crate::spec::{DatasetSource, FieldError, JobSpec, PromptLengths, Warning};

const AT: &str = "/warm_up/dataset";
/// Maximum number of invalid warm-up rows to report.
const MAX_FAILURES: usize = 5;

/// Loads the rows of the job's warm-up. Inline records are moved out of the job. Missing or invalid rows are errors of the job.
pub(super) async fn find(
    state: &AppState,
    caller: &Caller,
    spec: &mut JobSpec,
    (chat_default, use_of_hub): (bool, UseOfHub),
    errors: &mut Vec<FieldError>,
) -> Result<Option<Prompts>, Problem> {
    let Some(warm_up) = &mut spec.warm_up else { return Ok(None) };
    let map = warm_up.map.clone();
    // The rows of a source with a map of its own are already mapped when they are read.
    let is_mapped_later =
        map.is_some() && !matches!(warm_up.dataset, Some(DatasetSource::Hub(_) | DatasetSource::Mapped(_)));
    let place = Place { answers: true, ..Place::new(AT, chat_default, use_of_hub) };
    let found = Prompts::find(state, caller, warm_up.dataset.as_mut(), &place, errors).await?;
    let rows = match found {
        Some(rows) if is_mapped_later && !rows.facts.is_pending => rows,
        found => return Ok(found),
    };
    let recipe = Recipe { map, ..Recipe::default() };
    let files = files_of(state, rows).await;
    Prompts::of_files(state, files, recipe, &place, errors).await
}

/// Checks the answer of each warm-up row and counts its tokens, until `stop` is set. Blocking.
pub(super) fn measure(
    rows: &mut Prompts,
    model: &Model<'_>,
    stop: &AtomicBool,
    found: &mut Found<'_>,
) -> std::io::Result<()> {
    found.warnings.extend(rows.renamed.iter().map(|(at, name)| renamed(at, name)));
    if rows.facts.is_pending {
        found.warnings.push(not_downloaded(AT));
        return Ok(());
    }
    let Model { text, facts: model, kwargs } = *model;
    let mut count = rows.facts.num_rows <= MAX_COUNTED_ROWS;
    let (mut has_chat, mut lengths, mut failures) = (false, PromptLengths::default(), Vec::new());
    let (mut seen_rows, mut seen_bytes) = (0_u64, 0);
    rows.each_row(|number, mut row| {
        let prompt = row.shift_remove(PROMPT).unwrap_or(Value::Null);
        has_chat |= prompt.is_array();
        seen_rows += 1;
        seen_bytes += text_bytes(&prompt) + row.get(COMPLETION).map_or(0, text_bytes);
        count &= seen_bytes <= MAX_COUNTED_BYTES;
        if !count || stop.load(Ordering::Relaxed) {
            return false; // Only the first rows are checked here; the worker checks every row.
        }
        if !prompt.is_string() && !prompt.is_array() {
            return true; // Reported per row.
        }
        let row = match answered(&prompt, &row) {
            Ok(row) => row,
            Err((code, detail)) => {
                failures.push((code, format!("row {number}: {detail}")));
                return failures.len() < MAX_FAILURES;
            }
        };
        if matches!(row, Answered::Chat(_)) && !model.has_chat_template {
            return true; // Reported once for all rows.
        }
        match text.answered_ids(&row, kwargs) {
            Ok((prompt, answer)) => {
                let tokens = (prompt.len() + answer.len()) as u64;
                lengths.too_long += u64::from(tokens > model.max_position_embeddings);
                if tokens > lengths.longest {
                    (lengths.longest, lengths.longest_row) = (tokens, number);
                }
            }
            Err(error) => failures.push(("row_not_encodable", format!("row {number}: {}", chain(&error)))),
        }
        failures.len() < MAX_FAILURES
    })?;
    rows.facts.has_chat_prompts = has_chat;
    rows.facts.prompt_lengths = (count && failures.is_empty()).then_some(lengths);
    if !count {
        let detail = format!(
            "only the first {seen_rows} of {} rows were checked (the limit is {MAX_COUNTED_ROWS} rows or {} MiB): the worker \
             checks all of them when the job starts, and the job fails then if one has no answer or is too long",
            rows.facts.num_rows,
            MAX_COUNTED_BYTES >> 20
        );
        found.warnings.push(Warning { pointer: AT.to_owned(), code: "prompts_not_counted".to_owned(), detail });
    }
    found.errors.extend(failures.into_iter().map(|(code, detail)| FieldError::new(AT, code, detail)));
    Ok(())
}
