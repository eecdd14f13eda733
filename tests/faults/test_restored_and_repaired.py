"""A property: of what was acknowledged nothing is lost unnamed, whatever was written around a restore of SQL.

Random writes at every level, a backup, writes, the restore, writes, and a `repair` that is killed at any point, is
repeated after more writes, and followed by others. Afterwards each record shows what was acknowledged, or the audit
names it; nothing raises; and SQL alone shows the same.

Where there are several writers, each is a store of its own in a thread of its own, they write while SQL is put back (if
a server has it) and while it is repaired, and the repair is the command, in a process that SIGKILL ends.
"""

from __future__ import annotations

import itertools
import random
import re
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import psycopg
import pytest
import redis
from below import Worker, redis_of
from conftest import Servers
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from sync_api import Blocking

from distributed_state import ColdUnavailable, DurabilityUnknown, StateError, StateStore, Unavailable
from distributed_state.cold import backfill
from distributed_state.cold.store import ColdStore
from distributed_state.programs.servers import redis_cluster, redis_server
from distributed_state.results import Repaired
from distributed_state.values.model import Ref

_LEVELS = ("memory", "fsynced", "archived")
_KINDS = ("set", "append", "several", "put", "fork", "archive")
_CALLS = ("sql", "script", "scripts", "command", "commands", "command_with")
_DURABLE = ("--appendonly", "yes", "--appendfsync", "always")
_SETTINGS: dict[str, Any] = {
    "archiver": False, "max_staleness": 0.0, "partitions": 2, "namespace": "n", "recent_messages": 3, "retry_for": 5.0,
}  # fmt: skip
Write = tuple[str, int, str]
_writes = st.lists(st.tuples(st.sampled_from(_KINDS), st.integers(0, 3), st.sampled_from(_LEVELS)), max_size=6)


class Killed(BaseException):
    """The process of the repair ends here."""


class Sql(Protocol):
    """A database that can be copied, and put back."""

    url: str
    live: bool  # whether it is put back while stores are open

    def back_up(self) -> None: ...

    def restore(self) -> None: ...


class SqliteFile:
    """A file, which is put back while no store is open."""

    live = False

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


class PostgresDatabase:
    """A database on a server, which is put back under stores that are open; so their connections end."""

    live = True

    def __init__(self, url: str) -> None:
        self.url = url
        self.name = urlsplit(url).path[1:]
        self._server = url.replace("+psycopg", "").removesuffix(self.name) + "postgres"

    def back_up(self) -> None:
        with self._connected() as connection:
            # Nobody may be in it while it is copied.
            connection.execute(f"ALTER DATABASE {self.name} ALLOW_CONNECTIONS false")
            self._end_others(connection)
            connection.execute(f"CREATE DATABASE {self.name}_copy TEMPLATE {self.name}")
            connection.execute(f"ALTER DATABASE {self.name} ALLOW_CONNECTIONS true")

    def restore(self) -> None:
        with self._connected() as connection:
            connection.execute(f"DROP DATABASE {self.name} WITH (FORCE)")
            connection.execute(f"ALTER DATABASE {self.name}_copy RENAME TO {self.name}")

    def _connected(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self._server, autocommit=True)

    def _end_others(self, connection: psycopg.Connection[Any]) -> None:
        ended = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = %s"
        while (connection.execute(ended, [self.name]).fetchone() or [0])[0]:
            pass


@dataclass
class Known:
    """What a record shows at least and at most. One writer alone writes a field or an item, and its values grow."""

    fields: dict[str, int] = field(default_factory=dict)
    items: dict[str, int] = field(default_factory=dict)
    tried: dict[str, int] = field(default_factory=dict)  # the greatest value that was sent, of both
    messages: dict[int, str] = field(default_factory=dict)  # by number, as acknowledged
    unnumbered: list[str] = field(default_factory=list)  # acknowledged by an error, which says no number
    sent: set[str] = field(default_factory=set)  # texts
    source: str = ""  # of a fork that was made after SQL had been put back: it may lack what its source does

    def copy(self, source: str) -> Known:
        return Known(
            dict(self.fields), dict(self.items), dict(self.tried), dict(self.messages), list(self.unnumbered),
            set(self.sent), source,
        )  # fmt: skip


class World:
    """Some stores on the same servers, and what was acknowledged."""

    def __init__(self, url: str, sql: Sql, writers: int) -> None:
        self.url, self.sql, self.writers = url, sql, writers
        self.known = {"s0": Known(), "s1": Known()}
        self.numbers = itertools.count(1)
        self.mutex = threading.Lock()
        self.restored = False
        self.settings = _SETTINGS if writers == 1 else _SETTINGS | {"retry_for": 30.0}
        self.empty()

    def empty(self) -> None:
        """Let Redis lose everything."""
        parts = urlsplit(self.url)
        login, _, places = parts.netloc.rpartition("@")
        for place in places.split(","):
            with redis.Redis.from_url(f"redis://{login}@{place}") as client:
                client.flushall()

    @contextmanager
    def opened(self, stores: int = 1) -> Iterator[list[StateStore]]:
        with ExitStack() as stack:
            yield [
                stack.enter_context(StateStore.open(self.url, archive=self.sql.url, **self.settings))
                for _ in range(stores)
            ]

    def alone(self, opened: ExitStack, work: Callable[[], object] = int) -> list[StateStore]:
        """Do something while none of the stores is open, and open them again."""
        opened.close()
        work()
        return opened.enter_context(self.opened(self.writers))

    def write(self, stores: Sequence[StateStore], writes: Sequence[Write], beside: Callable[[], object] = int) -> None:
        """Let the stores share these writes out, at the same time; `beside`: and this is done meanwhile."""
        if len(stores) == 1:
            beside()
            self._write(stores[0], 0, writes)
            return
        with ThreadPoolExecutor(len(stores) + 1) as pool:
            jobs = [pool.submit(self._write, store, at, writes[at :: len(stores)]) for at, store in enumerate(stores)]
            jobs.append(pool.submit(beside))
            for job in jobs:
                job.result()

    def _write(self, store: StateStore, writer: int, writes: Sequence[Write]) -> None:
        for kind, which, level in writes:
            with self.mutex:
                ids = sorted(self.known)
            # SQL may be away, or to be repaired first.
            with suppress(Unavailable):
                self._one(store, writer, kind, ids[which % len(ids)], level)

    def _one(self, store: StateStore, writer: int, kind: str, id: str, level: str) -> None:
        session, known = store.session(id), self.known[id]
        with self.mutex:
            number = next(self.numbers)
            name = f"{'i' if kind == 'put' else 'k'}{writer}{number % 3}"
        if kind in ("set", "put"):
            with self.mutex:
                known.tried[name] = number
            with suppress(DurabilityUnknown):  # it is applied all the same
                if kind == "set":
                    session.set(name, number, durability=level)
                else:
                    with store.durable(level):
                        session.items("x").put(name, number)
            with self.mutex:
                (known.fields if kind == "set" else known.items)[name] = number
        elif kind in ("append", "several"):
            self._append(session, known, [f"{number}.{each}" for each in range(1 if kind == "append" else 5)], level)
        elif kind == "fork" and session.exists():
            self._fork(store, id, f"s{number + 1}", level)
        elif kind == "archive":
            store.admin.archive()

    def _append(self, session: Any, known: Known, texts: Sequence[str], level: str) -> None:
        with self.mutex:
            known.sent |= set(texts)
        try:
            done = session.write(append=[{"role": "user", "content": text} for text in texts], durability=level)
        except DurabilityUnknown:
            with self.mutex:
                known.unnumbered += texts
        else:
            with self.mutex:
                known.messages |= dict(enumerate(texts, done.first_message))

    def _fork(self, store: StateStore, id: str, new: str, level: str) -> None:
        with self.mutex:
            known = self.known[id].copy(id if self.restored else "")
        with store.durable(level), suppress(DurabilityUnknown):
            store.session(id).fork(new)  # it reads SQL: until that is repaired it is refused
        with self.mutex:
            known.tried |= self.known[id].tried
            known.sent |= self.known[id].sent
            self.known[new] = known

    def repair(self, at: int | None) -> None:
        """Repair; killed before its call `at` of a server, or behind it."""
        if self.writers > 1:
            given = self.settings | {"url": self.url, "archive": self.sql.url}
            with Worker("repair", at=at, **given) as worker:
                worker.process.wait(120)
            return
        with self.opened() as (store,):
            if at is None:
                store.admin.repair()
                return
            with suppress(Killed), killing(store, at):
                store.admin.repair()
            # Who died with the right to start a partition holds it for two seconds.
            with redis_of(Blocking(store)) as client:
                for partition in range(self.settings["partitions"]):
                    client.hdel(store._core._lifecycle.tiers().keys.partition(partition).meta, "mint")

    def look(self, store: StateStore, *alarms: str) -> None:
        lost: dict[str, set[int]] = {}
        items = set()
        for event in store.admin.audit(type="conversation.repaired", limit=1000):
            id = event.subject.partition(":")[2]
            lost.setdefault(id, set()).update(n for first, last in event.data["lost"] for n in range(first, last + 1))
            items |= {id} if event.data["items"] else set()
        for id, known in self.known.items():
            line = [id]
            while source := self.known[line[-1]].source:
                line.append(source)
            gone = set().union(*(lost.get(each, ()) for each in line))
            session = store.session(id)
            within(known.fields, session.get_all(), known.tried)
            self._look_at_messages(session, known, gone)
            found = {each.key: each.value for each in session.items("x").list().items}
            if items.isdisjoint(line):
                within(known.items, found, known.tried)
            for change in session.history():
                with may_lack(gone):
                    session.at(version=change.version)
        assert [each for each in store.admin.doctor() if not each.ok and each.name in alarms] == []

    def _look_at_messages(self, session: Any, known: Known, lost: set[int]) -> None:
        shown = {each.number: each.content for each in session.messages()}
        expected = {number: text for number, text in known.messages.items() if number not in lost}
        assert {number: text for number, text in shown.items() if number in expected} == expected
        assert {*shown.values()} <= known.sent
        assert len({*shown.values()}) == len(shown)
        missing = {*known.unnumbered} - {*shown.values()}
        assert len(missing) <= len(lost - shown.keys() - known.messages.keys())
        assert {*range(max(shown, default=-1))} <= shown.keys() | lost


def within(least: Mapping[str, int], found: Mapping[str, int], most: Mapping[str, int]) -> None:
    """Fail unless each value is one that may be shown."""
    assert least.keys() <= found.keys()
    for name, value in found.items():
        assert least.get(name, 0) <= value <= most[name], (name, least.get(name), value, most[name])


@contextmanager
def may_lack(lost: set[int]) -> Iterator[None]:
    """A past version may have shown messages that are lost, and named."""
    try:
        yield
    except StateError as error:
        numbers = re.search(r"messages (\d+) to (\d+) are in neither", str(error))
        if numbers is None or not {int(each) for each in numbers.groups()} <= lost:
            raise


@contextmanager
def killing(store: StateStore, at: int) -> Iterator[None]:
    """Have Killed raised before the call `at` of a server, or behind it; of the background's calls none is counted."""
    port = store._core._lifecycle.tiers().port
    calls = itertools.count()
    callers = {threading.current_thread().name, "distributed-state-uninterruptible"}
    over = False

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        async def made(*arguments: Any) -> Any:
            nonlocal over
            if threading.current_thread().name not in callers:
                return await call(*arguments)
            number = next(calls)
            if over or number * 2 == at:
                over = True
                raise Killed
            answer = await call(*arguments)
            if number * 2 + 1 == at:
                over = True
                raise Killed
            return answer

        return made

    with pytest.MonkeyPatch.context() as patched:
        for name in _CALLS:
            patched.setattr(port, name, counted(getattr(port, name)))
        yield


_REFUSE = "SELECT RAISE(ABORT, 'the owner refuses it');"
_ALARMS = ("sql quarantine", "branches", "epochs", "lost data")


def restored_and_repaired(
    world: World,
    before: Sequence[Write],
    since: Sequence[Write],
    restored: Sequence[Write],
    kills: Sequence[tuple[int, Sequence[Write]]],
    after: Sequence[Write],
) -> None:
    with ExitStack() as opened:
        stores = world.alone(opened)
        world.write(stores, before)
        stores[0].admin.archive()
        world.sql.back_up()
        world.write(stores, since)
        stores[0].admin.archive()
        world.restored = True
        if world.sql.live:
            world.write(stores, restored, world.sql.restore)
        else:
            stores = world.alone(opened, world.sql.restore)
            world.write(stores, restored)
        for at, meanwhile in kills:
            if world.writers > 1:
                world.write(stores, meanwhile, partial(world.repair, at))
            else:
                stores = world.alone(opened, partial(world.repair, at))
                world.write(stores, meanwhile)
        stores = world.alone(opened, partial(world.repair, None))
        world.write(stores, after)
        for store in stores:
            world.look(store, *_ALARMS)
        # What is acknowledged as archived takes along all that came before it in its partition.
        for id, known in world.known.items():
            known.tried["end"] = known.fields["end"] = 0
            stores[0].session(id).set("end", 0, durability="archived")
    world.empty()
    with world.opened() as (store,):
        world.look(store, "sql quarantine", "branches")


@pytest.fixture(scope="module")
def warm() -> Iterator[str]:
    with redis_server(*_DURABLE) as server:
        yield server.url


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    with redis_cluster(*_DURABLE, "--cluster-node-timeout", "30000", replicas=0) as servers:
        yield servers.url


_APPEND: Write = ("append", 0, "memory")
_LOSING: list[Write] = [("several", 0, "memory"), ("several", 0, "memory"), ("put", 0, "memory"), ("fork", 0, "memory")]


@pytest.mark.parametrize(
    ("before", "restored", "kills"),
    [
        ([_APPEND, ("put", 0, "memory")], [], [(41, [_APPEND])]),
        ([_APPEND], [_APPEND], [(41, []), (43, [])]),
    ],
    ids=["written on since", "or not"],
)
@pytest.mark.timeout(600)
def test_what_was_acknowledged_around_a_restore_is_shown_or_named_though_the_repair_is_killed(
    warm: str, tmp_path: Path, before: Any, restored: Any, kills: Any
) -> None:
    """Killed between SQL and Redis, as it had left out lost messages."""
    world = World(warm, SqliteFile(tmp_path), 1)
    restored_and_repaired(world, before, _LOSING, restored, kills, [("append", 0, "archived")])


@pytest.mark.wide
@settings(max_examples=6, derandomize=True, phases=[Phase.generate])
@given(_writes, _writes, _writes, st.lists(st.tuples(st.integers(0, 60), _writes), max_size=2), _writes)
@pytest.mark.timeout(600)
def test_what_was_acknowledged_around_a_restore_is_shown_or_named(
    warm: str, before: Any, since: Any, restored: Any, kills: Any, after: Any
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        restored_and_repaired(World(warm, SqliteFile(Path(folder)), 1), before, since, restored, kills, after)


def drawn(seed: int) -> Iterator[Any]:
    """Writes and kills by chance. What three processes do at once is not to be made smaller step by step."""
    chance = random.Random(seed)

    def writes(least: int, most: int) -> list[Write]:
        count = chance.randint(least, most)
        return [(chance.choice(_KINDS), chance.randrange(4), chance.choice(_LEVELS)) for _ in range(count)]

    yield writes(4, 12)
    yield writes(6, 20)
    yield writes(0, 10)
    yield [(chance.randrange(200), writes(0, 12)) for _ in range(chance.randint(1, 2))]
    yield writes(2, 8)


@pytest.mark.wide
@pytest.mark.parametrize("seed", [6001, pytest.param(6002, marks=pytest.mark.full)])
@pytest.mark.timeout(300)
def test_so_it_is_of_three_writers_while_the_command_is_killed_and_repeated(
    warm: str, tmp_path: Path, seed: int
) -> None:
    restored_and_repaired(World(warm, SqliteFile(tmp_path), 3), *drawn(seed))


@pytest.mark.wide
@pytest.mark.parametrize("seed", [7001])
@pytest.mark.parametrize(
    ("kind", "writers"),
    [
        ("warm", 3),
        ("cluster", 1),
        pytest.param("warm", 1, marks=pytest.mark.full),
        pytest.param("cluster", 3, marks=pytest.mark.full),
    ],
)
@pytest.mark.timeout(300)
def test_so_it_is_where_a_database_is_put_back_under_open_stores(
    servers: Servers, request: pytest.FixtureRequest, kind: str, writers: int, seed: int
) -> None:
    world = World(request.getfixturevalue(kind), PostgresDatabase(servers.database()), writers)
    restored_and_repaired(world, *drawn(seed))


def test_without_a_look_at_a_broken_repair_a_commit_is_lost(
    warm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: Redis has given the version of the repair's own change to another commit."""
    monkeypatch.setattr(backfill, "_is_unseen", lambda *_: False)
    with pytest.raises((AssertionError, StateError)):
        restored_and_repaired(World(warm, SqliteFile(tmp_path), 1), [_APPEND], _LOSING, [], [(41, [_APPEND])], [])


def split(store: StateStore) -> tuple[str, str]:
    """Ids of a session and of a fork in a partition that is repaired before the session's."""
    keys = store._core._lifecycle.tiers().keys
    ids = [f"c{number}" for number in range(40)]
    places = [keys.of(Ref("session", id)).partition for id in ids]
    return ids[places.index(1)], ids[places.index(0)]


def evict(world: World, store: StateStore, id: str) -> None:
    """Let a record's time in Redis be over."""
    with redis.Redis.from_url(world.url) as client:
        client.delete(store._core._lifecycle.tiers().keys.of(Ref("session", id)).record)


def texts(store: StateStore, id: str) -> list[Any]:
    return [each.content for each in store.session(id).messages()]


def named(store: StateStore, id: str) -> dict[str, Any]:
    """What the audit says that was lost of a session."""
    (note,) = [each.data for each in store.admin.audit(type="conversation.repaired") if each.subject == f"session:{id}"]
    return {name: note[name] for name in ("lost", "items")}


class Forked(World):
    """One where a session of ten messages, of which one is in the backup, and an item was forked since."""

    def __init__(
        self, url: str, folder: Path, *, source_first: bool = False, items: int = 1, in_backup: bool = True
    ) -> None:
        super().__init__(url, SqliteFile(folder), 1)
        with self.opened() as (store,):
            later, first = split(store)
            self.source, self.fork = (first, later) if source_first else (later, first)
            session = store.session(self.source if in_backup else "other")
            session.append(message("0"))
            store.admin.archive()
            self.sql.back_up()
            session = store.session(self.source)
            session.append(*(message(f"{number}") for number in range(1, 10)))
            session.items("x").put_many({f"{number}": "old" for number in range(items)})
            store.admin.archive()
            session.fork(self.fork)
            store.admin.archive()
        self.sql.restore()


def message(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_a_fork_keeps_what_only_redis_has_of_its_source_if_that_leaves_redis_before_its_turn(
    warm: str, tmp_path: Path
) -> None:
    world = Forked(warm, tmp_path)

    def leave(done: Repaired) -> None:
        if done.partitions == 1:
            evict(world, store, world.source)

    with world.opened() as (store,):
        store.admin.repair(progress=leave)
        assert texts(store, world.fork) == ["0", "7", "8", "9"]
        assert named(store, world.fork) == {"lost": [[1, 6]], "items": True}
        store.session(world.source).append(*(message(f"other {number}") for number in range(10)))
        store.session(world.fork).set("n", 1)
        store.admin.archive()
    world.empty()
    with world.opened() as (store,):
        assert texts(store, world.fork) == ["0", "7", "8", "9"]


@pytest.mark.parametrize("source_first", [False, True])
def test_a_fork_shows_nothing_of_what_its_source_became_as_it_was_read_from_the_backup(
    warm: str, tmp_path: Path, source_first: bool
) -> None:
    world = Forked(warm, tmp_path, source_first=source_first)
    with world.opened() as (store,):
        evict(world, store, world.source)
        for number in range(5):
            store.session(world.source).append(message(f"other {number}"))
        store.admin.repair()
        assert texts(store, world.fork) == ["0"]
        assert named(store, world.fork) == {"lost": [[1, 9]], "items": True}
        assert texts(store, world.source) == ["0", *(f"other {number}" for number in range(5))]


@pytest.mark.parametrize("written", [True, False], ids=["brought at a later version", "brought at that version"])
def test_items_that_a_fork_shows_and_its_source_lost_are_named_for_the_fork(
    warm: str, tmp_path: Path, written: bool
) -> None:
    world = Forked(warm, tmp_path, source_first=True, items=1 if written else 100, in_backup=False)
    with world.opened() as (store,):
        if written:
            store.session(world.source).items("x").put("0", "new")
        store.admin.repair()
        assert named(store, world.fork)["items"]


def test_items_that_come_with_the_source_are_not_named_for_a_fork(warm: str, tmp_path: Path) -> None:
    world = Forked(warm, tmp_path, source_first=True)
    with world.opened() as (store,):
        assert not store.admin.repair().lost_items
        assert store.session(world.fork).items("x").get("0") == "old"


def test_a_fork_of_a_fork_shows_its_items_where_both_come_whole(warm: str, tmp_path: Path) -> None:
    world = Forked(warm, tmp_path)
    with world.opened() as (store,):
        store.admin.repair()
        source = store.session(world.source)
        source.items("x").put("k", "old")
        store.admin.archive()
        world.sql.back_up()
        keys = store._core._lifecycle.tiers().keys
        place = keys.of(source.ref).partition
        first, second = [
            id for id in (f"d{number}" for number in range(40)) if keys.of(Ref("session", id)).partition == place
        ][:2]
        source.fork(first)
        store.session(first).set("n", 1)
        store.session(first).set("n", 2)
        store.admin.archive()
        store.session(first).fork(second)
        store.session(second).set("n", 3)
        store.admin.archive()
    world.sql.restore()
    with world.opened() as (store,):
        assert not store.admin.repair().lost_items
        for id in (first, second):
            assert store.session(id).items("x").get("k") == "old"


@pytest.mark.parametrize("step", ["reach", "mint", "begin_complete"])
def test_a_repair_that_ends_before_its_epoch_begins_is_no_loss(
    warm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    world = Forked(warm, tmp_path)
    done = getattr(ColdStore, step)

    def kill(*given: Any) -> None:
        done(*given)
        raise Killed

    with world.opened() as (store,):
        with monkeypatch.context() as broken, suppress(Killed):
            broken.setattr(ColdStore, step, kill)
            store.admin.repair()
        store.admin.repair()
        for id in (world.fork, world.source):
            assert texts(store, id) == ["0", "7", "8", "9"]
        assert [each for each in store.admin.doctor() if not each.ok and each.name in _ALARMS] == []


@pytest.mark.parametrize("whole", [True, False], ids=["a record that comes whole", "a commit"])
def test_what_sql_refuses_is_neither_counted_as_brought_nor_archived(warm: str, tmp_path: Path, whole: bool) -> None:
    world = World(warm, SqliteFile(tmp_path), 1)
    with world.opened() as (store,):
        session = store.session("s0")
        session.set("n", 0)
        store.admin.archive()
        world.sql.back_up()
        # The last archived entry stays in the journal.
        for number in range(1 + whole):
            session.set("n", number)
        store.admin.archive()
        session.set("n", 2)
        session.set("n", 3)
        version = session.version()
    world.sql.restore()
    trigger = f"CREATE TRIGGER t BEFORE INSERT ON changes WHEN new.version = {version} BEGIN {_REFUSE} END"
    with closing(sqlite3.connect(tmp_path / "archive.db")) as connection:
        connection.execute(trigger)
    with world.opened() as (store,):
        done = store.admin.repair()
        session = store.session("s0")
        assert (done.records, done.commits, done.refused) == (0, 0 if whole else 2, (("session", "s0"),))
        with pytest.raises(DurabilityUnknown):
            session.version(durability="archived")
        (found,) = [each for each in store.admin.doctor() if each.name == "sql quarantine"]
        assert not found.ok
        # The commits that came with it no longer count as archived.
        assert store._core._lifecycle.cold.count_quarantined() == (3 if whole else 1)


@pytest.mark.wide
def test_a_store_that_is_open_while_sql_is_put_back_shows_no_shorter_history(warm: str, servers: Servers) -> None:
    world = World(warm, PostgresDatabase(servers.database()), 1)
    with world.opened() as (store,):
        session = store.session("s0")
        session.append(message("0"))
        store.admin.archive()
        world.sql.back_up()
        for number in range(1, 5):
            session.append(message(f"{number}"))
            store.admin.archive()
        assert len(session.history()) == 5
        world.sql.restore()
        for call in (session.history, lambda: session.at(version=5), lambda: session.fork("s9"), session.messages):
            with pytest.raises(ColdUnavailable):
                call()
        store.admin.repair()
        assert [each.version for each in session.history()] == [1, 5, 6]
