"""The channels on which events are published to replicas. Law: the stream is authoritative; messages save reads of it.

A partition has a channel for all its events, and one for each list of types that a replica asked for (interest.lua). A
message on such a channel also has the offset of the last earlier event of these types, so a replica can see that it
missed nothing although it does not receive the others. A replica subscribes to the channel of all events until the
partition has its list, or if the partition lost the list or already has the maximum number of lists.

Design: section 12.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from distributed_state.errors import StateError
from distributed_state.port import Port
from distributed_state.values.keys import Keys
from distributed_state.warm.link import Link
from distributed_state.warm.scripts import INTEREST
from distributed_state.warm.stream import Head, StreamEvent

Types = frozenset[str] | None  # 'turn.ended', or 'turn.*' for all that begin with it; None = all types
Receive = Callable[[int, bytes, Types], None]  # the partition, the message, the types of the channel
_HEAD = 6  # lines, as in commit.lua; then comes the data, which may be any bytes
_MOST = 8  # maximum number of lists of a partition: each costs the server time at every event
_LIST_LENGTH = 200
_FULL_FOR = 60.0  # seconds after which a partition with too many lists is asked again


def types_of(patterns: Iterable[str]) -> Types:
    """Return all types that the patterns ask for."""
    found = set()
    for each in patterns:
        family, _, rest = each.partition(".")
        if "*" in family:
            return None
        found.add(f"{family}.*" if "*" in rest else each)
    return frozenset(found)


def types_together(many: Iterable[Types]) -> Types:
    """Return the types that any of these asks for."""
    found: frozenset[str] = frozenset()
    for each in many:
        if each is None:
            return None
        found |= each
    return found


def are_within(types: Types, wider: Types) -> bool:
    """Whether the other channel has all events of these types; False if that is the channel of all types."""
    return types is not None and wider is not None and types <= wider


def published(message: bytes) -> tuple[str, StreamEvent, int]:
    """Parse a message: the epoch, the event, and the offset of the previous event of the channel's types."""
    place, _, entry = message.partition(b"\n")
    epoch, number, *before = place.decode().split(" ")
    *head, data = entry.split(b"\n", _HEAD) if entry else (b"",)
    offset = int(number)
    return epoch, StreamEvent(offset, b"\n".join(head), data), int(before[0]) if before else offset - 1


class EventChannels:
    """The channels of events to which this replica subscribes."""

    def __init__(self, port: Port, keys: Keys, link: Link, receive: Receive) -> None:
        self._port = port
        self._keys = keys
        self._link = link
        self._receive = receive
        self._mutex = port.mutex()
        self._types: Types = frozenset()
        self._again = 0.0

    @property
    def types(self) -> str:
        """The list of types with a separate channel, as the server keeps it; "" for all types, or none."""
        return self._listed(self._types)

    @staticmethod
    def _listed(types: Types) -> str:
        text = ",".join(sorted(types or ()))
        return text if len(text) <= _LIST_LENGTH else ""

    def choose(self, types: Types) -> None:
        """Subscribe to these types from now on, and to no others."""
        with self._mutex:
            if types == self._types:
                return
            before, self._types = self.types, types
            for at in range(self._keys.partitions):
                if before and before != self.types:
                    self._link.leave(self._alone(at, before))
                if types is None or types:
                    self._listen_to_all(at)
                else:
                    self._link.leave(self._keys.partition(at).events_channel)
                if self.types:
                    self._link.listen(self._alone(at, self.types), self._handler(at, types))

    def _listen_to_all(self, partition: int) -> None:
        self._link.listen(self._keys.partition(partition).events_channel, self._handler(partition, None))

    def _handler(self, partition: int, types: Types) -> Callable[[bytes, bytes], None]:
        return lambda _, payload: self._receive(partition, payload, types)

    def _alone(self, partition: int, types: str) -> bytes:
        return self._keys.partition(partition).events_channel + b":" + types.encode()

    async def register(self, heads: Mapping[int, Head]) -> None:
        """Register this replica's list of types where it is missing, and leave the channel of all events elsewhere."""
        types = self.types
        calls = {}
        for at, head in heads.items() if types else ():
            known = head.last_of(types) is not None
            confirmed = self._link.confirmed(self._alone(at, types))
            if confirmed and not known and head.epoch and self._port.monotonic() >= self._again:
                keys = self._keys.partition(at)
                calls[at] = INTEREST, [keys.meta, keys.events_channel], [types, _MOST]
            self._leave_others(at, types, known and confirmed)
        answers = await self._port.scripts(list(calls.values())) if calls else []
        for at, answer in zip(calls, answers, strict=True):
            if isinstance(answer, StateError) or answer[0] == b"full":
                self._again = self._port.monotonic() + _FULL_FOR
            elif answer[0] == b"ok":
                self._leave_others(at, types, True)

    def _leave_others(self, partition: int, types: str, alone: bool) -> None:
        with self._mutex:
            if types != self.types:
                return  # other types were chosen meanwhile
            if alone:
                self._link.leave(self._keys.partition(partition).events_channel)
            else:
                self._listen_to_all(partition)
