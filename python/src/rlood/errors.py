"""The error that the client's methods raise when the server rejects a request or cannot be reached."""

from __future__ import annotations

import json
import ssl
import urllib.error
from typing import Iterable, Optional

from . import types

LONGEST_RETRY_AFTER_S = 60.0
# Status codes after which a retry may succeed, unless the server says otherwise. 0: the server could not be reached.
PASSING = (0, 408, 425, 429, 500, 502, 503, 504)


class Error(Exception):
    """The server rejected a request, or could not be reached (`status` is 0).

    `code` is a stable word for programs, `detail` describes the problem and what to do. `errors` lists every invalid field of
    a request, each with its `pointer`. `request_id` identifies the request in the server's log.
    """

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        errors: Iterable[types.ProblemItem] = (),
        request_id: Optional[str] = None,
    ):
        self.status, self.code, self.detail, self.request_id = status, code, detail, request_id
        self.errors = list(errors)
        self.retryable, self.retry_after_s = True, 0.0
        lines = [f"{status} {code}: {detail}"] + [f"  {item['pointer']}: {item['detail']}" for item in self.errors]
        super().__init__("\n".join(lines) + (f" ({request_id})" if request_id else ""))

    @classmethod
    def of(cls, answer: urllib.error.HTTPError) -> Error:
        """Creates the error from an HTTP response. Text that is not a problem document, such as a proxy's page, is quoted."""
        try:
            text = answer.read(1 << 20).decode(errors="replace")
        except Exception:  # the body was interrupted, but the status is known
            text = ""
        try:
            body = json.loads(text)
            error = cls(answer.code, body["code"], body["detail"], body.get("errors", ()), body.get("request_id"))
            error.retryable = bool(body.get("retryable"))
        except (ValueError, LookupError, TypeError, AttributeError):
            error = cls(answer.code, "http", f"{answer.reason}: {text[:300]}".strip(": "))
        wait = answer.headers.get("Retry-After", "")
        error.retry_after_s = float(wait) if wait.isdigit() else 0.0
        return error

    @classmethod
    def unreachable(cls, what: str, cause: Exception) -> Error:
        """Creates the error for a failed connection."""
        reason = getattr(cause, "reason", cause)
        if isinstance(reason, ConnectionRefusedError):
            reason = f"{reason}: start a server with `rlood serve`, or use another address"
        error = cls(0, "unreachable", f"{what}: {reason}")
        # Waiting does not make a certificate valid, so this is not retried.
        error.retryable = not isinstance(reason, ssl.SSLCertVerificationError)
        return error

    def may_pass(self) -> bool:
        """Whether a retry of the same request may succeed."""
        passing = self.status in PASSING or self.code in ("body_interrupted", "idempotency_in_flight")
        return passing and self.retryable and self.retry_after_s <= LONGEST_RETRY_AFTER_S
