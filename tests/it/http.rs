//! Behavior that all routes share: problems, keys, limits, request ids; and a small server for the other tests.

use std::io::Write;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::http::{Method, Request, StatusCode, header};
use http_body_util::BodyExt;
use rlood::config::ServeConfig;
use rlood::files::DataDir;
use rlood::http::{AppState, router};
use rlood::store::Store;
use serde_json::{Value, json};
use tower::ServiceExt;

/// A router over its own store, without a socket.
pub struct Server {
    pub state: AppState,
    pub router: Router,
    pub dir: tempfile::TempDir,
}

pub async fn server() -> Server {
    server_with(|_| {}, |_| {}).await
}

pub async fn server_with(configure: impl FnOnce(&mut ServeConfig), adjust: impl FnOnce(&mut AppState)) -> Server {
    let dir = tempfile::tempdir().unwrap();
    let mut config = ServeConfig::loopback(&dir.path().join("data")).unwrap();
    configure(&mut config);
    let files = DataDir::open(&config.data_dir).unwrap();
    let store = Store::open(&files.database()).await.unwrap();
    let mut state = AppState::new(store, files, Arc::new(config));
    adjust(&mut state);
    Server { router: router(state.clone()), state, dir }
}

/// A complete response.
pub struct Answer {
    pub status: StatusCode,
    pub headers: axum::http::HeaderMap,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).unwrap_or_else(|| panic!("no {name}: {:?}", self.headers)).to_str().unwrap()
    }

    /// Asserts that the response is a complete problem with this code, and returns it.
    pub fn problem(&self, status: u16, code: &str) -> Value {
        assert_eq!(self.status, status, "{}", self.text());
        assert_eq!(self.header("content-type"), "application/problem+json");
        let problem = self.json();
        assert_eq!(problem["code"], code, "{problem}");
        assert_eq!(problem["status"], status);
        assert_eq!(problem["type"], format!("urn:rlood:problem:{code}"));
        assert_eq!(problem["request_id"], self.header("x-request-id"));
        assert!(!problem["title"].as_str().unwrap().is_empty() && !problem["detail"].as_str().unwrap().is_empty());
        assert!(problem["retryable"].is_boolean() && problem["errors"].is_array());
        problem
    }
}

impl Server {
    pub async fn send(&self, request: Request<Body>) -> Answer {
        let response = self.router.clone().oneshot(request).await.unwrap();
        let (parts, body) = response.into_parts();
        Answer { status: parts.status, headers: parts.headers, body: body.collect().await.unwrap().to_bytes().to_vec() }
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.send(Request::get(path).body(Body::empty()).unwrap()).await
    }

    pub async fn delete(&self, path: &str) -> Answer {
        self.send(Request::delete(path).body(Body::empty()).unwrap()).await
    }

    pub async fn post(&self, path: &str, content_type: &str, body: impl Into<Body>) -> Answer {
        self.send(post(path, content_type, body)).await
    }
}

pub fn post(path: &str, content_type: &str, body: impl Into<Body>) -> Request<Body> {
    Request::post(path).header(header::CONTENT_TYPE, content_type).body(body.into()).unwrap()
}

pub fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

#[tokio::test]
async fn an_unknown_route_is_a_problem() {
    let server = server().await;
    let problem = server.get("/nowhere?x=1").await.problem(404, "not_found");
    assert!(problem["detail"].as_str().unwrap().contains("/nowhere"), "{problem}");
    server.get("/jobs/../../etc/passwd").await.problem(404, "not_found");
    server.get("/%ff%00").await.problem(404, "not_found");
}

#[tokio::test]
async fn a_wrong_method_is_a_problem_that_names_the_right_ones() {
    let server = server().await;
    let answer =
        server.send(Request::builder().method(Method::PUT).uri("/datasets").body(Body::empty()).unwrap()).await;
    answer.problem(405, "method_not_allowed");
    let mut allowed: Vec<&str> = answer.header("allow").split(',').map(str::trim).collect();
    allowed.sort_unstable();
    assert_eq!(allowed, ["GET", "HEAD", "POST"]);
}

#[tokio::test]
async fn broken_json_says_line_and_column() {
    let server = server().await;
    let answer = server.post("/models", "application/json", "{\n  \"id\": \"a\",\n  \"source\" \"/x\"\n}").await;
    let problem = answer.problem(400, "invalid_json");
    assert!(problem["detail"].as_str().unwrap().contains("line 3, column 12"), "{problem}");
    server.post("/models", "application/json", "").await.problem(400, "invalid_json");
    server.post("/models", "application/json", "[".repeat(100_000)).await.problem(400, "invalid_json");
    server.post("/models", "application/json", &b"{\"id\":\"\xff\"}"[..]).await.problem(400, "invalid_json");
}

#[tokio::test]
async fn json_of_another_shape_says_which_field() {
    let server = server().await;
    let problem = server
        .post("/models", "application/json", "{\"id\": 3, \"source\": \"/x\"}")
        .await
        .problem(422, "invalid_body");
    assert_eq!(problem["errors"][0]["pointer"], "/id", "{problem}");
    let answer = server.post("/models", "application/json", "{\"id\":\"a\",\"source\":\"/x\",\"sorce\":1}").await;
    let problem = answer.problem(422, "invalid_body");
    assert!(problem["detail"].as_str().unwrap().contains("sorce"), "{problem}");
}

#[tokio::test]
async fn a_wrong_content_type_is_refused() {
    let server = server().await;
    server.post("/models", "text/plain", "{}").await.problem(415, "unsupported_media_type");
    let answer = server.send(Request::post("/models").body(Body::from("{}")).unwrap()).await;
    answer.problem(415, "unsupported_media_type");
    let mut request = post("/models", "application/json", "{}");
    request.headers_mut().insert(header::CONTENT_ENCODING, "br".parse().unwrap());
    server.send(request).await.problem(415, "unsupported_media_type");
}

#[tokio::test]
async fn a_body_that_is_no_object_is_named_and_not_repeated() {
    let server = server().await;
    for path in ["/session", "/models", "/keys", "/webhooks"] {
        for body in ["\"rld_CANARY\"", "[\"rld_CANARY\"]", "{\"key\": [\"rld_CANARY\"], \"url\": [\"rld_CANARY\"]}"] {
            let answer = server.post(path, "application/json", body).await;
            answer.problem(422, "invalid_body");
            assert!(
                !answer.text().contains("CANARY") && !answer.text().contains("struct"),
                "{path}: {}",
                answer.text()
            );
        }
    }
    let problem = server.post("/session", "application/json", "\"rld_CANARY\"").await.problem(422, "invalid_body");
    assert_eq!(problem["detail"], "the body must be a JSON object, not a string");
}

#[tokio::test]
async fn every_missing_field_of_a_body_is_named() {
    let server = server().await;
    for (path, pointers) in
        [("/keys", &["/name", "/scopes"][..]), ("/webhooks", &["/url"]), ("/models", &["/hub", "/source"])]
    {
        let problem = server.post(path, "application/json", "{}").await.problem(422, "invalid_body");
        let found: Vec<&str> =
            problem["errors"].as_array().unwrap().iter().map(|item| item["pointer"].as_str().unwrap()).collect();
        assert_eq!(found, pointers, "{path}");
        assert_eq!(problem["errors"][0]["code"], "required");
    }
}

#[tokio::test]
async fn a_body_that_is_announced_too_long_is_refused_before_its_first_byte() {
    let server = server().await;
    let announced = |path: &str, kind: &str, bytes: u64| {
        let never = Body::from_stream(futures::stream::pending::<Result<&'static str, std::io::Error>>());
        let mut request = post(path, kind, never);
        request.headers_mut().insert(header::CONTENT_LENGTH, bytes.into());
        request
    };
    let too_long = rlood::http::JSON_LIMIT_BYTES as u64 + 1;
    for path in ["/models", "/jobs", "/session"] {
        server.send(announced(path, "application/json", too_long)).await.problem(413, "body_too_large");
    }
    let rows = server.state.dataset_limit_bytes + 1024 * 1024;
    // A form may be mapped to fewer rows, so it is limited only by the disk.
    for (kind, rows) in [("application/x-ndjson", rows), ("multipart/form-data; boundary=B", 1 << 60)] {
        server.send(announced("/datasets", kind, rows)).await.problem(413, "body_too_large");
    }
}

/// A body without end, which counts the bytes read from it.
fn endless() -> (Body, Arc<std::sync::atomic::AtomicU64>) {
    let taken = Arc::new(std::sync::atomic::AtomicU64::new(0));
    let counter = taken.clone();
    let piece = axum::body::Bytes::from(vec![b' '; 64 * 1024]);
    let stream = futures::stream::repeat_with(move || {
        counter.fetch_add(64 * 1024, std::sync::atomic::Ordering::Relaxed);
        Ok::<_, std::convert::Infallible>(piece.clone())
    });
    (Body::from_stream(stream), taken)
}

#[tokio::test]
async fn a_body_of_a_gigabyte_is_refused_without_being_held() {
    let server = server().await;
    let (body, taken) = endless();
    server.post("/models", "application/json", body).await.problem(413, "body_too_large");
    let taken = taken.load(std::sync::atomic::Ordering::Relaxed);
    assert!(taken < 18 << 20, "{taken} bytes were taken for a limit of 16 MiB");
}

#[tokio::test]
async fn a_gzip_bomb_is_refused_by_its_unpacked_size() {
    let server = server_with(|_| {}, |state| state.dataset_limit_bytes = 1 << 20).await;
    let bomb = gzip(&vec![b' '; 64 << 20]);
    assert!(bomb.len() < 100_000);
    for (path, kind) in [("/models", "application/json"), ("/datasets", "application/x-ndjson")] {
        let mut request = post(path, kind, bomb.clone());
        request.headers_mut().insert(header::CONTENT_ENCODING, "gzip".parse().unwrap());
        server.send(request).await.problem(413, "body_too_large");
    }
    let mut request = post("/models", "application/json", &b"not gzip at all"[..]);
    request.headers_mut().insert(header::CONTENT_ENCODING, "gzip".parse().unwrap());
    server.send(request).await.problem(400, "invalid_encoding");
}

#[tokio::test]
async fn a_compressed_body_is_read() {
    let server = server().await;
    let mut request = post("/datasets", "application/x-ndjson", gzip(b"{\"prompt\":\"a\"}\n"));
    request.headers_mut().insert(header::CONTENT_ENCODING, "gzip".parse().unwrap());
    let answer = server.send(request).await;
    assert_eq!(answer.status, 201, "{}", answer.text());
}

#[tokio::test]
async fn codings_have_no_case_and_x_gzip_is_gzip() {
    let server = server().await;
    for (number, coding) in ["GZIP", "Gzip", "x-gzip", "X-GZIP"].into_iter().enumerate() {
        let row = format!("{{\"prompt\":\"{number}\"}}\n");
        let mut request = post("/datasets", "application/x-ndjson", gzip(row.as_bytes()));
        request.headers_mut().insert(header::CONTENT_ENCODING, coding.parse().unwrap());
        let answer = server.send(request).await;
        assert_eq!(answer.status, 201, "{coding}: {}", answer.text());
    }
    let mut request = post("/datasets", "application/x-ndjson", "{\"prompt\":\"plain\"}\n");
    request.headers_mut().insert(header::CONTENT_ENCODING, "Identity".parse().unwrap());
    assert_eq!(server.send(request).await.status, 201);
}

#[tokio::test]
async fn a_body_that_comes_byte_by_byte_counts_by_its_length() {
    let server = server().await;
    // More pieces than the memory limit of all bodies has KiB.
    let pieces =
        std::iter::repeat_n(axum::body::Bytes::from_static(b" "), 200_000).map(Ok::<_, std::convert::Infallible>);
    let body = Body::from_stream(futures::stream::iter(pieces));
    server.post("/models", "application/json", body).await.problem(400, "invalid_json");
}

#[tokio::test]
async fn a_sign_in_is_short() {
    let server = server().await;
    let (body, taken) = endless();
    let problem = server.post("/session", "application/json", body).await.problem(413, "body_too_large");
    assert!(problem["detail"].as_str().unwrap().contains("65536 bytes"), "{problem}");
    let taken = taken.load(std::sync::atomic::Ordering::Relaxed);
    assert!(taken <= 512 * 1024, "{taken} bytes were taken");
    let mut request = post("/session", "application/json", gzip(&[b' '; 70_000]));
    request.headers_mut().insert(header::CONTENT_ENCODING, "gzip".parse().unwrap());
    server.send(request).await.problem(413, "body_too_large");
    let padded = format!("{{\"key\": \"nobody's\"{}}}", " ".repeat(60_000));
    server.post("/session", "application/json", padded).await.problem(401, "unauthorized");
}

#[tokio::test]
async fn a_compressed_body_that_is_cut_off_is_no_matter_of_the_connection() {
    let server = server().await;
    let whole = gzip("{\"prompt\":\"a\"}\n".repeat(1000).as_bytes());
    for length in [whole.len() - 1, whole.len() / 2, 11] {
        let mut request = post("/datasets", "application/x-ndjson", whole[..length].to_vec());
        request.headers_mut().insert(header::CONTENT_ENCODING, "gzip".parse().unwrap());
        let problem = server.send(request).await.problem(400, "invalid_encoding");
        assert_eq!(problem["retryable"], false, "{problem}");
        assert!(problem["detail"].as_str().unwrap().contains("truncated"), "{problem}");
    }
}

#[tokio::test]
async fn a_request_id_is_kept_or_made() {
    let server = server().await;
    let request = |id: &str| Request::get("/livez").header("x-request-id", id).body(Body::empty()).unwrap();
    assert_eq!(server.send(request("abc-1.2:3_4")).await.header("x-request-id"), "abc-1.2:3_4");
    for bad in ["<script>", "", &"x".repeat(129), "a b"] {
        let answer = server.send(request(bad)).await;
        assert!(answer.header("x-request-id").starts_with("req_"), "{bad}");
    }
}

#[tokio::test]
async fn answers_carry_the_security_headers() {
    let server = server().await;
    let answer = server.get("/livez").await;
    assert_eq!(answer.header("x-content-type-options"), "nosniff");
    assert!(answer.header("content-security-policy").starts_with("default-src 'none'"));
    assert!(answer.headers.get("access-control-allow-origin").is_none());
}

#[tokio::test]
async fn without_a_key_other_hosts_and_other_origins_are_refused() {
    let server = server().await;
    let get = |host: &str| Request::get("/datasets").header(header::HOST, host).body(Body::empty()).unwrap();
    for ours in ["localhost:8080", "127.0.0.1", "[::1]:9", "127.0.0.1:1"] {
        assert_eq!(server.send(get(ours)).await.status, 200, "{ours}");
    }
    for theirs in ["evil.example", "localhost.evil.example:80", "192.168.1.5:8080", "[::2]:1"] {
        server.send(get(theirs)).await.problem(421, "wrong_host");
    }
    let upload = |name: &'static str, value: &str| {
        let mut request = post("/datasets", "text/csv", "prompt\na\n");
        request.headers_mut().insert(header::HOST, "localhost:8080".parse().unwrap());
        request.headers_mut().insert(name, value.parse().unwrap());
        request
    };
    server.send(upload("origin", "https://evil.example")).await.problem(403, "forbidden");
    server.send(upload("origin", "null")).await.problem(403, "forbidden");
    server.send(upload("sec-fetch-site", "cross-site")).await.problem(403, "forbidden");
    assert_eq!(server.send(upload("origin", "http://localhost:8080")).await.status, 201);
}

#[tokio::test]
async fn health_metrics_and_workers_answer() {
    let server = server().await;
    assert_eq!(server.get("/livez").await.text(), "ok\n");
    assert_eq!(server.get("/readyz").await.text(), "ok\n");
    assert_eq!(server.get("/workers").await.json(), json!({"data": [], "next": null}));
    server.get("/datasets").await;
    let text = server.get("/metrics").await.text();
    for line in [
        "rlood_jobs{state=\"queued\"} 0",
        "rlood_workers{state=\"idle\"} 0",
        "rlood_http_request_duration_seconds_count{method=\"GET\",route=\"/datasets\",status=\"200\"} 1",
    ] {
        assert!(text.contains(line), "{line} in {text}");
    }
}

#[tokio::test]
async fn the_docs_work_offline() {
    let server = server().await;
    let first = server.get("/").await;
    assert_eq!(first.status, 200);
    assert!(first.text().contains("href=\"/docs/\""));
    let page = server.get("/docs/").await;
    assert_eq!(page.status, 200);
    for part in ["/docs/swagger-ui-bundle.js", "/docs/swagger-ui.css", "/docs/swagger-initializer.js"] {
        let answer = server.get(part).await;
        assert_eq!(answer.status, 200, "{part}");
        assert!(answer.header("content-security-policy").contains("script-src 'self'"), "{part}");
    }
    let start = server.get("/docs/swagger-initializer.js").await.text();
    assert!(start.contains("/openapi.json"), "{start}");
    assert!(!page.text().contains("http://") && !page.text().contains("https://"), "{}", page.text());
}

#[tokio::test]
async fn bad_pages_and_unknown_ids_are_clear() {
    let server = server().await;
    let problem = server.get("/datasets?limit=0").await.problem(400, "invalid_query");
    assert_eq!(problem["errors"][0]["pointer"], "?limit");
    server.get("/datasets?limit=x").await.problem(400, "invalid_query");
    server.get("/datasets?limt=5").await.problem(400, "invalid_query");
    server.get("/datasets?after=zzz").await.problem(400, "invalid_cursor");
    server.get("/datasets/nonsense").await.problem(404, "not_found");
    server.get("/datasets/ds_01jd0000000000000000000000").await.problem(404, "not_found");
    server.get("/checkpoints/ckpt_01jd0000000000000000000000/files/x").await.problem(404, "not_found");
    server.get("/jobs/job_01jd0000000000000000000000/adapter").await.problem(404, "not_found");
}

/// The router on a real socket.
async fn on_socket(server: &Server) -> std::net::SocketAddr {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let router = server.router.clone();
    tokio::spawn(async move { axum::serve(listener, router).await });
    address
}

#[tokio::test]
async fn a_gigabyte_over_a_socket_is_answered_before_it_is_sent() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let server = server().await;
    let address = on_socket(&server).await;
    for (path, kind) in [("/models", "application/json"), ("/jobs", "application/json")] {
        let (mut read, mut write) = tokio::net::TcpStream::connect(address).await.unwrap().into_split();
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {kind}\r\ncontent-length: 1073741824\r\n\r\n"
        );
        write.write_all(head.as_bytes()).await.unwrap();
        let sender = tokio::spawn(async move {
            let piece = vec![b' '; 1 << 20];
            let mut sent = 0_u64;
            while sent < 1 << 30 && write.write_all(&piece).await.is_ok() {
                sent += 1 << 20;
            }
            sent
        });
        let mut answer = [0; 12];
        read.read_exact(&mut answer).await.unwrap();
        assert_eq!(&answer, b"HTTP/1.1 413", "{path}");
        drop(read);
        let sent = sender.await.unwrap();
        assert!(sent < 200 << 20, "{path} took {sent} bytes");
    }
}

#[tokio::test]
async fn broken_chunks_are_not_blamed_on_compression() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let server = server().await;
    let address = on_socket(&server).await;
    for (path, kind) in [("/models", "application/json"), ("/datasets", "application/x-ndjson")] {
        for coding in ["", "content-encoding: gzip\r\n"] {
            let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
            let head = format!("POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {kind}\r\n{coding}");
            let request = format!("{head}transfer-encoding: chunked\r\n\r\nzz\r\n{{}}\r\n0\r\n\r\n");
            stream.write_all(request.as_bytes()).await.unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await.unwrap();
            assert!(answer.starts_with("HTTP/1.1 400"), "{path} {coding}: {answer}");
            assert!(answer.contains("\"invalid_request\"") && answer.contains("framing"), "{path} {coding}: {answer}");
        }
    }
}

#[tokio::test]
async fn a_line_of_100_mb_over_a_socket_is_refused_with_its_number() {
    let server = server().await;
    let address = on_socket(&server).await;
    let piece = axum::body::Bytes::from(vec![b'x'; 1 << 20]);
    let start = axum::body::Bytes::from_static(b"{\"prompt\":\"a\"}\n{\"prompt\":\"");
    let pieces = std::iter::once(start).chain(std::iter::repeat_n(piece, 100)).map(Ok::<_, std::convert::Infallible>);
    let _ = rustls::crypto::ring::default_provider().install_default();
    let answer = reqwest::Client::new()
        .post(format!("http://{address}/datasets"))
        .header("content-type", "application/x-ndjson")
        .body(reqwest::Body::wrap_stream(futures::stream::iter(pieces)))
        .send()
        .await
        .unwrap();
    assert_eq!(answer.status(), 422);
    let problem: Value = answer.json().await.unwrap();
    assert_eq!(
        (&problem["errors"][0]["pointer"], &problem["errors"][0]["code"]),
        (&json!("line 2"), &json!("row_too_long"))
    );
}
