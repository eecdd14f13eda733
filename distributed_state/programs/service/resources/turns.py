"""Turns of a conversation. Law: a turn is one commit, and a repeated one is answered as the first was."""

from __future__ import annotations

from typing import Any

from pydantic import Field
from starlette.responses import Response

from distributed_state.errors import InvalidValue, NotFound
from distributed_state.programs.service import conditions, remembering, requests
from distributed_state.programs.service.answers import answer
from distributed_state.programs.service.remembering import DIGEST
from distributed_state.programs.service.resources import records
from distributed_state.programs.service.resources.shapes import (
    Answer,
    Body,
    Encoded,
    Messages,
    Run,
    Values,
    together,
)
from distributed_state.programs.service.routes import Asked
from distributed_state.values.turn_times import TimedRun

_TTL = 10.0  # the turn of a worker that died mid-way keeps others away for so many seconds


class Turn(Body):
    """What happens in a turn: messages are added, fields set, the phase moves by an event.

    `request_id` is what the header Idempotency-Key is, for clients that cannot send it. `runs` are the tools and models
    that the client ran for it, `seconds` how long it was at it, for the times that the turn's version shows.
    """

    request_id: str | None = None
    messages: Messages | None = None
    set: Values | None = None
    bytes: Encoded | None = None
    event: str | None = None
    runs: list[Run] = Field(default_factory=list)
    seconds: float = Field(0.0, ge=0, le=1e9)


class Turned(Answer):
    """The version that the turn became. `outcome` is what is remembered of a request that has a key."""

    version: int
    repeated: bool
    outcome: Any


async def turn(asked: Asked) -> Response:
    """Serve one request to a conversation."""
    given = requests.body(asked.request, asked.limits, Turn)
    fields = together(given.set, given.bytes)
    key = remembering.key_of(asked)
    if key is not None and given.request_id not in (None, key):
        raise InvalidValue("request_id and Idempotency-Key are two: give one")
    key = given.request_id if key is None else key
    if not (given.messages or fields or given.event):
        raise InvalidValue("a turn has messages, fields to set, or an event")
    wanted = conditions.of_write(asked.request)
    noted = {} if key is None else {DIGEST: requests.digest(asked.request)}
    session = records.written_by(asked, "session")
    async with session.turn(request_id=key, wait=asked.limits.busy, ttl=_TTL) as now:
        if not now.repeated:
            wanted.check(now.version)
            if now.version == 0:
                raise NotFound(f"there is no conversation {session.id!r:.200}")
            now.reported(given.seconds, [TimedRun(each.kind, each.name, each.seconds) for each in given.runs])
            now.append(*(given.messages or ()))
            now.update(fields)
            if given.event is not None:
                now.transition(given.event)
            # Nobody else writes while the turn runs, so its commit is the next version.
            now.outcome = {"version": now.version + 1, "phase": now.phase, **noted}
    outcome = now.outcome
    if now.repeated and key is not None:
        remembering.same_request(outcome, noted[DIGEST], key)
    # Not from the outcome: a worker of the library's leaves whatever it likes there.
    version = now.answered_version if now.written is None else now.written.version
    if isinstance(outcome, dict):
        outcome = {name: value for name, value in outcome.items() if name != DIGEST}
    return answer({"version": version, "repeated": now.repeated, "outcome": outcome}, version=version)
