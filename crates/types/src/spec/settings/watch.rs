//! The settings of early stopping and of the doctor.

use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{ObjectBuilder, OneOfBuilder, Schema, Type};

use super::DefaultValue::{Number, Whole, Word};
use super::{Kind, Range, Section, Setting, words_of};
use crate::event::{OnAlert, Rule};
use crate::spec::schema::{closed, flag, words};

pub(in crate::spec) static EARLY_STOPPING: Section = Section::new(
    "early_stopping",
    "Early stopping",
    "Ends a run that does not get better, as succeeded; its best checkpoint is its result.",
    &[
        Setting::new("metric", Kind::Text(200))
            .doc("Looked at after each evaluation; default: checkpoints.metric_for_best."),
        Setting::flag("greater_is_better").doc("Default: by the metric's name."),
        Setting::whole("patience", 1, 10_000)
            .doc("Evaluations in a row without a new best that end the run.")
            .hint("evaluations without a new best")
            .default(Whole(3)),
        Setting::number("min_delta", Range::at_least(0.0))
            .doc("A new best is better by more than this.")
            .default(Number(0.0)),
    ],
)
.optional();

pub(in crate::spec) static DOCTOR: Section = Section::new(
    "doctor",
    "Doctor",
    "What the doctor's alerts do.",
    &[
        Setting::word("on_alert", words_of::<OnAlert>).doc("What an alert does to the run.").default(Word("note")),
        Setting::new(
            "rules",
            Kind::Part { schema: rules, says: "an object: a rule's name, then `{enabled, on_alert}` or false" },
        )
        .label("Rules, as JSON"),
    ],
);

fn rules() -> RefOr<Schema> {
    let names = words_of::<OnAlert>();
    let rules = Rule::ALL.into_iter().fold(closed(&[]), |rules, rule| {
        let own = closed(&[])
            .property("enabled", flag("false = switched off.", true))
            .property("on_alert", words("Default: doctor.on_alert.", &names))
            .build();
        let off = ObjectBuilder::new().schema_type(Type::Boolean).build();
        rules.property(rule.as_str(), OneOfBuilder::new().item(own).item(off))
    });
    rules.description(Some("Rules that differ, by name; false switches one off.")).into()
}
