//! Whether the instructions are there, whether they compute what they should, and whether they are faster than f32's.

use std::hint::black_box;
use std::sync::OnceLock;
use std::time::Instant;

use super::super::gemm;
use super::super::isa::Isa;
use super::kernels;

/// Why the instructions are not used: `None` where they can be.
pub(in super::super) fn refused() -> Option<&'static str> {
    static REFUSED: OnceLock<Option<&str>> = OnceLock::new();
    *REFUSED.get_or_init(|| {
        if !(Isa::Avx512.is_available() && is_x86_feature_detected!("avx512bf16")) {
            return Some("the processor has no AVX512-BF16");
        }
        check()
    })
}

/// A few odd shapes against the rung below.
fn check() -> Option<&'static str> {
    const SHAPES: [(usize, usize, usize); 4] = [(1, 1, 1), (17, 65, 33), (33, 31, 70), (5, 100, 300)];
    // Inputs and weights are exact; only the order of the sums differs.
    const TOLERANCE: f32 = 1e-3;
    let wrong = SHAPES.iter().any(|shape| gemm::apart(Isa::Avx512Bf16, Isa::Avx512, *shape) > TOLERANCE);
    wrong.then_some("AVX512-BF16 gives wrong products on this machine")
}

/// Steps of a measurement: about a tenth of a millisecond.
const STEPS: usize = 16_000;
/// Measurements of each kind in turns, of which the fastest counts: one that was interrupted does not.
const TRIES: usize = 9;

/// How many times as many operations a second pairs of bf16 give as f32 does, on one thread; `None` where they are refused.
pub(in super::super) fn gain() -> Option<f64> {
    static GAIN: OnceLock<Option<f64>> = OnceLock::new();
    *GAIN.get_or_init(|| refused().is_none().then(measure))
}

fn measure() -> f64 {
    let mut fastest = [f64::MAX; 2];
    for _ in 0..TRIES {
        // Safety: the instructions are there.
        unsafe {
            let begin = Instant::now();
            black_box(kernels::peak_f32(STEPS));
            let between = Instant::now();
            black_box(kernels::peak(STEPS));
            let end = Instant::now();
            fastest[0] = fastest[0].min((between - begin).as_secs_f64());
            fastest[1] = fastest[1].min((end - between).as_secs_f64());
        }
    }
    // A step of pairs is twice as many operations.
    2.0 * fastest[0] / fastest[1]
}
