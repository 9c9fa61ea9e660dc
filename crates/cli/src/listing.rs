//! Lists of the API, page by page, and as one document.

use rlood_client::{RawAnswer, RawCall};
use serde_json::{Value, json};

use crate::error::CliError;

/// Items of a page that is asked for; the API's most.
const PAGE: usize = 100;

/// Items of a list, and the document that has them.
#[derive(Debug)]
pub struct Listing {
    /// The items.
    pub items: Vec<Value>,
    /// The first page's document with the items of all pages; when one page was enough, as the server sent it.
    pub document: String,
}

impl Listing {
    /// Reads the first `limit` items of a list, all of them for 0.
    ///
    /// # Errors
    /// When the server does not answer with a page.
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

    /// Reads a list from a cursor on, to its end.
    ///
    /// # Errors
    /// As [`Listing::read`].
    pub async fn read_after(call: RawCall, after: Option<String>) -> Result<Self, CliError> {
        Self::pages(call.query("limit", PAGE), after).await
    }

    /// Reads a list whose pages have their own size, to its end.
    ///
    /// # Errors
    /// As [`Listing::read`].
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

    /// Leaves the last items alone.
    pub fn keep_last(&mut self, count: usize) {
        let skipped = self.items.len().saturating_sub(count);
        if skipped > 0 {
            self.items.drain(..skipped);
            self.document = json!({"data": self.items, "next": null}).to_string();
        }
    }

    /// Reads items of a list that satisfy a condition, until there are `limit` of them; all of them for 0.
    ///
    /// # Errors
    /// As [`Listing::read`].
    pub async fn read_where(call: RawCall, limit: usize, keep: impl Fn(&Value) -> bool) -> Result<Self, CliError> {
        let (mut items, mut first, mut after) = (Vec::new(), None, None::<String>);
        loop {
            let (page, answer) = call.clone().query("limit", PAGE).page(after.as_deref()).await?;
            items.extend(page.data.into_iter().filter(&keep));
            first.get_or_insert(answer);
            if page.next.is_none() || (limit > 0 && items.len() >= limit) {
                items.truncate(if limit == 0 { usize::MAX } else { limit });
                // A cursor of the server's would be one of all items.
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
