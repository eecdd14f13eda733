"""Forks: another record that begins from the state of this one. Law: what both share is kept once."""

from __future__ import annotations

import secrets
from functools import partial

from starlette.responses import Response

from distributed_state.errors import Conflict
from distributed_state.programs.service import requests, writing
from distributed_state.programs.service.answers import answer
from distributed_state.programs.service.fairness import copying
from distributed_state.programs.service.remembering import OnceOnly
from distributed_state.programs.service.resources import records
from distributed_state.programs.service.resources.shapes import Body, Id, Version
from distributed_state.programs.service.routes import Asked
from distributed_state.records import fork as forks
from distributed_state.records.access import VERSION
from distributed_state.records.context import context_of
from distributed_state.values.model import Scope


class Fork(Body):
    """Another record to begin from this one, now or as it was at a `version`; without an `id` one is made."""

    id: Id | None = None
    version: Version | None = None
    branch: str | None = None


async def fork(scope: Scope, asked: Asked) -> Response:
    """Begin another record from the state of this one."""
    given = requests.body(asked.request, asked.limits, Fork)
    source = context_of(records.handle(asked, scope))
    id = records.begun(asked, given.id) or asked.caller.prefix + secrets.token_hex(16)
    target = context_of(records.of(asked, scope, id))
    await writing.begins(asked, target)
    once = OnceOnly.of(asked, target, source.ref.id)
    entry = await target.read(True, VERSION) if once.key is not None else None
    done = None if entry is None else once.answered(entry)
    if done is None:
        note = None if entry is None else partial(once.remember, entry)
        try:
            async with copying(asked.caller.party):
                version = await forks.fork(source, id, given.version, given.branch, note=note)
        except Conflict:
            # Perhaps the same request, at another worker.
            done = None if once.key is None else once.answered(await target.read(True, VERSION))
            if done is None:
                raise
    version = version if done is None else done.version
    return answer({"id": id, "version": version}, 201, version=version, headers=records.place(scope, id))
