#!/usr/bin/env python3
"""Trains the bundled model on the demo's task from its values and from their NF4 codes, with several seeds, through the service.

  four_bit_learning.py RLOOD [--seeds 42,43,44] [--steps 40] [--out benches/results/four_bit_learning]

Writes OUT.json (the curves: mean reward of each step, held-out accuracy of each evaluation) and OUT.md. Only the standard
library; gpu_service.py starts the server. Exit code 0: all jobs succeeded.
"""

import argparse
import json
import statistics
import tempfile

from gpu_service import Server

VARIANTS = {
    "f32": {"dtype": "f32"},
    "NF4": {"dtype": "f32", "load_in_4bit": True},
    "NF4, double quantization": {"dtype": "f32", "load_in_4bit": True, "use_bnb_nested_quant": True},
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rlood")
    parser.add_argument("--seeds", default="42,43,44")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", default="benches/results/four_bit_learning")
    given = parser.parse_args()
    seeds = [int(seed) for seed in given.seeds.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        server = Server(given.rlood, "cpu", folder)
        try:
            demo, _ = server.finished(server.post("/demo", {})["id"])
            spec = server.get(f"/jobs/{demo['id']}/config")
            runs = [run(server, spec, name, seed, given.steps) for name in VARIANTS for seed in seeds]
        finally:
            server.stop()
    with open(given.out + ".json", "w") as file:
        json.dump({"command": "benches/four_bit_learning.py", "steps": given.steps, "runs": runs}, file, indent=1)
        file.write("\n")
    with open(given.out + ".md", "w") as file:
        file.write(page(runs, given.steps))


def run(server, spec, name, seed, steps):
    training = {key: value for key, value in spec["training"].items() if key not in ("dtype", "load_in_4bit")}
    training |= {**VARIANTS[name], "seed": seed, "max_steps": steps}
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


def page(runs, steps):
    at = sorted({step for run in runs for step in run["accuracy"]})
    lines = [
        "# Learning on a 4-bit base",
        "",
        f"The demo's task (the bundled model, {steps} steps) from the model's values and from their NF4 codes (`training.load_in_4bit`), three seeds",
        "each, on the CPU, `training.dtype` f32. Held-out accuracy, greedy, by step; the last column is the mean reward of the last ten training steps.",
        "Written by `benches/four_bit_learning.py`; the curves of all steps are in `four_bit_learning.json`.",
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
