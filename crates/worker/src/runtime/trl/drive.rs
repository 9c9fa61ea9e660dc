//! Answers the questions of the ranks, until the training is over.
//!
//! A question is answered when every rank has asked it. The answers come from the [`Host`](crate::engine::host::Host), as for rlood's own engine.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::checkpoint;
use super::environment::Environment;
use super::failure::{failed, failure};
use super::message::{Message, PROTOCOL, Part, shortened};
use super::ranks::{Incoming, Ranks};
use super::rollout::{Scored, check_rows, groups_of, recorded_parts, reward_samples, trainer_metrics};
use super::state::{Peer, Rolling, TrlHost};
use crate::doctor::{Alert, Doctor, OnAlert};
use crate::engine::error::EngineError;
use crate::engine::host::{RunEnd, SavedCheckpoint, ScoreRequest, StopReason};
use crate::engine::prompts::TokenizedPrompt;
use crate::engine::text::Text;
use crate::engine::watch;
use crate::event::{Event, Metrics, Phase, SamplePhase};
use crate::rollout::RolloutId;
use crate::spec::Plan;

/// How often stops, ended processes and time limits are checked.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Time for the ranks to end by themselves after the training.
const EXIT_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum length of a sampler's state as JSON, in bytes.
const MAX_SAMPLER_BYTES: usize = 64 << 10;

/// The plan, the model and the rows that the ranks train with.
pub(super) struct Training<'a> {
    /// The plan of the job.
    pub(super) plan: &'a Plan,
    /// The environment of the ranks.
    pub(super) environment: &'a Environment,
    /// The tokenizer, which decodes completions.
    pub(super) text: &'a Text,
    /// The prompts by dataset row.
    pub(super) prompts: &'a [TokenizedPrompt],
    /// The directory in which the trainer writes checkpoints.
    pub(super) output_dir: PathBuf,
    /// The name of the base model in published checkpoints.
    pub(super) model_name: &'a str,
    /// Number of optimizer steps that are done already.
    pub(super) steps_done: u64,
    /// The state of the alert rules after these steps.
    pub(super) doctor: Doctor,
}

/// Answers the questions of the ranks of one run.
pub(super) struct Driver<'a> {
    host: &'a mut dyn TrlHost,
    training: Training<'a>,
    ranks: Ranks,
    /// One for each connection, in the order in which they were made.
    peers: Vec<Peer>,
    /// Number of ranks that train together.
    count: usize,
    rollout: Rolling,
    saved_step: u64,
    steps_done: u64,
    /// Metrics of the last step.
    metrics: Metrics,
    /// When a pause or a shutdown was first seen.
    stop_seen: Option<Instant>,
    /// The pause that an alert asks for. It takes effect at the end of the next block.
    alerted: Option<StopReason>,
    /// The reason for which the ranks were told to save and stop.
    pausing: Option<StopReason>,
    started: Instant,
    last_message: Instant,
}

impl<'a> Driver<'a> {
    /// Creates the driver of ranks that were just started.
    pub(super) fn new(host: &'a mut dyn TrlHost, training: Training<'a>, ranks: Ranks) -> Self {
        Self {
            host,
            ranks,
            peers: Vec::new(),
            count: training.plan.resources.devices as usize,
            rollout: Rolling::None,
            saved_step: training.steps_done,
            steps_done: training.steps_done,
            training,
            metrics: Metrics::new(),
            stop_seen: None,
            alerted: None,
            pausing: None,
            started: Instant::now(),
            last_message: Instant::now(),
        }
    }

    /// Answers questions until the training is over.
    pub(super) fn run(mut self) -> Result<(), RunEnd> {
        self.answer_all()
    }

    fn answer_all(&mut self) -> Result<(), RunEnd> {
        loop {
            self.check_stop()?;
            self.ranks.accept().map_err(|error| failed(format!("a rank could not be accepted: {error}")))?;
            if let Some((connection, incoming)) = self.ranks.next(POLL_INTERVAL) {
                while self.peers.len() <= connection {
                    self.peers.push(Peer::default());
                }
                self.last_message = Instant::now();
                self.receive(connection, incoming)?;
            }
            if self.peers.len() == self.count && self.peers.iter().all(|peer| peer.is_done) {
                self.wait_for_exit();
                return match self.pausing.take() {
                    Some(reason) => Err(RunEnd::Stopped(reason)),
                    None => Ok(()),
                };
            }
            self.check_limits()?;
        }
    }

    /// Ends the run if a stop was requested that does not wait for the end of the step, or has waited too long.
    fn check_stop(&mut self) -> Result<(), RunEnd> {
        let limits = self.training.environment.limits;
        let Some(stop) = self.host.stop() else { return Ok(()) };
        let limit = match stop {
            StopReason::Cancel | StopReason::LeaseLost => return Err(RunEnd::Stopped(stop)),
            StopReason::Pause { .. } => limits.pause,
            StopReason::Shutdown => limits.shutdown,
        };
        let seen = *self.stop_seen.get_or_insert_with(Instant::now);
        // Without a step in progress, there is nothing to wait for.
        let is_loading = !self.peers.iter().any(|peer| peer.is_ready);
        match is_loading || seen.elapsed() > limit {
            true => Err(RunEnd::Stopped(stop)),
            false => Ok(()),
        }
    }

    /// Ends the run if ranks have ended, do not connect, or wait for each other.
    fn check_limits(&mut self) -> Result<(), RunEnd> {
        let limits = self.training.environment.limits;
        if let Some((rank, status)) = self.ranks.ended() {
            return Err(self.lost(format!("rank {rank} ended with {status}"), rank));
        }
        let is_connected = self.peers.iter().filter(|peer| peer.rank.is_some()).count() == self.count;
        if !is_connected && self.started.elapsed() > limits.hello {
            return Err(self.lost(format!("not every rank connected within {} s", limits.hello.as_secs()), 0));
        }
        let longest = self.peers.iter().filter_map(|peer| peer.asked.as_ref()).map(|(_, since)| since.elapsed()).max();
        if let Some(silent) = self.silent_rank().filter(|_| longest.is_some_and(|waited| waited > limits.deadlock)) {
            let seconds = limits.deadlock.as_secs();
            return Err(self.lost(format!("rank {silent} is silent, and the others have waited {seconds} s"), silent));
        }
        if self.last_message.elapsed() > limits.silence {
            return Err(self.lost(format!("no rank sent anything for {} s", limits.silence.as_secs()), 0));
        }
        Ok(())
    }

    /// Returns a rank that has not asked anything.
    fn silent_rank(&self) -> Option<usize> {
        self.peers.iter().filter(|peer| peer.asked.is_none() && !peer.is_done).find_map(|peer| peer.rank)
    }

    /// Returns the end of a run whose processes failed without an exception of Python. The job is tried again.
    fn lost(&mut self, what: String, rank: usize) -> RunEnd {
        let tail = self.ranks.tail(rank);
        tracing::warn!(what, tail, "the ranks of a job are killed");
        let data = json!({ "rank": rank, "output": tail });
        let message = format!("{what}; the last lines that it printed are in the data of this warning");
        match self.host.event(Event::Warning { code: "runtime_lost".to_owned(), message, data }) {
            Ok(()) => RunEnd::Failed(EngineError::Ranks(what)),
            Err(end) => end,
        }
    }

    fn receive(&mut self, connection: usize, incoming: Incoming) -> Result<(), RunEnd> {
        let rank = self.peers[connection].rank;
        let name = rank.map_or_else(|| "a rank".to_owned(), |rank| format!("rank {rank}"));
        let message = match incoming {
            Incoming::Message(message) => *message,
            Incoming::Malformed(why) => return Err(failed(format!("{name} sent {why}"))),
            // Its process ends too, which `check_limits` reports, unless it closed the connection and runs on.
            Incoming::Closed if self.peers[connection].is_done => return Ok(()),
            Incoming::Closed => {
                std::thread::sleep(POLL_INTERVAL);
                self.check_limits()?;
                return Err(self.lost(format!("{name} closed its connection"), rank.unwrap_or(0)));
            }
        };
        if !matches!(message, Message::Hello { .. } | Message::Failed { .. }) && rank.is_none() {
            return Err(failed(format!("{name} sent a message before its first one, hello")));
        }
        match message {
            Message::Hello { protocol, rank, world, versions } => {
                self.greet(connection, (protocol, rank, world), &versions)
            }
            Message::Loaded { import_s } if !self.peers[connection].is_loaded => {
                tracing::info!(import_s, name, "a rank has imported its packages");
                self.peers[connection].is_loaded = true;
                Ok(())
            }
            Message::Ready { trainable, total, max_steps, steps_done, build_s } if !self.peers[connection].is_ready => {
                tracing::info!(trainable, total, build_s, name, "a rank begins to train");
                self.peers[connection].is_ready = true;
                match (max_steps, steps_done) == (self.training.plan.training.max_steps, self.saved_step) {
                    true => Ok(()),
                    false => Err(failed(format!(
                        "{name} trains from step {steps_done} to {max_steps} instead of from {} to {}",
                        self.saved_step, self.training.plan.training.max_steps
                    ))),
                }
            }
            Message::Metrics { step, values, advantages } if rank == Some(0) && step == self.steps_done => {
                self.report_step(step, trainer_metrics(values), &advantages)
            }
            Message::Failed { class, message, trace } => Err(self.python_failed(&name, &class, &message, &trace)),
            question if question.question().is_some() && self.peers[connection].asked.is_none() => {
                self.peers[connection].asked = Some((question, Instant::now()));
                self.answer_if_complete()
            }
            other => {
                Err(failed(format!("{name} sent a message at the wrong time: {}", shortened(&format!("{other:?}")))))
            }
        }
    }

    fn greet(
        &mut self,
        connection: usize,
        (protocol, rank, world): (u32, usize, usize),
        versions: &std::collections::BTreeMap<String, String>,
    ) -> Result<(), RunEnd> {
        let is_taken = self.peers.iter().any(|peer| peer.rank == Some(rank));
        if protocol != PROTOCOL || world != self.count || rank >= self.count || is_taken {
            return Err(failed(format!(
                "a process connected as rank {rank} of {world} with protocol {protocol}; expected are {} ranks with protocol {PROTOCOL}",
                self.count
            )));
        }
        if self.training.environment.facts.versions.get("trl") != versions.get("trl") {
            let version = versions.get("trl").map_or("none", String::as_str);
            return Err(failure(
                "runtime_version",
                format!("the environment now has TRL {version}, which differs from the one that the worker registered"),
                "restart the worker, then retry the job",
            ));
        }
        self.peers[connection].rank = Some(rank);
        Ok(())
    }

    /// Answers the question that all ranks have asked.
    fn answer_if_complete(&mut self) -> Result<(), RunEnd> {
        if self.peers.iter().filter(|peer| peer.asked.is_some()).count() < self.count {
            return Ok(());
        }
        let mut asked: Vec<(usize, usize, u64, Message)> = Vec::new();
        for (connection, peer) in self.peers.iter_mut().enumerate() {
            let Some((message, _)) = peer.asked.take() else { continue };
            let Some((id, _)) = message.question() else { continue };
            asked.push((peer.rank.unwrap_or(0), connection, id, message));
        }
        asked.sort_by_key(|(rank, ..)| *rank);
        let messages: Vec<&Message> = asked.iter().map(|(.., message)| message).collect();
        let about = messages[0].question().map(|(_, about)| about).unwrap_or_default();
        if let Some(other) = messages.iter().find(|message| message.question().is_none_or(|(_, of)| of != about)) {
            let other = other.question().map(|(_, about)| about).unwrap_or_default();
            return Err(failed(format!("the ranks ask different questions: {about:?} and {other:?}")));
        }
        let answers = match about.0 {
            "recorded" => self.recorded(about.1, &messages)?,
            "sampled" => self.sampled(about.1, &messages)?,
            "score" => self.score(about.1, &messages)?,
            "step" => vec![json!({ "stop": self.decide(about.1)? }); self.count],
            "checkpoint" => {
                self.publish(about.1)?;
                vec![json!({}); self.count]
            }
            _ => {
                self.finish(about.1)?;
                vec![json!({}); self.count]
            }
        };
        for ((rank, connection, id, _), answer) in asked.into_iter().zip(answers) {
            if let Err(error) = self.ranks.answer(connection, id, answer) {
                return Err(self.lost(format!("rank {rank} could not be answered: {error}"), rank));
            }
        }
        // Rewards and checkpoints may have taken long.
        self.last_message = Instant::now();
        Ok(())
    }

    /// Returns the dataset rows of a rollout's completions, in order.
    fn rows(&self, step: u64, messages: &[&Message]) -> Result<Vec<u64>, RunEnd> {
        if step != self.steps_done + 1 {
            return Err(failed(format!("a rollout of step {step} follows step {}", self.steps_done)));
        }
        let mut parts = Vec::new();
        for message in messages {
            let (Message::Recorded { rows, .. } | Message::Sampled { rows, .. }) = message else { continue };
            parts.push(rows.as_slice());
        }
        if parts.iter().any(|part| part.len() != parts[0].len()) {
            return Err(failed("the ranks have parts of different lengths".to_owned()));
        }
        let rows = parts.concat();
        check_rows(self.training.plan, &rows, self.training.prompts.len()).map_err(failed)?;
        Ok(rows)
    }

    fn recorded(&mut self, step: u64, messages: &[&Message]) -> Result<Vec<Value>, RunEnd> {
        let rows = self.rows(step, messages)?;
        self.enter(Phase::Rollout)?;
        let found = self.host.recorded_by_ranks(RolloutId::train(step));
        let Some(parts) = found.and_then(|recorded| recorded_parts(&rows, recorded, self.count)) else {
            return Ok(vec![json!({ "part": null }); self.count]);
        };
        let all: Vec<&Part> = parts.iter().collect();
        let groups = groups_of(self.training.plan, &rows, &all).map_err(failed)?;
        self.rollout = Rolling::Sampled(step, groups);
        let answer = |part: &Part| json!({ "part": { "completions": part.completions, "sampler": part.sampler } });
        Ok(parts.iter().map(answer).collect())
    }

    fn sampled(&mut self, step: u64, messages: &[&Message]) -> Result<Vec<Value>, RunEnd> {
        let rows = self.rows(step, messages)?;
        let mut parts = Vec::new();
        for message in messages {
            let Message::Sampled { part, rows, .. } = message else { continue };
            if part.completions.len() != rows.len() || part.sampler.to_string().len() > MAX_SAMPLER_BYTES {
                return Err(failed("a rank sent a part of a rollout of the wrong size".to_owned()));
            }
            parts.push(part);
        }
        let groups = groups_of(self.training.plan, &rows, &parts).map_err(failed)?;
        let samplers: Vec<Value> = parts.iter().map(|part| part.sampler.clone()).collect();
        self.host.sampled_by_ranks(RolloutId::train(step), &groups, &samplers)?;
        self.rollout = Rolling::Sampled(step, groups);
        Ok(vec![json!({}); self.count])
    }

    fn score(&mut self, step: u64, messages: &[&Message]) -> Result<Vec<Value>, RunEnd> {
        let groups = match std::mem::replace(&mut self.rollout, Rolling::None) {
            Rolling::Sampled(of, groups) if of == step => groups,
            _ => return Err(failed(format!("the ranks ask for rewards of step {step}, of which nothing was sampled"))),
        };
        self.enter(Phase::Reward)?;
        let samples = reward_samples(self.training.plan, self.training.text, self.training.prompts, &groups)?;
        let scores = self.host.score(&ScoreRequest { id: RolloutId::train(step), samples: &samples })?;
        if scores.len() != samples.len() {
            let text = format!("the host gave {} scores for {} samples", scores.len(), samples.len());
            return Err(EngineError::Input(text).into());
        }
        let block = (step - 1) / self.uses_per_block();
        let scored = Scored::new(self.training.plan, block, (groups, samples), scores, self.training.prompts)?;
        let each = scored.rewards().len() / self.count;
        let is_wrong = |message: &&Message| !matches!(message, Message::Score { samples, .. } if *samples == each);
        if messages.iter().any(is_wrong) {
            return Err(failed(format!("a rank asks for another number of rewards than {each}")));
        }
        let answers = scored.rewards().chunks(each.max(1)).map(|part| json!({ "values": part })).collect();
        self.rollout = Rolling::Scored(step, Box::new(scored));
        self.enter(Phase::Train)?;
        Ok(answers)
    }

    /// Decides what happens after a step: nothing, a checkpoint, or a checkpoint and the end of the training.
    fn decide(&mut self, step: u64) -> Result<Option<&'static str>, RunEnd> {
        if step != self.steps_done + 1 {
            return Err(failed(format!("step {step} follows step {}", self.steps_done)));
        }
        self.steps_done = step;
        if step >= self.training.plan.training.max_steps {
            return Ok(Some("save"));
        }
        // A checkpoint of TRL does not hold the completions of a block, so checkpoints are written only at the end of a block.
        if !step.is_multiple_of(self.uses_per_block()) {
            return Ok(None);
        }
        if let Some(reason) = self.host.stop().or_else(|| self.alerted.take()) {
            self.pausing = Some(reason);
            return Ok(Some("pause"));
        }
        let every = self.training.plan.checkpoints.every_steps.max(1);
        let is_due = step / every > self.saved_step / every || self.host.wants_checkpoint();
        Ok(is_due.then_some("save"))
    }

    /// Number of optimizer steps that use the same completions.
    fn uses_per_block(&self) -> u64 {
        (u64::from(self.training.plan.rloo.num_iterations) * u64::from(self.training.plan.rloo.steps_per_generation))
            .max(1)
    }

    fn report_step(&mut self, step: u64, of_trainer: Metrics, advantages: &[Option<f64>]) -> Result<(), RunEnd> {
        for name in ["loss", "grad_norm"] {
            if of_trainer.get(name).is_some_and(Option::is_none) {
                return Err(EngineError::NonFinite { what: format!("{name} of step {step}") }.into());
            }
        }
        let mut metrics = of_trainer;
        if let Rolling::Scored(of, scored) = &self.rollout
            && *of == step
        {
            metrics.extend(scored.metrics(self.training.plan));
            let samples = scored.samples(self.training.plan, step, advantages);
            self.host.event(Event::Samples { samples })?;
        }
        self.metrics = metrics.clone();
        self.host.event(Event::Step { step, kind: SamplePhase::Train, metrics })?;
        self.check_alert_rules(step)
    }

    fn check_alert_rules(&mut self, step: u64) -> Result<(), RunEnd> {
        let Training { plan, doctor, .. } = &mut self.training;
        let ends = watch::report_findings(doctor, self.host, plan, (step, &self.metrics))?;
        let Some(Alert { rule, on_alert, message, fix, .. }) = ends else { return Ok(()) };
        match on_alert {
            OnAlert::Note => {}
            OnAlert::Pause => {
                self.alerted = Some(StopReason::Pause { reason: Some(format!("alert:{}", rule.as_str())) });
            }
            OnAlert::Stop => return Err(EngineError::Alert { rule, step, message, fix }.into()),
        }
        Ok(())
    }

    fn publish(&mut self, step: u64) -> Result<(), RunEnd> {
        if step != self.steps_done || step == self.saved_step {
            return Err(failed(format!("the ranks saved step {step} after step {}", self.steps_done)));
        }
        let dir = self.training.output_dir.join(format!("checkpoint-{step}"));
        let of = (step, self.count, self.training.model_name);
        let files = checkpoint::prepare(&dir, self.training.plan, of, &self.training.doctor)?;
        let last = step >= self.training.plan.training.max_steps;
        let saved = SavedCheckpoint { dir: &dir, step, files: &files, metrics: &self.metrics, last };
        self.host.saved(&saved)?;
        std::fs::remove_dir_all(&dir).map_err(|source| EngineError::Io { path: dir, source })?;
        self.saved_step = step;
        if !last {
            self.enter(Phase::Train)?;
        }
        Ok(())
    }

    fn finish(&mut self, step: u64) -> Result<(), RunEnd> {
        let is_over = step >= self.training.plan.training.max_steps || self.pausing.is_some();
        if !is_over || step != self.saved_step {
            return Err(failed(format!("the ranks ended after step {step}, of which there is no checkpoint")));
        }
        self.peers.iter_mut().for_each(|peer| peer.is_done = true);
        Ok(())
    }

    fn enter(&mut self, phase: Phase) -> Result<(), RunEnd> {
        self.host.event(Event::Phase { phase, step: self.steps_done })
    }

    fn python_failed(&mut self, name: &str, class: &str, message: &str, trace: &str) -> RunEnd {
        let text = format!("{}: {}", shortened(class), shortened(message));
        let data = json!({ "trace": trace });
        let warning =
            Event::Warning { code: "runtime_failed".to_owned(), message: format!("{name} failed: {text}"), data };
        if let Err(end) = self.host.event(warning) {
            return end;
        }
        match class {
            "OutOfMemoryError" => EngineError::OutOfMemory(shortened(message)).into(),
            _ => failed(format!("{name}: {text}")),
        }
    }

    /// Waits until the ranks, which have all results, have ended. They are killed afterwards.
    fn wait_for_exit(&mut self) {
        let begun = Instant::now();
        while !self.ranks.all_ended() && begun.elapsed() < EXIT_TIMEOUT {
            std::thread::sleep(POLL_INTERVAL);
        }
    }
}
