//! The worker's side of the journal (the record of sampled completions and reward requests that lets an interrupted job resume
//! exactly): reads the entries of previous attempts, and sends new entries to the server, which has stored them when the call
//! returns. Entries that arrive during a call are sent together in the next one.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use futures::future::{BoxFuture, FutureExt};
use serde_json::Value;
use tokio::sync::{mpsc, oneshot};

use super::callbacks::CallbackInbox;
use super::client::{ClaimRef, Client, ClientError, unless_disk_full, with_retries};
use super::signals::StopSignal;
use crate::callback::{CallbackTerms, Chunk};
use crate::engine::host::StopReason;
use crate::error_text::with_causes;
use crate::event::SamplePhase;
use crate::protocol::{JournalBatch, JournalEntry, RewardAnswer};
use crate::reward::journal::{JournalClosed, JournaledRequest};
use crate::rollout::{RolloutId, SampledGroup};

/// Approximate maximum size in bytes of the entries in one call to the server.
const MAX_BYTES: usize = 4 << 20;
/// Size of the journal in bytes above which an additional checkpoint is written, which makes the older entries obsolete.
const CHECKPOINT_BYTES: u64 = 64 << 20;

/// Approximate size of a sampler's state in bytes: 5,056 of torch's generator on the CPU, in base64.
const SAMPLER_BYTES: usize = 7000;

/// A journal entry, and the sender to notify when the server has stored it. Without an entry (`None`), the notification is
/// about the entries before.
type Message = (Option<JournalEntry>, oneshot::Sender<()>);

/// The journal of one attempt at a job. Cheap to clone.
#[derive(Clone)]
pub(super) struct Journal {
    sender: mpsc::UnboundedSender<Message>,
    known: Arc<Mutex<PreviousEntries>>,
    /// Approximate bytes in the journal since the last checkpoint.
    retained: Arc<AtomicU64>,
    failed: Arc<OnceLock<ClientError>>,
    /// Receives the callback results of reward services.
    inbox: CallbackInbox,
    terms: Arc<Option<CallbackTerms>>,
}

/// Entries that previous attempts wrote after the checkpoint that this attempt resumes from.
#[derive(Default)]
struct PreviousEntries {
    rollouts: HashMap<RolloutId, (Vec<SampledGroup>, Vec<Value>)>,
    requests: HashMap<String, (RolloutId, JournaledRequest)>,
}

impl Journal {
    /// Starts the task that sends the journal entries of one attempt to the server. The task ends when every `Journal` is dropped,
    /// or with an error, which also stops the attempt.
    pub(super) fn start(client: Client, claim_ref: ClaimRef, stop: StopSignal, terms: Option<CallbackTerms>) -> Self {
        let (sender, receiver) = mpsc::unbounded_channel();
        let failed = Arc::new(OnceLock::new());
        let inbox = CallbackInbox::new(client.clone(), claim_ref, stop.clone());
        tokio::spawn(deliver(receiver, client, claim_ref, stop, failed.clone()));
        Self { sender, known: Arc::default(), retained: Arc::default(), failed, inbox, terms: Arc::new(terms) }
    }

    /// Reads the journal entries of previous attempts. Returns the number of rollouts and of reward answers.
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
                    JournalEntry::Rollout { rollout, groups, samplers } => {
                        known.rollouts.insert(rollout, (groups, samplers));
                    }
                    JournalEntry::Request { rollout, key, id, body, later, .. } => {
                        known.requests.insert(key, (rollout, JournaledRequest::Sent { id, body, later }));
                    }
                    JournalEntry::Answer { rollout, key, id, answer } => {
                        answers += 1;
                        known.requests.insert(key, (rollout, JournaledRequest::Answered { id, answer }));
                    }
                    // The server has already merged entries of these kinds into the entries of their requests.
                    JournalEntry::Accepted { .. } | JournalEntry::Forget { .. } => {}
                }
            }
        }
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        Ok((known.rollouts.len(), answers))
    }

    /// Takes the completions of a rollout that a previous attempt sampled out of the journal, so that they are not sampled again,
    /// and the states of the samplers after it.
    pub(super) fn rollout(&self, id: RolloutId) -> Option<(Vec<SampledGroup>, Vec<Value>)> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).rollouts.remove(&id)
    }

    /// Records the sampled completions of a rollout without waiting. The reward requests for them are recorded later
    /// in the same queue.
    pub(super) fn sampled(&self, rollout: RolloutId, groups: &[SampledGroup], samplers: &[Value]) {
        let (groups, samplers) = (groups.to_vec(), samplers.to_vec());
        drop(self.push(Some(JournalEntry::Rollout { rollout, groups, samplers })));
    }

    /// Removes the entries of steps before a checkpoint, which a resumed attempt does not need. The server has done the same.
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

    /// Returns the error because of which the journal accepts no more entries.
    pub(super) fn failure(&self) -> Option<&ClientError> {
        self.failed.get()
    }

    /// Waits until the server has stored all entries so far, or the journal has failed.
    pub(super) async fn flush(&self) {
        let _ = self.push(None).await;
    }

    fn push(&self, entry: Option<JournalEntry>) -> oneshot::Receiver<()> {
        self.retained.fetch_add(entry.as_ref().map_or(0, retained_bytes), Ordering::Relaxed);
        let (done, receiver) = oneshot::channel();
        // If the task that sends entries has ended, `send` drops `done`, which notifies the receiver.
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
            tracing::warn!(error = with_causes(&error), "cannot send entries of the job's journal to the server");
            match &error {
                ClientError::StorageFull { .. } => {
                    stop.raise(StopReason::Pause { reason: Some("disk_full".to_owned()) })
                }
                error if matches!(error, ClientError::LeaseLost) || error.is_transient() => {
                    stop.raise(StopReason::LeaseLost)
                }
                _ => {}
            }
            // The error is stored before the senders in `done` are dropped, so that the callers that wait for them can read it.
            let _ = failed.set(error);
            return;
        }
        for waiting in done {
            // The caller that appended the entry may have stopped waiting.
            let _ = waiting.send(());
        }
    }
}

/// Estimates the size of a journal entry's JSON in bytes.
fn sent_bytes(entry: &JournalEntry) -> usize {
    match entry {
        JournalEntry::Request { body, .. } => 512 + body.len(),
        other => 512 + retained_bytes(other) as usize,
    }
}

/// Estimates how many bytes of a journal entry the server keeps until the next checkpoint. The server removes a request's body when
/// the request is answered.
fn retained_bytes(entry: &JournalEntry) -> u64 {
    let bytes = match entry {
        JournalEntry::Rollout { groups, samplers, .. } => {
            let completions = groups.iter().flat_map(|group| &group.completions);
            let completions: usize = completions.map(|completion| completion.segments.json_bytes()).sum();
            completions + samplers.len() * SAMPLER_BYTES
        }
        JournalEntry::Request { .. } => 256,
        JournalEntry::Answer { answer: RewardAnswer::Body { body } | RewardAnswer::Expired { body }, .. } => body.len(),
        JournalEntry::Accepted { .. } | JournalEntry::Answer { .. } | JournalEntry::Forget { .. } => 0,
    };
    bytes as u64
}
