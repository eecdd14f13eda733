"""Reads an exported record, from a file that anybody may have written.

Law: the file is replayed whole, change by change, before anything is asked of a server, and nothing in it is believed.
Every state that it comes to must be one that ordinary writes could have made, of the sizes that they may have; every
message that a state shows must be in the file, before it is shown.

Design: section 11.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterable
from typing import Any

from distributed_state.cold.item_export import OlderItem
from distributed_state.errors import InvalidValue, TooLarge
from distributed_state.settings import Settings
from distributed_state.store.export import FORMAT
from distributed_state.store.import_checks import (
    LATEST_MS,
    LONGEST,
    MOST,
    WRONG,
    check_item,
    check_message,
    check_reserved,
    check_text,
    digits,
    is_encrypted,
    raw,
    raw_value,
    record_of,
    runs_of,
    step_of,
    whole,
)
from distributed_state.tiers import actors
from distributed_state.values import codec, field_ttl
from distributed_state.values.journal import JournalEntry, Op, State, fold, pack, unpack
from distributed_state.values.model import ITEMS, NEXT, OWNER, SEGMENTS, START, TAG, Ref, escape, is_state, is_value
from distributed_state.values.tags import MOST as MOST_TAGS

_EVENT = re.compile(r"[0-9A-Za-z]{1,64}\.\d{1,19}\.[0-9A-Za-z]{1,64}", re.ASCII)


class ImportedFile:
    """Exported lines, checked whole before anything is touched. `ref` is the record to be, `origin` the one it was."""

    def __init__(self, lines: Iterable[str], id: str | None, settings: Settings) -> None:
        self.base: State | None = None
        self.shared: list[tuple[int, bytes]] = []
        self.items: list[OlderItem] = []
        self.entries: list[JournalEntry] = []
        self.origin: Ref | None = None
        self.namespace: str | None = None
        self._settings = settings
        self._expected: tuple[int, ...] = ()
        self._older: set[tuple[int, bytes]] = set()
        self._fields: dict[bytes, bytes] = {}
        self._sizes = {False: 0, True: 0}  # of the user's fields, and of those that the store keeps for itself
        self._tags: set[bytes] = set()
        # The messages that are in the file so far, as runs of numbers.
        self._starts: list[int] = []
        self._stops: list[int] = []
        for number, line in enumerate(lines, start=1):
            try:
                if line.strip():
                    self._read(json.loads(line))
            except TooLarge as error:
                raise TooLarge(f"line {number}: {error}") from error
            except WRONG as error:
                raise InvalidValue(f"line {number}: is not of the export format ({error})") from error
        if self.origin is None:
            raise InvalidValue("line 1: the header is missing")
        self.ref: Ref = self.origin if id is None else Ref(self.origin.scope, id)
        found = len(self.shared), len(self.items), len(self.entries)
        if found != self._expected:
            raise InvalidValue(
                f"{found} messages, items and changes, the header says {self._expected}: the file is cut off"
            )
        if self.base is None and not self.entries:
            raise InvalidValue("there is no change in it")
        try:
            self._check_shown()
        except WRONG as error:
            raise InvalidValue(f"the last state is none: {error}") from error
        if self._stops and self._stops[-1] > int(self._fields.get(NEXT, b"0")):
            raise InvalidValue(f"message {self._stops[-1] - 1} is in it, and was never appended")

    @property
    def version(self) -> int:
        """The version that the record comes to."""
        return self.entries[-1].version if self.entries else self.base.version if self.base else 0

    @property
    def owner(self) -> str:
        """Whose record it will be, as that is stored; '' if nobody's."""
        return self._fields.get(OWNER, b"").decode("utf-8", "replace")

    def _read(self, row: dict[str, Any]) -> None:
        if self.origin is None:
            if row["format"] != FORMAT:
                raise ValueError(f"format {row['format']!r:.80} is not {FORMAT}")
            self.namespace = row.get("namespace")
            if self.namespace is not None and (not isinstance(self.namespace, str) or len(self.namespace) > 64):
                raise ValueError("namespace is none")
            self.origin = Ref(row["scope"], row["id"])
            row.setdefault("items", 0)
            self._expected = tuple(whole(row, name, 0, MOST) for name in ("messages", "items", "changes"))
        elif "branch" in row:
            pass  # to be read by people: epochs of another store mean nothing here
        elif "base" in row:
            if self.base is not None or self.shared or self.entries:
                raise ValueError("a base stands before all messages and changes, once")
            fields = {raw(name): raw_value(value) for name, value in row["fields"].items()}
            self.base = State(str(row["epoch"]), whole(row, "base", 1, MOST), {})
            if _since(fields.get(ITEMS, b"0")) > self.base.version:
                raise ValueError(f"{fields[ITEMS]!r:.80} shows items since a version behind {self.base.version}")
            for name, value in fields.items():
                self._set(name, value)
            self.base.fields.update(fields)
        elif "message" in row:
            if self.entries:
                raise ValueError("messages stand before all changes")
            self._shared(whole(row, "message", 0, MOST), raw_value(row["data"]))
        elif "item" in row:
            if self.entries:
                raise ValueError("items stand before all changes")
            self._item(row)
        else:
            self._change(row)

    def _shared(self, number: int, data: bytes) -> None:
        self._message(number, data)
        self._hold(number)
        self.shared.append((number, data))

    def _item(self, row: dict[str, Any]) -> None:
        """An item that a change in the file shows, and none of them puts."""
        at = whole(row, "at", 0, self.base.version if self.base else 0)
        item = OlderItem(at, raw(row["item"]), record_of(row["origin"]).text, raw_value(row["data"]))
        if (item.at, item.name) in self._older:
            raise ValueError(f"item {item.name!r:.80} comes twice")
        self._older.add((item.at, item.name))
        check_item(item.name, item.data, self._settings.max_field_bytes)
        self.items.append(item)

    def _message(self, number: int, data: bytes) -> None:
        if len(data) > self._settings.max_message_bytes:
            limit = self._settings.max_message_bytes
            raise TooLarge(f"a message of {len(data)} bytes is more than max_message_bytes={limit}")
        time, text = field_ttl.split(data)  # before a message stands the time of its commit, in the same form
        if field_ttl.marked(data) and time > LATEST_MS / 1000:
            raise ValueError(f"message {number}: a time that no clock comes to")
        if text[:1] != codec.SEALED:
            check_message(text, f"message {number}")

    def _hold(self, number: int) -> None:
        if self._stops and number < self._stops[-1]:
            raise ValueError(f"message {number} comes twice, or behind a later one")
        if self._stops and number == self._stops[-1]:
            self._stops[-1] += 1
        else:
            self._starts.append(number)
            self._stops.append(number + 1)

    def _set(self, name: bytes, value: bytes) -> None:
        """One field of the state, checked by itself."""
        if not is_state(name):
            raise ValueError(f"field {name.decode(errors='replace')!r:.80} is reserved")
        key = codec.decode_key(name)
        if name[:1] != b"#":
            codec.encode_key(key)
        elif len(name) > LONGEST:
            raise TooLarge(f"a reserved field's name of {len(name)} bytes is more than {LONGEST}")
        if len(value) > self._settings.max_field_bytes and name != SEGMENTS:
            limit = self._settings.max_field_bytes
            raise TooLarge(f"{key!r:.80}: {len(value)} bytes are more than max_field_bytes={limit}")
        if not is_value(name):
            check_reserved(name, value)
        elif not is_encrypted(value):
            if field_ttl.marked(value) and field_ttl.split(value)[0] > 1e12:
                raise ValueError(f"{key!r:.80}: a deadline that no clock comes to")
            check_text(name, field_ttl.split(value)[1])
        self._fold(Op(b"s", name, value))

    def _fold(self, op: Op) -> None:
        """Take one step, and keep count of how large the state is."""
        name = op.name
        ours = op.name[:1] == b"#"
        counts = op.kind in (b"s", b"d") and name not in (SEGMENTS, START, NEXT)
        if counts and name in self._fields:
            self._sizes[ours] -= len(name) + len(self._fields[name])
        tags = [each for each in self._tags if op.kind == b"c" and name == TAG]
        self._sizes[True] -= sum(len(each) + len(self._fields[each]) for each in tags)
        fold(self._fields, [op])
        if counts and name in self._fields:
            self._sizes[ours] += len(name) + len(self._fields[name])
        elif op.kind == b"c":
            self._sizes[False] = 0
        if tags or name[:2] == TAG:
            self._tags = {each for each in self._tags | {name} if each in self._fields}
        if len(self._tags) > MOST_TAGS:
            raise TooLarge(f"{len(self._tags)} tags are more than {MOST_TAGS}")
        if self._sizes[ours] > self._settings.max_record_bytes:
            limit = self._settings.max_record_bytes
            raise TooLarge(f"{self._sizes[ours]} bytes are more than max_record_bytes={limit}")

    def _change(self, row: dict[str, Any]) -> None:
        if self.base is not None and not self.entries:
            self._check_shown()
        version = whole(row, "version", 1, MOST)
        if version != self.version + 1:
            raise ValueError(f"version {version} follows {self.version}")
        data = pack(step_of(step) for step in row["ops"] if step[0] != "e")
        ops = unpack(data)
        moved = False
        for op in ops:
            moved = self._apply(op) or moved
        if moved:
            self._check_shown()
        if ITEMS not in self._fields and any(op.kind in (b"p", b"q") for op in ops):
            raise ValueError("a change of items of a record that has none")
        if not isinstance(row["event"], str) or not _EVENT.fullmatch(row["event"]):
            raise ValueError(f"event {row['event']!r:.80} is none")
        kind = row["kind"]
        if not isinstance(kind, str) or not 0 < len(kind) <= 100 or escape(kind) != kind:
            raise ValueError(f"kind {kind!r:.80} is none")
        self.entries.append(
            JournalEntry(
                offset=0, event=row["event"], record="", version=version,
                time_ms=whole(row, "time_ms", 0, LATEST_MS), kind=kind, actor=actors.noted(row["actor"]),
                token=whole(row, "token", 0, 2**63 - 1), data=data, total_bytes=0,
            )
        )  # fmt: skip

    def _apply(self, op: Op) -> bool:
        """Take one step; whether other messages may be shown behind it than before, but for one appended."""
        kind, name, value = op
        following = int(self._fields.get(NEXT, b"0"))
        if kind == b"s":
            if name == NEXT and digits(name, value) < following:
                raise ValueError(f"#mn goes back from {following} to {int(value)}")
            if name == ITEMS and value != self._fields.get(ITEMS) and _since(value) != self.version + 1:
                # Who reads items waits until SQL has what it says here.
                raise ValueError(f"#items is {value.decode(errors='replace')!r:.80} at version {self.version + 1}")
            self._set(name, value)
            return name in (SEGMENTS, START, NEXT)
        if kind == b"d":
            if not is_state(name) or name in (START, NEXT, ITEMS) or value:
                raise ValueError(f"field {name.decode(errors='replace')!r:.80} cannot be deleted")
            if name[:1] != b"#":
                codec.encode_key(codec.decode_key(name))
        elif kind == b"m":
            if name != b"%d" % following:
                raise ValueError(f"message {name.decode(errors='replace')!r:.80} follows {following - 1}")
            self._message(following, value)
            self._hold(following)
        elif kind in (b"p", b"q"):
            if (kind == b"p") != bool(value):
                raise ValueError(f"a step {kind.decode()} with {len(value)} bytes")
            check_item(name, value, self._settings.max_field_bytes)
        elif kind == b"l":
            label = value.decode("utf-8", "surrogatepass")
            if name or not 0 < len(label) <= 500:
                raise ValueError(f"a label is 1 to 500 characters, not {label!r:.80}")
        elif (name and (kind, name) != (b"c", TAG)) or value != (b"" if kind == b"c" else b"%d" % following):
            raise ValueError(f"a step {kind.decode()} of {name.decode(errors='replace')!r:.80} and {len(value)} bytes")
        self._fold(op)
        return kind == b"w" or name == SEGMENTS

    def _check_shown(self) -> None:
        """Raise ValueError unless every message that the state shows is in the file, once."""
        start, stop = (int(self._fields.get(name, b"0")) for name in (START, NEXT))
        at = 0
        for _, first, last in [*runs_of(self._fields.get(SEGMENTS, b"[]")), ("", start, stop)]:
            if not at <= first <= last:
                raise ValueError(f"messages {first} to {last} are shown behind {at}")
            held = bisect_right(self._starts, first) - 1
            if first < last and (held < 0 or last > self._stops[held]):
                raise ValueError(f"messages {first} to {last - 1} are shown, and not all of them are in the file")
            at = last


def _since(value: bytes) -> int:
    """Since which version `#items` says that items are shown so."""
    return digits(ITEMS, value.partition(b" ")[0])
