"""Sums of tokens by user, model and day: each committed turn counts once, wherever its commit is."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from distributed_state import InvalidValue
from distributed_state.results import Tokens, Usage

UNARCHIVED = {"archive_every": 3600, "durability": "memory"}


async def spend(session: Any, tokens: int, model: str = "gpt-5") -> None:
    async with session.turn() as turn:
        turn.model(model, input_tokens=tokens)


async def test_sums_of_users_are_those_of_their_sessions(store: Any) -> None:
    for id, user, model, tokens in [
        ("a", "ada", "gpt-5", 1), ("b", "ada", "mini", 10), ("b", "ada", "mini", 100), ("c", "bob", "mini", 1000),
    ]:  # fmt: skip
        await spend(store.session(id, user=user), tokens, model)
    await spend(store.session("nobody's"), 10_000)
    today = datetime.now(UTC).date().isoformat()
    await store.admin.archive()
    for fresh in (False, True):
        ada = await store.usage(user="ada", fresh=fresh)
        assert ada.models == {"gpt-5": Tokens(1, 1, 0), "mini": Tokens(2, 110, 0)}
        assert (ada.tokens, ada.calls) == (111, 3)
        assert sum(each.tokens for each in ada.days.values()) == 111
        assert (await store.usage(fresh=fresh)).tokens == 11_111
        assert (await store.usage(prefix="c", fresh=fresh)).tokens == 1000
        assert (await store.usage(user="ada", prefix="c", fresh=fresh)).tokens == 0
        assert await store.usage(user="eve", fresh=fresh) == Usage()
    assert today in ada.days or len(ada.days) == 2, "a day has ended meanwhile"


async def test_only_a_fresh_sum_has_what_is_not_archived(opener: Any) -> None:
    store = await opener(**UNARCHIVED)
    await spend(store.session("a", user="ada"), 1)
    await spend(store.session("b", user="bob"), 10)
    await store.admin.archive()
    await spend(store.session("a", user="ada"), 100)
    await spend(store.session("c", user="ada"), 1000)
    assert (await store.usage()).tokens == 11
    assert (await store.usage(fresh=True)).tokens == 1111
    assert (await store.usage(user="ada")).tokens == 1
    assert (await store.usage(user="ada", fresh=True)).tokens == 1101
    await store.admin.archive()
    assert (await store.usage(user="ada")).tokens == (await store.usage(user="ada", fresh=True)).tokens == 1101


async def test_days_are_whole(store: Any) -> None:
    await spend(store.session("a"), 7)
    await store.admin.archive()
    now = datetime.now(UTC)
    (day,) = (await store.usage()).days
    for since in (None, 0, time.time(), now, now.replace(hour=0), datetime.fromisoformat(f"{day}T23:59:59+00:00")):
        assert (await store.usage(since=since)).tokens == 7
    tomorrow = datetime.fromisoformat(f"{day}T00:00:00+00:00") + timedelta(days=1)
    assert await store.usage(since=tomorrow) == Usage()


@pytest.mark.parametrize("since", [-1, "2026-11-29", float("inf"), True, datetime(2026, 11, 29)])
async def test_a_time_that_is_none_is_refused(store: Any, since: Any) -> None:
    with pytest.raises(InvalidValue, match="since"):
        await store.usage(since=since)


async def test_a_deleted_session_counts_and_an_erased_one_does_not(store: Any) -> None:
    await spend(store.session("a", user="ada"), 1)
    await spend(store.session("b", user="ada"), 10)
    await store.delete("a")
    await store.admin.archive()
    assert (await store.usage(user="ada")).tokens == 11
    await store.admin.purge(older_than=0)
    assert (await store.usage(user="ada")).tokens == 11, "a purge keeps the sums"
    await store.erase("b")
    assert (await store.usage(user="ada", fresh=True)).tokens == 1
    await store.forget("ada")
    assert await store.usage(fresh=True) == Usage()


async def test_a_copy_counts_what_its_history_has(store: Any) -> None:
    session = store.session("a", user="ada")
    await spend(session, 1)
    await session.set("n", 1)
    await spend(session, 10, "mini")
    lines = await store.admin.export("a")
    await store.admin.import_(lines, id="whole")
    assert (await store.session("whole").usage()).tokens == 11
    assert [each.usage and each.usage.tokens for each in await store.session("whole").history()] == [1, None, 10]
    assert (await store.usage(prefix="whole")).models == {"gpt-5": Tokens(1, 1, 0), "mini": Tokens(1, 10, 0)}
    await store.admin.purge(older_than=0)
    await spend(session, 100)
    lines = await store.admin.export("a")
    await store.admin.import_(lines, id="rest")
    assert (await store.session("rest").usage()).tokens == (await store.usage(prefix="rest")).tokens == 111


@pytest.mark.parametrize("change", [("1 812 90 1 812 90", "1 812 90 1"), ("#ugpt-5", "#u")])
async def test_a_file_with_other_counts_is_refused(store: Any, change: tuple[str, str]) -> None:
    async with store.session("a").turn() as turn:
        turn.model("gpt-5", input_tokens=812, output_tokens=90)
    lines = await store.admin.export("a")
    broken = [line.replace(*change) for line in lines]
    assert broken != lines
    with pytest.raises(InvalidValue):
        await store.admin.import_(broken, id="b")
    assert not await store.session("b").exists()
