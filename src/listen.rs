//! The accept loop: a bounded number of connections, time limits for slow clients, an end for streams, a bounded drain.
//!
//! A client that is slow in some way meets a limit of its own: no request at all, or a head that does not end
//! (`header_timeout`); pauses in a body (`body_pause`, a layer of the router); nothing asked for (`idle_timeout`); answers
//! that are not taken (`write_timeout`). Connections without a request in flight make room for new ones when there are too
//! many. A part of all connections is kept for workers, so that neither event streams nor slow clients cost a job its lease.
//!
//! `rlood serve` and `rlood reward-server` listen with it.

mod activity;
pub mod host;
mod stall;
pub mod unfinished;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{ConnectInfo, Request, State};
use axum::middleware::{self, Next};
use axum::response::Response;
use futures::StreamExt;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::server::graceful::GracefulShutdown;
use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

use crate::config::Edge;
use activity::{Activity, Registry, Tracked};
use stall::Stalling;

pub use activity::{Connection, Connections, Crowded, StreamPlace};

/// A request whose head is still arriving when the server stops has this long for it.
const HEADS: Duration = Duration::from_secs(2);
/// Of a request's line and headers together, bytes.
const HEAD_BYTES: u32 = 64 * 1024;
/// Requests of one HTTP/2 connection at once.
const STREAMS: u32 = 128;
/// Streams that an HTTP/2 client may reset before they are looked at; beyond them the connection ends.
const RESETS: usize = 32;
/// Files that are no connections: the database, uploads, workers' pipes.
const OTHER_FILES: u64 = 256;
/// After this silence a peer is asked whether it is still there.
const KEEPALIVE: Duration = Duration::from_secs(60);

/// How a server ends.
pub struct Stop {
    /// No more connections; streams end.
    pub begin: CancellationToken,
    /// Requests that are still in flight have no more time.
    pub cut: CancellationToken,
}

/// Serves until it shall stop, then ends streams, lets requests in flight finish, and returns. Every request carries its
/// [`Connection`] and the peer's address as extensions.
pub async fn serve(listener: TcpListener, router: Router, edge: Edge, counts: Arc<Connections>, stop: Stop) {
    let router = router.layer(middleware::from_fn_with_state(stop.begin.clone(), end_streams));
    let builder = builder(&edge);
    let registry = Registry::new(most_connections(edge.max_connections), counts);
    let graceful = GracefulShutdown::new();
    // Cut with this set when the drain takes too long.
    let mut connections = JoinSet::new();
    loop {
        let (stream, peer) = tokio::select! {
            () = stop.begin.cancelled() => break,
            Some(_) = connections.join_next() => continue,
            accepted = listener.accept() => match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    // Out of file descriptors, say: connections that end will make room.
                    tracing::warn!(%error, "a connection could not be accepted");
                    registry.make_room();
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            },
        };
        let Some(place) = registry.admit() else {
            tracing::debug!(%peer, "too many connections are at work: a new one is closed");
            continue;
        };
        tune(&stream);
        let activity = place.connection.activity();
        let (router, connection) = (router.clone(), place.connection.clone());
        let service = service_fn(move |request: hyper::Request<Incoming>| {
            // Held until the answer's body is sent, or nobody wants it any more.
            let at_work = Activity::begin(&connection.activity());
            let mut request = request.map(Body::new);
            request.extensions_mut().insert(ConnectInfo::<SocketAddr>(peer));
            request.extensions_mut().insert(connection.clone());
            let answered = router.clone().oneshot(request);
            async move { answered.await.map(|response| response.map(|body| Body::new(Tracked::new(body, at_work)))) }
        });
        let io = TokioIo::new(Stalling::new(stream, edge.write_timeout));
        let connection = builder.serve_connection_with_upgrades(io, service).into_owned();
        let connection = graceful.watch(connection);
        let limits = (edge.header_timeout, edge.idle_timeout);
        connections.spawn(async move {
            let _place = place;
            tokio::select! {
                biased;
                ended = connection => if let Err(error) = ended {
                    tracing::debug!(%peer, error, "a connection ended badly");
                },
                () = activity.idle(limits.0, limits.1) => tracing::debug!(%peer, "an idle connection is closed"),
            }
        });
    }
    drop(listener);
    let mut drained = std::pin::pin!(graceful.shutdown());
    if tokio::time::timeout(HEADS, &mut drained).await.is_err() {
        registry.cut_idle();
        tokio::select! {
            () = &mut drained => {}
            () = stop.cut.cancelled() => tracing::info!("connections that were still busy are cut"),
        }
    }
    connections.shutdown().await;
}

fn builder(edge: &Edge) -> Builder<TokioExecutor> {
    let mut builder = Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(edge.header_timeout).max_buf_size(HEAD_BYTES as usize);
    builder
        .http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(edge.header_timeout)
        .keep_alive_timeout(edge.header_timeout)
        .max_concurrent_streams(STREAMS)
        .max_header_list_size(HEAD_BYTES)
        .max_pending_accept_reset_streams(RESETS)
        .max_local_error_reset_streams(RESETS);
    builder
}

/// Raises the limit of open files as far as it goes; what is left of it bounds the connections too.
fn most_connections(asked: u32) -> usize {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let wanted = u64::from(asked) + OTHER_FILES;
    let raised = maximum.map_or(wanted, |maximum| maximum.min(wanted));
    let mut files = current;
    if current.is_some_and(|current| current < raised)
        && setrlimit(Resource::Nofile, Rlimit { current: Some(raised), maximum }).is_ok()
    {
        files = Some(raised);
    }
    let fits = files.map_or(u64::from(asked), |files| files.saturating_sub(OTHER_FILES).max(16));
    if fits < u64::from(asked) {
        tracing::info!(connections = fits, "the limit of open files (ulimit -n) bounds the connections");
    }
    usize::try_from(fits.min(u64::from(asked))).unwrap_or(usize::MAX)
}

/// Settings that matter little: without one of them the connection works as well.
fn tune(stream: &TcpStream) {
    // Small answers must not wait for the client's acknowledgement of the last one.
    let _ = stream.set_nodelay(true);
    let keepalive = TcpKeepalive::new().with_time(KEEPALIVE).with_interval(Duration::from_secs(15)).with_retries(4);
    let _ = SockRef::from(stream).set_tcp_keepalive(&keepalive);
}

/// Whether an answer is a stream of server-sent events.
pub fn is_event_stream(response: &Response) -> bool {
    let kind = response.headers().get(hyper::header::CONTENT_TYPE);
    kind.is_some_and(|value| value.as_bytes().starts_with(b"text/event-stream"))
}

/// Ends event streams in good order when the server stops, so that clients reconnect with the last id they saw.
async fn end_streams(State(stop): State<CancellationToken>, request: Request, next: Next) -> Response {
    let response = next.run(request).await;
    if !is_event_stream(&response) {
        return response;
    }
    response.map(|body| {
        let until = async move { stop.cancelled().await };
        Body::from_stream(body.into_data_stream().take_until(Box::pin(until)))
    })
}
