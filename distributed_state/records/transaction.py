"""A view of a record that collects changes. Law: it holds only for the version that it saw.

Design: section 4.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from types import TracebackType
from typing import Any

from distributed_state.port.waited import bounded
from distributed_state.records.access import VERSION
from distributed_state.records.context import RecordContext
from distributed_state.records.workspace import Workspace
from distributed_state.values.items import ANY
from distributed_state.values.levels import level_of
from distributed_state.values.model import Message


class Transaction(MutableMapping[str, Any]):
    """The record's fields as a dict. What is changed here is one commit at the end, or nothing.

    As in a dict, changing a list or object that was read or set here changes the field.
    """

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace

    @property
    def version(self) -> int:
        """The version that this view shows, and that the commit expects."""
        return self._workspace.entry.version

    @property
    def phase(self) -> str | None:
        """The phase before this transaction."""
        return self._workspace.phase

    def put_item(
        self,
        collection: str,
        key: str,
        value: Any,
        *,
        if_absent: bool = False,
        if_present: bool = False,
        equals: Any = ANY,
        keep: bool = False,
    ) -> None:
        """Put an item of the record at the end, with what changes beside it.

        `if_absent` and `if_present` are as in `record.items(collection).put`; `equals` takes what `find` returned, and
        no value: nothing is looked up for it here. `keep` leaves one that is there then as it is.
        """
        changes = self._workspace.open()
        changes.put_item(
            collection, key, value, if_absent=if_absent, if_present=if_present, equals=equals, keep=keep
        )  # fmt: skip

    def delete_item(self, collection: str, key: str, *, if_present: bool = False, equals: Any = ANY) -> None:
        """Delete an item of the record at the end; one that is not there is no error, unless it must be."""
        self._workspace.open().delete_item(collection, key, if_present=if_present, equals=equals)

    def __getitem__(self, key: str) -> Any:
        return self._workspace[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._workspace[key] = value

    def __delitem__(self, key: str) -> None:
        del self._workspace[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._workspace)

    def __len__(self) -> int:
        return len(self._workspace)

    def append(self, *messages: Message | dict[str, Any]) -> None:
        """Add messages to the conversation with this commit."""
        for message in messages:
            self._workspace.open().append(message)

    def tag(self, key: str, *texts: str) -> None:
        """Tag the record with one text or several under a key, with this commit."""
        self._workspace.open().tag(key, *texts)

    def untag(self, key: str, *texts: str) -> None:
        """Take tags away with this commit."""
        self._workspace.open().untag(key, *texts)

    def move_to(self, phase: str | None) -> None:
        """Set the phase with this commit."""
        self._workspace.open().phase(phase)


async def newest(context: RecordContext) -> Workspace:
    """A workspace on the record as the server has it now."""
    return Workspace(await context.read(True, VERSION), context.changes(), context.allow)


@bounded()
class AsyncTransaction:
    """The `async with` around a Transaction."""

    def __init__(self, context: RecordContext, durability: str | None = None) -> None:
        self._context = context
        self._durability = None if durability is None else level_of(durability).text

    async def __aenter__(self) -> Transaction:
        self._workspace = await newest(self._context)
        return Transaction(self._workspace)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        draft = self._workspace.draft() if error is None else None
        if draft is not None:
            await self._context.commit(draft, durability=self._durability)
