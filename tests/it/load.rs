//! A server with slow, greedy or hostile clients. Figures are printed; `RLOOD_LONG=1` runs longer.

use std::time::{Duration, Instant};

use rlood::id::WorkerId;
use rlood::protocol::PROTOCOL;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::processes::Server;

/// Number of concurrent slow sockets.
const SLOW_SOCKETS: usize = 2000;
/// Number of concurrent endless uploads.
const UPLOADS: usize = 100;
/// Memory limit of the server under this load, in MiB.
const MOST_MIB: u64 = 512;
/// Quantiles below this are noise: several test processes share the cores.
const NOISE: Duration = Duration::from_millis(10);

fn long() -> bool {
    std::env::var_os("RLOOD_LONG").is_some()
}

fn raise_open_files() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
}

fn address(server: &Server) -> String {
    server.url.strip_prefix("http://").unwrap().to_owned()
}

/// Measures the 99th percentile of `GET /jobs`, with a new connection every tenth time.
async fn p99(server: &Server) -> Duration {
    let mut times = Vec::new();
    let mut client = reqwest::Client::builder().no_proxy().build().unwrap();
    for count in 0..400 {
        if count % 10 == 0 {
            client = reqwest::Client::builder().no_proxy().build().unwrap();
        }
        let begun = Instant::now();
        let answer = client.get(format!("{}/jobs", server.url)).send().await.unwrap();
        assert_eq!(answer.status(), 200);
        answer.bytes().await.unwrap();
        times.push(begun.elapsed());
    }
    times.sort_unstable();
    times[times.len() * 99 / 100]
}

/// Returns a value of /proc/PID/status in MiB.
fn memory_mib(server: &Server, name: &str) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{}/status", server.child.id())).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.trim_matches(|c: char| !c.is_ascii_digit()).parse::<u64>().unwrap() / 1024
}

/// A client that sends `head`, then one byte per second, forever; it reconnects when it is disconnected.
async fn drip(address: String, head: &'static str) {
    loop {
        let Ok(mut stream) = TcpStream::connect(&address).await else { continue };
        let mut sent = stream.write_all(head.as_bytes()).await;
        while sent.is_ok() {
            tokio::time::sleep(Duration::from_secs(1)).await;
            sent = stream.write_all(b"a").await;
        }
    }
}

async fn open_connections(server: &Server) -> usize {
    let text = reqwest::get(format!("{}/metrics", server.url)).await.unwrap().text().await.unwrap();
    let open = text.lines().find_map(|line| line.strip_prefix("rlood_connections_open "));
    open.unwrap().parse::<f64>().unwrap() as usize
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_sockets_leave_healthy_clients_as_fast_as_they_were() {
    raise_open_files();
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path(), "none");
    p99(&server).await; // Warm.
    let mut figures = Vec::new();
    // Other processes share the cores: one quiet round out of a few is proof enough.
    for _ in 0..4 {
        let alone = p99(&server).await;
        let heads = [
            "",
            "GET /jobs HTTP/1.1\r\nhost: localhost\r\nx-slow: ",
            "PRI * HTT",
            "POST /jobs HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 1000000\r\n\r\n{",
            "POST /datasets HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/x-ndjson\r\ncontent-length: 99999\r\n\r\n{",
        ];
        let slow: Vec<_> =
            (0..SLOW_SOCKETS).map(|count| tokio::spawn(drip(address(&server), heads[count % heads.len()]))).collect();
        let begun = Instant::now();
        // Disconnected clients reconnect a little later, so most are connected at any time.
        while open_connections(&server).await < SLOW_SOCKETS * 6 / 10 {
            assert!(begun.elapsed() < Duration::from_secs(60), "{} are open", open_connections(&server).await);
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        tokio::time::sleep(Duration::from_secs(if long() { 20 } else { 1 })).await;
        let crowded = p99(&server).await;
        slow.iter().for_each(|task| task.abort());
        println!("p99 alone {alone:?}, beside {SLOW_SOCKETS} slow sockets {crowded:?}");
        figures.push((alone, crowded));
        if crowded <= 2 * alone.max(NOISE) {
            return;
        }
    }
    panic!("{figures:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_asks_for_nothing_is_closed() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path(), "none");
    let begun = Instant::now();
    let mut closed = Vec::new();
    for head in ["", "PRI * HTT", "GET / HTTP/1.1\r\nhost: localhost\r\nx-slow: "] {
        let mut stream = TcpStream::connect(address(&server)).await.unwrap();
        stream.write_all(head.as_bytes()).await.unwrap();
        closed.push(async move {
            let mut rest = Vec::new();
            tokio::time::timeout(Duration::from_secs(60), stream.read_to_end(&mut rest)).await.map(|_| ())
        });
    }
    for (number, closed) in closed.into_iter().enumerate() {
        closed.await.unwrap_or_else(|_| panic!("connection {number} is open after a minute"));
    }
    assert!(begun.elapsed() > Duration::from_secs(15), "{:?}: a slow network is no attack", begun.elapsed());
}

/// Uploads rows, or a JSON body, until it is refused or disconnected; then starts again.
async fn upload(address: String, path: &'static str, kind: &'static str, piece: &'static [u8]) {
    loop {
        let Ok(mut stream) = TcpStream::connect(&address).await else { return };
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\n\r\n"
        );
        let mut sent = stream.write_all(head.as_bytes()).await;
        while sent.is_ok() {
            let mut chunk = format!("{:x}\r\n", piece.len()).into_bytes();
            chunk.extend_from_slice(piece);
            chunk.extend_from_slice(b"\r\n");
            sent = stream.write_all(&chunk).await;
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn endless_uploads_stay_within_memory() {
    raise_open_files();
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path(), "none");
    // A row without end, rows without end, a document without end.
    let spaces: &'static [u8] = Box::leak(vec![b' '; 64 * 1024].into_boxed_slice());
    let letters: &'static [u8] = Box::leak(vec![b'x'; 64 * 1024].into_boxed_slice());
    let rows: &'static [u8] = Box::leak(
        "{\"prompt\":\"a row of a dataset that never ends\"}\n".repeat(1300).into_boxed_str().into_boxed_bytes(),
    );
    let kinds = [
        ("/datasets", "application/x-ndjson", rows),
        ("/datasets", "text/csv", letters),
        ("/jobs", "application/json", spaces),
        ("/models", "application/json", spaces),
    ];
    let tasks: Vec<_> = (0..UPLOADS)
        .map(|count| {
            let (path, kind, piece) = kinds[count % kinds.len()];
            tokio::spawn(upload(address(&server), path, kind, piece))
        })
        .collect();
    let end = Instant::now() + Duration::from_secs(if long() { 60 } else { 6 });
    while Instant::now() < end {
        tokio::time::sleep(Duration::from_millis(500)).await;
        assert_eq!(reqwest::get(format!("{}/livez", server.url)).await.unwrap().status(), 200);
    }
    tasks.iter().for_each(|task| task.abort());
    let peak = memory_mib(&server, "VmHWM:");
    println!("{UPLOADS} endless uploads: {peak} MiB at most");
    assert!(peak < MOST_MIB, "{peak} MiB");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_of_resets_ends_its_own_connection_only() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path(), "none");
    let mut floods = Vec::new();
    let end = Instant::now() + Duration::from_secs(if long() { 30 } else { 4 });
    for _ in 0..8 {
        let address = address(&server);
        floods.push(tokio::spawn(async move {
            let (mut streams, mut cut) = (0_u64, 0_u64);
            while Instant::now() < end {
                let Ok(stream) = TcpStream::connect(&address).await else { continue };
                let Ok((mut client, connection)) = h2::client::handshake(stream).await else { continue };
                let driver = tokio::spawn(connection);
                loop {
                    let Ok(mut ready) = client.ready().await else { break };
                    let request = axum::http::Request::get("http://localhost/jobs").body(()).unwrap();
                    let Ok((_answer, mut stream)) = ready.send_request(request, true) else { break };
                    stream.send_reset(h2::Reason::CANCEL);
                    streams += 1;
                    client = ready;
                    if Instant::now() >= end {
                        break;
                    }
                    tokio::task::yield_now().await;
                }
                cut += u64::from(Instant::now() < end);
                driver.abort();
            }
            (streams, cut)
        }));
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    let during = p99(&server).await;
    let (mut streams, mut cut) = (0, 0);
    for flood in floods {
        let (of_it, cut_of_it) = flood.await.unwrap();
        (streams, cut) = (streams + of_it, cut + cut_of_it);
    }
    let after = p99(&server).await;
    let peak = memory_mib(&server, "VmHWM:");
    println!(
        "{streams} streams reset, {cut} connections cut by the server, p99 {during:?} during, {after:?} after, {peak} MiB"
    );
    assert!(streams > 1000 && peak < MOST_MIB, "{streams} streams, {peak} MiB");
    assert!(during < Duration::from_secs(5), "{during:?}");
}

/// Number of sockets that use up the memory of unauthenticated bodies: 16 MiB, almost 64 KiB each.
const STRANGERS: usize = 300;

/// Sends nearly all of a sign-in, but never its end; reconnects when disconnected.
async fn sign_in_for_ever(address: String) {
    let head = "POST /session HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n";
    let request = format!("{head}transfer-encoding: chunked\r\n\r\nfff0\r\n{}\r\n", " ".repeat(0xfff0));
    loop {
        let Ok(mut stream) = TcpStream::connect(&address).await else { continue };
        if stream.write_all(request.as_bytes()).await.is_ok() {
            let _ = stream.read_to_end(&mut Vec::new()).await;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strangers_keep_out_neither_users_nor_workers() {
    const KEY: &str = "operator-key-0123456789";
    const TOKEN: &str = "the-token-of-a-worker-0123456789";
    raise_open_files();
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start_in(dir.path(), "none", &[("RLOOD_API_KEY", KEY), ("RLOOD_WORKER_TOKEN", TOKEN)]);
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let post = |path: &str, token: &str| client.post(format!("{}{path}", server.url)).bearer_auth(token);
    let sign_in = || async { post("/session", "").json(&json!({"key": KEY})).send().await.unwrap().status() };
    assert_eq!(sign_in().await, 201);

    let strangers: Vec<_> = (0..STRANGERS).map(|_| tokio::spawn(sign_in_for_ever(address(&server)))).collect();
    // They use up the memory of sign-ins and displace each other: a user's sign-in still succeeds.
    tokio::time::sleep(Duration::from_secs(1)).await;
    for _ in 0..20 {
        assert_eq!(sign_in().await, 201, "a sign-in that is finished at once gets in");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let large = json!({"model": "none", "name": "x".repeat(3 << 20)});
    let register = json!({"worker": WorkerId::new(), "device": "cpu", "pid": 1, "threads": 1, "version": "0.1.0",
                          "protocol": PROTOCOL});
    for _ in 0..10 {
        assert_eq!(post("/jobs/validate", KEY).json(&large).send().await.unwrap().status(), 200);
        assert_eq!(post("/worker/register", TOKEN).json(&register).send().await.unwrap().status(), 200);
    }
    strangers.iter().for_each(|task| task.abort());
}
