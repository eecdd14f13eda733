"""The two faces of a store for one adapter, and procedures that are written once for both.

LangGraph calls a saver's blocking methods and its asyncio ones, on one object, the first also from coroutines of a
running loop. A procedure is a generator: each call of the store is yielded, as `fields = yield record.get_all()`, and
nothing else waits. With handles of the blocking face what is yielded is the result already; with those of the asyncio
face it is awaited. Of a list, side by side: those leave in one exchange. Law: whoever opened a store closes it.

Design: section 22.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Mapping
from functools import lru_cache
from types import TracebackType
from typing import Any, Generic, TypeVar

from distributed_state import AsyncStateStore, StateStore
from distributed_state.adapters.stores import open_store

T = TypeVar("T")
Steps = Generator[Any, Any, T]
_HANDLES = 1000  # of both faces


class Faces:
    """The two faces of one open store."""

    def __init__(self, store: StateStore | AsyncStateStore) -> None:
        self._store = open_store(store)
        # Handles hold nothing of a call, and are used side by side: making one is a tenth of a read.
        self.session = lru_cache(_HANDLES)(self._session)

    def _session(self, face: str, id: str, user: str | None, idle: float | None, lifetime: float | None) -> Any:
        return self.of(face).session(id, user=user, idle=idle, lifetime=lifetime)

    def of(self, face: str) -> Any:
        """The face "blocking" or "aio"."""
        store: Any = self._store
        return store.blocking if face == "blocking" else store.aio


class Opening(Generic[T]):
    """A store that is about to be opened for one adapter: for `with` and for `async with`."""

    def __init__(
        self, make: Callable[[Any], T], url: str | None, archive: str | None, settings: Mapping[str, Any]
    ) -> None:
        self._make = make
        self._asked: dict[str, Any] = {"url": url, "archive": archive, **settings}
        self._store: Any = None

    def __enter__(self) -> T:
        self._store = StateStore.open(**self._asked)
        try:
            return self._make(self._store)
        except BaseException:  # nobody else would close it
            self._store.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._store.__exit__(kind, error, trace)

    async def __aenter__(self) -> T:
        self._store = AsyncStateStore.open(**self._asked)
        made = self._make(self._store)
        await self._store.__aenter__()
        return made

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._store.__aexit__(kind, error, trace)


# Procedures


def sent(batch: Any) -> Any:
    """Send a batch of either face: a step."""
    leave = batch.__exit__ if hasattr(batch, "__exit__") else batch.__aexit__
    return leave(None, None, None)


def run(steps: Steps[T]) -> T:
    """Carry a procedure out on handles of the blocking face."""
    try:
        step = next(steps)
        while True:
            step = steps.send(step)
    except StopIteration as end:
        result: T = end.value
        return result


async def run_async(steps: Steps[T]) -> T:
    """Carry a procedure out on handles of the asyncio face."""
    try:
        step = next(steps)
        while True:
            try:
                answer = await (asyncio.gather(*step) if isinstance(step, list) else step)
            except BaseException as error:  # noqa: BLE001 - it is raised at the step, a cancellation too
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result
