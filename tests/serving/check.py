"""Clients that this project did not write talk to /v1: openai (sync, async, streams), lm-evaluation-harness (`local-completions`
against its own `hf` backend), LangChain. Prints a figure for each; leaves with 1 at the first difference.

    check.py BINARY
"""

import asyncio
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import urllib.request

import openai

ROOT = pathlib.Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests/fixtures/parity"
PROMPT = "What is 29 + 13?"


class Server:
    """A server of the binary in an empty directory, on a free port."""

    def __init__(self, binary, directory):
        command = [binary, "serve", "--listen", "127.0.0.1:0", "--data-dir", str(directory), "--log", "warn"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.url = self.process.stdout.readline().split()[-1]

    def post(self, path, body):
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    def get(self, path):
        with urllib.request.urlopen(self.url + path) as answer:
            return json.load(answer)

    def register(self, name, directory):
        self.post("/models", {"id": name, "source": str(directory)})

    def stop(self):
        self.process.terminate()
        assert self.process.wait(60) == 0


def train(server):
    """Trains a job of a few steps and returns its id."""
    rows = [{"prompt": [{"role": "user", "content": f"What is {a} + {b}?"}]} for a in range(2, 6) for b in range(3, 7)]
    job = {
        "model": "tiny",
        "dataset": {"records": rows},
        "rewards": [{"type": "regex", "pattern": "1"}],
        "rloo": {"num_generations": 4, "beta": 0.0},
        "training": {"prompts_per_step": 4, "max_steps": 6},
        "optimizer": {"learning_rate": 0.01},
        "sampling": {"max_completion_length": 8},
    }
    job = server.post("/jobs", job)["id"]
    while True:
        state = server.get(f"/jobs/{job}")["state"]
        if state == "succeeded":
            return job
        assert state in ("queued", "running"), state
        asyncio.run(asyncio.sleep(0.2))


def check_openai(server, job):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    listed = [model.id for model in client.models.list()]
    assert {"tiny", job} <= set(listed), listed
    assert client.models.retrieve(job).model_extra["parent"] == "tiny"
    messages = [{"role": "user", "content": PROMPT}]
    for model in ("tiny", job, f"{job}@last"):
        settings = dict(model=model, messages=messages, max_completion_tokens=12, seed=3)
        whole = client.chat.completions.create(**settings, n=2, logprobs=True, top_logprobs=3)
        again = client.chat.completions.create(**settings, n=2)
        assert [c.message.content for c in whole.choices] == [c.message.content for c in again.choices]
        content = whole.choices[0].logprobs.content
        assert b"".join(bytes(t.bytes) for t in content).decode().startswith(whole.choices[0].message.content)
        assert all(len(t.top_logprobs) == 3 for t in content)
        stream = client.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True})
        text, usage = "", None
        for chunk in stream:
            text += "".join(c.delta.content or "" for c in chunk.choices)
            usage = chunk.usage or usage
        assert text == whole.choices[0].message.content, (text, whole)
        assert usage.prompt_tokens == whole.usage.prompt_tokens
    completion = client.completions.create(model=job, prompt=[PROMPT, "What"], max_tokens=4, temperature=0, logprobs=2, echo=True)
    assert len(completion.choices) == 2 and completion.choices[1].text.startswith("What")
    for call, error, code in (
        (lambda: client.models.retrieve("nothing"), openai.NotFoundError, "model_not_found"),
        (lambda: client.chat.completions.create(model="tiny", messages=messages, max_tokens=10**6), openai.BadRequestError, "context_length_exceeded"),
        (lambda: client.chat.completions.create(model="tiny", messages=messages, temperature=9), openai.BadRequestError, "out_of_range"),
    ):
        try:
            call()
            raise AssertionError(f"{code} was expected")
        except error as found:
            assert found.code == code and found.param, found
    print("figure: openai, sync and streams: 3 models")


async def check_openai_async(server, job):
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none")

    async def ask(seed, model):
        messages = [{"role": "user", "content": f"{PROMPT} {seed}"}]
        answer = await client.chat.completions.create(model=model, messages=messages, max_tokens=16, seed=seed)
        return answer.choices[0].message.content

    asked = [(seed, ("tiny", job)[seed % 2]) for seed in range(24)]
    together = await asyncio.gather(*(ask(*one) for one in asked))
    alone = [await ask(*one) for one in asked]
    assert together == alone
    stream = await client.chat.completions.create(model=job, messages=[{"role": "user", "content": PROMPT}], stream=True)
    async for _ in stream:
        break
    await stream.close()
    await client.close()
    print(f"figure: openai, async: {len(asked)} at once, with the texts that they have alone")


def check_parity(server):
    """Greedy ids and log-probs of every parity case, over HTTP, against those of transformers in the fixtures."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    cases, worst = 0, 0.0
    for directory in sorted(FIXTURES.iterdir()):
        if not (directory / "model.safetensors").exists() and not list(directory.glob("model*.safetensors")):
            continue
        expected = json.loads((directory / "expected.json").read_text())
        server.register(directory.name, directory)
        greedy = expected.get("greedy")
        if greedy:
            answer = client.completions.create(
                model=directory.name, prompt=greedy["prompt_ids"], max_tokens=len(greedy["new_ids"]), temperature=0,
                extra_body={"return_token_ids": True, "ignore_eos": True},
            )
            assert answer.choices[0].model_extra["token_ids"] == greedy["new_ids"], directory.name
        for check in expected["logits_check"]:
            answer = client.completions.create(
                model=directory.name, prompt=check["ids"], max_tokens=1, temperature=0, logprobs=1, echo=True
            )
            ours = answer.choices[0].logprobs.token_logprobs[1:-1]
            assert len(ours) == len(check["token_logprobs"]), directory.name
            worst = max([worst, *(abs(a - b) for a, b in zip(ours, check["token_logprobs"]))])
        cases += 1
    assert worst < 2e-4, worst
    print(f"figure: parity cases over HTTP: {cases}, log-probs within {worst:.1e} of transformers'")


def tasks(server, name, directory):
    """A log-likelihood task with local rows: which answer is the most probable one. One of the answers is the model's own."""
    rows = []
    for a in range(2, 22):
        question = f"What is {a} + 7?"
        greedy = server.post("/v1/completions", {"model": name, "prompt": question, "max_tokens": 2, "temperature": 0})
        own = greedy["choices"][0]["text"] or "?"
        rows.append({"question": question, "choices": [str(a + 7), own, " two words", "+ 1"], "answer": 0})
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "rlood_sums",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(directory / "rows.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    (directory / "rlood_sums.yaml").write_text(json.dumps(task))


def check_lm_eval(server, directory):
    import lm_eval
    from lm_eval.tasks import TaskManager

    def evaluate(model, arguments, manager):
        result = lm_eval.simple_evaluate(
            model=model, model_args=arguments, tasks=["rlood_sums"], task_manager=manager, log_samples=True,
            bootstrap_iters=0, device="cpu",
        )
        values = [response for sample in result["samples"]["rlood_sums"] for response in sample["filtered_resps"]]
        return [(float(logprob), bool(greedy)) for logprob, greedy in values]

    for name, model in (("qwen3", FIXTURES / "qwen3"), ("tiny", ROOT / "assets/tiny")):
        folder = directory / name
        folder.mkdir()
        tasks(server, name, folder)
        manager = TaskManager(include_path=str(folder), include_defaults=False)
        served = evaluate(
            "local-completions",
            f"model={name},base_url={server.url}/v1/completions,tokenizer={model},num_concurrent=8,max_retries=1",
            manager,
        )
        remote = evaluate(
            "local-completions",
            f"model={name},base_url={server.url}/serve/{name}/v1/completions,tokenizer_backend=remote,num_concurrent=4",
            manager,
        )
        assert served == remote, "the tokenizer of the server gives other numbers"
        own = evaluate("hf", f"pretrained={model},dtype=float32", manager)
        worst = max(abs(a - b) for (a, _), (b, _) in zip(served, own))
        assert [greedy for _, greedy in served] == [greedy for _, greedy in own]
        assert worst < 1e-3, worst
        assert all(math.isfinite(value) for value, _ in served)
        assert any(greedy for _, greedy in own), "no answer is greedy"
        count = sum(greedy for _, greedy in own)
        print(f"figure: lm-eval, {name}: {len(own)} log-likelihoods ({count} greedy) within {worst:.1e} nats of the hf backend's")


def check_langchain(server, job):
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model=job, base_url=f"{server.url}/v1", api_key="none", temperature=0, max_tokens=12)
    whole = chat.invoke(PROMPT)
    assert whole.usage_metadata["input_tokens"] > 0
    assert "".join(piece.content for piece in chat.stream(PROMPT)) == whole.content
    assert [answer.content for answer in chat.batch([PROMPT] * 4)] == [whole.content] * 4
    print("figure: LangChain: invoke, stream and batch agree")


CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluates an arithmetic expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


def add(expression):
    return str(sum(int(number) for number in expression.split("+")))


def check_agent(binary, directory):
    """The demo trains a model to call a calculator; the openai package then plays with the adapter, and adds the numbers itself."""
    command = [binary, "demo", "--agent", "--data-dir", str(directory / "agent")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        lines = iter(process.stdout.readline, "")
        url = next(line for line in lines if line.startswith("listening on ")).split()[-1]
        next(line for line in lines if "serving until Ctrl-C" in line)
        with urllib.request.urlopen(f"{url}/jobs") as answer:
            job = json.load(answer)["data"][0]["id"]
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        sums = [line["prompt"] for line in map(json.loads, open(ROOT / "assets/agent-data/heldout.jsonl"))][:20]
        right = 0
        for messages in sums:
            settings = dict(model=job, tools=[CALCULATOR], temperature=0, max_completion_tokens=24)
            first = client.chat.completions.create(messages=messages, tool_choice="auto", **settings).choices[0]
            if first.finish_reason != "tool_calls":
                continue
            call = first.message.tool_calls[0]
            assert call.function.name == "calculator", call
            result = add(json.loads(call.function.arguments)["expression"])
            spoken = [*messages, first.message, {"role": "tool", "tool_call_id": call.id, "content": result}]
            second = client.chat.completions.create(messages=spoken, **settings).choices[0]
            assert second.finish_reason == "stop", second
            asked = messages[-1]["content"].removeprefix("What is ").removesuffix("?")
            right += second.message.content.strip() == add(asked)
        plain = client.chat.completions.create(messages=sums[0], tool_choice="none", **settings).choices[0]
        assert plain.message.tool_calls is None and plain.finish_reason != "tool_calls", plain
        assert right >= 18, f"{right} of {len(sums)} sums are right"
        print(f"figure: openai, calculator: {right} of {len(sums)} held-out sums right, each by a call of the tool")
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


def main():
    binary = sys.argv[1]
    os.environ.setdefault("OPENAI_API_KEY", "none")
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        server = Server(binary, directory / "data")
        try:
            server.register("tiny", ROOT / "assets/tiny")
            job = train(server)
            check_openai(server, job)
            asyncio.run(check_openai_async(server, job))
            check_langchain(server, job)
            check_parity(server)
            check_lm_eval(server, directory)
        finally:
            server.stop()
        check_agent(binary, directory)


main()
