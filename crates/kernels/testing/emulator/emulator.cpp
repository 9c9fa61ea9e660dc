// Runs kernels on the CPU: see emulator.h. Called from ../emulated.rs.
//
// Longer than other files: fibers, barriers, shuffles and matrix instructions use the state of one block,
// which is private here.
#include "emulator.h"

#include <sys/mman.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <vector>

#ifdef RLOOD_EMULATOR_RACES
#include "races.h"
#define RACES(call) emulator::races::call
#else
#define RACES(call) (void)0
#endif

thread_local emulator::Dim threadIdx, blockIdx, blockDim, gridDim;

// Saves the registers that a call keeps on the stack, stores the stack pointer in `*from` and continues
// on the stack `to`.
extern "C" void rlood_emulator_switch(void** from, void* to);
#if defined(__x86_64__)
asm(R"(
.text
.globl rlood_emulator_switch
.type rlood_emulator_switch, @function
rlood_emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    popq %rcx
    jmpq *%rcx
.size rlood_emulator_switch, .-rlood_emulator_switch
)");
#elif defined(__aarch64__)
asm(R"(
.text
.globl rlood_emulator_switch
.type rlood_emulator_switch, @function
rlood_emulator_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
.size rlood_emulator_switch, .-rlood_emulator_switch
)");
#else
#error "the emulator knows how to switch stacks on x86-64 and aarch64 only"
#endif

namespace emulator {
namespace {

constexpr uint32_t MOST_THREADS = 1024;
constexpr uint32_t WARP_LANES = 32;
constexpr size_t STACK_BYTES = 256 << 10;
constexpr size_t PAGE_BYTES = 4096;
// Maximum shared memory of a block (compute capability 9.0), and the maximum without setting an attribute.
constexpr size_t SHARED_BYTES = 227 << 10;
constexpr size_t STATIC_BYTES = 48 << 10;
constexpr size_t GUARD_BYTES = 64;
constexpr unsigned char GUARD = 0xa5;
constexpr unsigned char UNWRITTEN = 0xff;

struct Kernel {
    const char* name;
    size_t param_bytes;
    Body body;
    uint32_t most_threads;
};

std::vector<Kernel>& kernels() {
    static std::vector<Kernel> all;
    return all;
}

struct Copy {
    void* to;
    const void* from;
    uint32_t bytes;
    uint32_t group;
};

struct Fiber {
    char* stack = nullptr;
    void* at = nullptr;
    Collective waits = Collective::None;
    bool done = false;
    int line = 0;
    uint32_t group = 0;
    std::vector<Copy> copies;
    Slot slot;
};

struct StaticArray {
    const void* tag;
    unsigned char* at;
    size_t bytes;
};

// The emulated multiprocessor that a thread of the process runs.
struct Machine {
    std::vector<Fiber> fibers;
    std::vector<StaticArray> arrays;
    std::vector<unsigned char> memory;
    unsigned char* shared = nullptr;
    size_t dynamic_bytes = 0;
    size_t used_bytes = 0;
    void* scheduler = nullptr;
    Fiber* running = nullptr;
    Body body = nullptr;
    const void* params = nullptr;
    size_t most_bytes = SHARED_BYTES;
    bool failed = false;
    char message[512] = {};

    Machine() {
        memory.resize(SHARED_BYTES + (64 << 10));
        auto address = reinterpret_cast<uintptr_t>(memory.data());
        shared = memory.data() + (128 - address % 128) % 128 + GUARD_BYTES * 2;
    }
    ~Machine() {
        for (Fiber& fiber : fibers) munmap(fiber.stack, STACK_BYTES);
    }

    bool prepare(uint32_t threads) {
        while (fibers.size() < threads) {
            void* stack = mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (stack == MAP_FAILED) return false;
            mprotect(stack, PAGE_BYTES, PROT_NONE);
            fibers.emplace_back();
            fibers.back().stack = static_cast<char*>(stack);
        }
        return true;
    }

    void enter(Fiber& fiber) {
        running = &fiber;
        threadIdx = {uint32_t(&fiber - fibers.data()), 0, 0};
        RACES(enter(threadIdx.x, fiber.stack, STACK_BYTES));
        rlood_emulator_switch(&scheduler, fiber.at);
        RACES(leave());
    }

    void leave() { rlood_emulator_switch(&running->at, scheduler); }

    __attribute__((format(printf, 2, 3))) void fail(const char* format, ...) {
        if (failed) return;
        failed = true;
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(message, sizeof message, format, arguments);
        va_end(arguments);
    }
};

// The multiprocessor of this thread, created at its first launch.
thread_local Machine* entered = nullptr;

Machine& machine() { return *entered; }

Machine& enter() {
    static thread_local Machine own;
    entered = &own;
    return own;
}

// Ends the running GPU thread, and with it the launch. Does not return.
[[noreturn]] void abandon() {
    Machine& m = machine();
    for (;;) m.leave();
}

void start() {
    Machine& m = machine();
    m.body(m.params);
    m.running->done = true;
    abandon();
}

void aim(Fiber& fiber) {
    auto top = reinterpret_cast<uintptr_t>(fiber.stack + STACK_BYTES);
    auto words = reinterpret_cast<uintptr_t*>(top);
#if defined(__x86_64__)
    words[-1] = 0;  // the place of a caller's return address
    words[-2] = reinterpret_cast<uintptr_t>(&start);
    std::memset(&words[-8], 0, 6 * sizeof(uintptr_t));
    fiber.at = &words[-8];
#else
    std::memset(&words[-20], 0, 20 * sizeof(uintptr_t));
    words[-20 + 11] = reinterpret_cast<uintptr_t>(&start);
    fiber.at = &words[-20];
#endif
    fiber.waits = Collective::None;
    fiber.done = false;
    fiber.group = 0;
    fiber.copies.clear();
}

float widened(uint32_t word, bool upper) {
    uint32_t bits = upper ? word & 0xffff0000u : word << 16;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

// Computes D += A B for a warp. A row is summed along k from the first to the last product, in f32.
void multiply(Fiber* lanes) {
    float a[16][16];
    alignas(16) float b[16][8];
    for (uint32_t lane = 0; lane < WARP_LANES; lane++) {
        const Slot& slot = lanes[lane].slot;
        uint32_t g = lane / 4, t = 2 * (lane % 4);
        float* rows[2] = {&a[g][t], &a[g + 8][t]};
        for (uint32_t i = 0; i < 4; i++) {
            rows[i & 1][8 * (i >> 1)] = widened(slot.a[i], false);
            rows[i & 1][8 * (i >> 1) + 1] = widened(slot.a[i], true);
        }
        for (uint32_t i = 0; i < 2; i++) {
            b[t + 8 * i][g] = widened(slot.b[i], false);
            b[t + 8 * i + 1][g] = widened(slot.b[i], true);
        }
    }
#ifdef RLOOD_EMULATOR_ROUNDS_LIKE_A_GPU
    // Adds half of the products of a matrix instruction, then truncates.
    for (uint32_t row = 0; row < 16; row++) {
        for (uint32_t column = 0; column < 8; column++) {
            float& d = lanes[(row % 8) * 4 + column / 2].slot.d[row / 8 * 2 + column % 2];
            for (uint32_t half = 0; half < 16; half += 8) {
                double sum = double(d);
                for (uint32_t k = half; k < half + 8; k++) sum += double(a[row][k]) * double(b[k][column]);
                float near = float(sum);
                d = std::isfinite(near) && std::fabs(double(near)) > std::fabs(sum) ? std::nextafterf(near, 0.0f) : near;
            }
        }
    }
#else
    using Four = float __attribute__((vector_size(16)));
    for (uint32_t row = 0; row < 16; row++) {
        Four low = {}, high = {};
        for (uint32_t k = 0; k < 16; k++) {
            float x = a[row][k];
            low += x * *reinterpret_cast<const Four*>(&b[k][0]);
            high += x * *reinterpret_cast<const Four*>(&b[k][4]);
        }
        for (uint32_t pair = 0; pair < 4; pair++) {
            float* d = &lanes[(row % 8) * 4 + pair].slot.d[row / 8 * 2];
            const Four& sums = pair < 2 ? low : high;
            d[0] += sums[pair % 2 * 2];
            d[1] += sums[pair % 2 * 2 + 1];
        }
    }
#endif
}

void distribute(Machine& m, Fiber* lanes, uint32_t matrices) {
    for (uint32_t i = 0; i < matrices; i++) {
        for (uint32_t lane = 0; lane < WARP_LANES; lane++) {
            Slot& slot = lanes[lane].slot;
            uint16_t pair[2];
            for (uint32_t half = 0; half < 2; half++) {
                uint32_t row = slot.transposed ? 2 * (lane % 4) + half : lane / 4;
                uint32_t column = slot.transposed ? lane / 4 : 2 * (lane % 4) + half;
                auto from = static_cast<const unsigned char*>(lanes[8 * i + row].slot.address);
                std::memcpy(&pair[half], from + 2 * column, 2);
            }
            slot.a[i] = pair[0] | uint32_t(pair[1]) << 16;
        }
    }
    for (uint32_t lane = 0; lane < 8 * matrices; lane++) {
        auto from = static_cast<const unsigned char*>(lanes[lane].slot.address);
        if (reinterpret_cast<uintptr_t>(from) % 16 != 0) m.fail("ldmatrix: the address of lane %u is not a multiple of 16", lane);
        if (from < m.shared || from + 16 > m.shared + m.used_bytes)
            m.fail("ldmatrix: the address of lane %u is not in shared memory", lane);
        RACES(matrix(uint32_t(lanes - m.fibers.data()) / WARP_LANES, from));
    }
}

// All lanes of a warp have reached a collective: executes it.
void complete(Machine& m, Fiber* lanes) {
    Collective kind = lanes[0].waits;
    int line = lanes[0].line;
    for (uint32_t lane = 1; lane < WARP_LANES; lane++)
        if (lanes[lane].waits != kind || lanes[lane].line != line)
            return m.fail("a warp diverged: lane 0 waits at line %d and lane %u at line %d", line, lane, lanes[lane].line);
    switch (kind) {
        case Collective::Shuffle: {
            uint64_t values[WARP_LANES];
            for (uint32_t lane = 0; lane < WARP_LANES; lane++) values[lane] = lanes[lane].slot.value;
            for (uint32_t lane = 0; lane < WARP_LANES; lane++) lanes[lane].slot.value = values[lanes[lane].slot.lane];
            break;
        }
        case Collective::Ballot: {
            uint64_t votes = 0;
            for (uint32_t lane = 0; lane < WARP_LANES; lane++) votes |= uint64_t(lanes[lane].slot.value != 0) << lane;
            for (uint32_t lane = 0; lane < WARP_LANES; lane++) lanes[lane].slot.value = votes;
            break;
        }
        case Collective::Matrices2: distribute(m, lanes, 2); break;
        case Collective::Matrices4: distribute(m, lanes, 4); break;
        case Collective::Product: multiply(lanes); break;
        case Collective::None:
        case Collective::Block:
        case Collective::Sync: break;
    }
    RACES(collective(uint32_t(lanes - m.fibers.data()) / WARP_LANES, kind == Collective::Sync, line));
    for (uint32_t lane = 0; lane < WARP_LANES; lane++) lanes[lane].waits = Collective::None;
}

// Runs a warp until all of its lanes have ended or wait for the block.
void run_warp(Machine& m, Fiber* lanes, uint32_t pass) {
    for (;; pass++) {
        uint32_t done = 0, block = 0;
        for (uint32_t i = 0; i < WARP_LANES; i++) {
            Fiber& fiber = lanes[pass & 1 ? WARP_LANES - 1 - i : i];
            if (!fiber.done && fiber.waits == Collective::None) m.enter(fiber);
            if (m.failed) return;
            done += fiber.done;
            block += !fiber.done && fiber.waits == Collective::Block;
        }
        if (done + block == WARP_LANES) return;
        if (done + block != 0) {
            for (uint32_t lane = 0; lane < WARP_LANES; lane++)
                if (!lanes[lane].done && lanes[lane].waits != Collective::Block)
                    return m.fail("a warp diverged: lane %u waits for all lanes at line %d, others have %s", lane,
                                  lanes[lane].line, done != 0 ? "ended" : "gone on to a barrier");
        }
        complete(m, lanes);
        if (m.failed) return;
    }
}

void check_guards(Machine& m) {
    auto intact = [](const unsigned char* at) {
        for (size_t i = 0; i < GUARD_BYTES; i++)
            if (at[i] != GUARD) return false;
        return true;
    };
    if (!intact(m.shared - GUARD_BYTES)) m.fail("a write before the shared memory");
    if (!intact(m.shared + m.dynamic_bytes)) m.fail("a write beyond the dynamic shared memory of %zu bytes", m.dynamic_bytes);
    for (const StaticArray& array : m.arrays)
        if (!intact(array.at + array.bytes)) m.fail("a write beyond a static shared array of %zu bytes", array.bytes);
}

void run_block(Machine& m, uint32_t threads, uint32_t number) {
    std::memset(m.shared - GUARD_BYTES, GUARD, GUARD_BYTES);
    std::memset(m.shared, UNWRITTEN, m.dynamic_bytes);
    std::memset(m.shared + m.dynamic_bytes, GUARD, GUARD_BYTES);
    m.arrays.clear();
    m.used_bytes = (m.dynamic_bytes + GUARD_BYTES + 15) / 16 * 16;
    for (uint32_t i = 0; i < threads; i++) aim(m.fibers[i]);
    RACES(block(m.shared, size_t(m.memory.data() + m.memory.size() - m.shared)));
    uint32_t warps = threads / WARP_LANES;
    for (uint32_t pass = number;; pass++) {
        for (uint32_t i = 0; i < warps; i++) {
            uint32_t warp = pass & 1 ? warps - 1 - i : i;
            run_warp(m, &m.fibers[warp * WARP_LANES], pass);
            if (m.failed) return;
        }
        const Fiber* first = nullptr;
        uint32_t waiting = 0;
        for (uint32_t i = 0; i < threads; i++) {
            Fiber& fiber = m.fibers[i];
            if (fiber.done) continue;
            if (first != nullptr && first->line != fiber.line)
                return m.fail("a block diverged: threads wait at the barriers of lines %d and %d", first->line, fiber.line);
            first = &fiber;
            fiber.waits = Collective::None;
            waiting++;
        }
        if (waiting == 0) break;
        if (waiting != threads)
            return m.fail("%u of %u threads wait at the barrier of line %d, the others have ended", waiting, threads, first->line);
        RACES(barrier(first->line));
    }
    check_guards(m);
}

}  // namespace

Registration::Registration(const char* name, size_t param_bytes, Body body, uint32_t most_threads) {
    kernels().push_back({name, param_bytes, body, most_threads});
    RACES(registered(name));
}

Slot& slot() { return machine().running->slot; }

void meet(Collective kind, uint32_t mask, int line) {
    Machine& m = machine();
    if (mask != 0xffffffffu) {
        m.fail("line %d: a collective with the mask %08x, not of all lanes", line, mask);
        abandon();
    }
    m.running->waits = kind;
    m.running->line = line;
    RACES(waits(__builtin_return_address(0)));
    m.leave();
}

unsigned char* dynamic_shared() { return machine().shared; }

void* static_shared(const void* tag, size_t bytes) {
    Machine& m = machine();
    size_t total = 0;
    for (const StaticArray& array : m.arrays) {
        if (array.tag == tag) return array.at;
        total += array.bytes;
    }
    if (total + bytes > STATIC_BYTES || m.dynamic_bytes + total + bytes > m.most_bytes) {
        m.fail("%zu bytes of static and %zu of dynamic shared memory are too many", total + bytes, m.dynamic_bytes);
        abandon();
    }
    unsigned char* at = m.shared + m.used_bytes;
    m.used_bytes += (bytes + GUARD_BYTES + 15) / 16 * 16;
    if (at + bytes + GUARD_BYTES > m.memory.data() + m.memory.size()) {
        m.fail("too many static shared arrays");
        abandon();
    }
    std::memset(at, UNWRITTEN, bytes);
    std::memset(at + bytes, GUARD, GUARD_BYTES);
    m.arrays.push_back({tag, at, bytes});
    return at;
}

void check_aligned(const void* address, size_t bytes, int line) {
    if (reinterpret_cast<uintptr_t>(address) % bytes == 0) return;
    machine().fail("prelude line %d: an address is not a multiple of %zu bytes", line, bytes);
    abandon();
}

void copy_later(void* shared, const void* global, uint32_t bytes, bool valid) {
    Machine& m = machine();
    auto to = static_cast<unsigned char*>(shared);
    if (to < m.shared || to + bytes > m.shared + m.used_bytes || reinterpret_cast<uintptr_t>(to) % bytes != 0 ||
        reinterpret_cast<uintptr_t>(global) % bytes != 0) {
        m.fail("cp_async%u: not from %u aligned bytes to as many of shared memory", bytes, bytes);
        abandon();
    }
    RACES(copy_begins(to, valid ? global : nullptr, bytes, __builtin_return_address(0)));
    // Until the wait, the destination holds neither the old nor the new values.
    std::memset(to, UNWRITTEN, bytes);
    m.running->copies.push_back({to, valid ? global : nullptr, bytes, m.running->group});
}

void copy_commit() { machine().running->group++; }

void copy_wait(int groups) {
    Fiber& fiber = *machine().running;
    size_t kept = 0;
    for (const Copy& copy : fiber.copies) {
        if (copy.group + uint32_t(groups) < fiber.group) {
            RACES(copy_ends(copy.to, copy.bytes));
            if (copy.from == nullptr) std::memset(copy.to, 0, copy.bytes);
            else std::memcpy(copy.to, copy.from, copy.bytes);
        } else {
            fiber.copies[kept++] = copy;
        }
    }
    fiber.copies.resize(kept);
}

}  // namespace emulator

// Returns the index of a kernel and the size of its parameter, or -1.
extern "C" int32_t rlood_emulator_find(const char* name, size_t name_bytes, size_t* param_bytes) {
    auto& all = emulator::kernels();
    for (size_t i = 0; i < all.size(); i++) {
        if (std::strlen(all[i].name) == name_bytes && std::memcmp(all[i].name, name, name_bytes) == 0) {
            *param_bytes = all[i].param_bytes;
            return int32_t(i);
        }
    }
    return -1;
}

// Runs a kernel to its end. `params` is aligned to 16 bytes; a block may have `most_shared` bytes of shared memory.
// Returns null, or an error message that is valid until the next launch.
extern "C" const char* rlood_emulator_launch(int32_t kernel, const void* params, const uint32_t* grid, uint32_t block,
                                             uint32_t shared, uint32_t most_shared) {
    emulator::Machine& m = emulator::enter();
    m.failed = false;
    if (block == 0 || block % emulator::WARP_LANES != 0 || block > emulator::MOST_THREADS) {
        m.fail("a block of %u threads: not a multiple of 32 up to 1024", block);
        return m.message;
    }
    uint32_t most_threads = emulator::kernels()[size_t(kernel)].most_threads;
    if (block > most_threads) {
        m.fail("a block of %u threads: the kernel is compiled for %u at most", block, most_threads);
        return m.message;
    }
    m.most_bytes = most_shared < emulator::SHARED_BYTES ? most_shared : emulator::SHARED_BYTES;
    if (shared > m.most_bytes) {
        m.fail("%u bytes of shared memory are too many", shared);
        return m.message;
    }
    if (grid[0] > 0x7fffffffu || grid[1] > 65535 || grid[2] > 65535) {
        m.fail("a grid of %u x %u x %u blocks is too large", grid[0], grid[1], grid[2]);
        return m.message;
    }
    if (!m.prepare(block)) {
        m.fail("no memory for the threads of a block");
        return m.message;
    }
    m.body = emulator::kernels()[size_t(kernel)].body;
    m.params = params;
    m.dynamic_bytes = shared;
    blockDim = {block, 1, 1};
    gridDim = {grid[0], grid[1], grid[2]};
#ifdef RLOOD_EMULATOR_RACES
    emulator::races::launch(emulator::kernels()[size_t(kernel)].name, grid, block);
    emulator::races::ignore(params, emulator::kernels()[size_t(kernel)].param_bytes);
    emulator::races::ignore(m.fibers.data(), m.fibers.size() * sizeof(emulator::Fiber));
    for (const emulator::Dim* dim : {&threadIdx, &blockIdx, &blockDim, &gridDim}) emulator::races::ignore(dim, sizeof *dim);
#endif
    uint32_t number = 0;
    for (uint32_t z = 0; z < grid[2]; z++)
        for (uint32_t y = 0; y < grid[1]; y++)
            for (uint32_t x = 0; x < grid[0]; x++) {
                blockIdx = {x, y, z};
                emulator::run_block(m, block, number++);
                if (m.failed) {
                    char where[96];
                    snprintf(where, sizeof where, " (block %u, %u, %u)", x, y, z);
                    size_t length = std::strlen(m.message);
                    snprintf(m.message + length, sizeof m.message - length, "%s", where);
                    return m.message;
                }
            }
    return nullptr;
}

#ifndef RLOOD_EMULATOR_RACES
#include "../../src/cuda/device/kernels.cu"
#include "wrong.cuh"
#endif
