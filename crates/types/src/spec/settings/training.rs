//! The settings of batch sizes, number of steps and seed.

use utoipa::PartialSchema;

use super::DefaultValue::{Flag, Variant, Whole};
use super::{Form, Range, Resume, Section, Setting, Trl, variant_names};
use crate::spec::plan::TrainingPlan;
use crate::spec::{ComputeDtype, QuantType};

/// Maximum number of optimizer steps per job.
pub(in crate::spec) const MAX_STEPS: u64 = 10_000_000;
/// Maximum seed. Larger JSON numbers lose digits in many clients.
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
            .doc("Passes over the dataset; default: 1. Mutually exclusive with `max_steps`.")
            .trl(Trl::Own(&["num_train_epochs"])),
        Setting::whole("seed", 0, MAX_SEED)
            .default(Whole(42))
            .trl(Trl::Key(&["seed"], Form::Plain, Whole(42)))
            .resume(Resume::Fixed),
        Setting::flag("shuffle_dataset")
            .default(Flag(true))
            .trl(Trl::Key(&["shuffle_dataset"], Form::Flag, Flag(true)))
            .resume(Resume::Fixed),
        Setting::variant("dtype", variant_names::<ComputeDtype>)
            .doc("Precision of the matrix products; default: f32.")
            .default(Variant("f32"))
            .trl(Trl::Own(&["bf16", "fp16"]))
            .resume(Resume::FixedUnless { key: "dtype", value: "f32" }),
        Setting::flag("load_in_4bit")
            .default(Flag(false))
            .trl(Trl::Key(&["load_in_4bit"], Form::Flag, Flag(false)))
            .resume(Resume::FixedUnless { key: "load_in_4bit", value: "" }),
        Setting::variant("bnb_4bit_quant_type", variant_names::<QuantType>)
            .doc("The 4-bit format to which `load_in_4bit` quantizes; default: nf4.")
            .default(Variant("nf4"))
            .trl(Trl::Key(&["bnb_4bit_quant_type"], Form::AsSent, Variant("nf4")))
            .resume(Resume::FixedUnless { key: "bnb_4bit_quant_type", value: "" }),
        Setting::flag("use_bnb_nested_quant")
            .default(Flag(false))
            .trl(Trl::Key(&["use_bnb_nested_quant"], Form::Flag, Flag(false)))
            .resume(Resume::FixedUnless { key: "use_bnb_nested_quant", value: "" }),
        Setting::whole("micro_batch_tokens", 16, 1_000_000)
            .doc("Tokens (prompts and completions) per micro-batch, with at least one group each; default: depends on the available memory.")
            .hint("leave it out: the default depends on the available memory, and results change only by rounding"),
        Setting::flag("gradient_checkpointing")
            .doc("Whether to recompute activations in the backward pass instead of keeping them. Does not change the results. Default: only if memory requires it."),
        Setting::whole("max_attempts", 1, 10_000).hint("leave it out for no limit"),
    ],
)
.of_plan(TrainingPlan::schema);
