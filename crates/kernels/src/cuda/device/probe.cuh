// Kernels for the driver's own tests: they use the functions of prelude.cuh, so that a GPU and the
// emulator can be compared.

struct Scale {
    const float* x;
    float* y;
    float factor;
    uint32_t count;
};

// y = factor x, `count` elements, one per thread.
KERNEL(probe_scale, Scale) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < p.count) p.y[i] = p.x[i] * p.factor;
}

struct RowSum {
    const void* x;
    float* sums;
    float* largest;
    uint32_t width;
    uint32_t pad;
};

template <typename T> DEVICE void probe_rows(const RowSum& p) {
    SHARED_ARRAY(float, scratch, 32);
    const T* row = static_cast<const T*>(p.x) + size_t(blockIdx.x) * p.width;
    float sum = 0.0f;
    float largest = -INFINITY;
    for (uint32_t i = threadIdx.x * 4; i < p.width; i += blockDim.x * 4) {
        float part[4];
        load4(row + i, part);
        for (int j = 0; j < 4; j++) {
            sum += part[j];
            largest = fmaxf(largest, part[j]);
        }
    }
    sum = block_sum(sum, scratch);
    largest = block_max(largest, scratch);
    if (threadIdx.x == 0) {
        p.sums[blockIdx.x] = sum;
        p.largest[blockIdx.x] = largest;
    }
}

// The sum and the largest element of each row, one block per row; the width is a multiple of 4.
KERNEL(probe_rows_f32, RowSum) { probe_rows<float>(p); }
KERNEL(probe_rows_bf16, RowSum) { probe_rows<bf16>(p); }

struct Shuffles {
    uint32_t* out;
};

// The values that each lane of a warp receives from each collective: 8 per lane.
KERNEL(probe_shuffles, Shuffles) {
    uint32_t lane = lane_id();
    uint32_t* out = p.out + threadIdx.x * 8;
    uint32_t own = 100 + threadIdx.x;
    out[0] = __shfl_xor_sync(FULL, own, 5);
    out[1] = __shfl_sync(FULL, own, 7);
    out[2] = __shfl_down_sync(FULL, own, 3);
    out[3] = __shfl_up_sync(FULL, own, 3);
    out[4] = __ballot_sync(FULL, lane % 3 == 0);
    out[5] = __any_sync(FULL, own == 105) ? 1 : 0;
    out[6] = __all_sync(FULL, own >= 100) ? 1 : 0;
    out[7] = uint32_t(warp_sum(float(lane)));
}

struct Tiles {
    const bf16* a;
    const bf16* b;
    const bf16* b_columns;
    float* d;
    float* d_columns;
    uint32_t* pairs;
};

// D = A B in two ways: with B as (k, n) rows through transposed matrices, and as (n, k) rows. A is 16 x 16, B 16
// x 8. One warp.
KERNEL(probe_tiles, Tiles) {
    SHARED(memory);
    bf16* a = reinterpret_cast<bf16*>(memory);
    bf16* b = a + 16 * 16;
    bf16* b_columns = b + 16 * 8;
    uint32_t lane = lane_id();
    cp_async16(a + lane * 8, p.a + lane * 8);
    cp_async_commit();
    if (lane < 16) cp_async16(b + lane * 8, p.b + lane * 8);
    if (lane < 16) cp_async16(b_columns + lane * 8, p.b_columns + lane * 8, p.b_columns != nullptr);
    cp_async_commit();
    cp_async_wait<1>();
    __syncwarp();
    uint32_t ra[4];
    ldmatrix_x4(ra, a + (lane % 16) * 16 + (lane / 16) * 8);
    cp_async_wait<0>();
    __syncwarp();
    uint32_t rb[2];
    float d[4] = {};
    ldmatrix_x2_trans(rb, b + (lane % 16) * 8);
    mma_m16n8k16_bf16(d, ra, rb);
    uint32_t g = lane / 4, t = lane % 4;
    for (uint32_t i = 0; i < 4; i++) p.d[(g + 8 * (i / 2)) * 8 + 2 * t + i % 2] = d[i];
    float e[4] = {};
    ldmatrix_x2(rb, b_columns + (lane % 8) * 16 + (lane / 8 % 2) * 8);
    mma_m16n8k16_bf16(e, ra, rb);
    for (uint32_t i = 0; i < 4; i++) p.d_columns[(g + 8 * (i / 2)) * 8 + 2 * t + i % 2] = e[i];
    uint32_t rt[4];
    ldmatrix_x4_trans(rt, a + (lane % 16) * 16 + (lane / 16) * 8);
    for (uint32_t i = 0; i < 4; i++) p.pairs[lane * 4 + i] = rt[i];
}

struct Roundings {
    const float* x;
    uint32_t* packed;
    bf16* rounded;
    float* widened;
};

// Pairs of a warp's 64 numbers as bf16: packed in a word, one by one, and widened again.
KERNEL(probe_roundings, Roundings) {
    uint32_t i = threadIdx.x * 2;
    p.packed[threadIdx.x] = pack_bf16(p.x[i], p.x[i + 1]);
    p.rounded[i] = to_bf16(p.x[i]);
    p.rounded[i + 1] = from_f32<bf16>(p.x[i + 1]);
    p.widened[i] = low_bf16(p.packed[threadIdx.x]);
    p.widened[i + 1] = to_f32(p.rounded[i + 1]);
}

struct Counts {
    uint32_t* blocks;
    int* threads;
};

// Records which blocks ran, and the total number of threads.
KERNEL_BOUNDS(probe_counts, Counts, 64, 1) {
    atomicAdd(p.threads, 1);
    if (threadIdx.x == 0) {
        uint32_t block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
        p.blocks[block] = 1 + block;
    }
}

struct Neighbors {
    const float* x;
    float* y;
    uint32_t rounds;
    uint32_t pad;
};

// Each thread adds its neighbor's value, `rounds` times, through 4 bytes of dynamic shared memory per thread.
KERNEL(probe_neighbors, Neighbors) {
    SHARED(memory);
    float* values = reinterpret_cast<float*>(memory);
    float own = p.x[threadIdx.x];
    for (uint32_t round = 0; round < p.rounds; round++) {
        values[threadIdx.x] = own;
        __syncthreads();
        own += values[(threadIdx.x + 1) % blockDim.x];
        __syncthreads();
    }
    p.y[threadIdx.x] = own;
}
