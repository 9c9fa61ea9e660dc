//! A generation request: the prompt, the checkpoint, and the sampling settings.

use serde_json::{Value, json};
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{AdditionalProperties, Array, ObjectBuilder, OneOfBuilder, Schema, Type};
use utoipa::{PartialSchema, ToSchema};

use super::foreign::advice;
use super::reader::{Errors, Field, FieldError, Reader};
use super::schema::{closed, described, enumeration, integer, integer_of, optional};
use super::sections::read_greedy_sampling;
use super::settings::{MAX_SEED, MAX_STEPS};
use super::{Plan, SamplingPlan};
use crate::dataset::check_prompt;
use crate::id::CheckpointId;

/// Maximum number of completions per model.
pub const MAX_GENERATIONS: u64 = 8;
/// Maximum size of a prompt as JSON, in bytes. Longer prompts do not fit into the context of any supported model.
const MAX_PROMPT_BYTES: usize = 4 << 20;

/// A request to generate completions with a job's models.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerateSpec {
    /// The prompt, as in a dataset: text, or a list of chat messages.
    pub prompt: Value,
    /// The checkpoint of the job.
    pub checkpoint: CheckpointChoice,
    /// Number of completions per model, 1 to 8.
    pub num_generations: u32,
    /// Random seed, the same for both models.
    pub seed: u64,
    /// The job's sampling settings with the requested changes. Temperature 0 = greedy.
    pub sampling: SamplingPlan,
}

/// Selects one of a job's checkpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CheckpointChoice {
    /// The job's result: the newest checkpoint, unless the job ended early.
    Result,
    /// The newest checkpoint of the job.
    Last,
    /// The best checkpoint by the job's metric.
    Best,
    /// The checkpoint of a step.
    Step(u64),
    /// A checkpoint by its id.
    Id(CheckpointId),
}

impl GenerateSpec {
    /// Reads a request. Missing settings are taken from the job's plan, with one completion.
    ///
    /// # Errors
    /// Returns all errors, with pointers into the document.
    pub fn read(document: &Value, plan: &Plan) -> Result<GenerateSpec, Vec<FieldError>> {
        let errors = Errors::default();
        let reader = Reader::document(document, &errors);
        let prompt = read_prompt(&reader);
        let spec = GenerateSpec {
            prompt,
            checkpoint: read_checkpoint(&reader.field("checkpoint")),
            num_generations: reader.field("num_generations").whole(1..=MAX_GENERATIONS).unwrap_or(1),
            seed: reader.field("seed").whole(0..=MAX_SEED).unwrap_or(plan.training.seed),
            sampling: read_greedy_sampling(reader.section("sampling"), &plan.sampling),
        };
        reader.finish(advice);
        let errors = errors.into_vec();
        if errors.is_empty() { Ok(spec) } else { Err(errors) }
    }
}

fn read_prompt(reader: &Reader<'_>) -> Value {
    let field = reader.required("prompt", "give the prompt: a text, or a list of chat messages as in a dataset");
    let Some(prompt) = field.value() else { return Value::Null };
    if let Err((code, detail)) = check_prompt(prompt) {
        field.fail(code, detail);
    } else if prompt.to_string().len() > MAX_PROMPT_BYTES {
        field.fail("out_of_range", format!("a prompt may have at most {MAX_PROMPT_BYTES} bytes"));
    }
    prompt.clone()
}

/// Reads `"last"`, `"best"`, a step or an id. The default, also for a rejected value, is the job's result.
pub(super) fn read_checkpoint(field: &Field<'_>) -> CheckpointChoice {
    let chosen = match field.value() {
        None => None,
        Some(Value::Number(_)) => field.whole(0..=MAX_STEPS).map(CheckpointChoice::Step),
        Some(Value::String(text)) if text.starts_with(CheckpointId::PREFIX) => match text.parse() {
            Ok(id) => Some(CheckpointChoice::Id(id)),
            Err(error) => {
                field.fail("invalid_value", format!("{error}"));
                None
            }
        },
        Some(Value::String(_)) => field.choice(&[
            ("last", CheckpointChoice::Last),
            ("best", CheckpointChoice::Best),
            ("result", CheckpointChoice::Result),
        ]),
        Some(other) => {
            let found = super::reader::kind_of(other);
            let words = "\"last\", \"best\", \"result\", the id or the step of a checkpoint";
            field.fail("invalid_type", format!("must be {words}, not {found}"));
            None
        }
    };
    chosen.unwrap_or(CheckpointChoice::Result)
}

/// Returns the JSON schema for the selection of a checkpoint.
pub(super) fn checkpoint_schema(text: &str) -> OneOfBuilder {
    OneOfBuilder::new()
        .item(enumeration("", &["last", "best", "result"]))
        .item(integer_of("A step that has a checkpoint."))
        .item(plain_string("Id of a checkpoint, `ckpt_…`.").pattern(Some("^ckpt_")))
        .description(Some(text))
}

/// The schema of a generation request as clients write it. It describes what [`GenerateSpec::read`] accepts.
#[derive(Debug)]
pub struct GenerateDocument;

impl PartialSchema for GenerateDocument {
    fn schema() -> RefOr<Schema> {
        let text = plain_string("A text, used as it is with the special tokens that the tokenizer adds.");
        let message = closed(&["role", "content"])
            .property("role", plain_string("Role of the message, such as system, user or assistant."))
            .property("content", plain_string("Text."))
            .additional_properties(Some(AdditionalProperties::<Schema>::FreeForm(true)));
        let chat = Array::new(message);
        let prompt = OneOfBuilder::new()
            .item(text)
            .item(chat)
            .description(Some("The prompt, as in a dataset: text, or a list of chat messages."));
        let checkpoint = checkpoint_schema(
            "The checkpoint: the newest, the best, that of a step, or one by its id; default: the job's result.",
        );
        let sampling = optional(SamplingPlan::schema(), None, &[]);
        closed(&["prompt"])
            .property("prompt", prompt)
            .property("checkpoint", checkpoint)
            .property("num_generations", integer("Number of completions per model, 1 to 8.", json!(1)))
            .property("seed", integer_of("Random seed, the same for both models; default: the job's seed."))
            .property(
                "sampling",
                described(sampling, "Sampling settings that differ from the job's; temperature 0 = greedy."),
            )
            .examples([json!({"prompt": "What is 2 + 2?", "checkpoint": "best", "sampling": {"temperature": 0}})])
            .build()
            .into()
    }
}

fn plain_string(text: &str) -> ObjectBuilder {
    ObjectBuilder::new().schema_type(Type::String).description(Some(text))
}

impl ToSchema for GenerateDocument {
    fn name() -> std::borrow::Cow<'static, str> {
        "GenerationRequest".into()
    }
}
