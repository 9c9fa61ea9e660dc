//! Checks requests before their body is read, and limits how bodies are read, so that unauthorized or slow
//! clients cost almost nothing.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use axum::body::HttpBody;
use axum::extract::{ConnectInfo, Request};
use axum::http::{HeaderMap, HeaderName, Method, StatusCode, header};
use futures::StreamExt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use super::answer::Refusal;
use crate::listen::host::{self, Name};
use crate::listen::unfinished::{Place, Unfinished};
use crate::reward::signature::{self, Key};

/// Maximum size of a request body, in bytes. A client splits a larger request.
const BODY_LIMIT_BYTES: u64 = 64 << 20;
/// Memory limit for all bodies together, while they arrive and while they wait for the model, in KiB.
const BUFFER_KIB: usize = 256 * 1024;
/// Maximum number of request bodies that are arriving, in total and per address.
const MAX_ARRIVING: usize = 512;
const MAX_ARRIVING_PER_ADDRESS: usize = 256;
/// Maximum pause between two chunks of a request body.
const MAX_PAUSE: Duration = Duration::from_secs(10);
/// Time limit for a request body to arrive: this duration plus one second per 16 KiB, up to two minutes.
const GRACE: Duration = Duration::from_secs(5);
const MIN_BYTES_PER_S: u64 = 16 * 1024;
const MAX_DURATION: Duration = Duration::from_secs(120);
/// When memory is short: how long a request body waits for the memory of another body that it displaced, and how many
/// bodies it may displace.
const MEMORY_WAIT: Duration = Duration::from_millis(100);
const MAX_DISPLACED: usize = 8;
/// Requests with at most this announced length, in bytes, are read even if all slots for the model are taken, so
/// that pings are answered.
const SMALL_BYTES: u64 = 4096;

/// The rules that requests to the reward server must satisfy.
#[derive(Debug)]
pub(super) struct Edge {
    /// Address that the server listens on.
    pub(super) listen: IpAddr,
    /// Additional names by which the server may be called.
    pub(super) allowed_hosts: Vec<String>,
    /// Key that requests must be signed with; None = unsigned requests are accepted.
    pub(super) key: Option<Key>,
    arriving: Unfinished,
    buffer_kib: Arc<Semaphore>,
}

/// A complete request body. Its memory counts against the limit until the value is dropped.
#[derive(Debug)]
pub(super) struct ReceivedBody {
    pub(super) bytes: Vec<u8>,
    _kib: OwnedSemaphorePermit,
}

impl Edge {
    pub(super) fn new(listen: IpAddr, allowed_hosts: Vec<String>, key: Option<Key>) -> Self {
        Self {
            listen,
            allowed_hosts,
            key,
            arriving: Unfinished::new(MAX_ARRIVING, MAX_ARRIVING_PER_ADDRESS),
            buffer_kib: Arc::new(Semaphore::new(BUFFER_KIB)),
        }
    }

    /// Checks that the request uses a name of this server, and does not come from a page of another origin.
    pub(super) fn check_caller(&self, request: &Request) -> Result<(), Refusal> {
        let names = host::names_of(request)
            .map_err(|detail| Refusal::new(StatusCode::BAD_REQUEST, "invalid_request", detail))?;
        if let Some(Name { whole, .. }) = names.iter().find(|name| !self.is_own(&name.host)) {
            let detail =
                format!("'{whole}' is not a name of this server: use its address, or start it with --allowed-hosts");
            return Err(Refusal::new(StatusCode::MISDIRECTED_REQUEST, "wrong_host", detail));
        }
        let text = |name: HeaderName| request.headers().get(name).and_then(|value| value.to_str().ok());
        let host = names.first().map(|name| name.whole.as_str());
        let is_foreign = |origin: &str| origin.split_once("://").is_none_or(|(_, authority)| Some(authority) != host);
        let foreign_site = text(HeaderName::from_static("sec-fetch-site"))
            .is_some_and(|site| !["same-origin", "none"].contains(&site));
        if *request.method() != Method::GET && (foreign_site || text(header::ORIGIN).is_some_and(is_foreign)) {
            let detail = "a web page of another origin may not use the reward model";
            return Err(Refusal::new(StatusCode::FORBIDDEN, "foreign_page", detail));
        }
        Ok(())
    }

    /// Whether the name in a request belongs to this server. DNS rebinding needs a host name, so literal IP addresses are safe.
    /// A server on loopback is reached only by loopback addresses.
    fn is_own(&self, name: &str) -> bool {
        host::is_own(name, self.listen, &self.allowed_hosts)
            || (!self.listen.is_loopback() && name.parse::<IpAddr>().is_ok())
    }

    /// Checks the headers of a score request: format, length, and a recent signature.
    pub(super) fn check_head(&self, headers: &HeaderMap, now_s: u64) -> Result<(), Refusal> {
        if let Some(key) = &self.key {
            let [id, timestamp, signatures] = signature_of(headers);
            key.check_head(id, timestamp, signatures, now_s).map_err(not_signed)?;
        }
        let kind = headers.get(header::CONTENT_TYPE).map(|value| value.to_str().unwrap_or("?"));
        let kind = kind.map(|kind| kind.split(';').next().unwrap_or("").trim().to_ascii_lowercase());
        let is_json = match kind.as_deref() {
            Some("application/json") => true,
            Some(kind) => kind.starts_with("application/") && kind.ends_with("+json"),
            // A signed request may omit the content type: a hostile web page cannot sign its requests.
            None => self.key.is_some(),
        };
        if !is_json {
            let detail = "send 'content-type: application/json'";
            return Err(Refusal::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", detail));
        }
        match announced_bytes(headers) {
            Some(bytes) if bytes > BODY_LIMIT_BYTES => Err(too_large()),
            Some(_) | None => Ok(()),
        }
    }

    /// Reads the complete body of a request.
    pub(super) async fn read(&self, request: Request) -> Result<ReceivedBody, Refusal> {
        let peer = request.extensions().get::<ConnectInfo<SocketAddr>>().map(|peer| peer.0.ip().to_canonical());
        let place = self.arriving.enter(peer);
        tokio::select! {
            biased;
            held = self.collect(request, &place) => held,
            () = place.lost() => Err(busy("too many requests are arriving, and this one is the oldest of its client address")),
        }
    }

    async fn collect(&self, request: Request, place: &Place<'_>) -> Result<ReceivedBody, Refusal> {
        let begun = Instant::now();
        let mut pieces = request.into_body();
        let mut bytes = Vec::with_capacity(usize::try_from(pieces.size_hint().lower().min(SMALL_BYTES)).unwrap_or(0));
        let mut kib =
            self.buffer_kib.clone().acquire_many_owned(0).await.map_err(|_| busy("the server is shutting down"))?;
        let mut pieces = std::mem::take(&mut pieces).into_data_stream();
        loop {
            let allowed = GRACE + Duration::from_secs(bytes.len() as u64 / MIN_BYTES_PER_S);
            let until = (begun + allowed.min(MAX_DURATION)).min(Instant::now() + MAX_PAUSE);
            let piece = tokio::time::timeout_at(until, pieces.next()).await.map_err(|_| {
                Refusal::new(StatusCode::REQUEST_TIMEOUT, "too_slow", "the request's body took too long to arrive")
            })?;
            let Some(piece) = piece else { break };
            let piece = piece.map_err(|_| {
                Refusal::new(StatusCode::BAD_REQUEST, "interrupted", "the request's body could not be read to its end")
            })?;
            let length = bytes.len() + piece.len();
            if length as u64 > BODY_LIMIT_BYTES {
                return Err(too_large());
            }
            let more = length.div_ceil(1024).saturating_sub(kib.num_permits());
            kib.merge(self.acquire_kib(more, place).await?);
            bytes.extend_from_slice(&piece);
        }
        Ok(ReceivedBody { bytes, _kib: kib })
    }

    async fn acquire_kib(&self, kib: usize, place: &Place<'_>) -> Result<OwnedSemaphorePermit, Refusal> {
        let wanted = u32::try_from(kib).unwrap_or(u32::MAX);
        if let Ok(taken) = self.buffer_kib.clone().try_acquire_many_owned(wanted) {
            return Ok(taken);
        }
        let mut freed = std::pin::pin!(self.buffer_kib.clone().acquire_many_owned(wanted));
        for _ in 0..MAX_DISPLACED {
            place.make_room();
            if let Ok(taken) = tokio::time::timeout(MEMORY_WAIT, &mut freed).await {
                return taken.map_err(|_| busy("the server is shutting down"));
            }
        }
        Err(busy("waiting requests use all the memory reserved for them; try again later"))
    }

    /// Verifies a Standard Webhooks signature.
    pub(super) fn check_signature(&self, headers: &HeaderMap, body: &[u8], now_s: u64) -> Result<(), Refusal> {
        let Some(key) = &self.key else { return Ok(()) };
        let [id, timestamp, signatures] = signature_of(headers);
        key.verify(id, timestamp, signatures, body, now_s).map_err(not_signed)
    }
}

/// Whether a request is small enough to be read while all slots for the model are taken.
pub(super) fn is_small(headers: &HeaderMap) -> bool {
    announced_bytes(headers).is_some_and(|bytes| bytes <= SMALL_BYTES)
}

fn announced_bytes(headers: &HeaderMap) -> Option<u64> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

fn signature_of(headers: &HeaderMap) -> [&str; 3] {
    ["webhook-id", "webhook-timestamp", "webhook-signature"]
        .map(|name| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default())
}

fn not_signed(error: signature::Rejected) -> Refusal {
    let detail = format!("{error}: requests here are signed with the secret that this server was started with");
    Refusal::new(StatusCode::UNAUTHORIZED, "not_signed", detail)
}

fn too_large() -> Refusal {
    let detail =
        format!("the request's body must be at most {BODY_LIMIT_BYTES} bytes: send fewer samples in one request");
    Refusal::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", detail)
}

/// Creates a 429 response, after which the client retries later.
pub(super) fn busy(detail: impl Into<String>) -> Refusal {
    Refusal::new(StatusCode::TOO_MANY_REQUESTS, "busy", detail)
}

#[cfg(test)]
mod tests {
    use axum::body::{Body, Bytes};

    use super::*;

    const SECRET: &str = "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";

    fn edge(listen: &str, secret: Option<&str>) -> Edge {
        let key = secret.map(|secret| Key::parse(secret).unwrap());
        Edge::new(listen.parse().unwrap(), vec!["rm.internal".to_owned()], key)
    }

    fn request(headers: &[(&str, &str)]) -> Request {
        let request = headers.iter().fold(Request::post("/"), |request, (name, value)| request.header(*name, *value));
        let mut request = request.body(Body::empty()).unwrap();
        request.extensions_mut().insert(ConnectInfo::<SocketAddr>("192.0.2.1:4000".parse().unwrap()));
        request
    }

    fn status<T>(result: Result<T, Refusal>) -> u16 {
        result.map_or_else(|refusal| refusal.status.as_u16(), |_| 200)
    }

    #[test]
    fn only_our_own_names_and_no_foreign_page_reach_the_model() {
        let (near, open) = (edge("127.0.0.1", None), edge("0.0.0.0", None));
        for (host, of_near, of_open) in [
            ("127.0.0.1:8090", 200, 200),
            ("localhost", 200, 200),
            ("[::1]:8090", 200, 200),
            ("rm.internal:80", 200, 200),
            ("192.168.7.7:8090", 421, 200),
            ("evil.example", 421, 421),
            ("localhost.evil.example", 421, 421),
            ("[::1", 400, 400),
        ] {
            let named = request(&[("host", host)]);
            assert_eq!(status(near.check_caller(&named)), of_near, "{host}");
            assert_eq!(status(open.check_caller(&named)), of_open, "{host}");
        }
        assert_eq!(status(near.check_caller(&request(&[]))), 400);
        for (name, value, expected) in [
            ("origin", "https://evil.example", 403),
            ("origin", "null", 403),
            ("origin", "http://localhost:8090", 200),
            ("sec-fetch-site", "cross-site", 403),
            ("sec-fetch-site", "none", 200),
        ] {
            assert_eq!(status(near.check_caller(&request(&[("host", "localhost:8090"), (name, value)]))), expected);
        }
    }

    #[test]
    fn form_length_and_signature_are_told_by_the_head() {
        let json = ("content-type", "application/json; charset=utf-8");
        let head = |edge: &Edge, headers: &[(&str, &str)]| status(edge.check_head(request(headers).headers(), 1000));
        let open = edge("127.0.0.1", None);
        assert_eq!(head(&open, &[json]), 200);
        assert_eq!(head(&open, &[("content-type", "application/cloudevents+json")]), 200);
        for other in ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/jsonp"] {
            assert_eq!(head(&open, &[("content-type", other)]), 415, "{other}");
        }
        assert_eq!(head(&open, &[]), 415);
        assert_eq!(head(&open, &[json, ("content-length", "67108865")]), 413);
        assert_eq!(head(&open, &[json, ("content-length", "67108864")]), 200);

        let signed = edge("127.0.0.1", Some(SECRET));
        let signature = format!("v1,{}", "A".repeat(43) + "=");
        let good = [("webhook-id", "msg_1"), ("webhook-timestamp", "1300"), ("webhook-signature", signature.as_str())];
        assert_eq!(head(&signed, &[good[0], good[1], good[2]]), 200);
        assert_eq!(head(&signed, &[good[0], good[1], good[2], ("content-type", "text/plain")]), 415);
        for missing in 0..3 {
            let others: Vec<_> = (0..3).filter(|index| *index != missing).map(|index| good[index]).collect();
            assert_eq!(head(&signed, &others), 401, "{missing}");
        }
        let long = "x".repeat(300);
        for wrong in [
            ("webhook-timestamp", "1301"),
            ("webhook-timestamp", "699"),
            ("webhook-timestamp", "soon"),
            ("webhook-signature", "v2,AAAA"),
            ("webhook-signature", "v1,AAAA"),
            ("webhook-id", "a b"),
            ("webhook-id", long.as_str()),
        ] {
            let changed = good.map(|(name, value)| if name == wrong.0 { wrong } else { (name, value) });
            assert_eq!(head(&signed, &changed), 401, "{wrong:?}");
        }
    }

    /// Returns a request body that sends this many chunks, one per second, and then stalls.
    fn slow(peer: &str, piece: &Bytes, pieces: usize) -> Request {
        let piece = piece.clone();
        let pieces = futures::stream::unfold(0, move |sent| {
            let piece = piece.clone();
            async move {
                match sent < pieces {
                    true => tokio::time::sleep(Duration::from_secs(u64::from(sent > 0))).await,
                    false => std::future::pending().await,
                }
                Some((Ok::<_, std::io::Error>(piece), sent + 1))
            }
        });
        sent_by(peer, Body::from_stream(pieces))
    }

    fn whole(peer: &str, bytes: usize) -> Request {
        sent_by(peer, Body::from(vec![b' '; bytes]))
    }

    fn sent_by(peer: &str, body: Body) -> Request {
        let mut request = Request::post("/").body(body).unwrap();
        request.extensions_mut().insert(ConnectInfo::<SocketAddr>(peer.parse().unwrap()));
        request
    }

    #[tokio::test(start_paused = true)]
    async fn a_dripping_body_ends_in_seconds_and_a_steady_one_arrives() {
        let edge = edge("127.0.0.1", None);
        let begun = Instant::now();
        let drop = Bytes::from_static(&[b' '; 100]);
        assert_eq!(status(edge.read(slow("192.0.2.1:1", &drop, usize::MAX)).await), 408);
        assert_eq!(begun.elapsed().as_secs(), 5);
        let begun = Instant::now();
        let piece = Bytes::from(vec![b' '; 100_000]);
        assert_eq!(status(edge.read(slow("192.0.2.1:1", &piece, 30)).await), 408, "it stops");
        assert_eq!(begun.elapsed().as_secs(), 29 + 10);
        assert_eq!(status(edge.read(whole("192.0.2.1:1", 1 << 20)).await), 200);
        assert_eq!(status(edge.read(whole("192.0.2.1:1", (64 << 20) + 1)).await), 413);
        assert_eq!(edge.buffer_kib.available_permits(), BUFFER_KIB);
    }

    #[tokio::test(start_paused = true)]
    async fn unfinished_bodies_hold_bounded_memory_and_block_nobody() {
        const KIB: usize = 4096;
        let edge = Arc::new(Edge { buffer_kib: Arc::new(Semaphore::new(KIB)), ..edge("127.0.0.1", None) });
        let piece = Bytes::from(vec![b' '; 1 << 20]);
        let strangers: Vec<_> = (0..200)
            .map(|number| {
                let (edge, piece, peer) = (edge.clone(), piece.clone(), format!("192.0.2.{}:1", number % 4));
                tokio::spawn(async move { status(edge.read(slow(&peer, &piece, 1)).await) })
            })
            .collect();
        tokio::time::sleep(Duration::from_millis(10)).await;
        assert!(edge.buffer_kib.available_permits() < 1024, "they hold nearly all of it");
        for _ in 0..3 {
            let held = edge.read(whole("198.51.100.1:1", 2 << 20)).await.unwrap();
            assert_eq!(held.bytes.len(), 2 << 20);
        }
        for stranger in strangers {
            assert!([408, 429].contains(&stranger.await.unwrap()));
        }
        assert_eq!(edge.buffer_kib.available_permits(), KIB, "everything is given back");
    }
}
