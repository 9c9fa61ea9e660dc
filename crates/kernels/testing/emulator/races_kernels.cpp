// The kernels for the race detector: compiled with -fsanitize=thread, separately from the emulator.
#include "emulator.h"

#include "../../src/cuda/device/kernels.cu"
#include "wrong.cuh"
#include "wrong_races.cuh"
