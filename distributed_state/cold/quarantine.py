"""What is in no history: entries that SQL refuses, and commits that others replaced. Law: nothing is lost, each is whole.

A row is blamed only for an error that waiting would not cure:

| fault | errors | what becomes of the row |
|---|---|---|
| `ROW` | a value that does not fit: too long for an index, out of range, not in the database's encoding, refused by a constraint or by a trigger of the owner's; a history that cannot be read | it is put into quarantine, the others go on |
| `PLACE` | a part of the database takes nothing: a tablespace is full, a file is damaged, a right or a column is missing | its partition waits there and says so, the others go on |
| none | SQL is away, busy or being restored; SQLite is full, which is one file | all wait |

PostgreSQL's codes are in its manual, appendix A. An error of a kind that is not known here waits: nothing is lost by that.

Design: section 9.
"""  # noqa: E501  # a table's row is a line

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from typing import Any

from sqlalchemy import and_, delete, exc, func, insert, select, update

from distributed_state.cold import blocks, record_history, record_index
from distributed_state.cold.engine import Sql, chunks
from distributed_state.cold.entries import LARGEST, subject
from distributed_state.cold.record_index import Head
from distributed_state.cold.tables import changes, items, layers, messages, quarantine, shares, snapshots
from distributed_state.cold.values import RESOLVED, UNRESOLVED, Quarantined
from distributed_state.errors import ColdUnavailable, CorruptState
from distributed_state.values.journal import JournalEntry, State
from distributed_state.values.model import log_fields

log = logging.getLogger(__name__)
# data_exception, integrity_constraint_violation, with_check_option_violation, program_limit_exceeded, PL/pgSQL's RAISE
_ROW = ("22", "23", "44", "54", "P0")
# connection_exception, invalid_transaction_state, transaction_rollback, insufficient_resources,
# object_not_in_prerequisite_state, operator_intervention; tables that are not there: a dump is being restored
_AWAY = ("08", "25", "40", "53", "55", "57", "42P01", "3F000")
_FULL = "53100"


# Whose fault an error is


class Fault(Enum):
    """The cause for which SQL refused rows."""

    ROW = "row"
    PLACE = "place"


class Stopped(ColdUnavailable):
    """SQL refuses an entry for now. `places` are its offset and the reason, by partition; nothing was archived."""

    def __init__(self, places: Mapping[int, tuple[int, str]]) -> None:
        super().__init__("; ".join(f"partition {each}: {why}" for each, (_, why) in places.items()))
        self.places = places


def fault_of(sql: Sql, error: Exception) -> Fault | None:
    """Whose fault an error is; None if all that was sent may be taken later, or the error is a bug of ours."""
    if isinstance(error, (ValueError, OverflowError, CorruptState)):
        return Fault.ROW
    driver: Any = sql.connection.dialect.dbapi
    original = error.orig if isinstance(error, exc.DBAPIError) else error
    if not isinstance(original, driver.Error) or (isinstance(error, exc.DBAPIError) and error.connection_invalidated):
        return None
    if isinstance(original, (driver.DataError, driver.IntegrityError)):
        return Fault.ROW
    code = getattr(original, "sqlstate", None) or getattr(original, "pgcode", None)
    if code is None or (code.startswith(_AWAY) and code != _FULL):
        return None
    return Fault.ROW if code.startswith(_ROW) else Fault.PLACE


def is_collision(sql: Sql, error: Exception) -> bool:
    """Whether a row stands where another one was to be inserted, or a constraint refused it."""
    driver: Any = sql.connection.dialect.dbapi
    return isinstance(error.orig if isinstance(error, exc.DBAPIError) else error, driver.IntegrityError)


def reason_of(error: Exception) -> str:
    """Why SQL refused something, in one line."""
    return f"{type(error).__name__}: {getattr(error, 'orig', None) or error}".strip().partition("\n")[0]


# Putting into quarantine


def keep_refused(sql: Sql, entry: JournalEntry, partition: int, epoch: str, error: Exception) -> None:
    """Set an entry aside, with the reason."""
    reason = reason_of(error)
    who = entry.record or entry.event
    text = "%s version %d at offset %d is quarantined: %s"
    log.error(text, who, entry.version, entry.offset, reason, extra=log_fields(entry.record))
    row = {"namespace": sql.namespace, "partition": partition, "epoch": epoch, "data": entry.data}
    # An event that was written alone is kept under what it is about, so that erasing that takes it too.
    texts = {"event": entry.event, "record": entry.record or subject(entry.data), "reason": reason}
    numbers = {"offset": entry.offset, "version": entry.version, "time_ms": entry.time_ms}
    row |= {name: max(0, min(number, LARGEST)) for name, number in numbers.items()}
    try:
        with sql.begin_nested():
            sql.execute(insert(quarantine), row | {each: storable(text) for each, text in texts.items()})
    except Exception as refused:
        if fault_of(sql, refused) is not Fault.ROW:
            raise
        # A letter that the database's encoding lacks may be why the entry is here at all.
        plain = {each: storable(text).encode("ascii", "backslashreplace").decode() for each, text in texts.items()}
        sql.execute(insert(quarantine), row | plain)


def storable(text: str) -> str:
    """A text as every database can hold it."""
    return text.replace("\0", "%00").encode("utf-8", "backslashreplace").decode()


def set_aside(sql: Sql, head: Head, first: int, reason: str) -> None:
    """Move a record's changes from version `first` on to quarantine, with all that was derived from them."""
    blocks.expand(sql, [head["key"]])
    place = {"namespace": head["namespace"], "partition": head["partition"], "record": head["record"]}
    rows = [
        place | {
            "epoch": epoch, "offset": entry.offset, "event": entry.event, "version": entry.version,
            "data": entry.data, "time_ms": entry.time_ms, "reason": reason,
        }
        for epoch, entry in record_history.whole(sql, head["key"], head["record"], first - 1)
    ]  # fmt: skip
    if rows:
        sql.execute(insert(quarantine), rows)
    _remove_from(sql, head, first)


def undo(sql: Sql, record: str, first: int, before: State | None) -> None:
    """Remove a record's changes from version `first` on, which nobody was acknowledged: it is as it was `before`."""
    head = record_index.lock(sql, [record])[record]
    blocks.expand(sql, [head["key"]])
    _remove_from(sql, head, first)
    record_index.put(sql, [{**head, "version": first - 1, **record_index.about(before)}])
    record_index.replace_tags(sql, record, before.fields if before else {})


def _remove_from(sql: Sql, head: Head, first: int) -> None:
    for table in (changes, messages, snapshots, items):
        sql.execute(delete(table).where(table.c.record == head["key"], table.c.version >= first))
    for table in (shares, layers):
        mine = and_(table.c.namespace == head["namespace"], table.c.record == head["record"])
        sql.execute(delete(table).where(mine, table.c.version >= first))


def set_aside_lacking(sql: Sql, partition: int, epoch: str, entries: Sequence[JournalEntry], reason: str) -> int:
    """Put entries that SQL lacks into quarantine, with the reason; how many those are."""
    # Who erases a record holds these rows, too: then it is seen here to be erased, and its entries stay away.
    named = {entry.record for entry in entries}
    record_index.lock(sql, named | {record_index.hashed(sql.namespace, each) for each in named})
    lost = record_history.lacking(sql, partition, epoch, entries)
    rows = [
        {
            "namespace": sql.namespace, "partition": partition, "epoch": epoch, "offset": entry.offset,
            "event": entry.event, "record": entry.record, "version": entry.version, "reason": reason,
            "data": entry.data, "time_ms": entry.time_ms,
        }
        for entry in entries if entry.event in lost
    ]  # fmt: skip
    if rows:
        sql.execute(insert(quarantine), rows)
    return len(rows)


def set_aside_acknowledged(sql: Sql, partition: int, epoch: str, entries: Sequence[JournalEntry]) -> int:
    """Put into quarantine those of the entries that are held nowhere; how many that are."""
    reason = f"acknowledged under epoch {epoch}, which ended before it was archived"
    return set_aside_lacking(sql, partition, epoch, entries, reason)


def unresolve(sql: Sql, events: Collection[str]) -> None:
    """Note of commits that were to come with a later version that SQL refused that: they are not archived."""
    q = quarantine.c
    for chunk in chunks(sorted(events), 500):
        here = and_(q.namespace == sql.namespace, q.event.in_(chunk), q.reason == RESOLVED)
        sql.execute(update(quarantine).where(here).values(reason=UNRESOLVED))


# What is there


def quarantined(sql: Sql) -> list[Quarantined]:
    """The entries that could not be archived, or that a newer epoch replaced, oldest first."""
    q = quarantine.c
    names = [q.id, q.partition, q.epoch, q.offset, q.event, q.record, q.version, q.reason, q.data, q.time_ms]
    rows = sql.execute(select(*names).where(q.namespace == sql.namespace).order_by(q.id))
    return [Quarantined(*row) for row in rows]


def newest_quarantined(sql: Sql) -> tuple[str, int, str] | None:
    """The entry that came into quarantine last: its record, version and the reason."""
    q = quarantine.c
    query = select(q.record, q.version, q.reason).where(q.namespace == sql.namespace).order_by(q.id.desc()).limit(1)
    row = sql.execute(query).first()
    return None if row is None else (row.record, row.version, row.reason)


def count_quarantined(sql: Sql) -> int:
    """How many entries are in quarantine, without those of which nothing is lost."""
    q = quarantine.c
    query = select(func.count()).where(q.namespace == sql.namespace, q.reason != RESOLVED)
    return int(sql.execute(query).scalar_one())


def refusal(sql: Sql, event: str) -> str:
    """Why the entry of this event is in quarantine; "" if it is not."""
    q = quarantine.c
    found = sql.execute(select(q.reason).where(q.namespace == sql.namespace, q.event == event)).scalar()
    return str(found or "")
