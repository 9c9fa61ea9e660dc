//! What users do: jobs, wishes, and two calls at the same time.

use std::collections::BTreeMap;

use serde_json::json;

use super::super::expected::Job;
use super::super::server::{Called, LEASE};
use super::{Check, MAX_JOBS, World, wrong};
use rlood_store::{JobPatch, NewJob, Store, StoreError};
use rlood_types::id::JobId;
use rlood_types::job::{Requested, State};

impl World {
    pub(super) async fn create(&mut self) -> Check {
        if self.jobs.len() >= MAX_JOBS {
            return Ok(());
        }
        let (id, priority, now) = (JobId::new(), self.random.from(-1, 1), self.server.wall);
        let order = self.jobs.values().map(|job| job.order).max().unwrap_or(0) + 1;
        let (store, plan) = (self.store(), self.plan.clone());
        let call = async move {
            let (spec, secrets) = (json!({}), BTreeMap::new());
            let new = NewJob { id, spec: &spec, plan: &plan, secrets: &secrets, parent: None, priority, owner: "" };
            store.job_create(new, now).await
        };
        match self.server.call(&mut self.random, call).await? {
            Called::Answered(answer) => {
                answer.map_err(|error| format!("create: {error:?}"))?;
                self.say(format!("{id} is created with priority {priority}"));
                self.jobs.insert(id, Job::new(priority, order));
                Ok(())
            }
            Called::Lost { applied } => {
                if self.cut_short("create", applied) {
                    self.jobs.insert(id, Job::new(priority, order));
                }
                self.after_restart("it").await
            }
        }
    }

    pub(super) async fn any_wish(&mut self) -> Check {
        let ids: Vec<JobId> = self.jobs.keys().copied().collect();
        let Some(job) = self.random.pick(&ids) else { return Ok(()) };
        let wishes = ["pause", "pause", "resume", "resume", "cancel", "retry", "delete", "priority"];
        let wish = wishes[self.random.below(wishes.len())];
        self.wish(job, wish).await
    }

    pub(super) async fn wish(&mut self, id: JobId, wish: &'static str) -> Check {
        let before = self.jobs[&id].clone();
        let (state, requested) = (before.state, before.requested);
        let (store, now) = (self.store(), self.server.wall);
        let (new_id, priority) = (JobId::new(), self.random.from(-1, 1));
        if wish == "retry" && self.jobs.len() >= MAX_JOBS {
            return Ok(());
        }
        let call = async move {
            match wish {
                "pause" => store.job_pause(id, now).await.map(drop),
                "resume" => store.job_resume(id, now).await.map(drop),
                "cancel" => store.job_cancel(id, now).await.map(drop),
                "retry" => store.job_retry(id, new_id, now).await.map(drop),
                "delete" => store.job_delete(id).await.map(drop),
                _ => {
                    let patch = JobPatch { priority: Some(priority), ..JobPatch::default() };
                    store.job_patch(id, patch, now).await.map(drop)
                }
            }
        };
        // What it makes of the job; None = it is refused.
        let running = state == State::Running;
        let after: Option<Job> = {
            let mut job = before.clone();
            match wish {
                "pause" if state == State::Queued => {
                    job.leave(State::Paused, "job.paused");
                    Some(job)
                }
                "pause" if running && requested.is_none() => {
                    job.requested = Some(Requested::Pause);
                    job.tell("job.pause_requested");
                    Some(job)
                }
                // What paused by itself is the user's pause from now on.
                "pause" if state == State::Paused && job.by_itself => {
                    job.by_itself = false;
                    job.tell("job.paused");
                    Some(job)
                }
                "pause" if state == State::Paused || (running && requested == Some(Requested::Pause)) => Some(job),
                "resume" if state == State::Paused => {
                    job.leave(State::Queued, "job.resumed");
                    Some(job)
                }
                "resume" if running && requested == Some(Requested::Pause) => {
                    job.requested = None;
                    job.tell("job.resumed");
                    Some(job)
                }
                "cancel" if matches!(state, State::Queued | State::Paused) => {
                    job.leave(State::Cancelled, "job.cancelled");
                    Some(job)
                }
                "cancel" if running && requested != Some(Requested::Cancel) => {
                    job.requested = Some(Requested::Cancel);
                    job.tell("job.cancel_requested");
                    Some(job)
                }
                "cancel" if running || state == State::Cancelled => Some(job),
                "retry" | "delete" if state.is_terminal() => Some(job),
                "priority" => {
                    job.priority = priority;
                    job.tell("job.updated");
                    Some(job)
                }
                _ => None,
            }
        };
        let called = self.server.call(&mut self.random, call).await?;
        let happened = match &called {
            Called::Answered(Ok(())) if after.is_some() => true,
            Called::Answered(Err(StoreError::IllegalMove { .. })) if after.is_none() => false,
            Called::Answered(other) => {
                let expected = if after.is_some() { "Ok" } else { "refused" };
                return Err(wrong(&format!("{wish} of a {state:?} job"), other, expected));
            }
            Called::Lost { applied } => self.cut_short(wish, *applied) && after.is_some(),
        };
        if happened && let Some(after) = after {
            self.say(format!("{wish} {id}"));
            match wish {
                "retry" => {
                    let order = self.jobs.values().map(|job| job.order).max().unwrap_or(0) + 1;
                    self.jobs.insert(new_id, Job::new(after.priority, order));
                }
                "delete" => drop(self.jobs.remove(&id)),
                _ => drop(self.jobs.insert(id, after)),
            }
        }
        if matches!(called, Called::Lost { .. }) { self.after_restart("it").await } else { Ok(()) }
    }

    /// Two calls at the same time, over two connections that both write.
    pub(super) async fn race(&mut self) -> Check {
        let ids: Vec<JobId> = self.jobs.iter().filter(|(_, job)| !job.state.is_terminal()).map(|(id, _)| *id).collect();
        if ids.len() < 2 {
            return Ok(());
        }
        let now = self.server.wall;
        let other = Store::open(&self.server.files.database()).await.map_err(|error| format!("second: {error}"))?;
        let first = self.store();
        let patch = |priority| JobPatch { priority: Some(priority), ..JobPatch::default() };
        let (a, b) = (ids[0], ids[1]);
        let (one, two) = tokio::join!(first.job_patch(a, patch(1), now), other.job_patch(b, patch(0), now));
        for (id, priority, answer) in [(a, 1, one), (b, 0, two)] {
            answer.map_err(|error| format!("two writers at once: {error:?}"))?;
            let job = self.jobs.get_mut(&id).ok_or("no job")?;
            job.priority = priority;
            job.tell("job.updated");
        }
        self.say("two writers at once".to_owned());
        // And for one job each.
        while self.puppets.len() < 2 {
            self.register(false).await?;
        }
        let idle: Vec<usize> = (0..self.puppets.len()).filter(|place| self.puppets[*place].held.is_none()).collect();
        let free = |place: &&usize| !self.jobs.values().any(|job| job.owner == Some(self.puppets[**place].id));
        let idle: Vec<usize> = idle.iter().filter(free).copied().collect();
        if let [left, right, ..] = *idle {
            let (left_id, right_id) = (self.puppets[left].id, self.puppets[right].id);
            let answers = tokio::join!(first.job_claim(left_id, now, LEASE), other.job_claim(right_id, now, LEASE));
            let mut found = Vec::new();
            for (place, worker, answer) in [(left, left_id, answers.0), (right, right_id, answers.1)] {
                let answer = answer.map_err(|error| format!("two claims at once: {error:?}"))?;
                found.extend(answer.map(|claimed| (place, worker, claimed.job, claimed.attempt)));
            }
            // Whoever came first has the first job.
            let next = self.next_in_queue();
            found.sort_by_key(|(_, _, job, _)| Some(*job) != next);
            let queued = self.jobs.values().filter(|job| job.state == State::Queued).count();
            if found.len() != queued.min(2) {
                return Err(format!("two claims at once: {found:?}, with {queued} jobs in the queue"));
            }
            for (place, worker, job, attempt) in found {
                if self.claimed(worker) != Some((job, attempt)) {
                    return Err(format!("two claims at once: {worker} got {job}"));
                }
                self.take_up(place, Some((job, attempt))).await?;
            }
        }
        other.close().await;
        Ok(())
    }
}
