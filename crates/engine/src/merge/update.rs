//! The adapter's updates of weights, and how much of them survives rounding.

use std::collections::HashMap;

use rayon::prelude::*;

use super::MergedDtype;
use crate::error::Result;
use crate::lora::{Lora, Module};
use crate::modelcard::ModelCard;

/// How much of the adapter's update survives rounding, over all adapted weights: `u` is the update, `d` the difference
/// between the merged and the base weights as both are stored.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Survived {
    /// The ratio `d·u / u·u`: 1 = the whole update, 0 = nothing.
    pub fraction: f64,
    /// The cosine `d·u / ‖d‖‖u‖`: 1 = the difference has exactly the direction of the update.
    pub cosine: f64,
}

/// The adapter's update of one weight matrix.
pub(crate) struct Update {
    /// The adapter's factor A `[r, in]`.
    a: Vec<f32>,
    /// The adapter's factor B `[out, r]`.
    b: Vec<f32>,
    r: usize,
    scaling: f32,
}

impl Update {
    /// Computes these rows of the update `s·B·A`, `[rows, in]`.
    pub(crate) fn rows(&self, rows: std::ops::Range<usize>, width: usize) -> Vec<f32> {
        let mut update = vec![0.0; rows.len() * width];
        update.par_chunks_mut(width).zip(rows.into_par_iter()).for_each(|(update, row)| {
            for (factor, a) in self.b[row * self.r..(row + 1) * self.r].iter().zip(self.a.chunks_exact(width)) {
                update.iter_mut().zip(a).for_each(|(update, a)| *update += factor * a);
            }
            update.iter_mut().for_each(|update| *update *= self.scaling);
        });
        update
    }
}

/// The adapter's updates, by the transformers names of the weights.
pub(super) fn updates_of(lora: &Lora, card: &ModelCard) -> Result<HashMap<String, Update>> {
    let values = lora.values.values()?;
    let mut updates = HashMap::new();
    for layer in 0..card.config.num_hidden_layers {
        for module in Module::of_model(&card.config) {
            let Some(slot) = lora.slot(layer, module) else { continue };
            let (rows, columns) = module.shape(&card.config);
            let update = Update {
                a: values[slot.a..slot.a + slot.r * columns].to_vec(),
                b: values[slot.b..slot.b + rows * slot.r].to_vec(),
                r: slot.r,
                scaling: slot.scaling as f32,
            };
            updates.insert(format!("model.layers.{layer}.{}.weight", module.path()), update);
        }
    }
    Ok(updates)
}

/// Dot products of the update `u` and the stored difference `d`, summed over all adapted weights.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Sums {
    /// The dot product `d·u`.
    both: f64,
    /// The dot product `u·u`.
    update: f64,
    /// The dot product `d·d`.
    difference: f64,
}

impl Sums {
    /// The sums of some weights: as stored without and with the update, and the update.
    pub(crate) fn of(base: &[f32], merged: &[f32], update: &[f32]) -> Self {
        base.iter().zip(merged).zip(update).fold(Self::default(), |sums, ((base, merged), update)| {
            let (difference, update) = (f64::from(*merged) - f64::from(*base), f64::from(*update));
            sums.add(Self { both: difference * update, update: update * update, difference: difference * difference })
        })
    }

    pub(crate) fn add(self, other: Self) -> Self {
        Self {
            both: self.both + other.both,
            update: self.update + other.update,
            difference: self.difference + other.difference,
        }
    }

    pub(crate) fn survived(self) -> Option<Survived> {
        let norms = (self.difference * self.update).sqrt();
        let cosine = if norms > 0.0 { self.both / norms } else { 0.0 };
        (self.update > 0.0).then(|| Survived { fraction: self.both / self.update, cosine })
    }
}

/// Adds an update to base weights, and measures how much of it survives rounding.
pub(super) fn add(values: &mut [f32], change: &[f32], dtype: MergedDtype) -> Sums {
    let sums = values.par_chunks_mut(1 << 16).zip(change.par_chunks(1 << 16)).map(|(values, change)| {
        let mut sums = Sums::default();
        for (value, change) in values.iter_mut().zip(change) {
            let merged = *value + change;
            let difference = f64::from(dtype.rounded(merged)) - f64::from(dtype.rounded(*value));
            let change = f64::from(*change);
            sums.both += difference * change;
            sums.update += change * change;
            sums.difference += difference * difference;
            *value = merged;
        }
        sums
    });
    // Adding the threads' sums in a fixed order gives the same figures on every machine.
    sums.collect::<Vec<Sums>>().into_iter().fold(Sums::default(), Sums::add)
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::random::{Key, Stream};

    /// Creates standard normal numbers (Box and Muller).
    fn normal(count: usize, seed: u64) -> Vec<f32> {
        let key = Key::new(seed, Stream::Init);
        let number = |index: usize| {
            let (one, two) = (key.with(2 * index as u64).uniform(), key.with(2 * index as u64 + 1).uniform());
            ((-2.0 * one.max(1e-12).ln()).sqrt() * (2.0 * std::f64::consts::PI * two).cos()) as f32
        };
        (0..count).map(number).collect()
    }

    #[test]
    fn the_share_that_survives_rounding_equals_that_measured_with_torch() {
        // Each line has the update's share of the weights' norm, and the surviving cosine in bfloat16 and in float16.
        for (share, bf16_left, f16_left) in [
            (0.1, (1.0, 1.0), (1.0, 1.0)),
            (0.01, (1.0, 0.987), (1.0, 1.0)),
            (0.001, (0.53, 0.639), (1.0, 0.979)),
            (0.0003, (0.18, 0.368), (0.87, 0.851)),
        ] {
            let (rows, width, r) = (512, 512, 16);
            let base: Vec<f32> =
                normal(rows * width, 1).iter().map(|value| bf16::from_f32(0.02 * value).to_f32()).collect();
            let mut update = Update { a: normal(r * width, 2), b: normal(rows * r, 3), r, scaling: 1.0 };
            let norm = |values: &[f32]| values.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt();
            update.scaling = (share * norm(&base) / norm(&update.rows(0..rows, width))) as f32;
            let change = update.rows(0..rows, width);
            for (dtype, (fraction, cosine)) in [(MergedDtype::Bfloat16, bf16_left), (MergedDtype::Float16, f16_left)] {
                let left = add(&mut base.clone(), &change, dtype).survived().expect("an update");
                let near = |one: f64, other: f64| (one - other).abs() < 0.03;
                assert!(near(left.fraction, fraction) && near(left.cosine, cosine), "{share} {dtype:?} {left:?}");
            }
            let whole = add(&mut base.clone(), &change, MergedDtype::Float32).survived().expect("an update");
            assert!(whole.cosine > 0.9999, "{whole:?}");
        }
    }

    #[test]
    fn the_rows_of_an_update_are_those_of_the_product() {
        let (rows, width, r) = (5, 7, 3);
        let update = Update { a: normal(r * width, 4), b: normal(rows * r, 5), r, scaling: 0.5 };
        let part = update.rows(2..4, width);
        for (index, value) in part.iter().enumerate() {
            let (row, column) = (2 + index / width, index % width);
            let product: f64 =
                (0..r).map(|k| f64::from(update.b[row * r + k]) * f64::from(update.a[k * width + column])).sum();
            assert!((f64::from(*value) - 0.5 * product).abs() < 1e-6);
        }
    }
}
