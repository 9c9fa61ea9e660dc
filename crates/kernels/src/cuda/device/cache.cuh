// Keys and values of growing sequences, and the attention of one new token per row.
//
// A page holds 64 positions of all layers: for each layer and key head its keys `[64][dim]`, then its values. A step's
// attention takes two launches. In the first, tasks fold ranges of blocks into partial results, for up to 16 queries
// that share their keys (the rows of a prompt, the query heads of a key head). The second handles one row and key head
// per block: it appends the new key and value, folds the partial results in order, and continues with the remaining
// blocks, of which there is at least one. A task covers one block, or begins where its queries begin: therefore the
// bits do not depend on the tasks.
#pragma once
#include "attention_packed.cuh"

struct FillPages {
    const void* qkv;
    const uint64_t* pages; // addresses of the pages
    const int32_t* slots;  // slot of each row of qkv: index of its page · 64 + position there
    uint64_t at;           // offset of the layer in a page
    uint32_t stride, rows;
    uint32_t num_heads, num_kv_heads, dim, vector;
};

// A warp stores the key and value of a head at a position; the parameter is the number of values from a
// key to its value.
template <typename T>
DEVICE void keep_position(T* to, uint32_t to_value, const T* from, uint32_t from_value, uint32_t dim, uint32_t vector) {
    uint32_t at_once = vector ? 16 / sizeof(T) : 1;
    for (uint32_t i = lane_id() * at_once; i < 2 * dim; i += WARP * at_once) {
        bool value = i >= dim;
        uint32_t d = value ? i - dim : i;
        T* place = to + (value ? to_value : 0) + d;
        const T* at = from + (value ? from_value : 0) + d;
        if (vector) {
            store_words4(place, load_words4(at));
        } else {
            *place = *at;
        }
    }
}

// One thread block per row of the batch.
template <typename T> DEVICE void fill_pages(const FillPages& p) {
    uint32_t row = blockIdx.x;
    if (row >= p.rows) return;
    int32_t slot = p.slots[row];
    T* page = reinterpret_cast<T*>(p.pages[slot / int32_t(KEYS)] + p.at);
    uint32_t place = uint32_t(slot) % KEYS;
    const T* from = static_cast<const T*>(p.qkv) + uint64_t(row) * p.stride + p.num_heads * p.dim;
    for (uint32_t head = warp_id(); head < p.num_kv_heads; head += blockDim.x / WARP) {
        T* to = page + (head * 2 * KEYS + place) * p.dim;
        keep_position(to, KEYS * p.dim, from + head * p.dim, p.num_kv_heads * p.dim, p.dim, p.vector);
    }
}
KERNEL(fill_pages_f32, FillPages) { fill_pages<float>(p); }
KERNEL(fill_pages_bf16, FillPages) { fill_pages<bf16>(p); }

// The plan of a step, in words of 32 bits: a header, the rows, the tasks.
struct PlanHeader {
    int32_t rows, tasks, pad[2];
};
struct PlanRow {
    int32_t prompt_pages, own_pages; // start in the list of pages
    int32_t prompt_len, own_len;     // the new token included
    // Partial results for the prompt: their number, the index of the first, the distance from one to the next, the rows
    // of one head tile, and this row's index there.
    int32_t prompt_parts, prompt_part, prompt_step, prompt_rows, prompt_place;
    int32_t prompt_block; // the first block that is not in them
    int32_t own_parts, own_part, own_step;
    int32_t own_block;
    int32_t pad[2];
};
struct PlanTask {
    int32_t row, tokens; // the queries are those of these rows
    int32_t own;         // 1: the row's own segment; 0: the prompt's
    int32_t first, end;  // range of blocks
    int32_t part;        // index of its first partial result
    int32_t pad[2];
};

struct AttendCached {
    const void* qkv;
    void* out;
    const uint64_t* pages;
    const int32_t* plan;
    float* ml;    // partial results: m, l
    float* parts; // partial results: o, [DIM]
    uint64_t at;  // offset of the layer in a page
    uint32_t stride, out_stride, rows; // rows of qkv, including those that are not in the plan
    uint32_t row_capacity;             // rows that the plan has room for
    uint32_t num_heads, num_kv_heads, dim;
    uint32_t heads_at_once, head_tiles;
    uint32_t window, vector;
    float scale;
};

DEVICE const PlanRow* plan_rows(const AttendCached& p) { return reinterpret_cast<const PlanRow*>(p.plan + 4); }
DEVICE const PlanTask* plan_tasks(const AttendCached& p) {
    return reinterpret_cast<const PlanTask*>(p.plan + 4 + uint64_t(p.row_capacity) * (sizeof(PlanRow) / 4));
}

template <typename T>
DEVICE Segment<T> cached_segment(const AttendCached& p, const PlanRow& row, bool own, uint32_t kv) {
    Segment<T> segment;
    segment.k = segment.v = nullptr;
    segment.pages = p.pages + (own ? row.own_pages : row.prompt_pages);
    segment.at = p.at + uint64_t(kv) * 2 * KEYS * p.dim * sizeof(T);
    segment.stride = p.dim;
    segment.len = own ? row.own_len : row.prompt_len;
    segment.dim = p.dim;
    segment.vector = p.vector;
    return segment;
}

DEVICE Seen cached_seen(const PlanRow& row, bool own, uint32_t window) {
    return own ? seen_of_own(row.own_len - 1, window)
               : seen_of_prompt(row.prompt_len, row.own_len - 1, window);
}

// The queries of a warp: those of several rows, ordered by token, then by head.
template <typename T> struct CachedQueries {
    const AttendCached& p;
    uint32_t row, tokens;
    HeadTile heads;

    DEVICE_SPECIAL QueryRow at(uint32_t index) const { return query_row(index, tokens, heads, p.heads_at_once); }
    DEVICE_SPECIAL const T* operator()(uint32_t index) const {
        QueryRow query = at(index);
        const T* qkv = static_cast<const T*>(p.qkv);
        return query.valid ? qkv + uint64_t(row + query.token) * p.stride + query.head * p.dim : nullptr;
    }
    DEVICE_SPECIAL Seen seen(uint32_t index, bool own) const {
        QueryRow query = at(index);
        return query.valid ? cached_seen(plan_rows(p)[row + query.token], own, p.window) : seen_by_none();
    }
};

// The fold of a warp over ranges of blocks, for any type.
template <typename T, int DIM> struct CachedFold;

template <int DIM> struct CachedFold<bf16, DIM> {
    Fold<bf16, DIM> fold;
    bf16* shared;

    DEVICE_SPECIAL void begin(const CachedQueries<bf16>& queries, unsigned char* memory) {
        shared = reinterpret_cast<bf16*>(memory);
        __syncthreads();
        const bf16* qkv = static_cast<const bf16*>(queries.p.qkv);
        gather_tile<DIM, QUERIES, 32>(shared, qkv, queries, queries.p.dim, queries.p.vector);
        fold.clear();
    }
    DEVICE_SPECIAL void run(const CachedQueries<bf16>& queries, const Segment<bf16>& segment, uint32_t first,
                            uint32_t end, bool own) {
        Seen seen[2] = {queries.seen(lane_id() / 4, own), queries.seen(lane_id() / 4 + 8, own)};
        bf16* tiles = shared + QUERIES * TILE_STRIDE(DIM);
        fold.template run<32>(shared, tiles, segment, first, end, seen, queries.p.scale);
    }
    // Folds as many partial results together as fit into the memory otherwise used for keys and values.
    DEVICE_SPECIAL void take(const float* ml, const float* from, uint32_t rows, uint32_t count, uint64_t step) {
        constexpr uint32_t ROOM = 2 * KEYS * TILE_STRIDE(DIM) * sizeof(bf16) / sizeof(float);
        float* parts = reinterpret_cast<float*>(shared + QUERIES * TILE_STRIDE(DIM));
        uint32_t at_once = ROOM / (rows * (DIM + 2));
        float* kept = parts + at_once * rows * DIM;
        for (uint32_t first = 0; first < count; first += at_once) {
            uint32_t here = min(at_once, count - first);
            __syncthreads();
            for (uint32_t i = threadIdx.x; i < here * rows * (DIM / 4); i += blockDim.x) {
                uint32_t row = i / (DIM / 4), part = row / rows;
                uint64_t at = (first + part) * step + row % rows;
                cp_async16(parts + i * 4, from + at * DIM + i % (DIM / 4) * 4);
            }
            cp_async_commit();
            for (uint32_t i = threadIdx.x; i < here * rows * 2; i += blockDim.x) {
                uint32_t part = i / (2 * rows);
                kept[i] = ml[(first + part) * step * 2 + i % (2 * rows)];
            }
            cp_async_wait<0>();
            __syncthreads();
            fold.take(kept, parts, rows, here, rows);
        }
    }
};

template <int DIM> struct CachedFold<float, DIM> {
    Fold<float, DIM> fold;
    float* shared;

    DEVICE_SPECIAL void begin(const CachedQueries<float>& queries, unsigned char* memory) {
        shared = reinterpret_cast<float*>(memory);
        __syncthreads();
        gather_queries<DIM>(shared, queries, queries.p.dim);
        fold.clear();
    }
    DEVICE_SPECIAL void run(const CachedQueries<float>& queries, const Segment<float>& segment, uint32_t first,
                            uint32_t end, bool own) {
        Seen seen[QUERIES];
        for (uint32_t row = 0; row < QUERIES; row++) seen[row] = queries.seen(row, own);
        fold.run(shared, segment, first, end, seen, queries.p.scale);
    }
    DEVICE_SPECIAL void take(const float* ml, const float* from, uint32_t rows, uint32_t count, uint64_t step) {
        fold.take(ml, from, rows, count, step);
    }
};

// Thread blocks of one warp, in any number; each processes every n-th pair of task and head tile.
template <typename T, int DIM> DEVICE void attend_cached_tasks(const AttendCached& p) {
    SHARED(shared);
    const PlanHeader& header = *reinterpret_cast<const PlanHeader*>(p.plan);
    uint32_t head_tiles = p.num_kv_heads * p.head_tiles;
    for (uint32_t index = blockIdx.x; index < uint32_t(header.tasks) * head_tiles; index += gridDim.x) {
        PlanTask task = plan_tasks(p)[index / head_tiles];
        HeadTile heads =
            head_tile(index % head_tiles, p.num_heads, p.num_kv_heads, p.heads_at_once, p.head_tiles);
        CachedQueries<T> queries = {p, uint32_t(task.row), uint32_t(task.tokens), heads};
        const PlanRow& row = plan_rows(p)[task.row];
        CachedFold<T, DIM> cached;
        cached.begin(queries, shared);
        cached.run(queries, cached_segment<T>(p, row, task.own, heads.kv), task.first, task.end, task.own);
        // Rows of partial results are ordered [head tile][token][head of the tile].
        uint32_t rows = task.tokens * p.heads_at_once;
        uint64_t part = uint64_t(task.part) + uint64_t(index % head_tiles) * rows;
        cached.fold.put(p.ml + 2 * part, p.parts + part * DIM, rows);
    }
}

// A thread block of one warp per row and head tile.
template <typename T, int DIM> DEVICE void attend_cached_rows(const AttendCached& p) {
    SHARED(shared);
    const PlanHeader& header = *reinterpret_cast<const PlanHeader*>(p.plan);
    uint32_t row_index = blockIdx.x;
    HeadTile heads = head_tile(blockIdx.y, p.num_heads, p.num_kv_heads, p.heads_at_once, p.head_tiles);
    T* out = static_cast<T*>(p.out) + uint64_t(row_index) * p.out_stride;
    if (row_index >= uint32_t(header.rows)) {
        for (uint32_t i = threadIdx.x; i < heads.count * p.dim; i += blockDim.x) {
            out[heads.first * p.dim + i] = from_f32<T>(0.0f);
        }
        return;
    }
    const PlanRow& row = plan_rows(p)[row_index];
    Segment<T> own = cached_segment<T>(p, row, true, heads.kv);
    // Append the token. Several head tiles of a key head write the same values.
    uint32_t position = uint32_t(row.own_len) - 1;
    const T* new_key = static_cast<const T*>(p.qkv) + uint64_t(row_index) * p.stride + (p.num_heads + heads.kv) * p.dim;
    T* key = reinterpret_cast<T*>(own.pages[position / KEYS] + own.at) + position % KEYS * p.dim;
    keep_position(key, KEYS * p.dim, new_key, p.num_kv_heads * p.dim, p.dim, p.vector);
    CachedQueries<T> queries = {p, row_index, 1, heads};
    CachedFold<T, DIM> cached;
    cached.begin(queries, shared);
    uint32_t rows = p.heads_at_once;
#pragma unroll 1
    for (int of_own = 0; of_own < 2; of_own++) {
        uint64_t part = of_own ? uint64_t(row.own_part) + uint64_t(blockIdx.y) * rows
                               : uint64_t(row.prompt_part) + uint64_t(blockIdx.y) * row.prompt_rows + row.prompt_place;
        cached.take(p.ml + 2 * part, p.parts + part * DIM, rows, of_own ? row.own_parts : row.prompt_parts,
                    of_own ? row.own_step : row.prompt_step);
        uint32_t end = of_own ? position / KEYS + 1 : (uint32_t(row.prompt_len) + KEYS - 1) / KEYS;
        cached.run(queries, cached_segment<T>(p, row, of_own, heads.kv), of_own ? row.own_block : row.prompt_block, end,
                   of_own);
    }
    auto out_at = [&](uint32_t index) -> T* {
        QueryRow query = queries.at(index);
        return query.valid ? out + query.head * p.dim : nullptr;
    };
    auto no_lse = [](uint32_t) -> float* { return nullptr; };
    cached.fold.finish(out_at, no_lse, p.dim);
}

#define ATTEND_CACHED(name, T, DIM)                                                                                    \
    KERNEL_BOUNDS(attend_cached_tasks_##name##_##DIM, AttendCached, 32, 1) {                                           \
        let_next_start();                                                                                              \
        attend_cached_tasks<T, DIM>(p);                                                                                \
    }                                                                                                                  \
    KERNEL_BOUNDS(attend_cached_rows_##name##_##DIM, AttendCached, 32, 1) {                                            \
        let_next_start();                                                                                              \
        attend_cached_rows<T, DIM>(p);                                                                                 \
    }
ATTEND_CACHED(bf16, bf16, 32)
ATTEND_CACHED(bf16, bf16, 64)
ATTEND_CACHED(bf16, bf16, 128)
ATTEND_CACHED(bf16, bf16, 256)
ATTEND_CACHED(f32, float, 32)
ATTEND_CACHED(f32, float, 64)
ATTEND_CACHED(f32, float, 128)
ATTEND_CACHED(f32, float, 256)
