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

from distributed_state.errors import InvalidValue
from distributed_state.programs.inspector import access, conversation, finding, fleet, live, streams
from distributed_state.programs.inspector.access import Tickets
from distributed_state.programs.inspector.api import Api, Refused
from distributed_state.programs.inspector.pages import HEADERS, page, refusal
from distributed_state.programs.service import requests
from distributed_state.programs.service.requests import NamedRoute

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


class _Kind(_Change):
    """The kind of record that a lease locks."""

    regex = "conversations|users|tasks"


register_url_convertor("change", _Change())
register_url_convertor("kind", _Kind())
register_url_convertor("steering", _Steering())
PATH = "/inspect"
_TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml", "txt": "text/plain"}
_STATIC = {
    each.name: each.read_bytes() for each in files("distributed_state.programs.inspector").joinpath("static").iterdir()
}
Page = Callable[[Request, Api], Awaitable[Response]]


async def _sign_out(request: Request, _: Api) -> Response:
    return await access.sign_out(request)


async def _sign_in_page(request: Request, _: Api) -> Response:
    return access.sign_in_page(request)


_ONE, _LEASE = "/conversations/{id}", "/leases/{kind:kind}/{id}/{token:number}/{what:steering}"
_PAGES: tuple[tuple[str, str, Page], ...] = (
    ("GET", "/", finding.find),
    ("GET", _ONE, conversation.read),
    ("GET", _ONE + "/difference", conversation.difference),
    ("GET", _ONE + "/graph", conversation.graph),
    ("GET", _ONE + "/{what:change}", conversation.ask),
    ("POST", _ONE + "/{what:change}", conversation.do),
    ("GET", "/live", live.live),
    ("GET", _LEASE, live.ask),
    ("POST", _LEASE, live.do),
    ("GET", "/fleet", fleet.fleet),
    ("GET", "/sign-in", _sign_in_page),
    ("POST", "/sign-in", access.sign_in),
    ("POST", "/sign-out", _sign_out),
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
        return access.sign_in_page(request, "This link was used already.", 403) if key is None else (
            access.entered(request, key)
        )  # fmt: skip

    pages = Starlette(
        routes=[
            *streams.routes(api, _ONE),
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
