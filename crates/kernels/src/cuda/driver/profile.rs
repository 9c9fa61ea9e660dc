//! Measures how long kernels run on the device, with a timer around each.

use std::collections::HashMap;

use crate::cuda::device_api::{CudaError, Driver, Timer};

/// The time that one kernel took during a profile, summed over its runs.
#[derive(Clone, Debug, PartialEq)]
pub struct Timing {
    /// The kernel's name, or `cublas`, `upload`, `copy`, `zero` for other operations.
    pub name: String,
    /// Number of times the kernel ran.
    pub count: u64,
    /// Total seconds of all runs of the kernel.
    pub seconds: f64,
}

/// Timers of all kernels and copies since the profile began.
#[derive(Debug, Default)]
pub(super) struct Profile {
    names: HashMap<String, usize>,
    timers: Vec<(usize, Box<dyn Timer>)>,
}

impl Profile {
    /// Executes an operation of the device, with a timer if a profile is running.
    pub(super) fn timed(
        profile: &mut Option<Profile>,
        driver: &mut dyn Driver,
        name: &str,
        work: impl FnOnce(&mut dyn Driver) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let Some(profile) = profile else { return work(driver) };
        let mut timer = driver.start_timer()?;
        work(driver)?;
        timer.stop()?;
        let index = match profile.names.get(name) {
            Some(index) => *index,
            None => {
                let index = profile.names.len();
                profile.names.insert(name.to_owned(), index);
                index
            }
        };
        profile.timers.push((index, timer));
        Ok(())
    }

    /// The total time of each kernel, the longest first. Waits for the last operation.
    pub(super) fn timings(self) -> Result<Vec<Timing>, CudaError> {
        let mut sums = vec![(0_u64, 0.0_f64); self.names.len()];
        for (index, timer) in &self.timers {
            sums[*index].0 += 1;
            sums[*index].1 += timer.seconds()?;
        }
        let timing = |(name, index): (String, usize)| Timing { name, count: sums[index].0, seconds: sums[index].1 };
        let mut timings: Vec<Timing> = self.names.into_iter().map(timing).collect();
        timings.sort_by(|a, b| b.seconds.total_cmp(&a.seconds).then_with(|| a.name.cmp(&b.name)));
        Ok(timings)
    }
}
