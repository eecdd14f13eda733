"""What asks for a level, and which one counts; what is refused. How levels hold is in `faults/test_durability.py`."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from below import own_server
from sync_api import core, in_thread

from distributed_state import ColdUnavailable, ConfigurationError, DurabilityUnknown, InvalidValue
from distributed_state.results import Finding
from distributed_state.settings import Settings
from distributed_state.values.levels import EVERY, MEMORY, level_of
from distributed_state.warm import confirming
from distributed_state.warm.confirming import believed

single = pytest.mark.only(api=("asyncio", "blocking"), warm="single", cold=("sqlite", "postgres"))


async def quiet(opener: Any, **settings: Any) -> Any:
    """A store in which nothing is archived by itself."""
    return await opener(**{"archiver": False, "durability": "memory", "max_staleness": 0} | settings)


def archived(store: Any, id: str = "s") -> int:
    found = core(store)._lifecycle.cold.version(f"session:{id}")
    return found or 0


def finding(findings: list[Finding], name: str) -> Finding:
    (found,) = [each for each in findings if each.name == name]
    return found


# Which level counts


async def test_each_way_of_writing_takes_a_level(opener: Any) -> None:
    store = await quiet(opener)
    session = store.session("s")
    level = {"durability": "archived"}
    for write in (
        lambda: session.set("a", 1, **level),
        lambda: session.set_many({"b": 1}, **level),
        lambda: session.update("c", {"d": 1}, **level),
        lambda: session.append_to("e", 1, **level),
        lambda: session.increment("n", **level),
        lambda: session.increment("f", 0.5, **level),
        lambda: session.write(set={"a": 2}, **level),
        lambda: session.append({"role": "user", "content": "hello"}, **level),
        lambda: session.delete("b", **level),
        lambda: session.clear(**level),
        lambda: session.version(durability="archived"),
    ):
        before = await session.set("between", 1)
        assert archived(store) < before, "the setting is another one"
        await write()
        assert archived(store) == await session.version() >= before


async def test_a_block_a_batch_a_transaction_and_a_turn_take_a_level(opener: Any) -> None:
    store = await quiet(opener)
    session = store.session("s")
    with store.durable("archived"):
        await session.set("a", 1)
        assert archived(store) == 1
    async with store.batch(durability="archived") as batch:
        batch.on(session).set("a", 2)
        batch.on(store.session("other")).set("a", 2)
    assert archived(store) == 2
    assert archived(store, "other") == 1
    async with session.transaction(durability="archived") as view:
        view["a"] = 3
    assert archived(store) == 3
    async with session.turn(durability="archived") as turn:
        turn["a"] = 4
    assert archived(store) == 4
    await session.set("a", 5)
    assert archived(store) == 4
    event = await store.emit("note.made", {"n": 1})
    assert not await _event_is_archived(store, event)
    with store.durable("archived"):
        event = await store.emit("note.made", {"n": 2})
    assert await _event_is_archived(store, event)


async def _event_is_archived(store: Any, event: Any) -> bool:
    cold = core(store)._lifecycle.cold
    return bool(await in_thread(lambda: cold.event_archived(event.partition, event.epoch, event.sequence, event.id)))


async def test_the_innermost_level_counts(opener: Any) -> None:
    """Not the strongest: a write within a careful block may be one that is not worth the wait."""
    store = await quiet(opener, durability="archived")
    session = store.session("s")
    with store.durable("memory"):
        assert await session.set("a", 1) > archived(store)
        with store.durable("archived"):
            assert await session.set("a", 2) == archived(store)
            assert await session.set("a", 3, durability="memory") > archived(store)
            async with session.turn(durability="memory") as turn:
                turn["a"] = 4
            assert archived(store) == 2
        assert await session.set("a", 5) > archived(store)
    assert await session.set("a", 6) == archived(store)


@pytest.mark.replicas
async def test_a_level_is_of_one_store_and_of_the_work_begun_inside(opener: Any) -> None:
    store, other = await quiet(opener), await quiet(opener)
    with store.durable("archived"):
        await other.session("other").set("a", 1)
        assert archived(other, "other") == 0
        # A task is begun inside, and keeps the level when the block has ended.
        begun = asyncio.create_task(store.session("s").set("a", 1))
    assert await begun == archived(store) == 1
    assert await store.session("s").set("a", 2) > archived(store)


async def test_what_is_no_level_is_refused_before_anything_is_written(opener: Any) -> None:
    store = await quiet(opener)
    session = store.session("s")
    for wrong in ("", "wishful", "replicated:0", "replicated:x", "replicated:1000", "Archived", "replicated:", 1, True):
        for use in (
            lambda given=wrong: session.set("a", 1, durability=given),
            lambda given=wrong: session.update("a", {}, durability=given),
            lambda given=wrong: session.version(durability=given),
        ):
            with pytest.raises(InvalidValue, match=r"durability is 'memory', 'replicated'"):
                await use()
        for begin in (store.durable, lambda given: session.turn(durability=given)):
            with pytest.raises(InvalidValue, match="durability"):
                begin(wrong)
    assert not await session.exists(fresh=True)
    assert await session.version(durability="archived") == 0, (
        "of a record that was never written there is nothing to keep"
    )


def test_settings_and_levels_know_the_same_words() -> None:
    for text in ("memory", "replicated", "replicated:1", "replicated:12", "fsynced", "archived"):
        assert Settings.of(durability=text).durability == level_of(text).text == text
        assert level_of(text) is level_of(text), "it is compared by identity"
    for text in ("", "memory ", "replicated:0", "replicated:01", "fsync", "archived:1"):
        with pytest.raises(ConfigurationError, match="durability"):
            Settings.of(durability=text)
        with pytest.raises(InvalidValue, match="durability"):
            level_of(text)
    assert (level_of("replicated").replicas, level_of("replicated:3").replicas, MEMORY.replicas) == (EVERY, 3, 0)


@pytest.mark.only(warm="fake")
async def test_the_embedded_server_has_neither_replicas_nor_a_file(opener: Any) -> None:
    store = await quiet(opener)
    for level in ("replicated", "replicated:1", "fsynced"):
        with pytest.raises(ConfigurationError, match="embedded"):
            store.durable(level)
        with pytest.raises(ConfigurationError, match="embedded"):
            await store.session("s").set("a", 1, durability=level)
    assert not await store.session("s").exists()
    await store.close()
    for level in ("replicated", "fsynced"):
        with pytest.raises(ConfigurationError, match="'memory' and 'archived'"):
            await quiet(opener, durability=level)


# A turn that is begun again


async def repeated(store: Any) -> None:
    """A turn that was told that it is not archived, and is begun again under its request id."""
    session, home = store.session("s"), core(store)._lifecycle.cold
    archive = home.archive
    home.archive = _away
    with pytest.raises(DurabilityUnknown):
        async with session.turn(request_id="r", durability="archived") as turn:
            turn.outcome = "Oslo"
    for _ in range(2):
        with pytest.raises(DurabilityUnknown):
            async with session.turn(request_id="r", durability="archived"):
                raise AssertionError("it begins, and its first one is not archived")
    home.archive = archive
    async with session.turn(request_id="r", durability="archived") as turn:
        assert turn.repeated
    assert turn.outcome == "Oslo"
    assert archived(store) == turn.answered_version


def _away(batches: Any) -> Any:
    raise ColdUnavailable("away")


async def test_a_turn_that_is_repeated_is_acknowledged_at_its_level_only(opener: Any) -> None:
    await repeated(await quiet(opener))


async def test_negative_control_a_repeated_turn_that_is_not_confirmed_is_noticed(
    opener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def confirmed(*_: Any) -> None: ...

    monkeypatch.setattr("distributed_state.conversation.turn.ensure_version", confirmed)
    with pytest.raises(AssertionError, match="it begins"):
        await repeated(await quiet(opener))


# fsynced


@single
async def test_a_server_that_never_keeps_its_word_is_refused_at_open(opener: Any) -> None:
    always = ("--appendfsync", "always")
    for options in (
        (),
        ("--appendonly", "yes"),  # everysec: Redis 7.0 has no WAITAOF, and Valkey's says so too early
        always,
        ("--appendonly", "yes", *always, "--no-appendfsync-on-rewrite", "yes"),
    ):
        refused = pytest.raises(ConfigurationError, match="configure appendonly yes, appendfsync always")
        with own_server(opener, *options) as server, refused:
            await quiet(opener, url=server.url, durability="fsynced")


@single
async def test_with_appendfsync_always_a_write_is_kept_and_a_change_of_the_server_is_noticed(opener: Any) -> None:
    with own_server(opener, "--appendonly", "yes", "--appendfsync", "always") as server:
        store = await quiet(opener, url=server.url, durability="fsynced")
        session = store.session("s")
        await session.set("a", 1)
        await noticed(session, server)
        server.kill()
        server.start()
        assert await session.get("a", fresh=True) == 2
        assert core(store)._lifecycle.tiers().confirming.missed == {"fsynced": 1}


async def noticed(session: Any, server: Any) -> None:
    server.ask("CONFIG", "SET", "appendfsync", "everysec")
    with pytest.raises(DurabilityUnknown, match="appendfsync everysec") as report:
        await session.set("a", 2)
    assert report.value.version == await session.version(fresh=True) == 2
    server.ask("CONFIG", "SET", "appendfsync", "always")
    assert await session.version(durability="fsynced") == 2


@single
async def test_negative_control_a_policy_that_nobody_looks_at_is_noticed(
    opener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with own_server(opener, "--appendonly", "yes", "--appendfsync", "always") as server:
        store = await quiet(opener, url=server.url, durability="fsynced")
        await store.session("s").set("a", 1)
        monkeypatch.setattr(confirming, "_lacking", lambda answer: "")
        with pytest.raises(pytest.fail.Exception):
            await noticed(store.session("s"), server)


def test_waitaof_is_believed_of_redis_from_7_2_on() -> None:
    """Valkey calls itself Redis 7.2.4 beside its own version."""
    assert believed({"redis_version": "7.2.0"})
    assert believed({"redis_version": "8.0.1", "server_name": "redis"})
    assert not believed({"redis_version": "7.0.15"})
    assert not believed({"redis_version": "7.2.4", "server_name": "valkey", "valkey_version": "9.1.2"})
    assert not believed({"redis_version": "7.2.4", "server_name": "another"})


@pytest.mark.only(api=("asyncio", "blocking"), warm="valkey", cold="sqlite")
async def test_waitaof_is_waited_for_where_it_is_believed(opener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Valkey's stands in for Redis' 7.2, which says the same a little later."""
    monkeypatch.setattr(confirming, "believed", lambda info: True)
    with own_server(opener, "--appendonly", "yes", "--appendfsync", "everysec") as server:
        store = await quiet(opener, url=server.url, durability="fsynced", timeout=20.0)
        assert await store.session("s").set("a", 1) == 1
        calls = server.info("commandstats")
        assert int(calls["cmdstat_waitaof"].split(",")[0].removeprefix("calls=")) >= 2, "at open, and for the write"
    with own_server(opener) as server, pytest.raises(ConfigurationError, match="no append-only file"):
        await quiet(opener, url=server.url, durability="fsynced", namespace="other")


# The doctor


@single
async def test_the_doctor_says_whether_the_level_can_be_kept_now(opener: Any) -> None:
    with own_server(opener) as server:
        store = await quiet(opener, url=server.url)
        found = await store.admin.doctor()
        assert finding(found, "durability").found == "memory"
        assert not finding(found, "persistence").ok
        await store.close()
        store = await quiet(opener, url=server.url, durability="archived")
        assert finding(await store.admin.doctor(), "persistence").ok, "what SQL has needs no file of Redis"
        await store.close()
        store = await quiet(opener, url=server.url, durability="replicated")
        told = finding(await store.admin.doctor(), "durability")
        assert not told.ok
        assert "0 of 1 replicas" in told.found
