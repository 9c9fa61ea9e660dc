//! The mapping (`map`) from the columns of source rows to the fields of dataset rows.

use rlood_types::dataset::{COMPLETION, InvalidRecipe, PROMPT, RecipeMap, RowError, RowPlace, presets};
use rlood_types::spec::SampleTemplate;
use serde_json::{Map, Value, json};
use std::cell::OnceCell;

use super::columns::{Row, column_of_path, find, kind, shorten, unknown};
use super::variables::{is_template, variables};

/// A compiled mapping, which converts source rows to dataset rows.
#[derive(Debug)]
pub struct Mapping {
    prompt: Option<Text>,
    system: Option<System>,
    chat: Option<bool>,
    chat_default: bool,
    columns: Vec<(String, Text)>,
    keep: Option<Vec<String>>,
    drop: Vec<String>,
    /// The source and the compiled expression of the filter `where`.
    condition: Option<(String, SampleTemplate)>,
    unique: Vec<String>,
    cut_answer: bool,
    /// Whether a column with chat messages, under a usual name such as `messages`, becomes the prompt if there
    /// is no column `prompt`.
    takes_chats: bool,
}

/// How the value of a dataset row's field is computed.
#[derive(Debug)]
enum Text {
    /// A column, or a path into one: the value is taken unchanged.
    Path(String),
    /// A template that reads the row's columns.
    Template { source: String, compiled: SampleTemplate },
}

#[derive(Debug)]
enum System {
    Literal(String),
    Template(Text),
}

/// The result of mapping a row.
#[derive(Debug, PartialEq)]
pub enum Mapped {
    /// The mapped row, and its key if `unique` needs one.
    Row(Value, Option<Vec<u8>>),
    /// The filter `where` drops the row.
    Left,
}

/// Names of columns that hold chat messages in most datasets.
const CHATS: [&str; 2] = ["messages", "conversations"];

impl Text {
    fn new(at: &str, text: &str) -> Result<Text, InvalidRecipe> {
        if !is_template(text) {
            return Ok(Text::Path(text.to_owned()));
        }
        let compiled = SampleTemplate::of_rows(text).map_err(|why| InvalidRecipe { at: at.to_owned(), detail: why })?;
        Ok(Text::Template { source: text.to_owned(), compiled })
    }

    fn value(&self, at: &str, row: &Row, variables: &Variables<'_>) -> Result<Value, RowError> {
        match self {
            Text::Path(path) => find(row, path).filter(|value| !value.is_null()).cloned().ok_or_else(|| {
                if find(row, path).is_some() {
                    return wrong("null", format!("{at}: '{}' is null", shorten(path)));
                }
                let known = row.contains_key(column_of_path(path));
                let why = match known {
                    true => {
                        format!("the path '{}' does not exist in the column '{}'", shorten(path), column_of_path(path))
                    }
                    false => unknown(column_of_path(path), row.keys().map(String::as_str)),
                };
                wrong("unknown_column", format!("{at}: {why}"))
            }),
            Text::Template { source, compiled } => {
                let text =
                    compiled.render(variables.get()).map_err(|why| failed("template_failed", at, source, &why, row))?;
                Ok(Value::String(text))
            }
        }
    }

    /// Returns the column's path, if the value is a plain column and not a template.
    fn column(&self) -> Option<&str> {
        match self {
            Text::Path(path) => Some(path),
            Text::Template { .. } => None,
        }
    }
}

/// Converts the error of a template or expression. If a column that it reads is missing or null, the error names that column.
fn failed(code: &'static str, at: &str, source: &str, why: &str, row: &Row) -> RowError {
    let read = variables(source);
    let missing = read.iter().find(|name| why.contains("undefined") && !row.contains_key(**name));
    let null = read.iter().find(|name| row.get(**name).is_some_and(Value::is_null));
    match (missing, null) {
        // The error of a value that is written does not tell null from undefined.
        (Some(name), _) if null.is_none() || !why.contains("null or undefined") => {
            wrong("unknown_column", format!("{at}: {}", unknown(name, row.keys().map(String::as_str))))
        }
        (_, Some(name)) if why.contains(SampleTemplate::NULL_IN_TEXT) => {
            let detail = format!("{at}: '{name}' is null: give it a default, such as {name} | default('', true)");
            wrong("null", detail)
        }
        (_, Some(name)) => wrong("null", format!("{at}: '{name}' is null")),
        _ => wrong(code, format!("{at}: {}", shorten(why))),
    }
}

fn wrong(code: &'static str, detail: String) -> RowError {
    RowError { place: RowPlace::File, code, detail }
}

impl Mapping {
    /// Compiles the settings of a mapping. Without settings, rows stay unchanged. `chat_default` says whether the model has a chat
    /// template, or is not known.
    ///
    /// # Errors
    /// Fails if a template does not compile, and names its field.
    pub fn new(map: &RecipeMap, chat_default: bool) -> Result<Mapping, InvalidRecipe> {
        let RecipeMap { prompt, completion, system, chat, columns, keep, drop, condition, unique, cut_answer } = map;
        let prompt = prompt.as_deref().map(|text| Text::new("map.prompt", text)).transpose()?;
        let system = match system.as_deref() {
            None => None,
            Some(text) if is_template(text) => Some(System::Template(Text::new("map.system", text)?)),
            Some(text) => Some(System::Literal(text.to_owned())),
        };
        let mut made = Vec::with_capacity(columns.len());
        for (name, text) in columns {
            let text = Text::new(&format!("map.columns.{name}"), text.as_str().unwrap_or_default())?;
            made.push((name.clone(), text));
        }
        if let Some(text) = completion {
            made.push((COMPLETION.to_owned(), Text::new("map.completion", text)?));
        }
        let condition = condition.as_ref().map(|text| match SampleTemplate::condition_of_rows(text) {
            Ok(compiled) => Ok((text.clone(), compiled)),
            Err(detail) => Err(InvalidRecipe { at: "map.where".to_owned(), detail }),
        });
        Ok(Mapping {
            prompt,
            system,
            chat: *chat,
            chat_default,
            columns: made,
            keep: keep.clone(),
            drop: drop.clone().unwrap_or_default(),
            condition: condition.transpose()?,
            unique: unique.as_ref().map(|unique| unique.columns().to_vec()).unwrap_or_default(),
            cut_answer: *cut_answer,
            takes_chats: false,
        })
    }

    /// Adapts the mapping to rows with answers: if neither the settings nor a column names the prompt, the row's
    /// chat is the prompt.
    pub fn with_chat_prompts(self) -> Mapping {
        Mapping { takes_chats: true, ..self }
    }

    /// Returns the name of the column with the row's chat messages, for rows without a column `prompt`.
    fn chat_column(&self, row: &Row) -> &'static str {
        let is_chat = |name: &&str| row.get(*name).is_some_and(Value::is_array);
        let chats = CHATS.iter().filter(|_| self.takes_chats && !row.contains_key(PROMPT));
        chats.copied().find(is_chat).unwrap_or(PROMPT)
    }

    /// Returns the source columns that the mapping needs. None means all, because other columns are kept or a template may
    /// read any of them.
    pub fn needed(&self) -> Option<Vec<String>> {
        let keep = self.keep.as_ref()?;
        let texts = self.prompt.iter().chain(self.columns.iter().map(|(_, text)| text));
        let mut needed: Vec<String> = Vec::new();
        for text in texts {
            needed.extend(columns_of_path(text.column()?));
        }
        let is_plain = self.condition.is_none() && !matches!(self.system, Some(System::Template(_)));
        needed.extend(keep.iter().cloned());
        needed.extend(self.unique.iter().flat_map(|path| columns_of_path(path)));
        needed.push(PROMPT.to_owned());
        if self.takes_chats {
            needed.extend(CHATS.map(str::to_owned));
        }
        is_plain.then_some(needed)
    }

    /// Returns the columns that the mapping drops (`drop`) and that no template reads, so that they need not be read from the file.
    pub fn unread(&self) -> &[String] {
        let texts = self.prompt.iter().chain(self.columns.iter().map(|(_, text)| text));
        let is_plain = texts.clone().all(|text| text.column().is_some())
            && self.condition.is_none()
            && self.unique.is_empty()
            && !matches!(self.system, Some(System::Template(_)));
        let is_read =
            texts.filter_map(Text::column).any(|path| self.drop.iter().any(|name| name == column_of_path(path)));
        if is_plain && !is_read { &self.drop } else { &[] }
    }

    /// Returns the columns that the mapping drops (`drop`).
    pub fn dropped(&self) -> &[String] {
        &self.drop
    }

    /// Returns the names in the settings `keep`, `drop` and `unique`, each with its setting. Each must be a column of some row.
    pub fn referenced_columns(&self) -> Vec<(&'static str, String)> {
        let kept = self.keep.iter().flatten().map(|name| ("map.keep", name.clone()));
        let dropped = self.drop.iter().map(|name| ("map.drop", name.clone()));
        kept.chain(dropped).filter(|(_, name)| !self.columns.iter().any(|(made, _)| made == name)).collect()
    }

    /// Maps a source row to a dataset row.
    ///
    /// # Errors
    /// Says what is wrong with the row, and names the setting of the mapping.
    pub fn apply(&self, row: Value) -> Result<Mapped, RowError> {
        let Value::Object(row) = row else {
            return Err(wrong("not_an_object", format!("a row must be a JSON object, not {}", kind(&row))));
        };
        let variables = Variables::of(&row);
        if let Some((source, condition)) = &self.condition {
            let holds = condition
                .value(variables.get())
                .map_err(|why| failed("condition_failed", "map.where", source, &why, &row))?;
            if !is_true(&holds) {
                return Ok(Mapped::Left);
            }
        }
        let prompt = self.make_prompt(&row, &variables)?;
        let mut made = Vec::with_capacity(self.columns.len());
        for (name, text) in &self.columns {
            let at = if name == COMPLETION { "map.completion".to_owned() } else { format!("map.columns.{name}") };
            let value = text.value(&at, &row, &variables)?;
            made.push((name, value));
        }
        drop(variables);
        let mut out = Map::with_capacity(row.len() + made.len() + 1);
        out.insert(PROMPT.to_owned(), prompt);
        let key = self.key(&row, &out, &made)?;
        // The chat column that became the prompt is not kept under its old name.
        let chat = if self.prompt.is_none() { self.chat_column(&row) } else { PROMPT };
        let stays = |name: &str| match &self.keep {
            Some(keep) => keep.iter().any(|kept| kept == name),
            None => !self.drop.iter().any(|dropped| dropped == name),
        };
        for (name, value) in row {
            if name != PROMPT && name != chat && stays(&name) {
                out.insert(name, value);
            }
        }
        for (name, value) in made {
            // A column that the mapping computes is kept even if `keep` does not list it.
            out.insert(name.clone(), value);
        }
        Ok(Mapped::Row(Value::Object(out), key))
    }

    fn make_prompt(&self, row: &Row, variables: &Variables<'_>) -> Result<Value, RowError> {
        let (value, column) = match &self.prompt {
            Some(text) => (text.value("map.prompt", row, variables)?, text.column()),
            None => {
                let value = row.get(self.chat_column(row)).cloned();
                (value.ok_or_else(|| wrong("missing_prompt", presets::advice(row)))?, Some(PROMPT))
            }
        };
        let system = match &self.system {
            None => None,
            Some(System::Literal(text)) => Some(Value::String(text.clone())),
            Some(System::Template(text)) => Some(text.value("map.system", row, variables)?),
        };
        let of_system = |text: Value| json!({"role": "system", "content": text});
        match value {
            Value::String(text) => {
                let default = self.chat_default && column != Some(PROMPT);
                if system.is_none() && !self.chat.unwrap_or(default) {
                    return Ok(Value::String(text));
                }
                let user = json!({"role": "user", "content": text});
                Ok(system.map(of_system).into_iter().chain([user]).collect())
            }
            Value::Array(messages) => {
                let mut messages: Vec<Value> = messages.into_iter().map(as_message).collect();
                while self.cut_answer && messages.last().is_some_and(|last| last["role"] == "assistant") {
                    messages.pop();
                }
                if let Some(system) = system.filter(|_| messages.first().is_none_or(|first| first["role"] != "system"))
                {
                    messages.insert(0, of_system(system));
                }
                Ok(Value::Array(messages))
            }
            Value::Null => Err(wrong("null", format!("map.prompt: '{}' is null", shorten(column.unwrap_or(PROMPT))))),
            other => Err(wrong(
                "invalid_prompt",
                format!("map.prompt: it must be a text or a list of chat messages, not a {}", kind(&other)),
            )),
        }
    }

    /// Computes the key by which `unique` compares rows. A name refers to a mapped column first, else to a source column.
    fn key(&self, row: &Row, out: &Map<String, Value>, made: &[(&String, Value)]) -> Result<Option<Vec<u8>>, RowError> {
        if self.unique.is_empty() {
            return Ok(None);
        }
        let mut key = Vec::new();
        for name in &self.unique {
            let mapped = made.iter().find(|(made, _)| *made == name).map(|(_, value)| value).or_else(|| out.get(name));
            let value = mapped.or_else(|| find(row, name)).ok_or_else(|| {
                wrong("unknown_column", format!("map.unique: {}", unknown(name, row.keys().map(String::as_str))))
            })?;
            // A line break separates the values of a key, since compact JSON contains none.
            key.extend_from_slice(value.to_string().as_bytes());
            key.push(b'\n');
        }
        Ok(Some(key))
    }
}

/// Returns the names of the columns that a path may lead into: `a`, `a.b` and `a.b.c` for `a.b.c`.
fn columns_of_path(path: &str) -> impl Iterator<Item = String> {
    let ends = path.match_indices('.').map(|(at, _)| at).chain([path.len()]);
    ends.filter_map(|end| path.get(..end)).map(str::to_owned)
}

/// The row, converted to the template engine's values when the first template needs them.
struct Variables<'r> {
    row: &'r Row,
    made: OnceCell<minijinja::Value>,
}

impl<'r> Variables<'r> {
    fn of(row: &'r Row) -> Self {
        Self { row, made: OnceCell::new() }
    }

    fn get(&self) -> &minijinja::Value {
        self.made.get_or_init(|| SampleTemplate::row_variables(self.row))
    }
}

/// Converts a chat message `{from, value}` (ShareGPT) to `{role, content}`; leaves anything else unchanged.
fn as_message(message: Value) -> Value {
    let Some((from, text)) = message.get("from").zip(message.get("value")) else { return message };
    let role = match from.as_str() {
        Some("human" | "user") => "user",
        Some("gpt" | "assistant" | "model" | "chatgpt" | "bing" | "bard") => "assistant",
        Some("system") => "system",
        Some(other) => other,
        None => return message,
    };
    json!({"role": role, "content": text})
}

/// Returns whether a template's `if` treats a JSON value as true.
fn is_true(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Bool(is) => *is,
        Value::Number(number) => number.as_f64() != Some(0.0),
        Value::String(text) => !text.is_empty(),
        Value::Array(items) => !items.is_empty(),
        Value::Object(fields) => !fields.is_empty(),
    }
}
