//! A verdict request: a checkpoint, and how to sample.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{ObjectBuilder, Schema, Type};
use utoipa::{PartialSchema, ToSchema};

use super::generate::{CheckpointChoice, checkpoint_schema, read_checkpoint};
use super::reader::{Errors, FieldError, Reader};
use super::schema::{closed, integer_of};
use super::settings::GREEDY;
use super::{Plan, foreign::advice};

/// Maximum number of completions per model and row.
pub const MAX_SAMPLES: u64 = 64;

/// How a verdict samples both models.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VerdictSampling {
    /// Completions per model and row. Their rewards are averaged within the row.
    pub num_generations: u32,
    /// Sampling temperature; 0 = greedy.
    pub temperature: f64,
    /// Minimum reward of a completion that passes, for pass@k; null = unknown.
    pub pass_threshold: Option<f64>,
}

/// A verdict, as requested.
#[derive(Debug, Clone, PartialEq)]
pub struct VerdictSpec {
    /// The checkpoint to judge; `None` = the job's result if it ended early, otherwise the best, otherwise the newest.
    pub checkpoint: Option<CheckpointChoice>,
    /// How both models are sampled, and which reward passes.
    pub sampling: VerdictSampling,
}

/// Returns the temperature of the job's evaluation; with several completions per row, that of training if the evaluation is greedy,
/// because several greedy completions of a row would all be the same.
pub(crate) fn usual_temperature(plan: &Plan, num_generations: u32) -> f64 {
    match plan.eval.as_ref().map_or(0.0, |eval| eval.temperature) {
        0.0 if num_generations > 1 => plan.sampling.temperature,
        temperature => temperature,
    }
}

impl VerdictSpec {
    /// Reads a request. Missing settings are taken from `usual`.
    ///
    /// # Errors
    /// Returns all errors, with pointers into the document.
    pub fn read(document: &Value, plan: &Plan, usual: VerdictSampling) -> Result<Self, Vec<FieldError>> {
        let errors = Errors::default();
        let reader = Reader::document(document, &errors);
        let checkpoint = reader.field("checkpoint");
        let checkpoint = checkpoint.value().map(|_| read_checkpoint(&checkpoint));
        let samples = reader.field("num_generations").whole(1..=MAX_SAMPLES).unwrap_or(usual.num_generations);
        let given = reader.field("temperature");
        let temperature = given.number_in(GREEDY).unwrap_or_else(|| usual_temperature(plan, samples));
        if samples > 1 && given.value().is_some() && temperature == 0.0 {
            given.fail("conflict", format!("{samples} greedy completions of a row are all the same: give a temperature above 0, or num_generations 1"));
        }
        let passing = reader.field("pass_threshold");
        let pass_threshold = passing.number("a number", |_| true).or(usual.pass_threshold);
        reader.finish(advice);
        let errors = errors.into_vec();
        let sampling = VerdictSampling { num_generations: samples, temperature, pass_threshold };
        if errors.is_empty() { Ok(Self { checkpoint, sampling }) } else { Err(errors) }
    }
}

/// The schema of a verdict request as clients write it. It describes what [`VerdictSpec::read`] accepts.
#[derive(Debug)]
pub struct VerdictDocument;

impl PartialSchema for VerdictDocument {
    fn schema() -> RefOr<Schema> {
        let number = |text: &str| ObjectBuilder::new().schema_type(Type::Number).description(Some(text));
        closed(&[])
            .property("checkpoint", checkpoint_schema("The checkpoint to judge. Default: the best, otherwise the newest; of a job that an alert, divergence or early stopping ended, its result."))
            .property(
                "num_generations",
                integer_of("Completions per model and row, 1 to 64; default: as in the evaluation."),
            )
            .property(
                "temperature",
                number("Sampling temperature; 0 = greedy. Default: as in the evaluation, or as in training with several completions per row."),
            )
            .property(
                "pass_threshold",
                number("Minimum reward of a completion that passes, for pass@k; default: the highest possible reward."),
            )
            .examples([json!({"checkpoint": "best", "num_generations": 4, "temperature": 0.7})])
            .build()
            .into()
    }
}

impl ToSchema for VerdictDocument {
    fn name() -> std::borrow::Cow<'static, str> {
        "VerdictRequest".into()
    }
}
