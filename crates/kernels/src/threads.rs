//! A team of threads. Idle threads spin for a moment before they are parked, because a product of a small model takes
//! microseconds, as long as waking a thread.
//!
//! Work is divided into cells that the threads claim one after another, each from its own region first. A thread that
//! is descheduled delays only the cell it is working on, and does not delay a round that it has not entered.

use std::cell::{Cell, UnsafeCell};
use std::num::NonZero;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::{JoinHandle, Thread};

use crate::lending::Lender;

/// Number of polls before a waiting thread yields its core. A spinning thread whose partner was descheduled by another
/// process would otherwise use the time its partner needs.
const SPINS: u32 = 4000;
/// Number of yields before a thread parks.
const YIELDS: u32 = 16;
/// Number of cells per thread: more than one, so that a fast thread can take cells from a slow one.
const CELLS: usize = 4;

type Work<'a> = dyn Fn(usize) + Sync + 'a;

thread_local! {
    /// Whether this thread is working on a cell, so that nested calls run on it alone.
    static WORKING: Cell<bool> = const { Cell::new(false) };
}

/// A team of threads: the calling thread has number 0, the workers have 1, 2, …
#[derive(Debug)]
pub struct Threads {
    team: Arc<Team>,
    workers: Vec<JoinHandle<()>>,
    /// Locked while the team works; only one round of work runs at a time.
    running: Mutex<()>,
}

struct Team {
    /// The state of the current round: `round << 32 | OPEN? | workers inside`.
    state: AtomicU64,
    leaving: AtomicBool,
    panicked: AtomicBool,
    /// The work of the current round: written while no worker is inside and the round is closed, published by `state`.
    piece: UnsafeCell<Option<Piece>>,
    /// The next cell to claim in each thread's region.
    next: Vec<Next>,
    /// Whether the calling thread is parked until the last worker leaves the round.
    waiting: AtomicBool,
    caller: Mutex<Option<Thread>>,
    /// Number of threads that may take part in a round.
    limit: AtomicUsize,
    /// Where threads are lent to another process.
    lender: OnceLock<Lender>,
}

#[derive(Clone, Copy)]
struct Piece {
    work: *const Work<'static>,
    cells: usize,
}

/// A counter on a cache line of its own.
#[repr(align(128))]
struct Next(AtomicUsize);

/// Flag in the state: workers may enter the round.
const OPEN: u64 = 1 << 31;
/// Mask of the state: the number of workers inside the round.
const INSIDE: u64 = OPEN - 1;

// Safety: `piece` is written only by the one thread that holds `Threads::running`, while the round is closed and no
// worker is inside, and read only by workers inside.
unsafe impl Sync for Team {}
unsafe impl Send for Team {}

impl std::fmt::Debug for Team {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Team").field("state", &self.state).finish_non_exhaustive()
    }
}

impl Threads {
    /// Creates a team of `count` threads, the caller included; fewer if the system provides no more threads.
    pub fn new(count: usize) -> Threads {
        let count = count.max(1);
        let team = Arc::new(Team {
            state: AtomicU64::new(0),
            leaving: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
            piece: UnsafeCell::new(None),
            next: std::iter::repeat_with(|| Next(AtomicUsize::new(0))).take(count).collect(),
            waiting: AtomicBool::new(false),
            caller: Mutex::new(None),
            limit: AtomicUsize::new(count),
            lender: OnceLock::new(),
        });
        let workers = (1..count).map_while(|number| {
            let team = team.clone();
            std::thread::Builder::new().name(format!("kernel-{number}")).spawn(move || team.worker(number)).ok()
        });
        let workers = workers.collect();
        Threads { team, workers, running: Mutex::new(()) }
    }

    /// Creates a team with one thread per core.
    pub fn of_machine() -> Threads {
        Threads::new(std::thread::available_parallelism().map_or(1, NonZero::get))
    }

    /// Number of threads in the team, the caller included.
    pub fn count(&self) -> usize {
        self.workers.len() + 1
    }

    /// Leaves out the threads from number `threads` on, from the next cell of the current round until another limit is set.
    /// The calling thread always works.
    pub fn limit(&self, threads: usize) {
        self.team.limit.store(threads, Ordering::Relaxed);
    }

    /// Lends threads to another process. Only the first call of a team has an effect.
    pub fn lend(&self, lender: Lender) {
        drop(self.team.lender.set(lender));
    }

    /// Runs `f(number)` once for every number below [`Threads::count`]; returns when all are done. Usually each number
    /// runs on its own thread, but another thread takes the number of a late one. A panic in any call of
    /// `f` is raised here.
    pub fn run(&self, f: &Work<'_>) {
        self.cells(self.count(), f);
    }

    /// Runs `f(cell)` once for every cell below `cells`, in no particular order; returns when all are done. A panic in
    /// any call of `f` is raised here. A nested call runs everything on the calling thread.
    pub fn cells(&self, cells: usize, f: &Work<'_>) {
        if cells < 2 || WORKING.get() {
            return (0..cells).for_each(f);
        }
        let team = &*self.team;
        if self.workers.is_empty() {
            let _round = team.lender.get().map(Round::begin);
            return (0..cells).for_each(f);
        }
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        // Safety: the round is closed and no worker is inside; the pointer is used only inside the round, which ends
        // before this call returns.
        unsafe {
            let work = std::mem::transmute::<*const Work<'_>, *const Work<'static>>(std::ptr::from_ref(f));
            *team.piece.get() = Some(Piece { work, cells });
        }
        for (number, next) in team.next.iter().enumerate() {
            next.0.store(region(cells, number, team.next.len()).start, Ordering::Relaxed);
        }
        let round = (team.state.load(Ordering::Relaxed) >> 32).wrapping_add(1);
        team.state.store(round << 32 | OPEN, Ordering::SeqCst);
        let round = team.lender.get().map(Round::begin);
        for (_, worker) in (1..).zip(&self.workers).filter(|(number, _)| team.takes_part(*number)) {
            // Unparking is cheap if the worker is spinning.
            worker.thread().unpark();
        }
        let mine = catch_unwind(AssertUnwindSafe(|| team.work_through(0, cells, f)));
        team.close();
        drop(round);
        let panicked = team.panicked.swap(false, Ordering::Relaxed);
        drop(running);
        if let Err(panic) = mine {
            resume_unwind(panic);
        }
        assert!(!panicked, "a kernel panicked on another thread");
    }

    /// Divides a grid of rows and columns into cells and runs `f` on them: along the rows if there are enough for all
    /// threads, otherwise along the columns too. Cells begin at multiples of the given sizes. Every element belongs to
    /// exactly one call of `f`.
    pub fn grid(
        &self,
        rows: usize,
        row_multiple: usize,
        columns: usize,
        column_multiple: usize,
        f: impl Fn(Range<usize>, Range<usize>) + Sync,
    ) {
        if rows == 0 || columns == 0 {
            return;
        }
        let row_cells = rows.div_ceil(row_multiple).min(self.most_cells());
        self.grid_of(row_cells, (rows, row_multiple), (columns, column_multiple), f);
    }

    /// Like [`Threads::grid`], for a given number of cells along the rows; rows and columns are given with the numbers that
    /// cells begin at multiples of.
    pub fn grid_of(
        &self,
        row_cells: usize,
        (rows, row_multiple): (usize, usize),
        (columns, column_multiple): (usize, usize),
        f: impl Fn(Range<usize>, Range<usize>) + Sync,
    ) {
        if rows == 0 || columns == 0 {
            return;
        }
        let row_cells = row_cells.clamp(1, rows.div_ceil(row_multiple));
        // Choose a number of cells that gives every thread the same number.
        let even =
            (self.most_cells().div_ceil(row_cells)..).find(|cells| (row_cells * cells).is_multiple_of(self.count()));
        let column_cells = columns.div_ceil(column_multiple).min(even.unwrap_or(1));
        self.cells(row_cells * column_cells, &|cell| {
            let rows = part(rows, row_multiple, cell / column_cells, row_cells);
            f(rows, part(columns, column_multiple, cell % column_cells, column_cells));
        });
    }

    /// Number of cells that a grid is divided into, unless one direction must have more: several for each thread.
    pub fn most_cells(&self) -> usize {
        if self.count() == 1 { 1 } else { self.count() * CELLS }
    }

    /// Runs `f(part, items, values)` once for every part: the items in its range, and `width` values for each of them.
    /// Parts are in order and do not overlap. Everything runs on the calling thread if the work is `small`.
    pub fn over<T: Send, U: Send>(
        &self,
        parts: &[Range<usize>],
        items: &mut [T],
        (values, width): (&mut [U], usize),
        small: bool,
        f: impl Fn(Range<usize>, &mut [T], &mut [U]) + Sync,
    ) {
        let ordered = parts.windows(2).all(|pair| pair[0].end <= pair[1].start);
        assert!(ordered && parts.iter().all(|part| part.start <= part.end), "parts overlap");
        let end = parts.last().map_or(0, |part| part.end);
        assert!(end <= items.len() && end * width <= values.len(), "the parts of the work exceed the buffers");
        let (items, values) = (Shared::new(items), Shared::new(values));
        let one = |cell: usize| {
            let part = parts[cell].clone();
            // Safety: each part's ranges are inside the buffers and do not overlap those of other parts.
            let (items, values) =
                unsafe { (items.part(part.clone()), values.part(part.start * width..part.end * width)) };
            f(part, items, values);
        };
        match small {
            true => (0..parts.len()).for_each(one),
            false => self.cells(parts.len(), &one),
        }
    }

    /// Divides `0..items` into parts, a few for each thread, and runs `f` on each part.
    pub fn split(&self, items: usize, f: impl Fn(Range<usize>) + Sync) {
        self.grid(items, 1, 1, 1, |items, _| f(items));
    }
}

/// The cells of a thread's own region, which it claims first.
fn region(cells: usize, number: usize, count: usize) -> Range<usize> {
    cells * number / count..cells * (number + 1) / count
}

/// The range of part `number` of `count`; no part is empty if there are enough blocks.
fn part(items: usize, multiple: usize, number: usize, count: usize) -> Range<usize> {
    let blocks = items.div_ceil(multiple);
    let at = |number: usize| (blocks * number / count * multiple).min(items);
    at(number)..at(number + 1)
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.team.leaving.store(true, Ordering::SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // Ignore the result: the worker catches its own panics.
            let _ = worker.join();
        }
    }
}

impl Team {
    /// Whether a thread may work now. The calling thread, number 0, always may.
    fn takes_part(&self, number: usize) -> bool {
        let lent = self.lender.get().map_or(0, Lender::lent);
        number == 0 || number < self.limit.load(Ordering::Relaxed).min(self.next.len().saturating_sub(lent))
    }

    /// Claims and runs cells until none are left: first those of the thread's own region, then those of other regions.
    fn work_through(&self, thread: usize, cells: usize, work: &Work<'_>) {
        let count = self.next.len();
        let _inside = Inside::enter();
        for number in (thread..count).chain(0..thread) {
            let end = region(cells, number, count).end;
            while self.takes_part(thread) {
                let cell = self.next[number].0.fetch_add(1, Ordering::Relaxed);
                if cell >= end {
                    break;
                }
                work(cell);
            }
        }
    }

    /// Closes the round: no worker can enter any more, and all have left when this returns.
    fn close(&self) {
        let mut state = self.state.fetch_and(!OPEN, Ordering::SeqCst);
        let mut waits = 0u32;
        while state & INSIDE > 0 {
            waits = waits.saturating_add(1);
            match waits {
                ..SPINS => std::hint::spin_loop(),
                w if w < SPINS + YIELDS => std::thread::yield_now(),
                _ => {
                    *self.caller.lock().unwrap_or_else(PoisonError::into_inner) = Some(std::thread::current());
                    self.waiting.store(true, Ordering::SeqCst);
                    if self.state.load(Ordering::SeqCst) & INSIDE > 0 {
                        std::thread::park();
                    }
                    self.waiting.store(false, Ordering::SeqCst);
                }
            }
            state = self.state.load(Ordering::SeqCst);
        }
    }

    fn worker(&self, number: usize) {
        let mut seen = 0;
        let mut waits = 0u32;
        while !self.leaving.load(Ordering::Relaxed) {
            if !self.takes_part(number) {
                // The next round in which this thread takes part unparks it.
                std::thread::park();
                continue;
            }
            let state = self.state.load(Ordering::Acquire);
            if state >> 32 == seen || state & OPEN == 0 {
                waits = waits.saturating_add(1);
                match waits {
                    ..SPINS => std::hint::spin_loop(),
                    w if w < SPINS + YIELDS => std::thread::yield_now(),
                    // If the last worker unparked this thread before it parks, `park` returns immediately.
                    _ => std::thread::park(),
                }
                continue;
            }
            if self.state.compare_exchange(state, state + 1, Ordering::SeqCst, Ordering::Relaxed).is_err() {
                continue;
            }
            (seen, waits) = (state >> 32, 0);
            // Safety: this worker is inside the round, and the work lives until all workers have left.
            if let Some((piece, work)) = unsafe { (*self.piece.get()).map(|piece| (piece, &*piece.work)) }
                && catch_unwind(AssertUnwindSafe(|| self.work_through(number, piece.cells, work))).is_err()
            {
                self.panicked.store(true, Ordering::Relaxed);
            }
            let before = self.state.fetch_sub(1, Ordering::SeqCst);
            if before & INSIDE == 1
                && self.waiting.load(Ordering::SeqCst)
                && let Some(caller) = &*self.caller.lock().unwrap_or_else(PoisonError::into_inner)
            {
                caller.unpark();
            }
        }
    }
}

/// Records for the serving process that a round runs while the value exists.
struct Round<'a>(&'a Lender);

impl<'a> Round<'a> {
    fn begin(lender: &'a Lender) -> Self {
        lender.begin();
        Round(lender)
    }
}

impl Drop for Round<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// Marks this thread as working on a cell while the value exists.
struct Inside;

impl Inside {
    fn enter() -> Inside {
        WORKING.set(true);
        Inside
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        WORKING.set(false);
    }
}

/// A buffer that several threads write, each its own part.
#[derive(Clone, Copy, Debug)]
pub struct Shared<T>(*mut T);

// Safety: all threads guarantee that the parts they write are disjoint.
unsafe impl<T: Send> Send for Shared<T> {}
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    /// Borrows the whole buffer for as long as the threads work.
    pub fn new(values: &mut [T]) -> Shared<T> {
        Shared(values.as_mut_ptr())
    }

    /// Address of one element of the buffer.
    ///
    /// # Safety
    /// `index` is inside the buffer.
    pub unsafe fn at(&self, index: usize) -> *mut T {
        unsafe { self.0.add(index) }
    }

    /// A range of the buffer's elements, for writing.
    ///
    /// # Safety
    /// The range is inside the buffer, which is still borrowed, and no other thread accesses it meanwhile.
    #[expect(clippy::mut_from_ref, reason = "the caller guarantees that the parts are disjoint")]
    pub unsafe fn part(&self, range: Range<usize>) -> &mut [T] {
        unsafe { std::slice::from_raw_parts_mut(self.0.add(range.start), range.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cell_is_done_once_in_every_round() {
        for count in [1, 2, 3, 7] {
            let threads = Threads::new(count);
            for round in 0..3000 {
                let cells = round % 23;
                let done: Vec<AtomicUsize> = (0..cells).map(|_| AtomicUsize::new(0)).collect();
                threads.cells(cells, &|cell| {
                    done[cell].fetch_add(1, Ordering::Relaxed);
                });
                assert!(done.iter().all(|done| done.load(Ordering::Relaxed) == 1), "{count} threads, {cells} cells");
            }
        }
    }

    #[test]
    fn the_cells_of_a_grid_are_disjoint_and_cover_it() {
        for count in [1, 2, 5] {
            let threads = Threads::new(count);
            for (rows, row_multiple, columns, column_multiple) in
                [(1, 1, 1, 1), (1, 48, 97, 1), (100, 48, 33, 2), (1000, 12, 3, 1), (7, 3, 1, 4), (0, 1, 5, 1)]
            {
                let done: Vec<AtomicUsize> = (0..rows * columns).map(|_| AtomicUsize::new(0)).collect();
                threads.grid(rows, row_multiple, columns, column_multiple, |rows, range| {
                    assert!(rows.start % row_multiple == 0 && range.start % column_multiple == 0);
                    assert!(!rows.is_empty() && !range.is_empty());
                    for row in rows {
                        for column in range.clone() {
                            done[row * columns + column].fetch_add(1, Ordering::Relaxed);
                        }
                    }
                });
                assert!(done.iter().all(|done| done.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn a_piece_of_work_inside_another_runs_where_it_is() {
        let threads = Threads::new(3);
        let sum = AtomicUsize::new(0);
        threads.cells(5, &|outer| {
            threads.cells(4, &|inner| {
                sum.fetch_add(outer * 4 + inner, Ordering::Relaxed);
            });
        });
        assert_eq!(sum.into_inner(), 190);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_team_works_on() {
        let threads = Threads::new(2);
        for bad in 0..8 {
            let failed = catch_unwind(AssertUnwindSafe(|| threads.cells(8, &|cell| assert_ne!(cell, bad))));
            assert!(failed.is_err());
            let sum = AtomicUsize::new(0);
            threads.cells(8, &|cell| {
                sum.fetch_add(cell, Ordering::Relaxed);
            });
            assert_eq!(sum.into_inner(), 28);
        }
    }
}
