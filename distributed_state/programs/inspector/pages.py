"""Makes pages of templates. Law: what users wrote is text on a page, and no page loads or runs what is not ours.

Design: section 28.
"""

from __future__ import annotations

import contextlib
import re
import time
from datetime import UTC, datetime
from typing import Any
from urllib import parse

import jinja2
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from distributed_state.programs.inspector.api import Refused
from distributed_state.values import path_names

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_templates = jinja2.Environment(
    loader=jinja2.PackageLoader("distributed_state.programs.inspector"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def page(request: Request, name: str, *, status: int = 200, **values: Any) -> Response:
    """A page, whole; where htmx asks, what it swaps is taken from that."""
    root = request.scope["root_path"]
    here = request.scope["path"].removeprefix(root)
    text = _templates.get_template(f"{name}.html").render(root=root, here=here, status=status, **values)
    # A lone surrogate, which the store keeps, has no place in UTF-8: it is shown as it is written in JSON.
    return Response(text.encode("utf-8", "backslashreplace"), status, HEADERS, media_type="text/html")


def refusal(request: Request, refused: Refused) -> Response:
    """What is shown instead of a page that was refused."""
    if refused.status == 401:
        return _to_sign_in(request)
    return page(request, "refused", status=refused.status, detail=refused.detail)


def _to_sign_in(request: Request) -> Response:
    place = request.scope["root_path"] + "/sign-in"
    if "hx-request" in request.headers:  # htmx would follow a redirect, and put the page into a part of this one
        return Response(b"", 200, HEADERS | {"HX-Redirect": place})
    return RedirectResponse(place, 303, HEADERS)


def conversation_page(id: str, root: str) -> str:
    """Where the page of a conversation is."""
    return path_names.path(root, "/conversations/{}", id)


def typed(text: str) -> str:
    """A text as it is typed: as a page shows it, and without the ends of lines, which a browser leaves out."""
    return re.sub(r"[\r\n]", "", text.encode("utf-8", "backslashreplace").decode())


def urlencode(query: str | dict[str, Any]) -> str:
    """A query, or a value of one. That of jinja2 fails for a lone surrogate."""
    return parse.urlencode(query, errors="surrogatepass") if isinstance(query, dict) else path_names.quoted(query)


def moment(seconds: float | None) -> str:
    """A time in seconds since 1970, to the second, in UTC. A number that is none, as messages may name, is itself."""
    if seconds is None:
        return ""
    with contextlib.suppress(ValueError, OverflowError, OSError):
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
    return str(seconds)


def age(seconds: float) -> str:
    """So many seconds in one unit, as "4.0 s", "3 min", "2 h" or "5 d"."""
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


def since(seconds: float) -> str:
    """How long ago a time in seconds since 1970 is, by this machine's clock: for the eye alone."""
    return age(time.time() - seconds)


def size(count: int) -> str:
    """So many bytes in one unit, as "3.0 MiB"."""
    for unit, bytes_ in ("MiB", 2**20), ("KiB", 2**10):
        if count >= bytes_:
            return f"{count / bytes_:.1f} {unit}"
    return f"{count} B"


_templates.filters |= {
    "size": size, "moment": moment, "age": age, "since": since, "took": took,
    "page": conversation_page, "urlencode": urlencode,
}  # fmt: skip
