//! The decoder families: a file each, of the names and flags that its config.json has beyond the keys which all share.
//!
//! A new family is one more file and one more entry of [`FAMILIES`]; what its computation has that no other's has is a new field of
//! [`ModelDescription`], which the decoder reads.

mod granite;
mod llama;
mod ministral;
mod mistral;
mod olmo;
mod qwen;
mod smollm3;

use super::ModelCardError;
use super::config::{Keys, ModelDescription};

/// A decoder family.
pub(super) struct Family {
    /// In config.json.
    pub(super) model_type: &'static str,
    /// Keys that it understands, and that are refused in families which do not.
    pub(super) reads: &'static [&'static str],
    /// Width of a head where config.json names none; None = hidden_size / num_attention_heads.
    pub(super) head_dim: Option<usize>,
    /// The base of the rotary position embedding where config.json names none.
    pub(super) rope_theta: f64,
    /// The head is the embedding where config.json does not say.
    pub(super) is_tied: bool,
    /// Without `num_key_value_heads` there are as many as query heads.
    pub(super) has_kv_heads_by_default: bool,
    /// Adds what the family has to what the common keys say.
    pub(super) describe: Describe,
}

type Describe = fn(&Keys<'_>, ModelDescription) -> Result<ModelDescription, ModelCardError>;

/// All of them.
pub(super) const FAMILIES: [Family; 8] = [
    qwen::QWEN3,
    qwen::QWEN2,
    llama::LLAMA,
    mistral::MISTRAL,
    smollm3::SMOLLM3,
    granite::GRANITE,
    olmo::OLMO2,
    ministral::MINISTRAL3,
];
