"""Encrypts everything stored under the current key.

Law: SQL first, then what Redis holds, so that nothing read back from SQL is old. What is done already is not touched.
Nothing waits for a record to rest: a value in Redis is replaced where it stands, if it still is what was found.

Design: section 17.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from distributed_state.errors import ConfigurationError, CorruptState, StateError
from distributed_state.tiers import commit as write_path
from distributed_state.tiers.assembly import Tiers
from distributed_state.values import codec, message_ranges
from distributed_state.values.keys import RecordKeys
from distributed_state.values.model import ITEMS, Ref, is_value, log_fields
from distributed_state.warm.scripts import REWRITE
from distributed_state.warm.stream import StreamEvent

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reencrypted:
    """How many records were looked at, values reencrypted in SQL, records so in Redis, records unreadable.

    The data of an event is a value, an event that Redis keeps counts as a record there; what events are about that
    cannot be read counts as a record.
    """

    records: int = 0
    values: int = 0
    copies: int = 0
    failed: int = 0


Progress = Callable[[Reencrypted], None]


async def reencrypt(tiers: Tiers, dry_run: bool, progress: Progress | None) -> Reencrypted:
    """All records of the namespace, in the order of their texts."""
    if not tiers.codec_of("").seals:
        raise ConfigurationError("reencrypt: this store has no keys; give encryption= or DISTRIBUTED_STATE_KEYS")
    await tiers.archiver.drain()
    run = _Run(tiers, dry_run, progress or (lambda done: None))
    await run.each(run.archived)
    if not dry_run:
        await tiers.port.sql(tiers.cold.search.scrub)
    await run.events()
    # Not before all of SQL is done: a copy in Redis holds messages that were written under other records.
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
        self._told_unreadably: set[str] = set()  # what events are about
        self.done = Reencrypted()

    async def each(self, step: Callable[[Sequence[str]], Awaitable[None]]) -> None:
        after = ""
        while texts := await self._tiers.port.sql(self._tiers.cold.names, after):
            await step(texts)
            self._progress(self.done)
            after = texts[-1]

    async def archived(self, texts: Sequence[str]) -> None:
        """What SQL holds of these records."""
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
                # An event that went with a change: it has a row of its own, and the record can be read.
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
        """The audit trail."""
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
        """The events that Redis keeps for who comes back: SQL has them all."""
        tiers = self._tiers

        def old(event: StreamEvent) -> bool:
            id, type, subject, *_ = event.head.decode().split("\n")
            return tiers.codec_of(subject).stale(event.data, codec.event_name(type, id))

        for number in range(tiers.keys.partitions):
            count = await tiers.stream.drop(tiers.keys.partition(number), old, keep=self._dry_run)
            self.done = replace(self.done, copies=self.done.copies + count)
        self._progress(self.done)

    async def copied(self, texts: Sequence[str]) -> None:
        """What Redis holds of these records."""
        tiers = self._tiers
        many = [tiers.keys.of(Ref.parse(text)) for text in texts]
        answers = await tiers.warm.commands([(b"HGETALL", names.record) for names in many])
        windows = await self._windows(many, answers)
        for names, answer in zip(many, answers, strict=True):
            if names.ref.text not in self._unreadable:
                try:
                    old = self._old(names.ref.text, dict(zip(answer[::2], answer[1::2], strict=True)))
                except CorruptState as error:
                    self._pass_over(names.ref.text, error)
                    continue
                stale = bool(old) or names in windows
                if stale and not self._dry_run:
                    await self._replace(names, old)
                self.done = replace(self.done, copies=self.done.copies + stale)

    async def _windows(self, many: Sequence[RecordKeys], records: Sequence[list[bytes]]) -> set[RecordKeys]:
        """Those of the records of which Redis has an item that is stored otherwise than it would be now."""
        having = [names for names, record in zip(many, records, strict=True) if ITEMS in record[::2]]
        answers = await self._tiers.warm.commands([(b"HGETALL", names.items) for names in having]) if having else []
        found = set()
        for names, answer in zip(having, answers, strict=True):
            own = self._tiers.codec_of(names.ref.text)
            for field, value in zip(answer[::2], answer[1::2], strict=True):
                frame = value.split(b" ", 2)[-1]
                if field[:1] == b":" and frame and own.stale(frame, codec.item_name(field[1:])):
                    found.add(names)
        return found

    def _old(self, text: str, stored: dict[bytes, bytes]) -> list[bytes]:
        """What is stored otherwise than it would be now: field, bytes, and the bytes that it should be."""
        record_codec = self._tiers.codec_of(text)
        runs = message_ranges.segments(text, stored)
        old = list[bytes]()
        for name, data in stored.items():
            key = codec.MESSAGE
            own = record_codec
            if is_value(name):
                key = codec.decode_key(name)
            elif name[:2] != b"#m" or not name[2:].isdigit():
                continue
            if record_codec.stale(data, key):
                if key == codec.MESSAGE:
                    number = int(name[2:])
                    # A message opens under the record that it was appended to. One that is hidden now is in SQL.
                    source = next((run.source for run in runs if run.start <= number < run.stop), None)
                    if source is None:
                        old += (name, data, b"")
                        continue
                    own = record_codec.of(source)
                old += (name, data, own.carry(data, key, own))
        return old

    async def _replace(self, names: RecordKeys, old: list[bytes]) -> None:
        tiers = self._tiers
        call = (REWRITE, [names.record, names.hydration, names.channel, names.items])
        arguments = [tiers.epoch(names.partition), tiers.replica, *old]
        answer = (await tiers.warm.scripts([(*call, arguments)]))[0]
        if isinstance(answer, StateError):
            raise answer
        tiers.hot.forget(names.ref.text)
        if answer[0] == b"ok" and answer[1]:
            # Written meanwhile, perhaps still under an old key, by a worker that had not heard of the new one.
            await write_path.reach(tiers, names)
            await self._rewrite(names.ref.text)


async def _forget_journal(tiers: Tiers) -> None:
    """The journal keeps its last entry; a mark takes its place."""
    partitions = tiers.warm.partitions
    every = [tiers.keys.partition(number) for number in range(tiers.keys.partitions)]
    for number, place in (await partitions.states(every)).items():
        keys, epoch = every[number], place.epoch
        while epoch and not await partitions.mark(keys, epoch):
            await tiers.recovery.start(number)
            epoch = (await partitions.states([keys]))[number].epoch
    await tiers.archiver.drain()
    await tiers.port.sql(tiers.cold.sync)
