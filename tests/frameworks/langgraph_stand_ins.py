"""What stands in for LangGraph's own savers and stores in LangGraph's own tests. Law: each test meets an empty one.

One store serves all tests of a process; each has threads and namespaces of its own, by a prefix.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, ClassVar

import made

from distributed_state import StateStore
from distributed_state.adapters.langgraph import DistributedStateSaver, DistributedStateStore


@cache
def shared() -> StateStore:
    """The store of this process, closed at its end."""
    settings = {"archive": os.environ.get("ARCHIVE", "memory"), "namespace": os.environ.get("NAMESPACE", "tests")}
    store = StateStore.open(os.environ.get("WARM"), **settings)
    store.__enter__()
    atexit.register(store.close)
    return store


class Saver(DistributedStateSaver):
    """A saver without a thread; a class, as tests make others of it."""

    def __init__(self, **options: Any) -> None:
        made.note()
        super().__init__(shared(), prefix=f"{os.urandom(8).hex()}/", **options)


@contextmanager
def saver() -> Iterator[DistributedStateSaver]:
    """The same for `with`."""
    yield Saver()


@contextmanager
def store() -> Iterator[DistributedStateStore]:
    """A store without a namespace."""
    made.note()
    yield DistributedStateStore(shared(), prefix=f"{os.urandom(8).hex()}/")


class PostgresSaver(Saver):
    """Where the tests of LangGraph's PostgreSQL saver open one."""

    def __init__(self, *given: Any) -> None:
        super().__init__()

    def setup(self) -> Any:
        return Done()

    @classmethod
    def from_conn_string(cls, *given: Any, **options: Any) -> Any:
        return Made(cls())


class PostgresStore(DistributedStateStore):
    """Where the tests of LangGraph's PostgreSQL store open one: the same again for the same database."""

    MIGRATIONS = ()
    _prefixes: ClassVar[dict[str, str]] = {}

    @classmethod
    def from_conn_string(cls, url: str, *, ttl: Any = None, **options: Any) -> Any:  # type: ignore[override]
        made.note()
        prefix = cls._prefixes.setdefault(url, os.urandom(8).hex() + "/")
        return Made(cls(shared(), prefix=prefix, ttl=ttl))

    def setup(self) -> Any:
        return Done()

    def _cursor(self) -> Any:
        return Made(Done())

    def start_ttl_sweeper(self, *given: Any) -> Any:
        return Done()

    def stop_ttl_sweeper(self, *given: Any) -> Any:
        return Done()


class Done:
    """What was asked for is done; may be awaited."""

    def execute(self, *given: Any) -> Done:
        return self

    def __await__(self) -> Iterator[None]:
        return iter(())


class Made:
    """One that is there, for `with` and `async with`."""

    def __init__(self, made: Any) -> None:
        self._made = made

    def __enter__(self) -> Any:
        return self._made

    def __exit__(self, *error: object) -> None:
        """Nothing: the store stays open."""

    async def __aenter__(self) -> Any:
        return self._made

    async def __aexit__(self, *error: object) -> None:
        """Nothing."""
