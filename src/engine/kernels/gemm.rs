//! Matrix products with packed weights, for every number of rows by the same arithmetic.
//!
//! Every output is one chain of multiply-adds in order, whatever the number of rows, the threads or the cut: the same row
//! gives the same bits in decode, prefill and training.

#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::ops::Range;

use super::isa::Isa;
use super::pack::{PANEL, PackDtype, PackedMatrix};
use super::simd::{Portable, Simd};
use super::threads::{Shared, Threads};

/// One summand of a product: rows of inputs and the weight that they meet.
#[derive(Clone, Copy, Debug)]
pub struct Term<'a> {
    /// Rows, `stride` apart.
    pub x: &'a [f32],
    /// Elements from one row to the next.
    pub stride: usize,
    /// The weight.
    pub weight: &'a PackedMatrix,
}

/// Where a product goes.
#[derive(Debug)]
pub struct Output<'a> {
    /// Rows, `stride` apart.
    pub y: &'a mut [f32],
    /// Elements from one row to the next.
    pub stride: usize,
    /// How many.
    pub rows: usize,
    /// Add to what is there.
    pub add: bool,
}

/// y `[rows, n]` = bias `[n]` + Σ over terms x `[rows, k]` · weightᵀ, or y += the sum. All weights have the same n; what
/// adds to y has no bias.
pub fn forward(threads: &Threads, isa: Isa, terms: &[Term<'_>], bias: Option<&[f32]>, out: Output<'_>) {
    let Some(first) = terms.first() else { return };
    let n = first.weight.n();
    check(terms, out.rows, |weight| weight.k(), |weight| weight.n() == n);
    assert!(bias.is_none_or(|bias| bias.len() == n && !out.add));
    run(threads, isa, Side::Forward, terms, bias, n, out);
}

/// dx `[rows, k]` (+)= Σ over terms dy `[rows, n]` · weight. All weights have the same k.
pub fn backward(threads: &Threads, isa: Isa, terms: &[Term<'_>], out: Output<'_>) {
    let Some(first) = terms.first() else { return };
    let k = first.weight.k();
    check(terms, out.rows, |weight| weight.n(), |weight| weight.k() == k);
    run(threads, isa, Side::Backward, terms, None, k, out);
}

fn run(
    threads: &Threads,
    isa: Isa,
    side: Side,
    terms: &[Term<'_>],
    bias: Option<&[f32]>,
    width: usize,
    out: Output<'_>,
) {
    let rows = out.rows;
    let job = Job::new(side, terms, bias, 0..width, out);
    threads.grid(rows, 48, width.div_ceil(PANEL), 1, |rows, panels| job.run(isa, rows, panels));
}

/// [`forward`] for the outputs of some panels, on the calling thread: the streamed head. Column 0 of y is output
/// `panels.start * PANEL`; `bias` is that of all outputs. The same bits as the whole product.
pub fn forward_panels(isa: Isa, terms: &[Term<'_>], bias: Option<&[f32]>, panels: Range<usize>, out: Output<'_>) {
    let Some(first) = terms.first() else { return };
    let n = first.weight.n();
    check(terms, out.rows, |weight| weight.k(), |weight| weight.n() == n);
    assert!(bias.is_none_or(|bias| bias.len() == n && !out.add));
    let columns = outputs_of(&panels, n);
    let rows = out.rows;
    if rows > 0 && !columns.is_empty() {
        Job::new(Side::Forward, terms, bias, columns, out).run(isa, 0..rows, panels);
    }
}

/// dx `[rows, k]` (+)= dy · weight over the outputs of some panels, on the calling thread. Column 0 of `dy` is output
/// `panels.start * PANEL`. A chain over the outputs in order: adding consecutive ranges gives the same bits as one call.
pub fn backward_panels(isa: Isa, weight: &PackedMatrix, panels: Range<usize>, dy: Rows<'_>, out: Output<'_>) {
    let outputs = outputs_of(&panels, weight.n());
    let (k, rows) = (weight.k(), out.rows);
    assert_eq!(dy.width, outputs.len(), "dy has other outputs");
    assert!(rows == 0 || dy.values.len() >= (rows - 1) * dy.stride + dy.width, "too few inputs");
    let terms = [Term { x: dy.values, stride: dy.stride, weight }];
    let mut job = Job::new(Side::Backward, &terms, None, 0..k, out);
    job.sum = Some(outputs);
    if rows > 0 && k > 0 {
        job.run(isa, 0..rows, 0..k.div_ceil(PANEL));
    }
}

/// The outputs of some panels.
fn outputs_of(panels: &Range<usize>, n: usize) -> Range<usize> {
    assert!(panels.start <= panels.end && panels.end <= n.div_ceil(PANEL), "no such panels");
    (panels.start * PANEL).min(n)..(panels.end * PANEL).min(n)
}

/// c `[i, j]` += Σ over rows a `[rows, i]`ᵀ · b `[rows, j]`, the rows in order: the gradient of a weight.
pub fn outer(threads: &Threads, isa: Isa, rows: usize, a: Rows<'_>, b: Rows<'_>, c: &mut [f32]) {
    let Some(c) = check_outer(isa, rows, &a, &b, c) else { return };
    threads.grid(a.width, 6, b.width.div_ceil(64), 1, |i, j| {
        let j = j.start * 64..(j.end * 64).min(b.width);
        // Safety: the grid's cells are disjoint, and the bounds were checked.
        unsafe { outer_range(isa, rows, &a, &b, &c, i, j) };
    });
}

/// [`outer`] on the calling thread: the gradient of a part of the outputs. The same bits.
pub fn outer_here(isa: Isa, rows: usize, a: Rows<'_>, b: Rows<'_>, c: &mut [f32]) {
    let Some(c) = check_outer(isa, rows, &a, &b, c) else { return };
    // Safety: the bounds were checked.
    unsafe { outer_range(isa, rows, &a, &b, &c, 0..a.width, 0..b.width) };
}

fn check_outer(isa: Isa, rows: usize, a: &Rows<'_>, b: &Rows<'_>, c: &mut [f32]) -> Option<Shared<f32>> {
    assert!(isa.is_available(), "{isa} does not run on this machine");
    assert_eq!(c.len(), a.width * b.width);
    if rows == 0 || c.is_empty() {
        return None;
    }
    for side in [a, b] {
        assert!(side.values.len() >= (rows - 1) * side.stride + side.width);
    }
    Some(Shared::new(c))
}

/// Rows of a matrix inside a wider one.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// From the first element of the first row on.
    pub values: &'a [f32],
    /// Elements of a row that count.
    pub width: usize,
    /// Elements from one row to the next.
    pub stride: usize,
}

fn check(
    terms: &[Term<'_>],
    rows: usize,
    width: impl Fn(&PackedMatrix) -> usize,
    fits: impl Fn(&PackedMatrix) -> bool,
) {
    for term in terms {
        let width = width(term.weight);
        assert!(fits(term.weight), "the weights of one product have different shapes");
        assert!(rows == 0 || term.x.len() >= (rows - 1) * term.stride + width, "too few inputs");
    }
}

/// Which way a weight is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    /// Over its inputs.
    Forward,
    /// Over its outputs: blocks of 32 inputs are turned as they are needed, once for many rows.
    Backward,
}

struct Job<'a> {
    side: Side,
    terms: &'a [Term<'a>],
    bias: Option<&'a [f32]>,
    /// Outputs of a row, the first of which is column 0 of y.
    columns: Range<usize>,
    /// The part of each sum that counts, the first of which is column 0 of the inputs; all of it where there is none.
    sum: Option<Range<usize>>,
    y: Shared<f32>,
    stride: usize,
    add: bool,
}

impl<'a> Job<'a> {
    fn new(
        side: Side,
        terms: &'a [Term<'a>],
        bias: Option<&'a [f32]>,
        columns: Range<usize>,
        out: Output<'_>,
    ) -> Job<'a> {
        let (width, Output { y, stride, rows, add }) = (columns.len(), out);
        assert!(stride >= width || rows <= 1, "rows overlap");
        assert!(rows == 0 || y.len() >= (rows - 1) * stride + width, "too few outputs");
        Job { side, terms, bias, columns, sum: None, y: Shared::new(y), stride, add }
    }

    /// What the sums over one term go over.
    fn depth(&self, term: &Term<'_>) -> Range<usize> {
        match (self.side, &self.sum) {
            (_, Some(sum)) => sum.clone(),
            (Side::Forward, None) => 0..term.weight.k(),
            (Side::Backward, None) => 0..term.weight.n(),
        }
    }

    /// One output.
    ///
    /// # Safety
    /// It is one of the job's.
    unsafe fn y(&self, row: usize, output: usize) -> *mut f32 {
        unsafe { self.y.at(row * self.stride + output - self.columns.start) }
    }

    /// On the calling thread.
    fn run(&self, isa: Isa, rows: Range<usize>, panels: Range<usize>) {
        if self.terms.iter().all(|term| self.depth(term).is_empty()) {
            return self.empty(rows, panels);
        }
        assert!(isa.is_available(), "{isa} does not run on this machine");
        SCRATCH.with_borrow_mut(|scratch| {
            // Safety: the rung is available, and the bounds were checked where the job was made.
            unsafe {
                match isa {
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx512 => product_avx512(self, scratch, rows, panels),
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx2 => product_avx2(self, scratch, rows, panels),
                    _ => product::<Portable, 2>(self, scratch, 4, rows, panels),
                }
            }
        });
    }
}

impl Job<'_> {
    /// Sums of nothing.
    fn empty(&self, rows: Range<usize>, panels: Range<usize>) {
        if self.add {
            return;
        }
        for row in rows {
            for output in panels.start * PANEL..(panels.end * PANEL).min(self.columns.end) {
                // Safety: the bounds were checked where the job was made.
                unsafe { *self.y(row, output) = self.bias.map_or(0.0, |bias| bias[output]) };
            }
        }
    }
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = const { RefCell::new(Scratch { rows: Vec::new(), panel: Vec::new() }) };
}

/// What a thread needs for a while.
struct Scratch {
    /// The inputs of some rows, `[tile][depth][width]`.
    rows: Vec<f32>,
    /// A turned block of the weights, `[depth][32]`.
    panel: Vec<f32>,
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn product_avx512(job: &Job<'_>, scratch: &mut Scratch, rows: Range<usize>, panels: Range<usize>) {
    unsafe { product::<super::simd::Avx512, 2>(job, scratch, 12, rows, panels) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn product_avx2(job: &Job<'_>, scratch: &mut Scratch, rows: Range<usize>, panels: Range<usize>) {
    unsafe { product::<super::simd::Avx2, 2>(job, scratch, 6, rows, panels) }
}

/// Elements of inputs that stay in the second-level cache while the weights stream by.
const CACHED_INPUTS: usize = 96 << 10;
/// Bytes of a panel's weights that stay in the first-level cache while the rows stream by.
const CACHED_WEIGHTS: usize = 24 << 10;

/// Tiles of `tile_rows` rows and `NV` vectors of outputs. Sums wait in the output between two blocks of their depth.
#[inline(always)]
unsafe fn product<S: Simd, const NV: usize>(
    job: &Job<'_>,
    scratch: &mut Scratch,
    tile_rows: usize,
    rows: Range<usize>,
    panels: Range<usize>,
) {
    for (index, term) in job.terms.iter().enumerate() {
        let bytes = match (job.side, term.weight.dtype()) {
            (Side::Forward, PackDtype::Bf16) => 2,
            (Side::Forward, PackDtype::F32) | (Side::Backward, _) => 4,
        };
        let depth = job.depth(term);
        // Even, as pairs of inputs lie together.
        let depth_at_once = CACHED_WEIGHTS / bytes / PANEL;
        let rows_at_once =
            (CACHED_INPUTS / depth_at_once.min(depth.len()).max(1)).max(tile_rows) / tile_rows * tile_rows;
        let mut begin = rows.start;
        while begin < rows.end {
            let chunk = begin..(begin + rows_at_once).min(rows.end);
            begin = chunk.end;
            for first in depth.clone().step_by(depth_at_once) {
                let block = Block {
                    term,
                    depth: first..(first + depth_at_once).min(depth.end),
                    inputs: first - job.sum.as_ref().map_or(0, |sum| sum.start),
                    fresh: index == 0 && first == depth.start,
                };
                // Safety: the caller's.
                unsafe { product_block::<S, NV>(job, scratch, tile_rows, &block, chunk.clone(), panels.clone()) };
            }
        }
    }
}

/// A part of the sums of one term.
struct Block<'a> {
    term: &'a Term<'a>,
    depth: Range<usize>,
    /// The column of the inputs at which it begins.
    inputs: usize,
    /// Nothing has been summed before it.
    fresh: bool,
}

#[inline(always)]
unsafe fn product_block<S: Simd, const NV: usize>(
    job: &Job<'_>,
    scratch: &mut Scratch,
    tile_rows: usize,
    block: &Block<'_>,
    rows: Range<usize>,
    panels: Range<usize>,
) {
    let Scratch { rows: packed, panel: turned } = scratch;
    let width = tile_rows.min(rows.len());
    pack_rows(block, rows.clone(), width, packed);
    for panel in panels {
        if job.side == Side::Backward {
            block.term.weight.turn(panel, block.depth.clone(), turned);
        }
        for column in (0..PANEL).step_by(NV * S::LANES) {
            for (tile, row) in rows.clone().step_by(tile_rows).enumerate() {
                let inputs = &packed[tile * width * block.depth.len()..];
                let at = Tile { row, panel, column, inputs, width, turned };
                let count = (rows.end - row).min(tile_rows);
                // Safety: the caller's.
                unsafe { tile_of::<S, NV>(job, block, &at, count) };
            }
        }
    }
}

/// `[tile][depth][width]`; rows fewer than a tile has are packed as narrow as they are.
#[inline(always)]
fn pack_rows(block: &Block<'_>, rows: Range<usize>, width: usize, packed: &mut Vec<f32>) {
    let Block { term, depth, inputs, fresh: _ } = block;
    packed.clear();
    packed.resize(rows.len().div_ceil(width) * width * depth.len(), 0.0);
    for (tile, out) in rows.clone().step_by(width).zip(packed.chunks_exact_mut(width * depth.len())) {
        for m in 0..width.min(rows.end - tile) {
            let x = &term.x[(tile + m) * term.stride + inputs..][..depth.len()];
            for (out, x) in out[m..].iter_mut().step_by(width).zip(x) {
                *out = *x;
            }
        }
    }
}

/// Where a tile lies.
struct Tile<'a> {
    row: usize,
    panel: usize,
    column: usize,
    /// `[depth][width]`
    inputs: &'a [f32],
    width: usize,
    /// `[depth][32]`, for the way back.
    turned: &'a [f32],
}

#[inline(always)]
unsafe fn tile_of<S: Simd, const NV: usize>(job: &Job<'_>, block: &Block<'_>, at: &Tile<'_>, count: usize) {
    macro_rules! tiles {
        ($($rows:literal)*) => {
            match count {
                $($rows => unsafe { tile::<S, $rows, NV>(job, block, at) },)*
                _ => unreachable!("more rows than a tile has"),
            }
        };
    }
    tiles!(1 2 3 4 5 6 7 8 9 10 11 12)
}

#[inline(always)]
unsafe fn tile<S: Simd, const MR: usize, const NV: usize>(job: &Job<'_>, block: &Block<'_>, at: &Tile<'_>) {
    unsafe {
        let first = at.panel * PANEL + at.column;
        let valid = job.columns.end.saturating_sub(first).min(NV * S::LANES);
        if valid == 0 {
            return;
        }
        let whole = valid == NV * S::LANES;
        let fresh = block.fresh && !job.add;
        let mut acc = [[S::zero(); NV]; MR];
        for (m, acc) in acc.iter_mut().enumerate() {
            let mut from = job.y(at.row + m, first).cast_const();
            if fresh {
                let Some(bias) = job.bias else { continue };
                from = bias.as_ptr().add(first);
            }
            let mut values = [0f32; PANEL];
            if !whole {
                std::ptr::copy_nonoverlapping(from, values.as_mut_ptr(), valid);
                from = values.as_ptr();
            }
            for (v, acc) in acc.iter_mut().enumerate() {
                *acc = S::load(from.add(v * S::LANES));
            }
        }
        let (weight, depth) = (block.term.weight, &block.depth);
        let (x, width) = (at.inputs.as_ptr(), at.width);
        let words = weight.words().add(at.panel * weight.panel_words() + at.column);
        match (job.side, weight.dtype()) {
            (Side::Backward, _) => {
                multiply_f32::<S, MR, NV>(&mut acc, x, width, at.turned.as_ptr().add(at.column), depth.len());
            }
            (Side::Forward, PackDtype::F32) => {
                let words = words.add(depth.start * PANEL).cast();
                multiply_f32::<S, MR, NV>(&mut acc, x, width, words, depth.len());
            }
            (Side::Forward, PackDtype::Bf16) => {
                multiply_bf16::<S, MR, NV>(&mut acc, x, width, words.add(depth.start / 2 * PANEL), depth.len());
            }
        }
        for (m, acc) in acc.iter().enumerate() {
            let y = job.y(at.row + m, first);
            let mut values = [0f32; PANEL];
            let to = if whole { y } else { values.as_mut_ptr() };
            for (v, acc) in acc.iter().enumerate() {
                S::store(to.add(v * S::LANES), *acc);
            }
            if !whole {
                std::ptr::copy_nonoverlapping(values.as_ptr(), y, valid);
            }
        }
    }
}

#[inline(always)]
unsafe fn multiply_f32<S: Simd, const MR: usize, const NV: usize>(
    acc: &mut [[S::V; NV]; MR],
    x: *const f32,
    width: usize,
    w: *const f32,
    depth: usize,
) {
    unsafe {
        for i in 0..depth {
            let mut weights = [S::zero(); NV];
            for (v, weight) in weights.iter_mut().enumerate() {
                *weight = S::load(w.add(i * PANEL + v * S::LANES));
            }
            for (m, acc) in acc.iter_mut().enumerate() {
                let x = S::splat(*x.add(i * width + m));
                for (acc, weight) in acc.iter_mut().zip(&weights) {
                    *acc = S::fma(x, *weight, *acc);
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn multiply_bf16<S: Simd, const MR: usize, const NV: usize>(
    acc: &mut [[S::V; NV]; MR],
    x: *const f32,
    width: usize,
    w: *const u32,
    depth: usize,
) {
    unsafe {
        for i in 0..depth / 2 {
            let (mut even, mut odd) = ([S::zero(); NV], [S::zero(); NV]);
            for v in 0..NV {
                (even[v], odd[v]) = S::load_pairs(w.add(i * PANEL + v * S::LANES));
            }
            let x = x.add(2 * i * width);
            for (m, acc) in acc.iter_mut().enumerate() {
                let (a, b) = (S::splat(*x.add(m)), S::splat(*x.add(width + m)));
                for v in 0..NV {
                    acc[v] = S::fma(b, odd[v], S::fma(a, even[v], acc[v]));
                }
            }
        }
        if depth % 2 == 1 {
            for v in 0..NV {
                let (even, _) = S::load_pairs(w.add(depth / 2 * PANEL + v * S::LANES));
                for (m, acc) in acc.iter_mut().enumerate() {
                    acc[v] = S::fma(S::splat(*x.add((depth - 1) * width + m)), even, acc[v]);
                }
            }
        }
    }
}

unsafe fn outer_range(
    isa: Isa,
    rows: usize,
    a: &Rows<'_>,
    b: &Rows<'_>,
    c: &Shared<f32>,
    i: Range<usize>,
    j: Range<usize>,
) {
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => outer_avx512(rows, a, b, c, i, j),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => outer_avx2(rows, a, b, c, i, j),
            _ => outer_simd::<Portable>(rows, a, b, c, i, j),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn outer_avx512(rows: usize, a: &Rows<'_>, b: &Rows<'_>, c: &Shared<f32>, i: Range<usize>, j: Range<usize>) {
    unsafe { outer_simd::<super::simd::Avx512>(rows, a, b, c, i, j) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn outer_avx2(rows: usize, a: &Rows<'_>, b: &Rows<'_>, c: &Shared<f32>, i: Range<usize>, j: Range<usize>) {
    unsafe { outer_simd::<super::simd::Avx2>(rows, a, b, c, i, j) }
}

#[inline(always)]
unsafe fn outer_simd<S: Simd>(
    rows: usize,
    a: &Rows<'_>,
    b: &Rows<'_>,
    c: &Shared<f32>,
    i: Range<usize>,
    j: Range<usize>,
) {
    unsafe {
        let mut at = i.start;
        while at < i.end {
            let count = (i.end - at).min(6);
            let mut column = j.start;
            while column < j.end {
                if count == 6 && j.end - column >= 2 * S::LANES {
                    outer_tile::<S, 6, 2>(rows, a, b, c, at, column);
                    column += 2 * S::LANES;
                } else if j.end - column >= S::LANES {
                    for i in at..at + count {
                        outer_tile::<S, 1, 1>(rows, a, b, c, i, column);
                    }
                    column += S::LANES;
                } else {
                    for i in at..at + count {
                        let c = c.at(i * b.width + column);
                        for t in 0..rows {
                            // The same fused steps as in a whole vector, so that the cut changes no bit.
                            let value = *a.values.as_ptr().add(t * a.stride + i);
                            *c = S::first(S::fma(
                                S::splat(value),
                                S::splat(*b.values.as_ptr().add(t * b.stride + column)),
                                S::splat(*c),
                            ));
                        }
                    }
                    column += 1;
                }
            }
            at += count;
        }
    }
}

#[inline(always)]
unsafe fn outer_tile<S: Simd, const MR: usize, const NV: usize>(
    rows: usize,
    a: &Rows<'_>,
    b: &Rows<'_>,
    c: &Shared<f32>,
    i: usize,
    column: usize,
) {
    unsafe {
        let mut acc = [[S::zero(); NV]; MR];
        for (m, acc) in acc.iter_mut().enumerate() {
            for (v, acc) in acc.iter_mut().enumerate() {
                *acc = S::load(c.at((i + m) * b.width + column + v * S::LANES));
            }
        }
        for t in 0..rows {
            let b = b.values.as_ptr().add(t * b.stride + column);
            let mut values = [S::zero(); NV];
            for (v, value) in values.iter_mut().enumerate() {
                *value = S::load(b.add(v * S::LANES));
            }
            let a = a.values.as_ptr().add(t * a.stride + i);
            for (m, acc) in acc.iter_mut().enumerate() {
                let a = S::splat(*a.add(m));
                for (acc, value) in acc.iter_mut().zip(&values) {
                    *acc = S::fma(a, *value, *acc);
                }
            }
        }
        for (m, acc) in acc.iter().enumerate() {
            for (v, acc) in acc.iter().enumerate() {
                S::store(c.at((i + m) * b.width + column + v * S::LANES), *acc);
            }
        }
    }
}
