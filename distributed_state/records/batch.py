"""Changes of many records in one round trip. Law: each record changes wholly or not at all.

Design: section 4.
"""

from __future__ import annotations

from collections.abc import Awaitable
from types import TracebackType
from typing import Any, Self

from distributed_state.errors import Conflict, StateError
from distributed_state.records.context import RecordContext, context_of
from distributed_state.records.store_context import StoreContext
from distributed_state.tiers import commit as write_path
from distributed_state.tiers.changes import Changes
from distributed_state.values.levels import level_of
from distributed_state.values.model import Ref
from distributed_state.warm.answers import Committed


class AsyncBatch:
    """The `async with` around changes of many records. After it, `versions` maps each `record.ref` to the new version.

    Example::

        async with store.batch() as batch:
            batch.on(session).set("city", "Oslo")
            batch.on(store.user("u1")).increment("trips", 1)
        version = batch.versions[session.ref]
    """

    versions: dict[Ref, int]
    """The new version of each record that was changed, by `record.ref`; filled when the block ends."""

    def __init__(self, store: StoreContext, durability: str | None = None) -> None:
        self._store = store
        self._level = None if durability is None else level_of(durability)
        self._changes: dict[Ref, tuple[RecordContext, Changes]] = {}
        self.versions = {}

    def on(self, handle: Any) -> Any:
        """Return the changes of one record, to add to: `batch.on(session).set("a", 1)`. No I/O.

        They have `set`, `set_many`, `delete`, `increment`, `append`, `phase` and `clear`. Raises InvalidValue for what
        is no record.
        """
        context = context_of(handle, "a batch")
        return self._changes.setdefault(handle.ref, (context, context.changes()))[1]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            return
        drafts = [(context, changes.draft("batch")) for context, changes in self._changes.values() if changes]
        for context, draft in drafts:
            context.sign(draft)
            draft.level = self._level
        attempts = [context.batched(draft) for context, draft in drafts]
        writes = [(context.keys, attempt) for (context, _), attempt in zip(drafts, attempts, strict=True)]
        results = await write_path.commit_many(self._store.tiers(), writes)
        failed: StateError | None = None
        for (context, draft), attempt, result in zip(drafts, attempts, results, strict=True):
            if isinstance(result, Conflict) and attempt is not draft:
                result = await _outcome(context.send(draft))
            if isinstance(result, StateError):
                failed = failed or result
            else:
                self.versions[context.ref] = result.version
        if failed is not None:
            failed.add_note(f"{len(self.versions)} of {len(drafts)} records of the batch were changed; see versions")
            raise failed


async def _outcome(sending: Awaitable[Committed]) -> Committed | StateError:
    try:
        return await sending
    except StateError as error:
        return error
