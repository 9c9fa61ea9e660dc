//! The seam between the decoder and what computes it: a narrow set of fused operations, each with its vector-Jacobian
//! product. [`mod@reference`] computes them with plain loops over candle tensors and is the oracle; [`cpu`] with packed
//! weights and the machine's vector instructions; `cuda`, in builds that have it, on an NVIDIA GPU.
//!
//! Three traits say what is asked for: [`Buffers`], [`Compute`], [`Decode`], each on top of the one before. Code that is
//! generic over a backend names the least of them that it needs.
//!
//! A backend owns its buffers: the decoder never sees their values, so that a device may keep them and run behind.
//! Whatever must wait for a result says so by returning host values: [`Compute::score`], [`Decode::choose`],
//! [`Buffers::download`].

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod flat;
pub mod reference;
mod types;

use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

use super::error::{EngineError, Result};
pub use super::kernels::head::{Chosen, Pick};
pub use super::kernels::mlp::Activation;
use super::ops::RopeTable;
use super::ops::slices::{Heads, TokenScore};
pub use flat::{Flat, Optimizer};
pub use types::{
    AdapterBackward, AdapterBlock, AdapterPass, AdapterShape, Attention, AttentionBackward, Choice, FullSlot, Head,
    HeadBackward, LinearBackward, Mask, Module, Rotation, Step, Stepped, TokenDropout, Tokens,
};

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

/// Where tensors, weights and parameters lie: how they get there and back.
pub trait Buffers: Clone + Debug + Send + Sync + 'static {
    /// f32 `[rows, width]`.
    type Tensor: Debug + Send + Sync;
    /// f32 `[width]`: a norm's weight.
    type Vector: Clone + Debug + Send + Sync;
    /// A matrix `[out, in]`, and its bias `[out]` where there is one, in the layout that products read.
    type Weight: Clone + Debug + Send + Sync;
    /// The values of a [`Flat`] in this backend's memory.
    type FlatBuffer: Debug + Send + Sync;

    /// Frees buffers that are kept for reuse: another phase begins, with buffers of other sizes.
    fn release_cached(&self);

    /// Uploads a norm's weight.
    fn upload_vector(&self, values: Vec<f32>) -> Result<Self::Vector>;
    /// Uploads a matrix, row-major `[out, inputs]`, and its bias.
    fn upload_weight(&self, values: Vec<f32>, inputs: usize, bias: Option<Vec<f32>>) -> Result<Self::Weight>;
    /// Makes a norm's weight of some parameters: each plus `offset`.
    fn vector_from(&self, parameters: &Self::FlatBuffer, place: Range<usize>, offset: f32) -> Result<Self::Vector>;
    /// Makes a matrix of some parameters: of each module in order of its outputs, `[out, inputs]` and its bias.
    fn weight_from(&self, parameters: &Self::FlatBuffer, modules: &[FullSlot], inputs: usize) -> Result<Self::Weight>;

    /// Allocates `len` zeros where updates are computed.
    fn alloc_zeroed(&self, len: usize) -> Result<Flat>;
    /// Moves values to where updates are computed.
    fn upload(&self, values: Flat) -> Result<Flat>;
    /// Returns this backend's own buffer of flat values. Fails where they lie in another backend's memory.
    fn device_buffer<'f>(&self, flat: &'f Flat) -> Result<&'f Self::FlatBuffer>;
    /// Returns the same buffer, to change.
    fn device_buffer_mut<'f>(&self, flat: &'f mut Flat) -> Result<&'f mut Self::FlatBuffer>;

    /// Waits for a tensor's values, row-major.
    fn download(&self, x: &Self::Tensor) -> Result<Vec<f32>>;
}

/// What a forward pass, its loss and its backward pass ask for: operations on `[rows, width]` tensors of f32 and on frozen
/// or trained weights.
///
/// Unless it says otherwise an operation gives a row's result from that row alone, whatever the other rows.
pub trait Compute: Buffers {
    /// The LoRA factors of a weight.
    type Adapter: Clone + Debug + Send + Sync;
    /// Cosines and sines, one row a token.
    type Angles: Debug + Send + Sync;
    /// What the backward of attention wants to know of the forward's softmax.
    type Softmax: Debug + Send + Sync;
    /// What the backward of the head wants to know of each row's softmax.
    type Normalizers: Debug + Send + Sync;

    /// Makes LoRA factors of some parameters, as the products read them.
    fn adapter_from(&self, parameters: &Self::FlatBuffer, shape: &AdapterShape) -> Result<Self::Adapter>;

    /// Rows of the table, one an id.
    fn embed(&self, table: &Self::Weight, ids: &[u32]) -> Result<Self::Tensor>;
    /// Adds dL/dtable, which begins at `at` in the gradient.
    fn embed_vjp(&self, ids: &[u32], dy: &Self::Tensor, gradient: &mut Self::FlatBuffer, at: usize) -> Result<()>;

    /// Some rows, in this order.
    fn select_rows(&self, x: &Self::Tensor, rows: &[u32]) -> Result<Self::Tensor>;
    /// The transpose of [`Compute::select_rows`]: each row of x is added to its row of `count` rows of zeros, in order.
    fn scatter_rows(&self, x: &Self::Tensor, rows: &[u32], count: usize) -> Result<Self::Tensor>;
    /// The rows of some tensors, one after the other.
    fn concat_rows(&self, parts: &[&Self::Tensor]) -> Result<Self::Tensor>;

    /// x times a number.
    fn scaled(&self, x: &Self::Tensor, factor: f32) -> Result<Self::Tensor>;

    /// Some columns of each row times the row's factor; the other columns as they are.
    fn rows_scaled(&self, x: &Self::Tensor, columns: Range<usize>, factors: &[f32]) -> Result<Self::Tensor>;
    /// x + y
    fn sum(&self, x: &Self::Tensor, y: &Self::Tensor) -> Result<Self::Tensor>;
    /// Some columns.
    fn columns(&self, x: &Self::Tensor, columns: Range<usize>) -> Result<Self::Tensor>;
    /// The columns of some tensors, one tensor's beside the other's.
    fn beside(&self, parts: &[&Self::Tensor]) -> Result<Self::Tensor>;

    /// RMSNorm of each row.
    fn rms_norm(&self, x: &Self::Tensor, weight: &Self::Vector, eps: f32) -> Result<Self::Tensor>;
    /// `residual` + dL/dx of [`Compute::rms_norm`].
    fn rms_norm_vjp(
        &self,
        x: &Self::Tensor,
        weight: &Self::Vector,
        eps: f32,
        dy: &Self::Tensor,
        residual: Option<&Self::Tensor>,
    ) -> Result<Self::Tensor>;
    /// Adds dL/dweight of [`Compute::rms_norm`], summed over the rows in order.
    fn rms_norm_weight_vjp(
        &self,
        x: &Self::Tensor,
        eps: f32,
        dy: &Self::Tensor,
        gradient: &mut Self::FlatBuffer,
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
    /// dL/dx of [`Compute::linear`] (without the residual's), and the gradients of what is trained.
    fn linear_vjp(&self, linear: &LinearBackward<'_, Self>, gradient: &mut Self::FlatBuffer) -> Result<Self::Tensor>;

    /// The angles of tokens at these positions.
    fn angles(&self, table: &Arc<RopeTable>, positions: &[usize]) -> Result<Self::Angles>;
    /// qk-norm and rope of rows `[q | k | v]`.
    fn rotate(&self, rotation: &Rotation<'_, Self>, qkv: &Self::Tensor) -> Result<Self::Tensor>;
    /// dL/dqkv of [`Compute::rotate`]; `qkv` is its input, needed with qk-norm only.
    fn rotate_vjp(
        &self,
        rotation: &Rotation<'_, Self>,
        qkv: Option<&Self::Tensor>,
        dy: &Self::Tensor,
    ) -> Result<Self::Tensor>;
    /// Adds dL/dweight of the qk-norms (of query and of key heads), where there are any.
    fn rotate_weight_vjp(
        &self,
        rotation: &Rotation<'_, Self>,
        qkv: &Self::Tensor,
        dy: &Self::Tensor,
        gradient: &mut Self::FlatBuffer,
        at: (usize, usize),
    ) -> Result<()>;

    /// Whether it can train heads of these sizes: asked before a long rollout. The error says what to do instead.
    fn check_trainable(&self, _heads: &Heads) -> Result<()> {
        Ok(())
    }
    /// Causal attention inside each group of a packed batch; `qkv` is after [`Compute::rotate`].
    fn attend(&self, attention: &Attention<'_>, qkv: &Self::Tensor) -> Result<(Self::Tensor, Self::Softmax)>;
    /// dL/dqkv of [`Compute::attend`].
    fn attend_vjp(&self, backward: &AttentionBackward<'_, Self>) -> Result<Self::Tensor>;

    /// Rows of `[gate | up]` → activation(gate) ∘ up.
    fn gated(&self, activation: Activation, gate_up: &Self::Tensor) -> Result<Self::Tensor>;
    /// dL/d`[gate | up]` of [`Compute::gated`].
    fn gated_vjp(&self, activation: Activation, gate_up: &Self::Tensor, dy: &Self::Tensor) -> Result<Self::Tensor>;

    /// Log-prob and entropy of a target a row under softmax(logits / temperature), never `[rows, vocab]` at once.
    fn score(
        &self,
        x: &Self::Tensor,
        head: &Head<Self>,
        targets: &[u32],
        temperature: f64,
    ) -> Result<(Vec<TokenScore>, Self::Normalizers)>;
    /// dL/dx from dL/dlogp (`g`) of [`Compute::score`]; with `at` also dL/dhead is added.
    fn score_vjp(&self, head: &HeadBackward<'_, Self>, gradient: &mut Self::FlatBuffer) -> Result<Self::Tensor>;
    /// All logits `[rows, vocab]`.
    fn logits(&self, x: &Self::Tensor, head: &Head<Self>) -> Result<Self::Tensor>;
}

/// What generation asks for besides: keys and values that are kept, steps of one token a row, the choice of the next ones.
pub trait Decode: Compute {
    /// Keys and values of growing sequences in all layers.
    type Cache: Debug + Send + Sync;
    /// A choice of tokens that was begun.
    type PendingChoice: Debug + Send + Sync;

    /// Whether sampling gives a token the same log-prob, bit for bit, as a training forward.
    fn samples_exactly(&self) -> bool;
    /// Looks up the rows of a step's tokens.
    fn embed_step(&self, table: &Self::Weight, _cache: &mut Self::Cache, tokens: Tokens<'_>) -> Result<Self::Tensor> {
        match tokens {
            Tokens::Known(ids) => self.embed(table, ids),
            Tokens::Chosen(_) => Err(EngineError::Input("this backend does not keep what it chose".to_owned())),
        }
    }

    /// Makes an empty cache for layers with these windows. What no later token sees need not be kept.
    fn new_cache(&self, heads: &Heads, windows: &[Option<usize>]) -> Self::Cache;
    /// Announces prompts of these lengths; returns the first one's number.
    fn add_prompts(&self, cache: &mut Self::Cache, lengths: &[usize]) -> Result<usize>;
    /// Keeps a layer's keys and values of the prompts from `first` on: `qkv` holds their tokens, one after the other.
    fn fill_prompts(&self, cache: &mut Self::Cache, first: usize, layer: usize, qkv: &Self::Tensor) -> Result<()>;
    /// Appends rows that continue a prompt, each by at most `max_new_tokens`.
    fn add_rows(&self, cache: &mut Self::Cache, prompt: usize, copies: usize, max_new_tokens: usize) -> Result<()>;
    /// Lets each prompt announced so far go with its last row: no more rows will continue them.
    fn close_prompts(&self, cache: &mut Self::Cache);
    /// Appends one token a row in a layer, and attends: `[rows, q_width]`.
    fn attend_cached(
        &self,
        heads: &Heads,
        cache: &mut Self::Cache,
        layer: usize,
        qkv: &Self::Tensor,
    ) -> Result<Self::Tensor>;

    /// Runs `body`, which appends one token to each row of the cache in all layers and gives the rows' residual stream, and
    /// what [`Decode::begin_choose`] gave for it. The backend may fill the batch up with rows whose results it drops, and may
    /// record what `body` asks for and repeat it.
    fn step(
        &self,
        cache: &mut Self::Cache,
        step: &Step<'_>,
        mut body: impl FnMut(&mut Self::Cache, &Step<'_>) -> Result<Stepped<Self>>,
    ) -> Result<Stepped<Self>> {
        body(cache, step)
    }
    /// Keeps the rows marked true.
    fn retain_rows(&self, cache: &mut Self::Cache, keep: &[bool]);

    /// Chooses one token a row, with its log-prob.
    fn choose(&self, x: &Self::Tensor, head: &Head<Self>, choice: Choice<'_>, chosen: &mut Vec<Chosen>) -> Result<()>;
    /// Begins what [`Decode::choose`] does of the rows that `x` gives, within a step; None where nothing is gained by it.
    fn begin_choose(
        &self,
        _cache: &mut Self::Cache,
        _x: impl FnOnce() -> Result<Self::Tensor>,
        _head: &Head<Self>,
        _choice: Choice<'_>,
    ) -> Result<Option<Self::PendingChoice>> {
        Ok(None)
    }
    /// Waits for a choice that was begun.
    fn finish_choose(&self, choice: &Self::PendingChoice) -> Result<Vec<Chosen>>;
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    fn check(path: &Path) {
        if path.is_dir() {
            return std::fs::read_dir(path).unwrap().for_each(|entry| check(&entry.unwrap().path()));
        }
        let code = std::fs::read_to_string(path).unwrap();
        for line in code.lines().filter(|line| line.trim_start().starts_with("use ")) {
            let upward = ["::model::", "::model;", "::lora::", "::lora;"].iter().any(|module| line.contains(module));
            // The kernels' own module of LoRA products is another one.
            assert!(!upward || line.contains("kernels::"), "{}: {line}", path.display());
        }
    }

    #[test]
    fn a_backend_knows_neither_the_decoder_nor_adapters() {
        let sources = rlood_test_support::in_repository("crates/engine/src");
        check(&sources.join("backend.rs"));
        check(&sources.join("backend"));
    }
}
