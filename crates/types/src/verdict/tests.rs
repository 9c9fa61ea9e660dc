use serde_json::json;

use super::*;
use crate::spec::{Context, DatasetFacts, JobSpec, ModelFacts, VerdictSpec, resolve};

fn plan(eval: Value) -> Plan {
    let mut document = json!({"model": "m", "dataset": {"records": [{"prompt": "p", "answer": "a"}]},
        "rewards": [{"type": "exact_match", "column": "answer"}], "training": {"max_steps": 1, "prompts_per_step": 1}});
    document["eval"] = eval;
    let (spec, errors) = JobSpec::read(document);
    assert_eq!(errors, []);
    let facts = DatasetFacts::of_records(&[json!({"prompt": "p", "answer": "a"})]);
    let context = Context {
        model: Some(ModelFacts {
            id: "m".into(),
            sha256: "0".into(),
            max_position_embeddings: 4096,
            num_parameters: 1000,
            size_bytes: 4000,
            has_chat_template: false,
            removes_reasoning: false,
            shape: None,
            modules: vec![],
            beyond_gpu: None,
            foreign: None,
            reads_images: false,
        }),
        dataset: Some(facts.clone()),
        eval_dataset: Some(facts.clone()),
        guard_dataset: Some(facts),
        ..Context::default()
    };
    resolve(&spec, &context).unwrap().plan
}

fn with_guard() -> Plan {
    plan(
        json!({"dataset": {"records": [{"prompt": "p", "answer": "a"}]}, "guard": {"dataset": {"records": [{"prompt": "p", "answer": "a"}]}}}),
    )
}

fn answers(rewards: &[Option<f64>]) -> Answers {
    let text = |reward: &Option<f64>| JudgedText {
        completion: "c".into(),
        reward: *reward,
        num_tokens: 1,
        finish_reason: FinishReason::Stop,
    };
    Answers::new(rewards.iter().map(text).collect())
}

/// Creates rows with these numbers of wins, losses and ties for the trained model.
fn rows(set: RowSet, won: u64, lost: u64, tied: u64) -> Vec<VerdictRow> {
    let row = |(row, (base, trained)): (u64, (f64, f64))| {
        VerdictRow::new(set, row, "p".into(), answers(&[Some(base)]), answers(&[Some(trained)]))
    };
    let of = |count: u64, pair: (f64, f64)| std::iter::repeat_n(pair, count as usize);
    (0..).zip(of(won, (0.0, 1.0)).chain(of(lost, (1.0, 0.0))).chain(of(tied, (1.0, 1.0)))).map(row).collect()
}

fn judged(rows: &[VerdictRow], plan: &Plan) -> VerdictResult {
    VerdictResult::of(rows, plan, RowsFrom::TestFraction, usual_sampling(plan))
}

#[test]
fn the_conclusion_follows_from_the_rows() {
    let plan = plan(json!({"dataset": {"records": [{"prompt": "p", "answer": "a"}]}}));
    for (won, lost, tied, expected) in [
        (60, 20, 120, VerdictWord::Better),
        (20, 60, 120, VerdictWord::Worse),
        (40, 38, 122, VerdictWord::NoDifference),
        (19, 0, 0, VerdictWord::TooFewRows),
        (18, 2, 10, VerdictWord::Better),
    ] {
        let result = judged(&rows(RowSet::Test, won, lost, tied), &plan);
        assert_eq!(result.verdict, expected, "{}", result.summary);
        assert_eq!((result.test.won, result.test.lost, result.test.tied), (won, lost, tied));
        assert!(result.won_examples.len() <= 3 && result.won_examples.iter().all(|row| row.outcome == RowOutcome::Won));
    }
}

#[test]
fn a_guard_that_fell_takes_a_better_back_and_one_of_few_rows_decides_nothing() {
    let plan = with_guard();
    let better = rows(RowSet::Test, 60, 20, 120);
    for (guard, expected) in [
        (rows(RowSet::Guard, 20, 20, 2000), VerdictWord::Better),
        (rows(RowSet::Guard, 10, 60, 130), VerdictWord::GuardFell),
        // The interval includes both no fall and a fall of more than 0.02.
        (rows(RowSet::Guard, 30, 30, 60), VerdictWord::GuardFell),
        (rows(RowSet::Guard, 0, 0, 19), VerdictWord::TooFewRows),
        (rows(RowSet::Guard, 0, 0, 20), VerdictWord::Better),
    ] {
        let all = [better.clone(), guard].concat();
        let result = judged(&all, &plan);
        assert_eq!(result.verdict, expected, "{}", result.summary);
    }
    let worse = [rows(RowSet::Test, 20, 60, 120), rows(RowSet::Guard, 10, 60, 130)].concat();
    assert_eq!(judged(&worse, &plan).verdict, VerdictWord::Worse);
}

#[test]
fn a_row_without_a_reward_of_both_models_does_not_count() {
    let plan = plan(json!({"dataset": {"records": [{"prompt": "p", "answer": "a"}]}}));
    let mut all = rows(RowSet::Test, 30, 0, 30);
    all.push(VerdictRow::new(RowSet::Test, 99, "p".into(), answers(&[None]), answers(&[Some(1.0)])));
    let result = judged(&all, &plan);
    assert_eq!((result.test.rows, result.test.missing_rows, result.test.difference), (60, 1, 0.5));
    assert!(result.note.unwrap().contains("1 rows are left out"));
    // If some of a row's completions have no reward, the mean of the others counts.
    assert_eq!(answers(&[Some(1.0), None, Some(0.0)]).reward, Some(0.5));
}

#[test]
fn several_completions_of_a_greedy_evaluation_are_sampled_as_in_training() {
    let greedy = json!({"dataset": {"records": [{"prompt": "p", "answer": "a"}]}, "num_generations": 4});
    let plan = plan(greedy);
    assert_eq!((plan.eval.as_ref().unwrap().temperature, plan.sampling.temperature), (0.0, 1.0));
    let asked = |request: Value| VerdictSpec::read(&request, &plan, usual_sampling(&plan)).unwrap().sampling;
    // The automatic verdict, which takes the usual sampling, and a request without settings are the same.
    assert_eq!((usual_sampling(&plan).num_generations, usual_sampling(&plan).temperature), (4, 1.0));
    assert_eq!(asked(json!({})), usual_sampling(&plan));
    assert_eq!(asked(json!({"num_generations": 1})).temperature, 0.0);
    assert_eq!(asked(json!({"temperature": 0.5})).temperature, 0.5);
}

#[test]
fn samples_are_averaged_within_a_row_and_give_pass_at_k() {
    let plan = plan(
        json!({"dataset": {"records": [{"prompt": "p", "answer": "a"}]}, "num_generations": 4, "temperature": 1.0}),
    );
    let sampling = usual_sampling(&plan);
    assert_eq!((sampling.num_generations, sampling.pass_threshold), (4, Some(1.0)));
    let quarter = answers(&[Some(1.0), Some(0.0), Some(0.0), Some(0.0)]);
    let half = answers(&[Some(1.0), Some(1.0), Some(0.0), Some(0.0)]);
    let all: Vec<VerdictRow> =
        (0..60).map(|row| VerdictRow::new(RowSet::Test, row, "p".into(), quarter.clone(), half.clone())).collect();
    let result = VerdictResult::of(&all, &plan, RowsFrom::Eval, sampling);
    assert_eq!((result.test.rows, result.test.difference, result.verdict), (60, 0.25, VerdictWord::Better));
    let base: Vec<(u32, f64)> = result.test.base.pass_at.unwrap().iter().map(|one| (one.k, one.chance)).collect();
    let text = serde_json::to_string(&judged(&all, &plan)).unwrap();
    assert_eq!(serde_json::from_str::<VerdictResult>(&text).unwrap(), judged(&all, &plan));
    assert_eq!(base, [(1, 0.25), (2, 0.5), (4, 1.0)]);
    assert!(result.optimistic && result.note.unwrap().contains("these rows also chose this checkpoint: optimistic"));
}
