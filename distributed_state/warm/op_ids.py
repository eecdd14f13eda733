"""The names of writes. Law: a write is applied once, however often and however late it is sent.

A record notes the op ids of its commits from when it came into Redis: all of them, until nobody may send them any
more. Those of before are in SQL, because a record leaves Redis only when it is archived, and stay there alone: neither
a count nor a clock chooses some to be brought back. A write therefore says since when, by the server's clock, its op id
can have been applied at all (`since_ms`). Where the record looks back that far, it knows. Where it came back from SQL
since, it says so and changes nothing, and who sent the write asks SQL for its op id. SQL is read after the record came
back, and so has whatever was applied before: what it does not have was not, and the write is sent again, saying that.
If the record left and came back once more meanwhile, SQL is asked once more. Where Redis is too full to bring it back,
SQL is asked before the write is refused: nothing that was applied may seem to be refused.

A write whose answers all came is sent again with a new time, so that a first sending costs one round trip and no SQL.
One whose answer was lost keeps its time. It is not repeated later than half of `op_window` after it was first sent, and
the server applies none that is older than the whole window: a request that was delayed for longer is refused.

A record that is archived and has more op ids than fit into a small field lets go of them in the same way, where it
is (`settle.lua`).

What a writer keeps of an acknowledged commit makes its journal entry, byte for byte as commit.lua wrote it. Only the
size that the journal had is missing, which nobody else needs.

Design: sections 5, 14.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, TypeVar
from zlib import crc32

from distributed_state.errors import DurabilityUnknown, WarmUnavailable
from distributed_state.port import Port
from distributed_state.values.journal import JournalEntry, Step, pack
from distributed_state.values.model import LIFETIME, OWNER
from distributed_state.warm.answers import Committed, committed
from distributed_state.warm.clock import ServerClock

T = TypeVar("T")
_MARGIN_MS = 2000  # how far the clocks of two servers may be apart, one of which may never have been heard
FULL = "Redis is at maxmemory and nothing more is evictable; nothing was written"
LOST = "a write may have been applied, its answer was lost"
_TOKEN = re.compile(r"[A-Za-z](\d+)")
_FIRST_EVENT = re.compile(rb"e(\d+)$")
# What is held for one commit, and for each word that was sent, beside the bytes of names and values. Measured with
# tracemalloc on CPython 3.11 (tests/tiers/test_unarchived.py measures it again).
_EACH_BYTES = 300
_WORD_BYTES = 34
_EXPECTATIONS = 15  # where what is sent says how many there are
_BESIDE = (b"e", b"E", b"x", b"X")  # steps that change no record


class OpId:
    """Names one write of this replica; `oldest`: of its writes to that record, the first unanswered (RIFL, SOSP 2015).

    `record` is the record's text. `first` is when it was first sent, by the monotonic clock. `since_ms`: before then,
    by the server's clock, it was surely not applied. `doubted`: an answer was lost, so that it may have been applied
    since. `eased_ms`: that time, when it was last put back because another server's clock may count. `size`: of its
    steps, in bytes.

    The arguments of one sending that are not in its draft stand here too: `lock_value`; `creation`, as commit.lua has
    it; `proofs`, steps 'V' and 'G' that say what SQL has of items; `events`, the steps beside the change, sealed.
    `sent`: all arguments with which it was last sent.
    """

    # Defaults of the class: to set each of them would take a commit longer than anything else here.
    since_ms = 0
    doubted = False
    eased_ms = -1
    lock_value = ""
    creation = ""
    proofs: Sequence[Step] = ()
    events: Sequence[Step] = ()
    sent: Sequence[Any] = ()

    def __init__(self, sequence: int, oldest: int, digest: str, first: float, size: int, record: bytes = b"") -> None:
        self.sequence = sequence
        self.oldest = oldest
        self.digest = digest
        self.first = first
        self.size = size
        self.record = record


@dataclass(frozen=True, slots=True)
class Unsure:
    """Redis does not remember so far back whether an op id was applied; `late`: nothing does.

    `time_ms` is the server's time at which it was not among those that it remembers.
    """

    time_ms: int
    epoch: str
    late: bool


class OpIds:
    """Those of one replica."""

    def __init__(self, port: Port, clock: ServerClock, replica: str, count: itertools.count[int], window: float):
        self._port = port
        self._clock = clock
        self._replica = replica
        self._count = count
        self._window = window
        self._unanswered: dict[bytes, list[int]] = {}  # of each record that is being written, in order
        self._mutex = port.mutex()

    def begin(self, steps: Sequence[tuple[bytes, bytes, bytes]], record: bytes = b"") -> OpId:
        """Name a write to a record. `end` must follow, whatever comes of it."""
        text = b"\0".join(chain.from_iterable(steps))
        with self._mutex:
            sequence = next(self._count)
            # Not of all records: they would remember, for a writer of many, what was answered long ago.
            unanswered = self._unanswered.get(record)
            if unanswered is None:
                unanswered = self._unanswered[record] = []
            unanswered.append(sequence)
            oldest = unanswered[0]
        return OpId(sequence, oldest, f"{crc32(text):x}", self._port.monotonic(), len(text), record)

    def end(self, op: OpId) -> None:
        """The caller will not send this write again."""
        with self._mutex:
            unanswered = self._unanswered.get(op.record, ())
            if len(unanswered) > 1:
                self._unanswered[op.record].remove(op.sequence)
            elif op.sequence in unanswered:
                del self._unanswered[op.record]

    def event(self, op: OpId) -> str:
        """The id of the commit that a write becomes, in the journal and in SQL."""
        return f"{self._replica}.{op.sequence}.{op.digest}"

    def sending(self, op: OpId, what: str) -> None:
        """Note that a write is sent now; it may have been applied from here on, if no reply comes.

        Raises DurabilityUnknown if it is too late to repeat it: half of the window after it was first sent. The other
        half is for a request that is delayed on its way.
        """
        if not op.doubted:
            since_ms = self._clock.earliest_ms()
            if since_ms > op.since_ms:
                op.since_ms = since_ms
        elif self._port.monotonic() - op.first > self._window / 2:
            raise DurabilityUnknown(f"{what[:200]}: {LOST}, and it is too late to ask")

    async def send(self, ops: Sequence[OpId], what: str, call: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        """Send writes by this call, and note that they may have been applied if no reply comes."""
        for op in ops:
            self.sending(op, what)
        try:
            return await call(*arguments)
        except WarmUnavailable:
            for op in ops:
                self.lost(op)
            raise

    def lost(self, op: OpId) -> None:
        """Note that an answer was lost, and allow for the clock of another server, once for each time that was heard.

        That server may have applied the write, or answer its repetition: a replica that was promoted, or whoever has
        the slot now. By a clock that is behind the one that was heard, a record may have come back from SQL with this
        write in it before it could have been applied at all; then nobody would ask SQL.
        """
        op.doubted = True
        if self._port.several and op.since_ms != op.eased_ms:
            op.since_ms = op.eased_ms = op.since_ms - _MARGIN_MS


# Acknowledged commits


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


def of_commit(op: OpId, done: Committed) -> tuple[Any, ...]:
    """A commit as `Remembered` has it, as a plain tuple.

    Python's garbage collector goes through lists and objects as long as they live, again and again, but takes tuples
    of plain values out of its account. Keeping the draft itself cost three times as much as all of the rest.
    """
    sent = tuple(op.sent)
    size = _EACH_BYTES + op.size + _WORD_BYTES * len(sent)
    for _, name, value in op.events:
        size += len(name) + len(value)
    return done.offset, done.epoch, size, sent, done.text


def of_entry(epoch: str, entry: JournalEntry) -> tuple[Any, ...]:
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
