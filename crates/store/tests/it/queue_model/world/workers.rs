//! Actions of workers, including workers that wrongly believe they hold a job.

use std::collections::BTreeMap;

use super::super::expected::Job;
use super::super::server::{Called, LEASE};
use super::{Check, HeldClaim, MAX_WORKERS, WorkerProcess, World, wrong};
use rlood_store::publish::{PublishError, publish_checkpoint};
use rlood_store::{HeartbeatUpdate, PublishCheckpoint, StoreError};
use rlood_types::event::{Event, Metrics, Phase, SamplePhase};
use rlood_types::id::{JobId, WorkerId};
use rlood_types::job::{Failure, FailureClass, Requested, State};
use rlood_types::protocol::{EventBatch, FileEntry, JournalEntry, Outcome, PROTOCOL, Register, RewardAnswer};
use rlood_types::rollout::{RolloutId, SampledGroup};

impl World {
    pub(super) fn next_in_queue(&self) -> Option<JobId> {
        let queued = self.jobs.iter().filter(|(_, job)| job.state == State::Queued);
        queued.min_by_key(|(_, job)| (std::cmp::Reverse(job.priority), job.order)).map(|(id, _)| *id)
    }

    pub(super) async fn register(&mut self, child: bool) -> Result<usize, String> {
        let id = WorkerId::new();
        let (device, version) = ("cpu".into(), "0".into());
        let register = Register {
            worker: id,
            device,
            pid: 1,
            threads: 1,
            version,
            child,
            protocol: PROTOCOL,
            kernels: None,
            runtimes: Vec::new(),
        };
        let registered = self.store().worker_register(&register, self.server.wall).await;
        registered.map_err(|error| format!("register: {error}"))?;
        self.record(format!("{id} registers{}", if child { " as a child" } else { "" }));
        self.processes.push(WorkerProcess { id, child, cut_off: false, held: None });
        Ok(self.processes.len() - 1)
    }

    pub(super) async fn claim(&mut self) -> Check {
        let place = if self.processes.len() < MAX_WORKERS && self.random.one_in(3) {
            let child = self.random.one_in(2);
            self.register(child).await?
        } else if self.processes.is_empty() {
            return Ok(());
        } else {
            self.random.below(self.processes.len())
        };
        // A worker that holds a job claims again only after it was restarted under its old id.
        if self.processes[place].held.is_some() && !self.random.one_in(8) {
            return Ok(());
        }
        let worker = self.processes[place].id;
        let (store, now) = (self.store(), self.server.wall);
        let call = async move { store.job_claim(worker, now, LEASE).await };
        match self.server.call(&mut self.random, call).await? {
            Called::Answered(answer) => {
                let expected = self.claimed(worker);
                let claimed = answer.map_err(|error| format!("claim: {error:?}"))?;
                let found = claimed.as_ref().map(|claimed| (claimed.job, claimed.attempt));
                if found != expected {
                    return Err(format!("{worker} got {found:?}, and it should be {expected:?}"));
                }
                self.continue_claim(place, found).await
            }
            Called::Lost { applied } => {
                self.processes[place].held = None;
                if self.cut_short("claim", applied) {
                    self.claimed(worker);
                }
                self.after_restart("it").await
            }
        }
    }

    /// Applies a claim to the model.
    pub(super) fn claimed(&mut self, worker: WorkerId) -> Option<(JobId, u64)> {
        for job in self.jobs.values_mut().filter(|job| job.owner == Some(worker)) {
            job.release(true);
        }
        let next = self.next_in_queue()?;
        let deadline = self.server.steady + LEASE;
        let job = self.jobs.get_mut(&next)?;
        job.claim(worker, deadline);
        Some((next, job.attempt))
    }

    /// The worker reads the journal and continues from the checkpoint.
    pub(super) async fn continue_claim(&mut self, place: usize, claimed: Option<(JobId, u64)>) -> Check {
        self.processes[place].held = None;
        let Some((job, attempt)) = claimed else { return Ok(()) };
        self.record(format!("{} claims {job}, attempt {attempt}", self.processes[place].id));
        let page = self.store().journal_page(job, attempt, 0, self.server.wall).await;
        let page = page.map_err(|error| format!("the journal of {job}: {error}"))?;
        let entries = page.entries.into_iter().filter_map(|entry| match entry {
            JournalEntry::Request { rollout, id, .. } | JournalEntry::Answer { rollout, id, .. } => {
                Some((rollout.step, id))
            }
            JournalEntry::Rollout { .. } | JournalEntry::Accepted { .. } | JournalEntry::Forget { .. } => None,
        });
        let requests: BTreeMap<u64, String> = entries.collect();
        let expected = &self.jobs[&job];
        if requests != expected.requests {
            return Err(format!("the journal of {job} holds {requests:?} and not {:?}", expected.requests));
        }
        let step = expected.step;
        self.processes[place].held = Some(HeldClaim { job, attempt, step, next_batch: 0, unconfirmed: None, requests });
        Ok(())
    }

    /// Returns a worker that believes it holds a job.
    pub(super) fn busy(&mut self) -> Option<(usize, HeldClaim)> {
        let busy: Vec<usize> =
            (0..self.processes.len()).filter(|place| self.processes[*place].held.is_some()).collect();
        let place = self.random.pick(&busy)?;
        Some((place, self.processes[place].held.clone()?))
    }

    pub(super) fn owns(&self, held: &HeldClaim) -> bool {
        self.jobs.get(&held.job).is_some_and(|job| job.is_owned_by(held.attempt))
    }

    /// Checks that calls of a worker that does not own the job are rejected. Most workers then stop, and some continue for a while.
    pub(super) fn fenced<T: std::fmt::Debug>(
        &mut self,
        place: usize,
        what: &str,
        answer: &Result<T, StoreError>,
    ) -> Check {
        match answer {
            Err(StoreError::LeaseLost) => {
                self.record(format!("{what} by {}: the claim is lost", self.processes[place].id));
                if self.random.one_in(2) {
                    self.processes[place].held = None;
                }
                Ok(())
            }
            other => Err(wrong(what, other, "LeaseLost: it does not own the job any more")),
        }
    }

    pub(super) async fn any_heartbeat(&mut self) -> Check {
        match self.busy() {
            Some((place, _)) => self.heartbeat(place).await,
            None => Ok(()),
        }
    }

    pub(super) async fn heartbeat(&mut self, place: usize) -> Check {
        let Some(held) = self.processes[place].held.clone() else { return Ok(()) };
        let owns = self.owns(&held);
        let heartbeat = HeartbeatUpdate {
            phase: Phase::Train,
            status_reason: None,
            step: held.step,
            eta_s: None,
            memory_bytes: None,
        };
        let (store, now) = (self.store(), self.server.wall);
        let call = async move { store.job_heartbeat(held.job, held.attempt, heartbeat, now, LEASE).await };
        let answer = match self.server.call(&mut self.random, call).await? {
            Called::Lost { applied } => {
                if self.cut_short("heartbeat", applied) && owns {
                    let job = self.jobs.get_mut(&held.job).ok_or("no job")?;
                    job.step = job.step.max(held.step);
                }
                return self.after_restart("it").await;
            }
            Called::Answered(answer) => answer,
        };
        if !owns {
            return self.fenced(place, "heartbeat", &answer);
        }
        let deadline = self.server.steady + LEASE;
        let job = self.jobs.get_mut(&held.job).ok_or("no job")?;
        (job.deadline, job.step) = (deadline, job.step.max(held.step));
        let requested = job.requested;
        match answer {
            Ok(found) if found == requested => {}
            other => return Err(wrong("heartbeat", &other, &format!("Ok({requested:?})"))),
        }
        // Most workers carry out the request.
        if requested.is_some() && self.random.one_in(2) { self.finish_as(place, None).await } else { Ok(()) }
    }

    pub(super) async fn report(&mut self) -> Check {
        let Some((place, mut held)) = self.busy() else { return Ok(()) };
        let batch = match held.unconfirmed.take() {
            Some(batch) => batch,
            None => {
                let steps = held.step + 1..=held.step + self.random.from(1, 2) as u64;
                let metrics = || Metrics::from([("reward".to_owned(), Some(0.5))]);
                let event = |step| Event::Step { step, kind: SamplePhase::Train, metrics: metrics() };
                let batch = EventBatch {
                    attempt: held.attempt,
                    batch: held.next_batch,
                    events: steps.clone().map(event).collect(),
                    log: vec!["a line".to_owned()],
                };
                held.step = *steps.end();
                held.next_batch += 1;
                batch
            }
        };
        let steps: Vec<u64> = batch
            .events
            .iter()
            .filter_map(|event| match event {
                Event::Step { step, .. } => Some(*step),
                _ => None,
            })
            .collect();
        let number = batch.batch;
        // Its response may get lost on the way, so that the same batch is sent again.
        let confirmed = !self.random.one_in(6);
        held.unconfirmed = (!confirmed).then(|| batch.clone());
        let owns = self.owns(&held);
        let (store, job, now) = (self.store(), held.job, self.server.wall);
        let sent = batch.clone();
        let call = async move { store.events_append(job, &sent, now).await };
        match self.server.call(&mut self.random, call).await? {
            Called::Lost { applied } => {
                held.unconfirmed = Some(batch);
                self.processes[place].held = Some(held);
                if self.cut_short("events", applied) && owns {
                    self.jobs.get_mut(&job).ok_or("no job")?.report(number, &steps);
                }
                self.after_restart("it").await
            }
            Called::Answered(answer) if owns => {
                self.record(format!("{} reports {steps:?} of {job}, batch {number}", self.processes[place].id));
                self.processes[place].held = Some(held);
                let job = self.jobs.get_mut(&job).ok_or("no job")?;
                let fresh = job.last_batch.is_none_or(|last| last < number);
                job.report(number, &steps);
                if answer.as_ref().is_ok_and(|stored| *stored == fresh) {
                    Ok(())
                } else {
                    Err(wrong("events", &answer, &format!("Ok({fresh})")))
                }
            }
            Called::Answered(answer) => self.fenced(place, "events", &answer),
        }
    }

    pub(super) async fn publish(&mut self) -> Check {
        let Some((place, held)) = self.busy() else { return Ok(()) };
        // A checkpoint is not saved before the rows of its steps are stored.
        if held.step == 0 || held.unconfirmed.is_some() {
            return Ok(());
        }
        let HeldClaim { job, attempt, step, .. } = held;
        let owns = self.owns(&held);
        let (store, files, now) = (self.store(), self.server.files.clone(), self.server.wall);
        let mut listed = Vec::new();
        for name in ["adapter_model.safetensors", "manifest.json"] {
            let bytes = format!("{name} of {job} after {step} by {attempt}");
            let place = async {
                let mut staged = files.stage(1000).await?;
                staged.write(bytes.as_bytes()).await?;
                let done = staged.finish().await?;
                listed.push(FileEntry { name: name.to_owned(), size_bytes: done.size_bytes, sha256: done.sha256 });
                files.checkpoint_place(done, job, step, attempt, name).await
            };
            place.await.map_err(|error| format!("upload: {error}"))?;
        }
        let call = async move {
            let metrics = Metrics::new();
            let checkpoint =
                PublishCheckpoint { job, attempt, step, files: &listed, metrics: &metrics, temporary: false };
            publish_checkpoint(&store, &files, checkpoint, now).await
        };
        match self.server.call(&mut self.random, call).await? {
            Called::Lost { applied } => {
                if self.cut_short("publish", applied) && owns {
                    self.jobs.get_mut(&job).ok_or("no job")?.publish(step);
                }
                self.after_restart("it").await
            }
            Called::Answered(answer) => {
                let answer = answer.map_err(|error| match error {
                    PublishError::Store(error) => error,
                    other => StoreError::NotFound { kind: "expected error", id: other.to_string() },
                });
                if !owns {
                    return self.fenced(place, "publish", &answer);
                }
                self.record(format!("{} publishes step {step} of {job}", self.processes[place].id));
                answer.map_err(|error| format!("publish: {error}"))?;
                self.jobs.get_mut(&job).ok_or("no job")?.publish(step);
                if let Some(held) = &mut self.processes[place].held {
                    held.requests.retain(|asked, _| *asked > step);
                }
                Ok(())
            }
        }
    }

    /// Sends a reward request for the current step, after it was recorded in the journal.
    pub(super) async fn journal(&mut self) -> Check {
        let Some((place, mut held)) = self.busy() else { return Ok(()) };
        let (job, attempt, held_step, step) = (held.job, held.attempt, held.step, held.step + 1);
        self.next_request += 1;
        let fresh = format!("rwr_{}", self.next_request);
        let id = held.requests.entry(step).or_insert(fresh).clone();
        let owns = self.owns(&held);
        self.processes[place].held = Some(held);
        let (key, rollout) = (format!("samples of {step}"), RolloutId::train(step));
        let body = "{}".to_owned();
        let request = JournalEntry::Request {
            rollout,
            reward: "r".to_owned(),
            key: key.clone(),
            id: id.clone(),
            body: body.clone(),
            later: None,
        };
        // The groups are the same for any worker: a row or two.
        let groups = |count: u64| {
            (0..count).map(|row| SampledGroup { row, completions: Vec::new(), prompt_ids: None }).collect()
        };
        let (answered, rows) = (self.random.one_in(2), 1 + step % 2);
        let mut entries = vec![JournalEntry::Rollout { rollout, groups: groups(1), samplers: Vec::new() }, request];
        if answered {
            entries.push(JournalEntry::Answer { rollout, key, id: id.clone(), answer: RewardAnswer::Body { body } });
        }
        // The evaluation that follows the previous step.
        let evaluated = (self.random.one_in(3) && held_step > 0).then_some(held_step);
        if let Some(step) = evaluated {
            entries.push(JournalEntry::Rollout {
                rollout: RolloutId::eval(step),
                groups: groups(rows),
                samplers: Vec::new(),
            });
        }
        let written = move |job: &mut Job, id: String| {
            job.requests.entry(step).or_insert(id);
            job.rollouts.insert(step);
            job.answered.extend(answered.then_some(step));
            job.evaluations.extend(evaluated.map(|step| (step, rows)));
        };
        let (store, now) = (self.store(), self.server.wall);
        let call = async move { store.journal_append(job, attempt, &entries, now).await };
        let covered = |job: &Job| job.checkpoints.first().is_some_and(|(saved, _)| *saved >= step);
        match self.server.call(&mut self.random, call).await? {
            Called::Lost { applied } => {
                if self.cut_short("journal", applied) && owns {
                    written(self.jobs.get_mut(&job).ok_or("no job")?, id);
                }
                self.after_restart("it").await
            }
            Called::Answered(answer) if !owns => self.fenced(place, "journal", &answer),
            Called::Answered(answer) => {
                answer.map_err(|error| format!("journal: {error:?}"))?;
                self.record(format!("{} asks {id} for step {step} of {job}", self.processes[place].id));
                let known = self.jobs.get_mut(&job).ok_or("no job")?;
                if covered(known) {
                    return Err(format!("step {step} of {job} is asked for after it was saved"));
                }
                written(known, id.clone());
                match self.asked.insert((job, step), id.clone()) {
                    Some(before) if before != id => {
                        Err(format!("step {step} of {job} is asked under {before} and {id}"))
                    }
                    _ => Ok(()),
                }
            }
        }
    }

    pub(super) async fn finish(&mut self) -> Check {
        let Some((place, _)) = self.busy() else { return Ok(()) };
        let outcome = match self.random.below(8) {
            0 => Outcome::Succeeded,
            1 => {
                let failure = Failure {
                    class: FailureClass::User,
                    code: "diverged".to_owned(),
                    message: "no".to_owned(),
                    phase: None,
                    step: None,
                    suggestion: None,
                };
                Outcome::Failed { failure }
            }
            2 => Outcome::Paused { reason: Some("reward_outage".to_owned()) },
            3 => Outcome::Requeued,
            4 => Outcome::Preempted,
            _ => return self.finish_as(place, None).await,
        };
        self.finish_as(place, Some(outcome)).await
    }

    /// Ends the attempt with this outcome, or as the user requested.
    pub(super) async fn finish_as(&mut self, place: usize, outcome: Option<Outcome>) -> Check {
        let Some(held) = self.processes[place].held.clone() else { return Ok(()) };
        let requested = self.jobs.get(&held.job).and_then(|job| job.requested);
        let outcome = match (outcome, requested) {
            (Some(outcome), _) => outcome,
            (None, Some(Requested::Cancel)) => Outcome::Cancelled,
            (None, Some(Requested::Pause)) => Outcome::Paused { reason: None },
            (None, None) => Outcome::Requeued,
        };
        let owns = self.owns(&held);
        let (store, now, sent) = (self.store(), self.server.wall, outcome.clone());
        let call = async move { store.job_finish(held.job, held.attempt, sent, now).await };
        match self.server.call(&mut self.random, call).await? {
            Called::Lost { applied } => {
                if self.cut_short("finish", applied) && owns {
                    self.jobs.get_mut(&held.job).ok_or("no job")?.finish(&outcome);
                }
                self.after_restart("it").await
            }
            Called::Answered(answer) if !owns => self.fenced(place, "finish", &answer),
            Called::Answered(answer) => {
                answer.map_err(|error| format!("finish: {error:?}"))?;
                self.record(format!("{} finishes {}: {outcome:?}", self.processes[place].id, held.job));
                self.jobs.get_mut(&held.job).ok_or("no job")?.finish(&outcome);
                self.processes[place].held = None;
                Ok(())
            }
        }
    }

    pub(super) async fn lose_worker(&mut self) -> Check {
        if self.processes.is_empty() {
            return Ok(());
        }
        let place = self.random.below(self.processes.len());
        if !self.processes[place].child {
            // The machine, the network or both fail, and the server is not notified.
            let process = &mut self.processes[place];
            process.cut_off = !process.cut_off;
            let line = format!("{} is {}", process.id, if process.cut_off { "cut off" } else { "heard again" });
            self.record(line);
            return Ok(());
        }
        let worker = self.processes.remove(place).id;
        let (store, now) = (self.store(), self.server.wall);
        let call = async move { store.worker_lost(worker, Some("killed"), now).await };
        let held = self.jobs.iter().find(|(_, job)| job.owner == Some(worker)).map(|(id, _)| *id);
        let lost = match self.server.call(&mut self.random, call).await? {
            Called::Lost { applied } => {
                // If the child was not removed yet, the next server removes it, and its attempt does not count as failed.
                if self.cut_short("the death of a child", applied)
                    && let Some(job) = held
                {
                    self.jobs.get_mut(&job).ok_or("no job")?.release(true);
                } else if let Some(job) = held {
                    self.jobs.get_mut(&job).ok_or("no job")?.release(false);
                }
                return self.after_restart("it").await;
            }
            Called::Answered(answer) => answer.map_err(|error| format!("worker_lost: {error:?}"))?,
        };
        self.record(format!("the child {worker} dies with {held:?}"));
        if lost != held {
            return Err(format!("worker_lost: {lost:?}, and it should be {held:?}"));
        }
        if let Some(job) = held {
            self.jobs.get_mut(&job).ok_or("no job")?.release(true);
        }
        Ok(())
    }
}
