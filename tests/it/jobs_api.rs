//! Jobs over HTTP, through the router: submission, dry runs, configurations.
//!
//! Longer than other files: one test per refusal, with its pointer and text.

use std::path::PathBuf;

use axum::body::Body;
use axum::http::{Request, StatusCode, header};
use rlood::id::DatasetId;
use rlood::spec::format::{Format, write_job};
use serde_json::{Value, json};

use crate::server::{SECRET, Server, copy, job, pointers, records, with};

#[tokio::test]
async fn a_job_with_inline_records_is_queued_and_shown() {
    let server = Server::start().await;
    let answer = server.post("/jobs", with(job(), "name", json!("sums"))).await;
    assert_eq!(answer.status, 201, "{}", answer.text);
    let id = answer.body["id"].as_str().unwrap();
    assert_eq!(answer.headers[header::LOCATION], format!("/jobs/{id}"));
    assert_eq!(answer.body["last_seq"], 1, "its first event is there");
    let shown = server.get(&format!("/jobs/{id}")).await;
    assert_eq!(shown.status, 200);
    let keys: Vec<_> = shown.body.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(
        keys,
        [
            "id",
            "name",
            "state",
            "requested",
            "phase",
            "status_reason",
            "attempt",
            "server_errors",
            "device",
            "last_seq",
            "step",
            "total_steps",
            "eta_s",
            "queue_position",
            "failure",
            "ending",
            "alerts",
            "training_phase",
            "runtime",
            "plan",
            "parent",
            "created_at",
            "started_at",
            "finished_at",
            "metadata",
            "owner"
        ]
    );
    assert_eq!((&shown.body["state"], &shown.body["queue_position"]), (&json!("queued"), &json!(1)));
    assert_eq!((&shown.body["name"], &shown.body["total_steps"]), (&json!("sums"), &json!(20)));
    assert!(shown.body["created_at"].as_str().unwrap().ends_with('Z'));
    // The records are stored as a dataset; the same records are the same dataset.
    let dataset = shown.body["plan"]["dataset"].clone();
    let stored = server.get(&format!("/datasets/{}", dataset["id"].as_str().unwrap())).await;
    assert_eq!((stored.status, &stored.body["num_rows"]), (StatusCode::OK, &json!(8)));
    assert_eq!(stored.body["sha256"], dataset["sha256"]);
    let again = server.post("/jobs", job()).await;
    assert_eq!(again.body["plan"]["dataset"], dataset);
    assert_eq!(again.body["queue_position"], 2);
}

#[tokio::test]
async fn all_errors_of_a_job_come_at_once_with_pointers() {
    let server = Server::start().await;
    let document = json!({
        "model": "nobody/nothing", "dataset": {"id": DatasetId::new()}, "modle": 1,
        "rewards": [{"type": "length"}, {"type": "length"}, {"type": "webhook", "url": "http://x/", "secret": "hunter2"}],
        "rloo": {"num_generations": 1, "value_model": "x"}, "sampling": {"temperature": 0}, "lora": {"r": 0}, "training": {"max_steps": 0}
    });
    let answer = server.post("/jobs", document.clone()).await;
    assert_eq!((answer.status.as_u16(), &answer.body["code"]), (422, &json!("invalid_spec")));
    assert_eq!(answer.headers[header::CONTENT_TYPE], "application/problem+json");
    let mut found = pointers(&answer);
    found.sort_unstable();
    assert_eq!(
        found,
        [
            "/dataset/id unknown_dataset",
            "/lora/r out_of_range",
            "/model unknown_model",
            "/modle unknown_field",
            "/rewards/1/name duplicate",
            "/rewards/2/secret invalid_value",
            "/rloo/num_generations out_of_range",
            "/rloo/value_model foreign_key",
            "/sampling/temperature out_of_range",
            "/training/max_steps out_of_range"
        ]
    );
    assert!(
        answer.text.contains("registered: plain, chat") || answer.text.contains("registered: chat, plain"),
        "{}",
        answer.text
    );
    assert!(!answer.text.contains("hunter2"), "{}", answer.text);
    // Validation returns the same errors, with 200.
    let dry = server.post("/jobs/validate", document).await;
    assert_eq!((dry.status.as_u16(), &dry.body["valid"], &dry.body["plan"]), (200, &json!(false), &Value::Null));
    assert_eq!(dry.body["errors"].as_array().unwrap().len(), 10);
    assert_eq!(server.get("/jobs").await.body["data"], json!([]));
}

#[tokio::test]
async fn bad_bodies_are_problems() {
    let server = Server::start().await;
    let request = |kind: &str, body: &'static str| {
        Request::post("/jobs").header(header::CONTENT_TYPE, kind).body(Body::from(body)).unwrap()
    };
    for (kind, body, status, code) in [
        ("application/json", "{\"model\": ", 400, "invalid_json"),
        ("application/json", "", 400, "invalid_json"),
        ("text/plain", "{}", 415, "unsupported_media_type"),
        ("application/json", "[]", 422, "invalid_spec"),
        ("application/json", "null", 422, "invalid_spec"),
        ("application/json", "3", 422, "invalid_spec"),
    ] {
        let answer = server.send(request(kind, body)).await;
        assert_eq!(
            (answer.status.as_u16(), answer.body["code"].as_str().unwrap()),
            (status, code),
            "{body}: {}",
            answer.text
        );
    }
    let large = server.post("/jobs", with(job(), "name", json!("x".repeat(17 << 20)))).await;
    assert_eq!(large.status, 413);
}

#[tokio::test]
async fn datasets_that_cannot_train_are_refused() {
    let server = Server::start().await;
    let refused = async |dataset: Value| {
        let answer =
            server.post("/jobs", with(with(job(), "dataset", dataset), "rewards", json!([{"type": "length"}]))).await;
        assert_eq!(answer.status, 422, "{}", answer.text);
        (pointers(&answer), answer.text)
    };
    let (found, _) = refused(json!({"records": []})).await;
    assert_eq!(found, ["/dataset/records empty_dataset"]);
    let (found, text) = refused(json!({"records": records(7)})).await;
    assert_eq!(found, ["/training/prompts_per_step dataset_too_small"]);
    assert!(text.contains("nearest valid value is 7"), "{text}");
    let mut rows = records(8);
    rows[3] = json!({"question": "?"});
    rows[5] = json!({"prompt": "x", "images": []});
    let (found, _) = refused(json!({"records": rows})).await;
    assert_eq!(
        found[..2],
        ["/dataset/records/3/prompt missing_prompt", "/dataset/records/5/images images_unsupported"]
    );
}

#[tokio::test]
async fn chat_messages_need_a_template_and_prompts_must_fit_the_context() {
    let server = Server::start().await;
    let chat: Vec<_> = (0..8).map(|row| json!({"prompt": [{"role": "user", "content": format!("{row}?")}]})).collect();
    let document = json!({"model": "plain", "dataset": {"records": chat}, "rewards": [{"type": "length"}]});
    let answer = server.post("/jobs", document.clone()).await;
    assert_eq!((answer.status.as_u16(), pointers(&answer)), (422, vec!["/dataset no_chat_template".to_owned()]));
    server.create(with(document, "model", json!("chat"))).await;

    let mut rows = records(8);
    rows[2]["prompt"] = json!("word ".repeat(400));
    let answer = server.post("/jobs", with(job(), "dataset", json!({"records": rows}))).await;
    assert_eq!((answer.status.as_u16(), pointers(&answer)), (422, vec!["/dataset prompt_too_long".to_owned()]));
    let detail = answer.body["errors"][0]["detail"].as_str().unwrap();
    assert!(
        detail.contains("at most 256 tokens") && detail.contains("(row 2)") && detail.starts_with("1 prompts"),
        "{detail}"
    );

    // The default completion length is reduced to the context (256); an explicit one is not.
    let fitted = server.post("/jobs/validate", job()).await;
    let longest = fitted.body["estimate"]["longest_prompt_tokens"].as_u64().unwrap();
    assert!((5..40).contains(&longest), "{longest}");
    assert_eq!(fitted.body["plan"]["sampling"]["max_completion_length"].as_u64().unwrap(), 256 - longest);
    let long = server.post("/jobs/validate", with(job(), "sampling", json!({"max_completion_length": 256}))).await;
    assert_eq!(pointers(&long), ["/sampling/max_completion_length out_of_range"]);
}

#[tokio::test]
async fn a_model_that_cannot_be_read_any_more_is_an_error_of_the_job() {
    let server = Server::start().await;
    let plain: PathBuf = server.dir.path().join("plain");
    std::fs::remove_file(plain.join("tokenizer.json")).unwrap();
    let answer = server.post("/jobs", with(job(), "model", json!("plain"))).await;
    assert_eq!((answer.status.as_u16(), pointers(&answer)), (422, vec!["/model invalid_model".to_owned()]));
    assert!(answer.text.contains("tokenizer.json"), "{}", answer.text);
    assert!(!answer.text.contains(server.dir.path().to_str().unwrap()), "{}", answer.text);
}

#[tokio::test]
async fn a_model_whose_files_changed_since_it_was_registered_must_be_registered_again() {
    let server = Server::start().await;
    let plain: PathBuf = server.dir.path().join("plain");
    let job = || with(job(), "model", json!("plain"));
    let weights = plain.join("model.safetensors");
    // The same bytes with another modification time are the same model.
    let bytes = std::fs::read(&weights).unwrap();
    std::fs::write(&weights, &bytes).unwrap();
    server.create(job()).await;
    let mut changed = bytes;
    *changed.last_mut().unwrap() ^= 1;
    std::fs::write(&weights, &changed).unwrap();
    for path in ["/jobs", "/jobs/validate"] {
        let answer = server.post(path, job()).await;
        assert_eq!(pointers(&answer), ["/model model_changed"], "{}", answer.text);
        assert!(answer.text.contains("register it again"), "{}", answer.text);
    }
    let again = server.post("/models", json!({"id": "plain", "source": plain})).await;
    assert_eq!(again.status, 200, "{}", again.text);
    assert!(again.body["card"]["stamp"].is_null() && again.body["card"]["num_parameters"].is_u64(), "{}", again.text);
    server.create(job()).await;
}

#[tokio::test]
async fn a_model_that_is_no_model_is_refused_with_what_it_is() {
    let server = Server::start().await;
    let dir = server.dir.path().join("spoiled");
    copy(&server.dir.path().join("plain"), &dir);
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 123\n";
    let page = "<!DOCTYPE html>\n<html><body>Access denied</body></html>";
    for (file, text, expected) in [
        ("tokenizer.json", "{\"model\": {}}", "tokenizer.json: is not a tokenizer"),
        ("model.safetensors", pointer, "model.safetensors: is a Git LFS pointer"),
        ("model.safetensors", page, "model.safetensors: is a web page"),
        ("tokenizer.json", pointer, "tokenizer.json: is a Git LFS pointer"),
        ("config.json", page, "config.json: is a web page"),
        ("chat_template.jinja", "{% if", "the chat template failed"),
    ] {
        let good = std::fs::read(dir.join(file)).ok();
        std::fs::write(dir.join(file), text).unwrap();
        let answer = server.post("/models", json!({"id": "spoiled", "source": dir})).await;
        assert_eq!((answer.status.as_u16(), &answer.body["code"]), (422, &json!("invalid_model")), "{file} {text}");
        assert!(answer.body["detail"].as_str().unwrap().contains(expected), "{}", answer.text);
        match good {
            Some(good) => std::fs::write(dir.join(file), good).unwrap(),
            None => std::fs::remove_file(dir.join(file)).unwrap(),
        }
    }
    assert_eq!(server.post("/models", json!({"id": "spoiled", "source": dir})).await.status, 201);
}

#[tokio::test]
async fn a_reward_url_that_this_server_must_not_reach_is_refused_at_submission() {
    let server = Server::start().await;
    for (url, refused) in [
        ("http://10.0.0.5/score", true),
        ("http://[::ffff:10.0.0.1]/", true),
        ("http://169.254.169.254/latest", true),
        ("http://0x0a000001/", true),
        ("http://127.0.0.1:9/score", false),
        ("https://1.1.1.1/score", false),
        // Names are checked when they are resolved.
        ("https://rm.example/score", false),
    ] {
        let rewards = json!([{"type": "length"}, {"type": "webhook", "url": url}]);
        let document = with(job(), "rewards", rewards);
        let checked = server.post("/jobs/validate", document.clone()).await;
        let submitted = server.post("/jobs", document).await;
        let expected: &[&str] = if refused { &["/rewards/1/url address_refused"] } else { &[] };
        assert_eq!(pointers(&checked), expected, "{url}: {}", checked.text);
        assert_eq!(submitted.status, if refused { 422 } else { 201 }, "{url}: {}", submitted.text);
        assert_eq!(refused, submitted.text.contains("--allow-outgoing"), "{url}: {}", submitted.text);
    }
}

#[tokio::test]
async fn a_completion_length_of_zero_is_one_error() {
    let server = Server::start().await;
    let answer = server.post("/jobs", with(job(), "sampling", json!({"max_completion_length": 0}))).await;
    assert_eq!(pointers(&answer), ["/sampling/max_completion_length out_of_range"]);
    assert!(answer.text.contains("not 0"), "{}", answer.text);
}

#[tokio::test]
async fn a_dry_run_resolves_the_plan_and_stores_nothing() {
    let server = Server::start().await;
    let answer = server.post("/jobs/validate", with(job(), "optimizer", json!({"learning_rate": 1e-6}))).await;
    assert_eq!(
        (answer.status.as_u16(), &answer.body["valid"], &answer.body["errors"]),
        (200, &json!(true), &json!([]))
    );
    assert_eq!(answer.body["warnings"][0]["code"], "low_learning_rate");
    assert_eq!(
        (&answer.body["plan"]["totals"]["completions"], &answer.body["plan"]["dataset"]["id"]),
        (&json!(640), &Value::Null)
    );
    assert!(answer.body["estimate"]["trainable_parameters"].as_u64().unwrap() > 0);
    assert_eq!(server.get("/datasets").await.body["data"], json!([]));
    for (query, status, code) in [
        ("from=verl", 422, "unsupported"),
        // This server starts no processes.
        ("probe=true", 501, "not_implemented"),
        ("probe=true&probe_prompts=65", 400, "invalid_query"),
        ("probe=true&probe_timeout_s=0", 400, "invalid_query"),
    ] {
        let answer = server.post(&format!("/jobs/validate?{query}"), job()).await;
        assert_eq!((answer.status.as_u16(), &answer.body["code"]), (status, &json!(code)), "{}", answer.text);
    }
}

#[tokio::test]
async fn a_form_brings_the_dataset_along() {
    let server = Server::start().await;
    let form = |spec: &Value, rows: &str| {
        let body = format!(
            "--B\r\ncontent-disposition: form-data; name=\"spec\"\r\ncontent-type: application/json\r\n\r\n{spec}\r\n\
             --B\r\ncontent-disposition: form-data; name=\"dataset\"; filename=\"rows.csv\"\r\n\r\n{rows}\r\n--B--\r\n"
        );
        Request::post("/jobs")
            .header(header::CONTENT_TYPE, "multipart/form-data; boundary=B")
            .body(Body::from(body))
            .unwrap()
    };
    let mut spec = job();
    spec.as_object_mut().unwrap().remove("dataset");
    let rows: String = (0..9).map(|row| format!("What is {row}?,{row}\r\n")).collect();
    let answer = server.send(form(&spec, &format!("prompt,answer\r\n{rows}"))).await;
    assert_eq!(answer.status, 201, "{}", answer.text);
    let dataset = &answer.body["plan"]["dataset"];
    assert_eq!(dataset["num_rows"], 9);
    assert_eq!(
        server.get(&format!("/datasets/{}", dataset["id"].as_str().unwrap())).await.body["columns"],
        json!(["prompt", "answer"])
    );
    let config = server.get(&format!("/jobs/{}/config", answer.body["id"].as_str().unwrap())).await;
    assert_eq!(config.body["dataset"], json!({"id": dataset["id"]}));
    // Errors of the spec and of the rows are reported together.
    let answer = server.send(form(&job(), "prompt\na\n")).await;
    assert_eq!(answer.status, 422);
    assert!(pointers(&answer).contains(&"/dataset conflict".to_owned()), "{}", answer.text);
    let answer = server.send(form(&spec, "question\na\n")).await;
    assert_eq!((answer.status.as_u16(), &answer.body["code"]), (422, &json!("invalid_dataset")));
}

#[tokio::test]
async fn the_spec_of_a_form_may_be_yaml_or_toml() {
    let server = Server::start().await;
    let mut spec = job();
    spec.as_object_mut().unwrap().remove("dataset");
    let (json, [yaml, toml]) =
        (spec.to_string(), [Format::Yaml, Format::Toml].map(|form| write_job(&spec, form).unwrap()));
    let send = async |spec: &str, head: &str| {
        let rows: String = (0..9).map(|row| format!("{{\"prompt\": \"p{row}\", \"answer\": \"{row}\"}}\n")).collect();
        let body = format!(
            "--B\r\ncontent-disposition: form-data; name=\"spec\"{head}\r\n\r\n{spec}\r\n\
             --B\r\ncontent-disposition: form-data; name=\"dataset\"; filename=\"rows.ndjson\"\r\n\r\n{rows}\r\n--B--\r\n"
        );
        let request = Request::post("/jobs").header(header::CONTENT_TYPE, "multipart/form-data; boundary=B");
        server.send(request.body(Body::from(body)).unwrap()).await
    };
    for (text, head) in [
        (&json, ""),
        (&json, "; filename=\"job.json\"\r\ncontent-type: application/octet-stream"),
        (&yaml, "\r\ncontent-type: application/yaml; charset=utf-8"),
        (&yaml, "; filename=\"job.yaml\"\r\ncontent-type: application/octet-stream"),
        (&toml, "\r\ncontent-type: application/toml"),
        (&toml, "; filename=\"job.toml\""),
    ] {
        let answer = send(text, head).await;
        assert_eq!(answer.status, 201, "{head}: {}", answer.text);
    }
    let answer = send("a: [1\nb: 2", "\r\ncontent-type: application/yaml").await;
    assert_eq!((answer.status.as_u16(), &answer.body["code"]), (400, &json!("invalid_document")), "{}", answer.text);
}

#[tokio::test]
async fn a_name_has_no_control_characters_and_null_changes_no_label() {
    let server = Server::start().await;
    let id = server.create(job()).await;
    let at = format!("/jobs/{id}");
    for name in ["a\nb", "a\tb", "\u{0}", "\u{7f}"] {
        let answer = server.post("/jobs", with(job(), "name", json!(name))).await;
        assert!(pointers(&answer).contains(&"/name invalid_value".to_owned()), "{name:?}: {}", answer.text);
        let answer = server.call("PATCH", &at, Some(json!({"name": name})), None).await;
        assert_eq!((answer.status.as_u16(), pointers(&answer)), (422, vec!["/name invalid_value".to_owned()]));
    }
    for field in ["metadata", "priority", "reward_secrets"] {
        let answer = server.call("PATCH", &at, Some(json!({field: null})), None).await;
        assert_eq!((answer.status.as_u16(), pointers(&answer)), (422, vec![format!("/{field} invalid_type")]));
    }
    let answer = server.call("PATCH", &at, Some(json!({"reward_secrets": {"r1": null}})), None).await;
    assert_eq!((answer.status.as_u16(), pointers(&answer)), (422, vec!["/reward_secrets/r1 invalid_type".to_owned()]));
    assert_eq!(server.call("PATCH", &at, Some(json!({"name": null, "metadata": {}})), None).await.status, 200);
}

#[tokio::test]
async fn a_parameter_that_is_given_twice_or_unknown_is_refused() {
    let server = Server::start().await;
    let id = server.create(job()).await;
    for path in [
        "/jobs?limit=1&limit=2".to_owned(),
        "/jobs?metadata.a=1&metadata.a=2".to_owned(),
        format!("/jobs/{id}/summary?step=1"),
    ] {
        let answer = server.get(&path).await;
        assert_eq!(
            (answer.status.as_u16(), &answer.body["code"]),
            (400, &json!("invalid_query")),
            "{path}: {}",
            answer.text
        );
    }
    assert_eq!(server.get("/jobs?metadata.a=1&metadata.b=2").await.status, 200);
    assert_eq!(server.get(&format!("/jobs/{id}/summary")).await.status, 200);
}

#[tokio::test]
async fn the_same_idempotency_key_makes_one_job() {
    let server = Server::start().await;
    let first = server.call("POST", "/jobs", Some(job()), Some("k1")).await;
    let second = server.call("POST", "/jobs", Some(job()), Some("k1")).await;
    assert_eq!((first.status.as_u16(), second.status.as_u16()), (201, 201));
    assert_eq!(first.text, second.text);
    assert_eq!(second.headers["idempotency-replayed"], "true");
    assert_eq!(second.headers[header::LOCATION], first.headers[header::LOCATION]);
    assert_eq!(server.get("/jobs").await.body["data"].as_array().unwrap().len(), 1);
    let other = server.call("POST", "/jobs", Some(with(job(), "name", json!("other"))), Some("k1")).await;
    assert_eq!((other.status.as_u16(), &other.body["code"]), (422, &json!("idempotency_mismatch")));
    // A refused body frees its key.
    let bad = server.call("POST", "/jobs", Some(json!({})), Some("k2")).await;
    assert_eq!(bad.status, 422);
    assert_eq!(server.call("POST", "/jobs", Some(job()), Some("k2")).await.status, 201);
}

#[tokio::test]
async fn the_configuration_comes_in_three_forms_and_each_can_be_submitted_again() {
    let server = Server::start().await;
    let mut document = with(job(), "lora", Value::Null);
    document["name"] = json!("no: \"quotes\" # yes");
    document["metadata"] = json!({"note": "two\nlines: # \"yes\""});
    let id = server.create(document).await;
    let whole = server.get(&format!("/jobs/{id}/config")).await.body;
    assert_eq!(whole["lora"], Value::Null);
    for format in ["json", "yaml", "toml"] {
        let answer = server.get(&format!("/jobs/{id}/config?format={format}")).await;
        let kind = format!("application/{format}");
        assert_eq!(
            (answer.status.as_u16(), answer.headers[header::CONTENT_TYPE].to_str().unwrap()),
            (200, kind.as_str())
        );
        let request = Request::post("/jobs").header(header::CONTENT_TYPE, kind).body(Body::from(answer.text)).unwrap();
        let again = server.send(request).await;
        assert_eq!(again.status, 201, "{format}: {}", again.text);
        let id = again.body["id"].as_str().unwrap();
        assert_eq!(server.get(&format!("/jobs/{id}/config")).await.body, whole, "{format}");
    }
    let answer = server.get(&format!("/jobs/{id}/config?format=xml")).await;
    assert_eq!(
        (answer.status.as_u16(), &answer.body["detail"]),
        (400, &json!("format: must be json, yaml or toml, not 'xml'"))
    );
    let broken = Request::post("/jobs")
        .header(header::CONTENT_TYPE, "application/yaml")
        .body(Body::from("a: [1\nb: 2"))
        .unwrap();
    let answer = server.send(broken).await;
    assert_eq!((answer.status.as_u16(), &answer.body["code"]), (400, &json!("invalid_document")), "{}", answer.text);
}

#[tokio::test]
async fn a_broken_document_says_where_and_never_quotes_a_secret() {
    let server = Server::start().await;
    let send = async |kind: &str, body: &str| {
        let request =
            Request::post("/jobs").header(header::CONTENT_TYPE, kind).body(Body::from(body.to_owned())).unwrap();
        let answer = server.send(request).await;
        assert!(!answer.text.contains("CANARY"), "{}", answer.text);
        let error = answer.body["errors"][0].clone();
        let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        (answer.status.as_u16(), word(&answer.body["code"]), word(&error["pointer"]), word(&error["detail"]))
    };
    let (status, code, _, detail) = send("application/toml", "[[rewards]]\nsecret = \"CANARY\" x\n").await;
    assert_eq!((status, code.as_str()), (400, "invalid_document"));
    assert!(detail.contains("line 2"), "{detail}");
    let (status, code, pointer, _) = send("application/toml", "[rloo]\nbeta = nan\n").await;
    assert_eq!((status, code.as_str(), pointer.as_str()), (400, "invalid_document", "/rloo/beta"));
    let (status, code, _, detail) = send("application/yaml", "secret: CANARY\nsecret: CANARY\n").await;
    assert_eq!((status, code.as_str()), (400, "invalid_document"));
    assert!(detail.starts_with("duplicate key 'secret'") && detail.contains("line 2"), "{detail}");
    let (status, code, pointer, detail) = send("application/json", "{\"rloo\": {\"beta\": 0, \"beta\": 1}}").await;
    assert_eq!((status, code.as_str(), pointer.as_str()), (422, "invalid_body", "/rloo/beta"));
    assert!(detail.starts_with("duplicate key 'beta'"), "{detail}");
    let inline = "{\"dataset\": {\"records\": [\n{\"prompt\": \"a\", \"id\": 123456789012345678901234567890}]}}";
    let (status, code, _, detail) = send("application/json", inline).await;
    assert_eq!((status, code.as_str()), (422, "invalid_body"));
    assert!(detail.contains("write it as a string") && detail.contains("line 2, column 23"), "{detail}");
    for url in ["http://u:CANARY@exa mple/", "http://u:CANARY@rm.example/", "http://[CANARY"] {
        let answer = server.post("/webhooks", json!({"url": url})).await;
        assert!(answer.status == 422 && !answer.text.contains("CANARY"), "{}", answer.text);
    }
}

#[tokio::test]
async fn what_a_dry_run_answers_is_what_the_document_says() {
    let server = Server::start().await;
    let document = serde_json::to_value(rlood::http::openapi()).unwrap();
    let fits = |answer: &Value| {
        let (mut schemas, mut compiler) = (boon::Schemas::new(), boon::Compiler::new());
        compiler.add_resource("urn:rlood", document.clone()).unwrap();
        let index = compiler.compile("urn:rlood#/components/schemas/Validation", &mut schemas).unwrap();
        schemas.validate(answer, index).map_err(|error| format!("{error:#}"))
    };
    let inline =
        server.post("/jobs/validate", with(job(), "eval", json!({"dataset": {"records": records(2)}}))).await.body;
    assert_eq!(inline["valid"], true, "{inline}");
    assert_eq!((&inline["plan"]["dataset"]["id"], &inline["plan"]["dataset"]["sha256"]), (&Value::Null, &Value::Null));
    let partial = server.post("/jobs/validate?from=trl", json!({"learning_rate": 1e-5, "max_steps": 2})).await.body;
    assert!(partial["spec"]["rewards"].is_null() && partial["spec"]["dataset"].is_null(), "{partial}");
    let invalid = server.post("/jobs/validate", json!({})).await.body;
    for answer in [&inline, &partial, &invalid] {
        assert_eq!(fits(answer), Ok(()), "{answer}");
    }
    let mut wrong = inline.clone();
    wrong["plan"]["dataset"]["id"] = json!(7);
    assert!(fits(&wrong).is_err());
}

#[tokio::test]
async fn a_run_of_trl_is_checked_as_a_job() {
    let server = Server::start().await;
    let yaml = "learning_rate: 1e-5\nnum_generations: 4\nper_device_train_batch_size: 8\nmax_steps: 20\nkl_coef: 0.1\nmax_completion_length: 8\n\
                lora_r: 4\nuse_peft: true\nlora_dropout: 0\nlora_alpha: 8\noutput_dir: out\n";
    let send = async |kind: &str, body: String| {
        let request =
            Request::post("/jobs/validate?from=trl").header(header::CONTENT_TYPE, kind).body(Body::from(body)).unwrap();
        let answer = server.send(request).await;
        assert_eq!(answer.status, 200, "{}", answer.text);
        answer.body
    };
    // A bare configuration: the job, and the missing fields.
    let answer = send("application/yaml", yaml.to_owned()).await;
    assert_eq!((&answer["valid"], &answer["plan"]), (&json!(false), &Value::Null));
    let missing: Vec<_> = answer["errors"].as_array().unwrap().iter().map(|e| (&e["pointer"], &e["code"])).collect();
    let required = json!("required");
    assert_eq!(
        missing,
        [(&json!("/rewards"), &required), (&json!("/model"), &required), (&json!("/dataset"), &required)]
    );
    assert_eq!(answer["spec"]["rloo"]["beta"], 0.1);
    assert_eq!(answer["ignored"][0]["key"], "output_dir");
    // With the missing fields next to it the job is valid, and equals `spec`.
    let whole = format!(
        "{yaml}model: plain\ndataset: [{{prompt: a, answer: '1'}}, {{prompt: b, answer: '2'}}]\nrewards: [{{type: length}}]\n"
    );
    let answer = send("application/yaml", whole).await;
    assert_eq!(
        (&answer["valid"], &answer["errors"], &answer["unsupported"]),
        (&json!(true), &json!([]), &json!([])),
        "{answer}"
    );
    assert_eq!(answer["plan"]["training"]["prompts_per_step"], 2);
    assert_eq!(server.post("/jobs", answer["spec"].clone()).await.status, 201);
    // Refused keys with their place; an unsupported key makes the job invalid.
    let config = json!({"config": {"num_generations": 3, "push_to_hub": true, "temperature": -1}, "model": "plain"});
    let answer = send("application/json", config.to_string()).await;
    assert_eq!((&answer["valid"], &answer["unsupported"][0]["key"]), (&json!(false), &json!("push_to_hub")));
    let pointers: Vec<_> =
        answer["errors"].as_array().unwrap().iter().map(|error| error["pointer"].as_str().unwrap()).collect();
    assert!(pointers.contains(&"/config/num_generations") && pointers.contains(&"/config/temperature"), "{pointers:?}");
    let answer = server.post("/jobs/validate?from=verl", json!({})).await;
    assert_eq!((answer.status.as_u16(), &answer.body["code"]), (422, &json!("unsupported")));
}

#[tokio::test]
async fn the_configuration_can_be_submitted_again_and_shows_no_secret() {
    let server = Server::start().await;
    let mut document = job();
    document["rewards"] = json!([
        {"type": "webhook", "name": "rm", "url": "http://127.0.0.1:9/score", "secret": SECRET, "headers": {"x-key": "hush"}, "params": {"a": null}},
        {"type": "contains", "text": "x", "weight": 0}
    ]);
    document["eval"] = json!({"dataset": {"records": records(3)}, "temperature": 0.5});
    document["rloo"] = json!({"kl_coef": 0.1, "reward_clip_range": [-1, 1]});
    document["metadata"] = json!({"team": "x"});
    let id = server.create(document).await;
    let config = server.get(&format!("/jobs/{id}/config")).await;
    assert_eq!(config.status, 200);
    let again = server.post("/jobs", config.body.clone()).await;
    assert_eq!(again.status, 201, "{}", again.text);
    let first = server.get(&format!("/jobs/{id}")).await;
    assert_eq!(first.body["plan"], again.body["plan"]);
    assert_eq!(again.body["plan"]["rloo"]["reward_clip_range"], json!([-1.0, 1.0]));
    for text in [&config.text, &first.text, &again.text, &server.get(&format!("/jobs/{id}/events")).await.text] {
        assert!(!text.contains("whsec_") && !text.contains("hush"), "{text}");
    }
    assert_eq!(server.state.store.job_secrets(id).await.unwrap()["rm"].secret.as_deref(), Some(SECRET));
    assert_eq!(server.get(&format!("/jobs/{id}/config?format=toml")).await.status, 400);
}

#[test]
fn the_document_describes_a_submitted_job() {
    let document = serde_json::to_value(rlood::http::openapi()).unwrap();
    let spec = &document["components"]["schemas"]["JobSpec"];
    assert_eq!(spec["required"], json!(["model", "dataset", "rewards"]));
    assert_eq!(spec["additionalProperties"], json!(false));
    assert_eq!(spec["properties"]["rloo"]["properties"]["beta"]["default"], json!(0.05));
    assert_eq!(spec["properties"]["rloo"]["required"], Value::Null);
    let named = |reference: &Value| {
        let name = reference["$ref"].as_str().and_then(|name| name.strip_prefix("#/components/schemas/"));
        document["components"]["schemas"][name.unwrap()].clone()
    };
    let rewards = named(&spec["properties"]["rewards"]["items"]);
    let webhook = named(&rewards["oneOf"][0]);
    assert_eq!(webhook["required"], json!(["type", "url"]));
    assert_eq!(
        (&webhook["properties"]["secret"]["writeOnly"], &webhook["properties"]["timeout_ms"]["default"]),
        (&json!(true), &json!(30_000))
    );
    // Every reference in the document resolves.
    let text = document.to_string();
    for reference in text.split("\"#/components/schemas/").skip(1).filter_map(|rest| rest.split('"').next()) {
        assert!(document["components"]["schemas"].get(reference).is_some(), "{reference}");
    }
}
