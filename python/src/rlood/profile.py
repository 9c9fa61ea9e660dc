"""Selects the server and the key of a client by the same rules as the command line."""

from __future__ import annotations

import os
import ssl
import subprocess
import urllib.parse
from pathlib import Path
from typing import Any, Dict, NamedTuple, Optional

LOCAL = "http://127.0.0.1:8080"


class Profile(NamedTuple):
    """The address of a server, and the credentials for it."""

    server: str
    key: Optional[str] = None
    ca_file: Optional[str] = None

    @classmethod
    def find(cls, server: Optional[str] = None, key: Optional[str] = None, profile: Optional[str] = None) -> Profile:
        """Uses the arguments, else RLOOD_SERVER, RLOOD_PROFILE and RLOOD_KEY, else the file of profiles, else this machine.

        A profile's key is sent only to the profile's server. An empty `key` means that no key is sent.
        """
        named = profile
        if not server and not profile:
            server, profile = os.environ.get("RLOOD_SERVER"), os.environ.get("RLOOD_PROFILE")
        given = server.rstrip("/") if server else None
        known = _profiles(needed=not given or bool(named))
        all_profiles = known.get("profiles", {})
        found: Dict[str, Any] = {}
        if named or not given:
            name = named or profile or known.get("default")
            if name and name not in all_profiles:
                raise ValueError(f"there is no profile '{name}' in {_path()}; there are: {', '.join(all_profiles) or 'none'}")
            found = all_profiles.get(name, {})
            if given and str(found.get("server", "")).rstrip("/") != given:
                raise ValueError(f"profile '{name}' is for {found.get('server')}, not for {given}: give one of the two")
        else:
            of_it = (one for one in all_profiles.values() if str(one.get("server", "")).rstrip("/") == given)
            found = next(of_it, {})
        if key is None and not named:
            key = os.environ.get("RLOOD_KEY") or None
        if key is None:
            key = _key_of(found)
        chosen = cls(given or str(found.get("server", LOCAL)).rstrip("/"), key or None, found.get("ca_file"))
        parts = urllib.parse.urlsplit(chosen.server)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"'{chosen.server}' is not the address of a server: write http://HOST:PORT or https://HOST")
        return chosen

    def is_local(self) -> bool:
        """Whether the server is on this machine, so that no proxy is used."""
        return urllib.parse.urlsplit(self.server).hostname in ("localhost", "127.0.0.1", "::1")

    def tls(self) -> ssl.SSLContext:
        """Returns a TLS context with the system's certificates and the profile's."""
        context = ssl.create_default_context()
        if self.ca_file:
            context.load_verify_locations(self.ca_file)
        return context


def _path() -> Path:
    folder = os.environ.get("XDG_CONFIG_HOME", "")
    return (Path(folder) if os.path.isabs(folder) else Path.home() / ".config") / "rlood" / "config.toml"


def _profiles(needed: bool) -> Dict[str, Any]:
    path = _path()
    if not path.is_file():
        return {}
    try:
        import tomllib
    except ImportError:
        if not needed:
            return {}
        raise ValueError(f"reading {path} requires Python 3.11 or later: pass a server to Client, or set RLOOD_SERVER") from None
    try:
        return tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from None


def _key_of(profile: Dict[str, Any]) -> Optional[str]:
    command = profile.get("key_command")
    if not command:
        return profile.get("key")
    output = subprocess.run(["sh", "-c", command], stdout=subprocess.PIPE, check=False)
    first = output.stdout.decode(errors="replace").strip().split("\n")[0].strip()
    if output.returncode or not first:
        raise ValueError(f"the profile's key_command '{command}' printed no key (exit code {output.returncode})")
    return first
