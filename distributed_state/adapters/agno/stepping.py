"""A blocking store as code with `await` sees it. Law: whatever is awaited is there already, so nothing ever waits."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from distributed_state import Items, Record, StateStore


def finish(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run what awaits only such a store to its end, on whatever thread and within whatever loop this is."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    coroutine.close()
    raise RuntimeError("what works on a blocking store has nothing to wait for")


class Awaited:
    """A record, or items of one, whose methods can be awaited."""

    def __init__(self, record: Record | Items) -> None:
        self.record: Any = record

    def items(self, collection: str) -> Awaited:
        """As the record's."""
        return Awaited(self.record.items(collection))

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        return _awaited(getattr(self.record, name))


class AwaitedStore:
    """A store whose methods can be awaited, but for those that return a record without I/O."""

    def __init__(self, store: StateStore) -> None:
        self._store = store

    def session(self, id: str, *, user: str | None = None) -> Awaited:
        """As the store's."""
        return Awaited(self._store.session(id, user=user))

    def task(self, id: str, *, user: str | None = None) -> Awaited:
        """As the store's."""
        return Awaited(self._store.task(id, user=user))

    def user(self, id: str) -> Awaited:
        """As the store's."""
        return Awaited(self._store.user(id))

    def app(self, id: str) -> Awaited:
        """As the store's."""
        return Awaited(self._store.app(id))

    async def get_many(self, handles: Iterable[Awaited], *, fresh: bool = False) -> list[dict[str, Any]]:
        """As the store's."""
        return self._store.get_many([each.record for each in handles], fresh=fresh)

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        return _awaited(getattr(self._store, name))


def _awaited(method: Callable[..., Any]) -> Callable[..., Coroutine[Any, Any, Any]]:
    async def call(*args: Any, **more: Any) -> Any:
        return method(*args, **more)

    return call
