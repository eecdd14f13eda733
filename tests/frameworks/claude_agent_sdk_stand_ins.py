"""A plugin of pytest for the SDK's own tests: where they make a store in memory, they get one of ours.

Law: only what tests import is replaced. The server and the archive are those of the settings in the environment.
"""

from __future__ import annotations

import uuid
from typing import Any

import claude_agent_sdk
import made
import pytest

from distributed_state import StateStore
from distributed_state.adapters.claude_agent_sdk import DistributedSessionStore
from distributed_state.adapters.stores import finish

pytest_plugins = ["made"]

_stores: list[StateStore] = []


class Stand(DistributedSessionStore):
    """One of ours that is made as theirs, with what theirs has for tests."""

    def __init__(self) -> None:
        if not _stores:
            _stores.append(StateStore.open(namespace=f"t{uuid.uuid4().hex[:12]}"))
        super().__init__(_stores[0], prefix=f"{uuid.uuid4().hex}/")
        made.note()

    def get_entries(self, key: Any) -> list[Any]:
        return finish(self.load(key)) or []

    @property
    def size(self) -> int:
        return len(_stores[0].sessions(prefix=self._prefix, fresh=True, limit=1000))

    def clear(self) -> None:
        for info in _stores[0].sessions(prefix=self._prefix, fresh=True, limit=1000):
            _stores[0].erase(info.id)


def pytest_configure(config: pytest.Config) -> None:
    claude_agent_sdk.InMemorySessionStore = Stand  # type: ignore[misc]


def pytest_unconfigure(config: pytest.Config) -> None:
    while _stores:
        _stores.pop().close()
