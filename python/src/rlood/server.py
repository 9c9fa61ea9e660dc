"""Locates the package's binary, and runs a temporary server for notebooks and tests."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sysconfig
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator, List, Optional, Union

from .client import Client

START_TIMEOUT_S, STOP_TIMEOUT_S = 30.0, 20.0


def find_rlood_bin() -> str:
    """Returns the path of the `rlood` binary: RLOOD_BINARY, the package's own, or the one on PATH."""
    if os.environ.get("RLOOD_BINARY"):
        return os.environ["RLOOD_BINARY"]
    package = Path(__file__).resolve().parent
    folders: List[Any] = [
        sysconfig.get_path("scripts"),
        sysconfig.get_path("scripts", scheme="posix_user"),
        package.parent / "bin",  # pip install --target
        *(parent.parent / "bin" for parent in package.parents if parent.name in ("lib", "lib64")),  # pip install --prefix
    ]
    for folder in folders:
        if folder and (Path(folder) / "rlood").is_file():
            return str(Path(folder) / "rlood")
    on_path = shutil.which("rlood")
    if on_path:
        return on_path
    looked = ", ".join(map(str, folders))
    raise FileNotFoundError(f"no rlood binary in {looked} or on PATH: install the wheel, or set RLOOD_BINARY")


@contextmanager
def serve(data_dir: Optional[Union[str, os.PathLike]] = None, *arguments: str) -> Iterator[Client]:
    """Runs a server on a free port of this machine and stops it at the end: `with rlood.serve() as client: …`.

    Without a data folder, all data is removed at the end. Further arguments are passed to `rlood serve`.
    """
    with tempfile.TemporaryDirectory(prefix="rlood-") as own:
        log_path = Path(own) / "log"
        # Variables for another server, above all its key, must not apply to this one.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RLOOD_")}
        folder = os.fspath(data_dir or Path(own) / "data")
        command = [find_rlood_bin(), "serve", "--listen", "127.0.0.1:0", "--data-dir", folder, *arguments]
        with open(log_path, "wb") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        # A notebook whose kernel is stopped leaves the block without an exception.
        atexit.register(process.terminate)
        try:
            yield Client(_address(process, log_path), key="")
        finally:
            atexit.unregister(process.terminate)
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _address(process: subprocess.Popen, log: Path) -> str:
    """Waits until the server prints its address."""
    end = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end and process.poll() is None:
        for line in log.read_text(errors="replace").split("\n")[:-1]:
            if line.startswith("listening on http"):
                return line.split(" ")[2]
        time.sleep(0.02)
    raise RuntimeError(f"the server did not start: {log.read_text(errors='replace')[-2000:].strip() or 'it printed nothing'}")
