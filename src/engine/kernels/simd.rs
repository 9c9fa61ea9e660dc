//! Vectors of f32, one implementation a rung. A kernel is written once over [`Simd`] and compiled once a rung.

/// The operations the kernels are made of. Everything is inlined into a function that enables the rung's instructions.
///
/// # Safety
/// The methods may only run on a machine that has the rung's instructions; pointers must be valid for [`Simd::LANES`]
/// elements.
pub unsafe trait Simd: Copy {
    /// f32 values in a vector.
    const LANES: usize;
    /// The register.
    type V: Copy;

    /// All zero.
    unsafe fn zero() -> Self::V;
    /// The same value in every lane.
    unsafe fn splat(value: f32) -> Self::V;
    /// Unaligned.
    unsafe fn load(from: *const f32) -> Self::V;
    /// Unaligned.
    unsafe fn store(to: *mut f32, value: Self::V);
    /// a·b + c, rounded once where the machine can.
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// a + b.
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    /// a·b.
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    /// The larger of each lane.
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// LANES pairs of bf16: the first of each pair, and the second.
    unsafe fn load_pairs(from: *const u32) -> (Self::V, Self::V);
    /// The sum of all lanes, in a fixed order.
    unsafe fn sum(value: Self::V) -> f32;
    /// The first lane.
    unsafe fn first(value: Self::V) -> f32;
}

/// Plain arrays.
#[derive(Clone, Copy)]
pub struct Portable;

const PORTABLE: usize = 8;

#[inline(always)]
fn lanes(f: impl Fn(usize) -> f32) -> [f32; PORTABLE] {
    let mut out = [0.0; PORTABLE];
    for (lane, out) in out.iter_mut().enumerate() {
        *out = f(lane);
    }
    out
}

unsafe impl Simd for Portable {
    const LANES: usize = PORTABLE;
    type V = [f32; PORTABLE];

    #[inline(always)]
    unsafe fn zero() -> Self::V {
        [0.0; PORTABLE]
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self::V {
        [value; PORTABLE]
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::V {
        unsafe { from.cast::<Self::V>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, value: Self::V) {
        unsafe { to.cast::<Self::V>().write_unaligned(value) }
    }

    #[inline(always)]
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        // A fused product without the instruction is a slow library call.
        if cfg!(any(target_arch = "aarch64", target_feature = "fma")) {
            lanes(|i| a[i].mul_add(b[i], c[i]))
        } else {
            lanes(|i| a[i] * b[i] + c[i])
        }
    }

    #[inline(always)]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        lanes(|i| a[i] + b[i])
    }

    #[inline(always)]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        lanes(|i| a[i] * b[i])
    }

    #[inline(always)]
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V {
        lanes(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    unsafe fn load_pairs(from: *const u32) -> (Self::V, Self::V) {
        let pairs = unsafe { from.cast::<[u32; PORTABLE]>().read_unaligned() };
        (lanes(|i| f32::from_bits(pairs[i] << 16)), lanes(|i| f32::from_bits(pairs[i] & 0xffff_0000)))
    }

    #[inline(always)]
    unsafe fn sum(value: Self::V) -> f32 {
        let [a, b, c, d, e, f, g, h] = value;
        ((a + e) + (c + g)) + ((b + f) + (d + h))
    }

    #[inline(always)]
    unsafe fn first(value: Self::V) -> f32 {
        value[0]
    }
}

#[cfg(target_arch = "x86_64")]
pub use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::Simd;

    /// 8 lanes.
    #[derive(Clone, Copy)]
    pub struct Avx2;

    unsafe impl Simd for Avx2 {
        const LANES: usize = 8;
        type V = __m256;

        #[inline(always)]
        unsafe fn zero() -> __m256 {
            unsafe { _mm256_setzero_ps() }
        }

        #[inline(always)]
        unsafe fn splat(value: f32) -> __m256 {
            unsafe { _mm256_set1_ps(value) }
        }

        #[inline(always)]
        unsafe fn load(from: *const f32) -> __m256 {
            unsafe { _mm256_loadu_ps(from) }
        }

        #[inline(always)]
        unsafe fn store(to: *mut f32, value: __m256) {
            unsafe { _mm256_storeu_ps(to, value) }
        }

        #[inline(always)]
        unsafe fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
            unsafe { _mm256_fmadd_ps(a, b, c) }
        }

        #[inline(always)]
        unsafe fn add(a: __m256, b: __m256) -> __m256 {
            unsafe { _mm256_add_ps(a, b) }
        }

        #[inline(always)]
        unsafe fn mul(a: __m256, b: __m256) -> __m256 {
            unsafe { _mm256_mul_ps(a, b) }
        }

        #[inline(always)]
        unsafe fn max(a: __m256, b: __m256) -> __m256 {
            unsafe { _mm256_max_ps(a, b) }
        }

        #[inline(always)]
        unsafe fn load_pairs(from: *const u32) -> (__m256, __m256) {
            unsafe {
                let pairs = _mm256_loadu_si256(from.cast());
                let odd = _mm256_and_si256(pairs, _mm256_set1_epi32(0xffff_0000_u32 as i32));
                (_mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs)), _mm256_castsi256_ps(odd))
            }
        }

        #[inline(always)]
        unsafe fn sum(value: __m256) -> f32 {
            unsafe {
                let four = _mm_add_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps::<1>(value));
                let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
                _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
            }
        }

        #[inline(always)]
        unsafe fn first(value: __m256) -> f32 {
            unsafe { _mm256_cvtss_f32(value) }
        }
    }

    /// 16 lanes.
    #[derive(Clone, Copy)]
    pub struct Avx512;

    unsafe impl Simd for Avx512 {
        const LANES: usize = 16;
        type V = __m512;

        #[inline(always)]
        unsafe fn zero() -> __m512 {
            unsafe { _mm512_setzero_ps() }
        }

        #[inline(always)]
        unsafe fn splat(value: f32) -> __m512 {
            unsafe { _mm512_set1_ps(value) }
        }

        #[inline(always)]
        unsafe fn load(from: *const f32) -> __m512 {
            unsafe { _mm512_loadu_ps(from) }
        }

        #[inline(always)]
        unsafe fn store(to: *mut f32, value: __m512) {
            unsafe { _mm512_storeu_ps(to, value) }
        }

        #[inline(always)]
        unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
            unsafe { _mm512_fmadd_ps(a, b, c) }
        }

        #[inline(always)]
        unsafe fn add(a: __m512, b: __m512) -> __m512 {
            unsafe { _mm512_add_ps(a, b) }
        }

        #[inline(always)]
        unsafe fn mul(a: __m512, b: __m512) -> __m512 {
            unsafe { _mm512_mul_ps(a, b) }
        }

        #[inline(always)]
        unsafe fn max(a: __m512, b: __m512) -> __m512 {
            unsafe { _mm512_max_ps(a, b) }
        }

        #[inline(always)]
        unsafe fn load_pairs(from: *const u32) -> (__m512, __m512) {
            unsafe {
                let pairs = _mm512_loadu_si512(from.cast());
                let odd = _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff_0000_u32 as i32));
                (_mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs)), _mm512_castsi512_ps(odd))
            }
        }

        #[inline(always)]
        unsafe fn sum(value: __m512) -> f32 {
            unsafe { _mm512_reduce_add_ps(value) }
        }

        #[inline(always)]
        unsafe fn first(value: __m512) -> f32 {
            unsafe { _mm512_cvtss_f32(value) }
        }
    }
}
