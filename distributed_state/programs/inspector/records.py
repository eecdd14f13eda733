"""Users, tasks and access tokens. Law: a page shows what the interface answers, and nothing is changed without a form.

Design: section 28.
"""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from distributed_state.programs.inspector.conversation import described, number_of, optional
from distributed_state.programs.inspector.pages import HEADERS, Api, form, named, page, query_of
from distributed_state.programs.inspector.values import trees

_ROWS = 50
_VERSIONS = 50


async def users(request: Request, api: Api) -> Response:
    """The users that have a record of their own."""
    return await _listed(request, api, "users")


async def tasks(request: Request, api: Api) -> Response:
    """The tasks."""
    return await _listed(request, api, "tasks")


async def _listed(request: Request, api: Api, kind: str) -> Response:
    query = query_of(request)
    asked = {name: query.get(name, "") for name in ("prefix", "user", "after")}
    found = (await api.get(request, f"/v1/{kind}", asked | {"limit": _ROWS})).json
    return page(request, "records", kind=kind, asked=asked, rows=found[kind], following=found["after"])


async def one(request: Request, api: Api) -> Response:
    """A user or a task as it is or was, with its versions."""
    kind, id, version = request.path_params["kind"], request.path_params["id"], number_of(request, "version")
    place, top = named(f"/v1/{kind}/{{}}", id), number_of(request, "top")
    below = {"before": None if top is None else top + 1, "limit": _VERSIONS}
    state, versions = await asyncio.gather(
        api.get(request, f"{place}/overview", {"version": version, "limit": 0}),
        optional(api.get(request, f"{place}/timeline", below)),
    )
    rows = described(versions.json["versions"]) if versions else []
    now = state.json
    fields = trees(now["fields"], now.get("bytes"))
    return page(request, "record", kind=kind, id=id, state=now, version=version, fields=fields, history=rows)


async def tokens(request: Request, api: Api) -> Response:
    """The access tokens, without their texts."""
    found = (await api.get(request, "/v1/tokens", {"limit": _ROWS, "after": query_of(request).get("after")})).json
    return page(request, "tokens", rows=found["tokens"], following=found["after"])


async def revoke(request: Request, api: Api) -> Response:
    """Revoke a token, and those that were made with it."""
    await form(request)
    await api.ask(request, "DELETE", named("/v1/tokens/{}", request.path_params["token"]))
    return RedirectResponse(f"{request.scope['root_path']}/tokens", 303, HEADERS)
