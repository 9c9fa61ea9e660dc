//! `/v1`: the OpenAI API over HTTP with real processes. Other clients are in `tests/serving`.

use std::path::Path;

use futures::StreamExt;
use rlood::engine::backend::BackendKind;
use rlood::engine::model::{Adapter, Policy, Trajectory};
use rlood::engine::text::Text;
use rlood_types::trajectory::Segments;
use serde_json::{Value, json};

use crate::processes::{Server, model_copy, register, trained};

const PROMPT: &str = "Say the number 7 in a few words.";

async fn post(server: &Server, path: &str, body: &Value) -> reqwest::Response {
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    http.post(format!("{}{path}", server.url)).json(body).send().await.unwrap()
}

async fn asked(server: &Server, path: &str, body: Value) -> Value {
    let answer = post(server, path, &body).await;
    let status = answer.status();
    let text = answer.text().await.unwrap();
    assert!(status.is_success(), "{status} {text}");
    serde_json::from_str(&text).unwrap()
}

/// The data lines of a stream, without `data: `.
async fn streamed(server: &Server, path: &str, body: Value) -> Vec<String> {
    let answer = post(server, path, &body).await;
    assert_eq!(answer.headers()["content-type"], "text/event-stream");
    let mut text = Vec::new();
    let mut chunks = answer.bytes_stream();
    while let Some(chunk) = chunks.next().await {
        text.extend(chunk.unwrap());
    }
    let text = String::from_utf8(text).unwrap();
    text.split("\n\n").filter_map(|event| event.strip_prefix("data: ").map(str::to_owned)).collect()
}

fn tiny() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/tiny")
}

#[tokio::test]
async fn names_mean_bases_jobs_and_checkpoints() {
    let dir = tempfile::tempdir().unwrap();
    let (server, job) = trained(dir.path(), true).await;
    let list = server.get("/v1/models").await;
    let ids: Vec<&str> = list["data"].as_array().unwrap().iter().map(|one| one["id"].as_str().unwrap()).collect();
    assert!(ids.contains(&"small") && ids.contains(&job.as_str()), "{list}");
    let checkpoints = server.get(&format!("/jobs/{job}/checkpoints")).await;
    let id_of = |step: u64| {
        let found = checkpoints["data"].as_array().unwrap().iter().find(|one| one["step"] == step).unwrap();
        found["id"].as_str().unwrap().to_owned()
    };
    let best = checkpoints["data"].as_array().unwrap().iter().find(|one| one["best"] == true);
    let best = best.map_or_else(|| id_of(4), |one| one["id"].as_str().unwrap().to_owned());
    let body = |model: &str| json!({"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0});
    let mut texts = Vec::new();
    for (name, expected) in [
        (job.clone(), best.clone()),
        (format!("{job}@best"), best),
        (format!("{job}@last"), id_of(4)),
        (format!("{job}@2"), id_of(2)),
        (id_of(2), id_of(2)),
    ] {
        let answer = post(&server, "/v1/completions", &body(&name)).await;
        assert_eq!(answer.headers()["x-rlood-checkpoint"], expected.as_str(), "{name}");
        let answer: Value = answer.json().await.unwrap();
        assert_eq!(answer["model"], expected, "{name}");
        texts.push(answer["choices"][0]["text"].as_str().unwrap().to_owned());
        let card = server.get(&format!("/v1/models/{name}")).await;
        assert_eq!((&card["checkpoint"], &card["parent"]), (&json!(expected), &json!("small")), "{name}");
    }
    assert_eq!(texts[3], texts[4]);
    let base = asked(&server, "/v1/completions", body("small")).await;
    assert_eq!(base["model"], "small");
    assert_ne!(base["choices"][0]["text"], json!(texts[2]));
    // The adapter's archive names its checkpoint too.
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    let tar = http.get(format!("{}/jobs/{job}/adapter", server.url)).send().await.unwrap();
    assert_eq!(tar.headers()["x-rlood-checkpoint"], id_of(4).as_str());
    for name in ["nothing", "job_00000000000000000000000000", &format!("{job}@3"), &format!("{job}@newest"), "org/name"]
    {
        let answer = post(&server, "/v1/completions", &body(name)).await;
        assert_eq!(answer.status(), 404, "{name}");
        let answer: Value = answer.json().await.unwrap();
        assert_eq!(
            (&answer["error"]["code"], &answer["error"]["param"]),
            (&json!("model_not_found"), &json!("model")),
            "{name}: {answer}"
        );
    }
    assert_eq!(server.get(&format!("/v1/models?job={job}")).await["data"].as_array().unwrap().len(), 2);
}

#[tokio::test]
async fn a_chat_is_answered_whole_and_in_pieces() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(&dir.path().join("data"), "cpu");
    register(&server, "tiny", &tiny()).await;
    let chat = |more: Value| {
        let mut body = json!({"model": "tiny", "messages": [{"role": "user", "content": [{"type": "text", "text": "What is 29 + "}, {"type": "text", "text": "13?"}]}],
            "max_completion_tokens": 12, "temperature": 0, "n": 2, "user": "me", "sparkle": 1});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let response = post(&server, "/v1/chat/completions", &chat(json!({"logprobs": true, "top_logprobs": 2}))).await;
    assert_eq!(response.headers()["x-rlood-ignored"], "sparkle");
    let answer: Value = response.json().await.unwrap();
    assert_eq!((&answer["object"], &answer["choices"][1]["index"]), (&json!("chat.completion"), &json!(1)));
    let message = &answer["choices"][0]["message"];
    assert_eq!((&message["role"], &message["refusal"]), (&json!("assistant"), &Value::Null));
    let prompt = Text::load(&tiny()).unwrap().encode("<|user|>What is 29 + 13?<|end|><|assistant|>", false).unwrap();
    assert_eq!(answer["usage"]["prompt_tokens"], prompt.len());
    let content = answer["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(2 * content.len() as u64, answer["usage"]["completion_tokens"].as_u64().unwrap());
    for token in content {
        assert_eq!(token["top_logprobs"].as_array().unwrap().len(), 2);
        assert_eq!(token["top_logprobs"][0]["logprob"], token["logprob"], "greedy: {token}");
        assert_eq!(token["bytes"].as_array().unwrap().len(), token["token"].as_str().unwrap().len(), "{token}");
    }
    let text = message["content"].as_str().unwrap();

    let lines = streamed(
        &server,
        "/v1/chat/completions",
        chat(json!({"stream": true, "stream_options": {"include_usage": true}})),
    )
    .await;
    assert_eq!(lines.last().unwrap(), "[DONE]");
    let chunks: Vec<Value> = lines[..lines.len() - 1].iter().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(chunks.iter().all(|chunk| chunk["object"] == "chat.completion.chunk" && chunk["id"] == chunks[0]["id"]));
    let last = chunks.last().unwrap();
    assert_eq!((&last["choices"], &last["usage"]), (&json!([]), &answer["usage"]));
    for index in 0..2 {
        let of_index: Vec<&Value> = chunks
            .iter()
            .flat_map(|chunk| chunk["choices"].as_array().unwrap())
            .filter(|choice| choice["index"] == index)
            .collect();
        assert_eq!(of_index[0]["delta"], json!({"role": "assistant", "content": ""}));
        let streamed: String = of_index.iter().filter_map(|choice| choice["delta"]["content"].as_str()).collect();
        assert_eq!(streamed, text);
        assert_eq!(of_index.last().unwrap()["finish_reason"], answer["choices"][0]["finish_reason"]);
        assert!(of_index.len() > 3, "one piece a token: {of_index:?}");
    }
    let quiet = streamed(&server, "/v1/chat/completions", chat(json!({"stream": true}))).await;
    assert!(quiet.iter().all(|line| !line.contains("usage")));
}

#[tokio::test]
async fn a_prompt_is_echoed_with_its_log_probs() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(&dir.path().join("data"), "cpu");
    let small = model_copy(&dir.path().join("small"));
    register(&server, "small", &small).await;
    let text = Text::load(&small).unwrap();
    let ids = text.encode(PROMPT, true).unwrap();
    // The body of lm-evaluation-harness.
    let body = json!({"model": "small", "prompt": [ids, ids[..3]], "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": true});
    let answer = asked(&server, "/v1/completions", body.clone()).await;
    let policy = Policy::load(&small, BackendKind::Cpu).unwrap();
    let segments = Segments::of_completion(ids[1..].to_vec(), None);
    let scores = policy.score(&[Trajectory::new(&ids[..1], &segments)], 1.0, Adapter::Off).unwrap();
    for (choice, length) in [(0, ids.len()), (1, 3)] {
        let logprobs = &answer["choices"][choice]["logprobs"];
        let values = logprobs["token_logprobs"].as_array().unwrap();
        assert_eq!(values.len(), length + 1, "the prompt and exactly one token");
        for list in ["tokens", "top_logprobs", "text_offset"] {
            assert_eq!(logprobs[list].as_array().unwrap().len(), length + 1, "{list}");
        }
        assert_eq!((&values[0], &logprobs["top_logprobs"][0]), (&Value::Null, &Value::Null));
        for (index, expected) in scores[0].logps[..length - 1].iter().enumerate() {
            let value = values[index + 1].as_f64().unwrap();
            assert!((value - f64::from(*expected)).abs() < 1e-4, "{value} {expected}");
            let top = logprobs["top_logprobs"][index + 1].as_object().unwrap();
            assert!(top.values().any(|other| other.as_f64() == Some(value)), "the token itself: {top:?} {value}");
        }
        let last = logprobs["top_logprobs"][length].as_object().unwrap();
        assert_eq!(
            last.values().map(|value| value.as_f64().unwrap()).fold(f64::MIN, f64::max),
            values[length].as_f64().unwrap()
        );
    }
    assert!(answer["choices"][0]["text"].as_str().unwrap().starts_with(PROMPT));
    let mut zero = body.clone();
    zero["max_tokens"] = json!(0);
    let zero = asked(&server, "/v1/completions", zero).await;
    assert_eq!(zero["choices"][0]["logprobs"]["tokens"].as_array().unwrap().len(), ids.len());
    let mut plain = body.clone();
    (plain["max_tokens"], plain["logprobs"]) = (json!(0), Value::Null);
    assert_eq!(asked(&server, "/v1/completions", plain).await["choices"][0]["text"], PROMPT);
    // The stream has the same log-probs.
    let mut stream = body;
    stream["stream"] = json!(true);
    let lines = streamed(&server, "/v1/completions", stream).await;
    let mut values: Vec<Value> = Vec::new();
    for line in &lines[..lines.len() - 1] {
        let chunk: Value = serde_json::from_str(line).unwrap();
        for choice in chunk["choices"].as_array().unwrap().iter().filter(|choice| choice["index"] == 0) {
            values.extend(choice["logprobs"]["token_logprobs"].as_array().unwrap().clone());
        }
    }
    assert_eq!(json!(values), answer["choices"][0]["logprobs"]["token_logprobs"]);
}

#[tokio::test]
async fn what_is_not_supported_or_out_of_range_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(&dir.path().join("data"), "cpu");
    register(&server, "tiny", &tiny()).await;
    let positions = server.get("/v1/models/tiny").await["max_model_len"].as_u64().unwrap();
    let wrong = [
        (json!({"messages": []}), "messages", "empty"),
        (json!({"messages": "hi"}), "messages", "invalid_type"),
        (json!({"messages": [{"role": "robot", "content": "x"}]}), "messages.0.role", "invalid"),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
            "messages.0.content",
            "unsupported_value",
        ),
        (json!({"temperature": 3}), "temperature", "out_of_range"),
        (json!({"temperature": "hot"}), "temperature", "invalid_type"),
        (json!({"n": 9}), "n", "out_of_range"),
        (json!({"top_logprobs": 2}), "top_logprobs", "invalid"),
        (json!({"logprobs": true, "top_logprobs": 21}), "top_logprobs", "out_of_range"),
        (json!({"logit_bias": {"nine": 1}}), "logit_bias.nine", "invalid_token"),
        (json!({"logit_bias": {"5": 101}}), "logit_bias.5", "out_of_range"),
        (json!({"stop": [""]}), "stop", "invalid"),
        (json!({"tools": [{"type": "function"}]}), "tools.0.function", "invalid"),
        (json!({"tools": [{"type": "function", "function": {"name": "f"}}]}), "tools", "unsupported_value"),
        (json!({"tools": [{}], "tool_choice": "required"}), "tool_choice", "unsupported_value"),
        (json!({"chat_template_kwargs": {"tools": []}}), "chat_template_kwargs.tools", "invalid"),
        (
            json!({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}),
            "messages.0.tool_calls.0.function.arguments",
            "invalid",
        ),
        (json!({"functions": [{}]}), "functions", "unsupported_value"),
        (json!({"response_format": {"type": "json_object"}}), "response_format", "unsupported_value"),
        (json!({"guided_json": {"type": "object"}}), "guided_json", "unsupported_value"),
        (json!({"modalities": ["text", "audio"]}), "modalities", "unsupported_value"),
        (json!({"max_tokens": positions}), "max_tokens", "context_length_exceeded"),
        (json!({"max_completion_tokens": 0}), "max_completion_tokens", "out_of_range"),
        (
            json!({"messages": [{"role": "user", "content": "word ".repeat(5000)}]}),
            "messages",
            "context_length_exceeded",
        ),
    ];
    for (more, param, code) in wrong {
        let mut body = json!({"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        if code == "context_length_exceeded" && param == "messages" {
            body.as_object_mut().unwrap().remove("max_tokens");
        }
        let answer = post(&server, "/v1/chat/completions", &body).await;
        let (status, retry) = (answer.status(), answer.headers()["x-should-retry"].clone());
        let answer: Value = answer.json().await.unwrap();
        let error = &answer["error"];
        assert_eq!(
            (status.as_u16(), &error["param"], &error["code"]),
            (400, &json!(param), &json!(code)),
            "{more}: {answer}"
        );
        assert_eq!((&error["type"], retry.to_str().unwrap()), (&json!("invalid_request_error"), "false"), "{more}");
    }
    let harmless = json!({"model": "tiny", "messages": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
        "max_tokens": 2, "tools": [{"type": "function"}], "tool_choice": "none", "response_format": {"type": "text"}, "functions": [], "top_k": -1});
    asked(&server, "/v1/chat/completions", harmless).await;
    let missing = post(&server, "/v1/chat/completions", &json!({"messages": []})).await;
    assert_eq!(missing.json::<Value>().await.unwrap()["error"]["param"], "model");
    let unknown = post(&server, "/v1/nothing", &json!({})).await;
    assert_eq!(unknown.status(), 404);
    assert!(unknown.json::<Value>().await.unwrap()["error"]["message"].as_str().unwrap().contains("/v1/nothing"));
    let broken = reqwest::Client::builder().no_proxy().build().unwrap();
    let broken = broken
        .post(format!("{}/v1/completions", server.url))
        .header("content-type", "application/json")
        .body("{")
        .send()
        .await
        .unwrap();
    assert_eq!(
        (broken.status().as_u16(), broken.json::<Value>().await.unwrap()["error"]["type"].clone()),
        (400, json!("invalid_request_error"))
    );
}

/// A model whose token 0 is a whole call of a tool, and whose template shows tools, calls and results.
fn model_that_can_call(dir: &Path) -> std::path::PathBuf {
    let model = model_copy(dir);
    let edit = |file: &str, change: &dyn Fn(&mut Value)| {
        let path = model.join(file);
        let mut value: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        change(&mut value);
        std::fs::write(path, value.to_string()).unwrap();
    };
    edit("tokenizer.json", &|tokenizer| {
        let old = tokenizer["added_tokens"][0]["content"].as_str().unwrap().to_owned();
        tokenizer["added_tokens"][0]["content"] = json!(CALL);
        tokenizer["added_tokens"][0]["special"] = json!(false);
        let vocabulary = tokenizer["model"]["vocab"].as_object_mut().unwrap();
        let id = vocabulary.remove(&old).unwrap();
        vocabulary.insert(CALL.to_owned(), id);
    });
    let template = "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments.a }}{% endfor %}{{ m.name or '' }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    edit("tokenizer_config.json", &|config| config["chat_template"] = json!(template));
    model
}

const CALL: &str = r#"<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>"#;

#[tokio::test]
async fn a_chat_with_tools_is_answered_with_calls() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(&dir.path().join("data"), "cpu");
    let model = model_that_can_call(&dir.path().join("caller"));
    register(&server, "caller", &model).await;
    let whole = json!({"type": "integer"});
    let add = json!({"name": "add", "parameters": {"type": "object", "properties": {"a": whole, "b": whole}, "required": ["a", "b"]}});
    let call = json!({"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{\"a\": 7}"}});
    let messages = json!([
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "9"},
    ]);
    // The bias leaves only the token that is a call. The stop string ends it within its mark, which Hermes allows.
    let body = |more: Value| {
        let mut body = json!({"model": "caller", "messages": messages, "tools": [{"type": "function", "function": add}],
            "logit_bias": {"0": 100}, "stop": ["</tool_call>"], "max_tokens": 4, "temperature": 0, "return_token_ids": true});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let answer = asked(&server, "/v1/chat/completions", body(json!({}))).await;
    let text = Text::load(&model).unwrap();
    let ids: Vec<u32> = serde_json::from_value(answer["prompt_token_ids"].clone()).unwrap();
    let expected = "add;<|im_start|>user\nAdd.<|im_end|><|im_start|>assistant\n<tool_call>7<|im_end|><|im_start|>tool\n9add<|im_end|><|im_start|>assistant\n";
    assert_eq!(text.decode(&ids, false).unwrap(), expected);
    let chat = json!({"model": "caller", "messages": messages, "tools": [{"type": "function", "function": add}]});
    let tokenized = asked(&server, "/tokenize", chat).await;
    assert_eq!(tokenized["tokens"], answer["prompt_token_ids"], "the tokens of the tools are counted");
    let choice = &answer["choices"][0];
    assert_eq!((&choice["finish_reason"], &choice["message"]["content"]), (&json!("tool_calls"), &Value::Null));
    let calls = choice["message"]["tool_calls"].as_array().unwrap();
    assert_eq!(calls.len(), 1);
    assert_eq!(calls[0]["function"], json!({"name": "add", "arguments": "{\"a\":1,\"b\":2}"}));
    assert!(calls[0]["id"].as_str().unwrap().starts_with("call_") && calls[0]["type"] == "function");

    let lines = streamed(&server, "/v1/chat/completions", body(json!({"stream": true}))).await;
    let chunks: Vec<Value> = lines[..lines.len() - 1].iter().map(|line| serde_json::from_str(line).unwrap()).collect();
    let deltas: Vec<&Value> = chunks.iter().map(|chunk| &chunk["choices"][0]["delta"]).collect();
    let sent: Vec<&Value> = deltas.iter().filter_map(|delta| delta["tool_calls"].as_array()).flatten().collect();
    assert_eq!((sent.len(), &sent[0]["index"], &sent[0]["function"]), (1, &json!(0), &calls[0]["function"]));
    assert!(deltas.iter().all(|delta| delta["content"].as_str().unwrap_or_default().is_empty()), "{chunks:?}");
    assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "tool_calls");

    // A call that does not fit its schema, and a request without tools, are answered with the text.
    let mut other = add.clone();
    other["parameters"]["properties"]["b"] = json!({"type": "string"});
    for more in [
        json!({"tools": [{"type": "function", "function": other}]}),
        json!({"tool_choice": "none"}),
        json!({"tools": null}),
    ] {
        let answer = asked(&server, "/v1/chat/completions", body(more)).await;
        let choice = &answer["choices"][0];
        assert_eq!(choice["message"]["content"], CALL.trim_end_matches("</tool_call>"));
        assert_eq!((&choice["finish_reason"], choice["message"].get("tool_calls")), (&json!("stop"), None));
    }
}

#[tokio::test]
async fn a_seed_gives_the_same_answer_beside_others_and_the_tokenizer_is_served() {
    let dir = tempfile::tempdir().unwrap();
    let (server, job) = trained(dir.path(), true).await;
    let body = |model: &str, seed: u64, tokens: u64| json!({"model": model, "prompt": PROMPT, "max_tokens": tokens, "seed": seed, "n": 2, "top_p": 0.9, "ignore_eos": true, "return_token_ids": true});
    let alone = asked(&server, "/v1/completions", body(&job, 5, 20)).await;
    let (with_base, with_other, again) = tokio::join!(
        asked(&server, "/v1/completions", body("small", 5, 40)),
        asked(&server, "/v1/completions", body(&format!("{job}@2"), 6, 30)),
        asked(&server, "/v1/completions", body(&job, 5, 20)),
    );
    assert_eq!(again["choices"], alone["choices"]);
    assert_ne!(with_base["choices"], again["choices"]);
    assert_eq!(with_other["choices"][0]["token_ids"].as_array().unwrap().len(), 30);
    assert_ne!(alone["choices"][0]["text"], alone["choices"][1]["text"]);

    let text = Text::load(&dir.path().join("small")).unwrap();
    let ids = text.encode(PROMPT, false).unwrap();
    for (prefix, model) in
        [("", None), ("", Some("small")), ("/serve/small", None), (&format!("/serve/{job}") as &str, None)]
    {
        let body = json!({"prompt": PROMPT, "add_special_tokens": false, "model": model});
        let tokens = asked(&server, &format!("{prefix}/tokenize"), body).await;
        assert_eq!((&tokens["tokens"], &tokens["count"]), (&json!(ids), &json!(ids.len())), "{prefix}");
        let back = asked(&server, &format!("{prefix}/detokenize"), json!({"tokens": ids, "model": model})).await;
        assert_eq!(back["prompt"], PROMPT);
        let info = server.get(&format!("{prefix}/tokenizer_info")).await;
        assert!(info["eos_token"].is_string(), "{info}");
    }
    let beyond = post(&server, "/detokenize", &json!({"tokens": [ids[0], 4_000_000_000_u32]})).await;
    assert_eq!(beyond.status(), 400);
    let beyond: Value = beyond.json().await.unwrap();
    assert_eq!((&beyond["error"]["param"], &beyond["error"]["code"]), (&json!("tokens"), &json!("invalid_token")));
    let of_path =
        asked(&server, &format!("/serve/{job}/v1/completions"), json!({"prompt": PROMPT, "max_tokens": 3})).await;
    assert!(of_path["model"].as_str().unwrap().starts_with("ckpt_"));
    // With a second base model, a request must name one.
    register(&server, "tiny", &tiny()).await;
    let answer = post(&server, "/tokenize", &json!({"prompt": "x"})).await;
    assert_eq!(answer.status(), 400);
    assert_eq!(answer.json::<Value>().await.unwrap()["error"]["param"], "model");
}

#[tokio::test]
async fn keys_and_places_limit_what_is_served() {
    let dir = tempfile::tempdir().unwrap();
    let flags = ["--serve-max-answers", "3", "--serve-max-answers-per-owner", "2"];
    let server = Server::start_with(&dir.path().join("data"), "cpu", &flags);
    register(&server, "tiny", &tiny()).await;
    let endless = json!({"model": "tiny", "prompt": "a", "max_tokens": 100, "ignore_eos": true, "n": 2, "temperature": 0, "stream": true});
    let open = post(&server, "/v1/completions", &endless).await;
    assert_eq!(open.status(), 200);
    let mut lines = open.bytes_stream();
    lines.next().await.unwrap().unwrap();
    let refused = post(&server, "/v1/completions", &endless).await;
    if refused.status() == 429 {
        assert!(refused.headers().contains_key("retry-after"));
        let refused: Value = refused.json().await.unwrap();
        assert_eq!(refused["error"]["code"], "rate_limit_exceeded");
        let message = refused["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains("--serve-max-answers"), "{message}");
    }
    drop(lines);
    let too_many = post(&server, "/v1/completions", &json!({"model": "tiny", "prompt": "a", "n": 4})).await;
    assert_eq!(too_many.status(), 429);
    let metrics = String::from_utf8(server.bytes("/metrics").await).unwrap();
    assert!(metrics.contains("rlood_serving_first_token_seconds_bucket"), "{metrics}");
    let off = Server::start_with(&dir.path().join("off"), "cpu", &["--serve-devices", "none"]);
    register(&off, "tiny", &tiny()).await;
    let answer = post(&off, "/v1/completions", &json!({"model": "tiny", "prompt": "a"})).await;
    assert_eq!(answer.status(), 501);
}
