//! Sources of prompts: one dataset, or several that are mixed.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use super::check_records;
use super::foreign::advice;
use super::plan::SourcePlan;
use super::reader::{Field, FieldError};
use super::rewards::check_metric_name;
use crate::dataset::{PROMPT, Recipe, RecipeMap};
use crate::id::DatasetId;

/// Maximum number of sources per job.
const MAX_SOURCES: usize = 64;
/// Maximum weight of a source; the minimum weight is one divided by the maximum.
const MAX_WEIGHT: f64 = 1e9;
/// Fields that only a source in a list of sources may have.
const LIST_ONLY_FIELDS: [&str; 2] = ["name", "weight"];

/// The source of a job's prompts.
#[derive(Debug, Clone, PartialEq)]
pub enum DatasetSource {
    /// A dataset that was uploaded before.
    Id(DatasetId),
    /// Rows that were sent with the job, one object per row.
    Records(Vec<Value>),
    /// A dataset of the Hugging Face Hub, downloaded and mapped when the job is accepted.
    Hub(Box<HubDataset>),
    /// Several sources that are mixed.
    Mixed(Vec<MixedSource>),
    /// An uploaded dataset whose rows are those of several sources, one source after another.
    Joined(DatasetId, Vec<SourcePlan>),
}

/// One of several sources.
#[derive(Debug, Clone, PartialEq)]
pub struct MixedSource {
    /// Name of the source, unique in the list.
    pub name: String,
    /// Weight relative to the other sources; `None` = its number of rows.
    pub weight: Option<f64>,
    /// The source itself; `None` = rejected.
    pub source: Option<DatasetSource>,
}

/// A dataset of the Hugging Face Hub, and how its rows are mapped.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct HubDataset {
    /// Repository on the Hugging Face Hub: `org/name`, or `org/name@revision`.
    #[schema(example = "openai/gsm8k")]
    pub hub: String,
    /// Branch, tag or commit; default: `main`. The server resolves it to a commit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revision: Option<String>,
    /// Configuration (subset); default: the default configuration, or the only one. Otherwise required.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "main")]
    pub config: Option<String>,
    /// Split; default: `train`, or the only split.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "train")]
    pub split: Option<String>,
    /// Mapping of each row; null = rows are stored unchanged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub map: Option<RecipeMap>,
    /// Maximum number of rows: the first ones, or with `seed` a random sample; null = all rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    pub limit: Option<u64>,
    /// Seed of the random sample; null = the first rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
}

impl HubDataset {
    /// Returns how the rows are mapped and sampled.
    pub fn recipe(&self) -> Recipe {
        Recipe { map: self.map.clone(), limit: self.limit, seed: self.seed }
    }
}

/// Reads one dataset, or a list of several.
pub(super) fn read_dataset(field: &Field<'_>) -> Option<DatasetSource> {
    if field.value().is_some_and(Value::is_array) {
        return read_list(field);
    }
    let source = read_source(field, &[])?;
    for name in LIST_ONLY_FIELDS.into_iter().filter(|name| field.value().is_some_and(|value| value.get(name).is_some()))
    {
        field.fail_at(
            name,
            "unknown_field",
            format!("the field '{name}' is only for one of several sources: give the dataset as a list"),
        );
    }
    Some(source)
}

fn read_list(field: &Field<'_>) -> Option<DatasetSource> {
    let items = field.items()?;
    if !(1..=MAX_SOURCES).contains(&items.len()) {
        field.fail("out_of_range", format!("a list of datasets has 1 to {MAX_SOURCES} sources"));
        return None;
    }
    let mut names = BTreeSet::new();
    let read = |(index, item): (usize, &Field<'_>)| {
        let reader = item.object()?;
        let (given, weight) = (reader.field("name"), reader.field("weight"));
        let name = match given.nonempty(64) {
            Some(name) => {
                check_metric_name(&given, name);
                name.to_owned()
            }
            None => default_name(item.value(), index),
        };
        if !names.insert(name.clone()) {
            item.fail_at(
                "name",
                "conflict",
                format!("another source is called '{name}' too: give this one a name of its own"),
            );
        }
        let range = "greater than 0 and at most 1000000000";
        let weight = weight.number(range, |weight| (1.0 / MAX_WEIGHT..=MAX_WEIGHT).contains(&weight));
        Some(MixedSource { name, weight, source: read_source(item, &LIST_ONLY_FIELDS) })
    };
    let sources: Vec<Option<MixedSource>> = items.iter().enumerate().map(read).collect();
    sources.into_iter().collect::<Option<Vec<_>>>().map(DatasetSource::Mixed)
}

/// Returns the default name of a source: the repository's name for a hub dataset, otherwise its position in the list.
fn default_name(source: Option<&Value>, index: usize) -> String {
    let hub = source.and_then(|source| source.get("hub")).and_then(Value::as_str);
    let name = hub.and_then(|hub| hub.split('@').next()?.rsplit('/').next());
    name.filter(|name| !name.is_empty()).map_or_else(|| format!("source_{}", index + 1), str::to_owned)
}

/// Reads one dataset; `known` are fields that the caller reads.
fn read_source(field: &Field<'_>, known: &[&'static str]) -> Option<DatasetSource> {
    if field.value().is_some_and(|value| value.get("hub").is_some()) {
        return read_hub_dataset(field);
    }
    let reader = field.object()?;
    known.iter().chain(&LIST_ONLY_FIELDS).for_each(|name| drop(reader.field(name)));
    let id = reader.field("id");
    let joined = reader.field("sources");
    if id.value().is_none() && joined.value().is_some() {
        joined.fail("conflict", "sources belong to a stored dataset: give its id too");
    }
    let records = reader.field("records");
    let source = match (id.value(), records.value()) {
        (Some(_), Some(_)) => {
            field.fail("conflict", "give either an id or records, not both");
            None
        }
        (Some(_), None) => id.string(64).and_then(|text| match text.parse() {
            Ok(id) => match joined.value() {
                None => Some(DatasetSource::Id(id)),
                Some(_) if !known.is_empty() => {
                    joined.fail("conflict", "a source of a list cannot have sources of its own");
                    None
                }
                Some(_) => read_joined(&joined).map(|sources| DatasetSource::Joined(id, sources)),
            },
            Err(error) => {
                id.fail("invalid_value", format!("{error}"));
                None
            }
        }),
        (None, Some(_)) => records.items().map(|_| DatasetSource::Records(Vec::new())),
        (None, None) => {
            field.fail(
                "required",
                "give the id of an uploaded dataset, records: a list of {\"prompt\": …}, or hub: a dataset of the Hugging Face Hub",
            );
            None
        }
    };
    let mapped = "map and the other row settings belong to {\"hub\": …}: an uploaded dataset is mapped when it is uploaded (POST /datasets with the part mapping), and records are rows already";
    reader.finish(|name, pointer| match name {
        "map" | "limit" | "seed" | "config" | "split" | "revision" => {
            Some(("unknown_field", format!("{name}: {mapped}")))
        }
        _ => advice(name, pointer),
    });
    source
}

/// Reads the sources of a joined dataset, in the form of a plan.
fn read_joined(field: &Field<'_>) -> Option<Vec<SourcePlan>> {
    let read = |item: &Field<'_>| {
        let reader = item.object()?;
        let (name, rows, weight) = (
            reader.required("name", "give the source's name"),
            reader.required("num_rows", "give the source's rows"),
            reader.required("weight", "give the source's weight"),
        );
        reader.finish(advice);
        let name = name.nonempty(64).inspect(|text| check_metric_name(&name, text))?.to_owned();
        let weight = weight.number("greater than 0", |weight| weight > 0.0 && weight.is_finite())?;
        Some(SourcePlan { name, num_rows: rows.whole(0..=u64::from(u32::MAX))?, weight })
    };
    let sources = field.items()?.iter().map(read).collect::<Option<Vec<SourcePlan>>>()?;
    let names: BTreeSet<&str> = sources.iter().map(|source| source.name.as_str()).collect();
    if sources.is_empty() || sources.len() > MAX_SOURCES || names.len() < sources.len() {
        field.fail("invalid_value", format!("a dataset has 1 to {MAX_SOURCES} sources, each with a name of its own"));
        return None;
    }
    Some(sources)
}

/// Reads `{"hub": …}` as a whole, because the same object is a separate request body elsewhere.
fn read_hub_dataset(field: &Field<'_>) -> Option<DatasetSource> {
    let mut value = field.value()?.clone();
    if let Some(object) = value.as_object_mut() {
        // The fields of a source list are read or rejected together with the list.
        LIST_ONLY_FIELDS.iter().for_each(|name| drop(object.shift_remove(*name)));
    }
    match serde_json::from_value::<HubDataset>(value) {
        Err(error) => {
            field.fail("invalid_value", format!("{error}: a dataset of the hub is {{\"hub\": \"org/name\", \"config\", \"split\", \"map\", \"limit\", \"seed\"}}"));
            None
        }
        Ok(hub) => match hub.recipe().check() {
            Err(error) => {
                field.fail("invalid_map", error.to_string());
                None
            }
            Ok(()) => Some(DatasetSource::Hub(Box::new(hub))),
        },
    }
}

/// Inline records, with the index of their source if the dataset has several sources.
pub(super) type Detached = Vec<(Option<usize>, Vec<Value>)>;

/// Moves inline records out of the document to avoid a copy; an empty list replaces them.
pub(super) fn detach_records(document: &mut Value, at: &str) -> Detached {
    let take = |source: &mut Value| Some(std::mem::take(source.get_mut("records")?.as_array_mut()?));
    match document.pointer_mut(at) {
        None => Vec::new(),
        Some(Value::Array(sources)) => {
            let taken = sources.iter_mut().enumerate().map(|(index, source)| Some((Some(index), take(source)?)));
            taken.flatten().collect()
        }
        Some(source) => take(source).map(|records| (None, records)).into_iter().collect(),
    }
}

/// Converts records whose chat messages are in a column `messages` to rows with a prompt.
pub(super) fn with_prompts(mut detached: Detached) -> Detached {
    let rows = detached.iter_mut().flat_map(|(_, records)| records).filter_map(Value::as_object_mut);
    for row in rows.filter(|row| !row.contains_key(PROMPT) && row.get("messages").is_some_and(Value::is_array)) {
        if let Some(messages) = row.shift_remove("messages") {
            row.shift_insert(0, PROMPT.to_owned(), messages);
        }
    }
    detached
}

/// Puts inline records back into their source, like [`attach_records`], for records that a map turns into rows. Checks only
/// that there are some.
pub(super) fn attach_unmapped(source: &mut DatasetSource, at: &str, detached: Detached) -> Vec<FieldError> {
    let mut errors = Vec::new();
    for (_, records) in detached {
        if records.is_empty() {
            errors.push(FieldError::new(
                format!("{at}/records"),
                "empty_dataset",
                "the dataset is empty: give at least one row",
            ));
        }
        if let DatasetSource::Records(rows) = source {
            *rows = records;
        }
    }
    errors
}

/// Puts inline records back into their sources at the pointer `at`, and returns the records' errors.
pub(super) fn attach_records(source: &mut DatasetSource, at: &str, detached: Detached) -> Vec<FieldError> {
    let mut errors = Vec::new();
    for (index, records) in detached {
        let (place, at) = match (&mut *source, index) {
            (DatasetSource::Mixed(sources), Some(index)) => {
                (sources.get_mut(index).and_then(|mixed| mixed.source.as_mut()), format!("{at}/{index}/records"))
            }
            (source, _) => (Some(source), format!("{at}/records")),
        };
        if let Some(DatasetSource::Records(rows)) = place {
            errors.extend(check_records(&records, &at));
            *rows = records;
        }
    }
    errors
}
