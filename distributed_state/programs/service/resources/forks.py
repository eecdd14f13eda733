"""Forks: another record that begins from the state of this one. Law: what both share is kept once."""

from __future__ import annotations

import secrets

from starlette.responses import Response

from distributed_state.programs.service import requests
from distributed_state.programs.service.answers import answer
from distributed_state.programs.service.resources import records
from distributed_state.programs.service.resources.shapes import Body, Id, Version
from distributed_state.programs.service.routes import Asked
from distributed_state.values.model import Scope


class Fork(Body):
    """Another record to begin from this one, now or as it was; without an `id` one is made."""

    id: Id | None = None
    version: Version | None = None
    branch: str | None = None


async def fork(scope: Scope, asked: Asked) -> Response:
    """Begin another record from the state of this one."""
    given = requests.body(asked.request, asked.limits, Fork)
    id = asked.caller.prefix + secrets.token_hex(16) if given.id is None else records.made(given.id)
    version = await records.handle(asked, scope).fork(
        records.within(asked, id), version=given.version, branch=given.branch
    )
    parent = asked.request.url.path.rpartition("/")[0].rpartition("/")[0]
    place = {"Location": f"{parent}/{records.quoted(id)}"}
    return answer({"id": id, "version": version}, 201, version=version, headers=place)
