//! Tests of interrupted, damaged, changed and repeated downloads.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine;
use rlood_client::{Checked, Checkpoint, Error, ExportForm, SampleQuery};
use rlood_types::digest::Sha256Digest;
use rlood_types::id::{DatasetId, JobId};
use serde_json::json;

use crate::fake::{Fake, Reply, Seen};

const SIZE: usize = 1_000_000;

fn content(seed: u64) -> Vec<u8> {
    (0..SIZE as u64).map(|at| (at.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 13) as u8).collect()
}

fn digest(bytes: &[u8]) -> String {
    format!("sha-256=:{}:", base64::engine::general_purpose::STANDARD.encode(Sha256Digest::of(bytes).bytes()))
}

/// Replies as the server does: with the whole, or with the rest.
fn reply(seen: &Seen, etag: &str, bytes: &[u8]) -> Reply {
    let is_of_this = seen.headers.get("if-range").is_none_or(|known| *known == format!("\"{etag}\""));
    let first = seen.headers.get("range").filter(|_| is_of_this).map(|range| {
        let first = range.strip_prefix("bytes=").unwrap().strip_suffix('-').unwrap();
        first.parse::<usize>().unwrap()
    });
    let reply = match first {
        None => Reply::new(200, bytes),
        Some(first) if first >= bytes.len() => {
            return Reply::problem(416, "range_not_satisfiable", false);
        }
        Some(first) => Reply::new(206, &bytes[first..])
            .header("content-range", format!("bytes {first}-{}/{}", bytes.len() - 1, bytes.len())),
    };
    reply.header("etag", format!("\"{etag}\"")).header("repr-digest", digest(bytes))
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn dataset() -> DatasetId {
    "ds_01jd0000000000000000000000".parse().unwrap()
}

fn job() -> JobId {
    "job_01jd0000000000000000000000".parse().unwrap()
}

#[tokio::test]
async fn an_interrupted_download_resumes_where_it_stopped() {
    let bytes = Arc::new(content(1));
    let whole = bytes.clone();
    // There are more interruptions than tries, but each transfers some bytes.
    let fake = Fake::start(move |number, seen| {
        let reply = reply(seen, "v1", &whole);
        if number < 9 { reply.cut(100_000) } else { reply }
    })
    .await;
    let dir = tempfile::tempdir().unwrap();
    let to = dir.path().join("rows.ndjson");
    let got = fake.client().download_dataset(dataset(), &to).await.unwrap();
    assert_eq!(std::fs::read(&to).unwrap(), *bytes);
    assert_eq!((got.size_bytes, got.checked, got.path), (SIZE as u64, Checked::Sha256, to));
    assert_eq!(got.sha256, Sha256Digest::of(&*bytes));
    assert_eq!(names(dir.path()), ["rows.ndjson"]);
    let seen = fake.seen();
    assert!(seen.len() >= 10 && !seen[0].headers.contains_key("range"));
    let firsts: Vec<usize> = seen[1..]
        .iter()
        .map(|request| {
            assert_eq!(request.headers["if-range"], "\"v1\"");
            request.headers["range"].strip_prefix("bytes=").unwrap().strip_suffix('-').unwrap().parse().unwrap()
        })
        .collect();
    assert!(firsts.is_sorted_by(|one, next| one < next) && firsts[0] > 0, "{firsts:?}");
}

#[tokio::test]
async fn a_later_call_resumes_a_partial_download() {
    let bytes = Arc::new(content(2));
    let whole = bytes.clone();
    let fake = Fake::start(move |number, seen| {
        let reply = reply(seen, "v1", &whole);
        if number == 0 { reply.cut(300_000) } else { reply }
    })
    .await;
    let dir = tempfile::tempdir().unwrap();
    let to = dir.path().join("rows.ndjson");
    std::fs::write(&to, "of another time").unwrap();
    let error = fake.impatient().download_dataset(dataset(), &to).await.unwrap_err();
    assert!(matches!(error, Error::Interrupted { .. }), "{error:?}");
    assert_eq!(std::fs::read_to_string(&to).unwrap(), "of another time", "half a file never has the name");
    assert_eq!(names(dir.path()), [".rows.ndjson.v1.part", "rows.ndjson"]);
    let left = std::fs::metadata(dir.path().join(".rows.ndjson.v1.part")).unwrap().len();
    fake.impatient().download_dataset(dataset(), &to).await.unwrap();
    assert_eq!(fake.seen()[1].headers["range"], format!("bytes={left}-"));
    assert_eq!(std::fs::read(&to).unwrap(), *bytes);
    assert_eq!(names(dir.path()), ["rows.ndjson"]);
}

#[tokio::test]
async fn another_version_begins_anew() {
    let (old, new) = (content(3), Arc::new(content(4)));
    let latest = new.clone();
    let fake = Fake::start(move |number, seen| match number {
        0 => reply(seen, "v1", &old).cut(400_000),
        1 => reply(seen, "v2", &latest).cut(200_000),
        _ => reply(seen, "v2", &latest),
    })
    .await;
    let dir = tempfile::tempdir().unwrap();
    let to = dir.path().join("adapter.tar");
    fake.client().download_adapter(job(), None, &to).await.unwrap();
    assert_eq!(std::fs::read(&to).unwrap(), *new);
    assert_eq!(names(dir.path()), ["adapter.tar"]);
    let seen = fake.seen();
    assert_eq!((&seen[1].headers["if-range"], &seen[2].headers["if-range"]), (&"\"v1\"".into(), &"\"v2\"".into()));
}

#[tokio::test]
async fn a_damaged_download_is_repeated_and_never_renamed() {
    let bytes = Arc::new(content(5));
    let whole = bytes.clone();
    let fake = Fake::start(move |number, seen| {
        let mut sent = (*whole).clone();
        if number < 2 {
            sent[777_777] ^= 1;
        }
        // The tag is not a hash; the digest is that of the correct bytes.
        Reply::new(200, sent).header("etag", "\"v1\"").header("repr-digest", digest(&whole)).header("x", &seen.line)
    })
    .await;
    let dir = tempfile::tempdir().unwrap();
    let to = dir.path().join("rows.ndjson");
    fake.client().download_dataset(dataset(), &to).await.unwrap();
    assert_eq!(std::fs::read(&to).unwrap(), *bytes);
    assert_eq!(fake.seen().len(), 3);
    assert!(fake.seen().iter().all(|request| !request.headers.contains_key("range")), "nothing damaged is kept");

    let hash = Sha256Digest::of(b"something else");
    let fake = Fake::start(move |_, _| Reply::new(200, "wrong").header("etag", format!("\"{hash}\""))).await;
    let dir = tempfile::tempdir().unwrap();
    let error = fake.client().download_dataset(dataset(), &dir.path().join("x")).await.unwrap_err();
    assert!(matches!(&error, Error::Damaged { detail, .. } if detail.contains("sha256")), "{error:?}");
    assert_eq!(fake.seen().len(), 3);
    assert!(names(dir.path()).is_empty());
}

#[tokio::test]
async fn answers_to_ranges_that_were_not_asked_for_are_not_used() {
    let bytes = Arc::new(content(6));
    let whole = bytes.clone();
    let fake = Fake::start(move |number, seen| match number {
        0 => reply(seen, "v1", &whole).cut(500_000),
        // The beginning again, as if it were the rest.
        1 => Reply::new(206, &whole[..])
            .header("etag", "\"v1\"")
            .header("content-range", format!("bytes 0-{}/{SIZE}", SIZE - 1)),
        2 => reply(seen, "v1", &whole).cut(500_000),
        3 => Reply::problem(416, "range_not_satisfiable", false),
        _ => reply(seen, "v1", &whole),
    })
    .await;
    let dir = tempfile::tempdir().unwrap();
    let to = dir.path().join("rows.ndjson");
    fake.client().download_dataset(dataset(), &to).await.unwrap();
    assert_eq!(std::fs::read(&to).unwrap(), *bytes);
    let ranged: Vec<bool> = fake.seen().iter().map(|request| request.headers.contains_key("range")).collect();
    assert_eq!(ranged, [false, true, false, true, false]);
}

#[tokio::test]
async fn a_stalled_download_resumes_over_another_connection() {
    let bytes = Arc::new(content(7));
    let whole = bytes.clone();
    let fake = Fake::start(move |number, seen| {
        let reply = reply(seen, "v1", &whole);
        if number == 0 { reply.cut(250_000).hangs() } else { reply }
    })
    .await;
    let client = fake.builder().stall_timeout(Duration::from_millis(300)).build().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let to = dir.path().join("rows.ndjson");
    client.download_dataset(dataset(), &to).await.unwrap();
    assert_eq!(std::fs::read(&to).unwrap(), *bytes);
    assert!(fake.seen()[1].headers.contains_key("range"));
}

#[tokio::test]
async fn a_download_without_an_entity_tag_restarts_a_limited_number_of_times() {
    let fake = Fake::start(|number, _| {
        let reply = Reply::new(200, "one\ntwo\n");
        if number == 0 { reply.cut(4) } else { reply.unframed() }
    })
    .await;
    let dir = tempfile::tempdir().unwrap();
    let to = dir.path().join("samples.ndjson");
    let got = fake.client().export_samples(job(), &SampleQuery::default(), ExportForm::Ndjson, &to).await.unwrap();
    assert_eq!((std::fs::read_to_string(&to).unwrap().as_str(), got.checked), ("one\ntwo\n", Checked::End));
    assert!(fake.seen()[0].line.ends_with("?format=ndjson") && !fake.seen()[1].headers.contains_key("range"));

    let broken = Fake::start(|_, _| Reply::new(200, "one\ntwo\n").cut(4)).await;
    let to = dir.path().join("again");
    let error = broken.client().export_samples(job(), &SampleQuery::default(), ExportForm::Csv, &to).await;
    assert!(matches!(error, Err(Error::Interrupted { .. })));
    assert!(broken.seen().len() <= 6, "{}", broken.seen().len());
    assert_eq!(names(dir.path()), ["samples.ndjson"]);
}

#[tokio::test]
async fn two_transfers_to_one_place_do_not_mix() {
    let bytes = content(8);
    let fake = Fake::start(move |number, seen| {
        let reply = reply(seen, "v1", &bytes);
        if number == 0 { reply.cut(100_000).hangs() } else { reply }
    })
    .await;
    let dir = tempfile::tempdir().unwrap();
    let (client, to) = (fake.client(), dir.path().join("rows.ndjson"));
    let (first, target) = (client.clone(), to.clone());
    let first = tokio::spawn(async move { first.download_dataset(dataset(), &target).await });
    while names(dir.path()).is_empty() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let error = client.download_dataset(dataset(), &to).await.unwrap_err();
    assert!(error.to_string().contains("another download is writing it"), "{error}");
    first.abort();
}

#[tokio::test]
async fn the_files_of_a_checkpoint_are_compared_with_its_list_and_whole_ones_are_kept() {
    let files = [("adapter_config.json", b"{}".to_vec()), ("adapter_model.safetensors", content(9))];
    let entry = |(name, bytes): &(&str, Vec<u8>)| json!({"name": name, "size_bytes": bytes.len(), "sha256": Sha256Digest::of(bytes)});
    let checkpoint = json!({"id": "ckpt_01jd0000000000000000000000", "job_id": "job_01jd0000000000000000000000", "step": 2,
        "files": files.iter().map(entry).collect::<Vec<_>>(), "metrics": {"reward": 0.5, "kl": null}, "best": true,
        "pinned": false, "created_at": "2026-01-01T00:00:00.000Z"});
    let mut checkpoint: Checkpoint = serde_json::from_value(checkpoint).unwrap();
    let fake = Fake::start(move |_, seen| {
        let (_, bytes) = files.iter().find(|(name, _)| seen.line.ends_with(name)).unwrap();
        reply(seen, "v1", bytes)
    })
    .await;
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("checkpoint");
    let got = fake.client().download_files(&checkpoint, &folder).await.unwrap();
    assert_eq!((got.len(), fake.seen().len()), (2, 2));
    assert_eq!(names(&folder), ["adapter_config.json", "adapter_model.safetensors"]);
    std::fs::write(folder.join("adapter_config.json"), "[]").unwrap();
    assert_eq!(fake.client().download_files(&checkpoint, &folder).await.unwrap(), got);
    assert_eq!(fake.seen().len(), 3, "only what differs");
    // Only the list counts, whatever hash the server sends with the bytes.
    checkpoint.files[0].sha256 = Sha256Digest::of("another");
    let error = fake.client().download_files(&checkpoint, &folder).await.unwrap_err();
    assert!(matches!(error, Error::Damaged { .. }), "{error:?}");
    checkpoint.files[0].name = "../outside".to_owned();
    let error = fake.client().download_files(&checkpoint, &folder).await.unwrap_err();
    assert!(error.to_string().contains("../outside") && !dir.path().join("outside").exists(), "{error}");
}
