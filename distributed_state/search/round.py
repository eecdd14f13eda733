"""One round of a follower: records on their way into the index. Law: no transaction waits for a document.

Design: section 21.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from distributed_state.cold.search_due import Due
from distributed_state.cold.search_feed import Changed, Name, Piece, Write
from distributed_state.cold.search_store import SearchStore
from distributed_state.port import Port
from distributed_state.search.documents import Translator, document, removed
from distributed_state.search.setting import Setting
from distributed_state.search.user_functions import call_user, embedded_singly
from distributed_state.tiers.assembly import Tiers
from distributed_state.values.codec import decode_key
from distributed_state.values.journal import Segment
from distributed_state.values.model import log_fields
from distributed_state.values.search import Row

log = logging.getLogger(__name__)
CLAIM_SECONDS = 60.0
_NAMED = 10
_DOCUMENTS = 200  # in one transaction, at least
_BYTES = 4 * 2**20  # of their texts, at least: each is kept in three forms until it is written


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
