//! Cores that training processes lend to a serving process of the same machine.
//!
//! All of them map one small file. A training process writes there whether it computes; the serving process writes how many
//! threads each training process leaves out of its rounds meanwhile. A thread leaves a round between two cells, so that no
//! process waits for a thread that another one has displaced from its core.

use std::fs::File;
use std::io::{Error, Result};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Number of training processes for which the file has room. Others lend nothing.
const SLOTS: usize = 16;
/// Time after a training process's last round from which it counts as idle.
const IDLE: Duration = Duration::from_millis(20);
/// Time after which borrowed cores return by themselves, so that a serving process that was killed does not keep them.
const LONGEST: Duration = Duration::from_secs(5);

/// The numbers of one training process, on cache lines of their own.
#[repr(C, align(128))]
#[derive(Debug)]
struct Slot {
    /// Number of its threads that take no part in its rounds.
    lent: AtomicU32,
    /// When they return by themselves, on the machine's clock, in nanoseconds.
    until: AtomicU64,
    /// Twice the number of its rounds; one more while a round runs.
    rounds: AtomicU64,
    /// When the last round began, on the machine's clock, in nanoseconds.
    began: AtomicU64,
    /// Time of all rounds that have ended, in nanoseconds.
    computed: AtomicU64,
}

/// Maps the file, which is created if it is missing; the process keeps it mapped until it ends.
fn map(path: &Path) -> Result<&'static [Slot; SLOTS]> {
    let size = size_of::<[Slot; SLOTS]>();
    let file = File::options().read(true).write(true).create(true).truncate(false).open(path)?;
    // New bytes are zero: nothing lent, no rounds.
    file.set_len(size as u64)?;
    // Safety: a new mapping of an open file, which is as long as the slots.
    let address = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            size,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            0,
        )
    };
    if address == libc::MAP_FAILED {
        return Err(Error::last_os_error());
    }
    // Safety: the mapping begins at a page, is never removed, and all bytes are valid atomic integers.
    Ok(unsafe { &*address.cast() })
}

impl Slot {
    /// Time of all rounds so far, in nanoseconds.
    fn computed(&self) -> u64 {
        let running = match self.rounds.load(Ordering::Acquire).is_multiple_of(2) {
            true => 0,
            false => clock().saturating_sub(self.began.load(Ordering::Relaxed)),
        };
        self.computed.load(Ordering::Relaxed) + running
    }
}

/// The machine's clock in nanoseconds, which is the same for all processes and never set back.
fn clock() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // Safety: the clock exists on every Linux, and the call writes to a valid place.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// A training process's side.
#[derive(Debug)]
pub struct Lender(&'static Slot);

impl Lender {
    /// Opens the file for training process number `slot`, and forgets what a former process of that number wrote. None if
    /// the file has no room for it.
    ///
    /// # Errors
    /// Fails if the file cannot be created or mapped.
    pub fn open(path: &Path, slot: usize) -> Result<Option<Lender>> {
        let Some(slot) = map(path)?.get(slot) else { return Ok(None) };
        slot.lent.store(0, Ordering::Relaxed);
        slot.rounds.store(0, Ordering::Relaxed);
        slot.computed.store(0, Ordering::Relaxed);
        Ok(Some(Lender(slot)))
    }

    /// Number of threads that take no part in rounds now.
    pub(crate) fn lent(&self) -> usize {
        match self.0.lent.load(Ordering::Relaxed) {
            0 => 0,
            lent if clock() <= self.0.until.load(Ordering::Relaxed) => lent as usize,
            _ => 0,
        }
    }

    /// Records that a round begins. Only one runs at a time.
    pub(crate) fn begin(&self) {
        self.0.began.store(clock(), Ordering::Relaxed);
        self.0.rounds.store(self.0.rounds.load(Ordering::Relaxed) + 1, Ordering::Release);
    }

    /// Records that the round has ended.
    pub(crate) fn end(&self) {
        let took = clock().saturating_sub(self.0.began.load(Ordering::Relaxed));
        self.0.computed.store(self.0.computed.load(Ordering::Relaxed) + took, Ordering::Relaxed);
        self.0.rounds.store(self.0.rounds.load(Ordering::Relaxed) + 1, Ordering::Release);
    }
}

/// The serving process's side.
#[derive(Debug)]
pub struct Borrower {
    slots: &'static [Slot; SLOTS],
    /// The rounds of each training process when they were last read, and when they last changed.
    seen: [(u64, Option<Instant>); SLOTS],
    /// The time of each one's rounds when cores were last borrowed or given back, in nanoseconds.
    computed: [u64; SLOTS],
    /// Time of cores that training was without, in nanoseconds.
    cost: u64,
}

impl Borrower {
    /// Opens the file of lent cores.
    ///
    /// # Errors
    /// Fails if the file cannot be created or mapped.
    pub fn open(path: &Path) -> Result<Borrower> {
        let slots = map(path)?;
        let mut borrower = Borrower { slots, seen: [(0, None); SLOTS], computed: [0; SLOTS], cost: 0 };
        borrower.give_back();
        borrower.take_cost();
        Ok(borrower)
    }

    /// Whether a training process computes, now or a moment ago.
    pub fn is_training(&mut self) -> bool {
        (0..SLOTS).any(|slot| self.computes(slot))
    }

    fn computes(&mut self, slot: usize) -> bool {
        let rounds = self.slots[slot].rounds.load(Ordering::Relaxed);
        let (seen, changed) = &mut self.seen[slot];
        if rounds != *seen {
            (*seen, *changed) = (rounds, Some(Instant::now()));
        }
        !rounds.is_multiple_of(2) || changed.is_some_and(|changed| changed.elapsed() < IDLE)
    }

    /// Borrows this many cores from the training processes that compute, which have `threads` threads each and keep at
    /// least one; gives back what was borrowed from others.
    pub fn borrow_cores(&mut self, cores: usize, threads: usize) {
        let mut missing = cores;
        for slot in 0..SLOTS {
            let most = if self.computes(slot) { threads.saturating_sub(1) } else { 0 };
            let lent = missing.min(most);
            missing -= lent;
            self.lend(slot, lent as u32);
        }
    }

    /// Gives back all cores.
    pub fn give_back(&mut self) {
        for slot in 0..SLOTS {
            self.lend(slot, 0);
        }
    }

    /// Counts what was lent by a training process since its numbers were last read.
    fn count(&mut self, slot: usize) {
        let of = &self.slots[slot];
        let computed = of.computed();
        self.cost += u64::from(of.lent.load(Ordering::Relaxed)) * computed.saturating_sub(self.computed[slot]);
        self.computed[slot] = computed;
    }

    fn lend(&mut self, slot: usize, lent: u32) {
        self.count(slot);
        let of = &self.slots[slot];
        of.until.store(clock() + LONGEST.as_nanos() as u64, Ordering::Relaxed);
        of.lent.store(lent, Ordering::Relaxed);
    }

    /// Returns the time of cores that were lent while their training process computed, since the last call.
    pub fn take_cost(&mut self) -> Duration {
        (0..SLOTS).for_each(|slot| self.count(slot));
        Duration::from_nanos(std::mem::take(&mut self.cost))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::threads::Threads;

    #[test]
    fn a_lent_thread_takes_no_part_in_rounds_until_it_is_given_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cores");
        let team = Threads::new(2);
        team.lend(Lender::open(&path, 3).unwrap().unwrap());
        let mut borrower = Borrower::open(&path).unwrap();
        assert!(!borrower.is_training(), "no round has run");

        let by_caller = || {
            let caller = std::thread::current().id();
            let own = AtomicU32::new(0);
            team.cells(64, &|_| {
                std::thread::sleep(Duration::from_micros(100));
                own.fetch_add(u32::from(std::thread::current().id() == caller), Ordering::Relaxed);
            });
            own.into_inner()
        };
        assert!(by_caller() < 64, "both threads work");
        assert!(borrower.is_training());
        borrower.borrow_cores(5, 2);
        assert_eq!(by_caller(), 64, "one thread is lent, never both");
        borrower.give_back();
        assert!(borrower.take_cost() >= Duration::from_micros(6400), "the round without the thread");
        assert!(by_caller() < 64);
        borrower.borrow_cores(1, 2);
        borrower.slots[3].until.store(clock() - 1, Ordering::Relaxed);
        assert!(by_caller() < 64, "what a killed process has borrowed returns");
        borrower.is_training();
        std::thread::sleep(IDLE * 2);
        assert!(!borrower.is_training());
        borrower.borrow_cores(1, 2);
        assert!(by_caller() < 64, "a process that does not compute lends nothing");
    }

    #[test]
    fn a_training_process_computes_during_a_long_round() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cores");
        let lender = Lender::open(&path, 0).unwrap().unwrap();
        let mut borrower = Borrower::open(&path).unwrap();
        lender.begin();
        assert!(borrower.is_training());
        borrower.borrow_cores(1, 2);
        std::thread::sleep(IDLE * 2);
        assert!(borrower.is_training(), "the round still runs");
        borrower.borrow_cores(1, 2);
        assert!(borrower.take_cost() >= IDLE * 2);
        lender.end();
        borrower.give_back();
        let rest = borrower.take_cost();
        std::thread::sleep(IDLE / 2);
        borrower.borrow_cores(1, 2);
        std::thread::sleep(IDLE / 4);
        borrower.give_back();
        assert_eq!(borrower.take_cost(), Duration::ZERO, "no round ran; before that {rest:?}");
        assert!(Lender::open(&path, 0).unwrap().is_some(), "the process was killed and started again");
        borrower.is_training();
        std::thread::sleep(IDLE * 2);
        assert!(!borrower.is_training());
        assert!(Lender::open(&path, SLOTS).unwrap().is_none());
    }
}
