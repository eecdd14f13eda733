"""Reads and writes the record that a path names.

Law: the id that is checked is the id that is used, and a write is one commit, made once even if its request is
repeated.

A caller of a tenant may only name ids that begin with its prefix. An answer that is too large is refused before it is
in memory. An export is sent as it is read, some lines at a time.

Conditions: the ETag of a record is its version, and it is strong. Source: RFC 9110, section 13.

Leases: the client holds the whole state of its lease, so any worker can serve under it. Only the client renews it, and
it expires otherwise. The client's form of a lease is opaque and cannot be guessed.

Repeated requests: `Idempotency-Key` is the request id of the store's own turns. The commit that a request makes also
stores the request's result in the record, with a digest of the request. The commit expects the version in which the
request was not found. So if two workers get the same key at once, one applies the request and the other finds its
result. The result must therefore be computed before the commit is sent, and again if another write came first.

Design: sections 23, 24.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import random
import re
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from distributed_state.conversation import request_log
from distributed_state.errors import AccessDenied, Conflict, Deleted, InvalidValue, NotFound, TooLarge
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.port import waited
from distributed_state.programs.service import requests
from distributed_state.programs.service.answers import A_PAGE, GZIP, Download, answer
from distributed_state.programs.service.limits import Limits
from distributed_state.programs.service.requests import (
    IDEMPOTENCY_KEY,
    IF_MATCH,
    IF_NONE_MATCH,
    LEASE,
    PREFIX,
    Answer,
    Asked,
    Encoded,
    Query,
    Values,
    copying,
)
from distributed_state.records import history as past
from distributed_state.records import lifecycle, messages
from distributed_state.records.access import TAGS, VERSION
from distributed_state.records.context import RecordContext, context_of
from distributed_state.records.record import AsyncRecord
from distributed_state.records.transaction import preconditions
from distributed_state.results import Change, Snapshot
from distributed_state.store.export import Export
from distributed_state.tiers import commit as write_path
from distributed_state.tiers import items
from distributed_state.tiers.changes import Changes
from distributed_state.values import as_text, codec
from distributed_state.values.field_ttl import NEVER
from distributed_state.values.model import DELETED, NEXT, Ref, Scope, deleted_error
from distributed_state.values.search import tags_in
from distributed_state.warm.answers import Draft
from distributed_state.warm.held_leases import CarriedLease

_VERSION_TAG = re.compile(r'(?<!W/)"(0|[1-9][0-9]{0,17})(?:-gzip)?"')
_TAGS = re.compile(r'(?:W/)?"[^"]*"(?: ?, ?(?:W/)?"[^"]*")*')

DIGEST = "#digest"  # in the outcome of a request: the digest of the request; a client's own outcome may have `digest`
Build = Callable[[Changes], None]


@dataclass(frozen=True, slots=True)
class Write:
    """A change of one record: `build` adds the operations, `kind` is the kind of the commit.

    `unique`: only this request creates this record, so a deleted one is not begun again. `revive`: a deleted one is.
    """

    kind: str
    build: Build
    expect: Mapping[str, Any] = field(default_factory=dict)
    draft: Callable[[RecordContext, Changes], Draft] | None = None
    unique: bool = False
    revive: bool = False

    def made(self, context: RecordContext, note: Build | None = None) -> tuple[Draft, Changes]:
        """Return the change as a draft, with the additions of `note`."""
        changes = context.changes()
        self.build(changes)
        if note is not None:
            note(changes)
        if self.draft is not None:
            return self.draft(context, changes), changes
        if self.revive:
            changes.undelete()
        return changes.draft(self.kind, deleted="begin" if self.revive else "refuse"), changes


@dataclass(frozen=True, slots=True)
class Done:
    """The result of a write. `first_message` is the number of the first added message, None without messages."""

    version: int
    repeated: bool = False
    results: dict[str, Any] = field(default_factory=dict)
    first_message: int | None = None


async def write(asked: Asked, record: AsyncRecord, change: Write) -> Done:
    """Apply a change under the conditions, the lease and the key of its request."""
    context = context_of(record)
    await write_under_lease(asked, context)
    once = OnceOnly.of(asked, context)
    # Only a separate operation begins a conversation, so that a mistyped id does not; other records begin with a write.
    implied = change.draft is None and context.ref.scope == "session" and once.conditions == Conditions()
    if implied:
        once = replace(once, conditions=Conditions(exists=True))
    if change.draft is None and once.conditions.may_begin:
        await begins(asked, context)
    elif change.draft is None:
        await comes_back(asked, context, revive=change.revive)
    if asked.quota.counts(asked.caller, "item"):
        changes = context.changes()
        change.build(changes)
        await puts(asked, context, changes.put_items())
    try:
        versions = once.conditions.versions
        at_once = once.key is None and (versions is None or len(versions) == 1)
        return await (_commit(context, change, once.conditions) if at_once else _once(once, context, change))
    except Conflict as conflict:
        # Not every conflict names the version of the record, so it is read.
        if implied:
            _require(await context.read(True, VERSION), context, conflict)
        raise


def written(done: Done, status: int = 200) -> Response:
    """The answer to a write whose only result is the version."""
    return answer({"version": done.version, "repeated": done.repeated}, status, version=done.version)


def _require(entry: CachedRecord, context: RecordContext, conflict: Conflict) -> None:
    """Raise NotFound or Deleted in place of the conflict, if the conversation does not exist."""
    if entry.version == 0:
        raise NotFound(f"there is no conversation {context.ref.id!r:.200}") from conflict
    if entry.deleted:
        raise refused_as_deleted(context, entry) from conflict


async def begins(asked: Asked, context: RecordContext) -> None:
    """Count the record for the quota if this request begins it. Raises HTTPException 429."""
    if asked.quota.counts(asked.caller, context.ref.scope):
        entry = await context.read(field=VERSION)
        if entry.version == 0 or entry.deleted:
            await asked.quota.ask(asked.store, asked.caller, context.ref.scope)


async def comes_back(asked: Asked, context: RecordContext, *, revive: bool = False) -> None:
    """Count the record for the quota if this request begins it again after its end. Raises HTTPException 429."""
    may = revive or context.begins_again
    if may and asked.quota.counts(asked.caller, context.ref.scope) and (await context.read(field=VERSION)).deleted:
        await asked.quota.ask(asked.store, asked.caller, context.ref.scope)


async def puts(asked: Asked, context: RecordContext, names: list[bytes]) -> None:
    """Count for the quota the items that do not exist yet. Raises HTTPException 429."""
    if names and asked.quota.counts(asked.caller, "item"):
        _, there = await items.read(context.tiers, context.keys, names)
        await asked.quota.ask(asked.store, asked.caller, "item", len(names) - len(there))


async def _commit(
    context: RecordContext, change: Write, given: Conditions, note: Build | None = None, expected: int | None = None
) -> Done:
    draft, changes = change.made(context, note)
    held = preconditions(context, change.expect, given.exists)
    draft = draft._replace(expected=given.version if expected is None else expected)
    done = await (context if held is None else held).commit(draft)
    results = await write_path.sums(context.tiers, context.keys, done, changes.sums) if changes.sums else {}
    return Done(done.version, False, results, done.added)


async def _once(once: OnceOnly, context: RecordContext, change: Write) -> Done:
    entry = await context.read(field=VERSION)
    for attempt in range(context.store.settings.conflict_retries):
        if entry.deleted and change.unique:
            raise Deleted(
                f"the record that this request created was deleted at version {entry.version}", version=entry.version
            )
        draft, changes = change.made(context)
        context.allow_operations(draft)  # checked here, because a repeated request gets the first one's result
        done = once.answered(entry)
        if done is not None:
            return Done(done.version, True, done.found.get("results", {}), done.found.get("first_message"))
        note = partial(once.log, entry, **_foreseen(entry, draft, changes))
        try:
            once.conditions.check(entry.version, entry.deleted)
            return await _commit(context, change, once.conditions, note, entry.version)
        except Conflict as conflict:
            refused = conflict
        pause = random.uniform(0, 0.002 * 2 ** min(attempt, 6))  # or all would try again at the same moment
        await context.tiers.port.sleep(pause)
        seen, entry = entry, await context.read(True, VERSION)
        unchanged = (seen.epoch, seen.version) == (entry.epoch, entry.version)
        if attempt and unchanged and once.answered(entry) is None:
            break  # no other write came first: a condition of the request does not hold
    raise refused


def _foreseen(entry: CachedRecord, draft: Draft, changes: Changes) -> dict[str, Any]:
    """Compute what a commit on this very version will return besides the new version."""
    found: dict[str, Any] = {}
    if changes.sums:
        found["results"] = dict(_sums(entry, changes))
    if any(operation[0] == b"m" for operation in draft.operations):
        found["first_message"] = 0 if entry.deleted else int(entry.fields.get(NEXT, b"0"))
    return found


def _sums(entry: CachedRecord, changes: Changes) -> Iterable[tuple[str, int]]:
    for key in changes.sums:
        before = 0 if entry.deleted else entry.value(key, 0)
        by = int(changes.fields[codec.encode_key(key)][2])
        yield key, (before if isinstance(before, int) else 0) + by  # a value that is not a number is refused


# Conditions


@dataclass(frozen=True, slots=True)
class Conditions:
    """Conditions of a write: the record is at one of these versions, exists, or does not."""

    versions: frozenset[int] | None = None
    exists: bool | None = None

    @property
    def version(self) -> int | None:
        """The version that a commit can expect without a look at the record; None for any, or for several."""
        return next(iter(self.versions)) if self.versions is not None and len(self.versions) == 1 else None

    @property
    def may_begin(self) -> bool:
        """Whether the conditions hold for a record that does not exist yet."""
        return (self.versions is None or 0 in self.versions) and not self.exists

    def check(self, version: int, deleted: bool = False) -> None:
        """Raise Conflict unless they hold for a record in this state."""
        if self.versions is not None and version not in self.versions:
            wanted = " or ".join(map(str, sorted(self.versions))) or "of a strong ETag"
            raise Conflict(f"expected version {wanted}, found version {version}", version=version)
        if self.exists is not None and self.exists is not (version > 0 and not deleted):
            raise Conflict(f"the record exists {'not' if self.exists else 'already'}", version=version)


def conditions_of(request: Request) -> Conditions:
    """The conditions of a write. Raises InvalidValue for conditions that writes do not support."""
    match, none = (
        requests.header(request, each).strip() if each in request.headers else None
        for each in (IF_MATCH, IF_NONE_MATCH)
    )
    if match is not None and none is not None:
        raise InvalidValue("give If-Match or If-None-Match, not both")
    if none not in (None, "*"):
        raise InvalidValue("a write accepts If-None-Match only as *, for a record that does not exist yet")
    if match is None:
        return Conditions(exists=None if none is None else False)
    if match == "*":
        return Conditions(exists=True)
    if _TAGS.fullmatch(match) is None:
        raise InvalidValue(f'If-Match is * or versions in the form of ETags, such as "7", not {match!r:.80}')
    # A weak tag, and one that this service never gave, is at no version.
    return Conditions(versions=frozenset(int(each[1]) for each in _VERSION_TAG.finditer(match)))


# The lease that a client holds


def show_lease(lease: CarriedLease) -> str:
    """A lease in the form that its client sends."""
    return base64.urlsafe_b64encode(lease.lock_value.encode()).decode().rstrip("=")


def lease_of(asked: Asked) -> CarriedLease | None:
    """The lease of a request, None without the header. Raises InvalidValue if the header is not a lease."""
    if LEASE not in asked.request.headers:
        return None
    text = requests.header(asked.request, LEASE)
    try:
        found = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode("ascii")
        return CarriedLease(found)
    except (ValueError, binascii.Error) as error:
        raise InvalidValue("the Lease header must be the value that was returned with the lease, unchanged") from error


async def write_under_lease(asked: Asked, context: RecordContext, streamed: int = 0) -> None:
    """Let this request write under its lease, if it has one. Raises Stopped, once, if its holder is asked to stop.

    `streamed`: how many chunks the holder has streamed. A turn that is committed ends this output.
    """
    lease = lease_of(asked)
    if lease is not None:
        context.allow("lock", None)
        stopped = await lease.check(context.tiers.leases, context.keys)
        lease.carry(context.tiers.leases, context.keys, streamed, stopped=stopped)
    elif streamed:
        raise InvalidValue(f"streamed needs the header {LEASE}: chunks are streamed under a lease")


# Repeated requests


@dataclass(frozen=True, slots=True)
class OnceOnly:
    """A request with its key and its conditions. Without a key, each repetition is applied."""

    key: str | None
    name: bytes
    digest: str
    most: int
    conditions: Conditions

    @classmethod
    def of(cls, asked: Asked, context: RecordContext, *others: str) -> OnceOnly:
        """Describe this request to a record; `others` are ids that it also names. Raises InvalidValue for a bad key."""
        key = key_of(asked)
        name = request_log.name_of(key) or b""
        digest = "" if key is None else requests.digest(asked.request, *others)
        most = context.store.settings.remembered_requests
        return cls(key, name, digest, most, conditions_of(asked.request))

    def answered(self, entry: CachedRecord) -> Answered | None:
        """The stored answer, None if there is none. Raises InvalidValue if the key belongs to another request."""
        kept = None if self.key is None else request_log.find(entry, self.name)
        if kept is None:
            return None
        outcome = kept[1] if isinstance(kept[1], dict) else {}
        if outcome.get(DIGEST) != self.digest:
            raise _another(self.key)
        return Answered(request_log.answered_at(kept), outcome)

    def log(self, entry: CachedRecord, changes: Changes, **found: Any) -> None:
        """Store the request and its result `found` with this change, which expects the version of `entry`."""
        if self.key is not None:
            kept = [entry.version, {**found, DIGEST: self.digest}, self.key, None]
            request_log.add(self.most, changes, entry, self.name, kept)

    # For changes that the store's own functions make

    async def settle(self, change: Coroutine[Any, Any, Any]) -> tuple[Any, Answered | None]:
        """Make the change. Returns its result, or the earlier answer that `look` found. Raises Conflict."""
        try:
            return await change, None
        except _Settled as settled:
            if settled.refused is not None:
                raise settled.refused from None
            return None, settled.answered

    async def looked(self, context: RecordContext, change: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Look before a change that may have nothing to do, and so would not call `note`; then make it."""
        if self.key is not None or self.conditions != Conditions():
            self.look(await context.read(True, VERSION))
        return await change()

    def look(self, entry: CachedRecord) -> None:
        """Return only if the request was not answered yet, and its conditions hold for this version."""
        done = self.answered(entry)
        if done is not None:
            raise _Settled(done, None)
        try:
            self.conditions.check(entry.version, entry.deleted)
        except Conflict as refused:
            raise _Settled(None, refused) from None

    def note(self, entry: CachedRecord, changes: Changes, **found: Any) -> None:
        """Look at this version, and store the result with the change that expects it."""
        self.look(entry)
        self.log(entry, changes, **found)


@dataclass(frozen=True, slots=True)
class Answered:
    """A stored answer: the version that the request made, and the rest of its outcome."""

    version: int
    found: dict[str, Any]


class _Settled(Exception):
    """Raised when nothing is to be written: `answered` is the earlier answer, else `refused` is the reason.

    It is not a Conflict, because the code that makes the change would retry that.
    """

    def __init__(self, answered: Answered | None, refused: Conflict | None) -> None:
        super().__init__()
        self.answered = answered
        self.refused = refused


def key_of(asked: Asked) -> str | None:
    """The request's Idempotency-Key, None without the header. Raises InvalidValue if the key cannot be stored."""
    if IDEMPOTENCY_KEY not in asked.request.headers:
        return None
    key = requests.header(asked.request, IDEMPOTENCY_KEY)
    if not key.isascii():
        raise InvalidValue(f"{IDEMPOTENCY_KEY} is ASCII, not {key!r:.80}")  # else two keys might be read as one text
    request_log.name_of(key)
    return key


def same_request(outcome: Any, digest: str, key: str) -> None:
    """Raise InvalidValue if the key belongs to another request. Turns outside the service store no digest."""
    if isinstance(outcome, dict) and outcome.get(DIGEST, digest) != digest:
        raise _another(key)


def _another(key: str | None) -> InvalidValue:
    return InvalidValue(f"{IDEMPOTENCY_KEY} {key!r:.80} was already used for another request")


_TAG = re.compile(r'"([^"]*)"')  # without the spaces around it: matching those took quadratic time
T = TypeVar("T")
NAMES: dict[Scope, str] = {"session": "conversation", "user": "user", "task": "task"}


# The record that a request names


def id_of(asked: Asked) -> str:
    """The id in the path. Raises AccessDenied, InvalidValue and TooLarge."""
    return within(asked, checked(asked.request.path_params["id"]))


def within(asked: Asked, id: str) -> str:
    """The id, if the caller may name it. Raises AccessDenied."""
    if not id.startswith(asked.caller.prefix):
        raise AccessDenied(f"your ids begin with {asked.caller.prefix!r}, not {id!r:.80}")
    return id


def narrowed(asked: Asked, prefix: str | None) -> str | None:
    """The prefix of ids of a listing: the requested one, narrowed to the caller's tenant. Raises AccessDenied."""
    mine = asked.caller.prefix
    if not mine or (prefix is not None and prefix.startswith(mine)):
        return prefix
    if prefix is None or mine.startswith(prefix):
        return mine
    raise AccessDenied(f"your ids begin with {mine!r}, not {prefix!r:.80}")


def checked(id: str) -> str:
    """Return the id if the store accepts it. Raises InvalidValue and TooLarge."""
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


async def written_by(asked: Asked, scope: Scope) -> Any:
    """The record that the path names, to be written under the request's lease."""
    record = handle(asked, scope)
    await write_under_lease(asked, context_of(record))
    return record


def begun(asked: Asked, id: str | None) -> str | None:
    """The id of a new record: the given one, else one derived from the request's key; None if it has neither.

    With the derived id a repeated request finds the record of the first one. Callers with other tokens do not find it.
    """
    if id is not None:
        return within(asked, checked(id))
    key = key_of(asked)
    if key is None:
        return None
    who = f"{asked.caller.credential}\n{asked.caller.actor}\n{key}"
    return asked.caller.prefix + hashlib.sha256(who.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def place(scope: Scope, id: str) -> dict[str, str]:
    """The Location header of a record."""
    return {"Location": as_text.path(PREFIX, f"/{NAMES[scope]}s/{{}}", id)}


# Reading it


class Fresh(Query):
    """With `fresh` a record is read from the server, even if this worker has it in memory."""

    fresh: bool = False


def _named(context: RecordContext) -> str:
    kind = next(name for scope, name in NAMES.items() if scope == context.ref.scope)
    return f"{kind} {context.ref.id!r:.200}"


def refused_as_deleted(context: RecordContext, entry: CachedRecord) -> Deleted:
    """The error for a record that was deleted or has expired."""
    what = _named(context)
    if entry.expiry is None:
        return Deleted(f"{what} was deleted at version {entry.version}", version=entry.version)
    error = deleted_error(what, entry.version, entry.fields[DELETED])
    error.begins_again = context.begins_again
    return error


def there(entry: CachedRecord, context: RecordContext) -> CachedRecord:
    """Return the record as it was read. Raises NotFound, or Deleted if it was deleted."""
    if entry.deleted:
        raise refused_as_deleted(context, entry)
    if entry.version == 0:
        raise NotFound(f"there is no {_named(context)}")
    return entry


async def look(record: AsyncRecord, fresh: bool, field: str | None = None) -> CachedRecord:
    """Read the record for a caller who may read this field; None: all fields. Raises NotFound and Deleted."""
    context = context_of(record)
    return there(await context.read(fresh, field), context)


async def whole(
    asked: Asked, record: AsyncRecord, scope: Scope, fresh: bool
) -> tuple[CachedRecord, Response | None, int]:
    """Return the current record, the answer if the client already has this version, and the bytes of its fields if not.

    Raises InvalidValue if the fields are larger than an answer may be.
    """

    async def read() -> tuple[CachedRecord, Response | None, int]:
        entry = await look(record, fresh)
        known = not_modified(asked.request, entry)
        return entry, known, 0 if known is not None else size_of(entry, asked.limits)

    return await waited.with_room(read)


def not_modified(request: Request, entry: CachedRecord) -> Response | None:
    """The answer to a client that already has this version of the record, else None."""
    given = requests.header(request, IF_NONE_MATCH)
    # A field with a deadline expires without a new version.
    if not given or entry.expires != NEVER:
        return None
    known = [tag[0] for tag in _TAG.finditer(given) if tag[1].removesuffix(GZIP) == str(entry.version)]
    if given.strip() != "*" and not known:
        return None
    return Response(status_code=304, headers={"ETag": known[0] if known else f'"{entry.version}"'})


def size_of(entry: CachedRecord, limits: Limits) -> int:
    """Count and return the bytes of a record's fields. Raises InvalidValue if they are larger than an answer may be."""
    size = sum(map(len, entry.fields.values()))
    if size > limits.answer:
        raise InvalidValue(f"the fields are {size} bytes, more than {limits.answer}: read them one by one")
    waited.room(size)
    return size


async def read_shown(
    context: RecordContext, page: messages.Page, limits: Limits, *, fresh: bool
) -> tuple[messages.Shown, int]:
    """Fields, phase and messages of one version, from a single read, and their size in bytes.

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
    """The record at a version. Raises InvalidValue if that is larger than an answer may be."""
    return await waited.with_room(lambda: _unless_too_large(past.at(context, version, branch, most=limits.answer)))


async def _unless_too_large(read: Coroutine[Any, Any, T]) -> T:
    try:
        return await read
    except TooLarge as error:
        raise InvalidValue(f"{error}: ask for fewer of them, page by page") from error


# Operations of every record


class Shown(Answer):
    """The current state of a record."""

    id: str
    version: int
    fields: Values
    bytes: Encoded | None = None
    tags: dict[str, list[str]]


async def read(scope: Scope, asked: Asked, given: Fresh) -> Response:
    """The fields and tags of a user or a task."""
    record = handle(asked, scope)
    entry, known, size = await whole(asked, record, scope, given.fresh)
    if known is not None:
        return known
    context_of(record).allow("read", TAGS)
    return await requests.in_turn(size, lambda: _shown(context_of(record), entry))


def _shown(context: RecordContext, entry: CachedRecord) -> Response:
    fields = as_text.apart(context.fields(entry))
    shown = {"id": context.ref.id, "version": entry.version, **fields, "tags": tags_in(entry.fields)}
    return answer(shown, version=entry.version)


async def delete(scope: Scope, asked: Asked) -> Response:
    """Delete a record; its history stays."""
    context = context_of(await written_by(asked, scope))
    context.allow("write", None)
    given = conditions_of(asked.request)
    check = None if given == Conditions() else given.check
    version = await lifecycle.delete(context.tiers, context.keys, context.store.deleting, check=check)
    return answer({"version": version}, version=version)


class Erased(Answer):
    """Whether there was a record to erase."""

    erased: bool


async def erase(scope: Scope, asked: Asked) -> Response:
    """Remove a record for good, with its history."""
    context = context_of(await written_by(asked, scope))
    context.allow("admin", None)
    erased = await lifecycle.erase(context.tiers, context.keys, context.store.deleting, actor=context.actor)
    return answer({"erased": erased})


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
