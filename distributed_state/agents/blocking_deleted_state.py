"""The last state of a deleted conversation, on the blocking face. Law: no logic here."""

from __future__ import annotations

from typing import Any

from distributed_state.agents.deleted_state import AsyncLastState
from distributed_state.port.blocking import finish
from distributed_state.values.model import Message


class LastState:
    """What a deleted conversation was. Reads like a session; every write raises Deleted."""

    def __init__(self, twin: AsyncLastState) -> None:
        self._twin = twin

    @property
    def id(self) -> str:
        """The conversation's id."""
        return self._twin.id

    def get(self, key: str, default: Any = None) -> Any:
        """Read one field as it was last."""
        return finish(self._twin.get(key, default))

    def has(self, key: str) -> bool:
        """Tell whether a field was there."""
        return finish(self._twin.has(key))

    def get_all(self) -> dict[str, Any]:
        """Read all fields as they were last."""
        return finish(self._twin.get_all())

    def messages(self, *, last: int | None = None) -> list[Message]:
        """Read the last messages, or all, oldest first."""
        return finish(self._twin.messages(last=last))

    def phase(self) -> str | None:
        """Read the last phase."""
        return finish(self._twin.phase())

    def version(self) -> int:
        """The last version before the deletion."""
        return finish(self._twin.version())

    def exists(self) -> bool:
        """False: it was deleted."""
        return finish(self._twin.exists())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._twin, name)
