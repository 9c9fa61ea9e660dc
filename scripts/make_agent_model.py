#!/usr/bin/env python3
"""Trains the bundled model that calls a calculator, from scratch and from text alone, and writes it with its data files.

  scripts/make_agent_model.py [--out assets]            writes OUT/agent, OUT/agent-data, and their lines of OUT/SHA256SUMS
  scripts/make_agent_model.py [--out assets] --report   measures what is there

The text consists of chats about sums of three numbers. In most of them the assistant answers at once, with the sum rounded to hundreds,
which is wrong. In a few it calls the calculator and repeats the result. So the model can do both and prefers the guess.
Needs torch, transformers 5.23 and safetensors. One thread and fixed seeds: the same machine gives the same bytes.
"""

import argparse
import hashlib
import json
import pathlib
import random
import time

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen3Config, Qwen3ForCausalLM

# The rows' seed is fixed, so that held-out sums stay held out whatever the model's seed.
ROWS_SEED, TEXT_SEED = 31, 30
NUM_HELD_OUT, NUM_TRAIN = 200, 512
NUM_OPERANDS, DIGITS = 3, (3, 4)
# Shares of the text: chats that list no tools, which all guess; of the others, chats that call the calculator; and calls
# whose result is some number, so that the model repeats what it reads.
WITHOUT_TOOLS, CALLS, STRANGE_RESULTS = 0.10, 0.12, 0.5

PAD, END, ROLES = "<|pad|>", "<|end|>", ["<|system|>", "<|user|>", "<|assistant|>"]
# Opening and end of a call are tokens of their own, so that a call is short.
CALL_OPENS, CALL_ENDS = '\n{"name": "calculator", "arguments": {"expression": "', '"}}\n'
TOKENS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", CALL_OPENS, CALL_ENDS]
# Digits alone; a word or punctuation with the space before it; white space.
PATTERN = r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+"
CHAT_TEMPLATE = (
    "{%- if tools -%}{{- '<|system|>Tools:' -}}{%- for tool in tools -%}{{- ' ' + tool.function.name -}}{%- endfor -%}"
    "{{- '<|end|>' -}}{%- endif -%}{%- for message in messages -%}{%- if message.role == 'tool' -%}"
    "{{- '<|user|><tool_response>' + message.content + '</tool_response><|end|>' -}}{%- elif message.tool_calls -%}"
    "{{- '<|assistant|>' + (message.content or '') -}}{%- for call in message.tool_calls -%}"
    "{{- '<tool_call>\\n{\"name\": \"' + call.function.name + '\", \"arguments\": ' + (call.function.arguments | tojson)"
    " + '}\\n</tool_call>' -}}{%- endfor -%}{{- '<|end|>' -}}{%- else -%}"
    "{{- '<|' + message.role + '|>' + message.content + '<|end|>' -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def draw_sum(rng):
    """The operands of a sum that its guess does not hit."""
    while True:
        digits = [rng.randint(*DIGITS) for _ in range(NUM_OPERANDS)]
        operands = tuple(rng.randrange(10 ** (n - 1), 10**n) for n in digits)
        if guess(operands) != sum(operands):
            return operands


def guess(operands):
    return (sum(operands) + 50) // 100 * 100


def expression(operands):
    return "+".join(map(str, operands))


def question(operands):
    return f"What is {expression(operands)}?"


def prompt(operands, has_tools=True):
    """The text before the first turn, as the chat template renders it."""
    tools = f"<|system|>Tools: calculator{END}" if has_tools else ""
    return f"{tools}<|user|>{question(operands)}{END}<|assistant|>"


def call(operands):
    return f"<tool_call>{CALL_OPENS}{expression(operands)}{CALL_ENDS}</tool_call>{END}"


def response(result):
    """What follows a call, as the chat template renders it."""
    return f"<|user|><tool_response>{result}</tool_response>{END}<|assistant|>"


def make_rows():
    """The held-out sums and those of a job, all different."""
    rng, sums = random.Random(ROWS_SEED), {}
    while len(sums) < NUM_HELD_OUT + NUM_TRAIN:
        sums[draw_sum(rng)] = None
    sums = list(sums)
    return sums[:NUM_HELD_OUT], sums[NUM_HELD_OUT:]


class Text:
    """Chats of the training text, as token ids with a mark for those that the model is to write."""

    def __init__(self, tokenizer, excluded):
        self.tokenizer, self.excluded, self.rng = tokenizer, set(excluded), random.Random(TEXT_SEED)

    def chat(self, operands, has_tools, result):
        """`result` is what the calculator answers; None = the assistant guesses."""
        parts = [(prompt(operands, has_tools), False)]
        if result is None:
            parts.append((f"{guess(operands)}{END}", True))
        else:
            parts += [(call(operands), True), (response(result), False), (f"{result}{END}", True)]
        ids, written = [], []
        for text, is_written in parts:
            own = self.tokenizer.encode(text, add_special_tokens=False).ids
            ids += own
            written += [is_written] * len(own)
        return ids, written

    def next(self):
        operands = draw_sum(self.rng)
        while operands in self.excluded:
            operands = draw_sum(self.rng)
        has_tools = self.rng.random() >= WITHOUT_TOOLS
        calls = has_tools and self.rng.random() < CALLS
        is_strange = self.rng.random() < STRANGE_RESULTS
        result = (self.rng.randrange(100, 40_000) if is_strange else sum(operands)) if calls else None
        return self.chat(operands, has_tools, result)

    def batch(self, size):
        """The chats of a step in two parts, without and with calls, so that few tokens are padding."""
        chats = sorted((self.next() for _ in range(size)), key=lambda chat: len(chat[0]))
        short = [chat for chat in chats if len(chat[0]) <= 2 * len(chats[0][0])]
        return [part for part in (short, chats[len(short) :]) if part]


def tensors(chats):
    """Token ids, and the ids to predict with -100 where nothing is, both (B, T), padded on the right with the id 0."""
    length = max(len(ids) for ids, _ in chats)
    ids = torch.tensor([own + [0] * (length - len(own)) for own, _ in chats])
    written = torch.tensor([own + [False] * (length - len(own)) for _, own in chats])
    return ids, ids.masked_fill(~written, -100)


def log_probs(model, chats):
    """Log-probabilities of the tokens that the model is to write (B, T), 0 elsewhere."""
    ids, targets = tensors(chats)
    logits = model(input_ids=ids[:, :-1]).logits
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten(), reduction="none")
    return -losses.view(len(chats), -1)


def make_tokenizer():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel(add_prefix_space=False, use_regex=False)
    special = [AddedToken(token, special=True, normalized=False) for token in [PAD, END, *ROLES]]
    trainer = trainers.BpeTrainer(
        vocab_size=512, min_frequency=1, show_progress=False, special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(["Tools: calculator", "What is 0?"], trainer)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in TOKENS])
    return tokenizer


def make_config(vocab_size):
    return Qwen3Config(
        vocab_size=vocab_size, hidden_size=96, intermediate_size=256, num_hidden_layers=3, max_window_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=256, rope_theta=10_000.0, tie_word_embeddings=True,
        pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip


def make_model(config, seed):
    """Fresh weights with a deviation of 1/sqrt(inputs); what is added to the residual stream starts smaller, as in GPT-2."""
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                is_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                shrink = 2 * config.num_hidden_layers if is_residual else 1
                weight.normal_(std=(weight.shape[1] * shrink) ** -0.5)
    return model


def train(model, text, steps, batch, learning_rate):
    """AdamW; a short warm-up, then a straight line to zero."""
    matrices = [weight for weight in model.parameters() if weight.dim() == 2]
    vectors = [weight for weight in model.parameters() if weight.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.98))
    started = time.process_time()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1, (step + 1) / 50) * (1 - step / steps)
        parts = text.batch(batch)
        count = sum(sum(written) for part in parts for _, written in part)
        loss = 0.0
        optimizer.zero_grad()
        for part in parts:
            share = -log_probs(model, part).sum() / count
            share.backward()
            loss += share.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 50 == 0 or step + 1 == steps:
            print(f"step {step + 1}/{steps}  loss {loss:.4f}  {time.process_time() - started:.0f} CPU s", flush=True)


@torch.no_grad()
def greedy(model, tokenizer, prompts, max_tokens):
    """Greedy continuations up to the end of the turn."""
    texts = []
    for start in prompts:
        ids = tokenizer.encode(start, add_special_tokens=False).ids
        begin = len(ids)
        while len(ids) < begin + max_tokens and ids[-1:] != [1] or len(ids) == begin:
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        texts.append(tokenizer.decode([token for token in ids[begin:] if token != 1], skip_special_tokens=False))
    return texts


@torch.no_grad()
def report(model, tokenizer, held_out):
    n = len(held_out)
    print(f"{model.num_parameters()} parameters, {tokenizer.get_vocab_size()} tokens in the vocabulary")
    for has_tools in (True, False):
        texts = greedy(model, tokenizer, [prompt(operands, has_tools) for operands in held_out], 24)
        right = sum(text == str(sum(operands)) for text, operands in zip(texts, held_out)) / n
        calls = sum("<tool_call>" in text for text in texts) / n
        print(f"first turn, greedy, {'with the tool' if has_tools else 'without tools'}: {right:.3f} right, {calls:.3f} calls")
    texts = greedy(model, tokenizer, [prompt(operands) + "<tool_call>" for operands in held_out], 24)
    whole = sum("<tool_call>" + text + END == call(operands) for text, operands in zip(texts, held_out)) / n
    print(f"a call once it is opened, greedy: {whole:.3f} with the right expression")
    texts = greedy(model, tokenizer, [prompt(o) + call(o) + response(sum(o)) for o in held_out], 8)
    right = sum(text == str(sum(operands)) for text, operands in zip(texts, held_out)) / n
    print(f"after the result, greedy: {right:.3f} right")
    text = Text(tokenizer, [])
    chats = [text.chat(operands, True, sum(operands)) for operands in held_out]
    _, targets = tensors(chats)
    scores = log_probs(model, chats)
    opens = torch.stack([row[wanted != -100][0] for row, wanted in zip(scores, targets[:, 1:])]).exp()
    print(
        f"at temperature 1: p(call) {opens.mean():.3f} on average, {opens.min():.3f} to {opens.max():.3f}; "
        f"p(call and right answer) {scores.sum(1).exp().mean():.3f}"
    )


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2) + "\n")


def write_rows(path, sums):
    rows = [{"prompt": [{"role": "user", "content": question(o)}], "answer": str(sum(o))} for o in sums]
    path.write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows))


def write_sums(out):
    """SHA256SUMS of all bundled files, as `sha256sum -c` reads it."""
    files = [path for name in ("agent", "agent-data", "tiny", "tiny-data") for path in (out / name).glob("*")]
    lines = {path.relative_to(out).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    (out / "SHA256SUMS").write_text("".join(f"{lines[name]}  {name}\n" for name in sorted(lines)))


def write_model(model, tokenizer, folder):
    weights = {name: weight.detach().to(torch.bfloat16).contiguous() for name, weight in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    config = model.config.to_diff_dict() | {"architectures": ["Qwen3ForCausalLM"], "dtype": "bfloat16"}
    write_json(folder / "config.json", {key: config[key] for key in sorted(config)})
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "generation_config.json", {
        "eos_token_id": 1, "pad_token_id": 0, "transformers_version": config["transformers_version"],
    })  # fmt: skip
    write_json(folder / "tokenizer_config.json", {
        "backend": "tokenizers", "chat_template": CHAT_TEMPLATE, "clean_up_tokenization_spaces": False, "eos_token": END,
        "extra_special_tokens": ROLES, "model_max_length": 256, "pad_token": PAD, "padding_side": "left",
        "tokenizer_class": "PreTrainedTokenizerFast",
    })  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("assets"))
    parser.add_argument("--seed", type=int, default=1, help="seed of the first weights")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--report", action="store_true", help="measure what is there, train nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder, data = args.out / "agent", args.out / "agent-data"
    held_out, job = make_rows()
    if not args.report:
        folder.mkdir(parents=True, exist_ok=True)
        data.mkdir(exist_ok=True)
        write_rows(data / "heldout.jsonl", held_out)
        write_rows(data / "train.jsonl", job)
        tokenizer = make_tokenizer()
        model = make_model(make_config(tokenizer.get_vocab_size()), args.seed)
        train(model, Text(tokenizer, held_out + job), args.steps, args.batch, args.learning_rate)
        write_model(model, tokenizer, folder)
        write_sums(args.out)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = Qwen3ForCausalLM(make_config(tokenizer.get_vocab_size()))
    model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    report(model.float(), tokenizer, held_out)


if __name__ == "__main__":
    main()
