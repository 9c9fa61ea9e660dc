#!/usr/bin/env bash
# Builds the stripped release binary into the folder given; further arguments are cargo's (`--features cuda`). The
# Dockerfiles call this, and so does CI, where no image can be built. Needs Rust and a C compiler, and nvcc for CUDA
# (scripts/cuda-toolkit.sh).
set -euo pipefail
out=${1:?usage: docker/build.sh OUTPUT_FOLDER [CARGO ARGUMENT…]}
shift
cd "$(dirname "$0")/.."
cargo build --release --locked --bin rlood "$@"
mkdir -p "$out"
install -m 0755 "${CARGO_TARGET_DIR:-target}/release/rlood" "$out/rlood"
strip "$out/rlood"
"$out/rlood" --version
