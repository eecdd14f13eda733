"""Copies the flows of CrewAI's SQLiteFlowPersistence into a store. Law: changes made here are never overwritten.

The newest state of each flow is copied, and what the flow waits for. CrewAI's class would write to the file that it
opens, so its two tables are read here.

Design: section 22.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, closing
from typing import Any, TypeAlias

from distributed_state import AsyncSession, AsyncStateStore, InvalidValue, StateStore
from distributed_state.adapters.adopting import (
    DELETED,
    EQUAL,
    Found,
    Name,
    canonical,
    deleted,
    demand_in_file,
    read_only,
    sqlite_path,
    untouched,
)
from distributed_state.adapters.crewai import PENDING, SAVED, TAG, fields_of, own, pending_of, saved_by

_TABLES = {
    "flow_states": ("id", "flow_uuid", "method_name", "state_json"),
    "pending_feedback": ("flow_uuid", "context_json", "state_json"),
}
_LISTED = "SELECT flow_uuid FROM flow_states GROUP BY flow_uuid ORDER BY min(id)"
_STATE = "SELECT method_name, state_json FROM flow_states WHERE flow_uuid = ? ORDER BY id DESC LIMIT 1"
_PENDING = "SELECT context_json, state_json FROM pending_feedback WHERE flow_uuid = ?"
Into: TypeAlias = Callable[[str, AsyncStateStore], AsyncSession]


async def threads(
    stack: AsyncExitStack,
    store: StateStore | AsyncStateStore,
    source: Any,
    *,
    into: Into = lambda id, store: store.session(id),
) -> Threads:
    """The flows of an SQLite file, and those of the target."""
    path = sqlite_path(source) if isinstance(source, str) else None
    if path is None:
        raise InvalidValue("the source is the file of an SQLiteFlowPersistence: a path, or sqlite:///path")
    demand_in_file(path, "CrewAI", _TABLES)
    return Threads(store.aio, path, into)


class Threads:
    """The flows of a file and of the target."""

    def __init__(self, store: AsyncStateStore, path: str, into: Into) -> None:
        self._store = store
        self._path = path
        self._into = into

    def _rows(self, statement: str, *given: str) -> list[Any]:
        with closing(sqlite3.connect(read_only(self._path), uri=True)) as connection:
            return connection.execute(statement, given).fetchall()

    async def names(self) -> Sequence[Name]:
        """The ids of flows, the oldest first."""
        return [(id,) for (id,) in self._rows(_LISTED)]

    async def compare(self, name: Name) -> Found:
        """Compare the newest state of a flow, and what it waits for."""
        record = self._into(name[0], self._store)
        if await deleted(record):
            return DELETED
        version = await record.version(fresh=True)
        [(method, state)] = self._rows(_STATE, name[0])
        fields = {**fields_of(json.loads(state)), **saved_by(method)}
        for context, paused in self._rows(_PENDING, name[0]):
            fields |= pending_of(json.loads(context), json.loads(paused))
        stored = await record.get_all()
        has = {**own(stored), **{name: stored[name] for name in (SAVED, PENDING) if name in stored}}
        if canonical(fields) == canonical(has):
            return EQUAL
        if not await untouched(record):
            return Found(differs="it was changed here")
        return Found(work=(record, version, fields, has.keys() - fields.keys()))

    async def copy(self, name: Name, work: Any) -> None:
        """Copy the flow, unless it has changed since the comparison."""
        record, version, fields, gone = work
        tag = {"tag" if PENDING in fields else "untag": TAG}
        await record.write(set=fields, delete=gone, expect_version=version, **tag)
