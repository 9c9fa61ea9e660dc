// Attention of a packed batch and its vector-Jacobian product. A thread block has a tile: several tokens of one prompt
// or completion, times up to 16 of the query heads that share a key head.
#pragma once
#include "attention_fold.cuh"

// A tile of queries: a range of tokens of a prompt or a completion.
struct QueryTile {
    int32_t row;         // row of its first token in the batch
    int32_t tokens;
    int32_t index;       // index of its first token in its own segment
    int32_t segment_row; // row of its segment's first token
    int32_t segment_len;
    int32_t prompt_row;
    int32_t prompt_len;  // 0 if the tokens are the prompt's own
    int32_t pad;
};

struct Attend {
    const void* qkv;
    void* out;
    float* lse; // [tokens][num_heads]
    const QueryTile* tiles;
    uint32_t stride, out_stride; // strides of the rows of qkv and out
    uint32_t num_heads, num_kv_heads, dim;
    uint32_t heads_at_once, head_tiles; // query heads of a tile; tiles of those that share a key head
    uint32_t window, vector;
    float scale; // scale of scores, in units of log 2
};

// Thread blocks are ordered [tile][head tile]: those of the longest tile start first, for all heads.
struct BlockTile {
    uint32_t tile, head;
};
DEVICE BlockTile block_tile(uint32_t block, uint32_t heads) {
    BlockTile place = {block / heads, block % heads};
    return place;
}

// The query heads that a thread block processes.
struct HeadTile {
    uint32_t kv, first, count;
};
DEVICE HeadTile head_tile(uint32_t index, uint32_t num_heads, uint32_t num_kv_heads, uint32_t at_once, uint32_t tiles) {
    uint32_t group = num_heads / num_kv_heads, part = index % tiles;
    HeadTile heads;
    heads.kv = index / tiles;
    heads.first = heads.kv * group + part * at_once;
    heads.count = min(at_once, group - part * at_once);
    return heads;
}

// A row of a tile of queries, which is ordered by token, then by head.
struct QueryRow {
    uint32_t token, head;
    bool valid;
};
DEVICE QueryRow query_row(uint32_t row, uint32_t tokens, const HeadTile& heads, uint32_t at_once) {
    QueryRow query;
    query.token = row / at_once;
    query.head = heads.first + row % at_once;
    query.valid = query.token < tokens && row % at_once < heads.count;
    return query;
}

template <typename T>
DEVICE Segment<T> packed_segment(const void* qkv, uint32_t row, uint32_t len, uint32_t kv, uint32_t num_heads,
                                 uint32_t num_kv_heads, uint32_t dim, uint32_t stride, uint32_t vector) {
    Segment<T> segment;
    segment.k = static_cast<const T*>(qkv) + uint64_t(row) * stride + (num_heads + kv) * dim;
    segment.v = segment.k + num_kv_heads * dim;
    segment.pages = nullptr;
    segment.at = 0;
    segment.stride = stride;
    segment.len = len;
    segment.dim = dim;
    segment.vector = vector;
    return segment;
}

DEVICE Seen seen_or_none(bool valid, bool own, const QueryTile& tile, uint32_t token, uint32_t window) {
    if (!valid) return seen_by_none();
    return own ? seen_of_own(tile.index + token, window)
               : seen_of_prompt(tile.prompt_len, tile.index + token, window);
}

// The blocks of keys that a tile of queries processes.
struct Blocks {
    uint32_t first, end;
};
DEVICE Blocks blocks_of_prompt(const QueryTile& tile, uint32_t window) {
    Blocks blocks;
    blocks.first = uint32_t(seen_of_prompt(tile.prompt_len, tile.index, window).lo) / KEYS;
    blocks.end = (uint32_t(tile.prompt_len) + KEYS - 1) / KEYS;
    return blocks;
}
DEVICE Blocks blocks_of_own(const QueryTile& tile, uint32_t window) {
    Blocks blocks;
    blocks.first = uint32_t(seen_of_own(tile.index, window).lo) / KEYS;
    blocks.end = (uint32_t(tile.index + tile.tokens) + KEYS - 1) / KEYS;
    return blocks;
}

// The segment of keys that a tile of queries reads: the preceding prompt, or its own.
template <typename T>
DEVICE Segment<T> tile_segment(const void* qkv, bool own, const QueryTile& tile, uint32_t kv, uint32_t num_heads,
                               uint32_t num_kv_heads, uint32_t dim, uint32_t stride, uint32_t vector) {
    return packed_segment<T>(qkv, own ? tile.segment_row : tile.prompt_row, own ? tile.segment_len : tile.prompt_len, kv,
                             num_heads, num_kv_heads, dim, stride, vector);
}
DEVICE Blocks tile_blocks(bool own, const QueryTile& tile, uint32_t window) {
    return own ? blocks_of_own(tile, window) : blocks_of_prompt(tile, window);
}

template <int DIM> DEVICE void attend_bf16(const Attend& p) {
    SHARED(shared);
    bf16* q = reinterpret_cast<bf16*>(shared);
    bf16* keys = q + 64 * TILE_STRIDE(DIM);
    BlockTile place = block_tile(blockIdx.x, p.num_kv_heads * p.head_tiles);
    QueryTile tile = p.tiles[place.tile];
    HeadTile heads = head_tile(place.head, p.num_heads, p.num_kv_heads, p.heads_at_once, p.head_tiles);
    const bf16* qkv = static_cast<const bf16*>(p.qkv);
    auto query_at = [&](uint32_t row) -> const bf16* {
        QueryRow query = query_row(row, tile.tokens, heads, p.heads_at_once);
        return query.valid ? qkv + uint64_t(tile.row + query.token) * p.stride + query.head * p.dim : nullptr;
    };
    gather_tile<DIM, 64, 128>(q, qkv, query_at, p.dim, p.vector);
    uint32_t first = warp_id() * QUERIES;
    Fold<bf16, DIM> fold;
    fold.clear();
    const bf16* own_q = q + first * TILE_STRIDE(DIM);
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
        fold.template run<128>(own_q, keys, segment, blocks.first, blocks.end, seen, p.scale);
    }
    auto out_at = [&](uint32_t row) -> bf16* {
        QueryRow query = query_row(first + row, tile.tokens, heads, p.heads_at_once);
        bf16* out = static_cast<bf16*>(p.out);
        return query.valid ? out + uint64_t(tile.row + query.token) * p.out_stride + query.head * p.dim : nullptr;
    };
    auto lse_at = [&](uint32_t row) -> float* {
        QueryRow query = query_row(first + row, tile.tokens, heads, p.heads_at_once);
        return p.lse + uint64_t(tile.row + query.token) * p.num_heads + query.head;
    };
    fold.finish(out_at, lse_at, p.dim);
}

// The queries of a warp, `[16][DIM]`, with zeros after the head's width and for missing queries.
template <int DIM, typename Row> DEVICE void gather_queries(float* q, const Row& row_at, uint32_t dim) {
    for (uint32_t row = 0; row < QUERIES; row++) {
        const float* from = row_at(row);
        for (uint32_t d = lane_id(); d < DIM; d += WARP) q[row * DIM + d] = from && d < dim ? from[d] : 0.0f;
    }
    __syncwarp();
}

template <int DIM> DEVICE void attend_f32(const Attend& p) {
    SHARED(shared);
    float* q = reinterpret_cast<float*>(shared) + warp_id() * QUERIES * DIM;
    BlockTile place = block_tile(blockIdx.x, p.num_kv_heads * p.head_tiles);
    QueryTile tile = p.tiles[place.tile];
    HeadTile heads = head_tile(place.head, p.num_heads, p.num_kv_heads, p.heads_at_once, p.head_tiles);
    uint32_t first = warp_id() * QUERIES;
    auto row_of = [&](uint32_t row) { return query_row(first + row, tile.tokens, heads, p.heads_at_once); };
    auto query_at = [&](uint32_t row) -> const float* {
        QueryRow query = row_of(row);
        const float* qkv = static_cast<const float*>(p.qkv);
        return query.valid ? qkv + uint64_t(tile.row + query.token) * p.stride + query.head * p.dim : nullptr;
    };
    gather_queries<DIM>(q, query_at, p.dim);
    Fold<float, DIM> fold;
    fold.clear();
#pragma unroll 1
    for (int own = 0; own < 2; own++) {
        Seen seen[QUERIES];
        for (uint32_t row = 0; row < QUERIES; row++) {
            QueryRow query = row_of(row);
            seen[row] = seen_or_none(query.valid, own, tile, query.token, p.window);
        }
        Blocks blocks = tile_blocks(own, tile, p.window);
        fold.run(q, tile_segment<float>(p.qkv, own, tile, heads.kv, p.num_heads, p.num_kv_heads, p.dim, p.stride,
                                        p.vector),
                 blocks.first, blocks.end, seen, p.scale);
    }
    auto out_at = [&](uint32_t row) -> float* {
        QueryRow query = row_of(row);
        float* out = static_cast<float*>(p.out);
        return query.valid ? out + uint64_t(tile.row + query.token) * p.out_stride + query.head * p.dim : nullptr;
    };
    auto lse_at = [&](uint32_t row) -> float* {
        QueryRow query = row_of(row);
        return p.lse + uint64_t(tile.row + query.token) * p.num_heads + query.head;
    };
    fold.finish(out_at, lse_at, p.dim);
}

#define ATTEND(DIM)                                                                                                    \
    KERNEL_BOUNDS(attend_bf16_##DIM, Attend, 128, 1) { attend_bf16<DIM>(p); }                                          \
    KERNEL_BOUNDS(attend_f32_##DIM, Attend, 128, 1) { attend_f32<DIM>(p); }
ATTEND(32)
ATTEND(64)
ATTEND(128)
ATTEND(256)
