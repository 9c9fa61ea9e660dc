// What the emulator (emulator.cpp) tells the race detector (races.cpp) where RLOOD_EMULATOR_RACES is defined.
#pragma once

#include <cstddef>
#include <cstdint>

namespace emulator::races {

void registered(const char* kernel);
// A launch begins, or a block of it. Nobody else's are the `bytes` that `ignore` names for a launch.
void launch(const char* kernel, const uint32_t* grid, uint32_t threads);
void ignore(const void* from, size_t bytes);
void block(const void* shared, size_t bytes);
// The thread that runs from now on, and its stack; then: none.
void enter(uint32_t thread, const void* stack, size_t bytes);
void leave();
// All threads of the block have come to a barrier; all lanes of a warp to a collective, `sync` where it orders memory.
void barrier(int line);
void collective(uint32_t warp, bool sync, int line);
// The running thread waits for the others of its warp or block.
void waits(const void* at);
// A warp reads 16 bytes of shared memory (ldmatrix), where it waits.
void matrix(uint32_t warp, const void* row);
// The running thread's copy of a cp_async begins, is waited for.
void copy_begins(const void* to, const void* from, uint32_t bytes, const void* at);
void copy_ends(const void* to, uint32_t bytes);
// The running thread's atomic operation.
void atomic(const void* place, uint32_t bytes, const void* at);

}  // namespace emulator::races
