//! Compares tiny random models with transformers and PEFT, on every backend in f32, with the same
//! tolerances. `tests/fixtures/README.md` explains the fields. `precision.rs` covers bf16; `models_page.rs`
//! writes the results to `docs/reference/models.md`.
//!
//! Longer than other files: one check for each section of `expected.json`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use candle_core::Device;
use rlood_engine::backend::{BackendKind, Flat, Optimizer};
use rlood_engine::merge::{MergeInput, MergedDtype, merge};
use rlood_engine::model::{Adapter, Pick, Policy, Trajectory};
use rlood_engine::optim::AdamW;
use rlood_engine::text::Text;
use rlood_types::spec::{LrSchedulerType, OptimizerKind, OptimizerPlan};
use serde_json::Value;

use crate::kinds::kinds;
use crate::models_page;

/// Tolerance for logits in f32 and values computed from them.
const LOGITS: f64 = 2e-4;
/// Tolerance for log-probs, which sum over the vocabulary; the fixtures are rounded to 6 digits.
const LOGPS: f64 = 2e-4;
/// Tolerance for log-probs after an optimizer step.
const ADAMW: f64 = 1e-3;
/// Tolerance for gradients, relative to the tensor's norm.
const GRADIENT: f64 = 1e-3;
/// Typical error of a single gradient value, relative to the tensor's norm: about twice the largest one observed.
const NOISE: f64 = 2e-5;

type Checked<T = ()> = Result<T, String>;

/// The largest difference for each kind of value.
pub type Worst = BTreeMap<&'static str, f64>;

/// Cases that are not supported yet: a JSON pointer into config.json, and the value there. Entries may only be removed. Each meets a
/// case of the fixtures, which has config.json and expected.json only: a model is refused before its weights are read.
const REFUSED: [(&str, &str); 2] = [("/model_type", "gpt_oss"), ("/model_type", "qwen3_moe")];
/// The error for adapters that the GPU kernels do not support.
const REFUSED_ADAPTERS_ON_GPU: &str =
    "for rank_pattern and alpha_pattern that differ between q, k and v, or gate and up";

#[test]
fn every_case_agrees_with_transformers_and_peft() {
    let folder = rlood_test_support::folder_of("RLOOD_PARITY", "parity");
    let mut cases: Vec<PathBuf> = std::fs::read_dir(&folder)
        .unwrap_or_else(|e| panic!("{}: {e}", folder.display()))
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.join("expected.json").exists())
        .collect();
    // Runs a single case: a failing GPU would fail every later case too.
    let only = std::env::var_os("RLOOD_PARITY_ONLY");
    cases.retain(|path| only.as_ref().is_none_or(|only| path.file_name() == Some(only)));
    cases.sort();
    assert!(!cases.is_empty(), "no case in {}, or none of RLOOD_PARITY_ONLY={only:?}", folder.display());
    let is_usual = ["RLOOD_PARITY", "RLOOD_PARITY_ONLY"].iter().all(|name| std::env::var_os(name).is_none());
    if is_usual {
        let unmet: Vec<_> =
            REFUSED.iter().filter(|entry| !cases.iter().any(|case| refusal(case) == Some(**entry))).collect();
        assert!(unmet.is_empty(), "no case of {} is refused by {unmet:?}", folder.display());
    }
    let (mut failed, mut rows) = (Vec::new(), Vec::new());
    for case in &cases {
        let name = case.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if let Some(refused) = check_refused(case) {
            match refused {
                Ok(why) => println!("parity {name}: refused ({why})"),
                Err(why) => {
                    println!("parity {name}: FAILED: {why}");
                    failed.push(format!("{name}: {why}"));
                }
            }
            continue;
        }
        match kinds().into_iter().map(|kind| check_on(case, kind)).collect::<Checked<Vec<OnKind>>>() {
            Ok(on_each) => {
                let summaries: Vec<String> = on_each.iter().map(|on| format!("{}: {}", on.kind, on.summary)).collect();
                println!("parity {name}: ok ({})", summaries.join("; "));
                let worst_of = |kind: &str| on_each.iter().find(|on| on.kind == kind).map(|on| on.worst.clone());
                rows.push(models_page::Row::new(case, [worst_of("cpu"), worst_of("reference")]));
            }
            Err(why) => {
                println!("parity {name}: FAILED: {why}");
                failed.push(format!("{name}: {why}"));
            }
        }
    }
    assert!(failed.is_empty(), "{} of {} cases failed:\n{}", failed.len(), cases.len(), failed.join("\n"));
    if is_usual && std::env::var_os("RLOOD_TEST_BACKEND").is_none() {
        models_page::check(&rows);
    }
}

/// The result of a case on a backend.
struct OnKind {
    kind: String,
    summary: String,
    worst: Worst,
}

/// Checks a case; a panic does not prevent the other cases from running.
fn check_on(case: &Path, kind: BackendKind) -> Checked<OnKind> {
    let checked = std::panic::catch_unwind(|| match beyond_gpu(case, kind) {
        Some(keys) => check_refused_on_gpu(case, kind, keys).map(|summary| (summary, Worst::new())),
        None => match check_case(case, kind) {
            Err(why) if matches!(kind, BackendKind::Cuda { .. }) && why.ends_with(REFUSED_ADAPTERS_ON_GPU) => {
                Ok((format!("refused ({why})"), Worst::new()))
            }
            checked => checked.map(|worst| (shown(&worst), worst)),
        },
    });
    let kind = format!("{kind:?}").to_lowercase();
    match checked.unwrap_or_else(|_| Err("panicked".to_owned())) {
        Ok((summary, worst)) => Ok(OnKind { kind, summary, worst }),
        Err(why) => Err(format!("{kind}: {why}")),
    }
}

fn shown(worst: &Worst) -> String {
    worst.iter().map(|(what, error)| format!("{what} {error:.1e}")).collect::<Vec<String>>().join(", ")
}

/// The entry of [`REFUSED`] that a case meets. None means the case is supported.
fn refusal(dir: &Path) -> Option<(&'static str, &'static str)> {
    let config: Value = serde_json::from_slice(&std::fs::read(dir.join("config.json")).ok()?).ok()?;
    let is_there = |(at, value): &(&str, &str)| config.pointer(at).and_then(Value::as_str) == Some(*value);
    REFUSED.into_iter().find(is_there)
}

/// Checks that the error for an unsupported case names the key of its config.json. None means the case is supported.
fn check_refused(dir: &Path) -> Option<Checked<String>> {
    let (at, _) = refusal(dir)?;
    let key = at.rsplit_once('/').filter(|(key, _)| key.contains("quant")).map_or(at, |(key, _)| key);
    let key = key.trim_start_matches('/').replace('/', ".");
    Some(match rlood_model_files::read(dir) {
        Err(error) if error.to_string().contains(&key) => Ok(error.to_string()),
        Err(error) => Err(format!("it is refused without naming {key}: {error}")),
        Ok(_) => Err(format!("{key} is on the list of what is refused, and is loaded")),
    })
}

/// The part of a model for which the GPU has no kernels.
fn beyond_gpu(dir: &Path, kind: BackendKind) -> Option<&'static str> {
    let is_gpu = matches!(kind, BackendKind::Cuda { .. });
    rlood_model_files::read(dir).ok().filter(|_| is_gpu)?.config.beyond_gpu()
}

fn check_refused_on_gpu(dir: &Path, kind: BackendKind, keys: &str) -> Checked<String> {
    match Policy::load(dir, kind).map_err(chain) {
        Err(why) if why.contains(keys) => Ok(format!("refused ({why})")),
        Err(why) => Err(format!("it is refused without naming {keys}: {why}")),
        Ok(_) => Err(format!("it is loaded, and has no kernels for {keys}")),
    }
}

fn check_case(dir: &Path, kind: BackendKind) -> Checked<Worst> {
    let expected: Value = serde_json::from_slice(&std::fs::read(dir.join("expected.json")).unwrap()).unwrap();
    let mut policy = Policy::load(dir, kind).map_err(chain)?;
    let mut worst = Worst::new();
    let mut note = |what: &'static str, error: f64| {
        let entry = worst.entry(what).or_default();
        *entry = entry.max(error);
    };

    check_config_v4(dir, &policy)?;
    let text = Text::load(dir).map_err(chain)?;
    check_tokenizer(&text, &expected)?;
    check_chat(&text, &expected)?;

    note("logits", check_logits(&policy, &expected["logits_check"], Adapter::On)?);
    note("logps", check_completions(&policy, &expected["completions"], Adapter::On)?);
    check_padded_batch(&policy, &expected)?;
    check_temperature(&policy, &expected)?;
    check_greedy(&policy, &text, &expected["greedy"])?;

    for key in ["lora", "lora_rs"] {
        let section = &expected[key];
        if section.is_null() {
            continue;
        }
        policy.load_lora(&dir.join(section["dir"].as_str().unwrap())).map_err(chain)?;
        let at = |e: String| format!("{key}: {e}");
        note("lora logits", check_logits(&policy, &section["logits_check"], Adapter::On).map_err(at)?);
        note("lora logps", check_completions(&policy, &section["completions"], Adapter::On).map_err(at)?);
        check_completions(&policy, &expected["completions"], Adapter::Off).map_err(|e| format!("{key} off: {e}"))?;
        check_greedy(&policy, &text, &section["greedy"]).map_err(at)?;
        check_round_trip(&policy, dir, &dir.join(section["dir"].as_str().unwrap())).map_err(at)?;
        if !matches!(kind, BackendKind::Cuda { .. }) {
            check_merged(dir, section, kind).map_err(|e| format!("{key} merged: {e}"))?;
        }
    }
    if !expected["reinforce"].is_null() {
        policy.load_lora(&dir.join("lora")).map_err(chain)?;
        note("gradient", check_reinforce(&policy, &expected)?);
        note("adamw", check_adamw(&mut policy, &expected)?);
    }
    Ok(worst)
}

/// Checks that base and adapter merged in f32 compute the same as the two separately.
fn check_merged(dir: &Path, section: &Value, kind: BackendKind) -> Checked {
    let out = tempfile::tempdir().map_err(chain)?;
    let input = MergeInput {
        model_dir: dir,
        checkpoint_dir: &dir.join(section["dir"].as_str().unwrap()),
        is_adapter: true,
        dtype: Some(MergedDtype::Float32),
        four_bit: None,
        out_dir: out.path(),
    };
    let merged = merge(input, &mut |_, _| true).map_err(chain)?.ok_or("it was stopped")?;
    let survived = merged.survived.ok_or("it has no update")?;
    if survived.cosine < 0.999_9 {
        return Err(format!("{survived:?} of the update is left in f32"));
    }
    let policy = Policy::load(out.path(), kind).map_err(chain)?;
    check_logits(&policy, &section["logits_check"], Adapter::On)?;
    check_completions(&policy, &section["completions"], Adapter::On).map(drop)
}

fn chain(error: impl std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(inner) = source {
        text = format!("{text}: {inner}");
        source = inner.source();
    }
    text
}

fn close(what: &str, got: f64, want: f64, tolerance: f64) -> Checked<f64> {
    let error = (got - want).abs() / want.abs().max(1.0);
    if error.is_finite() && error <= tolerance { Ok(error) } else { Err(format!("{what}: {got} instead of {want}")) }
}

fn all_close(what: &str, got: &[f32], want: &Value, tolerance: f64) -> Checked<f64> {
    let want = numbers(want);
    if got.len() != want.len() {
        return Err(format!("{what}: {} values instead of {}", got.len(), want.len()));
    }
    let mut worst = 0f64;
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        worst = worst.max(close(&format!("{what}[{i}]"), f64::from(*got), want, tolerance)?);
    }
    Ok(worst)
}

fn same<T: PartialEq + std::fmt::Debug>(what: &str, got: T, want: T) -> Checked {
    if got == want { Ok(()) } else { Err(format!("{what}: {got:?} instead of {want:?}")) }
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn check_config_v4(dir: &Path, policy: &Policy) -> Checked {
    if !dir.join("config_v4.json").exists() {
        return Ok(());
    }
    let card = rlood_model_files::read_with_config(dir, "config_v4.json").map_err(chain)?;
    same("config_v4.json", &card.config, &policy.card().config)?;
    same("eos of config_v4.json", &card.eos_token_ids, &policy.card().eos_token_ids)
}

fn check_tokenizer(text: &Text, expected: &Value) -> Checked {
    for case in list(&expected["tokenizer"]) {
        let input = case["text"].as_str().unwrap();
        let encoded = text.encode(input, true).map_err(chain)?;
        same(&format!("ids of {input:?}"), &encoded, &ids(&case["ids"]))?;
        let plain = text.encode(input, false).map_err(chain)?;
        same(&format!("ids_no_special of {input:?}"), &plain, &ids(&case["ids_no_special"]))?;
        for (key, skip) in [("decoded", false), ("decoded_skip_special", true)] {
            let decoded = text.decode(&ids(&case["ids"]), skip).map_err(chain)?;
            same(&format!("{key} of {input:?}"), decoded.as_str(), case[key].as_str().unwrap())?;
        }
    }
    Ok(())
}

fn check_chat(text: &Text, expected: &Value) -> Checked {
    for case in list(&expected["chat"]) {
        let generation = case["add_generation_prompt"].as_bool().unwrap();
        let rendered = text.render_chat(list(&case["messages"]), generation, &serde_json::Map::new());
        let what = format!("chat {}", case["messages"]);
        if let Some(error) = case["error"].as_str() {
            match rendered {
                Ok(rendered) => return Err(format!("{what}: {rendered:?} instead of the error {error:?}")),
                Err(e) if e.to_string().contains(error) => continue,
                Err(e) => return Err(format!("{what}: the error {e} instead of {error:?}")),
            }
        }
        let rendered = rendered.map_err(chain)?;
        same(&what, rendered.as_str(), case["text"].as_str().unwrap())?;
        same(&what, &text.encode(&rendered, false).map_err(chain)?, &ids(&case["ids"]))?;
    }
    Ok(())
}

fn check_logits(policy: &Policy, section: &Value, adapter: Adapter) -> Checked<f64> {
    let mut worst = 0f64;
    for (index, case) in list(section).iter().enumerate() {
        let sequence = ids(&case["ids"]);
        let every: Vec<usize> = (0..sequence.len()).collect();
        let logits = policy.logits(&sequence, &every, adapter).map_err(chain)?;
        for (position, want) in ids(&case["positions"]).iter().zip(list(&case["logits"])) {
            let what = format!("logits {index} at {position}");
            worst = worst.max(all_close(&what, &logits[*position as usize], want, LOGITS)?);
        }
        let argmax: Vec<u32> = logits.iter().map(|row| argmax(row)).collect();
        same(&format!("argmax {index}"), &argmax, &ids(&case["argmax"]))?;
        let (prompt, completion) = sequence.split_at(1);
        let score = policy.score(&[Trajectory::of_completion(prompt, completion)], 1.0, adapter).map_err(chain)?;
        let what = format!("token_logprobs {index}");
        worst = worst.max(all_close(&what, &score[0].logps, &case["token_logprobs"], LOGPS)?);
    }
    Ok(worst)
}

fn argmax(row: &[f32]) -> u32 {
    let best = (0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b]).then(b.cmp(a)));
    best.unwrap() as u32
}

/// Prompts and completions of a section, with their log-probs.
fn completions(section: &Value) -> Vec<(Vec<u32>, Vec<u32>, &Value)> {
    let cases = list(section).iter();
    cases.map(|c| (ids(&c["prompt_ids"]), ids(&c["completion_ids"]), &c["logprobs"])).collect()
}

fn check_completions(policy: &Policy, section: &Value, adapter: Adapter) -> Checked<f64> {
    let cases = completions(section);
    let rows: Vec<Trajectory> =
        cases.iter().map(|(prompt, completion, _)| Trajectory::of_completion(prompt, completion)).collect();
    let mut worst = 0f64;
    // First all rows together, then one at a time.
    let together = policy.score(&rows, 1.0, adapter).map_err(chain)?;
    for (index, (_, _, want)) in cases.iter().enumerate() {
        let alone = policy.score(&rows[index..=index], 1.0, adapter).map_err(chain)?;
        worst = worst.max(all_close(&format!("completion {index}"), &together[index].logps, want, LOGPS)?);
        for (together, alone) in together[index].logps.iter().zip(&alone[0].logps) {
            close("alone and in a batch", f64::from(*together), f64::from(*alone), 1e-5)?;
        }
    }
    Ok(worst)
}

fn check_padded_batch(policy: &Policy, expected: &Value) -> Checked {
    let section = &expected["padded_batch"];
    if section.is_null() {
        return Ok(());
    }
    let width = section["prompt_width"].as_u64().unwrap() as usize;
    let mut batch = Vec::new();
    for (row, mask) in list(&section["input_ids"]).iter().zip(list(&section["attention_mask"])) {
        let (row, mask) = (ids(row), ids(mask));
        let real =
            |range: std::ops::Range<usize>| -> Vec<u32> { range.filter(|i| mask[*i] == 1).map(|i| row[i]).collect() };
        batch.push((real(0..width), real(width..row.len())));
    }
    let rows: Vec<Trajectory> =
        batch.iter().map(|(prompt, completion)| Trajectory::of_completion(prompt, completion)).collect();
    let scores = policy.score(&rows, 1.0, Adapter::On).map_err(chain)?;
    for (index, (score, want)) in scores.iter().zip(list(&section["logprobs"])).enumerate() {
        let mut padded = score.logps.clone();
        padded.resize(list(want).len(), 0.0);
        all_close(&format!("padded_batch {index}"), &padded, want, LOGPS)?;
    }
    Ok(())
}

fn check_temperature(policy: &Policy, expected: &Value) -> Checked {
    let section = &expected["temperature_logprobs"];
    let cases = completions(&expected["completions"]);
    let Some((prompt, completion, _)) = cases.first().filter(|_| !section.is_null()) else { return Ok(()) };
    let temperature = section["temperature"].as_f64().unwrap();
    let scores =
        policy.score(&[Trajectory::of_completion(prompt, completion)], temperature, Adapter::On).map_err(chain)?;
    all_close("temperature_logprobs", &scores[0].logps, &section["logprobs"], LOGPS).map(|_| ())
}

fn check_greedy(policy: &Policy, text: &Text, section: &Value) -> Checked {
    if section.is_null() {
        return Ok(());
    }
    let prompt = ids(&section["prompt_ids"]);
    let encoded = text.encode(section["prompt"].as_str().unwrap(), true).map_err(chain)?;
    same("greedy prompt", &encoded, &prompt)?;
    let want = ids(&section["new_ids"]);
    let mut state = policy.begin(Adapter::On);
    policy.join(&mut state, &[&prompt], 2, want.len()).map_err(chain)?;
    let mut sequence = prompt;
    for (step, want) in want.iter().enumerate() {
        let logits = policy.next_logits(&state).map_err(chain)?;
        same(&format!("greedy token {step}"), argmax(logits.row(1)), *want)?;
        let greedy = [Pick { temperature: 0.0, uniform: 0.5 }; 2];
        same(&format!("chosen token {step}"), policy.choose(&state, &greedy).map_err(chain)?[1].token, *want)?;
        // Decoding with the cache gives the same as a forward pass over the whole sequence.
        let full = policy.logits(&sequence, &[sequence.len() - 1], Adapter::On).map_err(chain)?;
        for (cached, full) in logits.row(1).iter().zip(&full[0]) {
            close(&format!("cached logits {step}"), f64::from(*cached), f64::from(*full), 1e-4)?;
        }
        sequence.push(*want);
        policy.append(&mut state, &[0, *want]).map_err(chain)?;
    }
    Ok(())
}

fn check_round_trip(policy: &Policy, model: &Path, adapter: &Path) -> Checked {
    let dir = tempfile::tempdir().unwrap();
    let name = model.file_name().unwrap().to_str().unwrap();
    policy.save_lora(dir.path(), name).map_err(chain)?;
    // Names, shapes and values must equal those written by PEFT.
    let read =
        |path: &Path| candle_core::safetensors::load(path.join("adapter_model.safetensors"), &Device::Cpu).unwrap();
    let (ours, theirs) = (read(dir.path()), read(adapter));
    same("adapter tensors", ours.len(), theirs.len())?;
    for (name, tensor) in &theirs {
        let Some(ours) = ours.get(name) else { return Err(format!("adapter: no tensor {name}")) };
        same(name, ours.dims(), tensor.dims())?;
        let values = |t: &candle_core::Tensor| t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        same(name, values(ours), values(tensor))?;
    }
    let config = |path: &Path| -> Value {
        let mut config: Value =
            serde_json::from_slice(&std::fs::read(path.join("adapter_config.json")).unwrap()).unwrap();
        config["target_modules"].as_array_mut().unwrap().sort_by_key(Value::to_string);
        config
    };
    // A selection of layers is written as a list of names; the checks below show that it selects the same layers.
    let theirs = config(adapter);
    if theirs["layers_to_transform"].is_null() && theirs["exclude_modules"].is_null() {
        same("adapter_config.json", config(dir.path()), theirs)?;
    }
    let mut again = Policy::load(model, BackendKind::Cpu).map_err(chain)?;
    again.load_lora(dir.path()).map_err(chain)?;
    same("adapter read again", again.parameter_values().map_err(chain)?, policy.parameter_values().map_err(chain)?)
}

/// Computes the gradient of −Σ A·logp over the completions, and the loss.
fn reinforce(policy: &Policy, expected: &Value) -> Checked<(f64, Flat)> {
    let advantages = numbers(&expected["reinforce"]["advantages"]);
    let cases = completions(&expected["completions"]);
    let rows: Vec<Trajectory> =
        cases.iter().map(|(prompt, completion, _)| Trajectory::of_completion(prompt, completion)).collect();
    let mut gradient = policy.zero_gradient().map_err(chain)?;
    let mut loss = 0f64;
    policy
        .forward_backward(
            &rows,
            1.0,
            &mut |scores| {
                let rows = scores.iter().zip(&advantages);
                loss = rows.clone().map(|(s, a)| -a * s.logps.iter().map(|p| f64::from(*p)).sum::<f64>()).sum();
                Ok(rows.map(|(s, a)| vec![-*a as f32; s.logps.len()]).collect())
            },
            &mut gradient,
        )
        .map_err(chain)?;
    Ok((loss, gradient))
}

fn norm(values: &[f32]) -> f64 {
    values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt()
}

fn check_reinforce(policy: &Policy, expected: &Value) -> Checked<f64> {
    let section = &expected["reinforce"];
    let (loss, gradient) = reinforce(policy, expected)?;
    let gradient = gradient.values().map_err(chain)?;
    close("reinforce loss", loss, section["loss"].as_f64().unwrap(), 1e-3)?;
    close("reinforce total_norm", norm(&gradient), section["total_norm"].as_f64().unwrap(), GRADIENT)?;
    let parameters = policy.parameters();
    same("gradient tensors", parameters.len(), section["grad_norms"].as_object().unwrap().len())?;
    let mut worst = 0f64;
    for info in parameters {
        let part = &gradient[info.offset..info.offset + info.shape.iter().product::<usize>()];
        let Some(want) = section["grad_norms"][&info.name].as_f64() else {
            return Err(format!("grad_norms names no {}", info.name));
        };
        let error = (norm(part) - want).abs() / want;
        if error.is_nan() || error > GRADIENT {
            return Err(format!("gradient of {}: norm {} instead of {want}", info.name, norm(part)));
        }
        worst = worst.max(error);
        for (i, (got, first)) in part.iter().zip(numbers(&section["grad_first4"][&info.name])).enumerate() {
            // A single entry is compared relative to its own size, or to that of a typical entry.
            let typical = want / (part.len() as f64).sqrt();
            let error = (f64::from(*got) - first).abs() / first.abs().max(typical);
            if error.is_nan() || error > GRADIENT {
                return Err(format!("gradient of {}[{i}]: {got} instead of {first}", info.name));
            }
            worst = worst.max(error);
        }
    }
    Ok(worst)
}

/// Makes one clipped AdamW step from the `lora` adapter, then scores the completions again.
fn check_adamw(policy: &mut Policy, expected: &Value) -> Checked<f64> {
    let section = &expected["adamw"];
    if section.is_null() {
        return Ok(0.0);
    }
    let number = |key: &str| section[key].as_f64().unwrap();
    let betas = numbers(&section["betas"]);
    let plan = OptimizerPlan {
        kind: OptimizerKind::Adamw,
        learning_rate: number("lr"),
        adam_beta1: betas[0],
        adam_beta2: betas[1],
        adam_epsilon: number("eps"),
        weight_decay: number("weight_decay"),
        max_grad_norm: number("max_norm"),
        lr_scheduler_type: LrSchedulerType::Constant,
        warmup_steps: 0,
    };
    let (_, mut gradient) = reinforce(policy, expected)?;
    let slopes = gradient.values().map_err(chain)?.into_owned();
    gradient.clip(plan.max_grad_norm).map_err(chain)?;
    let adam = AdamW::new(policy.flat().len());
    let mut optimizer = Optimizer::from_state(policy.flat(), adam).map_err(chain)?;
    let update = |flat: &mut Flat| optimizer.update(flat, &gradient, plan.learning_rate, &plan);
    policy.update_parameters(update).map_err(chain)?;
    let values = policy.parameter_values().map_err(chain)?;
    for info in policy.parameters() {
        let range = info.offset..info.offset + info.shape.iter().product::<usize>();
        let (part, slopes) = (&values[range.clone()], &slopes[range]);
        let want = section["param_norms"][&info.name].as_f64().unwrap_or(f64::NAN);
        // A weight whose gradient is smaller than its error may move by lr in either direction; this is the resulting
        // uncertainty of the norm.
        let uncertain = part.iter().zip(slopes).filter(|(_, slope)| f64::from(slope.abs()) < NOISE * norm(slopes));
        let shift = uncertain.map(|(value, _)| f64::from(value.abs()) + plan.learning_rate).sum::<f64>();
        let tolerance = 1e-4 + 2.0 * plan.learning_rate * shift / norm(part).powi(2);
        close(&format!("adamw norm of {}", info.name), norm(part), want, tolerance)?;
    }
    // The first step moves every weight by about lr, whatever the size of its gradient, so
    // tiny gradients are amplified.
    let mut worst = 0f64;
    for (index, (prompt, completion, want)) in completions(&section["completions"]).into_iter().enumerate() {
        let scores =
            policy.score(&[Trajectory::of_completion(&prompt, &completion)], 1.0, Adapter::On).map_err(chain)?;
        worst = worst.max(all_close(&format!("adamw completion {index}"), &scores[0].logps, want, ADAMW)?);
    }
    Ok(worst)
}
