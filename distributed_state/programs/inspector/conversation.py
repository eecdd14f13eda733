"""One conversation: what it is, what it was, and how it came to that. Law: each part is a page, however long it is.

Design: section 28.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from distributed_state.programs.inspector import drawing, line
from distributed_state.programs.inspector.access import form
from distributed_state.programs.inspector.api import Api, Found, Refused, named, query_of
from distributed_state.programs.inspector.messages import shown
from distributed_state.programs.inspector.pages import HEADERS, conversation_page, page, typed
from distributed_state.programs.inspector.trees import trees
from distributed_state.programs.turn_parts import spent

_MESSAGES = 30
_VERSIONS = 20
_DRAWN = 60  # versions in a graph
_CHECKPOINTS = 100
_PARTS = 6  # of what a version did


def _place(request: Request) -> str:
    return named("/v1/conversations/{}", request.path_params["id"])


def _number(request: Request, name: str) -> int | None:
    text = query_of(request).get(name, "")
    if not text:
        return None
    if not (text.isascii() and text.isdecimal()) or len(text) > 18:
        raise Refused(422, f"{name} is a number, not {text!r:.40}")
    return int(text)


async def read(request: Request, api: Api) -> Response:
    """A conversation as it is or was, with its messages, its fields and its versions."""
    place, version, top = _place(request), _number(request, "version"), _number(request, "top")
    seen = {"version": version, "before": _number(request, "before"), "limit": _MESSAGES}
    below = {"before": None if top is None else top + 1, "limit": _VERSIONS}
    state, versions, checkpoints, branches = await asyncio.gather(
        api.get(request, f"{place}/overview", seen),
        _optional(api.get(request, f"{place}/timeline", below)),
        _optional(api.get(request, f"{place}/checkpoints", {"order": "desc", "limit": line.MOST})),
        _optional(api.get(request, f"{place}/branches")),
    )
    now, found = state.json, [each.json if each else {} for each in (versions, checkpoints, branches)]
    rows, named = found[0].get("versions", []), found[1].get("checkpoints", [])[::-1]
    apart = found[2].get("branches", [])
    said = [shown(each) for each in now["messages"]]
    before = now["too_large"] or (said[0]["number"] if said and now["earlier"] else None)
    return page(
        request, "conversation", id=request.path_params["id"], state=now, version=version,
        fields=trees(now["fields"], now.get("bytes")), said=said, before=before,
        history=[each | {"what": _what(each)} for each in rows], below=_below(rows), checkpoints=named, branches=apart,
        drawn=line.drawn(now["newest"], named, apart, now["version"]),
        spent=spent(await _times(request, api, place, now["version"], rows)),
    )  # fmt: skip


async def graph(request: Request, api: Api) -> Response:
    """What came of what: versions with phases, checkpoints and rollbacks, branches and forks."""
    place, top = _place(request), _number(request, "top")
    below = {"before": None if top is None else top + 1, "limit": _DRAWN}
    now, versions = await asyncio.gather(
        api.get(request, f"{place}/overview", {"limit": 0, "most": 0}), api.get(request, f"{place}/timeline", below)
    )
    asked = {"checkpoints": {"order": "desc", "limit": _CHECKPOINTS}, "branches": {}, "forks": {}}
    others = await asyncio.gather(*(_optional(api.get(request, f"{place}/{name}", asked[name])) for name in asked))
    checkpoints, branches, forks = (
        each.json[name] if each else [] for each, name in zip(others, asked, strict=True)
    )  # fmt: skip
    rows = versions.json["versions"]
    return page(
        request, "graph", id=request.path_params["id"], now=now.json, drawn=drawing.drawn(rows, branches, forks),
        rows=rows, below=_below(rows), top=top, checkpoints=checkpoints,
        most_checkpoints=_CHECKPOINTS, branches=branches, forks=forks,
    )  # fmt: skip


async def _optional(found: Any) -> Found | None:
    """What is not there for everybody, as the history of a record that is only in Redis."""
    try:
        answer: Found = await found
    except Refused as refused:
        if refused.status not in (404, 410):
            raise
        return None
    return answer


def _below(rows: list[dict[str, Any]]) -> int | None:
    """The newest version that these, the newest first, have not reached."""
    return rows[-1]["version"] - 1 if rows and rows[-1]["version"] > 1 else None


async def _times(
    request: Request, api: Api, place: str, version: int, rows: list[dict[str, Any]]
) -> dict[str, Any] | None:
    """Where the time went of the turn that made a version, if a turn did."""
    if not any(each["version"] == version for each in rows):
        found = await _optional(api.get(request, f"{place}/timeline", {"before": version + 1, "limit": 1}))
        rows = found.json["versions"] if found else []
    return next((each["times"] for each in rows if each["version"] == version), None)


def _what(change: dict[str, Any]) -> str:
    """What one version did, in a few words."""
    parts = [f"{name[:80]} set" for name in change["fields"]] + [f"{name[:80]} deleted" for name in change["deleted"]]
    parts += [f"{change['messages']} messages"] if change["messages"] else []
    parts += [f"{change['items']} items"] if change["items"] else []
    parts += [f"phase {change['phase'][:80] or 'none'}"] if change["phase"] is not None else []
    parts += [f"checkpoint {change['label'][:80]}"] if change["label"] is not None else []
    parts += [f"back to version {change['restored']}"] if change["restored"] is not None else []
    more = len(parts[_PARTS:]) + change["more"]
    return ", ".join(parts[:_PARTS]) + (f" and {more} more" if more else "")


async def difference(request: Request, api: Api) -> Response:
    """What one version has that another one has not."""
    place = _place(request)
    one, other = _number(request, "from"), _number(request, "to")
    if one is None or other is None:
        raise Refused(422, "give two versions: from and to")
    found = (await api.get(request, f"{place}/versions/{one}/diff", {"to": other})).json
    before = (await api.get(request, f"{place}/versions/{one}")).json["fields"]
    had = {name: before[name] for name in [*found["fields"], *found["deleted"]] if name in before}
    return page(
        request, "difference", id=request.path_params["id"], found=found,
        had=trees(had), has=trees(found["fields"], found.get("bytes")),
        messages=[shown(each) for each in found["messages"][:_MESSAGES]],
        left_out=max(0, len(found["messages"]) - _MESSAGES),
    )  # fmt: skip


# What changes something: asked first on a page, then done by a form


async def ask(request: Request, api: Api) -> Response:
    """The page that says what will happen, with the button that does it."""
    what = request.path_params["what"]
    now = (await api.get(request, f"{_place(request)}/overview", {"limit": 0, "most": 0})).json
    version = _number(request, "version") or now["version"]
    return page(request, "ask", id=request.path_params["id"], what=what, now=now, version=version)


async def do(request: Request, api: Api) -> Response:
    """Roll back, fork or erase."""
    what, id, given = request.path_params["what"], request.path_params["id"], await form(request)
    place, root = _place(request), request.scope["root_path"]
    if what == "rollback":
        await api.ask(request, "POST", f"{place}/rollback", given={"version": _of_form(given, "version")})
    elif what == "fork":
        wanted = {"version": _of_form(given, "version")} | ({"id": given["id"]} if given.get("id") else {})
        id = (await api.ask(request, "POST", f"{place}/forks", given=wanted)).json["id"]
    else:
        if given.get("typed") != typed(id):
            raise Refused(422, "nothing was erased: the id that was typed is another one")
        await api.ask(request, "DELETE", f"{place}/everything")
        return RedirectResponse(f"{root}/", 303, HEADERS)
    return RedirectResponse(conversation_page(id, root), 303, HEADERS)


def _of_form(given: dict[str, str], name: str) -> int:
    text = given.get(name, "")
    if not (text.isascii() and text.isdecimal()) or len(text) > 18:
        raise Refused(422, f"{name} is a number, not {text!r:.40}")
    return int(text)
