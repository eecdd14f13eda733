"""A replica's unarchived commits. Law: an acknowledged commit is kept until SQL is known to have it.

Redis can come back with data older than an acknowledgment: from a file, or after failover to a lagging server. Live
writers then still have the lost commits, because each commit is kept here before its caller gets it
(`UnarchivedCommits.add`), as the arguments that were sent and the answer. Its journal entry is computed from these
only when it is needed, byte for byte as commit.lua wrote it, except for the size of the journal, which is not needed
elsewhere.

**Commits are identified by their events, never by numbers.** An answer reports how far its partition is archived under
its epoch, so earlier commits of that epoch are dropped; commits of other epochs are not. Once an epoch has ended, SQL
is asked for each of its commits by its event. An epoch never spans two data ids: a new data id begins a new epoch
before any commit is accepted.

The kept commits are bounded in bytes. At the bound a writer runs the archiver, or waits for another writer that does;
after `retry_for` seconds its write is refused.

**Gathering.** A replica that recovers a partition publishes a request with a token and an epoch, and reads a list to
which each replica adds its unarchived commits in pieces, and then an end mark. A replica receives requests through its
link, and polls for them when the link starts and several times a second while it is down. A replica that does not
answer for a while has therefore ended or is stopped: it counts as silent, and its commits become branches later
(`late`). A request is in one hash for the fleet, and in its partition for replicas that cannot reach that hash.

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
from distributed_state.values.journal import JournalEntry, Operation, pack, pack_entries, unpack, unpack_entries
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
# The bytes of one commit, and of each word that was sent, without the bytes of names and values. Measured with
# tracemalloc on CPython 3.11 (tests/tiers/test_unarchived.py measures it again).
_EACH_BYTES = 300
_WORD_BYTES = 34
_EXPECTATIONS = 15  # the index, in the arguments of commit.lua, of the number of expectations
_BESIDE = (b"e", b"E", b"x", b"X")  # operations of `Draft.events`


# One commit


class UnarchivedCommit(NamedTuple):
    """An acknowledged commit: the arguments of commit.lua and its answer.

    A repeated answer, after a lost one, lacks the time; then `sent` is the entry as read from the journal.
    """

    offset: int
    epoch: str
    size: int
    sent: Sequence[Any] | JournalEntry
    answer: bytes = b""

    def entry(self) -> JournalEntry:
        """The commit's entry in the journal."""
        if isinstance(self.sent, JournalEntry):
            return self.sent
        (constants, _, sequence, _, digest, _, lock_value), (kind, actor, owner, record) = (
            self.sent[:7], self.sent[10:14]
        )  # fmt: skip
        token = _TOKEN.match(lock_value)
        operations = _operations(self.sent)
        done = committed(self.answer, [each for each in operations if each[0] not in _BESIDE])
        return JournalEntry(
            offset=self.offset,
            event=f"{constants[0]}.{sequence}.{digest}",
            record=record.decode(),
            version=done.version,
            time_ms=done.time_ms or 0,
            kind=kind,
            actor=actor,
            token=int(token[1]) if token else 0,
            data=pack(_written(done, operations, record, owner)),
            total_bytes=0,
            next_message=(done.first_message or 0) + sum(operation == b"m" for operation, _, _ in operations),
        )


def _of_commit(op: OpId, done: Committed) -> tuple[Any, ...]:
    """The fields of `UnarchivedCommit`, as a plain tuple.

    Python's garbage collector visits lists and objects as long as they live, but stops tracking tuples of plain values.
    Keeping the draft itself cost three times as much as everything else here.
    """
    sent = tuple(op.sent)
    size = _EACH_BYTES + op.size + _WORD_BYTES * len(sent)
    for _, name, value in op.events:
        size += len(name) + len(value)
    return done.offset, done.epoch, size, sent, done.text


def _of_entry(epoch: str, entry: JournalEntry) -> tuple[Any, ...]:
    """Like `_of_commit`, for an entry that was read from the journal."""
    size = _EACH_BYTES + len(entry.data) + len(entry.record)
    return entry.offset, epoch, size, entry


def _operations(sent: Sequence[Any]) -> list[Operation]:
    """The operations at the end of the arguments of commit.lua."""
    first = _EXPECTATIONS + 1 + 2 * sent[_EXPECTATIONS]
    return [(sent[at], sent[at + 1], sent[at + 2]) for at in range(first, len(sent), 3)]


def _written(done: Committed, sent: Sequence[Operation], record: bytes, owner: str) -> Iterator[Operation]:
    """The operations as commit.lua wrote them."""
    flags = done.flags
    yield from done.applied(list(_events(done, sent, record))) or ()
    yield from done.first_items
    if b"o" in flags:
        yield b"s", OWNER, owner.encode()
    yield from done.begun_again


def _events(done: Committed, sent: Sequence[Operation], record: bytes) -> Iterator[Operation]:
    """The operations that commit.lua made of those of `Draft.events`."""
    found = _FIRST_EVENT.search(done.flags)
    number = int(found[1]) if found else 0
    for operation, name, value in sent:
        if operation not in _BESIDE or (operation in (b"E", b"X") and not done.begins):
            continue
        if operation in (b"e", b"E"):
            yield b"e", b"%d %b %b" % (number, name, record), value
            number += 1
        elif int(name) or int(value):
            limit = (done.time_ms or 0) + int(value) if int(value) > 0 else 0
            yield b"s", LIFETIME, b"%b %d" % (name, limit)


class UnarchivedCommits:
    """The acknowledged commits of one replica, by partition, each until it is archived.

    `late(partition, epoch, entries)` keeps commits of an epoch that has ended and that SQL lacks, as branches; it is
    called again with the same entries if it raises. `limit` is in bytes; infinite if no commits are kept at all.
    """

    def __init__(
        self, port: Port, warm: Warm, cold: ColdStore, archiver: Archiver, keys: Keys, settings: Settings, late: Late
    ) -> None:
        self.late = late
        self.bytes = 0
        # Not kept for an embedded server, which loses data only together with this process.
        self.enabled = settings.unarchived_bytes > 0 and settings.url is not None
        self.limit = settings.unarchived_bytes if self.enabled else float("inf")
        self._port = port
        self._warm = warm
        self._cold = cold
        self._archiver = archiver
        self._keys = keys
        self._wait = settings.retry_for
        # Plain tuples of the fields of `UnarchivedCommit`.
        self._kept: defaultdict[int, deque[tuple[Any, ...]]] = defaultdict(deque)
        self._last: dict[int, tuple[str, int]] = {}  # epoch and offset of the last commit, if no commits are kept
        self._mutex = Mutex()
        self._driving: set[object] = set()  # where a writer archives in `make_room`: values of `Port.here`

    def __len__(self) -> int:
        with self._mutex:
            return sum(map(len, self._kept.values()))

    # Called for each commit

    def add(self, keys: RecordKeys, op: OpId, done: Committed) -> bool:
        """Keep a commit that is being acknowledged, and drop those that its answer shows to be archived.

        False if the answer repeats a lost one and therefore lacks the time: the caller then calls `add_from_journal`.
        """
        if not self.enabled or not done.offset:
            self._note(keys.partition, done.epoch, done.offset)
            return True  # SQL has it (offset 0), or no commits are kept
        if done.time_ms is None:
            return False
        self._append(keys.partition, _of_commit(op, done), done.archived)
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

    async def add_event(self, keys: PartitionKeys, epoch: str, entry: JournalEntry, archived: int) -> None:
        """Keep an event that was written without a commit, as `add` keeps a commit."""
        if not self.enabled:
            self._note(keys.partition, epoch, entry.offset)
            return
        if entry.offset:
            self._append(keys.partition, _of_entry(epoch, entry), archived)
        elif not await self._add_from_journal(keys, entry.event):
            id = f"{entry.event.removesuffix('emit')}0"
            if await self._port.sql(self._cold.event, keys.partition, id, entry.time_ms - CLOCKS_MS) is not None:
                return
            raise WarmUnavailable(f"partition {keys.partition}: the server that reported an event was replaced")

    async def add_from_journal(self, keys: RecordKeys, op: OpId, done: Committed) -> bool:
        """Keep a commit by reading its entry from the journal.

        False if neither the journal nor SQL has it: the server that answered was replaced by one without the commit.
        Raises WarmUnavailable or ColdUnavailable if Redis or SQL is down, which counts as another lost answer.
        """
        event = self._warm.ops.event(op)
        if await self._add_from_journal(keys, event):
            return True
        # It was archived and trimmed, or another server's journal was read. SQL decides which.
        entry = JournalEntry(done.offset, event, keys.ref.text, done.version, 0, "", "", 0, b"", 0)
        return not await self._port.sql(self._cold.lacking, keys.partition, done.epoch, [entry])

    async def _add_from_journal(self, keys: RecordKeys | PartitionKeys, event: str) -> bool:
        epoch, found = await self._warm.partitions.find(keys, event)
        if found is not None:
            self._append(keys.partition, _of_entry(epoch, found), 0)
        return found is not None

    def archived(self, partition: int, epoch: str, offset: int) -> None:
        """Drop a partition's commits under this epoch up to this offset, because SQL has them."""
        kept = self._kept.get(partition)
        with self._mutex:
            while kept and kept[0][0] <= offset and kept[0][1] == epoch:
                self.bytes -= kept.popleft()[2]

    async def make_room(self, text: str) -> None:
        """Archive until the kept commits are below the limit. Raises Backpressure after `retry_for` seconds."""
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
                kept = f"{self.bytes} bytes of acknowledged commits are not archived, unarchived_bytes={self.limit}"
                raise Backpressure(f"{text[:200]}: {kept}{why}") from problem
            await self._port.sleep(0.02)

    # For recovery

    def entries(self, partition: int, epoch: str) -> list[JournalEntry]:
        """The kept commits of a partition under an epoch, in the order of their answers."""
        with self._mutex:
            kept = [each for each in self._kept.get(partition, ()) if each[1] == epoch]
        return self._entries(kept)

    def _entries(self, kept: Sequence[tuple[Any, ...]]) -> list[JournalEntry]:
        return [UnarchivedCommit(*each).entry() for each in kept]

    # In the background

    async def look(self) -> None:
        """Drop the commits that are archived by now. No I/O if no commits are kept."""
        partitions = self.partitions()
        if partitions:
            states = await self._warm.partitions.reachable_states([self._keys.partition(each) for each in partitions])
            for partition, state in states.items():
                self.archived(partition, state.epoch, state.archived)
                await self._drop_closed(partition, state)

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
        """The partitions of which commits are kept."""
        with self._mutex:
            return [partition for partition, kept in self._kept.items() if kept]

    async def _drop_closed(self, partition: int, state: PartitionState) -> None:
        """Drop commits of epochs that have ended, after those that SQL lacks were kept by `late`."""
        # SQL closes an epoch before Redis begins the next one, so its remaining commits will not be archived.
        with self._mutex:
            kept = self._kept[partition]
            if not kept or kept[0][1] == state.epoch:
                return  # commits of earlier epochs come first, so there are none
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


_EVERY = 0.2  # seconds between two looks for requests, while the link is down
_LOOK = 1.0  # seconds between two looks for what is archived
_KEPT_MS = b"60000"  # TTL of a request and of its answers
_PIECE_BYTES = 256 * 1024
_PAGE = 64  # pieces
_PIECE, _END = b"p", b"z"


class Gathered(NamedTuple):
    """The commits that replicas reported, each once, and the replicas that did not answer completely."""

    entries: list[JournalEntry]
    silent: set[str]


class Gathering:
    """Asks other replicas for their unarchived commits, and answers their requests.

    `active`: this replica is on the roll. `link`: the link that receives requests; None to poll for them.
    """

    def __init__(
        self, port: Port, warm: Warm, keys: Keys, commits: UnarchivedCommits, link: Link | None, *, active: bool
    ) -> None:
        self._port = port
        self._warm = warm
        self._keys = keys
        self._unarchived = commits
        self._link = link if active else None  # others do not wait for a replica that is not on the roll
        self._active = active
        self._asked = port.signal()
        self._answered: dict[str, None] = {}
        self._job: Job | None = None

    def begin(self) -> None:
        """Answer requests and drop archived commits from now on, in the background."""
        if self._unarchived.enabled:
            self._job = self._port.spawn(self._run, "distributed-state-unarchived")

    async def close(self) -> None:
        """Stop."""
        if self._job is not None:
            await self._job.stop()
            self._job = None

    # Asking

    async def gather(self, partition: int, epoch: str, replicas: Iterable[str], *, silence: float = 0.5) -> Gathered:
        """Collect the unarchived commits of a partition under an epoch, from this replica and these.

        Ends when all have answered, or nothing came for `silence` seconds. Raises WarmUnavailable.
        """
        found = {entry.event: entry for entry in self._unarchived.entries(partition, epoch)}
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
        """Run commands that may fail: the fleet's hash may be unreachable, and every key has a TTL."""
        try:
            for answer in await self._port.exchange(commands):
                if isinstance(answer, StateError):
                    raise answer
        except StateError as error:
            log.warning("gathering unarchived commits: %s", error)

    async def _read(self, answers: bytes, wanted: set[str], found: dict[str, JournalEntry], silence: float) -> set[str]:
        """Read answers into `found`, until all replicas have ended or nothing came for `silence`; those that ended."""
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
                        log.error(
                            "gathering: the unarchived commits of replica %s cannot be read: %s",
                            replica.decode(),
                            error,
                        )
            now = self._port.monotonic()
            if pieces:
                last = now
            elif now - last > silence:
                break
            else:
                await self._port.sleep(0.01)
        return ended - broken

    # Answering

    async def _run(self) -> None:
        looked = 0.0
        logged = ""
        asked = True
        if self._link is not None:
            self._link.listen(self._keys.gatherings_channel, lambda *_: self._asked.set())
        while True:
            try:
                if asked or not self._is_subscribed():
                    self._asked.clear()
                    await self.answer()
                    asked = False
                now = self._port.monotonic()
                if now - looked >= _LOOK:
                    looked = now
                    await self._unarchived.look()
                logged = ""
            except StateError as error:
                log.log(
                    logging.DEBUG if logged else logging.WARNING, "unarchived commits cannot be reported: %s", error
                )
                logged = str(error)
            asked = await self._asked.wait(_LOOK if self._is_subscribed() and not asked else _EVERY) or asked

    def _is_subscribed(self) -> bool:
        return self._link is not None and self._link.confirmed(self._keys.gatherings_channel)

    async def answer(self) -> None:
        """Answer all present requests with this replica's unarchived commits."""
        for partition, request in await self._requests():
            token, _, epoch = request.partition(" ")
            if token in self._answered:
                continue
            for piece in self._pieces(self._unarchived.entries(partition, epoch)):
                await self._push(self._keys.gathered(partition, token), piece)
            # Noted only now: an interrupted answer is sent again from its beginning, and repeated commits count once.
            self._answered[token] = None
            while len(self._answered) > 4 * self._keys.partitions:
                del self._answered[next(iter(self._answered))]

    async def _requests(self) -> list[tuple[int, str]]:
        """Requests by partition: from the fleet's hash or, if that is unreachable, from our commits' partitions."""
        mine = self._unarchived.partitions()
        if not mine and not self._active:
            return []  # others do not wait for this replica's answer
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
        """Pack entries into pieces of bounded size, unless one entry is larger; the last piece has the end."""
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
