"""Copies the threads of any LangGraph saver into a store. Law: an existing checkpoint is never saved again.

A saver reports neither a pending write's place among those of its task nor the task's path; the order in which it
returns them is kept. A saver given by URL is opened only if its tables exist, and only for reading.

Design: section 22.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, closing, contextmanager
from typing import Any

from langgraph.checkpoint.base import WRITES_IDX_MAP, BaseCheckpointSaver, CheckpointTuple
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from distributed_state import AsyncStateStore, InvalidValue, StateStore
from distributed_state.adapters.adopting import (
    DELETED,
    EQUAL,
    Found,
    Name,
    deleted,
    demand_in_file,
    demand_in_postgresql,
    opened,
    read_only,
    removed,
    removed_item,
    sqlite_path,
)
from distributed_state.adapters.langgraph.frames import CHECKPOINTS
from distributed_state.adapters.langgraph.saver import DistributedStateSaver

_PAGE = 1000
_PLAIN = JsonPlusSerializer(pickle_fallback=True)  # for comparing, independent of the savers' serializers
Key = tuple[str, str]  # namespace, checkpoint id


async def threads(
    stack: AsyncExitStack,
    store: StateStore | AsyncStateStore,
    source: Any,
    *,
    into: Callable[[Any], DistributedStateSaver] | None = None,
    user: str | None = None,
) -> Threads:
    """The threads of a saver, or of a PostgreSQL or SQLite URL, and of the target.

    `user` names the entry of a thread's metadata that has its owner; a thread without it is copied without an owner. A
    target that requires owners is given by `into` instead.
    """
    if into is not None and user is not None:
        raise InvalidValue("give into= or user=: the saver of into= has a user= of its own")
    saver = await opened(stack, saver_of(source) if isinstance(source, str) else source, (BaseCheckpointSaver,))
    target = DistributedStateSaver(store, user=user) if into is None else into(store)
    return Threads(store.aio, await Source.of(saver), target, target if into else DistributedStateSaver(store))


class Source:
    """A saver, called by its sync or its asyncio methods: many savers implement only one kind."""

    def __init__(self, saver: BaseCheckpointSaver[Any], is_async: bool) -> None:
        self._saver = saver
        self._async = is_async

    @classmethod
    async def of(cls, saver: BaseCheckpointSaver[Any]) -> Source:
        """Find out which methods the saver has, by reading a missing thread."""
        try:
            await saver.aget_tuple(_config("", ""))
        except NotImplementedError:
            return cls(saver, False)
        return cls(saver, True)

    async def get(self, config: Any) -> CheckpointTuple | None:
        """Call the saver's method."""
        return await self._saver.aget_tuple(config) if self._async else self._saver.get_tuple(config)

    async def list(self, config: Any, **more: Any) -> AsyncIterator[CheckpointTuple]:
        """Call the saver's method."""
        if self._async:
            async for each in self._saver.alist(config, **more):
                yield each
        else:
            for each in self._saver.list(config, **more):
                yield each

    async def thread_ids(self) -> Sequence[str]:
        """The ids of all threads, the least recently changed first."""
        found: dict[str, None] = {}
        if "BasePostgresSaver" not in {kind.__name__ for kind in type(self._saver).__mro__}:
            async for each in self.list(None):
                found[each.config["configurable"]["thread_id"]] = None
            return [*found][::-1]
        # Such a list would hold all checkpoints of the database in memory, so they are read in pages, newest first.
        before, size = None, _PAGE
        while True:
            page = [each.config["configurable"] async for each in self.list(None, before=before, limit=size)]
            found |= {each["thread_id"]: None for each in page}
            if len(page) < size:
                return [*found][::-1]
            last = page[-1]["checkpoint_id"]
            # Copies of a thread have the same ids: the last one of a page is read again with the next page.
            border = next((each["checkpoint_id"] for each in page[::-1] if each["checkpoint_id"] != last), None)
            before, size = (before, size * 2) if border is None else (_config("", "", border), _PAGE)


class Threads:
    """The threads of a saver and of the target."""

    def __init__(
        self, store: AsyncStateStore, source: Source, target: DistributedStateSaver, unowned: DistributedStateSaver
    ) -> None:
        self._store = store
        self._source = source
        self._target = target
        self._unowned = unowned  # saves checkpoints whose metadata names no owner
        self._ours = Source(target, True)
        self._ids: Sequence[str] = ()

    async def names(self) -> Sequence[Name]:
        """The ids of threads."""
        self._ids = await self._source.thread_ids()
        return [(id,) for id in self._ids]

    async def compare(self, name: Name) -> Found:
        """Compare all checkpoints of a thread, and which one is the newest."""
        config = {"configurable": {"thread_id": name[0]}}
        record = self._store.session(self._target.prefix + name[0])
        if await deleted(record):
            return DELETED
        theirs = {_key(each): _seen(each) async for each in self._source.list(config)}
        ours = {_key(each): _seen(each) async for each in self._ours.list(config)}
        if extra := ours.keys() - theirs.keys():
            return Found(differs=f"it went on here: {len(extra)} checkpoints of {len(ours)} are not in the source")
        left = []
        for key in sorted(theirs, key=lambda each: (each[1], each[0])):
            if key not in ours:
                left.append((key, False))
            elif ours[key] != theirs[key]:
                why, lacking = await self._difference(name[0], key)
                if why:
                    return Found(differs=f"checkpoint {key[1]}: {why}")
                if lacking:
                    left.append((key, True))
        if left and await removed(record, lambda changes: removed_item(changes, CHECKPOINTS)):
            return Found(
                differs=f"checkpoints were removed here: {len(left)} of {len(theirs)} are not as in the source"
            )
        if not left and theirs and await _newest(self._source, config) != await _newest(self._ours, config):
            return Found(differs="another checkpoint is the newest here")
        return Found(work=left) if left else EQUAL

    async def _difference(self, thread_id: str, key: Key) -> tuple[str, bool]:
        """The difference between both versions of a checkpoint; and whether the target lacks pending writes."""
        config = _config(thread_id, *key)
        theirs, ours = await self._source.get(config), await self._ours.get(config)
        if theirs is None or ours is None:
            return "it was removed meanwhile", False
        for part in ("parent_config", "checkpoint", "metadata"):
            if not _same(_part(theirs, part), _part(ours, part)):
                return f"its {part.removesuffix('_config')} is not the same here", False
        lacking = list(map(_write, _writes(theirs)))
        for each in map(_write, _writes(ours)):
            if each not in lacking:
                return "it has other pending writes here", False
            lacking.remove(each)
        return "", bool(lacking)

    async def copy(self, name: Name, work: Sequence[tuple[Key, bool]]) -> None:
        """Save checkpoints, the oldest first, each as a child of its parent."""
        if self._target.exclusive:
            async with self._target.turn(_config(name[0], ""), ttl=10.0, wait=30.0):
                await self._copy(name, work)
        else:
            await self._copy(name, work)

    async def ownerless(self) -> int:
        """The number of these threads that have no owner here."""
        names = {self._target.prefix + id for id in self._ids}
        count, after = 0, None
        while True:
            page = await self._store.sessions(prefix=self._target.prefix, fresh=True, limit=_PAGE, after=after)
            count += sum(each.user is None and each.id in names for each in page)
            if len(page) < _PAGE:
                return count
            after = page[-1].cursor

    async def _copy(self, name: Name, work: Sequence[tuple[Key, bool]]) -> None:
        versions: dict[Key, Any] = {}
        saved: dict[Key, Any] = {}
        for key, there in work:
            found = await self._source.get(_config(name[0], *key))
            if found is None:
                continue  # pruned meanwhile
            if not there:
                parent = (key[0], _parent(found) or "")
                begin = _config(name[0], key[0], parent[1] or None)
                # A config that a saver returned names a checkpoint, so this may be a branch and is never a stale run.
                config, target = saved.get(parent, begin), self._unowned
                if self._target.user in found.metadata:  # LangGraph copies "configurable" there
                    owner = {self._target.user: found.metadata[self._target.user]}  # type: ignore[literal-required]
                    config, target = {"configurable": config["configurable"] | owner}, self._target
                of_parent = versions.get(parent, {})
                new = {
                    channel: version
                    for channel, version in found.checkpoint["channel_versions"].items()
                    if channel not in of_parent or of_parent[channel] != version
                }
                saved[key] = await target.aput(config, found.checkpoint, found.metadata, new)
                versions[key] = found.checkpoint["channel_versions"]
            await self._copy_writes(_config(name[0], *key), found)

    async def _copy_writes(self, config: Any, found: CheckpointTuple) -> None:
        tasks: dict[str, list[tuple[str, Any]]] = {}
        for task, channel, value in found.pending_writes or ():
            tasks.setdefault(task, []).append((channel, value))
        as_it_comes = list(tasks) == sorted(tasks)
        for at, (task, writes) in enumerate(tasks.items()):
            path = "" if as_it_comes else f"{at:06}"
            # Special writes have their own indexes; in the same call the others would not count from 0.
            for some in (
                [each for each in writes if each[0] in WRITES_IDX_MAP],
                [each for each in writes if each[0] not in WRITES_IDX_MAP],
            ):
                if some:
                    await self._unowned.aput_writes(config, some, task, path)


def _config(thread_id: str, namespace: str, checkpoint_id: str | None = None) -> Any:
    named = {} if checkpoint_id is None else {"checkpoint_id": checkpoint_id}
    return {"configurable": {"thread_id": thread_id, "checkpoint_ns": namespace, **named}}


def _key(found: CheckpointTuple) -> Key:
    named = found.config["configurable"]
    return named.get("checkpoint_ns", ""), str(named["checkpoint_id"])


def _parent(found: CheckpointTuple) -> str | None:
    named = (found.parent_config or {}).get("configurable", {}).get("checkpoint_id")
    return str(named) if named else None


def _part(found: CheckpointTuple, part: str) -> Any:
    return _parent(found) if part == "parent_config" else getattr(found, part)


async def _newest(saver: Source, config: Any) -> str | None:
    """The id of the newest checkpoint in the root namespace."""
    found = await saver.get({"configurable": {**config["configurable"], "checkpoint_ns": ""}})
    return _key(found)[1] if found else None


def _writes(found: CheckpointTuple) -> list[Any]:
    """The pending writes, task by task: savers order the writes of different tasks differently."""
    return sorted(found.pending_writes or (), key=lambda each: (each[0], WRITES_IDX_MAP.get(each[1], 0)))


def _write(write: Any) -> tuple[str, str, bytes]:
    return write[0], write[1], _bytes(write[2])


def _bytes(value: Any) -> bytes:
    kind, data = _PLAIN.dumps_typed(value)
    return kind.encode() + b":" + data


def _seen(found: CheckpointTuple) -> bytes:
    """A digest of a checkpoint with its pending writes."""
    digest = hashlib.sha256()
    parts = (_parent(found), _ordered(found.checkpoint), _ordered(found.metadata), *map(tuple, _writes(found)))
    for part in map(_bytes, parts):
        digest.update(len(part).to_bytes(8) + part)
    return digest.digest()


def _ordered(value: Any) -> Any:
    """Sort dicts by key: a saver need not keep their order."""
    if type(value) is not dict:
        return value
    try:
        return {name: _ordered(value[name]) for name in sorted(value)}
    except TypeError:  # keys that cannot be ordered
        return value


def _same(one: Any, other: Any) -> bool:
    """Whether values are equal: by their bytes, or by `==`, because sets may be written in any order."""
    if _bytes(_ordered(one)) == _bytes(_ordered(other)):
        return True
    try:
        return bool(one == other)
    except (TypeError, ValueError):  # an array compares element by element
        return False


# The savers of LangGraph's own databases

_NAMED = ("thread_id", "checkpoint_ns", "checkpoint_id")
_SQLITE = {"checkpoints": (*_NAMED, "metadata"), "writes": (*_NAMED, "task_id", "idx")}
_POSTGRES = {
    "checkpoints": (*_NAMED, "metadata"),
    "checkpoint_blobs": ("thread_id", "checkpoint_ns", "channel", "version"),
    "checkpoint_writes": (*_NAMED, "task_id", "task_path"),
}


def saver_of(url: str) -> Any:
    """Return an opener of the saver at a PostgreSQL or SQLite URL. Raises NotFound if it has no LangGraph tables."""
    path = sqlite_path(url)
    if path is not None:
        demand_in_file(path, "LangGraph", _SQLITE)
        return _sqlite_saver(path)
    if url.startswith(("postgres://", "postgresql")):
        from langgraph.checkpoint.postgres import PostgresSaver

        url = "postgresql://" + url.partition("://")[2]
        demand_in_postgresql(url, "LangGraph", _POSTGRES)
        return PostgresSaver.from_conn_string(url)
    raise InvalidValue(f"{url.partition('://')[0]}:// is not one of postgresql, sqlite; name a saver as module:NAME")


@contextmanager
def _sqlite_saver(path: str) -> Iterator[BaseCheckpointSaver[Any]]:
    from langgraph.checkpoint.sqlite import SqliteSaver

    with closing(sqlite3.connect(read_only(path), uri=True, check_same_thread=False)) as connection:
        saver = SqliteSaver(connection)
        saver.is_setup = True  # otherwise it would create tables and change the journal mode before reading
        yield saver
