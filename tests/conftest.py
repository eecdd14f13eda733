"""Servers, stores and the runner of `async def` tests. Law: a test is written once and meets every face and backend.

A test that takes `store` (an open store) or `opener` (opens one, or several as replicas) runs on each default
combination of face, warm tier and cold tier; with `--full` on the whole product.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import os
import shutil
import signal
import uuid
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from below import server_binary
from faces import Blocking, in_thread

from distributed_state.programs.servers import PostgresServer, RedisServer, postgres_server, redis_server

FACES, WARM, COLD = ("asyncio", "blocking"), ("fake", "valkey", "redis"), ("memory", "sqlite", "postgres")
SYSTEM_REDIS = shutil.which("redis-server")


@dataclass(frozen=True)
class Combination:
    face: str
    warm: str
    cold: str

    def __str__(self) -> str:
        return f"{self.face}-{self.warm}-{self.cold}"

    @property
    def fleet(self) -> bool:
        """Whether several stores can share these servers."""
        return self.warm != "fake" and self.cold != "memory"


DEFAULT = [
    Combination("asyncio", "fake", "memory"),
    Combination("blocking", "fake", "sqlite"),
    Combination("asyncio", "redis", "sqlite"),
    Combination("blocking", "valkey", "postgres"),
]
PRODUCT = DEFAULT + [c for c in (Combination(*n) for n in itertools.product(FACES, WARM, COLD)) if c not in DEFAULT]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the whole product of faces and backends too")
    parser.addoption("--system", action="store_true", help="run only what may differ with the servers of the system")


def pytest_configure(config: pytest.Config) -> None:
    # Ended from outside, the run still ends its servers.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # How long an example takes is the machine's affair.
    hypothesis.settings.register_profile("ours", deadline=None)
    hypothesis.settings.load_profile("ours")
    if os.environ.get("CI") == "true" and SYSTEM_REDIS is None:
        raise pytest.UsageError("CI tests the oldest supported server: install the system's redis-server")
    if not config.option.markexpr:
        config.option.markexpr = "not soak" if config.option.full else "not full and not soak"


def pytest_report_header() -> str:
    return f"the server called redis: {server_binary('redis')}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "combination" in metafunc.fixturenames:
        chosen = [c for c in PRODUCT if _wanted(c, metafunc.definition)]
        default = [c for c in chosen if c in DEFAULT] or chosen[:1]
        brief = metafunc.definition.get_closest_marker("brief")
        if brief is not None:
            default = [c for c in default if c.fleet == (brief.args == ("servers",))] or default
        metafunc.parametrize(
            "combination",
            [pytest.param(c, marks=() if c in default else pytest.mark.full) for c in chosen],
            ids=str,
        )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.system:
        chosen = [item for item in items if _meets_the_system(item)]
        config.hook.pytest_deselected(items=[item for item in items if not _meets_the_system(item)])
        items[:] = chosen


def _meets_the_system(item: pytest.Item) -> bool:
    """Whether this test may meet a server or a program that the system has, and no wheel."""
    given = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    if "combination" in given:
        return bool(given["combination"].warm == "redis")
    if "valkey" in (given.get("redis_url"), given.get("binary")):
        return False
    return item.path.parent.name != "unit" or item.path.name in ("test_servers.py", "test_observe.py")


def _wanted(combination: Combination, item: Any) -> bool:
    if item.get_closest_marker("replicas") and not combination.fleet:
        return False
    for marker in item.iter_markers("only"):
        for part, names in marker.kwargs.items():
            if getattr(combination, part) not in ((names,) if isinstance(names, str) else names):
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
        self._postgres: PostgresServer | None = None

    def redis(self, name: str) -> RedisServer:
        """The server called "valkey" (from the wheel) or "redis" (the system's, if there is one)."""
        if name not in self._redis:
            self._redis[name] = self._stack.enter_context(redis_server(binary=server_binary(name)))
        return self._redis[name]

    def postgres(self) -> PostgresServer:
        if self._postgres is None:
            self._postgres = self._stack.enter_context(postgres_server())
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
        self.face, self.warm, self.cold = combination.face, combination.warm, combination.cold
        self.namespace = f"t{uuid.uuid4().hex[:12]}"
        self._opened: list[Any] = []

    async def __call__(self, **settings: Any) -> Any:
        """Open one more store; settings given here win."""
        from distributed_state import AsyncStateStore, StateStore

        given = {"url": self.url, "archive": self.archive, "namespace": self.namespace} | settings
        if self.face == "asyncio":
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


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    with ExitStack() as stack:
        yield Servers(stack)


@pytest.fixture(params=["valkey", "redis"])
def redis_url(request: pytest.FixtureRequest, servers: Servers) -> str:
    """Each real server in turn."""
    return servers.redis(request.param).url


@pytest.fixture
def postgres_url(servers: Servers) -> str:
    """An empty PostgreSQL database for this test alone."""
    return servers.database()


@pytest.fixture(params=["sqlite", "postgres"])
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
    url = None if combination.warm == "fake" else servers.redis(combination.warm).url
    archive = {"memory": "memory", "sqlite": f"sqlite:///{tmp_path}/archive.db"}.get(combination.cold)
    return Opener(combination, url, archive or request.getfixturevalue("shared_database"))


@pytest.fixture
def store(opener: Opener) -> Any:
    """An open store, closed after the test."""
    return Pending(opener)
