"""Streamed output and stops of turns. Law: a follower is shown a prefix of the chunks, in order and once."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest
from below import keys_of, own_server, redis_of, tiers, until
from following import plain, shown, streamed

from distributed_state import Fenced, InvalidValue, Stopped, TooLarge
from distributed_state.results import Chunk, Truncated


async def test_a_follower_is_shown_the_chunks_as_they_were_and_the_end_with_the_outcome(store: Any) -> None:
    session = store.session("s")
    following = asyncio.create_task(shown(session, "r"))
    chunks = ["Os", "lo\ud800", b"\x00\xff", {"tool": [1, None]}, 7, None, ""]
    await streamed(session, "r", *chunks, outcome={"answer": "Oslo"})
    assert plain(await following) == [*chunks[:-1], ("Ended", 1, {"answer": "Oslo"})]


async def test_one_who_comes_later_is_shown_the_same(store: Any) -> None:
    session = store.session("s")
    await streamed(session, "r", "a", "b", outcome=1)
    assert plain(await shown(session, "r")) == ["a", "b", ("Ended", 1, 1)]


async def test_following_goes_on_after_any_position(store: Any) -> None:
    session = store.session("s")
    await streamed(session, "r", *"abc", outcome=1)
    parts = await shown(session, "r")
    for at, part in enumerate(parts[:-1]):
        assert await shown(session, "r", after=part.position) == parts[at + 1 :]
    again = await shown(session, "r", after=parts[-1].position)
    assert plain(again) == [("Ended", 1, 1)], "who asks again after the end is told of it"


async def test_a_request_that_streamed_nothing_ends_with_its_outcome(store: Any) -> None:
    session = store.session("s")
    following = asyncio.create_task(shown(session, "r"))
    await streamed(session, "r", outcome="silent")
    assert plain(await following) == [("Ended", 1, "silent")]


async def test_a_turn_that_changed_nothing_or_raised_ends_too(store: Any) -> None:
    session = store.session("s")
    async with session.turn() as turn:
        await turn.stream("x")
    with pytest.raises(ZeroDivisionError):
        async with session.turn(request_id="r") as turn:
            await turn.stream("y")
            raise ZeroDivisionError
    assert plain(await shown(session, "r")) == ["y", "Failed"]
    assert await session.version() == 0


async def test_without_a_request_the_running_turn_and_then_the_next_ones_are_shown(store: Any) -> None:
    session = store.session("s")
    await streamed(session, "earlier", "old")
    async with session.output(wait=5) as output:
        async with session.turn(request_id="r") as turn:
            await turn.stream("a")
            await turn.flush()
            first = await output.next(5)
            turn["n"] = 1
        rest = [await output.next(5)]
        await streamed(session, None, "b")
        rest += [await output.next(5), await output.next(5)]
    assert plain([first, *rest]) == ["a", ("Ended", 2, None), "b", ("Ended", 3, None)]


async def test_another_request_is_not_shown(store: Any) -> None:
    session = store.session("s")
    following = asyncio.create_task(shown(session, "mine"))
    await streamed(session, "other", "secret", outcome=0)
    await streamed(session, "mine", "a", outcome=1)
    assert plain(await following) == ["a", ("Ended", 2, 1)]


async def test_a_failed_request_that_is_served_again_restarts_for_one_who_goes_on(store: Any) -> None:
    session = store.session("s")
    with pytest.raises(ZeroDivisionError):
        async with session.turn(request_id="r") as turn:
            await turn.stream("half")
            raise ZeroDivisionError
    failed = await shown(session, "r")
    await streamed(session, "r", "whole", outcome=1)
    assert plain(await shown(session, "r", after=failed[-1].position)) == ["Restarted", "whole", ("Ended", 1, 1)]
    assert plain(failed) == ["half", "Failed"]


async def failed(session: Any, request: str, *chunks: Any) -> None:
    with suppress(ZeroDivisionError):
        async with session.turn(request_id=request) as turn:
            for chunk in chunks:
                await turn.stream(chunk)
            raise ZeroDivisionError


async def test_one_who_comes_after_a_failed_attempt_is_shown_the_answer_of_the_next(store: Any) -> None:
    session = store.session("s")
    await failed(session, "r", "half")
    await streamed(session, "r", "whole", outcome=1)
    assert plain(await shown(session, "r")) == ["half", "Failed", "Restarted", "whole", ("Ended", 1, 1)]


async def test_what_a_failed_attempt_streamed_is_not_shown_as_the_answer_of_a_silent_one(store: Any) -> None:
    session = store.session("s")
    await failed(session, "r", "half")
    [half, _] = await shown(session, "r")
    await streamed(session, "r", outcome=1)
    assert plain(await shown(session, "r")) == ["half", "Failed", "Truncated", ("Ended", 1, 1)]
    assert plain(await shown(session, "r", after=half.position)) == ["Failed", "Truncated", ("Ended", 1, 1)]


async def test_a_turn_inside_a_lock_has_an_end_of_its_own(store: Any) -> None:
    session = store.session("s")
    async with session.lock():
        await streamed(session, "a", "1", "2")
        with suppress(ZeroDivisionError):
            async with session.turn(request_id="b") as turn:
                await turn.stream("3")
                raise ZeroDivisionError
        await streamed(session, "c", "4")
        assert plain(await shown(session, "a")) == ["1", "2", ("Ended", 1, None)]
        assert plain(await shown(session, "b")) == ["3", "Failed"]
        assert plain(await shown(session, "c")) == ["4", ("Ended", 2, None)]


async def test_the_oldest_chunks_go_first_and_that_is_shown(opener: Any) -> None:
    store = await opener(output_bytes=65_536)
    session = store.session("s")
    async with session.turn(request_id="r") as turn:
        for number in range(40):
            await turn.stream(f"{number:08}" * 1000)
            await turn.flush()
    parts = await shown(session, "r")
    kept = [part.data[:8] for part in parts if isinstance(part, Chunk)]
    assert isinstance(parts[0], Truncated)
    assert len(kept) in (5, 6)
    assert kept == [f"{number:08}" for number in range(40 - len(kept), 40)]


@pytest.mark.replicas
@pytest.mark.parametrize("size", [200, 4200, 16_000])
async def test_redis_keeps_no_more_of_a_turn_than_output_bytes(opener: Any, size: int) -> None:
    with own_server(opener) as server:
        opener.url = server.url
        store = await opener(output_bytes=65_536)
        async with store.session("s").turn() as turn:
            for _ in range(100_000 // size + 10):
                await turn.stream("x" * size)
                await turn.flush()
            with redis_of(store) as client:
                assert client.memory_usage(keys_of(store, "s").output, samples=0) < 65_536 * 1.1


async def test_bad_chunks_and_positions_are_refused(store: Any) -> None:
    session = store.session("s")
    async with session.turn() as turn:
        for chunk in (object(), float("nan"), {"a": b"x"}):
            with pytest.raises(InvalidValue):
                await turn.stream(chunk)
        with pytest.raises(TooLarge):
            await turn.stream("x" * (2**18 + 1))
    for after in ("", "1", "1-", "-1-2", "a-b", 7, "1-1\n"):
        with pytest.raises(InvalidValue, match="position"):
            session.output("r", after=after)
    for wait in (-1, "x", float("nan")):
        with pytest.raises(InvalidValue):
            session.output("r", wait=wait)


async def test_waiting_ends_after_that_long_without_a_part(store: Any) -> None:
    assert await shown(store.session("s"), "never", wait=0.1) == []
    assert await shown(store.session("s"), wait=0.1) == []


async def test_a_turn_that_streams_nothing_leaves_no_output(store: Any) -> None:
    session = store.session("s")
    async with session.turn(request_id="r") as turn:
        await turn.flush()
        turn["n"] = 1
    with redis_of(store) as client:
        assert not client.exists(keys_of(store, "s").output)


async def test_a_turn_that_lost_its_lease_can_be_read_but_streams_nothing_more(store: Any) -> None:
    session = store.session("s")
    await session.append({"role": "user", "content": "hi"})
    with pytest.raises(Fenced):
        async with session.turn() as turn:
            await store.admin.end_lease("s", turn.token)
            await until(lambda: turn.lost)
            assert [message.content for message in await turn.messages()] == ["hi"]
            with pytest.raises(Fenced):
                await turn.stream("late")
            turn["n"] = 1
    with redis_of(store) as client:
        assert not client.exists(keys_of(store, "s").output)


async def test_erasing_takes_the_output_with_it(store: Any) -> None:
    session = store.session("s")
    await streamed(session, "r", "private")
    with redis_of(store) as client:
        assert client.exists(keys_of(store, "s").output)
        await store.erase("s")
        assert not client.exists(keys_of(store, "s").output)


# Stops


async def running(session: Any, request: str | None, began: asyncio.Event, *, keep: bool = False) -> str:
    """A turn that waits for a model until it is stopped; what it raised, or 'kept'."""
    try:
        async with session.turn(request_id=request) as turn:
            await turn.stream("half")
            await turn.flush()
            began.set()
            try:
                async with turn.stoppable():
                    while True:
                        await asyncio.sleep(0.01)
                        await turn.stream(".")
                        await turn.messages(last=1)
            except Stopped as stopped:
                if not keep:
                    raise
                turn.append({"role": "assistant", "content": f"half ({stopped.reason})"})
                turn.outcome = "half"
    except Stopped as stopped:
        return f"stopped: {stopped.reason}"
    return "kept"


async def test_a_stopped_turn_writes_nothing_unless_it_keeps_what_it_has(store: Any) -> None:
    session = store.session("s")
    for keep, state in ((False, "stopped: enough"), (True, "kept")):
        began = asyncio.Event()
        turn = asyncio.create_task(running(session, f"r{keep}", began, keep=keep))
        await began.wait()
        following = asyncio.create_task(shown(store.session("s"), f"r{keep}"))
        result = await store.session("s").stop(f"r{keep}", reason="enough")
        assert (result.state, result.version) == ("stopped", 1 if keep else None)
        assert await turn == state
        parts = plain(await following)
        assert parts[0] == "half"
        assert ("StopRequested", "enough") in parts
        assert parts[-1] == ("Ended", 1, "half") if keep else ("Ended", None, None)
    assert [message.content for message in await session.messages(fresh=True)] == ["half (enough)"]


async def test_a_stop_without_a_stoppable_part_ends_the_whole_turn(store: Any) -> None:
    session = store.session("s")
    began = asyncio.Event()

    async def turn() -> None:
        async with session.turn() as turn:
            turn["n"] = 1
            began.set()
            while True:
                await asyncio.sleep(0.01)
                await turn.messages()
                await session.get("n", fresh=True)

    served = asyncio.create_task(turn())
    await began.wait()
    assert (await session.stop()).state == "stopped"
    with pytest.raises(Stopped):
        await served
    assert await session.version() == 0


async def test_a_stop_of_nothing_says_so_and_reaches_no_later_turn(store: Any) -> None:
    session = store.session("s")
    assert (await session.stop()).state == "nothing ran"
    assert (await session.stop("r")).state == "nothing ran"
    await streamed(session, "r", "a")
    assert await session.stop("r") == await session.stop("r", wait=0)
    assert (await session.stop("r")).state == "finished"
    async with session.turn() as turn:
        assert (await session.stop("r")).state == "finished", "another request's turn is left alone"
        assert not turn.stopping
        turn["n"] = 1


async def test_a_request_that_waits_for_its_turn_is_stopped_where_it_waits(store: Any) -> None:
    session = store.session("s")
    async with session.turn():
        waiting = asyncio.create_task(streamed(session, "waits", "never"))
        await until(lambda: len(tiers(store).leases.waiters))
        async with asyncio.timeout(5):
            while (result := await store.session("s").stop("waits", reason="no")).state == "nothing ran":
                await asyncio.sleep(0.01)
        assert result.state == "stopped"
        with pytest.raises(Stopped) as caught:
            await waiting
        assert caught.value.reason == "no"


async def test_a_waiting_request_is_stopped_though_the_answer_that_says_so_is_lost(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The repetition has to be refused, too: `stop` has already answered that the turn does not run."""
    session, warm, lost = store.session("s"), tiers(store).warm, []
    send = warm.ask

    async def ask(call: Any, trailing: Any) -> Any:
        answers = await send(call, trailing)
        if answers[0][0] == b"stopped" and not lost:
            lost.append(answers)
            answers = await send(call, trailing)
        return answers

    monkeypatch.setattr(warm, "ask", ask)
    async with session.turn():
        waiting = asyncio.create_task(streamed(session, "waits", "never"))
        async with asyncio.timeout(5):
            while (await session.stop("waits")).state == "nothing ran":
                await asyncio.sleep(0.01)
        with pytest.raises(Stopped):
            await waiting
    assert lost
    await streamed(session, "waits", outcome="now")
    assert plain(await shown(session, "waits"))[-1] == ("Ended", 1, "now"), "a later attempt is not stopped"


async def test_bad_reasons_are_refused(store: Any) -> None:
    session = store.session("s")
    for reason in (7, b"x", "x" * 1025):
        with pytest.raises(InvalidValue, match="reason"):
            await session.stop(reason=reason)
    with pytest.raises(InvalidValue):
        await session.stop(wait=-1)


@pytest.mark.replicas
async def test_items_are_written_by_a_turn_that_streams_after_one_without_items(opener: Any) -> None:
    """Both commits have the same number of keys, and not the same keys."""
    store, other = await opener(), await opener()
    session = store.session("s")
    for number in range(3):
        async with session.turn(request_id=f"r{number}") as turn:
            await turn.stream("x")
            turn["n"] = number
            if number % 2:
                turn.put_item("seats", "1", number)
    assert await other.session("s").items("seats").get("1") == 1
    await store.admin.archive()
    assert [change.version for change in await session.history()] == [1, 2, 3]
    assert await other.session("s").get("n", fresh=True) == 2
