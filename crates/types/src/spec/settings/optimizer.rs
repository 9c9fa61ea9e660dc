//! The settings of the optimizer and its schedule.

use utoipa::PartialSchema;

use super::DefaultValue::{Number, Variant, Whole};
use super::{Form, MAX_STEPS, Range, Resume, Section, Setting, Trl, variant_names};
use crate::spec::plan::OptimizerPlan;
use crate::spec::{LORA_LEARNING_RATE, LrSchedulerType, OptimizerKind};

const DECAY: Range = Range::at_least(0.0).below(1.0);

// TRL's defaults are those of transformers, except the learning rate, which is RLOOConfig's.
pub(in crate::spec) static OPTIMIZER: Section = Section::new(
    "optimizer",
    "Optimizer",
    "The optimizer and its schedule.",
    &[
        Setting::variant("kind", variant_names::<OptimizerKind>)
            .doc("Optimizer: AdamW with moments in 32 bits (`adamw`) or in 8 bits (`adamw_8bit`).")
            .default(Variant("adamw"))
            .trl(Trl::Own(&["optim"]))
            .resume(Resume::FixedUnless { key: "optimizer", value: "adamw" }),
        // The default learning rate of an adapter. Full fine-tuning has a different default.
        Setting::number("learning_rate", Range::above(0.0).at_most(1.0))
            .default(Number(LORA_LEARNING_RATE))
            .trl(Trl::Key(&["learning_rate"], Form::Number, Number(1e-6)))
            .prominent(7),
        Setting::number("adam_beta1", DECAY).default(Number(0.9)).trl(Trl::Key(
            &["adam_beta1"],
            Form::Number,
            Number(0.9),
        )),
        Setting::number("adam_beta2", DECAY).default(Number(0.999)).trl(Trl::Key(
            &["adam_beta2"],
            Form::Number,
            Number(0.999),
        )),
        Setting::number("adam_epsilon", Range::above(0.0)).default(Number(1e-8)).trl(Trl::Key(
            &["adam_epsilon"],
            Form::Number,
            Number(1e-8),
        )),
        Setting::number("weight_decay", Range::at_least(0.0)).default(Number(0.0)).trl(Trl::Key(
            &["weight_decay"],
            Form::Number,
            Number(0.0),
        )),
        Setting::number("max_grad_norm", Range::at_least(0.0).noting("0 = off")).default(Number(1.0)).trl(Trl::Key(
            &["max_grad_norm"],
            Form::Number,
            Number(1.0),
        )),
        Setting::variant("lr_scheduler_type", variant_names::<LrSchedulerType>)
            .default(Variant("constant"))
            .trl(Trl::Own(&["lr_scheduler_type", "lr_scheduler_kwargs"])),
        Setting::whole("warmup_steps", 0, MAX_STEPS).default(Whole(0)).trl(Trl::Own(&["warmup_steps", "warmup_ratio"])),
    ],
)
.of_plan(OptimizerPlan::schema);
