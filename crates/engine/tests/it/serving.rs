//! Generation for many requests: an answer depends on its request alone, whatever else is in the batch, and equals that of
//! training's sampler.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::sync::Arc;

use rlood_engine::backend::BackendKind;
use rlood_engine::generate::{GeneratePrompt, GenerateRequest, generate};
use rlood_engine::model::{Adapter, Policy, Trajectory};
use rlood_engine::random::{Key, Stream};
use rlood_engine::sampling::Sampler;
use rlood_engine::serving::{Batcher, Counts, Limits};
use rlood_engine::text::Text;
use rlood_types::serving::{ServedFinish, ServedPiece, ServedRequest, TokenLogprobs};
use rlood_types::trajectory::Segments;
use serde_json::Value;

use crate::kinds::kinds;

const LIMITS: Limits = Limits { max_rows: 64, cache_bytes: 1 << 30, kept_bytes: 1 << 26 };

fn request(ids: &[u32]) -> ServedRequest {
    ServedRequest { ids: ids.to_vec(), max_tokens: 16, seed: 7, ..ServedRequest::default() }
}

/// Pseudorandom token ids of the fixtures' vocabulary.
fn ids(seed: u64, count: u64) -> Vec<u32> {
    (0..count).map(|i| 4 + Key::new(seed, Stream::Probe).with(i).below(316) as u32).collect()
}

/// A model with its adapters `lora` and `lora_rs` served in slots 0 and 1.
fn batcher(name: &str, kind: BackendKind) -> Batcher {
    let dir = rlood_test_support::fixture("parity").join(name);
    let mut policy = Policy::load(&dir, kind).unwrap();
    policy.serve_lora(0, &dir.join("lora")).unwrap();
    if dir.join("lora_rs").exists() {
        policy.serve_lora(1, &dir.join("lora_rs")).unwrap();
    }
    Batcher::new(policy, Arc::new(Text::load(&dir).unwrap()), LIMITS)
}

/// An answer put together from its pieces.
#[derive(Debug, Clone, Default, PartialEq)]
struct Whole {
    text: String,
    ids: Vec<u32>,
    logprobs: Vec<TokenLogprobs>,
    prompt: Option<Vec<Option<TokenLogprobs>>>,
    finish: Option<ServedFinish>,
    pieces: usize,
}

/// Runs requests to their end; each joins after as many steps as its number says.
fn run(batcher: &mut Batcher, requests: &[(usize, Option<u32>, ServedRequest)]) -> BTreeMap<(u64, u32), Whole> {
    let mut wholes: BTreeMap<(u64, u32), Whole> = BTreeMap::new();
    let mut step = 0;
    loop {
        for (id, (_, slot, request)) in requests.iter().enumerate().filter(|(_, (at, _, _))| *at == step) {
            batcher.push(id as u64, *slot, Arc::new(request.clone()));
        }
        let mut pieces: Vec<ServedPiece> = Vec::new();
        batcher.admit(&mut pieces).unwrap();
        batcher.choose(&mut pieces).unwrap();
        batcher.advance().unwrap();
        for piece in pieces {
            let whole = wholes.entry((piece.id, piece.index)).or_default();
            assert!(whole.finish.is_none(), "a piece after the last one");
            whole.text.push_str(&piece.text);
            whole.ids.extend(piece.ids);
            whole.logprobs.extend(piece.logprobs);
            whole.pieces += 1;
            whole.prompt = whole.prompt.take().or(piece.prompt);
            whole.finish = piece.finish;
        }
        step += 1;
        if batcher.is_idle() && requests.iter().all(|(at, _, _)| *at < step) {
            return wholes;
        }
    }
}

fn alone(name: &str, kind: BackendKind, slot: Option<u32>, request: &ServedRequest) -> Whole {
    run(&mut batcher(name, kind), &[(0, slot, request.clone())]).remove(&(0, 0)).unwrap()
}

/// Models of several kinds: qk-norm, biases, a sliding window of 8, norms after attention, rotary angles by length, states.
const MODELS: [&str; 7] = ["qwen3", "qwen2", "mistral", "gemma3_text", "llama_dynamic", "qwen3_nf4", "qwen3_5"];

#[test]
fn answers_do_not_depend_on_the_batch() {
    for kind in kinds() {
        for name in MODELS {
            let mixed: Vec<(usize, Option<u32>, ServedRequest)> = (0..8)
                .map(|i| {
                    let slot = [None, Some(0), Some(1)][i % 3].filter(|slot| *slot == 0 || name == "qwen3");
                    let mut request = request(&ids(i as u64, [5, 40, 3, 17][i % 4]));
                    request.max_tokens = 9 + i as u32;
                    request.seed = i as u64;
                    request.stream = i % 2 == 0;
                    if i % 3 == 1 {
                        (request.top_p, request.logprobs, request.presence_penalty) = (0.9, Some(3), 0.5);
                    }
                    (i / 2, slot, request)
                })
                .collect();
            let together = run(&mut batcher(name, kind), &mixed);
            for (id, (_, slot, request)) in mixed.iter().enumerate() {
                let alone = alone(name, kind, *slot, request);
                let together = &together[&(id as u64, 0)];
                if kind == BackendKind::Cpu {
                    assert_eq!(*together, alone, "{name}, request {id}");
                } else {
                    assert_eq!(together.ids, alone.ids, "{name}, request {id}");
                }
            }
        }
    }
}

#[test]
fn answers_are_those_of_trainings_sampler() {
    for kind in kinds() {
        for name in MODELS {
            let dir = rlood_test_support::fixture("parity").join(name);
            let mut policy = Policy::load(&dir, kind).unwrap();
            policy.load_lora(&dir.join("lora")).unwrap();
            let text = Text::load(&dir).unwrap();
            let prompt = ids(3, 19);
            let sampling = GenerateRequest {
                prompts: &[GeneratePrompt { row: 0, ids: &prompt, given: &[] }],
                num_generations: NonZeroUsize::new(2).unwrap(),
                sampler: Sampler { temperature: 0.8, ..Sampler::PLAIN },
                max_completion_length: 12,
                stop: &[],
                key: Key::new(7, Stream::Generate),
                eos_token_ids: text.eos_token_ids(),
                adapter: Adapter::On,
                max_rows: 2,
            };
            let groups = generate(&policy, &text, &sampling, &|| false).unwrap().unwrap();
            let served = ServedRequest { num_choices: 2, max_tokens: 12, temperature: 0.8, ..request(&prompt) };
            let answers = run(&mut batcher(name, kind), &[(0, Some(0), served)]);
            for (choice, completion) in groups[0].iter().enumerate() {
                assert_eq!(answers[&(0, choice as u32)].ids, completion.segments.completion().unwrap(), "{name}");
            }
        }
    }
}

#[test]
fn log_probs_are_those_of_the_model_for_prompt_and_answer() {
    for kind in kinds() {
        for (name, slot) in [("qwen3", Some(0)), ("mistral", None)] {
            let prompt = ids(5, 33);
            let mut echoing = request(&prompt);
            (echoing.echo, echoing.logprobs, echoing.temperature) = (true, Some(2), 0.0);
            let answer = alone(name, kind, slot, &echoing);
            let dir = rlood_test_support::fixture("parity").join(name);
            let mut policy = Policy::load(&dir, kind).unwrap();
            policy.load_lora(&dir.join("lora")).unwrap();
            let adapter = if slot.is_some() { Adapter::On } else { Adapter::Off };
            let rest = [&prompt[1..], &answer.ids].concat();
            let whole = Trajectory::new(&prompt[..1], &Segments::of_completion(rest, None)).num_tokens();
            assert_eq!(whole, prompt.len() + answer.ids.len());
            let segments = Segments::of_completion([&prompt[1..], &answer.ids].concat(), None);
            let scores = policy.score(&[Trajectory::new(&prompt[..1], &segments)], 1.0, adapter).unwrap();
            let echoed = answer.prompt.clone().unwrap();
            assert_eq!((echoed.len(), &echoed[0]), (prompt.len(), &None));
            let ours: Vec<&TokenLogprobs> = echoed[1..].iter().flatten().chain(&answer.logprobs).collect();
            assert_eq!(ours.len(), scores[0].logps.len());
            let tolerance = if kind == BackendKind::Cpu { 1e-5 } else { 1e-4 };
            for (ours, expected) in ours.iter().zip(&scores[0].logps) {
                assert!((ours.logprob - expected).abs() <= tolerance, "{name}: {} {expected}", ours.logprob);
            }
            for logprobs in &answer.logprobs {
                assert_eq!(logprobs.top[0].1, logprobs.logprob, "a greedy token is the most probable one");
            }
            // One token after an echoed prompt comes from the same pass.
            let one = alone(name, kind, slot, &ServedRequest { max_tokens: 1, ..echoing });
            assert_eq!((one.ids, one.finish), (answer.ids[..1].to_vec(), Some(ServedFinish::Length)), "{name}");
        }
    }
}

#[test]
fn equal_beginnings_are_computed_once() {
    let system = ids(1, 70);
    let chat = |seed: u64| request(&[system.clone(), ids(seed, 9)].concat());
    for name in ["qwen3", "mistral", "gemma3_text", "olmo3", "qwen3_5"] {
        let expected: Vec<Whole> = (2..6).map(|seed| alone(name, BackendKind::Cpu, Some(0), &chat(seed))).collect();
        let mut batcher = batcher(name, BackendKind::Cpu);
        let one_by_one: Vec<Whole> =
            (2..6).map(|seed| run(&mut batcher, &[(0, Some(0), chat(seed))]).remove(&(0, 0)).unwrap()).collect();
        assert_eq!(one_by_one, expected, "{name}");
        if name == "qwen3" {
            let Counts { prompt_tokens, reused_tokens, .. } = batcher.counts();
            assert_eq!((prompt_tokens, reused_tokens), (79 + 3 * 15, 3 * 64));
        }
        // Requests that arrive together share too, and another adapter's keys are never used.
        let mut fresh = self::batcher(name, BackendKind::Cpu);
        let together: Vec<(usize, Option<u32>, ServedRequest)> =
            [(2, Some(0)), (3, Some(0)), (4, Some(0)), (5, Some(0)), (2, None)]
                .map(|(seed, slot)| (0, slot, chat(seed)))
                .to_vec();
        let answers = run(&mut fresh, &together);
        for (id, expected) in expected.iter().enumerate() {
            assert_eq!(answers[&(id as u64, 0)], *expected, "{name}");
        }
        assert_eq!(answers[&(4, 0)], alone(name, BackendKind::Cpu, None, &chat(2)), "{name}");
        if ["qwen3", "qwen3_5"].contains(&name) {
            assert_eq!(fresh.counts().reused_tokens, 4 * 64, "{name}");
        }
    }
}

#[test]
fn settings_change_the_choice_of_tokens() {
    let base = || ServedRequest { temperature: 0.0, ..request(&ids(2, 12)) };
    let answer = |request: &ServedRequest| alone("qwen3", BackendKind::Cpu, None, request);
    let plain = answer(&base());
    let first = plain.ids[0];
    let banned = answer(&ServedRequest { logit_bias: vec![(first, -100.0)], ..base() });
    assert!(!banned.ids.contains(&first));
    let forced = answer(&ServedRequest { logit_bias: vec![(40, 100.0)], max_tokens: 5, ..base() });
    assert_eq!(forced.ids, [40; 5]);
    let penalized =
        answer(&ServedRequest { logit_bias: vec![(40, 100.0)], frequency_penalty: 60.0, max_tokens: 5, ..base() });
    assert_eq!(penalized.ids[..2], [40, 40]);
    assert!(penalized.ids[2..].iter().any(|id| *id != 40), "{:?}", penalized.ids);
    // Log-probs are those before the bias.
    let reported = answer(&ServedRequest { logit_bias: vec![(40, 100.0)], logprobs: Some(1), max_tokens: 1, ..base() });
    assert_eq!(reported.logprobs[0].top[0].0, first);
    assert!(reported.logprobs[0].logprob < reported.logprobs[0].top[0].1);
}

#[test]
fn an_answer_ends_at_a_stop_string_or_an_eos_token() {
    let base = || ServedRequest { temperature: 0.0, max_tokens: 24, ignores_eos: true, ..request(&ids(2, 12)) };
    let answer = |request: &ServedRequest| alone("qwen3", BackendKind::Cpu, None, request);
    let plain = answer(&base());
    assert_eq!((plain.ids.len(), plain.finish.clone()), (24, Some(ServedFinish::Length)));
    let middle = plain.text.char_indices().nth(plain.text.chars().count() / 2).unwrap().0;
    let stop: String = plain.text[middle..].chars().take(3).collect();
    let place = plain.text.find(&stop).unwrap();
    for stream in [false, true] {
        let stopped = answer(&ServedRequest { stop: vec![stop.clone()], stream, ..base() });
        assert_eq!(stopped.text, plain.text[..place]);
        assert_eq!(stopped.finish, Some(ServedFinish::Stop(stop.clone())));
        assert!(stopped.pieces > 1 || !stream);
        let kept = answer(&ServedRequest { stop: vec![stop.clone()], keeps_stop: true, stream, ..base() });
        assert_eq!(kept.text, plain.text[..place + stop.len()]);
    }
    let dir = rlood_test_support::fixture("parity").join("qwen3");
    let eos = Text::load(&dir).unwrap().eos_token_ids()[0];
    let ended = answer(&ServedRequest { logit_bias: vec![(eos, 100.0)], ignores_eos: false, ..base() });
    assert_eq!((ended.ids, ended.text, ended.finish), (vec![eos], String::new(), Some(ServedFinish::Eos(eos))));
}

#[test]
fn a_request_waits_for_room_and_leaves_when_it_is_cancelled() {
    let mut batcher = batcher("qwen3", BackendKind::Cpu);
    let long = ServedRequest { max_tokens: 200, num_choices: 40, ignores_eos: true, ..request(&ids(1, 4)) };
    for id in 0..3 {
        batcher.push(id, Some(0), Arc::new(long.clone()));
    }
    let mut pieces = Vec::new();
    batcher.admit(&mut pieces).unwrap();
    assert_eq!((batcher.running(), batcher.waiting()), (40, 80));
    batcher.choose(&mut pieces).unwrap();
    batcher.advance().unwrap();
    batcher.cancel(0).unwrap();
    batcher.cancel(1).unwrap();
    batcher.admit(&mut pieces).unwrap();
    assert_eq!((batcher.running(), batcher.waiting()), (40, 0));
    assert!(batcher.uses(Some(0)) && !batcher.uses(None));
    batcher.cancel(2).unwrap();
    assert!(batcher.is_idle());
    batcher.stop_serving(0);
}

#[test]
fn answers_that_were_paused_are_the_same() {
    let requests: Vec<(usize, Option<u32>, ServedRequest)> = (0..4)
        .map(|i| {
            let mut request = request(&ids(i as u64, 20));
            (request.max_tokens, request.ignores_eos, request.stream) = (400, true, i % 2 == 0);
            (0, [None, Some(0)][i % 2], request)
        })
        .collect();
    let free = run(&mut batcher("qwen3", BackendKind::Cpu), &requests);
    let mut narrow = batcher("qwen3", BackendKind::Cpu);
    narrow.limit_cache(1_230_000);
    let paused = run(&mut narrow, &requests);
    assert!(narrow.counts().prompt_tokens > 4 * 20 + 200, "{:?}", narrow.counts());
    for (key, whole) in &free {
        assert_eq!((&paused[key].text, &paused[key].ids), (&whole.text, &whole.ids));
    }
}

/// Greedy tokens and log-probs of served answers equal those of transformers and PEFT, on every case that the engine supports.
#[test]
fn parity_of_served_answers() {
    let folder = rlood_test_support::folder_of("RLOOD_PARITY", "parity");
    let only = std::env::var_os("RLOOD_PARITY_ONLY");
    let mut checked = 0;
    for entry in std::fs::read_dir(&folder).unwrap() {
        let dir = entry.unwrap().path();
        if only.as_ref().is_some_and(|only| dir.file_name() != Some(only)) || !dir.join("expected.json").exists() {
            continue;
        }
        // A family that is not supported is refused when its config is read; `parity.rs` checks by which name.
        if rlood_model_files::read(&dir).is_err() {
            continue;
        }
        let expected: Value = serde_json::from_slice(&std::fs::read(dir.join("expected.json")).unwrap()).unwrap();
        let name = dir.file_name().unwrap().to_string_lossy().into_owned();
        let mut policy = Policy::load(&dir, BackendKind::Cpu).unwrap();
        let has_adapter = expected["lora"].is_object() && dir.join("lora").exists();
        if has_adapter {
            policy.serve_lora(0, &dir.join("lora")).unwrap();
        }
        let mut batcher = Batcher::new(policy, Arc::new(Text::load(&dir).unwrap()), LIMITS);
        let of = |value: &Value| -> Vec<u32> { serde_json::from_value(value.clone()).unwrap() };
        let mut requests = Vec::new();
        let parts = [(None, &expected), (Some(0), &expected["lora"])];
        let parts = || parts.iter().filter(|(slot, part)| part.is_object() && (slot.is_none() || has_adapter));
        for (slot, part) in parts() {
            if part["greedy"].is_object() {
                let new = of(&part["greedy"]["new_ids"]);
                let mut greedy = request(&of(&part["greedy"]["prompt_ids"]));
                (greedy.temperature, greedy.max_tokens, greedy.ignores_eos) = (0.0, new.len() as u32, true);
                requests.push((0, *slot, greedy));
            }
            for check in part["logits_check"].as_array().into_iter().flatten() {
                let mut echo = request(&of(&check["ids"]));
                (echo.echo, echo.logprobs, echo.max_tokens, echo.temperature) = (true, Some(1), 1, 0.0);
                requests.push((0, *slot, echo));
            }
        }
        let answers = run(&mut batcher, &requests);
        let mut answers = (0..requests.len() as u64).map(|id| &answers[&(id, 0)]);
        for (slot, part) in parts() {
            if part["greedy"].is_object() {
                assert_eq!(answers.next().unwrap().ids, of(&part["greedy"]["new_ids"]), "{name} {slot:?}");
            }
            for check in part["logits_check"].as_array().into_iter().flatten() {
                let echoed = answers.next().unwrap();
                let argmax = of(&check["argmax"]);
                assert_eq!(echoed.ids[0], *argmax.last().unwrap(), "{name} {slot:?}");
                let logps = check["token_logprobs"].as_array().unwrap();
                let ours = echoed.prompt.as_ref().unwrap()[1..].iter().flatten();
                for ((ours, expected), argmax) in ours.zip(logps).zip(&argmax) {
                    let difference = f64::from(ours.logprob) - expected.as_f64().unwrap();
                    assert!(difference.abs() < 2e-4, "{name} {slot:?}: {difference}");
                    assert_eq!(ours.top[0].0, *argmax, "{name} {slot:?}");
                }
                checked += 1;
            }
        }
    }
    assert!(checked > 0, "no case in {}", folder.display());
    println!("parity of served answers: {checked} sequences");
}
