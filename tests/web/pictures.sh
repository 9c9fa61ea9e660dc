#!/usr/bin/env bash
# Takes the pictures under docs/images and docs/images/pages. Requires the programs that run.sh requires, and Python with Pillow, which
# reduces each picture to 150 KB or less.
# Usage: tests/web/pictures.sh [BINARY]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
RLOOD=$(realpath "${1:-$root/target/release/rlood}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -c "import PIL" || { echo "Pillow is missing: pip install pillow"; exit 1; }
export RLOOD SCREENSHOTS="$work/shots" RLOOD_ASSETS="$root/assets"
CHROMIUM=${CHROMIUM:-$(command -v chromium || command -v chromium-browser)}
export CHROMIUM
cp "$here"/*.mjs "$here/package.json" "$work"
cd "$work"
npm install --no-audit --no-fund --no-package-lock --silent
node pictures.mjs
mkdir -p "$root/docs/images/pages"
python3 - "$SCREENSHOTS" "$root/docs/images" <<'PYTHON'
import pathlib, sys
from PIL import Image
for path in sorted(pathlib.Path(sys.argv[1]).glob("picture-*.png")):
    to = pathlib.Path(sys.argv[2]) / path.name.removeprefix("picture-").replace("pages-", "pages/")
    for colors in (256, 64, 32, 16):
        Image.open(path).convert("RGB").quantize(colors, dither=Image.Dither.NONE).save(to, optimize=True)
        if to.stat().st_size <= 150_000:
            break
    print(to.name, to.stat().st_size)
PYTHON
