//! The settings of evaluation and of warm starts.

use serde_json::{Value, json};
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::Schema;

use super::DefaultValue::{Flag, Number, Whole};
use super::sampling::{GREEDY, MIN_P, REPETITION_PENALTY, TOP_K, TOP_P};
use super::{Kind, MAX_STEPS, Range, Resume, Section, Setting, Trl, words_of};
use crate::id::CheckpointId;
use crate::spec::Reference;
use crate::spec::reader::Field;
use crate::spec::schema::{dataset, rewards, string};

pub(in crate::spec) static EVAL: Section = Section::new(
    "eval",
    "Evaluation",
    "Evaluation on prompts of its own, or on held-out rows; by the job's rewards or by its own.",
    &[
        Setting::new("dataset", Kind::Part { schema: eval_dataset, says: "`{\"id\": …}` or `{\"records\": […]}`" }),
        Setting::number("fraction", Range::above(0.0).below(1.0))
            .first()
            .doc("Instead of a dataset: the share of the training dataset to hold out, by seed.")
            .resume(Resume::FixedInOwnForm),
        Setting::whole("every_steps", 1, MAX_STEPS)
            .doc("Optimizer steps between evaluations; the last step is always evaluated.")
            .default(Whole(20))
            .trl(Trl::Own(&["eval_strategy", "evaluation_strategy", "eval_steps"])),
        Setting::flag("before_start")
            .doc("Evaluate before the first step too.")
            .default(Flag(true))
            .trl(Trl::Own(&["eval_on_start"])),
        Setting::whole("num_generations", 1, 1024)
            .doc("Completions a prompt.")
            .default(Whole(1))
            .trl(Trl::Own(&["num_generations_eval"])),
        Setting::number("temperature", GREEDY).doc("0 = greedy.").default(Number(0.0)),
        Setting::number("top_p", TOP_P).doc("Default: sampling.top_p."),
        Setting::whole("top_k", TOP_K.0, TOP_K.1).doc("Default: sampling.top_k."),
        Setting::number("min_p", MIN_P).doc("Default: sampling.min_p."),
        Setting::number("repetition_penalty", REPETITION_PENALTY).doc("Default: sampling.repetition_penalty."),
        Setting::new("rewards", Kind::Part { schema: rewards, says: "a list of rewards" })
            .doc("Rewards of its own; default: the job's.")
            .label("Rewards of its own, as JSON"),
    ],
)
.optional();

fn eval_dataset() -> RefOr<Schema> {
    dataset("The evaluation prompts.")
}

pub(in crate::spec) static WARM_START: Section = Section::new(
    "warm_start",
    "Warm start",
    "Begin with the weights of a checkpoint, fresh optimizer and step 0.",
    &[
        Setting::new("checkpoint", Kind::Own { read: read_checkpoint, schema: id, says: "the id of a checkpoint" })
            .required("the id of a checkpoint; GET /jobs/{id}/checkpoints lists a job's")
            .doc("`ckpt_…` of a job with the same model; its files are kept with the new job.")
            .resume(Resume::FixedInOwnForm),
        Setting::word("reference", words_of::<Reference>)
            .required("say what the KL penalty is measured against: \"base\" (the base model) or \"initial\" (the checkpoint's weights)")
            .doc("What the KL penalty is measured against.")
            .resume(Resume::FixedInOwnForm),
    ],
)
.optional();

fn id() -> RefOr<Schema> {
    string("")
}

fn read_checkpoint(field: &Field<'_>) -> Option<Value> {
    match field.string(64)?.parse::<CheckpointId>() {
        Ok(id) => Some(json!(id)),
        Err(error) => {
            field.fail("invalid_value", format!("{error}"));
            None
        }
    }
}
