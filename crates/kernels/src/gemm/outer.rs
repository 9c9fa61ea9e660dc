//! Gradients of weights: sums over rows of outer products.

use std::ops::Range;

use super::super::isa::Isa;
use super::super::pack::{PANEL, PackDtype, PackedMatrix};
use super::super::rows::take_turns;
use super::super::threads::{Shared, Threads};
use super::job::{Inputs, Job, Side, Start, Target};
use super::{Output, Rows, SCRATCH, divide_work, next_call, product, thin, tile};

/// Computes c `[i, j]` += Σ over rows a `[rows, i]`ᵀ · b `[rows, j]`, the rows in order: the gradient of a weight.
pub fn outer(threads: &Threads, isa: Isa, rows: usize, a: Rows<'_>, b: Rows<'_>, c: &mut [f32]) {
    let Some(target) = check_outer(isa, rows, &a, &b, c) else { return };
    let (wide, narrow) = (a.width.max(b.width), a.width.min(b.width));
    let call = next_call();
    divide_work(threads, isa, Side::Forward, 1, wide, rows * narrow * wide, |_, panels| {
        outer_range(isa, (rows, &a, &b), &target, panels, call);
    });
}

/// Computes [`outer`] on the calling thread, for the gradient of some of the outputs. The bits are the same.
pub fn outer_here(isa: Isa, rows: usize, a: Rows<'_>, b: Rows<'_>, c: &mut [f32]) {
    let Some(target) = check_outer(isa, rows, &a, &b, c) else { return };
    outer_range(isa, (rows, &a, &b), &target, 0..a.width.max(b.width).div_ceil(PANEL), next_call());
}

fn check_outer(isa: Isa, rows: usize, a: &Rows<'_>, b: &Rows<'_>, c: &mut [f32]) -> Option<Target> {
    assert!(isa.runs(), "the instruction set {isa} does not run on this machine");
    assert_eq!(c.len(), a.width * b.width);
    if rows == 0 || c.is_empty() {
        return None;
    }
    for side in [a, b] {
        assert!(side.values.len() >= (rows - 1) * side.stride + side.width);
    }
    Some(Target::new(Output { y: c, stride: b.width, rows: a.width, add: true }, 0..b.width))
}

/// Computes the gradient of a range of panels of the wider operand.
fn outer_range(isa: Isa, sides: (usize, &Rows<'_>, &Rows<'_>), target: &Target, panels: Range<usize>, call: u64) {
    let (rows, a, b) = sides;
    if a.width.min(b.width) <= thin::WIDEST {
        return outer_thin(isa, rows, (a, b), target, panels);
    }
    // The job's weight is not used; blocks of the wider operand replace it.
    let nothing = PackedMatrix::new(&[], 0, PackDtype::F32);
    let job = Job::new(Side::Forward, &nothing, Inputs::default(), Start::Add, target, call);
    SCRATCH.with_borrow_mut(|scratch| {
        // Safety: the machine supports the instruction set, and the bounds were checked.
        unsafe { product::outer(tile::tile_kernels(isa), &job, scratch, sides, panels) };
    });
}

/// Computes the gradient of a weight if one operand is thin.
fn outer_thin(isa: Isa, rows: usize, (a, b): (&Rows<'_>, &Rows<'_>), target: &Target, panels: Range<usize>) {
    let flipped = a.width > b.width;
    let (thin, wide) = if flipped { (b, a) } else { (a, b) };
    for columns in thin::pieces(panels.start * PANEL..(panels.end * PANEL).min(wide.width), usize::MAX) {
        thin_piece(isa, rows, (thin, wide), columns, |m, column| {
            // Safety: no other call writes these gradients, and the bounds were checked.
            unsafe { target.y.at(if flipped { column * target.stride + m } else { m * target.stride + column }) }
        });
    }
}

/// Computes the gradient for some columns of the wide operand; `at(thin, wide)` is the address of a sum, which no
/// other thread accesses meanwhile.
fn thin_piece(
    isa: Isa,
    rows: usize,
    (thin, wide): (&Rows<'_>, &Rows<'_>),
    columns: Range<usize>,
    at: impl Fn(usize, usize) -> *mut f32,
) {
    // AMX has no f32 products; AVX-512 is available even if AMX is emulated.
    let isa = isa.min(Isa::Avx512);
    SCRATCH.with_borrow_mut(|scratch| {
        let sums = &mut scratch.hidden;
        scratch.hidden_of = None;
        sums.resize(sums.len().max(thin::scratch_len(thin.width)), 0.0);
        let stride = thin::scratch_len(1);
        for m in 0..thin.width {
            for (sum, column) in sums[m * stride..].iter_mut().zip(columns.clone()) {
                // Safety: the caller guarantees what this `unsafe fn` requires.
                *sum = unsafe { *at(m, column) };
            }
        }
        // Safety: the machine supports the instruction set; both operands have this many rows, and `sums` has
        // room for the products.
        unsafe { thin::add(isa, &mut thin::Sums { rows, thin, wide, columns: columns.clone(), sums, stride }) };
        for m in 0..thin.width {
            for (sum, column) in sums[m * stride..].iter().zip(columns.clone()) {
                // Safety: the caller guarantees what this `unsafe fn` requires.
                unsafe { *at(m, column) = *sum };
            }
        }
    });
}

/// The operands of gradients of LoRA factors that share one wide operand.
#[derive(Clone, Debug)]
pub struct Factors<'a> {
    /// The wide operand: x for A, dy for B.
    pub wide: Rows<'a>,
    /// The thin operands (dh or h) with the offsets of their gradients in the flat gradient: `[thin, wide]`, or
    /// `[wide, thin]` if transposed.
    pub thin: Vec<(Rows<'a>, usize)>,
    /// Whether the gradients are transposed: those of B are `[out, r]`.
    pub transposed: bool,
}

/// Maximum number of columns of a thin operand in [`outer_factors`].
pub const WIDEST_FACTOR: usize = thin::WIDEST;

/// Computes the gradients of many LoRA factors that do not overlap, as one unit of work; the bits
/// are those of [`outer`].
pub fn outer_factors(threads: &Threads, isa: Isa, rows: usize, all: &[Factors<'_>], gradient: &mut [f32]) {
    assert!(isa.runs(), "the instruction set {isa} does not run on this machine");
    if rows == 0 {
        return;
    }
    let (mut pieces, mut work) = (Vec::new(), 0);
    for (index, factors) in all.iter().enumerate() {
        let wide = &factors.wide;
        for (thin, at) in &factors.thin {
            assert!(thin.width <= thin::WIDEST && at + thin.width * wide.width <= gradient.len());
            assert!([thin, wide].iter().all(|side| side.values.len() >= (rows - 1) * side.stride + side.width));
            work += rows * thin.width * wide.width / 16;
        }
        // Split each wide operand into enough pieces for all threads, each of whole vectors.
        let most = wide.width.div_ceil(2 * threads.count()).next_multiple_of(PANEL);
        pieces.extend(thin::pieces(0..wide.width, most).map(|columns| (index, columns)));
    }
    let gradient = Shared::new(gradient);
    take_turns(threads, pieces.len(), work, |number| {
        let (index, columns) = &pieces[number];
        let Factors { wide, thin, transposed } = &all[*index];
        // The wide operand is in the cache from the second gradient on.
        for (thin, first) in thin {
            thin_piece(isa, rows, (thin, wide), columns.clone(), |m, column| {
                // Safety: the bounds were checked, and no other piece has these columns.
                unsafe {
                    gradient.at(first + if *transposed { column * thin.width + m } else { m * wide.width + column })
                }
            });
        }
    });
}
