// qk-norm and rotation of heads: a warp a head, a lane the pairs (i, i + half) with i = lane, lane + 32, ...
#pragma once
#include "rows.cuh"

struct Rope {
    const void *qkv, *dy;
    // dL/dqkv, the rotated rows, or the parts of the norms' gradients.
    void *out;
    const float *cos, *sin;
    // Null without qk-norm.
    const float *q_weight, *k_weight;
    const uint32_t *positions;
    uint32_t rows, heads, q_heads, rotated, head_dim, positions_known;
    uint32_t qkv_stride, dy_stride, out_stride, table_stride;
    float eps;
    uint32_t unused;
};

// A warp's head, and its row's angles.
struct RotatedHead {
    uint32_t row, head;
    const float *cos, *sin, *weight;
    // There are no angles for this position.
    bool unknown;
};

DEVICE RotatedHead head_of(const Rope &p, uint32_t index) {
    RotatedHead head;
    head.row = index / p.heads, head.head = index % p.heads;
    uint32_t position = p.positions[head.row];
    head.unknown = position >= p.positions_known;
    size_t at = head.unknown ? 0 : (size_t)position * p.table_stride;
    head.cos = p.cos + at, head.sin = p.sin + at;
    head.weight = head.head < p.q_heads ? p.q_weight : p.k_weight;
    return head;
}

// 1 / √(mean(x²) + eps) of a head.
template <typename T> DEVICE float head_scale(const Rope &p, const T *x) {
    float squares = 0.0f;
    uint32_t half = p.head_dim / 2;
    for (uint32_t i = lane_id(); i < half; i += WARP) {
        float a = to_f32(x[i]), b = to_f32(x[half + i]);
        squares = fmaf(b, b, fmaf(a, a, squares));
    }
    return 1.0f / sqrtf(warp_sum(squares) / (float)p.head_dim + p.eps);
}

template <typename T> DEVICE void rotate_heads(const Rope &p) {
    uint32_t index = blockIdx.x * (blockDim.x / WARP) + warp_id(), half = p.head_dim / 2;
    if (index >= p.rows * p.heads) return;
    RotatedHead head = head_of(p, index);
    const T *x = (const T *)p.qkv + (size_t)head.row * p.qkv_stride + head.head * p.head_dim;
    T *out = (T *)p.out + (size_t)head.row * p.out_stride + head.head * p.head_dim;
    if (head.head >= p.rotated) {
        for (uint32_t i = lane_id(); i < p.head_dim; i += WARP) out[i] = x[i];
        return;
    }
    float r = head.weight ? head_scale(p, x) : 1.0f;
    for (uint32_t i = lane_id(); i < half; i += WARP) {
        float a = to_f32(x[i]), b = to_f32(x[half + i]), c = head.unknown ? NAN : head.cos[i], s = head.sin[i];
        if (head.weight) a = a * r * head.weight[i], b = b * r * head.weight[half + i];
        out[i] = from_f32<T>(fmaf(a, c, -(b * s)));
        out[half + i] = from_f32<T>(fmaf(b, c, a * s));
    }
}

KERNEL(rotate_f32, Rope) { rotate_heads<float>(p); }
KERNEL(rotate_bf16, Rope) { rotate_heads<bf16>(p); }

// A pair of dL/dout turned back.
template <typename T> DEVICE void turned_back(const RotatedHead &head, const T *dy, uint32_t i, uint32_t half, float &a, float &b) {
    float da = to_f32(dy[i]), db = to_f32(dy[half + i]), c = head.unknown ? NAN : head.cos[i], s = head.sin[i];
    a = fmaf(da, c, db * s);
    b = fmaf(db, c, -(da * s));
}

template <typename T> DEVICE void rotate_heads_vjp(const Rope &p) {
    uint32_t index = blockIdx.x * (blockDim.x / WARP) + warp_id(), half = p.head_dim / 2;
    if (index >= p.rows * p.heads) return;
    RotatedHead head = head_of(p, index);
    const T *dy = (const T *)p.dy + (size_t)head.row * p.dy_stride + head.head * p.head_dim;
    T *dx = (T *)p.out + (size_t)head.row * p.out_stride + head.head * p.head_dim;
    if (head.head >= p.rotated) {
        for (uint32_t i = lane_id(); i < p.head_dim; i += WARP) dx[i] = dy[i];
        return;
    }
    float a, b;
    if (!head.weight) {
        for (uint32_t i = lane_id(); i < half; i += WARP) {
            turned_back(head, dy, i, half, a, b);
            dx[i] = from_f32<T>(a), dx[half + i] = from_f32<T>(b);
        }
        return;
    }
    const T *x = (const T *)p.qkv + (size_t)head.row * p.qkv_stride + head.head * p.head_dim;
    float r = head_scale(p, x), inner = 0.0f;
    for (uint32_t i = lane_id(); i < half; i += WARP) {
        turned_back(head, dy, i, half, a, b);
        inner = fmaf(to_f32(x[i]), head.weight[i] * a, inner);
        inner = fmaf(to_f32(x[half + i]), head.weight[half + i] * b, inner);
    }
    // dx = r·w·dy − (inner·r³/n)·x
    float c = -(warp_sum(inner) * r * r / (float)p.head_dim) * r;
    for (uint32_t i = lane_id(); i < half; i += WARP) {
        turned_back(head, dy, i, half, a, b);
        dx[i] = from_f32<T>(fmaf(c, to_f32(x[i]), head.weight[i] * a * r));
        dx[half + i] = from_f32<T>(fmaf(c, to_f32(x[half + i]), head.weight[half + i] * b * r));
    }
}

KERNEL(rotate_vjp_f32, Rope) { rotate_heads_vjp<float>(p); }
KERNEL(rotate_vjp_bf16, Rope) { rotate_heads_vjp<bf16>(p); }

// Part blockIdx.x of dL/dweight of query (blockIdx.y = 0) or key heads: f32 [ceil(rows / 64), 2, head_dim]. A warp takes
// every so manieth head of the part's rows, into sums of its own in shared memory [warps, head_dim].
template <typename T> DEVICE void rotate_weight_parts(const Rope &p) {
    SHARED(shared);
    float *sums = (float *)shared + warp_id() * p.head_dim;
    uint32_t half = p.head_dim / 2, warps = blockDim.x / WARP;
    uint32_t first = blockIdx.x * ROWS_OF_PART, head0 = blockIdx.y == 0 ? 0 : p.q_heads;
    uint32_t rows = p.rows - first < ROWS_OF_PART ? p.rows - first : ROWS_OF_PART;
    uint32_t heads = (blockIdx.y == 0 ? p.q_heads : p.rotated) - head0;
    for (uint32_t i = lane_id(); i < half; i += WARP) sums[i] = 0.0f, sums[half + i] = 0.0f;
    for (uint32_t index = warp_id(); index < rows * heads; index += warps) {
        RotatedHead head = head_of(p, (first + index / heads) * p.heads + head0 + index % heads);
        const T *x = (const T *)p.qkv + (size_t)head.row * p.qkv_stride + head.head * p.head_dim;
        const T *dy = (const T *)p.dy + (size_t)head.row * p.dy_stride + head.head * p.head_dim;
        float r = head_scale(p, x), a, b;
        for (uint32_t i = lane_id(); i < half; i += WARP) {
            turned_back(head, dy, i, half, a, b);
            sums[i] = fmaf(a, to_f32(x[i]) * r, sums[i]);
            sums[half + i] = fmaf(b, to_f32(x[half + i]) * r, sums[half + i]);
        }
    }
    __syncthreads();
    float *part = (float *)p.out + ((size_t)blockIdx.x * 2 + blockIdx.y) * p.head_dim;
    for (uint32_t i = threadIdx.x; i < p.head_dim; i += blockDim.x) {
        float sum = 0.0f;
        for (uint32_t warp = 0; warp < warps; warp++) sum += ((float *)shared)[warp * p.head_dim + i];
        part[i] = sum;
    }
}

KERNEL(rotate_weight_parts_f32, Rope) { rotate_weight_parts<float>(p); }
KERNEL(rotate_weight_parts_bf16, Rope) { rotate_weight_parts<bf16>(p); }
