// qk-norm and rotation of heads of up to 256 values. Several lanes share a head, each with the pairs (i, i +
// half) for four adjacent i; a warp processes as many heads as its lanes allow. The order of sums depends only
// on the head's size.
#pragma once
#include "rows.cuh"

struct Rope {
    const void *qkv, *dy;
    // The output: dL/dqkv, the rotated rows, or the partial gradients of the norms.
    void *out;
    const float *cos, *sin;
    // Weights of qk-norm; null without qk-norm.
    const float *q_weight, *k_weight;
    const uint32_t *positions;
    // The first `rotated` of the `heads` of each row are rotated; the others are copied.
    uint32_t rows, heads, q_heads, rotated, head_dim, positions_known;
    uint32_t qkv_stride, dy_stride, out_stride, table_stride;
    float eps;
    // Whether halves of heads, angles and weights can be read four values at a time.
    uint32_t wide;
    // 2 to this power is the number of lanes that share a head: enough for half of it, four values per lane.
    uint32_t lane_bits, unused;
};

// Four pairs of a lane: the first element of each, and the second.
struct Pairs {
    float a[4], b[4];
};

// A head, and the rotary angles of its row.
struct RotatedHead {
    uint32_t row, head;
    // Index in the head at which this lane's pairs begin; may be beyond the head.
    uint32_t at, half;
    // Whether the head exists, and whether it is rotated.
    bool inside, turns;
    // Whether the table has no angles for this position.
    bool unknown;
    const float *weight;
    float c[4], s[4];
};

template <bool WIDE>
DEVICE RotatedHead head_of(const Rope &p, uint32_t row, uint32_t index, uint32_t at, bool inside) {
    RotatedHead head;
    head.row = row, head.head = index, head.at = at, head.half = p.head_dim / 2;
    head.inside = inside, head.turns = inside && index < p.rotated;
    head.unknown = false;
    head.weight = index < p.q_heads ? p.q_weight : p.k_weight;
    if (head.turns) {
        uint32_t position = p.positions[row];
        head.unknown = position >= p.positions_known;
        size_t angles = head.unknown ? 0 : (size_t)position * p.table_stride;
        read4_of<WIDE>(p.cos + angles, at, head.half, false, head.c);
        read4_of<WIDE>(p.sin + angles, at, head.half, false, head.s);
    }
    return head;
}

template <bool WIDE, typename T> DEVICE Pairs read_pairs(const T *head, uint32_t at, uint32_t half) {
    Pairs pairs;
    read4_of<WIDE>(head, at, half, false, pairs.a);
    read4_of<WIDE>(head + half, at, half, false, pairs.b);
    return pairs;
}

template <bool WIDE, typename T> DEVICE void write_pairs(T *head, uint32_t at, uint32_t half, const Pairs &pairs) {
    write4_of<WIDE>(head, at, half, false, pairs.a);
    write4_of<WIDE>(head + half, at, half, false, pairs.b);
}

DEVICE float sum_of_lanes(const Rope &p, float x) {
    for (uint32_t step = 1u << p.lane_bits >> 1; step > 0; step >>= 1) x += __shfl_xor_sync(FULL, x, int(step));
    return x;
}

// 1 / √(mean(x²) + eps) of a head. Like all sums over lanes, it is computed by a whole warp.
DEVICE float head_scale(const Rope &p, const Pairs &x) {
    float squares = 0.0f;
    for (int e = 0; e < 4; e++) squares = fmaf(x.b[e], x.b[e], fmaf(x.a[e], x.a[e], squares));
    return 1.0f / sqrtf(sum_of_lanes(p, squares) / (float)p.head_dim + p.eps);
}

// Index in the head at which this lane's pairs begin.
DEVICE uint32_t lane_at(const Rope &p) { return 4 * (threadIdx.x & ((1u << p.lane_bits) - 1)); }

// The head of these lanes in a launch for all heads of all rows.
template <bool WIDE> DEVICE RotatedHead head_of_lanes(const Rope &p) {
    uint32_t index = (blockIdx.x * blockDim.x + threadIdx.x) >> p.lane_bits, row = index / p.heads;
    return head_of<WIDE>(p, row, index - row * p.heads, lane_at(p), row < p.rows);
}

template <typename T> DEVICE const T *values_of(const void *from, const RotatedHead &head, uint32_t stride) {
    return (const T *)from + (size_t)head.row * stride + head.head * 2 * head.half;
}

template <bool WIDE, typename T> DEVICE void rotate_heads(const Rope &p) {
    RotatedHead head = head_of_lanes<WIDE>(p);
    Pairs x = {}, weight = {};
    if (head.inside) x = read_pairs<WIDE>(values_of<T>(p.qkv, head, p.qkv_stride), head.at, head.half);
    if (p.q_weight && head.turns) weight = read_pairs<WIDE>(head.weight, head.at, head.half);
    if (p.q_weight && __any_sync(FULL, head.turns)) {
        float r = head_scale(p, x);
        for (int e = 0; head.turns && e < 4; e++) {
            x.a[e] = x.a[e] * r * weight.a[e];
            x.b[e] = x.b[e] * r * weight.b[e];
        }
    }
    if (!head.inside) return;
    if (head.turns) {
        for (int e = 0; e < 4; e++) {
            float a = x.a[e], b = x.b[e], c = head.unknown ? NAN : head.c[e], s = head.s[e];
            x.a[e] = fmaf(a, c, -(b * s));
            x.b[e] = fmaf(b, c, a * s);
        }
    }
    T *out = (T *)values_of<T>(p.out, head, p.out_stride);
    write_pairs<WIDE>(out, head.at, head.half, x);
}

KERNEL(rotate_f32, Rope) {
    let_next_start();
    p.wide ? rotate_heads<true, float>(p) : rotate_heads<false, float>(p);
}
KERNEL(rotate_bf16, Rope) {
    let_next_start();
    p.wide ? rotate_heads<true, bf16>(p) : rotate_heads<false, bf16>(p);
}

// Rotates the gradient dL/dout of a head back.
DEVICE void turn_back(const RotatedHead &head, Pairs &dy) {
    for (int e = 0; e < 4; e++) {
        float a = dy.a[e], b = dy.b[e], c = head.unknown ? NAN : head.c[e], s = head.s[e];
        dy.a[e] = fmaf(a, c, b * s);
        dy.b[e] = fmaf(b, c, -(a * s));
    }
}

template <bool WIDE, typename T> DEVICE void rotate_heads_vjp(const Rope &p) {
    RotatedHead head = head_of_lanes<WIDE>(p);
    Pairs dy = {}, x = {}, weight = {};
    if (head.inside) dy = read_pairs<WIDE>(values_of<T>(p.dy, head, p.dy_stride), head.at, head.half);
    if (p.q_weight && head.turns) {
        x = read_pairs<WIDE>(values_of<T>(p.qkv, head, p.qkv_stride), head.at, head.half);
        weight = read_pairs<WIDE>(head.weight, head.at, head.half);
    }
    if (head.turns) turn_back(head, dy);
    if (p.q_weight && __any_sync(FULL, head.turns)) {
        for (int e = 0; head.turns && e < 4; e++) dy.a[e] *= weight.a[e], dy.b[e] *= weight.b[e];
        float r = head_scale(p, x), inner = 0.0f;
        for (int e = 0; e < 4; e++) inner = fmaf(x.b[e], dy.b[e], fmaf(x.a[e], dy.a[e], inner));
        // The gradient of RMSNorm: dx = r·w·dy − (inner·r³/n)·x, with inner = Σ x·w·dy.
        float c = -(sum_of_lanes(p, inner) * r * r / (float)p.head_dim) * r;
        for (int e = 0; head.turns && e < 4; e++) {
            dy.a[e] = fmaf(c, x.a[e], dy.a[e] * r);
            dy.b[e] = fmaf(c, x.b[e], dy.b[e] * r);
        }
    }
    if (!head.inside) return;
    T *dx = (T *)values_of<T>(p.out, head, p.out_stride);
    write_pairs<WIDE>(dx, head.at, head.half, dy);
}

KERNEL(rotate_vjp_f32, Rope) { p.wide ? rotate_heads_vjp<true, float>(p) : rotate_heads_vjp<false, float>(p); }
KERNEL(rotate_vjp_bf16, Rope) { p.wide ? rotate_heads_vjp<true, bf16>(p) : rotate_heads_vjp<false, bf16>(p); }

// Part blockIdx.x of dL/dweight of query heads (blockIdx.y = 0) or key heads: f32 [ceil(rows / 64), 2, head_dim].
// Lanes that share a head process every n-th of the part's heads; their sums are combined in shared memory [teams
// of the block, head_dim].
template <bool WIDE, typename T> DEVICE void rotate_weight_parts(const Rope &p) {
    SHARED(shared);
    uint32_t teams = blockDim.x >> p.lane_bits, team = threadIdx.x >> p.lane_bits;
    uint32_t first = blockIdx.x * ROWS_OF_PART, head0 = blockIdx.y == 0 ? 0 : p.q_heads, half = p.head_dim / 2;
    uint32_t rows = p.rows - first < ROWS_OF_PART ? p.rows - first : ROWS_OF_PART;
    uint32_t heads = (blockIdx.y == 0 ? p.q_heads : p.rotated) - head0, at = lane_at(p);
    Pairs sums = {};
    for (uint32_t base = 0; base < rows * heads; base += teams) {
        uint32_t index = base + team;
        RotatedHead head = head_of<WIDE>(p, first + index / heads, head0 + index % heads, at, index < rows * heads);
        Pairs x = {}, dy = {};
        if (head.inside) {
            x = read_pairs<WIDE>(values_of<T>(p.qkv, head, p.qkv_stride), at, half);
            dy = read_pairs<WIDE>(values_of<T>(p.dy, head, p.dy_stride), at, half);
            turn_back(head, dy);
        }
        float r = head_scale(p, x);
        for (int e = 0; head.inside && e < 4; e++) {
            sums.a[e] = fmaf(dy.a[e], x.a[e] * r, sums.a[e]);
            sums.b[e] = fmaf(dy.b[e], x.b[e] * r, sums.b[e]);
        }
    }
    write_pairs<false>((float *)shared + team * p.head_dim, at, half, sums);
    __syncthreads();
    float *part = (float *)p.out + ((size_t)blockIdx.x * 2 + blockIdx.y) * p.head_dim;
    for (uint32_t i = threadIdx.x; i < p.head_dim; i += blockDim.x) {
        float sum = 0.0f;
        for (uint32_t team = 0; team < teams; team++) sum += ((float *)shared)[team * p.head_dim + i];
        part[i] = sum;
    }
}

KERNEL(rotate_weight_parts_f32, Rope) { p.wide ? rotate_weight_parts<true, float>(p) : rotate_weight_parts<false, float>(p); }
KERNEL(rotate_weight_parts_bf16, Rope) { p.wide ? rotate_weight_parts<true, bf16>(p) : rotate_weight_parts<false, bf16>(p); }
