"""NO SANDBOX: this runs whatever Python the model writes. Start it in a container without network, as a user who owns nothing.

    docker run --rm --network none --read-only --tmpfs /tmp -p … python:3 …
    rlood env serve code_runner.py:CodeRunner

The tool run_python runs a program in a process of its own: Python's isolated mode, a directory of its own, no variables of this
process, and limits of CPU time, memory, processes, file sizes and output. These limits stop accidents, not attacks. A row needs the
expected output in its column `output`; the reward is 1 if a program of the episode printed it.
"""

import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile

SECONDS = 5
MEMORY_BYTES = 256 << 20
FILE_BYTES = 1 << 20
OUTPUT_BYTES = 8192
PROCESSES = 16


def limit():
    """Runs in the new process, before the program."""
    os.setsid()
    for what, most in (
        (resource.RLIMIT_CPU, SECONDS),
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_NPROC, PROCESSES),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(what)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))


def run(code):
    """Returns a program's output, and how it ended; the latter is empty for a program that ended well."""
    folder = tempfile.mkdtemp(prefix="code-")
    output = tempfile.TemporaryFile()
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", code],
            cwd=folder,
            env={"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=limit,
            close_fds=True,
        )
        try:
            code = process.wait(SECONDS)
            how = "" if code == 0 else "[it was killed: %s]" % signal.Signals(-code).name if code < 0 else "[exit code %d]" % code
        except subprocess.TimeoutExpired:
            how = "[it was stopped after %d s]" % SECONDS
        # The program's own processes are in its process group.
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
        output.seek(0)
        text = output.read(OUTPUT_BYTES + 1)
        cut = "\n[the output was cut]" if len(text) > OUTPUT_BYTES else ""
        return text[:OUTPUT_BYTES].decode(errors="replace") + cut, how
    finally:
        output.close()
        shutil.rmtree(folder, ignore_errors=True)


class CodeRunner:
    def __init__(self):
        self.tools = [self.run_python]

    def reset(self, row, seed):
        self.expected, self.right = str(row["output"]).strip(), False

    def run_python(self, code: str) -> str:
        """Runs a Python program and returns what it prints.

        Args:
            code: The program.
        """
        if "\0" in code:
            raise ValueError("a program cannot contain the character 0")
        text, how = run(code)
        self.right = self.right or (not how and text.strip() == self.expected)
        return "\n".join(part for part in (text.rstrip("\n"), how) if part) or "[no output]"

    def step(self, message, final=False):
        return None, 1.0 if self.right else 0.0, True
