"""Answers that are passed on as they come. Law: nothing of them is kept here.

Design: section 28.
"""

from __future__ import annotations

import json
import re

from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from distributed_state.programs.inspector.api import Api, Refused, quoted
from distributed_state.programs.inspector.pages import refusal

_NAMES = re.compile(rb"^event: .*\n", re.MULTILINE)


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
        await self._api.stream(request, "/v1/events", request.query_params.multi_items())(scope, receive, unnamed)


class Export:
    """A conversation as a file to download."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as the interface does; a refusal is a page, as a browser goes to it."""
        status, problem = 0, b""

        async def passed(message: Message) -> None:
            nonlocal status, problem
            if message["type"] == "http.response.start":
                status = message["status"]
            if status < 400:
                await send(message)
            else:
                problem += message.get("body", b"")

        request = Request(scope)
        place = f"/v1/conversations/{quoted(request.path_params['id'])}/export"
        await self._api.stream(request, place, ())(scope, receive, passed)
        if status >= 400:
            await refusal(request, Refused(status, json.loads(problem)["detail"]))(scope, receive, send)
