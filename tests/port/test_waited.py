"""What one call has waited in vain: one account, whoever waits, and time that Redis answers in gives it back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import pytest

from distributed_state.port import waited
from distributed_state.port.waited import Waited, bounded, one_call

pytestmark = pytest.mark.unit


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(waited, "time", clock)
    return clock


def test_what_was_waited_for_counts_once(clock: Clock) -> None:
    """Side by side, or by one who waits for another who waits."""
    account = Waited()
    assert account.seconds(clock.now) == 0
    clock.now = 103
    account.add(101)
    account.add(101)
    account.add(100)
    assert account.seconds(clock.now) == 2
    clock.now = 104
    account.add(101)
    assert account.seconds(clock.now) == 3


def test_time_in_which_redis_answers_gives_it_back(clock: Clock) -> None:
    account = Waited()
    clock.now = 103
    account.add(100)
    assert [account.seconds(at) for at in (103, 104, 106, 200)] == [3, 2, 0, 0]
    clock.now = 105
    account.add(104)
    assert account.seconds(clock.now) == 3


async def test_a_call_within_a_call_is_part_of_it() -> None:
    class Asked:
        def __init__(self) -> None:
            self.accounts: list[Any] = []

        async def outer(self) -> None:
            self.accounts.append(waited.present())
            await self.inner()
            await asyncio.create_task(self.inner())

        async def inner(self) -> None:
            self.accounts.append(waited.present())

        async def read(self) -> None:
            self.accounts.append(waited.present())

        async def _own(self) -> None:
            self.accounts.append(waited.present())

    asked = bounded("read")(Asked)()
    await asked.outer()
    first, second, third = asked.accounts
    assert first is second is third is not None
    assert waited.present() is None
    await asked.outer()
    assert asked.accounts[3] is not first, "each call has one of its own"
    await asked.read()
    await asked._own()
    assert asked.accounts[6:] == [None, None]


async def test_what_outlives_a_call_is_no_part_of_it() -> None:
    ended = asyncio.Event()

    async def later() -> Waited | None:
        await ended.wait()
        return waited.present()

    @one_call
    async def begin() -> asyncio.Task[Waited | None]:
        assert waited.present() is not None
        return asyncio.create_task(later())

    task = await begin()
    ended.set()
    assert await task is None


class Scarce:
    """Room that is there once it was waited for."""

    def __init__(self, waits: Callable[[], None]) -> None:
        self._waits = waits
        self._room = False

    def take(self, size: int) -> bool:
        return self._room or size < 10

    async def wait(self, size: int) -> None:
        self._waits()
        self._room = True


async def test_what_is_read_without_room_is_let_go_while_it_is_waited_for_and_read_again() -> None:
    class Large:
        pass

    held: WeakSet[Large] = WeakSet()
    counts: list[int] = []

    async def read() -> Large:
        found = Large()
        held.add(found)
        waited.room(5)
        counts.append(len(held))
        await asyncio.sleep(0)
        waited.room(50)
        return found

    with waited.making_room(Scarce(lambda: counts.append(-len(held)))):
        found = await waited.with_room(read)
        waited.room(50)  # not of an answer that could be read again
    assert counts == [1, 0, 1]
    assert [*held] == [found]
    assert await waited.with_room(read) is not found, "without a limit all is read at once"
