//! Measures the peak speed and memory bandwidth of the machine, with which the benchmark compares the kernels.

use std::hint::black_box;
use std::time::Instant;

use super::isa::Isa;
use super::simd::{Portable, Simd};
use super::threads::Threads;

/// Number of times each limit is measured; the best result counts.
const MEASUREMENTS: usize = 5;

/// Peak speed of all threads in 10⁹ operations per second, with registers only; a multiply-add counts as two
/// operations. In bf16 for AMX and AVX512-BF16, otherwise in f32.
pub fn peak_gflops(isa: Isa, threads: &Threads) -> f64 {
    assert!(isa.is_available(), "the instruction set {isa} does not run on this machine");
    const STEPS: usize = 2_000_000;
    let best = fastest_seconds(|| {
        threads.run(&|_| {
            // Safety: the machine supports the instruction set.
            let sum = unsafe {
                match isa {
                    #[cfg(target_arch = "x86_64")]
                    Isa::Amx => super::amx::peak(STEPS),
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx512Bf16 => super::dpbf16::peak(STEPS),
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx512 => peak_avx512(STEPS),
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx2 => peak_avx2(STEPS),
                    _ => peak::<Portable, 4>(STEPS),
                }
            };
            black_box(sum);
        });
    });
    let flops = match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Amx => super::amx::PEAK_FLOPS,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Bf16 => super::dpbf16::PEAK_FLOPS,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => 24 * 16 * 2,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => 12 * 8 * 2,
        _ => 4 * Portable::LANES * 2,
    };
    (flops * STEPS * threads.count()) as f64 / best / 1e9
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn peak_avx512(steps: usize) -> f32 {
    unsafe { peak::<super::simd::Avx512, 24>(steps) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn peak_avx2(steps: usize) -> f32 {
    unsafe { peak::<super::simd::Avx2, 12>(steps) }
}

/// Runs `CHAINS` independent chains of multiply-adds, to measure the peak speed.
#[inline(always)]
unsafe fn peak<S: Simd, const CHAINS: usize>(steps: usize) -> f32 {
    unsafe {
        let (x, w) = (S::splat(black_box(1e-3)), S::splat(black_box(0.999)));
        let mut acc = [S::zero(); CHAINS];
        for _ in 0..steps {
            for acc in &mut acc {
                *acc = S::fma(*acc, w, x);
            }
        }
        let mut sum = S::zero();
        for acc in acc {
            sum = S::add(sum, acc);
        }
        S::sum(sum)
    }
}

/// Bandwidth of a sequential read of `bytes` bytes by all threads, in GB/s. At least 1 GiB measures the memory;
/// less measures the caches.
pub fn read_gb_s(threads: &Threads, bytes: usize) -> f64 {
    // Fill with ones, because the system maps untouched pages of zeros to a single page.
    let values = vec![1u64; bytes.div_ceil(8)];
    let best = fastest_seconds(|| {
        threads.split(values.len(), |part| {
            black_box(total(&values[part]));
        });
    });
    (values.len() * 8) as f64 / best / 1e9
}

/// Adds all values with many partial sums, so that the loads are the bottleneck and not the additions.
fn total(values: &[u64]) -> u64 {
    let mut sums = [0u64; 32];
    let (chunks, rest) = values.as_chunks::<32>();
    for chunk in chunks {
        for (sum, value) in sums.iter_mut().zip(chunk) {
            *sum = sum.wrapping_add(*value);
        }
    }
    sums.iter().chain(rest).fold(0, |sum, value| sum.wrapping_add(*value))
}

/// Returns the seconds of the fastest run of `f`.
fn fastest_seconds(mut f: impl FnMut()) -> f64 {
    let mut best = f64::MAX;
    for _ in 0..MEASUREMENTS {
        let start = Instant::now();
        f();
        best = best.min(start.elapsed().as_secs_f64());
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_plausible_numbers() {
        let threads = Threads::new(1);
        for isa in Isa::available() {
            let peak = peak_gflops(isa, &threads);
            assert!(peak > 0.1 && peak < 1e5, "{isa}: {peak}");
        }
        let read = read_gb_s(&threads, 1 << 22);
        assert!(read > 0.1 && read < 1e4, "{read}");
    }
}
