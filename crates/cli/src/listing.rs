//! Reads lists of the API, such as jobs or samples, page by page.

use rlood_client::{RawAnswer, RawCall};
use serde_json::{Value, json};

use crate::error::CliError;

/// Number of items requested per page, the maximum that the API allows.
const PAGE: usize = 100;

/// The items of a list of the API, and the JSON document that contains them.
#[derive(Debug)]
pub struct Listing {
    /// The items that were read, in the order of the API.
    pub items: Vec<Value>,
    /// The JSON of the first page, with the items of all pages. If there is a single page, the server's text unchanged.
    pub document: String,
}

impl Listing {
    /// Reads the first `limit` items of a list of the API; 0 reads all items.
    ///
    /// # Errors
    /// Fails when the server does not answer with a page.
    pub async fn read(call: RawCall, limit: usize) -> Result<Self, CliError> {
        let (mut items, mut first, mut after) = (Vec::new(), None, None::<String>);
        loop {
            let missing = if limit == 0 { PAGE } else { limit - items.len() };
            let (page, answer) = call.clone().query("limit", missing.min(PAGE)).page(after.as_deref()).await?;
            items.extend(page.data);
            let is_first = first.is_none();
            first.get_or_insert(answer);
            if page.next.is_none() || (limit > 0 && items.len() >= limit) {
                return Ok(Self::of(items, page.next, first, !is_first));
            }
            after = page.next;
        }
    }

    /// Reads a list of the API from a cursor to its end.
    ///
    /// # Errors
    /// Fails for the same reasons as [`Listing::read`].
    pub async fn read_after(call: RawCall, after: Option<String>) -> Result<Self, CliError> {
        Self::pages(call.query("limit", PAGE), after).await
    }

    /// Reads a list of the API to its end. The server chooses the size of the pages.
    ///
    /// # Errors
    /// Fails for the same reasons as [`Listing::read`].
    pub async fn whole(call: RawCall) -> Result<Self, CliError> {
        Self::pages(call, None).await
    }

    async fn pages(call: RawCall, mut after: Option<String>) -> Result<Self, CliError> {
        let (mut items, mut first) = (Vec::new(), None);
        loop {
            let (page, answer) = call.clone().page(after.as_deref()).await?;
            items.extend(page.data);
            let is_first = first.is_none();
            first.get_or_insert(answer);
            match page.next {
                Some(next) => after = Some(next),
                None => return Ok(Self::of(items, None, first, !is_first)),
            }
        }
    }

    /// Keeps only the last `count` items.
    pub fn keep_last(&mut self, count: usize) {
        let skipped = self.items.len().saturating_sub(count);
        if skipped > 0 {
            self.items.drain(..skipped);
            self.document = json!({"data": self.items, "next": null}).to_string();
        }
    }

    fn of(items: Vec<Value>, next: Option<String>, first: Option<RawAnswer>, is_changed: bool) -> Self {
        let document = match first {
            Some(answer) if !is_changed => answer.text,
            Some(answer) => {
                let mut document = answer.value;
                document["data"] = Value::Array(items.clone());
                document["next"] = next.map_or(Value::Null, Value::String);
                document.to_string()
            }
            None => String::new(),
        };
        Self { items, document }
    }
}
