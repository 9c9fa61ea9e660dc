//! The settings of evaluation and of warm starts.

use serde_json::{Value, json};
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{AdditionalProperties, ObjectBuilder, OneOfBuilder, Schema, Type};

use super::DefaultValue::{Flag, Number, Whole};
use super::sampling::{GREEDY, MIN_P, REPETITION_PENALTY, TOP_K, TOP_P};
use super::{Kind, MAX_STEPS, Range, Resume, Section, Setting, Trl, variant_names};
use crate::id::{AdapterId, CheckpointId};
use crate::spec::Reference;
use crate::spec::reader::Field;
use crate::spec::schema::{dataset, rewards, string};

/// Default of how far the mean reward on a guard set may fall.
pub(in crate::spec) const DEFAULT_MARGIN: f64 = 0.02;

pub(in crate::spec) static EVAL: Section = Section::new(
    "eval",
    "Evaluation",
    "Evaluation on a separate dataset or on held-out rows, with the job's rewards or with separate ones.",
    &[
        Setting::new("dataset", Kind::Part { schema: eval_dataset, says: "`{\"id\": …}` or `{\"records\": […]}`" }),
        Setting::number("fraction", Range::above(0.0).below(1.0))
            .first()
            .doc("Share of the training dataset to hold out for evaluation, chosen by seed. Mutually exclusive with `dataset`.")
            .resume(Resume::FixedInOwnForm),
        Setting::whole("every_steps", 1, MAX_STEPS)
            .doc("Optimizer steps between evaluations. The last step is always evaluated.")
            .default(Whole(20))
            .trl(Trl::Own(&["eval_strategy", "evaluation_strategy", "eval_steps"])),
        Setting::flag("before_start")
            .doc("Whether to evaluate before the first step too.")
            .default(Flag(true))
            .trl(Trl::Own(&["eval_on_start"])),
        Setting::whole("num_generations", 1, 1024)
            .doc("Completions sampled per prompt.")
            .default(Whole(1))
            .trl(Trl::Own(&["num_generations_eval"])),
        Setting::number("temperature", GREEDY).doc("Sampling temperature in evaluations; 0 = greedy.").default(Number(0.0)),
        Setting::number("top_p", TOP_P).doc("Top-p in evaluations; default: sampling.top_p."),
        Setting::whole("top_k", TOP_K.0, TOP_K.1).doc("Top-k in evaluations; default: sampling.top_k."),
        Setting::number("min_p", MIN_P).doc("Min-p in evaluations; default: sampling.min_p."),
        Setting::number("repetition_penalty", REPETITION_PENALTY).doc("Repetition penalty in evaluations; default: sampling.repetition_penalty."),
        Setting::new("rewards", Kind::Part { schema: rewards, says: "a list of rewards" })
            .doc("Rewards used in evaluations; default: the job's rewards.")
            .label("Evaluation rewards, as JSON"),
        Setting::number("test_fraction", Range::at_least(0.0).below(1.0))
            .doc("Share of the training dataset that only the verdict uses, at most 500 rows; 0 = none. Default: 0.1 with `fraction`, unless this would be fewer than 50 rows.")
            .resume(Resume::FixedInOwnForm),
        Setting::new(
            "test_dataset",
            Kind::Part { schema: test_dataset, says: "`{\"id\": …}` or `{\"records\": […]}`" },
        ),
        Setting::new("guard", Kind::Part { schema: guard, says: "`{\"dataset\": …, \"rewards\": […], \"margin\": 0.02}`" })
            .label("Guard set, as JSON"),
        Setting::flag("auto_verdict")
            .doc("Whether the server automatically compares the base model with the trained model when the job succeeds.")
            .default(Flag(true)),
    ],
)
.optional();

fn eval_dataset() -> RefOr<Schema> {
    dataset("The evaluation prompts.")
}

fn test_dataset() -> RefOr<Schema> {
    dataset("Prompts that only the verdict uses, instead of a share of the training dataset.")
}

fn guard() -> RefOr<Schema> {
    let margin = ObjectBuilder::new()
        .schema_type(Type::Number)
        .minimum(Some(0.0))
        .default(Some(json!(DEFAULT_MARGIN)))
        .description(Some("How far the mean reward may fall. The lower end of the 95 % interval of the difference must be at least −margin."));
    ObjectBuilder::new()
        .property("dataset", dataset("The prompts of the guard set."))
        .property("rewards", rewards())
        .property("margin", margin)
        .required("dataset")
        .additional_properties(Some(AdditionalProperties::FreeForm(false)))
        .description(Some(
            "A guard set: prompts on which training must not make the model worse. Only the verdict uses them.",
        ))
        .into()
}

pub(in crate::spec) static WARM_START: Section = Section::new(
    "warm_start",
    "Warm start",
    "Starts from the weights of a checkpoint or an adapter, with a fresh optimizer at step 0.",
    &[
        Setting::new("checkpoint", Kind::Own { read: read_checkpoint, schema: id, says: "the id of a checkpoint" })
            .doc("Checkpoint (`ckpt_…`) of a job with the same model, whose files are kept with the new job. Mutually exclusive with `adapter`.")
            .resume(Resume::FixedInOwnForm),
        Setting::new(
            "adapter",
            Kind::Own {
                read: read_adapter,
                schema: adapter,
                says: "one of {\"hub\": \"org/name\"}, {\"upload\": \"adp_…\"} and {\"checkpoint\": \"ckpt_…\"}",
            },
        )
        .doc("PEFT adapter of the same model: from the Hugging Face Hub, or uploaded with POST /adapters. Its shapes are checked.")
        .label("A PEFT adapter, as JSON")
        .resume(Resume::FixedInOwnForm),
        Setting::variant("reference", variant_names::<Reference>)
            .required("choose the reference of the KL penalty: \"base\" (the base model) or \"initial\" (the weights that the job starts from)")
            .doc("Reference model of the KL penalty: `base` (the base model) or `initial` (a frozen copy of the starting weights).")
            .resume(Resume::FixedInOwnForm),
    ],
)
.optional();

fn id() -> RefOr<Schema> {
    string("")
}

fn adapter() -> RefOr<Schema> {
    let one = |name: &str, value: RefOr<Schema>| ObjectBuilder::new().property(name, value).required(name);
    let hub = one("hub", string("Repository on the Hugging Face Hub: `org/name`, or `org/name@revision`."))
        .property("revision", string("Branch, tag or commit; default: `main`."));
    let upload = one("upload", string("`adp_…`, from POST /adapters."));
    let checkpoint = one("checkpoint", string("Id of a checkpoint (`ckpt_…`), as in warm_start.checkpoint."));
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
