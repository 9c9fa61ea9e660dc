// The computation of one warp for 16 queries and a block of 64 keys. The forward passes of training and of decode use
// only this code, so that a query gets the same bits in both.
//
// A block yields for each query m = its largest score (in units of log 2), l = sum of p = 2^(score - m) and o = sum of
// p v. A fold of (m, l, o) processes one block after another. A block in which a query attends to nothing leaves the
// bits of the fold unchanged, and folding a block into an empty fold gives the block's own (m, l, o). So masked blocks
// may be skipped, and blocks may be computed elsewhere and folded later.
//
// bf16: scores and sums by mma (chains over the head's width and over the keys, in steps of 16), p rounded to bf16, l
// by mma with ones. f32: chains over the width and over the keys, l per lane.
#pragma once
#include "prelude.cuh"

#define KEYS 64u
#define QUERIES 16u

// 2^x; 0 if the result would be subnormal.
DEVICE float exp2_of(float x) {
#ifdef RLOOD_EMULATOR
    float y = exp2f(x);
    return y < 1.17549435e-38f ? 0.0f : y;
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

// The keys and values of a sequence: packed rows, or pages of 64 positions.
template <typename T> struct Segment {
    const T* k;            // address of position 0 if packed
    const T* v;
    const uint64_t* pages; // addresses of the pages, else null
    uint64_t at;           // offset in a page of the keys of a layer and a head; the values follow
    uint32_t stride;       // distance between positions, in values
    uint32_t len;          // number of positions
    uint32_t dim;          // width of a head
    uint32_t vector;       // rows are aligned to 16 bytes
};

template <typename T> DEVICE const T* keys_of(const Segment<T>& s, uint32_t block) {
    if (s.pages) return reinterpret_cast<const T*>(s.pages[block] + s.at);
    return s.k + uint64_t(block) * KEYS * s.stride;
}
template <typename T> DEVICE const T* values_of(const Segment<T>& s, uint32_t block) {
    if (s.pages) return reinterpret_cast<const T*>(s.pages[block] + s.at) + KEYS * s.dim;
    return s.v + uint64_t(block) * KEYS * s.stride;
}
template <typename T> DEVICE uint32_t positions_of(const Segment<T>& s, uint32_t block) {
    uint32_t left = s.len - block * KEYS;
    return left < KEYS ? left : KEYS;
}

// The positions of a segment (prompt or completion) that a query attends to: from lo, before hi.
struct Seen {
    int32_t lo, hi;
};

// The empty range of a row without a query.
DEVICE Seen seen_by_none() {
    Seen none = {0x7fffffff, 0};
    return none;
}

// Whether the query attends to any of the keys from `base` on; and whether there is a query and it does not attend to
// all of these keys.
DEVICE bool sees_some(Seen seen, int32_t base) {
    return seen.lo < seen.hi && seen.hi > base && seen.lo < base + int32_t(KEYS);
}
DEVICE bool misses_some(Seen seen, int32_t base) {
    return seen.lo != seen_by_none().lo && (seen.lo > base || seen.hi < base + int32_t(KEYS));
}

// The positions that a token at `index` of its own segment attends to, in the preceding prompt and in its own segment.
DEVICE Seen seen_of_prompt(uint32_t prompt_len, uint32_t index, uint32_t window) {
    int64_t first = int64_t(prompt_len) + index + 1 - window;
    int32_t lo = first > 0 ? int32_t(first) : 0;
    Seen seen = {lo, int32_t(prompt_len)};
    return seen;
}
DEVICE Seen seen_of_own(uint32_t index, uint32_t window) {
    int64_t first = int64_t(index) + 1 - window;
    Seen seen = {first > 0 ? int32_t(first) : 0, int32_t(index) + 1};
    return seen;
}

// The weights of the previous fold and of the next block of keys in the new fold.
struct Shares {
    float before, now;
};
DEVICE Shares fold_max(float& m, float block) {
    float largest = fmaxf(m, block);
    Shares shares;
    shares.before = m == -INFINITY ? 0.0f : exp2_of(m - largest);
    shares.now = block == -INFINITY ? 0.0f : exp2_of(block - largest);
    m = largest;
    return shares;
}
DEVICE float folded(float before, float now, Shares shares) { return fmaf(before, shares.before, now * shares.now); }

// Rows of a tile in shared memory, padded so that ldmatrix accesses each bank once.
#define TILE_STRIDE(DIM) ((DIM) + 8)

// Copies `rows` rows to a tile of ROWS, with a block of THREADS; zeros after them and after the head's width. Each
// thread copies one column. The copies belong to the group that is committed next.
template <int DIM, int ROWS, int THREADS>
DEVICE void load_tile(bf16* tile, const bf16* from, uint64_t stride, uint32_t rows, uint32_t dim, uint32_t vector) {
    constexpr uint32_t STEP = THREADS / (DIM / 8);
    static_assert(STEP > 0 && ROWS % STEP == 0, "a block copies whole rows");
    uint32_t row = threadIdx.x / (DIM / 8), column = threadIdx.x % (DIM / 8) * 8;
    bf16* to = tile + row * TILE_STRIDE(DIM) + column;
    if (vector) {
        // The number of rows left. A copy beyond them uses the address of the last row but reads nothing.
        int left = column < dim ? int(rows) - int(row) : 0;
        const bf16* at = left > 0 ? from + row * stride + column : from;
#pragma unroll 8
        for (int i = 0; i < ROWS; i += int(STEP)) {
            cp_async16(to + i * TILE_STRIDE(DIM), at, left > i);
            if (left > i + int(STEP)) at += STEP * stride;
        }
    } else {
        const bf16* at = from + row * stride + column;
#pragma unroll 1
        for (; row < ROWS; row += STEP, at += STEP * stride, to += STEP * TILE_STRIDE(DIM)) {
            for (uint32_t e = 0; e < 8; e++) {
                bf16 zero = {0};
                to[e] = row < rows && column + e < dim ? at[e] : zero;
            }
        }
    }
}

// Copies a tile of queries in the same way; `Row` returns a pointer to each row, or null. `base` is any valid row.
template <int DIM, int ROWS, int THREADS, typename Row>
DEVICE void gather_tile(bf16* tile, const bf16* base, const Row& row_at, uint32_t dim, uint32_t vector) {
    constexpr uint32_t STEP = THREADS / (DIM / 8);
    uint32_t column = threadIdx.x % (DIM / 8) * 8;
    for (uint32_t row = threadIdx.x / (DIM / 8); row < ROWS; row += STEP) {
        const bf16* from = row_at(row);
        bool valid = from && column < dim;
        bf16* to = tile + row * TILE_STRIDE(DIM) + column;
        if (vector) {
            cp_async16(to, valid ? from + column : base, valid);
        } else {
            for (uint32_t e = 0; e < 8; e++) {
                bf16 zero = {0};
                to[e] = valid && column + e < dim ? from[column + e] : zero;
            }
        }
    }
}

// Two adjacent values of a row from an even column on, read as one word if the row is aligned.
DEVICE bool has_words(const bf16* row, uint32_t dim) {
    return dim % 2 == 0 && reinterpret_cast<uintptr_t>(row) % 4 == 0;
}
DEVICE void store_pair(bf16* row, uint32_t column, uint32_t dim, bool words, float first, float second) {
    if (words) {
        if (column < dim) store_word(row + column, pack_bf16(first, second));
    } else {
        if (column < dim) row[column] = to_bf16(first);
        if (column + 1 < dim) row[column + 1] = to_bf16(second);
    }
}

// Loads operand a: rows 16 x k 16 of a tile, from `column` on.
template <int DIM> DEVICE void load_a(uint32_t a[4], const bf16* rows, uint32_t column) {
    uint32_t lane = lane_id();
    ldmatrix_x4(a, rows + lane % 16 * TILE_STRIDE(DIM) + column + lane / 16 * 8);
}
// Loads operand b of two products: 8 rows of a tile each as n, k 16 from `column` on.
template <int DIM> DEVICE void load_b(uint32_t b[4], const bf16* rows, uint32_t column) {
    uint32_t lane = lane_id();
    ldmatrix_x4(b, rows + (lane / 16 * 8 + lane % 8) * TILE_STRIDE(DIM) + column + lane / 8 % 2 * 8);
}
// Loads operand b of two products: 8 columns of a tile each as n, 16 rows as k.
template <int DIM> DEVICE void load_b_trans(uint32_t b[4], const bf16* rows, uint32_t column) {
    uint32_t lane = lane_id();
    ldmatrix_x4_trans(b, rows + lane % 16 * TILE_STRIDE(DIM) + column + lane / 16 * 8);
}

// The fold of a warp's 16 queries. A bf16 lane holds queries g = lane / 4 and g + 8, and two of each 8 columns.
template <typename T, int DIM> struct Fold;

template <int DIM> struct Fold<bf16, DIM> {
    float m[2], l[2];
    float o[DIM / 8][4];

    DEVICE_SPECIAL void clear() {
        for (int e = 0; e < 2; e++) m[e] = -INFINITY, l[e] = 0.0f;
#pragma unroll
        for (int c = 0; c < DIM / 8; c++)
            for (int e = 0; e < 4; e++) o[c][e] = 0.0f;
    }

    // Folds blocks first to end of a segment, in order. `q` is the warp's rows of the tile of queries. `tiles` has room
    // for a block's keys and values, which the block's THREADS load together. All threads of the block must call this
    // with the same segment. `seen` refers to queries g and g + 8.
    template <int THREADS>
    DEVICE_SPECIAL void run(const bf16* q, bf16* tiles, const Segment<bf16>& segment, uint32_t first, uint32_t end,
                           const Seen seen[2], float scale) {
        if (first >= end) return;
        bf16* keys = tiles;
        bf16* values = tiles + KEYS * TILE_STRIDE(DIM);
        auto load = [&](bf16* tile, const bf16* from, uint32_t block) {
            load_tile<DIM, KEYS, THREADS>(tile, from, segment.stride, positions_of(segment, block), segment.dim,
                                          segment.vector);
        };
        __syncthreads();
        load(keys, keys_of(segment, first), first);
        cp_async_commit();
        load(values, values_of(segment, first), first);
        cp_async_commit();
        for (uint32_t block = first; block < end; block++) {
            int32_t base = int32_t(block * KEYS);
            bool sees = __any_sync(FULL, sees_some(seen[0], base) || sees_some(seen[1], base));
            bool more = block + 1 < end;
            float s[KEYS / 8][4];
            float largest[2];
            cp_async_wait<1>();
            __syncthreads();
            if (sees) {
                scores(s, q, keys);
            }
            __syncthreads();
            if (more) load(keys, keys_of(segment, block + 1), block + 1);
            cp_async_commit();
            uint32_t p[KEYS / 16][4];
            if (sees) {
                if (__any_sync(FULL, misses_some(seen[0], base) || misses_some(seen[1], base))) mask(s, base, seen);
                soften(s, scale, largest, p);
            }
            cp_async_wait<1>();
            __syncthreads();
            if (sees) {
                weigh(p, largest, values);
            }
            __syncthreads();
            if (more) load(values, values_of(segment, block + 1), block + 1);
            cp_async_commit();
        }
        cp_async_wait<0>();
    }

    DEVICE_SPECIAL static void scores(float s[KEYS / 8][4], const bf16* q, const bf16* keys) {
#pragma unroll
        for (int n = 0; n < int(KEYS / 8); n++)
            for (int e = 0; e < 4; e++) s[n][e] = 0.0f;
// Wide heads use few steps per iteration; otherwise the loads would take the registers that hold the sums.
#pragma unroll (DIM > 128 ? 2 : DIM / 16)
        for (int k = 0; k < DIM; k += 16) {
            uint32_t a[4];
            load_a<DIM>(a, q, k);
#pragma unroll
            for (int n = 0; n < int(KEYS / 16); n++) {
                uint32_t b[4];
                load_b<DIM>(b, keys + n * 16 * TILE_STRIDE(DIM), k);
                mma_m16n8k16_bf16(s[2 * n], a, b);
                mma_m16n8k16_bf16(s[2 * n + 1], a, b + 2);
            }
        }
    }

    // Masks the scores of keys that a query does not attend to.
    DEVICE_SPECIAL static void mask(float s[KEYS / 8][4], int32_t base, const Seen seen[2]) {
        int32_t column = base + int32_t(lane_id() % 4 * 2);
#pragma unroll
        for (int n = 0; n < int(KEYS / 8); n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int32_t position = column + n * 8 + e % 2;
                if (position < seen[e / 2].lo || position >= seen[e / 2].hi) s[n][e] = -INFINITY;
            }
        }
    }

    // Converts scores to p in bf16, as the left operand of the next product.
    DEVICE_SPECIAL static void soften(const float s[KEYS / 8][4], float scale, float largest[2],
                                     uint32_t p[KEYS / 16][4]) {
        largest[0] = largest[1] = -INFINITY;
#pragma unroll
        for (int n = 0; n < int(KEYS / 8); n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) largest[e / 2] = fmaxf(largest[e / 2], s[n][e]);
        }
#pragma unroll
        for (int e = 0; e < 2; e++) {
            largest[e] = fmaxf(largest[e], __shfl_xor_sync(FULL, largest[e], 1));
            largest[e] = fmaxf(largest[e], __shfl_xor_sync(FULL, largest[e], 2));
            largest[e] = largest[e] * scale;
        }
        float shift[2] = {largest[0] == -INFINITY ? 0.0f : -largest[0], largest[1] == -INFINITY ? 0.0f : -largest[1]};
#pragma unroll
        for (int n = 0; n < int(KEYS / 8); n++) {
            float e0 = exp2_of(fmaf(s[n][0], scale, shift[0])), e1 = exp2_of(fmaf(s[n][1], scale, shift[0]));
            float e2 = exp2_of(fmaf(s[n][2], scale, shift[1])), e3 = exp2_of(fmaf(s[n][3], scale, shift[1]));
            p[n / 2][n % 2 * 2] = pack_bf16(e0, e1);
            p[n / 2][n % 2 * 2 + 1] = pack_bf16(e2, e3);
        }
    }

    DEVICE_SPECIAL void weigh(const uint32_t p[KEYS / 16][4], const float largest[2], const bf16* values) {
        const uint32_t ones[2] = {0x3f803f80u, 0x3f803f80u};
        float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int k = 0; k < int(KEYS / 16); k++) mma_m16n8k16_bf16(sums, p[k], ones);
        Shares shares[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
            shares[e] = fold_max(m[e], largest[e]);
            l[e] = folded(l[e], sums[2 * e], shares[e]);
        }
#pragma unroll
        for (int n = 0; n < DIM / 16; n++) {
            float now[2][4] = {{0.0f, 0.0f, 0.0f, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};
#pragma unroll
            for (int k = 0; k < int(KEYS / 16); k++) {
                uint32_t b[4];
                load_b_trans<DIM>(b, values + k * 16 * TILE_STRIDE(DIM), n * 16);
                mma_m16n8k16_bf16(now[0], p[k], b);
                mma_m16n8k16_bf16(now[1], p[k], b + 2);
            }
#pragma unroll
            for (int e = 0; e < 4; e++) {
                o[2 * n][e] = folded(o[2 * n][e], now[0][e], shares[e / 2]);
                o[2 * n + 1][e] = folded(o[2 * n + 1][e], now[1][e], shares[e / 2]);
            }
        }
    }

    // Adds `count` folds of `rows` queries, in order: m and l interleaved in `ml`, o `[rows][DIM]`, the
    // folds `step` rows apart.
    DEVICE_SPECIAL void take(const float* ml, const float* from, uint32_t rows, uint32_t count, uint64_t step) {
        uint32_t g = lane_id() / 4, column = lane_id() % 4 * 2;
        for (uint32_t i = 0; i < count; i++, ml += 2 * step, from += step * DIM) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                uint32_t row = g + 8 * e;
                if (row >= rows) continue;
                Shares shares = fold_max(m[e], ml[2 * row]);
                l[e] = folded(l[e], ml[2 * row + 1], shares);
#pragma unroll
                for (int c = 0; c < DIM / 8; c++) {
                    Words2 now = load_words2(from + row * DIM + c * 8 + column);
                    o[c][2 * e] = folded(o[c][2 * e], __uint_as_float(now.at[0]), shares);
                    o[c][2 * e + 1] = folded(o[c][2 * e + 1], __uint_as_float(now.at[1]), shares);
                }
            }
        }
    }
    // Stores the fold of `rows` queries to memory.
    DEVICE_SPECIAL void put(float* ml, float* to, uint32_t rows) const {
        uint32_t g = lane_id() / 4, column = lane_id() % 4 * 2;
#pragma unroll
        for (int e = 0; e < 2; e++) {
            uint32_t row = g + 8 * e;
            if (row >= rows) continue;
            if (lane_id() % 4 == 0) ml[2 * row] = m[e], ml[2 * row + 1] = l[e];
#pragma unroll
            for (int c = 0; c < DIM / 8; c++) {
                Words2 now = {{__float_as_uint(o[c][2 * e]), __float_as_uint(o[c][2 * e + 1])}};
                store_words2(to + row * DIM + c * 8 + column, now);
            }
        }
    }

    // Writes o / l to the rows that `row_at` returns (null: skipped), and log2 of the sum of 2^score
    // to those of `lse_at`.
    template <typename Row, typename Lse>
    DEVICE_SPECIAL void finish(const Row& row_at, const Lse& lse_at, uint32_t dim) const {
        uint32_t g = lane_id() / 4, column = lane_id() % 4 * 2;
#pragma unroll
        for (int e = 0; e < 2; e++) {
            bf16* to = row_at(g + 8 * e);
            if (!to) continue;
            float* lse = lse_at(g + 8 * e);
            if (lse && lane_id() % 4 == 0) *lse = m[e] + log2f(l[e]);
            float inverse = 1.0f / l[e];
            bool words = has_words(to, dim);
#pragma unroll
            for (int c = 0; c < DIM / 8; c++) {
                store_pair(to, c * 8 + column, dim, words, o[c][2 * e] * inverse, o[c][2 * e + 1] * inverse);
            }
        }
    }
};

// A f32 lane holds, for all 16 queries, the columns lane, lane + 32 and so on; keys and values are read in place.
template <int DIM> struct Fold<float, DIM> {
    float m[QUERIES], l[QUERIES];
    float o[QUERIES][DIM / 32];

    DEVICE_SPECIAL void clear() {
#pragma unroll
        for (int r = 0; r < int(QUERIES); r++) {
            m[r] = -INFINITY, l[r] = 0.0f;
            for (int c = 0; c < DIM / 32; c++) o[r][c] = 0.0f;
        }
    }

    // `q` is the warp's `[16][DIM]` in shared memory, with zeros after the head's width; `seen` refers
    // to all 16 queries.
    DEVICE_SPECIAL void run(const float* q, const Segment<float>& segment, uint32_t first, uint32_t end,
                           const Seen seen[QUERIES], float scale) {
        uint32_t lane = lane_id();
        for (uint32_t block = first; block < end; block++) {
            const float* keys = keys_of(segment, block);
            const float* values = values_of(segment, block);
            uint32_t count = positions_of(segment, block);
            int32_t base = int32_t(block * KEYS);
#pragma unroll
            for (int quad = 0; quad < int(QUERIES); quad += 4) {
                bool sees = false;
                for (int r = 0; r < 4; r++) sees = sees || sees_some(seen[quad + r], base);
                if (!sees) continue;
                float p[4][2];
                float largest[4];
                for (int half = 0; half < 2; half++) {
                    uint32_t key = half * 32 + lane;
                    float s[4] = {0.0f, 0.0f, 0.0f, 0.0f};
                    if (key < count) {
                        const float* of = keys + uint64_t(key) * segment.stride;
                        for (uint32_t d = 0; d < segment.dim; d++) {
                            float k = of[d];
                            for (int r = 0; r < 4; r++) s[r] = fmaf(q[(quad + r) * DIM + d], k, s[r]);
                        }
                    }
                    for (int r = 0; r < 4; r++) {
                        int32_t position = base + int32_t(key);
                        bool visible = position >= seen[quad + r].lo && position < seen[quad + r].hi;
                        p[r][half] = visible ? s[r] : -INFINITY;
                    }
                }
                for (int r = 0; r < 4; r++) {
                    largest[r] = warp_max(fmaxf(p[r][0], p[r][1])) * scale;
                    float shift = largest[r] == -INFINITY ? 0.0f : -largest[r];
                    for (int half = 0; half < 2; half++) p[r][half] = exp2_of(fmaf(p[r][half], scale, shift));
                }
                float now[4][DIM / 32];
                for (int r = 0; r < 4; r++)
                    for (int c = 0; c < DIM / 32; c++) now[r][c] = 0.0f;
                for (uint32_t key = 0; key < count; key++) {
                    float weight[4];
                    for (int r = 0; r < 4; r++) {
                        weight[r] = __shfl_sync(FULL, key < 32 ? p[r][0] : p[r][1], int(key % 32));
                    }
#pragma unroll
                    for (int c = 0; c < DIM / 32; c++) {
                        uint32_t d = c * 32 + lane;
                        float v = d < segment.dim ? values[uint64_t(key) * segment.stride + d] : 0.0f;
                        for (int r = 0; r < 4; r++) now[r][c] = fmaf(weight[r], v, now[r][c]);
                    }
                }
                for (int r = 0; r < 4; r++) {
                    float sum = warp_sum(p[r][0] + p[r][1]);
                    Shares shares = fold_max(m[quad + r], largest[r]);
                    l[quad + r] = folded(l[quad + r], sum, shares);
                    for (int c = 0; c < DIM / 32; c++) o[quad + r][c] = folded(o[quad + r][c], now[r][c], shares);
                }
            }
        }
    }

    DEVICE_SPECIAL void take(const float* ml, const float* from, uint32_t rows, uint32_t count, uint64_t step) {
        for (uint32_t i = 0; i < count; i++, ml += 2 * step, from += step * DIM) {
#pragma unroll
            for (int r = 0; r < int(QUERIES); r++) {
                if (uint32_t(r) >= rows) continue;
                Shares shares = fold_max(m[r], ml[2 * r]);
                l[r] = folded(l[r], ml[2 * r + 1], shares);
                for (int c = 0; c < DIM / 32; c++) {
                    o[r][c] = folded(o[r][c], from[r * DIM + c * 32 + lane_id()], shares);
                }
            }
        }
    }
    DEVICE_SPECIAL void put(float* ml, float* to, uint32_t rows) const {
#pragma unroll
        for (int r = 0; r < int(QUERIES); r++) {
            if (uint32_t(r) >= rows) continue;
            if (lane_id() == 0) ml[2 * r] = m[r], ml[2 * r + 1] = l[r];
            for (int c = 0; c < DIM / 32; c++) to[r * DIM + c * 32 + lane_id()] = o[r][c];
        }
    }

    template <typename Row, typename Lse>
    DEVICE_SPECIAL void finish(const Row& row_at, const Lse& lse_at, uint32_t dim) const {
#pragma unroll
        for (int r = 0; r < int(QUERIES); r++) {
            float* to = row_at(uint32_t(r));
            if (!to) continue;
            float* lse = lse_at(uint32_t(r));
            if (lse && lane_id() == 0) *lse = m[r] + log2f(l[r]);
            float inverse = 1.0f / l[r];
            for (int c = 0; c < DIM / 32; c++) {
                uint32_t d = c * 32 + lane_id();
                if (d < dim) to[d] = o[r][c] * inverse;
            }
        }
    }
};
