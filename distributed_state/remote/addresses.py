"""Where a service is, and the token that it is shown. Law: a token is in no text of ours, and leaves over TLS alone.

But for this machine and private networks, which http:// is for.

Design: section 26.
"""

from __future__ import annotations

import ipaddress
import os
import re
from pathlib import Path
from urllib.parse import urlsplit

from distributed_state.errors import ConfigurationError
from distributed_state.port.http import HttpPlace
from distributed_state.settings import require_host

_TOKEN = re.compile(r"[\x21-\x7e]{1,8192}")
URL, TOKEN, TOKEN_FILE = (f"DISTRIBUTED_STATE_{name}" for name in ("URL", "TOKEN", "TOKEN_FILE"))


def address(url: str | None, token: str | None = None) -> HttpPlace:
    """Where a service is, as given or in the environment, and what each request carries.

    Raises ConfigurationError for a URL that cannot be, or that must not be shown a token.
    """
    url = os.environ.get(URL, "") if url is None else url
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port
    except (ValueError, AttributeError) as error:
        raise ConfigurationError("url: cannot be read; it is as https://state.example.com") from error
    if parts.scheme not in ("http", "https"):
        raise ConfigurationError("url: a remote store has an http:// or https:// one")
    if not host:
        raise ConfigurationError("url: names no host; it is as https://state.example.com")
    require_host(host, "url")
    if "@" in parts.netloc:
        raise ConfigurationError("url: holds a user or password; give the token as token=")
    if parts.query or parts.fragment:
        raise ConfigurationError("url: ends before ? and #; it is as https://state.example.com")
    found = _token(token)
    if found is not None and parts.scheme == "http" and _public(host):
        raise ConfigurationError(f"url: a token is sent to {host} over https:// alone")
    headers = {"Accept": "application/json", "User-Agent": "distributed-state"}
    if found is not None:
        headers["Authorization"] = f"Bearer {found}"
    return HttpPlace(url.rstrip("/"), headers)


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
