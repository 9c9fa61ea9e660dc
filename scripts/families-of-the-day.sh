#!/usr/bin/env bash
# Links the parity cases of two model families, which the day chooses, into a new folder: RLOOD_PARITY takes it.
# usage: scripts/families-of-the-day.sh YYYY-MM-DD FOLDER
set -euo pipefail
day=$(($(date -ud "$1" +%s) / 86400))
folder=$2
cd "$(dirname "$0")/../tests/fixtures/parity"
# The model type of the whole is indented once, those of its parts twice.
type_of() { sed -n 's/^ \{1,2\}"model_type": "\([^"]*\)".*/\1/p' "$1/config.json"; }
# A case of a family that is refused has no weights.
mapfile -t all < <(for case in *; do if compgen -G "$case/model*.safetensors" >/dev/null; then echo "$case"; fi; done)
mapfile -t families < <(for case in "${all[@]}"; do type_of "$case"; done | LC_ALL=C sort -u)
mkdir -p "$folder"
for n in 0 1; do
    family=${families[(2 * day + n) % ${#families[@]}]}
    cases=()
    for case in "${all[@]}"; do
        if [[ $(type_of "$case") == "$family" ]]; then
            ln -sfn "$PWD/$case" "$folder/$case"
            cases+=("$case")
        fi
    done
    echo "$family: ${cases[*]}"
done
