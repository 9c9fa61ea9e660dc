//! Tests of the adapters, each with a small server that implements the system's published format and its pitfalls.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::http::Response;
use rlood_rewards::webhook::Webhook;
use rlood_rewards::{JobContext, Judged, Reward, RewardFailure, Rewards};
use rlood_types::event::Event;
use rlood_types::id::JobId;
use rlood_types::outgoing::OutgoingPolicy;
use rlood_types::rollout::{RewardSample, RewardValue, RolloutId};
use rlood_types::spec::{RewardPlan, RewardSecrets, read_single_reward};
use serde_json::{Value, json};

use crate::service::{Service, ok, samples, text};

/// Reads a reward as a job does; `url` is filled in.
pub fn reward(service: &Service, mut reward: Value) -> (RewardPlan, RewardSecrets) {
    if reward.get("url").is_none() {
        reward["url"] = json!(service.url());
    }
    read_single_reward(&json!({"reward": reward})).unwrap_or_else(|errors| panic!("{errors:?}"))
}

pub fn job() -> JobContext {
    JobContext { job: JobId::new(), rollout: RolloutId::train(3), probe: false }
}

pub fn loopback() -> OutgoingPolicy {
    OutgoingPolicy::parse(&["loopback"]).unwrap()
}

pub async fn judge(service: &Service, document: Value, samples: &[RewardSample]) -> Result<Judged, RewardFailure> {
    let (plan, secrets) = reward(service, document);
    Webhook::of_kind("r", &plan.kind, &secrets, &loopback()).unwrap().judge(&job(), samples).await
}

pub async fn numbers(service: &Service, document: Value, samples: &[RewardSample]) -> Vec<Option<f64>> {
    let judged = judge(service, document, samples).await.unwrap();
    judged.judgements.iter().map(|judgement| judgement.value.number()).collect()
}

/// Returns why the first sample has no value, without retries.
async fn problem(service: &Service, mut document: Value, samples: &[RewardSample]) -> String {
    document["max_invalid_tries"] = json!(1);
    let judged = judge(service, document, samples).await.unwrap();
    assert_eq!(judged.judgements[0].value, RewardValue::Missing, "never a number");
    judged.judgements[0].error.clone().unwrap().message
}

pub fn some(values: &[f64]) -> Vec<Option<f64>> {
    values.iter().copied().map(Some).collect()
}

/// Returns the number at the end of a text (`What?c7` → 7), which every test server uses as the score.
pub fn mark(text: &str) -> f64 {
    text.rsplit('c').next().and_then(|number| number.parse().ok()).unwrap_or_else(|| panic!("no mark in {text:?}"))
}

pub fn marks(texts: &Value) -> Vec<f64> {
    texts.as_array().unwrap().iter().map(|text| mark(text.as_str().unwrap())).collect()
}

pub fn bodies(service: &Service) -> Vec<Value> {
    service.seen.lock().unwrap().iter().map(|(_, body)| serde_json::from_slice(body).unwrap()).collect()
}

/// Checks that a body has only these fields. The system's validation would answer other fields with 422.
pub fn only(body: &Value, fields: &[&str]) {
    for key in body.as_object().unwrap().keys() {
        assert!(fields.contains(&key.as_str()), "{key} is not of this system");
    }
}

#[tokio::test]
async fn openrlhf_gets_parallel_lists_and_its_nested_rewards_scores_and_logs_are_read() {
    let service = Service::start(|_, body| {
        only(body, &["query", "prompts", "labels"]);
        let rewards = marks(&body["query"]);
        let count = rewards.len();
        assert_eq!(
            (body["prompts"].as_array().unwrap().len(), body["labels"].as_array().unwrap().len()),
            (count, count)
        );
        let nested: Vec<_> = rewards.iter().map(|reward| json!([reward])).collect();
        let scores: Vec<_> = rewards.iter().map(|reward| reward / 10.0).collect();
        ok(&json!({"rewards": nested, "scores": scores, "extra_logs": {"length": rewards, "odd": [1]}}))
    })
    .await;
    let document = json!({"type": "openrlhf", "label_column": "reference"});
    let judged = judge(&service, document, &samples(4, 2)).await.unwrap();
    let values: Vec<_> = judged.judgements.iter().map(|judgement| judgement.value.number()).collect();
    assert_eq!(values, some(&[0.0, 1.0, 2.0, 3.0]));
    assert_eq!(judged.judgements[3].metrics, *json!({"length": 3.0, "scores": 0.3}).as_object().unwrap());
    let sent = json!({"query": ["What?c0", "What?c1", "What?c2", "What?c3"], "prompts": ["What?", "What?", "What?", "What?"], "labels": [0, 1, 2, 3]});
    assert_eq!(bodies(&service), [sent]);
    // OpenRLHF's own workers send empty lists; these requests do not.
    assert!(judge(&service, json!({"type": "openrlhf"}), &[]).await.unwrap().judgements.is_empty());
    assert_eq!(bodies(&service).len(), 1);
    numbers(&service, json!({"type": "openrlhf"}), &samples(1, 1)).await;
    assert_eq!(bodies(&service)[1]["labels"], json!([""]));
    let (headers, _) = service.seen.lock().unwrap()[0].clone();
    assert!(headers.get("webhook-signature").is_none() && headers.get("webhook-id").is_none());
    assert!(headers["idempotency-key"].to_str().unwrap().starts_with("rwr_"));
}

#[tokio::test]
async fn openrlhfs_one_row_of_rewards_and_wrong_lengths() {
    let row = Service::start(|_, body| ok(&json!({"rewards": [marks(&body["query"])]}))).await;
    assert_eq!(numbers(&row, json!({"type": "openrlhf"}), &samples(3, 3)).await, some(&[0.0, 1.0, 2.0]));
    let short = Service::start(|_, _| ok(&json!({"rewards": [1.0]}))).await;
    assert!(problem(&short, json!({"type": "openrlhf"}), &samples(2, 2)).await.contains("1 scores for 2 samples"));
    let nan = Service::start(|_, _| text(200, r#"{"rewards": [NaN]}"#)).await;
    assert!(problem(&nan, json!({"type": "openrlhf"}), &samples(1, 1)).await.contains("not a finite number"));
    let null = Service::start(|_, _| ok(&json!({"rewards": [null]}))).await;
    assert!(problem(&null, json!({"type": "openrlhf"}), &samples(1, 1)).await.contains("null"));
}

#[tokio::test]
async fn slime_gets_one_sample_a_request_and_answers_a_number_or_an_object() {
    let service = Service::start(|_, body| {
        only(body, &["prompt", "response", "label"]);
        text(200, mark(body["response"].as_str().unwrap()).to_string())
    })
    .await;
    let document = json!({"type": "slime", "label_column": "reference", "max_concurrency": 2});
    assert_eq!(numbers(&service, document, &samples(4, 4)).await, some(&[0.0, 1.0, 2.0, 3.0]));
    let mut sent = bodies(&service);
    sent.sort_by_key(|body| body["label"].as_i64());
    assert_eq!(sent[2], json!({"prompt": "What?", "response": "c2", "label": 2}));
    let keyed = Service::start(|_, _| ok(&json!({"acc": 1, "score": 0.5}))).await;
    assert_eq!(numbers(&keyed, json!({"type": "slime", "reward_key": "score"}), &samples(1, 1)).await, some(&[0.5]));
    let unknown = problem(&keyed, json!({"type": "slime"}), &samples(1, 1)).await;
    assert!(unknown.contains("acc, score") && unknown.contains("reward_key"), "{unknown}");
}

#[tokio::test]
async fn llamafactory_scores_messages() {
    let service = Service::start(|_, body| {
        only(body, &["model", "messages"]);
        assert!(body["model"].is_string(), "the field is required");
        ok(&json!({"id": "scoreeval-1", "object": "score.evaluation", "model": body["model"], "scores": marks(&body["messages"])}))
    })
    .await;
    assert_eq!(numbers(&service, json!({"type": "llamafactory"}), &samples(3, 3)).await, some(&[0.0, 1.0, 2.0]));
}

/// Implements text-embeddings-inference: a flat list of two texts is a pair, an empty list is a 400, too many texts are a 413,
/// and labels are sorted by score.
fn tei_predict(limit: usize) -> impl Fn(usize, &Value) -> Response<Body> + Send + Sync + 'static {
    move |_, body| {
        let inputs = body["inputs"].as_array().unwrap();
        if inputs.is_empty() {
            return text(400, json!({"error": "`inputs` cannot be empty", "error_type": "Empty"}).to_string());
        }
        if inputs.len() > limit {
            let error = format!("batch size {} > maximum allowed batch size {limit}", inputs.len());
            return text(413, json!({"error": error, "error_type": "Validation"}).to_string());
        }
        assert_eq!((&body["raw_scores"], &body["truncation_direction"]), (&json!(true), &json!("Left")));
        if inputs.iter().all(Value::is_string) {
            // A pair or a single text gets one list of labels.
            return ok(&json!([{"label": "LABEL_0", "score": -99.0}]));
        }
        let predict = |input: &Value| {
            assert_eq!(input.as_array().unwrap().len(), 1, "two texts would be a pair");
            let score = mark(input[0].as_str().unwrap());
            let mut labels = [("good", score), ("bad", 1.5), ("LABEL_2", -1.0)];
            labels.sort_by(|a, b| b.1.total_cmp(&a.1));
            labels.map(|(label, score)| json!({"label": label, "score": score}))
        };
        ok(&inputs.iter().map(|input| predict(input).to_vec()).collect::<Vec<_>>().into())
    }
}

#[tokio::test]
async fn tei_predict_takes_the_labels_score_wherever_it_is_sorted_to() {
    let service = Service::start(tei_predict(32)).await;
    let with = |label: Value| json!({"type": "tei_predict", "label": label});
    // A flat list of two samples would be one pair.
    assert_eq!(numbers(&service, with(json!("good")), &samples(2, 2)).await, some(&[0.0, 1.0]));
    assert_eq!(numbers(&service, with(json!("bad")), &samples(3, 3)).await, some(&[1.5, 1.5, 1.5]));
    assert_eq!(numbers(&service, with(json!(2)), &samples(1, 1)).await, some(&[-1.0]), "LABEL_2");
    let judged = judge(&service, with(json!("good")), &samples(1, 1)).await.unwrap();
    assert_eq!(judged.judgements[0].metrics, *json!({"bad": 1.5, "LABEL_2": -1.0}).as_object().unwrap());
    assert!(problem(&service, with(json!("fine")), &samples(1, 1)).await.contains("bad, good, LABEL_2"));
    assert!(problem(&service, with(json!(null)), &samples(1, 1)).await.contains("set 'label'"));
}

#[tokio::test]
async fn a_batch_too_large_for_tei_is_split_and_its_backend_errors_and_overload_are_retried() {
    let service = Service::start(tei_predict(2)).await;
    let document = json!({"type": "tei_predict", "label": "good"});
    let expected = some(&[0.0, 1.0, 2.0, 3.0, 4.0]);
    assert_eq!(numbers(&service, document.clone(), &samples(5, 5)).await, expected);
    let whole = tei_predict(32);
    let shaky = Service::start(move |count, body| match count {
        0 => text(424, json!({"error": "Inference error", "error_type": "Backend"}).to_string()),
        1 => text(429, json!({"error": "Model is overloaded", "error_type": "Overloaded"}).to_string()),
        _ => whole(count, body),
    })
    .await;
    assert_eq!(numbers(&shaky, document, &samples(5, 5)).await, expected);
    let seen = shaky.seen.lock().unwrap();
    assert!(seen.len() == 3 && seen.iter().all(|(_, body)| *body == seen[0].1));
}

#[tokio::test]
async fn teis_info_contains_the_maximum_batch_size() {
    let app = axum::Router::new().route(
        "/info",
        axum::routing::get(|| async { axum::Json(json!({"model_id": "rm", "max_client_batch_size": 4})) }),
    );
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let server = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
    let document = json!({"reward": {"type": "tei_predict", "url": url, "label": "good"}});
    let (plan, secrets) = read_single_reward(&document).unwrap();
    assert_eq!(plan.kind.service().unwrap().url, format!("{url}/predict"), "the path is theirs");
    let ping = Webhook::of_kind("r", &plan.kind, &secrets, &loopback()).unwrap().check_health().await.unwrap();
    assert_eq!((ping.ok, ping.reply.unwrap().max_batch_samples), (true, Some(4)));
    server.abort();
}

#[tokio::test]
async fn tei_rerank_asks_prompt_by_prompt_and_reads_by_index() {
    let service = Service::start(|_, body| {
        only(body, &["query", "texts", "raw_scores", "truncate"]);
        if body["texts"].as_array().unwrap().is_empty() {
            return text(400, json!({"error": "`texts` cannot be empty", "error_type": "Empty"}).to_string());
        }
        let weight = if body["query"] == "Else?" { 100.0 } else { 1.0 };
        let mut ranks: Vec<_> = marks(&body["texts"]).into_iter().enumerate().collect();
        ranks.sort_by(|a, b| b.1.total_cmp(&a.1));
        ok(&ranks
            .into_iter()
            .map(|(index, score)| json!({"index": index, "score": score * weight}))
            .collect::<Vec<_>>()
            .into())
    })
    .await;
    let mut samples = samples(5, 2);
    for sample in &mut samples[2..4] {
        sample.messages = Some(json!([{"role": "user", "content": "Else?"}]));
        sample.prompt = "<user>Else?".into();
    }
    let document = json!({"type": "tei_rerank"});
    assert_eq!(numbers(&service, document, &samples).await, some(&[0.0, 1.0, 200.0, 300.0, 4.0]));
    let mut queries: Vec<_> =
        bodies(&service).iter().map(|body| (body["query"].clone(), body["texts"].clone())).collect();
    queries.sort_by_key(|(_, texts)| texts.to_string());
    assert_eq!(
        queries,
        [(json!("What?"), json!(["c0", "c1"])), (json!("Else?"), json!(["c2", "c3"])), (json!("What?"), json!(["c4"]))]
    );
    for (ranks, complaint) in [
        (json!([{"index": 0, "score": 1.0}, {"index": 0, "score": 2.0}]), "index 0 twice"),
        (json!([{"index": 0, "score": 1.0}, {"index": 7, "score": 2.0}]), "the index 7, but only 2"),
        (json!([{"score": 1.0}, {"index": 1, "score": 2.0}]), "no 'index'"),
    ] {
        let wrong = Service::start(move |_, _| ok(&ranks)).await;
        let found = problem(&wrong, json!({"type": "tei_rerank"}), &crate::service::samples(2, 2)).await;
        assert!(found.contains(complaint), "{found}");
    }
}

/// Implements vLLM's classify with one label: unless the activation is disabled by the name that this version
/// knows, every score is 1.0.
fn vllm_classify(switch: &'static str) -> impl Fn(usize, &Value) -> Response<Body> + Send + Sync + 'static {
    move |_, body| {
        let raw = body.get(switch) == Some(&json!(false));
        assert_eq!(body["add_special_tokens"], false);
        let entry = |(index, score): (usize, f64)| {
            let probs = [if raw { score } else { 1.0 }];
            json!({"index": index, "label": "LABEL_0", "probs": probs, "num_classes": 1})
        };
        let mut data: Vec<_> = marks(&body["input"]).into_iter().enumerate().map(entry).collect();
        data.reverse();
        ok(
            &json!({"id": "classify-1", "object": "list", "created": 1, "model": body["model"], "data": data, "usage": {}}),
        )
    }
}

#[tokio::test]
async fn vllm_classify_disables_the_activation_and_reports_a_server_that_ignores_that() {
    let document = |extra: Value| json!({"type": "vllm_classify", "model": "rm", "extra_body": extra});
    let new = Service::start(vllm_classify("use_activation")).await;
    assert_eq!(numbers(&new, document(json!({})), &samples(3, 3)).await, some(&[0.0, 1.0, 2.0]));
    assert_eq!(bodies(&new)[0]["model"], "rm");
    let old = Service::start(vllm_classify("activation")).await;
    let (plan, secrets) = reward(&old, document(json!({})));
    let secrets = BTreeMap::from([(plan.name.clone(), secrets)]);
    let rewards = Rewards::build(&[plan], &secrets, &loopback()).unwrap();
    let mut notices = rewards.notices().unwrap();
    for _ in 0..2 {
        let scored = rewards.score(&job(), &samples(3, 3)).await.unwrap();
        assert_eq!(scored.scores[2].values, [RewardValue::Number(1.0)]);
    }
    let Ok(Event::Warning { code, message, .. }) = notices.try_recv() else { panic!("a warning") };
    assert!(
        code == "reward_remark" && message.contains("softmax") && message.contains("\"activation\": false"),
        "{message}"
    );
    assert!(notices.try_recv().is_err(), "it is told once");
    assert_eq!(numbers(&old, document(json!({"activation": false})), &samples(3, 3)).await, some(&[0.0, 1.0, 2.0]));
}

#[tokio::test]
async fn vllm_classify_of_several_labels_needs_a_number() {
    let service = Service::start(|_, _| {
        ok(&json!({"data": [{"index": 0, "label": "neg", "probs": [-2.5, 3.5], "num_classes": 2}]}))
    })
    .await;
    let with = |label: Value| json!({"type": "vllm_classify", "label": label});
    assert_eq!(numbers(&service, with(json!(1)), &samples(1, 1)).await, some(&[3.5]));
    assert!(problem(&service, with(json!(null)), &samples(1, 1)).await.contains("2 labels"));
    assert!(problem(&service, with(json!(2)), &samples(1, 1)).await.contains("no label number 2"));
    let errors = read_single_reward(&json!({"reward": {"type": "vllm_classify", "url": "http://x/", "label": "neg"}}));
    assert!(errors.unwrap_err()[0].detail.contains("given by its number"));
}

#[tokio::test]
async fn vllm_score_and_pooling_are_read_by_index() {
    let scores = Service::start(|_, body| {
        only(body, &["model", "text_1", "text_2"]);
        assert_eq!(body["text_1"].as_array().unwrap().len(), body["text_2"].as_array().unwrap().len());
        let entry = |(index, score)| json!({"index": index, "object": "score", "score": score});
        let mut data: Vec<_> = marks(&body["text_2"]).into_iter().enumerate().map(entry).collect();
        data.reverse();
        ok(&json!({"object": "list", "data": data}))
    })
    .await;
    assert_eq!(
        numbers(&scores, json!({"type": "vllm_score", "model": "m"}), &samples(3, 3)).await,
        some(&[0.0, 1.0, 2.0])
    );
    assert_eq!(bodies(&scores)[0]["text_1"], json!(["What?", "What?", "What?"]));
    let pooling = Service::start(|_, body| {
        let per_token = body["task"] == "token_classify";
        let entry = |(index, score)| {
            let data = if per_token { json!([[0.1], [0.2], [score]]) } else { json!([score]) };
            json!({"index": index, "object": "pooling", "data": data})
        };
        let mut data: Vec<_> = marks(&body["input"]).into_iter().enumerate().map(entry).collect();
        data.reverse();
        ok(&json!({"object": "list", "data": data}))
    })
    .await;
    for task in [json!(null), json!("token_classify")] {
        let document = json!({"type": "vllm_pooling", "task": task});
        assert_eq!(numbers(&pooling, document, &samples(3, 3)).await, some(&[0.0, 1.0, 2.0]));
    }
    let empty = Service::start(|_, _| ok(&json!({"data": [{"index": 0, "data": []}]}))).await;
    assert!(problem(&empty, json!({"type": "vllm_pooling"}), &samples(1, 1)).await.contains("empty"));
}

#[tokio::test]
async fn sglang_classify_gets_the_text_as_its_own_template_makes_it() {
    let service = Service::start(|_, body| {
        only(body, &["model", "text"]);
        let data: Vec<_> = body["text"]
            .as_array()
            .unwrap()
            .iter()
            .map(|text| {
                let text = text.as_str().unwrap();
                assert!(text.starts_with("<|user|>What?<|assistant|>c"), "{text}");
                json!({"embedding": [mark(text.trim_end_matches("<|end|>"))], "meta_info": {"prompt_tokens": 5}})
            })
            .collect();
        ok(&data.into())
    })
    .await;
    let template = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}<|end|>";
    let document = json!({"type": "sglang_classify", "model": "rm", "template": template});
    assert_eq!(numbers(&service, document, &samples(3, 3)).await, some(&[0.0, 1.0, 2.0]));
}

#[tokio::test]
async fn hugging_faces_503_while_it_loads_is_waited_for_as_it_says() {
    let service = Service::start(|count, body| {
        only(body, &["inputs", "parameters"]);
        assert_eq!(body["parameters"], json!({"function_to_apply": "none", "top_k": null}));
        match count {
            0 => text(503, json!({"error": "Model rm is currently loading", "estimated_time": 1.2}).to_string()),
            1 => Response::builder().status(503).header("retry-after", "1").body(Body::empty()).unwrap(),
            _ => {
                let labels = |score| json!([{"label": "LABEL_1", "score": 3.0}, {"label": "LABEL_0", "score": score}]);
                ok(&marks(&body["inputs"]).into_iter().map(labels).collect::<Vec<_>>().into())
            }
        }
    })
    .await;
    let start = Instant::now();
    let document = json!({"type": "hf_text_classification", "label": "LABEL_0"});
    assert_eq!(numbers(&service, document.clone(), &samples(2, 2)).await, some(&[0.0, 1.0]));
    assert!(
        start.elapsed() >= Duration::from_millis(2_200),
        "neither time to wait was honoured: {:?}",
        start.elapsed()
    );
    assert_eq!(numbers(&service, document, &samples(1, 1)).await, some(&[0.0]));
}

#[tokio::test]
async fn hugging_faces_flat_answers_are_read_too() {
    let one = Service::start(|_, _| ok(&json!([{"label": "b", "score": 2.0}, {"label": "a", "score": 1.0}]))).await;
    let document = json!({"type": "hf_text_classification", "label": "a"});
    assert_eq!(numbers(&one, document.clone(), &samples(1, 1)).await, some(&[1.0]));
    // The server returns only the best label of each text. If that is not the wanted one, the sample has no value.
    let best = Service::start(|_, body| {
        let label = |score: &f64| json!({"label": if *score > 0.0 { "a" } else { "b" }, "score": score});
        ok(&marks(&body["inputs"]).iter().map(label).collect::<Vec<_>>().into())
    })
    .await;
    let mut document = document;
    document["max_invalid_tries"] = json!(1);
    assert_eq!(numbers(&best, document, &samples(2, 2)).await, [None, Some(1.0)]);
}

#[test]
fn what_an_adapter_cannot_be_is_refused_with_the_reason() {
    for (reward, pointer, words) in [
        (json!({"type": "openrlhf"}), "/reward/url", "give the http"),
        (
            json!({"type": "slime", "url": "http://x/", "max_batch_samples": 4}),
            "/reward/max_batch_samples",
            "one sample per request",
        ),
        (json!({"type": "tei_predict", "url": "http://x/", "template": "{{ a"}), "/reward/template", "not valid"),
        (json!({"type": "tei_predict", "url": "http://x/", "secret": "whsec_x"}), "/reward/secret", "unknown field"),
        (json!({"type": "openai_judge", "url": "http://x/", "rubric": "r"}), "/reward/model", "name the model"),
        (json!({"type": "openai_judge", "url": "http://x/", "model": "m"}), "/reward/rubric", "should consider"),
        (
            json!({"type": "openai_judge", "url": "http://x/", "model": "m", "rubric": "r", "min_score": 5, "max_score": 5}),
            "/reward/max_score",
            "greater than min_score",
        ),
        (
            json!({"type": "http_template", "url": "http://x/", "body": {}, "pointer": "score"}),
            "/reward/pointer",
            "must begin with '/'",
        ),
        (
            json!({"type": "http_template", "url": "http://x/", "body": {}, "pointer": "/a", "batch": true}),
            "/reward/pointer",
            "'*'",
        ),
        (
            json!({"type": "http_template", "url": "http://x/", "body": {"a": ["{% if %}"]}, "pointer": "/a"}),
            "/reward/body",
            "/a/0",
        ),
    ] {
        let errors = read_single_reward(&json!({"reward": reward})).unwrap_err();
        assert!(
            errors.iter().any(|error| error.pointer == pointer && error.detail.contains(words)),
            "{reward}: {errors:?}"
        );
    }
}

#[test]
fn a_resolved_reward_can_be_submitted_again() {
    for reward in [
        json!({"type": "openrlhf", "url": "http://x", "label_column": "a"}),
        json!({"type": "slime", "url": "http://x/rm"}),
        json!({"type": "hf_text_classification", "url": "http://x", "label": 1}),
        json!({"type": "vllm_pooling", "url": "http://x"}),
        json!({"type": "openai_judge", "url": "http://x/v1", "model": "m", "rubric": "r", "votes": 3}),
        json!({"type": "http_template", "url": "http://x", "body": {"a": "{{ prompt }}"}, "pointer": "/a"}),
        json!({"type": "length", "unit": "tokens", "min_tokens": 1, "max_tokens": 9, "soft_margin": 2}),
        json!({"type": "json_schema", "schema": {"type": "object"}}),
        json!({"type": "format", "tags": ["a"], "partial": true}),
        json!({"type": "multi", "graders": {"a": {"type": "length"}}, "calculate_output": "a / 2"}),
    ] {
        let (plan, _) = read_single_reward(&json!({"reward": reward})).unwrap();
        let resolved = serde_json::to_value(&plan).unwrap();
        let (again, _) =
            read_single_reward(&json!({"reward": resolved})).unwrap_or_else(|e| panic!("{resolved}: {e:?}"));
        assert_eq!(again, plan);
        assert_eq!(serde_json::from_value::<RewardPlan>(resolved).unwrap(), plan, "as it is stored");
    }
}
