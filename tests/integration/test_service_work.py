"""What the HTTP worker waits for: its servers' answers, and the work that a request left behind."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock

import pytest
from below import until

from distributed_state.errors import Unavailable, WarmUnavailable
from distributed_state.programs.service import memory
from distributed_state.programs.service.connections import Connections
from distributed_state.programs.service.limits import Limits
from distributed_state.programs.service.readiness import Probe
from distributed_state.programs.service.work import Work


async def test_a_server_is_asked_once_a_while_however_many_want_to_know() -> None:
    asked = 0

    async def ask() -> None:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0)
        if asked > 1:
            raise WarmUnavailable("away")

    probe = Probe("redis", ask, 0.2)
    assert set(await asyncio.gather(*(probe.problem() for _ in range(20)))) == {""}
    assert asked == 1
    assert await until(probe.problem) == "away"
    assert asked == 2


async def test_a_server_that_hangs_is_not_asked_again_before_it_answered() -> None:
    asked, answer = 0, asyncio.Event()

    async def ask() -> None:
        nonlocal asked
        asked += 1
        await answer.wait()

    probe = Probe("redis", ask, 0.05)
    for _ in range(3):
        assert await probe.problem() == "no answer within 0.05 s"
        await asyncio.sleep(0.06)
    assert asked == 1
    answer.set()

    async def well() -> bool:
        return await probe.problem() == ""

    await until(well)
    await probe.close()


async def test_work_is_answered_in_time_and_tidied_up_behind() -> None:
    work, tidied = Work(), asyncio.Event()

    async def slow() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)
            tidied.set()
            raise WarmUnavailable("nobody hears this any more")

    with pytest.raises(Unavailable, match=r"abandoned after 0\.01 s"):
        await work.within(0.01, slow())
    assert (len(work), tidied.is_set()) == (0, False)
    await work.finish(1)
    assert tidied.is_set()


async def test_work_is_finished_or_given_up_at_the_end() -> None:
    work, gate = Work(), asyncio.Event()

    async def until_open() -> int:
        await gate.wait()
        return 7

    running = asyncio.create_task(work.within(60, until_open()))
    await until(lambda: len(work))
    asyncio.get_running_loop().call_later(0.02, gate.set)
    await work.finish(5)
    assert await running == 7
    gate.clear()
    running = asyncio.create_task(work.within(60, until_open()))
    await until(lambda: len(work))
    await work.finish(0.01)
    with pytest.raises(Unavailable):
        await running


@pytest.mark.parametrize("many", [10, 1000])
async def test_the_memory_of_a_crowd_of_connections_is_given_back_once(
    many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []
    monkeypatch.setattr(memory, "trim", lambda: given.append(1))
    connections = Connections(Limits(head=0.02))
    watching = asyncio.create_task(connections.watch())
    for each in [Mock(address="10.1.2.3") for _ in range(many)]:
        connections.enter(each)
        connections.leave(each)
    await asyncio.sleep(0.05)
    watching.cancel()
    assert len(given) == (many == 1000)


def test_giving_memory_back_is_no_error_wherever_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    memory.trim()
    monkeypatch.setattr(memory.ctypes, "CDLL", Mock(side_effect=OSError))
    memory.trim()
    memory.give_back()
