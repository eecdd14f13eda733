"""How long a conversation lives. Law: the server's clock alone says when that is over."""

from __future__ import annotations

from dataclasses import asdict

from starlette.responses import Response

from distributed_state.programs.service import requests, writing
from distributed_state.programs.service.answers import answer
from distributed_state.programs.service.resources import records
from distributed_state.programs.service.resources.shapes import Answer, Body, Span
from distributed_state.programs.service.routes import Asked
from distributed_state.records.access import VERSION
from distributed_state.records.context import context_of
from distributed_state.tiers.changes import Changes
from distributed_state.values import field_ttl


class Lives(Answer):
    """`idle` seconds without a commit, and at most until `until`; null is without end.

    It `ends` then if nobody writes any more. Times are in seconds since 1970 by the store's clock.
    """

    idle: float | None
    until: float | None
    ends: float | None


async def read(asked: Asked) -> Response:
    """How long a conversation lives."""
    session = asked.store.session(records.id_of(asked))
    await records.look(session, "session", False, VERSION)
    return answer(asdict(await session.lifetime()))


class Live(Body):
    """It ends `idle` seconds after the last commit, and `lifetime` seconds from now at the latest; null: never."""

    idle: Span | None = None
    lifetime: Span | None = None

    def build(self, changes: Changes) -> None:
        """Put it into a change."""
        changes.set_lifetime(field_ttl.span_ms("idle", self.idle), field_ttl.span_ms("lifetime", self.lifetime))


async def put(asked: Asked) -> Response:
    """Let a conversation end by itself, in place of what was set before."""
    given = requests.body(asked.request, asked.limits, Live)
    session = asked.store.session(records.id_of(asked))
    context_of(session).allow("write", None)
    return writing.written(await writing.write(asked, session, writing.Write("lifetime", given.build)))
