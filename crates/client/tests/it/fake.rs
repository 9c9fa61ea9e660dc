//! A fake server over plain sockets, whose replies a test defines, so that it can break off anywhere.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rlood_client::{Client, ClientBuilder, Retry};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// A request as it arrived; header names are in lower case.
#[derive(Debug, Clone)]
pub struct Seen {
    pub line: String,
    pub headers: BTreeMap<String, String>,
    pub body: Vec<u8>,
}

/// A reply of the fake server.
#[derive(Debug, Clone)]
pub struct Reply {
    status: u16,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
    /// Number of body bytes that are sent before the connection ends; `None` = all.
    sent: Option<usize>,
    /// Whether the body ends with the connection, without an announced length.
    unframed: bool,
    /// Whether the connection stays open after the last sent byte.
    hangs: bool,
    /// Whether not even a status is sent.
    silent: bool,
}

impl Reply {
    pub fn new(status: u16, body: impl Into<Vec<u8>>) -> Self {
        let body = body.into();
        Self { status, headers: Vec::new(), body, sent: None, unframed: false, hangs: false, silent: false }
    }

    pub fn json(status: u16, body: &Value) -> Self {
        Self::new(status, body.to_string()).header("content-type", "application/json")
    }

    pub fn problem(status: u16, code: &str, retryable: bool) -> Self {
        let problem = json!({"type": format!("urn:rlood:problem:{code}"), "title": code, "status": status, "detail": "no",
                             "code": code, "request_id": "req_1", "retryable": retryable, "errors": []});
        Self::json(status, &problem)
    }

    /// Ends the connection without a response.
    pub fn nothing() -> Self {
        Self { silent: true, ..Self::new(200, "") }
    }

    pub fn header(mut self, name: &str, value: impl ToString) -> Self {
        self.headers.push((name.to_owned(), value.to_string()));
        self
    }

    /// Ends the connection after this many bytes of the body.
    pub fn cut(self, sent: usize) -> Self {
        Self { sent: Some(sent), ..self }
    }

    /// Keeps the connection open without sending more.
    pub fn hangs(self) -> Self {
        Self { hangs: true, ..self }
    }

    pub fn unframed(self) -> Self {
        Self { unframed: true, ..self }
    }
}

pub struct Fake {
    pub url: String,
    seen: Arc<Mutex<Vec<Seen>>>,
}

impl Fake {
    /// Starts a server; `answer` receives the number of the request, from 0, and the request.
    pub async fn start(answer: impl Fn(usize, &Seen) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (kept, answer) = (seen.clone(), Arc::new(answer));
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (kept, answer) = (kept.clone(), answer.clone());
                tokio::spawn(async move {
                    // An error of a client that disconnected is irrelevant.
                    let _ = serve(stream, &kept, &*answer).await;
                });
            }
        });
        Self { url, seen }
    }

    pub fn seen(&self) -> Vec<Seen> {
        self.seen.lock().unwrap().clone()
    }

    /// Returns a client with short delays between retries.
    pub fn client(&self) -> Client {
        self.builder().build().unwrap()
    }

    /// Returns a client that never retries.
    pub fn impatient(&self) -> Client {
        self.builder().retry(Retry::never()).build().unwrap()
    }

    pub fn builder(&self) -> ClientBuilder {
        let retry = Retry {
            max_retries: 4,
            first_delay: Duration::from_millis(2),
            longest_delay: Duration::from_millis(10),
            longest_retry_after: Duration::from_secs(5),
        };
        Client::builder(&self.url).no_proxy().retry(retry)
    }
}

async fn serve(
    mut stream: TcpStream,
    seen: &Mutex<Vec<Seen>>,
    answer: &(dyn Fn(usize, &Seen) -> Reply + Send + Sync),
) -> std::io::Result<()> {
    let request = read(&mut stream).await?;
    let number = {
        let mut seen = seen.lock().unwrap();
        seen.push(request.clone());
        seen.len() - 1
    };
    let Reply { status, headers, body, sent, unframed, hangs, silent } = answer(number, &request);
    if !silent {
        let mut head = format!("HTTP/1.1 {status} x\r\nconnection: close\r\n");
        if !unframed {
            head.push_str(&format!("content-length: {}\r\n", body.len()));
        }
        for (name, value) in headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        stream.write_all(format!("{head}\r\n").as_bytes()).await?;
        stream.write_all(&body[..sent.unwrap_or(body.len()).min(body.len())]).await?;
    }
    if hangs {
        // Waits until the client disconnects.
        let _ = stream.read(&mut [0]).await;
    }
    stream.shutdown().await
}

async fn read(stream: &mut TcpStream) -> std::io::Result<Seen> {
    let mut bytes = Vec::new();
    let end = loop {
        if let Some(at) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
            break at;
        }
        if stream.read_buf(&mut bytes).await? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
    };
    let head = String::from_utf8(bytes[..end].to_vec()).unwrap();
    let mut lines = head.lines();
    let line = lines.next().unwrap().trim_end_matches(" HTTP/1.1").to_owned();
    let headers: BTreeMap<String, String> = lines
        .filter_map(|line| line.split_once(':'))
        .map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_owned()))
        .collect();
    let length = headers.get("content-length").map_or(0, |length| length.parse().unwrap());
    let mut body = bytes.split_off(end + 4);
    while body.len() < length {
        if stream.read_buf(&mut body).await? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
    }
    Ok(Seen { line, headers, body })
}

/// Returns a job as the server sends it, with a field of a later version.
pub fn job() -> Value {
    json!({
        "id": "job_01jd0000000000000000000000", "name": null, "state": "queued", "requested": null, "phase": null,
        "status_reason": null, "attempt": 0, "server_errors": 0, "device": null, "last_seq": 1, "step": 0,
        "total_steps": 2, "eta_s": null, "queue_position": 1, "failure": null, "ending": null, "alerts": [],
        "training_phase": null, "plan": {"model": {"id": "m"}}, "parent": null,
        "created_at": "2026-01-01T00:00:00.000Z", "started_at": null, "finished_at": null, "metadata": {}, "owner": "",
        "of_a_later_version": {"x": 1}
    })
}
