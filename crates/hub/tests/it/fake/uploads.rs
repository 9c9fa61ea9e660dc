//! The part of the fake Hub that accepts pushes: repositories of the account `ann`, LFS objects, and commits.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, PoisonError};

use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use futures::StreamExt;
use rlood_types::digest::Sha256Digest;
use serde_json::{Value, json};
use sha1::{Digest, Sha1};

use super::{Fake, error, git_sha1, take};

/// Token of the account `ann`, which may write.
pub const WRITE_TOKEN: &str = "hf_write_and_secret";
/// Token of the account `ann`, which may only read.
pub const READ_TOKEN: &str = "hf_read_and_secret";
/// A public repository of another account.
pub const OTHERS: &str = "bob/taken";

#[derive(Debug, Clone, PartialEq)]
pub struct Stored {
    pub bytes: Vec<u8>,
    pub lfs: bool,
}

#[derive(Debug, Clone, Default)]
pub struct Commit {
    pub message: String,
    pub files: BTreeMap<String, Stored>,
}

#[derive(Debug, Clone, Default)]
pub struct PushedRepo {
    pub private: bool,
    /// Commits by branch.
    pub branches: BTreeMap<String, String>,
    pub commits: BTreeMap<String, Commit>,
}

#[derive(Debug)]
pub struct Uploads {
    pub repos: Mutex<BTreeMap<String, PushedRepo>>,
    /// LFS objects by hash, also those that no commit names yet.
    pub objects: Mutex<BTreeMap<String, Vec<u8>>>,
    parts: Mutex<BTreeMap<(String, usize), Vec<u8>>>,
}

impl Default for Uploads {
    fn default() -> Self {
        let uploads = Self { repos: Mutex::default(), objects: Mutex::default(), parts: Mutex::default() };
        uploads.create(OTHERS, false);
        uploads
    }
}

impl Uploads {
    fn create(&self, id: &str, private: bool) {
        let mut repo = PushedRepo { private, ..PushedRepo::default() };
        let rules = Stored { bytes: b"*.safetensors filter=lfs\n".to_vec(), lfs: false };
        let commit =
            Commit { message: "initial commit".to_owned(), files: [(".gitattributes".to_owned(), rules)].into() };
        repo.add("main", commit);
        lock(&self.repos).insert(id.to_owned(), repo);
    }

    /// Returns the files of a branch, without `.gitattributes`.
    pub fn files(&self, id: &str, branch: &str) -> BTreeMap<String, Vec<u8>> {
        let repos = lock(&self.repos);
        let commit = repos[id].at(branch).unwrap().1;
        let files = commit.files.iter().filter(|(path, _)| *path != ".gitattributes");
        files.map(|(path, stored)| (path.clone(), stored.bytes.clone())).collect()
    }

    /// Number of commits of a repository, with the first one of its creation.
    pub fn commits(&self, id: &str) -> usize {
        lock(&self.repos)[id].commits.len()
    }
}

impl PushedRepo {
    fn at(&self, revision: &str) -> Option<(&str, &Commit)> {
        let id = self.branches.get(revision).map_or(revision, String::as_str);
        self.commits.get_key_value(id).map(|(id, commit)| (id.as_str(), commit))
    }

    fn add(&mut self, branch: &str, commit: Commit) -> String {
        let content = format!("{branch} {} {commit:?}", self.commits.len());
        let id = hex::encode(Sha1::digest(content));
        self.branches.insert(branch.to_owned(), id.clone());
        self.commits.insert(id.clone(), commit);
        id
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A connection that is closed on purpose leaves its locks poisoned.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Closes the connection without an answer.
fn hang_up() -> ! {
    std::panic::resume_unwind(Box::new("the fake hub closes a connection"))
}

/// A refused request: status, `X-Error-Code` (may be empty) and message.
struct Refused(u16, &'static str, String);

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        let Refused(status, code, message) = self;
        if !code.is_empty() {
            return error(status, code);
        }
        (StatusCode::from_u16(status).unwrap(), Json(json!({"error": message}))).into_response()
    }
}

fn says(status: u16, message: &str) -> Refused {
    Refused(status, "", message.to_owned())
}

fn coded(status: u16, code: &'static str) -> Refused {
    Refused(status, code, String::new())
}

/// Returns whether a request belongs to this part of the fake Hub.
pub fn is_about_pushes(path: &str) -> bool {
    let of_account = |path: &str| path.starts_with("ann/") || path.starts_with("bob/");
    let path = path.trim_start_matches('/');
    matches!(path, "api/repos/create" | "api/validate-yaml")
        || of_account(path.strip_prefix("api/models/").or(path.strip_prefix("api/datasets/")).unwrap_or(path))
}

/// Who sends a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Who {
    Anonymous,
    Reader,
    Writer,
}

fn who(headers: &HeaderMap) -> Result<Who, Refused> {
    let Some(given) = headers.get(header::AUTHORIZATION) else { return Ok(Who::Anonymous) };
    let token = given.to_str().unwrap().strip_prefix("Bearer ").unwrap();
    match token {
        WRITE_TOKEN => Ok(Who::Writer),
        READ_TOKEN => Ok(Who::Reader),
        _ => Err(says(401, "Invalid credentials in Authorization header")),
    }
}

fn may_write(who: Who, id: &str) -> Result<(), Refused> {
    match who {
        Who::Writer if id.starts_with("ann/") => Ok(()),
        Who::Writer => Err(says(403, "Forbidden: you are not the owner of this repository")),
        Who::Reader => Err(says(403, "You must use a write token to upload to a repository.")),
        Who::Anonymous => Err(says(401, "Unauthorized")),
    }
}

/// Answers a request about repositories that accept pushes.
pub async fn answer(fake: &Fake, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let path = parts.uri.path().trim_start_matches('/').to_owned();
    let body = axum::body::to_bytes(body, usize::MAX).await.unwrap();
    let answered = match who(&parts.headers) {
        Ok(who) => dispatch(fake, who, &parts.method, &path, &parts.headers, &body),
        Err(refused) => Err(refused),
    };
    answered.unwrap_or_else(Refused::into_response)
}

fn dispatch(
    fake: &Fake,
    who: Who,
    method: &Method,
    path: &str,
    headers: &HeaderMap,
    body: &Bytes,
) -> Result<Response, Refused> {
    let document = || serde_json::from_slice::<Value>(body).unwrap();
    match path {
        "api/repos/create" => return create(fake, who, &document()),
        "api/validate-yaml" => return Ok(Json(json!({"errors": [], "warnings": []})).into_response()),
        _ => {}
    }
    if let Some((id, operation)) = path.split_once(".git/info/lfs/objects/") {
        may_write(who, id)?;
        if operation == "verify" {
            return Ok(verify(fake, &document()));
        }
        assert_eq!(headers[header::CONTENT_TYPE], "application/vnd.git-lfs+json");
        return batch(fake, id, &document());
    }
    let path = path.strip_prefix("api/models/").ok_or(coded(404, "RepoNotFound")).or_else(|none| {
        // A file: {id}/resolve/{revision}/{path}.
        if path.contains("/resolve/") { Ok(path) } else { Err(none) }
    })?;
    let mut words = path.splitn(3, '/');
    let id = format!("{}/{}", words.next().unwrap(), words.next().unwrap());
    let rest = words.next().unwrap_or_default();
    let (operation, revision) = rest.split_once('/').unwrap_or((rest, "main"));
    let mut repos = lock(&fake.uploads.repos);
    let repo = repos.get_mut(&id).filter(|repo| !repo.private || who != Who::Anonymous);
    let repo = repo.ok_or_else(|| coded(if who == Who::Anonymous { 401 } else { 404 }, "RepoNotFound"))?;
    if operation == "resolve" {
        return resolve(fake, repo, revision, method);
    }
    let revision = revision.replace("%2F", "/");
    match operation {
        "" | "revision" => describe(&id, repo, &revision),
        "tree" => tree(repo, &revision),
        "branch" => {
            may_write(who, &id)?;
            branch(repo, &revision)
        }
        "preupload" => {
            may_write(who, &id)?;
            preupload(repo, &revision, &document())
        }
        "commit" => {
            may_write(who, &id)?;
            assert_eq!(headers[header::CONTENT_TYPE], "application/x-ndjson");
            commit(fake, &id, repo, &revision, body)
        }
        other => panic!("the fake hub has no {method} {other}"),
    }
}

fn create(fake: &Fake, who: Who, body: &Value) -> Result<Response, Refused> {
    let account = body["organization"].as_str().unwrap_or("ann");
    let id = format!("{account}/{}", body["name"].as_str().unwrap());
    if account != "ann" && who == Who::Writer {
        return Err(says(
            403,
            &format!("You don't have the rights to create a model under the namespace \"{account}\""),
        ));
    }
    may_write(who, &id)?;
    let url = format!("{}/{id}", lock(&fake.hub));
    if lock(&fake.uploads.repos).contains_key(&id) {
        let document = json!({"error": "You already created this model repo", "url": url});
        return Ok((StatusCode::CONFLICT, Json(document)).into_response());
    }
    fake.uploads.create(&id, body["private"].as_bool().unwrap_or(false));
    Ok(Json(json!({"url": url, "name": id, "id": id})).into_response())
}

fn described(path: &str, stored: &Stored) -> Value {
    let mut file = json!({"rfilename": path, "blobId": git_sha1(&stored.bytes), "size": stored.bytes.len()});
    if stored.lfs {
        let sha256 = Sha256Digest::of(&stored.bytes);
        file["lfs"] = json!({"sha256": sha256, "size": stored.bytes.len(), "pointerSize": 134});
    }
    file
}

fn describe(id: &str, repo: &PushedRepo, revision: &str) -> Result<Response, Refused> {
    let (commit, content) = repo.at(revision).ok_or_else(|| coded(404, "RevisionNotFound"))?;
    let siblings: Vec<Value> = content.files.iter().map(|(path, stored)| described(path, stored)).collect();
    let document = json!({"id": id, "modelId": id, "sha": commit, "private": repo.private, "gated": false,
                          "disabled": false, "tags": [], "downloads": 0, "siblings": siblings});
    Ok(Json(document).into_response())
}

fn tree(repo: &PushedRepo, revision: &str) -> Result<Response, Refused> {
    let revision = revision.split('/').next().unwrap();
    let (_, content) = repo.at(revision).ok_or_else(|| coded(404, "RevisionNotFound"))?;
    let entry = |(path, stored): (&String, &Stored)| {
        let size = stored.bytes.len();
        let mut entry = json!({"type": "file", "path": path, "size": size, "oid": git_sha1(&stored.bytes)});
        if stored.lfs {
            entry["lfs"] = json!({"oid": Sha256Digest::of(&stored.bytes), "size": size, "pointerSize": 134});
        }
        entry
    };
    Ok(Json(content.files.iter().map(entry).collect::<Vec<_>>()).into_response())
}

fn branch(repo: &mut PushedRepo, name: &str) -> Result<Response, Refused> {
    if repo.branches.contains_key(name) {
        return Err(says(409, "Reference already exists"));
    }
    let main = repo.branches["main"].clone();
    repo.branches.insert(name.to_owned(), main);
    Ok(StatusCode::CREATED.into_response())
}

/// Safetensors and everything beyond 10 kB become LFS objects.
fn preupload(repo: &PushedRepo, revision: &str, body: &Value) -> Result<Response, Refused> {
    let (_, content) = repo.at(revision).ok_or_else(|| coded(404, "RevisionNotFound"))?;
    let mode = |file: &Value| {
        let (path, size) = (file["path"].as_str().unwrap(), file["size"].as_u64().unwrap());
        let sample = STANDARD.decode(file["sample"].as_str().unwrap()).unwrap();
        assert_eq!(sample.len() as u64, size.min(512), "{path}");
        let lfs = path.ends_with(".safetensors") || size > super::SMALL as u64;
        let oid = content.files.get(path).map(|stored| match stored.lfs {
            true => Sha256Digest::of(&stored.bytes).to_string(),
            false => git_sha1(&stored.bytes),
        });
        let mode = if lfs { "lfs" } else { "regular" };
        json!({"path": path, "uploadMode": mode, "shouldIgnore": path.ends_with(".ignored"), "oid": oid})
    };
    let files: Vec<Value> = body["files"].as_array().unwrap().iter().map(mode).collect();
    Ok(Json(json!({"files": files, "commitOid": "0".repeat(40)})).into_response())
}

fn batch(fake: &Fake, id: &str, body: &Value) -> Result<Response, Refused> {
    if !lock(&fake.uploads.repos).contains_key(id) {
        return Err(coded(404, "RepoNotFound"));
    }
    assert_eq!((&body["operation"], &body["hash_algo"]), (&json!("upload"), &json!("sha256")));
    let (hub, storage) = (lock(&fake.hub).clone(), lock(&fake.cdn).clone());
    let objects = body["objects"].as_array().unwrap().iter().map(|object| {
        let (oid, size) = (object["oid"].as_str().unwrap(), object["size"].as_u64().unwrap() as usize);
        let mut answer = json!({"oid": oid, "size": size});
        if fake.faults.full {
            let message = "Private repository storage limit reached, please upgrade your plan";
            answer["error"] = json!({"code": 403, "message": message});
            return answer;
        }
        if lock(&fake.uploads.objects).contains_key(oid) {
            return answer;
        }
        let verify = json!({"href": format!("{hub}/{id}.git/info/lfs/objects/verify"), "header": {}});
        let base = fake.faults.upload_to.clone().unwrap_or(storage.clone());
        let upload = match fake.faults.part_bytes {
            None => json!({"href": format!("{base}/lfs/{oid}?signature=x")}),
            Some(part_bytes) => {
                let mut header = json!({"chunk_size": part_bytes.to_string()});
                for part in 1..=size.div_ceil(part_bytes) {
                    header[part.to_string()] = format!("{base}/lfs/{oid}/{part}?signature=x").into();
                }
                json!({"href": format!("{base}/lfs/{oid}/complete?signature=x"), "header": header})
            }
        };
        answer["actions"] = json!({"upload": upload, "verify": verify});
        answer
    });
    let transfer = if fake.faults.part_bytes.is_some() { "multipart" } else { "basic" };
    Ok(Json(json!({"transfer": transfer, "objects": objects.collect::<Vec<_>>()})).into_response())
}

/// Checks that an uploaded object has the announced size.
fn verify(fake: &Fake, body: &Value) -> Response {
    let objects = lock(&fake.uploads.objects);
    match objects.get(body["oid"].as_str().unwrap()) {
        Some(bytes) if Some(bytes.len() as u64) == body["size"].as_u64() => StatusCode::OK.into_response(),
        _ => says(404, "the object does not exist").into_response(),
    }
}

fn commit(fake: &Fake, id: &str, repo: &mut PushedRepo, revision: &str, body: &Bytes) -> Result<Response, Refused> {
    if take(&fake.faults.commits_refused) {
        return Err(says(503, "try again"));
    }
    let (_, content) = repo.at(revision).ok_or_else(|| coded(404, "RevisionNotFound"))?;
    let mut content = content.clone();
    let lines = std::str::from_utf8(body).unwrap().lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    for (number, line) in lines.enumerate() {
        let (key, value) = (line["key"].as_str().unwrap(), &line["value"]);
        assert_eq!(key == "header", number == 0, "the header comes first");
        let path = value["path"].as_str().unwrap_or_default().to_owned();
        match key {
            "header" => content.message = value["summary"].as_str().unwrap().to_owned(),
            "file" => {
                assert_eq!(value["encoding"], "base64");
                let bytes = STANDARD.decode(value["content"].as_str().unwrap()).unwrap();
                content.files.insert(path, Stored { bytes, lfs: false });
            }
            "lfsFile" => {
                assert_eq!(value["algo"], "sha256");
                let objects = lock(&fake.uploads.objects);
                let bytes = objects.get(value["oid"].as_str().unwrap());
                let bytes = bytes.ok_or_else(|| says(400, "the LFS object does not exist"))?.clone();
                assert_eq!(value["size"], bytes.len());
                content.files.insert(path, Stored { bytes, lfs: true });
            }
            "deletedFile" => {
                content.files.remove(&path).ok_or_else(|| coded(404, "EntryNotFound"))?;
            }
            other => panic!("the fake hub has no {other} in a commit"),
        }
    }
    let oid = repo.add(revision, content);
    if take(&fake.faults.commits_unanswered) {
        hang_up();
    }
    let url = format!("{}/{id}/commit/{oid}", lock(&fake.hub));
    Ok(Json(json!({"success": true, "commitOid": oid, "commitUrl": url, "hookOutput": ""})).into_response())
}

fn resolve(fake: &Fake, repo: &PushedRepo, rest: &str, method: &Method) -> Result<Response, Refused> {
    let (revision, path) = rest.split_once('/').unwrap();
    let (commit, content) = repo.at(revision).ok_or_else(|| coded(404, "RevisionNotFound"))?;
    let stored = content.files.get(path).ok_or_else(|| coded(404, "EntryNotFound"))?;
    let length = stored.bytes.len().to_string();
    if stored.lfs {
        let sha256 = Sha256Digest::of(&stored.bytes).to_string();
        let headers = [
            ("location", format!("{}/lfs/{sha256}?signature=x", lock(&fake.cdn))),
            ("x-repo-commit", commit.to_owned()),
            ("x-linked-etag", format!("\"{sha256}\"")),
            ("x-linked-size", length),
        ];
        return Ok((StatusCode::FOUND, headers, "").into_response());
    }
    let headers = [
        ("etag", format!("\"{}\"", git_sha1(&stored.bytes))),
        ("x-repo-commit", commit.to_owned()),
        ("content-length", length),
    ];
    let body = if method == Method::HEAD { Vec::new() } else { stored.bytes.clone() };
    Ok((headers, Body::from(body)).into_response())
}

/// The storage: takes objects and parts at signed addresses, and gives objects.
pub async fn storage(fake: &Fake, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let mut words = parts.uri.path().trim_start_matches("/lfs/").split('/');
    let (oid, part) = (words.next().unwrap().to_owned(), words.next().map(str::to_owned));
    if parts.headers.contains_key(header::AUTHORIZATION) || parts.uri.query() != Some("signature=x") {
        return says(400, "Only one auth mechanism allowed").into_response();
    }
    if parts.method == Method::GET {
        return lock(&fake.uploads.objects)[&oid].clone().into_response();
    }
    if parts.method == Method::POST {
        let body = axum::body::to_bytes(body, usize::MAX).await.unwrap();
        return complete(fake, &oid, &serde_json::from_slice(&body).unwrap());
    }
    let Some(length) = parts.headers.get(header::CONTENT_LENGTH) else {
        return says(501, "A header you provided implies functionality that is not implemented: Transfer-Encoding")
            .into_response();
    };
    let length: usize = length.to_str().unwrap().parse().unwrap();
    if take(&fake.faults.uploads_expired) {
        return says(403, "Request has expired").into_response();
    }
    let cut = fake.faults.upload_cut_after.filter(|after| *after < length && take(&fake.faults.upload_cuts));
    let mut bytes = Vec::new();
    let mut pieces = body.into_data_stream();
    while let Some(piece) = pieces.next().await {
        let Ok(piece) = piece else { return says(400, "the request ended early").into_response() };
        bytes.extend_from_slice(&piece);
        fake.received_bytes.fetch_add(piece.len() as u64, Ordering::SeqCst);
        if cut.is_some_and(|after| bytes.len() >= after) {
            hang_up();
        }
        while fake.faults.uploads_held.load(Ordering::SeqCst) && bytes.len() >= length / 2 {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    }
    assert_eq!(bytes.len(), length);
    let Some(part) = part else { return keep(fake, oid, bytes) };
    let etag = format!("\"{}\"", hex::encode(Sha1::digest(&bytes)));
    lock(&fake.uploads.parts).insert((oid, part.parse().unwrap()), bytes);
    ([(header::ETAG, etag)], "").into_response()
}

fn complete(fake: &Fake, oid: &str, body: &Value) -> Response {
    assert_eq!(body["oid"], oid);
    let mut whole = Vec::new();
    for (number, part) in body["parts"].as_array().unwrap().iter().enumerate() {
        assert_eq!(part["partNumber"], number + 1);
        let bytes = lock(&fake.uploads.parts)[&(oid.to_owned(), number + 1)].clone();
        assert_eq!(part["etag"], format!("\"{}\"", hex::encode(Sha1::digest(&bytes))));
        whole.extend(bytes);
    }
    keep(fake, oid.to_owned(), whole)
}

fn keep(fake: &Fake, oid: String, bytes: Vec<u8>) -> Response {
    if Sha256Digest::of(&bytes).to_string() != oid {
        return says(400, "the bytes have another hash").into_response();
    }
    lock(&fake.uploads.objects).insert(oid, bytes);
    StatusCode::OK.into_response()
}
