"""What this process remembers of the threads it served last. Law: it saves a question, and is never the answer.

Which checkpoint it takes for a thread's newest goes along with each commit as what the server must find; what it keeps
of values never changes once it is stored.

Design: section 22.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from threading import Lock
from typing import Any

from distributed_state.adapters.langgraph.frames import Typed

_THREADS = 10_000
_OWN = 64
_PARENTS = 16
_BLOB_BYTES = 32 * 1024 * 1024


class _Id(str):
    """An id that knows how it came about, and is equal to what the same text is equal to, whichever side asks."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return str(self) == other

    def __ne__(self, other: object) -> bool:
        return str(self) != other

    __hash__ = str.__hash__


class Latest(_Id):
    """The id of a checkpoint that was read as its thread's newest: who goes on from it expects it to be that still.

    LangGraph hands the id that a saver returned back as the parent of what it saves next.
    """

    __slots__ = ()


class Addressed(_Id):
    """The id of a checkpoint that somebody named: what is saved behind it is a branch."""

    __slots__ = ()


class RecentThread:
    """A thread: its newest checkpoint, if known, which of them this process saved, and what these say of values."""

    __slots__ = ("empty", "flags", "head", "known", "own", "parents", "tags")

    def __init__(self) -> None:
        self.known = False
        self.head: str | None = None
        self.empty = False  # a run that found nothing is about to begin the thread
        self.flags: set[str] = set()
        self.tags: set[str] = set()
        self.own: OrderedDict[str, None] = OrderedDict()
        self.parents: OrderedDict[tuple[str, str], tuple[Mapping[str, Any], Mapping[str, Typed | None]]] = OrderedDict()

    def read(self, head: str | None, fields: Iterable[str]) -> None:
        """Note what a read found."""
        self.known, self.head, self.empty = True, head, head is None
        self.flags = {name for name in fields if name.startswith("w:")}

    def saved(self, checkpoint_id: str, head: str | None) -> None:
        """Note a checkpoint that this process saved, and which is the newest now."""
        self.known, self.head, self.empty = True, head, False
        self.own[checkpoint_id] = None
        while len(self.own) > _OWN:
            self.own.popitem(last=False)

    def continues(self, parent: str | None) -> bool:
        """Whether what is saved behind this parent goes on with a run, which began at the newest checkpoint."""
        if parent is None:
            return self.empty
        return isinstance(parent, Latest) or (type(parent) is str and parent in self.own)

    def keep_values(
        self, namespace: str, checkpoint_id: str, versions: Mapping[str, Any], values: Mapping[str, Typed | None]
    ) -> None:
        """Keep where a checkpoint's values are, for the one that follows it."""
        self.parents[namespace, checkpoint_id] = (versions, values)
        while len(self.parents) > _PARENTS:
            self.parents.popitem(last=False)


class Recent:
    """The threads and values that were used last."""

    def __init__(self) -> None:
        self._threads: OrderedDict[str, RecentThread] = OrderedDict()
        self._blobs: OrderedDict[tuple[str, str], Typed] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()

    def thread(self, thread_id: str) -> RecentThread:
        """What is known of a thread."""
        with self._lock:
            found = self._threads.setdefault(thread_id, RecentThread())
            self._threads.move_to_end(thread_id)
            while len(self._threads) > _THREADS:
                self._threads.popitem(last=False)
        return found

    def forget(self, thread_id: str) -> None:
        """Drop all that is known of a thread."""
        with self._lock:
            self._threads.pop(thread_id, None)
            for name in [name for name in self._blobs if name[0] == thread_id]:
                self._bytes -= len(self._blobs.pop(name)[1])

    def blob(self, thread_id: str, key: str) -> Typed | None:
        """A channel's value by its key, if it is kept."""
        with self._lock:
            found = self._blobs.get((thread_id, key))
            if found is not None:
                self._blobs.move_to_end((thread_id, key))
        return found

    def keep_blob(self, thread_id: str, key: str, value: Typed) -> None:
        """Keep a channel's value. Values of one key are one."""
        if len(value[1]) > _BLOB_BYTES // 8:
            return
        with self._lock:
            before = self._blobs.pop((thread_id, key), None)
            self._blobs[thread_id, key] = value
            self._bytes += len(value[1]) - (len(before[1]) if before else 0)
            while self._bytes > _BLOB_BYTES:
                self._bytes -= len(self._blobs.popitem(last=False)[1][1])
