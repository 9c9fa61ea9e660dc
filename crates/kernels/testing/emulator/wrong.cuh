// Wrong kernels, each with one error, for the tests of the emulator. Never compiled for a GPU.

struct Wrong {
    const float* x;
    float* y;
    uint32_t count;
    uint32_t pad;
};

KERNEL(wrong_write_beyond, Wrong) { p.y[p.count] = 1.0f; }
KERNEL(wrong_write_before, Wrong) { p.y[-1] = 1.0f; }
KERNEL(wrong_read_beyond, Wrong) { p.y[0] = p.x[p.count]; }

KERNEL(wrong_missing_barrier, Wrong) {
    SHARED_ARRAY(float, values, 64);
    values[threadIdx.x] = p.x[threadIdx.x];
    p.y[threadIdx.x] = values[(threadIdx.x + 1) % 64];
}

// Without the barrier a thread may overwrite a value that its neighbor has not read yet.
KERNEL(wrong_missing_second_barrier, Wrong) {
    SHARED_ARRAY(float, values, 64);
    values[threadIdx.x] = p.x[threadIdx.x];
    __syncthreads();
    float next = values[(threadIdx.x + 1) % 64];
    values[threadIdx.x] = -next;
    __syncthreads();
    p.y[threadIdx.x] = values[threadIdx.x] + values[(threadIdx.x + 1) % 64] * 0.0f + next * 2.0f;
}

KERNEL(wrong_divergent_shuffle, Wrong) {
    float x = 0.0f;
    if (threadIdx.x < 16) x = __shfl_xor_sync(FULL, 1.0f, 1);
    p.y[threadIdx.x % p.count] = x;
}

KERNEL(wrong_two_shuffles, Wrong) {
    float x = 0.0f;
    if (threadIdx.x < 16) {
        x = __shfl_xor_sync(FULL, 1.0f, 1);
    } else {
        x = __shfl_xor_sync(FULL, 2.0f, 1);
    }
    p.y[threadIdx.x % p.count] = x;
}

KERNEL_BOUNDS(wrong_bounds, Wrong, 32, 1) { p.y[threadIdx.x % p.count] = 0.0f; }

KERNEL(wrong_part_of_a_warp, Wrong) { p.y[threadIdx.x % p.count] = __shfl_xor_sync(0xffffu, 1.0f, 1); }

KERNEL(wrong_barrier_of_some, Wrong) {
    if (threadIdx.x < 32) __syncthreads();
    p.y[threadIdx.x % p.count] = 0.0f;
}

KERNEL(wrong_shared_beyond, Wrong) {
    SHARED(memory);
    reinterpret_cast<float*>(memory)[threadIdx.x + 1] = p.x[0];
}

KERNEL(wrong_static_beyond, Wrong) {
    SHARED_ARRAY(float, values, 31);
    values[threadIdx.x] = p.x[0];
}

KERNEL(wrong_unaligned, Wrong) {
    float four[4];
    load4(p.x + 1, four);
    p.y[0] = four[0];
}

KERNEL(wrong_copy_without_wait, Wrong) {
    SHARED(memory);
    float* values = reinterpret_cast<float*>(memory);
    cp_async16(values + threadIdx.x * 4, p.x + threadIdx.x % 4 * 4);
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();
    p.y[threadIdx.x % p.count] = values[0];
}

KERNEL(wrong_unwritten_shared, Wrong) {
    SHARED(memory);
    p.y[threadIdx.x % p.count] = reinterpret_cast<float*>(memory)[threadIdx.x];
}
