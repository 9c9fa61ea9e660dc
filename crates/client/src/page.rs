//! Lists: page by page, item by item as a stream, or all at once.

use std::collections::VecDeque;

use futures::stream::{self, BoxStream, StreamExt};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::call::Call;
use crate::client::Client;
use crate::error::Error;

/// One page of a list.
#[derive(Debug, Clone, Deserialize)]
pub struct Page<T> {
    /// Items of the page.
    pub data: Vec<T>,
    /// Cursor of the next page; `None` = this is the last page.
    pub next: Option<String>,
    /// The requested items that the server's retention has deleted.
    pub removed: Option<Removed>,
    /// Warnings about requested items that do not exist.
    #[serde(default)]
    pub warnings: Vec<String>,
}

/// Items that the server's retention has deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub struct Removed {
    /// Last deleted sequence number; only for lists of events.
    pub to_seq: Option<i64>,
    /// Last training step with deleted samples; only for lists of samples.
    pub to_step: Option<u64>,
    /// Number of deleted samples; only for lists of samples.
    pub samples: Option<u64>,
    /// Former size of deleted samples, in bytes; only for lists of samples.
    pub size_bytes: Option<u64>,
}

/// A list that is requested page by page.
#[derive(Debug)]
pub struct Pages<T> {
    client: Client,
    call: Call,
    /// Cursor of the page to request; the outer `None` = there are no more pages.
    after: Option<Option<String>>,
    item: std::marker::PhantomData<fn() -> T>,
}

impl<T: DeserializeOwned + Send + 'static> Pages<T> {
    pub(crate) fn new(client: &Client, call: Call) -> Self {
        Self { client: client.clone(), call, after: Some(None), item: std::marker::PhantomData }
    }

    /// Starts after this cursor, the `next` of a page of an earlier list.
    #[must_use]
    pub fn after(self, cursor: impl Into<String>) -> Self {
        Self { after: Some(Some(cursor.into())), ..self }
    }

    /// Returns the next page; `None` after the last one.
    ///
    /// # Errors
    /// Fails if the server does not answer with a page.
    pub async fn next_page(&mut self) -> Result<Option<Page<T>>, Error> {
        let Some(after) = self.after.clone() else { return Ok(None) };
        let page: Page<T> = self.client.json(self.call.clone().query_if("after", after)).await?;
        self.after = page.next.clone().map(Some);
        Ok(Some(page))
    }

    /// Returns the items of all pages.
    ///
    /// # Errors
    /// Fails if the server does not answer with a page.
    pub async fn collect(mut self) -> Result<Vec<T>, Error> {
        let mut items = Vec::new();
        while let Some(page) = self.next_page().await? {
            items.extend(page.data);
        }
        Ok(items)
    }

    /// Returns the items as a stream, which requests a page when the previous one has been read. The stream ends after an error.
    pub fn into_stream(self) -> BoxStream<'static, Result<T, Error>> {
        let state = (Some(self), VecDeque::new());
        stream::unfold(state, async |(mut pages, mut held): (Option<Self>, VecDeque<T>)| {
            loop {
                if let Some(item) = held.pop_front() {
                    return Some((Ok(item), (pages, held)));
                }
                match pages.as_mut()?.next_page().await {
                    Ok(Some(page)) => held.extend(page.data),
                    Ok(None) => return None,
                    Err(error) => return Some((Err(error), (None, held))),
                }
            }
        })
        .boxed()
    }
}
