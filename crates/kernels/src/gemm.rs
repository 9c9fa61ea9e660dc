//! Matrix products with packed weights, with the same arithmetic for any number of rows.
//!
//! Every output is one chain of multiply-adds in order, whatever the number of rows, the threads or the division of
//! work: a row gives the same bits in decode, prefill and training. AMX sums blocks of 32 and chains those. AVX512-BF16
//! chains pairs, and adds the product of the second values of a pair first.

#[cfg(target_arch = "x86_64")]
mod few;
mod job;
mod outer;
#[cfg(target_arch = "x86_64")]
pub(super) mod pairs;
mod place;
pub(super) mod product;
#[cfg(target_arch = "x86_64")]
mod shared;
#[cfg(test)]
mod tests;
mod thin;
pub(super) mod tile;

use std::cell::RefCell;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use super::isa::Isa;
#[cfg(target_arch = "x86_64")]
use super::pack::PackDtype;
use super::pack::{PANEL, PackedMatrix};
use super::threads::{Shared, Threads};
#[cfg(target_arch = "x86_64")]
use super::{amx, dpbf16};
use job::{Inputs, StartRows, Target};
pub(super) use job::{Job, Side, Start};
pub use outer::{Factors, WIDEST_FACTOR, outer, outer_factors, outer_here};
use product::Scratch;

/// One term of a matrix product: rows of inputs and the weight they are multiplied with.
#[derive(Clone, Copy, Debug)]
pub struct Term<'a> {
    /// Rows of inputs, `stride` elements apart.
    pub x: &'a [f32],
    /// Number of elements from one row to the next.
    pub stride: usize,
    /// The packed weight of the term.
    pub weight: &'a PackedMatrix,
}

/// The destination of a product.
#[derive(Debug)]
pub struct Output<'a> {
    /// Rows of outputs, `stride` elements apart.
    pub y: &'a mut [f32],
    /// Number of elements from one row to the next.
    pub stride: usize,
    /// Number of rows of outputs.
    pub rows: usize,
    /// Whether the product is added to the existing values.
    pub add: bool,
}

/// Rows of a matrix inside a wider one.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// The values of the wider matrix, from the first element of the first row on.
    pub values: &'a [f32],
    /// Number of elements used in each row.
    pub width: usize,
    /// Number of elements from one row to the next.
    pub stride: usize,
}

/// A linear layer, with or without an adapter of low rank.
#[derive(Debug)]
pub struct Linear<'a> {
    /// Rows of inputs, `stride` elements apart, as many as the output has.
    pub x: &'a [f32],
    /// Number of elements from one row to the next.
    pub stride: usize,
    /// The weight `[n, k]`.
    pub weight: &'a PackedMatrix,
    /// The bias `[n]`; none if the product adds to existing values.
    pub bias: Option<&'a [f32]>,
    /// Rows, as wide as the output, that the product is added to (the residual); none with a bias.
    pub residual: Option<&'a [f32]>,
    /// The LoRA adapter of the layer.
    pub lora: Option<Lora<'a>>,
}

/// A range of outputs of a fused layer, and the LoRA ranks that they read.
pub type Part = (Range<usize>, Range<usize>);

/// A LoRA adapter: y += (x·Aᵀ)·Bᵀ.
#[derive(Debug)]
pub struct Lora<'a> {
    /// The stacked factors A of all fused layers, `[rank, k]`.
    pub a: &'a PackedMatrix,
    /// The factor B `[n, rank]`, scaled by s. Zero outside of `parts`.
    pub b: &'a PackedMatrix,
    /// The blocks of the block-diagonal B: which outputs read which ranks. Outputs in no part read none; without any
    /// parts, every output reads every rank.
    pub parts: &'a [Part],
    /// Receives x·Aᵀ `[rows, rank]` for the backward pass.
    pub hidden: Option<&'a mut [f32]>,
}

/// Computes the product y `[rows, n]` = bias `[n]` + Σ over terms x `[rows, k]` · weightᵀ, or y += the sum. All weights
/// have the same n; an output with `add` has no bias.
pub fn forward(threads: &Threads, isa: Isa, terms: &[Term<'_>], bias: Option<&[f32]>, out: Output<'_>) {
    let Some(first) = terms.first() else { return };
    let n = first.weight.n();
    assert!(terms.iter().all(|term| term.weight.n() == n), "the weights of one product have different shapes");
    run(threads, isa, Side::Forward, terms, bias, n, out);
}

/// Computes the backward product dx `[rows, k]` (+)= Σ over terms dy `[rows, n]` · weight. All weights have the same k.
pub fn backward(threads: &Threads, isa: Isa, terms: &[Term<'_>], out: Output<'_>) {
    let Some(first) = terms.first() else { return };
    let k = first.weight.k();
    assert!(terms.iter().all(|term| term.weight.k() == k), "the weights of one product have different shapes");
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
    let target = Target::new(out, 0..width);
    let start = target.start(bias);
    let size = terms.iter().map(|term| term.weight.n() * term.weight.k()).sum();
    for term in terms {
        Inputs::of(term, 0).check(rows, if side == Side::Forward { term.weight.k() } else { term.weight.n() });
    }
    let call = next_call();
    let job = |index: usize| {
        let start = if index == 0 { start } else { Start::Add };
        let inputs = Inputs::of(&terms[index], 0);
        Job { slot: index.min(1), ..Job::new(side, terms[index].weight, inputs, start, &target, call) }
    };
    for first in (0..terms.len()).step_by(2) {
        let pair = [job(first), job((first + 1).min(terms.len() - 1))];
        spread(threads, isa, &pair[..(terms.len() - first).min(2)], rows, (width, size));
    }
}

/// Computes the sum of one or two products with all threads; each row takes `size` multiply-adds.
fn spread(threads: &Threads, isa: Isa, jobs: &[Job<'_>], rows: usize, (width, size): (usize, usize)) {
    assert!(isa.runs(), "{isa} does not run on this machine");
    let cell = |jobs: &[Job<'_>], rows: Range<usize>, panels: Range<usize>| {
        SCRATCH.with_borrow_mut(|scratch| run_jobs(isa, jobs, scratch, rows, panels));
    };
    #[cfg(target_arch = "x86_64")]
    if isa.rounds_inputs() && pairs::shares(jobs, rows) {
        return shared::spread(threads, isa, jobs, rows, width);
    }
    divide_work(threads, isa, jobs[0].side, rows, width, size, |rows, panels| cell(jobs, rows, panels));
}

/// Inputs packed once for many calls of [`forward_panels`]; by default each call packs its own.
#[derive(Clone, Copy, Debug, Default)]
pub struct SharedInputs {
    #[cfg(target_arch = "x86_64")]
    tiled: Option<pairs::Tiled>,
}

impl SharedInputs {
    /// The packed inputs from a row on, which must be a multiple of 16.
    pub fn starting_at(self, row: usize) -> SharedInputs {
        assert!(row.is_multiple_of(16), "rows are packed in groups of 16");
        SharedInputs {
            #[cfg(target_arch = "x86_64")]
            tiled: self.tiled.map(|tiled| tiled.starting_at(row)),
        }
    }
}

/// Packs inputs x `[rows, k]` once for all calls with this weight inside `f`, if that is worthwhile.
pub fn with_shared_inputs<T>(
    threads: &Threads,
    isa: Isa,
    x: &[f32],
    rows: usize,
    weight: &PackedMatrix,
    f: impl FnOnce(SharedInputs) -> T,
) -> T {
    #[cfg(target_arch = "x86_64")]
    if isa.rounds_inputs() {
        let inputs = Inputs { values: x, stride: weight.k(), first_row: 0, first: 0 };
        inputs.check(rows, weight.k());
        return shared::with_shared_inputs(threads, inputs, rows, weight, |tiled| f(SharedInputs { tiled }));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (threads, isa, x, rows, weight);
    f(SharedInputs::default())
}

/// Computes [`forward`] with one weight for the outputs of some panels, on the calling thread, for the head, which is
/// computed part by part. Column 0 of y is output `panels.start * PANEL`; `bias` covers all outputs. The bits are the
/// same as in the whole product.
pub fn forward_panels(
    isa: Isa,
    term: &Term<'_>,
    shared_inputs: SharedInputs,
    bias: Option<&[f32]>,
    panels: Range<usize>,
    out: Output<'_>,
) {
    assert!(isa.runs(), "{isa} does not run on this machine");
    #[cfg(not(target_arch = "x86_64"))]
    let SharedInputs {} = shared_inputs;
    let (rows, inputs) = (out.rows, Inputs::of(term, 0));
    inputs.check(rows, term.weight.k());
    let target = Target::new(out, outputs_of(&panels, term.weight.n()));
    let job = Job {
        #[cfg(target_arch = "x86_64")]
        tiled: shared_inputs.tiled,
        ..Job::new(Side::Forward, term.weight, inputs, target.start(bias), &target, next_call())
    };
    SCRATCH.with_borrow_mut(|scratch| run_jobs(isa, &[job], scratch, 0..rows, panels));
}

/// Computes dx `[rows, k]` (+)= dy · weight over the outputs of some panels, on the calling thread. Column 0 of `dy` is
/// output `panels.start * PANEL`. Each sum is a chain over the outputs in order: adding consecutive ranges gives the
/// same bits as one call.
pub fn backward_panels(isa: Isa, weight: &PackedMatrix, panels: Range<usize>, dy: Rows<'_>, out: Output<'_>) {
    assert!(isa.runs(), "{isa} does not run on this machine");
    let outputs = outputs_of(&panels, weight.n());
    assert_eq!(dy.width, outputs.len(), "dy has other outputs");
    let inputs = Inputs { values: dy.values, stride: dy.stride, first_row: 0, first: outputs.start };
    let rows = out.rows;
    inputs.check(rows, dy.width);
    let target = Target::new(out, 0..weight.k());
    let mut job = Job::new(Side::Backward, weight, inputs, target.start(None), &target, next_call());
    job.sum = outputs;
    SCRATCH.with_borrow_mut(|scratch| run_jobs(isa, &[job], scratch, 0..rows, 0..weight.k().div_ceil(PANEL)));
}

/// The range of outputs in these panels.
fn outputs_of(panels: &Range<usize>, n: usize) -> Range<usize> {
    assert!(panels.start <= panels.end && panels.end <= n.div_ceil(PANEL), "no such panels");
    (panels.start * PANEL).min(n)..(panels.end * PANEL).min(n)
}

/// Computes a linear layer with its adapter, y `[rows, n]` = bias + x·Wᵀ + (x·Aᵀ)·Bᵀ, or y += the products, as one unit
/// of work. If several threads share rows, each of them computes x·Aᵀ itself.
pub fn linear(threads: &Threads, isa: Isa, linear: Linear<'_>, out: Output<'_>) {
    let Linear { x, stride, weight, bias, residual, lora } = linear;
    let (n, k, rows) = (weight.n(), weight.k(), out.rows);
    let x = Inputs { values: x, stride, first_row: 0, first: 0 };
    x.check(rows, k);
    let target = Target::new(out, 0..n);
    let start = match residual {
        Some(values) => {
            assert!(
                bias.is_none() && !target.add && values.len() >= rows * n,
                "a residual with another shape, or more than one initial value"
            );
            Start::Rows(StartRows { values, stride: n })
        }
        None => target.start(bias),
    };
    let call = next_call();
    let mut size = n * k;
    let mut hidden_out = None;
    let adapter = lora.map(|lora| {
        let Lora { a, b, parts, hidden } = lora;
        let rank = a.n();
        assert!(a.k() == k && b.n() == n && b.k() == rank, "an adapter of another shape");
        assert!(parts.iter().all(|(outputs, ranks)| outputs.end <= n && ranks.end <= rank), "parts beyond the adapter");
        if let Some(hidden) = hidden {
            assert!(hidden.len() >= rows * rank, "too few hidden values");
            hidden_out = Some(Shared::new(hidden));
        }
        size += rank * (n + k);
        (a, b, parts)
    });
    let base = Job::new(Side::Forward, weight, x, start, &target, call);
    let Some((a, b, parts)) = adapter else { return spread(threads, isa, &[base], rows, (n, size)) };
    let rank = a.n();
    assert!(isa.runs(), "{isa} does not run on this machine");
    #[cfg(target_arch = "x86_64")]
    if isa.rounds_inputs()
        && pairs::shares(std::slice::from_ref(&base), rows)
        && [a, b].iter().all(|factor| factor.dtype() == PackDtype::Bf16)
    {
        return shared::linear(threads, isa, &base, (a, b, parts), hidden_out, rows);
    }
    divide_work(threads, isa, Side::Forward, rows, n, size, |rows, panels| {
        SCRATCH.with_borrow_mut(|scratch| {
            // Pack the inputs of this many rows once for both the weight and the adapter.
            let at_once = if isa.rounds_inputs() { rows.len() } else { product::ROWS };
            for rows in product::balanced(rows, at_once) {
                let of = Some((call, rows.clone()));
                let mut hidden = std::mem::take(&mut scratch.hidden);
                if scratch.hidden_of != of {
                    hidden.resize(hidden.len().max(rows.len() * rank), 0.0);
                    let out = Output { y: &mut hidden, stride: rank, rows: rows.len(), add: false };
                    let target = Target { first_row: rows.start, ..Target::new(out, 0..rank) };
                    let job = Job::new(Side::Forward, a, x, Start::Zero, &target, call);
                    run_jobs(isa, &[job], scratch, rows.clone(), 0..a.panels());
                    scratch.hidden_of = of;
                }
                let inputs = Inputs { values: &hidden, stride: rank, first_row: rows.start, first: 0 };
                let low_rank = Job { parts, slot: 1, ..Job::new(Side::Forward, b, inputs, Start::Add, &target, call) };
                run_jobs(isa, &[base.clone(), low_rank], scratch, rows.clone(), panels.clone());
                if let Some(out) = hidden_out
                    && panels.start == 0
                {
                    // Safety: only the cell with these rows and panel 0 writes here, and the length was checked.
                    let out = unsafe { out.part(rows.start * rank..rows.end * rank) };
                    out.copy_from_slice(&hidden[..rows.len() * rank]);
                }
                scratch.hidden = hidden;
            }
        });
    });
}

/// The arguments of a linear layer's backward pass.
#[derive(Debug)]
pub struct LinearBackward<'a> {
    /// The gradient dL/dy of the layer's output, `stride` elements apart, as many rows as dx has.
    pub dy: &'a [f32],
    /// Number of elements from one row to the next.
    pub stride: usize,
    /// The weight `[n, k]`.
    pub weight: &'a PackedMatrix,
    /// The LoRA adapter of the layer.
    pub lora: Option<LoraBackward<'a>>,
}

/// The arguments of a LoRA adapter's backward pass.
#[derive(Debug)]
pub struct LoraBackward<'a> {
    /// The stacked factors A, `[rank, k]`.
    pub a: &'a PackedMatrix,
    /// The transposed factor B of each module `[its ranks, its outputs]`, scaled by s.
    pub b_transposed: &'a [PackedMatrix],
    /// The outputs of each module, and the LoRA ranks that they read.
    pub parts: &'a [Part],
    /// Receives dh = dy·B `[rows, rank]`.
    pub dh: &'a mut [f32],
    /// Whether dh·A is added to dx; false if LoRA dropout comes in between.
    pub adds: bool,
}

/// Computes a linear layer's gradients dx `[rows, k]` (+)= dy·W + (dy·B)·A, and dh = dy·B.
pub fn linear_backward(threads: &Threads, isa: Isa, linear: LinearBackward<'_>, out: Output<'_>) {
    let LinearBackward { dy, stride, weight, lora } = linear;
    let of_weight = Term { x: dy, stride, weight };
    let Some(LoraBackward { a, b_transposed, parts, dh, adds }) = lora else {
        return backward(threads, isa, &[of_weight], out);
    };
    let (rows, rank) = (out.rows, a.n());
    assert!(a.k() == weight.k() && dh.len() >= rows * rank && parts.len() == b_transposed.len());
    #[cfg(target_arch = "x86_64")]
    if isa.rounds_inputs() && shared::supports_backward(&of_weight, (a, b_transposed, parts), rows) {
        return shared::linear_backward(threads, isa, of_weight, (a, b_transposed, parts), (dh, adds), out);
    }
    for ((outputs, ranks), b) in parts.iter().zip(b_transposed) {
        let to = Output { y: &mut dh[ranks.start..], stride: rank, rows, add: false };
        forward(threads, isa, &[Term { x: &dy[outputs.start..], stride, weight: b }], None, to);
    }
    let terms = [of_weight, Term { x: dh, stride: rank, weight: a }];
    backward(threads, isa, &terms[..if adds { 2 } else { 1 }], out);
}

/// Number of multiply-adds below which one thread is faster than two: a few microseconds of work.
const ALONE: usize = 1 << 18;
/// Number of multiply-adds below which one thread is faster than two, for AMX tiles, which always multiply 16 rows.
const ALONE_WITH_TILES: usize = 3 << 20;

/// Number of rows up to which threads share only the outputs and not the rows, so that the weights are read once.
const ONE_CELL: usize = 96;

/// Divides a product of `rows` rows and a range of outputs among the threads; each row takes `size` multiply-adds.
fn divide_work(
    threads: &Threads,
    isa: Isa,
    side: Side,
    rows: usize,
    width: usize,
    size: usize,
    f: impl Fn(Range<usize>, Range<usize>) + Sync,
) {
    let panels = width.div_ceil(PANEL);
    if rows == 0 || panels == 0 {
        return;
    }
    assert!(isa.runs(), "{isa} does not run on this machine");
    let (least_rows, alone) = match isa {
        Isa::Amx => (16, ALONE_WITH_TILES),
        Isa::Avx512Bf16 => (1, 2 * ALONE),
        Isa::Portable | Isa::Avx2 | Isa::Avx512 => (1, ALONE),
    };
    if rows.max(least_rows).saturating_mul(size) <= alone {
        return f(0..rows, 0..panels);
    }
    // Keep many rows together, so that each block of weights is transposed only once for them.
    let row_multiple = match (isa, side) {
        (Isa::Amx, Side::Forward) => 256,
        (Isa::Amx, Side::Backward) => 512,
        _ if rows <= ONE_CELL => rows,
        _ => 48,
    };
    threads.grid(rows, row_multiple, panels, 1, f);
}

/// Computes products on the calling thread, and adds them to their outputs. The machine must
/// support the instruction set.
fn run_jobs(isa: Isa, jobs: &[Job<'_>], scratch: &mut Scratch, rows: Range<usize>, panels: Range<usize>) {
    if rows.is_empty() || panels.is_empty() {
        return;
    }
    if jobs.iter().any(|job| job.sum.is_empty()) {
        for job in jobs {
            match job.sum.is_empty() {
                true => job.empty(rows.clone(), panels.clone()),
                false => run_jobs(isa, std::slice::from_ref(job), scratch, rows.clone(), panels.clone()),
            }
        }
        return;
    }
    // Safety: the machine supports the instruction set, and the bounds were checked when the job was created.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        if isa.rounds_inputs() && jobs.iter().all(|job| job.weight.dtype() == PackDtype::Bf16) {
            return match isa {
                Isa::Amx => amx::product(jobs, scratch, rows, panels),
                _ => dpbf16::product(jobs, scratch, rows, panels),
            };
        }
        product::product(tile::tile_kernels(isa), jobs, scratch, rows, panels);
    }
}

/// The largest difference between the products of two instruction sets for one small odd shape, forward and backward.
#[cfg(target_arch = "x86_64")]
pub(super) fn apart(one: Isa, other: Isa, (rows, n, k): (usize, usize, usize)) -> f32 {
    let values = |len: usize, step: usize| -> Vec<f32> {
        // Small multiples of 1/128 are exact in bf16.
        (0..len).map(|index| (index * step % 255) as f32 / 128.0 - 1.0).collect()
    };
    let weight = PackedMatrix::new(&values(n * k, 37), k, PackDtype::Bf16);
    let of = |isa, side, width: usize, depth: usize| {
        let (x, mut y) = (values(rows * depth, 91), values(rows * width, 53));
        let target = Target::new(Output { y: &mut y, stride: width, rows, add: true }, 0..width);
        let inputs = Inputs { values: &x, stride: depth, first_row: 0, first: 0 };
        let job = Job::new(side, &weight, inputs, Start::Add, &target, next_call());
        SCRATCH.with_borrow_mut(|scratch| run_jobs(isa, &[job], scratch, 0..rows, 0..width.div_ceil(PANEL)));
        y
    };
    let mut apart = 0f32;
    for (side, width, depth) in [(Side::Forward, n, k), (Side::Backward, k, n)] {
        for (a, b) in of(one, side, width, depth).iter().zip(of(other, side, width, depth)) {
            // A NaN counts as an infinite difference.
            apart = if (a - b).abs() <= apart { apart } else { (a - b).abs() };
        }
    }
    apart
}

/// Returns a new id for each public call, which identifies inputs that are already packed.
fn next_call() -> u64 {
    static CALLS: AtomicU64 = AtomicU64::new(1);
    CALLS.fetch_add(1, Ordering::Relaxed)
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}
