// Products of at most 16 rows, a · bᵀ only, at the speed at which memory delivers b: a block computes 8 columns, its
// warps share k, and a warp loads all it needs of b before it multiplies. Only sums go through shared memory.
//
// Weights that are older than the previous kernel are read before its end: `settled`.
//
// Step j of 32 values of k belongs to warp j mod the number of warps, in both products. The warps' sums are added in
// order: a row's bits depend on k, k2 and the number of warps, not on the other rows.
#pragma once
#include "gemm.cuh"

// Reads eight values of a line from `at` on, with zeros from `k` on.
DEVICE Words4 few_values(const bf16 *line, uint32_t at, uint32_t k, bool aligned) {
    if (aligned && at + 8 <= k) return load_words4(line + at);
    Words4 words;
    _Pragma("unroll")
    for (uint32_t i = 0; i < 4; i++) {
        uint32_t low = at + 2 * i < k ? line[at + 2 * i].bits : 0;
        uint32_t high = at + 2 * i + 1 < k ? line[at + 2 * i + 1].bits : 0;
        words.at[i] = low | high << 16;
    }
    return words;
}

// Multiplies a step: rows 0 to 7 and 8 to 15 of a, eight lines of b. A lane has eight adjacent values of its line
// although tensor cores expect four separate pairs: any order of k is correct if both operands share it.
DEVICE void multiply_few(float (&sums)[2][4], const Words4 &low, const Words4 &high, const Words4 &right) {
    _Pragma("unroll")
    for (int half = 0; half < 2; half++) {
        uint32_t a[4] = {low.at[2 * half], high.at[2 * half], low.at[2 * half + 1], high.at[2 * half + 1]};
        uint32_t b[2] = {right.at[2 * half], right.at[2 * half + 1]};
        mma_m16n8k16_bf16(sums[half], a, b);
    }
}

// DEPTH steps are in progress concurrently; TALL: there are more than 8 rows. Lines of a and b must be aligned to 16
// bytes and have a multiple of eight values; those of a2 and b2 may have any alignment.
template <int DEPTH, bool TALL, class Out> DEVICE void gemm_few(const Gemm &p) {
    constexpr int ROWS = TALL ? 16 : 8;
    SHARED(shared);
    float *slabs = (float *)shared;
    uint32_t lane = lane_id(), warp = warp_id(), warps = blockDim.x / WARP, apart = warps * 32;
    uint32_t line = lane / 4, column = blockIdx.x * 8 + line, value = lane % 4 * 8;
    bool in_b = column < p.n, in_low = line < p.m, in_high = TALL && line + 8 < p.m;
    const Words4 zeros = {{0, 0, 0, 0}};
    float sums[2][4] = {{0.0f, 0.0f, 0.0f, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};

    // Load the first step of the second product together with the first product's steps.
    bool aligned2 = (p.aligned & 12) == 12;
    const bf16 *a2 = (const bf16 *)p.a2 + (size_t)line * p.a2_stride, *high2 = a2 + (size_t)8 * p.a2_stride;
    const bf16 *b2 = (const bf16 *)p.b2 + (size_t)column * p.b2_stride;
    uint32_t at2 = warp * 32 + value;
    Words4 first2[3] = {zeros, zeros, zeros};
    if (aligned2 && p.k2 % 8 == 0) {
        if (!p.settled) wait_for_earlier_work();
        if (in_b && at2 < p.k2) first2[2] = load_words4_once(b2 + at2);
    }

    uint32_t at = warp * 32 + value;
    const bf16 *a = (const bf16 *)p.a + (size_t)line * p.a_stride + at;
    const bf16 *b = (const bf16 *)p.b + (size_t)column * p.b_stride + at;
    size_t to_high = (size_t)8 * p.a_stride;
    // End of the lane's values in each line of the operands.
    uint32_t b_end = in_b ? p.k : 0, low_end = in_low ? p.k : 0, high_end = in_high ? p.k : 0;
    if (!p.settled) wait_for_earlier_work();
    Words4 right[DEPTH];
    _Pragma("unroll")
    for (uint32_t i = 0; i < DEPTH; i++) right[i] = at + i * apart < b_end ? load_words4_once(b + i * apart) : zeros;
    if (p.settled) wait_for_earlier_work();
    let_next_start();
    if (aligned2 && p.k2 % 8 == 0) {
        if (in_low && at2 < p.k2) first2[0] = load_words4(a2 + at2);
        if (in_high && at2 < p.k2) first2[1] = load_words4(high2 + at2);
        at2 += apart;
    }
    _Pragma("unroll 1")
    for (uint32_t begin = warp * 32; begin < p.k; begin += DEPTH * apart) {
        Words4 low[DEPTH], high[TALL ? DEPTH : 1];
        high[0] = zeros;
        _Pragma("unroll")
        for (uint32_t i = 0; i < DEPTH; i++) {
            low[i] = at + i * apart < low_end ? load_words4(a + i * apart) : zeros;
            if (TALL) high[i] = at + i * apart < high_end ? load_words4(a + to_high + i * apart) : zeros;
        }
        _Pragma("unroll")
        for (uint32_t i = 0; i < DEPTH; i++) multiply_few(sums, low[i], high[TALL ? i : 0], right[i]);
        at += DEPTH * apart, a += DEPTH * apart, b += DEPTH * apart;
        _Pragma("unroll")
        for (uint32_t i = 0; i < DEPTH; i++) right[i] = at + i * apart < b_end ? load_words4_once(b + i * apart) : zeros;
    }
    if (p.k2 != 0) multiply_few(sums, first2[0], first2[1], first2[2]);
    _Pragma("unroll 1")
    for (; at2 - value < p.k2; at2 += apart) {
        Words4 low = few_values(a2, at2, in_low ? p.k2 : 0, aligned2);
        Words4 high = few_values(high2, at2, in_high ? p.k2 : 0, aligned2);
        multiply_few(sums, low, high, few_values(b2, at2, in_b ? p.k2 : 0, aligned2));
    }

    // The warps' sums, [warp][row][column].
    float *slab = slabs + warp * ROWS * 8 + line * 8 + lane % 4 * 2;
    _Pragma("unroll")
    for (int e = 0; e < (TALL ? 4 : 2); e++) slab[e / 2 * 64 + e % 2] = sums[0][e] + sums[1][e];
    __syncthreads();
    if (threadIdx.x < ROWS * 2) {
        uint32_t row = threadIdx.x / 2, four = threadIdx.x % 2 * 4;
        float total[4], more[4];
        load4(slabs + row * 8 + four, total);
        _Pragma("unroll 4")
        for (uint32_t other = 1; other < warps; other++) {
            load4(slabs + (other * ROWS + row) * 8 + four, more);
            for (int e = 0; e < 4; e++) total[e] += more[e];
        }
        store_sums<Out>(p, row, blockIdx.x * 8 + four, total);
    }
}

KERNEL_AHEAD(gemm_few_f32, Gemm, 512, 1) { gemm_few<8, false, float>(p); }
KERNEL_AHEAD(gemm_few_bf16, Gemm, 512, 1) { gemm_few<8, false, bf16>(p); }
KERNEL_AHEAD(gemm_few_tall_f32, Gemm, 512, 1) { gemm_few<4, true, float>(p); }
KERNEL_AHEAD(gemm_few_tall_bf16, Gemm, 512, 1) { gemm_few<4, true, bf16>(p); }
