//! Checks whether the CPU has AVX512-BF16 and multiplies correctly with it, and measures how much faster than f32 it is.

use std::hint::black_box;
use std::sync::OnceLock;
use std::time::Instant;

use super::super::gemm;
use super::super::isa::Isa;
use super::kernels;

/// The reason why AVX512-BF16 is not available; `None` if it is available.
pub(in super::super) fn refused() -> Option<&'static str> {
    static REFUSED: OnceLock<Option<&str>> = OnceLock::new();
    *REFUSED.get_or_init(|| {
        if !(Isa::Avx512.is_available() && is_x86_feature_detected!("avx512bf16")) {
            return Some("the CPU has no AVX512-BF16");
        }
        check()
    })
}

/// Compares the products of AVX512-BF16 with those of AVX-512, for a few odd shapes.
fn check() -> Option<&'static str> {
    const SHAPES: [(usize, usize, usize); 4] = [(1, 1, 1), (17, 65, 33), (33, 31, 70), (5, 100, 300)];
    // Inputs and weights are exact in bf16; only the order of the sums differs.
    const TOLERANCE: f32 = 1e-3;
    let wrong = SHAPES.iter().any(|shape| gemm::apart(Isa::Avx512Bf16, Isa::Avx512, *shape) > TOLERANCE);
    wrong.then_some("AVX512-BF16 gives wrong products on this machine")
}

/// Number of steps of [`kernels::peak`] in one measurement, which takes about 0.1 ms.
const STEPS: usize = 16_000;
/// Number of measurements with each data type, alternately. Only the fastest one counts, so interruptions do not matter.
const MEASUREMENTS: usize = 9;

/// The speed of bf16 multiply-adds divided by the speed of f32 multiply-adds, on one thread; `None` without AVX512-BF16.
pub(in super::super) fn gain() -> Option<f64> {
    static GAIN: OnceLock<Option<f64>> = OnceLock::new();
    *GAIN.get_or_init(|| refused().is_none().then(measure_gain))
}

fn measure_gain() -> f64 {
    let mut fastest = [f64::MAX; 2];
    for _ in 0..MEASUREMENTS {
        // Safety: the machine has AVX512-BF16.
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
    // A step with bf16 pairs has twice as many operations as a step in f32.
    2.0 * fastest[0] / fastest[1]
}
