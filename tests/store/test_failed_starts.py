"""Notes of replicas that could not start: they are forgotten, and who reads them goes on without."""

from __future__ import annotations

import platform
from typing import Any

import pytest
from below import redis_of, tiers, until
from scraping import Scrape

from distributed_state.errors import ColdUnavailable, WarmUnavailable
from distributed_state.store import doctor, watch
from distributed_state.values import codec

pytestmark = pytest.mark.only(warm="single", cold="sqlite", api="asyncio")


async def test_containers_whose_names_change_leave_no_notes_behind(opener: Any) -> None:
    """While one fails again and again, the hash never expires."""
    store = await opener()
    of = tiers(store)
    now = await store.time()
    with redis_of(store) as client:
        for host, ago in ("gone", 700.0), ("there", 10.0):
            card = {"pid": 1, "version": "1", "time": now - ago, "why": "no such password"}
            client.hset(of.keys.failed_starts, host, codec.encode(card))
        with pytest.raises(ColdUnavailable):
            async with doctor.Noting(of.port, of.settings, of.keys):
                raise ColdUnavailable("no such password")
        assert {each.decode() for each in client.hkeys(of.keys.failed_starts)} == {"there", platform.node()}
    assert sorted(each.host for each in await doctor.lately(of)) == sorted(["there", platform.node()])


async def test_journals_are_seen_while_the_server_that_has_the_notes_is_away(
    opener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of several: those of the others are fine."""

    async def away(*_: Any) -> Any:
        raise WarmUnavailable("one of several is away")

    monkeypatch.setattr(doctor, "lately", away)
    monkeypatch.setattr(watch, "_EVERY", 0.1)
    store = await opener()
    scrape = Scrape(store)
    await until(lambda: scrape("journal_seen_seconds") is not None)
    assert scrape("failed_starts") == 0
