"""Jobs of the runtime `trl` with the real TRL: one rank and two, killed in the middle of a step, cancelled, paused, quantized, ZeRO-3,
with images.

usage: tests/trl/check.py BINARY PYTHON [NAME…]

PYTHON is the interpreter of an environment that `rlood runtime install trl` made. Each check prints its figures. Uses the standard
library only.
"""

import contextlib
import hashlib
import http.server
import io
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
# With two prompts a step, three steps are an epoch: a run that resumes after step 4 is in its second one.
ROWS = [json.loads(line) for line in (ROOT / "assets/tiny-data/train.jsonl").read_text().splitlines()[:6]]
STEPS = 6


class Reward:
    """A reward service that can hold the requests of a step, so that a test can act in the middle of it."""

    def __init__(self):
        reward = self
        self.hold_step, self.held, self.go, self.seen = None, threading.Event(), threading.Event(), []
        # The samples of the last request, and the images that were read from their addresses.
        self.samples, self.images = [], {}

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["content-length"])))
                if request["type"] == "reward.score.request":
                    step = request["job"]["step"]
                    reward.seen.append(step)
                    reward.samples += request["samples"]
                    for sample in request["samples"]:
                        reward.fetch(sample.get("images", []))
                    if step == reward.hold_step:
                        reward.held.set()
                        reward.go.wait()
                results = [
                    {"sample_id": sample["sample_id"], "reward": sum(map(ord, sample["completion"])) % 7 / 6}
                    for sample in request.get("samples", [])
                ]
                body = json.dumps({"version": "1", "id": request.get("id"), "results": results}).encode()
                with contextlib.suppress(OSError):
                    self.send_response(200)
                    self.send_header("content-type", "application/json")
                    self.send_header("content-length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def fetch(self, images):
        for image in images:
            if "url" in image and image["sha256"] not in self.images:
                with urllib.request.urlopen(image["url"], timeout=60) as response:
                    self.images[image["sha256"]] = response.read()

    def hold(self, step):
        self.hold_step = step
        self.held.clear()
        self.go.clear()

    def release(self):
        self.hold_step = None
        self.go.set()


class Server:
    """A server with one worker on the CPU."""

    def __init__(self, binary, python, folder, is_public=False):
        folder.mkdir(exist_ok=True)
        self.log = open(folder / "server.log", "wb")
        environment = {**os.environ, "RLOOD_TRL_PYTHON": str(python)}
        address = "127.0.0.1:0"
        more = []
        if is_public:
            with socket.create_server(("127.0.0.1", 0)) as free:
                address = f"127.0.0.1:{free.getsockname()[1]}"
            more = ["--public-url", f"http://{address}"]
        command = [binary, "serve", *more, "--listen", address, "--data-dir", str(folder / "data"), "--devices", "cpu"]
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=self.log, text=True)
        self.url = re.search(r"http://[0-9.:]+", self.process.stdout.readline()).group()
        until(lambda: self.get("/workers")["data"], 60)
        self.post("/models", {"id": "tiny", "source": str(ROOT / "assets/tiny")})

    def stop(self):
        self.process.terminate()
        self.process.wait(60)
        self.log.close()

    def call(self, method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, method=method)
        request.add_header("content-type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, json.loads(response.read() or b"null")
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def get(self, path):
        status, body = self.call("GET", path)
        assert status == 200, (path, status, body)
        return body

    def post(self, path, body=None):
        status, answer = self.call("POST", path, {} if body is None else body)
        assert status < 300, (path, status, answer)
        return answer

    def job(self, id):
        return self.get(f"/jobs/{id}")

    def wait(self, id, *states, limit=300):
        def ended():
            job = self.job(id)
            if job["state"] in ("failed", "cancelled") and job["state"] not in states:
                raise AssertionError(f"{job['state']}: {json.dumps(job['failure'])} {self.warnings(id)}")
            return job if job["state"] in states else None

        return until(ended, limit)

    def warnings(self, id):
        with urllib.request.urlopen(f"{self.url}/jobs/{id}/logs", timeout=60) as response:
            return response.read().decode()[-3000:]

    def files(self, id):
        """The files of the job's newest checkpoint, by name."""
        newest = max(self.get(f"/jobs/{id}/checkpoints")["data"], key=lambda checkpoint: checkpoint["step"])
        return newest["step"], newest["id"], {file["name"]: file["sha256"] for file in newest["files"]}

    def worker_pid(self):
        return self.get("/workers")["data"][0]["pid"]


def until(found, limit):
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        if result := found():
            return result
        time.sleep(0.05)
    raise AssertionError(f"nothing within {limit} s: {found}")


def ranks_of(pid):
    """The Python processes that a worker has started."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                if parent == pid and b"runner.py" in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found


def is_gone(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def job_of(reward, devices=1, **changes):
    job = {
        "model": "tiny",
        "dataset": {"records": ROWS},
        "rewards": [{"type": "webhook", "name": "length", "url": reward.url}],
        "runtime": {"name": "trl"},
        "resources": {"devices": devices},
        "rloo": {"num_generations": 4, "beta": 0.05},
        "sampling": {"max_completion_length": 8},
        "lora": {"r": 4, "alpha": 8, "dropout": 0.05, "target_modules": ["q_proj", "v_proj"]},
        "optimizer": {"learning_rate": 1e-3},
        "training": {"prompts_per_step": 2, "max_steps": STEPS, "seed": 7},
        "checkpoints": {"every_steps": 2},
    }
    for key, value in changes.items():
        job[key] = {**job.get(key, {}), **value} if isinstance(value, dict) and key != "runtime" else value
    return job


def adapter(files):
    return files["adapter_model.safetensors"]


def train(server, job):
    id = server.post("/jobs", job)["id"]
    server.wait(id, "succeeded")
    return id


def check_job(server, reward, devices):
    """A calm run, and one whose worker is killed while the rewards of step 5 are computed."""
    started = time.monotonic()
    calm = train(server, job_of(reward, devices))
    seconds = time.monotonic() - started
    job = server.job(calm)
    assert job["runtime"]["name"] == "trl" and job["runtime"]["versions"]["trl"].startswith("1.16."), job["runtime"]
    assert job["runtime"]["guarantees"] == {"resume": "exact_cpu", "stop": "step"}, job["runtime"]
    step, checkpoint, files = server.files(calm)
    assert step == STEPS and "training_args.bin" not in files and "README.md" not in files, files
    metrics = server.get(f"/jobs/{calm}/metrics?keys=loss,reward,kl,grad_norm,rewards/length/mean")
    samples = server.get(f"/jobs/{calm}/samples?limit=100")["data"]
    assert len(samples) == STEPS * 8 and all(sample["advantage"] is not None for sample in samples), len(samples)
    print(f"figure: {devices} ranks: {STEPS} steps in {seconds:.0f} s, {len(json.dumps(metrics))} bytes of metrics")

    reward.hold(5)
    id = server.post("/jobs", job_of(reward, devices))["id"]
    assert reward.held.wait(120)
    pid = server.worker_pid()
    ranks = ranks_of(pid)
    assert len(ranks) == devices, ranks
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    until(lambda: all(is_gone(rank) for rank in ranks), 10)
    print(f"figure: {devices} ranks: gone {time.monotonic() - killed:.2f} s after their worker was killed")
    asked = [step for step in reward.seen]
    reward.release()
    server.wait(id, "succeeded")
    again = reward.seen[len(asked):]
    assert adapter(server.files(id)[2]) == adapter(files), "the killed run has other bytes"
    assert server.job(id)["attempt"] == 2
    print(f"figure: {devices} ranks: killed at step 5, same bytes as the calm run; steps asked again: {sorted(set(again))}")
    return checkpoint, files


def check_one(server, reward, python, folder, *_):
    checkpoint, _ = check_job(server, reward, 1)
    for name in ["adapter_config.json", "adapter_model.safetensors"]:
        (folder / "adapter").mkdir(exist_ok=True)
        with urllib.request.urlopen(f"{server.url}/checkpoints/{checkpoint}/files/{name}") as response:
            (folder / "adapter" / name).write_bytes(response.read())
    config = json.loads((folder / "adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "tiny", config
    test = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
base = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
ids = torch.tensor([[5, 6, 7, 8]])
before = base(ids).logits
after = PeftModel.from_pretrained(base, sys.argv[2])(ids).logits
difference = (before - after).abs().max().item()
assert difference > 0
print(f"figure: PEFT loads the adapter; it changes logits by up to {difference:.2g}")
"""
    subprocess.run([python, "-c", test, str(ROOT / "assets/tiny"), str(folder / "adapter")], check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})


def check_two(server, reward, *_):
    check_job(server, reward, 2)


def check_cancel(server, reward, *_):
    for hold in [2, None]:
        reward.hold(hold)
        job = job_of(reward, training={"prompts_per_step": 2, "max_steps": 100_000, "seed": 7})
        id = server.post("/jobs", job)["id"]
        if hold:
            assert reward.held.wait(120)
        else:
            until(lambda: server.job(id)["step"] >= 3, 120)
        ranks = ranks_of(server.worker_pid())
        # The request reaches the worker with its next heartbeat, of which there is one every second.
        asked = time.monotonic()
        server.post(f"/jobs/{id}/cancel")
        until(lambda: all(is_gone(rank) for rank in ranks), 10)
        seconds = time.monotonic() - asked
        server.wait(id, "cancelled")
        reward.release()
        where = "while rewards are computed" if hold else "in a rollout"
        print(f"figure: cancelled {where}: ranks gone after {seconds:.2f} s")
        assert seconds <= 2, seconds


def check_pause(server, reward, *_):
    calm = train(server, job_of(reward, training={"prompts_per_step": 2, "max_steps": 40, "seed": 7}))
    id = server.post("/jobs", job_of(reward, training={"prompts_per_step": 2, "max_steps": 40, "seed": 7}))["id"]
    until(lambda: server.job(id)["step"] >= 3, 120)
    server.post(f"/jobs/{id}/pause")
    paused = server.wait(id, "paused", "succeeded")
    if paused["state"] == "paused":
        step = server.files(id)[0]
        assert step == paused["step"], (step, paused["step"])
        server.post(f"/jobs/{id}/resume")
        server.wait(id, "succeeded")
        print(f"figure: paused at the end of step {step}, with its checkpoint")
    assert adapter(server.files(id)[2]) == adapter(server.files(calm)[2]), "the paused run has other bytes"
    assert paused["state"] == "paused", "the job ended before the pause"


def check_eight_bit(server, reward, *_):
    id = train(server, job_of(reward, runtime={"name": "trl", "load_in_8bit": True}))
    print(f"figure: a base in 8 bits: {server.job(id)['step']} steps")


def check_four_bit(server, reward, *_):
    id = train(server, job_of(reward, training={"prompts_per_step": 2, "max_steps": STEPS, "seed": 7, "load_in_4bit": True}))
    print(f"figure: a base in 4 bits: {server.job(id)['step']} steps")


def check_full(server, reward, *_):
    job = job_of(reward, optimizer={"learning_rate": 1e-5})
    job["lora"] = None
    id = train(server, job)
    files = server.files(id)[2]
    assert "model.safetensors" in files, files
    print(f"figure: all weights: {server.job(id)['step']} steps")


def check_zero3(server, reward, *_):
    """Two ranks on the CPU with the shims for tests; killed, and resumed from DeepSpeed's own files."""
    runtime = {"name": "trl", "zero_stage": 3}
    calm = train(server, job_of(reward, 2, runtime=runtime))
    files = server.files(calm)[2]
    assert any(name.startswith("global_step") and "--" in name for name in files), files
    reward.hold(5)
    id = server.post("/jobs", job_of(reward, 2, runtime=runtime))["id"]
    assert reward.held.wait(240)
    os.kill(server.worker_pid(), signal.SIGKILL)
    reward.release()
    server.wait(id, "succeeded")
    assert adapter(server.files(id)[2]) == adapter(files), "the killed run has other bytes"
    print(f"figure: ZeRO-3 on 2 ranks: {len(files)} files in a checkpoint; killed at step 5, same bytes as the calm run")


MAKE_STARCODER2 = """
import shutil, sys, torch
from transformers import AutoConfig, AutoModelForCausalLM
tokenizer, folder = sys.argv[1:]
torch.manual_seed(0)
config = AutoConfig.for_model(
    "starcoder2", vocab_size=313, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, eos_token_id=1, pad_token_id=0, bos_token_id=None)
model = AutoModelForCausalLM.from_config(config)
model.generation_config.eos_token_id, model.generation_config.pad_token_id = 1, 0
model.save_pretrained(folder)
for name in ["tokenizer.json", "tokenizer_config.json"]:
    shutil.copy(f"{tokenizer}/{name}", folder)
"""


def check_architecture(server, reward, python, folder, *_):
    """A model of an architecture that rlood's own engine does not have."""
    model = folder / "starcoder2"
    subprocess.run([python, "-c", MAKE_STARCODER2, str(ROOT / "assets/tiny"), str(model)], check=True, capture_output=True)
    card = server.post("/models", {"id": "starcoder2", "source": str(model)})
    card = card["card"]
    assert card["needs_runtime"] == "trl" and card["architecture"] == "starcoder2", card
    own = job_of(reward, runtime="own", model="starcoder2")
    status, answer = server.call("POST", "/jobs", own)
    assert status == 422 and answer["errors"][0]["code"] == "needs_runtime", answer
    id = train(server, job_of(reward, runtime="auto", model="starcoder2"))
    print(f"figure: Starcoder2 with random weights: {server.job(id)['step']} steps, chosen by auto")


def form(**files):
    """A multipart form: the content type and the body."""
    parts = []
    for name, (file, content) in files.items():
        head = f'--X\r\ncontent-disposition: form-data; name="{name}"; filename="{file}"\r\n\r\n'
        parts.append(head.encode() + content + b"\r\n")
    return "multipart/form-data; boundary=X", b"".join(parts) + b"--X--\r\n"


def upload_images(server, pictures):
    """Rows with no, one and two images, alternating, so that in each step one of two ranks has none."""
    names = ["a.png", "b.jpg", "c.webp", "d.gif"]
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as file:
        for name in names:
            file.write(pictures / name, f"pictures/{name}")
    images = [[names[0]], [], [names[1], names[2]], [], [names[3]], []]
    rows = [
        {"prompt": [{"role": "user", "content": f"What is {row}?"}], "images": [{"file": f"pictures/{name}"} for name in of_row]}
        for row, of_row in enumerate(images)
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    kind, body = form(file=("rows.jsonl", lines), images=("images.zip", packed.getvalue()))
    request = urllib.request.Request(f"{server.url}/datasets", data=body, method="POST", headers={"content-type": kind})
    with urllib.request.urlopen(request, timeout=60) as response:
        dataset = json.loads(response.read())
    assert dataset["origin"]["images"]["stored"] == 4 and dataset["origin"]["images"]["unused_files"] == 0, dataset
    return dataset["id"]


LOAD_VLM = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForImageTextToText
base = AutoModelForImageTextToText.from_pretrained(sys.argv[1], dtype=torch.float32)
ids = torch.tensor([[5, 6, 7, 8]])
before = base(input_ids=ids).logits
model = PeftModel.from_pretrained(base, sys.argv[2])
names = [name for name, _ in model.named_parameters() if "lora_" in name]
assert names and all("language_model" in name for name in names), names[:3]
weights = [weight.abs().max().item() for name, weight in model.named_parameters() if "lora_B" in name]
assert min(weights) > 0, "a weight without gradient is still 0"
difference = (before - model(input_ids=ids).logits).abs().max().item()
assert difference > 0
print(f"figure: PEFT loads the adapter of {len(names)} weights, all in the language model; it changes logits by up to {difference:.2g}")
"""


def check_images(_, reward, python, folder, binary):
    """A vision-language model, with images on one rank, and with a rank that has none beside one that has."""
    server = Server(binary, python, folder / "public", is_public=True)
    try:
        until(lambda: server.get("/workers")["data"][0]["runtimes"], 60)
        model, pictures = folder / "vlm", folder / "pictures"
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        command = [python, str(ROOT / "tests/trl/make_vlm.py"), str(ROOT / "assets/tiny"), str(model), str(pictures)]
        made = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
        card = server.post("/models", {"id": "vlm", "source": str(model)})["card"]
        dataset = upload_images(server, pictures)
        print(f"figure: Qwen2.5-VL with random weights, {made.stdout.strip().splitlines()[-1]}, {card['needs_runtime']}")

        def job(devices, **changes):
            fields = {"model": "vlm", "lora": {"dropout": 0.0}, "training": {"shuffle_dataset": False}}
            return {**job_of(reward, devices, **{**fields, **changes}), "dataset": {"id": dataset}}

        status, answer = server.call("POST", "/jobs", job(1, model="tiny", runtime="own"))
        assert status == 422 and [error["code"] for error in answer["errors"]] == ["needs_runtime"], answer
        status, answer = server.call("POST", "/jobs", job(1, model="tiny"))
        assert status == 422 and [error["code"] for error in answer["errors"]] == ["reads_no_images"], answer
        for devices in [1, 2]:
            reward.samples, reward.images = [], {}
            started = time.monotonic()
            id = train(server, job(devices))
            seconds = time.monotonic() - started
            metrics = server.get(f"/jobs/{id}/metrics?keys=grad_norm")
            norms = metrics["metrics"]["grad_norm"] if "metrics" in metrics else metrics
            print(f"figure: {devices} ranks with images: {STEPS} steps in {seconds:.0f} s, gradient norms {json.dumps(norms)[:300]}")
            counts = {len(sample.get("images", [])) for sample in reward.samples}
            assert counts == {0, 1, 2} and not any(sample["columns"].get("images") for sample in reward.samples), counts
            assert len(reward.images) == 4 and all(hashlib.sha256(image).hexdigest() == name for name, image in reward.images.items())
            checkpoint = server.files(id)[1]
            (folder / f"adapter{devices}").mkdir()
            for name in ["adapter_config.json", "adapter_model.safetensors"]:
                with urllib.request.urlopen(f"{server.url}/checkpoints/{checkpoint}/files/{name}") as response:
                    (folder / f"adapter{devices}" / name).write_bytes(response.read())
            subprocess.run([python, "-c", LOAD_VLM, str(model), str(folder / f"adapter{devices}")], check=True, env=environment)
    except BaseException:
        print((folder / "public/server.log").read_text()[-6000:], file=sys.stderr)
        raise
    finally:
        server.stop()


def check_refusals(server, reward, python, folder, binary):
    def errors(server, job):
        status, answer = server.call("POST", "/jobs", job)
        assert status == 422, (status, answer)
        return {(error["pointer"], error["code"]) for error in answer["errors"]}

    own = job_of(reward, 2)
    own["runtime"] = "own"
    assert errors(server, own) == {("/resources/devices", "needs_runtime")}, errors(server, own)
    beyond = job_of(reward, sampling={"stop": ["x"]}, rloo={"loss": "gspo"})
    assert errors(server, beyond) == {("/sampling/stop", "unsupported_by_runtime"), ("/rloo/loss", "unsupported_by_runtime")}
    assert errors(server, job_of(reward, 3)) == {("/resources/devices", "out_of_range")}
    old = folder / "old"
    old.write_text("#!/bin/sh\necho '{\"trl\": \"1.17.0\"}'\n")
    old.chmod(0o755)
    for name, python, code in [("version", old, "runtime_version"), ("missing", folder / "none", "runtime_unavailable")]:
        (folder / name).mkdir()
        other = Server(binary, python, folder / name)
        try:
            assert errors(other, job_of(reward)) == {("/runtime", code)}
        finally:
            other.stop()
    print("figure: refused by name: own runtime, settings without counterpart, uneven ranks, another version, no environment")


CHECKS = {
    "refusals": check_refusals,
    "one": check_one,
    "two": check_two,
    "cancel": check_cancel,
    "pause": check_pause,
    "full": check_full,
    "4bit": check_four_bit,
    "8bit": check_eight_bit,
    "zero3": check_zero3,
    "architecture": check_architecture,
    "images": check_images,
}


def main():
    binary, python, *names = sys.argv[1:]
    binary, python = os.path.abspath(binary), os.path.abspath(python)
    for name in names or CHECKS:
        with tempfile.TemporaryDirectory(prefix="rlood-trl-check-") as folder:
            folder = pathlib.Path(folder)
            server = Server(binary, python, folder)
            try:
                until(lambda: server.get("/workers")["data"][0]["runtimes"], 60)
                CHECKS[name](server, Reward(), python, folder, binary)
            except BaseException:
                print((folder / "server.log").read_text()[-6000:], file=sys.stderr)
                raise
            finally:
                server.stop()
        print(f"{name}: ok", flush=True)


main()
