"""Which epochs began, and when: what was minted by somebody who died before Redis was told of it is no loss."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
from below import keys_of, redis_of, tiers, until
from scraping import Scrape
from sqlalchemy import create_engine

from distributed_state.errors import StateError
from distributed_state.store import watch
from distributed_state.warm.partitions import Partitions

pytestmark = pytest.mark.only(warm="single", cold=("sqlite", "postgres"))
LOSS = "Redis was emptied|has another data id"


async def epochs(store: Any) -> Any:
    return next(each for each in await store.admin.doctor() if each.name == "epochs")


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    told = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    return [each for each in told if re.search(LOSS, each)]


def sql(opener: Any, statement: str) -> None:
    engine = create_engine(opener.archive)
    with engine.begin() as connection:
        connection.exec_driver_sql(statement)
    engine.dispose()


def empty(store: Any) -> None:
    """Take away what Redis has of the partition of session s, as a lost server does of all."""
    at = keys_of(store, "s")
    with redis_of(store) as client:
        for key in client.scan_iter(match=at.meta.rpartition(b":")[0] + b":*", count=1000):
            client.delete(key)


async def test_an_epoch_that_never_began_is_lost_without_a_warning(
    opener: Any, caplog: pytest.LogCaptureFixture
) -> None:
    store = await opener(archiver=False)
    partition = keys_of(store, "s").partition
    assert tiers(store).cold.mint(partition, None)  # and then its process died
    await store.session("s").set("n", 1)
    assert tiers(store).cold.cursor(partition).ordinal == 2
    assert not warned(caplog)
    assert tiers(store).recovery.count == 0
    assert (await epochs(store)).ok


async def test_one_that_began_is_a_loss_also_where_nothing_was_archived_and_its_finders_are_gone(
    opener: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_SQL_EVERY", 0.1)
    store = await opener(archiver=False)
    await store.session("s").set("n", 1)
    assert (await epochs(store)).ok
    empty(store)
    finder = await opener(archiver=False)
    await finder.session("s").set("n", 2)
    assert len(warned(caplog)) == 1
    await finder.close()
    await store.close()
    later = await opener()
    scrape = Scrape(later)
    await until(lambda: scrape("epochs_minted") == 1)
    told = await epochs(later)
    assert not told.ok
    assert "1 partitions began another one within ten minutes" in told.found
    assert (scrape("sql_seen_seconds") or 9) < 5
    sql(opener, "UPDATE cursors SET minted_ms = minted_ms - 601000")
    await until(lambda: scrape("epochs_minted") == 0)
    assert (await epochs(later)).ok, "then it is history"


async def test_whoever_dies_as_redis_is_told_hides_no_loss(
    opener: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis took the epoch, others were acknowledged what they wrote under it, and then it was emptied."""
    store = await opener(archiver=False)
    install = Partitions.install

    async def dies(*given: Any, **more: Any) -> str:
        await install(*given, **more)
        raise StateError("this process has died")

    monkeypatch.setattr(Partitions, "install", dies)
    with pytest.raises(StateError):
        await store.session("s").set("n", 1)
    monkeypatch.undo()
    await store.session("s").set("n", 1)
    empty(store)
    await store.session("s").set("n", 2)
    assert len(warned(caplog)) == 1
    assert tiers(store).recovery.count == 1


async def test_an_epoch_that_redis_shows_began_whatever_is_noted(opener: Any, caplog: pytest.LogCaptureFixture) -> None:
    store = await opener(archiver=False)
    at = keys_of(store, "s")
    await store.session("s").set("n", 1)
    tiers(store).cold.never_begun(at.partition, tiers(store).cold.cursor(at.partition).epoch)
    with redis_of(store) as client:
        noted = client.hget(at.meta, "journal").split(b" ")
        client.hset(at.meta, mapping={"life": "another", "journal": b" ".join([*noted[:5], b"another", *noted[6:]])})
    await store.session("s").set("n", 2)
    assert tiers(store).recovery.complete == 1
    assert not warned(caplog), "Redis has what SQL has"


async def test_an_epoch_whose_answer_was_lost_began(opener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = await opener(archiver=False)
    install, words = Partitions.install, []

    async def twice(*given: Any, **more: Any) -> str:
        await install(*given, **more)
        words.append(await install(*given, **more))
        return words[-1]

    monkeypatch.setattr(Partitions, "install", twice)
    await store.session("s").set("n", 1)
    assert words == ["ok"]
    assert tiers(store).cold.any_begun(keys_of(store, "s").partition)


async def test_an_epoch_that_came_too_late_did_not_begin(opener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = await opener(archiver=False)
    install, mine = Partitions.install, []

    async def too_late(self: Any, keys: Any, token: str, *given: Any, **more: Any) -> str:
        mine.append(await install(self, keys, token if mine else "another", *given, **more))
        return mine[-1]

    monkeypatch.setattr(Partitions, "install", too_late)
    await store.session("s").set("n", 1)
    assert mine == ["lost", "ok"]
    assert tiers(store).recovery.count == 0, "of the first nobody was told"


@pytest.mark.wide
async def test_one_of_an_older_release_may_have_begun(opener: Any, caplog: pytest.LogCaptureFixture) -> None:
    store = await opener(archiver=False)
    assert tiers(store).cold.mint(keys_of(store, "s").partition, None)
    sql(opener, "UPDATE cursors SET begun = NULL, minted_ms = NULL")
    await store.session("s").set("n", 1)
    assert len(warned(caplog)) == 1, "nobody knows, so it is told"


@pytest.mark.wide
async def test_a_worker_of_the_release_before_goes_on_writing(opener: Any) -> None:
    """As it names its columns: what it does not know of stays empty, and means that nobody noted it."""
    store = await opener(archiver=False)
    await store.session("s").set("n", 1)
    await store.admin.archive()
    partition = keys_of(store, "s").partition
    sql(
        opener,
        'INSERT INTO cursors (namespace, "partition", ordinal, epoch, "offset", event, closed) '
        f"VALUES ('{tiers(store).cold.namespace}', {partition}, 2, '2-older', 0, '', false)",
    )
    assert tiers(store).cold.cursor(partition).epoch == "2-older"
    assert tiers(store).cold.any_begun(partition)
