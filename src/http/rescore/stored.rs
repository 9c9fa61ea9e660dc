//! Loads a job's stored samples in the form that a reward receives.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use serde_json::{Map, Value};

use super::request::Wanted;
use crate::event::{Sample, SamplePhase};
use crate::http::AppState;
use crate::http::auth::Caller;
use crate::http::error::Problem;
use crate::http::heavy;
use crate::http::samples::search_slot;
use crate::id::{DatasetId, JobId};
use crate::rollout::RewardSample;
use crate::spec::Plan;
use crate::store::SampleQuery;
use crate::store::background::spawn_blocking;

/// Returns the newest matching samples that are found in time, oldest first, in whole groups. At most `limit` samples, but
/// at least one group.
pub(super) async fn newest_groups(
    state: &AppState,
    caller: &Caller,
    id: JobId,
    wanted: &Wanted,
) -> Result<Vec<Sample>, Problem> {
    let until = Instant::now() + wanted.wait;
    let _slot = search_slot(state, caller, &wanted.query).await?;
    let mut found: Vec<Sample> = Vec::new();
    let mut after = None;
    loop {
        let query = SampleQuery { after, limit: 500, until: Some(until), ..wanted.query.clone() };
        let reading = async { Ok(state.store.sample_page(id, &query).await?) };
        let page = heavy::unless_stopping(state, reading).await?;
        found.extend(page.data.into_iter().map(|row| row.sample));
        after = page.next;
        if after.is_none() || found.len() > wanted.limit || Instant::now() >= until {
            break;
        }
    }
    let key = |sample: &Sample| (sample.step, sample.group_id.clone());
    if found.len() > wanted.limit {
        let first = found.first().map(key);
        let cut = wanted.limit;
        // The group in which the sample limit is reached is left out, unless it is the only group.
        let broken = key(&found[cut]);
        if first.as_ref() == Some(&broken) {
            found.retain(|sample| Some(key(sample)) == first);
        } else {
            found.truncate(cut);
            while found.last().is_some_and(|last| key(last) == broken) {
                found.pop();
            }
        }
    }
    found.reverse();
    Ok(found)
}

/// Adds the columns and chat messages of the dataset's rows to stored samples, which contain only texts.
pub(super) async fn with_columns(
    state: &AppState,
    plan: &Plan,
    phase: SamplePhase,
    stored: &[Sample],
    warnings: &mut Vec<String>,
) -> Result<Vec<RewardSample>, Problem> {
    let dataset = match (phase, &plan.eval) {
        (SamplePhase::Eval, Some(eval)) => &eval.dataset,
        (SamplePhase::Train | SamplePhase::Eval, _) => &plan.dataset,
    };
    let rows = rows_of(state, dataset.id, stored).await?;
    if rows.is_none() {
        let detail =
            "the job's dataset was deleted: the reward gets the prompts as text, but no columns and no chat messages";
        warnings.push(detail.to_owned());
    }
    let rows = rows.unwrap_or_default();
    let mut group = 0;
    let samples = stored.iter().enumerate().map(|(index, sample)| {
        let new_group = index > 0 && stored[index - 1].group_id != sample.group_id;
        group += usize::from(new_group);
        let mut columns = row_number(sample).and_then(|row| rows.get(&row).cloned()).unwrap_or_default();
        let messages = columns.shift_remove(crate::dataset::PROMPT).filter(Value::is_array);
        RewardSample {
            sample_id: format!("s_{index}"),
            group_id: format!("g_{group}"),
            prompt_id: sample.prompt_id.clone(),
            source: row_number(sample).and_then(|row| dataset.source_of(row)).map(str::to_owned),
            prompt: sample.prompt.clone(),
            messages,
            completion: sample.completion.clone(),
            finish_reason: sample.finish_reason,
            num_tokens: sample.num_tokens,
            completion_ids: None,
            columns,
            episode: None,
        }
    });
    Ok(samples.collect())
}

fn row_number(sample: &Sample) -> Option<u64> {
    sample.prompt_id.strip_prefix("row_")?.parse().ok()
}

/// Returns the dataset rows that the samples came from; `None` if the dataset was deleted.
async fn rows_of(
    state: &AppState,
    dataset: DatasetId,
    stored: &[Sample],
) -> Result<Option<BTreeMap<u64, Map<String, Value>>>, Problem> {
    let wanted: BTreeSet<u64> = stored.iter().filter_map(row_number).collect();
    let path = state.files.dataset(dataset);
    let read = move || -> std::io::Result<Option<BTreeMap<u64, Map<String, Value>>>> {
        use std::io::BufRead;
        let file = match std::fs::File::open(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        let last = wanted.last().copied().unwrap_or_default();
        let mut rows = BTreeMap::new();
        for (line, number) in std::io::BufReader::new(file).lines().zip(0..=last) {
            if wanted.contains(&number)
                && let Ok(Value::Object(row)) = serde_json::from_str(&line?)
            {
                rows.insert(number, row);
            }
        }
        Ok(Some(rows))
    };
    spawn_blocking(read).await.map_err(Problem::internal)?.map_err(Problem::internal)
}
