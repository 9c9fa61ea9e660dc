//! Uploads one file as a Git LFS object: asks the Hub where to, sends the bytes there, whole or in parts, and lets the Hub verify it.

use std::collections::BTreeMap;
use std::io::SeekFrom;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::stream::{self, Stream};
use reqwest::header::{CONTENT_LENGTH, ETAG, HeaderMap, HeaderName, HeaderValue};
use reqwest::{Body, Response};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncSeekExt};
use url::Url;

use crate::error::HubError;
use crate::http::{Attempts, Failed, Hub, host_of, text, with_causes};
use crate::id::Repo;
use crate::progress::Progress;
use crate::push::{PushContent, PushFile, understood};
use crate::write::{ANSWER_TIMEOUT, JSON, LFS, of_write};

/// Number of bytes that are read and sent at once.
const PIECE_BYTES: u64 = 256 << 10;
/// Maximum time in which the storage accepts no byte.
const STALL_TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Deserialize)]
struct Batch {
    objects: Vec<Object>,
}

#[derive(Deserialize)]
struct Object {
    /// Absent if the Hub has the object already.
    #[serde(default)]
    actions: Option<Actions>,
    #[serde(default)]
    error: Option<ObjectError>,
}

#[derive(Deserialize)]
struct Actions {
    #[serde(default)]
    upload: Option<Action>,
    #[serde(default)]
    verify: Option<Action>,
}

#[derive(Deserialize)]
struct Action {
    href: String,
    #[serde(default)]
    header: Option<BTreeMap<String, Value>>,
}

#[derive(Deserialize)]
struct ObjectError {
    code: u16,
    message: String,
}

/// Bytes of one upload that were handed to the connection. When it is dropped without [`Sent::keep`], they no longer count.
struct Sent<'p> {
    progress: &'p Progress,
    bytes: Arc<AtomicU64>,
    counted: u64,
    is_kept: bool,
}

impl<'p> Sent<'p> {
    fn new(progress: &'p Progress) -> Sent<'p> {
        Sent { progress, bytes: Arc::default(), counted: 0, is_kept: false }
    }

    /// Adds the bytes that were sent since the last call to the progress; returns whether there were any.
    fn count(&mut self) -> bool {
        let sent = self.bytes.load(Ordering::Relaxed);
        self.progress.moved(self.counted, sent);
        std::mem::replace(&mut self.counted, sent) != sent
    }

    fn keep(mut self) {
        self.count();
        self.is_kept = true;
    }
}

impl Drop for Sent<'_> {
    fn drop(&mut self) {
        if !self.is_kept {
            self.progress.moved(self.counted, 0);
        }
    }
}

impl Hub {
    /// Uploads a file unless the Hub has the object already.
    pub(crate) async fn upload(&self, repo: &Repo, file: &PushFile, progress: &Progress) -> Result<(), HubError> {
        let mut attempts = Attempts::new(self.settings.first_delay);
        loop {
            let mut parts_done = 0;
            // Each attempt asks again where to upload to, because such addresses expire.
            match self.try_upload(repo, file, progress, &mut parts_done).await {
                Ok(()) => return Ok(()),
                Err(failed) => {
                    // The parts of an attempt count for nothing in the next one.
                    progress.moved(parts_done, 0);
                    attempts.pause_after(failed).await.map_err(|error| of_write(error, repo, true))?;
                }
            }
        }
    }

    async fn try_upload(
        &self,
        repo: &Repo,
        file: &PushFile,
        progress: &Progress,
        parts_done: &mut u64,
    ) -> Result<(), Failed> {
        let (oid, size) = (file.sha256(), file.size_bytes());
        let Some(Actions { upload: Some(upload), verify }) = self.batch(repo, file).await? else {
            progress.moved(0, size);
            return Ok(());
        };
        let to = self.target(&upload.href)?;
        let header = upload.header.unwrap_or_default();
        match header.get("chunk_size").and_then(whole_number) {
            None => {
                let mut sent = Sent::new(progress);
                self.put(file, &to, action_headers(&header), (0, size), &mut sent).await?;
                sent.keep();
                *parts_done = size;
            }
            Some(part_bytes) => {
                let parts = self.put_parts(file, &header, part_bytes, progress, parts_done).await?;
                let complete = json!({"oid": oid, "parts": parts}).to_string().into_bytes();
                self.post(repo, &to, LFS, complete).await?;
            }
        }
        if let Some(verify) = verify {
            let url = self.target(&verify.href)?;
            self.post(repo, &url, JSON, json!({"oid": oid, "size": size}).to_string().into_bytes()).await?;
        }
        Ok(())
    }

    /// Asks where a file is uploaded to; `None` if the Hub has it.
    async fn batch(&self, repo: &Repo, file: &PushFile) -> Result<Option<Actions>, Failed> {
        let mut segments: Vec<String> = repo.id().split('/').map(str::to_owned).collect();
        if let Some(name) = segments.last_mut() {
            name.push_str(".git");
        }
        let operation = ["info", "lfs", "objects", "batch"];
        let url = self.url(segments.iter().map(String::as_str).chain(operation))?;
        let body = json!({
            "operation": "upload",
            "transfers": ["basic", "multipart"],
            "objects": [{"oid": file.sha256(), "size": file.size_bytes()}],
            "hash_algo": "sha256",
            "ref": {"name": repo.revision()},
        });
        let answer = self.post(repo, &url, LFS, body.to_string().into_bytes()).await?;
        let Batch { objects } = understood("the hub's answer to the LFS batch", &answer.body)?;
        let object = objects.into_iter().next();
        let object = object.ok_or_else(|| HubError::NotUnderstood("the LFS batch has no object".to_owned()))?;
        match object.error {
            Some(ObjectError { code: status, message }) => {
                let detail = message.chars().filter(|c| !c.is_control()).take(300).collect();
                Err(HubError::Refused { status, detail }.into())
            }
            None => Ok(object.actions),
        }
    }

    /// Returns an address that the Hub names, if the policy permits it.
    fn target(&self, href: &str) -> Result<Url, HubError> {
        self.follow(&self.settings.endpoint, Some(href))
    }

    /// Uploads a file in parts, one after another. Returns the parts for the request that puts them together.
    async fn put_parts(
        &self,
        file: &PushFile,
        header: &BTreeMap<String, Value>,
        part_bytes: u64,
        progress: &Progress,
        parts_done: &mut u64,
    ) -> Result<Vec<Value>, Failed> {
        let size = file.size_bytes();
        let mut numbered: Vec<(u64, &str)> =
            header.iter().filter_map(|(number, url)| Some((number.parse().ok()?, url.as_str()?))).collect();
        numbered.sort_unstable();
        if part_bytes == 0 || numbered.len() as u64 != size.div_ceil(part_bytes) {
            let why = format!("the LFS batch has {} parts of {part_bytes} bytes for {size} bytes", numbered.len());
            return Err(HubError::NotUnderstood(why).into());
        }
        let mut parts = Vec::with_capacity(numbered.len());
        let mut from = 0;
        for (number, url) in numbered {
            let url = self.target(url)?;
            let length = part_bytes.min(size - from);
            let etag = self.put_part(file, &url, (from, length), progress).await?;
            *parts_done += length;
            from += length;
            parts.push(json!({"partNumber": number, "etag": etag}));
        }
        Ok(parts)
    }

    /// Uploads one part, and repeats it at the same address after errors that may pass. Returns its ETag.
    async fn put_part(
        &self,
        file: &PushFile,
        url: &Url,
        range: (u64, u64),
        progress: &Progress,
    ) -> Result<String, Failed> {
        let mut attempts = Attempts::new(self.settings.first_delay);
        loop {
            let mut sent = Sent::new(progress);
            match self.put(file, url, HeaderMap::new(), range, &mut sent).await {
                Ok(response) => {
                    sent.keep();
                    let etag = text(response.headers(), ETAG.as_str()).filter(|etag| !etag.is_empty());
                    let missing = || HubError::NotUnderstood("the storage sent no ETag of a part".to_owned());
                    return Ok(etag.ok_or_else(missing)?.to_owned());
                }
                Err(failed) => attempts.pause_or_return(failed).await?,
            }
        }
    }

    /// Sends `(from, length)` of a file to an address of the storage. The token is not sent.
    async fn put(
        &self,
        file: &PushFile,
        url: &Url,
        headers: HeaderMap,
        (from, length): (u64, u64),
        sent: &mut Sent<'_>,
    ) -> Result<Response, Failed> {
        let body = body(file, from, length, sent.bytes.clone()).await?;
        let request = self.client().put(url.clone()).headers(headers).header(CONTENT_LENGTH, length).body(body);
        let mut sending = std::pin::pin!(request.send());
        let mut quiet = Duration::ZERO;
        let tick = Duration::from_millis(500);
        let answered = loop {
            tokio::select! {
                answered = &mut sending => break answered,
                () = tokio::time::sleep(tick) => {}
            }
            quiet = if sent.count() { Duration::ZERO } else { quiet + tick };
            let is_complete = sent.counted >= length;
            if quiet > if is_complete { ANSWER_TIMEOUT } else { STALL_TIMEOUT } {
                let waited = format!("the storage accepted no byte for {} s", quiet.as_secs());
                return Err(Failed::transient(url, waited));
            }
        };
        let response = answered.map_err(|error| Failed::transient(url, with_causes(&error.without_url())))?;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let detail = format!("the storage answered with status {status}");
        // 403: the address has expired; the next attempt gets a new one.
        match status.is_server_error() || matches!(status.as_u16(), 400 | 403 | 404 | 408 | 410 | 429) {
            true => Err(Failed::transient(url, detail)),
            false => {
                Err(HubError::Refused { status: status.as_u16(), detail: format!("{}: {detail}", host_of(url)) }.into())
            }
        }
    }
}

/// Returns the headers that the LFS batch asks to send to the storage.
fn action_headers(header: &BTreeMap<String, Value>) -> HeaderMap {
    let pair = |(name, value): (&String, &Value)| {
        let value = HeaderValue::from_str(value.as_str()?).ok()?;
        Some((HeaderName::try_from(name).ok()?, value)).filter(|(name, _)| *name != CONTENT_LENGTH)
    };
    header.iter().filter_map(pair).collect()
}

/// Reads a number that the Hub sends as a number or as text.
fn whole_number(value: &Value) -> Option<u64> {
    value.as_u64().or_else(|| value.as_str()?.parse().ok())
}

/// Returns a request body with a range of a file, and counts the bytes as they are taken.
async fn body(file: &PushFile, from: u64, length: u64, sent: Arc<AtomicU64>) -> Result<Body, HubError> {
    let path = match &file.content {
        PushContent::Bytes(bytes) => {
            let taken = bytes.iter().skip(usize::try_from(from).unwrap_or(usize::MAX));
            let taken: Vec<u8> = taken.take(usize::try_from(length).unwrap_or(usize::MAX)).copied().collect();
            sent.store(taken.len() as u64, Ordering::Relaxed);
            return Ok(Body::from(taken));
        }
        PushContent::File { path, .. } => path,
    };
    let mut opened = tokio::fs::File::open(path).await.map_err(HubError::disk("open", path))?;
    opened.seek(SeekFrom::Start(from)).await.map_err(HubError::disk("read", path))?;
    Ok(Body::wrap_stream(pieces(opened, length, sent)))
}

fn pieces(
    file: tokio::fs::File,
    length: u64,
    sent: Arc<AtomicU64>,
) -> impl Stream<Item = std::io::Result<Vec<u8>>> + Send {
    stream::try_unfold((file, length), move |(mut file, left)| {
        let sent = sent.clone();
        async move {
            if left == 0 {
                return Ok(None);
            }
            let mut piece = Vec::new();
            (&mut file).take(left.min(PIECE_BYTES)).read_to_end(&mut piece).await?;
            if piece.is_empty() {
                return Err(std::io::Error::other("the file became shorter during the upload"));
            }
            let read = piece.len() as u64;
            sent.fetch_add(read, Ordering::Relaxed);
            Ok(Some((piece, (file, left - read))))
        }
    })
}
