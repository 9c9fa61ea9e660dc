#!/usr/bin/env python3
"""The same work as `rlood bench` on one GPU, by transformers and PEFT; benches/gpu.sh runs it beside ours.

  gpu_peers.py PART --model DIR [--device cuda] --out FILE

DIR is a random model that `rlood bench --save-model DIR` wrote. PART is one of:

  limits     device-to-device copy and a bf16 product of square matrices by torch (no model needed)
  requests   --requests FILE of [prompt, completion] lengths: transformers' continuous batching, all at once
  rollout    --prompts × --generations completions, --prompt-len + --completion tokens: `generate`, and continuous batching
  train      forward and backward with a LoRA adapter (PEFT) on every linear layer, sequences of --prompt-len + --completion
             tokens, as many at a time as --micro-batch says; --gradient-checkpointing as ours

Weights are bf16, the adapter f32 under autocast, attention is SDPA. The record is one JSON object; a peer that is missing
or fails is recorded as such (exit code 1), with what it had come to.
"""

import argparse
import json
import os
import sys
import time
import traceback

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["limits", "requests", "rollout", "train"])
    parser.add_argument("--model")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--requests")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--completion", type=int, default=512)
    parser.add_argument("--micro-batch", type=int, default=8, help="sequences of one forward and backward")
    parser.add_argument("--lora-r", type=int, default=16)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--repeat", type=int, default=3, help="measured repetitions after one to warm up")
    parser.add_argument("--out", required=True)
    return parser.parse_args()


def main():
    given = arguments()
    record = {"part": given.part, "versions": versions()}
    try:
        import torch

        torch.manual_seed(0)
        if given.device.startswith("cuda") and not torch.cuda.is_available():
            raise RuntimeError("torch sees no GPU")
        figures = PARTS[given.part](given)
        for known in [figures] if isinstance(figures, dict) else figures:
            record.update(known)
            if given.device.startswith("cuda"):
                record["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
                record["reserved_mib"] = torch.cuda.max_memory_reserved() / 2**20
            write(given.out, record)
    except Exception as error:
        traceback.print_exc()
        record["failed"] = f"{type(error).__name__}: {error}"[:500]
    write(given.out, record)
    print(json.dumps(record))
    if "failed" in record:
        print(record["failed"])
        sys.exit(1)


def write(path, record):
    """What is known so far: a part that is stopped keeps it."""
    with open(path + ".new", "w") as file:
        json.dump(record, file, indent=1)
    os.replace(path + ".new", path)


def versions():
    import importlib.metadata

    found = {"python": sys.version.split()[0]}
    for package in ["torch", "transformers", "peft", "accelerate"]:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pass
    return found


def synchronize(given):
    import torch

    if given.device.startswith("cuda"):
        torch.cuda.synchronize()


def seconds_of(given, work, repeat=None):
    """The fastest of some runs after one to warm up, and all of them."""
    work()
    runs = []
    for _ in range(repeat or given.repeat):
        synchronize(given)
        begun = time.perf_counter()
        work()
        synchronize(given)
        runs.append(time.perf_counter() - begun)
    return min(runs), runs


def load(given, lora=False):
    import torch
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, given.dtype)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=dtype, attn_implementation="sdpa").to(given.device)
    if lora:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=given.lora_r, lora_alpha=given.lora_r, target_modules=LINEAR, task_type="CAUSAL_LM")
        model = get_peft_model(model, config)
    return model


def random_ids(model, *shape):
    """Any tokens but the last one, which ends a sequence."""
    import torch

    return torch.randint(0, model.config.vocab_size - 1, shape, device=model.device)


def limits(given):
    import torch

    size = 2**30 if given.device.startswith("cuda") else 2**24
    source = torch.zeros(size, dtype=torch.uint8, device=given.device)
    target = torch.empty_like(source)
    times = 20

    def copy():
        for _ in range(times):
            target.copy_(source)

    copied, _ = seconds_of(given, copy)
    n = 8192 if given.device.startswith("cuda") else 256
    a, b = (torch.randn(n, n, device=given.device).to(getattr(torch, given.dtype)) for _ in range(2))

    def multiply():
        for _ in range(times):
            torch.mm(a, b)

    multiplied, _ = seconds_of(given, multiply)
    return {"copy_gb_s": 2 * size * times / copied / 1e9, "gemm_n": n, "gemm_gflop_s": 2 * n**3 * times / multiplied / 1e9}


def sampling_config(**extra):
    from transformers import GenerationConfig

    return GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=-1, pad_token_id=0, **extra)


def continuous(given, model, requests):
    """Seconds of all requests (ids, completion) by transformers' paged continuous batching, after a short warm-up."""
    import gc

    import torch
    from transformers import ContinuousBatchingConfig

    gc.collect()
    if given.device.startswith("cuda"):
        torch.cuda.empty_cache()
    best, every = None, requests
    longest = max(completion for _, completion in requests)
    config = ContinuousBatchingConfig(max_requests_per_batch=64, max_batch_tokens=4096)
    generation = sampling_config(max_new_tokens=longest)
    with model.continuous_batching_context_manager(generation, continuous_batching_config=config) as manager:
        for run in range(given.repeat + 1):
            requests = [(ids, min(completion, 4)) for ids, completion in every[:8]] if run == 0 else every
            synchronize(given)
            begun = time.perf_counter()
            for ids, completion in requests:
                manager.add_request(ids, max_new_tokens=completion, eos_token_id=-1)
            tokens, done = 0, 0
            for result in manager:
                if getattr(result, "error", None):
                    raise RuntimeError(f"a request failed: {result.error}")
                if result.is_finished():
                    tokens, done = tokens + len(result.generated_tokens), done + 1
                    if done == len(requests):
                        break
            taken = time.perf_counter() - begun
            if done < len(requests):
                raise RuntimeError(f"{done} of {len(requests)} requests came back")
            expected = sum(completion for _, completion in requests)
            if tokens != expected:
                raise RuntimeError(f"{tokens} tokens instead of {expected}")
            if run:
                best = taken if best is None else min(best, taken)
    return best


def attempted(work):
    """What a peer's way came to, or why it did not work."""
    try:
        return work()
    except Exception as error:
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}"[:500]}


def requests(given):
    import torch

    model = load(given).eval()
    with open(given.requests) as file:
        lengths = json.load(file)
    work = [(random_ids(model, prompt).tolist(), completion) for prompt, completion in lengths]
    tokens = sum(completion for _, completion in lengths)

    def way():
        taken = continuous(given, model, work)
        return {"seconds": taken, "tok_s": tokens / taken}

    def padded():
        """Static batches of 64, the longest completions first, left-padded."""
        begun = time.perf_counter()
        for at in range(0, len(work), 64):
            rows = sorted(work, key=lambda one: -one[1])[at : at + 64]
            width = max(len(ids) for ids, _ in rows)
            ids = torch.tensor([[0] * (width - len(ids)) + ids for ids, _ in rows], device=model.device)
            mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids, _ in rows], device=model.device)
            config = sampling_config(max_new_tokens=rows[0][1], min_new_tokens=rows[0][1])
            with torch.inference_mode():
                model.generate(ids, attention_mask=mask, generation_config=config)
        synchronize(given)
        taken = time.perf_counter() - begun
        return {"seconds": taken, "tok_s": tokens / taken}

    ways = {"generate_padded": attempted(padded)}
    yield {"completion_tokens": tokens, "ways": ways}
    ways["continuous_batching"] = attempted(way)
    yield {"completion_tokens": tokens, "ways": ways}


def rollout(given):
    import torch

    model = load(given).eval()
    prompts = random_ids(model, given.prompts, given.prompt_len)
    rows = prompts.repeat_interleave(given.generations, 0)
    tokens = rows.shape[0] * given.completion

    def generate_tokens(count):
        with torch.inference_mode():
            config = sampling_config(max_new_tokens=count, min_new_tokens=count)
            out = model.generate(rows, attention_mask=torch.ones_like(rows), generation_config=config)
        if out.shape[1] != rows.shape[1] + count:
            raise RuntimeError(f"{out.shape[1] - rows.shape[1]} tokens a row instead of {count}")

    def batch():
        taken, _ = seconds_of(given, lambda: generate_tokens(given.completion))
        first, _ = seconds_of(given, lambda: generate_tokens(1))
        step = (taken - first) / max(given.completion - 1, 1)
        return {"seconds": taken, "tok_s": tokens / taken, "prefill_s": first, "decode_step_s": step}

    def paged():
        taken = continuous(given, model, [(row.tolist(), given.completion) for row in rows])
        return {"seconds": taken, "tok_s": tokens / taken}

    ways = {"generate": attempted(batch)}
    yield {"completion_tokens": tokens, "ways": ways}
    ways["continuous_batching"] = attempted(paged)
    yield {"completion_tokens": tokens, "ways": ways}


def train(given):
    import torch

    model = load(given, lora=True).train()
    if given.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    count = given.prompts * given.generations
    length = given.prompt_len + given.completion
    ids = random_ids(model, count, length)
    # Both signs, as advantages have.
    weights = torch.where(torch.arange(count, device=ids.device) % 2 == 0, 1e-3, -1e-3)
    device_type = given.device.split(":")[0]
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def step():
        for parameter in parameters:
            parameter.grad = None
        for begin in range(0, count, given.micro_batch):
            rows = ids[begin : begin + given.micro_batch]
            with torch.autocast(device_type, dtype=torch.bfloat16, enabled=given.dtype == "bfloat16"):
                logits = model(rows, logits_to_keep=given.completion + 1, use_cache=False).logits[:, :-1]
            targets = rows[:, -given.completion :]
            logps = -torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
            (logps.view(targets.shape).sum(1) * weights[begin : begin + given.micro_batch]).sum().backward()

    taken, runs = seconds_of(given, step)
    return {
        "tokens": count * length,
        "seconds": taken,
        "runs": runs,
        "tok_s": count * length / taken,
        "micro_batch": given.micro_batch,
        "gradient_checkpointing": given.gradient_checkpointing,
        "trainable_parameters": sum(parameter.numel() for parameter in parameters),
    }


PARTS = {"limits": limits, "requests": requests, "rollout": rollout, "train": train}

if __name__ == "__main__":
    main()
