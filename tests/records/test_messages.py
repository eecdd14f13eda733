"""Messages by their times and numbers. Law: what was appended comes back as it was, the store's own beside it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from below import evict, keys_of, redis_of, said, tiers
from controls import sabotage
from sync_api import core

from distributed_state import AgentState, Encryption, InvalidValue, KeyRing, Message
from distributed_state.values.field_ttl import split


async def numbers(session: Any, **options: Any) -> list[int]:
    return [message.number for message in await session.messages(**options)]


# Times


async def test_a_message_without_a_time_has_that_of_its_commit(opener: Any) -> None:
    """The server's, the same wherever it is read; and no part of what was said."""
    store = await opener(recent_messages=3)
    session = store.session("s")
    given = [said(0), said(1) | {"timestamp": 1.25}, said(2) | {"timestamp": None}, said(3) | {"number": "mine"}]
    await session.get("n")  # hot from the first
    await session.append(*given[:2])
    await session.append(*given[2:])
    async with session.turn() as turn:
        turn.append(said(4))
    given.append(said(4))
    commits = [change.time for change in await session.history()]
    expected = [commits[0], 1.25, None, commits[1], commits[2]]
    await session.fork("f")

    async def check(record: Any) -> None:
        for fresh in (False, True):
            found = await record.messages(fresh=fresh)
            assert [each.timestamp for each in found] == expected
            assert [each.to_dict() for each in found] == given
            assert found == [Message(**each) for each in given]
            assert len({*found, *(Message(**each) for each in given)}) == len(given)

    await check(session)
    changes = await session.history()
    assert [m.timestamp for change in changes for m in change.appended] == expected
    assert [m.timestamp for m in (await session.at(version=3)).messages] == expected
    await evict(store, "s")
    await check(session)
    await check(store.session("f"))
    await store.admin.purge(older_than=-0.0)
    await evict(store, "s")
    await check(session)
    await store.admin.import_(await store.admin.export("s"), id="copy")
    await check(store.session("copy"))
    window = await session.window(max_tokens=1000)
    assert [each.timestamp for each in window.messages] == expected


async def test_a_time_is_kept_beside_what_is_encrypted(opener: Any) -> None:
    store = await opener(encryption=Encryption(KeyRing({"k": bytes(32)})))
    session = store.session("s")
    await session.append(said("secret"))
    [commit] = await session.history()
    with redis_of(store) as client:
        stored = client.hget(keys_of(store, "s").record, b"#m0")
    assert split(stored)[0] == commit.time
    assert b"secret" not in stored
    await evict(store, "s")
    [message] = await session.messages()
    assert (message.timestamp, message.to_dict()) == (commit.time, said("secret"))


async def test_what_a_backup_holds_keeps_its_times(store: Any) -> None:
    session = store.session("s")
    await session.append(said(0), said(1) | {"timestamp": 1.25})
    before = await session.messages()
    state = await session.export_state(messages=True)
    await session.append(said(2))
    await session.restore_state(state)
    after = await session.messages()
    assert [each.timestamp for each in after] == [each.timestamp for each in before]


async def test_a_state_goes_on_from_its_messages_whatever_their_times(store: Any) -> None:
    session = store.session("s")
    state = AgentState.from_user_input("go", session_id="s").with_messages(Message(role="assistant", content="yes"))
    saved = await session.save_state(state)
    loaded = await session.load_state()
    assert loaded == saved
    assert loaded.history[1].timestamp is not None
    again = AgentState.model_validate(loaded.model_dump())
    assert again.history == saved.history
    await session.save_state(loaded.with_messages(Message(role="user", content="on")))
    assert len(await session.messages()) == 3


async def test_a_repeated_append_has_the_time_of_the_first(store: Any) -> None:
    """Its reply does not say when that was, so hot does not pretend to know."""
    session = store.session("s")
    await session.append(said(0))
    await session.messages()
    told = " .. ' ' .. now[1] .. ' ' .. now[2]\n  .. ' ' .. archived_offset .. ' ' .. flags"
    with sabotage("commit", told, ""):
        await session.append(said(1))
    times = [change.time for change in await session.history()]
    assert [each.timestamp for each in await session.messages()] == times


# Numbers


async def test_messages_are_read_by_the_page(opener: Any) -> None:
    store = await opener(recent_messages=4)
    session = store.session("s")
    for at in range(0, 20, 2):
        assert (await session.write(append=[said(at), said(at + 1)])).first_message == at
    for cold in (False, True):
        if cold:
            await evict(store, "s")
        assert await numbers(session) == list(range(20))
        assert await numbers(session, limit=3) == [0, 1, 2]
        assert await numbers(session, limit=3, after=5) == [6, 7, 8]
        assert await numbers(session, limit=3, before=5) == [0, 1, 2]
        assert await numbers(session, last=3, before=5) == [2, 3, 4]
        assert await numbers(session, after=15, before=18) == [16, 17]
        assert await numbers(session, limit=3, order="desc") == [19, 18, 17]
        assert await numbers(session, limit=3, order="desc", before=17) == [16, 15, 14]
        assert await numbers(session, last=2, order="desc") == [19, 18]
        assert (
            await numbers(session, after=19)
            == await numbers(session, before=0)
            == await numbers(session, limit=0)
            == []
        )
        assert (await session.messages(after=6, limit=1))[0].content == "7"
        assert (await session.messages(after=6, limit=1))[0].number == 7
    assert Message(role="user").number is None
    for wrong in (
        {"limit": -1},
        {"before": "x"},
        {"after": True},
        {"limit": 1, "last": 1},
        {"order": "up"},
        {"limit": 1.0},
    ):
        with pytest.raises(InvalidValue):
            await session.messages(**wrong)
    assert await numbers(store.session("never"), limit=3) == []


async def test_numbers_stay_what_they_are(opener: Any) -> None:
    """Through rollbacks, forks, clears and cleanups: one is never used twice, and what is not shown is not found."""
    store = await opener(recent_messages=2)
    session = store.session("s")
    await session.append(*map(said, range(4)))
    await session.append(*map(said, range(4, 6)))
    await session.rollback(steps=1)
    await session.append(said(6))
    assert await numbers(session) == [0, 1, 2, 3, 6]
    assert await numbers(session, limit=2, before=6, order="desc") == [3, 2]
    assert await numbers(session, after=3, limit=1) == [6]
    await session.fork("f")
    fork = store.session("f")
    await fork.append(said("fork"))
    await session.append(said("parent"))
    assert (await fork.messages(after=6, limit=1))[0].content == "fork"
    assert (await session.messages(after=6, limit=1))[0].content == "parent"
    await evict(store, "f")
    assert await numbers(fork, limit=3, after=2) == [3, 6, 7]
    assert (await fork.messages(after=1, limit=1))[0].content == "2"
    await session.clear(messages=True)
    assert (await session.write(append=[said("new")])).first_message == 8
    assert await numbers(session, limit=9) == [8]
    assert await numbers(session, after=2, before=4) == []
    await store.admin.cleanup(fork.id, days=0)
    assert await numbers(fork) == []
    await store.delete("f")
    assert await numbers(fork, after=6) == []


async def test_a_page_costs_a_page(opener: Any) -> None:
    store = await opener(recent_messages=4)
    session, asked = store.session("s"), []
    for _ in range(10):
        await session.append(*map(said, range(30)))
    await evict(store, "s")
    await session.get("n")
    cold = core(store)._lifecycle.cold
    real = cold.messages

    def counted(record: str, runs: Any, *rest: Any) -> Any:
        asked.append(list(itertools.chain.from_iterable(range(run.start, run.stop) for run in runs)))
        return real(record, runs, *rest)

    cold.messages = counted
    assert await numbers(session, limit=3, before=200, order="desc") == [199, 198, 197]
    assert await numbers(session, limit=1, after=9) == [10]
    assert asked == [[197, 198, 199], [10]]


# As they are stored


async def test_raw_messages_are_what_was_said_with_what_is_known_of_it(opener: Any) -> None:
    """Wherever they are read from; and they are the caller's own."""
    store = await opener(recent_messages=3)
    session = store.session("s")
    given = [
        said(0),
        said(1) | {"timestamp": 1.25, "name": None},
        said(2) | {"timestamp": None, "number": "mine"},
        {"role": "assistant", "content": [{"type": "text", "text": "\ud800"}], "large": [2**70, -0.0], "self": {}},
    ]
    await session.append(*given)
    [commit] = [change.time for change in await session.history()]
    known = [{"timestamp": commit}, {}, {}, {"timestamp": commit}]
    expected = [each | known[at] | {"number": at} for at, each in enumerate(given)]
    for cold in (False, True):
        if cold:
            await evict(store, "s")
        for fresh in (False, True):
            assert await session.raw_messages(fresh=fresh) == expected
            messages = await session.messages(fresh=fresh)
            assert [each.to_dict() for each in messages] == given
            assert [(each.number, each.timestamp) for each in messages] == [
                (each["number"], each["timestamp"]) for each in expected
            ]
    for raw in await session.raw_messages():
        raw["content"] = None
        raw.get("large", []).append(1)
    assert await session.raw_messages() == expected
    assert await session.raw_messages(last=2, order="desc", max_staleness=0) == [expected[3], expected[2]]
    assert await session.raw_messages(limit=1, after=0, before=3) == [expected[1]]
    assert await session.raw_messages(limit=0) == await store.session("unwritten").raw_messages() == []
    with pytest.raises(InvalidValue, match="give last or limit"):
        await session.raw_messages(last=1, limit=1)
    await session.fork("f")
    fork = store.session("f")
    await fork.append(said(4))
    assert (await fork.raw_messages())[:4] == expected
    await store.delete("s")
    assert await session.raw_messages() == []


async def test_a_long_read_builds_no_messages(store: Any) -> None:
    """A message is made of its stored bytes when somebody looks at it, and only that one."""
    session = store.session("s")
    await session.append(*map(said, range(50)))
    read: list[int] = []
    found = await session.messages()
    codec = type(tiers(store).codec_of("session:s"))
    original = codec.read_message

    def counted(self: Any, data: bytes, number: int | None) -> Any:
        read.append(-1 if number is None else number)
        return original(self, data, number)

    codec.read_message = counted
    try:
        found = await session.messages()
        assert (len(found), found[7].number, type(found[7]), read) == (50, 7, Message, [])
        assert (found[7].content, found[7].role, found[-1].timestamp) == ("7", "user", found[7].timestamp)
        assert read == [7, 49]
    finally:
        codec.read_message = original
