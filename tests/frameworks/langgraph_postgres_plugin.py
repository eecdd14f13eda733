"""A pytest plugin that runs the tests of LangGraph's PostgreSQL saver and store on ours. Law: as in `langgraph_plugin`.

What their tests import by name is replaced in their modules; of each store's and saver's ways to connect one is run. No
PostgreSQL is asked: their databases are made and cleared by connections that do nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import ModuleType
from typing import Any

import langgraph_stand_ins as stand_ins
import pytest

pytest_plugins = ["made"]

KINDS = ("pipe", "pool", "base_pipe", "base_pool", "aio_pool", "aio_pipe", "shallow")
NAMES = {
    "PostgresSaver": stand_ins.PostgresSaver,
    "AsyncPostgresSaver": stand_ins.PostgresSaver,
    "PostgresStore": stand_ins.PostgresStore,
    "AsyncPostgresStore": stand_ins.PostgresStore,
}


class Connection:
    """Carries nothing out."""

    @classmethod
    @contextmanager
    def connect(cls, *given: Any, **options: Any) -> Iterator[Connection]:
        yield cls()

    def execute(self, *given: Any) -> None:
        """Nothing."""


class AsyncConnection:
    """The same on asyncio."""

    @classmethod
    async def connect(cls, *given: Any, **options: Any) -> Any:
        @asynccontextmanager
        async def opened() -> AsyncIterator[AsyncConnection]:
            yield cls()

        return opened()

    async def execute(self, *given: Any) -> None:
        """Nothing."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = [item for item in items if _wanted(item)]
    kept = set(map(id, chosen))
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = chosen
    for module in {item.module for item in chosen if isinstance(item, pytest.Function)}:
        _replace(module)
    import tests.conftest as theirs

    _replace(theirs)


def _wanted(item: pytest.Item) -> bool:
    """One way to connect of each."""
    fixture = getattr(item, "callspec", None)
    given = [] if fixture is None else [each for each in fixture.params.values() if isinstance(each, str)]
    return not any(each in KINDS for each in given)


def _replace(module: ModuleType) -> None:
    for name, stand_in in {**NAMES, "Connection": Connection, "AsyncConnection": AsyncConnection}.items():
        if name in vars(module):
            setattr(module, name, stand_in)
