//! What reward services sent to the server for this attempt's requests: one held call for all of them, begun when somebody
//! first waits.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

use super::client::{Client, ClientError, Held, persist};
use super::signals::StopSignal;
use crate::callback::Chunk;
use crate::causes::with_causes;
use crate::engine::host::StopReason;
use crate::protocol::CallbackUpdate;
use crate::reward::journal::Unrecorded;

/// One attempt's answers that come later. Cheap to clone.
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
    /// Nothing else can be fetched.
    ended: bool,
}

impl Mailbox {
    pub(super) fn new(client: Client, held: Held, stop: StopSignal) -> Self {
        Self(Arc::new(Inner { client, held, stop, letters: watch::Sender::default(), fetching: OnceLock::new() }))
    }

    /// What came for a request beyond the first `seen` entries, as soon as there is something.
    pub(super) async fn arrived(&self, id: &str, seen: usize) -> Result<Chunk, Unrecorded> {
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
            .map_err(|_| Unrecorded)?;
        let chunk = letters.by_request.get(id).filter(|chunk| news(chunk)).ok_or(Unrecorded)?;
        Ok(Chunk { entries: chunk.entries.iter().skip(seen).cloned().collect(), done: chunk.done })
    }

    /// The request is answered.
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
                    let some = !page.updates.is_empty();
                    for CallbackUpdate { request, entry } in page.updates {
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
                tracing::warn!(error = with_causes(&error), "answers that come later cannot be fetched");
                if matches!(error, ClientError::LeaseLost) || error.is_transient() {
                    stop.raise(StopReason::LeaseLost);
                }
                letters.send_modify(|letters| letters.ended = true);
                return;
            }
        }
    }
}
