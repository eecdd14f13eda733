"""A request that is answered once. Law: the note of what came of it is part of the commit that it made.

`Idempotency-Key` is the request id of the store's own turns: what came of it is remembered in the record, with a digest
of the request. The commit is made for the very version in which the request was not found, so that of two that carry
one key, at two workers at once, one applies it and the other finds it.

Design: section 23.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from distributed_state.conversation import remembered_requests
from distributed_state.errors import Conflict, InvalidValue
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.programs.service import conditions, requests
from distributed_state.programs.service.routes import IDEMPOTENCY_KEY, Asked
from distributed_state.records.access import VERSION
from distributed_state.records.context import RecordContext
from distributed_state.tiers.changes import Changes

T = TypeVar("T")
DIGEST = "digest"  # in the outcome of a request: of what was asked


@dataclass(frozen=True, slots=True)
class Answered:
    """What came of a request: the version that it made, and what else it remembers."""

    version: int
    found: dict[str, Any]


class _Settled(Exception):
    """Nothing is to be written: `answered` is what came of the request before, else `refused` says why.

    It is no Conflict, which whoever makes the change would take for one to be made again.
    """

    def __init__(self, answered: Answered | None, refused: Conflict | None) -> None:
        super().__init__()
        self.answered = answered
        self.refused = refused


@dataclass(frozen=True, slots=True)
class OnceOnly:
    """A request with its key and its conditions. Without a key it is made each time."""

    key: str | None
    name: bytes
    digest: str
    most: int
    conditions: conditions.Conditions

    @classmethod
    def of(cls, asked: Asked, context: RecordContext, *others: str) -> OnceOnly:
        """Of this request, to a record and perhaps about others. Raises InvalidValue for a key that cannot be kept."""
        key = key_of(asked)
        name = remembered_requests.name_of(key) or b""
        digest = "" if key is None else requests.digest(asked.request, *others)
        most = context.store.settings.remembered_requests
        return cls(key, name, digest, most, conditions.of_write(asked.request))

    def answered(self, entry: CachedRecord) -> Answered | None:
        """What came of it, None if nothing yet. Raises InvalidValue if the key is another request's."""
        kept = None if self.key is None else remembered_requests.find(entry, self.name)
        if kept is None:
            return None
        outcome = kept[1] if isinstance(kept[1], dict) else {}
        if outcome.get(DIGEST) != self.digest:
            raise _another(self.key)
        return Answered(remembered_requests.answered_at(kept), outcome)

    def remember(self, entry: CachedRecord, changes: Changes, **found: Any) -> None:
        """Remember in this change, which is made for that version, what comes of it."""
        if self.key is not None:
            kept = [entry.version, {**found, DIGEST: self.digest}, self.key, None]
            remembered_requests.remember(self.most, changes, entry, self.name, kept)

    # For what the store changes by itself

    async def settle(self, change: Coroutine[Any, Any, Any]) -> tuple[Any, Answered | None]:
        """What the change gives, or what came of the request before, as `look` finds. Raises Conflict."""
        try:
            return await change, None
        except _Settled as settled:
            if settled.refused is not None:
                raise settled.refused from None
            return None, settled.answered

    async def looked(self, context: RecordContext, change: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The same for what may find nothing to change, and so no version to be looked at: it is looked at before."""
        if self.key is not None or self.conditions != conditions.Conditions():
            self.look(await context.read(True, VERSION))
        return await change()

    def look(self, entry: CachedRecord) -> None:
        """Go on only if the request was not answered yet, and its conditions hold for this version."""
        done = self.answered(entry)
        if done is not None:
            raise _Settled(done, None)
        try:
            self.conditions.check(entry.version, entry.deleted)
        except Conflict as refused:
            raise _Settled(None, refused) from None

    def note(self, entry: CachedRecord, changes: Changes, **found: Any) -> None:
        """Look at this version, and remember in the change that is made for it what comes of it."""
        self.look(entry)
        self.remember(entry, changes, **found)


def key_of(asked: Asked) -> str | None:
    """The request's Idempotency-Key, None if it has none. Raises InvalidValue for one that cannot be kept."""
    if IDEMPOTENCY_KEY not in asked.request.headers:
        return None
    key = requests.header(asked.request, IDEMPOTENCY_KEY)
    if not key.isascii():
        raise InvalidValue(f"{IDEMPOTENCY_KEY} is ASCII, not {key!r:.80}")  # of other bytes two might be read as one
    remembered_requests.name_of(key)
    return key


def same_request(outcome: Any, digest: str, key: str) -> None:
    """Raise InvalidValue if the key stands for another request; what was remembered elsewhere has no digest."""
    if isinstance(outcome, dict) and outcome.get(DIGEST, digest) != digest:
        raise _another(key)


def _another(key: str | None) -> InvalidValue:
    return InvalidValue(f"{IDEMPOTENCY_KEY} {key!r:.80} was used for another request already")
