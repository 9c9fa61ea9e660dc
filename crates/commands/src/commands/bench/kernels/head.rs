//! Measures the output head, which is computed in pieces of the vocabulary: log-probs, their gradient, and sampling of tokens.

use serde::{Deserialize, Serialize};

use super::super::timing::repeat;
use super::super::{BenchError, Setting};
use super::{Team, random_values};
use crate::engine::kernels::head::{Forward, Gradient, Head, Pick, choose, score, score_for_training, score_vjp};
use crate::engine::kernels::pack::PackedMatrix;

/// Maximum number of token positions to compute log-probs for; more would have the same speed.
const MAX_ROWS: usize = 1024;

/// Results of the output head.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct HeadFigures {
    /// Number of token positions whose log-probs are computed.
    pub rows: usize,
    /// Duration of log-probs and entropies, in seconds.
    pub score_s: f64,
    /// Speed of log-probs, counting the FLOPs of the product alone, in 1e9 per second.
    pub score_gflop_s: f64,
    /// Duration of log-probs and dX in one pass over the vocabulary, as in a training step, in seconds.
    #[serde(default)]
    pub trained_s: f64,
    /// Speed of log-probs and dX in one pass, counting the FLOPs of both products, in 1e9 per second.
    #[serde(default)]
    pub trained_gflop_s: f64,
    /// Duration of dX with recomputed logits, in seconds.
    pub backward_s: f64,
    /// Speed of dX with recomputed logits, counting the FLOPs of both products, in 1e9 per second.
    pub backward_gflop_s: f64,
    /// Duration of sampling one token for every completion of a step, in seconds.
    pub choose_s: f64,
    /// Weights read per second while sampling, in 1e9 bytes.
    pub choose_gb_s: f64,
}

/// Measures the output head with as many token positions as a training step computes log-probs for.
pub(super) fn measure(setting: &Setting<'_>, team: &Team) -> Result<HeadFigures, BenchError> {
    let (args, config) = (setting.args, &setting.card.config);
    let (vocab, hidden) = (config.vocab_size, config.hidden_size);
    let completions = (args.prompts * args.generations) as usize;
    let rows = (completions * args.completion as usize).min(MAX_ROWS);
    let values = random_values(4, vocab * hidden, 0.07);
    let weight = PackedMatrix::new_on(&team.threads, &values, hidden, team.dtype);
    drop(values);
    let x = random_values(5, rows.max(completions) * hidden, 2.0);
    let targets = setting.tokens(0, rows);
    let forward = Forward { x: &x[..rows * hidden], head: Head::of(&weight), targets: &targets, temperature: 1.0 };
    let scored = repeat(2, team.seconds, || -> Result<(), BenchError> {
        score(&team.threads, team.isa, forward.x, forward.head, &targets, 1.0);
        Ok(())
    })?;
    let (g, mut d_x) = (vec![1e-3; rows], vec![0.0; rows * hidden]);
    let (all, none) = (vec![true; rows], vec![false; rows]);
    let mut scores = score_for_training(&team.threads, team.isa, &forward, &all, &mut d_x);
    let trained = repeat(2, team.seconds, || -> Result<(), BenchError> {
        scores = score_for_training(&team.threads, team.isa, &forward, &all, &mut d_x);
        let gradient = Gradient { forward, softmax: &scores.softmax, summed: &all, g: &g };
        score_vjp(&team.threads, team.isa, &gradient, &mut d_x, None);
        Ok(())
    })?;
    let gradient = Gradient { forward, softmax: &scores.softmax, summed: &none, g: &g };
    let back = repeat(2, team.seconds, || -> Result<(), BenchError> {
        score_vjp(&team.threads, team.isa, &gradient, &mut d_x, None);
        Ok(())
    })?;
    let picks = vec![Pick { temperature: 1.0, uniform: 0.5 }; completions];
    let mut tokens = Vec::new();
    let chosen = repeat(2, team.seconds, || -> Result<(), BenchError> {
        choose(&team.threads, team.isa, &x[..completions * hidden], Head::of(&weight), &picks, &mut tokens);
        Ok(())
    })?;
    let flops = 2.0 * (rows * vocab * hidden) as f64;
    Ok(HeadFigures {
        rows,
        score_s: scored.min_s,
        score_gflop_s: flops / scored.min_s / 1e9,
        trained_s: trained.min_s,
        trained_gflop_s: 2.0 * flops / trained.min_s / 1e9,
        backward_s: back.min_s,
        backward_gflop_s: 2.0 * flops / back.min_s / 1e9,
        choose_s: chosen.min_s,
        choose_gb_s: weight.size_bytes() as f64 / chosen.min_s / 1e9,
    })
}
