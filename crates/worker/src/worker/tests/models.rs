//! Tests with models that are not on the worker's machine.

use axum::body::Body;
use axum::http::HeaderMap;
use axum::http::header::{CONTENT_RANGE, RANGE};

use super::*;
use crate::model_cache::{Found, ModelCache};

/// The files of a model as the server sends them.
#[derive(Default)]
pub(super) struct Served {
    /// `None` for an older server without this call.
    files: Option<Vec<(FileEntry, Vec<u8>)>>,
    /// Number of transfers that are interrupted in the middle.
    cuts: Mutex<u32>,
    /// Number of transfers with a wrong byte.
    wrong: Mutex<u32>,
    /// Number of list requests that are answered "still hashing" first.
    hashing: Mutex<u32>,
    /// Whether transfers never end.
    stalls: bool,
}

impl Served {
    fn whole() -> Self {
        let dir = model_dir();
        let files = modelcard::files_of(&dir).unwrap();
        let entries = modelcard::hash_files(&dir, &files).unwrap();
        let files = entries.into_iter().map(|entry| {
            let bytes = std::fs::read(dir.join(&entry.name)).unwrap();
            (entry, bytes)
        });
        Self { files: Some(files.collect()), ..Self::default() }
    }

    pub(super) fn answer(&self, path: &[&str], headers: &HeaderMap) -> (String, Response) {
        let takes_one = |count: &Mutex<u32>| {
            let mut left = count.lock().unwrap();
            let is_one = *left > 0;
            *left = left.saturating_sub(1);
            is_one
        };
        match (&self.files, path) {
            (None, _) => ("models missing".to_owned(), StatusCode::NOT_FOUND.into_response()),
            (Some(_), [_]) if takes_one(&self.hashing) => {
                ("models".to_owned(), Json(json!({"files": null})).into_response())
            }
            (Some(files), [_]) => {
                let entries: Vec<&FileEntry> = files.iter().map(|(entry, _)| entry).collect();
                ("models".to_owned(), Json(json!({ "files": entries })).into_response())
            }
            (Some(files), [_, name]) => {
                let (_, bytes) = files.iter().find(|(entry, _)| entry.name == *name).unwrap();
                let range = headers.get(RANGE).map(|range| range.to_str().unwrap().to_owned());
                let from = range.as_ref().map_or(0, |range| {
                    range.strip_prefix("bytes=").unwrap().strip_suffix('-').unwrap().parse().unwrap()
                });
                let mut rest = bytes[from..].to_vec();
                if takes_one(&self.wrong) {
                    rest[0] ^= 1;
                }
                let body = match rest.len() {
                    _ if self.stalls => {
                        let first = futures::stream::iter([Ok::<_, std::io::Error>(rest[..1].to_vec())]);
                        Body::from_stream(futures::StreamExt::chain(first, futures::stream::pending()))
                    }
                    length if takes_one(&self.cuts) => {
                        let pieces = [Ok(rest[..length / 2].to_vec()), Err(std::io::Error::other("the line is cut"))];
                        // There is a pause before the error, so that the first piece is sent.
                        Body::from_stream(futures::StreamExt::then(futures::stream::iter(pieces), |piece| async {
                            if piece.is_err() {
                                tokio::time::sleep(Duration::from_millis(100)).await;
                            }
                            piece
                        }))
                    }
                    _ => Body::from(rest),
                };
                let mut response = Response::new(body);
                if from > 0 {
                    *response.status_mut() = StatusCode::PARTIAL_CONTENT;
                    let sent = format!("bytes {from}-{}/{}", bytes.len() - 1, bytes.len());
                    response.headers_mut().insert(CONTENT_RANGE, sent.parse().unwrap());
                }
                (format!("model {name} {}", range.unwrap_or_default()).trim_end().to_owned(), response)
            }
            _ => panic!("{path:?}"),
        }
    }
}

/// Returns a claim whose model does not exist on this machine.
fn elsewhere() -> Claim {
    Claim { model_path: "/a/path/of/the/server".to_owned(), ..claim() }
}

fn from_the_cache(input: TrainInput<'_>, _: &mut dyn Host) -> Result<(), RunEnd> {
    assert!(input.model_dir.ends_with(modelcard::fingerprint(&model_dir()).unwrap()), "{}", input.model_dir.display());
    for name in ["config.json", "model.safetensors", "tokenizer.json"] {
        let (here, there) = (std::fs::read(input.model_dir.join(name)), std::fs::read(model_dir().join(name)));
        assert!(here.unwrap() == there.unwrap(), "{name}");
    }
    Ok(())
}

fn in_place(input: TrainInput<'_>, _: &mut dyn Host) -> Result<(), RunEnd> {
    assert_eq!(input.model_dir, model_dir());
    Ok(())
}

fn never(_: TrainInput<'_>, _: &mut dyn Host) -> Result<(), RunEnd> {
    panic!("there is no model to train");
}

async fn run(model: Served, train: TrainFn, claim: Claim, cache: &Path, limit: Option<u64>) -> Arc<Seen> {
    let seen = Arc::new(Seen { model, ..Seen::default() });
    let (ended, seen) = attempt_with_cache(seen, train, claim, Some((cache.to_owned(), limit)), |_| {}).await;
    assert_eq!(ended, None);
    seen
}

fn transfers(story: &[String], name: &str) -> Vec<String> {
    let begin = format!("model {name}");
    story.iter().filter_map(|call| Some(call.strip_prefix(&begin)?.trim().to_owned())).collect()
}

fn middle_of(name: &str) -> u64 {
    std::fs::metadata(model_dir().join(name)).unwrap().len() / 2
}

#[tokio::test]
async fn a_model_with_the_same_bytes_is_used_in_place() {
    let cache = tempfile::tempdir().unwrap();
    let seen = run(Served::whole(), in_place, claim(), cache.path(), None).await;
    assert_eq!(seen.story().last().unwrap(), "finish succeeded");
    assert!(!seen.story().iter().any(|call| call.starts_with("model")), "{:?}", seen.story());
    assert_eq!(std::fs::read_dir(cache.path()).unwrap().count(), 0);
}

#[tokio::test]
async fn a_remote_model_is_downloaded_once_and_an_interrupted_transfer_resumes() {
    let cache = tempfile::tempdir().unwrap();
    let served = Served { cuts: Mutex::new(1), hashing: Mutex::new(2), ..Served::whole() };
    let seen = run(served, from_the_cache, elsewhere(), cache.path(), None).await;
    let story = seen.story();
    assert_eq!(story.last().unwrap(), "finish succeeded", "{story:?}");
    assert_eq!(story.iter().filter(|call| *call == "models").count(), 3, "it asks until all is hashed: {story:?}");
    let middle = middle_of("config.json");
    assert_eq!(transfers(&story, "config.json"), [String::new(), format!("bytes={middle}-")], "{story:?}");
    assert_eq!(transfers(&story, "model.safetensors"), [""], "{story:?}");
    // The next job finds the model in the cache.
    let seen = run(Served::whole(), from_the_cache, elsewhere(), cache.path(), None).await;
    assert!(!seen.story().iter().any(|call| call.starts_with("model")), "{:?}", seen.story());
    // A cached copy whose bytes have changed is downloaded again.
    let copy = cache.path().join("models").join(modelcard::fingerprint(&model_dir()).unwrap());
    std::fs::write(copy.join("tokenizer.json"), "{}").unwrap();
    let seen = run(Served::whole(), from_the_cache, elsewhere(), cache.path(), None).await;
    assert_eq!(transfers(&seen.story(), "tokenizer.json"), [""], "{:?}", seen.story());
}

#[tokio::test]
async fn a_file_with_a_wrong_byte_is_downloaded_again() {
    let cache = tempfile::tempdir().unwrap();
    let served = Served { wrong: Mutex::new(1), ..Served::whole() };
    let seen = run(served, from_the_cache, elsewhere(), cache.path(), None).await;
    let story = seen.story();
    assert_eq!(transfers(&story, "config.json"), ["", ""], "{story:?}");
    assert_eq!(transfers(&story, "model.safetensors"), [""], "{story:?}");
    assert_eq!(story.last().unwrap(), "finish succeeded");
    // Bytes that are always wrong fail the attempt, and nothing counts as the model.
    let other = tempfile::tempdir().unwrap();
    let served = Served { wrong: Mutex::new(100), ..Served::whole() };
    let seen = run(served, never, elsewhere(), other.path(), None).await;
    assert_eq!(seen.story().last().unwrap(), "finish failed transfer_damaged");
    let entries = ModelCache::open(other.path(), None).unwrap().entries().unwrap();
    assert!(entries.iter().all(|entry| !entry.is_whole && !entry.in_use), "{entries:?}");
}

#[tokio::test]
async fn a_download_of_a_killed_worker_is_resumed() {
    let cache = tempfile::tempdir().unwrap();
    let key = modelcard::fingerprint(&model_dir()).unwrap();
    {
        let Found::Missing(fetching) = ModelCache::open(cache.path(), None).unwrap().find(&key).unwrap() else {
            panic!()
        };
        let part = fetching.prepare("tiny", 1000).unwrap();
        std::fs::copy(model_dir().join("config.json"), part.join("config.json")).unwrap();
        let weights = std::fs::read(model_dir().join("model.safetensors")).unwrap();
        std::fs::write(part.join("model.safetensors"), &weights[..1000]).unwrap();
        std::fs::write(part.join("tokenizer.json"), "more than one has to say").unwrap();
    }
    let seen = run(Served::whole(), from_the_cache, elsewhere(), cache.path(), None).await;
    let story = seen.story();
    assert_eq!(transfers(&story, "config.json"), [""; 0], "{story:?}");
    assert_eq!(transfers(&story, "model.safetensors"), ["bytes=1000-"], "{story:?}");
    // The existing bytes were not the beginning of the file.
    assert_eq!(transfers(&story, "tokenizer.json"), ["bytes=24-", ""], "{story:?}");
    assert_eq!(story.last().unwrap(), "finish succeeded");
}

#[tokio::test]
async fn two_workers_of_one_machine_fetch_one_copy() {
    let cache = tempfile::tempdir().unwrap();
    let seen = Arc::new(Seen { model: Served::whole(), ..Seen::default() });
    let attempt =
        || attempt_with_cache(seen.clone(), from_the_cache, elsewhere(), Some((cache.path().to_owned(), None)), |_| {});
    tokio::join!(attempt(), attempt());
    let story = seen.story();
    assert_eq!(transfers(&story, "model.safetensors"), [""], "{story:?}");
    assert_eq!(story.iter().filter(|call| *call == "finish succeeded").count(), 2, "{story:?}");
}

#[tokio::test]
async fn a_model_that_cannot_be_fetched_fails_the_job_by_name() {
    let cache = tempfile::tempdir().unwrap();
    let old_server = run(Served::default(), never, elsewhere(), cache.path(), None).await;
    assert_eq!(old_server.story().last().unwrap(), "finish failed model_invalid");
    let mut other = Served::whole();
    other.files.as_mut().unwrap().pop();
    let changed = run(other, never, elsewhere(), cache.path(), None).await;
    assert_eq!(changed.story().last().unwrap(), "finish failed model_changed");
    let full = run(Served::whole(), never, elsewhere(), cache.path(), Some(1000)).await;
    assert_eq!(full.story().last().unwrap(), "finish failed model_cache_full");
    assert!(transfers(&full.story(), "config.json").is_empty());
}

#[tokio::test]
async fn a_cancel_ends_a_transfer() {
    let cache = tempfile::tempdir().unwrap();
    let model = Served { stalls: true, ..Served::whole() };
    let seen = Arc::new(Seen { model, requested: Some("cancel"), ..Seen::default() });
    let begun = Instant::now();
    let cached = Some((cache.path().to_owned(), None));
    let (ended, seen) = attempt_with_cache(seen, never, elsewhere(), cached, |_| {}).await;
    assert_eq!(ended, None);
    assert!(begun.elapsed() < Duration::from_secs(20));
    assert_eq!(seen.story().last().unwrap(), "finish cancelled");
    // Another job can download the model immediately.
    let key = modelcard::fingerprint(&model_dir()).unwrap();
    assert!(!matches!(ModelCache::open(cache.path(), None).unwrap().find(&key).unwrap(), Found::Busy));
}
