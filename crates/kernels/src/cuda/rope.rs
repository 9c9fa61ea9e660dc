//! qk-norm and rotary embedding of rows `[q heads | k heads | v heads]`, and their vector-Jacobian products. A row's
//! result depends only on that row.

use super::super::attention::Heads;
use super::attention::MAX_HEAD_DIM;
use super::driver::{Buffer, Device, Launch, params};
use super::rows::{Dtype, Parts, Result, Rows, THREADS, check, check_rows, parts_of, size, threads};

/// The transformation of query and key heads before attention.
#[derive(Clone, Copy, Debug)]
pub struct Rope<'a> {
    /// Sizes of the heads; `head_dim` is even, and at most [`MAX_HEAD_DIM`].
    pub heads: &'a Heads,
    /// Weights of qk-norm, the RMSNorm of each query and key head before it is rotated.
    pub qk_norm: Option<QkNorm<'a>>,
    /// Cosines of the rotary angles, f32 `[positions, head_dim / 2]`.
    pub cos: Rows<'a>,
    /// Sines of the rotary angles, f32 `[positions, head_dim / 2]`.
    pub sin: Rows<'a>,
    /// The position of each row, u32; a position beyond the table gives NaN.
    pub positions: &'a Buffer,
}

/// Weights of the norms of query and key heads, f32, one row of `head_dim` each.
#[derive(Clone, Copy, Debug)]
pub struct QkNorm<'a> {
    /// The norm's weight for query heads.
    pub q: Rows<'a>,
    /// The norm's weight for key heads.
    pub k: Rows<'a>,
    /// The epsilon added to the mean of the squares.
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
        wide: u32,
        lane_bits: u32,
        pad: u32,
    }
}

impl Rope<'_> {
    /// Checks the rows and returns the kernel's parameter with their addresses: the input of [`rotate`],
    /// dL/dout, and the output.
    fn rotation(&self, what: &str, qkv: Rows<'_>, dy: Rows<'_>, out: Rows<'_>) -> Result<Rotation> {
        let Rope { heads, qk_norm, cos, sin, positions } = *self;
        let (dim, count) = (heads.head_dim, qkv.rows);
        let fits = |x: Rows<'_>| (x.rows, x.width, x.dtype) == (count, heads.width(), qkv.dtype);
        let fits = fits(dy) && fits(out) && dim.is_multiple_of(2) && dim <= MAX_HEAD_DIM;
        check_rows(fits, what, &[qkv, dy, out])?;
        let fits = (sin.rows, sin.width, sin.stride) == (cos.rows, cos.width, cos.stride) && cos.width == dim / 2;
        check_rows(fits && (cos.dtype, sin.dtype) == (Dtype::F32, Dtype::F32), "angles", &[cos, sin])?;
        if let Some(norm) = qk_norm {
            let fits = |weight: Rows<'_>| (weight.rows, weight.width, weight.dtype) == (1, dim, Dtype::F32);
            check_rows(fits(norm.q) && fits(norm.k), "qk-norm", &[norm.q, norm.k])?;
        }
        let weights = qk_norm.is_none_or(|norm| norm.q.by_fours() && norm.k.by_fours());
        let wide = weights && (dim / 2).is_multiple_of(4) && [qkv, dy, out, cos, sin].iter().all(Rows::by_fours);
        Ok(Rotation {
            qkv: qkv.address()?,
            dy: dy.address()?,
            out: out.address()?,
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
            qkv_stride: size(qkv.stride)?,
            dy_stride: size(dy.stride)?,
            out_stride: size(out.stride)?,
            table_stride: size(cos.stride)?,
            eps: qk_norm.map_or(0.0, |norm| norm.eps),
            wide: u32::from(wide),
            lane_bits: dim.div_ceil(8).next_power_of_two().ilog2(),
            pad: 0,
        })
    }

    /// Launches a rotation kernel with several lanes per head: for all heads, or only for query and key heads if the
    /// value heads are already in place.
    fn launch(&self, device: &Device, names: [&'static str; 2], from: Rows<'_>, rotation: Rotation) -> Result<()> {
        let in_place = rotation.out == from.address()? && rotation.out_stride == size(from.stride)?;
        let rotation = Rotation { heads: if in_place { rotation.rotated } else { rotation.heads }, ..rotation };
        let count = from.rows.saturating_mul(rotation.heads as usize).saturating_mul(1 << rotation.lane_bits);
        device.launch(from.dtype.of(names), threads(count)?, &rotation)
    }
}

/// Computes out = qk-norm and rotary embedding of every row of `qkv`; both of the same type; they may be the same rows.
///
/// # Errors
/// [`CudaError::Input`](super::driver::CudaError::Input) if the shapes do not match.
pub fn rotate(device: &Device, rope: &Rope<'_>, qkv: Rows<'_>, out: Rows<'_>) -> Result<()> {
    let rotation = rope.rotation("rotate", qkv, qkv, out)?;
    rope.launch(device, ["rotate_f32", "rotate_bf16"], qkv, rotation)
}

/// Computes dx = dL/dqkv of [`rotate`] from dL/dout = `dy`; `qkv` is its input, read only with qk-norm. All have the
/// same type; dx may be dy.
///
/// # Errors
/// [`CudaError::Input`](super::driver::CudaError::Input) if the shapes do not match.
pub fn rotate_vjp(device: &Device, rope: &Rope<'_>, qkv: Option<Rows<'_>>, dy: Rows<'_>, dx: Rows<'_>) -> Result<()> {
    let before = match rope.qk_norm {
        Some(_) => qkv,
        None => Some(dy),
    };
    check(before.is_some(), || "the gradient of the norm of queries and keys needs the norm's input".to_owned())?;
    let rotation = rope.rotation("rotate_vjp", before.unwrap_or(dy), dy, dx)?;
    rope.launch(device, ["rotate_vjp_f32", "rotate_vjp_bf16"], dy, rotation)
}

/// Computes dq and dk (f32, one row of `head_dim` each) += dL/dweight of the qk-norms, summed in a fixed order;
/// does nothing without qk-norm.
///
/// # Errors
/// [`CudaError::Input`](super::driver::CudaError::Input) if the shapes do not match.
pub fn rotate_weight_vjp(
    device: &Device,
    rope: &Rope<'_>,
    qkv: Rows<'_>,
    dy: Rows<'_>,
    (dq, dk): (Rows<'_>, Rows<'_>),
) -> Result<()> {
    let dim = rope.heads.head_dim;
    let rotation = rope.rotation("rotate_weight_vjp", qkv, dy, dy)?;
    check_rows([dq, dk].iter().all(|d| (d.rows, d.width) == (1, dim)), "gradients of qk-norm", &[dq, dk])?;
    if rope.qk_norm.is_none() || qkv.rows == 0 {
        return Ok(());
    }
    let (_, count) = parts_of(qkv.rows, dim)?;
    let parts = device.alloc(count * 2 * dim * size_of::<f32>())?;
    let params = Rotation { out: parts.at::<f32>(0, count * 2 * dim)?, ..rotation };
    let shared = (THREADS >> params.lane_bits) * params.head_dim * 4;
    let launch = Launch { grid: [size(count)?, 2, 1], block: THREADS, shared };
    device.launch(qkv.dtype.of(["rotate_weight_parts_f32", "rotate_weight_parts_bf16"]), launch, &params)?;
    let parts = Parts { parts: &parts, count, rows: 2 };
    parts.add(device, 0, 1.0, dq)?;
    parts.add(device, 1, 1.0, dk)
}

#[cfg(test)]
mod tests {
    use super::super::rows::tests::{DTYPES, Given, assert_near, device};
    use super::*;
    use crate::rows::tests::{assert_same, noise};

    const EPS: f32 = 1e-6;
    const POSITIONS: usize = 50;

    struct Case {
        heads: Heads,
        cos: Given,
        sin: Given,
        q: Given,
        k: Given,
        positions: Vec<u32>,
        on_device: Buffer,
    }

    impl Case {
        fn new(device: &Device, (num_heads, num_kv_heads, head_dim): (usize, usize, usize), rows: usize) -> Case {
            let angles: Vec<f32> = noise(POSITIONS * head_dim / 2, 5).iter().map(|v| v * 9.0).collect();
            let table = |f: fn(f32) -> f32| {
                let values: Vec<f32> = angles.iter().map(|angle| f(*angle)).collect();
                Given::of(device, &values, head_dim / 2, Dtype::F32)
            };
            let positions: Vec<u32> = (0..rows as u32).map(|row| row * 31 % POSITIONS as u32).collect();
            Case {
                heads: Heads::new(num_heads, num_kv_heads, head_dim),
                cos: table(f32::cos),
                sin: table(f32::sin),
                q: Given::placed(device, (1, head_dim), (1, head_dim), 6, Dtype::F32),
                k: Given::new(device, 1, head_dim, 7, Dtype::F32),
                on_device: device.upload(&positions).expect("a buffer"),
                positions,
            }
        }

        fn rope(&self, norm: bool) -> Rope<'_> {
            let qk_norm = norm.then(|| QkNorm { q: self.q.rows(), k: self.k.rows(), eps: EPS });
            let (cos, sin) = (self.cos.rows(), self.sin.rows());
            Rope { heads: &self.heads, qk_norm, cos, sin, positions: &self.on_device }
        }
    }

    #[derive(Default)]
    struct Naive {
        out: Vec<f64>,
        dx: Vec<f64>,
        dq: Vec<f64>,
        dk: Vec<f64>,
    }

    fn naive(case: &Case, norm: bool, x: &[f64], dy: &[f64]) -> Naive {
        let (dim, width) = (case.heads.head_dim, case.heads.width());
        let half = dim / 2;
        let (cos, sin, q, k) = (case.cos.wide(), case.sin.wide(), case.q.wide(), case.k.wide());
        let mut all = Naive { dq: vec![0.0; dim], dk: vec![0.0; dim], ..Naive::default() };
        for (row, position) in case.positions.iter().enumerate() {
            for head in 0..width / dim {
                let at = row * width + head * dim;
                let (x, dy) = (&x[at..at + dim], &dy[at..at + dim]);
                if head >= case.heads.num_heads + case.heads.num_kv_heads {
                    all.out.extend(x);
                    all.dx.extend(dy);
                    continue;
                }
                let is_query = head < case.heads.num_heads;
                let w = if is_query { &q } else { &k };
                let r = (x.iter().map(|v| v * v).sum::<f64>() / dim as f64 + f64::from(EPS)).sqrt().recip();
                let y: Vec<f64> = (0..dim).map(|i| if norm { x[i] * r * w[i] } else { x[i] }).collect();
                let mut rotated = vec![0.0; dim];
                for i in 0..dim {
                    let angle = *position as usize * half + i % half;
                    let (c, s) = (cos[angle], sin[angle]);
                    all.out.push(if i < half { y[i] * c - y[i + half] * s } else { y[i] * c + y[i - half] * s });
                    rotated[i] = if i < half { dy[i] * c + dy[i + half] * s } else { dy[i] * c - dy[i - half] * s };
                }
                let inner: f64 = (0..dim).map(|i| x[i] * w[i] * rotated[i]).sum();
                for i in 0..dim {
                    let normed = r * (w[i] * rotated[i] - inner * r * r / dim as f64 * x[i]);
                    all.dx.push(if norm { normed } else { rotated[i] });
                    let dw = if is_query { &mut all.dq } else { &mut all.dk };
                    dw[i] += if norm { rotated[i] * x[i] * r } else { 0.0 };
                }
            }
        }
        all
    }

    #[test]
    fn rotations_and_their_gradients_are_the_naive_ones() {
        let Some(device) = device() else { return };
        for (sizes, rows) in
            [((1, 1, 2), 1), ((4, 2, 6), 3), ((3, 3, 40), 70), ((4, 1, 64), 130), ((3, 2, 128), 3), ((2, 2, 256), 5)]
        {
            let case = Case::new(&device, sizes, rows);
            let (width, dim) = (case.heads.width(), case.heads.head_dim);
            for (dtype, norm) in DTYPES.into_iter().flat_map(|dtype| [(dtype, false), (dtype, true)]) {
                let what = format!("{sizes:?}, {rows} rows, norm {norm}, {dtype:?}");
                let (x, dy) = (Given::odd(&device, rows, width, 8, dtype), Given::odd(&device, rows, width, 9, dtype));
                let expected = naive(&case, norm, &x.wide(), &dy.wide());
                let rope = case.rope(norm);

                let out = Given::odd(&device, rows, width, 1, dtype);
                rotate(&device, &rope, x.rows(), out.rows()).expect("a rotation");
                assert_near(&out.now(&device), &expected.out, dtype, 2e-6, &what);

                let dx = Given::odd(&device, rows, width, 2, dtype);
                let before = norm.then(|| x.rows());
                rotate_vjp(&device, &rope, before, dy.rows(), dx.rows()).expect("a gradient");
                let apart = dx.now(&device);
                assert_near(&apart, &expected.dx, dtype, 2e-6, &what);

                let dq = Given::placed(&device, (1, dim), (1, dim), 3, Dtype::F32);
                let dk = Given::placed(&device, (1, dim), (3, dim), 4, Dtype::F32);
                rotate_weight_vjp(&device, &rope, x.rows(), dy.rows(), (dq.rows(), dk.rows())).expect("a gradient");
                for (d, expected) in [(&dq, &expected.dq), (&dk, &expected.dk)] {
                    let sums: Vec<f64> = expected.iter().zip(d.wide()).map(|(d, before)| d + before).collect();
                    assert_near(&d.now(&device), &sums, Dtype::F32, 5e-6, &what);
                }

                // Rotating in place gives the same bits as rotating a copy.
                let rotated = out.now(&device);
                rotate_vjp(&device, &rope, before, dy.rows(), dy.rows()).expect("a gradient");
                assert_same(&dy.now(&device), &apart, &what);
                rotate(&device, &rope, x.rows(), x.rows()).expect("a rotation");
                assert_same(&x.now(&device), &rotated, &what);
            }
        }
    }

    #[test]
    fn the_position_of_rows_changes_no_bit() {
        let Some(device) = device() else { return };
        for (sizes, rows) in [((4, 2, 128), 9), ((3, 1, 80), 5), ((2, 1, 12), 70)] {
            let mut case = Case::new(&device, sizes, rows);
            case.q = Given::new(&device, 1, sizes.2, 6, Dtype::F32);
            let (width, dim) = (case.heads.width(), case.heads.head_dim);
            for (dtype, norm) in DTYPES.into_iter().flat_map(|dtype| [(dtype, false), (dtype, true)]) {
                let rope = case.rope(norm);
                let run = |x: Given, dy: Given, given: fn(&Device, usize, usize, u64, Dtype) -> Given| {
                    let out = given(&device, rows, width, 1, dtype);
                    rotate(&device, &rope, x.rows(), out.rows()).expect("a rotation");
                    let dx = given(&device, rows, width, 2, dtype);
                    rotate_vjp(&device, &rope, norm.then(|| x.rows()), dy.rows(), dx.rows()).expect("a gradient");
                    let (dq, dk) =
                        (Given::new(&device, 1, dim, 3, Dtype::F32), Given::new(&device, 1, dim, 4, Dtype::F32));
                    rotate_weight_vjp(&device, &rope, x.rows(), dy.rows(), (dq.rows(), dk.rows())).expect("a gradient");
                    [out, dx, dq, dk].map(|given| given.now(&device))
                };
                let apart = (Given::odd(&device, rows, width, 8, dtype), Given::odd(&device, rows, width, 9, dtype));
                let side_by_side = (
                    Given::of(&device, &apart.0.values(), width, dtype),
                    Given::of(&device, &apart.1.values(), width, dtype),
                );
                let [odd, even] = [run(apart.0, apart.1, Given::odd), run(side_by_side.0, side_by_side.1, Given::new)];
                for (odd, even) in odd.iter().zip(&even) {
                    assert_same(odd, even, &format!("{sizes:?}, norm {norm}, {dtype:?}"));
                }
            }
        }
    }

    #[test]
    fn a_row_is_rotated_the_same_alone_and_a_position_without_angles_gives_nan() {
        let Some(device) = device() else { return };
        let mut case = Case::new(&device, (3, 1, 64), 7);
        let width = case.heads.width();
        let x = Given::new(&device, 7, width, 1, Dtype::Bf16);
        let out = Given::new(&device, 7, width, 2, Dtype::Bf16);
        rotate(&device, &case.rope(true), x.rows(), out.rows()).expect("a rotation");
        let all = out.now(&device);
        for row in 0..7 {
            case.on_device = device.upload(&case.positions[row..=row]).expect("a buffer");
            let alone = Given::odd(&device, 1, width, 3, Dtype::Bf16);
            rotate(&device, &case.rope(true), x.rows().part(row..row + 1), alone.rows()).expect("a rotation");
            assert_same(&alone.now(&device), &all[row * width..][..width], "a row");
        }
        case.on_device = device.upload(&[POSITIONS as u32; 7]).expect("a buffer");
        rotate(&device, &case.rope(true), x.rows(), out.rows()).expect("a rotation");
        let rotated = case.heads.q_width() + case.heads.kv_width();
        for row in out.now(&device).chunks(width) {
            assert!(row[..rotated].iter().all(|value| value.is_nan()));
            assert!(row[rotated..].iter().all(|value| value.is_finite()));
        }
    }
}
