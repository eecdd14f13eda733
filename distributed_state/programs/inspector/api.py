"""Asks the service's interface, in the same process. Law: as whoever looks, so that no page has a right of its own.

Every request of a page passes the checks, limits and quotas that one over HTTP passes, because it is one.

Design: section 28.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from distributed_state.errors import InvalidValue
from distributed_state.programs.service import requests
from distributed_state.programs.service.connections import CONNECTION
from distributed_state.values import path_names

COOKIE = "distributed_state_inspector"
HELD = "distributed_state_inspector_lease"
"""The cookie of a lease that this browser took over: its token, the lease, and the digest of its record's path."""
_UNDER_LEASE = ("/rollback", "/everything")  # what pages do to a record that takes a lease
# Of who looks, and of what a proxy says of them. The rest is about the page.
_PASSED = frozenset(
    [b"host", b"authorization", b"x-actor", b"x-tenant", b"x-rights", b"x-forwarded-for", b"last-event-id"]
)
_LARGEST = 2 * 2**20  # bytes of an answer
_AS_VALUES = 4  # times as large it counts, as it is read into values and put on a page
_SCOPE = ("type", "asgi", "http_version", "scheme", "client", "server", "extensions")


class Refused(Exception):
    """The interface answered with an error; `detail` may be shown."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Found:
    """An answer: its JSON, and the query of the next page, None if there is none."""

    json: Any
    following: dict[str, str] | None


def query_of(request: Request) -> dict[str, str]:
    """The query of a page, the last of several values. Raises Refused for one that cannot be read."""
    try:
        return dict(requests.pairs(request))
    except InvalidValue as error:
        raise Refused(422, str(error)) from error


class Api:
    """The interface of one service."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def get(self, request: Request, path: str, query: Mapping[str, Any] | None = None) -> Found:
        """What is read at this path, `/v1/...` with its parts quoted. Raises Refused."""
        return await self.ask(request, "GET", path, query)

    async def ask(
        self, request: Request, method: str, path: str, query: Mapping[str, Any] | None = None,
        given: Mapping[str, Any] | None = None,
    ) -> Found:  # fmt: skip
        """The answer to this request, made by whoever sent `request`. Raises Refused."""
        content = None if given is None else json.dumps(given).encode()
        sent: list[Message] = []

        async def receive() -> Message:
            return {"type": "http.request", "body": content or b"", "more_body": False}

        async def send(message: Message) -> None:
            sent.append(message)

        await self._app(self._scope(request, method, path, query, content), receive, send)
        status = sent[0]["status"]
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in sent[0]["headers"]}
        body = b"".join(each.get("body", b"") for each in sent[1:])
        _bound(request, len(body))
        found = json.loads(body or b"null")
        if status >= 400:
            detail = found.get("detail") if isinstance(found, dict) else None
            raise Refused(status, str(detail or "the service did not say why"))
        return Found(found, _next(headers.get("link")))

    def stream(self, request: Request, path: str, query: Sequence[tuple[str, str]]) -> ASGIApp:
        """The answer to a GET that goes on, passed on as it comes."""

        async def passed(scope: Scope, receive: Receive, send: Send) -> None:
            await self._app(self._scope(request, "GET", path, dict(query), None), receive, send)

        return passed

    def _scope(
        self, request: Request, method: str, path: str, query: Mapping[str, Any] | None, body: bytes | None
    ) -> Scope:
        headers = [(name, value) for name, value in request.scope["headers"] if name in _PASSED]
        token = request.cookies.get(COOKIE)
        if token and not any(name == b"authorization" for name, _ in headers):
            headers.append((b"authorization", f"Bearer {token}".encode("latin-1", "replace")))
        lease = _lease(request, path) if method != "GET" else ""
        if lease:
            headers.append((b"lease", lease.encode("latin-1", "replace")))
        if body is not None:
            headers += [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        asked = urlencode(
            [(name, value) for name, value in (query or {}).items() if value not in (None, "")],
            doseq=True,
            errors="surrogatepass",
        )
        kept = {name: request.scope[name] for name in _SCOPE if name in request.scope}
        return kept | {
            "method": method, "path": unquote(path), "raw_path": path.encode(), "root_path": "",
            "query_string": asked.encode(), "headers": headers, "state": dict(request.scope.get("state", {})),
        }  # fmt: skip


def _bound(request: Request, size: int) -> None:
    """Raise Refused for an answer that is more than a page shows; others count as held by their connection."""
    if size > _LARGEST:
        raise Refused(413, f"it is {size / 2**20:.1f} MiB, more than a page shows: read it over the interface")
    if (connection := getattr(request.state, CONNECTION, None)) is not None:
        connection.hold(size * _AS_VALUES)


def _lease(request: Request, path: str) -> str:
    """The lease under which this is done, "" for none."""
    _, _, held = unquote(request.cookies.get(HELD, "")).partition(" ")
    lease, _, record = held.partition(" ")
    under = any(path.endswith(each) and digest(path.removesuffix(each)) == record for each in _UNDER_LEASE)
    return lease if under else ""


def named(form: str, *names: str) -> str:
    """A path of the interface: `form` as "/v1/users/{}", with a {} for each name, which may hold anything."""
    return form.format(*map(path_names.quoted, names))


def digest(path: str) -> str:
    """A short name for a path: a cookie has no room for a long one."""
    return hashlib.sha256(path.encode()).hexdigest()


def _next(link: str | None) -> dict[str, str] | None:
    """The query of the next page, of the header `Link`."""
    if link is None:
        return None
    query = urlsplit(link.partition("<")[2].partition(">")[0]).query
    return dict(parse_qsl(query, errors="surrogatepass"))
