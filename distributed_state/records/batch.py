"""Changes of many records in one round trip. Law: each record changes wholly or not at all.

Design: section 4.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from types import TracebackType
from typing import Any, Self

from distributed_state.errors import Conflict, InvalidValue, StateError
from distributed_state.port.waited import bounded
from distributed_state.records.context import RecordContext, context_of
from distributed_state.records.preconditions import Preconditions, preconditions
from distributed_state.records.store_context import StoreContext
from distributed_state.tiers import commit as write_path
from distributed_state.tiers.changes import Changes
from distributed_state.values.levels import level_of
from distributed_state.values.model import Ref
from distributed_state.warm.answers import Committed, Draft


@bounded()
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
        self._given: dict[Ref, Preconditions] = {}
        self.versions = {}

    def on(self, handle: Any, *, expect: Mapping[str, Any] | None = None, expect_exists: bool | None = None) -> Any:
        """Return the changes of one record, to add to: `batch.on(session).set("a", 1)`. No I/O.

        They have `set`, `set_many`, `delete`, `increment`, `append`, `phase`, `tag`, `untag`, `clear`, and
        `put_item(collection, key, value)` and `delete_item(collection, key)`. Raises InvalidValue for what is no
        record. `expect` and `expect_exists` are as in `write`: where they do not hold, that record is not changed, and
        the block ends with Conflict.
        """
        context = context_of(handle, "a batch")
        given = preconditions(context, expect, expect_exists)
        if given is not None:
            if handle.ref in self._given:
                raise InvalidValue(f"{context.text[:200]}: what is expected of a record is said once in a batch")
            self._given[handle.ref] = given
        return self._changes.setdefault(handle.ref, (context, context.changes()))[1]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            return
        drafts = [
            (context, changes.draft("batch"))
            for ref, (context, changes) in self._changes.items()
            if changes or ref in self._given
        ]
        for context, draft in drafts:
            context.sign(draft)
            draft.level = self._level
        conditional = [self._conditional(context, draft) for context, draft in drafts]
        attempts = [context.batched(draft) for (context, _), draft in zip(drafts, conditional, strict=True)]
        writes = [(context.keys, attempt) for (context, _), attempt in zip(drafts, attempts, strict=True)]
        results = await write_path.commit_many(self._store.tiers(), writes)
        failed: StateError | None = None
        for (context, draft), begun, attempt, result in zip(drafts, conditional, attempts, results, strict=True):
            if isinstance(result, Conflict):
                result = await self._again(context, draft, result, attempt is not begun)
            if isinstance(result, StateError):
                failed = failed or result
            else:
                self.versions[context.ref] = result.version
        if failed is not None:
            failed.add_note(f"{len(self.versions)} of {len(drafts)} records of the batch were changed; see versions")
            raise failed

    def _conditional(self, context: RecordContext, draft: Draft) -> Draft:
        given = self._given.get(context.ref)
        return draft if given is None else given.on(draft)

    async def _again(
        self, context: RecordContext, draft: Draft, refused: Conflict, guarded: bool
    ) -> Committed | StateError:
        """What becomes of a refused change: it is sent alone where it was not refused for certain."""
        given = self._given.get(context.ref)
        if given is None:
            return await _outcome(context.send(draft)) if guarded else refused
        return await _outcome(given.send(draft)) if guarded or given.learn(refused) else refused


async def _outcome(sending: Awaitable[Committed]) -> Committed | StateError:
    try:
        return await sending
    except StateError as error:
        return error
