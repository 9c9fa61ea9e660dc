//! Reads a job file for `rlood submit`: the job's settings, the changes by `--set`, and the local files that the job names.

use std::io::Read;
use std::path::{Path, PathBuf};

use rlood_types::spec::format::Format;
use serde_json::{Map, Value};

use crate::error::CliError;

pub mod dry_run;
pub mod local_rows;
pub mod uploads;

/// Maximum size of a job file in bytes, so that a wrong file is not read completely.
const MAX_BYTES: u64 = 64 << 20;

/// The settings of a job as read from a file, and the folder of the file.
#[derive(Debug)]
pub struct JobFile {
    pub document: Value,
    /// Folder to which relative paths in the job file refer.
    pub folder: PathBuf,
}

impl JobFile {
    /// Reads a job file; `-` reads standard input.
    ///
    /// # Errors
    /// Fails when the job file cannot be read or is not valid JSON, YAML or TOML.
    pub fn read(path: &Path) -> Result<Self, CliError> {
        let is_stdin = path == Path::new("-");
        let shown = if is_stdin { "standard input".to_owned() } else { path.display().to_string() };
        let unreadable = |error: std::io::Error| CliError::Usage(format!("cannot read {shown}: {error}"));
        let mut bytes = Vec::new();
        if is_stdin {
            std::io::stdin().lock().take(MAX_BYTES + 1).read_to_end(&mut bytes).map_err(unreadable)?;
        } else {
            std::fs::File::open(path)
                .and_then(|file| file.take(MAX_BYTES + 1).read_to_end(&mut bytes))
                .map_err(unreadable)?;
        }
        if bytes.len() as u64 > MAX_BYTES {
            return Err(CliError::Usage(format!(
                "the job file {shown} is larger than {} MiB: move the rows to a separate file, and name that file in the job",
                MAX_BYTES >> 20
            )));
        }
        let text =
            String::from_utf8(bytes).map_err(|_| CliError::Usage(format!("the job file {shown} is not UTF-8")))?;
        let format = if is_stdin { format_of(&text) } else { Format::of_file_name(&path.to_string_lossy()) };
        let document = format.read(&text).map_err(|error| CliError::Usage(format!("{shown}: {error}")))?;
        let folder = if is_stdin { PathBuf::new() } else { path.parent().unwrap_or(Path::new("")).to_owned() };
        Ok(Self { document, folder })
    }

    /// Resolves a path that the job file contains.
    pub fn path(&self, given: &str) -> PathBuf {
        // `Path::join` returns an absolute path unchanged.
        self.folder.join(given)
    }
}

/// Detects the format of a job that is read from standard input. TOML is tried only if the text is not valid YAML; JSON is
/// a subset of YAML.
fn format_of(text: &str) -> Format {
    let is_object = |format: Format| format.read(text).is_ok_and(|document| document.is_object());
    if text.trim_start().starts_with('{') {
        Format::Json
    } else if !is_object(Format::Yaml) && is_object(Format::Toml) {
        Format::Toml
    } else {
        Format::Yaml
    }
}

/// One change of a job's settings by the flag `--set`.
#[derive(Debug, Clone, PartialEq)]
pub struct Setting {
    /// The value as given on the command line.
    text: String,
    path: Vec<Step>,
    value: Value,
}

/// One part of the path to a setting: a key or a list index.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Step {
    Key(String),
    Index(usize),
}

impl Setting {
    /// Parses a value of `--set`, such as `rloo.beta=0.01`, `rewards.0.weight=2`, `rewards[0].weight=2` or `name="7"`.
    ///
    /// # Errors
    /// Returns a message with the expected format.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (path, value) = text
            .split_once('=')
            .ok_or_else(|| format!("'{text}' has no '='; must be PATH=VALUE, for example rloo.beta=0.01"))?;
        let mut steps = Vec::new();
        for part in path.trim().split('.') {
            let (key, indexes) = part.split_at(part.find('[').unwrap_or(part.len()));
            if key.is_empty() && (indexes.is_empty() || steps.is_empty()) {
                return Err(format!("'{path}' is not a path; must be section and setting names separated by dots"));
            }
            if !key.is_empty() {
                steps.push(key.parse().map_or_else(|_| Step::Key(key.to_owned()), Step::Index));
            }
            for index in indexes.split_inclusive(']') {
                let index = index.strip_prefix('[').and_then(|index| index.strip_suffix(']')?.parse().ok());
                steps
                    .push(Step::Index(index.ok_or_else(|| {
                        format!("'{part}' in '{path}' is not a list index; must be like rewards[0]")
                    })?));
            }
        }
        Ok(Self { text: text.to_owned(), path: steps, value: typed(value) })
    }

    /// Changes the setting in a job. Missing sections are created; missing list items are not.
    ///
    /// # Errors
    /// Fails when the path leads through a value that has no fields, or to a list item that does not exist.
    pub fn apply(&self, document: &mut Value) -> Result<(), CliError> {
        let mut at = document;
        let mut passed = String::new();
        for step in &self.path {
            let refused = |what: String| CliError::Usage(format!("--set {}: {what}", self.text));
            let here = if passed.is_empty() { "the job".to_owned() } else { format!("'{passed}'") };
            if at.is_null() {
                *at = Value::Object(Map::new());
            }
            at = match (step, at) {
                (Step::Index(index), Value::Array(items)) => {
                    let count = items.len();
                    let last = match count {
                        0 => "the list in the job is empty".to_owned(),
                        _ => format!("the last item has the number {}", count - 1),
                    };
                    items.get_mut(*index).ok_or_else(|| refused(format!("{here} has no item {index}: {last}")))?
                }
                (Step::Key(key), Value::Object(fields)) => fields.entry(key.clone()).or_insert(Value::Null),
                // A number in the path may also be the key of an object, for example in `map`.
                (Step::Index(index), Value::Object(fields)) => fields.entry(index.to_string()).or_insert(Value::Null),
                (Step::Key(key), Value::Array(_)) => {
                    return Err(refused(format!("{here} is a list: '{key}' must be an item number, starting at 0")));
                }
                (_, Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Null) => {
                    return Err(refused(format!("{here} is a single value and contains no settings")));
                }
            };
            let separator = if passed.is_empty() { "" } else { "." };
            passed = match step {
                Step::Key(key) => format!("{passed}{separator}{key}"),
                Step::Index(index) => format!("{passed}{separator}{index}"),
            };
        }
        *at = self.value.clone();
        Ok(())
    }

    /// Returns whether the server's error at a JSON pointer is about the value that this `--set` changed.
    pub fn is_at(&self, pointer: &str) -> bool {
        let own: String = self
            .path
            .iter()
            .map(|step| match step {
                Step::Key(key) => format!("/{}", key.replace('~', "~0").replace('/', "~1")),
                Step::Index(index) => format!("/{index}"),
            })
            .collect();
        pointer == own || pointer.strip_prefix(&own).is_some_and(|rest| rest.starts_with('/'))
    }

    /// Returns the flag's value as given on the command line.
    pub fn text(&self) -> &str {
        &self.text
    }
}

/// Parses the value after `=`: as JSON if it is valid JSON, else as a string.
fn typed(text: &str) -> Value {
    let text = text.trim();
    rlood_types::strict_json::read(text.as_bytes()).unwrap_or_else(|_| Value::String(text.to_owned()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn set(document: &Value, texts: &[&str]) -> Result<Value, String> {
        let mut document = document.clone();
        for text in texts {
            Setting::parse(text)?.apply(&mut document).map_err(|error| error.to_string())?;
        }
        Ok(document)
    }

    #[test]
    fn values_have_the_type_that_they_look_like() {
        for (text, value) in [
            ("0.01", json!(0.01)),
            ("1e-6", json!(1e-6)),
            ("5", json!(5)),
            // These are not JSON: a name such as 007 stays as it is.
            ("007", json!("007")),
            (".5", json!(".5")),
            ("1.", json!("1.")),
            ("+1", json!("+1")),
            ("true", json!(true)),
            ("null", Value::Null),
            ("cosine", json!("cosine")),
            ("\"7\"", json!("7")),
            ("[\"q_proj\", 1]", json!(["q_proj", 1])),
            ("{\"a\": 1}", json!({"a": 1})),
            ("", json!("")),
            ("inf", json!("inf")),
            ("a=b", json!("a=b")),
        ] {
            assert_eq!(typed(text), value, "{text}");
        }
    }

    #[test]
    fn a_path_leads_into_sections_and_lists() {
        let document = json!({"model": "m", "rewards": [{"type": "length"}, {"type": "webhook"}], "eval": null});
        let changed = set(
            &document,
            &[
                "rloo.beta=0.01",
                "rewards.1.weight=2",
                "rewards[0].weight=3",
                "eval.every_steps=5",
                "model=other",
                "lora=null",
            ],
        );
        let expected = json!({
            "model": "other",
            "rewards": [{"type": "length", "weight": 3}, {"type": "webhook", "weight": 2}],
            "eval": {"every_steps": 5},
            "rloo": {"beta": 0.01},
            "lora": null
        });
        assert_eq!(changed, Ok(expected));
    }

    #[test]
    fn an_error_names_the_flag_and_the_place() {
        let document = json!({"model": "m", "rewards": [{"type": "length"}]});
        for (text, expected) in [
            ("rloo.beta", "no '='"),
            ("=1", "not a path"),
            ("a..b=1", "not a path"),
            ("rewards[x]=1", "not a list index"),
            ("rewards[0=1", "not a list index"),
            ("model.name=1", "--set model.name=1: 'model' is a single value"),
            ("rewards.2.weight=1", "--set rewards.2.weight=1: 'rewards' has no item 2: the last item has the number 0"),
            ("rewards.first=1", "'first' must be an item number"),
        ] {
            let error = set(&document, &[text]).unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
        let setting = Setting::parse("rloo.beta=-1").unwrap();
        assert!(setting.is_at("/rloo/beta") && !setting.is_at("/rloo/betas") && !setting.is_at("/rloo"));
        assert!(Setting::parse("rewards=[]").unwrap().is_at("/rewards/0/type"));
    }

    #[test]
    fn the_format_of_a_text_without_a_file_name_is_detected() {
        for (text, format) in [
            ("{\"model\": \"m\"}", Format::Json),
            ("model: m\n", Format::Yaml),
            ("model = \"m\"\n[rloo]\nbeta = 0.1\n", Format::Toml),
            ("neither [", Format::Yaml),
        ] {
            assert_eq!(format_of(text), format, "{text}");
        }
    }
}
