"""The inspector as an ASGI application in front of a service's. Law: every visitor has signed in to the service.

Most routes are pages. The stream of events, exports and single fields are passed on as they arrive, and are not kept
here.

A page about the whole store lists the interface's answers and does no searches of its own; a failing part does not hide
other parts. A lease is named by its fencing token, so that an action ends or takes over exactly the displayed lease.

Design: section 28.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import Awaitable, Callable
from functools import partial
from importlib.resources import files
from typing import Any, NamedTuple
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.convertors import Convertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from distributed_state.errors import InvalidValue
from distributed_state.programs.inspector import conversation, records, schedules, usage
from distributed_state.programs.inspector.pages import (
    HEADERS,
    HELD,
    Api,
    Refused,
    Tickets,
    age,
    conversation_page,
    digest,
    entered,
    form,
    moment,
    named,
    page,
    query_of,
    refusal,
    sign_in,
    sign_in_page,
    sign_out,
    token_page,
)
from distributed_state.programs.inspector.values import marked
from distributed_state.programs.service import requests
from distributed_state.programs.service.answers import PageFiles
from distributed_state.programs.service.requests import NamedRoute
from distributed_state.values import as_text

# Conversations
_ROWS = 50
_NAMED = ("user", "tag", "phase", "held")
_UNITS = ("newer", "older", "mib")
_NUMBER = re.compile(r"\d{1,9}(\.\d{1,6})?", re.ASCII)

# The fleet
_PARTS = ("replicas", "partitions", "findings", "tenants")
# A doctor's findings about a Redis server; with several servers the address precedes the name.
_WARM = {"server", "version", "role", "eviction", "persistence", "memory", "connections", "cluster", "durability"}

_LATE, _FULL = 10.0, 0.25  # seconds that a commit waits for SQL, and the part of a journal that is filled

# Live
_LAST, _VERSIONS = 8, 4  # conversations that changed last, and versions of each that are looked at
_LATELY = 600.0  # seconds

# Leases
_SHOWN = 50
_KINDS = {"session": "conversations", "user": "users", "task": "tasks"}
_SCOPES = {kind: scope for scope, kind in _KINDS.items()}


# Conversations


async def find(request: Request, api: Api) -> Response:
    """The last changed conversations, or those that match; those whose ids begin with the text, or that contain it."""
    query = query_of(request)
    asked = {name: query.get(name, "") for name in ("q", *_NAMED, *_UNITS, "after", "id")}
    if asked["id"]:
        return RedirectResponse(conversation_page(asked["id"], request.scope["root_path"]), 303, HEADERS)
    mine = (await api.get(request, "/v1/caller")).json["prefix"]
    prefix = asked["q"] if not asked["q"] or asked["q"].startswith(mine) else mine + asked["q"]
    wanted: dict[str, Any] = {name: asked[name] for name in (*_NAMED, "after")} | {"limit": _ROWS, "prefix": prefix}
    wanted |= {name: value for name, value in _units_of_people(asked).items() if value is not None}
    # A held conversation has usually just begun, and may not be archived yet.
    wanted |= {"fresh": "true"} if asked["held"] else {}
    found = await api.get(request, "/v1/conversations", wanted)
    searched = asked["q"] and not asked["after"]
    hits, problem = await _searched(request, api, asked["q"], asked["user"]) if searched else ([], "")
    # For a single tenant they are sorted by id.
    by_id = bool(asked["q"] or asked["tag"] or mine)
    return page(
        request, "find", asked=asked, rows=found.json["conversations"], hits=hits, problem=problem, by_id=by_id,
        filtered=any(asked[name] for name in (*_NAMED, *_UNITS)),
        following=found.following and _again(asked, found.following),
    )  # fmt: skip


def _units_of_people(asked: dict[str, str]) -> dict[str, Any]:
    """Convert the form's hours and MiB to the interface's seconds and bytes."""
    now = time.time()
    newer, older, mib = _decimal(asked, "newer"), _decimal(asked, "older"), _decimal(asked, "mib")
    return {
        "changed_since": None if newer is None else max(0.0, now - newer * 3600),
        "changed_before": None if older is None else max(0.0, now - older * 3600),
        "larger_than": None if mib is None else int(mib * 2**20),
    }


def _decimal(asked: dict[str, str], name: str) -> float | None:
    text = asked[name]
    if not text:
        return None
    if not _NUMBER.fullmatch(text):
        raise Refused(422, f"{name} must be a number such as 0.5 or 24, not {text!r:.40}")
    return float(text)


def _again(asked: dict[str, str], following: dict[str, str]) -> dict[str, str]:
    """The query of the next page: the same filters, and the position after this page."""
    kept = {name: asked[name] for name in ("q", *_NAMED, *_UNITS) if asked[name]}
    return kept | {"after": following["after"]}


async def _searched(request: Request, api: Api, text: str, user: str) -> tuple[list[dict[str, Any]], str]:
    """The best hit in each conversation that contains a text, with the number of its others; or why there are none."""
    given: dict[str, Any] = {"query": text, "limit": _ROWS, "scope": "session"} | ({"user": user} if user else {})
    try:
        hits = (await api.ask(request, "POST", "/v1/search", given=given)).json["hits"]
    except Refused as refused:
        if refused.status in (401, 403, 429):
            raise
        return [], refused.detail
    found: dict[str, dict[str, Any]] = {}
    for hit in hits:
        if hit["id"] in found:
            found[hit["id"]]["more"] += 1
        else:
            found[hit["id"]] = hit | {"more": 0, "text": marked(hit["text"], text), "place": _place_of(hit)}
    return [*found.values()], ""


def _place_of(hit: dict[str, Any]) -> str:
    """Where on its conversation's page a hit is."""
    if hit["kind"] == "message":
        return f"?before={hit['number'] + 1}#m{hit['number']}"
    return "#fields" if hit["kind"] == "field" else ""


# The fleet


async def fleet(request: Request, api: Api) -> Response:
    """Replicas, partitions, a doctor's findings and the load of tenants."""
    replicas, partitions, findings, tenants = await asyncio.gather(*(_part(request, api, each) for each in _PARTS))
    rows, found = replicas["rows"], findings["rows"]
    return page(
        request, "fleet", replicas=replicas, partitions=partitions, findings=findings, tenants=tenants,
        tiers=_tiers(rows, found), losses=_losses(rows, found), figures=_figures(rows, partitions["rows"]),
        late=[each for each in partitions["rows"] if _needs_attention(each)],
    )  # fmt: skip


class Figure(NamedTuple):
    """A figure of the fleet: a number, or a counter whose rate is shown once the page has read it twice."""

    name: str
    value: float
    shown: str
    counter: bool = False


def _figures(replicas: list[dict[str, Any]], partitions: list[dict[str, Any]]) -> list[Figure]:
    def total(rows: list[dict[str, Any]], name: str) -> int:
        return sum(each.get(name, 0) for each in rows)

    stats = [each["stats"] for each in replicas]
    commits, waiting = total(partitions, "offset"), total(partitions, "waiting")
    lag = max((each["lag"] or 0.0 for each in partitions), default=0.0)
    fill = max((each["fill"] for each in partitions), default=0.0)
    reads = total(stats, "hot_hits") + total(stats, "hot_misses")
    return [
        Figure("Commits", commits, f"{commits} in total", counter=True),
        Figure("Reads", reads, f"{reads} in total", counter=True),
        Figure("Archived", total(stats, "archived"), f"{total(stats, 'archived')} in total", counter=True),
        Figure("Unarchived commits", waiting, str(waiting)),
        Figure("Oldest of them", lag, age(lag)),
        Figure("Fullest journal", fill, f"{fill:.0%}"),
        Figure("Held leases", total(stats, "leases"), str(total(stats, "leases"))),
    ]


def _needs_attention(partition: dict[str, Any]) -> bool:
    """Whether a partition cannot be archived, is late, or has a journal that fills up."""
    return bool(partition["diverged"] or (partition["lag"] or 0.0) >= _LATE or partition["fill"] >= _FULL)


async def _part(request: Request, api: Api, name: str) -> dict[str, Any]:
    """The rows of one part, or the reason why they are missing."""
    found, problem = await api.part(request, f"/v1/{name}")
    return {"rows": found[name] if found else [], "problem": problem}


class Tier(NamedTuple):
    """One of the three tiers: the number of findings that need attention, and a short description."""

    name: str
    wrong: int
    facts: str


def _tiers(replicas: list[dict[str, Any]], findings: list[dict[str, Any]]) -> list[Tier]:
    """The hot tier from the replicas' own figures; warm and cold from a doctor's findings about their servers."""
    hits, misses, records, size = (
        sum(each["stats"].get(f"hot_{name}", 0) for each in replicas) for name in ("hits", "misses", "entries", "bytes")
    )
    silent = sum("link_silence_ms" in each["stats"] and not each["stats"]["link_up"] for each in replicas)
    answered = f"{hits / (hits + misses):.0%} of {hits + misses} reads answered, " if hits + misses else ""
    hot = Tier(
        "Hot, in the replicas", silent, f"{answered}{records} record{'s' * (records != 1)}, {size / 2**20:.1f} MiB"
    )
    cold = [each for each in findings if each["name"].startswith("sql") or each["name"] in ("branches", "index")]
    warm = [each for each in findings if each not in cold and each["name"].rpartition(" ")[2] in _WARM]
    return [hot, _tier("Warm, Redis", warm), _tier("Cold, SQL", cold)] if findings else [hot]


def _tier(name: str, findings: list[dict[str, Any]]) -> Tier:
    # The SQL database's address is shown below, with all findings.
    shown = [each for each in findings if each["name"] != "sql database"]
    facts = (f"{each['name'].removeprefix('sql ')}: {each['found']}" for each in shown)
    return Tier(name, sum(not each["ok"] for each in findings), "; ".join(facts))


def _losses(replicas: list[dict[str, Any]], findings: list[dict[str, Any]]) -> list[tuple[str, str, bool]]:
    """List losses, branches and quarantined entries, each with whether it needs attention."""
    found = {each["name"]: each for each in findings}
    rows = []
    for kind, what in (
        ("complete", "Partitions started again after a restart of Redis, nothing missing"),
        ("restarted", "Partitions started again because Redis lost data"),
    ):
        count = sum(each["stats"].get(kind, 0) for each in replicas)
        last = max((each["stats"].get(f"{kind}_at", 0) for each in replicas), default=0)
        text = f"{count}, the last {moment(last)} UTC" if count else "none reported by a running replica"
        rows.append((what, text, bool(count) and kind == "restarted"))
    for name, what in ("branches", "Records with branches"), ("sql quarantine", "Entries refused by SQL"):
        if name in found:
            rows.append((what, found[name]["found"], not found[name]["ok"]))
    return rows


# Events and leases, live


async def live(request: Request, api: Api) -> Response:
    """Events as they happen, from now on, and the held leases."""
    caller, query = (await api.get(request, "/v1/caller")).json, query_of(request)
    part = request.headers.get("hx-target")  # the part that a page reads again
    held = await _held(request, api) if "admin" in caller["rights"] and part != "last" else None
    last = await _last(request, api, caller["prefix"]) if part != "held" else []
    return page(request, "live", types=query.get("types", ""), after=query.get("after", ""), held=held, last=last)


async def _last(request: Request, api: Api, tenant: str) -> list[dict[str, Any]]:
    """The conversations that changed last, each with its last version in which something was said."""

    async def said_in(row: dict[str, Any]) -> dict[str, Any]:
        found, _ = await api.part(request, named("/v1/conversations/{}/timeline", row["id"]), {"limit": _VERSIONS})
        versions = found["versions"] if found else []
        return row | {"last": next((each for each in versions if each["said"] or each["tools"]), None)}

    # Those of a single tenant are listed by id.
    wanted = {"limit": _ROWS, "changed_since": time.time() - _LATELY} if tenant else {"limit": _LAST}
    rows = (await api.get(request, "/v1/conversations", wanted)).json["conversations"]
    rows = sorted((each for each in rows if not each["deleted"]), key=lambda each: -float(each["updated"]))[:_LAST]
    return [each for each in await asyncio.gather(*map(said_in, rows)) if each["last"]]


async def _held(request: Request, api: Api) -> dict[str, Any]:
    """A page of the held leases, or the reason why they cannot be listed."""
    query = {"limit": _SHOWN, "after": query_of(request).get("after")}
    found, problem = await api.part(request, "/v1/leases", query)
    if not found:
        return {"rows": [], "after": None, "time": 0.0, "problem": problem}
    mine = _mine(request)
    rows = [_row(each, mine, request.scope["root_path"]) for each in found["leases"]]
    return {"rows": rows, "after": found["after"], "time": found["time"], "problem": ""}


def _row(lease: dict[str, Any], mine: str, root: str) -> dict[str, Any]:
    """A lease, the path of its page ("" if its kind of record has none), and whether it is our own."""
    kind = _KINDS.get(lease["scope"])
    place = _page(root, kind, lease["record_id"], lease["token"]) if kind else ""
    return lease | {"place": place, "mine": mine == str(lease["token"])}


def _page(root: str, kind: str, id: str, token: int) -> str:
    return as_text.path(root, f"/leases/{kind}/{{}}/{token}", id)


async def ask_about_lease(request: Request, api: Api) -> Response:
    """The page that explains the action on a lease, with the button for it."""
    kind, id, token = _named(request)
    scope = _SCOPES[kind]
    # The cursor is the position just before the lease in the list.
    query = {"scope": scope, "prefix": id, "after": f"{token}.{scope}", "limit": 1}
    found = (await api.get(request, "/v1/leases", query)).json
    rows = [each for each in found["leases"] if (each["record_id"], each["token"]) == (id, token)]
    what = request.path_params["what"]
    lease = rows[0] if rows else None
    place = _page(request.scope["root_path"], kind, id, token)
    return page(request, "lease", what=what, id=id, place=place, lease=lease, time=found["time"])


async def steer_lease(request: Request, api: Api) -> Response:
    """End a lease, or hold the record in place of its holder."""
    kind, id, token = _named(request)
    given, root = await form(request), request.scope["root_path"]
    record = named(f"/v1/{kind}/{{}}", id)
    if request.path_params["what"] == "end":
        if not (await api.ask(request, "DELETE", f"{record}/lease/{token}")).json["released"]:
            raise Refused(409, "this lease is no longer held, so nothing was changed")
        response = RedirectResponse(f"{root}/live", 303, HEADERS)
        if _mine(request) == str(token):
            response.delete_cookie(HELD, path=root, httponly=True, samesite="strict")
        return response
    ttl = _seconds(given.get("seconds", ""))
    taken = (await api.ask(request, "PUT", f"{record}/lease/{token}", given={"ttl": ttl})).json
    response = RedirectResponse(f"{root}/live", 303, HEADERS)
    # Actions of these pages on this record use the lease until it ends.
    kept = f"{taken['token']} {taken['lease']} {digest(record)}"
    secure = "https" in (request.scope["scheme"], request.headers.get("x-forwarded-proto"))
    response.set_cookie(HELD, quote(kept), max_age=ttl, path=root, secure=secure, httponly=True, samesite="strict")
    return response


def _named(request: Request) -> tuple[str, str, int]:
    """The kind, id and token in the path."""
    kind, id, token = (request.path_params[name] for name in ("kind", "id", "token"))
    return kind, id, token


def _seconds(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or not 1 <= int(text[:4]) <= 600:
        raise Refused(422, f"a lease can be held for 1 to 600 seconds, not {text!r:.40}")
    return int(text)


def _mine(request: Request) -> str:
    """The token of the lease that this browser holds, "" without one."""
    return request.cookies.get(HELD, "").partition("%20")[0]


_AS_FILE = [
    (b"content-disposition", b'attachment; filename="field.json"'),
    *((name.lower().encode(), value.encode()) for name, value in HEADERS.items()),
]
_NAMES = re.compile(rb"^event: .*\n", re.MULTILINE)
log = logging.getLogger(__name__)


class _Word(Convertor[str]):
    """A part of a path that must be one of several words."""

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


class _Change(_Word):
    """A change that a page may request."""

    regex = "rollback|fork|erase"


class _Kind(_Word):
    """The kind of record that a lease locks."""

    regex = "conversations|users|tasks"


class _Others(_Word):
    """A kind of record that is not a conversation."""

    regex = "users|tasks"


class _Steering(_Word):
    """An action on a lease that a page may request."""

    regex = "end|take-over"


register_url_convertor("change", _Change())
register_url_convertor("kind", _Kind())
register_url_convertor("others", _Others())
register_url_convertor("steering", _Steering())
PATH = "/inspect"
_USED = "This one-time link was already used. Run `distributed-state inspect` again for a new one."
_STATIC = PageFiles(
    files("distributed_state.programs.inspector").joinpath("static"), HEADERS | {"Cache-Control": "max-age=3600"}
)
Page = Callable[[Request, Api], Awaitable[Response]]
_ONE, _LEASE = "/conversations/{id}", "/leases/{kind:kind}/{id}/{token:number}/{what:steering}"
_PAGES: tuple[tuple[str, str, Page], ...] = (
    ("GET", "/", find),
    ("GET", _ONE, conversation.read),
    ("GET", _ONE + "/difference", conversation.difference),
    ("GET", _ONE + "/graph", conversation.graph),
    ("GET", _ONE + "/inbox", conversation.inbox),
    ("POST", _ONE + "/stop", conversation.stop),
    ("GET", _ONE + "/schedule", schedules.one),
    ("POST", _ONE + "/answer", schedules.answer),
    ("POST", _ONE + "/retry", schedules.retry),
    ("POST", _ONE + "/cancel-wake", schedules.cancel_wake),
    ("POST", "/stuck/retry", schedules.retry_all),
    ("GET", _ONE + "/{what:change}", conversation.ask),
    ("POST", _ONE + "/{what:change}", conversation.do),
    ("GET", "/questions", schedules.questions),
    ("GET", "/stuck", schedules.stuck),
    ("GET", "/usage", usage.usage),
    ("GET", "/live", live),
    ("GET", _LEASE, ask_about_lease),
    ("POST", _LEASE, steer_lease),
    ("GET", "/fleet", fleet),
    ("GET", "/users", records.users),
    ("GET", "/tasks", records.tasks),
    ("GET", "/{kind:others}/{id}", records.one),
    ("GET", "/tokens", records.tokens),
    ("POST", "/tokens/{token}/revoke", records.revoke),
    ("GET", "/sign-in", sign_in_page),
    ("POST", "/sign-in", sign_in),
    ("POST", "/sign-out", sign_out),
)


def inspector(service: ASGIApp, tickets: Tickets | None = None, *, title: str = "") -> Starlette:
    """The pages of this service's store, to be mounted at PATH. A ticket of `tickets` signs a browser in.

    `title` names the installation on each page, such as "Production, Frankfurt".
    """
    api = Api(service)

    def route(method: str, path: str, shown: Page) -> Route:
        async def serve(request: Request) -> Response:
            return await _served(request, api, shown)

        return NamedRoute(path, serve, methods=[method])

    async def enter(request: Request) -> Response:
        key = tickets.take(request.query_params.get("ticket", "")) if tickets else None
        return token_page(request, _USED, 403) if key is None else (
            entered(request, key)
        )  # fmt: skip

    pages = Starlette(
        routes=[
            *_streams(api),
            *(route(*each) for each in _PAGES),
            Route("/enter", enter),
            Route("/static/{name}", _STATIC.serve),
        ],
        exception_handlers={HTTPException: _unknown},
    )
    pages.state.title = title
    pages.router.redirect_slashes = False  # it would redirect to a host named by the client, without TLS
    return pages


async def _served(request: Request, api: Api, shown: Page) -> Response:
    try:
        requests.check_path(request)
        return await shown(request, api)
    except InvalidValue as error:
        return refusal(request, Refused(422, str(error)))
    except Refused as refused:
        return refusal(request, refused)
    except Exception:
        log.exception("a page failed")
        return page(request, "refused", status=500, detail="The page failed; see the log of the service.")


async def _unknown(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    return page(request, "refused", status=status, detail="There is no such page.")


# Answers that are passed on as they arrive


def _streams(api: Api) -> list[Route]:
    """The routes whose answers are passed on as they arrive."""
    apps = {
        "/live/events": _events, _ONE + "/output": _output, _ONE + "/export": _export, _ONE + "/field": _field,
    }  # fmt: skip
    return [NamedRoute(path, _Readable(partial(app, api)), methods=["GET"]) for path, app in apps.items()]


class _Readable:
    """An application that receives only readable requests; others are refused with a page."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or refuse."""
        app, request = self._app, Request(scope)
        try:
            requests.check_path(request)
            requests.pairs(request)
        except InvalidValue as error:
            app = refusal(request, Refused(422, str(error)))
        await app(scope, receive, send)


async def _events(api: Api, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer as the interface does, but without event names: browsers drop events of unknown names."""

    async def unnamed(message: Message) -> None:
        if message["type"] == "http.response.body":
            message["body"] = _NAMES.sub(b"", message.get("body", b""))
        await send(message)

    request = Request(scope)
    await _follow(api, request, "/v1/events", query_of(request), receive, unnamed)


async def _output(api: Api, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the output of a conversation's turns, and with what else happens to it."""
    request = Request(scope)
    path = named("/v1/conversations/{}/output", request.path_params["id"])
    await _follow(api, request, path, {"notices": "true"}, receive, send)


async def _follow(api: Api, request: Request, path: str, query: dict[str, str], receive: Receive, send: Send) -> None:
    app: ASGIApp = api.stream(request, path, [*query.items()])
    if request.method == "HEAD":  # otherwise the next request on this connection waits for the stream's end
        app = Response(headers=HEADERS)
    await app(request.scope, receive, send)


async def _export(api: Api, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with a conversation as a file; a refusal is a page, because a browser shows it."""
    await _download(api, Request(scope), "export", {}, receive, send)


async def _field(api: Api, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with a field's present or earlier value as a file."""
    request = Request(scope)
    asked = query_of(request)
    field = named("fields/{}", asked.get("name", ""))
    await _download(api, request, field, {"version": asked.get("version", "")}, receive, send)


async def _download(
    api: Api, request: Request, part: str, query: dict[str, str], receive: Receive, send: Send
) -> None:  # fmt: skip
    status, problem = 0, b""

    async def passed(message: Message) -> None:
        nonlocal status, problem
        if message["type"] == "http.response.start":
            status = message["status"]
            named = {name.lower() for name, _ in message["headers"]}
            message["headers"] = [*message["headers"], *(each for each in _AS_FILE if each[0] not in named)]
        if status < 400:
            await send(message)
        else:
            problem += message.get("body", b"")

    place = f"{named('/v1/conversations/{}', request.path_params['id'])}/{part}"
    await api.stream(request, place, [*query.items()])(request.scope, receive, passed)
    if status >= 400:
        found = refusal(request, Refused(status, json.loads(problem)["detail"]))
        await found(request.scope, receive, send)
