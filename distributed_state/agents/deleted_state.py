"""The last state of a deleted conversation. Law: it is read from history once, and never changes.

Design: section 12.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distributed_state.conversation.session import AsyncSession
from distributed_state.errors import CorruptState, Deleted
from distributed_state.results import Snapshot
from distributed_state.values.model import Message


class AsyncLastState:
    """The last state of a deleted conversation. Reads like a session; every write raises Deleted."""

    def __init__(self, session: AsyncSession, version: int, warn: Callable[[CorruptState], None]) -> None:
        self._session = session
        self._version = version
        self._warn = warn
        self._found: Snapshot | None = None

    @property
    def id(self) -> str:
        """The conversation's id."""
        return self._session.id

    async def _snapshot(self) -> Snapshot:
        if self._found is None:
            try:
                self._found = await self._session.at(version=self._version)
            except CorruptState as error:
                self._warn(error)
                self._found = Snapshot(self._version, {}, (), None, False)
        return self._found

    async def get(self, key: str, default: Any = None) -> Any:
        """Read the last value of one field."""
        return (await self._snapshot()).fields.get(key, default)

    async def has(self, key: str) -> bool:
        """Return whether the field existed."""
        return key in (await self._snapshot()).fields

    async def get_all(self) -> dict[str, Any]:
        """Read the last values of all fields."""
        return dict((await self._snapshot()).fields)

    async def messages(self, *, last: int | None = None) -> list[Message]:
        """Read the last messages, or all, oldest first."""
        found = list((await self._snapshot()).messages)
        return found if last is None else found[len(found) - min(last, len(found)) :]

    async def phase(self) -> str | None:
        """Read the last phase."""
        return (await self._snapshot()).phase

    async def version(self) -> int:
        """The last version before the deletion."""
        return self._version

    async def exists(self) -> bool:
        """Return False: the conversation was deleted."""
        return False

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and hasattr(type(self._session), name):
            raise Deleted(f"session:{self.id[:200]}: was deleted; {name} is not available for its last state")
        raise AttributeError(name)
