//! Replays recorded TRL runs end to end: recorded prompts, completions and rewards go through
//! `engine::train`, on every backend.
//!
//! `tests/fixtures/README.md` explains the files. The tests compute nothing; they compare what the engine reports.

use std::num::NonZeroU32;

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use rlood_engine::backend::BackendKind;
use rlood_engine::host::{PromptRow, Rollout, RolloutCompletion, RolloutGroup};
use rlood_engine::rollout::cut_completion;
use rlood_engine::text::Text;
use rlood_types::event::SamplePhase;
use rlood_types::rollout::{RewardValue, Score, Segments};
use rlood_types::spec::{Combine, LrSchedulerType, Plan};
use safetensors::SafeTensors;
use serde_json::{Map, Value, json};

use crate::kinds::kinds;
use crate::train::{Start, TestHost, Trace, plan, reward, train_model};

/// Tolerance (absolute or relative) for log-probs and advantages of the first block, and metrics of the first step.
const EXACT: f64 = 2e-5;
/// Tolerance for values after an update, and for weights. TRL differs from itself by as much
/// with another attention implementation.
const LATER: f64 = 2e-4;
/// Weights are compared only if the clipped gradient was larger than this in every step, because
/// AdamW amplifies smaller ones.
const SMALLEST_GRADIENT: f32 = 1e-6;
/// Keys of TRL's log that are not metrics of a step.
const NOT_METRICS: [&str; 3] = ["step", "step_time", "total_flos"];
/// TRL averages these over its own shuffled micro-batches; with one micro-batch per step they equal the step's values.
const OF_MICRO_BATCHES: [&str; 3] = ["entropy", "clip_ratio/low_min", "clip_ratio/high_max"];

#[test]
fn golden() {
    let folder = rlood_test_support::folder_of("RLOOD_GOLDEN", "golden");
    let mut cases: Vec<PathBuf> = std::fs::read_dir(&folder)
        .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
        .map(|entry| entry.expect("a directory entry").path())
        .filter(|path| path.is_dir())
        .collect();
    // Runs a single case: a failing GPU would fail every later run too.
    let only = std::env::var_os("RLOOD_GOLDEN_ONLY");
    cases.retain(|path| only.as_ref().is_none_or(|only| path.file_name() == Some(only)));
    cases.sort();
    assert!(!cases.is_empty(), "{} holds no runs, or none of RLOOD_GOLDEN_ONLY={only:?}", folder.display());
    let mut failed = Vec::new();
    for dir in &cases {
        let name = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let mut summaries = Vec::new();
        for kind in kinds() {
            let on = format!("{kind:?}").to_lowercase();
            match std::panic::catch_unwind(|| compare(dir, kind)) {
                Ok(report) if report.failures.is_empty() => summaries.push(format!("{on}: {}", report.summary())),
                Ok(report) => {
                    let shown = report.failures.iter().take(20).cloned().collect::<Vec<_>>().join("\n  ");
                    println!("golden {name}: FAILED on {on}, {} differences\n  {shown}", report.failures.len());
                    failed.push(format!("{name} on {on}"));
                }
                Err(_) => {
                    println!("golden {name}: FAILED on {on}, panicked");
                    failed.push(format!("{name} on {on}"));
                }
            }
        }
        if summaries.len() == kinds().len() {
            println!("golden {name}: ok ({})", summaries.join("; "));
        }
    }
    assert!(failed.is_empty(), "of {} runs these differ: {failed:?}", cases.len());
}

#[derive(Default)]
struct Report {
    failures: Vec<String>,
    /// Number of comparisons and largest difference, for each kind of value.
    compared: BTreeMap<&'static str, (usize, f64)>,
    notes: Vec<String>,
}

impl Report {
    fn close(&mut self, kind: &'static str, what: &str, actual: Option<f64>, expected: Option<f64>, tolerance: f64) {
        let entry = self.compared.entry(kind).or_default();
        entry.0 += 1;
        match (actual, expected) {
            (None, None) => {}
            (Some(actual), Some(expected)) => {
                let difference = (actual - expected).abs() / expected.abs().max(1.0);
                entry.1 = entry.1.max(difference);
                if difference.is_nan() || difference > tolerance {
                    self.failures.push(format!("{kind} {what}: {actual} instead of {expected}"));
                }
            }
            _ => self.failures.push(format!("{kind} {what}: {actual:?} instead of {expected:?}")),
        }
    }

    fn summary(&self) -> String {
        let mut parts: Vec<String> =
            self.compared.iter().map(|(kind, (count, worst))| format!("{count} {kind} to {worst:.1e}")).collect();
        parts.extend(self.notes.iter().cloned());
        parts.join(", ")
    }
}

/// A recorded run of TRL.
struct Recorded {
    run: Value,
    plan: Plan,
    blocks: Vec<RecordedBlock>,
}

/// One generation block: the rollout to replay, and TRL's values for each completion, by (dataset row, generation).
struct RecordedBlock {
    rollout: Rollout,
    rows: HashMap<(u64, usize), RecordedRow>,
}

struct RecordedRow {
    old_logps: Vec<Option<f64>>,
    ref_logps: Option<Vec<Option<f64>>>,
    advantage: Option<f64>,
    mask: Vec<bool>,
}

fn array(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn ids(value: &Value) -> Vec<u32> {
    array(value).iter().map(|id| id.as_u64().expect("an id") as u32).collect()
}

fn floats(value: &Value) -> Vec<Option<f64>> {
    array(value).iter().map(Value::as_f64).collect()
}

impl Recorded {
    fn read(dir: &Path) -> Self {
        let run: Value = serde_json::from_slice(&std::fs::read(dir.join("run.json")).expect("run.json")).expect("JSON");
        let text = Text::load(dir).expect("the tokenizer");
        let prompts: Vec<Vec<u32>> = array(&run["prompt_ids"]).iter().map(ids).collect();
        let reward_names = reward_names(&run);
        let longest = array(&run["completion_ids"])
            .iter()
            .flat_map(array)
            .map(|row| array(row).len())
            .max()
            .expect("completions");
        let plan = plan_of(&run, dir, &reward_names, prompts.len(), longest);
        let blocks = array(&run["rollouts"])
            .iter()
            .map(|rollout| RecordedBlock::read(rollout, &run, &prompts, &reward_names, &text, longest))
            .collect();
        Self { run, plan, blocks }
    }
}

/// The names of the rewards as TRL logged them, in its order.
fn reward_names(run: &Value) -> Vec<String> {
    let log = run["steps"][0]["log"].as_object().expect("a log");
    log.keys().filter_map(|key| Some(key.strip_prefix("rewards/")?.strip_suffix("/mean")?.to_string())).collect()
}

/// The reward values of generation g of prompt p. The file has `[p][g]` with a number, null, or one entry per reward;
/// or the same by reward, as a list or by name.
fn score(run: &Value, names: &[String], prompt: usize, generation: usize, prompts: usize) -> Score {
    let rewards = &run["rewards"];
    let value = |value: &Value| value.as_f64().map_or(RewardValue::Missing, RewardValue::Number);
    let by_reward = |columns: &Value| value(&columns[prompt][generation]);
    let values = if rewards.is_object() {
        names.iter().map(|name| by_reward(&rewards[name])).collect()
    } else if names.len() > 1
        && array(rewards).len() == names.len()
        && array(&rewards[0]).len() == prompts
        && !(prompts == names.len() && rewards[0][0].is_array() && array(&rewards[0][0]).len() == names.len())
    {
        array(rewards).iter().map(by_reward).collect()
    } else {
        match &rewards[prompt][generation] {
            Value::Array(columns) => columns.iter().map(value).collect(),
            one => vec![value(one)],
        }
    };
    Score { values }
}

/// Converts TRL's arguments to a plan.
fn plan_of(run: &Value, dir: &Path, reward_names: &[String], num_prompts: usize, longest: usize) -> Plan {
    let config = &run["config"];
    let float = |name: &str, default: f64| config[name].as_f64().unwrap_or(default);
    let integer = |name: &str, default: u64| config[name].as_u64().unwrap_or(default) as u32;
    let flag = |name: &str| config[name].as_bool().unwrap_or(false);
    let num_generations = integer("num_generations", 2);
    let accumulation = integer("gradient_accumulation_steps", 1);
    // TRL counts micro-steps; without the argument, it generates once per optimizer step.
    let micro_steps = integer("steps_per_generation", u64::from(accumulation));
    assert_eq!(micro_steps % accumulation, 0, "steps_per_generation is not whole optimizer steps");
    let steps_per_generation = micro_steps / accumulation;
    let block = array(&run["rollouts"][0]["completion_ids"]).len() as u32 / num_generations;
    assert_eq!(block % steps_per_generation, 0, "a block does not divide into its steps");

    let mut plan = plan();
    plan.rewards = reward_names.iter().map(|name| reward(name)).collect();
    for (reward, weight) in plan.rewards.iter_mut().zip(array(&config["reward_weights"])) {
        reward.weight = weight.as_f64().expect("a weight");
        reward.required = false;
    }
    plan.dataset.num_rows = num_prompts as u64;
    let rloo = &mut plan.rloo;
    rloo.num_generations = NonZeroU32::new(num_generations).unwrap();
    rloo.beta = float("beta", 0.05);
    rloo.epsilon = float("epsilon", 0.2);
    rloo.epsilon_high = float("epsilon_high", rloo.epsilon);
    rloo.num_iterations = integer("num_iterations", 1);
    rloo.steps_per_generation = steps_per_generation;
    rloo.normalize_advantages = flag("normalize_advantages");
    rloo.mask_truncated_completions = flag("mask_truncated_completions");
    let clip = &config["reward_clip_range"];
    rloo.reward_clip_range = clip[0].as_f64().zip(clip[1].as_f64());
    rloo.combine = Combine::Nansum;
    plan.sampling.temperature = float("temperature", 1.0);
    plan.sampling.max_completion_length = longest as u32;
    plan.training.prompts_per_step = block / steps_per_generation;
    plan.training.max_steps = u64::from(integer("max_steps", 1));
    plan.training.shuffle_dataset = false;
    let optimizer = &mut plan.optimizer;
    optimizer.learning_rate = float("learning_rate", 1e-6);
    optimizer.adam_beta1 = float("adam_beta1", 0.9);
    optimizer.adam_beta2 = float("adam_beta2", 0.999);
    optimizer.adam_epsilon = float("adam_epsilon", 1e-8);
    optimizer.weight_decay = float("weight_decay", 0.0);
    optimizer.max_grad_norm = float("max_grad_norm", 1.0);
    optimizer.warmup_steps = u64::from(integer("warmup_steps", 0));
    let scheduler = config["lr_scheduler_type"].as_str().or(run["lr_scheduler"].as_str()).unwrap_or("linear");
    optimizer.lr_scheduler_type = match scheduler {
        name if name.starts_with("constant") => LrSchedulerType::Constant,
        name if name.starts_with("cosine") => LrSchedulerType::Cosine,
        name if name.starts_with("linear") => LrSchedulerType::Linear,
        name => panic!("the schedule {name:?} is unknown"),
    };
    let lora = &run["lora"];
    let adapter = plan.lora.as_mut().expect("lora");
    adapter.r = lora["r"].as_u64().expect("lora.r") as u32;
    adapter.alpha = lora["alpha"].as_f64().expect("lora.alpha");
    adapter.use_rslora = lora["use_rslora"].as_bool().unwrap_or(false);
    adapter.target_modules = target_modules(dir);
    plan
}

/// The modules whose weights the adapter file contains.
fn target_modules(dir: &Path) -> Vec<String> {
    let bytes = std::fs::read(dir.join("adapter_init.safetensors")).expect("adapter_init");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let all = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];
    let held = |module: &&str| file.names().iter().any(|name| name.contains(&format!(".{module}.")));
    all.into_iter().filter(held).map(String::from).collect()
}

impl RecordedBlock {
    /// Reads a block. Rows may have any order: each is found by its prompt and completion, without padding.
    fn read(
        recorded: &Value,
        run: &Value,
        prompts: &[Vec<u32>],
        reward_names: &[String],
        text: &Text,
        longest: usize,
    ) -> Self {
        let mut groups: Vec<RolloutGroup> = Vec::new();
        let mut rows = HashMap::new();
        let mut taken: Vec<(usize, usize)> = Vec::new();
        let all_ref_logps = &recorded["ref_logps"];
        for index in 0..array(&recorded["completion_ids"]).len() {
            let padded_prompt = ids(&recorded["prompt_ids"][index]);
            let padded_completion = ids(&recorded["completion_ids"][index]);
            let (prompt, generation, completion) = (0..prompts.len())
                .filter(|&prompt| is_padded(&padded_prompt, &prompts[prompt], true))
                .flat_map(|prompt| {
                    let completions = array(&run["completion_ids"][prompt]).iter().map(ids).enumerate();
                    completions.map(move |(generation, completion)| (prompt, generation, completion))
                })
                .filter(|(prompt, generation, completion)| {
                    !taken.contains(&(*prompt, *generation)) && is_padded(&padded_completion, completion, false)
                })
                // If padding tokens are part of the text, a shorter completion may match too, so
                // the longest match counts.
                .max_by_key(|(prompt, generation, completion)| {
                    (prompts[*prompt].len(), completion.len(), std::cmp::Reverse((*prompt, *generation)))
                })
                .unwrap_or_else(|| panic!("row {index} of a rollout is none of the recorded completions"));
            taken.push((prompt, generation));
            let (completion, finish_reason) = cut_completion(&completion, text.eos_token_ids(), longest);
            let length = completion.len();
            let score = score(run, reward_names, prompt, generation, prompts.len());
            let row = prompt as u64;
            let position = groups.iter().position(|group| group.row == row).unwrap_or_else(|| {
                groups.push(RolloutGroup {
                    row,
                    prompt_ids: prompts[prompt].clone(),
                    completions: Vec::new(),
                    greedy: None,
                });
                groups.len() - 1
            });
            let group = &mut groups[position];
            let mut mask: Vec<bool> = array(&recorded["mask"][index]).iter().map(|m| m.as_f64() != Some(0.0)).collect();
            mask.truncate(length);
            let recorded_row = RecordedRow {
                old_logps: floats(&recorded["old_logps"][index]),
                ref_logps: (!array(all_ref_logps).is_empty()).then(|| floats(&all_ref_logps[index])),
                advantage: recorded["advantages"][index].as_f64(),
                mask,
            };
            rows.insert((row, group.completions.len()), recorded_row);
            group.completions.push(RolloutCompletion {
                segments: Segments::of_completion(completion, None),
                finish_reason,
                score,
                episode: None,
            });
        }
        Self { rollout: Rollout { groups, ..Rollout::default() }, rows }
    }
}

/// Whether `padded` is `ids` with one repeated token before (left) or after it.
fn is_padded(padded: &[u32], ids: &[u32], left: bool) -> bool {
    let Some(padding) = padded.len().checked_sub(ids.len()) else { return false };
    let (pad, rest) = if left { padded.split_at(padding) } else { (&padded[ids.len()..], &padded[..ids.len()]) };
    rest == ids && pad.iter().all(|id| Some(id) == pad.first())
}

/// Creates a PEFT directory around the weights file of the recorded run's initial adapter.
fn initial_adapter(dir: &Path, plan: &Plan) -> tempfile::TempDir {
    let initial = tempfile::tempdir().expect("a directory");
    std::fs::copy(dir.join("adapter_init.safetensors"), initial.path().join("adapter_model.safetensors"))
        .expect("copied");
    let lora = plan.lora.as_ref().expect("lora");
    let adapter_config = json!({
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "bias": "none",
        "r": lora.r,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "use_rslora": lora.use_rslora,
        "target_modules": lora.target_modules,
    });
    std::fs::write(initial.path().join("adapter_config.json"), adapter_config.to_string()).expect("written");
    initial
}

fn compare(dir: &Path, kind: BackendKind) -> Report {
    let recorded = Recorded::read(dir);
    let (run, plan) = (&recorded.run, &recorded.plan);
    let initial = initial_adapter(dir, plan);
    let uses = u64::from(plan.rloo.num_iterations) * u64::from(plan.rloo.steps_per_generation);
    let rollouts: Vec<Rollout> = recorded.blocks.iter().map(|block| block.rollout.clone()).collect();
    let mut host = TestHost::with_rollouts(move |step| rollouts.get(((step - 1) / uses) as usize).cloned());
    let temperature = plan.sampling.temperature;
    let prompts = array(&run["prompts"]).iter();
    let rows = prompts.map(|prompt| PromptRow { prompt: prompt.clone(), columns: Map::new() }).collect();
    let initial_adapter = Some(initial.path().to_path_buf());
    let start = Start { initial_adapter, backend: Some(kind), ..Start::default() };
    let outcome = train_model(dir, plan, rows, start, &mut host)
        .unwrap_or_else(|error| panic!("{error}: {:?}", std::error::Error::source(&error)));
    assert_eq!(outcome, None);

    let mut report = Report::default();
    let steps = array(&run["steps"]);
    if steps.len() as u64 != plan.training.max_steps || host.traces.len() != steps.len() {
        report.failures.push(format!("{} steps instead of {}", host.traces.len(), steps.len()));
    }
    let metrics = host.metrics(SamplePhase::Train);
    let mut eligible: Vec<bool> = Vec::new();
    for ((trace, (_, metrics)), expected) in host.traces.iter().zip(&metrics).zip(steps) {
        let block = &recorded.blocks[((trace.step - 1) / uses) as usize];
        // Later blocks have updated weights. Logits are divided by the temperature, which scales their rounding errors.
        let of_rows = if trace.step <= uses { EXACT } else { LATER } / temperature.min(1.0);
        compare_rows(&mut report, trace, block, of_rows);
        let tolerance = if trace.step == 1 { EXACT } else { LATER };
        let accumulates = run["config"]["gradient_accumulation_steps"].as_u64().unwrap_or(1) > 1;
        for (name, value) in expected["log"].as_object().expect("a log") {
            if NOT_METRICS.contains(&name.as_str()) {
                continue;
            }
            if accumulates && OF_MICRO_BATCHES.contains(&name.as_str()) {
                let note = format!("{name} not compared (a mean over TRL's micro-batches)");
                if !report.notes.contains(&note) {
                    report.notes.push(note);
                }
                continue;
            }
            match metrics.get(name) {
                Some(actual) => {
                    let what = format!("{name} at step {}", trace.step);
                    report.close("metrics", &what, *actual, value.as_f64(), tolerance);
                }
                None => report.failures.push(format!("metric {name} is not reported at step {}", trace.step)),
            }
        }
        eligible.resize(trace.gradient.len(), true);
        // If there is no gradient at all, no weight may change.
        if trace.gradient.iter().any(|entry| *entry != 0.0) {
            eligible
                .iter_mut()
                .zip(&trace.gradient)
                .for_each(|(eligible, entry)| *eligible &= entry.abs() > SMALLEST_GRADIENT);
        }
        compare_weights(&mut report, dir, trace, &eligible);
    }
    let mut rows = recorded.blocks.iter().flat_map(|block| block.rows.values());
    let is_masked = rows.all(|row| !row.mask.contains(&true));
    for kind in ["log-probs", "advantages", "metrics", "weights"] {
        if kind == "log-probs" && is_masked {
            continue;
        }
        if !report.compared.contains_key(kind) {
            report.failures.push(format!("no {kind} were compared"));
        }
    }
    report
}

fn compare_rows(report: &mut Report, trace: &Trace, block: &RecordedBlock, tolerance: f64) {
    let mut seen: HashMap<u64, usize> = HashMap::new();
    // The block's order determines which completion of its prompt a row is.
    for (index, &row) in trace.rows.iter().enumerate() {
        let generation = *seen.entry(row).and_modify(|next| *next += 1).or_insert(0);
        let what = format!("of completion {generation} of row {row} at step {}", trace.step);
        let Some(expected) = block.rows.get(&(row, generation)) else {
            report.failures.push(format!("TRL has no values {what}"));
            continue;
        };
        report.close("advantages", &what, Some(trace.advantages[index]), expected.advantage, tolerance);
        let mut logps = |kind: &str, actual: &[f32], expected_logps: &[Option<f64>]| {
            for (token, mask) in expected.mask.iter().enumerate() {
                // Values beyond TRL's mask are undefined.
                if *mask {
                    let what = format!("({kind}, token {token}) {what}");
                    let actual = actual.get(token).map(|&logp| f64::from(logp));
                    report.close("log-probs", &what, actual, expected_logps[token], tolerance);
                }
            }
        };
        logps("old", &trace.old_logps[index], &expected.old_logps);
        match (&expected.ref_logps, trace.ref_logps.get(index)) {
            (Some(expected), Some(actual)) => logps("reference", actual, expected),
            (None, None) => {}
            (expected, actual) => {
                let (expected, actual) = (expected.is_some(), actual.is_some());
                report.failures.push(format!("reference {what}: {actual} instead of {expected}"));
            }
        }
    }
}

fn compare_weights(report: &mut Report, dir: &Path, trace: &Trace, eligible: &[bool]) {
    let path = dir.join(format!("adapter_step{}.safetensors", trace.step));
    let bytes = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    if file.len() != trace.parameter_info.len() {
        report.failures.push(format!("{} tensors instead of {}", trace.parameter_info.len(), file.len()));
    }
    for info in &trace.parameter_info {
        let Ok(tensor) = file.tensor(&info.name) else {
            report.failures.push(format!("TRL has no tensor {}", info.name));
            continue;
        };
        if tensor.shape() != info.shape {
            report.failures.push(format!("{}: shape {:?} instead of {:?}", info.name, info.shape, tensor.shape()));
            continue;
        }
        let expected = tensor.data().chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        for (index, expected) in expected.enumerate() {
            if eligible[info.offset + index] {
                let what = format!("{}[{index}] after step {}", info.name, trace.step);
                let actual = f64::from(trace.parameters[info.offset + index]);
                report.close("weights", &what, Some(actual), Some(f64::from(expected)), LATER);
            }
        }
    }
}
