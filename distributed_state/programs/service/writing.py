"""A write as a request asks for it. Law: it is one commit, made once however often its request comes.

Of one that has an `Idempotency-Key` it is known beforehand what will come: its commit is made for the very version that
was read, and again if somebody else was faster.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from starlette.responses import Response

from distributed_state.errors import Conflict, Deleted, NotFound
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.programs.service import leasing
from distributed_state.programs.service.answers import answer
from distributed_state.programs.service.conditions import Conditions
from distributed_state.programs.service.remembering import OnceOnly
from distributed_state.programs.service.routes import Asked
from distributed_state.records.access import VERSION
from distributed_state.records.context import RecordContext, context_of
from distributed_state.records.preconditions import preconditions
from distributed_state.records.record import AsyncRecord
from distributed_state.tiers import commit as write_path
from distributed_state.tiers import items
from distributed_state.tiers.changes import Changes
from distributed_state.values import codec
from distributed_state.values.model import NEXT
from distributed_state.warm.answers import Draft

Build = Callable[[Changes], None]


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


def written(done: Done, status: int = 200) -> Response:
    """The answer to a write of which the version is all that came."""
    return answer({"version": done.version, "repeated": done.repeated}, status, version=done.version)


async def write(asked: Asked, record: AsyncRecord, change: Write) -> Done:
    """Apply a change under the conditions, the lease and the key that its request names."""
    context = context_of(record)
    leasing.carry(asked, context)
    once = OnceOnly.of(asked, context)
    # A conversation begins by its own operation, so that a mistaken id makes none; other records with a first write.
    implied = change.draft is None and context.ref.scope == "session" and once.conditions == Conditions()
    if implied:
        once = replace(once, conditions=Conditions(exists=True))
    elif change.draft is None and once.conditions.may_begin:
        await begins(asked, context)
    if asked.quota.counts(asked.caller, "item"):
        changes = context.changes()
        change.build(changes)
        await puts(asked, context, changes.put_items())
    try:
        return await (_commit(context, change, once.conditions) if once.key is None else _once(once, context, change))
    except Conflict as conflict:
        # Not every conflict says at which version the record is.
        if implied:
            _require(await context.read(True, VERSION), context, conflict)
        raise


def _require(entry: CachedRecord, context: RecordContext, conflict: Conflict) -> None:
    """Raise NotFound or Deleted, in place of the conflict, if it is that the conversation is not there."""
    if entry.version == 0:
        raise NotFound(f"there is no conversation {context.ref.id!r:.200}") from conflict
    if entry.deleted:
        said = f"conversation {context.ref.id!r:.200} was deleted at version {entry.version}"
        raise Deleted(said, version=entry.version) from conflict


async def begins(asked: Asked, context: RecordContext) -> None:
    """Count the record that this request begins, if it does. Raises HTTPException 429."""
    if asked.quota.counts(asked.caller, context.ref.scope):
        entry = await context.read(field=VERSION)
        if entry.version == 0 or entry.deleted:
            await asked.quota.ask(asked.store, asked.caller, context.ref.scope)


async def comes_back(asked: Asked, context: RecordContext) -> None:
    """Count the record that this rollback brings back, if it was deleted. Raises HTTPException 429."""
    if asked.quota.counts(asked.caller, context.ref.scope) and (await context.read(field=VERSION)).deleted:
        await asked.quota.ask(asked.store, asked.caller, context.ref.scope)


async def puts(asked: Asked, context: RecordContext, names: list[bytes]) -> None:
    """Count those of these items that are not there yet. Raises HTTPException 429."""
    if names and asked.quota.counts(asked.caller, "item"):
        _, there = await items.read(context.tiers, context.keys, names)
        await asked.quota.ask(asked.store, asked.caller, "item", len(names) - len(there))


async def _commit(
    context: RecordContext, change: Write, given: Conditions, note: Build | None = None, expected: int | None = None
) -> Done:
    draft, changes = change.made(context, note)
    held = preconditions(context, change.expect, given.exists)
    draft = context.ready(draft, given.version if expected is None else expected)
    done = await (context if held is None else held).send(draft)
    draft = held.sent if held is not None and held.sent is not None else draft
    results = await write_path.sums(context.tiers, context.keys, draft, done, changes.sums) if changes.sums else {}
    return Done(done.version, False, results, done.added(draft.steps))


async def _once(once: OnceOnly, context: RecordContext, change: Write) -> Done:
    entry = await context.read(field=VERSION)
    for attempt in range(context.store.settings.conflict_retries):
        if entry.deleted and change.unique:
            raise Deleted(f"what this request made was deleted at version {entry.version}", version=entry.version)
        draft, changes = change.made(context)
        context.allow_steps(draft)  # who repeats a request is told what came of it
        done = once.answered(entry)
        if done is not None:
            return Done(done.version, True, done.found.get("results", {}), done.found.get("first_message"))
        note = partial(once.remember, entry, **_foreseen(entry, draft, changes))
        try:
            once.conditions.check(entry.version, entry.deleted)
            return await _commit(context, change, once.conditions, note, entry.version)
        except Conflict as conflict:
            refused = conflict
        pause = random.uniform(0, 0.002 * 2 ** min(attempt, 6))  # or all would come at once again
        await context.tiers.port.sleep(pause)
        seen, entry = entry, await context.read(True, VERSION)
        unchanged = (seen.epoch, seen.version) == (entry.epoch, entry.version)
        if attempt and unchanged and once.answered(entry) is None:
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
