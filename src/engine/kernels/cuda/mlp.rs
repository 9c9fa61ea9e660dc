//! SiLU·mul on rows `[gate | up]`, and its vector-Jacobian product.

use super::driver::Device;
use super::rows::{Result, Rows};

/// out `[rows, width]` = silu(gate) ∘ up, for rows `[gate | up]`, each `width` wide; both of one type.
pub fn silu_mul(device: &Device, gate_up: Rows<'_>, out: Rows<'_>) -> Result<()> {
    todo!()
}

/// d_gate_up = dL/d`[gate | up]` of [`silu_mul`] from dL/dout = `dy`; all of one type; d_gate_up may be gate_up.
pub fn silu_mul_vjp(device: &Device, gate_up: Rows<'_>, dy: Rows<'_>, d_gate_up: Rows<'_>) -> Result<()> {
    todo!()
}
