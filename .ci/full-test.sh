#!/usr/bin/env bash
# Tests of .ci/full's records, in a repository of its own.
set -euo pipefail
full=$(realpath "$(dirname "$0")/full")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_SYSTEM=/dev/null
unset GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE
git init --quiet "$work/origin"
cd "$work/origin"
git config user.name test
git config user.email test@localhost
mkdir -p .ci a b
cp "$full" .ci/full
cat >.ci/sections.sh <<'SECTIONS'
section good nothing a
good() { echo "figure: sheep: 3"; echo "test result: ok. 4 passed; 0 failed;"; echo "test result: ok. 1 passed; 0 failed;"; }
section bad nothing b
bad() { false; echo "goes on after a failure"; }
section empty nothing b
empty() { echo "test result: ok. 0 passed; 0 failed;"; }
section absent "what is not here" b
absent() { echo "NOT RUN: it is not here"; }
SECTIONS
commit() { git add -A && git commit --quiet --allow-empty -m change; }
change() { echo "$RANDOM$RANDOM" >>"$1/file" && commit; }
change a
change b

# Runs .ci/full and compares its exit status, and a pattern with its output.
expect() {
    local status=$1 pattern=$2 got=0
    .ci/full "${@:3}" >"$work/out" 2>&1 || got=$?
    if [[ $got != "$status" ]] || ! grep -qE -- "$pattern" "$work/out"; then
        printf 'full %s: status %s, expected %s and /%s/:\n' "${*:3}" "$got" "$status" "$pattern" >&2
        cat "$work/out" >&2
        exit 1
    fi
}
expect 2 'no section other' other
expect 1 '^good +no record' --check
expect 0 '^good: passed' good
grep -qx 'result: passed' .ci/records/good
grep -qx 'sheep: 3' .ci/records/good
grep -qx 'tests: 5 passed, 0 failed' .ci/records/good
grep -qx "commit: $(git rev-parse HEAD)" .ci/records/good
expect 1 '^bad: failed' bad
[[ $(<"$work/out") != *"goes on after"* ]]
grep -qx 'result: failed' .ci/records/bad
expect 1 'no test was run' empty
grep -qx 'result: failed' .ci/records/empty
expect 1 '^absent: NOT RUN' absent
[[ ! -e .ci/records/absent ]]
expect 1 'Run .ci/full bad empty absent ' --check

# The rest is about a repository whose records all passed.
sed -i 's/false; //; s/NOT RUN/run/; s/0 passed/1 passed/' .ci/sections.sh
commit
expect 0 '^absent: passed'
commit
expect 0 '^good +passed .* behind: 0$' --check
change b
expect 0 '^good +passed .* behind: 0$' --check
change a
change a
expect 0 '^good +passed .* behind: 2$' --check
expect 0 '^bad +passed .* behind: 1$' --check

# Uncommitted changes in the paths that a section covers.
echo more >>a/file
expect 1 'NOT RUN: there are uncommitted changes' good
expect 0 '^good: passed' --no-record good
[[ -z $(git status --porcelain .ci/records) ]]
expect 0 '^bad: passed' bad
git checkout --quiet .

# A rebase: the record's commit is gone, another one holds the same.
sed -i "s/^commit: .*/commit: $(printf '0%.0s' {1..40})/" .ci/records/good
commit
expect 0 '^good +passed .* behind: 2$' --check

# Without history.
git clone --quiet --depth 1 "file://$work/origin" "$work/shallow"
cd "$work/shallow"
expect 0 '^good +passed .* behind: unknown' --check
expect 0 'shallow clone' --check
rm -rf .git
expect 0 'no git history' --check
sed -i 's/^result: .*/result: failed/' .ci/records/bad
expect 1 'Run .ci/full bad ' --check
echo "full: the tests of its records passed"
