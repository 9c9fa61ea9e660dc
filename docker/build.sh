#!/usr/bin/env bash
# Builds the stripped release binary into the folder given; further arguments are cargo's (`--features cuda`). The
# Dockerfiles call this, and so does CI, where no image can be built. Needs Rust and a C compiler, and nvcc for CUDA
# (scripts/cuda-toolkit.sh).
#
# With RLOOD_BUILD_TARGET, a target triple with the oldest glibc to run on, such as x86_64-unknown-linux-gnu.2.28,
# cargo-zigbuild builds it. scripts/release.sh does that.
set -euo pipefail
out=${1:?usage: docker/build.sh OUTPUT_FOLDER [CARGO ARGUMENT…]}
shift
cd "$(dirname "$0")/.."
release=${CARGO_TARGET_DIR:-target}
if [[ ${RLOOD_BUILD_TARGET:-} ]]; then
    # The linker strips: this machine's `strip` does not know the files of other machines.
    cargo zigbuild --release --locked --bin rlood --target "$RLOOD_BUILD_TARGET" --config 'profile.release.strip="symbols"' "$@"
    release+=/${RLOOD_BUILD_TARGET%%.*}
else
    cargo build --release --locked --bin rlood "$@"
fi
mkdir -p "$out"
install -m 0755 "$release/release/rlood" "$out/rlood"
if [[ -z ${RLOOD_BUILD_TARGET:-} ]]; then
    strip "$out/rlood"
fi
if [[ ${RLOOD_BUILD_TARGET:-$(uname -m)} == "$(uname -m)"* ]]; then
    "$out/rlood" --version
fi
