//! Quantizes matrices to bitsandbytes' 4-bit formats when they are loaded, with the codes that bitsandbytes 0.50 would store
//! (its `functional.py`: `quantize_4bit`; `kernels.cu`: `dQuantizeNF4`, `dQuantizeFP4`).

use std::sync::LazyLock;

use rayon::prelude::*;

use crate::kernels::four_bit::{FourBit, Rounding, Scales};

/// Number of weights that share a scale.
pub const BLOCK: usize = 64;
/// Number of scales that share a scale of their own, with double quantization.
pub const NESTED_BLOCK: usize = 256;

/// The values of NF4's codes, ascending (QLoRA, arXiv 2305.14314, appendix E).
pub const NF4: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// The values of FP4's codes: a sign and three bits, in units of 1/12 of the largest.
pub const FP4: [f32; 16] = [
    0.0,
    0.005_208_333_5,
    0.666_666_7,
    1.0,
    0.333_333_34,
    0.5,
    0.166_666_67,
    0.25,
    0.0,
    -0.005_208_333_5,
    -0.666_666_7,
    -1.0,
    -0.333_333_34,
    -0.5,
    -0.166_666_67,
    -0.25,
];

/// Quantizes a matrix to these 16 values, in blocks of [`BLOCK`]; with double quantization the scales become 8-bit codes.
pub fn quantize(values: &[f32], table: [f32; 16], is_double: bool, rounding: Rounding) -> FourBit {
    let nearest = Nearest::of(&table);
    let mut codes = vec![0; values.len().div_ceil(2)];
    let blocks = codes.par_chunks_mut(BLOCK / 2).zip(values.par_chunks(BLOCK));
    let scales: Vec<f32> = blocks
        .map(|(codes, values)| {
            let scale = largest(values);
            for (byte, pair) in codes.iter_mut().zip(values.chunks(2)) {
                let code = |index: usize| nearest.code(pair.get(index).copied().unwrap_or(0.0), scale);
                *byte = code(0) << 4 | code(1);
            }
            scale
        })
        .collect();
    let scales = if is_double { nested(&scales) } else { Scales::Plain(scales) };
    FourBit { codes, len: values.len(), table, block: BLOCK, scales, rounding }
}

fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0f32, |max, value| max.max(value.abs()))
}

/// Finds the nearest of 16 values by the midpoints between them.
struct Nearest {
    /// Midpoints of neighbors, ascending, and the code above each.
    midpoints: [f32; 15],
    codes: [u8; 16],
    zero: u8,
}

impl Nearest {
    fn of(table: &[f32; 16]) -> Nearest {
        let mut codes: [u8; 16] = std::array::from_fn(|code| code as u8);
        codes.sort_by(|a, b| table[usize::from(*a)].total_cmp(&table[usize::from(*b)]));
        let value = |index: usize| table[usize::from(codes[index])];
        let midpoints = std::array::from_fn(|index| (value(index) + value(index + 1)) / 2.0);
        let zero = codes.into_iter().find(|code| table[usize::from(*code)] == 0.0).unwrap_or(0);
        Nearest { midpoints, codes, zero }
    }

    /// The code of a value in a block with this largest magnitude.
    fn code(&self, value: f32, scale: f32) -> u8 {
        if scale == 0.0 {
            return self.zero;
        }
        // bitsandbytes multiplies by the inverse of the scale, which gives other bits than a division.
        let scaled = value * (1.0 / scale);
        self.codes[self.midpoints.partition_point(|midpoint| *midpoint < scaled)]
    }
}

/// The values of the scales' 8-bit codes: bitsandbytes' `create_dynamic_map(signed=True)`, computed in f32 as torch does. The
/// optimizer's [`Map`](crate::optim::blockwise::Map) is the same in f64, whose last bits differ.
static SCALES: LazyLock<[f32; 256]> = LazyLock::new(|| {
    let mut all = vec![0.0, 1.0];
    for decade in 0..7 {
        let parts = 1usize << decade;
        let (start, end) = (0.1f32, 1f32);
        let step = (end - start) / parts as f32;
        // torch.linspace counts its second half from the end, and adds with one rounding.
        let bound = |index: usize| match index < parts.div_ceil(2) {
            true => step.mul_add(index as f32, start),
            false => (-step).mul_add((parts - index) as f32, end),
        };
        let factor = 10f64.powi(decade - 6) as f32;
        for part in 0..parts {
            let level = factor * ((bound(part) + bound(part + 1)) / 2.0);
            all.extend([level, -level]);
        }
    }
    all.sort_by(f32::total_cmp);
    let mut table = [0.0; 256];
    table.copy_from_slice(&all);
    table
});

/// Quantizes scales to 8-bit codes around their mean.
fn nested(scales: &[f32]) -> Scales {
    // torch sums in another order; the sum in f64 is nearer to the exact mean than either.
    let mean = scales.iter().map(|scale| f64::from(*scale)).sum::<f64>() / scales.len().max(1) as f64;
    let offset = mean as f32;
    let (mut codes, mut of_codes) = (Vec::with_capacity(scales.len()), Vec::new());
    for block in scales.chunks(NESTED_BLOCK) {
        let centered: Vec<f32> = block.iter().map(|scale| scale - offset).collect();
        let scale = largest(&centered);
        of_codes.push(scale);
        codes.extend(centered.iter().map(|value| if scale == 0.0 { 0 } else { code_on_grid(value * (1.0 / scale)) }));
    }
    Scales::Nested { codes, table: Box::new(*SCALES), scales: of_codes, block: NESTED_BLOCK, offset }
}

/// Number of steps of the grid on which bitsandbytes' CPU code looks for the nearest code.
const GRID: f32 = 65_535.0;

/// The 8-bit code of a value from −1 to 1: it is first rounded to a grid of 65,536 values, as bitsandbytes 0.50 does on a CPU
/// (cpu_ops.cpp: `norm_to_lut_index`, `build_quantize_lut`). Near 0, where codes are closer than the grid, other codes result than
/// from the nearest value.
fn code_on_grid(value: f32) -> u8 {
    let index = ((value.clamp(-1.0, 1.0) + 1.0) * 0.5).mul_add(GRID, 0.5).floor();
    let on_grid = -1.0 + (2.0 * index) / GRID;
    let below = SCALES.windows(2).take_while(|pair| 0.5 * (pair[0] + pair[1]) < on_grid).count();
    below as u8
}
