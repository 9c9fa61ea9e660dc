//! The accept loop: time-outs for slow clients, an end for streams, a bounded drain.

use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{ConnectInfo, Request, State};
use axum::middleware::{self, Next};
use axum::response::Response;
use futures::StreamExt;
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

/// A client has this long to send a request's head.
const HEADER_READ: Duration = Duration::from_secs(20);
/// Requests in flight have this long once the server stops.
const DRAIN: Duration = Duration::from_secs(3);

/// Serves until `stop`, then ends streams, lets requests in flight finish for a few seconds, and returns.
pub(super) async fn serve(listener: TcpListener, router: Router, stop: CancellationToken) {
    let router = router.layer(middleware::from_fn_with_state(stop.clone(), end_streams));
    let mut builder = Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(HEADER_READ);
    builder.http2().timer(TokioTimer::new()).keep_alive_interval(HEADER_READ);
    let graceful = GracefulShutdown::new();
    // Cut with this set when the drain takes too long.
    let mut connections = JoinSet::new();
    loop {
        let (stream, peer) = tokio::select! {
            () = stop.cancelled() => break,
            Some(_) = connections.join_next() => continue,
            accepted = listener.accept() => match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    // Out of file descriptors, say: connections that end will make room.
                    tracing::warn!(%error, "a connection could not be accepted");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            },
        };
        // Small answers must not wait for the client's acknowledgement of the last one.
        let _ = stream.set_nodelay(true);
        let service =
            TowerToHyperService::new(router.clone().map_request(move |mut request: hyper::Request<Incoming>| {
                request.extensions_mut().insert(ConnectInfo::<SocketAddr>(peer));
                request.map(Body::new)
            }));
        let connection = builder.serve_connection_with_upgrades(TokioIo::new(stream), service).into_owned();
        let connection = graceful.watch(connection);
        connections.spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%peer, error, "a connection ended badly");
            }
        });
    }
    drop(listener);
    if tokio::time::timeout(DRAIN, graceful.shutdown()).await.is_err() {
        tracing::info!("connections that were still busy are cut");
    }
    connections.shutdown().await;
}

/// Ends event streams in good order when the server stops, so that clients reconnect with the last id they saw.
async fn end_streams(State(stop): State<CancellationToken>, request: Request, next: Next) -> Response {
    let response = next.run(request).await;
    let streams = response
        .headers()
        .get(hyper::header::CONTENT_TYPE)
        .is_some_and(|value| value.as_bytes().starts_with(b"text/event-stream"));
    if !streams {
        return response;
    }
    response.map(|body| {
        let until = async move { stop.cancelled().await };
        Body::from_stream(body.into_data_stream().take_until(Box::pin(until)))
    })
}
