#!/usr/bin/env bash
# Certificates beside PEFT and llama.cpp: `rlood verify` finds each fault of a server. The packages come from PyPI; where they cannot be
# had, this says so and leaves with 0.
#
#   tests/certificate/run.sh [BINARY [TABLE]]   RLOOD_CERTIFICATE_PYTHON names a Python that has torch, transformers, peft, xllamacpp
set -euo pipefail
cd "$(dirname "$0")/../.."
binary=${1:-target/release/rlood}
python=${RLOOD_CERTIFICATE_PYTHON:-target/certificate-peer/bin/python}
if ! "$python" -c 'import torch, transformers, peft, xllamacpp' 2>/dev/null; then
    if [[ -n ${RLOOD_CERTIFICATE_PYTHON:-} ]] \
        || ! { python3 -m venv target/certificate-peer \
            && target/certificate-peer/bin/pip install --quiet torch==2.15.0 transformers==5.23.0 peft==0.21.2 xllamacpp==2026.10.11549; }; then
        echo "NOT RUN: torch, transformers, peft and xllamacpp cannot be had here (python3 with venv, PyPI and 8 GB of disk are needed)"
        exit 0
    fi
fi
export HF_HUB_OFFLINE=1
"$python" tests/certificate/check.py "$(realpath "$binary")" ${2:+"$2"}
