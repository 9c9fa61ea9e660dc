//! `POST /jobs/{id}/rescore`: another reward over stored samples.

use std::collections::BTreeMap;

use rlood::event::{Event, FinishReason, Sample, SamplePhase};
use rlood::id::JobId;
use serde_json::{Value, json};

use crate::server::{SECRET, Server, job, pointers, with};
use crate::service::{Service, ok, text};

/// A sample of row `row` with this number as its answer.
fn sample(step: u64, group: &str, row: u64, said: u64, right: bool, kl: f64) -> Sample {
    let reward = f64::from(u8::from(right));
    Sample {
        step,
        phase: SamplePhase::Train,
        group_id: group.to_owned(),
        prompt_id: format!("row_{row}"),
        prompt: format!("What is {row} + 1?"),
        completion: said.to_string(),
        rewards: BTreeMap::from([("number_match".to_owned(), Some(reward))]),
        reward: Some(reward),
        kl: Some(kl),
        advantage: Some(0.5),
        finish_reason: FinishReason::Stop,
        num_tokens: 1,
        episode: None,
    }
}

/// A job with two steps of two groups; each group has one right and two wrong answers.
async fn trained(server: &Server, spec: Value) -> JobId {
    let id = server.create(spec).await;
    let (claimed, attempt) = server.claim().await;
    assert_eq!(claimed, id);
    for step in 1..=2 {
        let mut samples = Vec::new();
        for row in [2 * step, 2 * step + 1] {
            let group = format!("g_{}_{}", step - 1, row % 2);
            samples.push(sample(step, &group, row, row + 1, true, 0.0));
            samples.push(sample(step, &group, row, row + 20, false, 0.0));
            samples.push(sample(step, &group, row, row + 300, false, 0.0));
        }
        server.report(id, attempt, step, vec![Event::Samples { samples }]).await;
    }
    id
}

async fn rescore(server: &Server, id: JobId, body: Value) -> Value {
    let answer = server.post(&format!("/jobs/{id}/rescore"), body).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    answer.body
}

#[tokio::test]
async fn the_same_reward_again_changes_nothing() {
    let server = Server::start().await;
    let id = trained(&server, job()).await;
    let found = rescore(&server, id, json!({"reward": {"type": "number_match", "column": "answer"}})).await;
    assert_eq!(
        (&found["replaces"], &found["samples"], &found["complete"]),
        (&json!("number_match"), &json!(12), &json!(true))
    );
    assert_eq!((&found["from_step"], &found["to_step"], &found["missing"]), (&json!(1), &json!(2), &json!(0)));
    assert_eq!(found["old"], found["new"]);
    assert_eq!(found["correlation"], json!({"pairs": 12, "pearson": 1.0, "spearman": 1.0}));
    assert_eq!(found["advantages"]["sign_changes"], 0);
    assert_eq!(found["advantages"]["mean_abs_delta"], 0.0);
    assert_eq!(
        found["groups"],
        json!({"groups": 4, "rank_agreement": 1.0, "same_best": 4, "tied_old": 0, "tied_new": 0})
    );
    let first = &found["results"][0];
    assert_eq!((&first["step"], &first["prompt_id"], &first["index"]), (&json!(1), &json!("row_2"), &json!(0)));
    assert_eq!((&first["old"], &first["new"], &first["old_advantage"]), (&json!(1.0), &json!(1.0), &json!(1.0)));
    assert_eq!(found["results"][1]["new_advantage"], -0.5);
}

#[tokio::test]
async fn a_reward_of_the_other_mind_turns_every_advantage_round() {
    let server = Server::start().await;
    let id = trained(&server, job()).await;
    // Longer answers score higher; the right answers are the short ones.
    let reward = json!({"name": "long", "type": "length", "unit": "tokens", "min_tokens": 1, "max_tokens": 2});
    let tied = rescore(&server, id, json!({"reward": reward})).await;
    assert_eq!((&tied["groups"]["tied_new"], &tied["correlation"]["pearson"]), (&json!(4), &Value::Null));
    assert_eq!(tied["advantages"]["vanished"], 12, "equal rewards push nothing");

    let service = Service::start(|_, request| {
        let mark = |sample: &Value| -(f64::from(u8::from(sample["completion"].as_str().unwrap().len() == 1)));
        ok(&json!({"rewards": request["samples"].as_array().unwrap().iter().map(mark).collect::<Vec<_>>()}))
    })
    .await;
    let reward = json!({"name": "short", "type": "webhook", "url": service.url()});
    let found = rescore(&server, id, json!({"reward": reward, "replaces": "number_match"})).await;
    assert_eq!((&found["correlation"]["pearson"], &found["correlation"]["spearman"]), (&json!(-1.0), &json!(-1.0)));
    assert_eq!((&found["advantages"]["sign_changes"], &found["advantages"]["cosine"]), (&json!(12), &json!(-1.0)));
    assert_eq!(found["advantages"]["sign_change_fraction"], 1.0);
    // Of three pairs in each group, the pair of two wrong answers stays a tie.
    assert!((found["groups"]["rank_agreement"].as_f64().unwrap() - 1.0 / 3.0).abs() < 1e-12, "{}", found["groups"]);
    assert_eq!(found["groups"]["same_best"], 0);

    // The service receives what a job would send: the row's columns, the phase, whole groups.
    let (_, body) = service.seen.lock().unwrap()[0].clone();
    let request: Value = serde_json::from_slice(&body).unwrap();
    assert_eq!(request["job"]["phase"], "probe");
    assert_eq!(request["samples"][0]["columns"], json!({"answer": 3}));
    assert_eq!(
        (&request["samples"][0]["group_id"], &request["samples"][3]["group_id"]),
        (&json!("g_0"), &json!("g_1"))
    );
}

#[tokio::test]
async fn kl_and_the_other_rewards_stay_in_the_advantages() {
    let server = Server::start().await;
    let rewards =
        json!([{"type": "number_match", "column": "answer"}, {"name": "other", "type": "length", "weight": 0.5}]);
    let id = server.create(with(with(job(), "rewards", rewards), "rloo", json!({"beta": 0.1}))).await;
    let (_, attempt) = server.claim().await;
    let samples = [(1.0, Some(2.0), 1.0), (0.0, None, 0.0)].map(|(matched, other, kl)| Sample {
        rewards: BTreeMap::from([("number_match".to_owned(), Some(matched)), ("other".to_owned(), other)]),
        reward: Some(if other.is_some() { 2.0 } else { 0.0 }),
        ..sample(1, "g", 4, 5, true, kl)
    });
    server.report(id, attempt, 1, vec![Event::Samples { samples: samples.to_vec() }]).await;
    let body = json!({"reward": {"type": "regex", "pattern": "5", "weight": 2.0}, "replaces": "number_match"});
    let found = rescore(&server, id, body).await;
    // 2·1 + 0.5·2 − 0.1·1 = 2.9; for the other sample the reward `other` does not apply: 2·1·(2.5/2) = 2.5.
    let advantage = |at: usize| found["results"][at]["new_advantage"].as_f64().unwrap();
    assert!((advantage(0) - 0.4).abs() < 1e-12 && (advantage(1) + 0.4).abs() < 1e-12, "{found}");
    assert!((found["results"][0]["old_advantage"].as_f64().unwrap() - 1.9).abs() < 1e-12);
    let whole = rescore(&server, id, json!({"reward": {"name": "all", "type": "regex", "pattern": "5"}})).await;
    assert_eq!((&whole["replaces"], &whole["results"][0]["old"]), (&Value::Null, &json!(2.0)));
}

#[tokio::test]
async fn the_newest_samples_come_in_whole_groups_and_steps_can_be_chosen() {
    let server = Server::start().await;
    let id = trained(&server, job()).await;
    let reward = json!({"type": "number_match", "column": "answer"});
    for (choice, count, from) in [
        (json!({"limit": 7}), 6, 2),
        (json!({"limit": 3}), 3, 2),
        (json!({"limit": 1}), 3, 2),
        (json!({"step": 1}), 6, 1),
        (json!({"max_step": 1, "limit": 4}), 3, 1),
        (json!({"min_step": 2}), 6, 2),
        (json!({"limit": 12}), 12, 1),
    ] {
        let mut body = choice.clone();
        body["reward"] = reward.clone();
        let found = rescore(&server, id, body).await;
        assert_eq!((&found["samples"], &found["from_step"]), (&json!(count), &json!(from)), "{choice}");
        let groups = found["results"].as_array().unwrap().iter().filter(|result| result["index"] == 2).count();
        assert_eq!(groups * 3, count, "{choice}: groups are whole");
    }
}

#[tokio::test]
async fn what_a_service_cannot_say_is_missing_and_told() {
    let server = Server::start().await;
    let id = trained(&server, job()).await;
    let picky = Service::start(|_, request| {
        let result = |(at, sample): (usize, &Value)| match at % 3 {
            0 => json!({"sample_id": sample["sample_id"], "reward": null, "error": {"code": "refused", "message": "not this one"}}),
            1 => json!({"sample_id": sample["sample_id"], "reward": null}),
            _ => json!({"sample_id": sample["sample_id"], "reward": at, "reason": "so"}),
        };
        let results: Vec<Value> = request["samples"].as_array().unwrap().iter().enumerate().map(result).collect();
        ok(&json!({"version": "1", "id": request["id"], "results": results}))
    })
    .await;
    let reward = json!({"type": "webhook", "url": picky.url(), "secret": SECRET, "headers": {"x-key": "hidden-value"}});
    let answer = server.post(&format!("/jobs/{id}/rescore"), json!({"reward": reward})).await;
    let found = &answer.body;
    assert_eq!(
        (&found["missing"], &found["not_applicable"], &found["new"]["count"]),
        (&json!(4), &json!(4), &json!(4))
    );
    assert_eq!(found["errors"], json!([{"code": "refused", "message": "not this one", "count": 4}]));
    assert_eq!((&found["results"][2]["reason"], &found["complete"]), (&json!("so"), &json!(true)));
    assert!(!answer.text.contains("hidden-value") && !answer.text.contains("whsec_"));

    let hanging = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/", hanging.local_addr().unwrap());
    let reward = json!({"type": "webhook", "url": url});
    let found = rescore(&server, id, json!({"reward": reward, "max_wait_s": 1})).await;
    assert_eq!((&found["complete"], &found["missing"]), (&json!(false), &json!(12)));
    assert_eq!(found["errors"][0]["code"], "not_in_time");
    assert_eq!(
        (&found["new"]["mean"], &found["correlation"]["pearson"]),
        (&Value::Null, &Value::Null),
        "nothing is invented"
    );

    let gone = Service::start(|_, _| text(410, "")).await;
    let found = rescore(&server, id, json!({"reward": {"type": "webhook", "url": gone.url()}})).await;
    assert_eq!((&found["errors"][0]["code"], &found["complete"]), (&json!("reward_gone"), &json!(false)));
}

#[tokio::test]
async fn a_reward_of_the_job_lends_its_secret_to_the_same_address_only() {
    let server = Server::start().await;
    let answers =
        |_: usize, request: &Value| ok(&json!({"rewards": vec![0.5; request["samples"].as_array().unwrap().len()]}));
    let (own, other) = (Service::start(answers).await, Service::start(answers).await);
    let rewards = json!([{"name": "number_match", "type": "webhook", "url": own.url(), "secret": SECRET, "headers": {"x-key": "k-value"}}]);
    let id = trained(&server, with(job(), "rewards", rewards)).await;
    for (service, signed) in [(&own, true), (&other, false)] {
        rescore(&server, id, json!({"reward": {"type": "webhook", "url": service.url()}})).await;
        let (headers, _) = service.seen.lock().unwrap()[0].clone();
        assert_eq!(headers.contains_key("webhook-signature"), signed);
        assert_eq!(headers.get("x-key").is_some(), signed);
    }
}

#[tokio::test]
async fn what_cannot_be_re_scored_says_why() {
    let server = Server::start().await;
    let id = trained(&server, job()).await;
    let path = format!("/jobs/{id}/rescore");
    let answer = server
        .post(&path, json!({"reward": {"type": "lenght"}, "phase": "test", "limit": 0, "step": 1, "min_step": -1, "max_wait_s": 9999, "replaces": "x", "x": 1}))
        .await;
    assert_eq!(answer.status, 422);
    let mut found = pointers(&answer);
    found.sort();
    let expected = [
        "/limit out_of_range",
        "/max_wait_s out_of_range",
        "/min_step out_of_range",
        "/phase invalid_value",
        "/replaces invalid_value",
        "/reward/type invalid_value",
        "/x unknown_field",
    ];
    assert_eq!(found, expected, "{}", answer.text);
    assert_eq!(pointers(&server.post(&path, json!({})).await), ["/reward required"]);
    let refused = server.post(&path, json!({"reward": {"type": "webhook", "url": "http://10.0.0.1/"}})).await;
    assert_eq!((refused.status.as_u16(), pointers(&refused)), (422, vec!["/reward unusable".to_owned()]));
    assert!(refused.text.contains("--allow-outgoing"), "{}", refused.text);
    let reward = json!({"type": "length"});
    let none = server.post(&path, json!({"reward": reward, "min_step": 100})).await;
    assert_eq!(none.status, 404);
    assert!(none.text.contains("no stored samples"), "{}", none.text);
    let eval = server.post(&path, json!({"reward": reward, "phase": "eval"})).await;
    assert_eq!(eval.status, 404);
    assert_eq!(server.post(&format!("/jobs/{}/rescore", JobId::new()), json!({"reward": reward})).await.status, 404);
}
