"""Work on many records: purge, retention, newer schemas, re-encryption, and repair after SQL was restored.

Law: data is archived before it is removed; each record is one step, so an interrupted run can be repeated.

Re-encryption changes SQL first, then Redis, so that no value with the old key is hydrated from SQL afterwards. Records
may be in use: a value in Redis is replaced in place if it has not changed. Repair works partition by partition; it
reports data that neither Redis nor SQL has, and changes nothing where SQL is not older.

Design: sections 14, 15, 17.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from distributed_state.cold.store import ColdStore
from distributed_state.cold.values import Compacted, Listed, Purged, Wanted
from distributed_state.conversation import window
from distributed_state.errors import ConfigurationError, CorruptState, Deleted, InvalidValue, StateError, Unavailable
from distributed_state.records.context import RecordContext, StoreContext
from distributed_state.records.schema import M, Schema
from distributed_state.records.typed import TypedContext
from distributed_state.results import LostMessages, Reencrypted, Repaired, SessionInfo, Upcast, Usage
from distributed_state.tiers import read as read_path
from distributed_state.tiers.assembly import Tiers
from distributed_state.tiers.fresh_listings import unarchived_changes
from distributed_state.values import codec, message_ranges
from distributed_state.values.journal import Segment
from distributed_state.values.keys import RecordKeys
from distributed_state.values.model import (
    ITEMS,
    MAX_ID_BYTES,
    Ref,
    checked_phase,
    escape,
    is_value,
    log_fields,
    seconds_of,
    unescape,
)
from distributed_state.values.search import tag_texts
from distributed_state.warm.scripts import REWRITE
from distributed_state.warm.stream import StreamEvent

_EVENT = re.compile(r"\w+\.\d+\.\w+", re.ASCII)


async def listing(tiers: Tiers, wanted: Wanted, *, fresh: bool = False) -> list[SessionInfo]:
    """One page of the index in SQL; with `fresh`, merged with unarchived commits."""
    # The journals are read first: commits archived meanwhile are then found in both, and count once.
    late = await unarchived_changes(tiers, wanted) if fresh else []
    return [shown(row) for row in await tiers.port.sql(tiers.cold.listing, wanted, late)]


async def usage(tiers: Tiers, wanted: Wanted, since: Any, *, fresh: bool = False) -> Usage:
    """The tokens of these sessions since a day; with `fresh`, including unarchived commits."""
    try:
        since = 0 if since is None else seconds_of(since)
    except ValueError as error:
        raise InvalidValue(f"since: {error}") from None
    if type(since) not in (int, float) or not 0 <= since <= 1e12:
        raise InvalidValue(f"since is in seconds since 1970, a datetime or None, not {since!r:.80}")
    late = await unarchived_changes(tiers, wanted) if fresh else []
    return await tiers.port.sql(tiers.cold.usage, wanted, int(since * 1000), late)


def wanted(
    *,
    scope: str,
    limit: int,
    user: str | None,
    prefix: str | None,
    tags: Mapping[str, str | Iterable[str]] | None,
    after: str | None,
    phase: str | None = None,
    changed_since: float | None = None,
    changed_before: float | None = None,
    larger_than: int | None = None,
    stuck: bool = False,
) -> Wanted:
    """The arguments of `store.sessions` as the page of a listing. Raises InvalidValue."""
    if type(limit) is not int or not 1 <= limit <= 1000:
        raise InvalidValue(f"limit is an int from 1 to 1000, not {limit!r}")
    Ref(scope, "any")
    if prefix is not None and (not isinstance(prefix, str) or len(prefix) > MAX_ID_BYTES):
        raise InvalidValue(f"a prefix is a str of at most {MAX_ID_BYTES} characters or None, not {prefix!r:.80}")
    for name, value in ("changed_since", changed_since), ("changed_before", changed_before):
        if value is not None and (type(value) not in (int, float) or not 0 <= value <= 1e12):
            raise InvalidValue(f"{name} is in seconds since 1970 or None, not {value!r:.80}")
    if larger_than is not None and (type(larger_than) is not int or not 0 <= larger_than < 2**62):
        raise InvalidValue(f"larger_than is an int from 0 on or None, not {larger_than!r:.80}")
    return Wanted(
        scope,
        limit,
        owner=None if user is None else escape(Ref("user", user).id),
        prefix=None if prefix is None else escape(prefix),
        tags=tuple(tag_texts(tags or {}, "tags")),
        after=after,
        phase=None if phase is None else escape(checked_phase(phase)),
        changed_from_ms=None if changed_since is None else math.ceil(changed_since * 1000),
        changed_to_ms=None if changed_before is None else math.ceil(changed_before * 1000),
        size=None if larger_than is None else larger_than + 1,
        stuck=stuck,
    )


def shown(row: Listed) -> SessionInfo:
    """A row of the index in its public form."""
    return SessionInfo(
        id=unescape(row.id),
        user=None if row.owner is None else unescape(row.owner),
        version=row.version,
        created=row.created_ms / 1000,
        updated=row.updated_ms / 1000,
        deleted=row.deleted,
        cursor=row.cursor,
        phase=None if row.phase is None else unescape(row.phase),
        size=row.size,
    )


# Removing


async def compact(tiers: Tiers, older_than: float, progress: Callable[[int], None] | None) -> dict[str, int]:
    """Pack old history in SQL into blocks."""
    require_age(older_than, tiers.settings.op_window)
    await tiers.clock.know()
    return await pack(tiers.cold, tiers.port.sql, _before_ms(tiers, older_than), progress or (lambda records: None))


async def pack(
    cold: ColdStore, sql: Callable[..., Awaitable[Any]], before_ms: int, progress: Callable[[int], None]
) -> dict[str, int]:
    """Pack commits before a time, some records at a time; `sql` calls a method of the archive."""
    total = Compacted(0, 0, 0)
    after: int | None = 0
    while after is not None:
        done, after = await sql(partial(cold.compact, before_ms, after=after))
        total += done
        progress(total.records)
    return asdict(total)


def _before_ms(tiers: Tiers, age: float) -> int:
    """The commit time that has this age now; 0 at the earliest."""
    now = tiers.clock.now()
    return int((now - min(age, now)) * 1000)


def require_age(older_than: Any, shortest: float) -> None:
    """Raise InvalidValue unless history of this age may be packed.

    A write whose reply was lost may be repeated for `op_window` seconds, and is looked up in the unpacked rows.
    """
    if isinstance(older_than, bool) or not isinstance(older_than, (int, float)) or not older_than >= shortest:
        raise InvalidValue(f"older_than is a number of seconds from {shortest:g} (op_window) on, not {older_than!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """The limits of a purge, by age in seconds and by number: see `store.admin.purge`. Raises InvalidValue."""

    older_than: float | None
    messages_older_than: float | None
    events_older_than: float | None
    branches_older_than: float | None
    keep_changes: int | None
    keep_messages: int | None

    def __post_init__(self) -> None:
        given = asdict(self)
        for name, value in given.items():
            if value is None:
                continue
            if name.startswith("keep"):
                if type(value) is not int or value < 1:
                    raise InvalidValue(f"{name} is an int from 1 on, not {value!r}")
            elif isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
                raise InvalidValue(f"{name} is a number of seconds from 0 on, not {value!r}")
        if all(value is None for value in given.values()):
            raise InvalidValue(f"purge takes at least one of {', '.join(given)}")

    @property
    def of_messages(self) -> bool:
        """Whether the limits change which messages conversations show."""
        return self.keep_messages is not None or self.messages_older_than is not None

    def purge(self, cold: ColdStore, before_ms: Callable[[float], int]) -> Purged:
        """Remove old data from SQL; `before_ms` converts an age to a time in ms."""
        ages = self.older_than, self.events_older_than, self.branches_older_than
        older, events, branches = (None if age is None else before_ms(age) for age in ages)
        return cold.purge(
            older or 0, keep=self.keep_changes, events_before_ms=events, branches_before_ms=branches
        )  # fmt: skip


async def purge(store: StoreContext, wanted: Retention) -> dict[str, int]:
    """Remove old history and old events from SQL."""
    tiers = store.tiers()
    await tiers.archiver.drain()
    await tiers.clock.know()
    left_out = 0
    if wanted.of_messages:
        age = wanted.messages_older_than
        left_out = await _leave_out(store, wanted.keep_messages, None if age is None else _before_ms(tiers, age))
        await tiers.archiver.drain()
    return asdict(await tiers.port.sql(wanted.purge, tiers.cold, partial(_before_ms, tiers))) | {"left_out": left_out}


async def _leave_out(store: StoreContext, keep: int | None, before_ms: int | None) -> int:
    """Hide the messages of conversations beyond these limits; returns how many."""
    tiers = store.tiers()
    left_out = 0
    after: int | None = 0
    while after is not None:
        names, after = await tiers.port.sql(tiers.cold.overfull, keep, before_ms, after)
        for name in names:
            left_out += await window.leave_out(RecordContext(store, Ref.parse(name)), keep, before_ms)
    return left_out


_PAGE = 500


_SHOWN = 100


async def upcast_many(
    store: StoreContext,
    schema: type[M] | Schema[M],
    scope: str,
    user: str | None,
    dry_run: bool,
    limit: int | None,
    progress: Callable[[Upcast], None] | None,
) -> Upcast:
    """Upcast the archived records of a scope, the last changed first. Stops if a server is unavailable."""
    if limit is not None and (type(limit) is not int or limit < 1):
        raise InvalidValue(f"limit is an int from 1 on or None, not {limit!r}")
    schema = Schema.of(schema)
    tiers = store.tiers()
    sofar = Upcast()
    after = None
    owner = None if user is None else escape(Ref("user", user).id)
    Ref(scope, "any")
    await tiers.archiver.drain()
    while rows := await listing(tiers, Wanted(scope, _PAGE, owner=owner, after=after)):
        for row in rows:
            if limit is not None and sofar.upcast >= limit:
                return sofar
            if not row.deleted:
                context = TypedContext(store, Ref(scope, row.id), schema=schema)
                sofar = await _one(context, dry_run, sofar)
                if progress is not None:
                    progress(sofar)
        # Upcast records moved to the front of the listing, so the cursor does not reach them again.
        after = rows[-1].cursor
    return sofar


async def _one(context: TypedContext[Any], dry_run: bool, sofar: Upcast) -> Upcast:
    try:
        older = await context.is_older() if dry_run else await context.upcast() is not None
    except Deleted:
        older = False
    except Unavailable:
        raise
    except StateError as error:
        failures = (*sofar.failures, str(error))[:_SHOWN]
        return replace(sofar, failed=sofar.failed + 1, failures=failures)
    if older:
        return replace(sofar, upcast=sofar.upcast + 1)
    return replace(sofar, unchanged=sofar.unchanged + 1)


log = logging.getLogger(__name__)


Progress = Callable[[Reencrypted], None]


async def reencrypt(tiers: Tiers, dry_run: bool, progress: Progress | None) -> Reencrypted:
    """Reencrypt all records of the namespace, in the order of their names."""
    if not tiers.codec_of("").seals:
        raise ConfigurationError("reencrypt: this store has no keys; give encryption= or DISTRIBUTED_STATE_KEYS")
    await tiers.archiver.drain()
    run = _Run(tiers, dry_run, progress or (lambda done: None))
    await run.each(run.archived)
    if not dry_run:
        await tiers.port.sql(tiers.cold.search.scrub)
    await run.events()
    # Redis comes after all of SQL: a record in Redis may hold messages that were written under other records.
    await run.each(run.copied)
    await run.streams()
    if not dry_run:
        await _forget_journal(tiers)
    return run.done


class _Run:
    def __init__(self, tiers: Tiers, dry_run: bool, progress: Progress) -> None:
        self._tiers = tiers
        self._dry_run = dry_run
        self._progress = progress
        self._unreadable: set[str] = set()
        self._told_unreadably: set[str] = set()  # the subjects of unreadable events
        self.done = Reencrypted()

    async def each(self, operation: Callable[[Sequence[str]], Awaitable[None]]) -> None:
        after = ""
        while texts := await self._tiers.port.sql(self._tiers.cold.names, after):
            await operation(texts)
            self._progress(self.done)
            after = texts[-1]

    async def archived(self, texts: Sequence[str]) -> None:
        """Reencrypt these records in SQL."""
        for text in texts:
            await self._rewrite(text)
            self.done = replace(self.done, records=self.done.records + 1)

    async def _rewrite(self, text: str) -> None:
        tiers = self._tiers
        record_codec = self._tiers.codec_of(text)

        def again(source: str, name: str, data: bytes) -> bytes:
            own = record_codec if source == text else record_codec.of(source)
            try:
                return own.carry(data, name, own) if own.stale(data, name) else data
            except CorruptState:
                # The event was part of a change, and has a row of its own; the record itself is readable.
                if name.startswith(codec.EVENT):
                    return data
                raise

        def rewrite() -> int:
            return tiers.cold.rewrite(text, again, keep=self._dry_run)

        try:
            values = await tiers.port.sql(rewrite)
        except CorruptState as error:
            self._pass_over(text, error)
        else:
            self.done = replace(self.done, values=self.done.values + values)

    def _pass_over(self, text: str, error: CorruptState) -> None:
        log.warning("%s", error, extra=log_fields(text))
        self._unreadable.add(text)
        self.done = replace(self.done, failed=len(self._unreadable))

    async def events(self) -> None:
        """Reencrypt the audit trail."""
        tiers = self._tiers
        unreadable = self._told_unreadably
        after: tuple[int, str, int] | None = (-1, "", 0)

        def again(subject: str, name: str, data: bytes) -> bytes:
            own = tiers.codec_of(subject)
            try:
                return own.carry(data, name, own) if own.stale(data, name) else data
            except CorruptState as error:
                log.warning("%s", error, extra=log_fields(subject))
                unreadable.add(subject)
                return data

        def page() -> tuple[tuple[int, str, int] | None, int]:
            assert after is not None
            return tiers.cold.rewrite_events(after, again, keep=self._dry_run)

        while after is not None:
            after, count = await tiers.port.sql(page)
            failed = len(self._unreadable | unreadable)
            self.done = replace(self.done, values=self.done.values + count, failed=failed)
            self._progress(self.done)

    async def streams(self) -> None:
        """Drop old events from Redis: SQL has them all."""
        tiers = self._tiers

        def old(event: StreamEvent) -> bool:
            id, type, subject, *_ = event.head.decode().split("\n")
            return tiers.codec_of(subject).stale(event.data, codec.event_name(type, id))

        for number in range(tiers.keys.partitions):
            count = await tiers.stream.drop(tiers.keys.partition(number), old, keep=self._dry_run)
            self.done = replace(self.done, copies=self.done.copies + count)
        self._progress(self.done)

    async def copied(self, texts: Sequence[str]) -> None:
        """Reencrypt these records in Redis."""
        tiers = self._tiers
        many = [tiers.keys.of(Ref.parse(text)) for text in texts]
        answers = await tiers.warm.commands([(b"HGETALL", keys.record) for keys in many])
        windows = await self._windows(many, answers)
        for keys, answer in zip(many, answers, strict=True):
            if keys.ref.text not in self._unreadable:
                try:
                    old = self._old(keys.ref.text, dict(zip(answer[::2], answer[1::2], strict=True)))
                except CorruptState as error:
                    self._pass_over(keys.ref.text, error)
                    continue
                stale = bool(old) or keys in windows
                if stale and not self._dry_run:
                    await self._replace(keys, old)
                self.done = replace(self.done, copies=self.done.copies + stale)

    async def _windows(self, many: Sequence[RecordKeys], records: Sequence[list[bytes]]) -> set[RecordKeys]:
        """The records that have an item in Redis under an old key."""
        having = [keys for keys, record in zip(many, records, strict=True) if ITEMS in record[::2]]
        answers = await self._tiers.warm.commands([(b"HGETALL", keys.items) for keys in having]) if having else []
        found = set()
        for keys, answer in zip(having, answers, strict=True):
            own = self._tiers.codec_of(keys.ref.text)
            for field, value in zip(answer[::2], answer[1::2], strict=True):
                frame = value.split(b" ", 2)[-1]
                if field[:1] == b":" and frame and own.stale(frame, codec.item_name(field[1:])):
                    found.add(keys)
        return found

    def _old(self, text: str, stored: dict[bytes, bytes]) -> list[bytes]:
        """The values under an old key: field, present bytes, and the bytes to store instead."""
        record_codec = self._tiers.codec_of(text)
        runs = message_ranges.segments(text, stored)
        old = list[bytes]()
        for name, data in stored.items():
            key = codec.MESSAGE
            own = record_codec
            if is_value(name):
                key = codec.place_of(name)
            elif name[:2] != b"#m" or not name[2:].isdigit():
                continue
            if record_codec.stale(data, key):
                if not is_value(name):
                    number = int(name[2:])
                    # A message is decrypted under the record that it was appended to. Messages that are not in Redis
                    # are in SQL.
                    source = next((run.source for run in runs if run.start <= number < run.stop), None)
                    if source is None:
                        old += (name, data, b"")
                        continue
                    own = record_codec.of(source)
                old += (name, data, own.carry(data, key, own))
        return old

    async def _replace(self, keys: RecordKeys, old: list[bytes]) -> None:
        tiers = self._tiers
        call = (REWRITE, [keys.record, keys.hydration, keys.channel, keys.items])
        arguments = [tiers.epoch(keys.partition), tiers.replica, *old]
        answer = (await tiers.warm.scripts([(*call, arguments)]))[0]
        if isinstance(answer, StateError):
            raise answer
        tiers.hot.forget(keys.ref.text)
        if answer[0] == b"ok" and answer[1]:
            # The record was written meanwhile, perhaps under an old key by a worker that does not have the new one yet.
            await read_path.reach(tiers, keys)
            await self._rewrite(keys.ref.text)


async def _forget_journal(tiers: Tiers) -> None:
    """Replace the journal's last entry, which is always kept, by a mark."""
    partitions = tiers.warm.partitions
    every = [tiers.keys.partition(number) for number in range(tiers.keys.partitions)]
    for number, place in (await partitions.states(every)).items():
        keys, epoch = every[number], place.epoch
        while epoch and not await partitions.mark(keys, epoch):
            await tiers.recovery.start(number)
            epoch = (await partitions.states([keys]))[number].epoch
    await tiers.archiver.drain()
    await tiers.port.sql(tiers.cold.sync)


RepairProgress = Callable[[Repaired], None]


async def repair(tiers: Tiers, dry_run: bool, progress: RepairProgress | None) -> Repaired:
    """Repair all partitions of the namespace, one after the other."""
    done = Repaired()
    for partition in range(tiers.keys.partitions):
        found = await tiers.recovery.repair(partition, dry_run=dry_run)
        done = replace(done, partitions=done.partitions + 1)
        if found is not None:
            done = replace(
                done,
                behind=(*done.behind, partition),
                records=done.records + found.records,
                commits=done.commits + found.commits,
                events=done.events + found.events,
                aside=done.aside + found.aside,
                branched=done.branched + found.branched,
                lost=(*done.lost, *map(_lost, found.lost)),
                deleted=(*done.deleted, *map(_named, found.deleted)),
                lost_items=(*done.lost_items, *map(_named, found.lost_items)),
                refused=(*done.refused, *map(_named, found.refused)),
            )
        if progress is not None:
            progress(done)
    return done


def _lost(gap: Segment) -> LostMessages:
    return LostMessages(*_named(gap.source), gap.start, gap.stop - 1)


def _named(text: str) -> tuple[str, str]:
    scope, _, id = text.partition(":")
    return scope, unescape(id)
