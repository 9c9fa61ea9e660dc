//! Streams of events of one job or of all jobs, which reconnect after an interruption.

use std::time::Duration;

use futures::stream::{self, BoxStream, StreamExt};
use jiff::Timestamp;
use reqwest::Response;
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use rlood_types::id::JobId;
use rlood_types::job::State;
use serde::Deserialize;
use serde_json::Value;
use tokio::time::{Instant, sleep, timeout};

use crate::api::jobs::Job;
use crate::call::Call;
use crate::client::Client;
use crate::error::Error;
use crate::retry::{Repeat, Tries};
use crate::sse::{Message, Parser};

const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");
/// Minimum duration of a connection that counts as successful, even without an event.
const MIN_GOOD_CONNECTION: Duration = Duration::from_secs(5);

/// An event of a job.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct JobEvent {
    /// Sequence number: counts from 1 per job, without gaps.
    pub seq: i64,
    /// Type of the event: `job.started`, `step`, `warning`, ….
    #[serde(rename = "type")]
    pub kind: String,
    /// Time of the event.
    pub time: Timestamp,
    /// Attempt that the event belongs to; 0 before the first claim.
    pub attempt: u64,
    /// Data of the event, depending on its type.
    pub data: Value,
}

/// An item of [`JobUpdates`], the stream of a job's events.
#[derive(Debug, Clone, PartialEq)]
pub enum JobUpdate {
    /// An event of the job.
    Event(JobEvent),
    /// The server's retention deleted events before this client received them, up to this one.
    Removed {
        /// Sequence number (`seq`) of the last deleted event.
        to_seq: i64,
    },
    /// The job has ended, and so has its verdict if it has one; nothing comes after this.
    End {
        /// Final state of the job.
        state: State,
    },
}

/// An item of [`JobChanges`], the stream of changes of all jobs.
#[derive(Debug, Clone)]
pub enum JobChange {
    /// The stream was opened or reopened, or missed something: request the list of jobs now.
    Reload,
    /// A job is new or has changed.
    Changed(Box<Job>),
    /// A job was deleted.
    Gone(JobId),
}

/// A job's events: each once, in order, until the job and its verdict have ended. Reconnects if the connection breaks.
#[derive(Debug)]
pub struct JobUpdates {
    source: Source,
    last_seq: i64,
    last_json: String,
    is_over: bool,
}

/// The changes of all jobs, without an end.
#[derive(Debug)]
pub struct JobChanges {
    source: Source,
}

impl JobUpdates {
    pub(crate) fn new(client: &Client, call: Call, after: i64) -> Self {
        Self { source: Source::new(client, call), last_seq: after, last_json: String::new(), is_over: false }
    }

    /// Returns the `seq` of the last event that was returned, from which another follower can continue.
    pub fn last_seq(&self) -> i64 {
        self.last_seq
    }

    /// Returns the JSON of the update that [`JobUpdates::next`] returned last, as the server sent it.
    pub fn last_json(&self) -> &str {
        &self.last_json
    }

    /// Returns the next update; `None` after [`JobUpdate::End`]. The future may be dropped, and the method called again.
    ///
    /// # Errors
    /// Fails if the server rejects the request (the job does not exist, or `after` is beyond its events: `invalid_cursor`), or if
    /// several connections in a row receive nothing.
    pub async fn next(&mut self) -> Result<Option<JobUpdate>, Error> {
        while !self.is_over {
            let last = (self.last_seq > 0).then(|| HeaderValue::from(self.last_seq));
            let Signal::Message(message) = self.source.next(last).await? else { continue };
            self.last_json.clone_from(&message.data);
            match message.event.as_str() {
                "end" => {
                    #[derive(Deserialize)]
                    struct End {
                        state: State,
                    }
                    let End { state } = self.source.call.read_json(message.data.as_bytes())?;
                    self.is_over = true;
                    self.source.connection = None;
                    return Ok(Some(JobUpdate::End { state }));
                }
                "removed" => {
                    #[derive(Deserialize)]
                    struct Gone {
                        to_seq: i64,
                    }
                    let Gone { to_seq } = self.source.call.read_json(message.data.as_bytes())?;
                    if self.advance(to_seq) {
                        return Ok(Some(JobUpdate::Removed { to_seq }));
                    }
                }
                _ => {
                    let event: JobEvent = self.source.call.read_json(message.data.as_bytes())?;
                    if event.seq > self.last_seq + 1 {
                        // An event of the job was lost on the way. Another connection resumes after the last returned event.
                        self.source.reconnect(self.source.call.interrupted(None)).await?;
                    } else if self.advance(event.seq) {
                        return Ok(Some(JobUpdate::Event(event)));
                    }
                }
            }
        }
        Ok(None)
    }

    /// Records the event `seq` as returned; returns false if it was returned before.
    fn advance(&mut self, seq: i64) -> bool {
        let is_new = seq > self.last_seq;
        if is_new {
            self.last_seq = seq;
            self.source.tries.progressed();
        }
        is_new
    }

    /// Converts the updates to a stream, which ends after an error.
    pub fn into_stream(self) -> BoxStream<'static, Result<JobUpdate, Error>> {
        stream::unfold(Some(self), async |state| {
            let mut updates = state?;
            match updates.next().await {
                Ok(update) => update.map(|update| (Ok(update), Some(updates))),
                Err(error) => Some((Err(error), None)),
            }
        })
        .boxed()
    }
}

impl JobChanges {
    pub(crate) fn new(client: &Client, call: Call) -> Self {
        Self { source: Source::new(client, call) }
    }

    /// Returns the next change. The future may be dropped, and the method called again.
    ///
    /// # Errors
    /// Fails if the server rejects the request, or if several connections in a row receive nothing.
    pub async fn next(&mut self) -> Result<JobChange, Error> {
        loop {
            let Signal::Message(message) = self.source.next(None).await? else { return Ok(JobChange::Reload) };
            self.source.tries.progressed();
            match message.event.as_str() {
                "job" => return Ok(JobChange::Changed(self.source.call.read_json(message.data.as_bytes())?)),
                "gone" => {
                    #[derive(Deserialize)]
                    struct Gone {
                        id: JobId,
                    }
                    let Gone { id } = self.source.call.read_json(message.data.as_bytes())?;
                    return Ok(JobChange::Gone(id));
                }
                "reload" => return Ok(JobChange::Reload),
                _ => {}
            }
        }
    }
}

/// An item of a [`Source`]: a new connection or an event.
enum Signal {
    /// A connection was opened.
    Opened,
    /// An event arrived over the connection.
    Message(Message),
}

/// A stream of events over successive connections.
#[derive(Debug)]
struct Source {
    client: Client,
    call: Call,
    connection: Option<Connection>,
    tries: Tries,
}

#[derive(Debug)]
struct Connection {
    response: Response,
    parser: Parser,
    since: Instant,
}

impl Source {
    fn new(client: &Client, call: Call) -> Self {
        let tries = Tries::new(client.inner.retry);
        Self { client: client.clone(), call: call.accept("text/event-stream"), connection: None, tries }
    }

    /// Returns the next event; for a new connection, first that it is open. `last` is the id of the last event that was received.
    async fn next(&mut self, last: Option<HeaderValue>) -> Result<Signal, Error> {
        loop {
            let Some(connection) = &mut self.connection else {
                let headers = last.iter().map(|last| (LAST_EVENT_ID, last.clone())).collect::<HeaderMap>();
                match self.client.open(&self.call, &headers, self.client.inner.timeout).await {
                    Ok(response) => {
                        let (parser, since) = (Parser::default(), Instant::now());
                        self.connection = Some(Connection { response, parser, since });
                        return Ok(Signal::Opened);
                    }
                    Err(error) => self.reconnect(error).await?,
                }
                continue;
            };
            if let Some(message) = connection.parser.next() {
                return Ok(Signal::Message(message));
            }
            let stall = self.client.inner.stall_timeout;
            let error = match timeout(stall, connection.response.chunk()).await {
                Ok(Ok(Some(piece))) if connection.parser.push(&piece) => continue,
                Ok(Ok(Some(_))) => {
                    return Err(self.call.not_understood("an event of the server's event stream is too long"));
                }
                Ok(Ok(None)) => self.call.interrupted(None),
                Ok(Err(error)) => self.call.interrupted(Some(error)),
                Err(_) => self.call.stalled(stall),
            };
            self.reconnect(error).await?;
        }
    }

    /// Closes the broken connection and waits for the next try, or gives up after too many.
    async fn reconnect(&mut self, error: Error) -> Result<(), Error> {
        if self.connection.take().is_some_and(|connection| connection.since.elapsed() >= MIN_GOOD_CONNECTION) {
            self.tries.progressed();
        }
        match self.tries.pause_after(&error, &Repeat::Harmless) {
            Some(pause) => {
                sleep(pause).await;
                Ok(())
            }
            None => Err(error),
        }
    }
}
