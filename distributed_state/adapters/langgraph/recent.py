"""A cache of the threads that this process served last. Law: it only saves round trips; the server checks every commit.

Each commit sends the checkpoint that the cache has as a thread's newest, as a condition that the server checks; cached
values never change once they are stored. Whether a run found its thread empty or deleted is in a context variable,
because LangGraph saves in copies of the run's context. Other findings of a run are in the classes of the ids.

Design: section 22.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextvars import ContextVar, copy_context
from threading import Lock
from typing import Any, TypeVar

from distributed_state.adapters.langgraph.frames import Typed
from distributed_state.adapters.stores import ASK

T = TypeVar("T")
_THREADS = 10_000  # a kilobyte or two each; a run whose thread is evicted meanwhile is treated as a branch
_OWN = 16
_PARENTS = 2_000  # with 4 KiB of values each at most
_BLOB_BYTES = 32 * 1024 * 1024
_SEEN = 8

Values = tuple[Mapping[str, Any], Mapping[str, Typed | None]]
"""The versions of a checkpoint's channels, and the places of their values: see `frames`."""


class _Id(str):
    """An id whose class records its origin; it equals the same text, on either side of `==`."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return str(self) == other

    def __ne__(self, other: object) -> bool:
        return str(self) != other

    __hash__ = str.__hash__


class Latest(_Id):
    """The id of a checkpoint read as its thread's newest: a run that continues from it expects it to be the newest.

    LangGraph passes the id that a saver returned as the parent of the next checkpoint.
    """

    __slots__ = ()


class Addressed(_Id):
    """The id of a checkpoint that was requested by id: a checkpoint saved after it is a branch."""

    __slots__ = ()


class Seen:
    """A thread as a run found it: the run saves to that thread, not to a new one that began after a deletion.

    If the thread has no checkpoint yet, the first save in that context, or a copy of it, begins the thread or is
    refused.
    """

    __slots__ = ("begun_after", "empty_at", "of", "open", "thread_id")

    def __init__(self, of: object, thread_id: str, begun_after: int | None, empty_at: int | None) -> None:
        self.of = of
        self.thread_id = thread_id
        self.begun_after = begun_after
        self.empty_at = empty_at  # the version of the record, which may be a deletion
        self.open = empty_at is not None  # shared by all copies of the context, because a run saves in copies


_seen: ContextVar[tuple[Seen, ...]] = ContextVar("distributed_state_langgraph_seen", default=())


class Run:
    """The context of a run, for calls that LangGraph makes outside of it: from the threads in which nodes have run.

    It has the turn that holds the thread, and how the run found the thread: LangGraph takes the saver's methods,
    and then reads the thread.
    """

    def __init__(self) -> None:
        self.seen: tuple[Seen, ...] = ()
        self._context = copy_context()
        _begun.set((*_begun.get()[1 - _SEEN :], self))

    def call(self, method: Callable[..., T], *given: Any, **named: Any) -> T:
        """Call a method in the running context, if it is of a run, else in that of this run."""
        return method(*given, **named) if _seen.get() else self._context.copy().run(self._within, method, given, named)

    def _within(self, method: Callable[..., T], given: Any, named: Any) -> T:
        _seen.set(self.seen)
        return method(*given, **named)


_begun: ContextVar[tuple[Run, ...]] = ContextVar("distributed_state_langgraph_runs", default=())


class RecentThread:
    """A thread: its newest checkpoint, if known, and the checkpoints that this process saved.

    `asks`: the fields of open questions, with the checkpoint and the task that asked, which are empty for a turn's.
    `waiting`: whether the thread's phase says that it has any.
    Runs in several OS threads share the object, so iterations use copies.
    """

    __slots__ = ("asks", "begun_after", "flags", "head", "known", "own", "tags", "waiting")

    def __init__(self) -> None:
        self.known = False
        self.head: str | None = None
        self.flags: set[str] = set()
        self.asks: dict[str, tuple[str, str]] = {}
        self.waiting = False
        self.tags: set[str] = set()
        self.own: OrderedDict[str, None] = OrderedDict()
        self.begun_after: int | None = None  # the version of the deletion after which the thread began again

    def read(self, head: str | None, fields: Mapping[str, Any], begun_after: int | None) -> None:
        """Note the result of a read."""
        if head not in self.own:
            self.tags.clear()  # another process may have deleted the thread and begun it again
        if begun_after != self.begun_after:
            self.deleted()
        self.known, self.head, self.begun_after = True, head, begun_after
        self.flags = {name for name in fields if name.startswith("w:")}
        asks = {name: ask for name in fields if name.startswith(ASK) and isinstance(ask := fields[name], dict)}
        self.asks = {name: (ask.get("checkpoint", ""), ask.get("task", "")) for name, ask in asks.items()}

    def deleted(self) -> None:
        """Note that the thread was deleted, and drop everything known of it."""
        self.known, self.head, self.begun_after = False, None, None
        self.flags.clear()
        self.asks = {}
        self.waiting = False
        self.tags.clear()
        self.own.clear()

    def saved(self, checkpoint_id: str, head: str | None) -> None:
        """Note a checkpoint that this process saved, and the newest one now."""
        self.known, self.head = True, head
        self.own[checkpoint_id] = None
        while len(self.own) > _OWN:
            self.own.popitem(last=False)

    def continues(self, parent: str | None) -> bool:
        """Whether a checkpoint saved after this parent continues a run that began at the newest checkpoint."""
        return isinstance(parent, Latest) or (type(parent) is str and parent in self.own)


class Recent:
    """The most recently used threads and values."""

    def __init__(self) -> None:
        self._threads: OrderedDict[str, RecentThread] = OrderedDict()
        self._parents: OrderedDict[tuple[str, str, str], Values] = OrderedDict()
        self._blobs: OrderedDict[tuple[str, str], Typed] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()
        self._mark = object()

    def thread(self, thread_id: str) -> RecentThread:
        """The cached state of a thread."""
        with self._lock:
            found = self._threads.setdefault(thread_id, RecentThread())
            self._threads.move_to_end(thread_id)
            while len(self._threads) > _THREADS:
                self._threads.popitem(last=False)
        return found

    def look(self, thread_id: str, begun_after: int | None, empty_at: int | None) -> None:
        """Note how the running task or OS thread found this thread; `empty_at`: the version, without a checkpoint."""
        others = [each for each in _seen.get() if not self._is(each, thread_id)]
        _seen.set((*others[1 - _SEEN :], Seen(self._mark, thread_id, begun_after, empty_at)))
        for run in _begun.get():
            run.seen = _seen.get()
        _begun.set(())

    def seen(self, thread_id: str) -> Seen | None:
        """The thread's state at this run's last look, None if the run has not looked at it."""
        return next((each for each in _seen.get() if self._is(each, thread_id)), None)

    def begins(self, thread_id: str) -> bool:
        """Whether this run found the thread empty, and has not saved to it since."""
        seen = self.seen(thread_id)
        return seen is not None and seen.open

    def begun(self, thread_id: str) -> None:
        """Note that this run saved to the thread, or was refused."""
        seen = self.seen(thread_id)
        if seen is not None:
            seen.open = False

    def _is(self, seen: Seen, thread_id: str) -> bool:
        return seen.of is self._mark and seen.thread_id == thread_id

    def forget(self, thread_id: str) -> None:
        """Drop everything known of a deleted thread."""
        self.thread(thread_id).deleted()
        with self._lock:
            for parent in [parent for parent in self._parents if parent[0] == thread_id]:
                del self._parents[parent]
            for name in [name for name in self._blobs if name[0] == thread_id]:
                self._bytes -= len(self._blobs.pop(name)[1])

    def values(self, thread_id: str, namespace: str, checkpoint_id: str) -> Values | None:
        """The versions of a checkpoint's channels and the places of their values, None if not cached."""
        return self._parents.get((thread_id, namespace, checkpoint_id))

    def keep_values(self, thread_id: str, namespace: str, checkpoint_id: str, values: Values) -> None:
        """Cache a checkpoint's versions and the places of its values for the next checkpoint."""
        versions, placed = values
        with self._lock:
            # A copy: LangGraph continues to change the versions in the checkpoint object that it passed.
            self._parents[thread_id, namespace, checkpoint_id] = (dict(versions), placed)
            while len(self._parents) > _PARENTS:
                self._parents.popitem(last=False)

    def blob(self, thread_id: str, key: str) -> Typed | None:
        """A channel's value by its key, None if not cached."""
        with self._lock:
            found = self._blobs.get((thread_id, key))
            if found is not None:
                self._blobs.move_to_end((thread_id, key))
        return found

    def keep_blob(self, thread_id: str, key: str, value: Typed) -> None:
        """Cache a channel's value. All values of one key are equal."""
        if len(value[1]) > _BLOB_BYTES // 8:
            return
        with self._lock:
            before = self._blobs.pop((thread_id, key), None)
            self._blobs[thread_id, key] = value
            self._bytes += len(value[1]) - (len(before[1]) if before else 0)
            while self._bytes > _BLOB_BYTES:
                self._bytes -= len(self._blobs.popitem(last=False)[1][1])
