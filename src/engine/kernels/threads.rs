//! Threads that wait for the next piece of work by spinning for a moment, then parked: a product of a small model takes
//! microseconds, and waking a thread takes as long.

use std::cell::UnsafeCell;
use std::num::NonZero;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

/// Polls before a thread that waits gives its core away. A spinning thread whose partner was put to sleep by another
/// process would otherwise burn the time its partner needs.
const SPINS: u32 = 4000;
/// Yields before a worker parks.
const YIELDS: u32 = 64;

type Work<'a> = dyn Fn(usize) + Sync + 'a;

/// A team: the calling thread is number 0, the workers are 1, 2, …
#[derive(Debug)]
pub struct Threads {
    team: Arc<Team>,
    workers: Vec<JoinHandle<()>>,
    /// One piece of work at a time.
    running: Mutex<()>,
}

struct Team {
    /// Counts pieces of work; a worker starts when it changes.
    round: AtomicUsize,
    /// Workers not done yet.
    busy: AtomicUsize,
    leaving: AtomicBool,
    panicked: AtomicBool,
    /// Written before `round` changes, read after.
    work: UnsafeCell<Option<*const Work<'static>>>,
}

// Safety: `work` is written only by the one thread that holds `Threads::running`, while no worker is busy, and published
// by `round`.
unsafe impl Sync for Team {}
unsafe impl Send for Team {}

impl std::fmt::Debug for Team {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Team").field("round", &self.round).field("busy", &self.busy).finish_non_exhaustive()
    }
}

impl Threads {
    /// A team of so many, the caller included. Fewer where the system gives no more threads.
    pub fn new(count: usize) -> Threads {
        let team = Arc::new(Team {
            round: AtomicUsize::new(0),
            busy: AtomicUsize::new(0),
            leaving: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
            work: UnsafeCell::new(None),
        });
        let workers = (1..count.max(1)).map_while(|number| {
            let team = team.clone();
            std::thread::Builder::new().name(format!("kernel-{number}")).spawn(move || team.worker(number)).ok()
        });
        let workers = workers.collect();
        Threads { team, workers, running: Mutex::new(()) }
    }

    /// One thread a core.
    pub fn of_machine() -> Threads {
        Threads::new(std::thread::available_parallelism().map_or(1, NonZero::get))
    }

    /// The caller and its workers.
    pub fn count(&self) -> usize {
        self.workers.len() + 1
    }

    /// Run `f(number)` once on every thread; returns when all are done. A panic in any of them is raised here.
    pub fn run(&self, f: &Work<'_>) {
        if self.workers.is_empty() {
            return f(0);
        }
        let running = self.running.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        // Safety: the pointer is used only until all workers are done, which is before this call returns.
        unsafe {
            let f = std::mem::transmute::<*const Work<'_>, *const Work<'static>>(std::ptr::from_ref(f));
            *self.team.work.get() = Some(f);
        }
        self.team.busy.store(self.workers.len(), Ordering::Relaxed);
        self.team.round.fetch_add(1, Ordering::SeqCst);
        for worker in &self.workers {
            // Cheap where the worker spins.
            worker.thread().unpark();
        }
        let mine = catch_unwind(AssertUnwindSafe(|| f(0)));
        let mut spins = 0;
        while self.team.busy.load(Ordering::Acquire) > 0 {
            spins += 1;
            if spins < SPINS { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
        drop(running);
        if let Err(panic) = mine {
            resume_unwind(panic);
        }
        assert!(!self.team.panicked.swap(false, Ordering::Relaxed), "a kernel panicked on another thread");
    }

    /// Cut a grid of rows and columns into one part a thread, along the rows where there are enough for all, otherwise
    /// along the columns; parts begin at multiples. Every cell falls to exactly one call.
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
        let count = self.count();
        let by_rows = rows >= count * row_multiple;
        if count == 1 || (!by_rows && columns < 2 * column_multiple) {
            return f(0..rows, 0..columns);
        }
        self.run(&|number| {
            let (rows, columns) = match by_rows {
                true => (part(rows, row_multiple, number, count), 0..columns),
                false => (0..rows, part(columns, column_multiple, number, count)),
            };
            if !rows.is_empty() && !columns.is_empty() {
                f(rows, columns);
            }
        });
    }

    /// Cut `0..items` into one part a thread.
    pub fn split(&self, items: usize, f: impl Fn(Range<usize>) + Sync) {
        self.grid(items, 1, 1, 1, |items, _| f(items));
    }
}

/// The part of thread `number` of `count`.
fn part(items: usize, multiple: usize, number: usize, count: usize) -> Range<usize> {
    let blocks = items.div_ceil(multiple);
    let at = |number: usize| (blocks * number / count * multiple).min(items);
    at(number)..at(number + 1)
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.team.leaving.store(true, Ordering::SeqCst);
        self.team.round.fetch_add(1, Ordering::SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // It catches its panics.
            let _ = worker.join();
        }
    }
}

impl Team {
    fn worker(&self, number: usize) {
        let mut seen = 0;
        loop {
            let mut waits = 0;
            loop {
                let round = self.round.load(Ordering::Acquire);
                if round != seen {
                    seen = round;
                    break;
                }
                waits += 1;
                match waits {
                    ..SPINS => std::hint::spin_loop(),
                    w if w < SPINS + YIELDS => std::thread::yield_now(),
                    // An unpark that came before is not lost.
                    _ => std::thread::park(),
                }
            }
            if self.leaving.load(Ordering::SeqCst) {
                return;
            }
            // Safety: written before `round` changed, and alive until `busy` is counted down.
            let work = unsafe { (*self.work.get()).map(|work| &*work) };
            if let Some(work) = work
                && catch_unwind(AssertUnwindSafe(|| work(number))).is_err()
            {
                self.panicked.store(true, Ordering::Relaxed);
            }
            self.busy.fetch_sub(1, Ordering::Release);
        }
    }
}

/// A buffer that several threads write, each its own part.
#[derive(Clone, Copy, Debug)]
pub struct Shared<T>(*mut T);

// Safety: whoever writes through it holds that the parts are disjoint.
unsafe impl<T: Send> Send for Shared<T> {}
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    /// The whole buffer, borrowed for as long as the threads work.
    pub fn new(values: &mut [T]) -> Shared<T> {
        Shared(values.as_mut_ptr())
    }

    /// Let `f` write some elements.
    ///
    /// Not marked unsafe, but no two threads may ask for overlapping ranges at a time.
    pub fn with<R>(&self, range: Range<usize>, f: impl FnOnce(&mut [T]) -> R) -> R {
        // Safety: the caller's.
        f(unsafe { self.part(range) })
    }

    /// One element.
    ///
    /// # Safety
    /// `index` is inside the buffer.
    pub unsafe fn at(&self, index: usize) -> *mut T {
        unsafe { self.0.add(index) }
    }

    /// Some elements.
    ///
    /// # Safety
    /// The range is inside the buffer, which is still borrowed, and no other thread touches it meanwhile.
    #[expect(clippy::mut_from_ref, reason = "the parts are disjoint, as the caller holds")]
    pub unsafe fn part(&self, range: Range<usize>) -> &mut [T] {
        unsafe { std::slice::from_raw_parts_mut(self.0.add(range.start), range.len()) }
    }
}
