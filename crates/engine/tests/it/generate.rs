//! Continuous batching: checks that the other rows of a batch never change a completion, and that recorded
//! log-probs are the model's.

use std::num::NonZeroUsize;

use std::cell::Cell;
use std::path::PathBuf;

use rlood_engine::backend::BackendKind;
use rlood_engine::generate::{GeneratePrompt, GenerateRequest, Generated, generate};
use rlood_engine::model::{Adapter, Chosen, Pick, Policy, Trajectory};
use rlood_engine::random::{Key, Stream};
use rlood_engine::sampling::Sampler;
use rlood_engine::text::Text;
use rlood_types::event::FinishReason;

/// Tolerance of the reference kernels between different batches.
const TOLERANCE: f32 = 1e-5;
const LENGTH: usize = 24;
const G: usize = 3;
const PLAIN: Sampler = Sampler { temperature: 0.7, top_p: 1.0, top_k: 0, min_p: 0.0, repetition_penalty: 1.0 };
/// Every 16th token is an EOS, so that completions end at many lengths.
const EOS: fn() -> Vec<u32> = || (0..320).filter(|id| id % 16 == 7).collect();

struct Model {
    policy: Policy,
    text: Text,
}

fn fixture(name: &str) -> PathBuf {
    rlood_test_support::fixture("parity").join(name)
}

/// Loads a model with an adapter whose A and B are both nonzero.
fn model(name: &str) -> Model {
    let dir = fixture(name);
    let mut policy = Policy::load(&dir, BackendKind::Cpu).unwrap();
    policy.load_lora(&dir.join("lora")).unwrap();
    Model { policy, text: Text::load(&dir).unwrap() }
}

/// Prompts of several lengths, some beyond Mistral's window of 8; the third repeats the first as another row.
fn prompts() -> Vec<Vec<u32>> {
    let ids =
        |seed: u64, count: u64| (0..count).map(move |i| 4 + Key::new(seed, Stream::Probe).with(i).below(316) as u32);
    [(1, 11), (2, 2), (1, 11), (3, 19), (4, 1), (5, 7), (6, 30)]
        .map(|(seed, count)| ids(seed, count).collect())
        .to_vec()
}

/// Samples completions of these prompts; also returns how often the generation polled for a stop.
fn sampled(
    model: &Model,
    rows: &[usize],
    sampler: Sampler,
    max_rows: usize,
    eos_token_ids: &[u32],
) -> (Vec<Vec<Generated>>, usize) {
    let all = prompts();
    let prompts: Vec<GeneratePrompt<'_>> =
        rows.iter().map(|&row| GeneratePrompt { row: row as u64, ids: &all[row], given: &[] }).collect();
    let request = GenerateRequest {
        prompts: &prompts,
        num_generations: NonZeroUsize::new(G).unwrap(),
        sampler,
        max_completion_length: LENGTH,
        stop: &[],
        key: Key::new(7, Stream::Train),
        eos_token_ids,
        adapter: Adapter::On,
        max_rows,
    };
    let polls = Cell::new(0);
    let stop = || {
        polls.set(polls.get() + 1);
        false
    };
    let groups = generate(&model.policy, &model.text, &request, &stop).unwrap().expect("a generation without a stop");
    assert!(groups.len() == rows.len() && groups.iter().all(|group| group.len() == G));
    (groups, polls.get())
}

/// Checks that tokens are equal, and log-probs within the tolerance of the kernels.
fn assert_same(what: &str, policy: &Policy, ours: &[Vec<Generated>], theirs: &[Vec<Generated>]) {
    assert_eq!(ours.len(), theirs.len(), "{what}");
    for (ours, theirs) in ours.concat().iter().zip(theirs.concat()) {
        assert_eq!(ours.finish_reason, theirs.finish_reason, "{what}");
        let (ours, theirs) = (&ours.segments, &theirs.segments);
        assert_eq!(ours.completion().unwrap(), theirs.completion().unwrap(), "{what}");
        assert_eq!(ours.logps().is_some(), theirs.logps().is_some(), "{what}");
        assert_close(what, policy, &ours.logps().unwrap_or_default(), &theirs.logps().unwrap_or_default());
    }
}

fn assert_close(what: &str, policy: &Policy, ours: &[f32], theirs: &[f32]) {
    assert_eq!(ours.len(), theirs.len(), "{what}");
    for (ours, theirs) in ours.iter().zip(theirs) {
        let same = match policy.samples_exactly() {
            true => ours.to_bits() == theirs.to_bits(),
            false => (ours - theirs).abs() <= TOLERANCE * theirs.abs().max(1.0),
        };
        assert!(same, "{what}: {ours} and {theirs}");
    }
}

#[test]
fn completions_do_not_depend_on_how_many_rows_live_at_once() {
    let every: Vec<usize> = (0..prompts().len()).collect();
    for name in ["qwen3", "mistral"] {
        let model = model(name);
        let penalized = Sampler { repetition_penalty: 1.3, top_k: 40, ..PLAIN };
        for sampler in [PLAIN, Sampler { temperature: 0.0, ..PLAIN }, penalized] {
            let (whole, _) = sampled(&model, &every, sampler, 1000, &EOS());
            let lengths: Vec<usize> =
                whole.iter().flatten().map(|completion| completion.segments.num_model_tokens()).collect();
            assert!(lengths.contains(&LENGTH) && lengths.iter().any(|length| *length < LENGTH / 2), "{lengths:?}");
            for max_rows in [0, G, G + 1, 2 * G + 2, 4 * G] {
                let (ours, _) = sampled(&model, &every, sampler, max_rows, &EOS());
                assert_same(&format!("{name}, {sampler:?}, {max_rows} rows"), &model.policy, &ours, &whole);
            }
            // Neither the other prompts of the request nor their order matter.
            for row in &every {
                let (alone, _) = sampled(&model, &[*row], sampler, 1000, &EOS());
                assert_same(&format!("{name}, row {row} alone"), &model.policy, &alone, &whole[*row..=*row]);
            }
            let (reversed, _) = sampled(&model, &[6, 2, 0], sampler, 4, &EOS());
            let expected = [6, 2, 0].map(|row: usize| whole[row].clone());
            assert_same(&format!("{name}, in another order"), &model.policy, &reversed, &expected);
        }
    }
}

#[test]
fn a_group_joins_as_soon_as_all_its_rows_have_room() {
    let model = model("qwen2");
    let every: Vec<usize> = (0..prompts().len()).collect();
    // No row ends before its length, so the number of rounds follows from how many groups fit.
    for (max_rows, rounds) in [(0, 7), (G, 7), (2 * G - 1, 7), (2 * G, 4), (3 * G + 2, 3), (7 * G, 1)] {
        let (groups, polls) = sampled(&model, &every, PLAIN, max_rows, &[]);
        assert_eq!(polls, rounds * LENGTH + 1, "{max_rows} rows");
        assert!(groups.iter().flatten().all(|completion| completion.finish_reason == FinishReason::Length));
    }
    // If rows end early, the next group does not wait for the last row of the previous groups.
    let (groups, polls) = sampled(&model, &every, PLAIN, 2 * G, &EOS());
    let longest =
        |groups: &[Vec<Generated>]| groups.iter().flatten().map(|c| c.segments.num_model_tokens()).max().unwrap_or(0);
    let in_rounds: usize = groups.chunks(2).map(longest).sum();
    assert!(polls <= in_rounds, "{polls} tokens one after the other, {in_rounds} in rounds");
    assert!(polls > longest(&groups));
}

#[test]
fn recorded_log_probs_are_those_of_the_model() {
    let every: Vec<usize> = (0..prompts().len()).collect();
    let prompts = prompts();
    for name in ["qwen3", "llama3rope", "mistral"] {
        let Model { policy, .. } = &model(name);
        // Log-probs of greedy tokens are reported at temperature 1.
        for (temperature, reported) in [(0.7, 0.7), (1.0, 1.0), (0.0, 1.0)] {
            let sampler = Sampler { temperature, ..PLAIN };
            let (groups, _) = sampled(&model(name), &every, sampler, 2 * G, &EOS());
            for (prompt, completion) in every.iter().flat_map(|row| groups[*row].iter().map(|c| (&prompts[*row], c))) {
                let rows = [Trajectory::new(prompt, &completion.segments)];
                let score = &policy.score(&rows, reported, Adapter::On).unwrap()[0];
                let recorded = completion.segments.logps().expect("recorded");
                assert_close(&format!("{name} at {temperature}"), policy, &recorded, &score.logps);
            }
        }
    }
}

#[test]
fn a_sampler_that_filters_records_no_log_probs() {
    let model = model("qwen2");
    let greedy = Sampler { temperature: 0.0, ..PLAIN };
    for (sampler, recorded) in [
        (PLAIN, true),
        (greedy, true),
        (Sampler { top_k: 5, ..greedy }, true),
        (Sampler { top_k: 5, ..PLAIN }, false),
        (Sampler { top_p: 0.9, ..PLAIN }, false),
        (Sampler { min_p: 0.1, ..PLAIN }, false),
        (Sampler { repetition_penalty: 1.1, ..PLAIN }, false),
        (Sampler { repetition_penalty: 1.1, ..greedy }, false),
    ] {
        let (groups, _) = sampled(&model, &[0, 1], sampler, 100, &EOS());
        for completion in groups.iter().flatten() {
            let lengths = completion.segments.logps().map(|logps| logps.len());
            assert_eq!(lengths, recorded.then_some(completion.segments.num_model_tokens()), "{sampler:?}");
        }
    }
}

#[test]
fn rows_that_join_late_choose_as_if_they_were_alone() {
    let Model { policy, .. } = model("qwen3");
    let prompts = prompts();
    let picks = |rows: usize, step: u64| -> Vec<Pick> {
        let uniform = |row: usize| Key::new(3, Stream::Probe).with(row as u64).with(step).uniform();
        (0..rows).map(|row| Pick { temperature: 1.0, uniform: uniform(row) }).collect()
    };
    let mut state = policy.begin(Adapter::On);
    assert!(state.is_empty() && policy.choose(&state, &[]).unwrap().is_empty());
    policy.append(&mut state, &[]).unwrap();
    policy.join(&mut state, &[&prompts[0], &prompts[3]], 2, 16).unwrap();
    for step in 0..5 {
        let tokens: Vec<u32> = policy.choose(&state, &picks(4, step)).unwrap().iter().map(|c| c.token).collect();
        policy.append(&mut state, &tokens).unwrap();
    }
    // The first row of each prompt leaves, two new prompts join; choosing changes nothing.
    policy.retain(&mut state, &[false, true, false, true]).unwrap();
    let before = policy.choose(&state, &picks(2, 5)).unwrap();
    policy.join(&mut state, &[&prompts[5], &prompts[6]], 1, 16).unwrap();
    assert_eq!(policy.choose(&state, &picks(4, 5)).unwrap().len(), 4);
    let lengths = [prompts[0].len() + 5, prompts[3].len() + 5, prompts[5].len(), prompts[6].len()];
    assert_eq!(state.lengths(), lengths);
    let mut late: Vec<Vec<Chosen>> = Vec::new();
    for step in 0..8 {
        let chosen = policy.choose(&state, &picks(4, 5 + step)).unwrap();
        policy.append(&mut state, &chosen.iter().map(|c| c.token).collect::<Vec<_>>()).unwrap();
        late.push(chosen);
    }
    for (old, again) in before.iter().zip(&late[0]) {
        assert_eq!(old.token, again.token);
    }
    for (row, prompt) in [(2, &prompts[5]), (3, &prompts[6])] {
        let mut alone = policy.begin(Adapter::On);
        policy.join(&mut alone, &[prompt], 1, 16).unwrap();
        for (step, late) in late.iter().enumerate() {
            let pick = picks(4, 5 + step as u64)[row];
            let chosen = policy.choose(&alone, &[pick]).unwrap()[0];
            assert_eq!(chosen.token, late[row].token, "row {row}, step {step}");
            assert_close("a late row", &policy, &[late[row].logp], &[chosen.logp]);
            policy.append(&mut alone, &[chosen.token]).unwrap();
        }
    }
    assert!(policy.choose(&state, &picks(3, 0)).is_err() && policy.retain(&mut state, &[true]).is_err());
    assert!(policy.join(&mut state, &[&[]], 1, 16).is_err() && policy.append(&mut state, &[1]).is_err());
}
