"""Services of a store for agents and adapters of this package, beyond the store's public methods.

Law: agents use only this and the public store; the store's policy is not asked about the package's own work.

Design: section 12.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from distributed_state.errors import CorruptState
from distributed_state.port import Port
from distributed_state.records import lifecycle
from distributed_state.records.context import context_of
from distributed_state.records.record import AsyncRecord
from distributed_state.store.asyncio import AsyncStateStore
from distributed_state.store.blocking import StateStore
from distributed_state.store.blocking_records import Record
from distributed_state.store.lifecycle import core_of, lifecycle_of
from distributed_state.tiers import ambient
from distributed_state.values.model import Ref

Store = StateStore | AsyncStateStore
Handle = TypeVar("Handle", bound=Record | AsyncRecord)
BeforeDeletion = Callable[[Ref], Awaitable[None]]
StandIn = Callable[[CorruptState, str, Any], Any]


class StoreServices:
    """Services of a store of either API. `store` is the asyncio store, which a blocking store wraps."""

    def __init__(self, store: Store) -> None:
        self.store: AsyncStateStore = core_of(store)
        self._lifecycle = lifecycle_of(store)

    @property
    def port(self) -> Port:
        """The port (time, threads and tasks) for any caller: a task of any event loop, or blocking code."""
        return self._lifecycle.tiers().port

    def announce(self, fields: Mapping[str, Any]) -> None:
        """Add JSON values to this replica's status, as `store.announce` does. Raises TooLarge beyond 16 KiB."""
        self._lifecycle.tiers().heartbeat.announce(fields)

    async def archive(self) -> int:
        """Archive everything written so far, like `store.admin.archive`.

        Returns the number of commits archived here.
        """
        return await self._lifecycle.tiers().archiver.drain()

    async def initialize(
        self, record: AsyncRecord, owner: str, defaults: Callable[[], Awaitable[Mapping[str, Any]]]
    ) -> bool:
        """Set the missing fields, once for each record and owner of the defaults; True if this call set them."""
        return await lifecycle.initialize(context_of(record), defaults, owner)

    def check_fields(self, fields: Mapping[str, Any]) -> None:
        """Raise InvalidValue if a session cannot have these fields."""
        context_of(self.store.session("any")).changes().set_many(fields)

    def add_deletion_hook(self, hook: BeforeDeletion) -> None:
        """Await `hook(ref)` before this replica deletes or erases a record."""
        self._lifecycle.context.deleting.append(hook)

    def remove_deletion_hook(self, hook: BeforeDeletion) -> None:
        """Stop awaiting the hook. A missing hook, for example after an os.fork, is not an error."""
        if hook in self._lifecycle.context.deleting:
            self._lifecycle.context.deleting.remove(hook)

    def forget_record(self, record: AsyncRecord) -> None:
        """Drop this process's data of a record: its ephemeral values, and its hot copy."""
        self._lifecycle.context.ephemeral.drop(record.ref.text)
        self._lifecycle.tiers().hot.forget(record.ref.text)


def acting_by_default(actor: str) -> AbstractContextManager[None]:
    """Record `actor` with commits inside `with`, unless the caller has set an actor already."""
    return nullcontext() if ambient.actor() else ambient.acting_as(actor)


def with_stand_in(handle: Handle, stand_in: StandIn) -> Handle:
    """A handle, of either API, that returns `stand_in(error, field, default)` for a field that cannot be read."""
    context_of(core_of(handle)).unreadable = stand_in
    return handle
