//! Downloads: verified, complete, and resumed after an interruption.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde_json::json;
use sha2::{Digest, Sha256};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::{User, named, start};
use crate::processes::Server;

/// A job whose adapter is large enough for its download to be interrupted.
async fn trained(server: &Server, user: &User) -> String {
    let mut job = named("large", 4);
    job["lora"] = json!({"r": 64, "alpha": 64, "target_modules": "all-linear"});
    let id = user.submit(&job);
    server.job_in_state(&id, "succeeded").await;
    id
}

#[tokio::test]
async fn a_checkpoint_is_pulled_by_its_name_and_verified() {
    let (server, user) = start("cpu");
    let id = trained(&server, &user).await;
    let checkpoints = server.get(&format!("/jobs/{id}/checkpoints")).await["data"].as_array().unwrap().clone();
    let newest = checkpoints[0]["id"].as_str().unwrap();
    let result = checkpoints.iter().find(|one| one["best"] == true).unwrap_or(&checkpoints[0])["id"].as_str().unwrap();
    for (name, folder, expected) in [
        (id.clone(), "plain", result),
        (format!("{id}@last"), "last", newest),
        ("large@4".to_owned(), "step", newest),
        (newest.to_owned(), "ckpt", newest),
    ] {
        let done = user.run(&["pull", &name, "-o", folder]);
        assert!(done.err.contains(expected), "{name}: {done:?}");
        assert_eq!(done.ok().trim(), folder);
        let mut names: Vec<_> =
            std::fs::read_dir(user.path(folder)).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["adapter_config.json", "adapter_model.safetensors", "certificate.json"], "{name}");
        let weights = std::fs::read(user.path(folder).join("adapter_model.safetensors")).unwrap();
        let listed = checkpoints.iter().find(|one| one["id"] == expected).unwrap()["files"].as_array().unwrap();
        let listed = listed.iter().find(|file| file["name"] == "adapter_model.safetensors").unwrap();
        assert_eq!(listed["sha256"], json!(hex::encode(Sha256::digest(&weights))));
    }
    user.run(&["pull", newest, "-o", "all", "--all"]).ok();
    assert!(user.path("all/manifest.json").is_file() && user.path("all/optimizer.safetensors").is_file());
    let step = checkpoints.iter().find(|one| one["id"] == result).unwrap()["step"].clone();
    assert_eq!(user.run(&["pull", &id]).ok().trim(), format!("{id}-step{step}"));
    assert!(user.run(&["pull", newest, "-o", "ckpt"]).err.contains("already downloaded"));
    user.write("ckpt/adapter_config.json", "{}");
    user.run(&["pull", newest, "-o", "ckpt"]).failed(2, "with different content");
    assert_eq!(std::fs::read_to_string(user.path("ckpt/adapter_config.json")).unwrap(), "{}", "it is left as it was");
    user.run(&["pull", &format!("{id}@3")]).failed(3, "steps 4, 2");
    user.run(&["pull", "ckpt_01jd0000000000000000000000"]).failed(3, "");
}

#[tokio::test]
async fn the_reference_of_a_warm_up_is_left_to_training() {
    let (server, user) = start("cpu");
    let mut job = named("warm", 2);
    let records = json!([{"prompt": "one two", "completion": " three"}]);
    job["warm_up"] = json!({"dataset": {"records": records}, "steps": 1, "batch_size": 1, "learning_rate": 1e-3});
    let id = user.submit(&job);
    server.job_in_state(&id, "succeeded").await;
    user.run(&["pull", "warm@last", "-o", "plain"]).ok();
    user.run(&["pull", "warm@last", "-o", "all", "--all"]).ok();
    let reference = |folder: &str| user.path(folder).join("reference.safetensors").exists();
    assert!(reference("all") && !reference("plain"));
}

/// A proxy that stops forwarding the server's data after `allowance` bytes.
pub struct Proxy {
    pub url: String,
    pub allowance: Arc<AtomicU64>,
    passed: Arc<AtomicU64>,
}

impl Proxy {
    pub async fn start(server: &str, allowance: u64) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (allowance, passed) = (Arc::new(AtomicU64::new(allowance)), Arc::new(AtomicU64::new(0)));
        let server = server.strip_prefix("http://").unwrap().to_owned();
        let proxy = Self { url, allowance: allowance.clone(), passed: passed.clone() };
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let upstream = TcpStream::connect(&server).await.unwrap();
                let (allowance, passed) = (allowance.clone(), passed.clone());
                let (mut from_client, mut to_client) = client.into_split();
                let (mut from_server, mut to_server) = upstream.into_split();
                tokio::spawn(async move { tokio::io::copy(&mut from_client, &mut to_server).await });
                tokio::spawn(async move {
                    let mut piece = vec![0; 4096];
                    while let Ok(count @ 1..) = from_server.read(&mut piece).await {
                        while passed.load(Ordering::SeqCst) >= allowance.load(Ordering::SeqCst) {
                            tokio::time::sleep(Duration::from_millis(10)).await;
                        }
                        passed.fetch_add(count as u64, Ordering::SeqCst);
                        if to_client.write_all(&piece[..count]).await.is_err() {
                            return;
                        }
                    }
                });
            }
        });
        proxy
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_download_that_was_cut_goes_on_where_it_was() {
    let (server, user) = start("cpu");
    let id = trained(&server, &user).await;
    let checkpoint = server.get(&format!("/jobs/{id}/checkpoints")).await["data"][0].clone();
    let files = checkpoint["files"].as_array().unwrap();
    let size = |name: &str| files.iter().find(|file| file["name"] == name).unwrap()["size_bytes"].as_u64().unwrap();
    let whole = size("adapter_model.safetensors");
    assert!(whole > 100_000, "{whole}");
    // The responses before the weights have some thousand bytes.
    let proxy = Proxy::start(&server.url, whole / 2 + 40_000).await;
    let name = checkpoint["id"].as_str().unwrap();
    let pull = ["pull", name, "-o", "cut", "--server", &proxy.url];
    let mut child = user.command(&pull).spawn().unwrap();
    let part = user.path(&format!(".cut.{name}.part"));
    let arrived = || -> u64 {
        let entries = std::fs::read_dir(&part).into_iter().flatten().flatten();
        entries.map(|entry| entry.metadata().unwrap().len()).sum()
    };
    let begun = Instant::now();
    while arrived() < whole / 3 {
        assert!(begun.elapsed() < Duration::from_secs(60), "{} of {whole}", arrived());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!user.path("cut").exists(), "nothing has the name before it is whole");
    let had = arrived();

    let before = proxy.passed.load(Ordering::SeqCst);
    proxy.allowance.store(u64::MAX, Ordering::SeqCst);
    user.run(&pull).ok();
    let again = proxy.passed.load(Ordering::SeqCst) - before;
    assert!(again < whole + 40_000 - had / 2, "{again} of {whole} again, after {had}");
    assert!(!part.exists());
    user.run(&["pull", name, "-o", "direct"]).ok();
    let weights = |folder: &str| std::fs::read(user.path(folder).join("adapter_model.safetensors")).unwrap();
    assert_eq!(weights("cut"), weights("direct"));
}
