//! Rotary angles, with frequencies as transformers computes them (`modeling_rope_utils.py`), in f32 where it does.
//!
//! Where they depend on the length of a sequence (`dynamic`, `longrope`), each sequence has the angles of its own length, that of
//! prompt and completion. transformers takes the longest of a batch, so a row alone there is what every row is here. What a
//! sampler cannot know yet is in [`Ropes::length_when_sampling`].

use std::f64::consts::TAU;
use std::sync::{Arc, Mutex};

use crate::backend::Compute;
use crate::error::Result;
use crate::modelcard::{ModelDescription, Rope, RopeKind};
use crate::ops::RopeTable;

/// Those of all layers, and of layers with a window where they are others.
#[derive(Debug)]
pub struct Ropes {
    full: Tables,
    local: Option<Tables>,
}

/// The tables of some tokens.
#[derive(Debug)]
pub struct Turns {
    /// Of all layers.
    pub full: Turn,
    /// Of layers with a window, where they are others.
    pub local: Option<Turn>,
}

/// The table of some tokens.
#[derive(Debug)]
pub struct Turn {
    /// Cosines and sines.
    pub table: Arc<RopeTable>,
    /// Each token's row of the table; None = its position.
    pub rows: Option<Vec<usize>>,
}

/// The angles of some tokens on a backend.
#[derive(Debug)]
pub struct Angles<B: Compute> {
    full: B::Angles,
    local: Option<B::Angles>,
}

impl<B: Compute> Angles<B> {
    /// Of tokens at these positions.
    pub fn new(backend: &B, turns: &Turns, positions: &[usize]) -> Result<Self> {
        let of = |turn: &Turn| backend.angles(&turn.table, turn.rows.as_deref().unwrap_or(positions));
        Ok(Self { full: of(&turns.full)?, local: turns.local.as_ref().map(of).transpose()? })
    }

    /// Of a layer that has a window, or has none.
    pub fn of(&self, is_local: bool) -> &B::Angles {
        self.local.as_ref().filter(|_| is_local).unwrap_or(&self.full)
    }
}

impl Ropes {
    /// Those of a model.
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

    /// Sequences of two lengths have the same angles if this is the same.
    pub fn regime(&self, length: usize) -> usize {
        self.all().map(|tables| tables.regime(length)).max().unwrap_or(0)
    }

    /// The length by which a token's angles are taken while its sequence grows: it has `length` tokens, and will have at most
    /// `most`. LongRoPE has two sets, and keys that are cached must be of the same as those to come: the set of the longest that
    /// it can become, as vLLM has it for all sequences. A dynamic base grows with each token, as `generate` of transformers has
    /// it.
    pub fn length_when_sampling(&self, length: usize, most: usize) -> usize {
        let is_long = |tables: &Tables| matches!(tables.rope.kind, RopeKind::LongRope { .. });
        if self.all().any(is_long) { most } else { length }
    }

    /// For tokens at these positions; `length_of` a token is the length of its sequence, asked where angles depend on it.
    pub fn turns(&self, positions: &[usize], length_of: impl Fn(usize) -> usize) -> Turns {
        let turn = |tables: &Tables| tables.turn(positions, &length_of);
        Turns { full: turn(&self.full), local: self.local.as_ref().map(turn) }
    }
}

/// Tables that grow with the longest position asked for.
#[derive(Debug)]
struct Tables {
    rope: Rope,
    /// Of sequences of usual length.
    usual: Frequencies,
    table: Mutex<Arc<RopeTable>>,
}

impl Tables {
    fn new(rope: &Rope) -> Tables {
        Tables { rope: rope.clone(), usual: Frequencies::new(rope, 0), table: Mutex::default() }
    }

    /// 0 for a usual length.
    fn regime(&self, length: usize) -> usize {
        match self.rope.kind {
            RopeKind::Dynamic { original_max_position_embeddings: original, .. } if length as f64 > original => length,
            RopeKind::LongRope { original_max_position_embeddings: original, .. } => {
                usize::from(length as f64 > original)
            }
            _ => 0,
        }
    }

    fn turn(&self, positions: &[usize], length_of: impl Fn(usize) -> usize) -> Turn {
        let is_usual = |token| self.regime(length_of(token)) == 0;
        if !self.rope.depends_on_length() || (0..positions.len()).all(is_usual) {
            return Turn { table: self.usual(positions.iter().max().map_or(1, |position| position + 1)), rows: None };
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
        Turn { table: Arc::new(table), rows: Some((0..positions.len()).collect()) }
    }

    /// A table of at least `positions` positions, of sequences of usual length.
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

/// Inverse frequencies `[rotary_dim / 2]`, and the factor on cos and sin.
#[derive(Debug)]
struct Frequencies {
    inverse: Vec<f32>,
    attention_factor: f32,
}

impl Frequencies {
    /// Of sequences of a length.
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
