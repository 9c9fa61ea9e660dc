#!/usr/bin/env bash
# Builds the emulator as NVIDIA's driver and cuBLAS (tests/cuda/driver) into a folder; with that folder on
# LD_LIBRARY_PATH a build with the feature `cuda` finds a GPU that calculates on the CPU:
#
#   eval "$(scripts/cuda-toolkit.sh)"; tests/cuda/driver.sh target/cuda-driver
#   LD_LIBRARY_PATH=target/cuda-driver target/release/rlood check
#
# Needs a C++ compiler and, in CUDA_HOME, NVIDIA's cuda.h.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=${1:?usage: tests/cuda/driver.sh FOLDER}
emulator=crates/kernels/testing/emulator
mkdir -p "$folder"
# As build.rs compiles the emulator, but for the last bits of functions and products, which are not the host's on a GPU either.
"${CXX:-c++}" -std=c++17 -O2 -fPIC -shared -Wall -Wextra -Wno-unknown-pragmas -DRLOOD_EMULATOR -DRLOOD_EMULATOR_ROUNDS_LIKE_A_GPU -fno-strict-aliasing -ffp-contract=off \
    $(grep -qw fma /proc/cpuinfo && echo -mfma) -Wl,-Bsymbolic -Wl,-soname,libcuda.so.1 -isystem "${CUDA_HOME:?}/include" \
    -o "$folder/libcuda.so.1.new" "$emulator"/emulator.cpp tests/cuda/driver/*.cpp -pthread
mv "$folder/libcuda.so.1.new" "$folder/libcuda.so.1"
ln -sf libcuda.so.1 "$folder/libcublas.so.13"
