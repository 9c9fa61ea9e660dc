//! What the operations of a backend are asked with: places among the parameters, tokens of a step, LoRA factors and their
//! dropout, the arguments of backward passes. Nothing here knows a decoder.

use std::ops::Range;
use std::sync::Arc;

use super::{Buffers, Chosen, Compute, Decode, Pick};
use crate::ops::RopeTable;
use crate::ops::slices::{self, Group, Heads, Visible};
use crate::random::Key;
use crate::sampling::{Filters, draw_among};

/// A linear layer that LoRA can adapt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Module {
    /// `self_attn.q_proj`
    Q,
    /// `self_attn.k_proj`
    K,
    /// `self_attn.v_proj`
    V,
    /// `self_attn.o_proj`
    O,
    /// `mlp.gate_proj`
    Gate,
    /// `mlp.up_proj`
    Up,
    /// `mlp.down_proj`
    Down,
    /// `self_attn.qkv_proj`: queries, keys and values stored as one.
    Qkv,
    /// `mlp.gate_up_proj`: gate and up stored as one.
    GateUp,
    /// `shared_mlp.input_linear`: the same in Granite 4.
    Input,
    /// `shared_mlp.output_linear`
    Output,
}

impl Module {
    /// Every module, in the order of the flat parameter buffer.
    pub const ALL: [Module; 11] = [
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
    ];

    /// The name in `target_modules`.
    pub fn name(self) -> &'static str {
        self.path().rsplit('.').next().unwrap_or_default()
    }

    /// The path inside a decoder layer.
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
        }
    }

    /// The module at that path inside a decoder layer.
    pub fn from_path(path: &str) -> Option<Module> {
        Module::ALL.into_iter().find(|m| m.path() == path)
    }

    /// The module of that `target_modules` name.
    pub fn from_name(name: &str) -> Option<Module> {
        Module::ALL.into_iter().find(|m| m.name() == name)
    }
}

/// LoRA dropout of a packed batch: inputs of A are zeroed with probability p, the others divided by 1 − p (PEFT), each
/// module with a mask of its own.
///
/// Whether a value is dropped depends on the step, the token's place in its own sequence, the layer and the module, never
/// on how the step's rows are cut into micro-batches: a completion's tokens are counted by its place among the step's
/// rows, and a prompt's by what it says, so that it is the same prompt wherever it is computed.
#[derive(Debug, Clone)]
pub struct TokenDropout {
    keys: Vec<Key>,
    /// Draws of 32 bits below it are dropped.
    threshold: u64,
    scale: f32,
}

impl TokenDropout {
    /// Drops with probability `p`; `keys` are of the batch's tokens.
    pub fn new(p: f64, keys: Vec<Key>) -> Self {
        let threshold = (p * 2f64.powi(32)).round();
        Self { keys, threshold: threshold as u64, scale: (1.0 / (1.0 - threshold / 2f64.powi(32))) as f32 }
    }

    /// The mask of a module's input in a layer.
    pub fn mask(&self, layer: usize, module: Module) -> Mask<'_> {
        Mask { dropout: self, layer: layer as u64, module: module as u64 }
    }
}

/// What one module's input loses in one layer.
#[derive(Debug, Clone, Copy)]
pub struct Mask<'a> {
    dropout: &'a TokenDropout,
    layer: u64,
    module: u64,
}

impl Mask<'_> {
    /// What each token's draws are keyed by, for a device that applies the mask itself.
    pub fn words(&self) -> Vec<u64> {
        self.dropout.keys.iter().map(|key| key.with(self.layer).with(self.module).word()).collect()
    }

    /// Draws of 32 bits below the first are dropped, the values of others multiplied by the second.
    pub fn law(&self) -> (u64, f32) {
        (self.dropout.threshold, self.dropout.scale)
    }

    /// Apply it to the values of a token; tokens beyond the batch (padding) are left alone.
    pub fn apply(&self, token: usize, values: &mut [f32]) {
        let Some(key) = self.dropout.keys.get(token) else { return };
        let key = key.with(self.layer).with(self.module);
        let TokenDropout { threshold, scale, .. } = *self.dropout;
        for (index, pair) in values.chunks_mut(2).enumerate() {
            let bits = key.with(index as u64).bits();
            for (value, draw) in pair.iter_mut().zip([bits & 0xffff_ffff, bits >> 32]) {
                *value = if draw < threshold { 0.0 } else { *value * scale };
            }
        }
    }
}

/// One token of each row.
#[derive(Clone, Copy, Debug)]
pub struct Step<'a> {
    /// Angles for every position.
    pub table: &'a Arc<RopeTable>,
    /// One a row.
    pub tokens: Tokens<'a>,
    /// Each in its own sequence.
    pub positions: &'a [usize],
    /// How the next tokens are to be chosen; without picks where that is not known yet.
    pub choice: Choice<'a>,
}

/// The tokens of a step.
#[derive(Clone, Copy, Debug)]
pub enum Tokens<'a> {
    /// Ids.
    Known(&'a [u32]),
    /// Those that the last step chose for as many rows, perhaps not known to anybody yet.
    Chosen(usize),
}

impl Tokens<'_> {
    /// How many there are.
    pub fn count(&self) -> usize {
        match self {
            Tokens::Known(ids) => ids.len(),
            Tokens::Chosen(rows) => *rows,
        }
    }
}

/// How the next tokens are chosen.
#[derive(Clone, Copy, Debug)]
pub struct Choice<'a> {
    /// One a row.
    pub picks: &'a [Pick],
    /// The same for all rows. What is chosen has the log-prob that it has without them.
    pub filters: Filters,
}

impl Choice<'_> {
    /// What the pick of this row chooses from its logits (V).
    pub(super) fn among(&self, row: usize, logits: &[f32]) -> Chosen {
        let Pick { temperature, uniform } = self.picks[row];
        let token = draw_among(&self.filters, logits, temperature, uniform);
        let temperature = if temperature == 0.0 { 1.0 } else { temperature };
        Chosen { token, logp: slices::token_score(logits, token as usize, temperature).logp }
    }
}

/// The rows' residual stream after a step, and the choice of their next tokens if it was begun.
pub type Stepped<B> = (<B as Buffers>::Tensor, Option<<B as Decode>::PendingChoice>);

/// The LoRA factors of a fused weight, module by module.
#[derive(Debug)]
pub struct AdapterShape {
    /// Inputs of A.
    pub inputs: usize,
    /// Outputs of the fused weight.
    pub outputs: usize,
    /// The adapted modules, in order of their outputs.
    pub blocks: Vec<AdapterBlock>,
}

/// One module's factors.
#[derive(Debug)]
pub struct AdapterBlock {
    /// Its outputs in the fused weight.
    pub outputs: Range<usize>,
    /// Where its A `[r, in]` begins in the flat parameters.
    pub a: usize,
    /// Its B `[out, r]`.
    pub b: usize,
    /// Its rank.
    pub r: usize,
    /// `s` in s·B·A.
    pub scaling: f64,
}

impl AdapterShape {
    /// A module's A among the flat parameters.
    pub fn a<'v>(&self, parameters: &'v [f32], block: &AdapterBlock) -> &'v [f32] {
        &parameters[block.a..][..block.r * self.inputs]
    }

    /// Its B.
    pub fn b<'v>(&self, parameters: &'v [f32], block: &AdapterBlock) -> &'v [f32] {
        &parameters[block.b..][..block.outputs.len() * block.r]
    }

    /// Each module's ranks, of all ranks one after the other.
    pub fn ranks(&self) -> Vec<Range<usize>> {
        let mut end = 0;
        let ranks = self.blocks.iter().map(|block| {
            end += block.r;
            end - block.r..end
        });
        ranks.collect()
    }
}

/// The adapter's part in a product.
#[derive(Debug)]
pub struct AdapterPass<'a, B: Compute> {
    /// The factors.
    pub adapter: &'a B::Adapter,
    /// What each module's input loses to dropout; empty without.
    pub masks: &'a [Mask<'a>],
}

/// The adapter's part in the backward of a product.
#[derive(Debug)]
pub struct AdapterBackward<'a, B: Compute> {
    /// As in the forward.
    pub pass: AdapterPass<'a, B>,
    /// Where the gradients of each module's A and B begin.
    pub slots: &'a [(usize, usize)],
}

/// A module of a weight that is trained in full.
#[derive(Clone, Debug)]
pub struct FullSlot {
    /// Its outputs.
    pub outputs: Range<usize>,
    /// Where its W begins in the flat parameters, and in their gradient.
    pub weight: usize,
    /// Where its b does, where it has one.
    pub bias: Option<usize>,
}

/// The W and b of some modules one after the other.
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

/// What the backward of a product reads.
#[derive(Debug)]
pub struct LinearBackward<'a, B: Compute> {
    /// The product's input.
    pub x: &'a B::Tensor,
    /// dL/dy
    pub dy: &'a B::Tensor,
    /// The weight.
    pub weight: &'a B::Weight,
    /// The adapter, where one is trained.
    pub adapter: Option<AdapterBackward<'a, B>>,
    /// In full fine-tuning, module by module.
    pub full: &'a [FullSlot],
}

/// Attention in a packed batch.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    /// Sizes.
    pub heads: &'a Heads,
    /// Who is whose prompt, side by side.
    pub groups: &'a [Group],
    /// What each token of a group sees.
    pub visible: &'a [Vec<Visible>],
    /// How many positions a token sees, its own included; None = all.
    pub window: Option<usize>,
}

/// What the backward of attention reads.
#[derive(Debug)]
pub struct AttentionBackward<'a, B: Compute> {
    /// As in the forward.
    pub attention: Attention<'a>,
    /// The forward's input.
    pub qkv: &'a B::Tensor,
    /// The forward's output.
    pub out: &'a B::Tensor,
    /// From [`Compute::attend`].
    pub softmax: &'a B::Softmax,
    /// dL/dout
    pub dy: &'a B::Tensor,
}

/// What makes logits of normed rows.
#[derive(Clone, Debug)]
pub struct Head<B: Buffers> {
    /// `[vocab, hidden]`
    pub weight: B::Weight,
    /// Logits are c·tanh(x·Wᵀ / c), where there is a c.
    pub softcap: Option<f32>,
}

/// What the backward of the head reads.
#[derive(Debug)]
pub struct HeadBackward<'a, B: Compute> {
    /// Normed rows.
    pub x: &'a B::Tensor,
    /// What made the logits.
    pub head: &'a Head<B>,
    /// One a row.
    pub targets: &'a [u32],
    /// Divides the logits.
    pub temperature: f64,
    /// From [`Compute::score`].
    pub normalizers: &'a B::Normalizers,
    /// dL/dlogp, one a row.
    pub g: &'a [f32],
    /// Where the head's own gradient begins, where it is trained.
    pub at: Option<usize>,
}

/// qk-norm and rope of some tokens.
#[derive(Debug)]
pub struct Rotation<'a, B: Compute> {
    /// Sizes.
    pub heads: &'a Heads,
    /// qk-norm weights of query and key heads, and epsilon.
    pub qk_norm: Option<(&'a B::Vector, &'a B::Vector, f32)>,
    /// One row a token.
    pub angles: &'a B::Angles,
}
