//! The serving process's share of the cores beside training.
//!
//! Only the time counts in which training computed without the lent cores. What serving uses while training waits for a reward
//! or a disk, or works on one thread, is free.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::engine::backend::cpu::Cpu;
use crate::engine::kernels::lending::Borrower;

/// Serving rests after it used this much more than its share, in seconds for each of its cores. A shorter time moves cores between
/// the processes more often; a longer one makes streams of answers less even.
const SLICE_S: f64 = 0.05;
/// Factor on the time of lent cores: training loses more than that time, because both share the memory and its caches are cold
/// afterwards. Measured with the model `small` on two cores.
const OVERHEAD: f64 = 1.07;
/// Longest pause before the process looks again whether it may compute.
const PAUSE: Duration = Duration::from_millis(5);
/// Time until training's threads have left the cores that were just lent. A thread that is displaced instead makes the others
/// wait for it.
const HANDOVER: Duration = Duration::from_micros(500);
/// Computation that serving may do at once after it did nothing for a while, in seconds of a core.
const CREDIT_S: f64 = 0.05;

/// Divides the cores with training: while that computes, serving uses whole cores that training lends, and rests in between
/// so that it uses its share of the time of all cores.
pub struct Share {
    borrower: Borrower,
    /// Number of threads of this process, and of each training process.
    threads: usize,
    /// Share of the cores, above 0 and below 1.
    share: f64,
    used: Used,
    /// Whether serving rests until what it used is within its share.
    rests: bool,
    /// Whether cores are lent to serving.
    borrows: bool,
}

/// Time of cores that serving used beyond its share.
struct Used {
    /// Seconds of one core; negative = serving may still use them.
    seconds: f64,
    at: Instant,
}

impl Used {
    /// Subtracts what the share allowed since the last call.
    fn pass(&mut self, allowed: f64) {
        let now = Instant::now();
        self.seconds = (self.seconds - allowed * (now - self.at).as_secs_f64()).max(-CREDIT_S);
        self.at = now;
    }
}

impl Share {
    /// Opens the file through which workers lend cores.
    ///
    /// # Errors
    /// Fails if the file cannot be mapped.
    pub fn open(path: &Path, threads: usize, share: f64) -> std::io::Result<Share> {
        let used = Used { seconds: 0.0, at: Instant::now() };
        Ok(Share { borrower: Borrower::open(path)?, threads, share, used, rests: false, borrows: false })
    }

    /// Number of whole cores that serving uses beside training.
    fn cores(&self) -> usize {
        let most = self.threads.saturating_sub(1).max(1);
        ((self.share * self.threads as f64).ceil() as usize).clamp(1, most)
    }

    /// How long serving must rest now; zero if it may compute.
    pub fn rest(&mut self) -> Duration {
        let allowed = self.share * self.threads as f64;
        self.used.pass(allowed);
        self.used.seconds += OVERHEAD * self.borrower.take_cost().as_secs_f64();
        if !self.borrower.is_training() {
            self.rests = false;
        } else if self.used.seconds >= SLICE_S * self.cores() as f64 {
            self.rests = true;
            self.give_back();
        } else if self.used.seconds <= 0.0 {
            self.rests = false;
        }
        match self.rests {
            true => Duration::from_secs_f64((self.used.seconds / allowed).max(0.001)).min(PAUSE),
            false => Duration::ZERO,
        }
    }

    /// Computes one step on the cores that serving has now.
    pub fn compute<T>(&mut self, step: impl FnOnce() -> T) -> T {
        let is_training = self.borrower.is_training();
        let cores = if is_training { self.cores() } else { self.threads };
        self.borrower.borrow_cores(cores, self.threads);
        Cpu::process_threads().limit(cores);
        if !std::mem::replace(&mut self.borrows, true) && cores < self.threads {
            std::thread::sleep(HANDOVER);
        }
        let began = Instant::now();
        let result = step();
        if is_training && self.threads == 1 {
            // Training lends no core, so that both have half of the only one.
            self.used.seconds += began.elapsed().as_secs_f64() / 2.0;
        }
        result
    }

    /// Gives back all cores, because there is nothing to do.
    pub fn give_back(&mut self) {
        self.borrows = false;
        self.borrower.give_back();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::kernels::lending::Lender;
    use crate::engine::kernels::threads::Threads;

    /// A share of a quarter beside a training process with this many threads.
    fn share(dir: &tempfile::TempDir, threads: usize) -> (Share, Threads) {
        let path = dir.path().join("lending");
        let team = Threads::new(threads);
        team.lend(Lender::open(&path, 0).unwrap().unwrap());
        (Share::open(&path, threads, 0.25).unwrap(), team)
    }

    #[test]
    fn serving_uses_whole_cores_and_never_all_of_them() {
        let dir = tempfile::tempdir().unwrap();
        let cores = [1, 2, 3, 4, 5, 8, 64].map(|threads| share(&dir, threads).0.cores());
        assert_eq!(cores, [1, 1, 1, 1, 2, 2, 16]);
    }

    #[test]
    fn serving_rests_for_what_training_was_without() {
        let dir = tempfile::tempdir().unwrap();
        let (mut share, team) = share(&dir, 2);
        let step = || std::thread::sleep(Duration::from_millis(50));
        for _ in 0..4 {
            share.compute(step);
            assert_eq!(share.rest(), Duration::ZERO, "nothing trains");
        }
        std::thread::scope(|scope| {
            let training = scope.spawn(|| team.cells(2, &|_| std::thread::sleep(Duration::from_millis(600))));
            std::thread::sleep(Duration::from_millis(20));
            let began = Instant::now();
            while share.rest().is_zero() {
                share.compute(step);
            }
            let computed = began.elapsed();
            while !share.rest().is_zero() {
                std::thread::sleep(Duration::from_millis(1));
            }
            let rested = began.elapsed() - computed;
            // A quarter of two cores is half of one: the credit apart, serving rests as long as it computes.
            assert!(computed >= Duration::from_millis(100), "{computed:?}");
            assert!(rested >= Duration::from_millis(30) && rested <= computed, "{rested:?} after {computed:?}");
            training.join().unwrap();
        });
    }
}
