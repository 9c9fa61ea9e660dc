#!/usr/bin/env bash
# Puts a CUDA compiler into a folder, without root and without a GPU, and prints the environment that builds with it:
#
#   eval "$(scripts/cuda-toolkit.sh [--libraries] [FOLDER])"      # FOLDER: target/cuda-toolkit unless given
#   cargo build --release --features cuda
#
# The compiler comes from NVIDIA's Python wheels (CUDA 13.0: 105 MB to download, 270 MB on disk, seconds), each one pinned
# by version and SHA-256. --libraries adds cuBLAS (0.4 GB more): the build does not need it, the program loads it on the
# machine with the GPU, where neither the CUDA toolkit nor PyTorch may have brought it.
#
# Needs Python 3 with pip (PYTHON names another one), a C++ compiler for nvcc's preprocessor, Linux on x86-64 or aarch64.
# A folder that is complete is left alone. Where nvcc is installed anyway this script is not needed: build.rs takes NVCC,
# CUDA_HOME/bin/nvcc or the PATH's. Exit codes: 2 usage, 3 the wheels cannot be had, 1 anything else.
set -euo pipefail

say() { echo "cuda-toolkit: $*" >&2; }
die() { say "$2"; exit "$1"; }

libraries=
folder=
for argument; do
    case $argument in
        --libraries) libraries=1 ;;
        -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0"; exit 0 ;;
        -*) die 2 "unknown option $argument (see the top of $0)" ;;
        *) [[ -z $folder ]] || die 2 "one folder, not two"; folder=$argument ;;
    esac
done
folder=${folder:-$(cd "$(dirname "$0")/.." && pwd)/target/cuda-toolkit}
python=${PYTHON:-python3}

# The versions belong together: those of CUDA 13.0 update 2. The first hash is of x86-64, the second of aarch64.
compiler="\
nvidia-cuda-nvcc==13.0.88 --hash=sha256:56fe502eb77625a12f25172caa3cdddb4e4c8ba2c8c17dba44b164761b380f03 --hash=sha256:c7ff28f86a24effdc6c034fa15230c549a273e4771b10a7fec14996f8cf3307f
nvidia-cuda-crt==13.0.88 --hash=sha256:2c8043c7c9e02492716426e9919fc78d2c5b3b2a7a768a88e952676b08aa55a4 --hash=sha256:ee2ea2a97073e02ee62bb27841f437332be2c248e3eac013df07997ada39c003
nvidia-nvvm==13.0.88 --hash=sha256:c5f41ffeb6466944a026dfa5317d7d85355c119bbec279205d22f1869d1054e0 --hash=sha256:c4376a291d72d22a315d9d2f69bdae8f8cd83a627f75bad395cee49a0fe65dc1
nvidia-cuda-runtime==13.0.96 --hash=sha256:7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548 --hash=sha256:ef9bcbe90493a2b9d810e43d249adb3d02e98dd30200d86607d8d02687c43f55
nvidia-cuda-cccl==13.0.85 --hash=sha256:e0da7ad981f3a8aff08241b5bfc1af868742a63e2762f53a5171c492ef242649 --hash=sha256:6f0203e29fed809ee2b7fe9b1344df66ecab990c37d6a2e0e189b26d6c97ed7c"
blas="\
nvidia-cublas==13.1.0.3 --hash=sha256:ee8722c1f0145ab246bccb9e452153b5e0515fd094c3678df50b2a0888b8b171 --hash=sha256:c86fc7f7ae36d7528288c5d88098edcb7b02c633d262e7ddbb86b0ad91be5df2"

mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
home=$folder/nvidia/cu13

# install NAME REQUIREMENTS: into the folder, once.
install_wheels() {
    local stamp=$folder/.$1 wanted=$2 fresh
    [[ -f $stamp && $(<"$stamp") == "$wanted" ]] && return
    "$python" -m pip --version >/dev/null 2>&1 \
        || die 3 "$python has no pip; install python3-pip, or let PYTHON name a Python that has it"
    say "installing ${1} into $folder"
    fresh=$(mktemp -d "$folder/.fresh.XXXXXX")
    printf '%s\n' "$wanted" >"$fresh/requirements.txt"
    # Into a folder of its own first: an interrupted download leaves nothing half done behind.
    if ! "$python" -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --require-hashes --no-deps \
        --only-binary=:all: --no-compile --no-cache-dir --target "$fresh/wheels" -r "$fresh/requirements.txt" >&2; then
        rm -rf "$fresh"
        die 3 "the wheels cannot be had (their names and versions are in $0); with nvcc from elsewhere set NVCC instead"
    fi
    mkdir -p "$home"
    cp -a "$fresh/wheels/nvidia/cu13/." "$home/"
    # Their licences stay with them.
    cp -a "$fresh"/wheels/*.dist-info "$folder/"
    rm -rf "$fresh"
    printf '%s\n' "$wanted" >"$stamp"
}

# A kernel with the headers that the real ones use: fails here, with nvcc's own words, rather than in the middle of a build.
try_compiler() {
    local work
    work=$(mktemp -d "$folder/.try.XXXXXX")
    cat >"$work/try.cu" <<'CU'
#include <cuda_bf16.h>
extern "C" __global__ void widen(const __nv_bfloat16 *x, float *y) { y[threadIdx.x] = __bfloat162float(x[threadIdx.x]); }
CU
    "$home/bin/nvcc" --ptx -arch=compute_80 -o "$work/try.ptx" "$work/try.cu" >&2 \
        || { rm -rf "$work"; die 1 "nvcc does not compile here; it needs a C++ compiler (g++) on the PATH"; }
    rm -rf "$work"
}

if [[ ! -f $folder/.compiler || $(<"$folder/.compiler") != "$compiler" ]]; then
    install_wheels compiler "$compiler"
    chmod +x "$home"/bin/* "$home"/nvvm/bin/*
    try_compiler
fi
if [[ -n $libraries ]]; then
    install_wheels cublas "$blas"
fi

cat <<ENVIRONMENT
export CUDA_HOME='$home'
export NVCC='$home/bin/nvcc'
export PATH='$home/bin':"\$PATH"
ENVIRONMENT
if [[ -e $home/lib/libcublas.so.13 ]]; then
    echo "export LD_LIBRARY_PATH='$home/lib'\${LD_LIBRARY_PATH:+:\"\$LD_LIBRARY_PATH\"}"
fi
