"""One consumer of events: what it has taken from the stream and was not delivered yet. Law: each offset is taken once.

It is taken where it directly follows the consumer's position; anything else sends the reader to the stream.

Design: section 12.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import translate
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Protocol

from distributed_state.errors import InvalidValue
from distributed_state.port import Port
from distributed_state.values import codec
from distributed_state.values.codec import Codec
from distributed_state.values.model import unescape
from distributed_state.values.results import Event
from distributed_state.warm.event_channels import types_of
from distributed_state.warm.positions import BEGINNING, Head, Position
from distributed_state.warm.stream import StreamEvent

RESYNC = "resync"
_ROOM = 2000
_ROOM_BYTES = 16 * 2**20
_LEAST = 16  # events that one takes whose buffer is full and empty of its own: it goes on, by little
_EVENT = 600  # bytes that an event takes beside its text
_PATTERN = re.compile(r"[\w.*-]{1,200}", re.ASCII)


class Buffer(Protocol):
    """Counts what waits for a consumer together with what waits for others."""

    def count(self, size: int) -> None:
        """Count bytes that came, or went."""
        ...

    @property
    def full(self) -> bool:
        """Whether it should be emptied before it takes another event."""
        ...


@dataclass(frozen=True, slots=True)
class Waiting:
    """An event that was taken and not delivered yet; a resync holds its data.

    `before`: where whoever did not handle it begins again.
    """

    partition: int
    position: Position
    stored: StreamEvent | None
    before: dict[int, Position]
    resync: dict[str, Any] | None = None

    def __len__(self) -> int:
        return 0 if self.stored is None else len(self.stored.head) + len(self.stored.data)

    def event(self, codec_of: Callable[[str], Codec]) -> Event:
        """The event. Raises CorruptState if its data cannot be read, DecryptionFailed without the key."""
        if self.stored is None:
            return Event("", RESYNC, "", 0.0, self.resync or {}, "", 0, "", -1, 0, "")
        id, type, subject, time, version, actor = self.stored.head.decode().split("\n")
        seconds, micros = time.split()
        data = codec_of(subject).open_event(self.stored.data, type, id)
        return Event(
            id=id, type=type, subject=subject, time=(int(seconds) * 1000 + int(micros) // 1000) / 1000,
            data=codec.decode(data, "data"), source=id.partition(".")[0], sequence=self.stored.offset,
            epoch=self.position.epoch, partition=self.partition, version=int(version), actor=unescape(actor),
        )  # fmt: skip


def pattern(text: str) -> re.Pattern[bytes]:
    """What a type has to be: `*` stands for any characters. Raises InvalidValue."""
    if not isinstance(text, str) or not _PATTERN.fullmatch(text):
        raise InvalidValue(f"events are named as 'conversation.deleted', 'conversation.*' or '*', not {text!r:.80}")
    return _compiled(text)


@lru_cache(maxsize=1024)
def _compiled(text: str) -> re.Pattern[bytes]:
    # Not a plain ".*" for each: many of them would take for ever to say no.
    return re.compile(translate(text).encode())


class Subscription:
    """One consumer: what it has taken and not been given yet. The link, the feed and the consumer meet here."""

    def __init__(self, port: Port, types: Iterable[str]) -> None:
        self.buffer: Buffer | None = None
        types = list(types)
        self.patterns = [pattern(each) for each in types]
        self.types = types_of(types)
        self.ready = port.signal()
        self.closed = False
        self.here: object = None  # whose loop ends it, too
        self.starved = False
        self.resyncs = self.handed = self.replayed = 0
        self._mutex = port.mutex()
        self._taken: dict[int, Position] = {}
        self._waiting: deque[Waiting] = deque()
        self._bytes = 0
        self._heard: dict[int, frozenset[bytes]] = {}  # before something was lost: it may come again

    def assign(self, positions: dict[int, Position]) -> None:
        """Take the events of these partitions, from there on."""
        with self._mutex:
            self._taken.update(positions)

    def revoke(self, partitions: Iterable[int]) -> None:
        """Take no more of these, and deliver nothing that was taken."""
        gone = set(partitions)
        with self._mutex:
            for each in gone:
                self._taken.pop(each, None)
                self._heard.pop(each, None)
            self._waiting = deque(each for each in self._waiting if each.partition not in gone)
            self._bytes = sum(map(len, self._waiting))  # a group's, which has no buffer

    def taken(self) -> dict[int, Position]:
        """How far the reader is, by partition."""
        with self._mutex:
            return dict(self._taken)

    def delivered(self) -> dict[int, Position]:
        """How far the consumer is: what was delivered, and what it did not ask for."""
        with self._mutex:
            reached = dict(self._taken)
            for each in reversed(self._waiting):
                reached.update((at, position) for at, position in each.before.items() if at in reached)
            return reached

    def heard(self, partition: int) -> frozenset[bytes]:
        """The ids of what was taken before a loss, behind which this may have begun again."""
        # A server that lost events shows where it is first, and starts an epoch later: the second loss is found there.
        with self._mutex:
            return self._heard.get(partition, frozenset())

    def wants(self, type: bytes) -> bool:
        """Whether events of this type are asked for."""
        return any(each.fullmatch(type) for each in self.patterns)

    @property
    def room(self) -> int:
        """How many more events may wait here."""
        if self.buffer is not None and self.buffer.full:
            return 0 if self._waiting else _LEAST
        return max(0, _ROOM - len(self._waiting)) if self._bytes < _ROOM_BYTES else 0

    def __len__(self) -> int:
        return len(self._waiting)

    def hear(self, partition: int, epoch: str, stored: StreamEvent, before: int) -> bool:
        """Take an event that was published; False if the stream has to be looked at.

        `before`: the offset of the last one before it that may be asked for here.
        """
        with self._mutex:
            at = self._taken.get(partition)
            if at is None or self.closed:
                return True
            if at.epoch == epoch and stored.offset <= at.offset:
                return True
            if not stored.head or not at.leads_to(epoch) or at.offset < before or not self.room:
                return False
            self._take(partition, epoch, stored)
        self.ready.set()
        return True

    def pass_over(self, partition: int, before: Position, to: Position) -> None:
        """Go on from a position to a later one: nothing between them is asked for here."""
        with self._mutex:
            if self._taken.get(partition) == before:
                self._taken[partition] = to

    def read(self, partition: int, before: Position, head: Head, stored: list[StreamEvent], whole: bool) -> None:
        """Take what the stream holds after a position. Nothing, if something was taken meanwhile."""
        with self._mutex:
            if self._taken.get(partition) != before:
                return
            waiting = len(self._waiting)
            for each in stored:
                self._take(partition, head.epoch, each)
            self.replayed += len(self._waiting) - waiting
            if whole:
                # What is missing at the end was taken out of the stream.
                self._taken[partition] = Position(head.epoch, max(head.offset, self._taken[partition].offset))
        self.ready.set()

    def _take(self, partition: int, epoch: str, stored: StreamEvent) -> None:
        self._taken[partition] = position = Position(epoch, stored.offset)
        heard = self._heard.get(partition)
        if heard and stored.id in heard:
            return
        if self.wants(stored.head.split(b"\n", 2)[1]):
            before = {partition: Position(epoch, stored.offset - 1)}
            waiting = Waiting(partition, position, stored, before)
            self._waiting.append(waiting)
            self._bytes += len(waiting)
            if self.buffer is not None:
                self.buffer.count(len(waiting) + _EVENT)

    def lose(
        self,
        gaps: dict[int, tuple[Position, Position]],
        reason: str,
        heard: Mapping[int, frozenset[bytes]] = MappingProxyType({}),
    ) -> None:
        """Go on after gaps, from one position to another each, with one event that asks to resync.

        Events that were `heard` before, by their ids, are not delivered if they come again.
        """
        with self._mutex:
            real = {at: gap for at, gap in gaps.items() if self._taken.get(at) == gap[0]}
            if not real:
                return
            self._taken.update({partition: to for partition, (_, to) in real.items()})
            self._heard.update({partition: ids for partition, ids in heard.items() if partition in real})
            self.resyncs += 1
            data = {"reason": reason, "partitions": sorted(real)}
            before = {at: gap[0] for at, gap in real.items()}
            self._waiting.append(Waiting(-1, BEGINNING, None, before, data))
        self.ready.set()

    def pop(self) -> Waiting | None:
        """The next event; None: wait until `ready`."""
        with self._mutex:
            if self._waiting:
                self.handed += 1
                waiting = self._waiting.popleft()
                self._bytes -= len(waiting)
                if self.buffer is not None and waiting.stored is not None:
                    self.buffer.count(-len(waiting) - _EVENT)
                return waiting
            if not self.closed:
                self.ready.clear()
            return None

    def made_room(self) -> bool:
        """Whether the stream should be looked at again, because a full queue is half empty now."""
        if self.starved and (not self._waiting or (self.room >= _ROOM // 2 and self._bytes < _ROOM_BYTES // 2)):
            self.starved = False
            return True
        return False

    def close(self) -> None:
        """Take no more events, and wake whoever waits for one."""
        self.closed = True
        self.ready.set()
