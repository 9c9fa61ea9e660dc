//! Files of models from a hub: what is kept, what is shared, and whether there is room for more.

use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

use serde_json::{Value, json};

use crate::hub::{COMMIT, Faults, start};
use crate::hub_models::{delete, held, model_when, post, repository, serve};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancelled_download_goes_on_with_the_files_that_were_complete() {
    let hub = start(repository(), held()).await;
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let server = serve(&data, &hub, &[]);
    let (status, model) = post(&server, "/models", &[], &json!({"hub": "fake/tiny"})).await;
    assert_eq!(status, 202, "{model}");
    let folder = Path::new(model["source"].as_str().unwrap());
    let small = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"];
    for _ in 0..400 {
        if small.iter().all(|name| folder.join(name).is_file()) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(small.iter().all(|name| folder.join(name).is_file()));
    assert_eq!(delete(&server, "/models/fake%2Ftiny").await, 204);
    assert!(!folder.exists());

    hub.fake.faults.released.store(true, Ordering::SeqCst);
    let before = hub.seen().len();
    assert_eq!(post(&server, "/models", &[], &json!({"hub": "fake/tiny"})).await.0, 202);
    model_when(&server, "ready").await;
    let again = hub.seen().split_off(before);
    let asked = |name: &str| again.iter().filter(|seen| seen.path.ends_with(&format!("/{COMMIT}/{name}"))).count();
    assert_eq!(
        (asked("generation_config.json"), asked("tokenizer.json"), asked("tokenizer_config.json")),
        (0, 0, 0),
        "{again:?}"
    );
    assert!(asked("model.safetensors") > 0, "{again:?}");
    assert_eq!(std::fs::read_dir(data.join("hub/parts")).unwrap().count(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_repositories_with_one_commit_keep_their_own_files() {
    let mut files = repository();
    let mut config: Value = serde_json::from_slice(&files["config.json"]).unwrap();
    config["max_position_embeddings"] = json!(128);
    files.insert("twin/config.json".to_owned(), config.to_string().into_bytes());
    let hub = start(files, Faults::default()).await;
    let dir = tempfile::tempdir().unwrap();
    let server = serve(&dir.path().join("data"), &hub, &[]);
    for (repo, positions) in [("fake/tiny", 256), ("fake/twin", 128)] {
        let (status, model) = post(&server, "/models", &[], &json!({"id": "fake/tiny", "hub": repo})).await;
        let card = &model["card"];
        assert_eq!((status, &card["max_position_embeddings"]), (202, &json!(positions)), "{repo}: {model}");
        let model = model_when(&server, "ready").await;
        assert_eq!(model["card"]["max_position_embeddings"], positions, "{model}");
        assert_eq!(delete(&server, "/models/fake%2Ftiny").await, 204);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_models_at_the_same_time_are_added_up_against_the_limit() {
    let files = repository();
    let is_of_model = |name: &str| !name.ends_with(".bin") && !name.ends_with(".py");
    let size: usize = files.iter().filter(|(name, _)| is_of_model(name)).map(|(_, bytes)| bytes.len()).sum();
    let hub = start(files, held()).await;
    let dir = tempfile::tempdir().unwrap();
    let limit = format!("models={}", size + size / 2);
    let server = serve(&dir.path().join("data"), &hub, &[("RLOOD_STORAGE_LIMIT", &limit)]);
    let (first, second) = (json!({"hub": "fake/tiny"}), json!({"hub": "fake/tiny", "revision": "next"}));
    let (first, second) = tokio::join!(post(&server, "/models", &[], &first), post(&server, "/models", &[], &second));
    let (taken, refused) = if first.0 == 202 { (first, second) } else { (second, first) };
    assert_eq!((taken.0, refused.0, &refused.1["code"]), (202, 507, &json!("storage_full")), "{taken:?} {refused:?}");
    let detail = refused.1["detail"].as_str().unwrap();
    assert!(detail.contains("downloads in progress will take"), "{detail}");

    // Another row of the model that is being downloaded needs no room of its own.
    let revision = taken.1["revision"].clone();
    let again = json!({"id": "again", "hub": "fake/tiny", "revision": revision});
    let (status, again) = post(&server, "/models", &[], &again).await;
    assert_eq!(status, 202, "{again}");
    hub.fake.faults.released.store(true, Ordering::SeqCst);
    let id = taken.1["id"].as_str().unwrap().replace('/', "%2F");
    for _ in 0..600 {
        if server.get(&format!("/models/{id}")).await["state"] == "ready" {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(server.get(&format!("/models/{id}")).await["state"], "ready");
}
