"""Events -> consumers. Law: a consumer gets its events one at a time, in the order of each conversation.

A member of a group that takes too long for one leaves its share, with that event, to the others: it may be handled
twice, and none waits for ever behind a handler that hangs.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Awaitable, Callable, Iterable
from types import TracebackType
from typing import Any, Self

from distributed_state.errors import CorruptState, InvalidValue, StateError, WarmUnavailable
from distributed_state.port import Job
from distributed_state.tiers.assembly import Tiers
from distributed_state.values.model import MAX_ID_BYTES, Ref
from distributed_state.values.results import Event
from distributed_state.warm.consumer import RESYNC, Subscription, Waiting
from distributed_state.warm.consumers import Consumers
from distributed_state.warm.partition_assignment import PartitionAssignment
from distributed_state.warm.stream import Position
from distributed_state.warm.telemetry import Facts, observed

log = logging.getLogger(__name__)
Handler = Callable[[Event], Any | Awaitable[Any]]
_TEAM_SECONDS = 6.0
_TOGETHER = 64
_SAVE_EVERY = 0.5
_PATIENCE = 5.0
_HANGING = 5.0
_TYPE = re.compile(r"[\w.-]{1,200}", re.ASCII)


class Group:
    """One member of consumers that share the events: each partition is one member's, up to a position in Redis."""

    def __init__(self, tiers: Tiers, name: str, subscription: Subscription) -> None:
        self._tiers = tiers
        self._name = name
        self._subscription = subscription
        self._shares = PartitionAssignment(
            tiers.port,
            tiers.keys,
            team=tiers.keys.team(name),
            member=f"{tiers.replica}.{next(tiers.warm.count)}",
            claim=lambda partition: tiers.keys.group(partition, name)[0],
            seconds=_TEAM_SECONDS,
        )
        self._mutex = tiers.port.mutex()
        self._limit = tiers.settings.handler_timeout
        self._saved: dict[int, Position] = {}
        self._handed: tuple[float, Waiting] | None = None  # since when the consumer has what
        # After it took too long: where that is, before and behind it. None: it did not.
        self._overdue: dict[int, tuple[Position, Position]] | None = None
        self._leaving: set[int] = set()
        self._left: set[int] = set()
        self._unsaved = 0
        self._save_at = 0.0
        self._job: Job | None = None

    async def join(self, since: str | None) -> None:
        """Begin where the group is; a new group at `since`, or now."""
        keys = self._tiers.keys
        port = self._tiers.port
        begin = await self._tiers.consumers.positions(since)
        await port.exchange(
            [(b"SET", keys.group(at, self._name)[1], str(position), b"NX") for at, position in begin.items()]
        )
        await self._hold()
        self._job = port.spawn(self._run, "distributed-state-group")

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
        """The consumer is given this."""
        with self._mutex:
            self._handed = self._tiers.port.monotonic(), waiting

    async def done(self) -> None:
        """The consumer is done with what it was given."""
        with self._mutex:
            self._handed = None
            late = self._overdue
        if late is not None:
            # Said even now, unless another member is past it: else one slow event would go round for ever.
            calls = [
                (self._tiers.keys.group(at, self._name), str(behind).encode(), str(before).encode())
                for at, (before, behind) in late.items()
            ]
            await self._tiers.stream.advance(calls, self._shares.member)
            self._overdue = None

    async def _lapse(self) -> None:
        """If the consumer takes too long, leave its share to the other members until it is back."""
        with self._mutex:
            if self._handed is None or self._overdue is not None:
                return
            since, waiting = self._handed
            if self._tiers.port.monotonic() < since + self._limit:
                return
            reached = self._subscription.delivered()
            self._overdue = {at: (to, reached[at]) for at, to in waiting.before.items() if at in reached}
        log.warning("group %s: an event was handled for %g s: its share goes to the others", self._name, self._limit)
        await self.save(waiting, now=True)
        self._drop(list(self._saved))
        await self._shares.leave()

    async def _hold(self) -> None:
        """Take part in the sharing. What is to be given back is so only when the consumer is done with it."""
        await self._shares.hold()
        with self._mutex:
            left = self._left
            self._left = set()
        await self._shares.give_back(left)
        mine = set(self._shares.mine)
        self._drop(self._saved.keys() - mine)
        with self._mutex:
            gained = sorted(mine - self._saved.keys() - self._left)
        await self._begin(gained)
        excess = set(self._shares.excess)
        if excess:
            with self._mutex:
                self._leaving = excess
            self._subscription.ready.set()

    async def _begin(self, gained: list[int]) -> None:
        if not gained:
            return
        names = [self._tiers.keys.group(at, self._name)[1] for at in gained]
        answers = await self._tiers.port.exchange([(b"GET", name) for name in names])
        found = {
            at: Position.parse(answer) if isinstance(answer, bytes) else None
            for at, answer in zip(gained, answers, strict=True)
        }
        emptied = [at for at, position in found.items() if position is None]
        begin = await self._tiers.consumers.positions("oldest") if emptied else {}
        positions = {at: position or begin[at] for at, position in found.items()}
        with self._mutex:
            self._saved.update(positions)
        self._subscription.assign(positions)
        if emptied:
            # Written when the group began: whoever emptied Redis took the events as well.
            self._subscription.lose({at: (positions[at], positions[at]) for at in emptied}, "epoch")
        self._tiers.consumers.stir(gained)

    def _drop(self, partitions: Iterable[int]) -> None:
        gone = set(partitions)
        if gone:
            self._subscription.revoke(gone)
            with self._mutex:
                for each in gone:
                    self._saved.pop(each, None)

    async def save(self, current: Waiting | None, *, now: bool = False) -> None:
        """Note how far we are, now and then; `current` is being handled still."""
        with self._mutex:
            leaving = self._leaving
            self._leaving = set()
        clock = self._tiers.port.monotonic()
        self._unsaved += 1
        rests = not len(self._subscription) or self._unsaved >= _TOGETHER or clock >= self._save_at + _SAVE_EVERY
        over = clock >= self._shares.ends
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
            kept = await self._tiers.stream.advance(calls, self._shares.member)
            with self._mutex:
                self._saved.update({at: moved[at] for at in moved.keys() & self._saved.keys()})
            self._drop([at for at, ours in zip(moved, kept, strict=True) if not ours])
        if leaving:
            self._drop(leaving)
            with self._mutex:
                self._left |= leaving
        if over:
            # Paused or cut off: another member may have gone on already. What is still ours begins again where it is.
            self._drop(list(self._saved))

    async def leave(self, current: Waiting | None) -> None:
        """Note how far we are and leave the rest to the others."""
        if self._job is not None:
            await self._job.stop()
            self._job = None
            if current is None:
                await self.done()
            # Patiently: what is not noted is handled again. The shares lapse by themselves.
            await self._tiers.warm.patiently(lambda: self.save(current, now=True))
            try:
                await self._shares.leave()
            except WarmUnavailable as error:
                log.info("group %s: its shares are not given back and lapse: %s", self._name, error)


class AsyncEvents:
    """Events as they come, from `store.events(...)`.

    Example::

        async with store.events("conversation.*") as events:
            await session.set("city", "Oslo")
            while (event := await events.next(timeout=0.5)) is not None:
                print(event.type, event.conversation_id)

    `async for event in events` waits without limit. Listening begins when it is entered, or first asked. An event of
    type `resync` says that some were missed: reload what you keep.
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
        return Consumers.shown(self._subscription.delivered())

    def asks(self, type: str) -> bool:
        """Whether these are events of this type, too."""
        return self._subscription.wants(type.encode())

    @property
    def waiting(self) -> int:
        """How many events have arrived and were not returned yet."""
        return len(self._subscription)

    def end(self) -> None:
        """Let whoever waits for an event get none."""
        self._subscription.close()

    async def close(self, *, handled: bool = True) -> None:
        """Stop listening. For a group, `handled` says whether the event that was returned last was handled."""
        self.end()
        if self._joined:
            self._joined = False
            self._tiers.consumers.leave(self._subscription)
            if self._group is not None:
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


def _facts(_: Handling, event: Event) -> Facts:
    return {"partition": event.partition, "kind": event.type}


class Handling:
    """A handler and the job that hands events to it."""

    def __init__(self, tiers: Tiers, events: AsyncEvents, handler: Handler) -> None:
        if not callable(handler):
            raise InvalidValue(f"a handler is a function that takes an event, not {handler!r:.80}")
        port = tiers.port
        self._awaits = inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(
            getattr(handler, "__call__", None)  # noqa: B004 - whether it is a coroutine function
        )
        if self._awaits and not port.suspends:
            raise InvalidValue(f"{_name(handler)}: a coroutine function is a handler for asyncio only")
        self.handler = handler
        self._events = events
        self._port = port
        self._feed = tiers.consumers
        self._slow = tiers.settings.slow_handler
        self.telemetry = tiers.warm.telemetry
        self._at: tuple[float, Event] | None = None  # since when which event is being handled
        self._noticed: Any = None
        self._feed.watching.append(self._notice_hanging)
        self.joined = port.signal()
        self._idle = port.signal()
        self._idle.set()
        self._owner: object = None
        self._closing = False
        self.handled = self.failed = self.slowed = 0
        self._job = port.spawn(self._run, f"distributed-state-on-{_name(handler)}"[:60])

    async def _run(self) -> None:
        pause = 0.05
        self._owner = self._port.owner()
        while not self._closing:
            try:
                await self._events.join()
                self.joined.set()
                event = await self._events.next()
            except CorruptState as error:
                # The next one comes at once: it may be another's fault that this one cannot be read.
                self.failed += 1
                log.error("%s was not called: %s", _name(self.handler), error)
                continue
            except StateError as error:
                if isinstance(error, InvalidValue):
                    self.joined.set()
                    raise
                log.warning("%s: %s; trying again in %.2f s", _name(self.handler), error, pause)
                await self._port.sleep(pause)
                pause = min(pause * 2, 2.0)
                continue
            pause = 0.05
            if event is None:
                return
            if event.type == RESYNC and not self._events.asks(RESYNC):
                log.warning("%s missed events: %s", _name(self.handler), event.data)
                continue
            self._idle.clear()
            if self._closing:
                return  # not idle: it was not handled
            await self._handle(event)
            self._idle.set()

    async def _handle(self, event: Event) -> None:
        began = self._port.monotonic()
        self._at = began, event
        try:
            await self._call(event)
        except (Exception, SystemExit):  # an exit as well: from a thread it would end the handler, without a word
            self.failed += 1
            log.exception("%s failed on %s %s of %r", _name(self.handler), event.type, event.id, event.subject[:200])
        self._at = None
        self.handled += 1
        took = self._port.monotonic() - began
        if took > self._slow:
            self.slowed += 1
            log.warning(
                "%s took %.0f ms for %s %s of %r",
                _name(self.handler), took * 1000, event.type, event.id, event.subject[:200],
            )  # fmt: skip

    @observed("event.handle", "handler", _facts)
    async def _call(self, event: Event) -> None:
        if self._awaits:
            await self._port.complete(self.handler(event))
        else:
            await self._port.thread(self.handler, event)

    def _notice_hanging(self) -> None:
        if self._at is not None and self._at is not self._noticed:
            since, event = self._at
            took = self._port.monotonic() - since
            if took > max(_HANGING, self._slow):
                self._noticed = self._at
                log.warning(
                    "%s has been at %s %s of %r for %.0f s, and %d events wait for it",
                    _name(self.handler), event.type, event.id, event.subject[:200], took, self._events.waiting,
                )  # fmt: skip

    async def close(self) -> None:
        """Hand over no more events, and let the one that is being handled be handled, if that is soon.

        A handler may do this itself, by `off` or by closing the store: it is done with its event, and goes on.
        """
        if self._closing:
            return
        self._closing = True
        self._feed.watching.remove(self._notice_hanging)
        self._feed.past.update(handled=self.handled, failed=self.failed, slowed=self.slowed)
        self._events.end()
        if self._port.owner() is self._owner:
            await self._events.close()
            return
        await self._idle.wait(_PATIENCE)
        await self._job.stop()
        await self._events.close(handled=await self._idle.wait(0))


def _name(handler: Any) -> str:
    return str(getattr(handler, "__qualname__", handler))[:80]


def checked_type(type: str) -> str:
    """A type of event that may be written. Raises InvalidValue."""
    if not isinstance(type, str) or not _TYPE.fullmatch(type) or type == RESYNC:
        raise InvalidValue(
            f"an event's type is a word like 'mail.sent', of letters, digits, '.', '_' and '-', not {type!r:.80}"
        )
    return type


def checked_subject(subject: Any) -> str:
    """The text of a subject: a record's, or any printable text."""
    ref = getattr(subject, "ref", None)
    if isinstance(ref, Ref):
        return ref.text
    text = subject
    if not isinstance(text, str) or len(text.encode("utf-8", "replace")) > MAX_ID_BYTES:
        raise InvalidValue(f"a subject is a record or a str of at most {MAX_ID_BYTES} bytes, not {subject!r:.80}")
    if not text.isprintable():
        raise InvalidValue(f"a subject is printable text, not {text!r:.80}")
    return text
