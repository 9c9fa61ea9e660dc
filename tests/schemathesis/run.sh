#!/usr/bin/env bash
# Throws what the OpenAPI document allows, and what it forbids, at a running server: no 5xx, and every answer as the document
# says. The tool comes from PyPI; where it cannot be had, this says so and leaves with 0.
#
#   tests/schemathesis/run.sh [BINARY]                  a few examples an operation
#   EXAMPLES=500 tests/schemathesis/run.sh [BINARY]     the long form
set -euo pipefail
cd "$(dirname "$0")/../.."
binary=${1:-target/release/rlood}
examples=${EXAMPLES:-10}
venv=${SCHEMATHESIS_VENV:-target/schemathesis}
if [[ ! -x $venv/bin/schemathesis ]]; then
    if ! { python3 -m venv "$venv" && "$venv/bin/pip" install --quiet 'schemathesis==4.32.5'; }; then
        rm -rf "$venv"
        echo "NOT RUN: schemathesis cannot be installed here (python3 with venv and PyPI are needed)"
        exit 0
    fi
fi

work=$(mktemp -d)
# With a key: on an open server the first key that is made locks everybody else out.
key=rld_schemathesis
RLOOD_API_KEY=$key RLOOD_MODEL_ROOT=$PWD/tests/fixtures "$binary" serve --listen 127.0.0.1:0 --devices none --log warn --data-dir "$work/data" >"$work/out" 2>"$work/log" &
server=$!
trap 'kill $server 2>/dev/null; wait $server 2>/dev/null || true; rm -rf "$work"' EXIT
for _ in $(seq 100); do
    grep -q listening "$work/out" && break
    sleep 0.1
done
url=$(sed -n 's/^listening on //p' "$work/out")
post() { curl -sfS -o "$work/answer" -X POST -H "authorization: Bearer $key" -H 'content-type: application/json' -d "$2" "$url$1" || { cat "$work/answer"; exit 1; }; }
# Something to be found: a model, a dataset, jobs.
post /models "{\"id\": \"tiny\", \"source\": \"$PWD/tests/fixtures/parity/qwen3\"}"
for _ in 1 2; do
    post /jobs '{"model": "tiny", "dataset": {"records": [{"prompt": "a"}, {"prompt": "b"}]}, "rewards": [{"type": "length"}],
                 "training": {"prompts_per_step": 2, "max_steps": 2}, "sampling": {"max_completion_length": 4}}'
done

# The stream of all jobs' changes has no end, so it is left out. One check is left out: a document that its schema allows may still name a model that is not there, or ask for more steps
# than its dataset has; those are 422 by design.
"$venv/bin/schemathesis" run "$url/openapi.json" --exclude-path /jobs/changes -H "Authorization: Bearer $key" --max-examples "$examples" \
    --checks all --exclude-checks positive_data_acceptance --phases examples,coverage,fuzzing --continue-on-failure \
    --workers 2 --request-timeout 20 --suppress-health-check all --no-shrink ${SEED:+--seed "$SEED"} >"$work/report" 2>&1 ||
    echo "not everything passed:"
# The tool's own troubles (a schema it cannot make examples of) are no failures of the server: they are shown, and do not count.
cut -c1-300 "$work/report" | sed -n '/= FAILURES =/,/= WARNINGS =/p; /= SUMMARY =/,$p'
status=0
if grep -q '^Failures:' "$work/report" || ! grep -q '^Test cases:' "$work/report"; then
    status=1
fi
if ! kill -0 $server 2>/dev/null; then
    echo "the server is gone"
    status=1
fi
if grep -E ' ERROR ' "$work/log"; then
    echo "the server logged errors"
    status=1
fi
exit $status
