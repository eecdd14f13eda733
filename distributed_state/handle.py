"""What a handle needs of its store, and what those who build on a handle need of it. Law: names only, no code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from distributed_state.changes import Changes
from distributed_state.ephemeral import Ephemeral
from distributed_state.hot import Entry
from distributed_state.keys import Keys, RecordKeys
from distributed_state.model import Ref
from distributed_state.sanitizing import Clean, CleanMessage
from distributed_state.settings import Settings
from distributed_state.tiers import Tiers
from distributed_state.warm import Committed, Draft


class Home(Protocol):
    """What a handle needs of its store."""

    settings: Settings
    keys: Keys
    ephemeral: Ephemeral
    dress: Callable[[Any], Any]
    clean: Clean | None
    clean_messages: CleanMessage | None

    def tiers(self) -> Tiers: ...


class Handle(Protocol):
    """What may be asked of a record from inside the package."""

    _home: Home
    _names: RecordKeys
    _actor: str

    @property
    def ref(self) -> Ref: ...
    async def _entry(self, fresh: bool = False, max_staleness: float | None = None) -> Entry: ...
    def _changes(self) -> Changes: ...
    async def _commit(self, draft: Draft, expect_version: int | None = None) -> Committed: ...
