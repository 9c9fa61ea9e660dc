//! Sources of prompts: one dataset, or several that are mixed.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use super::check_records;
use super::foreign::advice;
use super::plan::SourcePlan;
use super::reader::{Field, FieldError, Reader};
use super::rewards::check_metric_name;
use crate::dataset::{PROMPT, Recipe, RecipeMap};
use crate::id::DatasetId;

/// Maximum number of sources per job.
const MAX_SOURCES: usize = 64;
/// Maximum weight of a source; the minimum weight is one divided by the maximum.
const MAX_WEIGHT: f64 = 1e9;
/// Fields that are read by the code that reads the whole dataset: the name of a source or dataset, and a source's weight.
const OUTER_FIELDS: [&str; 2] = ["name", "weight"];
/// Maximum length of a source's name; a default name is shorter, so that a number fits behind it.
const MAX_NAME_CHARS: usize = 64;
const MAX_DEFAULT_NAME_CHARS: usize = 60;
/// Maximum length of a dataset's display name.
const MAX_DISPLAY_NAME_CHARS: usize = 200;

/// The source of a job's prompts.
#[derive(Debug, Clone, PartialEq)]
pub enum DatasetSource {
    /// A dataset that was uploaded before.
    Id(DatasetId),
    /// Rows that were sent with the job, one object per row.
    Records(Vec<Value>),
    /// A dataset of the Hugging Face Hub, downloaded and mapped when the job is accepted.
    Hub(Box<HubDataset>),
    /// Rows of an uploaded dataset or of the job, which are mapped when the job is accepted.
    Mapped(Box<MappedSource>),
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

/// Rows of an uploaded dataset or of the job, and how they are mapped.
#[derive(Debug, Clone, PartialEq)]
pub struct MappedSource {
    /// The rows: an uploaded dataset or records.
    pub source: DatasetSource,
    /// How the rows are mapped and sampled.
    pub recipe: Recipe,
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
    let source = read_source(field, false)?;
    let reader = field.object()?;
    let (name, weight) = (reader.field("name"), reader.field("weight"));
    if weight.value().is_some() {
        let detail = "the field 'weight' is only for one of several sources: give the dataset as a list";
        weight.fail("unknown_field", detail);
    }
    // Checked here; the server reads it from the document when it stores the rows.
    name.name(MAX_DISPLAY_NAME_CHARS);
    if name.value().is_some() && matches!(source, DatasetSource::Id(_) | DatasetSource::Joined(..)) {
        name.fail("conflict", "the stored dataset keeps its own name: leave the name out");
    }
    Some(source)
}

fn read_list(field: &Field<'_>) -> Option<DatasetSource> {
    let items = field.items()?;
    if !(1..=MAX_SOURCES).contains(&items.len()) {
        field.fail("out_of_range", format!("a list of datasets has 1 to {MAX_SOURCES} sources"));
        return None;
    }
    let defaults = default_names(&items.iter().map(Field::value).collect::<Vec<_>>());
    let mut names = BTreeSet::new();
    let read = |(item, default): (&Field<'_>, String)| {
        let reader = item.object()?;
        let (given, weight) = (reader.field("name"), reader.field("weight"));
        let name = match given.nonempty(MAX_NAME_CHARS) {
            Some(name) => {
                check_metric_name(&given, name);
                name.to_owned()
            }
            None => default,
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
        Some(MixedSource { name, weight, source: read_source(item, true) })
    };
    let sources: Vec<Option<MixedSource>> = items.iter().zip(defaults).map(read).collect();
    sources.into_iter().collect::<Option<Vec<_>>>().map(DatasetSource::Mixed)
}

/// Returns a default name for each source, different from all others: the repository's name for a hub dataset, with its
/// configuration, split and owner where sources are equal without them; otherwise the position in the list. Names are part
/// of metric names, so `-` separates their parts.
fn default_names(items: &[Option<&Value>]) -> Vec<String> {
    let text = |item: &Option<&Value>, key: &str| Some(item.as_ref()?.get(key)?.as_str()?.to_owned());
    let candidates = |(index, item): (usize, &Option<&Value>)| -> [String; 4] {
        let hub = text(item, "hub").unwrap_or_default();
        let id = hub.split('@').next().unwrap_or_default();
        let (owner, name) = id.rsplit_once('/').unwrap_or(("", id));
        let position = format!("source_{}", index + 1);
        let name = if name.is_empty() { position.as_str() } else { name };
        let (config, split) = (text(item, "config").unwrap_or_default(), text(item, "split").unwrap_or_default());
        let (config, split) = (config.as_str(), split.as_str());
        [
            joined(&[name]),
            joined(&[name, config]),
            joined(&[name, config, split]),
            joined(&[owner, name, config, split]),
        ]
    };
    let candidates: Vec<[String; 4]> = items.iter().enumerate().map(candidates).collect();
    let is_named = |index: usize| items.get(index).and_then(|item| text(item, "name")).is_some();
    let mut taken: BTreeSet<String> = items.iter().filter_map(|item| text(item, "name")).collect();
    let mut names = Vec::with_capacity(items.len());
    for (index, own) in candidates.iter().enumerate() {
        let others = candidates.iter().enumerate().filter(|(other, _)| *other != index && !is_named(*other));
        let others: Vec<&[String; 4]> = others.map(|(_, other)| other).collect();
        let is_unique = |level: usize, name: &String| others.iter().all(|other| other.get(level) != Some(name));
        let free = own.iter().enumerate().find(|(level, name)| !taken.contains(*name) && is_unique(*level, name));
        let numbered = |number: u64| own.first().map(|name| format!("{name}-{number}"));
        let name = match free {
            Some((_, name)) => name.clone(),
            // Equal in everything: the first keeps the name, the others get numbers.
            None => own
                .first()
                .cloned()
                .into_iter()
                .chain((2..).map_while(numbered))
                .find(|name| !taken.contains(name))
                .unwrap_or_default(),
        };
        if !is_named(index) {
            taken.insert(name.clone());
        }
        names.push(name);
    }
    names
}

/// Joins the parts of a default name that are not empty, without characters that metric names cannot have.
fn joined(parts: &[&str]) -> String {
    let parts: Vec<&str> = parts.iter().copied().filter(|part| !part.is_empty()).collect();
    let allowed = |c: char| if c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.') { c } else { '_' };
    parts.join("-").chars().map(allowed).take(MAX_DEFAULT_NAME_CHARS).collect()
}

/// Reads one dataset, which may be one of a list.
fn read_source(field: &Field<'_>, is_in_list: bool) -> Option<DatasetSource> {
    if field.value().is_some_and(|value| value.get("hub").is_some()) {
        return read_hub_dataset(field);
    }
    let reader = field.object()?;
    OUTER_FIELDS.iter().for_each(|name| drop(reader.field(name)));
    let id = reader.field("id");
    let joined = reader.field("sources");
    if id.value().is_none() && joined.value().is_some() {
        joined.fail("conflict", "sources belong to a stored dataset: give its id too");
    }
    let records = reader.field("records");
    let recipe = read_recipe(&reader);
    let source = match (id.value(), records.value()) {
        (Some(_), Some(_)) => {
            field.fail("conflict", "give either an id or records, not both");
            None
        }
        (Some(_), None) => id.string(64).and_then(|text| match text.parse() {
            Ok(id) => match joined.value() {
                None => Some(DatasetSource::Id(id)),
                Some(_) if is_in_list => {
                    joined.fail("conflict", "a source of a list cannot have sources of its own");
                    None
                }
                Some(_) if recipe.as_ref().is_some_and(|recipe| !recipe.is_plain()) => {
                    joined.fail(
                        "conflict",
                        "the rows of several sources cannot be mapped together: leave map, limit and seed out",
                    );
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
    reader.finish(|name, pointer| match name {
        "config" | "split" | "revision" => {
            Some(("unknown_field", format!("{name}: config, split and revision belong to {{\"hub\": …}}")))
        }
        _ => advice(name, pointer),
    });
    match (source?, recipe?) {
        (source, recipe) if recipe.is_plain() => Some(source),
        (source, recipe) => Some(DatasetSource::Mapped(Box::new(MappedSource { source, recipe }))),
    }
}

/// Reads how rows are mapped and sampled; `None` = rejected.
fn read_recipe(reader: &Reader<'_>) -> Option<Recipe> {
    let (map, limit, seed) = (reader.field("map"), reader.field("limit"), reader.field("seed"));
    let read = match map.value() {
        None => None,
        Some(value) => match serde_json::from_value::<RecipeMap>(value.clone()) {
            Ok(read) => Some(read),
            Err(error) => {
                map.fail(
                    "invalid_value",
                    format!("{error}: a map is {{\"prompt\": \"question\", \"columns\": {{…}}}}"),
                );
                return None;
            }
        },
    };
    let number = |field: &Field<'_>, range| field.value().map(|_| field.whole::<u64>(range));
    let (limit, seed) = (number(&limit, 1..=u64::MAX), number(&seed, 0..=u64::MAX));
    // A number that is given but rejected has been reported.
    if limit == Some(None) || seed == Some(None) {
        return None;
    }
    let recipe = Recipe { map: read, limit: limit.flatten(), seed: seed.flatten() };
    if let Err(error) = recipe.check() {
        let at = error.at.split('.').next().unwrap_or_default().to_owned();
        reader.entry(&at).fail("invalid_map", error.to_string());
        return None;
    }
    Some(recipe)
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
        OUTER_FIELDS.iter().for_each(|name| drop(object.shift_remove(*name)));
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

/// Returns the source that records belong to, and the JSON pointer to the records.
fn place_of<'s>(
    source: &'s mut DatasetSource,
    index: Option<usize>,
    at: &str,
) -> (Option<&'s mut DatasetSource>, String) {
    match (source, index) {
        (DatasetSource::Mixed(sources), Some(index)) => {
            (sources.get_mut(index).and_then(|mixed| mixed.source.as_mut()), format!("{at}/{index}/records"))
        }
        (source, _) => (Some(source), format!("{at}/records")),
    }
}

/// Converts records whose chat messages are in a column `messages` to rows with a prompt, unless a map turns them into rows.
pub(super) fn with_prompts(source: &mut DatasetSource, mut detached: Detached) -> Detached {
    for (index, records) in &mut detached {
        if matches!(place_of(source, *index, "").0, Some(DatasetSource::Mapped(_))) {
            continue;
        }
        let rows = records.iter_mut().filter_map(Value::as_object_mut);
        for row in rows.filter(|row| !row.contains_key(PROMPT) && row.get("messages").is_some_and(Value::is_array)) {
            if let Some(messages) = row.shift_remove("messages") {
                row.shift_insert(0, PROMPT.to_owned(), messages);
            }
        }
    }
    detached
}

/// Puts inline records that a map turns into rows back into their source. Checks only that there are some.
fn attach_unmapped(place: &mut DatasetSource, at: &str, records: Vec<Value>) -> Option<FieldError> {
    let is_empty = records.is_empty();
    if let DatasetSource::Records(rows) = place {
        *rows = records;
    }
    is_empty.then(|| FieldError::new(at, "empty_dataset", "the dataset is empty: give at least one row"))
}

/// Puts inline records back into their sources at the pointer `at`, and returns the records' errors. Records that a map turns
/// into rows are not checked as rows: those with a map of their own, and all if `is_mapped`.
pub(super) fn attach_records(
    source: &mut DatasetSource,
    at: &str,
    detached: Detached,
    is_mapped: bool,
) -> Vec<FieldError> {
    let mut errors = Vec::new();
    for (index, records) in detached {
        match place_of(source, index, at) {
            (Some(DatasetSource::Mapped(mapped)), at) => {
                errors.extend(attach_unmapped(&mut mapped.source, &at, records));
            }
            (Some(place @ DatasetSource::Records(_)), at) if is_mapped => {
                errors.extend(attach_unmapped(place, &at, records));
            }
            (Some(DatasetSource::Records(rows)), at) => {
                errors.extend(check_records(&records, &at));
                *rows = records;
            }
            _ => {}
        }
    }
    errors
}
