//! Tests every row of every table against its reader, its plan and its schema.

use serde_json::{Value, json};
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::Schema;

use super::{DefaultValue, Kind, SECTIONS, Section, Setting, Values};
use crate::spec::JobSpec;

/// Returns the errors of a job whose section has these values, without those of other sections.
fn errors(section: &Section, values: &Value) -> Vec<String> {
    let mut document = json!({});
    document[section.name] = values.clone();
    let (_, errors) = JobSpec::read(document);
    let own = format!("/{}/", section.name);
    let errors = errors.into_iter().filter(|error| error.pointer.starts_with(&own));
    errors.map(|error| format!("{}: {} {}", error.pointer, error.code, error.detail)).collect()
}

fn settings() -> impl Iterator<Item = (&'static Section, &'static Setting)> {
    SECTIONS.into_iter().flat_map(|section| section.settings.iter().map(move |setting| (section, setting)))
}

/// Returns values at the limits of the accepted range.
fn accepted(setting: &Setting) -> Vec<Value> {
    match setting.kind {
        Kind::Flag => vec![json!(true), json!(false)],
        Kind::Whole(low, high) => vec![json!(low), json!(high)],
        Kind::Number(range) => {
            [0.0, 1e-9, 0.5, 1.0].into_iter().filter(|number| range.contains(*number)).map(Value::from).collect()
        }
        Kind::Variant(names) => names().into_iter().map(Value::from).collect(),
        Kind::Text(_) => vec![json!("reward")],
        Kind::Own { .. } | Kind::Part { .. } => Vec::new(),
    }
}

#[test]
fn every_accepted_value_of_every_setting_is_read_into_its_plan() {
    for (section, setting) in settings() {
        for value in accepted(setting) {
            for name in std::iter::once(&setting.name).chain(setting.aliases) {
                let mut given = json!({*name: value});
                // A setting that depends on another one needs that one too.
                if setting.lowest.is_some() || setting.name == "kl_estimator" {
                    given["estimator"] = json!("reinforce");
                    given["kl_in"] = json!(if value == "k1" { "reward" } else { "loss" });
                }
                if setting.name == "timeout_ms" {
                    given["deadline_ms"] = json!(604_800_000);
                }
                if setting.name == "overlap" {
                    given["steps_per_generation"] = json!(2);
                }
                let at_name = format!("/{}/{name}:", section.name);
                let own: Vec<_> =
                    errors(section, &given).into_iter().filter(|error| error.starts_with(&at_name)).collect();
                assert_eq!(own, [""; 0], "{}.{name} = {value}", section.name);
            }
        }
    }
}

#[test]
fn a_default_is_one_of_the_accepted_values() {
    for (section, setting) in settings() {
        if matches!(setting.default, DefaultValue::Nothing | DefaultValue::Follows(..)) {
            continue;
        }
        let default = setting.default.value(&Values::default());
        let own = errors(section, &json!({setting.name: default}));
        let own: Vec<_> = own.iter().filter(|error| error.contains(&format!("/{}:", setting.name))).collect();
        assert!(own.is_empty(), "{}.{}: {own:?}", section.name, setting.name);
    }
}

#[test]
fn the_schema_has_every_setting_and_spelling_and_the_limits_of_the_reader() {
    for section in SECTIONS {
        let schema = section.schema();
        let names = section.settings.iter().flat_map(|setting| std::iter::once(&setting.name).chain(setting.aliases));
        let mut names: Vec<_> = names.map(|name| (*name).to_owned()).collect();
        names.sort();
        assert_eq!(schema.properties.keys().cloned().collect::<Vec<_>>(), names, "{}", section.name);
        for setting in section.settings {
            let Some(RefOr::T(Schema::Object(property))) = schema.properties.get(setting.name) else { continue };
            let property = serde_json::to_value(property).unwrap();
            if let Kind::Whole(low, high) = setting.kind {
                assert_eq!(
                    (&property["minimum"], &property["maximum"]),
                    (&json!(low), &json!(high)),
                    "{}",
                    setting.name
                );
                let outside = json!({setting.name: high + 1});
                assert!(
                    errors(section, &outside).iter().any(|error| error.contains("out_of_range")),
                    "{}",
                    setting.name
                );
            }
        }
    }
}

#[test]
fn the_form_shows_each_place_once() {
    let mut places: Vec<_> = settings().map(|(_, setting)| setting.prominence).filter(|place| *place > 0).collect();
    places.sort_unstable();
    assert!(places.windows(2).all(|pair| pair[0] < pair[1]), "{places:?}");
}
