"""Brings the index up to the archive. Law: whatever becomes of it, the archiver neither waits nor knows.

In a round: partitions are claimed, the records that have waited longest are read, their documents made - and given
vectors, by the user's function, while no transaction is under way - and written with how far the records are.

Design: section 21.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from distributed_state.cold.search_feed import Changed, Due, Name, Piece, Stored, Write
from distributed_state.cold.search_store import SearchStore
from distributed_state.errors import StateError
from distributed_state.port import Job, Port
from distributed_state.search.documents import Translator, document, removed
from distributed_state.search.setting import Setting
from distributed_state.search.user_functions import call_user, embedded
from distributed_state.tiers.assembly import Tiers
from distributed_state.tiers.workers import Worker
from distributed_state.values.search import Indexed, Row

log = logging.getLogger(__name__)
_RECORDS = 100  # looked at in a round
_DOCUMENTS = 200  # in one transaction, at least
_CLAIM_SECONDS = 60.0
_OFF_SECONDS = 60.0
_REST_SECONDS = 5.0
_TOGETHER_SECONDS = 1.0
_WAIT = 0.05


class Round:
    """Documents on their way into the index, from one round of one claimer."""

    def __init__(self, tiers: Tiers, setting: Setting, claimer: str) -> None:
        self._port: Port = tiers.port
        self._clock = tiers.clock
        self._search: SearchStore = tiers.cold.search
        self._setting = setting
        self._claimer = claimer
        self._translator = Translator(tiers.codec_of, setting.kinds, encrypted=setting.encrypted)
        self._writes: list[Write] = []
        self._rows: list[Row] = []  # for an index of the user's own
        self._documents = 0
        self.lost = False
        self.done = 0

    async def take(self, one: Due, changed: Changed | None) -> None:
        """Bring one record up to what it is."""
        if one.gone or one.known == (one.epoch, one.version):
            if one.gone and self._elsewhere and one.record:
                self._rows.append(removed(one.record))
            self._note(Write(one, done=None if one.gone else one.known))
        elif changed is not None:
            write = Write(one, done=(one.epoch, changed.version))
            self._add(write, changed.pieces, changed.version, {}, set())
            self._note(write)
        else:
            await self._whole(one)
        if self._documents >= _DOCUMENTS:
            await self.flush()

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
                if piece.name[0] != "message" and not existing:
                    write.remove.append(piece.name)
                    if self._elsewhere:
                        self._rows.append(removed(write.due.record, piece.name))
                continue
            seen.add(piece.name)
            if existing.get(piece.name) != stored.digest:
                write.put.append(stored)
                if self._elsewhere:
                    self._rows.append(document(write.due, stored))
        self._documents += len(write.put) + len(write.remove)

    async def _whole(self, one: Due) -> None:
        """Compare all that a record shows with what the index has of it, a page at a time."""
        sql = self._port.sql
        found = await sql(self._search.whole, one)
        existing, seen = dict(found.existing), set[Name]()
        if self._elsewhere:
            self._rows.append(removed(one.record))
        await self._page(one, found.shown, existing, seen)
        for run in found.runs:
            await self._page(one, await sql(self._search.messages, one, run), existing, seen)
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
        write = Write(one)
        self._add(write, pieces, one.version, existing, seen)
        # What lies above it in the line may say otherwise of an item that the index has by now.
        existing.update((stored.name, stored.digest) for stored in write.put)
        if write.put:
            self._writes.append(write)
        if self._documents >= _DOCUMENTS:
            await self.flush()

    async def flush(self, *, last: bool = False) -> None:
        """Write what was collected; with the `last` of it the claim is given back."""
        writes, rows = self._writes, self._rows
        self._writes, self._rows, self._documents = [], [], 0
        if self.lost or not writes:
            return
        if self._elsewhere:
            await self._apply(rows)
            for each in writes:
                each.put.clear()
        elif self._setting.embed is not None:
            await self._give_vectors([stored for each in writes for stored in each.put], writes)
        until_ms = 0 if last else int((self._clock.now() + _CLAIM_SECONDS) * 1000)
        call = partial(self._search.write, self._claimer, until_ms, writes, self._setting.language)
        done = await self._port.sql(call)
        self.lost = done is None
        self.done += len(done or ())

    async def _apply(self, rows: Sequence[Row]) -> None:
        assert self._setting.index is not None
        if rows:
            await call_user(self._port, "index.apply", self._setting.index.apply, list(rows))

    async def _give_vectors(self, some: Sequence[Stored], writes: Sequence[Write]) -> None:
        vectors = iter(await embedded(self._port, self._setting, [stored.text for stored in some]))
        for each in writes:
            each.put = [replace(stored, vector=next(vectors)) for stored in each.put]


class Follower(Worker):
    """Follows the archive: in the background, for the partitions that this replica archives, or when asked to."""

    def __init__(self, tiers: Tiers, setting: Setting) -> None:
        self._tiers = tiers
        self._port = tiers.port
        self._setting = setting
        self._job: Job | None = None
        self._search: SearchStore = tiers.cold.search
        self.indexed = 0
        self.behind: int | None = None  # records, as last counted; None: nobody counted, or search is off
        self.failure = ""  # why the last round failed, "" if it did not

    def begin(self) -> None:
        """Follow in the background."""
        self._job = self._port.spawn(self._run, "distributed-state-index")

    async def close(self) -> None:
        """Stop following."""
        if self._job is not None:
            await self._job.stop()
            self._job = None

    async def round(self, some: Sequence[int] | None, claimer: str) -> int | None:
        """Bring up what has waited longest in these partitions, or all; how many records. None: others are at it."""
        waiting = await self._port.sql(self._search.waiting)
        wanted = [each for each in waiting if some is None or each in some]
        if not wanted:
            return 0
        await self._tiers.clock.know()
        now_ms = int(self._tiers.clock.now() * 1000)
        taken = await self._port.sql(self._search.claim, wanted, claimer, now_ms, _CLAIM_SECONDS)
        if not taken:
            return None
        work = Round(self._tiers, self._setting, claimer)
        try:
            for one, changed in await self._port.sql(self._search.next_due, taken, _RECORDS):
                await work.take(one, changed)
            await work.flush(last=True)
        except BaseException:
            await self._port.shield(self._leave(claimer))
            raise
        self.indexed += work.done
        return None if work.lost else work.done

    async def _leave(self, claimer: str) -> None:
        try:
            await self._port.sql(self._search.release, claimer)
        except StateError as error:
            log.warning("search: %s", error)

    async def erased(self) -> None:
        """Have an index of the user's own forget what was erased; the database's has forgotten it by then.

        What a follower brings there at this very moment it removes next: the erasure is noted for it, too.
        """
        index = self._setting.index
        if index is not None and await self._setting.follows(self._port, self._search):
            gone = [removed(text) for text in await self._port.sql(self._search.gone) if text]
            if gone:
                await call_user(self._port, "index.apply", index.apply, gone)

    async def catch_up(self, progress: Callable[[Indexed], None] | None = None) -> Indexed:
        """Bring up all that is due now, or let others do it; how far the index is then."""
        claimer = secrets.token_hex(8)
        # Not what is written meanwhile: there may always be more.
        goal = await self._port.sql(self._search.last_due)
        while True:
            moved = await self.round(None, claimer)
            if progress is not None or not moved:
                records, behind = await self._port.sql(self._search.behind, goal)
                if progress is not None:
                    progress(Indexed(records, behind))
                if not behind:
                    return Indexed(records, behind)
            if not moved:
                await self._port.sleep(_WAIT)

    async def _run(self) -> None:
        claimer = secrets.token_hex(8)
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
                    self.behind = None
                    await self._port.sleep(_WAIT * 20)
                    continue
                # Without asking SQL: what others archived there, or imported, is found a little later.
                if archiver.archived != seen or rested >= _REST_SECONDS:
                    seen, rested = archiver.archived, 0.0
                    moved = await self.round(archiver.mine, claimer) or 0
                    if moved >= _RECORDS:
                        seen = -1  # there is more
                    elif moved:
                        # Together, changes are indexed at a fraction of the cost; SQLite has one writer at a time.
                        await self._port.sleep(_TOGETHER_SECONDS)
                    elif self._tiers.telemetry.measures or self.behind is None:
                        _, self.behind = await self._port.sql(self._search.behind)
                self.failure, pause = "", every
            except StateError as error:
                self.failure = str(error)
                self._setting.look_again()
                look_at = 0.0
                pause = min(max(pause, every) * 2, 5.0)
                seen = -1
                log.warning("search: %s; trying again in %.1f s", error, pause)
            rested += pause
            # As long as a round took, too: so it has half of a process at most, and others the rest of the machine.
            await self._port.sleep(self._port.monotonic() - began if seen == -1 and not self.failure else pause)
