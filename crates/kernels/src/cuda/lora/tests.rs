//! The tests run on the emulator if its feature is enabled, else on a GPU if there is one.

use super::super::rows::tests::{DTYPES, Given, assert_near, device, kept, rounded};
use super::*;
use crate::rows::tests::{assert_same, noise};

const SCALING: f64 = 1.5;
const THRESHOLD: u64 = 1 << 31;
const SCALE: f32 = 2.0;

/// A fused weight with two adapted modules around one without adapter.
struct Case {
    dtype: Dtype,
    inputs: usize,
    r: usize,
    parts: [Range<usize>; 2],
    factors: Vec<(Vec<f32>, Vec<f32>)>,
    weight: Given,
    bias: Given,
    x: Given,
    dy: Given,
    residual: Given,
    keys: Vec<u64>,
}

impl Case {
    fn new(device: &Device, dtype: Dtype, rows: usize, inputs: usize, r: usize, residual: bool) -> Case {
        let (parts, outputs) = ([0..10, 16..21], 21);
        let factor = |count, seed| noise(count, seed).iter().map(|v| rounded(*v, dtype)).collect::<Vec<f32>>();
        let factors = vec![(factor(r * inputs, 1), factor(10 * r, 2)), (factor(r * inputs, 3), factor(5 * r, 4))];
        // If there is a residual, the gradient of the stream is f32.
        let dy_type = if residual { Dtype::F32 } else { dtype };
        Case {
            dtype,
            inputs,
            r,
            parts,
            factors,
            weight: Given::new(device, outputs, inputs, 5, dtype),
            bias: Given::placed(device, (1, outputs), (2, outputs), 6, Dtype::F32),
            x: Given::new(device, rows, inputs, 7, dtype),
            dy: Given::new(device, rows, outputs, 8, dy_type),
            residual: Given::new(device, rows, outputs, 9, Dtype::F32),
            keys: (0..2 * rows as u64).map(|i| (i + 1).wrapping_mul(0x1234_5678_9abc_def1)).collect(),
        }
    }

    fn adapter(&self, device: &Device) -> Adapter {
        // The layout of the flat parameters: A and B of each module, after some other values.
        let (mut values, mut blocks) = (vec![f32::NAN; 3], Vec::new());
        for (part, (a, b)) in self.parts.iter().zip(&self.factors) {
            blocks.push((part.clone(), values.len(), values.len() + a.len()));
            values.extend(a.iter().chain(b));
        }
        let values = device.upload(&values).expect("values");
        let factors =
            Factors { values: &values, inputs: self.inputs, outputs: 21, r: self.r, scaling: SCALING, blocks };
        Adapter::new(device, self.dtype, &factors).expect("an adapter")
    }

    fn keys_of(&self, block: usize) -> &[u64] {
        &self.keys[block * self.x.rows().rows..][..self.x.rows().rows]
    }

    /// The factor by which a module's dropout multiplies a value of a row.
    fn mask(&self, dropout: bool, block: usize, row: usize, column: usize) -> f64 {
        if !dropout {
            return 1.0;
        }
        f64::from(kept(self.keys_of(block)[row], column, 1.0, THRESHOLD, SCALE))
    }
}

#[derive(Default)]
struct Naive {
    y: Vec<f64>,
    dx: Vec<f64>,
    da: [Vec<f64>; 2],
    db: [Vec<f64>; 2],
    dw: Vec<f64>,
    dbias: Vec<f64>,
}

fn naive(case: &Case, adapter: bool, dropout: bool) -> Naive {
    let (x, w, dy, bias) = (case.x.wide(), case.weight.wide(), case.dy.wide(), case.bias.wide());
    let (rows, inputs, outputs, r) = (case.x.rows().rows, case.inputs, 21, case.r);
    let mut all = Naive { dw: vec![0.0; outputs * inputs], dbias: vec![0.0; outputs], ..Naive::default() };
    for block in 0..2 {
        all.da[block] = vec![0.0; r * inputs];
        all.db[block] = vec![0.0; case.parts[block].len() * r];
    }
    for row in 0..rows {
        let (x, dy) = (&x[row * inputs..][..inputs], &dy[row * outputs..][..outputs]);
        let mut y: Vec<f64> =
            (0..outputs).map(|o| bias[o] + (0..inputs).map(|i| x[i] * w[o * inputs + i]).sum::<f64>()).collect();
        let mut dx: Vec<f64> = (0..inputs).map(|i| (0..outputs).map(|o| dy[o] * w[o * inputs + i]).sum()).collect();
        for ((dbias, dy), dw) in all.dbias.iter_mut().zip(dy).zip(all.dw.chunks_mut(inputs)) {
            *dbias += dy;
            dw.iter_mut().zip(x).for_each(|(dw, x)| *dw += dy * x);
        }
        for (block, (a, b)) in case.factors.iter().enumerate().filter(|_| adapter) {
            let x: Vec<f64> = (0..inputs).map(|i| x[i] * case.mask(dropout, block, row, i)).collect();
            for rank in 0..r {
                let a_row: Vec<f64> = a[rank * inputs..][..inputs].iter().map(|v| f64::from(*v)).collect();
                let h: f64 = x.iter().zip(&a_row).map(|(x, a)| x * a).sum();
                let mut dh = 0.0;
                for (index, o) in case.parts[block].clone().enumerate() {
                    let b = f64::from(b[index * r + rank]);
                    y[o] += SCALING * h * b;
                    dh += SCALING * dy[o] * b;
                    all.db[block][index * r + rank] += SCALING * dy[o] * h;
                }
                for i in 0..inputs {
                    dx[i] += dh * a_row[i] * case.mask(dropout, block, row, i);
                    all.da[block][rank * inputs + i] += dh * x[i];
                }
            }
        }
        all.y.extend(y);
        all.dx.extend(dx);
    }
    all
}

/// Tolerance for products of f32, and of values and intermediates rounded to bf16.
fn tolerance(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F32 => 3e-6,
        Dtype::Bf16 => 1e-2,
    }
}

#[test]
fn products_with_adapters_and_their_gradients_are_the_naive_ones() {
    let Some(device) = device() else { return };
    for (rows, inputs, r) in [(1, 8, 1), (5, 24, 4), (40, 37, 3), (300, 16, 8)] {
        for dtype in DTYPES {
            for residual in [false, true] {
                let case = Case::new(&device, dtype, rows, inputs, r, residual);
                let adapter = case.adapter(&device);
                let keys = [0, 1].map(|block| device.upload(case.keys_of(block)).expect("keys"));
                let masks = [0, 1].map(|i| Dropout { keys: &keys[i], threshold: THRESHOLD, scale: SCALE });
                for (gemm, with, dropout) in [
                    (Gemm::Exact, false, false),
                    (Gemm::Exact, true, false),
                    (Gemm::Exact, true, true),
                    (Gemm::Fast, true, false),
                    (Gemm::Fast, true, true),
                ] {
                    let what = format!("{rows} x {inputs}, {r}, {dtype:?}, {residual}, {gemm:?} {with} {dropout}");
                    let expected = naive(&case, with, dropout);
                    let used = Linear {
                        weight: case.weight.rows(),
                        bias: Some(case.bias.rows()),
                        adapter: with.then_some(&adapter),
                        dropout: if dropout { &masks } else { &[] },
                    };
                    let out_type = if residual { Dtype::F32 } else { dtype };
                    let out = Given::new(&device, rows, 21, 10, out_type);
                    let stream = residual.then(|| case.residual.rows());
                    linear(&device, gemm, &used, case.x.rows(), stream, out.rows()).expect("a product");
                    let stream = if residual { case.residual.wide() } else { vec![0.0; rows * 21] };
                    let sums: Vec<f64> = expected.y.iter().zip(&stream).map(|(y, r)| y + r).collect();
                    assert_near(&out.now(&device), &sums, out_type, tolerance(dtype), &what);

                    // The gradients are: A, B, A, B, then the middle module's W and its bias.
                    let sizes = [r * inputs, 10 * r, r * inputs, 5 * r, 6 * inputs, 6];
                    let at: Vec<usize> = (0..6).map(|i| 3 + sizes[..i].iter().sum::<usize>()).collect();
                    let gradient = Given::new(&device, 1, 3 + sizes.iter().sum::<usize>(), 11, Dtype::F32);
                    let slots = [(at[0], at[1]), (at[2], at[3])];
                    let full = [Trained { outputs: 10..16, weight: at[4], bias: Some(at[5]) }];
                    let dx = Given::new(&device, rows, inputs, 12, dtype);
                    let backward = LinearBackward {
                        linear: used,
                        x: case.x.rows(),
                        dy: case.dy.rows(),
                        slots: if with { &slots } else { &[] },
                        full: &full,
                        gradient: &gradient.buffer,
                    };
                    linear_vjp(&device, gemm, &backward, dx.rows()).expect("gradients");
                    assert_near(&dx.now(&device), &expected.dx, dtype, tolerance(dtype), &what);
                    let (now, was) = (gradient.now(&device), gradient.wide());
                    assert_eq!(now[..3], gradient.values()[..3], "{what}");
                    let Naive { da: [a0, a1], db: [b0, b1], dw, dbias, .. } = expected;
                    let dw = &dw[10 * inputs..16 * inputs];
                    let all: [&[f64]; 6] = [&a0, &b0, &a1, &b1, dw, &dbias[10..16]];
                    for (index, d) in all.into_iter().enumerate() {
                        let span = at[index]..at[index] + sizes[index];
                        let sums: Vec<f64> = d.iter().zip(&was[span.clone()]).map(|(d, was)| d + was).collect();
                        let what = format!("{what}, gradient {index}");
                        assert_near(&now[span], &sums, Dtype::F32, tolerance(dtype), &what);
                    }
                }
            }
        }
    }
}

#[test]
fn a_row_with_an_adapter_has_the_same_bits_alone() {
    let Some(device) = device() else { return };
    for dtype in DTYPES {
        let case = Case::new(&device, dtype, 90, 40, 4, true);
        let adapter = case.adapter(&device);
        let used =
            Linear { weight: case.weight.rows(), bias: Some(case.bias.rows()), adapter: Some(&adapter), dropout: &[] };
        let run = |rows: Range<usize>| {
            let out = Given::new(&device, rows.len(), 21, 1, Dtype::F32);
            let (x, residual) = (case.x.rows().part(rows.clone()), case.residual.rows().part(rows));
            linear(&device, Gemm::Exact, &used, x, Some(residual), out.rows()).expect("a product");
            out.now(&device)
        };
        let all = run(0..90);
        for rows in [0..1, 89..90, 3..70] {
            assert_same(&run(rows.clone()), &all[rows.start * 21..rows.end * 21], "some of the rows");
        }
    }
}

#[test]
fn few_rows_take_two_launches_with_an_adapter_and_one_without() {
    let Some(device) = device() else { return };
    for (rows, inputs, r) in [(1, 64, 4), (3, 264, 8), (16, 72, 16), (16, 64, 4), (1, 40, 24)] {
        for (residual, with) in [(true, true), (true, false), (false, true), (false, false)] {
            let what = format!("{rows} rows of {inputs}, rank {r}, residual {residual}, adapter {with}");
            let case = Case::new(&device, Dtype::Bf16, rows, inputs, r, residual);
            let adapter = case.adapter(&device);
            let used = Linear {
                weight: case.weight.rows(),
                bias: Some(case.bias.rows()),
                adapter: with.then_some(&adapter),
                dropout: &[],
            };
            let out_type = if residual { Dtype::F32 } else { Dtype::Bf16 };
            let out = Given::new(&device, rows, 21, 10, out_type);
            let stream = residual.then(|| case.residual.rows());
            let before = device.counters();
            linear(&device, Gemm::Fast, &used, case.x.rows(), stream, out.rows()).expect("a product");
            let after = device.counters();
            let counts = (after.launches - before.launches, after.products - before.products);
            assert_eq!(counts, (if with { 2 } else { 1 }, 0), "{what}");
            let stream = if residual { case.residual.wide() } else { vec![0.0; rows * 21] };
            let sums: Vec<f64> = naive(&case, with, false).y.iter().zip(&stream).map(|(y, r)| y + r).collect();
            assert_near(&out.now(&device), &sums, out_type, tolerance(Dtype::Bf16), &what);
        }
    }
}
