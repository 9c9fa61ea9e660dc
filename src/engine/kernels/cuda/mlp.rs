//! SiLU·mul on rows `[gate | up]`, and its vector-Jacobian product.

use super::driver::{Device, params};
use super::rows::{Result, Rows, bits, by_fours, check_rows, size};

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
        aligned: u32,
    }
}

/// out `[rows, width]` = silu(gate) ∘ up, for rows `[gate | up]`, each `width` wide; both of one type.
///
/// # Errors
/// [`CudaError::Input`](super::driver::CudaError::Input): the shapes do not fit.
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
        aligned: bits(&[gate.by_fours(), up.by_fours(), false, out.by_fours()]),
    };
    device.launch(&format!("silu_mul_{}", out.dtype.name()), by_fours(out.rows, width)?, &params)
}

/// d_gate_up = dL/d`[gate | up]` of [`silu_mul`] from dL/dout = `dy`; all of one type; d_gate_up may be gate_up.
///
/// # Errors
/// [`CudaError::Input`](super::driver::CudaError::Input): the shapes do not fit.
pub fn silu_mul_vjp(device: &Device, gate_up: Rows<'_>, dy: Rows<'_>, d_gate_up: Rows<'_>) -> Result<()> {
    let width = dy.width;
    let fits = |x: Rows<'_>| (x.rows, x.width, x.dtype) == (dy.rows, 2 * width, dy.dtype);
    check_rows(fits(gate_up) && fits(d_gate_up), "silu_mul_vjp", &[gate_up, dy, d_gate_up])?;
    if dy.rows == 0 || width == 0 {
        return Ok(());
    }
    let halves = |x: Rows<'_>| (x.columns(0..width).by_fours(), x.columns(width..2 * width).by_fours());
    let ((gate, up), (d_gate, d_up)) = (halves(gate_up), halves(d_gate_up));
    let params = Silu {
        gate_up: gate_up.address()?,
        dy: dy.address()?,
        out: d_gate_up.address()?,
        rows: size(dy.rows)?,
        width: size(width)?,
        gate_up_stride: size(gate_up.stride)?,
        dy_stride: size(dy.stride)?,
        out_stride: size(d_gate_up.stride)?,
        aligned: bits(&[gate, up, dy.by_fours(), d_gate, d_up]),
    };
    device.launch(&format!("silu_mul_vjp_{}", dy.dtype.name()), by_fours(dy.rows, width)?, &params)
}
