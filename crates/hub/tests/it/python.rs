//! Checks the fake Hub with the real Python client, huggingface_hub, if it is installed.

use std::process::Command;

use super::fake::{Faults, model, start};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_real_client_reads_the_fake_hub() {
    let Ok(python) = std::env::var("RLOOD_HUB_PYTHON") else {
        println!("NOT RUN: RLOOD_HUB_PYTHON names no Python with huggingface_hub");
        return;
    };
    let running = start(model(), Faults::default()).await;
    let dir = tempfile::tempdir().unwrap();
    let program = "import sys; from huggingface_hub import snapshot_download; print(snapshot_download('fake/tiny'))";
    let output = tokio::task::spawn_blocking({
        let (url, home) = (running.url.clone(), dir.path().to_owned());
        move || {
            Command::new(python)
                .args(["-c", program])
                .env("HF_ENDPOINT", url)
                .env("HF_HOME", home)
                .env("HF_HUB_DISABLE_XET", "1")
                .output()
        }
    });
    let output = output.await.unwrap().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let snapshot = String::from_utf8(output.stdout).unwrap();
    for (path, bytes) in &running.fake.files {
        assert_eq!(&std::fs::read(std::path::Path::new(snapshot.trim()).join(path)).unwrap(), bytes, "{path}");
    }
}
