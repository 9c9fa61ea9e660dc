//! A reward service with every kind of fault, which records the rewards that it really sent.
//!
//! It speaks HTTP over bare sockets: a framework would not let it cut a connection or drip an answer.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rlood::reward::signature::Key;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// The value in faulty answers; it must never be used.
const LIE: f64 = 777.0;
/// Number of requests per hundred with each fault; the others are answered normally.
const DECK: [(Fault, usize); 7] = [
    (Fault::Error, 30),
    (Fault::Timeout, 10),
    (Fault::Garbage, 6),
    (Fault::WrongLength, 6),
    (Fault::Drip, 6),
    (Fault::Cut, 6),
    (Fault::Partly, 6),
];
/// After this many requests, the first few of the next ones get 429.
const STORM_EVERY: usize = 90;
const STORM: usize = 6;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    None,
    Error,
    Timeout,
    Garbage,
    WrongLength,
    Drip,
    Cut,
    Partly,
    Storm,
    Outage,
}

/// When the service is unavailable, and for how long.
#[derive(Debug, Clone, Copy)]
pub struct Weather {
    /// An outage starts before the first request after this many.
    pub outage_every: usize,
    pub outage_lasts: Duration,
}

#[derive(Clone)]
pub struct Service {
    books: Arc<Mutex<Books>>,
    key: Arc<Key>,
    url: String,
}

#[derive(Default)]
pub struct Books {
    /// The fault pattern; None = no faults.
    pub weather: Option<Weather>,
    /// Number of reward requests received.
    pub requests: usize,
    /// The body by request id; it must never change.
    bodies: BTreeMap<String, Vec<u8>>,
    /// All values sent for each completion.
    pub said: BTreeMap<String, BTreeSet<u64>>,
    pub faults: BTreeMap<Fault, usize>,
    pub pings: usize,
    pub pings_while_away: usize,
    away_until: Option<Instant>,
}

/// The form of a response on the wire.
enum Reply {
    /// A complete response; the connection stays open.
    Whole(Vec<u8>),
    /// These bytes, then the connection is closed.
    Cut(Vec<u8>),
    /// Sent in pieces, with a pause after each.
    Drip(Vec<u8>, Duration),
    /// No response at all.
    Silence,
}

impl Service {
    pub async fn start(secret: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/score", listener.local_addr().unwrap());
        let service = Self { books: Arc::default(), key: Arc::new(Key::parse(secret).unwrap()), url };
        let own = service.clone();
        tokio::spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                tokio::spawn(own.clone().attend(socket));
            }
        });
        service
    }

    pub fn url(&self) -> &str {
        &self.url
    }

    pub fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap()
    }

    async fn attend(self, mut socket: TcpStream) {
        while let Some((head, body)) = read_request(&mut socket).await {
            self.check_signature(&head, &body);
            let reply = self.books().reply(&body);
            let written = match reply {
                Reply::Whole(bytes) => socket.write_all(&bytes).await,
                Reply::Cut(bytes) => {
                    // What cannot be written any more need not be cut.
                    let _ = socket.write_all(&bytes).await;
                    return;
                }
                Reply::Drip(bytes, pause) => drip(&mut socket, &bytes, pause).await,
                Reply::Silence => {
                    let mut rest = [0; 64];
                    while socket.read(&mut rest).await.is_ok_and(|read| read > 0) {}
                    return;
                }
            };
            if written.is_err() {
                return;
            }
        }
    }

    /// Every request is signed anew, pings too.
    fn check_signature(&self, head: &BTreeMap<String, String>, body: &[u8]) {
        let now_s = jiff::Timestamp::now().as_second() as u64;
        let [id, at, signature] = ["webhook-id", "webhook-timestamp", "webhook-signature"].map(|name| &head[name]);
        self.key.verify(id, at, signature, body, now_s).unwrap();
        let request: Value = serde_json::from_slice(body).unwrap();
        assert_eq!(request["id"], id.as_str());
    }
}

async fn drip(socket: &mut TcpStream, bytes: &[u8], pause: Duration) -> std::io::Result<()> {
    for piece in bytes.chunks(bytes.len().div_ceil(10)) {
        socket.write_all(piece).await?;
        socket.flush().await?;
        tokio::time::sleep(pause).await;
    }
    Ok(())
}

/// Header fields in lower case, and the body; None when the client has hung up.
async fn read_request(socket: &mut TcpStream) -> Option<(BTreeMap<String, String>, Vec<u8>)> {
    let mut bytes = Vec::new();
    let mut piece = [0; 4096];
    loop {
        if let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
            let head = String::from_utf8_lossy(&bytes[..end]).into_owned();
            let field = |line: &str| line.split_once(": ").map(|(name, value)| (name.to_lowercase(), value.to_owned()));
            let head: BTreeMap<String, String> = head.lines().filter_map(field).collect();
            let length: usize = head["content-length"].parse().unwrap();
            if bytes.len() >= end + 4 + length {
                return Some((head, bytes[end + 4..end + 4 + length].to_vec()));
            }
        }
        match socket.read(&mut piece).await {
            Ok(read) if read > 0 => bytes.extend_from_slice(&piece[..read]),
            _ => return None,
        }
    }
}

impl Books {
    fn reply(&mut self, body: &[u8]) -> Reply {
        let request: Value = serde_json::from_slice(body).unwrap();
        let id = request["id"].as_str().unwrap().to_owned();
        let away = self.away_until.is_some_and(|until| Instant::now() < until);
        if request["type"] == "reward.ping" {
            self.pings += 1;
            self.pings_while_away += usize::from(away);
            return if away { Reply::Cut(Vec::new()) } else { whole(200, "", "{}") };
        }
        assert_eq!(self.bodies.entry(id).or_insert_with(|| body.to_vec()), body, "one id, two bodies");
        self.requests += 1;
        let number = self.requests;
        let Some(weather) = self.weather else { return whole(200, "", &self.truth(&request)) };
        if number.is_multiple_of(weather.outage_every) && !away {
            self.away_until = Some(Instant::now() + weather.outage_lasts);
        }
        let away = self.away_until.is_some_and(|until| Instant::now() < until);
        let fault = match (away, number % STORM_EVERY >= STORM_EVERY - STORM) {
            (true, _) => Fault::Outage,
            (_, true) => Fault::Storm,
            _ => card(number),
        };
        *self.faults.entry(fault).or_default() += 1;
        self.suffer(fault, number, &request)
    }

    fn suffer(&mut self, fault: Fault, number: usize, request: &Value) -> Reply {
        let samples = request["samples"].as_array().unwrap();
        match fault {
            Fault::None => whole(200, "", &self.truth(request)),
            Fault::Error => whole([500, 502, 503, 504, 408, 425][number % 6], "", "<html>busy</html>"),
            Fault::Timeout => Reply::Silence,
            Fault::Storm => whole(429, ["retry-after: 1\r\n", ""][number % 2], "slow down"),
            Fault::Outage => match number % 3 {
                0 => Reply::Cut(Vec::new()),
                1 => whole(503, "", "down"),
                _ => Reply::Silence,
            },
            Fault::Garbage => match number % 5 {
                0 => Reply::Cut(b"SSH-2.0-OpenSSH_9.6\r\n\r\n".to_vec()),
                1 => whole(200, "", "<html><body>It works!</body></html>"),
                2 => whole(200, "", &format!("{{\"rewards\": [{LIE}, ")),
                3 => whole(200, "", ""),
                _ => whole(200, "", &json!({"rewards": vec!["high"; samples.len()]}).to_string()),
            },
            Fault::WrongLength => match number % 4 {
                0 => whole(200, "", &json!({"rewards": vec![LIE; samples.len() + 1]}).to_string()),
                1 => whole(200, "", &json!({"rewards": vec![LIE; samples.len() - 1]}).to_string()),
                2 => whole(200, "", &json!({"id": "rwr_another", "rewards": vec![LIE; samples.len()]}).to_string()),
                _ => whole(200, "", &json!({"results": [{"sample_id": "s_999", "reward": LIE}]}).to_string()),
            },
            // The first kind arrives in time, the second does not.
            Fault::Drip if number.is_multiple_of(2) => {
                Reply::Drip(message(200, "", &self.truth(request)), Duration::from_millis(5))
            }
            Fault::Drip => Reply::Drip(message(200, "", &lies(request)), Duration::from_millis(200)),
            Fault::Cut => {
                let bytes = message(200, "", &lies(request));
                Reply::Cut(bytes[..bytes.len() - [1, 20, bytes.len()][number % 3]].to_vec())
            }
            Fault::Partly => {
                let mut answer: Value = serde_json::from_str(&lies(request)).unwrap();
                let results = answer["results"].as_array_mut().unwrap();
                // Only the first result is valid.
                results[0]["reward"] = json!(self.say(&samples[0]));
                for result in results.iter_mut().skip(1) {
                    let error = json!({"code": "judge_timeout", "retryable": true});
                    *result = match number % 3 {
                        0 => json!({"sample_id": result["sample_id"], "reward": LIE, "error": error}),
                        1 => json!({"sample_id": result["sample_id"], "reward": "NaN"}),
                        _ => json!({"sample_id": "s_998", "reward": LIE}),
                    };
                }
                whole(200, "", &answer.to_string())
            }
        }
    }

    /// Computes the value from the completion alone, and records it.
    fn say(&mut self, sample: &Value) -> f64 {
        let completion = sample["completion"].as_str().unwrap();
        let bytes: u64 = completion.bytes().map(u64::from).sum();
        let value = (bytes % 11) as f64 / 7.0;
        self.said.entry(completion.to_owned()).or_default().insert(value.to_bits());
        value
    }

    fn truth(&mut self, request: &Value) -> String {
        let samples = request["samples"].as_array().unwrap();
        let results: Vec<Value> = samples
            .iter()
            .map(|sample| json!({"sample_id": sample["sample_id"], "reward": self.say(sample)}))
            .collect();
        json!({"version": "1", "id": request["id"], "results": results}).to_string()
    }
}

/// Returns something that resembles an answer but must not be used.
fn lies(request: &Value) -> String {
    let samples = request["samples"].as_array().unwrap();
    let lie = |sample: &Value| json!({"sample_id": sample["sample_id"], "reward": LIE});
    json!({"id": request["id"], "results": samples.iter().map(lie).collect::<Vec<_>>()}).to_string()
}

/// Returns the fault of the nth request, from a deck that is reshuffled every hundred requests.
fn card(number: usize) -> Fault {
    let mut deck: Vec<Fault> = DECK.iter().flat_map(|(fault, count)| vec![*fault; *count]).collect();
    deck.resize(100, Fault::None);
    let mut state = (number / 100) as u64 + 1;
    for at in (1..deck.len()).rev() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        deck.swap(at, (state >> 33) as usize % (at + 1));
    }
    deck[number % 100]
}

fn whole(status: u16, headers: &str, body: &str) -> Reply {
    Reply::Whole(message(status, headers, body))
}

fn message(status: u16, headers: &str, body: &str) -> Vec<u8> {
    format!("HTTP/1.1 {status} X\r\ncontent-length: {}\r\n{headers}\r\n{body}", body.len()).into_bytes()
}
