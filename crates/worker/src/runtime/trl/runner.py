"""Trains one rank of a job with TRL's RLOOTrainer for an rlood worker.

The worker starts one process per rank and drives it over a Unix socket (protocol version 1): one JSON object per line, one
connection per rank. Questions have an `id`, and their answers carry it as `re`. The worker scores completions, keeps the journal,
publishes checkpoints and decides when to stop. This file only connects its questions to TRL.

The process connects with the standard library alone, before it imports torch, so that the worker can see and end it from the start.
"""

import base64
import importlib.metadata
import json
import math
import os
import queue
import socket
import sys
import threading
import time
import traceback

PROTOCOL = 1
EXIT_KILLED = 75
EXIT_ORPHANED = 76
PACKAGES = ("trl", "transformers", "torch", "peft", "accelerate", "datasets", "bitsandbytes", "deepspeed", "torchvision", "pillow")


class Link:
    """The connection to the worker. A thread reads it, so that a kill or a lost worker ends the process at any time."""

    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect(path)
        self.answers = queue.Queue()
        self.lock = threading.Lock()
        self.asked = 0
        threading.Thread(target=self._read, name="worker-link", daemon=True).start()

    def _read(self):
        try:
            with self.socket.makefile("r", encoding="utf-8") as lines:
                for line in lines:
                    message = json.loads(line)
                    if message.get("type") == "kill":
                        os._exit(EXIT_KILLED)
                    self.answers.put(message)
        except (OSError, ValueError):
            pass
        os._exit(EXIT_ORPHANED)

    def tell(self, kind, **fields):
        line = json.dumps({"type": kind, **fields}, allow_nan=False) + "\n"
        with self.lock:
            self.socket.sendall(line.encode())

    def ask(self, kind, **fields):
        self.asked += 1
        self.tell(kind, id=self.asked, **fields)
        answer = self.answers.get()
        if answer.get("re") != self.asked:
            raise RuntimeError(f"the worker answered question {answer.get('re')} instead of {self.asked} ({kind})")
        return answer


def versions():
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return found


def finite(value):
    """Returns a value of TRL's log for JSON, which has no NaN and no infinity."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if math.isfinite(value) else None


def sampler_state(torch):
    """Returns the states of torch's random number generators."""
    state = {"cpu": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()}
    if torch.cuda.is_available():
        state["cuda"] = base64.b64encode(torch.cuda.get_rng_state().numpy().tobytes()).decode()
    return state


def restore_sampler(torch, state):
    def tensor(text):
        return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)

    torch.set_rng_state(tensor(state["cpu"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensor(state["cuda"]))


def simulate_gpu_ranks():
    """Lets DeepSpeed run on several CPU ranks, which accelerate 1.15 does not support. For tests only."""
    from accelerate import state
    from accelerate.utils import DistributedType

    def prepare(self, cpu=False, sagemaker_dp=False, backend=None):
        return "gloo", DistributedType.MULTI_CPU

    state.PartialState._prepare_backend = prepare
    # DeepSpeed would otherwise compile its shared-memory collectives with g++ at start, which takes minutes.
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    ShareMemCommBuilder.is_compatible = lambda self, verbose=False: False


def load_dataset(config):
    from datasets import Dataset, Image, List

    with open(config["dataset"], encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    if config["images"] == "none":
        return Dataset.from_list(rows)
    # Images are read from their files row by row. The column must be there, as TRL takes an absent list for an image.
    for row in rows:
        row["images"] = [{"bytes": None, "path": path} for path in row["images"]]
    return Dataset.from_list(rows).cast_column("images", List(Image()))


def adapter_config(config):
    from peft import LoraConfig

    with open(os.path.join(config["model_dir"], "config.json"), encoding="utf-8") as file:
        reads_images = "vision_config" in json.load(file)
    # Layers of vision towers have the same names as those of language models, but only the language model is trained.
    exclude = r".*\b(visual|vision_\w+|vision|image_encoder)\..*" if reads_images else None
    return LoraConfig(task_type="CAUSAL_LM", exclude_modules=exclude, **config["lora"])


def define_trainer(link, torch):
    """Returns the trainer's class. Three private methods of TRL 1.16 are extended, so the worker refuses other versions."""
    from trl import RLOOTrainer

    class JournaledTrainer(RLOOTrainer):
        """Replays the completions that the worker has recorded, and records those that it samples."""

        def _get_train_sampler(self, dataset=None):
            self.rlood_sampler = super()._get_train_sampler(dataset)
            return self.rlood_sampler

        def skip_epochs(self, number):
            """Gives a resumed run the order of its epoch. TRL's sampler would begin again with the order of the first one."""
            if self.rlood_sampler.shuffle:
                for _ in range(number):
                    torch.randperm(self.rlood_sampler.num_samples, generator=self.rlood_sampler.generator)

        def _generate_and_score_completions(self, inputs):
            self.rlood_rows = [example["rlood_row"] for example in inputs]
            self.rlood_key = {"phase": "train", "step": self.state.global_step + 1, "call": 0}
            return super()._generate_and_score_completions(inputs)

        def _generate_single_turn(self, prompt_ids, images, multimodal_fields):
            part = link.ask("recorded", rows=self.rlood_rows, **self.rlood_key)["part"]
            if part is not None:
                restore_sampler(torch, part["sampler"])
                return [completion["ids"] for completion in part["completions"]]
            completions = super()._generate_single_turn(prompt_ids, images, multimodal_fields)
            ends = {*self.eos_token_ids, self._tokenizer.pad_token_id}
            part = {
                "completions": [
                    {"ids": ids, "finish_reason": "stop" if ids and ids[-1] in ends else "length"} for ids in completions
                ],
                "sampler": sampler_state(torch),
            }
            link.ask("sampled", rows=self.rlood_rows, part=part, **self.rlood_key)
            return completions

    return JournaledTrainer


def define_reward(link, keys):
    """Returns the only reward function: the worker combines the job's rewards into one number per completion."""

    def reward(completion_ids, rlood_row, **_):
        return link.ask("score", samples=len(completion_ids), **keys())["values"]

    return reward


def define_callback(link, rank, started):
    from transformers import TrainerCallback

    class WorkerCallback(TrainerCallback):
        """Reports progress, and does what the worker decides after each step."""

        trainer = None

        def on_train_begin(self, args, state, control, model=None, train_dataloader=None, **_):
            steps_per_epoch = max(math.ceil(len(train_dataloader) / args.gradient_accumulation_steps), 1)
            self.trainer.skip_epochs(state.global_step // steps_per_epoch)
            # ZeRO-3 leaves only a part of each parameter on a rank.
            parameters = [
                (getattr(parameter, "ds_numel", parameter.numel()), parameter.requires_grad) for parameter in model.parameters()
            ]
            link.tell(
                "ready",
                trainable=sum(number for number, trains in parameters if trains),
                total=sum(number for number, _ in parameters),
                max_steps=state.max_steps,
                steps_done=state.global_step,
                build_s=time.monotonic() - started,
            )

        def on_log(self, args, state, control, logs=None, **_):
            # The log at the end of the run repeats the number of the last step.
            if rank != 0 or "train_runtime" in logs:
                return
            values = {name: finite(value) for name, value in logs.items()}
            advantages = [finite(value) for value in self.trainer._logs["advantages"]]
            link.tell("metrics", step=state.global_step, values=values, advantages=advantages)

        def on_step_end(self, args, state, control, **_):
            decision = link.ask("step", step=state.global_step)["stop"]
            control.should_save = decision in ("save", "pause")
            control.should_training_stop = control.should_training_stop or decision in ("pause", "stop")
            return control

        def on_save(self, args, state, control, **_):
            directory = os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
            link.ask("checkpoint", step=state.global_step, dir=directory)

    return WorkerCallback()


def run(link, config, rank, started):
    if config["simulate_gpu_ranks"]:
        simulate_gpu_ranks()
    import torch
    from trl import RLOOConfig

    link.tell("loaded", import_s=time.monotonic() - started, cuda=torch.cuda.is_available())
    torch.set_num_threads(config["threads"])
    adapter = quantization = None
    if config["lora"] is not None:
        adapter = adapter_config(config)
    if config["quantization"] is not None:
        from transformers import BitsAndBytesConfig

        quantization = BitsAndBytesConfig(**config["quantization"])
    rloo = dict(config["rloo"])
    init = rloo.get("model_init_kwargs")
    if init is not None:
        rloo["model_init_kwargs"] = {**init, "dtype": getattr(torch, init["dtype"])}
    arguments = RLOOConfig(output_dir=config["output_dir"], trust_remote_code=False, **rloo)
    callback = define_callback(link, rank, started)
    keys = {}
    trainer = define_trainer(link, torch)(
        model=config["model_dir"],
        reward_funcs=define_reward(link, lambda: keys["of"]()),
        args=arguments,
        train_dataset=load_dataset(config),
        callbacks=[callback],
        quantization_config=quantization,
        peft_config=adapter,
    )
    keys["of"] = lambda: trainer.rlood_key
    callback.trainer = trainer
    trainer.train(resume_from_checkpoint=config["resume"])
    link.ask("done", step=trainer.state.global_step)


def die_with_worker():
    """Asks the kernel to kill this process when the thread that started it ends. The closed connection is the second line of defense."""
    import ctypes

    ctypes.CDLL(None).prctl(1, 9)


def main():
    die_with_worker()
    started = time.monotonic()
    rank = int(os.environ["RANK"])
    link = Link(os.environ["RLOOD_RUNNER_SOCKET"])
    link.tell("hello", protocol=PROTOCOL, rank=rank, pid=os.getpid(), world=int(os.environ["WORLD_SIZE"]), versions=versions())
    try:
        with open(os.environ["RLOOD_RUNNER_CONFIG"], encoding="utf-8") as file:
            config = json.load(file)
        run(link, config, rank, started)
    except BaseException as error:
        trace = traceback.format_exc()
        print(trace, file=sys.stderr, flush=True)
        link.tell("failed", **{"class": type(error).__name__, "message": str(error)[:4000], "trace": trace[-20000:]})
        code = 1
    else:
        code = 0
    sys.stdout.flush()
    sys.stderr.flush()
    # The worker has all results. Threads of torch must not delay the end of the process.
    os._exit(code)


main()
