#!/usr/bin/env bash
# Runs the browser tests against a built binary. Requires node 20 or later, npm and Chromium; without them, the tests are skipped.
# Usage: tests/web/run.sh [BINARY] [FILE.test.mjs …]. Screenshots are saved to target/browser.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
RLOOD=$(realpath "${1:-$root/target/release/rlood}")
shift || true
export RLOOD SCREENSHOTS="$root/target/browser" RLOOD_ASSETS="$root/assets" WEB="$root/web"
export CHROMIUM=${CHROMIUM:-$(command -v chromium-headless-shell || command -v chromium || command -v chromium-browser || true)}
if [ -z "$CHROMIUM" ] || ! command -v npm >/dev/null; then
    echo "skipped: the browser tests require node, npm and chromium"
    exit 0
fi
# The tests run in a temporary folder, so that node_modules does not end up in the repository.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$here"/*.mjs "$here/package.json" "$work"
cd "$work"
npm install --no-audit --no-fund --no-package-lock --silent
mkdir -p "$SCREENSHOTS"
if [ $# -eq 0 ]; then set -- *.test.mjs; fi
# Run three files at a time, the longest first; then the performance test, which measures times, alone.
long=() together=() alone=()
for file in "$@"; do
    file=$(basename "$file")
    case $file in
        load.test.mjs) alone+=("$file") ;;
        looks.test.mjs | attacks.test.mjs) long+=("$file") ;;
        *) together+=("$file") ;;
    esac
done
together=("${long[@]}" "${together[@]}")
if [ ${#together[@]} -gt 0 ]; then node --test --test-concurrency=3 --test-reporter=spec "${together[@]}"; fi
if [ ${#alone[@]} -gt 0 ]; then node --test --test-reporter=spec "${alone[@]}"; fi
