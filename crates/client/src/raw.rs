//! Requests by their path: for programs that show the API's own JSON, or read fields that this version has no types for.

use std::path::Path;
use std::time::Duration;

use reqwest::Method;
use rlood_types::digest::Sha256Digest;
use serde_json::Value;

use crate::api::datasets::DatasetUpload;
use crate::call::Call;
use crate::client::Client;
use crate::download::Downloaded;
use crate::error::Error;
use crate::page::{Page, Pages};
use crate::upload::{Body, Document};

/// A request by its path. It has the retries and the time limits of the client's other calls.
#[derive(Debug, Clone)]
pub struct RawCall {
    client: Client,
    call: Call,
}

/// An answer in JSON.
#[derive(Debug, Clone, PartialEq)]
pub struct RawAnswer {
    /// The text as the server sent it.
    pub text: String,
    /// The same, parsed: keys keep their order, and numbers their value.
    pub value: Value,
}

impl Client {
    /// Reads `/a/b/c` for `["a", "b", "c"]`.
    pub fn raw_get(&self, path: &[&str]) -> RawCall {
        self.raw(self.get(path))
    }

    /// Sends a POST that creates or moves something. It carries an `Idempotency-Key`.
    pub fn raw_post(&self, path: &[&str]) -> RawCall {
        self.raw(self.post_once(path))
    }

    /// Sends a POST that changes nothing, as a validation does.
    pub fn raw_ask(&self, path: &[&str]) -> RawCall {
        self.raw(self.call(Method::POST, path))
    }

    /// Sends a DELETE.
    pub fn raw_delete(&self, path: &[&str]) -> RawCall {
        self.raw(self.call(Method::DELETE, path))
    }

    fn raw(&self, call: Call) -> RawCall {
        RawCall { client: self.clone(), call }
    }
}

impl RawCall {
    /// Adds a query parameter.
    #[must_use]
    pub fn query(self, name: &str, value: impl ToString) -> Self {
        Self { call: self.call.query(name, value), ..self }
    }

    /// Adds a query parameter, if it has a value.
    #[must_use]
    pub fn query_if(self, name: &str, value: Option<impl ToString>) -> Self {
        Self { call: self.call.query_if(name, value), ..self }
    }

    /// Sends this JSON.
    #[must_use]
    pub fn body(self, body: &Value) -> Self {
        Self { call: self.call.json(body), ..self }
    }

    /// Sends this document in the form that it was written in.
    #[must_use]
    pub fn document(self, document: &Document) -> Self {
        Self { call: self.call.body(Body::bytes(document.media_type, document.bytes.clone())), ..self }
    }

    /// Sends these rows, and how they are mapped.
    ///
    /// # Errors
    /// When the file of the rows cannot be read.
    pub async fn upload(self, upload: &DatasetUpload) -> Result<Self, Error> {
        let body = upload.body().await?;
        Ok(Self { call: self.call.query_if("name", upload.name.as_ref()).body(body), ..self })
    }

    /// Gives the server this much longer to answer.
    #[must_use]
    pub fn work(self, work: Duration) -> Self {
        Self { call: self.call.work(work), ..self }
    }

    /// The answer.
    ///
    /// # Errors
    /// As [`Error`] says; also when the answer is not JSON.
    pub async fn send(self) -> Result<RawAnswer, Error> {
        let text = self.client.text(self.call.clone()).await?;
        // A DELETE answers without a body.
        let value = if text.is_empty() { Value::Null } else { self.call.read_json(text.as_bytes())? };
        Ok(RawAnswer { text, value })
    }

    /// The answer's text, whatever its form.
    ///
    /// # Errors
    /// As [`Error`] says; also when the answer is not UTF-8.
    pub async fn text(self) -> Result<String, Error> {
        self.client.text(self.call.accept("*/*")).await
    }

    /// Downloads the answer to a file, whose folder must exist: resumed after a cut, and compared with this hash.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn download(self, to: &Path, sha256: Option<Sha256Digest>) -> Result<Downloaded, Error> {
        self.client.download(self.call, to, sha256).await
    }

    /// The answers of a list, page by page.
    pub fn pages(self) -> Pages<Value> {
        Pages::new(&self.client, self.call)
    }

    /// One page of a list, after this cursor, with the answer that it was read from.
    ///
    /// # Errors
    /// When the server does not answer with a page.
    pub async fn page(self, after: Option<&str>) -> Result<(Page<Value>, RawAnswer), Error> {
        let call = self.call.clone();
        let answer = self.query_if("after", after).send().await?;
        let page = call.read_json(answer.text.as_bytes())?;
        Ok((page, answer))
    }
}
