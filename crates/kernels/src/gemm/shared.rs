//! Products of many rows with tiles: what several cells or products read is laid out once for all threads.

use std::cell::RefCell;
use std::ops::Range;

use super::super::amx::{self, ROWS, Tiled};
use super::super::dpbf16;
use super::super::isa::Isa;
use super::super::pack::{Line, PANEL, PackDtype, PackedMatrix};
use super::super::threads::{Shared, Threads};
use super::job::{Inputs, Job, Side, Start, Target};
use super::{Output, Part, SCRATCH, Term, next_call, product, run_jobs};

thread_local! {
    /// Of a call of this thread.
    static BUFFERS: RefCell<Buffers> = RefCell::default();
}

/// Inputs laid out for tiles and weights turned of two products, and what is between a layer and its adapter.
#[derive(Default)]
struct Buffers {
    inputs: [Vec<Line>; 2],
    turned: [Vec<Line>; 2],
    hidden: Vec<Line>,
}

/// Rows of a cell, few enough that their inputs stay in the second-level cache.
fn cell_rows(isa: Isa) -> usize {
    if isa == Isa::Amx { amx::ROWS_AT_ONCE } else { dpbf16::ROWS_AT_ONCE }
}

/// The sum of one or two products.
pub(super) fn spread(threads: &Threads, isa: Isa, jobs: &[Job<'_>], rows: usize, width: usize) {
    BUFFERS.with_borrow_mut(|buffers| {
        let mut pair = [jobs[0].clone(), jobs[jobs.len() - 1].clone()];
        let pair = &mut pair[..jobs.len()];
        turn(threads, isa, pair, rows, &mut buffers.turned);
        for rows in product::balanced(0..rows, amx::rows_shared(pair, cell_rows(isa))) {
            for (job, buffer) in pair.iter_mut().zip(&mut buffers.inputs) {
                job.tiled = Some(amx::share(threads, job, &rows, buffer));
            }
            grid(threads, isa, pair, rows, width);
        }
    });
}

/// The weights that are used the other way, where rows are more than one cell.
fn turn(threads: &Threads, isa: Isa, jobs: &mut [Job<'_>], rows: usize, buffers: &mut [Vec<Line>; 2]) {
    for (job, buffer) in jobs.iter_mut().zip(buffers) {
        if job.side == Side::Backward && rows > cell_rows(isa) {
            job.turned = Some(amx::turn_all(threads, job.weight, buffer));
        }
    }
}

/// Inputs of a weight laid out while `f` runs, where there are rows enough.
pub(super) fn with_laid<T>(
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
    if !amx::shares(std::slice::from_ref(&job), rows) {
        return f(None);
    }
    LAID.with_borrow_mut(|lines| f(Some(amx::share(threads, &job, &(0..rows), lines))))
}

/// Cells of whole tiles, few enough rows that their inputs stay in the second-level cache.
fn grid(threads: &Threads, isa: Isa, jobs: &[Job<'_>], rows: Range<usize>, width: usize) {
    let cells = rows.len().div_ceil(cell_rows(isa));
    let multiple = rows.len().div_ceil(cells).next_multiple_of(2 * ROWS);
    threads.grid(rows.len(), multiple, width.div_ceil(PANEL), 1, |some, panels| {
        let some = rows.start + some.start..rows.start + some.end;
        SCRATCH.with_borrow_mut(|scratch| run_jobs(isa, jobs, scratch, some, panels));
    });
}

/// A linear layer and its adapter: x is laid out once for both.
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
        for rows in product::balanced(0..rows, amx::rows_shared(std::slice::from_ref(base), cell_rows(isa))) {
            let tiled = Some(amx::share(threads, base, &rows, inputs));
            // Safety: there is room for so many.
            let hidden = unsafe {
                let values = product::room(hidden, rows.len() * rank);
                std::slice::from_raw_parts_mut(values, rows.len() * rank)
            };
            let out = Output { y: hidden, stride: rank, rows: rows.len(), add: false };
            let to_hidden = Target { first_row: rows.start, ..Target::new(out, 0..rank) };
            let down = Job { tiled, ..Job::new(Side::Forward, a, base.inputs, Start::Zero, &to_hidden, base.call) };
            grid(threads, isa, std::slice::from_ref(&down), rows.clone(), rank);
            if let Some(out) = hidden_out {
                // Safety: nobody else writes these rows, and the length was checked.
                unsafe { out.part(rows.start * rank..rows.end * rank) }.copy_from_slice(hidden);
            }
            let inputs = Inputs { values: hidden, stride: rank, first_row: rows.start, first: 0 };
            let mut up = Job { parts, slot: 1, start: Start::Add, inputs, weight: b, sum: 0..rank, ..base.clone() };
            up.tiled = Some(amx::share(threads, &up, &rows, low_rank_inputs));
            grid(threads, isa, &[Job { tiled, ..base.clone() }, up], rows, base.columns.len());
        }
    });
}

/// Whether [`linear_backward`] takes this: all in tiles, and every part begins and ends with a block of dy.
pub(super) fn goes_back(
    of_weight: &Term<'_>,
    (a, b_transposed, parts): (&PackedMatrix, &[PackedMatrix], &[Part]),
    rows: usize,
) -> bool {
    let weight = of_weight.weight;
    let is_whole = |at: usize| at.is_multiple_of(PANEL) || at == weight.n();
    amx::shares_rows(rows)
        && weight.n() * weight.k() > 0
        && [weight, a].into_iter().chain(b_transposed).all(|pack| pack.dtype() == PackDtype::Bf16)
        && parts.iter().all(|(outputs, _)| is_whole(outputs.start) && is_whole(outputs.end))
}

/// The way back through a linear layer and its adapter: dy is laid out once for both.
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
        turn(threads, isa, jobs, rows, &mut buffers.turned);
        let [of_dy, of_dh] = &mut buffers.inputs;
        for rows in product::balanced(0..rows, amx::rows_shared(std::slice::from_ref(&base), cell_rows(isa))) {
            let tiled = amx::share(threads, &base, &rows, of_dy);
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
                job.tiled = Some(amx::share(threads, &laid_out, &rows, of_dh));
            }
            grid(threads, isa, jobs, rows, width);
        }
    });
}
