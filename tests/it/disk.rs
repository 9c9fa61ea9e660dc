//! The disk reserve: jobs pause below it, and resume automatically well above it.

use std::sync::atomic::Ordering;

use rlood::job::{Requested, State};
use rlood::protocol::Outcome;
use rlood::serve::disk::DiskWatch;

use crate::server::{Server, job};
use crate::setting::{Setting, T0};

const RESERVE: u64 = 1000;
const MINUTE: i64 = 60_000;

async fn reason(setting: &Setting, job: rlood::id::JobId) -> Option<String> {
    setting.store.job_get(job).await.unwrap().status_reason
}

#[tokio::test]
async fn a_nearly_full_disk_pauses_jobs_and_room_resumes_them() {
    let setting = Setting::new().await;
    let store = &setting.store;
    let running = setting.job().await;
    let worker = setting.worker().await;
    let claimed = setting.claim(worker, T0).await.unwrap();
    let queued = setting.job().await;
    let users = setting.job_in(State::Paused).await;
    let mut watch = DiskWatch::new(RESERVE);

    watch.apply(store, RESERVE, T0).await.unwrap();
    assert_eq!((setting.state(running).await, setting.state(queued).await), (State::Running, State::Queued));

    watch.apply(store, RESERVE - 1, T0 + 1).await.unwrap();
    assert_eq!(setting.state(queued).await, State::Paused);
    assert_eq!(reason(&setting, queued).await.as_deref(), Some("disk_full"));
    assert_eq!(store.job_get(running).await.unwrap().requested, Some(Requested::Pause));
    // The worker stops at a checkpoint, as for a user's pause.
    store.job_finish(running, claimed.attempt, Outcome::Paused { reason: None }, T0 + 2).await.unwrap();
    assert_eq!(setting.state(running).await, State::Paused);
    assert_eq!(reason(&setting, running).await.as_deref(), Some("disk_full"));

    // A little free space is not enough: otherwise jobs would pause and resume repeatedly.
    watch.apply(store, RESERVE + 400, T0 + 3).await.unwrap();
    assert_eq!(setting.state(running).await, State::Paused);
    watch.apply(store, RESERVE + 500, T0 + 4).await.unwrap();
    assert_eq!((setting.state(running).await, setting.state(queued).await), (State::Queued, State::Queued));
    assert_eq!(setting.state(users).await, State::Paused, "a user's pause stays");
    let history = setting.history(running).await;
    assert_eq!(&history[history.len() - 3..], ["job.pause_requested", "job.paused", "job.resumed"]);
    // The job keeps its place in the queue: it is first again.
    assert_eq!(setting.claim(worker, T0 + 5).await.unwrap().job, running);
}

#[tokio::test]
async fn a_pause_that_a_user_confirms_is_the_users() {
    let setting = Setting::new().await;
    let store = &setting.store;
    let job = setting.job().await;
    let mut watch = DiskWatch::new(RESERVE);
    watch.apply(store, 0, T0).await.unwrap();
    assert_eq!(reason(&setting, job).await.as_deref(), Some("disk_full"));
    store.job_pause(job, T0 + 1).await.unwrap();
    assert_eq!(reason(&setting, job).await, None);
    watch.apply(store, u64::MAX, T0 + 2).await.unwrap();
    assert_eq!(setting.state(job).await, State::Paused);
}

#[tokio::test]
async fn a_job_that_needs_more_than_there_is_does_not_begin_anew_every_second() {
    let setting = Setting::new().await;
    let store = &setting.store;
    let job = setting.job().await;
    let worker = setting.worker().await;
    let mut watch = DiskWatch::new(RESERVE);
    let mut resumed = Vec::new();
    let mut claimed = setting.claim(worker, T0).await;
    for second in 0..600 {
        let now = T0 + second * 1000;
        // The server has free space, but not enough for this job's checkpoint.
        if let Some(claim) = claimed.take() {
            let full = Outcome::Paused { reason: Some("disk_full".to_owned()) };
            store.job_finish(job, claim.attempt, full, now).await.unwrap();
        }
        watch.apply(store, 10 * RESERVE, now).await.unwrap();
        claimed = setting.claim(worker, now).await;
        if claimed.is_some() {
            resumed.push(second * 1000);
        }
    }
    assert_eq!(resumed.len(), 4, "{resumed:?}");
    let pauses: Vec<i64> = resumed.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(pauses[0] >= MINUTE && pauses[1] >= 2 * MINUTE && pauses[2] >= 4 * MINUTE, "{pauses:?}");
}

#[tokio::test]
async fn the_disk_is_low_until_there_is_well_enough_and_what_is_queued_meanwhile_pauses_too() {
    let setting = Setting::new().await;
    let store = &setting.store;
    let mut watch = DiskWatch::new(RESERVE);
    let low = watch.low();
    watch.apply(store, RESERVE + 400, T0).await.unwrap();
    assert!(!low.load(Ordering::Relaxed));
    watch.apply(store, RESERVE - 1, T0 + 1).await.unwrap();
    assert!(low.load(Ordering::Relaxed));
    let late = setting.job().await;
    watch.apply(store, RESERVE + 400, T0 + 2).await.unwrap();
    assert!(low.load(Ordering::Relaxed));
    assert_eq!(reason(&setting, late).await.as_deref(), Some("disk_full"));
    // A user's resume does not start the job: it pauses again at the next check.
    store.job_resume(late, T0 + 3).await.unwrap();
    watch.apply(store, RESERVE + 400, T0 + 4).await.unwrap();
    assert_eq!(reason(&setting, late).await.as_deref(), Some("disk_full"));
    watch.apply(store, RESERVE + 500, T0 + 5).await.unwrap();
    assert!(!low.load(Ordering::Relaxed));
    assert_eq!(setting.state(late).await, State::Queued);
}

#[tokio::test]
async fn uploads_are_refused_on_a_nearly_full_disk_however_small_they_are() {
    let server = Server::start_with(|config| config.edge.disk_reserve_bytes = u64::MAX).await;
    let dataset = server.post("/datasets", serde_json::json!({"records": [{"prompt": "a"}]})).await;
    assert_eq!((dataset.status.as_u16(), &dataset.body["code"]), (507, &"storage_full".into()), "{}", dataset.text);
    let inline = server.post("/jobs", job()).await;
    assert_eq!((inline.status.as_u16(), &inline.body["code"]), (507, &"storage_full".into()), "{}", inline.text);
}

#[tokio::test]
async fn a_server_is_ready_as_long_as_the_reserve_is_free_and_without_one_always() {
    let ready = async |reserve: u64| {
        let server = Server::start_with(|config| config.edge.disk_reserve_bytes = reserve).await;
        server.get("/readyz").await
    };
    assert_eq!(ready(0).await.text, "ok\n");
    let free = Setting::new().await.files.free_bytes().unwrap();
    assert_eq!(ready(free / 2).await.text, "ok\n");
    let low = ready(free.saturating_mul(2)).await;
    assert_eq!((low.status.as_u16(), &low.body["code"]), (503, &"not_ready".into()), "{}", low.text);
    assert!(low.body["detail"].as_str().unwrap().contains(&format!("{} are required", free * 2)), "{}", low.text);
}
