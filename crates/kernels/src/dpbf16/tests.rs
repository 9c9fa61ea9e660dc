//! Compares the instruction `VDPBF16PS` with [`naive`], and matrix products with chains of [`naive`], bit for bit. On machines
//! without AVX512-BF16 the emulator executes the instruction.

pub(crate) mod emulator;

use std::arch::x86_64::*;

use half::bf16;

use super::naive;
use crate::amx::tests::emulator::install;
use crate::gemm::{Linear, Lora, Output, Part, Term, backward, forward, linear};
use crate::isa::Isa;
use crate::pack::{PackDtype, PackedMatrix};
use crate::threads::Threads;

/// Executes the instruction and returns the first lane of the result.
#[target_feature(enable = "avx512f,avx512bf16")]
fn instruction(sum: f32, x: [bf16; 2], w: [bf16; 2]) -> f32 {
    let pair = |pair: [bf16; 2]| {
        let word = u32::from(pair[0].to_bits()) | u32::from(pair[1].to_bits()) << 16;
        // Safety: both types have 64 bytes.
        unsafe { std::mem::transmute::<__m512i, __m512bh>(_mm512_set1_epi32(word as i32)) }
    };
    _mm512_cvtss_f32(_mm512_dpbf16_ps(_mm512_set1_ps(sum), pair(x), pair(w)))
}

/// Asserts that both values have the same bits, or that both are NaN.
#[track_caller]
fn assert_same(found: f32, expected: f32, what: impl Fn() -> String) {
    let same = found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan();
    assert!(same, "{}: {found:e} ({:#x}) and {expected:e} ({:#x})", what(), found.to_bits(), expected.to_bits());
}

#[track_caller]
fn assert_is_naive(sum: f32, x: [bf16; 2], w: [bf16; 2]) {
    // Safety: the machine has AVX-512, and the emulator is installed if the machine has no AVX512-BF16.
    let found = unsafe { instruction(sum, x, w) };
    assert_same(found, naive(sum, x, w), || format!("{sum:e} + {x:?} · {w:?}"));
}

/// Returns a generator of random 64-bit numbers (xorshift).
fn words(mut state: u64) -> impl FnMut() -> u64 {
    move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    }
}

#[test]
fn the_instruction_equals_the_naive_function_on_random_values() {
    if !install() {
        return;
    }
    let mut next = words(0x2545_f491_4f6c_dd1d);
    // Values near 1, for which another order of additions rounds differently; small values, whose products underflow; all
    // values.
    for (low, high) in [(120, 134), (100, 150), (40, 70), (0, 2), (0, 256)] {
        let count = if Isa::Avx512Bf16.is_available() { 200_000 } else { 20_000 };
        for _ in 0..count {
            let mut value = || {
                let word = next();
                bf16::from_bits((word >> 48) as u16 & 0x807f | ((word % (high - low) + low) << 7) as u16)
            };
            let (x, w) = ([value(), value()], [value(), value()]);
            let word = next();
            let sum = f32::from_bits((word >> 32) as u32 & 0x807f_ffff | ((word % (high - low) + low) << 23) as u32);
            assert_is_naive(sum, x, w);
        }
    }
}

#[test]
fn the_instruction_equals_the_naive_function_on_edge_cases() {
    if !install() {
        return;
    }
    // Zero, the smallest and the largest subnormal number, the smallest normal number and the next one, 2^-63, 1, 1 + 2^-7,
    // 2^63, the largest number, infinity, NaN.
    let magnitudes = [0, 1, 0x7f, 0x80, 0x81, 0x2000, 0x3f80, 0x3f81, 0x5f00, 0x7f7f, 0x7f80, 0x7fc0];
    let values: Vec<bf16> = magnitudes.iter().flat_map(|bits| [*bits, bits | 0x8000]).map(bf16::from_bits).collect();
    let sums =
        [0, 1, 0x007f_ffff, 0x0080_0000, 0x0080_0001, 0x3f80_0000, 0x3f80_0001, 0x7f7f_ffff, 0x7f80_0000, 0x7fc0_0000];
    let sums: Vec<f32> = sums.iter().flat_map(|bits| [*bits, bits | 0x8000_0000]).map(f32::from_bits).collect();
    let step = if Isa::Avx512Bf16.is_available() { 1 } else { 23 };
    let count = values.len();
    for index in (0..count.pow(4)).step_by(step) {
        let at = |power: u32| values[index / count.pow(power) % count];
        for sum in &sums {
            assert_is_naive(*sum, [at(0), at(1)], [at(2), at(3)]);
        }
    }
    // Results near the smallest normal number and near the largest number.
    let value = |bits: u32| bf16::from_f32(f32::from_bits(bits));
    for low in 0x3f80..0x3fff {
        for exponent in [1, 2, 9, 10, 20] {
            let (x, w) = (value(low << 16), value(0x0080_0000 >> 1 | exponent << 23));
            let small = bf16::from_bits(0x0080 + (low as u16 & 0x7f));
            let half = bf16::from_f32(0.5);
            assert_is_naive(0.0, [small, x], [half, w]);
            assert_is_naive(f32::from_bits(low << 7), [small, small], [half, -half]);
            assert_is_naive(f32::from_bits(0x0080_0000 + low), [small, small], [half, -bf16::ONE]);
            let large = bf16::from_bits(0x7f00 | low as u16 & 0x7f);
            assert_is_naive(f32::MAX, [large, small], [bf16::from_f32(2f32.powi(-25)), half]);
            assert_is_naive(f32::MAX, [large, large], [bf16::ONE, -bf16::ONE]);
        }
    }
}

/// Returns random values near 1, some of which are tiny or subnormal. With `wild`, some are huge, infinite or NaN.
fn values(count: usize, seed: u64, wild: bool) -> Vec<f32> {
    let mut next = words(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let mut value = || {
        let word = next();
        let mantissa = (word >> 40) as u32 & 0x807f_ffff;
        let exponent = match word % 64 {
            0 => 0,
            1 => 1 + word as u32 % 40,
            2 if wild => 255 - (word >> 20 & 1) as u32,
            _ => 122 + (word >> 8) as u32 % 6,
        };
        f32::from_bits(mantissa | exponent << 23)
    };
    (0..count).map(|_| value()).collect()
}

/// Computes a dot product as the kernels must: pair by pair, in order. A zero completes the last pair.
fn chain(start: f32, x: impl Iterator<Item = f32>, w: impl Iterator<Item = f32>) -> f32 {
    let (mut x, mut w) = (x.map(bf16::from_f32), w.map(bf16::from_f32));
    let mut sum = start;
    while let (Some(x0), Some(w0)) = (x.next(), w.next()) {
        let pair = |second: Option<bf16>| second.unwrap_or(bf16::ZERO);
        sum = naive(sum, [x0, pair(x.next())], [w0, pair(w.next())]);
    }
    sum
}

/// Adds one more pair of zeros to a sum, as the kernels do when they pad. This replaces −0 and subnormal values by 0.
fn padded(sum: f32) -> f32 {
    naive(sum, [bf16::ZERO; 2], [bf16::ZERO; 2])
}

const SHAPES: [(usize, usize, usize); 9] = [
    (1, 1, 1),
    (1, 40, 70),
    (3, 64, 64),
    (8, 33, 31),
    (9, 70, 130),
    (16, 32, 544),
    (17, 96, 33),
    (70, 40, 66),
    (150, 40, 600),
];

#[test]
fn products_are_chains_of_the_naive_function() {
    if !install() {
        return;
    }
    for (rows, n, k) in SHAPES {
        for wild in [false, true] {
            let (weight, x, dy) = (values(n * k, 3, wild), values(rows * k, 5, wild), values(rows * n, 7, wild));
            let bias = values(n, 9, false);
            let packed = PackedMatrix::new(&weight, k, PackDtype::Bf16);
            for threads in [1, 2, 3].map(Threads::new) {
                let (mut y, mut dx) = (vec![0.0; rows * n], values(rows * k, 11, false));
                let before = dx.clone();
                let out = Output { y: &mut y, stride: n, rows, add: false };
                forward(&threads, Isa::Avx512Bf16, &[Term { x: &x, stride: k, weight: &packed }], Some(&bias), out);
                let out = Output { y: &mut dx, stride: k, rows, add: true };
                backward(&threads, Isa::Avx512Bf16, &[Term { x: &dy, stride: n, weight: &packed }], out);
                for row in 0..rows {
                    let of_row = |values: &[f32], width: usize| values[row * width..(row + 1) * width].to_vec();
                    for output in 0..n {
                        let w = weight[output * k..(output + 1) * k].iter().copied();
                        let expected = padded(chain(bias[output], of_row(&x, k).into_iter(), w));
                        assert_same(y[row * n + output], expected, || format!("{rows}x{n}x{k}, {row}, {output}"));
                    }
                    for input in 0..k {
                        let w = weight.iter().skip(input).step_by(k).copied();
                        let expected = padded(chain(before[row * k + input], of_row(&dy, n).into_iter(), w));
                        assert_same(dx[row * k + input], expected, || format!("{rows}x{n}x{k} back, {row}, {input}"));
                    }
                }
            }
        }
    }
}

#[test]
fn an_adapter_continues_the_chain_of_its_weight() {
    if !install() {
        return;
    }
    let (n, k, rank) = (96, 70, 32);
    let parts: [Part; 2] = [(0..64, 0..16), (64..96, 16..32)];
    let (weight, a, mut b) = (values(n * k, 3, false), values(rank * k, 5, false), values(n * rank, 7, false));
    for (index, value) in b.iter_mut().enumerate() {
        if !parts.iter().any(|part| part.0.contains(&(index / rank)) && part.1.contains(&(index % rank))) {
            *value = 0.0;
        }
    }
    let pack = |values: &[f32], inputs| PackedMatrix::new(values, inputs, PackDtype::Bf16);
    let (packed, packed_a, packed_b) = (pack(&weight, k), pack(&a, k), pack(&b, rank));
    for rows in [1, 5, 16, 40, 70, 150] {
        let x = values(rows * k, 9, false);
        for threads in [1, 2].map(Threads::new) {
            let mut y = vec![0.0; rows * n];
            let lora = Lora { a: &packed_a, b: &packed_b, parts: &parts, hidden: None };
            let layer = Linear { x: &x, stride: k, weight: &packed, bias: None, residual: None, lora: Some(lora) };
            linear(&threads, Isa::Avx512Bf16, layer, Output { y: &mut y, stride: n, rows, add: false });
            for (row, x) in x.chunks_exact(k).enumerate() {
                let dot = |start: f32, x: &[f32], w: &[f32]| padded(chain(start, x.iter().copied(), w.iter().copied()));
                let hidden: Vec<f32> = a.chunks_exact(k).map(|a| dot(0.0, x, a)).collect();
                for output in 0..n {
                    let main = dot(0.0, x, &weight[output * k..(output + 1) * k]);
                    let expected = dot(main, &hidden, &b[output * rank..(output + 1) * rank]);
                    assert_same(y[row * n + output], expected, || format!("{rows} rows, {row}, {output}"));
                }
            }
        }
    }
}
