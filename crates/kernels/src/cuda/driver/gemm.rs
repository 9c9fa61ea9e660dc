//! Matrix products by cuBLAS: describes the operands' positions in buffers, and checks them before a launch.

use super::Buffer;
use crate::cuda::device_api::{CudaError, DType, Order, Product};

/// A row-major matrix within a buffer.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    /// The buffer that holds the matrix.
    pub buffer: &'a Buffer,
    /// Type of its elements.
    pub dtype: DType,
    /// Index of its first element in the buffer.
    pub at: usize,
    /// Number of rows as stored.
    pub rows: usize,
    /// Number of columns as stored.
    pub columns: usize,
    /// Number of elements from a row to the next one; at least `columns`.
    pub stride: usize,
}

impl<'a> Matrix<'a> {
    /// Number of columns (values per row) as stored.
    pub fn whole(buffer: &'a Buffer, dtype: DType, rows: usize, columns: usize) -> Matrix<'a> {
        Matrix { buffer, dtype, at: 0, rows, columns, stride: columns }
    }

    fn check(&self, what: &str) -> Result<u64, CudaError> {
        let Matrix { buffer, dtype, at, rows, columns, stride } = *self;
        let end = (rows.max(1) - 1).checked_mul(stride).and_then(|end| end.checked_add(columns)?.checked_add(at));
        let bytes = end.and_then(|end| end.checked_mul(dtype.bytes()));
        let inside = bytes.is_some_and(|bytes| bytes as u64 <= buffer.bytes());
        if !inside || stride < columns || [rows, columns, stride].iter().any(|&n| n > i32::MAX as usize) {
            return Err(CudaError::Input(format!(
                "{what}: {rows} rows of {columns} elements, {stride} apart, from index {at} on do not fit into a buffer of {} bytes",
                buffer.bytes()
            )));
        }
        Ok(buffer.pointer() + (at * dtype.bytes()) as u64)
    }
}

/// The product `c = alpha a b + beta c`, with `a` and `b` as stored or transposed. Sums are f32;
/// cuBLAS determines their order.
#[derive(Clone, Copy, Debug)]
pub struct Gemm<'a> {
    /// Left operand `(m, k)`, or `(k, m)` if it is transposed.
    pub a: Matrix<'a>,
    /// Whether to transpose `a`.
    pub transpose_a: bool,
    /// Right operand `(k, n)`, or `(n, k)` if it is transposed, with the same type as `a`.
    pub b: Matrix<'a>,
    /// Whether to transpose `b`, as for a linear layer, whose weight has one row per output.
    pub transpose_b: bool,
    /// Result `(m, n)`: f32, or bf16 if `a` and `b` are. Must not overlap them.
    pub c: Matrix<'a>,
    /// Factor of the product.
    pub alpha: f32,
    /// Factor of the previous values of `c`; with 0 they are not read.
    pub beta: f32,
    /// When the product runs, relative to the work around it.
    pub order: Order,
}

impl Gemm<'_> {
    /// Checks shapes and bounds. Returns `None` if there is nothing to compute.
    pub(super) fn product(&self) -> Result<Option<Product>, CudaError> {
        let Gemm { a, transpose_a, b, transpose_b, c, alpha, beta, order } = *self;
        let (rows, inner) = if transpose_a { (a.columns, a.rows) } else { (a.rows, a.columns) };
        let (inner_b, columns) = if transpose_b { (b.columns, b.rows) } else { (b.rows, b.columns) };
        if (inner, rows, columns) != (inner_b, c.rows, c.columns) {
            return Err(CudaError::Input(format!(
                "a matrix product of {rows} x {inner} and {inner_b} x {columns} does not give {} x {}",
                c.rows, c.columns
            )));
        }
        if a.dtype != b.dtype || (a.dtype == DType::F32 && c.dtype != DType::F32) {
            return Err(CudaError::Input(format!(
                "cuBLAS has no matrix product of {:?} and {:?} into {:?}",
                a.dtype, b.dtype, c.dtype
            )));
        }
        let product = Product {
            a: a.check("the first matrix of a product")?,
            b: b.check("the second matrix of a product")?,
            c: c.check("a product's result")?,
            rows,
            columns,
            inner,
            stride_a: a.stride,
            stride_b: b.stride,
            stride_c: c.stride,
            transpose_a,
            transpose_b,
            operands: a.dtype,
            result: c.dtype,
            alpha,
            beta,
            order,
        };
        if rows == 0 || columns == 0 {
            return Ok(None);
        }
        if inner == 0 {
            return Err(CudaError::Input("a matrix product whose operands have no elements".to_owned()));
        }
        Ok(Some(product))
    }
}
