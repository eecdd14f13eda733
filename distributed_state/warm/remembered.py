"""A commit as its writer knows it, made into its journal entry. Law: byte for byte what commit.lua wrote.

Of the entry only the size that the journal had is missing, which nobody else needs to know.

Design: section 14.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from distributed_state.values.journal import JournalEntry, Step, pack
from distributed_state.values.keys import RecordKeys
from distributed_state.values.model import LIFETIME, OWNER
from distributed_state.warm.answers import Committed, Draft
from distributed_state.warm.op_ids import OpId

_TOKEN = re.compile(r"[A-Za-z](\d+)")
_FIRST_EVENT = re.compile(rb"e(\d+)$")
# What is held for one commit, and for one of its steps, beside the bytes of names and values. Measured with tracemalloc
# on CPython 3.11 (tests/integration/test_memory.py does it anew).
_EACH_BYTES = 520
_STEP_BYTES = 160


class Remembered(NamedTuple):
    """A commit that was acknowledged: what was sent and what was answered, of which nothing is computed or copied.

    `known` is the entry itself, where the writer does not know all of it: its answer was lost and came once more.
    """

    offset: int
    epoch: str
    size: int
    record: bytes
    known: JournalEntry | None
    version: int = 0
    time_ms: int = 0
    first_message: int = 0
    results: tuple[int, ...] = ()
    said: bytes = b""
    sequence: int = 0
    digest: str = ""
    kind: str = ""
    actor: str = ""
    owner: str = ""
    lock_value: str = ""
    steps: Sequence[Step] = ()
    events: Sequence[Step] = ()

    def entry(self, replica: str) -> JournalEntry:
        """As it stands in the journal, if this replica wrote it."""
        if self.known is not None:
            return self.known
        token = _TOKEN.match(self.lock_value)
        return JournalEntry(
            offset=self.offset,
            event=f"{replica}.{self.sequence}.{self.digest}",
            record=self.record.decode(),
            version=self.version,
            time_ms=self.time_ms,
            kind=self.kind,
            actor=self.actor,
            token=int(token[1]) if token else 0,
            data=pack(self._written()),
            total_bytes=0,
            next_message=self.first_message + sum(step == b"m" for step, _, _ in self.steps),
        )

    def _written(self) -> Iterator[Step]:
        """The steps as commit.lua wrote them."""
        done = Committed(self.version, self.epoch, self.first_message, self.results, self.offset, self.time_ms)
        yield from done.applied(self.steps) or ()
        begins = self.version == 1 or b"b" in self.said
        found = _FIRST_EVENT.search(self.said)
        number = int(found[1]) if found else 0
        for step, name, value in self.events:
            if step in (b"E", b"X") and not begins:
                continue
            if step in (b"e", b"E"):
                yield b"e", b"%d %b %b" % (number, name, self.record), value
                number += 1
            elif int(name) or int(value):
                limit = self.time_ms + int(value) if int(value) > 0 else 0
                yield b"s", LIFETIME, b"%b %d" % (name, limit)
        if b"o" in self.said:
            yield b"s", OWNER, self.owner.encode()


def of_commit(names: RecordKeys, draft: Draft, op: OpId, done: Committed) -> tuple[Any, ...]:
    """A commit as `Remembered` has it, as a plain tuple.

    Python's garbage collector goes through lists and objects as long as they live, again and again, but takes tuples
    of plain values out of its account. Keeping the draft itself cost three times as much as all of the rest.
    """
    version, epoch, first_message, results, offset, time_ms, _, _, said = done
    steps = tuple(draft.steps)
    events = tuple(draft.sent_events)
    size = _EACH_BYTES
    for _, name, value in steps:
        size += _STEP_BYTES + len(name) + len(value)
    for _, name, value in events:
        size += _STEP_BYTES + len(name) + len(value)
    return (
        offset, epoch, size, names.text, None, version, time_ms, first_message, results, said, op.sequence, op.digest,
        draft.kind, draft.actor, draft.owner, draft.lock_value, steps, events,
    )  # fmt: skip


def of_entry(epoch: str, entry: JournalEntry) -> tuple[Any, ...]:
    """The same of an entry that is known as it stands in the journal."""
    size = _EACH_BYTES + len(entry.data) + len(entry.record)
    return entry.offset, epoch, size, entry.record.encode(), entry
