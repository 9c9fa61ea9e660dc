//! Sends the events and log lines of a job to the server: in order, in batches, each batch repeatedly until the
//! server has stored it.

use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use super::client::{ClaimRef, Client, ClientError, with_retries};
use super::signals::StopSignal;
use crate::engine::host::StopReason;
use crate::event::{Event, Sample};
use crate::protocol::EventBatch;

/// How long an event may wait for other events to share its batch.
const BATCH_DELAY: Duration = Duration::from_millis(250);
/// Maximum number of events and log lines in one request to the server.
const MAX_EVENTS: usize = 1000;
/// Approximate maximum size in bytes of the events in one request to the server.
const MAX_BYTES: usize = 1024 * 1024;

enum Message {
    Event(Event),
    Log(String),
    Flush(oneshot::Sender<()>),
}

/// Queue of events for the server. Cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct Events(mpsc::UnboundedSender<Message>);

/// Error: events can no longer be sent, because the claim on the job is lost or the server rejects them.
#[derive(Debug, thiserror::Error)]
#[error("the job's events can no longer be sent to the server")]
pub(super) struct Undelivered;

impl Events {
    /// Starts the task that sends the events of one attempt. The task ends when every `Events` is dropped and all events are sent,
    /// or with the error that prevents sending. A lost claim and a long outage of the server also stop the attempt.
    pub(super) fn start(client: Client, claim_ref: ClaimRef, stop: StopSignal) -> (Self, Delivery) {
        let (sender, receiver) = mpsc::unbounded_channel();
        (Self(sender), tokio::spawn(deliver(receiver, client, claim_ref, stop)))
    }

    /// Queues an event for the server. An event with many samples is split into several of bounded size.
    pub(super) fn send(&self, event: Event) -> Result<(), Undelivered> {
        let Event::Samples { samples } = event else { return self.push(Message::Event(event)) };
        let mut piece = Vec::new();
        let mut bytes = 0;
        for sample in samples {
            bytes += size_of_sample(&sample);
            piece.push(sample);
            if bytes >= MAX_BYTES / 4 {
                self.push(Message::Event(Event::Samples { samples: std::mem::take(&mut piece) }))?;
                bytes = 0;
            }
        }
        if piece.is_empty() { Ok(()) } else { self.push(Message::Event(Event::Samples { samples: piece })) }
    }

    /// Queues a line for the job's log.
    pub(super) fn log(&self, line: impl Into<String>) {
        let line = line.into();
        tracing::info!("{line}");
        // If the task that sends events has ended, the line is only in the worker's own log.
        let _ = self.push(Message::Log(line));
    }

    /// Waits until the server has stored all events queued so far.
    pub(super) async fn flush(&self) -> Result<(), Undelivered> {
        let (sender, receiver) = oneshot::channel();
        self.push(Message::Flush(sender))?;
        receiver.await.map_err(|_| Undelivered)
    }

    fn push(&self, message: Message) -> Result<(), Undelivered> {
        self.0.send(message).map_err(|_| Undelivered)
    }
}

/// The task that sends events; returns the error that ended it.
pub(super) type Delivery = tokio::task::JoinHandle<Result<(), ClientError>>;

async fn deliver(
    mut receiver: mpsc::UnboundedReceiver<Message>,
    client: Client,
    claim_ref: ClaimRef,
    stop: StopSignal,
) -> Result<(), ClientError> {
    let mut number = 0;
    while let Some((content, flushes)) = collect(&mut receiver).await {
        if !content.events.is_empty() || !content.log.is_empty() {
            let Content { events, log, .. } = content;
            let batch = EventBatch { attempt: claim_ref.attempt, batch: number, events, log };
            let sent = tokio::select! {
                sent = with_retries(|| client.events(claim_ref, &batch), ClientError::is_transient) => sent,
                _ = stop.wait_for(|stop| *stop == StopReason::LeaseLost) => Err(ClientError::LeaseLost),
            };
            if let Err(error) = sent {
                if matches!(error, ClientError::LeaseLost) || error.is_transient() {
                    stop.raise(StopReason::LeaseLost);
                }
                return Err(error);
            }
            number += 1;
        }
        for flushed in flushes {
            // The caller of `flush` may have stopped waiting.
            let _ = flushed.send(());
        }
    }
    Ok(())
}

#[derive(Default)]
struct Content {
    events: Vec<Event>,
    log: Vec<String>,
    bytes: usize,
}

impl Content {
    fn is_full(&self) -> bool {
        self.events.len() + self.log.len() >= MAX_EVENTS || self.bytes >= MAX_BYTES
    }
}

/// Collects events for one request, for up to [`BATCH_DELAY`] after the first one or until the batch is full. A call of
/// `flush` ends the collection.
async fn collect(receiver: &mut mpsc::UnboundedReceiver<Message>) -> Option<(Content, Vec<oneshot::Sender<()>>)> {
    let mut content = Content::default();
    let mut message = receiver.recv().await?;
    let deadline = Instant::now() + BATCH_DELAY;
    loop {
        match message {
            Message::Event(event) => {
                content.bytes += size_of_event(&event);
                content.events.push(event);
            }
            Message::Log(line) => {
                content.bytes += line.len();
                content.log.push(line);
            }
            Message::Flush(flushed) => return Some((content, vec![flushed])),
        }
        if content.is_full() {
            return Some((content, Vec::new()));
        }
        message = match tokio::time::timeout_at(deadline, receiver.recv()).await {
            Ok(Some(message)) => message,
            Ok(None) | Err(_) => return Some((content, Vec::new())),
        };
    }
}

/// Estimates the size of an event's JSON in bytes.
fn size_of_event(event: &Event) -> usize {
    match event {
        Event::Samples { samples } => samples.iter().map(size_of_sample).sum(),
        Event::Step { metrics, .. } => 64 + 64 * metrics.len(),
        Event::Phase { .. } => 64,
        Event::Warning { message, .. } | Event::Reward { message, .. } => 512 + message.len(),
        Event::Alert { alert } => 1024 + alert.message.len() + alert.fix.len(),
        Event::AlertCleared { .. } | Event::EarlyStopping { .. } | Event::Diverged { .. } => 256,
        Event::TrainingPhase { .. } => 1024,
    }
}

fn size_of_sample(sample: &Sample) -> usize {
    512 + 64 * sample.rewards.len() + sample.prompt.len() + sample.completion.len()
}
