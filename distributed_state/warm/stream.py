"""One replica's client of the event streams in Redis. Law: an event is written once, at the next offset, or not at all.

A consumer has a position in each partition's stream, and the stream's head shows whether the stream continues there.
Epochs are numbered, and a stream may also hold the events of earlier epochs, with their offsets.

Design: sections 12, 14.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from distributed_state.errors import (
    Backpressure,
    ColdUnavailable,
    DurabilityUnknown,
    InvalidValue,
    StateError,
    WarmUnavailable,
)
from distributed_state.port import Job, Port, Words
from distributed_state.values import codec
from distributed_state.values.journal import Happened, JournalEntry, pack
from distributed_state.values.keys import Keys, PartitionKeys
from distributed_state.values.model import log_fields
from distributed_state.warm.client import LOST, OpId, Warm
from distributed_state.warm.scripts import ADVANCE, EMIT, REDACT, SHED
from distributed_state.warm.telemetry import Facts, observed

log = logging.getLogger(__name__)
_PAGE = 200
_STARTS = 20
_MOST_WAITING = 1000
_CLOSING_SECONDS = 1.0
_COUNT = re.compile(r"(\d{1,18})-", re.ASCII)  # the ordinal of an epoch in its partition, with which its name begins
_OVER = re.compile(r"\d{1,18}-(?:(\d{1,18})-)?(?:lost)?", re.ASCII)
_TOKEN = re.compile(r"(\d{1,4})=([\w-]{1,80})@(\d{1,18})", re.ASCII)


# Positions


class Position(NamedTuple):
    """How far a consumer is in a partition. Epoch "3-": after the third, at the beginning of the next one.

    "3-17-" is the same if the third may continue: Redis shows no epoch, but SQL has 17 events of the third, and a
    server that was replaced may add some. Epoch "" comes from older writers without this notation: at the beginning of
    the next epoch, whichever it is.
    """

    epoch: str
    offset: int

    @classmethod
    def behind(cls, epochs: int, known: int | None = None) -> Position:
        """Return the position after this many epochs. `known`: events of the last, if there may be more."""
        return cls(f"{epochs}-" if known is None else f"{epochs}-{known}-", 0)

    @classmethod
    def missed(cls, epochs: int, known: int | None = None) -> Position:
        """Return a position in the last of `epochs`, of which nothing is known: a resync follows."""
        return cls(f"{cls.behind(epochs, known).epoch}lost", 0)

    @property
    def waits(self) -> bool:
        """Whether the epoch of the next events has not begun yet."""
        return not self.epoch or self.epoch.endswith("-")

    @property
    def known(self) -> int | None:
        """The number of known events of an epoch that seems to have ended; None if it cannot have further events."""
        found = _OVER.fullmatch(self.epoch)
        if found is None:
            return self.offset if self.epoch else None
        return int(found[1]) if found[1] else None

    def leads_to(self, epoch: str) -> bool:
        """Whether there is no event between this position and the beginning of an epoch (or a later offset of it)."""
        return self.epoch in ("", epoch) or (self.waits and count(epoch) == count(self.epoch) + 1)

    def __str__(self) -> str:
        return f"{self.epoch} {self.offset}"

    @classmethod
    def parse(cls, text: bytes) -> Position:
        """Parse the result of `str`."""
        epoch, _, offset = text.decode().rpartition(" ")
        return cls(epoch, int(offset))


BEGINNING = Position("", 0)


def count(epoch: str) -> int:
    """Return how many epochs a partition has had with this one; 0 without a name."""
    found = _COUNT.match(epoch)
    return int(found[1]) if found else 0


def shown(positions: Mapping[int, Position]) -> str:
    """Format positions by partition as `since=` takes them; "oldest" if there are none."""
    parts = [f"{each}={at.epoch}@{at.offset}" for each, at in sorted(positions.items()) if at.epoch]
    return ",".join(parts) or "oldest"


def parsed(since: str, partitions: int) -> dict[int, Position]:
    """Parse the result of `shown`. Raises InvalidValue."""
    found = {}
    for part in since.split(",") if isinstance(since, str) else [""]:
        match = _TOKEN.fullmatch(part)
        if match is None or int(match[1]) >= partitions:
            raise InvalidValue(f"since is a position of this namespace's events, 'oldest' or None, not {since!r:.80}")
        found[int(match[1])] = Position(match[2], int(match[3]))
    return found


class Head(NamedTuple):
    """The newest event of a partition, and the newest one that was trimmed; epoch '' if the partition is empty.

    `continues` names the earlier epochs whose events the stream also has, with the end of each: "3-a@17 2-b@5".
    `interests` has the lists of types with own channels, and their newest events: "turn.ended,conversation.*@12 ".
    `ended` is the last event of the previous epoch, if the stream does not continue it.
    """

    epoch: str
    offset: int
    floor: int
    continues: str = ""
    interests: str = ""
    ended: int = 0

    def last_of(self, types: str) -> int | None:
        """Return the offset of the newest event of these types; None if the partition does not have this list."""
        lists = (each.rpartition("@") for each in self.interests.split())
        return next((int(last) for each, _, last in lists if each == types), None)

    def passed(self, at: Position, types: str) -> Position:
        """Return the position of a consumer of these types: this head, if no such event came since `at`."""
        here = self.seen_from(at)
        last = self.last_of(types)
        if last is None or here.epoch != self.epoch or not last <= here.offset <= self.offset:
            return at
        return Position(self.epoch, self.offset)

    def end_of(self, epoch: str) -> int:
        """Return the end of an earlier epoch that the stream continues; -1 if it does not."""
        ends = (each.rpartition("@") for each in self.continues.split())
        return next((int(end) for name, _, end in ends if name == epoch), -1)

    def seen_from(self, position: Position) -> Position:
        """Return a consumer's position, under the present epoch if the stream continues the position's epoch."""
        if position.epoch in ("", self.epoch) or position.offset > self.end_of(position.epoch):
            return position
        return Position(self.epoch, position.offset)

    def lost(self, at: Position) -> str:
        """Return why the stream does not continue at a consumer's position; "" if it does."""
        if at.waits and not self.epoch:
            return ""
        at = self.seen_from(at)
        # After an epoch that seemed to have ended, a replaced server may have written more.
        if not at.leads_to(self.epoch) or (at.waits and at.known is not None and self.ended > at.known):
            return "epoch"
        return "trimmed" if at.offset < self.floor else "rewound" if at.offset > self.offset else ""

    @property
    def beginning(self) -> Position:
        """The position from which a consumer gets one resync, and then all events since this epoch began."""
        former, _, end = self.continues.partition(" ")[0].rpartition("@")
        return Position(former, int(end) + 1) if former else Position.missed(count(self.epoch) - 1)

    def next(self, at: Position) -> Position:
        """Return where a consumer continues after a loss."""
        if not self.epoch:
            return Position.behind(count(at.epoch), at.known)
        if self.lost(at) == "rewound":
            return Position(self.epoch, self.offset)
        # If the stream reaches back before the consumer's position, the consumer has received everything up to that
        # position.
        end = self.end_of(at.epoch)
        return Position(self.epoch, max(self.floor, end if at.offset > end else 0))


# The stream


class StreamEvent(NamedTuple):
    """An event as the stream holds it; `head` as in commit.lua."""

    offset: int
    head: bytes
    data: bytes

    @property
    def id(self) -> bytes:
        """The event's id, which stays the same if it is written again at another offset."""
        return self.head.partition(b"\n")[0]


def _facts(_: Stream, keys: PartitionKeys, type: str, *rest: Any) -> Facts:
    return {"partition": keys.partition, "kind": type}


class Stream:
    """Writes events that belong to no commit, and reads all events.

    `archived` finds one in SQL by its partition and id, among those since a time. `start` starts a partition.
    `acknowledged` is called with the journal entry of each written event, and with how far the journal is archived; the
    entry's offset is 0 if the answer was lost and then repeated.
    """

    def __init__(
        self,
        port: Port,
        warm: Warm,
        archived: Callable[[int, str, int], Awaitable[Happened | None]],
        start: Callable[[int], Awaitable[None]],
        acknowledged: Callable[[PartitionKeys, str, JournalEntry, int], Awaitable[None]],
    ) -> None:
        self._acknowledged = acknowledged
        self._port = port
        self._warm = warm
        self._archived = archived
        self._start = start
        self.telemetry = warm.telemetry

    @observed("event.emit", "warm", _facts)
    async def emit(
        self,
        keys: PartitionKeys,
        type: str,
        subject: str,
        actor: str,
        data: bytes,
        *,
        roll: bytes = b"",
        member: str = "",
    ) -> tuple[str, int, int, str]:
        """Write an event without a commit; return its epoch, offset, time in ms and id.

        With a `member` of a `roll` the event is written only if the member is due. If several replicas try, one writes
        it and the others get offset 0.
        """
        op = self._warm.ops.begin([(b"e", type.encode(), data)])
        names = [*keys.emit_keys, *([roll] if member else [])]
        data = self._sealed(subject, type, op, data)
        sent = ([op], subject[:200], self._send, names, op, (type, subject, actor, data), member)
        try:
            answer = await self._warm.retry(self._warm.ops.send, *sent)
            starts = 0
            while answer[0] in (b"unsure", b"uninitialised"):
                if answer[0] == b"unsure":
                    found = await self._look(keys, op, subject) if op.doubted else None
                    if found is not None:
                        return found.epoch, found.offset, found.time_ms, found.id
                    op.since_ms = int(answer[1])
                elif starts < _STARTS:
                    # Sent under the same op id: if an answer was lost with the earlier data, the new epoch still finds
                    # the event.
                    starts += 1
                    await self._start(keys.partition)
                else:
                    raise WarmUnavailable(f"partition {keys.partition} does not start")
                answer = await self._warm.retry(self._warm.ops.send, *sent)
        finally:
            self._warm.ops.end(op)
        if answer[0] == b"backpressure":
            entries = int(answer[1])
            size = int(answer[2])
            raise Backpressure(f"{subject[:200]}: {entries} commits, {size} bytes of its partition are not archived")
        _, epoch, offset, time_ms, *journaled = answer if answer[0] == b"ok" else (b"", b"", b"0", b"0")
        if int(offset):
            name = b"%b %b %b" % (offset, type.encode(), subject.encode())
            at, archived = map(int, journaled or (b"0", b"0"))
            entry = JournalEntry(
                at, f"{self._warm.replica}.{op.sequence}.emit", "", 0, int(time_ms), "emit", actor, 0,
                pack([(b"e", name, data)]), 0,
            )  # fmt: skip
            await self._acknowledged(keys, epoch.decode(), entry, archived)
        return epoch.decode(), int(offset), int(time_ms), _id(self._warm, op)

    async def _look(self, keys: PartitionKeys, op: OpId, subject: str) -> Happened | None:
        """Return the event with this op id from SQL, if it was written."""
        try:
            return await self._archived(keys.partition, _id(self._warm, op), op.since_ms)
        except ColdUnavailable as error:
            raise DurabilityUnknown(f"{subject[:200]}: {LOST}, and only SQL knows: {error}") from error

    async def emit_once(
        self, keys: PartitionKeys, writer: str, since_ms: int, type: str, subject: str, data: bytes
    ) -> bool:
        """Write an event under the id of `writer`, unless it was written before; False if it cannot be written now."""
        op = OpId(0, 0, "", 0.0, 0)
        op.since_ms = since_ms
        names = keys.emit_keys
        event = (type, subject, "", self._warm.codec_of(subject).seal_event(data, type, f"{writer}.0"))
        while await self._archived(keys.partition, f"{writer}.0.0", since_ms) is None:
            answer = await self._warm.retry(self._send, names, op, event, "", writer)
            if answer[0] != b"unsure":
                return bool(answer[0] == b"ok")
            op.since_ms = int(answer[1])
        return True

    async def try_to_emit(self, keys: PartitionKeys, type: str, subject: str, data: bytes) -> bool:
        """Write an event without a commit if that can be done at once. Raises WarmUnavailable after one attempt."""
        names = keys.emit_keys
        op = self._warm.ops.begin([(b"e", type.encode(), data)])
        data = self._sealed(subject, type, op, data)
        try:
            answer: list[Any] = [b"unsure", 0]
            while answer[0] == b"unsure":
                op.since_ms = max(int(answer[1]), self._warm.clock.earliest_ms())
                answer = await self._send(names, op, (type, subject, "", data), "")
            return bool(answer[0] == b"ok")
        finally:
            self._warm.ops.end(op)

    def _sealed(self, subject: str, type: str, op: OpId, data: bytes) -> bytes:
        return self._warm.codec_of(subject).seal_event(data, type, f"{self._warm.replica}.{op.sequence}")

    async def _send(
        self, names: Sequence[bytes], op: OpId, event: tuple[str, str, str, bytes], member: str, writer: str = ""
    ) -> Any:
        warm = self._warm
        arguments = [
            writer or warm.replica,
            op.sequence,
            op.since_ms,
            *event,
            *warm.limits,
            member,
        ]
        answer = await self._port.script(EMIT, names, arguments)
        warm.emitted += answer[0] == b"ok"
        return answer

    async def heads(self, partitions: Sequence[PartitionKeys]) -> list[Head]:
        """Return the newest event of each partition."""
        return [_head(answer) for answer in await self._port.commands([_asked(keys) for keys in partitions])]

    async def begun_since(self, partitions: Sequence[PartitionKeys], ms: int) -> dict[int, Head]:
        """Return the heads of those partitions whose epoch began after this time of the server's clock."""
        fresh = await self._port.commands([(b"HGET", keys.meta, b"fresh") for keys in partitions])
        late = [keys for keys, began in zip(partitions, fresh, strict=True) if int(began or 0) > ms]
        heads = await self.heads(late) if late else []
        return {keys.partition: head for keys, head in zip(late, heads, strict=True) if head.epoch}

    async def reachable_heads(self, partitions: Sequence[PartitionKeys]) -> dict[int, Head]:
        """Like `heads`, without the partitions whose server is down. Raises WarmUnavailable if all are."""
        answers = await self._port.exchange([_asked(keys) for keys in partitions])
        return {
            keys.partition: _head(answer)
            for keys, answer in zip(partitions, answers, strict=True)
            if not isinstance(answer, Exception)
        }

    async def events(self, keys: PartitionKeys, after: int, count: int) -> tuple[Head, Head, list[StreamEvent]]:
        """Return the head before, the head after, and at most `count` events of a partition after an offset."""
        return _page(await self._port.commands(_page_asked(keys, after, count)))

    async def reachable_events(
        self, wanted: Sequence[tuple[PartitionKeys, int, int]]
    ) -> dict[int, tuple[Head, Head, list[StreamEvent]]]:
        """Like `events` for many partitions, without those whose server is down. Raises WarmUnavailable if all are."""
        answers = await self._port.exchange([words for each in wanted for words in _page_asked(*each)])
        found = {}
        for at, (keys, _, _) in enumerate(wanted):
            page = answers[3 * at : 3 * at + 3]
            if not any(isinstance(answer, Exception) for answer in page):
                found[keys.partition] = _page(page)
        return found

    async def redact(self, keys: PartitionKeys, unwanted: Callable[[bytes], bool]) -> None:
        """Remove the events with these heads from a partition. Consumers are not notified; offsets stay as they are."""
        after = 0
        count = _PAGE
        while count == _PAGE:
            before, behind, stored = await self._warm.retry(self.events, keys, after, _PAGE)
            if before.epoch != behind.epoch:
                after = 0  # Redis was emptied meanwhile
                continue
            gone = [b"%d-0" % each.offset for each in stored if unwanted(each.head)]
            if gone:
                await self._warm.script(REDACT, [keys.meta, keys.events], [before.epoch, *gone])
            count = len(stored)
            after = stored[-1].offset if stored else 0

    async def drop(self, keys: PartitionKeys, old: Callable[[StreamEvent], bool], *, keep: bool) -> int:
        """Remove the events of a partition up to the last `old` one, and note it; return how many. `keep`: only count.

        Consumers that have yet to read them must resync.
        """
        after = 0
        last = 0
        seen = 0
        passed = 0
        epoch = ""
        stored = [StreamEvent(0, b"", b"")]
        while stored:
            before, behind, stored = await self.events(keys, after, _PAGE)
            if before.epoch != behind.epoch or epoch not in ("", before.epoch):
                return 0  # Redis was emptied meanwhile
            epoch = before.epoch
            for each in stored:
                after = each.offset
                passed = passed + 1
                if old(each):
                    last = each.offset
                    seen = passed
        if last and not keep:
            await self._port.script(SHED, [keys.meta, keys.events], [epoch, last])
        return seen

    async def advance(self, calls: Sequence[tuple[tuple[bytes, bytes], bytes, bytes]], member: str) -> list[bool]:
        """Note a group's positions in partitions that this member handles; False for those that it no longer handles.

        Each call has the position that the member noted last; if that is unchanged, a former member may still note its
        event. Also False if the server is down: the events are handled again, and other partitions do not wait.
        """
        answers = await self._port.scripts(
            [(ADVANCE, names, [member, position, before]) for names, position, before in calls]
        )
        return [not isinstance(answer, StateError) and answer[0] == b"ok" for answer in answers]


def _id(warm: Warm, op: OpId) -> str:
    return f"{warm.replica}.{op.sequence}.0"


def _asked(keys: PartitionKeys) -> Words:
    return (b"HMGET", keys.meta, b"epoch", b"event", b"event_floor", b"continues", b"interests", b"ended")


def _page_asked(keys: PartitionKeys, after: int, count: int) -> list[Words]:
    page = (b"XRANGE", keys.events, b"%d-0" % (after + 1), b"+", b"COUNT", count)
    return [_asked(keys), page, _asked(keys)]


def _page(answers: Sequence[Any]) -> tuple[Head, Head, list[StreamEvent]]:
    before, rows, behind = answers
    stored = [StreamEvent(int(identity[:-2]), pairs[1], pairs[3]) for identity, pairs in rows]
    return _head(before), _head(behind), stored


def _head(answer: Any) -> Head:
    epoch, offset, floor, continues, interests, ended = (each or b"" for each in answer)
    numbers = int(offset or 0), int(floor or 0)
    return Head(epoch.decode(), *numbers, continues.decode(), interests.decode(), int(ended or 0))


# Events whose writers cannot wait


class BackgroundEvents:
    """Events whose writers cannot wait, such as a lost lock: each is tried once, and only logged if that fails."""

    def __init__(self, port: Port, stream: Stream, keys: Keys) -> None:
        self._port = port
        self._stream = stream
        self._keys = keys
        self._waiting: deque[tuple[str, str, dict[str, Any]]] = deque(maxlen=_MOST_WAITING)
        self._mutex = port.mutex()
        self._done = port.signal()
        self._job: Job | None = None

    def emit(self, type: str, subject: str, data: dict[str, Any]) -> None:
        """Write this event soon. Does not wait, and never fails."""
        with self._mutex:
            self._waiting.append((type, subject, data))
            if self._job is None:
                self._done.clear()
                self._job = self._port.spawn(self._run, "distributed-state-background-events")

    async def _run(self) -> None:
        while True:
            with self._mutex:
                if not self._waiting:
                    self._job = None
                    self._done.set()
                    return
                type, subject, data = self._waiting.popleft()
            keys = self._keys.partition(self._keys.partition_of(subject))
            try:
                if not await self._stream.try_to_emit(keys, type, subject, codec.encode(data, "data")):
                    text = "%s of %s is not published: Redis was emptied or its journal is full"
                    log.warning(text, type, subject[:200], extra=log_fields(subject))
            except StateError as error:
                text = "%s of %s is not published: %s"
                log.warning(text, type, subject[:200], error, extra=log_fields(subject))

    async def close(self) -> None:
        """Wait a moment for pending events."""
        job = self._job
        if job is not None:
            await self._done.wait(_CLOSING_SECONDS)
            await job.stop()
