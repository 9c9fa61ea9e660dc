//! The request journal of `POST /rewards/test`. It stores no rewards, but registers requests, so that a service may answer 202
//! and send results later.

use std::sync::{Mutex, PoisonError};

use futures::future::BoxFuture;

use super::AppState;
use super::callbacks::terms;
use super::error::{Problem, chain};
use crate::callback::{CallbackTerms, Chunk};
use crate::protocol::JournalEntry;
use crate::reward::journal::{Journal, JournalClosed, JournaledRequest};
use crate::store::{Store, StoreError, clock_ms};

/// The request journal of one reward test. Dropping the value removes the requests that it registered.
pub(super) struct TestJournal {
    store: Store,
    terms: CallbackTerms,
    opened: Mutex<Vec<String>>,
}

impl TestJournal {
    pub(super) async fn new(state: &AppState) -> Result<Self, Problem> {
        Ok(Self { store: state.store.clone(), terms: terms(state).await?, opened: Mutex::default() })
    }
}

impl Journal for TestJournal {
    fn find(&self, _key: &str) -> Option<JournaledRequest> {
        None
    }

    fn append(&self, entry: JournalEntry) -> BoxFuture<'_, Result<(), JournalClosed>> {
        Box::pin(async move {
            let JournalEntry::Request { id, later: Some(later), .. } = entry else { return Ok(()) };
            self.store.callback_open(&id, &later, clock_ms()).await.map_err(unrecorded)?;
            self.opened.lock().unwrap_or_else(PoisonError::into_inner).push(id);
            Ok(())
        })
    }

    fn callbacks(&self) -> Option<&CallbackTerms> {
        Some(&self.terms)
    }

    fn arrived<'a>(&'a self, id: &'a str, seen: usize) -> BoxFuture<'a, Result<Chunk, JournalClosed>> {
        Box::pin(async move {
            let mut changes = self.store.callbacks_changed();
            loop {
                changes.mark_unchanged();
                let chunk = self.store.callback_arrived(id).await.map_err(unrecorded)?;
                if chunk.entries.len() > seen || chunk.done {
                    return Ok(Chunk { entries: chunk.entries.into_iter().skip(seen).collect(), done: chunk.done });
                }
                changes.changed().await.map_err(|_| JournalClosed)?;
            }
        })
    }
}

fn unrecorded(error: StoreError) -> JournalClosed {
    tracing::error!(error = chain(&error), "could not store the request of a reward test in the database");
    JournalClosed
}

impl Drop for TestJournal {
    fn drop(&mut self) {
        let opened = std::mem::take(&mut *self.opened.lock().unwrap_or_else(PoisonError::into_inner));
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let store = self.store.clone();
        runtime.spawn(async move {
            for id in opened {
                // An error is ignored, because the retention task removes the registered requests later.
                let _ = store.callback_forget(&id).await;
            }
        });
    }
}
