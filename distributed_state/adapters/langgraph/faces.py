"""Both faces of a store for one adapter. Law: whoever opened a store closes it.

Design: section 22.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from types import TracebackType
from typing import Any, Generic, TypeVar

from distributed_state import AsyncStateStore, StateStore
from distributed_state.adapters.stores import open_store

T = TypeVar("T")

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
