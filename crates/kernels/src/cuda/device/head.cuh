// Computes scores, choices and gradients from the logits of rows. For each row and 512 tokens, a cell keeps the largest
// logit, sum e^z and sum e^z z, with z = logit t minus the cell's largest. All kernels combine the cells of a row in
// the same order, so that a choice and a score of the same token have the same log-prob.
#pragma once
#include "prelude.cuh"

#define CELL 512u

struct HeadCell {
    float largest; // largest logit; NaN is ignored
    float sum;
    float weighted;
};

// How a token is picked; the same layout as `Pick` in the host code.
struct HeadPick {
    double temperature;
    double uniform;
};

// The same bound as on the host, so that the product with a logit is finite.
DEVICE float head_factor(double temperature) {
    return temperature == 0.0 ? 1.0f : float(fmin(1.0 / temperature, 1e30));
}

// A product that is rounded before anything is added to it, so that the largest logit has z = 0.
DEVICE float rounded_product(float a, float b) {
#ifdef RLOOD_EMULATOR
    return a * b;
#else
    return __fmul_rn(a, b);
#endif
}

// The largest logit of a cell, times t and finite.
DEVICE float head_scaled(const HeadCell& cell, float t) {
    return fmaxf(rounded_product(cell.largest, t), -3.402823466e38f);
}

// z of a logit, at least -87; NaN stays NaN.
DEVICE float head_z(float logit, float t, float shift) {
    float z = rounded_product(logit, t) - shift;
    return z < -87.0f ? -87.0f : z;
}

// Reads sixteen tokens of a cell per lane: four from `first` on, four `apart` tokens further on and so on; `missing`
// beyond the vocabulary. Rows of logits must be aligned to 16 bytes and have room for a multiple of four tokens.
DEVICE void head_values(const float* logits, uint32_t cell, uint32_t vocab, uint32_t first, uint32_t apart, float missing,
                        float values[16]) {
    first += cell * CELL;
    if ((cell + 1) * CELL <= vocab) {
#pragma unroll
        for (uint32_t g = 0; g < 4; g++) load4(logits + first + g * apart, values + 4 * g);
        return;
    }
#pragma unroll
    for (uint32_t g = 0; g < 4; g++) {
        uint32_t at = first + g * apart;
        float four[4] = {missing, missing, missing, missing};
        if (at < vocab) load4(logits + at, four);
#pragma unroll
        for (uint32_t e = 0; e < 4; e++) values[4 * g + e] = at + e < vocab ? four[e] : missing;
    }
}

struct HeadCells {
    const float* logits;
    HeadCell* cells;       // [rows][cells of a row]
    const HeadPick* picks; // one per row, or null: all rows use `t`
    uint64_t stride;
    uint32_t rows, vocab;
    uint32_t cells_of_row;
    float t;
};

// Computes a cell from the values of a lane, in the order of head_values. The last cell of the
// vocabulary may be incomplete.
template <bool WHOLE> DEVICE HeadCell head_cell(const float values[16], uint32_t first, uint32_t vocab, float t) {
    HeadCell cell = {-INFINITY, 0.0f, 0.0f};
#pragma unroll
    for (uint32_t i = 0; i < 16; i++) cell.largest = fmaxf(cell.largest, values[i]);
    cell.largest = warp_max(cell.largest);
    float shift = head_scaled(cell, t);
#pragma unroll
    for (uint32_t i = 0; i < 16; i++) {
        float z = head_z(values[i], t, shift);
        float e = WHOLE || first + i / 4 * (4 * WARP) + i % 4 < vocab ? expf(z) : 0.0f;
        cell.sum += e;
        cell.weighted = fmaf(e, z, cell.weighted);
    }
    cell.sum = warp_sum(cell.sum);
    cell.weighted = warp_sum(cell.weighted);
    return cell;
}

// One warp per cell; rows of logits along y and z.
KERNEL(head_cells, HeadCells) {
    uint32_t cell = blockIdx.x * (blockDim.x / WARP) + warp_id(), row = blockIdx.z * gridDim.y + blockIdx.y;
    if (cell >= p.cells_of_row || row >= p.rows) return;
    float values[16];
    head_values(p.logits + uint64_t(row) * p.stride, cell, p.vocab, 4 * lane_id(), 4 * WARP, -INFINITY, values);
    float t = p.picks ? head_factor(p.picks[row].temperature) : p.t;
    uint32_t first = cell * CELL + 4 * lane_id();
    HeadCell kept = (cell + 1) * CELL <= p.vocab ? head_cell<true>(values, first, p.vocab, t)
                                                 : head_cell<false>(values, first, p.vocab, t);
    if (lane_id() == 0) p.cells[uint64_t(row) * p.cells_of_row + cell] = kept;
}

// Merges the softmax sums of a row's cells into those of the whole vocabulary.
struct HeadTotal {
    float largest, t;
    double sum, weighted;
};

DEVICE double head_shift(const HeadTotal& total, const HeadCell& cell) {
    return double(head_scaled(cell, total.t)) - double(total.largest);
}

DEVICE double warp_sum_f64(double x) {
    for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(FULL, x, step);
    return x;
}

DEVICE uint32_t warp_min(uint32_t x) {
    for (int step = 16; step > 0; step >>= 1) x = min(x, __shfl_xor_sync(FULL, x, step));
    return x;
}

// Computes the total by a warp, with the result in every lane; `masses` receives the contribution of each
// cell to the sum.
DEVICE HeadTotal head_total(const HeadCell* cells, uint32_t count, float t, double* masses = nullptr) {
    HeadTotal total = {-3.402823466e38f, t, 0.0, 0.0};
    for (uint32_t i = lane_id(); i < count; i += WARP) total.largest = fmaxf(total.largest, head_scaled(cells[i], t));
    total.largest = warp_max(total.largest);
    for (uint32_t i = lane_id(); i < count; i += WARP) {
        double shift = head_shift(total, cells[i]);
        double share = exp(shift);
        if (masses) masses[i] = share * double(cells[i].sum);
        total.sum = fma(share, double(cells[i].sum), total.sum);
        total.weighted = fma(share, fma(shift, double(cells[i].sum), double(cells[i].weighted)), total.weighted);
    }
    total.sum = warp_sum_f64(total.sum);
    total.weighted = warp_sum_f64(total.weighted);
    return total;
}

DEVICE float head_logp(const HeadTotal& total, float logit) {
    return float(double(rounded_product(logit, total.t)) - double(total.largest) - log(total.sum));
}

struct HeadScores {
    const float* logits;
    const HeadCell* cells;
    const uint32_t* targets;
    float* scores;       // [rows][2]: log-prob of the target, entropy
    double* normalizers; // [rows][2]: the largest logit times t, sum of e^(logit t - largest)
    uint64_t stride;
    uint32_t rows, cells_of_row;
    float t;
    uint32_t pad;
};

// One warp per row of logits.
KERNEL(head_scores, HeadScores) {
    uint32_t row = blockIdx.x * (blockDim.x / WARP) + warp_id();
    if (row >= p.rows) return;
    HeadTotal total = head_total(p.cells + uint64_t(row) * p.cells_of_row, p.cells_of_row, p.t);
    if (lane_id() == 0) {
        p.scores[2 * row] = head_logp(total, p.logits[uint64_t(row) * p.stride + p.targets[row]]);
        p.scores[2 * row + 1] = float(log(total.sum) - total.weighted / total.sum);
        p.normalizers[2 * row] = double(total.largest);
        p.normalizers[2 * row + 1] = total.sum;
    }
}

struct HeadGradient {
    const float* logits;
    void* d_logits;
    const double* normalizers;
    const uint32_t* targets;
    const float* g; // dL/dlogp
    uint64_t stride, d_stride;
    uint32_t rows, vocab;
    uint32_t columns; // columns of d_logits, a multiple of 8; zeros after the vocabulary
    float t;
};

// d_logits = g t (onehot - softmax); tokens along x, eight adjacent ones per thread, rows along y and z. Rows of both
// must be aligned to 16 bytes and have room for a multiple of eight tokens.
template <typename T> DEVICE void head_gradient(const HeadGradient& p) {
    uint32_t row = blockIdx.z * gridDim.y + blockIdx.y, at = 8 * (blockIdx.x * blockDim.x + threadIdx.x);
    if (row >= p.rows || at >= p.columns) return;
    float g = p.g[row], d[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
    if (at < p.vocab && g != 0.0f) {
        load8(p.logits + uint64_t(row) * p.stride + at, d);
        float largest = float(p.normalizers[2 * row]);
        float c = float(-double(g) * double(p.t) / p.normalizers[2 * row + 1]);
#pragma unroll
        for (uint32_t e = 0; e < 8; e++) d[e] = at + e < p.vocab ? c * expf(head_z(d[e], p.t, largest)) : 0.0f;
        uint32_t target = p.targets[row] - at;
        if (target < 8) {
#pragma unroll
            for (uint32_t e = 0; e < 8; e++) d[e] = e == target ? fmaf(g, p.t, d[e]) : d[e];
        }
    }
    store8(static_cast<T*>(p.d_logits) + uint64_t(row) * p.d_stride + at, d);
}
KERNEL(head_gradient_f32, HeadGradient) { head_gradient<float>(p); }
KERNEL(head_gradient_bf16, HeadGradient) { head_gradient<bf16>(p); }

// Finds the first of the warp's weights at which the cumulative sum exceeds `target`; if rounding leaves none, the last
// weight above 0. A lane has `count` consecutive weights; weight_at(0) is the one with index `first`. Computed by a
// warp, result in every lane.
struct Found {
    uint32_t index;
    double before; // the sum of the weights before it
};
template <typename Weight>
DEVICE Found head_invert(const Weight& weight_at, uint32_t first, uint32_t count, double target) {
    double own = 0.0;
#pragma unroll
    for (uint32_t i = 0; i < count; i++) own += weight_at(i);
    double next = own;
    for (uint32_t step = 1; step < WARP; step <<= 1) {
        double below = __shfl_up_sync(FULL, next, step);
        if (lane_id() >= step) next += below;
    }
    double sum = __shfl_up_sync(FULL, next, 1);
    if (lane_id() == 0) sum = 0.0;
    uint32_t above = __ballot_sync(FULL, own > 0.0 && next > target), any = __ballot_sync(FULL, own > 0.0);
    int chosen = above ? __ffs(int(above)) - 1 : any ? 31 - __clz(int(any)) : 0;
    // Each lane searches its own weights.
    Found found = {first, sum};
    bool beyond = false;
#pragma unroll
    for (uint32_t i = 0; i < count; i++) {
        double weight = weight_at(i);
        if (!beyond && weight > 0.0) found.index = first + i, found.before = sum;
        sum += weight;
        beyond = beyond || sum > target;
    }
    found.index = __shfl_sync(FULL, found.index, chosen);
    found.before = __shfl_sync(FULL, found.before, chosen);
    return found;
}

// The filters of tokens: the same as the host's Filters, for all rows.
struct HeadFilters {
    double top_p; // 1 = off
    double min_p; // 0 = off
    double top_k; // 0 = off
};

struct HeadChoose {
    const float* logits;
    const HeadCell* cells;
    const HeadPick* picks;
    const HeadFilters* filters; // used by head_choose_filtered; its picks have temperatures above 0
    uint32_t* tokens;
    float* logps; // log-probs without filters
    uint64_t stride;
    uint32_t rows, vocab;
    uint32_t cells_of_row, pad;
};

// One warp per row of logits; shared memory for one f64 per cell.
KERNEL(head_choose, HeadChoose) {
    SHARED(shared);
    uint32_t row = blockIdx.x;
    double* masses = reinterpret_cast<double*>(shared);
    const HeadCell* cells = p.cells + uint64_t(row) * p.cells_of_row;
    const float* logits = p.logits + uint64_t(row) * p.stride;
    HeadPick pick = p.picks[row];
    HeadTotal total = head_total(cells, p.cells_of_row, head_factor(pick.temperature), masses);
    uint32_t token = 0;
    bool found = true;
    float values[16];
    if (pick.temperature == 0.0) {
        float largest = -INFINITY;
        for (uint32_t i = lane_id(); i < p.cells_of_row; i += WARP) largest = fmaxf(largest, cells[i].largest);
        largest = warp_max(largest);
        // Find the first cell that reaches the target, then the first token.
        uint32_t cell = p.cells_of_row;
        for (uint32_t i = lane_id(); i < p.cells_of_row; i += WARP) {
            if (cells[i].largest == largest && i < cell) cell = i;
        }
        cell = warp_min(cell);
        head_values(logits, cell, p.vocab, 16 * lane_id(), 4, NAN, values);
        uint32_t first = p.vocab;
#pragma unroll
        for (uint32_t i = 0; i < 16; i++) {
            if (values[i] == largest) first = min(first, cell * CELL + 16 * lane_id() + i);
        }
        first = warp_min(first);
        found = first < p.vocab;
        token = found ? first : 0;
    } else {
        __syncwarp();
        double target = pick.uniform * total.sum;
        uint32_t each = (p.cells_of_row + WARP - 1) / WARP, begin = min(lane_id() * each, p.cells_of_row);
        auto of_cell = [&](uint32_t i) -> double { return masses[begin + i]; };
        Found cell = head_invert(of_cell, begin, min(each, p.cells_of_row - begin), target);
        double rest = (target - cell.before) / exp(head_shift(total, cells[cell.index]));
        float shift = head_scaled(cells[cell.index], total.t);
        uint32_t base = cell.index * CELL + 16 * lane_id();
        head_values(logits, cell.index, p.vocab, 16 * lane_id(), 4, -INFINITY, values);
#pragma unroll
        for (uint32_t i = 0; i < 16; i++) values[i] = base + i < p.vocab ? expf(head_z(values[i], total.t, shift)) : 0.0f;
        auto of_token = [&](uint32_t i) -> double { return double(values[i]); };
        token = head_invert(of_token, base, 16, rest).index;
    }
    if (lane_id() == 0) {
        p.tokens[row] = token;
        p.logps[row] = head_logp(total, found ? logits[token] : NAN);
    }
}
#include "head_filter.cuh"
