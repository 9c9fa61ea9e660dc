//! How long kernels take on the device: a moment is noted before and after each.

use std::collections::HashMap;

use super::CudaError;
use super::machine::{Machine, Moment};

/// What one kernel took while a profile was made.
#[derive(Clone, Debug, PartialEq)]
pub struct Timing {
    /// The kernel, or `cublas`, `upload`, `copy`, `zero`.
    pub name: String,
    /// How often it ran.
    pub count: u64,
    /// Seconds of all runs together.
    pub seconds: f64,
}

/// Moments around all work since the profile began.
#[derive(Debug, Default)]
pub(super) struct Profile {
    names: HashMap<String, usize>,
    moments: Vec<(usize, Moment, Moment)>,
}

impl Profile {
    /// Carry something out, between two moments where a profile is made.
    pub(super) fn timed(
        profile: &mut Option<Profile>,
        machine: &mut Machine,
        name: &str,
        work: impl FnOnce(&mut Machine) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let Some(profile) = profile else { return work(machine) };
        let from = machine.moment()?;
        work(machine)?;
        let to = machine.moment()?;
        let index = match profile.names.get(name) {
            Some(index) => *index,
            None => {
                let index = profile.names.len();
                profile.names.insert(name.to_owned(), index);
                index
            }
        };
        profile.moments.push((index, from, to));
        Ok(())
    }

    /// The sums, the longest first. Waits for the last work.
    pub(super) fn timings(self, machine: &mut Machine) -> Result<Vec<Timing>, CudaError> {
        let mut sums = vec![(0_u64, 0.0_f64); self.names.len()];
        for (index, from, to) in &self.moments {
            sums[*index].0 += 1;
            sums[*index].1 += machine.seconds(from, to)?;
        }
        let timing = |(name, index): (String, usize)| Timing { name, count: sums[index].0, seconds: sums[index].1 };
        let mut timings: Vec<Timing> = self.names.into_iter().map(timing).collect();
        timings.sort_by(|a, b| b.seconds.total_cmp(&a.seconds).then_with(|| a.name.cmp(&b.name)));
        Ok(timings)
    }
}
