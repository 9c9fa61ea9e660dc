//! The settings of the warm-up.

use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{Ref, Schema};

use super::DefaultValue::{Variant, Whole};
use super::{Kind, MAX_STEPS, Range, Resume, Section, Setting, variant_names};
use crate::spec::WarmUpReference;
use crate::spec::schema::dataset;

/// Default number of rows per warm-up step.
const BATCH_SIZE: u64 = 16;

pub(in crate::spec) static WARM_UP: Section = Section::new(
    "warm_up",
    "Warm-up",
    "Supervised training steps before the first RLOO step: cross-entropy on the final assistant turn of each row, with the same adapter or weights.",
    &[
        Setting::new("dataset", Kind::Part { schema: rows, says: "as the job's `dataset`" })
            .required("give the rows to learn from")
            .doc("Rows with an answer: chat messages that end with an assistant turn, or a `prompt` and a `completion`.")
            .resume(Resume::FixedInOwnForm),
        Setting::new("map", Kind::Part { schema: map, says: "an object, as the `map` of a hub dataset" })
            .doc("How each row is mapped, as in the `map` of a hub dataset; `completion` names the answer.")
            .label("Map, as JSON")
            .resume(Resume::FixedInOwnForm),
        Setting::whole("steps", 1, MAX_STEPS)
            .required("give the number of warm-up steps, for example 50")
            .doc("Optimizer steps of the warm-up. They are the first steps of the job; the `training.max_steps` RLOO steps follow.")
            .resume(Resume::FixedInOwnForm),
        Setting::number("learning_rate", Range::above(0.0).at_most(1.0))
            .doc("Learning rate, constant over the warm-up; default: optimizer.learning_rate.")
            .resume(Resume::FixedInOwnForm),
        Setting::whole("batch_size", 1, 65_536)
            .doc("Rows per warm-up step.")
            .default(Whole(BATCH_SIZE))
            .resume(Resume::FixedInOwnForm),
        Setting::variant("reference", variant_names::<WarmUpReference>)
            .doc("Reference model of the KL penalty: `warmed` (a frozen copy of the weights at the end of the warm-up) or `base` (the reference that the job would have without a warm-up). Required together with `warm_start`.")
            .default(Variant("warmed"))
            .resume(Resume::FixedInOwnForm),
    ],
)
.optional();

fn rows() -> RefOr<Schema> {
    dataset("The rows to learn from.")
}

fn map() -> RefOr<Schema> {
    Ref::from_schema_name("DatasetMap").into()
}
