//! The settings of evaluation and of warm starts.

use serde_json::{Value, json};
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{AdditionalProperties, ObjectBuilder, OneOfBuilder, Schema, Type};

use super::DefaultValue::{Flag, Number, Whole};
use super::sampling::{GREEDY, MIN_P, REPETITION_PENALTY, TOP_K, TOP_P};
use super::{Kind, MAX_STEPS, Range, Resume, Section, Setting, Trl, words_of};
use crate::id::{AdapterId, CheckpointId};
use crate::spec::Reference;
use crate::spec::reader::Field;
use crate::spec::schema::{dataset, rewards, string};

/// How far the reward of a guard set may fall by default.
pub(in crate::spec) const DEFAULT_MARGIN: f64 = 0.02;

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
        Setting::number("test_fraction", Range::at_least(0.0).below(1.0))
            .doc("The share of the training dataset that only the verdict reads, at most 500 rows; 0 = none. Default: 0.1 where `fraction` is given, unless these would be fewer than 50 rows.")
            .resume(Resume::FixedInOwnForm),
        Setting::new(
            "test_dataset",
            Kind::Part { schema: test_dataset, says: "`{\"id\": …}` or `{\"records\": […]}`" },
        ),
        Setting::new("guard", Kind::Part { schema: guard, says: "`{\"dataset\": …, \"rewards\": […], \"margin\": 0.02}`" })
            .label("Guard set, as JSON"),
        Setting::flag("auto_verdict")
            .doc("Whether the server compares base model and trained model by itself when the job has succeeded.")
            .default(Flag(true)),
    ],
)
.optional();

fn eval_dataset() -> RefOr<Schema> {
    dataset("The evaluation prompts.")
}

fn test_dataset() -> RefOr<Schema> {
    dataset("Prompts that only the verdict reads, instead of a share of the training dataset.")
}

fn guard() -> RefOr<Schema> {
    let margin = ObjectBuilder::new()
        .schema_type(Type::Number)
        .minimum(Some(0.0))
        .default(Some(json!(DEFAULT_MARGIN)))
        .description(Some("How far the mean reward may fall."));
    ObjectBuilder::new()
        .property("dataset", dataset("Its prompts."))
        .property("rewards", rewards())
        .property("margin", margin)
        .required("dataset")
        .additional_properties(Some(AdditionalProperties::FreeForm(false)))
        .description(Some("Prompts on which training must not make the model worse: the verdict looks at them."))
        .into()
}

pub(in crate::spec) static WARM_START: Section = Section::new(
    "warm_start",
    "Warm start",
    "Begin with the weights of a checkpoint or of an adapter, fresh optimizer and step 0.",
    &[
        Setting::new("checkpoint", Kind::Own { read: read_checkpoint, schema: id, says: "the id of a checkpoint" })
            .doc("`ckpt_…` of a job with the same model; its files are kept with the new job. This or `adapter`.")
            .resume(Resume::FixedInOwnForm),
        Setting::new(
            "adapter",
            Kind::Own {
                read: read_adapter,
                schema: adapter,
                says: "one of {\"hub\": \"org/name\"}, {\"upload\": \"adp_…\"} and {\"checkpoint\": \"ckpt_…\"}",
            },
        )
        .doc("A PEFT adapter of the same model from elsewhere: of the hub, or uploaded with POST /adapters. Its shapes are checked.")
        .label("A PEFT adapter, as JSON")
        .resume(Resume::FixedInOwnForm),
        Setting::word("reference", words_of::<Reference>)
            .required("say what the KL penalty is measured against: \"base\" (the base model) or \"initial\" (the weights that the job begins with)")
            .doc("What the KL penalty is measured against.")
            .resume(Resume::FixedInOwnForm),
    ],
)
.optional();

fn id() -> RefOr<Schema> {
    string("")
}

fn adapter() -> RefOr<Schema> {
    let one = |name: &str, value: RefOr<Schema>| ObjectBuilder::new().property(name, value).required(name);
    let hub = one("hub", string("A repository: `org/name`, or `org/name@revision`."))
        .property("revision", string("A branch, tag or commit; without, `main`."));
    let upload = one("upload", string("`adp_…`, from POST /adapters."));
    let checkpoint = one("checkpoint", string("`ckpt_…`, as warm_start.checkpoint."));
    OneOfBuilder::new().item(hub.build()).item(upload.build()).item(checkpoint.build()).into()
}

fn read_adapter(field: &Field<'_>) -> Option<Value> {
    let reader = field.object()?;
    let (hub, revision) = (reader.field("hub"), reader.field("revision"));
    let (upload, checkpoint) = (reader.field("upload"), reader.field("checkpoint"));
    reader.finish(|_, _| None);
    let given = [&hub, &upload, &checkpoint].iter().filter(|field| field.value().is_some()).count();
    if given != 1 {
        field.fail("invalid_value", "give one of hub, upload and checkpoint");
        return None;
    }
    if checkpoint.value().is_some() {
        return read_checkpoint(&checkpoint).map(|id| json!({ "checkpoint": id }));
    }
    if upload.value().is_some() {
        return match upload.string(64)?.parse::<AdapterId>() {
            Ok(id) => Some(json!({ "upload": id })),
            Err(error) => {
                upload.fail("invalid_value", error.to_string());
                None
            }
        };
    }
    let mut adapter = json!({"hub": hub.nonempty(200)?});
    if revision.value().is_some() {
        adapter["revision"] = json!(revision.nonempty(200)?);
    }
    Some(adapter)
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
