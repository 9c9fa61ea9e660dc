// The vector-Jacobian product of attention: with p = 2^(score - lse) and delta = out . d_out, d_score = p (d_out . v -
// delta). One kernel iterates over the keys of each query and computes dq; another iterates over the queries of each
// key and computes dk and dv. No two thread blocks add to the same value, so the order of each sum is fixed.
//
// Longer than other files: both kernels load and fold tiles with the same device functions.
#pragma once
#include "attention_packed.cuh"

struct AttendDelta {
    const void* out;
    const void* d_out;
    float* delta; // [tokens][num_heads]
    uint32_t stride, d_stride;
    uint32_t tokens, num_heads, dim, pad;
};

// One warp per token and head computes delta.
template <typename T> DEVICE void attend_delta(const AttendDelta& p) {
    uint32_t index = blockIdx.x * (blockDim.x / WARP) + warp_id();
    uint32_t token = index / p.num_heads, head = index % p.num_heads;
    if (token >= p.tokens) return;
    const T* out = static_cast<const T*>(p.out) + uint64_t(token) * p.stride + head * p.dim;
    const T* d_out = static_cast<const T*>(p.d_out) + uint64_t(token) * p.d_stride + head * p.dim;
    float sum = 0.0f;
    for (uint32_t d = lane_id(); d < p.dim; d += WARP) sum = fmaf(to_f32(out[d]), to_f32(d_out[d]), sum);
    sum = warp_sum(sum);
    if (lane_id() == 0) p.delta[index] = sum;
}
KERNEL(attend_delta_f32, AttendDelta) { attend_delta<float>(p); }
KERNEL(attend_delta_bf16, AttendDelta) { attend_delta<bf16>(p); }

struct AttendQueries {
    const void* qkv;
    const void* d_out;
    const float* lse;
    const float* delta;
    void* d_qkv;
    const QueryTile* tiles;
    uint32_t stride, d_out_stride, d_stride;
    uint32_t num_heads, num_kv_heads, dim;
    uint32_t heads_at_once, head_tiles;
    uint32_t window, vector;
    float scale;   // in units of log 2
    float natural; // scale of scores
};

// Number of tiles in shared memory that are loaded or in use concurrently: the next tile is loaded while this one is
// used, if there is room.
#define STAGES_OF(DIM) ((DIM) <= 128 ? 2 : 1)

// Computes dq of a warp's 16 queries over a range of blocks of keys.
template <int DIM, int STAGES> struct QueryGradient {
    float dq[DIM / 8][4];
    float lse[2], delta[2];

    DEVICE_SPECIAL void run(const bf16* q, const bf16* d_out, bf16* tiles, const Segment<bf16>& segment, uint32_t first,
                            uint32_t end, const Seen seen[2], float scale) {
        if (first >= end) return;
        auto load = [&](uint32_t block, bf16* to) {
            uint32_t count = positions_of(segment, block);
            load_tile<DIM, KEYS, 128>(to, keys_of(segment, block), segment.stride, count, segment.dim, segment.vector);
            load_tile<DIM, KEYS, 128>(to + KEYS * TILE_STRIDE(DIM), values_of(segment, block), segment.stride, count,
                                      segment.dim, segment.vector);
        };
        __syncthreads();
        load(first, tiles);
        cp_async_commit();
        for (uint32_t block = first; block < end; block++) {
            bf16* keys = tiles + (block - first) % STAGES * 2 * KEYS * TILE_STRIDE(DIM);
            bool more = block + 1 < end;
            if (STAGES == 2) {
                if (more) load(block + 1, tiles + (block + 1 - first) % 2 * 2 * KEYS * TILE_STRIDE(DIM));
                cp_async_commit();
                cp_async_wait<1>();
            } else {
                cp_async_wait<0>();
            }
            __syncthreads();
            int32_t base = int32_t(block * KEYS);
            if (__any_sync(FULL, sees_some(seen[0], base) || sees_some(seen[1], base))) {
                const bf16* values = keys + KEYS * TILE_STRIDE(DIM);
#pragma unroll 1
                for (int half = 0; half < 2; half++) {
                    part(q, d_out, keys + half * 32 * TILE_STRIDE(DIM), values + half * 32 * TILE_STRIDE(DIM),
                         base + half * 32, seen, scale);
                }
            }
            __syncthreads();
            if (STAGES == 1 && more) {
                load(block + 1, tiles);
                cp_async_commit();
            }
        }
        cp_async_wait<0>();
    }

    // Adds the gradients of 32 keys to the queries' dq.
    DEVICE_SPECIAL void part(const bf16* q, const bf16* d_out, const bf16* keys, const bf16* values, int32_t base,
                             const Seen seen[2], float scale) {
        float s[4][4], dp[4][4];
        for (int n = 0; n < 4; n++)
            for (int e = 0; e < 4; e++) s[n][e] = dp[n][e] = 0.0f;
#pragma unroll (DIM > 128 ? 2 : DIM / 16)
        for (int k = 0; k < DIM; k += 16) {
            uint32_t a[4], d[4], b[4];
            load_a<DIM>(a, q, k);
            load_a<DIM>(d, d_out, k);
#pragma unroll
            for (int n = 0; n < 2; n++) {
                load_b<DIM>(b, keys + n * 16 * TILE_STRIDE(DIM), k);
                mma_m16n8k16_bf16(s[2 * n], a, b);
                mma_m16n8k16_bf16(s[2 * n + 1], a, b + 2);
                load_b<DIM>(b, values + n * 16 * TILE_STRIDE(DIM), k);
                mma_m16n8k16_bf16(dp[2 * n], d, b);
                mma_m16n8k16_bf16(dp[2 * n + 1], d, b + 2);
            }
        }
        int32_t column = base + int32_t(lane_id() % 4 * 2);
        uint32_t ds[2][4];
#pragma unroll
        for (int n = 0; n < 4; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int32_t position = column + n * 8 + e % 2;
                bool visible = (position >= seen[e / 2].lo) & (position < seen[e / 2].hi);
                float weight = exp2_of(fmaf(s[n][e], scale, -lse[e / 2]));
                weight = visible ? weight : 0.0f;
                s[n][e] = weight * (dp[n][e] - delta[e / 2]);
            }
            ds[n / 2][n % 2 * 2] = pack_bf16(s[n][0], s[n][1]);
            ds[n / 2][n % 2 * 2 + 1] = pack_bf16(s[n][2], s[n][3]);
        }
#pragma unroll
        for (int n = 0; n < DIM / 16; n++) {
#pragma unroll
            for (int k = 0; k < 2; k++) {
                uint32_t b[4];
                load_b_trans<DIM>(b, keys + k * 16 * TILE_STRIDE(DIM), n * 16);
                mma_m16n8k16_bf16(dq[2 * n], ds[k], b);
                mma_m16n8k16_bf16(dq[2 * n + 1], ds[k], b + 2);
            }
        }
    }
};

template <int DIM, int STAGES> DEVICE void attend_queries_bf16(const AttendQueries& p) {
    SHARED(shared);
    bf16* q = reinterpret_cast<bf16*>(shared);
    bf16* d_out = q + 64 * TILE_STRIDE(DIM);
    bf16* keys = d_out + 64 * TILE_STRIDE(DIM);
    BlockTile place = block_tile(blockIdx.x, p.num_kv_heads * p.head_tiles);
    QueryTile tile = p.tiles[place.tile];
    HeadTile heads = head_tile(place.head, p.num_heads, p.num_kv_heads, p.heads_at_once, p.head_tiles);
    const bf16* qkv = static_cast<const bf16*>(p.qkv);
    auto query_at = [&](uint32_t row) -> const bf16* {
        QueryRow query = query_row(row, tile.tokens, heads, p.heads_at_once);
        return query.valid ? qkv + uint64_t(tile.row + query.token) * p.stride + query.head * p.dim : nullptr;
    };
    gather_tile<DIM, 64, 128>(q, qkv, query_at, p.dim, p.vector);
    const bf16* all_d_out = static_cast<const bf16*>(p.d_out);
    auto d_out_at = [&](uint32_t row) -> const bf16* {
        QueryRow query = query_row(row, tile.tokens, heads, p.heads_at_once);
        uint64_t token = tile.row + query.token;
        return query.valid ? all_d_out + token * p.d_out_stride + query.head * p.dim : nullptr;
    };
    gather_tile<DIM, 64, 128>(d_out, all_d_out, d_out_at, p.dim, p.vector);
    uint32_t first = warp_id() * QUERIES;
    QueryGradient<DIM, STAGES> gradient;
#pragma unroll
    for (int e = 0; e < 2; e++) {
        QueryRow query = query_row(first + lane_id() / 4 + 8 * e, tile.tokens, heads, p.heads_at_once);
        uint64_t at = uint64_t(tile.row + query.token) * p.num_heads + query.head;
        gradient.lse[e] = query.valid ? p.lse[at] : 0.0f;
        gradient.delta[e] = query.valid ? p.delta[at] : 0.0f;
    }
#pragma unroll
    for (int c = 0; c < DIM / 8; c++)
        for (int e = 0; e < 4; e++) gradient.dq[c][e] = 0.0f;
    const bf16* own_q = q + first * TILE_STRIDE(DIM);
    const bf16* own_d = d_out + first * TILE_STRIDE(DIM);
#pragma unroll 1
    for (int own = 0; own < 2; own++) {
        Seen seen[2];
        for (int e = 0; e < 2; e++) {
            QueryRow query = query_row(first + lane_id() / 4 + 8 * e, tile.tokens, heads, p.heads_at_once);
            seen[e] = seen_or_none(query.valid, own, tile, query.token, p.window);
        }
        Blocks blocks = tile_blocks(own, tile, p.window);
        Segment<bf16> segment = tile_segment<bf16>(p.qkv, own, tile, heads.kv, p.num_heads, p.num_kv_heads, p.dim,
                                                   p.stride, p.vector);
        gradient.run(own_q, own_d, keys, segment, blocks.first, blocks.end, seen, p.scale);
    }
#pragma unroll
    for (int e = 0; e < 2; e++) {
        QueryRow query = query_row(first + lane_id() / 4 + 8 * e, tile.tokens, heads, p.heads_at_once);
        if (!query.valid) continue;
        bf16* to = static_cast<bf16*>(p.d_qkv) + uint64_t(tile.row + query.token) * p.d_stride + query.head * p.dim;
        bool words = has_words(to, p.dim);
#pragma unroll
        for (int c = 0; c < DIM / 8; c++) {
            store_pair(to, c * 8 + lane_id() % 4 * 2, p.dim, words, gradient.dq[c][2 * e] * p.natural,
                       gradient.dq[c][2 * e + 1] * p.natural);
        }
    }
}

// The f32 variant: a warp processes its queries one by one.
template <int DIM>
DEVICE void query_gradient_f32(const float* q, const float* d_out, const Segment<float>& segment, uint32_t first,
                               uint32_t end, Seen seen, float scale, float lse, float delta, float dq[DIM / 32]) {
    uint32_t lane = lane_id();
    for (uint32_t block = first; block < end; block++) {
        const float* keys = keys_of(segment, block);
        const float* values = values_of(segment, block);
        uint32_t count = positions_of(segment, block);
        for (uint32_t half = 0; half < count; half += WARP) {
            uint32_t key = half + lane;
            int32_t position = int32_t(block * KEYS + key);
            float ds = 0.0f;
            if (key < count && position >= seen.lo && position < seen.hi) {
                float s = 0.0f, dp = 0.0f;
                for (uint32_t d = 0; d < segment.dim; d++) {
                    s = fmaf(q[d], keys[uint64_t(key) * segment.stride + d], s);
                    dp = fmaf(d_out[d], values[uint64_t(key) * segment.stride + d], dp);
                }
                ds = exp2_of(fmaf(s, scale, -lse)) * (dp - delta);
            }
            for (uint32_t i = 0; i < WARP && half + i < count; i++) {
                float weight = __shfl_sync(FULL, ds, int(i));
#pragma unroll
                for (int c = 0; c < DIM / 32; c++) {
                    uint32_t d = c * 32 + lane;
                    if (d < segment.dim) dq[c] = fmaf(weight, keys[uint64_t(half + i) * segment.stride + d], dq[c]);
                }
            }
        }
    }
}

template <int DIM> DEVICE void attend_queries_f32(const AttendQueries& p) {
    BlockTile place = block_tile(blockIdx.x, p.num_kv_heads * p.head_tiles);
    QueryTile tile = p.tiles[place.tile];
    HeadTile heads = head_tile(place.head, p.num_heads, p.num_kv_heads, p.heads_at_once, p.head_tiles);
    Segment<float> prompt = packed_segment<float>(p.qkv, tile.prompt_row, tile.prompt_len, heads.kv, p.num_heads,
                                                  p.num_kv_heads, p.dim, p.stride, p.vector);
    Segment<float> own = packed_segment<float>(p.qkv, tile.segment_row, tile.segment_len, heads.kv, p.num_heads,
                                               p.num_kv_heads, p.dim, p.stride, p.vector);
    for (uint32_t row = warp_id(); row < 64; row += blockDim.x / WARP) {
        QueryRow query = query_row(row, tile.tokens, heads, p.heads_at_once);
        if (!query.valid) continue;
        uint64_t token = tile.row + query.token;
        const float* q = static_cast<const float*>(p.qkv) + token * p.stride + query.head * p.dim;
        const float* d_out = static_cast<const float*>(p.d_out) + token * p.d_out_stride + query.head * p.dim;
        float lse = p.lse[token * p.num_heads + query.head], delta = p.delta[token * p.num_heads + query.head];
        float dq[DIM / 32];
        for (int c = 0; c < DIM / 32; c++) dq[c] = 0.0f;
        Blocks blocks = blocks_of_prompt(tile, p.window);
        query_gradient_f32<DIM>(q, d_out, prompt, blocks.first, blocks.end,
                                seen_or_none(true, false, tile, query.token, p.window), p.scale, lse, delta, dq);
        blocks = blocks_of_own(tile, p.window);
        query_gradient_f32<DIM>(q, d_out, own, blocks.first, blocks.end,
                                seen_or_none(true, true, tile, query.token, p.window), p.scale, lse, delta, dq);
        float* to = static_cast<float*>(p.d_qkv) + token * p.d_stride + query.head * p.dim;
        for (int c = 0; c < DIM / 32; c++) {
            uint32_t d = c * 32 + lane_id();
            if (d < p.dim) to[d] = dq[c] * p.natural;
        }
    }
}

// A tile of keys: a range of keys of a prompt or completion, and the rows that may attend to them.
struct KeyTile {
    int32_t row;
    int32_t count;
    int32_t position; // position of the first key in its sequence
    int32_t begin, end;
    int32_t pad;
};

struct AttendKeys {
    const void* qkv;
    const void* d_out;
    const float* lse;
    const float* delta;
    void* d_qkv;
    const KeyTile* tiles;
    const int32_t* positions; // position of each row in its sequence
    uint32_t stride, d_out_stride, d_stride;
    uint32_t num_heads, num_kv_heads, dim;
    uint32_t window, vector;
    float scale, natural;
};

#define QUERY_ROWS 32u

DEVICE bool sees_key(int32_t position, int32_t key, uint32_t window) {
    return key <= position && int64_t(key) + window > int64_t(position);
}

// A tile of queries: a range of rows with one head.
struct KeyStep {
    int32_t begin;
    uint32_t head; // the first of those that share the key head
};

template <int DIM> DEVICE void attend_keys_bf16(const AttendKeys& p) {
    constexpr int STAGES = STAGES_OF(DIM);
    SHARED(shared);
    SHARED_ARRAY(float, kept_lse, 2 * QUERY_ROWS);
    SHARED_ARRAY(float, kept_delta, 2 * QUERY_ROWS);
    SHARED_ARRAY(int32_t, kept_positions, 2 * QUERY_ROWS);
    bf16* keys = reinterpret_cast<bf16*>(shared);
    bf16* values = keys + KEYS * TILE_STRIDE(DIM);
    bf16* tiles = values + KEYS * TILE_STRIDE(DIM);
    BlockTile place = block_tile(blockIdx.x, p.num_kv_heads);
    KeyTile tile = p.tiles[place.tile];
    uint32_t kv = place.head, group = p.num_heads / p.num_kv_heads;
    const bf16* qkv = static_cast<const bf16*>(p.qkv);
    const bf16* first_key = qkv + uint64_t(tile.row) * p.stride + (p.num_heads + kv) * p.dim;
    load_tile<DIM, KEYS, 128>(keys, first_key, p.stride, tile.count, p.dim, p.vector);
    load_tile<DIM, KEYS, 128>(values, first_key + p.num_kv_heads * p.dim, p.stride, tile.count, p.dim, p.vector);
    cp_async_commit();
    // The gradients dk and dv of a warp's 16 keys; a lane has rows g and g + 8.
    float dk[DIM / 8][4], dv[DIM / 8][4];
#pragma unroll
    for (int c = 0; c < DIM / 8; c++)
        for (int e = 0; e < 4; e++) dk[c][e] = dv[c][e] = 0.0f;
    const bf16* own_keys = keys + warp_id() * QUERIES * TILE_STRIDE(DIM);
    const bf16* own_values = values + warp_id() * QUERIES * TILE_STRIDE(DIM);
    int32_t key = tile.position + int32_t(warp_id() * QUERIES + lane_id() / 4);
    // The first tile of query rows from `begin` on of which any attends to any of the keys: the same in all warps.
    int32_t last = tile.position + tile.count - 1;
    auto find = [&](int32_t begin) -> int32_t {
        if (p.window == 0x7fffffffu) return begin;
        for (; begin < tile.end; begin += int32_t(QUERY_ROWS)) {
            int32_t row = begin + int32_t(lane_id());
            int32_t position = row < tile.end ? p.positions[row] : -1;
            bool sees = position >= tile.position && position - last < int32_t(p.window);
            if (__any_sync(FULL, sees)) break;
        }
        return begin;
    };
    auto load = [&](KeyStep step, uint32_t stage) {
        bf16* q = tiles + stage * 2 * QUERY_ROWS * TILE_STRIDE(DIM);
        uint32_t head = kv * group + step.head;
        uint32_t rows = uint32_t(min(tile.end - step.begin, int32_t(QUERY_ROWS)));
        const bf16* d_out = static_cast<const bf16*>(p.d_out);
        load_tile<DIM, QUERY_ROWS, 128>(q, qkv + uint64_t(step.begin) * p.stride + head * p.dim, p.stride, rows, p.dim,
                                        p.vector);
        load_tile<DIM, QUERY_ROWS, 128>(q + QUERY_ROWS * TILE_STRIDE(DIM),
                                        d_out + uint64_t(step.begin) * p.d_out_stride + head * p.dim, p.d_out_stride,
                                        rows, p.dim, p.vector);
        uint64_t row = uint64_t(step.begin) + threadIdx.x;
        uint32_t at = stage * QUERY_ROWS + threadIdx.x;
        if (threadIdx.x < rows) {
            cp_async4(kept_lse + at, p.lse + row * p.num_heads + head);
            cp_async4(kept_delta + at, p.delta + row * p.num_heads + head);
            cp_async4(kept_positions + at, p.positions + row);
        } else if (threadIdx.x < QUERY_ROWS) {
            kept_lse[at] = kept_delta[at] = 0.0f;
            kept_positions[at] = -1;
        }
    };
    KeyStep step = {find(tile.begin), 0};
    uint32_t stage = 0;
    if (step.begin < tile.end) load(step, 0);
    cp_async_commit();
    while (step.begin < tile.end) {
        KeyStep next = {step.begin, step.head + 1};
        if (next.head == group) next.head = 0, next.begin = find(step.begin + int32_t(QUERY_ROWS));
        bool more = next.begin < tile.end;
        if (STAGES == 2) {
            if (more) load(next, stage ^ 1);
            cp_async_commit();
            cp_async_wait<1>();
        } else {
            cp_async_wait<0>();
        }
        __syncthreads();
        const bf16* q = tiles + stage * 2 * QUERY_ROWS * TILE_STRIDE(DIM);
        const bf16* d_out = q + QUERY_ROWS * TILE_STRIDE(DIM);
        const float* lse = kept_lse + stage * QUERY_ROWS;
        const float* delta = kept_delta + stage * QUERY_ROWS;
        const int32_t* positions = kept_positions + stage * QUERY_ROWS;
        float s[4][4], dp[4][4];
        for (int n = 0; n < 4; n++)
            for (int e = 0; e < 4; e++) s[n][e] = dp[n][e] = 0.0f;
#pragma unroll (DIM > 128 ? 2 : DIM / 16)
        for (int k = 0; k < DIM; k += 16) {
            uint32_t a[4], b[4];
            load_a<DIM>(a, own_keys, k);
#pragma unroll
            for (int n = 0; n < 2; n++) {
                load_b<DIM>(b, q + n * 16 * TILE_STRIDE(DIM), k);
                mma_m16n8k16_bf16(s[2 * n], a, b);
                mma_m16n8k16_bf16(s[2 * n + 1], a, b + 2);
            }
            load_a<DIM>(a, own_values, k);
#pragma unroll
            for (int n = 0; n < 2; n++) {
                load_b<DIM>(b, d_out + n * 16 * TILE_STRIDE(DIM), k);
                mma_m16n8k16_bf16(dp[2 * n], a, b);
                mma_m16n8k16_bf16(dp[2 * n + 1], a, b + 2);
            }
        }
        uint32_t weights[2][4], ds[2][4];
#pragma unroll
        for (int n = 0; n < 4; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                uint32_t column = n * 8 + lane_id() % 4 * 2 + e % 2;
                float of_lse = lse[column];
                // The distance from key to query must be nonnegative and within the window; for a missing query
                // (-1) it is negative.
                bool visible = uint32_t(positions[column] - (key + e / 2 * 8)) < p.window;
                float weight = exp2_of(fmaf(s[n][e], p.scale, -of_lse));
                weight = visible ? weight : 0.0f;
                s[n][e] = weight;
                dp[n][e] = weight * (dp[n][e] - delta[column]);
            }
            weights[n / 2][n % 2 * 2] = pack_bf16(s[n][0], s[n][1]);
            weights[n / 2][n % 2 * 2 + 1] = pack_bf16(s[n][2], s[n][3]);
            ds[n / 2][n % 2 * 2] = pack_bf16(dp[n][0], dp[n][1]);
            ds[n / 2][n % 2 * 2 + 1] = pack_bf16(dp[n][2], dp[n][3]);
        }
#pragma unroll
        for (int n = 0; n < DIM / 16; n++) {
#pragma unroll
            for (int k = 0; k < 2; k++) {
                uint32_t b[4];
                load_b_trans<DIM>(b, d_out + k * 16 * TILE_STRIDE(DIM), n * 16);
                mma_m16n8k16_bf16(dv[2 * n], weights[k], b);
                mma_m16n8k16_bf16(dv[2 * n + 1], weights[k], b + 2);
                load_b_trans<DIM>(b, q + k * 16 * TILE_STRIDE(DIM), n * 16);
                mma_m16n8k16_bf16(dk[2 * n], ds[k], b);
                mma_m16n8k16_bf16(dk[2 * n + 1], ds[k], b + 2);
            }
        }
        __syncthreads();
        if (STAGES == 1 && more) {
            load(next, 0);
            cp_async_commit();
        }
        step = next;
        stage ^= STAGES - 1;
    }
    cp_async_wait<0>();
#pragma unroll
    for (int e = 0; e < 2; e++) {
        uint32_t row = warp_id() * QUERIES + lane_id() / 4 + 8 * e;
        if (row >= uint32_t(tile.count)) continue;
        bf16* to = static_cast<bf16*>(p.d_qkv) + uint64_t(tile.row + row) * p.d_stride + (p.num_heads + kv) * p.dim;
        bf16* to_values = to + p.num_kv_heads * p.dim;
        bool words = has_words(to, p.dim);
#pragma unroll
        for (int c = 0; c < DIM / 8; c++) {
            uint32_t at = c * 8 + lane_id() % 4 * 2;
            store_pair(to, at, p.dim, words, dk[c][2 * e] * p.natural, dk[c][2 * e + 1] * p.natural);
            store_pair(to_values, at, p.dim, words, dv[c][2 * e], dv[c][2 * e + 1]);
        }
    }
}

// The f32 variant: a warp processes its keys one by one; each lane has one query.
template <int DIM> DEVICE void attend_keys_f32(const AttendKeys& p) {
    BlockTile place = block_tile(blockIdx.x, p.num_kv_heads);
    KeyTile tile = p.tiles[place.tile];
    uint32_t kv = place.head, group = p.num_heads / p.num_kv_heads, lane = lane_id();
    const float* qkv = static_cast<const float*>(p.qkv);
    for (uint32_t row = warp_id(); row < uint32_t(tile.count); row += blockDim.x / WARP) {
        const float* key = qkv + uint64_t(tile.row + row) * p.stride + (p.num_heads + kv) * p.dim;
        const float* value = key + p.num_kv_heads * p.dim;
        float dk[DIM / 32], dv[DIM / 32];
        for (int c = 0; c < DIM / 32; c++) dk[c] = dv[c] = 0.0f;
        for (int32_t begin = tile.begin; begin < tile.end; begin += int32_t(WARP)) {
            int32_t query = begin + int32_t(lane);
            bool sees = query < tile.end && sees_key(p.positions[query], tile.position + int32_t(row), p.window);
            if (!__any_sync(FULL, sees)) continue;
            for (uint32_t h = 0; h < group; h++) {
                uint32_t head = kv * group + h;
                float weight = 0.0f, ds = 0.0f;
                if (sees) {
                    const float* q = qkv + uint64_t(query) * p.stride + head * p.dim;
                    const float* d_out =
                        static_cast<const float*>(p.d_out) + uint64_t(query) * p.d_out_stride + head * p.dim;
                    float s = 0.0f, dp = 0.0f;
                    for (uint32_t d = 0; d < p.dim; d++) {
                        s = fmaf(q[d], key[d], s);
                        dp = fmaf(d_out[d], value[d], dp);
                    }
                    uint64_t at = uint64_t(query) * p.num_heads + head;
                    weight = exp2_of(fmaf(s, p.scale, -p.lse[at]));
                    ds = weight * (dp - p.delta[at]);
                }
                for (int32_t i = 0; i < int32_t(WARP) && begin + i < tile.end; i++) {
                    float of_value = __shfl_sync(FULL, weight, i), of_key = __shfl_sync(FULL, ds, i);
                    const float* q = qkv + uint64_t(begin + i) * p.stride + head * p.dim;
                    const float* d_out =
                        static_cast<const float*>(p.d_out) + uint64_t(begin + i) * p.d_out_stride + head * p.dim;
#pragma unroll
                    for (int c = 0; c < DIM / 32; c++) {
                        uint32_t d = c * 32 + lane;
                        if (d >= p.dim) continue;
                        dv[c] = fmaf(of_value, d_out[d], dv[c]);
                        dk[c] = fmaf(of_key, q[d], dk[c]);
                    }
                }
            }
        }
        float* to = static_cast<float*>(p.d_qkv) + uint64_t(tile.row + row) * p.d_stride + (p.num_heads + kv) * p.dim;
        for (int c = 0; c < DIM / 32; c++) {
            uint32_t d = c * 32 + lane;
            if (d >= p.dim) continue;
            to[d] = dk[c] * p.natural;
            to[p.num_kv_heads * p.dim + d] = dv[c];
        }
    }
}

// `blocks` is the number of thread blocks that must fit into a multiprocessor's registers.
#define ATTEND_BACKWARD(DIM, blocks)                                                                                   \
    KERNEL_BOUNDS(attend_queries_bf16_##DIM, AttendQueries, 128, blocks) {                                             \
        attend_queries_bf16<DIM, STAGES_OF(DIM)>(p);                                                                   \
    }                                                                                                                  \
    KERNEL_BOUNDS(attend_queries_f32_##DIM, AttendQueries, 128, 1) { attend_queries_f32<DIM>(p); }                     \
    KERNEL_BOUNDS(attend_keys_bf16_##DIM, AttendKeys, 128, blocks) { attend_keys_bf16<DIM>(p); }                       \
    KERNEL_BOUNDS(attend_keys_f32_##DIM, AttendKeys, 128, 1) { attend_keys_f32<DIM>(p); }
ATTEND_BACKWARD(32, 4)
ATTEND_BACKWARD(64, 3)
ATTEND_BACKWARD(128, 1)
ATTEND_BACKWARD(256, 1)
// Variants of the kernel for devices whose shared memory has no room for two stages.
KERNEL_BOUNDS(attend_queries_one_stage_bf16_128, AttendQueries, 128, 1) { attend_queries_bf16<128, 1>(p); }
