#!/usr/bin/env bash
# Makes a release: sets the version, dates the changelog, builds the files of the release, checks them as a user would, then commits and
# tags. docs/contributing/releasing.md describes the files and what to do with them.
#
#   scripts/release.sh VERSION               needs a clean tree; leaves a commit, the tag vVERSION and target/dist/VERSION
#   scripts/release.sh VERSION --dry-run     does the same in a copy of the tree, uncommitted changes included; no commit and no tag
#
# Needs Rust, git, binutils, and python3 with venv; PyPI for the cross compiler. For aarch64 also Debian's packages qemu-user and
# libc6-arm64-cross. Status 3: one of the Python tools cannot be installed.
set -euo pipefail
usage='usage: scripts/release.sh VERSION [--dry-run]'
version=${1:?$usage}
case ${2:-} in
    '') dry_run= ;;
    --dry-run) dry_run=yes ;;
    *) echo "$usage" >&2 && exit 2 ;;
esac
cd "$(dirname "$0")/.."
root=$PWD
# The binaries need no newer symbol of glibc: RHEL 8, Debian 10, Ubuntu 20.04, and all later ones.
glibc=2.28
# The second one is in the release only if it can be built and run here.
native=x86_64-unknown-linux-gnu foreign=aarch64-unknown-linux-gnu
# The libraries of glibc itself, and no others.
system_libraries='libc.so.6 libm.so.6 libdl.so.2 libpthread.so.0 librt.so.1 libutil.so.1 ld-linux-x86-64.so.2 ld-linux-aarch64.so.1'
tools=$root/target/zig
source=$root/target/dist/source
out=$root/target/dist/$version
work=$(mktemp -d)
mkdir "$work/user" "$work/home" "$work/empty"
trap 'rm -rf "$work"' EXIT
fail() {
    echo "release: $*" >&2
    exit 1
}
print_heading() { printf '\n-- %s\n' "$*"; }

# Runs a program with an empty home, without CA certificates and without a network, in namespaces of its own. The first argument is a CPU
# emulator or ''. The emulator runs the files whose name ends in .emulated, also those that the program starts. It is registered in the
# namespace only.
run_isolated() {
    local environment=(HOME="$work/home" PATH=/usr/sbin:/usr/bin:/sbin:/bin SSL_CERT_FILE="$work/none" SSL_CERT_DIR="$work/none")
    case $1 in
        *x86_64) environment+=(QEMU_CPU=qemu64) ;;
        *aarch64) environment+=(QEMU_LD_PREFIX=/usr/aarch64-linux-gnu) ;;
    esac
    # shellcheck disable=SC2016
    env -i "${environment[@]}" \
        unshare --net --mount --map-root-user sh -euc '
            ip link set lo up
            if [ "$1" ]; then
                mount -t binfmt_misc none /proc/sys/fs/binfmt_misc
                echo ":rlood:E::emulated::$1:F" >/proc/sys/fs/binfmt_misc/register
            fi
            shift
            exec "$@"' sh "$@"
}
# Why binaries for the foreign target cannot be built and run here; empty if they can.
foreign_obstacle() {
    if [[ ! -d $(rustc --print target-libdir --target "$foreign") ]] && ! timeout 300 rustup target add "$foreign" >/dev/null 2>&1; then
        echo "Rust's standard library for $foreign is not installed, and rustup cannot fetch it"
    elif ! command -v qemu-aarch64 >/dev/null || [[ ! -d /usr/aarch64-linux-gnu ]]; then
        echo "nothing here can run it (Debian's packages qemu-user and libc6-arm64-cross)"
    elif ! cp /usr/aarch64-linux-gnu/lib/ld-linux-aarch64.so.1 "$work/loader.emulated" \
        || ! run_isolated "$(command -v qemu-aarch64)" "$work/loader.emulated" --version >/dev/null 2>&1; then
        echo "this kernel does not let an emulator be registered in a namespace (Linux 6.7 or later does)"
    fi
}

print_heading "the tree"
[[ $(uname -sm) == "Linux x86_64" ]] || fail "releases are made on x86-64 Linux, because they are run to check them"
if git rev-parse --verify --quiet "refs/tags/v$version" >/dev/null; then
    fail "the tag v$version exists already"
fi
if [[ ! $dry_run && $(git status --porcelain) ]]; then
    fail "there are uncommitted changes: commit them first"
fi
SOURCE_DATE_EPOCH=$(git show -s --format=%ct HEAD)
export SOURCE_DATE_EPOCH

print_heading "the tools"
if [[ ! -x $tools/bin/cargo-zigbuild ]] || ! "$tools/bin/python" -c 'import ziglang, cyclonedx, jsonschema' 2>/dev/null; then
    if ! { python3 -m venv "$tools" && "$tools/bin/pip" install --quiet \
        cargo-zigbuild==0.24.1 ziglang==0.17.1 'cyclonedx-python-lib[json-validation]==11.12.0'; }; then
        rm -rf "$tools"
        echo "release: the tools cannot be installed here: python3 with venv and PyPI are needed" >&2
        exit 3
    fi
fi
"$tools/bin/cargo-zigbuild" --version

# All that follows happens in a copy. Only when every check has passed are the changed files copied back.
print_heading "version $version, in a copy of the tree"
rm -rf "$source" "$out"
mkdir -p "$source" "$out"
git ls-files -z --cached --others --exclude-standard | while IFS= read -r -d '' file; do
    [[ ! -e $file && ! -L $file ]] || printf '%s\0' "$file"
done >"$work/files"
tar -c --null -T "$work/files" | tar -x -C "$source"
cd "$source"
python3 scripts/release_files.py bump "$version" "$(date -u +%F)" >"$work/changed"
mapfile -t changed <"$work/changed"
printf 'changed: %s\n' "${changed[@]}"
python3 scripts/release_files.py notes "$version" >"$work/notes"
cargo metadata --locked --format-version 1 >/dev/null || fail "Cargo.lock does not fit the new version"

# Any x86-64 CPU must run the binary, so no flag of this machine's environment may choose newer instructions. The program itself chooses
# its kernels when it runs. The paths of the builder's home are kept out of the messages of panics.
unset CARGO_ENCODED_RUSTFLAGS CARGO_BUILD_RUSTFLAGS CARGO_BUILD_TARGET RUSTC_WRAPPER CFLAGS CXXFLAGS CPPFLAGS LDFLAGS
unset "${!CARGO_TARGET_@}" "${!CFLAGS_@}" "${!CARGO_PROFILE_RELEASE_@}"
export RUSTFLAGS="--remap-path-prefix=${CARGO_HOME:-$HOME/.cargo}/registry/src=/cargo"
export CARGO_TARGET_DIR=$root/target/dist/build
# A release is built from nothing; a dry run uses what an earlier one built.
[[ $dry_run ]] || rm -rf "$CARGO_TARGET_DIR"

# Packs a folder of $work: the same files give the same bytes.
pack() {
    tar -c --sort=name --format=gnu --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner -C "$work" "$1" | gzip -n -9 >"$out/$1.tar.gz"
}
targets=("$native")
obstacle=$(foreign_obstacle)
[[ $obstacle ]] || targets+=("$foreign")
for target in "${targets[@]}"; do
    print_heading "$target, glibc $glibc or later"
    machine=${target%%-*} name=rlood-$version-$target
    PATH=$tools/bin:$PATH RLOOD_BUILD_TARGET=$target.$glibc docker/build.sh "$work/$name"
    python3 scripts/release_files.py sbom "$target" "$out/$name.cdx.json" >"$work/components"
    echo "figure: $target: $(<"$work/components") components in the bill of materials"
    python3 scripts/release_files.py licenses "$target" "$work/$name/LICENSES-THIRD-PARTY.txt" >/dev/null
    cp README.md CHANGELOG.md LICENSE-* "$work/$name"
    pack "$name"
    python3 python/build_wheel.py "$work/$name/rlood" "$out"

    # The image without a compiler: the last stage of docker/Dockerfile, and the binary instead of the first stage.
    container=rlood-$version-container-$machine
    mkdir "$work/$container"
    sed -n '/^FROM debian/,$p' docker/Dockerfile | sed 's#^COPY --from=build /out/#COPY #' >"$work/$container/Dockerfile"
    sed 's#context: \.\.#context: .#; s#dockerfile: docker/#dockerfile: #' docker/compose.yaml >"$work/$container/compose.yaml"
    cp "$work/$name/rlood" LICENSE-* "$work/$name/LICENSES-THIRD-PARTY.txt" "$work/$container"
    pack "$container"
done

print_heading "the sources, from which docker/Dockerfile and docker/Dockerfile.cuda build images"
mkdir "$work/rlood-$version-source"
tar -c --null -T "$work/files" | tar -x -C "$work/rlood-$version-source"
pack "rlood-$version-source"
(cd "$out" && sha256sum -- * >"$work/SHA256SUMS" && mv "$work/SHA256SUMS" .)
ls -l "$out"

# From here on as a user: with the files of the release alone, in an empty folder.
cp "$out"/* "$work/user"
cd "$work/user"
print_heading "check: checksums and bills of materials"
sha256sum --check --quiet SHA256SUMS
"$tools/bin/python" - ./*.cdx.json <<'PYTHON'
import sys
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
for path in sys.argv[1:]:
    error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(open(path).read())
    if error:
        sys.exit(f"{path} is not CycloneDX 1.6: {error}")
PYTHON

for target in "${targets[@]}"; do
    print_heading "check: $target"
    # cargo-binstall looks for this archive and this file in it.
    { read -r archive && read -r path; } < <(cd "$source" && python3 scripts/release_files.py asset "$target")
    [[ -f $archive ]] || fail "[package.metadata.binstall] of Cargo.toml expects the archive $archive"
    tar -xzf "$archive"
    [[ -x $path ]] || fail "[package.metadata.binstall] of Cargo.toml expects $path in $archive"
    readelf -V "$path" | grep -o 'GLIBC_[0-9.]\+' | sort -uV >"$work/symbols"
    # The mark of packed relocations, which glibc reads since 2.36: build.rs does not ask for them here.
    ! readelf -V "$path" | grep -q GLIBC_ABI_DT_RELR || fail "$path needs glibc 2.36, which is newer than $glibc"
    newest=$(tail -1 "$work/symbols")
    [[ $(printf '%s\n' "${newest#GLIBC_}" "$glibc" | sort -V | tail -1) == "$glibc" ]] || fail "$path needs $newest, which is newer than $glibc"
    mapfile -t needed < <(readelf -d "$path" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p')
    for library in "${needed[@]}"; do
        [[ " $system_libraries " == *" $library "* ]] || fail "$path needs the library $library"
    done
    if grep -qF "$HOME/" "$path"; then
        fail "$path contains paths of the builder's home"
    fi
    echo "figure: $archive: $(($(stat -c %s "$archive") / 1000000)) MB, needs $newest at most; libraries: ${needed[*]}"
    wheels=(rlood-"$version"-py3-none-manylinux_*_"${target%%-*}.whl")
    tag=${wheels[0]#*manylinux_2_}
    ((${tag%%_*} <= ${glibc#2.})) || fail "${wheels[0]} asks for a newer glibc than $glibc"
    tar -xzf "rlood-$version-container-${target%%-*}.tar.gz"
    copied=$(sed -n 's/^COPY \(.*\) .*/\1/p' "rlood-$version-container-${target%%-*}/Dockerfile")
    [[ $copied == rlood ]] || fail "the container's Dockerfile copies \"$copied\", and not only the binary"
    cmp "$path" "rlood-$version-container-${target%%-*}/rlood"
done
binary=$work/user/rlood-$version-$native/rlood
[[ $("$binary" --version) == "rlood $version" ]] || fail "the binary says it is $("$binary" --version)"
"$binary" openapi | cmp - "$source/openapi/openapi.json" || fail "openapi/openapi.json is stale: rlood openapi > openapi/openapi.json"

print_heading "check: the demo, in an empty folder and without a network"
cd "$work/empty"
began=$SECONDS
if run_isolated '' true 2>/dev/null; then
    run_isolated '' "$binary" demo --exit --listen 127.0.0.1:0
else
    echo "Namespaces are not permitted here: the demo runs with the network"
    env -i HOME="$work/home" PATH=/usr/bin:/bin "$binary" demo --exit --listen 127.0.0.1:0
fi
echo "figure: the demo in an empty folder: $((SECONDS - began)) s"
[[ -z $(ls -A) ]] || fail "the demo left files in the folder it was called in: $(ls -A)"

# The demo takes an hour in an emulator; the checks of `rlood check` and one step of training, the smallest there is, take a minute.
run_emulated() {
    local emulator=$1 name=$2
    cp "$3" "$work/rlood.emulated"
    run_isolated "$emulator" "$work/rlood.emulated" check
    run_isolated "$emulator" "$work/rlood.emulated" bench --shape tiny --only step --prompts 1 --generations 2 --prompt-len 8 --completion 4 --steps 1
    echo "figure: one step of training on an emulated CPU, $name: passed"
}
print_heading "check: an x86-64 CPU without AVX"
if emulator=$(command -v qemu-x86_64) && cp "$binary" "$work/rlood.emulated" && run_isolated "$emulator" "$work/rlood.emulated" --version; then
    run_emulated "$emulator" "x86-64 without AVX" "$binary"
else
    echo "figure: NOT CHECKED on an x86-64 CPU without AVX: qemu-x86_64 (Debian's package qemu-user) cannot be used here"
fi
print_heading "check: $foreign"
if [[ $obstacle ]]; then
    echo "figure: NOT BUILT: $foreign: $obstacle"
else
    run_emulated "$(command -v qemu-aarch64)" "${foreign%%-*}" "$work/user/rlood-$version-$foreign/rlood"
fi

print_heading "check: the wheel, in a fresh environment"
unset PYTHONPATH
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-index "$work/user/rlood-$version"-py3-none-*_x86_64.whl
cmp "$work/venv/bin/rlood" "$binary"
cd "$work/empty"
[[ $("$work/venv/bin/python" -m rlood --version) == "rlood $version" ]]
HOME=$work/home "$work/venv/bin/python" -c 'import rlood
with rlood.serve() as client:
    print("jobs of a server that the package started:", list(client.jobs()))'

print_heading "check: the sources"
cd "$work/user"
tar -xzf "rlood-$version-source.tar.gz"
(cd "rlood-$version-source" && cargo metadata --locked --offline --no-deps --format-version 1 | grep -q "\"version\":\"$version\"")

cd "$root"
if [[ $obstacle ]]; then
    print_heading "this release is for x86-64 Linux only: $obstacle"
fi
if [[ $dry_run ]]; then
    print_heading "dry run: the files are in ${out#"$root"/}; nothing was committed or tagged"
    exit
fi
for file in "${changed[@]}"; do
    cp "$source/$file" "$file"
done
git add -- "${changed[@]}"
git commit --quiet -m "Release $version"
git tag --annotate --cleanup=verbatim -F - "v$version" < <(printf 'rlood %s\n\n' "$version" && cat "$work/notes")
print_heading "committed and tagged v$version; the files are in ${out#"$root"/}. Next: git push --follow-tags, and publish the files"
