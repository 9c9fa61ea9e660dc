//! A fake Hub on one port and its CDN on another. They answer like the real ones, and inject faults on request.

#[path = "fake/uploads.rs"]
pub mod uploads;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use rlood_hub::{Hub, HubSettings};
use rlood_rewards::http_client::restricted_client_builder;
use rlood_types::digest::Sha256Digest;
use rlood_types::outgoing::OutgoingPolicy;
use serde_json::{Value, json};
use sha1::{Digest, Sha1};

pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
/// Commit of the branch `next` of the model.
pub const NEXT: &str = "89abcdef0123456789abcdef0123456789abcdef";
/// Folders of the files that differ on the branch `next`, and in the repository `fake/twin`, which has the commits of `fake/tiny`.
const VARIANTS: [&str; 3] = ["next/", "twin/", "twin-next/"];
/// Former names of the models `fake/tiny` and `fake/twin`, and of the dataset `fake/rows`.
pub const OLD_MODEL: &str = "former/tiny";
pub const OLD_TWIN: &str = "former/twin";
pub const OLD_DATASET: &str = "former/rows";
/// Files on the branch with the Parquet copy.
pub const CONVERTED: &str = "converted/";
/// Size in bytes from which files are stored in LFS.
const SMALL: usize = 10_000;

/// Faults to inject. Counts are numbers of requests that still fail.
#[derive(Default)]
pub struct Faults {
    /// The CDN closes the connection after this many bytes.
    pub cut_after: Option<usize>,
    /// Number of times that the CDN closes the connection.
    pub cuts: AtomicU32,
    /// The CDN answers 503.
    pub unavailable: AtomicU32,
    /// The CDN answers 403 to requests with a range.
    pub forbids_ranges: bool,
    /// The CDN ignores `Range`.
    pub ignores_ranges: bool,
    /// The CDN's 206 starts one byte later than requested.
    pub shifts_ranges: bool,
    /// The first byte is wrong, this many times.
    pub damaged: AtomicU32,
    /// The last byte is always wrong.
    pub damaged_at_end: bool,
    /// All files are in git itself: the Hub announces only their git hash, and sends them without its CDN.
    pub in_git: bool,
    /// The CDN sends one byte more than announced, this many times.
    pub longer: AtomicU32,
    /// The Hub answers 429 with `t=0`, this many times.
    pub limited: AtomicU32,
    /// Target of the redirect of `resolve`, instead of the CDN.
    pub location: Option<String>,
    /// `resolve` answers with another commit.
    pub moved: bool,
    /// Status and `X-Error-Code` of `resolve`.
    pub refused: Option<(u16, &'static str)>,
    /// Token that every request for a file requires. Requests without it get 401 GatedRepo.
    pub gated: Option<&'static str>,
    /// The CDN sends this many bytes of a file, and the rest after `released`.
    pub held_after: Option<usize>,
    pub released: Arc<AtomicBool>,
    /// The LFS batch asks for parts of this many bytes.
    pub part_bytes: Option<usize>,
    /// The storage closes the connection of an upload after this many bytes.
    pub upload_cut_after: Option<usize>,
    /// Number of times that the storage closes the connection.
    pub upload_cuts: AtomicU32,
    /// The storage answers 403 to an upload, this many times.
    pub uploads_expired: AtomicU32,
    /// The storage takes half of each upload, and the rest once this is false.
    pub uploads_held: Arc<AtomicBool>,
    /// Origin of the addresses to upload to, instead of the CDN.
    pub upload_to: Option<String>,
    /// The account has no storage left.
    pub full: bool,
    /// A commit is answered with 503, this many times.
    pub commits_refused: AtomicU32,
    /// A commit is made, and the connection is closed without an answer, this many times.
    pub commits_unanswered: AtomicU32,
}

/// A repository, and the requests for it.
pub struct Fake {
    pub files: BTreeMap<String, Vec<u8>>,
    pub faults: Faults,
    /// Port, method, path, `Range` and `Authorization` of each request.
    pub seen: Mutex<Vec<Seen>>,
    pub cdn: Mutex<String>,
    pub hub: Mutex<String>,
    /// Repositories that accept pushes.
    pub uploads: uploads::Uploads,
    /// Number of file bytes that the storage received.
    pub received_bytes: AtomicU64,
    /// Number of file bytes that were requested from the CDN.
    pub sent_bytes: AtomicU64,
}

#[derive(Debug, Clone)]
pub struct Seen {
    pub cdn: bool,
    pub method: Method,
    pub path: String,
    pub range: Option<String>,
    pub authorization: Option<String>,
}

pub struct Running {
    pub url: String,
    pub fake: Arc<Fake>,
}

/// A model with two shards, and files that a model does not need.
pub fn model() -> BTreeMap<String, Vec<u8>> {
    let index =
        json!({"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}});
    let shard = |seed: u32| (0..200_000u32).map(|at| (at.wrapping_mul(seed) >> 7) as u8).collect::<Vec<u8>>();
    [
        ("config.json", json!({"model_type": "qwen3"}).to_string().into_bytes()),
        ("model.safetensors.index.json", index.to_string().into_bytes()),
        ("model-00001-of-00002.safetensors", shard(2_654_435_761)),
        ("model-00002-of-00002.safetensors", shard(40_503)),
        ("tokenizer.json", b"{}".to_vec()),
        ("additional_chat_templates/tool.jinja", b"{{ messages }}".to_vec()),
        ("pytorch_model.bin", vec![0; 5]),
        ("modeling_evil.py", b"print()".to_vec()),
        ("original/consolidated.00.pth", vec![1; 5]),
        ("README.md", b"# A model".to_vec()),
    ]
    .map(|(path, bytes)| (path.to_owned(), bytes))
    .into()
}

/// Starts the Hub and the CDN.
pub async fn start(files: BTreeMap<String, Vec<u8>>, faults: Faults) -> Running {
    let fake = Arc::new(Fake {
        files,
        faults,
        seen: Mutex::default(),
        cdn: Mutex::default(),
        hub: Mutex::default(),
        uploads: uploads::Uploads::default(),
        received_bytes: AtomicU64::new(0),
        sent_bytes: AtomicU64::new(0),
    });
    let serve = async |router: Router| {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move { axum::serve(listener, router).await });
        format!("http://{address}")
    };
    let cdn = serve(Router::new().fallback(cdn).with_state(fake.clone())).await;
    *fake.cdn.lock().unwrap() = cdn;
    let url = serve(Router::new().fallback(hub).with_state(fake.clone())).await;
    fake.hub.lock().unwrap().clone_from(&url);
    Running { url, fake }
}

impl Running {
    /// Returns a client that may reach this machine and retries without delay.
    pub fn client(&self) -> Hub {
        self.client_with(|_| {})
    }

    pub fn client_with(&self, change: impl FnOnce(&mut HubSettings)) -> Hub {
        let policy = OutgoingPolicy::parse(&["loopback"]).unwrap();
        let client = restricted_client_builder(&policy).build().unwrap();
        let mut settings = HubSettings::new(&self.url, policy).unwrap();
        settings.first_delay = std::time::Duration::from_millis(2);
        change(&mut settings);
        Hub::new(client, settings)
    }

    pub fn seen(&self) -> Vec<Seen> {
        self.fake.seen.lock().unwrap().clone()
    }
}

/// Returns whether the fault applies to this request, and decrements the count.
fn take(left: &AtomicU32) -> bool {
    left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok()
}

fn note(fake: &Fake, cdn: bool, request: &Request) {
    let text = |name| request.headers().get(name).map(|value| value.to_str().unwrap().to_owned());
    let (range, authorization) = (text(header::RANGE), text(header::AUTHORIZATION));
    let path = request.uri().path().to_owned();
    fake.seen.lock().unwrap().push(Seen { cdn, method: request.method().clone(), path, range, authorization });
}

/// Returns the commit of a revision of a repository, and the folder of the files that differ there.
fn variant(repo: &str, revision: &str) -> Option<(&'static str, &'static str)> {
    match (repo, revision) {
        ("fake/tiny" | "fake/rows", "main" | COMMIT) => Some((COMMIT, "")),
        ("fake/tiny", "next" | NEXT) => Some((NEXT, "next/")),
        ("fake/twin", "main" | COMMIT) => Some((COMMIT, "twin/")),
        ("fake/twin", "next" | NEXT) => Some((NEXT, "twin-next/")),
        _ => None,
    }
}

impl Fake {
    /// Returns the files of a variant: each path with its name in `files`.
    fn files_of(&self, folder: &str) -> BTreeMap<&str, &str> {
        let is_of_variant = |path: &str| VARIANTS.iter().any(|folder| path.starts_with(folder));
        let common = self.files.keys().map(String::as_str).filter(|path| !is_of_variant(path));
        let mut files: BTreeMap<&str, &str> = common.map(|path| (path, path)).collect();
        if !folder.is_empty() {
            files.extend(self.files.keys().filter_map(|path| Some((path.strip_prefix(folder)?, path.as_str()))));
        }
        files
    }
}

fn error(status: u16, code: &str) -> Response {
    let message = if code.is_empty() { "Something is wrong." } else { "Access to it is restricted." };
    let headers = [("x-error-code", code), ("x-error-message", message), ("x-request-id", "req-1")];
    (StatusCode::from_u16(status).unwrap(), headers, "").into_response()
}

pub fn git_sha1(bytes: &[u8]) -> String {
    hex::encode(Sha1::new().chain_update(format!("blob {}\0", bytes.len())).chain_update(bytes).finalize())
}

fn sibling(path: &str, bytes: &[u8], in_git: bool) -> Value {
    let mut sibling = json!({"rfilename": path, "blobId": git_sha1(bytes), "size": bytes.len()});
    if bytes.len() > SMALL && !in_git {
        sibling["lfs"] = json!({"sha256": Sha256Digest::of(bytes), "size": bytes.len(), "pointerSize": 134});
    }
    sibling
}

async fn hub(State(fake): State<Arc<Fake>>, request: Request) -> Response {
    note(&fake, false, &request);
    if take(&fake.faults.limited) {
        return (StatusCode::TOO_MANY_REQUESTS, [("ratelimit", "\"api\";r=0;t=0")], "").into_response();
    }
    let path = request.uri().path().to_owned();
    if uploads::is_about_pushes(&path) {
        return uploads::answer(&fake, request).await;
    }
    let has_token = |token: &str| {
        request.headers().get(header::AUTHORIZATION).is_some_and(|given| given == format!("Bearer {token}").as_str())
    };
    // The metadata is public, even for a gated repository.
    if path == "/parquet" {
        return converted(&fake, request.uri().query().unwrap_or_default());
    }
    // Requests for the old names of renamed repositories are redirected on the same host.
    for (old, new) in [(OLD_MODEL, "fake/tiny"), (OLD_TWIN, "fake/twin"), (OLD_DATASET, "fake/rows")] {
        if path.contains(old) {
            let location = request.uri().to_string().replacen(old, new, 1);
            return (StatusCode::TEMPORARY_REDIRECT, [(header::LOCATION, location)], "").into_response();
        }
    }
    let of_api = [("/api/models/", "fake/tiny"), ("/api/models/", "fake/twin"), ("/api/datasets/", "fake/rows")];
    let api = of_api.iter().find_map(|(start, repo)| Some((*repo, path.strip_prefix(start)?.strip_prefix(repo)?)));
    if let Some((repo, rest)) = api {
        return describe(&fake, repo, rest);
    }
    if let Some(token) = fake.faults.gated
        && path.contains("/resolve/")
        && !has_token(token)
    {
        return error(401, "GatedRepo");
    }
    let of_file = ["fake/tiny", "fake/twin", "fake/rows"].iter().find_map(|repo| {
        let start = if *repo == "fake/rows" { "/datasets/" } else { "/" };
        let (commit, path) =
            path.strip_prefix(start)?.strip_prefix(repo)?.strip_prefix("/resolve/")?.split_once('/')?;
        let (commit, folder) = variant(repo, commit).filter(|(known, _)| *known == commit)?;
        Some((commit, folder, path))
    });
    let Some((commit, folder, path)) = of_file else {
        return error(if request.headers().contains_key(header::AUTHORIZATION) { 404 } else { 401 }, "RepoNotFound");
    };
    if let Some((status, code)) = fake.faults.refused {
        return error(status, code);
    }
    let Some(path) = fake.files_of(folder).get(path).copied() else { return error(404, "EntryNotFound") };
    let bytes = &fake.files[path];
    let commit = if fake.faults.moved { "f".repeat(40) } else { commit.to_owned() };
    if bytes.len() <= SMALL || fake.faults.in_git {
        let is_damaged = bytes.len() > SMALL && take(&fake.faults.damaged);
        let headers = [("etag", format!("\"{}\"", git_sha1(bytes))), ("x-repo-commit", commit)];
        let mut body = if request.method() == Method::HEAD { Vec::new() } else { bytes.clone() };
        if let Some(first) = body.first_mut().filter(|_| is_damaged) {
            *first ^= 1;
        }
        let length = [(header::CONTENT_LENGTH, bytes.len().to_string())];
        return (headers, length, Body::from(body)).into_response();
    }
    let location =
        fake.faults.location.clone().unwrap_or_else(|| format!("{}/cdn/{path}?signature=x", fake.cdn.lock().unwrap()));
    let headers = [
        ("location", location),
        ("x-repo-commit", commit),
        ("x-linked-etag", format!("\"{}\"", Sha256Digest::of(bytes))),
        ("x-linked-size", bytes.len().to_string()),
        ("accept-ranges", "bytes".to_owned()),
    ];
    (StatusCode::FOUND, headers, "").into_response()
}

/// Returns the answer of the Hub's API about a repository.
fn describe(fake: &Fake, repo: &str, rest: &str) -> Response {
    let gated = fake.faults.gated.is_some();
    if rest.starts_with("/tree/") {
        let entry = |(path, name): (&str, &str)| {
            let bytes = &fake.files[name];
            let mut entry = json!({"type": "file", "path": path, "size": bytes.len(), "oid": git_sha1(bytes)});
            if bytes.len() > SMALL {
                entry["lfs"] = json!({"oid": Sha256Digest::of(bytes), "size": bytes.len(), "pointerSize": 134});
            }
            entry
        };
        return axum::Json(fake.files_of("").into_iter().map(entry).collect::<Vec<_>>()).into_response();
    }
    let is_converted = rest == "/revision/refs%2Fconvert%2Fparquet";
    let revision = if rest.is_empty() || is_converted { Some("main") } else { rest.strip_prefix("/revision/") };
    let Some((commit, folder)) = revision.and_then(|revision| variant(repo, revision)) else {
        return error(404, "RevisionNotFound");
    };
    let files = fake.files_of(folder).into_iter().filter(|(path, _)| path.starts_with(CONVERTED) == is_converted);
    let siblings: Vec<Value> = files.map(|(path, name)| sibling(path, &fake.files[name], fake.faults.in_git)).collect();
    description(repo, commit, &siblings, gated)
}

/// Returns the answer of the dataset server: the files in [`CONVERTED`], by configuration and split.
fn converted(fake: &Fake, query: &str) -> Response {
    if query != "dataset=fake%2Frows" {
        return error(404, "RepoNotFound");
    }
    let files = fake.files.keys().filter_map(|path| path.strip_prefix(CONVERTED)).map(|path| {
        let mut parts = path.split('/');
        let (config, split) = (parts.next().unwrap(), parts.next().unwrap());
        let url = format!("https://any.example/datasets/fake/rows/resolve/refs%2Fconvert%2Fparquet/{CONVERTED}{path}");
        json!({"dataset": "fake/rows", "config": config, "split": split, "url": url, "filename": "0000.parquet", "size": 1})
    });
    axum::Json(json!({"parquet_files": files.collect::<Vec<_>>(), "partial": false})).into_response()
}

fn description(id: &str, commit: &str, siblings: &[Value], gated: bool) -> Response {
    let gated = if gated { json!("manual") } else { json!(false) };
    let document = json!({"id": id, "modelId": id, "sha": commit, "private": false, "gated": gated,
                          "disabled": false, "tags": [], "downloads": 0, "siblings": siblings});
    axum::Json(document).into_response()
}

async fn cdn(State(fake): State<Arc<Fake>>, request: Request) -> Response {
    note(&fake, true, &request);
    if request.uri().path().starts_with("/lfs/") {
        return uploads::storage(&fake, request).await;
    }
    let faults = &fake.faults;
    if take(&faults.unavailable) {
        return (StatusCode::SERVICE_UNAVAILABLE, "<html>an error page</html>").into_response();
    }
    let mut bytes = fake.files[request.uri().path().strip_prefix("/cdn/").unwrap()].clone();
    let whole = bytes.len();
    if take(&faults.damaged) {
        bytes[0] ^= 1;
    }
    if faults.damaged_at_end {
        bytes[whole - 1] ^= 1;
    }
    if take(&faults.longer) {
        bytes.push(0);
    }
    let asked = request.headers().get(header::RANGE).map(|range| range.to_str().unwrap());
    let asked = asked.and_then(|range| range.strip_prefix("bytes=")?.split_once('-'));
    let asked = asked.and_then(|(first, last)| Some((first.parse::<usize>().ok()?, last.parse::<usize>().ok())));
    let (status, headers, mut bytes) = match asked {
        Some(_) if faults.forbids_ranges => {
            return (StatusCode::FORBIDDEN, "Auth failed: invalid range").into_response();
        }
        Some((first, _)) if first >= whole => return StatusCode::RANGE_NOT_SATISFIABLE.into_response(),
        Some((first, last)) if !faults.ignores_ranges => {
            let first = first + usize::from(faults.shifts_ranges);
            let last = last.unwrap_or(whole).min(whole - 1);
            let range = format!("bytes {first}-{last}/{whole}");
            let headers: HeaderMap = [(header::CONTENT_RANGE, range.parse().unwrap())].into_iter().collect();
            bytes.truncate(bytes.len().min(last + 1));
            (StatusCode::PARTIAL_CONTENT, headers, bytes.split_off(first))
        }
        _ => (StatusCode::OK, HeaderMap::new(), bytes),
    };
    fake.sent_bytes.fetch_add(bytes.len() as u64, Ordering::SeqCst);
    if let Some(after) = faults.held_after.filter(|after| *after < bytes.len()) {
        let rest = Bytes::from(bytes.split_off(after));
        let released = faults.released.clone();
        let rest = futures::stream::once(async move {
            while !released.load(Ordering::SeqCst) {
                tokio::time::sleep(std::time::Duration::from_millis(10)).await;
            }
            Ok::<_, std::io::Error>(rest)
        });
        let first = futures::stream::once(async { Ok(Bytes::from(bytes)) });
        return (status, headers, Body::from_stream(futures::StreamExt::chain(first, rest))).into_response();
    }
    let cut = faults.cut_after.filter(|_| take(&faults.cuts));
    let body = match cut {
        None => Body::from(bytes),
        Some(after) => {
            let first = Bytes::copy_from_slice(&bytes[..after.min(bytes.len())]);
            // The pause allows the sent bytes to arrive before the connection breaks.
            let breaks = async {
                tokio::time::sleep(std::time::Duration::from_millis(10)).await;
                Err(std::io::Error::other("cut"))
            };
            let first = futures::stream::once(async { Ok(first) });
            Body::from_stream(futures::StreamExt::chain(first, futures::stream::once(breaks)))
        }
    };
    (status, headers, body).into_response()
}
