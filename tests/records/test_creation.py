"""A write that begins a record needs no SQL where Redis has all known ids. Law: no record begins twice."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from below import keys_of, redis_of, tiers
from controls import sabotage
from counting import asked
from sqlalchemy import event, insert
from sync_api import core

from distributed_state import ColdUnavailable, StateStore
from distributed_state.cold import record_index, tables
from distributed_state.cold.store import ColdStore
from distributed_state.programs.servers import RedisServer, redis_server
from distributed_state.tiers.changes import Changes
from distributed_state.values.codec import Codec
from distributed_state.warm.answers import Cold, Committed
from distributed_state.warm.partitions import packed_ids

QUIET: dict[str, Any] = {"archiver": False, "durability": "memory"}
NOTED = "if is_new then call('HSET', meta, place, listed .. mark) end"
single = pytest.mark.only(warm="single")
control = pytest.mark.only(api="asyncio", warm="redis")


def beside(store: Any, id: str) -> str:
    """An id of another session in the same partition."""
    partition = keys_of(store, id).partition
    return next(other for n in range(10_000) if keys_of(store, other := f"{id}-beside-{n}").partition == partition)


async def started(store: Any, id: str = "s") -> None:
    """Let the partition of a session begin, and time go on: what is as old as an epoch is not begun without SQL."""
    await store.session(beside(store, id)).set("a", 1)
    await asyncio.sleep(0.1)


def cold(store: Any) -> Any:
    return core(store)._lifecycle.cold


@contextmanager
def statements(store: Any) -> Iterator[list[str]]:
    """What the store sends to SQL while the block runs."""
    sent: list[str] = []
    engine = cold(store).database._engine

    def note(*given: Any) -> None:
        sent.append(given[2])

    event.listen(engine, "before_cursor_execute", note)
    try:
        yield sent
    finally:
        event.remove(engine, "before_cursor_execute", note)


def gone(store: Any, *ids: str) -> None:
    """Take archived records out of Redis, as their TTL would."""
    with redis_of(store) as client:
        for id in ids:
            assert client.pttl(keys_of(store, id).record) > 0, "only archived records may go"
            client.delete(keys_of(store, id).record)


def emptied(store: Any) -> None:
    """Take everything out of Redis that belongs to the store."""
    with redis_of(store) as client:
        for key in client.scan_iter(f"{core(store).settings.namespace}:{{*"):
            client.delete(key)


# What it costs


@single
async def test_a_new_name_is_one_script_and_no_sql(opener: Any) -> None:
    store = await opener(**QUIET)
    await started(store)
    with asked(store) as seen, statements(store) as sent:
        await store.session("s").set("a", 1)
    assert [each.split()[0] for each in seen.sent] == ["EVALSHA"]
    assert sent == []
    assert await store.session("s").get_all(fresh=True) == {"a": 1}


@single
async def test_many_new_names_are_one_exchange_and_no_sql(opener: Any) -> None:
    store = await opener(**QUIET)
    ids = [f"s{number}" for number in range(20)]
    for id in ids:
        await store.session(beside(store, id)).set("a", 1)
    await asyncio.sleep(0.1)
    with asked(store) as seen, statements(store) as sent:
        async with store.batch() as batch:
            for id in ids:
                batch.on(store.session(id)).set("a", 1)
    assert len(seen.sent) == len(ids)
    assert sent == []


@single
async def test_where_names_are_not_known_sql_is_asked(opener: Any) -> None:
    """Negative control: the two above would see it."""
    with sabotage("install", "if known == '1' then", "if false then"):
        store = await opener(**QUIET)
        await started(store)
        with asked(store) as seen, statements(store) as sent:
            await store.session("s").set("a", 1)
    assert len(seen.sent) == 2
    assert sent


@single
async def test_a_session_begins_though_sql_is_away(opener: Any, monkeypatch: Any) -> None:
    store = await opener(**QUIET)
    await started(store)

    def away(*_: Any, **__: Any) -> Any:
        raise ColdUnavailable("SQL is away")

    monkeypatch.setattr(cold(store), "load", away)
    assert await store.session("s").set("a", 1) == 1
    with pytest.raises(ColdUnavailable):
        await store.session("another").get("a", fresh=True)


@pytest.mark.replicas
async def test_a_session_begins_once_whoever_writes_first(opener: Any) -> None:
    """Each says that it may be new; the event is written with the commit that began it."""
    stores = [await opener(**QUIET) for _ in range(3)]
    await started(stores[0])
    for store in stores:
        await store.session("s", user="u").set("a", 1)
    assert await stores[0].session("s").version(fresh=True) == 3
    with redis_of(stores[0]) as client:
        events = client.xrange(
            core(stores[0])._lifecycle.context.keys.partition(keys_of(stores[0], "s").partition).events
        )
    heads = [fields[b"h"].split(b"\n") for _, fields in events]
    assert [head[1] for head in heads if head[2] == b"session:s"] == [b"conversation.created"]
    assert tiers(stores[1]).warm.emitted == 0, "who did not begin it has told nothing"


# None begins twice


@pytest.mark.replicas
async def test_what_was_archived_and_is_gone_goes_on(opener: Any) -> None:
    await goes_on(opener)


async def goes_on(opener: Any) -> None:
    store, other = await opener(**QUIET), await opener(**QUIET)
    await started(store)
    await store.session("s").set("a", 1)
    await store.admin.archive()
    gone(store, "s")
    assert await other.session("s").set("b", 2) == 2
    assert await other.session("s").get_all(fresh=True) == {"a": 1, "b": 2}


@control
async def test_without_noting_the_names_it_begins_again(opener: Any) -> None:
    with sabotage("commit", NOTED, ""), pytest.raises(AssertionError):
        await goes_on(opener)


@single
async def test_a_generated_id_is_noted_too(opener: Any) -> None:
    store, other = await opener(**QUIET), await opener(**QUIET)
    session = store.session()
    await started(store, session.id)
    await session.set("a", 1)
    await store.admin.archive()
    gone(store, session.id)
    assert await other.session(session.id).set("b", 2) == 2


@single
async def test_a_new_epoch_knows_what_sql_has(opener: Any) -> None:
    await known_anew(opener)


async def known_anew(opener: Any, *, id: str = "s", listed: bool = True) -> None:
    store, other = await opener(**QUIET), await opener(**QUIET)
    await store.session(id).set("a", 1)
    await store.admin.archive()
    emptied(store)
    await started(store, id)
    with statements(other) as sent:
        assert await other.session(id).set("b", 2) == 2
    assert sent
    with statements(other) as sent:
        await other.session(beside(store, beside(store, id))).set("a", 1)
    assert bool(sent) is not listed, "others are known to be new"
    assert await store.session(id).get_all(fresh=True) == {"a": 1, "b": 2}


@control
async def test_without_asking_sql_for_the_names_it_would_begin_again(opener: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(ColdStore, "known_names", lambda *_: [])
    with pytest.raises(AssertionError, match="assert 1 == 2"):
        await known_anew(opener)


@control
async def test_without_the_epoch_of_the_names_it_would_begin_again(opener: Any, monkeypatch: Any) -> None:
    """Fields that an epoch left behind say nothing about what was archived under the next."""
    monkeypatch.setattr(record_index, "LISTED", 0)
    await known_anew(opener, listed=False)
    with sabotage("commit", "complete == current and ", ""), pytest.raises(AssertionError, match="assert 1 == 2"):
        await known_anew(opener, id="t", listed=False)


@single
async def test_an_erased_record_does_not_begin_at_its_first_version(opener: Any) -> None:
    await erased(opener)


async def erased(opener: Any) -> None:
    """SQL has its version under a hash; Redis keeps the name, and after it was emptied nobody can know it."""
    store, other = await opener(**QUIET), await opener(**QUIET)
    await started(store)
    await store.session("s").set("a", 1)
    assert await store.erase("s")
    assert await other.session("s").create({"b": 2}) > 2
    assert await store.erase("s")
    emptied(store)
    await started(store)
    third = await opener(**QUIET)
    assert await third.session("s").create({"c": 3}) > 4


@control
async def test_without_a_look_at_the_erased_it_would(opener: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(record_index, "ERASED", "nothing")
    with pytest.raises(AssertionError):
        await erased(opener)


@single
async def test_what_is_imported_is_not_begun(opener: Any) -> None:
    await imported(opener)


async def imported(opener: Any) -> None:
    store, other = await opener(**QUIET), await opener(**QUIET)
    await started(store)
    await store.session("origin").write(set={"a": 1})
    await store.session("origin").set("a", 2)
    await store.admin.import_(await store.admin.export("origin"), id="s")
    assert await other.session("s").set("b", 2) == 3
    assert await other.session("s").get_all(fresh=True) == {"a": 2, "b": 2}


@control
async def test_without_its_name_it_would_be(opener: Any) -> None:
    with sabotage("reserve", "if is_new then", "if false then"), pytest.raises(AssertionError):
        await imported(opener)


@single
async def test_an_import_across_the_beginning_of_an_epoch_is_refused(opener: Any, monkeypatch: Any) -> None:
    """Its name was noted under the former one, and SQL was asked for those of the next before it was there."""
    store = await opener(**QUIET)
    await started(store)
    await store.session("origin").set("a", 1)
    lines = await store.admin.export("origin")
    adopt = cold(store).adopt

    def late(record: str, **given: Any) -> None:
        assert cold(store).mint(given["partition"], cold(store).cursor(given["partition"])) is not None
        adopt(record, **given)

    monkeypatch.setattr(cold(store), "adopt", late)
    with pytest.raises(ColdUnavailable, match="began epoch"):
        await store.admin.import_(lines, id="s")
    assert cold(store).load("session:s", window=1) is None


@single
async def test_an_import_under_an_epoch_that_is_over_in_redis_is_refused(opener: Any) -> None:
    store = await opener(**QUIET)
    await started(store)
    assert not await tiers(store).warm.partitions.reserve(keys_of(store, "s"), "1-another")


async def test_what_lies_in_quarantine_is_a_name_too(store: Any) -> None:
    """Redis may have it, and its next commit brings it to SQL."""
    await started(store)
    await store.admin.archive()
    keys = keys_of(store, "s")
    row = {
        "namespace": cold(store).namespace, "partition": keys.partition, "epoch": "1-a", "offset": 1, "event": "e",
        "record": "session:s", "version": 1, "reason": "r", "data": b"", "time_ms": 1,
    }  # fmt: skip
    with cold(store).database.write() as connection:
        connection.execute(insert(tables.quarantine), row)
    assert set(cold(store).known_names(keys.partition)) == {"session:s", f"session:{beside(store, 's')}"}


EVICT = "if redis.call('PTTL', KEYS[1]) > 0 then redis.call('DEL', KEYS[1]) end"


def at_random(server: RedisServer, archive: str, seed: int) -> dict[str, list[int]]:
    """The versions that three replicas were given, who write to names at random; records go, and Redis is emptied."""
    chance = random.Random(seed)
    given: dict[str, list[int]] = {f"s{number}": [] for number in range(200)}
    over = threading.Event()

    def write(store: StateStore, chance: random.Random) -> None:
        for id in chance.choices(list(given), k=80):
            given[id].append(store.session(id).set("a", chance.random()))

    def evict(client: redis.Redis) -> None:
        while not over.wait(0.005):
            for key in client.scan_iter("default:*:r:session:*", _type="hash"):
                client.eval(EVICT, 1, key)

    with ExitStack() as stack:
        settings = {"archive": archive, "partitions": 2, "archive_every": 0.02}
        stores = [stack.enter_context(StateStore.open(server.url, **settings)) for _ in range(3)]
        client = stack.enter_context(redis.Redis.from_url(server.url))
        for _ in range(3):
            over.clear()
            with ThreadPoolExecutor(4) as pool:
                evicting = pool.submit(evict, client)
                writing = [pool.submit(write, store, random.Random(chance.random())) for store in stores]
                wait(writing)
                over.set()
                for each in (evicting, *writing):
                    each.result()
            stores[0].admin.archive()
            client.flushall()
    return given


@pytest.mark.wide
@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.full) for n in (0, 2, 3))])
def test_whatever_goes_when_no_version_is_given_twice(seed: int, tmp_path: Path) -> None:
    with redis_server() as server:
        given = at_random(server, f"sqlite:///{tmp_path}/archive.db", seed)
    for versions in given.values():
        assert sorted(versions) == list(range(1, len(versions) + 1))


@pytest.mark.wide
@pytest.mark.parametrize("guard", ["noted", "listed"])
def test_without_the_names_versions_are_given_twice(guard: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Negative control: nobody notes what is begun, or what SQL had."""
    if guard == "listed":
        monkeypatch.setattr(ColdStore, "known_names", lambda *_: [])
    with redis_server() as server, sabotage("commit", NOTED, "" if guard == "noted" else NOTED):
        given = at_random(server, f"sqlite:///{tmp_path}/archive.db", 1)
    assert any(versions.count(1) > 1 for versions in given.values())


# A request that lay about


@single
async def test_a_request_from_before_the_epoch_begins_nothing(opener: Any) -> None:
    await lay_about(opener)


async def lay_about(opener: Any) -> None:
    """Its repetition may have been applied, and lost with the former data: who remembers that brings it to SQL."""
    store = await opener(**QUIET)
    await started(store)
    changes = Changes(tiers(store).settings, Codec("", ""))
    changes.increment("n", 1)
    draft = changes.draft("increment")
    op = tiers(store).warm.ops.begin(draft.operations)
    op.creation = "+"
    op.since_ms = tiers(store).clock.earliest_ms() - 10_000
    op.doubted = True
    answer = await tiers(store).warm.commit(keys_of(store, "s"), draft, op)
    assert isinstance(answer, Cold)


@control
async def test_without_its_time_it_begins_a_record(opener: Any) -> None:
    guard = "(creation == '*' or creation == '+')"
    with sabotage("commit", guard, "creation == '*'"), pytest.raises(AssertionError):
        await lay_about(opener)


@single
async def test_a_request_that_comes_twice_is_applied_once(opener: Any) -> None:
    """The record was begun by the first, archived and is gone when the second comes."""
    store = await opener(**QUIET)
    await started(store)
    changes = Changes(tiers(store).settings, Codec("", ""))
    changes.increment("n", 1)
    draft = changes.draft("increment")
    op = tiers(store).warm.ops.begin(draft.operations)
    op.creation = "+"
    first = await tiers(store).warm.commit(keys_of(store, "s"), draft, op)
    assert isinstance(first, Committed)
    await store.admin.archive()
    gone(store, "s")
    op.doubted = True
    assert isinstance(await tiers(store).warm.commit(keys_of(store, "s"), draft, op), Cold)


# How names are kept


async def test_redis_and_python_write_names_alike(store: Any) -> None:
    await started(store)
    ids = ["s", "ü", "a b", "x" * 300, "7f3a", "conversation-000001", "%", "日本"]
    expected: dict[bytes, set[bytes]] = {}
    partition = keys_of(store, "s").partition
    here = [id for n in range(400) for id in (f"{ids[n % len(ids)]}{n}",) if keys_of(store, id).partition == partition]
    assert len(here) > 3
    for id in here:
        await store.session(id).set("a", 1)
    texts = [keys_of(store, id).ref.text for id in (*here, beside(store, "s"))]
    words = packed_ids(texts)
    assert words is not None
    for field, value in zip(words[::2], words[1::2], strict=True):
        expected[field] = {value[at : at + 6] for at in range(0, len(value), 6)}
    with redis_of(store) as client:
        kept = {k: v for k, v in client.hgetall(keys_of(store, "s").meta).items() if k[:1] == b"k"}
    found = {field: {value[at : at + 6] for at in range(0, len(value), 6)} for field, value in kept.items()}
    assert found == expected


@pytest.mark.wide
@control
async def test_where_there_is_no_room_sql_is_asked(opener: Any) -> None:
    """A list that is full may lack names, so it is none."""
    full = "#listed < 4092"
    with sabotage("commit", full, "#listed < 6"):
        store = await opener(**QUIET)
        await started(store)
        ids = [f"s{n}" for n in range(60_000) if keys_of(store, f"s{n}").partition == keys_of(store, "s").partition][
            :60
        ]
        for id in ids:
            await store.session(id).set("a", 1)
        await store.admin.archive()
        gone(store, *ids)
        for id in ids:
            assert await store.session(id).set("b", 2) == 2
    assert packed_ids(f"session:{number}" for number in range(20_000)) is None
