//! Matrices in 4 bits as bitsandbytes stores them (NF4 and FP4): each code names one of 16 values, which is multiplied by the
//! scale of its block. With double quantization the scales are 8-bit codes themselves.
//!
//! The arithmetic is that of bitsandbytes' CUDA kernels (kernels.cu: `kDequantizeBlockwise`; functional.py: `dequantize_4bit`):
//! `scale = nested_table[code] · nested_scale + offset`, `value = round(table[code] · scale)`, each operation in f32, and one
//! rounding to the number format of the state at the end.

use std::ops::Range;

use half::{bf16, f16};

/// The number format to which the values of 4-bit codes are rounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rounding {
    /// Values stay in f32.
    F32,
    /// Values are rounded to IEEE half precision.
    F16,
    /// Values are rounded to bf16.
    Bf16,
}

impl Rounding {
    /// Rounds a value to this format.
    pub fn round(self, value: f32) -> f32 {
        match self {
            Rounding::F32 => value,
            Rounding::F16 => f16::from_f32(value).to_f32(),
            Rounding::Bf16 => bf16::from_f32(value).to_f32(),
        }
    }
}

/// The scales of the blocks of a matrix, in order.
#[derive(Clone, Debug, PartialEq)]
pub enum Scales {
    /// One f32 per block.
    Plain(Vec<f32>),
    /// One 8-bit code per block (double quantization).
    Nested {
        /// The codes of the scales.
        codes: Vec<u8>,
        /// The values of the codes.
        table: Box<[f32; 256]>,
        /// The scale of each block of codes.
        scales: Vec<f32>,
        /// Number of codes that share a scale.
        block: usize,
        /// Value added to each product.
        offset: f32,
    },
}

impl Scales {
    /// Number of blocks of weights.
    pub fn len(&self) -> usize {
        match self {
            Scales::Plain(scales) => scales.len(),
            Scales::Nested { codes, .. } => codes.len(),
        }
    }

    /// Whether there are no blocks.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The scale of a block of weights.
    pub fn at(&self, index: usize) -> f32 {
        match self {
            Scales::Plain(scales) => scales[index],
            Scales::Nested { codes, table, scales, block, offset } => {
                // Not one fused operation: bitsandbytes rounds the product before it adds the offset.
                let product = table[usize::from(codes[index])] * scales[index / block];
                product + offset
            }
        }
    }
}

/// A row-major matrix of 4-bit codes.
#[derive(Clone, Debug, PartialEq)]
pub struct FourBit {
    /// Two codes a byte; the high half is the first of the two.
    pub codes: Vec<u8>,
    /// Number of codes in the matrix.
    pub len: usize,
    /// The values of the 16 codes.
    pub table: [f32; 16],
    /// Number of consecutive codes that share a scale.
    pub block: usize,
    /// The scales of the blocks.
    pub scales: Scales,
    /// The number format of the values.
    pub rounding: Rounding,
}

impl FourBit {
    /// The code at an index.
    pub fn code(&self, index: usize) -> u8 {
        let byte = self.codes[index / 2];
        if index.is_multiple_of(2) { byte >> 4 } else { byte & 15 }
    }

    /// Computes the values of a range of codes.
    pub fn expand(&self, range: Range<usize>, out: &mut [f32]) {
        let mut values = [0.0; 16];
        let mut known = usize::MAX;
        for (index, out) in range.zip(out) {
            let block = index / self.block;
            if block != known {
                known = block;
                values = self.values_of(block);
            }
            *out = values[usize::from(self.code(index))];
        }
    }

    /// The values that the 16 codes have in a block.
    pub fn values_of(&self, block: usize) -> [f32; 16] {
        let scale = self.scales.at(block);
        self.table.map(|value| self.rounding.round(value * scale))
    }
}
