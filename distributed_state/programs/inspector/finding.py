"""Finds conversations. Law: what is listed is a page that the interface gives, and nothing is searched here.

Design: section 28.
"""

from __future__ import annotations

import re
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from distributed_state.programs.inspector.api import Api, Found, Refused, query_of
from distributed_state.programs.inspector.pages import HEADERS, conversation_page, page

_ROWS = 50
_NAMED = ("prefix", "user", "tag", "phase", "held")
_UNITS = ("newer", "older", "mib")
_NUMBER = re.compile(r"\d{1,9}(\.\d{1,6})?", re.ASCII)


async def find(request: Request, api: Api) -> Response:
    """The conversations that were changed last, or those that fit; by a text, those in which it stands."""
    names = (*_NAMED, *_UNITS, "after", "text", "id")
    query = query_of(request)
    asked = {name: query.get(name, "") for name in names}
    if asked["id"]:
        return RedirectResponse(conversation_page(asked["id"], request.scope["root_path"]), 303, HEADERS)
    if asked["text"]:
        found = await _searched(request, api, asked["text"], asked["prefix"])
        return page(request, "find", asked=asked, rows=[], hits=found.json["hits"], following=None)
    wanted: dict[str, Any] = {name: asked[name] for name in (*_NAMED, "after")} | {"limit": _ROWS}
    wanted |= {name: value for name, value in _of_form(asked).items() if value is not None}
    # Somebody who holds one has mostly just begun with it, and it may not be archived yet.
    wanted |= {"fresh": "true"} if asked["held"] else {}
    found = await api.get(request, "/v1/conversations", wanted)
    # Of one tenant alone they come by their ids.
    by_id = bool(asked["prefix"] or asked["tag"] or (await api.get(request, "/v1/caller")).json["prefix"])
    return page(
        request, "find", asked=asked, rows=found.json["conversations"], hits=None, by_id=by_id,
        following=found.following and _again(asked, found.following),
    )  # fmt: skip


def _of_form(asked: dict[str, str]) -> dict[str, Any]:
    """What the form says in units of people: how long ago, how many MiB."""
    now = time.time()
    newer, older, mib = _number(asked, "newer"), _number(asked, "older"), _number(asked, "mib")
    return {
        "changed_since": None if newer is None else max(0.0, now - newer * 3600),
        "changed_before": None if older is None else max(0.0, now - older * 3600),
        "larger_than": None if mib is None else int(mib * 2**20),
    }


def _number(asked: dict[str, str], name: str) -> float | None:
    text = asked[name]
    if not text:
        return None
    if not _NUMBER.fullmatch(text):
        raise Refused(422, f"{name} is a number, as 0.5 or 24, not {text!r:.40}")
    return float(text)


def _again(asked: dict[str, str], following: dict[str, str]) -> dict[str, str]:
    """The query of the next page: as it was asked, and where that goes on."""
    kept = {name: asked[name] for name in (*_NAMED, *_UNITS) if asked[name]}
    return kept | {"after": following["after"]}


async def _searched(request: Request, api: Api, text: str, prefix: str) -> Found:
    given: dict[str, Any] = {"query": text, "limit": _ROWS}
    return await api.ask(request, "POST", "/v1/search", given=given | ({"prefix": prefix} if prefix else {}))
