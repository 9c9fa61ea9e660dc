//! What happens to a job, and to all jobs, as it happens: streams of events that survive cut connections.

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
/// A connection that lasted so long was a good one, even if nothing happened meanwhile.
const GOOD_CONNECTION: Duration = Duration::from_secs(5);

/// An event of a job.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct JobEvent {
    /// Counts from 1 per job, without gap.
    pub seq: i64,
    /// What happened: `job.started`, `step`, `warning`, ….
    #[serde(rename = "type")]
    pub kind: String,
    /// When.
    pub time: Timestamp,
    /// The attempt it belongs to; 0 before the first claim.
    pub attempt: u64,
    /// By type.
    pub data: Value,
}

/// What [`JobUpdates`] tells.
#[derive(Debug, Clone, PartialEq)]
pub enum JobUpdate {
    /// Something happened.
    Event(JobEvent),
    /// The server's retention removed events that were not told yet, up to this one.
    Removed {
        /// The `seq` of the last one.
        to_seq: i64,
    },
    /// The job is over: nothing comes after this.
    End {
        /// How it ended.
        state: State,
    },
}

/// What [`JobChanges`] tells.
#[derive(Debug, Clone)]
pub enum JobChange {
    /// The stream is open, for the first time or again, or it missed something: ask for the list of jobs now.
    Reload,
    /// A job is new or changed.
    Changed(Box<Job>),
    /// A job was deleted.
    Gone(JobId),
}

/// A job's events: each once, in order, until the job is over. A connection that breaks is made again.
#[derive(Debug)]
pub struct JobUpdates {
    source: Source,
    last_seq: i64,
    last_json: String,
    is_over: bool,
}

/// The changes of all jobs. They have no end.
#[derive(Debug)]
pub struct JobChanges {
    source: Source,
}

impl JobUpdates {
    pub(crate) fn new(client: &Client, call: Call, after: i64) -> Self {
        Self { source: Source::new(client, call), last_seq: after, last_json: String::new(), is_over: false }
    }

    /// The `seq` of the last event that was told: where another follower would go on.
    pub fn last_seq(&self) -> i64 {
        self.last_seq
    }

    /// The JSON of the update that [`JobUpdates::next`] returned last, as the server sent it.
    pub fn last_json(&self) -> &str {
        &self.last_json
    }

    /// What happens next; `None` once the job is over. May be dropped while it waits, and called again.
    ///
    /// # Errors
    /// When the server refuses (the job does not exist, or `after` is beyond its events: `invalid_cursor`), or several connections
    /// in a row bring nothing.
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
                        // Something between was lost on the way; another connection goes on after what was told.
                        self.source.reconnect(self.source.call.interrupted(None)).await?;
                    } else if self.advance(event.seq) {
                        return Ok(Some(JobUpdate::Event(event)));
                    }
                }
            }
        }
        Ok(None)
    }

    /// False when it was told before.
    fn advance(&mut self, seq: i64) -> bool {
        let is_new = seq > self.last_seq;
        if is_new {
            self.last_seq = seq;
            self.source.tries.progressed();
        }
        is_new
    }

    /// The same as a stream. It ends after an error.
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

    /// What changes next. May be dropped while it waits, and called again.
    ///
    /// # Errors
    /// When the server refuses, or several connections in a row bring nothing.
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

/// What a [`Source`] brings.
enum Signal {
    /// A connection was made.
    Opened,
    /// An event came.
    Message(Message),
}

/// A stream of events over one connection after the other.
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

    /// The next event; of a new connection first that it is open. `last` is the id of the last event known.
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
                Ok(Ok(Some(_))) => return Err(self.call.not_understood("an event of the stream is too long")),
                Ok(Ok(None)) => self.call.interrupted(None),
                Ok(Err(error)) => self.call.interrupted(Some(error)),
                Err(_) => self.call.stalled(stall),
            };
            self.reconnect(error).await?;
        }
    }

    /// Closes the connection and waits for the next try, or gives up.
    async fn reconnect(&mut self, error: Error) -> Result<(), Error> {
        if self.connection.take().is_some_and(|connection| connection.since.elapsed() >= GOOD_CONNECTION) {
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
