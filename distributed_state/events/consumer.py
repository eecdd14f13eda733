"""Events as they come, for one consumer. Law: one at a time, in the order of each conversation.

Design: section 12.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Self

from distributed_state.errors import InvalidValue
from distributed_state.events.group import Group
from distributed_state.port.waited import bounded
from distributed_state.tiers.assembly import Tiers
from distributed_state.values.results import Event
from distributed_state.warm.consumer import Buffer, Subscription, Waiting
from distributed_state.warm.positions import shown


@bounded()
class AsyncEvents:
    """Events as they come, from `store.events(...)`.

    Example::

        async with store.events("conversation.*") as events:
            await session.set("city", "Oslo")
            while (event := await events.next(timeout=0.5)) is not None:
                print(event.type, event.conversation_id)

    `async for event in events` waits without limit. Listening begins when it is entered, or first asked, and ends with
    the event loop of the task that did so. An event of type `resync` says that some were missed: reload what you keep.
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
        """Begin to listen. Events from now on are not missed."""
        if self._joined:
            return
        await self._tiers.warm.patiently(self._begin)
        self._joined = True
        self._tiers.consumers.join(self._subscription)

    async def _begin(self) -> None:
        if self._group is not None:
            await self._group.join(self._since)
        else:
            self._subscription.assign(await self._tiers.consumers.positions(self._since))

    async def next(self, timeout: float | None = None) -> Event | None:
        """Wait for the next event; None after `timeout` seconds without one, or when the events were closed.

        Without `timeout` it waits without limit. Asking for the next one says that the one before was handled, which
        is what a group keeps. Raises InvalidValue for what is no number of seconds.
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
                    # Whoever hears of a change must not read what was there before it.
                    self._tiers.hot.expect(event.subject, event.epoch, event.version)
                return event
            left = None if end is None else end - clock()
            if subscription.closed or (left is not None and left <= 0):
                return None
            await subscription.ready.wait(left)

    @property
    def position(self) -> str:
        """How far these events are, the last one that was returned included: text for `since=` of others."""
        return shown(self._subscription.delivered())

    def asks(self, type: str) -> bool:
        """Whether these are events of this type, too."""
        return self._subscription.wants(type.encode())

    @property
    def waiting(self) -> int:
        """How many events have arrived and were not returned yet."""
        return len(self._subscription)

    def count_in(self, buffer: Buffer) -> None:
        """Count what waits here in this buffer. Call it before `join`, and for no group."""
        self._subscription.buffer = buffer

    def end(self) -> None:
        """Let whoever waits for an event get none."""
        self._subscription.close()

    def leave(self) -> bool:
        """Hear of no more events; a group's partitions lapse. True if this did listen."""
        self.end()
        joined, self._joined = self._joined, False
        if joined:
            self._tiers.consumers.leave(self._subscription)
        return joined

    async def close(self, *, handled: bool = True) -> None:
        """Stop listening. For a group, `handled` says whether the event that was returned last was handled."""
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
