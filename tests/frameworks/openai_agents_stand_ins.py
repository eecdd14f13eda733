"""A plugin of pytest for the SDK's own tests: where they make a session of theirs, they get one of ours.

Law: only what tests import is replaced. The SDK itself keeps its classes, so nothing of it is tested against itself.
The store is that of the settings in the environment.
"""

from __future__ import annotations

import importlib
import uuid
from abc import ABCMeta
from collections.abc import Generator
from typing import Any

import made
import pytest

from distributed_state import StateStore
from distributed_state.adapters.openai_agents import DistributedSession

# Before anything is replaced, so that the SDK's modules have bound their own names.
for module in ("encrypt_session", "redis_session", "async_sqlite_session", "sqlalchemy_session"):
    importlib.import_module(f"agents.extensions.memory.{module}")
importlib.import_module("agents.memory.openai_responses_compaction_session")

pytest_plugins = ["made"]

_stores: list[StateStore] = []


class _Awaitable:
    """What `close()` returns: some of their sessions are closed with `await`, some without."""

    def __await__(self) -> Generator[None, None, None]:
        yield from ()


class _Stand(ABCMeta):
    """A class that may be called as theirs, is inherited from as theirs, and makes exactly our session."""

    def __call__(cls, *given: Any, **named: Any) -> Any:
        if not vars(cls).get("stands"):
            return super().__call__(*given, **named)  # a subclass that a test makes
        made = DistributedSession.__new__(DistributedSession)
        cls.__init__(made, *given, **named)
        return made

    def __instancecheck__(cls, instance: Any) -> bool:
        return (
            isinstance(instance, DistributedSession) if vars(cls).get("stands") else super().__instancecheck__(instance)
        )


def _begin(session: Any, session_id: str, place: object, settings: Any) -> None:
    if not _stores:
        _stores.append(StateStore.open(namespace=f"t{uuid.uuid4().hex[:12]}"))
    DistributedSession.__init__(session, f"{place} {session_id}", _stores[0], session_settings=settings)
    session.session_id = session_id
    made.note()


class SQLite(DistributedSession, metaclass=_Stand):
    """Stands for SQLiteSession and AsyncSQLiteSession: a file is a place, and memory is one for each object."""

    stands = True

    def __init__(
        self, session_id: str, db_path: Any = ":memory:", *tables: str, session_settings: Any = None, **more: str
    ) -> None:
        self.db_path = db_path
        _begin(self, session_id, uuid.uuid4() if str(db_path) == ":memory:" else db_path, session_settings)


class Redis(DistributedSession, metaclass=_Stand):
    """Stands for RedisSession: the place is a client and a prefix."""

    stands = True

    def __init__(
        self, session_id: str, *, redis_client: Any, key_prefix: str = "agents:session", ttl: int | None = None,
        session_settings: Any = None,
    ) -> None:  # fmt: skip
        _begin(self, session_id, f"{id(redis_client)} {key_prefix}", session_settings)


class SQLAlchemy(DistributedSession, metaclass=_Stand):
    """Stands for SQLAlchemySession: the place is an engine and a table."""

    stands = True

    def __init__(
        self, session_id: str, *, engine: Any, create_tables: bool = False, sessions_table: str = "",
        messages_table: str = "agent_messages", session_settings: Any = None, ensure_ascii: bool = True,
    ) -> None:  # fmt: skip
        self.engine = engine
        _begin(self, session_id, f"{id(engine)} {messages_table}", session_settings)

    @classmethod
    def from_url(cls, session_id: str, *, url: str, engine_kwargs: Any = None, **named: Any) -> Any:
        from sqlalchemy.ext.asyncio import create_async_engine

        return cls(session_id, engine=create_async_engine(url, **(engine_kwargs or {})), **named)


def pytest_configure(config: pytest.Config) -> None:
    DistributedSession.close = lambda self: _Awaitable()  # type: ignore[attr-defined]  # they close what they made
    for module, name, stand_in in (
        ("agents", "SQLiteSession", SQLite),
        ("agents.memory", "SQLiteSession", SQLite),
        ("agents.extensions.memory", "AsyncSQLiteSession", SQLite),
        ("agents.extensions.memory.async_sqlite_session", "AsyncSQLiteSession", SQLite),
        ("agents.extensions.memory.redis_session", "RedisSession", Redis),
        ("agents.extensions.memory.sqlalchemy_session", "SQLAlchemySession", SQLAlchemy),
    ):
        setattr(importlib.import_module(module), name, stand_in)


def pytest_unconfigure(config: pytest.Config) -> None:
    while _stores:
        _stores.pop().close()
