//! What a job will need, by simple arithmetic.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{ModelFacts, Plan, PromptLengths};
use crate::spec::resolve::ModelShape;

/// Memory and tokens of a run: upper bounds by arithmetic, nothing measured.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Estimate {
    /// Weights of the base model.
    pub num_parameters: u64,
    /// Weights of the adapter; null when the model's sizes are not known.
    pub trainable_parameters: Option<u64>,
    /// The base model as stored, bytes.
    pub model_bytes: u64,
    /// The adapter with gradient and both AdamW moments in 32 bits, bytes.
    pub training_state_bytes: Option<u64>,
    /// Keys and values of one step's completions at full length in 32 bits, bytes; the worker samples in smaller batches when it must.
    pub kv_cache_bytes: Option<u64>,
    /// One checkpoint on disk: adapter and moments, bytes.
    pub checkpoint_bytes: Option<u64>,
    /// Tokens of the longest prompt; null when they were not counted.
    pub longest_prompt_tokens: Option<u64>,
    /// Most completion tokens that can be sampled in all.
    pub max_completion_tokens: u64,
}

impl Estimate {
    pub(super) fn of(plan: &Plan, model: &ModelFacts, lengths: Option<PromptLengths>) -> Self {
        let trainable = model.shape.map(|shape| {
            plan.lora.as_ref().map_or(model.num_parameters, |lora| {
                let per_layer: u64 = lora.target_modules.iter().map(|name| in_plus_out(shape, name)).sum();
                per_layer * shape.num_hidden_layers * u64::from(lora.r)
            })
        });
        let longest = lengths.map(|lengths| lengths.longest);
        let sequence = u64::from(plan.sampling.max_completion_length) + longest.unwrap_or(0);
        let kv_cache = |shape: ModelShape| {
            let token_bytes = 2 * 4 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim;
            token_bytes.saturating_mul(sequence).saturating_mul(plan.totals.completions_per_step)
        };
        Self {
            num_parameters: model.num_parameters,
            trainable_parameters: trainable,
            model_bytes: model.size_bytes,
            training_state_bytes: trainable.map(|count| count * 16),
            kv_cache_bytes: model.shape.map(kv_cache),
            checkpoint_bytes: trainable.map(|count| count * 12),
            longest_prompt_tokens: longest,
            max_completion_tokens: plan.totals.max_completion_tokens,
        }
    }
}

fn in_plus_out(shape: ModelShape, module: &str) -> u64 {
    let (queries, keys) = (shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim);
    match module {
        "q_proj" | "o_proj" => shape.hidden_size + queries,
        "k_proj" | "v_proj" => shape.hidden_size + keys,
        _ => shape.hidden_size + shape.intermediate_size,
    }
}
