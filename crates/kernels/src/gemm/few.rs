//! Products of a few rows with a weight in 4-bit codes: each value is multiplied soon after it is found, and never stored for later.

use std::arch::x86_64::*;
use std::mem::MaybeUninit;

use super::super::pack::{CodeRun, INPUT_STRIDE, PANEL, Take, Values, each_pair, widened};

/// The inputs and sums of some rows.
pub(in super::super) struct Sums {
    /// The packed inputs, `[rows][INPUT_STRIDE]`.
    pub x: *const f32,
    /// Initial values of a panel's sums, rows `from_stride` apart.
    pub from: *const f32,
    pub from_stride: usize,
    /// Memory that the sums are stored to.
    pub to: *mut f32,
    pub to_stride: usize,
}

/// A kernel that adds the products of the run's inputs in order. The machine must have its instructions, and the pointers must be
/// valid for all rows and inputs.
pub(in super::super) type Kernel = unsafe fn(&CodeRun<'_>, &Sums);

macro_rules! kernels {
    ($kernel:ident, $($rows:literal)*) => { &[$($kernel::<$rows>,)*] };
}

/// Kernels indexed by their number of rows − 1, as many as keep their sums in registers.
pub(super) const AVX2: &[Kernel] = kernels!(avx2, 1 2 3);
pub(super) const AVX512: &[Kernel] = kernels!(avx512, 1 2 3 4 5 6 7 8);

/// The sums of MR rows, and the inputs of a block.
struct Add<const MR: usize> {
    sums: [[__m512; 2]; MR],
    x: *const f32,
}

impl<const MR: usize> Take for Add<MR> {
    #[inline(always)]
    unsafe fn take(&mut self, group: usize, half: usize, pair: usize, [even, odd]: [__m512; 2]) {
        unsafe {
            let x = self.x.add(group * CodeRun::GROUP + 2 * pair);
            for m in 0..MR {
                let x = x.add(m * INPUT_STRIDE);
                let sum = _mm512_fmadd_ps(_mm512_set1_ps(*x), even, self.sums[m][half]);
                self.sums[m][half] = _mm512_fmadd_ps(_mm512_set1_ps(*x.add(1)), odd, sum);
            }
        }
    }
}

#[target_feature(enable = "avx512f")]
unsafe fn avx512<const MR: usize>(run: &CodeRun<'_>, sums: &Sums) {
    unsafe {
        let mut add = Add::<MR> { sums: [[_mm512_setzero_ps(); 2]; MR], x: sums.x };
        for m in 0..MR {
            let from = sums.from.add(m * sums.from_stride);
            add.sums[m] = [_mm512_loadu_ps(from), _mm512_loadu_ps(from.add(16))];
        }
        let mut blocks = run.blocks();
        while let Some(block) = blocks.take_next() {
            each_pair(&block, &mut add);
            add.x = add.x.add(block.inputs());
        }
        for m in 0..MR {
            let to = sums.to.add(m * sums.to_stride);
            _mm512_storeu_ps(to, add.sums[m][0]);
            _mm512_storeu_ps(to.add(16), add.sums[m][1]);
        }
    }
}

/// Number of vectors of outputs in a panel.
const NV: usize = PANEL / 8;

#[target_feature(enable = "avx2,fma")]
unsafe fn avx2<const MR: usize>(run: &CodeRun<'_>, sums: &Sums) {
    unsafe {
        let mut acc = [[_mm256_setzero_ps(); NV]; MR];
        for (m, acc) in acc.iter_mut().enumerate() {
            for (v, acc) in acc.iter_mut().enumerate() {
                *acc = _mm256_loadu_ps(sums.from.add(m * sums.from_stride + v * 8));
            }
        }
        let mut values = Values::room();
        let mut x = sums.x;
        let mut blocks = run.blocks();
        while let Some(block) = blocks.take_next() {
            Values::replace(&mut values, &block);
            for lines in block.lines.as_chunks::<NV>().0 {
                // A group of inputs of all outputs first, so that the sums of different outputs can overlap.
                let mut group = MaybeUninit::<[[__m256i; NV]; CodeRun::GROUP / 2]>::uninit();
                for (v, (values, line)) in values.iter().zip(lines).enumerate() {
                    values.store_pairs(line.0.as_ptr(), group.as_mut_ptr().cast::<__m256i>().add(v), NV);
                }
                for (pair, words) in group.assume_init_ref().iter().enumerate() {
                    for (v, words) in words.iter().enumerate() {
                        let [even, odd] = widened(*words);
                        for (m, acc) in acc.iter_mut().enumerate() {
                            let x = x.add(m * INPUT_STRIDE + 2 * pair);
                            let sum = _mm256_fmadd_ps(_mm256_set1_ps(*x), even, acc[v]);
                            acc[v] = _mm256_fmadd_ps(_mm256_set1_ps(*x.add(1)), odd, sum);
                        }
                    }
                }
                x = x.add(CodeRun::GROUP);
            }
        }
        for (m, acc) in acc.iter().enumerate() {
            for (v, acc) in acc.iter().enumerate() {
                _mm256_storeu_ps(sums.to.add(m * sums.to_stride + v * 8), *acc);
            }
        }
    }
}
