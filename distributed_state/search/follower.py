"""Brings the index up to the archive. Law: whatever becomes of it, the archiver neither waits nor knows.

In a round: partitions are claimed, the records that have waited longest are read, their documents made - and given
vectors, by the user's function, while no transaction is under way - and written with how far the records are. No
transaction waits for a document.

Design: section 21.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from distributed_state.cold.search_index import Changed, Due, Name, Piece, Write
from distributed_state.cold.search_store import SearchStore
from distributed_state.errors import StateError
from distributed_state.port import Port
from distributed_state.search.documents import Translator, document, removed
from distributed_state.search.setting import Setting, call_user, embedded_singly
from distributed_state.tiers.assembly import Tiers
from distributed_state.tiers.workers import JobWorker
from distributed_state.values import chance
from distributed_state.values.codec import decode_key
from distributed_state.values.journal import Segment
from distributed_state.values.model import log_fields
from distributed_state.values.search import Indexed, Row

log = logging.getLogger(__name__)
CLAIM_SECONDS = 60.0
_RECORDS = 100  # looked at in a round
_DOCUMENTS = 200  # in one transaction, at least
_BYTES = 4 * 2**20  # of their texts, at least: each is kept in three forms until it is written
_NAMED = 10
_OFF_SECONDS = 60.0
_REST_SECONDS = 5.0
_TOGETHER_SECONDS = 1.0
_REPORT_SECONDS = 0.5
_WAIT = 0.05


class Moved(NamedTuple):
    """How many records a round brought up, and whether there is more to do at once."""

    records: int
    more: bool


class Follower(JobWorker):
    """Follows the archive: in the background, for the partitions that this replica archives, or when asked to."""

    job_name = "distributed-state-index"

    def __init__(self, tiers: Tiers, setting: Setting) -> None:
        super().__init__(tiers.port)
        self._tiers = tiers
        self._setting = setting
        self._search: SearchStore = tiers.cold.search
        self.indexed = 0
        self.behind: int | None = None  # records, as last counted; None: nobody counted, or search is off
        self.failure = ""  # why the last round failed, "" if it did not
        self.left_out: dict[str, None] = {}  # documents that `embed` refuses, the last few

    async def round(self, some: Sequence[int] | None, claimer: str) -> Moved:
        """Bring up what has waited longest in these partitions, or all, and what nobody else is at."""
        waiting = await self._port.sql(self._search.waiting, self._setting.stored)
        if waiting is None:
            self._setting.look_again()
        wanted = [each for each in waiting or () if some is None or each in some]
        if not wanted:
            return Moved(0, more=False)
        await self._tiers.clock.know()
        taken: list[int] | None = None
        try:
            taken = await self._port.shield(self._claim(wanted, claimer))
            if not taken:
                return Moved(0, more=False)
            work = Round(self._tiers, self._setting, claimer, self.left_out)
            left, more = await self._port.sql(self._search.next_due, taken, _RECORDS)
            count = len(left)
            while left:
                found = await self._port.sql(self._search.changes, left)
                for one, changed in zip(left, found, strict=False):
                    await work.take(one, changed)
                left = left[len(found) :]
            await work.flush()
        finally:
            # Whatever became of it: who waits for the index would wait until the claim ends.
            if taken != []:
                await self._port.shield(self._leave(claimer))
        self.indexed += work.done
        return Moved(work.done, more=(more or work.done < count) and not work.lost)

    async def _claim(self, wanted: Sequence[int], claimer: str) -> list[int]:
        now_ms = int(self._tiers.clock.now() * 1000)
        call = partial(self._search.claim, wanted, claimer, now_ms, CLAIM_SECONDS, self._setting.stored)
        taken = await self._port.sql(call)
        if taken is None:
            self._setting.look_again()
        return taken or []

    async def _leave(self, claimer: str) -> None:
        try:
            await self._port.sql(self._search.release, claimer)
        except StateError as error:
            log.warning("search: %s", error)

    async def erased(self) -> None:
        """Have the index forget what was erased: SQLite's the words, one of the user's own all of it.

        What a follower brings there at this very moment it removes next: the erasure is noted for it, too.
        """
        await self._port.sql(self._search.scrub)
        await self._setting.renew(self._port, self._search)
        index = self._setting.index
        if index is not None and await self._setting.follows(self._port, self._search):
            gone = [removed(text) for text in await self._port.sql(self._search.gone) if text]
            if gone:
                await call_user(self._port, "index.apply", index.apply, gone)

    async def catch_up(self, progress: Callable[[Indexed], None] | None = None) -> int:
        """Bring up all that is due now, or let others do it; the number of the last note of that."""
        claimer = chance.token_hex(8)
        # Not what is written meanwhile: there may always be more.
        goal = await self._port.sql(self._search.last_due)
        report_at = 0.0
        while True:
            waits = await self._port.sql(self._search.waits, goal)
            began = self._port.monotonic()
            if progress is not None and (began >= report_at or not waits):
                progress(await self.reached(goal))
                # All that is due is counted: mostly it is something else that takes the time.
                report_at = self._port.monotonic() + _REPORT_SECONDS + 10 * (self._port.monotonic() - began)
            if not waits:
                return goal
            await self._setting.require(self._port, self._search)
            if not (await self.round(None, claimer)).records:
                await self._port.sleep(_WAIT)

    async def reached(self, goal: int | None = None) -> Indexed:
        """How many records there are, and how many have changes that the index lacks, of those noted up to there."""
        records = await self._port.sql(self._search.records)
        return Indexed(records, await self._port.sql(self._search.lacking, goal))

    async def _run(self) -> None:
        claimer = chance.token_hex(8)
        archiver = self._tiers.archiver
        every = pause = self._tiers.settings.archive_every
        seen, rested = -1, math.inf
        look_at = 0.0
        while True:
            began = self._port.monotonic()
            try:
                if not self._setting.on and began < look_at:
                    await self._port.sleep(_WAIT * 20)  # the first search may switch it on at any time
                    continue
                look_at = began + _OFF_SECONDS
                if not await self._setting.follows(self._port, self._search):
                    self.behind, self.failure = None, ""
                    await self._port.sleep(_WAIT * 20)
                    continue
                look_at = 0.0
                # Without asking SQL: what others archived there, or imported, is found a little later.
                if archiver.archived != seen or rested >= _REST_SECONDS:
                    seen, rested = archiver.archived, 0.0
                    moved = await self.round(archiver.mine, claimer)
                    if moved.more:
                        seen = -1
                    elif moved.records:
                        # Together, changes are indexed at a fraction of the cost; SQLite has one writer at a time.
                        await self._port.sleep(_TOGETHER_SECONDS)
                    elif self._setting.on and (self._tiers.telemetry.measures or self.behind is None):
                        self.behind = await self._port.sql(self._search.lacking)
                self.failure, pause = "", every
            except Exception as error:  # noqa: BLE001  # a job that ended would be missed by nobody
                self.failure = str(error) if isinstance(error, StateError) else f"{type(error).__name__}: {error}"[:500]
                self._setting.look_again()
                look_at = 0.0
                pause = min(max(pause, every) * 2, 5.0)
                seen = -1
                log.warning("search: %s; trying again in %.1f s", self.failure, pause)
            rested += pause
            # As long as a round took, too: so it has half of a process at most, and others the rest of the machine.
            await self._port.sleep(self._port.monotonic() - began if seen == -1 and not self.failure else pause)


# One round


class Round:
    """Documents on their way into the index, from one round of one claimer."""

    def __init__(self, tiers: Tiers, setting: Setting, claimer: str, left_out: dict[str, None]) -> None:
        self._port: Port = tiers.port
        self._clock = tiers.clock
        self._search: SearchStore = tiers.cold.search
        self._setting = setting
        self._claimer = claimer
        self._translator = Translator(tiers.codec_of, setting.kinds, encrypted=setting.encrypted)
        self._writes: list[Write] = []
        self._rows: list[Row] = []  # for an index of the user's own
        self._documents = 0
        self._bytes = 0  # of their texts
        self._left_out = left_out  # what `embed` refuses
        self.lost = False
        self.done = 0

    async def take(self, one: Due, changed: Changed | None) -> None:
        """Bring one record up to what it is."""
        if one.gone or one.known == (one.epoch, one.version):
            if one.gone:
                self._shows_no_more(one.record)
            if one.gone and self._elsewhere and one.record:
                self._rows.append(removed(one.record))
            self._note(Write(one, done=None if one.gone else one.known))
        elif changed is not None:
            write = Write(one, done=(one.epoch, changed.version))
            self._add(write, changed.pieces, changed.version, {}, set())
            self._note(write)
        else:
            await self._whole(one)
        await self._flush_if_full()

    @property
    def _elsewhere(self) -> bool:
        return self._setting.index is not None

    def _note(self, write: Write) -> None:
        self._writes.append(write)
        self._documents += 1

    def _add(
        self, write: Write, pieces: Iterable[Piece], version: int, existing: dict[Name, bytes], seen: set[Name]
    ) -> None:
        for piece in pieces:
            stored = self._translator.stored(piece, version)
            if stored is None:
                seen.discard(piece.name)
                self._left_out.pop(_described(write.due, piece.name), None)
                if piece.name[0] != "message" and not existing:
                    write.remove.append(piece.name)
                    if self._elsewhere:
                        self._rows.append(removed(write.due.record, piece.name))
                continue
            seen.add(piece.name)
            if existing.get(piece.name) != stored.digest:
                write.put.append(stored)
                self._bytes += len(stored.text)
                if self._elsewhere:
                    self._rows.append(document(write.due, stored))
        self._documents += len(write.put) + len(write.remove)

    async def _whole(self, one: Due) -> None:
        """Compare all that a record shows with what the index has of it, a page at a time."""
        sql = self._port.sql
        found = await sql(self._search.whole, one)
        existing, seen = dict(found.existing), set[Name]()
        self._shows_no_more(one.record)
        if self._elsewhere:
            self._rows.append(removed(one.record))
        await self._page(one, found.shown, existing, seen)
        for run in found.runs:
            left: Segment | None = run
            while left:
                page, left = await sql(self._search.messages, one, left)
                await self._page(one, page, existing, seen)
        for layer in found.layers:
            after = (b"", b"")
            while page := await sql(self._search.items_page, layer, after):
                await self._page(one, page, existing, seen)
                after = page[-1].name[1:]
        gone = [name for name in existing if name not in seen]
        if self._elsewhere:
            self._rows += [removed(one.record, name) for name in gone]
        # The last of its pages: with it the index has this version, and the record is due no more.
        self._note(Write(one, remove=gone, done=(one.epoch, one.version)))

    async def _page(self, one: Due, pieces: Sequence[Piece], existing: dict[Name, bytes], seen: set[Name]) -> None:
        for some in _portions(pieces):
            write = Write(one)
            self._add(write, some, one.version, existing, seen)
            # What lies above it in the line may say otherwise of an item that the index has by now.
            existing.update((stored.name, stored.digest) for stored in write.put)
            if write.put:
                self._writes.append(write)
            await self._flush_if_full()

    async def _flush_if_full(self) -> None:
        if self._documents >= _DOCUMENTS or self._bytes >= _BYTES:
            await self.flush()

    async def flush(self) -> None:
        """Write what was collected."""
        writes, rows = self._writes, self._rows
        self._writes, self._rows, self._documents, self._bytes = [], [], 0, 0
        if self.lost or not writes:
            return
        if self._elsewhere:
            await self._apply(rows)
            for each in writes:
                each.put.clear()
        elif self._setting.embed is not None:
            await self._give_vectors(writes)
        until_ms = int((self._clock.now() + CLAIM_SECONDS) * 1000)
        call = partial(self._search.write, self._claimer, until_ms, writes, self._setting.language)
        done = await self._port.sql(call)
        self.lost = done is None
        self.done += len(done or ())

    async def _apply(self, rows: Sequence[Row]) -> None:
        assert self._setting.index is not None
        if rows:
            await call_user(self._port, "index.apply", self._setting.index.apply, list(rows))

    async def _give_vectors(self, writes: Sequence[Write]) -> None:
        texts = [stored.text for each in writes for stored in each.put]
        vectors = iter(await embedded_singly(self._port, self._setting, texts))
        for each in writes:
            put, each.put = each.put, []
            for stored in put:
                vector = next(vectors)
                if vector is None:
                    each.remove.append(stored.name)
                    self._leave_out(each.due.record, _described(each.due, stored.name))
                else:
                    each.put.append(replace(stored, vector=vector))
                    self._left_out.pop(_described(each.due, stored.name), None)

    def _shows_no_more(self, record: str) -> None:
        """What was left out of it is forgotten, until it is refused again."""
        for name in [each for each in self._left_out if each.startswith(f"{record} ")]:
            del self._left_out[name]

    def _leave_out(self, record: str, name: str) -> None:
        log.warning("search: `embed` refuses %s, which is left out", name, extra=log_fields(record))
        self._left_out[name] = None
        while len(self._left_out) > _NAMED:
            del self._left_out[next(iter(self._left_out))]


def _portions(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """The same in turn, as many together as are of a transaction's size."""
    some: list[Piece] = []
    size = 0
    for piece in pieces:
        some.append(piece)
        size += len(piece.data or b"")
        if size >= _BYTES:
            yield some
            some, size = [], 0
    if some:
        yield some


def _described(one: Due, name: Name) -> str:
    kind, collection, key = name
    inside = f" of {decode_key(collection)}" if kind == "item" else ""
    return f"{one.record} {kind} {decode_key(key)}{inside}"
