//! Probes of jobs, one at a time.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;

use super::Children;
use super::errand::{Lost, run_errand};
use crate::config::Device;
use crate::probe::{ProbeError, ProbeReport, ProbeTask};

/// Probes at once: each holds a model of its own in memory, beside those of the workers.
const MAX_PROBES: usize = 1;
/// What a probe may take beyond its limit, to write its report.
const GRACE: Duration = Duration::from_secs(15);

/// How probes are started.
#[derive(Debug, Clone)]
pub struct Probes {
    children: Children,
    places: Arc<Semaphore>,
}

/// Why there is no report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NoReport {
    /// As many as may run at once do.
    Busy,
    /// The child could not be started, or ended without a report.
    Failed(ProbeError),
}

impl Probes {
    /// Probes on the first of the workers' devices, with the threads of one worker.
    pub fn new(children: &Children) -> Self {
        Self { children: children.clone(), places: Arc::new(Semaphore::new(MAX_PROBES)) }
    }

    /// Runs one probe to its end; dropping the future kills it.
    pub async fn run(self, task: ProbeTask) -> Result<ProbeReport, NoReport> {
        let Ok(_place) = self.places.clone().try_acquire_owned() else { return Err(NoReport::Busy) };
        let limit = Duration::from_millis(task.limit_ms) + GRACE;
        let device = self.children.devices.first().copied().unwrap_or(Device::Cpu);
        let report = run_errand(&self.children, ("probe", device), &task, limit).await;
        report.map_err(|lost| NoReport::Failed(failure(&lost, limit)))
    }
}

fn failure(lost: &Lost, limit: Duration) -> ProbeError {
    let (code, message) = match lost {
        Lost::TimedOut => {
            ("probe_timeout", format!("the probe did not end within {} s and was killed", limit.as_secs()))
        }
        Lost::NotRun(error) => ("probe_failed", format!("the probe cannot be run: {error}")),
        Lost::Killed(status) => (
            "probe_failed",
            format!(
                "the probe was killed ({status}): most likely memory ran out; a smaller model, shorter completions or fewer generations need less"
            ),
        ),
        Lost::Ended(status) => (
            "probe_failed",
            format!("the probe ended without a report ({status}); the server's log has its last words"),
        ),
    };
    ProbeError { code: code.to_owned(), message }
}
