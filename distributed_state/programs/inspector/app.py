"""The inspector as an ASGI application in front of a service's. Law: whoever looks has signed in there.

Most routes are pages. The stream of events, exports and single fields are passed on as they come, and nothing of them
is kept here.

Design: section 28.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Awaitable, Callable
from functools import partial
from importlib.resources import files

from starlette.applications import Starlette
from starlette.convertors import Convertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from distributed_state.errors import InvalidValue
from distributed_state.programs.inspector import conversation, store_pages
from distributed_state.programs.inspector.pages import (
    HEADERS,
    Api,
    Refused,
    Tickets,
    entered,
    named,
    page,
    query_of,
    refusal,
    sign_in,
    sign_in_page,
    sign_out,
    token_page,
)
from distributed_state.programs.service import requests
from distributed_state.programs.service.requests import NamedRoute

_AS_FILE = [
    (b"content-disposition", b'attachment; filename="field.json"'),
    *((name.lower().encode(), value.encode()) for name, value in HEADERS.items()),
]
_NAMES = re.compile(rb"^event: .*\n", re.MULTILINE)
log = logging.getLogger(__name__)


class _Word(Convertor[str]):
    """A part of a path that is one of some words."""

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


class _Change(_Word):
    """A change that a page may be asked for."""

    regex = "rollback|fork|erase"


class _Kind(_Word):
    """The kind of record that a lease locks."""

    regex = "conversations|users|tasks"


class _Steering(_Word):
    """An action on a lease that a page may be asked for."""

    regex = "end|take-over"


register_url_convertor("change", _Change())
register_url_convertor("kind", _Kind())
register_url_convertor("steering", _Steering())
PATH = "/inspect"
_TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml", "txt": "text/plain"}
_STATIC = {
    each.name: each.read_bytes() for each in files("distributed_state.programs.inspector").joinpath("static").iterdir()
}
Page = Callable[[Request, Api], Awaitable[Response]]
_ONE, _LEASE = "/conversations/{id}", "/leases/{kind:kind}/{id}/{token:number}/{what:steering}"
_PAGES: tuple[tuple[str, str, Page], ...] = (
    ("GET", "/", store_pages.find),
    ("GET", _ONE, conversation.read),
    ("GET", _ONE + "/difference", conversation.difference),
    ("GET", _ONE + "/graph", conversation.graph),
    ("GET", _ONE + "/{what:change}", conversation.ask),
    ("POST", _ONE + "/{what:change}", conversation.do),
    ("GET", "/live", store_pages.live),
    ("GET", _LEASE, store_pages.ask_about_lease),
    ("POST", _LEASE, store_pages.steer_lease),
    ("GET", "/fleet", store_pages.fleet),
    ("GET", "/sign-in", sign_in_page),
    ("POST", "/sign-in", sign_in),
    ("POST", "/sign-out", sign_out),
)


def inspector(service: ASGIApp, tickets: Tickets | None = None) -> Starlette:
    """The pages of this service's store, to be mounted at PATH. For a ticket of `tickets` there is a key to it."""
    api = Api(service)

    def route(method: str, path: str, shown: Page) -> Route:
        async def serve(request: Request) -> Response:
            return await _served(request, api, shown)

        return NamedRoute(path, serve, methods=[method])

    async def enter(request: Request) -> Response:
        key = tickets.take(request.query_params.get("ticket", "")) if tickets else None
        return token_page(request, "This link was used already.", 403) if key is None else (
            entered(request, key)
        )  # fmt: skip

    pages = Starlette(
        routes=[
            *_streams(api),
            *(route(*each) for each in _PAGES),
            Route("/enter", enter),
            Route("/static/{name}", _static),
        ],
        exception_handlers={HTTPException: _unknown},
    )
    pages.router.redirect_slashes = False  # to a host that the client names, and without TLS
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
        return page(request, "refused", status=500, detail="The page failed; the log says how.")


async def _unknown(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    return page(request, "refused", status=status, detail="There is no such page.")


async def _static(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in _STATIC:
        raise HTTPException(404)
    kind = _TYPES[name.rpartition(".")[2]]
    return Response(_STATIC[name], headers=HEADERS | {"Cache-Control": "max-age=3600"}, media_type=kind)


# Answers that are passed on as they come


def _streams(api: Api) -> list[Route]:
    """Where answers are passed on as they come."""
    apps = {"/live/events": _events, _ONE + "/export": _export, _ONE + "/field": _field}
    return [NamedRoute(path, _Readable(partial(app, api)), methods=["GET"]) for path, app in apps.items()]


class _Readable:
    """An application whose request can be read; others are refused by a page."""

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
    """Answer as the interface does, with every event under one name: browsers drop those of others."""

    async def unnamed(message: Message) -> None:
        if message["type"] == "http.response.body":
            message["body"] = _NAMES.sub(b"", message.get("body", b""))
        await send(message)

    request = Request(scope)
    if scope["method"] == "HEAD":  # the next request on this connection would wait for the end of the stream
        await Response(headers=HEADERS)(scope, receive, send)
        return
    await api.stream(request, "/v1/events", [*query_of(request).items()])(scope, receive, unnamed)


async def _export(api: Api, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with a conversation as a file; a refusal is a page, as a browser goes to it."""
    await _download(api, Request(scope), "export", {}, receive, send)


async def _field(api: Api, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with a field as a file, as it is or was."""
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
