"""Reads, removes and copies many checkpoints.

Law: a page takes a few exchanges, and the checkpoint that a thread names as its newest always exists.

Design: section 22.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy as copied
from typing import Any

from langgraph.checkpoint.base import (
    CheckpointTuple,
    DeltaChannelHistory,
    PendingWrite,
    writes_sort_key,
)

from distributed_state import ABSENT, AsyncStateStore, Conflict, Deleted, DeleteItem, InvalidValue, NotFound, PutItem
from distributed_state.adapters.langgraph.frames import (
    BLOBS,
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
    write_key,
    writes_prefix,
)
from distributed_state.adapters.langgraph.threads import AGAIN, AT, HEAD, HEAD_BYTES, Thread, flag, id_of
from distributed_state.adapters.stores import every, sessions_below

_FIRST = 10
_MOST = 100
_MERGED = 20


class Asked:
    """The conditions of a listing of one thread, and its progress."""

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
        self.rows: list[Saved] = []  # read but not yet shown, the newest first
        self.merged: list[Asked] | None = None  # one listing for each namespace, if all are listed

    def within(self, namespace: str) -> Asked:
        """The same listing for one namespace."""
        asked = copied(self)
        asked.namespace, asked.rows = namespace, []
        return asked

    def wants(self, thread: Thread, saved: Saved) -> bool:
        """Whether a checkpoint fulfils the conditions."""
        if (self.id is not None and saved.id != self.id) or (self.before is not None and saved.id >= self.before):
            return False
        if not self.filter:
            return True
        metadata = thread.serde.loads_typed(saved.metadata)
        return all(metadata.get(name) == value for name, value in self.filter.items())


async def page(thread: Thread, asked: Asked) -> list[CheckpointTuple]:
    """Read the next page of a listing, the newest first."""
    rows = await (_of_namespace(thread, asked) if asked.namespace is not None else _of_all(thread, asked))
    chosen = [saved for saved in rows if asked.wants(thread, saved)]
    if asked.limit is not None:
        chosen = chosen[: asked.limit - asked.count]
    asked.count += len(chosen)
    asked.done = asked.done or (asked.limit is not None and asked.count >= asked.limit)
    writes = await pending_writes(thread, chosen)
    return await thread.tuples([(saved, writes[saved.namespace, saved.id]) for saved in chosen])


async def _of_namespace(thread: Thread, asked: Asked) -> list[Saved]:
    """A page of one namespace; each page is larger than the last."""
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
    """Checkpoints of all namespaces, the newest first: pages of each, merged as far as all have been read."""
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
    """All namespaces of a thread, read one by one; None if there are many: each call of a subgraph has its own."""
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
    """The pending writes of checkpoints: one listing for each namespace, from the first to the last of them."""
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
    """The writes to channels along a checkpoint's parents, back to where each channel was stored whole."""
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
    """The bytes of a channel's value at a checkpoint, None without a value."""
    value = saved.values[channel]
    if value is not None:
        return value
    version = thread.serde.loads_typed(saved.checkpoint)["channel_versions"].get(channel)
    found = await thread.blobs([blob_key(saved.namespace, channel, version)])
    return next(iter(found.values()), None)


class _Ancestors:
    """The checkpoints before one, read page by page: usually each is the parent of the next."""

    def __init__(self, thread: Thread, namespace: str) -> None:
        self._thread = thread
        self._namespace = namespace
        self._found: dict[str, Saved] = {}
        self._writes: dict[tuple[str, str], list[SavedWrite]] = {}
        self._size = 4

    async def find(self, checkpoint_id: str) -> Saved | None:
        """A checkpoint; the same read also fetches some earlier ones."""
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
        """The pending writes of a checkpoint found earlier."""
        known = self._writes.get((self._namespace, checkpoint_id))
        if known is None:
            known = await self._thread.writes(self._namespace, checkpoint_id)
        return known


async def thread_ids(store: Any, prefix: str, runs: Collection[str] | None = None) -> list[str]:
    """The ids of all threads whose sessions begin with a prefix; with `runs`, only threads that may contain one."""
    tags: list[dict[str, str] | None] = [None] if runs is None else [{RUN: each} for each in sorted(map(run_tag, runs))]
    found: dict[str, None] = {}
    for wanted in tags:
        found |= dict.fromkeys(id.removeprefix(prefix) for id in await sessions_below(store, prefix, tags=wanted))
    return list(found)


_AT_ONCE = 500
_ATTEMPTS = 20


async def delete(store: AsyncStateStore, thread: Thread) -> None:
    """Erase a thread. A missing thread gets a tombstone, which refuses runs that are about to begin it."""
    thread.recent.forget(thread.id)
    if not await store.erase(thread.record.id):
        found = await thread.record.view(fresh=True)
        if found.version == 0:
            with suppress(Conflict):  # a run just began it
                await thread.record.create()
        if found.version == 0 or found.exists:
            await store.erase(thread.record.id)
    thread.recent.forget(thread.id)


async def delete_runs(thread: Thread, runs: Collection[str]) -> None:
    """Remove the checkpoints of runs."""

    def kept(saved: Sequence[Saved], head: str | None) -> set[tuple[str, str]]:
        return {(each.namespace, each.id) for each in saved if each.run not in runs}

    await _remove_all_but(thread, kept)


async def prune(store: AsyncStateStore, thread: Thread, strategy: str) -> None:
    """Keep the newest checkpoint of each namespace, or nothing."""
    if strategy == "delete":
        await delete(store, thread)
        return
    if strategy != "keep_latest":
        raise InvalidValue(f"strategy is 'keep_latest' or 'delete', not {strategy!r:.80}")

    def kept(saved: Sequence[Saved], head: str | None) -> set[tuple[str, str]]:
        roots = {each.id for each in saved if not each.namespace}
        found: set[tuple[str, str]] = set()
        # The root namespace first, as its name is the smallest: it decides which checkpoints of subgraphs are kept.
        for newest in sorted(_newest(saved, head), key=lambda each: each.namespace):
            if not _called_by_gone(thread, newest, roots, found):
                found |= _chain(thread, newest, {each.id: each for each in saved if each.namespace == newest.namespace})
        return found

    await _remove_all_but(thread, kept)


def _newest(saved: Iterable[Saved], head: str | None) -> list[Saved]:
    """The newest checkpoint of each namespace; for the root, the one that the thread's record names."""
    found: dict[str, Saved] = {}
    named: Saved | None = None
    for each in saved:
        first = found.get(each.namespace)
        if first is None or first.id < each.id:
            found[each.namespace] = each
        if not each.namespace and each.id == head:
            named = each
    if named is not None:
        found[""] = named
    return list(found.values())


def _called_by_gone(thread: Thread, newest: Saved, roots: set[str], kept: set[tuple[str, str]]) -> bool:
    """Whether a namespace belongs to a single subgraph call, made from a saved checkpoint that will be removed.

    Such a name ends in the task's id; the name of a subgraph that keeps state across calls does not.
    """
    if ":" not in newest.namespace:
        return False
    root = (thread.serde.loads_typed(newest.metadata).get("parents") or {}).get("")
    return root in roots and ("", root) not in kept


def _chain(thread: Thread, newest: Saved, saved: dict[str, Saved]) -> set[tuple[str, str]]:
    """A checkpoint, and the earlier ones that its delta channels need, back to where each channel is stored whole."""
    kept = {(newest.namespace, newest.id)}
    metadata = thread.serde.loads_typed(newest.metadata)
    wanted = set(metadata.get("counters_since_delta_snapshot") or ()) - set(newest.values)
    at: Saved | None = newest
    while wanted and at is not None:
        at = saved.get(at.parent) if at.parent else None
        if at is not None:
            kept.add((at.namespace, at.id))
            wanted -= set(at.values)
    return kept


async def _remove_all_but(
    thread: Thread, choose: Callable[[Sequence[Saved], str | None], set[tuple[str, str]]]
) -> None:
    """Remove the checkpoints that are not chosen, with their writes, and the values that only they use.

    Each commit expects the newest checkpoint to be unchanged: a new checkpoint may use a value that seemed unused.
    Otherwise the removal starts again.
    """
    for _ in range(_ATTEMPTS):
        fields = await thread.look()
        head: str | None = fields.get(AT)
        saved = await everything(thread)
        chosen = choose(saved, head)
        kept = [each for each in saved if (each.namespace, each.id) in chosen]
        gone = [each for each in saved if (each.namespace, each.id) not in chosen]
        if not gone:
            return
        try:
            if head is not None and ("", head) not in chosen:
                head = await _move_head(thread, fields, kept)
            steps = await _steps(thread, gone, kept)
            for begin in range(0, len(steps), _AT_ONCE):
                expect = {AT: ABSENT if head is None else head}
                await thread.record.write(items=steps[begin : begin + _AT_ONCE], expect=expect)
        except Conflict:
            continue
        return
    raise Conflict(f"thread {thread.id!r:.80}: others save faster than checkpoints can be removed")


async def _steps(thread: Thread, gone: Sequence[Saved], kept: Sequence[Saved]) -> list[DeleteItem]:
    """The operations that remove checkpoints: first the checkpoints, then the writes and values that only they use."""
    steps = [DeleteItem(collection=CHECKPOINTS, key=checkpoint_key(each.namespace, each.id)) for each in gone]
    for (namespace, name), writes in (await pending_writes(thread, gone)).items():
        for write in writes:
            key = write_key(namespace, name, write.task_id, write.index)
            steps.append(DeleteItem(collection=WRITES, key=key))
    shown = {key for saved in kept for key in _blobs(thread, saved)}
    over = {key for saved in gone for key in _blobs(thread, saved)} - shown
    return steps + [DeleteItem(collection=BLOBS, key=key) for key in sorted(over)]


def _blobs(thread: Thread, saved: Saved) -> list[str]:
    """The keys of a checkpoint's values that are separate items."""
    apart = [channel for channel, value in saved.values.items() if value is None]
    if not apart:
        return []
    versions = thread.serde.loads_typed(saved.checkpoint)["channel_versions"]
    return [blob_key(saved.namespace, channel, versions.get(channel)) for channel in apart]


async def _move_head(thread: Thread, fields: Mapping[str, Any], kept: Sequence[Saved]) -> str | None:
    """Make the newest of the kept checkpoints, or none, the newest in the thread's record; return its id."""
    newest = max((each for each in kept if not each.namespace), key=lambda each: each.id, default=None)
    setting: dict[str, Any] = {} if newest is None else {AT: newest.id, flag(newest.id): 1}
    if newest is not None and len(frame := newest.pack()) <= HEAD_BYTES:
        setting[HEAD] = frame
    interrupts = [name for name, (at, _) in thread.known.asks.items() if at]
    over = [name for name in fields if name in (AT, HEAD, *interrupts) or name.startswith("w:")]
    await thread.record.write(
        set=setting, delete=[name for name in over if name not in setting], expect={AT: fields[AT]},
        phase=thread.phase_without(interrupts),
    )  # fmt: skip
    thread.known.read(newest.id if newest else None, setting, fields.get(AGAIN))
    return newest.id if newest else None


async def copy(source: Thread, target: Thread, target_id: str) -> None:
    """Copy a thread to another one: by a fork if the id was never used, otherwise item by item.

    The copy is of one version of the source, which may be written meanwhile.
    """
    target.recent.forget(target.id)
    try:
        await source.record.fork(target_id)
        return
    except NotFound:
        return
    except (Conflict, Deleted) as error:
        shown = await source.record.view(fresh=True)
        if not shown.exists:
            return
        if isinstance(error, Deleted):
            with suppress(Conflict):
                await target.record.create({AGAIN: error.version})
    for collection in (BLOBS, WRITES, CHECKPOINTS):
        await _copy_items(source, target, collection, shown.version)
    for _ in range(_ATTEMPTS):
        there = await target.record.view(fresh=True)
        is_newer = AT in shown and (AT not in there or there[AT] < shown[AT])
        runs = {RUN: shown.tags[RUN]} if RUN in shown.tags else {}
        if not is_newer and not runs:
            return
        with suppress(Conflict):
            await target.record.write(
                set={name: value for name, value in shown.items() if name != AGAIN} if is_newer else {},
                delete=[HEAD] if is_newer and HEAD not in shown else [],
                tag=runs,
                expect={AT: there.get(AT, ABSENT)},
            )
            return
    raise Conflict(f"thread {target.id!r:.80}: others save faster than it can be copied to")


async def _copy_items(source: Thread, target: Thread, collection: str, version: int) -> None:
    after: str | None = None
    while True:
        page = await source.record.items(collection).list(after=after, limit=_AT_ONCE, version=version)
        if page.items:
            await target.record.write(
                items=[PutItem(collection=collection, key=item.key, value=item.value) for item in page.items]
            )
        if page.next is None:
            return
        after = page.next
