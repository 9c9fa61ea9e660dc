#!/usr/bin/env bash
# Builds the wheel from a binary, installs it into an environment of its own, and runs what it brings: the binary, the client's tests
# and the notebook. The notebook is run by Jupyter where PyPI can be reached, and cell by cell where it cannot.
#
#   python/tests/run.sh BINARY [FOLDER]           the wheel is left in FOLDER (default: target/wheels)
set -euo pipefail
binary=$(realpath "${1:?usage: python/tests/run.sh BINARY [FOLDER]}")
wheels=$(realpath -m "${2:-$(dirname "$0")/../../target/wheels}")
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if ! python3 -m venv "$work/venv" >/dev/null 2>&1; then
    echo "NOT RUN: python3 with venv is needed"
    exit 0
fi
unset RLOOD_BINARY PYTHONPATH
python=$work/venv/bin/python

scripts/python_types.py --check
python3 python/build_wheel.py "$binary" "$work/first" >/dev/null
wheel=$(python3 python/build_wheel.py "$binary" "$wheels")
cmp "$work"/first/*.whl "$wheel"
echo "figure: $(basename "$wheel"), $(($(stat -c %s "$wheel") / 1000000)) MB"
"$python" -m pip install --quiet --no-index "$wheel"
# From elsewhere, so that nothing is found here.
root=$PWD
cd "$work"
expected=$("$binary" --version)
[[ $("$work/venv/bin/rlood" --version) == "$expected" ]]
[[ $("$python" -m rlood --version) == "$expected" ]]
[[ $("$python" -c 'import importlib.metadata as m; print("rlood", m.version("rlood"))') == "$expected" ]]
for place in target prefix; do
    "$python" -m pip install --quiet --no-index --ignore-installed "--$place" "$work/$place" "$wheel"
    installed=$(find "$work/$place" -path '*/rlood/client.py' -printf '%h\n')
    [[ $(PYTHONPATH=$(dirname "$installed") python3 -m rlood --version) == "$expected" ]]
    [[ $(PYTHONPATH=$(dirname "$installed") python3 -c 'import rlood; print(rlood.find_rlood_bin())') == "$work/$place"/* ]]
done

"$python" -m unittest discover --start-directory "$root/python/tests" 2>&1 | tee tests
echo "figure: client's tests: $(sed -n 's/^Ran \([0-9]*\) tests.*/\1/p' tests)"

"$python" "$root/python/tests/run_notebook.py" "$root/python/notebooks/first_job.ipynb"
if "$python" -m pip install --quiet nbconvert ipykernel >/dev/null 2>&1; then
    "$work/venv/bin/jupyter" nbconvert --log-level ERROR --to notebook --execute --output-dir "$work" "$root/python/notebooks/first_job.ipynb"
    grep -q 'The trained model is better' "$work/first_job.ipynb"
    echo "figure: the notebook in Jupyter: the trained model is better"
else
    echo "Jupyter cannot be installed here: the notebook's cells were run without it"
fi
