"""A stream of events for one consumer. Law: one event at a time, in order for each conversation.

Consumers may share the events as a group: one member handles each partition, and Redis keeps its position. Other
members take over the partitions of a member that takes too long for one event: that event may be handled twice, but a
handler that hangs does not block the group.

Design: section 12.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from types import TracebackType
from typing import Self

from distributed_state.errors import InvalidValue, StateError, WarmUnavailable
from distributed_state.port import Job
from distributed_state.port.waited import bounded
from distributed_state.results import Event
from distributed_state.tiers.assembly import Tiers
from distributed_state.warm.consumers import Buffer, Subscription, Waiting
from distributed_state.warm.partition_assignment import PartitionAssignment
from distributed_state.warm.stream import Position, count, shown

log = logging.getLogger(__name__)
_TEAM_SECONDS = 6.0
_TOGETHER = 64
_SAVE_EVERY = 0.5
_NOTED_AGAIN = 60.0  # seconds within which live members save their group's position again


@bounded()
class AsyncEvents:
    """A stream of events, from `store.events(...)`.

    Example::

        async with store.events("conversation.*") as events:
            await session.set("city", "Oslo")
            while (event := await events.next(timeout=0.5)) is not None:
                print(event.type, event.conversation_id)

    `async for event in events` waits without limit. The stream starts when it is entered, or at the first `next`, and
    ends with that task's event loop. An event of type `resync` means that some events were missed: reload cached data.
    """

    def __init__(self, tiers: Tiers, types: Iterable[str], group: str | None, since: str | None) -> None:
        if group is not None and (not isinstance(group, str) or not 0 < len(group) <= 200):
            raise InvalidValue(f"group is a str of 1 to 200 characters, not {group!r:.80}")
        self._tiers = tiers
        self._since = since
        self._subscription = Subscription(tiers.port, types)
        self._group = None if group is None else Group(tiers, group, self._subscription)
        self._current: Waiting | None = None
        self._joined = False

    async def join(self) -> None:
        """Start the stream: all later events are received."""
        if self._joined:
            return
        await self._tiers.warm.retry(self._begin)
        self._joined = True
        self._tiers.consumers.join(self._subscription)

    async def _begin(self) -> None:
        if self._group is not None:
            await self._group.join(self._since)
        else:
            self._subscription.assign(await self._tiers.consumers.positions(self._since))

    async def next(self, timeout: float | None = None) -> Event | None:
        """Wait for the next event; None after `timeout` seconds without one, or when the events were closed.

        Without `timeout` it waits without limit. A call confirms that the previous event was handled; a group saves
        that. Raises InvalidValue for an invalid timeout.
        """
        if timeout is not None and (
            isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or timeout != timeout
        ):
            raise InvalidValue(f"timeout is a number of seconds or None, not {timeout!r:.80}")
        await self.join()
        if self._group is not None:
            await self._group.done()
        subscription = self._subscription
        self._current = None
        if subscription.made_room():
            self._tiers.consumers.stir(range(self._tiers.keys.partitions))
        clock = self._tiers.port.monotonic
        end = None if timeout is None else clock() + timeout
        while True:
            if self._group is not None:
                await self._group.save(None)
            waiting = subscription.pop()
            if waiting is not None:
                if self._group is not None:
                    self._group.hand(waiting)
                self._current = waiting
                event = waiting.event(self._tiers.codec_of)
                if event.version:
                    # After an event of a change, a read must not return an older state.
                    self._tiers.hot.expect(event.subject, event.epoch, event.version)
                return event
            left = None if end is None else end - clock()
            if subscription.closed or (left is not None and left <= 0):
                return None
            await subscription.ready.wait(left)

    @property
    def position(self) -> str:
        """The position after the last returned event, as text for the `since=` of another consumer."""
        return shown(self._subscription.delivered())

    def asks(self, type: str) -> bool:
        """Whether events of this type are included."""
        return self._subscription.wants(type.encode())

    @property
    def waiting(self) -> int:
        """The number of events that have arrived and were not returned yet."""
        return len(self._subscription)

    def count_in(self, buffer: Buffer) -> None:
        """Count the waiting events in this buffer. Call it before `join`, and not for a group."""
        self._subscription.buffer = buffer

    def end(self) -> None:
        """Make `next` return None, also in a call that is waiting."""
        self._subscription.close()

    def leave(self) -> bool:
        """Stop receiving events; a group's partitions lapse. Returns whether events were received until now."""
        self.end()
        joined, self._joined = self._joined, False
        if joined:
            self._tiers.consumers.leave(self._subscription)
        return joined

    async def close(self, *, handled: bool = True) -> None:
        """End the stream. For a group, `handled` says whether the last returned event was handled."""
        if self.leave() and self._group is not None:
            await self._group.leave(None if handled else self._current)

    async def __aenter__(self) -> Self:
        await self.join()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close(handled=error is None)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        event = await self.next()
        if event is None:
            raise StopAsyncIteration
        return event


class Group:
    """A member of a group of consumers: one member handles each partition, and Redis keeps the position."""

    def __init__(self, tiers: Tiers, name: str, subscription: Subscription) -> None:
        self._tiers = tiers
        self._name = name
        self._subscription = subscription
        self._assignment = PartitionAssignment(
            tiers.port,
            tiers.keys,
            team=tiers.keys.team(name),
            member=f"{tiers.replica}.{next(tiers.warm.count)}",
            claim=lambda partition: tiers.keys.group(partition, name)[0],
            rounds=tiers.rounds,
            seconds=_TEAM_SECONDS,
        )
        self._mutex = tiers.port.mutex()
        self._limit = tiers.settings.handler_timeout
        self._saved: dict[int, Position] = {}
        self._handed: tuple[float, Waiting] | None = None  # the event being handled, and since when
        # the positions before and after the event if it took too long, else None
        self._overdue: dict[int, tuple[Position, Position]] | None = None
        self._leaving: set[int] = set()
        self._left: set[int] = set()
        self._unsaved = 0
        self._save_at = 0.0
        self._job: Job | None = None

    async def join(self, since: str | None) -> None:
        """Start at the group's position; a new group starts at `since`, or now."""
        keys = self._tiers.keys
        port = self._tiers.port
        begin = await self._tiers.consumers.positions(since)
        if since is None:
            begin |= await self._lost(begin)
        await port.commands(
            [(b"SET", keys.group(at, self._name)[1], str(position), b"NX") for at, position in begin.items()]
        )
        await self._hold()
        self._job = port.spawn_here(self._run, "distributed-state-group")

    async def _lost(self, begin: dict[int, Position]) -> dict[int, Position]:
        """The start of a group whose position Redis may just have lost: as early as possible, with a resync.

        *A server lost the position of a group with members. Before a member saved it again, a new member joined; it
        treated the group as new and started it at the present, so earlier events were not handled.*
        """
        tiers = self._tiers
        if tiers.settings.url is None:
            return {}  # an embedded server starts empty, together with all members
        over = {at: position for at, position in begin.items() if position.waits}
        await tiers.clock.know()
        since_ms = int((tiers.clock.now() - _NOTED_AGAIN) * 1000)
        begun = await tiers.stream.begun_since([tiers.keys.partition(at) for at in begin], since_ms)
        # If every partition is in its first epoch, the namespace is new, and so is the group.
        if not any(count(each.epoch) for each in over.values()) and all(
            count(head.epoch) == 1 for head in begun.values()
        ):
            return {}
        lost = {at: Position.missed(epochs, each.known) for at, each in over.items() if (epochs := count(each.epoch))}
        return lost | {at: head.beginning for at, head in begun.items()}

    async def _run(self) -> None:
        while True:
            await self._tiers.port.sleep(_TEAM_SECONDS / 6)
            try:
                await self._lapse()
                if self._overdue is None:
                    await self._hold()
            except StateError as error:
                log.warning("group %s: %s", self._name, error)

    def hand(self, waiting: Waiting) -> None:
        """Note that the consumer received this event."""
        with self._mutex:
            self._handed = self._tiers.port.monotonic(), waiting

    async def done(self) -> None:
        """Note that the consumer has handled its event."""
        with self._mutex:
            self._handed = None
            late = self._overdue
        if late is not None:
            # Saved even if late, unless another member is further; otherwise a slow event would be handled again and
            # again.
            calls = [
                (self._tiers.keys.group(at, self._name), str(behind).encode(), str(before).encode())
                for at, (before, behind) in late.items()
            ]
            await self._tiers.stream.advance(calls, self._assignment.member)
            self._overdue = None

    async def _lapse(self) -> None:
        """If the consumer takes too long for its event, leave its partitions to other members until it is done."""
        with self._mutex:
            if self._handed is None or self._overdue is not None:
                return
            since, waiting = self._handed
            if self._tiers.port.monotonic() < since + self._limit:
                return
            reached = self._subscription.delivered()
            self._overdue = {at: (to, reached[at]) for at, to in waiting.before.items() if at in reached}
        log.warning(
            "group %s: a handler has taken %g s for one event: other members take over its partitions",
            self._name,
            self._limit,
        )
        await self.save(waiting, now=True)
        self._drop(list(self._saved))
        await self._assignment.leave()

    async def _hold(self) -> None:
        """Take or renew this member's partitions. Excess ones are released when the consumer has handled its event."""
        await self._assignment.hold()
        with self._mutex:
            left = self._left
            self._left = set()
        await self._assignment.give_back(left)
        mine = set(self._assignment.mine)
        self._drop(self._saved.keys() - mine)
        with self._mutex:
            gained = sorted(mine - self._saved.keys() - self._left)
        await self._begin(gained)
        excess = set(self._assignment.excess)
        if excess:
            with self._mutex:
                self._leaving = excess
            self._subscription.ready.set()

    async def _begin(self, gained: list[int]) -> None:
        if not gained:
            return
        names = [self._tiers.keys.group(at, self._name)[1] for at in gained]
        answers = await self._tiers.port.exchange([(b"GET", name) for name in names])
        # A partition whose server does not answer starts when the server is back.
        found = {
            at: None if answer is None else Position.parse(answer)
            for at, answer in zip(gained, answers, strict=True)
            if not isinstance(answer, Exception)
        }
        emptied = [at for at, position in found.items() if position is None]
        begin = await self._tiers.consumers.positions("oldest", emptied) if emptied else {}
        positions = {at: position or begin[at] for at, position in found.items()}
        with self._mutex:
            self._saved.update(positions)
        self._subscription.assign(positions)
        if emptied:
            # The position was written when the group started: if it is missing, Redis was emptied, and the events were
            # lost too.
            self._subscription.lose({at: (positions[at], positions[at]) for at in emptied}, "epoch")
        self._tiers.consumers.stir(positions)

    def _drop(self, partitions: Iterable[int]) -> None:
        gone = set(partitions)
        if gone:
            self._subscription.revoke(gone)
            with self._mutex:
                for each in gone:
                    self._saved.pop(each, None)

    async def save(self, current: Waiting | None, *, now: bool = False) -> None:
        """Save the group's position from time to time; `current` is still being handled."""
        with self._mutex:
            leaving = self._leaving
            self._leaving = set()
        clock = self._tiers.port.monotonic()
        self._unsaved += 1
        rests = not len(self._subscription) or self._unsaved >= _TOGETHER or clock >= self._save_at + _SAVE_EVERY
        over = clock >= self._assignment.ends
        if not (now or leaving or rests or over):
            return
        self._unsaved = 0
        self._save_at = clock
        reached = self._subscription.delivered()
        if current is not None:
            reached.update((at, position) for at, position in current.before.items() if at in reached)
        moved = {at: position for at, position in reached.items() if self._saved.get(at, position) != position}
        if moved:
            calls = [(self._tiers.keys.group(at, self._name), str(to).encode(), b"") for at, to in moved.items()]
            kept = await self._tiers.stream.advance(calls, self._assignment.member)
            with self._mutex:
                self._saved.update({at: moved[at] for at in moved.keys() & self._saved.keys()})
            self._drop([at for at, ours in zip(moved, kept, strict=True) if not ours])
        if leaving:
            self._drop(leaving)
            with self._mutex:
                self._left |= leaving
        if over:
            # After a pause or a lost connection another member may have taken over. Partitions still held restart at
            # their position.
            self._drop(list(self._saved))

    async def leave(self, current: Waiting | None) -> None:
        """Save the position, and leave the partitions to other members."""
        if self._job is not None:
            await self._job.stop()
            self._job = None
            if current is None:
                await self.done()
            # Retried, because events after the saved position are handled again. The assignment itself expires.
            await self._tiers.warm.retry(lambda: self.save(current, now=True))
            try:
                await self._assignment.leave()
            except WarmUnavailable as error:
                log.info(
                    "group %s: the partitions could not be released; the assignment will expire: %s", self._name, error
                )
