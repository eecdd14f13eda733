"""Signs in and out. Law: a browser keeps a token where no script reads it and no other site makes it send it.

Design: section 28. Source: OWASP, "Cross-Site Request Forgery Prevention Cheat Sheet" (Fetch Metadata).
"""

from __future__ import annotations

import secrets
from hmac import compare_digest
from urllib.parse import parse_qs, urlsplit

from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response

from distributed_state.programs.inspector.api import COOKIE, Api, Refused
from distributed_state.programs.inspector.pages import HEADERS, page

_LONGEST_FORM = 64 * 1024
_LONGEST_TOKEN = 16_384


class Tickets:
    """A ticket, for which whoever comes with it first gets a key: for a URL that others may see once it was used."""

    def __init__(self, key: str) -> None:
        self._key = key
        self.ticket: str = secrets.token_urlsafe(32)

    def take(self, ticket: str) -> str | None:
        """The key for this ticket, None for any other one; it is used up then."""
        if not self.ticket or not compare_digest(ticket.encode(), self.ticket.encode()):
            return None
        self.ticket = ""
        return self._key


async def form(request: Request) -> dict[str, str]:
    """What a form of ours sent. Raises Refused for one of another site, and for one that is too large."""
    if not _ours(request):
        raise Refused(403, "this was sent by a page of another site")
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/x-www-form-urlencoded":
        raise Refused(415, "a form is application/x-www-form-urlencoded")
    data = b""
    try:
        async for part in request.stream():
            data += part
            if len(data) > _LONGEST_FORM:
                raise Refused(413, f"a form is at most {_LONGEST_FORM} bytes")
    except ClientDisconnect:
        raise Refused(400, "the form is not all here") from None  # a fault of nobody's here, for no log
    try:
        return {name: values[-1] for name, values in parse_qs(data.decode(), keep_blank_values=True).items()}
    except ValueError as error:
        raise Refused(422, f"the form cannot be read: {error}") from error


def _ours(request: Request) -> bool:
    """Whether a page of ours sent it: browsers say so by themselves, and no script can say it for them."""
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site == "same-origin"
    origin = request.headers.get("origin")
    return origin is not None and urlsplit(origin).netloc == request.headers.get("host")


def sign_in_page(request: Request, problem: str = "", status: int = 200) -> Response:
    """The page on which a token is given."""
    return page(request, "sign_in", problem=problem, status=status)


async def sign_in(request: Request, api: Api) -> Response:
    """Keep a token that the service knows."""
    token = (await form(request)).get("token", "").strip()
    if not token or len(token) > _LONGEST_TOKEN or not token.isascii() or not token.isprintable():
        return sign_in_page(request, "That is no token.", 401)
    request.scope["headers"] = [
        *((name, value) for name, value in request.scope["headers"] if name not in (b"authorization", b"cookie")),
        (b"authorization", f"Bearer {token}".encode()),
    ]
    try:
        await api.get(Request(request.scope), "/v1/caller")
    except Refused as refused:
        said = "The service does not know this token." if refused.status == 401 else refused.detail
        return sign_in_page(request, said, refused.status)
    return entered(request, token)


def entered(request: Request, token: str) -> Response:
    """Go to the first page, with this token kept."""
    response = RedirectResponse(request.scope["root_path"] + "/", 303, HEADERS)
    secure = "https" in (request.scope["scheme"], request.headers.get("x-forwarded-proto"))
    path = request.scope["root_path"]
    response.set_cookie(COOKIE, token, path=path, secure=secure, httponly=True, samesite="strict")
    return response


async def sign_out(request: Request) -> Response:
    """Forget the token."""
    await form(request)
    response = RedirectResponse(request.scope["root_path"] + "/sign-in", 303, HEADERS)
    response.delete_cookie(COOKIE, path=request.scope["root_path"], httponly=True, samesite="strict")
    return response
