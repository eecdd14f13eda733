"""One conversation: its present and earlier states, and its changes. Law: long parts are shown in pages.

Every drawing is also described in words. The line of versions has the same width for ten as for a million versions. In
the graph each version is a line, the newest at the top: phases colour it, a rollback is a bow to the version that it
restored, branches and forks lead away from the version after which they begin.

Design: section 28.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from distributed_state.programs.inspector import schedules
from distributed_state.programs.inspector.pages import (
    HEADERS,
    Api,
    Found,
    Refused,
    conversation_page,
    form,
    named,
    page,
    query_of,
    typed,
)
from distributed_state.programs.inspector.values import chat, compared, message_shown, trees
from distributed_state.values.turn_times import spent

_MESSAGES = 30
_VERSIONS = 20
_ABOVE = 4  # newer versions above the one that is shown
_CHECKPOINTS = 100
_PARTS = 6  # parts in the description of a version

# The line and the graph of versions, in pixels
WIDTH, _EDGE = 320, 8  # of the line
ROW, TOP, LANE = 46, 16, 60  # between two versions, above the first, left of the graph's line
_BOW = 54  # the widest

_MARKS = 60  # of a kind, on the line
_DRAWN = 60  # versions in a graph
_COLOURS = 6
_FORKS = 200
_AWAY = 2  # forks named at one version; the list has all


async def read(request: Request, api: Api) -> Response:
    """A conversation as it is or was, with its messages, its fields and its versions."""
    place, version, top = _place(request), number_of(request, "version"), number_of(request, "top")
    seen = {"version": version, "before": number_of(request, "before"), "limit": _MESSAGES}
    top = top if top is not None or version is None else version + _ABOVE
    below = {"before": None if top is None else top + 1, "limit": _VERSIONS}
    (state, waiting, plan), (used, versions, checkpoints, branches) = await asyncio.gather(
        asyncio.gather(
            api.get(request, f"{place}/overview", seen),
            _waiting(request, api, place),
            schedules.plan_of(request, api),
        ),
        asyncio.gather(
            optional(api.get(request, f"{place}/usage")),
            optional(api.get(request, f"{place}/timeline", below)),
            optional(api.get(request, f"{place}/checkpoints", {"order": "desc", "limit": _MARKS})),
            optional(api.get(request, f"{place}/branches")),
        ),
    )
    now, found = state.json, [each.json if each else {} for each in (versions, checkpoints, branches)]
    rows = described(found[0].get("versions", []))
    named, apart = found[1].get("checkpoints", [])[::-1], found[2].get("branches", [])
    said = now["messages"]
    made = next((each for each in rows if each["version"] == now["version"]), None)
    return page(
        request, "conversation", id=request.path_params["id"], state=now, version=version,
        fields=trees(now["fields"], now.get("bytes")),
        said=chat(said, made["messages"] if made and seen["before"] is None else 0),
        before=now["too_large"] or (said[0]["number"] if said and now["earlier"] else None),
        history=rows, below=_below(rows), made=made, checkpoints=named, branches=apart, width=WIDTH,
        drawn=line_of(now["newest"], named, apart, now["version"]),
        spent=spent(made and made["times"]), waiting=waiting, plan=plan,
        used=used.json if used and used.json["calls"] else None,
    )  # fmt: skip


def described(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The versions of a timeline, each with its changes in a few words as `what`."""
    return [each | {"what": _what(each)} for each in rows]


def _what(change: dict[str, Any]) -> str:
    """Describe the changes of one version in a few words."""
    parts = [f"{name[:80]} set" for name in change["fields"]] + [f"{name[:80]} deleted" for name in change["deleted"]]
    parts += [f"{change['messages']} messages"] if change["messages"] else []
    parts += [f"{change['items']} items"] if change["items"] else []
    parts += [f"phase {change['phase'][:80] or 'none'}"] if change["phase"] is not None else []
    parts += [f"checkpoint {change['label'][:80]}"] if change["label"] is not None else []
    parts += [f"back to version {change['restored']}"] if change["restored"] is not None else []
    more = len(parts[_PARTS:]) + change["more"]
    return ", ".join(parts[:_PARTS]) + (f" and {more} more" if more else "")


def _below(rows: list[dict[str, Any]]) -> int | None:
    """The newest version below these rows, which are the newest first."""
    return rows[-1]["version"] - 1 if rows and rows[-1]["version"] > 1 else None


async def graph(request: Request, api: Api) -> Response:
    """The graph of versions: phases, checkpoints and rollbacks, branches and forks."""
    place, top = _place(request), number_of(request, "top")
    below = {"before": None if top is None else top + 1, "limit": _DRAWN}
    now, versions = await asyncio.gather(
        api.get(request, f"{place}/overview", {"limit": 0, "most": 0}), api.get(request, f"{place}/timeline", below)
    )
    asked: dict[str, dict[str, Any]] = {
        "checkpoints": {"order": "desc", "limit": _CHECKPOINTS},
        "branches": {},
        "forks": {"limit": _FORKS},
    }
    others = await asyncio.gather(*(optional(api.get(request, f"{place}/{name}", asked[name])) for name in asked))
    checkpoints, branches, forks = (
        each.json[name] if each else [] for each, name in zip(others, asked, strict=True)
    )  # fmt: skip
    rows = described(versions.json["versions"])
    apart: dict[int | None, list[dict[str, Any]]] = {}
    for each in sorted(forks, key=lambda fork: -(fork["version"] or 0)):
        apart.setdefault(each["version"], []).append(each)
    return page(
        request, "graph", id=request.path_params["id"], now=now.json, drawn=graph_of(rows, branches, forks),
        below=_below(rows), top=top, row=ROW, lane=LANE, checkpoints=checkpoints, most_checkpoints=_CHECKPOINTS,
        branches=branches, forks=apart, all_forks=len(forks), most_forks=_FORKS,
    )  # fmt: skip


async def inbox(request: Request, api: Api) -> Response:
    """The messages that wait for a turn."""
    waiting = await _waiting(request, api, _place(request))
    return page(request, "inbox", id=request.path_params["id"], waiting=waiting)


async def _waiting(request: Request, api: Api, place: str) -> dict[str, Any]:
    """The first inputs of the inbox, and how many there are, or the reason why they are missing."""
    found, problem = await api.part(request, f"{place}/inbox")
    inputs = found["inputs"] if found else []
    rows = [
        message_shown(each["message"] | {"number": each["number"], "timestamp": each["time"]})
        | {"request": each["request_id"]}
        for each in inputs[:_MESSAGES]
    ]
    return {"rows": rows, "count": len(inputs), "problem": problem}


async def difference(request: Request, api: Api) -> Response:
    """Compare two versions."""
    place = _place(request)
    one, other = number_of(request, "from"), number_of(request, "to")
    if one is None or other is None:
        raise Refused(422, "give two versions: from and to")
    found = (await api.get(request, f"{place}/versions/{one}/diff", {"to": other})).json
    version = (await api.get(request, f"{place}/versions/{one}")).json
    before = version["fields"] | version.get("bytes", {})
    had = {
        name: before[name] for name in [*found["fields"], *found.get("bytes", {}), *found["deleted"]] if name in before
    }
    return page(
        request, "difference", id=request.path_params["id"], found=found,
        fields=compared(had, found["fields"] | found.get("bytes", {})),
        messages=chat(found["messages"][:_MESSAGES]),
        left_out=max(0, len(found["messages"]) - _MESSAGES),
    )  # fmt: skip


async def optional(found: Any) -> Found | None:
    """An answer, or None if it is missing, such as the history of a record that is only in Redis."""
    try:
        answer: Found = await found
    except Refused as refused:
        if refused.status not in (404, 410):
            raise
        return None
    return answer


def _place(request: Request) -> str:
    return named("/v1/conversations/{}", request.path_params["id"])


def number_of(request: Request, name: str) -> int | None:
    """A number in the query, None if absent."""
    given = query_of(request)
    return _of_form(given, name) if given.get(name) else None


# Changes: first confirmed on a page, then sent by a form


async def ask(request: Request, api: Api) -> Response:
    """The page that explains the change, with the button for it."""
    what = request.path_params["what"]
    now = (await api.get(request, f"{_place(request)}/overview", {"limit": 0, "most": 0})).json
    version = number_of(request, "version") or now["version"]
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


async def stop(request: Request, api: Api) -> Response:
    """Ask the running turn to stop. A script reads the answer, so a refusal is a text as well."""
    try:
        token = _of_form(await form(request), "token")
        given = {"token": token, "reason": "requested in the inspector", "wait": 0}
        done = (await api.ask(request, "POST", f"{_place(request)}/stop", given=given)).json
        status, said = 200, "that turn has ended" if done["state"] == "nothing ran" else ""
    except Refused as refused:
        status, said = refused.status, refused.detail
    return Response(said.encode("utf-8", "backslashreplace"), status, HEADERS, media_type="text/plain")


def _of_form(given: dict[str, str], name: str) -> int:
    text = given.get(name, "")
    if not (text.isascii() and text.isdecimal()) or len(text) > 18:
        raise Refused(422, f"{name} is a number, not {text!r:.40}")
    return int(text)


# The line of versions


@dataclass(frozen=True, slots=True)
class Mark:
    """A mark on the line: `at` is its distance from the left, `kind` its type."""

    at: float
    kind: str
    version: int
    label: str
    to: float = 0.0  # where a branch ends


def line_of(newest: int, checkpoints: list[dict[str, Any]], branches: list[dict[str, Any]], seen: int) -> list[Mark]:
    """The marks of a record whose present version is `newest`, while the page shows version `seen`."""
    span = max(1, newest - 1)

    def at(version: int) -> float:
        return round(_EDGE + (WIDTH - 2 * _EDGE) * min(1.0, max(0, version - 1) / span), 1)

    marks = [Mark(at(each["version"]), "checkpoint", each["version"], each["label"]) for each in checkpoints]
    marks += [
        Mark(at(each["base"]), "branch", each["base"], each["id"], at(each["version"])) for each in branches[-_MARKS:]
    ]
    return [*marks, Mark(at(seen), "seen", seen, f"version {seen}")]


# The graph of versions


@dataclass(slots=True)
class Dot:
    """A version in the graph: its row of the timeline, its place and colour, its marks, and what begins after it."""

    row: dict[str, Any]
    y: int
    colour: int
    marks: list[str]
    bow: str = ""
    branches: list[dict[str, Any]] = field(default_factory=list)
    forks: list[dict[str, Any]] = field(default_factory=list)

    @property
    def named(self) -> list[dict[str, Any]]:
        """The forks that are named beside it; more are only counted."""
        return self.forks if len(self.forks) <= _AWAY else []


def graph_of(rows: list[dict[str, Any]], branches: list[dict[str, Any]], forks: list[dict[str, Any]]) -> list[Dot]:
    """A dot for each of these rows of a timeline, the newest first."""
    places = {each["version"]: TOP + at * ROW for at, each in enumerate(rows)}
    found: dict[int, Dot] = {}
    colours = {"": 0}
    colour = 0
    for each in reversed(rows):
        if each["phase"] is not None:
            colour = colours.setdefault(each["phase"], (len(colours) - 1) % _COLOURS + 1)
        found[each["version"]] = _dot(each, places, colour)
    for branch in branches:
        if branch["base"] in found:
            found[branch["base"]].branches.append(branch)
    for fork in forks:
        if fork["version"] in found:
            found[fork["version"]].forks.append(fork)
    return [*found.values()][::-1]


def _dot(row: dict[str, Any], places: dict[int, int], colour: int) -> Dot:
    marks = [f"phase {row['phase'] or 'none'}"] if row["phase"] is not None else []
    marks += [f"checkpoint {row['label']}"] if row["label"] is not None else []
    marks += [f"back to {row['restored']}"] if row["restored"] is not None else []
    y = places[row["version"]]
    dot = Dot(row, y, colour, marks)
    if row["restored"] in places:
        end = places[row["restored"]]
        left = LANE - min(_BOW, 14 + abs(end - y) // 8)
        dot.bow = f"M{LANE} {y} C{left} {y} {left} {end} {LANE} {end}"
    return dot
