//! A decode step allocates nothing once its buffers have their sizes. A test program of its own, as it counts what the
//! whole process allocates.
#![allow(unsafe_code, clippy::unwrap_used, reason = "a global allocator is unsafe by nature, and this is a test")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use rlood::engine::backend::cpu::Cpu;
use rlood::engine::model::{Adapter, Choice, Pick, Policy};
use rlood::engine::sampling::Filters;
use rlood::spec::ComputeDtype;

struct Counting;

static COUNT: AtomicU64 = AtomicU64::new(0);

// Safety: the system's allocator does the work.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::Relaxed);
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::Relaxed);
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Steps until every buffer has been needed once.
const WARM_UP: usize = 8;
const STEPS: usize = 16;

/// Rounds: which thread takes which work differs, so a buffer may find its size late.
const ROUNDS: usize = 6;

/// What `STEPS` steps of so many rows behind each prompt allocate, in the best of the rounds: what every step needed would
/// be in all of them.
fn allocated(name: &str, dtype: ComputeDtype, prompts: &[&[u32]], copies: usize) -> u64 {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/parity").join(name);
    let mut policy = Policy::on_cpu(&model, Cpu::new(dtype).unwrap()).unwrap();
    policy.load_lora(&model.join("lora")).unwrap();
    (0..ROUNDS).map(|_| round(&policy, prompts, copies)).min().unwrap()
}

fn round(policy: &Policy, prompts: &[&[u32]], copies: usize) -> u64 {
    let mut state = policy.begin(Adapter::On);
    policy.join(&mut state, prompts, copies, 64).unwrap();
    let picks = vec![Pick { temperature: 1.0, uniform: 0.4 }; prompts.len() * copies];
    let (mut chosen, mut tokens) = (Vec::new(), Vec::new());
    let mut before = 0;
    for step in 0..WARM_UP + STEPS {
        if step == WARM_UP {
            before = COUNT.load(Ordering::Relaxed);
        }
        policy.choose_into(&state, Choice { picks: &picks, filters: Filters::OFF }, &mut chosen).unwrap();
        tokens.clear();
        tokens.extend(chosen.iter().map(|chosen| chosen.token));
        policy.append(&mut state, &tokens).unwrap();
    }
    COUNT.load(Ordering::Relaxed) - before
}

#[test]
fn a_decode_step_allocates_nothing() {
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
