"""LangGraph's store on a store of ours: `DistributedStateStore(store)`. Law: a batch reads first, then writes once.

Design: section 22.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from langgraph.store.base import (
    BaseStore,
    GetOp,
    ListNamespacesOp,
    Op,
    PutOp,
    Result,
    SearchItem,
    SearchOp,
    TTLConfig,
    validate_op_namespace,
)

from distributed_state import AsyncStateStore, ConfigurationError, StateStore
from distributed_state.adapters.langgraph.faces import Faces, Opening
from distributed_state.adapters.langgraph.filters import compare, matches
from distributed_state.adapters.langgraph.memories import Memories, Memory, Namespace, shown
from distributed_state.adapters.langgraph.steps import Steps, run, run_async

_LOOKED = 50


class DistributedStateStore(BaseStore):
    """Keeps what agents know across threads: both faces in one object, each namespace a record.

    Example::

        with DistributedStateStore.from_conn_string(archive="memory") as memories:
            memories.put(("users", "u1"), "seat", {"train": "window"})
            assert memories.get(("users", "u1"), "seat").value == {"train": "window"}
            print(memories.search(("users",), filter={"train": "window"}))

    `ttl` as LangGraph's `TTLConfig`, in minutes by the server's clock: what is past its time is not shown; `sweep_ttl`
    removes it. That a value was used is noted when a tenth of its time is gone, in one commit a namespace. A query
    in `search` is answered by the store's search, where that is on (see `StateStore.search`); which fields an item's
    `index` names does not matter to it, `index=False` keeps the item from being found. `list_namespaces` shows those
    that hold something: it looks into each. The name of one that was emptied stays stored, unseen, for the next `put`.
    """

    supports_ttl = True
    __slots__ = ("_faces", "_memories", "ttl_config")

    def __init__(
        self,
        store: StateStore | AsyncStateStore,
        *,
        prefix: str = "langgraph-store/",
        ttl: TTLConfig | None = None,
    ) -> None:
        self._faces = Faces(store)
        self._memories = Memories(prefix)
        self.ttl_config = ttl

    @classmethod
    def from_conn_string(
        cls, url: str | None = None, *, archive: str | None = None, ttl: TTLConfig | None = None, **settings: Any
    ) -> Opening[DistributedStateStore]:
        """Open a store for this alone: `with ... as memories` or `async with ... as memories`.

        `url`, `archive` and further settings as for `StateStore.open`.
        """
        return Opening(lambda store: cls(store, ttl=ttl), url, archive, settings)

    def setup(self) -> None:
        """Nothing: tables are made when the store is opened. Others' stores ask for this call."""

    def batch(self, ops: Iterable[Op]) -> list[Result]:
        """Carry several operations out: what is read is as before what is written.

        All writes leave in one exchange, a commit a namespace; values that are read by their keys in one a namespace.
        """
        return run(self._batch(self._faces.of("blocking"), list(ops)))

    async def abatch(self, ops: Iterable[Op]) -> list[Result]:
        """The same on asyncio, where reads of several namespaces leave in one exchange, too."""
        return await run_async(self._batch(self._faces.of("aio"), list(ops)))

    def sweep_ttl(self) -> int:
        """Delete what is past its time; return how many items that were."""
        return run(self._memories.sweep(self._faces.of("blocking")))

    async def asweep_ttl(self) -> int:
        """The same on asyncio."""
        return await run_async(self._memories.sweep(self._faces.of("aio")))

    def _batch(self, store: Any, ops: list[Op]) -> Steps[list[Result]]:
        ops = [_plain(op) for op in ops]
        for op in ops:
            validate_op_namespace(op)
        wanted: dict[Namespace, set[str]] = {}
        for op in ops:
            if isinstance(op, GetOp):
                wanted.setdefault(op.namespace, set()).add(op.key)
        found = (yield from self._memories.find(store, wanted)) if wanted else {}
        used: dict[tuple[Namespace, str], Memory] = {}
        results: list[Result] = []
        changes: dict[tuple[Namespace, str], tuple[Mapping[str, Any] | None, float | None, bool]] = {}
        for op in ops:
            if isinstance(op, GetOp):
                memory = found.get((op.namespace, op.key))
                if memory is not None and op.refresh_ttl:
                    used[op.namespace, op.key] = memory
                results.append(shown(op.namespace, op.key, memory))
            elif isinstance(op, SearchOp):
                results.append((yield from self._search(store, op, used)))
            elif isinstance(op, ListNamespacesOp):
                results.append((yield from self._list_namespaces(store, op)))
            elif isinstance(op, PutOp):
                changes.pop((op.namespace, op.key), None)
                changes[op.namespace, op.key] = (op.value, op.ttl, op.index is not False)
                results.append(None)
            else:
                raise ValueError(f"Unknown operation type: {type(op)}")
        yield from self._memories.refresh(store, {name: each for name, each in used.items() if name not in changes})
        if changes:
            yield from self._memories.write(store, changes)
        return results

    def _search(self, store: Any, op: SearchOp, used: dict[tuple[Namespace, str], Memory]) -> Steps[list[SearchItem]]:
        prefix = op.namespace_prefix
        if op.query and op.query.strip():
            # As with LangGraph's own stores: where nothing is indexed, a query chooses nothing.
            with suppress(ConfigurationError):
                return (yield from self._memories.matching(store, prefix, op.query, op.filter, op.limit, op.offset))
        rows = [
            row
            for row in (yield from self._memories.below(store, prefix))
            if all(compare(row[2].value.get(name), wanted) for name, wanted in (op.filter or {}).items())
        ][op.offset : op.offset + op.limit]
        if op.refresh_ttl:
            used |= {(namespace, key): memory for namespace, key, memory in rows}
        return [SearchItem(**memory.shown(namespace, key)) for namespace, key, memory in rows]

    def _list_namespaces(self, store: Any, op: ListNamespacesOp) -> Steps[list[Namespace]]:
        conditions = op.match_conditions or ()
        firm: Namespace = ()
        for condition in conditions:
            if condition.match_type == "prefix" and "*" not in condition.path:
                firm = max(firm, tuple(condition.path), key=len)
        chosen = sorted(
            namespace
            for namespace in (yield from self._memories.namespaces(store, firm))
            if all(matches(each.path, namespace, suffix=each.match_type == "suffix") for each in conditions)
        )
        found: dict[Namespace, None] = {}
        for begin in range(0, len(chosen), _LOOKED):
            left = [each for each in chosen[begin : begin + _LOOKED] if each[: op.max_depth] not in found]
            holding = yield from self._memories.holding(store, left)
            found |= {namespace[: op.max_depth]: None for namespace in holding}
            if len(found) >= op.offset + op.limit:
                break
        return list(found)[op.offset : op.offset + op.limit]


def _plain(op: Op) -> Op:
    """The same with its namespace as a tuple: LangGraph's clients give lists, too."""
    if isinstance(op, GetOp | PutOp):
        return op._replace(namespace=tuple(op.namespace))
    if isinstance(op, SearchOp):
        return op._replace(namespace_prefix=tuple(op.namespace_prefix))
    return op
