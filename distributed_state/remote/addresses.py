"""Where a service is, and the token that it is shown. Law: a token is in no text of ours, and leaves over TLS alone.

But for this machine and private networks, which http:// is for.

Design: section 26.
"""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from distributed_state.errors import ConfigurationError
from distributed_state.port.http import HttpPlace

_SCHEMES = ("http://", "https://")
_TOKEN = re.compile(r"[\x21-\x7e]{1,8192}")
URL, TOKEN, TOKEN_FILE = (f"DISTRIBUTED_STATE_{name}" for name in ("URL", "TOKEN", "TOKEN_FILE"))


@dataclass(frozen=True, slots=True)
class Address:
    """A service: its URL, and what is sent along with each request."""

    url: str
    token: str | None = field(default=None, repr=False)

    def place(self) -> HttpPlace:
        """The same, as a transport takes it."""
        headers = {"Accept": "application/json", "User-Agent": "distributed-state"}
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token}"
        return HttpPlace(self.url, headers)


def service(url: str | None) -> str | None:
    """The URL of a service, given or from the environment; None if the store is no remote one."""
    found = os.environ.get(URL) if url is None else url
    return found if isinstance(found, str) and found.lower().startswith(_SCHEMES) else None


def address(url: str, token: str | None = None) -> Address:
    """The address of a service. Raises ConfigurationError for one that cannot be, or must not be shown a token."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port
    except ValueError as error:
        raise ConfigurationError("url: cannot be read; it is as https://state.example.com") from error
    if not host:
        raise ConfigurationError("url: names no host; it is as https://state.example.com")
    if "@" in parts.netloc:
        raise ConfigurationError("url: holds a user or password; give the token as token=")
    if parts.query or parts.fragment:
        raise ConfigurationError("url: ends before ? and #; it is as https://state.example.com")
    found = _token(token)
    if found is not None and parts.scheme.lower() == "http" and _public(host):
        raise ConfigurationError(f"url: a token is sent to {host} over https:// alone")
    return Address(url.rstrip("/"), found)


def _public(host: str) -> bool:
    """Whether this is surely no host of this machine or of a private network; what a name stands for is not known."""
    try:
        return ipaddress.ip_address(host).is_global
    except ValueError:
        return False


def _token(given: str | None) -> str | None:
    found = given
    if found is None and TOKEN in os.environ:
        found = os.environ[TOKEN].strip()
    elif found is None and TOKEN_FILE in os.environ:
        name = os.environ[TOKEN_FILE]
        try:
            found = Path(name).read_text().strip()
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{TOKEN_FILE}: {name!r:.200} cannot be read: {type(error).__name__}") from error
    if found is not None and (not isinstance(found, str) or _TOKEN.fullmatch(found) is None):
        raise ConfigurationError("token: is one word of printable ASCII characters")
    return found
