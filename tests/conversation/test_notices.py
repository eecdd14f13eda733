"""Notices, by which a second client knows what to read again. Law: they have numbers and names, no contents."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from below import keys_of, redis_of, tiers, until

from distributed_state.results import Notice


async def told(output: Any, most: int = 1, wait: float = 10.0) -> list[tuple[str, dict[str, Any]]]:
    """The next notices, at most this many."""
    found: list[tuple[str, dict[str, Any]]] = []
    while len(found) < most and (part := await output.next(wait)) is not None:
        if isinstance(part, Notice):
            found.append((part.name, part.data))
    return found


@asynccontextmanager
async def following(session: Any, **options: Any) -> AsyncIterator[Any]:
    """Notices from when they are complete: the first one asks the reader to read the session."""
    async with session.output(notices=True, **options) as output:
        assert await told(output) == [("resync", {})]
        yield output


async def of_another(opener: Any, **settings: Any) -> tuple[Any, Any]:
    """A session, and the same one in another replica."""
    store, other = await opener(**settings), await opener(**settings)
    return store.session("s"), other.session("s")


@pytest.mark.replicas
async def test_inputs_that_were_served_or_withdrawn_are_told_on_another_replica(opener: Any) -> None:
    session, other = await of_another(opener)
    for _ in range(3):
        await session.post({"role": "user", "content": "secret"})
    async with following(other) as output:
        await session.withdraw(2)
        async with session.turn() as turn:
            turn.take()
        await session.set("last", 1)
        found = await told(output)
        while found[-1][0] != "fields.changed":
            found += await told(output)
    assert [each for each in found if each[0] == "inbox.taken"] == [
        ("inbox.taken", {"version": 4, "numbers": [2]}),
        ("inbox.taken", {"version": 5, "numbers": [1, 3]}),
    ]


@pytest.mark.replicas
async def test_names_and_numbers_of_commits_are_told_on_another_replica(opener: Any) -> None:
    session, other = await of_another(opener)
    async with following(other) as output:
        await session.append({"role": "user", "content": "secret"}, {"role": "user", "content": "too"})
        await session.write(set={"a": "secret", "b": 1}, delete=["c"])
        await session.post({"role": "user", "content": "secret"})
        await session.transition("new_task")
        await session.items("todo").put("k", "secret")
        await session.rollback(version=2)
        found = await told(output, 6)
    assert found == [
        ("message.appended", {"version": 1, "first": 0, "last": 1}),
        ("fields.changed", {"version": 2, "names": ["a", "b", "c"], "items": [], "phase": False}),
        ("inbox.posted", {"version": 3, "number": 1}),
        ("fields.changed", {"version": 4, "names": [], "items": [], "phase": True}),
        ("fields.changed", {"version": 5, "names": [], "items": ["todo"], "phase": False}),
        ("resync", {}),
    ]


async def test_a_replica_is_told_of_its_own_commits(store: Any) -> None:
    """Which nobody else may hear, so that they are not published otherwise."""
    session = store.session("s")
    await session.set("a", 0)
    await session.get("a")
    async with following(session) as output:
        await session.set("a", 1)
        assert await told(output) == [("fields.changed", {"version": 2, "names": ["a"], "items": [], "phase": False})]


async def test_a_turn_is_told_of_with_its_token(store: Any) -> None:
    session = store.session("s")
    async with following(session) as output:
        async with session.turn(request_id="r") as turn:
            begun = await told(output)
            turn["a"] = 1
        found = await told(output, 2)
    assert begun == [("turn.started", {"token": turn.token})]
    assert sorted(found) == [
        ("fields.changed", {"version": 1, "names": ["a"], "items": [], "phase": False}),
        ("turn.ended", {"token": turn.token}),
    ]


async def test_chunks_come_with_the_notices(store: Any) -> None:
    session = store.session("s")
    async with following(session) as output:
        async with session.turn(request_id="r") as turn:
            await turn.stream("a")
            turn.append({"role": "assistant", "content": "a"})
        names = []
        while "Ended" not in names or "turn.ended" not in names or "message.appended" not in names:
            part = await output.next(10)
            names.append(part.name if isinstance(part, Notice) else type(part).__name__)
    assert names.count("Chunk") == names.count("Ended") == names.count("turn.ended") == 1


async def test_a_commit_that_is_too_large_to_be_named_or_that_replaces_asks_to_read_again(opener: Any) -> None:
    store = await opener(publish_bytes=100)
    session = store.session("s")
    await session.append({"role": "user", "content": "a"})
    async with following(session) as output:
        await session.set("a", "x" * 200)
        await session.replace_messages([{"role": "user", "content": "b"}])
        await session.set("b", 1)
        found = await told(output, 3)
    assert found == [
        ("resync", {}),
        ("resync", {}),
        ("fields.changed", {"version": 4, "names": ["b"], "items": [], "phase": False}),
    ]


@pytest.mark.only(warm="real")
async def test_one_who_was_not_connected_is_asked_to_read_again(opener: Any) -> None:
    store, other = await opener(), await opener()
    session = store.session("s")
    async with following(other.session("s")) as output:
        with redis_of(store) as client:
            client.client_kill_filter(_type="pubsub")
        await session.set("a", 1)
        assert await told(output) == [("resync", {})]


async def test_who_follows_without_notices_is_told_of_nothing_and_costs_nothing(store: Any) -> None:
    session = store.session("s")
    async with session.output() as output:
        assert await output.next(0) is None
        await session.set("a", 1)
        assert await output.next(0.05) is None
        assert keys_of(store, "s").channel not in tiers(store).link.echoed


async def test_a_follower_that_leaves_or_is_dropped_is_no_longer_served(store: Any) -> None:
    session = store.session("s")
    home, channel = tiers(store), keys_of(store, "s").channel
    async with following(session):
        assert channel in home.link.echoed
    assert channel not in home.link.echoed
    dropped = session.output(notices=True)
    await dropped.next(0)
    assert channel in home.link.echoed
    del dropped

    async def gone() -> bool:
        await session.increment("n")
        return channel not in home.link.echoed

    await until(gone)


@pytest.mark.replicas
async def test_a_hot_copy_goes_on_being_updated_when_its_follower_leaves(opener: Any) -> None:
    session, other = await of_another(opener)
    await session.set("a", 0)
    await other.get("a")
    async with following(other):
        pass

    async def current() -> bool:
        return bool(await other.get("a") == 1)

    await session.set("a", 1)
    await until(current)
