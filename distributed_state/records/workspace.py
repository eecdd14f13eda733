"""What one commit is made of: a record as it was read, and what becomes of it. Law: it holds for that version only.

Design: section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from distributed_state.errors import Conflict, InvalidValue
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.records.access import MOVES
from distributed_state.tiers.changes import Changes
from distributed_state.values import codec, field_ttl, merge
from distributed_state.values.model import PHASE
from distributed_state.warm.answers import Draft

GONE: Any = object()  # stands for a field that is not there
_MISSING: Any = object()


class Workspace(MutableMapping[str, Any]):
    """The fields of `entry` as a dict, and in `changes` what became of them.

    As in a dict, changing a list or object that was read or set here changes the field.
    """

    def __init__(self, entry: CachedRecord, changes: Changes, allow: Callable[..., None]) -> None:
        self.entry = entry
        self.changes = changes
        self.allow = allow
        self._now: dict[str, Any] = {}  # what the caller was given or gave, GONE if deleted
        self.closed = ""  # why nothing can be changed any more

    @property
    def phase(self) -> str | None:
        """The phase before it was changed."""
        self.allow("read", MOVES)
        phase = self.entry.fields.get(PHASE)
        return None if phase is None else phase.decode("utf-8", "surrogatepass")

    def __getitem__(self, key: str) -> Any:
        value = self._now.get(key, _MISSING)
        if value is _MISSING:
            self.allow("read", key)
            value = GONE if self.entry.deleted else self.entry.value(key, GONE)
            if isinstance(value, (dict, list)):
                self._now[key] = value
        if value is GONE:
            raise KeyError(key)
        return value

    def __setitem__(self, key: str, value: Any) -> None:
        self._now[key] = self.open().set(key, value)

    def __delitem__(self, key: str) -> None:
        self[key]  # KeyError if it is not there
        self.open().delete(key)
        self._now[key] = GONE

    def __iter__(self) -> Iterator[str]:
        stored = [codec.decode_key(name) for name in self.entry.fields if name[:1] != b"#"]
        stored = [] if self.entry.deleted else stored
        self.allow("read", None, *stored)  # whoever lists or counts the names reads the record as a whole
        keys = dict.fromkeys([*stored, *self._now])
        yield from (key for key in keys if self._now.get(key) is not GONE)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def differences(self) -> Iterator[tuple[str, Any, Any]]:
        """What this view changes: field, value before, value now; GONE for none."""
        for key, value in self._now.items():
            before = GONE if self.entry.deleted else self.entry.value(key, GONE)
            if GONE in (before, value) or codec.encode_value(value, key) != codec.encode_value(before, key):
                yield key, before, value

    def draft(self, kind: str = "transaction") -> Draft | None:
        """End the transaction: its change, None if there is none."""
        for key, value in self._now.items():
            if isinstance(value, (dict, list)):
                self._notice(key, value)
        self.closed = "this transaction is over; nothing can be changed through it any more"
        if not self.changes:
            return None
        draft = self.changes.draft(kind)
        if draft.epoch not in ("", self.entry.epoch):
            # Of items that are expected: the version that this view shows is of another history than theirs.
            raise Conflict(f"{self.entry.codec.record[:200]}: an item that is expected was read under another epoch")
        draft.expected = self.entry.version
        draft.epoch = self.entry.epoch
        return draft

    def rebased(self, newest: CachedRecord, policies: Mapping[str, merge.Merge]) -> Draft | None:
        """The change of an ended transaction, merged with what others did since; None if that cannot be expressed."""
        base = self.entry
        if newest.epoch != base.epoch or newest.deleted or base.deleted:
            return None
        merged = merge.three_way(base.codec, self.changes.fields, base.fields, newest.fields, policies)
        if merged is None:
            return None
        changes = self.changes.copy()
        for key, value in merged.items():
            changes.set(key, value)
        draft = changes.draft("transaction")
        if draft.epoch not in ("", newest.epoch):
            return None
        draft.expected = newest.version
        draft.epoch = newest.epoch
        return draft

    def _notice(self, key: str, value: Any) -> None:
        """A list or object that may have been changed in place; its deadline stays, unless it was set again."""
        name = codec.encode_key(key)
        form = self.entry.codec
        given = self.changes.fields.get(name)
        stored = given[2] if given else self.entry.fields.get(name)
        try:
            if stored is not None and form.text(value, key) == form.open(stored, key):
                return
        except InvalidValue:
            pass  # to be prepared, or refused
        self.changes.set(key, value, until=field_ttl.NEVER if given else self.entry.deadline(name))

    def open(self) -> Changes:
        """What is to be changed goes in here. Raises InvalidValue when it is over."""
        if self.closed:
            raise InvalidValue(self.closed)
        return self.changes
