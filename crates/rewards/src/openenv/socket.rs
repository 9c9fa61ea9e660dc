//! One WebSocket to an OpenEnv server. A task of its own reads it all the time, so that the server's pings are answered while the model
//! generates.

use std::time::Duration;

use futures::{SinkExt, StreamExt};
use reqwest::header::{CONNECTION, HeaderMap, HeaderValue, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_VERSION, UPGRADE};
use reqwest::{Client, Upgraded, Url};
use tokio::sync::{mpsc, oneshot};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::handshake::client::generate_key;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_tungstenite::tungstenite::protocol::{Role, WebSocketConfig};

use crate::signed_post::{self, SendError, set_header};

/// Maximum size of a message of the server, in bytes.
const MAX_BYTES: usize = 1 << 20;
/// Interval of the pings that keep the connection open.
const PING_INTERVAL: Duration = Duration::from_secs(20);
/// Time limit for saying goodbye.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// A question on the socket, and where its answer goes.
type Exchange = (String, oneshot::Sender<Result<String, String>>);

/// An open connection. Dropping it closes the connection.
pub(super) struct Socket(mpsc::Sender<Exchange>);

/// Why there is no connection.
#[derive(Debug)]
pub(super) enum ConnectError {
    /// The policy for outgoing addresses forbids the address.
    Refused(String),
    /// The server is away, or does not speak WebSocket here.
    Away(String),
    /// The server answered with a status that a retry would not change.
    Permanent(String),
}

impl Socket {
    /// Opens a connection, within the time limit.
    pub async fn connect(
        client: &Client,
        url: &Url,
        user_headers: &HeaderMap,
        limit: Duration,
    ) -> Result<Self, ConnectError> {
        let key = generate_key();
        let mut headers = user_headers.clone();
        headers.insert(CONNECTION, HeaderValue::from_static("Upgrade"));
        headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
        headers.insert(SEC_WEBSOCKET_VERSION, HeaderValue::from_static("13"));
        set_header(&mut headers, "sec-websocket-key", &key);
        let opening = async {
            let response = signed_post::send(client.get(url.clone()), headers).await?;
            let status = response.status();
            match status.as_u16() {
                101 => {}
                408 | 425 | 429 | 500..=599 => return Err(ConnectError::Away(format!("the server answered {status}"))),
                _ => {
                    let why = format!("the server answered {status} to a WebSocket at {}", url.path());
                    return Err(ConnectError::Permanent(why));
                }
            }
            let accept = response.headers().get(SEC_WEBSOCKET_ACCEPT).map(HeaderValue::as_bytes);
            if accept != Some(derive_accept_key(key.as_bytes()).as_bytes()) {
                return Err(ConnectError::Permanent("the server's WebSocket handshake is not valid".to_owned()));
            }
            response.upgrade().await.map_err(|error| SendError::new(&error).into())
        };
        let late = || ConnectError::Away(format!("no connection within {} ms", limit.as_millis()));
        let upgraded = tokio::time::timeout(limit, opening).await.unwrap_or_else(|_| Err(late()))?;
        let config = WebSocketConfig::default().max_message_size(Some(MAX_BYTES)).max_frame_size(Some(MAX_BYTES));
        let stream = WebSocketStream::from_raw_socket(upgraded, Role::Client, Some(config)).await;
        let (sender, receiver) = mpsc::channel(1);
        tokio::spawn(run(stream, receiver));
        Ok(Self(sender))
    }

    /// Sends a text, and returns the next text of the server.
    ///
    /// # Errors
    /// Fails if the connection is lost, or there is no answer within the time limit. The connection cannot be used after that.
    pub async fn ask(&self, text: String, limit: Duration) -> Result<String, String> {
        let (sender, answer) = oneshot::channel();
        let lost = || "the server closed the connection".to_owned();
        let exchange = async {
            self.0.send((text, sender)).await.map_err(|_| lost())?;
            answer.await.unwrap_or_else(|_| Err(lost()))
        };
        let late = || format!("no answer within {} ms", limit.as_millis());
        tokio::time::timeout(limit, exchange).await.unwrap_or_else(|_| Err(late()))
    }
}

impl From<SendError> for ConnectError {
    fn from(error: SendError) -> Self {
        match &error {
            SendError::Refused(why) => ConnectError::Refused(why.clone()),
            SendError::Failed { .. } => ConnectError::Away(error.text()),
        }
    }
}

async fn run(mut stream: WebSocketStream<Upgraded>, mut questions: mpsc::Receiver<Exchange>) {
    let mut waiting: Option<oneshot::Sender<Result<String, String>>> = None;
    let mut is_first = true;
    let mut pings = tokio::time::interval_at(tokio::time::Instant::now() + PING_INTERVAL, PING_INTERVAL);
    loop {
        tokio::select! {
            question = questions.recv(), if waiting.is_none() => {
                let Some((text, answer)) = question else {
                    let close = async {
                        let _ = stream.send(Message::text(r#"{"type": "close"}"#)).await;
                        let _ = stream.close(None).await;
                    };
                    let _ = tokio::time::timeout(CLOSE_TIMEOUT, close).await;
                    return;
                };
                is_first = false;
                if let Err(error) = stream.send(Message::text(text)).await {
                    return answer_with(Some(answer), last_text(&mut stream).await.ok_or_else(|| broken(&error)));
                }
                waiting = Some(answer);
            }
            message = stream.next() => match message {
                Some(Ok(Message::Text(text))) => match waiting.take() {
                    Some(answer) => {
                        if answer.send(Ok(text.to_string())).is_err() {
                            return;
                        }
                    }
                    // A full server says so as soon as the connection is open, and closes it: the first question gets this answer.
                    None if is_first => {
                        let first = questions.recv().await.map(|(_, answer)| answer);
                        return answer_with(first, Ok(text.to_string()));
                    }
                    // A text without a question breaks the protocol: every later answer would go to the wrong question.
                    None => return,
                },
                Some(Ok(Message::Ping(_) | Message::Pong(_) | Message::Frame(_))) => {}
                Some(Ok(Message::Binary(_) | Message::Close(_))) | None => return,
                Some(Err(error)) => return answer_with(waiting, Err(broken(&error))),
            },
            _ = pings.tick() => {
                if let Err(error) = stream.send(Message::Ping(Default::default())).await {
                    return answer_with(waiting, Err(broken(&error)));
                }
            }
        }
    }
}

/// Returns what the server said before it closed the connection, if it can still be read.
async fn last_text(stream: &mut WebSocketStream<Upgraded>) -> Option<String> {
    while let Some(Ok(message)) = stream.next().await {
        if let Message::Text(text) = message {
            return Some(text.to_string());
        }
    }
    None
}

fn broken(error: &tokio_tungstenite::tungstenite::Error) -> String {
    format!("the connection broke: {error}")
}

fn answer_with(waiting: Option<oneshot::Sender<Result<String, String>>>, answer: Result<String, String>) {
    if let Some(waiting) = waiting {
        // The caller may have stopped waiting.
        let _ = waiting.send(answer);
    }
}
