// SiLU·mul on rows [gate | up], each `width` wide.
#pragma once
#include "rows.cuh"

struct Silu {
    const void *gate_up, *dy;
    // The output rows of the activation, or dL/d[gate | up].
    void *out;
    uint32_t rows, width, gate_up_stride, dy_stride, out_stride;
    // Whether all rows can be read and written eight values at a time.
    uint32_t wide;
};

// Reads eight values of a row from `at` on; zeros beyond its width.
template <bool WIDE, typename T> DEVICE void read8(const T *row, uint32_t at, uint32_t width, float values[8]) {
    if (WIDE) return load8(row + at, values);
    for (uint32_t e = 0; e < 8; e++) values[e] = at + e < width ? to_f32(row[at + e]) : 0.0f;
}

template <bool WIDE, typename T> DEVICE void write8(T *row, uint32_t at, uint32_t width, const float values[8]) {
    if (WIDE) return store8(row + at, values);
    for (uint32_t e = 0; e < 8 && at + e < width; e++) row[at + e] = from_f32<T>(values[e]);
}

// Clamps x to where e⁻ˣ is near the largest f32 (NaN stays NaN), and returns its logistic function.
DEVICE float logistic(float &x) {
    x = x < -87.0f ? -87.0f : x;
    return 1.0f / (1.0f + expf(-x));
}

template <bool WIDE, typename T> DEVICE void silu_mul(const Silu &p) {
    Place place = place_of(p.rows, p.width, 8);
    if (!place.inside) return;
    const T *gate = (const T *)p.gate_up + (size_t)place.row * p.gate_up_stride;
    float gates[8], ups[8];
    read8<WIDE>(gate, place.at, p.width, gates);
    read8<WIDE>(gate + p.width, place.at, p.width, ups);
    for (int e = 0; e < 8; e++) {
        float s = logistic(gates[e]);
        ups[e] = gates[e] * s * ups[e];
    }
    write8<WIDE>((T *)p.out + (size_t)place.row * p.out_stride, place.at, p.width, ups);
}

KERNEL(silu_mul_f32, Silu) {
    let_next_start();
    p.wide ? silu_mul<true, float>(p) : silu_mul<false, float>(p);
}
KERNEL(silu_mul_bf16, Silu) {
    let_next_start();
    p.wide ? silu_mul<true, bf16>(p) : silu_mul<false, bf16>(p);
}

template <bool WIDE, typename T> DEVICE void silu_mul_vjp(const Silu &p) {
    Place place = place_of(p.rows, p.width, 8);
    if (!place.inside) return;
    const T *gate = (const T *)p.gate_up + (size_t)place.row * p.gate_up_stride;
    T *out = (T *)p.out + (size_t)place.row * p.out_stride;
    float gates[8], ups[8], dys[8];
    read8<WIDE>(gate, place.at, p.width, gates);
    read8<WIDE>(gate + p.width, place.at, p.width, ups);
    read8<WIDE>((const T *)p.dy + (size_t)place.row * p.dy_stride, place.at, p.width, dys);
    for (int e = 0; e < 8; e++) {
        float s = logistic(gates[e]);
        // silu' = s·(1 + x·(1 − s))
        float slope = s * fmaf(gates[e], 1.0f - s, 1.0f);
        float d_gate = dys[e] * ups[e] * slope;
        ups[e] = dys[e] * (gates[e] * s);
        gates[e] = d_gate;
    }
    write8<WIDE>(out, place.at, p.width, gates);
    write8<WIDE>(out + p.width, place.at, p.width, ups);
}

KERNEL(silu_mul_vjp_f32, Silu) { p.wide ? silu_mul_vjp<true, float>(p) : silu_mul_vjp<false, float>(p); }
KERNEL(silu_mul_vjp_bf16, Silu) { p.wide ? silu_mul_vjp<true, bf16>(p) : silu_mul_vjp<false, bf16>(p); }
