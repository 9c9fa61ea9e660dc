//! Rows on the device: views of buffers, lookups, sums and conversions.

use super::driver::{Buffer, CudaError, Device};

/// Result of a call to the device.
pub type Result<T> = std::result::Result<T, CudaError>;

/// What a buffer holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// 4 bytes.
    F32,
    /// 2 bytes, the upper half of an f32.
    Bf16,
}

impl Dtype {
    /// Bytes of a value.
    pub fn bytes(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::Bf16 => 2,
        }
    }

    /// How names of kernels end.
    pub fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "f32",
            Dtype::Bf16 => "bf16",
        }
    }
}

/// `rows` rows of `width` values in a buffer, row-major, their beginnings `stride` values apart. What is written is
/// passed the same way: a buffer's memory belongs to the device's stream.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// Where they lie.
    pub buffer: &'a Buffer,
    /// The first row's first value, counted in values.
    pub at: usize,
    /// How many.
    pub rows: usize,
    /// Values of a row.
    pub width: usize,
    /// From a row to the next, in values.
    pub stride: usize,
    /// Of the values.
    pub dtype: Dtype,
}

impl<'a> Rows<'a> {
    /// All of a buffer.
    pub fn new(buffer: &'a Buffer, rows: usize, width: usize, dtype: Dtype) -> Rows<'a> {
        todo!()
    }

    /// One row, from `at` on: a vector, or a place in a flat buffer.
    pub fn flat(buffer: &'a Buffer, at: usize, width: usize, dtype: Dtype) -> Rows<'a> {
        todo!()
    }

    /// Some columns.
    pub fn columns(self, columns: std::ops::Range<usize>) -> Rows<'a> {
        todo!()
    }

    /// Some of the rows.
    pub fn part(self, rows: std::ops::Range<usize>) -> Rows<'a> {
        todo!()
    }
}

/// out\[i\] = x\[rows\[i\]\], converted to the type of `out`: [`Backend::select`], and `embed` with the table as x.
///
/// [`Backend::select`]: crate::engine::backend::Backend::select
pub fn select(device: &Device, x: Rows<'_>, rows: &[u32], out: Rows<'_>) -> Result<()> {
    todo!()
}

/// [`select`] by row numbers that lie on the device (u32, one a row of `out`); numbers beyond x give rows of NaN.
pub fn select_by(device: &Device, x: Rows<'_>, rows: &Buffer, out: Rows<'_>) -> Result<()> {
    todo!()
}

/// out\[rows\[i\]\] += x\[i\] in order of i, in f32: `spread` (into zeros) and `embed_vjp` (into the table's place in the
/// gradient). Deterministic, whatever rows are named twice.
pub fn scatter_add(device: &Device, x: Rows<'_>, rows: &[u32], out: Rows<'_>) -> Result<()> {
    todo!()
}

/// out = x, rounded or widened: casts, copies of views, and `stack` one part at a time.
pub fn copy(device: &Device, x: Rows<'_>, out: Rows<'_>) -> Result<()> {
    todo!()
}

/// y += x; y of f32 or bf16.
pub fn add(device: &Device, x: Rows<'_>, y: Rows<'_>) -> Result<()> {
    todo!()
}

/// sums (one row of f32) += Σ over the rows of x, in a fixed order: the gradient of a bias.
pub fn column_sums(device: &Device, x: Rows<'_>, sums: Rows<'_>) -> Result<()> {
    todo!()
}

/// What LoRA dropout takes from some rows (see `engine::model::pass::Mask`): a value is zeroed where its draw of 32 bits,
/// from the row's key and the column, is below the threshold, else scaled.
#[derive(Clone, Copy, Debug)]
pub struct Dropout<'a> {
    /// u64 keys, one a row, narrowed by layer and module.
    pub keys: &'a Buffer,
    /// Draws below it are dropped; at most 2³².
    pub threshold: u64,
    /// Of what stays.
    pub scale: f32,
}

/// out = what dropout leaves of x, or with `add` out += that.
pub fn drop_out(device: &Device, x: Rows<'_>, dropout: Dropout<'_>, add: bool, out: Rows<'_>) -> Result<()> {
    todo!()
}
