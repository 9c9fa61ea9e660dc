//! Tests that the server connects to no forbidden address, whatever a job's author writes: over 200 URLs, with connections
//! counted at listeners that would accept them. Then tests of the addresses that the operator permits, by block and by name.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use futures::FutureExt;
use rlood_rewards::http_client::{Lookup, refusal, restricted_client_builder, restricted_client_builder_with};
use rlood_rewards::{JobContext, Rewards};
use rlood_types::id::JobId;
use rlood_types::outgoing::OutgoingPolicy;
use rlood_types::rollout::RolloutId;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::corpus::{FORBIDDEN, Home};
use crate::service::{plan, samples};

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

/// Answers of a name server that change with each query.
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

/// Answers every request on this address, closes the connection, and counts the requests.
async fn start_listener(ip: Ipv4Addr, port: u16, answer: &'static str) -> (u16, Arc<AtomicUsize>) {
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
    let (port, welcome) = start_listener(Ipv4Addr::new(127, 0, 0, 2), 0, OK).await;
    let (_, secret) = start_listener(Ipv4Addr::LOCALHOST, port, OK).await;
    let policy = OutgoingPolicy::parse(&["127.0.0.2"]).unwrap();
    let (good, bad): (IpAddr, IpAddr) = ([127, 0, 0, 2].into(), [127, 0, 0, 1].into());
    // The second query gets another address, the third gets both.
    let (lookup, asked) = changing(vec![vec![good], vec![bad], vec![bad, good]]);
    let client = restricted_client_builder_with(&policy, lookup).build().unwrap();
    let url = format!("http://rebinding.example:{port}/");
    assert!(client.get(&url).send().await.unwrap().status().is_success());
    let error = client.get(&url).send().await.unwrap_err();
    assert!(refusal(&error).is_some(), "{error:?}");
    assert!(client.get(&url).send().await.unwrap().status().is_success());
    assert_eq!(asked.lock().unwrap().len(), 3);
    assert_eq!((welcome.load(Ordering::SeqCst), secret.load(Ordering::SeqCst)), (2, 0));

    // Every forbidden address as the answer for a harmless name, also together with its IPv6 forms.
    let forbidden = FORBIDDEN.map(IpAddr::from).into_iter().filter(|ip| *ip != good);
    for ip in forbidden {
        let IpAddr::V4(v4) = ip else { continue };
        for address in [ip, IpAddr::V6(v4.to_ipv6_mapped()), IpAddr::V6(v4.to_ipv6_compatible())] {
            let (lookup, _) = changing(vec![vec![address]]);
            let client = restricted_client_builder_with(&policy, lookup).build().unwrap();
            let error = client.get(&url).send().await.unwrap_err();
            assert!(refusal(&error).is_some(), "{address}: {error:?}");
        }
    }
    assert_eq!((welcome.load(Ordering::SeqCst), secret.load(Ordering::SeqCst)), (2, 0));
}

#[tokio::test]
async fn a_redirect_is_not_followed() {
    let (port, secret) = start_listener(Ipv4Addr::LOCALHOST, 0, OK).await;
    let policy = OutgoingPolicy::parse(&["127.0.0.2"]).unwrap();
    for status in ["301 Moved", "302 Found", "303 See Other", "307 Temporary", "308 Permanent"] {
        let location = format!(
            "HTTP/1.1 {status}\r\nlocation: http://127.0.0.1:{port}/\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        );
        let (first, _) = start_listener(Ipv4Addr::new(127, 0, 0, 2), 0, location.leak()).await;
        let url = format!("http://127.0.0.2:{first}/score");
        let answer = restricted_client_builder(&policy).build().unwrap().get(&url).send().await.unwrap();
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
    let (port, connections) = start_listener(Ipv4Addr::new(127, 0, 0, 2), 0, OK).await;
    let (_, beside) = start_listener(Ipv4Addr::new(127, 0, 0, 9), port, OK).await;
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
        let before = (connections.load(Ordering::SeqCst), beside.load(Ordering::SeqCst));
        let (lookup, _) = changing(vec![vec![address]]);
        let client = restricted_client_builder_with(&OutgoingPolicy::parse(&[list]).unwrap(), lookup).build().unwrap();
        let answer = client.get(format!("http://{name}:{port}/")).send().await;
        assert_eq!(answer.is_ok(), reached, "{list}: {name} at {address}: {answer:?}");
        let after = (connections.load(Ordering::SeqCst), beside.load(Ordering::SeqCst));
        assert_eq!(after, (before.0 + usize::from(reached), before.1), "{list}: {name} at {address}");
    }
}
