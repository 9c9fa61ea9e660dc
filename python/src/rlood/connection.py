"""HTTP connections that read the response even if the server rejects a body before it was sent completely."""

from __future__ import annotations

import http.client
import os
import urllib.request
from typing import Any, Dict, Optional

from .profile import Profile


class _HearsRefusals:
    """Ignores a broken pipe while sending: a server that rejects a large upload answers first, and the answer has the reason."""

    def send(self, data: Any) -> None:
        try:
            super().send(data)  # type: ignore[misc]
        except (BrokenPipeError, ConnectionResetError):
            pass  # if there is no response, reading it fails


class _Connection(_HearsRefusals, http.client.HTTPConnection):
    pass


class _SecureConnection(_HearsRefusals, http.client.HTTPSConnection):
    pass


class _Handler(urllib.request.HTTPHandler):
    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Connection, request)  # type: ignore[arg-type]


class _SecureHandler(urllib.request.HTTPSHandler):
    def __init__(self, context: Any):
        super().__init__(context=context)
        self.context = context

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_SecureConnection, request, context=self.context)  # type: ignore[arg-type]


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None  # the key must be sent to one server only


def opener(profile: Profile) -> urllib.request.OpenerDirector:
    """Returns an opener for requests to a server. It uses the environment's proxies unless the server is on this machine."""
    direct = [urllib.request.ProxyHandler({})] if profile.is_local() else []
    return urllib.request.build_opener(_Handler, _SecureHandler(profile.tls()), _NoRedirect, *direct)


def headers_of(profile: Profile, hub_token: Optional[str]) -> Dict[str, str]:
    """Returns the headers of every request. The Hugging Face token, or RLOOD_HUB_TOKEN, is for gated and private repositories."""
    headers = {"Accept": "application/json", "User-Agent": "rlood-python"}
    if profile.key:
        headers["Authorization"] = f"Bearer {profile.key}"
    token = (hub_token if hub_token is not None else os.environ.get("RLOOD_HUB_TOKEN", "")).strip()
    return {**headers, "x-hub-token": token} if token else headers
