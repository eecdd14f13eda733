"""What this replica was acknowledged and SQL may not have yet. Law: nothing is forgotten that SQL is not known to have.

Redis can come back older than an acknowledgment: from a file, or as a replica that was behind. Then the writers that
live still know what was lost. So each commit is noted here on its way back to the caller, as what was sent and what was
answered; nothing of it is computed or copied before somebody asks.

**Identity, never numbers.** An answer says how far its partition is archived under its epoch. That drops what is kept
of the same epoch, and says nothing about another one. Of an epoch that is over, SQL is asked for each commit by its
event. An epoch never spans two lives of the data: a changed life begins another one before anything is committed in it.

What is kept of a commit makes its journal entry, byte for byte as commit.lua wrote it. Only the size that the journal
had is missing, which nobody else needs.

The memory is bounded in bytes. At the bound a writer archives, or waits for who does, and is refused in the end.

**Gathering.** A replica that recovers a partition leaves a request, with a token and the epoch that is asked for, and
reads a list to which each replica adds what it remembers, in pieces, and then its end. A replica receives requests
through its link, looks for them when the link begins, and several times a second while it has none. So a replica that
does not answer for a while has ended or stands still: it counts as silent, and what it remembers comes late. A request
lies in one hash of the fleet, and in its partition, for those who cannot reach the other.

Design: section 14.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from distributed_state.cold.store import ColdStore
from distributed_state.errors import Backpressure, CorruptState, StateError, WarmUnavailable
from distributed_state.port import Job, Mutex, Port, Words
from distributed_state.settings import Settings
from distributed_state.tiers.archiver import Archiver
from distributed_state.tiers.recovery import CLOCKS_MS
from distributed_state.values import chance
from distributed_state.values.journal import JournalEntry, Step, pack, pack_entries, unpack, unpack_entries
from distributed_state.values.keys import Keys, PartitionKeys, RecordKeys
from distributed_state.values.model import LIFETIME, OWNER
from distributed_state.warm.answers import Committed, PartitionState, committed
from distributed_state.warm.client import OpId, Warm
from distributed_state.warm.link import Link
from distributed_state.warm.stream import count as ordinal

log = logging.getLogger(__name__)
Late = Callable[[int, str, list[JournalEntry]], Awaitable[None]]
_TOKEN = re.compile(r"[A-Za-z](\d+)")
_FIRST_EVENT = re.compile(rb"e(\d+)$")
# What is held for one commit, and for each word that was sent, beside the bytes of names and values. Measured with
# tracemalloc on CPython 3.11 (tests/tiers/test_unarchived.py measures it again).
_EACH_BYTES = 300
_WORD_BYTES = 34
_EXPECTATIONS = 15  # where what is sent says how many there are
_BESIDE = (b"e", b"E", b"x", b"X")  # steps that change no record


# One commit


class Remembered(NamedTuple):
    """A commit that was acknowledged: what was sent and what was answered, of which nothing is computed or copied.

    `sent` is the entry itself, where the writer does not know all of it: its answer was lost and came once more.
    """

    offset: int
    epoch: str
    size: int
    sent: Sequence[Any] | JournalEntry
    answer: bytes = b""

    def entry(self) -> JournalEntry:
        """As it stands in the journal."""
        if isinstance(self.sent, JournalEntry):
            return self.sent
        (constants, _, sequence, _, digest, _, lock_value), (kind, actor, owner, record) = (
            self.sent[:7], self.sent[10:14]
        )  # fmt: skip
        token = _TOKEN.match(lock_value)
        steps = _steps(self.sent)
        done = committed(self.answer, [each for each in steps if each[0] not in _BESIDE])
        return JournalEntry(
            offset=self.offset,
            event=f"{constants[0]}.{sequence}.{digest}",
            record=record.decode(),
            version=done.version,
            time_ms=done.time_ms or 0,
            kind=kind,
            actor=actor,
            token=int(token[1]) if token else 0,
            data=pack(_written(done, steps, record, owner)),
            total_bytes=0,
            next_message=(done.first_message or 0) + sum(step == b"m" for step, _, _ in steps),
        )


def _of_commit(op: OpId, done: Committed) -> tuple[Any, ...]:
    """A commit as `Remembered` has it, as a plain tuple.

    Python's garbage collector goes through lists and objects as long as they live, again and again, but takes tuples
    of plain values out of its account. Keeping the draft itself cost three times as much as all of the rest.
    """
    sent = tuple(op.sent)
    size = _EACH_BYTES + op.size + _WORD_BYTES * len(sent)
    for _, name, value in op.events:
        size += len(name) + len(value)
    return done.offset, done.epoch, size, sent, done.text


def _of_entry(epoch: str, entry: JournalEntry) -> tuple[Any, ...]:
    """The same of an entry that is known as it stands in the journal."""
    size = _EACH_BYTES + len(entry.data) + len(entry.record)
    return entry.offset, epoch, size, entry


def _steps(sent: Sequence[Any]) -> list[Step]:
    """The triples at the end of what commit.lua was sent."""
    first = _EXPECTATIONS + 1 + 2 * sent[_EXPECTATIONS]
    return [(sent[at], sent[at + 1], sent[at + 2]) for at in range(first, len(sent), 3)]


def _written(done: Committed, sent: Sequence[Step], record: bytes, owner: str) -> Iterator[Step]:
    """The steps as commit.lua wrote them."""
    said = done.said
    yield from done.applied() or ()
    found = _FIRST_EVENT.search(said)
    number = int(found[1]) if found else 0
    for step, name, value in sent:
        if step not in _BESIDE or (step in (b"E", b"X") and not done.begins):
            continue
        if step in (b"e", b"E"):
            yield b"e", b"%d %b %b" % (number, name, record), value
            number += 1
        elif int(name) or int(value):
            limit = (done.time_ms or 0) + int(value) if int(value) > 0 else 0
            yield b"s", LIFETIME, b"%b %d" % (name, limit)
    yield from done.first_items
    if b"o" in said:
        yield b"s", OWNER, owner.encode()


class Memory:
    """The acknowledged commits of one replica, by partition, each until it is archived.

    `late(partition, epoch, entries)` keeps what was acknowledged under an epoch that is over, and that SQL lacks; it is
    called again with the same entries if it raises. `limit` is in bytes; infinite if nothing is remembered at all.
    """

    late: Late

    def __init__(
        self, port: Port, warm: Warm, cold: ColdStore, archiver: Archiver, keys: Keys, settings: Settings
    ) -> None:
        self.bytes = 0
        # What an embedded server loses, its process lost with it.
        self.remembers = settings.memory_bytes > 0 and settings.url is not None
        self.limit = settings.memory_bytes if self.remembers else float("inf")
        self._port = port
        self._warm = warm
        self._cold = cold
        self._archiver = archiver
        self._keys = keys
        self._wait = settings.retry_for
        # Plain tuples, as `Remembered` has them.
        self._kept: defaultdict[int, deque[tuple[Any, ...]]] = defaultdict(deque)
        self._last: dict[int, tuple[str, int]] = {}  # where nothing is remembered: epoch and offset of the last commit
        self._mutex = Mutex()
        self._driving: set[object] = set()  # where

    def __len__(self) -> int:
        with self._mutex:
            return sum(map(len, self._kept.values()))

    # On the way of a commit

    def remember(self, names: RecordKeys, op: OpId, done: Committed) -> bool:
        """Note a commit that is being acknowledged, and let go of those that its answer shows to be archived.

        False if it does not say enough: its answer was lost and came once more. Then it is to be recalled.
        """
        if not self.remembers or not done.offset:
            self._note(names.partition, done.epoch, done.offset)
            return True  # it is from SQL that we know it, or nothing is remembered
        if done.time_ms is None:
            return False
        self._append(names.partition, _of_commit(op, done), done.archived)
        return True

    def _append(self, partition: int, commit: tuple[Any, ...], archived: int) -> None:
        with self._mutex:
            kept = self._kept[partition]
            kept.append(commit)
            self.bytes += commit[2]
            first = kept[0]
            while first[0] <= archived and first[1] == commit[1]:
                self.bytes -= kept.popleft()[2]
                if not kept:
                    break
                first = kept[0]

    def _note(self, partition: int, epoch: str, offset: int) -> None:
        last = self._last.get(partition, ("", 0))
        if offset and (last[0] != epoch or last[1] < offset):
            self._last[partition] = epoch, offset

    async def remember_event(self, keys: PartitionKeys, epoch: str, entry: JournalEntry, archived: int) -> None:
        """Note an event that was written alone, as `remember` does a commit."""
        if not self.remembers:
            self._note(keys.partition, epoch, entry.offset)
            return
        if entry.offset:
            self._append(keys.partition, _of_entry(epoch, entry), archived)
        elif not await self._recall(keys, entry.event):
            id = f"{entry.event.removesuffix('emit')}0"
            if await self._port.sql(self._cold.event, keys.partition, id, entry.time_ms - CLOCKS_MS) is not None:
                return
            raise WarmUnavailable(f"partition {keys.partition}: the server that said it has an event was replaced")

    async def recall(self, names: RecordKeys, op: OpId, done: Committed) -> bool:
        """Note a commit by its entry in the journal.

        False if neither that nor SQL has it: the server that said so was replaced meanwhile by one without it. Raises
        WarmUnavailable or ColdUnavailable if they cannot be asked: then its answer is as good as lost again.
        """
        event = self._warm.ops.event(op)
        if await self._recall(names, event):
            return True
        # It was trimmed, so it is archived; unless this is another server's journal.
        entry = JournalEntry(done.offset, event, names.ref.text, done.version, 0, "", "", 0, b"", 0)
        return not await self._port.sql(self._cold.lacking, names.partition, done.epoch, [entry])

    async def _recall(self, keys: RecordKeys | PartitionKeys, event: str) -> bool:
        epoch, found = await self._warm.partitions.find(keys, event)
        if found is not None:
            self._append(keys.partition, _of_entry(epoch, found), 0)
        return found is not None

    def archived(self, partition: int, epoch: str, offset: int) -> None:
        """Let go of what a partition committed under this epoch, up to this offset: SQL has that."""
        kept = self._kept.get(partition)
        with self._mutex:
            while kept and kept[0][0] <= offset and kept[0][1] == epoch:
                self.bytes -= kept.popleft()[2]

    async def make_room(self, text: str) -> None:
        """Wait until less is remembered than may be. Raises Backpressure if that lasts for `retry_for` seconds."""
        deadline = self._port.monotonic() + min(self._wait, self._warm.left())
        here = self._port.here()
        problem: StateError | None = None
        while self.bytes >= self.limit:
            if here not in self._driving:
                self._driving.add(here)
                try:
                    await self._archiver.drain(self.partitions())
                    await self.look()
                    problem = None
                except StateError as error:
                    problem = error
                finally:
                    self._driving.discard(here)
                if self.bytes < self.limit:
                    return
            if self._port.monotonic() >= deadline:
                why = f": {problem}" if problem else ""
                kept = f"{self.bytes} bytes of acknowledged commits are not archived, memory_bytes={self.limit}"
                raise Backpressure(f"{text[:200]}: {kept}{why}") from problem
            await self._port.sleep(0.02)

    # For who recovers a partition

    def entries(self, partition: int, epoch: str) -> list[JournalEntry]:
        """What is remembered of a partition's commits under an epoch, in the order of their answers."""
        with self._mutex:
            kept = [each for each in self._kept.get(partition, ()) if each[1] == epoch]
        return self._entries(kept)

    def _entries(self, kept: Sequence[tuple[Any, ...]]) -> list[JournalEntry]:
        return [Remembered(*each).entry() for each in kept]

    # In the background

    async def look(self) -> None:
        """Let go of what is archived; asks nobody if nothing is remembered."""
        partitions = self.partitions()
        if partitions:
            states = await self._warm.partitions.reachable_states([self._keys.partition(each) for each in partitions])
            for partition, state in states.items():
                self.archived(partition, state.epoch, state.archived)
                await self._settle_closed(partition, state)

    def written(self) -> dict[int, tuple[str, int]]:
        """Epoch and offset of this replica's last commit in each partition where some may not be archived yet."""
        with self._mutex:
            last = dict(self._last)
            for partition, kept in self._kept.items():
                if kept:
                    epoch = kept[-1][1]
                    last[partition] = epoch, max(each[0] for each in kept if each[1] == epoch)
            return last

    def partitions(self) -> list[int]:
        """Those of which anything is remembered."""
        with self._mutex:
            return [partition for partition, kept in self._kept.items() if kept]

    async def _settle_closed(self, partition: int, state: PartitionState) -> None:
        """Let go of what was acknowledged under epochs that are over: SQL has it, or it came too late."""
        # SQL closes an epoch before Redis begins the next one, so SQL has whatever it will ever have of it.
        with self._mutex:
            kept = self._kept[partition]
            if not kept or kept[0][1] == state.epoch:
                return  # those of before were first, and are gone
            closed = [each for each in kept if ordinal(each[1]) < ordinal(state.epoch)]
        for epoch, some in groupby(sorted(closed, key=lambda each: ordinal(each[1])), key=lambda each: str(each[1])):
            entries = self._entries(list(some))
            lacking = await self._port.sql(self._cold.lacking, partition, epoch, entries)
            late = [entry for entry in entries if entry.event in lacking]
            if late:
                await self.late(partition, epoch, late)
        gone = set(map(id, closed))
        with self._mutex:
            kept = self._kept[partition]
            left = [each for each in kept if id(each) not in gone]
            self.bytes -= sum(each[2] for each in kept if id(each) in gone)
            kept.clear()
            kept.extend(left)


_EVERY = 0.2  # seconds between two looks for requests, while they are not heard
_LOOK = 1.0  # seconds between two looks for what is archived
_KEPT_MS = b"60000"
_PIECE_BYTES = 256 * 1024
_PAGE = 64  # pieces
_PIECE, _END = b"p", b"z"


class Gathered(NamedTuple):
    """What was found: each commit once, by its event, and the replicas that did not answer to the end."""

    entries: list[JournalEntry]
    silent: set[str]


class Gathering:
    """Asks other replicas what they remember, and answers them.

    `active`: this one is on the roll of replicas. `link`: through which requests are heard, None to look for them.
    """

    def __init__(self, port: Port, warm: Warm, keys: Keys, memory: Memory, link: Link | None, *, active: bool) -> None:
        self._port = port
        self._warm = warm
        self._keys = keys
        self._memory = memory
        self._hearing = link if active else None  # nobody waits for the answer of one that is not on the roll
        self._active = active
        self._asked = port.signal()
        self._answered: dict[str, None] = {}
        self._job: Job | None = None

    def begin(self) -> None:
        """Answer from now on, and let go of what is archived, in the background."""
        if self._memory.remembers:
            self._job = self._port.spawn(self._run, "distributed-state-memory")

    async def close(self) -> None:
        """Stop."""
        if self._job is not None:
            await self._job.stop()
            self._job = None

    # Who asks

    async def gather(self, partition: int, epoch: str, replicas: Iterable[str], *, silence: float = 0.5) -> Gathered:
        """What this replica and these remember of a partition's commits under an epoch.

        Waits for them while anything comes, and for `silence` seconds without a word. Raises WarmUnavailable.
        """
        found = {entry.event: entry for entry in self._memory.entries(partition, epoch)}
        wanted = set(replicas) - {self._warm.replica}
        if not wanted:
            return Gathered(list(found.values()), wanted)
        token = chance.token_hex(8)
        request = f"{token} {epoch}"
        keys = self._keys
        await self._warm.command(b"SET", keys.partition(partition).gathering, request, b"PX", _KEPT_MS)
        try:
            fleet = [
                (b"HSET", keys.gatherings, partition, request),
                (b"PEXPIRE", keys.gatherings, _KEPT_MS),
                (b"SPUBLISH", keys.gatherings_channel, request),
            ]
            await self._try(fleet)
            wanted -= await self._read(keys.gathered(partition, token), wanted, found, silence)
        finally:
            await self._try([(b"HDEL", keys.gatherings, partition)])
            own = [(b"DEL", keys.partition(partition).gathering), (b"DEL", keys.gathered(partition, token))]
            await self._try(own)
        return Gathered(list(found.values()), wanted)

    async def _try(self, commands: Sequence[Words]) -> None:
        """What may fail: the list of requests lies at one server, and every key ends by itself."""
        try:
            for answer in await self._port.exchange(commands):
                if isinstance(answer, StateError):
                    raise answer
        except StateError as error:
            log.warning("gathering: %s", error)

    async def _read(self, answers: bytes, wanted: set[str], found: dict[str, JournalEntry], silence: float) -> set[str]:
        """Read answers until all have ended or nothing came for so long; those that ended."""
        ended = set[str]()
        broken = set[str]()
        at = 0
        last = self._port.monotonic()
        while wanted - ended - broken:
            pieces = await self._warm.command(b"LRANGE", answers, at, at + _PAGE - 1)
            at += len(pieces)
            for piece in pieces:
                for kind, replica, data in unpack(piece):
                    try:
                        if kind == _END:
                            ended.add(replica.decode())
                        else:
                            found.update((entry.event, entry) for entry in unpack_entries(data))
                    except CorruptState as error:
                        broken.add(replica.decode())
                        log.error("gathering: what replica %s remembers cannot be read: %s", replica.decode(), error)
            now = self._port.monotonic()
            if pieces:
                last = now
            elif now - last > silence:
                break
            else:
                await self._port.sleep(0.01)
        return ended - broken

    # Who answers

    async def _run(self) -> None:
        looked = 0.0
        said = ""
        asked = True
        if self._hearing is not None:
            self._hearing.listen(self._keys.gatherings_channel, lambda *_: self._asked.set())
        while True:
            try:
                if asked or not self._hears():
                    self._asked.clear()
                    await self.answer()
                    asked = False
                now = self._port.monotonic()
                if now - looked >= _LOOK:
                    looked = now
                    await self._memory.look()
                said = ""
            except StateError as error:
                log.log(logging.DEBUG if said else logging.WARNING, "memory: %s", error)
                said = str(error)
            asked = await self._asked.wait(_LOOK if self._hears() and not asked else _EVERY) or asked

    def _hears(self) -> bool:
        return self._hearing is not None and self._hearing.confirmed(self._keys.gatherings_channel)

    async def answer(self) -> None:
        """Answer whoever asks now what this replica remembers."""
        for partition, request in await self._requests():
            token, _, epoch = request.partition(" ")
            if token in self._answered:
                continue
            for piece in self._pieces(self._memory.entries(partition, epoch)):
                await self._push(self._keys.gathered(partition, token), piece)
            # Only now: one that was broken off is begun again, and what comes twice is found once.
            self._answered[token] = None
            while len(self._answered) > 4 * self._keys.partitions:
                del self._answered[next(iter(self._answered))]

    async def _requests(self) -> list[tuple[int, str]]:
        """Who asks, as the fleet's list of requests says, or else the partitions of which anything is remembered."""
        mine = self._memory.partitions()
        if not mine and not self._active:
            return []  # nobody waits for our answer
        try:
            rows = await self._port.command(b"HGETALL", self._keys.gatherings)
            return [(int(rows[at]), rows[at + 1].decode()) for at in range(0, len(rows), 2)]
        except WarmUnavailable:
            if not mine:
                raise
        asked: list[Words] = [(b"GET", self._keys.partition(each).gathering) for each in mine]
        answers: list[Any] = await self._port.exchange(asked)
        return [(each, answer.decode()) for each, answer in zip(mine, answers, strict=True) if type(answer) is bytes]

    def _pieces(self, entries: Sequence[JournalEntry]) -> Iterator[bytes]:
        """What is sent, each piece of a bounded size unless one entry is larger; the last one is the end."""
        some: list[JournalEntry] = []
        size = 0
        replica = self._warm.replica.encode()
        for entry in entries:
            some.append(entry)
            size += len(entry.data) + 200
            if size > _PIECE_BYTES:
                yield pack([(_PIECE, replica, pack_entries(some))])
                some = []
                size = 0
        yield pack([(_PIECE, replica, pack_entries(some)), (_END, replica, b"")])

    async def _push(self, answers: bytes, piece: bytes) -> None:
        for answer in await self._port.exchange([(b"RPUSH", answers, piece), (b"PEXPIRE", answers, _KEPT_MS)]):
            if isinstance(answer, StateError):
                raise answer
