"""A server begins with another data id: nothing that SQL has is hidden, nothing is given twice, nobody comes back.

Restarts with the same and with older files, a server that was made a replica and promoted again, a name that changes
while nothing is lost, and recoveries that are ended in the middle.
"""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import redis
from below import Worker
from controls import sabotage
from rewinding import Rewound, rewindable

from distributed_state import AsyncStateStore, ColdUnavailable, Fenced, StateError, StateStore, WarmUnavailable
from distributed_state.cold.epochs import Changed
from distributed_state.cold.store import ColdStore
from distributed_state.cold.tables import cursors
from distributed_state.port import Script, identities
from distributed_state.port.blocking import finish
from distributed_state.programs.servers import RedisServer, redis_server, wait_until
from distributed_state.values.model import Ref
from distributed_state.warm import scripts
from distributed_state.warm.scripts import MINT
from distributed_state.warm.stream import count


@pytest.fixture
def rewound() -> Iterator[Rewound]:
    with rewindable() as own:
        yield own


@pytest.fixture
def archive(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/archive.db"


def opened(server: RedisServer, archive: str, **settings: Any) -> StateStore:
    given = {"archiver": False, "max_staleness": 0.0, "partitions": 4, "retry_for": 60.0} | settings
    return StateStore.open(server.url, archive=archive, namespace="n", **given)


def epoch_of(store: StateStore, id: str) -> str:
    tiers = store._core._lifecycle.tiers()
    with redis.Redis.from_url(str(store._core.settings.url), decode_responses=True) as client:
        return str(client.hget(tiers.keys.of(Ref("session", id)).meta.decode(), "epoch"))


def versions(store: StateStore, id: str) -> list[int]:
    return [change.version for change in store.session(id).history()]


def quarantined(store: StateStore) -> int:
    return store._core._lifecycle.cold.count_quarantined()


# Restarts


def test_a_restart_that_lost_nothing_goes_on_in_another_epoch(rewound: Rewound, archive: str) -> None:
    with opened(rewound.server, archive) as store:
        session = store.session("s")
        for n in range(5):
            session.set("n", n)
            if n == 2:
                store.admin.archive()
        before = epoch_of(store, "s")
        rewound.restart()
        assert session.set("n", 5) == 6
        assert count(epoch_of(store, "s")) == count(before) + 1
        assert versions(store, "s") == [1, 2, 3, 4, 5, 6]
        assert [change.set["n"] for change in session.history()] == list(range(6))
        assert quarantined(store) == 0


@pytest.mark.parametrize("uptime", [None, 1000])
def test_a_replica_that_connects_late_after_a_restart_is_waited_for(
    rewound: Rewound, archive: str, uptime: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: of a server that has been running for long, an answer is expected at once."""
    with opened(rewound.server, archive) as store, opened(rewound.server, archive) as other:
        store.session("s").set("n", 1)
        other.session("s").set("n", 2)
        home, gathering = store._core._lifecycle.tiers(), other._core._lifecycle.tiers().gathering
        wait_until(lambda: other.replica in finish(home.heartbeat.replica_ids()), "the other replica is known")
        answer = gathering.answer

        async def late() -> None:
            await gathering._port.sleep(3.0)
            await answer()

        monkeypatch.setattr(gathering, "answer", late)
        if uptime is not None:
            read = identities.read
            monkeypatch.setattr(identities, "read", lambda answer: read(answer)._replace(uptime=uptime))
        rewound.restart()
        store.session("s").set("n", 3)
        assert (home.recovery.complete, home.recovery.count) == ((1, 0) if uptime is None else (0, 1))
        assert versions(store, "s") == [1, 2, 3]


def recovered(store: StateStore) -> int:
    """How many partitions this replica started again."""
    recovery = store._core._lifecycle.tiers().recovery
    return recovery.count + recovery.complete


def test_each_epoch_has_a_line_that_says_why_it_began_and_what_was_lost(
    rewound: Rewound, archive: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "distributed_state.tiers.recovery")
    with opened(rewound.server, archive) as store:
        session = store.session("s")
        epochs, told = [], list[list[str]]()
        rewound.note()
        for begin in (lambda: None, rewound.restart, rewound.rewind):
            begin()
            session.set("n", len(epochs))
            epochs.append(epoch_of(store, "s"))
            store.admin.archive()
            doctor = {each.name: each for each in store.admin.doctor()}
            told.append([name for name in ("restarted redis", "lost data", "epochs") if _speaks(doctor, name)])
        lines = {line.epoch: line for line in caplog.records if hasattr(line, "epoch")}
    first, restarted, older = (lines[epoch] for epoch in epochs)
    assert (first.levelname, first.former_epoch) == ("INFO", "")
    assert "the partition was empty before" in first.getMessage()
    assert [line.former_epoch for line in (restarted, older)] == epochs[:2]
    assert (restarted.levelname, restarted.put_back) == ("INFO", 0)
    assert "and has everything that SQL and the running replicas know of" in restarted.getMessage()
    assert told == [[], ["restarted redis"], ["restarted redis", "lost data", "epochs"]]
    assert re.search("Redis was emptied|and lacks what SQL has", older.getMessage())
    assert (older.levelname, older.put_back, older.branched) == ("WARNING", 0, 0)
    assert "lost: commits acknowledged after offset" in older.getMessage()


def _speaks(doctor: dict[str, Any], name: str) -> bool:
    """Whether a finding says that Redis was restarted, or that it lost data."""
    found = doctor.get(name)
    assert name != "restarted redis" or found is None or (found.ok and "nothing is missing" in found.found)
    return found is not None and (name == "restarted redis" or not found.ok)


@pytest.mark.wide
async def test_on_the_asyncio_api_too(rewound: Rewound, archive: str) -> None:
    settings: dict[str, Any] = {"archiver": False, "max_staleness": 0.0, "partitions": 4, "retry_for": 60.0}
    async with await AsyncStateStore.open(rewound.server.url, archive=archive, namespace="n", **settings) as store:
        session = store.session("s")
        for n in range(20):
            await session.set("n", n)
            if n == 9:
                rewound.note()
        await store.admin.archive()
        rewound.rewind()
        assert await session.get("n") == 19
        assert await session.set("n", 20) == 21
        assert [change.version for change in await session.history()] == list(range(1, 22))


def test_what_only_its_writer_knows_is_archived_with_the_rest(rewound: Rewound, archive: str) -> None:
    """Nobody has met the other data id yet, and the journal that came back has nothing that SQL lacks."""
    with opened(rewound.server, archive) as store:
        store.session("s").set("n", 1)
        store.admin.archive()
        rewound.note()
        store.session("s").set("n", 2)
        store.session("t", user="u").set("n", 1)
        rewound.rewind()
        store.admin.archive()
        assert [each.id for each in store.sessions(user="u")] == ["t"]
        assert versions(store, "s") == [1, 2]


@pytest.mark.parametrize("erase", [lambda at: at.forget("u"), lambda at: at.erase("t")], ids=["forget", "erase"])
def test_nothing_is_erased_behind_a_primary_that_was_cut_off(erase: Callable[[StateStore], Any], archive: str) -> None:
    """Neither its journal nor SQL has what was written at the new primary, so all of it would seem to be erased."""
    with redis_server() as primary, redis_server() as replica, opened(primary, archive, retry_for=0.5) as cut_off:
        cut_off.session("s", user="u").set("n", 1)
        cut_off.admin.archive()
        replica.follow(primary)
        wait_until(replica.in_sync, "the replica was not in sync")
        follow(replica, None)
        with opened(replica, archive) as behind:
            for id in ("s", "t"):
                behind.session(id, user="u").set("n", 2)
            with pytest.raises(WarmUnavailable, match="another server has replaced this one"):
                erase(cut_off)
            assert behind.session("t").get("n") == 2
            erase(behind)
            assert not behind.session("t").exists(fresh=True)


def goes_on_after_a_power_cut(rewound: Rewound, archive: str) -> None:
    """What was acknowledged and archived was given its versions: none may be given again."""
    with opened(rewound.server, archive) as store:
        session = store.session("s")
        given = [session.set("n", n) for n in range(10)]
        rewound.note()
        given += [session.set("n", n) for n in range(10, 20)]
        store.admin.archive()
        rewound.rewind()
        given += [session.set("n", n) for n in range(20, 30)]
        assert given == list(range(1, 31))
        assert session.get("n") == 29


def test_no_version_is_given_twice(rewound: Rewound, archive: str) -> None:
    goes_on_after_a_power_cut(rewound, archive)


def test_without_comparing_data_ids_versions_are_given_twice(rewound: Rewound, archive: str) -> None:
    """Negative control."""
    with (
        believing_a_note_for_ever(),
        sabotage("commit", "if kept_data_id ~= data_id then current = nil end", "data_id = kept_data_id or data_id"),
        pytest.raises(AssertionError),
    ):
        goes_on_after_a_power_cut(rewound, archive)


def test_what_an_idle_partition_lost_is_noticed_by_an_archiver(rewound: Rewound, archive: str) -> None:
    with opened(rewound.server, archive, archiver=True, archive_every=0.05) as store:
        session = store.session("s")
        session.set("n", 1)
        store.admin.archive()
        before = epoch_of(store, "s")
        rewound.restart()
        wait_until(lambda: epoch_of(store, "s") != before, "nobody began another epoch")
        assert session.get("n") == 1


# What is over


def test_a_lease_of_another_data_id_is_over_and_tokens_grow(rewound: Rewound, archive: str) -> None:
    with opened(rewound.server, archive) as store, opened(rewound.server, archive) as other:
        session = store.session("s")
        session.set("n", 0)
        rewound.note()
        with pytest.raises(Fenced), session.lock(ttl=60) as lease:
            session.set("n", 1)
            token = lease.token
            rewound.restart()
            with other.session("s").lock(ttl=30, wait=30) as theirs:
                assert theirs.token > token
            session.set("n", 2)
        assert other.session("s").get("n") == 1


def test_without_the_epoch_in_its_value_a_lock_outlives_its_life(rewound: Rewound, archive: str) -> None:
    """Negative control."""
    guard = "if holder and not string.find(holder, '@' .. epoch .. ':', 1, true) then holder = false end"
    with sabotage("commit", guard, ""), opened(rewound.server, archive) as store:
        session = store.session("s")
        session.set("n", 0)
        with session.lock(ttl=60):
            rewound.restart()
            session.set("n", 1)
        assert session.get("n") == 1


def erased_before_the_power_went(rewound: Rewound, archive: str) -> None:
    with opened(rewound.server, archive) as store:
        for id in ("gone", "deleted", "there"):
            store.session(id).set("secret", id)
        store.admin.archive()
        rewound.note()
        store.erase("gone")
        store.delete("deleted")
        store.admin.archive()
        rewound.rewind()
        assert store.session("there").get("secret") == "there"
        assert store.session("gone").get("secret") is None
        assert store.session("deleted").get("secret") is None
        with redis.Redis.from_url(rewound.server.url) as client:
            kept = [client.hgetall(key) for key in client.scan_iter("*:r:session:*") if client.type(key) == b"hash"]
        assert not any(b"gone" in value for fields in kept for value in fields.values())


def test_who_was_erased_or_deleted_does_not_come_back(rewound: Rewound, archive: str) -> None:
    erased_before_the_power_went(rewound, archive)


def test_without_looking_for_what_was_erased_it_comes_back(
    rewound: Rewound, archive: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control."""
    real = ColdStore.changed_since
    monkeypatch.setattr(ColdStore, "changed_since", lambda *given: Changed(real(*given).records, set()))
    with pytest.raises(AssertionError):
        erased_before_the_power_went(rewound, archive)


# A server under living connections


@contextmanager
def pair() -> Iterator[tuple[RedisServer, RedisServer]]:
    with redis_server() as first, redis_server() as second:
        yield first, second


def said(server: RedisServer, *words: str) -> Any:
    with redis.Redis.from_url(server.url, decode_responses=True) as client:
        return client.execute_command(*words)


def follow(server: RedisServer, other: RedisServer | None) -> None:
    if other is None:
        said(server, "REPLICAOF", "NO", "ONE")
        return
    server.follow(other)
    wait_until(lambda: server.info("replication").get("master_link_status") == "up", "no replica")
    wait_until(
        lambda: server.info("replication")["master_repl_offset"] == other.info("replication")["master_repl_offset"],
        "the replica is behind",
    )


def test_the_first_replica_gives_the_data_another_name_and_nothing_is_lost(archive: str) -> None:
    with pair() as (server, replica), opened(server, archive) as store:
        session = store.session("s")
        session.set("n", 0)
        before = epoch_of(store, "s")
        with session.lock(ttl=60):
            name = server.info("replication")["master_replid"]
            follow(replica, server)
            assert server.info("replication")["master_replid"] != name
            with redis.Redis.from_url(server.url) as client:
                client.client_kill_filter(_type="normal", skipme=True)  # so that connections are made anew
            assert session.set("n", 1) == 2
        assert epoch_of(store, "s") == before
        assert recovered(store) == 0


def test_a_name_that_changes_before_a_commit_is_confirmed_makes_it_not_look_lost(
    archive: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        redis_server("--appendonly", "yes", "--appendfsync", "always") as server,
        redis_server() as replica,
        opened(server, archive, beat=600.0, durability="fsynced") as store,
    ):
        session = store.session("s")
        session.set("n", 0)
        confirming = store._core._lifecycle.tiers().confirming
        confirm = confirming.confirm

        async def renamed_before(*given: Any) -> Any:
            if replica.info("replication")["role"] == "master":
                follow(replica, server)
                time.sleep(0.05)  # what was asked of the server last is old by then
            return await confirm(*given)

        monkeypatch.setattr(confirming, "confirm", renamed_before)
        assert session.set("n", 1) == 2
        assert recovered(store) == 0


def test_a_mark_is_not_written_under_a_name_that_is_over_and_says_so(archive: str) -> None:
    with pair() as (server, replica), opened(server, archive, beat=600.0) as store:
        session = store.session("s")
        session.set("n", 0)
        tiers = store._core._lifecycle.tiers()
        keys = tiers.keys.of(Ref("session", "s")).partition
        names = tiers.keys.partition(keys)
        epoch = epoch_of(store, "s")
        follow(replica, server)
        time.sleep(0.05)
        assert finish(tiers.warm.partitions.mark(names, epoch)) is False
        finish(tiers.recovery.start(keys))
        assert finish(tiers.warm.partitions.mark(names, epoch)) is True
        assert epoch_of(store, "s") == epoch


def test_a_right_that_is_taken_away_does_not_stop_who_is_connected(archive: str) -> None:
    with redis_server() as server, opened(server, archive, beat=600.0) as store:
        session = store.session("s")
        session.set("n", 0)
        said(server, "ACL", "SETUSER", "default", "-info")
        time.sleep(0.05)
        assert session.set("n", 1) == 2
        assert session.get("n", fresh=True) == 1


def swap(server: RedisServer, replica: RedisServer, session: Any, store: StateStore) -> None:
    """A replica that was cut off before the last commits becomes the server's primary, and is left again."""
    for n in range(10):
        session.set("n", n)
    store.admin.archive()
    follow(replica, server)
    follow(replica, None)
    for n in range(10, 20):
        session.set("n", n)
    store.admin.archive()
    follow(server, replica)
    follow(server, None)


@contextmanager
def believing_a_note_for_ever() -> Iterator[None]:
    """Which note the server wrote when it was last asked what its data is called: see same_data.lua."""
    with ExitStack() as stack:
        for script in (each for each in vars(scripts).values() if isinstance(each, Script)):
            if (condition := b"if not age or age > 20 or") in script.text:
                stack.enter_context(sabotage(script.name, condition.decode(), "if not age or age > 1e9 or"))
        yield


def noticed_by_the_first(change: Callable[[Any], object], archive: str) -> None:
    """The connection has the previous data id, and so has the partition, a copy. Nobody else reads or writes."""
    with pair() as (server, replica), opened(server, archive, beat=600.0) as store:
        session = store.session("s")
        swap(server, replica, session, store)
        change(session)
        assert count(epoch_of(store, "s")) == 2
        assert versions(store, "s")[:20] == list(range(1, 21))


FIRSTS: dict[str, Callable[[Any], object]] = {
    "write": lambda session: session.set("n", 20),
    "read": lambda session: session.get("n", fresh=True),
    "lock": lambda session: session.lock().__enter__(),
}


@pytest.mark.wide
@pytest.mark.parametrize("first", FIRSTS)
def test_a_swap_is_noticed_by_whatever_comes_first(first: str, archive: str) -> None:
    noticed_by_the_first(FIRSTS[first], archive)


@pytest.mark.wide
@pytest.mark.parametrize("first", FIRSTS)
def test_it_is_not_if_the_server_is_not_asked(first: str, archive: str) -> None:
    with believing_a_note_for_ever(), pytest.raises(AssertionError):
        noticed_by_the_first(FIRSTS[first], archive)


def test_what_is_written_before_anybody_notices_a_swap_is_kept_in_a_branch(archive: str) -> None:
    with pair() as (server, replica), opened(server, archive, beat=600.0) as store:
        session = store.session("s")
        with believing_a_note_for_ever():
            swap(server, replica, session, store)
            assert session.set("n", 20) == 11, "nobody has looked"
        with opened(server, archive) as other:
            assert other.session("s").get("n") == 19
            (branch,) = other.admin.branches("s")
            assert (branch.base, branch.commits) == (10, 1)
            assert other.session("s").at(branch=branch.id).fields["n"] == 20
        assert session.set("n", 21) == 21
        store.admin.archive()
        assert versions(store, "s") == list(range(1, 22))
        assert count(epoch_of(store, "s")) == 2


def written_before_a_swap_and_archived_over(archive: str) -> None:
    """Another worker's connection lived through it: its commits have the offsets that the lost ones had."""
    with pair() as (server, replica), ExitStack() as stack:
        store, other = (stack.enter_context(opened(server, archive, partitions=1, beat=600.0)) for _ in range(2))
        other.session("o").set("n", 0)
        store.session("s").set("n", 0)
        store.admin.archive()
        follow(replica, server)
        follow(replica, None)
        for n in range(1, 4):
            store.session("s").set("n", n)  # known to Redis, and to its writer
        follow(server, replica)
        follow(server, None)
        for n in range(1, 6):
            other.session("o").set("n", n)
        other.admin.archive()
        finish(store._core._lifecycle.tiers().unarchived.look())
        with opened(server, archive, partitions=1) as third:
            assert third.session("s").get("n") == 3, "put back"
            assert third.session("o").get("n") == 5


def test_what_a_writer_remembers_is_not_taken_for_archived_by_the_offset_of_another_history(archive: str) -> None:
    written_before_a_swap_and_archived_over(archive)


@pytest.mark.wide
def test_it_is_if_the_server_is_not_asked(archive: str) -> None:
    with believing_a_note_for_ever(), pytest.raises(AssertionError):
        written_before_a_swap_and_archived_over(archive)


def noticed_by_the_probe(archive: str) -> None:
    with pair() as (server, replica), opened(server, archive, max_staleness=0.4) as store:
        session = store.session("s")
        wait_until(lambda: bool(session.get("n", 0) == 0 and store._core._lifecycle.tiers().link.up), "no link")
        swap(server, replica, session, store)
        wait_until(lambda: session.get("n", fresh=True) == 19, "nobody noticed", 10.0)
        assert session.set("n", 20) == 21


@pytest.mark.wide
def test_a_link_notices_a_server_that_was_made_a_replica_and_promoted_again(archive: str) -> None:
    noticed_by_the_probe(archive)


# Recoveries that are ended in the middle, and many at once


@pytest.mark.wide
def test_a_recovery_that_ends_in_the_middle_is_done_again(
    rewound: Rewound, archive: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(rewound.server, archive) as store:
        session = store.session("s")
        for n in range(10):
            session.set("n", n)
            if n == 4:
                store.admin.archive()
        partitions = store._core._lifecycle.tiers().warm.partitions
        install = partitions.install

        async def dies(*given: Any, **named: Any) -> str:
            monkeypatch.setattr(partitions, "install", install)
            raise StateError("the worker died")

        monkeypatch.setattr(partitions, "install", dies)
        rewound.restart()
        with pytest.raises(StateError, match="the worker died"):
            session.set("n", 10)
        with opened(rewound.server, archive) as other:
            assert other.session("s").set("n", 10) == 11, "once the right of the one that died has run out"
            assert versions(other, "s") == list(range(1, 12))
            assert quarantined(other) == 0


@contextmanager
def of_two_servers(rewound: Rewound, archive: str) -> Iterator[tuple[StateStore, bytes]]:
    """A store whose server has just lost what another one still has, and the file of that one.

    Version 1 of "b" was written by a worker that does not say what it wrote.
    """
    with opened(rewound.server, archive, partitions=1) as store:
        with opened(rewound.server, archive, partitions=1, unarchived_bytes=0) as silent:
            store.session("a").set("n", 1)
            store.admin.archive()
            rewound.note()
            silent.session("b").set("n", 1)
            store.session("b").set("m", 1)
            store.session("a").set("n", 2)
        whole = rewound.whole()
        rewound.rewind()
        yield store, whole


@pytest.mark.parametrize("where", ["mint", "install"])
def test_what_was_put_back_on_one_server_does_not_stand_for_all_that_the_next_one_has(
    rewound: Rewound, archive: str, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The worker that put it back died before the epoch began."""
    with of_two_servers(rewound, archive) as (store, whole):
        dies = Mock(side_effect=StateError("the worker died"))
        place = store._core._lifecycle.cold if where == "mint" else store._core._lifecycle.tiers().warm.partitions
        monkeypatch.setattr(place, where, dies)
        with pytest.raises(StateError, match="the worker died"):
            store.session("a").set("n", 3)
        rewound.restart(whole)
        with opened(rewound.server, archive, partitions=1) as other:
            session = other.session("b")
            assert other.session("a").set("n", 3) == 3
            assert session.set("m", 2) == len(versions(other, "b"))
            known = [
                session.get_all(),
                *(session.at(branch=each.id).fields for each in store.admin.branches(session.id)),
            ]
            assert any("n" in fields for fields in known), "nothing is lost"


def test_a_server_that_takes_over_while_writers_are_asked_is_compared_with_sql_first(
    rewound: Rewound, archive: str
) -> None:
    with of_two_servers(rewound, archive) as (store, whole):
        recovery = store._core._lifecycle.tiers().recovery
        gather = recovery._gather

        async def gathers(*given: Any) -> Any:
            found = await gather(*given)
            recovery._gather = gather
            rewound.restart(whole)
            return found

        recovery._gather = gathers
        assert store.session("a").set("n", 3) == 3
        assert store.session("b").set("m", 2) == 3
        assert versions(store, "b") == [1, 2, 3]
        assert store.session("b").get_all() == {"n": 1, "m": 2}
        assert not store.admin.branches("b"), "nothing diverged"


@contextmanager
def recovering(rewound: Rewound, archive: str, seconds: float) -> Iterator[tuple[StateStore, Worker]]:
    """A store, and a process that is in the middle of recovering its one partition for so long."""
    place = {"url": rewound.server.url, "archive": archive, "namespace": "n", "partitions": 1, "archiver": False}
    with opened(rewound.server, archive, partitions=1) as store:
        store.session("s").set("n", 0)
        store.admin.archive()
        with Worker("recover", id="s", seconds=seconds, beat=0.0, **place) as worker:
            assert worker.line() == "opened"
            rewound.restart()
            worker.say("go")
            assert worker.line() == "inside"
            yield store, worker


@pytest.mark.wide
def test_a_worker_that_is_stopped_in_a_recovery_holds_nobody_up_for_long(rewound: Rewound, archive: str) -> None:
    """Two seconds, the time of the recovery itself apart; and what it does when it goes on changes nothing."""
    with recovering(rewound, archive, 2.0) as (store, worker):
        os.kill(worker.process.pid, signal.SIGSTOP)
        began = time.monotonic()
        assert store.session("s").set("n", 1) == 2
        assert time.monotonic() - began < 7.0, "it was 10 s and more"
        epoch = epoch_of(store, "s")
        os.kill(worker.process.pid, signal.SIGCONT)
        assert worker.line() == "3"
        assert worker.line() == "0"
        assert epoch_of(store, "s") == epoch
        assert versions(store, "s") == [1, 2, 3]


@pytest.mark.wide
def test_a_worker_whose_recovery_takes_long_is_not_taken_for_one_that_was_stopped(
    rewound: Rewound, archive: str
) -> None:
    with recovering(rewound, archive, 5.0) as (store, worker):
        assert store.session("s").set("n", 1) in (2, 3)
        assert {worker.line(), str(store.session("s").version(fresh=True))} <= {"2", "3"}
        assert worker.line() == "1", "it was the one that recovered"
        assert recovered(store) == 0


def test_it_is_if_it_does_not_say_that_it_goes_on(rewound: Rewound, archive: str, monkeypatch: Any) -> None:
    """The negative control of both."""
    stopped, go_on = threading.Event(), threading.Event()
    with opened(rewound.server, archive, partitions=1) as store, opened(rewound.server, archive, partitions=1) as other:
        store.session("s").set("n", 0)
        store.admin.archive()
        partitions = other._core._lifecycle.tiers().warm.partitions
        install = partitions.install

        async def slowly(*given: Any, **named: Any) -> str:
            stopped.set()
            go_on.wait(30)
            return await install(*given, **named)

        async def keep(*_: Any) -> None: ...

        monkeypatch.setattr(partitions, "install", slowly)
        monkeypatch.setattr(partitions, "keep_right", keep)
        rewound.restart()
        late = threading.Thread(target=other.session("s").set, args=("n", 1))
        late.start()
        assert stopped.wait(30)
        assert store.session("s").set("n", 1) == 2
        assert recovered(store) == 1, "it was taken for one that was stopped"
        go_on.set()
        late.join(30)


def test_many_replicas_begin_one_epoch(rewound: Rewound, archive: str) -> None:
    stores = [opened(rewound.server, archive, partitions=1) for _ in range(4)]
    try:
        stores[0].session("s").set("n", 0)
        rewound.restart()
        given: list[int] = []
        threads = [
            threading.Thread(target=lambda store=store: given.append(store.session("s").increment("count")))
            for store in stores
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(given) == [1, 2, 3, 4]
        database = stores[0]._core._lifecycle.cold.database
        with database.read() as connection:
            rows = connection.execute(cursors.select().order_by(cursors.c.ordinal)).mappings().all()
        assert [row["closed"] for row in rows] == [True, False]
    finally:
        for store in stores:
            store.close()


def test_a_connection_that_was_made_to_a_replica_starts_nothing(rewound: Rewound, archive: str) -> None:
    with opened(rewound.server, archive) as store:
        store.session("s").set("n", 0)
        keys = store._core._lifecycle.tiers().keys.partition(0)
        with redis.Redis.from_url(rewound.server.url) as client:
            client.delete(keys.meta)
            assert client.eval(MINT.text, 1, keys.meta, "", "token", "1000") == [b"busy"]
            assert not client.exists(keys.meta)


def test_the_right_to_start_is_not_what_a_full_redis_evicts(rewound: Rewound, archive: str) -> None:
    with opened(rewound.server, archive) as store:
        data_id, keys = "1", store._core._lifecycle.tiers().keys.partition(0)
        with redis.Redis.from_url(rewound.server.url) as client:

            def asked(token: str, ms: int) -> object:
                return client.eval(MINT.text, 1, keys.meta, data_id, f"{token}@1", ms)

            client.flushall()
            assert asked("first", 60_000) == [b"ok", b""]
            assert client.info("keyspace")["db0"]["expires"] == 0
            assert asked("second", 60_000) == [b"busy"]
            # A right of another data id is not renewed: its holder saw other data.
            assert client.eval(MINT.text, 1, keys.meta, "2", "first@1", 60_000) == [b"busy"]
            assert asked("first", 1) == [b"ok", b""]
            time.sleep(0.01)
            assert asked("second", 60_000) == [b"ok", b""]
            client.flushall()


# SQL is what is older


def test_where_sql_is_older_redis_is_served_and_not_archived(rewound: Rewound, archive: str, tmp_path: Path) -> None:
    kept = tmp_path / "kept.db"
    with opened(rewound.server, archive) as store:
        session = store.session("s")
        session.set("n", 0)
        store.admin.archive()
        with closing(sqlite3.connect(tmp_path / "archive.db")) as there, closing(sqlite3.connect(kept)) as copy:
            there.backup(copy)
        for n in range(1, 5):
            session.set("n", n)
        store.admin.archive()
    for each in tmp_path.glob("archive.db*"):
        each.unlink()
    kept.rename(tmp_path / "archive.db")
    with opened(rewound.server, archive) as store:
        session = store.session("s")
        assert session.get("n") == 4
        epoch = epoch_of(store, "s")
        assert session.set("n", 5) == 6
        rewound.restart()
        assert session.set("n", 6) == 7
        assert epoch_of(store, "s") == epoch
        with pytest.raises(ColdUnavailable):
            store.admin.archive()
        assert any(not each.ok for each in store.admin.doctor() if each.name.startswith("partition"))
        assert session.get("n") == 6
