//! Reads a section of a document by its table.

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::{Kind, Section, Setting};
use crate::spec::reader::{Errors, Reader};

/// The settings of a section: the accepted values of the document, and defaults for the rest.
#[derive(Debug, Default)]
pub(in crate::spec) struct Values {
    values: Map<String, Value>,
    defaulted: Vec<&'static str>,
}

impl Values {
    /// Returns the value of a setting.
    ///
    /// # Panics
    /// Panics if the table has no such setting, or one of another type. The tests in this folder read every table.
    pub(in crate::spec) fn get<T: DeserializeOwned>(&self, name: &str) -> T {
        let value = self.values.get(name).cloned().unwrap_or(Value::Null);
        serde_json::from_value(value).expect("a row of the settings table has the type of its field in the plan")
    }

    /// Whether the setting was not given, or its value was rejected.
    pub(in crate::spec) fn is_default(&self, name: &str) -> bool {
        self.defaulted.contains(&name)
    }

    /// Replaces the value of a setting.
    pub(in crate::spec) fn set(&mut self, name: &str, value: impl Into<Value>) {
        self.values.insert(name.to_owned(), value.into());
    }

    /// Returns all values, by name.
    pub(in crate::spec) fn into_map(self) -> Map<String, Value> {
        self.values
    }

    /// Returns the section of the plan; `None` if a required setting is missing.
    pub(in crate::spec) fn into_section<T: DeserializeOwned>(self) -> Option<T> {
        serde_json::from_value(Value::Object(self.values)).ok()
    }

    /// Returns the section of the plan, for tables without required settings.
    ///
    /// # Panics
    /// Panics if a field of the plan is missing from the table or has another type. The tests in this folder read every table.
    pub(in crate::spec) fn into_plan<T: DeserializeOwned>(self) -> T {
        self.into_section().expect("the settings table has a row of the right type for every field of the plan")
    }
}

impl Section {
    /// Reads every row. A rejected value is reported and replaced by its default. Fields without a
    /// row are left to [`Reader::finish`].
    pub(in crate::spec) fn read(&self, reader: &Reader<'_>) -> Values {
        let mut values = self.read_first(reader);
        self.read_rest(reader, &mut values);
        values
    }

    /// Reads the settings that others of the section depend on.
    pub(in crate::spec) fn read_first(&self, reader: &Reader<'_>) -> Values {
        let mut values = Values::default();
        for setting in self.settings.iter().filter(|setting| setting.is_first) {
            setting.read(reader, None, &mut values);
        }
        values
    }

    /// Reads the remaining rows of the table.
    pub(in crate::spec) fn read_rest(&self, reader: &Reader<'_>, values: &mut Values) {
        for setting in self.settings.iter().filter(|setting| !setting.is_first) {
            setting.read(reader, None, values);
        }
    }

    /// Reads every row of a section with other defaults, and one of the rows with other limits.
    pub(in crate::spec) fn read_over(
        &self,
        reader: &Reader<'_>,
        defaults: &Map<String, Value>,
        replacement: &Setting,
    ) -> Values {
        let mut values = Values::default();
        let (first, rest): (Vec<&Setting>, Vec<&Setting>) = self.settings.iter().partition(|setting| setting.is_first);
        for setting in first.into_iter().chain(rest) {
            let setting = if setting.name == replacement.name { replacement } else { setting };
            setting.read(reader, defaults.get(setting.name), &mut values);
        }
        values
    }

    /// Returns the values of a section that sets nothing.
    pub(in crate::spec) fn defaults(&self) -> Map<String, Value> {
        let (nothing, errors) = (Value::Object(Map::new()), Errors::default());
        self.read(&Reader::document(&nothing, &errors)).into_map()
    }
}

impl Setting {
    fn read(&self, reader: &Reader<'_>, default: Option<&Value>, values: &mut Values) {
        if matches!(self.kind, Kind::Part { .. }) {
            return;
        }
        let field = match self.required {
            Some(detail) => reader.required(self.name, detail),
            None => reader.field_of(self.name, self.aliases),
        };
        let field = field.hint(self.hint);
        let given = match self.kind {
            Kind::Flag => field.bool().map(Value::from),
            Kind::Whole(low, high) => {
                let low = self.lowest.map_or(low, |lowest| lowest(values));
                field.whole::<u64>(low..=high).map(Value::from)
            }
            Kind::Number(range) => field.number_in(range).map(Value::from),
            Kind::Variant(names) => field.one_of(&names()).map(Value::from),
            Kind::Text(max_chars) => field.nonempty(max_chars).map(Value::from),
            Kind::Own { read, .. } => read(&field),
            Kind::Part { .. } => None,
        };
        let given = given.filter(|value| match self.conflict.and_then(|conflict| conflict(values, value)) {
            Some(detail) => {
                field.fail("conflict", detail);
                false
            }
            None => true,
        });
        let value = given.unwrap_or_else(|| {
            values.defaulted.push(self.name);
            default.cloned().unwrap_or_else(|| self.default.value(values))
        });
        values.set(self.name, value);
    }
}
