"""What living writers remember is gathered by who recovers a partition; what comes late is kept."""

from __future__ import annotations

from typing import Any

import pytest
from below import keys_of, redis_of, tiers, until

from distributed_state.tiers import unarchived as gathering
from distributed_state.tiers.unarchived import UnarchivedCommits

pytestmark = [pytest.mark.replicas, pytest.mark.only(warm="real")]
LONG = 60.0  # seconds: whoever lives has answered by then


async def writing(opener: Any, **settings: Any) -> Any:
    return await opener(**{"archiver": False, "partitions": 1, "unarchived_bytes": 64 * 2**20} | settings)


async def unasked(partition: int, epoch: str, silence: float) -> tuple[list[Any], set[str]]:
    """Who recovers hears nobody, not even itself."""
    return [], set()


def lost(store: Any, *, received: bool = False) -> str:
    """Empty Redis of what the namespace holds; the epoch that was there. What comes of it is late, unless `heard`."""
    home = tiers(store)
    if not received:
        home.recovery._gather = unasked
    with redis_of(store) as client:
        epoch: str = client.hget(home.keys.partition(0).meta, "epoch").decode()
        for key in client.scan_iter(f"{home.settings.namespace}:*"):
            client.delete(key)
    return epoch


async def test_all_that_living_writers_were_acknowledged_is_gathered(opener: Any) -> None:
    """After Redis lost everything, with what each of them knows: the union, each commit once."""
    recoverer, *writers = [await writing(opener) for _ in range(3)]
    for n in range(5):
        for at, store in enumerate([recoverer, *writers]):
            await store.session("s").set(f"{at}", n)
    epoch = lost(recoverer)
    found = await tiers(recoverer).gathering.gather(0, epoch, [each.replica for each in writers], silence=LONG)
    assert not found.silent
    assert sorted(entry.version for entry in found.entries) == list(range(1, 16))
    assert len({entry.event for entry in found.entries}) == 15
    with redis_of(recoverer) as client:
        assert not list(client.scan_iter(f"{opener.namespace}:*gather*")), "what was asked is over"


async def test_nothing_is_gathered_of_writers_that_remember_nothing(opener: Any) -> None:
    """The control: they answer, and have nothing to give."""
    recoverer, writer = await writing(opener, unarchived_bytes=0), await writing(opener)
    other = await writing(opener, unarchived_bytes=0)
    await recoverer.session("s").set("n", 1)
    await other.session("s").set("n", 2)
    epoch = lost(recoverer)
    found = await tiers(recoverer).gathering.gather(0, epoch, [writer.replica], silence=LONG)
    assert found == ([], set())


async def test_another_epoch_is_not_gathered(opener: Any) -> None:
    recoverer, writer = await writing(opener), await writing(opener)
    await writer.session("s").set("n", 1)
    found = await tiers(recoverer).gathering.gather(0, "7-other", [writer.replica], silence=LONG)
    assert found == ([], set())


@pytest.mark.wide
async def test_who_does_not_answer_is_silent(opener: Any) -> None:
    """One that holds still, and one that was never there; the others are heard out."""
    recoverer, writer, still = [await writing(opener) for _ in range(3)]
    for store in (writer, still):
        await store.session("s").set("n", 1)
    await tiers(still).gathering.close()
    wanted = [writer.replica, still.replica, "0123456789ab"]
    epoch = lost(recoverer)
    found = await tiers(recoverer).gathering.gather(0, epoch, wanted, silence=5.0)
    assert found.silent == {still.replica, "0123456789ab"}
    assert [entry.version for entry in found.entries] == [1]


async def test_much_is_given_in_pieces(opener: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "_PIECE_BYTES", 500)
    monkeypatch.setattr(gathering, "_PAGE", 2)
    recoverer, writer = await writing(opener), await writing(opener)
    for n in range(20):
        await writer.session("s").set("n", "x" * n * 20)
    epoch = lost(recoverer)
    found = await tiers(recoverer).gathering.gather(0, epoch, [writer.replica], silence=LONG)
    assert ([entry.version for entry in found.entries], found.silent) == (list(range(1, 21)), set())
    assert found.entries == tiers(writer).unarchived.entries(0, epoch)


async def test_requests_are_found_where_the_list_of_them_cannot_be_reached(
    opener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a cluster's servers the one with the list may be the one that is away."""
    recoverer, writer = await writing(opener), await writing(opener)
    await writer.session("s").set("n", 1)
    epoch = lost(recoverer)
    port = tiers(writer).port
    command = type(port).command

    async def away(self: Any, *words: Any) -> Any:
        if words[0] == b"HGETALL":
            raise gathering.WarmUnavailable("away")
        return await command(self, *words)

    monkeypatch.setattr(type(port), "command", away)
    found = await tiers(recoverer).gathering.gather(0, epoch, [writer.replica], silence=LONG)
    assert ([entry.version for entry in found.entries], found.silent) == ([1], set())


@pytest.mark.wide
async def test_who_is_there_is_known_when_redis_lost_the_roll(opener: Any) -> None:
    first, second = await opener(beat=1.0), await opener(beat=1.0)
    heartbeat = tiers(first).heartbeat

    async def both() -> bool:
        return {first.replica, second.replica} <= await heartbeat.replica_ids()

    await until(both, LONG)
    with redis_of(first) as client:
        client.delete(tiers(first).keys.roll)
    assert {first.replica, second.replica} <= await heartbeat.replica_ids()
    await second.close()

    async def gone() -> bool:
        return await heartbeat.replica_ids() == {first.replica}

    await until(gone, LONG)


def epochs(store: Any) -> set[str]:
    """Those of which the replica remembers anything."""
    return {each[1] for each in list(tiers(store).unarchived._kept[0])}


async def test_what_was_lost_with_an_epoch_is_handed_over_and_let_go(opener: Any) -> None:
    """What SQL has of it is not: it is looked up by its event."""
    store = await writing(opener)
    memory = tiers(store).unarchived
    late = []

    async def take(partition: int, epoch: str, entries: list[Any]) -> None:
        late.append((partition, epoch, [entry.version for entry in entries]))

    memory.late = take
    session = store.session("s")
    await session.set("n", 1)
    with redis_of(store) as client:
        kept = client.hget(keys_of(store, "s").meta, "journal")
        await store.admin.archive()
        client.hset(keys_of(store, "s").meta, "journal", kept)  # no answer says that it is archived
    await session.set("n", 2)
    assert len(memory) == 2
    epoch = lost(store)
    await store.session("t").set("n", 1)
    await until(lambda: epoch not in epochs(store), LONG)
    assert late == [(0, epoch, [2])]
    assert (len(memory), memory.bytes) == (1, memory._kept[0][0][2])


async def test_what_comes_late_is_kept_in_a_branch(opener: Any) -> None:
    store = await writing(opener)
    session = store.session("s")
    await session.set("n", 1)
    await store.admin.archive()
    await session.set("n", 2)
    epoch = lost(store)
    assert await session.set("other", 1) == 2
    await until(lambda: epoch not in epochs(store), LONG)
    (branch,) = await store.admin.branches(session.id)
    assert (branch.epoch, branch.base, branch.commits) == (epoch, 1, 1)
    assert (await session.at(branch=branch.id)).fields == {"n": 2}


async def everything_is_put_back(opener: Any, **settings: Any) -> None:
    """Nothing was archived, Redis loses all, and the writers live."""
    stores = [await writing(opener, **settings) for _ in range(3)]
    for n in range(4):
        for at, store in enumerate(stores):
            session = store.session("s")
            await session.write(set={f"{at}": n}, increment={"count": 1})
    home = tiers(stores[1])

    async def all_known() -> bool:
        return len(await home.heartbeat.replica_ids()) == 3

    await until(all_known, LONG)
    if home.unarchived.enabled:
        gather = home.gathering.gather
        home.gathering.gather = lambda *given, silence: gather(*given, silence=LONG)
    lost(stores[0], received=True)
    session = stores[1].session("s")
    assert await session.get_all(fresh=True) == {"0": 3, "1": 3, "2": 3, "count": 12}
    assert await session.increment("count") == 13
    assert [change.version for change in await session.history()] == list(range(1, 14))
    assert not await store.admin.branches(session.id)


async def test_all_that_was_acknowledged_is_put_back_by_those_who_live(opener: Any) -> None:
    await everything_is_put_back(opener)


async def test_who_remembers_nothing_puts_nothing_back(opener: Any) -> None:
    """The control."""
    with pytest.raises(AssertionError):
        await everything_is_put_back(opener, unarchived_bytes=0)


async def test_what_was_erased_does_not_come_back_from_a_memory(opener: Any) -> None:
    """A writer remembers a commit of a record that is erased meanwhile: it is neither handed over nor put back."""
    store, other = await writing(opener), await writing(opener)
    await store.session("s", user="u").set("n", 1)
    await store.session("s").set("n", 2)
    home = tiers(store)
    epoch = home.epoch(0)
    entries = home.unarchived.entries(0, epoch)
    assert len(entries) == 2
    assert (await home.port.sql(home.cold.known, 0, epoch, entries)).lacking == {entry.event for entry in entries}
    await other.forget("u")
    known = await home.port.sql(home.cold.known, 0, epoch, entries)
    assert not known.lacking
    assert known.heads["session:s"].version >= 2


async def test_whom_only_a_memory_knows_is_forgotten_all_the_same(opener: Any) -> None:
    """Redis lost the partition, and nobody has met that yet: what the writer remembers is put back, and then erased."""
    store, other = await writing(opener), await writing(opener)
    await store.session("s", user="u").set("n", 1)

    async def is_known() -> bool:
        return store.replica in await tiers(other).heartbeat.replica_ids()

    await until(is_known)
    lost(store, received=True)
    assert await other.forget("u") == 1
    assert await store.session("s").get_all(fresh=True) == {}
    assert not await store.admin.branches("s")


@pytest.mark.wide
async def test_a_failed_hand_over_is_made_again(opener: Any) -> None:
    store = await writing(opener)
    memory: UnarchivedCommits = tiers(store).unarchived
    tries = []

    async def refuse(partition: int, epoch: str, entries: list[Any]) -> None:
        tries.append([entry.version for entry in entries])
        if len(tries) < 3:
            raise gathering.WarmUnavailable("not now")

    memory.late = refuse
    await store.session("s").set("n", 1)
    epoch = lost(store)
    await store.session("t").set("n", 1)
    await until(lambda: epoch not in epochs(store), LONG)
    assert tries == [[1]] * 3
