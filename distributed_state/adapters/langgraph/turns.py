"""A turn holds a thread for one run. Law: what is saved under a turn carries its lease, and the server compares it.

LangGraph saves in threads and tasks of its own, which it starts in the context of the run; so both the store's lease
and the note here are variables of the context.

Design: section 22.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from types import TracebackType
from typing import Any

from distributed_state import Locked
from distributed_state.adapters.langgraph.faces import Faces

_held: ContextVar[frozenset[str]] = ContextVar("distributed_state_langgraph_turns", default=frozenset())


def demand(record_id: str) -> None:
    """Raise Locked unless the running task or thread holds this thread."""
    if record_id not in _held.get():
        raise Locked(
            f"{record_id!r:.200} is saved exclusively, and this run does not hold it: "
            "run inside `with saver.turn(config):`, or `async with`"
        )


class Turn:
    """The time in which one run holds its thread, on either face."""

    def __init__(
        self, faces: Faces, record: Callable[..., Any], thread_id: str, config: Any, ttl: float, wait: float
    ) -> None:
        self._faces = faces
        self._record = record
        self._thread = thread_id
        self._config = config
        self._times = {"ttl": ttl, "wait": wait}
        self._before: frozenset[str] = frozenset()

    def _lock(self, face: str) -> Any:
        self._handle = self._record(face, self._thread, self._config)
        return self._handle.lock(**self._times)

    def _begin(self, lease: Any) -> Any:
        self._before = _held.get()
        _held.set(self._before | {self._handle.id})
        return lease

    def __enter__(self) -> Any:
        self._lease = self._lock("blocking")
        return self._begin(self._lease.__enter__())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _held.set(self._before)
        self._lease.__exit__(kind, error, trace)

    async def __aenter__(self) -> Any:
        self._lease = self._lock("aio")
        return self._begin(await self._lease.__aenter__())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _held.set(self._before)
        await self._lease.__aexit__(kind, error, trace)
