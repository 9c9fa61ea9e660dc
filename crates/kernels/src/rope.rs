//! qk-norm and rotary embedding on rows `[q heads | k heads | v heads]`, in place, and their vector-Jacobian products.
//! The halves of a head rotate: (a, b) → (a·cos − b·sin, b·cos + a·sin). A row's result depends only on that row.

use super::attention::Heads;
use super::isa::Isa;
use super::norm::{dot3, scale_of};
use super::rows::{on_every_isa, over_rows};
use super::simd::{Simd, load_some, store_some};
use super::threads::{Shared, Threads};

/// The transformation of query and key heads before attention.
#[derive(Clone, Copy, Debug)]
pub struct Rope<'a> {
    /// Sizes of the heads; `head_dim` is even.
    pub heads: &'a Heads,
    /// Half the number of columns of a head that rotate: its first `2 · half`. The others are unchanged.
    pub half: usize,
    /// Weights of qk-norm, the RMSNorm of each query and key head before it is rotated.
    pub qk_norm: Option<QkNorm<'a>>,
    /// Cosines of the rotary angles, `[position][half]`.
    pub cos: &'a [f32],
    /// Sines of the rotary angles, `[position][half]`.
    pub sin: &'a [f32],
}

/// Weights of the norms of query and key heads.
#[derive(Clone, Copy, Debug)]
pub struct QkNorm<'a> {
    /// The norm's weight for query heads, `[head_dim]`.
    pub q: &'a [f32],
    /// The norm's weight for key heads, `[head_dim]`.
    pub k: &'a [f32],
    /// The epsilon added to the mean of the squares.
    pub eps: f32,
}

impl<'a> Rope<'a> {
    fn norm_weight(&self, head: usize) -> Option<(&'a [f32], f32)> {
        self.qk_norm.map(|norm| (if head < self.heads.num_heads { norm.q } else { norm.k }, norm.eps))
    }

    /// Number of heads in a row that are normed and rotated: those of queries and keys.
    fn rotated(&self) -> usize {
        self.heads.num_heads + self.heads.num_kv_heads
    }

    fn angles(&self, position: usize) -> (&'a [f32], &'a [f32]) {
        let range = position * self.half..(position + 1) * self.half;
        (&self.cos[range.clone()], &self.sin[range])
    }

    fn check(&self, positions: &[usize], values: &[f32]) {
        let head_dim = self.heads.head_dim;
        assert!(2 * self.half <= head_dim, "the rotary angles are wider than an attention head");
        assert_eq!(
            values.len(),
            positions.len() * self.heads.width(),
            "the number of rows of q, k and v does not match the number of positions"
        );
        let end = positions.iter().max().map_or(0, |position| position + 1) * self.half;
        assert!(self.cos.len() >= end && self.sin.len() >= end, "a position is beyond the table of rotary angles");
        assert!(self.qk_norm.is_none_or(|norm| norm.q.len() == head_dim && norm.k.len() == head_dim));
    }
}

/// Computes out `[rows, width]` = qk-norm and rotary embedding of every row of `qkv`, each at its position.
pub fn rotate(threads: &Threads, isa: Isa, rope: &Rope<'_>, positions: &[usize], qkv: &[f32], out: &mut [f32]) {
    rope.check(positions, qkv);
    assert_eq!(qkv.len(), out.len(), "the rows of q, k and v and the output differ in length");
    let (width, out) = (rope.heads.width(), Shared::new(out));
    over_rows(threads, positions.len(), width, |range| {
        for row in range {
            let span = row * width..(row + 1) * width;
            // Safety: each thread writes other rows, inside the buffer; positions are inside the
            // table of rotary angles.
            unsafe {
                let out = out.part(span.clone());
                out.copy_from_slice(&qkv[span]);
                rotate_row(isa, rope, positions[row], out);
            }
        }
    });
}

/// The vector-Jacobian product of [`rotate`]: computes `out` = dL/dqkv for its input, from `dy`, the gradient of its
/// output. `before` is the input of [`rotate`]; it is read only with qk-norm and may be empty otherwise.
pub fn rotate_vjp(
    threads: &Threads,
    isa: Isa,
    rope: &Rope<'_>,
    positions: &[usize],
    before: &[f32],
    dy: &[f32],
    out: &mut [f32],
) {
    rope.check(positions, dy);
    assert!(
        rope.qk_norm.is_none() || before.len() == dy.len(),
        "the input of the norm and its gradient differ in length"
    );
    assert_eq!(dy.len(), out.len(), "the gradient dy and the output differ in length");
    let (width, out) = (rope.heads.width(), Shared::new(out));
    over_rows(threads, positions.len(), width, |range| {
        for row in range {
            let span = row * width..(row + 1) * width;
            let before = if rope.qk_norm.is_some() { &before[span.clone()] } else { &[] };
            // Safety: each thread writes other rows, inside the buffer; positions are inside the
            // table of rotary angles.
            unsafe {
                let out = out.part(span.clone());
                out.copy_from_slice(&dy[span]);
                vjp_row(isa, rope, positions[row], before, out);
            }
        }
    });
}

/// Number of rows that one partial sum of the weights' gradients covers, for any number of threads.
const ROWS_AT_ONCE: usize = 64;

/// Computes the gradients of the qk-norm weights in [`rotate`], added to dq `[head_dim]` and dk `[head_dim]`. `before`
/// is the input of [`rotate`], `dy` the gradient of its output. Does nothing without qk-norm.
#[expect(clippy::too_many_arguments, reason = "every argument is an operand of one operation")]
pub fn rotate_weight_vjp(
    threads: &Threads,
    isa: Isa,
    rope: &Rope<'_>,
    positions: &[usize],
    before: &[f32],
    dy: &[f32],
    dq: &mut [f32],
    dk: &mut [f32],
) {
    let (width, dim) = (rope.heads.width(), rope.heads.head_dim);
    rope.check(positions, before);
    assert!(before.len() == dy.len() && dq.len() == dim && dk.len() == dim, "sizes differ");
    if rope.qk_norm.is_none() {
        return;
    }
    let chunks = positions.len().div_ceil(ROWS_AT_ONCE);
    let mut sums = vec![0f32; chunks * 2 * dim];
    let shared = Shared::new(&mut sums);
    over_rows(threads, chunks, ROWS_AT_ONCE * width, |range| {
        for chunk in range {
            // Safety: each chunk of rows has its own partial sums.
            let sums = unsafe { shared.part(chunk * 2 * dim..(chunk + 1) * 2 * dim) };
            let of_chunk = positions.iter().enumerate().skip(chunk * ROWS_AT_ONCE).take(ROWS_AT_ONCE);
            for (row, position) in of_chunk {
                let span = row * width..(row + 1) * width;
                // Safety: the sizes of all slices were checked above.
                unsafe { weight_row(isa, rope, *position, &before[span.clone()], &dy[span], sums) };
            }
        }
    });
    for sums in sums.chunks_exact(2 * dim) {
        for (total, sum) in dq.iter_mut().chain(dk.iter_mut()).zip(sums) {
            *total += sum;
        }
    }
}

on_every_isa! {
    unsafe fn rotate_row(rope: &Rope<'_>, position: usize, row: &mut [f32]) = rotate_with
}
on_every_isa! {
    unsafe fn vjp_row(rope: &Rope<'_>, position: usize, before: &[f32], d: &mut [f32]) = vjp_with
}
on_every_isa! {
    unsafe fn weight_row(rope: &Rope<'_>, position: usize, before: &[f32], dy: &[f32], sums: &mut [f32]) = weight_with
}

/// Loads a vector from each of the two halves of a head.
#[inline(always)]
unsafe fn load_halves<S: Simd>(head: *const f32, half: usize, at: usize) -> (S::V, S::V) {
    unsafe { (load_some::<S>(head.add(at), half - at), load_some::<S>(head.add(half + at), half - at)) }
}

#[inline(always)]
unsafe fn store_halves<S: Simd>(head: *mut f32, half: usize, at: usize, (a, b): (S::V, S::V)) {
    unsafe {
        store_some::<S>(head.add(at), a, half - at);
        store_some::<S>(head.add(half + at), b, half - at);
    }
}

#[inline(always)]
unsafe fn rotate_with<S: Simd>(rope: &Rope<'_>, position: usize, row: &mut [f32]) {
    unsafe {
        let (dim, half) = (rope.heads.head_dim, rope.half);
        let (cos, sin) = rope.angles(position);
        for (index, head) in row.chunks_exact_mut(dim).take(rope.rotated()).enumerate() {
            let norm = rope.norm_weight(index).map(|(weight, eps)| (weight.as_ptr(), scale_of::<S>(head, eps)));
            let head = head.as_mut_ptr();
            for at in (0..half).step_by(S::LANES) {
                let (mut a, mut b) = load_halves::<S>(head, half, at);
                if let Some((weight, r)) = norm {
                    let (wa, wb) = load_halves::<S>(weight, half, at);
                    a = S::mul(S::mul(a, S::splat(r)), wa);
                    b = S::mul(S::mul(b, S::splat(r)), wb);
                }
                let c = load_some::<S>(cos.as_ptr().add(at), half - at);
                let s = load_some::<S>(sin.as_ptr().add(at), half - at);
                let rotated = (S::sub(S::mul(a, c), S::mul(b, s)), S::fma(a, s, S::mul(b, c)));
                store_halves::<S>(head, half, at, rotated);
            }
            let Some((weight, r)) = norm else { continue };
            for at in (2 * half..dim).step_by(S::LANES) {
                let rest = dim - at;
                let x = S::mul(load_some::<S>(head.add(at), rest), S::splat(r));
                store_some::<S>(head.add(at), S::mul(x, load_some::<S>(weight.add(at), rest)), rest);
            }
        }
    }
}

/// Rotates the gradient of a head back: (a, b) → (a·cos + b·sin, b·cos − a·sin).
#[inline(always)]
unsafe fn turn_back<S: Simd>(d: *const f32, cos: &[f32], sin: &[f32], half: usize, at: usize) -> (S::V, S::V) {
    unsafe {
        let (a, b) = load_halves::<S>(d, half, at);
        let c = load_some::<S>(cos.as_ptr().add(at), half - at);
        let s = load_some::<S>(sin.as_ptr().add(at), half - at);
        (S::fma(a, c, S::mul(b, s)), S::sub(S::mul(b, c), S::mul(a, s)))
    }
}

#[inline(always)]
unsafe fn vjp_with<S: Simd>(rope: &Rope<'_>, position: usize, before: &[f32], d: &mut [f32]) {
    unsafe {
        let (dim, half) = (rope.heads.head_dim, rope.half);
        let (cos, sin) = rope.angles(position);
        for (index, d) in d.chunks_exact_mut(dim).take(rope.rotated()).enumerate() {
            let d = d.as_mut_ptr();
            for at in (0..half).step_by(S::LANES) {
                let rotated = turn_back::<S>(d, cos, sin, half, at);
                store_halves::<S>(d, half, at, rotated);
            }
            let Some((weight, eps)) = rope.norm_weight(index) else { continue };
            let x = &before[index * dim..(index + 1) * dim];
            let r = scale_of::<S>(x, eps);
            let inner = dot3::<S>(x.as_ptr(), weight.as_ptr(), d, dim);
            // The gradient of RMSNorm: dx = r·w·dy − (inner·r³/n)·x, with r = 1 / √(mean(x²) + eps) and
            // inner = Σ x·w·dy.
            let c = S::splat(-(inner * r * r / dim as f32) * r);
            for at in (0..dim).step_by(S::LANES) {
                let rest = dim - at;
                let g = S::mul(load_some::<S>(weight.as_ptr().add(at), rest), load_some::<S>(d.add(at), rest));
                let value = S::fma(c, load_some::<S>(x.as_ptr().add(at), rest), S::mul(g, S::splat(r)));
                store_some::<S>(d.add(at), value, rest);
            }
        }
    }
}

#[inline(always)]
unsafe fn weight_with<S: Simd>(rope: &Rope<'_>, position: usize, before: &[f32], dy: &[f32], sums: &mut [f32]) {
    unsafe {
        let (dim, half) = (rope.heads.head_dim, rope.half);
        let (cos, sin) = rope.angles(position);
        let (dq, dk) = sums.split_at_mut(dim);
        let heads = before.chunks_exact(dim).zip(dy.chunks_exact(dim)).take(rope.rotated());
        for (index, (x, dy)) in heads.enumerate() {
            let Some((_, eps)) = rope.norm_weight(index) else { continue };
            let r = S::splat(scale_of::<S>(x, eps));
            let dw = if index < rope.heads.num_heads { dq.as_mut_ptr() } else { dk.as_mut_ptr() };
            for at in (0..half).step_by(S::LANES) {
                let (a, b) = turn_back::<S>(dy.as_ptr(), cos, sin, half, at);
                let (xa, xb) = load_halves::<S>(x.as_ptr(), half, at);
                let (wa, wb) = load_halves::<S>(dw, half, at);
                let sums = (S::fma(a, S::mul(xa, r), wa), S::fma(b, S::mul(xb, r), wb));
                store_halves::<S>(dw, half, at, sums);
            }
            for at in (2 * half..dim).step_by(S::LANES) {
                let rest = dim - at;
                let x = S::mul(load_some::<S>(x.as_ptr().add(at), rest), r);
                let sum = S::fma(load_some::<S>(dy.as_ptr().add(at), rest), x, load_some::<S>(dw.add(at), rest));
                store_some::<S>(dw.add(at), sum, rest);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::rows::tests::{assert_close, assert_same, noise};
    use super::*;

    const EPS: f32 = 1e-6;

    struct Case {
        heads: Heads,
        half: usize,
        cos: Vec<f32>,
        sin: Vec<f32>,
        q: Vec<f32>,
        k: Vec<f32>,
        positions: Vec<usize>,
        x: Vec<f32>,
        dy: Vec<f32>,
    }

    impl Case {
        fn new(num_heads: usize, num_kv_heads: usize, head_dim: usize, half: usize, rows: usize) -> Case {
            let heads = Heads::new(num_heads, num_kv_heads, head_dim);
            let angles: Vec<f32> = noise(50 * half, 5).iter().map(|v| v * 9.0).collect();
            Case {
                heads,
                half,
                cos: angles.iter().map(|a| a.cos()).collect(),
                sin: angles.iter().map(|a| a.sin()).collect(),
                q: noise(head_dim, 6),
                k: noise(head_dim, 7),
                positions: (0..rows).map(|row| row * 31 % 50).collect(),
                x: noise(rows * heads.width(), 8),
                dy: noise(rows * heads.width(), 9),
            }
        }

        fn rope(&self, norm: bool) -> Rope<'_> {
            let qk_norm = norm.then_some(QkNorm { q: &self.q, k: &self.k, eps: EPS });
            Rope { heads: &self.heads, half: self.half, qk_norm, cos: &self.cos, sin: &self.sin }
        }
    }

    #[derive(Default)]
    struct Naive {
        out: Vec<f64>,
        dx: Vec<f64>,
        dq: Vec<f64>,
        dk: Vec<f64>,
    }

    fn naive(case: &Case, norm: bool) -> Naive {
        let (dim, width) = (case.heads.head_dim, case.heads.width());
        let mut all = Naive { dq: vec![0.0; dim], dk: vec![0.0; dim], ..Naive::default() };
        for (row, position) in case.positions.iter().enumerate() {
            for head in 0..width / dim {
                let at = row * width + head * dim;
                let x: Vec<f64> = case.x[at..at + dim].iter().map(|v| f64::from(*v)).collect();
                let dy: Vec<f64> = case.dy[at..at + dim].iter().map(|v| f64::from(*v)).collect();
                if head >= case.heads.num_heads + case.heads.num_kv_heads {
                    all.out.extend(x);
                    all.dx.extend(dy);
                    continue;
                }
                let is_query = head < case.heads.num_heads;
                let w: Vec<f64> = if is_query { &case.q } else { &case.k }.iter().map(|v| f64::from(*v)).collect();
                let r = (x.iter().map(|v| v * v).sum::<f64>() / dim as f64 + f64::from(EPS)).sqrt().recip();
                let y: Vec<f64> = (0..dim).map(|i| if norm { x[i] * r * w[i] } else { x[i] }).collect();
                let half = case.half;
                let angle = |i: usize| {
                    let at = position * half + i % half;
                    (f64::from(case.cos[at]), f64::from(case.sin[at]))
                };
                let mut rotated = vec![0.0; dim];
                for i in 0..dim {
                    if i >= 2 * half {
                        all.out.push(y[i]);
                        rotated[i] = dy[i];
                        continue;
                    }
                    let (c, s) = angle(i);
                    all.out.push(if i < half { y[i] * c - y[i + half] * s } else { y[i] * c + y[i - half] * s });
                    rotated[i] = if i < half { dy[i] * c + dy[i + half] * s } else { dy[i] * c - dy[i - half] * s };
                }
                let inner: f64 = (0..dim).map(|i| x[i] * w[i] * rotated[i]).sum();
                for i in 0..dim {
                    let normed = r * (w[i] * rotated[i] - inner * r * r / dim as f64 * x[i]);
                    all.dx.push(if norm { normed } else { rotated[i] });
                    if norm {
                        let dw = if is_query { &mut all.dq } else { &mut all.dk };
                        dw[i] += rotated[i] * x[i] * r;
                    }
                }
            }
        }
        all
    }

    #[test]
    fn rotations_and_their_gradients_are_the_naive_ones_on_every_isa() {
        for isa in Isa::available() {
            for (h, kv, dim, half, rows) in [
                (1, 1, 2, 1, 1),
                (4, 2, 6, 3, 3),
                (3, 3, 40, 20, 70),
                (4, 1, 32, 16, 5),
                (2, 1, 64, 32, 150),
                (2, 1, 128, 64, 2),
                (2, 2, 256, 128, 9),
                (2, 2, 256, 32, 9),
                (3, 1, 16, 6, 70),
                (2, 1, 96, 24, 5),
            ] {
                let case = Case::new(h, kv, dim, half, rows);
                for norm in [false, true] {
                    let expected = naive(&case, norm);
                    let mut first: Option<[Vec<f32>; 4]> = None;
                    for count in [1, 3] {
                        let (threads, rope) = (Threads::new(count), case.rope(norm));
                        let what = format!(
                            "{isa}, {h} and {kv} heads of {dim}, 2 · {half} rotate, norm {norm}, {count} threads"
                        );
                        let (mut out, mut d) = (vec![0f32; case.x.len()], vec![0f32; case.x.len()]);
                        rotate(&threads, isa, &rope, &case.positions, &case.x, &mut out);
                        rotate_vjp(&threads, isa, &rope, &case.positions, &case.x, &case.dy, &mut d);
                        let (mut dq, mut dk) = (vec![0f32; dim], vec![0f32; dim]);
                        rotate_weight_vjp(&threads, isa, &rope, &case.positions, &case.x, &case.dy, &mut dq, &mut dk);
                        assert_close(&out, &expected.out, 1e-5, &what);
                        assert_close(&d, &expected.dx, 1e-5, &what);
                        assert_close(&dq, &expected.dq, 1e-5, &what);
                        assert_close(&dk, &expected.dk, 1e-5, &what);
                        let same = first.get_or_insert([out.clone(), d.clone(), dq.clone(), dk.clone()]);
                        for (a, b) in [out, d, dq, dk].iter().zip(same) {
                            assert_same(a, b, &what);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_row_is_rotated_alone_as_among_others() {
        let case = Case::new(4, 2, 64, 32, 100);
        let width = case.heads.width();
        for isa in Isa::available() {
            let threads = Threads::new(2);
            let mut all = vec![0f32; case.x.len()];
            rotate(&threads, isa, &case.rope(true), &case.positions, &case.x, &mut all);
            for (row, position) in case.positions.iter().enumerate() {
                let mut alone = vec![0f32; width];
                let given = &case.x[row * width..(row + 1) * width];
                rotate(&threads, isa, &case.rope(true), &[*position], given, &mut alone);
                assert_same(&alone, &all[row * width..(row + 1) * width], "a row");
            }
        }
    }
}
