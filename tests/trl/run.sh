#!/usr/bin/env bash
# The runtime `trl` with the real TRL: the environment is installed by rlood itself. Where it cannot be had, this says so and leaves with 0.
#
#   tests/trl/run.sh [BINARY]           RLOOD_TRL_PYTHON names the Python of an environment that exists
set -euo pipefail
cd "$(dirname "$0")/../.."
binary=${1:-target/release/rlood}
python=${RLOOD_TRL_PYTHON:-target/trl/bin/python}
if ! "$python" -c 'import trl, bitsandbytes, deepspeed, PIL, torchvision' 2>/dev/null; then
    if [[ -n ${RLOOD_TRL_PYTHON:-} ]] || ! "$binary" runtime install trl --dir target/trl --extras vlm,quantized,deepspeed; then
        echo "NOT RUN: the environment of TRL cannot be installed here (Python 3.11 with venv, PyPI and 8 GB of disk are needed)"
        exit 0
    fi
fi
exec python3 tests/trl/check.py "$binary" "$python"
