"""Data formats of the API: queries, event streams, forms, and downloads of archives, which are complete or fail."""

from __future__ import annotations

import hashlib
import http.client
import itertools
import json
import math
import os
import random
import tarfile
import tempfile
import time
import urllib.parse
import uuid
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, Tuple, Union

from .errors import Error

FilePath = Union[str, "os.PathLike[str]"]
CUT = (OSError, http.client.HTTPException)  # exceptions of a connection that fails or is interrupted
MOST_TRIES, DAMAGED_TRIES, PIECE_BYTES = 9, 3, 1 << 18
ENDS = ("job.succeeded", "job.failed", "job.cancelled")  # events with which a job finishes


def pause_s(failed: int) -> float:
    """Returns the wait after this many consecutive failures: about 15 s in total, with jitter so that clients do not retry together."""
    return min(5.0, 0.1 * 2**failed) * random.uniform(0.5, 1.0)


def media_type(path: Path) -> str:
    """Returns the media type of a job file."""
    kinds = {".yaml": "application/yaml", ".yml": "application/yaml", ".toml": "application/toml"}
    return kinds.get(path.suffix.lower(), "application/json")


def query_string(query: Dict[str, Any]) -> str:
    """Builds `?name=value…`. Lists are joined by commas, None is omitted."""

    def text(value: Any) -> str:
        if isinstance(value, (list, tuple)):
            return ",".join(map(text, value))
        return str(value).lower() if isinstance(value, bool) else str(value)

    given = {name: text(value) for name, value in query.items() if value is not None}
    return "?" + urllib.parse.urlencode(given) if given else ""


def events(stream: Iterable[bytes]) -> Iterator[Tuple[str, Any]]:
    """Yields names and data of server-sent events. An event that an interrupted connection left incomplete is skipped."""
    name, data = "", []
    for line in stream:
        field, _, value = line.decode().rstrip("\r\n").partition(":")
        value = value[1:] if value.startswith(" ") else value
        if field == "event":
            name = value
        elif field == "data":
            data.append(value)
        elif line in (b"\n", b"\r\n"):
            if data:
                yield name, json.loads("\n".join(data))
            name, data = "", []


def events_of_job(stream: Iterable[bytes], after: int, job: Callable[[], Any]) -> Iterator[Tuple[str, Any]]:
    """Yields the events after `after` until the job is finished. The stream goes on until the job's verdict is complete, too."""

    def last_seq() -> float:
        now = job()
        return now["last_seq"] if f"job.{now['state']}" in ENDS else math.inf

    last = last_seq()
    if after < last:
        for name, data in events(stream):
            yield name, data
            if name in ENDS:
                last = last_seq()
            if data.get("seq", data.get("to_seq", after)) >= last:
                break
        else:
            return  # the connection was closed
    yield "end", None


def form(fields: Dict[str, str], file_name: str, size_bytes: int, pieces: Callable[[], Iterable[bytes]]):
    """Returns a multipart form with one file: a function for its bytes, and its headers. The file is read while it is sent."""
    boundary = uuid.uuid4().hex
    begin = f"--{boundary}\r\nContent-Disposition: form-data; name="
    quoted = file_name.replace("\r", "").replace("\n", "").replace('"', "%22")
    texts = "".join(f'{begin}"{name}"\r\n\r\n{value}\r\n' for name, value in fields.items())
    head = f'{texts}{begin}"file"; filename="{quoted}"\r\n\r\n'.encode()
    tail = f"\r\n--{boundary}--\r\n".encode()
    length = str(len(head) + size_bytes + len(tail))
    headers = {"Content-Type": f"multipart/form-data; boundary={boundary}", "Content-Length": length}
    return lambda: itertools.chain([head], pieces(), [tail]), headers


def pieces_of(path: Path) -> Iterator[bytes]:
    """Yields the bytes of a file in chunks."""
    with open(path, "rb") as file:
        yield from iter(lambda: file.read(PIECE_BYTES), b"")


def download_folder(open_range: Callable[[Dict[str, str]], Any], to: FilePath) -> Path:
    """Downloads a tar archive and unpacks it as the folder `to`, which must be new or empty.

    `open_range` opens the archive with these headers. The downloaded part is stored beside `to` as `.NAME.HASH.part`, and an
    interrupted transfer resumes from it, in this call or a later one. The entity tag is the hash of the files' names and hashes.
    """
    to = Path(os.path.abspath(to))
    if to.exists() and not (to.is_dir() and not any(to.iterdir())):
        raise FileExistsError(f"{to} exists: remove it or choose another folder")
    to.parent.mkdir(parents=True, exist_ok=True)
    damaged = 0
    while True:
        part, tag = _download(open_range, to)
        try:
            _unpack(part, to, tag)
            return to
        except (ValueError, tarfile.TarError) as damage:
            damaged += 1
            if damaged >= DAMAGED_TRIES:
                raise Error(0, "damaged", f"the archive for {to} was corrupted {damaged} times: {damage}") from damage
        finally:
            part.unlink()


def _download(open_range: Callable[[Dict[str, str]], Any], to: Path) -> Tuple[Path, str]:
    """Returns the complete archive as a file, and its entity tag."""
    failed, furthest = 0, 0
    while True:
        # Requesting one byte gets the size and the version. A rejected HEAD request would not contain the reason.
        with open_range({"Range": "bytes=0-0"}) as first:
            tag, length = first.headers["ETag"], first.headers["Content-Range"] or first.headers["Content-Length"]
        size = int(length.rsplit("/")[-1])
        part = to.with_name(f".{to.name}.{hashlib.sha256(tag.encode()).hexdigest()[:16]}.part")
        have = part.stat().st_size if part.exists() else 0
        if have == size:
            return part, tag
        cause: Any = "the server sent another version"
        try:
            headers = {"Range": f"bytes={have}-", "If-Range": tag} if 0 < have < size else {}
            with open_range(headers) as answer:
                if answer.headers["ETag"] == tag:
                    with open(part, "ab" if answer.status == 206 else "wb") as file:
                        for piece in iter(lambda: answer.read(PIECE_BYTES), b""):
                            file.write(piece)
                    cause = "the connection was closed early"
        except CUT as error:
            cause = error
        have = part.stat().st_size if part.exists() else 0
        if have == size:
            return part, tag
        failed = 0 if have > furthest else failed + 1
        furthest = max(have, furthest)
        if failed >= MOST_TRIES:
            raise Error(0, "interrupted", f"the archive for {to} broke off at byte {have} of {size}: {cause}")
        time.sleep(pause_s(failed))


def _unpack(archive: Path, to: Path, tag: str) -> None:
    """Unpacks beside `to` and renames the folder. Raises ValueError if the files do not match the entity tag."""
    identity = hashlib.sha256()
    with tempfile.TemporaryDirectory(dir=to.parent, prefix=f".{to.name}.") as own, tarfile.open(archive, "r:") as tar:
        folder = Path(own) / "files"
        folder.mkdir()
        for member in tar:
            source = tar.extractfile(member) if member.isfile() else None
            if source is None or member.name in ("", ".", "..") or "/" in member.name or "\\" in member.name:
                raise ValueError(f"'{member.name}' is not a plain file")
            digest = hashlib.sha256()
            with source, open(folder / member.name, "wb") as file:
                while piece := source.read(PIECE_BYTES):
                    digest.update(piece)
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            identity.update(f"{member.name}\0{digest.hexdigest()}\n".encode())
        if f'"tar-{identity.hexdigest()}"' not in tag:
            raise ValueError(f"its files have the hash {identity.hexdigest()}, not {tag}")
        os.rename(folder, to)
