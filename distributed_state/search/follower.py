"""The settings of a store's search, and the job that updates the index from the archive.

Law: all stores of an archive agree about its index; the archiver neither waits for the index nor depends on it;
encrypted values have no words unless the user asked for that.

A round claims partitions, reads the records that have waited longest, makes their documents and writes these together
with how far each record is indexed. The user's `embed` is called while no transaction is open, so a transaction never
waits for it. If a user's function (`embed`, an index of the user's own) raises anything, the caller gets a StateError.

Design: section 21.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import orjson

from distributed_state.cold.search_index import Changed, Due, Name, Piece, Stored, Write
from distributed_state.cold.search_store import SearchStore
from distributed_state.errors import ConfigurationError, CorruptState, StateError, Unavailable
from distributed_state.port import Port
from distributed_state.results import Indexed
from distributed_state.tiers.assembly import Tiers
from distributed_state.tiers.workers import JobWorker
from distributed_state.values import chance, field_ttl
from distributed_state.values import codec as codecs
from distributed_state.values.codec import MESSAGE, SEALED, Codec, decode_key
from distributed_state.values.journal import Segment
from distributed_state.values.model import Ref, log_fields, unescape
from distributed_state.values.search import KINDS, Kind, Row, Search, SearchDocument, SearchRemoval

log = logging.getLogger(__name__)
CLAIM_SECONDS = 60.0
_RECORDS = 100  # in a round
_DOCUMENTS = 200  # in one transaction, at least
_BYTES = 4 * 2**20  # of the documents' texts, at least: each text is in memory in three forms until it is written
_NAMED = 10
_OFF_SECONDS = 60.0
_REST_SECONDS = 5.0
_TOGETHER_SECONDS = 1.0
_REPORT_SECONDS = 0.5
_WAIT = 0.05
_LONGEST = 200_000  # bytes of a text that are indexed; a tsvector of PostgreSQL holds a megabyte
OFF = (
    "search: it is off in this namespace: open the store with search=True, or with search=Search(...), "
    "or run `distributed-state index`"
)
_HARMLESS = "text"


class Setting:
    """The settings of a store's index. `lazily`: the first search switches the index on."""

    def __init__(self, given: Search | bool | None, *, lazily: bool, migrate: bool) -> None:
        if given is not None and not isinstance(given, (bool, Search)):
            raise ConfigurationError(f"search: give True or Search(...), not {given!r:.80}")
        self._given = Search() if given is True else given or None
        self._never = given is False
        self._lazily = lazily and not self._never
        self._migrate = migrate
        self.on = False
        self.stored = ""  # the settings in the database, once they were read
        self.search = self._given or Search()
        self._elsewhere = self.search.index is not None
        if self._given is not None:
            _require_sense(self._given)

    @property
    def wanted(self) -> bool:
        """Whether the store was opened with search."""
        return self._given is not None

    def look_again(self) -> None:
        """Read the settings again before the next use, because the index may have been removed or rebuilt."""
        self.on = False

    async def renew(self, port: Port, search: SearchStore) -> None:
        """Check whether another process removed or rebuilt the index."""
        if self.on and await port.sql(search.settings) != self.stored:
            self.on = False

    async def follows(self, port: Port, search: SearchStore) -> bool:
        """Whether there is an index here that this store can follow."""
        if not self.on and not self._never:
            await self._look(port, search, create=self._migrate and self.wanted)
        return self.on and not self._lacking()

    async def require(self, port: Port, search: SearchStore, *, create: bool = False) -> None:
        """Require an index.

        Raises ConfigurationError if search is off or has other settings, or a function or right is missing.
        """
        create = create or (self._migrate and (self.wanted or self._lazily))
        if not self.on and not await self._look(port, search, create=create):
            raise ConfigurationError(OFF)
        if lacking := self._lacking():
            raise ConfigurationError(lacking)

    def _lacking(self) -> str:
        if self.search.dimensions is not None and self.search.embed is None:
            return (
                "search: its index has vectors: open the store with the same search=Search(embed=..., dimensions=...)"
            )
        if self._elsewhere and self.search.index is None:
            return "search: its index is elsewhere: open the store with the same search=Search(index=...)"
        return ""

    async def _look(self, port: Port, search: SearchStore, *, create: bool) -> bool:
        found = await port.sql(search.settings)
        if found is None and create:
            languages = await port.sql(search.languages)
            if self.search.language not in languages:
                raise ConfigurationError(
                    f"search: no language {self.search.language!r:.80} here: {', '.join(sorted(languages))}"
                )
            found = await port.sql(search.switch_on, self._text(), self.search.dimensions)
        if found is None:
            return False
        values: dict[str, Any] = orjson.loads(found)
        known = {name: values[name] for name in self._values()}  # a newer release may have added others
        if self._given is not None and known != self._values():
            raise ConfigurationError(
                f"search: the index was made with {found}, not with {self._text()}: open the store with the same "
                "options, or remove the index with `distributed-state index --remove` and start again"
            )
        self._adopt(known)
        self.stored, self.on = found, True
        return True

    def _values(self) -> dict[str, Any]:
        own = self.search
        values = {"language": own.language, "kinds": sorted(own.kinds), "encrypted": own.encrypted}
        return values | {"dimensions": own.dimensions, "elsewhere": own.index is not None}

    def _text(self) -> str:
        return orjson.dumps(self._values(), option=orjson.OPT_SORT_KEYS).decode()

    def _adopt(self, found: dict[str, Any]) -> None:
        made_elsewhere = found.pop("elsewhere")
        self._elsewhere = made_elsewhere or self.search.index is not None
        found["kinds"] = tuple(kind for kind in KINDS if kind in found["kinds"])
        self.search = replace(self.search, **found)


def _require_sense(search: Search) -> None:
    if (search.embed is None) != (search.dimensions is None):
        raise ConfigurationError("search: `embed` and `dimensions` are given together")
    if search.dimensions is not None and (type(search.dimensions) is not int or not 1 <= search.dimensions <= 16000):
        raise ConfigurationError(f"search: dimensions is an int from 1 to 16000, not {search.dimensions!r:.80}")
    if search.embed is not None and search.index is not None:
        raise ConfigurationError("search: a custom index makes its own vectors: leave out `embed`")
    if not search.kinds or set(search.kinds) - set(KINDS):
        raise ConfigurationError(f"search: kinds are some of {', '.join(KINDS)}, not {search.kinds!r:.80}")
    if not isinstance(search.language, str):
        raise ConfigurationError(f"search: language is a name, not {search.language!r:.80}")


# Functions that the user gave: `embed`, an index of the user's own


async def call_user(port: Port, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a user's function, plain or coroutine, and return its result. Any exception of it becomes Unavailable."""
    try:
        if inspect.iscoroutinefunction(function):
            return await port.complete(function(*arguments))
        found = await port.thread(function, *arguments)
        return await port.complete(found) if inspect.isawaitable(found) else found
    except StateError:
        raise
    except Exception as error:
        raise Unavailable(f"search: `{what}` failed with {type(error).__name__}: {str(error)[:200]}") from error


async def embedded(port: Port, setting: Setting, texts: list[str]) -> list[str]:
    """The vectors of the texts, each as a SQL literal."""
    if not texts:
        return []
    assert setting.search.embed is not None
    answer = await call_user(port, "embed", setting.search.embed, texts)
    try:
        vectors = [[float(number) for number in vector] for vector in answer]
    except Exception as error:  # an object of the user's own may raise anything
        what = f"{type(error).__name__}: {str(error)[:200]}"
        raise ConfigurationError(f"search: `embed` did not return a list of vectors ({what})") from error
    if len(vectors) != len(texts):
        raise ConfigurationError(f"search: `embed` returned {len(vectors)} vectors for {len(texts)} texts")
    for vector in vectors:
        if len(vector) != setting.search.dimensions or not all(map(math.isfinite, vector)):
            what = f"a vector of {len(vector)} numbers, {setting.search.dimensions} finite ones were announced"
            raise ConfigurationError(f"search: `embed` returned {what}")
    return ["[" + ",".join(map(repr, vector)) + "]" for vector in vectors]


async def embedded_singly(port: Port, setting: Setting, texts: list[str]) -> list[str | None]:
    """Like `embedded`, with None for a text that `embed` refuses. Raises if `embed` refuses every text.

    The list is halved until the refused text is alone.
    """
    try:
        return [*await embedded(port, setting, texts)]
    except StateError:
        # Find out whether one of these texts is the cause or the model is down; checked each time, as it may fail at
        # any moment.
        await embedded(port, setting, [_HARMLESS])
    if len(texts) == 1:
        try:
            # Try again: the answer may have been lost, and a document that is left out stays out until it changes.
            return [*await embedded(port, setting, texts)]
        except StateError:
            return [None]
    middle = len(texts) // 2
    first = await embedded_singly(port, setting, texts[:middle])
    return first + await embedded_singly(port, setting, texts[middle:])


# Documents


class Translator:
    """Makes search documents of stored values."""

    def __init__(self, codec_of: Callable[[str], Codec], kinds: tuple[Kind, ...], *, encrypted: bool) -> None:
        self._codec_of = codec_of
        self._kinds = kinds
        self._encrypted = encrypted

    def stored(self, piece: Piece, version: int) -> Stored | None:
        """The document of a piece; None if it must not be indexed."""
        kind = piece.name[0]
        data = piece.data
        if not data or kind not in self._kinds:
            return None
        ends, frame = field_ttl.split(data)
        sealed_as = _sealed_as(piece.name)
        codec = self._codec_of(piece.source)
        if not self._encrypted and (frame[:1] == SEALED or codec.covers(sealed_as)):
            return None
        try:
            json_text = codec.open(data, sealed_as)
            value = codecs.decode(json_text)
        except CorruptState:
            return None  # or its key is missing here, an error that a reader of the record gets
        text = text_of(kind, value)
        if not text:
            return None
        # The same prefix of a message holds its commit time.
        ends_ms = None if kind == "message" or ends == field_ttl.NEVER else int(ends * 1000)
        digest = hashlib.blake2b(b"%a %b %b" % (ends_ms, text.encode(), json_text), digest_size=12).digest()
        return Stored(piece.name, version, ends_ms, digest, text, json_text)


def _sealed_as(name: Name) -> str:
    kind, collection, key = name
    if kind == "message":
        return MESSAGE
    return codecs.item_name(collection + b"\0" + key) if kind == "item" else codecs.decode_key(key)


def text_of(kind: str, value: Any) -> str:
    """The words by which a message, a field or an item is found."""
    return shortened(said(value) if kind == "message" else words_of(value))


def words_of(value: Any) -> str:
    """The texts and numbers in a JSON value, a line each, without the names of its fields."""
    return "\n".join(_leaves(value))


def _leaves(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield str(value)
    elif isinstance(value, (dict, list)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _leaves(each)


def said(message: Any) -> str:
    """The text of a message, without tool calls and attachments."""
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "\n".join(part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str))


def shortened(text: str) -> str:
    """The text as every index takes it: without NUL and lone surrogates, cut to a length that all can hold."""
    return text.replace("\0", " ").encode("utf-8", "replace")[:_LONGEST].decode("utf-8", "ignore").strip()


def document(one: Due, stored: Stored) -> SearchDocument:
    """A document for an index of the user's own."""
    ref = Ref.parse(one.record)
    kind, collection, name = stored.name
    return SearchDocument(
        scope=ref.scope,
        id=ref.id,
        kind=kind,  # type: ignore[arg-type]  # the tables hold no others
        collection=codecs.decode_key(collection),
        name=codecs.decode_key(name),
        version=stored.version,
        text=stored.text,
        value=codecs.decode(stored.value),
        user=None if one.owner is None else unescape(one.owner),
        ends=None if stored.ends_ms is None else stored.ends_ms / 1000,
    )


def removed(record: str, name: Name | None = None) -> SearchRemoval:
    """The removal of one document of a record, or of all of them."""
    ref = Ref.parse(record)
    if name is None:
        return SearchRemoval(ref.scope, ref.id)
    kind, collection, key = name
    names = (codecs.decode_key(collection), codecs.decode_key(key))
    return SearchRemoval(ref.scope, ref.id, kind, *names)  # type: ignore[arg-type]  # the tables hold no others


# The job


class Moved(NamedTuple):
    """How many records a round brought up to date, and whether more work is due now."""

    records: int
    more: bool


class Follower(JobWorker):
    """Follows the archive: in the background for the partitions that this replica archives, or on request."""

    job_name = "distributed-state-index"

    def __init__(self, tiers: Tiers, setting: Setting) -> None:
        super().__init__(tiers.port)
        self._tiers = tiers
        self._setting = setting
        self._search: SearchStore = tiers.cold.search
        self.indexed = 0
        self.behind: int | None = None  # records, as last counted; None: not counted yet, or search is off
        self.failure = ""  # why the last round failed, "" if it did not
        self.left_out: dict[str, None] = {}  # documents that `embed` refuses, the last few

    async def round(self, some: Sequence[int] | None, claimer: str) -> Moved:
        """Index the longest waiting records of these partitions, or of all, unless another worker claimed them."""
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
            # Also after an error: otherwise callers that wait for the index would wait until the claim ends.
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
        """Remove erased records from the index: the words from SQLite's, the documents from an index of the user's own.

        If a follower writes such a document at this moment, its next round removes it, because the erasure is noted
        there too.
        """
        await self._port.sql(self._search.scrub)
        await self._setting.renew(self._port, self._search)
        index = self._setting.search.index
        if index is not None and await self._setting.follows(self._port, self._search):
            gone = [removed(text) for text in await self._port.sql(self._search.erased_texts) if text]
            if gone:
                await call_user(self._port, "index.apply", index.apply, gone)

    async def catch_up(self, progress: Callable[[Indexed], None] | None = None) -> int:
        """Index everything that is due now, or wait until others have; return the number of the last note."""
        claimer = chance.token_hex(8)
        # Later changes are not awaited, because there may always be more.
        goal = await self._port.sql(self._search.last_due)
        report_at = 0.0
        while True:
            waits = await self._port.sql(self._search.waits, goal)
            began = self._port.monotonic()
            if progress is not None and (began >= report_at or not waits):
                progress(await self.reached(goal))
                # Counting reads all that is due, so do it less often than the work itself.
                report_at = self._port.monotonic() + _REPORT_SECONDS + 10 * (self._port.monotonic() - began)
            if not waits:
                return goal
            await self._setting.require(self._port, self._search)
            if not (await self.round(None, claimer)).records:
                await self._port.sleep(_WAIT)

    async def reached(self, goal: int | None = None) -> Indexed:
        """How many records there are, and how many have unindexed changes, counted up to the note `goal`."""
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
                # Decided without asking SQL: changes that others archived or imported are found a little later.
                if archiver.archived != seen or rested >= _REST_SECONDS:
                    seen, rested = archiver.archived, 0.0
                    moved = await self.round(archiver.mine, claimer)
                    if moved.more:
                        seen = -1
                    elif moved.records:
                        # Indexing many changes together costs a fraction; SQLite has one writer at a time.
                        await self._port.sleep(_TOGETHER_SECONDS)
                    elif self._setting.on and (self._tiers.telemetry.measures or self.behind is None):
                        self.behind = await self._port.sql(self._search.lacking)
                self.failure, pause = "", every
            except Exception as error:  # noqa: BLE001  # the job must survive: nothing would restart it
                self.failure = str(error) if isinstance(error, StateError) else f"{type(error).__name__}: {error}"[:500]
                self._setting.look_again()
                look_at = 0.0
                pause = min(max(pause, every) * 2, 5.0)
                seen = -1
                log.warning("search: %s; trying again in %.1f s", self.failure, pause)
            rested += pause
            # Also pause as long as the round took, so that this job uses at most half of a process.
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
        self._translator = Translator(tiers.codec_of, setting.search.kinds, encrypted=setting.search.encrypted)
        self._writes: list[Write] = []
        self._rows: list[Row] = []  # for an index of the user's own
        self._documents = 0
        self._bytes = 0  # of their texts
        self._left_out = left_out  # documents that `embed` refuses
        self.lost = False
        self.done = 0

    async def take(self, one: Due, changed: Changed | None) -> None:
        """Index the changes of one record."""
        if one.erased or one.indexed == (one.epoch, one.version):
            if one.erased:
                self._shows_no_more(one.record)
            if one.erased and self._elsewhere and one.record:
                self._rows.append(removed(one.record))
            self._note(Write(one, done=None if one.erased else one.indexed))
        elif changed is not None:
            write = Write(one, done=(one.epoch, changed.version))
            self._add(write, changed.pieces, changed.version, {}, set())
            self._note(write)
        else:
            await self._whole(one)
        await self._flush_if_full()

    @property
    def _elsewhere(self) -> bool:
        return self._setting.search.index is not None

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
        """Compare everything that a record shows with the index, a page at a time."""
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
        # This is the record's last page: the index then has this version, and the record is no longer due.
        self._note(Write(one, remove=gone, done=(one.epoch, one.version)))

    async def _page(self, one: Due, pieces: Sequence[Piece], existing: dict[Name, bytes], seen: set[Name]) -> None:
        for some in _portions(pieces):
            write = Write(one)
            self._add(write, some, one.version, existing, seen)
            # A higher layer may replace an item that was written from a lower one.
            existing.update((stored.name, stored.digest) for stored in write.put)
            if write.put:
                self._writes.append(write)
            await self._flush_if_full()

    async def _flush_if_full(self) -> None:
        if self._documents >= _DOCUMENTS or self._bytes >= _BYTES:
            await self.flush()

    async def flush(self) -> None:
        """Write the collected changes."""
        writes, rows = self._writes, self._rows
        self._writes, self._rows, self._documents, self._bytes = [], [], 0, 0
        if self.lost or not writes:
            return
        if self._elsewhere:
            await self._apply(rows)
            for each in writes:
                each.put.clear()
        elif self._setting.search.embed is not None:
            await self._give_vectors(writes)
        until_ms = int((self._clock.now() + CLAIM_SECONDS) * 1000)
        call = partial(self._search.write, self._claimer, until_ms, writes, self._setting.search.language)
        done = await self._port.sql(call)
        self.lost = done is None
        self.done += len(done or ())

    async def _apply(self, rows: Sequence[Row]) -> None:
        assert self._setting.search.index is not None
        if rows:
            await call_user(self._port, "index.apply", self._setting.search.index.apply, list(rows))

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
        """Forget which documents of this record were left out, until `embed` refuses them again."""
        for name in [each for each in self._left_out if each.startswith(f"{record} ")]:
            del self._left_out[name]

    def _leave_out(self, record: str, name: str) -> None:
        log.warning("search: `embed` refuses %s; it is not indexed", name, extra=log_fields(record))
        self._left_out[name] = None
        while len(self._left_out) > _NAMED:
            del self._left_out[next(iter(self._left_out))]


def _portions(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """The pieces in order, in groups of about one transaction's size."""
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
