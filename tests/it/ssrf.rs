//! Addresses that a job's author writes must not make the server connect to forbidden targets: every URL of the corpus of
//! `crates/rewards`, through the API, without a single connection.

use serde_json::{Value, json};

use crate::corpus::Home;
use crate::processes::Server;

/// The complete path of a client with a key: the real server, with its own loopback forbidden.
#[tokio::test]
async fn no_url_of_the_corpus_passes_the_api() {
    let home = Home::start().await;
    let dir = tempfile::tempdir().unwrap();
    // A client that used the proxy variables would send everything to the proxy.
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
