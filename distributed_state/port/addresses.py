"""Reads the address of Redis from a URL. Law: a URL that cannot work is refused here, before anything is sent.

    redis://host:6379/0  rediss://host:6379  unix:///run/redis.sock
    redis+cluster://host:6379,host:6379      rediss+cluster://...
    redis+sentinel://host:26379,host:26379/service/0      rediss+sentinel://...

User and password are read as redis-py reads them. Options have redis-py's names; those that begin with `sentinel_`
apply only to the Sentinels.

Design: section 19.
"""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from redis.connection import parse_url

from distributed_state.errors import ConfigurationError
from distributed_state.settings import UNREADABLE, absolute, refuse_unescaped, require_host

SENTINELS_OWN = "sentinel_"
_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_PATHS = (*_FILES, "ssl_ca_path")
_DATABASE_OPTION = re.compile(r"\d{1,9}", re.ASCII)
_NAME = re.compile(r"[!-~]{1,200}", re.ASCII)
_YES = ("1", "true", "t", "yes", "y", "on")
_NO = ("0", "false", "f", "no", "n", "off")
_REQUIRED = ("none", "optional", "required")


def _text(value: str) -> str:
    return value


def _database(value: str) -> int:
    if not _DATABASE_OPTION.fullmatch(value):
        raise ValueError("it must be the number of a database")
    return int(value)


def _name(value: str) -> str:
    # For an invalid name the server reports only a refusal.
    if not _NAME.fullmatch(value):
        raise ValueError("it must be ASCII text without spaces")
    return value


def _yes_or_no(value: str) -> bool:
    if value.lower() not in _YES + _NO:
        raise ValueError("it must be yes or no")
    return value.lower() in _YES


def _required(value: str) -> str:
    if value not in _REQUIRED:
        raise ValueError(f"it must be one of {', '.join(_REQUIRED)}")
    return value


def _tls_version(value: str) -> ssl.TLSVersion:
    try:
        return {771: ssl.TLSVersion.TLSv1_2, 772: ssl.TLSVersion.TLSv1_3}[int(value)]
    except (KeyError, ValueError):
        raise ValueError("it must be 771, which is TLS 1.2, or 772, which is TLS 1.3") from None


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
# Options of the driver that would have no effect here, or a different one, and the setting to use instead.
_OURS = dict.fromkeys(("socket_timeout", "socket_connect_timeout", "timeout"), "use the setting timeout=")
_OURS |= dict.fromkeys(("retry_on_timeout", "retry_on_error"), "use the setting retry_for=")


def read_options(query: str, scheme: str, place: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of servers and of Sentinels.

    Raises ConfigurationError, which names the option, not its value.
    """
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
            raise ConfigurationError(f"{shown}: for TLS use rediss://, rediss+cluster:// or rediss+sentinel://")
        if name in _TCP and scheme == "unix":
            raise ConfigurationError(f"{shown}: a Unix socket does not support it")
        if not value or name in found:
            raise ConfigurationError(f"{shown}: it {'occurs twice' if value else 'is empty'}")
        try:
            found[name] = read(value)
        except ValueError as error:
            raise ConfigurationError(f"{shown}: {error}") from None  # the value may be a secret that was mistaken
    return servers, sentinels


def require_tls(options: Mapping[str, Any], place: str, prefix: str = "") -> None:
    """Raise ConfigurationError, naming the option, if TLS cannot work with these options."""
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


PLAIN = ("redis://", "rediss://", "unix://")
SENTINEL = ("redis+sentinel://", "rediss+sentinel://")
CLUSTER = ("redis+cluster://", "rediss+cluster://")
SCHEMES = PLAIN + SENTINEL + CLUSTER
_NETLOC = re.compile(r"[^/?#]*")
_DATABASE = re.compile(r"/?|/\d+/?", re.ASCII)
_SERVICE = re.compile(r"/(?P<service>[A-Za-z0-9._-]{1,200})(?:/(?P<database>\d+)?)?", re.ASCII)


def node_name(host: str, port: int | str) -> str:
    """Return the name used for a server: "host:port", as in MOVED; IPv6 addresses without brackets."""
    return f"{host}:{port}"


def host_and_port(node: str) -> tuple[str, int]:
    """Parse a name that `node_name` returned."""
    host, _, port = node.rpartition(":")
    return host, int(port)


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed URL of Redis. `options` are those of a driver's connection, without host and port."""

    kind: str
    """"plain", "sentinel" or "cluster". A plain address may turn out to be a server of a cluster."""
    place: str
    """The address for display, without user, password and options."""
    seeds: tuple[str, ...]
    """The first servers or Sentinels to contact, by name; for a Unix socket its path."""
    tls: bool
    options: dict[str, Any] = field(repr=False)
    sentinel_options: dict[str, Any] = field(repr=False)
    service: str = ""

    @property
    def unix(self) -> bool:
        """Whether the seed is the path of a Unix socket."""
        return "path" in self.options


def read_address(url: str) -> Address:
    """Parse a URL. Raises ConfigurationError, which repeats neither the password nor a part of it."""
    if not url.startswith(SCHEMES):
        raise ConfigurationError(
            "url must name Redis or Valkey: use redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://; "
            "name a SQL database with archive="
        )
    refuse_unescaped(url, "url")
    kind = "sentinel" if url.startswith(SENTINEL) else "cluster" if url.startswith(CLUSTER) else "plain"
    scheme, _, rest = url.partition("://")
    plain = scheme.partition("+")[0]
    # The server names are parsed separately, because a URL has only one host; the driver parses the rest as a plain
    # URL.
    login, at, hosts = _NETLOC.match(rest)[0].rpartition("@")  # type: ignore[index]  # it matches nothing too
    behind = rest[len(login + at + hosts) :]
    seeds = _seeds(hosts, 26379 if kind == "sentinel" else 6379, kind) if plain != "unix" else ()
    try:
        parts = urlsplit(f"{plain}://{login}{at}{hosts if plain == 'unix' else 'host'}{behind}")
        if "@" in parts.path + parts.fragment:
            raise ValueError
    except ValueError:
        # The error omits the cause, whose text quotes a part of the password if that contains a slash.
        raise ConfigurationError(f"url: {UNREADABLE}") from None
    service, database = _path(kind, parts.path) if plain != "unix" else ("", "")
    shown = ",".join(_shown(seed) for seed in seeds) if plain != "unix" else parts.path
    place = f"{scheme}://{shown}" + (f"/{service}" if service else "")
    mine, theirs = read_options(parts.query, scheme, place)
    if parts.fragment:
        raise ConfigurationError(f"{place}: a url must not contain #; in a password it is written %23")
    # Not `geturl`, which drops the slashes of a URL without a host, such as a Unix socket's.
    path = parts.path if plain == "unix" else database
    mine = _login(f"{plain}://{parts.netloc}{path}", place) | mine
    if kind == "cluster" and mine.get("db"):
        raise ConfigurationError(f"{place}: a cluster has only database 0, not {mine['db']}")
    # Sentinels use the servers' certificates unless they have their own; a login is never sent to another server.
    shared = {name: value for name, value in mine.items() if name.startswith("ssl_")}
    if plain == "rediss":
        require_tls(mine, place)
        if kind == "sentinel":
            require_tls(shared | theirs, place, SENTINELS_OWN)
    return Address(kind, place, seeds or (mine["path"],), plain == "rediss", mine, shared | theirs, service)


def _seeds(hosts: str, port: int, kind: str) -> tuple[str, ...]:
    seeds = []
    for each in hosts.split(","):
        try:
            parts = urlsplit(f"redis://{each}")
            if parts.port == 0 or (kind != "plain" and not parts.hostname):
                raise ValueError
        except ValueError:
            raise ConfigurationError(f"url: {UNREADABLE}") from None
        require_host(parts.hostname or "localhost", "url")
        seeds.append(node_name(parts.hostname or "localhost", parts.port or port))
    if kind == "plain" and len(seeds) > 1:
        raise ConfigurationError("url: several servers need redis+cluster:// or redis+sentinel://")
    return tuple(seeds)


def _shown(node: str) -> str:
    host, port = host_and_port(node)
    return f"[{host}]:{port}" if ":" in host else node


def _path(kind: str, path: str) -> tuple[str, str]:
    """Return the name of the Sentinels' service, and the path that names the database."""
    if kind == "sentinel":
        found = _SERVICE.fullmatch(path)
        if found is None:
            raise ConfigurationError(
                "url: after the Sentinels stands the name of the service that they watch, and then the number of the "
                "database, as in redis+sentinel://host:26379,host:26379/mymaster/0"
            )
        return found["service"], f"/{found['database'] or 0}"
    if not _DATABASE.fullmatch(path):
        # The driver would silently use database 0.
        raise ConfigurationError("url: only the number of the database may follow the host, as in redis://host:6379/0")
    return "", path


def _login(url: str, place: str) -> dict[str, Any]:
    """Return user, password, database and Unix socket path of a plain URL. Raises ConfigurationError."""
    try:
        options: dict[str, Any] = parse_url(url)  # type: ignore[no-untyped-call]  # the driver's, without types
    except (TypeError, ValueError):
        raise ConfigurationError(f"{place}: {UNREADABLE}") from None
    for name in ("connection_class", "host", "port"):
        options.pop(name, None)
    if url.startswith("unix") and not options.get("path"):
        raise ConfigurationError("url: the path of a Unix socket is missing, as in unix:///run/redis.sock")
    try:
        os.fsencode(options.get("path", ""))
    except UnicodeEncodeError:
        raise ConfigurationError(
            "url: the path of the Unix socket contains a character that paths cannot have"
        ) from None
    return options
