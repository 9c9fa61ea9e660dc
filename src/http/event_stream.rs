//! Bodies of server-sent events (`text/event-stream`): their schema, when a client gets one, and how events are sent to it.

use std::convert::Infallible;
use std::time::Duration;

use axum::http::{HeaderMap, HeaderName, header};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use utoipa::ToSchema;

/// Maximum number of events that a stream buffers for a slow client.
const BACKLOG: usize = 128;
/// How long a client of a stream may read nothing before the server disconnects it.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(30);
/// Interval between two keep-alive comments on a quiet stream.
pub(super) const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// An event of a `text/event-stream` body. The schema of such a body describes each of its events.
#[derive(ToSchema)]
#[expect(dead_code, reason = "only describes the events in the OpenAPI document")]
pub(super) struct ServerSentEvent {
    /// The message of the event: JSON, or `[DONE]` at the end of an answer in OpenAI's form.
    data: String,
    /// The event's name. Events of answers in OpenAI's form have none.
    #[schema(nullable = false)]
    event: Option<String>,
    /// The value that a client sends as `Last-Event-ID` to follow the stream from here. Only events of a job have it.
    #[schema(nullable = false)]
    id: Option<String>,
    /// How long a client waits before it connects again, in ms.
    #[schema(nullable = false)]
    retry: Option<u64>,
}

/// The sending end of a stream.
pub(super) type Sender = mpsc::Sender<Result<Event, Infallible>>;

/// Creates a stream: where events are sent to, and the response that carries them to the client.
pub(super) fn open() -> (Sender, Response) {
    let (sender, receiver) = mpsc::channel(BACKLOG);
    let stream = Sse::new(ReceiverStream::new(receiver)).keep_alive(KeepAlive::new().interval(KEEP_ALIVE).text("ping"));
    let headers = [(header::CACHE_CONTROL, "no-store"), (HeaderName::from_static("x-accel-buffering"), "no")];
    (sender, (headers, stream).into_response())
}

/// Sends an event to a stream. Returns false when the client has disconnected or reads too slowly.
pub(super) async fn send(sender: &Sender, event: Event) -> bool {
    sender.send_timeout(Ok(event), CLIENT_TIMEOUT).await.is_ok()
}

/// Whether a client names `text/event-stream` in `Accept`. A client that accepts any type gets a JSON page instead of a stream.
pub(super) fn wants_stream(headers: &HeaderMap) -> bool {
    let accepted = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    accepted.flat_map(|value| value.split(',')).any(|range| {
        let mut parts = range.split(';').map(str::trim);
        let is_named = parts.next().is_some_and(|kind| kind.eq_ignore_ascii_case("text/event-stream"));
        // A weight `q=0` in `Accept` means that the type is not acceptable.
        let weight =
            parts.filter_map(|part| part.split_once('=')).find(|(name, _)| name.trim().eq_ignore_ascii_case("q"));
        is_named && weight.and_then(|(_, weight)| weight.trim().parse::<f32>().ok()) != Some(0.0)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_is_for_who_asks_for_it_by_name_and_takes_it() {
        for (accept, stream) in [
            ("text/event-stream", true),
            ("Text/Event-Stream; charset=utf-8", true),
            ("application/json;q=0.5, text/event-stream;q=0.9", true),
            ("text/event-stream;q=0.001", true),
            ("text/event-stream;q=0", false),
            ("text/event-stream; Q=0.000, application/json", false),
            ("text/event-streams", false),
            ("*/*", false),
            ("application/json", false),
        ] {
            let headers = HeaderMap::from_iter([(header::ACCEPT, accept.parse().unwrap())]);
            assert_eq!(wants_stream(&headers), stream, "{accept}");
        }
        assert!(!wants_stream(&HeaderMap::new()));
    }
}
