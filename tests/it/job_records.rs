//! Records of a job over HTTP: metrics, samples, comparisons.

use axum::http::header;
use rlood::event::{Event, FinishReason, Sample, SamplePhase};
use serde_json::{Value, json};

use crate::server::{Server, job, sample, step, with};

#[tokio::test]
async fn metrics_come_merged_thinned_and_in_three_forms() {
    let server = Server::start().await;
    let id = server.create(job()).await;
    let (_, attempt) = server.claim().await;
    let mut events = vec![step(0, SamplePhase::Eval, &[("eval_reward", Some(0.25))])];
    for n in 1..=300_u64 {
        let reward = match n {
            137 => 9.5,
            211 => -7.25,
            _ => (n as f64 * 0.37).sin(),
        };
        events.push(step(
            n,
            SamplePhase::Train,
            &[("reward", Some(reward)), ("kl", Some(0.001 * n as f64)), ("reward_std", None)],
        ));
        if n % 100 == 0 {
            events.push(step(n, SamplePhase::Eval, &[("eval_reward", Some(0.5))]));
        }
    }
    server.report(id, attempt, 0, events).await;
    let path = format!("/jobs/{id}/metrics");
    let all = server.get(&path).await;
    let rows = all.body["data"].as_array().unwrap();
    assert_eq!((rows.len(), &all.body["next"]), (301, &Value::Null));
    assert_eq!(rows[0], json!({"step": 0, "eval_reward": 0.25}));
    assert_eq!(
        rows[100],
        json!({"step": 100, "eval_reward": 0.5, "kl": 0.1, "reward": (37.0_f64).sin(), "reward_std": null})
    );

    let thin = server.get(&format!("{path}?keys=reward&max_points=20")).await;
    let rows = thin.body["data"].as_array().unwrap();
    assert!((8..=20).contains(&rows.len()), "{}", rows.len());
    assert!(
        rows.contains(&json!({"step": 137, "reward": 9.5})) && rows.contains(&json!({"step": 211, "reward": -7.25}))
    );
    assert_eq!((&rows[0]["step"], &rows[rows.len() - 1]["step"]), (&json!(1), &json!(300)));
    assert_eq!(thin.text, server.get(&format!("{path}?keys=reward&max_points=20")).await.text);

    let range = server.get(&format!("{path}?keys=reward,kl&min_step=10&max_step=12")).await;
    let steps: Vec<_> =
        range.body["data"].as_array().unwrap().iter().map(|row| row["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, [10, 11, 12]);
    let csv = server.get(&format!("{path}?keys=eval_reward,reward_std&max_step=2&format=csv")).await;
    assert_eq!(
        (csv.headers[header::CONTENT_TYPE].to_str().unwrap(), csv.text.as_str()),
        ("text/csv; charset=utf-8", "step,eval_reward,reward_std\n0,0.25,\n1,,\n2,,\n")
    );
    let lines = server.get(&format!("{path}?keys=kl&min_step=1&max_step=2&format=ndjson")).await;
    assert_eq!(lines.text, "{\"step\":1,\"kl\":0.001}\n{\"step\":2,\"kl\":0.002}\n");
    for query in ["max_points=1", "format=xml", "min_step=x", "points=3"] {
        assert_eq!(server.get(&format!("{path}?{query}")).await.status, 400, "{query}");
    }

    let summary = server.get(&format!("/jobs/{id}/summary")).await;
    assert_eq!(summary.status, 200, "{}", summary.text);
    assert_eq!((&summary.body["reward"]["best"], &summary.body["reward"]["best_step"]), (&json!(9.5), &json!(137)));
    assert_eq!(
        summary.body["eval_reward"],
        json!({"first": 0.25, "last": 0.5, "best": 0.5, "best_step": 100, "change": 0.25})
    );
    assert_eq!(
        (&summary.body["checkpoints"]["count"], &summary.body["totals"]["optimizer_steps"]),
        (&json!(0), &json!(20))
    );
}

#[tokio::test]
async fn samples_are_sorted_searched_and_paged() {
    let server = Server::start().await;
    let id = server.create(job()).await;
    let (_, attempt) = server.claim().await;
    let samples = vec![
        sample(1, "alpha", Some(0.5)),
        sample(1, "beta", None),
        sample(2, "gamma", Some(1.5)),
        sample(2, "delta", Some(-1.0)),
    ];
    server.report(id, attempt, 0, vec![Event::Samples { samples }]).await;
    let path = format!("/jobs/{id}/samples");
    let found = async |query: &str| -> Vec<String> {
        let answer = server.get(&format!("{path}?{query}")).await;
        let data = answer.body["data"].as_array().unwrap_or_else(|| panic!("{}", answer.text));
        data.iter().map(|sample| sample["completion"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(found("sort=best").await, ["gamma", "alpha", "delta", "beta"]);
    assert_eq!(found("sort=worst&limit=2").await, ["delta", "alpha"]);
    assert_eq!(found("step=1&sort=best").await, ["alpha", "beta"]);
    assert_eq!(found("q=ALPH").await, ["alpha"]);
    assert_eq!(found("phase=eval").await, Vec::<String>::new());
    let first = server.get(&format!("{path}?sort=best&limit=3")).await;
    let rest = found(&format!("sort=best&limit=3&after={}", first.body["next"].as_str().unwrap())).await;
    assert_eq!(rest, ["beta"]);
    let keys: Vec<_> = first.body["data"][0].as_object().unwrap().keys().cloned().collect();
    assert_eq!(
        keys,
        [
            "step",
            "phase",
            "group_id",
            "prompt_id",
            "prompt",
            "completion",
            "rewards",
            "reward",
            "kl",
            "advantage",
            "finish_reason",
            "num_tokens"
        ]
    );
    assert_eq!(server.get(&format!("{path}?sort=random")).await.status, 400);
    let logs = server.get(&format!("/jobs/{id}/logs")).await;
    assert_eq!((&logs.body["data"][0]["line"], &logs.body["data"][0]["attempt"]), (&json!("batch 0"), &json!(attempt)));
}

#[tokio::test]
async fn keys_that_no_step_has_are_named_with_those_there_are() {
    let server = Server::start().await;
    let id = server.create(job()).await;
    let (_, attempt) = server.claim().await;
    let path = format!("/jobs/{id}/metrics?keys=reward,nope");
    // Before the first step there are no warnings.
    assert_eq!(server.get(&path).await.body, json!({"data": [], "next": null}));
    server.report(id, attempt, 0, vec![step(1, SamplePhase::Train, &[("reward", Some(0.5)), ("kl", None)])]).await;
    let answer = server.get(&path).await;
    assert_eq!(answer.body["data"], json!([{"step": 1, "reward": 0.5}]));
    assert_eq!(answer.body["warnings"], json!(["no step of the job has the metric 'nope' so far; it has: kl, reward"]));
}

#[tokio::test]
async fn parameters_that_are_no_numbers_say_so_in_words() {
    let server = Server::start().await;
    let id = server.create(job()).await;
    for (query, detail) in [
        ("metrics?min_step=x", "min_step: must be a whole number, not 'x'"),
        ("metrics?min_step=", "min_step: must be a whole number, not ''"),
        ("metrics?max_step=-1", "max_step: must not be negative"),
        (
            "metrics?max_step=99999999999999999999",
            "max_step: must be a whole number; '99999999999999999999' is too large",
        ),
        ("samples?min_reward=high", "min_reward: must be a number, not 'high'"),
        ("samples?min_reward=inf", "min_reward: must be a finite number"),
        ("samples?step=1&max_step=2", "step: set either step, or min_step and max_step"),
    ] {
        let answer = server.get(&format!("/jobs/{id}/{query}")).await;
        assert_eq!((answer.status.as_u16(), &answer.body["detail"]), (400, &json!(detail)), "{}", answer.text);
    }
}

/// Six samples over three steps, with reward ties and one unscorable sample.
fn several() -> Vec<Sample> {
    let texts = ["=1+1", "Grüße", "line\nbreak, \"quoted\"", "-0.5", "plain", "100% sure_thing"];
    let rewards = [Some(1.0), Some(0.5), Some(0.5), None, Some(0.5), Some(-2.5)];
    let mut samples: Vec<Sample> = texts
        .iter()
        .zip(rewards)
        .enumerate()
        .map(|(index, (text, reward))| sample(index as u64 / 2 + 1, text, reward))
        .collect();
    for (index, sample) in samples.iter_mut().enumerate() {
        sample.prompt_id = format!("row_{index}");
        sample.group_id = format!("g_{}", index / 2);
    }
    samples[5].finish_reason = FinishReason::Length;
    samples[4].phase = SamplePhase::Eval;
    samples
}

#[tokio::test]
async fn samples_are_found_by_every_filter_and_paged_without_gap_under_ties() {
    let server = Server::start().await;
    let id = server.create(job()).await;
    let (_, attempt) = server.claim().await;
    server.report(id, attempt, 0, vec![Event::Samples { samples: several() }]).await;
    let found = async |query: &str| -> Vec<String> {
        let answer = server.get(&format!("/jobs/{id}/samples?{query}")).await;
        let data = answer.body["data"].as_array().unwrap_or_else(|| panic!("{}", answer.text));
        data.iter().map(|sample| sample["prompt_id"].as_str().unwrap().to_owned()).collect()
    };
    for (query, rows) in [
        ("prompt_id=row_3", vec![3]),
        ("prompt_id=row", vec![]),
        ("group_id=g_1", vec![3, 2]),
        ("finish_reason=length", vec![5]),
        ("phase=eval", vec![4]),
        ("step=2", vec![3, 2]),
        ("min_step=2&max_step=3", vec![5, 4, 3, 2]),
        ("min_step=3", vec![5, 4]),
        ("min_reward=0.5", vec![4, 2, 1, 0]),
        ("min_reward=0.5&max_reward=0.5&sort=best", vec![1, 2, 4]),
        ("max_reward=0&sort=worst", vec![5]),
        ("sort=best", vec![0, 1, 2, 4, 5, 3]),
        ("sort=worst", vec![5, 4, 2, 1, 0, 3]),
        ("q=GR%C3%9C%C3%9FE", vec![1]),
        ("q=gr%C3%BC%C3%9Fe", vec![1]),
        ("q=%25", vec![5]),
        ("q=SURE_", vec![5]),
        ("q=%22quoted%22", vec![2]),
        ("q=line%0Abreak", vec![2]),
        ("q=finish_reason", vec![]),
    ] {
        let expected: Vec<String> = rows.iter().map(|row| format!("row_{row}")).collect();
        assert_eq!(found(query).await, expected, "{query}");
    }
    for sort in ["recent", "best", "worst"] {
        let whole = found(&format!("sort={sort}")).await;
        for limit in 1..=4 {
            let (mut paged, mut after) = (Vec::new(), String::new());
            loop {
                let answer = server.get(&format!("/jobs/{id}/samples?sort={sort}&limit={limit}{after}")).await;
                let ids = answer.body["data"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(|one| one["prompt_id"].as_str().unwrap().to_owned());
                paged.extend(ids);
                match answer.body["next"].as_str() {
                    Some(next) => after = format!("&after={next}"),
                    None => break,
                }
            }
            assert_eq!(paged, whole, "{sort}, pages of {limit}");
        }
    }
}

#[tokio::test]
async fn samples_are_downloaded_whole_and_a_spreadsheet_finds_no_formula() {
    let server = Server::start().await;
    let id = server.create(job()).await;
    let (_, attempt) = server.claim().await;
    // More rows than one piece of a download.
    let many = (0..1203).map(|index| sample(index / 4 + 4, "filler", Some(0.25)));
    let samples: Vec<Sample> = several().into_iter().chain(many).collect();
    server.report(id, attempt, 0, vec![Event::Samples { samples }]).await;
    let path = format!("/jobs/{id}/samples");
    let answer = server.get(&format!("{path}?format=ndjson&sort=best")).await;
    assert_eq!(answer.headers[header::CONTENT_TYPE], "application/x-ndjson");
    assert!(answer.headers[header::CONTENT_DISPOSITION].to_str().unwrap().ends_with("-samples.ndjson\""));
    let lines: Vec<Value> = answer.text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 1209);
    assert_eq!((&lines[0]["completion"], &lines[1208]["completion"]), (&json!("=1+1"), &json!("-0.5")));
    let answer = server.get(&format!("{path}?format=csv&q=%2B1")).await;
    assert_eq!(answer.headers[header::CONTENT_TYPE], "text/csv; charset=utf-8");
    let mut reader = csv::Reader::from_reader(answer.text.as_bytes());
    let head: Vec<String> = reader.headers().unwrap().iter().map(str::to_owned).collect();
    assert_eq!(
        head.join(","),
        "step,phase,group_id,prompt_id,prompt,completion,reward,rewards/number_match,kl,advantage,finish_reason,num_tokens"
    );
    let rows: Vec<csv::StringRecord> = reader.records().map(Result::unwrap).collect();
    assert_eq!((rows.len(), &rows[0][5], &rows[0][6]), (1, "'=1+1", "1.0"));
    let answer = server.get(&format!("{path}?format=csv&limit=700&sort=worst")).await;
    let mut reader = csv::Reader::from_reader(answer.text.as_bytes());
    assert_eq!(reader.records().map(Result::unwrap).count(), 700);
    // Numbers are not escaped, and texts keep their line breaks.
    assert!(answer.text.contains("-2.5"), "a negative number is no formula");
    let answer = server.get(&format!("{path}?format=csv&q=quoted")).await;
    let mut reader = csv::Reader::from_reader(answer.text.as_bytes());
    assert_eq!(&reader.records().next().unwrap().unwrap()[5], "line\nbreak, \"quoted\"");
    assert_eq!(server.get(&format!("{path}?format=csv&after=nonsense")).await.status, 400);
    assert_eq!(server.get(&format!("{path}?format=ndjson&q=nowhere")).await.text, "");
}

#[tokio::test]
async fn old_samples_make_room_and_the_newest_stay() {
    let server = Server::start().await;
    let id = server.create(job()).await;
    let (_, attempt) = server.claim().await;
    let batch = |step: u64, phase: SamplePhase| {
        let samples = (0..4).map(|_| Sample { phase, ..sample(step, &"x".repeat(500), Some(0.5)) }).collect();
        Event::Samples { samples }
    };
    let mut events: Vec<Event> = (1..=10).map(|step| batch(step, SamplePhase::Train)).collect();
    events.extend([batch(0, SamplePhase::Eval), batch(5, SamplePhase::Eval)]);
    server.report(id, attempt, 0, events).await;
    let store = &server.state.store;
    let steps = async |phase: &str| -> Vec<u64> {
        let answer = server.get(&format!("/jobs/{id}/samples?phase={phase}&limit=100")).await;
        let mut steps: Vec<u64> =
            answer.body["data"].as_array().unwrap().iter().map(|one| one["step"].as_u64().unwrap()).collect();
        steps.sort_unstable();
        steps.dedup();
        steps
    };
    assert_eq!(store.samples_retain(id, 0, 1).await.unwrap(), None);
    assert_eq!(store.samples_retain(id, 1 << 20, 1).await.unwrap(), None);
    assert_eq!(store.samples_removed(id).await.unwrap(), None);
    let whole = server.get(&format!("/jobs/{id}/samples?format=ndjson")).await.text.len() as u64 - 48;
    // A limit of half the size removes the oldest training steps.
    let removed = store.samples_retain(id, whole / 2, 1).await.unwrap().unwrap();
    assert_eq!((removed.samples, removed.to_step), (28, Some(7)));
    assert_eq!((steps("train").await, steps("eval").await), (vec![8, 9, 10], vec![0, 5]));
    let answer = server.get(&format!("/jobs/{id}/samples")).await;
    assert_eq!(answer.body["removed"], json!({"samples": 28, "size_bytes": removed.size_bytes, "to_step": 7}));
    let left = server.get(&format!("/jobs/{id}/samples?format=ndjson")).await.text.len() as u64 - 20;
    assert_eq!(removed.size_bytes, whole - left);
    // The newest samples of each phase are kept, whatever the limit.
    store.samples_retain(id, 1, 1).await.unwrap().unwrap();
    assert_eq!((steps("train").await, steps("eval").await), (vec![10], vec![5]));
    assert_eq!(store.samples_retain(id, 1, 1).await.unwrap(), None);
    let events = server.get(&format!("/jobs/{id}/events?limit=100")).await;
    let removals: Vec<&Value> =
        events.body["data"].as_array().unwrap().iter().filter(|event| event["type"] == "samples.removed").collect();
    assert_eq!(removals.len(), 2);
    assert_eq!(removals[0]["data"]["samples"], 28);
}

#[tokio::test]
async fn jobs_are_compared_by_settings_metrics_and_evaluations() {
    let server = Server::start().await;
    let first = server.create(job()).await;
    let second = server.create(with(job(), "rloo", json!({"beta": 0.5}))).await;
    let (_, attempt) = server.claim().await;
    let events = vec![
        step(0, SamplePhase::Eval, &[("eval_reward", Some(0.1))]),
        step(1, SamplePhase::Train, &[("reward", Some(0.5)), ("own", Some(1.0))]),
        step(2, SamplePhase::Train, &[("reward", None)]),
    ];
    server.report(first, attempt, 0, events).await;
    let (_, attempt) = server.claim().await;
    server.report(second, attempt, 0, vec![step(2, SamplePhase::Train, &[("reward", Some(0.7))])]).await;
    let answer = server.get(&format!("/jobs/compare?ids={first},{second}")).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    assert_eq!(answer.body["config"], json!([{"pointer": "/rloo/beta", "values": [0.05, 0.5]}]));
    assert_eq!(
        answer.body["metrics"],
        json!([
            {"step": 0, "eval_reward": [0.1, null]}, {"step": 1, "reward": [0.5, null]}, {"step": 2, "reward": [null, 0.7]}
        ])
    );
    assert_eq!(answer.body["jobs"][0]["evals"], json!([{"step": 0, "metrics": {"eval_reward": 0.1}}]));
    assert_eq!(answer.body["jobs"][1]["id"], json!(second));
    assert_eq!(answer.body["jobs"][1]["best_checkpoint"], Value::Null);
    assert_eq!(answer.body["unknown_keys"], json!([]));
    let answer = server.get(&format!("/jobs/compare?ids={first}&keys=own,nope&min_step=1")).await;
    assert_eq!(answer.body["metrics"], json!([{"step": 1, "own": [1.0]}]));
    assert_eq!(answer.body["unknown_keys"], json!(["nope"]));
}

#[tokio::test]
async fn a_comparison_says_which_ids_are_wrong() {
    let server = Server::start().await;
    let id = server.create(job()).await;
    let refused = async |query: &str, status: u16, words: &[&str]| {
        let answer = server.get(&format!("/jobs/compare{query}")).await;
        let detail = answer.body["detail"].as_str().unwrap_or_default();
        assert_eq!(answer.status.as_u16(), status, "{query}: {}", answer.text);
        assert!(words.iter().all(|word| detail.contains(word)), "{query}: {detail}");
    };
    refused("", 400, &["ids", "name the jobs"]).await;
    refused("?ids=,", 400, &["ids"]).await;
    refused(&format!("?ids={id},{id}"), 400, &["twice"]).await;
    let nine: Vec<String> = (0..9).map(|_| rlood::id::JobId::new().to_string()).collect();
    refused(&format!("?ids={}", nine.join(",")), 400, &["at most 8", "not 9"]).await;
    refused(&format!("?ids={id},{},{}", nine[0], nine[1]), 404, &[&nine[0], &nine[1]]).await;
    refused(&format!("?ids={id},job_nonsense"), 404, &["job_nonsense"]).await;
    refused(&format!("?ids={id}&max_points=1"), 400, &["max_points"]).await;
}
