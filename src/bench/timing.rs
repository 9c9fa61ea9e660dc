//! Repeated measurement of wall-clock time.

use std::time::Instant;

/// Repetitions stop here, however short they are.
const MAX_REPETITIONS: usize = 10_000;

/// Seconds of a piece of work that was repeated.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    /// Of the fastest repetition: what others on the machine do only adds to it.
    pub min_s: f64,
    /// Of the middle one.
    pub median_s: f64,
}

impl Timing {
    /// Of measured seconds; zeros where there are none.
    pub fn of(mut seconds: Vec<f64>) -> Timing {
        seconds.sort_by(f64::total_cmp);
        let at = |index: usize| seconds.get(index).copied().unwrap_or_default();
        Timing { min_s: at(0), median_s: (at(seconds.len() / 2) + at(seconds.len().saturating_sub(1) / 2)) / 2.0 }
    }
}

/// Runs `work` once to warm up, then at least so often and for so long.
///
/// # Errors
/// The first error of `work`.
pub fn repeat<E>(times: usize, seconds: f64, mut work: impl FnMut() -> Result<(), E>) -> Result<Timing, E> {
    work()?;
    let begun = Instant::now();
    let mut measured = Vec::new();
    while measured.len() < times || (begun.elapsed().as_secs_f64() < seconds && measured.len() < MAX_REPETITIONS) {
        let started = Instant::now();
        work()?;
        measured.push(started.elapsed().as_secs_f64());
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
}
