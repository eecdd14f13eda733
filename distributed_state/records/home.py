"""What a handle needs of its store."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from distributed_state.records.access import Guard
from distributed_state.records.ephemeral import Ephemeral
from distributed_state.records.sanitizing import Clean, CleanMessage
from distributed_state.settings import Settings
from distributed_state.tiers.assembly import Tiers
from distributed_state.values.codec import Codec
from distributed_state.values.keys import Keys
from distributed_state.values.model import Ref


class StoreContext(Protocol):
    """What a handle needs of its store."""

    settings: Settings
    keys: Keys
    codec_of: Callable[[str], Codec]
    guard: Guard | None
    wrap: Callable[[Any], Any]
    ephemeral: Ephemeral
    deleting: list[Callable[[Ref], Awaitable[None]]]
    clean: Clean | None
    clean_messages: CleanMessage | None

    def tiers(self) -> Tiers:
        """The tiers of the running event loop, or of the process on the blocking face."""
        ...
