"""Messages that are taken back or replaced. Law: what goes is what was seen, and no earlier version shows less."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import redis
from below import evict, keys_of, own_server, redis_of, said, tiers
from counting import round_trips
from reaping import quiet
from sync_api import Blocking

from distributed_state import Conflict, Encryption, InvalidValue, KeyRing, Message, TooLarge
from distributed_state.conversation import replacing
from distributed_state.formats import estimate, to_openai
from distributed_state.values import message_ranges

CALL = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Oslo"}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": {"degrees": 7, "wind": None}}


async def shown(session: Any, **options: Any) -> list[str]:
    return [message.content for message in await session.messages(**options)]


async def test_the_last_message_is_taken_back(store: Any) -> None:
    session = store.session("s")
    await session.append(said(0), said(1), said(2))
    assert (await session.pop_message()).content == "2"
    await session.append(said(3))
    assert await shown(session) == await shown(session, fresh=True) == ["0", "1", "3"]
    assert [each.number for each in await session.messages()] == [0, 1, 3], "no number is used again"
    assert [(await session.pop_message()).number for _ in range(3)] == [3, 1, 0]
    version = await session.version()
    assert await session.pop_message() is None
    assert await session.version() == version, "nothing to take back is no change"
    assert await store.session("never written").pop_message() is None
    assert not await store.session("never written").exists()


async def test_what_was_taken_back_is_still_in_the_versions_before(store: Any) -> None:
    session = store.session("s")
    version = await session.append(said(0), said(1))
    await session.pop_message()
    await session.replace_messages([said(2)], after=0)
    await session.fork("f")
    fork = store.session("f")
    assert [each.content for each in (await session.at(version=version)).messages] == ["0", "1"]
    assert await shown(fork) == ["0", "2"]
    assert (await fork.pop_message()).content == "2"
    assert (await fork.pop_message()).content == "0", "also what it shows of another one"
    await session.rollback(version=version)
    assert await shown(session) == ["0", "1"]


async def test_messages_are_taken_back_at_so_many_places_at_most(store: Any, monkeypatch: Any) -> None:
    """Each change of what is shown writes all of its runs, and each pop in the middle makes one more."""
    monkeypatch.setattr(message_ranges, "MOST", 3)
    session = store.session("s")
    for n in range(3):
        await session.append(said(n), said(9))
        await session.pop_message()
    version = await session.append(said(3), said(4))
    many = r"4 runs, more than 3; replace_messages\(\)"
    with pytest.raises(TooLarge, match=many):
        await session.pop_message()
    with pytest.raises(TooLarge, match=many):
        await session.replace_messages([said(5)], after=6)
    with pytest.raises(TooLarge, match=many):
        await session.fork("f")
    assert (await shown(session), await session.version()) == (["0", "1", "2", "3", "4"], version)
    assert await shown(store.session("f")) == []
    await session.replace_messages([said(2)], after=2)  # fewer than there are
    with pytest.raises(TooLarge):
        await session.rollback(version=version)
    await session.replace_messages(await session.messages())
    assert (await session.pop_message()).content == "2"
    await session.fork("f")
    assert await shown(session) == await shown(store.session("f")) == ["0", "1"]


async def test_messages_are_replaced_behind_one_of_them_or_all(store: Any) -> None:
    session = store.session("s")
    await session.append(*map(said, range(5)))
    await session.replace_messages([said(7), said(8)], after=2)
    assert await shown(session) == await shown(session, fresh=True) == ["0", "1", "2", "7", "8"]
    await session.replace_messages([], after=2)
    assert await shown(session) == ["0", "1", "2"]
    await session.replace_messages([said(9)])
    assert await shown(session) == await shown(session, fresh=True) == ["9"]
    await session.replace_messages([])
    version = await session.version()
    assert await session.replace_messages([]) == version
    assert await shown(session, fresh=True) == []


async def test_archived_messages_are_taken_back_as_others(store: Any) -> None:
    session = store.session("s")
    await session.append(*map(said, range(30)))
    await evict(store, "s")
    assert (await session.pop_message()).content == "29"
    await evict(store, "s")
    await session.replace_messages([said(31)], after=3)
    await evict(store, "s")
    assert await shown(session) == ["0", "1", "2", "3", "31"]


@pytest.mark.replicas
async def test_who_saw_an_older_conversation_is_refused(opener: Any) -> None:
    store = await opener()
    other = await opener()
    session = store.session("s")
    await session.append(said(0), said(1))
    seen = await session.messages()
    await other.session("s").append(said(2))
    with pytest.raises(Conflict, match="last message is not 1"):
        await session.replace_messages([said(3)], expect_last=seen[-1].number)
    assert await shown(session, fresh=True) == ["0", "1", "2"]
    await other.session("s").pop_message()
    with pytest.raises(Conflict, match="shows no message 2"):
        await session.replace_messages([said(3)], after=2)
    with pytest.raises(InvalidValue, match="after"):
        await session.replace_messages([], after=-1)
    with pytest.raises(InvalidValue, match="message"):
        await session.replace_messages([said(4), {"content": "typed wrongly"}])
    assert await shown(session, fresh=True) == ["0", "1"]


async def race(stores: list[Any]) -> tuple[list[str], list[str]]:
    """Each pops ten and appends ten of its own, all at once; what was popped, and what is left."""

    async def worker(number: int, store: Any) -> list[str]:
        session = store.session("s")
        popped = []
        for turn in range(10):
            message = await session.pop_message()
            popped += [] if message is None else [message.content]
            await session.append(said(100 * (number + 1) + turn))
        return popped

    await stores[0].session("s").append(*map(said, range(5)))
    found = await asyncio.gather(*(worker(number, store) for number, store in enumerate(stores)))
    left = await shown(stores[0].session("s"), fresh=True)
    return [each for one in found for each in one], left


EVERY = sorted(map(str, [*range(5), *(100 * (worker + 1) + turn for worker in range(3) for turn in range(10))]))


@pytest.mark.replicas
@pytest.mark.only(api="asyncio")
async def test_workers_that_pop_at_once_get_each_message_once(opener: Any) -> None:
    popped, left = await race([await opener(conflict_retries=1000) for _ in range(3)])
    assert sorted([*popped, *left]) == EVERY
    assert len(popped) >= 27, "a message was there almost every time"


@pytest.mark.replicas
@pytest.mark.only(api="asyncio")
async def test_without_its_guard_some_would_go_twice(opener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replacing, "_SHOWN", ())
    popped, left = await race([await opener() for _ in range(3)])
    assert sorted([*popped, *left]) != EVERY


async def test_a_summary_of_what_was_replaced_is_told_no_more(store: Any) -> None:
    session = store.session("s")
    await session.append(*({"role": "user", "content": f"{number} " + "word " * 50} for number in range(12)))

    def summarize(messages: Any, before: str | None) -> str:
        return "all sorts"

    options = {"max_tokens": 300, "keep_last": 1, "strategy": "summarize", "summarizer": summarize}
    window = await session.window(**options)
    stop = window.summary.stop
    await session.replace_messages([said(1)], after=stop)
    assert (await session.window(**options)).summary == window.summary, "all that it was made from is there"
    await session.replace_messages([said(1)], after=stop - 2)
    assert (await session.window(max_tokens=10_000)).summary is None
    shows = [each.content for each in (await session.window(max_tokens=10_000)).messages]
    assert len(shows) == stop
    assert "all sorts" not in str(shows)


async def test_what_is_no_message_of_a_chat_is_kept_as_it_was_given(opener: Any) -> None:
    ring = KeyRing({"k1": b"k" * 32}, current="k1")
    store = await opener(encryption=Encryption(ring, messages=True))
    session = store.session("s")
    given = [said(0), CALL, RESULT]
    await session.append(*given)
    assert [each.to_dict() for each in await session.messages(fresh=True)] == given
    await evict(store, "s")
    found = await session.messages()
    assert [each.to_dict() for each in found] == given
    assert [each.role for each in found] == ["user", None, None]
    assert found[1] == Message(**CALL)
    assert estimate(found[2]) > estimate(Message(role="user", content=""))
    with pytest.raises(InvalidValue, match=r"messages\[1\]: has no role"):
        to_openai(found)
    assert to_openai(found[:1]) == [said(0)]
    window = await session.window(max_tokens=1000)
    assert len(window.messages) == 3


@pytest.mark.only(api="blocking")
async def test_a_message_that_cannot_be_read_stays(store: Any) -> None:
    session = store.session("s")
    await session.append(said(0), said(1))
    with redis_of(store) as client:
        client.hset(keys_of(store, "s").record, "#m1", "broken")
    tiers(store).hot.forget("session:s")
    with pytest.raises(Exception, match="stored bytes are not"):
        await session.pop_message()
    assert isinstance(session, Blocking)
    assert (await session.messages(fresh=True))[0].content == "0"
    assert await session.version() == 1


@pytest.mark.only(warm="single")
async def test_taking_back_is_one_round_trip_where_the_conversation_is_hot(opener: Any) -> None:
    with own_server(opener) as server:
        store = await quiet(opener, url=server.url)
        session = store.session("s")
        # More than once: while the link of a young store takes up its place, what was hot is read again.
        for _ in range(5):
            await session.append(*map(said, range(5)))
            await session.messages()
            await session.pop_message()
            with round_trips(store) as counted:
                await session.pop_message()
                await session.replace_messages([said(9)], after=1)
            if counted == [2]:
                break
        assert counted == [2]
        assert await shown(session, fresh=True) == ["0", "1", "9"]
        await opener.close()


@pytest.mark.only(warm="single")
async def test_what_others_ask_meanwhile_is_no_round_trip_of_a_caller(opener: Any) -> None:
    """The counter of these tests: each write is one, whatever comes beside it."""
    with own_server(opener) as server:
        store = await quiet(opener, url=server.url)
        session = store.session("s")
        await session.set("n", 0)
        over = threading.Event()

        def beat() -> None:
            with redis.Redis.from_url(server.url) as other:
                while not over.wait(0.0001):
                    other.get("anything")

        others = threading.Thread(target=beat)
        others.start()
        try:
            for _ in range(5):  # as above
                with round_trips(store) as counted:
                    for number in range(10):
                        await session.set("n", number)
                if counted == [10]:
                    break
        finally:
            over.set()
            others.join()
        assert counted == [10]
        await opener.close()
