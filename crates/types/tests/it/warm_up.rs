//! Tests of the warm-up of a job: what is accepted, what is rejected, and what a fork may change.

use rlood_types::dataset::PROMPT;
use rlood_types::id::DatasetId;
use rlood_types::spec::{
    Context, DatasetFacts, DatasetPlan, DatasetSource, EvalPlan, FieldError, GuardPlan, JobSpec, Plan, PromptLengths,
    Resolution, WarmUpReference, continues, forked_document, resolve, resume_identity, submittable,
};
use serde_json::{Value, json};

use crate::spec::model;

fn prompts(num_rows: usize) -> Vec<Value> {
    (0..num_rows).map(|row| json!({"prompt": format!("{row}")})).collect()
}

fn answers() -> Vec<Value> {
    (0..6).map(|row| json!({"prompt": format!("{row}"), "completion": "an answer"})).collect()
}

/// Returns a job with a warm-up of inline rows, after a change.
fn job(change: impl FnOnce(&mut Value)) -> Value {
    let mut document = json!({"model": "org/tiny", "dataset": {"records": prompts(32)}, "rewards": [{"type": "length"}],
        "training": {"max_steps": 10, "prompts_per_step": 4}, "warm_up": {"dataset": {"records": answers()}, "steps": 5}});
    change(&mut document);
    document
}

fn facts(spec: &JobSpec, longest: u64) -> Option<DatasetFacts> {
    let rows = match spec.warm_up.as_ref()?.dataset.as_ref()? {
        DatasetSource::Records(rows) => rows.clone(),
        _ => answers(),
    };
    let lengths = PromptLengths { longest, longest_row: 2, too_long: 1 };
    Some(DatasetFacts { sha256: "answers".into(), prompt_lengths: Some(lengths), ..DatasetFacts::of_records(&rows) })
}

fn resolved(document: Value, longest: u64) -> Result<Resolution, Vec<FieldError>> {
    let (spec, mut errors) = JobSpec::read(document);
    let context = Context {
        model: Some(model()),
        dataset: Some(DatasetFacts { sha256: "prompts".into(), ..DatasetFacts::of_records(&prompts(32)) }),
        warm_up_dataset: facts(&spec, longest),
        ..Context::default()
    };
    match resolve(&spec, &context) {
        Ok(resolution) if errors.is_empty() => Ok(resolution),
        Ok(_) => Err(errors),
        Err(more) => {
            errors.extend(more);
            Err(errors)
        }
    }
}

fn plan_of(change: impl FnOnce(&mut Value)) -> Plan {
    resolved(job(change), 20).unwrap().plan
}

#[test]
fn a_warm_up_gets_the_documented_defaults_and_its_steps_come_first() {
    let plan = plan_of(|_| {});
    let warm_up = plan.warm_up.as_ref().unwrap();
    assert_eq!((warm_up.steps, warm_up.batch_size, warm_up.reference), (5, 16, WarmUpReference::Warmed));
    assert_eq!(warm_up.learning_rate, plan.optimizer.learning_rate);
    assert_eq!((warm_up.dataset.num_rows, warm_up.longest_row_tokens), (6, Some(20)));
    assert_eq!((plan.training.max_steps, plan.total_steps()), (10, 15));
    assert_eq!((plan.rloo_step(4), plan.rloo_step(5), plan.rloo_step(6)), (None, Some(0), Some(1)));
    let plan = plan_of(|job| {
        job["warm_up"]["learning_rate"] = json!(1e-3);
        job["warm_up"]["reference"] = json!("base");
        job["rloo"] = json!({"beta": 0.05});
    });
    assert_eq!(plan.warm_up.as_ref().unwrap().learning_rate, 1e-3);
    assert!(!plan.has_warmed_reference());
    assert!(plan_of(|job| job["rloo"] = json!({"beta": 0.05})).has_warmed_reference());
    assert!(!plan_of(|job| job["rloo"] = json!({"beta": 0.0})).has_warmed_reference());
    let without = plan_of(|job| drop(job.as_object_mut().unwrap().shift_remove("warm_up")));
    assert_eq!((without.total_steps(), without.rloo_step(0)), (10, Some(0)));
    assert!(!json!(without).as_object().unwrap().contains_key("warm_up"), "stored plans are as they were");
}

#[test]
fn every_error_of_a_warm_up_has_its_pointer() {
    let refused = |change: fn(&mut Value), at: &str, code: &str, word: &str| {
        let errors = resolved(job(change), 20).expect_err(word);
        let found = errors.iter().find(|error| error.pointer == at && error.code == code);
        let found = found.unwrap_or_else(|| panic!("{at} {code}: {errors:#?}"));
        assert!(found.detail.contains(word), "'{word}' is not in: {}", found.detail);
        assert_eq!(errors.len(), 1, "{errors:#?}");
    };
    refused(
        |job| drop(job["warm_up"].as_object_mut().unwrap().shift_remove("dataset")),
        "/warm_up/dataset",
        "required",
        "records",
    );
    refused(
        |job| drop(job["warm_up"].as_object_mut().unwrap().shift_remove("steps")),
        "/warm_up/steps",
        "required",
        "number of",
    );
    refused(|job| job["warm_up"]["steps"] = json!(0), "/warm_up/steps", "out_of_range", "1");
    refused(|job| job["warm_up"]["batch_size"] = json!(0), "/warm_up/batch_size", "out_of_range", "1");
    refused(|job| job["warm_up"]["learning_rate"] = json!(0), "/warm_up/learning_rate", "out_of_range", "greater");
    refused(|job| job["warm_up"]["reference"] = json!("initial"), "/warm_up/reference", "invalid_value", "warmed");
    refused(|job| job["warm_up"]["epochs"] = json!(3), "/warm_up/epochs", "foreign_key", "max_steps");
    refused(|job| job["warm_up"]["sideways"] = json!(3), "/warm_up/sideways", "unknown_field", "sideways");
    refused(|job| job["warm_up"] = json!(true), "/warm_up", "invalid_type", "object");
    refused(
        |job| job["warm_up"]["dataset"]["records"] = json!([]),
        "/warm_up/dataset/records",
        "empty_dataset",
        "at least one",
    );
    refused(
        |job| job["warm_up"]["dataset"]["records"][1] = json!({"question": "?"}),
        "/warm_up/dataset/records/1/prompt",
        "missing_prompt",
        "question",
    );
    refused(|job| job["warm_up"]["map"] = json!({"promt": "question"}), "/warm_up/map", "invalid_value", "completion");
    refused(
        |job| {
            job["warm_up"]["dataset"] = json!({"hub": "org/sft", "map": {"prompt": "q"}});
            job["warm_up"]["map"] = json!({"prompt": "q"});
        },
        "/warm_up/map",
        "conflict",
        "one of the two",
    );
    refused(
        |job| {
            job["warm_up"]["dataset"] = json!({"records": [{"q": "?"}], "map": {"prompt": "q"}});
            job["warm_up"]["map"] = json!({"prompt": "q"});
        },
        "/warm_up/map",
        "conflict",
        "one of the two",
    );
    refused(
        |job| job["warm_up"]["dataset"] = json!({"hub": "org/sft", "map": {"prompt": "messages", "cut_answer": true}}),
        "/warm_up/dataset",
        "conflict",
        "cut_answer",
    );
    refused(
        |job| job["warm_up"]["dataset"] = json!([{"hub": "org/sft", "weight": 2}, {"records": answers()}]),
        "/warm_up/dataset/0/weight",
        "unknown_field",
        "leave the weight out",
    );
    refused(
        |job| {
            job["warm_up"]["dataset"]["records"] =
                json!([{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}])
        },
        "/warm_up/dataset",
        "no_chat_template",
        "chat template",
    );
}

#[test]
fn a_row_that_exceeds_the_context_is_refused() {
    let errors = resolved(job(|_| {}), 513).unwrap_err();
    assert_eq!((errors[0].pointer.as_str(), errors[0].code.as_str()), ("/warm_up/dataset", "row_too_long"));
    assert!(errors[0].detail.contains("513") && errors[0].detail.contains("512"), "{}", errors[0].detail);
    assert!(resolved(job(|_| {}), 512).is_ok());
}

#[test]
fn with_a_warm_start_the_reference_is_required() {
    let with_start = |reference: Option<&str>| {
        let checkpoint = rlood_types::id::CheckpointId::new();
        JobSpec::read(job(|job| {
            job["warm_start"] = json!({"checkpoint": checkpoint, "reference": "initial"});
            if let Some(reference) = reference {
                job["warm_up"]["reference"] = json!(reference);
            }
        }))
    };
    let (_, errors) = with_start(None);
    assert_eq!(
        (errors.len(), errors[0].pointer.as_str(), errors[0].code.as_str()),
        (1, "/warm_up/reference", "required")
    );
    assert!(errors[0].detail.contains("base") && errors[0].detail.contains("warmed"), "{}", errors[0].detail);
    for reference in ["base", "warmed"] {
        assert_eq!(with_start(Some(reference)).1, []);
    }
}

#[test]
fn messages_are_prompts_and_mapped_records_need_not_be_rows() {
    let chat = json!([{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]);
    let (spec, errors) =
        JobSpec::read(job(|job| job["warm_up"]["dataset"]["records"] = json!([{"messages": chat, "level": 1}])));
    assert_eq!(errors, []);
    let Some(DatasetSource::Records(rows)) = spec.warm_up.unwrap().dataset else { panic!("records") };
    assert_eq!(rows, [json!({PROMPT: chat, "level": 1})]);
    let (spec, errors) = JobSpec::read(job(|job| {
        job["warm_up"]["dataset"]["records"] = json!([{"question": "?", "answer": "!"}]);
        job["warm_up"]["map"] = json!({"prompt": "question", "completion": "answer"});
    }));
    assert_eq!(errors, []);
    let warm_up = spec.warm_up.unwrap();
    assert_eq!(warm_up.map.unwrap().completion.as_deref(), Some("answer"));
    // The map may also be in the dataset, whose rows then stay as they are.
    let rows = json!([{"messages": chat}]);
    let (own, errors) = JobSpec::read(job(|job| {
        job["warm_up"]["dataset"] = json!({"records": rows, "map": {"prompt": "messages"}, "limit": 1});
    }));
    assert_eq!(errors, []);
    let Some(DatasetSource::Mapped(mapped)) = own.warm_up.unwrap().dataset else { panic!("mapped") };
    assert_eq!((mapped.source, mapped.recipe.limit), (DatasetSource::Records(vec![rows[0].clone()]), Some(1)));
    assert!(spec.redacted["warm_up"]["dataset"]["records"].as_array().unwrap().is_empty(), "rows are not stored twice");
}

#[test]
fn a_job_is_submitted_again_with_its_warm_up_and_a_fork_must_share_it() {
    let plan = plan_of(|job| job["rloo"] = json!({"beta": 0.05}));
    let document = submittable(&plan);
    let warm_up = plan.warm_up.as_ref().unwrap();
    assert_eq!(
        document["warm_up"],
        json!({"dataset": {"id": warm_up.dataset.id}, "steps": 5, "batch_size": 16,
               "learning_rate": warm_up.learning_rate, "reference": "warmed"})
    );
    assert_eq!(JobSpec::read(document).1, []);

    let changed = |change: fn(&mut Plan)| {
        let mut plan = plan.clone();
        change(&mut plan);
        plan
    };
    assert_eq!(continues(&changed(|plan| plan.training.max_steps = 99), &plan, 7), Ok(()));
    for other in [
        changed(|plan| plan.warm_up = None),
        changed(|plan| plan.warm_up.as_mut().unwrap().steps = 6),
        changed(|plan| plan.warm_up.as_mut().unwrap().dataset.sha256 = "other".into()),
        changed(|plan| plan.rloo.beta = 0.0),
    ] {
        assert_eq!(continues(&other, &plan, 7), Err("warm_up".to_owned()));
    }
    let replaced = forked_document(&plan, &json!({"warm_up": {"dataset": {"id": "ds_1"}, "steps": 2}}));
    assert_eq!(replaced["warm_up"], json!({"dataset": {"id": "ds_1"}, "steps": 2}), "it is replaced whole");
    // Blocks begin after the warm-up. In the middle of a block the rewards must be the same.
    let two_a_block = changed(|plan| plan.rloo.steps_per_generation = 2);
    let mut other = two_a_block.clone();
    other.rewards[0].weight = 2.0;
    assert_eq!(continues(&other, &two_a_block, 7), Ok(()));
    assert_eq!(continues(&other, &two_a_block, 6), Err("rewards".to_owned()));
    assert_eq!(continues(&other, &two_a_block, 3), Ok(()));
    let without = changed(|plan| plan.warm_up = None);
    assert!(!resume_identity(&without).as_object().unwrap().contains_key("warm_up"), "as it always was");
}

#[test]
fn the_estimate_counts_the_answers_and_the_reference() {
    let estimate = |change: fn(&mut Value), longest: u64| resolved(job(change), longest).unwrap().estimate;
    let beta = |job: &mut Value| job["rloo"] = json!({"beta": 0.05});
    let base = |job: &mut Value| {
        job["rloo"] = json!({"beta": 0.05});
        job["warm_up"]["reference"] = json!("base");
    };
    assert!(estimate(beta, 20).reference_bytes > estimate(base, 20).reference_bytes);
    assert!(estimate(beta, 20).checkpoint_bytes > estimate(base, 20).checkpoint_bytes);
    let short = |job: &mut Value| job["sampling"] = json!({"max_completion_length": 1});
    assert!(estimate(short, 500).activation_bytes > estimate(short, 5).activation_bytes);
}

#[test]
fn the_warm_up_leaves_the_verdict_s_prompts_out_unless_its_plan_is_older_than_this_rule() {
    let mut plan = plan_of(|_| {});
    let dataset = |sha256: &str| DatasetPlan::new(DatasetId::new(), sha256.to_owned(), 1);
    let guard = GuardPlan { dataset: dataset("guard"), rewards: None, margin: 0.02 };
    plan.eval = Some(EvalPlan {
        test_dataset: Some(dataset("test")),
        guard: Some(guard),
        ..EvalPlan::of_dataset(dataset("eval"), 10)
    });
    let left_out = |plan: &Plan| -> Vec<String> {
        plan.datasets_left_out_of_warm_up().map(|dataset| dataset.sha256.clone()).collect()
    };
    assert_eq!(left_out(&plan), ["test", "guard"]);
    let mut stored = json!(plan);
    stored["arithmetic"].as_object_mut().unwrap().shift_remove("warm_up");
    let older: Plan = serde_json::from_value(stored).unwrap();
    assert!(left_out(&older).is_empty(), "a job that was accepted earlier keeps the rows of its warm-up");
    assert_eq!(resume_identity(&older), resume_identity(&plan), "its checkpoints fit");
    plan.warm_up = None;
    assert!(left_out(&plan).is_empty());
}
