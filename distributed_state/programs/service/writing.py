"""A write as a request asks for it. Law: it is one commit, made once however often its request comes.

`Idempotency-Key` is the request id of the store's own turns: what came of it is remembered in the record, with a digest
of the request, in the commit that it made. To know beforehand what will come of it, such a commit is made for the very
version that was read, and again if somebody else was faster.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from distributed_state.conversation import remembered_requests
from distributed_state.errors import Conflict, Deleted, InvalidValue, NotFound
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.programs.service import conditions, leasing, requests
from distributed_state.programs.service.conditions import Conditions
from distributed_state.programs.service.routes import IDEMPOTENCY_KEY, Asked
from distributed_state.records.access import VERSION
from distributed_state.records.context import RecordContext, context_of
from distributed_state.records.preconditions import preconditions
from distributed_state.records.record import AsyncRecord
from distributed_state.tiers import commit as write_path
from distributed_state.tiers.changes import Changes
from distributed_state.values import codec
from distributed_state.values.model import NEXT
from distributed_state.warm.answers import Draft

Build = Callable[[Changes], None]
DIGEST = "digest"  # in the outcome of a request: of what was asked


@dataclass(frozen=True, slots=True)
class Done:
    """What a write came to. `first_message` is the number of the first one that it added, None if it added none."""

    version: int
    repeated: bool = False
    results: dict[str, Any] = field(default_factory=dict)
    first_message: int | None = None


@dataclass(frozen=True, slots=True)
class Write:
    """A change of one record: what `build` puts into it, as a commit of this kind.

    `unique`: no other request writes this record, so that one that was deleted is not begun again.
    """

    kind: str
    build: Build
    expect: Mapping[str, Any] = field(default_factory=dict)
    draft: Callable[[RecordContext, Changes], Draft] | None = None
    unique: bool = False

    def made(self, context: RecordContext, note: Build | None = None) -> tuple[Draft, Changes]:
        """The change as a draft, with what `note` adds to it."""
        changes = context.changes()
        self.build(changes)
        if note is not None:
            note(changes)
        return changes.draft(self.kind) if self.draft is None else self.draft(context, changes), changes


def key_of(asked: Asked) -> str | None:
    """The request's Idempotency-Key, None if it has none. Raises InvalidValue for one that cannot be kept."""
    if IDEMPOTENCY_KEY not in asked.request.headers:
        return None
    key = requests.header(asked.request, IDEMPOTENCY_KEY)
    remembered_requests.name_of(key)
    return key


def same_request(outcome: Any, digest: str, key: str) -> None:
    """Raise InvalidValue if the key stands for another request; what was remembered elsewhere has no digest."""
    if isinstance(outcome, dict) and outcome.get(DIGEST, digest) != digest:
        raise InvalidValue(f"Idempotency-Key {key!r:.80} was used for another request already")


async def write(asked: Asked, record: AsyncRecord, change: Write) -> Done:
    """Apply a change under the conditions, the lease and the key that its request names."""
    context = context_of(record)
    leasing.carry(asked, context)
    given = conditions.of_write(asked.request)
    # A conversation begins by its own operation, so that a mistaken id makes none; other records with a first write.
    implied = change.draft is None and context.ref.scope == "session" and given == Conditions()
    if implied:
        given = Conditions(exists=True)
    key = key_of(asked)
    try:
        if key is None:
            return await _commit(context, change, given)
        return await _once(asked, context, change, given, key)
    except Conflict as conflict:
        # Not every conflict says at which version the record is.
        if implied and conflict.version == 0 and (await context.read(True, VERSION)).version == 0:
            raise NotFound(f"there is no conversation {context.ref.id!r:.200}") from conflict
        raise


async def _commit(
    context: RecordContext, change: Write, given: Conditions, note: Build | None = None, expected: int | None = None
) -> Done:
    draft, changes = change.made(context, note)
    held = preconditions(context, change.expect, given.exists)
    draft = context.ready(draft, given.version if expected is None else expected)
    done = await (context if held is None else held).send(draft)
    draft = held.sent if held is not None and held.sent is not None else draft
    results = await write_path.sums(context.tiers, context.keys, draft, done, changes.sums) if changes.sums else {}
    return Done(done.version, False, results, done.first_message)


async def _once(asked: Asked, context: RecordContext, change: Write, given: Conditions, key: str) -> Done:
    digest = requests.digest(asked.request)
    name = remembered_requests.name_of(key) or b""
    most = context.store.settings.remembered_requests
    entry = await context.read(field=VERSION)
    for attempt in range(context.store.settings.conflict_retries):
        if entry.deleted and change.unique:
            raise Deleted(f"what this request made was deleted at version {entry.version}")
        draft, changes = change.made(context)
        context.allow_steps(draft)  # who repeats a request is told what came of it
        found = None if entry.deleted else remembered_requests.find(entry, name)
        if found is not None:
            return _repeated(found, digest, key)
        outcome = _foreseen(entry, draft, changes) | {DIGEST: digest}
        kept = [entry.version, outcome, key, None]

        def note(changes: Changes, entry: CachedRecord = entry, kept: list[Any] = kept) -> None:
            remembered_requests.remember(most, changes, entry, name, kept)

        try:
            given.check(entry.version, entry.deleted)
            return await _commit(context, change, given, note, entry.version)
        except Conflict as conflict:
            refused = conflict
        pause = random.uniform(0, 0.002 * 2 ** min(attempt, 6))  # or all would come at once again
        await context.tiers.port.sleep(pause)
        seen, entry = entry, await context.read(True, VERSION)
        unchanged = (seen.epoch, seen.version) == (entry.epoch, entry.version)
        if attempt and unchanged and remembered_requests.find(entry, name) is None:
            break  # nobody was faster: it is what the request named that does not hold
    raise refused


def _foreseen(entry: CachedRecord, draft: Draft, changes: Changes) -> dict[str, Any]:
    """What a commit on this very version gives, beside its own version."""
    found: dict[str, Any] = {}
    if changes.sums:
        found["results"] = dict(_sums(entry, changes))
    if any(step[0] == b"m" for step in draft.steps):
        found["first_message"] = 0 if entry.deleted else int(entry.fields.get(NEXT, b"0"))
    return found


def _sums(entry: CachedRecord, changes: Changes) -> Iterable[tuple[str, int]]:
    for key in changes.sums:
        before = 0 if entry.deleted else entry.value(key, 0)
        by = int(changes.fields[codec.encode_key(key)][2])
        yield key, (before if isinstance(before, int) else 0) + by  # what is no number is refused


def _repeated(found: list[Any], digest: str, key: str) -> Done:
    before, outcome = found[0], found[1]
    if not isinstance(outcome, dict) or outcome.get(DIGEST) != digest:
        raise InvalidValue(f"Idempotency-Key {key!r:.80} was used for another request already")
    return Done(before + 1, True, outcome.get("results", {}), outcome.get("first_message"))
