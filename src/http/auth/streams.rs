//! Limits the event streams per key, and ends them when their credential becomes invalid. One periodic check serves all
//! streams of a credential.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use futures::StreamExt;
use sha2::{Digest, Sha256};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use super::{Actor, Caller, Credential, is_over};
use crate::http::AppState;
use crate::http::error::{Code, Problem};
use crate::http::throttle::Client;
use crate::id::KeyId;
use crate::listen::{Connection, is_event_stream};
use crate::store::background::spawn;

/// Maximum number of event streams per key. On a server without keys the limit is per address.
const MAX_STREAMS: usize = 50;
/// Interval between two checks that a stream's credential is still valid.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);
/// `Retry-After` of a refused event stream, in seconds.
const RETRY_AFTER_S: u64 = 5;

/// The open event streams, counted per API key or address.
#[derive(Debug, Default)]
pub struct Streams {
    open: Mutex<HashMap<Holder, usize>>,
    watches: Watches,
}

/// The API key or IP address whose open event streams are counted together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Holder {
    Key(KeyId),
    Operator,
    Address(Option<IpAddr>),
}

impl Holder {
    fn of(caller: &Caller, client: Client) -> Self {
        match caller.actor() {
            Actor::Key { id, .. } => Holder::Key(*id),
            Actor::Operator => Holder::Operator,
            Actor::Anonymous => Holder::Address(client.network()),
        }
    }
}

/// One counted event stream of a key or address. Dropping the value decrements the count.
#[derive(Debug)]
struct Place {
    streams: Arc<Streams>,
    holder: Holder,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut open = self.streams.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = open.get_mut(&self.holder) {
            *count -= 1;
            if *count == 0 {
                open.remove(&self.holder);
            }
        }
    }
}

impl Streams {
    fn enter(self: &Arc<Self>, holder: Holder) -> Option<Place> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let count = open.entry(holder).or_default();
        if *count >= MAX_STREAMS {
            return None;
        }
        *count += 1;
        Some(Place { streams: self.clone(), holder })
    }
}

/// The caller and the connection of a request.
pub(super) struct Asker {
    pub(super) caller: Caller,
    pub(super) client: Client,
    pub(super) credential: Credential,
    pub(super) connection: Option<Connection>,
}

/// Passes a response through unchanged, unless it is an event stream: a stream counts against the limits of its key and its
/// connection, and ends when its credential becomes invalid.
pub(super) fn bounded(state: &AppState, asker: Asker, response: Response) -> Response {
    if !is_event_stream(&response) {
        return response;
    }
    let Asker { caller, client, credential, connection } = asker;
    let refused =
        |detail: String| Problem::new(Code::TooManyRequests, detail).retry_after(RETRY_AFTER_S).into_response();
    let Ok(of_connection) = connection.map(|connection| connection.open_stream()).transpose() else {
        return refused(
            "this connection has reached its limit of open event streams: open another connection".to_owned(),
        );
    };
    let Some(of_holder) = state.streams.enter(Holder::of(&caller, client)) else {
        let whose = if *caller.actor() == Actor::Anonymous { "this address" } else { "this key" };
        return refused(format!(
            "{whose} has reached its limit of {MAX_STREAMS} open event streams: close some, or follow all jobs in one stream with GET /jobs/changes"
        ));
    };
    let watch = state.streams.watch(state, &credential);
    response.map(|body| {
        let over = Box::pin(async move { watch.over.cancelled().await });
        let held = (of_connection, of_holder);
        let pieces = body.into_data_stream().take_until(over).map(move |piece| {
            // The stream's count is decremented when the stream is dropped.
            let _held = &held;
            piece
        });
        Body::from_stream(pieces)
    })
}

/// Returns when a credential is no longer valid.
pub(super) async fn over(state: &AppState, credential: &Credential) {
    // Most responses are complete long before this time, and need no check of their credential.
    tokio::time::sleep(super::RECHECK_AFTER).await;
    let watch = state.streams.watch(state, credential);
    watch.over.cancelled().await;
}

impl Streams {
    fn watch(&self, state: &AppState, credential: &Credential) -> Arc<Watch> {
        let mut digest = Sha256::new_with_prefix(match credential {
            Credential::None => "none",
            Credential::Bearer(_) => "bearer",
            Credential::Cookie(_) => "cookie",
        });
        digest.update(credential.text().unwrap_or_default());
        let check = || {
            let (state, credential) = (state.clone(), credential.clone());
            move || {
                let (state, credential) = (state.clone(), credential.clone());
                async move { is_over(&state, &credential).await }
            }
        };
        self.watches.join(digest.finalize().into(), check)
    }
}

/// The periodic checks of credentials with open event streams, by digest of the credential.
#[derive(Debug, Default)]
struct Watches(Mutex<HashMap<[u8; 32], Weak<Watch>>>);

/// The periodic check of one credential, shared by its event streams. It ends when the last stream is dropped.
#[derive(Debug)]
struct Watch {
    over: CancellationToken,
    _task: AbortOnDropHandle<()>,
}

impl Watches {
    /// Returns the periodic check of a credential, or starts one. `check` creates the future that returns whether the
    /// credential is no longer valid.
    fn join<L, F>(&self, credential: [u8; 32], check: impl FnOnce() -> L) -> Arc<Watch>
    where
        L: Fn() -> F + Send + 'static,
        F: Future<Output = bool> + Send,
    {
        let mut watches = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let found = watches.get(&credential).and_then(Weak::upgrade);
        if let Some(found) = found.filter(|watch| !watch.over.is_cancelled()) {
            return found;
        }
        watches.retain(|_, watch| watch.strong_count() > 0);
        let over = CancellationToken::new();
        let (ended, is_over) = (over.clone(), check());
        let task = spawn(async move {
            loop {
                tokio::time::sleep(CHECK_INTERVAL).await;
                if is_over().await {
                    return ended.cancel();
                }
            }
        });
        let watch = Arc::new(Watch { over, _task: AbortOnDropHandle::new(task) });
        watches.insert(credential, Arc::downgrade(&watch));
        watch
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn a_key_has_fifty_streams_and_another_has_its_own() {
        let streams = Arc::new(Streams::default());
        let (alice, bob) = (Holder::Key(KeyId::new()), Holder::Key(KeyId::new()));
        let mut places: Vec<Place> = (0..MAX_STREAMS).map(|_| streams.enter(alice).unwrap()).collect();
        assert!(streams.enter(alice).is_none());
        assert!(streams.enter(bob).is_some() && streams.enter(Holder::Operator).is_some());
        places.pop();
        places.push(streams.enter(alice).unwrap());
        assert!(streams.enter(alice).is_none());
        drop(places);
        assert!(streams.open.lock().unwrap().is_empty(), "holders without streams are removed");
    }

    #[tokio::test(start_paused = true)]
    async fn all_streams_of_a_credential_share_one_check_and_end_together() {
        let watches = Watches::default();
        let checks = Arc::new(AtomicUsize::new(0));
        let join = |credential: [u8; 32], good_for: usize| {
            let checks = checks.clone();
            watches.join(credential, move || {
                move || {
                    let count = checks.fetch_add(1, Ordering::Relaxed);
                    async move { count >= good_for }
                }
            })
        };
        let mine: Vec<Arc<Watch>> = (0..40).map(|_| join([1; 32], 3)).collect();
        tokio::time::sleep(CHECK_INTERVAL * 3 + Duration::from_secs(1)).await;
        assert_eq!(checks.load(Ordering::Relaxed), 3, "one check each time for forty streams");
        assert!(mine.iter().all(|watch| !watch.over.is_cancelled()));
        for watch in &mine {
            watch.over.cancelled().await;
        }
        assert_eq!(checks.load(Ordering::Relaxed), 4);
        // A credential can become valid again after it was refused. Without open streams no checks run.
        let again = join([1; 32], usize::MAX);
        assert!(!again.over.is_cancelled());
        drop((mine, again));
        tokio::time::sleep(CHECK_INTERVAL * 10).await;
        assert_eq!(checks.load(Ordering::Relaxed), 4);
        drop(join([2; 32], 0));
        assert_eq!(watches.0.lock().unwrap().len(), 1, "ended watches are removed");
    }
}
