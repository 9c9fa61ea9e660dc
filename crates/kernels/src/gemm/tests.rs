//! Compares products with loops in f64, for every instruction set of this machine.

mod codes;

use super::*;
use crate::pack::PackDtype;

/// Pseudo-random values in [−½, ½).
fn random(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    std::iter::repeat_with(next).take(len).collect()
}

/// A weight `[n, k]` with the values that the kernels use, and its pack.
struct Weight {
    values: Vec<f32>,
    packed: PackedMatrix,
}

impl Weight {
    fn random(n: usize, k: usize, dtype: PackDtype, seed: u64) -> Weight {
        Weight::of(&random(n * k, seed), n, k, dtype)
    }

    fn of(values: &[f32], n: usize, k: usize, dtype: PackDtype) -> Weight {
        let packed = PackedMatrix::new(values, k, dtype);
        let mut values = vec![0.0; n * k];
        for (output, row) in values.chunks_exact_mut(k).enumerate() {
            packed.row(output, row);
        }
        Weight { values, packed }
    }

    fn k(&self) -> usize {
        self.packed.k()
    }

    /// Computes `row` · weightᵀ.
    fn forward(&self, row: &[f32]) -> Vec<f64> {
        self.values.chunks_exact(self.k()).map(|weight| dot(row, weight)).collect()
    }

    /// Computes `row` · weight.
    fn backward(&self, row: &[f32]) -> Vec<f64> {
        let mut sums = vec![0.0; self.k()];
        for (weight, value) in self.values.chunks_exact(self.k()).zip(row) {
            for (sum, weight) in sums.iter_mut().zip(weight) {
                *sum += f64::from(*weight) * f64::from(*value);
            }
        }
        sums
    }
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

/// Instruction set, dtype, and tolerance of a sum over `k` values of [`random`] per √k. Includes
/// AVX512-BF16 and AMX, emulated if necessary.
fn isas() -> Vec<(Isa, PackDtype, f64)> {
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    crate::amx::tests::emulator::install();
    let both =
        |isa: Isa| [(isa, PackDtype::F32, 1e-6), (isa, PackDtype::Bf16, if isa.rounds_inputs() { 2e-3 } else { 1e-6 })];
    Isa::ALL.into_iter().filter(|isa| isa.runs()).flat_map(both).collect()
}

fn near(found: &[f32], expected: &[f64], tolerance: f64, what: &str) {
    assert_eq!(found.len(), expected.len());
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        let off = (f64::from(*found) - expected).abs();
        assert!(off <= tolerance, "{what}: {index} is {found}, not {expected}, {off:e} off");
    }
}

fn tolerance(one: f64, terms: usize) -> f64 {
    one * (terms as f64).sqrt().max(1.0)
}

/// Rows, outputs, inputs: none a multiple of the kernels' sizes, one of each, more than a block of each.
const SHAPES: [(usize, usize, usize); 17] = [
    (16, 96, 544),
    (9, 129, 512),
    (413, 75, 90),
    (99, 34, 1101),
    (20, 1101, 34),
    (1, 1, 1),
    (1, 33, 7),
    (2, 31, 1),
    (5, 64, 16),
    (13, 96, 33),
    (16, 40, 65),
    (17, 32, 64),
    (50, 40, 130),
    (31, 70, 431),
    (100, 31, 64),
    (7, 530, 5),
    (1, 100, 1030),
];

fn teams() -> [Threads; 3] {
    [1, 2, 3].map(Threads::new)
}

#[test]
fn a_product_equals_plain_loops() {
    for (isa, dtype, one) in isas() {
        for (rows, n, k) in SHAPES {
            let (weight, second) = (Weight::random(n, k, dtype, 3), Weight::random(n, 5, dtype, 9));
            let (x, h, bias) = (random(rows * (k + 3), 5), random(rows * 5, 11), random(n, 13));
            let terms = [
                Term { x: &x, stride: k + 3, weight: &weight.packed },
                Term { x: &h, stride: 5, weight: &second.packed },
            ];
            for threads in &teams() {
                for add in [false, true] {
                    let mut y = random(rows * (n + 2), 17);
                    let before = y.clone();
                    let out = Output { y: &mut y, stride: n + 2, rows, add };
                    forward(threads, isa, &terms, (!add).then_some(&bias), out);
                    for row in 0..rows {
                        let (a, b) = (weight.forward(&x[row * (k + 3)..][..k]), second.forward(&h[row * 5..][..5]));
                        let start = if add { &before[row * (n + 2)..][..n] } else { &bias };
                        let expected: Vec<f64> = start
                            .iter()
                            .zip(a.iter().zip(&b))
                            .map(|(start, (a, b))| f64::from(*start) + a + b)
                            .collect();
                        let found = &y[row * (n + 2)..];
                        let what = format!("{isa} {dtype:?} {rows}x{n}x{k} row {row}");
                        near(&found[..n], &expected, tolerance(one, k + 5), &what);
                        assert_eq!(found[n..n + 2], before[row * (n + 2)..][n..n + 2], "{what}: beyond the row");
                    }
                }
            }
        }
    }
}

#[test]
fn the_backward_pass_equals_plain_loops() {
    for (isa, dtype, one) in isas() {
        for (rows, n, k) in SHAPES {
            let weight = Weight::random(n, k, dtype, 3);
            let dy = random(rows * n, 5);
            for threads in &teams() {
                for add in [false, true] {
                    let mut dx = random(rows * (k + 1), 17);
                    let before = dx.clone();
                    let out = Output { y: &mut dx, stride: k + 1, rows, add };
                    backward(threads, isa, &[Term { x: &dy, stride: n, weight: &weight.packed }], out);
                    for row in 0..rows {
                        let mut expected = weight.backward(&dy[row * n..][..n]);
                        if add {
                            expected.iter_mut().zip(&before[row * (k + 1)..]).for_each(|(e, b)| *e += f64::from(*b));
                        }
                        let what = format!("{isa} {dtype:?} {rows}x{n}x{k} row {row}");
                        near(&dx[row * (k + 1)..][..k], &expected, tolerance(one, n), &what);
                        assert_eq!(dx[row * (k + 1) + k], before[row * (k + 1) + k], "{what}: beyond the row");
                    }
                }
            }
        }
    }
}

#[test]
fn the_gradient_of_a_weight_equals_plain_loops() {
    for isa in Isa::available() {
        for (rows, n, k) in SHAPES {
            let (dy, x) = (random(rows * (n + 1), 3), random(rows * (k + 2), 5));
            let (a, b) = (Rows { values: &dy, width: n, stride: n + 1 }, Rows { values: &x, width: k, stride: k + 2 });
            let mut expected = vec![0.0; n * k];
            for (dy, x) in dy.chunks_exact(n + 1).zip(x.chunks_exact(k + 2)) {
                for (index, sum) in expected.iter_mut().enumerate() {
                    *sum += f64::from(dy[index / k]) * f64::from(x[index % k]);
                }
            }
            let start = random(n * k, 7);
            expected.iter_mut().zip(&start).for_each(|(sum, start)| *sum += f64::from(*start));
            let mut here = start.clone();
            outer_here(isa, rows, a, b, &mut here);
            near(&here, &expected, tolerance(1e-6, rows), &format!("{isa} {rows}x{n}x{k}"));
            let mut halves = start.clone();
            let (first, rest) = (rows / 2, rows - rows / 2);
            outer_here(isa, first, a, b, &mut halves);
            let after = [a, b].map(|side| Rows { values: &side.values[first * side.stride..], ..side });
            outer_here(isa, rest, after[0], after[1], &mut halves);
            assert!(halves == here, "{isa} {rows}x{n}x{k}: other bits in two halves");
            for threads in &teams() {
                let mut c = start.clone();
                outer(threads, isa, rows, a, b, &mut c);
                assert!(c == here, "{isa} {rows}x{n}x{k}: other bits with {} threads", threads.count());
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_whatever_rows_share_its_batch() {
    // More rows and steps than a block has; fewer if every instruction is emulated.
    let shapes = [(133, 70, 1100), (20, 1100, 70), (70, 90, 300), (40, 70, 544)];
    let all = |(isa, dtype, _)| shapes.map(|shape| (isa, dtype, shape));
    let cases =
        isas().into_iter().flat_map(all).filter(|(isa, _, shape)| isa.is_available() || [70, 40].contains(&shape.0));
    for (isa, dtype, (rows, n, k)) in cases {
        let weight = Weight::random(n, k, dtype, 3);
        let (x, dy) = (random(rows * k, 5), random(rows * n, 7));
        let product = |threads: &Threads, rows: Range<usize>| {
            let (x, dy) = (&x[rows.start * k..rows.end * k], &dy[rows.start * n..rows.end * n]);
            let (mut y, mut dx) = (vec![0.0; rows.len() * n], vec![0.0; rows.len() * k]);
            let out = Output { y: &mut y, stride: n, rows: rows.len(), add: false };
            forward(threads, isa, &[Term { x, stride: k, weight: &weight.packed }], None, out);
            let out = Output { y: &mut dx, stride: k, rows: rows.len(), add: false };
            backward(threads, isa, &[Term { x: dy, stride: n, weight: &weight.packed }], out);
            (y, dx)
        };
        let teams = teams();
        let all = product(&teams[0], 0..rows);
        for threads in &teams {
            for part in [0..1, 7..8, 3..20, 0..rows / 2, rows - 13..rows, 0..rows] {
                let (y, dx) = product(threads, part.clone());
                assert!(y == all.0[part.start * n..part.end * n], "{isa} {dtype:?} {part:?}");
                assert!(dx == all.1[part.start * k..part.end * k], "{isa} {dtype:?} {part:?} back");
            }
        }
    }
}

#[test]
fn parts_of_the_outputs_give_the_bits_of_the_whole() {
    for (isa, dtype, _) in isas() {
        for (rows, n, k) in [(1, 1, 1), (19, 333, 70), (3, 1000, 33), (90, 200, 40)] {
            let weight = Weight::random(n, k, dtype, 3);
            let (x, dy, bias) = (random(rows * k, 5), random(rows * n, 7), random(n, 11));
            let (mut y, mut dx) = (vec![0.0; rows * n], vec![0.0; rows * k]);
            let threads = Threads::new(1);
            let terms = [Term { x: &x, stride: k, weight: &weight.packed }];
            forward(&threads, isa, &terms, Some(&bias), Output { y: &mut y, stride: n, rows, add: false });
            let back = [Term { x: &dy, stride: n, weight: &weight.packed }];
            backward(&threads, isa, &back, Output { y: &mut dx, stride: k, rows, add: false });

            let (mut begin, panels) = (0, weight.packed.panels());
            let mut chained = vec![f32::NAN; rows * k];
            while begin < panels {
                let part = begin..(begin + 3).min(panels);
                let columns = part.start * PANEL..(part.end * PANEL).min(n);
                let width = columns.len();
                let mut found = vec![f32::NAN; rows * width];
                let out = Output { y: &mut found, stride: width, rows, add: false };
                forward_panels(isa, &terms[0], SharedInputs::default(), Some(&bias), part.clone(), out);
                // Starts at a later row, with inputs that were packed before.
                let first = rows / 2 / 16 * 16;
                let mut lower = vec![f32::NAN; (rows - first) * width];
                let out = Output { y: &mut lower, stride: width, rows: rows - first, add: false };
                let term = Term { x: &x[first * k..], ..terms[0] };
                with_shared_inputs(&threads, isa, &x, rows, &weight.packed, |shared_inputs| {
                    forward_panels(isa, &term, shared_inputs.starting_at(first), Some(&bias), part.clone(), out);
                });
                assert!(lower == found[first * width..], "{isa} {dtype:?} {part:?} with shared inputs");
                let local: Vec<f32> = dy.chunks_exact(n).flat_map(|row| &row[columns.clone()]).copied().collect();
                let local = Rows { values: &local, width, stride: width };
                let out = Output { y: &mut chained, stride: k, rows, add: begin > 0 };
                backward_panels(isa, &weight.packed, part.clone(), local, out);
                for row in 0..rows {
                    assert!(found[row * width..][..width] == y[row * n..][columns.clone()], "{isa} {dtype:?} {part:?}");
                }
                begin = part.end;
            }
            assert!(chained == dx, "{isa} {dtype:?} {rows}x{n}x{k}");
        }
    }
}

/// Rows, inputs, ranks, parts of outputs and their ranks.
type Fused = (usize, usize, usize, &'static [(Range<usize>, Range<usize>)]);

/// Parts that begin inside panels and inside blocks of ranks, parts with a gap, and no parts at all.
const FUSED: [Fused; 8] = [
    // Long sums of few rows: panels in pairs, of which one may need more ranks than the other.
    (16, 530, 96, &[(0..64, 0..16), (64..96, 16..80), (96..131, 80..96)]),
    (5, 512, 48, &[(0..64, 0..16), (64..96, 16..32), (96..128, 32..48)]),
    (1, 33, 7, &[(0..40, 0..3), (40..50, 3..7)]),
    (3, 70, 48, &[(0..45, 0..16), (45..61, 16..32), (70..99, 32..48)]),
    (19, 64, 5, &[]),
    (70, 300, 80, &[(0..32, 0..40), (32..96, 40..80)]),
    (66, 544, 48, &[(0..64, 0..16), (64..96, 16..32), (96..128, 32..48)]),
    (130, 40, 33, &[(5..130, 0..33)]),
];

/// The initial value of a product.
#[derive(Clone, Copy, PartialEq)]
enum How {
    Bias,
    Add,
    Residual,
}

#[test]
fn a_linear_layer_with_its_adapter_equals_plain_loops() {
    for (isa, dtype, one) in isas() {
        for (rows, k, rank, parts) in FUSED {
            let n = parts.last().map_or(50, |part| part.0.end);
            let weight = Weight::random(n, k, dtype, 3);
            let a = Weight::random(rank, k, dtype, 5);
            let mut b = random(n * rank, 7);
            let reads = |output: usize, rank: usize| {
                parts.is_empty() || parts.iter().any(|part| part.0.contains(&output) && part.1.contains(&rank))
            };
            for (index, value) in b.iter_mut().enumerate() {
                if !reads(index / rank, index % rank) {
                    *value = 0.0;
                }
            }
            let b = Weight::of(&b, n, rank, dtype);
            let (x, bias, start) = (random(rows * (k + 1), 9), random(n, 11), random(rows * n, 13));
            let product = |threads: &Threads, rows: Range<usize>, how: How, hidden: Option<&mut [f32]>| {
                let given = &start[rows.start * n..rows.end * n];
                let mut y = if how == How::Add { given.to_vec() } else { vec![f32::NAN; given.len()] };
                let lora = Lora { a: &a.packed, b: &b.packed, parts, hidden };
                let layer = Linear {
                    x: &x[rows.start * (k + 1)..],
                    stride: k + 1,
                    weight: &weight.packed,
                    bias: (how == How::Bias).then_some(&bias),
                    residual: (how == How::Residual).then_some(given),
                    lora: Some(lora),
                };
                let add = how == How::Add;
                linear(threads, isa, layer, Output { y: &mut y, stride: n, rows: rows.len(), add });
                y
            };
            let teams = teams();
            for how in [How::Bias, How::Add, How::Residual] {
                let all = product(&teams[0], 0..rows, how, None);
                for row in 0..rows {
                    let x = &x[row * (k + 1)..][..k];
                    let h: Vec<f32> = a.forward(x).iter().map(|h| *h as f32).collect();
                    let begin = if how == How::Bias { &bias } else { &start[row * n..][..n] };
                    let (main, low) = (weight.forward(x), b.forward(&h));
                    let sums = main.iter().zip(&low).zip(begin);
                    let expected: Vec<f64> = sums.map(|((a, b), begin)| a + b + f64::from(*begin)).collect();
                    // The adapter's sums are sums of sums.
                    let tolerance = 4.0 * tolerance(one, k * rank);
                    near(
                        &all[row * n..][..n],
                        &expected,
                        tolerance,
                        &format!("{isa} {dtype:?} {rows}x{n}x{k} row {row}"),
                    );
                }
                for threads in &teams {
                    let mut hidden = vec![f32::NAN; rows * rank];
                    assert!(product(threads, 0..rows, how, Some(&mut hidden)) == all, "{isa} {dtype:?}: other bits");
                    for (hidden, x) in hidden.chunks_exact(rank).zip(x.chunks_exact(k + 1)) {
                        near(hidden, &a.forward(&x[..k]), tolerance(one, k), &format!("{isa} {dtype:?} hidden"));
                    }
                    for part in [rows / 2..rows, rows - rows.min(9)..rows] {
                        assert!(product(threads, part.clone(), how, None) == all[part.start * n..], "{isa} {dtype:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn an_empty_sum_is_the_bias_or_the_previous_value() {
    let weight = Weight::random(40, 3, PackDtype::F32, 3);
    let mut dx = vec![7.0; 6];
    let nothing = Rows { values: &[], width: 0, stride: 0 };
    let mut back = |add| {
        let out = Output { y: &mut dx, stride: 3, rows: 2, add };
        backward_panels(Isa::Portable, &weight.packed, 1..1, nothing, out);
        dx.clone()
    };
    assert_eq!(back(true), [7.0; 6]);
    assert_eq!(back(false), [0.0; 6]);
}

#[test]
fn the_backward_pass_through_an_adapter_equals_its_separate_products() {
    const RANK: usize = 12;
    let (n, k) = (160, 70);
    for (isa, dtype, _) in isas() {
        let weight = Weight::random(n, k, dtype, 3);
        let a = Weight::random(2 * RANK, k, dtype, 5);
        // Parts that begin at tiles, parts that do not, and outputs without an adapter.
        for outputs in [[0..96, 96..160], [0..40, 40..160], [0..32, 128..160]] {
            let b: Vec<Weight> = outputs.iter().map(|o| Weight::random(RANK, o.len(), dtype, 7)).collect();
            let b: Vec<PackedMatrix> = b.into_iter().map(|b| b.packed).collect();
            let parts: Vec<Part> = outputs.into_iter().zip([0..RANK, RANK..2 * RANK]).collect();
            for (rows, adds) in [(1, true), (70, true), (70, false), (500, true)] {
                let dy = random(rows * (n + 1), 11);
                for threads in &teams() {
                    let (mut dh, mut dx) = (vec![0.0; rows * 2 * RANK], random(rows * k, 13));
                    for ((outputs, ranks), b) in parts.iter().zip(&b) {
                        let term = Term { x: &dy[outputs.start..], stride: n + 1, weight: b };
                        let out = Output { y: &mut dh[ranks.start..], stride: 2 * RANK, rows, add: false };
                        forward(threads, isa, &[term], None, out);
                    }
                    let terms = [
                        Term { x: &dy, stride: n + 1, weight: &weight.packed },
                        Term { x: &dh, stride: 2 * RANK, weight: &a.packed },
                    ];
                    let out = Output { y: &mut dx, stride: k, rows, add: false };
                    backward(threads, isa, &terms[..if adds { 2 } else { 1 }], out);

                    let (mut dh_here, mut dx_here) = (vec![f32::NAN; dh.len()], vec![f32::NAN; dx.len()]);
                    let lora = LoraBackward { a: &a.packed, b_transposed: &b, parts: &parts, dh: &mut dh_here, adds };
                    let back = LinearBackward { dy: &dy, stride: n + 1, weight: &weight.packed, lora: Some(lora) };
                    let out = Output { y: &mut dx_here, stride: k, rows, add: false };
                    linear_backward(threads, isa, back, out);
                    assert!(dh == dh_here && dx == dx_here, "{isa} {dtype:?}, {rows} rows, {parts:?}");
                }
            }
        }
    }
}

#[test]
fn gradients_of_factors_together_have_the_bits_of_each_alone() {
    let (rows, widths, wide) = (77, [1, 16, 48], 300);
    let x = random(rows * (wide + 5), 3);
    let thin = random(rows * 65, 5);
    for (isa, _, _) in isas() {
        for transposed in [false, true] {
            let mut at = 0;
            let wide = Rows { values: &x[5..], width: wide, stride: wide + 5 };
            let thin = widths.map(|width| {
                let begin = at;
                at += width;
                (Rows { values: &thin[begin..], width, stride: 65 }, 2 + begin * wide.width)
            });
            let before = random(2 + at * wide.width + 3, 7);
            let mut expected = before.clone();
            for (thin, at) in &thin {
                let slot = &mut expected[*at..at + thin.width * wide.width];
                let (a, b) = if transposed { (wide, *thin) } else { (*thin, wide) };
                outer(&Threads::new(1), isa, rows, a, b, slot);
            }
            for threads in &teams() {
                let mut found = before.clone();
                let all = [Factors { wide, thin: thin.to_vec(), transposed }];
                outer_factors(threads, isa, rows, &all, &mut found);
                assert!(found == expected, "{isa}, transposed {transposed}");
            }
        }
    }
}
