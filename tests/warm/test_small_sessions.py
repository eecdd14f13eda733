"""What a small session takes in Redis. Law: it stays small whoever writes it, and no write of it is applied twice."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import redis
from below import keys_of, redis_of, tiers, until
from controls import sabotage
from counting import asked
from proxy import Proxy

from deploy.load.curves.small_sessions import STATE, bytes_of_sessions
from distributed_state import StateError, StateStore
from distributed_state.tiers.changes import Changes
from distributed_state.values.codec import Codec
from distributed_state.warm.answers import Committed, Draft, Unsure
from distributed_state.warm.client import OpId
from distributed_state.warm.scripts import COMMIT

BYTES = 400
CUT = "if #noted > 64 and #noted <= 1024"
fleet = pytest.mark.only(warm="single")
both_servers = pytest.mark.parametrize("redis_url", ["redis", "valkey"], indirect=True)
Sent = tuple[Any, Draft, OpId, Committed]


def op_fields(store: Any) -> dict[bytes, bytes]:
    """Where the op ids of session `s` stand."""
    with redis_of(store) as client:
        return {
            name: value for name, value in client.hgetall(keys_of(store, "s").record).items() if name[:4] == b"#ops"
        }


async def increments(stores: list[Any]) -> list[Sent]:
    """One increment by each replica, none of which knows that it was answered."""
    sent: list[Sent] = []
    for store in stores:
        changes = Changes(tiers(store).settings, Codec("", ""))
        changes.increment("n", 1)
        draft = changes.draft("increment")
        op = tiers(store).warm.ops.begin(draft.operations, keys_of(store, "s").text)
        done = await tiers(store).warm.commit(keys_of(store, "s"), draft, op)
        assert isinstance(done, Committed)
        sent.append((store, draft, op, done))
    return sent


# What it takes


@both_servers
def test_a_small_session_takes_400_bytes_however_many_wrote_it(redis_url: str, tmp_path: Path, namespace: str) -> None:
    for replicas in (1, 4):
        found = bytes_of_sessions(redis_url, f"sqlite:///{tmp_path}/{replicas}.db", f"{namespace}-{replicas}", replicas)
        assert len(found) > 1
        assert max(found) <= BYTES


@both_servers
def test_with_its_op_ids_in_one_field_it_takes_more(redis_url: str, tmp_path: Path, namespace: str) -> None:
    """Negative control of the one above."""
    with sabotage("commit", CUT, "if false"):
        assert min(bytes_of_sessions(redis_url, f"sqlite:///{tmp_path}/archive.db", namespace, 4)) > BYTES


@both_servers
def test_it_is_kept_as_a_list_while_it_is_written(redis_url: str, tmp_path: Path, namespace: str) -> None:
    """Also before anything is archived, and whatever the order of its writers."""
    archive = f"sqlite:///{tmp_path}/archive.db"
    given = {"namespace": namespace, "archive": archive, "archiver": False}
    with StateStore.open(redis_url, **given) as one, StateStore.open(redis_url, **given) as other:
        for store in (one, other, one, one, other):
            store.session("s").set_many(STATE)
        with redis.Redis.from_url(redis_url) as client:
            (key,) = client.scan_iter(f"{namespace}:*:r:session:s")
            assert client.object("encoding", key) == b"listpack"
            assert len(client.hgetall(key)[b"#ops"]) == 64


@pytest.mark.only(api="asyncio", warm="single")
async def test_a_writer_of_many_sessions_leaves_one_op_id_in_each(opener: Any) -> None:
    """What is unanswered elsewhere keeps nothing here."""
    store = await opener(archiver=False)
    ids = [f"s{number}" for number in range(30)]
    others = tiers(store).warm.ops
    elsewhere = others.begin([], b"session:other")
    for number in range(3):
        await asyncio.gather(*(store.session(id).set("n", number) for id in ids))
    with redis_of(store) as client:
        found = [client.hget(keys_of(store, id).record, "#ops") for id in ids]
    assert {each.count(b":") for each in found} == {3}, "one of sequence:version:digest:first"
    others.end(elsewhere)


# What it remembers


@pytest.mark.replicas
async def test_what_stands_in_pieces_is_remembered(opener: Any) -> None:
    await remembered(opener)


async def remembered(opener: Any) -> None:
    stores = [await opener(archiver=False) for _ in range(4)]
    await stores[0].session("s").set("n", 0)
    sent = await increments(stores)
    assert len(op_fields(stores[0])) > 2, "there is something to be put together"
    for store, draft, op, done in sent:
        again = await tiers(store).warm.commit(keys_of(store, "s"), draft, op)
        assert again[:4] == done[:4]  # type: ignore[index]  # both are Committed
    assert await stores[0].session("s").get("n", fresh=True) == 4


@pytest.mark.only(api="asyncio", warm="redis")
async def test_without_the_other_pieces_it_is_not(opener: Any) -> None:
    with sabotage("commit", "if ops and #ops == 64 then", "if false then"), pytest.raises((AssertionError, StateError)):
        await remembered(opener)


@pytest.mark.wide
@pytest.mark.replicas
async def test_pieces_go_with_what_stood_in_them(opener: Any) -> None:
    """Else what is left of one would be read as part of the next."""
    await pieces_go(opener)


async def pieces_go(opener: Any) -> None:
    stores = [await opener(archiver=False, op_window=2, timeout=0.5, retry_for=0.5) for _ in range(3)]
    for store in stores:
        await store.session("s").set("n", 0)
    assert len(op_fields(stores[0])) > 1

    async def alone() -> bool:
        await stores[0].session("s").increment("n")
        replicas = [tiers(store).replica.encode() for store in stores[1:]]
        return not any(replica in b"".join(op_fields(stores[0]).values()) for replica in replicas)

    await until(alone, every=0.1)
    assert list(op_fields(stores[0])) == [b"#ops"]


@pytest.mark.wide
@pytest.mark.only(api="asyncio", warm="redis")
async def test_pieces_that_are_left_would_be_seen(opener: Any) -> None:
    left = "for i = parts + 1, pieces and #pieces or 0 do"
    with sabotage("commit", left, "for i = 1, 0 do"), pytest.raises((AssertionError, TimeoutError)):
        await pieces_go(opener)


@pytest.mark.replicas
async def test_a_record_that_grows_keeps_its_op_ids(opener: Any) -> None:
    """A larger one is in a hash table anyway, and has them in one field; and whatever it had before is remembered."""
    stores = [await opener(archiver=False) for _ in range(3)]
    await stores[0].session("s").set("n", 0)
    sent = await increments(stores)
    assert len(op_fields(stores[0])) > 1
    await stores[0].session("s").set("large", "x" * 2000)
    assert list(op_fields(stores[0])) == [b"#ops"]
    await stores[0].session("s").delete("large")
    assert len(op_fields(stores[0])) > 1
    for store, draft, op, done in sent:
        again = await tiers(store).warm.commit(keys_of(store, "s"), draft, op)
        assert again[:4] == done[:4]  # type: ignore[index]  # both are Committed


# What is archived


@pytest.mark.replicas
async def test_what_is_archived_leaves_few_op_ids(opener: Any) -> None:
    """SQL has them all; the record says since when it must be asked."""
    stores = [await opener(archiver=False) for _ in range(3)]
    await stores[0].session("s").set("n", 0)
    sent = await increments(stores)
    await stores[0].admin.archive()
    assert list(op_fields(stores[0])) == [b"#ops"]
    assert len(op_fields(stores[0])[b"#ops"]) < 20
    for store, draft, op, _ in sent:
        tiers(store).warm.ops.lost(op)
        assert isinstance(await tiers(store).warm.commit(keys_of(store, "s"), draft, op), Unsure)


@fleet
async def test_what_sql_has_is_not_applied_again(opener: Any) -> None:
    await applied_once(opener)


async def applied_once(opener: Any) -> None:
    """The answer is lost of a write to a record that many wrote, and that is archived before it is sent again."""
    others = [await opener(archiver=False) for _ in range(3)]
    await others[0].session("s").set("n", 0)
    with Proxy(opener.url) as proxy:
        store = await opener(url=proxy.url, archiver=False)
        assert await store.session("s").increment("n") == 1
        for other in others:
            await other.session("s").increment("n")
        loss = proxy.lose(COMMIT.sha)
        task = asyncio.ensure_future(store.session("s").increment("n"))
        await until(loss.happened.is_set)
        await until(lambda: tiers(store).replica.encode() in b"".join(op_fields(others[0]).values()))
        await others[0].admin.archive()
        assert tiers(store).replica.encode() not in b"".join(op_fields(others[0]).values())
        loss.go.set()
        assert await task == 5, "its answer is what it was"
        assert await others[0].session("s").get("n", fresh=True) == 5
        await store.close()


@pytest.mark.only(api="asyncio", warm="redis")
async def test_without_saying_since_when_it_would_be(opener: Any) -> None:
    with sabotage("mark_archived", "'@' .. before .. ';'", "''"), pytest.raises(AssertionError):
        await applied_once(opener)


@fleet
async def test_the_next_write_is_one_round_trip(opener: Any) -> None:
    """What is forgotten is as old as the entry that was archived: of who writes now nothing is asked."""
    stores = [await opener(archiver=False) for _ in range(3)]
    for store in stores:
        await store.session("s").set("n", 0)
    await asyncio.sleep(0.05)  # or the two are too close to be told apart by the server's clock
    await stores[0].admin.archive()
    with asked(stores[1]) as seen:
        await stores[1].session("s").set("n", 1)
    assert [each.split()[0] for each in seen.sent] == ["EVALSHA"]


async def a_turn_takes_no_more(opener: Any) -> None:
    """Release looks for the last write's op id, in whichever piece it is."""
    stores = [await opener(archiver=False) for _ in range(3)]
    for store in stores:
        await store.session("s").set("n", 0)
    for id in ("first", "t"):
        await stores[0].session(id).set("n", 0)
    taken = []
    for id in ("first", "t", "s"):  # at the first, the server learns the scripts
        with asked(stores[0]) as seen:
            async with stores[0].session(id).turn() as turn:
                turn["n"] = 1
        # Beside them the store may look at its partitions.
        taken.append([each.split()[:2] for each in seen.sent if each.startswith("EVALSHA")])
    assert taken[2] == taken[1] != []


@fleet
async def test_a_turn_takes_no_more_commands_where_many_wrote(opener: Any) -> None:
    await a_turn_takes_no_more(opener)


@pytest.mark.only(api="asyncio", warm="redis")
async def test_a_release_that_looks_at_one_piece_takes_one_more(opener: Any) -> None:
    with sabotage("release", "if ops and #ops == 64 then", "if false then"), pytest.raises(AssertionError):
        await a_turn_takes_no_more(opener)


@pytest.mark.replicas
async def test_when_a_record_was_last_written_is_found_in_any_piece(opener: Any) -> None:
    stores = [await opener(archiver=False) for _ in range(3)]
    for store in stores:
        await store.session("s").set("n", 0)
    keys = keys_of(stores[0], "s")
    with redis_of(stores[0]) as client:
        client.hset(
            keys.record, b"#ops", b"aaaaaaaaaaaa 1 100 1:1:ffffffff:0,;bbbbbbbbbbbb 2 100 2:2:fffff".ljust(64, b"f")
        )
        client.hset(keys.record, b"#ops1", b":0,;cccccccccccc 3 300 3:3:ffffffff:0,")
    found = await tiers(stores[0]).warm.partitions.loaded("", [keys])
    assert found[keys.ref.text].time_ms == 300_000
