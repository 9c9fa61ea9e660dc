"""A whole job whose completions a real vLLM server samples: job.py BINARY VLLM_URL MODEL_DIR"""

import json
import pathlib
import subprocess
import sys
import tempfile
import time
import urllib.request

binary, vllm, model = sys.argv[1:]


def call(url, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


with tempfile.TemporaryDirectory() as folder:
    command = [binary, "serve", "--data-dir", f"{folder}/data", "--listen", "127.0.0.1:0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        line = server.stdout.readline()
        url = next(word for word in line.split() if word.startswith("http")).rstrip("/.")
        call(f"{url}/models", {"id": "model", "source": model})
        job = call(f"{url}/jobs", {
            "model": "model",
            "dataset": {"records": [{"prompt": f"Write {number} words about the sea."} for number in range(1, 9)]},
            "eval": {"fraction": 0.25, "every_steps": 4, "auto_verdict": False},
            "rewards": [{"type": "length", "min_words": 1, "max_words": 3}],
            "sampling": {"max_completion_length": 16},
            "lora": {"r": 4, "alpha": 8},
            "optimizer": {"learning_rate": 0.01},
            "training": {"max_steps": 8, "prompts_per_step": 2, "dtype": "f32"},
            "rollout": {"engine": "vllm", "servers": [{"url": vllm}], "correction": {"mode": "none"}},
        })["id"]
        state = ""
        while state not in ("succeeded", "failed", "paused"):
            time.sleep(1)
            view = call(f"{url}/jobs/{job}")
            state = view["state"]
        assert state == "succeeded", view
        rows = [row for row in call(f"{url}/jobs/{job}/metrics")["data"] if row.get("sampling/mismatch_kl") is not None]
        assert len(rows) == 8, rows
        assert all(row["sampling/log_ratio_max"] == 0 for row in rows), "the first log-ratio of every block is 0"
        kl = max(row["sampling/mismatch_kl"] for row in rows)
        difference = max(row["sampling/logp_difference/max"] for row in rows)
        assert kl < 1e-8 and difference < 1e-3, (kl, difference)
        assert rows[-1]["adapter/delta_norm"] > 0, "the adapter changes, so the servers get new ones"
        left = [entry["id"] for entry in call(f"{vllm}/v1/models")["data"] if entry["id"].startswith(f"rlood-{job}")]
        assert not left, f"adapters stay loaded: {left}"
        assert not list(pathlib.Path(f"{folder}/data/rollout-adapters").glob("*")), "directories of adapters are left"
        print(f"a job of 8 steps on vLLM: mismatch_kl at most {kl:.1e}, largest difference of log-probs {difference:.1e}")
    finally:
        server.terminate()
        server.wait()
