"""The inspector as an ASGI application, which stands in front of a service's. Law: whoever looks has signed in there.

Design: section 28.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable
from importlib.resources import files

from starlette.applications import Starlette
from starlette.convertors import Convertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from distributed_state.programs.inspector import access, conversation, finding, fleet, live
from distributed_state.programs.inspector.access import Tickets
from distributed_state.programs.inspector.api import Api, Refused
from distributed_state.programs.inspector.pages import HEADERS, page

log = logging.getLogger(__name__)


class _Change(Convertor[str]):
    """What a page may be asked to change."""

    regex = "rollback|fork|erase"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


class _Steering(_Change):
    """What a page may be asked to do with a lease."""

    regex = "end|take-over"


register_url_convertor("change", _Change())
register_url_convertor("steering", _Steering())
PATH = "/inspect"
_TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml", "txt": "text/plain"}
_STATIC = {
    each.name: each.read_bytes() for each in files("distributed_state.programs.inspector").joinpath("static").iterdir()
}
_NAMES = re.compile(rb"^event: .*\n", re.MULTILINE)
Page = Callable[[Request, Api], Awaitable[Response]]


def inspector(service: ASGIApp, tickets: Tickets | None = None) -> Starlette:
    """The pages of this service's store, to be mounted at PATH. For a ticket of `tickets` there is a key to it."""
    api = Api(service)
    one, lease = "/conversations/{id}", "/leases/{kind}/{id}/{token:number}/{what:steering}"

    def route(path: str, shown: Page, method: str = "GET") -> Route:
        async def serve(request: Request) -> Response:
            return await _served(request, api, shown)

        return Route(path, serve, methods=[method])

    async def enter(request: Request) -> Response:
        key = tickets.take(request.query_params.get("ticket", "")) if tickets else None
        return access.sign_in_page(request, "This link was used already.", 403) if key is None else (
            access.entered(request, key)
        )  # fmt: skip

    async def sign_out(request: Request, _: Api) -> Response:
        return await access.sign_out(request)

    return Starlette(
        routes=[
            route("/", finding.find),
            route(one, conversation.read),
            route(one + "/difference", conversation.difference),
            route(one + "/{what:change}", conversation.ask),
            route(one + "/{what:change}", conversation.do, "POST"),
            route("/live", live.live),
            Route("/live/events", _Events(api), methods=["GET"]),
            route(lease, live.ask),
            route(lease, live.do, "POST"),
            route("/fleet", fleet.fleet),
            route("/sign-in", _sign_in_page),
            route("/sign-in", access.sign_in, "POST"),
            route("/sign-out", sign_out, "POST"),
            Route("/enter", enter),
            Route("/static/{name}", _static),
        ],
        exception_handlers={HTTPException: _unknown},
    )


async def _sign_in_page(request: Request, _: Api) -> Response:
    return access.sign_in_page(request)


class _Events:
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


async def _served(request: Request, api: Api, shown: Page) -> Response:
    try:
        return await shown(request, api)
    except Refused as refused:
        if refused.status == 401:
            return _to_sign_in(request)
        return page(request, "refused", status=refused.status, detail=refused.detail)
    except Exception:
        log.exception("a page failed")
        return page(request, "refused", status=500, detail="The page failed; the log says how.")


def _to_sign_in(request: Request) -> Response:
    place = request.scope["root_path"] + "/sign-in"
    if "hx-request" in request.headers:  # htmx would follow a redirect, and put the page into a part of this one
        return Response(b"", 200, HEADERS | {"HX-Redirect": place})
    return RedirectResponse(place, 303, HEADERS)


async def _unknown(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    return page(request, "refused", status=status, detail="There is no such page.")


async def _static(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in _STATIC:
        raise HTTPException(404)
    kind = _TYPES[name.rpartition(".")[2]]
    return Response(_STATIC[name], headers=HEADERS | {"Cache-Control": "max-age=3600"}, media_type=kind)
