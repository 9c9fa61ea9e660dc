//! The settings of batches, length and seed.

use utoipa::PartialSchema;

use super::DefaultValue::{Flag, Whole, Word};
use super::{Form, Range, Resume, Section, Setting, Trl, words_of};
use crate::spec::ComputeDtype;
use crate::spec::plan::TrainingPlan;

/// The most optimizer steps a job may have.
pub(in crate::spec) const MAX_STEPS: u64 = 10_000_000;
/// JSON numbers beyond this lose digits in many clients.
pub(in crate::spec) const MAX_SEED: u64 = (1 << 53) - 1;

pub(in crate::spec) static TRAINING: Section = Section::new(
    "training",
    "Training",
    "Batches, length, seed.",
    &[
        Setting::whole("prompts_per_step", 1, 1_000_000)
            .default(Whole(8))
            .trl(Trl::Own(&["per_device_train_batch_size", "gradient_accumulation_steps"]))
            .resume(Resume::Fixed)
            .prominent(2),
        Setting::whole("max_steps", 1, MAX_STEPS)
            .hint("leave it out for one pass over the dataset")
            .trl(Trl::Own(&["max_steps"]))
            .prominent(1),
        Setting::number("num_train_epochs", Range::above(0.0).at_most(10_000.0))
            .doc("Passes over the dataset, instead of max_steps; default 1.")
            .trl(Trl::Own(&["num_train_epochs"])),
        Setting::whole("seed", 0, MAX_SEED)
            .default(Whole(42))
            .trl(Trl::Key(&["seed"], Form::Plain, Whole(42)))
            .resume(Resume::Fixed),
        Setting::flag("shuffle_dataset")
            .default(Flag(true))
            .trl(Trl::Key(&["shuffle_dataset"], Form::Flag, Flag(true)))
            .resume(Resume::Fixed),
        Setting::word("dtype", words_of::<ComputeDtype>)
            .doc("Precision of the matrix products; default f32.")
            .default(Word("f32"))
            .trl(Trl::Own(&["bf16", "fp16"]))
            .resume(Resume::FixedUnless { key: "dtype", value: "f32" }),
        Setting::whole("micro_batch_tokens", 16, 1_000_000)
            .doc("Tokens of a micro-batch, at least one group; default: as memory allows.")
            .hint("leave it out: it follows from the memory there is, and changes no result but by rounding"),
        Setting::flag("gradient_checkpointing")
            .doc("Compute activations again in the backward instead of keeping them; changes no number. Default: only where memory asks for it."),
        Setting::whole("max_attempts", 1, 10_000).hint("leave it out for no limit"),
    ],
)
.of_plan(TrainingPlan::schema);
