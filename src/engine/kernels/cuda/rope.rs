//! qk-norm and rotary embedding of rows `[q heads | k heads | v heads]`, and their vector-Jacobian products. A row's
//! result depends on the row alone.

use super::super::attention::Heads;
use super::driver::{Buffer, Device, Launch, params};
use super::rows::{Dtype, Parts, Result, Rows, check, check_rows, parts_of, size};

/// What happens to query and key heads before attention.
#[derive(Clone, Copy, Debug)]
pub struct Rope<'a> {
    /// Sizes; `head_dim` is even.
    pub heads: &'a Heads,
    /// RMSNorm of each query and key head before it is rotated.
    pub qk_norm: Option<QkNorm<'a>>,
    /// Cosines, f32 `[positions, head_dim / 2]`.
    pub cos: Rows<'a>,
    /// Sines, f32 `[positions, head_dim / 2]`.
    pub sin: Rows<'a>,
    /// u32, one a row; a position beyond the table gives NaN.
    pub positions: &'a Buffer,
}

/// Weights of the norms of query and key heads, f32, one row of `head_dim` each.
#[derive(Clone, Copy, Debug)]
pub struct QkNorm<'a> {
    /// Of query heads.
    pub q: Rows<'a>,
    /// Of key heads.
    pub k: Rows<'a>,
    /// Added to the mean of the squares.
    pub eps: f32,
}

params! {
    struct Rotation {
        qkv: u64,
        dy: u64,
        out: u64,
        cos: u64,
        sin: u64,
        q_weight: u64,
        k_weight: u64,
        positions: u64,
        rows: u32,
        heads: u32,
        q_heads: u32,
        rotated: u32,
        head_dim: u32,
        positions_known: u32,
        qkv_stride: u32,
        dy_stride: u32,
        out_stride: u32,
        table_stride: u32,
        eps: f32,
        pad: u32,
    }
}

impl Rope<'_> {
    /// The parameters for these rows, where they fit; the rest is the caller's to fill in.
    fn rotation(&self, what: &str, rows: &[Rows<'_>]) -> Result<Rotation> {
        let Rope { heads, qk_norm, cos, sin, positions } = *self;
        let (dim, count) = (heads.head_dim, rows[0].rows);
        let fits = rows.iter().all(|x| (x.rows, x.width, x.dtype) == (count, heads.width(), rows[0].dtype));
        check_rows(fits && dim.is_multiple_of(2), what, rows)?;
        let fits = (sin.rows, sin.width, sin.stride) == (cos.rows, cos.width, cos.stride) && cos.width == dim / 2;
        check_rows(fits && (cos.dtype, sin.dtype) == (Dtype::F32, Dtype::F32), "angles", &[cos, sin])?;
        if let Some(norm) = qk_norm {
            let fits = |weight: Rows<'_>| (weight.rows, weight.width, weight.dtype) == (1, dim, Dtype::F32);
            check_rows(fits(norm.q) && fits(norm.k), "qk-norm", &[norm.q, norm.k])?;
        }
        Ok(Rotation {
            qkv: 0,
            dy: 0,
            out: 0,
            cos: cos.address()?,
            sin: sin.address()?,
            q_weight: qk_norm.map_or(Ok(0), |norm| norm.q.address())?,
            k_weight: qk_norm.map_or(Ok(0), |norm| norm.k.address())?,
            positions: positions.at::<u32>(0, count)?,
            rows: size(count)?,
            heads: size(heads.num_heads + 2 * heads.num_kv_heads)?,
            q_heads: size(heads.num_heads)?,
            rotated: size(heads.num_heads + heads.num_kv_heads)?,
            head_dim: size(dim)?,
            positions_known: size(cos.rows)?,
            qkv_stride: 0,
            dy_stride: 0,
            out_stride: 0,
            table_stride: size(cos.stride)?,
            eps: qk_norm.map_or(0.0, |norm| norm.eps),
            pad: 0,
        })
    }

    /// A warp a head.
    fn launch(&self, rows: usize) -> Result<Launch> {
        const WARPS: u32 = 4;
        let heads = rows.saturating_mul(self.heads.num_heads + 2 * self.heads.num_kv_heads);
        check(heads < u32::MAX as usize - 8, || format!("{heads} heads are more than a kernel can count"))?;
        Ok(Launch { grid: [(heads as u32).div_ceil(WARPS), 1, 1], block: 32 * WARPS, shared: 0 })
    }
}

/// out = qk-norm and rope of every row of `qkv`; both of the same type; they may be the same rows.
///
/// # Errors
/// [`CudaError::Input`](super::driver::CudaError::Input): the shapes do not fit.
pub fn rotate(device: &Device, rope: &Rope<'_>, qkv: Rows<'_>, out: Rows<'_>) -> Result<()> {
    let rotation = rope.rotation("rotate", &[qkv, out])?;
    let params = Rotation {
        qkv: qkv.address()?,
        out: out.address()?,
        qkv_stride: size(qkv.stride)?,
        out_stride: size(out.stride)?,
        ..rotation
    };
    device.launch(&format!("rotate_{}", qkv.dtype.name()), rope.launch(qkv.rows)?, &params)
}

/// dx = dL/dqkv of [`rotate`] from dL/dout = `dy`; `qkv` is its input, read with qk-norm only. All of one type; dx may be
/// dy.
///
/// # Errors
/// [`CudaError::Input`](super::driver::CudaError::Input): the shapes do not fit.
pub fn rotate_vjp(
    device: &Device,
    rope: &Rope<'_>,
    qkv: Option<Rows<'_>>,
    dy: Rows<'_>,
    dx: Rows<'_>,
) -> Result<()> {
    let before = match rope.qk_norm {
        Some(_) => qkv,
        None => Some(dy),
    };
    check(before.is_some(), || "the gradient of qk-norm needs its input".to_owned())?;
    let before = before.unwrap_or(dy);
    let rotation = rope.rotation("rotate_vjp", &[before, dy, dx])?;
    let params = Rotation {
        qkv: before.address()?,
        dy: dy.address()?,
        out: dx.address()?,
        qkv_stride: size(before.stride)?,
        dy_stride: size(dy.stride)?,
        out_stride: size(dx.stride)?,
        ..rotation
    };
    device.launch(&format!("rotate_vjp_{}", dy.dtype.name()), rope.launch(dy.rows)?, &params)
}

/// dq and dk (f32, one row of `head_dim` each) += dL/dweight of the qk-norms, summed in a fixed order; nothing without
/// qk-norm.
///
/// # Errors
/// [`CudaError::Input`](super::driver::CudaError::Input): the shapes do not fit.
pub fn rotate_weight_vjp(
    device: &Device,
    rope: &Rope<'_>,
    qkv: Rows<'_>,
    dy: Rows<'_>,
    (dq, dk): (Rows<'_>, Rows<'_>),
) -> Result<()> {
    const WARPS: usize = 8;
    let dim = rope.heads.head_dim;
    let rotation = rope.rotation("rotate_weight_vjp", &[qkv, dy])?;
    check_rows([dq, dk].iter().all(|d| (d.rows, d.width) == (1, dim)), "gradients of qk-norm", &[dq, dk])?;
    if rope.qk_norm.is_none() || qkv.rows == 0 {
        return Ok(());
    }
    let (_, count) = parts_of(qkv.rows, dim)?;
    let parts = device.alloc(count * 2 * dim * size_of::<f32>())?;
    let params = Rotation {
        qkv: qkv.address()?,
        dy: dy.address()?,
        out: parts.at::<f32>(0, count * 2 * dim)?,
        qkv_stride: size(qkv.stride)?,
        dy_stride: size(dy.stride)?,
        ..rotation
    };
    let shared = size(WARPS * dim * size_of::<f32>())?;
    let launch = Launch { grid: [size(count)?, 2, 1], block: 32 * WARPS as u32, shared };
    device.launch(&format!("rotate_weight_parts_{}", qkv.dtype.name()), launch, &params)?;
    let parts = Parts { parts: &parts, count, rows: 2 };
    parts.add(device, 0, 1.0, dq)?;
    parts.add(device, 1, 1.0, dk)
}
