"""Finds conversations. Law: what is listed is a page that the interface gives, and nothing is searched here.

Design: section 28.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from distributed_state.programs.inspector.api import Api, Found, quoted
from distributed_state.programs.inspector.pages import HEADERS, page

_ROWS = 50
_NAMED = ("prefix", "user", "tag")


async def find(request: Request, api: Api) -> Response:
    """The conversations that were changed last, or those that fit; by a text, those in which it stands."""
    asked = {name: request.query_params.get(name, "") for name in (*_NAMED, "after", "text", "id")}
    if asked["id"]:
        place = f"{request.scope['root_path']}/conversations/{quoted(asked['id'])}"
        return RedirectResponse(place, 303, HEADERS)
    if asked["text"]:
        found = await _searched(request, api, asked["text"], asked["prefix"])
        return page(request, "find", asked=asked, rows=[], hits=found.json["hits"], following=None)
    query: dict[str, Any] = {name: asked[name] for name in (*_NAMED, "after")} | {"limit": _ROWS}
    found = await api.get(request, "/v1/conversations", query)
    # Of one tenant alone they come by their ids.
    by_id = bool(asked["prefix"] or asked["tag"] or (await api.get(request, "/v1/caller")).json["prefix"])
    return page(
        request, "find", asked=asked, rows=found.json["conversations"], hits=None, by_id=by_id,
        following=found.following,
    )  # fmt: skip


async def _searched(request: Request, api: Api, text: str, prefix: str) -> Found:
    given: dict[str, Any] = {"query": text, "limit": _ROWS}
    return await api.ask(request, "POST", "/v1/search", given=given | ({"prefix": prefix} if prefix else {}))
