#!/usr/bin/env bash
# The peer llama.cpp: exports as GGUF have transformers' log-probs there, and the same token ids. The packages come from PyPI; where they
# cannot be had, this says so and leaves with 0.
#
#   tests/gguf/run.sh [BINARY]          RLOOD_GGUF_PYTHON names a Python that has xllamacpp, tokenizers, safetensors and numpy
set -euo pipefail
cd "$(dirname "$0")/../.."
binary=${1:-target/release/rlood}
python=${RLOOD_GGUF_PYTHON:-target/gguf-peer/bin/python}
if ! "$python" -c 'import xllamacpp, tokenizers, safetensors, numpy' 2>/dev/null; then
    if [[ -n ${RLOOD_GGUF_PYTHON:-} ]] \
        || ! { python3 -m venv target/gguf-peer \
            && target/gguf-peer/bin/pip install --quiet xllamacpp==2026.10.11549 tokenizers==0.23.2 safetensors==0.8.0 numpy; }; then
        echo "NOT RUN: xllamacpp, tokenizers, safetensors and numpy cannot be had here (python3 with venv and PyPI are needed)"
        exit 0
    fi
fi
"$python" tests/gguf/check.py "$binary"
