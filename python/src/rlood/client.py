"""A client for rlood's HTTP API. It uses only the standard library, and takes and returns dicts (see types.py)."""

from __future__ import annotations

import io
import itertools
import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, Optional, Union, cast

from . import types
from .connection import headers_of, opener
from .errors import Error
from .profile import Profile
from .transfer import CUT, MOST_TRIES, FilePath, download_folder, events_of_job, form, media_type, pause_s, pieces_of, query_string

TIMEOUT_S, WORK_TIMEOUT_S, LONGEST_WAIT_S = 60.0, 180.0, 30.0
Rows = Iterable[Dict[str, Any]]
Seconds = Optional[float]
Maybe = Optional[str]


class Client:
    """A client for the given server, else RLOOD_SERVER, a profile of `rlood login`, or http://127.0.0.1:8080."""

    def __init__(self, server: Maybe = None, key: Maybe = None, profile: Maybe = None, hub_token: Maybe = None):
        found = Profile.find(server, key, profile)
        self.server, self._headers, self._opener = found.server, headers_of(found, hub_token), opener(found)

    def _open(self, method: str, path: str, body=None, headers=None, timeout=TIMEOUT_S, **query: Any):
        """Sends a request with retries. `body` creates the bytes (or chunks) for each attempt."""
        url = self.server + urllib.parse.quote(path) + query_string(query)
        headers = {**self._headers, **(headers or {})}
        for failed in itertools.count(1):
            try:
                request = urllib.request.Request(url, body and body(), headers, method=method)
                return self._opener.open(request, timeout=timeout)
            except urllib.error.HTTPError as answer:
                with answer:
                    error = Error.of(answer)
                if method == "DELETE" and error.status == 404 and failed > 1:
                    return io.BytesIO()  # an earlier attempt has deleted it
            except CUT as cause:
                error = Error.unreachable(f"{method} {self.server}{path}", cause)
            if failed >= MOST_TRIES or not error.may_pass():
                raise error
            time.sleep(max(pause_s(failed), error.retry_after_s))

    def _call(self, method: str, path: str, body=None, headers=None, timeout=TIMEOUT_S, **query: Any) -> Any:
        if method == "POST":  # with this key, the server executes a repeated request only once
            headers = {"Idempotency-Key": uuid.uuid4().hex, **(headers or {})}
        for failed in itertools.count(1):
            try:
                with self._open(method, path, body, headers, timeout, **query) as answer:
                    text = answer.read()
                return json.loads(text) if text.strip() else None
            except CUT as cause:
                if failed >= MOST_TRIES:
                    raise Error(0, "interrupted", f"{method} {path}: the response was interrupted: {cause}") from cause
                time.sleep(pause_s(failed))

    def request(self, method: str, path: str, content: Any = None, timeout: float = TIMEOUT_S, **query: Any) -> Any:
        """Calls any operation of the API: `request("POST", f"/jobs/{job}/cancel")`. Returns the response's JSON, or None."""
        if content is None:
            return self._call(method, path, timeout=timeout, **query)
        text = json.dumps(content).encode()
        return self._call(method, path, lambda: text, {"Content-Type": "application/json"}, timeout, **query)

    def pages(self, path: str, **query: Any) -> Iterator[Any]:
        """Yields all items of a list, page by page: `pages(f"/verdicts/{verdict}/rows", outcome="lost")`."""
        while True:
            page = self.request("GET", path, **query)
            yield from page["data"]
            if not page.get("next"):
                return
            query["after"] = page["next"]

    def _until_over(self, timeout: Seconds, what: str, ask: Any) -> Any:
        """Polls until the state is neither queued nor running."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            left = LONGEST_WAIT_S if end is None else max(0.0, end - time.monotonic())
            answer = ask(min(int(left), LONGEST_WAIT_S))
            if answer["state"] not in ("queued", "running"):
                return answer
            if end is not None and time.monotonic() >= end:
                raise TimeoutError(f"{what} is still {answer['state']} after {timeout:g} s")
            time.sleep(min(0.2, left))

    def submit(self, job: Union[types.JobSpec, Dict[str, Any], FilePath], wait: bool = False) -> types.Job:
        """Submits a job: a dict, or a JSON, YAML or TOML file. With `wait`, returns the job when it is finished or paused."""
        if isinstance(job, (str, os.PathLike)):
            text = Path(job).read_bytes()
            queued = self._call("POST", "/jobs", lambda: text, {"Content-Type": media_type(Path(job))})
        else:
            queued = self.request("POST", "/jobs", job)
        return self.wait(queued["id"]) if wait else queued

    def job(self, id: str) -> types.Job:
        """Returns the current state of a job."""
        return self.request("GET", f"/jobs/{id}")

    def jobs(self, limit: Optional[int] = None, **filters: Any) -> List[types.Job]:
        """Yields jobs, newest first, optionally filtered, for example by `state="running"` or `model="org/name"`."""
        return list(itertools.islice(self.pages("/jobs", **filters), limit))

    def wait(self, id: str, timeout: Seconds = None) -> types.Job:
        """Returns a job when it is finished or paused. Raises TimeoutError after `timeout` seconds."""
        ask = lambda wait_s: self.request("GET", f"/jobs/{id}", wait=int(wait_s))  # noqa: E731
        return self._until_over(timeout, f"job {id}", ask)

    def watch(self, id: str, after: int = 0) -> Iterator[types.Event]:
        """Yields the events of a job after this `seq` as they happen, each once and in order, until the job (not its verdict) is finished.

        If the server has removed old events, an event of type `removed` replaces all events up to its `seq`."""
        failed = 0
        while True:
            headers, cause = {"Accept": "text/event-stream", "Last-Event-ID": str(after)}, "the stream ended"
            try:
                with self._open("GET", f"/jobs/{id}/events", headers=headers) as stream:
                    for name, data in events_of_job(stream, after, lambda: self.job(id)):
                        if name == "end":
                            return
                        event = data if "seq" in data else {"seq": data["to_seq"], "type": name, "data": data}
                        failed, after = 0, event["seq"]
                        yield cast(types.Event, event)
            except CUT as error:
                cause = str(error)
            failed += 1
            if failed >= MOST_TRIES:
                raise Error(0, "interrupted", f"GET /jobs/{id}/events: {cause}")
            time.sleep(pause_s(failed))

    def metrics(self, id: str, keys: Optional[List[str]] = None, **query: Any) -> List[types.MetricsRow]:
        """Returns the metrics, one dict per step: `pandas.DataFrame(client.metrics(job))`."""
        return list(self.pages(f"/jobs/{id}/metrics", keys=keys, **query))

    def samples(self, id: str, limit: Optional[int] = 100, **filters: Any) -> List[types.Sample]:
        """Returns completions with rewards: `step=40`, `phase="eval"`, `sort="worst"`, `q="text"`…; `limit=None` returns all."""
        size = min(limit or 100, 100)
        return list(itertools.islice(self.pages(f"/jobs/{id}/samples", **{**filters, "limit": size}), limit))

    def generate(self, id: str, prompt: Union[str, List[Dict[str, Any]]], **options: Any) -> types.GenerationResult:
        """Generates with the base model and a checkpoint: `checkpoint="best"`, `sampling={"temperature": 0}`…"""
        return self.request("POST", f"/jobs/{id}/generate", {"prompt": prompt, **options}, timeout=WORK_TIMEOUT_S)

    def verdict(self, id: str, wait=True, new=False, timeout: Seconds = None, **request: Any) -> types.Verdict:
        """Returns whether training improved the model: the newest verdict, or a new one (`new`, or `checkpoint="last"`…)."""
        try:
            found = None if new or request else self.request("GET", f"/jobs/{id}/verdict")
        except Error as error:
            if error.code != "no_verdict":
                raise
            found = None
        found = found or self.request("POST", f"/jobs/{id}/verdict", request)
        ask = lambda _: self.request("GET", f"/verdicts/{found['id']}")  # noqa: E731
        return self._until_over(timeout, f"verdict {found['id']}", ask) if wait else found

    def pull(self, id: str, to: FilePath, which: Optional[str] = None) -> Path:
        """Downloads a job's adapter (`which`: "best", "last"; default: its result), a checkpoint or an export to a folder."""
        kinds = {"ckpt": f"/checkpoints/{id}/archive.tar", "exp": f"/exports/{id}/archive.tar"}
        path = kinds.get(id.split("_")[0], f"/jobs/{id}/adapter")
        read = lambda headers: self._open("GET", path, None, {"Accept": "*/*", **headers}, which=which)  # noqa: E731
        return download_folder(read, to)

    def export(self, checkpoint: str, to: FilePath, timeout: Seconds = None, **request: Any) -> types.Export:
        """Merges a checkpoint, or a job's best one, into its base model: a folder for transformers. `dtype="float32"`…"""
        path = f"/checkpoints/{self._checkpoint(checkpoint)}/exports"
        made = self.request("POST", path, {"format": "merged", **request})
        ask = lambda _: self.request("GET", f"/exports/{made['id']}")  # noqa: E731
        export = self._until_over(timeout, f"export {made['id']}", ask)
        if export["state"] != "succeeded":
            raise Error(0, "export_" + export["state"], str((export.get("error") or {}).get("message", export["id"])))
        self.pull(export["id"], to)
        return export

    def push(self, checkpoint: str, repo: str, timeout: Seconds = None, **request: Any) -> types.Push:
        """Uploads a checkpoint, or a job's best one, to the hub as `repo`, with `hub_token`. `format="merged"`, `private=True`…"""
        path = f"/checkpoints/{self._checkpoint(checkpoint)}/pushes"
        made = self.request("POST", path, {"repo": repo, **request})
        ask = lambda _: self.request("GET", f"/pushes/{made['id']}")  # noqa: E731
        push = self._until_over(timeout, f"push {made['id']}", ask)
        if push["state"] != "succeeded":
            raise Error(0, "push_" + push["state"], str((push.get("error") or {}).get("message", push["id"])))
        return push

    def _checkpoint(self, id: str) -> str:
        if not id.startswith("job_"):
            return id
        marked = self.request("GET", f"/jobs/{id}/summary")["checkpoints"]
        return (marked["best"] or marked["last"] or {"id": id})["id"]

    def upload_dataset(self, source: Union[FilePath, Rows], name: Optional[str] = None, **recipe: Any) -> types.Dataset:
        """Uploads rows or a file (JSON Lines, JSON, CSV, TSV, Parquet). `map`, `limit` and `seed` transform the rows."""
        if isinstance(source, (str, os.PathLike)):
            path = Path(source)
            file_name, size, pieces = path.name, path.stat().st_size, lambda: pieces_of(path)
        else:
            rows = "".join(json.dumps(row) + "\n" for row in source).encode()
            file_name, size, pieces = "rows.ndjson", len(rows), lambda: iter([rows])
        fields = {**({"name": name} if name else {}), **({"mapping": json.dumps(recipe)} if recipe else {})}
        return self._call("POST", "/datasets", *form(fields, file_name, size, pieces))

    def add_dataset(self, hub: str, name: Optional[str] = None, **settings: Any) -> types.Dataset:
        """Imports a dataset of the Hub (`config`, `split`, `revision`, `map`…). A long download continues: `state` is `downloading`."""
        given = {"hub": hub, "name": name, **settings}
        return self.request("POST", "/datasets", {key: value for key, value in given.items() if value is not None})

    def add_model(self, id: Optional[str] = None, source: Optional[FilePath] = None, **more: Any) -> types.Model:
        """Registers a model: a folder on the server (`id` and `source`), or one of the Hub (`hub="org/name"`, `revision`)."""
        given = {"id": id, "source": source and os.fspath(source), **more}
        return self.request("POST", "/models", {name: value for name, value in given.items() if value is not None})
