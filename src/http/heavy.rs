//! Limits expensive work of requests: grading, tokenizing, rendering, compiling schemas, searching.
//!
//! Such work never runs on the threads that answer requests. It takes one of a fixed number of [`Slots`] and its own thread, has a
//! deadline, and is asked to stop when the client leaves, the time is up or the server stops. One key holds at most half of the
//! slots. A free slot goes to the waiting key with the fewest slots, then to the one that has waited longest since its last turn.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use super::AppState;
use super::auth::Caller;
use super::error::{Code, Problem};

/// Maximum number of waiting requests per key, and in total.
const MAX_WAITING_OF_KEY: usize = 32;
const MAX_WAITING: usize = 256;
/// Maximum time that a request waits for a slot.
const MAX_WAIT: Duration = Duration::from_secs(30);
/// `Retry-After` of a refused request, in seconds.
const RETRY_AFTER_S: u64 = 5;
/// Stack size in bytes of a thread for expensive work. Only pages that are touched use memory.
const STACK_BYTES: usize = 16 << 20;
/// Minimum of the default number of slots, which is one per core: with two slots, two keys never wait for each other.
const MIN_SLOTS: usize = 2;

/// The default number of slots.
pub fn default_slots() -> usize {
    std::thread::available_parallelism().map_or(MIN_SLOTS, usize::from).max(MIN_SLOTS)
}

/// Number of reward services that `POST /rewards/test` contacts concurrently; it mostly waits for them.
pub(super) const MAX_SERVICE_TESTS: usize = 8;

/// A limit on concurrent expensive work: a number of slots, shared fairly between API keys. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Slots(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    total: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    taken: usize,
    /// API keys that use a slot or wait for one.
    keys: HashMap<String, Key>,
    waiting: Vec<Waiting>,
    /// Counter that numbers waiting requests (tickets) and granted slots (turns).
    count: u64,
}

#[derive(Debug, Default)]
struct Key {
    taken: usize,
    waiting: usize,
    /// Value of the turn counter when the key last got a slot; 0 = never.
    turn: u64,
}

#[derive(Debug)]
struct Waiting {
    key: String,
    ticket: u64,
    sender: oneshot::Sender<()>,
}

/// Why a request got no slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoSlot {
    /// Too many requests are already waiting.
    Full,
    /// No slot became free in time.
    TimedOut,
}

/// A slot, the right to run expensive work. Dropping the value passes the slot to the next waiting request.
#[derive(Debug)]
pub struct Slot {
    slots: Slots,
    key: String,
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.slots.release(&self.key);
    }
}

impl Slots {
    /// Creates a limit with this number of slots, at least 1.
    pub fn new(total: usize) -> Self {
        Self(Arc::new(Shared { total: total.max(1), state: Mutex::default() }))
    }

    /// Returns the maximum number of slots that one key may use.
    fn share(&self) -> usize {
        (self.0.total / 2).max(1)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a slot if one is free now and this key may have it.
    pub fn try_acquire(&self, key: &str) -> Option<Slot> {
        let mut state = self.state();
        let of_key = state.keys.get(key);
        if state.taken >= self.0.total
            || of_key.is_some_and(|of_key| of_key.taken >= self.share() || of_key.waiting > 0)
        {
            return None;
        }
        state.grant(key);
        Some(Slot { slots: self.clone(), key: key.to_owned() })
    }

    /// Waits until this key gets a slot.
    ///
    /// # Errors
    /// Fails when too many requests already wait, or no slot becomes free within `wait`.
    pub async fn acquire(&self, key: &str, wait: Duration) -> Result<Slot, NoSlot> {
        let (sender, receiver) = oneshot::channel();
        let ticket = {
            let mut state = self.state();
            let of_key = state.keys.get(key).map_or(0, |of_key| of_key.waiting);
            if state.waiting.len() >= MAX_WAITING || of_key >= MAX_WAITING_OF_KEY {
                return Err(NoSlot::Full);
            }
            state.count += 1;
            let ticket = state.count;
            state.keys.entry(key.to_owned()).or_default().waiting += 1;
            state.waiting.push(Waiting { key: key.to_owned(), ticket, sender });
            ticket
        };
        let mut place = Place { slots: self, key, ticket, left: true };
        self.hand_out();
        match tokio::time::timeout(wait, receiver).await {
            Ok(Ok(())) => {
                place.left = false;
                Ok(Slot { slots: self.clone(), key: key.to_owned() })
            }
            Ok(Err(_)) | Err(_) => Err(NoSlot::TimedOut),
        }
    }

    fn release(&self, key: &str) {
        {
            let mut state = self.state();
            state.taken -= 1;
            if let Some(of_key) = state.keys.get_mut(key) {
                of_key.taken -= 1;
            }
            state.forget(key);
        }
        self.hand_out();
    }

    /// Gives free slots to waiting requests, the key with the fewest slots first.
    fn hand_out(&self) {
        let mut state = self.state();
        while state.taken < self.0.total {
            let order = |waiting: &Waiting| {
                let of_key = state.keys.get(&waiting.key).map_or((0, 0), |of_key| (of_key.taken, of_key.turn));
                (of_key.0, of_key.1, waiting.ticket)
            };
            let open = state.waiting.iter().enumerate().filter(|(_, waiting)| order(waiting).0 < self.share());
            let Some(next) = open.min_by_key(|(_, waiting)| order(waiting)).map(|(index, _)| index) else { return };
            let Waiting { key, sender, .. } = state.waiting.swap_remove(next);
            if let Some(of_key) = state.keys.get_mut(&key) {
                of_key.waiting -= 1;
            }
            // If the waiting request was dropped, its `Place` releases the slot.
            state.grant(&key);
            let _ = sender.send(());
        }
    }
}

impl State {
    fn grant(&mut self, key: &str) {
        self.taken += 1;
        self.count += 1;
        let turn = self.count;
        let of_key = self.keys.entry(key.to_owned()).or_default();
        of_key.taken += 1;
        of_key.turn = turn;
    }

    fn forget(&mut self, key: &str) {
        if self.keys.get(key).is_some_and(|of_key| of_key.taken == 0 && of_key.waiting == 0) {
            self.keys.remove(key);
        }
    }
}

/// The place of a waiting request in the queue. Dropping the value while `left` is set removes the request from the queue and
/// releases a slot that it may have received meanwhile.
struct Place<'s> {
    slots: &'s Slots,
    key: &'s str,
    ticket: u64,
    left: bool,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        if !self.left {
            return;
        }
        let waited = {
            let mut state = self.slots.state();
            let found = state.waiting.iter().position(|waiting| waiting.ticket == self.ticket);
            if let Some(index) = found {
                state.waiting.swap_remove(index);
                if let Some(of_key) = state.keys.get_mut(self.key) {
                    of_key.waiting -= 1;
                }
                state.forget(self.key);
            }
            found.is_some()
        };
        if !waited {
            self.slots.release(self.key);
        }
    }
}

/// Waits until the caller's key gets a slot.
pub(super) async fn slot(state: &AppState, slots: &Slots, caller: &Caller) -> Result<Slot, Problem> {
    let key = caller.audit_name();
    let taken = tokio::select! {
        taken = slots.acquire(&key, MAX_WAIT) => taken,
        () = state.stopping.cancelled() => return Err(stopping()),
    };
    taken.map_err(|none| match none {
        NoSlot::Full => {
            let detail = format!(
                "{MAX_WAITING_OF_KEY} requests with this API key already wait for expensive work; send fewer concurrently"
            );
            Problem::new(Code::TooManyRequests, detail).retry_after(RETRY_AFTER_S)
        }
        NoSlot::TimedOut => {
            let detail = format!("the server was busy with other work for {} s; try again", MAX_WAIT.as_secs());
            Problem::new(Code::Overloaded, detail).retry_after(RETRY_AFTER_S)
        }
    })
}

/// Runs `work` on its own thread once the caller gets a slot, for `limit` at most. `work` should call its argument between
/// steps and stop when that returns true: the time is up, the client has disconnected, or the server is stopping. The slot is
/// in use until `work` ends.
///
/// # Errors
/// Fails when no slot becomes free, the time limit is reached, or the server stops.
pub(super) async fn run<T: Send + 'static>(
    state: &AppState,
    caller: &Caller,
    limit: Duration,
    work: impl FnOnce(&AtomicBool) -> T + Send + 'static,
) -> Result<T, Problem> {
    let slot = slot(state, &state.heavy, caller).await?;
    let stop = StopOnDrop(Arc::default());
    let (sender, receiver) = oneshot::channel();
    let is_stopped = stop.0.clone();
    spawn(move || {
        let _slot = slot;
        // Sending fails only if the request has ended, which no longer needs the result.
        let _ = sender.send(work(&is_stopped));
    })?;
    tokio::select! {
        done = receiver => done.map_err(|_| Problem::internal("the thread that does the expensive work of a request panicked")),
        () = tokio::time::sleep(limit) => {
            let detail = format!("the request took more than {} s: send less data in one request", limit.as_secs());
            Err(Problem::new(Code::WorkTimeout, detail))
        }
        () = state.stopping.cancelled() => Err(stopping()),
    }
}

/// Runs a future on its own thread until it ends, the client leaves or the server stops. For requests that wait for a service, but
/// may spend a long time rendering templates in between.
///
/// # Errors
/// Fails when the server stops.
pub(super) async fn drive<T: Send + 'static>(
    state: &AppState,
    slot: Slot,
    future: impl Future<Output = T> + Send + 'static,
) -> Result<T, Problem> {
    let left = CancellationToken::new();
    let _leave = left.clone().drop_guard();
    let (sender, receiver) = oneshot::channel();
    let runtime = tokio::runtime::Handle::current();
    let drive = move || {
        let _slot = slot;
        let done = runtime.block_on(async {
            tokio::select! {
                done = future => Some(done),
                () = left.cancelled() => None,
            }
        });
        // Sending fails only if the request has ended, which no longer needs the result.
        let _ = done.map(|done| sender.send(done));
    };
    spawn(drive)?;
    tokio::select! {
        done = receiver => done.map_err(|_| Problem::internal("the thread that handles a request panicked")),
        () = state.stopping.cancelled() => Err(stopping()),
    }
}

/// Returns the future's result, or 503 as soon as the server stops.
pub(super) async fn unless_stopping<T>(
    state: &AppState,
    answer: impl Future<Output = Result<T, Problem>>,
) -> Result<T, Problem> {
    tokio::select! {
        answer = answer => answer,
        () = state.stopping.cancelled() => Err(stopping()),
    }
}

fn spawn(work: impl FnOnce() + Send + 'static) -> Result<(), Problem> {
    let thread = std::thread::Builder::new().name("heavy".to_owned()).stack_size(STACK_BYTES);
    thread.spawn(work).map(drop).map_err(|error| {
        Problem::new(Code::Overloaded, "the server has no free thread for this request; try again")
            .because(error)
            .retry_after(RETRY_AFTER_S)
    })
}

fn stopping() -> Problem {
    Problem::new(Code::NotReady, "the server is shutting down; try again after the restart").retry_after(RETRY_AFTER_S)
}

struct StopOnDrop(Arc<AtomicBool>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    const LONG: Duration = Duration::from_secs(3600);

    #[tokio::test]
    async fn one_key_never_holds_more_than_half_of_the_slots() {
        for (total, share) in [(1, 1), (2, 1), (3, 1), (4, 2), (9, 4)] {
            let slots = Slots::new(total);
            let held: Vec<Slot> = (0..share).map(|_| slots.try_acquire("a").unwrap()).collect();
            assert!(slots.try_acquire("a").is_none() && slots.acquire("a", LONG).now_or_never().is_none(), "{total}");
            assert_eq!(slots.try_acquire("b").is_some(), total > 1, "{total}");
            drop(held);
            assert!(slots.try_acquire("a").is_some(), "{total}");
        }
    }

    #[tokio::test]
    async fn a_key_with_a_long_queue_does_not_keep_others_waiting() {
        let slots = Slots::new(2);
        let (first, second) = (slots.try_acquire("a").unwrap(), slots.try_acquire("b").unwrap());
        let mut greedy: Vec<_> = (0..10).map(|_| Box::pin(slots.acquire("a", LONG))).collect();
        assert!(greedy.iter_mut().all(|next| next.now_or_never().is_none()));
        let mut modest = Box::pin(slots.acquire("c", LONG));
        assert!((&mut modest).now_or_never().is_none());
        drop(first);
        let modest = modest.now_or_never().unwrap().unwrap();
        assert!(greedy.iter_mut().all(|next| next.now_or_never().is_none()));
        drop((second, modest));
        let given: Vec<_> = greedy.iter_mut().filter_map(|next| next.now_or_never()).collect();
        assert_eq!(given.len(), 1, "half of them");
    }

    #[tokio::test(start_paused = true)]
    async fn who_leaves_the_queue_leaves_no_trace_and_who_waits_too_long_is_told() {
        let slots = Slots::new(1);
        let held = slots.try_acquire("a").unwrap();
        let mut gone = Box::pin(slots.acquire("b", LONG));
        assert!((&mut gone).now_or_never().is_none());
        drop(gone);
        let mut granted = Box::pin(slots.acquire("b", LONG));
        assert!((&mut granted).now_or_never().is_none());
        assert_eq!(slots.acquire("c", Duration::from_secs(1)).await.unwrap_err(), NoSlot::TimedOut);
        drop(held);
        // The waiting request got the slot, but was dropped before it could use the slot.
        drop(granted);
        assert!(slots.try_acquire("d").is_some());
        let state = slots.state();
        assert!(state.taken == 0 && state.keys.is_empty() && state.waiting.is_empty(), "{state:?}");
    }

    #[tokio::test]
    async fn the_queue_of_a_key_has_an_end() {
        let slots = Slots::new(1);
        let _held = slots.try_acquire("a").unwrap();
        let mut queue: Vec<_> = (0..MAX_WAITING_OF_KEY).map(|_| Box::pin(slots.acquire("b", LONG))).collect();
        assert!(queue.iter_mut().all(|next| next.now_or_never().is_none()));
        assert_eq!(slots.acquire("b", LONG).now_or_never().unwrap().unwrap_err(), NoSlot::Full);
        assert!(slots.acquire("c", LONG).now_or_never().is_none());
    }
}
