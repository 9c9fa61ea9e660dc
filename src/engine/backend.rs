//! The seam between the decoder and what computes it: a narrow set of fused operations, each with its vector-Jacobian
//! product. [`mod@reference`] computes them with plain loops over candle tensors and is the oracle; [`cpu`] with packed
//! weights and the machine's vector instructions; `cuda`, in builds that have it, on an NVIDIA GPU.
//!
//! A backend owns its buffers: the decoder never sees their values, so that a device may keep them and run behind.
//! Whatever must wait for a result says so by returning host values: [`Backend::score`], [`Backend::choose`],
//! [`Backend::values`].

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod flat;
pub mod reference;

use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

use super::error::{EngineError, Result};
pub use super::kernels::head::{Chosen, Pick};
use super::model::packing::Packing;
use super::model::pass::Mask;
use super::ops::RopeTable;
use super::ops::slices::{self, Heads, TokenScore};
use super::sampling::Filters;
pub use flat::{Flat, Optimizer};

/// Which set of operations a model runs on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BackendKind {
    /// Own kernels on packed weights.
    #[default]
    Cpu,
    /// The oracle: slow.
    Reference,
    /// An NVIDIA GPU, in a build with CUDA.
    Cuda {
        /// Which, from 0.
        ordinal: u32,
    },
}

impl BackendKind {
    /// What runs on a device of the pool: `cpu` (there, `RLOOD_BACKEND=reference` asks for the oracle), or `cuda:N` in a
    /// build with CUDA.
    ///
    /// # Errors
    /// When this build has no such device.
    pub fn of_device(name: &str) -> Result<Self> {
        if name == "cpu" {
            let oracle = std::env::var("RLOOD_BACKEND").is_ok_and(|backend| backend == "reference");
            return Ok(if oracle { Self::Reference } else { Self::Cpu });
        }
        match name.strip_prefix("cuda:").and_then(|ordinal| ordinal.parse().ok()) {
            Some(ordinal) if cfg!(feature = "cuda") => Ok(Self::Cuda { ordinal }),
            Some(_) => Err(EngineError::Input(format!(
                "device {name:?} is not supported by this build, which has no CUDA; use cpu, or a build with CUDA"
            ))),
            None => Err(EngineError::Input(format!("device {name:?} is unknown; use cpu or cuda:N"))),
        }
    }
}

/// Operations on `[rows, width]` tensors of f32 and on frozen or trained weights.
///
/// Unless it says otherwise an operation gives a row's result from that row alone, whatever the other rows.
pub trait Backend: Clone + Debug + Send + Sync + 'static {
    /// f32 `[rows, width]`.
    type Tensor: Debug + Send + Sync;
    /// f32 `[width]`: a norm's weight.
    type Vector: Clone + Debug + Send + Sync;
    /// A matrix `[out, in]`, and its bias `[out]` where there is one, in the layout that products read.
    type Weight: Clone + Debug + Send + Sync;
    /// The LoRA factors of a weight.
    type Adapter: Clone + Debug + Send + Sync;
    /// Cosines and sines, one row a token.
    type Angles: Debug + Send + Sync;
    /// Keys and values of growing sequences in all layers.
    type Cache: Debug + Send + Sync;
    /// [`Flat`] in this backend's memory.
    type Flat: Debug + Send + Sync;
    /// What the backward of attention wants to know of the forward's softmax.
    type Softmax: Debug + Send + Sync;
    /// What the backward of the head wants to know of each row's softmax.
    type Normalizers: Debug + Send + Sync;
    /// Choices under way.
    type Picked: Debug + Send + Sync;

    /// Whether sampling gives a token the same log-prob, bit for bit, as a training forward.
    fn samples_exactly(&self) -> bool;
    /// Another phase begins, with buffers of other sizes: those kept for reuse may go.
    fn release(&self);

    /// A norm's weight.
    fn vector(&self, values: Vec<f32>) -> Result<Self::Vector>;
    /// Row-major `[out, inputs]`.
    fn weight(&self, values: Vec<f32>, inputs: usize, bias: Option<Vec<f32>>) -> Result<Self::Weight>;
    /// Some parameters as a norm's weight.
    fn vector_of(&self, parameters: &Self::Flat, place: Range<usize>) -> Result<Self::Vector>;
    /// Some parameters as a matrix: of each module in order of its outputs, `[out, inputs]` and its bias.
    fn weight_of(&self, parameters: &Self::Flat, modules: &[FullSlot], inputs: usize) -> Result<Self::Weight>;
    /// Some parameters as LoRA factors, as the products read them.
    fn adapter(&self, parameters: &Self::Flat, shape: &AdapterShape) -> Result<Self::Adapter>;
    /// So many zeros, where updates are computed.
    fn zeros(&self, len: usize) -> Result<Flat>;
    /// These values, moved to where updates are computed.
    fn hold(&self, values: Flat) -> Result<Flat>;
    /// What [`Backend::hold`] gave.
    fn held<'f>(&self, flat: &'f Flat) -> Result<&'f Self::Flat>;
    /// As [`Backend::held`], to change.
    fn held_mut<'f>(&self, flat: &'f mut Flat) -> Result<&'f mut Self::Flat>;
    /// Wait for a tensor's values, row-major.
    fn values(&self, x: &Self::Tensor) -> Result<Vec<f32>>;

    /// Rows of the table, one an id.
    fn embed(&self, table: &Self::Weight, ids: &[u32]) -> Result<Self::Tensor>;
    /// Those of a step's tokens.
    fn embed_step(&self, table: &Self::Weight, _cache: &mut Self::Cache, tokens: Tokens<'_>) -> Result<Self::Tensor> {
        match tokens {
            Tokens::Known(ids) => self.embed(table, ids),
            Tokens::Chosen(_) => Err(EngineError::Input("this backend does not keep what it chose".to_owned())),
        }
    }
    /// Add dL/dtable, which begins at `at` in the gradient.
    fn embed_vjp(&self, ids: &[u32], dy: &Self::Tensor, gradient: &mut Self::Flat, at: usize) -> Result<()>;
    /// Some rows, in this order.
    fn select(&self, x: &Self::Tensor, rows: &[u32]) -> Result<Self::Tensor>;
    /// The transpose of [`Backend::select`]: each row of x is added to its row of `count` rows of zeros, in order.
    fn spread(&self, x: &Self::Tensor, rows: &[u32], count: usize) -> Result<Self::Tensor>;
    /// The rows of some tensors, one after the other.
    fn stack(&self, parts: &[&Self::Tensor]) -> Result<Self::Tensor>;

    /// RMSNorm of each row.
    fn rms_norm(&self, x: &Self::Tensor, weight: &Self::Vector, eps: f32) -> Result<Self::Tensor>;
    /// `residual` + dL/dx of [`Backend::rms_norm`].
    fn rms_norm_vjp(
        &self,
        x: &Self::Tensor,
        weight: &Self::Vector,
        eps: f32,
        dy: &Self::Tensor,
        residual: Option<&Self::Tensor>,
    ) -> Result<Self::Tensor>;
    /// Add dL/dweight of [`Backend::rms_norm`], summed over the rows in order.
    fn rms_norm_weight_vjp(
        &self,
        x: &Self::Tensor,
        eps: f32,
        dy: &Self::Tensor,
        gradient: &mut Self::Flat,
        at: usize,
    ) -> Result<()>;

    /// `residual` + x·Wᵀ + b + s·(x·Aᵀ)·Bᵀ.
    fn linear(
        &self,
        x: &Self::Tensor,
        weight: &Self::Weight,
        adapter: Option<AdapterPass<'_, Self>>,
        residual: Option<&Self::Tensor>,
    ) -> Result<Self::Tensor>;
    /// dL/dx of [`Backend::linear`] (without the residual's), and the gradients of what is trained.
    fn linear_vjp(&self, linear: &LinearBackward<'_, Self>, gradient: &mut Self::Flat) -> Result<Self::Tensor>;

    /// The angles of tokens at these positions.
    fn angles(&self, table: &Arc<RopeTable>, positions: &[usize]) -> Result<Self::Angles>;
    /// qk-norm and rope of rows `[q | k | v]`.
    fn rotate(&self, rotation: &Rotation<'_, Self>, qkv: &Self::Tensor) -> Result<Self::Tensor>;
    /// dL/dqkv of [`Backend::rotate`]; `qkv` is its input, needed with qk-norm only.
    fn rotate_vjp(
        &self,
        rotation: &Rotation<'_, Self>,
        qkv: Option<&Self::Tensor>,
        dy: &Self::Tensor,
    ) -> Result<Self::Tensor>;
    /// Add dL/dweight of the qk-norms (of query and of key heads), where there are any.
    fn rotate_weight_vjp(
        &self,
        rotation: &Rotation<'_, Self>,
        qkv: &Self::Tensor,
        dy: &Self::Tensor,
        gradient: &mut Self::Flat,
        at: (usize, usize),
    ) -> Result<()>;

    /// Whether it can train heads of these sizes: asked before a long rollout. The error says what to do instead.
    fn check_trainable(&self, _heads: &Heads) -> Result<()> {
        Ok(())
    }
    /// Causal attention inside each group of a packed batch; `qkv` is after [`Backend::rotate`].
    fn attend(&self, attention: &Attention<'_>, qkv: &Self::Tensor) -> Result<(Self::Tensor, Self::Softmax)>;
    /// dL/dqkv of [`Backend::attend`].
    fn attend_vjp(&self, backward: &AttentionBackward<'_, Self>) -> Result<Self::Tensor>;

    /// An empty cache.
    fn cache(&self, heads: &Heads, num_layers: usize) -> Self::Cache;
    /// Announce prompts of these lengths; returns the first one's number.
    fn cache_prompts(&self, cache: &mut Self::Cache, lengths: &[usize]) -> Result<usize>;
    /// Keep a layer's keys and values of the prompts from `first` on: `qkv` holds their tokens, one after the other.
    fn fill_prompts(&self, cache: &mut Self::Cache, first: usize, layer: usize, qkv: &Self::Tensor) -> Result<()>;
    /// Append rows that continue a prompt, each by at most `max_new_tokens`.
    fn cache_rows(&self, cache: &mut Self::Cache, prompt: usize, copies: usize, max_new_tokens: usize) -> Result<()>;
    /// No more rows will continue the prompts announced so far: each lives as long as its rows.
    fn close_prompts(&self, cache: &mut Self::Cache);
    /// Append one token a row in a layer, and attend: `[rows, q_width]`.
    fn attend_cached(
        &self,
        heads: &Heads,
        cache: &mut Self::Cache,
        layer: usize,
        window: Option<usize>,
        qkv: &Self::Tensor,
    ) -> Result<Self::Tensor>;
    /// Run `body`, which appends one token to each row of the cache in all layers and gives the rows' residual stream, and
    /// what [`Backend::pick_ahead`] gave for it. The backend may fill the batch up with rows whose results it drops, and may
    /// record what `body` asks for and repeat it.
    fn step(
        &self,
        cache: &mut Self::Cache,
        step: &Step<'_>,
        mut body: impl FnMut(&mut Self::Cache, &Step<'_>) -> Result<Stepped<Self>>,
    ) -> Result<Stepped<Self>> {
        body(cache, step)
    }
    /// Keep the rows marked true.
    fn retain(&self, cache: &mut Self::Cache, keep: &[bool]);

    /// Rows of `[gate | up]` → silu(gate) ∘ up.
    fn silu_mul(&self, gate_up: &Self::Tensor) -> Result<Self::Tensor>;
    /// dL/d`[gate | up]` of [`Backend::silu_mul`].
    fn silu_mul_vjp(&self, gate_up: &Self::Tensor, dy: &Self::Tensor) -> Result<Self::Tensor>;

    /// Log-prob and entropy of a target a row under softmax(x·headᵀ / temperature), never `[rows, vocab]` at once.
    fn score(
        &self,
        x: &Self::Tensor,
        head: &Self::Weight,
        targets: &[u32],
        temperature: f64,
    ) -> Result<(Vec<TokenScore>, Self::Normalizers)>;
    /// dL/dx from dL/dlogp (`g`) of [`Backend::score`]; with `at` also dL/dhead is added.
    fn score_vjp(&self, head: &HeadBackward<'_, Self>, gradient: &mut Self::Flat) -> Result<Self::Tensor>;
    /// One token a row, and its log-prob.
    fn choose(&self, x: &Self::Tensor, head: &Self::Weight, choice: Choice<'_>, chosen: &mut Vec<Chosen>)
    -> Result<()>;
    /// Begin what [`Backend::choose`] does of the rows that `x` gives, within a step; None where nothing is gained by it.
    fn pick_ahead(
        &self,
        _cache: &mut Self::Cache,
        _x: impl FnOnce() -> Result<Self::Tensor>,
        _head: &Self::Weight,
        _choice: Choice<'_>,
    ) -> Result<Option<Self::Picked>> {
        Ok(None)
    }
    /// Wait for it.
    fn picked(&self, picked: &Self::Picked) -> Result<Vec<Chosen>>;
    /// x·headᵀ `[rows, vocab]`.
    fn logits(&self, x: &Self::Tensor, head: &Self::Weight) -> Result<Self::Tensor>;
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
    fn among(&self, row: usize, logits: &[f32]) -> Chosen {
        let Pick { temperature, uniform } = self.picks[row];
        let token = self.filters.draw(logits, temperature, uniform);
        let temperature = if temperature == 0.0 { 1.0 } else { temperature };
        Chosen { token, logp: slices::token_score(logits, token as usize, temperature).logp }
    }
}

/// The rows' residual stream after a step, and the choice of their next tokens if it was begun.
pub type Stepped<B> = (<B as Backend>::Tensor, Option<<B as Backend>::Picked>);

/// The LoRA factors of a fused weight, module by module.
#[derive(Debug)]
pub struct AdapterShape {
    /// Inputs of A.
    pub inputs: usize,
    /// Outputs of the fused weight.
    pub outputs: usize,
    /// The rank.
    pub r: usize,
    /// `s` in s·B·A.
    pub scaling: f64,
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
}

impl AdapterShape {
    /// A module's A among the flat parameters.
    pub fn a<'v>(&self, parameters: &'v [f32], block: &AdapterBlock) -> &'v [f32] {
        &parameters[block.a..][..self.r * self.inputs]
    }

    /// Its B.
    pub fn b<'v>(&self, parameters: &'v [f32], block: &AdapterBlock) -> &'v [f32] {
        &parameters[block.b..][..block.outputs.len() * self.r]
    }
}

/// The adapter's part in a product.
#[derive(Debug)]
pub struct AdapterPass<'a, B: Backend> {
    /// The factors.
    pub adapter: &'a B::Adapter,
    /// What each module's input loses to dropout; empty without.
    pub masks: &'a [Mask<'a>],
}

/// The adapter's part in the backward of a product.
#[derive(Debug)]
pub struct AdapterBackward<'a, B: Backend> {
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
fn gathered(parameters: &[f32], modules: &[FullSlot], inputs: usize) -> (Vec<f32>, Option<Vec<f32>>) {
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
pub struct LinearBackward<'a, B: Backend> {
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
    /// Who is whose prompt.
    pub packing: &'a Packing,
    /// How many positions a token sees, its own included; None = all.
    pub window: Option<usize>,
}

/// What the backward of attention reads.
#[derive(Debug)]
pub struct AttentionBackward<'a, B: Backend> {
    /// As in the forward.
    pub attention: Attention<'a>,
    /// The forward's input.
    pub qkv: &'a B::Tensor,
    /// The forward's output.
    pub out: &'a B::Tensor,
    /// From [`Backend::attend`].
    pub softmax: &'a B::Softmax,
    /// dL/dout
    pub dy: &'a B::Tensor,
}

/// What the backward of the head reads.
#[derive(Debug)]
pub struct HeadBackward<'a, B: Backend> {
    /// Normed rows.
    pub x: &'a B::Tensor,
    /// `[vocab, hidden]`
    pub head: &'a B::Weight,
    /// One a row.
    pub targets: &'a [u32],
    /// Divides the logits.
    pub temperature: f64,
    /// From [`Backend::score`].
    pub normalizers: &'a B::Normalizers,
    /// dL/dlogp, one a row.
    pub g: &'a [f32],
    /// Where the head's own gradient begins, where it is trained.
    pub at: Option<usize>,
}

/// qk-norm and rope of some tokens.
#[derive(Debug)]
pub struct Rotation<'a, B: Backend> {
    /// Sizes.
    pub heads: &'a Heads,
    /// qk-norm weights of query and key heads, and epsilon.
    pub qk_norm: Option<(&'a B::Vector, &'a B::Vector, f32)>,
    /// One row a token.
    pub angles: &'a B::Angles,
}
