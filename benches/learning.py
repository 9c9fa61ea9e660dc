#!/usr/bin/env python3
"""Trains on the demo's task through the service, with several seeds, and writes the curves.

  learning.py RLOOD four_bit|hybrid [--seeds 42,43,44] [--steps 40] [--out benches/results/STUDY_learning]

four_bit: the bundled model from its values and from their NF4 codes. hybrid: the Qwen3.5 of tests/fixtures/hybrid, which knows the
task as well as the bundled model does. Writes OUT.json (the curves: mean reward of each step, held-out accuracy of each evaluation) and
OUT.md. Only the standard library; gpu_service.py starts the server. Exit code 0: all jobs succeeded.
"""

import argparse
import json
import os
import pathlib
import statistics
import tempfile

from gpu_service import Server

ROOT = pathlib.Path(__file__).resolve().parents[1]
# What of `training` each base has.
NF4 = {"dtype": "f32", "load_in_4bit": True}
STUDIES = {
    "four_bit": {
        "title": "Learning on a 4-bit base",
        "models": "the bundled model, from its values and from their NF4 codes (`training.load_in_4bit`)",
        "bases": {"f32": {"dtype": "f32"}, "NF4": NF4, "NF4, double quantization": {**NF4, "use_bnb_nested_quant": True}},
        "lora": {},
    },
    "hybrid": {
        "title": "Learning on a Qwen3.5 hybrid",
        "models": "the hybrid of `tests/fixtures/hybrid`, 3 layers of Gated DeltaNet and one of attention, with LoRA on all linear layers",
        "bases": {"f32": {"dtype": "f32"}, "bf16": {"dtype": "bf16"}, "NF4": NF4},
        "model": ROOT / "tests/fixtures/hybrid",
        "lora": {"target_modules": "all-linear"},
    },
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rlood")
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--seeds", default="42,43,44")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out")
    given = parser.parse_args()
    study = STUDIES[given.study]
    out = given.out or str(ROOT / f"benches/results/{given.study}_learning")
    seeds = [int(seed) for seed in given.seeds.split(",")]
    # The server reads models of this folder.
    os.environ["RLOOD_MODEL_ROOT"] = str(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        server = Server(given.rlood, "cpu", folder)
        try:
            demo, _ = server.finished(server.post("/demo", {})["id"])
            spec = server.get(f"/jobs/{demo['id']}/config")
            if "model" in study:
                server.post("/models", {"id": given.study, "source": str(study["model"])})
                spec["model"] = given.study
            spec["lora"] |= study["lora"]
            runs = [run(server, spec, name, training, seed, given.steps) for name, training in study["bases"].items() for seed in seeds]
        finally:
            server.stop()
    with open(out + ".json", "w") as file:
        json.dump({"command": f"benches/learning.py RLOOD {given.study}", "steps": given.steps, "runs": runs}, file, indent=1)
        file.write("\n")
    with open(out + ".md", "w") as file:
        file.write(page(given.study, runs, given.steps))


def run(server, spec, name, base, seed, steps):
    training = {key: value for key, value in spec["training"].items() if key not in ("dtype", "load_in_4bit")}
    training |= {**base, "seed": seed, "max_steps": steps}
    job = server.post("/jobs", {**spec, "name": f"{name} {seed}", "training": training})
    done, seconds = server.finished(job["id"])
    rows = server.get(f"/jobs/{done['id']}/metrics")["data"]
    train = [row for row in rows if "reward" in row]
    return {
        "base": name,
        "seed": seed,
        "seconds": seconds,
        "reward": [row["reward"] for row in train],
        "accuracy": {row["step"]: row["eval_rewards/correct/mean"] for row in rows if "eval_rewards/correct/mean" in row},
        "log_ratio_max": max(row.get("sampling/log_ratio_max", 0.0) for row in train),
    }


def page(name, runs, steps):
    study = STUDIES[name]
    at = sorted({step for run in runs for step in run["accuracy"]})
    lines = [
        f"# {study['title']}",
        "",
        f"The demo's task, {steps} steps on the CPU, several seeds for each base: {study['models']}.",
        "Held-out accuracy, greedy, by step; the last column is the mean reward of the last ten training steps.",
        f"Written by `benches/learning.py RLOOD {name}`; the curves of all steps are in `{name}_learning.json`.",
        "",
        "| base | seed | " + " | ".join(f"step {step}" for step in at) + " | mean reward |",
        "|" + "---|" * (len(at) + 3),
    ]
    for run in runs:
        cells = [f"{run['accuracy'][step]:.3f}" if step in run["accuracy"] else "" for step in at]
        lines.append(f"| {run['base']} | {run['seed']} | " + " | ".join(cells) + f" | {statistics.mean(run['reward'][-10:]):.3f} |")
    largest = max(run["log_ratio_max"] for run in runs)
    lines += ["", f"The largest log-ratio between sampling and training of all runs: {largest}.", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
