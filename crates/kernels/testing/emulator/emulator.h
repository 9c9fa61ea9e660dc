// The part of CUDA that kernels use (device/prelude.cuh), on the CPU: the threads of a block are fibers of one thread
// of the process, and blocks run one after another. For tests: slow, and stricter than a GPU. A missing barrier shows
// in the values only if the order of the threads happens to matter; races.cpp finds all of them.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define DEVICE static inline
#define DEVICE_SPECIAL inline
#define CHECK_ALIGNED(address, bytes) emulator::check_aligned(address, bytes, __LINE__)
#define KERNEL(name, Params) KERNEL_BOUNDS(name, Params, 1024, 1)
#define KERNEL_BOUNDS(name, Params, threads, blocks)                                                                   \
    static void name(const Params& p);                                                                                 \
    static const emulator::Registration registration_of_##name(                                                        \
        #name, sizeof(Params), [](const void* params) { name(*static_cast<const Params*>(params)); }, threads);        \
    static void name([[maybe_unused]] const Params& p)
#define KERNEL_AHEAD(name, Params, threads, blocks) KERNEL_BOUNDS(name, Params, threads, blocks)
#define SHARED(name) unsigned char* const name = emulator::dynamic_shared()
#define SHARED_ARRAY(type, name, n)                                                                                    \
    type* const name = static_cast<type*>(emulator::static_shared(                                                     \
        []() -> const void* {                                                                                          \
            static const char tag = 0;                                                                                 \
            return &tag;                                                                                               \
        }(),                                                                                                           \
        sizeof(type) * (n)))

namespace emulator {

struct Dim {
    uint32_t x, y, z;
};

using Body = void (*)(const void*);

// Registers a kernel by its name.
struct Registration {
    Registration(const char* name, size_t param_bytes, Body body, uint32_t most_threads);
};

// The values that a lane passes to a collective and receives from it.
struct Slot {
    uint64_t value;
    uint32_t lane;
    uint32_t a[4];
    uint32_t b[2];
    float d[4];
    const void* address;
    bool transposed;
};

enum class Collective : uint8_t { None, Block, Sync, Shuffle, Ballot, Matrices2, Matrices4, Product };

// The slot of the running GPU thread.
Slot& slot();
// Waits until every lane of the warp, or every thread of the block, has reached the same place.
void meet(Collective kind, uint32_t mask, int line);

unsigned char* dynamic_shared();
void* static_shared(const void* tag, size_t bytes);
void check_aligned(const void* address, size_t bytes, int line);
void copy_later(void* shared, const void* global, uint32_t bytes, bool valid);
void copy_commit();
void copy_wait(int groups);

inline uint16_t round_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

template <typename T> T shuffle(uint32_t mask, T value, uint32_t lane, int line) {
    static_assert(sizeof(T) <= 8, "a shuffle moves up to 8 bytes");
    slot().value = 0;
    std::memcpy(&slot().value, &value, sizeof(T));
    slot().lane = lane;
    meet(Collective::Shuffle, mask, line);
    std::memcpy(&value, &slot().value, sizeof(T));
    return value;
}

inline uint32_t ballot(uint32_t mask, bool predicate, int line) {
    slot().value = predicate;
    meet(Collective::Ballot, mask, line);
    return uint32_t(slot().value);
}

inline void matrices(uint32_t* r, int count, const void* address, bool transposed, int line) {
    slot().address = address;
    slot().transposed = transposed;
    meet(count == 4 ? Collective::Matrices4 : Collective::Matrices2, 0xffffffffu, line);
    for (int i = 0; i < count; i++) r[i] = slot().a[i];
}

inline void product(float* d, const uint32_t* a, const uint32_t* b, int line) {
    Slot& own = slot();
    std::memcpy(own.d, d, 16);
    std::memcpy(own.a, a, 16);
    std::memcpy(own.b, b, 8);
    meet(Collective::Product, 0xffffffffu, line);
    std::memcpy(d, own.d, 16);
}

}  // namespace emulator

extern thread_local emulator::Dim threadIdx, blockIdx, blockDim, gridDim;

inline uint32_t emulated_lane() { return threadIdx.x & 31u; }

#ifdef RLOOD_EMULATOR_ROUNDS_LIKE_A_GPU
// Functions that are not exact differ from the host's in their last bits, as on a GPU: by up to `ulps`, the same
// for the same argument.
inline float emulated_near(float y, float x, int32_t ulps) {
    uint32_t bits, seed;
    std::memcpy(&bits, &y, 4);
    std::memcpy(&seed, &x, 4);
    uint32_t exponent = bits >> 23 & 0xffu;
    if (x == 0.0f || y == 0.0f || exponent < 2 || exponent > 0xfdu) return y;
    seed = (seed ^ seed >> 15) * 0x2c1b3c6du;
    bits = uint32_t(int32_t(bits) + int32_t((seed ^ seed >> 13) % uint32_t(2 * ulps + 1)) - ulps);
    std::memcpy(&y, &bits, 4);
    return y;
}
inline float emulated_expf(float x) { return emulated_near(expf(x), x, 1); }
inline float emulated_exp2f(float x) { return emulated_near(exp2f(x), x, 2); }
inline float emulated_log2f(float x) { return x == 1.0f ? 0.0f : emulated_near(log2f(x), x, 1); }
#define expf emulated_expf
#define exp2f emulated_exp2f
#define log2f emulated_log2f
#endif

#define __syncthreads() emulator::meet(emulator::Collective::Block, 0xffffffffu, __LINE__)
#define __syncwarp() emulator::meet(emulator::Collective::Sync, 0xffffffffu, __LINE__)
#define __shfl_sync(mask, value, lane) emulator::shuffle(mask, value, uint32_t(lane) & 31u, __LINE__)
#define __shfl_xor_sync(mask, value, bits) emulator::shuffle(mask, value, (emulated_lane() ^ uint32_t(bits)) & 31u, __LINE__)
#define __shfl_down_sync(mask, value, n)                                                                               \
    emulator::shuffle(mask, value, emulated_lane() + (n) > 31u ? emulated_lane() : emulated_lane() + (n), __LINE__)
#define __shfl_up_sync(mask, value, n)                                                                                 \
    emulator::shuffle(mask, value, emulated_lane() < uint32_t(n) ? emulated_lane() : emulated_lane() - (n), __LINE__)
#define __ballot_sync(mask, predicate) emulator::ballot(mask, predicate, __LINE__)
#define __any_sync(mask, predicate) (emulator::ballot(mask, predicate, __LINE__) != 0)
#define __all_sync(mask, predicate) (emulator::ballot(mask, predicate, __LINE__) == 0xffffffffu)
#define ldmatrix_x4(r, shared) emulator::matrices(r, 4, shared, false, __LINE__)
#define ldmatrix_x2(r, shared) emulator::matrices(r, 2, shared, false, __LINE__)
#define ldmatrix_x4_trans(r, shared) emulator::matrices(r, 4, shared, true, __LINE__)
#define ldmatrix_x2_trans(r, shared) emulator::matrices(r, 2, shared, true, __LINE__)
#define mma_m16n8k16_bf16(d, a, b) emulator::product(d, a, b, __LINE__)

inline void cp_async16(void* shared, const void* global, bool valid = true) {
    emulator::copy_later(shared, global, 16, valid);
}
inline void cp_async4(void* shared, const void* global) { emulator::copy_later(shared, global, 4, true); }
inline void cp_async_commit() { emulator::copy_commit(); }
template <int N> inline void cp_async_wait() { emulator::copy_wait(N); }

#ifdef RLOOD_EMULATOR_RACES
#include "races.h"
#define ATOMIC __attribute__((noinline, no_sanitize("thread"))) inline
#define ATOMICALLY(at) emulator::races::atomic(at, 4, __builtin_return_address(0))
#else
#define ATOMIC inline
#define ATOMICALLY(at) (void)0
#endif
ATOMIC int atomicAdd(int* at, int value) {
    ATOMICALLY(at);
    int before = *at;
    *at = before + value;
    return before;
}
ATOMIC uint32_t atomicAdd(uint32_t* at, uint32_t value) {
    ATOMICALLY(at);
    uint32_t before = *at;
    *at = before + value;
    return before;
}
inline void __threadfence() {}

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline uint32_t __float_as_uint(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}
inline float __uint_as_float(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(uint32_t x) { return x == 0 ? 32 : __builtin_clz(x); }
template <typename T> inline T __ldg(const T* at) { return *at; }
template <typename T> inline T min(T a, T b) { return b < a ? b : a; }
template <typename T> inline T max(T a, T b) { return a < b ? b : a; }
