//! One sequence: users, workers and the clock act at random on a real server, and every response and every row is compared
//! with the expected one.

mod users;
mod workers;

use std::collections::{BTreeMap, BTreeSet};

use super::expected::Job;
use super::random::Random;
use super::server::{LEASE, Server};
use rlood_store::{JobFilter, JobRow, Store, StoreError};
use rlood_types::id::{DatasetId, JobId, WorkerId};
use rlood_types::job::{Requested, State};
use rlood_types::protocol::EventBatch;
use rlood_types::spec::Plan;

const MAX_JOBS: usize = 5;
const MAX_WORKERS: usize = 4;
/// Length of a time step in milliseconds; connected workers send a heartbeat in each.
const TIME_STEP: i64 = 6_000;

/// A simulated worker process.
#[derive(Debug)]
struct WorkerProcess {
    id: WorkerId,
    /// Whether it is a child process that ends with the server.
    child: bool,
    /// Whether its heartbeats do not arrive.
    cut_off: bool,
    held: Option<HeldClaim>,
}

/// The claim that a worker believes it holds.
#[derive(Debug, Clone)]
struct HeldClaim {
    job: JobId,
    attempt: u64,
    step: u64,
    next_batch: u64,
    /// The last batch, if its response did not arrive.
    unconfirmed: Option<EventBatch>,
    requests: BTreeMap<u64, String>,
}

pub(super) struct World {
    random: Random,
    server: Server,
    plan: Plan,
    jobs: BTreeMap<JobId, Job>,
    processes: Vec<WorkerProcess>,
    /// Ids of sent requests, by job and step.
    asked: BTreeMap<(JobId, u64), String>,
    next_request: u32,
    /// Whether the clock was set since the last tick.
    clock_set: bool,
    /// Log of the actions, in words.
    pub(super) story: Vec<String>,
}

type Check = Result<(), String>;

/// Describes a response that differs from the expected one.
fn wrong<T>(what: &str, answer: &Result<T, StoreError>, expected: &str) -> String
where
    T: std::fmt::Debug,
{
    format!("{what}: {answer:?}, and it should be {expected}")
}

impl World {
    pub(super) async fn new(seed: u64, template: &std::path::Path, dataset: DatasetId) -> Self {
        Self {
            random: Random::new(seed),
            server: Server::start(template).await,
            plan: super::plan(dataset),
            jobs: BTreeMap::new(),
            processes: Vec::new(),
            asked: BTreeMap::new(),
            next_request: 0,
            clock_set: false,
            story: Vec::new(),
        }
    }

    /// Runs a number of actions; then all activity stops, and every job must end.
    pub(super) async fn run(&mut self, length: usize) -> Check {
        for _ in 0..length {
            self.step().await?;
            self.check_rows().await?;
        }
        self.record("everything is cancelled and given up".to_owned());
        self.processes.iter_mut().for_each(|process| process.held = None);
        for job in self.jobs.keys().copied().collect::<Vec<_>>() {
            // The server may die during the call.
            while !self.jobs[&job].state.is_terminal() && self.jobs[&job].requested != Some(Requested::Cancel) {
                self.user_action(job, "cancel").await?;
            }
        }
        for _ in 0..LEASE / TIME_STEP + 2 {
            self.advance_time(TIME_STEP).await?;
        }
        self.check_rows().await?;
        match self.jobs.iter().find(|(_, job)| !job.state.is_terminal()) {
            Some((id, job)) => Err(format!("{id} never ends: {job:?}")),
            None => self.check_all().await,
        }
    }

    async fn step(&mut self) -> Check {
        match self.random.below(100) {
            0..9 => self.create().await,
            9..27 => self.claim().await,
            27..33 => self.any_heartbeat().await,
            33..47 => self.report().await,
            47..56 => self.publish().await,
            56..62 => self.journal().await,
            62..68 => self.finish().await,
            68..77 => {
                let time = TIME_STEP * self.random.from(1, 6);
                self.advance_time(time).await
            }
            77..79 => {
                let by = self.random.from(60_000, 21_600_000) * if self.random.one_in(2) { 1 } else { -1 };
                self.record(format!("the clock is set by {by} ms"));
                self.server.wall += by;
                self.clock_set = true;
                Ok(())
            }
            79..82 => self.lose_worker().await,
            82..93 => self.any_user_action().await,
            93..96 => {
                let server = &mut self.server;
                server.restart(&mut self.random).await?;
                self.after_restart("the server restarts").await
            }
            _ => self.race().await,
        }
    }

    fn record(&mut self, line: String) {
        self.story.push(line);
    }

    fn store(&self) -> Store {
        self.server.store.clone()
    }

    /// Updates the model after a restart: child workers died with the old server, and the other leases were renewed.
    async fn after_restart(&mut self, why: &str) -> Check {
        self.record(format!("{why}, and another one starts"));
        let children: BTreeSet<WorkerId> =
            self.processes.iter().filter(|process| process.child).map(|p| p.id).collect();
        self.processes.retain(|process| !process.child);
        for job in self.jobs.values_mut().filter(|job| job.state == State::Running) {
            match job.owner {
                Some(owner) if children.contains(&owner) => job.release(false),
                _ => job.deadline = self.server.steady + LEASE,
            }
        }
        self.clock_set = false;
        self.check_rows().await?;
        self.check_all().await
    }

    /// Records an interrupted call; returns whether it took effect.
    fn cut_short(&mut self, what: &str, applied: bool) -> bool {
        let when = if applied { "after" } else { "before" };
        self.record(format!("{what}: the server dies {when} it is durable"));
        applied
    }

    /// Advances the time; connected workers send heartbeats, and the server checks for expired leases.
    async fn advance_time(&mut self, time: i64) -> Check {
        let mut left = time;
        while left > 0 {
            left -= TIME_STEP;
            self.server.steady += TIME_STEP;
            self.server.wall += TIME_STEP;
            self.tick().await?;
            for place in 0..self.processes.len() {
                // A restart may have removed some workers.
                if self.processes.get(place).is_some_and(|process| !process.cut_off) {
                    self.heartbeat(place).await?;
                }
            }
        }
        Ok(())
    }

    async fn tick(&mut self) -> Check {
        let now = self.server.steady;
        if std::mem::take(&mut self.clock_set) {
            self.jobs.values_mut().filter(|job| job.state == State::Running).for_each(|job| job.deadline = now + LEASE);
        }
        let lapsed = |job: &Job| job.state == State::Running && job.deadline < now;
        let expected: BTreeSet<JobId> = self.jobs.iter().filter(|(_, job)| lapsed(job)).map(|(id, _)| *id).collect();
        let Server { store, watch, wall, steady, .. } = &mut self.server;
        let taken = watch.tick(store, *wall, *steady).await.map_err(|error| format!("tick: {error:?}"))?;
        let taken = BTreeSet::from_iter(taken);
        if taken != expected {
            return Err(format!("taken back: {taken:?}, and it should be {expected:?}"));
        }
        for id in taken {
            self.record(format!("the lease of {id} lapses"));
            self.jobs.get_mut(&id).ok_or("no job")?.release(true);
        }
        Ok(())
    }

    /// Checks that every job's row is as expected.
    async fn check_rows(&mut self) -> Check {
        let mut owners = BTreeSet::new();
        let all = self.server.store.job_list(&JobFilter::default(), None, 1000).await;
        let rows = all.map_err(|error| format!("the list of jobs: {error}"))?.data;
        let mut rows: BTreeMap<JobId, JobRow> = rows.into_iter().map(|row| (row.id, row)).collect();
        for (id, job) in &self.jobs {
            let row = rows.remove(id).ok_or_else(|| format!("{id} is gone"))?;
            let found = (row.state, row.requested, row.attempt, row.worker, row.step, row.priority);
            let expected = (job.state, job.requested, job.attempt, job.owner, job.step, job.priority);
            if found != expected {
                return Err(format!("{id} is {found:?}, and it should be {expected:?}"));
            }
            if !job.state.is_terminal() && row.failed_attempts != job.failed_attempts {
                return Err(format!("{id} has failed {} times and not {}", row.failed_attempts, job.failed_attempts));
            }
            let code = row.failure.as_ref().map(|failure| failure.code.as_str());
            if job.code.is_some() && code != job.code {
                return Err(format!("{id} failed as {code:?}, and it should be {:?}", job.code));
            }
            if row.reached.is_some_and(|reached| reached != job.reached) {
                return Err(format!("{id} has reached {:?}, and it should be {:?}", row.reached, job.reached));
            }
            if let Some(owner) = row.worker
                && !owners.insert(owner)
            {
                return Err(format!("{owner} holds two jobs"));
            }
            if let (Some(until), false) = (row.lease_until, self.clock_set)
                && until - self.server.wall != job.deadline - self.server.steady
            {
                return Err(format!(
                    "the lease of {id} ends {} ms off",
                    until - self.server.wall - job.deadline + self.server.steady
                ));
            }
        }
        Ok(())
    }

    /// Checks also the dependent data: history, steps, checkpoints with their bytes.
    async fn check_all(&mut self) -> Check {
        let store = self.store();
        for (id, job) in &self.jobs {
            let events = store.event_page(*id, 0, 1000).await.map_err(|error| format!("{id}: {error}"))?;
            let kinds: Vec<&str> = events.iter().map(|event| event.kind.as_str()).collect();
            if kinds != job.events {
                return Err(format!("the events of {id} are {kinds:?}, and they should be {:?}", job.events));
            }
            if events.iter().zip(1..).any(|(event, seq)| event.seq != seq) {
                return Err(format!("the events of {id} have a gap"));
            }
            let steps = store.step_page(*id, None, 0, u64::MAX >> 1).await.map_err(|error| format!("{id}: {error}"))?;
            let steps: Vec<u64> = steps.iter().map(|row| row.step).collect();
            if steps != job.steps.keys().copied().collect::<Vec<_>>() {
                return Err(format!("{id} has the steps {steps:?}, and it should be {:?}", job.steps));
            }
            let rows = store.checkpoint_list(*id).await.map_err(|error| format!("{id}: {error}"))?;
            let found: Vec<(u64, u64)> = rows.iter().map(|row| (row.step, row.attempt)).collect();
            if found != job.checkpoints {
                return Err(format!("{id} has the checkpoints {found:?}, and it should be {:?}", job.checkpoints));
            }
            for row in rows {
                let verified = self.server.files.checkpoint_verify(*id, row.step, row.attempt, &row.files);
                verified
                    .map_err(|error| format!("the checkpoint {} of {id} is not what it says: {error}", row.step))?;
            }
        }
        Ok(())
    }
}
