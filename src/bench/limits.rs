//! What the machine can do at most: sequential reads of memory and multiply-adds.

use std::hint::black_box;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::engine::kernels::isa::Isa;
use crate::engine::kernels::threads::Threads;

/// Bytes that are read in one go.
const READ_BYTES: usize = 1 << 30;

/// Goes; the fastest counts.
const READS: usize = 5;

/// The limits, all threads together.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Limits {
    /// The rung of kernels that this machine runs.
    pub isa: String,
    /// Compute threads.
    pub threads: usize,
    /// Sequential read of 1 GiB, 1e9 bytes a second.
    pub read_gb_s: f64,
    /// Multiply-adds of 32 bits in registers.
    pub fma_gflop_s: Option<f64>,
    /// Products of bf16 tiles in registers, where the machine has them.
    pub amx_gflop_s: Option<f64>,
}

/// Measures all of them.
pub fn measure(threads: usize) -> Limits {
    let team = Threads::new(threads);
    Limits {
        isa: Isa::best().name().to_owned(),
        threads,
        read_gb_s: read_gb_s(&team),
        fma_gflop_s: None,
        amx_gflop_s: None,
    }
}

fn read_gb_s(threads: &Threads) -> f64 {
    // Written once, so that every page is its own.
    let words: Vec<u64> = (0..READ_BYTES as u64 / 8).collect();
    let mut fastest = f64::INFINITY;
    for _ in 0..READS {
        let begun = Instant::now();
        threads.split(words.len(), |part| {
            black_box(words[part].iter().fold(0_u64, |sum, word| sum.wrapping_add(*word)));
        });
        fastest = fastest.min(begun.elapsed().as_secs_f64());
    }
    READ_BYTES as f64 / fastest / 1e9
}
