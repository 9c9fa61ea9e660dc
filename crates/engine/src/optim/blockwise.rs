//! Block-wise dynamic quantization of optimizer states to 8 bits (Dettmers et al. 2022, "8-bit Optimizers via
//! Block-wise Quantization", arXiv 2110.02861): each block of [`BLOCK`] values is divided by its largest magnitude,
//! and each quotient becomes the nearest of 256 levels whose spacing grows tenfold per decade (the paper's dynamic
//! tree, as in bitsandbytes' `create_dynamic_map`).
//!
//! One deviation: a nonzero second moment never becomes zero. If it did, a parameter whose gradient vanishes for a step
//! would move by m/ε instead of m/√v. bitsandbytes keeps such states (embeddings) in 32 bits instead.

use std::sync::LazyLock;

/// Number of values of a moment that share a scale.
pub use crate::kernels::adamw::BLOCK;

const _: () = assert!(
    BLOCK as u64 == crate::spec::footprint::OPTIMIZER_BLOCK,
    "spec::footprint and the 8-bit optimizer must agree on the block size"
);

/// A quantization map from 8-bit codes to levels, ascending.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Map {
    /// Levels from −1 to 1, for first moments.
    Signed,
    /// Levels from 0 to 1, for second moments.
    Unsigned,
}

static SIGNED: LazyLock<[f32; 256]> = LazyLock::new(|| levels(true));
static UNSIGNED: LazyLock<[f32; 256]> = LazyLock::new(|| levels(false));

impl Map {
    /// The 256 levels of the quantization map.
    pub fn levels(self) -> &'static [f32; 256] {
        match self {
            Map::Signed => &SIGNED,
            Map::Unsigned => &UNSIGNED,
        }
    }
}

/// Computes the levels of a quantization map: seven decades from 10⁻⁶ to 1, decade i split into 2ⁱ parts (2ⁱ⁺¹ without
/// sign) with levels in the middles; and 0 and 1.
fn levels(signed: bool) -> [f32; 256] {
    let mut all = vec![0.0, 1.0];
    for decade in 0..7 {
        let parts = if signed { 1 << decade } else { 2 << decade };
        let scale = 10f64.powi(decade - 6);
        for part in 0..parts {
            let middle = 0.1 + 0.9 * (f64::from(part) + 0.5) / f64::from(parts);
            all.push((scale * middle) as f32);
            if signed {
                all.push(-(scale * middle) as f32);
            }
        }
    }
    all.sort_by(f32::total_cmp);
    let mut levels = [0.0; 256];
    levels.copy_from_slice(&all);
    levels
}

/// A flat buffer of optimizer moments with 8 bits per value and one scale per block; the last block may be short.
#[derive(Debug, Clone, PartialEq)]
pub struct Quantized {
    /// The quantization map from codes to levels.
    pub map: Map,
    /// Code of each value: the index of its level.
    pub codes: Vec<u8>,
    /// The largest magnitude of each block, which is its scale.
    pub absmax: Vec<f32>,
}

impl Quantized {
    /// Creates a buffer of zeros.
    pub fn zeros(map: Map, len: usize) -> Self {
        let zero = map.levels().partition_point(|level| *level < 0.0) as u8;
        Self { map, codes: vec![zero; len], absmax: vec![0.0; len.div_ceil(BLOCK)] }
    }

    /// Memory of the buffer in bytes.
    pub fn size_bytes(&self) -> usize {
        self.codes.len() + self.absmax.len() * size_of::<f32>()
    }

    /// Decodes all values, for tests and reports.
    pub fn values(&self) -> Vec<f32> {
        let mut values = vec![0.0; self.codes.len()];
        for ((codes, absmax), out) in self.codes.chunks(BLOCK).zip(&self.absmax).zip(values.chunks_mut(BLOCK)) {
            dequantize(self.map, codes, *absmax, out);
        }
        values
    }
}

/// Decodes the 8-bit codes of one block.
pub fn dequantize(map: Map, codes: &[u8], absmax: f32, out: &mut [f32]) {
    let levels = map.levels();
    for (out, code) in out.iter_mut().zip(codes) {
        *out = levels[usize::from(*code)] * absmax;
    }
}

/// Encodes the values of one block as 8-bit codes; returns the block's scale.
pub fn quantize(map: Map, values: &[f32], codes: &mut [u8]) -> f32 {
    let absmax = values.iter().fold(0f32, |max, value| max.max(value.abs()));
    let levels = map.levels();
    let zero = levels.partition_point(|level| *level < 0.0);
    for (code, value) in codes.iter_mut().zip(values) {
        // Divide instead of multiplying by the inverse, because 1/absmax overflows for tiny scales.
        let nearest = if absmax > 0.0 { nearest(levels, value / absmax) } else { zero };
        let vanished = map == Map::Unsigned && nearest == zero && *value > 0.0;
        *code = (nearest + usize::from(vanished)) as u8;
    }
    absmax
}

/// Index of the level nearest to x; the lower one if two are equally near.
fn nearest(levels: &[f32; 256], x: f32) -> usize {
    let above = levels.partition_point(|level| *level < x).min(255);
    if above > 0 && x - levels[above - 1] <= levels[above] - x { above - 1 } else { above }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_maps_are_those_of_bitsandbytes() {
        // Expected values from bitsandbytes.functional.create_dynamic_map(signed=True / False): both ends,
        // and levels around zero.
        let signed = Map::Signed.levels();
        assert!(signed.windows(2).all(|pair| pair[0] < pair[1]));
        assert_eq!((signed[127], signed[255]), (0.0, 1.0));
        assert!((signed[0] + 0.992_968_75).abs() < 1e-6, "{}", signed[0]);
        assert!((signed[128] - 5.5e-7).abs() < 1e-12, "{}", signed[128]);
        assert!((signed[254] - 0.992_968_75).abs() < 1e-6);
        let unsigned = Map::Unsigned.levels();
        assert!(unsigned.windows(2).all(|pair| pair[0] < pair[1]));
        assert_eq!((unsigned[0], unsigned[255]), (0.0, 1.0));
        assert!((unsigned[1] - 3.25e-7).abs() < 1e-12 && (unsigned[2] - 7.75e-7).abs() < 1e-12);
        assert!((unsigned[254] - 0.996_484_4).abs() < 1e-6, "{}", unsigned[254]);
    }

    #[test]
    fn every_level_and_every_large_value_survives_quantization() {
        for map in [Map::Signed, Map::Unsigned] {
            let scale = 3.7e-5;
            let values: Vec<f32> = map.levels().iter().map(|level| level * scale).collect();
            let mut codes = [0; BLOCK];
            assert_eq!(quantize(map, &values, &mut codes), scale);
            let expected: Vec<u8> = (0..=255).collect();
            assert_eq!(codes.as_slice(), expected);
            // A decade is split evenly, and each lower decade has half as many levels; the error is at
            // most half a spacing.
            let levels_of_first = match map {
                Map::Signed => 64.0,
                Map::Unsigned => 128.0,
            };
            for i in 10..1000 {
                let value = scale * i as f32 / 1000.0;
                let mut codes = [0; 2];
                let absmax = quantize(map, &[scale, value], &mut codes);
                let back = map.levels()[usize::from(codes[1])] * absmax;
                let half_level = match i {
                    100.. => 0.45 / levels_of_first,
                    _ => 0.045 / (levels_of_first / 2.0),
                };
                assert!((back - value).abs() <= 1.02 * half_level * scale, "{map:?}: {value} became {back}");
            }
        }
    }

    #[test]
    fn a_second_moment_that_is_not_zero_never_becomes_zero() {
        let mut codes = [0; 3];
        let absmax = quantize(Map::Unsigned, &[1.0, 1e-12, 0.0], &mut codes);
        assert_eq!((absmax, codes), (1.0, [255, 1, 0]));
        let mut codes = [9; 2];
        assert_eq!(quantize(Map::Signed, &[0.0, 0.0], &mut codes), 0.0);
        assert_eq!(codes, [127; 2]);
        assert_eq!(Quantized::zeros(Map::Signed, 300).values(), vec![0.0; 300]);
    }
}
