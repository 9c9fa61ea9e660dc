//! How rows of a source become rows of a dataset: which column is the prompt, what is computed, and what is kept.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

/// How source rows become rows of a dataset.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = DatasetRecipe)]
pub struct Recipe {
    /// Mapping of each row; null = rows are stored unchanged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub map: Option<Map>,
    /// Maximum number of rows: the first ones, or with `seed` a random sample; null = all rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    pub limit: Option<u64>,
    /// Seed of the random sample; null = the first rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
}

/// Mapping of a row. A value without `{{` is a column name, or a path into a column (`reward_model.ground_truth`,
/// `messages.0.content`); with `{{` it is a template over the row's columns.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = DatasetMap)]
pub struct Map {
    /// The prompt: a text, or a list of chat messages; null = the column `prompt`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "question")]
    pub prompt: Option<String>,
    /// System message that is put before the prompt; a template if it contains `{{`. Null = none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub system: Option<String>,
    /// Whether a text prompt becomes a user message; null = yes with `system`, and also if the prompt column is not named `prompt`
    /// and the model has a chat template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chat: Option<bool>,
    /// The answer that a warm-up learns from, stored in the column `completion`; null = none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "answer")]
    pub completion: Option<String>,
    /// New columns, as name → column, path or template.
    #[serde(default, skip_serializing_if = "serde_json::Map::is_empty")]
    #[schema(value_type = std::collections::BTreeMap<String, String>)]
    pub columns: serde_json::Map<String, Value>,
    /// Columns to keep in addition to the prompt; null = all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep: Option<Vec<String>>,
    /// Columns to remove; null = none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drop: Option<Vec<String>>,
    /// Filter expression over the source's columns; rows for which it is false are left out. Null = no filter.
    #[serde(default, rename = "where", skip_serializing_if = "Option::is_none")]
    #[schema(example = "ability == 'MATH'")]
    pub condition: Option<String>,
    /// Column or columns that must be unique. Of several rows with equal values, only the first is kept. Null = no deduplication.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unique: Option<Unique>,
    /// Whether to remove assistant messages at the end of a prompt.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub cut_answer: bool,
}

/// One column, or several.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum Unique {
    /// A single column name.
    Column(String),
    /// The names of several columns.
    Columns(Vec<String>),
}

impl Unique {
    /// Returns the column names.
    pub fn columns(&self) -> &[String] {
        match self {
            Unique::Column(name) => std::slice::from_ref(name),
            Unique::Columns(names) => names,
        }
    }
}

/// A recipe that is invalid for any rows.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{at}: {detail}")]
pub struct InvalidRecipe {
    /// Path of the invalid field, such as `map.columns.answer`.
    pub at: String,
    /// Explanation of the error, and how to fix it.
    pub detail: String,
}

impl Recipe {
    /// Whether the recipe stores rows unchanged.
    pub fn is_plain(&self) -> bool {
        *self == Recipe::default()
    }

    /// Reads the simple keys of a query string: prompt, completion, system, chat, where, unique, cut_answer, limit, seed, keep,
    /// drop (names separated by commas). Other keys are ignored.
    ///
    /// # Errors
    /// Fails for a value that is not valid for its key.
    pub fn from_query<'q>(pairs: impl IntoIterator<Item = (&'q str, &'q str)>) -> Result<Recipe, InvalidRecipe> {
        let wrong = |at: &str, detail: &str| InvalidRecipe { at: at.to_owned(), detail: detail.to_owned() };
        let number = |at: &str, text: &str| text.parse().map_err(|_| wrong(at, "it must be a whole number"));
        let flag = |at: &str, text: &str| text.parse().map_err(|_| wrong(at, "it must be true or false"));
        let names = |text: &str| text.split(',').map(|name| name.trim().to_owned()).collect::<Vec<String>>();
        let (mut recipe, mut map) = (Recipe::default(), Map::default());
        for (key, text) in pairs {
            match key {
                "limit" => recipe.limit = Some(number(key, text)?),
                "seed" => recipe.seed = Some(number(key, text)?),
                "prompt" => map.prompt = Some(text.to_owned()),
                "completion" => map.completion = Some(text.to_owned()),
                "system" => map.system = Some(text.to_owned()),
                "chat" => map.chat = Some(flag(key, text)?),
                "where" => map.condition = Some(text.to_owned()),
                "unique" => map.unique = Some(Unique::Columns(names(text))),
                "cut_answer" => map.cut_answer = flag(key, text)?,
                "keep" => map.keep = Some(names(text)),
                "drop" => map.drop = Some(names(text)),
                _ => {}
            }
        }
        recipe.map = (map != Map::default()).then_some(map);
        Ok(recipe)
    }

    /// Checks everything that does not depend on rows.
    ///
    /// # Errors
    /// Returns the first field that is invalid or contradicts another one.
    pub fn check(&self) -> Result<(), InvalidRecipe> {
        let wrong = |at: &str, detail: String| Err(InvalidRecipe { at: at.to_owned(), detail });
        if self.limit == Some(0) {
            return wrong("limit", "it must be at least 1".to_owned());
        }
        if self.seed.is_some() && self.limit.is_none() {
            return wrong("seed", "a seed selects which rows limit keeps: give limit as well".to_owned());
        }
        let Some(map) = &self.map else { return Ok(()) };
        if map.system.is_some() && map.chat == Some(false) {
            return wrong("map.chat", "with a system message the prompt is always a chat: leave chat out".to_owned());
        }
        if map.keep.is_some() && map.drop.is_some() {
            return wrong("map.drop", "give either keep or drop, not both".to_owned());
        }
        if map.unique.as_ref().is_some_and(|unique| unique.columns().is_empty()) {
            return wrong("map.unique", "this setting must name at least one column".to_owned());
        }
        for (at, text) in
            [("map.prompt", &map.prompt), ("map.completion", &map.completion), ("map.where", &map.condition)]
        {
            if text.as_ref().is_some_and(|text| text.trim().is_empty()) {
                return wrong(at, "it must not be empty".to_owned());
            }
        }
        if map.completion.is_some() && map.columns.contains_key(super::COMPLETION) {
            return wrong(
                "map.completion",
                "map.columns also creates a column completion: give either that one or map.completion".to_owned(),
            );
        }
        let dropped: BTreeSet<&str> = map.drop.iter().flatten().map(String::as_str).collect();
        for (name, value) in &map.columns {
            let at = format!("map.columns.{name}");
            if name.is_empty() || name == super::PROMPT {
                return wrong(&at, "a new column needs a name, and the prompt must be given as map.prompt".to_owned());
            }
            match value.as_str() {
                Some(text) if !text.trim().is_empty() => {}
                _ => return wrong(&at, "it must be the name of a column, or a template".to_owned()),
            }
            if dropped.contains(name.as_str()) {
                return wrong(
                    "map.drop",
                    format!("the column '{name}' is created by map.columns: remove the column there instead"),
                );
            }
        }
        Ok(())
    }
}
