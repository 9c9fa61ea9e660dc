"""Certificates beside PEFT and llama.cpp: which answer `rlood verify` gives for a server that is right, and for servers with each fault.

usage: tests/certificate/check.py BINARY [TABLE]

Trains adapters of 1, 20 and 200 steps at the default rate, serves each with PEFT in torch over a small HTTP server, right and with
every fault, and asks `rlood verify`. The same with exports as GGUF in llama.cpp. Fails where a right server is not found equal, a fault
is found equal, or another answer is given than is possible for the fault. Writes the table of confusions to TABLE.

Needs torch, transformers, peft and xllamacpp.
"""

import contextlib
import http.server
import io
import json
import os
import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
CASES = ROOT / "tests/fixtures/parity"
MODELS = {"tiny": ROOT / "assets/tiny", "hybrid": ROOT / "tests/fixtures/hybrid", "llama": CASES / "llama"}
STEPS = [1, 20, 200]
# The bundled model and the hybrid know sums, and their answers to them differ. The other model's answers to anything do.
SUMS = [json.loads(line) for line in (ROOT / "assets/tiny-data/train.jsonl").read_text().splitlines()[:64]]
WORDS = [{"prompt": f"Say the number {n} in a few words.", "answer": "a lazy dog sleeps"} for n in range(16)]
# The answers that may be given for each way to serve. Where q and k are a small part of the update, an adapter in which only they are wrong
# looks like one that is rounded.
RIGHT = {
    "right": ["equal"],
    "right, merged": ["equal"],
    "base model": ["base_model"],
    "merged twice": ["applied_twice"],
    "half scale": ["wrong_scale"],
    "rsLoRA ignored": ["wrong_scale"],
    "q, k of the model not permuted": ["other_weights", "cannot_tell"],
    "q, k of the adapter not permuted": ["other_weights", "wrong_scale", "low_precision", "cannot_tell"],
    "other tokenizer": ["other_tokenizer"],
    "bf16": ["low_precision", "cannot_tell"],
    "merged in bf16": ["low_precision", "cannot_tell"],
    "Q8_0": ["low_precision", "cannot_tell"],
}
LLAMA_CPP = {
    "right": (("float32", None), ["equal"]),
    "base model": (("float32", -1.0), ["base_model"]),
    "merged twice": (("float32", 1.0), ["applied_twice"]),
    "bf16": (("bfloat16", None), ["low_precision", "cannot_tell"]),
    "Q8_0": (("q8_0", None), ["low_precision", "cannot_tell"]),
}


# ---------------------------------------------------------------- rlood

class Rlood:
    def __init__(self, binary, folder):
        self.binary = binary
        self.log = open(folder / "log", "w")
        self.child = subprocess.Popen(
            [binary, "serve", "--listen", "127.0.0.1:0", "--devices", "cpu", "--log", "warn", "--data-dir", folder / "data"],
            stdout=subprocess.PIPE, stderr=self.log, text=True, env=dict(os.environ, RLOOD_MODEL_ROOT=str(ROOT)))
        for line in self.child.stdout:
            if found := re.match(r"listening on (\S+)", line):
                self.url = found[1]
                return
        sys.exit(f"the server does not start: {(folder / 'log').read_text()}")

    def bytes(self, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"})
        try:
            return urllib.request.urlopen(request, timeout=120).read()
        except urllib.error.HTTPError as error:
            sys.exit(f"{path}: {error.code} {error.read().decode()}")

    def call(self, path, body=None):
        return json.loads(self.bytes(path, body))

    def train(self, model, steps, use_rslora, into):
        """A job of so many steps with the default rate and adapter; its adapter's files are in `into`. Returns the checkpoint's id."""
        job = self.call("/jobs", {
            "model": model,
            "dataset": {"records": WORDS if model == "llama" else SUMS},
            "rewards": [{"type": "text_similarity", "evaluation_metric": "fuzzy_match", "reference": "{{ item.answer }}"}],
            "rloo": {"num_generations": 8}, "sampling": {"max_completion_length": 16}, "lora": {"use_rslora": use_rslora},
            "training": {"prompts_per_step": 4, "max_steps": steps, "seed": 7},
        })["id"]
        while (view := self.call(f"/jobs/{job}"))["state"] not in ("succeeded", "failed", "cancelled"):
            time.sleep(0.1)
        assert view["state"] == "succeeded", view
        self.unpack(f"/jobs/{job}/adapter", into)
        return self.call(f"/jobs/{job}/checkpoints")["data"][0]["id"]

    def unpack(self, path, into):
        with tarfile.open(fileobj=io.BytesIO(self.bytes(path))) as archive:
            archive.extractall(into, filter="data")

    def export(self, checkpoint, into, **request):
        export = self.call(f"/checkpoints/{checkpoint}/exports", request)
        while export["state"] in ("queued", "running"):
            time.sleep(0.05)
            export = self.call(f"/exports/{export['id']}")
        assert export["state"] == "succeeded", export
        self.unpack(f"/exports/{export['id']}/archive.tar", into)

    def verify(self, *flags):
        """The document that `rlood verify --json` prints, and whether the exit code is the one of the finding."""
        done = subprocess.run([self.binary, "verify", *map(str, flags), "--json"], capture_output=True, text=True, timeout=600)
        if not done.stdout.strip():
            sys.exit(f"rlood verify {flags}: {done.stderr}")
        found = json.loads(done.stdout)
        codes = ["equal", *[None] * 19, "base_model", "applied_twice", "wrong_scale", "other_tokenizer", "low_precision", "other_weights", "cannot_tell"]
        assert codes.index(found["comparison"]["finding"]) == done.returncode, (found, done.returncode)
        return found

    def stop(self):
        self.child.terminate()
        self.child.wait()
        self.log.close()


# ---------------------------------------------------------------- PEFT, right and wrong

def rounded_q8_0(weight):
    """What llama.cpp's Q8_0 keeps of a matrix: blocks of 32, a scale in float16, 8-bit codes."""
    import torch

    blocks = weight.float().reshape(-1, 32)
    scale = blocks.abs().amax(1, keepdim=True) / 127
    inverse = torch.where(scale > 0, 1 / scale, torch.zeros_like(scale))
    return ((blocks * inverse).round().clamp(-127, 127) * scale.half().float()).reshape(weight.shape)


def unpermuted(rows, heads):
    """The rows of q or k as llama.cpp reads them where the converter did not permute them: it pairs neighbours, and the model halves."""
    return rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def served(folder, adapter, name):
    """The model of one way to serve."""
    import peft
    import torch
    from parity_cases import load

    def base():
        return load(folder)

    def peft_of(model, **config):
        settings = peft.PeftConfig.from_pretrained(adapter)
        for key, value in config.items():
            setattr(settings, key, value)
        return peft.PeftModel.from_pretrained(model, adapter, config=settings).eval()

    def merged():
        return peft_of(base()).merge_and_unload()

    settings = json.loads((pathlib.Path(adapter) / "adapter_config.json").read_text())
    match name:
        case "right" | "other tokenizer":
            return peft_of(base())
        case "right, merged":
            return merged()
        case "base model":
            return base()
        case "merged twice":
            return peft_of(merged())
        case "half scale":
            return peft_of(base(), lora_alpha=settings["lora_alpha"] / 2)
        case "rsLoRA ignored":
            return peft_of(base(), use_rslora=False)
        case "bf16":
            return peft_of(base()).to(torch.bfloat16)
        case "merged in bf16":
            return merged().to(torch.bfloat16)
        case "Q8_0":
            model = merged()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.ndim == 2:
                        parameter.copy_(rounded_q8_0(parameter))
            return model
    model = merged() if "model" in name else peft_of(base())
    config = model.config
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            projection = re.search(r"\.([qk])_proj\.(.*)", key)
            if projection and (projection[2] == "weight" if "model" in name else "lora_B" in projection[2]):
                heads = config.num_attention_heads if projection[1] == "q" else config.num_key_value_heads
                parameter.copy_(unpermuted(parameter, heads))
    return model


class Api(http.server.BaseHTTPRequestHandler):
    """/v1/completions of one prompt and /tokenize, in the manner of vLLM, of a server with `echo`, or of llama.cpp."""

    manner, model, tokenizer = "vllm", None, None

    def log_message(self, *_):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        answer = self.tokenize(body) if self.path == "/tokenize" else self.complete(body) if self.path == "/v1/completions" else None
        data = json.dumps(answer if answer is not None else {"error": {"message": "no such route"}}).encode()
        self.send_response(200 if answer is not None else 404)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def tokenize(self, body):
        return {"tokens": self.tokenizer(body["prompt"])["input_ids"]}

    def complete(self, body):
        import torch

        ids = body["prompt"]
        if isinstance(ids, str):
            ids = self.tokenizer(ids)["input_ids"]
        with torch.no_grad():
            logps = self.model(input_ids=torch.tensor([ids])).logits[0].float().log_softmax(-1)
        biased = logps[-1].clone()
        for token, bias in (body.get("logit_bias") or {}).items():
            biased[int(token)] += bias
        new = int(biased.argmax())
        of_prompt = [None] + [float(row[token]) for row, token in zip(logps, ids[1:])]
        choice = {"index": 0, "text": self.tokenizer.decode([new]), "finish_reason": "length"}
        last = float(logps[-1][new])
        if self.manner == "vllm":
            choice |= {"token_ids": [new], "prompt_token_ids": ids}
            if body.get("prompt_logprobs") is not None:
                choice["prompt_logprobs"] = [one and {str(token): {"logprob": one, "rank": 1}} for token, one in zip(ids, of_prompt)]
        elif self.manner == "echo" and body.get("echo"):
            choice["logprobs"] = {"tokens": [], "token_logprobs": [*of_prompt, last], "top_logprobs": [], "text_offset": []}
        elif self.manner == "llama.cpp":
            choice["logprobs"] = {"content": [{"id": new, "token": choice["text"], "logprob": last, "top_logprobs": []}]}
        return {"object": "text_completion", "model": body["model"], "choices": [choice],
                "usage": {"prompt_tokens": len(ids), "completion_tokens": 1, "total_tokens": len(ids) + 1}}


@contextlib.contextmanager
def api(model, tokenizer, manner="vllm"):
    handler = type("Handler", (Api,), {"model": model, "tokenizer": staticmethod(tokenizer), "manner": manner})
    handler.tokenizer = tokenizer
    server = http.server.HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


# ---------------------------------------------------------------- llama.cpp, in a process of its own

def serve_llama_cpp(model, adapter, scale):
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx, params.n_parallel, params.warmup, params.port, params.n_gpu_layers = 512, 1, False, 0, 0
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.verbosity = -1
    if adapter:
        lora = xllamacpp.CommonAdapterLoraInfo()
        lora.path, lora.scale = adapter, float(scale)
        params.lora_adapters = [lora]
    server = xllamacpp.Server(params)
    print(f"listening on {server.listening_address}", flush=True)
    sys.stdin.read()


@contextlib.contextmanager
def llama_cpp(model, adapter=None, scale=1.0):
    command = [sys.executable, __file__, "--llama-cpp", str(model), str(adapter or ""), str(scale)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        address = next(found[1] for line in child.stdout if (found := re.match(r"listening on (\S+)", line)))
        yield f"{address}/v1"
    finally:
        child.stdin.close()
        child.wait()


# ---------------------------------------------------------------- the table

def cell(found):
    comparison = found["comparison"]
    finding = comparison["finding"].replace("_", " ")
    return f"{finding} ({comparison['scale']:.2f})" if finding == "wrong scale" else finding


def judge(found, expected, what, wrong):
    comparison = found["comparison"]
    finding = comparison["finding"]
    if finding not in expected:
        wrong.append(f"{what}: {finding} instead of {' or '.join(expected)}: {comparison}")


def check_peft(rlood, model, use_rslora, adapters, rows, wrong):
    import transformers

    folder = MODELS[model]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    other = transformers.AutoTokenizer.from_pretrained(MODELS["tiny" if model == "llama" else "llama"])
    for name, expected in RIGHT.items():
        if (name == "rsLoRA ignored") != use_rslora and name == "rsLoRA ignored" or ("permuted" in name and model != "llama"):
            continue
        cells = []
        for steps in STEPS:
            served_model = served(folder, adapters[steps], name)
            flags = ["--certificate", adapters[steps] / "certificate.json", "--model", "m"]
            with api(served_model, other if name == "other tokenizer" else tokenizer) as url:
                found = rlood.verify(*flags, "--url", url)
            judge(found, expected, f"PEFT, {model}{', rsLoRA' if use_rslora else ''}, {steps} steps, {name}", wrong)
            cells.append(cell(found))
            if name in ("right", "base model"):
                # The other manners to ask give the same answer.
                for manner, asked in {"echo": "echo", "llama.cpp": "forced_tokens"}.items():
                    with api(served_model, tokenizer, manner) as url:
                        again = rlood.verify(*flags, "--url", url)
                    assert again["asked"] == asked, again
                    judge(again, expected, f"{manner}, {model}, {steps} steps, {name}", wrong)
        rows.append([f"{model}{', rsLoRA' if use_rslora else ''}", "PEFT", name, *cells])


def check_llama_cpp(rlood, use_rslora, adapters, checkpoints, folder, rows, wrong):
    files = {}
    for steps in STEPS:
        for dtype in ("float32", "bfloat16", "q8_0"):
            into = folder / f"gguf-{steps}-{dtype}"
            rlood.export(checkpoints[steps], into, format="gguf", dtype=dtype)
            files[steps, dtype] = into / "model.gguf"
        rlood.export(checkpoints[steps], folder / f"gguf-{steps}-adapter", format="gguf_adapter")
    for name, ((dtype, scale), expected) in LLAMA_CPP.items():
        cells = []
        for steps in STEPS:
            adapter = folder / f"gguf-{steps}-adapter/adapter.gguf" if scale is not None else None
            with llama_cpp(files[steps, dtype], adapter, scale or 1.0) as url:
                found = rlood.verify("--certificate", adapters[steps] / "certificate.json", "--model", "m", "--url", url)
            assert found["asked"] == "forced_tokens", found
            judge(found, expected, f"llama.cpp, {steps} steps, {name}", wrong)
            cells.append(cell(found))
        rows.append([f"llama{', rsLoRA' if use_rslora else ''}", "llama.cpp", name, *cells])


def check_files(rlood, model, adapters, checkpoints, folder, wrong):
    """Folders: base with adapter, the server's merge, the base model."""
    for steps in STEPS:
        certificate = ["--certificate", adapters[steps] / "certificate.json", "--model-dir"]
        merged = folder / f"merged-{model}-{steps}"
        rlood.export(checkpoints[steps], merged, format="merged", dtype="float32")
        judge(rlood.verify(*certificate, MODELS[model], "--adapter", adapters[steps]), ["equal"], f"files, {model}, {steps} steps", wrong)
        judge(rlood.verify(*certificate, merged), ["equal"], f"merged files, {model}, {steps} steps", wrong)
        judge(rlood.verify(*certificate, MODELS[model]), ["base_model"], f"base files, {model}, {steps} steps", wrong)
        judge(rlood.verify(*certificate, merged, "--adapter", adapters[steps]), ["applied_twice"], f"twice, {model}, {steps} steps", wrong)


def table(rows, effects):
    head = "# What `rlood verify` answers\n\nMade by `tests/certificate/check.py` (`.ci/full certificate`): adapters of 1, 20 and 200 steps at the default rate, "
    head += "served right and with each fault. In brackets: the estimated scale. *tiny* is the bundled model, *hybrid* a Qwen3.5 that knows the same task, "
    head += "*llama* a model with random weights.\n\n"
    head += "| model | served by | as | 1 step | 20 steps | 200 steps |\n|---|---|---|---|---|---|\n"
    body = "".join("| " + " | ".join(row) + " |\n" for row in rows)
    sizes = "\nEffect of the adapters, in nats (root mean square over the certificate's tokens):\n\n| model | 1 step | 20 steps | 200 steps |\n|---|---|---|---|\n"
    sizes += "".join(f"| {name} | " + " | ".join(f"{effect:.2g}" for effect in values) + " |\n" for name, values in effects.items())
    return head + body + sizes


def main():
    import torch
    import transformers

    sys.path.insert(0, str(ROOT / "scripts"))
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    rows, wrong, effects = [], [], {}
    with tempfile.TemporaryDirectory() as work:
        work = pathlib.Path(work)
        rlood = Rlood(sys.argv[1], work)
        try:
            for model, folder in MODELS.items():
                rlood.call("/models", {"id": model, "source": str(folder)})
                for use_rslora in (False,) if model == "hybrid" else (False, True):
                    adapters = {steps: work / f"{model}-{use_rslora}-{steps}" for steps in STEPS}
                    checkpoints = {steps: rlood.train(model, steps, use_rslora, into) for steps, into in adapters.items()}
                    name = f"{model}{', rsLoRA' if use_rslora else ''}"
                    certificates = [json.loads((into / "certificate.json").read_text()) for into in adapters.values()]
                    effects[name] = [certificate["effect"]["rms_nats"] for certificate in certificates]
                    assert min(effects[name]) > 0, f"{name}: an adapter changes nothing: {effects[name]}"
                    check_peft(rlood, model, use_rslora, adapters, rows, wrong)
                    if not use_rslora:
                        check_files(rlood, model, adapters, checkpoints, work, wrong)
                    if model == "llama" and use_rslora:
                        check_llama_cpp(rlood, use_rslora, adapters, checkpoints, work, rows, wrong)
        finally:
            rlood.stop()
    text = table(rows, effects)
    print(text, flush=True)
    if len(sys.argv) > 2:
        pathlib.Path(sys.argv[2]).write_text(text)
    answers = [answer for row in rows for answer in row[3:]]
    print(f"figure: ways to serve that were judged: {len(answers)}, wrongly: {len(wrong)}, could not tell: {answers.count('cannot tell')}")
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    if sys.argv[1] == "--llama-cpp":
        serve_llama_cpp(*sys.argv[2:])
    else:
        main()
