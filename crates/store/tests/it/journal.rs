//! Tests of the journal: writes need the current attempt, are durable, are read by the next attempt, and are
//! removed when a checkpoint covers them.

use rlood_store::StoreError;
use rlood_types::event::{FinishReason, Metrics};
use rlood_types::job::State;
use rlood_types::protocol::{JournalEntry, Outcome, RewardAnswer};
use rlood_types::rollout::{Generated, RolloutId, SampledGroup, Segments};

use crate::setting::{LEASE, Setting, T0};

fn rollout(rollout: RolloutId) -> JournalEntry {
    let logps = Some(vec![-0.1, f32::MIN_POSITIVE, -16_777_217.0]);
    let completions = vec![Generated {
        segments: Segments::of_completion(vec![5, 6, 7], logps),
        finish_reason: FinishReason::Stop,
        episode: None,
    }];
    JournalEntry::Rollout {
        rollout,
        groups: vec![SampledGroup { row: 2, completions, prompt_ids: None }],
        samplers: Vec::new(),
    }
}

fn request(rollout: RolloutId, key: &str, id: &str) -> JournalEntry {
    let body = format!("{{\"id\":\"{id}\"}}");
    JournalEntry::Request { rollout, reward: "r".into(), key: key.into(), id: id.into(), body, later: None }
}

fn answer(rollout: RolloutId, key: &str, id: &str) -> JournalEntry {
    let answer = RewardAnswer::Body { body: "[1, 2]".into() };
    JournalEntry::Answer { rollout, key: key.into(), id: id.into(), answer }
}

#[tokio::test]
async fn the_next_attempt_reads_the_journal_and_a_late_attempt_cannot_write() {
    let setting = Setting::new().await;
    let store = &setting.store;
    let job = setting.job().await;
    let claimed = setting.claim(setting.worker().await, T0).await.unwrap();
    let (train, eval) = (RolloutId::train(1), RolloutId::eval(0));
    let entries = [rollout(eval), rollout(train), request(train, "k1", "rwr_1"), request(train, "k2", "rwr_2")];
    store.journal_append(job, 1, &entries, T0).await.unwrap();
    // A call whose response was lost is repeated.
    store.journal_append(job, 1, &entries, T0).await.unwrap();
    store.journal_append(job, 1, &[answer(train, "k1", "rwr_1")], T0).await.unwrap();
    store.journal_append(job, 1, &[answer(train, "k1", "rwr_1")], T0).await.unwrap();
    let other_id = store.journal_append(job, 1, &[request(train, "k1", "rwr_9")], T0).await;
    assert!(matches!(other_id, Err(StoreError::Exists { .. })), "{other_id:?}");
    let unknown = store.journal_append(job, 1, &[answer(train, "k3", "rwr_3")], T0).await;
    assert!(matches!(unknown, Err(StoreError::NotFound { .. })), "{unknown:?}");

    store.leases_reap(T0 + LEASE + 1).await.unwrap();
    let late = store.journal_append(job, claimed.attempt, &[answer(train, "k2", "rwr_2")], T0).await;
    assert!(matches!(late, Err(StoreError::LeaseLost)), "{late:?}");
    setting.claim(setting.worker().await, T0).await.unwrap();
    assert!(matches!(store.journal_page(job, 1, 0, T0).await, Err(StoreError::LeaseLost)));
    let page = store.journal_page(job, 2, 0, T0).await.unwrap();
    assert_eq!(page.next, None);
    // An answered request is never sent again, so only its answer is stored.
    let expected =
        [rollout(eval), rollout(train), answer(train, "k1", "rwr_1"), request(train, "k2", "rwr_2")].to_vec();
    assert_eq!(page.entries, expected);
}

#[tokio::test]
async fn a_checkpoint_removes_covered_entries_and_the_end_of_the_job_the_rest() {
    let setting = Setting::new().await;
    let store = &setting.store;
    let job = setting.job().await;
    let claimed = setting.claim(setting.worker().await, T0).await.unwrap();
    let kept = async || {
        let entries = store.journal_page(job, 1, 0, T0).await.unwrap().entries;
        let name = |entry: JournalEntry| match entry {
            JournalEntry::Rollout { rollout, .. } => (rollout.phase, rollout.step),
            JournalEntry::Request { .. }
            | JournalEntry::Accepted { .. }
            | JournalEntry::Answer { .. }
            | JournalEntry::Forget { .. } => {
                panic!("{entry:?}")
            }
        };
        entries.into_iter().map(name).collect::<Vec<_>>()
    };
    let ids = [RolloutId::eval(1), RolloutId::train(1), RolloutId::train(2), RolloutId::eval(2), RolloutId::train(3)];
    store.journal_append(job, 1, &ids.map(rollout), T0).await.unwrap();
    setting.publish(&claimed, 2, &Metrics::new()).await.unwrap();
    // The evaluation of step 2 may not be finished, because a pause saves before it is.
    assert_eq!(kept().await, [RolloutId::eval(2), RolloutId::train(3)].map(|id| (id.phase, id.step)));
    let forget = JournalEntry::Forget { rollout: RolloutId::train(3), reward: "r".into() };
    store.journal_append(job, 1, &[request(RolloutId::train(3), "k", "rwr_1"), forget], T0).await.unwrap();
    assert_eq!(kept().await.len(), 2, "what is forgotten is the requests, not the completions");
    store.job_finish(job, 1, Outcome::Paused { reason: Some("reward_outage".into()) }, T0).await.unwrap();
    store.job_resume(job, T0).await.unwrap();
    setting.claim(setting.worker().await, T0).await.unwrap();
    assert_eq!(store.journal_page(job, 2, 0, T0).await.unwrap().entries.len(), 2, "a pause keeps it");
    store.job_finish(job, 2, Outcome::Succeeded, T0).await.unwrap();
    assert_eq!(setting.state(job).await, State::Succeeded);
    assert_eq!(setting.sql("DELETE FROM journal").await.unwrap(), 0, "nothing is left");
}

#[tokio::test]
async fn a_long_journal_comes_in_pages() {
    let setting = Setting::new().await;
    let job = setting.job().await;
    setting.claim(setting.worker().await, T0).await.unwrap();
    let big = |n: u64| {
        let id = RolloutId::train(n);
        let body = "x".repeat(3 << 20);
        JournalEntry::Request {
            rollout: id,
            reward: "r".into(),
            key: format!("k{n}"),
            id: format!("rwr_{n}"),
            body,
            later: None,
        }
    };
    let entries: Vec<JournalEntry> = (1..=5).map(big).collect();
    setting.store.journal_append(job, 1, &entries, T0).await.unwrap();
    let (mut found, mut after, mut pages) = (Vec::new(), Some(0), 0);
    while let Some(from) = after {
        let page = setting.store.journal_page(job, 1, from, T0).await.unwrap();
        found.extend(page.entries);
        after = page.next;
        pages += 1;
    }
    assert!(found == entries && pages == 3, "{pages} pages");
}

#[tokio::test]
async fn a_worker_that_lost_its_lease_is_lost_until_its_next_message() {
    let setting = Setting::new().await;
    setting.job().await;
    let worker = setting.worker().await;
    setting.claim(worker, T0).await.unwrap();
    let lost = async || setting.store.worker_list().await.unwrap()[0].lost;
    assert!(!lost().await);
    setting.store.leases_reap(T0 + LEASE + 1).await.unwrap();
    assert!(lost().await);
    setting.store.worker_seen(worker, T0 + LEASE + 2).await.unwrap();
    assert!(!lost().await);
}
