// RMSNorm of rows of f32: one warp per row up to 2048 columns (with separate kernels up to 1024), one block per row
// beyond. Only the width decides, so that a row has the same bits among others and alone.
#pragma once
#include "rows.cuh"

struct Norm {
    const float *x, *weight;
    void *out;
    uint32_t rows, width, x_stride, out_stride;
    // Bits that say which operands are aligned: x, weight, out.
    uint32_t aligned;
    float eps;
};

// 1 / √(mean(x²) + eps)
DEVICE float norm_scale(float squares, uint32_t width, float eps) { return 1.0f / sqrtf(squares / (float)width + eps); }

// A warp's row of up to 128 N columns: lane l has four from 4 l on, four from 128 + 4 l on, ...
template <int N> struct NormValues {
    float at[N][4];

    template <bool WIDE> DEVICE_SPECIAL void read(const float *x, uint32_t width, bool aligned) {
#pragma unroll
        for (uint32_t i = 0; i < N; i++) read4_of<WIDE>(x, 4 * (lane_id() + i * WARP), width, aligned, at[i]);
    }

    // Writes the row after all reads, because the compiler must assume that a write changes what is read next.
    template <bool WIDE, typename Out> DEVICE_SPECIAL void write(Out *out, uint32_t width, bool aligned) const {
#pragma unroll
        for (uint32_t i = 0; i < N; i++) write4_of<WIDE>(out, 4 * (lane_id() + i * WARP), width, aligned, at[i]);
    }

    DEVICE_SPECIAL float squares() const {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < N; i++) {
            for (int e = 0; e < 4; e++) sum = fmaf(at[i][e], at[i][e], sum);
        }
        return warp_sum(sum);
    }
};

// The row that a warp processes.
DEVICE uint32_t norm_row_of_warp() { return blockIdx.x * (blockDim.x / WARP) + warp_id(); }

template <int N, bool WIDE, typename Out> DEVICE void norm_row(const Norm &p) {
    uint32_t row = norm_row_of_warp();
    if (row >= p.rows) return;
    NormValues<N> x;
    x.template read<WIDE>(p.x + (size_t)row * p.x_stride, p.width, p.aligned & 1);
    float r = norm_scale(x.squares(), p.width, p.eps), weights[4];
#pragma unroll
    for (uint32_t i = 0; i < N; i++) {
        read4_of<WIDE>(p.weight, 4 * (lane_id() + i * WARP), p.width, p.aligned & 2, weights);
        for (int e = 0; e < 4; e++) x.at[i][e] = x.at[i][e] * r * weights[e];
    }
    x.template write<WIDE>((Out *)p.out + (size_t)row * p.out_stride, p.width, p.aligned & 4);
}

template <typename Out> DEVICE void norm_long_row(const Norm &p) {
    SHARED_ARRAY(float, scratch, 32);
    const float *x = p.x + (size_t)blockIdx.x * p.x_stride;
    float squares = 0.0f, values[4], weights[4];
    for (uint32_t at = 4 * threadIdx.x; at < p.width; at += 4 * blockDim.x) {
        read4(x, at, p.width, p.aligned & 1, values);
        for (int e = 0; e < 4; e++) squares = fmaf(values[e], values[e], squares);
    }
    float r = norm_scale(block_sum(squares, scratch), p.width, p.eps);
    Out *out = (Out *)p.out + (size_t)blockIdx.x * p.out_stride;
    for (uint32_t at = 4 * threadIdx.x; at < p.width; at += 4 * blockDim.x) {
        read4(x, at, p.width, p.aligned & 1, values);
        read4(p.weight, at, p.width, p.aligned & 2, weights);
        for (int e = 0; e < 4; e++) values[e] = values[e] * r * weights[e];
        write4(out, at, p.width, p.aligned & 4, values);
    }
}

template <int N, typename Out> DEVICE void norm_rows(const Norm &p) {
    bool wide = p.aligned == 7 && p.width % 4 == 0;
    wide ? norm_row<N, true, Out>(p) : norm_row<N, false, Out>(p);
}

KERNEL(rms_norm_1024_f32, Norm) {
    let_next_start();
    norm_rows<8, float>(p);
}
KERNEL(rms_norm_1024_bf16, Norm) {
    let_next_start();
    norm_rows<8, bf16>(p);
}
KERNEL(rms_norm_2048_f32, Norm) {
    let_next_start();
    norm_rows<16, float>(p);
}
KERNEL(rms_norm_2048_bf16, Norm) {
    let_next_start();
    norm_rows<16, bf16>(p);
}
KERNEL(rms_norm_long_f32, Norm) {
    let_next_start();
    norm_long_row<float>(p);
}
KERNEL(rms_norm_long_bf16, Norm) {
    let_next_start();
    norm_long_row<bf16>(p);
}

struct NormBackward {
    const float *x, *weight;
    const void *dy;
    // The residual; null if there is none.
    const float *residual;
    float *dx;
    uint32_t rows, width, x_stride, dy_stride, residual_stride, dx_stride;
    // Bits that say which operands are aligned: x, weight, dy, residual, dx.
    uint32_t aligned;
    float eps;
};

// Computes four columns of w·dy.
template <bool WIDE, typename Y>
DEVICE void norm_gradients(const NormBackward &p, const Y *dy, uint32_t at, float gradients[4]) {
    float weights[4];
    read4_of<WIDE>(p.weight, at, p.width, p.aligned & 2, weights);
    read4_of<WIDE>(dy, at, p.width, p.aligned & 4, gradients);
    for (int e = 0; e < 4; e++) gradients[e] *= weights[e];
}

// Replaces four columns of x by dx = residual + r·w·dy + c·x with c = − Σ x·w·dy · r³ / n.
template <bool WIDE>
DEVICE void norm_turn(const NormBackward &p, uint32_t row, uint32_t at, float r, float c, const float gradients[4],
                      float x[4]) {
    for (int e = 0; e < 4; e++) x[e] = fmaf(c, x[e], gradients[e] * r);
    if (p.residual) {
        float more[4];
        read4_of<WIDE>(p.residual + (size_t)row * p.residual_stride, at, p.width, p.aligned & 8, more);
        for (int e = 0; e < 4; e++) x[e] += more[e];
    }
}

template <int N, bool WIDE, typename Y> DEVICE void norm_row_vjp(const NormBackward &p) {
    uint32_t row = norm_row_of_warp();
    if (row >= p.rows) return;
    const Y *dy = (const Y *)p.dy + (size_t)row * p.dy_stride;
    NormValues<N> x;
    x.template read<WIDE>(p.x + (size_t)row * p.x_stride, p.width, p.aligned & 1);
    float inner = 0.0f, gradients[4];
#pragma unroll
    for (uint32_t i = 0; i < N; i++) {
        norm_gradients<WIDE>(p, dy, 4 * (lane_id() + i * WARP), gradients);
        for (int e = 0; e < 4; e++) inner = fmaf(x.at[i][e], gradients[e], inner);
    }
    float r = norm_scale(x.squares(), p.width, p.eps);
    float c = -(warp_sum(inner) * r * r / (float)p.width) * r;
#pragma unroll
    for (uint32_t i = 0; i < N; i++) {
        uint32_t at = 4 * (lane_id() + i * WARP);
        norm_gradients<WIDE>(p, dy, at, gradients);
        norm_turn<WIDE>(p, row, at, r, c, gradients, x.at[i]);
    }
    x.template write<WIDE>(p.dx + (size_t)row * p.dx_stride, p.width, p.aligned & 16);
}

template <typename Y> DEVICE void norm_long_row_vjp(const NormBackward &p) {
    SHARED_ARRAY(float, scratch, 32);
    const float *x = p.x + (size_t)blockIdx.x * p.x_stride;
    const Y *dy = (const Y *)p.dy + (size_t)blockIdx.x * p.dy_stride;
    float squares = 0.0f, inner = 0.0f, values[4], gradients[4];
    for (uint32_t at = 4 * threadIdx.x; at < p.width; at += 4 * blockDim.x) {
        read4(x, at, p.width, p.aligned & 1, values);
        norm_gradients<false>(p, dy, at, gradients);
        for (int e = 0; e < 4; e++) {
            squares = fmaf(values[e], values[e], squares);
            inner = fmaf(values[e], gradients[e], inner);
        }
    }
    float r = norm_scale(block_sum(squares, scratch), p.width, p.eps);
    float c = -(block_sum(inner, scratch) * r * r / (float)p.width) * r;
    for (uint32_t at = 4 * threadIdx.x; at < p.width; at += 4 * blockDim.x) {
        read4(x, at, p.width, p.aligned & 1, values);
        norm_gradients<false>(p, dy, at, gradients);
        norm_turn<false>(p, blockIdx.x, at, r, c, gradients, values);
        write4(p.dx + (size_t)blockIdx.x * p.dx_stride, at, p.width, p.aligned & 16, values);
    }
}

template <int N, typename Y> DEVICE void norm_rows_vjp(const NormBackward &p) {
    bool wide = p.aligned == 31 && p.width % 4 == 0;
    wide ? norm_row_vjp<N, true, Y>(p) : norm_row_vjp<N, false, Y>(p);
}

KERNEL(rms_norm_vjp_1024_f32, NormBackward) { norm_rows_vjp<8, float>(p); }
KERNEL(rms_norm_vjp_1024_bf16, NormBackward) { norm_rows_vjp<8, bf16>(p); }
KERNEL(rms_norm_vjp_2048_f32, NormBackward) { norm_rows_vjp<16, float>(p); }
KERNEL(rms_norm_vjp_2048_bf16, NormBackward) { norm_rows_vjp<16, bf16>(p); }
KERNEL(rms_norm_vjp_long_f32, NormBackward) { norm_long_row_vjp<float>(p); }
KERNEL(rms_norm_vjp_long_bf16, NormBackward) { norm_long_row_vjp<bf16>(p); }

struct NormScales {
    const float *x;
    // The scale of each row, f32 [rows].
    float *scales;
    uint32_t rows, width, stride, aligned;
    float eps;
    uint32_t unused;
};

// 1 / √(mean(x²) + eps) of each row, summed as in rms_norm.
template <int N> DEVICE void norm_row_scale(const NormScales &p) {
    uint32_t row = norm_row_of_warp();
    if (row >= p.rows) return;
    NormValues<N> x;
    x.template read<false>(p.x + (size_t)row * p.stride, p.width, p.aligned & 1);
    float r = norm_scale(x.squares(), p.width, p.eps);
    if (lane_id() == 0) p.scales[row] = r;
}

KERNEL(rms_norm_scales_1024, NormScales) { norm_row_scale<8>(p); }
KERNEL(rms_norm_scales_2048, NormScales) { norm_row_scale<16>(p); }
KERNEL(rms_norm_scales_long, NormScales) {
    SHARED_ARRAY(float, scratch, 32);
    const float *x = p.x + (size_t)blockIdx.x * p.stride;
    float squares = 0.0f, values[4];
    for (uint32_t at = 4 * threadIdx.x; at < p.width; at += 4 * blockDim.x) {
        read4(x, at, p.width, p.aligned & 1, values);
        for (int e = 0; e < 4; e++) squares = fmaf(values[e], values[e], squares);
    }
    float sum = block_sum(squares, scratch);
    if (threadIdx.x == 0) p.scales[blockIdx.x] = norm_scale(sum, p.width, p.eps);
}

struct NormWeightParts {
    const float *x;
    const void *dy;
    const float *scales;
    // Partial sums over 64 rows each, f32 [ceil(rows / 64), width].
    float *parts;
    uint32_t rows, width, x_stride, dy_stride;
};

template <typename Y> DEVICE void norm_weight_parts(const NormWeightParts &p) {
    uint32_t column = blockIdx.x * blockDim.x + threadIdx.x, first = blockIdx.y * ROWS_OF_PART;
    if (column >= p.width) return;
    uint32_t end = p.rows - first < ROWS_OF_PART ? p.rows : first + ROWS_OF_PART;
    float sum = 0.0f;
    for (uint32_t row = first; row < end; row++) {
        float dy = to_f32(((const Y *)p.dy)[(size_t)row * p.dy_stride + column]);
        sum = fmaf(dy, p.x[(size_t)row * p.x_stride + column] * p.scales[row], sum);
    }
    p.parts[(size_t)blockIdx.y * p.width + column] = sum;
}

KERNEL(rms_norm_weight_parts_f32, NormWeightParts) { norm_weight_parts<float>(p); }
KERNEL(rms_norm_weight_parts_bf16, NormWeightParts) { norm_weight_parts<bf16>(p); }
