"""What all records of one store share. Law: one object for each store, made when the store is.

Design: section 18.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from distributed_state.records.access import Action, Guard
from distributed_state.records.ephemeral import Ephemeral
from distributed_state.records.sanitizing import Clean, CleanMessage
from distributed_state.settings import Settings
from distributed_state.tiers import actors
from distributed_state.tiers.assembly import Tiers
from distributed_state.values.codec import Codec
from distributed_state.values.keys import Keys
from distributed_state.values.model import Ref


@dataclass(slots=True, kw_only=True)
class StoreContext:
    """What a record needs of its store.

    `tiers()` are those of the process. `face_of` makes of a session or turn one of the blocking face.
    `deleting` is awaited before this replica deletes a record.
    """

    settings: Settings
    keys: Keys
    codec_of: Callable[[str], Codec]
    guard: Guard | None
    tiers: Callable[[], Tiers]
    face_of: Callable[[Any], Any]
    ephemeral: Ephemeral = field(default_factory=Ephemeral)
    deleting: list[Callable[[Ref], Awaitable[None]]] = field(default_factory=list)
    clean: Clean | None = None
    clean_messages: CleanMessage | None = None

    def dressed(self, twin: Any) -> Any:
        """What user code is given in place of a session or turn of ours: one of its caller's face."""
        return twin if self.tiers().port.suspends else self.face_of(twin)

    def allow(
        self,
        action: Action,
        ref: Ref | None = None,
        *,
        field: str | None = None,
        user: str | None = None,
        scope: str | None = None,
        prefix: str | None = None,
    ) -> None:
        """Ask the store's policy, if it has one, about what is done by no handle. Raises AccessDenied."""
        if self.guard is not None:
            self.guard.ask(action, ref, field, actor=actors.present(), user=user, scope=scope, prefix=prefix)
