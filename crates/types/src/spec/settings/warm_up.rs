//! The settings of the warm-up.

use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{Ref, Schema};

use super::DefaultValue::{Whole, Word};
use super::{Kind, MAX_STEPS, Range, Resume, Section, Setting, words_of};
use crate::spec::WarmUpReference;
use crate::spec::schema::dataset;

/// Rows of a warm-up step when the job does not say.
const BATCH_SIZE: u64 = 16;

pub(in crate::spec) static WARM_UP: Section = Section::new(
    "warm_up",
    "Warm-up",
    "Steps of supervised training before RLOO's first step: cross-entropy on the final assistant turn of each row, on the same adapter or weights.",
    &[
        Setting::new("dataset", Kind::Part { schema: rows, says: "as the job's `dataset`" })
            .required("give the rows to learn from")
            .doc("Rows with an answer: chat messages that end with the assistant's turn, or a `prompt` and a `completion`.")
            .resume(Resume::FixedInOwnForm),
        Setting::new("map", Kind::Part { schema: map, says: "an object, as the `map` of a data set of the hub" })
            .doc("What each row becomes, as the `map` of a data set of the hub; `completion` names the answer.")
            .label("Map, as JSON")
            .resume(Resume::FixedInOwnForm),
        Setting::whole("steps", 1, MAX_STEPS)
            .required("give the number of warm-up steps, 50 say")
            .doc("Optimizer steps of the warm-up. The job counts on from there: RLOO's `training.max_steps` follow.")
            .resume(Resume::FixedInOwnForm),
        Setting::number("learning_rate", Range::above(0.0).at_most(1.0))
            .doc("Constant. Default: optimizer.learning_rate.")
            .resume(Resume::FixedInOwnForm),
        Setting::whole("batch_size", 1, 65_536)
            .doc("Rows of a warm-up step.")
            .default(Whole(BATCH_SIZE))
            .resume(Resume::FixedInOwnForm),
        Setting::word("reference", words_of::<WarmUpReference>)
            .doc("What the KL penalty is measured against: `warmed`, a frozen copy of the weights at the end of the warm-up; `base`, what it would be without a warm-up. Required beside a warm_start.")
            .default(Word("warmed"))
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
