"""A commit as its writer knows it, made into its journal entry. Law: byte for byte what commit.lua wrote.

Of the entry only the size that the journal had is missing, which nobody else needs to know.

Design: section 14.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from distributed_state.values.journal import JournalEntry, Step, pack
from distributed_state.values.model import LIFETIME, OWNER
from distributed_state.warm.answers import Committed, committed
from distributed_state.warm.op_ids import OpId

_TOKEN = re.compile(r"[A-Za-z](\d+)")
_FIRST_EVENT = re.compile(rb"e(\d+)$")
# What is held for one commit, and for each word that was sent, beside the bytes of names and values. Measured with
# tracemalloc on CPython 3.11 (tests/tiers/test_unarchived.py measures it again).
_EACH_BYTES = 300
_WORD_BYTES = 34
_EXPECTATIONS = 15  # where what is sent says how many there are
_BESIDE = (b"e", b"E", b"x", b"X")  # steps that change no record


class Remembered(NamedTuple):
    """A commit that was acknowledged: what was sent and what was answered, of which nothing is computed or copied.

    `sent` is the entry itself, where the writer does not know all of it: its answer was lost and came once more.
    """

    offset: int
    epoch: str
    size: int
    sent: Sequence[Any] | JournalEntry
    answer: bytes = b""

    def entry(self) -> JournalEntry:
        """As it stands in the journal."""
        if isinstance(self.sent, JournalEntry):
            return self.sent
        (constants, _, sequence, _, digest, _, lock_value), (kind, actor, owner, record) = (
            self.sent[:7], self.sent[10:14]
        )  # fmt: skip
        token = _TOKEN.match(lock_value)
        done = committed(self.answer)
        steps = _steps(self.sent)
        return JournalEntry(
            offset=self.offset,
            event=f"{constants[0]}.{sequence}.{digest}",
            record=record.decode(),
            version=done.version,
            time_ms=done.time_ms or 0,
            kind=kind,
            actor=actor,
            token=int(token[1]) if token else 0,
            data=pack(_written(done, steps, record, owner)),
            total_bytes=0,
            next_message=(done.first_message or 0) + sum(step == b"m" for step, _, _ in steps),
        )


def _steps(sent: Sequence[Any]) -> list[Step]:
    """The triples at the end of what commit.lua was sent."""
    first = _EXPECTATIONS + 1 + 2 * sent[_EXPECTATIONS]
    return [(sent[at], sent[at + 1], sent[at + 2]) for at in range(first, len(sent), 3)]


def _written(done: Committed, sent: Sequence[Step], record: bytes, owner: str) -> Iterator[Step]:
    """The steps as commit.lua wrote them."""
    said = done.said
    yield from done.applied(each for each in sent if each[0] not in _BESIDE) or ()
    found = _FIRST_EVENT.search(said)
    number = int(found[1]) if found else 0
    for step, name, value in sent:
        if step not in _BESIDE or (step in (b"E", b"X") and not done.begins):
            continue
        if step in (b"e", b"E"):
            yield b"e", b"%d %b %b" % (number, name, record), value
            number += 1
        elif int(name) or int(value):
            limit = (done.time_ms or 0) + int(value) if int(value) > 0 else 0
            yield b"s", LIFETIME, b"%b %d" % (name, limit)
    yield from done.first_items
    if b"o" in said:
        yield b"s", OWNER, owner.encode()


def of_commit(op: OpId, done: Committed, events: Sequence[Step]) -> tuple[Any, ...]:
    """A commit as `Remembered` has it, as a plain tuple.

    Python's garbage collector goes through lists and objects as long as they live, again and again, but takes tuples
    of plain values out of its account. Keeping the draft itself cost three times as much as all of the rest.
    """
    sent = tuple(op.sent)
    size = _EACH_BYTES + op.size + _WORD_BYTES * len(sent)
    for _, name, value in events:
        size += len(name) + len(value)
    return done.offset, done.epoch, size, sent, done.text


def of_entry(epoch: str, entry: JournalEntry) -> tuple[Any, ...]:
    """The same of an entry that is known as it stands in the journal."""
    size = _EACH_BYTES + len(entry.data) + len(entry.record)
    return entry.offset, epoch, size, entry
