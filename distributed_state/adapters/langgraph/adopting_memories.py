"""Copies the values of any LangGraph store into ours. Law: changes that others made in the target are not overwritten.

LangGraph's interface reports no lifetimes: a copied value has the default one of the target's `ttl`, counted from the
copy. A store given by URL is opened only if its table exists, and only for reading.

Design: section 22.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, closing, contextmanager
from datetime import UTC, datetime
from typing import Any

from langgraph.store.base import BaseStore, ListNamespacesOp, SearchOp

from distributed_state import AsyncStateStore, InvalidValue, StateStore
from distributed_state.adapters.adopting import (
    DELETED,
    EQUAL,
    Found,
    Name,
    canonical,
    deleted,
    demand_in_file,
    demand_in_postgresql,
    opened,
    read_only,
    removed,
    removed_item,
    sqlite_path,
    untouched,
)
from distributed_state.adapters.langgraph.store import ITEMS, DistributedStateStore, Memory, Namespace, memories_of

_PAGE = 1000
_TABLES = {"store": ("prefix", "key", "value", "created_at", "updated_at")}


async def threads(
    stack: AsyncExitStack,
    store: StateStore | AsyncStateStore,
    source: Any,
    *,
    into: Callable[[Any], DistributedStateStore] = DistributedStateStore,
) -> Namespaces:
    """The namespaces of a store, or of a PostgreSQL or SQLite URL, and of the target."""
    memories = await opened(stack, store_of(source) if isinstance(source, str) else source, (BaseStore,))
    return Namespaces(memories, into(store))


class Namespaces:
    """The namespaces of a store and of the target."""

    def __init__(self, source: BaseStore, target: DistributedStateStore) -> None:
        self._source = source
        self._memories = memories_of(target)
        self._ttl = (target.ttl_config or {}).get("default_ttl")

    async def _ask(self, op: Any) -> Any:
        """The source's answer; many stores implement only one kind of methods."""
        try:
            return (await self._source.abatch([op]))[0]
        except NotImplementedError:
            return self._source.batch([op])[0]

    async def names(self) -> Sequence[Name]:
        """The namespaces."""
        found: list[Name] = []
        while True:
            page = await self._ask(ListNamespacesOp(limit=_PAGE, offset=len(found)))
            found += [(".".join(namespace),) for namespace in page]  # a label has no period
            if len(page) < _PAGE:
                return found

    async def _theirs(self, namespace: Namespace) -> dict[str, Memory]:
        """The values of a namespace, read without renewing their lifetimes: the source stays as it is."""
        found: dict[str, Memory] = {}
        offset = 0
        while True:
            op = SearchOp(namespace, limit=_PAGE, offset=offset, refresh_ttl=False)
            page = await self._ask(op)
            for each in page:
                if tuple(each.namespace) == namespace:
                    found[each.key] = Memory(dict(each.value), _seconds(each.created_at), _seconds(each.updated_at))
            offset += len(page)
            if len(page) < _PAGE:
                return found

    async def compare(self, name: Name) -> Found:
        """Compare all values of a namespace, with their times."""
        namespace = tuple(name[0].split("."))
        record = self._memories.record(namespace)
        if await deleted(record):
            return DELETED
        theirs, ours = await self._theirs(namespace), await self._memories.all_in(namespace)
        if extra := ours.keys() - theirs.keys():
            return Found(differs=f"it went on here: {len(extra)} values of {len(ours)} are not in the source")
        left = {key: each for key, each in theirs.items() if key not in ours or _seen(ours[key]) != _seen(each)}
        if not left:
            return EQUAL
        if left.keys() & ours.keys() and not await untouched(record):
            return Found(differs="it was changed here")
        lacking = left.keys() - ours.keys()
        if lacking and await removed(record, lambda changes: removed_item(changes, ITEMS)):
            return Found(differs=f"values were removed here: {len(lacking)} of {len(theirs)} are not there")
        return Found(work=left)

    async def copy(self, name: Name, work: dict[str, Memory]) -> None:
        """Save the missing values with their times."""
        await self._memories.restore(tuple(name[0].split(".")), work, self._ttl)


def _seconds(time: datetime) -> float:
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


def _seen(memory: Memory) -> tuple[str, float, float]:
    return canonical(memory.value), memory.created, memory.updated


# The stores of LangGraph's own databases


def store_of(url: str) -> Any:
    """Return an opener of the store at a PostgreSQL or SQLite URL. Raises NotFound if it has no such table."""
    path = sqlite_path(url)
    if path is not None:
        demand_in_file(path, "LangGraph's store", _TABLES)
        return _sqlite_store(path)
    if url.startswith(("postgres://", "postgresql")):
        from langgraph.store.postgres import PostgresStore

        url = "postgresql://" + url.partition("://")[2]
        demand_in_postgresql(url, "LangGraph's store", _TABLES)
        return PostgresStore.from_conn_string(url)
    raise InvalidValue(f"{url.partition('://')[0]}:// is not one of postgresql, sqlite; name a store as module:NAME")


@contextmanager
def _sqlite_store(path: str) -> Iterator[BaseStore]:
    from langgraph.store.sqlite import SqliteStore

    with closing(sqlite3.connect(read_only(path), uri=True, check_same_thread=False)) as connection:
        store = SqliteStore(connection)
        store.is_setup = True  # otherwise it would create tables before reading
        yield store
