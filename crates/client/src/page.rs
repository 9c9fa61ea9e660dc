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
    /// The items.
    pub data: Vec<T>,
    /// The cursor of the next page; `None` on the last one.
    pub next: Option<String>,
    /// What the server's retention removed of what was asked for.
    pub removed: Option<Removed>,
    /// What was asked for and does not exist.
    #[serde(default)]
    pub warnings: Vec<String>,
}

/// What the server's retention removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub struct Removed {
    /// Of events: up to this number.
    pub to_seq: Option<i64>,
    /// Of samples: up to this training step.
    pub to_step: Option<u64>,
    /// Of samples: how many.
    pub samples: Option<u64>,
    /// Of samples: what they took, bytes.
    pub size_bytes: Option<u64>,
}

/// A list that is asked for page by page.
#[derive(Debug)]
pub struct Pages<T> {
    client: Client,
    call: Call,
    /// The cursor of the page to ask for; `None` = there is none any more.
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

    /// The next page; `None` after the last one.
    ///
    /// # Errors
    /// When the server does not answer with one.
    pub async fn next_page(&mut self) -> Result<Option<Page<T>>, Error> {
        let Some(after) = self.after.clone() else { return Ok(None) };
        let page: Page<T> = self.client.json(self.call.clone().query_if("after", after)).await?;
        self.after = page.next.clone().map(Some);
        Ok(Some(page))
    }

    /// The items of all pages.
    ///
    /// # Errors
    /// When the server does not answer with a page.
    pub async fn collect(mut self) -> Result<Vec<T>, Error> {
        let mut items = Vec::new();
        while let Some(page) = self.next_page().await? {
            items.extend(page.data);
        }
        Ok(items)
    }

    /// The items as a stream, which asks for a page when the one before has been read. It ends after an error.
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
