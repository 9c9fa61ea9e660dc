#!/usr/bin/env bash
# Throws what the OpenAPI document allows, and what it forbids, at a running server: no 5xx, and every answer as the document
# says. The tool comes from PyPI; where it cannot be had, this says so and leaves with 0.
#
#   tests/schemathesis/run.sh [BINARY]                  10 examples an operation, besides what the tool makes of each schema
#   EXAMPLES=500 tests/schemathesis/run.sh [BINARY]     the long form
set -euo pipefail
here=$(realpath "$(dirname "$0")")
cd "$here/../.."
binary=${1:-target/release/rlood}
examples=${EXAMPLES:-10}
venv=$(realpath -m "${SCHEMATHESIS_VENV:-target/schemathesis}")
if [[ ! -x $venv/bin/schemathesis ]]; then
    if ! { python3 -m venv "$venv" && "$venv/bin/pip" install --quiet 'schemathesis==4.32.5'; }; then
        rm -rf "$venv"
        echo "NOT RUN: schemathesis cannot be installed here (python3 with venv and PyPI are needed)"
        exit 0
    fi
fi

work=$(mktemp -d)
server=
trap '[[ -z $server ]] || { kill $server && wait $server; } 2>/dev/null || true; rm -rf "$work"' EXIT
# Something to be found: a job that is over, with its metrics, samples and checkpoint.
"$binary" demo --exit --listen 127.0.0.1:0 --data-dir "$work/data" >"$work/demo" 2>&1 || { cat "$work/demo"; exit 1; }
# With a key: on an open server the first key that is made locks everybody else out. Nothing is trained meanwhile.
key=rld_schemathesis
# No hub is asked.
export HF_HUB_OFFLINE=1 HF_HOME=$work/no-cache
RLOOD_API_KEY=$key RLOOD_MODEL_ROOT=$PWD/tests/fixtures "$binary" serve --listen 127.0.0.1:0 --devices none --log warn \
    --data-dir "$work/data" >"$work/out" 2>"$work/log" &
server=$!
for _ in $(seq 100); do
    grep -q listening "$work/out" && break
    sleep 0.1
done
url=$(sed -n 's/^listening on //p' "$work/out")

# No operation is left out, and one check: a document that its schema allows may still name a model that is not there, or ask for
# more steps than its dataset has; those are 422 by design. Of all that a job's settings can be the tool makes some 17,000 cases,
# however few examples are asked for: so the two that take a job are a process each, and the short form leaves that phase out.
taking=(--phases examples,fuzzing)
[[ -z ${EXAMPLES:-} ]] || taking=()
run() {
    local name=$1
    shift
    mkdir "$work/$name"
    cd "$work/$name"
    "$venv/bin/schemathesis" --config-file "$here/schemathesis.toml" run "$url/openapi.json" "$@" -H "Authorization: Bearer $key" --max-examples "$examples" \
        --checks all --exclude-checks positive_data_acceptance --continue-on-failure --workers 1 --request-timeout 60 \
        --suppress-health-check all --no-shrink --no-color --generation-database none ${SEED:+--seed "$SEED"} >report 2>&1 || true
}
run validate --include-path /jobs/validate "${taking[@]}" &
validate=$!
run submit --include-operation-id create_job "${taking[@]}" &
submit=$!
run others --exclude-path /jobs/validate --exclude-operation-id create_job
wait $validate $submit

# The tool's own troubles (a connection that it lost) are no failures of the server: they are shown, and do not count.
status=0
for report in "$work"/*/report; do
    cut -c1-300 "$report" | sed -n '/= \(ERRORS\|FAILURES\) =/,/= WARNINGS =/p; /= SUMMARY =/,$p'
    if grep -q '^Failures:' "$report" || ! grep -q '^Test cases:' "$report"; then
        status=1
    fi
done
if ! kill -0 $server 2>/dev/null; then
    echo "the server is gone"
    status=1
fi
if grep -E ' ERROR ' "$work/log"; then
    echo "the server logged errors"
    status=1
fi
exit $status
