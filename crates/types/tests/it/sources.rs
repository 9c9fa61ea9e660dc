//! Tests of a dataset that is a list of sources: reading, checks and plan.

use rlood_types::spec::{
    Context, DatasetFacts, DatasetSource, FieldError, JobSpec, Resolution, SourcePlan, Warning, resolve, submittable,
    submittable_dataset,
};
use serde_json::{Value, json};

use crate::spec::model;

/// Reads a document, gives every source these facts (rows, columns), and resolves it.
fn resolved(document: &Value, facts: &[(u64, &[&str])]) -> Result<Resolution, Vec<FieldError>> {
    let (spec, errors) = JobSpec::read(document.clone());
    assert_eq!(errors, [], "{document}");
    let sources: Vec<(SourcePlan, DatasetFacts)> = match &spec.dataset {
        Some(DatasetSource::Mixed(sources)) => sources
            .iter()
            .zip(facts)
            .map(|(source, (num_rows, columns))| {
                let (id, columns) = (rlood_types::id::DatasetId::new(), columns.iter().map(|name| (*name).to_owned()));
                let plan = SourcePlan {
                    name: source.name.clone(),
                    num_rows: *num_rows,
                    weight: source.weight.unwrap_or(*num_rows as f64),
                };
                (plan, DatasetFacts::of_file(id, String::new(), *num_rows, columns.collect()))
            })
            .collect(),
        other => panic!("{other:?}"),
    };
    let dataset = Some(DatasetFacts::of_sources(sources));
    resolve(&spec, &Context { model: Some(model()), dataset, ..Context::default() })
}

fn job(dataset: Value, rewards: Value, changes: Value) -> Value {
    let mut job = json!({"model": "org/tiny", "dataset": dataset, "rewards": rewards,
                         "training": {"prompts_per_step": 4}});
    for (key, value) in changes.as_object().unwrap() {
        job[key] = value.clone();
    }
    job
}

fn two(weights: [Value; 2]) -> Value {
    let [a, b] = weights;
    let id = rlood_types::id::DatasetId::new();
    json!([{"hub": "openai/gsm8k", "config": "main", "weight": a}, {"id": id, "name": "own", "weight": b}])
}

const BOTH: &[&str] = &["prompt", "answer"];

#[test]
fn a_list_has_names_and_weights_and_its_errors_have_places() {
    let (spec, errors) = JobSpec::read(job(
        json!([{"hub": "openai/gsm8k@main", "map": {"prompt": "question"}, "weight": 3}, {"records": [{"prompt": "a"}]}]),
        json!([{"type": "length", "applies_to": "gsm8k"}, {"type": "length", "name": "other", "applies_to": ["gsm8k", "source_2"]}]),
        json!({}),
    ));
    assert_eq!(errors, []);
    let Some(DatasetSource::Mixed(sources)) = &spec.dataset else { panic!("{:?}", spec.dataset) };
    let named: Vec<_> = sources.iter().map(|source| (source.name.as_str(), source.weight)).collect();
    assert_eq!(named, [("gsm8k", Some(3.0)), ("source_2", None)]);
    assert!(matches!(&sources[1].source, Some(DatasetSource::Records(rows)) if rows.len() == 1));
    assert_eq!(spec.redacted["dataset"][1]["records"], json!([]), "rows are not kept in the document");
    assert_eq!(spec.rewards[0].applies_to.as_deref(), Some(["gsm8k".to_owned()].as_slice()));

    let id = rlood_types::id::DatasetId::new();
    for (dataset, at, says) in [
        (json!([]), "/dataset", "1 to 64 sources"),
        (json!([{"id": id}, 5]), "/dataset/1", "an object"),
        (json!([{"id": id, "name": "a"}, {"id": id, "name": "a"}]), "/dataset/1/name", "another source is called 'a'"),
        (json!([{"id": id, "name": "a b"}]), "/dataset/0/name", "letters, digits"),
        (json!([{"id": id, "weight": 0}]), "/dataset/0/weight", "greater than 0"),
        (json!([{"id": id, "weight": -1}]), "/dataset/0/weight", "greater than 0"),
        (json!([{"id": id, "wieght": 1}]), "/dataset/0/wieght", "weight"),
        (json!([{"id": id, "map": {"promt": "q"}}]), "/dataset/0/map", "unknown field `promt`"),
        (json!([{"id": id, "map": {"keep": [], "drop": []}}]), "/dataset/0/map", "either keep or drop"),
        (json!([{"records": [{"q": "a"}], "limit": 0}]), "/dataset/0/limit", "at least 1"),
        (json!({"records": [{"q": "a"}], "seed": 1}), "/dataset/seed", "give limit as well"),
        (json!([{"records": [], "map": {"prompt": "q"}}]), "/dataset/0/records", "the dataset is empty"),
        (json!({"id": id, "config": "main"}), "/dataset/config", "belong to {\"hub\": …}"),
        (
            json!({"id": id, "limit": 1, "sources": [{"name": "a", "num_rows": 5, "weight": 1}]}),
            "/dataset/sources",
            "cannot be mapped together",
        ),
        (json!([{"records": []}]), "/dataset/0/records", "the dataset is empty"),
        (json!([{"records": [{"prompt": "a"}, {"promt": "b"}]}]), "/dataset/0/records/1/prompt", "prompt"),
        (json!([{"hub": "a/x", "map": {"promt": "q"}}]), "/dataset/0", "promt"),
        (json!([[{"id": id}]]), "/dataset/0", "an object"),
        (json!({"id": id, "weight": 2}), "/dataset/weight", "one of several sources"),
        (json!({"hub": "a/x", "name": " "}), "/dataset/name", "must not be empty"),
        (json!({"id": id, "name": "x"}), "/dataset/name", "keeps its own name"),
        (json!({"id": id, "sources": [{"name": "a", "num_rows": 5}]}), "/dataset/sources/0/weight", "weight"),
        (json!({"records": [{"prompt": "a"}], "sources": []}), "/dataset/sources", "give its id too"),
    ] {
        let (_, errors) = JobSpec::read(job(dataset.clone(), json!([{"type": "length"}]), json!({})));
        let found = errors.iter().find(|error| error.pointer == at);
        assert!(found.is_some_and(|error| error.detail.contains(says)), "{dataset}: {errors:?}");
    }
    let eval = json!({"eval": {"dataset": [{"id": id, "weight": 2}], "every_steps": 5}});
    let (_, errors) = JobSpec::read(job(json!({"id": id}), json!([{"type": "length"}]), eval));
    assert_eq!(errors[0].pointer, "/eval/dataset/0/weight", "{errors:?}");
}

#[test]
fn default_names_differ_by_what_the_sources_differ_in() {
    let id = rlood_types::id::DatasetId::new();
    let gsm8k = |config: Value, split: Value| json!({"hub": "openai/gsm8k", "config": config, "split": split});
    for (dataset, expected) in [
        (json!([gsm8k(json!("main"), json!(null)), {"id": id}]), &["gsm8k", "source_2"][..]),
        (
            json!([gsm8k(json!("main"), json!("train")), gsm8k(json!("socratic"), json!("train"))]),
            &["gsm8k-main", "gsm8k-socratic"],
        ),
        (
            json!([gsm8k(json!("main"), json!("train")), gsm8k(json!("main"), json!("test"))]),
            &["gsm8k-main-train", "gsm8k-main-test"],
        ),
        (json!([gsm8k(json!(null), json!(null)), gsm8k(json!("a b"), json!(null))]), &["gsm8k", "gsm8k-a_b"]),
        (json!([{"hub": "a/x"}, {"hub": "b/x"}]), &["a-x", "b-x"]),
        (json!([{"hub": "a/x"}, {"hub": "a/x@v2"}, {"hub": "a/x", "name": "x-2"}]), &["x", "x-3", "x-2"]),
        (json!([{"id": id, "name": "source_2"}, {"id": id}]), &["source_2", "source_2-2"]),
    ] {
        let (spec, errors) = JobSpec::read(job(dataset.clone(), json!([{"type": "length"}]), json!({})));
        assert_eq!(errors, [], "{dataset}");
        let Some(DatasetSource::Mixed(sources)) = spec.dataset else { panic!("{dataset}") };
        assert_eq!(sources.iter().map(|source| source.name.as_str()).collect::<Vec<_>>(), expected, "{dataset}");
    }
}

#[test]
fn rows_of_an_upload_and_of_the_job_can_be_mapped() {
    let id = rlood_types::id::DatasetId::new();
    let records = json!([{"question": "1+1?", "messages": []}]);
    let map = json!({"prompt": "question"});
    let (spec, errors) = JobSpec::read(job(
        json!([{"id": id, "map": map, "limit": 5, "seed": 1, "weight": 2}, {"records": records, "map": map}, {"id": id}]),
        json!([{"type": "length"}]),
        json!({"eval": {"dataset": {"records": records, "map": map, "name": "held out"}, "every_steps": 5}}),
    ));
    assert_eq!(errors, []);
    let Some(DatasetSource::Mixed(sources)) = &spec.dataset else { panic!("{:?}", spec.dataset) };
    let Some(DatasetSource::Mapped(first)) = &sources[0].source else { panic!("{sources:?}") };
    assert_eq!((&first.source, first.recipe.limit, first.recipe.seed), (&DatasetSource::Id(id), Some(5), Some(1)));
    let Some(DatasetSource::Mapped(second)) = &sources[1].source else { panic!("{sources:?}") };
    assert_eq!(second.source, DatasetSource::Records(records.as_array().unwrap().clone()));
    assert_eq!(sources[2].source, Some(DatasetSource::Id(id)), "without a map nothing is converted");
    let Some(DatasetSource::Mapped(held_out)) = spec.eval.unwrap().dataset else { panic!("no mapped evaluation") };
    assert_eq!(held_out.source, DatasetSource::Records(records.as_array().unwrap().clone()));
    assert_eq!(spec.redacted["dataset"][1]["records"], json!([]), "rows are not kept in the document");
}

#[test]
fn an_epoch_ends_when_the_largest_source_was_seen_once() {
    let length = || json!([{"type": "length"}]);
    let plan = |weights: [Value; 2], changes: Value| {
        resolved(&job(two(weights), length(), changes), &[(100, BOTH), (8, BOTH)]).unwrap().plan
    };
    // Without weights all rows are used once: 108 in blocks of four.
    let by_rows = plan([Value::Null, Value::Null], json!({}));
    assert_eq!((by_rows.training.max_steps, by_rows.totals.dropped_rows_per_epoch), (27, 0));
    assert_eq!(by_rows.dataset.sources[1], SourcePlan { name: "own".into(), num_rows: 8, weight: 8.0 });
    // Equal weights give 100 prompts of each source.
    assert_eq!(plan([json!(1), json!(1)], json!({})).training.max_steps, 50);
    let steps = |epochs: f64| {
        let training = json!({"training": {"prompts_per_step": 4, "num_train_epochs": epochs}});
        plan([json!(3), json!(1)], training).training.max_steps
    };
    // Per epoch 100 and 33⅓: 133, 134 and 133 prompts.
    assert_eq!((steps(1.0), steps(3.0), steps(0.5)), (33, 99, 17));
    let document = submittable(&by_rows);
    assert_eq!(document["dataset"], submittable_dataset(&by_rows.dataset));
    let (again, errors) = JobSpec::read(document);
    assert_eq!(errors, []);
    let DatasetSource::Joined(id, sources) = again.dataset.unwrap() else { panic!("no joined dataset") };
    assert_eq!((id, &sources), (by_rows.dataset.id, &by_rows.dataset.sources));

    let refused = |weights: [Value; 2], rows: [u64; 2], changes: Value| {
        resolved(&job(two(weights), length(), changes), &[(rows[0], BOTH), (rows[1], BOTH)]).unwrap_err()
    };
    let block = json!({"training": {"prompts_per_step": 500}});
    let errors = refused([json!(1), json!(1)], [100, 8], block);
    assert!(errors[0].detail.starts_with("an epoch of these sources has 200 prompts"), "{errors:?}");
    let errors = refused([json!(0.000_001), json!(1000)], [100, 8], json!({}));
    assert!(errors[0].detail.contains("give it more weight"), "{errors:?}");
    let errors = refused([json!(1), json!(1)], [100, 0], json!({}));
    assert_eq!(errors.last().unwrap().detail, "the source 'own' has no rows");
}

#[test]
fn a_reward_needs_its_columns_in_the_sources_that_it_judges() {
    let match_answer = |applies_to: Value| json!([{"type": "exact_match", "column": "answer", "applies_to": applies_to}, {"type": "length", "name": "any"}]);
    let check = |rewards: Value| {
        resolved(&job(two([json!(1), json!(1)]), rewards, json!({})), &[(100, BOTH), (8, &["prompt"])])
    };
    let errors = check(match_answer(Value::Null)).unwrap_err();
    assert_eq!(errors[0].pointer, "/rewards/0/column");
    assert!(errors[0].detail.contains("the source 'own' has no column 'answer'"), "{errors:?}");
    let plan = check(match_answer(json!("gsm8k"))).unwrap().plan;
    assert!(plan.rewards[0].judges("gsm8k") && !plan.rewards[0].judges("own") && plan.rewards[1].judges("own"));

    let errors = check(match_answer(json!(["gsm8k", "gsm9k"]))).unwrap_err();
    assert_eq!(errors[0].pointer, "/rewards/0/applies_to");
    assert!(errors[0].detail.contains("no source 'gsm9k'") && errors[0].detail.contains("gsm8k, own"), "{errors:?}");
    let alone = json!([{"type": "exact_match", "column": "answer", "applies_to": "gsm8k"}, {"type": "length", "name": "any", "weight": 0}]);
    let errors = check(alone).unwrap_err();
    assert_eq!((errors[0].pointer.as_str(), errors[0].code.as_str()), ("/rewards", "unjudged_source"), "{errors:?}");

    let Warning { code, .. } = &resolved(
        &job(two([json!(1), Value::Null]), json!([{"type": "length"}]), json!({})),
        &[(100, BOTH), (8, BOTH)],
    )
    .unwrap()
    .warnings[0];
    assert_eq!(code, "weights_and_rows");
    let (spec, _) =
        JobSpec::read(job(json!({"id": rlood_types::id::DatasetId::new()}), match_answer(json!("a")), json!({})));
    let facts = DatasetFacts::of_file(
        rlood_types::id::DatasetId::new(),
        String::new(),
        8,
        vec!["prompt".into(), "answer".into()],
    );
    let errors =
        resolve(&spec, &Context { model: Some(model()), dataset: Some(facts), ..Context::default() }).unwrap_err();
    assert!(errors[0].detail.contains("the dataset is not a list of sources"), "{errors:?}");
}
