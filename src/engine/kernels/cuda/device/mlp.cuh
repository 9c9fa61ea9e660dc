// SiLU·mul on rows [gate | up], each `width` wide.
#pragma once
#include "rows.cuh"

struct Silu {
    const void *gate_up, *dy;
    // out, or dL/d[gate | up]
    void *out;
    uint32_t rows, width, gate_up_stride, dy_stride, out_stride;
    // Bits: gate, up, dy, out (or d_gate), d_up.
    uint32_t aligned;
};

// x, no lower than where e⁻ˣ is near the largest f32 (NaN stays NaN), and its logistic.
DEVICE float logistic(float &x) {
    x = x < -87.0f ? -87.0f : x;
    return 1.0f / (1.0f + expf(-x));
}

template <typename T> DEVICE void silu_mul(const Silu &p) {
    Place place = place_of(p.rows, p.width);
    if (!place.inside) return;
    const T *gate = (const T *)p.gate_up + (size_t)place.row * p.gate_up_stride;
    float gates[4], ups[4];
    read4(gate, place.at, p.width, p.aligned & 1, gates);
    read4(gate + p.width, place.at, p.width, p.aligned & 2, ups);
    for (int e = 0; e < 4; e++) {
        float s = logistic(gates[e]);
        ups[e] = gates[e] * s * ups[e];
    }
    write4((T *)p.out + (size_t)place.row * p.out_stride, place.at, p.width, p.aligned & 8, ups);
}

KERNEL(silu_mul_f32, Silu) { silu_mul<float>(p); }
KERNEL(silu_mul_bf16, Silu) { silu_mul<bf16>(p); }

template <typename T> DEVICE void silu_mul_vjp(const Silu &p) {
    Place place = place_of(p.rows, p.width);
    if (!place.inside) return;
    const T *gate = (const T *)p.gate_up + (size_t)place.row * p.gate_up_stride;
    T *out = (T *)p.out + (size_t)place.row * p.out_stride;
    float gates[4], ups[4], dys[4];
    read4(gate, place.at, p.width, p.aligned & 1, gates);
    read4(gate + p.width, place.at, p.width, p.aligned & 2, ups);
    read4((const T *)p.dy + (size_t)place.row * p.dy_stride, place.at, p.width, p.aligned & 4, dys);
    for (int e = 0; e < 4; e++) {
        float s = logistic(gates[e]);
        // silu' = s·(1 + x·(1 − s))
        float slope = s * fmaf(gates[e], 1.0f - s, 1.0f);
        float d_gate = dys[e] * ups[e] * slope;
        ups[e] = dys[e] * (gates[e] * s);
        gates[e] = d_gate;
    }
    write4(out, place.at, p.width, p.aligned & 8, gates);
    write4(out + p.width, place.at, p.width, p.aligned & 16, ups);
}

KERNEL(silu_mul_vjp_f32, Silu) { silu_mul_vjp<float>(p); }
KERNEL(silu_mul_vjp_bf16, Silu) { silu_mul_vjp<bf16>(p); }
