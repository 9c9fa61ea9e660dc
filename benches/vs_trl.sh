#!/usr/bin/env bash
# The same RLOO steps by TRL's RLOOTrainer and by rlood, in turns, on this machine: whole step, decode, training, memory.
#
#   benches/vs_trl.sh [--trl DIR] [--rlood PROGRAM] [--repeat N] [--steps N] [--dtype bf16|f32] [--name NAME] [SHAPE…]
#
# SHAPE: tiny (prompt 32, completion 128), small (32, 64), 0.6b (32, 64), small-512 (512, 64, 8 completions a prompt);
# default: all four. DIR holds trl_rloo.py and make_model.py (or RLOOD_TRL_BENCH says so); RLOOD_TRL_PYTHON is a Python
# with torch, transformers, trl, peft, accelerate, datasets; RLOOD_TRL_MODELS is where their random models are kept
# (default: a folder under the temporary directory). Writes benches/results/NAME.{json,md}, NAME = vs_trl by default.
#
# Each turn is one process of ours, then one of TRL's. Whole steps are compared by the fastest step, decode and training by
# the best median; TRL counts in its faster mode of bf16 and f32 (the slower one is measured once), and is run once more
# with a malloc that never gives memory back, which suits it. Our training time includes the optimizer, TRL's does not.
set -euo pipefail
cd "$(dirname "$0")/.."

trl=${RLOOD_TRL_BENCH:-}
python=${RLOOD_TRL_PYTHON:-python3}
models=${RLOOD_TRL_MODELS:-${TMPDIR:-/tmp}/rlood-trl-models}
rlood=target/release/rlood
repeat=3 steps=3 dtype=bf16 name=vs_trl
shapes=()
while (($#)); do
    case $1 in
        --trl) trl=$2; shift 2 ;;
        --rlood) rlood=$2; shift 2 ;;
        --repeat) repeat=$2; shift 2 ;;
        --steps) steps=$2; shift 2 ;;
        --dtype) dtype=$2; shift 2 ;;
        --name) name=$2; shift 2 ;;
        tiny | small | 0.6b | small-512) shapes+=("$1"); shift ;;
        *) echo "unknown argument: $1 (see the top of $0)" >&2; exit 2 ;;
    esac
done
((${#shapes[@]})) || shapes=(tiny small 0.6b small-512)

absent() { echo "nothing compared: $1"; exit 0; }
[[ -n $trl ]] || absent "give the folder of trl_rloo.py and make_model.py by --trl or RLOOD_TRL_BENCH"
[[ -f $trl ]] && trl=$(dirname "$trl")
for file in trl_rloo.py make_model.py; do
    [[ -f $trl/$file ]] || absent "$trl/$file is missing"
done
"$python" -c 'import torch, transformers, trl, peft, accelerate, datasets' 2>/dev/null \
    || absent "$python cannot import torch, transformers, trl, peft, accelerate, datasets; set RLOOD_TRL_PYTHON"
[[ -x $rlood ]] || { echo "$rlood is missing: cargo build --release" >&2; exit 1; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$models" benches/results

# Dimensions of a row of the table: model, our name of it, prompt, completion, prompts, completions a prompt.
row() {
    case $1 in
        tiny) echo tiny tiny 32 128 4 4 ;;
        small) echo small small 32 64 4 4 ;;
        0.6b) echo 0.6b qwen3-0.6b 32 64 4 4 ;;
        small-512) echo small small 512 64 4 8 ;;
    esac
}

ours() { # shape turn
    read -r _ shape prompt completion prompts generations < <(row "$1")
    "$rlood" --log warn bench --only step --shape "$shape" --prompts "$prompts" --generations "$generations" \
        --prompt-len "$prompt" --completion "$completion" --dtype "$dtype" --steps "$steps" \
        --json "$work/$1.ours.$2.json" | sed -n '/RLOO step/,$p'
}

trl_step() { # shape mode label [environment…]
    local key=$1 mode=$2 label=$3
    shift 3
    read -r model _ prompt completion prompts generations < <(row "$key")
    local dir=$models/$model-$mode
    if [[ ! -f $dir/config.json ]]; then
        "$python" -W ignore "$trl/make_model.py" --arch qwen3 --size "$model" --dtype "$mode" --out "$dir" >/dev/null 2>&1
    fi
    env "$@" ${limit:+timeout "$limit"} "$python" -W ignore "$trl/trl_rloo.py" --model "$dir" --mode "$mode" --prompts "$prompts" \
        --generations "$generations" --prompt-len "$prompt" --completion "$completion" --steps "$steps" \
        --label "$label" --out "$work/$key.trl.jsonl" 2>"$work/stderr" | grep ': step' \
        || { [[ -n ${limit:-} ]] && echo "TRL $mode: slower than $limit s, given up" && return; tail -5 "$work/stderr" >&2; echo "TRL failed: $key $mode $label" >&2; exit 1; }
}

# The mode of TRL that was faster so far.
faster() {
    "$python" - "$work/$1.trl.jsonl" <<'PY'
import json, sys
records = [json.loads(line) for line in open(sys.argv[1])]
print(min(records, key=lambda record: record["step_min"])["mode"])
PY
}

for key in "${shapes[@]}"; do
    echo "== $key"
    for turn in $(seq "$repeat"); do
        ours "$key" "$turn"
        if ((turn == 1)); then
            begun=$SECONDS
            trl_step "$key" f32 stock
            taken=$((SECONDS - begun))
            ours "$key" "${turn}b"
            limit=$((60 + 3 * taken)) trl_step "$key" bf16 stock
        else
            trl_step "$key" "$(faster "$key")" stock
        fi
    done
    trl_step "$key" "$(faster "$key")" tuned-malloc \
        MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=100000000000 MALLOC_TOP_PAD_=268435456
done

"$python" - "$work" "benches/results/$name" "benches/vs_trl.sh --repeat $repeat --steps $steps --dtype $dtype ${shapes[*]}" \
    "${shapes[@]}" <<'PY'
import glob, json, sys

work, out, command, shapes = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:]
BARS = {"tiny": (15, 25, 5), "small": (10, 15, 4), "0.6b": (4.5, 4.4, 3), "small-512": (15, None, None)}
# With AVX512-BF16. There are no bars for tiny and small: compare them with the earlier results on AVX-512.
BARS_AVX512_BF16 = {"tiny": (None, None, None), "small": (None, None, None), "0.6b": (3.0, 4.4, 2.3), "small-512": (13, None, None)}
MEMORY_BAR = 0.4


def best(values, pick):
    values = list(values)
    return pick(values) if values else None


def trl_figures(records):
    if not records:
        return None
    return {
        "mode": min(records, key=lambda record: record["step_min"])["mode"],
        "step_s": min(record["step_min"] for record in records),
        "decode_tok_s": max(record["gen_tok_s"] for record in records),
        "train_tok_s": max(record["train_tok_s"] for record in records),
        "peak_mib": min(record["peak_rss_mib"] for record in records),
        "runs": len(records),
    }


def ratios(ours, trl):
    return trl and {
        "step": trl["step_s"] / ours["step_s"],
        "decode": ours["decode_tok_s"] / trl["decode_tok_s"],
        "training": ours["train_tok_s"] / trl["train_tok_s"],
        "memory": ours["peak_mib"] / trl["peak_mib"],
    }


def judged(ratio, bar, below=False):
    if bar is None:
        return f"{ratio:.2f}"
    met = ratio <= bar if below else ratio >= bar
    return f"{ratio:.2f} ({'≤' if below else '≥'} {bar}: {'met' if met else 'missed'})"


rows, versions = [], {}
for key in shapes:
    runs = [json.load(open(path)) for path in sorted(glob.glob(f"{work}/{key}.ours.*.json"))]
    ours = {
        "step_s": min(run["step"]["fastest"]["step_s"] for run in runs),
        "decode_tok_s": max(run["step"]["median"]["decode_tok_s"] for run in runs),
        "train_tok_s": max(run["step"]["median"]["train_tok_s"] for run in runs),
        "peak_mib": max(run["peak_mib"] for run in runs),
        "read_gb_s": max(run["read_gb_s"] for run in runs),
        "runs": len(runs),
    }
    records = [json.loads(line) for line in open(f"{work}/{key}.trl.jsonl")]
    versions = records[0]["versions"]
    stock = [record for record in records if record["label"] == "stock"]
    mode = trl_figures(stock)["mode"]
    trl = trl_figures([record for record in stock if record["mode"] == mode])
    slower = trl_figures([record for record in stock if record["mode"] != mode])
    tuned = trl_figures([record for record in records if record["label"] == "tuned-malloc"])
    rows.append({
        "shape": key, "settings": runs[0]["settings"], "isa": runs[0]["limits"]["isa"], "threads": runs[0]["limits"]["threads"],
        "ours": ours, "trl": trl, "trl_slower_mode": slower, "trl_tuned_malloc": tuned,
        "ratios": ratios(ours, trl), "ratios_tuned_malloc": ratios(ours, tuned),
    })

lines = [
    "# rlood and TRL, in turns", "",
    f"`{command}`; {rows[0]['isa']}, {rows[0]['threads']} threads; "
    f"trl {versions.get('trl')}, torch {versions.get('torch')}, transformers {versions.get('transformers')}, peft {versions.get('peft')}.", "",
    "Ratios over TRL in its faster mode, beside the bars; a step is everything between two optimizer steps.", "",
    "| shape | TRL's mode | step s, ours | TRL | tuned malloc | whole step | decode | training | memory | whole step against tuned malloc |",
    "|---|---|---|---|---|---|---|---|---|---|",
]
for row in rows:
    step, decode, training = (BARS_AVX512_BF16 if row["isa"] == "avx512_bf16" else BARS)[row["shape"]]
    r, tuned = row["ratios"], row["ratios_tuned_malloc"]
    lines.append(
        f"| {row['shape']} | {row['trl']['mode']} | {row['ours']['step_s']:.4f} | {row['trl']['step_s']:.3f} | {row['trl_tuned_malloc']['step_s']:.3f} "
        f"| {judged(r['step'], step)} | {judged(r['decode'], decode)} | {judged(r['training'], training)} "
        f"| {judged(r['memory'], MEMORY_BAR, True)} | {tuned['step']:.2f} |"
    )
lines += ["", "| shape | decode tok/s, ours | TRL | training tok/s, ours | TRL | peak MiB, ours | TRL |", "|---|---|---|---|---|---|---|"]
for row in rows:
    o, t = row["ours"], row["trl"]
    lines.append(
        f"| {row['shape']} | {o['decode_tok_s']:.0f} | {t['decode_tok_s']:.0f} | {o['train_tok_s']:.0f} | {t['train_tok_s']:.0f} "
        f"| {o['peak_mib']:.0f} | {t['peak_mib']:.0f} |"
    )
text = "\n".join(lines) + "\n"
print("\n" + text)
with open(out + ".md", "w") as file:
    file.write(text)
with open(out + ".json", "w") as file:
    json.dump({"command": command, "versions": versions, "rows": rows}, file, indent=1)
    file.write("\n")
PY
