#!/usr/bin/env python3
"""Builds the wheel from the package in src/ and a binary built by cargo. Needs no network and no other package.

    python/build_wheel.py BINARY [FOLDER]         writes FOLDER/rlood-VERSION-py3-none-PLATFORM.whl (default: target/wheels)

This file is also the build backend of pyproject.toml (PEP 517): `RLOOD_BINARY=target/release/rlood pip wheel ./python`. Without the
variable it uses target/docker-out/rlood or target/release/rlood. The same binary and sources give the same bytes.
"""

import base64
import hashlib
import os
import re
import stat
import struct
import sys
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
# The earliest time that a zip archive can store. The file's own time would make each build different.
TIME = (1980, 1, 1, 0, 0, 0)
MACHINES = {62: "x86_64", 183: "aarch64"}
# The oldest version of glibc that has a manylinux tag.
OLDEST_GLIBC = (2, 17)


def version():
    text = (ROOT / "Cargo.toml").read_text()
    found = re.search(r'^\[workspace\.package\]\n(?:[^\[].*\n)*?version = "([^"]+)"', text, re.MULTILINE)
    if not found or not re.fullmatch(r"\d+\.\d+\.\d+", found[1]):
        raise SystemExit("the version in Cargo.toml's [workspace.package] must have the form 1.2.3, the only one that Python and Rust write alike")
    return found[1]


def setting(name):
    """Returns a string setting of pyproject.toml, which Python 3.9 cannot parse."""
    return re.search(rf'^{name} = "([^"]+)"$', (HERE / "pyproject.toml").read_text(), re.MULTILINE)[1]


def platform(binary):
    """Returns the platform tag: the machine of the binary, and the newest glibc version that its symbols require."""
    if binary[:4] != b"\x7fELF" or binary[4] != 2:
        raise SystemExit("the binary is not a 64-bit ELF file: wheels are built for Linux only")
    machine = struct.unpack_from("<H", binary, 18)[0]
    if machine not in MACHINES:
        raise SystemExit(f"the binary is for an unsupported machine (ELF number {machine})")
    # The symbol versions are stored as plain text in the binary. No other text in the binary has this form.
    needed = [tuple(map(int, found)) for found in re.findall(rb"\0GLIBC_(\d+)\.(\d+)", binary)]
    # Packed relocations, which build.rs asks for, have a mark without a number: glibc reads them since 2.36.
    if b"\0GLIBC_ABI_DT_RELR\0" in binary:
        needed.append((2, 36))
    major, minor = max([OLDEST_GLIBC, *needed])
    return f"manylinux_{major}_{minor}_{MACHINES[machine]}"


def contents(binary, tag):
    """Yields every file of the wheel except RECORD: name, content, and whether it is executable."""
    name, here = f"rlood-{version()}", f"rlood-{version()}.dist-info"
    for path in sorted((HERE / "src").rglob("*")):
        if path.is_file() and path.suffix != ".pyc":
            yield path.relative_to(HERE / "src").as_posix(), path.read_bytes(), False
    # pip installs the files in `scripts` on the PATH of the environment.
    yield f"{name}.data/scripts/rlood", binary, True
    for path in sorted(ROOT.glob("LICENSE-*")):
        yield f"{here}/licenses/{path.name}", path.read_bytes(), False
    yield f"{here}/METADATA", metadata().encode(), False
    yield f"{here}/WHEEL", f"Wheel-Version: 1.0\nGenerator: rlood\nRoot-Is-Purelib: false\nTag: {tag}\n".encode(), False


def metadata():
    licenses = "".join(f"License-File: {path.name}\n" for path in sorted(ROOT.glob("LICENSE-*")))
    return (
        f"Metadata-Version: 2.4\nName: rlood\nVersion: {version()}\nSummary: {setting('description')}\n"
        f"License-Expression: {setting('license')}\n{licenses}Requires-Python: {setting('requires-python')}\n"
        f"Description-Content-Type: text/markdown\n\n{(HERE / 'README.md').read_text()}"
    )


def write_wheel(binary_path, folder):
    """Writes the wheel and returns its name."""
    binary = Path(binary_path).read_bytes()
    tag = f"py3-none-{platform(binary)}"
    name = f"rlood-{version()}-{tag}.whl"
    Path(folder).mkdir(parents=True, exist_ok=True)
    unfinished = Path(folder) / f".{name}.part"
    record = []
    with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as wheel:
        for path, data, executable in contents(binary, tag):
            add(wheel, path, data, executable)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
            record.append(f"{path},sha256={digest},{len(data)}\n")
        path = f"rlood-{version()}.dist-info/RECORD"
        add(wheel, path, "".join([*record, f"{path},,\n"]).encode(), False)
    os.replace(unfinished, Path(folder) / name)
    return name


def add(wheel, path, data, executable):
    entry = zipfile.ZipInfo(path, TIME)
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.create_system = 3  # Unix, so that pip applies the file mode on every system
    entry.external_attr = (stat.S_IFREG | (0o755 if executable else 0o644)) << 16
    wheel.writestr(entry, data, compresslevel=9)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    """PEP 517."""
    choices = [os.environ.get("RLOOD_BINARY"), ROOT / "target/docker-out/rlood", ROOT / "target/release/rlood"]
    binary = next((path for path in choices if path and Path(path).is_file()), None)
    if binary is None:
        raise SystemExit("no binary found: run cargo build --release, or set RLOOD_BINARY")
    return write_wheel(binary, wheel_directory)


def build_sdist(sdist_directory, config_settings=None):
    """PEP 517."""
    raise SystemExit("the package is available only as a wheel: cargo builds the binary from the repository")


def main():
    if not 2 <= len(sys.argv) <= 3:
        raise SystemExit(__doc__.strip())
    folder = Path(sys.argv[2] if len(sys.argv) > 2 else ROOT / "target/wheels")
    if not Path(sys.argv[1]).is_file():
        raise SystemExit(f"binary {sys.argv[1]} not found: cargo build --release creates target/release/rlood")
    print(folder / write_wheel(sys.argv[1], folder))


if __name__ == "__main__":
    main()
