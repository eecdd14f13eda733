"""What PostgreSQL writes down for commits of the same few records, and how many of their rows it can change in place.

A row is changed in place (HOT, PostgreSQL's word) if no index has a column that changed and its page has room: then no
index is written, and reading clears up behind it. Bytes are those of the write-ahead log, which goes to every standby
and backup.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import psycopg

from deploy.load.curves.archiving import BATCH, entry
from deploy.load.curves.curve import Curve, Progress
from distributed_state.cold.store import ColdStore
from distributed_state.cold.values import Batch
from distributed_state.programs.servers import postgres_server

_FIRST = 4  # batches before anything is counted: by then all records are there, and their pages were written whole
_BATCHES = 20
TABLES = ("records", "cursors")
_UPDATES = "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = %s"


@dataclass(frozen=True)
class Written:
    """Bytes of the log for a change; of each table the updates, and how many of them were not in place."""

    bytes_: float
    updates: dict[str, int]
    elsewhere: dict[str, int]


def _archive(url: str, records: int, first: int, last: int) -> None:
    """Archive the changes of these batches, with a store of its own, whose end makes PostgreSQL's counts complete."""
    cold = ColdStore.open(url, f"w{records}")
    try:
        cursor = cold.cursor(0) or cold.mint(0, None)
        assert cursor is not None
        offset, event = cursor.offset, cursor.event
        for at in range(first * BATCH, last * BATCH, BATCH):
            entries = [entry(number, records) for number in range(at, at + BATCH)]
            assert cold.archive([Batch(0, cursor.epoch, offset, entries, event)])
            offset, event = entries[-1].offset, entries[-1].event
    finally:
        cold.close()


def _counts(connection: psycopg.Connection, at_least: int) -> dict[str, tuple[int, int]]:
    """Updates of each table, and those in place, once so many of `records` are counted: backends tell as they end."""
    deadline = time.monotonic() + 20
    while True:
        found = {table: connection.execute(_UPDATES, [table]).fetchone() for table in TABLES}
        counted = {table: (int(row[0]), int(row[1])) for table, row in found.items() if row}
        if counted["records"][0] >= at_least:
            return counted
        assert time.monotonic() < deadline, f"{counted}: {at_least} rows of records were updated"
        time.sleep(0.1)


def _position(connection: psycopg.Connection) -> int:
    row = connection.execute("SELECT pg_current_wal_lsn() - '0/0'::pg_lsn").fetchone()
    assert row is not None
    return int(row[0])


def written(url: str, records: int, *, batches: int = _BATCHES) -> Written:
    """What so many batches of 1,000 changes write, of records that are all there."""
    a_batch = min(records, BATCH)  # rows of `records` that one changes; the first of each record is an insert
    with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute("CHECKPOINT")  # the next is minutes away, and makes each page be written whole once more
        _archive(url, records, 0, _FIRST)
        before, began = _counts(connection, _FIRST * a_batch - records), _position(connection)
        _archive(url, records, _FIRST, _FIRST + batches)
        bytes_ = (_position(connection) - began) / (batches * BATCH)
        after = _counts(connection, before["records"][0] + batches * a_batch)
    updates = {table: after[table][0] - before[table][0] for table in TABLES}
    in_place = {table: after[table][1] - before[table][1] for table in TABLES}
    return Written(bytes_, updates, {table: updates[table] - in_place[table] for table in TABLES})


def wal(sizes: Sequence[int], progress: Progress, *, batches: int = _BATCHES) -> list[Curve]:
    """Bytes of the log for a change, and the share of updates that are not in place, for each table."""
    found = []
    for size in sizes:
        progress(f"{size} records")
        with postgres_server() as database:
            found.append(written(database.url, size, batches=batches))
    of = "active records"
    shares = {table: [each.elsewhere[table] / max(1, each.updates[table]) for each in found] for table in TABLES}
    return [
        Curve("PostgreSQL's log", "bytes a change", of, list(sizes), [each.bytes_ for each in found], 1_000.0),
        *(Curve(f"updates of `{table}` that are not HOT", "", of, list(sizes), shares[table], 0.1) for table in TABLES),
    ]
