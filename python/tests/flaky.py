"""A proxy in front of a server, which injects faults."""

import contextlib
import http.client
import json
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Flaky(ThreadingHTTPServer):
    """Forwards each request, except those that `plan` names: the first entry whose text is in the request line is applied and removed.

    An entry is `(text, fault, detail)`, with one of these faults:

    - "refuse": answers the status and headers of `detail` without asking the server
    - "drop": closes the connection without an answer
    - "lose": forwards the request and closes the connection without an answer
    - "cut": sends this many bytes of the answer's body, and closes the connection
    - "flip": changes the byte of the body at this position
    """

    daemon_threads = True

    def __init__(self, server, plan=()):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behind = urllib.parse.urlsplit(server).netloc
        self.plan = list(plan)
        self.seen = []
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    def handle_error(self, request, client_address):
        pass  # the tests disconnect clients on purpose

    def fault(self, line, headers):
        with self.lock:
            self.seen.append((line, dict(headers)))
            for at, (text, fault, detail) in enumerate(self.plan):
                if text in line:
                    del self.plan[at]
                    return fault, detail
        return None, None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def handle_any(self):
        self.close_connection = True
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if length else None
        fault, detail = self.server.fault(f"{self.command} {self.path}", self.headers)
        if fault == "drop":
            return
        if fault == "refuse":
            status, headers = detail
            text = json.dumps({"code": "overloaded", "detail": "the proxy refuses", "retryable": True, "request_id": "req_1"}).encode()
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(text)), "Connection": "close"}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text)
            return
        headers = {name: value for name, value in self.headers.items() if name.lower() not in ("host", "connection")}
        behind = http.client.HTTPConnection(self.server.behind, timeout=60)
        with contextlib.closing(behind):
            behind.request(self.command, self.path, body, headers)
            self.answer(behind.getresponse(), fault, detail)

    def answer(self, answer, fault, detail):
        if fault == "lose":
            answer.read()
            return
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "date", "server"):
                self.send_header(name, value)
        self.send_header("Connection", "close")
        self.end_headers()
        sent = 0
        while True:
            piece = answer.read1(1 << 16)
            if not piece:
                break
            if fault == "cut" and sent + len(piece) >= detail:
                self.wfile.write(piece[: detail - sent])
                break
            if fault == "flip" and sent <= detail < sent + len(piece):
                at = detail - sent
                piece = piece[:at] + bytes([piece[at] ^ 1]) + piece[at + 1 :]
            self.wfile.write(piece)
            self.wfile.flush()
            sent += len(piece)

    do_GET = do_POST = do_DELETE = do_PATCH = handle_any
