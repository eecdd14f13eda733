"""The options of a URL of Redis. Law: only known ones are taken, and their values are checked before anything is sent.

The driver takes any name for an option, passes over what it leaves empty, and finds out at the first connection, or
never, what a value means.

Design: section 19.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qsl

from distributed_state.errors import ConfigurationError
from distributed_state.settings import absolute

SENTINELS_OWN = "sentinel_"
_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_PATHS = (*_FILES, "ssl_ca_path")
_DATABASE = re.compile(r"\d{1,9}", re.ASCII)
_NAME = re.compile(r"[!-~]{1,200}", re.ASCII)
_YES = ("1", "true", "t", "yes", "y", "on")
_NO = ("0", "false", "f", "no", "n", "off")
_REQUIRED = ("none", "optional", "required")


def _text(value: str) -> str:
    return value


def _database(value: str) -> int:
    if not _DATABASE.fullmatch(value):
        raise ValueError("it is the number of a database")
    return int(value)


def _name(value: str) -> str:
    # Of another one the server says no more than that it was refused.
    if not _NAME.fullmatch(value):
        raise ValueError("it has no spaces, and letters of ASCII alone")
    return value


def _yes_or_no(value: str) -> bool:
    if value.lower() not in _YES + _NO:
        raise ValueError("it is yes or no")
    return value.lower() in _YES


def _required(value: str) -> str:
    if value not in _REQUIRED:
        raise ValueError(f"it is one of {', '.join(_REQUIRED)}")
    return value


def _tls_version(value: str) -> ssl.TLSVersion:
    try:
        return {771: ssl.TLSVersion.TLSv1_2, 772: ssl.TLSVersion.TLSv1_3}[int(value)]
    except (KeyError, ValueError):
        raise ValueError("it is 771, which is TLS 1.2, or 772, which is TLS 1.3") from None


_LOGIN: dict[str, Callable[[str], Any]] = {"username": _text, "password": _text}
_SERVERS: dict[str, Callable[[str], Any]] = {"db": _database, "client_name": _name}
_TCP: dict[str, Callable[[str], Any]] = {"socket_keepalive": _yes_or_no}
_TLS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(_PATHS, absolute),  # they are read for each connection
    **dict.fromkeys(("ssl_ca_data", "ssl_password", "ssl_ciphers"), _text),
    "ssl_cert_reqs": _required,
    "ssl_check_hostname": _yes_or_no,
    "ssl_min_version": _tls_version,
}
_KNOWN = _LOGIN | _SERVERS | _TCP | _TLS
# Options of the driver that would have no effect, or another than they have there, and what has it here.
_OURS = dict.fromkeys(("socket_timeout", "socket_connect_timeout", "timeout"), "use the setting timeout=")
_OURS |= dict.fromkeys(("retry_on_timeout", "retry_on_error"), "use the setting retry_for=")


def read_options(query: str, scheme: str, place: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of servers and of Sentinels. Raises ConfigurationError, which names the option and not its value."""
    servers: dict[str, Any] = {}
    sentinels: dict[str, Any] = {}
    for given, value in parse_qsl(query, keep_blank_values=True):
        name = given.removeprefix(SENTINELS_OWN)
        own = name != given
        read = (_LOGIN | _TCP | _TLS if own else _KNOWN).get(name)
        shown = f"{place}: option {given[:80]!r} of the url is wrong"
        found = sentinels if own else servers
        if own and "sentinel" not in scheme:
            raise ConfigurationError(f"{place}: options of Sentinels ({given[:80]}) need redis+sentinel://")
        if read is None:
            why = _OURS.get(name, f"there are {', '.join(_KNOWN)}, and those of Sentinels, as sentinel_username")
            raise ConfigurationError(f"{place}: the url has no option {given[:80]!r}: {why}")
        if name in _TLS and not scheme.startswith("rediss"):
            raise ConfigurationError(f"{shown}: TLS is rediss://, rediss+cluster:// or rediss+sentinel://")
        if name in _TCP and scheme == "unix":
            raise ConfigurationError(f"{shown}: a Unix socket does not have it")
        if not value or name in found:
            raise ConfigurationError(f"{shown}: it {'stands there twice' if value else 'is empty'}")
        try:
            found[name] = read(value)
        except ValueError as error:
            raise ConfigurationError(f"{shown}: {error}") from None  # the value may be a secret that was mistaken
    return servers, sentinels


def require_tls(options: Mapping[str, Any], place: str, prefix: str = "") -> None:
    """Raise ConfigurationError, naming the option, if there can be no TLS with these."""
    for name in _FILES:
        try:
            if name in options:
                open(options[name], "rb").close()
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{place}: {prefix}{name}: {error}") from error
    context = ssl.create_default_context()
    certificate, key = options.get("ssl_certfile"), options.get("ssl_keyfile")
    authorities = {given: options.get(f"ssl_ca_{given[2:]}") for given in ("capath", "cadata")}
    authorities["cafile"] = options.get("ssl_ca_certs")
    name = "ssl_ca_certs"
    try:
        if any(authorities.values()):
            context.load_verify_locations(**authorities)
        name = "ssl_certfile"
        if certificate or key:
            if not certificate:
                raise ValueError("a key without its certificate")
            # Always with a password: without one, OpenSSL would ask for it at the terminal.
            context.load_cert_chain(certificate, key, options.get("ssl_password", ""))
        name = "ssl_ciphers"
        if "ssl_ciphers" in options:
            context.set_ciphers(options["ssl_ciphers"])
    except (OSError, ValueError, TypeError) as error:  # ssl.SSLError is an OSError
        raise ConfigurationError(f"{place}: {prefix}{name}: {error}") from error
