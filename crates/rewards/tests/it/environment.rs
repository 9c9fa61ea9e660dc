//! The client of environments: retries, forgotten episodes, answers that are not valid, and the journal.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::body::Body;
use axum::http::Response;
use rlood_rewards::RewardFailure;
use rlood_rewards::client::{Pace, RewardClient};
use rlood_rewards::webhook::EnvironmentClient;
use rlood_types::environment::{
    Ask, EpisodeCall, EpisodeId, EpisodeLimits, EpisodeStop, Reply, Reset, Step, StepAnswer,
};
use rlood_types::event::FinishReason;
use rlood_types::id::JobId;
use rlood_types::outgoing::OutgoingPolicy;
use rlood_types::rollout::RolloutId;
use rlood_types::spec::{EnvironmentPlan, RewardSecrets};
use serde_json::{Value, json};

use crate::journal::Book;
use crate::service::{Service, ok, text};

pub fn plan(url: &str) -> EnvironmentPlan {
    serde_json::from_value(json!({
        "name": "game", "type": "http", "params": {"level": 3}, "max_turns": 4, "max_episode_tokens": 100,
        "max_observation_tokens": 20, "return": "sum", "tool_parser": "auto", "on_parse_error": "reply",
        "max_parse_errors": 2, "max_restarts": 1, "url": url, "max_concurrency": 4, "max_batch_samples": 1,
        "max_batch_bytes": 1_000_000, "timeout_ms": 2_000, "deadline_ms": 10_000, "max_tries": 3,
        "max_invalid_tries": 1, "on_invalid": "mask", "max_outage_s": 1
    }))
    .unwrap()
}

fn client(service: &Service, job: JobId, book: Option<Arc<Book>>) -> EnvironmentClient {
    client_of(&plan(&service.url()), job)
        .with_journal(book.map(|book| book as Arc<dyn rlood_rewards::journal::Journal>))
}

pub fn client_of(plan: &EnvironmentPlan, job: JobId) -> EnvironmentClient {
    let policy = OutgoingPolicy::parse(&["127.0.0.1/32"]).unwrap();
    let client = RewardClient::new(&policy).unwrap().with_pace(Pace::new(0.001).unwrap());
    let secrets = RewardSecrets {
        secret: Some("whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=".to_owned()),
        ..RewardSecrets::default()
    };
    EnvironmentClient::new(plan, &secrets, &client, job).unwrap()
}

pub fn reset() -> EpisodeCall {
    let limits = EpisodeLimits { max_turns: 4, max_tokens: 100 };
    let messages = vec![json!({"role": "user", "content": "play"})];
    let reset = Reset { seed: 12, messages, columns: Default::default(), limits };
    EpisodeCall { episode: EpisodeId { row: 3, index: 1, attempt: 0 }, ask: Ask::Reset(Box::new(reset)) }
}

pub fn step(turn: u32) -> EpisodeCall {
    let step = Step {
        turn,
        session: Some("s".to_owned()),
        message: json!({"role": "assistant", "content": "up"}),
        text: "up".to_owned(),
        finish_reason: FinishReason::Stop,
        num_tokens: 2,
        turns_left: 3 - turn,
        tokens_left: 90,
        is_final: turn == 3,
    };
    EpisodeCall { ask: Ask::Step(Box::new(step)), ..reset() }
}

/// Asks for turn 0 of an episode, of a service that gives these answers in turn and repeats the last one.
async fn asked(answers: Vec<Response<Body>>) -> (Result<Reply, RewardFailure>, Vec<Value>) {
    let answers = std::sync::Mutex::new((answers.into_iter(), None));
    let service = Service::start(move |_, _| {
        let mut answers = answers.lock().unwrap();
        match answers.0.next() {
            Some(answer) => {
                answers.1 = Some(answer.status().as_u16());
                answer
            }
            None => text(answers.1.unwrap_or(500), ""),
        }
    })
    .await;
    let replies = client(&service, JobId::new(), None).ask(RolloutId::train(1), &[step(0)]).await;
    (replies.map(|mut replies| replies.remove(0)), service.requests())
}

#[tokio::test]
async fn a_question_carries_what_the_contract_says_and_its_id_is_the_same_in_every_attempt() {
    let service = Service::start(|_, request| {
        let is_reset = request["type"] == "env.reset.request";
        ok(&match is_reset {
            true => json!({"version": "1", "id": request["id"], "session": "s", "tools": [], "messages": []}),
            false => json!({"version": "1", "id": request["id"], "reward": 0.5, "done": true, "metrics": {"moves": 3}}),
        })
    })
    .await;
    let job = JobId::new();
    let close = EpisodeCall { ask: Ask::Close(EpisodeStop::EnvDone), ..reset() };
    for _ in 0..2 {
        let environment = client(&service, job, None);
        let replies = environment.ask(RolloutId::train(1), &[reset(), step(0), step(3), close.clone()]).await.unwrap();
        assert!(matches!(&replies[0], Reply::Reset(answer) if answer.session.as_deref() == Some("s")), "{replies:?}");
        assert!(matches!(&replies[1], Reply::Step(answer) if answer.reward == Some(0.5) && answer.done), "{replies:?}");
        assert_eq!(replies[3], Reply::Closed);
        assert_eq!(environment.is_reachable().await, Ok(()));
    }
    let requests = service.requests();
    let ids = |kind: &str| -> Vec<&Value> {
        requests.iter().filter(|request| request["type"] == kind).map(|request| &request["id"]).collect()
    };
    let steps = ids("env.step.request");
    let distinct: std::collections::BTreeSet<String> = steps.iter().map(ToString::to_string).collect();
    assert_eq!((steps.len(), distinct.len()), (4, 2), "one id for each turn");
    let first = requests.iter().find(|request| request["type"] == "env.step.request" && request["turn"] == 3).unwrap();
    assert_eq!(
        (&first["final"], &first["session"], &first["environment"]),
        (&json!(true), &json!("s"), &json!({"name": "game", "params": {"level": 3}}))
    );
    let begun = requests.iter().find(|request| request["type"] == "env.reset.request").unwrap();
    assert_eq!((&begun["episode"]["seed"], &begun["episode"]["prompt_id"]), (&json!(12), &json!("row_3")));
    let seen = service.seen.lock().unwrap();
    for (headers, body) in seen.iter() {
        let request: Value = serde_json::from_slice(body).unwrap();
        assert!(
            headers.contains_key("webhook-signature") && headers["idempotency-key"] == request["id"].as_str().unwrap()
        );
        if request["type"] != "env.ping" {
            assert_eq!(headers["rlood-episode"], request["episode"]["id"].as_str().unwrap());
        }
    }
}

#[tokio::test]
async fn failures_are_retried_forgotten_episodes_are_lost_and_other_errors_leave_no_reward() {
    let good = || ok(&json!({"version": "1", "reward": 1.0, "done": true}));
    let (reply, requests) = asked(vec![text(503, "busy"), text(500, ""), good()]).await;
    assert!(matches!(reply, Ok(Reply::Step(_))), "{reply:?}");
    assert!(requests.len() == 3 && requests.iter().all(|request| *request == requests[0]), "the same bytes each time");
    for status in [404, 410] {
        assert_eq!(asked(vec![text(status, "")]).await.0, Ok(Reply::Lost));
    }
    let (reply, requests) = asked(vec![text(409, "another turn")]).await;
    assert!(matches!(&reply, Ok(Reply::Failed { code, .. }) if code == "refused") && requests.len() == 1, "{reply:?}");
    let reported =
        |retryable: bool| ok(&json!({"version": "1", "error": {"code": "sandbox_full", "retryable": retryable}}));
    assert!(matches!(asked(vec![reported(true), good()]).await.0, Ok(Reply::Step(_))));
    let (reply, requests) = asked(vec![reported(false)]).await;
    assert!(
        matches!(&reply, Ok(Reply::Failed { code, .. }) if code == "sandbox_full") && requests.len() == 1,
        "{reply:?}"
    );
    for invalid in [
        "no JSON",
        r#"{"version": "2"}"#,
        r#"{"reward": "1"}"#,
        r#"{"reward": NaN}"#,
        r#"{"done": 1}"#,
        r#"{"id": "env_of_another"}"#,
    ] {
        let (reply, requests) = asked(vec![text(200, invalid), text(200, invalid)]).await;
        assert!(matches!(&reply, Ok(Reply::Failed { code, .. }) if code == "invalid_answer"), "{invalid}: {reply:?}");
        assert_eq!(requests.len(), 2, "{invalid}");
    }
    // A 202 needs a way for the answer: here there is no status_url, and no server that takes callbacks.
    let (reply, requests) = asked(vec![text(202, "{}"), text(202, "{}")]).await;
    assert!(
        matches!(&reply, Ok(Reply::Failed { code, message }) if code == "invalid_answer" && message.contains("answered 202")),
        "{reply:?}"
    );
    assert_eq!(requests.len(), 2);
    let (reply, _) = asked(vec![text(503, "")]).await;
    assert!(matches!(reply, Err(RewardFailure::Outage { .. })), "{reply:?}");
}

#[tokio::test]
async fn an_answer_in_the_journal_is_used_again_and_its_question_is_not_asked() {
    let service = Service::start(|count, _| match count {
        0 => {
            ok(&json!({"version": "1", "reward": 0.25, "done": false, "messages": [{"role": "user", "content": "a"}]}))
        }
        1 => text(404, ""),
        _ => text(500, "asked again"),
    })
    .await;
    let (job, book) = (JobId::new(), Arc::new(Book::default()));
    let of = |turn: u32, book: &Arc<Book>| {
        let environment = client(&service, job, Some(book.clone()));
        async move { environment.ask(RolloutId::train(2), &[step(turn)]).await.map(|mut replies| replies.remove(0)) }
    };
    // The time of an answer is no part of it.
    let untimed = |reply: Reply| match reply {
        Reply::Step(answer) => Reply::Step(StepAnswer { latency_ms: None, ..answer }),
        other => other,
    };
    let first = untimed(of(0, &book).await.unwrap());
    assert_eq!(of(1, &book).await, Ok(Reply::Lost));
    assert_eq!(book.appended.load(Ordering::SeqCst), 4, "question and answer");
    assert_eq!(of(0, &book).await.unwrap(), first);
    assert_eq!(of(1, &book).await, Ok(Reply::Lost));
    assert_eq!(service.requests().len(), 2);

    // Nothing is asked that cannot be recorded, and no answer is used.
    let full = Arc::new(Book { lost_at: Some((1, false)), ..Book::default() });
    assert!(matches!(of(2, &full).await, Err(RewardFailure::JournalClosed { .. })));
    assert_eq!(service.requests().len(), 2);
}
