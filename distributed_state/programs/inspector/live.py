"""What happens now: events as they come, who holds which records and for how long, and who waits for them.

Law: a lease is named by its fencing token, so that what is ended or taken over is the one that was looked at.

Design: section 28.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from distributed_state.programs.inspector.access import form
from distributed_state.programs.inspector.api import HELD, Api, Refused, digest, named, query_of
from distributed_state.programs.inspector.pages import HEADERS, page
from distributed_state.values import path_names

_SHOWN = 50
_KINDS = {"session": "conversations", "user": "users", "task": "tasks"}
_SCOPES = {kind: scope for scope, kind in _KINDS.items()}


async def live(request: Request, api: Api) -> Response:
    """Events as they come, from now on, and the leases that are held."""
    rights = (await api.get(request, "/v1/caller")).json["rights"]
    held = await _held(request, api) if "admin" in rights else None
    query = query_of(request)
    return page(request, "live", types=query.get("types", ""), after=query.get("after", ""), held=held)


async def _held(request: Request, api: Api) -> dict[str, Any]:
    """Who holds which records, a page of it, or why that cannot be told."""
    query = {"limit": _SHOWN, "after": query_of(request).get("after")}
    try:
        found = (await api.get(request, "/v1/leases", query)).json
    except Refused as refused:
        if refused.status in (401, 403):
            raise
        return {"rows": [], "after": None, "time": 0.0, "problem": refused.detail}
    mine = _mine(request)
    rows = [_row(each, mine, request.scope["root_path"]) for each in found["leases"]]
    return {"rows": rows, "after": found["after"], "time": found["time"], "problem": ""}


def _row(lease: dict[str, Any], mine: str, root: str) -> dict[str, Any]:
    """A lease with where it is steered, "" for a record that the interface has not, and whether it is ours."""
    kind = _KINDS.get(lease["scope"])
    place = _page(root, kind, lease["record_id"], lease["token"]) if kind else ""
    return lease | {"place": place, "mine": mine == str(lease["token"])}


def _page(root: str, kind: str, id: str, token: int) -> str:
    return path_names.path(root, f"/leases/{kind}/{{}}/{token}", id)


async def ask(request: Request, api: Api) -> Response:
    """The page that says what becomes of a lease, with the button that does it."""
    kind, id, token = _named(request)
    scope = _SCOPES[kind]
    # Right before it, in the order of the list.
    query = {"scope": scope, "prefix": id, "after": f"{token}.{scope}", "limit": 1}
    found = (await api.get(request, "/v1/leases", query)).json
    rows = [each for each in found["leases"] if (each["record_id"], each["token"]) == (id, token)]
    what = request.path_params["what"]
    lease = rows[0] if rows else None
    place = _page(request.scope["root_path"], kind, id, token)
    return page(request, "lease", what=what, id=id, place=place, lease=lease, time=found["time"])


async def do(request: Request, api: Api) -> Response:
    """End a lease, or hold the record in place of its holder."""
    kind, id, token = _named(request)
    given, root = await form(request), request.scope["root_path"]
    record = named(f"/v1/{kind}/{{}}", id)
    if request.path_params["what"] == "end":
        if not (await api.ask(request, "DELETE", f"{record}/lease/{token}")).json["released"]:
            raise Refused(409, "nothing was ended: this lease is not held any more")
        response = RedirectResponse(f"{root}/live", 303, HEADERS)
        if _mine(request) == str(token):
            response.delete_cookie(HELD, path=root, httponly=True, samesite="strict")
        return response
    ttl = _seconds(given.get("seconds", ""))
    taken = (await api.ask(request, "PUT", f"{record}/lease/{token}", given={"ttl": ttl})).json
    response = RedirectResponse(f"{root}/live", 303, HEADERS)
    # What is done on these pages to this record is done under it, until it ends.
    kept = f"{taken['token']} {taken['lease']} {digest(record)}"
    secure = "https" in (request.scope["scheme"], request.headers.get("x-forwarded-proto"))
    response.set_cookie(HELD, quote(kept), max_age=ttl, path=root, secure=secure, httponly=True, samesite="strict")
    return response


def _named(request: Request) -> tuple[str, str, int]:
    """Which lease is meant."""
    kind, id, token = (request.path_params[name] for name in ("kind", "id", "token"))
    return kind, id, token


def _seconds(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or not 1 <= int(text[:4]) <= 600:
        raise Refused(422, f"a lease is held for 1 to 600 seconds, not {text!r:.40}")
    return int(text)


def _mine(request: Request) -> str:
    """The token of the lease that this browser holds, "" if none."""
    return request.cookies.get(HELD, "").partition("%20")[0]
