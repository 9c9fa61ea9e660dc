// AdamW on flat buffers, in the host's order of roundings, and sums of squares.
#pragma once
#include "rows.cuh"

struct AdamW {
    float *parameters;
    const float *gradient;
    float *first, *second;
    uint64_t count;
    float step_size, keep, beta2, one_minus_beta1, one_minus_beta2, correction, epsilon;
    uint32_t unused;
};

KERNEL(adamw, AdamW) {
    uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= p.count) return;
    float gradient = p.gradient[i], first = p.first[i], second = p.second[i];
    first = add_rn(first, mul_rn(add_rn(gradient, -first), p.one_minus_beta1));
    second = add_rn(mul_rn(second, p.beta2), mul_rn(mul_rn(gradient, gradient), p.one_minus_beta2));
    p.first[i] = first;
    p.second[i] = second;
    float step = mul_rn(p.step_size, first / add_rn(sqrtf(second) / p.correction, p.epsilon));
    p.parameters[i] = add_rn(mul_rn(p.parameters[i], p.keep), -step);
}

struct Squares {
    const float *x;
    // One a block.
    double *sums;
    uint64_t count, of_block;
};

KERNEL(squares, Squares) {
    SHARED_ARRAY(double, sums, 256);
    uint64_t first = blockIdx.x * p.of_block;
    uint64_t end = p.count - first < p.of_block ? p.count : first + p.of_block;
    double sum = 0.0;
    for (uint64_t i = first + threadIdx.x; i < end; i += blockDim.x) sum += (double)p.x[i] * (double)p.x[i];
    sums[threadIdx.x] = sum;
    for (uint32_t half = blockDim.x / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    if (threadIdx.x == 0) p.sums[blockIdx.x] = sums[0];
}

struct ScaleFlat {
    float *x;
    uint64_t count;
    float factor;
    uint32_t unused;
};

KERNEL(scale_flat, ScaleFlat) {
    uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < p.count) p.x[i] *= p.factor;
}
