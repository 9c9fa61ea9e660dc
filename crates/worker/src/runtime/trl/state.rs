//! The state of a run of ranks: its host, a rank's connection, the current rollout.

use std::time::Instant;

use serde_json::Value;

use super::message::Message;
use super::rollout::Scored;
use crate::engine::host::{Host, RunEnd};
use crate::rollout::{RolloutId, SampledGroup};

/// A host that also records the state of each rank's sampler.
pub trait TrlHost: Host {
    /// Returns the completions of a rollout that an earlier attempt sampled, and the samplers' states after it.
    fn recorded_by_ranks(&mut self, id: RolloutId) -> Option<(Vec<SampledGroup>, Vec<Value>)>;

    /// Records newly sampled completions and the samplers' states after them.
    ///
    /// # Errors
    /// Fails if the journal cannot be written.
    fn sampled_by_ranks(&mut self, id: RolloutId, groups: &[SampledGroup], samplers: &[Value]) -> Result<(), RunEnd>;
}

/// The state of a rank's connection.
#[derive(Default)]
pub(super) struct Peer {
    pub(super) rank: Option<usize>,
    pub(super) is_loaded: bool,
    pub(super) is_ready: bool,
    /// The question that waits for its answer, and when it was asked.
    pub(super) asked: Option<(Message, Instant)>,
    pub(super) is_done: bool,
}

/// The rollout of the current step.
pub(super) enum Rolling {
    None,
    /// Sampled, and not scored yet.
    Sampled(u64, Vec<SampledGroup>),
    /// Scored. Its samples are reported with the metrics of its first step.
    Scored(u64, Box<Scored>),
}
