// The events that the emulator (emulator.cpp) reports to the race detector (races.cpp)
// if RLOOD_EMULATOR_RACES is defined.
#pragma once

#include <cstddef>
#include <cstdint>

namespace emulator::races {

void registered(const char* kernel);
// A launch begins, or a block of it. `ignore` names `bytes` that belong to the launch alone.
void launch(const char* kernel, const uint32_t* grid, uint32_t threads);
void ignore(const void* from, size_t bytes);
void block(const void* shared, size_t bytes);
// The thread that runs from now on, and its stack; afterwards: none.
void enter(uint32_t thread, const void* stack, size_t bytes);
void leave();
// All threads of the block have reached a barrier; or all lanes of a warp a collective, with `sync`
// if it orders memory.
void barrier(int line);
void collective(uint32_t warp, bool sync, int line);
// The running thread waits for the others of its warp or block.
void waits(const void* at);
// A warp reads 16 bytes of shared memory (ldmatrix) at the point where it waits.
void matrix(uint32_t warp, const void* row);
// The running thread's copy by cp_async begins; the thread waits for its copies.
void copy_begins(const void* to, const void* from, uint32_t bytes, const void* at);
void copy_ends(const void* to, uint32_t bytes);
// The running thread's atomic operation.
void atomic(const void* place, uint32_t bytes, const void* at);

}  // namespace emulator::races
