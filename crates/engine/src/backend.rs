//! The interface between the decoder and the code that computes it: a small set of fused operations, each with its
//! vector-Jacobian product (VJP). [`mod@reference`] is the oracle, with plain loops over candle tensors. [`cpu`] uses
//! packed weights and the machine's vector instructions. `cuda`, if compiled in, uses an NVIDIA GPU.
//!
//! Three traits define the operations: [`Buffers`], [`Compute`] and [`Decode`], each an extension of the previous one.
//! Code that is generic over a backend requires the smallest trait that suffices.
//!
//! A backend owns its buffers. The decoder never reads their values, so a device can keep them and run asynchronously.
//! Operations that wait for a result return host values: [`Compute::score`], [`Decode::choose`], [`Buffers::download`].
//!
//! Longer than 500 lines: the three traits are one interface, and extend each other.

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
use super::load::Matrix;
use super::ops::slices::{Group, Heads, TokenScore};
use super::ops::{RopeTable, delta};
pub use flat::{Flat, Optimizer};
pub use types::{
    AdapterBackward, AdapterBlock, AdapterPass, AdapterShape, Attention, AttentionBackward, CachedLayer, Choice,
    FullSlot, Head, HeadBackward, LinearBackward, Mask, Module, Rotation, Step, Stepped, TokenDropout, Tokens,
};

/// The backend that a model runs on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BackendKind {
    /// Our own CPU kernels on packed weights.
    #[default]
    Cpu,
    /// The oracle, which is slow.
    Reference,
    /// An NVIDIA GPU, in a build with CUDA.
    Cuda {
        /// Index of the GPU, from 0.
        ordinal: u32,
    },
}

impl BackendKind {
    /// The backend for a device of the pool: `cpu` (the variable `RLOOD_BACKEND=reference` selects the oracle instead),
    /// or `cuda:N` in a build with CUDA.
    ///
    /// # Errors
    /// Fails if this build does not support the device.
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

/// Memory of tensors, weights and parameters, and transfers to and from it.
pub trait Buffers: Clone + Debug + Send + Sync + 'static {
    /// A tensor of f32 `[rows, width]`.
    type Tensor: Debug + Send + Sync;
    /// The weight of a norm: f32 `[width]`.
    type Vector: Clone + Debug + Send + Sync;
    /// A matrix `[out, in]` with an optional bias `[out]`, in the layout that matrix products read.
    type Weight: Clone + Debug + Send + Sync;
    /// The values of a [`Flat`] in this backend's memory.
    type FlatBuffer: Debug + Send + Sync;

    /// Frees buffers that are cached for reuse. Call it when training or generation begins, which use
    /// buffers of other sizes.
    fn release_cached(&self);

    /// Uploads the weight of a norm.
    fn upload_vector(&self, values: Vec<f32>) -> Result<Self::Vector>;
    /// Uploads a row-major matrix `[out, inputs]` and its bias.
    fn upload_weight(&self, values: Vec<f32>, inputs: usize, bias: Option<Vec<f32>>) -> Result<Self::Weight>;
    /// Uploads matrices whose outputs follow each other, all with `inputs` inputs, and their biases. Backends without kernels for
    /// 4-bit codes compute with the expanded values, whose bits are the same.
    fn upload_matrices(&self, matrices: Vec<Matrix>, inputs: usize, bias: Option<Vec<f32>>) -> Result<Self::Weight> {
        self.upload_weight(concatenated(matrices), inputs, bias)
    }
    /// Returns the memory of a matrix in bytes, without its bias; None if the backend does not know it.
    fn matrix_bytes(&self, _weight: &Self::Weight) -> Option<usize> {
        None
    }
    /// Creates the weight of a norm from a range of parameters, each plus `offset`.
    fn vector_from(&self, parameters: &Self::FlatBuffer, place: Range<usize>, offset: f32) -> Result<Self::Vector>;
    /// Creates a matrix from parameters: the `[out, inputs]` weights and biases of each module, in
    /// order of their outputs.
    fn weight_from(&self, parameters: &Self::FlatBuffer, modules: &[FullSlot], inputs: usize) -> Result<Self::Weight>;

    /// Allocates `len` zeros in the memory where optimizer updates are computed.
    fn alloc_zeroed(&self, len: usize) -> Result<Flat>;
    /// Moves flat values to the memory where optimizer updates are computed.
    fn upload(&self, values: Flat) -> Result<Flat>;
    /// Returns the flat values as this backend's own buffer type. Fails if they are in another backend's memory.
    fn device_buffer<'f>(&self, flat: &'f Flat) -> Result<&'f Self::FlatBuffer>;
    /// Returns the flat values as this backend's own buffer type, for writing.
    fn device_buffer_mut<'f>(&self, flat: &'f mut Flat) -> Result<&'f mut Self::FlatBuffer>;

    /// Waits for a tensor's values and returns them, row-major.
    fn download(&self, x: &Self::Tensor) -> Result<Vec<f32>>;
}

/// Concatenates the values of matrices.
fn concatenated(matrices: Vec<Matrix>) -> Vec<f32> {
    let mut values = Vec::new();
    for matrix in matrices {
        match values.is_empty() {
            true => values = matrix.into_values(),
            false => values.extend(matrix.into_values()),
        }
    }
    values
}

/// The operations of a forward pass, its loss and its backward pass, on f32 tensors `[rows, width]` and on
/// frozen or trained weights.
///
/// Unless noted otherwise, a row's result depends on that row alone and not on the other rows of the batch.
pub trait Compute: Buffers {
    /// The LoRA factors of a weight.
    type Adapter: Clone + Debug + Send + Sync;
    /// Cosines and sines of the rotary embedding, one row per token.
    type Angles: Debug + Send + Sync;
    /// Softmax values of the forward pass that the backward pass of attention needs.
    type Softmax: Debug + Send + Sync;
    /// What the backward pass of the head needs of its scores.
    type ScoredRows: Debug + Send + Sync;
    /// The weights of a Gated DeltaNet layer, besides its projections.
    type DeltaNet: Clone + Debug + Send + Sync;
    /// The states of sequences in a Gated DeltaNet layer.
    type DeltaStates: Debug + Send + Sync;

    /// Creates LoRA factors from parameters, in the layout that products read.
    fn adapter_from(&self, parameters: &Self::FlatBuffer, shape: &AdapterShape) -> Result<Self::Adapter>;

    /// Looks up rows of the embedding table, one per token id.
    fn embed(&self, table: &Self::Weight, ids: &[u32]) -> Result<Self::Tensor>;
    /// Adds dL/dtable of the embedding table to the flat gradient, starting at index `at`.
    fn embed_vjp(&self, ids: &[u32], dy: &Self::Tensor, gradient: &mut Self::FlatBuffer, at: usize) -> Result<()>;

    /// Selects rows of a tensor, in the given order.
    fn select_rows(&self, x: &Self::Tensor, rows: &[u32]) -> Result<Self::Tensor>;
    /// The transpose of [`Compute::select_rows`]: adds each row of x, in order, to its row in a tensor
    /// of `count` zero rows.
    fn scatter_rows(&self, x: &Self::Tensor, rows: &[u32], count: usize) -> Result<Self::Tensor>;
    /// Concatenates tensors along their rows.
    fn concat_rows(&self, parts: &[&Self::Tensor]) -> Result<Self::Tensor>;

    /// Multiplies x by a number.
    fn scaled(&self, x: &Self::Tensor, factor: f32) -> Result<Self::Tensor>;

    /// Multiplies some columns of each row by the row's factor; leaves the other columns unchanged.
    fn rows_scaled(&self, x: &Self::Tensor, columns: Range<usize>, factors: &[f32]) -> Result<Self::Tensor>;
    /// Elementwise sum of x and y.
    fn sum(&self, x: &Self::Tensor, y: &Self::Tensor) -> Result<Self::Tensor>;
    /// Selects a range of columns.
    fn columns(&self, x: &Self::Tensor, columns: Range<usize>) -> Result<Self::Tensor>;
    /// Concatenates tensors along their columns.
    fn concat_columns(&self, parts: &[&Self::Tensor]) -> Result<Self::Tensor>;

    /// RMSNorm of each row.
    fn rms_norm(&self, x: &Self::Tensor, weight: &Self::Vector, eps: f32) -> Result<Self::Tensor>;
    /// Returns `residual` + dL/dx of [`Compute::rms_norm`].
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

    /// Returns `residual` + x·Wᵀ + b + s·(x·Aᵀ)·Bᵀ.
    fn linear(
        &self,
        x: &Self::Tensor,
        weight: &Self::Weight,
        adapter: Option<AdapterPass<'_, Self>>,
        residual: Option<&Self::Tensor>,
    ) -> Result<Self::Tensor>;
    /// Returns [`Compute::linear`] added to a residual that is not needed any more: the result may take its memory.
    fn linear_onto(
        &self,
        x: &Self::Tensor,
        weight: &Self::Weight,
        adapter: Option<AdapterPass<'_, Self>>,
        residual: Self::Tensor,
    ) -> Result<Self::Tensor> {
        self.linear(x, weight, adapter, Some(&residual))
    }
    /// Returns [`Compute::linear`] of rows that have different adapters: each adapter is applied to its rows, and none to the
    /// `plain` rows. Every row is in one of these lists, and has the bits that it has in a batch with one adapter.
    fn linear_mixed(
        &self,
        x: &Self::Tensor,
        weight: &Self::Weight,
        adapters: &[(&Self::Adapter, &[u32])],
        plain: &[u32],
        residual: Option<&Self::Tensor>,
    ) -> Result<Self::Tensor> {
        let groups = adapters.iter().map(|(adapter, rows)| (Some(*adapter), *rows)).chain([(None, plain)]);
        let (mut parts, mut order) = (Vec::new(), Vec::new());
        for (adapter, rows) in groups.filter(|(_, rows)| !rows.is_empty()) {
            let x = self.select_rows(x, rows)?;
            let residual = residual.map(|residual| self.select_rows(residual, rows)).transpose()?;
            let pass = adapter.map(|adapter| AdapterPass { adapter, masks: &[] });
            parts.push(self.linear(&x, weight, pass, residual.as_ref())?);
            order.extend_from_slice(rows);
        }
        let mut places = vec![0; order.len()];
        for (place, row) in order.iter().enumerate() {
            places[*row as usize] = place as u32;
        }
        self.select_rows(&self.concat_rows(&parts.iter().collect::<Vec<_>>())?, &places)
    }
    /// Returns dL/dx of [`Compute::linear`] without the residual's part, and adds the gradients
    /// of the trained parameters.
    fn linear_vjp(&self, linear: &LinearBackward<'_, Self>, gradient: &mut Self::FlatBuffer) -> Result<Self::Tensor>;

    /// Computes the rotary angles of tokens at these positions.
    fn angles(&self, table: &Arc<RopeTable>, positions: &[usize]) -> Result<Self::Angles>;
    /// Applies qk-norm and rotary embedding to rows `[q | k | v]`.
    fn rotate(&self, rotation: &Rotation<'_, Self>, qkv: &Self::Tensor) -> Result<Self::Tensor>;
    /// Returns dL/dqkv of [`Compute::rotate`]; `qkv` is its input, needed only with qk-norm.
    fn rotate_vjp(
        &self,
        rotation: &Rotation<'_, Self>,
        qkv: Option<&Self::Tensor>,
        dy: &Self::Tensor,
    ) -> Result<Self::Tensor>;
    /// Adds dL/dweight of the qk-norms (of query and key heads), if the model has them.
    fn rotate_weight_vjp(
        &self,
        rotation: &Rotation<'_, Self>,
        qkv: &Self::Tensor,
        dy: &Self::Tensor,
        gradient: &mut Self::FlatBuffer,
        at: (usize, usize),
    ) -> Result<()>;

    /// Checks that the backend can train heads of these sizes, before a long rollout starts. The error says
    /// what to do instead.
    fn check_trainable(&self, _heads: &Heads) -> Result<()> {
        Ok(())
    }
    /// Causal attention within each group of a packed batch; `qkv` is the output of [`Compute::rotate`].
    fn attend(&self, attention: &Attention<'_>, qkv: &Self::Tensor) -> Result<(Self::Tensor, Self::Softmax)>;
    /// Returns dL/dqkv of [`Compute::attend`].
    fn attend_vjp(&self, backward: &AttentionBackward<'_, Self>) -> Result<Self::Tensor>;

    /// Maps rows `[gate | up]` to activation(gate) ∘ up.
    fn gated(&self, activation: Activation, gate_up: &Self::Tensor) -> Result<Self::Tensor>;
    /// Returns dL/d`[gate | up]` of [`Compute::gated`].
    fn gated_vjp(&self, activation: Activation, gate_up: &Self::Tensor, dy: &Self::Tensor) -> Result<Self::Tensor>;

    /// Selects ranges of columns, and puts them one after another.
    fn gather_columns(&self, x: &Self::Tensor, ranges: &[Range<usize>]) -> Result<Self::Tensor> {
        let parts = ranges.iter().map(|range| self.columns(x, range.clone())).collect::<Result<Vec<_>>>()?;
        self.concat_columns(&parts.iter().collect::<Vec<_>>())
    }
    /// Multiplies x elementwise by the sigmoid of a gate.
    fn sigmoid_gated(&self, _x: &Self::Tensor, _gate: &Self::Tensor) -> Result<Self::Tensor> {
        Err(no_kernel("models with a gate on attention's output"))
    }
    /// Returns dL/dx and dL/dgate of [`Compute::sigmoid_gated`].
    fn sigmoid_gated_vjp(
        &self,
        _x: &Self::Tensor,
        _gate: &Self::Tensor,
        _dy: &Self::Tensor,
    ) -> Result<(Self::Tensor, Self::Tensor)> {
        Err(no_kernel("models with a gate on attention's output"))
    }

    /// Uploads the weights of a Gated DeltaNet layer, besides its projections.
    fn upload_delta_net(&self, _weights: delta::Weights) -> Result<Self::DeltaNet> {
        Err(no_kernel("Gated DeltaNet layers"))
    }
    /// Computes a Gated DeltaNet layer between its projections, for a packed batch: maps x `[tokens, width]`, rows of
    /// `[q | k | v | z | b | a]`, to `[tokens, value_width]`. Completions begin with the state after their prompt. Also returns
    /// the states after the prompts.
    fn delta_net(
        &self,
        _net: &Self::DeltaNet,
        _groups: &[Group],
        _x: &Self::Tensor,
    ) -> Result<(Self::Tensor, Self::DeltaStates)> {
        Err(no_kernel("Gated DeltaNet layers"))
    }
    /// Returns dL/dx of [`Compute::delta_net`].
    fn delta_net_vjp(
        &self,
        _net: &Self::DeltaNet,
        _groups: &[Group],
        _x: &Self::Tensor,
        _dy: &Self::Tensor,
    ) -> Result<Self::Tensor> {
        Err(no_kernel("Gated DeltaNet layers"))
    }

    /// Log-prob and entropy of one target per row under softmax(logits / temperature). Never holds `[rows, vocab]` in memory.
    /// A backend may sum up the gradient of the rows in `trained` now, which changes no score.
    fn score(
        &self,
        x: &Self::Tensor,
        head: &Head<Self>,
        targets: &[u32],
        temperature: f64,
        trained: &[bool],
    ) -> Result<(Vec<TokenScore>, Self::ScoredRows)>;
    /// Returns dL/dx from dL/dlogp (`g`) of [`Compute::score`]; if `at` is set, also adds dL/dhead.
    fn score_vjp(&self, head: HeadBackward<'_, Self>, gradient: &mut Self::FlatBuffer) -> Result<Self::Tensor>;
    /// Computes the logits of all tokens of the vocabulary, `[rows, vocab]`.
    fn logits(&self, x: &Self::Tensor, head: &Head<Self>) -> Result<Self::Tensor>;
}

/// The additional operations of generation: a key-value cache, steps of one token per row, and the choice
/// of the next tokens.
pub trait Decode: Compute {
    /// The key-value cache: keys and values of growing sequences in all layers.
    type Cache: Debug + Send + Sync;
    /// A choice of next tokens that the device has started but not finished.
    type PendingChoice: Debug + Send + Sync;

    /// Keys and values of a complete prompt that later prompts may begin with.
    type KeptPrompt: Clone + Debug + Send + Sync;

    /// Whether sampling gives a token the same log-prob, bit for bit, as a training forward.
    fn samples_exactly(&self) -> bool;
    /// Whether the rows of one generation step may have different adapters.
    fn mixes_adapters(&self) -> bool {
        false
    }
    /// Returns the keys and values of a prompt that was announced and filled, for [`Decode::add_prompt_after`]; None if the
    /// backend cannot continue prompts.
    fn keep_prompt(&self, _cache: &Self::Cache, _prompt: usize) -> Option<Self::KeptPrompt> {
        None
    }
    /// Returns the memory of a kept prompt in bytes.
    fn kept_bytes(&self, _kept: &Self::KeptPrompt) -> usize {
        0
    }
    /// Announces a prompt of `length` tokens that begins with the first `shared` tokens of a kept prompt, `shared` < `length`.
    /// Returns its index; None if the kept prompt no longer holds positions that the next tokens attend to.
    fn add_prompt_after(
        &self,
        _cache: &mut Self::Cache,
        _kept: &Self::KeptPrompt,
        _shared: usize,
        _length: usize,
    ) -> Option<usize> {
        None
    }
    /// Appends the remaining tokens of prompts to their keys and values in a layer, and computes the attention of these tokens:
    /// `[tokens, q_width]`. `prompts` holds index and number of remaining tokens of each prompt, whose rows
    /// follow each other in `qkv`.
    fn extend_prompts(
        &self,
        _cache: &mut Self::Cache,
        _prompts: &[(usize, usize)],
        _layer: usize,
        _qkv: &Self::Tensor,
    ) -> Result<Self::Tensor> {
        Err(EngineError::Input("this backend cannot continue prompts".to_owned()))
    }
    /// Looks up the embedding rows of a generation step's tokens.
    fn embed_step(&self, table: &Self::Weight, _cache: &mut Self::Cache, tokens: Tokens<'_>) -> Result<Self::Tensor> {
        match tokens {
            Tokens::Known(ids) => self.embed(table, ids),
            Tokens::Chosen(_) => {
                Err(EngineError::Input("this backend cannot append tokens that the host has not read".to_owned()))
            }
        }
    }

    /// Creates an empty key-value cache for these layers. The cache may drop positions that no later token attends to.
    fn new_cache(&self, heads: &Heads, layers: &[CachedLayer]) -> Self::Cache;
    /// Announces prompts of these lengths to the key-value cache; returns the index of the first one.
    fn add_prompts(&self, cache: &mut Self::Cache, lengths: &[usize]) -> Result<usize>;
    /// Stores the keys and values of a layer in the cache for the prompts from index `first` on: `qkv` holds their
    /// tokens, one prompt after another.
    fn fill_prompts(&self, cache: &mut Self::Cache, first: usize, layer: usize, qkv: &Self::Tensor) -> Result<()>;
    /// Stores the states of a Gated DeltaNet layer after the prompts from index `first` on.
    fn fill_states(
        &self,
        _cache: &mut Self::Cache,
        _first: usize,
        _layer: usize,
        _states: Self::DeltaStates,
    ) -> Result<()> {
        Err(no_kernel("Gated DeltaNet layers"))
    }
    /// Appends the remaining tokens of prompts to their states in a Gated DeltaNet layer, like [`Decode::extend_prompts`].
    fn extend_states(
        &self,
        _net: &Self::DeltaNet,
        _cache: &mut Self::Cache,
        _prompts: &[(usize, usize)],
        _layer: usize,
        _x: &Self::Tensor,
    ) -> Result<Self::Tensor> {
        Err(no_kernel("Gated DeltaNet layers"))
    }
    /// Appends one token per sequence to the sequences' states in a Gated DeltaNet layer: `[rows, value_width]`.
    fn delta_net_cached(
        &self,
        _net: &Self::DeltaNet,
        _cache: &mut Self::Cache,
        _layer: usize,
        _x: &Self::Tensor,
    ) -> Result<Self::Tensor> {
        Err(no_kernel("Gated DeltaNet layers"))
    }
    /// Adds sequences to the cache that continue a prompt, each by at most `max_new_tokens` tokens.
    fn add_rows(&self, cache: &mut Self::Cache, prompt: usize, copies: usize, max_new_tokens: usize) -> Result<()>;
    /// Marks all prompts announced to the cache so far as complete: no more sequences will continue them, so each
    /// prompt is freed with the last sequence that continues it.
    fn close_prompts(&self, cache: &mut Self::Cache);
    /// Appends one token per sequence to a layer's keys and values, and computes attention: `[rows, q_width]`.
    fn attend_cached(
        &self,
        heads: &Heads,
        cache: &mut Self::Cache,
        layer: usize,
        qkv: &Self::Tensor,
    ) -> Result<Self::Tensor>;

    /// Runs `body`, which appends one token to each row of the cache in all layers. It returns the rows' residual
    /// stream and the result of [`Decode::begin_choose`]. The backend may pad the batch with rows whose results it
    /// drops, and may record the operations of `body` and replay them.
    fn step(
        &self,
        cache: &mut Self::Cache,
        step: &Step<'_>,
        mut body: impl FnMut(&mut Self::Cache, &Step<'_>) -> Result<Stepped<Self>>,
    ) -> Result<Stepped<Self>> {
        body(cache, step)
    }
    /// Keeps only the sequences of the cache that are marked true.
    fn retain_rows(&self, cache: &mut Self::Cache, keep: &[bool]);

    /// Chooses the next token of each row, with its log-prob.
    fn choose(&self, x: &Self::Tensor, head: &Head<Self>, choice: Choice<'_>, chosen: &mut Vec<Chosen>) -> Result<()>;
    /// Starts [`Decode::choose`] for the rows of `x`, within a generation step; returns None if starting
    /// early brings no gain.
    fn begin_choose(
        &self,
        _cache: &mut Self::Cache,
        _x: impl FnOnce() -> Result<Self::Tensor>,
        _head: &Head<Self>,
        _choice: Choice<'_>,
    ) -> Result<Option<Self::PendingChoice>> {
        Ok(None)
    }
    /// Waits for the tokens of a choice that [`Decode::begin_choose`] started.
    fn finish_choose(&self, choice: &Self::PendingChoice) -> Result<Vec<Chosen>>;
}

/// The error for an operation that a backend does not have.
fn no_kernel(what: &str) -> EngineError {
    EngineError::Input(format!("{what} are not supported on this device yet: use the CPU"))
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
            // The module `lora` of the kernels crate has the same name as the engine's and is allowed.
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
