//! Rotary angles, with frequencies computed as in transformers (`modeling_rope_utils.py`), in f32 where it uses f32.
//!
//! With `dynamic` and `longrope` the angles depend on the length of a sequence (prompt and completion), and each
//! sequence uses its own length. transformers uses the longest sequence of a batch; a batch of one row there equals any
//! row here. While sampling the final length is unknown; see [`Ropes::length_when_sampling`].

use std::f64::consts::TAU;
use std::sync::{Arc, Mutex};

use crate::backend::Compute;
use crate::error::Result;
use crate::modelcard::{ModelDescription, Rope, RopeKind};
use crate::ops::RopeTable;

/// The rotary tables of all layers, and those of layers with a window if they differ.
#[derive(Debug)]
pub struct Ropes {
    full: Tables,
    local: Option<Tables>,
}

/// The rotary tables of a batch's tokens, for layers with and without an attention window.
#[derive(Debug)]
pub struct TokenTables {
    /// The rotary table of all layers.
    pub full: TokenTable,
    /// The rotary table of layers with an attention window, if different.
    pub local: Option<TokenTable>,
}

/// The rotary table of a batch's tokens, and the row of each token.
#[derive(Debug)]
pub struct TokenTable {
    /// Cosines and sines of the rotary embedding, by position.
    pub table: Arc<RopeTable>,
    /// The table row of each token; None means that the row is the token's position.
    pub rows: Option<Vec<usize>>,
}

/// The rotary angles of a batch's tokens on a backend, for layers with and without an attention window.
#[derive(Debug)]
pub struct Angles<B: Compute> {
    full: B::Angles,
    local: Option<B::Angles>,
}

impl<B: Compute> Angles<B> {
    /// Computes the rotary angles of tokens at these positions.
    pub fn new(backend: &B, token_tables: &TokenTables, positions: &[usize]) -> Result<Self> {
        let of = |table: &TokenTable| backend.angles(&table.table, table.rows.as_deref().unwrap_or(positions));
        Ok(Self { full: of(&token_tables.full)?, local: token_tables.local.as_ref().map(of).transpose()? })
    }

    /// The rotary angles for a layer with an attention window, or without one.
    pub fn of(&self, is_local: bool) -> &B::Angles {
        self.local.as_ref().filter(|_| is_local).unwrap_or(&self.full)
    }
}

impl Ropes {
    /// Creates the rotary tables of a model.
    pub fn new(config: &ModelDescription) -> Ropes {
        Ropes { full: Tables::new(&config.rope), local: config.local_rope.as_ref().map(Tables::new) }
    }

    fn all(&self) -> impl Iterator<Item = &Tables> {
        [&self.full].into_iter().chain(&self.local)
    }

    /// Whether a token's angles depend on the length of its sequence.
    pub fn depend_on_length(&self) -> bool {
        self.all().any(|tables| tables.rope.depends_on_length())
    }

    /// Two sequences have the same angles if this value is the same for their lengths.
    pub fn regime(&self, length: usize) -> usize {
        self.all().map(|tables| tables.regime(length)).max().unwrap_or(0)
    }

    /// The sequence length that determines a token's angles during sampling: the sequence has `length` tokens now and
    /// will have at most `most`. LongRoPE has two sets of frequencies, and cached keys must use the same set as later
    /// ones, so the set for the maximum length is used, as in vLLM for all sequences. With a dynamic base the angles
    /// change with each token, as in the `generate` method of transformers.
    pub fn length_when_sampling(&self, length: usize, most: usize) -> usize {
        let is_long = |tables: &Tables| matches!(tables.rope.kind, RopeKind::LongRope { .. });
        if self.all().any(is_long) { most } else { length }
    }

    /// Returns the tables for tokens at these positions. `length_of` returns the length of a token's sequence; it is
    /// called only if angles depend on it.
    pub fn token_tables(&self, positions: &[usize], length_of: impl Fn(usize) -> usize) -> TokenTables {
        let table = |tables: &Tables| tables.token_table(positions, &length_of);
        TokenTables { full: table(&self.full), local: self.local.as_ref().map(table) }
    }
}

/// Rotary tables that grow to the longest position requested.
#[derive(Debug)]
struct Tables {
    rope: Rope,
    /// Frequencies for sequences no longer than the model's original context.
    usual: Frequencies,
    table: Mutex<Arc<RopeTable>>,
}

impl Tables {
    fn new(rope: &Rope) -> Tables {
        Tables { rope: rope.clone(), usual: Frequencies::new(rope, 0), table: Mutex::default() }
    }

    /// Index of the set of frequencies for a sequence length; 0 for usual lengths.
    fn regime(&self, length: usize) -> usize {
        match self.rope.kind {
            RopeKind::Dynamic { original_max_position_embeddings: original, .. } if length as f64 > original => length,
            RopeKind::LongRope { original_max_position_embeddings: original, .. } => {
                usize::from(length as f64 > original)
            }
            _ => 0,
        }
    }

    fn token_table(&self, positions: &[usize], length_of: impl Fn(usize) -> usize) -> TokenTable {
        let is_usual = |token| self.regime(length_of(token)) == 0;
        if !self.rope.depends_on_length() || (0..positions.len()).all(is_usual) {
            return TokenTable {
                table: self.usual(positions.iter().max().map_or(1, |position| position + 1)),
                rows: None,
            };
        }
        let mut table = RopeTable { half: self.rope.rotary_dim / 2, ..RopeTable::default() };
        let mut known: Option<(usize, Frequencies)> = None;
        for (token, position) in positions.iter().enumerate() {
            let length = length_of(token);
            let regime = self.regime(length);
            let frequencies = match &mut known {
                Some((of, frequencies)) if *of == regime => frequencies,
                known => &mut known.insert((regime, Frequencies::new(&self.rope, length))).1,
            };
            frequencies.push(*position, &mut table);
        }
        TokenTable { table: Arc::new(table), rows: Some((0..positions.len()).collect()) }
    }

    /// Returns a table with at least `positions` positions, for sequences of usual length.
    fn usual(&self, positions: usize) -> Arc<RopeTable> {
        let mut table = self.table.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if table.len() < positions {
            let mut longer = RopeTable { half: self.rope.rotary_dim / 2, ..RopeTable::default() };
            (0..positions.next_power_of_two().max(256)).for_each(|position| self.usual.push(position, &mut longer));
            *table = Arc::new(longer);
        }
        table.clone()
    }
}

/// Inverse frequencies of the rotary embedding `[rotary_dim / 2]`, and the factor on cosine and sine.
#[derive(Debug)]
struct Frequencies {
    inverse: Vec<f32>,
    attention_factor: f32,
}

impl Frequencies {
    /// Computes the rotary frequencies for sequences of this length.
    fn new(rope: &Rope, length: usize) -> Frequencies {
        let (inverse, attention_factor) = frequencies(rope, length);
        Frequencies { inverse, attention_factor }
    }

    fn push(&self, position: usize, table: &mut RopeTable) {
        for inverse in &self.inverse {
            let (sin, cos) = (position as f32 * inverse).sin_cos();
            table.cos.push(cos * self.attention_factor);
            table.sin.push(sin * self.attention_factor);
        }
    }
}

fn frequencies(rope: &Rope, length: usize) -> (Vec<f32>, f32) {
    let dim = rope.rotary_dim;
    let base = rope.theta;
    let of_base = |base: f64| (0..dim / 2).map(move |i| (base as f32).powf((2 * i) as f32 / dim as f32));
    let plain = of_base(base).map(|f| 1.0 / f);
    match &rope.kind {
        RopeKind::Default => (plain.collect(), 1.0),
        RopeKind::Linear { factor } => (plain.map(|f| f / *factor as f32).collect(), 1.0),
        RopeKind::Dynamic { factor, original_max_position_embeddings: original } => {
            let times = (length as f64).max(*original) / original;
            let base = base * (factor * times - (factor - 1.0)).powf(dim as f64 / (dim as f64 - 2.0));
            (of_base(base).map(|f| 1.0 / f).collect(), 1.0)
        }
        RopeKind::LongRope {
            short_factor,
            long_factor,
            original_max_position_embeddings: original,
            attention_factor,
        } => {
            let factors = if length as f64 > *original { long_factor } else { short_factor };
            let scaled = of_base(base).zip(factors).map(|(f, factor)| 1.0 / (*factor as f32 * f));
            (scaled.collect(), *attention_factor as f32)
        }
        RopeKind::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings: original } => {
            let scaled = plain.map(|f| {
                let wavelength = TAU / f64::from(f);
                if wavelength < original / high_freq_factor {
                    f
                } else if wavelength > original / low_freq_factor {
                    f / *factor as f32
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
            let (mut low, mut high) = (correction(*beta_fast), correction(*beta_slow));
            if *truncate {
                (low, high) = (low.floor(), high.ceil());
            }
            (low, high) = (low.max(0.0), high.min(dim as f64 - 1.0));
            if low == high {
                high += 0.001;
            }
            let mixed = of_base(base).enumerate().map(|(i, f)| {
                let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0) as f32;
                let (interpolated, extrapolated) = (1.0 / (*factor as f32 * f), 1.0 / f);
                interpolated * ramp + extrapolated * (1.0 - ramp)
            });
            (mixed.collect(), *attention_factor as f32)
        }
    }
}
