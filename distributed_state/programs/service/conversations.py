"""What can be asked about conversations. Law: a request is one call of the store's, so it happened or it did not."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from starlette.responses import Response

from distributed_state.errors import Deleted, InvalidValue, NotFound
from distributed_state.programs.service import requests
from distributed_state.programs.service.answers import answer
from distributed_state.programs.service.routes import Asked
from distributed_state.records import messages as shown_messages
from distributed_state.records.access import MESSAGES, MOVES
from distributed_state.records.context import context_of
from distributed_state.values import bytes_as_text
from distributed_state.values.model import PHASE

_TURN_TTL = 10.0  # the turn of a worker that died mid-way keeps others away for so many seconds


async def create(asked: Asked) -> Response:
    """POST /conversations {"id"?, "user"?, "fields"?, "bytes"?}"""
    given = await requests.body(asked.request, asked.limits.body, "id", "user", "fields", "bytes")
    id = requests.text(given, "id")
    user = requests.text(given, "user")
    fields = requests.values(given, "fields")
    if id is not None and ("/" in id or id in (".", "..")):
        # It would be another path, whatever escapes it: servers and proxies decode and tidy up paths.
        raise InvalidValue(f"id {id!r:.80}: has no place in a path of HTTP; leave out '/'")
    session = asked.store.session(id, user=user)
    version = await session.create(fields)
    created = answer({"id": session.id, "version": version}, 201)
    return created


async def turn(asked: Asked) -> Response:
    """POST /conversations/{id}/turns {"request_id"?, "messages"?, "set"?, "bytes"?, "event"?}"""
    given = await requests.body(asked.request, asked.limits.body, "request_id", "messages", "set", "bytes", "event")
    request_id = requests.text(given, "request_id")
    event = requests.text(given, "event")
    messages = requests.messages(given)
    fields = requests.values(given, "set")
    if not (messages or fields or event):
        raise InvalidValue("a turn has messages, fields to set, or an event")
    id = asked.request.path_params["id"]
    async with asked.store.session(id).turn(request_id=request_id, wait=asked.limits.busy, ttl=_TURN_TTL) as now:
        if not now.repeated:
            if now.version == 0:
                raise NotFound(f"there is no conversation {id!r:.200}")
            now.append(*messages)
            now.update(fields)
            if event is not None:
                now.transition(event)
            # Nobody else writes while the turn runs, so its commit is the next version.
            now.outcome = {"version": now.version + 1, "phase": now.phase}
    # Not from the outcome: a worker of the library's leaves whatever it likes there.
    version = now.answered_version if now.written is None else now.written.version
    return answer({"version": version, "repeated": now.repeated, "outcome": now.outcome})


async def read(asked: Asked) -> Response:
    """GET /conversations/{id}?last=20&fresh=false"""
    id = asked.request.path_params["id"]
    last = requests.number(asked.request, "last", 20, requests.MAX_LAST)
    fresh = requests.flag(asked.request, "fresh")
    context = context_of(asked.store.session(id))
    context.allow("read", MESSAGES, MOVES)
    # Fields, phase and messages of one version, as one look at the record gives them.
    entry, messages = await shown_messages.messages(context.tiers, context.keys, last, fresh=fresh)
    if entry.deleted:
        raise Deleted(f"conversation {id!r:.200} was deleted at version {entry.version}")
    if entry.version == 0:
        raise NotFound(f"there is no conversation {id!r:.200}")
    phase = entry.fields.get(PHASE)
    return answer(
        {
            "id": id,
            "version": entry.version,
            "phase": None if phase is None else phase.decode("utf-8", "surrogatepass"),
            **bytes_as_text.apart(context.fields(entry)),
            "messages": [each.to_dict() for each in messages],
        }
    )


async def listing(asked: Asked) -> Response:
    """GET /conversations?user=&limit=50&after="""
    query = asked.request.query_params
    limit = requests.number(asked.request, "limit", 50, 1000)
    found = await asked.store.sessions(user=query.get("user"), limit=limit, after=query.get("after"))
    rows: list[dict[str, Any]] = [asdict(each) for each in found]
    after = rows[-1]["cursor"] if len(rows) == limit else None
    return answer({"conversations": rows, "after": after})


async def delete(asked: Asked) -> Response:
    """DELETE /conversations/{id}"""
    return answer({"version": await asked.store.delete(asked.request.path_params["id"])})


async def replicas(asked: Asked) -> Response:
    """GET /replicas"""
    return answer({"replicas": [asdict(each) for each in await asked.store.replicas()]})
