"""Opening a store: several at once, and openings that are left before they are done.

That SQL connections are left unclosed is what Python warns of from 3.13 on; here it is seen by the files.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
from below import ROOT, everything_in_sql
from migrated import Replayed
from sqlalchemy import create_engine, inspect, text
from sync_api import Blocking, in_thread

from distributed_state import AsyncStateStore, ColdUnavailable, ConfigurationError, StateStore, WarmUnavailable
from distributed_state.cold import opening
from distributed_state.cold.engine import Database
from distributed_state.cold.store import ColdStore
from distributed_state.cold.tables import HEAD, metadata
from distributed_state.port.shared import SharedPort

TABLES = {*metadata.tables, "alembic_version"}


async def opened(api: str, url: str | None = None, **settings: Any) -> Any:
    """An open store of an API."""
    if api == "asyncio":
        return await AsyncStateStore.open(url, **settings)
    return Blocking(await in_thread(lambda: StateStore.open(url, **settings)))


@pytest.fixture(scope="module")
def two_databases(servers: Any) -> list[str]:
    """Made once: PostgreSQL takes its time for a database."""
    return [servers.database(), servers.database()]


@pytest.fixture(params=["sqlite", "postgres"])
def new_archives(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], list[str]]:
    """Gives the URLs of two archives that are as nobody opened them yet, each time."""
    if request.param == "sqlite":
        return lambda: [f"sqlite:///{tmp_path}/{uuid.uuid4().hex}.db" for _ in range(2)]
    databases: list[str] = request.getfixturevalue("two_databases")

    def emptied() -> list[str]:
        for url in databases:
            with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as connection:
                connection.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
        return databases

    return emptied


def complete(archive: str) -> bool:
    found = everything_in_sql(archive, "")
    return found.keys() == TABLES and found["alembic_version"] == [(HEAD,)]


# Several at once


@pytest.mark.parametrize(
    "rounds", [1, pytest.param(3, marks=pytest.mark.wide), pytest.param(25, marks=pytest.mark.full)]
)
@pytest.mark.parametrize("apis", [("blocking", "blocking"), ("asyncio", "asyncio"), ("asyncio", "blocking")], ids=str)
async def test_stores_may_be_opened_at_once_in_one_process(
    apis: tuple[str, ...], rounds: int, new_archives: Callable[[], list[str]], real_migrations: None
) -> None:
    """On new archives: what brings their tables up to date is one for the whole process, and knows no threads."""

    async def use(api: str, archive: str) -> None:
        store = await opened(api, archive=archive)
        try:
            assert await store.session("s").set("a", 1) == 1
        finally:
            await store.close()

    for _ in range(rounds):
        archives = new_archives()
        await asyncio.gather(*map(use, apis, archives))
        assert all(map(complete, archives))


@pytest.mark.parametrize("cold", ["sqlite", "postgres"])
def test_a_database_that_a_test_opens_has_the_tables_that_alembic_makes(
    cold: str, servers: Any, tmp_path: Path, replayed_migrations: Replayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the tests alone Alembic's statements are executed again: each column, index and constraint is there."""
    layouts = []
    for upgrade in (replayed_migrations.upgrade, replayed_migrations, replayed_migrations):
        monkeypatch.setattr(opening, "_upgrade", upgrade)
        archive = servers.database() if cold == "postgres" else f"sqlite:///{tmp_path}/{len(layouts)}.db"
        ColdStore.open(archive, "n").close()
        assert complete(archive)
        layouts.append(layout(archive))
    assert layouts[0] == layouts[1] == layouts[2]


def layout(archive: str) -> list[Any]:
    """The tables of a database as they were created."""
    engine = create_engine(archive)
    try:
        with engine.connect() as connection:
            if engine.dialect.name == "sqlite":
                query = "SELECT type, name, sql FROM sqlite_master ORDER BY type, name"
                return [tuple(row) for row in connection.execute(text(query))]
            found = inspect(connection)
            parts = ("columns", "pk_constraint", "indexes", "foreign_keys", "unique_constraints", "check_constraints")
            return [
                (table, part, repr(getattr(found, f"get_{part}")(table)))
                for table in sorted(found.get_table_names())
                for part in parts
            ]
    finally:
        engine.dispose()


async def test_one_store_that_two_tasks_open_at_once_is_open_once(servers: Any, tmp_path: Path, namespace: str) -> None:
    archive = f"sqlite:///{tmp_path}/a.db"
    store = AsyncStateStore.open(servers.redis("valkey").url, archive=archive, namespace=namespace)
    await asyncio.gather(store, store)
    assert await store.session("s").set("a", 1) == 1
    await store.close()
    assert open_files(tmp_path) == []


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_forked_while_another_thread_opens_may_open_too(tmp_path: Path, real_migrations: None) -> None:
    """It inherits no lock that nobody is there to give back."""
    with opening._alembic:
        child = os.fork()
        if child == 0:
            with suppress(BaseException):
                StateStore.open(archive=f"sqlite:///{tmp_path}/child.db").session("s").set("a", 1)
                os._exit(0)
            os._exit(1)
        until_ended(child)
    assert complete(f"sqlite:///{tmp_path}/child.db")


@pytest.mark.replicas
@pytest.mark.parametrize("without_sql", [False, True])
async def test_a_store_takes_the_number_of_partitions_from_its_namespace(
    opener: Any, without_sql: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From Redis, where SQL is away."""
    first = await opener(partitions=16)
    ids = [f"s{number}" for number in range(20)]
    for id in ids:
        await first.session(id).set("n", 1)

    def away(*_: Any, **__: Any) -> None:
        raise ColdUnavailable("it is away")

    if without_sql:
        monkeypatch.setattr("distributed_state.store.lifecycle.ColdStore.open", away)
    store = await opener()
    assert store.settings.partitions == 16
    assert [await store.session(id).increment("n") for id in ids] == [2] * 20
    assert [await first.session(id).get("n", fresh=True) for id in ids] == [2] * 20
    if not without_sql:
        assert len(await store.sessions(fresh=True)) == 20


@pytest.mark.only(api="asyncio")
@pytest.mark.replicas
async def test_what_was_named_by_another_number_of_partitions_is_never_used(opener: Any) -> None:
    """A handle that was made before the store was opened names keys that nobody else has."""
    await opener(partitions=8)
    store = AsyncStateStore.open(opener.url, archive=opener.archive, namespace=opener.namespace)
    store.session("s")
    with pytest.raises(ConfigurationError, match=r"has 8 partitions, not \d+; .*give partitions=8"):
        await store


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def until_ended(child: int) -> None:
    """Wait for a forked child, which has to end well."""
    deadline = time.monotonic() + 20
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, 9)
            os.waitpid(child, 0)
            pytest.fail("the child waits for ever")
        time.sleep(0.01)
    assert ended[1] == 0


# Left before it is done


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """The first opening of an archive tells when it has a connection, and goes on when it is told to."""
    begun, go_on = threading.Event(), threading.Event()
    migrate = opening.migrate

    def waiting(database: Any) -> None:
        migrate(database)
        if not begun.is_set():
            begun.set()
            assert go_on.wait(20)

    monkeypatch.setattr(opening, "migrate", waiting)
    yield begun, go_on
    go_on.set()


def open_files(folder: Path) -> list[str]:
    return [file.path for file in psutil.Process().open_files() if file.path.startswith(str(folder))]


async def test_a_cancelled_opening_leaves_nothing_open(slowly: Any, tmp_path: Path) -> None:
    begun, go_on = slowly
    archive = f"sqlite:///{tmp_path}/a.db"
    opening = asyncio.ensure_future(opened("asyncio", archive=archive))
    await asyncio.to_thread(begun.wait, 20)
    assert open_files(tmp_path)
    opening.cancel()
    asyncio.get_running_loop().call_later(0.05, go_on.set)
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert open_files(tmp_path) == []
    await (await opened("asyncio", archive=archive)).close()


def test_an_interrupted_opening_leaves_nothing_open(slowly: Any, tmp_path: Path) -> None:
    """Ctrl-C ends the caller; the thread that opens for it ends a moment later."""
    begun, go_on = slowly

    def interrupt() -> None:
        begun.wait(20)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        StateStore.open(archive=f"sqlite:///{tmp_path}/a.db")
    thread.join()
    assert open_files(tmp_path)
    go_on.set()
    until(lambda: open_files(tmp_path) == [])
    with StateStore.open(archive=f"sqlite:///{tmp_path}/a.db") as store:
        assert store.session("s").set("a", 1) == 1


@pytest.mark.parametrize("api", ["asyncio", "blocking"])
async def test_an_opening_that_fails_at_its_last_step_leaves_nothing_open(
    api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_: Any) -> None:
        raise WarmUnavailable("gone again")

    with monkeypatch.context() as patched:
        patched.setattr(SharedPort, "open", fail)
        with pytest.raises(WarmUnavailable, match="gone again"):
            await opened(api, archive=f"sqlite:///{tmp_path}/a.db")
    assert open_files(tmp_path) == []
    await (await opened(api, archive=f"sqlite:///{tmp_path}/a.db")).close()


def test_what_is_connected_while_it_is_closed_is_closed_too(tmp_path: Path) -> None:
    """By a thread that looked just before; nobody else would close that connection."""
    database = Database(f"sqlite:///{tmp_path}/a.db")

    @contextmanager
    def closing() -> Iterator[None]:
        database.close()
        yield

    database._gate = closing()
    with database.read() as connection:
        assert connection.exec_driver_sql("SELECT 1").scalar() == 1
    assert open_files(tmp_path) == []


LEAVING = """
import gc, os, sys
from distributed_state.cold.store import ColdStore

store = ColdStore.open(sys.argv[1], "n")
store.register(4)
if os.fork():
    os.wait()
    sys.exit(store.close())
store.abandon()
store.count_quarantined()
store.close()
if sys.argv[2] == "dropped":
    del store
    gc.collect()
    os._exit(0)
"""


@pytest.mark.parametrize("how", [pytest.param("dropped", marks=pytest.mark.wide), "exited"])
def test_a_forked_child_never_closes_what_it_inherited(how: str, tmp_path: Path) -> None:
    """SQLite forbids it; Python, from 3.13 on, warns where a destructor does it."""
    words = [sys.executable, "-W", "always", "-c", LEAVING, f"sqlite:///{tmp_path}/a.db", how]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True, cwd=ROOT)
    assert done.stderr == ""
