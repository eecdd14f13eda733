"""Archivers that have nothing to do: they hear of what is written, and look rarely meanwhile."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from typing import Any

import pytest
from below import own_server, redis_of, tiers, until
from controls import sabotage
from counting import asked
from sync_api import core

from distributed_state.store import reaper
from distributed_state.tiers import archiver as archiving
from distributed_state.tiers.archive_pass import IdleJournals
from distributed_state.warm.clock import Rounds

pytestmark = pytest.mark.only(warm="real")
PARTITIONS = 4
TELLS = "if alone then call('SPUBLISH', journal, '') end"


@pytest.fixture(autouse=True)
def rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is at rest looks again in an hour."""
    monkeypatch.setattr(Rounds, "left", 3600.0)
    monkeypatch.setattr(archiving, "ROUND_SECONDS", 3600.0)
    monkeypatch.setattr(reaper, "_SECONDS", 3600.0)


async def at_rest(opener: Any, **settings: Any) -> tuple[Any, Any]:
    """A writer, and an archiver of all partitions that rests; each partition has begun."""
    writer = await opener(partitions=PARTITIONS, archiver=False, durability="memory", max_staleness=0, **settings)
    archiver = await opener(partitions=PARTITIONS, archiver=True, durability="memory", sweep=0.1, **settings)
    for number in range(12):
        await writer.session(f"begun{number}").set("a", 1)
    home = tiers(archiver)
    await until(lambda: len(home.archiver.mine) == PARTITIONS, 30)
    await until(lambda: resting(archiver), 90)
    return writer, archiver


def resting(store: Any) -> bool:
    home = tiers(store).archiver
    return home.archived >= 12 and home.idle_journals.all_idle(home.mine)


def version(store: Any, id: str) -> int | None:
    return core(store)._lifecycle.cold.version(f"session:{id}")  # type: ignore[no-any-return]  # a number or None


async def archived_soon(opener: Any, *guard: str) -> bool:
    writer, archiver = await at_rest(opener)
    with sabotage(*guard) if guard else nullcontext():
        for number in range(3):
            await writer.session("s").set("n", number)
        try:
            await until(lambda: version(archiver, "s") == 3, 3)
        except AssertionError:
            return False
        return True


async def test_what_is_written_wakes_an_archiver_that_rests(opener: Any) -> None:
    assert await archived_soon(opener)


@pytest.mark.wide
async def test_if_nobody_told_it_it_would_find_it_at_its_next_look(opener: Any) -> None:
    """Negative control."""
    assert not await archived_soon(opener, "commit", TELLS, "")


async def looks_of_one_that_was_woken(opener: Any, monkeypatch: pytest.MonkeyPatch, *, rests: bool) -> int:
    """How often an archiver asks how far journals are in a second in which nobody writes; it would five times."""
    _, archiver = await at_rest(opener)
    home = tiers(archiver).archiver
    looks: list[int] = []
    states = home._partitions.reachable_states
    monkeypatch.setattr(home._partitions, "reachable_states", lambda asked: (looks.append(1), states(asked))[1])
    if not rests:
        monkeypatch.setattr(IdleJournals, "all_idle", lambda *_: False)
    home.idle_journals.written.set()
    await until(lambda: looks)
    await asyncio.sleep(1.0)
    if not rests:
        await until(lambda: len(looks) > 1)
    return len(looks)


@pytest.mark.wide
async def test_an_archiver_that_finds_nothing_rests_again(opener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await looks_of_one_that_was_woken(opener, monkeypatch, rests=True) == 1


@pytest.mark.wide
async def test_one_that_never_rested_would_ask_again(opener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    assert await looks_of_one_that_was_woken(opener, monkeypatch, rests=False) > 1


async def test_of_what_is_behind_another_entry_nobody_is_told(opener: Any) -> None:
    store = await opener(partitions=1, archiver=False, durability="memory")

    async def told(writes: int) -> int:
        with asked(store) as seen:
            for number in range(writes):
                await store.session("s").set("n", number)
        return sum("}:journal" in each for each in seen.inside if each.startswith("SPUBLISH"))

    assert await told(3) == 1
    assert await told(3) == 0
    await store.admin.archive()
    await store.emit("alone")
    assert await told(3) == 0
    await store.admin.archive()
    assert await told(3) == 1


async def test_an_archiver_that_does_not_hear_looks_as_ever(opener: Any) -> None:
    """Without a link there is no rest."""
    writer = await opener(partitions=PARTITIONS, archiver=False, durability="memory", max_staleness=0)
    archiver = await opener(partitions=PARTITIONS, archiver=True, max_staleness=0)
    await until(lambda: len(tiers(archiver).archiver.mine) == PARTITIONS, 30)
    await writer.session("s").set("a", 1)
    await until(lambda: version(archiver, "s") == 1)
    assert not tiers(archiver).archiver.idle_journals.all_idle([0])


@pytest.mark.only(warm="single")
async def test_what_was_written_while_the_link_was_lost_is_found_when_it_is_back(opener: Any) -> None:
    with own_server(opener) as server:
        writer, archiver = await at_rest(opener, url=server.url)
        with redis_of(writer) as client:
            client.client_kill_filter(_type="pubsub")
            await writer.session("s").set("a", 1)
        await until(lambda: version(archiver, "s") == 1)


@pytest.mark.only(warm="single")
async def test_what_is_heard_in_the_moment_of_a_look_is_no_rest(opener: Any) -> None:
    """The look was made before the write, and its answer comes after the message."""
    writer, archiver = await at_rest(opener)
    rest = tiers(archiver).archiver.idle_journals
    keys = tiers(archiver).keys.partition(0)
    asked = tiers(archiver).port.monotonic()
    states = await tiers(writer).warm.partitions.states([keys])
    rest._receive(keys.journal, b"")
    rest.looked(asked, states)
    assert rest.since(0) is None
    rest.looked(tiers(archiver).port.monotonic(), states)
    assert rest.since(0) is not None


async def ends_soon(opener: Any, idle: float, *guard: str) -> bool:
    writer, archiver = await at_rest(opener)

    async def swept() -> bool:
        looks = tiers(archiver).workers[0]._looks  # type: ignore[attr-defined]  # the reaper's
        return all(looks.nothing_due(each) for each in range(PARTITIONS))

    async def ended() -> bool:
        return bool(await writer.admin.audit(type="session.expired"))

    await until(swept)
    with sabotage(*guard) if guard else nullcontext():
        await writer.session("ends", idle=idle).set("a", 1)
        try:
            await until(ended, idle + 4)
        except AssertionError:
            return False
        return True


@pytest.mark.wide
async def test_what_is_written_at_rest_ends_in_time(opener: Any) -> None:
    """Its end is looked for again, and then when it is due: at neither time is anything written."""
    assert await ends_soon(opener, 2.0)


@pytest.mark.wide
@pytest.mark.parametrize("guard", [("commit", TELLS, ""), ("due", "next or ''", "''")])
async def test_without_that_it_would_end_late(opener: Any, guard: tuple[str, str, str]) -> None:
    """Negative controls: nobody tells that something was written, or when the next is due."""
    assert not await ends_soon(opener, 2.0, *guard)
