"""What one commit does to items. Law: of several steps for one item the last counts, with what it expects.

Design: section 9.
"""

from __future__ import annotations

from typing import Any

from distributed_state.errors import InvalidValue, TooLarge
from distributed_state.settings import Settings
from distributed_state.values import codec
from distributed_state.values.codec import Codec
from distributed_state.values.items import Item, name_of, stamp_of
from distributed_state.values.journal import Step
from distributed_state.warm.answers import Draft

MOST = 1000


class ItemChanges:
    """Collects steps of items, of one record: `p` put, `q` delete, `n` put if there is none; and what is expected."""

    __slots__ = ("_codec", "_epoch", "_expected", "_settings", "_size", "_steps")

    def __init__(self, settings: Settings, record_codec: Codec) -> None:
        self._settings = settings
        self._codec = record_codec
        self._steps: dict[bytes, Step] = {}
        self._expected: dict[bytes, Step] = {}
        self._epoch = ""
        self._size = 0

    def __bool__(self) -> bool:
        return bool(self._steps)

    def copy(self) -> ItemChanges:
        """The same, to go on from without touching these."""
        other = ItemChanges(self._settings, self._codec)
        other._steps, other._expected = dict(self._steps), dict(self._expected)
        other._epoch, other._size = self._epoch, self._size
        return other

    def put(
        self, collection: str, key: str, value: Any, *, if_absent: bool, if_present: bool, equals: Any, keep: bool
    ) -> None:
        """Put an item."""
        name = name_of(collection, key)
        data = self._codec.encode(value, codec.item_name(name))
        if len(data) > self._settings.max_field_bytes:
            limit = self._settings.max_field_bytes
            raise TooLarge(f"item {key!r:.80}: {len(data)} bytes are more than max_field_bytes={limit}")
        if keep and (if_absent or if_present or equals is not None):
            raise InvalidValue(f"item {key!r:.80}: with keep=True nothing is expected of it")
        self._add((b"n" if keep else b"p", name, codec.compact(data)), if_absent, if_present, equals)

    def put_stored(self, name: bytes, frame: bytes) -> None:
        """Put an item as it is stored, or delete it if the frame is empty."""
        self._add((b"p" if frame else b"q", name, frame), False, False, None)

    def delete(self, collection: str, key: str, *, if_present: bool, equals: Any) -> None:
        """Delete an item."""
        self._add((b"q", name_of(collection, key), b""), False, if_present, equals)

    def _add(self, step: Step, if_absent: bool, if_present: bool, equals: Any) -> None:
        _, name, data = step
        if if_absent + if_present + (equals is not None) > 1:
            raise InvalidValue("expect one thing of an item: if_absent, if_present or equals")
        self._expected.pop(name, None)
        if if_absent or if_present:
            self._expected[name] = (b"A" if if_absent else b"P", name, b"")
        elif equals is not None:
            self._expected[name] = (b"M", name, self._stamp(equals))
        before = self._steps.get(name)
        self._size += len(data) - len(before[2]) if before else len(data) + len(name)
        if self._size > self._settings.max_record_bytes:
            raise TooLarge(f"{self._size} bytes are more than max_record_bytes={self._settings.max_record_bytes}")
        self._steps[name] = step
        if len(self._steps) > MOST:
            raise TooLarge(f"one commit changes at most {MOST} items")

    def _stamp(self, equals: Any) -> bytes:
        if not isinstance(equals, Item):
            raise InvalidValue(f"equals takes an Item that was read, here, not {type(equals).__name__}")
        if not equals.epoch:
            raise InvalidValue("an Item of a history is not expected to be there still: read it anew")
        if self._epoch not in ("", equals.epoch):
            raise InvalidValue("two items that are expected were read under two epochs: read them anew")
        self._epoch = equals.epoch
        return stamp_of(equals, self._codec.record)

    def clear(self) -> None:
        """Forget all of it: the change clears all items first."""
        self._steps.clear()
        self._expected.clear()
        self._size = 0

    def into(self, draft: Draft) -> None:
        """Add it to a change that is ready."""
        if self._steps:
            draft.items = True
            draft.steps += self._steps.values()
            draft.expected_items = [*self._expected.values()]
            draft.epoch = draft.epoch or self._epoch
