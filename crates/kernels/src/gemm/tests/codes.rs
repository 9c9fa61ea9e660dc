//! A weight in 4-bit codes gives every product the bits of the same weight packed as values.

use super::*;
use crate::four_bit::{FourBit, Rounding, Scales};
use crate::pack::PackDtype;

const NF4: [f32; 16] =
    [-1.0, -0.696, -0.525, -0.395, -0.284, -0.185, -0.091, 0.0, 0.08, 0.161, 0.246, 0.338, 0.441, 0.563, 0.723, 1.0];
const FP4: [f32; 16] =
    [0.0, 0.0052, 0.667, 1.0, 0.333, 0.5, 0.167, 0.25, 0.0, -0.0052, -0.667, -1.0, -0.333, -0.5, -0.167, -0.25];

/// How the scales of a matrix are stored.
#[derive(Clone, Copy, Debug)]
enum How {
    Plain,
    Nested,
    /// So small that values are subnormal.
    Tiny,
    /// Zero, negative, very large and very small, among others.
    Odd,
}

fn bytes(len: usize, seed: u64) -> Vec<u8> {
    random(len, seed).into_iter().map(|value| ((value + 0.5) * 256.0) as u8).collect()
}

fn matrix(n: usize, k: usize, block: usize, (table, how, rounding): ([f32; 16], How, Rounding), seed: u64) -> FourBit {
    let blocks = n * k / block;
    let positive = |len, seed| random(len, seed).into_iter().map(|value| value + 0.6).collect::<Vec<f32>>();
    let scales = match how {
        How::Plain => Scales::Plain(positive(blocks, seed + 1)),
        How::Tiny => Scales::Plain(positive(blocks, seed + 1).into_iter().map(|scale| scale * 1e-38).collect()),
        How::Odd => {
            // The fourth is halfway between two bf16, and rounds toward 0.
            let odd = [0.0, -0.3, 1e35, 1.0 + 1.0 / 256.0, 0.7, -0.0, 1e-33, 3.0];
            let all = positive(blocks, seed + 1).into_iter().enumerate();
            Scales::Plain(all.map(|(index, scale)| if index % 5 == 0 { odd[index / 5 % 8] } else { scale }).collect())
        }
        How::Nested => Scales::Nested {
            codes: bytes(blocks, seed + 1),
            table: random(256, seed + 2).try_into().unwrap(),
            scales: positive(blocks.div_ceil(8), seed + 3),
            block: 8,
            offset: 0.7,
        },
    };
    FourBit { codes: bytes((n * k).div_ceil(2), seed), len: n * k, table, block, scales, rounding }
}

fn values(matrices: &[FourBit]) -> Vec<f32> {
    let expand = |matrix: &FourBit| {
        let mut values = vec![0.0; matrix.len];
        matrix.expand(0..matrix.len, &mut values);
        values
    };
    matrices.iter().flat_map(expand).collect()
}

#[test]
fn codes_give_the_bits_of_their_values() {
    let threads = Threads::new(2);
    let kinds = [
        (NF4, How::Nested, Rounding::Bf16),
        (FP4, How::Plain, Rounding::Bf16),
        (NF4, How::Plain, Rounding::F16),
        (FP4, How::Nested, Rounding::F32),
        (NF4, How::Tiny, Rounding::Bf16),
        (FP4, How::Odd, Rounding::Bf16),
        (FP4, How::Nested, Rounding::Bf16),
    ];
    for (outputs, k, block) in
        [(&[64][..], 64, 64), (&[96, 32, 32], 128, 64), (&[40], 192, 64), (&[128, 70], 1152, 128), (&[32], 1088, 32)]
    {
        for kind in kinds {
            let seeds = (1..).step_by(10);
            let matrices: Vec<FourBit> =
                outputs.iter().zip(seeds).map(|(n, seed)| matrix(*n, k, block, kind, seed)).collect();
            let n: usize = outputs.iter().sum();
            let values = values(&matrices);
            for (isa, dtype, _) in isas() {
                let codes = PackedMatrix::of_codes(&threads, &matrices, k, dtype).unwrap();
                let plain = PackedMatrix::new(&values, k, dtype);
                let what = format!("{isa} {dtype:?} {outputs:?} x {k} {:?}", (kind.1, kind.2));
                assert!(codes.is_in_codes() && (codes.n(), codes.k()) == (n, k), "{what}");
                let (mut row, mut expected) = (vec![0.0; k], vec![0.0; k]);
                for output in [0, n / 2, n - 1] {
                    codes.row(output, &mut row);
                    plain.row(output, &mut expected);
                    assert_eq!(row, expected, "{what}: row {output}");
                }
                let most = if matches!(kind, (_, How::Nested, Rounding::Bf16)) { 300 } else { 40 };
                for rows in [1, 2, 3, 4, 8, 16, most] {
                    let (x, dy) = (random(rows * k, 3), random(rows * n, 5));
                    let bias = random(n, 9);
                    let product = |weight: &PackedMatrix, side: Side, add: bool, bias: Option<&[f32]>| {
                        let (x, width, depth) = if side == Side::Forward { (&x, n, k) } else { (&dy, k, n) };
                        let mut y = random(rows * width, 7);
                        let out = Output { y: &mut y, stride: width, rows, add };
                        let term = Term { x, stride: depth, weight };
                        match side {
                            Side::Forward => forward(&threads, isa, &[term], bias, out),
                            Side::Backward => backward(&threads, isa, &[term], out),
                        }
                        y
                    };
                    for (side, add, bias) in [
                        (Side::Forward, true, None),
                        (Side::Forward, false, None),
                        (Side::Forward, false, Some(&bias[..])),
                        (Side::Backward, true, None),
                    ] {
                        let (found, expected) = (product(&codes, side, add, bias), product(&plain, side, add, bias));
                        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<u32>>();
                        assert!(bits(&found) == bits(&expected), "{what}, {rows} rows, {side:?}: other bits");
                    }
                }
            }
        }
    }
}

/// Every fraction of a scale, with both signs and several exponents: the kernels round each value like the portable functions.
#[test]
fn every_fraction_is_rounded_to_the_nearest_bf16() {
    let threads = Threads::new(2);
    // Each output has one block of 32 codes, alternating between −1 and 1.
    let table = std::array::from_fn(|code| [-1.0, 1.0, 0.0][code.min(2)]);
    let n = 1 << 15;
    for isa in Isa::available() {
        // Those that multiply pairs of bf16 round in fewer places: every seventh block of fractions.
        let step = if isa.rounds_inputs() { 7 * n } else { n };
        for exponent in [127, 64, 200] {
            // All fractions with one exponent, and some with others.
            let count = if exponent == 127 { 1 << 23 } else { 1 << 17 };
            for first in (0..count).step_by(step) {
                let fraction = |index: u32| if exponent == 127 { index } else { index * 64 + 63 };
                let bits = |index: u32| f32::from_bits(exponent << 23 | fraction(index));
                let scales: Vec<f32> = (first as u32..(first + n) as u32).map(bits).collect();
                let matrix = FourBit {
                    codes: vec![0x01; n * 16],
                    len: n * 32,
                    table,
                    block: 32,
                    scales: Scales::Plain(scales.clone()),
                    rounding: Rounding::Bf16,
                };
                let codes = PackedMatrix::of_codes(&threads, &[matrix], 32, PackDtype::Bf16).unwrap();
                // The chosen input multiplies by 1, the others by 0: the outputs are the weights.
                for (chosen, sign) in [(4, -1.0), (5, 1.0)] {
                    let x: Vec<f32> = (0..32).map(|input| if input == chosen { 1.0 } else { 0.0 }).collect();
                    let mut y = vec![0.0; n];
                    let term = Term { x: &x, stride: 32, weight: &codes };
                    forward(&threads, isa, &[term], None, Output { y: &mut y, stride: n, rows: 1, add: false });
                    for (found, scale) in y.iter().zip(&scales) {
                        assert_eq!(*found, Rounding::Bf16.round(sign * scale), "{isa}, {scale}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_linear_layer_in_codes_gives_the_bits_of_its_values() {
    let (k, outputs) = (192, [64, 32, 32]);
    let n: usize = outputs.iter().sum();
    let matrices: Vec<FourBit> =
        (0..3).map(|index| matrix(outputs[index], k, 64, (NF4, How::Nested, Rounding::Bf16), index as u64)).collect();
    let values = values(&matrices);
    let threads = Threads::new(2);
    for (isa, dtype, _) in isas() {
        let codes = PackedMatrix::of_codes(&threads, &matrices, k, dtype).unwrap();
        let plain = PackedMatrix::new(&values, k, dtype);
        let rank = 8;
        let (a, b) = (Weight::random(rank, k, dtype, 5), Weight::random(n, rank, dtype, 7));
        let transposed = Weight::random(rank, n, dtype, 9);
        for rows in [1, 20, 200] {
            let (x, dy) = (random(rows * k, 3), random(rows * n, 5));
            let layer = |weight: &PackedMatrix| {
                let (mut y, mut dx, mut dh) = (vec![0.0; rows * n], vec![0.0; rows * k], vec![0.0; rows * rank]);
                let lora = Lora { a: &a.packed, b: &b.packed, parts: &[], hidden: None };
                let forward = Linear { x: &x, stride: k, weight, bias: None, residual: None, lora: Some(lora) };
                linear(&threads, isa, forward, Output { y: &mut y, stride: n, rows, add: false });
                let lora = LoraBackward {
                    a: &a.packed,
                    b_transposed: std::slice::from_ref(&transposed.packed),
                    parts: &[(0..n, 0..rank)],
                    dh: &mut dh,
                    adds: true,
                };
                let backward = LinearBackward { dy: &dy, stride: n, weight, lora: Some(lora) };
                linear_backward(&threads, isa, backward, Output { y: &mut dx, stride: k, rows, add: false });
                (y, dx, dh)
            };
            assert!(layer(&codes) == layer(&plain), "{isa} {dtype:?} {rows} rows: other bits");
        }
    }
}

#[test]
fn codes_take_a_quarter_of_the_bytes() {
    let threads = Threads::new(1);
    let (n, k) = (1024, 1024);
    let plain = PackedMatrix::new(&vec![0.0; n * k], k, PackDtype::Bf16).size_bytes() as f64;
    for (how, most) in [(How::Nested, 0.26), (How::Plain, 0.285)] {
        let mut matrix = matrix(n, k, 64, (NF4, how, Rounding::Bf16), 1);
        if let Scales::Nested { scales, block, .. } = &mut matrix.scales {
            *block = 256;
            scales.truncate(n * k / 64 / 256);
        }
        let codes = PackedMatrix::of_codes(&threads, &[matrix], k, PackDtype::Bf16).unwrap().size_bytes() as f64;
        assert!(codes <= most * plain, "{how:?}: {}", codes / plain);
    }
}

#[test]
fn what_cannot_be_packed_in_codes_is_not() {
    let threads = Threads::new(1);
    let kind = (NF4, How::Plain, Rounding::Bf16);
    let packs = |matrices: &[FourBit], k| PackedMatrix::of_codes(&threads, matrices, k, PackDtype::Bf16).is_some();
    assert!(packs(&[matrix(32, 64, 64, kind, 1)], 64));
    // A block with parts of two rows; a matrix that ends within a panel; a table without the value 0.
    assert!(!packs(&[matrix(64, 96, 64, kind, 1)], 96));
    assert!(!packs(&[matrix(40, 64, 64, kind, 1), matrix(32, 64, 64, kind, 1)], 64));
    let table = NF4.map(|value| value + 0.001);
    assert!(!packs(&[matrix(32, 64, 64, (table, How::Plain, Rounding::Bf16), 1)], 64));
    assert!(!packs(&[], 64));
}
