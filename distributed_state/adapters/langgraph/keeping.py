"""Deletes, copies and prunes what threads have. Law: what a thread names as its newest is always there.

Design: section 22.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from distributed_state import ABSENT, Conflict, Deleted, DeleteItem, InvalidValue, NotFound, PutItem
from distributed_state.adapters.langgraph.frames import (
    BLOBS,
    CHECKPOINTS,
    RUN,
    WRITES,
    Saved,
    blob_key,
    checkpoint_key,
    write_key,
)
from distributed_state.adapters.langgraph.listing import everything, pending_writes
from distributed_state.adapters.langgraph.threads import AGAIN, AT, HEAD, HEAD_BYTES, Thread, flag

_AT_ONCE = 500
_ATTEMPTS = 20


async def delete(thread: Thread) -> None:
    """Erase a thread. One that is not there yet leaves a tombstone, which refuses runs that are about to begin it."""
    thread.recent.forget(thread.id)
    if not (await thread.record.erase()):
        found = await thread.record.view(fresh=True)
        if found.version == 0:
            with suppress(Conflict):  # a run just began it
                await thread.record.create()
        if found.version == 0 or found.exists:
            await thread.record.erase()
    thread.recent.forget(thread.id)


async def delete_runs(thread: Thread, runs: Collection[str]) -> None:
    """Remove the checkpoints of runs."""

    def kept(saved: Sequence[Saved], head: str | None) -> set[tuple[str, str]]:
        return {(each.namespace, each.id) for each in saved if each.run not in runs}

    await _remove_all_but(thread, kept)


async def prune(thread: Thread, strategy: str) -> None:
    """Keep the newest checkpoint of each namespace, or nothing."""
    if strategy == "delete":
        await delete(thread)
        return
    if strategy != "keep_latest":
        raise InvalidValue(f"strategy is 'keep_latest' or 'delete', not {strategy!r:.80}")

    def kept(saved: Sequence[Saved], head: str | None) -> set[tuple[str, str]]:
        roots = {each.id for each in saved if not each.namespace}
        found: set[tuple[str, str]] = set()
        # The root namespace first, as its name is the smallest: what subgraphs saved goes by what is kept of it.
        for newest in sorted(_newest(saved, head), key=lambda each: each.namespace):
            if not _called_by_gone(thread, newest, roots, found):
                found |= _chain(thread, newest, {each.id: each for each in saved if each.namespace == newest.namespace})
        return found

    await _remove_all_but(thread, kept)


def _newest(saved: Iterable[Saved], head: str | None) -> list[Saved]:
    """The newest checkpoint of each namespace; of the root it is the one that the thread's record names."""
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
    """Whether a namespace is that of one call of a subgraph, made from a checkpoint that is saved and will be removed.

    Its name ends in the task's id; that of a subgraph which remembers across calls does not.
    """
    if ":" not in newest.namespace:
        return False
    root = (thread.serde.loads_typed(newest.metadata).get("parents") or {}).get("")
    return root in roots and ("", root) not in kept


def _chain(thread: Thread, newest: Saved, saved: dict[str, Saved]) -> set[tuple[str, str]]:
    """A checkpoint, and before it those from which its delta channels are made: back to where each is stored whole."""
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
    """Remove the checkpoints that are not chosen, with their writes, and values that no other one shows.

    Each commit expects that the newest checkpoint still is the one that it was: what goes on from another one meanwhile
    may show a value that seemed to be nobody's. Then it begins again.
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
    """What removes checkpoints: first themselves, then what is theirs alone."""
    steps = [DeleteItem(collection=CHECKPOINTS, key=checkpoint_key(each.namespace, each.id)) for each in gone]
    for (namespace, name), writes in (await pending_writes(thread, gone)).items():
        for write in writes:
            key = write_key(namespace, name, write.task_id, write.index)
            steps.append(DeleteItem(collection=WRITES, key=key))
    shown = {key for saved in kept for key in _blobs(thread, saved)}
    over = {key for saved in gone for key in _blobs(thread, saved)} - shown
    return steps + [DeleteItem(collection=BLOBS, key=key) for key in sorted(over)]


def _blobs(thread: Thread, saved: Saved) -> list[str]:
    """The keys of a checkpoint's values that are items of their own."""
    apart = [channel for channel, value in saved.values.items() if value is None]
    if not apart:
        return []
    versions = thread.serde.loads_typed(saved.checkpoint)["channel_versions"]
    return [blob_key(saved.namespace, channel, versions.get(channel)) for channel in apart]


async def _move_head(thread: Thread, fields: Mapping[str, Any], kept: Sequence[Saved]) -> str | None:
    """Have the thread's record name another checkpoint, or none, as its newest; which one."""
    newest = max((each for each in kept if not each.namespace), key=lambda each: each.id, default=None)
    setting: dict[str, Any] = {} if newest is None else {AT: newest.id, flag(newest.id): 1}
    if newest is not None and len(frame := newest.pack()) <= HEAD_BYTES:
        setting[HEAD] = frame
    over = [name for name in fields if name in (AT, HEAD) or name.startswith("w:")]
    await thread.record.write(
        set=setting, delete=[name for name in over if name not in setting], expect={AT: fields[AT]}
    )
    thread.known.read(newest.id if newest else None, setting, fields.get(AGAIN))
    return newest.id if newest else None


async def copy(source: Thread, target: Thread, target_id: str) -> None:
    """Show another thread what this one has. To an id that was not used that is a fork; else all is copied.

    All of one version of the source, which may go on meanwhile.
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
