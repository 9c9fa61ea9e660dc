"""A runner without TRL: it trains nothing, keeps to protocol version 1, and breaks it in the way that `mode` names."""

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time


def write_pid(place, pid):
    # A process can be killed at any time, and the test must not read half of a number.
    with open(f"writing-{place}", "w") as file:
        file.write(str(pid))
    os.replace(f"writing-{place}", f"pid-{place}")


rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
with open(os.environ["RLOOD_RUNNER_CONFIG"], encoding="utf-8") as file:
    config = json.load(file)
rloo = config["rloo"]
mode = rloo["chat_template_kwargs"].get("mode", "")
write_pid(rank, os.getpid())
if "RLOOD_WORKER_TOKEN" in os.environ:
    sys.exit("the worker's token is not for ranks")
if mode == "silent":
    time.sleep(600)

link = socket.socket(socket.AF_UNIX)
link.connect(os.environ["RLOOD_RUNNER_SOCKET"])
lines = link.makefile()
asked = 0


def tell(kind, **fields):
    link.sendall((json.dumps({"type": kind, **fields}) + "\n").encode())


def ask(kind, **fields):
    global asked
    asked += 1
    tell(kind, id=asked, **fields)
    answer = json.loads(lines.readline())
    assert answer["re"] == asked
    return answer


def misbehave(step):
    if mode == "hang" and rank == world - 1:
        child = subprocess.Popen(["sleep", "600"])
        write_pid(world, child.pid)
        time.sleep(600)
    if mode == "die" and rank == 0:
        print("about to die", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "close" and rank == 0:
        link.shutdown(socket.SHUT_RDWR)
        time.sleep(600)
    if mode == "garbage":
        link.sendall(b"\xff not JSON\n")
    if mode == "flood":
        for _ in range(20000):
            print("x" * 1000)
        while True:
            tell("loaded", import_s=0.0)
    if mode == "raise":
        tell("failed", **{"class": "ValueError", "message": "no such layer", "trace": "Traceback"})
        time.sleep(600)
    if mode == "memory":
        tell("failed", **{"class": "OutOfMemoryError", "message": "CUDA out of memory", "trace": "Traceback"})
        time.sleep(600)
    if mode == "skip":
        ask("step", step=step + 3)
    if mode == "done":
        ask("done", step=step)


versions = {"trl": "1.17.0" if mode == "version" else "1.16.0"}
tell("hello", protocol=2 if mode == "protocol" else 1, rank=0 if mode == "twice" else rank, pid=os.getpid(), world=world, versions=versions)
tell("loaded", import_s=0.1)
with open(config["dataset"], encoding="utf-8") as file:
    rows = [json.loads(line) for line in file]
# Every row has the column, and every image is a file.
assert all(("images" in row) == (config["images"] == "files") for row in rows), rows
for row in rows:
    for path in row.get("images", []):
        with open(path, "rb") as file:
            assert hashlib.sha256(file.read()).hexdigest() == os.path.basename(path)
if config["images"] == "files":
    with open("images-seen", "w") as file:
        file.write(str([len(row["images"]) for row in rows]))
done, state, weights = 0, rank + 1, "start"
if config["resume"]:
    with open(f"{config['resume']}/trainer_state.json") as file:
        done, weights = json.load(file)
    with open(f"{config['resume']}/global_step{done}/rank{rank}.pt") as file:
        state = int(file.read())
tell("ready", trainable=1, total=2, max_steps=rloo["max_steps"], steps_done=done, build_s=0.2)
size = rloo["num_generations"]
of_rank = rloo["per_device_train_batch_size"] * rloo["gradient_accumulation_steps"]
while done < rloo["max_steps"]:
    step = done + 1
    if step == 2:
        misbehave(step)
    all_rows = [(step * 7 + place // size) % len(rows) for place in range(of_rank * world)]
    mine = all_rows[rank * of_rank : (rank + 1) * of_rank]
    if mode == "rows":
        mine = [len(rows) + 5] * of_rank
    part = ask("recorded", phase="train", step=step, call=0, rows=mine)["part"]
    if part is None:
        completions = []
        for _ in mine:
            state = state * 48271 % 2147483647
            completions.append({"ids": [5 + state % 50] * (9 if mode == "long" else 2), "finish_reason": "stop"})
        part = {"completions": completions, "sampler": {"cpu": str(state)}}
        ask("sampled", phase="train", step=step, call=0, rows=mine, part=part)
    state = int(part["sampler"]["cpu"])
    values = ask("score", phase="train", step=step, call=0, samples=len(mine))["values"]
    assert len(values) == len(mine)
    # The second completion of the rollout is unscorable, and the others have twice the reward of the host: its weight is 2.
    expected = [None if rank * of_rank + place == 1 else 2.0 * (rank * of_rank + place) for place in range(of_rank)]
    assert values == expected, (values, expected)
    weights = hashlib.sha256(f"{weights} {step} {state}".encode()).hexdigest()
    done = step
    decision = ask("step", step=done)["stop"]
    if rank == 0:
        advantages = [float(place) for place in range(of_rank * world)]
        loss = None if mode == "nan" and step == 2 else 0.5
        kl = 10.0 if mode == "kl" else 0.01
        tell("metrics", step=done, values={"loss": loss, "grad_norm": 1.0, "kl": kl, "surprise": 3.0}, advantages=advantages)
    if decision in ("save", "pause"):
        directory = f"{config['output_dir']}/checkpoint-{done}"
        os.makedirs(f"{directory}/global_step{done}", exist_ok=True)
        with open(f"{directory}/global_step{done}/rank{rank}.pt", "w") as file:
            file.write(str(state))
        if rank == 0 and mode != "empty":
            for name, text in [
                ("adapter_model.safetensors", weights),
                ("adapter_config.json", json.dumps({"base_model_name_or_path": config["model_dir"], "r": 2})),
                ("training_args.bin", "code"),
                ("trainer_state.json", json.dumps([done, weights])),
            ]:
                with open(f"{directory}/{name}", "w") as file:
                    file.write(text)
        ask("checkpoint", step=done, dir="/elsewhere")
    if decision == "pause":
        break
ask("done", step=done)
