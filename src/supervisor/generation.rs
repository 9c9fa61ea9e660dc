//! Completions of the base model beside those of a checkpoint: one such child at a time, none once the server stops.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use super::Children;
use super::errand::{Lost, run_errand};
use crate::config::Device;
use crate::generation::{GenerationReport, GenerationTask};

/// At once: each holds a model of its own in memory, beside those of the workers.
const MAX_GENERATIONS: usize = 1;
/// What a child may take beyond its limit, to write its report.
const GRACE: Duration = Duration::from_secs(5);

/// How completions are asked for.
#[derive(Debug, Clone)]
pub struct Generations {
    children: Children,
    places: Arc<Semaphore>,
    stop: CancellationToken,
}

/// Why there is no report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ungenerated {
    /// As many as may run at once do.
    Busy,
    /// The server stops.
    Stopping,
    /// The child was lost.
    Lost(Lost),
}

impl Generations {
    /// On the processor, with the threads of one worker; children die with `stop`.
    pub fn new(children: &Children, stop: CancellationToken) -> Self {
        Self { children: children.clone(), places: Arc::new(Semaphore::new(MAX_GENERATIONS)), stop }
    }

    /// Runs one child to its end; dropping the future kills it.
    pub async fn run(self, task: GenerationTask) -> Result<GenerationReport, Ungenerated> {
        let Ok(_place) = self.places.clone().try_acquire_owned() else { return Err(Ungenerated::Busy) };
        let limit = Duration::from_millis(task.limit_ms) + GRACE;
        tokio::select! {
            biased;
            () = self.stop.cancelled() => Err(Ungenerated::Stopping),
            report = run_errand(&self.children, ("generate", Device::Cpu), &task, limit) => report.map_err(Ungenerated::Lost),
        }
    }
}
