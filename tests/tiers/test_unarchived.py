"""Unarchived commits: writers keep them until they are archived, byte for byte as the journal has them."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest
from below import redis_of, tiers, until
from counting import asked
from proxy import Proxy
from reaping import Sweeps

from distributed_state import Backpressure, ColdUnavailable, Encryption, KeyRing, PutItem
from distributed_state.values.journal import JournalEntry, pack_entries, unpack, unpack_entries
from distributed_state.values.model import DELETED, OWNER, escape
from distributed_state.warm.scripts import COMMIT, EMIT

single = pytest.mark.only(warm="single")
real = pytest.mark.only(warm="real")
KEYS = KeyRing({"new": b"n" * 32})
MEMORY = 64 * 2**20  # bytes


def message(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def journal(store: Any) -> list[JournalEntry]:
    """Every commit that the journals hold, without the size that they had."""
    found: list[JournalEntry] = []
    with redis_of(store) as client:
        for partition in range(tiers(store).settings.partitions):
            rows = client.xrange(tiers(store).keys.partition(partition).journal)
            entries = [JournalEntry.read(id, [b"h", row[b"h"], b"d", row[b"d"]]) for id, row in rows]
            found += [replace(entry, total_bytes=0) for entry in entries]
    return found


def unarchived(store: Any) -> list[JournalEntry]:
    """All unarchived commits of a replica, by partition and offset."""
    memory = tiers(store).unarchived
    found: list[JournalEntry] = []
    for partition in sorted(memory.partitions()):
        for epoch in {each[1] for each in memory._kept[partition]}:
            found += sorted(memory.entries(partition, epoch), key=lambda entry: entry.offset)
    return [replace(entry, total_bytes=0) for entry in found]


async def every_commit_of_items(store: Any) -> None:
    user = store.user("items")
    items = user.items("x")
    await user.write(set={"a": 1}, items=[PutItem(collection="x", key="a", value=b"\1")])
    await items.put_missing({"a": 2, "b": 2})
    await items.put("a", 3, if_present=True)
    await items.delete("b", "none")
    await user.clear(items=True)
    await items.put("a", 4)
    await user.rollback(version=3)
    session = store.session("items", user="u2")
    await session.clear(items=True)  # it never had any
    await session.write(append=[message("x")], items=[PutItem(collection="x", key="a", value=1)])
    await session.fork("items forked")
    await store.delete("items")


async def every_commit_of_inputs(store: Any) -> None:
    session = store.session("inputs", user="u3", idle=1000, lifetime=5000)
    for text in "abc":
        await session.post(message(text), request_id=text)
    await session.post(message("no request"))
    await session.withdraw(2)
    async with session.turn(request_id="r1") as turn:
        turn.append(*(each.message for each in turn.take()))
        turn.move_to("planning")
        turn["n"] = 1
        turn.tag("topic", "x")
        turn.put_item("x", "a", 1)
        await session.withdraw(3)
        turn.outcome = "done"
    await session.post(message("d"))
    async with session.turn() as turn:
        turn.take()
    for number in range(7, 42):  # more than are remembered
        await session.post(message("x"), request_id=f"r{number}")
        assert await session.withdraw(number - 1)


async def every_kind_of_commit(store: Any, *, encrypted: bool = False) -> None:
    await every_commit_of_items(store)
    await every_commit_of_inputs(store)
    session = store.session("s", user="u1", idle=1000, lifetime=5000)
    await session.write(set={"a": 1, "b": "x"}, append=[message("first")], phase="planning")
    await session.set("a", {"deep": [1, None]})
    await session.set("short", 1, ttl=1000)
    await session.delete("b")
    await session.increment("n", 5)
    await session.increment("f", 0.5)
    sums = {} if encrypted else {"n": 2, "m": -1}  # what is encrypted no server can add to
    await session.write(increment=sums, set={"z": 0}, append=[message("second"), message("third")])
    await session.append(message("é"))
    await session.append_to("list", 1, 2)
    await session.update("object", {"k": "v"})
    await session.transition("plan_ready")
    await session.set_lifetime(idle=500)
    await session.set_lifetime(idle=None, lifetime=None)
    await session.checkpoint("label")
    await session.clear(messages=True)
    await session.append(message("after"))
    async with session.lock():
        await session.set("under", "a lease")
    async with session.turn(request_id="r1") as turn:
        turn.append(message("in a turn"))
        turn["t"] = 1
        turn.outcome = "done"
    with store.acting_as("support:ada\n"):
        await session.set("a", 2)
    async with store.batch() as batch:
        batch.on(session).set("in", "batch")
        batch.on(store.user("u1")).set("trips", 1)
    await session.fork("t")
    await session.rollback(version=2)
    await store.delete("s")
    await session.rollback(version=2)  # begins anew: with another lifetime, and its event


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
@real
async def test_what_is_unarchived_is_what_the_journal_holds(opener: Any, encrypted: bool) -> None:
    """Every kind of step, byte for byte: events with their numbers, lifetimes, owners, dates of messages."""
    store = await opener(archiver=False, unarchived_bytes=MEMORY, encryption=Encryption(KEYS) if encrypted else None)

    async def kept(calls: Any) -> list[Any]:
        return [[b"ok"] for _ in calls]

    tiers(store).warm.partitions.trim = kept  # a fork and a rollback archive what they read from; all is to be compared
    await every_kind_of_commit(store, encrypted=encrypted)
    written = {entry.event: entry for entry in await journal(store)}
    found = {entry.event: entry for entry in unarchived(store)}
    assert found.keys() == written.keys()
    for event, entry in found.items():
        assert entry == written[event]
    steps = {op.kind for entry in written.values() for op in unpack(entry.data)}
    assert steps == {b"s", b"d", b"c", b"w", b"m", b"l", b"e", b"p", b"q"}
    assert sum(op.name == OWNER for entry in written.values() for op in unpack(entry.data)) >= 2
    assert max(entry.token for entry in written.values()) > 0
    assert {entry.actor for entry in written.values()} >= {"", escape("support:ada\n")}


@real
async def test_the_commit_that_begins_an_expired_session_again_is_kept_whole(opener: Any) -> None:
    store = await opener(archiver=False, unarchived_bytes=MEMORY, session_idle=0.05, expired="begin again")
    for session in store.session("s", user="u1"), store.session("items"), store.session("inputs"):
        await session.write(set={"a": 1}, items=[PutItem(collection="x", key="a", value=1)])
    sweeps = Sweeps(store)
    while sweeps.reaper.expired < 3:
        await until(sweeps)
    await store.session("inputs", user="u2").post(message("again"), request_id="r")
    await store.session("s", user="u2").append(message("again"))
    await store.session("items").write(items=[PutItem(collection="x", key="b", value=1)])
    written = {entry.event: entry for entry in await journal(store)}
    assert {entry.event: entry for entry in unarchived(store)} == written
    begun = [entry for entry in written.values() if entry.version == 3]
    assert [sum(op[:2] == (b"d", DELETED) for op in unpack(entry.data)) for entry in begun] == [1, 1, 1]


@real
async def test_entries_travel_as_they_are(opener: Any) -> None:
    store = await opener(archiver=False, unarchived_bytes=MEMORY)
    await every_kind_of_commit(store)
    found = unarchived(store)
    assert found
    assert unpack_entries(pack_entries(found)) == found


@pytest.mark.wide
@real
async def test_what_is_archived_is_no_longer_unarchived(opener: Any) -> None:
    """By the answer to the next commit; and who writes no more lets go of it as well."""
    store = await opener(archiver=False, unarchived_bytes=MEMORY)
    memory = tiers(store).unarchived
    session = store.session("s")
    for n in range(5):
        await session.set("n", n)
    assert (len(memory), memory.bytes > 0) == (5, True)
    await store.admin.archive()
    await session.set("n", 5)
    assert [entry.version for entry in unarchived(store)] == [6]
    await store.admin.archive()
    await until(lambda: not len(memory), 60.0)
    assert memory.bytes == 0


@real
async def test_a_replica_without_unarchived_commits_asks_nobody(opener: Any) -> None:
    store = await opener(archiver=False, unarchived_bytes=MEMORY, beat=0)
    await store.session("s").set("n", 1)
    await store.admin.archive()
    await until(lambda: not len(tiers(store).unarchived), 60.0)
    with asked(store) as seen:
        await tiers(store).gathering.answer()
        await tiers(store).unarchived.look()
    assert not seen.sent


@real
async def test_a_batch_and_many_tasks_are_kept_whole(opener: Any) -> None:
    store = await opener(archiver=False, unarchived_bytes=MEMORY)

    async def write(me: int) -> None:
        for n in range(10):
            async with store.batch() as batch:
                batch.on(store.session(f"{me}")).set("n", n)
                batch.on(store.user("shared")).increment("n", 1)

    await asyncio.gather(*(write(me) for me in range(4)))
    written = {entry.event: entry for entry in await journal(store)}
    assert {entry.event: entry for entry in unarchived(store)} == written
    assert len(written) == 80
    kept = [each for some in tiers(store).unarchived._kept.values() for each in some]
    assert tiers(store).unarchived.bytes == sum(each[2] for each in kept)


@single
async def test_a_commit_whose_answer_was_lost_is_kept_as_it_was(opener: Any) -> None:
    """With the offset and the time at which it was applied, not those of the repetition."""
    other = await opener(archiver=False, unarchived_bytes=MEMORY)
    with Proxy(opener.url) as proxy:
        store = await opener(url=proxy.url, archiver=False, unarchived_bytes=MEMORY)
        session = store.session("s")
        await session.set("n", 1)
        loss = proxy.lose(COMMIT.sha)
        task = asyncio.ensure_future(session.write(append=[message("lost")], phase="p"))
        await until(loss.happened.is_set, 60.0)
        await other.session("s").set("n", 2)
        loss.go.set()
        await task
        mine = {entry.event: entry for entry in unarchived(store)}
        written = {entry.event: entry for entry in await journal(store)}
        assert sorted(entry.version for entry in mine.values()) == [1, 2]
        assert all(written[event] == entry for event, entry in mine.items())


@single
async def test_a_commit_that_only_a_replaced_server_had_is_sent_again(opener: Any) -> None:
    """A primary that was held up says that it applied the write, and is replaced before its journal is read."""
    with Proxy(opener.url) as proxy:
        store = await opener(url=proxy.url, archiver=False, unarchived_bytes=MEMORY)
        session = store.session("s")
        await session.set("n", 1)
        partitions = tiers(store).warm.partitions
        find, asked = partitions.find, list[str]()

        async def elsewhere(keys: Any, event: str) -> Any:
            asked.append(event)
            return ("", None) if len(asked) == 1 else await find(keys, event)

        partitions.find = elsewhere
        loss = proxy.lose(COMMIT.sha)
        task = asyncio.ensure_future(session.set("n", 2))
        await until(loss.happened.is_set, 60.0)
        loss.go.set()
        assert await task == 2
        assert len(asked) == 2
        assert [entry.version for entry in unarchived(store)] == [1, 2]


@real
async def test_events_that_were_written_alone_are_kept(opener: Any) -> None:
    store = await opener(archiver=False, unarchived_bytes=MEMORY, encryption=Encryption(KEYS))
    await store.emit("shop.opened", {"n": 1})
    with store.acting_as("ada"):
        await store.emit("shop.closed", {"n": 2}, subject=store.session("s"))
    written = {entry.event: entry for entry in await journal(store)}
    assert {entry.event: entry for entry in unarchived(store)} == written
    assert sorted(entry.actor for entry in written.values()) == ["", "ada"]


@single
async def test_an_event_whose_answer_was_lost_is_kept_as_it_was(opener: Any) -> None:
    with Proxy(opener.url) as proxy:
        store = await opener(url=proxy.url, archiver=False, unarchived_bytes=MEMORY)
        await store.emit("shop.opened")
        loss = proxy.lose(EMIT.sha)
        task = asyncio.ensure_future(store.emit("shop.closed", {"n": 2}))
        await until(loss.happened.is_set, 60.0)
        loss.go.set()
        await task
        written = {entry.event: entry for entry in await journal(store)}
        found = {entry.event: entry for entry in unarchived(store)}
        assert len(written) == 2
        assert all(written[event] == entry for event, entry in found.items())
        # Under load the first answer may have come too late as well, and SQL was asked for it.
        home = tiers(store)
        keys = home.keys.partition(0)
        epoch = (await home.warm.partitions.states([keys]))[0].epoch
        lacking = await home.port.sql(home.cold.lacking, 0, epoch, list(written.values()))
        assert lacking <= found.keys()


@pytest.mark.wide
@pytest.mark.only(warm="single", api="blocking")
async def test_what_is_unarchived_is_counted_truthfully(opener: Any) -> None:
    """By what is freed when it is let go: at least that much was counted, and not many times as much."""
    store = await opener(archiver=False, unarchived_bytes=MEMORY, beat=0, max_staleness=0)
    await tiers(store).gathering.close()  # looks at nothing meanwhile
    session = store.session("s")
    for write in (
        lambda n: session.set("n", 1000 + n),
        lambda n: session.set("n", f"{n}" * 500),
        lambda n: session.set_many({f"k{at}": f"{n} {at}" for at in range(10)}),
        lambda n: session.append(message(f"number {n}")),
        lambda n: session.write(phase=f"phase {n}"),
    ):
        await write(0)
        # Other threads allocate, too: the middle one of three.
        ratios = sorted([await counted_for_each_freed(store, write) for _ in range(3)])
        assert 1 <= ratios[1] <= 3, ratios


async def counted_for_each_freed(store: Any, write: Any) -> float:
    """The bytes that 80 writes are counted as, for each byte that is freed when they are let go."""
    memory = tiers(store).unarchived
    tracemalloc.start()
    try:
        for n in range(80):
            await write(n)
        kept = [each for some in memory._kept.values() for each in some][-80:]
        counted = sum(each[2] for each in kept)
        del kept
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for partition in memory.partitions():
            memory.archived(partition, tiers(store).epoch(partition), 10**9)
        gc.collect()
        freed = before - tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert (len(memory), memory.bytes) == (0, 0)
    return float(counted / freed)


@real
async def test_at_its_bound_a_writer_archives_and_goes_on(opener: Any) -> None:
    store = await opener(archiver=False, unarchived_bytes=20_000)
    memory = tiers(store).unarchived
    session = store.session("s")
    for n in range(100):
        await session.set("n", n)
        assert memory.bytes < 22_000
    assert [change.set["n"] for change in await session.history()] == list(range(100))


@real
async def test_at_its_bound_with_sql_away_a_writer_is_refused_and_nothing_is_forgotten(
    opener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await opener(archiver=False, unarchived_bytes=10_000, retry_for=1.0)
    home = tiers(store)
    session = store.session("s")

    def away(*_: Any) -> Any:
        raise ColdUnavailable("away")

    with monkeypatch.context() as patch:
        patch.setattr(home.cold, "archive", away)
        written = 0
        with pytest.raises(Backpressure, match=r"unarchived_bytes=10000: .*away"):
            for n in range(1000):
                await session.set("n", n)
                written += 1
        assert 2 < written < 40
        assert [entry.version for entry in unarchived(store)] == list(range(1, written + 1))
    await session.set("n", -1)
    assert await session.version(fresh=True) == written + 1


@pytest.mark.only(warm="fake")
async def test_an_embedded_store_keeps_nothing(store: Any) -> None:
    """What its server loses, its process lost with it."""
    await store.session("s").set("n", 1)
    assert (len(tiers(store).unarchived), tiers(store).unarchived.enabled) == (0, False)


@real
async def test_switched_off_nothing_is_kept(opener: Any) -> None:
    store = await opener(archiver=False, unarchived_bytes=0)
    await store.session("s").set("n", 1)
    assert len(tiers(store).unarchived) == 0
