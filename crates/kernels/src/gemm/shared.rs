//! Products of many rows with AMX or AVX512-BF16: inputs or weights that several threads or products read are packed
//! once for all of them.

use std::cell::RefCell;
use std::ops::Range;

use super::super::amx::Amx;
use super::super::dpbf16::Dpbf16;
use super::super::isa::Isa;
use super::super::pack::{Line, PANEL, PackDtype, PackedMatrix};
use super::super::threads::{Shared, Threads};
use super::job::{Inputs, Job, Side, Start, Target};
use super::pairs::{self, Multiply, ROWS, Tiled};
use super::{Output, Part, SCRATCH, Term, next_call, product, run_jobs};

thread_local! {
    /// Buffers of the calling thread for packed inputs and weights.
    static BUFFERS: RefCell<Buffers> = RefCell::default();
}

/// Packed inputs and transposed weights of two products, and the values x·Aᵀ or dy·B between a layer and its adapter.
#[derive(Default)]
struct Buffers {
    inputs: [Vec<Line>; 2],
    transposed: [Vec<Line>; 2],
    hidden: Vec<Line>,
}

/// Number of rows in a cell of an instruction set, few enough that their inputs stay in the second-level cache.
fn cell_rows(isa: Isa) -> usize {
    if isa == Isa::Amx { Amx::ROWS_AT_ONCE } else { Dpbf16::ROWS_AT_ONCE }
}

/// Computes the sum of one or two products with all threads.
pub(super) fn spread(threads: &Threads, isa: Isa, jobs: &[Job<'_>], rows: usize, width: usize) {
    BUFFERS.with_borrow_mut(|buffers| {
        let mut pair = [jobs[0].clone(), jobs[jobs.len() - 1].clone()];
        let pair = &mut pair[..jobs.len()];
        transpose(threads, isa, pair, rows, &mut buffers.transposed);
        for rows in product::balanced(0..rows, pairs::rows_shared(pair, cell_rows(isa))) {
            for (job, buffer) in pair.iter_mut().zip(&mut buffers.inputs) {
                job.tiled = Some(pairs::share(threads, job, &rows, buffer));
            }
            grid(threads, isa, pair, rows, width);
        }
    });
}

/// Transposes the weights of backward products once for all threads, if there are more rows than one cell has.
fn transpose(threads: &Threads, isa: Isa, jobs: &mut [Job<'_>], rows: usize, buffers: &mut [Vec<Line>; 2]) {
    for (job, buffer) in jobs.iter_mut().zip(buffers) {
        if job.side == Side::Backward && rows > cell_rows(isa) {
            job.transposed = Some(pairs::transpose_all(threads, job.weight, buffer));
        }
    }
}

/// Packs the inputs for a weight once for all calls inside `f`, if there are enough rows.
pub(super) fn with_shared_inputs<T>(
    threads: &Threads,
    inputs: Inputs<'_>,
    rows: usize,
    weight: &PackedMatrix,
    f: impl FnOnce(Option<Tiled>) -> T,
) -> T {
    thread_local! {
        static LAID: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
    }
    let (target, call) = (Target::new(Output { y: &mut [], stride: 0, rows: 0, add: false }, 0..0), next_call());
    let job = Job::new(Side::Forward, weight, inputs, Start::Zero, &target, call);
    if !pairs::shares(std::slice::from_ref(&job), rows) {
        return f(None);
    }
    LAID.with_borrow_mut(|lines| f(Some(pairs::share(threads, &job, &(0..rows), lines))))
}

/// Divides a product into cells of whole tiles, with few enough rows that their inputs stay in the second-level
/// cache, and computes them.
fn grid(threads: &Threads, isa: Isa, jobs: &[Job<'_>], rows: Range<usize>, width: usize) {
    let (count, least) = (threads.count(), rows.len().div_ceil(cell_rows(isa)));
    // Every thread gets the same number of cells, and of rows, except for a tile.
    let cells = if least < count { least } else { least.next_multiple_of(count).min(threads.most_cells()) };
    // AMX multiplies two tiles of rows at a time.
    let tiles = if isa == Isa::Amx { 2 * ROWS } else { ROWS };
    threads.grid_of(cells, (rows.len(), tiles), (width.div_ceil(PANEL), 1), |some, panels| {
        let some = rows.start + some.start..rows.start + some.end;
        SCRATCH.with_borrow_mut(|scratch| run_jobs(isa, jobs, scratch, some, panels));
    });
}

/// Computes a linear layer and its adapter: x is packed once for both.
pub(super) fn linear(
    threads: &Threads,
    isa: Isa,
    base: &Job<'_>,
    (a, b, parts): (&PackedMatrix, &PackedMatrix, &[Part]),
    hidden_out: Option<Shared<f32>>,
    rows: usize,
) {
    let rank = a.n();
    BUFFERS.with_borrow_mut(|buffers| {
        let Buffers { inputs: [inputs, low_rank_inputs], hidden, .. } = buffers;
        for rows in product::balanced(0..rows, pairs::rows_shared(std::slice::from_ref(base), cell_rows(isa))) {
            let tiled = Some(pairs::share(threads, base, &rows, inputs));
            // Safety: `room` returns memory for this many elements.
            let hidden = unsafe {
                let values = product::room(hidden, rows.len() * rank);
                std::slice::from_raw_parts_mut(values, rows.len() * rank)
            };
            let out = Output { y: hidden, stride: rank, rows: rows.len(), add: false };
            let to_hidden = Target { first_row: rows.start, ..Target::new(out, 0..rank) };
            let down = Job { tiled, ..Job::new(Side::Forward, a, base.inputs, Start::Zero, &to_hidden, base.call) };
            grid(threads, isa, std::slice::from_ref(&down), rows.clone(), rank);
            if let Some(out) = hidden_out {
                // Safety: no other thread writes these rows, and the length was checked.
                unsafe { out.part(rows.start * rank..rows.end * rank) }.copy_from_slice(hidden);
            }
            let inputs = Inputs { values: hidden, stride: rank, first_row: rows.start, first: 0 };
            let mut up = Job { parts, slot: 1, start: Start::Add, inputs, weight: b, sum: 0..rank, ..base.clone() };
            up.tiled = Some(pairs::share(threads, &up, &rows, low_rank_inputs));
            grid(threads, isa, &[Job { tiled, ..base.clone() }, up], rows, base.columns.len());
        }
    });
}

/// Whether [`linear_backward`] supports these arguments: all weights are in bf16, and every module's outputs begin and
/// end with a block of dy.
pub(super) fn supports_backward(
    of_weight: &Term<'_>,
    (a, b_transposed, parts): (&PackedMatrix, &[PackedMatrix], &[Part]),
    rows: usize,
) -> bool {
    let weight = of_weight.weight;
    let is_whole = |at: usize| at.is_multiple_of(PANEL) || at == weight.n();
    pairs::shares_rows(rows)
        && weight.n() * weight.k() > 0
        && [weight, a].into_iter().chain(b_transposed).all(|pack| pack.dtype() == PackDtype::Bf16)
        && parts.iter().all(|(outputs, _)| is_whole(outputs.start) && is_whole(outputs.end))
}

/// Computes the backward pass of a linear layer and its adapter: dy is packed once for both.
pub(super) fn linear_backward(
    threads: &Threads,
    isa: Isa,
    of_weight: Term<'_>,
    (a, b_transposed, parts): (&PackedMatrix, &[PackedMatrix], &[Part]),
    (dh, adds): (&mut [f32], bool),
    out: Output<'_>,
) {
    let (rows, rank, width) = (out.rows, a.n(), of_weight.weight.k());
    let dy = Inputs::of(&of_weight, 0);
    dy.check(rows, of_weight.weight.n());
    let (target, call) = (Target::new(out, 0..width), next_call());
    let start = target.start(None);
    BUFFERS.with_borrow_mut(|buffers| {
        let base = Job::new(Side::Backward, of_weight.weight, dy, start, &target, call);
        let inputs = Inputs { values: &[], stride: rank, first_row: 0, first: 0 };
        let mut jobs =
            [base.clone(), Job { slot: 1, ..Job::new(Side::Backward, a, inputs, Start::Add, &target, call) }];
        let jobs = &mut jobs[..if adds { 2 } else { 1 }];
        transpose(threads, isa, jobs, rows, &mut buffers.transposed);
        let [of_dy, of_dh] = &mut buffers.inputs;
        for rows in product::balanced(0..rows, pairs::rows_shared(std::slice::from_ref(&base), cell_rows(isa))) {
            let tiled = pairs::share(threads, &base, &rows, of_dy);
            jobs[0].tiled = Some(tiled);
            for ((outputs, ranks), b) in parts.iter().zip(b_transposed) {
                let y = &mut dh[rows.start * rank + ranks.start..rows.end * rank];
                let to = Output { y, stride: rank, rows: rows.len(), add: false };
                let to = Target { first_row: rows.start, ..Target::new(to, 0..ranks.len()) };
                let tiled = Some(tiled.steps(outputs));
                let job = Job { tiled, ..Job::new(Side::Forward, b, dy, Start::Zero, &to, call) };
                grid(threads, isa, std::slice::from_ref(&job), rows.clone(), ranks.len());
            }
            if let Some(job) = jobs.get_mut(1) {
                let laid_out = Job { inputs: Inputs { values: dh, ..inputs }, ..job.clone() };
                job.tiled = Some(pairs::share(threads, &laid_out, &rows, of_dh));
            }
            grid(threads, isa, jobs, rows, width);
        }
    });
}
