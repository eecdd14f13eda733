"""What a record that comes whole from Redis says of its items. Law: what may be missing is said, never passed over.

Redis has all items that are not archived, and of the others the newest. The journal may have more of them.

Design: section 14.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from distributed_state.values.journal import JournalEntry, KeptItems, Loaded, State, Step, unpack
from distributed_state.values.model import ITEMS, PARENT


def steps(
    kept: KeptItems | None, known: int, newer: Loaded, entries: Sequence[JournalEntry]
) -> tuple[list[Step], bool]:
    """What became of items since the version that SQL knows, as steps; and whether some of that may be lost."""
    since, below = _layer(newer.state)
    if newer.state.deleted or not since:
        return [], False
    kept = kept or KeptItems({}, newer.state.version)
    found: dict[bytes, bytes] = {}
    reached = known
    for entry in line(newer.state.version, entries):
        reached += entry.version == reached + 1
        if entry.version >= since:
            found |= {op.name: op.value for op in unpack(entry.data) if op.kind in (b"p", b"q")}
    # The window has them as they are at the end.
    found |= {item: frame for item, (at, frame) in kept.items.items() if known < at <= newer.state.version}
    missing = kept.missing > reached or since > known < below
    return [(b"p" if frame else b"q", item, frame) for item, frame in sorted(found.items())], missing


def inherited(fields: Mapping[bytes, bytes]) -> tuple[str, int] | None:
    """The record whose items a fork with these fields shows, and as of which version; None if there are none."""
    if PARENT not in fields or fields.get(ITEMS) != b"1":
        return None
    source, _, version = fields[PARENT].decode().rpartition("@")
    return source, int(version)


def line(version: int, entries: Sequence[JournalEntry]) -> list[JournalEntry]:
    """Those that led to a version: of several of one version, as it was hydrated from the older SQL since, the last."""
    line: list[JournalEntry] = []
    for entry in reversed(entries):
        if entry.version < (line[-1].version if line else version + 1):
            line.append(entry)
    return line[::-1]


def layered(state: State, known: int) -> State:
    """A state that comes whole: what began behind the version that SQL knows begins with it."""
    since, separator, below = state.fields.get(ITEMS, b"").partition(b" ")
    if int(since or b"0") <= known:
        return state
    return replace(state, fields={**state.fields, ITEMS: b"%d" % state.version + separator + below})


def _layer(state: State) -> tuple[int, int]:
    """Since which version a state shows its items so, and those of which version lie below; 0: none."""
    since, _, below = state.fields.get(ITEMS, b"").partition(b" ")
    return int(since or b"0"), int(below or b"0")
