"""The making of pages: their requests to the service, their templates, and the sign-in.

Law: a page calls the service's interface with the visitor's token, so that pages have no rights of their own; users'
content is shown as text, and pages load and run only our own files.

The interface is called in the same process. Every request of a page passes the same checks, limits and quotas as one
over HTTP. The browser's token is in a cookie that scripts cannot read and other sites cannot make it send, and a form
is accepted only from one of our pages. Source: OWASP, "Cross-Site Request Forgery Prevention Cheat Sheet" (Fetch
Metadata).

Design: section 28.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hmac import compare_digest
from typing import Any
from urllib.parse import parse_qs, parse_qsl, unquote, urlencode, urlsplit

import jinja2
from markupsafe import Markup, escape
from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from distributed_state.errors import InvalidValue
from distributed_state.programs.inspector.values import markdown
from distributed_state.programs.service import requests
from distributed_state.programs.service.answers import page_headers
from distributed_state.programs.service.connections import CONNECTION
from distributed_state.values import as_text

COOKIE = "distributed_state_inspector"
HELD = "distributed_state_inspector_lease"
"""The cookie of a lease that this browser took over: its token, the lease, and the digest of its record's path."""
_UNDER_LEASE = ("/rollback", "/everything")  # the actions of pages that take a lease
# Headers about the visitor, from the browser or a proxy. The others are about the page.
_PASSED = frozenset(
    [b"host", b"authorization", b"x-actor", b"x-tenant", b"x-rights", b"x-forwarded-for", b"last-event-id"]
)
_LARGEST = 2 * 2**20  # bytes of an answer
_AS_VALUES = 4  # it counts as this many times as large, because it is parsed and rendered
_SCOPE = ("type", "asgi", "http_version", "scheme", "client", "server", "extensions")


class Refused(Exception):
    """The interface answered with an error; `detail` may be shown."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Found:
    """An answer: its JSON, and the query of the next page, None on the last page."""

    json: Any
    following: dict[str, str] | None


def query_of(request: Request) -> dict[str, str]:
    """The query of a page; the last of several values wins. Raises Refused if it cannot be read."""
    try:
        return dict(requests.pairs(request))
    except InvalidValue as error:
        raise Refused(422, str(error)) from error


class Api:
    """The interface of one service."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def get(self, request: Request, path: str, query: Mapping[str, Any] | None = None) -> Found:
        """Read this path, `/v1/...` with its parts quoted. Raises Refused."""
        return await self.ask(request, "GET", path, query)

    async def part(self, request: Request, path: str, query: Mapping[str, Any] | None = None) -> tuple[Any, str]:
        """The JSON of a part that does not hide other parts, or None and the reason why it is missing.

        Raises Refused if the visitor may not see it.
        """
        try:
            return (await self.get(request, path, query)).json, ""
        except Refused as refused:
            if refused.status in (401, 403):
                raise
            return None, refused.detail

    async def ask(
        self, request: Request, method: str, path: str, query: Mapping[str, Any] | None = None,
        given: Mapping[str, Any] | None = None,
    ) -> Found:  # fmt: skip
        """Send a request with the identity of `request`'s sender, and return the answer. Raises Refused."""
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
        """The streaming answer to a GET, passed on as it arrives."""

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
    """Raise Refused for an answer too large for a page; count others as memory held by the connection."""
    if size > _LARGEST:
        raise Refused(413, f"it is {size / 2**20:.1f} MiB, more than a page shows: read it over the interface")
    if (connection := getattr(request.state, CONNECTION, None)) is not None:
        connection.hold(size * _AS_VALUES)


def _lease(request: Request, path: str) -> str:
    """The lease that this request uses, "" without one."""
    _, _, held = unquote(request.cookies.get(HELD, "")).partition(" ")
    lease, _, record = held.partition(" ")
    under = any(path.endswith(each) and digest(path.removesuffix(each)) == record for each in _UNDER_LEASE)
    return lease if under else ""


def named(form: str, *names: str) -> str:
    """A path of the interface, from `form` such as "/v1/users/{}", with a {} for each name; names are quoted."""
    return form.format(*map(as_text.quoted, names))


def digest(path: str) -> str:
    """A digest of a path, because a cookie is too small for a long path."""
    return hashlib.sha256(path.encode()).hexdigest()


def _next(link: str | None) -> dict[str, str] | None:
    """The query of the next page, from the header `Link`."""
    if link is None:
        return None
    query = urlsplit(link.partition("<")[2].partition(">")[0]).query
    return dict(parse_qsl(query, errors="surrogatepass"))


HEADERS = page_headers()
_templates = jinja2.Environment(
    loader=jinja2.PackageLoader("distributed_state.programs.inspector"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def page(request: Request, name: str, *, status: int = 200, **values: Any) -> Response:
    """A whole page; htmx takes the part that it swaps from it."""
    root = request.scope["root_path"]
    here = request.scope["path"].removeprefix(root)
    title = request.app.state.title
    text = _templates.get_template(f"{name}.html").render(root=root, here=here, title=title, status=status, **values)
    text = _UNSEEN.sub(_escaped, text)
    # A lone surrogate, which the store accepts, cannot be encoded in UTF-8: it is shown as in JSON.
    return Response(text.encode("utf-8", "backslashreplace"), status, HEADERS, media_type="text/html")


def refusal(request: Request, refused: Refused) -> Response:
    """The page that explains a refusal."""
    if refused.status == 401:
        return _to_sign_in(request)
    return page(request, "refused", status=refused.status, detail=refused.detail)


def _to_sign_in(request: Request) -> Response:
    place = request.scope["root_path"] + "/sign-in"
    if "hx-request" in request.headers:  # htmx would follow a redirect, and show the page within this one
        return Response(b"", 200, HEADERS | {"HX-Redirect": place})
    return RedirectResponse(place, 303, HEADERS)


def conversation_page(id: str, root: str, kind: str = "conversations") -> str:
    """The path of the page of a conversation, a user or a task."""
    return as_text.path(root, f"/{kind}/{{}}", id)


def typed(text: str) -> str:
    """A text as a user types it from a page: without line breaks, which a browser's input field drops."""
    return re.sub(r"[\r\n]", "", _UNSEEN.sub(_escaped, text).encode("utf-8", "backslashreplace").decode())


# Characters that are not seen, or change what is seen beside them, as those that reverse a text. static/page.js has
# them as well. Source: Unicode Technical Report 36, "Unicode Security Considerations".
_UNSEEN = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f]"
)


def _escaped(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"


def exact(text: str) -> Markup:
    """A text as the value of a form's field, which returns it unchanged although a page shows it escaped."""
    return Markup(_UNSEEN.sub(lambda found: f"&#{ord(found[0])};", str(escape(text))))


def quoted_query(query: str | dict[str, Any]) -> str:
    """A quoted query, or a value of one. The filter of jinja2 fails for a lone surrogate."""
    return urlencode(query, errors="surrogatepass") if isinstance(query, dict) else as_text.quoted(query)


def moment(seconds: float | None) -> str:
    """A time in seconds since 1970, to the second, in UTC. A number that is not a time, as messages may have, stays."""
    if seconds is None:
        return ""
    with contextlib.suppress(ValueError, OverflowError, OSError):
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
    return str(seconds)


def clock(seconds: float | None) -> str:
    """A time in seconds since 1970 for a page, where a script converts it to the browser's time zone."""
    text = moment(seconds)
    if not isinstance(seconds, int | float) or text[4:5] != "-":
        return text
    return Markup('<time datetime="{}Z">{} UTC</time>').format(text.replace(" ", "T"), text)


def age(seconds: float) -> str:
    """A number of seconds in one unit, as "4.0 s", "3 min", "2 h" or "5 d"."""
    for unit, size in ("d", 86400), ("h", 3600), ("min", 60):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.1f} s"


def took(seconds: float) -> str:
    """A duration that may be short, as "0.4 ms", "35 ms" or "3.1 s"."""
    if seconds >= 0.9995:
        return age(seconds)
    ms = seconds * 1000
    return f"{ms:.0f} ms" if ms >= 9.95 else f"{ms:.1f} ms"


def ago(seconds: float) -> str:
    """The age of a time in seconds since 1970, by this machine's clock, with the time as its title."""
    text = moment(seconds).replace(" ", "T")
    return Markup('<time class="ago" datetime="{}Z">{} ago</time>').format(text, age(time.time() - seconds))


def ahead(seconds: float) -> str:
    """How far a time in seconds since 1970 is ahead, as "in 3 min"; "now" if it is not; only for display."""
    left = seconds - time.time()
    return f"in {age(left)}" if left > 0 else "now"


def size(count: int) -> str:
    """A number of bytes in one unit, as "3.0 MiB"."""
    for unit, bytes_ in ("MiB", 2**20), ("KiB", 2**10):
        if count >= bytes_:
            return f"{count / bytes_:.1f} {unit}"
    return f"{count} B"


def count(number: int) -> str:
    """A number with its thousands apart, as "1,234,567"."""
    return f"{number:,}"


_templates.filters |= {
    "size": size, "count": count, "clock": clock, "age": age, "ago": ago, "ahead": ahead, "took": took, "exact": exact,
    "page": conversation_page, "digest": digest, "urlencode": quoted_query, "markdown": markdown,
}  # fmt: skip


_LONGEST_FORM = 64 * 1024
_LONGEST_TOKEN = 16_384


class Tickets:
    """A ticket that can be exchanged for a key once, for a URL that others may see after its use."""

    def __init__(self, key: str) -> None:
        self._key = key
        self.ticket: str = secrets.token_urlsafe(32)

    def take(self, ticket: str) -> str | None:
        """The key for this ticket, None for any other one; the ticket is then used up."""
        if not self.ticket or not compare_digest(ticket.encode(), self.ticket.encode()):
            return None
        self.ticket = ""
        return self._key


async def form(request: Request) -> dict[str, str]:
    """The fields of a form. Raises Refused if a page of another site sent it, and if it is too large."""
    if not _ours(request):
        raise Refused(403, "the form was sent by a page of another site")
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/x-www-form-urlencoded":
        raise Refused(415, "a form must be sent as application/x-www-form-urlencoded")
    data = b""
    try:
        async for part in request.stream():
            data += part
            if len(data) > _LONGEST_FORM:
                raise Refused(413, f"a form is at most {_LONGEST_FORM} bytes")
    except ClientDisconnect:
        raise Refused(
            400, "the connection ended before the whole form arrived"
        ) from None  # not an error of the server, so not logged
    try:
        return {name: values[-1] for name, values in parse_qs(data.decode(), keep_blank_values=True).items()}
    except ValueError as error:
        raise Refused(422, f"the form cannot be read: {error}") from error


def _ours(request: Request) -> bool:
    """Whether one of our pages sent it: browsers set these headers, and scripts cannot."""
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site == "same-origin"
    origin = request.headers.get("origin")
    return origin is not None and urlsplit(origin).netloc == request.headers.get("host")


async def sign_in_page(request: Request, _: Api) -> Response:
    """The page for entering a token."""
    return token_page(request)


def token_page(request: Request, problem: str = "", status: int = 200) -> Response:
    """The sign-in page, with the problem of the last attempt."""
    return page(request, "sign_in", problem=problem, status=status)


async def sign_in(request: Request, api: Api) -> Response:
    """Sign in with a token that the service accepts."""
    token = (await form(request)).get("token", "").strip()
    if not token or len(token) > _LONGEST_TOKEN or not token.isascii() or not token.isprintable():
        return token_page(request, "This is not a valid token.", 401)
    request.scope["headers"] = [
        *((name, value) for name, value in request.scope["headers"] if name not in (b"authorization", b"cookie")),
        (b"authorization", f"Bearer {token}".encode()),
    ]
    try:
        await api.get(Request(request.scope), "/v1/caller")
    except Refused as refused:
        said = (
            "The service does not accept this token: it is unknown, expired or revoked."
            if refused.status == 401
            else refused.detail
        )
        return token_page(request, said, refused.status)
    return entered(request, token)


def entered(request: Request, token: str) -> Response:
    """Go to the first page, with this token in a cookie."""
    response = RedirectResponse(request.scope["root_path"] + "/", 303, HEADERS)
    secure = "https" in (request.scope["scheme"], request.headers.get("x-forwarded-proto"))
    path = request.scope["root_path"]
    response.set_cookie(COOKIE, token, path=path, secure=secure, httponly=True, samesite="strict")
    return response


async def sign_out(request: Request, _: Api) -> Response:
    """Sign out: drop the token."""
    await form(request)
    response = RedirectResponse(request.scope["root_path"] + "/sign-in", 303, HEADERS)
    response.delete_cookie(COOKIE, path=request.scope["root_path"], httponly=True, samesite="strict")
    return response
