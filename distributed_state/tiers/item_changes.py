"""What one commit does to items. Law: of several steps for one item the last counts, with what it expects.

Design: section 9.
"""

from __future__ import annotations

from distributed_state.errors import InvalidValue, TooLarge
from distributed_state.settings import Settings
from distributed_state.values import codec
from distributed_state.values.codec import Codec
from distributed_state.values.items import ANY, MOST_ITEMS, DeleteItem, Item, PutItem, name_of, stamp_of
from distributed_state.values.journal import Step
from distributed_state.warm.answers import Draft


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

    def put(self) -> list[bytes]:
        """The names of the items that are put."""
        return [name for name, (kind, *_) in self._steps.items() if kind != b"q"]

    def copy(self) -> ItemChanges:
        """The same, to go on from without touching these."""
        other = ItemChanges(self._settings, self._codec)
        other._steps, other._expected = dict(self._steps), dict(self._expected)
        other._epoch, other._size = self._epoch, self._size
        return other

    def add(self, item: PutItem | DeleteItem) -> None:
        """Put or delete an item."""
        name = name_of(item.collection, item.key)
        expected = self._expectation(item, name)
        self._add((b"q", name, b"") if isinstance(item, DeleteItem) else self._put(item, name))
        self._expected.pop(name, None)
        if expected is not None:
            self._expected[name] = expected

    def put_stored(self, name: bytes, frame: bytes) -> None:
        """Put an item as it is stored, or delete it if the frame is empty: ten times as many as a caller may put."""
        self._add((b"p" if frame else b"q", name, frame), 10 * MOST_ITEMS)

    def _put(self, item: PutItem, name: bytes) -> Step:
        data = self._codec.encode(item.value, codec.item_name(name))
        if len(data) > self._settings.max_field_bytes:
            limit = self._settings.max_field_bytes
            raise TooLarge(f"item {item.key!r:.80}: {len(data)} bytes are more than max_field_bytes={limit}")
        return b"n" if item.keep else b"p", name, codec.compact(data)

    def _add(self, step: Step, most: int = MOST_ITEMS) -> None:
        _, name, data = step
        before = self._steps.get(name)
        self._size += len(data) - len(before[2]) if before else len(data) + len(name)
        if self._size > self._settings.max_record_bytes:
            raise TooLarge(f"{self._size} bytes are more than max_record_bytes={self._settings.max_record_bytes}")
        self._steps[name] = step
        if len(self._steps) > most:
            raise TooLarge(f"one commit changes at most {most} items")

    def _expectation(self, item: PutItem | DeleteItem, name: bytes) -> Step | None:
        """What must be so of an item, as a step: of a value that is expected it was looked up which item has it."""
        absent = isinstance(item, PutItem) and item.if_absent
        given = bool(absent) + bool(item.if_present) + (item.equals is not ANY)
        if given > 1:
            raise InvalidValue("expect one thing of an item: if_absent, if_present or equals")
        if isinstance(item, PutItem) and item.keep and given:
            raise InvalidValue(f"item {item.key!r:.80}: with keep=True nothing is expected of it")
        if absent or item.equals is None:
            return b"A", name, b""
        if item.if_present:
            return b"P", name, b""
        return None if item.equals is ANY else (b"M", name, self._stamp(item))

    def _stamp(self, item: PutItem | DeleteItem) -> bytes:
        found = item.equals
        if not isinstance(found, Item):
            raise InvalidValue(f"equals takes an Item that was read, here, not {type(found).__name__}")
        if (found.collection, found.key) != (item.collection, item.key):
            what = f"{item.collection!r:.80} {item.key!r:.80}"
            raise InvalidValue(f"item {what}: equals is the item {found.collection!r:.80} {found.key!r:.80}")
        if not found.epoch:
            raise InvalidValue("an Item of a history is not expected to be there still: read it anew")
        if self._epoch not in ("", found.epoch):
            raise InvalidValue("two items that are expected were read under two epochs: read them anew")
        self._epoch = found.epoch
        return stamp_of(found.version, found.origin, self._codec.record)

    def into(self, draft: Draft) -> None:
        """Add it to a change that is ready."""
        if self._steps:
            draft.items = True
            draft.steps += self._steps.values()
            draft.expected_items = [*self._expected.values()]
            draft.epoch = draft.epoch or self._epoch
