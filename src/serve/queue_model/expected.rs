//! What the queue is to do, said again without a database.

use std::collections::BTreeMap;

use crate::id::WorkerId;
use crate::job::{Requested, State};
use crate::protocol::Outcome;
use crate::store::claims::MAX_FAILED_ATTEMPTS;

/// Checkpoints that the plan keeps.
pub(super) const KEEP_LAST: usize = 2;

/// A job as it should be.
#[derive(Debug, Clone)]
pub(super) struct Job {
    pub(super) state: State,
    pub(super) requested: Option<Requested>,
    pub(super) attempt: u64,
    pub(super) failed_attempts: u32,
    pub(super) owner: Option<WorkerId>,
    /// When the claim lapses, on the clock that nobody sets.
    pub(super) deadline: i64,
    pub(super) step: u64,
    pub(super) priority: i64,
    /// Paused by its worker, not by its user: it would go on by itself.
    pub(super) by_itself: bool,
    /// Its place within a priority.
    pub(super) order: i64,
    pub(super) last_batch: Option<u64>,
    /// Steps reported, and by which attempt.
    pub(super) steps: BTreeMap<u64, u64>,
    /// Step and attempt, newest first.
    pub(super) checkpoints: Vec<(u64, u64)>,
    /// Reward requests by step.
    pub(super) requests: BTreeMap<u64, String>,
    pub(super) events: Vec<String>,
}

impl Job {
    pub(super) fn new(priority: i64, order: i64) -> Self {
        Self {
            state: State::Queued,
            requested: None,
            attempt: 0,
            failed_attempts: 0,
            owner: None,
            deadline: 0,
            step: 0,
            priority,
            by_itself: false,
            order,
            last_batch: None,
            steps: BTreeMap::new(),
            checkpoints: Vec::new(),
            requests: BTreeMap::new(),
            events: vec!["job.created".to_owned()],
        }
    }

    pub(super) fn is_owned_by(&self, attempt: u64) -> bool {
        self.state == State::Running && self.attempt == attempt
    }

    pub(super) fn tell(&mut self, event: &str) {
        self.events.push(event.to_owned());
    }

    pub(super) fn claim(&mut self, worker: WorkerId, deadline: i64) {
        self.state = State::Running;
        self.attempt += 1;
        self.owner = Some(worker);
        self.deadline = deadline;
        self.last_batch = None;
        self.tell("job.started");
        let newest = self.checkpoints.first().copied();
        let before = self.steps.len();
        self.steps.retain(|step, attempt| {
            newest.is_some_and(|(kept, writer)| *step < kept || (*step == kept && *attempt <= writer))
        });
        self.step = newest.map_or(0, |(step, _)| step);
        if self.steps.len() < before {
            self.tell("rewind");
        }
    }

    /// Out of its worker's hands, or of the queue.
    pub(super) fn leave(&mut self, to: State, event: &str) {
        self.state = to;
        self.by_itself = false;
        self.requested = None;
        self.owner = None;
        self.last_batch = None;
        if to.is_terminal() {
            self.requests.clear();
        }
        self.tell(event);
    }

    /// Its worker is gone without a word.
    pub(super) fn release(&mut self, charged: bool) {
        let failed = self.failed_attempts + u32::from(charged);
        match self.requested {
            Some(Requested::Cancel) => self.leave(State::Cancelled, "job.cancelled"),
            Some(Requested::Pause) => {
                self.failed_attempts = failed;
                self.leave(State::Paused, "job.paused");
            }
            None if charged && failed >= MAX_FAILED_ATTEMPTS => self.leave(State::Failed, "job.failed"),
            None => {
                self.failed_attempts = failed;
                self.leave(State::Queued, "job.requeued");
            }
        }
    }

    pub(super) fn finish(&mut self, outcome: &Outcome) {
        match (outcome, self.requested) {
            (Outcome::Succeeded, _) => self.leave(State::Succeeded, "job.succeeded"),
            (Outcome::Failed { .. }, _) => self.leave(State::Failed, "job.failed"),
            (Outcome::Cancelled, _) | (Outcome::Paused { .. } | Outcome::Requeued, Some(Requested::Cancel)) => {
                self.leave(State::Cancelled, "job.cancelled");
            }
            (Outcome::Paused { reason: Some(_) }, None) => {
                self.leave(State::Paused, "job.paused");
                self.by_itself = true;
            }
            (Outcome::Paused { .. } | Outcome::Requeued, Some(_)) => {
                self.leave(State::Paused, "job.paused");
            }
            (Outcome::Paused { reason: None } | Outcome::Requeued, None) => self.release(false),
        }
    }

    /// A batch of steps; repeated ones change nothing.
    pub(super) fn report(&mut self, batch: u64, steps: &[u64]) {
        if self.last_batch.is_some_and(|last| last >= batch) {
            return;
        }
        self.last_batch = Some(batch);
        for step in steps {
            self.steps.insert(*step, self.attempt);
            self.step = self.step.max(*step);
            self.tell("step");
        }
    }

    pub(super) fn publish(&mut self, step: u64) {
        let attempt = self.attempt;
        if self.checkpoints.contains(&(step, attempt)) {
            return;
        }
        self.checkpoints.retain(|(known, _)| *known != step);
        self.checkpoints.push((step, attempt));
        self.checkpoints.sort_by_key(|checkpoint| std::cmp::Reverse(*checkpoint));
        let mut place = 0;
        self.checkpoints.retain(|(known, _)| {
            place += 1;
            place <= KEEP_LAST || *known == step
        });
        self.failed_attempts = 0;
        self.step = self.step.max(step);
        self.requests.retain(|asked, _| *asked > step);
        self.tell("checkpoint.saved");
    }
}
