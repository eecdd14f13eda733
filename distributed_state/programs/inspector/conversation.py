"""One conversation: what it is, what it was, and how it came to that. Law: each part is a page, however long it is.

Design: section 28.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from distributed_state.programs.inspector import graph
from distributed_state.programs.inspector.access import form
from distributed_state.programs.inspector.api import Api, Found, Refused, quoted
from distributed_state.programs.inspector.messages import shown
from distributed_state.programs.inspector.pages import HEADERS, page
from distributed_state.programs.inspector.trees import trees

_MESSAGES = 30
_VERSIONS = 20


def _place(request: Request) -> str:
    return f"/v1/conversations/{quoted(request.path_params['id'])}"


def _number(request: Request, name: str) -> int | None:
    text = request.query_params.get(name, "")
    if not text:
        return None
    if not (text.isascii() and text.isdecimal()) or len(text) > 18:
        raise Refused(422, f"{name} is a number, not {text!r:.40}")
    return int(text)


async def read(request: Request, api: Api) -> Response:
    """A conversation as it is or was, with its messages, its fields and its versions."""
    place, version = _place(request), _number(request, "version")
    now = (await api.get(request, place, {"last": 0, "fresh": True})).json
    if version is not None and version > now["version"]:
        raise Refused(404, f"its last version is {now['version']}")
    state = now if version is None else (await api.get(request, f"{place}/versions/{version}")).json
    said, history, checkpoints, branches = await asyncio.gather(
        _messages(request, api, place, version, state),
        _history(request, api, place, now["version"]),
        _optional(api.get(request, f"{place}/checkpoints", {"order": "desc", "limit": graph.MOST})),
        _optional(api.get(request, f"{place}/branches")),
    )
    found_checkpoints = checkpoints.json["checkpoints"][::-1] if checkpoints else []
    found_branches = branches.json["branches"] if branches else []
    return page(
        request, "conversation", id=request.path_params["id"], now=now, state=state, version=version,
        fields=trees(state["fields"], state.get("bytes")), said=said, history=history,
        checkpoints=found_checkpoints, branches=found_branches,
        drawn=graph.drawn(now["version"], found_checkpoints, found_branches, state["version"]),
    )  # fmt: skip


async def _optional(found: Any) -> Found | None:
    """What is not there for everybody, as the history of a record that is only in Redis."""
    try:
        answer: Found = await found
    except Refused as refused:
        if refused.status in (401, 429, 503):
            raise
        return None
    return answer


async def _messages(
    request: Request, api: Api, place: str, version: int | None, state: dict[str, Any]
) -> dict[str, Any]:
    """The last messages before a number, in order; of a version, its last."""
    before = _number(request, "before")
    if version is not None:
        found = [each for each in state["messages"] if before is None or each["number"] < before]
        last, earlier = found[-_MESSAGES:], len(found) > _MESSAGES
    else:
        query = {"limit": _MESSAGES, "order": "desc", "before": before}
        answer = await api.get(request, f"{place}/messages", query)
        last, earlier = answer.json["messages"][::-1], answer.following is not None
    return {"shown": [shown(each) for each in last], "before": last[0]["number"] if last and earlier else None}


async def _history(request: Request, api: Api, place: str, newest: int) -> dict[str, Any]:
    """Versions up to `top`, the newest first."""
    top = min(_number(request, "top") or newest, newest)
    query = {"after": max(0, top - _VERSIONS), "before": top + 1, "limit": _VERSIONS}
    found = await _optional(api.get(request, f"{place}/versions", query))
    rows = found.json["versions"][::-1] if found else []
    return {"rows": [_row(each) for each in rows], "below": top - _VERSIONS if top > _VERSIONS else None}


def _row(change: dict[str, Any]) -> dict[str, Any]:
    """What one version did, in a few words."""
    parts = [f"{name} set" for name in [*change["fields"], *change.get("bytes", {})]]
    parts += [f"{name} deleted" for name in change["deleted"]]
    parts += [f"{len(change['messages'])} messages"] if change["messages"] else []
    parts += [f"{len(change['items'])} items"] if change["items"] else []
    parts += [f"phase {change['phase']}"] if change["phase"] is not None else []
    parts += [f"checkpoint {change['label']}"] if change["label"] is not None else []
    shortened = ", ".join(parts[:6]) + (f" and {len(parts) - 6} more" if len(parts) > 6 else "")
    return change | {"what": shortened[:400]}


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
    now = (await api.get(request, _place(request), {"last": 0})).json
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
        if given.get("typed") != id:
            raise Refused(422, "nothing was erased: the id that was typed is another one")
        await api.ask(request, "DELETE", f"{place}/everything")
        return RedirectResponse(f"{root}/", 303, HEADERS)
    return RedirectResponse(f"{root}/conversations/{quoted(id)}", 303, HEADERS)


def _of_form(given: dict[str, str], name: str) -> int:
    text = given.get(name, "")
    if not (text.isascii() and text.isdecimal()) or len(text) > 18:
        raise Refused(422, f"{name} is a number, not {text!r:.40}")
    return int(text)
