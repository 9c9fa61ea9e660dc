#!/usr/bin/env python3
"""Runs tests of one of our test programs on a GPU, where a fault of one is a fault of all that follow in its process.

  gpu_suite.py PROGRAM FILTER --out FILE --alone-log FILE [--seconds N] [--total-seconds N] [--fixtures FOLDER]

The tests run one at a time in one process. Where that dies, or a test does not end, the tests that it had not reached run in
another. Then every test that failed, died or did not end runs in a process of its own, told to wait after each piece of work
and to use no graphs, so that an error is told where it happened; those that pass so run alone once more as they are: what
then fails is graphs or order of work, what passes was felled by another test. Tests of many cases run a process a case.

What is known is in the file (JSON), written anew after each step. The output of the tests is standard output's; the last
line is a summary. Exit code 0: all passed.
"""

import argparse
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time

# A test that takes longer hangs; one of few may take all the time there is.
TEST_SECONDS = 60
FEW = 3
# Processes for tests that an earlier one had not reached.
MOST_ROUNDS = 12
# Tests of many cases: the folder of the cases, the variable that names one.
CASES = {
    "parity::every_case_agrees_with_transformers_and_peft": ("parity", "RLOOD_PARITY_ONLY"),
    "golden::golden": ("golden", "RLOOD_GOLDEN_ONLY"),
}
CAREFUL = {"RLOOD_CUDA_SYNC": "1", "RLOOD_CUDA_GRAPHS": "0", "RUST_BACKTRACE": "1"}
STARTED = re.compile(r"^test (\S+)(?: - should panic)? \.\.\. (.*)$")
ENDED = re.compile(r"(?:^|[^A-Za-z])(ok|FAILED|ignored(?:, .*)?)$")


def main():
    given = arguments()
    # Stopped by the clock of whoever called: the test's process goes too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    suite = Suite(given)
    suite.together()
    suite.alone()
    print(f"\n{suite.summary()}", flush=True)
    sys.exit(0 if suite.passed_all() else 1)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("filter")
    parser.add_argument("--out", required=True)
    parser.add_argument("--alone-log", required=True, help="the output of tests that ran alone")
    parser.add_argument("--seconds", type=float, default=120, help="for all tests together")
    parser.add_argument("--total-seconds", type=float, default=240, help="for those that run alone as well")
    parser.add_argument("--fixtures", default="tests/fixtures", help="where the cases are")
    return parser.parse_args()


class Suite:
    def __init__(self, given):
        self.given = given
        self.begun = time.monotonic()
        # Test → ok, FAILED, ignored, crashed, hung, stopped, unclear (its line was torn apart); in the order they began.
        self.results = {}
        self.again = []
        self.crashes = []
        listed = subprocess.run(
            [given.program, "--list", "--format", "terse", given.filter],
            capture_output=True, text=True, errors="replace", timeout=60, check=False,
        )  # fmt: skip
        self.names = [line[: -len(": test")] for line in listed.stdout.splitlines() if line.endswith(": test")]
        if not self.names:
            print(f"no tests: exit code {listed.returncode}: {listed.stderr.strip()[-300:]}")
            sys.exit(2)

    def together(self):
        deadline = self.begun + min(self.given.seconds, self.given.total_seconds)
        patience = TEST_SECONDS if len(self.names) > FEW else self.given.seconds
        for round_ in range(MOST_ROUNDS):
            left = [name for name in self.names if name not in self.results]
            if not left:
                return
            chosen = [self.given.filter] if round_ == 0 else ["--exact", *left]
            one = Process([self.given.program, "--test-threads=1", *chosen], {}, sys.stdout.buffer)
            ended = one.watch(deadline, patience, self.results)
            if one.current:
                self.results[one.current] = ended
            self.write()
            if ended == "stopped" or (ended == "done" and not one.current):
                return
            self.crashes.append(f"{one.how()} in {one.current or 'no test'}" if ended == "crashed" else f"hung in {one.current}")
            if not one.current:
                # It would end so again.
                return

    def alone(self):
        deadline = self.begun + self.given.total_seconds
        bad = [name for name, result in self.results.items() if result not in ("ok", "ignored")]
        work = []
        for name in bad:
            folder, variable = CASES.get(name, (None, None))
            path = os.path.join(self.given.fixtures, folder) if folder else None
            cases = sorted(os.listdir(path)) if path and os.path.isdir(path) else [None]
            cases = [case for case in cases if case is None or os.path.isdir(os.path.join(path, case))]
            work += [(name, case, {variable: case} if case else {}) for case in cases]
        if not work:
            return
        with open(self.given.alone_log, "wb") as log:
            for name, case, variables in work:
                entry = {"test": name, "case": case, "together": self.results[name], "careful": None, "as_is": None}
                self.again.append(entry)
                entry.update(self.one(name, {**CAREFUL, **variables}, "careful", deadline, log))
                self.write()
            for entry, (name, _, variables) in zip(self.again, work):
                if entry["careful"] == "ok":
                    entry.update(self.one(name, {"RUST_BACKTRACE": "1", **variables}, "as_is", deadline, log))
                    self.write()

    def one(self, name, variables, way, deadline, log):
        """A test in a process of its own."""
        begun = time.monotonic()
        if deadline - begun < 2:
            return {way: "not run"}
        log.write(f"\n==== {name} {variables}\n".encode())
        results = {}
        one = Process([self.given.program, "--test-threads=1", "--exact", name, "--nocapture"], variables, log)
        ended = one.watch(min(deadline, begun + TEST_SECONDS), TEST_SECONDS, results)
        # With its output between, the line of a test does not end in its result; the exit code does not lie.
        if ended in ("done", "crashed"):
            code = one.process.returncode
            result = "ok" if code == 0 else "FAILED" if code == 101 else f"crashed ({one.how()})"
        else:
            result = "hung"
        said = None if result == "ok" else one.said()
        return {way: result, f"{way}_s": round(time.monotonic() - begun, 1), **({f"{way}_said": said} if said else {})}

    def count(self, *results):
        return sum(result in results for result in self.results.values())

    def passed_all(self):
        return self.count("ok", "ignored") == len(self.names)

    def write(self):
        bad = {name: result for name, result in self.results.items() if result not in ("ok", "ignored")}
        record = {
            "tests": {
                "passed": self.count("ok"),
                "failed": self.count("FAILED"),
                "ignored": self.count("ignored"),
                "unfinished": self.count("crashed", "hung", "stopped", "unclear"),
                "not_reached": len(self.names) - len(self.results),
            },
            "seconds": round(time.monotonic() - self.begun, 1),
            "crashes": self.crashes,
            "failed_tests": bad,
            "alone": self.again,
        }
        with open(self.given.out + ".new", "w") as file:
            json.dump(record, file, indent=1)
        os.replace(self.given.out + ".new", self.given.out)

    def summary(self):
        self.write()
        bad = [f"{name} ({result})" for name, result in self.results.items() if result not in ("ok", "ignored")]
        parts = [f"{self.count('ok')} of {len(self.names)} passed"]
        if bad:
            parts.append(f"not: {' '.join(bad[:6])}" + (f" and {len(bad) - 6} more" if len(bad) > 6 else ""))
        if len(self.results) < len(self.names):
            parts.append(f"{len(self.names) - len(self.results)} not reached")
        culprits = {}
        for entry in self.again:
            if entry["careful"] not in ("ok", "not run") or entry["as_is"] not in ("ok", "not run", None):
                way = "" if entry["careful"] != "ok" else " (as it is)"
                culprits.setdefault(entry["test"] + way, []).append(entry["case"])
        culprits = [test + (f"[{' '.join(cases)}]" if all(cases) else "") for test, cases in culprits.items()]
        untried = sum(entry["careful"] == "not run" for entry in self.again)
        if untried < len(self.again):
            parts.append("alone too: " + (" ".join(culprits[:6]) or "none") + (" …" if len(culprits) > 6 else ""))
        if untried:
            parts.append(f"no time left to run {untried} alone")
        return "; ".join(parts)


class Process:
    """A test program's process: its output, passed on, and the test that it is in."""

    def __init__(self, command, variables, out):
        self.out, self.current, self.begun, self.finished = out, None, None, False
        self.rest, self.tail = b"", b""
        self.process = subprocess.Popen(
            command, env={**os.environ, **variables}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def watch(self, deadline, patience, results):
        """Until it ends, its time is up ("stopped") or a test takes too long ("hung"); "crashed": without a sum."""
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self.process.stdout, selectors.EVENT_READ)
                while True:
                    now = time.monotonic()
                    if now >= deadline:
                        return "stopped"
                    if self.current and now - self.begun >= patience:
                        return "hung"
                    if selector.select(min(0.5, deadline - now)):
                        read = os.read(self.process.stdout.fileno(), 1 << 16)
                        if not read:
                            break
                        self.take(read, results)
            # A process that closed its output may still have to end.
            self.process.wait(max(1.0, deadline - time.monotonic()))
            return "done" if self.finished else "crashed"
        except subprocess.TimeoutExpired:
            return "stopped"
        finally:
            self.end()

    def end(self):
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        self.process.stdout.close()

    def take(self, read, results):
        self.out.write(read)
        self.out.flush()
        self.tail = (self.tail + read)[-20_000:]
        *lines, self.rest = (self.rest + read).split(b"\n")
        for line in lines:
            self.line(line.decode(errors="replace"), results)
        # The line of a test that has begun has no end yet.
        begun = STARTED.match(self.rest[-1000:].decode(errors="replace"))
        if begun:
            self.enter(begun[1], results)

    def enter(self, test, results):
        if test == self.current:
            return
        if self.current:
            results[self.current] = "unclear"
        self.current, self.begun = test, time.monotonic()

    def line(self, line, results):
        begun = STARTED.match(line)
        if begun:
            self.enter(begun[1], results)
        # What a test's own processes print may stand between a test and its result.
        ended = ENDED.search(begun[2] if begun else line)
        if self.current and ended:
            results[self.current] = ended[1].split(",")[0]
            self.current = None
        self.finished = self.finished or line.startswith("test result:")

    def how(self):
        code = self.process.returncode
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def said(self):
        """Why a test failed, in its own words."""
        lines = [line.strip() for line in self.tail.decode(errors="replace").splitlines() if line.strip()]
        for at, line in enumerate(lines):
            if "panicked at" in line:
                return " ".join(lines[at : at + 4])[:500]
        return " ".join(lines[-3:])[-500:]


if __name__ == "__main__":
    main()
