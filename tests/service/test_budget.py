"""The bytes that a worker holds for its clients: who waits for them, who gets them first, and that none is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.exceptions import HTTPException

from distributed_state.programs.service import limits as budgets
from distributed_state.programs.service.limits import Budget, Growing, Sizes, Taken

pytestmark = pytest.mark.unit

MOST = 4_000_000
A, B = "prefix a:", "prefix b:"


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def full(budget: Budget, party: str = A) -> list[Taken]:
    """As much as one party gets."""
    found: list[Taken] = []
    while True:
        asking = asyncio.create_task(budget.take(party, 400_000))
        await settled()
        if not asking.done():
            asking.cancel()
            await settled()
            return found
        found.append(asking.result())


async def test_a_request_waits_until_others_give_back_what_they_took() -> None:
    budget = Budget(MOST)
    taken = await full(budget)
    asking = asyncio.create_task(budget.take(A, 400_000))
    await settled()
    assert not asking.done()
    assert budget.waiting == 1
    taken[0].give_back()
    await settled()
    assert asking.done()
    taken[0].give_back()
    assert budget.held == len(taken) * 400_000, "given back once, however often that is said"


async def test_a_request_that_waits_in_vain_is_told_when_to_come_back() -> None:
    budget = Budget(MOST, wait=0.01)
    await full(budget)
    before = budget.held
    with pytest.raises(HTTPException) as refused:
        await budget.take(A, 400_000)
    assert (refused.value.status_code, refused.value.headers) == (503, {"Retry-After": "1"})
    assert (budget.held, budget.waiting) == (before, 0)


async def test_one_party_leaves_room_for_others_and_for_bodies() -> None:
    budget = Budget(MOST)
    assert len(await full(budget)) * 400_000 <= MOST * 3 // 4 * 2 // 3
    async with asyncio.timeout(1):
        await budget.take(B, 400_000)
    await full(budget, B)
    await full(budget, "prefix c:")
    assert budget.held <= MOST * 3 // 4
    assert budget.arrive(MOST // 4)
    assert not budget.arrive(1_000_000)


async def test_a_small_request_does_not_wait() -> None:
    budget = Budget(MOST)
    await full(budget)
    async with asyncio.timeout(1):
        await budget.take(A, 10_000)


async def test_a_request_larger_than_the_budget_goes_alone() -> None:
    budget = Budget(MOST)
    async with asyncio.timeout(1):
        alone = await budget.take(A, 2 * MOST)
    asking = asyncio.create_task(budget.take(B, 400_000))
    await settled()
    assert not asking.done()
    alone.give_back()
    await asking


async def test_a_large_request_is_not_overtaken_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "_OVERTAKEN", 0.05)
    monkeypatch.setattr(budgets, "_PRESSING", 0.01)
    budget = Budget(MOST, wait=60)
    over = False

    async def ask_again_and_again(party: str) -> None:
        while not over:
            taken = await budget.take(party, 900_000)
            await settled()
            taken.give_back()

    others = [asyncio.create_task(ask_again_and_again(f"prefix {each}:")) for each in range(6)]
    await settled()
    async with asyncio.timeout(10):
        (await budget.take(B, MOST)).give_back()
    over = True
    await asyncio.gather(*others)
    assert budget.held == 0


async def test_a_request_of_unknown_size_that_waits_for_a_server_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "_LOADING", 0.01)
    budget, sizes = Budget(MOST), Sizes(500_000)
    waiting = [await sizes.take(budget, A, ("a", str(each)), 7, 1) for each in range(3)]
    async with asyncio.timeout(5):
        while budget.held > 3 * 7:
            await asyncio.sleep(0)
    waiting[0].become(600_000)
    assert budget.held == 600_014
    sizes.note(("a", "0"), 600_000)
    assert (await sizes.take(budget, B, ("a", "0"), 0, 2)).size == 1_200_000


async def test_answers_that_turn_out_large_wait_for_each_other_and_hold_nothing_meanwhile() -> None:
    budget = Budget(MOST)
    taken = [await budget.take(A, 300_000) for _ in range(4)]
    growing = [Growing(budget, each, 7, 3, MOST) for each in taken]
    assert [each.take(200_000) for each in growing] == [False, False, False, True]
    assert budget.held == taken[3].size == MOST // 2, "one that is large may become as large as an answer may be"
    waiting = [asyncio.create_task(each.wait(200_000)) for each in growing[:3]]
    await settled()
    assert not any(each.done() for each in waiting)
    taken[3].give_back()
    for number in range(3):
        await asyncio.wait_for(waiting[number], 5)
        taken[number].give_back()
    assert budget.held == 0
    small = await budget.take(A, 100)
    assert Growing(budget, small, 7, 3, MOST).take(1_000)
    assert budget.held == 3_007
    small.give_back()
    assert budget.held == 0


async def test_what_turns_out_larger_than_half_of_the_budget_waits_once() -> None:
    """With what it has read by then it would wait for others that do the same, and all of them would hold it."""
    budget = Budget(MOST)
    first, second = await budget.take(A, 300_000), await budget.take(B, 300_000)
    growing, another = Growing(budget, first, 7, 3, MOST), Growing(budget, second, 7, 3, MOST)
    assert growing.take(200_000)
    assert not another.take(200_000)
    asking = asyncio.create_task(another.wait(200_000))
    await settled()
    assert growing.take(MOST)
    assert budget.held == first.size == 3 * MOST + 7, "it is counted, however large"
    assert not asking.done()
    first.give_back()
    await asyncio.wait_for(asking, 5)
    second.give_back()
    assert budget.held == 0


async def test_a_slow_reader_makes_room_for_others_of_its_party(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "_PRESSING", 0.01)
    budget = Budget(MOST)
    other = await budget.take(B, 400_000)
    taken = await full(budget)
    disconnected = []

    def reader(each: Taken) -> Callable[[float], bool]:
        def disconnect(_: float) -> bool:
            disconnected.append(each)
            each.give_back()
            return True

        return disconnect

    for each in (other, *taken):
        each.reader = reader(each)
    async with asyncio.timeout(5):
        await budget.take(A, 400_000)
    assert disconnected == [taken[0]], "the oldest of its own, and no more than it takes"


async def _crowd(sizes: list[tuple[int, int, int]]) -> None:
    budget = Budget(MOST, wait=60)
    most = 0

    async def ask(party: int, size: int, ends: int) -> None:
        nonlocal most
        taken = await budget.take(f"prefix {party}:", size)
        try:
            most = max(most, budget.held)
            await asyncio.sleep(0)
            if ends == 1:
                raise ValueError
            taken.become(size // 2)
            await asyncio.sleep(0)
        finally:
            taken.give_back()

    asking = [asyncio.create_task(ask(*each)) for each in sizes]
    await asyncio.sleep(0)
    for task, (_, _, ends) in zip(asking, sizes, strict=True):
        if ends == 2:
            task.cancel()
            await asyncio.sleep(0)
    found = await asyncio.wait_for(asyncio.gather(*asking, return_exceptions=True), 30)
    for one, (_, _, ends) in zip(found, sizes, strict=True):
        assert (
            one is None
            or (isinstance(one, ValueError) and ends == 1)
            or (isinstance(one, asyncio.CancelledError) and ends == 2)
        )
    assert (budget.held, budget.waiting, budget.taken) == (0, 0, 0)
    small = sum(size for _, size, _ in sizes if size <= 16 * 1024)
    alone = max([size for _, size, _ in sizes], default=0)
    assert most <= max(MOST * 3 // 4, alone) + small


ASKING = st.tuples(st.integers(0, 3), st.sampled_from([100, 20_000, 900_000, 2_500_000, 9_000_000]), st.integers(0, 2))


@settings(max_examples=60, deadline=None)
@given(st.lists(ASKING, max_size=30))
def test_whoever_asks_leaves_fails_or_is_cancelled_all_go_on_and_nothing_is_left(
    sizes: list[tuple[int, int, int]],
) -> None:
    asyncio.run(_crowd(sizes))


def test_a_stream_buffers_little_where_all_buffer_much() -> None:
    budget = Budget(1_000_000)
    streams = [budget.stream() for _ in range(4)]
    streams[0].count(200_000)
    assert not streams[0].full
    streams[1].count(60_000)
    assert all(each.full for each in streams)
    streams[0].give_back()
    streams[0].count(5)
    assert (streams[0].size, budget.buffered) == (0, 60_000)
    assert not streams[1].full
