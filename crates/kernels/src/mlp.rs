//! SiLU·mul on rows `[gate | up]`, its vector-Jacobian product, and sums over rows.

use super::isa::Isa;
use super::rows::{on_every_rung, over_rows};
use super::simd::{Simd, exp, load_some, store_some};
use super::threads::{Shared, Threads};

/// out `[rows, width]` = silu(gate) ∘ up, for rows `[gate | up]`, each `width` wide.
pub fn silu_mul(threads: &Threads, isa: Isa, gate_up: &[f32], width: usize, out: &mut [f32]) {
    let rows = out.len().checked_div(width).unwrap_or(0);
    assert!(out.len() == rows * width && gate_up.len() == 2 * out.len(), "rows do not fit each other");
    let out = Shared::new(out);
    over_rows(threads, rows, 4 * width, |range| {
        for row in range {
            let (gate, up) = gate_up[2 * row * width..2 * (row + 1) * width].split_at(width);
            // Safety: rows are disjoint and inside the buffer.
            unsafe { silu_row(isa, gate, up, out.part(row * width..(row + 1) * width)) };
        }
    });
}

/// dL/d`[gate | up]` of [`silu_mul`], `[rows, 2·width]`, from dL/dout = `dy` `[rows, width]`.
pub fn silu_mul_vjp(threads: &Threads, isa: Isa, gate_up: &[f32], width: usize, dy: &[f32], d_gate_up: &mut [f32]) {
    let rows = dy.len().checked_div(width).unwrap_or(0);
    assert!(dy.len() == rows * width && gate_up.len() == 2 * dy.len(), "rows do not fit each other");
    assert_eq!(gate_up.len(), d_gate_up.len(), "rows do not fit each other");
    let d_gate_up = Shared::new(d_gate_up);
    over_rows(threads, rows, 4 * width, |range| {
        for row in range {
            let span = 2 * row * width..2 * (row + 1) * width;
            let (gate, up) = gate_up[span.clone()].split_at(width);
            // Safety: rows are disjoint and inside the buffer.
            unsafe {
                let (d_gate, d_up) = d_gate_up.part(span).split_at_mut(width);
                vjp_row(isa, gate, up, &dy[row * width..(row + 1) * width], d_gate, d_up);
            }
        }
    });
}

/// y += x
pub fn add(threads: &Threads, isa: Isa, x: &[f32], y: &mut [f32]) {
    const AT_ONCE: usize = 1 << 10;
    assert_eq!(x.len(), y.len(), "x and y differ in length");
    let (length, y) = (y.len(), Shared::new(y));
    over_rows(threads, length.div_ceil(AT_ONCE), AT_ONCE, |range| {
        let span = range.start * AT_ONCE..(range.end * AT_ONCE).min(length);
        // Safety: the spans are disjoint and inside the buffer.
        unsafe { add_span(isa, &x[span.clone()], y.part(span)) };
    });
}

/// sums `[width]` += Σ over rows, in order, of x `[rows, width]`: the gradient of a bias.
pub fn column_sums(threads: &Threads, isa: Isa, x: &[f32], sums: &mut [f32]) {
    let width = sums.len();
    let rows = x.len().checked_div(width).unwrap_or(0);
    assert_eq!(x.len(), rows * width, "x is not whole rows as wide as the sums");
    let sums = Shared::new(sums);
    over_rows(threads, width.div_ceil(16), 16 * rows, |range| {
        let columns = range.start * 16..(range.end * 16).min(width);
        // Safety: columns are disjoint and inside every row.
        unsafe { sum_columns(isa, x, width, columns.start, sums.part(columns)) };
    });
}

on_every_rung! {
    unsafe fn silu_row(gate: &[f32], up: &[f32], out: &mut [f32]) = silu_with
}
on_every_rung! {
    unsafe fn vjp_row(gate: &[f32], up: &[f32], dy: &[f32], d_gate: &mut [f32], d_up: &mut [f32]) = vjp_with
}
on_every_rung! {
    unsafe fn add_span(x: &[f32], y: &mut [f32]) = add_with
}
on_every_rung! {
    unsafe fn sum_columns(x: &[f32], width: usize, first: usize, sums: &mut [f32]) = sum_with
}

/// x, no lower than where e⁻ˣ is near the largest f32, and its logistic: silu(−87) is −10⁻³⁶ already.
#[inline(always)]
unsafe fn logistic<S: Simd>(x: S::V) -> (S::V, S::V) {
    unsafe {
        // NaN stays NaN.
        let x = S::max(S::splat(-87.0), x);
        let one = S::splat(1.0);
        (x, S::div(one, S::add(one, exp::<S>(S::sub(S::zero(), x)))))
    }
}

#[inline(always)]
unsafe fn silu_with<S: Simd>(gate: &[f32], up: &[f32], out: &mut [f32]) {
    unsafe {
        for at in (0..out.len()).step_by(S::LANES) {
            let rest = out.len() - at;
            let (gate, s) = logistic::<S>(load_some::<S>(gate.as_ptr().add(at), rest));
            let value = S::mul(S::mul(gate, s), load_some::<S>(up.as_ptr().add(at), rest));
            store_some::<S>(out.as_mut_ptr().add(at), value, rest);
        }
    }
}

#[inline(always)]
unsafe fn vjp_with<S: Simd>(gate: &[f32], up: &[f32], dy: &[f32], d_gate: &mut [f32], d_up: &mut [f32]) {
    unsafe {
        let one = S::splat(1.0);
        for at in (0..dy.len()).step_by(S::LANES) {
            let rest = dy.len() - at;
            let (gate, s) = logistic::<S>(load_some::<S>(gate.as_ptr().add(at), rest));
            let dy = load_some::<S>(dy.as_ptr().add(at), rest);
            // silu' = s·(1 + x·(1 − s))
            let slope = S::mul(s, S::fma(gate, S::sub(one, s), one));
            let up = load_some::<S>(up.as_ptr().add(at), rest);
            store_some::<S>(d_gate.as_mut_ptr().add(at), S::mul(S::mul(dy, up), slope), rest);
            store_some::<S>(d_up.as_mut_ptr().add(at), S::mul(dy, S::mul(gate, s)), rest);
        }
    }
}

#[inline(always)]
unsafe fn add_with<S: Simd>(x: &[f32], y: &mut [f32]) {
    unsafe {
        for at in (0..y.len()).step_by(S::LANES) {
            let rest = y.len() - at;
            let to = y.as_mut_ptr().add(at);
            let sum = S::add(load_some::<S>(to, rest), load_some::<S>(x.as_ptr().add(at), rest));
            store_some::<S>(to, sum, rest);
        }
    }
}

#[inline(always)]
unsafe fn sum_with<S: Simd>(x: &[f32], width: usize, first: usize, sums: &mut [f32]) {
    unsafe {
        for at in (0..sums.len()).step_by(S::LANES) {
            let rest = sums.len() - at;
            let to = sums.as_mut_ptr().add(at);
            let mut sum = load_some::<S>(to, rest);
            for row in 0..x.len() / width {
                sum = S::add(sum, load_some::<S>(x.as_ptr().add(row * width + first + at), rest));
            }
            store_some::<S>(to, sum, rest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::rows::tests::{assert_close, assert_same, noise};
    use super::*;

    fn scaled(count: usize, seed: u64, by: f32) -> Vec<f32> {
        noise(count, seed).iter().map(|v| v * by).collect()
    }

    #[test]
    fn silu_and_its_gradient_are_the_naive_ones_on_every_rung() {
        for isa in Isa::available() {
            for (rows, width) in [(1, 1), (3, 5), (2, 16), (5, 29), (4, 64), (30, 777)] {
                let (gate_up, dy) = (scaled(rows * width * 2, 1, 20.0), noise(rows * width, 2));
                let (mut out, mut d) = (Vec::new(), vec![0f64; rows * width * 2]);
                for row in 0..rows {
                    for i in 0..width {
                        let g = f64::from(gate_up[row * 2 * width + i]);
                        let u = f64::from(gate_up[row * 2 * width + width + i]);
                        let dy = f64::from(dy[row * width + i]);
                        let s = 1.0 / (1.0 + (-g).exp());
                        out.push(g * s * u);
                        d[row * 2 * width + i] = dy * u * s * (1.0 + g * (1.0 - s));
                        d[row * 2 * width + width + i] = dy * g * s;
                    }
                }
                let mut first: Option<(Vec<f32>, Vec<f32>)> = None;
                for count in [1, 3] {
                    let threads = Threads::new(count);
                    let what = format!("{isa}, {rows} rows of {width}, {count} threads");
                    let (mut y, mut dx) = (vec![9f32; rows * width], vec![9f32; rows * width * 2]);
                    silu_mul(&threads, isa, &gate_up, width, &mut y);
                    silu_mul_vjp(&threads, isa, &gate_up, width, &dy, &mut dx);
                    assert_close(&y, &out, 1e-6, &what);
                    assert_close(&dx, &d, 1e-6, &what);
                    let (y0, dx0) = first.get_or_insert((y.clone(), dx.clone()));
                    assert_same(&y, y0, &what);
                    assert_same(&dx, dx0, &what);
                }
            }
        }
    }

    #[test]
    fn silu_of_huge_gates_is_finite_and_of_nan_is_nan() {
        let threads = Threads::new(1);
        for isa in Isa::available() {
            let gates = [-3.0e38f32, -1.0e4, -88.5, -87.0, 87.0, 88.5, 1.0e4, 1.0e30, f32::NAN];
            let gate_up: Vec<f32> = gates.into_iter().chain([1.0; 9]).collect();
            let (mut out, mut d) = ([0f32; 9], [0f32; 18]);
            silu_mul(&threads, isa, &gate_up, 9, &mut out);
            silu_mul_vjp(&threads, isa, &gate_up, 9, &[1.0; 9], &mut d);
            for i in 0..8 {
                let expected = gates[i].max(0.0);
                assert!((out[i] - expected).abs() <= expected * 1e-6 + 1e-30, "{isa}: {} for {}", out[i], gates[i]);
                let slope = if gates[i] > 0.0 { 1.0 } else { 0.0 };
                assert!((d[i] - slope).abs() <= 1e-6, "{isa}: slope {} at {}", d[i], gates[i]);
            }
            assert!(out[8].is_nan() && d[8].is_nan(), "{isa}");
        }
    }

    #[test]
    fn sums_over_rows_are_in_order_whatever_the_threads() {
        for isa in Isa::available() {
            for (rows, width) in [(1, 1), (9, 29), (200, 777)] {
                let (x, y) = (noise(rows * width, 1), noise(rows * width, 2));
                let mut expected = vec![0.25f32; width];
                for row in x.chunks(width) {
                    expected.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
                }
                let added: Vec<f32> = x.iter().zip(&y).map(|(x, y)| x + y).collect();
                for count in [1, 3] {
                    let threads = Threads::new(count);
                    let mut sums = vec![0.25f32; width];
                    column_sums(&threads, isa, &x, &mut sums);
                    assert_same(&sums, &expected, "column sums");
                    let mut y = y.clone();
                    add(&threads, isa, &x, &mut y);
                    assert_same(&y, &added, "y + x");
                }
            }
        }
    }
}
