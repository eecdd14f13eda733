"""Transactions as a user opens them. Law: a view is committed for the version that it saw, or not at all."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Generic, TypeVar

from distributed_state import merging
from distributed_state.errors import Conflict
from distributed_state.handle import Handle
from distributed_state.transaction import Transaction

T = TypeVar("T")


class AsyncTransaction:
    """The `async with` around a Transaction."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    async def __aenter__(self) -> Transaction:
        entry = await self._handle._entry(fresh=True)
        self._view = Transaction(entry, self._handle._changes())
        return self._view

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        draft = self._view._draft() if error is None else None
        if draft is not None:
            await self._handle._commit(draft)


class Attempts(Generic[T]):
    """One `apply`, as often as it takes: a change that met a conflict is merged if it may be, else run again."""

    def __init__(
        self,
        handle: Handle,
        change: Callable[[Transaction], T | Awaitable[T]],
        policies: Mapping[str, merging.Policy] | None,
    ) -> None:
        self._handle, self._change = handle, change
        self._policies = None if policies is None else merging.check(policies)
        self._refused: tuple[Transaction, T] | None = None

    async def once(self) -> T:
        """Commit, or raise Conflict."""
        if self._refused is not None and self._policies is not None:
            view, result = self._refused
            draft = view._rebased(await self._handle._entry(fresh=True), self._policies)
            if draft is not None:
                await self._handle._commit(draft)
                return result
        self._refused = None
        view = Transaction(await self._handle._entry(fresh=True), self._handle._changes())
        found = self._change(view)
        result = await found if inspect.isawaitable(found) else found
        draft = view._draft()
        if draft is not None:
            try:
                await self._handle._commit(draft)
            except Conflict:
                self._refused = view, result
                raise
        return result
