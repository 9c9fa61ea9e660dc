//! Tracks the activity of each connection: idle ones time out, and are closed first when there are too many.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use http_body::{Frame, SizeHint};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Maximum number of event streams per connection; an HTTP/1.1 connection carries one.
const STREAMS_OF_CONNECTION: usize = 16;
/// Fraction (one eighth) and minimum number of connections reserved for workers and for connections without a request
/// yet; at most half.
const KEPT_PART: usize = 8;
const KEPT_AT_LEAST: usize = 16;

/// Counters of a listener's connections, for `/metrics`. The accept loop updates them.
#[derive(Debug, Default)]
pub struct Connections {
    /// Number of open connections.
    pub open: AtomicU64,
    /// Total number of accepted connections.
    pub accepted: AtomicU64,
    /// Number of connections that were closed to make room.
    pub evicted: AtomicU64,
    /// Number of new connections that were closed because the limit was reached.
    pub refused: AtomicU64,
}

/// The activity of one connection: its requests in flight.
#[derive(Debug)]
pub(super) struct Activity {
    state: Mutex<State>,
    /// Counter, shared by all connections, of those with a request in flight whose latest request did not come from a worker.
    busy_others: Arc<AtomicUsize>,
    /// Token that is cancelled to close the connection.
    cut: CancellationToken,
}

#[derive(Debug)]
struct State {
    /// Number of requests in flight, whose responses are not fully sent.
    in_flight: usize,
    /// Number of event streams among the requests in flight.
    streams: usize,
    /// Whether the connection ever sent a request.
    asked: bool,
    /// Whether the connection's latest request came from a worker.
    is_worker: bool,
    /// When the connection became idle.
    idle_since: Instant,
    /// When the oldest request in flight started.
    busy_since: Instant,
}

impl State {
    fn is_busy_other(&self) -> bool {
        self.in_flight > 0 && !self.is_worker
    }
}

/// A request in flight. The value is dropped when the response was sent.
#[derive(Debug)]
pub(super) struct AtWork(Arc<Activity>);

impl Drop for AtWork {
    fn drop(&mut self) {
        self.0.change(|state| {
            state.in_flight -= 1;
            state.idle_since = Instant::now();
        });
    }
}

impl Activity {
    fn new(busy_others: Arc<AtomicUsize>) -> Arc<Self> {
        let now = Instant::now();
        let state =
            State { in_flight: 0, streams: 0, asked: false, is_worker: false, idle_since: now, busy_since: now };
        Arc::new(Self { state: Mutex::new(state), busy_others, cut: CancellationToken::new() })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.lock();
        let was_busy = state.is_busy_other();
        let result = change(&mut state);
        match (was_busy, state.is_busy_other()) {
            (false, true) => drop(self.busy_others.fetch_add(1, Ordering::AcqRel)),
            (true, false) => drop(self.busy_others.fetch_sub(1, Ordering::AcqRel)),
            (true, true) | (false, false) => {}
        }
        result
    }

    /// Records the arrival of a request.
    pub(super) fn begin(activity: &Arc<Self>) -> AtWork {
        activity.change(|state| {
            if state.in_flight == 0 {
                state.busy_since = Instant::now();
            }
            state.in_flight += 1;
            state.asked = true;
        });
        AtWork(activity.clone())
    }

    /// Returns the rank of this connection in the order in which connections are closed to make room; None = it
    /// must not be closed.
    fn rank(&self) -> Option<(Rank, Instant)> {
        let state = self.lock();
        match (state.in_flight, state.is_worker) {
            (0, false) => Some((Rank::Idle, state.idle_since)),
            (0, true) => Some((Rank::IdleWorker, state.idle_since)),
            (in_flight, false) if in_flight == state.streams => Some((Rank::Streams, state.busy_since)),
            (_, _) => None,
        }
    }

    /// Returns when the connection was idle for too long (`first`: since it was opened; `later`: since its last response), or must
    /// be closed to make room.
    pub(super) async fn idle(&self, first: Duration, later: Duration) {
        loop {
            let now = Instant::now();
            let ends = {
                let state = self.lock();
                let limit = if state.asked { later } else { first };
                if state.in_flight == 0 { state.idle_since + limit } else { now + limit }
            };
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

/// Kinds of connections that may be closed to make room, in the order in which they are closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
    /// A connection without a request in flight.
    Idle,
    /// A connection with only event streams in flight, which clients reconnect and resume.
    Streams,
    /// A worker's connection without a request in flight.
    IdleWorker,
}

/// All open connections of a listener.
#[derive(Debug)]
pub(super) struct Registry {
    most: usize,
    /// Maximum number of connections with requests in flight that do not come from workers.
    most_busy_others: usize,
    busy_others: Arc<AtomicUsize>,
    counts: Arc<Connections>,
    open: Mutex<HashMap<u64, Arc<Activity>>>,
    next: AtomicU64,
}

/// The slot of an open connection, released when the value is dropped.
pub(super) struct Place {
    pub(super) connection: Connection,
    number: u64,
}

impl Drop for Place {
    fn drop(&mut self) {
        let Connection { registry, .. } = &self.connection;
        registry.lock().remove(&self.number);
        registry.counts.open.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Registry {
    pub(super) fn new(most: usize, counts: Arc<Connections>) -> Arc<Self> {
        let kept = (most / KEPT_PART).max(KEPT_AT_LEAST).min(most / 2);
        Arc::new(Self {
            most,
            most_busy_others: most - kept,
            busy_others: Arc::default(),
            counts,
            open: Mutex::default(),
            next: AtomicU64::default(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Arc<Activity>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a slot for a new connection; None when busy connections use all of them.
    pub(super) fn admit(self: &Arc<Self>) -> Option<Place> {
        if self.lock().len() >= self.most && !self.make_room() {
            self.counts.refused.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let activity = Activity::new(self.busy_others.clone());
        self.lock().insert(number, activity.clone());
        self.counts.open.fetch_add(1, Ordering::Relaxed);
        self.counts.accepted.fetch_add(1, Ordering::Relaxed);
        Some(Place { connection: Connection { activity, registry: self.clone() }, number })
    }

    /// Closes all connections without a request in flight.
    pub(super) fn cut_idle(&self) {
        let open = self.lock();
        let is_idle = |activity: &&Arc<Activity>| activity.lock().in_flight == 0;
        open.values().filter(is_idle).for_each(|activity| activity.cut.cancel());
    }

    /// Closes the connection that is first in the order of ranks; false when all are busy.
    pub(super) fn make_room(&self) -> bool {
        self.cut_first(|_| true)
    }

    /// Closes the first connection whose rank the filter accepts; false when there is none.
    fn cut_first(&self, may_go: impl Fn(Rank) -> bool) -> bool {
        let open = self.lock();
        let uncut = open.values().filter(|activity| !activity.cut.is_cancelled());
        let ranked = uncut.filter_map(|activity| Some((activity.rank()?, activity)));
        let first = ranked.filter(|((rank, _), _)| may_go(*rank)).min_by_key(|(place, _)| *place);
        let Some((_, activity)) = first else { return false };
        activity.cut.cancel();
        self.counts.evicted.fetch_add(1, Ordering::Relaxed);
        true
    }
}

/// Handle of the connection that a request came over, stored as an extension of the request.
#[derive(Debug, Clone)]
pub struct Connection {
    activity: Arc<Activity>,
    registry: Arc<Registry>,
}

/// Why a connection cannot carry a request for now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Crowded {
    /// All connections that are not reserved for workers are busy.
    Connections,
    /// The connection has reached its limit of event streams.
    Streams,
}

/// A counted event stream of a connection. The value is dropped when the stream ends.
#[derive(Debug)]
pub struct StreamPlace(Arc<Activity>);

impl Drop for StreamPlace {
    fn drop(&mut self) {
        self.0.change(|state| state.streams -= 1);
    }
}

impl Connection {
    pub(super) fn activity(&self) -> Arc<Activity> {
        self.activity.clone()
    }

    /// Marks the connection as that of a worker, which is the last to be closed.
    pub fn mark_worker(&self) {
        self.activity.change(|state| state.is_worker = true);
    }

    /// Admits a request that does not come from a worker. When such requests use all connections that are not reserved for
    /// workers, the connection of the oldest event stream is closed to make room, except for another stream.
    ///
    /// # Errors
    /// Fails when no connection can be closed.
    pub fn admit(&self, asks_for_stream: bool) -> Result<(), Crowded> {
        let Self { activity, registry } = self;
        // The new request does not count as a stream yet, so its own connection cannot be the one that is closed.
        activity.change(|state| state.is_worker = false);
        // The number of busy connections already includes that of this request.
        if registry.busy_others.load(Ordering::Acquire) <= registry.most_busy_others {
            return Ok(());
        }
        if !asks_for_stream && registry.cut_first(|rank| rank == Rank::Streams) {
            return Ok(());
        }
        Err(Crowded::Connections)
    }

    /// Counts a new event stream of the connection.
    ///
    /// # Errors
    /// Fails when the connection has too many event streams.
    pub fn open_stream(&self) -> Result<StreamPlace, Crowded> {
        self.activity.change(|state| {
            if state.streams >= STREAMS_OF_CONNECTION {
                return Err(Crowded::Streams);
            }
            state.streams += 1;
            Ok(StreamPlace(self.activity.clone()))
        })
    }
}

/// A response body that keeps its request in flight until it was sent.
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

    fn registry(most: usize) -> (Arc<Registry>, Arc<Connections>) {
        let counts = Arc::new(Connections::default());
        (Registry::new(most, counts.clone()), counts)
    }

    fn is_cut(place: &Place) -> bool {
        place.connection.activity.cut.is_cancelled()
    }

    /// Opens a connection with an event stream, for tests.
    fn stream(registry: &Arc<Registry>) -> (Place, AtWork, StreamPlace) {
        let place = registry.admit().unwrap();
        let at_work = Activity::begin(&place.connection.activity());
        place.connection.admit(true).unwrap();
        let stream = place.connection.open_stream().unwrap();
        (place, at_work, stream)
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_is_idle_only_between_its_requests() {
        let activity = Activity::new(Arc::default());
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
        let (registry, counts) = registry(2);
        let first = registry.admit().unwrap();
        tokio::time::advance(Duration::from_secs(1)).await;
        let second = registry.admit().unwrap();
        let at_work = Activity::begin(&first.connection.activity());
        let third = registry.admit().unwrap();
        assert!(is_cut(&second) && !is_cut(&first), "the first one is at work");
        drop(second);
        let others = Activity::begin(&third.connection.activity());
        assert!(registry.admit().is_none(), "both are at work");
        drop((at_work, others, first));
        assert!(registry.admit().is_some());
        assert_eq!(counts.refused.load(Ordering::Relaxed), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn streams_make_room_before_an_idle_worker_and_a_busy_worker_never() {
        let (registry, _) = registry(4);
        let worker = registry.admit().unwrap();
        let other_worker = registry.admit().unwrap();
        for worker in [&worker, &other_worker] {
            drop(Activity::begin(&worker.connection.activity()));
            worker.connection.mark_worker();
        }
        let _busy = Activity::begin(&worker.connection.activity());
        let first = stream(&registry);
        tokio::time::advance(Duration::from_secs(1)).await;
        let second = stream(&registry);
        let mut new = Vec::new();
        for cut in [[true, false, false], [true, true, false], [true, true, true]] {
            let place = registry.admit().unwrap();
            new.push(Activity::begin(&place.connection.activity()));
            new.last().unwrap().0.change(|state| state.is_worker = true);
            std::mem::forget(place);
            assert_eq!([&first.0, &second.0, &other_worker].map(is_cut), cut);
        }
        assert!(registry.admit().is_none() && !is_cut(&worker));
    }

    #[test]
    fn a_part_of_all_connections_is_kept_for_workers() {
        let (registry, _) = registry(64);
        let mut streams: Vec<_> = (0..48).map(|_| stream(&registry)).collect();
        let place = registry.admit().unwrap();
        let request = Activity::begin(&place.connection.activity());
        assert_eq!(place.connection.admit(true), Err(Crowded::Connections), "no stream makes room for a stream");
        assert_eq!(place.connection.admit(false), Ok(()), "one makes room for a request");
        assert_eq!(streams.iter().filter(|(place, ..)| is_cut(place)).count(), 1);
        // Requests of workers do not count as busy connections of other clients.
        place.connection.mark_worker();
        let next = registry.admit().unwrap();
        let _of_next = Activity::begin(&next.connection.activity());
        assert_eq!(next.connection.admit(true), Err(Crowded::Connections));
        streams.truncate(47);
        assert_eq!(next.connection.admit(true), Ok(()));
        drop(request);
    }

    #[test]
    fn slow_requests_are_held_off_the_part_that_is_kept() {
        let (registry, _) = registry(16);
        let busy: Vec<_> = (0..8)
            .map(|_| {
                let place = registry.admit().unwrap();
                let at_work = Activity::begin(&place.connection.activity());
                assert_eq!(place.connection.admit(false), Ok(()));
                (place, at_work)
            })
            .collect();
        let ninth = registry.admit().unwrap();
        let at_work = Activity::begin(&ninth.connection.activity());
        assert_eq!(ninth.connection.admit(false), Err(Crowded::Connections));
        drop(at_work);
        drop(busy);
        let _at_work = Activity::begin(&ninth.connection.activity());
        assert_eq!(ninth.connection.admit(false), Ok(()));
    }

    #[test]
    fn a_connection_carries_sixteen_streams() {
        let (registry, _) = registry(64);
        let place = registry.admit().unwrap();
        let mut streams: Vec<_> = (0..16).map(|_| place.connection.open_stream().unwrap()).collect();
        assert_eq!(place.connection.open_stream().unwrap_err(), Crowded::Streams);
        streams.pop();
        assert!(place.connection.open_stream().is_ok());
    }
}
