"""What keeps strangers out where nobody has to say who they are. Law: such a service is reached from its machine only.

A browser on the same machine is one way in: a page of a stranger has its own name resolved to 127.0.0.1, and its
scripts may then read what we answer (DNS rebinding). The name that it was called by stays in `Host`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Awaitable, Callable, Iterable

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from distributed_state.errors import ConfigurationError

LOCAL = frozenset({"localhost", "127.0.0.1", "[::1]"})
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:\d{1,5})?", re.ASCII)


class Hosts:
    """The names that a service may be called by, without their port; none: by any."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = frozenset(name.lower() for name in names)
        for name in self._names:
            if (shaped := _HOST.fullmatch(name)) is None or shaped[2]:
                raise ConfigurationError(f"allow_host: {name!r:.80} is no name of a host without its port")

    def allow(self, given: list[str]) -> bool:
        """Whether a request with these `Host` headers may be answered."""
        if not self._names:
            return True
        shaped = _HOST.fullmatch(given[0].lower()) if len(given) == 1 else None
        return shaped is not None and shaped[1] in self._names


def require_loopback(address: str) -> None:
    """Raise ConfigurationError if others than this machine reach a service that listens on this address."""
    if not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        raise ConfigurationError(
            f"listening on {address} without authentication would give everything to whoever reaches it: "
            "name --tokens, --jwt-issuer or --trust-proxy, or listen on 127.0.0.1; --insecure listens all the same"
        )


class KnownHosts:
    """An ASGI application that has 421 answered by `refuse` to requests by another name, and the others by `app`."""

    def __init__(self, app: ASGIApp, hosts: Hosts, refuse: Callable[[Request, Exception], Awaitable[Response]]) -> None:
        self._app = app
        self._hosts = hosts
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or let `app` answer."""
        app = self._app
        if scope["type"] == "http":
            given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
            if not self._hosts.allow(given):
                app = await self._refuse(Request(scope), HTTPException(421, "it is not called by this name"))
        await app(scope, receive, send)
