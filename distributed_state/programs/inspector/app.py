"""The inspector as an ASGI application, which stands in front of a service's. Law: whoever looks has signed in there.

Design: section 28.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from importlib.resources import files

from starlette.applications import Starlette
from starlette.convertors import Convertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from distributed_state.programs.inspector import access, conversation, finding, fleet, streams
from distributed_state.programs.inspector.access import Tickets
from distributed_state.programs.inspector.api import Api, Refused
from distributed_state.programs.inspector.pages import HEADERS, page, refusal

log = logging.getLogger(__name__)


class _Change(Convertor[str]):
    """What a page may be asked to change."""

    regex = "rollback|fork|erase"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("change", _Change())
PATH = "/inspect"
_TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml", "txt": "text/plain"}
_STATIC = {
    each.name: each.read_bytes() for each in files("distributed_state.programs.inspector").joinpath("static").iterdir()
}
Page = Callable[[Request, Api], Awaitable[Response]]


def inspector(service: ASGIApp, tickets: Tickets | None = None) -> Starlette:
    """The pages of this service's store, to be mounted at PATH. For a ticket of `tickets` there is a key to it."""
    api = Api(service)
    one = "/conversations/{id}"

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

    async def sign_in_page(request: Request, _: Api) -> Response:
        return access.sign_in_page(request)

    pages = Starlette(
        routes=[
            *streams.routes(api, one),
            route("/", finding.find),
            route(one, conversation.read),
            route(one + "/difference", conversation.difference),
            route(one + "/graph", conversation.graph),
            route(one + "/{what:change}", conversation.ask),
            route(one + "/{what:change}", conversation.do, "POST"),
            route("/live", _live),
            route("/fleet", fleet.fleet),
            route("/sign-in", sign_in_page),
            route("/sign-in", access.sign_in, "POST"),
            route("/sign-out", sign_out, "POST"),
            Route("/enter", enter),
            Route("/static/{name}", _static),
        ],
        exception_handlers={HTTPException: _unknown},
    )
    pages.router.redirect_slashes = False  # to a host that the client names, and without TLS
    return pages


async def _live(request: Request, api: Api) -> Response:
    """Events as they come, from now on."""
    await api.get(request, "/v1/caller")
    return page(request, "live", types=request.query_params.get("types", ""))


async def _served(request: Request, api: Api, shown: Page) -> Response:
    try:
        return await shown(request, api)
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
