"""How a record begins and ends: creation, defaults, deletion, revival, erasure.

Law: a deleted record leaves a tombstone, which a later commit may revive; an erased one also loses its history.

If many replicas create a record or set its defaults at once, one of them succeeds; existing values are kept. An erasure
is first noted in SQL, so that any worker can finish an interrupted one. A fork is noted in Redis before its source is
read, and an erasure waits for it: otherwise the fork would bring the erased text back.

Design: sections 4, 15.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self

from distributed_state.cold.values import Erasure
from distributed_state.errors import Conflict, Deleted, DurabilityUnknown, NotFound, StateError, WarmUnavailable
from distributed_state.port import Words
from distributed_state.records.context import RecordContext
from distributed_state.settings import Settings
from distributed_state.tiers import ambient
from distributed_state.tiers import commit as write_path
from distributed_state.tiers import read as read_path
from distributed_state.tiers.assembly import Tiers
from distributed_state.tiers.changes import Changes
from distributed_state.values.codec import Codec
from distributed_state.values.keys import RecordKeys
from distributed_state.values.model import DELETED, ERASE, FORGET, INITIALIZED, OWNER, PHASE, Expiry, Ref, escape
from distributed_state.warm.answers import Draft
from distributed_state.warm.scripts import DROP

_PAUSE = 0.02
_LONGEST = 0.25


Defaults = Mapping[str, Any] | Callable[[], Mapping[str, Any] | Awaitable[Mapping[str, Any]]]


def creation(context: RecordContext, changes: Changes, is_clear: bool) -> Draft:
    """The change that starts a record with these fields, which is refused if it exists."""
    if is_clear:
        changes.emit("conversation.created", {"is_clear": True})
    changes.undelete()
    changes.reserved(OWNER, context.owner.encode() or None)  # the owner that it had before a deletion no longer counts
    return changes.draft("create", deleted="create")


async def initialize(context: RecordContext, defaults: Defaults, whose: str = "1") -> bool:
    """Set the missing fields, once for each `whose` (the owner of the defaults); True if this call set them."""
    mark = escape(whose).encode()
    values: Mapping[str, Any] | None = None
    entry = await context.read()

    async def once() -> bool:
        nonlocal values, entry
        done = entry.fields[INITIALIZED].split(b"\n") if INITIALIZED in entry.fields else []
        if mark in done and not entry.deleted:
            return False
        if values is None:
            found = defaults() if callable(defaults) else defaults
            values = await found if inspect.isawaitable(found) else found
        changes = context.changes()
        changes.set_many(values)
        for name in sorted(changes.fields.keys() & entry.fields.keys()):
            changes.leave(name)
        changes.reserved(INITIALIZED, b"\n".join([*done, mark]))
        try:
            await context.commit(changes.draft("initialize", expected=entry.version, epoch=entry.epoch))
        except Conflict:
            entry = await context.read(fresh=True)
            raise
        return True

    return await write_path.until_no_conflict(context.tiers, once)


def tombstone(settings: Settings, codec: Codec, *, actor: str = "", expiry: Expiry | None = None) -> Changes:
    """The change that deletes a record, or ends a session that expires now."""
    changes = Changes(settings, codec, actor=actor)
    changes.clear(messages=True, tags=True, items=True)
    changes.reserved(PHASE, None)
    changes.reserved(INITIALIZED, None)
    changes.reserved(DELETED, b"1" if expiry is None else expiry.stored)
    changes.set_lifetime(0, 0)
    if expiry is not None:
        changes.emit("session.expired", {"reason": expiry.reason})
    else:
        changes.emit("conversation.deleted", {})
    return changes


async def delete(
    tiers: Tiers,
    keys: RecordKeys,
    hooks: Sequence[Callable[[Ref], Awaitable[None]]],
    *,
    check: Callable[[int, bool], None] | None = None,
) -> int:
    """Delete a live record and return its tombstone's version. `hooks` are awaited if it was not deleted yet.

    `check` raises if the record has a wrong version or is deleted; the deletion applies only at the version it
    accepted.
    """
    entry = await read_path.read(tiers, keys, fresh=True)
    if entry.version == 0:
        raise NotFound(f"{keys.ref.text[:200]}: there is nothing to delete")
    if check is not None:
        check(entry.version, entry.deleted)
    expected = None if check is None else entry.version
    # One that expired is deleted as well: from then on only its caller's `revive` begins it again.
    again = "revive" if entry.expiry else "refuse"
    draft = tombstone(tiers.settings, entry.codec).draft("delete", expected=expected, deleted=again)
    if not entry.deleted:
        for hook in tuple(hooks):
            await hook(keys.ref)
    try:
        return (await write_path.commit(tiers, keys, draft)).version
    except Deleted:
        return (await read_path.read(tiers, keys, fresh=True)).version


log = logging.getLogger(__name__)
_AT_ONCE = 1000
_ROUNDS = 20


async def forget(tiers: Tiers, owner: str) -> int:
    """Erase all records that a user owns and all that were forked from them; returns how many."""
    found: set[str] = set()
    made: set[str] = set()
    for _ in range(_ROUNDS):
        # The lookup below then finds all commits that are acknowledged by now.
        await tiers.archiver.drain()
        await tiers.archiver.insist()
        noted = {each.record: each for each in await tiers.port.sql(tiers.cold.request_owned, owner, ambient.actor())}
        late = await tiers.port.sql(partial(tiers.cold.pending, names=sorted(made))) if made else []
        noted |= {each.record: each for each in late}
        if not noted:
            return len(found)
        made |= await finish(tiers, list(noted.values()))
        found.update(noted)
    raise Conflict(
        f"{len(found)} records were erased, but more are being written: stop their writers and repeat the call"
    )


async def erase(
    tiers: Tiers, keys: RecordKeys, hooks: Sequence[Callable[[Ref], Awaitable[None]]], *, actor: str = ""
) -> bool:
    """Erase one record; False if nothing of it existed. `hooks` are awaited if it is not deleted yet.

    `actor` is that of the handle, escaped: the tombstone names it even if another replica finishes the erasure.
    """
    text = keys.ref.text
    found = False
    entry = await read_path.read(tiers, keys, fresh=True)
    if entry.version and not entry.deleted:
        for hook in tuple(hooks):
            await hook(keys.ref)
    # Archive all partitions, to find and erase the forks that were made before this erasure was requested.
    await tiers.archiver.drain()
    await tiers.archiver.insist()
    noted = await tiers.port.sql(tiers.cold.request, text, actor or ambient.actor())
    made: set[str] = {text}
    for _ in range(_ROUNDS):
        if not noted:
            return found
        found = True
        made |= await finish(tiers, noted)
        # A rollback or fork that read this record's content before is noted when it is archived, and erased then.
        await tiers.archiver.drain({tiers.keys.partition_of(each) for each in made})
        noted = await tiers.port.sql(partial(tiers.cold.pending, names=sorted(made)))
    raise Conflict(f"{text[:200]}: was erased, but is created again and again: stop its writers and repeat the call")


async def finish(tiers: Tiers, noted: Sequence[Erasure]) -> set[str]:
    """Continue these erasures from their last finished step; returns the forks that were made meanwhile.

    Raises the first error after trying all.
    """
    errors: list[StateError] = []
    made: set[str] = set()
    for at in range(0, len(noted), _AT_ONCE):
        some = noted[at : at + _AT_ONCE]
        sources = [tiers.keys.of(Ref.parse(each.record)) for each in some]
        made |= await forks_made(tiers, sources)
        buried = await _bury(tiers, [each for each in some if not each.version], errors)
        if buried:
            await tiers.port.sql(tiers.cold.erase, buried)
        names = [each.record for each in some]
        erased = await tiers.port.sql(partial(tiers.cold.pending, names=names))
        done = {each.record: each.version for each in erased if each.version}
        if done:
            for worker in tuple(tiers.workers):
                await worker.erased()
            await _clean(tiers, {tiers.keys.of(Ref.parse(text)): version for text, version in done.items()})
            # The note of the erasure is removed last: a fork that no longer finds it is archived by now, and noted as
            # late.
            made |= await forks_ended(tiers, sources)
            await tiers.archiver.drain(sorted({tiers.keys.partition_of(each) for each in made}))
            await tiers.port.sql(tiers.cold.complete, done)
    if errors:
        raise errors[0]
    return made


async def _bury(tiers: Tiers, noted: Sequence[Erasure], errors: list[StateError]) -> list[str]:
    """Put tombstones on these records and archive them; returns the records for which that succeeded."""
    writes: list[tuple[RecordKeys, Draft]] = []
    for each in noted:
        keys = tiers.keys.of(Ref.parse(each.record))
        changes = tombstone(tiers.settings, tiers.codec_of(each.record), actor=each.actor)
        # A deleted record gets another tombstone: its event reaches replicas that are disconnected now.
        writes.append((keys, changes.draft(FORGET if each.forks else ERASE, deleted="revive")))
    buried: set[int] = set()
    texts = []
    for (keys, _), result in zip(writes, await write_path.commit_many(tiers, writes) if writes else [], strict=True):
        if isinstance(result, StateError) and not isinstance(result, DurabilityUnknown):
            errors.append(result)
        else:
            buried.add(keys.partition)
            texts.append(keys.ref.text)
    await tiers.archiver.drain(sorted(buried))
    return texts


async def _clean(tiers: Tiers, done: Mapping[RecordKeys, int]) -> None:
    """Remove from Redis and from this process everything that SQL has erased up to these versions."""
    partitions = sorted({keys.partition for keys in done})
    retry = tiers.warm.retry
    last = {keys.text: version for keys, version in done.items()}
    places = await retry(tiers.warm.partitions.states, [tiers.keys.partition(each) for each in partitions])
    calls = []
    for keys, version in done.items():
        notice = f"{places[keys.partition].epoch} {version + 1} {tiers.replica} -"
        touched = [keys.record, keys.hydration, keys.channel, keys.lifetimes, keys.items, keys.leases, keys.lock]
        touched += [keys.output, keys.stop]
        calls.append((DROP, touched, [version, notice, keys.text]))
    for answer in await retry(tiers.port.scripts, calls):
        if isinstance(answer, StateError):
            raise answer
    for partition in partitions:
        keys_of = tiers.keys.partition(partition)
        await retry(tiers.stream.redact, keys_of, partial(_is_about, last))
        # The journal keeps its last entry; a mark takes the place of the tombstone there.
        await retry(tiers.warm.partitions.mark, keys_of, places[partition].epoch)
    await tiers.archiver.drain(partitions)
    for keys in done:
        tiers.hot.forget(keys.ref.text)


def _is_about(last: Mapping[bytes, int], head: bytes) -> bool:
    """Whether an event is about one of these, except a deletion, which every replica must receive, and a revival."""
    _, type, subject, _, version, _ = head.split(b"\n")
    if subject not in last or int(version) > last[subject]:
        return False
    return type != b"conversation.deleted" or int(version) != last[subject]


def _fork_seconds(settings: Settings) -> float:
    """How many seconds an erasure waits for a fork: the fork's read and its commit may each take all their retries."""
    return 2 * (settings.retry_for + settings.timeout)


class ForkUnderWay:
    """Inside `async with` the target may be made from the source. `over`: erasures no longer wait for this fork."""

    def __init__(self, tiers: Tiers, source: RecordKeys, target: RecordKeys) -> None:
        self._tiers = tiers
        self._source = source
        self._target = target
        self._began = tiers.port.monotonic()
        self.over = False

    async def __aenter__(self) -> Self:
        tiers, key = self._tiers, self._source.forks
        await tiers.clock.know()
        seconds = _fork_seconds(tiers.settings)
        until = b"%d" % int((tiers.clock.now() + seconds) * 1000)
        lasts = b"%d" % int(seconds * 2000 + 1)
        await tiers.warm.commands([(b"HSET", key, self._target.text, until), (b"PEXPIRE", key, lasts)])
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            self.over = not await self._tiers.warm.command(b"HDEL", self._source.forks, self._target.text)
        except StateError as error:
            log.info(
                "the note of a fork of %s could not be removed and will expire: %s", self._source.ref.text[:200], error
            )

    def require_time(self) -> None:
        """Raise WarmUnavailable unless the fork may still be committed."""
        took = self._tiers.port.monotonic() - self._began
        if took > _fork_seconds(self._tiers.settings) / 2:
            raise WarmUnavailable(f"reading the source of the fork took {took:.0f} s; nothing was written")


async def forks_made(tiers: Tiers, sources: Sequence[RecordKeys]) -> set[str]:
    """The records that are being forked from these, or whose fork ended because its process died."""
    answers = await tiers.warm.commands([(b"HKEYS", each.forks) for each in sources])
    return {name.decode() for names in answers for name in names}


async def forks_ended(tiers: Tiers, sources: Sequence[RecordKeys]) -> set[str]:
    """Wait for forks that may already have read one of these; returns the records that they made."""
    found: set[str] = set()
    asked = list(sources)
    pause = _PAUSE
    while asked:
        answers = await tiers.warm.commands([(b"HGETALL", each.forks) for each in asked])
        await tiers.clock.know()
        now_ms = tiers.clock.now() * 1000
        left = []
        for each, pairs in zip(asked, answers, strict=True):
            under_way = dict(zip(pairs[::2], pairs[1::2], strict=True))
            found.update(name.decode() for name in under_way)
            if any(int(until) > now_ms for until in under_way.values()):
                left.append(each)
        asked = left
        if asked:
            await tiers.port.sleep(pause)
            pause = min(2 * pause, _LONGEST)
    forgotten: list[Words] = [(b"DEL", each.forks) for each in sources]
    await tiers.warm.commands(forgotten)
    return found
