// Kernels with races that the emulator's order of threads need not reveal, and some without, for the tests of the race
// detector. Two blocks of 64 threads; buffers of 64 floats; 1 KiB of shared memory.

// Both blocks write the same places.
KERNEL(wrong_blocks_write, Wrong) { p.y[threadIdx.x] = float(blockIdx.x); }
KERNEL(wrong_blocks_write_the_same, Wrong) { p.y[threadIdx.x] = p.x[threadIdx.x]; }

// One block reads values that the other writes, in either order.
KERNEL(wrong_block_reads_what_another_wrote, Wrong) {
    if (blockIdx.x == 0) p.y[threadIdx.x] = p.x[threadIdx.x];
    if (blockIdx.x == 1 && p.y[threadIdx.x] == -1.0f) p.y[0] = 2.0f;
}
KERNEL(wrong_block_writes_what_another_read, Wrong) {
    if (blockIdx.x == 0 && p.y[threadIdx.x] == -1.0f) p.y[0] = 2.0f;
    if (blockIdx.x == 1) p.y[threadIdx.x] = p.x[threadIdx.x];
}

// A count that is not atomic; and an atomic one that all threads read.
KERNEL(wrong_count, Wrong) { p.y[0] += 1.0f; }
KERNEL(wrong_read_of_a_count, Wrong) {
    int* count = reinterpret_cast<int*>(p.y);
    atomicAdd(count, 1);
    if (*count < 0) p.y[1] = 1.0f;
}

// Through global memory, without a barrier.
KERNEL(wrong_global_neighbor, Wrong) {
    float* y = p.y + blockIdx.x * 32;
    y[threadIdx.x % 32] = 1.0f;
    if (threadIdx.x >= 32) y[31 - threadIdx.x % 32] = 2.0f;
}

// Lanes of a warp: without anything in between; with a shuffle, which does not order memory; with a matrix load of
// values that lanes wrote.
KERNEL(wrong_within_a_warp, Wrong) {
    SHARED_ARRAY(float, values, 64);
    values[threadIdx.x] = p.x[threadIdx.x];
    if (blockIdx.x == 0) p.y[threadIdx.x] = values[threadIdx.x ^ 1];
}
KERNEL(wrong_shuffle_for_a_barrier, Wrong) {
    SHARED_ARRAY(float, values, 64);
    values[threadIdx.x] = p.x[threadIdx.x];
    float other = __shfl_xor_sync(FULL, 1.0f, 1);
    if (blockIdx.x == 0) p.y[threadIdx.x] = values[threadIdx.x ^ 1] + other;
}
KERNEL(wrong_matrix_of_lanes, Wrong) {
    SHARED(memory);
    store_words4(memory + threadIdx.x * 16, load_words4(p.x + threadIdx.x % 4 * 4));
    uint32_t r[4];
    ldmatrix_x4(r, memory + threadIdx.x * 16);
    if (blockIdx.x == 0) p.y[threadIdx.x] = float(r[0]);
}

// Lane 0 writes for both warps.
KERNEL(wrong_syncwarp_for_a_barrier, Wrong) {
    SHARED_ARRAY(float, values, 2);
    if (threadIdx.x == 0) values[0] = p.x[0];
    __syncwarp();
    if (blockIdx.x == 0) p.y[threadIdx.x] = values[0];
}

// A ring of copies: `barrier` says in which round threads wait for each other before they refill what they have read.
template <class Barrier> DEVICE void ring_of_copies(const Wrong& p, const Barrier& barrier) {
    SHARED(memory);
    float* rings = reinterpret_cast<float*>(memory);
    auto fetch = [&](uint32_t round) {
        if (threadIdx.x < 16) cp_async16(rings + round % 2 * 64 + threadIdx.x * 4, p.x + threadIdx.x * 4);
        cp_async_commit();
    };
    float sum = 0.0f;
    fetch(0);
    for (uint32_t round = 0; round < 6; round++) {
        if (barrier(round)) __syncthreads();
        if (round < 5) fetch(round + 1);
        if (round < 5) cp_async_wait<1>();
        else cp_async_wait<0>();
        __syncthreads();
        sum += rings[round % 2 * 64 + 63 - threadIdx.x];
    }
    if (blockIdx.x == 0) p.y[threadIdx.x] = sum;
}
KERNEL(right_ring_of_copies, Wrong) {
    ring_of_copies(p, [](uint32_t) { return true; });
}
KERNEL(wrong_refill, Wrong) {
    ring_of_copies(p, [](uint32_t) { return false; });
}
KERNEL(wrong_refill_in_the_third_round, Wrong) {
    ring_of_copies(p, [](uint32_t round) { return round != 3; });
}

// Waits, but not for the copies of all threads; reads its own copy before it waits.
KERNEL(wrong_copy_of_another, Wrong) {
    SHARED(memory);
    float* values = reinterpret_cast<float*>(memory);
    if (threadIdx.x < 16) cp_async16(values + threadIdx.x * 4, p.x + threadIdx.x * 4);
    cp_async_wait<0>();
    if (blockIdx.x == 0) p.y[threadIdx.x] = values[63 - threadIdx.x];
}
KERNEL(wrong_own_copy_too_early, Wrong) {
    SHARED(memory);
    float* values = reinterpret_cast<float*>(memory);
    cp_async4(values + threadIdx.x, p.x + threadIdx.x);
    cp_async_commit();
    if (blockIdx.x == 0) p.y[threadIdx.x] = values[threadIdx.x];
    cp_async_wait<0>();
}

// Everything that is permitted: barriers, lanes with __syncwarp, atomic counts, blocks that read values
// that no block writes.
KERNEL(right_kernel, Wrong) {
    SHARED_ARRAY(float, values, 64);
    SHARED(memory);
    for (int round = 0; round < 3; round++) {
        values[threadIdx.x] = p.x[threadIdx.x];
        __syncthreads();
        float sum = block_sum(values[63 - threadIdx.x] + p.x[0], reinterpret_cast<float*>(memory));
        values[threadIdx.x] = sum;
        __syncwarp();
        sum += values[threadIdx.x ^ 1];
        __syncwarp();
        values[threadIdx.x ^ 1] = sum;
        __syncthreads();
        if (threadIdx.x / 32 == blockIdx.x) p.y[threadIdx.x] = values[threadIdx.x];
    }
    if (threadIdx.x == 32 * blockIdx.x) atomicAdd(reinterpret_cast<int*>(p.y) + threadIdx.x, 0);
}
KERNEL(right_count, Wrong) { atomicAdd(reinterpret_cast<int*>(p.y), 1); }
