//! Tests of stored events, steps, samples, checkpoints, datasets, models and idempotency keys.
//! They share one small store with two datasets, so they are in one file of more than 500 lines.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;

use rlood_store::{
    Claimed, DatasetFilter, JobFilter, JobPatch, KeyBegin, NewDataset, NewModel, SampleQuery, SampleSort, Store,
    StoreError,
};
use rlood_types::event::{Event, FinishReason, Metrics, Sample, SamplePhase};
use rlood_types::id::{DatasetId, JobId};
use rlood_types::job::State;
use rlood_types::protocol::{EventBatch, Outcome};
use serde_json::json;

use crate::setting::{Setting, T0, plan};

fn batch(attempt: u64, number: u64, events: Vec<Event>) -> EventBatch {
    EventBatch { attempt, batch: number, events, log: Vec::new() }
}

fn step(step: u64, kind: SamplePhase, reward: f64) -> Event {
    let prefix = if kind == SamplePhase::Eval { "eval_" } else { "" };
    let metrics = Metrics::from([
        (format!("{prefix}reward"), Some(reward)),
        (format!("{prefix}reward_std"), None),
        (format!("{prefix}rewards/length/mean"), Some(1.0)),
    ]);
    Event::Step { step, kind, metrics }
}

fn sample(step: u64, phase: SamplePhase, completion: &str, reward: Option<f64>) -> Sample {
    Sample {
        step,
        phase,
        group_id: "g_0".to_owned(),
        prompt_id: "row_0".to_owned(),
        prompt: "Say \"it\"\n".to_owned(),
        completion: completion.to_owned(),
        rewards: BTreeMap::from([("length".to_owned(), reward)]),
        reward,
        kl: Some(0.25),
        advantage: None,
        finish_reason: FinishReason::Stop,
        num_tokens: 3,
        episode: None,
    }
}

async fn claimed(setting: &Setting) -> Claimed {
    setting.job().await;
    let worker = setting.worker().await;
    setting.claim(worker, T0).await.unwrap()
}

#[tokio::test]
async fn a_repeated_batch_is_ignored() {
    let setting = Setting::new().await;
    let Claimed { job, .. } = claimed(&setting).await;
    let mut first = batch(1, 0, vec![step(1, SamplePhase::Train, 0.5)]);
    first.log.push("a line".to_owned());
    assert!(setting.store.events_append(job, &first, T0).await.unwrap());
    assert!(!setting.store.events_append(job, &first, T0 + 1).await.unwrap());
    let second = batch(1, 1, vec![step(2, SamplePhase::Train, 0.75)]);
    assert!(setting.store.events_append(job, &second, T0 + 2).await.unwrap());
    assert!(!setting.store.events_append(job, &first, T0 + 3).await.unwrap());
    assert_eq!(setting.history(job).await, ["job.created", "job.started", "step", "step"]);
    assert_eq!(setting.store.log_page(job, None, 10).await.unwrap().data.len(), 1);
    assert_eq!(setting.store.job_get(job).await.unwrap().step, 2);
}

#[tokio::test]
async fn a_step_event_carries_headlines_and_the_row_everything() {
    let setting = Setting::new().await;
    let Claimed { job, .. } = claimed(&setting).await;
    let events = vec![
        step(0, SamplePhase::Eval, 0.25),
        step(1, SamplePhase::Train, 0.5),
        step(2, SamplePhase::Train, 0.75),
        step(2, SamplePhase::Eval, 1.0),
    ];
    setting.store.events_append(job, &batch(1, 0, events), T0).await.unwrap();
    let events = setting.store.event_page(job, 2, 10).await.unwrap();
    assert_eq!(
        events[0].data,
        json!({"step": 0, "kind": "eval", "metrics": {"eval_reward": 0.25, "eval_reward_std": null}})
    );
    let steps = |kind, min, max| {
        let store = &setting.store;
        async move {
            let rows = store.step_page(job, kind, min, max).await.unwrap();
            rows.into_iter().map(|row| (row.step, row.kind)).collect::<Vec<_>>()
        }
    };
    let (train, eval) = (SamplePhase::Train, SamplePhase::Eval);
    assert_eq!(steps(None, 0, u64::MAX).await, [(0, eval), (1, train), (2, train), (2, eval)]);
    assert_eq!(steps(Some(train), 0, 1).await, [(1, train)]);
    let rows = setting.store.step_page(job, Some(eval), 2, 2).await.unwrap();
    assert_eq!(rows[0].metrics["eval_rewards/length/mean"], Some(1.0));
    assert_eq!(rows[0].metrics["eval_reward_std"], None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn sequence_numbers_have_no_gap_under_concurrency() {
    let setting = Setting::new().await;
    let Claimed { job, .. } = claimed(&setting).await;
    let mut writers = tokio::task::JoinSet::new();
    for number in 0..30 {
        let store = setting.store.clone();
        let warning = Event::Warning { code: "w".to_owned(), message: "m".to_owned(), data: json!(number) };
        writers.spawn(async move {
            // A batch with a late number counts as repeated and is ignored; every stored batch is counted once.
            store.events_append(job, &batch(1, number, vec![warning; 3]), T0).await.unwrap();
            store.job_patch(job, JobPatch { priority: Some(number as i64), ..Default::default() }, T0).await.unwrap();
        });
    }
    writers.join_all().await;
    let events = setting.store.event_page(job, 0, 1000).await.unwrap();
    let numbers: Vec<i64> = events.iter().map(|event| event.seq).collect();
    assert_eq!(numbers, (1..=numbers.len() as i64).collect::<Vec<_>>());
    assert_eq!(setting.store.event_latest_seq(job).await.unwrap(), numbers.len() as i64);
    assert_eq!(events.iter().filter(|event| event.kind == "job.updated").count(), 30);
    assert_eq!(events.iter().filter(|event| event.kind == "warning").count() % 3, 0);
    assert!(setting.store.event_page(job, 5, 3).await.unwrap().iter().map(|event| event.seq).eq(6..9));
}

#[tokio::test]
async fn a_new_claim_rewinds_to_the_newest_checkpoint() {
    let setting = Setting::new().await;
    let store = &setting.store;
    let first = claimed(&setting).await;
    let job = first.job;
    let report = |attempt, number, steps: std::ops::RangeInclusive<u64>| {
        let mut events = Vec::new();
        for at in steps {
            events.push(step(at, SamplePhase::Train, 0.5));
            events.push(Event::Samples { samples: vec![sample(at, SamplePhase::Train, "x", Some(0.5))] });
        }
        batch(attempt, number, events)
    };
    store.events_append(job, &report(1, 0, 1..=2), T0).await.unwrap();
    setting.publish(&first, 2, &Metrics::new()).await.unwrap();
    store.events_append(job, &report(1, 1, 3..=4), T0).await.unwrap();
    assert_eq!(store.job_get(job).await.unwrap().step, 4);
    store.job_finish(job, 1, Outcome::Requeued, T0).await.unwrap();

    let worker = setting.worker().await;
    let second = setting.claim(worker, T0).await.unwrap();
    assert_eq!(second.resume.as_ref().map(|checkpoint| checkpoint.step), Some(2));
    assert_eq!(store.job_get(job).await.unwrap().step, 2);
    let steps: Vec<_> = store.step_page(job, None, 0, 99).await.unwrap().iter().map(|row| row.step).collect();
    assert_eq!(steps, [1, 2]);
    let samples = store.sample_page(job, &SampleQuery { limit: 10, ..Default::default() }).await.unwrap();
    assert_eq!(samples.data.iter().map(|row| row.sample.step).collect::<Vec<_>>(), [2, 1]);
    let last = store.event_page(job, 0, 100).await.unwrap().pop().unwrap();
    assert_eq!((last.kind.as_str(), last.attempt, last.data), ("rewind", 2, json!({"step": 2})));

    // The batches of the new attempt count from 0 again.
    assert!(store.events_append(job, &report(2, 0, 3..=3), T0).await.unwrap());
    // If nothing is rewound, no event is recorded.
    setting.publish(&second, 3, &Metrics::new()).await.unwrap();
    store.job_finish(job, 2, Outcome::Requeued, T0).await.unwrap();
    setting.claim(worker, T0).await.unwrap();
    assert_eq!(setting.history(job).await.iter().filter(|kind| *kind == "rewind").count(), 1);
}

#[tokio::test]
async fn a_repeated_evaluation_replaces_its_samples() {
    let setting = Setting::new().await;
    let store = &setting.store;
    let first = claimed(&setting).await;
    let evaluation = |attempt, number, text: &str| {
        let samples = vec![sample(2, SamplePhase::Eval, text, Some(1.0)); 2];
        batch(attempt, number, vec![Event::Samples { samples: samples.clone() }, Event::Samples { samples }])
    };
    setting.publish(&first, 2, &Metrics::new()).await.unwrap();
    store.events_append(first.job, &evaluation(1, 0, "old"), T0).await.unwrap();
    store.job_finish(first.job, 1, Outcome::Requeued, T0).await.unwrap();
    let worker = setting.worker().await;
    setting.claim(worker, T0).await.unwrap();
    store.events_append(first.job, &evaluation(2, 0, "new"), T0).await.unwrap();
    let page = store.sample_page(first.job, &SampleQuery { limit: 10, ..Default::default() }).await.unwrap();
    let texts: Vec<_> = page.data.iter().map(|row| row.sample.completion.as_str()).collect();
    assert_eq!(texts, ["new"; 4]);
}

#[tokio::test]
async fn samples_are_sorted_searched_and_paged() {
    let setting = Setting::new().await;
    let Claimed { job, .. } = claimed(&setting).await;
    let samples = vec![
        sample(1, SamplePhase::Train, "alpha", Some(0.5)),
        sample(1, SamplePhase::Train, "Beta 100%", Some(-1.5)),
        sample(2, SamplePhase::Train, "gamma", None),
        sample(2, SamplePhase::Train, "delta", Some(0.5)),
        sample(2, SamplePhase::Eval, "epsilon", Some(2.0)),
    ];
    setting.store.events_append(job, &batch(1, 0, vec![Event::Samples { samples }]), T0).await.unwrap();
    let walk = |query: SampleQuery| {
        let store = &setting.store;
        async move {
            let mut query = SampleQuery { limit: 2, ..query };
            let mut texts = Vec::new();
            loop {
                let page = store.sample_page(job, &query).await.unwrap();
                assert!(page.data.len() <= 2);
                texts.extend(page.data.into_iter().map(|row| row.sample.completion));
                match page.next {
                    Some(next) => query.after = Some(next),
                    None => return texts,
                }
            }
        }
    };
    let sorted = |sort| walk(SampleQuery { sort, ..Default::default() });
    assert_eq!(sorted(SampleSort::Recent).await, ["epsilon", "delta", "gamma", "Beta 100%", "alpha"]);
    assert_eq!(sorted(SampleSort::Best).await, ["epsilon", "alpha", "delta", "Beta 100%", "gamma"]);
    assert_eq!(sorted(SampleSort::Worst).await, ["Beta 100%", "delta", "alpha", "epsilon", "gamma"]);
    let found = |text: &str| walk(SampleQuery { contains: Some(text.to_owned()), ..Default::default() });
    assert_eq!(found("BETA 100%").await, ["Beta 100%"]);
    assert_eq!(found("\"it\"\n").await.len(), 5);
    assert_eq!(found("%").await, ["Beta 100%"]);
    assert_eq!(
        walk(SampleQuery { min_step: Some(1), max_step: Some(1), ..Default::default() }).await,
        ["Beta 100%", "alpha"]
    );
    assert_eq!(walk(SampleQuery { phase: Some(SamplePhase::Eval), ..Default::default() }).await, ["epsilon"]);

    let page = setting.store.sample_page(job, &SampleQuery { limit: 1, ..Default::default() }).await.unwrap();
    let stale = SampleQuery { sort: SampleSort::Best, after: page.next, limit: 1, ..Default::default() };
    assert!(matches!(setting.store.sample_page(job, &stale).await, Err(StoreError::BadCursor)));
}

#[tokio::test]
async fn rotation_keeps_the_newest_the_best_and_pinned_checkpoints() {
    let setting = Setting::new().await;
    let store = &setting.store;
    let first = claimed(&setting).await;
    let job = first.job;
    let reward = |value: f64| Metrics::from([("reward".to_owned(), Some(value))]);
    let mut removed = Vec::new();
    for (step, value) in [(1, 0.1), (2, 0.9), (3, 0.2), (4, 0.9), (5, 0.3)] {
        let publication = setting.publish(&first, step, &reward(value)).await.unwrap();
        removed.extend(publication.removed.iter().map(|old| old.step));
        if step == 1 {
            let sql = format!("UPDATE checkpoints SET pinned = 1 WHERE id = '{}'", publication.id);
            setting.sql(&sql).await.unwrap();
        }
    }
    assert_eq!(removed, [3]);
    let rows = store.checkpoint_list(job).await.unwrap();
    let kept: Vec<_> = rows.iter().map(|row| (row.step, row.best, row.pinned)).collect();
    assert_eq!(kept, [(5, false, false), (4, false, false), (2, true, false), (1, false, true)]);
    assert_eq!(store.checkpoint_best(job).await.unwrap().unwrap().step, 2);
    assert_eq!(store.checkpoint_latest(job).await.unwrap().unwrap().step, 5);
    assert_eq!(store.checkpoint_get(rows[2].id).await.unwrap(), rows[2]);
    assert_eq!(store.checkpoint_keys().await.unwrap().len(), 4);

    // Once a checkpoint was evaluated, only evaluated ones count.
    let evaluated = Metrics::from([("reward".to_owned(), Some(0.0)), ("eval_reward".to_owned(), Some(-3.0))]);
    setting.publish(&first, 6, &evaluated).await.unwrap();
    assert_eq!(store.checkpoint_best(job).await.unwrap().unwrap().step, 6);

    // A publication whose response was lost gives the same response again; a later attempt replaces it.
    let before = store.checkpoint_latest(job).await.unwrap().unwrap();
    let again = setting.publish(&first, 6, &evaluated).await.unwrap();
    assert_eq!((again.id, again.removed), (before.id, Vec::new()));
    store.job_finish(job, 1, Outcome::Requeued, T0).await.unwrap();
    let worker = setting.worker().await;
    let second = setting.claim(worker, T0).await.unwrap();
    let replaced = setting.publish(&second, 6, &evaluated).await.unwrap();
    assert_ne!(replaced.id, before.id);
    assert_eq!(replaced.removed.iter().map(|old| (old.step, old.attempt)).collect::<Vec<_>>(), [(6, 1)]);
}

#[tokio::test]
async fn jobs_are_listed_newest_first_filtered_and_paged() {
    let setting = Setting::new().await;
    let store = &setting.store;
    let mut ids = Vec::new();
    for at in 0..5 {
        // Two jobs created in the same millisecond are sorted by id.
        ids.push(setting.job_with(0, T0 + at / 2).await);
        tokio::time::sleep(std::time::Duration::from_millis(2)).await;
    }
    let mut other = plan(setting.dataset);
    other.model.id = "org/other".to_owned();
    other.metadata = BTreeMap::from([("team".to_owned(), "y".to_owned()), ("run".to_owned(), "1".to_owned())]);
    let other = setting.job_of(&other, 0, T0 + 9).await.unwrap().id;
    ids.push(other);
    ids.reverse();

    let mut listed = Vec::new();
    let mut after = None;
    loop {
        let page = store.job_list(&JobFilter::default(), after.as_deref(), 4).await.unwrap();
        listed.extend(page.data.iter().map(|job| job.id));
        after = page.next;
        if after.is_none() {
            break;
        }
    }
    assert_eq!(listed, ids);

    let find = |filter: JobFilter| async move {
        let page = store.job_list(&filter, None, 100).await.unwrap();
        page.data.iter().map(|job| job.id).collect::<Vec<_>>()
    };
    let labels = |pairs: &[(&str, &str)]| JobFilter {
        metadata: pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect(),
        ..Default::default()
    };
    assert_eq!(find(labels(&[("team", "y")])).await, [other]);
    assert_eq!(find(labels(&[("team", "y"), ("run", "2")])).await, []);
    assert_eq!(find(JobFilter { model: Some("org/other".to_owned()), ..Default::default() }).await, [other]);
    store.job_cancel(other, T0).await.unwrap();
    assert_eq!(find(JobFilter { states: vec![State::Cancelled], ..Default::default() }).await, [other]);
    assert_eq!(store.job_counts().await.unwrap()[0], (State::Queued, 5));
    assert_eq!(store.job_counts().await.unwrap()[5], (State::Cancelled, 1));
    for bad in ["x", "", "am9icw"] {
        assert!(matches!(store.job_list(&JobFilter::default(), Some(bad), 4).await, Err(StoreError::BadCursor)));
    }
}

#[tokio::test]
async fn a_retry_copies_everything_and_a_patch_changes_labels() {
    let setting = Setting::new().await;
    let store = &setting.store;
    let old = setting.job_in(State::Failed).await;
    let patch = JobPatch { name: Some(None), metadata: Some(BTreeMap::new()), ..JobPatch::default() };
    let patched = store.job_patch(old, patch, T0).await.unwrap();
    assert_eq!((patched.name, patched.metadata), (None, BTreeMap::new()));
    let new = JobId::new();
    let row = store.job_retry(old, new, T0 + 1).await.unwrap();
    assert_eq!((row.id, row.state, row.parent, row.attempt), (new, State::Queued, Some(old), 0));
    assert_eq!((row.created_at, row.failure, row.started_at), (T0 + 1, None, None));
    assert_eq!(row.plan_json.get(), store.job_get(old).await.unwrap().plan_json.get());
    assert_eq!(store.job_secrets(new).await.unwrap()["helpful"].secret.as_deref(), Some("whsec_x"));
    // The copy needs the dataset as the original did.
    assert!(
        matches!(store.dataset_delete(setting.dataset).await, Err(StoreError::InUse { jobs, .. }) if jobs == [new])
    );
    store.job_cancel(new, T0).await.unwrap();
    store.dataset_delete(setting.dataset).await.unwrap();
    let gone = store.job_retry(old, JobId::new(), T0).await;
    assert!(matches!(gone, Err(StoreError::NotFound { kind: "dataset", .. })), "{gone:?}");
}

#[tokio::test]
async fn deleting_a_job_takes_everything_that_hangs_on_it() {
    let setting = Setting::new().await;
    let store = &setting.store;
    let first = claimed(&setting).await;
    let samples = vec![sample(1, SamplePhase::Train, "x", None)];
    let events = vec![step(1, SamplePhase::Train, 0.5), Event::Samples { samples }];
    store.events_append(first.job, &batch(1, 0, events), T0).await.unwrap();
    setting.publish(&first, 1, &Metrics::new()).await.unwrap();
    store.job_finish(first.job, 1, Outcome::Succeeded, T0).await.unwrap();
    store.job_delete(first.job).await.unwrap();
    assert!(matches!(store.job_get(first.job).await, Err(StoreError::NotFound { kind: "job", .. })));
    assert_eq!(store.event_page(first.job, 0, 10).await.unwrap(), []);
    assert_eq!(store.step_page(first.job, None, 0, 9).await.unwrap(), []);
    assert_eq!(store.checkpoint_keys().await.unwrap(), []);
    assert!(matches!(store.job_delete(first.job).await, Err(StoreError::NotFound { .. })));
}

#[tokio::test]
async fn the_same_bytes_are_the_same_dataset_and_a_needed_one_stays() {
    let setting = Setting::new().await;
    let store = &setting.store;
    let again = NewDataset {
        id: DatasetId::new(),
        name: Some("again".to_owned()),
        sha256: "d1".to_owned(),
        num_rows: 8,
        size_bytes: 80,
        columns: vec!["prompt".to_owned()],
        owner: String::new(),
    };
    let (row, new) = store.dataset_create(again.clone(), T0).await.unwrap();
    assert_eq!((row.id, row.name, new), (setting.dataset, None, false));
    let other = NewDataset { sha256: "d2".to_owned(), ..again };
    let (row, new) = store.dataset_create(other, T0 + 1).await.unwrap();
    assert!(new);
    assert_eq!(store.dataset_by_sha256("", "d2").await.unwrap().as_ref(), Some(&row));
    assert_eq!(store.dataset_by_sha256("", "d3").await.unwrap(), None);
    assert_eq!(store.dataset_by_sha256("another owner", "d2").await.unwrap(), None);
    let all = DatasetFilter::default();
    let page = store.dataset_list(all, None, 1).await.unwrap();
    assert_eq!(page.data, [row]);
    let rest = store.dataset_list(all, page.next.as_deref(), 1).await.unwrap();
    assert_eq!((rest.data[0].id, rest.next), (setting.dataset, None));
    let row = &page.data[0];
    for (filter, expected) in [
        (DatasetFilter { name: Some("again"), ..all }, vec![row.id]),
        (DatasetFilter { name: Some("gain"), ..all }, vec![]),
        (DatasetFilter { sha256: Some("d1"), ..all }, vec![setting.dataset]),
        (DatasetFilter { sha256: Some("d2"), owner: Some(""), name: Some("again") }, vec![row.id]),
        (DatasetFilter { sha256: Some("d2"), owner: Some("another owner"), ..all }, vec![]),
    ] {
        let page = store.dataset_list(filter, None, 10).await.unwrap();
        assert_eq!(page.data.iter().map(|row| row.id).collect::<Vec<_>>(), expected, "{filter:?}");
    }

    let job = setting.job().await;
    let refused = store.dataset_delete(setting.dataset).await.unwrap_err();
    assert!(matches!(&refused, StoreError::InUse { kind: "dataset", jobs, .. } if *jobs == [job]), "{refused}");
    store.job_cancel(job, T0).await.unwrap();
    store.dataset_delete(setting.dataset).await.unwrap();
    let missing = setting.job_of(&plan(setting.dataset), 0, T0).await.unwrap_err();
    assert!(matches!(missing, StoreError::NotFound { kind: "dataset", .. }));
    assert_eq!(store.job_list(&JobFilter::default(), None, 10).await.unwrap().data.len(), 1, "nothing half made");
}

#[tokio::test]
async fn a_model_id_belongs_to_one_directory() {
    let setting = Setting::new().await;
    let store = &setting.store;
    let new = NewModel {
        id: "org/tiny".to_owned(),
        source: "/models/tiny".to_owned(),
        sha256: "aa".to_owned(),
        card: json!({"layers": 2}),
        owner: String::new(),
    };
    assert!(store.model_create(new.clone(), T0).await.unwrap().1);
    let changed = NewModel { sha256: "bb".to_owned(), ..new.clone() };
    let (row, is_new) = store.model_create(changed, T0 + 1).await.unwrap();
    assert_eq!((row.sha256.as_str(), row.created_at, is_new), ("bb", T0, false));
    let elsewhere = NewModel { source: "/models/other".to_owned(), ..new };
    assert!(matches!(store.model_create(elsewhere, T0).await, Err(StoreError::Exists { kind: "model", .. })));
    assert_eq!(store.model_list(None, None, 5).await.unwrap().data, std::slice::from_ref(&row));
    assert_eq!(store.model_get("org/tiny").await.unwrap(), row);
    let job = setting.job().await;
    assert!(matches!(store.model_delete("org/tiny").await, Err(StoreError::InUse { jobs, .. }) if jobs == [job]));
    store.job_cancel(job, T0).await.unwrap();
    store.model_delete("org/tiny").await.unwrap();
    assert!(matches!(store.model_get("org/tiny").await, Err(StoreError::NotFound { .. })));
}

#[tokio::test]
async fn an_idempotency_key_replays_for_a_day() {
    let setting = Setting::new().await;
    let store = &setting.store;
    let begin = |body: &'static str, now: i64| store.key_begin("POST /jobs", "k1", body, now);
    assert_eq!(begin("b1", T0).await.unwrap(), KeyBegin::New);
    assert_eq!(begin("b1", T0).await.unwrap(), KeyBegin::InFlight);
    assert_eq!(begin("b2", T0).await.unwrap(), KeyBegin::OtherBody);
    store.key_complete("POST /jobs", "k1", 201, Some("/jobs/j"), "{}").await.unwrap();
    let replay = KeyBegin::Replay { status: 201, location: Some("/jobs/j".to_owned()), response: "{}".to_owned() };
    assert_eq!(begin("b1", T0 + 1000).await.unwrap(), replay);
    assert_eq!(begin("b2", T0 + 1000).await.unwrap(), KeyBegin::OtherBody);
    assert_eq!(store.key_begin("POST /datasets", "k1", "b2", T0).await.unwrap(), KeyBegin::New);
    store.key_abandon("POST /datasets", "k1").await.unwrap();
    assert_eq!(store.key_begin("POST /datasets", "k1", "b3", T0).await.unwrap(), KeyBegin::New);
    // When the server dies, keys of requests in flight are freed, and stored responses are kept.
    store.keys_free_in_flight().await.unwrap();
    assert_eq!(store.key_begin("POST /datasets", "k1", "b4", T0).await.unwrap(), KeyBegin::New);
    let day = 24 * 60 * 60 * 1000;
    assert_eq!(begin("b1", T0 + day).await.unwrap(), replay);
    assert_eq!(begin("b2", T0 + day + 1).await.unwrap(), KeyBegin::New);
}

#[tokio::test]
async fn watchers_wake_after_the_commit_and_only_for_their_job() {
    let setting = Setting::new().await;
    let store = &setting.store;
    let mut queue = store.queue_changed();
    let (job, other) = (setting.job().await, setting.job().await);
    assert!(queue.has_changed().unwrap());
    queue.mark_unchanged();
    let (mut watcher, bystander) = (store.changed(job), store.changed(other));
    let waiting = tokio::spawn(async move { watcher.changed().await });
    store.job_pause(job, T0).await.unwrap();
    waiting.await.unwrap().unwrap();
    assert!(!bystander.has_changed().unwrap() && !queue.has_changed().unwrap());
    store.job_resume(job, T0).await.unwrap();
    assert!(queue.has_changed().unwrap());
}

#[tokio::test]
async fn the_database_is_its_owners_whatever_the_directory_permits() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let database = dir.path().join("rlood.db");
    // The file as a former version left it.
    std::fs::write(&database, "").unwrap();
    std::fs::set_permissions(&database, std::fs::Permissions::from_mode(0o644)).unwrap();
    let store = Store::open(&database).await.unwrap();
    store.ping().await.unwrap();
    for name in ["rlood.db", "rlood.db-wal", "rlood.db-shm"] {
        let mode = std::fs::metadata(dir.path().join(name)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{name}");
    }
    store.close().await;
}

#[tokio::test]
async fn everything_is_there_after_a_restart() {
    let setting = Setting::new().await;
    let Claimed { job, .. } = claimed(&setting).await;
    setting.store.events_append(job, &batch(1, 0, vec![step(1, SamplePhase::Train, 0.5)]), T0).await.unwrap();
    setting.store.close().await;
    let store = Store::open(&setting.files.database()).await.unwrap();
    store.ping().await.unwrap();
    assert_eq!(store.job_get(job).await.unwrap().step, 1);
    assert_eq!(store.event_latest_seq(job).await.unwrap(), 3);
    drop(setting.dir);
}
