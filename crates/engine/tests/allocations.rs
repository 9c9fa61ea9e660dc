//! Checks that a decode step allocates nothing once its buffers have reached their sizes, and that the cache of
//! a generation is as large as its estimate. This is a separate test program, because it counts the allocations
//! of the whole process.
#![allow(clippy::unwrap_used, reason = "a test")]

use std::alloc::System;
use std::sync::{Mutex, PoisonError};

use rlood_engine::backend::cpu::Cpu;
use rlood_engine::model::{Adapter, Choice, Pick, Policy};
use rlood_engine::sampling::Filters;
use rlood_types::spec::ComputeDtype;
use rlood_types::spec::footprint::kv_cache_bytes;
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Guards the counters of the process: one test runs at a time.
static COUNTED: Mutex<()> = Mutex::new(());

/// Number of allocations and reallocations so far.
fn count() -> usize {
    let stats = ALLOCATOR.stats();
    stats.allocations + stats.reallocations
}

/// Number of steps after which every buffer has been used once.
const WARM_UP: usize = 8;
const STEPS: usize = 16;

/// Number of rounds. The threads divide the work differently in each, so a buffer may reach its size late.
const ROUNDS: usize = 6;

fn load(name: &str, dtype: ComputeDtype) -> Policy {
    let model = rlood_test_support::fixture("parity").join(name);
    let mut policy = Policy::on_cpu(&model, Cpu::new(dtype).unwrap()).unwrap();
    policy.load_lora(&model.join("lora")).unwrap();
    policy
}

/// Number of allocations in `STEPS` steps with `copies` rows per prompt, in the best of the rounds: allocations that
/// every step needs would occur in all of them.
fn allocated(name: &str, dtype: ComputeDtype, prompts: &[&[u32]], copies: usize) -> usize {
    let policy = load(name, dtype);
    (0..ROUNDS).map(|_| round(&policy, prompts, copies)).min().unwrap()
}

fn round(policy: &Policy, prompts: &[&[u32]], copies: usize) -> usize {
    let mut state = policy.begin(Adapter::On);
    policy.join(&mut state, prompts, copies, 64).unwrap();
    let picks = vec![Pick { temperature: 1.0, uniform: 0.4 }; prompts.len() * copies];
    let (mut chosen, mut tokens) = (Vec::new(), Vec::new());
    let mut before = 0;
    for step in 0..WARM_UP + STEPS {
        if step == WARM_UP {
            before = count();
        }
        policy.choose_into(&state, Choice { picks: &picks, filters: Filters::OFF }, &mut chosen).unwrap();
        tokens.clear();
        tokens.extend(chosen.iter().map(|chosen| chosen.token));
        policy.append(&mut state, &tokens).unwrap();
    }
    count() - before
}

#[test]
fn a_decode_step_allocates_nothing() {
    let _alone = COUNTED.lock().unwrap_or_else(PoisonError::into_inner);
    let long: Vec<u32> = (0..200).map(|index| 3 + index % 90).collect();
    for name in ["qwen3", "mistral", "qwen2"] {
        for dtype in [ComputeDtype::F32, ComputeDtype::Bf16] {
            for (prompts, copies) in [(vec![&[5u32, 6, 7][..]], 1), (vec![&[5, 6, 7], &long], 4), (vec![&long], 40)] {
                let count = allocated(name, dtype, &prompts, copies);
                let rows = prompts.len() * copies;
                assert_eq!(count, 0, "{name}, {dtype:?}, {rows} rows: allocations in {STEPS} steps");
            }
        }
    }
}

/// Number of bytes in use.
fn live() -> usize {
    let stats = ALLOCATOR.stats();
    stats.bytes_allocated - stats.bytes_deallocated
}

/// Bytes freed with the state of a generation in which `rows` rows of a prompt have reached their full length.
fn cache_bytes(policy: &Policy, prompt_len: usize, rows: usize, tokens: usize) -> usize {
    let prompt: Vec<u32> = (0..prompt_len as u32).map(|index| 3 + index % 90).collect();
    let mut state = policy.begin(Adapter::On);
    policy.join(&mut state, &[&prompt], rows, tokens).unwrap();
    for step in 0..tokens as u32 {
        policy.append(&mut state, &vec![3 + step % 90; rows]).unwrap();
    }
    let before = live();
    drop(state);
    before - live()
}

#[test]
fn the_cache_is_as_large_as_its_estimate() {
    const ROWS: usize = 4;
    let _alone = COUNTED.lock().unwrap_or_else(PoisonError::into_inner);
    // Models without windows, with a window in half of the layers, and with one in all of them.
    for name in ["qwen3", "gemma2", "mistral"] {
        let policy = load(name, ComputeDtype::F32);
        let shape = policy.card().shape();
        for (prompt, tokens) in [(3, 40), (3, 600), (600, 40), (600, 600), (600, 1500)] {
            let measured = cache_bytes(&policy, prompt, ROWS, tokens);
            let estimate = kv_cache_bytes(&shape, (1, prompt as u64), (ROWS as u64, tokens as u64)) as usize;
            let ratio = estimate as f64 / measured as f64;
            println!(
                "{name}, {prompt} + {ROWS} x {tokens} tokens: {measured} bytes, estimated {estimate} ({ratio:.3})"
            );
            assert!(
                (ratio - 1.0).abs() < 0.1,
                "{name}, {prompt} + {ROWS} x {tokens}: {measured}, estimated {estimate}"
            );
        }
    }
}
