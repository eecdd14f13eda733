"""A commit as its writer knows it, made into its journal entry. Law: byte for byte what commit.lua wrote.

Of the entry only the size that the journal had is missing, which nobody else needs to know.

Design: section 14.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from distributed_state.values.journal import JournalEntry, Step, pack
from distributed_state.values.model import LIFETIME, OWNER
from distributed_state.warm.answers import Committed, Draft
from distributed_state.warm.op_ids import OpId

_TOKEN = re.compile(r"[A-Za-z](\d+)")
_FIRST_EVENT = re.compile(rb"e(\d+)$")
# What is held for one commit, and for one of its steps, beside the bytes of names and values. Measured with tracemalloc
# on CPython 3.11 (tests/integration/test_memory.py does it anew).
_EACH_BYTES = 1100
_STEP_BYTES = 150


class Remembered(NamedTuple):
    """A commit that was acknowledged. Nothing is computed or copied of it until somebody asks for its entry.

    `known` is the entry itself, where the writer does not know all of it: its answer was lost and came once more.
    """

    offset: int
    epoch: str
    size: int
    record: bytes
    draft: Draft | None
    op: OpId | None
    done: Committed | None
    known: JournalEntry | None = None

    def entry(self, replica: str) -> JournalEntry:
        """As it stands in the journal, if this replica wrote it."""
        draft, op, done = self.draft, self.op, self.done
        if self.known is not None or draft is None or op is None or done is None:
            assert self.known is not None
            return self.known
        token = _TOKEN.match(draft.lock_value)
        return JournalEntry(
            offset=done.offset,
            event=f"{replica}.{op.sequence}.{op.digest}",
            record=self.record.decode(),
            version=done.version,
            time_ms=done.time_ms or 0,
            kind=draft.kind,
            actor=draft.actor,
            token=int(token[1]) if token else 0,
            data=pack(_steps(self.record, draft, done)),
            total_bytes=0,
            next_message=(done.first_message or 0) + sum(step == b"m" for step, _, _ in draft.steps),
        )


def size_of(draft: Draft) -> int:
    """About how many bytes it takes to remember a commit, at most: hot may hold the same values anyway."""
    size = _EACH_BYTES
    for _, name, value in draft.steps:
        size += _STEP_BYTES + len(name) + len(value)
    for _, name, value in draft.sent_events:
        size += _STEP_BYTES + len(name) + len(value)
    return size


def _steps(record: bytes, draft: Draft, done: Committed) -> Iterator[Step]:
    """The steps as commit.lua wrote them."""
    yield from done.applied(draft.steps) or ()
    begins = done.version == 1 or b"b" in done.said
    found = _FIRST_EVENT.search(done.said)
    number = int(found[1]) if found else 0
    for step, name, value in draft.sent_events:
        if step in (b"E", b"X") and not begins:
            continue
        if step in (b"e", b"E"):
            yield b"e", b"%d %b %b" % (number, name, record), value
            number += 1
        elif int(name) or int(value):
            limit = (done.time_ms or 0) + int(value) if int(value) > 0 else 0
            yield b"s", LIFETIME, b"%b %d" % (name, limit)
    if b"o" in done.said:
        yield b"s", OWNER, draft.owner.encode()


def size_of_entry(entry: JournalEntry) -> int:
    """The same for an entry that is known as it stands in the journal."""
    return _EACH_BYTES + len(entry.data) + len(entry.record)
