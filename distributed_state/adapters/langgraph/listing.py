"""Reads many checkpoints: a page of a thread's, the way back from one, all threads. Law: a page is a few exchanges.

Design: section 22.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import copy
from typing import Any

from langgraph.checkpoint.base import (
    CheckpointTuple,
    DeltaChannelHistory,
    PendingWrite,
    writes_sort_key,
)

from distributed_state.adapters.langgraph.frames import (
    CHECKPOINTS,
    RUN,
    WRITES,
    Saved,
    SavedWrite,
    Typed,
    blob_key,
    checkpoint_key,
    run_tag,
    within,
    writes_prefix,
)
from distributed_state.adapters.langgraph.threads import PAGE, Thread, id_of
from distributed_state.adapters.stores import every

_FIRST = 10
_MOST = 100
_MERGED = 20


class Asked:
    """What a listing of one thread asks for, and how far it is."""

    def __init__(self, config: Any, filter: Mapping[str, Any] | None, before: Any, limit: int | None) -> None:
        configurable = (config or {}).get("configurable", {})
        self.namespace: str | None = configurable.get("checkpoint_ns")
        self.id: str | None = id_of(config) if config else None
        self.before: str | None = id_of(before) if before else None
        self.filter = filter or {}
        self.limit = limit
        self.count = 0
        self.done = limit is not None and limit <= 0
        self.next: str | None = None
        self.size = _FIRST
        self.rows: list[Saved] = []  # that were read and are still to be shown, the newest first
        self.merged: list[Asked] | None = None  # of which namespaces, if of all

    def within(self, namespace: str) -> Asked:
        """The same of one namespace."""
        asked = copy(self)
        asked.namespace, asked.rows = namespace, []
        return asked

    def wants(self, thread: Thread, saved: Saved) -> bool:
        """Whether a checkpoint is one of those that are asked for."""
        if (self.id is not None and saved.id != self.id) or (self.before is not None and saved.id >= self.before):
            return False
        if not self.filter:
            return True
        metadata = thread.serde.loads_typed(saved.metadata)
        return all(metadata.get(name) == value for name, value in self.filter.items())


async def page(thread: Thread, asked: Asked) -> list[CheckpointTuple]:
    """Read some more of what is asked for, the newest first."""
    rows = await (_of_namespace(thread, asked) if asked.namespace is not None else _of_all(thread, asked))
    chosen = [saved for saved in rows if asked.wants(thread, saved)]
    if asked.limit is not None:
        chosen = chosen[: asked.limit - asked.count]
    asked.count += len(chosen)
    asked.done = asked.done or (asked.limit is not None and asked.count >= asked.limit)
    writes = await pending_writes(thread, chosen)
    return await thread.tuples([(saved, writes[saved.namespace, saved.id]) for saved in chosen])


async def _of_namespace(thread: Thread, asked: Asked) -> list[Saved]:
    """A page of one namespace; pages become larger."""
    assert asked.namespace is not None
    if asked.id is not None:
        asked.done = True
        found = await thread.find(asked.namespace, asked.id)
        return [] if found is None else [found]
    before = asked.next or (checkpoint_key(asked.namespace, asked.before) if asked.before is not None else None)
    size = asked.size if asked.filter or asked.limit is None else min(asked.size, asked.limit - asked.count)
    listed = await thread.record.items(CHECKPOINTS).list(
        prefix=within(asked.namespace), before=before, limit=max(size, 1), reverse=True
    )
    asked.next, asked.done = listed.next, listed.next is None
    asked.size = min(asked.size * 3, _MOST)
    return [Saved.unpack(item.value) for item in listed.items]


async def _of_all(thread: Thread, asked: Asked) -> list[Saved]:
    """Those of all namespaces, the newest first: of each a page, merged as far as all of them are read."""
    if asked.merged is None:
        found = await _namespaces(thread)
        asked.merged = [asked.within(each) for each in found or ()]
        if found is None:  # keys are in the order of namespaces
            asked.rows = sorted((await everything(thread)), key=lambda saved: saved.id, reverse=True)
    for each in asked.merged:
        while not each.rows and not each.done:
            each.rows = await _of_namespace(thread, each)
    while not any(not each.rows and not each.done for each in asked.merged):
        going = [each for each in asked.merged if each.rows]
        if not going:
            break
        newest = max(going, key=lambda each: each.rows[0].id)
        asked.rows.append(newest.rows.pop(0))
    rows, asked.rows = asked.rows[:_MOST], asked.rows[_MOST:]
    asked.done = not asked.rows and all(each.done and not each.rows for each in asked.merged)
    return rows


async def _namespaces(thread: Thread) -> list[str] | None:
    """All namespaces of a thread, from one to the next; None if there are many: each call of a subgraph has its own."""
    found: list[str] = []
    after: str | None = None
    while len(found) < _MERGED:
        listed = await thread.record.items(CHECKPOINTS).list(after=after, limit=1)
        if listed.items:
            found.append(Saved.unpack(listed.items[0].value).namespace)
            after = within(found[-1]) + "\U0010ffff"
        elif listed.next is None:
            return found
        else:
            after = listed.next
    return None


async def everything(thread: Thread) -> list[Saved]:
    """All checkpoints of a thread, in the order of their keys."""
    return [Saved.unpack(item.value) for item in await every(thread.record.items(CHECKPOINTS))]


async def pending_writes(thread: Thread, chosen: Sequence[Saved]) -> dict[tuple[str, str], list[SavedWrite]]:
    """The pending writes of checkpoints: of each namespace those between the first and the last, in one listing."""
    found: dict[tuple[str, str], list[SavedWrite]] = {(saved.namespace, saved.id): [] for saved in chosen}
    for namespace in {saved.namespace for saved in chosen}:
        ids = [saved.id for saved in chosen if saved.namespace == namespace]
        if len(ids) == 1:
            found[namespace, ids[0]] = await thread.writes(namespace, ids[0])
            continue
        after, last = writes_prefix(namespace, min(ids)), writes_prefix(namespace, max(ids)) + "\U0010ffff"
        for item in await every(thread.record.items(WRITES), after=after, before=last):
            write = SavedWrite.unpack(item.value)
            if (namespace, write.checkpoint_id) in found:
                found[namespace, write.checkpoint_id].append(write)
    for writes in found.values():
        writes.sort(key=lambda each: writes_sort_key(each.path, each.task_id, each.index))
    return found


async def delta_history(
    thread: Thread, namespace: str, checkpoint_id: str | None, channels: Sequence[str]
) -> Mapping[str, DeltaChannelHistory]:
    """What was written to channels along the parents of a checkpoint, back to where each was stored whole."""
    if not channels:
        return {}
    if checkpoint_id is None:
        target, _ = await thread.newest(namespace)
    else:
        target = await thread.find(namespace, checkpoint_id)
    writes: dict[str, list[PendingWrite]] = {channel: [] for channel in channels}
    seeds: dict[str, Any] = {}
    remaining = set(channels)
    loads = thread.serde.loads_typed
    parents = _Ancestors(thread, namespace)
    saved = (await parents.find(target.parent)) if target and target.parent else None
    while saved is not None and remaining:
        for write in reversed(await parents.writes(saved.id)):
            if write.channel in remaining:
                writes[write.channel].append((write.task_id, write.channel, loads(write.value)))
        for channel in [each for each in remaining if each in saved.values]:
            stored = await _value(thread, saved, channel)
            if stored is not None:
                seeds[channel] = loads(stored)
                remaining.discard(channel)
        saved = (await parents.find(saved.parent)) if saved.parent and remaining else None
    found: dict[str, DeltaChannelHistory] = {}
    for channel in channels:
        found[channel] = {"writes": writes[channel][::-1]}
        if channel in seeds:
            found[channel]["seed"] = seeds[channel]
    return found


async def _value(thread: Thread, saved: Saved, channel: str) -> Typed | None:
    """The bytes of a channel's value at a checkpoint, if it has one."""
    value = saved.values[channel]
    if value is not None:
        return value
    version = thread.serde.loads_typed(saved.checkpoint)["channel_versions"].get(channel)
    found = await thread.blobs([blob_key(saved.namespace, channel, version)])
    return next(iter(found.values()), None)


class _Ancestors:
    """The checkpoints before one, read page by page: mostly each is the parent of the next."""

    def __init__(self, thread: Thread, namespace: str) -> None:
        self._thread = thread
        self._namespace = namespace
        self._found: dict[str, Saved] = {}
        self._writes: dict[tuple[str, str], list[SavedWrite]] = {}
        self._size = 4

    async def find(self, checkpoint_id: str) -> Saved | None:
        """A checkpoint, and with it some that come before it."""
        if checkpoint_id not in self._found:
            listed = await self._thread.record.items(CHECKPOINTS).list(
                prefix=within(self._namespace),
                before=checkpoint_key(self._namespace, checkpoint_id) + "\0",
                limit=self._size,
                reverse=True,
            )
            self._size = min(self._size * 4, _MOST)
            rows = [Saved.unpack(item.value) for item in listed.items]
            self._found |= {saved.id: saved for saved in rows}
            if checkpoint_id in self._found:
                self._writes |= await pending_writes(self._thread, rows)
        return self._found.get(checkpoint_id)

    async def writes(self, checkpoint_id: str) -> Sequence[SavedWrite]:
        """The pending writes of a checkpoint that was found."""
        known = self._writes.get((self._namespace, checkpoint_id))
        if known is None:
            known = await self._thread.writes(self._namespace, checkpoint_id)
        return known


async def thread_ids(store: Any, prefix: str, runs: Collection[str] | None = None) -> list[str]:
    """The ids of all threads whose sessions begin with a prefix; with runs, of those in which one of them may be."""
    tags: list[dict[str, str] | None] = [None] if runs is None else [{RUN: each} for each in sorted(map(run_tag, runs))]
    found: dict[str, None] = {}
    for wanted in tags:
        after: str | None = None
        while True:
            rows = await store.sessions(prefix=prefix, tags=wanted, limit=PAGE, after=after, fresh=True)
            found |= {row.id.removeprefix(prefix): None for row in rows}
            if len(rows) < PAGE:
                break
            after = rows[-1].cursor
    return list(found)
