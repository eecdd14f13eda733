"""The output of running turns: a stream of chunks in each session's slot. Law: only the holder of the lock appends.

A turn collects its chunks for `stream_interval` and sends them as a batch; several turns of a replica send in one
round trip. Chunks are numbered from 1 under the fencing token of their lease. A turn sends a batch once the one before
is answered, and output.lua refuses a number that is not above the last one, so a batch that is sent again appears once.
Chunks that cannot be stored (Redis is full, or does not answer for long) are dropped: their numbers are missing, and
followers see that.

The stream is authoritative. Each entry is published too, which saves reads of the stream.

Design: section 29.
"""

from __future__ import annotations

import logging
import math
import re
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from distributed_state.errors import (
    Backpressure,
    ColdUnavailable,
    CorruptState,
    StateError,
    Stopped,
    TooLarge,
    WarmUnavailable,
)
from distributed_state.port import Call, Job, Port
from distributed_state.settings import Settings
from distributed_state.values import as_text, codec
from distributed_state.values.codec import OUTPUT as OUTPUT_NAME
from distributed_state.values.codec import Codec
from distributed_state.values.journal import Operation
from distributed_state.values.keys import RecordKeys
from distributed_state.warm.client import Warm
from distributed_state.warm.link import Link
from distributed_state.warm.per_server import PerServer
from distributed_state.warm.scripts import FOLLOW, OUTPUT

log = logging.getLogger(__name__)
BATCH = 16 * 1024
"""Bytes. A larger batch is sent at once."""
_PENDING = 4 * BATCH  # maximum bytes that wait for a server; the oldest are dropped
_SHORTEST = 0.005
_IDLE_SECONDS = 60.0
_PAGE = 64  # entries of one look
_WAITING = 256 * 1024  # bytes that were published and not yet taken; more are read from the stream
_POSITION = re.compile(r"(\d{1,18})-(\d{1,15})")
ENDED, FAILED, STOPPED = "e", "f", "s"
"""How a turn ended."""


def frame_of(chunk: Any, most: int) -> bytes:
    """A chunk as a batch holds it: its kind, its length, its bytes. Raises InvalidValue, or TooLarge above `most`."""
    if isinstance(chunk, str):
        kind, data = b"t", chunk.encode("utf-8", "surrogatepass")
    elif isinstance(chunk, bytes):
        kind, data = b"b", chunk
    else:
        kind, data = b"j", codec.encode(chunk, "chunk")
    if len(data) > most:
        raise TooLarge(f"a chunk of {len(data)} bytes is larger than {most}, a quarter of output_bytes")
    return b"%b%d:%b" % (kind, len(data), data)


class Taken(NamedTuple):
    """In place of a chunk: from here on, the turn serves inputs of the requests with these tags."""

    tags: Sequence[str]

    @property
    def frame(self) -> bytes:
        """As a batch holds it."""
        data = " ".join(self.tags).encode()
        return b"i%d:%b" % (len(data), data)


def chunks_of(content: bytes) -> list[Any]:
    """The chunks of a batch. Raises CorruptState."""
    found: list[Any] = []
    at = 0
    while at < len(content):
        colon = content.find(b":", at)
        length = content[at + 1 : colon]
        end = colon + 1 + int(length) if colon > 0 and length.isdigit() else math.inf
        if end > len(content):
            raise CorruptState("output: a batch of chunks cannot be read", field="output", data=content)
        data = content[colon + 1 : int(end)]
        kind = content[at : at + 1]
        found.append(_READ.get(kind, _json)(data))
        at = int(end)
    return found


def _json(data: bytes) -> Any:
    return codec.decode(data, "chunk")


_READ: dict[bytes, Callable[[bytes], Any]] = {
    b"b": bytes,
    b"t": lambda data: data.decode("utf-8", "surrogatepass"),
    b"i": lambda data: Taken(data.decode().split(" ")),
}


def sealed_reason(form: Codec, reason: str | None) -> str:
    """The reason of a stop as it is sent: encrypted if outputs are, and in base64."""
    return as_text.text_of(b"" if reason is None else form.seal(codec.encode(reason, "reason"), OUTPUT_NAME))


def stopped(keys: RecordKeys, form: Codec, reason: str) -> Stopped:
    """The error of a turn that was asked to stop, with the reason as it was sent."""
    sealed = as_text.bytes_of(reason, "reason")
    why = codec.decode(form.open(sealed, OUTPUT_NAME), "reason") if sealed else None
    text = f"{keys.ref.text[:200]}: the turn was asked to stop"
    return Stopped(text if why is None else f"{text}: {why:.200}", reason=why)


# The sender


class _Batch(NamedTuple):
    last: int
    chunks: int
    content: bytes


class TurnOutput:
    """The chunks of one turn that are not sent yet. `numbers` counts the chunks under its token."""

    def __init__(self, outputs: Outputs, keys: RecordKeys, lock_value: str, tag: str, numbers: Numbers) -> None:
        self._outputs = outputs
        self._keys = keys
        self._codec = outputs.codec_of(keys.ref.text)
        self._lock_value = lock_value
        self._token = lock_value[1:].partition("@")[0]
        self.tag = tag
        self._numbers = numbers
        self._mutex = outputs.port.mutex()
        self._landed = outputs.port.signal()
        self._pending: deque[bytes] = deque()
        self._bytes = 0
        self._sending = False
        self._batch: _Batch | None = None  # is sent, or has to be sent again
        self.fenced = self.ended = False
        self.how = FAILED  # unless its end says otherwise

    @property
    def key(self) -> bytes:
        """A key in the slot of the session."""
        return self._keys.output

    @property
    def waiting(self) -> bool:
        """Whether chunks wait to be sent."""
        return not self.fenced and (bool(self._pending) or self._batch is not None)

    async def stream(self, chunk: Any) -> None:
        """Send a chunk soon. Waits only while more than one batch waits for the server."""
        frame = frame_of(chunk, self._outputs.chunk_bytes)
        with self._mutex:
            self._pending.append(frame)
            self._bytes += len(frame)
            self._numbers.last += 1
            size = self._bytes
        self._outputs.streamed += 1
        if size >= BATCH or not self._outputs.interval:
            await self._send_now(size)
        if self.waiting:
            self._outputs.watch(self)

    def note(self, taken: Taken) -> None:
        """Let followers of these requests follow this turn from here on."""
        frame = taken.frame
        with self._mutex:
            self._pending.append(frame)
            self._bytes += len(frame)
            self._numbers.last += 1
        self._outputs.watch(self)

    async def _send_now(self, size: int) -> None:
        if self._sending and size >= 2 * BATCH:
            self._landed.clear()
            if self._sending:
                await self._landed.wait(self._outputs.timeout)
        while self.waiting and not self._sending:
            try:
                await self.send()
            except (WarmUnavailable, ColdUnavailable):
                break  # the job sends it again
            if self._outputs.interval:
                break
        self._drop_oldest()

    def _drop_oldest(self) -> None:
        """Drop the oldest chunks if a server does not answer for long: the turn goes on."""
        with self._mutex:
            while self._bytes > _PENDING and self._pending:
                self._bytes -= len(self._pending.popleft())
                self._outputs.drop(1)

    def take(self) -> Call | None:
        """Begin to send a batch: return the call, to which `answered` belongs. None: there is nothing to send."""
        with self._mutex:
            if self._sending or not self.waiting:
                return None
            self._sending = True
            if self._batch is None:
                self._batch = self._next()
            batch = self._batch
        place = f"{OUTPUT_NAME}{self._token}-{batch.last}"
        return self._call(batch.last, batch.chunks, "c", self._codec.seal(batch.content, place))

    def _next(self) -> _Batch:
        frames: list[bytes] = []
        size = 0
        last = self._numbers.last - len(self._pending)
        while self._pending and (not frames or size + len(self._pending[0]) <= BATCH):
            frames.append(self._pending.popleft())
            size += len(frames[-1])
        self._bytes -= size
        return _Batch(last + len(frames), len(frames), b"".join(frames))

    def _call(self, number: int, count: int, how: str, content: bytes) -> Call:
        keys = self._keys
        arguments = [self._lock_value, number, count, self.tag, how, content, *self._outputs.limits]
        return OUTPUT, [keys.lock, keys.meta, keys.output, keys.output_channel], arguments

    def answered(self, answer: Any) -> None:
        """Note the answer to the call of `take`."""
        with self._mutex:
            self._sending = False
            batch = self._batch
            if isinstance(answer, Backpressure):
                self._outputs.warm.full(answer)
            if isinstance(answer, StateError) and not isinstance(answer, WarmUnavailable):
                self._outputs.drop(0 if batch is None else batch.chunks)
            elif isinstance(answer, list) and answer[0] == b"fenced":
                self.fenced = True
            # Without an answer, or before the partition was started, it is sent again.
            again = isinstance(answer, WarmUnavailable) or (isinstance(answer, list) and answer[0] == b"uninitialised")
            if not again:
                self._batch = None
        self._landed.set()

    async def send(self) -> None:
        """Send one batch. Raises WarmUnavailable or ColdUnavailable, and it will be sent again."""
        call = self.take()
        if call is None:
            return
        answer: Any = WarmUnavailable("no answer")
        try:
            [answer] = await self._outputs.port.scripts([call])
        finally:
            self.answered(answer)
        if isinstance(answer, WarmUnavailable):
            raise answer
        if isinstance(answer, list) and answer[0] == b"uninitialised":
            await self._outputs.start(self._keys.partition)

    async def append(self, frames: Sequence[bytes]) -> bool:
        """Send these chunks, the last ones, now; False if the lease has ended. Raises WarmUnavailable, Backpressure."""
        while not self.fenced:
            self._batch = _Batch(self._numbers.last, len(frames), b"".join(frames))
            call = self.take()
            assert call is not None, "nothing else is sent"
            answer = await self._outputs.warm.retry(self._outputs.port.script, *call)
            self.answered(answer)
            if answer[0] != b"uninitialised":
                break
            await self._outputs.start(self._keys.partition)
        return not self.fenced

    async def flush(self) -> None:
        """Send everything; drop what cannot be sent."""
        try:
            while self.waiting:
                if self._sending:
                    self._landed.clear()
                    if self._sending:
                        await self._landed.wait(self._outputs.timeout)
                else:
                    await self._outputs.warm.retry(self.send)
        except (WarmUnavailable, ColdUnavailable) as error:
            with self._mutex:
                self._outputs.drop(len(self._pending) + (0 if self._batch is None else self._batch.chunks))
                self._pending.clear()
                self._bytes, self._batch = 0, None
            log.warning("output of %s is dropped: %s", self._keys.ref.text[:200], error)

    def end_words(self) -> tuple[int, str, str, int]:
        """The arguments of release.lua for the entry that ends the output: see output_entry.lua."""
        return self._numbers.last + 1, self.tag, f"{self.how} -", self._outputs.ttl_ms

    @property
    def end_operation(self) -> Operation:
        """The operation by which the turn's commit ends the output."""
        return b"z", b"%d" % (self._numbers.last + 1), f"{self.tag} {self.how}".encode()

    def committed(self) -> None:
        """Note that the turn's commit ended the output."""
        self.ended = True
        self._numbers.last += 1

    async def end(self) -> None:
        """End the output of a turn that neither commits nor releases its lease, which nests in another one."""
        await self.flush()
        if not self.ended:
            self.ended = True
            self._numbers.last += 1
            call = self._call(self._numbers.last, 0, "e", f"{self.how} -".encode())
            try:
                await self._outputs.warm.retry(self._outputs.port.script, *call)
            except Backpressure as error:
                self._outputs.warm.full(error)


class Numbers:
    """Numbers the chunks under one fencing token; `last` is that of the newest one."""

    __slots__ = ("last",)

    def __init__(self, last: int = 0) -> None:
        self.last = last


class Outputs:
    """The outputs of one replica that have something to send."""

    def __init__(self, port: Port, warm: Warm, start: Callable[[int], Any], settings: Settings) -> None:
        self.port = port
        self.warm = warm
        self.start = start
        self.codec_of = warm.codec_of
        self.interval = settings.stream_interval
        self.timeout = settings.timeout
        self.chunk_bytes = settings.output_bytes // 4
        self.ttl_ms = math.ceil(settings.output_ttl * 1000)
        self.limits = settings.output_bytes, self.ttl_ms
        self.streamed = self.dropped = 0
        self.dropped_at = 0.0
        self._mutex = port.mutex()
        self._watched: dict[TurnOutput, None] = {}
        self._signal = port.signal()
        self._job: Job | None = None
        self._servers = PerServer(port, "distributed-state-output-of-one", self._send)

    def drop(self, chunks: int) -> None:
        """Count chunks that could not be stored."""
        self.dropped += chunks
        self.dropped_at = self.warm.clock.now()

    def watch(self, output: TurnOutput) -> None:
        """Send what the output holds when the interval is over."""
        with self._mutex:
            alone = not self._watched
            self._watched[output] = None
            if self._job is None:
                self._job = self.port.spawn(self._run, "distributed-state-output")
        if alone:
            self._signal.set()

    async def _run(self) -> None:
        while True:
            self._signal.clear()
            with self._mutex:
                self._watched = {each: None for each in self._watched if each.waiting}
                watched = list(self._watched)
            if not watched:
                await self._signal.wait(_IDLE_SECONDS)
                # The first chunk waits for others.
                await self.port.sleep(max(self.interval, _SHORTEST))
            elif self.port.several:
                for each in watched:
                    self._servers.hand(each.key, each)
                await self.port.sleep(max(self.interval, _SHORTEST))
            else:
                began = self.port.monotonic()
                await self._send(watched)
                await self.port.sleep(max(began + self.interval - self.port.monotonic(), _SHORTEST))

    async def _send(self, outputs: Sequence[TurnOutput]) -> None:
        """Send one batch of each, in one round trip."""
        taken = [(each, call) for each in outputs if (call := each.take()) is not None]
        if not taken:
            return
        answers: list[Any] = [WarmUnavailable("no answer")] * len(taken)
        try:
            answers = await self.port.scripts([call for _, call in taken])
        except StateError as error:
            log.warning("output is not sent yet: %s", error)
        finally:
            for (output, _), answer in zip(taken, answers, strict=True):
                output.answered(answer)

    async def close(self) -> None:
        """Stop sending."""
        if self._job is not None:
            await self._job.stop()
        await self._servers.close()


# Followers


class Entry(NamedTuple):
    """An entry of the output: chunks up to `number`, or the end, of a request with this tag, under a fencing token."""

    token: int
    number: int
    size: int
    tag: str
    how: str
    content: bytes

    @classmethod
    def parse(cls, id: bytes, head: bytes, content: bytes) -> Entry:
        """Read an entry of the stream."""
        token, _, number = id.decode().partition("-")
        _, _, count, tag, how = head.decode().split(" ")
        return cls(int(token), int(number), int(count), tag, how, content)

    @classmethod
    def published(cls, payload: bytes) -> Entry | None:
        """Read a message; None if it only says that there is something to read."""
        head, _, content = payload.partition(b"\n")
        words = head.decode().split(" ")
        if len(words) != 5:
            return None
        return cls(int(words[0]), int(words[1]), int(words[2]), words[3], words[4], content)

    @property
    def first(self) -> int:
        """The number of its first chunk."""
        return self.number - max(self.size, 1) + 1

    @property
    def ended(self) -> tuple[str, int | None]:
        """How the turn ended, and the version of its commit."""
        how, _, version = self.content.decode().partition(" ")
        return how, int(version) if version.isdigit() else None

    def chunks(self, form: Codec) -> list[Any]:
        """The chunks. Raises CorruptState or DecryptionFailed."""
        return chunks_of(form.open(self.content, f"{OUTPUT_NAME}{self.token}-{self.number}"))


class Seen(NamedTuple):
    """An answer of follow.lua: the holder's lock value, the last stop (a token, 0: none, and its reason), entries.

    `begin` is the place after which they follow; `more`: there may be further ones.
    """

    lock_value: str
    stop: tuple[int, str]
    entries: list[Entry]
    begin: tuple[int, int]
    more: bool

    @property
    def token(self) -> int:
        """The holder's fencing token, 0 if there is none."""
        return int(self.lock_value[1:].partition("@")[0]) if self.lock_value else 0

    @property
    def tag(self) -> str:
        """The tag of the holder's request; "" without one."""
        return tag_of(self.lock_value)


def tag_of(lock_value: str) -> str:
    """The tag of the request whose turn has this lock, "" if it is not a turn's."""
    return lock_value[:-1].rpartition(".")[2] if lock_value[-1:] == "!" else ""


def place_of(position: str) -> tuple[int, int]:
    """The token and the number of a position. Raises ValueError."""
    found = _POSITION.fullmatch(position)
    if found is None:
        raise ValueError(position)
    return int(found[1]), int(found[2])


async def look(warm: Warm, keys: RecordKeys, after: str) -> Seen | None:
    """Read the holder and entries of the output; `after` as in follow.lua. None: the partition is not started."""
    touched = [keys.lock, keys.meta, keys.output, keys.stop]
    answer = await warm.script(FOLLOW, touched, [after, _PAGE])
    if answer[0] != b"ok":
        return None
    _, lock_value, stop, begin, *rest = answer
    entries = [Entry.parse(*rest[at : at + 3]) for at in range(0, len(rest), 3)]
    asked, _, reason = stop.decode().partition("\n")
    last_stop = int(asked[1:].partition("@")[0]) if asked else 0, reason.rstrip("\n")
    return Seen(lock_value.decode(), last_stop, entries, place_of(begin.decode()), len(entries) == _PAGE)


class Received:
    """The messages of one follower that it has not taken yet. `missed`: read the stream instead."""

    def __init__(self, port: Port) -> None:
        self._port = port
        self._mutex = port.mutex()
        self._messages: deque[bytes] = deque()
        self._changes: deque[bytes] = deque()
        self._bytes = 0
        self.missed = True
        self.arrived = port.signal()

    def put(self, payload: bytes) -> None:
        """Add a message; an empty one says that earlier ones may be lost."""
        with self._mutex:
            if payload and self._bytes + len(payload) <= _WAITING:
                self._messages.append(payload)
                self._bytes += len(payload)
            else:
                self._bytes -= sum(map(len, self._messages))
                self._messages.clear()
                self.missed = True
        self.arrived.set()

    def put_change(self, payload: bytes) -> None:
        """Add the message about a commit; an empty one says that earlier ones may be lost."""
        with self._mutex:
            if payload and self._bytes + len(payload) <= _WAITING:
                self._bytes += len(payload)
                self._changes.append(payload)
            elif not self._changes or self._changes[-1]:
                self._changes.append(b"")
        self.arrived.set()

    def pop_change(self) -> bytes | None:
        """Take the oldest message about a commit."""
        with self._mutex:
            if not self._changes:
                return None
            payload = self._changes.popleft()
            self._bytes -= len(payload)
            return payload

    def pop(self) -> bytes | None:
        """Take the oldest message."""
        with self._mutex:
            if not self._messages:
                return None
            payload = self._messages.popleft()
            self._bytes -= len(payload)
            return payload


class Followers:
    """The followers of one replica, by the channel of the session that they follow."""

    def __init__(self, port: Port, link: Link) -> None:
        self._port = port
        self._link = link
        self._mutex = port.mutex()
        self._receiving: dict[bytes, WeakKeyDictionary[Received, None]] = {}

    def __len__(self) -> int:
        return sum(map(len, list(self._receiving.values())))

    def join(self, channel: bytes) -> Received:
        """Add a follower; it is removed by `leave`, or with the last reference to its messages."""
        received = Received(self._port)
        with self._mutex:
            self._receiving.setdefault(channel, WeakKeyDictionary())[received] = None
        self._link.listen(channel, self._receive)
        return received

    def leave(self, channel: bytes, received: Received) -> None:
        """Remove a follower."""
        with self._mutex:
            of_channel = self._receiving.get(channel)
            if of_channel is not None:
                of_channel.pop(received, None)
            if of_channel:
                return
            self._receiving.pop(channel, None)
        self._link.leave(channel)

    def _receive(self, channel: bytes, payload: bytes) -> None:
        with self._mutex:
            of_channel = list(self._receiving.get(channel, ()))
            if not of_channel:
                self._receiving.pop(channel, None)
        for received in of_channel:
            received.put(payload)
        if not of_channel:
            self._link.leave(channel)
