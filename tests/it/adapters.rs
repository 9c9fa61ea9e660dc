//! Uploaded and downloaded PEFT adapters with real processes: upload in each form, import from a hub, warm starts, refusals.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};

use rlood_client::AdapterSource;
use serde_json::{Value, json};

use crate::hub::{COMMIT, Faults, start};
use crate::processes::{Server, command, register, spec};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/parity").join(name)
}

/// A job on the model `tiny` that starts from an adapter.
fn job(adapter: Value) -> Value {
    let mut document = spec("tiny", 2);
    document.as_object_mut().unwrap().shift_remove("lora");
    document["warm_start"] = json!({"adapter": adapter, "reference": "base"});
    document
}

fn tar_of(folder: &Path, files: &[&str]) -> Vec<u8> {
    let mut tar = tar::Builder::new(Vec::new());
    for file in files {
        tar.append_path_with_name(folder.join(file), format!("some/folder/{file}")).unwrap();
    }
    tar.into_inner().unwrap()
}

const BOTH: [&str; 2] = ["adapter_config.json", "adapter_model.safetensors"];

async fn upload(server: &Server, media_type: &str, body: Vec<u8>) -> (u16, Value) {
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    let request = http.post(format!("{}/adapters", server.url)).header("content-type", media_type).body(body);
    let answer = request.send().await.unwrap();
    (answer.status().as_u16(), answer.json().await.unwrap())
}

/// The files of a job's adapter.
async fn result(server: &Server, job: &str) -> BTreeMap<String, Vec<u8>> {
    let tar = server.adapter(job, None).await;
    let mut archive = tar::Archive::new(tar.as_slice());
    let entries = archive.entries().unwrap().map(|entry| {
        let mut entry = entry.unwrap();
        let name = entry.path().unwrap().file_name().unwrap().to_str().unwrap().to_owned();
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes).unwrap();
        (name, bytes)
    });
    entries.collect()
}

#[tokio::test]
async fn a_job_begins_with_an_uploaded_adapter_whatever_its_ranks_and_keeps_its_form() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(&dir.path().join("data"), "cpu");
    let model = fixture("llama_patterns");
    register(&server, "tiny", &model).await;

    // Uploaded by the client as a form; a tar with the same bytes is the same adapter.
    let folder = model.join("lora");
    let source = AdapterSource::Folder(folder.clone());
    let adapter = server.client.create_adapter(Some("mine"), &source).await.unwrap();
    assert_eq!((adapter.r, adapter.base_model.as_deref()), (Some(4), Some("llama_patterns")));
    let (status, again) = upload(&server, "application/x-tar", tar_of(&folder, &BOTH)).await;
    assert_eq!((status, &again["id"]), (200, &json!(adapter.id)), "{again}");
    assert_eq!(server.client.list_adapters().collect().await.unwrap().len(), 1);

    let begun = server.submit(&job(json!({"upload": adapter.id}))).await;
    let view = server.job_in_state(&begun, "succeeded").await;
    let lora = &view["plan"]["lora"];
    assert_eq!(view["plan"]["warm_start"]["adapter"]["upload"], json!(adapter.id), "{view}");
    assert_eq!(lora["rank_pattern"]["layers.2.mlp.up_proj"], 2, "{lora}");
    assert!(!lora["target_modules"].to_string().contains("k_proj"), "{lora}");
    let trained = result(&server, &begun).await;
    let config: Value = serde_json::from_slice(&trained["adapter_config.json"]).unwrap();
    assert_eq!(config["alpha_pattern"]["layers.0.self_attn.q_proj"], 4, "{config}");
    assert_ne!(trained[BOTH[1]], std::fs::read(folder.join(BOTH[1])).unwrap());

    // The job keeps the adapter's files. Its result is an adapter too, and its checkpoint can be used by either name.
    server.client.delete_adapter(adapter.id).await.unwrap();
    assert!(server.client.get_stored_adapter(adapter.id).await.is_err());
    let (status, next) = upload(&server, "application/octet-stream", server.adapter(&begun, None).await).await;
    assert_eq!(status, 201, "{next}");
    let checkpoints = server.get(&format!("/jobs/{begun}/checkpoints")).await;
    let checkpoint = &checkpoints["data"][0]["id"];
    for adapter in [json!({"upload": next["id"]}), json!({"checkpoint": checkpoint})] {
        let next = server.submit(&job(adapter)).await;
        server.job_in_state(&next, "succeeded").await;
    }
}

#[tokio::test]
async fn an_adapter_of_the_hub_is_fetched_at_its_commit_and_a_check_keeps_nothing() {
    let folder = fixture("qwen3").join("lora");
    let mut files: BTreeMap<String, Vec<u8>> =
        BOTH.iter().map(|name| ((*name).to_owned(), std::fs::read(folder.join(name)).unwrap())).collect();
    files.insert("README.md".to_owned(), b"# mine".to_vec());
    let hub = start(files, Faults::default()).await;
    let dir = tempfile::tempdir().unwrap();
    let mut command = command(&dir.path().join("data"), "cpu");
    let server = Server::start_by(command.env_remove("HF_HUB_OFFLINE").env("HF_ENDPOINT", &hub.url));
    register(&server, "tiny", &fixture("qwen3")).await;

    let checked = server.post("/jobs/validate", &job(json!({"hub": "fake/tiny"}))).await;
    assert_eq!((&checked["valid"], &checked["errors"]), (&json!(true), &json!([])), "{checked}");
    assert_eq!(
        checked["warnings"].as_array().unwrap().iter().filter(|w| w["code"] == "adapter_base_differs").count(),
        1
    );
    assert_eq!(server.get("/adapters").await["data"], json!([]));

    let begun = server.submit(&job(json!({"hub": "fake/tiny"}))).await;
    let view = server.job_in_state(&begun, "succeeded").await;
    let adapter = &view["plan"]["warm_start"]["adapter"];
    assert_eq!((&adapter["hub"], &adapter["revision"]), (&json!("fake/tiny"), &json!(COMMIT)), "{view}");
    let kept = server.get("/adapters").await;
    assert_eq!(kept["data"][0]["id"], adapter["upload"]);
    assert_eq!(kept["data"][0]["origin"]["commit"], COMMIT);
}

#[tokio::test]
async fn what_is_no_adapter_or_another_models_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(&dir.path().join("data"), "none");
    register(&server, "tiny", &fixture("qwen3")).await;
    register(&server, "fused", &fixture("phi3")).await;

    let folder = dir.path().join("changed");
    std::fs::create_dir(&folder).unwrap();
    let changed = |key: &str, value: Value| {
        let own = fixture("qwen3").join("lora");
        let mut config: Value = serde_json::from_slice(&std::fs::read(own.join(BOTH[0])).unwrap()).unwrap();
        config[key] = value;
        std::fs::write(folder.join(BOTH[0]), config.to_string()).unwrap();
        std::fs::copy(own.join(BOTH[1]), folder.join(BOTH[1])).unwrap();
        tar_of(&folder, &BOTH)
    };
    let cut = {
        let mut tar = changed("r", json!(4));
        tar.truncate(tar.len() / 2);
        tar
    };
    for (media_type, body, status, words) in [
        ("application/x-tar", changed("r", json!(7)), 422, "ranks"),
        ("application/x-tar", changed("use_dora", json!(true)), 422, "use_dora"),
        ("application/x-tar", changed("peft_type", json!("IA3")), 422, "peft_type"),
        ("application/x-tar", changed("target_modules", json!(["c_attn"])), 422, "target_modules"),
        ("application/x-tar", tar_of(&folder, &BOTH[..1]), 422, "does not contain adapter_model.safetensors"),
        ("application/x-tar", cut, 422, "tar"),
        ("application/gzip", b"\x1f\x8bnothing".to_vec(), 422, "cannot be read"),
        ("application/json", br#"{"hub": 3}"#.to_vec(), 422, "hub"),
        ("text/plain", b"hello".to_vec(), 415, "multipart/form-data"),
    ] {
        let (found, body) = upload(&server, media_type, body).await;
        assert!(found == status && body["detail"].as_str().unwrap().contains(words), "{words}: {found} {body}");
    }

    let source = AdapterSource::Folder(fixture("llama").join("lora"));
    let other = server.client.create_adapter(None, &source).await.unwrap();
    let unknown = rlood::id::AdapterId::new();
    let mut both = job(json!({"upload": other.id}));
    both["warm_start"]["checkpoint"] = json!(rlood::id::CheckpointId::new());
    let mut fused = job(json!({"upload": other.id}));
    fused["model"] = json!("fused");
    let mut named = spec("fused", 2);
    named["lora"] = json!({"target_modules": ["q_proj"]});
    for (document, pointer, words) in [
        (job(json!({"upload": other.id})), "/warm_start/adapter", "does not match 'tiny'"),
        (fused, "/warm_start/adapter", "qkv_proj, o_proj, gate_up_proj, down_proj"),
        (job(json!({"upload": unknown})), "/warm_start/adapter/upload", "GET /adapters"),
        (job(json!({"upload": "ds_1"})), "/warm_start/adapter/upload", "adp_"),
        (job(json!({})), "/warm_start/adapter", "one of hub, upload and checkpoint"),
        (job(json!({"hub": "a/b", "upload": unknown})), "/warm_start/adapter", "one of hub, upload and checkpoint"),
        (both, "/warm_start/adapter", "one of them"),
        (named, "/lora/target_modules", "qkv_proj, o_proj, gate_up_proj, down_proj"),
    ] {
        let answer = server.post("/jobs/validate", &document).await;
        let errors = answer["errors"].as_array().unwrap();
        assert!(
            errors.len() == 1
                && errors[0]["pointer"] == pointer
                && errors[0]["detail"].as_str().unwrap().contains(words),
            "{pointer}: {answer}"
        );
    }
    // For a model with fused projections, all linear layers means its fused modules.
    let fused = server.post("/jobs/validate", &spec_of_all("fused")).await;
    assert_eq!(fused["plan"]["lora"]["target_modules"], json!(["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]));
}

fn spec_of_all(model: &str) -> Value {
    let mut document = spec(model, 2);
    document["lora"] = json!({"r": 2, "target_modules": "all-linear"});
    document
}
