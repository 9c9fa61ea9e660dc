//! Checks the fake Hub, and what this crate pushes to it, with the real Python client, huggingface_hub, if it is installed.

use std::path::Path;
use std::process::Command;
use std::sync::atomic::Ordering;

use rlood_hub::{Progress, Token};

use super::fake::uploads::{READ_TOKEN, WRITE_TOKEN};
use super::fake::{Faults, Running, model, start};
use super::pushes::{files, push_of};

/// Runs a program with arguments; `None` if there is no Python with huggingface_hub. Returns what it prints.
async fn python(running: &Running, home: &Path, token: &str, program: &str, arguments: &[&str]) -> Option<String> {
    let Ok(python) = std::env::var("RLOOD_HUB_PYTHON") else {
        println!("NOT RUN: RLOOD_HUB_PYTHON names no Python with huggingface_hub");
        return None;
    };
    let mut command = Command::new(python);
    command.args(["-c", program]).args(arguments);
    command.env("HF_ENDPOINT", &running.url).env("HF_HOME", home).env("HF_HUB_DISABLE_XET", "1");
    command.env("HF_TOKEN", token).env("NO_PROXY", "*");
    let output = tokio::task::spawn_blocking(move || command.output()).await.unwrap().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(String::from_utf8(output.stdout).unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_real_client_reads_the_fake_hub() {
    let running = start(model(), Faults::default()).await;
    let dir = tempfile::tempdir().unwrap();
    let program = "from huggingface_hub import snapshot_download; print(snapshot_download('fake/tiny'))";
    let Some(snapshot) = python(&running, dir.path(), "hf_any", program, &[]).await else { return };
    for (path, bytes) in &running.fake.files {
        assert_eq!(&std::fs::read(Path::new(snapshot.trim()).join(path)).unwrap(), bytes, "{path}");
    }
}

const UPLOAD: &str = "
import sys
from huggingface_hub import HfApi
api = HfApi()
api.create_repo(sys.argv[1], exist_ok=True, private=True)
api.create_branch(sys.argv[1], branch='other', exist_ok=True)
for branch in ['main', 'other']:
    print(api.upload_folder(repo_id=sys.argv[1], folder_path=sys.argv[2], revision=branch).oid)
print(api.repo_info(sys.argv[1]).sha)
";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_real_client_pushes_to_the_fake_hub_and_this_one_finds_nothing_to_add() {
    for part_bytes in [None, Some(250_000)] {
        let running = start(model(), Faults { part_bytes, ..Faults::default() }).await;
        let (dir, files) = (tempfile::tempdir().unwrap(), files());
        for (path, bytes) in &files {
            std::fs::write(dir.path().join(path), bytes).unwrap();
        }
        let home = tempfile::tempdir().unwrap();
        let folder = dir.path().to_str().unwrap();
        let Some(printed) = python(&running, home.path(), WRITE_TOKEN, UPLOAD, &["ann/theirs", folder]).await else {
            return;
        };
        let commits: Vec<&str> = printed.lines().collect();
        let uploads = &running.fake.uploads;
        assert!(uploads.files("ann/theirs", "main") == files && uploads.files("ann/theirs", "other") == files);
        assert!(uploads.repos.lock().unwrap()["ann/theirs"].private);
        assert_eq!((commits.len(), uploads.commits("ann/theirs"), commits[0]), (3, 3, commits[2]));

        let received = running.fake.received_bytes.load(Ordering::SeqCst);
        let hub = running.client().with_token(Token::new(WRITE_TOKEN));
        let mut push = push_of("ann/theirs", dir.path(), &files);
        let done = hub.push(&push, &Progress::default()).await.unwrap();
        assert_eq!((done.is_new, done.commit.as_str()), (false, commits[0]));
        push.files.retain(|file| file.path != "tokenizer.json");
        push.is_stale = |path| path == "tokenizer.json";
        assert!(hub.push(&push, &Progress::default()).await.unwrap().is_new);
        assert_eq!(running.fake.received_bytes.load(Ordering::SeqCst), received);
    }
}

const REFUSED: &str = "
import sys
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
for repo in sys.argv[1:]:
    try:
        HfApi().upload_file(path_or_fileobj=b'x', path_in_repo='x', repo_id=repo)
    except HfHubHTTPError as error:
        print(error.response.status_code)
";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_fake_hub_refuses_the_real_client_too() {
    let running = start(model(), Faults::default()).await;
    let home = tempfile::tempdir().unwrap();
    let refused = ["bob/taken", "ann/nothing"];
    for (token, expected) in [(READ_TOKEN, "403\n404\n"), (WRITE_TOKEN, "403\n404\n"), ("hf_wrong", "401\n401\n")] {
        let Some(printed) = python(&running, home.path(), token, REFUSED, &refused).await else { return };
        assert_eq!(printed, expected, "{token}");
    }
}

const READ: &str = "
import sys
from huggingface_hub import ModelCard, snapshot_download
card = ModelCard.load(sys.argv[1])
assert card.data.library_name == 'peft', card.data
assert card.text.strip() == '# A model', card.text
print(snapshot_download(sys.argv[1], revision=sys.argv[2]))
";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_this_crate_pushes_is_read_by_the_real_client_byte_for_byte() {
    for part_bytes in [None, Some(250_000)] {
        let running = start(model(), Faults { part_bytes, ..Faults::default() }).await;
        let (dir, files) = (tempfile::tempdir().unwrap(), files());
        let hub = running.client().with_token(Token::new(WRITE_TOKEN));
        let mut push = push_of("ann/ours", dir.path(), &files);
        push.is_private = true;
        let done = hub.push(&push, &Progress::default()).await.unwrap();
        let home = tempfile::tempdir().unwrap();
        let arguments = ["ann/ours", done.commit.as_str()];
        let Some(snapshot) = python(&running, home.path(), READ_TOKEN, READ, &arguments).await else { return };
        let snapshot = Path::new(snapshot.trim());
        for (path, bytes) in &files {
            assert!(&std::fs::read(snapshot.join(path)).unwrap() == bytes, "{path}");
        }
        assert_eq!(std::fs::read_dir(snapshot).unwrap().count(), files.len() + 1, "and .gitattributes");
    }
}
