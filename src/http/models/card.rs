//! The properties of a model that the API shows: read from its files when it is registered.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::modelcard::{self, Backbone, ClassifierCard, ForeignCard, ModelCard, TensorLocation};
use crate::spec::RuntimeName;

/// Properties of a model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(as = ModelCard)]
pub struct Card {
    /// The `model_type` of the text model: `qwen3`, `llama`, `gemma3_text`, `phi3`, …; for reward models also
    /// `deberta-v2`, `xlm-roberta`, `roberta`, `modernbert`.
    pub architecture: String,
    /// The task that the model can be used for.
    #[serde(default)]
    pub task: ModelTask,
    /// Names of a reward model's scores; empty for other models.
    #[serde(default)]
    pub labels: Vec<String>,
    /// Number of weights; shared ones are counted once.
    pub num_parameters: u64,
    /// Number format in which most weights are stored: `f32`, `f16`, `bf16` or `fp8`; absent for models that were registered by an
    /// earlier version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "bf16")]
    pub precision: Option<String>,
    /// Number of hidden layers.
    pub num_hidden_layers: u64,
    /// Width of the residual stream.
    pub hidden_size: u64,
    /// Number of rows of the embedding.
    pub vocab_size: u64,
    /// Maximum sequence length in tokens.
    pub max_position_embeddings: u64,
    /// Token ids that end a completion.
    pub eos_token_ids: Vec<u32>,
    /// Whether prompts may be chat messages.
    pub has_chat_template: bool,
    /// Total size of the files, in bytes.
    pub size_bytes: u64,
    /// The runtime that a job with this model needs, because rlood's own engine does not have its architecture; absent = any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub needs_runtime: Option<RuntimeName>,
}

/// The task that a model can be used for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ModelTask {
    /// Text generation: the `model` of a job.
    #[default]
    CausalLm,
    /// Scoring: the `model` of a reward of type `reward_model`.
    SequenceClassification,
}

/// Returns the name of the number format in which most weights are stored.
fn stored_in(tensors: &[TensorLocation]) -> Option<String> {
    modelcard::precision(tensors).map(|dtype| dtype.name().to_owned())
}

impl Card {
    pub(super) fn of_classifier(card: &ClassifierCard) -> Self {
        let (num_hidden_layers, hidden_size, vocab_size) = match &card.backbone {
            Backbone::Decoder(config) => (config.num_hidden_layers, config.hidden_size, config.vocab_size),
            Backbone::Encoder(config) => (config.num_hidden_layers, config.hidden_size, config.vocab_size),
        };
        Self {
            architecture: card.model_type.clone(),
            task: ModelTask::SequenceClassification,
            labels: card.labels.clone(),
            num_parameters: card.num_parameters,
            precision: stored_in(&card.tensors),
            num_hidden_layers: num_hidden_layers as u64,
            hidden_size: hidden_size as u64,
            vocab_size: vocab_size as u64,
            max_position_embeddings: card.max_tokens as u64,
            eos_token_ids: Vec::new(),
            has_chat_template: card.chat_template.is_some(),
            size_bytes: card.files.iter().map(|file| file.size_bytes).sum(),
            needs_runtime: None,
        }
    }

    pub(super) fn of_foreign(card: &ForeignCard) -> Self {
        Self {
            architecture: card.model_type.clone(),
            task: ModelTask::CausalLm,
            labels: Vec::new(),
            num_parameters: card.num_parameters,
            precision: card.precision.map(|dtype| dtype.name().to_owned()),
            num_hidden_layers: card.num_hidden_layers as u64,
            hidden_size: card.hidden_size as u64,
            vocab_size: card.vocab_size as u64,
            max_position_embeddings: card.max_position_embeddings as u64,
            eos_token_ids: card.eos_token_ids.clone(),
            has_chat_template: card.chat_template.is_some(),
            size_bytes: card.files.iter().map(|file| file.size_bytes).sum(),
            needs_runtime: Some(RuntimeName::Trl),
        }
    }

    pub(super) fn of(card: &ModelCard) -> Self {
        Self {
            architecture: card.config.family.to_owned(),
            task: ModelTask::CausalLm,
            labels: Vec::new(),
            num_parameters: card.num_parameters,
            precision: stored_in(&card.tensors),
            num_hidden_layers: card.config.num_hidden_layers as u64,
            hidden_size: card.config.hidden_size as u64,
            vocab_size: card.config.vocab_size as u64,
            max_position_embeddings: card.max_position_embeddings as u64,
            eos_token_ids: card.eos_token_ids.clone(),
            has_chat_template: card.chat_template.is_some(),
            size_bytes: card.files.iter().map(|file| file.size_bytes).sum(),
            needs_runtime: None,
        }
    }
}
