"""A backup of SQL is restored that is older than Redis: `repair` brings back what Redis has, and names what is lost.

Until then Redis is served (see test_another_data_id). Each test restores a copy of the database's file that was made
while the store went on.
"""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from below import hidden
from controls import sabotage

from distributed_state import AsyncStateStore, Deleted, Encryption, KeyRing, NotFound, StateError, StateStore
from distributed_state.cold.store import ColdStore
from distributed_state.port.blocking import finish
from distributed_state.programs.servers import RedisServer, redis_server, wait_until
from distributed_state.results import LostMessages, Repaired
from distributed_state.store.reaper import Reaper
from distributed_state.tiers import reconcile
from distributed_state.values.model import Ref
from distributed_state.warm.partitions import Partitions
from distributed_state.warm.scripts import RENAME

WHOLE = {"archiver": False, "max_staleness": 0.0, "partitions": 4, "retry_for": 30.0, "namespace": "n"}


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as own:
        yield own


class Sql:
    """The database of a test, its file, and the copy that is to be restored."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "archive.db"
        self.copy = folder / "copy.db"
        self.url = f"sqlite:///{self.file}"

    def back_up(self) -> None:
        with closing(sqlite3.connect(self.file)) as there, closing(sqlite3.connect(self.copy)) as copy:
            there.backup(copy)

    def restore(self) -> None:
        for each in self.file.parent.glob("archive.db*"):
            each.unlink()
        self.copy.rename(self.file)


@pytest.fixture
def sql(tmp_path: Path) -> Sql:
    return Sql(tmp_path)


@contextmanager
def opened(server: RedisServer, sql: Sql, **settings: Any) -> Iterator[StateStore]:
    with StateStore.open(server.url, archive=sql.url, **(WHOLE | settings)) as store:
        yield store


def healthy(store: StateStore) -> bool:
    return all(each.ok for each in store.admin.doctor() if each.name.startswith("partition"))


def texts(store: StateStore, id: str) -> list[Any]:
    return [message.content for message in store.session(id).messages()]


def test_what_redis_has_comes_back(server: RedisServer, sql: Sql) -> None:
    with opened(server, sql) as store:
        session = store.session("s", user="alice")
        session.set_many({"n": 0, "gone": 1})
        session.append({"role": "user", "content": "first"})
        store.admin.archive()
        sql.back_up()
        session.append({"role": "user", "content": "second"})
        session.delete("gone")
        session.set("n", 4)
        new = store.session("new", user="bob")
        new.set("made", "later")
        store.emit("thing.happened", {"n": 1}, subject=session)
        store.admin.archive()
        # Not archived before the backup is restored: the journal has these.
        only = store.session("journal")
        only.set("n", 1)
        only.set("n", 2)
        sql.restore()
    with opened(server, sql) as store:
        assert not healthy(store)
        assert store.session("s").set("m", 1) == 6
        planned = store.admin.repair(dry_run=True)
        assert store.admin.repair(dry_run=True) == planned
        assert not healthy(store)
        done = store.admin.repair()
        assert done == planned
        assert done.behind
        assert not done.lost
        assert not done.deleted
        assert healthy(store)
        store.admin.archive()
        assert store.admin.repair() == Repaired(partitions=4)
    # From SQL alone:
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
    with opened(server, sql) as store:
        session = store.session("s")
        assert session.get_all() == {"n": 4, "m": 1}
        assert texts(store, "s") == ["first", "second"]
        assert store.session("new").get("made") == "later"
        assert [each.id for each in store.sessions(user="bob")] == ["new"]
        assert [each.version for each in session.history()] == [1, 2, 6]
        assert session.at(version=6).fields == {"n": 4, "m": 1}
        with pytest.raises(NotFound):
            session.at(version=4)
        assert [each.version for each in store.session("journal").history()] == [1, 2]
        assert "thing.happened" in {each.type for each in store.admin.audit()}
        assert session.set("n", 5) == 7
        store.admin.archive()
        assert healthy(store)


def test_messages_that_neither_has_are_named_and_the_others_shown(server: RedisServer, sql: Sql) -> None:
    settings = {"recent_messages": 5}
    with opened(server, sql, **settings) as store:
        session = store.session("s")
        for n in range(10):
            session.append({"role": "user", "content": str(n)})
        store.admin.archive()
        sql.back_up()
        for n in range(10, 30):
            session.append({"role": "user", "content": str(n)})
        store.admin.archive()
        session.fork("fork")
        store.session("fork").append({"role": "user", "content": "of the fork"})
        store.admin.archive()
        sql.restore()
    with opened(server, sql, **settings) as store:
        done = store.admin.repair()
        assert sorted(done.lost, key=str) == [LostMessages("session", id, 10, 24) for id in ("fork", "s")]
        shown = [*map(str, range(10)), *map(str, range(25, 30))]
        assert texts(store, "s") == shown
        assert texts(store, "fork") == [*shown, "of the fork"]
        store.session("s").append({"role": "user", "content": "next"})
        assert texts(store, "s")[-2:] == ["29", "next"]
        store.admin.archive()
        assert healthy(store)


def test_a_commit_after_a_repair_that_left_out_lost_messages_is_archived(server: RedisServer, sql: Sql) -> None:
    with opened(server, sql, recent_messages=5) as store:
        session = store.session("s")
        for n in range(5):
            session.append(message(str(n)))
        store.admin.archive()
        sql.back_up()
        for n in range(5, 20):
            session.append(message(str(n)))
        store.admin.archive()
        sql.restore()
    with opened(server, sql, recent_messages=5) as store:
        for n in range(20, 30):
            store.session("s").append(message(str(n)))
        (lost,) = store.admin.repair().lost
        version = store.session("s").append(message("next"), durability="archived")
        assert store.session("s").append(message("last"), durability="archived") == version + 1
        assert lost.first == 5
        shown = [*map(str, [*range(5), *range(lost.last + 1, 30)]), "next", "last"]
        assert texts(store, "s") == shown
        evict(server, store, "s")
        assert texts(store, "s") == shown
        assert [each.version for each in store.session("s").history()][-2:] == [version, version + 1]


def items_of(store: StateStore, id: str, where: str = "x") -> dict[str, Any]:
    return {each.key: each.value for each in store.session(id).items(where).list(limit=1000).items}


def test_items_come_back_with_their_record(server: RedisServer, sql: Sql) -> None:
    """The journal is trimmed: what the window has of them, also what was deleted, comes with the state."""
    with opened(server, sql) as store:
        for id in ("s", "cleared", "rolled", "journal", "ended"):
            store.session(id).items("x").put_many({"a": 1, "b": 1, "c": 1})
        store.session("later").set("n", 0)
        store.admin.archive()
        sql.back_up()
        for id in ("s", "cleared", "rolled", "ended"):
            store.session(id).items("x").put_many({"a": 2, "d": b"2"})
            store.session(id).items("x").delete("b")
        store.session("cleared").clear(items=True)
        store.session("cleared").items("x").put("e", 3)
        store.session("rolled").rollback(version=1)
        store.session("rolled").items("x").put("e", 3)
        for id in ("new", "later"):
            store.session(id).items("y").put("n", 1)
            store.session(id).set("n", 1)
        store.delete("ended")
        store.admin.archive()
        store.session("s").items("x").put("f", 4)
        store.session("journal").items("x").put("a", 5)
        sql.restore()
    shown = {
        "s": {"a": 2, "c": 1, "d": b"2", "f": 4},
        "cleared": {"e": 3},
        "rolled": {"a": 1, "b": 1, "c": 1, "e": 3},
        "journal": {"a": 5, "b": 1, "c": 1},
    }
    with opened(server, sql) as store:
        done = store.admin.repair()
        assert done.records
        assert not done.lost_items
        assert {id: items_of(store, id) for id in shown} == shown
        store.session("s").items("x").put("c", 6)
        store.admin.archive()
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
    with opened(server, sql) as store:
        assert {id: items_of(store, id) for id in shown} == shown | {"s": shown["s"] | {"c": 6}}
        assert items_of(store, "new", "y") == items_of(store, "later", "y") == {"n": 1}
        for id, where in (("new", "y"), ("later", "y"), *((id, "x") for id in shown)):
            store.admin.import_(store.admin.export(id), id="copy " + id)
            assert items_of(store, "copy " + id, where) == items_of(store, id, where)
        store.session("ended").create({})
        assert items_of(store, "ended") == {}
        assert healthy(store)


@pytest.mark.parametrize("gone", [False, True], ids=["left the window", "the window is gone"])
def test_of_which_records_items_may_be_lost_is_said(server: RedisServer, sql: Sql, gone: bool) -> None:
    with opened(server, sql) as store:
        for id in ("s", "same"):
            store.session(id).items("x").put("a", 1)
        store.admin.archive()
        sql.back_up()
        store.session("s").items("x").put_many({f"k{number:03d}": number for number in range(100)})
        store.admin.archive()
        store.session("s").set("n", 1)
        store.session("same").set("n", 1)
        store.admin.archive()
        if gone:
            with redis.Redis.from_url(server.url) as client:
                client.delete(store._core._lifecycle.tiers().keys.of(Ref("session", "s")).items)
        sql.restore()
    with opened(server, sql) as store:
        done = store.admin.repair()
        assert done.lost_items == (("session", "s"),)
        assert items_of(store, "s") == {"a": 1} | ({} if gone else {f"k{n:03d}": n for n in range(36, 100)})
        assert (items_of(store, "same"), store.session("same").get("n")) == ({"a": 1}, 1)


def test_what_was_deleted_or_erased_since_stays_so(server: RedisServer, sql: Sql) -> None:
    with opened(server, sql) as store:
        for id in ("erased", "forgotten", "deleted"):
            store.session(id, user="u" if id == "forgotten" else None).append({"role": "user", "content": "secret"})
        store.admin.archive()
        sql.back_up()
        store.erase("erased")
        store.forget("u")
        store.delete("deleted")
        store.admin.archive()
        sql.restore()
    with opened(server, sql) as store:
        assert texts(store, "erased") == ["secret"]  # as in the backup: nobody has said otherwise yet
        done = store.admin.repair()
        assert sorted(done.deleted) == [("session", "erased"), ("session", "forgotten")]
        for id in ("erased", "forgotten", "deleted"):
            assert texts(store, id) == []
        assert [each.id for each in store.sessions()] == []


def evict(server: RedisServer, store: StateStore, id: str) -> None:
    with redis.Redis.from_url(server.url) as client:
        client.delete(store._core._lifecycle.tiers().keys.of(Ref("session", id)).record)


def message(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.mark.wide
@pytest.mark.parametrize("begun", ["before", "after"])
def test_what_was_erased_and_began_again_shows_nothing_of_before(server: RedisServer, sql: Sql, begun: str) -> None:
    """Its messages are numbered from 0 again."""

    def begin(store: StateStore) -> None:
        store.session("s").create({})
        store.session("s").append(message("new"))
        store.admin.archive()

    with opened(server, sql) as store:
        session = store.session("s")
        session.append(message("secret"), message("more"))
        store.admin.archive()
        sql.back_up()
        store.erase(session.id)
        assert texts(store, "s") == []
        if begun == "before":
            begin(store)
            session.set("n", 1)
            store.admin.archive()
        sql.restore()
    with opened(server, sql) as store:
        store.admin.repair()
        if begun == "after":
            begin(store)
        assert texts(store, "s") == ["new"]
        evict(server, store, "s")
    with opened(server, sql) as store:
        assert texts(store, "s") == ["new"]
        assert store._core._lifecycle.cold.count_quarantined() == 0


@pytest.mark.wide
def test_a_fork_of_what_was_erased_stays(server: RedisServer, sql: Sql) -> None:
    with opened(server, sql) as store:
        store.session("s").append(message("a"))
        store.session("s").fork("fork")
        store.session("fork").append(message("own"))
        store.admin.archive()
        store.erase("s")
        sql.back_up()
        for text in ("later", "still later"):
            store.session("fork").append(message(text))
            store.admin.archive()
        sql.restore()
    with opened(server, sql) as store:
        store.admin.repair()
        assert store._core._lifecycle.cold.pending() == []
        assert texts(store, "fork") == ["a", "own", "later", "still later"]


@pytest.mark.wide
def test_a_fork_of_what_redis_lost_does_not_show_what_comes_in_its_place(server: RedisServer, sql: Sql) -> None:
    with opened(server, sql, recent_messages=2, partitions=1) as store:
        source = store.session("s")
        source.append(*[message(str(n)) for n in range(3)])
        store.admin.archive()
        sql.back_up()
        source.append(*[message(str(n)) for n in range(3, 6)])
        store.admin.archive()
        source.fork("fork")
        store.session("fork").append(message("own"))
        store.admin.archive()
        evict(server, store, "s")
        sql.restore()
    with opened(server, sql, recent_messages=2, partitions=1) as store:
        assert [each.id for each in store.admin.repair().lost] == ["fork"]
        store.session("s").append(*[message(f"wrong {n}") for n in range(3)])
        store.admin.archive()
        assert texts(store, "fork") == ["0", "1", "2", "own"]


@pytest.mark.wide
def test_messages_that_are_shown_again_are_named_if_they_are_lost(server: RedisServer, sql: Sql) -> None:
    with opened(server, sql, recent_messages=1) as store:
        session = store.session("s")
        session.set("n", 0)
        store.admin.archive()
        sql.back_up()
        session.append(message("a"), message("b"))
        store.admin.archive()
        session.clear(messages=True)
        store.admin.archive()
        session.rollback(steps=1)
        store.admin.archive()
        assert texts(store, "s") == ["a", "b"]
        sql.restore()
    with opened(server, sql, recent_messages=1) as store:
        assert store.admin.repair().lost
        assert texts(store, "s") == []
        store.session("s").append(message("c"))
        assert texts(store, "s") == ["c"]


@pytest.mark.wide
def test_what_was_deleted_read_from_the_backup_and_written_is_deleted_again(server: RedisServer, sql: Sql) -> None:
    with opened(server, sql) as store:
        store.session("s").append(message("secret"))
        store.admin.archive()
        sql.back_up()
        store.erase("s")
        store.emit("conversation.deleted", subject=store.session("s"))  # anybody may say so: it is about no version
        store.admin.archive()
        sql.restore()
    with opened(server, sql) as store:
        assert store.session("s").set("n", 1) == 2
        assert store.admin.repair().deleted == (("session", "s"),)
        assert texts(store, "s") == []
        assert not store.session("s").exists()
        assert store.session("s").at(version=2).fields == {"n": 1}
        with store.durable("archived"):
            assert store.session("s").create({"n": 2}) == 4
        evict(server, store, "s")
        assert store.session("s").get_all() == {"n": 2}


def test_what_expired_and_was_read_from_the_backup_is_expired_again(server: RedisServer, sql: Sql) -> None:
    with opened(server, sql) as store:
        session = store.session("s")
        session.append(message("secret"))
        store.admin.archive()
        sql.back_up()
        session.set_lifetime(idle=0.001)
        reaper = Reaper(store._core._lifecycle.tiers())
        while not reaper.expired:
            finish(reaper.sweep(range(4)))
        ended = session.history()[-1].time
        store.admin.archive()
        evict(server, store, "s")
        sql.restore()
    with opened(server, sql, expired="begin again") as store:
        assert store.session("s").set("n", 1) == 2
        assert store.admin.repair().deleted == (("session", "s"),)
        assert texts(store, "s") == []
        with pytest.raises(Deleted) as caught:
            store.session("s").fork("t")
        assert caught.value.expired == pytest.approx(ended, abs=1.0)
        store.session("s").set("n", 2)
        assert store.session("s").get_all() == {"n": 2}


def test_after_a_repair_nothing_is_left_to_look_at(server: RedisServer, sql: Sql) -> None:
    """Commits that came with a later version are resolved, as the audit says, and go with the next purge."""
    with opened(server, sql, partitions=1) as store:
        session = store.session("s")
        session.set("n", 0)
        store.admin.archive()
        sql.back_up()
        session.set("n", 1)
        session.set("n", 2)
        store.admin.archive()
        session.set("n", 3)
        session.set("n", 4)
        sql.restore()
    with opened(server, sql, partitions=1) as store:
        done = store.admin.repair()
        assert (done.records, done.aside, done.branched) == (1, 2, 0)
        assert {each.name for each in store.admin.doctor() if not each.ok} & {
            "sql quarantine",
            "epochs",
            "branches",
        } == set()
        (note,) = store.admin.audit(type="conversation.repaired")
        assert note.subject == "session:s"
        shown = {"version": 5, "after": 1, "aside": 2, "lost": [], "items": False, "deleted": False}
        assert note.data == shown
        cold = store._core._lifecycle.cold
        assert cold.count_quarantined() == 0
        assert len(cold.quarantined()) == 2
        assert store.session("s").version(durability="archived") == 5
        cold.purge(2**62, events_before_ms=0)
        assert cold.quarantined() == []
        assert len(store.admin.audit(type="conversation.repaired")) == 1


def test_a_commit_that_redis_left_as_it_read_the_backup_is_kept_in_a_branch(server: RedisServer, sql: Sql) -> None:
    with opened(server, sql, partitions=1) as store:
        session = store.session("s")
        session.set("n", 0)
        store.admin.archive()
        sql.back_up()
        session.set("n", 1)
        session.set("n", 2)
        store.admin.archive()
        evict(server, store, "s")
        sql.restore()
    with opened(server, sql, partitions=1) as store:
        assert store.session("s").set("m", 1) == 2
        assert store.admin.repair(dry_run=True).branched == 1
        assert store.admin.repair().branched == 1
        assert store.session("s").get_all() == {"n": 0, "m": 1}
        (branch,) = store.admin.branches("s")
        assert (branch.commits, branch.version, branch.missing) == (1, 3, ((2, 2),))
        assert store._core._lifecycle.cold.quarantined() == []
        assert store.session("s").set("n", 5, durability="archived") == 3


@pytest.mark.wide
def test_the_label_of_the_last_entry_and_its_event_are_kept(server: RedisServer, sql: Sql) -> None:
    with opened(server, sql, partitions=1) as store:
        session = store.session("s")
        session.set("n", 0)
        store.admin.archive()
        sql.back_up()
        for n in range(1, 3):
            session.set("n", n)
        store.admin.archive()
        session.set("n", 3)
        session.checkpoint("safe")
        sql.restore()
    with opened(server, sql, partitions=1) as store:
        done = store.admin.repair()
        assert (done.records, done.aside) == (1, len(store._core._lifecycle.cold.quarantined()))
        session = store.session("s")
        session.set("n", 9)
        session.rollback(label="safe")
        assert session.get("n") == 3
        store.admin.archive()
        lines = store.admin.export("s")
        assert store.admin.import_(lines, id="copy") == "copy"
        assert store.session("copy").get("n") == 3


@pytest.mark.wide
def test_a_repair_that_died_over_a_hole_in_the_journal_loses_nothing(
    server: RedisServer, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"partitions": 1, "retry_for": 1.0, "timeout": 1.0, "unarchived_bytes": 0}
    with opened(server, sql, **settings) as store:
        session = store.session("s0")
        session.set("n", 0)
        store.admin.archive()
        for n in (4, 4, 4, 1):
            session.set("n", n)
        with redis.Redis.from_url(server.url) as client:
            assert client.xdel(store._core._lifecycle.tiers().keys.partition(0).journal, "2-0", "3-0") == 2
        with monkeypatch.context() as broken:
            broken.setattr(ColdStore, "backfill", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                store.admin.repair()
        wait_until(lambda: served(store), "it is not served", 20)
        assert (session.get("n"), session.version()) == (1, 5)
        assert store.admin.repair().records == 1
        assert (session.get("n"), session.version()) == (1, 5)
        assert not store.admin.branches(session.id)


@pytest.mark.parametrize("first", [2, 3], ids=["at SQL's cursor", "further on"])
@pytest.mark.parametrize("memory", [0, 2**20], ids=["alone", "its writer lives"])
def test_a_hole_in_the_journal_is_filled_or_the_record_comes_whole(
    server: RedisServer, sql: Sql, memory: int, first: int
) -> None:
    with opened(server, sql, partitions=1, unarchived_bytes=memory) as store:
        session = store.session("s")
        session.set("n", 0)
        store.admin.archive()
        for n in range(1, 5):
            session.set("n", n)
        journal = store._core._lifecycle.tiers().keys.of(Ref("session", "s")).journal
        with redis.Redis.from_url(server.url) as client:
            assert client.xdel(journal, f"{first}-0", f"{first + 1}-0") == 2
        with pytest.raises(Exception, match=f"lacks entry {first}"):
            store.admin.archive()
        assert not healthy(store)
        done = store.admin.repair()
        before = first - 2  # was archived
        assert (done.records, done.commits, done.aside) == ((0, 4 - before, 0) if memory else (1, 0, 1 - before))
        store.admin.archive()
        assert healthy(store)
        alone = [*range(1, first), 5]
        assert [each.version for each in session.history()] == ([1, 2, 3, 4, 5] if memory else alone)
        assert session.set("n", 5) == 6
        assert not store.admin.branches(session.id)


def writes_meanwhile(server: RedisServer, sql: Sql) -> None:
    """Writers who go on through a repair lose nothing, and see no error."""
    with opened(server, sql) as store:
        sessions = [store.session(f"s{n}") for n in range(40)]
        for session in sessions:
            session.set("n", 0)
        store.admin.archive()
        sql.back_up()
        for session in sessions:
            session.set("n", 1)
        store.admin.archive()
        sql.restore()
    failed: list[StateError] = []
    with opened(server, sql) as store:
        stop = threading.Event()
        given: dict[str, list[int]] = {}

        def write(name: str) -> None:
            try:
                session = store.session(name)
                while not stop.is_set():
                    given.setdefault(name, []).append(session.increment("n"))
            except StateError as error:
                failed.append(error)

        threads = [threading.Thread(target=write, args=(f"s{n}",)) for n in range(4)]
        for thread in threads:
            thread.start()
        try:
            wait_until(lambda: len(given) == 4, "the writers do not write")
            with opened(server, sql) as other:
                other.admin.repair()
            before = {name: len(each) for name, each in given.items()}
            wait_until(lambda: failed or all(len(given[name]) > before[name] + 5 for name in before), "they stop")
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert not failed
        for numbers in given.values():
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        store.admin.archive()
        assert healthy(store)
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
    with opened(server, sql) as store:
        for name, numbers in given.items():
            assert store.session(name).get("n") == numbers[-1]
            assert not store.admin.branches(name)


@pytest.mark.wide
def test_writers_go_on_through_a_repair(server: RedisServer, sql: Sql) -> None:
    writes_meanwhile(server, sql)


def test_while_a_long_journal_is_read_the_right_to_start_is_kept(
    server: RedisServer, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lasts for ten seconds; then somebody else would open the partition."""
    with opened(server, sql, partitions=1) as store:
        session = store.session("s")
        session.set("n", 0)
        store.admin.archive()
        sql.back_up()
        session.set("n", 1)
        store.admin.archive()
        for n in range(100):
            session.set("n", n)
        sql.restore()
    asked: list[str] = []
    may = Partitions.renew_right

    async def counted(self: Any, keys: Any, token: str) -> bool:
        asked.append(token)
        return await may(self, keys, token)

    monkeypatch.setattr(Partitions, "renew_right", counted)
    monkeypatch.setattr(reconcile, "_PAGE", 10)
    with opened(server, sql, partitions=1) as store:
        store.admin.repair()
    assert len(asked) > 10, "once a page"
    assert len(set(asked)) == 1


@pytest.mark.wide
def test_without_the_guard_of_a_repair_others_write_meanwhile(server: RedisServer, sql: Sql) -> None:
    guard = "if kept[4] and string.match(kept[4], '%d+$') + 0 > now_ms then return {'other'} end"
    with sabotage("rename", guard, ""), pytest.raises((AssertionError, StateError)):
        writes_meanwhile(server, sql)


@pytest.mark.wide
def test_a_repair_that_was_broken_off_changes_nothing_and_is_repeated(
    server: RedisServer, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(server, sql, partitions=1, retry_for=1.0, timeout=1.0) as store:
        for n in range(3):
            store.session(f"s{n}").set("n", 0)
        store.admin.archive()
        sql.back_up()
        for n in range(3):
            store.session(f"s{n}").set("n", 1)
        store.admin.archive()
        sql.restore()
    with opened(server, sql, partitions=1, retry_for=1.0, timeout=1.0) as store:
        with monkeypatch.context() as broken:
            broken.setattr(ColdStore, "reach", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                store.admin.repair()
        # Who died with the right to start it holds it for two seconds; then Redis is served as before.
        session = store.session("s0")
        wait_until(lambda: served(store), "it is not served", 20)
        assert session.get("n") == 1
        assert session.set("n", 2) == 3
        assert not healthy(store)
        done = store.admin.repair()
        assert (done.records, done.commits) == (0, 1)
        store.admin.archive()
        assert healthy(store)


def served(store: StateStore) -> bool:
    try:
        return store.session("s0").get("n", fresh=True) == 1
    except StateError:
        return False


def test_while_it_is_repaired_nobody_else_lets_others_write(server: RedisServer, sql: Sql) -> None:
    with opened(server, sql, partitions=1) as store:
        store.session("s").set("n", 1)
        tiers = store._core._lifecycle.tiers()
        keys = tiers.keys.partition(0)
        with redis.Redis.from_url(server.url) as client:
            kept = client.hgetall(keys.meta)

            def renamed() -> Any:
                return client.eval(RENAME.text, 1, keys.meta, kept[b"life"], kept[b"epoch"], kept[b"life"])

            assert renamed() == [b"ok"]
            client.hset(keys.meta, "mint", "who 9999999999999")
            assert renamed() == [b"other"]
            client.hset(keys.meta, "mint", "who 1")
            assert renamed() == [b"ok"]
            client.hdel(keys.meta, "mint")


@pytest.mark.wide
async def test_on_the_asyncio_api_and_with_encryption(server: RedisServer, sql: Sql) -> None:
    settings: dict[str, Any] = {**WHOLE, "encryption": Encryption(KeyRing({"k": bytes(32)}))}
    async with await AsyncStateStore.open(server.url, archive=sql.url, **settings) as store:
        session = store.session("s")
        await session.set("n", 0)
        await store.admin.archive()
        sql.back_up()
        await session.set("n", 1)
        await session.append({"role": "user", "content": "text"})
        await store.admin.archive()
        sql.restore()
    told: list[Repaired] = []
    async with await AsyncStateStore.open(server.url, archive=sql.url, **settings) as store:
        done = await store.admin.repair(progress=told.append)
        assert done.records == 1
        assert [each.partitions for each in told] == [1, 2, 3, 4]
        await store.admin.archive()
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
    async with await AsyncStateStore.open(server.url, archive=sql.url, **settings) as store:
        assert await store.session("s").get("n") == 1
        assert [each.content for each in await store.session("s").messages()] == ["text"]


@pytest.mark.wide
def test_the_command_shows_repairs_and_says_what_is_lost(server: RedisServer, sql: Sql) -> None:
    settings = {"recent_messages": 5}
    with opened(server, sql, **settings) as store:
        session = store.session("s")
        session.append({"role": "user", "content": "first"})
        store.admin.archive()
        sql.back_up()
        for n in range(10):
            session.append({"role": "user", "content": str(n)})
        store.admin.archive()
        sql.restore()

    def ran(*words: str) -> subprocess.CompletedProcess[str]:
        command, urls = (
            [sys.executable, "-m", "distributed_state"],
            hidden("--url", server.url, "--archive", sql.url)[1],
        )
        given = {f"DISTRIBUTED_STATE_{name.upper()}": str(WHOLE[name]) for name in ("namespace", "partitions")}
        given = os.environ | given | urls | {"DISTRIBUTED_STATE_RECENT_MESSAGES": "5", "COLUMNS": "200"}
        return subprocess.run([*command, "repair", *words], env=given, capture_output=True, text=True, check=False)

    planned = ran("--dry-run")
    assert planned.returncode == 1
    assert "would archive: 0 commits, 1 whole records" in planned.stdout
    assert "lost: messages 1 to 5 of session s" in planned.stdout
    done = ran()
    assert done.returncode == 1
    assert "archived: 0 commits, 1 whole records" in done.stdout
    again = ran()
    assert (again.returncode, again.stdout) == (
        0,
        "nothing to repair: SQL is up to date with Redis in all 4 partitions\n",
    )
