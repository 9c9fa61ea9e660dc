#!/usr/bin/env python3
"""Puts the figures that benches/gpu.sh measured into one JSON, judges the bars, prints a table.

  gpu_report.py WORK_FOLDER DEVICE SMALL(0|1) [OUT]

Only the standard library. Each bar stands beside its limit: the least time that the same work can take at the copy
bandwidth and the GEMM peak measured in the same process as the bar (weights and cached keys and values read once a decode
step, the prompt of a group once for the group; FLOPs of matrix products and attention; nothing recomputed, no launch
costs). Goals are those of an H200 and are judged on one only. A part that was stopped keeps its figures, with the reason; its
bar is not judged.
"""

import csv
import json
import os
import statistics
import sys

# Of design, for an H200: part, title, unit, goal, whether lower is better.
GOALS = {
    "requests-0.6b": ("decode, 256 requests of 100-1024 tokens in and out, 0.6B", "tok/s", 20_000, False),
    "requests-4b": ("decode, 256 requests of 100-1024 tokens in and out, 4B", "tok/s", 9_700, False),
    "rollout-0.6b": ("RLOO rollout, 64 prompts x 8, 256 + 512 tokens, 0.6B", "tok/s", 45_000, False),
    "single-0.6b": ("one decode step of one sequence, 0.6B", "ms", 1.0, True),
    "train-0.6b-768": ("LoRA training, sequences of 768 tokens, 0.6B", "tok/s", 70_000, False),
    "train-0.6b-16k": ("LoRA training, one sequence of 16,384 tokens, 0.6B", "tok/s", 13_400, False),
    "train-4b-16k": ("LoRA training, one sequence of 16,384 tokens, 4B", "tok/s", 6_200, False),
    "step-0.6b": ("whole RLOO step of that rollout, 0.6B", "s", 12.0, True),
    "step-4b": ("whole RLOO step of that rollout, 4B", "s", 45.0, True),
    "memory-8b": ("peak memory of LoRA training, 2,048 tokens, 8B", "GB", 26.0, True),
    "mismatch-exact": ("log-probs, sampled against trained: largest difference, exact mode", "nats", 0.0, True),
    "mismatch-fast": ("log-probs, sampled against trained: largest difference, fast mode", "nats", None, True),
}
# Where a bar comes from, when it is not the part of its name; and its peer.
SOURCE = {"rollout-0.6b": "step-0.6b"}
PEER = {
    "requests-0.6b": "peer-requests-0.6b",
    "requests-4b": "peer-requests-4b",
    "rollout-0.6b": "peer-rollout-0.6b",
    "single-0.6b": "peer-single-0.6b",
    "train-0.6b-768": "peer-train-0.6b-768",
    "train-0.6b-16k": "peer-train-0.6b-16k",
    "train-4b-16k": "peer-train-4b-16k",
    "memory-8b": "peer-memory-8b",
}
# Of training's floor.
RECOMPUTED = "nothing is computed twice in it: with gradient checkpointing a run does a forward more than this limit has"


def main():
    # What a program said may be cut anywhere, and so may a terminal be anything.
    sys.stdout.reconfigure(errors="replace")
    work, device, small = sys.argv[1], sys.argv[2], sys.argv[3] == "1"
    out = sys.argv[4] if len(sys.argv) > 4 else ""
    status = statuses(work)
    parts = {name: load(work, name) for name in status}
    limits = (parts.get("limits") or {}).get("limits") or {}
    gpu = limits.get("name")
    emulated = bool(limits.get("emulated"))
    judged = bool(gpu and "H200" in gpu and not emulated and not small)
    bars = [bar(name, parts, status, judged) for name in GOALS]
    measured = [one for one in bars if "value" in one]
    not_run = {name: row["reason"] for name, row in status.items() if row["status"] != "ok"}
    # A part that was never asked for is missing as well.
    not_run.update({one["part"]: one["reason"] for one in bars if one["status"] not in ("ok", "stopped") and one["part"] not in not_run})
    suites = suites_of(parts)
    record = {
        "command": "benches/gpu.sh",
        "device": device,
        "gpu": gpu,
        "emulated": emulated,
        "small": small,
        "goals_judged": judged,
        "facts": facts(work),
        "limits": limits or None,
        "suites": suites,
        "bars": bars,
        "not_run": not_run,
        "memory": memory(parts),
        "models_made_s": models(work),
        "parts": {name: part(work, name, status[name], parts[name]) for name in status},
    }
    table(record, suites)
    if not measured and not limits and (not suites or suites["passed"] == 0):
        print("\nnothing was measured, so no figures are written: " + "; ".join(sorted(set(not_run.values()))), file=sys.stderr)
        sys.exit(1)
    if not out:
        if emulated or small or not gpu:
            print("\nnot a measurement of a GPU: no file without --out")
            return
        word = "".join(letter if letter.isalnum() else "_" for letter in gpu.lower())
        out = os.path.join("benches", "results", f"gpu_{word}.json")
    os.makedirs(os.path.dirname(out) or ".", exist_ok=True)
    with open(out + ".new", "w") as file:
        json.dump(record, file, indent=1)
        file.write("\n")
    os.replace(out + ".new", out)
    print(f"\nwritten: {out}")


def statuses(work):
    """{part: {status, seconds, reason}} in the order they ran."""
    found = {}
    path = os.path.join(work, "status.tsv")
    if os.path.exists(path):
        with open(path, errors="replace") as file:
            for line in file:
                name, status, seconds, reason = line.rstrip("\n").split("\t")
                found[name] = {"status": status, "seconds": int(seconds or 0), "reason": reason.strip() or None}
    return found


def load(work, name):
    try:
        with open(os.path.join(work, name + ".json"), errors="replace") as file:
            return json.load(file)
    except (OSError, ValueError):
        return None


def facts(work):
    found = {}
    try:
        with open(os.path.join(work, "facts.txt"), errors="replace") as file:
            for line in file:
                name, _, value = line.strip().partition("=")
                found[name] = value
    except OSError:
        pass
    return found


def part(work, name, row, figures):
    """What became of a part: its figures, how it was stopped, what the GPU did meanwhile."""
    one = {**row, "figures": figures}
    if row["status"] == "failed" and figures is not None and not name.startswith("suite-"):
        one["stopped"] = row["reason"]
    seen = smi(os.path.join(work, name + ".smi.txt"))
    if seen:
        one["gpu"] = seen
    kernels = ncu(os.path.join(work, name + ".csv"))
    if kernels:
        one["ncu"] = kernels
    return one


def models(work):
    """Seconds that random models took to be made."""
    try:
        with open(os.path.join(work, "models.tsv"), errors="replace") as file:
            return dict((name, int(seconds)) for name, seconds in (line.split("\t") for line in file))
    except (OSError, ValueError):
        return None


def smi(path):
    """Of nvidia-smi's samples of a part: timestamp, SM and memory clock, watts, degrees, percent, MiB, reasons."""
    columns = {"sm_mhz": 1, "memory_mhz": 2, "watt": 3, "celsius": 4, "utilization": 5, "memory_mib": 6}
    samples = {name: [] for name in columns}
    reasons = 0
    try:
        with open(path, errors="replace") as file:
            rows = [[cell.strip() for cell in line.split(",")] for line in file]
    except OSError:
        return None
    rows = [row for row in rows if len(row) == 8]
    for row in rows:
        for name, at in columns.items():
            try:
                samples[name].append(float(row[at]))
            except ValueError:
                pass
        try:
            reasons |= int(row[7], 16)
        except ValueError:
            pass
    if not samples["memory_mib"]:
        return None
    return {
        "samples": len(rows),
        **{f"{name}_median": statistics.median(values) for name, values in samples.items() if values},
        **{f"{name}_max": max(values) for name, values in samples.items() if values},
        # All that were seen, as the driver's bits: 0x4 power cap, 0x20 and 0x40 heat, 0x80 power brake, 0x1 idle.
        "clocks_event_reasons": hex(reasons),
    }


def ncu(path):
    """Launches, microseconds and mean shares of the peaks by kernel, the longest first."""
    kernels = {}
    try:
        with open(path, errors="replace") as file:
            rows = list(csv.DictReader(line for line in file if line.startswith('"')))
    except (OSError, csv.Error):
        return None
    # The first row holds units.
    unit = next((row.get("gpu__time_duration.sum") for row in rows[:1]), None)
    scale = {"ns": 1e-3, "nsecond": 1e-3, "ms": 1e3, "msecond": 1e3, "s": 1e6, "second": 1e6}.get(unit, 1.0)
    for row in rows[1:]:
        try:
            micros = float(row["gpu__time_duration.sum"].replace(",", "")) * scale
            shares = [
                float(row[f"{name}__throughput.avg.pct_of_peak_sustained_elapsed"].replace(",", ""))
                for name in ("dram", "sm")
            ]
        except (KeyError, ValueError, AttributeError):
            continue
        kernels.setdefault(row.get("Kernel Name", "?"), []).append((micros, *shares))
    table = []
    for name, launches in kernels.items():
        total = sum(micros for micros, _, _ in launches)
        # Weighted by time.
        dram, sm = (sum(one[0] * one[at] for one in launches) / (total or 1.0) for at in (1, 2))
        table.append({"name": name[:200], "launches": len(launches), "us": total, "dram_percent": dram, "sm_percent": sm})
    return sorted(table, key=lambda one: -one["us"])[:40] or None


def memory(parts):
    """What the server would have said that a run takes of the device, beside what it took."""
    rows = []
    for name, figures in parts.items():
        for kind in ("step", "training"):
            told = ((figures or {}).get(kind) or {}) if not name.startswith(("peer-", "suite-")) else {}
            estimate, peak = told.get("estimate_mib"), told.get("device_peak_mib")
            if estimate and peak:
                ratio = estimate / peak
                rows.append(
                    {
                        "part": name,
                        "estimate_mib": estimate,
                        "device_peak_mib": peak,
                        "estimate_over_peak": ratio,
                        "within_15_percent": abs(ratio - 1) <= 0.15,
                    }
                )
    return rows


def suites_of(parts):
    """Passed, failed and ignored tests, those of each suite, and what failed, alone too; None where nothing ran."""
    suites = {name: figures for name, figures in parts.items() if name.startswith("suite-") and figures}
    if not suites:
        return None
    kinds = ["passed", "failed", "ignored", "unfinished", "not_reached"]
    found = {kind: sum(figures["tests"][kind] for figures in suites.values()) for kind in kinds}
    found["seconds"] = sum(figures["seconds"] for figures in suites.values())
    found["failed_tests"] = {test: result for figures in suites.values() for test, result in figures["failed_tests"].items()}
    found["alone"] = [{"suite": name, **again} for name, figures in suites.items() for again in figures["alone"]]
    found["crashes"] = {name: figures["crashes"] for name, figures in suites.items() if figures["crashes"]}
    found["by_part"] = {name: figures["tests"] for name, figures in suites.items()}
    return found


# ---- the limits of the bars


def attention_flops(model, pairs):
    """Forward: a query meets `pairs` keys in all, in each layer; QK and PV."""
    return 4 * model["num_hidden_layers"] * model["num_attention_heads"] * model["head_dim"] * pairs


def kv_bytes(model, tokens, value_bytes=2):
    heads = model["num_key_value_heads"] * model["head_dim"]
    return 2 * model["num_hidden_layers"] * heads * value_bytes * tokens


def linear_weights(model):
    hidden, inter = model["hidden_size"], model["intermediate_size"]
    q, kv = (model[name] * model["head_dim"] for name in ["num_attention_heads", "num_key_value_heads"])
    return model["num_hidden_layers"] * (hidden * (2 * q + 2 * kv) + 3 * hidden * inter)


def rates(figures):
    """Bytes and FLOPs a second at most, measured in the same call."""
    limits = figures["limits"]
    return limits["copy_gb_s"] * 1e9, limits["bf16"]["gflop_s"] * 1e9


def pairs(prompt, completion):
    """Keys that the queries of a sequence meet."""
    return (prompt + completion) * (prompt + completion + 1) / 2


def requests_floor(figures):
    bandwidth, peak = rates(figures)
    model, requests = figures["model"], figures["requests"]
    read = requests["decode_steps"] * model["decode_bytes_per_step"] + kv_bytes(model, requests["attended_tokens"])
    # Attention within the prompts is left out: the limit is a little too kind to itself.
    return read / bandwidth + 2 * linear_weights(model) * requests["prompt_tokens"] / peak


def rollout_floor(figures):
    bandwidth, peak = rates(figures)
    model, given = figures["model"], figures["settings"]
    prompts, group, prompt, completion = sizes(given)
    steps = completion - 1
    attended = steps * prompts * prompt + prompts * group * steps * (steps + 1) / 2
    prefill = 2 * linear_weights(model) * prompts * prompt + attention_flops(model, prompts * pairs(prompt, 0))
    return (steps * model["decode_bytes_per_step"] + kv_bytes(model, attended)) / bandwidth + prefill / peak


def sizes(given):
    return given["prompts"], given["generations"], given["prompt_len"], given["completion"]


def single_floor(figures):
    bandwidth, _ = rates(figures)
    given, model = figures["settings"], figures["model"]
    length = given["prompt_len"] + given["completion"] / 2
    return (model["decode_bytes_per_step"] + kv_bytes(model, length)) / bandwidth


def training_floor(figures, backward=True):
    """Forward and dX of frozen weights, all three of the adapter; a group's prompt once; nothing is computed twice."""
    _, peak = rates(figures)
    model, given = figures["model"], figures["settings"]
    prompts, group, prompt, completion = sizes(given)
    scored = prompts * group * completion
    tokens = prompts * prompt + scored
    met = prompts * (pairs(prompt, 0) + group * (pairs(prompt, completion) - pairs(prompt, 0)))
    body = (4 * linear_weights(model) + 6 * model["adapter_parameters"]) if backward else 2 * linear_weights(model)
    head = (4 if backward else 2) * model["vocab_size"] * model["hidden_size"] * scored
    # FlashAttention-2 counts the backward as 2.5 forwards (Dao 2023).
    return (body * tokens + head + (3.5 if backward else 1) * attention_flops(model, met)) / peak


def step_floor(figures):
    reference = training_floor(figures, backward=False) if figures["settings"]["beta"] else 0
    return rollout_floor(figures) + reference + training_floor(figures)


# ---- the bars


def value_and_limit(name, figures):
    """The bar's figure and the limit's in the same unit; a limit of None is none."""
    kind = name.split("-")[0]
    if kind == "requests":
        tokens = figures["requests"]["completion_tokens"]
        return figures["requests"]["tok_s"], tokens / requests_floor(figures)
    if kind == "rollout":
        step = figures["step"]
        return step["fastest"]["decode_tok_s"], step["completion_tokens"] / rollout_floor(figures)
    if kind == "single":
        return figures["decode"]["batches"][-1]["decode_step_s"] * 1e3, single_floor(figures) * 1e3
    if kind == "train":
        return figures["training"]["tok_s"], figures["training"]["tokens"] / training_floor(figures)
    if kind == "step":
        return figures["step"]["fastest"]["step_s"], step_floor(figures)
    if kind == "memory":
        mib = figures["training"]["device_peak_mib"]
        if mib is None:
            raise KeyError("device_peak_mib")
        # At least the weights.
        return mib * 2**20 / 1e9, figures["model"]["num_parameters"] * 2 / 1e9
    return figures["mismatch"]["max"], None


def warm(name, figures):
    """Whether the figure is of a measured repetition, and not of the one that warms up."""
    kind = name.split("-")[0]
    told = figures.get({"train": "training", "memory": "training", "rollout": "step", "single": "decode"}.get(kind, kind)) or {}
    return (told["batches"][-1] if "batches" in told else told).get("warm")


def peer_value(name, record):
    """Ways of the peer, each in the bar's unit."""
    if not record or record.get("failed"):
        return None
    if name.startswith("train-"):
        return {"transformers + peft": record["tok_s"]}
    if name.startswith("memory-"):
        return {"transformers + peft": record["peak_mib"] * 2**20 / 1e9} if "peak_mib" in record else None
    values = {}
    for way, figures in record.get("ways", {}).items():
        if name.startswith("single-"):
            if "decode_step_s" in figures:
                values[way] = figures["decode_step_s"] * 1e3
        elif "tok_s" in figures:
            values[way] = figures["tok_s"]
    return values or None


def bar(name, parts, status, judged):
    title, unit, goal, lower = GOALS[name]
    source = SOURCE.get(name, name)
    one = {"part": name, "title": title, "unit": unit, "goal_h200": goal, "lower_is_better": lower}
    row = status.get(source, {"status": "not run", "reason": "it was not asked for"})
    if name.split("-")[0] in ("train", "step"):
        one["limit_leaves_out"] = RECOMPUTED
    figures = parts.get(source)
    peer = PEER.get(name)
    if peer:
        one["peer"] = peer_value(name, parts.get(peer))
        if one["peer"] is None:
            said = status.get(peer, {"reason": "it was not asked for"})
            failed = (parts.get(peer) or {}).get("failed")
            ways = [way.get("failed") for way in (parts.get(peer) or {}).get("ways", {}).values()]
            one["peer_not_run"] = failed or said["reason"] or "; ".join(filter(None, ways)) or "no figure"
    stopped = row["status"] == "failed"
    if row["status"] == "not run" or figures is None:
        return {**one, "status": row["status"] if row["status"] != "ok" else "failed", "reason": row["reason"] or "no figures"}
    try:
        value, limit = value_and_limit(name, figures)
        if value is None:
            raise TypeError("it was not a finite number")
    except (KeyError, IndexError, TypeError, ZeroDivisionError) as error:
        return {**one, "status": "failed", "reason": row["reason"] or f"a figure is missing: {error!r}"}
    one.update(status="stopped" if stopped else "ok", reason=row["reason"], value=value, limit=limit, warm=warm(name, figures))
    if stopped:
        one["stopped"] = row["reason"]
    if limit:
        one["share_of_limit"] = limit / value if lower else value / limit
    if one.get("peer"):
        # How many times better than the best way of the peer.
        one["over_peer"] = min(one["peer"].values()) / value if lower else value / max(one["peer"].values())
    if judged and goal is not None and not stopped:
        one["met"] = value <= goal if lower else value >= goal
    return one


def table(record, suites):
    limits = record["limits"] or {}
    print(f"\n{record['gpu'] or 'no GPU'}" + (" (the emulator: not a GPU)" if record["emulated"] else ""))
    # A processor's limits are others.
    if "copy_gb_s" in limits:
        print(f"copy {limits['copy_gb_s']:.0f} GB/s, bf16 products {limits['bf16']['gflop_s'] / 1e3:.1f} TFLOP/s")
    if suites:
        print(
            f"suites: {suites['passed']} passed, {suites['failed']} failed, {suites['unfinished']} not finished, "
            f"{suites['not_reached']} not reached, {suites['ignored']} ignored"
        )
        again = {}
        for one in suites["alone"]:
            case = f"{one['case']}: " if one["case"] else ""
            way = f"careful {one['careful']}" + (f", as it is {one['as_is']}" if one["as_is"] else "")
            said = one.get("careful_said") or one.get("as_is_said") or ""
            again.setdefault(one["test"], []).append(f"{case}{way}{': ' + said[:200] if said else ''}")
        for name, result in suites["failed_tests"].items():
            print(f"  {result.upper()} {name}")
            for line in again.get(name, []):
                print(f"      alone: {line}")
    else:
        print("suites: not run")
    print(f"\n{'':<68}{'':>12}{'goal':>10}{'limit':>12}{'share':>8}{'peer':>12}")
    for one in record["bars"]:
        if "value" not in one:
            print(f"{one['title']:<68}{one['status']}: {one['reason']}")
            continue
        goal = "" if one["goal_h200"] is None else f"{one['goal_h200']:g}"
        limit = "" if one["limit"] is None else f"{one['limit']:.4g}"
        share = f"{100 * one['share_of_limit']:.0f} %" if "share_of_limit" in one else ""
        best = min if one["lower_is_better"] else max
        peer = f"{best(one['peer'].values()):.4g}" if one.get("peer") else ""
        mark = {True: " met", False: " MISSED"}.get(one.get("met"), "")
        if one["status"] == "stopped":
            mark = f" (stopped{'' if one['warm'] else ' while it warmed up'})"
        print(f"{one['title']:<68}{one['value']:>12.4g}{goal:>10}{limit:>12}{share:>8}{peer:>12} {one['unit']}{mark}")
    beside(record["parts"])
    if record["memory"]:
        print("\nmemory: the server's estimate beside the device's peak")
        for one in record["memory"]:
            far = "" if one["within_15_percent"] else "  more than 15 % apart"
            print(f"  {one['part']:<28}{one['estimate_mib']:>10.0f}{one['device_peak_mib']:>10.0f} MiB{one['estimate_over_peak']:>8.2f}{far}")
    if record["not_run"]:
        print("\nnot run or failed:")
        for name, reason in record["not_run"].items():
            print(f"  {name}: {reason}")


def beside(parts):
    """Figures that stand beside a bar's: without graphs, with larger micro-batches, with a reference pass; kernels."""
    figures = {name: one["figures"] for name, one in parts.items() if one["figures"]}
    lines = []
    for name, of, unit in [
        ("single-0.6b-nographs", lambda one: one["decode"]["batches"][-1]["decode_step_s"] * 1e3, "ms"),
        ("train-0.6b-768-mb16k", lambda one: one["training"]["tok_s"], "tok/s"),
        ("step-0.6b-beta", lambda one: one["step"]["fastest"]["step_s"], "s"),
    ]:
        try:
            lines.append(f"  {name:<28}{of(figures[name]):>12.4g} {unit}")
        except (KeyError, TypeError, IndexError):
            pass
    for name, kind in [("profile-decode", "decode"), ("profile-train", "training")]:
        profile = ((figures.get(name) or {}).get(kind) or {}).get("profile")
        if profile:
            lines.append(f"  {name}: {profile['launches']} launches, {profile['kernels_s'] * 1e3:.1f} ms in kernels")
            lines += [f"    {one['name']:<36}{100 * one['share']:>6.1f} %{one['count']:>9}" for one in profile["kernels"][:8]]
    if lines:
        print("\nbeside them:", *lines, sep="\n")


if __name__ == "__main__":
    main()
