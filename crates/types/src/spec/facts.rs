//! Facts about the model and the data that a plan depends on.

use std::collections::BTreeMap;

use serde_json::Value;

use super::footprint::Place;
use super::plan::{DatasetPlan, RuntimeFacts, SourcePlan};
use super::warm::WarmStartFacts;
use super::{PromptKey, PromptLengths};
use crate::dataset::IMAGES;
use crate::id::DatasetId;

/// Facts about the model and datasets that a job names. `None` = unknown; the code that looked it up has reported the error.
#[derive(Debug, Clone, Default)]
pub struct Context {
    /// Facts about the base model.
    pub model: Option<ModelFacts>,
    /// Facts about the training prompts.
    pub dataset: Option<DatasetFacts>,
    /// Facts about the evaluation prompts, if the job has an evaluation dataset.
    pub eval_dataset: Option<DatasetFacts>,
    /// Facts about the verdict's own prompts, if the job has a test dataset.
    pub test_dataset: Option<DatasetFacts>,
    /// Facts about the guard set's prompts, if the job has a guard set.
    pub guard_dataset: Option<DatasetFacts>,
    /// Facts about the rows of the warm-up, if the job has one.
    pub warm_up_dataset: Option<DatasetFacts>,
    /// Facts about the checkpoint or adapter of a warm start, if the job has one.
    pub warm_start: Option<WarmStartFacts>,
    /// Facts about the registered models that `reward_model` rewards use, by model id.
    pub reward_models: BTreeMap<String, RewardModelFacts>,
    /// Memory that a worker may use, in bytes; `None` = unknown, and no job is rejected for its memory.
    pub memory_limit_bytes: Option<u64>,
    /// The devices that may run the job, which must fit on each of them. Empty = the CPU.
    pub places: Vec<Place>,
    /// The runtimes beside rlood's own engine that connected workers can start.
    pub runtimes: Vec<RuntimeFacts>,
}

impl Context {
    /// Whether rows of a dataset are still downloaded, so that the plan is provisional.
    pub fn is_pending(&self) -> bool {
        self.datasets().map(|(facts, _)| facts).chain(&self.warm_up_dataset).any(|facts| facts.is_pending)
    }

    /// Returns each dataset whose facts are known, with the JSON pointer to the dataset in the job.
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

/// Properties of a model that a plan depends on.
#[derive(Debug, Clone)]
pub struct ModelFacts {
    /// Id of the registered model.
    pub id: String,
    /// SHA-256 over the model's config, weights and tokenizer.
    pub sha256: String,
    /// Maximum sequence length, in tokens.
    pub max_position_embeddings: u64,
    /// Number of weights, each counted once.
    pub num_parameters: u64,
    /// Total size of the model's files, in bytes.
    pub size_bytes: u64,
    /// Whether the model has a chat template.
    pub has_chat_template: bool,
    /// Whether the chat template removes the reasoning of turns before the last message of a user.
    pub removes_reasoning: bool,
    /// Sizes of the model's matrices; `None` = unknown, and adapters cannot be estimated.
    pub shape: Option<ModelShape>,
    /// Names of the linear layers that can have an adapter, in order; empty = unknown.
    pub modules: Vec<&'static str>,
    /// Keys of its config.json that are not supported on a GPU; `None` = all are.
    pub beyond_gpu: Option<&'static str>,
    /// The model's architecture, if rlood's own engine does not have it.
    pub foreign: Option<String>,
    /// Whether the model reads images besides text.
    pub reads_images: bool,
}

/// Properties of a reward model that a plan depends on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RewardModelFacts {
    /// SHA-256 over the model's config, weights and tokenizer.
    pub sha256: String,
    /// Number of weights, each counted once.
    pub num_parameters: u64,
    /// Whether the model is an encoder, which always computes in f32.
    pub is_encoder: bool,
}

/// Sizes of a decoder's matrices.
#[derive(Debug, Clone, Copy)]
pub struct ModelShape {
    /// Width of the residual stream.
    pub hidden_size: u64,
    /// Width inside the MLP.
    pub intermediate_size: u64,
    /// Number of decoder layers.
    pub num_hidden_layers: u64,
    /// Number of query heads.
    pub num_attention_heads: u64,
    /// Number of key and value heads.
    pub num_key_value_heads: u64,
    /// Width of one attention head.
    pub head_dim: u64,
    /// Number of tokens in the vocabulary.
    pub vocab_size: u64,
    /// Number of decoder layers with a sliding window.
    pub num_windowed_layers: u64,
    /// Size of the sliding window in positions, including the token itself. The largest of several windows; 0 = no window.
    pub window: u64,
    /// The Gated DeltaNet layers, which have a state instead of keys and values; `None` for a model without such layers.
    pub delta_net: Option<DeltaShape>,
    /// Whether the query projection is twice as wide as the queries: its other outputs gate attention's output.
    pub has_output_gate: bool,
    /// Number of weights in layers that are stored in 4 bits with scales in f32, and that the CPU keeps so.
    pub four_bit_weights: u64,
    /// The same with double quantization.
    pub nested_four_bit_weights: u64,
}

/// Sizes of a decoder's Gated DeltaNet layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaShape {
    /// Number of these layers.
    pub num_layers: u64,
    /// Number of value heads.
    pub num_value_heads: u64,
    /// Width of queries, keys and values together: the number of the convolution's channels.
    pub conv_width: u64,
    /// Width of the values, and of the layer's output.
    pub value_width: u64,
    /// Number of values of a sequence's state in one layer.
    pub state_size: u64,
}

impl DeltaShape {
    /// Returns the width of the projection that the layer reads: queries, keys, values, their gate, and the gates
    /// that write and forget.
    pub fn width(&self) -> u64 {
        self.conv_width + self.value_width + 2 * self.num_value_heads
    }
}

impl ModelShape {
    /// Returns the number of layers with attention, and so with keys and values.
    pub fn num_attention_layers(&self) -> u64 {
        self.num_hidden_layers - self.num_delta_layers()
    }

    /// Returns the number of Gated DeltaNet layers.
    pub fn num_delta_layers(&self) -> u64 {
        self.delta_net.map_or(0, |net| net.num_layers)
    }

    /// Returns the width of all query heads, and that of the outputs of the projections to queries, keys and values.
    pub(super) fn attention_widths(&self) -> (u64, u64) {
        let (queries, keys) = (self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim);
        (queries, queries * if self.has_output_gate { 2 } else { 1 } + 2 * keys)
    }
}

/// Properties of a dataset that a plan depends on.
#[derive(Debug, Clone)]
pub struct DatasetFacts {
    /// Id of the dataset.
    pub id: DatasetId,
    /// SHA-256 of the canonical rows.
    pub sha256: String,
    /// Number of rows in the dataset.
    pub num_rows: u64,
    /// Columns that occur in any row.
    pub columns: Vec<String>,
    /// Whether some prompts are chat messages.
    pub has_chat_prompts: bool,
    /// Prompt lengths by the model's tokenizer; `None` = the worker counts them.
    pub prompt_lengths: Option<PromptLengths>,
    /// Identities of the prompts, in the order of the rows; `None` = the worker computes them.
    pub prompt_keys: Option<Vec<PromptKey>>,
    /// The sources of the dataset's rows, if there are several.
    pub sources: Vec<SourceFacts>,
    /// Whether rows are still downloaded: then `num_rows` is an estimate, and not all columns are known.
    pub is_pending: bool,
}

/// Estimated size of a row that is not downloaded yet, in bytes.
const ESTIMATED_ROW_BYTES: u64 = 512;
/// Smallest estimated number of rows, so that no dataset is refused as too small before its rows are known.
const FEWEST_ESTIMATED_ROWS: u64 = 1 << 20;

/// One of several sources of a dataset.
#[derive(Debug, Clone)]
pub struct SourceFacts {
    /// The source as stored in the plan.
    pub plan: SourcePlan,
    /// Columns that occur in any row of the source; `None` = unknown.
    pub columns: Option<Vec<String>>,
}

impl DatasetFacts {
    /// Returns the dataset as it is stored in a plan.
    pub(super) fn plan(&self) -> DatasetPlan {
        let sources = self.sources.iter().map(|source| source.plan.clone()).collect();
        let num_rows = if self.is_pending { 0 } else { self.num_rows };
        DatasetPlan { sources, ..DatasetPlan::new(self.id, self.sha256.clone(), num_rows) }
    }

    /// Whether rows have images.
    pub fn has_images(&self) -> bool {
        self.columns.iter().any(|column| column == IMAGES)
    }

    /// Creates the facts of a dataset with rows in a file.
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
            is_pending: false,
        }
    }

    /// Creates the facts of a dataset whose files, of this size in bytes, are still downloaded.
    pub fn pending(id: DatasetId, bytes_total: u64, limit: Option<u64>) -> Self {
        let estimate = (bytes_total / ESTIMATED_ROW_BYTES).max(FEWEST_ESTIMATED_ROWS);
        let num_rows = limit.map_or(estimate, |limit| limit.min(estimate));
        Self { is_pending: true, ..Self::of_file(id, String::new(), num_rows, Vec::new()) }
    }

    /// Creates the facts of several sources, one after another, with their columns.
    pub fn of_sources(sources: Vec<(SourcePlan, DatasetFacts)>) -> Self {
        let mut columns: Vec<String> = Vec::new();
        for column in sources.iter().flat_map(|(_, facts)| &facts.columns) {
            if !columns.contains(column) {
                columns.push(column.clone());
            }
        }
        let num_rows = sources.iter().map(|(plan, _)| plan.num_rows).sum();
        let has_chat_prompts = sources.iter().any(|(_, facts)| facts.has_chat_prompts);
        let is_pending = sources.iter().any(|(_, facts)| facts.is_pending);
        let source = |(plan, facts): (SourcePlan, DatasetFacts)| SourceFacts {
            plan,
            columns: Some(facts.columns).filter(|_| !facts.is_pending),
        };
        let sources = sources.into_iter().map(source).collect();
        let facts = Self::of_file(DatasetId::new(), String::new(), num_rows, columns);
        Self { has_chat_prompts, sources, is_pending, ..facts }
    }

    /// Creates the facts of rows that were sent with the job and are not stored yet.
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
