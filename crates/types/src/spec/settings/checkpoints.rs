//! The settings of checkpoints: when to save and which ones to keep.

use utoipa::PartialSchema;

use serde_json::{Value, json};

use super::DefaultValue::Whole;
use super::{Kind, MAX_STEPS, Section, Setting, Trl};
use crate::spec::plan::{CertificatePlan, CheckpointPlan};
use crate::spec::reader::Field;
use crate::spec::schema::any;

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

/// Maximum number of prompts of a job's own for its certificates, and of characters in each.
const MAX_PROMPTS: usize = 64;
const MAX_PROMPT_CHARS: usize = 1000;

pub(in crate::spec) static CERTIFICATE: Section = Section::new(
    "certificate",
    "Certificate",
    "The prompts of the checkpoints' certificates. Without this section, they are those that are part of rlood.",
    &[Setting::new("prompts", Kind::Own { read: read_prompts, schema: any, says: "a list of 1 to 64 texts" })
        .required("give a list of texts, or leave out certificate")],
)
.of_plan(CertificatePlan::schema)
.optional();

fn read_prompts(field: &Field<'_>) -> Option<Value> {
    let items = field.items()?;
    if !(1..=MAX_PROMPTS).contains(&items.len()) {
        let detail = format!("a job must have 1 to {MAX_PROMPTS} prompts for its certificates, not {}", items.len());
        field.fail("out_of_range", detail);
    }
    let texts: Vec<&str> = items.iter().take(MAX_PROMPTS).filter_map(|item| item.nonempty(MAX_PROMPT_CHARS)).collect();
    Some(json!(texts))
}
