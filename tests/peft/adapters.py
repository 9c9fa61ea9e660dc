"""Adapters that the server trains and PEFT loads: every tensor finds its place, and greedy completions are the same. Merged
checkpoints that transformers loads: their logits are those of base and adapter.

usage: tests/peft/adapters.py BINARY
"""

import io
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
import warnings

import peft
import torch
import transformers
from safetensors.torch import load_file

ROOT = pathlib.Path(__file__).resolve().parents[2]
CASES = ROOT / "tests/fixtures/parity"
sys.path.insert(0, str(ROOT / "scripts"))
from parity_cases import load  # noqa: E402

# A case of every model type, and what of `lora` differs from the default.
JOBS = {
    "qwen3": {"use_rslora": True},
    "qwen2": {},
    "llama": {"target_modules": ["q_proj", "v_proj"]},
    "mistral": {},
    "smollm3": {},
    "phi3": {},
    "gemma2": {},
    "gemma3_text": {},
    "granite": {},
    "olmo2": {},
    "olmo3": {},
    "ministral3": {},
    "granitemoehybrid": {},
    "qwen3_5": {"target_modules": "all-linear"},
    # The text models of multimodal checkpoints.
    "gemma3_vl": {},
    "qwen3_5_vl": {"target_modules": "all-linear"},
    "mistral3": {},
    "mistral3_ministral": {},
}
# Cases in bitsandbytes' 4 bits, which transformers loads with bitsandbytes itself.
FOUR_BIT = ["qwen3_nf4", "llama_nf4_skip", "llama_fp4"]
# Cases that bitsandbytes quantizes here, because no case in 4 bits has their layers. The norms of their heads amplify differences, so
# their logits may be twice as far apart, as in crates/engine/tests/it/precision.rs.
QUANTIZED_HERE = ["qwen3_5"]
# bitsandbytes multiplies in its own order on the CPU, and rounds codes to bf16: its logits are this far from those of the values
# that the codes stand for (crates/engine/tests/it/four_bit.rs).
FOUR_BIT_LOGITS = 0.3
PROMPT = "the quick"
TOKENS = 12
# Where PEFT's first and second token are this near, the engines may choose differently.
MARGIN = 1e-3


class Server:
    def __init__(self, binary, folder):
        env = dict(os.environ, RLOOD_MODEL_ROOT="/")
        self.log = open(folder / "log", "w")
        self.child = subprocess.Popen(
            [binary, "serve", "--listen", "127.0.0.1:0", "--devices", "cpu", "--log", "warn", "--data-dir", folder / "data"],
            stdout=subprocess.PIPE, stderr=self.log, text=True, env=env)
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

    def stop(self):
        self.child.terminate()
        self.child.wait()
        self.log.close()


def train(server, name, lora, model=None):
    """A short job on the model in this folder, by default a case's; returns its id."""
    server.call("/models", {"id": name, "source": str(model or CASES / name)})
    job = server.call("/jobs", {
        "model": name,
        "dataset": {"records": [{"prompt": f"Say the number {n} in a few words.", "answer": "a lazy dog sleeps"} for n in range(6)]},
        # A random model's completions differ in it.
        "rewards": [{"type": "text_similarity", "evaluation_metric": "fuzzy_match", "reference": "{{ item.answer }}"}],
        "rloo": {"num_generations": 4},
        "sampling": {"max_completion_length": 8},
        "lora": {"r": 4, "alpha": 8, **lora},
        "optimizer": {"learning_rate": 0.05},
        "training": {"prompts_per_step": 2, "max_steps": 4, "seed": 7},
    })["id"]
    while (view := server.call(f"/jobs/{job}"))["state"] not in ("succeeded", "failed", "cancelled"):
        time.sleep(0.1)
    assert view["state"] == "succeeded", f"{name}: {view}"
    return job


@torch.no_grad()
def greedy(model, ids, eos):
    """At most TOKENS tokens, and whether they end there: not where the first and the second choice are too near to tell."""
    new = []
    while len(new) < TOKENS and not (new and new[-1] in eos):
        best = model(input_ids=torch.tensor([ids + new])).logits[0, -1].topk(2)
        if best.values[0] - best.values[1] < MARGIN:
            return new, False
        new.append(int(best.indices[0]))
    return new, True


def load_merged(folder):
    if "text_config" in json.loads((folder / "config.json").read_text()):
        # The cases do not have all tensors of the other parts.
        return load(folder)
    merged, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    return merged


@torch.no_grad()
def check_merged(server, job, model, ids, folder):
    """The checkpoint, merged by the server in f32 and in bf16: what transformers loads says what base and adapter say. Returns the
    largest difference of logits of each."""
    checkpoint = server.call(f"/jobs/{job}/checkpoints")["data"][0]["id"]
    want = model(input_ids=torch.tensor([ids])).logits
    worst = {}
    for dtype, tolerance in {"float32": 2e-4, "bfloat16": None}.items():
        export = server.call(f"/checkpoints/{checkpoint}/exports", {"format": "merged", "dtype": dtype})
        while export["state"] in ("queued", "running"):
            time.sleep(0.05)
            export = server.call(f"/exports/{export['id']}")
        assert export["state"] == "succeeded", export
        into = folder / f"merged-{dtype}"
        with tarfile.open(fileobj=io.BytesIO(server.bytes(f"/exports/{export['id']}/archive.tar"))) as archive:
            archive.extractall(into, filter="data")
        merged = load_merged(into)
        # What was rounded once: every adapted weight is W + ΔW in f32, then in the dtype.
        rounded = {key: value.to(getattr(torch, dtype)) for key, value in merged.state_dict().items()}
        assert all(torch.equal(value.float(), merged.state_dict()[key]) for key, value in rounded.items()), f"{dtype} holds more"
        worst[dtype] = (merged.eval()(input_ids=torch.tensor([ids])).logits - want).abs().max().item()
        assert tolerance is None or worst[dtype] <= tolerance * max(1, want.abs().max().item()), (dtype, worst)
    return worst


def check(server, name, lora, folder):
    job = train(server, name, lora)
    into = folder / name
    with tarfile.open(fileobj=io.BytesIO(server.bytes(f"/jobs/{job}/adapter"))) as archive:
        archive.extractall(into, filter="data")
    with warnings.catch_warnings():
        # PEFT warns of keys that it misses or does not know.
        warnings.simplefilter("error", UserWarning)
        base = load(CASES / name)
        model = peft.PeftModel.from_pretrained(base, into).eval()
    tensors = load_file(into / "adapter_model.safetensors")
    known = {key.replace(".default", "") for key in model.state_dict() if "lora_" in key}
    assert set(tensors) == known, f"{name}: {sorted(set(tensors) ^ known)[:6]}"
    assert all(t.abs().max() > 0 for key, t in tensors.items() if "lora_B" in key), f"{name}: a matrix was not trained"

    tokenizer = transformers.AutoTokenizer.from_pretrained(CASES / name)
    ids = tokenizer(PROMPT)["input_ids"]
    request = {"prompt": PROMPT, "sampling": {"temperature": 0, "max_completion_length": TOKENS}}
    got = server.call(f"/jobs/{job}/generate", request)["trained"][0]["completion"]
    new, ends = greedy(model, ids, eos_of(CASES / name))
    with model.disable_adapter():
        plain, _ = greedy(model, ids, [])
    want = tokenizer.decode(new, skip_special_tokens=True)
    assert got == want if ends else got.startswith(want), f"{name}: {got!r}, by PEFT {want!r}"
    worst = check_merged(server, job, model, ids + new, folder / f"{name}-export")
    print(f"merged {name}: logits differ by {worst['float32']:.1e} in float32, {worst['bfloat16']:.1e} in bfloat16", flush=True)
    compared, shifted = len(new), new != plain[: len(new)]
    print(f"peft {name}: {len(tensors)} tensors, {compared} greedy tokens the same{'' if shifted else ', which are those of the base model'}", flush=True)
    return compared, shifted


@torch.no_grad()
def check_four_bit(server, name, model, folder):
    """An adapter that was trained on 4-bit codes, loaded by PEFT over bitsandbytes' own layers: it moves their logits as it moves those
    of the expanded model. Returns how far the logits are apart, and the cosine between both changes."""
    job = train(server, name, {"target_modules": "all-linear"}, model)
    into = folder / name
    with tarfile.open(fileobj=io.BytesIO(server.bytes(f"/jobs/{job}/adapter"))) as archive:
        archive.extractall(into, filter="data")
    assert json.loads((into / "adapter_config.json").read_text())["base_model_name_or_path"] == name
    coded = transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, device_map={"": "cpu"}, attn_implementation="eager")
    ids = torch.tensor([transformers.AutoTokenizer.from_pretrained(model)("the quick brown fox jumps over it")["input_ids"]])
    logits = []
    for base in (coded, load(model)):
        model = peft.PeftModel.from_pretrained(base, into).eval()
        if base is coded:
            kinds = {type(module) for module in model.modules()}
            assert peft.tuners.lora.bnb.Linear4bit in kinds, f"{name}: PEFT found no layer of bitsandbytes"
            known = {key.replace(".default", "") for key in model.state_dict() if "lora_" in key}
            assert set(load_file(into / "adapter_model.safetensors")) == known, name
        with_adapter = model(input_ids=ids).logits.float()
        with model.disable_adapter():
            logits.append((with_adapter, with_adapter - model(input_ids=ids).logits.float()))
    (ours, change), (exact, exact_change) = logits
    apart = (ours - exact).abs().max().item()
    cosine = torch.nn.functional.cosine_similarity(change.flatten(), exact_change.flatten(), dim=0).item()
    allowed = FOUR_BIT_LOGITS if name in FOUR_BIT else 2 * FOUR_BIT_LOGITS
    assert apart <= allowed and cosine >= 0.95, f"{name}: logits {apart} apart, changes with the cosine {cosine}"
    print(f"peft {name} over bitsandbytes: logits {apart:.3f} apart, changes with the cosine {cosine:.4f}", flush=True)


def quantized(name, folder):
    """The case's model in NF4, as bitsandbytes writes it. Returns its folder."""
    into = folder / f"{name}_nf4"
    # On the CPU, bitsandbytes cannot multiply a matrix whose number of rows is no multiple of 32.
    settings = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32,
        llm_int8_skip_modules=["lm_head", "in_proj_a", "in_proj_b"])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        CASES / name, dtype=torch.float32, device_map={"": "cpu"}, quantization_config=settings)
    model.save_pretrained(into)
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(CASES / name / file, into / file)
    return into


def eos_of(folder):
    eos = json.loads((folder / "generation_config.json").read_text()).get("eos_token_id", [])
    return eos if isinstance(eos, list) else [eos]


def main():
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as work:
        work = pathlib.Path(work)
        server = Server(sys.argv[1], work)
        try:
            done = [check(server, name, lora, work) for name, lora in JOBS.items()]
            coded = {name: CASES / name for name in FOUR_BIT} | {f"{name}_nf4": quantized(name, work) for name in QUANTIZED_HERE}
            for name, model in coded.items():
                check_four_bit(server, name, model, work)
        finally:
            server.stop()
    assert sum(shifted for _, shifted in done) > len(done) / 2, "most adapters change nothing: the comparison says little"
    print(f"figure: adapters loaded by PEFT over bitsandbytes: {len(coded)}")
    print(f"figure: adapters loaded by PEFT: {len(done)}, greedy tokens the same: {sum(compared for compared, _ in done)}")


main()
