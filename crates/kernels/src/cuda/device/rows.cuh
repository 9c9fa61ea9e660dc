// Operations on rows of tensors: lookups, conversions, sums over rows, dropout. A thread processes adjacent columns,
// aligned or not, so that the order of sums never depends on a tensor's address.
#pragma once
#include "prelude.cuh"

// Sums and products in two roundings: the compiler never fuses them into one.
#ifdef RLOOD_EMULATOR
DEVICE float add_rn(float x, float y) { return x + y; }
DEVICE float mul_rn(float x, float y) { return x * y; }
#else
DEVICE float add_rn(float x, float y) { return __fadd_rn(x, y); }
DEVICE float mul_rn(float x, float y) { return __fmul_rn(x, y); }
#endif

// Reads four values of a row from `at` on; zeros beyond its width.
template <typename T> DEVICE void read4(const T *row, uint32_t at, uint32_t width, bool aligned, float values[4]) {
    if (aligned && at + 4 <= width) {
        load4(row + at, values);
    } else {
        for (uint32_t e = 0; e < 4; e++) values[e] = at + e < width ? to_f32(row[at + e]) : 0.0f;
    }
}

// Reads four values without a branch between the reads, so that several are in progress concurrently, if all rows are
// aligned and a multiple of four wide (`WIDE`).
template <bool WIDE, typename T>
DEVICE void read4_of(const T *row, uint32_t at, uint32_t width, bool aligned, float values[4]) {
    if (!WIDE) return read4(row, at, width, aligned, values);
    bool inside = at < width;
    load4(row + (inside ? at : 0), values);
    for (int e = 0; e < 4; e++) values[e] = inside ? values[e] : 0.0f;
}

template <typename T> DEVICE void write4(T *row, uint32_t at, uint32_t width, bool aligned, const float values[4]) {
    if (aligned && at + 4 <= width) {
        store4(row + at, values);
    } else {
        for (uint32_t e = 0; e < 4 && at + e < width; e++) row[at + e] = from_f32<T>(values[e]);
    }
}

template <bool WIDE, typename T>
DEVICE void write4_of(T *row, uint32_t at, uint32_t width, bool aligned, const float values[4]) {
    if (!WIDE) return write4(row, at, width, aligned, values);
    if (at < width) store4(row + at, values);
}

// The columns of a thread, `each` of them, if threads cover rows one after another.
struct Place {
    uint32_t row, at;
    bool inside;
};

DEVICE Place place_of(uint32_t rows, uint32_t width, uint32_t each = 4) {
    uint32_t groups = (width + each - 1) / each, index = blockIdx.x * blockDim.x + threadIdx.x;
    uint32_t row = index / groups;
    return Place{row, index % groups * each, row < rows};
}

struct Select {
    const void *x;
    // The row of x for each row of `out`.
    const uint32_t *rows;
    void *out;
    uint32_t x_rows, count, width, x_stride, out_stride, aligned;
};

// out[i] = x[rows[i]]; NaN if there is no such row.
template <typename X, typename Out> DEVICE void select_rows(const Select &p) {
    Place place = place_of(p.count, p.width);
    if (!place.inside) return;
    uint32_t row = p.rows[place.row];
    float values[4] = {NAN, NAN, NAN, NAN};
    if (row < p.x_rows) {
        read4((const X *)p.x + (size_t)row * p.x_stride, place.at, p.width, p.aligned & 1, values);
    }
    write4((Out *)p.out + (size_t)place.row * p.out_stride, place.at, p.width, p.aligned & 2, values);
}

KERNEL(select_f32_f32, Select) { select_rows<float, float>(p); }
KERNEL(select_f32_bf16, Select) { select_rows<float, bf16>(p); }
KERNEL(select_bf16_f32, Select) { select_rows<bf16, float>(p); }
KERNEL(select_bf16_bf16, Select) { select_rows<bf16, bf16>(p); }

struct Copy {
    const void *x;
    void *out;
    uint32_t rows, width, x_stride, out_stride, aligned;
    // If 1, out += scale x; if 0, out = scale x.
    uint32_t add;
    float scale;
    uint32_t unused;
};

template <typename X, typename Out> DEVICE void copy_rows(const Copy &p) {
    Place place = place_of(p.rows, p.width);
    if (!place.inside) return;
    float values[4], sums[4];
    read4((const X *)p.x + (size_t)place.row * p.x_stride, place.at, p.width, p.aligned & 1, values);
    for (int e = 0; e < 4; e++) values[e] = mul_rn(values[e], p.scale);
    Out *out = (Out *)p.out + (size_t)place.row * p.out_stride;
    if (p.add) {
        read4(out, place.at, p.width, p.aligned & 2, sums);
        for (int e = 0; e < 4; e++) values[e] = add_rn(values[e], sums[e]);
    }
    write4(out, place.at, p.width, p.aligned & 2, values);
}

KERNEL(copy_f32_f32, Copy) { copy_rows<float, float>(p); }
KERNEL(copy_f32_bf16, Copy) { copy_rows<float, bf16>(p); }
KERNEL(copy_bf16_f32, Copy) { copy_rows<bf16, float>(p); }
KERNEL(copy_bf16_bf16, Copy) { copy_rows<bf16, bf16>(p); }

struct Epilogue {
    const float *bias, *add;
    void *out;
    uint32_t rows, width, add_stride, out_stride, aligned, unused;
};

// out = out + bias + add, each if not null: the part that a library product does not compute.
template <typename Out> DEVICE void finish_rows(const Epilogue &p) {
    Place place = place_of(p.rows, p.width);
    if (!place.inside) return;
    float values[4], more[4];
    Out *out = (Out *)p.out + (size_t)place.row * p.out_stride;
    read4(out, place.at, p.width, p.aligned & 1, values);
    if (p.bias) {
        read4(p.bias, place.at, p.width, p.aligned & 2, more);
        for (int e = 0; e < 4; e++) values[e] += more[e];
    }
    if (p.add) {
        read4(p.add + (size_t)place.row * p.add_stride, place.at, p.width, p.aligned & 4, more);
        for (int e = 0; e < 4; e++) values[e] += more[e];
    }
    write4(out, place.at, p.width, p.aligned & 1, values);
}

KERNEL(finish_f32, Epilogue) { finish_rows<float>(p); }
KERNEL(finish_bf16, Epilogue) { finish_rows<bf16>(p); }

struct Scatter {
    const void *x;
    float *out;
    // [targets + 1]: the start of each target's sources in `sources`.
    const uint32_t *begins;
    const uint32_t *targets;
    const uint32_t *sources;
    uint32_t count, width, x_stride, out_stride, aligned, unused;
};

// out[targets[i]] += x[sources[j]] for the j of i, in order.
template <typename X> DEVICE void scatter_rows(const Scatter &p) {
    Place place = place_of(p.count, p.width);
    if (!place.inside) return;
    float *out = p.out + (size_t)p.targets[place.row] * p.out_stride;
    float sums[4], values[4];
    read4(out, place.at, p.width, p.aligned & 2, sums);
    for (uint32_t j = p.begins[place.row]; j < p.begins[place.row + 1]; j++) {
        read4((const X *)p.x + (size_t)p.sources[j] * p.x_stride, place.at, p.width, p.aligned & 1, values);
        for (int e = 0; e < 4; e++) sums[e] += values[e];
    }
    write4(out, place.at, p.width, p.aligned & 2, sums);
}

KERNEL(scatter_f32, Scatter) { scatter_rows<float>(p); }
KERNEL(scatter_bf16, Scatter) { scatter_rows<bf16>(p); }

struct ColumnParts {
    const void *x;
    // Partial sums over 64 rows each, f32 [ceil(rows / 64), width].
    float *parts;
    uint32_t rows, width, stride, unused;
};

// Number of rows that one partial sum covers, that of blockIdx.y.
#define ROWS_OF_PART 64

template <typename X> DEVICE void column_parts(const ColumnParts &p) {
    uint32_t column = blockIdx.x * blockDim.x + threadIdx.x, first = blockIdx.y * ROWS_OF_PART;
    if (column >= p.width) return;
    uint32_t end = p.rows - first < ROWS_OF_PART ? p.rows : first + ROWS_OF_PART;
    float sum = 0.0f;
    for (uint32_t row = first; row < end; row++) sum += to_f32(((const X *)p.x)[(size_t)row * p.stride + column]);
    p.parts[(size_t)blockIdx.y * p.width + column] = sum;
}

KERNEL(column_parts_f32, ColumnParts) { column_parts<float>(p); }
KERNEL(column_parts_bf16, ColumnParts) { column_parts<bf16>(p); }

struct AddParts {
    // Partial sums, f32 [count, rows_of_part, width].
    const float *parts;
    float *out;
    uint32_t count, rows, width, out_stride;
    // Number of rows of a partial sum, and the first of them to add.
    uint32_t rows_of_part, first;
    float alpha;
    uint32_t unused;
};

// out += alpha · Σ of the parts' rows, in order.
KERNEL(add_parts, AddParts) {
    uint32_t index = blockIdx.x * blockDim.x + threadIdx.x, row = index / p.width, column = index % p.width;
    if (row >= p.rows) return;
    float sum = 0.0f;
    for (uint32_t part = 0; part < p.count; part++) {
        sum += p.parts[((size_t)part * p.rows_of_part + p.first + row) * p.width + column];
    }
    float *out = p.out + (size_t)row * p.out_stride + column;
    *out = fmaf(p.alpha, sum, *out);
}

struct Drop {
    const void *x;
    void *out;
    const uint64_t *keys;
    uint64_t threshold;
    uint32_t rows, width, x_stride, out_stride;
    float scale;
    // If 1, out += the values after dropout; if 0, out = these values.
    uint32_t add;
};

// SplitMix64's finalizer, and the chain that engine/src/random.rs builds from it.
DEVICE uint64_t mix_word(uint64_t word) {
    word = (word ^ word >> 30) * 0xbf58476d1ce4e5b9ull;
    word = (word ^ word >> 27) * 0x94d049bb133111ebull;
    return word ^ word >> 31;
}

DEVICE uint64_t key_bits(uint64_t key, uint64_t word) {
    const uint64_t gamma = 0x9e3779b97f4a7c15ull;
    return mix_word(mix_word(key * 3 + mix_word(word + gamma)) ^ gamma);
}

template <typename X, typename Out> DEVICE void drop_values(const Drop &p) {
    Place place = place_of(p.rows, p.width);
    if (!place.inside) return;
    const X *x = (const X *)p.x + (size_t)place.row * p.x_stride;
    Out *out = (Out *)p.out + (size_t)place.row * p.out_stride;
    uint64_t key = p.keys[place.row];
    for (uint32_t pair = 0; pair < 2; pair++) {
        uint64_t bits = key_bits(key, place.at / 2 + pair);
        for (uint32_t e = 0; e < 2; e++) {
            uint32_t column = place.at + 2 * pair + e;
            if (column >= p.width) return;
            uint64_t draw = e == 0 ? bits & 0xffffffffull : bits >> 32;
            float value = draw < p.threshold ? 0.0f : mul_rn(to_f32(x[column]), p.scale);
            if (p.add) value = add_rn(to_f32(out[column]), value);
            out[column] = from_f32<Out>(value);
        }
    }
}

KERNEL(drop_f32_f32, Drop) { drop_values<float, float>(p); }
KERNEL(drop_bf16_bf16, Drop) { drop_values<bf16, bf16>(p); }
KERNEL(drop_bf16_f32, Drop) { drop_values<bf16, float>(p); }
