//! RMSNorm of rows and its vector-Jacobian products. A row's result depends only on that row.

use super::isa::Isa;
use super::rows::{on_every_isa, over_rows};
use super::simd::{Simd, load_some, store_some};
use super::threads::{Shared, Threads};

/// Computes RMSNorm, out = x / √(mean(x²) + eps) ∘ weight, for rows as wide as `weight`.
pub fn rms_norm(threads: &Threads, isa: Isa, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let rows = rows_of(x, weight);
    assert_eq!(x.len(), out.len(), "the input x and the output of the norm differ in length");
    let out = Shared::new(out);
    over_rows(threads, rows, weight.len(), |range| {
        for row in range {
            let span = row * weight.len()..(row + 1) * weight.len();
            // Safety: each thread writes other rows, and all rows are inside both buffers.
            unsafe { norm_row(isa, &x[span.clone()], weight, eps, out.part(span)) };
        }
    });
}

/// Computes RMSNorm's gradient dx = residual + dL/dx of [`rms_norm`], from dL/dout = `dy`.
#[expect(clippy::too_many_arguments, reason = "every argument is an operand of one operation")]
pub fn rms_norm_vjp(
    threads: &Threads,
    isa: Isa,
    x: &[f32],
    weight: &[f32],
    eps: f32,
    dy: &[f32],
    residual: Option<&[f32]>,
    dx: &mut [f32],
) {
    let rows = rows_of(x, weight);
    assert!(x.len() == dy.len() && x.len() == dx.len(), "the input x and the gradients dy and dx differ in length");
    assert!(residual.is_none_or(|residual| residual.len() == x.len()), "the input x and the residual differ in length");
    let dx = Shared::new(dx);
    over_rows(threads, rows, weight.len(), |range| {
        for row in range {
            let span = row * weight.len()..(row + 1) * weight.len();
            let residual = residual.map(|residual| &residual[span.clone()]);
            // Safety: each thread writes other rows, and all rows are inside every buffer.
            unsafe { vjp_row(isa, &x[span.clone()], weight, eps, &dy[span.clone()], residual, dx.part(span)) };
        }
    });
}

/// Computes the gradient of RMSNorm's weight, dw += Σ over rows, in order, of dy ∘ x / √(mean(x²) + eps),
/// from dL/dout = `dy`.
pub fn rms_norm_weight_vjp(threads: &Threads, isa: Isa, x: &[f32], eps: f32, dy: &[f32], dw: &mut [f32]) {
    let width = dw.len();
    let rows = rows_of(x, dw);
    assert_eq!(x.len(), dy.len(), "the norm's input x and its gradient dy differ in length");
    let mut scales = vec![0f32; rows];
    let shared = Shared::new(&mut scales);
    over_rows(threads, rows, width, |range| {
        for row in range {
            // Safety: each row has one element, and one thread.
            unsafe { *shared.at(row) = scale_row(isa, &x[row * width..(row + 1) * width], eps) };
        }
    });
    let dw = Shared::new(dw);
    // Divide columns at multiples of 16, so that a column is always in the same lane of a vector.
    over_rows(threads, width.div_ceil(16), 16 * rows, |range| {
        let columns = range.start * 16..(range.end * 16).min(width);
        // Safety: each thread writes other columns, and all columns are inside every row.
        unsafe { weight_columns(isa, x, dy, &scales, width, columns.start, dw.part(columns)) };
    });
}

fn rows_of(x: &[f32], weight: &[f32]) -> usize {
    let rows = x.len().checked_div(weight.len()).unwrap_or(0);
    assert_eq!(
        x.len(),
        rows * weight.len(),
        "the length of the norm's input x is not a multiple of the weight's length"
    );
    rows
}

on_every_isa! {
    unsafe fn norm_row(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) = norm_with
}
on_every_isa! {
    unsafe fn vjp_row(x: &[f32], weight: &[f32], eps: f32, dy: &[f32], residual: Option<&[f32]>, dx: &mut [f32])
        = vjp_with
}
on_every_isa! {
    unsafe fn scale_row(x: &[f32], eps: f32) -> f32 = scale_of
}
on_every_isa! {
    unsafe fn weight_columns(x: &[f32], dy: &[f32], scales: &[f32], width: usize, first: usize, dw: &mut [f32])
        = weight_with
}

/// Dot product Σ a·b with four chains of vectors, added at the end.
#[inline(always)]
pub(super) unsafe fn dot<S: Simd>(a: *const f32, b: *const f32, count: usize) -> f32 {
    unsafe {
        let mut sums = [S::zero(); 4];
        let mut at = 0;
        while at + 4 * S::LANES <= count {
            for (i, sum) in sums.iter_mut().enumerate() {
                let at = at + i * S::LANES;
                *sum = S::fma(S::load(a.add(at)), S::load(b.add(at)), *sum);
            }
            at += 4 * S::LANES;
        }
        while at < count {
            let rest = count - at;
            sums[0] = S::fma(load_some::<S>(a.add(at), rest), load_some::<S>(b.add(at), rest), sums[0]);
            at += S::LANES;
        }
        S::sum(S::add(S::add(sums[0], sums[1]), S::add(sums[2], sums[3])))
    }
}

/// Computes Σ x·w·dy in the same order as [`dot`].
#[inline(always)]
pub(super) unsafe fn dot3<S: Simd>(x: *const f32, w: *const f32, dy: *const f32, count: usize) -> f32 {
    unsafe {
        let mut sums = [S::zero(); 4];
        let mut at = 0;
        while at + 4 * S::LANES <= count {
            for (i, sum) in sums.iter_mut().enumerate() {
                let at = at + i * S::LANES;
                let g = S::mul(S::load(w.add(at)), S::load(dy.add(at)));
                *sum = S::fma(S::load(x.add(at)), g, *sum);
            }
            at += 4 * S::LANES;
        }
        while at < count {
            let rest = count - at;
            let g = S::mul(load_some::<S>(w.add(at), rest), load_some::<S>(dy.add(at), rest));
            sums[0] = S::fma(load_some::<S>(x.add(at), rest), g, sums[0]);
            at += S::LANES;
        }
        S::sum(S::add(S::add(sums[0], sums[1]), S::add(sums[2], sums[3])))
    }
}

/// The factor r = 1 / √(mean(x²) + eps) of a row in RMSNorm.
#[inline(always)]
pub(super) unsafe fn scale_of<S: Simd>(x: &[f32], eps: f32) -> f32 {
    // Safety: the caller guarantees what this `unsafe fn` requires.
    unsafe { 1.0 / (dot::<S>(x.as_ptr(), x.as_ptr(), x.len()) / x.len() as f32 + eps).sqrt() }
}

#[inline(always)]
unsafe fn norm_with<S: Simd>(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    unsafe {
        let r = S::splat(scale_of::<S>(x, eps));
        for at in (0..x.len()).step_by(S::LANES) {
            let rest = x.len() - at;
            let value = S::mul(load_some::<S>(x.as_ptr().add(at), rest), r);
            let value = S::mul(value, load_some::<S>(weight.as_ptr().add(at), rest));
            store_some::<S>(out.as_mut_ptr().add(at), value, rest);
        }
    }
}

#[inline(always)]
unsafe fn vjp_with<S: Simd>(x: &[f32], weight: &[f32], eps: f32, dy: &[f32], residual: Option<&[f32]>, dx: &mut [f32]) {
    unsafe {
        let r = scale_of::<S>(x, eps);
        let inner = dot3::<S>(x.as_ptr(), weight.as_ptr(), dy.as_ptr(), x.len());
        // The gradient of RMSNorm: dx = r·w·dy − (inner·r³/n)·x, with r = 1 / √(mean(x²) + eps) and inner = Σ x·w·dy.
        let c = S::splat(-(inner * r * r / x.len() as f32) * r);
        let r = S::splat(r);
        for at in (0..x.len()).step_by(S::LANES) {
            let rest = x.len() - at;
            let g = S::mul(load_some::<S>(weight.as_ptr().add(at), rest), load_some::<S>(dy.as_ptr().add(at), rest));
            let mut value = S::fma(c, load_some::<S>(x.as_ptr().add(at), rest), S::mul(g, r));
            if let Some(residual) = residual {
                value = S::add(value, load_some::<S>(residual.as_ptr().add(at), rest));
            }
            store_some::<S>(dx.as_mut_ptr().add(at), value, rest);
        }
    }
}

#[inline(always)]
unsafe fn weight_with<S: Simd>(x: &[f32], dy: &[f32], scales: &[f32], width: usize, first: usize, dw: &mut [f32]) {
    unsafe {
        for at in (0..dw.len()).step_by(S::LANES) {
            let rest = dw.len() - at;
            let mut sum = load_some::<S>(dw.as_ptr().add(at), rest);
            for (row, scale) in scales.iter().enumerate() {
                let begin = row * width + first + at;
                let normed = S::mul(load_some::<S>(x.as_ptr().add(begin), rest), S::splat(*scale));
                sum = S::fma(load_some::<S>(dy.as_ptr().add(begin), rest), normed, sum);
            }
            store_some::<S>(dw.as_mut_ptr().add(at), sum, rest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::rows::tests::{assert_close, assert_same, noise};
    use super::*;

    const EPS: f32 = 1e-5;

    struct Naive {
        out: Vec<f64>,
        dx: Vec<f64>,
        dw: Vec<f64>,
    }

    fn naive(x: &[f32], weight: &[f32], dy: &[f32]) -> Naive {
        let n = weight.len();
        let mut all = Naive { out: vec![], dx: vec![], dw: vec![0.0; n] };
        for (x, dy) in x.chunks(n).zip(dy.chunks(n)) {
            let x: Vec<f64> = x.iter().map(|v| f64::from(*v)).collect();
            let dy: Vec<f64> = dy.iter().map(|v| f64::from(*v)).collect();
            let w: Vec<f64> = weight.iter().map(|v| f64::from(*v)).collect();
            let r = (x.iter().map(|v| v * v).sum::<f64>() / n as f64 + f64::from(EPS)).sqrt().recip();
            let inner: f64 = (0..n).map(|i| x[i] * w[i] * dy[i]).sum();
            for i in 0..n {
                all.out.push(x[i] * r * w[i]);
                all.dx.push(r * (w[i] * dy[i] - inner * r * r / n as f64 * x[i]));
                all.dw[i] += dy[i] * x[i] * r;
            }
        }
        all
    }

    #[test]
    fn norms_and_their_gradients_are_the_naive_ones_on_every_isa() {
        for isa in Isa::available() {
            for (rows, width) in [(1, 1), (3, 5), (2, 16), (5, 29), (4, 64), (7, 100), (3, 1024), (40, 777)] {
                let (x, weight, dy) = (noise(rows * width, 1), noise(width, 2), noise(rows * width, 3));
                let residual = noise(rows * width, 4);
                let expected = naive(&x, &weight, &dy);
                for count in [1, 2, 3] {
                    let threads = Threads::new(count);
                    let what = format!("{isa}, {rows} rows of {width}, {count} threads");
                    let mut out = vec![9f32; rows * width];
                    rms_norm(&threads, isa, &x, &weight, EPS, &mut out);
                    assert_close(&out, &expected.out, 1e-5, &what);
                    rms_norm_vjp(&threads, isa, &x, &weight, EPS, &dy, None, &mut out);
                    assert_close(&out, &expected.dx, 1e-5, &what);
                    rms_norm_vjp(&threads, isa, &x, &weight, EPS, &dy, Some(&residual), &mut out);
                    let sum: Vec<f64> = expected.dx.iter().zip(&residual).map(|(a, b)| a + f64::from(*b)).collect();
                    assert_close(&out, &sum, 1e-5, &what);
                    let mut dw = vec![0.5f32; width];
                    rms_norm_weight_vjp(&threads, isa, &x, EPS, &dy, &mut dw);
                    let sum: Vec<f64> = expected.dw.iter().map(|v| v + 0.5).collect();
                    assert_close(&dw, &sum, 1e-5, &what);
                }
            }
        }
    }

    #[test]
    fn a_row_has_the_same_bits_alone_and_among_others_and_on_any_threads() {
        let (rows, width) = (50, 777);
        let (x, weight, dy) = (noise(rows * width, 1), noise(width, 2), noise(rows * width, 3));
        for isa in Isa::available() {
            let (one, three) = (Threads::new(1), Threads::new(3));
            let (mut out, mut dx, mut dw) = (vec![0f32; rows * width], vec![0f32; rows * width], vec![0f32; width]);
            rms_norm(&three, isa, &x, &weight, EPS, &mut out);
            rms_norm_vjp(&three, isa, &x, &weight, EPS, &dy, None, &mut dx);
            rms_norm_weight_vjp(&three, isa, &x, EPS, &dy, &mut dw);
            let mut alone = vec![0f32; width];
            for row in 0..rows {
                let span = row * width..(row + 1) * width;
                rms_norm(&one, isa, &x[span.clone()], &weight, EPS, &mut alone);
                assert_same(&out[span.clone()], &alone, "out");
                rms_norm_vjp(&one, isa, &x[span.clone()], &weight, EPS, &dy[span.clone()], None, &mut alone);
                assert_same(&dx[span], &alone, "dx");
            }
            let mut alone = vec![0f32; width];
            rms_norm_weight_vjp(&one, isa, &x, EPS, &dy, &mut alone);
            assert_same(&dw, &alone, "dw");
        }
    }
}
