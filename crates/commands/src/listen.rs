//! The accept loop: limits the number of connections, disconnects slow clients, ends streams, and shuts down within a time limit.
//!
//! Each kind of slow client has its own time limit: no request at all, or incomplete headers (`header_timeout`); pauses in a body
//! (`body_pause`, a layer of the router); no further request (`idle_timeout`); responses that the client does not read
//! (`write_timeout`). When there are too many connections, those without a request in flight are closed first. A part of all
//! connections is reserved for workers, so that neither event streams nor slow clients cost a job its lease.
//!
//! `rlood serve` and `rlood reward-server` use this loop.

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
use futures::future::BoxFuture;
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

/// Time limit for request headers that are still arriving when the server stops.
const HEADS: Duration = Duration::from_secs(2);
/// Maximum size of a request's line and headers together, in bytes.
const HEAD_BYTES: u32 = 64 * 1024;
/// Maximum number of concurrent requests on one HTTP/2 connection.
const STREAMS: u32 = 128;
/// Maximum number of streams that an HTTP/2 client may reset before they are processed; beyond it the connection is closed.
const RESETS: usize = 32;
/// Number of open files reserved for other purposes: the database, uploads, workers' pipes.
const OTHER_FILES: u64 = 256;
/// Idle time after which TCP keep-alive probes are sent.
const KEEPALIVE: Duration = Duration::from_secs(60);

/// Cancellation tokens for the two stages of a shutdown.
pub struct Stop {
    /// Cancelled first: no new connections are accepted, and event streams end.
    pub begin: CancellationToken,
    /// Cancelled last: requests that are still in flight are aborted.
    pub cut: CancellationToken,
}

/// Serves until `stop`, then ends streams, lets requests in flight complete, and returns. Every request carries its [`Connection`]
/// and the peer's address as extensions.
pub fn serve(
    listener: TcpListener,
    router: Router,
    edge: Edge,
    counts: Arc<Connections>,
    stop: Stop,
) -> BoxFuture<'static, ()> {
    Box::pin(async move {
        let router = router.layer(middleware::from_fn_with_state(stop.begin.clone(), end_streams));
        let builder = builder(&edge);
        let registry = Registry::new(most_connections(edge.max_connections), counts);
        let graceful = GracefulShutdown::new();
        // The tasks of all connections. Dropping the set aborts them when the shutdown takes too long.
        let mut connections = JoinSet::new();
        loop {
            let (stream, peer) = tokio::select! {
                () = stop.begin.cancelled() => break,
                Some(_) = connections.join_next() => continue,
                accepted = listener.accept() => match accepted {
                    Ok(accepted) => accepted,
                    Err(error) => {
                        // Accepting usually fails for lack of file descriptors, so a connection is closed to free one.
                        tracing::warn!(%error, "the server could not accept a connection");
                        registry.make_room();
                        tokio::time::sleep(Duration::from_millis(100)).await;
                        continue;
                    }
                },
            };
            let Some(place) = registry.admit() else {
                tracing::debug!(%peer, "too many connections are busy: the server closes a new one");
                continue;
            };
            tune(&stream);
            let activity = place.connection.activity();
            let (router, connection) = (router.clone(), place.connection.clone());
            let service = service_fn(move |request: hyper::Request<Incoming>| {
                // Counts the request as in flight until its response body was sent or the client disconnected.
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
                    tracing::debug!(%peer, error, "a client's connection ended with an error");
                },
                () = activity.idle(limits.0, limits.1) => tracing::debug!(%peer, "the server closes an idle connection"),
            }
        });
        }
        drop(listener);
        let mut drained = std::pin::pin!(graceful.shutdown());
        if tokio::time::timeout(HEADS, &mut drained).await.is_err() {
            registry.cut_idle();
            tokio::select! {
                () = &mut drained => {}
                () = stop.cut.cancelled() => tracing::info!("the server stops and aborts connections that are still busy"),
            }
        }
        connections.shutdown().await;
    })
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

/// Raises the limit of open files as far as possible. The result also limits the number of connections.
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
        tracing::info!(
            connections = fits,
            "the limit of open files (ulimit -n) allows fewer connections than --max-connections"
        );
    }
    usize::try_from(fits.min(u64::from(asked))).unwrap_or(usize::MAX)
}

/// Applies optional socket settings; errors are ignored because the connection works without them.
fn tune(stream: &TcpStream) {
    // Small responses must not wait for the client's acknowledgment of the previous one.
    let _ = stream.set_nodelay(true);
    let keepalive = TcpKeepalive::new().with_time(KEEPALIVE).with_interval(Duration::from_secs(15)).with_retries(4);
    let _ = SockRef::from(stream).set_tcp_keepalive(&keepalive);
}

/// Whether a response is a stream of server-sent events.
pub fn is_event_stream(response: &Response) -> bool {
    let kind = response.headers().get(hyper::header::CONTENT_TYPE);
    kind.is_some_and(|value| value.as_bytes().starts_with(b"text/event-stream"))
}

/// Ends an event stream cleanly when the server stops, so that the client reconnects with the last event id that it received.
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
