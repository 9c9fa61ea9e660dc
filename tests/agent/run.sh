#!/usr/bin/env bash
# `rlood demo --agent` with five seeds, with noise, and with every instruction set that runs here. Fails where one misses its goal or
# takes more than 90 CPU seconds: that is at least its time on a quiet machine. With TABLE it writes the figures there, and keeps those of
# instruction sets that this machine lacks.
#
#   tests/agent/run.sh [BINARY [TABLE]]
set -euo pipefail
cd "$(dirname "$0")/../.."
binary=$(realpath "${1:-target/release/rlood}")
table=${2:-}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
TIMEFORMAT='%R %U %S'
rows=() kept=() failed=0 runs=0 slowest=0
machine=$(sed -n 's/^model name\s*: //p' /proc/cpuinfo | head -1)

# Runs the demo once: a name of the kernels, a seed, and further flags. Returns 2 where the kernels do not run here.
play() {
    local isa=$1 seed=$2 data="$folder/data" status=0 before after wall cpu calculator=exact
    [[ ${3:-} != --noise ]] || calculator=noise
    rm -rf "$data"
    # The times are those of the demo and of its worker.
    {
        time "$binary" demo --agent --exit --isa "$isa" --seed "$seed" --listen 127.0.0.1:0 --data-dir "$data" "${@:3}" \
            >"$folder/out" 2>"$folder/err" || status=$?
    } 2>"$folder/time"
    if [[ $status != 0 ]] && grep -qE 'does not run on this machine' "$folder/out" "$folder/err"; then return 2; fi
    read -r before after < <(sed -n 's/^held-out sums solved.*: \([0-9.]*\) before, \([0-9.]*\) after.*/\1 \2/p' "$folder/out") || true
    wall=$(awk '{ printf "%.0f", $1 }' "$folder/time") cpu=$(awk '{ printf "%.0f", $2 + $3 }' "$folder/time")
    runs=$((runs + 1))
    ((cpu <= slowest)) || slowest=$cpu
    rows+=("| $calculator | $isa | $seed | ${before:-–} | ${after:-–} | $wall | $cpu | $machine, $(date -u +%F) |")
    echo "${rows[-1]}"
    if [[ $status != 0 ]] || ((cpu > 90)); then
        failed=$((failed + 1))
        tail -n 20 "$folder/out" "$folder/err" >&2
    fi
}

for isa in auto portable avx2 avx512 avx512_bf16 amx; do
    for seed in 1 2 3 4 5; do
        # Every instruction set gets two seeds, the fastest one all.
        [[ $isa == auto || $seed -le 2 ]] || continue
        skipped=0
        play "$isa" "$seed" || skipped=$?
        if [[ $skipped != 0 ]]; then
            echo "$isa does not run on this machine"
            [[ -z $table ]] || mapfile -t -O ${#kept[@]} kept < <(grep -F "| $isa |" "$table" || true)
            break
        fi
    done
done
for seed in 1 2 3 4 5; do play auto "$seed" --noise; done

echo "agent demo: $runs runs, $failed missed the goal or took more than 90 CPU seconds, the most were $slowest"
if [[ -n $table ]]; then
    {
        echo "# \`rlood demo --agent\`"
        echo
        echo "Made by \`tests/agent/run.sh\` (\`.ci/full agent\`). The share of 200 held-out sums that the bundled model solves, greedy, before and after 40"
        echo "steps of RLOO. Goals: with the exact calculator at most 0.2 before and at least 0.9 after, with one that answers with random numbers at most"
        echo "0.3 after; at most 90 s on two quiet cores. With noise no episode is ever paid, so the gradient is 0 and nothing is learned. The CPU seconds"
        echo "are those of the server, the worker and the calculator together; other programs may have run beside them, which the seconds include."
        echo "All machines had 2 cores. An instruction set that the last machine lacked keeps the figures of an earlier one."
        echo
        echo "| calculator | kernels | seed | before | after | seconds | CPU seconds | measured on |"
        echo "|---|---|---|---|---|---|---|---|"
        printf '%s\n' "${rows[@]}" "${kept[@]}"
    } >"$table"
fi
((failed == 0))
