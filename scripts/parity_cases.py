#!/usr/bin/env python3
"""Makes parity cases: tiny models with random weights, stored as published checkpoints are, and what transformers and
PEFT compute with them in f32 on the CPU. `tests/fixtures/README.md` explains the files, `meta.describe` the fields.

  scripts/parity_cases.py OUT [--only NAME,NAME]   writes OUT/NAME for every case in `cases()`
  scripts/parity_cases.py --check FOLDER...        computes the sections of cases that exist anew, from their files and
                                                   adapters, and fails where a number differs by more than 2e-5 (a
                                                   gradient or what follows from one: 2e-4)

Needs torch, transformers 5.23, peft 0.21 and safetensors. Everything follows from the seed; the tokenizers are those of
cases in tests/fixtures/parity.
"""

import argparse
import copy
import importlib.metadata
import json
import math
import pathlib
import random
import shutil
import sys

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file

SEED = 4321
TOKENIZERS = pathlib.Path(__file__).resolve().parent.parent / "tests/fixtures/parity"
# The numbers are rounded to six digits, and were computed on another machine.
TOLERANCE = dict(default=2e-5, reinforce=2e-4, adamw=2e-4)
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
DESCRIBE = {
    "logits_check": "one sequence without padding: logits (full vocabulary) at `positions`, and token_logprobs[i] = log p(ids[i+1] | ids[..=i])",
    "completions": "log p of each completion token given prompt + earlier completion tokens (temperature 1)",
    "padded_batch": "the same completions in one batch, prompts left-padded, completions right-padded, mask 0 on padding; positions count from the left edge of the row (ministral3: from the first real token, since its query scale needs them absolute); padding outputs are 0",
    "temperature_logprobs": "first completion's token log-probs with logits / 0.7",
    "greedy": "16 argmax tokens, EOS ignored; min_margin is the smallest top1-top2 logit gap met",
    "lora": "same quantities with the PEFT adapter in lora/ (y = W x + b + (alpha/r) B A x)",
    "lora_rs": "the same with rank-stabilised scaling: alpha/sqrt(r)",
    "reinforce": "loss = sum over completions and their tokens of -A_i * logp; f32; gradient L2 norms of LoRA parameters by the name used in adapter_model.safetensors, first 4 values of each gradient row-major",
    "adamw": "one torch.optim.AdamW step from the lora/ adapter after clipping that gradient to max_norm; logprobs of the completions afterwards",
}
DESCRIBE_FP8 = (
    "weight (F8_E4M3) * weight_scale_inv of its block of weight_block_size [rows, columns], counted from the first row and column: "
    "the last blocks may be partial; null = one scale for the whole matrix. The product in f32 is rounded to bfloat16; all numbers are those of the rounded weights, computed in f32 "
    "(activations are never quantised)"
)


# ---------------------------------------------------------------- the cases


def cases():
    """name -> the tokenizer's case, the config, what the adapters adapt, how it is published."""
    T = transformers
    special = dict(eos_token_id=2, pad_token_id=3)
    small = dict(hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, vocab_size=320,
                 max_position_embeddings=256)
    rope = dict(rope_type="default", rope_theta=1e6)
    vision = dict(model_type="pixtral", hidden_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8, intermediate_size=24,
                  image_size=16, patch_size=4, num_channels=3, hidden_act="silu", rope_parameters=dict(rope_type="default", rope_theta=1e4))
    mistral = dict(small, head_dim=24, intermediate_size=96, rms_norm_eps=1e-5, sliding_window=None, bos_token_id=0, **special)
    ministral = T.Ministral3Config(**mistral, tie_word_embeddings=True, rope_parameters=dict(
        type="yarn", rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16, beta_fast=32.0, beta_slow=1.0,
        mscale_all_dim=1.0, mscale=1.0, llama_4_scaling_beta=0.1))
    around = lambda text: T.Mistral3Config(text_config=text, vision_config=vision, image_token_index=10, spatial_merge_size=2)
    qwen = lambda inner: T.Qwen3Config(**small, head_dim=32, intermediate_size=inner, rms_norm_eps=1e-6, tie_word_embeddings=True,
                                       rope_parameters=rope, bos_token_id=None, **special)
    fp8 = lambda block: dict(activation_scheme="dynamic", fmt="e4m3", quant_method="fp8", weight_block_size=block)
    static = dict(activation_scheme="static", dequantize=False, quant_method="fp8", weight_block_size=None,
                  modules_to_not_convert=["model.vision_tower", "model.multi_modal_projector", "lm_head"])
    return {
        # Granite 4.0 micro: attention alone, a fused MLP, integers among the multipliers, and an intermediate_size that
        # says nothing. Its numbers differ here where equal ones would hide a mistake.
        "granitemoehybrid": dict(tokenizer="granite", targets=LINEARS[:4] + ["input_linear", "output_linear"], config=T.GraniteMoeHybridConfig(
            **small, layer_types=["attention"] * 3, num_local_experts=0, num_experts_per_tok=0, intermediate_size=128, shared_intermediate_size=96,
            rms_norm_eps=1e-5, position_embedding_type="rope", embedding_multiplier=3, attention_multiplier=0.2, residual_multiplier=0.5,
            logits_scaling=2, tie_word_embeddings=True, router_aux_loss_coef=0.01, rope_parameters=dict(rope_type="default", rope_theta=1e4),
            bos_token_id=None, **special)),
        # Mistral Small 3.1: its own head, though the outer config of transformers 5 says tied.
        "mistral3": dict(tokenizer="ministral3", targets=LINEARS, config=around(T.MistralConfig(**mistral, tie_word_embeddings=False, rope_parameters=rope))),
        # Ministral 3 (3B): a tied head.
        "mistral3_ministral": dict(tokenizer="ministral3", targets=LINEARS, config=around(ministral), no_v4=True, no_lora_rs=True),
        # Its Instruct checkpoint: one scale a matrix, and one for activations that are not quantised here.
        "mistral3_ministral_fp8": dict(tokenizer="ministral3", targets=LINEARS, config=around(ministral), no_v4=True, no_lora_rs=True, fp8=static, scales=torch.bfloat16),
        # Qwen3 as FP8. 80 is no multiple of 32: the last blocks are partial.
        "qwen3_fp8": dict(tokenizer="qwen3", targets=LINEARS, config=qwen(80), fp8=fp8([32, 32]), scales=torch.bfloat16),
        "qwen3_fp8_skip": dict(tokenizer="qwen3", targets=LINEARS, config=qwen(96), no_lora_rs=True, scales=torch.float32, fp8=dict(
            fp8([32, 16]), modules_to_not_convert=["lm_head", "model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj", "model.layers.1.mlp.down_proj"])),
    }


# ---------------------------------------------------------------- a checkpoint


def fill(model, generator):
    """Weights that make a mistake visible: matrices of unit gain, norms that are not 1."""
    # An embedding that is scaled up and is the head too would only repeat its input.
    embedding = 0.08 if "Granite" in type(model).__name__ else 0.3
    for name, p in sorted(model.named_parameters()):
        noise = torch.randn(p.shape, generator=generator)
        if "norm" in name:
            p.copy_(1 + 0.2 * noise)
        elif "embed" in name or "lm_head" in name:
            p.copy_(embedding * noise)
        else:
            p.copy_(noise / p[0].numel() ** 0.5)


def skipped(module, patterns):
    """Whether modules_to_not_convert names it: a module, what lies below it, or how its name ends."""
    return any(module == p or module.startswith(p + ".") or module.endswith(p) for p in patterns)


def blocks(shape, size):
    """The index of every row's and column's block."""
    size = size or shape
    return [torch.arange(n) // b for n, b in zip(shape, size)]


def quantise(weights, case, generator):
    fp8, out = case["fp8"], {}
    for name, w in weights.items():
        module = name.removesuffix(".weight")
        is_linear = w.ndim == 2 and ".layers." in name and "vision" not in name
        if not is_linear or skipped(module, fp8.get("modules_to_not_convert") or []):
            out[name] = w
            continue
        rows, columns = blocks(w.shape, fp8["weight_block_size"])
        # Blocks of different sizes, so that another block's scale is wrong by much.
        factors = 0.5 + torch.rand(rows[-1] + 1, columns[-1] + 1, generator=generator)
        w = w.float() * factors[rows][:, columns]
        largest = torch.zeros_like(factors)
        for r in range(factors.shape[0]):
            for c in range(factors.shape[1]):
                largest[r, c] = w[rows == r][:, columns == c].abs().max()
        scale = (largest / 448).to(case["scales"])
        out[name] = (w / scale.float()[rows][:, columns]).clamp(-448, 448).to(torch.float8_e4m3fn)
        out[f"{module}.weight_scale_inv"] = scale if fp8["weight_block_size"] else scale.reshape(())
        if fp8["activation_scheme"] == "static":
            out[f"{module}.activation_scale"] = torch.tensor(0.0123, dtype=case["scales"])
    return out


def expand(weights, size):
    """What FP8 weights stand for: the inverse of `quantise`, rounded to bfloat16."""
    out = {}
    for name, w in weights.items():
        if name.endswith(("weight_scale_inv", "activation_scale")):
            continue
        if w.dtype == torch.float8_e4m3fn:
            rows, columns = blocks(w.shape, size)
            scale = weights[name.replace(".weight", ".weight_scale_inv")].float().reshape(rows[-1] + 1, columns[-1] + 1)
            w = (w.float() * scale[rows][:, columns]).bfloat16()
        out[name] = w.float()
    return out


def published(name):
    """transformers' names of a multimodal model's tensors -> those of the checkpoints."""
    for ours, theirs in [("model.language_model.", "language_model.model."), ("lm_head.", "language_model.lm_head."),
                         ("model.vision_tower.", "vision_tower."), ("model.multi_modal_projector.", "multi_modal_projector.")]:
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    raise ValueError(name)


def of_text(weights):
    """The text part of a multimodal checkpoint, by the names of a text model alone."""
    # Both spellings are published: with the text model's `model.` behind `language_model.`, or before it.
    for prefix, replacement in [("language_model.", ""), ("model.language_model.", "model.")]:
        if any(name.startswith(prefix) for name in weights):
            return {replacement + name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
    return weights


def as_v4(config, case):
    """The spelling of transformers 4, which most published checkpoints have."""
    if case.get("no_v4"):
        return config
    config = copy.deepcopy(config)
    for part in [config, config.get("text_config"), config.get("vision_config")]:
        if part is None:
            continue
        part.pop("dtype", None)
        rope = part.pop("rope_parameters", None)
        if rope:
            part["rope_theta"] = rope["rope_theta"]
    config.update(torch_dtype="bfloat16", transformers_version="4.57.0")
    match config["model_type"]:
        case "granitemoehybrid":
            config.pop("time_step_limit", None)
            config.update(layer_types=["attention"] * config["num_hidden_layers"], rope_scaling=None, init_method="mup", normalization_function="rmsnorm")
        case "mistral3":
            # Mistral Small 3.1 names neither of these; generation_config.json has the EOS.
            for part, keys in [(config, ["tie_word_embeddings"]), (config["text_config"], ["tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"])]:
                for key in keys:
                    part.pop(key, None)
        case "qwen3":
            config.update(rope_scaling=None, use_sliding_window=False, max_window_layers=config["num_hidden_layers"])
            config.pop("layer_types", None)
    if "fp8" in case:
        config["quantization_config"] = case["fp8"]
    return config


def store(folder, name, case):
    config = copy.deepcopy(case["config"])
    config.dtype = torch.bfloat16
    is_multimodal = hasattr(config, "vision_config")
    auto = transformers.AutoModelForImageTextToText if is_multimodal else transformers.AutoModelForCausalLM
    generator = torch.Generator().manual_seed(SEED + sum(map(ord, name)))
    ties = config.get_text_config().tie_word_embeddings
    building = copy.deepcopy(config)
    building.tie_word_embeddings = ties
    with torch.no_grad():
        model = auto.from_config(building, dtype=torch.float32)
        fill(model, generator)
    weights = {n: w.detach().bfloat16() for n, w in model.state_dict().items() if not (ties and n == "lm_head.weight")}
    if is_multimodal:
        weights = {published(n): w for n, w in weights.items()}
    config.architectures = [type(model).__name__]
    if "fp8" in case:
        weights = quantise(weights, case, generator)
        config.quantization_config = transformers.FineGrainedFP8Config(**case["fp8"])
    save_file({n: w.contiguous() for n, w in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    config.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config_v4.json").write_text(json.dumps(as_v4(written, case), indent=2))
    for file in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"]:
        shutil.copyfile(TOKENIZERS / case["tokenizer"] / file, folder / file)


def expand_4bit(weights):
    """The weights with bitsandbytes' 4-bit codes expanded in f32 and rounded once to the dtype of their state."""
    expanded = {name: w for name, w in weights.items() if ".weight." not in name}
    for name in [name for name in weights if ".quant_state.bitsandbytes__" in name]:
        matrix = name.split(".quant_state.")[0]
        state = json.loads(bytes(weights[name].tolist()).decode())
        codes = weights[matrix].flatten()
        values = weights[f"{matrix}.quant_map"][torch.stack([codes >> 4, codes & 15], 1).flatten().long()]
        scales = weights[f"{matrix}.absmax"]
        if scales.dtype == torch.uint8:
            nested = weights[f"{matrix}.nested_absmax"].repeat_interleave(state["nested_blocksize"])[: len(scales)]
            scales = weights[f"{matrix}.nested_quant_map"][scales.long()] * nested + torch.tensor(state["nested_offset"])
        values = values * scales.repeat_interleave(state["blocksize"])[: len(values)]
        expanded[matrix] = values.to(getattr(torch, state["dtype"])).float().reshape(state["shape"])
    return expanded


def load(folder, attention="eager", file="config.json"):
    """The text model in f32, from a case's files; what is quantised is expanded here, not by transformers."""
    config = transformers.AutoConfig.from_pretrained(folder, _configuration_file=file)
    quantisation = getattr(config, "quantization_config", None)
    if quantisation is not None:
        del config.quantization_config
    config = config.get_text_config()
    weights = {}
    for part in folder.glob("model*.safetensors"):
        weights.update(load_file(part))
    weights = of_text(expand(expand_4bit(weights), (quantisation or {}).get("weight_block_size")))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    may_miss = {"lm_head.weight"} if config.tie_word_embeddings else set()
    assert not unexpected and set(missing) <= may_miss, (folder, missing, unexpected)
    model.tie_weights()
    return model.eval()


# ---------------------------------------------------------------- adapters


def make_adapter(folder, name, case, rank_stabilised):
    config = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=case["targets"], task_type="CAUSAL_LM", use_rslora=rank_stabilised)
    model = peft.get_peft_model(load(folder), config)
    generator = torch.Generator().manual_seed(SEED + 2 + rank_stabilised)
    with torch.no_grad():
        for parameter, t in sorted(model.named_parameters()):
            noise = torch.randn(t.shape, generator=generator) if "lora_" in parameter else None
            if "lora_A" in parameter:
                t.copy_(noise / t.shape[1] ** 0.5)
            elif "lora_B" in parameter:
                t.copy_(0.05 * noise)
    model.peft_config["default"].base_model_name_or_path = name
    into = folder / ("lora_rs" if rank_stabilised else "lora")
    model.save_pretrained(into)
    (into / "README.md").unlink(missing_ok=True)
    # PEFT writes a set, in no order.
    written = json.loads((into / "adapter_config.json").read_text())
    written["target_modules"].sort()
    (into / "adapter_config.json").write_text(json.dumps(written, indent=2, sort_keys=True))


def adapted(folder, adapter):
    return peft.PeftModel.from_pretrained(load(folder), folder / adapter, is_trainable=True).eval()


# ---------------------------------------------------------------- what is computed


def rounded(x):
    x = x.tolist() if torch.is_tensor(x) else x
    return [rounded(y) for y in x] if isinstance(x, (list, tuple)) else round(float(x), 6)


@torch.no_grad()
def logits_of(model, ids):
    return model(input_ids=torch.tensor([ids])).logits[0].float()


def logps_of(model, prompt, completion, temperature=1.0):
    logits = model(input_ids=torch.tensor([prompt + completion])).logits[0].float()
    logps = torch.log_softmax(logits / temperature, -1)[len(prompt) - 1 : -1]
    return logps.gather(-1, torch.tensor(completion)[:, None])[:, 0]


def check_logits(model, sequences):
    out = []
    for ids in sequences:
        logits = logits_of(model, ids)
        positions = sorted({0, len(ids) // 2, len(ids) - 1})
        logps = torch.log_softmax(logits, -1)[:-1].gather(-1, torch.tensor(ids[1:], dtype=torch.long)[:, None])[:, 0]
        out.append(dict(ids=ids, positions=positions, logits=rounded(logits[positions]), argmax=logits.argmax(-1).tolist(), token_logprobs=rounded(logps)))
    return out


@torch.no_grad()
def check_completions(model, completions):
    return [dict(prompt_ids=p, completion_ids=c, logprobs=rounded(logps_of(model, p, c))) for p, c in completions]


@torch.no_grad()
def padded_batch(model, completions, pad):
    width, length = (max(len(row[part]) for row in completions) for part in (0, 1))
    before, after = lambda p: width - len(p), lambda c: length - len(c)
    ids = [[pad] * before(p) + p + c + [pad] * after(c) for p, c in completions]
    mask = [[0] * before(p) + [1] * len(p + c) + [0] * after(c) for p, c in completions]
    where = {}
    if model.config.model_type == "ministral3":
        where["position_ids"] = (torch.tensor(mask).cumsum(-1) - 1).clamp(min=0)
    logits = model(input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask), **where).logits.float()
    logps = torch.log_softmax(logits, -1)[:, width - 1 : -1].gather(-1, torch.tensor(ids)[:, width:, None])[..., 0]
    logps = logps * torch.tensor(mask)[:, width:]
    worst = max(float((row[: len(c)] - logps_of(model, p, c)).abs().max()) for row, (p, c) in zip(logps, completions))
    return dict(prompt_width=width, input_ids=ids, attention_mask=mask, logprobs=rounded(logps), max_abs_diff_from_unpadded=worst)


def greedy(model, text, prompt, pad):
    ids, margin = list(prompt), math.inf
    for _ in range(16):
        first, second = logits_of(model, ids)[-1].topk(2)[0].tolist()
        margin = min(margin, first - second)
        ids.append(int(logits_of(model, ids)[-1].argmax()))
    new = ids[len(prompt) :]
    cached = model.generate(
        input_ids=torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), min_new_tokens=16, max_new_tokens=16,
        do_sample=False, eos_token_id=None, pad_token_id=pad, disable_compile=True)
    assert cached[0, len(prompt) :].tolist() == new, "cached generation differs from uncached"
    return dict(prompt=text, prompt_ids=prompt, new_ids=new, min_margin=rounded(margin))


def reinforce_and_adamw(model, completions, advantages):
    names = {n.replace(".default", ""): t for n, t in model.named_parameters() if t.requires_grad}
    loss = sum(-a * logps_of(model, p, c).sum() for a, (p, c) in zip(advantages, completions))
    loss.backward()
    reinforce = dict(
        advantages=advantages, loss=rounded(loss.detach()), grad_norms={n: rounded(t.grad.norm()) for n, t in names.items()},
        grad_first4={n: rounded(t.grad.flatten()[:4]) for n, t in names.items()},
        total_norm=rounded(torch.stack([t.grad.norm() for t in names.values()]).norm()))
    plan = dict(lr=1e-2, betas=[0.9, 0.999], eps=1e-8, weight_decay=0.01)
    torch.nn.utils.clip_grad_norm_(names.values(), 1.0)
    torch.optim.AdamW(names.values(), **plan).step()
    norms = {n: rounded(t.detach().norm()) for n, t in names.items()}
    return reinforce, dict(plan, max_norm=1.0, completions=check_completions(model, completions), param_norms=norms)


class Texts:
    """Prompts of invented words, with as many tokens as asked for."""

    def __init__(self, tokenizer):
        self.tokenizer, self.random = tokenizer, random.Random(SEED)
        syllables = [a + b for a in "b br c cl d f g h l m n p pr r s st t tr v".split() for b in "a e i o u ea ou en ar il".split()]
        self.words = ["".join(self.random.choices(syllables, k=self.random.randint(1, 3))) for _ in range(2000)]

    def ids(self, text):
        return self.tokenizer(text)["input_ids"]

    def of(self, tokens):
        while True:
            text = self.random.choice(self.words).capitalize()
            while len(self.ids(text)) < tokens:
                text += " " + self.random.choice(self.words)
            if len(self.ids(text)) == tokens:
                return text


def material(tokenizer, models):
    """What is asked of a case; `models`: without an adapter and with one, which choose the prompts of `greedy`."""
    texts = Texts(tokenizer)
    generator = torch.Generator().manual_seed(SEED + 7)
    some = lambda n: torch.randint(4, 320, (n,), generator=generator).tolist()
    first, second = texts.of(12), texts.of(12)
    prompts = []
    for model in models:
        # The tokens should differ among themselves, and no two logits be so close that rounding decides.
        tried = []
        for _ in range(60):
            text = texts.of(10)
            answer = greedy(model, text, texts.ids(text), tokenizer.pad_token_id)
            if answer["min_margin"] > 0.01:
                tried.append((len(set(answer["new_ids"])), text))
            if tried and max(tried)[0] >= 10:
                break
        variety, text = max(tried)
        assert variety > 3, "no prompt with a safe margin"
        prompts.append(text)
    return dict(
        texts=[first, "Hello, world!  Two  spaces\n\nand café 日本 🙂.", "", "<|im_start|>user\nhi<|im_end|>"],
        chats=[[dict(role="user", content="What is up?")],
               [dict(role="user", content="  A  "), dict(role="assistant", content="<think>\nhm\n</think>\n\nB"), dict(role="user", content="C")],
               [dict(role="system", content="Be brief."), dict(role="user", content="Q")]],
        sequences=[texts.ids(first), texts.ids(second) + some(28), some(1)],
        completions=[(texts.ids(texts.of(n)), some(m)) for n, m in [(6, 9), (11, 16), (16, 5)]],
        advantages=[1.25, -0.75, 0.5], prompts=prompts)


def material_of(expected):
    """The same, of a case that exists."""
    pairs = [(c["prompt_ids"], c["completion_ids"]) for c in expected["completions"]]
    chats = [c["messages"] for c in expected["chat"] if c["add_generation_prompt"]]
    return dict(
        texts=[t["text"] for t in expected["tokenizer"]], chats=chats, sequences=[c["ids"] for c in expected["logits_check"]],
        completions=pairs, advantages=expected["reinforce"]["advantages"], prompts=[expected["greedy"]["prompt"], expected["lora"]["greedy"]["prompt"]])


def of_tokenizer(tokenizer, texts, chats):
    told, said = [], []
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        told.append(dict(text=text, ids=ids, ids_no_special=tokenizer(text, add_special_tokens=False)["input_ids"], decoded=tokenizer.decode(ids),
                         decoded_skip_special=tokenizer.decode(ids, skip_special_tokens=True)))
    for messages in chats:
        for prompting in (True, False):
            answer = dict(messages=messages, add_generation_prompt=prompting)
            try:
                answer["text"] = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompting)
                answer["ids"] = tokenizer.apply_chat_template(messages, add_generation_prompt=prompting, return_dict=True)["input_ids"]
            except Exception as error:  # a template that refuses the messages
                answer["error"] = str(error)
            said.append(answer)
    return told, said


def compute(folder, name, asked=None):
    """Every section of expected.json, from the files in a case's folder."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model, lora = load(folder), adapted(folder, "lora")
    check_only = asked is not None
    asked = asked or material(tokenizer, [model, lora])
    sequences, completions, pad = asked["sequences"], asked["completions"], tokenizer.pad_token_id
    apart = lambda other, one=model: max(float((logits_of(one, ids) - logits_of(other, ids)).abs().max()) for ids in sequences)
    assert apart(load(folder, file="config_v4.json")) == 0, f"{name}: config_v4.json is another model"
    answer = lambda m, text: greedy(m, text, tokenizer(text)["input_ids"], pad)
    versions = {p: importlib.metadata.version(p) for p in ["torch", "transformers", "peft", "tokenizers", "safetensors", "numpy"]}
    config = json.loads((folder / "config.json").read_text())
    meta = dict(name=name, model_type=config["model_type"], seed=SEED, versions=versions, describe=dict(DESCRIBE),
                # Only for a new case: some families have no such attention.
                eager_vs_sdpa_max_abs_logit_diff=None if check_only else apart(load(folder, "sdpa")), params=sum(p.numel() for p in model.parameters()))
    if "text_config" in config:
        meta["text_model_type"] = config["text_config"]["model_type"]
    if "quantization_config" in config:
        meta["describe"]["fp8"] = DESCRIBE_FP8
    expected = dict(meta=meta)
    expected["tokenizer"], expected["chat"] = of_tokenizer(tokenizer, asked["texts"], asked["chats"])
    expected["logits_check"] = check_logits(model, sequences)
    expected["completions"] = check_completions(model, completions)
    expected["padded_batch"] = padded_batch(model, completions, pad)
    with torch.no_grad():
        expected["temperature_logprobs"] = dict(temperature=0.7, logprobs=rounded(logps_of(model, *completions[0], temperature=0.7)))
    expected["greedy"] = answer(model, asked["prompts"][0])
    expected["lora"] = dict(dir="lora", r=4, alpha=8, logits_check=check_logits(lora, sequences), completions=check_completions(lora, completions),
                            greedy=answer(lora, asked["prompts"][1]), max_abs_logit_shift=rounded(apart(lora)))
    if (folder / "lora_rs").is_dir():
        stabilised = check_completions(adapted(folder, "lora_rs"), completions)
        expected["lora_rs"] = dict(dir="lora_rs", r=4, alpha=8, completions=stabilised)
    expected["reinforce"], expected["adamw"] = reinforce_and_adamw(lora, completions, asked["advantages"])
    return expected


def difference(got, want, at=""):
    """The largest difference of two numbers, absolute or relative, and where. Anything else that differs is an error."""
    if isinstance(want, dict):
        assert set(got) == set(want), f"{at}: {sorted(set(got) ^ set(want))}"
        return max((difference(got[k], want[k], f"{at}/{k}") for k in want), default=(0.0, at))
    if isinstance(want, list):
        assert len(got) == len(want), f"{at}: {len(got)} instead of {len(want)}"
        return max((difference(g, w, f"{at}/{i}") for i, (g, w) in enumerate(zip(got, want))), default=(0.0, at))
    if isinstance(want, float):
        return (abs(got - want) / max(1.0, abs(want)), at)
    assert got == want, f"{at}: {got!r} instead of {want!r}"
    return (0.0, at)


def check(folder):
    want = json.loads((folder / "expected.json").read_text())
    got = compute(folder, folder.name, material_of(want))
    for sections in (got, want):
        sections.pop("meta")
    assert set(got) == set(want), set(got) ^ set(want)
    worst = {section: difference(json.loads(json.dumps(got[section])), want[section], section) for section in want}
    print(folder.name, ", ".join(f"{section} {error:.1e}" for section, (error, _) in worst.items()), flush=True)
    return [f"{at}: {error:.1e}" for section, (error, at) in worst.items() if error > TOLERANCE.get(section, TOLERANCE["default"])]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=pathlib.Path)
    parser.add_argument("--only", help="names, separated by commas")
    parser.add_argument("--check", nargs="+", type=pathlib.Path, metavar="FOLDER")
    arguments = parser.parse_args()
    if bool(arguments.out) == bool(arguments.check):
        parser.error("either OUT or --check")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    if arguments.check:
        failed = [what for folder in arguments.check for what in check(folder)]
        sys.exit("\n".join(failed) or None)
    for name, case in cases().items():
        if arguments.only and name not in arguments.only.split(","):
            continue
        folder = arguments.out / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        torch.manual_seed(SEED)
        store(folder, name, case)
        for rank_stabilised in [False] if case.get("no_lora_rs") else [False, True]:
            make_adapter(folder, name, case, rank_stabilised)
        expected = compute(folder, name)
        (folder / "expected.json").write_text(json.dumps(expected, separators=(",", ":")))
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        margins = [expected["greedy"]["min_margin"], expected["lora"]["greedy"]["min_margin"]]
        print(f"{name}: {size} bytes, {expected['meta']['params']} parameters, margins {margins}, adapter shifts by {expected['lora']['max_abs_logit_shift']}, "
              f"gradient {expected['reinforce']['total_norm']}, padding {expected['padded_batch']['max_abs_diff_from_unpadded']:.1e}, "
              f"sdpa {expected['meta']['eager_vs_sdpa_max_abs_logit_diff']:.1e}", flush=True)


if __name__ == "__main__":
    main()
