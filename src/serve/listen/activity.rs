//! What each connection does: so that idle ones end, and make room when there are too many.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use http_body::{Frame, SizeHint};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::http::system::Connections;

/// Of one connection.
#[derive(Debug)]
pub(super) struct Activity {
    /// Requests whose answers are not sent yet.
    in_flight: AtomicUsize,
    /// It ever asked for something.
    asked: AtomicBool,
    /// When it began to be idle.
    idle_since: Mutex<Instant>,
    /// Set to make room.
    cut: CancellationToken,
}

/// A request in flight; dropped when its answer is sent.
#[derive(Debug)]
pub(super) struct AtWork(Arc<Activity>);

impl Drop for AtWork {
    fn drop(&mut self) {
        *self.0.idle_since.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
        self.0.in_flight.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Activity {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            in_flight: AtomicUsize::new(0),
            asked: AtomicBool::new(false),
            idle_since: Mutex::new(Instant::now()),
            cut: CancellationToken::new(),
        })
    }

    /// A request arrived.
    pub(super) fn begin(activity: &Arc<Self>) -> AtWork {
        activity.in_flight.fetch_add(1, Ordering::AcqRel);
        activity.asked.store(true, Ordering::Release);
        AtWork(activity.clone())
    }

    fn idle_since(&self) -> Option<Instant> {
        let since = *self.idle_since.lock().unwrap_or_else(PoisonError::into_inner);
        (self.in_flight.load(Ordering::Acquire) == 0).then_some(since)
    }

    /// Returns when the connection has asked for nothing for too long (`first`: since it began; `later`: since its last
    /// answer), or has to make room.
    pub(super) async fn idle(&self, first: Duration, later: Duration) {
        loop {
            let limit = if self.asked.load(Ordering::Acquire) { later } else { first };
            let now = Instant::now();
            let ends = self.idle_since().map_or(now + limit, |since| since + limit);
            if ends <= now {
                return;
            }
            tokio::select! {
                () = self.cut.cancelled() => return,
                () = tokio::time::sleep_until(ends) => {}
            }
        }
    }
}

/// All connections.
pub(super) struct Registry {
    most: usize,
    counts: Arc<Connections>,
    open: Mutex<HashMap<u64, Arc<Activity>>>,
    next: std::sync::atomic::AtomicU64,
}

/// A connection's place, given back when dropped.
pub(super) struct Place {
    pub(super) activity: Arc<Activity>,
    registry: Arc<Registry>,
    number: u64,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.registry.lock().remove(&self.number);
        self.registry.counts.open.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Registry {
    pub(super) fn new(most: usize, counts: Arc<Connections>) -> Arc<Self> {
        Arc::new(Self { most, counts, open: Mutex::default(), next: Default::default() })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<u64, Arc<Activity>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for a new connection; None when all are taken by connections at work.
    pub(super) fn admit(self: &Arc<Self>) -> Option<Place> {
        if self.lock().len() >= self.most && !self.make_room() {
            self.counts.refused.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        let (number, activity) = (self.next.fetch_add(1, Ordering::Relaxed), Activity::new());
        self.lock().insert(number, activity.clone());
        self.counts.open.fetch_add(1, Ordering::Relaxed);
        self.counts.accepted.fetch_add(1, Ordering::Relaxed);
        Some(Place { activity, registry: self.clone(), number })
    }

    /// Cuts all connections without a request in flight.
    pub(super) fn cut_idle(&self) {
        let open = self.lock();
        open.values().filter(|activity| activity.idle_since().is_some()).for_each(|activity| activity.cut.cancel());
    }

    /// Cuts the connection that was idle longest; false when all are at work.
    pub(super) fn make_room(&self) -> bool {
        let open = self.lock();
        let idle = open.values().filter(|activity| !activity.cut.is_cancelled());
        let oldest =
            idle.filter_map(|activity| Some((activity.idle_since()?, activity))).min_by_key(|(since, _)| *since);
        let Some((_, activity)) = oldest else { return false };
        activity.cut.cancel();
        self.counts.evicted.fetch_add(1, Ordering::Relaxed);
        true
    }
}

/// An answer's body that keeps its request in flight until it is sent.
pub(super) struct Tracked {
    body: Body,
    _at_work: AtWork,
}

impl Tracked {
    pub(super) fn new(body: Body, at_work: AtWork) -> Self {
        Self { body, _at_work: at_work }
    }
}

impl http_body::Body for Tracked {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.get_mut().body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_connection_is_idle_only_between_its_requests() {
        let activity = Activity::new();
        let limits = (Duration::from_secs(2), Duration::from_secs(10));
        let begun = Instant::now();
        activity.idle(limits.0, limits.1).await;
        assert_eq!(begun.elapsed().as_secs(), 2, "it never asked for anything");
        let at_work = Activity::begin(&activity);
        assert!(tokio::time::timeout(Duration::from_secs(100), activity.idle(limits.0, limits.1)).await.is_err());
        drop(at_work);
        let begun = Instant::now();
        activity.idle(limits.0, limits.1).await;
        assert_eq!(begun.elapsed().as_secs(), 10);
    }

    #[tokio::test(start_paused = true)]
    async fn the_one_that_was_idle_longest_makes_room() {
        let counts = Arc::new(Connections::default());
        let registry = Registry::new(2, counts.clone());
        let first = registry.admit().unwrap();
        tokio::time::advance(Duration::from_secs(1)).await;
        let second = registry.admit().unwrap();
        let at_work = Activity::begin(&first.activity);
        let third = registry.admit().unwrap();
        assert!(second.activity.cut.is_cancelled() && !first.activity.cut.is_cancelled(), "the first one is at work");
        drop(second);
        let others = Activity::begin(&third.activity);
        assert!(registry.admit().is_none(), "both are at work");
        drop((at_work, others, first));
        assert!(registry.admit().is_some());
        assert_eq!(counts.refused.load(Ordering::Relaxed), 1);
    }
}
