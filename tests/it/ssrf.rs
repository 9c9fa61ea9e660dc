//! What a job's author can write as an address, the server must not reach: over 200 URLs, and not one connection, counted at
//! listeners that would take it. Then what the operator permits: by block and by name, and nothing beside it.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use futures::FutureExt;
use rlood::id::JobId;
use rlood::outgoing::OutgoingPolicy;
use rlood::reward::outgoing::{Lookup, refusal};
use rlood::reward::{JobContext, Rewards};
use rlood::sample::RolloutId;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::processes::Server;
use super::rewards::{plan, samples};

/// Not public, of every kind; the port is that of our listeners, so that loopback would answer.
const FORBIDDEN: [[u8; 4]; 26] = [
    [127, 0, 0, 1],
    [127, 0, 0, 2],
    [127, 255, 255, 254],
    [0, 0, 0, 0],
    [0, 1, 2, 3],
    [10, 0, 0, 1],
    [10, 255, 255, 255],
    [172, 16, 0, 1],
    [172, 31, 255, 254],
    [192, 168, 0, 1],
    [192, 168, 255, 255],
    [169, 254, 169, 254],
    [169, 254, 170, 2],
    [100, 64, 0, 1],
    [100, 100, 100, 200],
    [168, 63, 129, 16],
    [192, 0, 0, 192],
    [192, 0, 2, 1],
    [192, 88, 99, 1],
    [198, 18, 0, 1],
    [198, 51, 100, 7],
    [203, 0, 113, 9],
    [224, 0, 0, 1],
    [239, 255, 255, 250],
    [240, 0, 0, 1],
    [255, 255, 255, 255],
];

/// The ways to write one address.
fn notations([a, b, c, d]: [u8; 4]) -> Vec<String> {
    let number = u32::from_be_bytes([a, b, c, d]);
    let (low3, low2) = (number & 0xff_ffff, number & 0xffff);
    let dotted = format!("{a}.{b}.{c}.{d}");
    let other_digits = |zero: u32| -> String {
        let digit = |c: char| c.to_digit(10).and_then(|digit| char::from_u32(zero + digit)).unwrap_or(c);
        dotted.chars().map(digit).collect()
    };
    let (high, low) = (number >> 16, number & 0xffff);
    vec![
        dotted.clone(),
        format!("{dotted}."),
        format!("{number}"),
        format!("0x{number:x}"),
        format!("0X{number:08X}"),
        format!("0{number:o}"),
        format!("0x{a:x}.0x{b:x}.0x{c:x}.0x{d:x}"),
        format!("0{a:o}.0{b:o}.0{c:o}.0{d:o}"),
        format!("0000{a:o}.0{b:o}.{c}.0x{d:x}"),
        format!("{a}.{low3}"),
        format!("{a}.{b}.{low2}"),
        format!("0x{a:x}.0x{low3:x}"),
        dotted.bytes().map(|byte| format!("%{byte:02x}")).collect(),
        dotted.replace('.', "%2e"),
        dotted.replace('.', "。"),
        dotted.replace('.', "．"),
        other_digits(0xff10),
        other_digits(0x1d7ce),
        other_digits(0x1d7f6),
        format!("[::ffff:{dotted}]"),
        format!("[::ffff:{high:x}:{low:x}]"),
        format!("[0:0:0:0:0:ffff:{high:x}:{low:x}]"),
        format!("[::ffff:0:{dotted}]"),
        format!("[::{dotted}]"),
        format!("[64:ff9b::{dotted}]"),
        format!("[64:ff9b:1::{high:x}:{low:x}]"),
        format!("[2002:{high:x}:{low:x}::1]"),
        format!("[2001:0:4136:e378:8000:63bf:{:x}:{:x}]", !high & 0xffff, !low & 0xffff),
    ]
}

/// Names that lead home, and tricks with the other parts of a URL; `PORT` is the listeners'.
const OTHERS: [&str; 44] = [
    "http://localhost:PORT/",
    "http://localhost.:PORT/",
    "http://LOCALHOST:PORT/",
    "http://lOcAlHoSt:PORT/",
    "http://ⓛⓞⓒⓐⓛⓗⓞⓢⓣ:PORT/",
    "http://ｌｏｃａｌｈｏｓｔ:PORT/",
    "http://%6c%6f%63%61%6c%68%6f%73%74:PORT/",
    "https://localhost:PORT/",
    "http://ip6-localhost:PORT/",
    "http://[::1]:PORT/",
    "http://[0:0:0:0:0:0:0:1]:PORT/",
    "http://[0000:0000:0000:0000:0000:0000:0000:0001]:PORT/",
    "http://[::]:PORT/",
    "http://[0::0]:PORT/",
    "http://[fe80::1]:PORT/",
    "http://[fe80::1%25lo]:PORT/",
    "http://[::1%25lo]:PORT/",
    "http://[fc00::1]:PORT/",
    "http://[fd00:ec2::254]:PORT/latest/meta-data/",
    "http://[fd20:ce::254]:PORT/computeMetadata/v1/",
    "http://[fec0::1]:PORT/",
    "http://[ff02::1]:PORT/",
    "http://[2001:db8::1]:PORT/",
    "http://[3fff::1]:PORT/",
    "http://[100::1]:PORT/",
    "http://[2001:2::1]:PORT/",
    "http://[5f00::1]:PORT/",
    "http://0:PORT/",
    "http://0x0:PORT/",
    "http://00000000000:PORT/",
    "http://user@127.0.0.1:PORT/",
    "http://public.example@127.0.0.1:PORT/",
    "http://public.example:80@127.0.0.1:PORT/",
    "http://public.example%40127.0.0.1:PORT/",
    "http://127.0.0.1:PORT#@public.example/",
    "http://127.0.0.1:PORT?@public.example/",
    "http://127.0.0.1:PORT\\@public.example/",
    "http:\\\\127.0.0.1:PORT\\",
    "http:/127.0.0.1:PORT/",
    "http:127.0.0.1:PORT/",
    "\thttp://127.0.0.1:PORT/",
    "http://127.0.\t0.1:PORT/",
    "gopher://127.0.0.1:PORT/_GET",
    "file:///proc/self/environ",
];

/// Takes connections on loopback, of both kinds, and counts them.
struct Home {
    port: u16,
    count: Arc<AtomicUsize>,
}

impl Home {
    async fn start() -> Self {
        let first = tokio::net::TcpListener::bind("0.0.0.0:0").await.unwrap();
        let port = first.local_addr().unwrap().port();
        let count = Arc::new(AtomicUsize::new(0));
        let second = tokio::net::TcpListener::bind((Ipv6Addr::LOCALHOST, port)).await;
        for listener in [Some(first), second.ok()].into_iter().flatten() {
            let count = count.clone();
            tokio::spawn(async move {
                while listener.accept().await.is_ok_and(|_| {
                    count.fetch_add(1, Ordering::SeqCst);
                    true
                }) {}
            });
        }
        Self { port, count }
    }

    fn connections(&self) -> usize {
        self.count.load(Ordering::SeqCst)
    }

    fn corpus(&self) -> Vec<String> {
        let literals = FORBIDDEN.into_iter().flat_map(notations);
        let mut urls: Vec<String> = literals.map(|host| format!("http://{host}:{}/score", self.port)).collect();
        urls.extend(OTHERS.iter().map(|url| url.replace("PORT", &self.port.to_string())));
        urls
    }
}

#[tokio::test]
async fn no_url_of_the_corpus_makes_a_connection() {
    let home = Home::start().await;
    let corpus = home.corpus();
    assert!(corpus.len() >= 200);
    let job = JobContext { job: JobId::new(), rollout: RolloutId::train(1), probe: true };
    let strict = OutgoingPolicy::default();
    let limits = json!({"timeout_ms": 2000, "deadline_ms": 2000, "max_tries": 1, "max_outage_s": 0});
    for url in &corpus {
        let Ok(rewards) = Rewards::build(&[plan("r", url, limits.clone())], &BTreeMap::new(), &strict) else {
            continue;
        };
        let scored = rewards.score(&job, &samples(1, 1)).await;
        let value = scored.ok().and_then(|scored| scored.scores[0].values[0].number());
        assert_eq!(value, None, "{url}");
        assert_eq!(home.connections(), 0, "{url}");
    }
    println!("{} URLs, {} connections", corpus.len(), home.connections());
}

/// The whole way, as a stranger with a key goes it: the real server, its own loopback forbidden.
#[tokio::test]
async fn no_url_of_the_corpus_passes_the_api() {
    let home = Home::start().await;
    let dir = tempfile::tempdir().unwrap();
    // Who trusts the environment sends everything to the proxy.
    let proxy = Home::start().await;
    let address = format!("http://127.0.0.1:{}", proxy.port);
    let variables = ["HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"];
    let mut variables: Vec<(&str, &str)> = variables.map(|name| (name, address.as_str())).to_vec();
    let key = "a-key-that-is-long-enough-for-everybody";
    variables.push(("RLOOD_API_KEY", key));
    let server = Server::start_in(dir.path(), "none", &variables);
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    let sample = json!([{"prompt": "a", "completion": "b"}]);
    let types = [
        json!({"type": "webhook"}),
        json!({"type": "openrlhf"}),
        json!({"type": "tei_predict"}),
        json!({"type": "http_template", "body": "{}", "pointer": "/score"}),
    ];
    for (number, url) in home.corpus().iter().enumerate() {
        let mut reward = types[number % types.len()].clone();
        reward["url"] = json!(url);
        let body = json!({"reward": reward, "samples": sample});
        let answer =
            http.post(format!("{}/rewards/test", server.url)).bearer_auth(key).json(&body).send().await.unwrap();
        let status = answer.status().as_u16();
        let text = answer.text().await.unwrap();
        let report: Value = serde_json::from_str(&text).unwrap();
        assert!(status == 422 || (status == 200 && report["ok"] == false), "{url}: {status} {text}");
        assert_eq!((home.connections(), proxy.connections()), (0, 0), "{url}");
    }
}

/// Answers of a name server that change with each question.
fn changing(answers: Vec<Vec<IpAddr>>) -> (Lookup, Arc<Mutex<Vec<String>>>) {
    let asked = Arc::new(Mutex::new(Vec::new()));
    let names = asked.clone();
    let lookup = move |name: String| {
        let mut names = names.lock().unwrap();
        let answer = answers[names.len().min(answers.len() - 1)].clone();
        names.push(name);
        async move { Ok::<_, std::io::Error>(answer.into_iter().map(|ip| SocketAddr::new(ip, 0)).collect()) }.boxed()
    };
    (Arc::new(lookup), asked)
}

/// Answers every request on this address, and closes; counts the requests.
async fn open_house(ip: Ipv4Addr, port: u16, answer: &'static str) -> (u16, Arc<AtomicUsize>) {
    let listener = tokio::net::TcpListener::bind((ip, port)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let count = Arc::new(AtomicUsize::new(0));
    let counted = count.clone();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            counted.fetch_add(1, Ordering::SeqCst);
            let _ = stream.read(&mut [0; 4096]).await;
            let _ = stream.write_all(answer.as_bytes()).await;
        }
    });
    (port, count)
}

const OK: &str = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}";

#[tokio::test]
async fn a_name_is_checked_at_every_connection_and_the_checked_address_is_the_one_called() {
    let (port, welcome) = open_house(Ipv4Addr::new(127, 0, 0, 2), 0, OK).await;
    let (_, secret) = open_house(Ipv4Addr::LOCALHOST, port, OK).await;
    let policy = OutgoingPolicy::parse(&["127.0.0.2"]).unwrap();
    let (good, bad): (IpAddr, IpAddr) = ([127, 0, 0, 2].into(), [127, 0, 0, 1].into());
    // The second question is answered with another address, the third with both.
    let (lookup, asked) = changing(vec![vec![good], vec![bad], vec![bad, good]]);
    let client = policy.client_builder_with(lookup).build().unwrap();
    let url = format!("http://rebinding.example:{port}/");
    assert!(client.get(&url).send().await.unwrap().status().is_success());
    let error = client.get(&url).send().await.unwrap_err();
    assert!(refusal(&error).is_some(), "{error:?}");
    assert!(client.get(&url).send().await.unwrap().status().is_success());
    assert_eq!(asked.lock().unwrap().len(), 3);
    assert_eq!((welcome.load(Ordering::SeqCst), secret.load(Ordering::SeqCst)), (2, 0));

    // Every forbidden address as the answer for an innocent name, also beside its IPv6 forms.
    let forbidden = FORBIDDEN.map(IpAddr::from).into_iter().filter(|ip| *ip != good);
    for ip in forbidden {
        let IpAddr::V4(v4) = ip else { continue };
        for address in [ip, IpAddr::V6(v4.to_ipv6_mapped()), IpAddr::V6(v4.to_ipv6_compatible())] {
            let (lookup, _) = changing(vec![vec![address]]);
            let client = policy.client_builder_with(lookup).build().unwrap();
            let error = client.get(&url).send().await.unwrap_err();
            assert!(refusal(&error).is_some(), "{address}: {error:?}");
        }
    }
    assert_eq!((welcome.load(Ordering::SeqCst), secret.load(Ordering::SeqCst)), (2, 0));
}

#[tokio::test]
async fn a_redirect_is_not_followed() {
    let (port, secret) = open_house(Ipv4Addr::LOCALHOST, 0, OK).await;
    let policy = OutgoingPolicy::parse(&["127.0.0.2"]).unwrap();
    for status in ["301 Moved", "302 Found", "303 See Other", "307 Temporary", "308 Permanent"] {
        let location = format!(
            "HTTP/1.1 {status}\r\nlocation: http://127.0.0.1:{port}/\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        );
        let (first, _) = open_house(Ipv4Addr::new(127, 0, 0, 2), 0, location.leak()).await;
        let url = format!("http://127.0.0.2:{first}/score");
        let answer = policy.client_builder().build().unwrap().get(&url).send().await.unwrap();
        assert!(answer.status().is_redirection());
        let rewards = Rewards::build(
            &[plan("r", &url, json!({"max_tries": 1, "max_invalid_tries": 1, "max_outage_s": 0, "deadline_ms": 2000}))],
            &BTreeMap::new(),
            &policy,
        )
        .unwrap();
        let job = JobContext { job: JobId::new(), rollout: RolloutId::train(1), probe: true };
        let scored = rewards.score(&job, &samples(1, 1)).await;
        assert!(scored.is_err() || scored.unwrap().scores[0].values[0].number().is_none(), "{status}");
    }
    assert_eq!(secret.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn the_operator_permits_blocks_and_names_and_nothing_beside_them() {
    let (port, house) = open_house(Ipv4Addr::new(127, 0, 0, 2), 0, OK).await;
    let (_, beside) = open_house(Ipv4Addr::new(127, 0, 0, 9), port, OK).await;
    let inside: IpAddr = [127, 0, 0, 2].into();
    let outside: IpAddr = [127, 0, 0, 9].into();
    for (list, name, address, reached) in [
        ("127.0.0.0/29", "any.example", inside, true),
        ("127.0.0.0/29", "any.example", outside, false),
        ("reward.internal", "reward.internal", inside, true),
        ("reward.internal", "Reward.Internal.", inside, true),
        ("reward.internal", "other.internal", inside, false),
        ("reward.internal", "x.reward.internal", inside, false),
        ("reward.internal", "reward.internal.evil.example", inside, false),
        ("10.0.0.0/8", "any.example", inside, false),
    ] {
        let before = (house.load(Ordering::SeqCst), beside.load(Ordering::SeqCst));
        let (lookup, _) = changing(vec![vec![address]]);
        let client = OutgoingPolicy::parse(&[list]).unwrap().client_builder_with(lookup).build().unwrap();
        let answer = client.get(format!("http://{name}:{port}/")).send().await;
        assert_eq!(answer.is_ok(), reached, "{list}: {name} at {address}: {answer:?}");
        let after = (house.load(Ordering::SeqCst), beside.load(Ordering::SeqCst));
        assert_eq!(after, (before.0 + usize::from(reached), before.1), "{list}: {name} at {address}");
    }
}
