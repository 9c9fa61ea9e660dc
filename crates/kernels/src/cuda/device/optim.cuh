// AdamW on flat buffers, with roundings in the same order as on the host, and sums of squares.
#pragma once
#include "rows.cuh"

// The constants of one AdamW update.
struct AdamWUpdate {
    float step_size, keep, beta2, one_minus_beta1, one_minus_beta2, correction, epsilon;
    uint32_t unused;
};

// Updates one parameter and its AdamW moments in place, with weight decay only if `decays`.
DEVICE void adamw_value(const AdamWUpdate &u, bool decays, float gradient, float &parameter, float &first, float &second) {
    first = add_rn(first, mul_rn(add_rn(gradient, -first), u.one_minus_beta1));
    second = add_rn(mul_rn(second, u.beta2), mul_rn(mul_rn(gradient, gradient), u.one_minus_beta2));
    float step = mul_rn(u.step_size, first / add_rn(sqrtf(second) / u.correction, u.epsilon));
    parameter = add_rn(mul_rn(parameter, decays ? u.keep : 1.0f), -step);
}

struct AdamW {
    float *parameters;
    const float *gradient;
    float *first, *second;
    uint64_t count, decayed; // total; the first ones have weight decay
    AdamWUpdate update;
};

KERNEL(adamw, AdamW) {
    uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < p.count) adamw_value(p.update, i < p.decayed, p.gradient[i], p.parameters[i], p.first[i], p.second[i]);
}

// Number of 8-bit moments that share a scale, and of levels in a quantization map.
#define CODES 256u

struct AdamW8bit {
    float *parameters;
    const float *gradient;
    uint8_t *first, *second;
    float *first_scales, *second_scales; // one per block of 256
    const float *levels;                 // [2][256], ascending: for first moments, for second ones
    uint64_t count, decayed; // total; the first ones have weight decay
    AdamWUpdate update;
};

// Number of quantization levels below x.
DEVICE uint32_t levels_below(const float *levels, float x) {
    uint32_t first = 0, end = CODES;
    while (first < end) {
        uint32_t middle = (first + end) / 2;
        if (levels[middle] < x) first = middle + 1;
        else end = middle;
    }
    return first;
}

// Index of the quantization level nearest to value / scale; the lower one if two are equally near.
DEVICE uint32_t nearest_level(const float *levels, float value, float scale) {
    if (!(scale > 0.0f)) return levels_below(levels, 0.0f);
    float x = value / scale;
    uint32_t above = min(levels_below(levels, x), CODES - 1);
    return above > 0 && add_rn(x, -levels[above - 1]) <= add_rn(levels[above], -x) ? above - 1 : above;
}

// One thread block per block of moments: they are widened, updated, and rounded with their new largest magnitude.
KERNEL(adamw_8bit, AdamW8bit) {
    SHARED_ARRAY(float, levels, 512);
    SHARED_ARRAY(float, largest, 512);
    uint32_t t = threadIdx.x;
    uint64_t i = (uint64_t)blockIdx.x * CODES + t;
    bool inside = i < p.count;
    levels[t] = p.levels[t];
    levels[CODES + t] = p.levels[CODES + t];
    __syncthreads();
    float first = 0.0f, second = 0.0f;
    if (inside) {
        first = mul_rn(levels[p.first[i]], p.first_scales[blockIdx.x]);
        second = mul_rn(levels[CODES + p.second[i]], p.second_scales[blockIdx.x]);
        adamw_value(p.update, i < p.decayed, p.gradient[i], p.parameters[i], first, second);
    }
    // NaN does not count as a magnitude, as on the host.
    largest[t] = fmaxf(0.0f, fabsf(first));
    largest[CODES + t] = fmaxf(0.0f, fabsf(second));
    for (uint32_t half = CODES / 2; half > 0; half /= 2) {
        __syncthreads();
        if (t < half) {
            largest[t] = fmaxf(largest[t], largest[t + half]);
            largest[CODES + t] = fmaxf(largest[CODES + t], largest[CODES + t + half]);
        }
    }
    __syncthreads();
    float first_scale = largest[0], second_scale = largest[CODES];
    if (inside) {
        p.first[i] = (uint8_t)nearest_level(levels, first, first_scale);
        uint32_t code = nearest_level(levels + CODES, second, second_scale);
        // A nonzero second moment never becomes zero; the first level of its map is zero.
        p.second[i] = (uint8_t)(code + (code == 0 && second > 0.0f ? 1 : 0));
    }
    if (t == 0) {
        p.first_scales[blockIdx.x] = first_scale;
        p.second_scales[blockIdx.x] = second_scale;
    }
}

struct Squares {
    const float *x;
    // One sum per thread block.
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
