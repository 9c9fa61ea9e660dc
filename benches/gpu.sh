#!/usr/bin/env bash
# Proves the CUDA backend on a GPU, in one go: what the GPU is and reaches, the test suites on it, then the bars of decode,
# rollout, training, whole steps, memory and exactness, with transformers and PEFT beside them. Writes one JSON; what could
# not be measured stands in it as "not run" with the reason.
#
#   benches/gpu.sh pack FOLDER            where Rust and nvcc are (scripts/cuda-toolkit.sh); no GPU needed. Beside the folder
#                                         lies FOLDER.tar.xz, to be carried
#   benches/gpu.sh [run] [OPTION…]        on the machine with the GPU, in the repository's root
#
#   --from PLACE      what `pack` made, the folder or the archive; default: target/gpu, else target/gpu.tar.xz
#   --device cuda:N   default: cuda:0
#   --parts A,B,…     only these parts, or groups of them: check, decode, train, large, peers (see `--list`); default: all
#   --work FOLDER     keeps models and raw figures: a second call with other parts adds to the first's. Default: a temporary
#                     folder, removed at the end. 30 GB are needed for all models, of which the largest comes last
#   --out FILE        default: benches/results/gpu_NAME.json, NAME the GPU's. Written anew after each part, so that nothing
#                     is lost with the machine
#   --save FOLDER     keep the JSON and all logs (work.tar.gz) there too, written anew after each part: for a lent machine
#                     from which one folder comes back
#   --seconds N       end within so many seconds: a part gets what is left, or is not run, for that reason
#   --python PROGRAM  a Python 3; with torch, transformers and peft the peers run too. Default: python3
#   --small           tiny models and lengths, to try this script itself (the emulator will do; on cpu no bar has a figure): no bar is judged
#
# The machine needs the NVIDIA driver (580 or later) and cuBLAS 12 or 13 (the toolkit's, or the one that PyTorch brings), and
# no compiler. Nothing else should use the GPU meanwhile. Figures are the fastest of several repetitions.
#
# Where the machine is lent for half an hour, ten minutes a command, the most important first ($BACK: what comes back):
#   benches/gpu.sh --work target/gpu-work --save $BACK --parts check --seconds 390
#   benches/gpu.sh --work target/gpu-work --save $BACK --parts decode,train --seconds 420
#   benches/gpu.sh --work target/gpu-work --save $BACK --parts large --seconds 420
#   benches/gpu.sh --work target/gpu-work --save $BACK --parts peers --seconds 270

# Without -e: a part that fails must not take the others with it.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

# Parts by group, each with the most seconds that it may take.
CHECK=(facts:20 limits:90 suite-kernels:150 suite-parity:120 suite-golden:90 suite-gradients:120 suite-bits:120 suite-gpu:120 suite-gpu_training:120
    suite-oracle:90 suite-precision:60)
DECODE=(requests-0.6b:120 single-0.6b:60 step-0.6b:150 mismatch-fast:60 mismatch-exact:60)
TRAIN=(train-0.6b-768:60 train-0.6b-16k:90)
LARGE=(memory-8b:180 requests-4b:150 step-4b:240 train-4b-16k:150)
PEERS=(peer-limits:60 peer-train-0.6b-768:90 peer-train-0.6b-16k:120 peer-memory-8b:120 peer-train-4b-16k:150 peer-single-0.6b:90
    peer-rollout-0.6b:200 peer-requests-0.6b:220 peer-requests-4b:240)
# In the order of a call without --parts.
ALL=("${CHECK[@]}" "${DECODE[@]}" "${TRAIN[@]}" "${PEERS[@]}" "${LARGE[@]}")

fail() { echo "gpu.sh: $*" >&2; exit "${code:-1}"; }
usage() { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0"; }

pack() {
    local folder=${1:?usage: benches/gpu.sh pack FOLDER} built
    set -e
    folder=${folder%/}
    mkdir -p "$folder"
    cargo build --release --locked --features "${features:-cuda}" --bin rlood
    # One line a test program: the target's name, the file.
    built=$(cargo test --release --locked --features "${features:-cuda}" --no-run --lib --test it --message-format=json \
        | sed -n 's/.*"target":{"kind":\["\([a-z]*\)"\].*"executable":"\([^"]*\)".*/\1 \2/p')
    install -m 0755 "${CARGO_TARGET_DIR:-target}/release/rlood" "$folder/rlood"
    install -m 0755 "$(sed -n 's/^lib //p' <<<"$built")" "$folder/tests-unit"
    install -m 0755 "$(sed -n 's/^test //p' <<<"$built")" "$folder/tests-it"
    strip "$folder"/{rlood,tests-unit,tests-it}
    # The test programs look for fixtures where they were built.
    pwd -P >"$folder/built-in"
    git rev-parse HEAD >"$folder/commit" 2>/dev/null || true
    # The three programs have much in common, which one window over all of them finds.
    tar -C "$folder" -c . | xz -T1 --lzma2=preset=9e,dict=192MiB >"$folder.tar.xz"
    ls -l "$folder" "$folder.tar.xz"
    echo "to be carried: $(stat -c %s "$folder.tar.xz" | awk '{printf "%.1f", $1 / 1048576}') MiB, beside" \
        "$(git ls-files -z | xargs -0 stat -c %s | awk '{sum += $1} END {printf "%.1f", sum / 1048576}') MiB of tracked files"
}

from='' device=cuda:0 parts='' work='' out='' save='' budget='' python=python3 small=''
case ${1:-run} in
    pack) shift; pack "$@"; exit ;;
    run) shift || true ;;
esac
while (($#)); do
    case $1 in
        --from) from=$2; shift 2 ;;
        --device) device=$2; shift 2 ;;
        --parts) parts=$2; shift 2 ;;
        --work) work=$2; shift 2 ;;
        --out) out=$2; shift 2 ;;
        --save) save=$2; shift 2 ;;
        --seconds) budget=$2; shift 2 ;;
        --python) python=$2; shift 2 ;;
        --small) small=1; shift ;;
        --list)
            for group in CHECK DECODE TRAIN LARGE PEERS; do
                declare -n members=$group
                echo "${group,,}: ${members[*]%:*}"
            done
            exit
            ;;
        -h | --help) usage; exit ;;
        *) code=2 fail "unknown argument: $1 (see --help)" ;;
    esac
done
command -v "$python" >/dev/null || fail "$python is missing: a Python 3 puts the figures together (--python)"
declare -A limit_of
for part in "${ALL[@]}"; do limit_of[${part%:*}]=${part#*:}; done
wanted=()
IFS=, read -ra words <<<"${parts:-all}"
for word in "${words[@]}"; do
    case $word in
        all) wanted+=("${ALL[@]%:*}") ;;
        check) wanted+=("${CHECK[@]%:*}") ;;
        decode) wanted+=("${DECODE[@]%:*}") ;;
        train) wanted+=("${TRAIN[@]%:*}") ;;
        large) wanted+=("${LARGE[@]%:*}") ;;
        peers) wanted+=("${PEERS[@]%:*}") ;;
        *) [[ -n ${limit_of[$word]:-} ]] || code=2 fail "unknown part: $word (see --list)"; wanted+=("$word") ;;
    esac
done
if [[ -z $work ]]; then
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
fi
mkdir -p "$work" ${save:+"$save"} || fail "$work${save:+ or $save} cannot be made"
if [[ -z $from ]]; then
    from=target/gpu
    [[ -d $from ]] || from=target/gpu.tar.xz
fi
if [[ -f $from ]]; then
    mkdir -p "$work/from" && "$python" -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2])' "$from" "$work/from" || fail "$from cannot be unpacked"
    from=$work/from
fi
rlood=$from/rlood
[[ -x $rlood ]] || fail "$rlood is missing: benches/gpu.sh pack target/gpu, where Rust is"

# ---- what runs, and what becomes of it

# note PART STATUS SECONDS REASON: replaces what an earlier call said of the part.
note() {
    local table=$work/status.tsv
    touch "$table"
    grep -v "^$1	" "$table" >"$table.new" || true
    printf '%s\t%s\t%s\t%s\n' "$1" "$2" "$3" "$(tr '\t\n' '  ' <<<"${4:-}" | cut -c1-600)" >>"$table.new"
    mv "$table.new" "$table"
    echo "   $2${4:+: $4}"
}

# seconds_for PART: its limit, or what is left of --seconds.
seconds_for() {
    local limit=${limit_of[$1]} left
    if [[ -n $budget ]]; then
        left=$((budget - SECONDS))
        ((left >= limit)) || limit=$left
    fi
    echo $((limit > 1 ? limit : 1))
}

# measured PART COMMAND…: run with its output in PART.log; failing is a result too.
measured() {
    local part=$1 limit begun=$SECONDS status
    limit=$(seconds_for "$part")
    shift
    timeout --kill-after=5 "$limit" "$@" >"$work/$part.log" 2>&1 </dev/null
    status=$?
    case $status in
        0) note "$part" ok $((SECONDS - begun)) ;;
        124 | 137) note "$part" failed $((SECONDS - begun)) "not done after $limit s" ;;
        *) note "$part" failed $((SECONDS - begun)) "exit code $status: $(grep -v '^[[:space:]]*$' "$work/$part.log" | tail -3)" ;;
    esac
    return $status
}

# ours PART ARGUMENT…: a part of `rlood bench` on the device.
ours() {
    local part=$1
    shift
    rm -f "$work/$part.json"
    measured "$part" env ${exact:+RLOOD_CUDA_EXACT=$exact} "$rlood" --log warn bench --device "$device" --json "$work/$part.json" "$@"
}

# peer PART ARGUMENT…: the same by transformers and PEFT.
peer() {
    local part=$1
    shift
    if [[ -n $no_peers ]]; then
        note "$part" "not run" 0 "$no_peers"
        return
    fi
    rm -f "$work/$part.json"
    measured "$part" "$python" -W ignore benches/gpu_peers.py "$@" --device "$torch_device" --out "$work/$part.json" || return 0
    local failed
    failed=$("$python" -c 'import json, sys; print(json.load(open(sys.argv[1])).get("failed", ""))' "$work/$part.json")
    [[ -z $failed ]] || note "$part" failed 0 "$failed"
}

# model SHAPE: a folder of random weights, made once.
model() {
    local folder=$work/model-$1 shape=$1
    [[ -z $small ]] || shape=tiny,layers=2,vocab=64
    if [[ ! -f $folder/complete ]]; then
        mkdir -p "$folder"
        timeout "$(seconds_for "$part")" "$rlood" --log error bench --device cpu --shape "$shape" --save-model "$folder" --only limits \
            --prompt-len 1 --completion "$longest" >/dev/null && touch "$folder/complete"
    fi
    echo "$folder"
}

# cuBLAS, where the loader does not find one: PyTorch's Python packages hold it.
find_cublas() {
    ldconfig -p 2>/dev/null | grep 'libcublas\.so' >/dev/null && return
    local folder
    while read -r folder; do
        if compgen -G "$folder/libcublas.so*" >/dev/null; then
            export LD_LIBRARY_PATH=$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
            return
        fi
    done < <("$python" - 2>/dev/null <<'PY'
import glob
try:
    import nvidia
    for path in nvidia.__path__:
        print(*glob.glob(path + "/*/lib"), sep="\n")
except ImportError:
    pass
print(*glob.glob("/usr/local/cuda*/lib64"), "/usr/local/lib/cuda", sep="\n")
PY
    )
}

facts() {
    {
        echo "date=$(date -u +%Y-%m-%dT%H:%M:%SZ)"
        echo "rlood=$("$rlood" --version)"
        echo "commit=$(cat "$from/commit" 2>/dev/null || git rev-parse HEAD 2>/dev/null || echo unknown)"
        echo "kernel=$(uname -sr)"
        echo "processors=$(nproc)"
        echo "memory_kib=$(awk '/MemTotal/ {print $2}' /proc/meminfo)"
        if command -v nvidia-smi >/dev/null; then
            local query=name,driver_version,vbios_version,memory.total,clocks.max.sm,clocks.max.mem,power.limit,ecc.mode.current,mig.mode.current,temperature.gpu,utilization.gpu,memory.used
            local names values
            values=$(nvidia-smi --id="${device#cuda:}" --query-gpu=$query --format=csv,noheader 2>/dev/null || true)
            IFS=, read -ra names <<<"$query"
            IFS=, read -ra values <<<"$values"
            for i in "${!values[@]}"; do echo "gpu.${names[$i]}=${values[$i]# }"; done
        fi
    } >"$work/facts.txt"
    note facts ok 0
}

# suite PART: some of the test programs' tests, one at a time: they share the device. A line of suites.tsv a part:
# part, passed, failed, ignored, seconds; and one a failed test.
suite() {
    local part=$1 program filter=${1#suite-}:: root begun=$SECONDS status failed
    # A test that cannot open a device passes without it.
    if [[ $device != cpu ]] && ! grep -q '^limits	' "$work/status.tsv" 2>/dev/null; then
        run_part limits
    fi
    if ! grep -q '^limits	ok' "$work/status.tsv" 2>/dev/null && [[ $device != cpu ]]; then
        note "$part" "not run" 0 "the part limits, which shows that the device can be opened, did not run well before"
        return
    fi
    case $part in
        suite-kernels) program=tests-unit filter=cuda ;;
        *) program=tests-it ;;
    esac
    if [[ ! -x $from/$program ]]; then
        note "$part" "not run" 0 "$from/$program is missing"
        return
    fi
    root=$(cat "$from/built-in" 2>/dev/null || pwd -P)
    if [[ ! -d $root ]]; then
        # The fixtures' paths are in the program.
        mkdir -p "$(dirname "$root")" && ln -s "$(pwd -P)" "$root"
    fi
    touch "$work/suites.tsv"
    grep -v "^$part	" "$work/suites.tsv" >"$work/suites.new"
    # The tests take the first GPU that they see, and nothing else: the processor passes them elsewhere.
    measured "$part" env RLOOD_TEST_BACKEND="${device%:*}" CUDA_VISIBLE_DEVICES="${device#cuda:}" "$from/$program" --test-threads=1 "$filter"
    status=$?
    # Counted by its lines: a program that was stopped has no sum.
    awk -v part="$part" -v seconds=$((SECONDS - begun)) '
        /^test .* \.\.\. ok$/ {passed++} /^test .* \.\.\. FAILED$/ {failed++} /^test .* \.\.\. ignored/ {ignored++}
        END {printf "%s\t%d\t%d\t%d\t%d\n", part, passed, failed, ignored, seconds}' "$work/$part.log" >>"$work/suites.new"
    sed -n "s/^test \(.*\) \.\.\. FAILED$/$part	failed	\1/p" "$work/$part.log" >>"$work/suites.new"
    mv "$work/suites.new" "$work/suites.tsv"
    failed=$(sed -n 's/^test \(.*\) \.\.\. FAILED$/\1/p' "$work/$part.log" | head -8 | paste -sd' ')
    if [[ $status != 0 && -n $failed ]]; then
        note "$part" failed $((SECONDS - begun)) "$failed"
    fi
}

# ---- the work of each part

if [[ -n $small ]]; then
    longest=64
    group=(--prompts 2 --generations 3 --prompt-len 8 --completion 12)
    few=(--prompts 2 --generations 3 --prompt-len 8 --completion 12)
    one=(--prompts 1 --generations 1 --prompt-len 8 --completion 12)
    packed=(--prompts 4 --generations 1 --prompt-len 8 --completion 12)
    long=(--prompts 1 --generations 1 --prompt-len 1 --completion 31)
    fit=(--prompts 1 --generations 1 --prompt-len 1 --completion 31)
    lengths=4,12
    few_requests=6
    repeat=1
else
    longest=20000
    # RLOO rollout: 64 prompts of 256 tokens, 8 completions of 512.
    group=(--prompts 64 --generations 8 --prompt-len 256 --completion 512)
    few=(--prompts 8 --generations 8 --prompt-len 256 --completion 256)
    one=(--prompts 1 --generations 1 --prompt-len 128 --completion 256)
    # 32 sequences of 768 tokens, no prompt shared; one of 16,384, every position scored; 2,048 tokens for the memory.
    packed=(--prompts 32 --generations 1 --prompt-len 256 --completion 512)
    long=(--prompts 1 --generations 1 --prompt-len 1 --completion 16383)
    fit=(--prompts 1 --generations 1 --prompt-len 1 --completion 2047)
    lengths=100,1024
    few_requests=256
    repeat=3
fi
bf16=(--dtype bf16)
peer_dtype=bfloat16
torch_device=cuda:${device#cuda:}
[[ $device != cpu ]] || torch_device=cpu

# 256 requests of 100 to 1,024 tokens in and out, as nano-vllm's bench.py draws them with seed 0.
"$python" - "$work/lengths.json" "$few_requests" "$lengths" <<'PY' || fail "$python does not run"
import json, sys
from random import randint, seed
path, count, (least, most) = sys.argv[1], int(sys.argv[2]), map(int, sys.argv[3].split(","))
seed(0)
prompts = [len([randint(0, 10000) for _ in range(randint(least, most))]) for _ in range(count)]
completions = [randint(least, most) for _ in range(count)]
json.dump(list(zip(prompts, completions)), open(path, "w"))
PY

run_part() {
    local part=$1 exact='' at
    case $part in
        facts) facts; return ;;
        suite-*) suite "$part"; return ;;
        limits) ours limits --shape tiny --only limits; return ;;
        peer-limits) peer "$part" limits --dtype $peer_dtype; return ;;
    esac
    # The shape is the last word but lengths: requests-0.6b, train-4b-16k.
    case $part in *0.6b* | mismatch-*) at=qwen3-0.6b ;; *4b*) at=qwen3-4b ;; *) at=qwen3-8b ;; esac
    if ! at=$(model $at 2>"$work/$part.log"); then
        note "$part" failed 0 "no model: $(tail -1 "$work/$part.log")"
        return
    fi
    local model=(--model "$at") checkpointing=(--gradient-checkpointing)
    case $part in
        requests-4b) ours "$part" "${model[@]}" "${bf16[@]}" --only requests --requests "$work/lengths.json" --steps 1 ;;
        requests-*) ours "$part" "${model[@]}" "${bf16[@]}" --only requests --requests "$work/lengths.json" --steps $repeat ;;
        step-*) ours "$part" "${model[@]}" "${bf16[@]}" "${group[@]}" --only step --steps 2 ;;
        single-*) ours "$part" "${model[@]}" "${bf16[@]}" "${one[@]}" --only decode --steps $repeat ;;
        train-*-768) ours "$part" "${model[@]}" "${bf16[@]}" "${packed[@]}" --only training --steps $repeat ;;
        train-*-16k) ours "$part" "${model[@]}" "${bf16[@]}" "${long[@]}" "${checkpointing[@]}" --only training --steps $repeat ;;
        memory-*) ours "$part" "${model[@]}" "${bf16[@]}" "${fit[@]}" "${checkpointing[@]}" --only training --steps 1 ;;
        mismatch-fast) exact=0; ours "$part" "${model[@]}" "${bf16[@]}" "${few[@]}" --only mismatch ;;
        mismatch-exact) exact=1; ours "$part" "${model[@]}" "${bf16[@]}" "${few[@]}" --only mismatch ;;
        peer-requests-*) peer "$part" requests "${model[@]}" --dtype $peer_dtype --requests "$work/lengths.json" --repeat 1 ;;
        peer-rollout-*) peer "$part" rollout "${model[@]}" --dtype $peer_dtype "${group[@]}" --repeat 1 ;;
        peer-single-*) peer "$part" rollout "${model[@]}" --dtype $peer_dtype "${one[@]}" --repeat $repeat ;;
        peer-train-*-768) peer "$part" train "${model[@]}" --dtype $peer_dtype "${packed[@]}" --micro-batch 16 --repeat $repeat ;;
        peer-train-*-16k) peer "$part" train "${model[@]}" --dtype $peer_dtype "${long[@]}" "${checkpointing[@]}" --repeat $repeat ;;
        peer-memory-*) peer "$part" train "${model[@]}" --dtype $peer_dtype "${fit[@]}" "${checkpointing[@]}" --repeat 1 ;;
    esac
}

find_cublas
# The driver compiles the kernels when it first sees them; every part is a process of its own.
export CUDA_CACHE_PATH=${CUDA_CACHE_PATH:-$work/cuda-cache} CUDA_CACHE_MAXSIZE=${CUDA_CACHE_MAXSIZE:-1073741824}
no_peers=$("$python" -c '
try:
    import torch, transformers, peft
except ImportError as error:
    print(f"this Python cannot import the peers: {error}")
' 2>/dev/null) || no_peers="this Python cannot import the peers"

# What is known so far, as JSON and as a table.
report() {
    "$python" benches/gpu_report.py "$work" "$device" "${small:-0}" "$out"
    [[ -n $save ]] || return 0
    "$python" benches/gpu_report.py "$work" "$device" "${small:-0}" "$save/gpu.json" >/dev/null
    find "$work" -maxdepth 1 -type f \( -name '*.log' -o -name '*.json' -o -name '*.tsv' -o -name '*.txt' \) -printf '%f\0' \
        | tar -C "$work" --null -T - -czf "$save/work.tar.gz"
}

no_device=''
for part in "${wanted[@]}"; do
    echo "== $part ($SECONDS s)"
    if [[ -n $budget ]] && ((budget - SECONDS < 15)); then
        note "$part" "not run" 0 "the $budget s of --seconds had passed"
    elif [[ -n $no_device && $part != facts && $part != peer-* ]]; then
        note "$part" "not run" 0 "$no_device"
    elif ! run_part "$part" && [[ $part == limits ]]; then
        no_device="$device cannot be used: $(grep -v '^[[:space:]]*$' "$work/limits.log" | tail -1)"
    fi
    report >"$work/report.txt" 2>&1
done
report
