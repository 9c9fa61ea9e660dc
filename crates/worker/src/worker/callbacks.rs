//! Fetches the results that reward services sent to the server by callback. One long-polling call fetches the results of all
//! requests; it starts when a request first waits for callbacks.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

use super::client::{ClaimRef, Client, ClientError, with_retries};
use super::signals::StopSignal;
use crate::callback::Chunk;
use crate::engine::host::StopReason;
use crate::error_text::with_causes;
use crate::protocol::CallbackUpdate;
use crate::reward::journal::JournalClosed;

/// Receives the callback results of one attempt. Cheap to clone.
#[derive(Clone)]
pub(super) struct CallbackInbox(Arc<Inner>);

struct Inner {
    client: Client,
    claim_ref: ClaimRef,
    stop: StopSignal,
    entries: watch::Sender<Entries>,
    fetch_task: OnceLock<AbortOnDropHandle<()>>,
}

#[derive(Default)]
struct Entries {
    by_request: HashMap<String, Chunk>,
    /// Whether no more callback results arrive, because fetching them has failed for good.
    ended: bool,
}

impl CallbackInbox {
    pub(super) fn new(client: Client, claim_ref: ClaimRef, stop: StopSignal) -> Self {
        Self(Arc::new(Inner {
            client,
            claim_ref,
            stop,
            entries: watch::Sender::default(),
            fetch_task: OnceLock::new(),
        }))
    }

    /// Waits for callback results of a reward request beyond the first `seen` ones.
    pub(super) async fn arrived(&self, id: &str, seen: usize) -> Result<Chunk, JournalClosed> {
        let inner = &self.0;
        inner.fetch_task.get_or_init(|| {
            let (client, claim_ref, stop) = (inner.client.clone(), inner.claim_ref, inner.stop.clone());
            AbortOnDropHandle::new(tokio::spawn(fetch(client, claim_ref, stop, inner.entries.clone())))
        });
        let has_new = |chunk: &Chunk| chunk.entries.len() > seen || chunk.done;
        let mut entries = inner.entries.subscribe();
        let entries = entries
            .wait_for(|entries| entries.ended || entries.by_request.get(id).is_some_and(has_new))
            .await
            .map_err(|_| JournalClosed)?;
        let chunk = entries.by_request.get(id).filter(|chunk| has_new(chunk)).ok_or(JournalClosed)?;
        Ok(Chunk { entries: chunk.entries.iter().skip(seen).cloned().collect(), done: chunk.done })
    }

    /// Removes the callback results of a reward request that needs no more.
    pub(super) fn forget(&self, id: &str) {
        self.0.entries.send_if_modified(|entries| {
            entries.by_request.remove(id);
            false
        });
    }
}

async fn fetch(client: Client, claim_ref: ClaimRef, stop: StopSignal, entries: watch::Sender<Entries>) {
    let mut after = 0;
    loop {
        match with_retries(|| client.callbacks(claim_ref, after), ClientError::is_transient).await {
            Ok(page) => {
                after = page.next;
                entries.send_if_modified(|entries| {
                    let is_changed = !page.updates.is_empty();
                    for CallbackUpdate { request, entry } in page.updates {
                        let chunk = entries.by_request.entry(request).or_default();
                        match entry {
                            Some(entry) => chunk.entries.push(entry),
                            None => chunk.done = true,
                        }
                    }
                    is_changed
                });
            }
            Err(error) => {
                tracing::warn!(
                    error = with_causes(&error),
                    "cannot fetch the late results of reward services from the server"
                );
                if matches!(error, ClientError::LeaseLost) || error.is_transient() {
                    stop.raise(StopReason::LeaseLost);
                }
                entries.send_modify(|entries| entries.ended = true);
                return;
            }
        }
    }
}
