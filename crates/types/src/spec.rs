//! The job document that a client submits ([`JobSpec`]: checked without context) and the plan that it resolves to
//! ([`Plan`]: complete and valid).
//!
//! [`JobSpec::read`] does not access the server. It applies the defaults that need no context and reports every error at once with
//! a JSON pointer. [`resolve`] adds what depends on the model and the data. A `Plan` is stored in addition to the spec, so that a
//! changed default never changes a past job.

mod adapter;
mod document;
mod environment_test;
mod environments;
mod estimate;
mod evaluation;
#[cfg(test)]
pub(crate) mod example;
mod facts;
pub mod footprint;
mod foreign;
mod fork;
pub mod format;
mod generate;
mod mixture;
mod oversight;
pub mod plan;
mod prompts;
mod rate;
mod reader;
mod resolve;
mod rewards;
mod rloo;
mod rollouts;
mod runtime;
mod runtime_spec;
mod schema;
mod secrets;
mod sections;
mod settings;
mod sources;
mod split;
mod tools;
pub mod trl;
mod verdict;
mod warm;
mod warm_up;

pub use adapter::{ModuleRank, PeftConfig, StoredModule};
pub use document::{JobSpec, Labels, TrainingSpec, read_labels, submittable, submittable_dataset};
pub use environment_test::{EnvironmentTestSpec, MAX_TEST_ROWS};
pub use environments::{ENVIRONMENT_SECRET, read_single_environment};
pub use estimate::Estimate;
pub use evaluation::{
    EvalSpec, GuardSpec, PromptKey, held_out_count, held_out_rows, prompt_key, shared_prompts, test_rows,
};
pub use facts::{Context, DatasetFacts, DeltaShape, ModelFacts, ModelShape, RewardModelFacts, SourceFacts};
pub use fork::{continues, forked_document, resume_identity};
pub use generate::{CheckpointChoice, GenerateDocument, GenerateSpec};
pub use mixture::Mixture;
pub use oversight::{EarlyStoppingSpec, check_metrics, greater_is_better, metric_names};
pub use plan::*;
pub use prompts::{PromptLengths, check_records};
pub use rate::{FULL_LEARNING_RATE, LORA_LEARNING_RATE, low_lora_rate, suggested_lora_rate};
pub use reader::FieldError;
pub use resolve::{Resolution, SHARED_PROMPTS, Warning, resolve};
pub use rewards::{Formula, JsonSchema, SampleTemplate, read_single_reward};
pub use runtime_spec::{RuntimeChoice, RuntimeSpec};
pub use schema::{DraftDocument, DraftPlan, FormDocument, JobDocument};
pub use secrets::{eval_secret_name, guard_secret_name};
pub use settings::settings_page;
pub use sources::{DatasetSource, HubDataset, MappedSource, MixedSource};
pub(crate) use verdict::usual_temperature;
pub use verdict::{VerdictDocument, VerdictSampling, VerdictSpec};
pub use warm::WarmStartFacts;
pub use warm_up::WarmUpSpec;
