//! The CUDA backend as a whole: out-of-memory handling, the memory estimate against the peak, graphs. Runs on a GPU, or
//! on the emulator with the feature `cuda-emulator`.

use std::num::NonZeroU32;

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use rlood_engine::backend::BackendKind;
use rlood_engine::backend::cuda::peak_bytes;
use rlood_engine::error::EngineError;
use rlood_engine::gpu;
use rlood_engine::host::PromptRow;
use rlood_engine::kernels::cuda::driver::Counters;
use rlood_engine::model::{Adapter, Choice, Pick, Policy};
use rlood_engine::sampling::{Filters, Sampler};
use rlood_types::spec::footprint::{Footprint, Place};
use rlood_types::spec::{ComputeDtype, Plan};
use serde_json::{Map, Value, json};

use crate::gradients::{fixture, random_ids};
use crate::kinds::{Gemm, cuda, kinds};
use crate::memory::{Kind, Size, make, plan_of};
use crate::train::{Start, TestHost, train_model};

const SMALL: Size = Size { name: "small", hidden: 64, inter: 192, layers: 4, heads: 4, kv_heads: 2, vocab: 1024 };
const DEEP: Size = Size { name: "deep", hidden: 64, inter: 128, layers: 10, heads: 2, kv_heads: 1, vocab: 2048 };
const PROMPT_TOKENS: usize = 20;

fn is_there() -> bool {
    kinds().contains(&BackendKind::Cuda { ordinal: 0 })
}

/// A run in a child process.
#[derive(Clone, Debug)]
struct Case {
    kind: Kind,
    dtype: ComputeDtype,
    checkpointing: bool,
    completion: u32,
    micro_batch_tokens: u32,
    /// Value of `RLOOD_GPU_MEMORY`, in bytes.
    memory: Option<u64>,
}

const CASE: Case = Case {
    kind: Kind::Lora,
    dtype: ComputeDtype::F32,
    checkpointing: false,
    completion: 24,
    micro_batch_tokens: 8192,
    memory: None,
};

impl Case {
    fn plan(&self) -> Plan {
        let mut plan = plan_of(self.kind);
        plan.training.max_steps = 1;
        plan.training.dtype = self.dtype;
        plan.training.gradient_checkpointing = self.checkpointing;
        plan.training.micro_batch_tokens = self.micro_batch_tokens;
        plan.rloo.num_generations = NonZeroU32::new(2).unwrap();
        plan.sampling.max_completion_length = self.completion;
        plan
    }

    fn words(&self) -> String {
        let bf16 = self.dtype == ComputeDtype::Bf16;
        let Case { kind, checkpointing, completion, micro_batch_tokens, .. } = self;
        format!("{} {bf16} {checkpointing} {completion} {micro_batch_tokens}", kind.name())
    }

    fn parse(words: &str) -> Case {
        let words: Vec<&str> = words.split(' ').collect();
        let [kind, bf16, checkpointing, completion, tokens] = words.as_slice() else { panic!("{words:?}") };
        Case {
            kind: Kind::parse(kind),
            dtype: if *bf16 == "true" { ComputeDtype::Bf16 } else { ComputeDtype::F32 },
            checkpointing: *checkpointing == "true",
            completion: completion.parse().unwrap(),
            micro_batch_tokens: tokens.parse().unwrap(),
            memory: None,
        }
    }

    /// Returns the outcome: `peak`, `warnings`, `error`, `adapter` (the sum of its absolute values).
    fn run(&self, dir: &Path) -> Value {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "gpu::child", "--test-threads=1"]);
        command.env(CHILD, format!("{}:{}", self.words(), dir.display()));
        if let Some(memory) = self.memory {
            command.env("RLOOD_GPU_MEMORY", memory.to_string());
        }
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        serde_json::from_slice(&std::fs::read(dir.join("result.json")).unwrap()).unwrap()
    }
}

const CHILD: &str = "RLOOD_TEST_GPU_CHILD";

/// Does something only in a process that [`Case::run`] started.
#[test]
fn child() {
    let Some(argument) = std::env::var_os(CHILD) else { return };
    let argument = argument.into_string().unwrap();
    // Sets the limit as the command line does for a worker.
    rlood_engine::gpu::limit_memory(std::env::var("RLOOD_GPU_MEMORY").ok().map(|bytes| bytes.parse().unwrap()));
    let (words, dir) = argument.split_once(':').unwrap();
    let (case, dir) = (Case::parse(words), PathBuf::from(dir));
    let prompt: Vec<String> = (0..PROMPT_TOKENS).map(|i| format!("w{i}")).collect();
    let row = |i: usize| PromptRow {
        prompt: json!(prompt[i..].iter().chain(&prompt[..i]).cloned().collect::<Vec<_>>().join(" ")),
        columns: Map::new(),
    };
    let mut host = TestHost::default();
    let start = Start { backend: Some(BackendKind::Cuda { ordinal: 0 }), ..Start::default() };
    let outcome = train_model(&dir, &case.plan(), (0..8).map(row).collect(), start, &mut host);
    let error = match &outcome {
        Ok(_) => None,
        Err(error @ EngineError::OutOfMemory(_)) => Some(error.to_string()),
        Err(error) => panic!("{error}"),
    };
    let adapter: f64 =
        host.traces.last().map_or(0.0, |trace| trace.parameters.iter().map(|value| f64::from(value.abs())).sum());
    let result = json!({
        "peak": peak_bytes(), "warnings": host.warnings(), "error": error, "adapter": adapter,
        "tokens": host.samples().iter().map(|sample| sample.num_tokens).sum::<u32>(),
    });
    std::fs::write(dir.join("result.json"), result.to_string()).unwrap();
}

#[test]
fn a_full_memory_halves_the_micro_batch_once_and_then_ends_the_run() {
    if !is_there() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    make(SMALL, Kind::Lora, dir.path());
    let free = CASE.run(dir.path());
    assert_eq!((&free["warnings"], &free["error"]), (&json!([]), &Value::Null));
    let peak = free["peak"].as_u64().unwrap();
    // Four groups per micro-batch become two, because other memory is less than a third.
    let tokens = 2 * 2 * (PROMPT_TOKENS as u32 + CASE.completion);
    let half = Case { micro_batch_tokens: tokens, ..CASE }.run(dir.path())["peak"].as_u64().unwrap();
    assert!(half < peak, "{half} of {peak}");
    let between = Case { micro_batch_tokens: 2 * tokens, memory: Some((half + peak) / 2), ..CASE }.run(dir.path());
    assert_eq!((&between["warnings"], &between["error"]), (&json!(["out_of_memory"]), &Value::Null), "{between}");
    let (ours, theirs) = (between["adapter"].as_f64().unwrap(), free["adapter"].as_f64().unwrap());
    assert!((ours - theirs).abs() < 1e-4 * theirs, "{ours} and {theirs}");
    // A case in which halving does not help either.
    let little = Case { memory: Some(half / 2), ..CASE }.run(dir.path());
    let error = little["error"].as_str().unwrap();
    for part in ["already halved", "training.micro_batch_tokens", "MiB"] {
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn the_estimate_is_near_the_peak_of_the_device() {
    if !is_there() {
        return;
    }
    let place = Place::Cuda { memory_bytes: Some(gpu::smallest(&[0]).unwrap()) };
    let bf16 = ComputeDtype::Bf16;
    for (size, case) in [
        (SMALL, CASE),
        (SMALL, Case { dtype: bf16, ..CASE }),
        (DEEP, Case { checkpointing: true, ..CASE }),
        (SMALL, Case { kind: Kind::Full, ..CASE }),
        (DEEP, Case { dtype: bf16, completion: 40, ..CASE }),
    ] {
        let dir = tempfile::tempdir().unwrap();
        make(size, case.kind, dir.path());
        let card = rlood_model_files::read(dir.path()).unwrap();
        let tokens = u64::from(case.micro_batch_tokens);
        let (plan, shape) = (case.plan(), card.shape());
        let needs = Footprint::on(place, &plan, card.num_parameters, &shape, Some(PROMPT_TOKENS as u64), tokens);
        let estimate = needs.total - needs.process - needs.allocator;
        let result = case.run(dir.path());
        let (tokens, most) = (result["tokens"].as_u64().unwrap(), u64::from(8 * case.completion));
        assert!(100 * tokens >= 95 * most, "completions are long enough to compare: {tokens} of {most} tokens");
        let peak = result["peak"].as_u64().unwrap();
        let ratio = estimate as f64 / peak as f64;
        println!("{} {case:?}: peak {peak}, estimate {estimate}, {ratio:.3}; {needs:?}", size.name);
        assert!((ratio - 1.0).abs() < 0.15, "{} {case:?}: estimate / measured = {ratio:.3}", size.name);
    }
}

#[test]
fn steps_of_a_generation_run_as_graphs_and_give_what_they_give_without() {
    if !is_there() {
        return;
    }
    let run = |graphs: bool| {
        let cuda = cuda(0, ComputeDtype::F32, Gemm::Exact);
        cuda.device().set_graphs(graphs);
        let mut policy = Policy::on_cuda(&fixture("qwen3"), cuda.clone()).unwrap();
        policy.load_lora(&fixture("qwen3").join("lora")).unwrap();
        let prompts = [random_ids(1, 9), random_ids(2, 3)];
        let mut state = policy.begin(Adapter::On);
        policy.join(&mut state, &[&prompts[0], &prompts[1]], 3, 40).unwrap();
        let mut chosen = Vec::new();
        for step in 0..24 {
            let picks: Vec<Pick> = (0..state.len())
                .map(|row| Pick { temperature: 1.0, uniform: ((step * 7 + row * 3) % 17) as f64 / 17.0 })
                .collect();
            let next = policy.choose(&state, &picks).unwrap();
            let tokens: Vec<u32> = next.iter().map(|chosen| chosen.token).collect();
            chosen.extend(next.iter().map(|chosen| (chosen.token, chosen.logp.to_bits())));
            policy.append(&mut state, &tokens).unwrap();
            if step == 10 {
                // Five rows are padded to a bucket of eight.
                policy.retain(&mut state, &[true, true, false, true, true, true]).unwrap();
            }
        }
        (chosen, cuda.device().counters())
    };
    let ((with, counters), (without, _)) = (run(true), run(false));
    assert_eq!(with, without);
    assert!(counters.replays >= 18, "{counters:?}");
}

/// When tokens are chosen and steps are queued.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Order {
    /// Tokens are chosen after the step.
    After,
    /// Tokens are chosen within the step.
    Within,
    /// Tokens are chosen within the step, and the next step is queued before they are read.
    Ahead,
}

/// Returns tokens and log-probs of 24 steps in which rows leave and others join, and the counters after each step.
fn generation(order: Order, filters: Filters) -> (Vec<(u32, u32)>, Vec<Counters>) {
    let cuda = cuda(0, ComputeDtype::F32, Gemm::Exact);
    let mut policy = Policy::on_cuda(&fixture("qwen3"), cuda.clone()).unwrap();
    policy.load_lora(&fixture("qwen3").join("lora")).unwrap();
    let prompts = [random_ids(1, 9), random_ids(2, 3), random_ids(3, 5)];
    let mut state = policy.begin(Adapter::On);
    policy.join(&mut state, &[&prompts[0], &prompts[1]], 3, 40).unwrap();
    let picks = |step: usize, rows: &[usize]| -> Vec<Pick> {
        let uniform = |row: usize| ((step * 7 + row * 3) % 17) as f64 / 17.0;
        rows.iter().map(|row| Pick { temperature: 1.0, uniform: uniform(*row) }).collect()
    };
    let mut rows: Vec<usize> = (0..6).collect();
    let (mut next, mut chosen, mut counters) = (Vec::new(), Vec::new(), Vec::new());
    for step in 0..24 {
        policy.choose_into(&state, Choice { picks: &picks(step, &rows), filters }, &mut next).unwrap();
        let mut tokens: Vec<u32> = next.iter().map(|chosen| chosen.token).collect();
        chosen.extend(next.iter().map(|chosen| (chosen.token, chosen.logp.to_bits())));
        if step == 10 {
            policy.retain(&mut state, &[true, true, false, true, true, true]).unwrap();
            tokens.remove(2);
            rows.remove(2);
        }
        let draws = if order == Order::After { Vec::new() } else { picks(step + 1, &rows) };
        policy.append_and_pick(&mut state, &tokens, Choice { picks: &draws, filters }).unwrap();
        if step == 16 {
            policy.join(&mut state, &[&prompts[2]], 2, 40).unwrap();
            rows.extend([6, 7]);
        } else if order == Order::Ahead {
            policy.append_ahead(&mut state, Choice { picks: &picks(step + 2, &rows), filters }).unwrap();
        }
        counters.push(cuda.device().counters());
    }
    (chosen, counters)
}

#[test]
fn a_step_of_a_generation_is_one_graph_and_one_wait() {
    if !is_there() {
        return;
    }
    for filters in [Filters::OFF, Filters { top_k: 9, top_p: 0.9, min_p: 0.01 }] {
        let (expected, after) = generation(Order::After, filters);
        let difference = |counters: &[Counters], step: usize| {
            let (a, b) = (counters[step - 1], counters[step]);
            let copies = b.uploads - a.uploads;
            (b.waits - a.waits, b.replays - a.replays, b.launches - a.launches, b.products - a.products, copies)
        };
        // Uploads the attention plan, and the tokens if the host knows them first.
        for (order, copies) in [(Order::Within, 2), (Order::Ahead, 1)] {
            let (chosen, counters) = generation(order, filters);
            assert_eq!(chosen, expected, "{order:?}: what is chosen within the step is what is chosen after it");
            // Steps with the same rows, the first few of which were recorded and captured.
            for step in (6..10).chain(14..16).chain(21..24) {
                assert_eq!(difference(&counters, step), (1, 1, 0, 0, copies), "{order:?}, step {step}, {filters:?}");
            }
        }
        // Choosing after the step needs an additional wait, and separate launches and copies.
        let (waits, replays, launches, _, copies) = difference(&after, 8);
        assert_eq!((waits, replays), (1, 1));
        assert!(launches >= 4 && copies >= 3, "{launches} launches, {copies} copies");
        println!(
            "a step of 6 rows: 1 graph, 1 wait; choosing after it takes {launches} launches and {} copies more",
            copies - 2
        );
    }
}

#[test]
fn filters_on_the_device_choose_what_the_host_chooses_from_the_same_logits() {
    if !is_there() {
        return;
    }
    let policy = Policy::on_cuda(&fixture("qwen3"), cuda(0, ComputeDtype::F32, Gemm::Exact)).unwrap();
    let prompt = random_ids(5, 9);
    let mut state = policy.begin(Adapter::Off);
    policy.join(&mut state, &[&prompt], 32, 2).unwrap();
    let mut logits = policy.next_logits(&state).unwrap();
    let uniforms: Vec<f64> = (0..32).map(|row| (f64::from(row) + 0.37) / 32.0).collect();
    let plain = Sampler { temperature: 1.3, ..Sampler::PLAIN };
    for sampler in
        [Sampler { top_k: 5, ..plain }, Sampler { top_p: 0.6, ..plain }, Sampler { min_p: 0.4, top_k: 9, ..plain }]
    {
        let picks: Vec<Pick> = uniforms.iter().map(|uniform| Pick { temperature: 1.3, uniform: *uniform }).collect();
        let mut ours = Vec::new();
        policy.choose_into(&state, Choice { picks: &picks, filters: sampler.filters() }, &mut ours).unwrap();
        let ours: Vec<u32> = ours.iter().map(|chosen| chosen.token).collect();
        let theirs: Vec<u32> = uniforms
            .iter()
            .enumerate()
            .map(|(row, uniform)| sampler.choose(&mut logits.row_mut(row).to_vec(), &HashSet::new(), *uniform))
            .collect();
        assert_eq!(ours, theirs, "{sampler:?}");
        assert!(ours.iter().collect::<HashSet<_>>().len() > 1, "{sampler:?}: {ours:?}");
    }
}
