//! Matrix products: our own kernels, in which a row's bits do not depend on the other rows, and cuBLAS.

mod few;

use super::driver::{self, Device, Launch, Matrix, Order, params};
use super::rows::{Dtype, Parts, Result, Rows, bits, check, check_rows, copy, finish, size};

/// The implementation of matrix products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gemm {
    /// Our own kernels: each element is one chain of additions over k (bf16: in steps of 16; eight chains if there are
    /// few columns), whatever the tile. A row's bits do not depend on the other rows.
    Exact,
    /// cuBLAS, which is fast and chooses its own order of sums. Our own kernels replace it where it is slow: x·Wᵀ for
    /// few rows, and gradients with few columns.
    Fast,
}

/// The form of a product: which operand is transposed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// a `[m, k]` · b `[n, k]`ᵀ, as in x·Wᵀ.
    Nt,
    /// a `[m, k]` · b `[k, n]`, as in dy·W.
    Nn,
    /// a `[k, m]`ᵀ · b `[k, n]`, as in dyᵀ·x; the result is f32.
    Tn,
}

impl Form {
    /// Returns the sizes m, n and k of the product if the operands match.
    fn sizes(self, a: &Rows<'_>, b: &Rows<'_>) -> Option<(usize, usize, usize)> {
        let (m, k) = if self == Form::Tn { (a.width, a.rows) } else { (a.rows, a.width) };
        let (n, b_k) = if self == Form::Nt { (b.rows, b.width) } else { (b.width, b.rows) };
        (k == b_k && a.dtype == b.dtype).then_some((m, n, k))
    }
}

/// A matrix product and the terms added to it. a and b have the same type, and so have the operands of `more`.
#[derive(Clone, Copy, Debug)]
pub struct Product<'a> {
    /// The form of both products.
    pub form: Form,
    /// The left operand a.
    pub a: Rows<'a>,
    /// The right operand b, with the same type.
    pub b: Rows<'a>,
    /// A second product with the same form, type, rows and columns, whose sums continue those of the first.
    pub more: Option<(Rows<'a>, Rows<'a>)>,
    /// Factor alpha of the products.
    pub alpha: f32,
    /// The bias: one row of f32, added to every row of the result.
    pub bias: Option<Rows<'a>>,
    /// Values added to the result, such as a residual; f32, may be the same memory as `out`.
    pub add: Option<Rows<'a>>,
    /// Whether the right operands were complete before the latest launch, as weights are. The product may then start to
    /// read them before that launch has ended.
    pub settled: bool,
}

impl<'a> Product<'a> {
    /// Creates a product without additional terms.
    pub fn new(form: Form, a: Rows<'a>, b: Rows<'a>) -> Product<'a> {
        Product { form, a, b, more: None, alpha: 1.0, bias: None, add: None, settled: false }
    }

    /// Returns m, n, k and the k of `more`; an error if the shapes do not match.
    fn sizes(&self, out: &Rows<'_>) -> Result<(usize, usize, usize, usize)> {
        let Product { form, a, b, more, alpha: _, bias, add, settled: _ } = self;
        let sizes = form.sizes(a, b);
        let of_more = more.as_ref().map_or(sizes.map(|(m, n, _)| (m, n, 0)), |(a2, b2)| form.sizes(a2, b2));
        let typed = more.is_none_or(|(a2, _)| a2.dtype == a.dtype)
            && (out.dtype == Dtype::F32 || (a.dtype == Dtype::Bf16 && *form != Form::Tn))
            && [bias, add].into_iter().flatten().all(|rows| rows.dtype == Dtype::F32);
        let fits = matches!((sizes, of_more), (Some((m, n, _)), Some((m2, n2, _)))
            if (m, n) == (m2, n2)
                && (m, n) == (out.rows, out.width)
                && bias.is_none_or(|bias| (bias.rows, bias.width) == (1, n))
                && add.is_none_or(|add| (add.rows, add.width) == (m, n)));
        let operands: Vec<Rows<'_>> =
            [Some(*a), Some(*b), more.map(|(a2, _)| a2), more.map(|(_, b2)| b2), *bias, *add, Some(*out)]
                .into_iter()
                .flatten()
                .collect();
        check_rows(typed && fits, "a product", &operands)?;
        let (m, n, k) = sizes.unwrap_or_default();
        Ok((m, n, k, of_more.unwrap_or_default().2))
    }
}

/// Computes out `[m, n]` (f32, or bf16 if the operands are) = alpha·(a·b + …) + bias + add.
///
/// # Errors
/// [`CudaError::Input`](driver::CudaError::Input) if the shapes or types do not match.
pub fn product(device: &Device, gemm: Gemm, product: &Product<'_>, out: Rows<'_>) -> Result<()> {
    let (m, n, k, _) = product.sizes(&out)?;
    if m == 0 || n == 0 {
        return Ok(());
    }
    match gemm {
        Gemm::Exact => exact(device, Tile::of_product(product, m, n), product, SplitK::whole(k), None, out),
        Gemm::Fast if few::is_few(product, out) => few::few(device, product, out),
        Gemm::Fast => fast(device, product, out),
    }
}

/// Computes gradient `[m, n]` (f32) += alpha · aᵀ·b, for a `[k, m]` and b `[k, n]` of the same type: the gradient of a
/// weight, summed over the rows in a fixed order.
///
/// # Errors
/// [`CudaError::Input`](driver::CudaError::Input) if the shapes or types do not match.
pub fn outer(device: &Device, gemm: Gemm, a: Rows<'_>, b: Rows<'_>, alpha: f32, gradient: Rows<'_>) -> Result<()> {
    outer_parts(device, gemm, a, b, alpha, &[gradient])
}

/// Computes [`outer`] for a gradient whose blocks of rows are stored in several places.
///
/// # Errors
/// [`CudaError::Input`](driver::CudaError::Input) if the shapes or types do not match.
pub fn outer_parts(
    device: &Device,
    gemm: Gemm,
    a: Rows<'_>,
    b: Rows<'_>,
    alpha: f32,
    gradients: &[Rows<'_>],
) -> Result<()> {
    let (m, n, k) = (a.width, b.width, a.rows);
    let rows: usize = gradients.iter().map(|gradient| gradient.rows).sum();
    check_rows(rows == m && gradients.iter().all(|gradient| gradient.width == n), "outer", gradients)?;
    if m == 0 || n == 0 || k == 0 {
        return Ok(());
    }
    let plain = Product::new(Form::Tn, a, b);
    // Use our own kernels for long sums of few columns, which cuBLAS splits badly, unless rows are not aligned, for
    // which our kernels are slow.
    const FEW_COLUMNS: usize = 64;
    let is_few = a.dtype == Dtype::Bf16 && m.min(n) <= FEW_COLUMNS && by_16(a) && by_16(b);
    let is_own = gemm == Gemm::Exact || is_few;
    let (tile, split) = if is_own { SplitK::of(m, n, k) } else { (Tile::of(m, n), SplitK::whole(k)) };
    let multiply = |product: &Product<'_>, parts: Option<&driver::Buffer>, out: Rows<'_>| match is_own {
        true => exact(device, tile, product, split, parts, out),
        false => fast(device, product, out),
    };
    if let ([gradient], 1) = (gradients, split.parts) {
        let onto = Product { alpha, add: Some(*gradient), ..plain };
        onto.sizes(gradient)?;
        return multiply(&onto, None, *gradient);
    }
    let parts = device.alloc(split.parts * m * n * size_of::<f32>())?;
    let first = Rows::new(&parts, m, n, Dtype::F32);
    plain.sizes(&first)?;
    multiply(&plain, Some(&parts), first)?;
    let parts = Parts { parts: &parts, count: split.parts, rows: m };
    let mut begin = 0;
    for gradient in gradients.iter().filter(|gradient| gradient.rows > 0) {
        parts.add(device, begin, alpha, *gradient)?;
        begin += gradient.rows;
    }
    Ok(())
}

/// How the sum over k of a product is split into parts, each computed by separate thread blocks.
#[derive(Clone, Copy, Debug, PartialEq)]
struct SplitK {
    parts: usize,
    k_of_part: usize,
}

impl SplitK {
    /// The split of a sum over k into a single part.
    fn whole(k: usize) -> SplitK {
        SplitK { parts: 1, k_of_part: k }
    }

    /// Chooses the split by the shape alone, so that every device sums in the same order: parts of at least 256 rows,
    /// as long as a GPU has multiprocessors for them. The tile is the largest one for which, times the number of parts,
    /// there are enough blocks, so that long operands are read once.
    fn of(m: usize, n: usize, k: usize) -> (Tile, SplitK) {
        const BUSY: usize = 264;
        let most = k.div_ceil(256);
        let tile = match () {
            () if m > 64 && n > 64 && Tile::Large.count(m, n) * most >= Tile::BUSY => Tile::Large,
            () if m > 16 && Tile::Middle.count(m, n) * most >= Tile::BUSY => Tile::Middle,
            () => Tile::Small,
        };
        let parts = BUSY.div_ceil(tile.count(m, n)).min(most).max(1);
        let k_of_part = k.div_ceil(parts).next_multiple_of(64);
        (tile, SplitK { parts: k.div_ceil(k_of_part), k_of_part })
    }
}

/// The tile of outputs that a thread block computes. It does not change any bit of a product, only the number of thread
/// blocks that share the work.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Tile {
    Small,
    Middle,
    Large,
    /// A tile for few columns, with eight chains of additions over k.
    Thin,
    /// A tile for few columns and many rows, with eight chains of additions over k.
    ThinTall,
}

impl Tile {
    /// Number of thread blocks that keep the multiprocessors busy.
    const BUSY: usize = 120;

    /// Chooses a tile with one chain of additions, by rows and columns of the product.
    fn of(m: usize, n: usize) -> Tile {
        match () {
            () if m > 64 && n > 64 && Tile::Large.count(m, n) >= Tile::BUSY => Tile::Large,
            () if m > 16 && Tile::Middle.count(m, n) >= Tile::BUSY => Tile::Middle,
            () => Tile::Small,
        }
    }

    /// Chooses the tile of a product. Products with few columns (LoRA's A) have a separate kernel with eight chains of
    /// additions. That choice depends on form, type and columns, never on the rows.
    fn of_product(product: &Product<'_>, m: usize, n: usize) -> Tile {
        const MOST_COLUMNS: usize = 256;
        let has_kernel = product.form == Form::Nt && product.a.dtype == Dtype::Bf16 && product.more.is_none();
        match () {
            () if !has_kernel || n > MOST_COLUMNS => Tile::of(m, n),
            () if m > 2048 => Tile::ThinTall,
            () => Tile::Thin,
        }
    }

    fn count(self, m: usize, n: usize) -> usize {
        let (tile_m, tile_n) = self.shape();
        m.div_ceil(tile_m) * n.div_ceil(tile_n)
    }

    fn shape(self) -> (usize, usize) {
        match self {
            Tile::Small | Tile::Thin => (16, 32),
            Tile::ThinTall => (64, 32),
            Tile::Middle => (64, 64),
            Tile::Large => (128, 128),
        }
    }

    /// Number of threads of a thread block, and its dynamic shared memory in bytes.
    fn block(self, dtype: Dtype) -> (u32, u32) {
        match (dtype, self) {
            // Each size is the product of: steps in shared memory, values per step, 2 bytes.
            (Dtype::Bf16, Tile::Small) => (128, 6 * (16 + 32) * 64 * 2),
            (Dtype::Bf16, Tile::Middle) => (128, 4 * (64 + 64) * 32 * 2),
            (Dtype::Bf16, Tile::Large) => (128, 3 * (128 + 128) * 32 * 2),
            (Dtype::Bf16, Tile::Thin) => (256, 4 * (16 + 32) * 128 * 2),
            (Dtype::Bf16, Tile::ThinTall) => (256, 2 * (64 + 32) * 128 * 2),
            (Dtype::F32, Tile::Small) => (64, 0),
            (Dtype::F32, _) => (256, 0),
        }
    }
}

/// The name of the kernel for a product. Combinations without a kernel are rejected earlier.
fn kernel(form: Form, operands: Dtype, out: Dtype, tile: Tile) -> &'static str {
    macro_rules! of_tile {
        ($name:literal) => {
            match tile {
                Tile::Small => concat!($name, "_small"),
                Tile::Middle => concat!($name, "_middle"),
                Tile::Large => concat!($name, "_large"),
                Tile::Thin => concat!($name, "_thin"),
                Tile::ThinTall => concat!($name, "_thin_tall"),
            }
        };
    }
    match (form, operands, out) {
        (Form::Nt, Dtype::F32, _) => of_tile!("gemm_nt_f32_f32"),
        (Form::Nn, Dtype::F32, _) => of_tile!("gemm_nn_f32_f32"),
        (Form::Tn, Dtype::F32, _) => of_tile!("gemm_tn_f32_f32"),
        (Form::Nt, Dtype::Bf16, Dtype::F32) => of_tile!("gemm_nt_bf16_f32"),
        (Form::Nn, Dtype::Bf16, Dtype::F32) => of_tile!("gemm_nn_bf16_f32"),
        (Form::Tn, Dtype::Bf16, _) => of_tile!("gemm_tn_bf16_f32"),
        (Form::Nt, Dtype::Bf16, Dtype::Bf16) => of_tile!("gemm_nt_bf16_bf16"),
        (Form::Nn, Dtype::Bf16, Dtype::Bf16) => of_tile!("gemm_nn_bf16_bf16"),
    }
}

params! {
    struct Params {
        a: u64,
        b: u64,
        a2: u64,
        b2: u64,
        bias: u64,
        add: u64,
        out: u64,
        m: u32,
        n: u32,
        k: u32,
        k2: u32,
        a_stride: u32,
        b_stride: u32,
        a2_stride: u32,
        b2_stride: u32,
        add_stride: u32,
        out_stride: u32,
        k_of_part: u32,
        aligned: u32,
        alpha: f32,
        settled: u32,
    }
}

fn exact(
    device: &Device,
    tile: Tile,
    product: &Product<'_>,
    split: SplitK,
    parts: Option<&driver::Buffer>,
    out: Rows<'_>,
) -> Result<()> {
    let (m, n, ..) = product.sizes(&out)?;
    if let Some(parts) = parts {
        parts.at::<f32>(0, split.parts * m * n)?;
    }
    let tiles = tile.count(m, n);
    check(tiles < 1 << 31 && split.parts < 1 << 16, || {
        format!("a matrix product of {m} x {n} needs more tiles than a GPU grid can have")
    })?;
    let (block, shared) = tile.block(product.a.dtype);
    let launch = Launch { grid: [tiles as u32, 1, split.parts as u32], block, shared };
    device.launch(kernel(product.form, product.a.dtype, out.dtype, tile), launch, &params(product, split, out)?)
}

/// Whether the lines of an operand can be read 16 bytes at a time. A single line's stride counts too: copies skip the
/// lines of a tile beyond it, but their addresses must be aligned all the same.
fn by_16(rows: Rows<'_>) -> bool {
    rows.is_aligned(16) && (rows.stride * rows.dtype.bytes()).is_multiple_of(16)
}

/// The parameter of the product kernels that describes a product.
fn params(product: &Product<'_>, split: SplitK, out: Rows<'_>) -> Result<Params> {
    let Product { form: _, a, b, more, alpha, bias, add, settled } = *product;
    let (m, n, k, k2) = product.sizes(&out)?;
    let SplitK { parts, k_of_part } = split;
    let address = |rows: Option<Rows<'_>>| rows.map_or(Ok(0), |rows| rows.address());
    let stride = |rows: Option<Rows<'_>>| size(rows.map_or(0, |rows| rows.stride));
    let (a2, b2) = more.unzip();
    Ok(Params {
        a: a.address()?,
        b: b.address()?,
        a2: address(a2)?,
        b2: address(b2)?,
        bias: address(bias)?,
        add: address(add)?,
        out: out.address()?,
        m: size(m)?,
        n: size(n)?,
        k: size(k)?,
        k2: size(k2)?,
        a_stride: size(a.stride)?,
        b_stride: size(b.stride)?,
        a2_stride: stride(a2)?,
        b2_stride: stride(b2)?,
        add_stride: stride(add)?,
        out_stride: size(out.stride)?,
        k_of_part: size(k_of_part)?,
        aligned: bits(&[
            by_16(a),
            by_16(b),
            a2.is_some_and(by_16),
            b2.is_some_and(by_16),
            add.is_some_and(|add| add.by_fours()),
            // The parts of a split sum follow each other in memory without a gap.
            out.by_fours() && (parts == 1 || (m * n).is_multiple_of(4)),
        ]),
        alpha,
        settled: settled.into(),
    })
}

/// Computes [`product`] after `inner` = a·factor, the left operand of its second product: of LoRA, x·Aᵀ. cuBLAS computes
/// it at the same time as the first product.
///
/// # Errors
/// [`CudaError::Input`](driver::CudaError::Input) if the shapes or types do not match, or there is no second product.
pub fn product_over(device: &Device, gemm: Gemm, whole: &Product<'_>, factor: Rows<'_>, out: Rows<'_>) -> Result<()> {
    let Product { form, a, b, more, alpha, bias, add, settled } = *whole;
    let Some((inner, b2)) = more else {
        return check(false, || "a product over another has no second product".to_owned());
    };
    let first = Product { settled, ..Product::new(form, a, factor) };
    if gemm == Gemm::Exact || few::is_few(whole, out) || out.rows == 0 || out.width == 0 {
        product(device, gemm, &first, inner)?;
        return product(device, gemm, whole, out);
    }
    first.sizes(&inner)?;
    whole.sizes(&out)?;
    let (beta, add) = begin(device, add, out)?;
    library(device, form, (a, factor), (1.0, 0.0), inner, Order::Aside)?;
    library(device, form, (a, b), (alpha, beta), out, Order::Beside)?;
    library(device, form, (inner, b2), (alpha, 1.0), out, Order::InTurn)?;
    finish(device, bias, add, out)
}

/// Puts values to add where cuBLAS adds to them; returns cuBLAS's factor of them, and those that are still to be added.
fn begin<'a>(device: &Device, add: Option<Rows<'a>>, out: Rows<'_>) -> Result<(f32, Option<Rows<'a>>)> {
    let (Some(values), Dtype::F32) = (add, out.dtype) else { return Ok((0.0, add)) };
    if (values.address()?, values.stride) != (out.address()?, out.stride) {
        copy(device, values, out)?;
    }
    Ok((1.0, None))
}

/// Computes a product with cuBLAS.
fn library(
    device: &Device,
    form: Form,
    (a, b): (Rows<'_>, Rows<'_>),
    (alpha, beta): (f32, f32),
    out: Rows<'_>,
    order: Order,
) -> Result<()> {
    device.gemm(&driver::Gemm {
        a: matrix(a),
        transpose_a: form == Form::Tn,
        b: matrix(b),
        transpose_b: form == Form::Nt,
        c: matrix(out),
        alpha,
        beta,
        order,
    })
}

fn fast(device: &Device, product: &Product<'_>, out: Rows<'_>) -> Result<()> {
    let Product { form, a, b, more, alpha, bias, add, settled: _ } = *product;
    let (beta, add) = begin(device, add, out)?;
    library(device, form, (a, b), (alpha, beta), out, Order::InTurn)?;
    if let Some(second) = more {
        library(device, form, second, (alpha, 1.0), out, Order::InTurn)?;
    }
    finish(device, bias, add, out)
}

fn matrix(rows: Rows<'_>) -> Matrix<'_> {
    let Rows { buffer, at, rows, width, stride, dtype } = rows;
    Matrix { buffer, dtype, at, rows, columns: width, stride }
}

#[cfg(test)]
mod tests;
