//! Vectors of f32, with one implementation per instruction set. A kernel is written once, generic over [`Simd`], and
//! compiled for each of them.

/// The vector operations of the kernels. All are inlined into a function that enables the instruction set.
///
/// # Safety
/// The methods may only run on a machine that supports the instruction set; pointers must be
/// valid for [`Simd::LANES`] elements.
#[expect(clippy::missing_safety_doc, reason = "the trait documents the safety of all its methods together")]
pub unsafe trait Simd: Copy {
    /// Number of f32 values in a vector.
    const LANES: usize;
    /// The type of a vector register.
    type V: Copy;

    /// A vector of zeros.
    unsafe fn zero() -> Self::V;
    /// The same value in every lane.
    unsafe fn splat(value: f32) -> Self::V;
    /// Loads a vector; the address may be unaligned.
    unsafe fn load(from: *const f32) -> Self::V;
    /// Stores a vector; the address may be unaligned.
    unsafe fn store(to: *mut f32, value: Self::V);
    /// Computes a·b + c, rounded once if the machine supports it.
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// Computes a + b per lane.
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    /// Computes a·b per lane.
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    /// Computes a − b per lane.
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    /// Computes a / b per lane.
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    /// The larger value per lane; `b` if either is NaN.
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// Rounds to the nearest integer, ties to even.
    unsafe fn round(a: Self::V) -> Self::V;
    /// Computes a·2ⁿ for whole n in [−126, 127].
    unsafe fn scale_by_power(a: Self::V, n: Self::V) -> Self::V;
    /// Loads LANES pairs of bf16: a vector of the first ones, and a vector of the second ones.
    unsafe fn load_pairs(from: *const u32) -> (Self::V, Self::V);
    /// The sum of all lanes, in a fixed order.
    unsafe fn sum(value: Self::V) -> f32;
    /// The largest value of all lanes.
    unsafe fn largest(value: Self::V) -> f32;
    /// The value of the first lane.
    unsafe fn first(value: Self::V) -> f32;
}

/// Loads the first `count` elements of a vector, followed by zeros; whole vectors are loaded unchanged.
///
/// # Safety
/// The same as for the methods of [`Simd`], but `from` needs only `count` valid elements if that is less than a vector.
#[inline(always)]
pub unsafe fn load_some<S: Simd>(from: *const f32, count: usize) -> S::V {
    unsafe {
        if count >= S::LANES {
            return S::load(from);
        }
        let mut values = [0f32; MAX_LANES];
        std::ptr::copy_nonoverlapping(from, values.as_mut_ptr(), count);
        S::load(values.as_ptr())
    }
}

/// Stores the first `count` elements, at most a vector.
///
/// # Safety
/// The same requirements as for [`load_some`].
#[inline(always)]
pub unsafe fn store_some<S: Simd>(to: *mut f32, value: S::V, count: usize) {
    unsafe {
        if count >= S::LANES {
            return S::store(to, value);
        }
        let mut values = [0f32; MAX_LANES];
        S::store(values.as_mut_ptr(), value);
        std::ptr::copy_nonoverlapping(values.as_ptr(), to, count);
    }
}

/// Maximum number of f32 values in a vector of any instruction set.
const MAX_LANES: usize = 16;

/// Computes eˣ for x ≤ 88, within 2 units in the last place; e⁻⁸⁷ below −87; NaN for NaN. Uses Cody and Waite's
/// reduction and Taylor's polynomial.
///
/// # Safety
/// The same requirements as for the methods of [`Simd`].
#[inline(always)]
pub unsafe fn exp<S: Simd>(x: S::V) -> S::V {
    const LOWEST: f32 = -87.0;
    // The constant ln 2 in two parts, the first with trailing zeros, so that n·LN_2_HIGH is exact.
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    const TERMS: [f32; 6] = [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0];
    unsafe {
        // This operand order keeps NaN a NaN.
        let x = S::max(S::splat(LOWEST), x);
        let n = S::round(S::mul(x, S::splat(std::f32::consts::LOG2_E)));
        let r = S::fma(n, S::splat(-LN_2_HIGH), x);
        let r = S::fma(n, S::splat(-LN_2_LOW), r);
        let mut sum = S::splat(TERMS[0]);
        for term in &TERMS[1..] {
            sum = S::fma(sum, r, S::splat(*term));
        }
        S::scale_by_power(S::fma(sum, r, S::splat(1.0)), n)
    }
}

/// Lower bound of exponents: below it e⁻ˣ is near the largest f32.
pub const LOWEST: f32 = -87.0;

/// Computes σ(x), with x raised to at least [`LOWEST`]. NaN stays NaN.
///
/// # Safety
/// The same requirements as for the methods of [`Simd`].
#[inline(always)]
pub unsafe fn logistic<S: Simd>(x: S::V) -> S::V {
    unsafe {
        let x = S::max(S::splat(LOWEST), x);
        let one = S::splat(1.0);
        S::div(one, S::add(one, exp::<S>(S::sub(S::zero(), x))))
    }
}

/// Computes tanh(x) = 2·σ(2x) − 1, to about 10⁻⁷ of 1. NaN stays NaN.
///
/// # Safety
/// The same requirements as for the methods of [`Simd`].
#[inline(always)]
pub unsafe fn tanh<S: Simd>(x: S::V) -> S::V {
    unsafe { S::fma(S::splat(2.0), logistic::<S>(S::mul(S::splat(2.0), x)), S::splat(-1.0)) }
}

/// Vectors as plain arrays, for any machine.
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
        // Without an instruction for fused multiply-add, `mul_add` would be a slow library call.
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
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V {
        lanes(|i| a[i] - b[i])
    }

    #[inline(always)]
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V {
        lanes(|i| a[i] / b[i])
    }

    #[inline(always)]
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V {
        lanes(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    unsafe fn round(a: Self::V) -> Self::V {
        // Adding and subtracting 1.5·2²³ rounds to an integer; a library call would be slow without SSE 4.1.
        const MAGIC: f32 = 12_582_912.0;
        lanes(|i| (a[i] + MAGIC) - MAGIC)
    }

    #[inline(always)]
    unsafe fn scale_by_power(a: Self::V, n: Self::V) -> Self::V {
        lanes(|i| a[i] * f32::from_bits(((n[i] as i32 + 127) << 23) as u32))
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
    unsafe fn largest(value: Self::V) -> f32 {
        value.into_iter().fold(f32::NEG_INFINITY, f32::max)
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

    /// AVX2: vectors of 8 f32.
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
        unsafe fn sub(a: __m256, b: __m256) -> __m256 {
            unsafe { _mm256_sub_ps(a, b) }
        }

        #[inline(always)]
        unsafe fn div(a: __m256, b: __m256) -> __m256 {
            unsafe { _mm256_div_ps(a, b) }
        }

        #[inline(always)]
        unsafe fn max(a: __m256, b: __m256) -> __m256 {
            unsafe { _mm256_max_ps(a, b) }
        }

        #[inline(always)]
        unsafe fn round(a: __m256) -> __m256 {
            unsafe { _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) }
        }

        #[inline(always)]
        unsafe fn scale_by_power(a: __m256, n: __m256) -> __m256 {
            unsafe {
                let exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
                _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent)))
            }
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
        unsafe fn largest(value: __m256) -> f32 {
            unsafe {
                let four = _mm_max_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps::<1>(value));
                let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
                _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps::<1>(two, two)))
            }
        }

        #[inline(always)]
        unsafe fn first(value: __m256) -> f32 {
            unsafe { _mm256_cvtss_f32(value) }
        }
    }

    /// AVX-512: vectors of 16 f32.
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
        unsafe fn sub(a: __m512, b: __m512) -> __m512 {
            unsafe { _mm512_sub_ps(a, b) }
        }

        #[inline(always)]
        unsafe fn div(a: __m512, b: __m512) -> __m512 {
            unsafe { _mm512_div_ps(a, b) }
        }

        #[inline(always)]
        unsafe fn max(a: __m512, b: __m512) -> __m512 {
            unsafe { _mm512_max_ps(a, b) }
        }

        #[inline(always)]
        unsafe fn round(a: __m512) -> __m512 {
            unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) }
        }

        #[inline(always)]
        unsafe fn scale_by_power(a: __m512, n: __m512) -> __m512 {
            unsafe { _mm512_scalef_ps(a, n) }
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
        unsafe fn largest(value: __m512) -> f32 {
            unsafe { _mm512_reduce_max_ps(value) }
        }

        #[inline(always)]
        unsafe fn first(value: __m512) -> f32 {
            unsafe { _mm512_cvtss_f32(value) }
        }
    }
}
