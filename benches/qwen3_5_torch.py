"""One RLOO step of a Qwen3.5 of the 0.8B shape with random weights by transformers, PEFT and torch: what `rlood bench --shape qwen3.5-0.8b`
is compared with. transformers takes its torch path of the Gated DeltaNet, because the packages with kernels need a GPU.

    qwen3_5_torch.py [--steps N] [--prompts N] [--generations N] [--prompt-len N] [--completion N] [--rank N] [--dtype bf16|f32] [--json FILE]

A step samples `prompts × generations` completions with the adapter, takes the reference log-probs without it, and trains once on all of them
(leave-one-out advantages of random rewards, one AdamW step). Rewards, logging and TRL's own work are left out, which suits the peer.
Shape: https://apxml.com/models/qwen35-08b (hidden 1,024, 24 layers, MLP 3,584, 8 heads and 2 key-value heads of 256, vocabulary 248,320) and
the defaults of transformers' Qwen3_5TextConfig (linear attention of heads of 128, convolution of 4), with 16 value heads as the 0.8B has.
"""

import argparse
import json
import resource
import time

import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

TARGETS = (
    "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj in_proj_qkv in_proj_z in_proj_a in_proj_b out_proj"
).split()


def arguments():
    parser = argparse.ArgumentParser()
    for name, default in [
        ("steps", 3),
        ("prompts", 4),
        ("generations", 4),
        ("prompt-len", 32),
        ("completion", 64),
        ("rank", 16),
    ]:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=["bf16", "f32"], default="bf16")
    parser.add_argument("--json")
    return parser.parse_args()


def build(args):
    """Returns the model with a LoRA adapter on every linear layer, and its number of parameters without the adapter."""
    config = Qwen3_5TextConfig(
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=24,
        num_attention_heads=8,
        num_key_value_heads=2,
        linear_num_value_heads=16,
        tie_word_embeddings=True,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if args.dtype == "bf16" else torch.float32)
    model = Qwen3_5ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    size = sum(weight.numel() for weight in model.parameters())
    lora = LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules=TARGETS, task_type="CAUSAL_LM")
    return get_peft_model(model, lora), size


def log_probs(model, ids, num_prompt):
    """Returns the log-probs of the tokens after the prompt, [rows, tokens]."""
    kept = ids.shape[1] - num_prompt
    logits = model(input_ids=ids, logits_to_keep=kept + 1).logits[:, :-1].float()
    return torch.gather(logits.log_softmax(-1), 2, ids[:, num_prompt:, None]).squeeze(2)


def step(model, optimizer, args):
    """Runs one step. Returns the seconds of sampling, of the reference pass and of training."""
    prompts = torch.randint(1, 200_000, (args.prompts, args.prompt_len)).repeat_interleave(args.generations, 0)
    began = time.perf_counter()
    with torch.no_grad():
        model.eval()
        ids = model.generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            top_k=0,
            min_new_tokens=args.completion,
            max_new_tokens=args.completion,
        )
        sampled = time.perf_counter()
        with model.disable_adapter():
            reference = log_probs(model, ids, args.prompt_len)
    referred = time.perf_counter()
    model.train()
    rewards = torch.rand(args.prompts, args.generations)
    others = (rewards.sum(1, keepdim=True) - rewards) / (args.generations - 1)
    advantages = (rewards - others).flatten()
    new = log_probs(model, ids, args.prompt_len)
    penalty = 0.05 * (new.detach() - reference).sum(1)
    ratio = (new - new.detach()).sum(1).exp()
    loss = -(ratio * (advantages - penalty)).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return sampled - began, referred - sampled, time.perf_counter() - referred


def main():
    args = arguments()
    model, size = build(args)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5)
    steps = []
    for number in range(args.steps):
        steps.append(step(model, optimizer, args))
        sampling, reference, training = steps[-1]
        print(
            f"torch {args.dtype}: step {number + 1}: {sum(steps[-1]):.2f} s = sampling {sampling:.2f} + reference {reference:.2f} "
            f"+ training {training:.2f}",
            flush=True,
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    best = min(map(sum, steps))
    print(f"torch {args.dtype}: {size / 1e6:.0f}M parameters, fastest step {best:.2f} s, peak {peak:.0f} MiB")
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"seconds": best, "steps": steps, "peak_mib": peak, "parameters": size, **vars(args)}, file, indent=1)


main()
