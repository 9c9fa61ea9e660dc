#!/usr/bin/env python3
"""Trains the bundled model through the service on a device, as its users do, once undisturbed and once with kills.

  gpu_service.py RLOOD DEVICE --out FILE [--dtype bf16]

Starts `rlood serve` with one worker on the device, runs the demo's job, then the same job with another seed twice: the
second time the worker is killed in the middle (SIGKILL), then the server. Both adapters must have the same bytes. Only the
standard library. Exit code 0: all jobs succeeded, the demo learned, the bytes are equal.
"""

import argparse
import hashlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.error
import urllib.request

LIMIT_S = 120


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rlood")
    parser.add_argument("device")
    parser.add_argument("--out", required=True)
    parser.add_argument("--dtype", default="bf16")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = Server(given.rlood, given.device, folder)
        try:
            record = measure(server, given.dtype)
        finally:
            server.stop()
    with open(given.out, "w") as file:
        json.dump(record, file, indent=1)
    print(json.dumps(record))
    sys.exit(0 if record["same_bytes"] and record["demo"]["reward_last"] > record["demo"]["reward_first"] + 0.2 else 1)


def measure(server, dtype):
    demo, demo_s = server.finished(server.post("/demo", {})["id"])
    rewards = [row["reward"] for row in server.steps(demo["id"])]
    spec = server.get(f"/jobs/{demo['id']}/config")
    spec["training"] |= {"max_steps": 60, "dtype": dtype, "seed": 7}
    spec["checkpoints"] |= {"every_steps": 10}
    calm, calm_s = server.finished(server.post("/jobs", {"name": "calm", **spec})["id"])
    killed = server.post("/jobs", {"name": "killed", **spec})["id"]
    server.reaches(killed, 15)
    server.kill_worker()
    server.reaches(killed, 35)
    server.kill()
    server.start()
    killed, killed_s = server.finished(killed)
    hashes = {name: server.adapter(job["id"]) for name, job in (("calm", calm), ("killed", killed))}
    ratios = [row.get("sampling/log_ratio_max") for row in server.steps(calm["id"])]
    ratios = [ratio for ratio in ratios if ratio is not None]
    return {
        "dtype": dtype,
        "demo": {"state": demo["state"], "seconds": demo_s, "reward_first": rewards[0], "reward_last": rewards[-1]},
        "calm": {"state": calm["state"], "seconds": calm_s, "log_ratio_max": max(ratios, default=None)},
        "killed": {"state": killed["state"], "seconds": killed_s, "attempts": killed["attempt"]},
        "adapters": hashes,
        "same_bytes": hashes["calm"] == hashes["killed"],
    }


class Server:
    def __init__(self, rlood, device, folder, flags=()):
        self.rlood, self.device, self.folder, self.flags = rlood, device, folder, flags
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        self.start()

    def start(self):
        self.process = subprocess.Popen(
            [self.rlood, "serve", "--data-dir", self.folder + "/data", "--listen", self.address, "--devices", self.device,
             "--log", "warn", *self.flags],
        )  # fmt: skip
        for _ in range(600):
            try:
                return self.get("/livez", text=True)
            except OSError:
                time.sleep(0.05)
        raise SystemExit("the server did not start")

    def stop(self):
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def kill(self):
        self.process.kill()
        self.process.wait()

    def kill_worker(self):
        with open(f"/proc/{self.process.pid}/task/{self.process.pid}/children") as file:
            children = [int(pid) for pid in file.read().split()]
        # Children may have been started by any thread of the server.
        for task in os.listdir(f"/proc/{self.process.pid}/task"):
            with open(f"/proc/{self.process.pid}/task/{task}/children") as file:
                children += [int(pid) for pid in file.read().split()]
        for pid in set(children):
            os.kill(pid, signal.SIGKILL)

    def ask(self, path, body=None, text=False, kind="application/json"):
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        headers = {} if body is None else {"content-type": kind}
        request = urllib.request.Request(f"http://{self.address}{path}", data=data, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                read = answer.read()
        except urllib.error.HTTPError as error:
            raise SystemExit(f"{path}: {error.read().decode(errors='replace')}") from error
        return read if text else json.loads(read)

    def get(self, path, text=False):
        return self.ask(path, text=text)

    def post(self, path, body):
        return self.ask(path, body)

    def until(self, job, reached):
        begun = time.monotonic()
        while time.monotonic() - begun < LIMIT_S:
            now = self.get(f"/jobs/{job}")
            if reached(now):
                return now, round(time.monotonic() - begun, 1)
            time.sleep(0.1)
        raise SystemExit(f"job {job} is not there after {LIMIT_S} s: {now['state']}, step {now['step']}")

    def finished(self, job):
        now, seconds = self.until(job, lambda now: now["state"] in ("succeeded", "failed", "cancelled", "paused"))
        if now["state"] != "succeeded":
            raise SystemExit(f"job {job} {now['state']}: {now['failure']}")
        return now, seconds

    def reaches(self, job, step):
        self.until(job, lambda now: now["step"] >= step or now["state"] in ("succeeded", "failed"))

    def steps(self, job):
        return [row for row in self.get(f"/jobs/{job}/metrics")["data"] if "reward" in row]

    def adapter(self, job):
        with tarfile.open(fileobj=io.BytesIO(self.get(f"/jobs/{job}/adapter", text=True))) as tar:
            [weights] = [member for member in tar.getmembers() if member.name.endswith("adapter_model.safetensors")]
            return hashlib.sha256(tar.extractfile(weights).read()).hexdigest()


if __name__ == "__main__":
    main()
