//! Tests of the data directory on a real disk.

use super::*;
use crate::failpoint;

fn entry(name: &str, bytes: &[u8]) -> FileEntry {
    FileEntry { name: name.to_owned(), size_bytes: bytes.len() as u64, sha256: Sha256Digest::of(bytes) }
}

async fn upload(files: &DataDir, job: JobId, name: &str, bytes: &[u8]) {
    let mut staged = files.stage(1000).await.unwrap();
    staged.write(bytes).await.unwrap();
    files.checkpoint_place(staged.finish().await.unwrap(), job, 5, 1, name).await.unwrap();
}

#[test]
fn a_second_server_on_the_directory_is_refused_by_name_and_pid() {
    let dir = tempfile::tempdir().unwrap();
    let first = DataDir::open(dir.path()).unwrap();
    let error = DataDir::open(dir.path()).unwrap_err().to_string();
    let root = fs::canonicalize(dir.path()).unwrap();
    assert!(error.contains(root.to_str().unwrap()), "{error}");
    assert!(error.contains(&format!("process {}", std::process::id())), "{error}");
    drop(first);
    DataDir::open(dir.path()).unwrap();
}

#[tokio::test]
async fn a_staged_file_is_hashed_bounded_and_removed_unless_published() {
    let dir = tempfile::tempdir().unwrap();
    let files = DataDir::open(dir.path()).unwrap();
    let mut staged = files.stage(5).await.unwrap();
    staged.write(b"abc").await.unwrap();
    let path = staged.path.path().to_owned();
    assert!(matches!(staged.write(b"def").await, Err(FilesError::TooLarge { limit_bytes: 5 })));
    drop(staged);
    assert!(!path.exists());

    let mut staged = files.stage(5).await.unwrap();
    staged.write(b"ab").await.unwrap();
    staged.write(b"c").await.unwrap();
    let done = staged.finish().await.unwrap();
    assert_eq!(done.size_bytes, 3);
    assert_eq!(done.sha256.to_string(), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    let to = files.dataset(DatasetId::new());
    done.publish(&to).await.unwrap();
    assert_eq!(fs::read(&to).unwrap(), b"abc");
    assert_eq!(entries(&files.staging()).unwrap(), Vec::<PathBuf>::new());
}

#[tokio::test]
async fn a_checkpoint_is_moved_only_when_every_byte_is_as_listed() {
    let dir = tempfile::tempdir().unwrap();
    let files = DataDir::open(dir.path()).unwrap();
    let job = JobId::new();
    upload(&files, job, "manifest.json", b"{}").await;
    upload(&files, job, "weights", b"1234").await;
    let listed = [entry("manifest.json", b"{}"), entry("weights", b"1234")];

    for (wrong, what) in [
        (vec![listed[0].clone()], "uploaded but is not listed"),
        (vec![listed[0].clone(), entry("weights", b"1235")], "SHA-256"),
        (vec![listed[0].clone(), entry("weights", b"12345")], "4 bytes instead of 5"),
        (vec![listed[0].clone(), listed[1].clone(), entry("more", b"")], "not uploaded"),
        (vec![listed[0].clone(), listed[0].clone()], "listed twice"),
        (vec![], "not listed"),
    ] {
        let error = files.checkpoint_commit(job, 5, 1, &wrong).unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
    }
    assert!(!files.checkpoint_dir(job, 5, 1).exists());

    files.checkpoint_commit(job, 5, 1, &listed).unwrap();
    files.checkpoint_commit(job, 5, 1, &listed).unwrap();
    assert_eq!(fs::read(files.checkpoint_file(job, 5, 1, "weights").unwrap()).unwrap(), b"1234");
    fs::write(files.checkpoint_file(job, 5, 1, "weights").unwrap(), b"1238").unwrap();
    assert!(files.checkpoint_verify(job, 5, 1, &listed).is_err());
}

#[tokio::test]
async fn a_publication_uses_the_hashes_of_received_files() {
    let dir = tempfile::tempdir().unwrap();
    let files = DataDir::open(dir.path()).unwrap();
    let job = JobId::new();
    let staged = files.staging().join(job.to_string()).join("1/5");
    upload(&files, job, "manifest.json", b"{}").await;
    upload(&files, job, "weights", b"first").await;
    upload(&files, job, "weights", b"1234").await;
    let listed = [entry("manifest.json", b"{}"), entry("weights", b"1234")];
    let stale = [entry("manifest.json", b"{}"), entry("weights", b"first")];
    assert!(files.checkpoint_commit(job, 5, 1, &stale).is_err(), "the later upload counts");

    // The content has the same size, so only reading the bytes would reveal the difference.
    fs::write(staged.join("weights"), b"????").unwrap();
    files.checkpoint_commit(job, 5, 1, &listed).unwrap();
    files.checkpoint_commit(job, 5, 1, &listed).unwrap();
    assert!(files.checkpoint_verify(job, 5, 1, &listed).is_err());
    // If there is a database row, the files are compared with the row. Otherwise only their bytes are available.
    files.checkpoint_published(job, 5, 1);
    assert!(files.checkpoint_commit(job, 5, 1, &listed).is_err());
    assert!(files.uploads.lock().unwrap().is_empty());

    upload(&files, job, "manifest.json", b"{}").await;
    fs::write(staged.join("manifest.json"), b"{").unwrap();
    let error = files.checkpoint_commit(job, 5, 2, &listed).unwrap_err().to_string();
    assert!(error.contains("not uploaded"), "{error}");
    files.staged_remove(job, 1).unwrap();
    assert!(files.uploads.lock().unwrap().is_empty(), "nothing is remembered of what is removed");
}

#[tokio::test]
async fn the_sweep_removes_only_files_without_a_row() {
    let dir = tempfile::tempdir().unwrap();
    let files = DataDir::open(dir.path()).unwrap();
    let (kept, lost) = (JobId::new(), JobId::new());
    let (kept_data, lost_data) = (DatasetId::new(), DatasetId::new());
    for (job, step, attempt) in [(kept, 10, 1), (kept, 20, 1), (lost, 10, 1)] {
        fs::create_dir_all(files.checkpoint_dir(job, step, attempt)).unwrap();
    }
    fs::write(files.dataset(kept_data), b"").unwrap();
    fs::write(files.dataset(lost_data), b"").unwrap();
    upload(&files, kept, "manifest.json", b"{}").await;
    drop(files);

    let files = DataDir::open(dir.path()).unwrap();
    files.sweep(&[(kept, 20, 1)], &[kept_data]).unwrap();
    assert!(files.checkpoint_dir(kept, 20, 1).is_dir() && files.dataset(kept_data).is_file());
    assert!(!files.checkpoint_dir(kept, 10, 1).exists() && !files.checkpoint_dir(lost, 10, 1).exists());
    assert!(!files.dataset(lost_data).exists());
    assert_eq!(entries(&files.staging()).unwrap(), Vec::<PathBuf>::new());
    assert!(files.free_bytes().unwrap() > 0);
}

#[test]
fn pinned_files_survive_removal_and_links_of_a_killed_backup_are_removed() {
    let dir = tempfile::tempdir().unwrap();
    let files = DataDir::open(dir.path()).unwrap();
    let path = files.datasets().join("x.ndjson");
    fs::write(&path, "rows").unwrap();
    let [dead, young] = ["backup-dead", "backup-young"].map(|name| {
        let left = files.staging().join(name);
        fs::create_dir(&left).unwrap();
        fs::write(left.join("0"), "left over").unwrap();
        left
    });
    let before = std::time::SystemTime::now() - std::time::Duration::from_secs(120);
    fs::File::open(&dead).unwrap().set_modified(before).unwrap();

    let mut pinned = files.pin_files();
    assert!(!dead.exists() && young.exists(), "one that was just made may not be locked yet");
    fs::remove_dir_all(&young).unwrap();
    pinned.pin(&path);
    pinned.pin(&files.datasets().join("missing"));
    fs::remove_file(&path).unwrap();
    let other = files.pin_files();
    assert_eq!(fs::read_to_string(pinned.link(&path).unwrap()).unwrap(), "rows", "another one leaves it alone");
    assert!(pinned.link(&files.datasets().join("missing")).is_none());
    drop((pinned, other));
    assert!(entries(&files.staging()).unwrap().is_empty());
}

#[test]
fn a_directory_is_vacant_when_nothing_of_ours_is_in_it() {
    use copy::{is_served, is_vacant};
    let dir = tempfile::tempdir().unwrap();
    let (volume, link, broken) = (dir.path().join("volume"), dir.path().join("link"), dir.path().join("broken"));
    assert!(is_vacant(&volume).unwrap());
    fs::create_dir_all(volume.join("lost+found")).unwrap();
    std::os::unix::fs::symlink(&volume, &link).unwrap();
    std::os::unix::fs::symlink(dir.path().join("nowhere"), &broken).unwrap();
    assert!(is_vacant(&volume).unwrap() && is_vacant(&link).unwrap() && !is_vacant(&broken).unwrap());
    assert!(!is_served(&volume) && !volume.join("rlood.lock").exists(), "looking makes nothing");
    let files = DataDir::open(&volume).unwrap();
    assert!(is_served(&volume) && !is_vacant(&link).unwrap());
    drop(files);
    assert!(!is_served(&volume));
    let killed = dir.path().join("killed");
    fs::create_dir(&killed).unwrap();
    fs::write(killed.join("rlood.lock"), "").unwrap();
    assert!(is_vacant(&killed).unwrap(), "a restore that was killed leaves its lock");
}

/// Returns the failpoints that a call passes on a file system without hard links; `failing` makes one of them fail.
fn without_links<T>(failing: Option<&'static str>, call: impl FnOnce() -> T) -> (T, Vec<String>) {
    let passed = std::rc::Rc::new(std::cell::RefCell::new(Vec::new()));
    let noted = passed.clone();
    failpoint::set_hook(Some(Box::new(move |point| {
        noted.borrow_mut().push(point.to_owned());
        let fails = point.starts_with("files.link:") || Some(point) == failing;
        fails.then_some(failpoint::Action::Error)
    })));
    let result = call();
    failpoint::set_hook(None);
    (result, passed.take())
}

#[test]
fn a_checkpoint_that_cannot_be_linked_is_copied_and_synced_before_it_is_in_its_place() {
    let dir = tempfile::tempdir().unwrap();
    let files = DataDir::open(dir.path()).unwrap();
    let (parent, child) = (JobId::new(), JobId::new());
    let from = files.checkpoint_dir(parent, 5, 1);
    fs::create_dir_all(&from).unwrap();
    let listed = [entry("manifest.json", b"{}"), entry("w", b"weights")];
    fs::write(from.join("manifest.json"), "{}").unwrap();
    fs::write(from.join("w"), "weights").unwrap();

    // Nothing is adopted unless every copy was synced.
    let adopt = || files.checkpoint_adopt((parent, 5, 1), child, &listed);
    let (adopted, _) = without_links(Some("files.copy_sync:w"), adopt);
    assert!(adopted.is_err() && !files.checkpoint_dir(child, 5, 0).exists());
    let (adopted, passed) = without_links(None, adopt);
    adopted.unwrap();
    assert_eq!(
        passed,
        [
            "files.link:manifest.json",
            "files.copy_sync:manifest.json",
            "files.link:w",
            "files.copy_sync:w",
            "files.place"
        ]
    );
    files.checkpoint_verify(child, 5, 0, &listed).unwrap();
    // The same is true for the files and the list that a warm start keeps.
    let (kept, passed) = without_links(None, || files.initial_keep(child, &from, &listed));
    kept.unwrap();
    assert_eq!(passed[4..], ["files.list_sync", "files.place"]);
    assert_eq!(files.initial_files(child).unwrap().unwrap(), listed);
    let (kept, _) = without_links(Some("files.list_sync"), || files.initial_keep(parent, &from, &listed));
    assert!(kept.is_err() && files.initial_files(parent).unwrap().is_none());
}
