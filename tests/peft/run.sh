#!/usr/bin/env bash
# The peers transformers and PEFT: the cases of tests/fixtures/parity are computed again, and adapters that the server trained are
# loaded by PEFT. The packages come from PyPI; where they cannot be had, this says so and leaves with 0.
#
#   tests/peft/run.sh [BINARY]          RLOOD_PEFT_PYTHON names a Python that has torch, transformers, peft and bitsandbytes
set -euo pipefail
cd "$(dirname "$0")/../.."
binary=${1:-target/release/rlood}
python=${RLOOD_PEFT_PYTHON:-target/peft/bin/python}
if ! "$python" -c 'import torch, transformers, peft, bitsandbytes' 2>/dev/null; then
    if [[ -n ${RLOOD_PEFT_PYTHON:-} ]] \
        || ! { python3 -m venv target/peft && target/peft/bin/pip install --quiet torch==2.15.0 transformers==5.23.0 peft==0.21.2 bitsandbytes==0.50.0; }; then
        echo "NOT RUN: torch, transformers, peft and bitsandbytes cannot be had here (python3 with venv, PyPI and 8 GB of disk are needed)"
        exit 0
    fi
fi
export HF_HUB_OFFLINE=1
cases=(tests/fixtures/parity/*/lora)
"$python" scripts/parity_cases.py --check "${cases[@]%/lora}"
echo "figure: parity cases computed again: ${#cases[@]}"
"$python" tests/peft/adapters.py "$binary"
