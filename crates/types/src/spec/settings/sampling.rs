//! The settings of rollouts.

use serde_json::{Value, json};
use utoipa::PartialSchema;

use super::DefaultValue::{EmptyObject, Number, Whole, Words};
use super::{Form, Kind, Range, Section, Setting, Trl};
use crate::spec::plan::SamplingPlan;
use crate::spec::reader::Field;
use crate::spec::schema::any;

pub(super) const TOP_P: Range = Range::above(0.0).at_most(1.0).noting("1 = off");
pub(super) const MIN_P: Range = Range::at_least(0.0).noting("0 = off").below(1.0);
pub(super) const REPETITION_PENALTY: Range = Range::above(0.0).noting("1 = off").at_most(10.0);
pub(in crate::spec) const GREEDY: Range = Range::at_least(0.0).noting("0 = greedy").at_most(100.0);
pub(super) const TOP_K: (u64, u64) = (0, u32::MAX as u64);
const MAX_STOP_STRINGS: usize = 16;
const MAX_STOP_CHARS: usize = 200;

/// The temperature setting where completions may be greedy, instead of the table's.
pub(in crate::spec) static GREEDY_TEMPERATURE: Setting = Setting::number("temperature", GREEDY);

pub(in crate::spec) static SAMPLING: Section = Section::new(
    "sampling",
    "Sampling",
    "Rollouts.",
    &[
        // The default of TRL 1.16; before TRL 1.10 it was 256.
        Setting::whole("max_completion_length", 1, 1_000_000)
            .default(Whole(256))
            .trl(Trl::Key(&["max_completion_length"], Form::Plain, Whole(512)))
            .prominent(5),
        Setting::number("temperature", Range::above(0.0).at_most(100.0))
            .first()
            .hint("at 0 all completions of a prompt are equal and every advantage is 0; evaluation may be greedy: eval.temperature 0")
            .default(Number(1.0))
            .trl(Trl::Key(&["temperature"], Form::Plain, Whole(1)))
            .prominent(6),
        Setting::number("top_p", TOP_P).default(Number(1.0)).trl(Trl::Key(&["top_p"], Form::Plain, Whole(1))),
        Setting::whole("top_k", TOP_K.0, TOP_K.1).default(Whole(0)).trl(Trl::Key(&["top_k"], Form::Plain, Whole(0))),
        Setting::number("min_p", MIN_P).default(Number(0.0)).trl(Trl::Key(&["min_p"], Form::Plain, Whole(0))),
        Setting::number("repetition_penalty", REPETITION_PENALTY)
            .default(Number(1.0))
            .trl(Trl::Key(&["repetition_penalty"], Form::Plain, Whole(1))),
        Setting::new("stop", Kind::Own { read: read_stop, schema: any, says: "a text, or a list of at most 16" })
            .default(Words(&[]))
            .trl(Trl::Own(&["generation_kwargs"])),
        Setting::new("chat_template_kwargs", Kind::Own { read: read_object, schema: any, says: "an object" })
            .default(EmptyObject)
            .trl(Trl::Own(&["chat_template_kwargs"])),
    ],
)
.of_plan(SamplingPlan::schema);

fn read_stop(field: &Field<'_>) -> Option<Value> {
    if field.value().is_some_and(Value::is_string) {
        return field.string(MAX_STOP_CHARS).filter(|text| !text.is_empty()).map(|text| json!([text]));
    }
    let items = field.items()?;
    if items.len() > MAX_STOP_STRINGS {
        field.fail(
            "out_of_range",
            format!("a job may have at most {MAX_STOP_STRINGS} stop strings, not {}", items.len()),
        );
    }
    let mut stop = Vec::new();
    for item in items.iter().take(MAX_STOP_STRINGS) {
        match item.string(MAX_STOP_CHARS) {
            Some("") => item.fail("invalid_value", "an empty stop string would end every completion at once"),
            Some(text) => stop.push(text),
            None => {}
        }
    }
    Some(json!(stop))
}

/// Reads the variables of chat templates. Tools have fields of their own, which are checked.
fn read_object(field: &Field<'_>) -> Option<Value> {
    let variables = field.map()?;
    if variables.contains_key("tools") {
        field.fail_at("tools", "invalid_value", "tools are not a variable of the chat template: leave 'tools' out");
    }
    Some(Value::Object(variables.clone()))
}
