//! The requested warm-up, and its checks.

use serde::Deserialize;
use serde_json::Value;

use super::facts::{Context, DatasetFacts};
use super::foreign::advice;
use super::prompts::{image_column, image_detail};
use super::reader::{Field, FieldError, Reader};
use super::settings::WARM_UP;
use super::sources::{DatasetSource, read_dataset};
use super::{DatasetPlan, JobSpec, WarmUpPlan, WarmUpReference};
use crate::dataset::{Recipe, RecipeMap};

const AT: &str = "/warm_up/dataset";

/// A warm-up, as requested.
#[derive(Debug, Clone, Deserialize)]
pub struct WarmUpSpec {
    /// The rows to learn from; `None` = missing or rejected.
    #[serde(skip)]
    pub dataset: Option<DatasetSource>,
    /// Mapping of each row; `None` = rows are used unchanged.
    #[serde(skip)]
    pub map: Option<RecipeMap>,
    /// Number of optimizer steps.
    pub steps: u64,
    /// Number of rows per step.
    pub batch_size: u32,
    /// Learning rate; `None` = optimizer.learning_rate.
    pub learning_rate: Option<f64>,
    /// The reference model of the KL penalty.
    pub reference: WarmUpReference,
}

/// Reads the warm-up section of a job; `with_warm_start` = the job also has a warm start.
pub(super) fn read_warm_up(reader: Reader<'_>, with_warm_start: bool) -> Option<WarmUpSpec> {
    let map = read_map(&reader.field("map"));
    let field = reader.required(
        "dataset",
        "give the rows to learn from: {\"id\": \"ds_…\"}, {\"hub\": \"org/name\"} or {\"records\": [{\"messages\": […]}]}",
    );
    let (dataset, map) = match field.value() {
        None => (None, map),
        Some(_) => read_rows(&field, map, &reader.entry("map")),
    };
    let values = WARM_UP.read(&reader);
    if with_warm_start && values.is_default("reference") {
        let detail = "the job has a warm_start with its own reference: give \"base\" to keep that one, or \"warmed\" to measure against the weights at the end of the warm-up";
        reader.entry("reference").fail("required", detail);
    }
    reader.finish(advice);
    let warm_up: WarmUpSpec = values.into_section()?;
    Some(WarmUpSpec { dataset, map, ..warm_up })
}

fn read_map(field: &Field<'_>) -> Option<RecipeMap> {
    let value = field.value()?;
    let map: RecipeMap = match serde_json::from_value(value.clone()) {
        Ok(map) => map,
        Err(error) => {
            field.fail(
                "invalid_value",
                format!("{error}: a map is {{\"prompt\": \"question\", \"completion\": \"answer\"}}"),
            );
            return None;
        }
    };
    let recipe = Recipe { map: Some(map), ..Recipe::default() };
    if let Err(error) = recipe.check() {
        field.fail("invalid_map", error.to_string());
        return None;
    }
    recipe.map
}

/// Reads the rows and their map, which may be next to the dataset or inside it.
fn read_rows(
    field: &Field<'_>,
    map: Option<RecipeMap>,
    map_field: &Field<'_>,
) -> (Option<DatasetSource>, Option<RecipeMap>) {
    let mut dataset = read_dataset(field);
    let items = field.value().and_then(Value::as_array);
    let weighted = items.into_iter().flatten().position(|source| !source["weight"].is_null());
    if let Some(item) = weighted.and_then(|index| field.items()?.into_iter().nth(index)) {
        item.fail_at("weight", "unknown_field", "a warm-up uses every row equally often: leave the weight out");
    }
    let given = map.is_some();
    let own_map = match &mut dataset {
        Some(DatasetSource::Hub(hub)) => Some(&mut hub.map),
        Some(DatasetSource::Mapped(mapped)) => Some(&mut mapped.recipe.map),
        _ => None,
    };
    match own_map {
        Some(Some(_)) if given => {
            map_field
                .fail("conflict", "the dataset has its own map, and warm_up.map is given too: give one of the two");
        }
        Some(own) if given => *own = map.clone(),
        _ => {}
    }
    if given && matches!(dataset, Some(DatasetSource::Mixed(_) | DatasetSource::Joined(..))) {
        map_field.fail("conflict", "each of several datasets needs its own map: give the map inside of each");
    }
    let sources: Vec<&DatasetSource> = match &dataset {
        Some(DatasetSource::Mixed(sources)) => sources.iter().filter_map(|mixed| mixed.source.as_ref()).collect(),
        other => other.iter().collect(),
    };
    let maps = sources.into_iter().filter_map(|source| match source {
        DatasetSource::Hub(hub) => hub.map.as_ref(),
        DatasetSource::Mapped(mapped) => mapped.recipe.map.as_ref(),
        _ => None,
    });
    if maps.chain(&map).any(|map| map.cut_answer) {
        field.fail(
            "conflict",
            "cut_answer takes the assistant's last turn away, and a warm-up learns from it: leave it out",
        );
    }
    (dataset, map)
}

/// Checks the rows of a warm-up against the model.
pub(super) fn check(spec: &JobSpec, context: &Context, errors: &mut Vec<FieldError>) {
    let (Some(warm_up), Some(facts)) = (&spec.warm_up, &context.warm_up_dataset) else { return };
    if facts.num_rows == 0 && !matches!(warm_up.dataset, Some(DatasetSource::Records(_))) {
        errors.push(FieldError::new(AT, "empty_dataset", "the dataset is empty: it needs at least one row"));
    }
    if let Some(column) = image_column(facts.columns.iter().map(String::as_str)) {
        errors.push(FieldError::new(AT, "unsupported", image_detail(column)));
    }
    let Some(model) = &context.model else { return };
    if facts.has_chat_prompts && !model.has_chat_template {
        let detail = format!(
            "the rows are chat messages, but model '{}' has no chat template: give prompt and completion as strings, or add chat_template.jinja to the model",
            model.id
        );
        errors.push(FieldError::new(AT, "no_chat_template", detail));
    }
    let limit = model.max_position_embeddings;
    if let Some(lengths) = facts.prompt_lengths.filter(|lengths| lengths.longest > limit) {
        let detail = format!(
            "{} rows are longer than the {limit} tokens that the model reads; the longest (row {}) has {}, including the answer: shorten or remove them (rows are never truncated)",
            lengths.too_long, lengths.longest_row, lengths.longest
        );
        errors.push(FieldError::new(AT, "row_too_long", detail));
    }
}

/// Returns the resolved warm-up; `None` = no warm-up was requested.
pub(super) fn plan(spec: &JobSpec, facts: &DatasetFacts, dataset: DatasetPlan) -> Option<WarmUpPlan> {
    let warm_up = spec.warm_up.as_ref()?;
    Some(WarmUpPlan {
        dataset,
        steps: warm_up.steps,
        batch_size: warm_up.batch_size,
        learning_rate: warm_up.learning_rate.unwrap_or(spec.optimizer.learning_rate),
        reference: warm_up.reference,
        longest_row_tokens: facts.prompt_lengths.map(|lengths| lengths.longest),
    })
}
