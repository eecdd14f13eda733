"""Bounded context on real stores: what is kept, what is read, and summaries made once."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
from below import held_in_redis, keys_of, redis_of, tiers, until

from distributed_state import (
    AccessDenied,
    CorruptState,
    Encryption,
    InvalidValue,
    KeyRing,
    LockTimeout,
    Message,
    TooLarge,
)
from distributed_state.conversation import window as making
from distributed_state.conversation import window as module
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.values.model import SUMMARY


def count(message: Message) -> int:
    """One token a letter, so that tests can be read."""
    return len(message.content or "")


def turn(number: int, size: int = 10) -> list[dict[str, str]]:
    """A question and its answer, of so many letters each."""
    return [
        {"role": role, "content": f"{letter}{number}".ljust(size, ".")}
        for role, letter in (("user", "q"), ("assistant", "a"))
    ]


async def fill(session: Any, turns: int, *, first: int = 0, size: int = 10) -> None:
    for number in range(first, first + turns):
        await session.append(*turn(number, size))


def shown(window: Any) -> list[str]:
    return [str(message.content).rstrip(".") for message in window.messages]


class Summaries:
    """A summarizer that notes what it was given. Its text is the first and last message it covers."""

    def __init__(self) -> None:
        self.given: list[list[str]] = []
        self.previous: list[str | None] = []

    def __call__(self, messages: list[Message], previous: str | None) -> str:
        self.given.append([str(message.content).rstrip(".") for message in messages])
        self.previous.append(previous)
        return f"{previous.split('-')[0] if previous else self.given[-1][0]}-{self.given[-1][-1]}"

    def bounds(self, max_tokens: int = 200, **more: Any) -> dict[str, Any]:
        given = {"max_tokens": max_tokens, "keep_last": 1, "counter": count, "strategy": "summarize"}
        return given | {"summarizer": self} | more


async def evict(store: Any, id: str = "s") -> None:
    await store.admin.archive()
    with redis_of(store) as client:
        client.delete(keys_of(store, id).record)
    tiers(store).hot.forget(f"session:{id}")


# What is kept


async def test_the_newest_whole_turns_that_fit_are_kept(store: Any) -> None:
    session = store.session("s")
    await session.append({"role": "system", "content": "be brief.."})
    await fill(session, 10)
    window = await session.window(max_tokens=75, keep_last=1, counter=count)
    assert shown(window) == ["be brief", "q7", "a7", "q8", "a8", "q9", "a9"]
    assert (window.tokens, window.dropped, window.summary) == (70, 14, None)
    window = await session.window(max_tokens=75, keep_last=1, counter=count, keep_system=False)
    assert shown(window) == ["q7", "a7", "q8", "a8", "q9", "a9"]
    window = await session.window(max_tokens=5, keep_last=2, counter=count)
    assert shown(window) == ["be brief", "q8", "a8", "q9", "a9"], "the last turns win over the budget"
    assert window.tokens == 50
    assert shown(await session.window(max_tokens=29, keep_last=0, counter=count)) == ["be brief"]
    everything = await session.window(max_tokens=10**6)
    assert list(everything.messages) == await session.messages()
    assert everything.dropped == 0


async def test_a_conversation_that_is_not_there_has_an_empty_window(store: Any) -> None:
    empty = await store.session("never").window(max_tokens=100)
    assert (empty.messages, empty.tokens, empty.dropped, empty.read) == ((), 0, 0, 0)
    session = store.session("s")
    await fill(session, 2)
    await store.delete("s")
    assert (await session.window(max_tokens=100)).messages == ()
    only = store.session("system only")
    await only.append(*({"role": "system", "content": str(number)} for number in range(10)))
    assert shown(await only.window(max_tokens=1, counter=count)) == [str(number) for number in range(10)]


async def test_a_tool_call_stays_with_its_result(store: Any) -> None:
    session = store.session("s")
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    await session.append(*turn(0), {"role": "user", "content": "look up"})
    await session.append(
        {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "user", "content": "hurry"}
    )
    await session.append({"role": "tool", "tool_call_id": "c", "content": "found"}, *turn(1))
    window = await session.window(max_tokens=21, keep_last=2, counter=count)
    assert shown(window) == ["look up", "", "hurry", "found", "q1", "a1"]
    window = await session.window(max_tokens=21, keep_last=1, counter=count)
    assert shown(window) == ["q1", "a1"]


@pytest.mark.parametrize("archived", [True, False])
async def test_messages_that_are_not_archived_yet_are_found(opener: Any, archived: bool) -> None:
    """Hot keeps a few; the others are in Redis until they are in SQL."""
    store = await opener(recent_messages=2, archiver=False)
    session = store.session("s")
    await fill(session, 20)
    if archived:
        await evict(store)
    assert shown(await session.window(max_tokens=100, keep_last=1, counter=count))[0] == "q15"
    assert len((await session.window(max_tokens=10**6, counter=count)).messages) == 40


async def test_rolled_back_and_forked_conversations_have_windows_too(opener: Any) -> None:
    store = await opener(recent_messages=2)
    session = store.session("s")
    await fill(session, 6)
    await session.rollback(version=3)
    await fill(session, 2, first=6)
    assert shown(await session.window(max_tokens=60, keep_last=1, counter=count)) == [
        "q2",
        "a2",
        "q6",
        "a6",
        "q7",
        "a7",
    ]
    await session.fork("f")
    forked = store.session("f")
    await fill(forked, 1, first=8)
    await evict(store, "f")
    assert shown(await forked.window(max_tokens=80, keep_last=1, counter=count))[::2] == ["q2", "q6", "q7", "q8"]


# What is read


async def test_a_window_on_a_long_conversation_reads_only_what_it_needs(store: Any) -> None:
    session = store.session("s")
    await session.append({"role": "system", "content": "be brief"})
    for first in range(0, 2000, 250):
        await session.append(*[message for n in range(first, first + 250) for message in turn(n, 100)])
    await store.admin.archive()
    cold, rows = tiers(store).cold, []
    fetch = cold.messages

    def counting(record: str, runs: Any, *rest: Any) -> dict[int, bytes]:
        found = fetch(record, runs, *rest)
        rows.append((len(found), sum(map(len, found.values()))))
        return found

    cold.messages = counting
    try:
        window = await session.window(max_tokens=10_000, counter=count)
        assert (len(window.messages), window.tokens, window.dropped) == (99, 9808, 4001 - 99)
        assert window.read <= 99 + 64, "of 4,001 messages"
        assert window.read_bytes <= 150 * window.read
        assert sum(messages for messages, _ in rows) <= window.read
        assert sum(size for _, size in rows) <= window.read_bytes
        assert len(rows) <= 4, "queries"
        rows.clear()
        summaries = Summaries()
        bounds = summaries.bounds(10_000)
        first = await session.window(**bounds)
        assert sum(map(len, summaries.given)) == first.summary.stop - 1, "all but the system message"
        rows.clear()
        again = await session.window(**bounds)
        assert again == first
        assert sum(messages for messages, _ in rows) <= 64, "what was summarized is not read again"
    finally:
        cold.messages = fetch


async def test_what_is_hot_is_not_read_again(opener: Any) -> None:
    store = await opener()
    session = store.session("s")
    await fill(session, 10)
    hot = tiers(store).hot

    async def kept() -> bool:
        await session.messages()
        return hot.get("session:s") is not None

    await until(kept)
    hits = hot.hits
    cold, fetch, asked = tiers(store).cold, tiers(store).cold.messages, []
    cold.messages = lambda *given: asked.append(given) or fetch(*given)
    try:
        window = await session.window(max_tokens=1000, counter=count)
    finally:
        cold.messages = fetch
    assert not asked
    assert (window.read, window.dropped) == (20, 0)
    assert hot.hits == hits + 1


# Summaries


async def test_what_does_not_fit_is_summarized_once_and_told_on(store: Any) -> None:
    session, summaries = store.session("s"), Summaries()
    for number in range(60):
        await fill(session, 1, first=number)
        window = await session.window(**summaries.bounds())
        assert window.tokens <= 200
        assert window.tokens == sum(count(message) for message in window.messages)
    given = [text for each in summaries.given for text in each]
    assert given == [f"{letter}{n}" for n in range(len(given) // 2) for letter in "qa"], "each once, in order"
    assert window.dropped == len(given)
    assert summaries.previous[0] is None
    assert all(summaries.previous[1:])
    assert len(summaries.given) <= 60 / 3, "not with each message"
    assert window.summary == module.Summary(f"q0-{given[-1]}", 0, len(given))
    assert window.messages[0].role == "system"
    assert window.messages[0].content.endswith(window.summary.text)
    assert len(await session.messages()) == 120, "raw messages stay"
    assert {change.kind for change in await session.history()} == {"append", "summary"}
    assert not await session.get_all()


async def test_a_backlog_is_summarized_in_pieces_that_a_model_can_read(store: Any) -> None:
    session, summaries = store.session("s"), Summaries()
    await session.append({"role": "system", "content": "be brief.."})
    await fill(session, 100)
    window = await session.window(**summaries.bounds())
    assert all(len(texts) * 10 <= 200 for texts in summaries.given)
    assert all(texts[0][0] == "q" for texts in summaries.given), "whole turns"
    assert shown(window)[0] == "be brief", "the system prompt first, so that it stays the same for caches"
    assert window.messages[1].metadata == {"summary": [0, window.summary.stop]}
    assert sum(map(len, summaries.given)) + len(window.messages) - 2 == 200
    assert window.tokens <= 100 + count(window.messages[1])


async def test_a_summary_goes_with_the_record_through_archive_fork_rollback_and_export(store: Any) -> None:
    session, summaries = store.session("s"), Summaries()
    await fill(session, 12)
    first = await session.window(**summaries.bounds())
    await session.checkpoint("one summary")
    await fill(session, 12, first=12)
    second = await session.window(**summaries.bounds())
    assert second.summary.stop > first.summary.stop
    calls = len(summaries.given)
    await evict(store)
    assert (await session.window(**summaries.bounds())).summary == second.summary
    await session.fork("f")
    assert (await store.session("f").window(**summaries.bounds())).summary == second.summary
    await store.admin.import_(await store.admin.export("s"), id="copy")
    assert (await store.session("copy").window(**summaries.bounds())).summary == second.summary
    await session.rollback(label="one summary")
    assert await session.window(**summaries.bounds()) == first
    assert len(summaries.given) == calls, "nothing of this asked the summarizer again"
    await session.clear(messages=True)
    await fill(session, 3, first=50)
    window = await session.window(**summaries.bounds())
    assert (window.summary, window.dropped, shown(window)[0]) == (None, 0, "q50")
    dropping = await store.session("f").window(max_tokens=200, keep_last=1, counter=count)
    assert dropping.summary is None


async def test_a_summary_that_grows_makes_room_for_itself(store: Any) -> None:
    session = store.session("s")
    await fill(session, 20)
    long = Summaries()
    bounds = long.bounds(summarizer=lambda messages, previous: "x" * 120)
    window = await session.window(**bounds)
    assert window.tokens <= 200
    assert shown(window)[-1] == "a19"
    with pytest.raises(TooLarge, match=r"messages \d+ to \d+: the summary of \d+ tokens is more than max_tokens=200"):
        await fill(session, 20, first=20)
        await session.window(**long.bounds(summarizer=lambda messages, previous: "x" * 200))


async def test_a_summarizer_that_fails_stores_nothing(store: Any) -> None:
    session = store.session("s")
    await fill(session, 20)
    before = await session.version(fresh=True)

    def broken(messages: list[Message], previous: str | None) -> str:
        raise ConnectionError("the model is away")

    with pytest.raises(ConnectionError, match="the model is away") as failed:
        await session.window(**Summaries().bounds(summarizer=broken))
    assert "session:s: messages 0 to 19 were being summarized" in failed.value.__notes__[0]
    for nothing in (None, "", " \n", 7, b"text"):
        with pytest.raises(InvalidValue, match=r"messages 0 to 19: the summarizer returned .*; nothing was stored"):
            await session.window(**Summaries().bounds(summarizer=lambda messages, previous, made=nothing: made))
    assert await session.version(fresh=True) == before
    async with session.lock(wait=0):
        pass  # and the lock was given back
    assert (await session.window(**Summaries().bounds())).summary is not None


async def test_bad_bounds_are_refused_before_anything_is_read(store: Any) -> None:
    session = store.session("s")
    await fill(session, 2)
    for bad in (
        {"max_tokens": 0}, {"max_tokens": -1}, {"max_tokens": True}, {"max_tokens": 1.5}, {"max_tokens": "100"},
        {"keep_last": -1}, {"keep_last": None}, {"keep_system": 1}, {"counter": None}, {"strategy": "forget"},
        {"strategy": "summarize"}, {"strategy": "summarize", "summarizer": "gpt"}, {"summarizer": Summaries()},
        {"strategy": "summarize", "summarizer": lambda messages: "short"}, {"summarizer": lambda messages: "short"},
        {"wait": -1}, {"wait": "long"}, {"strategy": ["drop"]},
    ):  # fmt: skip
        with pytest.raises(InvalidValue, match=list(bad)[-1]):
            await session.window(**{"max_tokens": 100} | bad)
    for returned in (None, 1.5, -1):
        with pytest.raises(InvalidValue, match="a counter returns an int"):
            await session.window(max_tokens=100, counter=lambda message, made=returned: made)


async def test_a_stored_summary_that_cannot_be_read_is_reported(store: Any) -> None:
    session = store.session("s")
    await fill(session, 2)
    with redis_of(store) as client:
        client.hset(keys_of(store, "s").record, SUMMARY, b'{"text": "x"}')
    tiers(store).hot.forget("session:s")
    with pytest.raises(CorruptState, match="#summary"):
        await session.window(**Summaries().bounds())
    assert (await session.window(max_tokens=100)).dropped == 0


async def test_a_summary_is_made_inside_a_lock_that_is_held_already(store: Any) -> None:
    session, summaries = store.session("s"), Summaries()
    await fill(session, 12)
    async with session.lock():
        window = await session.window(**summaries.bounds())
        assert (await session.window(**summaries.bounds())) == window
    assert window.summary is not None
    assert len(summaries.given) == 1


async def test_a_conversation_cleared_meanwhile_gets_no_summary_of_what_is_gone(store: Any) -> None:
    session, calls = store.session("s"), []
    await fill(session, 20)

    def clearing(messages: list[Message], previous: str | None) -> Any:
        calls.append(len(messages))
        cleared = getattr(session, "it", session).clear(messages=True)
        if not inspect.isawaitable(cleared):
            return "too late"

        async def afterwards() -> str:
            await cleared
            return "too late"

        return afterwards()

    window = await session.window(**Summaries().bounds(summarizer=clearing))
    assert (window.messages, window.summary, len(calls)) == ((), None, 1)


@pytest.mark.only(api="blocking")
async def test_a_summarizer_of_the_sync_api_is_a_plain_function(store: Any) -> None:
    session = store.session("s")
    await fill(session, 20)

    async def waiting(messages: list[Message], previous: str | None) -> str:
        await asyncio.sleep(0)
        return "never"

    with pytest.raises(InvalidValue, match="a coroutine function is a summarizer for asyncio only"):
        await session.window(**Summaries().bounds(summarizer=waiting))
    async with session.lock(wait=0):
        assert (await session.window(**Summaries().bounds())).summary is not None


# Replicas


def waiting_for(api: str, calls: list[int], condition: Callable[[], Any]) -> Any:
    """A summarizer that is not done before a condition holds, as its API wants it."""

    async def slow(messages: list[Message], previous: str | None) -> str:
        calls.append(len(messages))
        await until(condition)
        return f"{len(messages)} messages"

    def slow_too(messages: list[Message], previous: str | None) -> str:
        calls.append(len(messages))
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.005)
        return f"{len(messages)} messages"

    return slow if api == "asyncio" else slow_too


@pytest.mark.replicas
async def test_two_replicas_summarize_a_range_once(opener: Any) -> None:
    first, second = await opener(), await opener()
    await fill(first.session("s"), 12)
    calls: list[int] = []
    with redis_of(first) as client:
        queue = keys_of(first, "s").wait
        summarizer = waiting_for(opener.api, calls, lambda: client.zcard(queue) == 1)
        bounds = Summaries().bounds(summarizer=summarizer)
        one = asyncio.create_task(first.session("s").window(**bounds))
        await until(lambda: calls)
        await second.session("s").append({"role": "user", "content": "others may write meanwhile"})
        with pytest.raises(LockTimeout):
            await second.session("s").window(**bounds, wait=0)
        two = asyncio.create_task(second.session("s").window(**bounds))
        made, used = await asyncio.gather(one, two)
    assert calls == [made.summary.stop]
    assert made.summary == used.summary
    assert shown(made)[-1] == shown(used)[-1] == "others may write meanwhile"
    kinds = [change.kind for change in await first.session("s").history()]
    assert kinds.count("summary") == 1


@pytest.mark.replicas
async def test_without_the_lock_two_replicas_summarize_twice(opener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the test before. Even then only one summary is stored."""
    monkeypatch.setattr(making, "_alone", lambda *given: nullcontext())
    first, second = await opener(), await opener()
    await fill(first.session("s"), 12)
    calls: list[int] = []
    bounds = Summaries().bounds(summarizer=waiting_for(opener.api, calls, lambda: len(calls) == 2))
    both = [asyncio.create_task(store.session("s").window(**bounds)) for store in (first, second)]
    made, used = await asyncio.gather(*both)
    assert len(calls) == 2
    assert made == used
    kinds = [change.kind for change in await first.session("s").history()]
    assert kinds.count("summary") == 1


# For a turn, which stores at its end


@pytest.mark.only(api="asyncio")
async def test_pending_messages_are_part_of_a_window_and_always_kept(store: Any) -> None:
    session, summaries = store.session("s"), Summaries()
    await fill(session, 20)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    await session.append({"role": "user", "content": "look up"}, {"role": "assistant", "tool_calls": [call]})
    pending = [
        Message(role="tool", tool_call_id="c", content="found"),
        Message(role="user", content="more" * 10),
        Message(role="assistant", content="yes"),
    ]
    home, kept = tiers(store), []
    entry = await session._context.read()

    async def look() -> CachedRecord:
        fields = {**entry.fields, SUMMARY: kept[-1]} if kept else entry.fields
        return CachedRecord(entry.codec, entry.epoch, entry.version, fields, entry.messages)

    async def keep(seen: CachedRecord, data: bytes) -> None:
        assert seen.fields.get(SUMMARY) == (kept[-1] if kept else None)
        kept.append(data)

    bounds = module.Bounds(**summaries.bounds(keep_last=0))
    version = await session.version(fresh=True)
    window = await making.summarized(home, keys_of(store, "s"), bounds, look=look, keep=keep, pending=pending)
    assert shown(window)[-5:] == ["look up", "None", "found", "more" * 10, "yes"]
    assert window.summary == module.Summary.parse(kept[-1], entry.codec)
    assert window.tokens <= 200
    assert window.dropped == window.summary.stop
    assert await session.version(fresh=True) == version, "nothing was stored by the window itself"
    tight = module.Bounds(**summaries.bounds(max_tokens=60, keep_last=0))
    window = await making.summarized(home, keys_of(store, "s"), tight, look=look, keep=keep, pending=pending)
    assert shown(window)[-5:] == ["look up", "None", "found", "more" * 10, "yes"], "a turn is kept whole"


# Secrets and rights


async def test_a_summary_is_encrypted_as_messages_are(opener: Any) -> None:
    store = await opener(encryption=Encryption(KeyRing({"k": b"k" * 32}), fields=()))
    session = store.session("s")
    await fill(session, 20)
    bounds = Summaries().bounds(summarizer=lambda messages, previous: "tell-tale")
    window = await session.window(**bounds)
    assert window.summary.text == "tell-tale"
    await store.admin.archive()
    with redis_of(store) as client:
        assert b"tell-tale" not in held_in_redis(client, keys_of(store, "s").record)
    await session.fork("f")
    await evict(store, "f")
    assert (await store.session("f").window(**bounds)).summary == window.summary
    assert b"tell-tale" not in repr(await store.admin.export("s")).encode()


async def test_a_policy_is_asked_before_a_window_is_read(opener: Any) -> None:
    asked, store = [], await opener(access=lambda request: asked.append(request) or request.actor == "agent")
    session, reader = store.session("s", actor="agent"), store.session("s")
    await fill(session, 20)
    asked.clear()
    with pytest.raises(AccessDenied, match="may not read '#messages'"):
        await reader.window(max_tokens=100)
    await session.window(**Summaries().bounds())
    wanted = [(request.action, request.field) for request in asked if request.actor == "agent"]
    assert list(dict.fromkeys(wanted)) == [("read", "#messages"), ("lock", None), ("write", "#messages")]
    asked.clear()
    await session.window(max_tokens=100)
    assert [(request.action, request.field) for request in asked] == [("read", "#messages")]


async def test_a_turn_may_ask_for_a_window(store: Any) -> None:
    session, summaries = store.session("s"), Summaries()
    await fill(session, 12)
    async with session.turn() as turn:
        window = await session.window(**summaries.bounds())
        turn.append({"role": "user", "content": "go on"})
    assert window.summary is not None
    assert (await session.window(**summaries.bounds())).summary == window.summary
    assert len(summaries.given) == 1
