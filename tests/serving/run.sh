#!/usr/bin/env bash
# Clients of the OpenAI API against /v1: openai, lm-evaluation-harness, LangChain. The packages come from PyPI; where they cannot be
# had, this says so and leaves with 0.
#
#   tests/serving/run.sh [BINARY]       RLOOD_SERVING_PYTHON names a Python that has them
set -euo pipefail
cd "$(dirname "$0")/../.."
binary=${1:-target/release/rlood}
python=${RLOOD_SERVING_PYTHON:-target/serving/bin/python}
needed='import openai, lm_eval, langchain_openai, torch, transformers, datasets'
if ! "$python" -c "$needed" 2>/dev/null; then
    if [[ -n ${RLOOD_SERVING_PYTHON:-} ]] \
        || ! { python3 -m venv target/serving && target/serving/bin/pip install --quiet openai==3.54.0 'lm-eval[api]==0.4.13' langchain-openai torch==2.15.0 transformers==5.23.0 accelerate; }; then
        echo "NOT RUN: openai, lm-eval, langchain-openai, torch and transformers cannot be had here (python3 with venv, PyPI and 8 GB of disk are needed)"
        exit 0
    fi
fi
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec "$python" tests/serving/check.py "$binary"
