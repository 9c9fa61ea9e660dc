"""Serves Python functions as rewards by the reward contract v1, with TRL's signature of reward functions, and Python classes as
environments by the environment contract v1.

Uses only Python's standard library, 3.8 or newer. `rlood` starts this program as a server (python.rs), and the server starts the
program again for each worker process. Functions run only in workers, so that a function that crashes or hangs does not stop the
server. File descriptor 0 of each process is a socket to its parent: the settings arrive on it, and the process exits when the
socket closes. The server inherits its listening socket as descriptor 1.
"""

import base64
import hashlib
import hmac
import json
import os
import queue
import secrets as random_secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MAX_SAMPLES = 1024
MAX_BYTES = 66 << 20
# Maximum difference between a request's timestamp and this clock, in seconds.
TOLERANCE_S = 300
# A request that takes longer is answered with 202, and its results, or its turn's answer, are published at its status address. In seconds.
SYNC_WAIT_S = 10.0
# Maximum number of requests that are computed or wait for a worker. Further requests get a 429.
MAX_UNDER_WAY = 256
# Time for running requests to finish after the server was asked to stop, in seconds.
DRAIN_S = 10.0
# Limits of the stored answers, which are kept by request id for repeated requests. The oldest are removed first.
KEPT_BYTES = 64 << 20
KEPT_S = 86_400.0
# Maximum length of an error message, in characters.
MESSAGE_CHARS = 2000
# Interval between two checks for changed files, in seconds.
WATCH_S = 0.5
# The loader, which reads this program from descriptor 0 and runs it.
BOOT = []


# The command that this process belongs to.
TITLE = ["rlood reward serve"]


def say(text):
    print(TITLE[0] + ": " + text, file=sys.stderr, flush=True)


# Messages between the server and a worker: four bytes with the length, then JSON.


def send(channel, value):
    data = json.dumps(value).encode()
    channel.sendall(struct.pack(">I", len(data)) + data)


def receive(channel):
    """Returns the next message; None when the other side has closed the connection."""
    (length,) = struct.unpack(">I", read_exactly(channel, 4) or b"\0\0\0\0")
    data = read_exactly(channel, length) if length else None
    return None if data is None else json.loads(data)


def read_exactly(channel, length):
    data = bytearray()
    while len(data) < length:
        piece = channel.recv(min(length - len(data), 1 << 20))
        if not piece:
            return None
        data += piece
    return bytes(data)


# The worker: loads the functions and calls them.


class NotLoaded(Exception):
    """Error for a file or a function that cannot be used."""

    def __init__(self, code, message):
        super().__init__(message)
        self.code = code


def load(target, noun="function"):
    """Loads the functions, or what the noun says, of one file or module, and returns them by name."""
    import importlib
    import importlib.util

    sys.path.insert(0, target["folder"])
    try:
        if target["source"] is None:
            module = importlib.import_module(target["module"])
        else:
            path = target["file"]
            stem = os.path.splitext(os.path.basename(path))[0]
            name = stem if stem.isidentifier() and stem not in sys.modules else "rlood_rewards_" + stem
            module = importlib.util.module_from_spec(importlib.util.spec_from_file_location(name, path))
            sys.modules[name] = module
            exec(compile(base64.b64decode(target["source"]), path, "exec", dont_inherit=True), module.__dict__)
    except BaseException as error:
        raise NotLoaded("load_failed", "%s cannot be loaded: %s" % (target["shown"], told(error))) from error
    return {name: find(module, name, target["shown"], noun) for name in target["functions"]}


def find(module, name, shown, noun):
    found = module
    for part in name.split("."):
        found = getattr(found, part, None)
        if found is None:
            own = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
            own = [n for n in own if getattr(vars(module)[n], "__module__", None) == module.__name__]
            there = "its functions are: " + ", ".join(own) if own else "it defines no function"
            if noun == "class":
                own = [n for n in own if isinstance(vars(module)[n], type)]
                there = "its classes are: " + ", ".join(own) if own else "it defines no class"
            raise NotLoaded(noun + "_not_found", "%s has no %s '%s'; %s" % (shown, noun, name, there))
    if not callable(found) or noun == "class" and not isinstance(found, type):
        raise NotLoaded(noun + "_not_found", "'%s' of %s is no %s, but %s" % (name, shown, noun, type(found).__name__))
    return found


def told(error):
    """Formats an exception: its message and location, then its traceback without the frames of this file."""
    whole = traceback.TracebackException.from_exception(error)
    part = whole
    while part is not None:
        part.stack[:] = [f for f in part.stack if f.filename != __file__ and not f.filename.startswith("<frozen ")]
        part = part.__cause__ or part.__context__
    what = "".join(whole.format_exception_only()).strip().splitlines()
    where = ""
    if isinstance(error, SyntaxError) and error.filename:
        where = " (%s, line %s)" % (os.path.basename(error.filename), error.lineno)
    elif whole.stack:
        last = whole.stack[-1]
        where = " (%s, line %s, in %s)" % (os.path.basename(last.filename), last.lineno, last.name)
    text = "".join(whole.format()).rstrip()
    first = (what[-1] if what else type(error).__name__) + where
    room = max(0, MESSAGE_CHARS - len(first) - 2)
    return first[:MESSAGE_CHARS] + ("\n" + (text if len(text) <= room else "…" + text[-room + 1 :]) if room > 1 else "")


class TrainerState:
    """The fields of TRL's TrainerState that a reward service knows."""

    is_world_process_zero = True
    is_local_process_zero = True

    def __init__(self, job):
        step = job.get("step")
        step = step if isinstance(step, int) and step > 0 else 0
        self.phase = job.get("phase")
        # TRL counts completed steps; the contract contains the step that the samples belong to.
        self.global_step = step if self.phase == "eval" else max(step - 1, 0)
        self.job_id = job.get("id")

    def __getattr__(self, name):
        known = "global_step, phase, job_id, is_world_process_zero, is_local_process_zero"
        raise AttributeError("trainer_state has no '%s' here; it has %s" % (name, known))


class Wrong(Exception):
    """Error in a function's parameters or in its return value."""

    def __init__(self, code, message):
        super().__init__(message)
        self.code = code


class Call:
    """One call of a function with a list of samples."""

    def __init__(self, name, function, samples, job):
        self.name, self.function, self.samples, self.job = name, function, samples, job
        self.extra, self.metrics = {}, {}

    def log_extra(self, column, values):
        values = list(values.tolist() if hasattr(values, "tolist") else values)
        if len(values) != len(self.samples):
            raise ValueError("log_extra('%s'): %d values for %d completions" % (column, len(values), len(self.samples)))
        self.extra[str(column)] = [plain(value) for value in values]

    def log_metric(self, name, value):
        value = float(value)
        if value - value == 0:
            self.metrics[str(name)] = value

    def arguments(self):
        import inspect

        names = []
        for sample in self.samples:
            names.extend(name for name in sample.get("columns", {}) if name not in names)
        given = {name: [sample.get("columns", {}).get(name) for sample in self.samples] for name in names}
        given.update(
            prompts=[s["messages"] if s.get("messages") is not None else s.get("prompt", "") for s in self.samples],
            completions=[completion_of(sample) for sample in self.samples],
            completion_ids=[ids_of(sample) for sample in self.samples],
            trainer_state=TrainerState(self.job),
            log_extra=self.log_extra,
            log_metric=self.log_metric,
        )
        if any("turns" in sample for sample in self.samples):
            given["turns"] = [sample.get("turns") for sample in self.samples]
        try:
            parameters = inspect.signature(self.function).parameters.values()
        except (TypeError, ValueError):
            return given
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        for parameter in named:
            if parameter.default is parameter.empty and parameter.name not in given:
                columns = ", ".join(names) or "none"
                text = "function '%s' requires '%s', which is not a column of these rows; their columns: %s"
                raise Wrong("missing_column", text % (self.name, parameter.name, columns))
        if any(p.kind == p.VAR_KEYWORD for p in parameters):
            return given
        wanted = {parameter.name for parameter in named}
        return {name: value for name, value in given.items() if name in wanted}

    def results(self):
        """Returns one result per sample. Raises the function's own exception, or Wrong for an invalid return value."""
        import inspect

        returned = self.function(**self.arguments())
        if inspect.isawaitable(returned):
            returned = event_loop().run_until_complete(returned)
        values = self.listed(returned)
        return [self.result(index, value) for index, value in enumerate(values)]

    def listed(self, returned):
        expected = len(self.samples)
        if hasattr(returned, "tolist"):
            returned = returned.tolist()
        if isinstance(returned, (str, bytes, dict, set)) or not hasattr(returned, "__iter__"):
            text = "function '%s' returned %s, not a list with one number per completion (%d)"
            raise Wrong("wrong_result", text % (self.name, described(returned), expected))
        values = list(returned)
        if len(values) != expected:
            text = "function '%s' returned %d values for %d completions: return one per completion, in order"
            raise Wrong("wrong_count", text % (self.name, len(values), expected))
        return values

    def result(self, index, value):
        try:
            number = as_number(value)
        except (TypeError, ValueError, OverflowError):
            text = "function '%s' returned %s for this sample, not a finite number or None"
            return failed("invalid_value", text % (self.name, described(value)))
        metrics = dict(self.metrics)
        metrics.update((column, values[index]) for column, values in self.extra.items())
        result = {"reward": number}
        if metrics:
            result["metrics"] = metrics
        return result


def completion_of(sample):
    """Returns the completion as TRL does: a conversation if the prompt is a list of messages, else a string."""
    if sample.get("messages") is not None:
        return [{"role": "assistant", "content": sample["completion"]}]
    return sample["completion"]


def ids_of(sample):
    """Returns the token ids of the request; without ids, as many Nones as tokens, so that lengths are correct."""
    ids = sample.get("completion_ids")
    return ids if isinstance(ids, list) else [None] * max(0, int(sample.get("num_tokens") or 0))


def as_number(value):
    """Returns a finite float, or None. TRL converts None to NaN, so both mean that the sample has no reward."""
    if value is None:
        return None
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, (str, bytes, bytearray)):
        raise TypeError
    number = float(value)
    if number != number:
        return None
    if number - number != 0:
        raise ValueError
    return number


def described(value):
    text = repr(value)
    return "%s (%s)" % (text if len(text) <= 80 else text[:79] + "…", type(value).__name__)


def plain(value):
    """Converts a value to one that JSON can represent."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and value - value != 0:
        return None
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def failed(code, message, retryable=False):
    return {"reward": None, "error": {"code": code, "message": message[:MESSAGE_CHARS], "retryable": retryable}}


LOOP = []


def event_loop():
    """Returns the event loop of this process. All calls share it, so that objects bound to it (a client's connections) stay valid."""
    import asyncio

    if not LOOP:
        LOOP.append(asyncio.new_event_loop())
        asyncio.set_event_loop(LOOP[0])
    return LOOP[0]


def judge(name, function, samples, job):
    """Returns one result per sample. If a call raises, each sample is tried alone, so that only failing samples get the error."""
    try:
        return Call(name, function, samples, job).results()
    except Wrong as wrong:
        return [failed(wrong.code, str(wrong)) for _ in samples]
    except BaseException as error:
        text = told(error)
        if len(samples) == 1 or getattr(function, "whole_batch", False):
            print(text, file=sys.stderr, flush=True)
            return [failed("exception", text) for _ in samples]
    return [judge(name, function, [sample], job)[0] for sample in samples]


def modules_beside(folders):
    """Returns the files of imported modules below the folders. A change of one triggers a reload."""
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    below = tuple(os.path.join(folder, "") for folder in folders)
    return sorted({f for f in files if f and f.endswith(".py") and f.startswith(below) and "site-packages" not in f})


def work(channel, settings):
    """Runs a worker process."""
    # Output of a function goes to standard error, including what a library writes to descriptor 1.
    os.dup2(2, 1)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace", line_buffering=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.dont_write_bytecode = True
    sys.path[:] = [entry for entry in sys.path if entry]
    tasks = queue.Queue()

    def read():
        while True:
            try:
                task = receive(channel)
            except OSError:
                task = None
            if task is None:
                os._exit(0)
            tasks.put(task)

    threading.Thread(target=read, daemon=True).start()
    functions = {}
    try:
        for target in settings["targets"]:
            functions.update(load(target))
    except NotLoaded as error:
        send(channel, {"failed": {"code": error.code, "message": str(error)}})
        os._exit(1)
    folders = [target["folder"] for target in settings["targets"]]
    send(channel, {"ready": modules_beside(folders)})
    while True:
        task = tasks.get()
        name = task["function"]
        results = judge(name, functions[name], task["samples"], task["job"])
        sys.stdout.flush()
        send(channel, {"results": results, "modules": modules_beside(folders)})
