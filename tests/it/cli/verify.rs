//! `rlood verify` against folders, and against servers that compute with the engine in this process.

use std::path::Path;
use std::sync::{Arc, Mutex};

use axum::routing::post;
use axum::{Json, Router};
use rlood::engine::backend::BackendKind;
use rlood::engine::model::{Adapter, Policy};
use rlood::engine::text::Text;
use rlood_types::certificate::Certificate;
use rlood_types::spec::ComputeDtype;
use serde_json::{Value, json};
use tokio::net::TcpListener;

use super::{Done, User, named, start};
use crate::processes::Server;

/// How a server that is asked gives log-probabilities.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Manner {
    Vllm,
    Echo,
    LlamaCpp,
    /// Takes texts alone, and says only how many tokens they have.
    Texts,
}

/// A model behind an API.
struct Served {
    policy: Policy,
    text: Text,
    adapter: Adapter,
    manner: Manner,
    /// The text that the server puts before every text: a tokenizer with other rules.
    before: &'static str,
}

impl Served {
    fn logps(&self, ids: &[u32]) -> Vec<Vec<f32>> {
        let positions: Vec<usize> = (0..ids.len()).collect();
        let rows = self.policy.logits(ids, &positions, self.adapter).unwrap();
        let log_softmax = |row: Vec<f32>| {
            let most = row.iter().copied().fold(f32::MIN, f32::max);
            let total = row.iter().map(|logit| f64::from(logit - most).exp()).sum::<f64>().ln() as f32 + most;
            row.into_iter().map(|logit| logit - total).collect()
        };
        rows.into_iter().map(log_softmax).collect()
    }

    fn encode(&self, text: &str) -> Vec<u32> {
        self.text.encode(&format!("{}{text}", self.before), true).unwrap()
    }

    fn tokenize(&self, body: &Value) -> Value {
        match self.manner {
            Manner::Texts => json!({"detail": "there is no such route"}),
            _ => json!({"tokens": self.encode(body["prompt"].as_str().unwrap())}),
        }
    }

    fn complete(&self, body: &Value) -> Value {
        let ids: Vec<u32> = match &body["prompt"] {
            Value::String(text) => self.encode(text),
            _ if self.manner == Manner::Texts => return json!({"error": {"message": "prompt must be a text"}}),
            ids => serde_json::from_value(ids.clone()).unwrap(),
        };
        let rows = self.logps(&ids);
        let of_prompt: Vec<Value> = std::iter::once(Value::Null)
            .chain(rows.iter().zip(&ids[1..]).map(|(row, id)| json!(row[*id as usize])))
            .collect();
        let mut all = ids.clone();
        let (mut new, mut new_logps, mut top) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..body["max_tokens"].as_u64().unwrap() {
            let mut row = self.logps(&all).pop().unwrap();
            let known = row.clone();
            for (id, bias) in body["logit_bias"].as_object().into_iter().flatten() {
                row[id.parse::<usize>().unwrap()] += bias.as_f64().unwrap() as f32;
            }
            let best = (0..row.len()).max_by(|one, other| row[*one].total_cmp(&row[*other])).unwrap();
            new.push(best as u32);
            new_logps.push(known[best]);
            let mut order: Vec<usize> = (0..known.len()).collect();
            order.sort_by(|one, other| known[*other].total_cmp(&known[*one]));
            let named = order
                .iter()
                .take(20)
                .rev()
                .map(|id| (self.text.decode(&[*id as u32], false).unwrap(), json!(known[*id])));
            top.push(Value::Object(named.collect()));
            all.push(best as u32);
        }
        let logprobs = match self.manner {
            Manner::Echo if body["echo"] == true => {
                let all: Vec<Value> =
                    of_prompt.iter().cloned().chain(new_logps.iter().map(|logp| json!(logp))).collect();
                json!({"token_logprobs": all})
            }
            Manner::LlamaCpp => json!({"content": [{"id": new[0], "logprob": new_logps[0], "top_logprobs": []}]}),
            Manner::Texts => {
                let texts: Vec<String> = new.iter().map(|id| self.text.decode(&[*id], false).unwrap()).collect();
                json!({"tokens": texts, "token_logprobs": new_logps, "top_logprobs": top})
            }
            Manner::Vllm | Manner::Echo => Value::Null,
        };
        let mut choice = json!({"index": 0, "logprobs": logprobs});
        if self.manner == Manner::Vllm && body["prompt_logprobs"].is_number() {
            let entries = of_prompt.iter().zip(&ids).map(|(logp, id)| match logp {
                Value::Null => Value::Null,
                logp => json!({id.to_string(): {"logprob": logp}}),
            });
            choice["prompt_logprobs"] = entries.collect();
        }
        json!({"choices": [choice], "usage": {"prompt_tokens": ids.len()}})
    }
}

/// Serves a model; returns the address of its API.
async fn serve(served: Served) -> String {
    let served = Arc::new(Mutex::new(served));
    let of = |answer: fn(&Served, &Value) -> Value| {
        let served = served.clone();
        post(async move |Json(body): Json<Value>| {
            let answer = answer(&served.lock().unwrap(), &body);
            let status = if answer["error"].is_null() && answer["detail"].is_null() { 200 } else { 400 };
            (axum::http::StatusCode::from_u16(status).unwrap(), Json(answer))
        })
    };
    let router = Router::new().route("/v1/completions", of(Served::complete)).route("/tokenize", of(Served::tokenize));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/v1", listener.local_addr().unwrap());
    tokio::spawn(async { axum::serve(listener, router).await.unwrap() });
    url
}

fn load(user: &User, adapter_dir: Option<&Path>, manner: Manner) -> Served {
    let dir = user.path("model");
    let mut policy = Policy::load_dtype(&dir, BackendKind::Cpu, ComputeDtype::F32).unwrap();
    if let Some(adapter_dir) = adapter_dir {
        policy.load_lora(adapter_dir).unwrap();
    }
    Served { policy, text: Text::load(&dir).unwrap(), adapter: Adapter::On, manner, before: "" }
}

/// A job of some steps, and its adapter in the folder `adapter`. Returns the job's id.
async fn trained(server: &Server, user: &User) -> String {
    let mut job = named("sums", 6);
    // About half of what random weights say has such a letter: groups are not tied.
    job["rewards"] = json!([{"type": "regex", "pattern": "[a-m]"}]);
    job["rloo"]["num_generations"] = json!(4);
    job["optimizer"]["learning_rate"] = json!(1e-3);
    job["sampling"] = json!({"max_completion_length": 6, "temperature": 0.8});
    let id = user.submit(&job);
    server.job_in_state(&id, "succeeded").await;
    user.run(&["pull", &format!("{id}@last"), "-o", "adapter"]).ok();
    id
}

async fn verify(user: &User, arguments: &[&str]) -> Done {
    let (variables, dir) = (user.variables.clone(), user.path(""));
    let arguments: Vec<String> = arguments.iter().map(|argument| (*argument).to_owned()).collect();
    let run = move || {
        let mut command = std::process::Command::new(crate::processes::binary());
        command.args(arguments).current_dir(dir).envs(variables);
        let output = command.output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        Done { code: output.status.code().unwrap_or(-1), out: text(output.stdout), err: text(output.stderr) }
    };
    tokio::task::spawn_blocking(run).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn folders_are_checked_by_the_certificate_of_a_checkpoint() {
    let (server, user) = start("cpu");
    let id = trained(&server, &user).await;
    let checkpoints = server.get(&format!("/jobs/{id}/checkpoints")).await["data"].as_array().unwrap().clone();
    let newest = checkpoints[0]["id"].as_str().unwrap();
    let model = user.path("model");
    let model = model.to_str().unwrap();
    let last = format!("{id}@last");

    let equal = verify(&user, &["verify", &last, "--model-dir", model, "--adapter", "adapter"]).await;
    assert!(equal.err.contains(newest) && equal.out.starts_with("equal: "), "{equal:?}");
    assert_eq!(equal.code, 0);
    let base = verify(&user, &["verify", &last, "--model-dir", model]).await;
    assert!(base.code == 20 && base.out.starts_with("base model: "), "{base:?}");
    user.run(&["export", &last, "--merged", "--dtype", "float32", "-o", "merged"]).ok();
    // By the file alone, which also comes with the merged model, and without a server.
    let offline =
        User { variables: vec![("RLOOD_SERVER".to_owned(), "http://127.0.0.1:9".to_owned())], ..User::of("") };
    let certificate = user.path("merged/certificate.json");
    let certificate = certificate.to_str().unwrap();
    let merged = user.path("merged");
    let merged = merged.to_str().unwrap();
    let found = verify(&offline, &["verify", "--certificate", certificate, "--model-dir", merged, "--json"]).await;
    assert_eq!(found.code, 0, "{found:?}");
    let document: Value = serde_json::from_str(&found.out).unwrap();
    assert_eq!((&document["comparison"]["finding"], &document["asked"]), (&json!("equal"), &json!("files")));
    let adapter = user.path("adapter");
    let twice = ["verify", "--certificate", certificate, "--model-dir", merged, "--adapter", adapter.to_str().unwrap()];
    assert_eq!(verify(&offline, &twice).await.code, 21);
    user.write("broken.json", "{}");
    let broken = verify(&user, &["verify", "--certificate", "broken.json", "--model-dir", model]).await;
    broken.failed(2, "not a certificate");
    verify(&user, &["verify", "--certificate", "adapter/certificate.json"]).await.failed(2, "--model");

    let served = server.get(&format!("/checkpoints/{newest}/certificate")).await;
    let file: Value = serde_json::from_slice(&std::fs::read(user.path("adapter/certificate.json")).unwrap()).unwrap();
    assert_eq!(served, file);
}

#[tokio::test(flavor = "multi_thread")]
async fn servers_of_every_manner_are_told_from_those_with_a_fault() {
    let (server, user) = start("cpu");
    trained(&server, &user).await;
    let adapter = user.path("adapter");
    let certificate = Certificate::read(&std::fs::read(adapter.join("certificate.json")).unwrap()).unwrap();
    assert!(certificate.effect.rms_nats > 1e-3, "{:?}", certificate.effect);
    let ask = async |served: Served, asked: &str, code: i32| {
        let what = format!("{:?} {code}", served.manner);
        let url = serve(served).await;
        let flags = ["verify", "--certificate", "adapter/certificate.json", "--model", "m", "--json", "--url", &url];
        let found = verify(&user, &flags).await;
        assert_eq!(found.code, code, "{what}: {found:?}");
        let document: Value = serde_json::from_str(&found.out).unwrap();
        assert_eq!(document["asked"], asked, "{what}: {document}");
        assert_eq!(document["is_tokenizer_checked"], true);
        document
    };
    let manners = [
        (Manner::Vllm, "prompt_logprobs"),
        (Manner::Echo, "echo"),
        (Manner::LlamaCpp, "forced_tokens"),
        (Manner::Texts, "sampled_tokens"),
    ];
    for (manner, asked) in manners {
        ask(load(&user, Some(&adapter), manner), asked, 0).await;
        ask(load(&user, None, manner), asked, 20).await;
        let other = Served { before: "¿", ..load(&user, Some(&adapter), manner) };
        ask(other, asked, 23).await;
    }
    for (factor, code) in [(2.0, 21), (0.5, 22)] {
        let mut served = load(&user, Some(&adapter), Manner::Vllm);
        // B alone is multiplied, which scales the product.
        let mut values = served.policy.parameter_values().unwrap();
        for parameter in served.policy.parameters().into_iter().filter(|parameter| parameter.name.contains("lora_B")) {
            let length: usize = parameter.shape.iter().product();
            values[parameter.offset..parameter.offset + length].iter_mut().for_each(|value| *value *= factor);
        }
        served.policy.set_parameter_values(&values).unwrap();
        ask(served, "prompt_logprobs", code).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_without_log_probabilities_is_said_to_have_none() {
    let (server, user) = start("cpu");
    trained(&server, &user).await;
    let nothing = Router::new().route("/v1/completions", post(async || Json(json!({"choices": [{"text": "hello"}]}))));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/v1", listener.local_addr().unwrap());
    tokio::spawn(async { axum::serve(listener, nothing).await.unwrap() });
    let flags = ["verify", "--certificate", "adapter/certificate.json", "--model", "m", "--url"];
    verify(&user, &[&flags[..], &[&url]].concat()).await.failed(1, "gives no log-probabilities");
    verify(&user, &[&flags[..], &["http://127.0.0.1:9/v1"]].concat()).await.failed(5, "");
}
