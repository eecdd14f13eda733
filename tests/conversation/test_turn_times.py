"""A turn's version says where its time went. Law: a note beside the change, which costs no round trip of its own."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from below import keys_of, redis_of, until
from clocks import moved_by_hand
from tenants import Served, opened

from distributed_state import Message, tool
from distributed_state.programs.service import Access
from distributed_state.results import TimedRun
from distributed_state.values.model import TIMES


async def test_a_newcomer_learns_from_the_version_why_the_turn_took_so_long(store: Any) -> None:
    session = store.session("s")
    await session.set("n", 1)
    turn = session.turn(request_id="r1")
    go_on = moved_by_hand(turn)

    @tool
    def search(query: str) -> str:
        """Search."""
        go_on(30)
        return query

    async with turn:
        with turn.model("gpt-5"):
            go_on(7)
        call = await turn.call(search, {"query": "hotels"})
        go_on(11)
        with turn.tool("of a framework"):
            go_on(3)
        turn.append(call.to_message())
    assert await session.version() == 2
    before, change = await session.history()
    assert before.times is None
    times = change.times
    ran = TimedRun("model", "gpt-5", 7), TimedRun("tool", "search", 30), TimedRun("tool", "of a framework", 3)
    assert (times.total, times.runs, times.more) == (51, ran, 0)
    assert times.elsewhere == pytest.approx(11, abs=0.1), "less what Redis took, which is not moved by hand"
    assert times.commit is None, "a commit cannot know how long it will take"
    assert turn.times.commit is not None
    assert turn.times.total == times.total
    # The record itself has nothing of it.
    assert await session.get_all(fresh=True) == {"n": 1}
    with redis_of(store) as client:
        assert not [name for name in client.hgetall(keys_of(store, "s").record) if name.startswith(TIMES)]


async def test_the_wait_for_others_is_told_from_the_work(opener: Any) -> None:
    store = await opener()
    session = store.session("s")
    await session.set("n", 1)
    asks = asyncio.Event()

    async def other() -> None:
        asks.set()
        async with session.turn(wait=60) as turn:
            turn["n"] = 2

    async with session.turn() as turn:
        turn["n"] = 1
        task = asyncio.create_task(other())
        with redis_of(store) as client:
            await until(lambda: client.zcard(keys_of(store, "s").wait) == 1)
        began = time.monotonic()
        await until(lambda: time.monotonic() - began > 0.05)
        waited = time.monotonic() - began
    await task
    first, second = [change.times for change in (await session.history())[1:]]
    assert second.lock > waited - 0.001 > first.lock == 0, "nobody held it"
    assert second.total >= second.lock


async def test_what_is_no_turn_and_what_changes_nothing_has_no_times(store: Any) -> None:
    session = store.session("s")
    await session.set("n", 1)
    async with session.turn() as turn:
        assert turn["n"] == 1
    assert turn.written is None
    assert turn.times.total > 0
    assert turn.times.commit is None
    ended = turn.times
    assert turn.times == ended, "it is over"
    assert [change.times for change in await session.history()] == [None]
    async with session.turn(request_id="r") as turn:
        turn["n"] = 2
    async with session.turn(request_id="r") as again:
        assert again.repeated
    assert [change.times is None for change in await session.history()] == [True, False]


async def test_a_tool_run_as_a_turn_of_its_own_has_them_too(store: Any) -> None:
    session = store.session("s")

    @tool
    def book(state: dict[str, Any]) -> str:
        """Book."""
        state["booked"] = True
        return "done"

    await session.call(book, {}, call_id="c1", turn_id="t1")
    (run,) = (await session.history())[-1].times.runs
    assert (run.kind, run.name) == ("tool", "book")


async def test_a_copy_brings_the_times_along(store: Any) -> None:
    session = store.session("s")
    async with session.turn() as turn:
        with turn.model("gpt-5"):
            turn.append(Message(role="user", content="hi"))
    (change,) = await session.history()
    lines = await store.admin.export("s")
    await store.admin.import_(lines, id="copy")
    (copied,) = await store.session("copy").history()
    assert copied.times == change.times
    assert isinstance(copied.times.runs[0], TimedRun)
    assert await store.admin.export("copy") == [line.replace('"id":"s"', '"id":"copy"') for line in lines]


async def test_the_timeline_of_a_conversation_shows_them_as_its_versions_do() -> None:
    async with opened() as store:
        served = Served(store, Access(tokens=True))
        mine = await served.token("acme:", "read")
        async with store.session("acme:c").turn() as turn:
            with turn.model("gpt-5"):
                turn["n"] = 1
        await store.session("acme:c").set("n", 2)
        plain, timed = (await served.ask("GET", "/v1/conversations/acme:c/timeline", mine)).json()["versions"]
        first = (await served.ask("GET", "/v1/conversations/acme:c/versions", mine)).json()["versions"][0]
        assert plain["times"] is None
        assert timed["times"]["runs"][0]["name"] == "gpt-5"
        assert timed["times"] == first["times"]
