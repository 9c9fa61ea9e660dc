//! Final norm and language-model head: logits, log-probs, entropies and their gradient, by chunks over the positions that
//! are scored; never `[tokens, vocabulary]` for a whole batch.

use candle_core::Tensor;

use super::packing::{Packing, Target};
use crate::engine::error::Result;
use crate::engine::ops;
use crate::engine::ops::slices::TokenScore;
use crate::spec::footprint::{MAX_LOGITS, MIN_LOGIT_ROWS};

/// The final norm and the head.
#[derive(Clone, Debug)]
pub struct Head {
    /// RMSNorm's weight.
    pub norm: Vec<f32>,
    /// RMSNorm's epsilon.
    pub eps: f32,
    /// `[vocab, hidden]`; the embedding itself where tied.
    pub weight: Tensor,
    /// Inputs of matrix products are rounded to bf16; the weight is already.
    pub bf16: bool,
}

/// Where the gradients of the final norm and of the head's weight are added.
#[derive(Debug)]
pub struct HeadSlots<'a> {
    /// `[hidden]`
    pub norm: &'a mut [f32],
    /// `[vocab, hidden]`
    pub weight: &'a mut [f32],
}

/// A forward over targets, ready for the backward.
#[derive(Debug)]
pub struct Scored {
    /// Of each target.
    pub scores: Vec<TokenScore>,
    /// The residual stream at the targets `[N, hidden]`.
    hidden: Tensor,
    /// The only chunk's logits, kept when there is one chunk.
    logits: Option<Tensor>,
}

impl Head {
    /// Rows of the vocabulary.
    pub fn vocab_size(&self) -> usize {
        self.weight.dims()[0]
    }

    /// Logits `[N, vocab]` of some rows of the residual stream.
    pub fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        let normed = self.rounded(ops::rms_norm(hidden, &self.norm, self.eps)?)?;
        ops::padded(&normed, |x| Ok(ops::linear(x, &self.weight, None)?))
    }

    fn rounded(&self, x: Tensor) -> Result<Tensor> {
        if self.bf16 { Ok(ops::round_bf16(&x)?) } else { Ok(x) }
    }

    fn chunk_rows(&self) -> usize {
        (MAX_LOGITS as usize / self.vocab_size()).max(MIN_LOGIT_ROWS as usize)
    }

    /// Log-probs and entropies of the targets; `x` `[T, hidden]` is the residual stream after the last layer.
    pub fn score(&self, x: &Tensor, targets: &[Target], temperature: f64) -> Result<Scored> {
        let from = targets.iter().map(|t| t.from as u32).collect::<Vec<u32>>();
        let hidden = x.index_select(&Tensor::from_vec(from, targets.len(), x.device())?, 0)?;
        let mut scores = Vec::with_capacity(targets.len());
        let mut kept = None;
        for (begin, ids) in self.chunks(targets) {
            let logits = self.logits(&hidden.narrow(0, begin, ids.len())?)?;
            scores.extend(ops::token_scores(&logits, &ids, temperature)?);
            kept = (ids.len() == targets.len()).then_some(logits);
        }
        Ok(Scored { scores, hidden, logits: kept })
    }

    /// dL/dx `[T, hidden]` from dL/dlogp of each target (`g`); in full fine-tuning the weights' gradients are added to
    /// `slots`.
    pub fn vjp(
        &self,
        scored: &Scored,
        packing: &Packing,
        temperature: f64,
        g: &[f32],
        mut slots: Option<HeadSlots<'_>>,
    ) -> Result<Tensor> {
        let (targets, rows) = (packing.targets.as_slice(), packing.ids.len());
        let width = self.norm.len();
        let mut dx = vec![0f32; rows * width];
        for (begin, ids) in self.chunks(targets) {
            let hidden = scored.hidden.narrow(0, begin, ids.len())?;
            let logits = match &scored.logits {
                Some(logits) => logits.clone(),
                None => self.logits(&hidden)?,
            };
            let d_logits = ops::token_scores_vjp(&logits, &ids, temperature, &g[begin..begin + ids.len()])?;
            let d_logits = self.rounded(d_logits)?;
            let d_normed = d_logits.matmul(&self.weight)?;
            if let Some(slots) = &mut slots {
                let normed = self.rounded(ops::rms_norm(&hidden, &self.norm, self.eps)?)?;
                let d_weight = d_logits.t()?.matmul(&normed)?;
                ops::with_values(&d_weight, |values| ops::slices::add_scaled(slots.weight, 1.0, values))?;
                let d_norm = ops::rms_norm_weight_vjp(&hidden, self.eps, &d_normed)?;
                ops::slices::add_scaled(slots.norm, 1.0, &d_norm);
            }
            let d_hidden = ops::rms_norm_vjp(&hidden, &self.norm, self.eps, &d_normed)?;
            ops::with_values(&d_hidden, |values| {
                for (target, values) in targets[begin..].iter().zip(values.chunks_exact(width)) {
                    ops::slices::add_scaled(&mut dx[target.from * width..][..width], 1.0, values);
                }
            })?;
        }
        Ok(Tensor::from_vec(dx, (rows, width), self.weight.device())?)
    }

    fn chunks<'t>(&self, targets: &'t [Target]) -> impl Iterator<Item = (usize, Vec<u32>)> + use<'t> {
        let rows = self.chunk_rows();
        targets.chunks(rows).enumerate().map(move |(i, c)| (i * rows, c.iter().map(|t| t.id).collect()))
    }
}
