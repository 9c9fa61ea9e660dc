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
#   --parts A,B,…     only these parts, or groups of them: check, decode, train, large, peers, profile (see `--list`), each once,
#                     in this order; default: all
#   --work FOLDER     keeps models and raw figures: a second call with other parts adds to the first's, and one that fails takes
#                     no good figure away. Default: a temporary folder, removed at the end. 30 GB are needed for all models,
#                     of which the largest comes last
#   --out FILE        default: benches/results/gpu_NAME.json, NAME the GPU's. Written anew after each part, so that nothing
#                     is lost with the machine
#   --save FOLDER     keep the JSON and all logs (work.tar.gz) there too, written anew after each part: for a lent machine
#                     from which one folder comes back
#   --seconds N       end within so many seconds: a part gets what is left, or is not run, for that reason
#   --python PROGRAM  a Python 3; with torch, transformers and peft the peers run too. Default: python3
#   --small           tiny models and lengths, to try this script itself (the emulator will do; on cpu no bar has a figure): no bar is judged
#
# The machine needs the NVIDIA driver (580 or later) and cuBLAS 12 or 13 (the toolkit's, or the one that PyTorch brings), and
# no compiler. Nothing else should use the GPU meanwhile; no setting of it is changed. Figures are the fastest of several
# repetitions; a part that is stopped leaves those that it had. A test that fails runs again in a process of its own.
#
# Where the machine is lent for 15 minutes, the most important first ($BACK: what comes back). On an NVIDIA H200 with 16 cores the
# suites take a minute, each figure of 0.6B 5 to 35 s, of 4B 20 to 60 s; making the models of 4B and 8B takes one and two minutes:
#   run() { benches/gpu.sh --work target/gpu-work --save $BACK "$@"; }
#   run --seconds 240 --parts check,single-0.6b,requests-0.6b,step-0.6b,mismatch-fast,mismatch-exact,train
#   run --seconds 400 --parts step-4b,requests-4b,train-4b-16k,memory-8b,peers,profile

# Without -e: a part that fails must not take the others with it.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

# Parts by group, each with the most seconds that it may take.
CHECK=(facts:20 limits:90 suite-kernels:150 suite-backend:60 suite-parity:120 suite-golden:90 suite-gradients:120 suite-bits:120 suite-gpu:120 suite-gpu_training:120
    suite-oracle:90 suite-precision:60 service:90 uses:240)
DECODE=(requests-0.6b:120 single-0.6b:60 step-0.6b:150 mismatch-fast:60 mismatch-exact:60 step-0.6b-beta:120)
TRAIN=(train-0.6b-768:60 train-0.6b-16k:90)
LARGE=(memory-8b:180 requests-4b:150 step-4b:240 train-4b-16k:150)
PEERS=(peer-limits:60 peer-train-0.6b-768:90 peer-train-0.6b-16k:120 peer-memory-8b:120 peer-train-4b-16k:150 peer-single-0.6b:90
    peer-rollout-0.6b:200 peer-requests-0.6b:220 peer-requests-4b:240)
# Where the time goes; ncu where that is installed.
PROFILE=(single-0.6b-nographs:60 train-0.6b-768-mb16k:60 profile-decode:90 profile-train:90 ncu-decode:90)
# In the order of a call without --parts.
ALL=("${CHECK[@]}" "${DECODE[@]}" "${TRAIN[@]}" "${PEERS[@]}" "${PROFILE[@]}" "${LARGE[@]}")

fail() { echo "gpu.sh: $*" >&2; exit "${code:-1}"; }
usage() { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0"; }

pack() {
    local folder=${1:?usage: benches/gpu.sh pack FOLDER} built
    set -e
    folder=${folder%/}
    mkdir -p "$folder"
    cargo build --release --locked --features "${features:-cuda}" --bin rlood
    # One line a test program: package, kind of target, file.
    built=$(cargo test --release --locked -p rlood-kernels -p rlood-engine --features "${features:-cuda}" --no-run --lib --test it \
        --message-format=json \
        | sed -n 's/.*crates\/\([a-z]*\)#.*"target":{"kind":\["\([a-z]*\)"\].*"executable":"\([^"]*\)".*/\1 \2 \3/p')
    install -m 0755 "${CARGO_TARGET_DIR:-target}/release/rlood" "$folder/rlood"
    install -m 0755 "$(sed -n 's/^kernels lib //p' <<<"$built")" "$folder/tests-kernels"
    install -m 0755 "$(sed -n 's/^engine lib //p' <<<"$built")" "$folder/tests-engine"
    install -m 0755 "$(sed -n 's/^engine test //p' <<<"$built")" "$folder/tests-it"
    strip "$folder"/{rlood,tests-kernels,tests-engine,tests-it}
    # The test programs look for fixtures where they were built.
    pwd -P >"$folder/built-in"
    git rev-parse HEAD >"$folder/commit" 2>/dev/null || true
    # The programs have much in common, which one window over all of them finds.
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
            for group in CHECK DECODE TRAIN LARGE PEERS PROFILE; do
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
# want PART[:SECONDS]…: each once.
want() {
    local part
    for part in "${@%:*}"; do
        [[ " ${wanted[*]:-} " == *" $part "* ]] || wanted+=("$part")
    done
}
IFS=, read -ra words <<<"${parts:-all}"
for word in "${words[@]}"; do
    case $word in
        all) want "${ALL[@]}" ;;
        check) want "${CHECK[@]}" ;;
        decode) want "${DECODE[@]}" ;;
        train) want "${TRAIN[@]}" ;;
        large) want "${LARGE[@]}" ;;
        peers) want "${PEERS[@]}" ;;
        profile) want "${PROFILE[@]}" ;;
        *) [[ -n ${limit_of[$word]:-} ]] || code=2 fail "unknown part: $word (see --list)"; want "$word" ;;
    esac
done
temporary='' client=''
ended() {
    [[ -z $client ]] || kill "$client" 2>/dev/null
    [[ -z $temporary ]] || rm -rf "$temporary"
}
trap ended EXIT
trap 'exit 143' TERM INT
if [[ -z $work ]]; then
    work=$(mktemp -d)
    temporary=$work
fi
mkdir -p "$work" ${save:+"$save"} || fail "$work${save:+ or $save} cannot be made"
if [[ -z $from ]]; then
    from=target/gpu
    [[ -d $from ]] || from=target/gpu.tar.xz
fi
if [[ -f $from ]]; then
    # Once for all calls.
    if [[ ! $work/from/unpacked -nt $from ]]; then
        mkdir -p "$work/from" && "$python" -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2])' "$from" "$work/from" || fail "$from cannot be unpacked"
        touch "$work/from/unpacked"
    fi
    from=$work/from
fi
rlood=$from/rlood
[[ -x $rlood ]] || fail "$rlood is missing: benches/gpu.sh pack target/gpu, where Rust is"

# ---- what runs, and what becomes of it

# note PART STATUS SECONDS REASON: replaces what an earlier call said of the part, unless its figures stand.
note() {
    local part=$1 status=$2 seconds=$3 reason=${4:-} table=$work/status.tsv earlier
    touch "$table"
    # Bytes of a program's output may be anything.
    earlier=$(grep -a "^$part	ok	" "$table")
    if [[ $status != ok && -n $earlier && -f $work/$part.json && $part != suite-* ]]; then
        echo "   $status: $reason"
        reason="an earlier call's; a later one: $status: $reason" status=ok seconds=$(cut -f3 <<<"$earlier")
    fi
    grep -av "^$part	" "$table" >"$table.new" || true
    printf '%s\t%s\t%s\t%s\n' "$part" "$status" "$seconds" "$(tr '\t\n' '  ' <<<"$reason" | cut -c1-600)" >>"$table.new"
    mv "$table.new" "$table"
    echo "   $status${reason:+: $reason}"
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

# said LOG [LINES]: its last lines.
said() { grep -av '^[[:space:]]*$' "$1" | tail -"${2:-1}"; }

# measured PART COMMAND…: run with its output in PART.log; failing is a result too. `allowed` is another limit than the part's; `seconds`
# is what it took.
measured() {
    local part=$1 limit begun=$SECONDS status watching=''
    limit=${allowed:-$(seconds_for "$part")}
    shift
    if [[ -n $client ]]; then
        nvidia-smi --id="${device#cuda:}" --format=csv,noheader,nounits -lms 500 \
            --query-gpu=timestamp,clocks.sm,clocks.mem,power.draw,temperature.gpu,utilization.gpu,memory.used,clocks_event_reasons.active \
            >"$work/$part.new.smi.txt" 2>&1 </dev/null &
        watching=$!
    fi
    timeout --kill-after=5 "$limit" "$@" >"$work/$part.log" 2>&1 </dev/null
    status=$?
    if [[ -n $watching ]]; then
        kill "$watching" 2>/dev/null
        wait "$watching" 2>/dev/null
    fi
    seconds=$((SECONDS - begun))
    keep "$part" $status
    if ((status == 0)); then
        note "$part" ok $seconds
    elif ((status == 124 || status == 137 && seconds >= limit)); then
        note "$part" failed $seconds "not done after $limit s$( ((status == 124)) || echo ', and did not end when asked to'); last: $(said "$work/$part.log")"
    elif ((status > 128)); then
        note "$part" failed $seconds "killed by signal $((status - 128)) after $seconds s$( ((status != 137)) || echo ', not by this script: is there enough memory?'); last: $(said "$work/$part.log")"
    else
        note "$part" failed $seconds "exit code $status: $(said "$work/$part.log" 3)"
    fi
    return $status
}

# keep PART STATUS: its new figures in place of the old ones, unless those are whole and these are not.
keep() {
    local part=$1 status=$2 file
    if ((status != 0)) && [[ -f $work/$part.json ]] && grep -aq "^$part	ok	" "$work/status.tsv" 2>/dev/null; then return; fi
    for file in json smi.txt; do
        [[ ! -f $work/$part.new.$file ]] || mv "$work/$part.new.$file" "$work/$part.$file"
    done
}

# ours PART ARGUMENT…: a part of `rlood bench` on the device.
ours() {
    local part=$1
    shift
    rm -f "$work/$part.new.json"
    measured "$part" env "${variables[@]}" "$rlood" --log warn bench --device "$device" --json "$work/$part.new.json" "$@"
}

# peer PART ARGUMENT…: the same by transformers and PEFT.
peer() {
    local part=$1
    shift
    if [[ -n $no_peers ]]; then
        note "$part" "not run" 0 "$no_peers"
        return
    fi
    rm -f "$work/$part.new.json"
    measured "$part" env HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 PYTHONUNBUFFERED=1 "$python" -W ignore benches/gpu_peers.py "$@" \
        --device "$torch_device" --out "$work/$part.new.json"
}

# nsight PART ARGUMENT…: some kernels of `rlood bench` under NVIDIA's profiler, where that is installed.
nsight() {
    local part=$1 ncu
    shift
    ncu=$(command -v ncu || compgen -G '/usr/local/cuda*/bin/ncu' | tail -1 || true)
    if [[ -z $ncu || $device == cpu ]]; then
        note "$part" "not run" 0 "$([[ $device == cpu ]] && echo 'there is no GPU' || echo 'there is no ncu')"
        return
    fi
    measured "$part" "$ncu" --clock-control none --target-processes all --graph-profiling node --launch-skip 2000 --launch-count 1200 \
        --kill yes --csv --page raw --log-file "$work/$part.csv" \
        --metrics gpu__time_duration.sum,dram__throughput.avg.pct_of_peak_sustained_elapsed,sm__throughput.avg.pct_of_peak_sustained_elapsed \
        "$rlood" --log warn bench --device "$device" "$@"
    # The profiler ends the program when it has its kernels.
    if [[ $(grep -c '^"' "$work/$part.csv" 2>/dev/null) -gt 2 ]]; then
        note "$part" ok $seconds "$(said "$work/$part.log")"
    fi
}

# model SHAPE: a folder of random weights, made once.
model() {
    local folder=$work/model-$1 shape=$1 begun=$SECONDS
    [[ -z $small ]] || shape=tiny,layers=2,vocab=64
    if [[ ! -f $folder/complete ]]; then
        mkdir -p "$folder"
        timeout "$(seconds_for "$part")" "$rlood" --log error bench --device cpu --shape "$shape" --save-model "$folder" --only limits \
            --prompt-len 1 --completion "$longest" >/dev/null && touch "$folder/complete"
        printf '%s\t%s\n' "$1" $((SECONDS - begun)) >>"$work/models.tsv"
        if [[ ! -f $folder/complete ]]; then
            echo "not made within $((SECONDS - begun)) s" >&2
            return 1
        fi
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

# suite PART: some of the test programs' tests, one at a time: they share the device (gpu_suite.py).
suite() {
    local part=$1 program filter=${1#suite-}:: root limit total
    # A test that cannot open a device passes without it.
    if [[ $device != cpu ]] && ! grep -aq '^limits	' "$work/status.tsv" 2>/dev/null; then
        run_part limits
    fi
    if ! grep -aq '^limits	ok' "$work/status.tsv" 2>/dev/null && [[ $device != cpu ]]; then
        note "$part" "not run" 0 "the part limits, which shows that the device can be opened, did not run well before"
        return
    fi
    case $part in
        suite-kernels) program=tests-kernels filter=cuda ;;
        suite-backend) program=tests-engine filter=cuda ;;
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
    # What fails runs again, alone, for as long once more at most.
    limit=$(seconds_for "$part") total=$((2 * limit))
    if [[ -n $budget ]] && ((budget - SECONDS - 10 < total)); then total=$((budget - SECONDS - 10)); fi
    rm -f "$work/$part.json" "$work/$part.new.json" "$work/$part.alone.log"
    # The tests take the first GPU that they see, and nothing else: the processor passes them elsewhere.
    allowed=$((total + 5)) measured "$part" env RLOOD_TEST_BACKEND="${device%:*}" CUDA_VISIBLE_DEVICES="${device#cuda:}" \
        "$python" benches/gpu_suite.py "$from/$program" "$filter" --seconds "$limit" --total-seconds "$total" \
        --out "$work/$part.new.json" --alone-log "$work/$part.alone.log"
    if (($? == 1)); then
        note "$part" failed $seconds "$(said "$work/$part.log")"
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
    large_batch=64
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
    large_batch=16384
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
    local part=$1 variables=() at
    case $part in
        facts) facts; return ;;
        suite-*) suite "$part"; return ;;
        limits) ours limits --shape tiny --only limits; return ;;
        service)
            rm -f "$work/$part.new.json"
            measured "$part" "$python" benches/gpu_service.py "$rlood" "$device" --out "$work/$part.new.json"
            return
            ;;
        uses)
            rm -f "$work/$part.new.json"
            measured "$part" "$python" benches/gpu_uses.py "$rlood" "$device" --out "$work/$part.new.json"
            return
            ;;
        peer-limits) peer "$part" limits --dtype $peer_dtype; return ;;
    esac
    # The shape is the last word but lengths: requests-0.6b, train-4b-16k.
    case $part in *0.6b* | mismatch-* | profile-* | ncu-*) at=qwen3-0.6b ;; *4b*) at=qwen3-4b ;; *) at=qwen3-8b ;; esac
    if ! at=$(model $at 2>"$work/$part.log"); then
        note "$part" failed 0 "no model: $(said "$work/$part.log")"
        return 1
    fi
    local model=(--model "$at") checkpointing=(--gradient-checkpointing)
    case $part in
        requests-4b) ours "$part" "${model[@]}" "${bf16[@]}" --only requests --requests "$work/lengths.json" --steps 1 ;;
        requests-*) ours "$part" "${model[@]}" "${bf16[@]}" --only requests --requests "$work/lengths.json" --steps $repeat ;;
        # As in the bar's table: no reference pass; one run has it.
        step-*-beta) ours "$part" "${model[@]}" "${bf16[@]}" "${group[@]}" --only step --beta 0.05 --steps 1 ;;
        step-4b) ours "$part" "${model[@]}" "${bf16[@]}" "${group[@]}" --only step --beta 0 --steps 1 ;;
        step-*) ours "$part" "${model[@]}" "${bf16[@]}" "${group[@]}" --only step --beta 0 --steps 2 ;;
        single-*-nographs) variables=(RLOOD_CUDA_GRAPHS=0); ours "$part" "${model[@]}" "${bf16[@]}" "${one[@]}" --only decode --steps $repeat ;;
        single-*) ours "$part" "${model[@]}" "${bf16[@]}" "${one[@]}" --only decode --steps $repeat ;;
        profile-decode) ours "$part" "${model[@]}" "${bf16[@]}" "${group[@]}" --only decode --profile --steps 1 ;;
        profile-train) ours "$part" "${model[@]}" "${bf16[@]}" "${group[@]}" --only training --profile --steps 1 ;;
        ncu-decode) nsight "$part" "${model[@]}" "${bf16[@]}" "${group[@]}" --only decode --steps 1 ;;
        train-*-768-mb16k)
            ours "$part" "${model[@]}" "${bf16[@]}" "${packed[@]}" --only training --micro-batch-tokens $large_batch --steps $repeat
            ;;
        train-*-768) ours "$part" "${model[@]}" "${bf16[@]}" "${packed[@]}" --only training --steps $repeat ;;
        train-4b-16k) ours "$part" "${model[@]}" "${bf16[@]}" "${long[@]}" "${checkpointing[@]}" --only training --steps 1 ;;
        train-*-16k) ours "$part" "${model[@]}" "${bf16[@]}" "${long[@]}" "${checkpointing[@]}" --only training --steps $repeat ;;
        memory-*) ours "$part" "${model[@]}" "${bf16[@]}" "${fit[@]}" "${checkpointing[@]}" --only training --steps 1 ;;
        mismatch-fast) variables=(RLOOD_CUDA_EXACT=0); ours "$part" "${model[@]}" "${bf16[@]}" "${few[@]}" --only mismatch ;;
        mismatch-exact) variables=(RLOOD_CUDA_EXACT=1); ours "$part" "${model[@]}" "${bf16[@]}" "${few[@]}" --only mismatch ;;
        peer-requests-*) peer "$part" requests "${model[@]}" --dtype $peer_dtype --requests "$work/lengths.json" --repeat 1 ;;
        peer-rollout-*) peer "$part" rollout "${model[@]}" --dtype $peer_dtype "${group[@]}" --repeat 1 ;;
        peer-single-*) peer "$part" rollout "${model[@]}" --dtype $peer_dtype "${one[@]}" --repeat 1 ;;
        peer-train-*-768) peer "$part" train "${model[@]}" --dtype $peer_dtype "${packed[@]}" --micro-batch 16 --repeat $repeat ;;
        peer-train-*-16k) peer "$part" train "${model[@]}" --dtype $peer_dtype "${long[@]}" "${checkpointing[@]}" --repeat $repeat ;;
        peer-memory-*) peer "$part" train "${model[@]}" --dtype $peer_dtype "${fit[@]}" "${checkpointing[@]}" --repeat 1 ;;
    esac
}

find_cublas
# Where no client is left, the driver takes the GPU down, and the next process waits until it is up again.
if [[ $device != cpu ]] && command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; then
    nvidia-smi -l 60 >/dev/null 2>&1 </dev/null &
    client=$!
fi
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
    find "$work" -maxdepth 1 -type f -size -8M \( -name '*.log' -o -name '*.json' -o -name '*.tsv' -o -name '*.txt' -o -name '*.csv' \) -printf '%f\0' \
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
        no_device="$device cannot be used: $(said "$work/limits.log")"
    fi
    report >"$work/report.txt" 2>&1
done
report
