"""What agents know, by namespace and key: the procedures of `DistributedStateStore`. Law: a namespace is a record.

A namespace is an app's record, its keys are items of it. A record of its own, the directory, has the names of all
namespaces as items, so that those below another one are found in their order; a namespace is in it before anything is
in the namespace. A value stands as it was given, with its times under a name of ours; names like that get a "#" more.
All times are those of the server's clock: by the workers' own, one would still show what is past its time to another.

Design: section 22.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from langgraph.store.base import Item, SearchItem

from distributed_state import Conflict, DeleteItem, InvalidValue, PutItem
from distributed_state.adapters.langgraph.steps import Steps, sent

Namespace = tuple[str, ...]
ITEMS, NAMESPACES = "items", "namespaces"
_TIMES = "#langgraph"
_LIKE_OURS = re.compile("#+langgraph")
_PAGE = 1000
_AT_ONCE = 50
_SOME = 20
_KNOWN = 10_000


def text_of(namespace: Iterable[str]) -> str:
    """A namespace as text: each label ends with a period, which no label holds, so none begins like another one."""
    return "".join(f"{label}." for label in namespace)


def labels_of(text: str) -> Namespace:
    """Undo `text_of`."""
    return tuple(text.split(".")[:-1])


@dataclass(frozen=True, slots=True)
class Memory:
    """A value as it is stored: when it was made and changed, how many minutes it stays after its last use."""

    value: dict[str, Any]
    created: float
    updated: float
    ttl: float | None = None
    used: float = 0.0
    indexed: bool = True
    stored: Any = None

    def pack(self) -> dict[str, Any]:
        """As JSON."""
        times = [self.created, self.updated, self.ttl, self.used, self.indexed]
        stored = _stored(self.value)
        # It is said where names are others: earlier releases stored such names as they were, and those are read so.
        return {**stored, _TIMES: times if stored.keys() == self.value.keys() else [*times, True]}

    @classmethod
    def unpack(cls, item: Any) -> Memory:
        """Read it back from an item of the record."""
        value = dict(item.value)
        created, updated, ttl, used, indexed, *renamed = value.pop(_TIMES)
        if renamed:
            value = {name[1:] if _LIKE_OURS.fullmatch(name) else name: each for name, each in value.items()}
        return cls(value, created, updated, ttl, used, indexed, item)

    def expired(self, now: float) -> bool:
        """Whether it is past its time."""
        return self.ttl is not None and self.used + self.ttl * 60 <= now

    def aged(self, now: float) -> bool:
        """Whether a tenth of its time is gone: sooner it is not worth a commit to say that it was used."""
        return self.ttl is not None and self.used + self.ttl * 6 <= now

    def shown(self, namespace: Namespace, key: str) -> dict[str, Any]:
        """What LangGraph's items are made of."""
        times = {"created_at": _time(self.created), "updated_at": _time(self.updated)}
        return {"namespace": namespace, "key": key, "value": self.value, **times}


def _stored(named: Mapping[str, Any]) -> dict[str, Any]:
    return {f"#{name}" if _LIKE_OURS.fullmatch(str(name)) else name: each for name, each in named.items()}


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


class Memories:
    """Namespaces of a store, by handles of either face; what is remembered is shared by both."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._listed: OrderedDict[Namespace, None] = OrderedDict()
        self._created: OrderedDict[tuple[Namespace, str], float] = OrderedDict()

    def record(self, store: Any, namespace: Namespace) -> Any:
        """The record of a namespace."""
        return store.app(self.prefix + text_of(namespace))

    def directory(self, store: Any) -> Any:
        """The items that name all namespaces."""
        return store.app(self.prefix).items(NAMESPACES)

    # Reading

    def find(self, store: Any, wanted: Mapping[Namespace, Iterable[str]]) -> Steps[dict[tuple[Namespace, str], Memory]]:
        """Values by namespace and key, those that there are: of a namespace in one exchange, on asyncio of all."""
        many = [(namespace, sorted(keys)) for namespace, keys in wanted.items() if keys]
        pages = [
            (namespace, keys[begin : begin + _PAGE]) for namespace, keys in many for begin in range(0, len(keys), _PAGE)
        ]
        found = yield [self.record(store, namespace).items(ITEMS).find_many(keys) for namespace, keys in pages]
        now = yield store.time()
        memories = {}
        for (namespace, _), items in zip(pages, found, strict=True):
            for key, item in items.items():
                memory = Memory.unpack(item)
                if not memory.expired(now):
                    memories[namespace, key] = memory
                    self._note(namespace, key, memory.created)
        return memories

    def namespaces(self, store: Any, prefix: Namespace) -> Steps[list[Namespace]]:
        """All namespaces that begin so, in their order."""
        found: list[Namespace] = []
        after: str | None = None
        while True:
            page = yield self.directory(store).list(prefix=text_of(prefix), after=after, limit=_PAGE)
            found += [labels_of(item.key) for item in page.items]
            if page.next is None:
                return found
            after = page.next

    def holding(self, store: Any, namespaces: Iterable[Namespace]) -> Steps[list[Namespace]]:
        """Those of these namespaces that hold something, in their order. A round trip each, on asyncio for fifty."""
        found: list[Namespace] = []
        now = yield store.time()
        left: list[tuple[Namespace, str | None]] = [(namespace, None) for namespace in namespaces]
        while left:
            asked, left = left[:_AT_ONCE], left[_AT_ONCE:]
            pages = yield [
                self.record(store, namespace).items(ITEMS).list(after=after, limit=_SOME) for namespace, after in asked
            ]
            for (namespace, _), page in zip(asked, pages, strict=True):
                if not all(Memory.unpack(item).expired(now) for item in page.items):
                    found.append(namespace)
                elif page.next is not None:
                    left.append((namespace, page.next))
        return sorted(found)

    def below(self, store: Any, prefix: Namespace) -> Steps[list[tuple[Namespace, str, Memory]]]:
        """All values in namespaces that begin so, what changed last first."""
        found: list[tuple[Namespace, str, Memory]] = []
        now = yield store.time()
        names = yield from self.namespaces(store, prefix)
        left: list[tuple[Namespace, str | None]] = [(namespace, None) for namespace in names]
        while left:
            asked, left = left[:_AT_ONCE], left[_AT_ONCE:]
            pages = yield [
                self.record(store, namespace).items(ITEMS).list(after=after, limit=_PAGE) for namespace, after in asked
            ]
            for (namespace, _), page in zip(asked, pages, strict=True):
                memories = [(namespace, item.key, Memory.unpack(item)) for item in page.items]
                found += [each for each in memories if not each[2].expired(now)]
                if page.next is not None:
                    left.append((namespace, page.next))
        return sorted(found, key=lambda each: each[2].updated, reverse=True)

    def matching(
        self, store: Any, prefix: Namespace, query: str, filter: Mapping[str, Any] | None, limit: int, offset: int
    ) -> Steps[list[SearchItem]]:
        """What the store's search finds in namespaces that begin so, the most relevant first."""
        hits = yield store.search(
            query, scope="app", prefix=self.prefix + text_of(prefix), kinds=("item",), collection=ITEMS,
            filter=_stored(filter or {}) or None, match="any", limit=limit, offset=offset, fresh=True,
        )  # fmt: skip
        now = yield store.time()
        found = []
        for hit in hits:
            memory = Memory.unpack(hit)
            if memory.indexed and not memory.expired(now):
                namespace = labels_of(hit.id.removeprefix(self.prefix))
                found.append(SearchItem(**memory.shown(namespace, hit.key), score=hit.score))
        return found

    # Changing

    def refresh(self, store: Any, used: Mapping[tuple[Namespace, str], Memory]) -> Steps[None]:
        """Note that values were used now, those that stay for a time only; a value that changed meanwhile is left."""
        if all(memory.ttl is None for memory in used.values()):
            return
        now: float = yield store.time()
        records: dict[Namespace, list[PutItem | DeleteItem]] = {}
        for (namespace, key), memory in used.items():
            if memory.aged(now):
                again = Memory(memory.value, memory.created, memory.updated, memory.ttl, now, memory.indexed).pack()
                records.setdefault(namespace, []).append(
                    PutItem(collection=ITEMS, key=key, value=again, equals=memory.stored)
                )
        try:
            for batch in self._batches(store, records):
                yield sent(batch)
        except Conflict:  # the others that stood in its commit; what was put by then is another one by now
            for namespace, steps in records.items():
                for step in steps:
                    with suppress(Conflict):
                        yield self.record(store, namespace).write(items=[step])

    def _batches(self, store: Any, records: Mapping[Namespace, Sequence[PutItem | DeleteItem]]) -> list[Any]:
        """What changes values, to be sent: one exchange, a commit a namespace, as far as those are a thousand."""
        batches = []
        while records:
            batch = store.batch()
            for namespace, steps in records.items():
                try:
                    changes = batch.on(self.record(store, namespace))
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

    def write(
        self, store: Any, changes: Mapping[tuple[Namespace, str], tuple[Mapping[str, Any] | None, float | None, bool]]
    ) -> Steps[None]:
        """Put and delete values, all of them in one exchange; each namespace in one commit."""
        unknown: dict[Namespace, set[str]] = {}
        for (namespace, key), (value, _, _) in changes.items():
            if value is not None and (namespace, key) not in self._created:
                unknown.setdefault(namespace, set()).add(key)
        yield from self.find(store, unknown)  # which notes when they were made
        now: float = yield store.time()
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
        batches = self._batches(store, records)  # what cannot be stored is refused here, and names no namespace
        yield from self._list(
            store, {namespace for (namespace, _), (value, _, _) in changes.items() if value is not None}
        )
        for batch in batches:
            yield sent(batch)

    def _list(self, store: Any, namespaces: Iterable[Namespace]) -> Steps[None]:
        """Have the directory name these, those that this process does not know to be in it."""
        new = [namespace for namespace in namespaces if namespace not in self._listed]
        if new:
            yield self.directory(store).put_missing({text_of(namespace): 1 for namespace in new})
            self._listed.update(dict.fromkeys(new))
            while len(self._listed) > _KNOWN:
                self._listed.popitem(last=False)

    def _note(self, namespace: Namespace, key: str, created: float) -> None:
        self._created[namespace, key] = created
        while len(self._created) > _KNOWN:
            self._created.popitem(last=False)

    def sweep(self, store: Any) -> Steps[int]:
        """Delete what is past its time; how many that were."""
        swept = 0
        now = yield store.time()
        for namespace in (yield from self.namespaces(store, ())):
            items = self.record(store, namespace).items(ITEMS)
            after: str | None = None
            while True:
                page = yield items.list(after=after, limit=_PAGE)
                for item in page.items:
                    if Memory.unpack(item).expired(now):
                        with suppress(Conflict):
                            yield items.delete(item.key, equals=item)
                            swept += 1
                if page.next is None:
                    break
                after = page.next
        return swept


def shown(namespace: Namespace, key: str, memory: Memory | None) -> Item | None:
    """A value as LangGraph has it."""
    return None if memory is None else Item(**memory.shown(namespace, key))
