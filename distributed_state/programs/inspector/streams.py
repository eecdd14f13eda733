"""Answers that are passed on as they come. Law: nothing of them is kept here.

Design: section 28.
"""

from __future__ import annotations

import json
import re

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from distributed_state.errors import InvalidValue
from distributed_state.programs.inspector.api import Api, Refused, named, query_of
from distributed_state.programs.inspector.pages import HEADERS, refusal
from distributed_state.programs.service import requests
from distributed_state.programs.service.requests import NamedRoute

_AS_FILE = [
    (b"content-disposition", b'attachment; filename="field.json"'),
    *((name.lower().encode(), value.encode()) for name, value in HEADERS.items()),
]
_NAMES = re.compile(rb"^event: .*\n", re.MULTILINE)


def routes(api: Api, one: str) -> list[Route]:
    """Where they are; `one` is the path of a conversation."""
    apps: dict[str, ASGIApp] = {"/live/events": Events(api), one + "/export": Export(api), one + "/field": Field(api)}
    return [NamedRoute(path, _Readable(app), methods=["GET"]) for path, app in apps.items()]


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


class Events:
    """The stream of events, passed on to a page."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as the interface does, with every event under one name: a browser hears those alone that it names."""

        async def unnamed(message: Message) -> None:
            if message["type"] == "http.response.body":
                message["body"] = _NAMES.sub(b"", message.get("body", b""))
            await send(message)

        request = Request(scope)
        if scope["method"] == "HEAD":  # the next request on this connection would wait for the end of the stream
            await Response(headers=HEADERS)(scope, receive, send)
            return
        await self._api.stream(request, "/v1/events", [*query_of(request).items()])(scope, receive, unnamed)


class Export:
    """A conversation as a file to download."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as the interface does; a refusal is a page, as a browser goes to it."""
        await _download(self._api, Request(scope), "export", {}, receive, send)


class Field:
    """A field as a file to download, as it is or was."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As above."""
        request = Request(scope)
        asked = query_of(request)
        field = named("fields/{}", asked.get("name", ""))
        await _download(self._api, request, field, {"version": asked.get("version", "")}, receive, send)


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
