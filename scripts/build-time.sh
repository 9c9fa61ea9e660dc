#!/usr/bin/env bash
# Runs the README's demo command in a target folder without its crates, and holds what the build costs to the ledger,
# benches/results/build.md: the command's CPU seconds over those of three dependencies whose versions are fixed in Cargo.lock. A ratio
# in one run, so that the machine's speed does not count. Fails when it is 15 % above the ledger's.
#
#   scripts/build-time.sh             prints the figures; without a verdict when something was built before
set -euo pipefail
cd "$(dirname "$0")/.."
fixed='candle_core tokenizers rustls'
times=$(mktemp)
data=$(mktemp -d)
trap 'rm -rf "$times" "$data"' EXIT
TIMEFORMAT='%U %S'
exec 3>&1 4>&2
total=$({ time RUSTC_WRAPPER=$PWD/scripts/rustc-time.sh RLOOD_RUSTC_TIMES=$times \
    cargo run --release --locked -- demo --exit --listen 127.0.0.1:0 --data-dir "$data" >&3 2>&4; } 2>&1 | tail -1)
total=$(awk '{ print $1 + $2 }' <<<"$total")
echo "CPU seconds of our own crates, and of others above 5:"
sort -k2 -rn "$times" | awk '$2 > 5 || $1 ~ /^rlood_/ { printf "  %-24s %6.1f\n", $1, $2 }'
yardstick=$(awk -v fixed="$fixed" 'BEGIN { n = split(fixed, names) } { spent[$1] += $2 }
    END { for (i = 1; i <= n; i++) { if (!(names[i] in spent)) exit 1; sum += spent[names[i]] } print sum }' "$times") || {
    echo "NO VERDICT: the target folder holds crates already ($total CPU seconds); it is given where $fixed are compiled too"
    exit 0
}
ledger=$(sed -n 's/^Ratio of the demo command: \*\*\([0-9.]*\)\*\*.*/\1/p' benches/results/build.md)
awk -v total="$total" -v yardstick="$yardstick" -v ledger="$ledger" 'BEGIN {
    ratio = total / yardstick
    printf "the demo command: %.0f CPU seconds, its yardstick %.1f, ratio %.2f (ledger %.2f, at most %.2f)\n", total, yardstick, ratio, ledger, ledger * 1.15
    if (ledger <= 0 || ratio > ledger * 1.15) {
        print "the build has become dearer: make it cheaper, or name the reason and the new ratio in benches/results/build.md" > "/dev/stderr"
        exit 1
    }
}'
