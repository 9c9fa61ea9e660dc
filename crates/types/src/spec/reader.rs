//! Reads a JSON object field by field and collects every error with its JSON pointer, instead of stopping at the first. The reader
//! of a section requests the fields that it knows; [`Reader::finish`] reports the fields that are left.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::sync::LazyLock;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::{PartialSchema, ToSchema};

use super::settings::{Range, variant_names};

/// One error in a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = ProblemItem)]
pub struct FieldError {
    /// Location of the error: a JSON pointer into the body (`/rloo/beta`), `?name` for a query parameter, `line 12` for a line of
    /// an ndjson dataset, or `row 12` for a row of a CSV, TSV or JSON file, counted from 1 without the header; empty = the
    /// whole request.
    #[schema(example = "/rloo/num_generations")]
    pub pointer: String,
    /// Stable error code in snake_case.
    #[schema(example = "out_of_range")]
    pub code: String,
    /// Explanation of the error, and how to fix it.
    pub detail: String,
}

impl FieldError {
    /// Creates an error at `pointer`.
    pub fn new(pointer: impl Into<String>, code: &str, detail: impl Into<String>) -> Self {
        Self { pointer: pointer.into(), code: code.to_owned(), detail: detail.into() }
    }
}

/// The maximum number of errors that are listed.
const MAX_ERRORS: usize = 1000;
/// Maximum length of an unknown word for which a similar known word is suggested.
const MAX_MISSPELT_BYTES: usize = 64;

/// The errors that were found in the document so far.
#[derive(Debug, Default)]
pub(super) struct Errors(RefCell<Vec<FieldError>>);

impl Errors {
    /// Adds an error. Beyond [`MAX_ERRORS`], only records that there are more errors.
    pub(super) fn add(&self, pointer: impl Into<String>, code: &str, detail: impl Into<String>) {
        let mut errors = self.0.borrow_mut();
        match errors.len() {
            0..MAX_ERRORS => errors.push(FieldError::new(pointer, code, detail)),
            MAX_ERRORS => errors.push(FieldError::new("", "more_errors", "there are more errors than are listed")),
            _ => {}
        }
    }

    /// Returns all errors, in order.
    pub(super) fn into_vec(self) -> Vec<FieldError> {
        self.0.into_inner()
    }
}

static EMPTY: LazyLock<Map<String, Value>> = LazyLock::new(Map::new);

/// Reads one object of the document.
pub(super) struct Reader<'v> {
    object: &'v Map<String, Value>,
    pointer: String,
    asked: RefCell<Vec<&'static str>>,
    errors: &'v Errors,
}

impl<'v> Reader<'v> {
    /// Reads the document itself. Anything but an object is an error and reads as an empty object.
    pub(super) fn document(value: &'v Value, errors: &'v Errors) -> Self {
        let document = Field { value: Some(value), pointer: String::new(), hint: "", errors };
        document.object().unwrap_or_else(|| Self::over(&EMPTY, String::new(), errors))
    }

    fn over(object: &'v Map<String, Value>, pointer: String, errors: &'v Errors) -> Self {
        Self { object, pointer, asked: RefCell::default(), errors }
    }

    /// Returns a field by its name. A null value counts as missing.
    pub(super) fn field(&self, name: &'static str) -> Field<'v> {
        self.asked.borrow_mut().push(name);
        let value = self.object.get(name).filter(|value| !value.is_null());
        Field { value, pointer: self.pointer_to(name), hint: "", errors: self.errors }
    }

    /// Returns a field whose name the client has chosen.
    pub(super) fn entry(&self, name: &str) -> Field<'v> {
        let value = self.object.get(name).filter(|value| !value.is_null());
        Field { value, pointer: self.pointer_to(name), hint: "", errors: self.errors }
    }

    /// Returns a field that has several spellings. Two spellings at once are an error.
    pub(super) fn field_of(&self, name: &'static str, aliases: &[&'static str]) -> Field<'v> {
        let field = self.field(name);
        let aliases_given = aliases.iter().map(|alias| self.field(alias)).filter(|field| field.value.is_some());
        let given: Vec<_> = field.value.map(|_| self.entry(name)).into_iter().chain(aliases_given).collect();
        if let [_, second, ..] = given.as_slice() {
            let names = [&[name], aliases].concat().join("', '");
            second.fail("conflict", format!("'{names}' are spellings of one setting: give one of them"));
        }
        given.into_iter().next().unwrap_or(field)
    }

    /// Returns a field that is required.
    pub(super) fn required(&self, name: &'static str, detail: &str) -> Field<'v> {
        let field = self.field(name);
        if field.value.is_none() {
            field.fail("required", detail);
        }
        field
    }

    /// Returns an object that is a field of this object; a missing object reads as empty.
    pub(super) fn section(&self, name: &'static str) -> Reader<'v> {
        let field = self.field(name);
        let pointer = field.pointer.clone();
        field.object().unwrap_or_else(|| Self::over(&EMPTY, pointer, self.errors))
    }

    /// Whether the document has the field, even if the field is null.
    pub(super) fn has(&self, name: &str) -> bool {
        self.object.contains_key(name)
    }

    /// Returns the JSON pointer to a field of this object.
    pub(super) fn pointer_to(&self, name: &str) -> String {
        format!("{}/{}", self.pointer, escaped(name))
    }

    /// Reports every field that was not requested. `advice` may recognize a key of another trainer, or one that belongs elsewhere.
    pub(super) fn finish(&self, advice: impl Fn(&str, &str) -> Option<(&'static str, String)>) {
        let asked = self.asked.borrow();
        for name in self.object.keys().filter(|name| !asked.contains(&name.as_str())) {
            let pointer = self.pointer_to(name);
            if let Some((code, detail)) = advice(name, &pointer) {
                self.errors.add(pointer, code, detail);
                continue;
            }
            let detail = match nearest(name, asked.iter().copied()) {
                Some(known) => format!("unknown field '{}': did you mean '{known}'?", shown(name)),
                None => format!("unknown field '{}'; known here: {}", shown(name), asked.join(", ")),
            };
            self.errors.add(pointer, "unknown_field", detail);
        }
    }
}

/// One value of the document, possibly missing. Every reading method returns `None` if the value is missing or was rejected.
pub(super) struct Field<'v> {
    value: Option<&'v Value>,
    pointer: String,
    hint: &'static str,
    errors: &'v Errors,
}

impl<'v> Field<'v> {
    /// Sets a text that is appended to an error about the value: the reason, or what to use instead.
    pub(super) fn hint(mut self, hint: &'static str) -> Self {
        self.hint = hint;
        self
    }

    /// Returns the JSON value as it was sent.
    pub(super) fn value(&self) -> Option<&'v Value> {
        self.value
    }

    /// Reports an error of this field.
    pub(super) fn fail(&self, code: &str, detail: impl Into<String>) {
        self.errors.add(self.pointer.clone(), code, detail);
    }

    /// Reports an error of a field inside this value.
    pub(super) fn fail_at(&self, name: &str, code: &str, detail: impl Into<String>) {
        self.errors.add(format!("{}/{}", self.pointer, escaped(name)), code, detail);
    }

    fn fail_value(&self, code: &str, detail: String) {
        let separator = if self.hint.is_empty() { "" } else { ": " };
        self.fail(code, format!("{detail}{separator}{}", self.hint));
    }

    fn mistyped<T>(&self, expected: &str) -> Option<T> {
        let found = kind_of(self.value?);
        self.fail_value("invalid_type", format!("must be {expected}, not {found}"));
        None
    }

    /// Reads text of at most `max_chars` characters.
    pub(super) fn string(&self, max_chars: usize) -> Option<&'v str> {
        let Some(text) = self.value?.as_str() else { return self.mistyped("a string") };
        if text.chars().count() > max_chars {
            self.fail_value("out_of_range", format!("must be at most {max_chars} characters long"));
            return None;
        }
        Some(text)
    }

    /// Reads text that is not blank.
    pub(super) fn nonempty(&self, max_chars: usize) -> Option<&'v str> {
        let text = self.string(max_chars)?;
        if text.trim().is_empty() {
            self.fail_value("invalid_value", "must not be empty".to_owned());
            return None;
        }
        Some(text)
    }

    /// Reads a display name: text that is not blank and has no control characters.
    pub(super) fn name(&self, max_chars: usize) -> Option<&'v str> {
        let text = self.nonempty(max_chars)?;
        if text.chars().any(char::is_control) {
            self.fail_value("invalid_value", "must not hold control characters (line breaks, tabs)".to_owned());
            return None;
        }
        Some(text)
    }

    /// Reads true or false.
    pub(super) fn bool(&self) -> Option<bool> {
        self.value?.as_bool().or_else(|| self.mistyped("true or false"))
    }

    /// Reads a whole number (4.0 counts as 4).
    pub(super) fn whole<N: TryFrom<u64>>(&self, range: RangeInclusive<u64>) -> Option<N> {
        let Some(number) = self.value?.as_f64() else { return self.mistyped("a whole number") };
        let exact = self.value?.as_u64().or_else(|| (number >= 0.0 && number.fract() == 0.0).then_some(number as u64));
        if let Some(inside) = exact.filter(|number| range.contains(number)).and_then(|number| N::try_from(number).ok())
        {
            return Some(inside);
        }
        if number.fract() == 0.0 {
            let limits = match (*range.start(), *range.end()) {
                (low, u64::MAX) => format!("at least {low}"),
                (low, high) => format!("between {low} and {high}"),
            };
            self.fail_value("out_of_range", format!("must be {limits}, not {number}"));
        } else {
            self.fail_value("invalid_type", format!("must be a whole number, not {number}"));
        }
        None
    }

    /// Reads a number in a range.
    pub(super) fn number_in(&self, range: Range) -> Option<f64> {
        self.number(&range.to_string(), |number| range.contains(number))
    }

    /// Reads a finite number for which `holds` is true; `limits` describes the condition in words.
    pub(super) fn number(&self, limits: &str, holds: impl Fn(f64) -> bool) -> Option<f64> {
        let Some(number) = self.value?.as_f64() else { return self.mistyped("a number") };
        if number.is_finite() && holds(number) {
            return Some(number);
        }
        self.fail_value("out_of_range", format!("must be {limits}, not {number}"));
        None
    }

    /// Reads one of several words and returns the value that the word stands for.
    pub(super) fn choice<T: Copy>(&self, choices: &[(&'static str, T)]) -> Option<T> {
        let words: Vec<_> = choices.iter().map(|(word, _)| *word).collect();
        let given = self.one_of(&words)?;
        choices.iter().find(|(word, _)| *word == given).map(|(_, value)| *value)
    }

    /// Reads the serialized name of an enum's variant.
    pub(super) fn variant<T: PartialSchema + DeserializeOwned>(&self) -> Option<T> {
        let name = self.one_of(&variant_names::<T>())?;
        serde_json::from_value(Value::from(name)).ok()
    }

    /// Reads one of several words.
    pub(super) fn one_of<W: AsRef<str>>(&self, words: &[W]) -> Option<&'v str> {
        let given = self.string(usize::MAX)?;
        let words: Vec<&str> = words.iter().map(AsRef::as_ref).collect();
        if words.contains(&given) {
            return Some(given);
        }
        let meant = nearest(given, words.iter().copied()).map(|word| format!(" (did you mean '{word}'?)"));
        self.fail_value(
            "invalid_value",
            format!("'{}' is not one of {}{}", shown(given), words.join(", "), meant.unwrap_or_default()),
        );
        None
    }

    /// Returns an object to be read field by field.
    pub(super) fn object(&self) -> Option<Reader<'v>> {
        Some(Reader::over(self.map()?, self.pointer.clone(), self.errors))
    }

    /// Reads an object whose keys the client has chosen.
    pub(super) fn map(&self) -> Option<&'v Map<String, Value>> {
        self.value?.as_object().or_else(|| self.mistyped("an object"))
    }

    /// Returns the items of a list.
    pub(super) fn items(&self) -> Option<Vec<Field<'v>>> {
        let Some(items) = self.value?.as_array() else { return self.mistyped("a list") };
        let field = |(index, value)| Field {
            value: Some(value),
            pointer: format!("{}/{index}", self.pointer),
            hint: "",
            errors: self.errors,
        };
        Some(items.iter().enumerate().map(field).collect())
    }

    /// Reads an object of short texts.
    pub(super) fn texts(&self, max_entries: usize, max_chars: usize) -> Option<BTreeMap<String, String>> {
        let map = self.map()?;
        if map.len() > max_entries {
            self.fail_value("out_of_range", format!("must have at most {max_entries} entries"));
            return None;
        }
        let mut texts = BTreeMap::new();
        for (name, value) in map {
            let pointer = format!("{}/{}", self.pointer, escaped(name));
            let entry = Field { value: Some(value), pointer, hint: "", errors: self.errors };
            if let Some(text) = entry.string(max_chars) {
                texts.insert(name.clone(), text.to_owned());
            }
        }
        Some(texts)
    }
}

/// Names the JSON type of a value for an error message.
pub(super) fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// Returns the known word that is closest to a misspelled one.
pub(super) fn nearest<'n>(given: &str, known: impl Iterator<Item = &'n str>) -> Option<&'n str> {
    known
        .filter(|_| given.len() <= MAX_MISSPELT_BYTES)
        .map(|name| (strsim::jaro_winkler(given, name), name))
        .filter(|(likeness, _)| *likeness > 0.84)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, name)| name)
}

/// Escapes a key for use in a JSON pointer.
pub(super) fn escaped(name: &str) -> String {
    name.replace('~', "~0").replace('/', "~1")
}

/// Shortens a client's text for use in a message.
pub(super) fn shown(text: &str) -> String {
    match text.char_indices().nth(64) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}
