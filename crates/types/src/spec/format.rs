//! Document formats: JSON, YAML and TOML, for reading and writing.
//!
//! Reading gives the same [`Value`] from all three. A document comes from a client, so reading is limited: depth, number of nodes
//! and expansion of aliases (YAML), depth (TOML, JSON). Non-finite numbers are rejected because JSON has none, and so are duplicate
//! keys in an object. Errors about a broken document quote keys but never values, which may be secrets.

use serde_json::{Map, Value};

use super::reader::{escaped, shown};
use crate::strict_json;

/// Format of a job document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// JSON as defined by RFC 8259.
    Json,
    /// YAML 1.2 (`1e-6` is a number); YAML 1.1's `yes` and `no` stay text.
    Yaml,
    /// TOML 1.0, which has no null.
    Toml,
}

/// The error for a document that cannot be read or written in this format.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct FormatError {
    /// Human-readable message, with the line and column of the error if they are known.
    pub message: String,
    /// JSON pointer to the invalid field if it is known; otherwise empty.
    pub pointer: String,
}

impl FormatError {
    fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), pointer: String::new() }
    }
}

impl Format {
    /// All formats that are supported.
    pub const ALL: [Format; 3] = [Format::Json, Format::Yaml, Format::Toml];

    /// Returns the name in flags and query parameters.
    pub fn as_str(self) -> &'static str {
        match self {
            Format::Json => "json",
            Format::Yaml => "yaml",
            Format::Toml => "toml",
        }
    }

    /// Parses the name of a format.
    pub fn parse(word: &str) -> Option<Format> {
        Self::ALL.into_iter().find(|format| format.as_str() == word)
    }

    /// Returns the media type (YAML: RFC 9512).
    pub fn media_type(self) -> &'static str {
        match self {
            Format::Json => "application/json",
            Format::Yaml => "application/yaml",
            Format::Toml => "application/toml",
        }
    }

    /// Returns the format for a media type in lower case without parameters; `application/…+json` and `…+yaml` are accepted.
    pub fn of_media_type(media_type: &str) -> Option<Format> {
        match media_type {
            "application/json" => Some(Format::Json),
            "application/yaml" | "application/x-yaml" | "text/yaml" | "text/x-yaml" => Some(Format::Yaml),
            "application/toml" => Some(Format::Toml),
            other => match other.strip_prefix("application/")?.rsplit_once('+')?.1 {
                "json" => Some(Format::Json),
                "yaml" => Some(Format::Yaml),
                _ => None,
            },
        }
    }

    /// Returns the format for a file name by its extension: .json, .toml, otherwise YAML (of which JSON is a subset).
    pub fn of_file_name(name: &str) -> Format {
        match name.rsplit_once('.').map(|(_, end)| end.to_ascii_lowercase()).as_deref() {
            Some("json") => Format::Json,
            Some("toml") => Format::Toml,
            Some(_) | None => Format::Yaml,
        }
    }

    /// Reads a document in this format.
    ///
    /// # Errors
    /// Fails (with line and column) if the text is not in this format, exceeds the limits, or has a non-finite number.
    pub fn read(self, text: &str) -> Result<Value, FormatError> {
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        if text.trim().is_empty() {
            return Err(FormatError::new(format!(
                "the document is empty: it must contain {}",
                self.as_str().to_uppercase()
            )));
        }
        match self {
            Format::Json => strict_json::read(text.as_bytes()).map_err(|error| {
                let (words, line, column) = (strict_json::error_text(&error), error.line(), error.column());
                FormatError::new(format!("{words} (line {line}, column {column})"))
            }),
            Format::Yaml => {
                let options = serde_saphyr::options! { with_snippet: false, strict_booleans: true };
                serde_saphyr::from_str_with_options(text, options).map_err(|error| broken_yaml(&error))
            }
            Format::Toml => {
                let table: toml::Table = toml::from_str(text).map_err(|error| broken_toml(text, &error))?;
                from_toml(toml::Value::Table(table), "")
            }
        }
    }

    /// Writes a document, with a final line feed.
    ///
    /// # Errors
    /// TOML: fails if the document is not an object, or has null or a number beyond 64 signed bits.
    pub fn write(self, document: &Value) -> Result<String, FormatError> {
        match self {
            Format::Json => serde_json::to_string_pretty(document)
                .map(|text| text + "\n")
                .map_err(|error| FormatError::new(error.to_string())),
            Format::Yaml => {
                // Strings are written on one line and quoted if needed, so that reading gives the same value.
                let options = serde_saphyr::ser_options! { prefer_block_scalars: false };
                let text = serde_saphyr::to_string_with_options(document, options)
                    .map_err(|error| FormatError::new(error.to_string()))?;
                Ok(if text.ends_with('\n') { text } else { text + "\n" })
            }
            Format::Toml => {
                if let Some(pointer) = first_null(document, String::new()) {
                    return Err(FormatError::new(format!(
                        "{pointer} is null, which TOML does not support: use yaml or json"
                    )));
                }
                toml::to_string(document).map_err(|error| FormatError::new(one_line(&error.to_string())))
            }
        }
    }
}

/// Writes a job. TOML has no null, so `lora: null` (no adapter) becomes `lora = false`, which reads as the same.
///
/// # Errors
/// Fails as [`Format::write`] does.
pub fn write_job(document: &Value, format: Format) -> Result<String, FormatError> {
    if format == Format::Toml && document.get("lora").is_some_and(Value::is_null) {
        let mut document = document.clone();
        document["lora"] = Value::Bool(false);
        return format.write(&document);
    }
    format.write(document)
}

/// Translates an error, because the parser's own messages address developers.
fn broken_yaml(error: &serde_saphyr::Error) -> FormatError {
    use serde_saphyr::Error;
    const TOO_LARGE: &str = "the document is too large, too deep, or its aliases expand to too much: \
                             write it without aliases, and upload many rows as a dataset";
    let inner = match error.without_snippet() {
        Error::AliasError { error, .. } => error.without_snippet(),
        other => other,
    };
    let words = match inner {
        Error::DuplicateMappingKey { key: Some(key), .. } => {
            format!("duplicate key '{}': give every key of an object once", shown(key))
        }
        Error::DuplicateMappingKey { key: None, .. } => "duplicate key: give every key of an object once".to_owned(),
        Error::MultipleDocuments { .. } => "there is more than one document ('---'): send one".to_owned(),
        Error::Budget { .. }
        | Error::AliasReplayCounterOverflow { .. }
        | Error::AliasReplayLimitExceeded { .. }
        | Error::AliasExpansionLimitExceeded { .. }
        | Error::AliasReplayStackDepthExceeded { .. } => TOO_LARGE.to_owned(),
        Error::NonFiniteFloat { .. } => {
            "a number is not finite, which JSON does not have: give a finite one".to_owned()
        }
        Error::RecursiveReferencesRequireWeakTypes { .. } => "an alias refers to a value that contains it".to_owned(),
        Error::UnknownAnchor { .. } => "an alias (*name) has no anchor (&name) before it".to_owned(),
        Error::UnsupportedTag { .. } => "a tag (!name) is not supported: write the value without it".to_owned(),
        Error::Eof { .. } => "the document ends too early: a bracket or a quote is open".to_owned(),
        other => return FormatError::new(one_line(&other.render_with_formatter(&serde_saphyr::UserMessageFormatter))),
    };
    match inner.location().or_else(|| error.location()) {
        Some(at) => FormatError::new(format!("{words} (line {}, column {})", at.line(), at.column())),
        None => FormatError::new(words),
    }
}

/// The error's own text would show the faulty line, which may contain a secret.
fn broken_toml(text: &str, error: &toml::de::Error) -> FormatError {
    let Some(before) = error.span().and_then(|span| text.get(..span.start)) else {
        return FormatError::new(one_line(error.message()));
    };
    let line = before.matches('\n').count() + 1;
    let column = before.rsplit('\n').next().unwrap_or("").chars().count() + 1;
    FormatError::new(format!("{} (line {line}, column {column})", one_line(error.message())))
}

/// Joins the lines of a parser's message into one line.
fn one_line(text: &str) -> String {
    const LONGEST: usize = 300;
    let line = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line,
    }
}

fn first_null(value: &Value, pointer: String) -> Option<String> {
    match value {
        Value::Null => Some(pointer),
        Value::Object(map) => map.iter().find_map(|(name, value)| first_null(value, format!("{pointer}/{name}"))),
        Value::Array(items) => {
            items.iter().enumerate().find_map(|(index, value)| first_null(value, format!("{pointer}/{index}")))
        }
        Value::Bool(_) | Value::Number(_) | Value::String(_) => None,
    }
}

fn from_toml(value: toml::Value, pointer: &str) -> Result<Value, FormatError> {
    Ok(match value {
        toml::Value::String(text) => Value::String(text),
        toml::Value::Integer(number) => number.into(),
        toml::Value::Float(number) => match serde_json::Number::from_f64(number) {
            Some(number) => Value::Number(number),
            None => {
                let message = format!("{pointer} is {number}, which is not a finite number: give a finite one");
                return Err(FormatError { message, pointer: pointer.to_owned() });
            }
        },
        toml::Value::Boolean(flag) => Value::Bool(flag),
        toml::Value::Datetime(time) => Value::String(time.to_string()),
        toml::Value::Array(items) => {
            let item = |(index, value)| from_toml(value, &format!("{pointer}/{index}"));
            Value::Array(items.into_iter().enumerate().map(item).collect::<Result<_, _>>()?)
        }
        toml::Value::Table(table) => {
            let entry = |(name, value): (String, _)| {
                let value = from_toml(value, &format!("{pointer}/{}", escaped(&name)))?;
                Ok((name, value))
            };
            Value::Object(table.into_iter().map(entry).collect::<Result<Map<_, _>, FormatError>>()?)
        }
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    #[test]
    fn the_three_forms_say_the_same() {
        let yaml = "a: 1e-6\nb: [1, true, no]\nc: {d: 'x'}\n";
        let toml = "a = 1e-6\nb = [1, true, \"no\"]\n[c]\nd = \"x\"\n";
        let expected = json!({"a": 1e-6, "b": [1, true, "no"], "c": {"d": "x"}});
        assert_eq!(Format::Yaml.read(yaml).unwrap(), expected);
        assert_eq!(Format::Toml.read(toml).unwrap(), expected);
        assert_eq!(Format::Json.read(&expected.to_string()).unwrap(), expected);
    }

    #[test]
    fn syntax_errors_have_a_position() {
        assert!(Format::Yaml.read("a: 1\nb: [1, 2\n").unwrap_err().message.contains("line"));
        assert!(Format::Toml.read("a = \n").unwrap_err().message.contains("line 1"));
        assert!(Format::Json.read("{\"a\": }").unwrap_err().message.contains("line 1"));
        for format in Format::ALL {
            assert!(format.read(" \n").unwrap_err().message.contains("empty"));
        }
        assert!(Format::Yaml.read("a: 1\na: 2\n").unwrap_err().message.to_lowercase().contains("duplicate"));
    }

    #[test]
    fn numbers_that_are_not_finite_are_refused() {
        for text in ["a: .nan", "a: .inf", "a: -.inf"] {
            assert!(Format::Yaml.read(text).is_err(), "{text}");
        }
        for text in ["a = nan", "a = inf", "a = [1.0, -inf]"] {
            assert!(Format::Toml.read(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_non_finite_number_in_toml_is_reported_with_its_field() {
        let error = Format::Toml.read("[rloo]\nbeta = nan\n").unwrap_err();
        assert_eq!(error.pointer, "/rloo/beta");
        assert!(error.message.contains("/rloo/beta is NaN"), "{}", error.message);
    }

    #[test]
    fn a_broken_document_is_not_quoted() {
        let broken = [
            (Format::Toml, "[[rewards]]\nsecret = \"CANARY\" x\n"),
            (Format::Toml, "secret = \"CANARY\"\nsecret = \"CANARY\"\n"),
            (Format::Toml, "secret = \"CANARY\"\n[secret.CANARI]\n"),
            (Format::Toml, "secret = 'CANARY\n"),
            (Format::Toml, "secret = CANARY\n"),
            (Format::Toml, "secret = \"CANARY\\q\"\n"),
            (Format::Yaml, "secret: \"CANARY\" x\n"),
            (Format::Yaml, "secret: CANARY\nsecret: CANARY\n"),
            (Format::Yaml, "secret: 'CANARY\n"),
            (Format::Yaml, "secret: *CANARY\n"),
            (Format::Yaml, "secret: [CANARY\n"),
            (Format::Json, "{\"secret\": \"CANARY\" x}"),
            (Format::Json, "{\"secret\": \"CANARY\", \"secret\": \"CANARY\"}"),
            (Format::Json, "{\"secret\": CANARY}"),
        ];
        for (format, text) in broken {
            let message = format.read(text).map(|value| panic!("{text}: {value}")).unwrap_err().message;
            assert!(!message.contains("CANARY"), "{text}: {message}");
            assert!(message.contains("line"), "{text}: {message}");
        }
    }

    #[test]
    fn errors_of_yaml_speak_of_the_document_and_not_of_the_parser() {
        let deep = "[".repeat(100_000);
        for text in ["a: 1\na: 2\n", "a: 1\n---\nb: 2\n", "a: .nan\n", "a: *b\n", "a: [1\n", deep.as_str()] {
            let message = Format::Yaml.read(text).unwrap_err().message;
            for jargon in ["Options", "from_str", "budget", "policy", "Policy", "Nodes", "Depth", "serde"] {
                assert!(!message.contains(jargon), "{message}");
            }
        }
    }

    #[test]
    fn a_duplicate_key_is_rejected_in_every_format() {
        for (format, text) in [
            (Format::Json, "{\"rloo\": {\"beta\": 0, \"beta\": 1}}"),
            (Format::Yaml, "rloo: {beta: 0, beta: 1}"),
            (Format::Toml, "[rloo]\nbeta = 0\nbeta = 1"),
        ] {
            let message = format.read(text).unwrap_err().message;
            assert!(message.contains("duplicate key"), "{message}");
        }
    }

    #[test]
    fn the_expansion_of_aliases_is_limited() {
        let mut bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
        for level in 1..12 {
            let before = format!("*a{}", level - 1);
            bomb.push_str(&format!("a{level}: &a{level} [{}]\n", [before.as_str(); 10].join(", ")));
        }
        let begun = std::time::Instant::now();
        assert!(Format::Yaml.read(&bomb).is_err());
        assert!(begun.elapsed().as_secs() < 10);
        assert!(Format::Yaml.read(&"[".repeat(100_000)).is_err());
        assert!(Format::Toml.read(&format!("a = {}", "[".repeat(100_000))).is_err());
        assert!(Format::Json.read(&"[".repeat(100_000)).is_err());
    }

    #[test]
    fn toml_reports_values_that_it_does_not_support() {
        let error = Format::Toml.write(&json!({"a": {"b": [1, null]}})).unwrap_err();
        assert!(error.message.starts_with("/a/b/1 is null"), "{}", error.message);
    }

    fn text() -> impl Strategy<Value = String> {
        prop_oneof![
            any::<String>(),
            "[ \n\t#:&*!|>'\"%@`{}\\[\\],?~=-]{0,12}",
            "[a-z \n]{60,140}",
            prop::sample::select(vec![
                "no",
                "yes",
                "on",
                "off",
                "y",
                "null",
                "~",
                "",
                "1e5",
                "0x1f",
                "0o7",
                "017",
                "1_000",
                ".nan",
                ".inf",
                "-",
                "---",
                "...",
                "<<",
                "=",
                "true",
                "True",
                "2020-01-01",
                "12:30:45",
                "+1",
                "1.",
                ".5",
                "\u{feff}x",
                "a\u{85}b",
                "\u{2028}",
                "\r",
                "x\r\ny",
                " lead",
                "trail ",
                "trail\n",
                "\n\n",
            ])
            .prop_map(str::to_owned),
        ]
    }

    fn document() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            prop::num::f64::NORMAL.prop_map(Value::from),
            text().prop_map(Value::from),
        ];
        let inner = leaf.prop_recursive(4, 32, 6, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::vec((text(), inner), 0..4)
                    .prop_map(|entries| Value::Object(entries.into_iter().collect())),
            ]
        });
        prop::collection::vec((text(), inner), 0..5).prop_map(|entries| Value::Object(entries.into_iter().collect()))
    }

    proptest! {
        #[test]
        fn a_written_document_reads_back_the_same(document in document()) {
            for format in Format::ALL {
                let text = format.write(&document).unwrap();
                prop_assert_eq!(&format.read(&text).unwrap_or(Value::Null), if text.trim().is_empty() { &Value::Null } else { &document }, "{}:\n{}", format.as_str(), text);
            }
        }

        #[test]
        fn no_text_makes_reading_panic(text in any::<String>()) {
            for format in Format::ALL {
                let _ = format.read(&text);
            }
        }
    }
}
