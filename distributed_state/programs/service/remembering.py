"""A request that is answered once, where its change depends on the record. Law: the note is part of the commit.

The commit is made for the very version in which the request was not found, so that of two that carry one
Idempotency-Key, at two workers at once, one applies it and the other finds it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distributed_state.conversation import remembered_requests
from distributed_state.errors import InvalidValue
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.programs.service import conditions, requests, writing
from distributed_state.programs.service.routes import IDEMPOTENCY_KEY, Asked
from distributed_state.records.context import RecordContext
from distributed_state.tiers.changes import Changes


@dataclass(frozen=True, slots=True)
class Answered:
    """What came of a request: the version that it made, and what else it remembers."""

    version: int
    found: dict[str, Any]


@dataclass(frozen=True, slots=True)
class OnceOnly:
    """A request with its key: whether it was answered, and the note that says so. Without one it is made each time."""

    key: str | None
    name: bytes
    digest: str
    most: int
    conditions: conditions.Conditions

    @classmethod
    def of(cls, asked: Asked, context: RecordContext) -> OnceOnly:
        """Of this request. Raises InvalidValue for a key that cannot be kept."""
        key = writing.key_of(asked)
        name = remembered_requests.name_of(key) or b""
        most = context.store.settings.remembered_requests
        return cls(key, name, requests.digest(asked.request), most, conditions.of_write(asked.request))

    def answered(self, entry: CachedRecord) -> Answered | None:
        """What came of it, None if nothing yet. Raises InvalidValue if the key is another request's."""
        kept = None if entry.deleted or self.key is None else remembered_requests.find(entry, self.name)
        if kept is None:
            return None
        outcome = kept[1] if isinstance(kept[1], dict) else {}
        if outcome.get(writing.DIGEST) != self.digest:
            raise InvalidValue(f"{IDEMPOTENCY_KEY} {self.key!r:.80} was used for another request already")
        return Answered(kept[0] + 1, outcome)

    def note(self, entry: CachedRecord, changes: Changes, **found: Any) -> None:
        """Remember in this change, which is made for that version, what comes of it. Raises Conflict."""
        self.conditions.check(entry.version, entry.deleted)
        if self.key is None:
            return
        kept = [entry.version, {**found, writing.DIGEST: self.digest}, self.key, None]
        remembered_requests.remember(self.most, changes, entry, self.name, kept)
