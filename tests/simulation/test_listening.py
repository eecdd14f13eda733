"""Negative controls: if what listeners received is falsified, or a guard of the product is broken, the checks fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from controls import sabotage

from distributed_state import Event
from distributed_state.errors import ConfigurationError, StateError, WarmUnavailable
from distributed_state.warm.consumers import RESYNC, RecentEvents, Subscription
from tests.simulation.listening import Got, Listener, Listening
from tests.simulation.plan import SHAPES, Plan
from tests.simulation.run import Run

Control = Callable[[], Any]


def _broken(seed: int) -> str:
    return Run(Plan.of(seed, SHAPES["events"])).result().broken


def _in_the_note(falsify: Callable[[Listener], None], name: str = "/") -> Control:
    """Falsify the record of what a listener received, before it is judged."""
    judge = Listening.judge

    def judged(self: Listening, *rest: Any) -> None:
        falsify(next(each for each in self._lasting() + self._members() if name in each.name and len(each.got) > 12))
        judge(self, *rest)

    return lambda: mock.patch.object(Listening, "judge", judged)


def _plain(listener: Listener) -> list[int]:
    return [at for at, each in enumerate(listener.got) if each.event.type != RESYNC]


def _leave_out(listener: Listener) -> None:
    at = _plain(listener)[len(_plain(listener)) // 2]
    del listener.got[at]


def _double(listener: Listener) -> None:
    listener.got.append(listener.got[_plain(listener)[-1]])


def _swap(listener: Listener) -> None:
    first: dict[str, int] = {}
    for at in _plain(listener):
        subject = listener.got[at].event.subject
        if subject in first:
            one = first[subject]
            listener.got[one], listener.got[at] = listener.got[at], listener.got[one]
            return
        first[subject] = at


def _invent(listener: Listener) -> None:
    event = listener.got[_plain(listener)[-1]].event
    made = Event(**{name: getattr(event, name) for name in event.__slots__} | {"id": "nobody.1.0", "data": {}})
    listener.got.append(Got(made, event.time))


def _without_an_acknowledged_one() -> Any:
    learn = Listening.learn

    async def learned(self: Listening, store: Any) -> None:
        await learn(self, store)
        del self.events[next(each.id for each in self.events.values() if each.type == "app.a")]

    return mock.patch.object(Listening, "learn", learned)


@contextmanager
def _left_subscriptions() -> Iterator[None]:
    """Listen on a replica without ever ending the subscription."""
    begin = Listening.begin

    async def begun(self: Listening, number: int, store: Any, process: Any) -> None:
        await begin(self, number, store, process)
        self.fleet.server.subscribe(lambda _: None).post(b"SSUBSCRIBE", b"sim:{0.0}:e")

    with mock.patch.object(Listening, "begin", begun):
        yield


def _emit(old: str, new: str) -> Control:
    return lambda: sabotage("emit", old, new)


CONTROLS: dict[str, tuple[str, int, Control]] = {
    "one did not get an event": ("G6: r3/list did not get", 1, _in_the_note(_leave_out)),
    "one got an event twice": ("G6: r3/list got", 1, _in_the_note(_double)),
    "one got events in another order": ("G6: r3/list got", 1, _in_the_note(_swap)),
    "one got an event that nobody wrote": ("G6: r3/list got", 1, _in_the_note(_invent)),
    "SQL lacks an acknowledged event": ("G4", 1, _without_an_acknowledged_one),
    "a subscription is left": ("left over: subscriptions", 1, _left_subscriptions),
    "an event is written again without a look": ("G3", 5, _emit("from, count = '+', 1", "from, count = nil, 1")),
    "an event does not tell which was before it": ("G6", 11, _emit("types_of .. '@' .. before", "types_of .. '@0'")),
    "what was lost and written again is not known": (
        "G6", 44, lambda: mock.patch.object(RecentEvents, "until", return_value=frozenset()),
    ),
    "a group notes what its members have yet to handle": (
        "group: nobody was done", 1, lambda: mock.patch.object(Subscription, "delivered", Subscription.taken),
    ),
    "two members have one partition": (
        "group", 2, lambda: sabotage("claim", "if holder and holder ~= member then", "if false then"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=[pytest.mark.wide] if at % 3 else []) for at, what in enumerate(CONTROLS)]
)
def test_a_fault_is_seen(what: str) -> None:
    promise, seed, control = CONTROLS[what]
    with control():
        broken = _broken(seed)
    assert broken.startswith(promise), broken or "nothing was found"


def test_where_nothing_fails_no_two_members_have_one_event() -> None:
    calm = Plan.of(1, replace(SHAPES["events"], faults=()))
    assert not Run(calm).result().broken
    with (
        sabotage("claim", "if holder and holder ~= member then", "if false then"),
        sabotage("advance", "GET', owner) ~= member and", "GET', owner) == '' and"),
    ):
        broken = Run(calm).result().broken
    assert broken.startswith("group: "), broken
    assert " again, " in broken or " while " in broken, broken


async def test_a_listener_whose_connection_was_closed_listens_again_until_its_store_is_closed() -> None:
    errors: list[StateError] = [
        WarmUnavailable("redis://server:6379: the server closed the connection"),
        ConfigurationError("this store cannot be used: it is closed"),
    ]
    left = list(errors)

    async def sleep(_: float) -> None: ...

    def begin() -> Any:
        raise left.pop(0)

    world: Any = SimpleNamespace(sleep=sleep, note=lambda *_: None)
    process: Any = SimpleNamespace(tasks=["one"], world=world)
    listening = Listening(SimpleNamespace(world=world), [])  # type: ignore[arg-type]  # nothing else is asked of it
    await listening._stretches(Listener("r1/member", process, ("app.*",)), begin, Random(1))
    assert not left


def test_a_member_that_was_not_ready_in_time_handles_events_of_its_group_later() -> None:
    process: Any = SimpleNamespace(is_dead=False, name="r1", died=None)
    ready, late = (Listener(f"r1/{name}", process, ("app.*",), "group") for name in ("ready", "late"))
    ready.since = 0.0
    event = Event("e1", "app.a", "", 1.0, {}, "r1", 1, "1-a", 0, 0, "")
    fleet: Any = SimpleNamespace(world=None)
    listening = Listening(fleet, [])
    listening.listeners = [ready, late]
    listening.events = {event.id: event}
    assert listening._missed_by_group() == [event]
    late.got.append(Got(event, 2.0, 3.0))
    assert listening._missed_by_group() == []
