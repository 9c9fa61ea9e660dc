// The part of CUDA that kernels may use. The same sources compile with nvcc, and with the C++ compiler and
// testing/emulator/emulator.h, which runs the threads of a block as fibers. Both offer only what is listed here.
//
//   struct Scale { const float* x; float* y; float factor; uint32_t count; };   // 8-byte members first, no padding
//   KERNEL(scale_f32, Scale) {
//       uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
//       if (i < p.count) p.y[i] = p.x[i] * p.factor;
//   }
//
// KERNEL(name, Params)              a kernel with one parameter, `p`; launched by its name
// KERNEL_BOUNDS(name, Params, t, b) the same, at most t threads per block, at least b blocks per multiprocessor
// KERNEL_AHEAD(name, Params, t, b)  the same, but its body must call wait_for_earlier_work() itself
// wait_for_earlier_work()           waits for all work that was submitted earlier; every kernel begins with it. A kernel may
//                                   start while the one before it runs; before it waits, it may only read memory that is
//                                   older than that one.
// let_next_start()                  the next kernel may start from now on, if there is room on the device. Only after
//                                   wait_for_earlier_work(), and only in kernels whose results are activations
// DEVICE                            a function that kernels call: `template <typename T> DEVICE float square(T x)`
// SHARED(name)                      the dynamic shared memory: `unsigned char*`, aligned to 16 bytes
// SHARED_ARRAY(type, name, n)       a static shared array (a pointer in the emulator: no sizeof)
//
// Blocks have one dimension (threadIdx.x, blockDim.x), a multiple of 32 threads, at most 1024; grids up to three.
// Collectives of a warp (__shfl_*_sync, __ballot_sync, __any_sync, __all_sync, __syncwarp, ldmatrix_*, mma_*) take the
// full mask FULL, and all 32 lanes must reach the same one. The emulator rejects anything else, fills shared memory
// with 0xff (NaN) before each block, and runs threads in an order that changes at each barrier, so that a missing
// barrier becomes visible.
#pragma once

#ifdef RLOOD_EMULATOR
#include "../../../testing/emulator/emulator.h"
#else
#include <math.h>
#include <stdint.h>
#define DEVICE static __device__ __forceinline__
#define DEVICE_SPECIAL __device__ __forceinline__
#define CHECK_ALIGNED(address, bytes) (void)0
#define KERNEL_OF(name, Params, bounds)                                                                                \
    DEVICE void body_of_##name(const Params& p);                                                                       \
    extern "C" __global__ void bounds name(const Params p) {                                                           \
        wait_for_earlier_work();                                                                                       \
        body_of_##name(p);                                                                                             \
    }                                                                                                                  \
    DEVICE void body_of_##name(const Params& p)
#define KERNEL(name, Params) KERNEL_OF(name, Params, )
#define KERNEL_BOUNDS(name, Params, threads, blocks) KERNEL_OF(name, Params, __launch_bounds__(threads, blocks))
#define KERNEL_AHEAD(name, Params, threads, blocks)                                                                    \
    extern "C" __global__ void __launch_bounds__(threads, blocks) name(const Params p)
#define SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#define SHARED_ARRAY(type, name, n) __shared__ __align__(16) type name[n]
#endif

DEVICE void wait_for_earlier_work() {
#if !defined(RLOOD_EMULATOR) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

DEVICE void let_next_start() {
#if !defined(RLOOD_EMULATOR) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#define FULL 0xffffffffu
#define WARP 32u

// bfloat16 as its bits.
struct bf16 {
    uint16_t bits;
};

// Index of the lane in its warp, and of the warp in its block.
DEVICE uint32_t lane_id() { return threadIdx.x & 31u; }
DEVICE uint32_t warp_id() { return threadIdx.x >> 5; }

DEVICE float to_f32(float x) { return x; }
DEVICE float to_f32(bf16 x) { return __uint_as_float(uint32_t(x.bits) << 16); }

// Packs two bf16 into a register, `lo` in the lower half, rounded to nearest even.
DEVICE uint32_t pack_bf16(float lo, float hi) {
#ifdef RLOOD_EMULATOR
    return uint32_t(emulator::round_bf16(lo)) | uint32_t(emulator::round_bf16(hi)) << 16;
#else
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(hi), "f"(lo));
    return packed;
#endif
}

DEVICE bf16 to_bf16(float x) {
    bf16 y;
    y.bits = uint16_t(pack_bf16(x, 0.0f));
    return y;
}

// Converts to the type of a tensor, rounded to nearest even: `from_f32<T>(x)`.
template <typename T> DEVICE T from_f32(float x);
template <> DEVICE_SPECIAL float from_f32<float>(float x) { return x; }
template <> DEVICE_SPECIAL bf16 from_f32<bf16>(float x) { return to_bf16(x); }

// The lower and the upper bf16 of a register.
DEVICE float low_bf16(uint32_t packed) { return __uint_as_float(packed << 16); }
DEVICE float high_bf16(uint32_t packed) { return __uint_as_float(packed & 0xffff0000u); }

// Groups of 16, 8 and 4 bytes that are read with one access; the address must be aligned accordingly.
struct alignas(16) Words4 {
    uint32_t at[4];
};
struct alignas(8) Words2 {
    uint32_t at[2];
};

DEVICE Words4 load_words4(const void* from) {
    CHECK_ALIGNED(from, 16);
#ifdef RLOOD_EMULATOR
    Words4 words;
    __builtin_memcpy(&words, from, 16);
    return words;
#else
    uint4 v = *reinterpret_cast<const uint4*>(from);
    Words4 words = {{v.x, v.y, v.z, v.w}};
    return words;
#endif
}

DEVICE Words2 load_words2(const void* from) {
    CHECK_ALIGNED(from, 8);
#ifdef RLOOD_EMULATOR
    Words2 words;
    __builtin_memcpy(&words, from, 8);
    return words;
#else
    uint2 v = *reinterpret_cast<const uint2*>(from);
    Words2 words = {{v.x, v.y}};
    return words;
#endif
}

DEVICE uint32_t load_word(const void* from) {
    CHECK_ALIGNED(from, 4);
#ifdef RLOOD_EMULATOR
    uint32_t word;
    __builtin_memcpy(&word, from, 4);
    return word;
#else
    return *reinterpret_cast<const uint32_t*>(from);
#endif
}

DEVICE void store_words4(void* to, Words4 words) {
    CHECK_ALIGNED(to, 16);
#ifdef RLOOD_EMULATOR
    __builtin_memcpy(to, &words, 16);
#else
    *reinterpret_cast<uint4*>(to) = make_uint4(words.at[0], words.at[1], words.at[2], words.at[3]);
#endif
}

DEVICE void store_words2(void* to, Words2 words) {
    CHECK_ALIGNED(to, 8);
#ifdef RLOOD_EMULATOR
    __builtin_memcpy(to, &words, 8);
#else
    *reinterpret_cast<uint2*>(to) = make_uint2(words.at[0], words.at[1]);
#endif
}

DEVICE void store_word(void* to, uint32_t word) {
    CHECK_ALIGNED(to, 4);
#ifdef RLOOD_EMULATOR
    __builtin_memcpy(to, &word, 4);
#else
    *reinterpret_cast<uint32_t*>(to) = word;
#endif
}

// Reads four or eight values of a tensor as f32; addresses must be aligned to 16 bytes (four bf16: to 8).
DEVICE void load4(const float* from, float* to) {
    Words4 words = load_words4(from);
    for (int i = 0; i < 4; i++) to[i] = __uint_as_float(words.at[i]);
}
DEVICE void load4(const bf16* from, float* to) {
    Words2 words = load_words2(from);
    for (int i = 0; i < 2; i++) to[2 * i] = low_bf16(words.at[i]), to[2 * i + 1] = high_bf16(words.at[i]);
}
DEVICE void load8(const float* from, float* to) {
    load4(from, to);
    load4(from + 4, to + 4);
}
DEVICE void load8(const bf16* from, float* to) {
    Words4 words = load_words4(from);
    for (int i = 0; i < 4; i++) to[2 * i] = low_bf16(words.at[i]), to[2 * i + 1] = high_bf16(words.at[i]);
}
DEVICE void store4(float* to, const float* from) {
    Words4 words = {{__float_as_uint(from[0]), __float_as_uint(from[1]), __float_as_uint(from[2]),
                     __float_as_uint(from[3])}};
    store_words4(to, words);
}
DEVICE void store4(bf16* to, const float* from) {
    Words2 words = {{pack_bf16(from[0], from[1]), pack_bf16(from[2], from[3])}};
    store_words2(to, words);
}
DEVICE void store8(float* to, const float* from) {
    store4(to, from);
    store4(to + 4, from + 4);
}
DEVICE void store8(bf16* to, const float* from) {
    Words4 words = {{pack_bf16(from[0], from[1]), pack_bf16(from[2], from[3]), pack_bf16(from[4], from[5]),
                     pack_bf16(from[6], from[7])}};
    store_words4(to, words);
}

#ifndef RLOOD_EMULATOR

// Copies 16 bytes from global to shared memory without a register, both aligned to 16; writes zeros if `valid` is false
// (the source is then not read). The copy is complete for the copying thread after cp_async_wait, and for other threads
// after an additional barrier.
DEVICE void cp_async16(void* shared, const void* global, bool valid = true) {
    uint32_t to = uint32_t(__cvta_generic_to_shared(shared));
    int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(bytes) : "memory");
}
// Copies 4 bytes from global to shared memory; both addresses must be aligned to 4.
DEVICE void cp_async4(void* shared, const void* global) {
    uint32_t to = uint32_t(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(global) : "memory");
}
// Commits the copies since the last commit as a group.
DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most N of the latest groups of copies are in progress.
template <int N> DEVICE void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// Loads matrices of 8 x 8 bf16 from shared memory, one row of 16 bytes per address: lane 8 i + r gives row r of
// matrix i. Lane l receives in r[i] the elements (l / 4, 2 (l % 4)) and the one after it; transposed, (2 (l % 4), l /
// 4) and the one below.
DEVICE void ldmatrix_x4(uint32_t r[4], const void* shared) {
    uint32_t at = uint32_t(__cvta_generic_to_shared(shared));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}
DEVICE void ldmatrix_x2(uint32_t r[2], const void* shared) {
    uint32_t at = uint32_t(__cvta_generic_to_shared(shared));
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(at)
                 : "memory");
}
DEVICE void ldmatrix_x4_trans(uint32_t r[4], const void* shared) {
    uint32_t at = uint32_t(__cvta_generic_to_shared(shared));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}
DEVICE void ldmatrix_x2_trans(uint32_t r[2], const void* shared) {
    uint32_t at = uint32_t(__cvta_generic_to_shared(shared));
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(at)
                 : "memory");
}

// d (16 x 8, f32) += a (16 x 16) b (16 x 8). With g = lane / 4 and t = lane % 4, pairs along k (a) and k (b): a[0] =
// (g, 2t), a[1] = (g + 8, 2t), a[2] = (g, 2t + 8), a[3] = (g + 8, 2t + 8); b[0] = (k 2t, n g), b[1] = (k 2t + 8, n g);
// d[0] = (g, 2t), d[1] = (g, 2t + 1), d[2] = (g + 8, 2t), d[3] = (g + 8, 2t + 1).
DEVICE void mma_m16n8k16_bf16(float d[4], const uint32_t a[4], const uint32_t b[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#endif

// The sum and the largest value of a warp, in every lane; the order is fixed and the same for all lanes.
DEVICE float warp_sum(float x) {
    for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(FULL, x, step);
    return x;
}
DEVICE float warp_max(float x) {
    for (int step = 16; step > 0; step >>= 1) x = fmaxf(x, __shfl_xor_sync(FULL, x, step));
    return x;
}

// The sum and the largest value of a block, in every thread. `scratch` is 32 floats of shared memory; there are
// barriers before and after, so the scratch can be reused immediately.
DEVICE float block_sum(float x, float* scratch) {
    x = warp_sum(x);
    __syncthreads();
    if (lane_id() == 0) scratch[warp_id()] = x;
    __syncthreads();
    float sum = warp_sum(lane_id() < blockDim.x / WARP ? scratch[lane_id()] : 0.0f);
    __syncthreads();
    return sum;
}
DEVICE float block_max(float x, float* scratch) {
    x = warp_max(x);
    __syncthreads();
    if (lane_id() == 0) scratch[warp_id()] = x;
    __syncthreads();
    float largest = warp_max(lane_id() < blockDim.x / WARP ? scratch[lane_id()] : -INFINITY);
    __syncthreads();
    return largest;
}

// Reads like load_words4, for data that no other block reads and no kernel writes meanwhile: does not
// occupy the multiprocessor's cache.
DEVICE Words4 load_words4_once(const void* from) {
#ifdef RLOOD_EMULATOR
    return load_words4(from);
#else
    Words4 words;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.at[0]), "=r"(words.at[1]), "=r"(words.at[2]), "=r"(words.at[3])
                 : "l"(from));
    return words;
#endif
}
