#!/usr/bin/env bash
# Tests of scripts/release_files.py and of what scripts/release.sh refuses, in a small repository of their own. The build and the checks of
# its files are the section `release` of .ci/full.
set -euo pipefail
scripts=$(realpath "$(dirname "$0")")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_SYSTEM=/dev/null
unset GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE
git init --quiet "$work/repository"
cd "$work/repository"
git config user.name test
git config user.email test@localhost
mkdir -p scripts openapi docs/guides
cp "$scripts/release.sh" "$scripts/release_files.py" scripts
cat >Cargo.toml <<'TOML'
[workspace]
members = ["crates/*"]

[workspace.package]
edition = "2024"
version = "0.2.0"

[package]
name = "rlood"
version.workspace = true

[package.metadata.binstall]
pkg-url = "{ repo }/releases/download/v{ version }/{ name }-{ version }-{ target }.tar.gz"
bin-dir = "{ name }-{ version }-{ target }/{ bin }"

[workspace.dependencies]
other = { version = "0.2.0" }
TOML
cat >Cargo.lock <<'LOCK'
version = 4

[[package]]
name = "other"
version = "0.2.0"
source = "registry+https://example.org/index"
checksum = "00"

[[package]]
name = "rlood"
version = "0.2.0"
dependencies = [
 "other",
]

[[package]]
name = "rlood-types"
version = "0.2.0"
LOCK
cat >CHANGELOG.md <<'CHANGES'
# Changelog

## [Unreleased]

### Added
- A route, since 0.2.0.
  It has two lines.

## [0.1.0] - 2026-01-31

### Added
- The first version.
CHANGES
printf '{\n  "info": {\n    "version": "0.2.0"\n  },\n  "example": {"version": "0.2.0"}\n}\n' >openapi/openapi.json
printf 'pip install rlood-0.2.0-py3-none-any.whl; started in 0.2.0\n' >docs/guides/python.md
git add -A
git commit --quiet -m start

# Runs a command and compares its exit status, and a pattern with its output.
expect() {
    local status=$1 pattern=$2 got=0
    "${@:3}" >"$work/output" 2>&1 || got=$?
    if [[ $got != "$status" ]] || ! grep -qE -- "$pattern" "$work/output"; then
        printf '%s: status %s, expected %s and /%s/:\n' "${*:3}" "$got" "$status" "$pattern" >&2
        cat "$work/output" >&2
        exit 1
    fi
}
files() { expect "$1" "$2" scripts/release_files.py "${@:3}"; }

files 1 'must have the form 1.2.3' bump 1.0 2026-12-01
files 1 'must have the form 1.2.3' bump 1.0.0-rc.1 2026-12-01
files 1 'must have the form 1.2.3' bump 01.0.0 2026-12-01
files 1 'must not be lower' bump 0.1.9 2026-12-01
files 1 'no section for version 0.3.0' notes 0.3.0
files 0 '^- The first version' notes 0.1.0
files 0 'It has two lines' notes
[[ -z $(git status --porcelain) ]]

# 0.10.0 is higher than 0.2.0.
files 0 '^CHANGELOG.md$' bump 0.10.0 2026-12-01
diff -u <(git diff --unified=0 | grep -E '^[-+]' | grep -vE '^(---|\+\+\+)') - <<'DIFF'
+## [0.10.0] - 2026-12-01
+
-version = "0.2.0"
+version = "0.10.0"
-version = "0.2.0"
+version = "0.10.0"
-version = "0.2.0"
+version = "0.10.0"
-pip install rlood-0.2.0-py3-none-any.whl; started in 0.2.0
+pip install rlood-0.10.0-py3-none-any.whl; started in 0.2.0
-    "version": "0.2.0"
+    "version": "0.10.0"
DIFF
files 0 'two lines' notes 0.10.0
files 0 '^rlood-0.10.0-some-target/rlood$' asset some-target
files 0 '^rlood-0.10.0-some-target.tar.gz$' asset some-target
files 1 'no entries under Unreleased' notes
files 1 'no entries under Unreleased' bump 0.11.0 2026-12-02
sed -i 's/^## \[Unreleased\]/&\n\n- One more./' CHANGELOG.md
files 1 'has a section for version 0.10.0 already' bump 0.10.0 2026-12-02
files 0 . bump 0.11.0 2026-12-02
diff -u <(grep '^## ' CHANGELOG.md) - <<'HEADINGS'
## [Unreleased]
## [0.11.0] - 2026-12-02
## [0.10.0] - 2026-12-01
## [0.1.0] - 2026-01-31
HEADINGS
sed -i '/^## \[Unreleased\]/d' CHANGELOG.md
files 1 'one heading "## \[Unreleased\]"; it has 0' bump 0.12.0 2026-12-03

# The first release of the version that Cargo.toml has already, below a heading without brackets.
git checkout --quiet .
sed -i 's/^## \[Unreleased\]/## Unreleased/' CHANGELOG.md
files 0 '^CHANGELOG.md$' bump 0.2.0 2026-12-01
grep -qx '## 0.2.0 - 2026-12-01' CHANGELOG.md
[[ $(git status --porcelain) == ' M CHANGELOG.md' ]]

# What release.sh refuses before it builds anything.
expect 1 'there are uncommitted changes' scripts/release.sh 0.3.0
git checkout --quiet .
git tag v0.3.0
expect 1 'the tag v0.3.0 exists already' scripts/release.sh 0.3.0 --dry-run
expect 2 '^usage: ' scripts/release.sh 0.4.0 --other
expect 1 'usage: ' scripts/release.sh
[[ -z $(git status --porcelain) ]]
echo "release: the tests of the version and the changelog passed"
