//! RMSNorm of rows of f32 and its vector-Jacobian products. A row's result depends only on that row.

use super::driver::{Device, Launch, params};
use super::rows::{Dtype, Parts, Result, Rows, bits, check_rows, parts_of, size};

params! {
    struct Norm {
        x: u64,
        weight: u64,
        out: u64,
        rows: u32,
        width: u32,
        x_stride: u32,
        out_stride: u32,
        aligned: u32,
        eps: f32,
    }
}

/// Chooses the kernel and its launch by the width alone: one warp per row up to 1024 or 2048 columns, else
/// one block per row.
fn by_width<T>([to_1024, to_2048, long]: [T; 3], rows: usize, width: usize) -> Result<(T, Launch)> {
    const WARPS: u32 = 4;
    let rows = size(rows)?;
    let by_warps = Launch { grid: [rows.div_ceil(WARPS), 1, 1], block: 32 * WARPS, shared: 0 };
    Ok(match width {
        0..=1024 => (to_1024, by_warps),
        1025..=2048 => (to_2048, by_warps),
        _ => (long, Launch { grid: [rows, 1, 1], block: 256, shared: 0 }),
    })
}

fn is_weight(weight: &Rows<'_>, x: &Rows<'_>) -> bool {
    weight.rows == 1 && weight.width == x.width && weight.dtype == Dtype::F32
}

/// Computes out (f32 or bf16) = x / √(mean(x²) + eps) ∘ weight; x and weight (one row) are f32.
///
/// # Errors
/// [`CudaError::Input`](super::driver::CudaError::Input) if the shapes do not match.
pub fn rms_norm(device: &Device, x: Rows<'_>, weight: Rows<'_>, eps: f32, out: Rows<'_>) -> Result<()> {
    let fits = x.dtype == Dtype::F32 && is_weight(&weight, &x) && (out.rows, out.width) == (x.rows, x.width);
    check_rows(fits, "rms_norm", &[x, weight, out])?;
    if x.rows == 0 || x.width == 0 {
        return Ok(());
    }
    let params = Norm {
        x: x.address()?,
        weight: weight.address()?,
        out: out.address()?,
        rows: size(x.rows)?,
        width: size(x.width)?,
        x_stride: size(x.stride)?,
        out_stride: size(out.stride)?,
        aligned: bits(&[x.by_fours(), weight.by_fours(), out.by_fours()]),
        eps,
    };
    let names = [
        ["rms_norm_1024_f32", "rms_norm_1024_bf16"],
        ["rms_norm_2048_f32", "rms_norm_2048_bf16"],
        ["rms_norm_long_f32", "rms_norm_long_bf16"],
    ];
    let (names, launch) = by_width(names, x.rows, x.width)?;
    device.launch(out.dtype.of(names), launch, &params)
}

/// The operands of [`rms_norm_vjp`].
#[derive(Clone, Copy, Debug)]
pub struct NormBackward<'a> {
    /// The input rows of the norm, f32.
    pub x: Rows<'a>,
    /// The norm's weight: one row of f32.
    pub weight: Rows<'a>,
    /// The epsilon added to the mean of the squares.
    pub eps: f32,
    /// The gradient dL/dout of the norm's output, f32 or bf16.
    pub dy: Rows<'a>,
    /// Values added to the result, such as the gradient of the residual stream; f32.
    pub residual: Option<Rows<'a>>,
}

params! {
    struct NormVjp {
        x: u64,
        weight: u64,
        dy: u64,
        residual: u64,
        dx: u64,
        rows: u32,
        width: u32,
        x_stride: u32,
        dy_stride: u32,
        residual_stride: u32,
        dx_stride: u32,
        aligned: u32,
        eps: f32,
    }
}

/// Computes dx (f32) = residual + dL/dx of [`rms_norm`].
///
/// # Errors
/// [`CudaError::Input`](super::driver::CudaError::Input) if the shapes do not match.
pub fn rms_norm_vjp(device: &Device, backward: NormBackward<'_>, dx: Rows<'_>) -> Result<()> {
    let NormBackward { x, weight, eps, dy, residual } = backward;
    let other = residual.unwrap_or(dx);
    let same = |rows: &Rows<'_>| (rows.rows, rows.width) == (x.rows, x.width);
    let fits = same(&dy) && same(&other) && same(&dx) && is_weight(&weight, &x);
    let typed = [x, other, dx].iter().all(|rows| rows.dtype == Dtype::F32);
    check_rows(fits && typed, "rms_norm_vjp", &[x, weight, dy, other, dx])?;
    if x.rows == 0 || x.width == 0 {
        return Ok(());
    }
    let params = NormVjp {
        x: x.address()?,
        weight: weight.address()?,
        dy: dy.address()?,
        residual: residual.map_or(Ok(0), |residual| residual.address())?,
        dx: dx.address()?,
        rows: size(x.rows)?,
        width: size(x.width)?,
        x_stride: size(x.stride)?,
        dy_stride: size(dy.stride)?,
        residual_stride: size(other.stride)?,
        dx_stride: size(dx.stride)?,
        aligned: bits(&[x, weight, dy, other, dx].map(|rows| rows.by_fours())),
        eps,
    };
    let names = [
        ["rms_norm_vjp_1024_f32", "rms_norm_vjp_1024_bf16"],
        ["rms_norm_vjp_2048_f32", "rms_norm_vjp_2048_bf16"],
        ["rms_norm_vjp_long_f32", "rms_norm_vjp_long_bf16"],
    ];
    let (names, launch) = by_width(names, x.rows, x.width)?;
    device.launch(dy.dtype.of(names), launch, &params)
}

params! {
    struct NormScales {
        x: u64,
        scales: u64,
        rows: u32,
        width: u32,
        stride: u32,
        aligned: u32,
        eps: f32,
        pad: u32,
    }
}

params! {
    struct NormWeightParts {
        x: u64,
        dy: u64,
        scales: u64,
        parts: u64,
        rows: u32,
        width: u32,
        x_stride: u32,
        dy_stride: u32,
    }
}

/// Computes dw (one row of f32) += dL/dweight of [`rms_norm`], summed over the rows in a fixed order; dy
/// is f32 or bf16.
///
/// # Errors
/// [`CudaError::Input`](super::driver::CudaError::Input) if the shapes do not match.
pub fn rms_norm_weight_vjp(device: &Device, x: Rows<'_>, eps: f32, dy: Rows<'_>, dw: Rows<'_>) -> Result<()> {
    let fits = (dy.rows, dy.width) == (x.rows, x.width) && x.dtype == Dtype::F32 && is_weight(&dw, &x);
    check_rows(fits, "rms_norm_weight_vjp", &[x, dy, dw])?;
    if x.rows == 0 || x.width == 0 {
        return Ok(());
    }
    let scales = device.alloc(x.rows * size_of::<f32>())?;
    let params = NormScales {
        x: x.address()?,
        scales: scales.at::<f32>(0, x.rows)?,
        rows: size(x.rows)?,
        width: size(x.width)?,
        stride: size(x.stride)?,
        aligned: bits(&[x.by_fours()]),
        eps,
        pad: 0,
    };
    let names = ["rms_norm_scales_1024", "rms_norm_scales_2048", "rms_norm_scales_long"];
    let (name, launch) = by_width(names, x.rows, x.width)?;
    device.launch(name, launch, &params)?;
    let (launch, count) = parts_of(x.rows, x.width)?;
    let parts = device.alloc(count * x.width * size_of::<f32>())?;
    let params = NormWeightParts {
        x: x.address()?,
        dy: dy.address()?,
        scales: scales.at::<f32>(0, x.rows)?,
        parts: parts.at::<f32>(0, count * x.width)?,
        rows: size(x.rows)?,
        width: size(x.width)?,
        x_stride: size(x.stride)?,
        dy_stride: size(dy.stride)?,
    };
    device.launch(dy.dtype.of(["rms_norm_weight_parts_f32", "rms_norm_weight_parts_bf16"]), launch, &params)?;
    Parts { parts: &parts, count, rows: 1 }.add(device, 0, 1.0, dw)
}

#[cfg(test)]
mod tests {
    use super::super::rows::tests::{DTYPES, Given, assert_near, device};
    use super::*;
    use crate::rows::tests::assert_same;

    const EPS: f32 = 1e-5;

    #[derive(Default)]
    struct Naive {
        out: Vec<f64>,
        dx: Vec<f64>,
        dw: Vec<f64>,
    }

    fn naive(x: &[f64], w: &[f64], dy: &[f64]) -> Naive {
        let n = w.len();
        let mut all = Naive { dw: vec![0.0; n], ..Naive::default() };
        for (x, dy) in x.chunks(n).zip(dy.chunks(n)) {
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
    fn norms_and_their_gradients_are_the_naive_ones() {
        let Some(device) = device() else { return };
        for dtype in DTYPES {
            for (rows, width) in [
                (1, 1),
                (3, 5),
                (2, 16),
                (5, 29),
                (4, 64),
                (70, 100),
                (3, 1024),
                (130, 777),
                (5, 1500),
                (6, 2048),
                (3, 2050),
            ] {
                let what = format!("{rows} rows of {width}, {dtype:?}");
                let x = Given::odd(&device, rows, width, 1, Dtype::F32);
                let weight = Given::placed(&device, (1, width), (1, width), 2, Dtype::F32);
                let dy = Given::odd(&device, rows, width, 3, dtype);
                let residual = Given::new(&device, rows, width, 4, Dtype::F32);
                let expected = naive(&x.wide(), &weight.wide(), &dy.wide());

                let out = Given::odd(&device, rows, width, 5, dtype);
                rms_norm(&device, x.rows(), weight.rows(), EPS, out.rows()).expect("a norm");
                assert_near(&out.now(&device), &expected.out, dtype, 1e-6, &what);

                let dx = Given::odd(&device, rows, width, 6, Dtype::F32);
                let plain =
                    NormBackward { x: x.rows(), weight: weight.rows(), eps: EPS, dy: dy.rows(), residual: None };
                rms_norm_vjp(&device, plain, dx.rows()).expect("a gradient");
                assert_near(&dx.now(&device), &expected.dx, Dtype::F32, 2e-6, &what);
                let with = NormBackward { residual: Some(residual.rows()), ..plain };
                rms_norm_vjp(&device, with, dx.rows()).expect("a gradient");
                let sums: Vec<f64> = expected.dx.iter().zip(residual.wide()).map(|(d, r)| d + r).collect();
                assert_near(&dx.now(&device), &sums, Dtype::F32, 2e-6, &what);

                let dw = Given::placed(&device, (1, width), (2, width), 7, Dtype::F32);
                rms_norm_weight_vjp(&device, x.rows(), EPS, dy.rows(), dw.rows()).expect("a gradient");
                let sums: Vec<f64> = expected.dw.iter().zip(dw.wide()).map(|(d, before)| d + before).collect();
                assert_near(&dw.now(&device), &sums, Dtype::F32, 2e-6, &what);
            }
        }
    }

    #[test]
    fn a_row_has_the_same_bits_alone_and_wherever_it_lies() {
        let Some(device) = device() else { return };
        for width in [5, 64, 1024, 1030, 2200] {
            let x = Given::new(&device, 9, width, 1, Dtype::F32);
            let (weight, dy) =
                (Given::new(&device, 1, width, 2, Dtype::F32), Given::new(&device, 9, width, 3, Dtype::Bf16));
            let run = |x: Rows<'_>, dy: Rows<'_>, out: &Given, dx: &Given| {
                rms_norm(&device, x, weight.rows(), EPS, out.rows()).expect("a norm");
                let backward = NormBackward { x, weight: weight.rows(), eps: EPS, dy, residual: None };
                rms_norm_vjp(&device, backward, dx.rows()).expect("a gradient");
                (out.now(&device), dx.now(&device))
            };
            let all = (Given::new(&device, 9, width, 4, Dtype::F32), Given::new(&device, 9, width, 5, Dtype::F32));
            let (out, dx) = run(x.rows(), dy.rows(), &all.0, &all.1);
            for row in 0..9 {
                let one = (Given::odd(&device, 1, width, 4, Dtype::F32), Given::odd(&device, 1, width, 5, Dtype::F32));
                let (x, dy) = (x.rows().part(row..row + 1), dy.rows().part(row..row + 1));
                let (out_alone, dx_alone) = run(x, dy, &one.0, &one.1);
                assert_same(&out[row * width..][..width], &out_alone, "out");
                assert_same(&dx[row * width..][..width], &dx_alone, "dx");
            }
        }
    }
}
