"""LangGraph's store on a store of ours: `DistributedStateStore(store)`. Law: a batch reads first, then writes once.

A namespace is a record of scope app, or task if it has an owner, and its keys are items of it. A separate record, the
directory, has the names of all namespaces as items, so that the namespaces below another one are found in order; a
namespace is listed before it gets its first item. A value is stored as given, with its times under a reserved name;
names like that get an extra "#". All times are from the server's clock; with their own clocks, workers would disagree
about which values have expired.

Design: section 22.
"""

from __future__ import annotations

import re
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from langgraph.store.base import (
    BaseStore,
    GetOp,
    IndexConfig,
    Item,
    ListNamespacesOp,
    Op,
    PutOp,
    Result,
    SearchItem,
    SearchOp,
    TTLConfig,
    ensure_embeddings,
    validate_op_namespace,
)

from distributed_state import (
    AsyncItems,
    AsyncRecord,
    AsyncStateStore,
    ConfigurationError,
    Conflict,
    Deleted,
    DeleteItem,
    InvalidValue,
    ItemPage,
    PutItem,
    Search,
    StateStore,
)
from distributed_state.adapters.stores import Opening, every, finish, open_store, together

ITEMS, NAMESPACES = "items", "namespaces"
_TIMES = "#langgraph"
_LIKE_OURS = re.compile("#+langgraph")
_PAGE = 1000
_AT_ONCE = 50
_SOME = 20
_KNOWN = 10_000
_LOOKED = 50
Namespace = tuple[str, ...]
Owner = Callable[[Namespace], str | None]


class DistributedStateStore(BaseStore):
    """Keeps agents' long-term memories in a store, for the sync and the asyncio API; each namespace is a record.

    Example::

        with DistributedStateStore.from_conn_string(archive="memory") as memories:
            memories.put(("users", "u1"), "seat", {"train": "window"})
            assert memories.get(("users", "u1"), "seat").value == {"train": "window"}
            print(memories.search(("users",), filter={"train": "window"}))

    `ttl` is LangGraph's `TTLConfig`, in minutes by the server's clock: expired values are not shown; `sweep_ttl`
    removes them. A use of a value is recorded once a tenth of its time has passed, in one commit per namespace. A query
    in `search` uses the store's search, if it is on (see `StateStore.search`); else it has no effect, and the first one
    warns. A query ignores the fields that an item's `index` names, and `index=False` hides the item from queries.
    `list_namespaces` shows only namespaces with values, and reads each one to check. The name of an emptied namespace
    stays stored, but hidden, for the next `put`.

    `owner` is a function that returns the owner of a namespace, or None, such as `lambda path: path[1] if path[0] ==
    "users" else None`: `store.forget` removes the values of that owner. It decides where a namespace is stored, so give
    the same one everywhere, from the start.
    """

    supports_ttl = True
    __slots__ = ("_memories", "_warned", "ttl_config")

    def __init__(
        self,
        store: StateStore | AsyncStateStore,
        *,
        prefix: str = "langgraph-store/",
        ttl: TTLConfig | None = None,
        owner: Owner | None = None,
        index: IndexConfig | None = None,
    ) -> None:
        if index is not None:
            raise ConfigurationError(
                "index: this store is open already; write StateStore.open(..., search=Search(embed=function, "
                "dimensions=number)) with your function from texts to vectors, and leave index out"
            )
        self._memories = Memories(open_store(store).aio, prefix, owner)
        self._warned = False
        self.ttl_config = ttl

    @classmethod
    def from_conn_string(
        cls,
        url: str | None = None,
        *,
        archive: str | None = None,
        ttl: TTLConfig | None = None,
        owner: Owner | None = None,
        index: IndexConfig | None = None,
        **settings: Any,
    ) -> Opening[DistributedStateStore]:
        """Open a store only for this object: `with ... as memories` or `async with ... as memories`.

        `url`, `archive` and further settings are those of `StateStore.open`. `index` is LangGraph's `IndexConfig`; it
        becomes the setting `search`, which needs PostgreSQL with pgvector.
        """
        if index is not None:
            embed = ensure_embeddings(index["embed"]).aembed_documents
            settings["search"] = Search(embed=embed, dimensions=index["dims"])
        return Opening(lambda store: cls(store, ttl=ttl, owner=owner), url, archive, settings)

    def setup(self) -> None:
        """Do nothing: tables are created when the store is opened. Other stores require this call."""

    def batch(self, ops: Iterable[Op]) -> list[Result]:
        """Carry out several operations: reads return the state before the batch's writes.

        All writes leave in one exchange, with one commit per namespace; reads by key take one exchange per namespace.
        """
        return finish(self.abatch(ops))

    async def abatch(self, ops: Iterable[Op]) -> list[Result]:
        """Carry out several operations, as `batch`; here, reads of several namespaces also leave in one exchange."""
        ops = [_plain(op) for op in ops]
        for op in ops:
            validate_op_namespace(op)
        wanted: dict[Namespace, set[str]] = {}
        for op in ops:
            if isinstance(op, GetOp):
                wanted.setdefault(op.namespace, set()).add(op.key)
        found = (await self._memories.find(wanted)) if wanted else {}
        used: dict[tuple[Namespace, str], Memory] = {}
        results: list[Result] = []
        changes: dict[tuple[Namespace, str], tuple[Mapping[str, Any] | None, float | None, bool]] = {}
        for op in ops:
            if isinstance(op, GetOp):
                memory = found.get((op.namespace, op.key))
                if memory is not None and op.refresh_ttl:
                    used[op.namespace, op.key] = memory
                results.append(_item(op.namespace, op.key, memory))
            elif isinstance(op, SearchOp):
                results.append(await self._search(op, used))
            elif isinstance(op, ListNamespacesOp):
                results.append(await self._list_namespaces(op))
            elif isinstance(op, PutOp):
                changes.pop((op.namespace, op.key), None)
                changes[op.namespace, op.key] = (op.value, op.ttl, op.index is not False)
                results.append(None)
            else:
                raise ValueError(f"Unknown operation type: {type(op)}")
        await self._memories.refresh({name: each for name, each in used.items() if name not in changes})
        if changes:
            await self._memories.write(changes)
        return results

    def sweep_ttl(self) -> int:
        """Delete expired items; return their number."""
        return finish(self.asweep_ttl())

    async def asweep_ttl(self) -> int:
        """Delete expired items, as `sweep_ttl`."""
        return await self._memories.sweep()

    async def _search(self, op: SearchOp, used: dict[tuple[Namespace, str], Memory]) -> list[SearchItem]:
        prefix = op.namespace_prefix
        if op.query and op.query.strip():
            try:
                return await self._memories.matching(prefix, op.query, op.filter, op.limit, op.offset)
            except ConfigurationError as error:
                self._warn(error)  # LangGraph's own stores ignore the query, too, and say nothing
        rows = [
            row
            for row in (await self._memories.below(prefix))
            if all(_compare(row[2].value.get(name), wanted) for name, wanted in (op.filter or {}).items())
        ][op.offset : op.offset + op.limit]
        if op.refresh_ttl:
            used |= {(namespace, key): memory for namespace, key, memory in rows}
        return [SearchItem(**memory.shown(namespace, key)) for namespace, key, memory in rows]

    def _warn(self, error: ConfigurationError) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"search(query=...) ignores its query and returns the values that changed last: {error}", stacklevel=4
            )

    async def _list_namespaces(self, op: ListNamespacesOp) -> list[Namespace]:
        conditions = op.match_conditions or ()
        firm: Namespace = ()
        for condition in conditions:
            if condition.match_type == "prefix" and "*" not in condition.path:
                firm = max(firm, tuple(condition.path), key=len)
        chosen = sorted(
            namespace
            for namespace in (await self._memories.namespaces(firm))
            if all(_matches(each.path, namespace, suffix=each.match_type == "suffix") for each in conditions)
        )
        found: dict[Namespace, None] = {}
        for begin in range(0, len(chosen), _LOOKED):
            left = [each for each in chosen[begin : begin + _LOOKED] if each[: op.max_depth] not in found]
            holding = await self._memories.holding(left)
            found |= {namespace[: op.max_depth]: None for namespace in holding}
            if len(found) >= op.offset + op.limit:
                break
        return list(found)[op.offset : op.offset + op.limit]


def memories_of(store: DistributedStateStore) -> Memories:
    """The procedures of a store."""
    return store._memories  # noqa: SLF001 - of this module


def _plain(op: Op) -> Op:
    """The operation with its namespace as a tuple: LangGraph's clients also pass lists."""
    if isinstance(op, GetOp | PutOp):
        return op._replace(namespace=tuple(op.namespace))
    if isinstance(op, SearchOp):
        return op._replace(namespace_prefix=tuple(op.namespace_prefix))
    return op


# Stored values


@dataclass(frozen=True, slots=True)
class Memory:
    """A stored value: its times of creation and change, and its lifetime in minutes after the last use."""

    value: dict[str, Any]
    created: float
    updated: float
    ttl: float | None = None
    used: float = 0.0
    indexed: bool = True
    stored: Any = None

    def pack(self) -> dict[str, Any]:
        """The value as JSON values."""
        times = [self.created, self.updated, self.ttl, self.used, self.indexed]
        stored = _stored(self.value)
        # Renamed keys are marked: earlier releases stored such names unchanged, and those must be read unchanged.
        return {**stored, _TIMES: times if stored.keys() == self.value.keys() else [*times, True]}

    @classmethod
    def unpack(cls, item: Any) -> Memory:
        """Read a memory back from an item of the record."""
        value = dict(item.value)
        created, updated, ttl, used, indexed, *renamed = value.pop(_TIMES)
        if renamed:
            value = {name[1:] if _LIKE_OURS.fullmatch(name) else name: each for name, each in value.items()}
        return cls(value, created, updated, ttl, used, indexed, item)

    def expired(self, now: float) -> bool:
        """Whether its lifetime is over."""
        return self.ttl is not None and self.used + self.ttl * 60 <= now

    def aged(self, now: float) -> bool:
        """Whether a tenth of its lifetime has passed: before that, a use is not worth a commit."""
        return self.ttl is not None and self.used + self.ttl * 6 <= now

    def shown(self, namespace: Namespace, key: str) -> dict[str, Any]:
        """The arguments of LangGraph's items."""
        times = {"created_at": _time(self.created), "updated_at": _time(self.updated)}
        return {"namespace": namespace, "key": key, "value": self.value, **times}


def _stored(named: Mapping[str, Any]) -> dict[str, Any]:
    return {f"#{name}" if _LIKE_OURS.fullmatch(str(name)) else name: each for name, each in named.items()}


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _item(namespace: Namespace, key: str, memory: Memory | None) -> Item | None:
    """A value as LangGraph's item."""
    return None if memory is None else Item(**memory.shown(namespace, key))


def text_of(namespace: Iterable[str]) -> str:
    """A namespace as text: each label ends with a period, which labels cannot contain, so prefixes are unambiguous."""
    return "".join(f"{label}." for label in namespace)


def labels_of(text: str) -> Namespace:
    """Undo `text_of`."""
    return tuple(text.split(".")[:-1])


# The procedures


class Memories:
    """The namespaces of a store, with a cache of the namespaces and values that this process knows."""

    def __init__(self, store: AsyncStateStore, prefix: str, owner: Owner | None = None) -> None:
        self._store = store
        self.prefix = prefix
        self._owner = owner
        self._listed: OrderedDict[Namespace, None] = OrderedDict()
        self._created: OrderedDict[tuple[Namespace, str], float] = OrderedDict()

    def record(self, namespace: Namespace) -> AsyncRecord:
        """The record of a namespace."""
        id, owner = self.prefix + text_of(namespace), self._owner_of(namespace)
        return self._store.app(id) if owner is None else self._store.task(id, user=owner)

    def _owner_of(self, namespace: Namespace) -> str | None:
        return None if self._owner is None else self._owner(namespace)

    def directory(self) -> AsyncItems:
        """The items that name all namespaces."""
        return self._store.app(self.prefix).items(NAMESPACES)

    # Reading

    async def find(self, wanted: Mapping[Namespace, Iterable[str]]) -> dict[tuple[Namespace, str], Memory]:
        """The existing values by namespace and key: one exchange per namespace, with asyncio one for all."""
        many = [(namespace, sorted(keys)) for namespace, keys in wanted.items() if keys]
        pages = [
            (namespace, keys[begin : begin + _PAGE]) for namespace, keys in many for begin in range(0, len(keys), _PAGE)
        ]
        found = await together(
            partial(self.record(namespace).items(ITEMS).find_many, keys) for namespace, keys in pages
        )
        now = await self._store.time()
        memories = {}
        for (namespace, _), items in zip(pages, found, strict=True):
            for key, item in items.items():
                memory = Memory.unpack(item)
                if not memory.expired(now):
                    memories[namespace, key] = memory
                    self._note(namespace, key, memory.created)
        return memories

    async def namespaces(self, prefix: Namespace) -> list[Namespace]:
        """All namespaces with this prefix, in order."""
        return [labels_of(item.key) for item in await every(self.directory(), prefix=text_of(prefix))]

    async def holding(self, namespaces: Iterable[Namespace]) -> list[Namespace]:
        """The namespaces among these that have values, in order. A round trip for each; with asyncio for fifty."""
        found: list[Namespace] = []
        now = await self._store.time()
        left: list[tuple[Namespace, str | None]] = [(namespace, None) for namespace in namespaces]
        while left:
            asked, left = left[:_AT_ONCE], left[_AT_ONCE:]
            pages = await self._pages(asked, _SOME)
            for (namespace, _), page in zip(asked, pages, strict=True):
                if not all(Memory.unpack(item).expired(now) for item in page.items):
                    found.append(namespace)
                elif page.next is not None:
                    left.append((namespace, page.next))
        return sorted(found)

    async def below(self, prefix: Namespace) -> list[tuple[Namespace, str, Memory]]:
        """All values in namespaces with this prefix, the last changed first."""
        found: list[tuple[Namespace, str, Memory]] = []
        now = await self._store.time()
        names = await self.namespaces(prefix)
        left: list[tuple[Namespace, str | None]] = [(namespace, None) for namespace in names]
        while left:
            asked, left = left[:_AT_ONCE], left[_AT_ONCE:]
            pages = await self._pages(asked, _PAGE)
            for (namespace, _), page in zip(asked, pages, strict=True):
                memories = [(namespace, item.key, Memory.unpack(item)) for item in page.items]
                found += [each for each in memories if not each[2].expired(now)]
                if page.next is not None:
                    left.append((namespace, page.next))
        return sorted(found, key=lambda each: each[2].updated, reverse=True)

    async def _pages(self, asked: Iterable[tuple[Namespace, str | None]], limit: int) -> list[ItemPage]:
        return await together(
            partial(self.record(namespace).items(ITEMS).list, after=after, limit=limit) for namespace, after in asked
        )

    async def matching(
        self, prefix: Namespace, query: str, filter: Mapping[str, Any] | None, limit: int, offset: int
    ) -> list[SearchItem]:
        """The results of the store's search in namespaces with this prefix, the most relevant first."""
        hits = await self._store.search(
            query, scope="app" if self._owner is None else None, prefix=self.prefix + text_of(prefix),
            kinds=("item",), collection=ITEMS,
            filter=_stored(filter or {}) or None, match="any", limit=limit, offset=offset, fresh=True,
        )  # fmt: skip
        now = await self._store.time()
        found = []
        for hit in hits:
            memory = Memory.unpack(hit)
            if memory.indexed and not memory.expired(now):
                namespace = labels_of(hit.id.removeprefix(self.prefix))
                found.append(SearchItem(**memory.shown(namespace, str(hit.key)), score=hit.score))
        return found

    # Changing

    async def refresh(self, used: Mapping[tuple[Namespace, str], Memory]) -> None:
        """Record that values with a lifetime were used now; a value that changed meanwhile is skipped."""
        if all(memory.ttl is None for memory in used.values()):
            return
        now: float = await self._store.time()
        records: dict[Namespace, list[PutItem | DeleteItem]] = {}
        for (namespace, key), memory in used.items():
            if memory.aged(now):
                again = Memory(memory.value, memory.created, memory.updated, memory.ttl, now, memory.indexed).pack()
                records.setdefault(namespace, []).append(
                    PutItem(collection=ITEMS, key=key, value=again, equals=memory.stored)
                )
        try:
            for batch in self._batches(records):
                await batch.__aexit__(None, None, None)
        except (Conflict, Deleted):  # retry the other values one by one; a changed or forgotten value is skipped
            for namespace, steps in records.items():
                for step in steps:
                    with suppress(Conflict, Deleted):
                        await self.record(namespace).write(items=[step])

    def _batches(self, records: Mapping[Namespace, Sequence[PutItem | DeleteItem]]) -> list[Any]:
        """Batches that change values: one exchange each, with a commit of at most a thousand values per namespace."""
        batches = []
        while records:
            batch = self._store.batch()
            for namespace, steps in records.items():
                try:
                    changes = batch.on(self.record(namespace))
                    for step in steps[:_PAGE]:
                        if isinstance(step, PutItem):
                            changes.put_item(step.collection, step.key, step.value, equals=step.equals)
                        else:
                            changes.delete_item(step.collection, step.key)
                except InvalidValue as error:
                    raise type(error)(f"namespace {namespace!r:.200}: {error}") from error
            batches.append(batch)
            records = {namespace: steps[_PAGE:] for namespace, steps in records.items() if steps[_PAGE:]}
        return batches

    async def write(
        self, changes: Mapping[tuple[Namespace, str], tuple[Mapping[str, Any] | None, float | None, bool]]
    ) -> None:
        """Put and delete values, all of them in one exchange; each namespace in one commit."""
        unknown: dict[Namespace, set[str]] = {}
        for (namespace, key), (value, _, _) in changes.items():
            if value is not None and (namespace, key) not in self._created:
                unknown.setdefault(namespace, set()).add(key)
        await self.find(unknown)  # caches their times of creation
        now: float = await self._store.time()
        records: dict[Namespace, list[PutItem | DeleteItem]] = {}
        for (namespace, key), (value, ttl, indexed) in changes.items():
            if value is None:
                self._created.pop((namespace, key), None)
                step: PutItem | DeleteItem = DeleteItem(collection=ITEMS, key=key)
            else:
                created = self._created.get((namespace, key), now)
                self._note(namespace, key, created)
                packed = Memory(dict(value), created, now, ttl, now, indexed).pack()
                step = PutItem(collection=ITEMS, key=key, value=packed)
            records.setdefault(namespace, []).append(step)
        batches = self._batches(records)  # raises for invalid values before a namespace is listed
        await self._list({namespace for (namespace, _), (value, _, _) in changes.items() if value is not None})
        try:
            for batch in batches:
                await batch.__aexit__(None, None, None)
        except Deleted:  # its owner was forgotten before; a batch begins no record again, and may be repeated
            for namespace, steps in records.items():
                for begin in range(0, len(steps), _PAGE):
                    await self.record(namespace).write(items=steps[begin : begin + _PAGE], revive=True)

    async def all_in(self, namespace: Namespace) -> dict[str, Memory]:
        """All values of a namespace, also expired ones that were not removed yet."""
        return {item.key: Memory.unpack(item) for item in await every(self.record(namespace).items(ITEMS))}

    async def restore(self, namespace: Namespace, memories: Mapping[str, Memory], ttl: float | None) -> None:
        """Put values with their times; a lifetime begins now."""
        now = await self._store.time()
        await self._list([namespace])
        steps = [
            PutItem(collection=ITEMS, key=key, value=replace(each, ttl=ttl, used=now).pack())
            for key, each in memories.items()
        ]
        for begin in range(0, len(steps), _PAGE):
            await self.record(namespace).write(items=steps[begin : begin + _PAGE])

    async def _list(self, namespaces: Iterable[Namespace]) -> None:
        """Add namespaces to the directory, unless this process knows that they are in it."""
        new = [namespace for namespace in namespaces if namespace not in self._listed]
        if new:
            await self.directory().put_missing({text_of(namespace): 1 for namespace in new})
            self._listed.update(dict.fromkeys(new))
            while len(self._listed) > _KNOWN:
                self._listed.popitem(last=False)

    def _note(self, namespace: Namespace, key: str, created: float) -> None:
        self._created[namespace, key] = created
        while len(self._created) > _KNOWN:
            self._created.popitem(last=False)

    async def sweep(self) -> int:
        """Delete expired values; return their number."""
        swept = 0
        now = await self._store.time()
        for namespace in await self.namespaces(()):
            items = self.record(namespace).items(ITEMS)
            after: str | None = None
            while True:
                page = await items.list(after=after, limit=_PAGE)
                for item in page.items:
                    if Memory.unpack(item).expired(now):
                        with suppress(Conflict):
                            await items.delete(item.key, equals=item)
                            swept += 1
                if page.next is None:
                    break
                after = page.next
        return swept


# Choosing, as LangGraph's own stores compare


def _compare(value: Any, wanted: Any) -> bool:
    """Whether a value matches a filter, compared as LangGraph's stores do."""
    if isinstance(wanted, dict):
        if any(name.startswith("$") for name in wanted):
            return all(_operator(value, name, other) for name, other in wanted.items())
        return isinstance(value, dict) and all(_compare(value.get(name), other) for name, other in wanted.items())
    if isinstance(wanted, list | tuple):
        same = isinstance(value, list | tuple) and len(value) == len(wanted)
        return same and all(_compare(*pair) for pair in zip(value, wanted, strict=True))
    return bool(value == wanted)


def _operator(value: Any, name: str, other: Any) -> bool:
    if name in ("$eq", "$ne"):
        return bool(value == other) is (name == "$eq")
    compared = {"$gt": "__gt__", "$gte": "__ge__", "$lt": "__lt__", "$lte": "__le__"}
    if name not in compared:
        raise ValueError(f"Unsupported operator: {name}")
    try:
        return bool(getattr(float(value), compared[name])(float(other)))
    except (TypeError, ValueError):
        return False


def _matches(path: Sequence[str], namespace: Namespace, *, suffix: bool) -> bool:
    """Whether a namespace begins, or ends, with a path, in which "*" is any label."""
    if len(namespace) < len(path):
        return False
    part = namespace[len(namespace) - len(path) :] if suffix else namespace[: len(path)]
    return all(wanted in ("*", label) for wanted, label in zip(path, part, strict=True))
