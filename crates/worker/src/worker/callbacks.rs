//! Callback results of reward services for this attempt. The results of all requests are fetched by one long-polling call,
//! which starts when a request first waits.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

use super::client::{Client, ClientError, Held, persist};
use super::signals::StopSignal;
use crate::callback::Chunk;
use crate::causes::with_causes;
use crate::engine::host::StopReason;
use crate::protocol::News;
use crate::reward::journal::JournalClosed;

/// Receives the callback results of one attempt. Cheap to clone.
#[derive(Clone)]
pub(super) struct Mailbox(Arc<Inner>);

struct Inner {
    client: Client,
    held: Held,
    stop: StopSignal,
    letters: watch::Sender<Letters>,
    fetching: OnceLock<AbortOnDropHandle<()>>,
}

#[derive(Default)]
struct Letters {
    by_request: HashMap<String, Chunk>,
    /// Whether the server delivers no more results.
    ended: bool,
}

impl Mailbox {
    pub(super) fn new(client: Client, held: Held, stop: StopSignal) -> Self {
        Self(Arc::new(Inner { client, held, stop, letters: watch::Sender::default(), fetching: OnceLock::new() }))
    }

    /// Waits for results of a request beyond the first `seen` ones.
    pub(super) async fn arrived(&self, id: &str, seen: usize) -> Result<Chunk, JournalClosed> {
        let inner = &self.0;
        inner.fetching.get_or_init(|| {
            let (client, held, stop) = (inner.client.clone(), inner.held, inner.stop.clone());
            AbortOnDropHandle::new(tokio::spawn(fetch(client, held, stop, inner.letters.clone())))
        });
        let news = |chunk: &Chunk| chunk.entries.len() > seen || chunk.done;
        let mut letters = inner.letters.subscribe();
        let letters = letters
            .wait_for(|letters| letters.ended || letters.by_request.get(id).is_some_and(news))
            .await
            .map_err(|_| JournalClosed)?;
        let chunk = letters.by_request.get(id).filter(|chunk| news(chunk)).ok_or(JournalClosed)?;
        Ok(Chunk { entries: chunk.entries.iter().skip(seen).cloned().collect(), done: chunk.done })
    }

    /// Removes the results of a request that is complete.
    pub(super) fn forget(&self, id: &str) {
        self.0.letters.send_if_modified(|letters| {
            letters.by_request.remove(id);
            false
        });
    }
}

async fn fetch(client: Client, held: Held, stop: StopSignal, letters: watch::Sender<Letters>) {
    let mut after = 0;
    loop {
        match persist(|| client.callbacks(held, after), ClientError::is_transient).await {
            Ok(page) => {
                after = page.next;
                letters.send_if_modified(|letters| {
                    let some = !page.news.is_empty();
                    for News { request, entry } in page.news {
                        let chunk = letters.by_request.entry(request).or_default();
                        match entry {
                            Some(entry) => chunk.entries.push(entry),
                            None => chunk.done = true,
                        }
                    }
                    some
                });
            }
            Err(error) => {
                tracing::warn!(error = with_causes(&error), "cannot fetch callback results");
                if matches!(error, ClientError::LeaseLost) || error.is_transient() {
                    stop.raise(StopReason::LeaseLost);
                }
                letters.send_modify(|letters| letters.ended = true);
                return;
            }
        }
    }
}
