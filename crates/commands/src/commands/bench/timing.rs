//! Repeated measurement of wall-clock time.

use std::time::{Duration, Instant};

/// Maximum number of repetitions of a measurement, however short they are.
const MAX_REPETITIONS: usize = 10_000;

/// Minimum interval between two reports of a measurement's progress.
const REPORT_INTERVAL: Duration = Duration::from_millis(100);

/// Durations of the repetitions of a measured operation, in seconds.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    /// Duration of the fastest repetition: other programs on the machine only add to it.
    pub min_s: f64,
    /// Duration of the median repetition.
    pub median_s: f64,
    /// Number of repetitions; 0 = the durations are those of the warm-up.
    pub repetitions: usize,
}

impl Timing {
    /// Computes the statistics of measured durations in seconds; zeros if there are none.
    pub fn of(mut seconds: Vec<f64>) -> Timing {
        seconds.sort_by(f64::total_cmp);
        let at = |index: usize| seconds.get(index).copied().unwrap_or_default();
        let median_s = (at(seconds.len() / 2) + at(seconds.len().saturating_sub(1) / 2)) / 2.0;
        Timing { min_s: at(0), median_s, repetitions: seconds.len() }
    }

    /// Uses the duration of the warm-up run until a repetition is measured.
    pub fn of_warm_up(seconds: f64) -> Timing {
        Timing { repetitions: 0, ..Timing::of(vec![seconds]) }
    }

    /// Whether any repetition was measured.
    pub fn warm(&self) -> bool {
        self.repetitions > 0
    }
}

/// Runs `work` once to warm up, then at least this many times and for at least this long.
///
/// # Errors
/// Returns the first error of `work`.
pub fn repeat<E>(times: usize, seconds: f64, work: impl FnMut() -> Result<(), E>) -> Result<Timing, E> {
    repeat_reporting(times, seconds, work, |_| Ok(()))
}

/// Like [`repeat`], but also calls `report` after the warm-up and after each repetition that is not short, so that an
/// interrupted run keeps its results.
///
/// # Errors
/// Returns the first error of `work` or `report`.
pub fn repeat_reporting<E>(
    times: usize,
    seconds: f64,
    mut work: impl FnMut() -> Result<(), E>,
    mut report: impl FnMut(Timing) -> Result<(), E>,
) -> Result<Timing, E> {
    let warming = Instant::now();
    work()?;
    report(Timing::of_warm_up(warming.elapsed().as_secs_f64()))?;
    let begun = Instant::now();
    let mut last_report = begun;
    let mut measured = Vec::new();
    while measured.len() < times || (begun.elapsed().as_secs_f64() < seconds && measured.len() < MAX_REPETITIONS) {
        let started = Instant::now();
        work()?;
        measured.push(started.elapsed().as_secs_f64());
        if last_report.elapsed() >= REPORT_INTERVAL {
            report(Timing::of(measured.clone()))?;
            last_report = Instant::now();
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
        let (mut reports, mut count) = (Vec::new(), 0);
        let work = || {
            count += 1;
            std::thread::sleep(REPORT_INTERVAL);
            if count < 3 { Ok(()) } else { Err("stopped") }
        };
        let ended = repeat_reporting(5, 0.0, work, |timing| {
            reports.push((timing.warm(), timing.repetitions, timing.min_s > 0.0));
            Ok(())
        });
        assert_eq!(ended.unwrap_err(), "stopped");
        assert_eq!(reports, [(false, 0, true), (true, 1, true)]);
    }
}
