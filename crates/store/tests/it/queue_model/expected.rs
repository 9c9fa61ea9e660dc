//! A model of the queue's behavior, without a database.

use std::collections::{BTreeMap, BTreeSet};

use rlood_store::Cursor;
use rlood_store::claims::MAX_FAILED_ATTEMPTS;
use rlood_types::id::WorkerId;
use rlood_types::job::{Requested, State};
use rlood_types::protocol::Outcome;

/// Number of checkpoints that the plan keeps.
pub(super) const KEEP_LAST: usize = 2;
/// Number of failures that the plan permits: more than the strikes, so that both ways to fail occur.
pub(super) const MAX_ATTEMPTS: u32 = 6;
/// Number of ended attempts after which an alert is raised, each time.
const ENDS_AN_ALERT: u32 = 10;

/// The expected state of a job.
#[derive(Debug, Clone)]
pub(super) struct Job {
    pub(super) state: State,
    pub(super) requested: Option<Requested>,
    pub(super) attempt: u64,
    pub(super) failed_attempts: u32,
    /// The highest point when the current attempt began.
    pub(super) reached: Cursor,
    /// Number of ended attempts, and how many of them failed.
    pub(super) ends: u32,
    pub(super) failures: u32,
    /// Code of the last failure: `worker_lost` or `max_attempts`.
    pub(super) code: Option<&'static str>,
    pub(super) owner: Option<WorkerId>,
    /// Time at which the claim expires, on the steady clock.
    pub(super) deadline: i64,
    pub(super) step: u64,
    pub(super) priority: i64,
    /// Whether the worker paused the job rather than its user, so that it would resume automatically.
    pub(super) by_itself: bool,
    /// Position of the job within its priority.
    pub(super) order: i64,
    pub(super) last_batch: Option<u64>,
    /// Reported steps, each with its attempt.
    pub(super) steps: BTreeMap<u64, u64>,
    /// Checkpoints as (step, attempt), newest first.
    pub(super) checkpoints: Vec<(u64, u64)>,
    /// Ids of reward requests, by step.
    pub(super) requests: BTreeMap<u64, String>,
    /// Steps whose request is answered, and steps whose rollout is in the journal.
    pub(super) answered: BTreeSet<u64>,
    pub(super) rollouts: BTreeSet<u64>,
    /// Evaluations whose rollout is in the journal, with their number of rows.
    pub(super) evaluations: BTreeMap<u64, u64>,
    pub(super) events: Vec<String>,
}

impl Job {
    pub(super) fn new(priority: i64, order: i64) -> Self {
        Self {
            state: State::Queued,
            requested: None,
            attempt: 0,
            failed_attempts: 0,
            reached: Cursor::default(),
            ends: 0,
            failures: 0,
            code: None,
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
            answered: BTreeSet::new(),
            rollouts: BTreeSet::new(),
            evaluations: BTreeMap::new(),
            events: vec!["job.created".to_owned()],
        }
    }

    pub(super) fn is_owned_by(&self, attempt: u64) -> bool {
        self.state == State::Running && self.attempt == attempt
    }

    pub(super) fn record_event(&mut self, event: &str) {
        self.events.push(event.to_owned());
    }

    pub(super) fn claim(&mut self, worker: WorkerId, deadline: i64) {
        self.state = State::Running;
        self.attempt += 1;
        self.owner = Some(worker);
        self.deadline = deadline;
        self.last_batch = None;
        self.record_event("job.started");
        let newest = self.checkpoints.first().copied();
        let before = self.steps.len();
        self.steps.retain(|step, attempt| {
            newest.is_some_and(|(kept, writer)| *step < kept || (*step == kept && *attempt <= writer))
        });
        self.step = newest.map_or(0, |(step, _)| step);
        self.reached = self.reached.max(self.cursor());
        if self.steps.len() < before {
            self.record_event("rewind");
        }
    }

    /// Returns the progress from the job's steps and journal.
    fn cursor(&self) -> Cursor {
        let begun = self.requests.keys().chain(&self.rollouts).max().map_or(0, |step| step - 1);
        let evaluated = self.evaluations.keys().max().copied().unwrap_or(0);
        let step = self.step.max(begun).max(evaluated);
        let after = |steps: &BTreeSet<u64>| steps.iter().filter(|known| **known > step).count() as u64;
        let rows = self.evaluations.get(&step).copied().unwrap_or(0);
        Cursor(step, after(&self.answered) + after(&self.rollouts), rows)
    }

    fn progressed(&self) -> bool {
        self.cursor() > self.reached
    }

    /// Moves the job away from its worker, or out of the queue.
    pub(super) fn leave(&mut self, to: State, event: &str) {
        if self.state == State::Running {
            if self.progressed() {
                self.failed_attempts = 0;
            }
            self.reached = self.reached.max(self.cursor());
        }
        self.state = to;
        self.by_itself = false;
        self.requested = None;
        self.owner = None;
        self.last_batch = None;
        if to.is_terminal() {
            self.requests.clear();
            self.answered.clear();
            self.rollouts.clear();
            self.evaluations.clear();
        }
        self.record_event(event);
    }

    /// Releases the job after its worker ended without a report.
    pub(super) fn release(&mut self, charged: bool) {
        if self.requested == Some(Requested::Cancel) {
            return self.leave(State::Cancelled, "job.cancelled");
        }
        self.failed_attempts = if self.progressed() { 0 } else { self.failed_attempts + u32::from(charged) };
        self.ends += 1;
        self.failures += u32::from(charged);
        if self.ends.is_multiple_of(ENDS_AN_ALERT) {
            self.record_event("alert");
        }
        if self.requested == Some(Requested::Pause) {
            return self.leave(State::Paused, "job.paused");
        }
        let strikes = self.failed_attempts >= MAX_FAILED_ATTEMPTS;
        if charged && (strikes || self.failures >= MAX_ATTEMPTS) {
            self.code = Some(if strikes { "worker_lost" } else { "max_attempts" });
            return self.leave(State::Failed, "job.failed");
        }
        self.leave(State::Queued, "job.requeued");
    }

    pub(super) fn finish(&mut self, outcome: &Outcome) {
        match (outcome, self.requested) {
            (Outcome::Succeeded, _) => self.leave(State::Succeeded, "job.succeeded"),
            (Outcome::Failed { .. }, _) => self.leave(State::Failed, "job.failed"),
            (Outcome::Cancelled, _)
            | (Outcome::Paused { .. } | Outcome::Requeued | Outcome::Preempted, Some(Requested::Cancel)) => {
                self.leave(State::Cancelled, "job.cancelled");
            }
            (Outcome::Paused { reason: Some(_) }, None) => {
                self.leave(State::Paused, "job.paused");
                self.by_itself = true;
            }
            (Outcome::Paused { .. } | Outcome::Requeued | Outcome::Preempted, Some(_)) => {
                self.leave(State::Paused, "job.paused");
            }
            // The end of a withdrawn pause is not the end of an attempt.
            (Outcome::Paused { reason: None }, None) => self.leave(State::Queued, "job.requeued"),
            (Outcome::Requeued | Outcome::Preempted, None) => self.release(false),
        }
    }

    /// Adds a batch of steps; a repeated batch has no effect.
    pub(super) fn report(&mut self, batch: u64, steps: &[u64]) {
        if self.last_batch.is_some_and(|last| last >= batch) {
            return;
        }
        self.last_batch = Some(batch);
        for step in steps {
            self.steps.insert(*step, self.attempt);
            self.step = self.step.max(*step);
            self.record_event("step");
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
        self.step = self.step.max(step);
        self.requests.retain(|asked, _| *asked > step);
        self.answered.retain(|asked| *asked > step);
        self.rollouts.retain(|sampled| *sampled > step);
        // An evaluation that follows the step may not be finished yet.
        self.evaluations.retain(|evaluated, _| *evaluated >= step);
        self.record_event("checkpoint.saved");
    }
}
