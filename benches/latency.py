#!/usr/bin/env python3
"""How fast `GET /jobs/{id}` answers while a training step runs: p50, p99, maximum.

    benches/latency.py [--rlood target/release/rlood] [--shape small] [--seconds 20] [--json FILE]

Starts a server on a free port with a data directory of its own, submits a job on a random model that keeps every core
busy, and asks for the job over one connection and over a new one in turn until the time is over. Standard library only.
"""

import argparse
import http.client
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

BAR_MS = 50.0


def call(connection, method, path, body=None, content_type="application/json"):
    connection.request(method, path, body, {"content-type": content_type})
    reply = connection.getresponse()
    text = reply.read()
    if reply.status >= 300:
        raise SystemExit(f"{method} {path}: {reply.status} {text.decode(errors='replace')[:500]}")
    return json.loads(text)


def percentile(values, share):
    values = sorted(values)
    return values[min(len(values) - 1, int(share * len(values)))]


def submit(address, model_dir, args):
    """A job that outlasts the measurement."""
    connection = http.client.HTTPConnection(address, timeout=60)
    call(connection, "POST", "/models", json.dumps({"id": "bench", "source": model_dir}))
    prompts = (" ".join(f"w{(7 * row + 13 * word) % 500}" for word in range(32)) for row in range(64))
    rows = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
    dataset = call(connection, "POST", "/datasets?name=bench", rows, "application/x-ndjson")
    job = {
        "model": "bench", "dataset": {"id": dataset["id"]},
        "rewards": [{"type": "length", "name": "length", "min_words": 1, "max_words": 1000}],
        "rloo": {"num_generations": 4, "beta": 0.05}, "sampling": {"max_completion_length": args.completion},
        "training": {"prompts_per_step": 4, "max_steps": 100_000, "dtype": args.dtype},
        "checkpoints": {"every_steps": 100_000},
    }
    return connection, call(connection, "POST", "/jobs", json.dumps(job))["id"]


def wait_for_a_step(connection, job):
    """Until the first step is done, so that loading is not measured."""
    for _ in range(3000):
        state = call(connection, "GET", f"/jobs/{job}")
        if state["state"] in ("failed", "cancelled", "succeeded", "paused"):
            raise SystemExit(f"the job is {state['state']}: {json.dumps(state)[:1000]}")
        if state["state"] == "running" and call(connection, "GET", f"/jobs/{job}/metrics?keys=step_time")["data"]:
            return
        time.sleep(0.1)
    raise SystemExit("no step was done within 5 minutes")


def measure(address, job, seconds):
    """Milliseconds of each request, over a connection that stays and over new ones."""
    kept = http.client.HTTPConnection(address, timeout=60)
    call(kept, "GET", f"/jobs/{job}")
    taken = {"kept": [], "new": []}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for kind in taken:
            began = time.perf_counter()
            connection = kept if kind == "kept" else http.client.HTTPConnection(address, timeout=60)
            reply = call(connection, "GET", f"/jobs/{job}")
            taken[kind].append(1000 * (time.perf_counter() - began))
            if kind == "new":
                connection.close()
            if reply["state"] != "running":
                raise SystemExit(f"the job is {reply['state']}")
        time.sleep(0.01)
    return taken


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rlood", default="target/release/rlood")
    parser.add_argument("--shape", default="small", help="as in rlood bench")
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "f32"])
    parser.add_argument("--completion", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args()
    if not os.path.exists(args.rlood):
        raise SystemExit(f"{args.rlood} is missing: cargo build --release")
    work = tempfile.mkdtemp(prefix="rlood-latency-")
    server = None
    try:
        model = os.path.join(work, "model")
        write = ["bench", "--shape", args.shape, "--dtype", args.dtype, "--save-model", model, "--only", "limits"]
        subprocess.run([args.rlood, *write], check=True, stdout=subprocess.DEVNULL)
        serve = ["--log", "warn", "serve", "--listen", "127.0.0.1:0", "--devices", "cpu", "--data-dir", os.path.join(work, "data")]
        server = subprocess.Popen([args.rlood, *serve], stdout=subprocess.PIPE, text=True)
        line = server.stdout.readline()
        address = line.strip().removeprefix("listening on http://")
        connection, job = submit(address, model, args)
        wait_for_a_step(connection, job)
        taken = measure(address, job, args.seconds)
        # A new connection: the server has closed the idle one.
        connection = http.client.HTTPConnection(address, timeout=60)
        steps = len(call(connection, "GET", f"/jobs/{job}/metrics?keys=step_time")["data"])
    finally:
        if server is not None:
            server.terminate()
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()
        shutil.rmtree(work, ignore_errors=True)
    every = taken["kept"] + taken["new"]
    figures = {
        "shape": args.shape, "dtype": args.dtype, "requests": len(every), "steps": steps,
        "p50_ms": percentile(every, 0.50), "p99_ms": percentile(every, 0.99), "max_ms": max(every),
        "p99_kept_connection_ms": percentile(taken["kept"], 0.99), "p99_new_connection_ms": percentile(taken["new"], 0.99),
    }
    verdict = "met" if figures["p99_ms"] <= BAR_MS else "missed"
    print(
        f"GET /jobs/{{id}} while {args.shape} trains: p50 {figures['p50_ms']:.2f} ms, p99 {figures['p99_ms']:.2f} ms, "
        f"max {figures['max_ms']:.2f} ms of {len(every)} requests (p99 ≤ {BAR_MS:.0f} ms: {verdict})"
    )
    if args.json:
        with open(args.json, "w") as file:
            json.dump(figures, file, indent=1)
            file.write("\n")
    sys.exit(0)


if __name__ == "__main__":
    main()
