//! Reward models on a hub: waited for by jobs, at a revision, under a former name.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};

use crate::hub::{COMMIT, Faults, NEXT, OLD_TWIN, start};
use crate::hub_models::{delete, held, repository, serve};
use crate::processes::{model_copy, register, spec};

/// The files of the test model, and those of a reward model as the repository `fake/twin`. On its branch `next` the model has
/// another weight.
fn with_reward_model() -> BTreeMap<String, Vec<u8>> {
    let mut files = repository();
    for entry in std::fs::read_dir(rlood_test_support::fixture("reward_models/qwen3")).unwrap() {
        let entry = entry.unwrap();
        let (name, mut bytes) = (entry.file_name().into_string().unwrap(), std::fs::read(entry.path()).unwrap());
        files.insert(format!("twin/{name}"), bytes.clone());
        if name == "model.safetensors" {
            // The sign of the last weight.
            *bytes.last_mut().unwrap() ^= 0x80;
        }
        files.insert(format!("twin-next/{name}"), bytes);
    }
    files
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reward_names_a_model_of_the_hub_and_the_job_waits_for_it() {
    let hub = start(with_reward_model(), held()).await;
    let dir = tempfile::tempdir().unwrap();
    let server = serve(&dir.path().join("data"), &hub, &[]);
    register(&server, "tiny", &model_copy(&dir.path().join("model"))).await;
    let mut wanted = spec("tiny", 1);
    wanted["rewards"] = json!([{"type": "reward_model", "model": "fake/twin"}]);
    let checked = server.post("/jobs/validate", &wanted).await;
    assert_eq!((&checked["valid"], &checked["errors"]), (&json!(true), &json!([])), "{checked}");
    assert_eq!(server.get("/models").await["data"].as_array().unwrap().len(), 1);

    let job = server.submit(&wanted).await;
    let view = server.get(&format!("/jobs/{job}")).await;
    assert_eq!((&view["state"], &view["status_reason"]), (&json!("queued"), &json!("model_downloading")), "{view}");
    let path = "/models/fake%2Ftwin";
    let model = server.get(path).await;
    assert_eq!((&model["state"], &model["card"]["task"]), (&json!("downloading"), &json!("sequence_classification")));
    assert_eq!(delete(&server, path).await, 409);
    tokio::time::sleep(Duration::from_secs(6)).await;
    assert_eq!(server.get(&format!("/jobs/{job}")).await["state"], "queued");
    let events = server.get(&format!("/jobs/{job}/events?limit=100")).await;
    let told = events["data"].as_array().unwrap().iter().any(|event| event["type"] == "model.downloading");
    assert!(told, "{events}");
    hub.fake.faults.released.store(true, std::sync::atomic::Ordering::SeqCst);
    let view = server.job_in_state(&job, "succeeded").await;
    assert_eq!(view["plan"]["reward_models"]["fake/twin"], server.get(path).await["sha256"], "{view}");

    for (model, code) in [("fake/none", "invalid_model"), ("none", "unknown_model"), ("fake/tiny", "invalid_model")] {
        wanted["rewards"][0]["model"] = json!(model);
        let checked = server.post("/jobs/validate", &wanted).await;
        let error = &checked["errors"][0];
        assert_eq!((&error["pointer"], &error["code"]), (&json!("/rewards/0/model"), &json!(code)), "{checked}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reward_names_a_revision_of_a_model_and_one_by_its_former_name() {
    let hub = start(with_reward_model(), Faults::default()).await;
    let dir = tempfile::tempdir().unwrap();
    let server = serve(&dir.path().join("data"), &hub, &[]);
    register(&server, "tiny", &model_copy(&dir.path().join("model"))).await;
    let former = format!("{OLD_TWIN}@next");
    let mut wanted = spec("tiny", 1);
    wanted["rewards"] = json!([
        {"type": "reward_model", "name": "main", "model": "fake/twin"},
        {"type": "reward_model", "name": "next", "model": "fake/twin@next"},
        {"type": "reward_model", "name": "former", "model": former},
    ]);
    let checked = server.post("/jobs/validate", &wanted).await;
    assert_eq!((&checked["valid"], &checked["errors"]), (&json!(true), &json!([])), "{checked}");
    let of_names = |warning: &&Value| warning["code"] == "repository_renamed";
    let told: Vec<&Value> = checked["warnings"].as_array().unwrap().iter().filter(of_names).collect();
    assert_eq!(told.len(), 1, "{checked}");
    assert_eq!(told[0]["pointer"], "/rewards/2/model", "{checked}");
    assert!(told[0]["detail"].as_str().unwrap().contains("'fake/twin'"), "{checked}");

    let job = server.submit(&wanted).await;
    let events = server.get(&format!("/jobs/{job}/events?limit=100")).await;
    let told = events["data"].as_array().unwrap().iter().find(|event| event["data"]["code"] == "repository_renamed");
    let message = told.unwrap_or_else(|| panic!("{events}"))["data"]["message"].as_str().unwrap();
    assert!(message.contains("/rewards/2/model") && message.contains("'fake/twin'"), "{events}");
    let view = server.job_in_state(&job, "succeeded").await;
    let models = view["plan"]["reward_models"].as_object().unwrap();
    assert_eq!(models.len(), 3, "{view}");
    assert_eq!(models["fake/twin@next"], models[&former], "{view}");
    assert_ne!(models["fake/twin@next"], models["fake/twin"], "{view}");
    for (id, commit, renamed_to) in [
        ("fake/twin", COMMIT, None),
        ("fake/twin@next", NEXT, None),
        (former.as_str(), NEXT, Some(&json!("fake/twin"))),
    ] {
        let model = server.get(&format!("/models/{}", id.replace('/', "%2F"))).await;
        assert_eq!((&model["state"], &model["commit"]), (&json!("ready"), &json!(commit)), "{model}");
        assert_eq!((&model["sha256"], model.get("renamed_to")), (&models[id], renamed_to), "{model}");
    }
    // Each completion got its rewards from the weights of its revision.
    let samples = server.get(&format!("/jobs/{job}/samples?limit=100")).await;
    let rewards: Vec<_> = samples["data"].as_array().unwrap().iter().map(|sample| sample["rewards"].clone()).collect();
    assert!(!rewards.is_empty(), "{samples}");
    assert!(rewards.iter().all(|each| each["next"] == each["former"]), "{rewards:?}");
    assert!(rewards.iter().any(|each| each["next"] != each["main"]), "{rewards:?}");

    wanted["rewards"] = json!([{"type": "reward_model", "model": "fake/twin@nope"}]);
    let checked = server.post("/jobs/validate", &wanted).await;
    let error = &checked["errors"][0];
    assert_eq!((&error["pointer"], &error["code"]), (&json!("/rewards/0/model"), &json!("invalid_model")), "{checked}");
    assert!(error["detail"].as_str().unwrap().contains("nope"), "{checked}");
}
