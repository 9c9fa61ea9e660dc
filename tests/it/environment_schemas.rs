//! The environment contract as JSON Schema: what the client sends and what servers answer is valid, and what breaks the contract is not.

use rlood::commands::env_check::examine;
use rlood::environment::{Ask, EpisodeCall, EpisodeId, EpisodeLimits, EpisodeStop, Reply, Reset, Step};
use rlood::event::FinishReason;
use rlood::id::JobId;
use rlood::outgoing::OutgoingPolicy;
use rlood::reward::client::RewardClient;
use rlood::reward::webhook::EnvironmentClient;
use rlood::rollout::RolloutId;
use rlood::spec::read_single_environment;
use serde_json::{Value, json};

use crate::env_serve::env_args;
use crate::reward_schemas::{complaint, fits};
use crate::service::{Service, ok};

/// The schema file of a request.
fn file_of(request: &Value) -> &'static str {
    match request["type"].as_str() {
        Some("env.reset.request") => "env-reset.schema.json",
        Some("env.step.request") => "env-step.schema.json",
        Some("env.close.request") => "env-close.schema.json",
        Some("env.ping") => "env-ping.schema.json",
        other => panic!("{other:?}"),
    }
}

fn answer_to(request: &Value) -> Value {
    let id = &request["id"];
    match request["type"].as_str() {
        Some("env.reset.request") => json!({"version": "1", "id": id, "session": "s",
            "messages": [{"role": "user", "content": "Go."}], "tools": [{"type": "function", "function": {"name": "look"}}]}),
        Some("env.step.request") => {
            json!({"version": "1", "id": id, "reward": 0.5, "done": true, "metrics": {"moves": 3},
            "messages": [{"role": "user", "content": "Done."}]})
        }
        _ => json!({"version": "1", "id": id}),
    }
}

#[tokio::test]
async fn what_a_job_asks_and_what_servers_answer_fit() {
    let service = Service::start(|_, request| ok(&answer_to(request))).await;
    let document = json!({"environment": {"url": service.url(), "params": {"level": 3}}});
    let (plan, secrets) = read_single_environment(&document).unwrap();
    let client = RewardClient::new(&OutgoingPolicy::parse(&["loopback"]).unwrap()).unwrap();
    let client = EnvironmentClient::new(&plan, &secrets, &client, JobId::new()).unwrap();
    let episode = EpisodeId { row: 3, index: 1, attempt: 0 };
    let reset = Reset {
        seed: (1 << 53) - 1,
        messages: vec![json!({"role": "user", "content": "play"})],
        columns: json!({"answer": 4}).as_object().unwrap().clone(),
        limits: EpisodeLimits { max_turns: 4, max_tokens: 100 },
    };
    let call = json!({"id": "call_0_0", "type": "function", "function": {"name": "look", "arguments": "{}"}});
    let step = Step {
        turn: 0,
        session: None,
        message: json!({"role": "assistant", "content": "", "tool_calls": [call]}),
        text: "up".to_owned(),
        finish_reason: FinishReason::Stop,
        num_tokens: 2,
        turns_left: 3,
        tokens_left: 90,
        is_final: false,
    };
    let later = Step {
        turn: 2,
        session: Some("s".to_owned()),
        is_final: true,
        finish_reason: FinishReason::Length,
        ..step.clone()
    };
    let asks = [
        Ask::Reset(Box::new(reset)),
        Ask::Step(Box::new(step)),
        Ask::Step(Box::new(later)),
        Ask::Close(EpisodeStop::MaxTokens),
    ];
    let calls: Vec<EpisodeCall> = asks.into_iter().map(|ask| EpisodeCall { episode: episode.clone(), ask }).collect();
    for rollout in [RolloutId::train(3), RolloutId::train(4)] {
        let replies = client.ask(rollout, &calls).await.unwrap();
        assert!(
            matches!(&replies[..], [Reply::Reset(_), Reply::Step(_), Reply::Step(_), Reply::Closed]),
            "{replies:?}"
        );
    }
    client.is_reachable().await.unwrap();
    let seen = service.requests();
    assert_eq!(seen.len(), 9);
    for request in &seen {
        fits(file_of(request), request);
        match request["type"].as_str() {
            Some("env.reset.request") => fits("env-reset-answer.schema.json", &answer_to(request)),
            Some("env.step.request") => fits("env-step-answer.schema.json", &answer_to(request)),
            _ => {}
        }
    }
}

#[tokio::test]
async fn what_a_check_asks_is_a_request_of_the_contract_too() {
    let service = Service::start(|_, request| ok(&answer_to(request))).await;
    let report = examine(&env_args(&service.url()), false).await.unwrap();
    assert!(!report.findings.is_empty());
    let seen = service.seen.lock().unwrap();
    let seen: Vec<Value> = seen.iter().filter_map(|(_, body)| serde_json::from_slice(body).ok()).collect();
    let known = |request: &&Value| request["version"] == "1" && request["from_the_future"].is_null();
    let contract: Vec<&Value> = seen.iter().filter(known).filter(|request| request["episode"].is_object()).collect();
    let contract: Vec<&Value> =
        contract.into_iter().filter(|request| request["type"] != "env.something.else").collect();
    assert!(contract.len() > 20, "{}", contract.len());
    contract.into_iter().for_each(|request| fits(file_of(request), request));
}

#[test]
fn answers_that_break_the_contract_do_not_fit() {
    for answer in [json!({}), json!({"error": {"code": "sandbox_full", "retryable": true}}), json!({"reward": null})] {
        fits("env-step-answer.schema.json", &answer);
    }
    for answer in [
        json!({"reward": "1"}),
        json!({"messages": "text"}),
        json!({"done": "yes"}),
        json!({"version": "2"}),
        json!({"error": "sandbox_full"}),
    ] {
        assert!(complaint("env-step-answer.schema.json", &answer).is_some(), "{answer}");
    }
    assert!(complaint("env-reset-answer.schema.json", &json!({"tools": {}})).is_some());
    for callback in [json!({"reward": 0.5, "done": true}), json!({"session": "s", "tools": []}), json!({})] {
        fits("env-callback.schema.json", &callback);
    }
    for callback in [json!({"reward": "1"}), json!({"tools": {}}), json!({"version": "2"})] {
        assert!(complaint("env-callback.schema.json", &callback).is_some(), "{callback}");
    }
    fits("env-accepted.schema.json", &json!({"eta_ms": 5, "status_url": "/s"}));
    fits("env-accepted.schema.json", &json!({}));
    fits("env-ping-answer.schema.json", &json!({"version": "1", "reply_modes": ["sync", "async"]}));
    assert!(complaint("env-reset.schema.json", &json!({"type": "env.reset.request", "version": "1"})).is_some());
    let step = json!({"type": "env.reset.request", "version": "1", "id": "env_1"});
    assert!(complaint("env-ping.schema.json", &step).is_some());
}
