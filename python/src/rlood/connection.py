"""How requests leave: over connections whose answer is read even when the server did not want all of a body."""

from __future__ import annotations

import http.client
import urllib.request
from typing import Any

from .profile import Profile


class _HearsRefusals:
    """A server that refuses a large upload answers and closes the connection. That answer says more than the broken pipe."""

    def send(self, data: Any) -> None:
        try:
            super().send(data)  # type: ignore[misc]
        except (BrokenPipeError, ConnectionResetError):
            pass  # where there is no answer, reading it fails


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
        return None  # the key is for one server alone


def opener(profile: Profile) -> urllib.request.OpenerDirector:
    """Opens requests to a server: through the environment's proxies, unless the server is on this machine."""
    direct = [urllib.request.ProxyHandler({})] if profile.is_local() else []
    return urllib.request.build_opener(_Handler, _SecureHandler(profile.tls()), _NoRedirect, *direct)
