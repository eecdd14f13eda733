"""Transactions as a user opens them. Law: a view is committed for the version that it saw, or not at all."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

from distributed_state.changes import Changes
from distributed_state.hot import Entry
from distributed_state.transaction import Transaction
from distributed_state.warm import Committed, Draft


class Handle(Protocol):
    """What a transaction needs of the record that it is about."""

    async def _entry(self, fresh: bool = False) -> Entry: ...
    def _changes(self) -> Changes: ...
    async def _commit(self, draft: Draft, expect_version: int | None = None) -> Committed: ...


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
        draft = self._view.draft() if error is None else None
        if draft is not None:
            await self._handle._commit(draft)
