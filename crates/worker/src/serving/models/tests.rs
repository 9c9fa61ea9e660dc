//! Models that are loaded, shared and dropped as requests need them.

use std::sync::mpsc::{self, Receiver};

use rlood_types::serving::ServedFinish;

use super::*;

fn model(name: &str) -> ServedModel {
    let dir = rlood_test_support::fixture("parity").join(name);
    let base = ServedBase { dir, sha256: name.to_owned(), dtype: ComputeDtype::F32, load_in_4bit: None };
    ServedModel { base, weights: None }
}

fn adapter(name: &str, lora: &str) -> ServedModel {
    let of = model(name);
    let weights = ServedWeights { dir: of.base.dir.join(lora), checkpoint: lora.to_owned(), full: false };
    ServedModel { weights: Some(weights), ..of }
}

fn request(max_tokens: u32) -> ServedRequest {
    ServedRequest { ids: vec![40, 41, 42], max_tokens, temperature: 0.0, ignores_eos: true, ..ServedRequest::default() }
}

fn models(memory_bytes: u64) -> (Models, Receiver<Message>) {
    let (sender, messages) = mpsc::channel();
    (Models::new(BackendKind::Cpu, Some(memory_bytes), 8, sender), messages)
}

/// Generates until nothing is left to do; returns the ended requests and the failures.
fn run(models: &mut Models, messages: &Receiver<Message>) -> (Vec<u64>, Vec<FromServing>) {
    let (mut ended, mut failures) = (Vec::new(), Vec::new());
    loop {
        let is_loading = models.loading.is_some();
        if models.is_idle() && !is_loading {
            return (ended, failures);
        }
        if models.is_idle()
            && let Ok(Message::Loaded(loaded)) = messages.recv()
        {
            failures.extend(models.add(*loaded));
        }
        let (pieces, failed) = models.choose();
        failures.extend(failed);
        for piece in pieces.into_iter().filter(|piece| piece.finish.is_some()) {
            assert_eq!(piece.finish, Some(ServedFinish::Length));
            ended.push(piece.id);
        }
        failures.extend(models.advance());
    }
}

fn names(models: &Models) -> Vec<String> {
    let name = |model: ServedModel| model.weights.map_or(model.base.sha256, |weights| weights.checkpoint);
    models.state().models.into_iter().map(name).collect()
}

#[test]
fn adapters_share_their_base_and_models_leave_when_others_need_their_memory() {
    // Each of the fixtures has about 0.9 MB of weights: one fits into three quarters of 2 MB, two do not.
    let (mut models, messages) = models(2_000_000);
    assert!(models.start(1, model("qwen3"), request(4)).is_empty());
    assert!(models.start(2, adapter("qwen3", "lora"), request(4)).is_empty());
    assert!(models.start(3, adapter("qwen3", "lora_rs"), request(4)).is_empty());
    let (mut ended, failures) = run(&mut models, &messages);
    ended.sort_unstable();
    assert_eq!((ended, failures), (vec![1, 2, 3], Vec::new()));
    assert_eq!(names(&models), ["lora", "lora_rs", "qwen3"]);
    models.start(4, model("qwen2"), request(4));
    assert_eq!(run(&mut models, &messages), (vec![4], Vec::new()));
    assert_eq!(names(&models), ["qwen2"]);
    let state = models.state();
    assert_eq!((state.tokens, state.prompt_tokens), (16, 12), "the counts of a dropped model remain");
    // A model that is being used is not dropped: the other one waits for it.
    models.start(5, model("qwen2"), request(6));
    models.choose();
    models.start(6, model("qwen3"), request(4));
    assert_eq!(names(&models), ["qwen2"]);
    assert_eq!(run(&mut models, &messages), (vec![5, 6], Vec::new()));
    assert_eq!(names(&models), ["qwen3"]);
}

#[test]
fn what_does_not_fit_or_cannot_be_read_fails_its_own_request_only() {
    let (mut models, messages) = models(2_000_000);
    models.start(1, model("qwen3"), request(4));
    models.start(2, adapter("qwen3", "no_such_folder"), request(4));
    models.start(3, model("qwen3"), request(100_000));
    models.start(4, model("no_such_model"), request(4));
    let (ended, failures) = run(&mut models, &messages);
    assert_eq!(ended, [1]);
    let failed = |id: u64| {
        let of_id = |failure: &FromServing| match failure {
            FromServing::Failed { id: other, error } => (*other == id).then(|| error.clone()),
            _ => None,
        };
        failures.iter().find_map(of_id).unwrap()
    };
    assert!(matches!(failed(2), ServingError::Unusable(_)), "{failures:?}");
    assert!(matches!(failed(3), ServingError::Refused(error) if error.code == "not_enough_memory"), "{failures:?}");
    assert!(matches!(failed(4), ServingError::Unusable(_)), "{failures:?}");
    let (mut small, _messages) = self::models(100_000);
    let failures = small.start(1, model("qwen3"), request(4));
    assert!(
        matches!(&failures[..], [FromServing::Failed { error: ServingError::OutOfMemory(why), .. }] if why.contains("--memory-limit")),
        "{failures:?}"
    );
}

#[test]
fn an_answer_to_the_end_of_the_context_ends_where_the_memory_does() {
    let (mut models, messages) = models(2_000_000);
    models.start(1, model("qwen3"), ServedRequest { to_context_end: true, ..request(100_000) });
    let (ended, failures) = run(&mut models, &messages);
    assert_eq!((ended, failures), (vec![1], Vec::new()));
    // A quarter of the memory, and 2,048 bytes for each token.
    assert_eq!(models.state().tokens, 2_000_000 / 4 / 2_048 - 3);
}
