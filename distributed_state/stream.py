"""The event stream in Redis, as seen by one replica. Law: an event is written once, at the next offset, or not."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from distributed_state import codec
from distributed_state.errors import Backpressure, StateError, WarmUnavailable
from distributed_state.keys import Keys, PartitionKeys
from distributed_state.port import Job, Port, Words
from distributed_state.telemetry import Facts, observed
from distributed_state.warm import ADVANCE, EMIT, REDACT, Warm

log = logging.getLogger(__name__)
_PAGE, _REMARKS, _PATIENCE = 200, 1000, 1.0


class Head(NamedTuple):
    """The newest event of a partition, and the newest that is not kept any more; epoch '' if it holds nothing."""

    epoch: str
    offset: int
    floor: int


class Told(NamedTuple):
    """An event as the stream holds it; `head` as in commit.lua."""

    offset: int
    head: bytes
    data: bytes


def _facts(_: Stream, keys: PartitionKeys, type: str, *rest: Any) -> Facts:
    return {"partition": keys.partition, "kind": type}


class Stream:
    """Writes events that tell of no commit, and reads all."""

    def __init__(self, port: Port, warm: Warm) -> None:
        self._port, self._warm, self.telemetry = port, warm, warm.telemetry

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
    ) -> tuple[str, int, int, str] | None:
        """Write an event alone; its epoch, offset, time in ms and id. None if the partition has yet to be started.

        With a `member` of a `roll` it is written only if that is due, and by one of all who try: else offset 0.
        """
        sequence = next(self._warm.count)
        names = [keys.journal, keys.meta, keys.events, keys.events_channel, *([roll] if member else [])]
        tried = b"0"

        async def once() -> Any:
            nonlocal tried
            again, tried = tried, b"1"
            return await self._send(names, sequence, again, (type, subject, actor, data), member)

        answer = await self._warm.patiently(once)
        if answer[0] == b"uninitialised":
            return None
        if answer[0] == b"backpressure":
            entries, size = int(answer[1]), int(answer[2])
            raise Backpressure(f"{subject[:200]}: {entries} commits, {size} bytes of its partition are not archived")
        _, epoch, offset, time_ms = answer if answer[0] == b"ok" else (b"", b"", b"0", b"0")
        return epoch.decode(), int(offset), int(time_ms), f"{self._warm.replica}.{sequence}.0"

    async def try_to_emit(self, keys: PartitionKeys, type: str, subject: str, data: bytes) -> bool:
        """Write an event alone if that can be done at once. Raises WarmUnavailable after one attempt."""
        names = [keys.journal, keys.meta, keys.events, keys.events_channel]
        answer = await self._send(names, next(self._warm.count), b"0", (type, subject, "", data), "")
        return bool(answer[0] == b"ok")

    async def _send(
        self, names: Sequence[bytes], sequence: int, again: bytes, event: tuple[str, str, str, bytes], member: str
    ) -> Any:
        warm = self._warm
        arguments = [warm.replica, sequence, again, *event, *warm.limits[:3], warm.limits[-1], member]
        answer = await self._port.script(EMIT, names, arguments)
        warm.emitted += answer[0] == b"ok"
        return answer

    async def heads(self, partitions: Sequence[PartitionKeys]) -> list[Head]:
        """The newest event of each partition."""
        fields = (b"epoch", b"event", b"event_floor")
        answers = await self._port.exchange([(b"HMGET", keys.meta, *fields) for keys in partitions])
        return [_head(keys, answer) for keys, answer in zip(partitions, answers, strict=True)]

    async def events(self, wanted: Sequence[tuple[PartitionKeys, int, int]]) -> list[tuple[Head, Head, list[Told]]]:
        """Events of partitions after an offset, at most so many; with each its head as it was before and after."""
        fields, commands = (b"epoch", b"event", b"event_floor"), list[Words]()
        for keys, after, count in wanted:
            commands.append((b"HMGET", keys.meta, *fields))
            commands.append((b"XRANGE", keys.events, b"%d-0" % (after + 1), b"+", b"COUNT", count))
            commands.append((b"HMGET", keys.meta, *fields))
        answers = await self._port.exchange(commands)
        found = []
        for at, (keys, _, _) in enumerate(wanted):
            before, rows, after_ = answers[3 * at : 3 * at + 3]
            if isinstance(rows, Exception):
                raise WarmUnavailable(f"partition {keys.partition}: {rows}") from rows
            told = [Told(int(identity[:-2]), pairs[1], pairs[3]) for identity, pairs in rows]
            found.append((_head(keys, before), _head(keys, after_), told))
        return found

    async def redact(self, keys: PartitionKeys, unwanted: Callable[[bytes], bool]) -> None:
        """Take the events with these heads out of a partition. Nobody is told; offsets stay as they are."""
        after, count = 0, _PAGE
        while count == _PAGE:
            ((before, behind, told),) = await self.events([(keys, after, _PAGE)])
            if before.epoch != behind.epoch:
                after = 0  # Redis was emptied meanwhile
                continue
            gone = [b"%d-0" % each.offset for each in told if unwanted(each.head)]
            if gone:
                await self._port.script(REDACT, [keys.meta, keys.events], [before.epoch, *gone])
            count = len(told)
            after = told[-1].offset if told else 0

    async def advance(self, calls: Sequence[tuple[tuple[bytes, bytes], bytes]], member: str) -> list[bool]:
        """Note how far a group is in partitions that this member handles for it; False where it does not any more."""
        answers = await self._port.scripts([(ADVANCE, names, [member, position]) for names, position in calls])
        return [not isinstance(answer, StateError) and answer[0] == b"ok" for answer in answers]


class Remarks:
    """Events whose writers cannot wait: each is tried once, in the background, and only logged if that fails."""

    def __init__(self, port: Port, stream: Stream, keys: Keys) -> None:
        self._port, self._stream, self._keys = port, stream, keys
        self._waiting: deque[tuple[str, str, dict[str, Any]]] = deque(maxlen=_REMARKS)
        self._mutex, self._done = port.mutex(), port.signal()
        self._job: Job | None = None

    def make(self, type: str, subject: str, data: dict[str, Any]) -> None:
        """Tell of this soon. Does not wait, and never fails."""
        with self._mutex:
            self._waiting.append((type, subject, data))
            if self._job is None:
                self._done.clear()
                self._job = self._port.spawn(self._run, "distributed-state-remarks")

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
                    log.warning("%s of %s is not told: Redis was emptied or its journal is full", type, subject[:200])
            except StateError as error:
                log.warning("%s of %s is not told: %s", type, subject[:200], error)

    async def close(self) -> None:
        """Give what waits a moment."""
        job = self._job
        if job is not None:
            await self._done.wait(_PATIENCE)
            await job.stop()


def _head(keys: PartitionKeys, answer: Any) -> Head:
    if isinstance(answer, Exception):
        raise WarmUnavailable(f"partition {keys.partition}: {answer}") from answer
    return Head((answer[0] or b"").decode(), int(answer[1] or 0), int(answer[2] or 0))
