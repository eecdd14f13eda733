"""One `apply`, as often as it takes. Law: a change is committed for the version that it saw or was merged with."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Generic, TypeVar

from distributed_state.errors import Conflict
from distributed_state.records.access import VERSION
from distributed_state.records.transaction import Handle, Transaction
from distributed_state.values import merge

T = TypeVar("T")


class OptimisticRetry(Generic[T]):
    """One `apply`, as often as it takes: a change that met a conflict is merged if it may be, else run again."""

    def __init__(
        self,
        handle: Handle,
        change: Callable[[Transaction], T | Awaitable[T]],
        policies: Mapping[str, merge.Merge] | None,
    ) -> None:
        self._handle = handle
        self._change = change
        self._policies = None if policies is None else merge.check(policies)
        self._refused: tuple[Transaction, T] | None = None

    async def once(self) -> T:
        """Commit, or raise Conflict."""
        if self._refused is not None and self._policies is not None:
            view, result = self._refused
            draft = view._rebased(await self._handle._entry(True, VERSION), self._policies)
            if draft is not None:
                await self._handle._commit(draft)
                return result
        self._refused = None
        view = Transaction(await self._handle._entry(True, VERSION), self._handle._changes(), self._handle._allow)
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
