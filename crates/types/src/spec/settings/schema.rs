//! The schema of a section, from its table. Additional information for the dashboard's form is under `x-form`.

use serde_json::{Map, Value, json};
use utoipa::openapi::RefOr;
use utoipa::openapi::extensions::{Extensions, ExtensionsBuilder};
use utoipa::openapi::schema::{Object, Schema, Type};

use super::{Kind, SECTIONS, Section, Setting};
use crate::spec::schema::{closed, defaulted, described, enumeration, into_object, plain};

impl Section {
    /// Returns the schema: every setting is optional unless it is required, with its limits and its default.
    pub(in crate::spec) fn schema(&self) -> Object {
        let plan = self.plan_schema();
        let defaults = self.defaults();
        let required: Vec<_> =
            self.settings.iter().filter(|setting| setting.required.is_some()).map(|setting| setting.name).collect();
        let mut schema = closed(&required).description(Some(self.doc));
        for setting in self.settings {
            schema = schema.property(setting.name, setting.schema(&plan, &defaults));
            for alias in setting.aliases {
                schema = schema.property(*alias, setting.alias_schema());
            }
        }
        schema.extensions(Some(self.form_hints())).build()
    }

    /// Returns the section's schema in the plan; empty if the rows have their own descriptions.
    pub(super) fn plan_schema(&self) -> Object {
        self.plan.map_or_else(Object::new, |schema| into_object(schema()))
    }

    fn form_hints(&self) -> Extensions {
        let order: Vec<_> = self.settings.iter().map(|setting| setting.name).collect();
        let labeled = self.settings.iter().filter(|setting| !setting.label.is_empty());
        let labels: Map<_, _> = labeled.map(|setting| (setting.name.to_owned(), json!(setting.label))).collect();
        form_extension(json!({"title": self.title, "order": order, "labels": labels}))
    }
}

impl Setting {
    pub(super) fn schema(&self, plan: &Object, defaults: &Map<String, Value>) -> RefOr<Schema> {
        let mut schema = match plan.properties.get(self.name).filter(|_| self.doc.is_empty()) {
            Some(of_plan) => of_plan.clone(),
            None => self.own_schema(),
        };
        self.restrict(&mut schema);
        match defaults.get(self.name) {
            None | Some(Value::Null) => schema,
            Some(default) => defaulted(schema, default.clone()),
        }
    }

    fn own_schema(&self) -> RefOr<Schema> {
        match self.kind {
            Kind::Flag => plain(Type::Boolean, self.doc).into(),
            Kind::Whole(..) => plain(Type::Integer, self.doc).into(),
            Kind::Number(_) => plain(Type::Number, self.doc).into(),
            Kind::Variant(names) => enumeration(self.doc, &names()),
            Kind::Text(_) => plain(Type::String, self.doc).into(),
            Kind::Own { schema, .. } => described(schema(), self.doc),
            Kind::Part { schema, .. } => schema(),
        }
    }

    fn alias_schema(&self) -> RefOr<Schema> {
        let doc = format!("Another spelling of {}.", self.name);
        let mut schema = Setting { doc: "", ..*self }.own_schema();
        self.restrict(&mut schema);
        described(schema, &doc)
    }

    fn restrict(&self, schema: &mut RefOr<Schema>) {
        let RefOr::T(Schema::Object(schema)) = schema else { return };
        match self.kind {
            Kind::Whole(low, high) => {
                schema.minimum = Some(low.into());
                schema.maximum = Some(high.into());
            }
            Kind::Number(range) => range.restrict(schema),
            Kind::Flag | Kind::Variant(_) | Kind::Text(_) | Kind::Own { .. } | Kind::Part { .. } => {}
        }
    }
}

/// Returns the layout of the form: its sections in order, and the settings that it always shows.
pub(in crate::spec) fn form_layout() -> Extensions {
    let sections: Vec<_> = SECTIONS.iter().map(|section| section.name).collect();
    let mut prominent: Vec<_> = SECTIONS
        .iter()
        .flat_map(|section| section.settings.iter().map(move |setting| (setting.prominence, section, setting)))
        .filter(|(place, ..)| *place > 0)
        .collect();
    prominent.sort_by_key(|(place, ..)| *place);
    let first: Vec<_> =
        prominent.iter().map(|(_, section, setting)| format!("/{}/{}", section.name, setting.name)).collect();
    form_extension(json!({"sections": sections, "first": first}))
}

/// Uses a single extension key, because the order of several would be undefined.
fn form_extension(value: Value) -> Extensions {
    ExtensionsBuilder::new().add("x-form", value).build()
}
