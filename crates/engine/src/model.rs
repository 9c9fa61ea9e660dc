//! A language model and its trained parameters. The decoder is generic over the
//! operations of a [`backend`](super::backend).

mod attention;
mod batch;
pub mod decode;
mod decoder;
pub mod full;
mod kept;
pub mod layer;
pub mod linear;
mod mixer;
pub mod packing;
pub mod pass;
pub mod rope;
mod trained;

use std::path::Path;

use super::backend::TokenDropout;
#[cfg(feature = "cuda")]
use super::backend::cuda::Cuda;
use super::backend::{BackendKind, cpu::Cpu, reference::Reference};
pub use super::backend::{Choice, Chosen, Flat, Pick};
use super::error::{EngineError, Result};
use super::load::Weights;
use super::lora::Lora;
pub use super::lora::ParameterInfo;
use super::ops::slices::TokenScore;
use crate::modelcard::{self, ModelCard};
#[cfg(feature = "cuda")]
use crate::spec::footprint;
use crate::spec::footprint::Place;
use crate::spec::{ComputeDtype, FourBitPlan, TrainingPlan};
pub use crate::trajectory::Trajectory;

pub use decode::DecodeState;
use decoder::{Decoder, TargetLoss};
use full::Full;
pub use kept::{Joined, Joining};
use packing::Packing;
use pass::{Applied, Pass, TrainedRows};

/// The scores of one trajectory; one entry per model token, in order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RowScore {
    /// Log-probabilities in nats, of logits / temperature.
    pub logps: Vec<f32>,
    /// Entropies of the next-token distributions, in nats.
    pub entropies: Vec<f32>,
    /// Number of tokens that are the model's greedy choice: no other token has a larger logit.
    pub num_top: usize,
}

/// Whether the LoRA adapter is applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Adapter {
    /// The weights with the adapter: the policy.
    On,
    /// The same weights without the adapter: the reference.
    Off,
}

/// Next-token logits on the host, one row per sequence.
#[derive(Clone, Debug, Default)]
pub struct Logits {
    /// The logits, row-major, `[rows][vocab_size]`.
    pub values: Vec<f32>,
    /// Number of logits in a row: the size of the vocabulary.
    pub vocab_size: usize,
}

impl Logits {
    /// Number of rows of logits, one per sequence.
    pub fn len(&self) -> usize {
        self.values.len().checked_div(self.vocab_size).unwrap_or(0)
    }

    /// Whether there are no rows of logits.
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// The logits of one sequence.
    pub fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.vocab_size..(row + 1) * self.vocab_size]
    }

    /// The logits of one sequence, for changes in place.
    pub fn row_mut(&mut self, row: usize) -> &mut [f32] {
        &mut self.values[row * self.vocab_size..(row + 1) * self.vocab_size]
    }
}

/// A loss function of the engine: maps the new log-probs to dL/dlogp, `[row][token]`.
pub type LossGradient<'l> = dyn FnMut(&[RowScore]) -> Result<Vec<Vec<f32>>> + 'l;

/// The number formats that a model is computed with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Precision {
    /// Precision of the matrix products.
    pub dtype: ComputeDtype,
    /// How linear layers are quantized when they are loaded; None means as stored.
    pub load_in_4bit: Option<FourBitPlan>,
}

impl From<ComputeDtype> for Precision {
    fn from(dtype: ComputeDtype) -> Self {
        Precision { dtype, load_in_4bit: None }
    }
}

impl From<&TrainingPlan> for Precision {
    fn from(plan: &TrainingPlan) -> Self {
        Precision { dtype: plan.dtype, load_in_4bit: plan.four_bit() }
    }
}

/// A language model. The trained parameters are a LoRA adapter over frozen weights ([`Policy::add_lora`]), all
/// weights ([`Policy::train_all`]), or none.
#[derive(Debug)]
pub struct Policy {
    card: ModelCard,
    dtype: ComputeDtype,
    network: Network,
    lora: Option<Lora>,
    full: Option<Full>,
}

/// The decoder on its backend.
#[derive(Clone, Debug)]
enum Network {
    Cpu(Decoder<Cpu>),
    Reference(Decoder<Reference>),
    #[cfg(feature = "cuda")]
    Cuda(Decoder<Cuda>),
}

/// Runs `$body` with the decoder of any backend.
macro_rules! with_decoder {
    ($network:expr, |$decoder:ident| $body:expr) => {
        match $network {
            Network::Cpu($decoder) => $body,
            Network::Reference($decoder) => $body,
            #[cfg(feature = "cuda")]
            Network::Cuda($decoder) => $body,
        }
    };
}
use with_decoder;

/// Rejects models that need an operation without a GPU kernel.
#[cfg(feature = "cuda")]
fn check_gpu(card: &ModelCard) -> Result<()> {
    let Some(keys) = card.config.beyond_gpu() else { return Ok(()) };
    let family = card.config.family;
    Err(EngineError::Input(format!("{family} models cannot run on a GPU yet ({keys} in config.json): use the CPU")))
}

impl Policy {
    /// Loads a model directory; computes in f32.
    pub fn load(dir: &Path, kind: BackendKind) -> Result<Policy> {
        Policy::load_dtype(dir, kind, ComputeDtype::F32)
    }

    /// Loads a model directory like [`Policy::load`], with matrices in this precision; sums are f32.
    pub fn load_dtype(dir: &Path, kind: BackendKind, precision: impl Into<Precision>) -> Result<Policy> {
        Policy::load_card(dir, modelcard::read(dir)?, kind, precision)
    }

    /// Loads a model directory like [`Policy::load_dtype`], with a card that was already read.
    pub fn load_card(
        dir: &Path,
        card: ModelCard,
        kind: BackendKind,
        precision: impl Into<Precision>,
    ) -> Result<Policy> {
        let Precision { dtype, load_in_4bit } = precision.into();
        let mut weights = Weights::open(dir, &card).quantized(load_in_4bit);
        let network = match kind {
            BackendKind::Cpu => Network::Cpu(Decoder::load(Cpu::new(dtype)?, &mut weights, &card.config)?),
            BackendKind::Reference => {
                Network::Reference(Decoder::load(Reference::new(dtype), &mut weights, &card.config)?)
            }
            #[cfg(feature = "cuda")]
            BackendKind::Cuda { ordinal } => {
                check_gpu(&card)?;
                Network::Cuda(Decoder::load(Cuda::open(ordinal, dtype)?, &mut weights, &card.config)?)
            }
            #[cfg(not(feature = "cuda"))]
            BackendKind::Cuda { ordinal } => {
                return Err(EngineError::Input(format!("cuda:{ordinal} needs a build with CUDA; this build has none")));
            }
        };
        Ok(Policy { card, dtype, network, lora: None, full: None })
    }

    /// Loads a model directory like [`Policy::load`], with this CPU's precision, instructions and threads.
    pub fn on_cpu(dir: &Path, cpu: Cpu) -> Result<Policy> {
        Policy::quantized_on_cpu(dir, cpu, None)
    }

    /// Loads a model directory like [`Policy::on_cpu`], and quantizes its linear layers.
    pub fn quantized_on_cpu(dir: &Path, cpu: Cpu, load_in_4bit: Option<FourBitPlan>) -> Result<Policy> {
        let card = modelcard::read(dir)?;
        let mut weights = Weights::open(dir, &card).quantized(load_in_4bit);
        let dtype = cpu.dtype();
        let network = Network::Cpu(Decoder::load(cpu, &mut weights, &card.config)?);
        Ok(Policy { card, dtype, network, lora: None, full: None })
    }

    /// Loads a model directory like [`Policy::load`], with this GPU, its precision and its kind of products.
    #[cfg(feature = "cuda")]
    pub fn on_cuda(dir: &Path, cuda: Cuda) -> Result<Policy> {
        let card = modelcard::read(dir)?;
        check_gpu(&card)?;
        let mut weights = Weights::open(dir, &card);
        let dtype = cuda.dtype();
        let network = Network::Cuda(Decoder::load(cuda, &mut weights, &card.config)?);
        Ok(Policy { card, dtype, network, lora: None, full: None })
    }

    /// The model card: facts about the model that do not need its tensors.
    pub fn card(&self) -> &ModelCard {
        &self.card
    }

    /// The precision of the matrices.
    pub fn dtype(&self) -> ComputeDtype {
        self.dtype
    }

    /// The device that the model runs on.
    pub fn place(&self) -> Place {
        match &self.network {
            Network::Cpu(_) | Network::Reference(_) => Place::Cpu,
            #[cfg(feature = "cuda")]
            Network::Cuda(decoder) => Place::Cuda { memory_bytes: Some(decoder.backend().memory_bytes()) },
        }
    }

    /// Memory of the base model's matrices in bytes: of the linear layers, and of embedding and head; None if the backend does
    /// not know it.
    pub fn matrix_bytes(&self) -> Option<(usize, usize)> {
        with_decoder!(&self.network, |decoder| decoder.matrix_bytes())
    }

    /// Frees memory that the backend caches for reuse.
    pub fn release(&self) {
        with_decoder!(&self.network, |decoder| decoder.release());
    }

    /// The GPU that the model runs on, for measurements; None on the CPU.
    #[cfg(feature = "cuda")]
    pub fn device(&self) -> Option<&super::kernels::cuda::driver::Device> {
        match &self.network {
            Network::Cpu(_) | Network::Reference(_) => None,
            Network::Cuda(decoder) => Some(decoder.backend().device()),
        }
    }

    /// Peak device memory of this process in bytes, including the driver's own; None on the CPU, which
    /// uses the process's memory.
    pub fn device_peak_bytes(&self) -> Option<u64> {
        match &self.network {
            Network::Cpu(_) | Network::Reference(_) => None,
            #[cfg(feature = "cuda")]
            Network::Cuda(decoder) => {
                let device = decoder.backend().device();
                let taken = device.properties().taken_bytes.unwrap_or(footprint::CUDA_CONTEXT_BYTES);
                Some(taken + device.memory().reserved_peak)
            }
        }
    }

    /// Sets whether the backward pass recomputes activations instead of storing them; the results do not change. The
    /// default is to store them.
    pub fn set_gradient_checkpointing(&mut self, gradient_checkpointing: bool) {
        with_decoder!(&mut self.network, |decoder| decoder.set_gradient_checkpointing(gradient_checkpointing));
    }

    /// Whether sampling gives a token the same log-prob, bit for bit, as [`Policy::score`] and the training forward.
    pub fn samples_exactly(&self) -> bool {
        with_decoder!(&self.network, |decoder| decoder.samples_exactly())
    }

    /// Computes log-probs and entropies of the model tokens, without gradient.
    pub fn score(&self, rows: &[Trajectory<'_>], temperature: f64, adapter: Adapter) -> Result<Vec<RowScore>> {
        let packing = self.pack(rows)?;
        if packing.targets.is_empty() {
            return Ok(vec![RowScore::default(); rows.len()]);
        }
        let scores = with_decoder!(&self.network, |decoder| decoder.score(&packing, temperature, adapter))?;
        Ok(by_row(rows, &scores))
    }

    /// Runs one forward pass over the rows. `loss` receives the new scores and returns dL/dlogp per
    /// row and model token. The backward pass adds dL/dparameter to `gradient`, which is flat, in
    /// the order of [`Policy::parameters`].
    pub fn forward_backward(
        &self,
        rows: &[Trajectory<'_>],
        temperature: f64,
        loss: &mut LossGradient<'_>,
        gradient: &mut Flat,
    ) -> Result<Vec<RowScore>> {
        self.forward_backward_with(rows, temperature, &TrainedRows::default(), loss, gradient)
    }

    /// Runs [`Policy::forward_backward`] with options. The scores include the dropout.
    pub fn forward_backward_with(
        &self,
        rows: &[Trajectory<'_>],
        temperature: f64,
        options: &TrainedRows<'_>,
        loss: &mut LossGradient<'_>,
        gradient: &mut Flat,
    ) -> Result<Vec<RowScore>> {
        if self.flat().is_empty() {
            return Err(no_adapter());
        }
        if gradient.len() != self.flat().len() {
            let detail = format!(
                "the gradient has {} values, but the model has {} trainable parameters",
                gradient.len(),
                self.flat().len()
            );
            return Err(EngineError::Input(detail));
        }
        let packing = self.pack(rows)?;
        if packing.targets.is_empty() {
            let scores = vec![RowScore::default(); rows.len()];
            loss(&scores)?;
            return Ok(scores);
        }
        let p = self.lora_config().map_or(0.0, |lora| lora.dropout);
        let dropout =
            options.dropout.filter(|_| p > 0.0).map(|dropout| TokenDropout::of_rows(p, dropout, rows, &packing));
        let pass = Pass { adapter: Applied::Trained, dropout: dropout.as_ref(), layer: 0 };
        let mut scores = Vec::new();
        let mut by_target = |new: &[TokenScore]| -> Result<Vec<f32>> {
            scores = by_row(rows, new);
            let g = loss(&scores)?;
            if g.len() != rows.len() || g.iter().zip(rows).any(|(g, row)| g.len() != row.num_model_tokens()) {
                return Err(EngineError::Input("the loss returned gradients of the wrong shape".to_owned()));
            }
            Ok(g.concat())
        };
        let trained = options.targets(rows);
        let loss = TargetLoss { trained: &trained, gradient: &mut by_target };
        with_decoder!(&self.network, |decoder| {
            decoder.forward_backward(&packing, temperature, pass, loss, gradient)
        })?;
        Ok(scores)
    }

    /// Computes the full logits at some positions of one sequence.
    pub fn logits(&self, ids: &[u32], positions: &[usize], adapter: Adapter) -> Result<Vec<Vec<f32>>> {
        if ids.is_empty() || positions.iter().any(|p| *p >= ids.len()) {
            return Err(EngineError::Input(format!(
                "positions {positions:?} are not in a sequence of {} tokens",
                ids.len()
            )));
        }
        let values = with_decoder!(&self.network, |decoder| decoder.logits(ids, positions, adapter))?;
        Ok(values.chunks_exact(self.card.config.vocab_size).map(<[f32]>::to_vec).collect())
    }

    /// Computes the normed hidden state of each sequence's last token, without the adapter: `[sequences][hidden_size]`.
    pub fn last_hidden(&self, sequences: &[&[u32]]) -> Result<Vec<f32>> {
        if sequences.iter().any(|sequence| sequence.is_empty()) {
            return Err(EngineError::Input("a sequence is empty; at least one token is required".to_owned()));
        }
        if sequences.is_empty() {
            return Ok(Vec::new());
        }
        with_decoder!(&self.network, |decoder| decoder.last_hidden(sequences))
    }

    fn pack(&self, rows: &[Trajectory<'_>]) -> Result<Packing> {
        with_decoder!(&self.network, |decoder| decoder.pack(rows))
    }
}

const EMBEDDING: &str = "model.embed_tokens.weight";
const NORM: &str = "model.norm.weight";
const HEAD: &str = "lm_head.weight";

fn no_adapter() -> EngineError {
    EngineError::Adapter("the model has no adapter, and its weights are frozen".to_owned())
}

fn unknown_token(id: u32, vocab_size: u32) -> String {
    format!("token id {id} is not below vocab_size {vocab_size}; the tokenizer does not belong to this model")
}

fn by_row(rows: &[Trajectory<'_>], scores: &[TokenScore]) -> Vec<RowScore> {
    let mut scores = scores.iter();
    let rows = rows.iter().map(|row| {
        let mut num_top = 0;
        let of_token = |score: &TokenScore| {
            num_top += usize::from(score.is_top);
            (score.logp, score.entropy)
        };
        let (logps, entropies) = scores.by_ref().take(row.num_model_tokens()).map(of_token).unzip();
        RowScore { logps, entropies, num_top }
    });
    rows.collect()
}

#[cfg(test)]
mod tests;
