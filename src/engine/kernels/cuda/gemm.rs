//! Matrix products: our own, whose rows have the same bits whatever the other rows, and cuBLAS's.

use super::driver::Device;
use super::rows::{Result, Rows};

/// Who multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gemm {
    /// Our own kernels: each element is one chain over k in steps of 16, whatever the tile, so that a row's bits do not
    /// depend on the other rows.
    Exact,
    /// cuBLAS: fast, the order of sums its own.
    Fast,
}

/// Which operand lies transposed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// a `[m, k]` · b `[n, k]`ᵀ: x·Wᵀ
    Nt,
    /// a `[m, k]` · b `[k, n]`: dy·W
    Nn,
    /// a `[k, m]`ᵀ · b `[k, n]`: dyᵀ·x
    Tn,
}

/// A product and what is added to it. a and b have one type; so have the operands of `more`.
#[derive(Clone, Copy, Debug)]
pub struct Product<'a> {
    /// Of a and b, and of `more`.
    pub form: Form,
    /// The left operand.
    pub a: Rows<'a>,
    /// The right operand, of the same type.
    pub b: Rows<'a>,
    /// Another product, of the same form, type, rows and columns, whose sums go on from the first's.
    pub more: Option<(Rows<'a>, Rows<'a>)>,
    /// Factor of the products.
    pub alpha: f32,
    /// Added to every row; one row of f32.
    pub bias: Option<Rows<'a>>,
    /// Added; f32, may be `out`.
    pub add: Option<Rows<'a>>,
}

/// out `[m, n]` (f32, or bf16 where the operands are) = alpha·(a·b + …) + bias + add.
pub fn product(device: &Device, gemm: Gemm, product: &Product<'_>, out: Rows<'_>) -> Result<()> {
    todo!()
}

/// gradient `[m, n]` (f32) += alpha · aᵀ·b, for a `[k, m]` and b `[k, n]` of one type: the gradient of a weight, summed over
/// the rows in a fixed order.
pub fn outer(device: &Device, gemm: Gemm, a: Rows<'_>, b: Rows<'_>, alpha: f32, gradient: Rows<'_>) -> Result<()> {
    todo!()
}
