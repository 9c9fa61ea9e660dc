//! The settings of checkpoints: when to save and which ones to keep.

use utoipa::PartialSchema;

use super::DefaultValue::Whole;
use super::{Kind, MAX_STEPS, Section, Setting, Trl};
use crate::spec::plan::CheckpointPlan;

/// Maximum number of seconds between checkpoints, about a year.
const MAX_SECONDS: u64 = 31_622_400;

pub(in crate::spec) static CHECKPOINTS: Section = Section::new(
    "checkpoints",
    "Checkpoints",
    "When checkpoints are saved and which ones are kept.",
    &[
        Setting::whole("every_steps", 1, MAX_STEPS)
            .default(Whole(20))
            .trl(Trl::Own(&["save_steps", "save_strategy"]))
            .label("Checkpoint every")
            .prominent(9),
        Setting::whole("every_seconds", 1, MAX_SECONDS)
            .hint("leave it out to save checkpoints by steps only")
            .label("Checkpoint every … seconds"),
        Setting::whole("keep_last", 1, 1000)
            .hint("the newest one is what a job resumes from")
            .default(Whole(3))
            .trl(Trl::Own(&["save_total_limit"])),
        Setting::whole("keep_best", 0, 1000).default(Whole(1)),
        Setting::new("metric_for_best", Kind::Text(200)).trl(Trl::Own(&["metric_for_best_model"])),
        Setting::flag("greater_is_better").trl(Trl::Own(&["greater_is_better"])),
    ],
)
.of_plan(CheckpointPlan::schema);
