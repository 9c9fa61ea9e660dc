//! Reads the keys of a TRL configuration one by one, and collects remarks about them.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::spec::reader::{FieldError, shown};
use crate::spec::resolve::Warning;
use crate::spec::settings::Form;

/// A key of the submitted configuration, and a remark about it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Remark {
    /// The key as it was sent.
    pub key: String,
    /// The reason, and what to use instead.
    pub reason: String,
}

/// Remarks, errors and pointers that the translation has collected so far.
#[derive(Debug, Default)]
pub(super) struct Findings {
    pub errors: RefCell<Vec<FieldError>>,
    pub warnings: RefCell<Vec<Warning>>,
    pub unsupported: RefCell<Vec<Remark>>,
    pub ignored: RefCell<Vec<Remark>>,
    /// Maps a pointer in the spec to a pointer in the submitted configuration.
    pub origins: RefCell<BTreeMap<String, String>>,
}

/// One object of the submitted TRL configuration.
pub(super) struct Keys<'v> {
    map: &'v Map<String, Value>,
    pointer: String,
    asked: RefCell<BTreeSet<&'static str>>,
    pub findings: &'v Findings,
}

impl<'v> Keys<'v> {
    /// Creates a reader for an object at `pointer` of the submitted configuration.
    pub(super) fn new(map: &'v Map<String, Value>, pointer: impl Into<String>, findings: &'v Findings) -> Self {
        Self { map, pointer: pointer.into(), asked: RefCell::default(), findings }
    }

    /// Returns the value of a key; null and Python's "None" count as not given.
    pub(super) fn value(&self, key: &'static str) -> Option<&'v Value> {
        self.asked.borrow_mut().insert(key);
        self.map.get(key).filter(|value| !value.is_null() && value.as_str() != Some("None"))
    }

    /// Whether the key is present with a value.
    pub(super) fn has(&self, key: &str) -> bool {
        self.map.get(key).is_some_and(|value| !value.is_null() && value.as_str() != Some("None"))
    }

    /// Iterates over keys that have not been read.
    pub(super) fn rest(&self) -> impl Iterator<Item = (&'v String, &'v Value)> + '_ {
        self.map.iter().filter(|(key, _)| !self.asked.borrow().contains(key.as_str()))
    }

    /// Returns the pointer to a key.
    pub(super) fn pointer_to(&self, key: &str) -> String {
        format!("{}/{}", self.pointer, key.replace('~', "~0").replace('/', "~1"))
    }

    /// Reports that a value cannot be used.
    pub(super) fn fail(&self, key: &str, code: &str, detail: impl Into<String>) {
        self.findings.errors.borrow_mut().push(FieldError::new(self.pointer_to(key), code, detail));
    }

    /// Reports a setting that is legal but probably not intended.
    pub(super) fn warn(&self, key: &str, code: &str, detail: impl Into<String>) {
        let warning = Warning { pointer: self.pointer_to(key), code: code.to_owned(), detail: detail.into() };
        self.findings.warnings.borrow_mut().push(warning);
    }

    /// Reports that a key requests something unsupported.
    pub(super) fn refuse(&self, key: &str, reason: impl Into<String>) {
        self.findings.unsupported.borrow_mut().push(Remark { key: shown(key), reason: reason.into() });
    }

    /// Reports that a key makes no difference.
    pub(super) fn ignore(&self, key: &str, reason: impl Into<String>) {
        self.findings.ignored.borrow_mut().push(Remark { key: shown(key), reason: reason.into() });
    }

    /// Records that the setting at `spec_pointer` comes from this key, so that its errors can refer to the key.
    pub(super) fn origin(&self, spec_pointer: &str, key: &str) {
        if self.has(key) {
            self.findings.origins.borrow_mut().insert(spec_pointer.to_owned(), self.pointer_to(key));
        }
    }

    fn mistyped(&self, key: &str, expected: &str, value: &Value) {
        self.fail(key, "invalid_type", format!("must be {expected}, not {}", shown(&value.to_string())));
    }

    /// Reads a number, or text that is a number (YAML 1.1 reads `1e-6` as text, and TRL accepts it).
    pub(super) fn number(&self, key: &'static str) -> Option<f64> {
        let value = self.value(key)?;
        let number = value.as_f64().or_else(|| value.as_str().and_then(|text| text.trim().parse::<f64>().ok()));
        let number = number.filter(|number| number.is_finite());
        if number.is_none() {
            self.mistyped(key, "a number", value);
        }
        number
    }

    /// Reads a whole number of at least `least` and at most a million.
    pub(super) fn count(&self, key: &'static str, least: u64) -> Option<u64> {
        const MOST: u64 = 1_000_000;
        let number = self.number(key)?;
        if number.fract() == 0.0 && (least as f64..=MOST as f64).contains(&number) {
            return Some(number as u64);
        }
        self.fail(key, "out_of_range", format!("must be a whole number from {least} to {MOST}, not {number}"));
        None
    }

    /// Reads true or false, or text with that meaning.
    pub(super) fn flag(&self, key: &'static str) -> Option<bool> {
        let value = self.value(key)?;
        let word = value.as_str().map(|text| text.trim().to_ascii_lowercase());
        let flag = value.as_bool().or(match word.as_deref() {
            Some("true" | "yes" | "on" | "1") => Some(true),
            Some("false" | "no" | "off" | "0") => Some(false),
            _ => None,
        });
        if flag.is_none() {
            self.mistyped(key, "true or false", value);
        }
        flag
    }

    /// Reads a value in one of the forms ([`Form`]) of the settings' tables.
    pub(super) fn read(&self, key: &'static str, form: Form) -> Option<Value> {
        match form {
            Form::Number => self.number(key).map(Value::from),
            Form::Plain => self.number(key).map(super::schedule::number),
            Form::Count => self.count(key, 1).map(Value::from),
            Form::Flag => self.flag(key).map(Value::from),
            Form::AsSent | Form::Modules => self.value(key).cloned(),
        }
    }

    /// Reads a word in lower case; YAML's `no` may have become false.
    pub(super) fn lowercase(&self, key: &'static str) -> Option<String> {
        let value = self.value(key)?;
        match value {
            Value::String(text) => Some(text.trim().to_ascii_lowercase()),
            Value::Bool(false) => Some("no".to_owned()),
            _ => {
                self.mistyped(key, "a word", value);
                None
            }
        }
    }

    /// Reads an object, or text that contains one as JSON (as on TRL's command line).
    pub(super) fn object(&self, key: &'static str) -> Option<Map<String, Value>> {
        let value = self.value(key)?;
        let parsed = match value {
            Value::Object(map) => Some(map.clone()),
            Value::String(text) => serde_json::from_str(text).ok(),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::Array(_) => None,
        };
        if parsed.is_none() {
            self.mistyped(key, "an object", value);
        }
        parsed
    }
}
