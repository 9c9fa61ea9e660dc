//! Argument types of the backend's operations: parameter positions, a step's tokens, LoRA factors and their dropout,
//! inputs of backward passes. This module does not depend on the decoder.

use std::ops::Range;
use std::sync::Arc;

use super::{Buffers, Chosen, Compute, Decode, Pick};
use crate::ops::RopeTable;
use crate::ops::slices::{self, Group, Heads, Visible};
use crate::random::Key;
use crate::sampling::{Filters, sample_filtered};

/// A linear layer that LoRA can adapt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Module {
    /// Projection to queries, `self_attn.q_proj`.
    Q,
    /// Projection to keys, `self_attn.k_proj`.
    K,
    /// Projection to values, `self_attn.v_proj`.
    V,
    /// Attention output projection, `self_attn.o_proj`.
    O,
    /// MLP gate projection, `mlp.gate_proj`.
    Gate,
    /// MLP up projection, `mlp.up_proj`.
    Up,
    /// MLP down projection, `mlp.down_proj`.
    Down,
    /// Queries, keys and values stored as one: `self_attn.qkv_proj`.
    Qkv,
    /// Gate and up stored as one: `mlp.gate_up_proj`.
    GateUp,
    /// Gate and up stored as one in Granite 4: `shared_mlp.input_linear`.
    Input,
    /// Down projection in Granite 4: `shared_mlp.output_linear`.
    Output,
    /// Queries, keys and values of a Gated DeltaNet layer: `linear_attn.in_proj_qkv`.
    DeltaQkv,
    /// Gate of the output norm of a Gated DeltaNet layer: `linear_attn.in_proj_z`.
    DeltaZ,
    /// How much a head of a Gated DeltaNet layer writes: `linear_attn.in_proj_b`.
    DeltaB,
    /// How much a head of a Gated DeltaNet layer forgets: `linear_attn.in_proj_a`.
    DeltaA,
    /// Output projection of a Gated DeltaNet layer: `linear_attn.out_proj`.
    DeltaOut,
}

impl Module {
    /// All modules, in the order of the flat parameter buffer.
    pub const ALL: [Module; 16] = [
        Module::Q,
        Module::K,
        Module::V,
        Module::O,
        Module::Gate,
        Module::Up,
        Module::Down,
        Module::Qkv,
        Module::GateUp,
        Module::Input,
        Module::Output,
        Module::DeltaQkv,
        Module::DeltaZ,
        Module::DeltaB,
        Module::DeltaA,
        Module::DeltaOut,
    ];

    /// The module's name in `target_modules`.
    pub fn name(self) -> &'static str {
        self.path().rsplit('.').next().unwrap_or_default()
    }

    /// The module's path inside a decoder layer.
    pub fn path(self) -> &'static str {
        match self {
            Module::Q => "self_attn.q_proj",
            Module::K => "self_attn.k_proj",
            Module::V => "self_attn.v_proj",
            Module::O => "self_attn.o_proj",
            Module::Gate => "mlp.gate_proj",
            Module::Up => "mlp.up_proj",
            Module::Down => "mlp.down_proj",
            Module::Qkv => "self_attn.qkv_proj",
            Module::GateUp => "mlp.gate_up_proj",
            Module::Input => "shared_mlp.input_linear",
            Module::Output => "shared_mlp.output_linear",
            Module::DeltaQkv => "linear_attn.in_proj_qkv",
            Module::DeltaZ => "linear_attn.in_proj_z",
            Module::DeltaB => "linear_attn.in_proj_b",
            Module::DeltaA => "linear_attn.in_proj_a",
            Module::DeltaOut => "linear_attn.out_proj",
        }
    }

    /// Returns the module with this path inside a decoder layer.
    pub fn from_path(path: &str) -> Option<Module> {
        Module::ALL.into_iter().find(|m| m.path() == path)
    }

    /// Returns the module with this `target_modules` name.
    pub fn from_name(name: &str) -> Option<Module> {
        Module::ALL.into_iter().find(|m| m.name() == name)
    }
}

/// LoRA dropout of a packed batch: inputs of A are zeroed with probability p, the others divided by 1 − p (as in PEFT).
/// Each module has its own mask.
///
/// Whether a value is dropped depends on the step, the token's index in its own sequence, the layer and the
/// module, but not on how the step's rows are split into micro-batches. A completion's tokens are keyed by its
/// index among the step's rows; a prompt's tokens are keyed by its content, so that a prompt gets the same mask
/// wherever it is computed.
#[derive(Debug, Clone)]
pub struct TokenDropout {
    keys: Vec<Key>,
    /// Random 32-bit numbers below this value drop their input.
    threshold: u64,
    scale: f32,
}

impl TokenDropout {
    /// Creates LoRA dropout with probability `p`; `keys` are the random keys of the batch's tokens.
    pub fn new(p: f64, keys: Vec<Key>) -> Self {
        let threshold = (p * 2f64.powi(32)).round();
        Self { keys, threshold: threshold as u64, scale: (1.0 / (1.0 - threshold / 2f64.powi(32))) as f32 }
    }

    /// The dropout mask of a module's input in a layer.
    pub fn mask(&self, layer: usize, module: Module) -> Mask<'_> {
        Mask { dropout: self, layer: layer as u64, module: module as u64 }
    }
}

/// The dropout mask of one module's input in one layer.
#[derive(Debug, Clone, Copy)]
pub struct Mask<'a> {
    dropout: &'a TokenDropout,
    layer: u64,
    module: u64,
}

impl Mask<'_> {
    /// The key words of each token's random numbers, for a device that applies the mask itself.
    pub fn words(&self) -> Vec<u64> {
        self.dropout.keys.iter().map(|key| key.with(self.layer).with(self.module).word()).collect()
    }

    /// The threshold of 32-bit random numbers below which values are dropped, and the factor of the others.
    pub fn threshold_and_scale(&self) -> (u64, f32) {
        (self.dropout.threshold, self.dropout.scale)
    }

    /// Applies the mask to the values of a token; leaves tokens beyond the batch (padding) unchanged.
    pub fn apply(&self, token: usize, values: &mut [f32]) {
        let Some(key) = self.dropout.keys.get(token) else { return };
        let key = key.with(self.layer).with(self.module);
        let TokenDropout { threshold, scale, .. } = *self.dropout;
        for (index, pair) in values.chunks_mut(2).enumerate() {
            let bits = key.with(index as u64).bits();
            for (value, number) in pair.iter_mut().zip([bits & 0xffff_ffff, bits >> 32]) {
                *value = if number < threshold { 0.0 } else { *value * scale };
            }
        }
    }
}

/// One generation step: one token per row.
#[derive(Clone, Copy, Debug)]
pub struct Step<'a> {
    /// Rotary angles for every position.
    pub table: &'a Arc<RopeTable>,
    /// The token of each row.
    pub tokens: Tokens<'a>,
    /// The position of each row's token in its own sequence.
    pub positions: &'a [usize],
    /// The settings for choosing the next tokens, without random picks if those are not known yet.
    pub choice: Choice<'a>,
}

/// The tokens of a generation step.
#[derive(Clone, Copy, Debug)]
pub enum Tokens<'a> {
    /// Token ids known to the host.
    Known(&'a [u32]),
    /// The tokens that the last step chose on the device, for this number of rows; the host may not know them yet.
    Chosen(usize),
}

impl Tokens<'_> {
    /// Number of tokens in the step, one per row.
    pub fn count(&self) -> usize {
        match self {
            Tokens::Known(ids) => ids.len(),
            Tokens::Chosen(rows) => *rows,
        }
    }
}

/// The settings for choosing the next token of each row.
#[derive(Clone, Copy, Debug)]
pub struct Choice<'a> {
    /// Temperature and random number of each row.
    pub picks: &'a [Pick],
    /// The filters, the same for all rows. A chosen token keeps the log-prob that it has without filters.
    pub filters: Filters,
}

impl Choice<'_> {
    /// Chooses a row's token from its logits (V), with the row's temperature and random number.
    pub(super) fn among(&self, row: usize, logits: &[f32]) -> Chosen {
        let Pick { temperature, uniform } = self.picks[row];
        let token = sample_filtered(&self.filters, logits, temperature, uniform);
        let temperature = if temperature == 0.0 { 1.0 } else { temperature };
        Chosen { token, logp: slices::token_score(logits, token as usize, temperature).logp }
    }
}

/// The rows' residual stream after a step, and the choice of their next tokens if it was started.
pub type Stepped<B> = (<B as Buffers>::Tensor, Option<<B as Decode>::PendingChoice>);

/// The LoRA factors of a fused weight, module by module.
#[derive(Debug)]
pub struct AdapterShape {
    /// Number of inputs of A.
    pub inputs: usize,
    /// Number of outputs of the fused weight.
    pub outputs: usize,
    /// The adapted modules, in order of their outputs.
    pub blocks: Vec<AdapterBlock>,
}

/// The LoRA factors of one module.
#[derive(Debug)]
pub struct AdapterBlock {
    /// The module's range of outputs in the fused weight.
    pub outputs: Range<usize>,
    /// Offset of the module's A `[r, in]` in the flat parameters.
    pub a: usize,
    /// Offset of the module's B `[out, r]` in the flat parameters.
    pub b: usize,
    /// Rank of the factors.
    pub r: usize,
    /// The scaling `s` in the product s·B·A.
    pub scaling: f64,
}

impl AdapterShape {
    /// The factor A of a module, among the flat parameters.
    pub fn a<'v>(&self, parameters: &'v [f32], block: &AdapterBlock) -> &'v [f32] {
        &parameters[block.a..][..block.r * self.inputs]
    }

    /// The factor B of a module, among the flat parameters.
    pub fn b<'v>(&self, parameters: &'v [f32], block: &AdapterBlock) -> &'v [f32] {
        &parameters[block.b..][..block.outputs.len() * block.r]
    }

    /// The range of each module's ranks in the concatenation of the ranks of all modules.
    pub fn ranks(&self) -> Vec<Range<usize>> {
        let mut end = 0;
        let ranks = self.blocks.iter().map(|block| {
            end += block.r;
            end - block.r..end
        });
        ranks.collect()
    }
}

/// The adapter's contribution to the forward pass of a linear layer.
#[derive(Debug)]
pub struct AdapterPass<'a, B: Compute> {
    /// The factors of the fused weight.
    pub adapter: &'a B::Adapter,
    /// The dropout masks of each module's input to A; empty without dropout.
    pub masks: &'a [Mask<'a>],
}

/// The adapter's contribution to the backward pass of a linear layer.
#[derive(Debug)]
pub struct AdapterBackward<'a, B: Compute> {
    /// The factors and dropout masks of the forward pass.
    pub pass: AdapterPass<'a, B>,
    /// Offsets of the gradients of each module's A and B in the flat gradient.
    pub slots: &'a [(usize, usize)],
}

/// A module of a fused weight that is trained in full fine-tuning.
#[derive(Clone, Debug)]
pub struct FullSlot {
    /// The module's range of outputs in the fused weight.
    pub outputs: Range<usize>,
    /// Offset of the weight W in the flat parameters, and in their gradient.
    pub weight: usize,
    /// Offset of the bias b in the flat parameters, if the module has a bias.
    pub bias: Option<usize>,
}

/// Concatenates the weights W and biases b of several modules.
pub(super) fn gathered(parameters: &[f32], modules: &[FullSlot], inputs: usize) -> (Vec<f32>, Option<Vec<f32>>) {
    let outputs = modules.last().map_or(0, |module| module.outputs.end);
    let (mut weight, mut bias) = (Vec::with_capacity(outputs * inputs), Vec::new());
    for module in modules {
        weight.extend_from_slice(&parameters[module.weight..][..module.outputs.len() * inputs]);
        if let Some(at) = module.bias {
            bias.extend_from_slice(&parameters[at..][..module.outputs.len()]);
        }
    }
    let has_bias = modules.iter().any(|module| module.bias.is_some());
    (weight, has_bias.then_some(bias))
}

/// The inputs of a linear layer's backward pass.
#[derive(Debug)]
pub struct LinearBackward<'a, B: Compute> {
    /// The input x of the forward pass.
    pub x: &'a B::Tensor,
    /// The gradient dL/dy of the layer's output.
    pub dy: &'a B::Tensor,
    /// The weight of the linear layer.
    pub weight: &'a B::Weight,
    /// The LoRA adapter of the layer, if one is trained.
    pub adapter: Option<AdapterBackward<'a, B>>,
    /// The trained modules in full fine-tuning; empty otherwise.
    pub full: &'a [FullSlot],
}

/// Attention in a packed batch.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    /// Sizes of the attention heads.
    pub heads: &'a Heads,
    /// The groups of the batch: each one a prompt with its completions.
    pub groups: &'a [Group],
    /// The positions that each token of a group attends to.
    pub visible: &'a [Vec<Visible>],
    /// Number of positions that a token attends to, its own included; None means all earlier ones.
    pub window: Option<usize>,
}

/// The values that a layer keeps of the tokens of a sequence during generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CachedLayer {
    /// The keys and values of the tokens in the attention window; None means all tokens.
    Keys(Option<usize>),
    /// A state of constant size.
    State,
}

/// The inputs of attention's backward pass.
#[derive(Debug)]
pub struct AttentionBackward<'a, B: Compute> {
    /// The arguments of the forward pass.
    pub attention: Attention<'a>,
    /// The input of the forward pass.
    pub qkv: &'a B::Tensor,
    /// The output of the forward pass.
    pub out: &'a B::Tensor,
    /// The softmax values from [`Compute::attend`].
    pub softmax: &'a B::Softmax,
    /// The gradient dL/dout of attention's output.
    pub dy: &'a B::Tensor,
}

/// The language-model head, which computes logits from normed rows.
#[derive(Clone, Debug)]
pub struct Head<B: Buffers> {
    /// The head's matrix `[vocab, hidden]`.
    pub weight: B::Weight,
    /// Soft cap c: logits become c·tanh(x·Wᵀ / c) if it is set.
    pub softcap: Option<f32>,
}

/// The inputs of the head's backward pass.
#[derive(Debug)]
pub struct HeadBackward<'a, B: Compute> {
    /// The normed rows, which are the head's input.
    pub x: &'a B::Tensor,
    /// The language-model head of the forward pass.
    pub head: &'a Head<B>,
    /// The target token of each row.
    pub targets: &'a [u32],
    /// The temperature that the logits are divided by.
    pub temperature: f64,
    /// What [`Compute::score`] returned beside the scores.
    pub scored: B::ScoredRows,
    /// The gradient dL/dlogp of each row's target.
    pub g: &'a [f32],
    /// Offset of the head's weight in the flat gradient, if the head is trained.
    pub at: Option<usize>,
}

/// Arguments of qk-norm and rotary embedding.
#[derive(Debug)]
pub struct Rotation<'a, B: Compute> {
    /// Sizes of the attention heads.
    pub heads: &'a Heads,
    /// Weights of the norms on query and key heads, and epsilon.
    pub qk_norm: Option<(&'a B::Vector, &'a B::Vector, f32)>,
    /// The rotary angles, one row per token.
    pub angles: &'a B::Angles,
}
