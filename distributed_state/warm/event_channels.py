"""How events are published to the replicas that hear them: on which channels, and by whom. Law: nothing rests on it.

The stream is the truth (`stream`); what is published only saves the look. A replica hears all events of a partition, or
those of its types alone. One that asks for some types only hears no others: the server keeps a list of them for each
partition (interest.lua), and publishes with each event which of that list was the last before; so nothing is missed
where offsets are left out. Until a partition has the list, and where it has lost it or keeps as many as it may, all
events are heard there.

To publish an event costs a server about 3 us for each connection that hears it, nearly all of that for the write to the
socket. So where it comes to some percent of the server, one listener takes the right (relay.lua) to hear the events of
its partitions alone for a second, keeps it, and publishes what it heard to all, on one channel of the same server. How
long it gathers follows from how many listen, so that its messages take at most a twentieth of the server however many
listen and however much happens, and less where few do; the first after a pause is passed on at once.

The script that writes an event falls back to all listeners if the right has run out or nobody is subscribed to the
relay's channel. What a relay took and did not pass on, as it died, is a gap before the next event, or a tail that the
consumers find as they compare positions.

Design: section 12.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from distributed_state.errors import StateError, WarmUnavailable
from distributed_state.port import Job, Port
from distributed_state.values.keys import Keys
from distributed_state.warm.link import Link
from distributed_state.warm.scripts import INTEREST, RELAY
from distributed_state.warm.stream import Head, StreamEvent

log = logging.getLogger(__name__)
Types = frozenset[str] | None  # 'turn.ended', or 'turn.*' for all that begin so; None = of all types
Hear = Callable[[int, bytes, Types], None]  # the partition, what was published, the types that the channel is of
BATCH = b"*"  # an event's own message begins with its epoch, which begins with a digit
_HEAD = 6  # lines, as in commit.lua; then comes the data, which may be any bytes
_MOST = 8  # lists of a partition: each costs the server at every event
_LIST_LENGTH = 200
_FULL_FOR = 60.0  # seconds after which one that was full is asked once more
_TERM, _RENEW = 1.0, 0.3  # seconds
_HURRIED = 20.0  # events a second from which on it is asked whether a relay is worth it
_WORTH = 30_000.0  # deliveries a second from which on it is: at 10,000 it cost more than it saved
_RELAY_ASK_AGAIN = 5.0  # seconds; also for so long it goes on where it is worth it no more
_LATE, _REST = 0.1, 30.0  # seconds: a relay that is so late three times in a row is none for so long
_LATES = 3
_LISTENER = 60e-6  # seconds that are gathered for each listener, whose message costs 3 us
_GATHERED = 0.008  # and seconds for all of them: few listeners are woken less often, too
_LONGEST_GATHER = 0.04
_SETTLED = 0.002
_BATCH_BYTES = 256 * 1024  # far below what the server buffers for a listener


def types_of(patterns: Iterable[str]) -> Types:
    """The types that patterns ask for, and no fewer."""
    found = set()
    for each in patterns:
        family, _, rest = each.partition(".")
        if "*" in family:
            return None
        found.add(f"{family}.*" if "*" in rest else each)
    return frozenset(found)


def types_together(many: Iterable[Types]) -> Types:
    """What is to be heard if each of these is asked for."""
    found: frozenset[str] = frozenset()
    for each in many:
        if each is None:
            return None
        found |= each
    return found


def are_within(types: Types, wider: Types) -> bool:
    """Whether these were all heard where the others were; of a channel of all types each offset is told."""
    return types is not None and wider is not None and types <= wider


def published(message: bytes) -> tuple[str, StreamEvent, int]:
    """The epoch of an event, the event, and the offset of the one before of its channel's types."""
    place, _, entry = message.partition(b"\n")
    epoch, number, *before = place.decode().split(" ")
    *head, data = entry.split(b"\n", _HEAD) if entry else (b"",)
    offset = int(number)
    return epoch, StreamEvent(offset, b"\n".join(head), data), int(before[0]) if before else offset - 1


class EventChannels:
    """The channels of events that this replica hears."""

    def __init__(self, port: Port, keys: Keys, link: Link, hear: Hear) -> None:
        self._port = port
        self._keys = keys
        self._link = link
        self._hear = hear
        self._mutex = port.mutex()
        self._types: Types = frozenset()
        self._again = 0.0

    @property
    def types(self) -> str:
        """The list of types that are heard alone, as the server keeps it; "" if all are, or none."""
        return self._listed(self._types)

    @staticmethod
    def _listed(types: Types) -> str:
        text = ",".join(sorted(types or ()))
        return text if len(text) <= _LIST_LENGTH else ""

    def choose(self, types: Types) -> None:
        """Hear these from now on; nothing if there are none."""
        with self._mutex:
            if types == self._types:
                return
            before, self._types = self.types, types
            for at in range(self._keys.partitions):
                if before and before != self.types:
                    self._link.leave(self._alone(at, before))
                if types is None or types:
                    self._hear_all(at)
                else:
                    self._link.leave(self._keys.partition(at).events_channel)
                if self.types:
                    self._link.listen(self._alone(at, self.types), self._handler(at, types))

    def _hear_all(self, partition: int) -> None:
        self._link.listen(self._keys.partition(partition).events_channel, self._handler(partition, None))

    def _handler(self, partition: int, types: Types) -> Callable[[bytes, bytes], None]:
        return lambda _, payload: self._hear(partition, payload, types)

    def _alone(self, partition: int, types: str) -> bytes:
        return self._keys.partition(partition).events_channel + b":" + types.encode()

    async def settle(self, heads: Mapping[int, Head]) -> None:
        """Have our types published alone where they are not, and hear all others no more where they are."""
        types = self.types
        calls = {}
        for at, head in heads.items() if types else ():
            known = head.last_of(types) is not None
            heard = self._link.confirmed(self._alone(at, types))
            if heard and not known and head.epoch and self._port.monotonic() >= self._again:
                keys = self._keys.partition(at)
                calls[at] = INTEREST, [keys.meta, keys.events_channel], [types, _MOST]
            self._leave_others(at, types, known and heard)
        answers = await self._port.scripts(list(calls.values())) if calls else []
        for at, answer in zip(calls, answers, strict=True):
            if isinstance(answer, StateError) or answer[0] == b"full":
                self._again = self._port.monotonic() + _FULL_FOR
            elif answer[0] == b"ok":
                self._leave_others(at, types, True)

    def _leave_others(self, partition: int, types: str, alone: bool) -> None:
        with self._mutex:
            if types != self.types:
                return  # chosen anew meanwhile
            if alone:
                self._link.leave(self._keys.partition(partition).events_channel)
            else:
                self._hear_all(partition)


# The relay


class EventRelay:
    """A listener's part in passing events on to many, many in one message: whether it should, and the job that does."""

    def __init__(self, port: Port, keys: Keys, link: Link, replica: str) -> None:
        self._port = port
        self._keys = keys
        self._link = link
        self._replica = replica
        self._mutex = port.mutex()
        self._arrived = port.signal()
        self._job: Job | None = None
        self._terms = 0
        self._closed = False
        self._mine = set[int]()  # the partitions whose events are published to us alone
        self._pending: list[tuple[int, bytes, bytes]] = []  # with the lists of types that it belongs to
        self._direct = self._relayed = 0  # events heard since the last look
        self._looked = self._flushed = self._rests_until = 0.0
        self._listeners = self._lates = 0

    @property
    def interval(self) -> float:
        """Seconds between two messages, at least."""
        return min(_GATHERED + self._listeners * _LISTENER, _LONGEST_GATHER)

    def noticed(self) -> None:
        """An event was published to all. Plain and quick: it runs on the reader."""
        with self._mutex:
            self._direct += 1
            now = self._port.monotonic()
            seconds = now - self._looked
            if seconds < 1.0:
                return
            rate = self._direct / seconds
            self._looked, self._direct = now, 0
            if rate < _HURRIED or self._job is not None or now < self._rests_until or self._closed:
                return
            self._rests_until = now + _RELAY_ASK_AGAIN
            self._job = self._port.spawn(lambda: self._serve(rate), "distributed-state-event-relay")

    async def _serve(self, rate: float) -> None:
        self._terms += 1
        self._lates = 0
        try:
            await self._hold(int(_WORTH / rate))
            if self._mine:
                log.info("events of %d partitions are passed on to %d listeners", len(self._mine), self._listeners)
                await self._pass_on()
        except StateError as error:
            log.info("events are not passed on: %s", error)
        finally:
            self._leave(self._mine.copy())
            with self._mutex:
                self._job = None

    async def _hold(self, least: int) -> None:
        """Take or keep the right. Of each server's partitions the first decides, so that one relay has them all."""
        self._listeners = 0
        by_node: dict[str, list[int]] = {}
        for partition in range(self._keys.partitions):
            by_node.setdefault(self._port.node_of(self._keys.partition(partition).meta), []).append(partition)
        won = await self._ask([each[0] for each in by_node.values()], _TERM, least)
        won |= await self._ask([at for each in by_node.values() if each[0] in won for at in each[1:]], _TERM, least)
        for partition in won - self._mine:
            self._mine.add(partition)
            # Until that is confirmed nobody is subscribed there, and the script publishes to all.
            self._link.listen(self._keys.partition(partition).relay_channel, partial(self._hear, partition))
        self._leave(self._mine - won)

    async def _ask(self, partitions: list[int], seconds: float, least: int) -> set[int]:
        """Take, keep or give back the right; the partitions of which we have it, or had."""
        name = f"{self._replica}.{self._terms}"
        # Not kept where we do not hear it: a half-open connection of ours may count as one that does.
        heard = self._link.confirmed
        partitions = [at for at in partitions if at not in self._mine or heard(self._keys.partition(at).relay_channel)]
        calls = []
        for keys in map(self._keys.partition, partitions):
            calls.append((RELAY, [keys.meta, keys.events_channel], [name, int(seconds * 1000), least]))
        answers = await self._port.scripts(calls) if calls else []
        told = {at: each for at, each in zip(partitions, answers, strict=True) if not isinstance(each, StateError)}
        self._listeners = max([self._listeners, *(int(each[1]) for each in told.values())])
        return {at for at, each in told.items() if each[0] == b"ok"}

    def _leave(self, partitions: Iterable[int]) -> None:
        for each in partitions:
            self._mine.discard(each)
            self._link.leave(self._keys.partition(each).relay_channel)

    def _hear(self, partition: int, _: bytes, payload: bytes) -> None:
        if payload:
            with self._mutex:
                asked, _, message = payload.partition(b"\n")
                self._pending.append((partition, asked, message))
                self._relayed += 1
            self._arrived.set()

    async def _pass_on(self) -> None:
        renewed = worth = self._port.monotonic()
        while worth + _RELAY_ASK_AGAIN > self._port.monotonic():
            left = renewed + _RENEW - self._port.monotonic()
            if left <= 0:
                await self._hold(2)
                now = self._port.monotonic()
                if self._relayed / (now - renewed) * self._listeners > _WORTH / 2:
                    worth = now
                renewed, self._relayed = now, 0
            elif await self._arrived.wait(left) and not await self._flush_in_time():
                # Its loop is busy or it stood still: to wait for it costs the others more than it saves.
                log.info("events are passed on too late by this replica: another one may")
                self._rests_until = self._port.monotonic() + _REST
                break
        await self._ask(list(self._mine), 0, 0)
        await self._port.sleep(_SETTLED)  # what was published to us before that is on its way
        await self._flush()

    async def _flush_in_time(self) -> bool:
        """Pass on what is there when it is due; False if that is late again and again."""
        due = max(self._port.monotonic(), self._flushed + self.interval)
        await self._port.sleep(due - self._port.monotonic())
        self._flushed = self._port.monotonic()
        await self._flush()
        self._lates = self._lates + 1 if self._flushed > due + _LATE else 0
        return self._lates < _LATES

    async def _flush(self) -> None:
        self._arrived.clear()
        with self._mutex:
            pending, self._pending = self._pending, []
        # By the server that has them: what is heard of one server does not depend on another.
        by_channel: dict[tuple[str, bytes], list[tuple[int, bytes]]] = {}
        for partition, asked, message in pending:
            node = self._port.node_of(self._keys.partition(partition).meta)
            by_channel.setdefault((node, b""), []).append((partition, message))
            for each in asked.split():
                types, _, before = each.rpartition(b"@")
                place, line, entry = message.partition(b"\n")
                told = place + b" " + before + line + entry
                by_channel.setdefault((node, b":" + types), []).append((partition, told))
        sent = [
            (b"SPUBLISH", self._keys.partition(heard[0][0]).events_channel + types, batch)
            for (_, types), heard in by_channel.items()
            for batch in batches(heard)
        ]
        try:
            for answer in await self._port.exchange(sent) if sent else []:
                if isinstance(answer, Exception):
                    log.debug("a batch of events: %s", answer)
        except WarmUnavailable as error:
            log.debug("events that are not passed on are read from the stream: %s", error)

    async def close(self) -> None:
        """Stop. What is published to us until the right runs out reaches all: nobody is subscribed any more."""
        with self._mutex:
            self._closed = True
            job = self._job
        if job is not None:
            await job.stop()


def batches(heard: Iterable[tuple[int, bytes]]) -> Iterator[bytes]:
    """Messages of partitions in one each, as long as that is not too large."""
    pieces = [BATCH]
    size = 0
    for partition, message in heard:
        if size > _BATCH_BYTES:
            yield b"".join(pieces)
            pieces, size = [BATCH], 0
        # With its length: the data of an event may be any bytes.
        pieces.append(b"%d %d\n%b" % (partition, len(message), message))
        size += len(message)
    if size:
        yield b"".join(pieces)


def messages(batch: bytes) -> Iterator[tuple[int, bytes]]:
    """The partitions and messages of a batch. Raises ValueError if it is none."""
    at = len(BATCH)
    while at < len(batch):
        line = batch.index(b"\n", at)
        partition, size = batch[at:line].split()
        at = line + 1 + int(size)
        if at > len(batch):
            raise ValueError("the end of a batch is missing")
        yield int(partition), batch[line + 1 : at]
