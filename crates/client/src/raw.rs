//! Requests by path, for programs that show the API's own JSON, or read fields that this version has no types for.

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

/// A request by its path, with the same retries and time limits as other calls of the client.
#[derive(Debug, Clone)]
pub struct RawCall {
    client: Client,
    call: Call,
}

/// A response whose body is JSON.
#[derive(Debug, Clone, PartialEq)]
pub struct RawAnswer {
    /// The HTTP status, for example 201 if the request created something and 200 if that existed before.
    pub status: u16,
    /// The response's text as the server sent it.
    pub text: String,
    /// The parsed JSON of the response. Keys keep their order, and numbers their value.
    pub value: Value,
}

impl Client {
    /// Creates a GET request to `/a/b/c` for `["a", "b", "c"]`.
    pub fn raw_get(&self, path: &[&str]) -> RawCall {
        self.raw(self.get(path))
    }

    /// Creates a POST request that creates or changes something. It carries an `Idempotency-Key`.
    pub fn raw_post(&self, path: &[&str]) -> RawCall {
        self.raw(self.post_once(path))
    }

    /// Creates a POST request that changes nothing, such as a validation.
    pub fn raw_ask(&self, path: &[&str]) -> RawCall {
        self.raw(self.call(Method::POST, path))
    }

    /// Creates a DELETE request.
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

    /// Sets a JSON body.
    #[must_use]
    pub fn body(self, body: &Value) -> Self {
        Self { call: self.call.json(body), ..self }
    }

    /// Sets a document (such as a job in YAML) as the body, in its own format.
    #[must_use]
    pub fn document(self, document: &Document) -> Self {
        Self { call: self.call.body(Body::bytes(document.media_type, document.bytes.clone())), ..self }
    }

    /// Sets rows and their mapping as the body.
    ///
    /// # Errors
    /// Fails if the file of the rows cannot be read.
    pub async fn upload(self, upload: &DatasetUpload) -> Result<Self, Error> {
        let body = upload.body().await?;
        Ok(Self { call: self.call.query_if("name", upload.name.as_ref()).body(body), ..self })
    }

    /// Allows the server this much more time to answer.
    #[must_use]
    pub fn work(self, work: Duration) -> Self {
        Self { call: self.call.work(work), ..self }
    }

    /// Sends the request and returns the response.
    ///
    /// # Errors
    /// Fails with an [`Error`] of the call; also if the response is not JSON.
    pub async fn send(self) -> Result<RawAnswer, Error> {
        let answer = self.client.answer(&self.call).await?;
        let status = answer.status.as_u16();
        let text = String::from_utf8(answer.body.into())
            .map_err(|_| self.call.not_understood("the server's response is not UTF-8"))?;
        // The response to a DELETE has no body.
        let value = if text.is_empty() { Value::Null } else { self.call.read_json(text.as_bytes())? };
        Ok(RawAnswer { status, text, value })
    }

    /// Sends the request and returns the response's text, whatever its format.
    ///
    /// # Errors
    /// Fails with an [`Error`] of the call; also if the response is not UTF-8.
    pub async fn text(self) -> Result<String, Error> {
        self.client.text(self.call.accept("*/*")).await
    }

    /// Downloads the response to a file, whose folder must exist. An interrupted download resumes, and the
    /// hash is verified if given.
    ///
    /// # Errors
    /// Returns an [`Error`] if the call fails.
    pub async fn download(self, to: &Path, sha256: Option<Sha256Digest>) -> Result<Downloaded, Error> {
        self.client.download(self.call, to, sha256).await
    }

    /// Returns a list, page by page.
    pub fn pages(self) -> Pages<Value> {
        Pages::new(&self.client, self.call)
    }

    /// Returns one page of a list after this cursor, with the response that it was parsed from.
    ///
    /// # Errors
    /// Fails if the server does not answer with a page.
    pub async fn page(self, after: Option<&str>) -> Result<(Page<Value>, RawAnswer), Error> {
        let call = self.call.clone();
        let answer = self.query_if("after", after).send().await?;
        let page = call.read_json(answer.text.as_bytes())?;
        Ok((page, answer))
    }
}
