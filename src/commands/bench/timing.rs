//! Repeated measurement of wall-clock time.

use std::time::{Duration, Instant};

/// Repetitions stop here, however short they are.
const MAX_REPETITIONS: usize = 10_000;

/// Short repetitions are not told one by one.
const TELL_EVERY: Duration = Duration::from_millis(100);

/// Seconds of a piece of work that was repeated.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    /// Of the fastest repetition: what others on the machine do only adds to it.
    pub min_s: f64,
    /// Of the middle one.
    pub median_s: f64,
    /// How many there are; 0 = the seconds are those of the one that warms up.
    pub repetitions: usize,
}

impl Timing {
    /// Of measured seconds; zeros where there are none.
    pub fn of(mut seconds: Vec<f64>) -> Timing {
        seconds.sort_by(f64::total_cmp);
        let at = |index: usize| seconds.get(index).copied().unwrap_or_default();
        let median_s = (at(seconds.len() / 2) + at(seconds.len().saturating_sub(1) / 2)) / 2.0;
        Timing { min_s: at(0), median_s, repetitions: seconds.len() }
    }

    /// Of the repetition that warms up: what is known while nothing is measured.
    pub fn of_warm_up(seconds: f64) -> Timing {
        Timing { repetitions: 0, ..Timing::of(vec![seconds]) }
    }

    /// Whether anything was measured.
    pub fn warm(&self) -> bool {
        self.repetitions > 0
    }
}

/// Runs `work` once to warm up, then at least so often and for so long.
///
/// # Errors
/// The first error of `work`.
pub fn repeat<E>(times: usize, seconds: f64, work: impl FnMut() -> Result<(), E>) -> Result<Timing, E> {
    repeat_telling(times, seconds, work, |_| Ok(()))
}

/// The same, and tells what is known after each repetition, the one that warms up included, but for short ones: whoever is
/// stopped midway leaves that.
///
/// # Errors
/// The first error of `work` or `tell`.
pub fn repeat_telling<E>(
    times: usize,
    seconds: f64,
    mut work: impl FnMut() -> Result<(), E>,
    mut tell: impl FnMut(Timing) -> Result<(), E>,
) -> Result<Timing, E> {
    let warming = Instant::now();
    work()?;
    tell(Timing::of_warm_up(warming.elapsed().as_secs_f64()))?;
    let begun = Instant::now();
    let mut told = begun;
    let mut measured = Vec::new();
    while measured.len() < times || (begun.elapsed().as_secs_f64() < seconds && measured.len() < MAX_REPETITIONS) {
        let started = Instant::now();
        work()?;
        measured.push(started.elapsed().as_secs_f64());
        if told.elapsed() >= TELL_EVERY {
            tell(Timing::of(measured.clone()))?;
            told = Instant::now();
        }
    }
    Ok(Timing::of(measured))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_even_number_lies_between_the_middle_two() {
        let timing = Timing::of(vec![4.0, 1.0, 3.0, 2.0]);
        assert_eq!((timing.min_s, timing.median_s), (1.0, 2.5));
        assert_eq!(Timing::of(vec![3.0, 1.0, 2.0]).median_s, 2.0);
    }

    #[test]
    fn work_is_warmed_up_and_repeated() {
        let mut count = 0;
        repeat(3, 0.0, || -> Result<(), ()> {
            count += 1;
            Ok(())
        })
        .unwrap();
        assert_eq!(count, 4);
    }

    #[test]
    fn a_repetition_is_told_when_it_ends_and_the_one_that_warms_up_is_told_apart() {
        let (mut told, mut count) = (Vec::new(), 0);
        let work = || {
            count += 1;
            std::thread::sleep(TELL_EVERY);
            if count < 3 { Ok(()) } else { Err("stopped") }
        };
        let ended = repeat_telling(5, 0.0, work, |timing| {
            told.push((timing.warm(), timing.repetitions, timing.min_s > 0.0));
            Ok(())
        });
        assert_eq!(ended.unwrap_err(), "stopped");
        assert_eq!(told, [(false, 0, true), (true, 1, true)]);
    }
}
