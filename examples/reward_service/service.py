#!/usr/bin/env python3
"""A reward service for rlood's reward contract v1. Python's standard library only.

    REWARD_SECRET=whsec_… python3 service.py [--port 8090] [--async]

It marks sums: 1 if the completion is the row's column `answer`, 0.5 if the answer stands in it, else 0. Put your own marks into
`mark`. With --async it answers 202 and sends the rewards later, in two parts, to the callback address of the request, where
the request offers one. Without REWARD_SECRET it believes everybody: for a look on your own machine only.
"""

import argparse
import base64
import hashlib
import hmac
import json
import os
import sys
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MAX_SAMPLES = 64
MAX_BYTES = 4 << 20
# How far a request's timestamp may lie from this clock, s.
TOLERANCE_S = 300


class Refused(Exception):
    """What the caller did wrong: an HTTP status and a reason."""

    def __init__(self, status, reason):
        super().__init__(reason)
        self.status = status


def verify(secrets, headers, body):
    """Standard Webhooks: one of our secrets must have signed these very bytes, just now."""
    if not secrets:
        return
    name, stamp = headers.get("webhook-id", ""), headers.get("webhook-timestamp", "")
    if not stamp.isdigit() or abs(time.time() - int(stamp)) > TOLERANCE_S:
        raise Refused(401, "webhook-timestamp is missing or more than five minutes away from this clock")
    # Several signatures, separated by spaces, while a secret is rotated: one that fits is enough.
    given = [s[3:] for s in headers.get("webhook-signature", "").split(" ") if s.startswith("v1,")]
    for secret in secrets:
        key = base64.b64decode(secret.removeprefix("whsec_"))
        digest = hmac.new(key, f"{name}.{stamp}.".encode() + body, hashlib.sha256).digest()
        expected = base64.b64encode(digest).decode()
        if any(hmac.compare_digest(expected.encode(), signature.encode()) for signature in given):
            return
    raise Refused(401, "no signature in webhook-signature fits")


def mark(sample):
    """The result of one sample. What cannot be marked gets an error, never a 0."""
    answer = sample.get("columns", {}).get("answer")
    if not isinstance(answer, (str, int, float)) or isinstance(answer, bool):
        error = {"code": "no_answer", "message": "the row has no column 'answer'", "retryable": False}
        return {"sample_id": sample["sample_id"], "reward": None, "error": error}
    answer, completion = str(answer).strip(), sample["completion"].strip()
    reward = 1.0 if completion == answer else 0.5 if answer in completion else 0.0
    return {"sample_id": sample["sample_id"], "reward": reward, "metrics": {"length": len(completion)}}


def read_request(body):
    """The request, looked over: what is none is refused before anything is computed."""
    try:
        request = json.loads(body)
    except ValueError as error:
        raise Refused(400, f"the body is not JSON: {error}") from error
    if not isinstance(request, dict) or request.get("type") not in ("reward.ping", "reward.score.request"):
        raise Refused(422, "known types: reward.ping, reward.score.request")
    if request["type"] == "reward.ping":
        return request
    if request.get("version") != "1":
        raise Refused(422, "version 1 of the contract is spoken here")
    samples = request.get("samples")
    good = isinstance(samples, list) and all(
        isinstance(sample, dict)
        and isinstance(sample.get("sample_id"), str)
        and isinstance(sample.get("completion"), str)
        and isinstance(sample.get("columns", {}), dict)
        for sample in samples
    )
    if not good:
        raise Refused(422, "'samples' must be a list of objects with sample_id and completion")
    if len(samples) > MAX_SAMPLES:
        # The request is split in halves and comes again.
        raise Refused(413, f"at most {MAX_SAMPLES} samples in one request")
    return request


def call_back(reply, request_id, results):
    """The results in two parts. The address and the token are this request's own, and worth nothing after its deadline."""
    half = len(results) // 2
    parts = [(results[:half], False), (results[half:], True)] if half else [(results, True)]
    for part, done in parts:
        body = json.dumps({"version": "1", "id": request_id, "results": part, "done": done}).encode()
        headers = {"content-type": "application/json", "authorization": f"Bearer {reply['token']}"}
        for attempt in range(6):
            try:
                post = urllib.request.Request(reply["callback_url"], data=body, headers=headers, method="POST")
                urllib.request.urlopen(post, timeout=10).close()
                break
            except urllib.error.HTTPError as error:
                # 401, 404, 410 (late, or the job is over), 422: the same again would be refused again.
                if error.code not in (408, 425, 429) and error.code < 500:
                    print(f"the callback was refused: {error.code}", file=sys.stderr)
                    return
            except OSError as error:
                print(f"the callback did not get through: {error}", file=sys.stderr)
            time.sleep(min(0.5 * 2**attempt, 10))


class Handler(BaseHTTPRequestHandler):
    """POST on any path."""

    protocol_version = "HTTP/1.1"
    # Head and body leave together: in two pieces the second would wait for the first one's acknowledgement.
    wbufsize = -1
    secrets = []
    asynchronous = False

    def do_POST(self):
        try:
            length = int(self.headers.get("content-length") or 0)
            if length > MAX_BYTES:
                self.close_connection = True
                raise Refused(413, f"at most {MAX_BYTES} bytes in one request")
            body = self.rfile.read(length)
            verify(self.secrets, self.headers, body)
            self.answer(read_request(body))
        except Refused as refused:
            self.say(refused.status, {"error": {"code": "refused", "message": str(refused)}})

    def answer(self, request):
        if request["type"] == "reward.ping":
            modes = ["sync", "async"] if self.asynchronous else ["sync"]
            return self.say(200, {"max_batch_samples": MAX_SAMPLES, "modes": modes, "range": [0, 1]})
        # The same samples always get the same marks. Where they would not (a sampled judge), keep the answer by
        # request["id"]: a request whose answer was lost comes again with the same id.
        results = [mark(sample) for sample in request["samples"]]
        reply = request.get("reply", {})
        if self.asynchronous and "async" in reply.get("modes", []) and reply.get("callback_url"):
            self.say(202, {"id": request["id"], "eta_ms": 100})
            threading.Thread(target=call_back, args=(reply, request["id"], results), daemon=True).start()
        else:
            self.say(200, {"version": "1", "id": request["id"], "results": results})

    def say(self, status, value):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    """Threads, and room for a job's eight connections at once."""

    daemon_threads = True
    request_queue_size = 64


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8090, help="0 = a free one")
    parser.add_argument("--async", dest="asynchronous", action="store_true", help="answer 202 and call back")
    args = parser.parse_args()
    # Two secrets, separated by a space, while one is rotated.
    Handler.secrets = os.environ.get("REWARD_SECRET", "").split()
    Handler.asynchronous = args.asynchronous
    server = Server((args.host, args.port), Handler)
    print(f"listening on http://{args.host}:{server.server_address[1]}", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
