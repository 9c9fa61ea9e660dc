#!/usr/bin/env bash
# Browser tests of a built binary. Needs node, npm and Chromium; says so and skips where they are missing.
# usage: tests/browser/run.sh [BINARY]      screenshots go to target/browser
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
binary=$(realpath "${1:-$root/target/release/rlood}")
export CHROMIUM=${CHROMIUM:-$(command -v chromium || command -v chromium-browser || true)}
if [ -z "$CHROMIUM" ] || ! command -v npm >/dev/null; then
    echo "skipped: the browser tests need node, npm and chromium"
    exit 0
fi
work=$(mktemp -d)
trap '[ -z "${server:-}" ] || kill "$server" 2>/dev/null || true; rm -rf "$work"' EXIT
cp "$here/package.json" "$here/pages.mjs" "$work"
(cd "$work" && npm install --no-audit --no-fund --silent)
"$binary" serve --listen 127.0.0.1:0 --data-dir "$work/data" --devices none >"$work/out" 2>"$work/err" &
server=$!
for _ in $(seq 100); do
    url=$(sed -n 's/^listening on //p' "$work/out")
    [ -n "$url" ] && break
    sleep 0.1
done
[ -n "$url" ] || { cat "$work/err"; exit 1; }
node "$work/pages.mjs" "$url" "$root/target/browser"
