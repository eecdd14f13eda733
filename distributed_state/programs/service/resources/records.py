"""Records that a path names, and how they are read. Law: the id that is compared is the id that is used.

A caller of a tenant names ids that begin with its prefix. What is too large to answer is refused before it is in
memory. An export is sent as it is read, some lines at a time.

Design: section 24.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Coroutine
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from distributed_state.errors import AccessDenied, Deleted, InvalidValue, NotFound, TooLarge
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.port import waited
from distributed_state.programs.service import requests, scheduling, writing
from distributed_state.programs.service.answers import answer
from distributed_state.programs.service.limits import Limits
from distributed_state.programs.service.routes import IF_NONE_MATCH, PREFIX, Answer, Asked, Encoded, Query, Values
from distributed_state.programs.service.scheduling import copying
from distributed_state.programs.service.streaming import A_PAGE, Download
from distributed_state.programs.service.writing import key_of
from distributed_state.records import history as past
from distributed_state.records import lifecycle, messages
from distributed_state.records.access import TAGS
from distributed_state.records.context import RecordContext, context_of
from distributed_state.records.record import AsyncRecord
from distributed_state.store.export import Export
from distributed_state.values import as_text
from distributed_state.values.field_ttl import NEVER
from distributed_state.values.model import Ref, Scope
from distributed_state.values.results import Change, Snapshot
from distributed_state.values.search import tags_in

_TAG = re.compile(r'"([^"]*)"')  # with the spaces around it, a header of spaces took the square of their number
T = TypeVar("T")
NAMES: dict[Scope, str] = {"session": "conversation", "user": "user", "task": "task"}


# The record that a request names


def id_of(asked: Asked) -> str:
    """The id in the path. Raises AccessDenied, InvalidValue and TooLarge."""
    return within(asked, checked(asked.request.path_params["id"]))


def within(asked: Asked, id: str) -> str:
    """The id, if the caller may name it. Raises AccessDenied."""
    if not id.startswith(asked.caller.prefix):
        raise AccessDenied(f"ids of yours begin with {asked.caller.prefix!r}, not {id!r:.80}")
    return id


def checked(id: str) -> str:
    """An id that somebody gave. Raises InvalidValue and TooLarge for one that the store does not take."""
    return Ref("session", id).id


def owner(asked: Asked, user: str | None) -> str | None:
    """The owner that a new record will have. Raises AccessDenied, InvalidValue and TooLarge."""
    return user if user is None else within(asked, checked(user))


def handle(asked: Asked, scope: Scope) -> Any:
    """The record that the path names."""
    return of(asked, scope, id_of(asked))


def of(asked: Asked, scope: Scope, id: str) -> Any:
    """The record of this id."""
    store = asked.store
    return store.session(id) if scope == "session" else store.user(id) if scope == "user" else store.task(id)


def written_by(asked: Asked, scope: Scope) -> Any:
    """The record that the path names, to be written under the lease that the request names."""
    record = handle(asked, scope)
    writing.write_under_lease(asked, context_of(record))
    return record


def begun(asked: Asked, id: str | None) -> str | None:
    """The id of a record that begins: the one that was given, else of the request's key; None if it has neither.

    By that a repeated request finds what the first one made, and nobody else does, whose token is another one.
    """
    if id is not None:
        return within(asked, checked(id))
    key = key_of(asked)
    if key is None:
        return None
    who = f"{asked.caller.credential}\n{asked.caller.actor}\n{key}"
    return asked.caller.prefix + hashlib.sha256(who.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def place(scope: Scope, id: str) -> dict[str, str]:
    """The header that says where a record is."""
    return {"Location": as_text.path(PREFIX, f"/{NAMES[scope]}s/{{}}", id)}


# Reading it


class Fresh(Query):
    """How a record is read: `fresh` asks the server, whatever this worker knows."""

    fresh: bool = False


def there(entry: CachedRecord, scope: Scope, id: str) -> CachedRecord:
    """The record as it was read. Raises NotFound or Deleted if it is not there."""
    if entry.deleted:
        raise Deleted(f"{NAMES[scope]} {id!r:.200} was deleted at version {entry.version}", version=entry.version)
    if entry.version == 0:
        raise NotFound(f"there is no {NAMES[scope]} {id!r:.200}")
    return entry


async def look(record: AsyncRecord, scope: Scope, fresh: bool, field: str | None = None) -> CachedRecord:
    """The record as it is, for one who reads this field of it; None: all of it."""
    return there(await context_of(record).read(fresh, field), scope, record.id)


async def whole(
    asked: Asked, record: AsyncRecord, scope: Scope, fresh: bool
) -> tuple[CachedRecord, Response | None, int]:
    """The current record; the answer, if the client has this version already; the bytes of its fields, if not.

    Raises InvalidValue if the fields are larger than an answer may be.
    """

    async def read() -> tuple[CachedRecord, Response | None, int]:
        entry = await look(record, scope, fresh)
        known = not_modified(asked.request, entry)
        return entry, known, 0 if known is not None else size_of(entry, asked.limits)

    return await waited.with_room(read)


def not_modified(request: Request, entry: CachedRecord) -> Response | None:
    """The answer to a client that has this version of the record already; None if it has not."""
    given = requests.header(request, IF_NONE_MATCH)
    # A field that has a deadline goes without a new version.
    if not given or entry.expires != NEVER:
        return None
    if given.strip() != "*" and str(entry.version) not in (tag[1] for tag in _TAG.finditer(given)):
        return None
    return Response(status_code=304, headers={"ETag": f'"{entry.version}"'})


def size_of(entry: CachedRecord, limits: Limits) -> int:
    """Count the bytes of a record's fields and return them. Raises InvalidValue if an answer may not be that large."""
    size = sum(map(len, entry.fields.values()))
    if size > limits.answer:
        raise InvalidValue(f"the fields are {size} bytes, more than {limits.answer}: read them one by one")
    waited.room(size)
    return size


async def read_shown(
    context: RecordContext, page: messages.Page, limits: Limits, *, fresh: bool
) -> tuple[messages.Shown, int]:
    """Fields, phase and messages of one version, as one look at the record gives them, and their size in bytes.

    Raises InvalidValue, which says how to ask for less, if they are larger than an answer may be.
    """
    return await waited.with_room(partial(_read_shown, context, page, limits.answer, fresh))


async def _read_shown(
    context: RecordContext, page: messages.Page, most: int, fresh: bool
) -> tuple[messages.Shown, int]:
    found = await _unless_too_large(messages.chosen(context.tiers, context.keys, page, fresh=fresh, most=most))
    size = sum(map(len, found.entry.fields.values())) + sum(map(len, found.stored.values()))
    if size > most:
        raise InvalidValue(f"fields and messages are {size} bytes, more than {most}: ask for fewer messages at once")
    waited.room(size)
    return found, size


async def read_history(
    context: RecordContext, limits: Limits, *, after: int, limit: int, before: int | None = None,
    branch: str | None = None,
) -> list[Change]:  # fmt: skip
    """The changes between two versions. Raises InvalidValue if they are larger than an answer may be."""
    read = partial(past.history, context, after, before, limit, branch, most=limits.answer)
    return await waited.with_room(lambda: _unless_too_large(read()))


async def read_version(context: RecordContext, limits: Limits, *, version: int, branch: str | None = None) -> Snapshot:
    """The record as it was at a version. Raises InvalidValue if that is larger than an answer may be."""
    return await waited.with_room(lambda: _unless_too_large(past.at(context, version, branch, most=limits.answer)))


async def _unless_too_large(read: Coroutine[Any, Any, T]) -> T:
    try:
        return await read
    except TooLarge as error:
        raise InvalidValue(f"{error}: ask for fewer of them, page by page") from error


# Operations of every record


class Shown(Answer):
    """A record as it is."""

    id: str
    version: int
    fields: Values
    bytes: Encoded | None = None
    tags: dict[str, list[str]]


async def read(scope: Scope, asked: Asked) -> Response:
    """The fields and tags of a user or a task."""
    asked_for = requests.query(asked.request, Fresh)
    record = handle(asked, scope)
    entry, known, size = await whole(asked, record, scope, asked_for.fresh)
    if known is not None:
        return known
    context_of(record).allow("read", TAGS)
    return await scheduling.in_turn(size, lambda: _shown(context_of(record), entry))


def _shown(context: RecordContext, entry: CachedRecord) -> Response:
    fields = as_text.apart(context.fields(entry))
    shown = {"id": context.ref.id, "version": entry.version, **fields, "tags": tags_in(entry.fields)}
    return answer(shown, version=entry.version)


async def delete(scope: Scope, asked: Asked) -> Response:
    """Delete a record; its history stays."""
    context = context_of(written_by(asked, scope))
    context.allow("write", None)
    given = writing.conditions_of(asked.request)
    check = None if given == writing.Conditions() else given.check
    version = await lifecycle.delete(context.tiers, context.keys, context.store.deleting, check=check)
    return answer({"version": version}, version=version)


class Erased(Answer):
    """Whether there was something to erase."""

    erased: bool


async def erase(scope: Scope, asked: Asked) -> Response:
    """Remove a record for good, with its history."""
    return answer({"erased": await written_by(asked, scope).erase()})


class Forgotten(Answer):
    """How many records were removed."""

    records: int


async def forget(_: Scope, asked: Asked) -> Response:
    """Remove every trace of a user: its record, conversations and tasks, their forks and history."""
    return answer({"records": await asked.store.forget(id_of(asked))})


async def export(scope: Scope, asked: Asked) -> Response:
    """The record as JSON lines, to download."""
    record = handle(asked, scope)
    context = context_of(record)
    context.allow("admin", None)
    found = Export(context.tiers, context.keys)
    party = asked.caller.party
    with waited.queued():
        taken = await asked.budget.take(party, A_PAGE)
    try:
        async with copying(party):
            first = await found.begin()
    except BaseException:
        taken.give_back()
        raise
    count = partial(asked.rates.count, asked.caller)
    return Download(first, found, record.id, asked.limits, asked.budget, taken, count)
