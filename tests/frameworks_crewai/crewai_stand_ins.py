"""A plugin of pytest for CrewAI's own tests: where they make its SQLite persistence, they get ours.

Law: only what tests import is replaced. ADAPTER says what stands in: "theirs" is their own (the control), "ours" is
this package, with the store of the settings in the environment. Those that made one are counted.
"""

from __future__ import annotations

import importlib
import os
import uuid
import warnings
from typing import Any

import made
import pytest
from pydantic import Field

with warnings.catch_warnings(action="ignore"):
    from crewai.flow.persistence import SQLiteFlowPersistence as Theirs

from distributed_state import StateStore
from distributed_state.adapters.crewai import DistributedFlowPersistence

pytest_plugins = ["made"]

_stores: list[StateStore] = []


def _store() -> StateStore:
    if not _stores:
        _stores.append(StateStore.open(namespace=f"t{uuid.uuid4().hex[:12]}"))
    return _stores[0]


def _replace() -> None:
    """Put a class of the same name, which CrewAI finds by it, in the place of theirs."""

    class SQLiteFlowPersistence(DistributedFlowPersistence):
        """Flows of a place, which is a file."""

        persistence_type: str = Field(default="SQLiteFlowPersistence")
        db_path: str = Field(default="")

        def __init__(self, db_path: str | None = None, /, **given: Any) -> None:
            made.note()
            super().__init__(_store(), **{"db_path": f"{db_path or ''}", **given})

        def _session(self, flow_uuid: str) -> Any:
            return super()._session(f"{self.db_path} {flow_uuid}")

    for module in ("crewai.flow.persistence", "crewai.flow.persistence.sqlite"):
        importlib.import_module(module).SQLiteFlowPersistence = SQLiteFlowPersistence  # type: ignore[attr-defined]


def pytest_configure(config: pytest.Config) -> None:
    if os.environ["ADAPTER"] == "ours":
        _replace()
        return
    begin = Theirs.__init__

    def noted(self: Any, *given: Any, **options: Any) -> None:
        made.note()
        begin(self, *given, **options)

    Theirs.__init__ = noted  # type: ignore[method-assign]


def pytest_unconfigure(config: pytest.Config) -> None:
    while _stores:
        _stores.pop().close()
