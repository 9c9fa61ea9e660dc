//! Helpers of kernels that work row by row: one body for all instruction sets, and rows divided among threads
//! if that is worthwhile.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::threads::{Shared, Threads};

/// Number of elements below which starting a second thread costs more than it saves.
const WORTH_A_DISPATCH: usize = 1 << 14;

/// Runs `f` on parts of `0..rows`, one part per thread if there is enough work; `elements` is the number per row.
pub(super) fn over_rows(threads: &Threads, rows: usize, elements: usize, f: impl Fn(Range<usize>) + Sync) {
    if rows == 0 {
        return;
    }
    if rows * elements < WORTH_A_DISPATCH { f(0..rows) } else { threads.split(rows, f) }
}

/// Calls `f` for each row of a matrix, to write it; `f` receives the row's index.
pub fn each_row(threads: &Threads, values: &mut [f32], width: usize, f: impl Fn(usize, &mut [f32]) + Sync) {
    let rows = values.len().checked_div(width).unwrap_or(0);
    let values = Shared::new(values);
    over_rows(threads, rows, width, |range| {
        for row in range {
            // Safety: each thread writes other rows, and all rows are inside the buffer.
            f(row, unsafe { values.part(row * width..(row + 1) * width) });
        }
    });
}

/// Runs `f` for every number of `0..count`; each thread takes the next number when it has finished one. `elements`
/// measures the total work.
pub(super) fn take_turns(threads: &Threads, count: usize, elements: usize, f: impl Fn(usize) + Sync) {
    if count <= 1 || elements < WORTH_A_DISPATCH || threads.count() == 1 {
        return (0..count).for_each(f);
    }
    let next = AtomicUsize::new(0);
    threads.run(&|_| {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= count {
                return;
            }
            f(index);
        }
    });
}

/// Defines a function that runs a kernel, generic over [`Simd`](super::simd::Simd), with the chosen instruction set.
macro_rules! on_every_isa {
    ($(#[$doc:meta])* $vis:vis unsafe fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(-> $out:ty)? = $kernel:ident) => {
        $(#[$doc])*
        $vis unsafe fn $name(isa: $crate::isa::Isa, $($arg: $type),*) $(-> $out)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f")]
            unsafe fn avx512($($arg: $type),*) $(-> $out)? {
                unsafe { $kernel::<$crate::simd::Avx512>($($arg),*) }
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            unsafe fn avx2($($arg: $type),*) $(-> $out)? {
                unsafe { $kernel::<$crate::simd::Avx2>($($arg),*) }
            }

            assert!(isa.is_available(), "the instruction set {isa} does not run on this machine");
            // Safety: the machine supports the instruction set; the rest is guaranteed by the caller.
            unsafe {
                #[cfg(target_arch = "x86_64")]
                if isa >= $crate::isa::Isa::Avx512 {
                    return avx512($($arg),*);
                }
                #[cfg(target_arch = "x86_64")]
                if isa >= $crate::isa::Isa::Avx2 {
                    return avx2($($arg),*);
                }
                $kernel::<$crate::simd::Portable>($($arg),*)
            }
        }
    };
}
pub(super) use on_every_isa;

#[cfg(test)]
pub(super) mod tests {
    /// Pseudo-random numbers in [−0.5, 0.5).
    pub fn noise(count: usize, seed: u64) -> Vec<f32> {
        let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
        };
        (0..count).map(|_| next()).collect()
    }

    /// Checks that each value is within `tolerance` of the expected one, relative to the largest expected value, or to
    /// 0.1 if that is larger.
    #[track_caller]
    pub fn assert_close(actual: &[f32], expected: &[f64], tolerance: f64, what: &str) {
        assert_eq!(actual.len(), expected.len(), "{what}");
        let scale = expected.iter().fold(0.1f64, |largest, value| largest.max(value.abs()));
        for (index, (a, e)) in actual.iter().zip(expected).enumerate() {
            let error = (f64::from(*a) - e).abs();
            assert!(error <= tolerance * scale, "{what}, element {index}: {a} for {e}");
        }
    }

    /// Checks that both slices have the same bits.
    #[track_caller]
    pub fn assert_same(a: &[f32], b: &[f32], what: &str) {
        assert_eq!(a.len(), b.len(), "{what}");
        for (index, (a, b)) in a.iter().zip(b).enumerate() {
            assert_eq!(a.to_bits(), b.to_bits(), "{what}, element {index}: {a} and {b}");
        }
    }
}
