//! Rotary frequencies, as transformers computes them (`modeling_rope_utils.py`), in f32 where it does.

use std::f64::consts::TAU;
use std::sync::{Arc, Mutex};

use crate::modelcard::{ModelDescription, RopeKind};
use crate::ops::RopeTable;

/// Tables that grow with the longest position asked for.
#[derive(Debug)]
pub struct RopeTables {
    inv_freq: Vec<f32>,
    attention_factor: f32,
    table: Mutex<Arc<RopeTable>>,
}

impl RopeTables {
    /// The frequencies of a model.
    pub fn new(config: &ModelDescription) -> RopeTables {
        let (inv_freq, attention_factor) = frequencies(config);
        RopeTables { inv_freq, attention_factor, table: Mutex::default() }
    }

    /// A table of at least `positions` positions.
    pub fn table(&self, positions: usize) -> Arc<RopeTable> {
        let mut table = self.table.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if table.len() < positions {
            *table = Arc::new(self.compute(positions.next_power_of_two().max(256)));
        }
        table.clone()
    }

    fn compute(&self, positions: usize) -> RopeTable {
        let half = self.inv_freq.len();
        let mut table =
            RopeTable { cos: Vec::with_capacity(positions * half), sin: Vec::with_capacity(positions * half), half };
        for position in 0..positions {
            for freq in &self.inv_freq {
                let (sin, cos) = (position as f32 * freq).sin_cos();
                table.cos.push(cos * self.attention_factor);
                table.sin.push(sin * self.attention_factor);
            }
        }
        table
    }
}

/// Inverse frequencies `[head_dim / 2]` and the factor on cos and sin.
fn frequencies(config: &ModelDescription) -> (Vec<f32>, f32) {
    let dim = config.head_dim;
    let base = config.rope.theta;
    let position_frequencies =
        (0..dim / 2).map(|i| (base as f32).powf((2 * i) as f32 / dim as f32)).collect::<Vec<f32>>();
    let plain = position_frequencies.iter().map(|f| 1.0 / f);
    match config.rope.kind {
        RopeKind::Default => (plain.collect(), 1.0),
        RopeKind::Linear { factor } => (plain.map(|f| f / factor as f32).collect(), 1.0),
        RopeKind::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings: original } => {
            let scaled = plain.map(|f| {
                let wavelength = TAU / f64::from(f);
                if wavelength < original / high_freq_factor {
                    f
                } else if wavelength > original / low_freq_factor {
                    f / factor as f32
                } else {
                    let smooth = (original / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
                    ((1.0 - smooth) * f64::from(f) / factor + smooth * f64::from(f)) as f32
                }
            });
            (scaled.collect(), 1.0)
        }
        RopeKind::Yarn {
            factor,
            original_max_position_embeddings: original,
            beta_fast,
            beta_slow,
            attention_factor,
            truncate,
        } => {
            let correction = |rotations: f64| dim as f64 * (original / (rotations * TAU)).ln() / (2.0 * base.ln());
            let (mut low, mut high) = (correction(beta_fast), correction(beta_slow));
            if truncate {
                (low, high) = (low.floor(), high.ceil());
            }
            (low, high) = (low.max(0.0), high.min(dim as f64 - 1.0));
            if low == high {
                high += 0.001;
            }
            let mixed = position_frequencies.iter().enumerate().map(|(i, f)| {
                let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0) as f32;
                let (interpolated, extrapolated) = (1.0 / (factor as f32 * f), 1.0 / f);
                interpolated * ramp + extrapolated * (1.0 - ramp)
            });
            (mixed.collect(), attention_factor as f32)
        }
    }
}
