//! Tests of strikes against a job: consecutive failed attempts that did not pass the furthest point of any earlier attempt.

use rlood_store::{Claimed, Cursor, HeartbeatUpdate, JobRow};
use rlood_types::doctor::Rule;
use rlood_types::event::{Event, Metrics, Phase, SamplePhase};
use rlood_types::id::{JobId, WorkerId};
use rlood_types::job::{Failure, FailureClass, State};
use rlood_types::protocol::{EventBatch, JournalEntry, Outcome, RewardAnswer};
use rlood_types::rollout::{RolloutId, SampledGroup};
use serde_json::json;

use crate::setting::{LEASE, Setting, T0, plan};

/// A job and the worker that runs it.
struct Run {
    setting: Setting,
    job: JobId,
    worker: WorkerId,
    claimed: Option<Claimed>,
}

impl Run {
    async fn new() -> Self {
        let setting = Setting::new().await;
        let job = setting.job().await;
        Self::of(setting, job).await
    }

    async fn of(setting: Setting, job: JobId) -> Self {
        let worker = setting.worker().await;
        Self { setting, job, worker, claimed: None }
    }

    /// Claims the job for the next attempt.
    async fn claim(&mut self) -> Claimed {
        self.worker = self.setting.worker().await;
        let claimed = self.setting.claim(self.worker, T0).await.unwrap();
        assert_eq!(claimed.job, self.job);
        self.claimed = Some(claimed.clone());
        claimed
    }

    fn attempt(&self) -> u64 {
        self.claimed.as_ref().unwrap().attempt
    }

    /// Reports steps up to this one.
    async fn steps(&self, last: u64) {
        let event = |step| Event::Step { step, kind: SamplePhase::Train, metrics: Metrics::new() };
        let events = (1..=last).map(event).collect();
        let batch = EventBatch { attempt: self.attempt(), batch: 0, events, log: Vec::new() };
        self.setting.store.events_append(self.job, &batch, T0).await.unwrap();
    }

    async fn journal(&self, entries: &[JournalEntry]) {
        self.setting.store.journal_append(self.job, self.attempt(), entries, T0).await.unwrap();
    }

    /// Kills the worker of the attempt.
    async fn lose(&self) -> JobRow {
        let lost = self.setting.store.worker_lost(self.worker, Some("signal: 9 (SIGKILL)\nlast words"), T0).await;
        assert_eq!(lost.unwrap(), Some(self.job));
        self.row().await
    }

    async fn row(&self) -> JobRow {
        self.setting.store.job_get(self.job).await.unwrap()
    }

    /// Runs an attempt that reaches this step and is killed.
    async fn killed_at(&mut self, step: u64) -> JobRow {
        self.claim().await;
        self.steps(step).await;
        self.lose().await
    }
}

fn rollout(rollout: RolloutId, rows: u64) -> JournalEntry {
    let groups = (0..rows).map(|row| SampledGroup { row, completions: Vec::new(), prompt_ids: None }).collect();
    JournalEntry::Rollout { rollout, groups, samplers: Vec::new() }
}

fn request(rollout: RolloutId, key: &str) -> JournalEntry {
    let (reward, id) = ("r".to_owned(), format!("rwr_{key}"));
    JournalEntry::Request { rollout, reward, key: key.to_owned(), id, body: "{}".to_owned(), later: None }
}

fn answer(rollout: RolloutId, key: &str) -> JournalEntry {
    let answer = RewardAnswer::Body { body: "{}".to_owned() };
    JournalEntry::Answer { rollout, key: key.to_owned(), id: format!("rwr_{key}"), answer }
}

#[tokio::test]
async fn a_replay_is_no_progress_even_with_a_new_checkpoint_and_three_in_a_row_fail_the_job() {
    let mut run = Run::new().await;
    assert_eq!(run.killed_at(5).await.failed_attempts, 0, "five new steps");
    // Back to step 3 with a new checkpoint, but with nothing that the first attempt had not reached.
    let claimed = run.claim().await;
    run.steps(3).await;
    run.setting.publish(&claimed, 3, &Metrics::new()).await.unwrap();
    assert_eq!(run.lose().await.failed_attempts, 1);
    assert_eq!(run.killed_at(5).await.failed_attempts, 2, "as far as before, and no further");
    let row = run.killed_at(4).await;
    let failure = row.failure.unwrap();
    assert_eq!((row.state, failure.code.as_str(), failure.class), (State::Failed, "worker_lost", FailureClass::Infra));
    assert_eq!(row.attempt, 4);
    let words = "3 attempts in a row ended without progress past step 5: attempt 2: worker_lost (signal: 9 (SIGKILL)) in \
                 loading at step 3";
    assert!(failure.message.starts_with(words), "{}", failure.message);
    assert!(failure.message.contains("attempt 4: worker_lost"), "{}", failure.message);
    assert!(failure.message.ends_with("the log ends with: last words"), "{}", failure.message);
}

#[tokio::test]
async fn a_job_that_advances_is_killed_as_often_as_you_like() {
    let mut run = Run::new().await;
    // Two replays between any two new steps, without a single checkpoint.
    for step in 1..=8 {
        assert_eq!(run.killed_at(step).await.failed_attempts, 0, "step {step} is new");
        assert_eq!(run.killed_at(step - 1).await.failed_attempts, 1);
        assert_eq!(run.killed_at(step).await.failed_attempts, 2);
    }
    assert_eq!(run.row().await.state, State::Queued);
    assert_eq!(run.row().await.reached, Some(Cursor(8, 0, 0)));
}

#[tokio::test]
async fn rollouts_and_answers_in_the_journal_are_progress_and_so_are_rows_of_the_evaluation() {
    let mut run = Run::new().await;
    let (first, evaluation) = (RolloutId::train(1), RolloutId::eval(0));
    let one_by_one = [
        rollout(evaluation, 3),
        request(evaluation, "e"),
        answer(evaluation, "e"),
        rollout(first, 2),
        request(first, "a"),
        answer(first, "a"),
        request(first, "b"),
        answer(first, "b"),
    ];
    for entry in &one_by_one {
        run.claim().await;
        run.journal(std::slice::from_ref(entry)).await;
        let strikes = run.lose().await.failed_attempts;
        // A request without an answer can be sent again.
        if matches!(entry, JournalEntry::Request { .. }) {
            assert_eq!(strikes, 2, "{entry:?}");
            continue;
        }
        assert_eq!(strikes, 0, "{entry:?}");
        // Entries that exist already are not progress of an attempt that writes them again.
        run.claim().await;
        run.journal(std::slice::from_ref(entry)).await;
        assert_eq!(run.lose().await.failed_attempts, 1, "{entry:?} again");
    }
    assert_eq!(run.row().await.reached, Some(Cursor(0, 3, 4)), "a rollout and two answers; three rows and an answer");
    // The step itself counts more than all answers for it.
    assert_eq!(run.killed_at(1).await.failed_attempts, 0);
    assert_eq!(run.row().await.reached, Some(Cursor(1, 0, 0)));
}

#[tokio::test]
async fn answers_that_are_forgotten_and_asked_again_are_no_progress() {
    let mut run = Run::new().await;
    let first = RolloutId::train(1);
    run.claim().await;
    run.journal(&[rollout(first, 2), request(first, "a"), answer(first, "a")]).await;
    run.journal(&[JournalEntry::Forget { rollout: first, reward: "r".to_owned() }]).await;
    assert_eq!(run.lose().await.failed_attempts, 0);
    run.claim().await;
    run.journal(&[request(first, "b"), answer(first, "b")]).await;
    assert_eq!(run.lose().await.failed_attempts, 0, "an answer more than the last attempt left");
    run.claim().await;
    run.journal(&[JournalEntry::Forget { rollout: first, reward: "r".to_owned() }]).await;
    run.journal(&[request(first, "c"), answer(first, "c")]).await;
    assert_eq!(run.lose().await.failed_attempts, 1, "as many as before");
}

#[tokio::test]
async fn shutdowns_preemptions_and_restarts_are_never_strikes() {
    let mut run = Run::new().await;
    run.killed_at(0).await;
    assert_eq!(run.killed_at(0).await.failed_attempts, 2);
    for turn in 0..51 {
        let claimed = run.claim().await;
        let store = &run.setting.store;
        match turn % 3 {
            0 => store.job_finish(run.job, claimed.attempt, Outcome::Requeued, T0).await.unwrap(),
            1 => store.job_finish(run.job, claimed.attempt, Outcome::Preempted, T0).await.unwrap(),
            _ => assert_eq!(store.worker_remove(run.worker, T0).await.unwrap(), Some(run.job)),
        }
        let row = run.row().await;
        assert_eq!((row.state, row.failed_attempts), (State::Queued, 2), "turn {turn}");
    }
    let ends = run.setting.store.attempt_ends(run.job, 2).await.unwrap();
    assert_eq!(ends.iter().map(|end| end.reason.as_str()).collect::<Vec<_>>(), ["worker_shutdown", "preempted"]);
    // They have not removed the earlier strikes either.
    assert_eq!(run.killed_at(0).await.state, State::Failed);
}

#[tokio::test]
async fn the_highest_point_outlives_a_pause_and_a_rewind() {
    let mut run = Run::new().await;
    let claimed = run.claim().await;
    run.steps(4).await;
    run.setting.store.job_pause(run.job, T0).await.unwrap();
    let paused = Outcome::Paused { reason: None };
    run.setting.store.job_finish(run.job, claimed.attempt, paused, T0).await.unwrap();
    assert_eq!(run.setting.store.attempt_ends(run.job, 10).await.unwrap(), [], "a pause is no end of an attempt");
    run.setting.store.job_resume(run.job, T0).await.unwrap();
    assert_eq!(run.killed_at(4).await.failed_attempts, 1);
    assert_eq!(run.row().await.reached, Some(Cursor(4, 0, 0)));
    assert_eq!(run.killed_at(5).await.failed_attempts, 0);
}

#[tokio::test]
async fn a_job_of_an_older_version_keeps_its_strikes_and_has_its_step_as_its_mark() {
    let mut run = Run::new().await;
    run.killed_at(6).await;
    run.setting.sql("UPDATE jobs SET reached = NULL, failed_attempts = 1").await.unwrap();
    run.setting.sql("DELETE FROM attempt_ends").await.unwrap();
    assert_eq!(run.killed_at(6).await.failed_attempts, 2, "no strike is forgotten, and a replay is none");
    assert_eq!(run.killed_at(7).await.failed_attempts, 0);
}

#[tokio::test]
async fn the_starting_step_of_a_fork_is_not_its_own_progress() {
    let mut run = Run::new().await;
    // The state that a fork leaves: a checkpoint of attempt 0, and its step.
    let insert = format!(
        "INSERT INTO checkpoints (id, job_id, step, attempt, files, metrics, created_at) \
         VALUES ('{}', '{}', 3, 0, '[]', '{{}}', 0)",
        rlood_types::id::CheckpointId::new(),
        run.job
    );
    run.setting.sql(&insert).await.unwrap();
    run.claim().await;
    let row = run.lose().await;
    assert_eq!((row.failed_attempts, row.reached), (1, Some(Cursor(3, 0, 0))));
}

#[tokio::test]
async fn max_attempts_counts_failures_with_progress_too_but_no_shutdown() {
    let setting = Setting::new().await;
    let mut limited = plan(setting.dataset);
    limited.training.max_attempts = Some(4);
    let job = setting.job_of(&limited, 0, T0).await.unwrap().id;
    let mut run = Run::of(setting, job).await;
    for step in 1..=3 {
        assert_eq!(run.killed_at(step).await.state, State::Queued);
        let claimed = run.claim().await;
        run.setting.store.job_finish(run.job, claimed.attempt, Outcome::Preempted, T0).await.unwrap();
    }
    let row = run.killed_at(4).await;
    let failure = row.failure.unwrap();
    assert_eq!(
        (row.state, row.attempt, failure.code.as_str(), failure.class),
        (State::Failed, 7, "max_attempts", FailureClass::Infra)
    );
    assert!(failure.message.starts_with("4 attempts failed, and training.max_attempts is 4: "), "{}", failure.message);
}

#[tokio::test]
async fn a_fault_that_may_pass_is_a_strike_only_without_progress() {
    let mut run = Run::new().await;
    let failure = || Failure {
        class: FailureClass::Infra,
        code: "file_error".to_owned(),
        message: "the disk does not answer".to_owned(),
        phase: None,
        step: None,
        suggestion: None,
    };
    for step in 1..=4 {
        for (at, strikes) in [(step, 0), (0, 1), (0, 2)] {
            let claimed = run.claim().await;
            run.steps(at).await;
            let failed = Outcome::Failed { failure: failure() };
            run.setting.store.job_finish(run.job, claimed.attempt, failed, T0).await.unwrap();
            let row = run.row().await;
            assert_eq!((row.state, row.failed_attempts), (State::Queued, strikes), "step {step}");
        }
    }
    let claimed = run.claim().await;
    let failed = Outcome::Failed { failure: failure() };
    run.setting.store.job_finish(run.job, claimed.attempt, failed, T0).await.unwrap();
    assert_eq!(run.row().await.failure.unwrap().code, "file_error", "the third in a row says what it was");
}

#[tokio::test]
async fn every_tenth_end_raises_an_alert_with_phase_and_memory_of_each() {
    let mut run = Run::new().await;
    let store = run.setting.store.clone();
    for turn in 1..=20 {
        let claimed = run.claim().await;
        let phase = if turn % 2 == 0 { Phase::Rollout } else { Phase::Train };
        let memory_bytes = (turn != 3).then_some(turn << 20);
        let heartbeat = HeartbeatUpdate { phase, status_reason: None, step: 0, eta_s: None, memory_bytes };
        store.job_heartbeat(run.job, claimed.attempt, heartbeat, T0, LEASE).await.unwrap();
        // A heartbeat without memory does not change the recorded memory.
        let heartbeat = HeartbeatUpdate { phase, status_reason: None, step: 0, eta_s: None, memory_bytes: None };
        store.job_heartbeat(run.job, claimed.attempt, heartbeat, T0, LEASE).await.unwrap();
        match turn % 2 {
            0 => store.job_finish(run.job, claimed.attempt, Outcome::Preempted, T0).await.unwrap(),
            _ => {
                run.journal(&[rollout(RolloutId::train(1).round(turn as u32), 1)]).await;
                run.lose().await;
            }
        }
        let alerts = store.alert_list(run.job, true).await.unwrap();
        assert_eq!(alerts.len(), usize::from(turn >= 10), "after end {turn}");
    }
    let alerts = store.alert_list(run.job, true).await.unwrap();
    let alert = &alerts[0].alert;
    assert_eq!((alert.rule, alert.ends.len()), (Rule::ManyRestarts, 10));
    let told: Vec<_> =
        alert.ends.iter().map(|end| (end.attempt, end.reason.as_str(), end.phase, end.memory_bytes)).collect();
    assert_eq!(told[0], (11, "worker_lost", Some(Phase::Train), Some(11 << 20)));
    assert_eq!(told[9], (20, "preempted", Some(Phase::Rollout), Some(20 << 20)));
    assert!(alert.message.contains("20 attempts have ended"), "{}", alert.message);
    let events = store.event_page(run.job, 0, 1000).await.unwrap();
    let raised: Vec<_> = events.iter().filter(|event| event.kind == "alert").collect();
    assert_eq!(raised.len(), 2, "one alert every ten ends");
    let first = &raised[0].data;
    assert_eq!((&first["rule"], &first["on_alert"]), (&json!("many_restarts"), &json!("note")));
    assert_eq!(
        first["ends"][2],
        json!({"attempt": 3, "time_ms": T0, "reason": "worker_lost", "phase": "train", "step": 0,
        "memory_bytes": null, "detail": "signal: 9 (SIGKILL)"})
    );
    // The next attempt starts over; the server's alert about the ended attempts is kept.
    run.claim().await;
    assert_eq!(store.alert_list(run.job, true).await.unwrap().len(), 1);
}

#[tokio::test]
async fn the_next_attempt_after_an_interruption_must_save_soon() {
    let mut run = Run::new().await;
    let claimed = run.claim().await;
    assert!(!claimed.checkpoint_soon);
    run.setting.store.job_pause(run.job, T0).await.unwrap();
    run.setting.store.job_finish(run.job, 1, Outcome::Paused { reason: None }, T0).await.unwrap();
    run.setting.store.job_resume(run.job, T0).await.unwrap();
    assert!(!run.claim().await.checkpoint_soon, "a pause is no interruption");
    run.lose().await;
    assert!(run.claim().await.checkpoint_soon);
}

#[tokio::test]
async fn the_next_checkpoint_replaces_a_temporary_one_which_is_never_the_best() {
    let mut run = Run::new().await;
    let claimed = run.claim().await;
    let save = async |step: u64, reward: f64, temporary: bool| {
        let metrics = Metrics::from([("reward".to_owned(), Some(reward))]);
        let files = [rlood_types::protocol::FileEntry {
            name: "manifest.json".to_owned(),
            size_bytes: 2,
            sha256: rlood_types::digest::Sha256Digest::of("{}"),
        }];
        let (job, attempt) = (claimed.job, claimed.attempt);
        let checkpoint =
            rlood_store::PublishCheckpoint { job, attempt, step, files: &files, metrics: &metrics, temporary };
        run.setting.store.checkpoint_publish(checkpoint, T0).await.unwrap();
        let rows = run.setting.store.checkpoint_list(job).await.unwrap();
        let best: Vec<u64> = rows.iter().filter(|row| row.best).map(|row| row.step).collect();
        (rows.iter().map(|row| row.step).collect::<Vec<_>>(), best)
    };
    assert_eq!(save(1, 0.9, true).await, (vec![1], vec![]));
    assert_eq!(save(2, 0.2, false).await, (vec![2], vec![2]));
    assert_eq!(save(3, 0.9, true).await, (vec![3, 2], vec![2]));
    assert_eq!(save(4, 0.1, false).await, (vec![4, 2], vec![2]));
    assert_eq!(save(5, 0.9, true).await, (vec![5, 4, 2], vec![2]));
    assert_eq!(save(6, 0.9, true).await, (vec![6, 4, 2], vec![2]), "the newest is what a job resumes from");
    assert_eq!(save(7, 0.1, false).await, (vec![7, 4, 2], vec![2]), "two of the newest, and the best");
}

#[test]
fn a_plan_without_the_new_settings_is_stored_as_before() {
    let stored = serde_json::to_value(plan(rlood_types::id::DatasetId::new())).unwrap();
    assert_eq!(stored["training"].get("max_attempts"), None);
    assert_eq!(stored["checkpoints"].get("every_seconds"), None);
}
