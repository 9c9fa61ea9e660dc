//! Tests of what `rlood gc` finds, removes and keeps.

use std::path::{Path, PathBuf};

use rlood_store::gc::{self, GcItem, GcRules, Removal};
use rlood_store::{NewDataset, NewModel, clock_ms};
use rlood_types::digest::Sha256Digest;
use rlood_types::event::Metrics;
use rlood_types::id::{DatasetId, JobId};
use rlood_types::protocol::Outcome;
use rlood_types::storage::StorageKind;
use serde_json::json;

use crate::setting::{Setting, T0, plan};

const HOUR: i64 = 3_600_000;
const DAY: i64 = 24 * HOUR;

/// Rules without a running server and without retention times.
fn rules(now: i64) -> GcRules {
    GcRules { now, is_served: false, datasets_ms: None, models_ms: None, checkpoints_ms: None }
}

fn write(path: &Path, bytes: usize) -> PathBuf {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, vec![7; bytes]).unwrap();
    path.to_owned()
}

/// Returns kind, size in bytes and whether it is removed, in the order of the kinds.
fn short(items: &[GcItem]) -> Vec<(StorageKind, u64, bool)> {
    let mut short: Vec<_> = items.iter().map(|item| (item.kind, item.size_bytes, item.removal.is_some())).collect();
    short.sort();
    short
}

async fn model(setting: &Setting, id: &str, dir: &Path) {
    let source = dir.to_str().unwrap().to_owned();
    let new = NewModel { id: id.to_owned(), source, sha256: "aa".to_owned(), card: json!({}), owner: String::new() };
    setting.store.model_create(new, T0).await.unwrap();
}

#[tokio::test]
async fn a_plan_removes_nothing_and_then_the_orphans_go_and_the_rest_stays() {
    let setting = Setting::new().await;
    let (store, files) = (&setting.store, &setting.files);
    let root = files.root().to_owned();
    let needed = [write(&files.dataset(setting.dataset), 80), write(&root.join("scratch/cpu-0/attempt-1/part"), 1)];
    let worker = setting.worker().await;
    let job = setting.job().await;
    let claimed = setting.claim(worker, T0).await.unwrap();
    setting.publish(&claimed, 1, &Metrics::new()).await.unwrap();
    let published = write(&files.checkpoint_file(job, 1, claimed.attempt, "manifest.json").unwrap(), 2);
    let orphans = [
        write(&files.dataset(DatasetId::new()), 300),
        write(&files.checkpoint_file(job, 9, 1, "manifest.json").unwrap(), 20),
        write(&files.checkpoint_file(JobId::new(), 1, 1, "manifest.json").unwrap(), 10),
        write(&root.join("initial").join(JobId::new().to_string()).join("adapter"), 4),
        write(&root.join("staging/upload-x"), 5),
        write(&root.join("exports/exp_0/model.safetensors"), 3),
    ];
    let upload = write(&root.join("staging").join(job.to_string()).join("1/2/adapter"), 6);
    let pinned = (StorageKind::Datasets, 80, false);

    // While a server is running, young files may be about to get their row, and uploads of a running job can be slow.
    let served = GcRules { is_served: true, ..rules(clock_ms()) };
    assert_eq!(short(&gc::plan(store, files, served).await.unwrap()), [pinned]);
    let later = GcRules { is_served: true, ..rules(clock_ms() + HOUR + 1000) };
    let found = gc::plan(store, files, later).await.unwrap();
    let of_orphans = [
        pinned,
        (StorageKind::Datasets, 300, true),
        (StorageKind::Checkpoints, 10, true),
        (StorageKind::Checkpoints, 20, true),
        (StorageKind::Exports, 3, true),
        (StorageKind::InitialAdapters, 4, true),
        (StorageKind::Staging, 5, true),
    ];
    assert_eq!(short(&found), of_orphans);
    for path in needed.iter().chain(&orphans).chain([&upload, &published]) {
        assert!(path.is_file(), "a plan has removed {}", path.display());
    }
    for removal in found.iter().filter_map(|item| item.removal.as_ref()) {
        assert!(gc::remove(store, files, removal).await.unwrap());
    }
    assert!(orphans.iter().all(|path| !path.exists()), "{orphans:?}");
    for path in needed.iter().chain([&upload, &published]) {
        assert!(path.is_file(), "{}", path.display());
    }
    // Without a server, nothing is being uploaded and no worker is running.
    let left = gc::plan(store, files, rules(clock_ms() + 1000)).await.unwrap();
    assert_eq!(short(&left), [pinned, (StorageKind::Staging, 6, true), (StorageKind::Scratch, 1, true)]);
}

#[tokio::test]
async fn a_dataset_is_removed_only_when_no_job_has_used_it_for_long_enough() {
    let setting = Setting::new().await;
    let (store, files) = (&setting.store, &setting.files);
    let file = write(&files.dataset(setting.dataset), 80);
    let rules = |now| GcRules { datasets_ms: Some(30 * DAY), ..rules(now) };
    let worker = setting.worker().await;
    let job = setting.job().await;
    let claimed = setting.claim(worker, T0).await.unwrap();
    let items = gc::plan(store, files, rules(T0 + 365 * DAY)).await.unwrap();
    assert_eq!(items[0].removal, None);
    assert!(items[0].reason.contains("1 job"), "{}", items[0].reason);
    store.job_finish(job, claimed.attempt, Outcome::Succeeded, T0 + 10 * DAY).await.unwrap();
    assert_eq!(gc::plan(store, files, rules(T0 + 40 * DAY)).await.unwrap(), [], "used ten days after it was made");
    let items = gc::plan(store, files, rules(T0 + 40 * DAY + 1)).await.unwrap();
    let removal = items[0].removal.clone().unwrap();
    assert_eq!(removal, Removal::Dataset(setting.dataset));
    // A user submits a job in the meantime.
    let another = setting.job().await;
    assert!(!gc::remove(store, files, &removal).await.unwrap());
    assert!(file.is_file());
    store.job_cancel(another, T0).await.unwrap();
    assert!(gc::remove(store, files, &removal).await.unwrap());
    assert!(!file.exists() && !gc::remove(store, files, &removal).await.unwrap());
}

#[tokio::test]
async fn a_downloaded_model_is_pinned_by_jobs_and_by_adapters_and_other_folders_are_not_ours() {
    let setting = Setting::new().await;
    let (store, files) = (&setting.store, &setting.files);
    let folder = files.root().join("models/org--tiny/abc");
    let outside = tempfile::tempdir().unwrap();
    write(&folder.join("model.safetensors"), 1000);
    let foreign = write(&outside.path().join("model.safetensors"), 1000);
    // Two revisions share a file.
    let shared = write(&files.root().join("models/org--tiny/old/tokenizer.json"), 30);
    std::os::unix::fs::symlink(&shared, folder.join("tokenizer.json")).unwrap();
    let part = write(&files.root().join("models/org--gone/def/model.safetensors.part"), 40);
    model(&setting, "org/tiny", &folder).await;
    model(&setting, "org/foreign", outside.path()).await;
    let rules = |now| GcRules { models_ms: Some(DAY), ..rules(now) };
    let models = async |now: i64| {
        let items = gc::plan(store, files, rules(now)).await.unwrap();
        items.into_iter().filter(|item| item.kind == StorageKind::Models).collect::<Vec<_>>()
    };
    let worker = setting.worker().await;
    let job = setting.job_of(&plan(setting.dataset), 0, T0).await.unwrap().id;
    let young = clock_ms() + DAY / 2;
    let of_job = models(young).await;
    assert_eq!(of_job.len(), 1, "the download may be continued: {of_job:?}");
    assert_eq!((of_job[0].name.as_str(), of_job[0].removal.as_ref()), ("org/tiny", None));
    let claimed = setting.claim(worker, T0).await.unwrap();
    setting.publish(&claimed, 1, &Metrics::new()).await.unwrap();
    store.job_finish(job, claimed.attempt, Outcome::Succeeded, T0).await.unwrap();
    let of_adapter = models(T0 + 100 * DAY).await;
    let of_model = of_adapter.iter().find(|item| item.name == "org/tiny").unwrap();
    assert!(of_model.removal.is_none() && of_model.reason.contains("adapters that 1 job trained"), "{of_model:?}");
    let of_part = of_adapter.iter().find(|item| item.name.contains("org--gone")).unwrap();
    assert_eq!(of_adapter.len(), 2, "{of_adapter:?}");
    assert!(gc::remove(store, files, of_part.removal.as_ref().unwrap()).await.unwrap());
    assert!(!part.exists() && shared.is_file());
    // Once the adapter is removed, so is the model.
    store.leftover_checkpoints_remove(T0 + DAY).await.unwrap();
    let unused = models(T0 + 100 * DAY).await;
    let removal = unused.iter().find(|item| item.name == "org/tiny").unwrap().removal.clone().unwrap();
    assert_eq!(removal, Removal::Model("org/tiny".to_owned(), folder.clone()));
    assert!(gc::remove(store, files, &removal).await.unwrap());
    assert!(!folder.exists() && foreign.is_file());
    assert!(store.model_get("org/tiny").await.is_err() && store.model_get("org/foreign").await.is_ok());
}

#[tokio::test]
async fn the_folder_of_two_models_stays_until_neither_is_used() {
    let setting = Setting::new().await;
    let (store, files) = (&setting.store, &setting.files);
    let folder = files.root().join("models/org--tiny/abc");
    let weights = write(&folder.join("model.safetensors"), 1000);
    model(&setting, "org/tiny", &folder).await;
    model(&setting, "mine", &folder).await;
    let rules = GcRules { models_ms: Some(DAY), ..rules(T0 + 100 * DAY) };
    let models = async || {
        let items = gc::plan(store, files, rules).await.unwrap();
        items.into_iter().filter(|item| item.kind == StorageKind::Models).collect::<Vec<_>>()
    };
    // A job with one model needs the folder of both.
    let job = setting.job_of(&plan(setting.dataset), 0, T0).await.unwrap().id;
    let pinned = models().await;
    assert_eq!(short(&pinned), [(StorageKind::Models, 0, false), (StorageKind::Models, 1000, false)], "{pinned:?}");
    store.job_cancel(job, T0).await.unwrap();
    let unused = models().await;
    assert_eq!(short(&unused), [(StorageKind::Models, 0, true), (StorageKind::Models, 1000, true)], "{unused:?}");
    // A job comes in between.
    let job = setting.job_of(&plan(setting.dataset), 0, T0).await.unwrap().id;
    assert!(gc::remove(store, files, &Removal::Model("mine".to_owned(), folder.clone())).await.unwrap());
    assert!(!gc::remove(store, files, &Removal::Model("org/tiny".to_owned(), folder.clone())).await.unwrap());
    assert!(store.model_get("mine").await.is_err() && weights.is_file());
    store.job_cancel(job, T0).await.unwrap();
    assert!(gc::remove(store, files, &Removal::Model("org/tiny".to_owned(), folder.clone())).await.unwrap());
    assert!(!folder.exists());
}

#[tokio::test]
async fn checkpoints_of_jobs_that_are_over_for_long_go_but_for_pinned_ones() {
    let setting = Setting::new().await;
    let (store, files) = (&setting.store, &setting.files);
    let worker = setting.worker().await;
    let job = setting.job().await;
    let claimed = setting.claim(worker, T0).await.unwrap();
    for step in [1, 2] {
        setting.publish(&claimed, step, &Metrics::new()).await.unwrap();
        write(&files.checkpoint_file(job, step, claimed.attempt, "manifest.json").unwrap(), 2);
    }
    let newest = store.checkpoint_list(job).await.unwrap()[0].id;
    store.checkpoint_pin(newest, true, T0).await.unwrap();
    let rules = |now| GcRules { checkpoints_ms: Some(DAY), ..rules(now) };
    let found = async |now| short(&gc::plan(store, files, rules(now)).await.unwrap());
    let pinned = (StorageKind::Datasets, 80, false);
    assert_eq!(found(T0 + 9 * DAY).await, [pinned], "it runs");
    store.job_finish(job, claimed.attempt, Outcome::Succeeded, T0).await.unwrap();
    assert_eq!(found(T0 + DAY).await, []);
    assert_eq!(found(T0 + DAY + 1).await, [(StorageKind::Checkpoints, 2, true)]);
    let removal = Removal::Checkpoint(job, 1, claimed.attempt);
    assert!(gc::remove(store, files, &removal).await.unwrap());
    assert!(!files.checkpoint_dir(job, 1, claimed.attempt).exists());
    assert!(!gc::remove(store, files, &Removal::Checkpoint(job, 2, claimed.attempt)).await.unwrap());
    assert!(files.checkpoint_dir(job, 2, claimed.attempt).exists());
}

#[tokio::test]
async fn storage_use_adds_up_by_kind_and_owner_and_a_linked_file_counts_once() {
    let setting = Setting::new().await;
    let (store, files) = (&setting.store, &setting.files);
    let id = DatasetId::new();
    let new = NewDataset {
        id,
        name: None,
        sha256: Sha256Digest::of("x").to_string(),
        num_rows: 1,
        size_bytes: 500,
        columns: Vec::new(),
        owner: "alice".to_owned(),
    };
    store.dataset_create(new, T0).await.unwrap();
    write(&files.dataset(id), 500);
    write(&files.dataset(setting.dataset), 80);
    let job = setting.job().await;
    let checkpoint = write(&files.checkpoint_file(job, 1, 1, "adapter").unwrap(), 70);
    let initial = files.initial_of(JobId::new());
    std::fs::create_dir_all(&initial).unwrap();
    std::fs::hard_link(&checkpoint, initial.join("adapter")).unwrap();
    write(&initial.join("files.json"), 9);
    let folder = files.root().join("models/org--tiny/abc");
    write(&folder.join("model.safetensors"), 1000);
    model(&setting, "org/tiny", &folder).await;
    model(&setting, "org/foreign", Path::new("/somewhere/else")).await;
    // While a model is downloaded, its files have a second name among the partial ones.
    let part = files.root().join("hub/parts/aa");
    std::fs::create_dir_all(part.parent().unwrap()).unwrap();
    std::fs::hard_link(folder.join("model.safetensors"), &part).unwrap();
    let report = rlood_store::storage::report(store, files).await.unwrap();
    let used =
        |kind, owner: &str| report.usage.get(&(kind, owner.to_owned())).map(|used| (used.size_bytes, used.count));
    assert_eq!(used(StorageKind::Datasets, "alice"), Some((500, 1)));
    assert_eq!(used(StorageKind::Datasets, ""), Some((80, 1)));
    assert_eq!(used(StorageKind::Checkpoints, ""), Some((70, 1)));
    assert_eq!(used(StorageKind::InitialAdapters, ""), Some((9, 1)));
    assert_eq!(used(StorageKind::Models, ""), Some((1000, 1)));
    assert_eq!(
        report.elsewhere.iter().map(|(owner, used)| (owner.as_str(), used.count)).collect::<Vec<_>>(),
        [("", 1)]
    );
    assert!(report.free_bytes > 0 && report.disk_bytes >= report.free_bytes);
}
