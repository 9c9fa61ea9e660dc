"""Runs the `rlood` binary: `python -m rlood …` is equivalent to `rlood …`."""

import os
import sys

from .server import find_rlood_bin

if __name__ == "__main__":
    binary = find_rlood_bin()
    os.execv(binary, [binary, *sys.argv[1:]])
