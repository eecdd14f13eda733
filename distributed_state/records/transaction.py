"""A view of a record that collects changes. Law: it holds only for the version that it saw."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from types import TracebackType
from typing import Any, Protocol

from distributed_state.errors import InvalidValue
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.records.access import MOVES, VERSION, Action
from distributed_state.tiers.changes import Changes
from distributed_state.values import codec, field_ttl, merge
from distributed_state.values.model import PHASE, Message, Ref
from distributed_state.warm.answers import Draft

_GONE: Any = object()
_MISSING: Any = object()


class Transaction(MutableMapping[str, Any]):
    """The record's fields as a dict. What is changed here is one commit at the end, or nothing.

    As in a dict, changing a list or object that was read or set here changes the field.
    """

    def __init__(self, entry: CachedRecord, changes: Changes, allow: Callable[..., None]) -> None:
        self._entry = entry
        self._changes = changes
        self._allow = allow
        self._now: dict[str, Any] = {}  # what the caller was given or gave, _GONE if deleted
        self._over = False

    @property
    def version(self) -> int:
        """The version that this view shows, and that the commit expects."""
        return self._entry.version

    @property
    def phase(self) -> str | None:
        """The phase before this transaction."""
        self._allow("read", MOVES)
        phase = self._entry.fields.get(PHASE)
        return None if phase is None else phase.decode("utf-8", "surrogatepass")

    def __getitem__(self, key: str) -> Any:
        value = self._now.get(key, _MISSING)
        if value is _MISSING:
            self._allow("read", key)
            value = _GONE if self._entry.deleted else self._entry.value(key, _GONE)
            if isinstance(value, (dict, list)):
                self._now[key] = value
        if value is _GONE:
            raise KeyError(key)
        return value

    def __setitem__(self, key: str, value: Any) -> None:
        self._now[key] = self._open().set(key, value)

    def __delitem__(self, key: str) -> None:
        self[key]  # KeyError if it is not there
        self._open().delete(key)
        self._now[key] = _GONE

    def __iter__(self) -> Iterator[str]:
        stored = [codec.decode_key(name) for name in self._entry.fields if name[:1] != b"#"]
        stored = [] if self._entry.deleted else stored
        self._allow("read", None, *stored)  # whoever lists or counts the names reads the record as a whole
        keys = dict.fromkeys([*stored, *self._now])
        yield from (key for key in keys if self._now.get(key) is not _GONE)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def append(self, *messages: Message | dict[str, Any]) -> None:
        """Add messages to the conversation with this commit."""
        for message in messages:
            self._open().append(message)

    def move_to(self, phase: str | None) -> None:
        """Set the phase with this commit."""
        self._open().phase(phase)

    def _differences(self) -> Iterator[tuple[str, Any, Any]]:
        """What this view changes: field, value before, value now; _GONE for none."""
        for key, value in self._now.items():
            before = _GONE if self._entry.deleted else self._entry.value(key, _GONE)
            if _GONE in (before, value) or codec.encode(value, key) != codec.encode(before, key):
                yield key, before, value

    def _draft(self, kind: str = "transaction") -> Draft | None:
        """End the transaction: its change, None if there is none."""
        for key, value in self._now.items():
            if isinstance(value, (dict, list)):
                self._notice(key, value)
        self._over = True
        if not self._changes:
            return None
        draft = self._changes.draft(kind)
        draft.expected = self._entry.version
        draft.epoch = self._entry.epoch
        return draft

    def _rebased(self, newest: CachedRecord, policies: Mapping[str, merge.Merge]) -> Draft | None:
        """The change of an ended transaction, merged with what others did since; None if that cannot be expressed."""
        base = self._entry
        if newest.epoch != base.epoch or newest.deleted or base.deleted:
            return None
        merged = merge.three_way(base.codec, self._changes.fields, base.fields, newest.fields, policies)
        if merged is None:
            return None
        changes = self._changes.copy()
        for key, value in merged.items():
            changes.set(key, value)
        draft = changes.draft("transaction")
        draft.expected = newest.version
        draft.epoch = newest.epoch
        return draft

    def _notice(self, key: str, value: Any) -> None:
        """A list or object that may have been changed in place; its deadline stays, unless it was set anew."""
        name = codec.encode_key(key)
        record_codec = self._entry.codec
        given = self._changes.fields.get(name)
        stored = given[2] if given else self._entry.fields.get(name)
        try:
            if stored is not None and record_codec.text(value, key) == record_codec.open(stored, key):
                return
        except InvalidValue:
            pass  # to be prepared, or refused
        self._changes.set(key, value, until=field_ttl.NEVER if given else self._entry.deadline(name))

    def _open(self) -> Changes:
        if self._over:
            raise InvalidValue("this transaction is over; nothing can be changed through it any more")
        return self._changes


class Handle(Protocol):
    """What a transaction needs of its record."""

    async def _entry(self, fresh: bool = False, field: str | None = None) -> CachedRecord: ...
    def _allow(self, action: Action, *fields: str | None) -> None: ...
    def _changes(self) -> Changes: ...
    async def _commit(self, draft: Draft) -> Any: ...


class AsyncTransaction:
    """The `async with` around a Transaction."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    async def __aenter__(self) -> Transaction:
        entry = await self._handle._entry(True, VERSION)
        self._view = Transaction(entry, self._handle._changes(), self._handle._allow)
        return self._view

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        draft = self._view._draft() if error is None else None
        if draft is not None:
            await self._handle._commit(draft)


class Batch:
    """Changes of many records, sent together at the end. Those of one record are one commit."""

    def __init__(self) -> None:
        self._changes: dict[Ref, tuple[Any, Changes]] = {}

    def on(self, handle: Any) -> Changes:
        """The changes of one record: `batch.on(session).set("a", 1)`."""
        if not hasattr(handle, "ref"):
            raise InvalidValue(f"a batch takes sessions and other records of a store, not {handle!r:.80}")
        return self._changes.setdefault(handle.ref, (handle, handle._changes()))[1]

    def _drafts(self) -> list[tuple[Any, Draft]]:
        """Each record with its change."""
        return [(handle, changes.draft("batch")) for handle, changes in self._changes.values() if changes]
