//! Log-probs without gradient, of the sampling policy and of the reference.

use std::time::Instant;

use super::block::Logps;
use super::error::Result;
use super::host::{Host, RunEnd};
use super::model::{Adapter, Policy, RowScore};
use super::relief;
use super::report::StepSeconds;
use super::run::{Data, Model};
use super::start::ReferenceModel;
use super::update::score_trajectories;
use crate::event::{Event, Phase};
use crate::spec::Plan;
use crate::trajectory::Trajectory;

/// Computes log-probs with the current models. Passes are split into the same slices as the training, so that equal
/// weights give equal bits.
pub(super) struct Scorer<'r> {
    pub host: &'r mut dyn Host,
    pub plan: &'r Plan,
    pub model: &'r mut Model,
    pub data: &'r Data,
    /// Number of completions in a slice, which is one optimizer step.
    pub completions_per_step: usize,
    pub seconds: &'r mut StepSeconds,
    pub steps_done: u64,
}

/// Log-probs of a block's model tokens.
pub(super) struct BlockLogps {
    /// Log-probs of the policy that sampled; empty if the training forward provides them.
    pub old: Logps,
    /// Log-probs of the reference; empty when beta = 0.
    pub reference: Logps,
}

impl Scorer<'_> {
    /// Returns the old log-probs, recorded at sampling if sampler and training agree bit for bit, else computed if
    /// needed; and the reference's unless beta = 0.
    pub fn block_logps(
        &mut self,
        trajectories: &[Trajectory<'_>],
        recorded: Option<Logps>,
        needs_old: bool,
    ) -> Result<BlockLogps, RunEnd> {
        let recorded = recorded.filter(|_| self.model.samples_exactly && !self.plan.samples_elsewhere());
        let needs_old = needs_old && recorded.is_none();
        if !needs_old && !self.plan.rloo.needs_reference() {
            return Ok(BlockLogps { old: recorded.unwrap_or_default(), reference: Vec::new() });
        }
        self.host.event(Event::Phase { phase: Phase::Train, step: self.steps_done })?;
        let started = Instant::now();
        let old = match recorded {
            Some(recorded) => recorded,
            None if needs_old => logps(self.scores(trajectories, policy)?),
            None => Vec::new(),
        };
        let reference = self.reference_logps(trajectories)?;
        self.seconds.reference += started.elapsed().as_secs_f64();
        Ok(BlockLogps { old, reference })
    }

    /// The current policy's scores of an evaluation's completions.
    pub fn policy_scores(&mut self, trajectories: &[Trajectory<'_>]) -> Result<Vec<RowScore>, RunEnd> {
        self.scores(trajectories, policy)
    }

    /// Log-probs of the reference model; empty when beta = 0, and during the warm-up that creates the reference.
    pub fn reference_logps(&mut self, trajectories: &[Trajectory<'_>]) -> Result<Logps, RunEnd> {
        let is_there = !matches!(self.model.reference, ReferenceModel::None);
        if !self.plan.rloo.needs_reference() || !is_there {
            return Ok(Vec::new());
        }
        Ok(logps(self.scores(trajectories, |model| model.reference.of(&model.policy))?))
    }

    fn scores(
        &mut self,
        trajectories: &[Trajectory<'_>],
        of: fn(&Model) -> (&Policy, Adapter),
    ) -> Result<Vec<RowScore>, RunEnd> {
        loop {
            let (policy, adapter) = of(self.model);
            let stop = || self.host.stop().is_some();
            let micro_batching = &self.model.micro_batching;
            let slices = trajectories.chunks(self.completions_per_step);
            let scores: Result<Option<Vec<Vec<RowScore>>>> =
                slices.map(|slice| score_trajectories(policy, slice, micro_batching, adapter, &stop)).collect();
            match scores {
                Ok(Some(scores)) => return Ok(scores.into_iter().flatten().collect()),
                Ok(None) => return Err(self.host.stopped()),
                Err(error) => relief::halve_batches(self.model, error, self.plan, self.data, self.host)?,
            }
        }
    }
}

fn policy(model: &Model) -> (&Policy, Adapter) {
    (&model.policy, Adapter::On)
}

fn logps(scores: Vec<RowScore>) -> Logps {
    scores.into_iter().map(|score| score.logps).collect()
}
