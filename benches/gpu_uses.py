#!/usr/bin/env python3
"""What users do on a GPU beside plain training: agents, a 4-bit base, the served model and its certificate, TRL's trainer.

  gpu_uses.py RLOOD DEVICE --out FILE [--only agent,four_bit,served,trl]

Each is a job or a request through `rlood serve` with one worker on the device, and each has its own goal. Only the standard
library; `trl` needs a Python with torch and TRL (RLOOD_TRL_PYTHON, default python3) and says so where there is none. Run it in
the repository's folder. Exit code 0: all goals were reached.
"""

import argparse
import base64
import http.server
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import traceback

from gpu_service import Server

# Without a limit a worker takes the whole GPU, and the process that serves models gets none.
GPU_MEMORY = ["--gpu-memory", "20G"]

# The example's calculator under the name that the bundled agent model knows.
CALCULATOR = '''
import sys
sys.path.insert(0, "examples/environments")
import calculator as example


class Game(example.Calculator):
    def __init__(self):
        self.tools = [self.calculator]

    def calculator(self, expression: str) -> str:
        """Computes an expression.

        Args:
            expression: Numbers with + - * / and parentheses.
        """
        return self.calculate(expression)
'''


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rlood")
    parser.add_argument("device")
    parser.add_argument("--out", required=True)
    parser.add_argument("--only", default="agent,four_bit,served,trl")
    given = parser.parse_args()
    record = {}
    for name in given.only.split(","):
        with tempfile.TemporaryDirectory() as folder:
            begun = time.monotonic()
            flags = ["--allow-outgoing", "127.0.0.1/32", "--serve-devices", given.device]
            server = Server(given.rlood, given.device, folder, flags + ([] if given.device == "cpu" else GPU_MEMORY))
            try:
                found = globals()[name](server, given)
            except (SystemExit, Exception) as error:  # the other uses are tried too
                found = {"reached": False, "error": "".join(traceback.format_exception(error))[-900:]}
            finally:
                server.stop()
            record[name] = {"seconds": round(time.monotonic() - begun, 1), **found}
        print(json.dumps({name: record[name]}), flush=True)
        with open(given.out, "w") as file:
            json.dump(record, file, indent=1)
    sys.exit(0 if all(found["reached"] is not False for found in record.values()) else 1)


def agent(server, given):
    """The bundled agent model learns to call a calculator over several turns; a second run, whose worker is killed, has the same bytes."""
    game = server.folder + "/game.py"
    with open(game, "w") as file:
        file.write(CALCULATOR.replace("examples/environments", os.path.abspath("examples/environments")))
    secret = "whsec_" + base64.b64encode(os.urandom(32)).decode()
    with subprocess.Popen(
        [given.rlood, "--log", "warn", "env", "serve", f"{game}:Game", "--listen", "127.0.0.1:0"],
        env={**os.environ, "RLOOD_ENV_SECRET": secret}, stdout=subprocess.PIPE, text=True,
    ) as environment:  # fmt: skip
        try:
            address = re.search(r"http://[^ \"]+", environment.stdout.readline()).group().rstrip("/")
            server.post("/models", {"id": "agent", "source": os.path.abspath("assets/agent")})
            train, held_out = (dataset(server, f"assets/agent-data/{name}.jsonl") for name in ("train", "heldout"))
            spec = {
                "model": "agent",
                "dataset": {"id": train},
                "environment": {"name": "calculator", "url": f"{address}/Game", "secret": secret, "max_turns": 3,
                                "max_episode_tokens": 96, "max_observation_tokens": 24},
                "rloo": {"num_generations": 8, "beta": 0.01},
                "sampling": {"max_completion_length": 24, "temperature": 1.0},
                "lora": {"r": 8, "alpha": 16, "target_modules": "all-linear"},
                "optimizer": {"learning_rate": 3e-3, "lr_scheduler_type": "linear", "warmup_steps": 2},
                "training": {"prompts_per_step": 16, "max_steps": 40, "seed": 42, "dtype": "bf16"},
                "checkpoints": {"every_steps": 10},
            }  # fmt: skip
            evaluated = {"dataset": {"id": held_out}, "every_steps": 40, "before_start": True, "num_generations": 1, "temperature": 0}
            learned, seconds = server.finished(server.post("/jobs", {**spec, "eval": evaluated})["id"])
            rows = server.get(f"/jobs/{learned['id']}/metrics")["data"]
            solved = [row["eval_environment/return_mean"] for row in rows if row.get("eval_environment/return_mean") is not None]
            ratios = [row["sampling/log_ratio_max"] for row in rows if row.get("sampling/log_ratio_max") is not None]
            short = {**spec, "training": {**spec["training"], "max_steps": 20}}
            calm, _ = server.finished(server.post("/jobs", short)["id"])
            killed = server.post("/jobs", short)["id"]
            server.reaches(killed, 13)
            server.kill_worker()
            killed, _ = server.finished(killed)
            same = server.adapter(calm["id"]) == server.adapter(killed["id"])
        finally:
            environment.terminate()
    return {
        "reached": solved[0] <= 0.2 and solved[-1] >= 0.9 and same and killed["attempt"] == 2 and max(ratios, default=1) == 0,
        "solved_before": solved[0], "solved_after": solved[-1], "training_s": seconds, "log_ratio_max": max(ratios, default=None),
        "killed_attempts": killed["attempt"], "same_bytes": same,
    }  # fmt: skip


def four_bit(server, _):
    """The demo's task on the tiny model, quantized when it is loaded; the GPU computes with the expanded weights."""
    demo, _ = server.finished(server.post("/demo", {})["id"])
    spec = server.get(f"/jobs/{demo['id']}/config")
    spec["training"] |= {"load_in_4bit": True, "dtype": "bf16"}
    job, seconds = server.finished(server.post("/jobs", spec)["id"])
    rewards, plain = ([row["reward"] for row in server.steps(one["id"])] for one in (job, demo))
    return {"reached": rewards[-1] > rewards[0] + 0.2, "reward_first": rewards[0], "reward_last": rewards[-1],
            "reward_last_not_quantized": plain[-1], "training_s": seconds}  # fmt: skip


def served(server, given):
    """The demo's adapter answers over /v1 from the device, and the server that serves it passes the adapter's certificate."""
    demo, _ = server.finished(server.post("/demo", {})["id"])
    rows = [json.loads(line) for line in open("assets/tiny-data/heldout.jsonl")][:100]
    right = {}
    begun = time.monotonic()
    for name in ("rlood/tiny", demo["id"]):
        answers = [None] * len(rows)

        def ask(at, name=name, answers=answers):
            body = {"model": name, "messages": rows[at]["prompt"], "temperature": 0, "max_tokens": 8}
            answers[at] = server.post("/v1/chat/completions", body)["choices"][0]["message"]["content"]

        threads = [threading.Thread(target=ask, args=(at,)) for at in range(len(rows))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        right[name] = sum(row["answer"] in (answer or "") for row, answer in zip(rows, answers)) / len(rows)
    seconds = time.monotonic() - begun
    place = [line for line in server.get("/metrics", text=True).decode().splitlines() if line.startswith("rlood_serving_") and "device" in line]
    verified = subprocess.run([given.rlood, "verify", demo["id"], "--server", f"http://{server.address}", "--json"],
                              capture_output=True, text=True, timeout=100)  # fmt: skip
    base, adapter = right["rlood/tiny"], right[demo["id"]]
    here = any(f'device="{given.device}"' in line for line in place)
    return {"reached": here and adapter >= 0.85 and adapter > base + 0.2 and verified.returncode == 0, "right_base": base, "right_adapter": adapter,
            "answers_s": round(seconds, 2), "verify_exit_code": verified.returncode, "verify": verified.stdout[-600:] + verified.stderr[-300:],
            "metrics": place[:4]}  # fmt: skip


def trl(server, given):
    """A job of the runtime `trl` on the device."""
    python = os.environ.get("RLOOD_TRL_PYTHON", "python3")
    missing = subprocess.run([python, "-c", "import trl, peft, torch"], capture_output=True, text=True)
    if missing.returncode != 0:
        return {"reached": None, "not_run": missing.stderr.strip().splitlines()[-1][:300]}
    server.stop()
    os.environ["RLOOD_TRL_PYTHON"] = subprocess.run([python, "-c", "import sys; print(sys.executable)"], capture_output=True, text=True).stdout.strip()
    server.start()
    begun = time.monotonic()
    while not any(worker.get("runtimes") for worker in server.get("/workers")["data"]):
        if time.monotonic() - begun > 60:
            return {"reached": False, "error": f"no worker has the runtime: {json.dumps(server.get('/workers'))}"[:900]}
        time.sleep(0.2)
    server.post("/models", {"id": "tiny", "source": os.path.abspath("assets/tiny")})
    reward = http.server.ThreadingHTTPServer(("127.0.0.1", 0), RewardByLength)
    threading.Thread(target=reward.serve_forever, daemon=True).start()
    job = {
        "model": "tiny", "dataset": {"id": dataset(server, "assets/tiny-data/train.jsonl")},
        "rewards": [{"type": "webhook", "name": "length", "url": f"http://127.0.0.1:{reward.server_address[1]}/"}],
        "runtime": {"name": "trl"}, "rloo": {"num_generations": 4, "beta": 0.05}, "sampling": {"max_completion_length": 8},
        "lora": {"r": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj"]}, "optimizer": {"learning_rate": 1e-2},
        "training": {"prompts_per_step": 8, "max_steps": 12, "seed": 7}, "checkpoints": {"every_steps": 4},
    }  # fmt: skip
    calm, seconds = server.finished(server.post("/jobs", job)["id"])
    killed = server.post("/jobs", job)["id"]
    server.reaches(killed, 6)
    server.kill_worker()
    killed, _ = server.finished(killed)
    same = server.adapter(calm["id"]) == server.adapter(killed["id"])
    rewards = [row["reward"] for row in server.steps(calm["id"])]
    # The runtime claims nothing about bytes on GPUs: they are recorded only.
    return {"reached": killed["attempt"] == 2 and len(rewards) == 12, "runtime": calm["runtime"], "rewards": rewards, "training_s": seconds,
            "killed_attempts": killed["attempt"], "same_bytes": same}  # fmt: skip


class RewardByLength(http.server.BaseHTTPRequestHandler):
    """Pays for long completions."""

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        results = [{"sample_id": sample["sample_id"], "reward": min(len(sample["completion"]), 20) / 20} for sample in request.get("samples", [])]
        body = json.dumps({"version": "1", "id": request.get("id"), "results": results}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def dataset(server, path):
    with open(path, "rb") as file:
        return server.ask("/datasets", file.read(), kind="application/x-ndjson")["id"]


if __name__ == "__main__":
    main()
