//! What only the model and the data can tell of a job: facts that a plan depends on.

use std::collections::BTreeMap;

use serde_json::Value;

use super::footprint::Place;
use super::plan::{DatasetPlan, SourcePlan};
use super::warm::WarmStartFacts;
use super::{PromptKey, PromptLengths};
use crate::id::DatasetId;

/// What the server knows of the things a job names. `None` = unknown; whoever looked it up has reported that.
#[derive(Debug, Clone, Default)]
pub struct Context {
    /// The model.
    pub model: Option<ModelFacts>,
    /// The training prompts.
    pub dataset: Option<DatasetFacts>,
    /// The evaluation prompts, where asked for.
    pub eval_dataset: Option<DatasetFacts>,
    /// The prompts that only the verdict reads, where a dataset of their own was asked for.
    pub test_dataset: Option<DatasetFacts>,
    /// The guard's prompts, where asked for.
    pub guard_dataset: Option<DatasetFacts>,
    /// The rows of the warm-up, where asked for.
    pub warm_up_dataset: Option<DatasetFacts>,
    /// The checkpoint of a warm start, where asked for.
    pub warm_start: Option<WarmStartFacts>,
    /// The registered models that score as `reward_model`, by id.
    pub reward_models: BTreeMap<String, RewardModelFacts>,
    /// What a worker may use, bytes; None = unknown, and nothing is refused for it.
    pub memory_limit_bytes: Option<u64>,
    /// What the job may be computed on: it must fit each of these. Empty = the processor.
    pub places: Vec<Place>,
}

impl Context {
    /// Each dataset that is known, and where the job names it.
    pub(super) fn datasets(&self) -> impl Iterator<Item = (&DatasetFacts, &'static str)> {
        let named = [
            (&self.dataset, "/dataset"),
            (&self.eval_dataset, "/eval/dataset"),
            (&self.test_dataset, "/eval/test_dataset"),
            (&self.guard_dataset, "/eval/guard/dataset"),
        ];
        named.into_iter().filter_map(|(facts, at)| Some((facts.as_ref()?, at)))
    }
}

/// A model, as far as a plan depends on it.
#[derive(Debug, Clone)]
pub struct ModelFacts {
    /// As registered.
    pub id: String,
    /// SHA-256 over the files that matter.
    pub sha256: String,
    /// The longest sequence, tokens.
    pub max_position_embeddings: u64,
    /// Weights, each counted once.
    pub num_parameters: u64,
    /// Of its files.
    pub size_bytes: u64,
    /// Chat messages can be used.
    pub has_chat_template: bool,
    /// Sizes of its matrices; None = no adapter estimate.
    pub shape: Option<ModelShape>,
    /// Names of the linear layers that an adapter can be on, in order; empty = not known.
    pub modules: Vec<&'static str>,
    /// Keys of its config.json that a GPU cannot compute.
    pub beyond_gpu: Option<&'static str>,
}

/// A reward model, as far as a plan depends on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RewardModelFacts {
    /// SHA-256 over the files that matter.
    pub sha256: String,
    /// Weights, each counted once.
    pub num_parameters: u64,
    /// Computed in f32 whatever is asked for.
    pub is_encoder: bool,
}

/// Sizes of a decoder's matrices.
#[derive(Debug, Clone, Copy)]
pub struct ModelShape {
    /// Width of the residual stream.
    pub hidden_size: u64,
    /// Width inside the MLP.
    pub intermediate_size: u64,
    /// Decoder layers.
    pub num_hidden_layers: u64,
    /// Query heads.
    pub num_attention_heads: u64,
    /// Key and value heads.
    pub num_key_value_heads: u64,
    /// Width of a head.
    pub head_dim: u64,
    /// Tokens the model knows.
    pub vocab_size: u64,
    /// Decoder layers with a sliding window.
    pub num_windowed_layers: u64,
    /// Positions that a token sees in them, itself included; of several windows the largest, and 0 where there is none.
    pub window: u64,
}

/// A dataset, as far as a plan depends on it.
#[derive(Debug, Clone)]
pub struct DatasetFacts {
    /// The dataset.
    pub id: DatasetId,
    /// SHA-256 of its canonical bytes.
    pub sha256: String,
    /// Rows.
    pub num_rows: u64,
    /// Columns of any row.
    pub columns: Vec<String>,
    /// Some prompts are chat messages.
    pub has_chat_prompts: bool,
    /// Counted by the model's tokenizer; None = left to the worker.
    pub prompt_lengths: Option<PromptLengths>,
    /// What tells its prompts apart, in the order of the rows; None = left to the worker.
    pub prompt_keys: Option<Vec<PromptKey>>,
    /// Where its rows come from, if from several.
    pub sources: Vec<SourceFacts>,
}

/// One of several sources of a dataset.
#[derive(Debug, Clone)]
pub struct SourceFacts {
    /// As the plan has it.
    pub plan: SourcePlan,
    /// Columns of any of its rows; None where that is not known.
    pub columns: Option<Vec<String>>,
}

impl DatasetFacts {
    /// The dataset as a plan names it.
    pub(super) fn plan(&self) -> DatasetPlan {
        let sources = self.sources.iter().map(|source| source.plan.clone()).collect();
        DatasetPlan { sources, ..DatasetPlan::new(self.id, self.sha256.clone(), self.num_rows) }
    }

    /// Of rows in a file.
    pub fn of_file(id: DatasetId, sha256: String, num_rows: u64, columns: Vec<String>) -> Self {
        let sources = Vec::new();
        Self {
            id,
            sha256,
            num_rows,
            columns,
            has_chat_prompts: false,
            prompt_lengths: None,
            prompt_keys: None,
            sources,
        }
    }

    /// Of several sources, one after another, with their columns.
    pub fn of_sources(sources: Vec<(SourcePlan, DatasetFacts)>) -> Self {
        let mut columns: Vec<String> = Vec::new();
        for column in sources.iter().flat_map(|(_, facts)| &facts.columns) {
            if !columns.contains(column) {
                columns.push(column.clone());
            }
        }
        let num_rows = sources.iter().map(|(plan, _)| plan.num_rows).sum();
        let has_chat_prompts = sources.iter().any(|(_, facts)| facts.has_chat_prompts);
        let source = |(plan, facts): (SourcePlan, DatasetFacts)| SourceFacts { plan, columns: Some(facts.columns) };
        let sources = sources.into_iter().map(source).collect();
        Self { has_chat_prompts, sources, ..Self::of_file(DatasetId::new(), String::new(), num_rows, columns) }
    }

    /// Of rows that came with the job and are not stored yet.
    pub fn of_records(records: &[Value]) -> Self {
        let mut columns: Vec<String> = Vec::new();
        for key in records.iter().filter_map(Value::as_object).flat_map(|row| row.keys()) {
            if !columns.contains(key) {
                columns.push(key.clone());
            }
        }
        let has_chat_prompts = records.iter().any(|row| row.get("prompt").is_some_and(Value::is_array));
        Self { has_chat_prompts, ..Self::of_file(DatasetId::new(), String::new(), records.len() as u64, columns) }
    }
}
