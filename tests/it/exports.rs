//! Exports over HTTP and with real processes: merged checkpoints, their files, cancellation, restarts, refusals.

use std::path::Path;
use std::time::{Duration, Instant};

use rlood::engine::backend::BackendKind;
use rlood::engine::model::{Adapter, Policy, Trajectory};
use rlood::engine::text::Text;
use rlood::spec::ComputeDtype;
use rlood_types::export::{ExportDtype, ExportFormat, ExportRequest};
use rlood_types::storage::StorageKind;
use rlood_types::task::TaskState;
use serde_json::{Value, json};

use crate::processes::{Server, signal, trained};

const MERGED: ExportRequest =
    ExportRequest { format: ExportFormat::Merged, dtype: Some(ExportDtype::Float32), context_length: None };
const PATIENCE: Duration = Duration::from_secs(120);

async fn ended(server: &Server, id: &str) -> Value {
    let begun = Instant::now();
    loop {
        let export = server.get(&format!("/exports/{id}")).await;
        if !matches!(export["state"].as_str(), Some("queued" | "running")) {
            return export;
        }
        assert!(begun.elapsed() < PATIENCE, "{export}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Log-probs of a model's greedy completion.
fn logps(policy: &Policy, text: &Text) -> Vec<f32> {
    let ids = text.encode("Say the number 7 in a few words.", true).unwrap();
    let (prompt, completion) = ids.split_at(4);
    policy.score(&[Trajectory::of_completion(prompt, completion)], 1.0, Adapter::On).unwrap().remove(0).logps
}

#[tokio::test]
async fn a_merged_checkpoint_is_a_model_that_says_what_base_and_adapter_say() {
    let dir = tempfile::tempdir().unwrap();
    let (server, job) = trained(dir.path(), true).await;
    let checkpoints = server.client.list_checkpoints(job.parse().unwrap()).collect().await.unwrap();
    let checkpoint = &checkpoints[0];
    let export = server.client.create_export(checkpoint.id, &MERGED).await.unwrap();
    let export = ended(&server, &export.id.to_string()).await;
    assert_eq!((&export["state"], &export["dtype"]), (&json!("succeeded"), &json!("float32")), "{export}");
    assert_eq!(export["progress"]["done"], export["progress"]["total"]);
    assert!(export["survived"]["cosine"].as_f64().unwrap() > 0.9999 && export["advice"].is_null(), "{export}");
    assert!(export["expires_at"].is_string());
    let export = server.client.get_export(export["id"].as_str().unwrap().parse().unwrap()).await.unwrap();
    let out = dir.path().join("merged");
    server.client.download_export(&export, &out).await.unwrap();
    let sizes: u64 = export.files.iter().map(|file| file.size_bytes).sum();
    assert_eq!(Some(sizes), export.size_bytes);

    let small = dir.path().join("small");
    let adapter = dir.path().join("adapter");
    server.client.download_files(checkpoint, &adapter).await.unwrap();
    let mut policy = Policy::load_dtype(&small, BackendKind::Cpu, ComputeDtype::F32).unwrap();
    policy.load_lora(&adapter).unwrap();
    let merged = Policy::load_dtype(&out, BackendKind::Cpu, ComputeDtype::F32).unwrap();
    let (wanted, found) = (logps(&policy, &Text::load(&small).unwrap()), logps(&merged, &Text::load(&out).unwrap()));
    assert!(wanted.iter().zip(&found).all(|(wanted, found)| (wanted - found).abs() < 1e-4), "{wanted:?} {found:?}");

    // The same request returns the same export; another dtype creates another one.
    assert_eq!(server.client.create_export(checkpoint.id, &MERGED).await.unwrap().id, export.id);
    let half = ExportRequest { dtype: Some(ExportDtype::Bfloat16), ..MERGED };
    let half = server.client.create_export(checkpoint.id, &half).await.unwrap();
    assert_ne!(half.id, export.id);
    let half = ended(&server, &half.id.to_string()).await;
    assert!(half["survived"]["fraction"].as_f64().unwrap() < 1.01, "{half}");
    let listed = server.client.list_exports(checkpoint.id).collect().await.unwrap();
    assert_eq!(listed.len(), 2);
    // Deleting an export removes its files, and leaves the other one unchanged.
    server.client.delete_export(export.id).await.unwrap();
    assert_eq!(server.client.get_export(export.id).await.unwrap_err().code(), "not_found");
    assert!(!dir.path().join("data/exports").join(export.id.to_string()).exists());
    assert_eq!(server.client.list_exports(checkpoint.id).collect().await.unwrap().len(), 1);
}

#[tokio::test]
async fn files_for_llama_cpp_are_written_or_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let (server, job) = trained(dir.path(), true).await;
    let checkpoint = server.client.list_checkpoints(job.parse().unwrap()).collect().await.unwrap().remove(0).id;
    let adapter = ExportRequest { format: ExportFormat::GgufAdapter, dtype: None, context_length: None };
    let export = server.client.create_export(checkpoint, &adapter).await.unwrap();
    let done = ended(&server, &export.id.to_string()).await;
    assert_eq!(
        (&done["state"], &done["dtype"], &done["format"]),
        (&json!("succeeded"), &json!("float32"), &json!("gguf_adapter"))
    );
    let bytes = server.bytes(&format!("/exports/{}/files/adapter.gguf", export.id)).await;
    assert_eq!((&bytes[..4], bytes.len() as u64), (&b"GGUF"[..], done["size_bytes"].as_u64().unwrap()));
    let text = String::from_utf8_lossy(&bytes);
    assert!(text.contains("adapter.lora.alpha") && text.contains("blk.0.attn_q.weight.lora_a"));

    let model = ExportRequest { format: ExportFormat::Gguf, dtype: Some(ExportDtype::Q8_0), context_length: Some(64) };
    let export = server.client.create_export(checkpoint, &model).await.unwrap();
    let done = ended(&server, &export.id.to_string()).await;
    assert_eq!(
        (&done["state"], &done["dtype"], &done["files"][0]["name"]),
        (&json!("succeeded"), &json!("q8_0"), &json!("model.gguf"))
    );
    assert!(done["survived"]["cosine"].as_f64().unwrap() > 0.99, "{done}");
    let bytes = server.bytes(&format!("/exports/{}/files/model.gguf", export.id)).await;
    let text = String::from_utf8_lossy(&bytes);
    assert!(text.starts_with("GGUF") && text.contains("tokenizer.ggml.pre") && text.contains("output_norm.weight"));

    let beyond = ExportRequest { context_length: Some(1 << 30), ..model };
    let export = server.client.create_export(checkpoint, &beyond).await.unwrap();
    let failed = ended(&server, &export.id.to_string()).await;
    assert_eq!((&failed["state"], &failed["error"]["code"]), (&json!("failed"), &json!("unsupported")), "{failed}");
    assert!(failed["error"]["message"].as_str().unwrap().contains("context_length 1073741824"), "{failed}");

    let of = |format, dtype, context_length| ExportRequest { format, dtype, context_length };
    for (request, field) in [
        (of(ExportFormat::Merged, Some(ExportDtype::Q8_0), None), "/dtype"),
        (of(ExportFormat::GgufAdapter, Some(ExportDtype::Bfloat16), None), "/dtype"),
        (of(ExportFormat::Merged, None, Some(8)), "/context_length"),
        (of(ExportFormat::Gguf, None, Some(0)), "/context_length"),
    ] {
        let refused = server.client.create_export(checkpoint, &request).await.unwrap_err();
        assert_eq!(refused.code(), "invalid_body", "{request:?}");
        assert!(refused.to_string().contains(field.trim_start_matches('/')), "{refused}");
    }
}

#[tokio::test]
async fn an_export_survives_a_restart_and_what_was_not_finished_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let (mut server, job) = trained(dir.path(), false).await;
    let checkpoints = server.client.list_checkpoints(job.parse().unwrap()).collect().await.unwrap();
    let request = ExportRequest { format: ExportFormat::Merged, dtype: None, context_length: None };
    let export = server.client.create_export(checkpoints[0].id, &request).await.unwrap();
    let done = ended(&server, &export.id.to_string()).await;
    assert_eq!((&done["state"], &done["survived"]), (&json!("succeeded"), &json!(null)), "{done}");
    let exports = dir.path().join("data/exports");
    std::fs::create_dir(exports.join("exp_none.unfinished")).unwrap();
    signal("KILL", server.child.id());
    server.child.wait().unwrap();
    let server = Server::start(&dir.path().join("data"), "cpu");
    assert_eq!(server.client.get_export(export.id).await.unwrap().state, TaskState::Succeeded);
    let left: Vec<_> = std::fs::read_dir(&exports).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, [export.id.to_string().as_str()]);
    let archive = server.bytes(&format!("/exports/{}/archive.tar", export.id)).await;
    assert!(archive.len() as u64 > done["size_bytes"].as_u64().unwrap());
    let storage = server.client.get_storage().await.unwrap();
    let kept = storage.kinds.iter().find(|kind| kind.kind == StorageKind::Exports).unwrap();
    assert_eq!((kept.amount.size_bytes, kept.amount.count), (export_bytes(&exports), 1));
}

fn export_bytes(exports: &Path) -> u64 {
    let dirs = std::fs::read_dir(exports).unwrap().map(|dir| dir.unwrap().path());
    let files = dirs.flat_map(|dir| std::fs::read_dir(dir).unwrap().collect::<Vec<_>>());
    files.map(|file| file.unwrap().metadata().unwrap().len()).sum()
}

#[tokio::test]
async fn the_files_of_exports_go_with_their_job_and_an_export_goes_with_its_files() {
    let dir = tempfile::tempdir().unwrap();
    let (mut server, job) = trained(dir.path(), false).await;
    let checkpoints = server.client.list_checkpoints(job.parse().unwrap()).collect().await.unwrap();
    let first = server.client.create_export(checkpoints[0].id, &MERGED).await.unwrap();
    ended(&server, &first.id.to_string()).await;
    let exports = dir.path().join("data/exports");
    // A backup holds no exports: what is restored from it has their rows alone.
    signal("TERM", server.child.id());
    server.child.wait().unwrap();
    std::fs::remove_dir_all(exports.join(first.id.to_string())).unwrap();
    let server = Server::start(&dir.path().join("data"), "cpu");
    assert_eq!(server.client.get_export(first.id).await.unwrap_err().code(), "not_found");

    let second = server.client.create_export(checkpoints[0].id, &MERGED).await.unwrap();
    assert_ne!(second.id, first.id);
    ended(&server, &second.id.to_string()).await;
    assert!(exports.join(second.id.to_string()).is_dir());
    server.client.delete_job(job.parse().unwrap()).await.unwrap();
    assert!(!exports.join(second.id.to_string()).exists());
    assert_eq!(server.client.get_export(second.id).await.unwrap_err().code(), "not_found");
}

#[tokio::test]
async fn what_cannot_be_exported_says_why() {
    let dir = tempfile::tempdir().unwrap();
    let (server, job) = trained(dir.path(), true).await;
    let checkpoints = server.client.list_checkpoints(job.parse().unwrap()).collect().await.unwrap();
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    for (body, pointer) in [
        (json!({}), "/format"),
        (json!({"format": "zip"}), "/format"),
        (json!({"format": "merged", "dtype": "int4"}), "/dtype"),
        (json!({"format": "merged", "type": "bf16"}), "/type"),
    ] {
        let path = format!("{}/checkpoints/{}/exports", server.url, checkpoints[0].id);
        let answer = http.post(path).json(&body).send().await.unwrap();
        assert_eq!(answer.status(), 422, "{body}");
        let text = answer.text().await.unwrap();
        assert!(text.contains(pointer.trim_start_matches('/')), "{text}");
    }
    // The base model's files changed.
    let config = dir.path().join("small/generation_config.json");
    std::fs::write(&config, "{\"eos_token_id\": [1, 2]}").unwrap();
    let export = server.client.create_export(checkpoints[0].id, &MERGED).await.unwrap();
    let export = ended(&server, &export.id.to_string()).await;
    assert_eq!((&export["state"], &export["error"]["code"]), (&json!("failed"), &json!("invalid_model")), "{export}");
    let files = http.get(format!("{}/exports/{}/archive.tar", server.url, export["id"].as_str().unwrap()));
    assert_eq!(files.send().await.unwrap().status(), 503);
}
