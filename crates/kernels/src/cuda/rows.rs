//! Operations on rows in device memory: views of buffers, lookups, sums and conversions.
//!
//! This file is longer than others: each operation checks its bounds in the same way and launches one kernel.

use std::ops::Range;

use super::driver::{Buffer, CudaError, Device, Launch, params};

pub use super::driver::DType as Dtype;

/// Result of a call to the device.
pub type Result<T> = std::result::Result<T, CudaError>;

impl Dtype {
    /// The type's name as part of kernel names.
    pub fn name(self) -> &'static str {
        self.of(["f32", "bf16"])
    }

    /// Selects the kernel name for this type from those for f32 and bf16.
    pub(super) fn of<T>(self, [f32s, bf16s]: [T; 2]) -> T {
        match self {
            Dtype::F32 => f32s,
            Dtype::Bf16 => bf16s,
        }
    }
}

/// A view of `rows` rows of `width` values in a buffer, row-major, with `stride` values from one row to the next.
/// Outputs are passed in the same way: a buffer's memory belongs to the device's stream.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// The buffer that holds the rows.
    pub buffer: &'a Buffer,
    /// Index of the first row's first value.
    pub at: usize,
    /// Number of rows in the view.
    pub rows: usize,
    /// Number of values in a row.
    pub width: usize,
    /// Number of values from a row to the next.
    pub stride: usize,
    /// Type of the values.
    pub dtype: Dtype,
}

impl<'a> Rows<'a> {
    /// The rows at the beginning of a buffer.
    pub fn new(buffer: &'a Buffer, rows: usize, width: usize, dtype: Dtype) -> Rows<'a> {
        Rows { buffer, at: 0, rows, width, stride: width, dtype }
    }

    /// One row from `at` on: a vector, or a range of a flat buffer.
    pub fn flat(buffer: &'a Buffer, at: usize, width: usize, dtype: Dtype) -> Rows<'a> {
        Rows { buffer, at, rows: 1, width, stride: width, dtype }
    }

    /// Rows of `width` f32 from `at` on in a flat buffer, such as the gradient of a matrix.
    pub fn within(buffer: &'a Buffer, at: usize, rows: usize, width: usize) -> Rows<'a> {
        Rows { buffer, at, rows, width, stride: width, dtype: Dtype::F32 }
    }

    /// Selects a range of columns, which must exist.
    pub fn columns(self, columns: Range<usize>) -> Rows<'a> {
        assert!(
            columns.start <= columns.end && columns.end <= self.width,
            "columns {columns:?} do not lie in rows of {} values",
            self.width
        );
        Rows { at: self.at + columns.start, width: columns.len(), ..self }
    }

    /// Selects a range of rows, which must exist.
    pub fn part(self, rows: Range<usize>) -> Rows<'a> {
        assert!(
            rows.start <= rows.end && rows.end <= self.rows,
            "rows {rows:?} do not lie in a matrix of {} rows",
            self.rows
        );
        Rows { at: self.at + rows.start * self.stride, rows: rows.len(), ..self }
    }

    /// The address of the first value, after checking that all values are inside the buffer.
    pub(super) fn address(&self) -> Result<u64> {
        let Rows { buffer, at, rows, width, stride, dtype } = *self;
        let end = rows.saturating_sub(1).checked_mul(stride).and_then(|last| last.checked_add(width)?.checked_add(at));
        let bytes = end.and_then(|end| end.checked_mul(dtype.bytes()));
        check(bytes.is_some_and(|bytes| bytes as u64 <= buffer.bytes()) && (rows <= 1 || stride >= width), || {
            format!(
                "{rows} rows of {width} values, {stride} apart, from index {at} on do not fit into a buffer of {} bytes",
                buffer.bytes()
            )
        })?;
        Ok(buffer.pointer() + (at * dtype.bytes()) as u64)
    }

    /// Whether the address of every row is a multiple of `bytes`.
    pub(super) fn is_aligned(&self, bytes: usize) -> bool {
        let begin = self.buffer.pointer() as usize + self.at * self.dtype.bytes();
        begin.is_multiple_of(bytes) && (self.rows <= 1 || (self.stride * self.dtype.bytes()).is_multiple_of(bytes))
    }

    /// Whether each row can be read four values at a time.
    pub(super) fn by_fours(&self) -> bool {
        self.is_aligned(4 * self.dtype.bytes())
    }

    fn shape(&self) -> (usize, usize) {
        (self.rows, self.width)
    }
}

/// Returns an error with this message unless `is_so`.
pub(super) fn check(is_so: bool, what: impl FnOnce() -> String) -> Result<()> {
    if is_so { Ok(()) } else { Err(CudaError::Input(what())) }
}

/// Returns an error that lists the rows' shapes and types unless `is_so`.
pub(super) fn check_rows(is_so: bool, what: &str, rows: &[Rows<'_>]) -> Result<()> {
    check(is_so, || {
        let shapes: Vec<String> =
            rows.iter().map(|rows| format!("{} x {} {}", rows.rows, rows.width, rows.dtype.name())).collect();
        format!("{what}: operands do not match: {}", shapes.join(", "))
    })
}

/// Converts a size to the kernels' type.
pub(super) fn size(n: usize) -> Result<u32> {
    u32::try_from(n).map_err(|_| CudaError::Input(format!("the size {n} of a tensor does not fit into 32 bits")))
}

/// Packs flags into the bits of a kernel argument.
pub(super) fn bits(flags: &[bool]) -> u32 {
    flags.iter().enumerate().map(|(bit, set)| u32::from(*set) << bit).sum()
}

/// Number of threads in a thread block, for kernels with little work per thread.
pub(super) const THREADS: u32 = 256;

/// Describes a kernel launch with `count` threads, in blocks of [`THREADS`].
pub(super) fn threads(count: usize) -> Result<Launch> {
    // Kernels count threads in 32 bits, including the unused ones of the last block.
    check(count < (1 << 32) - THREADS as usize, || {
        format!("a GPU kernel cannot run for {count} values: their number does not fit into 32 bits")
    })?;
    Ok(Launch { grid: [(count as u32).div_ceil(THREADS), 1, 1], block: THREADS, shared: 0 })
}

/// Describes a kernel launch with one thread for each four values of each row.
pub(super) fn by_fours(rows: usize, width: usize) -> Result<Launch> {
    threads(rows.saturating_mul(width.div_ceil(4)))
}

params! {
    struct Select {
        x: u64,
        rows: u64,
        out: u64,
        x_rows: u32,
        count: u32,
        width: u32,
        x_stride: u32,
        out_stride: u32,
        aligned: u32,
    }
}

/// Looks up rows, out\[i\] = x\[rows\[i\]\], converted to the type of `out`; `embed` uses it with the
/// embedding table as x.
///
/// # Errors
/// [`CudaError::Input`] if a row does not exist, or the shapes do not match.
pub fn select(device: &Device, x: Rows<'_>, rows: &[u32], out: Rows<'_>) -> Result<()> {
    check(rows.len() == out.rows && rows.iter().all(|row| (*row as usize) < x.rows), || {
        format!(
            "{} rows of a matrix of {} rows cannot be copied to {} rows of another one",
            rows.len(),
            x.rows,
            out.rows
        )
    })?;
    select_by(device, x, &device.upload(rows)?, out)
}

/// Looks up rows like [`select`], with row indices on the device (u32, one per row of `out`); indices beyond x
/// give rows of NaN.
///
/// # Errors
/// [`CudaError::Input`] if the shapes do not match.
pub fn select_by(device: &Device, x: Rows<'_>, rows: &Buffer, out: Rows<'_>) -> Result<()> {
    check_rows(x.width == out.width && rows.count::<u32>() >= out.rows, "select", &[x, out])?;
    if out.rows == 0 || out.width == 0 {
        return Ok(());
    }
    let params = Select {
        x: x.address()?,
        rows: rows.at::<u32>(0, out.rows)?,
        out: out.address()?,
        x_rows: size(x.rows)?,
        count: size(out.rows)?,
        width: size(out.width)?,
        x_stride: size(x.stride)?,
        out_stride: size(out.stride)?,
        aligned: bits(&[x.by_fours(), out.by_fours()]),
    };
    let kernel =
        out.dtype.of(x.dtype.of([["select_f32_f32", "select_f32_bf16"], ["select_bf16_f32", "select_bf16_bf16"]]));
    device.launch(kernel, by_fours(out.rows, out.width)?, &params)
}

params! {
    struct Scatter {
        x: u64,
        out: u64,
        begins: u64,
        targets: u64,
        sources: u64,
        count: u32,
        width: u32,
        x_stride: u32,
        out_stride: u32,
        aligned: u32,
        pad: u32,
    }
}

/// Adds rows to others, out\[rows\[i\]\] += x\[i\] in order of i, in f32: `spread` (into zeros) and `embed_vjp` (into
/// the embedding table's gradient). Deterministic, even if rows occur twice.
///
/// # Errors
/// [`CudaError::Input`] if a row does not exist, or the shapes do not match.
pub fn scatter_add(device: &Device, x: Rows<'_>, rows: &[u32], out: Rows<'_>) -> Result<()> {
    let fits = x.width == out.width && out.dtype == Dtype::F32 && rows.len() == x.rows;
    check_rows(fits && rows.iter().all(|row| (*row as usize) < out.rows), "scatter_add", &[x, out])?;
    if rows.is_empty() || x.width == 0 {
        return Ok(());
    }
    let mut sources: Vec<u32> = (0..size(rows.len())?).collect();
    sources.sort_by_key(|source| rows[*source as usize]);
    let (mut begins, mut targets) = (Vec::new(), Vec::new());
    for (at, source) in sources.iter().enumerate() {
        let target = rows[*source as usize];
        if targets.last() != Some(&target) {
            targets.push(target);
            begins.push(at as u32);
        }
    }
    begins.push(sources.len() as u32);
    let (count, firsts) = (targets.len(), begins.len());
    // Upload all three index arrays together.
    begins.extend(targets);
    begins.extend(sources);
    let lists = device.upload(&begins)?;
    let params = Scatter {
        x: x.address()?,
        out: out.address()?,
        begins: lists.at::<u32>(0, firsts)?,
        targets: lists.at::<u32>(firsts, count)?,
        sources: lists.at::<u32>(firsts + count, rows.len())?,
        count: size(count)?,
        width: size(x.width)?,
        x_stride: size(x.stride)?,
        out_stride: size(out.stride)?,
        aligned: bits(&[x.by_fours(), out.by_fours()]),
        pad: 0,
    };
    device.launch(x.dtype.of(["scatter_f32", "scatter_bf16"]), by_fours(count, x.width)?, &params)
}

params! {
    struct Copy {
        x: u64,
        out: u64,
        rows: u32,
        width: u32,
        x_stride: u32,
        out_stride: u32,
        aligned: u32,
        add: u32,
        scale: f32,
        pad: u32,
    }
}

/// Copies rows, out = x, rounded or widened to the type of `out`: casts, copies of views, and `stack` one
/// part at a time.
///
/// # Errors
/// [`CudaError::Input`] if the shapes do not match.
pub fn copy(device: &Device, x: Rows<'_>, out: Rows<'_>) -> Result<()> {
    copy_or_add(device, x, 1.0, out, false)
}

/// Scales rows: computes out = scale · x in f32, then rounds to the type of `out`.
///
/// # Errors
/// [`CudaError::Input`] if the shapes do not match.
pub fn copy_scaled(device: &Device, x: Rows<'_>, scale: f32, out: Rows<'_>) -> Result<()> {
    copy_or_add(device, x, scale, out, false)
}

/// Adds rows elementwise, y += x; both are f32 or bf16.
///
/// # Errors
/// [`CudaError::Input`] if the shapes do not match.
pub fn add(device: &Device, x: Rows<'_>, y: Rows<'_>) -> Result<()> {
    copy_or_add(device, x, 1.0, y, true)
}

fn copy_or_add(device: &Device, x: Rows<'_>, scale: f32, out: Rows<'_>, add: bool) -> Result<()> {
    check_rows(x.shape() == out.shape(), "copy", &[x, out])?;
    if x.rows == 0 || x.width == 0 {
        return Ok(());
    }
    let params = Copy {
        x: x.address()?,
        out: out.address()?,
        rows: size(x.rows)?,
        width: size(x.width)?,
        x_stride: size(x.stride)?,
        out_stride: size(out.stride)?,
        aligned: bits(&[x.by_fours(), out.by_fours()]),
        add: u32::from(add),
        scale,
        pad: 0,
    };
    device.launch(
        out.dtype.of(x.dtype.of([["copy_f32_f32", "copy_f32_bf16"], ["copy_bf16_f32", "copy_bf16_bf16"]])),
        by_fours(x.rows, x.width)?,
        &params,
    )
}

params! {
    struct Epilogue {
        bias: u64,
        add: u64,
        out: u64,
        rows: u32,
        width: u32,
        add_stride: u32,
        out_stride: u32,
        aligned: u32,
        pad: u32,
    }
}

/// Adds bias (one row of f32) to every row of out, and adds `add` (f32): the terms that a product by cuBLAS leaves out.
pub(super) fn finish(device: &Device, bias: Option<Rows<'_>>, add: Option<Rows<'_>>, out: Rows<'_>) -> Result<()> {
    if (bias.is_none() && add.is_none()) || out.rows == 0 || out.width == 0 {
        return Ok(());
    }
    let address = |rows: Option<Rows<'_>>| rows.map_or(Ok(0), |rows| rows.address());
    let params = Epilogue {
        bias: address(bias)?,
        add: address(add)?,
        out: out.address()?,
        rows: size(out.rows)?,
        width: size(out.width)?,
        add_stride: size(add.map_or(0, |add| add.stride))?,
        out_stride: size(out.stride)?,
        aligned: bits(&[
            out.by_fours(),
            bias.is_some_and(|bias| bias.by_fours()),
            add.is_some_and(|add| add.by_fours()),
        ]),
        pad: 0,
    };
    device.launch(out.dtype.of(["finish_f32", "finish_bf16"]), by_fours(out.rows, out.width)?, &params)
}

params! {
    struct ColumnParts {
        x: u64,
        parts: u64,
        rows: u32,
        width: u32,
        stride: u32,
        pad: u32,
    }
}

/// Number of rows that one partial sum over rows covers, the same on every device.
const ROWS_OF_PART: usize = 64;

/// Describes the launch of partial sums over rows, with one block for each [`ROWS_OF_PART`] rows and [`THREADS`]
/// columns; also returns the number of partial sums.
pub(super) fn parts_of(rows: usize, width: usize) -> Result<(Launch, usize)> {
    let parts = rows.div_ceil(ROWS_OF_PART);
    check(parts < 1 << 16, || format!("a sum over the rows of a matrix has too many rows: {rows}"))?;
    Ok((Launch { grid: [size(width)?.div_ceil(THREADS), parts as u32, 1], block: THREADS, shared: 0 }, parts))
}

/// Computes sums (one row of f32) += Σ over the rows of x, in a fixed order: the gradient of a bias.
///
/// # Errors
/// [`CudaError::Input`] if the shapes do not match.
pub fn column_sums(device: &Device, x: Rows<'_>, sums: Rows<'_>) -> Result<()> {
    check_rows(sums.shape() == (1, x.width) && sums.dtype == Dtype::F32, "column_sums", &[x, sums])?;
    if x.rows == 0 || x.width == 0 {
        return Ok(());
    }
    let (launch, count) = parts_of(x.rows, x.width)?;
    let parts = device.alloc(count * x.width * size_of::<f32>())?;
    let params = ColumnParts {
        x: x.address()?,
        parts: parts.at::<f32>(0, count * x.width)?,
        rows: size(x.rows)?,
        width: size(x.width)?,
        stride: size(x.stride)?,
        pad: 0,
    };
    device.launch(x.dtype.of(["column_parts_f32", "column_parts_bf16"]), launch, &params)?;
    Parts { parts: &parts, count, rows: 1 }.add(device, 0, 1.0, sums)
}

params! {
    struct AddParts {
        parts: u64,
        out: u64,
        count: u32,
        rows: u32,
        width: u32,
        out_stride: u32,
        rows_of_part: u32,
        first: u32,
        alpha: f32,
        pad: u32,
    }
}

/// Partial sums of a matrix product, whose sum over k was split: f32 `[count, rows, width]`.
pub(super) struct Parts<'a> {
    pub parts: &'a Buffer,
    pub count: usize,
    pub rows: usize,
}

impl Parts<'_> {
    /// Adds partial sums, out (f32) += alpha · Σ over the parts, in order, of their rows from `first` on.
    pub(super) fn add(&self, device: &Device, first: usize, alpha: f32, out: Rows<'_>) -> Result<()> {
        let Parts { parts, count, rows } = *self;
        check_rows(
            out.dtype == Dtype::F32 && first + out.rows <= rows,
            "the sum of the partial results of a split matrix product",
            &[out],
        )?;
        let params = AddParts {
            parts: parts.at::<f32>(0, count * rows * out.width)?,
            out: out.address()?,
            count: size(count)?,
            rows: size(out.rows)?,
            width: size(out.width)?,
            out_stride: size(out.stride)?,
            rows_of_part: size(rows)?,
            first: size(first)?,
            alpha,
            pad: 0,
        };
        device.launch("add_parts", threads(out.rows.saturating_mul(out.width))?, &params)
    }
}

params! {
    struct Drop {
        x: u64,
        out: u64,
        keys: u64,
        threshold: u64,
        rows: u32,
        width: u32,
        x_stride: u32,
        out_stride: u32,
        scale: f32,
        add: u32,
    }
}

/// LoRA dropout of some rows (see `engine::model::pass::Mask`): a value is zeroed if its random 32-bit number, computed
/// from the row's key and the column, is below the threshold; else it is scaled.
#[derive(Clone, Copy, Debug)]
pub struct Dropout<'a> {
    /// The random key of each row (u64), extended by layer and module.
    pub keys: &'a Buffer,
    /// Random numbers below this value drop their value; at most 2³².
    pub threshold: u64,
    /// Factor of the values that are not dropped.
    pub scale: f32,
}

/// Applies LoRA dropout: out = x after dropout, or with `add` out += x after dropout. Both have the same type, or x is
/// bf16 and out is f32.
///
/// # Errors
/// [`CudaError::Input`] if the shapes do not match, or there are fewer keys than rows.
pub fn drop_out(device: &Device, x: Rows<'_>, dropout: Dropout<'_>, add: bool, out: Rows<'_>) -> Result<()> {
    check_rows(x.shape() == out.shape() && (x.dtype == out.dtype || out.dtype == Dtype::F32), "dropout", &[x, out])?;
    if x.rows == 0 || x.width == 0 {
        return Ok(());
    }
    let params = Drop {
        x: x.address()?,
        out: out.address()?,
        keys: dropout.keys.at::<u64>(0, x.rows)?,
        threshold: dropout.threshold,
        rows: size(x.rows)?,
        width: size(x.width)?,
        x_stride: size(x.stride)?,
        out_stride: size(out.stride)?,
        scale: dropout.scale,
        add: u32::from(add),
    };
    device.launch(
        out.dtype.of(x.dtype.of([["drop_f32_f32", "drop_f32_bf16"], ["drop_bf16_f32", "drop_bf16_bf16"]])),
        by_fours(x.rows, x.width)?,
        &params,
    )
}

#[cfg(test)]
pub(super) mod tests;
