//! Request bodies: bytes and files, alone or as fields of a multipart form. A body can be sent several times.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures::stream::{self, BoxStream, StreamExt};
use reqwest::Response;
use rlood_types::spec::format::Format;
use serde_json::Value;
use tokio::time::{Instant, sleep_until};
use tokio_util::io::ReaderStream;

use crate::error::Error;

/// Number of bytes that are read from a file at a time.
const READ_BYTES: usize = 256 * 1024;

/// Bytes to send: from memory, or from a file that is read while it is sent.
#[derive(Debug, Clone)]
pub enum Content {
    /// Bytes that are kept in memory.
    Bytes(Bytes),
    /// A file, which must not change while it is sent.
    File(PathBuf),
}

impl From<&'static [u8]> for Content {
    fn from(bytes: &'static [u8]) -> Self {
        Content::Bytes(Bytes::from_static(bytes))
    }
}

impl From<Vec<u8>> for Content {
    fn from(bytes: Vec<u8>) -> Self {
        Content::Bytes(bytes.into())
    }
}

impl From<String> for Content {
    fn from(text: String) -> Self {
        Content::Bytes(text.into())
    }
}

impl From<&Path> for Content {
    fn from(path: &Path) -> Self {
        Content::File(path.to_owned())
    }
}

/// A job's document: as JSON, or as text that the server parses.
#[derive(Debug, Clone)]
pub struct Document {
    pub(crate) media_type: &'static str,
    pub(crate) bytes: Bytes,
}

impl Document {
    /// Creates a document from text in JSON, YAML or TOML.
    pub fn text(format: Format, text: impl Into<String>) -> Self {
        Self { media_type: format.media_type(), bytes: text.into().into() }
    }
}

impl From<&Value> for Document {
    fn from(value: &Value) -> Self {
        Self { media_type: Format::Json.media_type(), bytes: value.to_string().into() }
    }
}

/// The body of a request.
#[derive(Debug, Clone)]
pub(crate) struct Body {
    pub(crate) content_type: String,
    /// Contents that are sent one after the other, each with its size in bytes.
    parts: Vec<(Content, u64)>,
}

impl Body {
    pub(crate) fn empty() -> Self {
        Self { content_type: String::new(), parts: Vec::new() }
    }

    pub(crate) fn bytes(content_type: &str, bytes: impl Into<Bytes>) -> Self {
        let bytes = bytes.into();
        let size_bytes = bytes.len() as u64;
        Self { content_type: content_type.to_owned(), parts: vec![(Content::Bytes(bytes), size_bytes)] }
    }

    pub(crate) async fn content(content_type: &str, content: Content) -> Result<Self, Error> {
        let size_bytes = size_of(&content).await?;
        Ok(Self { content_type: content_type.to_owned(), parts: vec![(content, size_bytes)] })
    }

    /// Creates a multipart form (RFC 7578) from fields of name, media type and content.
    pub(crate) async fn form(fields: Vec<(&str, &str, Content)>) -> Result<Self, Error> {
        // A random boundary occurs in a content with a probability of 2⁻¹²⁸.
        let boundary = format!("rlood-{}-{}", ulid::Ulid::generate(), ulid::Ulid::generate());
        let text = |text: String| {
            let size_bytes = text.len() as u64;
            (Content::from(text), size_bytes)
        };
        let mut parts = Vec::with_capacity(2 * fields.len() + 1);
        for (name, media_type, content) in fields {
            let disposition = format!("content-disposition: form-data; name=\"{name}\"");
            parts.push(text(format!("--{boundary}\r\n{disposition}\r\ncontent-type: {media_type}\r\n\r\n")));
            let size_bytes = size_of(&content).await?;
            parts.push((content, size_bytes));
            parts.push(text("\r\n".to_owned()));
        }
        parts.push(text(format!("--{boundary}--\r\n")));
        Ok(Self { content_type: format!("multipart/form-data; boundary={boundary}"), parts })
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    pub(crate) fn size_bytes(&self) -> u64 {
        self.parts.iter().map(|(_, size_bytes)| size_bytes).sum()
    }

    /// Opens a stream of the body from its first byte. `flow` is notified when bytes are sent.
    pub(crate) async fn open(&self, flow: &Flow) -> Result<BoxStream<'static, std::io::Result<Bytes>>, Error> {
        let mut opened = Vec::with_capacity(self.parts.len());
        for (content, _) in &self.parts {
            opened.push(match content {
                Content::Bytes(bytes) => stream::iter([Ok(bytes.clone())]).boxed(),
                Content::File(path) => {
                    let file = tokio::fs::File::open(path).await.map_err(unreadable(path))?;
                    ReaderStream::with_capacity(file, READ_BYTES).boxed()
                }
            });
        }
        let flow = flow.clone();
        Ok(stream::iter(opened).flatten().inspect(move |_| flow.record_progress()).boxed())
    }
}

async fn size_of(content: &Content) -> Result<u64, Error> {
    match content {
        Content::Bytes(bytes) => Ok(bytes.len() as u64),
        Content::File(path) => Ok(tokio::fs::metadata(path).await.map_err(unreadable(path))?.len()),
    }
}

fn unreadable(path: &Path) -> impl FnOnce(std::io::Error) -> Error {
    Error::disk(format!("read {}", path.display()))
}

/// The time when the connection last accepted a chunk of the body.
#[derive(Debug, Clone)]
pub(crate) struct Flow(Arc<Mutex<Instant>>);

impl Default for Flow {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(Instant::now())))
    }
}

impl Flow {
    fn record_progress(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    /// Waits for the response headers as long as bytes of the body are being sent, and then for `limit`.
    pub(crate) async fn watch(
        &self,
        limit: Duration,
        sent: impl Future<Output = Result<Response, reqwest::Error>>,
    ) -> Option<Result<Response, reqwest::Error>> {
        let mut sent = std::pin::pin!(sent);
        loop {
            let ends = *self.0.lock().unwrap_or_else(PoisonError::into_inner) + limit;
            if ends <= Instant::now() {
                return None;
            }
            tokio::select! {
                biased;
                answer = &mut sent => return Some(answer),
                () = sleep_until(ends) => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::TryStreamExt;

    use super::*;

    async fn sent(body: &Body) -> String {
        let pieces: Vec<Bytes> = body.open(&Flow::default()).await.unwrap().try_collect().await.unwrap();
        String::from_utf8(pieces.concat()).unwrap()
    }

    #[tokio::test]
    async fn a_form_has_boundaries_between_fields_and_a_known_size() {
        let dir = tempfile::tempdir().unwrap();
        let rows = dir.path().join("rows.ndjson");
        std::fs::write(&rows, "{\"prompt\":\"a\"}\n").unwrap();
        let fields = vec![
            ("spec", "application/yaml", Content::from("model: m".to_owned())),
            ("dataset", "application/x-ndjson", Content::from(rows.as_path())),
        ];
        let form = Body::form(fields).await.unwrap();
        let boundary = form.content_type.strip_prefix("multipart/form-data; boundary=").unwrap();
        let text = sent(&form).await;
        assert_eq!(
            text.replace(boundary, "B"),
            "--B\r\ncontent-disposition: form-data; name=\"spec\"\r\ncontent-type: application/yaml\r\n\r\nmodel: m\r\n\
             --B\r\ncontent-disposition: form-data; name=\"dataset\"\r\ncontent-type: application/x-ndjson\r\n\r\n\
             {\"prompt\":\"a\"}\n\r\n--B--\r\n"
        );
        assert_eq!(form.size_bytes(), text.len() as u64);
        assert_eq!(sent(&form).await, text, "it can be sent again");
    }

    #[tokio::test]
    async fn a_file_that_is_not_there_is_named() {
        let missing = Content::from(Path::new("/no/such/rows"));
        let error = Body::content("text/csv", missing).await.unwrap_err();
        assert_eq!(error.to_string(), "cannot read /no/such/rows");
    }
}
