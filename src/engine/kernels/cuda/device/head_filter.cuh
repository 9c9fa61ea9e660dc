// One token a row of those that top-k, top-p and min-p leave: what engine/sampling.rs does on the host, without sorting.
//
// Tokens are ordered by their logit, the lowest id first where logits are equal. Top-k and top-p keep a beginning of that
// order: all tokens above some logit and, of top-p, the first few that have it; of top-k all that have it. That logit is found digit by digit of its bits, as
// the largest with which enough tokens, or enough probability, is at least as large.
#pragma once
#include "head.cuh"

#define FILTER_THREADS 512
#define FILTER_WARPS (FILTER_THREADS / 32)

// Ordered as the logits are; NaN comes last.
DEVICE uint32_t filter_key(float logit) {
    uint32_t bits = __float_as_uint(logit);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0;
    // Both zeros are equal.
    if (bits == 0x80000000u) bits = 0;
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

struct FilterRow {
    const float* logits;
    const HeadCell* cells;
    uint32_t vocab;
    float t, shift;

    DEVICE_SPECIAL double weight(float logit) const { return double(expf(head_z(logit, t, shift))); }

    // The sums over the block of what tokens of at least pivot | d << bit bring, for d from 1 to 15: 1 each, or their weight.
    // `sums` is [FILTER_WARPS][16] of shared memory.
    DEVICE_SPECIAL void amounts(uint32_t pivot, uint32_t bit, bool weighted, double* sums, double totals[16]) const {
        for (int d = 0; d < 16; d++) totals[d] = 0.0;
        for (uint32_t base = 0; base < vocab; base += CELL) {
            // Cells whose largest logit is too small have none.
            if (filter_key(cells[base / CELL].largest) < pivot) continue;
            for (uint32_t i = base + threadIdx.x; i < vocab && i < base + CELL; i += FILTER_THREADS) {
                uint32_t key = filter_key(logits[i]);
                if (key < pivot) continue;
                double amount = weighted ? weight(logits[i]) : 1.0;
                uint32_t digit = (key - pivot) >> bit;
#pragma unroll
                for (uint32_t d = 1; d < 16; d++) totals[d] += digit >= d ? amount : 0.0;
            }
        }
        __syncthreads();
        for (int d = 1; d < 16; d++) {
            double sum = warp_sum_f64(totals[d]);
            if (lane_id() == 0) sums[warp_id() * 16 + d] = sum;
        }
        __syncthreads();
        for (int d = 1; d < 16; d++) {
            totals[d] = 0.0;
            for (uint32_t warp = 0; warp < FILTER_WARPS; warp++) totals[d] += sums[warp * 16 + d];
        }
    }

    // The largest key such that what tokens of at least that key bring is no less than `target`; 0 where all bring less.
    DEVICE_SPECIAL uint32_t search(double target, bool weighted, double* sums) const {
        uint32_t key = 0;
        for (int bit = 28; bit >= 0; bit -= 4) {
            double totals[16];
            amounts(key, uint32_t(bit), weighted, sums, totals);
            uint32_t digit = 0;
            for (uint32_t d = 1; d < 16; d++) digit = totals[d] >= target ? d : digit;
            key |= digit << bit;
        }
        return key;
    }

    // Of the whole row: what tokens above the key bring in number and weight, and how many have it.
    DEVICE_SPECIAL void around(uint32_t key, double* sums, double& number, double& mass, double& equal) const {
        double values[3] = {0.0, 0.0, 0.0};
        for (uint32_t i = threadIdx.x; i < vocab; i += FILTER_THREADS) {
            uint32_t of = filter_key(logits[i]);
            if (of > key) values[0] += 1.0, values[1] += weight(logits[i]);
            if (of == key) values[2] += 1.0;
        }
        __syncthreads();
        for (int v = 0; v < 3; v++) {
            double sum = warp_sum_f64(values[v]);
            if (lane_id() == 0) sums[warp_id() * 16 + v] = sum;
        }
        __syncthreads();
        number = mass = equal = 0.0;
        for (uint32_t warp = 0; warp < FILTER_WARPS; warp++) {
            number += sums[warp * 16];
            mass += sums[warp * 16 + 1];
            equal += sums[warp * 16 + 2];
        }
    }
};

// The sum of those before each thread, in order, and that of all.
DEVICE double filter_scan(double x, double* sums, double& total) {
    double scan = x;
    for (uint32_t step = 1; step < WARP; step <<= 1) {
        double below = __shfl_up_sync(FULL, scan, step);
        if (lane_id() >= step) scan += below;
    }
    __syncthreads();
    if (lane_id() == 31) sums[warp_id()] = scan;
    __syncthreads();
    double before = 0.0;
    total = 0.0;
    for (uint32_t warp = 0; warp < FILTER_WARPS; warp++) {
        if (warp < warp_id()) before += sums[warp];
        total += sums[warp];
    }
    double previous = __shfl_up_sync(FULL, scan, 1);
    return before + (lane_id() == 0 ? 0.0 : previous);
}

// A block a row.
KERNEL_BOUNDS(head_choose_filtered, HeadChoose, FILTER_THREADS, 1) {
    SHARED_ARRAY(double, sums, FILTER_WARPS * 16);
    SHARED_ARRAY(uint32_t, found, 2);
    uint32_t row_index = blockIdx.x;
    if (row_index >= p.rows) return;
    HeadPick pick = p.picks[row_index];
    HeadFilters filters = *p.filters;
    const HeadCell* cells = p.cells + uint64_t(row_index) * p.cells_of_row;
    float t = head_factor(pick.temperature);
    HeadTotal total = head_total(cells, p.cells_of_row, t);
    FilterRow row = {p.logits + uint64_t(row_index) * p.stride, cells, p.vocab, t, total.largest};
    // Kept: all above the key, and the first `ties` that have it.
    uint32_t key = 0;
    double ties = double(p.vocab), number, mass, equal;
    if (filters.top_k > 0.0 && filters.top_k < double(p.vocab)) {
        key = row.search(filters.top_k, false, sums);
        row.around(key, sums, number, mass, equal);
        ties = equal;
    } else {
        row.around(0, sums, number, mass, equal);
    }
    if (filters.top_p < 1.0) {
        // Tokens that have a key weigh the same.
        double each = key == 0 ? 0.0 : row.weight(__uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key));
        double target = filters.top_p * (mass + (key == 0 ? 0.0 : ties * each));
        uint32_t of_mass = row.search(target, true, sums);
        if (of_mass > key) key = of_mass, ties = double(p.vocab);
        row.around(key, sums, number, mass, equal);
        each = key == 0 ? 0.0 : row.weight(__uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key));
        double needed = each > 0.0 ? ceil((target - mass) / each) : 1.0;
        ties = fmin(fmin(ties, equal), fmax(needed, number > 0.0 ? 0.0 : 1.0));
    }
    // The most probable token weighs 1.
    double least = filters.min_p;
    // A thread has some tokens side by side.
    uint32_t each_thread = (p.vocab + FILTER_THREADS - 1) / FILTER_THREADS;
    uint32_t begin = min(threadIdx.x * each_thread, p.vocab), end = min(begin + each_thread, p.vocab);
    double own_ties = 0.0, all;
    for (uint32_t i = begin; i < end; i++) own_ties += filter_key(row.logits[i]) == key ? 1.0 : 0.0;
    double ties_before = filter_scan(own_ties, sums, all);
    auto weight_at = [&](uint32_t i, double& tie) -> double {
        uint32_t of = filter_key(row.logits[i]);
        bool kept = of > key;
        if (of == key) kept = tie < ties, tie += 1.0;
        double weight = kept ? row.weight(row.logits[i]) : 0.0;
        return weight >= least ? weight : 0.0;
    };
    double own = 0.0, tie = ties_before;
    for (uint32_t i = begin; i < end; i++) own += weight_at(i, tie);
    double before = filter_scan(own, sums, all);
    double target = pick.uniform * all;
    if (threadIdx.x == 0) found[0] = FILTER_THREADS, found[1] = 0;
    __syncthreads();
    // The first thread whose tokens go beyond the target, else the last that has any.
    uint32_t beyond = __ballot_sync(FULL, own > 0.0 && before + own > target), any = __ballot_sync(FULL, own > 0.0);
    for (uint32_t warp = 0; warp < FILTER_WARPS; warp++) {
        if (warp == warp_id() && lane_id() == 0) {
            if (beyond && found[0] == FILTER_THREADS) found[0] = warp * WARP + uint32_t(__ffs(int(beyond)) - 1);
            if (any) found[1] = warp * WARP + 31u - uint32_t(__clz(int(any)));
        }
        __syncthreads();
    }
    uint32_t chosen = found[0] == FILTER_THREADS ? found[1] : found[0];
    if (threadIdx.x != chosen) return;
    uint32_t token = begin < p.vocab ? begin : 0;
    double sum = before;
    tie = ties_before;
    for (uint32_t i = begin; i < end; i++) {
        double weight = weight_at(i, tie);
        if (weight > 0.0) token = i;
        sum += weight;
        if (weight > 0.0 && sum > target) break;
    }
    p.chosen[2 * row_index] = token;
    p.chosen[2 * row_index + 1] = __float_as_uint(head_logp(total, row.logits[token]));
}
