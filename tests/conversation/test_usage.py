"""What models used: counted once with a turn's commit, and not at all by a turn that names none."""

from __future__ import annotations

from typing import Any

import pytest
from below import keys_of, own_server, redis_of
from counting import round_trips

from distributed_state import InvalidValue, UsageExceeded
from distributed_state.results import Tokens, Usage
from distributed_state.values.model import USAGE


async def spend(session: Any, tokens: int, model: str = "gpt-5", **options: Any) -> None:
    async with session.turn(**options) as turn:
        turn.model(model, input_tokens=tokens)


def fields_of_usage(store: Any, id: str) -> list[bytes]:
    with redis_of(store) as client:
        return [name for name in client.hgetall(keys_of(store, id).record) if name.startswith(USAGE)]


async def test_a_turn_says_what_its_models_used_and_the_session_adds_it_up(store: Any) -> None:
    session = store.session("s", user="u")
    assert await session.usage() == Usage()
    async with session.turn(request_id="r1") as turn:
        with turn.model("gpt-5") as call:
            call.used(input_tokens=812, output_tokens=90)
            call.used(input_tokens=8, output_tokens=10)
        turn.model("mini", input_tokens=5)
        assert turn.usage.models == {"gpt-5": Tokens(2, 820, 100), "mini": Tokens(1, 5, 0)}
        assert await session.usage() == Usage(), "nothing is committed yet"
    assert turn.times.runs[0].name == "gpt-5"
    async with session.turn(request_id="r1") as again:
        assert again.repeated
        assert again.usage == Usage()
    await spend(session, 1)
    used = await session.usage()
    assert used == await session.usage(fresh=True)
    assert used == Usage(4, 826, 100, {"gpt-5": Tokens(3, 821, 100), "mini": Tokens(1, 5, 0)})
    assert used.tokens == 926
    first, second = await session.history()
    assert first.usage == Usage(3, 825, 100, {"gpt-5": Tokens(2, 820, 100), "mini": Tokens(1, 5, 0)})
    assert second.usage == Usage(1, 1, 0, {"gpt-5": Tokens(1, 1, 0)})
    assert await session.get_all(fresh=True) == {}, "no field of the user's"


@pytest.mark.only(warm="single")
async def test_a_turn_that_names_no_tokens_is_as_it_was(opener: Any) -> None:
    """No field, no operation, and no round trip more; one that names some needs no further round trip, either."""
    with own_server(opener) as server:
        store = await opener(url=server.url, archiver=False, beat=0, durability="memory")
        session = store.session("s")
        found = []
        for tokens in (0, 0, 7):  # the first turn brings its scripts along
            with round_trips(store) as trips:
                async with session.turn() as turn:
                    turn["n"] = tokens
                    turn.model("gpt-5", input_tokens=tokens)
            found += trips
            assert fields_of_usage(store, "s") == ([b"#ugpt-5"] if tokens else [])
        assert found[1] == found[2]
        await opener.close()


async def test_a_turn_that_fails_counts_nothing(store: Any) -> None:
    session = store.session("s")
    with pytest.raises(ZeroDivisionError):
        async with session.turn() as turn:
            turn.model("gpt-5", input_tokens=7)
            raise ZeroDivisionError
    assert await session.usage(fresh=True) == Usage()
    with pytest.raises(InvalidValue, match="over"):
        turn.model("gpt-5", input_tokens=7)


async def test_what_was_used_stays_used(store: Any) -> None:
    session = store.session("s")
    await spend(session, 1)
    await session.set("n", 1)
    await spend(session, 10)
    await session.rollback(version=1)
    assert (await session.usage()).tokens == 11
    await session.clear()
    assert (await session.usage()).tokens == 11
    await store.delete("s")
    assert (await session.usage()).tokens == 11
    await spend(session, 100, revive=True)
    assert (await session.usage(fresh=True)).tokens == 111
    assert [None if each.usage is None else each.usage.tokens for each in await session.history()] == [
        1, None, 10, None, None, None, 100,
    ]  # fmt: skip


async def test_a_fork_has_used_nothing(store: Any) -> None:
    session = store.session("s")
    await spend(session, 7)
    await session.fork("f")
    fork = store.session("f")
    assert await fork.usage() == Usage()
    await spend(fork, 1)
    assert (await fork.usage()).tokens == 1
    assert (await session.usage()).tokens == 7
    assert (await store.usage(fresh=True)).tokens == 8


async def test_a_turn_begins_only_below_a_bound(store: Any) -> None:
    session = store.session("s")
    await spend(session, 99, usage_below=1)
    await spend(session, 50, usage_below=100, request_id="r")
    with pytest.raises(UsageExceeded, match="have used 149 tokens, and this turn begins only below 149") as refused:
        await spend(session, 1, usage_below=149)
    assert (refused.value.tokens, refused.value.limit) == (149, 149)
    async with session.turn(request_id="r", usage_below=100) as turn:
        assert turn.repeated, "the answer costs nothing"
    await spend(session, 1, usage_below=150)
    assert (await session.usage()).tokens == 150
    async with session.lock():
        pass  # what was refused holds no lease


@pytest.mark.parametrize("bound", [-1, 1.5, True, "7"])
async def test_a_bound_is_a_count(store: Any, bound: Any) -> None:
    with pytest.raises(InvalidValue, match="usage_below is a number of tokens"):
        store.session("s").turn(usage_below=bound)


async def test_it_survives_redis_and_comes_back_from_sql(opener: Any) -> None:
    store = await opener()
    session = store.session("s")
    await spend(session, 7)
    await store.admin.archive()
    with redis_of(store) as client:
        client.delete(keys_of(store, "s").record)
    assert (await session.usage(fresh=True)).tokens == 7
    await spend(session, 1)
    assert (await session.usage(fresh=True)).tokens == 8
