"""Listeners for events on the replicas of a run, and the check that each received what was promised (G6).

Law: a listener records what it receives outside its process, so that a crash of the process loses no records.

Listeners are handlers, consumers that leave and resume from their position, and members of one group. At the end, the
events that each received are compared with the events in SQL.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from distributed_state import AsyncStateStore, Event
from distributed_state.errors import ConfigurationError, StateError
from distributed_state.warm.consumers import RESYNC
from distributed_state.warm.stream import count
from tests.simulation.checks import Broken
from tests.simulation.fleet import Fleet
from tests.simulation.plan import Fault
from tests.simulation.workload import ACKNOWLEDGED, PRIVATE, REFUSED, Outcome, fork_of, private
from tests.simulation.world import EPOCH, Clock, Process, Task

GROUP = "group"
_GROUPED = ("app.*", RESYNC)
_CLAIM = 8.0  # seconds: a claim lasts 6, and is renewed every 2
_SLACK = 0.002  # seconds: an event's time is in whole milliseconds
_ONE_AT_A_TIME = (
    "drop subscribers",
    "forget scripts",
    "clock jump",
    "crash replica",
)  # these faults separate no member from its own
Place = tuple[int, int, int]  # partition, number of the epoch, offset
Losses = Sequence[tuple[float, float]]


@dataclass(slots=True)
class Got:
    """An event that a listener received, and when it began and finished handling it; inf: not finished."""

    event: Event
    began: float
    ended: float = math.inf


@dataclass(slots=True)
class Listener:
    """One handler, consumer or member. `since`: it must receive events written from then on, by the server's clock."""

    name: str
    process: Process
    types: tuple[str, ...]
    group: str = ""
    returns: bool = False  # it resumes from its position: it may receive lost and restored events again
    since: float = math.inf
    got: list[Got] = field(default_factory=list)

    def note(self, event: Event) -> Got:
        """Record that it begins to handle this event now."""
        got = Got(event, self.process.world.now)
        self.got.append(got)
        self.process.world.note("got", self.name, event.type, event.id)
        return got

    def is_for(self, event: Event) -> bool:
        """Whether it must receive this event."""
        return event.time >= self.since and any(fnmatchcase(event.type, each) for each in self.types)

    def covers(self, event: Event, places: dict[str, Place], wrong: float) -> bool:
        """Whether it received a resync in place of this event. `wrong`: seconds by which clocks may differ."""
        for at, resync in enumerate(self.got):
            if _is_about(resync, event) and resync.began + EPOCH + wrong >= event.time:
                before, after = (self._places(part, event.partition, places) for part in (self.got[:at], self.got[at:]))
                # A restored event may have a later place in SQL than the place at which it was received.
                got = {each.event.id: _place(each.event) for each in self.got[:at]}
                before = [min(place, got[id]) for id, place in places.items() if id in got and place in before]
                if max(before, default=(0, 0, 0)) < places[event.id] < min(after, default=(math.inf, 0, 0)):
                    return True
        return False

    @staticmethod
    def _places(got: Iterable[Got], partition: int, places: dict[str, Place]) -> list[Place]:
        return [places[each.event.id] for each in got if each.event.partition == partition and each.event.id in places]


def _is_about(resync: Got, event: Event) -> bool:
    return resync.event.type == RESYNC and event.partition in resync.event.data["partitions"]


def _place(event: Event) -> Place:
    return event.partition, count(event.epoch), event.sequence


class Listening:
    """All listeners of a run."""

    def __init__(self, fleet: Fleet, faults: Iterable[Fault]) -> None:
        self.fleet, self.world = fleet, fleet.world
        self.listeners: list[Listener] = []
        self.tasks: list[Task] = []  # of consumers
        self.deaths: dict[str, float] = {}
        self.events: dict[str, Event] = {}  # in SQL at the end, by id, in order
        self.places: dict[str, Place] = {}
        self._asked = math.inf
        self._wrong = 0.0  # seconds by which a server's clock is wrong
        self._apart = [
            (each.at, each.at + 2 * each.lasts + 0.5)
            for each in faults
            if each.kind not in _ONE_AT_A_TIME and not each.kind.startswith(("sql", "disk"))
        ]

    # The listeners

    async def begin(self, number: int, store: AsyncStateStore, process: Process) -> None:
        """Listen on a replica, in a task of its process. The number of the replica decides for what."""
        process.died.calls.append(lambda: self.deaths.update({process.name: self.world.now}))
        made = []
        if number % 3 == 1:
            made.append(self._handle(store, process, "every", ("*",)))
            self._run(self._member(store, self._listener(process, "member", _GROUPED, GROUP)), process, "member")
        elif number % 3 == 2:
            made.append(self._handle(store, process, "families", ("conversation.*", "app.*", RESYNC)))
            made.append(self._handle(store, process, "one", ("app.b", RESYNC)))
            reader = self._listener(process, "reader", ("app.*",))
            reader.returns = True
            self._run(self._reader(store, reader), process, "reader")
        else:
            made.append(self._handle(store, process, "list", ("app.a", "session.*", RESYNC)))
            made.append(self._handle(store, process, "member", _GROUPED, GROUP))
        await store.ready()
        for each in made:
            self._joined(each)

    def _run(self, work: Any, process: Process, name: str) -> None:
        self.tasks.append(self.fleet.run(process, work, name))

    def _listener(self, process: Process, name: str, types: tuple[str, ...], group: str = "") -> Listener:
        made = Listener(f"{process.name}/{name}", process, types, group)
        self.listeners.append(made)
        return made

    def _joined(self, listener: Listener) -> None:
        listener.since = min(listener.since, max(each.wall() for each in self._clocks()))

    def _clocks(self) -> list[Clock]:
        """The clocks that give events their times: those of all servers that are, or may become, a primary."""
        return [node.clock for group in self.fleet.groups for node in group.nodes()]

    def _handle(
        self, store: AsyncStateStore, process: Process, name: str, types: tuple[str, ...], group: str = ""
    ) -> Listener:
        listener = self._listener(process, name, types, group)
        chance = self._chance(listener)

        async def handler(event: Event) -> None:
            await self._handled(listener, event, chance)

        store.on(list(types), handler, group=group or None)
        return listener

    def _chance(self, listener: Listener) -> random.Random:
        return random.Random(f"{self.world.seed} {listener.name}")

    async def _handled(self, listener: Listener, event: Event, chance: random.Random) -> None:
        got = listener.note(event)
        draw = chance.random()
        if draw < 0.02:
            await self.world.sleep(chance.uniform(0.2, 4.0 if listener.group else 0.6))
        elif draw < 0.3:
            await self.world.sleep(chance.expovariate(100))
        got.ended = self.world.now

    async def _member(self, store: AsyncStateStore, listener: Listener) -> None:
        """Join the group, leave it, and join again."""
        chance = self._chance(listener)
        await self._stretches(listener, lambda: store.events(*listener.types, group=GROUP), chance)

    async def _reader(self, store: AsyncStateStore, listener: Listener) -> None:
        """Receive events, and later resume from the last position."""
        chance = self._chance(listener)
        at: list[str | None] = [None]

        def reached(events: Any) -> None:
            at[0] = events.position

        def begin() -> Any:
            return store.events(*listener.types, since=at[0])

        await self._stretches(listener, begin, chance, reached)

    async def _stretches(
        self, listener: Listener, begin: Callable[[], Any], chance: random.Random,
        reached: Callable[[Any], None] = lambda _: None,
    ) -> None:  # fmt: skip
        """Handle events as they come, with one consumer after the other, until the store is closed."""
        is_open = True
        while is_open:
            try:
                async with begin() as events:
                    reached(events)
                    self._joined(listener)
                    for _ in range(chance.randint(4, 40)):
                        event = await events.next()
                        is_open = event is not None
                        if event is None:
                            break
                        reached(events)
                        await self._handled(listener, event, chance)
            except StateError as error:
                self.world.note("listens no more", listener.name, type(error).__name__)
                # Not by the text: a server that closes a connection is an error that passes.
                if not listener.process.tasks or isinstance(error, ConfigurationError):
                    return  # its process died, or its store is closed
            await self.world.sleep(chance.uniform(0.0, 0.3))

    # What they had to receive

    async def learn(self, store: AsyncStateStore) -> None:
        """Read all events so far from SQL."""
        self._asked = min(each.wall() for each in self._clocks())
        self._wrong = max(abs(each.ahead) for each in self._clocks())
        found: list[Event] = []
        page = await store.admin.audit(after="oldest", limit=1000)
        while page:
            found += page
            page = await store.admin.audit(after=page[-1].cursor, limit=1000)
        self.events = {each.id: each for each in sorted(found, key=_place)}
        self.places = {id: _place(each) for id, each in self.events.items()}
        if len(self.events) != len(found):
            raise Broken("G3", f"SQL has {len(found)} events under {len(self.events)} ids")

    async def catch_up(self, limit: float = 30.0) -> None:
        """Wait, within a limit, until all live listeners have received their events."""
        end = self.world.now + limit
        while self.world.now < end and any(self._missed(each) for each in self._lasting()):
            await self.world.sleep(0.25)
        while self.world.now < end and self._missed_by_group():
            await self.world.sleep(0.25)

    def _lasting(self) -> list[Listener]:
        return [each for each in self.listeners if not each.group and not each.process.is_dead]

    def _missed(self, listener: Listener) -> list[Event]:
        got = {each.event.id for each in listener.got}
        lacking = [each for each in self.events.values() if listener.is_for(each) and each.id not in got]
        return [each for each in lacking if not listener.covers(each, self.places, self._wrong)]

    def _members(self) -> list[Listener]:
        """Those of the group, with those that were not ready in time: they handle events once they have joined."""
        return [each for each in self.listeners if each.group]

    def _missed_by_group(self) -> list[Event]:
        members = self._members()
        if all(each.process.is_dead for each in members):
            return []
        done = {each.event.id for member in members for each in member.got if each.ended < math.inf}
        resyncs = [each for member in members for each in member.got if each.event.type == RESYNC]
        first = min(members, key=lambda each: each.since)
        lacking = [each for each in self.events.values() if first.is_for(each) and each.id not in done]
        return [
            event
            for event in lacking
            if not any(_is_about(each, event) and each.began + EPOCH + self._wrong >= event.time for each in resyncs)
        ]

    # What they received

    def judge(self, outcomes: Sequence[Outcome], losses: Losses) -> None:
        """Compare what all listeners received with the events in SQL. Raises Broken."""
        losses = [(since - self._wrong, until + self._wrong) for since, until in losses]
        self._judge_emitted([each for each in outcomes if each.operation.kind == "emit"], losses)
        erased = {f"session:{private(each.operation)}" for each in outcomes if each.operation.kind in PRIVATE}
        erased |= {f"session:{fork_of(each)}" for each in outcomes if each.operation.kind == "fork own"}
        for listener in self.listeners:
            self._judge_contents(listener, erased, losses)
            if not listener.group:
                self._judge_order(listener, losses)
        for listener in self._lasting():
            if missed := self._missed(listener):
                raise Broken("G6", f"{listener.name} did not get {_shown(missed)}, and was not told to resync")
        self._judge_group(losses)

    def _judge_emitted(self, outcomes: Sequence[Outcome], losses: Losses) -> None:
        written: dict[str, list[Event]] = {}
        for event in self.events.values():
            written.setdefault(event.data.get("by", ""), []).append(event)
        latest: dict[str, tuple[float, Place, Outcome]] = {}
        placed = []
        for each in outcomes:
            found = written.get(each.writer, [])
            if len(found) > 1:
                raise Broken("G3", f"{each} was written as {_shown(found)}")
            if found and each.state == REFUSED:
                raise Broken("G11", f"{each} was written as {_shown(found)}")
            if not found and each.state == ACKNOWLEDGED and not _is_lost(each.began, each.ended, losses):
                raise Broken("G4", f"{each} is not among the events that SQL has")
            placed += [(self.places[event.id], event.subject, each) for event in found]
        for place, subject, each in sorted(placed, key=lambda item: item[0]):
            began, _, other = latest.get(subject, (-1.0, place, each))
            if each.state == ACKNOWLEDGED and each.ended < began:
                raise Broken("G6", f"{each} has place {place} in SQL, behind that of {other}, which began later")
            if each.began > began:
                latest[subject] = each.began, place, each

    def _judge_contents(self, listener: Listener, erased: set[str], losses: Losses) -> None:
        """It received only what was written, as it was written. `erased`: subjects whose events SQL may lack."""
        for got in listener.got:
            event = got.event
            if event.type == RESYNC:
                # An epoch whose start was noted only in SQL, because the answer was lost, looks like a missed one.
                first = [at for at in event.data["partitions"] if self._epochs(at) == {1}]
                if first and not losses and "trimmed" not in event.data["reason"]:
                    raise Broken("G6", f"{listener.name} was told to resync: {event.data}, and nothing was lost")
                continue
            kept = self.events.get(event.id)
            if kept is None:
                is_later = event.time >= self._asked - _SLACK
                if not is_later and event.subject not in erased and not _was_lost(event, losses):
                    raise Broken("G6", f"{listener.name} got {_shown([event])}, which SQL does not have")
            # A lost event about a branch describes the branch's later state when it is written again.
            elif _said(kept) != _said(event) and not _was_lost(event, losses):
                raise Broken("G6", f"{listener.name} got {event}, which was written as {kept}")

    def _epochs(self, partition: int) -> set[int]:
        return {epoch for at, epoch, _ in self.places.values() if at == partition}

    def _judge_order(self, listener: Listener, losses: Losses) -> None:
        """It received each event once, and those of one subject in order, between two resyncs."""
        seen: dict[str, Event] = {}
        latest: dict[str, Event] = {}
        for got in listener.got:
            event = got.event
            if event.type == RESYNC:
                # An event that the server lost may have been written again, at a later place.
                latest = {key: each for key, each in latest.items() if not _is_about(got, each)}
                continue
            by = event.data.get("by", event.id)
            if by in seen and not (listener.returns and _was_lost(seen[by], losses)):
                raise Broken("G6", f"{listener.name} got {_shown([seen[by], event])}: that is one event twice")
            seen[by] = event
            self._judge_next(listener.name, event, latest)

    def _judge_next(self, name: str, event: Event, latest: dict[str, Event]) -> None:
        if event.id in self.places:
            before = latest.setdefault(event.subject, event)
            if self.places[event.id] < self.places[before.id]:
                raise Broken("G6", f"{name} got {_shown([before, event])}, which were written the other way round")
            latest[event.subject] = event

    def _judge_group(self, losses: Losses) -> None:
        handlings = sorted(
            ((each.began, member.name, each, member) for member in self._members() for each in member.got),
            key=lambda item: item[:2],
        )
        first: dict[str, tuple[Got, Listener]] = {}
        busy: dict[int, list[tuple[float, Got, Listener]]] = {}
        for began, name, got, member in handlings:
            event = got.event
            if event.type == RESYNC:
                continue
            open_still = [each for each in busy.get(event.partition, []) if each[0] > began]
            for _, other, at in open_still:
                if at is not member and not self._is_explained(other, began):
                    raise Broken(
                        "group", f"{name} got {_shown([event])} while {at.name} was at {_shown([other.event])}"
                    )
            ended = min(got.ended, self.deaths.get(member.process.name, math.inf))
            busy[event.partition] = [*open_still, (ended, got, member)]
            known = first.get(event.id)
            if known is not None and not self._is_repeated(*known, began):
                raise Broken("group", f"{name} got {_shown([event])} again, which {known[1].name} was done with")
            first.setdefault(event.id, (got, member))
        latest: dict[str, Event] = {}
        for got, _ in first.values():
            if not _was_lost(got.event, losses):
                self._judge_next(GROUP, got.event, latest)
        if missed := self._missed_by_group():
            raise Broken("group", f"nobody was done with {_shown(missed)}")

    def _is_explained(self, got: Got, until: float) -> bool:
        """Whether a member that handled this event may have lost its partition without noticing."""
        limit = self.fleet.settings.get("handler_timeout", 60.0)
        return until - got.began >= limit or any(
            since <= until and end >= got.began - _CLAIM for since, end in self._apart
        )

    def _is_repeated(self, got: Got, member: Listener, again: float) -> bool:
        """Whether an event may be handled again, because its first handling may not have been recorded."""
        died = self.deaths.get(member.process.name, math.inf)
        slow = any(
            each.ended - each.began >= self.fleet.settings.get("handler_timeout", 60.0)
            for each in member.got
            if each.began <= again
        )
        return died <= again or slow or self._is_explained(got, again)

    def judge_rest(self) -> None:
        """After everything is closed, no subscription and no connection is left. Raises Broken."""
        nodes = self.fleet.servers
        left = sorted(channel for node in nodes for channel, who in node.fake.ssubscribers.items() if len(who))
        names = sorted(each.process.name for node in nodes for each in node.connections)
        if left or names:
            raise Broken("left over", f"subscriptions to {left}, connections of {names}")


def _is_lost(began: float, ended: float, losses: Losses) -> bool:
    return any(since <= ended and began <= until for since, until in losses)


def _was_lost(event: Event, losses: Losses) -> bool:
    """Whether the server lost the event as it was received."""
    return _is_lost(event.time - EPOCH - _SLACK, event.time - EPOCH + _SLACK, losses)


def _said(event: Event) -> tuple[Any, ...]:
    return event.type, event.subject, event.partition, event.version, event.actor, event.data


def _shown(events: Sequence[Event]) -> str:
    texts = [f"{each.type} {each.id} of {each.subject} {each.data} at {_place(each)}" for each in events[:3]]
    return ", ".join(texts) + (f" and {len(events) - 3} more" if len(events) > 3 else "")
