"""One `apply`, as often as it takes. Law: a change is committed for the version that it saw or was merged with.

Design: section 4.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Generic, TypeVar

from distributed_state.errors import Conflict
from distributed_state.records.access import VERSION
from distributed_state.records.context import RecordContext
from distributed_state.records.transaction import Transaction, newest
from distributed_state.records.workspace import Workspace
from distributed_state.values import merge

T = TypeVar("T")


class OptimisticRetry(Generic[T]):
    """One `apply`, as often as it takes: a change that met a conflict is merged if it may be, else run again."""

    def __init__(
        self,
        context: RecordContext,
        change: Callable[[Transaction], T | Awaitable[T]],
        policies: Mapping[str, merge.Merge] | None,
    ) -> None:
        self._context = context
        self._change = change
        self._policies = None if policies is None else merge.check(policies)
        self._refused: tuple[Workspace, T] | None = None

    async def once(self) -> T:
        """Commit, or raise Conflict."""
        context = self._context
        if self._refused is not None and self._policies is not None:
            workspace, result = self._refused
            draft = workspace.rebased(await context.read(True, VERSION), self._policies)
            if draft is not None:
                await context.commit(draft)
                return result
        self._refused = None
        workspace = await newest(context)
        found = self._change(Transaction(workspace))
        result = await found if inspect.isawaitable(found) else found
        draft = workspace.draft()
        if draft is not None:
            try:
                await context.commit(draft)
            except Conflict:
                self._refused = workspace, result
                raise
        return result
