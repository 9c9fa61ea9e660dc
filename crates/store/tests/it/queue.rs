//! Tests of the queue: states, state changes, claims, leases, and jobs whose worker is gone.

use std::collections::BTreeSet;

use rlood_store::claims::{JOBS_OF_WORKER, LAPSED_JOBS, NEXT_JOB};
use rlood_store::server_errors::NEXT_DUE;
use rlood_store::{Claimed, HeartbeatUpdate, StoreError};
use rlood_types::event::{Event, Metrics, Phase};
use rlood_types::id::JobId;
use rlood_types::job::{Action, FailureClass, Requested, State};
use rlood_types::protocol::{EventBatch, Outcome};

use crate::setting::{LEASE, Setting, T0, failure, plan};

fn heartbeat() -> HeartbeatUpdate {
    HeartbeatUpdate { phase: Phase::Train, status_reason: None, step: 1, eta_s: Some(3.0), memory_bytes: None }
}

/// Returns assignments of the columns that a state requires, for a plain UPDATE.
fn columns(state: State, worker: &str) -> String {
    let running = state == State::Running;
    format!(
        "state = '{}', requested = NULL, worker = {}, lease_until = {}, finished_at = {}, failure = {}",
        state.as_str(),
        if running { format!("'{worker}'") } else { "NULL".to_owned() },
        if running { "1" } else { "NULL" },
        if state.is_terminal() { "1" } else { "NULL" },
        if state == State::Failed { "'{}'" } else { "NULL" },
    )
}

#[tokio::test]
async fn the_database_permits_exactly_the_moves_of_the_table() {
    let setting = Setting::new().await;
    let worker = setting.worker().await.to_string();
    for from in State::ALL {
        for to in State::ALL {
            let job = setting.job_in(from).await;
            let update = format!("UPDATE jobs SET {} WHERE id = '{job}'", columns(to, &worker));
            let result = setting.sql(&update).await;
            let legal = from == to || from.moves().contains(&to);
            assert_eq!(result.is_ok(), legal, "{from:?} → {to:?}: {result:?}");
            if let Err(error) = result {
                assert!(error.to_string().contains("illegal move of a job"), "{from:?} → {to:?}: {error}");
            }
            setting.sql(&format!("DELETE FROM jobs WHERE id = '{job}'")).await.unwrap();
        }
    }
}

#[tokio::test]
async fn the_database_refuses_rows_that_contradict_themselves() {
    let setting = Setting::new().await;
    let job = setting.job_in(State::Queued).await;
    for nonsense in [
        "lease_until = 5",
        "requested = 'cancel'",
        "finished_at = 5",
        "failure = '{}'",
        "phase = 'sleeping'",
        "state = 'done'",
        "step = 'one'",
    ] {
        assert!(setting.sql(&format!("UPDATE jobs SET {nonsense} WHERE id = '{job}'")).await.is_err(), "{nonsense}");
    }
    let born = format!(
        "INSERT INTO jobs SELECT '{}', name, 'cancelled', NULL, NULL, NULL, 0, 99, 0, 0, NULL, NULL, NULL, 0, 1, NULL, model, \
         spec, plan, secrets, metadata, NULL, NULL, 1, 0, NULL, 5, NULL, owner, NULL, NULL, NULL, 0, 0, NULL, 0 FROM jobs",
        JobId::new()
    );
    let error = setting.sql(&born).await.unwrap_err().to_string();
    assert!(error.contains("a job begins in the queue"), "{error}");
}

#[tokio::test]
async fn every_action_in_every_state_follows_the_table() {
    let setting = Setting::new().await;
    let store = &setting.store;
    for state in State::ALL {
        for action in Action::ALL {
            let job = setting.job_in(state).await;
            let before = store.event_latest_seq(job).await.unwrap();
            let result = match action {
                Action::Cancel => store.job_cancel(job, T0).await.map(|job| job.state),
                Action::Pause => store.job_pause(job, T0).await.map(|job| job.state),
                Action::Resume => store.job_resume(job, T0).await.map(|job| job.state),
                Action::Retry => store.job_retry(job, JobId::new(), T0).await.map(|job| job.state),
                Action::Delete => store.job_delete(job).await.map(|_| state),
            };
            let allowed = state.actions().contains(&action);
            match result {
                Ok(after) => {
                    assert!(allowed, "{action:?} of a {state:?} job");
                    let expected = match (action, state) {
                        (Action::Cancel | Action::Pause, State::Running) => State::Running,
                        (Action::Cancel, _) => State::Cancelled,
                        (Action::Pause, _) => State::Paused,
                        (Action::Resume | Action::Retry, _) => State::Queued,
                        (Action::Delete, state) => state,
                    };
                    assert_eq!(after, expected, "{action:?} of a {state:?} job");
                }
                Err(StoreError::IllegalMove { state: named, action: asked }) => {
                    assert!(!allowed, "{action:?} of a {state:?} job");
                    assert_eq!((named, asked), (state, action));
                    assert_eq!(setting.state(job).await, state);
                    assert_eq!(store.event_latest_seq(job).await.unwrap(), before);
                }
                Err(other) => panic!("{action:?} of a {state:?} job: {other}"),
            }
            setting.sql("DELETE FROM jobs").await.unwrap();
        }
    }
}

#[tokio::test]
async fn a_mark_is_set_once_and_cancel_outranks_pause() {
    let setting = Setting::new().await;
    let store = &setting.store;
    let job = setting.job_in(State::Running).await;
    assert_eq!(store.job_pause(job, T0).await.unwrap().requested, Some(Requested::Pause));
    store.job_pause(job, T0).await.unwrap();
    assert_eq!(store.job_heartbeat(job, 1, heartbeat(), T0, LEASE).await.unwrap(), Some(Requested::Pause));
    assert_eq!(store.job_resume(job, T0).await.unwrap().requested, None);
    assert_eq!(store.job_heartbeat(job, 1, heartbeat(), T0, LEASE).await.unwrap(), None);
    store.job_pause(job, T0).await.unwrap();
    assert_eq!(store.job_cancel(job, T0).await.unwrap().requested, Some(Requested::Cancel));
    store.job_cancel(job, T0).await.unwrap();
    for refused in [store.job_pause(job, T0).await, store.job_resume(job, T0).await] {
        assert!(matches!(refused, Err(StoreError::IllegalMove { state: State::Running, .. })));
    }
    assert_eq!(
        setting.history(job).await,
        [
            "job.created",
            "job.started",
            "job.pause_requested",
            "job.resumed",
            "job.pause_requested",
            "job.cancel_requested"
        ]
    );
}

#[tokio::test]
async fn cancel_is_idempotent_and_tells_once() {
    let setting = Setting::new().await;
    let job = setting.job_in(State::Cancelled).await;
    let again = setting.store.job_cancel(job, T0 + 5).await.unwrap();
    assert_eq!((again.state, again.finished_at), (State::Cancelled, Some(T0)));
    assert_eq!(setting.history(job).await, ["job.created", "job.cancelled"]);
}

#[tokio::test]
async fn every_outcome_meets_every_mark() {
    let setting = Setting::new().await;
    let (cancel, pause) = (Some(Requested::Cancel), Some(Requested::Pause));
    let own = || Outcome::Paused { reason: Some("reward_outage".to_owned()) };
    let table = [
        (Outcome::Succeeded, None, State::Succeeded),
        (Outcome::Succeeded, cancel, State::Succeeded),
        (Outcome::Succeeded, pause, State::Succeeded),
        (Outcome::Failed { failure: failure("x") }, None, State::Failed),
        (Outcome::Failed { failure: failure("x") }, cancel, State::Failed),
        (Outcome::Failed { failure: failure("x") }, pause, State::Failed),
        (Outcome::Cancelled, None, State::Cancelled),
        (Outcome::Cancelled, cancel, State::Cancelled),
        (Outcome::Cancelled, pause, State::Cancelled),
        (own(), None, State::Paused),
        (own(), cancel, State::Cancelled),
        (own(), pause, State::Paused),
        // The user withdrew the pause before the worker stopped for it.
        (Outcome::Paused { reason: None }, None, State::Queued),
        (Outcome::Paused { reason: None }, cancel, State::Cancelled),
        (Outcome::Paused { reason: None }, pause, State::Paused),
        (Outcome::Requeued, None, State::Queued),
        (Outcome::Requeued, cancel, State::Cancelled),
        (Outcome::Requeued, pause, State::Paused),
    ];
    for (outcome, requested, expected) in table {
        let job = setting.job_in(State::Running).await;
        match requested {
            Some(Requested::Cancel) => drop(setting.store.job_cancel(job, T0).await.unwrap()),
            Some(Requested::Pause) => drop(setting.store.job_pause(job, T0).await.unwrap()),
            None => {}
        }
        setting.store.job_finish(job, 1, outcome.clone(), T0 + 9).await.unwrap();
        let row = setting.store.job_get(job).await.unwrap();
        assert_eq!(row.state, expected, "{outcome:?} with {requested:?}");
        assert_eq!((row.requested, row.worker, row.lease_until, row.phase), (None, None, None, None));
        assert_eq!(row.finished_at, expected.is_terminal().then_some(T0 + 9));
        assert_eq!(row.failed_attempts, 0, "no outcome is charged");
        // If a request is pending, the pause counts as the user's.
        let reason = if outcome == own() && requested.is_none() { Some("reward_outage") } else { None };
        assert_eq!(row.status_reason.as_deref(), reason);
        setting.sql("DELETE FROM jobs").await.unwrap();
    }
}

#[tokio::test]
async fn a_late_worker_cannot_finish_a_requeued_job() {
    let setting = Setting::new().await;
    let store = &setting.store;
    let job = setting.job().await;
    let (slow, quick) = (setting.worker().await, setting.worker().await);
    let late = setting.claim(slow, T0).await.unwrap();
    assert_eq!(store.leases_reap(T0 + LEASE + 1).await.unwrap(), [job]);

    let batch = |attempt| EventBatch { attempt, batch: 0, events: Vec::new(), log: vec!["hello".to_owned()] };
    let refuse_late = async |when: &str| {
        let now = T0 + LEASE + 2;
        let refused = [
            store.claim_check(job, late.attempt).await,
            store.job_heartbeat(job, late.attempt, heartbeat(), now, LEASE).await.map(drop),
            store.events_append(job, &batch(late.attempt), now).await.map(drop),
            setting.publish(&late, 1, &Metrics::new()).await.map(drop),
            store.job_finish(job, late.attempt, Outcome::Succeeded, now).await,
        ];
        for result in refused {
            assert!(matches!(result, Err(StoreError::LeaseLost)), "{when}: {result:?}");
        }
    };
    refuse_late("queued again").await;
    let current = setting.claim(quick, T0 + LEASE + 3).await.unwrap();
    assert_eq!((current.job, current.attempt), (job, 2));
    refuse_late("claimed by another").await;
    store.claim_check(job, 2).await.unwrap();
    store.events_append(job, &batch(2), T0).await.unwrap();
    store.job_finish(job, 2, Outcome::Succeeded, T0).await.unwrap();
    refuse_late("over").await;
    assert_eq!(setting.state(job).await, State::Succeeded);
    assert_eq!(
        setting.history(job).await,
        ["job.created", "job.started", "job.requeued", "job.started", "job.succeeded"]
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn the_claim_race_has_one_winner() {
    let setting = Setting::new().await;
    let mut jobs = BTreeSet::new();
    for _ in 0..10 {
        jobs.insert(setting.job().await);
    }
    let mut race = tokio::task::JoinSet::new();
    for _ in 0..40 {
        let (store, worker) = (setting.store.clone(), setting.worker().await);
        race.spawn(async move { store.job_claim(worker, T0, LEASE).await.unwrap() });
    }
    let claims: Vec<Claimed> = race.join_all().await.into_iter().flatten().collect();
    assert_eq!(claims.len(), 10);
    assert!(claims.iter().all(|claimed| claimed.attempt == 1));
    assert_eq!(claims.iter().map(|claimed| claimed.job).collect::<BTreeSet<_>>(), jobs);
}

#[tokio::test]
async fn the_queue_is_first_come_within_a_priority_and_a_requeued_job_keeps_its_place() {
    let setting = Setting::new().await;
    let store = &setting.store;
    let first = setting.job_with(0, T0).await;
    // A clock that moves backwards has no effect.
    let second = setting.job_with(0, T0 - 1000).await;
    let urgent = setting.job_with(5, T0 + 1000).await;
    let lazy = setting.job_with(-1, T0).await;
    for (place, job) in [(1, urgent), (2, first), (3, second), (4, lazy)] {
        assert_eq!(store.job_queue_position(job).await.unwrap(), Some(place));
    }
    let worker = setting.worker().await;
    assert_eq!(setting.claim(worker, T0).await.unwrap().job, urgent);
    assert_eq!(store.job_queue_position(urgent).await.unwrap(), None);
    store.job_finish(urgent, 1, Outcome::Succeeded, T0).await.unwrap();
    assert_eq!(setting.claim(worker, T0).await.unwrap().job, first);
    store.job_finish(first, 1, Outcome::Requeued, T0).await.unwrap();
    let again = setting.claim(worker, T0).await.unwrap();
    assert_eq!((again.job, again.attempt), (first, 2));
    store.job_finish(first, 2, Outcome::Succeeded, T0).await.unwrap();
    let patch = rlood_store::JobPatch { priority: Some(9), ..Default::default() };
    store.job_patch(lazy, patch, T0).await.unwrap();
    assert_eq!(setting.claim(worker, T0).await.unwrap().job, lazy);
}

#[tokio::test]
async fn a_lease_lasts_from_the_last_heartbeat_and_a_restart_extends_it() {
    let setting = Setting::new().await;
    let store = &setting.store;
    let job = setting.job_in(State::Running).await;
    store.job_heartbeat(job, 1, heartbeat(), T0 + 10_000, LEASE).await.unwrap();
    assert_eq!(store.leases_reap(T0 + 40_000).await.unwrap(), []);
    let row = store.job_get(job).await.unwrap();
    assert_eq!((row.phase, row.step, row.eta_s), (Some(Phase::Train), 1, Some(3.0)));
    // The server was stopped for an hour.
    let boot = T0 + 3_600_000;
    store.leases_renew(boot, LEASE).await.unwrap();
    assert_eq!(store.leases_reap(boot + LEASE).await.unwrap(), []);
    assert_eq!(store.leases_reap(boot + LEASE + 1).await.unwrap(), [job]);
    let row = store.job_get(job).await.unwrap();
    // A step was done, so the lost worker is not a strike.
    assert_eq!((row.state, row.failed_attempts, row.attempt), (State::Queued, 0, 1));
}

#[tokio::test]
async fn three_lost_workers_without_progress_fail_the_job_and_progress_starts_the_count_anew() {
    let setting = Setting::new().await;
    let store = &setting.store;
    let job = setting.job().await;
    let lose = async |attempt: u64, publish: bool| {
        let worker = setting.worker().await;
        let claimed = setting.claim(worker, T0).await.unwrap();
        assert_eq!(claimed.attempt, attempt);
        if publish {
            setting.publish(&claimed, attempt, &Metrics::new()).await.unwrap();
        }
        assert_eq!(store.worker_lost(worker, Some("one\ntwo"), T0).await.unwrap(), Some(job));
        let row = store.job_get(job).await.unwrap();
        (row.state, row.failed_attempts)
    };
    assert_eq!(lose(1, false).await, (State::Queued, 1));
    assert_eq!(lose(2, false).await, (State::Queued, 2));
    assert_eq!(lose(3, true).await, (State::Queued, 0));
    assert_eq!(lose(4, false).await, (State::Queued, 1));
    assert_eq!(lose(5, false).await, (State::Queued, 2));
    assert_eq!(lose(6, false).await.0, State::Failed);
    let failure = store.job_get(job).await.unwrap().failure.unwrap();
    assert_eq!((failure.class, failure.code.as_str()), (FailureClass::Infra, "worker_lost"));
    assert_eq!((failure.phase, failure.step), (Some(Phase::Loading), Some(3)));
    assert!(failure.message.ends_with("; the log ends with: two"), "{}", failure.message);
    let log = store.log_page(job, None, 100).await.unwrap().data;
    let tail: Vec<_> = log.iter().rev().take(2).map(|row| (row.attempt, row.line.as_str())).collect();
    assert_eq!(tail, [(6, "two"), (6, "one")]);
    assert_eq!(store.worker_list().await.unwrap(), []);
}

#[tokio::test]
async fn a_pending_request_survives_the_loss_of_its_worker() {
    let setting = Setting::new().await;
    let store = &setting.store;
    for (cancel, expected) in [(true, State::Cancelled), (false, State::Paused)] {
        let job = setting.job_in(State::Running).await;
        if cancel {
            store.job_cancel(job, T0).await.unwrap();
        } else {
            store.job_pause(job, T0).await.unwrap();
        }
        assert_eq!(store.leases_reap(T0 + LEASE + 1).await.unwrap(), [job]);
        assert_eq!(setting.state(job).await, expected);
    }
}

#[tokio::test]
async fn a_worker_that_claims_again_loses_its_job() {
    let setting = Setting::new().await;
    let job = setting.job().await;
    let worker = setting.worker().await;
    assert_eq!(setting.claim(worker, T0).await.unwrap().attempt, 1);
    let again = setting.claim(worker, T0).await.unwrap();
    assert_eq!((again.job, again.attempt), (job, 2));
    assert_eq!(setting.history(job).await, ["job.created", "job.started", "job.requeued", "job.started"]);
    let stranger = setting.store.job_claim(rlood_types::id::WorkerId::new(), T0, LEASE).await;
    assert!(matches!(stranger, Err(StoreError::NotFound { kind: "worker", .. })));
}

#[tokio::test]
async fn a_restart_frees_the_children_and_waits_for_the_others() {
    let setting = Setting::new().await;
    let store = &setting.store;
    let (of_child, of_guest) = (setting.job().await, setting.job().await);
    let (child, guest) = (setting.worker_with(true).await, setting.worker().await);
    assert_eq!(setting.claim(child, T0).await.unwrap().job, of_child);
    assert_eq!(setting.claim(guest, T0).await.unwrap().job, of_guest);
    let boot = T0 + 3_600_000;
    assert_eq!(store.workers_forget_children(boot).await.unwrap(), [of_child]);
    store.leases_renew(boot, LEASE).await.unwrap();
    assert_eq!(store.leases_reap(boot).await.unwrap(), []);
    let row = store.job_get(of_child).await.unwrap();
    assert_eq!((row.state, row.failed_attempts), (State::Queued, 0));
    let workers = store.worker_list().await.unwrap();
    assert_eq!(workers.iter().map(|row| (row.id, row.job)).collect::<Vec<_>>(), [(guest, Some(of_guest))]);
    // A worker that holds a job is never pruned, but an idle one without heartbeats is.
    store.workers_prune(boot).await.unwrap();
    assert_eq!(store.worker_list().await.unwrap().len(), 1);
    store.job_finish(of_guest, 1, Outcome::Succeeded, boot).await.unwrap();
    store.workers_prune(boot).await.unwrap();
    assert_eq!(store.worker_list().await.unwrap(), []);
}

#[tokio::test]
async fn an_unreadable_plan_fails_its_job_and_not_the_queue() {
    let setting = Setting::new().await;
    let (bad, good) = (setting.job().await, setting.job().await);
    setting.sql(&format!("UPDATE jobs SET plan = '{{}}' WHERE id = '{bad}'")).await.unwrap();
    let worker = setting.worker().await;
    assert_eq!(setting.claim(worker, T0).await.unwrap().job, good);
    assert_eq!(setting.store.job_get(bad).await.unwrap().failure.unwrap().code, "plan_unreadable");
}

#[tokio::test]
async fn the_next_job_is_found_by_index_however_long_the_queue() {
    use sqlx::{Connection, Row};
    let setting = Setting::new().await;
    let options = sqlx::sqlite::SqliteConnectOptions::new().filename(setting.files.database());
    let mut connection = sqlx::SqliteConnection::connect_with(&options).await.unwrap();
    for (query, index) in [
        (NEXT_JOB, "jobs_queue"),
        (NEXT_DUE, "jobs_claim_later"),
        (LAPSED_JOBS, "jobs_leases"),
        (JOBS_OF_WORKER, "jobs_worker"),
        ("SELECT MAX(queue_order) FROM jobs", "jobs_queue_order"),
    ] {
        let explain = sqlx::AssertSqlSafe(format!("EXPLAIN QUERY PLAN {query}"));
        let rows = sqlx::query(explain).fetch_all(&mut connection).await.unwrap();
        let steps: Vec<String> = rows.iter().map(|row| row.get("detail")).collect();
        assert!(steps[0].contains(&format!("INDEX {index}")), "{query}: {steps:?}");
        // The plan also looks up whether the files of a job's models are downloaded.
        let beside = |step: &String| {
            step.contains("SUBQUERY")
                || step.starts_with("SEARCH models USING INDEX")
                || step.starts_with("SEARCH workers USING INDEX")
                || step.starts_with("SCAN used VIRTUAL TABLE")
        };
        assert!(steps[1..].iter().all(beside), "{query}: {steps:?}");
    }
}

#[tokio::test]
async fn phases_are_in_the_row_and_only_chapters_in_the_history() {
    let setting = Setting::new().await;
    let job = setting.job_in(State::Running).await;
    let enter = [Phase::Loading, Phase::Rollout, Phase::Reward, Phase::Train, Phase::Rollout, Phase::Checkpoint];
    let events = enter.map(|phase| Event::Phase { phase, step: 0 }).to_vec();
    let batch = EventBatch { attempt: 1, batch: 0, events, log: Vec::new() };
    setting.store.events_append(job, &batch, T0).await.unwrap();
    assert_eq!(setting.store.job_get(job).await.unwrap().phase, Some(Phase::Checkpoint));
    assert_eq!(setting.history(job).await, ["job.created", "job.started", "phase", "phase"]);
}

#[tokio::test]
async fn a_plan_survives_the_database() {
    let setting = Setting::new().await;
    let sent = plan(setting.dataset);
    let row = setting.job_of(&sent, 0, T0).await.unwrap();
    assert_eq!(row.plan().unwrap(), sent);
    assert_eq!((row.total_steps, row.model.as_str(), row.name.as_deref()), (10, "org/tiny", Some("a-job")));
    let worker = setting.worker().await;
    let claimed = setting.claim(worker, T0).await.unwrap();
    assert_eq!(claimed.plan, sent);
    assert_eq!(claimed.secrets["helpful"].secret.as_deref(), Some("whsec_x"));
}
