//! Lists of the API, read page by page or as one document.

use rlood_client::{RawAnswer, RawCall};
use serde_json::{Value, json};

use crate::error::CliError;

/// Items per page, the largest number that the API allows.
const PAGE: usize = 100;

/// Items of a list, and the document that contains them.
#[derive(Debug)]
pub struct Listing {
    /// The items that were read, in the API's order.
    pub items: Vec<Value>,
    /// The first page's document with the items of all pages. With a single page, the server's text unchanged.
    pub document: String,
}

impl Listing {
    /// Reads the first `limit` items of a list; 0 reads all items.
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

    /// Reads a list from a cursor to its end.
    ///
    /// # Errors
    /// Fails for the same reasons as [`Listing::read`].
    pub async fn read_after(call: RawCall, after: Option<String>) -> Result<Self, CliError> {
        Self::pages(call.query("limit", PAGE), after).await
    }

    /// Reads a list to its end. The server chooses the size of its pages.
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

    /// Removes all items but the last `count`.
    pub fn keep_last(&mut self, count: usize) {
        let skipped = self.items.len().saturating_sub(count);
        if skipped > 0 {
            self.items.drain(..skipped);
            self.document = json!({"data": self.items, "next": null}).to_string();
        }
    }

    /// Reads the first `limit` items that satisfy a condition; 0 reads all of them.
    ///
    /// # Errors
    /// Fails for the same reasons as [`Listing::read`].
    pub async fn read_where(call: RawCall, limit: usize, keep: impl Fn(&Value) -> bool) -> Result<Self, CliError> {
        let (mut items, mut first, mut after) = (Vec::new(), None, None::<String>);
        loop {
            let (page, answer) = call.clone().query("limit", PAGE).page(after.as_deref()).await?;
            items.extend(page.data.into_iter().filter(&keep));
            first.get_or_insert(answer);
            if page.next.is_none() || (limit > 0 && items.len() >= limit) {
                items.truncate(if limit == 0 { usize::MAX } else { limit });
                // The server's cursor counts unfiltered items, so it is not returned.
                return Ok(Self::of(items, None, first, true));
            }
            after = page.next;
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
