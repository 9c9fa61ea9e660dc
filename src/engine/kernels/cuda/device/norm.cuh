// RMSNorm of rows of f32: a block a row, its threads chosen by the width alone.
#pragma once
#include "rows.cuh"

struct Norm {
    const float *x, *weight;
    void *out;
    uint32_t width, x_stride, out_stride;
    // Bits: x, weight, out.
    uint32_t aligned;
    float eps;
    uint32_t unused;
};

template <typename Out> DEVICE void norm_row(const Norm &p) {
    SHARED_ARRAY(float, scratch, 32);
    const float *x = p.x + (size_t)blockIdx.x * p.x_stride;
    float squares = 0.0f, values[4], weights[4];
    for (uint32_t at = 4 * threadIdx.x; at < p.width; at += 4 * blockDim.x) {
        read4(x, at, p.width, p.aligned & 1, values);
        for (int e = 0; e < 4; e++) squares = fmaf(values[e], values[e], squares);
    }
    float r = 1.0f / sqrtf(block_sum(squares, scratch) / (float)p.width + p.eps);
    Out *out = (Out *)p.out + (size_t)blockIdx.x * p.out_stride;
    for (uint32_t at = 4 * threadIdx.x; at < p.width; at += 4 * blockDim.x) {
        read4(x, at, p.width, p.aligned & 1, values);
        read4(p.weight, at, p.width, p.aligned & 2, weights);
        for (int e = 0; e < 4; e++) values[e] = values[e] * r * weights[e];
        write4(out, at, p.width, p.aligned & 4, values);
    }
}

KERNEL(rms_norm_f32, Norm) { norm_row<float>(p); }
KERNEL(rms_norm_bf16, Norm) { norm_row<bf16>(p); }

struct NormBackward {
    const float *x, *weight;
    const void *dy;
    // Null without.
    const float *residual;
    float *dx;
    uint32_t width, x_stride, dy_stride, residual_stride, dx_stride;
    // Bits: x, weight, dy, residual, dx.
    uint32_t aligned;
    float eps;
    uint32_t unused;
};

// dx = residual + r·w·dy − (Σ x·w·dy · r³ / n)·x
template <typename Y> DEVICE void norm_row_vjp(const NormBackward &p) {
    SHARED_ARRAY(float, scratch, 32);
    const float *x = p.x + (size_t)blockIdx.x * p.x_stride;
    const Y *dy = (const Y *)p.dy + (size_t)blockIdx.x * p.dy_stride;
    float squares = 0.0f, inner = 0.0f, values[4], weights[4], gradients[4];
    for (uint32_t at = 4 * threadIdx.x; at < p.width; at += 4 * blockDim.x) {
        read4(x, at, p.width, p.aligned & 1, values);
        read4(p.weight, at, p.width, p.aligned & 2, weights);
        read4(dy, at, p.width, p.aligned & 4, gradients);
        for (int e = 0; e < 4; e++) {
            squares = fmaf(values[e], values[e], squares);
            inner = fmaf(values[e], weights[e] * gradients[e], inner);
        }
    }
    float r = 1.0f / sqrtf(block_sum(squares, scratch) / (float)p.width + p.eps);
    float c = -(block_sum(inner, scratch) * r * r / (float)p.width) * r;
    const float *residual = p.residual ? p.residual + (size_t)blockIdx.x * p.residual_stride : nullptr;
    float *dx = p.dx + (size_t)blockIdx.x * p.dx_stride;
    for (uint32_t at = 4 * threadIdx.x; at < p.width; at += 4 * blockDim.x) {
        read4(x, at, p.width, p.aligned & 1, values);
        read4(p.weight, at, p.width, p.aligned & 2, weights);
        read4(dy, at, p.width, p.aligned & 4, gradients);
        for (int e = 0; e < 4; e++) values[e] = fmaf(c, values[e], weights[e] * gradients[e] * r);
        if (residual) {
            read4(residual, at, p.width, p.aligned & 8, gradients);
            for (int e = 0; e < 4; e++) values[e] += gradients[e];
        }
        write4(dx, at, p.width, p.aligned & 16, values);
    }
}

KERNEL(rms_norm_vjp_f32, NormBackward) { norm_row_vjp<float>(p); }
KERNEL(rms_norm_vjp_bf16, NormBackward) { norm_row_vjp<bf16>(p); }

struct NormScales {
    const float *x;
    // f32 [rows]
    float *scales;
    uint32_t width, stride, aligned;
    float eps;
};

// 1 / √(mean(x²) + eps) of each row, summed as in rms_norm.
KERNEL(rms_norm_scales, NormScales) {
    SHARED_ARRAY(float, scratch, 32);
    const float *x = p.x + (size_t)blockIdx.x * p.stride;
    float squares = 0.0f, values[4];
    for (uint32_t at = 4 * threadIdx.x; at < p.width; at += 4 * blockDim.x) {
        read4(x, at, p.width, p.aligned & 1, values);
        for (int e = 0; e < 4; e++) squares = fmaf(values[e], values[e], squares);
    }
    float sum = block_sum(squares, scratch);
    if (threadIdx.x == 0) p.scales[blockIdx.x] = 1.0f / sqrtf(sum / (float)p.width + p.eps);
}

struct NormWeightParts {
    const float *x;
    const void *dy;
    const float *scales;
    // f32 [ceil(rows / 64), width]
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
