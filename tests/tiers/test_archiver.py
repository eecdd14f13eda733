"""The archiver: journal -> SQL. Law: what was acknowledged is in SQL once and in order, whoever dies on the way."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from below import Worker, everything_in_sql, keys_of, own_server, redis_of, tiers, until
from controls import sabotage
from journals import rows
from sync_api import core, in_thread

from distributed_state import (
    Backpressure,
    ColdUnavailable,
    ConfigurationError,
    DurabilityUnknown,
    StateError,
    StateStore,
)
from distributed_state.cold import archive as archiving
from distributed_state.cold import tables
from distributed_state.port.blocking import finish
from distributed_state.programs.servers import PostgresServer, postgres_server, redis_server
from distributed_state.tiers import commit as write_path
from distributed_state.values.journal import KINDS, JournalEntry, pack
from distributed_state.values.model import Ref


async def quiet(opener: Any, **settings: Any) -> Any:
    """A store that archives only when told to."""
    return await opener(**{"archiver": False, "durability": "memory"} | settings)


def place(opener: Any) -> dict[str, Any]:
    return {"url": opener.url, "archive": opener.archive, "namespace": opener.namespace}


def ttl(store: Any, id: str) -> int:
    with redis_of(store) as client:
        return int(client.pttl(keys_of(store, id).record))


def said(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


# One archiver


async def test_an_archived_commit_moves_the_cursor_and_is_a_row(opener: Any) -> None:
    store = await quiet(opener)
    session, cold = store.session("s", user="u", actor="worker"), core(store)._lifecycle.cold
    await session.write(set={"a": 1}, append=[said("hi")])
    await session.set("a", 2)
    partition = keys_of(store, "s").partition
    assert cold.version("session:s") is None
    assert cold.cursor(partition).offset == 0
    assert await store.admin.archive() == 2
    cursor = cold.cursor(partition)
    rows = cold.history("session:s")
    assert cursor.offset == 2
    assert cursor.event == rows[-1].event
    assert [(row.version, row.offset, row.kind, row.actor) for row in rows] == [
        (1, 1, "write", "worker"),
        (2, 2, "set", "worker"),
    ]
    with redis_of(store) as client:
        keys = keys_of(store, "s")
        assert [identity for identity, _ in client.xrange(keys.journal)] == [b"2-0"]
        _, offset, _, archived_offset, *_ = client.hget(keys.meta, "journal").split()
        assert (offset, archived_offset) == (b"2", b"2")
    assert await store.admin.archive() == 0


async def last_entry(store: Any, id: str) -> JournalEntry:
    """The newest entry of the journal that a session is written to."""
    keys = core(store)._lifecycle.context.keys.partition(keys_of(store, id).partition)
    [journal] = await in_its_place(store, lambda: tiers(store).warm.partitions.journals([(keys, 0)], 1000))
    found: JournalEntry = journal.onward[-1]
    return found


async def marked(store: Any, id: str, entry: JournalEntry) -> list[Any]:
    """Let a session be told that it is archived up to this entry, and the journal be trimmed to it."""
    keys, warm = keys_of(store, id), tiers(store).warm
    place, epoch = core(store)._lifecycle.context.keys.partition(keys.partition), tiers(store).epoch(keys.partition)
    told = (place, epoch, entry, [(keys, entry.version, entry.next_message)])
    return await warm.partitions.mark_archived([told]) + await warm.partitions.trim([(place, epoch, entry)])


async def only_the_archived_have_a_ttl(store: Any) -> None:
    session = store.session("s")
    await session.set("a", 1)
    assert ttl(store, "s") == -1
    await store.admin.archive()
    assert 0 < ttl(store, "s") <= 3_600_000
    await session.set("a", 2)
    assert ttl(store, "s") == -1
    # Settled late, for a version that is not the current one any more.
    await store.admin.archive()
    last = await last_entry(store, "s")
    await session.set("a", 3)
    await marked(store, "s", last)
    assert ttl(store, "s") == -1
    await store.admin.archive()
    assert ttl(store, "s") > 0


async def test_only_archived_records_have_a_ttl(opener: Any) -> None:
    """G7: what has no TTL neither expires nor is evicted."""
    await only_the_archived_have_a_ttl(await quiet(opener))


@pytest.mark.only(api="asyncio", warm="redis")
@pytest.mark.parametrize(
    "guard",
    [
        ("commit", "call('PERSIST', record)", "local _ = 0"),
        ("mark_archived", "if stored[1] - version == 0 then", "if true then"),
    ],
    ids=["no PERSIST", "TTL for any version"],
)
async def test_without_these_guards_what_is_not_archived_expires(opener: Any, guard: tuple[str, str, str]) -> None:
    """Negative controls of G7."""
    store = await quiet(opener)
    with sabotage(*guard), pytest.raises(AssertionError):
        await only_the_archived_have_a_ttl(store)


async def test_an_archived_mark_that_comes_late_makes_no_ghost(opener: Any) -> None:
    store = await quiet(opener)
    await store.session("s").set("a", 1)
    await store.admin.archive()
    keys, last = keys_of(store, "s"), await last_entry(store, "s")
    with redis_of(store) as client:
        client.delete(keys.record)
        assert await marked(store, "s", last) == [[b"gone"], [b"ok"]]
        assert not client.exists(keys.record)
    assert await store.session("s").get("a", fresh=True) == 1


async def test_an_archiver_that_died_after_sql_is_completed_by_the_next(opener: Any) -> None:
    """Killed between the SQL commit and mark_archived: the journal is not trimmed, and nothing has a TTL."""
    store = await quiet(opener)
    session = store.session("s")
    for number in range(5):
        await session.append(said(str(number)))
    archiver = tiers(store).archiver
    mark_archived = archiver._mark_archived

    async def die(passed: Any) -> None:
        raise ColdUnavailable("killed here")

    archiver._mark_archived = die  # type: ignore[method-assign]
    with pytest.raises(ColdUnavailable, match="killed here"):
        await store.admin.archive()
    assert ttl(store, "s") == -1
    keys = keys_of(store, "s")
    with redis_of(store) as client:
        assert client.xlen(keys.journal) == 5
    archiver._mark_archived = mark_archived  # type: ignore[method-assign]
    archiver._cursors.clear()  # the next one knows nothing but what SQL says
    assert await store.admin.archive() == 0
    assert ttl(store, "s") > 0
    with redis_of(store) as client:
        assert client.xlen(keys.journal) == 1
    assert [change.version for change in await session.history()] == [1, 2, 3, 4, 5]
    assert [message.content for message in await session.messages()] == list("01234")
    assert [event.type for event in await store.admin.audit()] == ["conversation.created"]


async def test_an_archiver_that_was_overtaken_writes_nothing(opener: Any) -> None:
    """The compare-and-set on the cursor: a batch read before another archiver archived it is refused whole."""
    await two_with_one_batch(await quiet(opener))


async def two_with_one_batch(store: Any) -> None:
    session, cold = store.session("s"), core(store)._lifecycle.cold
    await session.set("a", 1)
    await session.write(set={"a": 2}, phase="p")
    archive, taken = cold.archive, []

    def slow(batches: Any) -> Any:
        # Somebody else archives the very same entries while these are on their way.
        if not taken:
            taken.append(archive(batches))
        return archive(batches)

    cold.archive = slow
    await store.admin.archive()
    cold.archive = archive
    assert taken
    await session.checkpoint("c")
    await store.admin.archive()
    rows = cold.history("session:s")
    assert [row.version for row in rows] == [1, 2, 3]
    told = await store.admin.audit()
    assert [(event.sequence, event.version) for event in told] == [(1, 1), (2, 2), (3, 3)]
    assert cold.quarantined() == []


@pytest.mark.only(api="asyncio", warm="redis")
async def test_without_the_compare_and_set_the_overtaken_archiver_writes(
    opener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control of G4: what came twice is refused by the table and lands in quarantine."""
    store = await quiet(opener)
    monkeypatch.setattr(archiving, "_moved", lambda sql, batches: list(batches))
    with pytest.raises(AssertionError):
        await two_with_one_batch(store)


async def test_sql_comes_before_the_trim(opener: Any) -> None:
    """G4: while SQL refuses, the journal keeps every entry."""
    await sql_fails_once(await quiet(opener))


async def sql_fails_once(store: Any, trim_first: bool = False) -> None:
    session, cold, archiver = store.session("s"), core(store)._lifecycle.cold, tiers(store).archiver
    for number in range(3):
        await session.append(said(str(number)))
    archive = cold.archive
    keys = keys_of(store, "s")

    def fail(batches: Any) -> Any:
        raise ColdUnavailable("away")

    cold.archive = fail
    if trim_first:
        [journal] = await archiver._partitions.journals(
            [(core(store)._lifecycle.context.keys.partition(keys.partition), 0)], 100
        )
        await archiver._mark_archived({keys.partition: (journal.epoch, journal.onward)})
    with suppress(ColdUnavailable):
        await asyncio.wait_for(store.admin.archive(), 5)
    cold.archive = archive
    with redis_of(store) as client:
        assert client.xlen(keys.journal) == 3
        assert client.pttl(keys.record) == -1
    await store.admin.archive()
    assert [row.version for row in cold.history("session:s")] == [1, 2, 3]


@pytest.mark.only(api="asyncio", warm="redis")
async def test_trimming_before_sql_loses_what_sql_refused(opener: Any) -> None:
    """Negative control of G4."""
    with pytest.raises(AssertionError):
        await sql_fails_once(await quiet(opener), trim_first=True)


# When something is wrong


def rewrite(client: Any, journal: bytes, offset: int, head: Any = None, data: Any = None) -> None:
    """Change one entry of a journal as no program of ours would."""
    entries = client.xrange(journal)
    client.delete(journal)
    for identity, entry in entries:
        if identity == b"%d-0" % offset:
            entry = {b"h": head(entry[b"h"]) if head else entry[b"h"], b"d": data(entry[b"d"]) if data else entry[b"d"]}
        client.xadd(journal, entry, id=identity)


async def test_a_journal_that_does_not_continue_sql_is_no_part_of_it(opener: Any, caplog: Any) -> None:
    """Redis was put back to an older state: its entries are other ones under the same offsets."""
    store = await quiet(opener, archive_batch=1)
    session = store.session("s")
    await session.set("a", 1)
    await store.admin.archive()
    keys = keys_of(store, "s")
    with redis_of(store) as client:
        rewrite(client, keys.journal, 1, head=lambda head: b"0000." + head)
    tiers(store).archiver._cursors.clear()
    await session.set("a", 2)
    await store.admin.archive()
    assert core(store)._lifecycle.cold.version("session:s") == 1
    assert "do not continue SQL's history" in caplog.text
    assert await session.get("a", fresh=True) == 1
    assert await session.set("a", 3) == 2
    assert [change.set["a"] for change in await session.history()] == [1, 3]
    assert await store.admin.branches(session.id)


@pytest.mark.parametrize("knows_the_cursor", [True, False])
async def test_redis_put_back_to_an_older_state_is_noticed(opener: Any, knows_the_cursor: bool) -> None:
    """What is written after it has offsets that SQL passed long ago; it must not be taken for archived."""
    store = await quiet(opener, max_staleness=0)
    session = store.session("s")
    await session.set("a", 0)
    await store.admin.archive()
    keys = keys_of(store, "s")
    with redis_of(store) as client:
        older = {name: client.dump(name) for name in (keys.journal, keys.meta, keys.record)}
        for number in range(1, 6):
            await session.set("a", number)
        await store.admin.archive()
        for name, dump in older.items():
            client.restore(name, 0, dump, replace=True)
    if not knows_the_cursor:
        tiers(store).archiver._cursors.clear()
    await session.set("a", "later")
    await store.admin.archive()
    assert await session.get("a", fresh=True) == 5
    (branch,) = await store.admin.branches(session.id)
    assert (branch.base, branch.commits) == (1, 1)
    assert await session.set("a", 6) == 7


async def what_has_other_entries_stays(store: Any) -> None:
    """Redis came back older between the reading of its journal and the settling of that."""
    session = store.session("s")
    await session.set("a", 1)
    await session.set("a", 2)
    keys, last = keys_of(store, "s"), await last_entry(store, "s")
    with redis_of(store) as client:
        rewrite(client, keys.journal, 2, head=lambda head: b"0000." + head)
        await marked(store, "s", last)
        assert client.pttl(keys.record) == -1
        assert client.xlen(keys.journal) == 2
        assert client.hget(keys.meta, "journal").split()[3] == b"0"


async def test_a_journal_with_other_entries_is_neither_marked_nor_trimmed(opener: Any) -> None:
    await what_has_other_entries_stays(await quiet(opener))


@pytest.mark.only(api="asyncio", warm="redis")
@pytest.mark.parametrize("script", ["mark_archived", "trim"])
async def test_without_a_look_at_the_entry_what_is_not_archived_is_let_go(opener: Any, script: str) -> None:
    """Negative control of the identity that mark_archived and trim ask for."""
    store = await quiet(opener)
    with sabotage(script, "if not entry or string.sub", "if false and string.sub"), pytest.raises(AssertionError):
        await what_has_other_entries_stays(store)


@pytest.mark.replicas
@pytest.mark.parametrize("moment", ["before the journal is read", "after it"])
async def test_another_archiver_at_any_moment_is_no_divergence(opener: Any, moment: str, caplog: Any) -> None:
    """It moves the cursor and trims while the first one is between its two reads, or behind them."""
    await overtaken(opener, moment)
    assert "do not fit" not in caplog.text


async def overtaken(opener: Any, moment: str) -> None:
    store, other = await quiet(opener, durability="archived"), await quiet(opener)
    session, archiver = store.session("s"), tiers(store).archiver
    await session.set("n", 0)
    journals, passes = archiver._partitions.journals, count(1)

    async def held(places: Any, most: int) -> Any:
        if moment == "after it":
            found = await journals(places, most)
        # As another process does: what it writes goes on past what the first one may have read.
        for number in range(2 if next(passes) % 3 else 0):
            await goes_on(other, number)
        return found if moment == "after it" else await journals(places, most)

    archiver._partitions.journals = held
    for number in range(3):
        await session.set("n", 10 + number)
        assert not archiver.diverged
    archiver._partitions.journals = journals
    assert await session.version(fresh=True) == 4
    assert [change.version for change in await session.history()] == [1, 2, 3, 4]
    assert core(store)._lifecycle.cold.quarantined() == []


async def goes_on(store: Any, number: int) -> None:
    inner = core(store)
    record, keys = inner._lifecycle.context.keys.of(Ref("session", "s")), inner._lifecycle.context.keys
    other = next(id for id in map(str, count()) if keys.partition_of(f"session:{id}") == record.partition)
    await in_its_place(store, lambda: inner.session(other).set("n", number))
    await in_its_place(store, lambda: inner.admin.archive())


async def in_its_place(store: Any, call: Any) -> Any:
    """Ask something of the core itself, on either API."""
    return await call() if core(store) is store else finish(call())


@pytest.mark.replicas
@pytest.mark.only(api="asyncio")
async def test_a_writer_that_asks_sql_where_it_is_is_no_false_alarm_for_another(opener: Any) -> None:
    """Two writers of one replica, and another archiver: what one of them learns is newer than what the other read."""
    store, other = await quiet(opener, durability="archived"), await quiet(opener)
    await store.session("s").set("n", 0)
    archiver, cold = tiers(store).archiver, core(store)._lifecycle.cold
    journals, cursor, calls, turns = archiver._partitions.journals, cold.cursor, count(1), count()
    asked, answered, may_ask = threading.Event(), threading.Event(), threading.Event()

    def slow(partition: int) -> Any:
        asked.set()
        assert may_ask.wait(10)
        found = cursor(partition)
        answered.set()
        return found

    async def held(places: Any, most: int) -> Any:
        found, number = await journals(places, most), next(calls)
        if number <= 2:
            await goes_on(other, number)
        if number == 2 and asked.is_set():
            may_ask.set()
            await until(answered.is_set)
            await until(lambda: next(turns) > 2)  # the first one goes on with it
        return found

    archiver._partitions.journals, cold.cursor = held, slow
    first = asyncio.create_task(store.session("s").set("n", 1))
    await until(lambda: asked.is_set() or first.done())
    second = asyncio.create_task(store.session("s").set("n", 2))
    await asyncio.gather(first, second)
    assert not archiver.diverged


@pytest.mark.replicas
@pytest.mark.only(api="asyncio")
async def test_a_cursor_read_after_the_journal_would_be_a_false_alarm(opener: Any) -> None:
    """Negative control of the order of the two reads."""
    store, other = await quiet(opener), await quiet(opener)
    await store.session("s").set("n", 0)
    await store.admin.archive()
    await store.session("s").set("n", 1)
    archiver = tiers(store).archiver
    journals, place = (
        archiver._partitions.journals,
        core(store)._lifecycle.context.keys.partition(keys_of(store, "s").partition),
    )
    early = await journals([(place, 1)], 100)
    await goes_on(other, 1)
    archiver._cursors.clear()

    async def read_before(places: Any, count: int) -> Any:
        return early

    archiver._partitions.journals = read_before
    with pytest.raises(ColdUnavailable):
        await archiver.reach(place.partition, early[0].epoch, 3, "e")
    assert tiers(store).recovery.count == 0, "who would begin an epoch looks by itself"


@pytest.mark.parametrize("gone", [("2-0", "1-0"), ("2-0", "3-0")], ids=["at its beginning", "further on"])
async def test_a_gap_in_the_journal_is_an_error_and_not_a_wait(opener: Any, gone: tuple[str, str]) -> None:
    """Entries that nobody archived are gone from it, with a tool or by hand."""
    store = await quiet(opener)
    session = store.session("s")
    for number in range(4):
        await session.set("a", number)
    keys = keys_of(store, "s")
    with redis_of(store) as client:
        assert client.xdel(keys.journal, *gone) == 2
    with pytest.raises(ColdUnavailable, match="is not archived"):
        await asyncio.wait_for(store.admin.archive(), 5)
    with pytest.raises(ColdUnavailable):
        await asyncio.wait_for(session.history(), 5)
    assert ttl(store, "s") == -1


async def test_a_journal_that_is_gone_is_an_error_and_not_a_wait(opener: Any) -> None:
    store = await quiet(opener)
    session = store.session("s")
    await session.set("a", 1)
    with redis_of(store) as client:
        client.delete(keys_of(store, "s").journal)
    with pytest.raises(ColdUnavailable, match="is not archived"):
        await asyncio.wait_for(store.admin.archive(), 5)
    with pytest.raises(ColdUnavailable):
        await asyncio.wait_for(session.history(), 5)


async def test_an_entry_that_sql_refuses_goes_to_quarantine(opener: Any, caplog: Any) -> None:
    """Its neighbours are archived, its version is not used again, its bytes are kept."""
    store = await quiet(opener)
    session, other, cold = store.session("s"), store.session("t"), core(store)._lifecycle.cold
    await session.set("a", 1)
    await session.set("a", 2)
    await session.set("b", 3)
    await other.set("a", 1)
    with redis_of(store) as client:
        rewrite(client, keys_of(store, "s").journal, 2, data=lambda data: data[:-1])
    await store.admin.archive()
    assert [row.version for row in cold.history("session:s")] == [1, 3]
    (kept,) = cold.quarantined()
    assert (kept.record, kept.version, kept.offset) == ("session:s", 2, 2)
    assert kept.data.startswith(b"s1:")
    assert cold.version("session:s") == 3
    assert await other.history()
    assert "quarantined" in caplog.text
    assert await session.set("a", 4) == 4


async def test_a_commit_in_quarantine_is_not_called_archived(opener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever put it there, this pass or another archiver; nor is it when the same request comes again."""
    store = await quiet(opener)
    session = store.session("s")
    refuse_poison(monkeypatch)
    with pytest.raises(DurabilityUnknown, match="quarantine: ValueError: refused"):
        await session.set("a", "poison", durability="archived")
    assert await session.set("a", 1, durability="archived") == 2
    archiver = tiers(store).archiver
    keep = archiver.keep

    async def late(*commit: Any) -> None:
        await archiver.drain()
        await keep(*commit)

    monkeypatch.setattr(archiver, "keep", late)
    with pytest.raises(DurabilityUnknown, match="quarantine"):
        await session.set("a", "poison", durability="archived")
    with pytest.raises(DurabilityUnknown):
        await session.version(durability="archived")
    assert await session.set("a", 2, durability="archived") == 4
    assert await session.version(durability="archived") == 4
    with pytest.raises(DurabilityUnknown):
        async with session.turn(request_id="r", durability="archived") as turn:
            turn.outcome = "poison"
    with pytest.raises(DurabilityUnknown):
        async with session.turn(request_id="r", durability="archived"):
            pass


def refuse_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    parse = archiving.parse

    def refused(entry: JournalEntry, *place: Any) -> Any:
        if b"poison" in entry.data:
            raise ValueError("refused")
        return parse(entry, *place)

    monkeypatch.setattr(archiving, "parse", refused)


async def test_an_entry_that_only_a_newer_release_knows_stops_its_partition_and_no_other(
    opener: Any, caplog: Any, monkeypatch: Any
) -> None:
    """A newer worker wrote it beside older ones: those may neither pass it nor put it aside. A newer one goes on."""
    store = await quiet(opener)
    session, cold, archiver = store.session("s"), core(store)._lifecycle.cold, tiers(store).archiver
    keys = keys_of(store, "s")
    elsewhere = next(f"t{n}" for n in range(99) if keys_of(store, f"t{n}").partition != keys.partition)
    for number in range(1, 4):
        await session.set("a", number)
    await store.session(elsewhere).set("a", 1)
    with redis_of(store) as client:
        rewrite(client, keys.journal, 2, data=lambda data: data + b"y0:5:layer")
        for _ in range(2):
            with pytest.raises(ColdUnavailable, match=r"entry 2 of partition \d+ has an operation b'y'"):
                await asyncio.wait_for(store.admin.archive(), 5)
        # The last archived one stays, to be compared.
        assert [identity for identity, _ in client.xrange(keys.journal)] == [b"1-0", b"2-0", b"3-0"]
    assert (cold.version("session:s"), cold.version(f"session:{elsewhere}")) == (1, 1)
    assert cold.quarantined() == []
    assert ttl(store, "s") == -1
    assert list(archiver.diverged) == [keys.partition]
    assert caplog.text.count("archiving stops: ") == 1
    with pytest.raises(ColdUnavailable, match="b'y'"):
        await asyncio.wait_for(session.history(), 5)
    assert await session.set("a", 4) == 4
    monkeypatch.setattr("distributed_state.cold.record_index.KINDS", KINDS | {b"y"})
    await store.admin.archive()
    assert cold.version("session:s") == 4
    assert not archiver.diverged


async def test_the_doctor_names_an_operation_that_only_a_newer_release_knows(opener: Any) -> None:
    store = await opener(archive_every=3600.0, durability="memory")
    await store.session("s").set("a", 1)
    keys = keys_of(store, "s")
    with redis_of(store) as client:
        rewrite(client, keys.journal, 1, data=lambda data: data + b"y0:5:layer")
    with pytest.raises(ColdUnavailable):
        await asyncio.wait_for(store.admin.archive(), 5)
    (found,) = [each for each in await store.admin.doctor() if each.name == f"partition {keys.partition}"]
    assert not found.ok
    assert "has an operation b'y', which this release does not know: a newer one wrote it" in found.found


async def test_items_of_a_journal_are_archived_with_their_commit(opener: Any) -> None:
    """The state is what it was: no field shows an item."""
    store = await quiet(opener)
    session, cold = store.session("s"), core(store)._lifecycle.cold
    await session.set("a", 1)
    steps = pack([(b"p", b"notes\0k\0\xff", b'{"n":1}'), (b"q", b"notes\0gone", b"")])
    with redis_of(store) as client:
        rewrite(client, keys_of(store, "s").journal, 1, data=lambda data: data + steps)
    await store.admin.archive()
    (entry,) = cold.history("session:s")
    assert entry.data.endswith(steps)
    kept = sorted(rows(cold, tables.items, record="session:s"))
    assert [row[1:] for row in kept] == [(b"notes", b"gone", 1, None, b""), (b"notes", b"k\0\xff", 1, None, b'{"n":1}')]
    assert (await session.at(version=1)).fields == {"a": 1}


async def test_the_background_archiver_survives_an_error(opener: Any) -> None:
    """A right that was taken away and given back: it must not need a restart of the worker."""
    store = await opener(archive_every=0.02)
    cold, failures = core(store)._lifecycle.cold, []
    archive = cold.archive

    def refuse(batches: Any) -> Any:
        failures.append(1)
        raise ConfigurationError("permission denied for table changes") if len(failures) < 3 else StateError("unknown")

    cold.archive = refuse
    try:
        await store.session("s").set("a", 1)
    except DurabilityUnknown:
        pass
    except StateError:
        assert core(store).settings.durability == "archived"
    await until(lambda: len(failures) > 3, 20)
    cold.archive = archive
    await until(lambda: cold.version("session:s") == 1, 20)


# SQL is away


async def test_writes_go_on_without_sql_until_the_journal_is_full(opener: Any) -> None:
    store = await quiet(opener, journal_entries=20, durability="memory")
    session, cold = store.session("s"), core(store)._lifecycle.cold
    await session.set("n", 0)
    archive = cold.archive

    def fail(batches: Any) -> Any:
        raise ColdUnavailable("away")

    cold.archive = fail
    for number in range(1, 20):
        assert await session.set("n", number) == number + 1
    for _ in range(2):
        with pytest.raises(Backpressure):
            await session.set("n", 99)
    assert await session.get("n", fresh=True) == 19
    with pytest.raises(ColdUnavailable):
        await session.history()
    cold.archive = archive
    await store.admin.archive()
    assert await session.set("n", 20) == 21
    assert [change.set["n"] for change in await session.history()] == list(range(21))


async def test_a_pause_that_would_fill_a_journal_gets_shorter(opener: Any) -> None:
    """Forty commits a pause are all that this journal takes: a second each would be eight seconds."""
    store = await opener(durability="memory", archiver=True, archive_every=1.0, journal_entries=40)
    session, waited = store.session("s"), 0.0
    for number in range(320):
        began = time.monotonic()
        while True:
            try:
                await session.set("n", number)
                break
            except Backpressure:
                await asyncio.sleep(0.001)
                waited += time.monotonic() - began
                began = time.monotonic()
    assert waited < 4
    await until(lambda: core(store)._lifecycle.cold.version("session:s") == 320, 20)


async def test_a_commit_that_could_not_be_archived_says_so(opener: Any) -> None:
    """Applied, but not as durable as asked for; repeating it would apply it twice."""
    store = await quiet(opener, durability="archived")
    session, cold = store.session("s"), core(store)._lifecycle.cold
    assert await session.set("n", 1) == 1
    assert cold.version("session:s") == 1
    archive = cold.archive

    def fail(batches: Any) -> Any:
        raise ColdUnavailable("away")

    cold.archive = fail
    with pytest.raises(DurabilityUnknown) as report:
        await session.set("n", 2)
    assert report.value.version == 2
    assert await session.get("n", fresh=True) == 2
    cold.archive = archive
    assert await session.set("n", 3) == 3
    assert [change.version for change in await session.history()] == [1, 2, 3]


async def archived_on_return(store: Any) -> None:
    """G5, `archived`: SQL has a version when its commit returns."""
    for number in range(1, 4):
        await store.session("s").set("n", number)
        assert archived(store, "s") == number


async def test_durability_archived_is_kept_when_a_commit_returns(opener: Any) -> None:
    await archived_on_return(await quiet(opener, durability="archived"))


async def test_a_commit_that_does_not_wait_for_sql_is_noticed(opener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of G5."""

    async def returned_at_once(*_: Any) -> None: ...

    monkeypatch.setattr(write_path, "ensure_durability", returned_at_once)
    with pytest.raises(AssertionError):
        await archived_on_return(await quiet(opener, durability="archived"))


@pytest.fixture
def own_postgres() -> Any:
    with postgres_server("-c", "fsync=off") as server:
        yield server


@pytest.mark.wide
@pytest.mark.only(warm="valkey", cold="postgres", api="blocking")
async def test_postgres_is_killed_and_comes_back(opener: Any, own_postgres: PostgresServer) -> None:
    """Warm records are read and written meanwhile; what is cold says ColdUnavailable; nothing is lost."""
    settings = {"archive": own_postgres.url, "journal_entries": 50, "archive_every": 0.02}
    store = await opener(**settings)
    strict = await opener(archive=own_postgres.url, durability="archived", archiver=False)
    session, cold = store.session("s"), store.session("cold")
    await cold.set("a", 1)
    await session.append(said("0"))
    await store.admin.archive()
    with redis_of(store) as client:
        client.delete(keys_of(store, "cold").record)
    own_postgres.kill()
    for number in range(1, 50):
        await session.append(said(str(number)))
    assert len(await session.messages(fresh=True)) == 50
    assert await session.version() == 50
    for read in (lambda: cold.get("a", fresh=True), lambda: session.at(version=3), lambda: cold.set("a", 2)):
        with pytest.raises(ColdUnavailable):
            await read()
    with pytest.raises(DurabilityUnknown):
        await strict.session("s").append(said("50"))
    with pytest.raises(DurabilityUnknown, match="written, but not archived"):
        await strict.emit("mail.sent", subject=strict.session("s"))
    with pytest.raises(Backpressure):
        await session.append(said("51"))
    own_postgres.start()
    await until(lambda: archived(store, "s") == 51, 30)
    assert [message.content for message in await session.messages()] == [str(number) for number in range(51)]
    assert [change.version for change in await session.history()] == list(range(1, 52))
    assert await cold.get("a") == 1
    assert (await session.at(version=30)).messages[-1].content == "29"
    assert len(await store.admin.audit(type="mail.sent")) == 1
    await opener.close()


def archived(store: Any, id: str) -> int | None:
    try:
        found: int | None = core(store)._lifecycle.cold.version(f"session:{id}")
        return found
    except ColdUnavailable:
        return None


@pytest.mark.wide
@pytest.mark.only(warm="valkey", cold="postgres", api="blocking")
async def test_postgres_stops_answering_and_goes_on(opener: Any, own_postgres: PostgresServer) -> None:
    """Frozen, not gone: nobody who needs only Redis waits for it."""
    store = await opener(archive=own_postgres.url, archive_every=0.02, durability="memory")
    session = store.session("s")
    await session.append(said("0"))
    await store.admin.archive()
    own_postgres.pause()
    try:
        begun = time.monotonic()
        for number in range(1, 200):
            await session.append(said(str(number)))
        first, *_ = await session.messages(last=150, fresh=True)
        assert first.content == "50"
        assert time.monotonic() - begun < 5
        assert archived(store, "s") is None, "SQL answered, so nothing had to wait"
    finally:
        own_postgres.resume()
    await until(lambda: archived(store, "s") == 200, 30)
    assert [change.version for change in await session.history()] == list(range(1, 201))
    await opener.close()


# Many archivers, and killed ones


async def verified(store: Any, acknowledged: list[str]) -> None:
    """What was acknowledged ("id version replica number") is in SQL: each once, at its version, versions dense."""
    cold = core(store)._lifecycle.cold
    said_at = {}
    for line in acknowledged:
        id, version, replica, number = line.split()
        said_at[id, int(version)] = f"{id} {replica} {number}"
    assert len(said_at) == len(acknowledged)
    for id in {id for id, _ in said_at}:
        changes = await store.session(id).history()
        assert [change.version for change in changes] == list(range(1, len(changes) + 1))
        contents = [message.content for change in changes for message in change.appended]
        assert len(contents) == len(changes)
        assert max(Counter(contents).values()) == 1
        for (each, version), content in said_at.items():
            if each == id:
                assert contents[version - 1] == content
        by_writer: dict[str, list[int]] = {}
        for content in contents:
            _, replica, number = content.split()
            by_writer.setdefault(replica, []).append(int(number))
        assert all(numbers == sorted(numbers) for numbers in by_writer.values())
        assert [message.content for message in await store.session(id).messages()] == contents
        moves = [change.version for change in changes if change.phase is not None]
        told = await store.admin.audit(conversation=id, type="session.phase", limit=1000, after="oldest")
        assert [event.version for event in told] == moves[:1000]
    assert cold.quarantined() == []
    await told_once(store)


async def told_once(store: Any) -> None:
    """The events of each partition are in SQL as they were counted: without a gap, and none twice."""
    places: dict[tuple[int, str], list[int]] = {}
    seen: list[str] = []
    page = await store.admin.audit(after="oldest", limit=1000)
    while page:
        for event in page:
            places.setdefault((event.partition, event.epoch), []).append(event.sequence)
            seen.append(event.id)
        page = await store.admin.audit(after=page[-1].cursor, limit=1000)
    assert len(seen) == len(set(seen)) > 0
    for numbers in places.values():
        assert sorted(numbers) == list(range(1, len(numbers) + 1))


@pytest.mark.wide
@pytest.mark.replicas
@pytest.mark.only(api="blocking")
@pytest.mark.parametrize("turns", [2, pytest.param(15, marks=pytest.mark.soak)])
async def test_killed_archivers_and_writers_lose_and_double_nothing(opener: Any, turns: int) -> None:
    """Archivers in processes of their own race on the same partitions and are killed at any moment, as are writers."""
    store = await quiet(opener, partitions=4, timeout=5)
    ids = [f"s{number}" for number in range(6)]
    settings = place(opener) | {"partitions": 4}
    writers = [Worker("write", ids=ids, archiver=index == 0, **settings) for index in range(2)]
    archivers = [Worker("archive", archiver=False, **settings) for _ in range(2)]
    acknowledged: list[str] = []
    try:
        for worker in (*writers, *archivers):
            assert worker.line() == "opened"
        for turn in range(turns):
            for position, archiver in enumerate(archivers):
                while int(archiver.line()) == 0:
                    pass
                archiver.kill()
                if turn < turns - 1:
                    archivers[position] = Worker("archive", archiver=False, **settings)
            if turn == 0:
                writers[1].kill()
            if turn < turns - 1:
                assert [archiver.line() for archiver in archivers] == ["opened"] * 2
        writers[0].say("stop")
        for writer in writers:
            acknowledged += writer.lines()
    finally:
        for worker in (*writers, *archivers):
            worker.kill()
    assert len(acknowledged) > 100
    await store.admin.archive()
    await verified(store, acknowledged)


@pytest.mark.wide
@pytest.mark.replicas
@pytest.mark.only(api="blocking")
async def test_many_processes_may_open_at_once(opener: Any, servers: Any) -> None:
    """One of them creates the tables, and one starts the partition; the others wait for it."""
    archive = servers.database() if opener.cold == "postgres" else opener.archive
    workers = [Worker("opened", url=opener.url, archive=archive, namespace=opener.namespace) for _ in range(5)]
    try:
        assert {worker.line() for worker in workers} == {"ready"}
        for worker in workers:
            worker.say("go")
        assert sorted(int(worker.line()) for worker in workers) == list(range(1, 6))
    finally:
        for worker in workers:
            worker.kill()
    store = await opener(archive=archive)
    assert await store.session("shared").get("n") == 5
    assert [change.version for change in await store.session("shared").history()] == list(range(1, 6))
    rows = everything_in_sql(archive, opener.namespace)
    assert len(rows["alembic_version"]) == 1
    await opener.close()


# At the limit of Redis' memory


@pytest.mark.wide
@pytest.mark.only(warm="redis", api="asyncio")
async def test_a_full_redis_evicts_only_what_is_archived(opener: Any, tmp_path: Path) -> None:
    """G7: many more records than fit. `volatile-lru` takes those with a TTL; each comes back whole."""
    with redis_server("--maxmemory", "6mb", "--maxmemory-policy", "volatile-lru") as server:
        options = {"url": server.url, "archive": f"sqlite:///{tmp_path}/full.db", "durability": "memory"}
        store = await opener(archiver=False, max_staleness=0, **options)
        written: dict[str, str] = {}

        async def fill(first: int, count: int) -> int:
            """Write until Redis refuses; how many it took."""
            for number in range(first, first + count):
                id = f"s{number}"
                text = f"{id} " + "x" * 6000
                try:
                    await store.session(id).write(set={"a": text, "b": number}, append=[said(text)])
                except Backpressure:
                    return number - first
                written[id] = text
            return count

        async def check(ids: list[str]) -> None:
            for id in ids:
                assert await store.session(id).get_all() == {"a": written[id], "b": int(id[1:])}
                assert [message.content for message in await store.session(id).messages()] == [written[id]]

        total = 0
        for _ in range(4):
            took = await fill(total, 1000)
            assert took < 1000, "memory must run out while nothing is archived"
            # What is not archived is all there, although Redis is full.
            with redis_of(store) as client:
                for id in list(written)[total:]:
                    assert client.exists(keys_of(store, id).record), id
            total += took
            await store.admin.archive()
        with redis_of(store) as client:
            assert client.info()["evicted_keys"] > 100
        assert total > 400
        await check(list(written))
        await opener.close()


@pytest.mark.only(warm="single")
@pytest.mark.replicas
@pytest.mark.parametrize("policy", ["volatile-lru", "noeviction"])
async def test_a_full_redis_is_archived_once_sql_is_back(opener: Any, policy: str) -> None:
    """It ran full of what only SQL could take. Claims have run out meanwhile, and whoever comes new must get in."""
    with own_server(opener, "--maxmemory", "6mb", "--maxmemory-policy", policy) as server:
        given = {"url": server.url, "durability": "memory", "max_staleness": 0, "partitions": 2, "beat": 0.2}
        store = await opener(archiver=True, archive_every=0.02, **given)
        cold, archive = core(store)._lifecycle.cold, core(store)._lifecycle.cold.archive
        await store.session("cold").set("a", 1)
        await store.admin.archive()
        lease = store.session("s0").lock(ttl=60)
        await lease.acquire()
        with redis_of(store) as client:
            client.delete(keys_of(store, "cold").record)

            def fail(batches: Any) -> Any:
                raise ColdUnavailable("away")

            cold.archive = fail
            written = 0
            with pytest.raises(Backpressure):
                while written < 1000:
                    await store.session(f"s{written + 1}").set("a", "x" * 50_000)
                    written += 1
            client.config_set("maxmemory", "1mb")
            team = core(store)._lifecycle.context.keys.archivers
            client.delete(team, *(core(store)._lifecycle.context.keys.partition(each).archiver for each in range(2)))
            tiers(store).archiver._assignment._renew_at = 0.0
            other = await opener(archiver=False, **given)
            assert await other.session(f"s{written}").get("a") == "x" * 50_000
            assert await other.session("cold").get("a") == 1
            assert not client.exists(keys_of(store, "cold").record), "it is full"
            for refused in (other.session("new").set, other.session("cold").set, other.session("s1").set):
                with pytest.raises(Backpressure):
                    await refused("a", "y" * 1000)
            await lease.release()
            assert not client.exists(keys_of(store, "s0").lock)
            await until(lambda: client.zcard(core(store)._lifecycle.context.keys.roll) == 2)
            began = time.monotonic()
            cold.archive = archive
            await until(lambda: all(archived(store, f"s{number}") for number in range(1, written + 1)), 20)
            assert time.monotonic() - began < 10
            assert client.zrange(team, 0, -1)
            client.config_set("maxmemory", "6mb")
        if policy == "volatile-lru":
            assert await other.session("new").set("a", 1) == 1
        assert len(await other.session("s1").history()) == 1
        await opener.close()


@pytest.mark.only(warm="redis", api="asyncio")
@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-lfu", "allkeys-random"])
async def test_a_server_that_would_evict_anything_is_refused(policy: str, tmp_path: Path) -> None:
    with redis_server("--maxmemory-policy", policy, "--maxmemory", "50mb") as server:

        def opening() -> Any:
            return StateStore.open(server.url, archive=f"sqlite:///{tmp_path}/a.db")

        with pytest.raises(ConfigurationError, match=f"{policy}.*volatile-lru"):
            await in_thread(opening)
