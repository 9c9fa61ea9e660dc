// Samples one token per row from those that pass top-k, top-p and min-p: the same as engine/sampling.rs on the
// host, but without sorting.
//
// Tokens are ordered by their logit, and by id if logits are equal. Top-k and top-p keep a prefix of that order: all
// tokens above some logit, and for top-p the first few with exactly that logit, for top-k all of them. A radix search
// over the bits finds that logit as the largest one such that enough tokens, or enough probability, are at least as
// large. Cells whose largest logit is too small are not read. As soon as few tokens may still count, they are copied to
// a list, so that most digits are found in shared memory.
#pragma once
#include "head.cuh"

#define FILTER_THREADS 512
#define FILTER_WARPS (FILTER_THREADS / 32)
// Maximum number of tokens in a warp's list.
#define FILTER_LIST 512

// Maps a logit to an integer key with the same order; NaN comes last.
DEVICE uint32_t filter_key(float logit) {
    uint32_t bits = __float_as_uint(logit);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0;
    // Map both zeros to the same key.
    if (bits == 0x80000000u) bits = 0;
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The logit that a key above 0 stands for.
DEVICE float filter_logit(uint32_t key) { return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key); }

// The state of a row in one warp of its block: the warp has every n-th cell.
struct FilterRow {
    const float* logits;
    const HeadCell* cells;
    uint32_t vocab, cells_of_row;
    float t, shift;
    double* sums;    // [FILTER_WARPS][8] of shared memory
    float* list;     // [FILTER_LIST] of shared memory, owned by the warp
    uint32_t listed; // number of logits in the list
    bool complete;   // whether the lists have all tokens that still count

    DEVICE_SPECIAL double weight(float logit) const { return double(expf(head_z(logit, t, shift))); }

    // Calls `take` for the warp's cells that have a token with at least this key.
    template <typename Take> DEVICE_SPECIAL void each_cell(uint32_t bound, const Take& take) const {
        for (uint32_t first = warp_id(); first < cells_of_row; first += FILTER_THREADS) {
            uint32_t own = first + lane_id() * FILTER_WARPS;
            bool counts = own < cells_of_row && filter_key(cells[own].largest) >= bound;
            for (uint32_t left = __ballot_sync(FULL, counts); left != 0; left &= left - 1) {
                take(first + uint32_t(__ffs(int(left)) - 1) * FILTER_WARPS);
            }
        }
    }

    // Sums over the block what `add` adds to the sums 1 to 7 for each token with at least this key, which must be above
    // 0 and at least as large as in earlier calls. Lane l receives sum l / 4.
    template <typename Add> DEVICE_SPECIAL double sums_of(uint32_t bound, const Add& add) {
        double own[8] = {0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0};
        if (complete) {
#pragma unroll 1
            for (uint32_t i = lane_id(); i < listed; i += WARP) {
                uint32_t key = filter_key(list[i]);
                if (key >= bound) add(own, key, list[i]);
            }
        } else {
            listed = 0;
            each_cell(bound, [&](uint32_t cell) {
                float values[16];
                head_values(logits, cell, vocab, 4 * lane_id(), 4 * WARP, NAN, values);
#pragma unroll
                for (uint32_t i = 0; i < 16; i++) {
                    uint32_t key = filter_key(values[i]), counting = __ballot_sync(FULL, key >= bound);
                    if (counting == 0) continue;
                    uint32_t at = listed + uint32_t(__popc(counting & ((1u << lane_id()) - 1)));
                    if (key >= bound && at < FILTER_LIST) list[at] = values[i];
                    if (key >= bound) add(own, key, values[i]);
                    listed += uint32_t(__popc(counting));
                }
            });
            // Sum 0 counts the lists of tokens that were too short.
            own[0] = lane_id() == 0 && listed > FILTER_LIST ? 1.0 : 0.0;
        }
        // Lanes exchange the sums that both have, until each lane has one.
#pragma unroll
        for (uint32_t half = 4, step = 16; half > 0; half >>= 1, step >>= 1) {
            bool upper = (lane_id() & step) != 0;
#pragma unroll
            for (uint32_t i = 0; i < half; i++) {
                double other = __shfl_xor_sync(FULL, upper ? own[i] : own[i + half], int(step));
                own[i] = (upper ? own[i + half] : own[i]) + other;
            }
        }
        double sum = own[0];
        for (int step = 2; step > 0; step >>= 1) sum += __shfl_xor_sync(FULL, sum, step);
        __syncthreads();
        if (lane_id() % 4 == 0) sums[warp_id() * 8 + lane_id() / 4] = sum;
        __syncthreads();
        sum = 0.0;
        for (uint32_t warp = lane_id() % 4; warp < FILTER_WARPS; warp += 4) sum += sums[warp * 8 + lane_id() / 4];
        for (int step = 2; step > 0; step >>= 1) sum += __shfl_xor_sync(FULL, sum, step);
        complete = complete || __shfl_sync(FULL, sum, 0) == 0.0;
        return sum;
    }

    // The largest key such that tokens with at least that key contribute at least `target`: 1 each, or their weight.
    // The key is known to be at least `floor`; the result is 0 if all tokens contribute less.
    DEVICE_SPECIAL uint32_t search(double target, bool weighted, uint32_t floor) {
        uint32_t key = 0;
#pragma unroll 1
        for (int bit = 30; bit >= 0; bit -= 3) {
            auto add = [&](double* to, uint32_t of, float logit) {
                double amount = weighted ? weight(logit) : 1.0;
                uint32_t digit = (of - key) >> bit;
#pragma unroll
                for (uint32_t d = 1; d < 8; d++) to[d] += digit >= d ? amount : 0.0;
            };
            double sum = sums_of(max(max(key, floor), 1u), add);
            uint32_t enough = __ballot_sync(FULL, lane_id() >= 4 && sum > 0.0 && sum >= target);
            if (enough != 0) key |= uint32_t(31 - __clz(int(enough))) / 4 << bit;
        }
        return key;
    }

    // A key that the `count` largest tokens reach: that many cells have a token of at least this key.
    DEVICE_SPECIAL uint32_t floor_of_cells(double count) {
        if (cells_of_row > FILTER_WARPS * FILTER_LIST) return 0;
        listed = warp_id() < cells_of_row ? (cells_of_row - warp_id() - 1) / FILTER_WARPS + 1 : 0;
        for (uint32_t i = lane_id(); i < listed; i += WARP) list[i] = cells[warp_id() + i * FILTER_WARPS].largest;
        complete = true;
        uint32_t key = search(count, false, 0);
        complete = false;
        return key;
    }

    // A key below which all tokens together weigh less than `mass`.
    DEVICE_SPECIAL uint32_t floor_of_mass(double mass) const {
        double each = 0.5 * mass / double(vocab);
        float logit = float((double(shift) + log(each)) / double(t));
        // There is no such key if rounding went too far, or for the smallest weight.
        return weight(logit) <= 1.5 * each ? filter_key(logit) : 0;
    }

    // The number and weight of tokens above the key, and the number of tokens that have exactly the key.
    DEVICE_SPECIAL void around(uint32_t key, double& number, double& mass, double& equal) {
        auto add = [&](double* to, uint32_t of, float logit) {
            if (of > key) to[1] += 1.0, to[2] += weight(logit);
            if (of == key) to[3] += 1.0;
        };
        double sum = sums_of(max(key, 1u), add);
        number = __shfl_sync(FULL, sum, 4);
        mass = __shfl_sync(FULL, sum, 8);
        equal = __shfl_sync(FULL, sum, 12);
    }
};

// The sum over the preceding lanes of the warp.
DEVICE uint32_t filter_before(uint32_t x) {
    uint32_t scan = x;
    for (uint32_t step = 1; step < WARP; step <<= 1) {
        uint32_t below = __shfl_up_sync(FULL, scan, step);
        if (lane_id() >= step) scan += below;
    }
    return scan - x;
}

// One thread block per row. Shared memory: 8 FILTER_WARPS f64, FILTER_WARPS FILTER_LIST f32, then one f64 and
// one u32 per cell.
KERNEL_BOUNDS(head_choose_filtered, HeadChoose, FILTER_THREADS, 2) {
    SHARED(shared);
    double* masses = reinterpret_cast<double*>(shared) + 8 * FILTER_WARPS;
    float* lists = reinterpret_cast<float*>(masses + p.cells_of_row);
    uint32_t* equals = reinterpret_cast<uint32_t*>(lists + FILTER_WARPS * FILTER_LIST);
    uint32_t row_index = blockIdx.x;
    const HeadCell* cells = p.cells + uint64_t(row_index) * p.cells_of_row;
    float t = head_factor(p.picks[row_index].temperature);
    HeadTotal total = head_total(cells, p.cells_of_row, t);
    FilterRow row = {p.logits + uint64_t(row_index) * p.stride, cells, p.vocab, p.cells_of_row, t, total.largest,
                     reinterpret_cast<double*>(shared), lists + warp_id() * FILTER_LIST, 0, false};
    // The kept tokens: all above the key, and the first `ties` that have exactly the key.
    uint32_t key = 0, ties = p.vocab;
    double number = 0.0, mass = total.sum, equal = 0.0;
    double top_k = p.filters->top_k, top_p = p.filters->top_p;
    if (top_k > 0.0 && top_k < double(p.vocab)) {
        key = row.search(top_k, false, row.floor_of_cells(top_k));
        row.around(key, number, mass, equal);
        ties = uint32_t(equal);
    }
    if (top_p < 1.0) {
        // All tokens with the same key have the same weight.
        double each = key == 0 ? 0.0 : row.weight(filter_logit(key));
        mass += key == 0 ? 0.0 : equal * each;
        double target = top_p * mass;
        uint32_t of_mass = row.search(target, true, max(key, row.floor_of_mass(mass - target)));
        if (of_mass > key) key = of_mass, ties = p.vocab;
        row.around(key, number, mass, equal);
        each = key == 0 ? 0.0 : row.weight(filter_logit(key));
        double needed = fmax(each > 0.0 ? ceil((target - mass) / each) : 1.0, number > 0.0 ? 0.0 : 1.0);
        ties = uint32_t(fmin(fmin(double(ties), equal), needed));
    }
    // The most probable token weighs 1.
    double least = p.filters->min_p, tie = key == 0 ? 0.0 : row.weight(filter_logit(key));
    if (tie < least) tie = 0.0;
    // Computes, for each cell, the contribution of the tokens above the key, and the number with exactly the key.
    for (uint32_t i = threadIdx.x; i < p.cells_of_row; i += FILTER_THREADS) masses[i] = 0.0, equals[i] = 0;
    __syncthreads();
    float values[16];
    row.each_cell(max(key, 1u), [&](uint32_t cell) {
        if (row.weight(cells[cell].largest) < least) return;
        head_values(row.logits, cell, p.vocab, 4 * lane_id(), 4 * WARP, NAN, values);
        double own = 0.0;
        uint32_t have = 0;
#pragma unroll
        for (uint32_t i = 0; i < 16; i++) {
            uint32_t of = filter_key(values[i]);
            double weight = of > key ? row.weight(values[i]) : 0.0;
            own += weight >= least ? weight : 0.0;
            have += uint32_t(__popc(__ballot_sync(FULL, of == key)));
        }
        own = warp_sum_f64(own);
        if (lane_id() == 0) masses[cell] = own, equals[cell] = have;
    });
    __syncthreads();
    if (warp_id() > 0) return;
    // Find the cell of the chosen token: each lane has several consecutive cells.
    uint32_t each = (p.cells_of_row + WARP - 1) / WARP, begin = min(lane_id() * each, p.cells_of_row);
    uint32_t count = min(each, p.cells_of_row - begin), have = 0, left = ties;
    for (uint32_t i = begin; i < begin + count; i++) have += equals[i];
    uint32_t before = filter_before(have);
    double own = 0.0;
    for (uint32_t i = begin; i < begin + count; i++) {
        uint32_t kept = before < left ? min(equals[i], left - before) : 0;
        before += equals[i];
        equals[i] = kept;
        masses[i] += double(kept) * tie;
        own += masses[i];
    }
    __syncwarp();
    double target = p.picks[row_index].uniform * warp_sum_f64(own);
    Found cell = head_invert([&](uint32_t i) -> double { return masses[begin + i]; }, begin, count, target);
    // Find the chosen token in its cell.
    head_values(row.logits, cell.index, p.vocab, 16 * lane_id(), 4, NAN, values);
    left = equals[cell.index], have = 0;
#pragma unroll
    for (uint32_t i = 0; i < 16; i++) have += filter_key(values[i]) == key ? 1 : 0;
    before = filter_before(have);
#pragma unroll
    for (uint32_t i = 0; i < 16; i++) {
        uint32_t of = filter_key(values[i]);
        bool kept = of > key || (of == key && key != 0 && before < left);
        before += of == key ? 1 : 0;
        float weight = kept ? expf(head_z(values[i], t, row.shift)) : 0.0f;
        values[i] = double(weight) >= least ? weight : 0.0f;
    }
    auto of_token = [&](uint32_t i) -> double { return double(values[i]); };
    Found token = head_invert(of_token, cell.index * CELL + 16 * lane_id(), 16, target - cell.before);
    if (lane_id() == 0) {
        p.tokens[row_index] = token.index;
        p.logps[row_index] = head_logp(total, row.logits[token.index]);
    }
}
