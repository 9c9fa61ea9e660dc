//! Data of finished jobs is removed when its retention time is over, and not before.

use rlood::config::retention::Retention;
use rlood::event::{Event, Metrics, SamplePhase};
use rlood::job::State;
use rlood::protocol::{EventBatch, JournalEntry, Outcome, RewardAnswer};
use rlood::rollout::RolloutId;
use rlood::serve::retention::round;
use rlood::store::SampleQuery;

use crate::server::sample;
use crate::setting::{Setting, T0, failure};

const DAY: i64 = 86_400_000;

#[tokio::test]
async fn only_what_finished_long_enough_ago_is_removed() {
    let setting = Setting::new().await;
    let store = &setting.store;
    let run = async |end: Option<i64>| {
        let job = setting.job().await;
        let worker = setting.worker().await;
        let claimed = setting.claim(worker, T0).await.unwrap();
        assert_eq!(claimed.job, job);
        let events = vec![
            Event::Step { step: 1, kind: SamplePhase::Train, metrics: Metrics::from([("reward".into(), Some(1.0))]) },
            Event::Samples { samples: vec![sample(1, "a", Some(1.0))] },
        ];
        let batch = EventBatch { attempt: claimed.attempt, batch: 0, events, log: vec!["a line".to_owned()] };
        store.events_append(job, &batch, T0).await.unwrap();
        setting.publish(&claimed, 1, &Metrics::new()).await.unwrap();
        setting.publish(&claimed, 2, &Metrics::new()).await.unwrap();
        let pinned = store.checkpoint_list(job).await.unwrap()[1].id;
        store.checkpoint_pin(pinned, true, T0).await.unwrap();
        if let Some(end) = end {
            store.job_finish(job, claimed.attempt, Outcome::Succeeded, end).await.unwrap();
        }
        job
    };
    let (old, new, running) = (run(Some(T0)).await, run(Some(T0 + 2 * DAY)).await, run(None).await);
    // Counts of events, steps, samples, log lines, checkpoints.
    let left = async |job| {
        let events = store.event_page(job, 0, 100).await.unwrap().len();
        let steps = store.step_page(job, None, 0, 100).await.unwrap().len();
        let samples =
            store.sample_page(job, &SampleQuery { limit: 100, ..SampleQuery::default() }).await.unwrap().data.len();
        let logs = store.log_page(job, None, 100).await.unwrap().data.len();
        (events > 0, steps, samples, logs, store.checkpoint_list(job).await.unwrap().len())
    };
    let everything = (true, 1, 1, 1, 2);

    round(store, &setting.files, Retention::default(), T0 + 1000 * DAY).await.unwrap();
    assert_eq!((left(old).await, left(new).await), (everything, everything), "by default all stays");

    let a_day = Some(DAY);
    let retention = Retention { samples_ms: a_day, checkpoints_ms: a_day, ..Retention::default() };
    round(store, &setting.files, retention, T0 + DAY + 1).await.unwrap();
    assert_eq!(left(old).await, (true, 1, 0, 1, 1), "the pinned checkpoint stays");
    assert_eq!((left(new).await, left(running).await), (everything, everything));

    let retention = Retention { events_ms: a_day, metrics_ms: a_day, logs_ms: a_day, ..Retention::default() };
    round(store, &setting.files, retention, T0 + 10 * DAY).await.unwrap();
    assert_eq!(left(old).await, (false, 0, 0, 0, 1));
    assert_eq!(left(new).await, (false, 0, 1, 0, 2));
    assert_eq!(left(running).await, everything, "a job that is not over keeps all");
    assert_eq!(setting.state(old).await, State::Succeeded);
}

#[tokio::test]
async fn the_journal_of_a_failed_job_goes_after_its_time_and_with_the_checkpoints_at_the_latest() {
    let setting = Setting::new().await;
    let store = &setting.store;
    let failed = async || {
        let job = setting.job().await;
        let claimed = setting.claim(setting.worker().await, T0).await.unwrap();
        setting.publish(&claimed, 1, &Metrics::new()).await.unwrap();
        let (rollout, key, id) = (RolloutId::train(2), "k".to_owned(), "rwr_1".to_owned());
        let answer = RewardAnswer::Body { body: "[]".into() };
        let entries = [
            JournalEntry::Request {
                rollout,
                reward: "r".into(),
                key: key.clone(),
                id: id.clone(),
                body: "{}".into(),
                later: None,
            },
            JournalEntry::Answer { rollout, key, id, answer },
        ];
        store.journal_append(job, claimed.attempt, &entries, T0).await.unwrap();
        store.job_finish(job, claimed.attempt, Outcome::Failed { failure: failure("oom") }, T0).await.unwrap();
    };
    let left = async || setting.sql("UPDATE journal SET time = time").await.unwrap();
    failed().await;
    let keep = |journals_ms, checkpoints_ms| Retention { journals_ms, checkpoints_ms, ..Retention::default() };
    round(store, &setting.files, keep(Some(2 * DAY), None), T0 + DAY).await.unwrap();
    assert_eq!(left().await, 1);
    round(store, &setting.files, keep(Some(2 * DAY), None), T0 + 2 * DAY + 1).await.unwrap();
    assert_eq!(left().await, 0);
    failed().await;
    round(store, &setting.files, keep(Some(2 * DAY), Some(DAY)), T0 + DAY + 1).await.unwrap();
    assert_eq!(left().await, 0);
}
