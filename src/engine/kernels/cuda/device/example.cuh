// The driver's own kernels: one that its tests and the others' begin from, and those that its tests need.

struct Scale {
    const float* x;
    float* y;
    float factor;
    uint32_t count;
};

// y = factor x, `count` elements, one a thread.
KERNEL(scale_f32, Scale) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < p.count) p.y[i] = p.x[i] * p.factor;
}

struct RowSum {
    const void* x;
    float* sums;
    uint32_t width;
    uint32_t pad;
};

template <typename T> DEVICE void row_sum(const RowSum& p) {
    SHARED_ARRAY(float, scratch, 32);
    const T* row = static_cast<const T*>(p.x) + size_t(blockIdx.x) * p.width;
    float sum = 0.0f;
    for (uint32_t i = threadIdx.x; i < p.width; i += blockDim.x) sum += to_f32(row[i]);
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) p.sums[blockIdx.x] = sum;
}

// The sum of each row: a block a row.
KERNEL(row_sum_f32, RowSum) { row_sum<float>(p); }
KERNEL(row_sum_bf16, RowSum) { row_sum<bf16>(p); }
