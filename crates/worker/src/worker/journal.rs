//! The worker's side of the journal: entries of previous attempts, and delivery of new entries to the server, where they are
//! durable when the call returns. Entries that arrive during a call are sent together in the next one.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use futures::future::{BoxFuture, FutureExt};
use tokio::sync::{mpsc, oneshot};

use super::callbacks::CallbackInbox;
use super::client::{ClaimRef, Client, ClientError, unless_disk_full, with_retries};
use super::signals::StopSignal;
use crate::callback::{CallbackTerms, Chunk};
use crate::causes::with_causes;
use crate::engine::host::StopReason;
use crate::event::SamplePhase;
use crate::protocol::{JournalBatch, JournalEntry, RewardAnswer};
use crate::reward::journal::{JournalClosed, JournaledRequest};
use crate::sample::{RolloutId, SampledGroup};

/// Approximate maximum size of a call in bytes.
const MAX_BYTES: usize = 4 << 20;
/// Size of the journal in bytes above which an additional checkpoint is written.
const CHECKPOINT_BYTES: u64 = 64 << 20;

/// An entry (`None` waits for the entries before it) and the sender to notify when it is durable.
type Message = (Option<JournalEntry>, oneshot::Sender<()>);

/// The journal of one attempt. Cheap to clone.
#[derive(Clone)]
pub(super) struct Journal {
    sender: mpsc::UnboundedSender<Message>,
    known: Arc<Mutex<PreviousEntries>>,
    /// Approximate bytes in the journal since the last checkpoint.
    retained: Arc<AtomicU64>,
    failed: Arc<OnceLock<ClientError>>,
    /// Receives the callback results of services.
    inbox: CallbackInbox,
    terms: Arc<Option<CallbackTerms>>,
}

/// Entries of previous attempts since the checkpoint that this attempt resumes from.
#[derive(Default)]
struct PreviousEntries {
    rollouts: HashMap<RolloutId, Vec<SampledGroup>>,
    requests: HashMap<String, (RolloutId, JournaledRequest)>,
}

impl Journal {
    /// Starts the delivery for one attempt. It ends when every `Journal` is dropped, or with an error, which
    /// also raises the corresponding stop.
    pub(super) fn start(client: Client, claim_ref: ClaimRef, stop: StopSignal, terms: Option<CallbackTerms>) -> Self {
        let (sender, receiver) = mpsc::unbounded_channel();
        let failed = Arc::new(OnceLock::new());
        let inbox = CallbackInbox::new(client.clone(), claim_ref, stop.clone());
        tokio::spawn(deliver(receiver, client, claim_ref, stop, failed.clone()));
        Self { sender, known: Arc::default(), retained: Arc::default(), failed, inbox, terms: Arc::new(terms) }
    }

    /// Reads the entries of previous attempts. Returns the number of rollouts and of answers.
    pub(super) async fn read_previous(
        &self,
        client: &Client,
        claim_ref: ClaimRef,
    ) -> Result<(usize, usize), ClientError> {
        let mut after = Some(0);
        let mut answers = 0;
        while let Some(from) = after {
            let page = with_retries(|| client.journal(claim_ref, from), ClientError::is_transient).await?;
            after = page.next;
            let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
            for entry in page.entries {
                self.retained.fetch_add(retained_bytes(&entry), Ordering::Relaxed);
                match entry {
                    JournalEntry::Rollout { rollout, groups } => {
                        known.rollouts.insert(rollout, groups);
                    }
                    JournalEntry::Request { rollout, key, id, body, later, .. } => {
                        known.requests.insert(key, (rollout, JournaledRequest::Sent { id, body, later }));
                    }
                    JournalEntry::Answer { rollout, key, id, answer } => {
                        answers += 1;
                        known.requests.insert(key, (rollout, JournaledRequest::Answered { id, answer }));
                    }
                    // The server has already merged these entries into the others.
                    JournalEntry::Accepted { .. } | JournalEntry::Forget { .. } => {}
                }
            }
        }
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        Ok((known.rollouts.len(), answers))
    }

    /// Returns the completions that a previous attempt sampled. They are removed on return.
    pub(super) fn rollout(&self, id: RolloutId) -> Option<Vec<SampledGroup>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).rollouts.remove(&id)
    }

    /// Records completions without waiting. The requests for them are recorded after them, in order.
    pub(super) fn sampled(&self, rollout: RolloutId, groups: &[SampledGroup]) {
        drop(self.push(Some(JournalEntry::Rollout { rollout, groups: groups.to_vec() })));
    }

    /// Removes the entries that a checkpoint of this step covers, as the server has done.
    pub(super) fn drop_covered(&self, step: u64) {
        let open = |id: &RolloutId| id.step > step || (id.step == step && id.phase == SamplePhase::Eval);
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.rollouts.retain(|id, _| open(id));
        known.requests.retain(|_, (id, _)| open(id));
        self.retained.store(0, Ordering::Relaxed);
    }

    /// Returns whether the journal is so large that a checkpoint should be written.
    pub(super) fn is_large(&self) -> bool {
        self.retained.load(Ordering::Relaxed) >= CHECKPOINT_BYTES
    }

    /// Returns the error that ended the journal.
    pub(super) fn failure(&self) -> Option<&ClientError> {
        self.failed.get()
    }

    /// Waits until everything so far is durable, or the journal has failed.
    pub(super) async fn flush(&self) {
        let _ = self.push(None).await;
    }

    fn push(&self, entry: Option<JournalEntry>) -> oneshot::Receiver<()> {
        self.retained.fetch_add(entry.as_ref().map_or(0, retained_bytes), Ordering::Relaxed);
        let (done, receiver) = oneshot::channel();
        // If the journal has ended, `done` is dropped, which notifies the receiver.
        let _ = self.sender.send((entry, done));
        receiver
    }
}

impl crate::reward::journal::Journal for Journal {
    fn find(&self, key: &str) -> Option<JournaledRequest> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.requests.get(key).map(|(_, journaled)| journaled.clone())
    }

    fn append(&self, entry: JournalEntry) -> BoxFuture<'_, Result<(), JournalClosed>> {
        if let JournalEntry::Answer { id, .. } = &entry {
            self.inbox.forget(id);
        }
        let done = self.push(Some(entry));
        async move { done.await.map_err(|_| JournalClosed) }.boxed()
    }

    fn callbacks(&self) -> Option<&CallbackTerms> {
        self.terms.as_ref().as_ref()
    }

    fn arrived<'a>(&'a self, id: &'a str, seen: usize) -> BoxFuture<'a, Result<Chunk, JournalClosed>> {
        self.inbox.arrived(id, seen).boxed()
    }
}

async fn deliver(
    mut receiver: mpsc::UnboundedReceiver<Message>,
    client: Client,
    claim_ref: ClaimRef,
    stop: StopSignal,
    failed: Arc<OnceLock<ClientError>>,
) {
    while let Some((first, waiting)) = receiver.recv().await {
        let mut bytes = first.as_ref().map_or(0, sent_bytes);
        let (mut entries, mut done) = (Vec::from_iter(first), vec![waiting]);
        while bytes < MAX_BYTES
            && let Ok((entry, waiting)) = receiver.try_recv()
        {
            bytes += entry.as_ref().map_or(0, sent_bytes);
            entries.extend(entry);
            done.push(waiting);
        }
        let batch = JournalBatch { attempt: claim_ref.attempt, entries };
        let sent = tokio::select! {
            () = std::future::ready(()), if batch.entries.is_empty() => Ok(()),
            sent = with_retries(|| client.journal_append(claim_ref, &batch), unless_disk_full) => sent,
            _ = stop.wait_for(|stop| *stop == StopReason::LeaseLost) => Err(ClientError::LeaseLost),
        };
        if let Err(error) = sent {
            tracing::warn!(error = with_causes(&error), "the journal failed");
            match &error {
                ClientError::StorageFull { .. } => {
                    stop.raise(StopReason::Pause { reason: Some("disk_full".to_owned()) })
                }
                error if matches!(error, ClientError::LeaseLost) || error.is_transient() => {
                    stop.raise(StopReason::LeaseLost)
                }
                _ => {}
            }
            // The error is stored before `done` is dropped, so that waiting callers can read it.
            let _ = failed.set(error);
            return;
        }
        for waiting in done {
            // The caller may have stopped waiting.
            let _ = waiting.send(());
        }
    }
}

/// Estimates the size of an entry's JSON in bytes.
fn sent_bytes(entry: &JournalEntry) -> usize {
    match entry {
        JournalEntry::Request { body, .. } => 512 + body.len(),
        other => 512 + retained_bytes(other) as usize,
    }
}

/// Estimates the bytes of an entry that remain until the next checkpoint. The body of a request is removed when it is answered.
fn retained_bytes(entry: &JournalEntry) -> u64 {
    let bytes = match entry {
        JournalEntry::Rollout { groups, .. } => {
            groups.iter().flat_map(|group| &group.completions).map(|completion| completion.segments.json_bytes()).sum()
        }
        JournalEntry::Request { .. } => 256,
        JournalEntry::Answer { answer: RewardAnswer::Body { body } | RewardAnswer::Expired { body }, .. } => body.len(),
        JournalEntry::Accepted { .. } | JournalEntry::Answer { .. } | JournalEntry::Forget { .. } => 0,
    };
    bytes as u64
}
