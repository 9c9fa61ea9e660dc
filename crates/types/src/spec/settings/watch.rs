//! The settings of early stopping and of the alert rules.

use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{ObjectBuilder, OneOfBuilder, Schema, Type};

use super::DefaultValue::{Number, Variant, Whole};
use super::{Kind, Range, Section, Setting, variant_names};
use crate::event::{OnAlert, Rule};
use crate::spec::schema::{closed, enumeration, flag};

pub(in crate::spec) static EARLY_STOPPING: Section = Section::new(
    "early_stopping",
    "Early stopping",
    "Ends a run that no longer improves. The job succeeds, and its best checkpoint is its result.",
    &[
        Setting::new("metric", Kind::Text(200))
            .doc("Metric that is checked after each evaluation; default: checkpoints.metric_for_best."),
        Setting::flag("greater_is_better").doc("Whether a higher value is better; default: by the metric's name."),
        Setting::whole("patience", 1, 10_000)
            .doc("Number of evaluations in a row without a new best value after which the run ends.")
            .hint("evaluations without a new best")
            .default(Whole(3)),
        Setting::number("min_delta", Range::at_least(0.0))
            .doc("Minimum improvement that counts as a new best value.")
            .default(Number(0.0)),
    ],
)
.optional();

pub(in crate::spec) static DOCTOR: Section = Section::new(
    "doctor",
    "Doctor",
    "Alert rules, and what happens on an alert.",
    &[
        Setting::variant("on_alert", variant_names::<OnAlert>).doc("What happens on an alert: `note` records it, `pause` pauses the job, `stop` ends the job with its last good checkpoint as its result.").default(Variant("note")),
        Setting::new(
            "rules",
            Kind::Part { schema: rules, says: "an object: a rule's name, then `{enabled, on_alert}` or false" },
        )
        .label("Rules, as JSON"),
    ],
);

fn rules() -> RefOr<Schema> {
    let names = variant_names::<OnAlert>();
    let rules = Rule::ALL.into_iter().fold(closed(&[]), |rules, rule| {
        let own = closed(&[])
            .property("enabled", flag("Whether the rule is on.", true))
            .property(
                "on_alert",
                enumeration("What happens on an alert of this rule; default: doctor.on_alert.", &names),
            )
            .build();
        let off = ObjectBuilder::new().schema_type(Type::Boolean).build();
        rules.property(rule.as_str(), OneOfBuilder::new().item(own).item(off))
    });
    rules.description(Some("Rules with settings of their own, by rule name; false turns a rule off.")).into()
}
