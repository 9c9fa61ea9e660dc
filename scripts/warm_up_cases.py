#!/usr/bin/env python3
"""Records warm-ups: supervised steps on answers, computed with torch, transformers and PEFT in f32 on the CPU.

  scripts/warm_up_cases.py OUT [--only NAME,NAME]   writes OUT/NAME.json and OUT/NAME.safetensors for every case

The models and the adapters to begin with are those of tests/fixtures/parity. The loss of a step is the mean of −log p over the
answer tokens of its rows; then the gradient is clipped and torch.optim.AdamW makes one update. `crates/engine/tests/it/warm_up.rs`
compares. Needs torch, transformers 5.23, peft 0.21 and safetensors.
"""

import argparse
import json
import pathlib

import peft
import torch
import transformers
from safetensors.torch import save_file

PARITY = pathlib.Path(__file__).resolve().parent.parent / "tests/fixtures/parity"
SETTINGS = dict(steps=5, batch_size=3, learning_rate=5e-3, adam_beta1=0.9, adam_beta2=0.95, adam_epsilon=1e-8, weight_decay=0.1,
                max_grad_norm=1.0)
user = lambda text: {"role": "user", "content": text}
assistant = lambda text: {"role": "assistant", "content": text}
# Every form a row can have: messages, a prompt with a completion, plain texts; answers of different lengths, a turn before the last.
ROWS = [
    {"prompt": [user("What is up?"), assistant("The sky is.")]},
    {"prompt": [user("Say yes")], "completion": "yes"},
    {"prompt": "one two three", "completion": " four five six seven"},
    {"prompt": [user("A"), assistant("B"), user("C"), assistant("D, and then much more than that")]},
    {"prompt": [user("  spaces  ")], "completion": [assistant("none\n\nhere")]},
    {"prompt": [user("What is up?")], "completion": "nothing"},
    {"prompt": "x = 1\ny =", "completion": " 2"},
]
# gemma2: scaled embeddings, softcaps, windows, a template without an end-of-sequence token.
CASES = {"qwen3": dict(full=False), "gemma2": dict(full=False), "qwen3_full": dict(full=True, model="qwen3")}


def tokens(tokenizer, eos, row):
    """Prompt ids, answer ids: what stands behind the prompt, up to its first end-of-sequence token, which is added if missing."""
    prompt, completion = row["prompt"], row.get("completion")
    if isinstance(prompt, str):
        before, whole, special = prompt, prompt + completion, True
    else:
        if isinstance(completion, str):
            completion = [assistant(completion)]
        messages = prompt + (completion or [])
        before = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
        whole, special = tokenizer.apply_chat_template(messages, tokenize=False), False
    encode = lambda text, special: tokenizer(text, add_special_tokens=special)["input_ids"]
    assert whole.startswith(before), (before, whole)
    prompt_ids, ids = encode(before, special), encode(whole, special)
    joined = ids[:len(prompt_ids)] == prompt_ids
    answer = ids[len(prompt_ids):] if joined else encode(whole[len(before):], False)
    answer = answer[:answer.index(eos) + 1] if eos in answer else answer + [eos]
    return prompt_ids, answer


def neg_logps(model, prompt, answer):
    logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1:-1]
    return torch.nn.functional.cross_entropy(logits.float(), torch.tensor(answer), reduction="none")


def record(name, case, out):
    folder = PARITY / case.get("model", name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    eos = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32, attn_implementation="eager")
    if not case["full"]:
        model = peft.PeftModel.from_pretrained(model, folder / "lora", is_trainable=True)
    model.eval()  # no dropout; gradients flow all the same
    rows = [tokens(tokenizer, eos, row) for row in ROWS]
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    # As transformers groups them: norms and biases do not decay.
    decays = lambda name: not case["full"] or not ("norm" in name or name.endswith("bias"))
    S = SETTINGS if not case["full"] else dict(SETTINGS, learning_rate=5e-4)
    groups = [dict(params=[p for n, p in trained if decays(n) == decay], weight_decay=S["weight_decay"] if decay else 0.0) for decay in (True, False)]
    adam = torch.optim.AdamW([group for group in groups if group["params"]], lr=S["learning_rate"], betas=(S["adam_beta1"], S["adam_beta2"]), eps=S["adam_epsilon"])
    losses, norms = [], []
    for step in range(S["steps"]):
        batch = [rows[(step * S["batch_size"] + i) % len(rows)] for i in range(S["batch_size"])]
        loss = torch.cat([neg_logps(model, *row) for row in batch]).mean()
        adam.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_([p for _, p in trained], S["max_grad_norm"]).item())
        adam.step()
        losses.append(loss.item())
    out.mkdir(parents=True, exist_ok=True)
    described = dict(model=folder.name, full=case["full"], settings=S, rows=ROWS, tokens=[dict(prompt=p, answer=a) for p, a in rows],
                     losses=losses, grad_norms=norms, versions=dict(torch=torch.__version__, transformers=transformers.__version__, peft=peft.__version__))
    (out / f"{name}.json").write_text(json.dumps(described, indent=1, ensure_ascii=False) + "\n")
    if case["full"]:
        # A few tensors stand for all: an embedding that is the head too, a norm, a matrix.
        kept = ("model.norm.weight", "model.layers.1.self_attn.q_norm.weight", "model.layers.0.mlp.down_proj.weight")
        tensors = {n: p.detach().clone() for n, p in trained if n in kept}
        assert len(tensors) == len(kept), sorted(n for n, _ in trained)
    else:
        tensors = {n: t.float() for n, t in peft.get_peft_model_state_dict(model).items()}
    save_file({n: t.contiguous() for n, t in tensors.items()}, out / f"{name}.safetensors")
    print(name, losses, norms)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    for name, case in CASES.items():
        if not arguments.only or name in arguments.only.split(","):
            record(name, case, arguments.out)
