//! SiLU·mul on rows `[gate | up]`, and its vector-Jacobian product.

use super::driver::{Device, Launch, params};
use super::rows::{Result, Rows, check_rows, size, threads};

params! {
    struct Silu {
        gate_up: u64,
        dy: u64,
        out: u64,
        rows: u32,
        width: u32,
        gate_up_stride: u32,
        dy_stride: u32,
        out_stride: u32,
        wide: u32,
    }
}

/// Launches one thread for each eight values of each row.
fn launch(rows: usize, width: usize) -> Result<Launch> {
    threads(rows.saturating_mul(width.div_ceil(8)))
}

/// Whether all rows can be read eight values at a time.
fn by_eights(rows: &[Rows<'_>]) -> bool {
    rows.iter().all(|x| x.width.is_multiple_of(8) && x.is_aligned(16))
}

/// Computes out `[rows, width]` = silu(gate) ∘ up, for rows `[gate | up]`, each `width` wide; both of the same type.
///
/// # Errors
/// [`CudaError::Input`](super::driver::CudaError::Input) if the shapes do not match.
pub fn silu_mul(device: &Device, gate_up: Rows<'_>, out: Rows<'_>) -> Result<()> {
    let width = out.width;
    let fits = (gate_up.rows, gate_up.width, gate_up.dtype) == (out.rows, 2 * width, out.dtype);
    check_rows(fits, "silu_mul", &[gate_up, out])?;
    if out.rows == 0 || width == 0 {
        return Ok(());
    }
    let (gate, up) = (gate_up.columns(0..width), gate_up.columns(width..2 * width));
    let params = Silu {
        gate_up: gate_up.address()?,
        dy: 0,
        out: out.address()?,
        rows: size(out.rows)?,
        width: size(width)?,
        gate_up_stride: size(gate_up.stride)?,
        dy_stride: 0,
        out_stride: size(out.stride)?,
        wide: u32::from(by_eights(&[gate, up, out])),
    };
    device.launch(out.dtype.of(["silu_mul_f32", "silu_mul_bf16"]), launch(out.rows, width)?, &params)
}

/// Computes d_gate_up = dL/d`[gate | up]` of [`silu_mul`] from dL/dout = `dy`; all of the same type;
/// d_gate_up may be gate_up.
///
/// # Errors
/// [`CudaError::Input`](super::driver::CudaError::Input) if the shapes do not match.
pub fn silu_mul_vjp(device: &Device, gate_up: Rows<'_>, dy: Rows<'_>, d_gate_up: Rows<'_>) -> Result<()> {
    let width = dy.width;
    let fits = |x: Rows<'_>| (x.rows, x.width, x.dtype) == (dy.rows, 2 * width, dy.dtype);
    check_rows(fits(gate_up) && fits(d_gate_up), "silu_mul_vjp", &[gate_up, dy, d_gate_up])?;
    if dy.rows == 0 || width == 0 {
        return Ok(());
    }
    let [gate, d_gate] = [gate_up, d_gate_up].map(|x| x.columns(0..width));
    let [up, d_up] = [gate_up, d_gate_up].map(|x| x.columns(width..2 * width));
    let params = Silu {
        gate_up: gate_up.address()?,
        dy: dy.address()?,
        out: d_gate_up.address()?,
        rows: size(dy.rows)?,
        width: size(width)?,
        gate_up_stride: size(gate_up.stride)?,
        dy_stride: size(dy.stride)?,
        out_stride: size(d_gate_up.stride)?,
        wide: u32::from(by_eights(&[gate, up, dy, d_gate, d_up])),
    };
    device.launch(dy.dtype.of(["silu_mul_vjp_f32", "silu_mul_vjp_bf16"]), launch(dy.rows, width)?, &params)
}

#[cfg(test)]
mod tests {
    use super::super::rows::Dtype;
    use super::super::rows::tests::{DTYPES, Given, assert_near, device};
    use super::*;
    use crate::rows::tests::{assert_same, noise};

    #[test]
    fn silu_and_its_gradient_are_the_naive_ones() {
        let Some(device) = device() else { return };
        for dtype in DTYPES {
            for (rows, width) in [(1, 1), (3, 5), (2, 16), (5, 29), (4, 64), (30, 777)] {
                let what = format!("{rows} rows of {width}, {dtype:?}");
                let values: Vec<f32> = noise(rows * width * 2, 1).iter().map(|value| value * 20.0).collect();
                let gate_up = Given::of(&device, &values, 2 * width, dtype);
                let dy = Given::odd(&device, rows, width, 2, dtype);
                let (x, dys) = (gate_up.wide(), dy.wide());
                let (mut out, mut d) = (Vec::new(), vec![0f64; rows * width * 2]);
                for row in 0..rows {
                    for i in 0..width {
                        let (at, dy) = (row * 2 * width + i, dys[row * width + i]);
                        let (g, u) = (x[at], x[at + width]);
                        let s = 1.0 / (1.0 + (-g).exp());
                        out.push(g * s * u);
                        d[at] = dy * u * s * (1.0 + g * (1.0 - s));
                        d[at + width] = dy * g * s;
                    }
                }
                let y = Given::odd(&device, rows, width, 3, dtype);
                silu_mul(&device, gate_up.rows(), y.rows()).expect("an activation");
                assert_near(&y.now(&device), &out, dtype, 1e-6, &what);
                let aligned = Given::new(&device, rows, width, 3, dtype);
                silu_mul(&device, gate_up.rows(), aligned.rows()).expect("an activation");
                assert_same(&aligned.now(&device), &y.now(&device), &what);
                let dx = Given::odd(&device, rows, 2 * width, 4, dtype);
                silu_mul_vjp(&device, gate_up.rows(), dy.rows(), dx.rows()).expect("a gradient");
                let apart = dx.now(&device);
                assert_near(&apart, &d, dtype, 1e-6, &what);
                let dy = Given::of(&device, &dy.values(), width, dtype);
                silu_mul_vjp(&device, gate_up.rows(), dy.rows(), gate_up.rows()).expect("a gradient");
                assert_same(&gate_up.now(&device), &apart, &what);
            }
        }
    }

    #[test]
    fn silu_of_huge_gates_is_finite_and_of_nan_is_nan() {
        let Some(device) = device() else { return };
        let gates = [-3.0e38f32, -1.0e4, -88.5, -87.0, 87.0, 88.5, 1.0e4, 1.0e30, f32::NAN];
        let values: Vec<f32> = gates.into_iter().chain([1.0; 9]).collect();
        let gate_up = Given::of(&device, &values, 18, Dtype::F32);
        let (y, dx) = (Given::new(&device, 1, 9, 1, Dtype::F32), Given::new(&device, 1, 18, 2, Dtype::F32));
        let dy = Given::of(&device, &[1.0; 9], 9, Dtype::F32);
        silu_mul(&device, gate_up.rows(), y.rows()).expect("an activation");
        silu_mul_vjp(&device, gate_up.rows(), dy.rows(), dx.rows()).expect("a gradient");
        let (out, d) = (y.now(&device), dx.now(&device));
        for i in 0..8 {
            let expected = gates[i].max(0.0);
            assert!((out[i] - expected).abs() <= expected * 1e-6 + 1e-30, "{} for {}", out[i], gates[i]);
            let slope = if gates[i] > 0.0 { 1.0 } else { 0.0 };
            assert!((d[i] - slope).abs() <= 1e-6, "slope {} at {}", d[i], gates[i]);
        }
        assert!(out[8].is_nan() && d[8].is_nan());
    }
}
