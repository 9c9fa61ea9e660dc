//! Checks that the processor has AVX512-BF16 and that its products are right, and measures whether it is faster than f32.

use std::hint::black_box;
use std::sync::OnceLock;
use std::time::Instant;

use super::super::gemm;
use super::super::isa::Isa;
use super::kernels;

/// The reason why the instructions cannot be used; `None` where they can.
pub(in super::super) fn refused() -> Option<&'static str> {
    static REFUSED: OnceLock<Option<&str>> = OnceLock::new();
    *REFUSED.get_or_init(|| {
        if !(Isa::Avx512.is_available() && is_x86_feature_detected!("avx512bf16")) {
            return Some("the processor has no AVX512-BF16");
        }
        check()
    })
}

/// Compares products of a few odd shapes with those of the rung below.
fn check() -> Option<&'static str> {
    const SHAPES: [(usize, usize, usize); 4] = [(1, 1, 1), (17, 65, 33), (33, 31, 70), (5, 100, 300)];
    // Inputs and weights are exact; only the order of the sums differs.
    const TOLERANCE: f32 = 1e-3;
    let wrong = SHAPES.iter().any(|shape| gemm::apart(Isa::Avx512Bf16, Isa::Avx512, *shape) > TOLERANCE);
    wrong.then_some("AVX512-BF16 gives wrong products on this machine")
}

/// Steps of one measurement, which takes about a tenth of a millisecond.
const STEPS: usize = 16_000;
/// Measurements of each kind, in turns. The fastest one counts, so that an interrupted one does not matter.
const REPETITIONS: usize = 9;

/// The rate of bf16 multiply-adds divided by that of f32 multiply-adds, on one thread; `None` where they cannot be used.
pub(in super::super) fn gain() -> Option<f64> {
    static GAIN: OnceLock<Option<f64>> = OnceLock::new();
    *GAIN.get_or_init(|| refused().is_none().then(measure))
}

fn measure() -> f64 {
    let mut fastest = [f64::MAX; 2];
    for _ in 0..REPETITIONS {
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
