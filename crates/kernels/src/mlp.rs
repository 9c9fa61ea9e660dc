//! Gated activations of rows `[gate | up]`, their vector-Jacobian products, and sums over rows.

use super::isa::Isa;
use super::rows::{on_every_isa, over_rows};
use super::simd::{LOWEST, Simd, load_some, logistic, store_some};
use super::threads::{Shared, Threads};

/// The activation function of an MLP's gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// SiLU, which is x·σ(x).
    Silu,
    /// GELU with tanh: x·½·(1 + tanh u) = x·σ(2u) with u = √(2/π)·(x + 0.044715·x³), PyTorch's
    /// `gelu(approximate="tanh")`.
    GeluTanh,
}

/// Rows `[gate | up]` of an MLP, each half `width` wide.
#[derive(Clone, Copy, Debug)]
pub struct GateUp<'a> {
    /// The activation function of the gate.
    pub activation: Activation,
    /// The rows, `[rows][2 · width]`.
    pub values: &'a [f32],
    /// Width of each half of a row.
    pub width: usize,
}

/// Computes out `[rows, width]` = activation(gate) ∘ up.
pub fn gated(threads: &Threads, isa: Isa, rows: GateUp<'_>, out: &mut [f32]) {
    let GateUp { activation, values: gate_up, width } = rows;
    let rows = out.len().checked_div(width).unwrap_or(0);
    assert!(
        out.len() == rows * width && gate_up.len() == 2 * out.len(),
        "the matrix [gate | up] and the output have different numbers of rows"
    );
    let out = Shared::new(out);
    over_rows(threads, rows, 4 * width, |range| {
        for row in range {
            let (gate, up) = gate_up[2 * row * width..2 * (row + 1) * width].split_at(width);
            // Safety: each thread writes other rows, and all rows are inside the buffer.
            unsafe {
                let out = out.part(row * width..(row + 1) * width);
                match activation {
                    Activation::Silu => silu_row(isa, gate, up, out),
                    Activation::GeluTanh => gelu_row(isa, gate, up, out),
                }
            };
        }
    });
}

/// Computes dL/d`[gate | up]` of [`gated`], `[rows, 2·width]`, from dL/dout = `dy` `[rows, width]`.
pub fn gated_vjp(threads: &Threads, isa: Isa, rows: GateUp<'_>, dy: &[f32], d_gate_up: &mut [f32]) {
    let GateUp { activation, values: gate_up, width } = rows;
    let rows = dy.len().checked_div(width).unwrap_or(0);
    assert!(
        dy.len() == rows * width && gate_up.len() == 2 * dy.len(),
        "the matrix [gate | up] and the output's gradient have different numbers of rows"
    );
    assert_eq!(gate_up.len(), d_gate_up.len(), "the matrix [gate | up] and its gradient differ in length");
    let d_gate_up = Shared::new(d_gate_up);
    over_rows(threads, rows, 4 * width, |range| {
        for row in range {
            let span = 2 * row * width..2 * (row + 1) * width;
            let (gate, up) = gate_up[span.clone()].split_at(width);
            // Safety: each thread writes other rows, and all rows are inside the buffer.
            unsafe {
                let (d_gate, d_up) = d_gate_up.part(span).split_at_mut(width);
                let dy = &dy[row * width..(row + 1) * width];
                match activation {
                    Activation::Silu => silu_vjp_row(isa, gate, up, dy, d_gate, d_up),
                    Activation::GeluTanh => gelu_vjp_row(isa, gate, up, dy, d_gate, d_up),
                }
            }
        }
    });
}

/// Adds elementwise: y += x.
pub fn add(threads: &Threads, isa: Isa, x: &[f32], y: &mut [f32]) {
    const AT_ONCE: usize = 1 << 10;
    assert_eq!(x.len(), y.len(), "the two vectors of a sum differ in length");
    let (length, y) = (y.len(), Shared::new(y));
    over_rows(threads, length.div_ceil(AT_ONCE), AT_ONCE, |range| {
        let span = range.start * AT_ONCE..(range.end * AT_ONCE).min(length);
        // Safety: each thread writes another span of y, inside the buffer.
        unsafe { add_span(isa, &x[span.clone()], y.part(span)) };
    });
}

/// Computes sums `[width]` += Σ over rows, in order, of x `[rows, width]`: the gradient of a bias.
pub fn column_sums(threads: &Threads, isa: Isa, x: &[f32], sums: &mut [f32]) {
    let width = sums.len();
    let rows = x.len().checked_div(width).unwrap_or(0);
    assert_eq!(x.len(), rows * width, "the length of the matrix is not a multiple of the number of its column sums");
    let sums = Shared::new(sums);
    over_rows(threads, width.div_ceil(16), 16 * rows, |range| {
        let columns = range.start * 16..(range.end * 16).min(width);
        // Safety: each thread writes other columns, and all columns are inside every row.
        unsafe { sum_columns(isa, x, width, columns.start, sums.part(columns)) };
    });
}

on_every_isa! {
    unsafe fn silu_row(gate: &[f32], up: &[f32], out: &mut [f32]) = silu_with
}
on_every_isa! {
    unsafe fn silu_vjp_row(gate: &[f32], up: &[f32], dy: &[f32], d_gate: &mut [f32], d_up: &mut [f32]) = silu_vjp_with
}
on_every_isa! {
    unsafe fn gelu_row(gate: &[f32], up: &[f32], out: &mut [f32]) = gelu_with
}
on_every_isa! {
    unsafe fn gelu_vjp_row(gate: &[f32], up: &[f32], dy: &[f32], d_gate: &mut [f32], d_up: &mut [f32]) = gelu_vjp_with
}
on_every_isa! {
    unsafe fn add_span(x: &[f32], y: &mut [f32]) = add_with
}
on_every_isa! {
    unsafe fn sum_columns(x: &[f32], width: usize, first: usize, sums: &mut [f32]) = sum_with
}

/// The value of an activation function and its derivative.
pub(super) type Curve<V> = (V, V);

#[inline(always)]
pub(super) unsafe fn silu<S: Simd>(gate: S::V) -> Curve<S::V> {
    unsafe {
        // Bound the gate below: silu(−87) is already −10⁻³⁶.
        let gate = S::max(S::splat(LOWEST), gate);
        let s = logistic::<S>(gate);
        // The derivative of SiLU, with s = σ(x): s·(1 + x·(1 − s)).
        let one = S::splat(1.0);
        (S::mul(gate, s), S::mul(s, S::fma(gate, S::sub(one, s), one)))
    }
}

#[inline(always)]
unsafe fn gelu<S: Simd>(gate: S::V) -> Curve<S::V> {
    /// The constant factor 2·√(2/π) of GELU.
    const FACTOR: f32 = 1.595_769;
    const CUBIC: f32 = 0.044_715;
    unsafe {
        // Bound the input: beyond ±20 the logistic is 0 or 1 in f32, and the cube stays finite.
        let x = S::max(S::splat(-20.0), gate);
        let bounded = S::sub(S::zero(), S::max(S::splat(-20.0), S::sub(S::zero(), x)));
        let (one, square) = (S::splat(1.0), S::mul(bounded, bounded));
        let two_u = S::mul(S::mul(S::splat(FACTOR), bounded), S::fma(S::splat(CUBIC), square, one));
        let s = logistic::<S>(two_u);
        let slope = S::mul(S::splat(FACTOR), S::fma(S::splat(3.0 * CUBIC), square, one));
        // The derivative of GELU: (x·σ(2u))' = σ + x·σ·(1 − σ)·2u'.
        let derivative = S::mul(s, S::fma(S::mul(bounded, slope), S::sub(one, s), one));
        (S::mul(x, s), derivative)
    }
}

macro_rules! gated_by {
    ($curve:ident: $forward:ident, $vjp:ident) => {
        #[inline(always)]
        unsafe fn $forward<S: Simd>(gate: &[f32], up: &[f32], out: &mut [f32]) {
            unsafe {
                for at in (0..out.len()).step_by(S::LANES) {
                    let rest = out.len() - at;
                    let (value, _) = $curve::<S>(load_some::<S>(gate.as_ptr().add(at), rest));
                    let value = S::mul(value, load_some::<S>(up.as_ptr().add(at), rest));
                    store_some::<S>(out.as_mut_ptr().add(at), value, rest);
                }
            }
        }

        #[inline(always)]
        unsafe fn $vjp<S: Simd>(gate: &[f32], up: &[f32], dy: &[f32], d_gate: &mut [f32], d_up: &mut [f32]) {
            unsafe {
                for at in (0..dy.len()).step_by(S::LANES) {
                    let rest = dy.len() - at;
                    let (value, slope) = $curve::<S>(load_some::<S>(gate.as_ptr().add(at), rest));
                    let dy = load_some::<S>(dy.as_ptr().add(at), rest);
                    let up = load_some::<S>(up.as_ptr().add(at), rest);
                    store_some::<S>(d_gate.as_mut_ptr().add(at), S::mul(S::mul(dy, up), slope), rest);
                    store_some::<S>(d_up.as_mut_ptr().add(at), S::mul(dy, value), rest);
                }
            }
        }
    };
}
gated_by!(silu: silu_with, silu_vjp_with);
gated_by!(gelu: gelu_with, gelu_vjp_with);

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

    /// The activation of a gate and its derivative, in f64.
    fn naive(activation: Activation, x: f64) -> (f64, f64) {
        match activation {
            Activation::Silu => {
                let s = 1.0 / (1.0 + (-x).exp());
                (x * s, s * (1.0 + x * (1.0 - s)))
            }
            Activation::GeluTanh => {
                let root = (2.0 / std::f64::consts::PI).sqrt();
                let t = (root * (x + 0.044715 * x * x * x)).tanh();
                let slope = root * (1.0 + 3.0 * 0.044715 * x * x);
                (0.5 * x * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * slope)
            }
        }
    }

    #[test]
    fn activations_and_their_gradients_are_the_naive_ones_on_every_isa() {
        let both = [Activation::Silu, Activation::GeluTanh];
        for (isa, activation) in Isa::available().flat_map(|isa| both.map(|activation| (isa, activation))) {
            for (rows, width) in [(1, 1), (3, 5), (2, 16), (5, 29), (4, 64), (30, 777)] {
                let (gate_up, dy) = (scaled(rows * width * 2, 1, 20.0), noise(rows * width, 2));
                let (mut out, mut d) = (Vec::new(), vec![0f64; rows * width * 2]);
                for row in 0..rows {
                    for i in 0..width {
                        let g = f64::from(gate_up[row * 2 * width + i]);
                        let u = f64::from(gate_up[row * 2 * width + width + i]);
                        let dy = f64::from(dy[row * width + i]);
                        let (value, slope) = naive(activation, g);
                        out.push(value * u);
                        d[row * 2 * width + i] = dy * u * slope;
                        d[row * 2 * width + width + i] = dy * value;
                    }
                }
                let mut first: Option<(Vec<f32>, Vec<f32>)> = None;
                for count in [1, 3] {
                    let threads = Threads::new(count);
                    let what = format!("{isa}, {activation:?}, {rows} rows of {width}, {count} threads");
                    let given = GateUp { activation, values: &gate_up, width };
                    let (mut y, mut dx) = (vec![9f32; rows * width], vec![9f32; rows * width * 2]);
                    gated(&threads, isa, given, &mut y);
                    gated_vjp(&threads, isa, given, &dy, &mut dx);
                    // GELU has a larger tolerance, since its exponent is a cubic of the gate.
                    let tolerance = if activation == Activation::Silu { 1e-6 } else { 4e-6 };
                    assert_close(&y, &out, tolerance, &what);
                    assert_close(&dx, &d, tolerance, &what);
                    let (y0, dx0) = first.get_or_insert((y.clone(), dx.clone()));
                    assert_same(&y, y0, &what);
                    assert_same(&dx, dx0, &what);
                }
            }
        }
    }

    #[test]
    fn activations_of_huge_gates_are_finite_and_of_nan_are_nan() {
        let threads = Threads::new(1);
        let both = [Activation::Silu, Activation::GeluTanh];
        for (isa, activation) in Isa::available().flat_map(|isa| both.map(|activation| (isa, activation))) {
            let gates = [-3.0e38f32, -1.0e4, -88.5, -87.0, 87.0, 88.5, 1.0e4, 1.0e30, f32::NAN];
            let gate_up: Vec<f32> = gates.into_iter().chain([1.0; 9]).collect();
            let (mut out, mut d) = ([0f32; 9], [0f32; 18]);
            let given = GateUp { activation, values: &gate_up, width: 9 };
            gated(&threads, isa, given, &mut out);
            gated_vjp(&threads, isa, given, &[1.0; 9], &mut d);
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
