// Matrix products whose elements are one chain over k, whatever the tile and the other rows: bf16 in steps of 16 with
// tensor cores, f32 one by one. Tiles determine which elements share a block, never the order of a sum.
#pragma once
#include "rows.cuh"

// The forms of a product: a [m, k] · b [n, k]ᵀ; a [m, k] · b [k, n]; a [k, m]ᵀ · b [k, n].
enum Form { NT, NN, TN };

struct Gemm {
    const void *a, *b;
    // A second product whose sums continue those of the first; null if there is none.
    const void *a2, *b2;
    // The bias, f32 [n], and the values to add, f32 [m, n]; null if there are none.
    const float *bias, *add;
    void *out;
    uint32_t m, n, k, k2;
    uint32_t a_stride, b_stride, a2_stride, b2_stride, add_stride, out_stride;
    // Number of k values that one thread block sums: the part of blockIdx.z is stored at out + z·m·n,
    // where out_stride is n.
    uint32_t k_of_part;
    // Bits 0 to 3: lines of a, b, a2, b2 can be read 16 bytes at a time; bits 4 and 5: lines of add and out, four
    // values at a time.
    uint32_t aligned;
    float alpha;
    // Whether b and b2 were complete before the previous kernel was submitted.
    uint32_t settled;
};

// The tile of outputs that a thread block computes: columns of 8 tiles of rows, so that concurrent blocks share lines.
struct TilePlace {
    uint32_t m0, n0;
};

DEVICE TilePlace tile_place(uint32_t m, uint32_t n, uint32_t tile_m, uint32_t tile_n) {
    const uint32_t GROUP = 8;
    uint32_t tiles_m = (m + tile_m - 1) / tile_m, tiles_n = (n + tile_n - 1) / tile_n;
    uint32_t group = blockIdx.x / (GROUP * tiles_n), inside = blockIdx.x % (GROUP * tiles_n);
    uint32_t first = group * GROUP;
    uint32_t height = tiles_m - first < GROUP ? tiles_m - first : GROUP;
    return TilePlace{(first + inside % height) * tile_m, inside / height * tile_n};
}

// Computes four adjacent elements of the result: alpha·sum + bias + add, rounded after each step, so
// that all kernels agree.
template <class Out> DEVICE void store_sums(const Gemm &p, uint32_t row, uint32_t column, const float sums[4]) {
    if (row >= p.m || column >= p.n) return;
    float values[4], more[4];
    for (int e = 0; e < 4; e++) values[e] = p.alpha == 1.0f ? sums[e] : mul_rn(p.alpha, sums[e]);
    if (p.bias) {
        read4(p.bias, column, p.n, false, more);
        for (int e = 0; e < 4; e++) values[e] = add_rn(values[e], more[e]);
    }
    if (p.add) {
        read4(p.add + (size_t)row * p.add_stride, column, p.n, p.aligned & 16, more);
        for (int e = 0; e < 4; e++) values[e] = add_rn(values[e], more[e]);
    }
    Out *out = (Out *)p.out + (size_t)blockIdx.z * p.m * p.n;
    write4(out + (size_t)row * p.out_stride, column, p.n, p.aligned & 32, values);
}

// ---------------------------------------------------------------------------------------------------------- bf16

// A thread block's tile, a warp's part of it, and the number of steps of BK values of k held in shared memory.
template <int M, int N, int K, int WARP_M, int WARP_N, int STEPS>
struct Tile {
    static constexpr int BM = M, BN = N, BK = K, WM = WARP_M, WN = WARP_N, STAGES = STEPS;
    static constexpr int WARPS = (M / WARP_M) * (N / WARP_N), THREADS = 32 * WARPS;
    static constexpr int STAGE = (M + N) * K;
};

// Position in shared memory of a 16-byte chunk of a line of CHUNKS chunks: the same chunk of eight lines
// is in different banks.
template <int CHUNKS>
DEVICE int chunk_place(int line, int chunk) {
    int turn = CHUNKS >= 8 ? line & 7 : CHUNKS == 4 ? (line >> 1) & 3 : (line >> 2) & 1;
    return (line * CHUNKS + (chunk ^ turn)) * 8;
}

// Copies LINES lines of CHUNKS chunks, with zeros beyond `lines` and `values`, whatever their alignment.
template <int LINES, int CHUNKS, int THREADS>
DEVICE void fetch_lines(bf16 *tile, const bf16 *from, uint32_t stride, uint32_t line0, uint32_t lines, uint32_t value0,
                        uint32_t values, bool aligned) {
    _Pragma("unroll 1")
    for (int i = threadIdx.x; i < LINES * CHUNKS; i += THREADS) {
        int line = i / CHUNKS, chunk = i % CHUNKS;
        bf16 *to = tile + chunk_place<CHUNKS>(line, chunk);
        uint32_t at_line = line0 + line, at = value0 + chunk * 8;
        const bf16 *source = from + (size_t)at_line * stride + at;
        if (aligned && (at + 8 <= values || at_line >= lines)) {
            cp_async16(to, source, at_line < lines);
        } else {
            _Pragma("unroll 1")
            for (uint32_t e = 0; e < 8; e++) {
                to[e] = at_line < lines && at + e < values ? source[e] : from_f32<bf16>(0.0f);
            }
        }
    }
}

// An operand of a product, and a thread's chunks of the step that is copied next. The values of k run along the lines,
// or (ACROSS) from line to line.
template <int WIDTH, int BK, bool ACROSS, int THREADS> struct Operand {
    static constexpr int LINES = ACROSS ? BK : WIDTH, CHUNKS = (ACROSS ? WIDTH : BK) / 8;
    static constexpr int EACH = LINES * CHUNKS / THREADS, APART = THREADS / CHUNKS;
    static_assert(LINES * CHUNKS % THREADS == 0 && APART % 8 == 0, "a thread's chunks are turned alike");

    const bf16 *from, *at;
    uint32_t stride, first, count, place;
    // Bit i: chunk i is inside the matrix.
    uint32_t there;
    bool aligned;

    // Starts at columns (or rows) first.. of the product, out of `count`, from k0 on.
    DEVICE_SPECIAL void begin(const void *operand, uint32_t operand_stride, uint32_t operand_first,
                              uint32_t operand_count, uint32_t k0, bool is_aligned) {
        from = (const bf16 *)operand, stride = operand_stride, first = operand_first, count = operand_count;
        aligned = is_aligned;
        uint32_t line = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
        place = chunk_place<CHUNKS>(line, chunk);
        there = 0;
        if (ACROSS) {
            at = from + (size_t)(k0 + line) * stride + first + 8 * chunk;
            // Values beyond the end of a line are read into columns that are not stored.
            there = first + 8 * chunk < count ? ~0u : 0u;
        } else {
            at = from + (size_t)(first + line) * stride + k0 + 8 * chunk;
            for (int i = 0; i < EACH; i++) there |= (first + line + i * APART < count ? 1u : 0u) << i;
        }
    }

    // Copies the step from k0 on to shared memory; steps must be consecutive.
    DEVICE_SPECIAL void fetch(bf16 *tile, uint32_t k0, uint32_t k) {
        if (aligned && k - k0 >= BK) {
            bf16 *to = tile + place;
            _Pragma("unroll")
            for (int i = 0; i < EACH; i++) {
                cp_async16(to + i * THREADS * 8, at + (size_t)(i * APART) * stride, there >> i & 1);
            }
            at += ACROSS ? (size_t)BK * stride : BK;
        } else if (ACROSS) {
            fetch_lines<LINES, CHUNKS, THREADS>(tile, from, stride, k0, k, first, count, aligned);
        } else {
            fetch_lines<LINES, CHUNKS, THREADS>(tile, from, stride, first, count, k0, k, aligned);
        }
    }
};

// Loads rows m0.. of a, k16 values from `k` on, as a tensor core's left operand.
template <Form FORM, class T>
DEVICE void left_fragment(uint32_t a[4], const bf16 *tile, int m0, int k) {
    int lane = threadIdx.x % 32;
    if (FORM == TN) {
        int line = k + (lane & 7) + 8 * (lane >> 4), chunk = m0 / 8 + (lane >> 3 & 1);
        ldmatrix_x4_trans(a, tile + chunk_place<T::BM / 8>(line, chunk));
    } else {
        int line = m0 + (lane & 15), chunk = k / 8 + (lane >> 4);
        ldmatrix_x4(a, tile + chunk_place<T::BK / 8>(line, chunk));
    }
}

// Loads columns n0.. of b, 16 of them, as two right operands.
template <Form FORM, class T>
DEVICE void right_fragments(uint32_t b[4], const bf16 *tile, int n0, int k) {
    int lane = threadIdx.x % 32;
    if (FORM == NT) {
        int line = n0 + (lane & 7) + 8 * (lane >> 4), chunk = k / 8 + (lane >> 3 & 1);
        ldmatrix_x4(b, tile + chunk_place<T::BK / 8>(line, chunk));
    } else {
        int line = k + (lane & 15), chunk = n0 / 8 + (lane >> 4);
        ldmatrix_x4_trans(b, tile + chunk_place<T::BN / 8>(line, chunk));
    }
}

// Loads 8 columns of b as a right operand.
template <Form FORM, class T>
DEVICE void right_fragment(uint32_t b[2], const bf16 *tile, int n0, int k) {
    int lane = threadIdx.x % 16;
    if (FORM == NT) {
        int line = n0 + (lane & 7), chunk = k / 8 + (lane >> 3);
        ldmatrix_x2(b, tile + chunk_place<T::BK / 8>(line, chunk));
    } else {
        ldmatrix_x2_trans(b, tile + chunk_place<T::BN / 8>(k + lane, n0 / 8));
    }
}

// Multiplies the operands of a warp for 16 values of k.
template <Form FORM, class T>
DEVICE void multiply(float (&sums)[T::WM / 16][T::WN / 8][4], const bf16 *a_tile, const bf16 *b_tile, int m0, int n0,
                     int k) {
    constexpr int MI = T::WM / 16, NI = T::WN / 8;
    uint32_t a[MI][4], b[2 * NI];
    _Pragma("unroll")
    for (int i = 0; i < MI; i++) left_fragment<FORM, T>(a[i], a_tile, m0 + 16 * i, k);
    if constexpr (NI == 1) {
        right_fragment<FORM, T>(b, b_tile, n0, k);
    } else {
        _Pragma("unroll")
        for (int j = 0; j < NI; j += 2) right_fragments<FORM, T>(b + 2 * j, b_tile, n0 + 8 * j, k);
    }
    _Pragma("unroll")
    for (int i = 0; i < MI; i++) {
        _Pragma("unroll")
        for (int j = 0; j < NI; j++) mma_m16n8k16_bf16(sums[i][j], a[i], b + 2 * j);
    }
}

template <Form FORM, class T, class Out>
DEVICE void gemm_bf16(const Gemm &p) {
    constexpr int MI = T::WM / 16, NI = T::WN / 8, WARPS_N = T::BN / T::WN;
    SHARED(shared);
    bf16 *tiles = (bf16 *)shared;
    TilePlace place = tile_place(p.m, p.n, T::BM, T::BN);
    int warp = threadIdx.x / 32, warp_m = warp / WARPS_N * T::WM, warp_n = warp % WARPS_N * T::WN;
    uint32_t k_begin = blockIdx.z * p.k_of_part;
    uint32_t k_end = p.k - k_begin < p.k_of_part ? p.k : k_begin + p.k_of_part;
    uint32_t steps = (k_end - k_begin + T::BK - 1) / T::BK, all = steps + (p.k2 + T::BK - 1) / T::BK;
    float sums[MI][NI][4];
    for (int i = 0; i < MI; i++) {
        for (int j = 0; j < NI; j++) {
            for (int e = 0; e < 4; e++) sums[i][j][e] = 0.0f;
        }
    }
    Operand<T::BM, T::BK, FORM == TN, T::THREADS> a;
    Operand<T::BN, T::BK, FORM != NT, T::THREADS> b;
    auto fetch = [&](uint32_t step) {
        bool second = step >= steps;
        uint32_t k0 = second ? (step - steps) * T::BK : k_begin + step * T::BK, k = second ? p.k2 : k_end;
        if (step == 0 || step == steps) {
            a.begin(second ? p.a2 : p.a, second ? p.a2_stride : p.a_stride, place.m0, p.m, k0,
                    p.aligned >> (second ? 2 : 0) & 1);
            b.begin(second ? p.b2 : p.b, second ? p.b2_stride : p.b_stride, place.n0, p.n, k0,
                    p.aligned >> (second ? 3 : 1) & 1);
        }
        bf16 *tile = tiles + step % T::STAGES * T::STAGE;
        a.fetch(tile, k0, k);
        b.fetch(tile + T::BM * T::BK, k0, k);
    };
    _Pragma("unroll 1")
    for (uint32_t step = 0; step < T::STAGES - 1; step++) {
        if (step < all) fetch(step);
        cp_async_commit();
    }
    _Pragma("unroll 1")
    for (uint32_t step = 0; step < all; step++) {
        cp_async_wait<T::STAGES - 2>();
        __syncthreads();
        if (step + T::STAGES - 1 < all) fetch(step + T::STAGES - 1);
        cp_async_commit();
        const bf16 *a_tile = tiles + step % T::STAGES * T::STAGE, *b_tile = a_tile + T::BM * T::BK;
        uint32_t left = step < steps ? k_end - k_begin - step * T::BK : p.k2 - (step - steps) * T::BK;
        // Stop at the last value of k, so that the number of steps does not depend on the tile.
        if (left >= T::BK) {
            _Pragma("unroll")
            for (int k = 0; k < T::BK; k += 16) multiply<FORM, T>(sums, a_tile, b_tile, warp_m, warp_n, k);
        } else {
            _Pragma("unroll 1")
            for (int k = 0; k < (int)left; k += 16) multiply<FORM, T>(sums, a_tile, b_tile, warp_m, warp_n, k);
        }
    }
    // Write the result through shared memory, sixteen rows at a time, so that a warp writes whole lines.
    constexpr int LINE = T::WN + 8;
    cp_async_wait<0>();
    __syncthreads();
    float *slab = (float *)shared + warp * 16 * LINE;
    uint32_t lane = lane_id();
    _Pragma("unroll")
    for (int i = 0; i < MI; i++) {
        _Pragma("unroll")
        for (int j = 0; j < NI; j++) {
            _Pragma("unroll")
            for (int e = 0; e < 4; e++) {
                slab[(lane / 4 + e / 2 * 8) * LINE + 8 * j + lane % 4 * 2 + e % 2] = sums[i][j][e];
            }
        }
        __syncwarp();
        _Pragma("unroll 1")
        for (uint32_t index = lane; index < 16 * T::WN / 4; index += WARP) {
            uint32_t row = index / (T::WN / 4), column = index % (T::WN / 4) * 4;
            float values[4];
            load4(slab + row * LINE + column, values);
            store_sums<Out>(p, place.m0 + warp_m + 16 * i + row, place.n0 + warp_n + column, values);
        }
        __syncwarp();
    }
}

typedef Tile<16, 32, 64, 16, 8, 6> SmallTile;
typedef Tile<64, 64, 32, 32, 32, 4> MiddleTile;
typedef Tile<128, 128, 32, 64, 64, 3> LargeTile;

#define GEMM_BF16(name, FORM, OUT)                                                                                       \
    KERNEL_BOUNDS(name##_small, Gemm, 128, 4) { gemm_bf16<FORM, SmallTile, OUT>(p); }                                                   \
    KERNEL_BOUNDS(name##_middle, Gemm, 128, 4) { gemm_bf16<FORM, MiddleTile, OUT>(p); }                                                 \
    KERNEL_BOUNDS(name##_large, Gemm, 128, 2) { gemm_bf16<FORM, LargeTile, OUT>(p); }

GEMM_BF16(gemm_nt_bf16_f32, NT, float)
GEMM_BF16(gemm_nt_bf16_bf16, NT, bf16)
GEMM_BF16(gemm_nn_bf16_f32, NN, float)
GEMM_BF16(gemm_nn_bf16_bf16, NN, bf16)
GEMM_BF16(gemm_tn_bf16_f32, TN, float)

// Variant for few columns, a · bᵀ only: step j of 16 values belongs to chain j mod 8, with a warp for each chain. Eight
// short chains, added in order, replace a long one. The chains depend only on k.
template <int BM, int STAGES> struct ThinTile {
    static constexpr int CHAINS = 8, BN = 32, BK = 16 * CHAINS, THREADS = 32 * CHAINS, STAGE = (BM + BN) * BK;
};

template <int BM, int STAGES, class Out> DEVICE void gemm_thin(const Gemm &p) {
    using T = ThinTile<BM, STAGES>;
    constexpr int MI = BM / 16, NI = T::BN / 8, LINE = T::BN + 8;
    SHARED(shared);
    bf16 *tiles = (bf16 *)shared;
    TilePlace place = tile_place(p.m, p.n, BM, T::BN);
    uint32_t lane = lane_id(), chain = warp_id(), steps = (p.k + T::BK - 1) / T::BK;
    float sums[MI][NI][4];
    for (int i = 0; i < MI; i++) {
        for (int j = 0; j < NI; j++) {
            for (int e = 0; e < 4; e++) sums[i][j][e] = 0.0f;
        }
    }
    Operand<BM, T::BK, false, T::THREADS> a;
    Operand<T::BN, T::BK, false, T::THREADS> b;
    a.begin(p.a, p.a_stride, place.m0, p.m, 0, p.aligned & 1);
    b.begin(p.b, p.b_stride, place.n0, p.n, 0, p.aligned & 2);
    auto fetch = [&](uint32_t step) {
        bf16 *tile = tiles + step % STAGES * T::STAGE;
        a.fetch(tile, step * T::BK, p.k);
        b.fetch(tile + BM * T::BK, step * T::BK, p.k);
    };
    _Pragma("unroll 1")
    for (uint32_t step = 0; step < STAGES - 1; step++) {
        if (step < steps) fetch(step);
        cp_async_commit();
    }
    _Pragma("unroll 1")
    for (uint32_t step = 0; step < steps; step++) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        if (step + STAGES - 1 < steps) fetch(step + STAGES - 1);
        cp_async_commit();
        if (step * T::BK + 16 * chain < p.k) {
            const bf16 *a_tile = tiles + step % STAGES * T::STAGE, *b_tile = a_tile + BM * T::BK;
            uint32_t left[4], right[2 * NI];
            _Pragma("unroll")
            for (int j = 0; j < NI; j += 2) {
                int line = 8 * j + (lane & 7) + 8 * (lane >> 4), at = 2 * chain + (lane >> 3 & 1);
                ldmatrix_x4(right + 2 * j, b_tile + chunk_place<T::BK / 8>(line, at));
            }
            _Pragma("unroll")
            for (int i = 0; i < MI; i++) {
                ldmatrix_x4(left, a_tile + chunk_place<T::BK / 8>(16 * i + (lane & 15), 2 * chain + (lane >> 4)));
                _Pragma("unroll")
                for (int j = 0; j < NI; j++) mma_m16n8k16_bf16(sums[i][j], left, right + 2 * j);
            }
        }
    }
    cp_async_wait<0>();
    // Add the chains of sixteen rows at a time: [chain][row][column].
    float *slabs = (float *)shared, *slab = slabs + chain * 16 * LINE;
    _Pragma("unroll")
    for (int i = 0; i < MI; i++) {
        __syncthreads();
        _Pragma("unroll")
        for (int j = 0; j < NI; j++) {
            _Pragma("unroll")
            for (int e = 0; e < 4; e++) {
                slab[(lane / 4 + e / 2 * 8) * LINE + 8 * j + lane % 4 * 2 + e % 2] = sums[i][j][e];
            }
        }
        __syncthreads();
        if (threadIdx.x < 16 * T::BN / 4) {
            uint32_t row = threadIdx.x / (T::BN / 4), column = threadIdx.x % (T::BN / 4) * 4;
            float all[4], more[4];
            load4(slabs + row * LINE + column, all);
            for (int other = 1; other < T::CHAINS; other++) {
                load4(slabs + (other * 16 + row) * LINE + column, more);
                for (int e = 0; e < 4; e++) all[e] += more[e];
            }
            store_sums<Out>(p, place.m0 + 16 * i + row, place.n0 + column, all);
        }
    }
}

KERNEL_BOUNDS(gemm_nt_bf16_f32_thin, Gemm, 256, 2) { gemm_thin<16, 4, float>(p); }
KERNEL_BOUNDS(gemm_nt_bf16_bf16_thin, Gemm, 256, 2) { gemm_thin<16, 4, bf16>(p); }
KERNEL_BOUNDS(gemm_nt_bf16_f32_thin_tall, Gemm, 256, 2) { gemm_thin<64, 2, float>(p); }
KERNEL_BOUNDS(gemm_nt_bf16_bf16_thin_tall, Gemm, 256, 2) { gemm_thin<64, 2, bf16>(p); }

// ----------------------------------------------------------------------------------------------------------- f32

// A thread block's tile, and a thread's part of it.
template <int M, int N, int THREAD_M, int THREAD_N>
struct FloatTile {
    static constexpr int BM = M, BN = N, BK = 16, TM = THREAD_M, TN_ = THREAD_N;
    static constexpr int THREADS = (M / THREAD_M) * (N / THREAD_N);
    // Lines are padded by four floats, so that adjacent k values are in different banks.
    static constexpr int A_LINE = M + 4, B_LINE = N + 4;
    static constexpr int A_EACH = M * BK / THREADS, B_EACH = N * BK / THREADS;
};

// Reads a thread's share of WIDTH × BK values along the lines; `across`: lines run over k.
template <int WIDTH, int BK, int EACH, int THREADS>
DEVICE void read_share(float share[EACH], const float *from, uint32_t stride, bool across, uint32_t first,
                       uint32_t count, uint32_t k0, uint32_t k) {
    _Pragma("unroll")
    for (int i = 0; i < EACH; i++) {
        int index = threadIdx.x + i * THREADS;
        uint32_t at = first + (across ? index % WIDTH : index / BK), at_k = k0 + (across ? index / WIDTH : index % BK);
        size_t place = across ? (size_t)at_k * stride + at : (size_t)at * stride + at_k;
        share[i] = at < count && at_k < k ? from[place] : 0.0f;
    }
}

// Writes to shared memory as [k][width].
template <int WIDTH, int BK, int LINE, int EACH, int THREADS>
DEVICE void write_share(float *tile, const float share[EACH], bool across) {
    _Pragma("unroll")
    for (int i = 0; i < EACH; i++) {
        int index = threadIdx.x + i * THREADS;
        int at = across ? index % WIDTH : index / BK, k = across ? index / WIDTH : index % BK;
        tile[k * LINE + at] = share[i];
    }
}

template <Form FORM, class T>
DEVICE void gemm_f32(const Gemm &p) {
    SHARED_ARRAY(float, a_tiles, 2 * T::BK * T::A_LINE);
    SHARED_ARRAY(float, b_tiles, 2 * T::BK * T::B_LINE);
    TilePlace place = tile_place(p.m, p.n, T::BM, T::BN);
    uint32_t k_begin = blockIdx.z * p.k_of_part;
    uint32_t k_end = p.k - k_begin < p.k_of_part ? p.k : k_begin + p.k_of_part;
    uint32_t steps = (k_end - k_begin + T::BK - 1) / T::BK, all = steps + (p.k2 + T::BK - 1) / T::BK;
    int row0 = threadIdx.x / (T::BN / T::TN_) * T::TM, column0 = threadIdx.x % (T::BN / T::TN_) * T::TN_;
    float sums[T::TM][T::TN_];
    _Pragma("unroll")
    for (int i = 0; i < T::TM; i++) {
        _Pragma("unroll")
        for (int j = 0; j < T::TN_; j++) sums[i][j] = 0.0f;
    }
    float a_share[T::A_EACH], b_share[T::B_EACH];
    for (uint32_t step = 0; step <= all; step++) {
        // Read a step's values while the previous step is summed.
        if (step < all) {
            bool second = step >= steps;
            uint32_t k0 = second ? (step - steps) * T::BK : k_begin + step * T::BK, k = second ? p.k2 : k_end;
            const float *a = (const float *)(second ? p.a2 : p.a), *b = (const float *)(second ? p.b2 : p.b);
            read_share<T::BM, T::BK, T::A_EACH, T::THREADS>(a_share, a, second ? p.a2_stride : p.a_stride, FORM == TN,
                                                            place.m0, p.m, k0, k);
            read_share<T::BN, T::BK, T::B_EACH, T::THREADS>(b_share, b, second ? p.b2_stride : p.b_stride, FORM != NT,
                                                            place.n0, p.n, k0, k);
        }
        if (step > 0) {
            const float *a_tile = a_tiles + (step - 1) % 2 * T::BK * T::A_LINE;
            const float *b_tile = b_tiles + (step - 1) % 2 * T::BK * T::B_LINE;
            _Pragma("unroll 4")
            for (int k = 0; k < T::BK; k++) {
                float a[T::TM], b[T::TN_];
                _Pragma("unroll")
                for (int i = 0; i < T::TM; i++) a[i] = a_tile[k * T::A_LINE + row0 + i];
                _Pragma("unroll")
                for (int j = 0; j < T::TN_; j++) b[j] = b_tile[k * T::B_LINE + column0 + j];
                _Pragma("unroll")
                for (int i = 0; i < T::TM; i++) {
                    _Pragma("unroll")
                    for (int j = 0; j < T::TN_; j++) sums[i][j] = fmaf(a[i], b[j], sums[i][j]);
                }
            }
        }
        if (step < all) {
            write_share<T::BM, T::BK, T::A_LINE, T::A_EACH, T::THREADS>(a_tiles + step % 2 * T::BK * T::A_LINE, a_share,
                                                                        FORM == TN);
            write_share<T::BN, T::BK, T::B_LINE, T::B_EACH, T::THREADS>(b_tiles + step % 2 * T::BK * T::B_LINE, b_share,
                                                                        FORM != NT);
        }
        __syncthreads();
    }
    _Pragma("unroll")
    for (int i = 0; i < T::TM; i++) {
        _Pragma("unroll")
        for (int j = 0; j < T::TN_; j += 4) store_sums<float>(p, place.m0 + row0 + i, place.n0 + column0 + j, sums[i] + j);
    }
}

typedef FloatTile<16, 32, 2, 4> SmallFloatTile;
typedef FloatTile<64, 64, 4, 4> MiddleFloatTile;
typedef FloatTile<128, 128, 8, 8> LargeFloatTile;

#define GEMM_F32(name, FORM)                                                                                             \
    KERNEL_BOUNDS(name##_small, Gemm, 64, 4) { gemm_f32<FORM, SmallFloatTile>(p); }                                                    \
    KERNEL_BOUNDS(name##_middle, Gemm, 256, 2) { gemm_f32<FORM, MiddleFloatTile>(p); }                                                  \
    KERNEL_BOUNDS(name##_large, Gemm, 256, 2) { gemm_f32<FORM, LargeFloatTile>(p); }

GEMM_F32(gemm_nt_f32_f32, NT)
GEMM_F32(gemm_nn_f32_f32, NN)
GEMM_F32(gemm_tn_f32_f32, TN)
