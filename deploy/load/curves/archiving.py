"""What it takes to carry commits into PostgreSQL, beside a program that does nothing but insert the same rows.

A change sets one field and adds a message of 270 bytes: a row of `changes`, one of `messages`, and its part of the row
of `records`. The batches are made before the clock starts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import psycopg

from deploy.load.curves.curve import Curve, Progress
from distributed_state.cold.store import ColdStore
from distributed_state.cold.values import Batch
from distributed_state.programs.servers import postgres_server
from distributed_state.values.journal import JournalEntry, pack

BATCH = 1_000
_BATCHES = 12
CHANGES = BATCH * _BATCHES
_TEXT = b'{"role":"assistant","content":"' + b"There are three flights that day, 07:15, 11:40 and 18:05. " * 4 + b'"}'


Steps = Callable[[int], list[tuple[bytes, ...]]]


def field(version: int) -> list[tuple[bytes, ...]]:
    """The steps of a change that sets a field."""
    return [(b"s", b"step", b"%d" % version)]


def field_and_message(version: int) -> list[tuple[bytes, ...]]:
    """The steps of a change that sets a field and adds a message."""
    return [*field(version), (b"m", b"%d" % (version - 1), _TEXT)]


def entry(number: int, records: int, steps: Steps = field_and_message) -> JournalEntry:
    """The change with this number, from 0 on, of so many records that take turns."""
    version, record = number // records + 1, number % records
    return JournalEntry(
        number + 1, f"3f9a1c0b77de.{number + 1}.9c1e22aa", f"session:conversation-{record}", version,
        1_750_000_000_000 + number, "write", "", 0, pack(steps(version)), total_bytes=0,
    )  # fmt: skip


def batches(records: int, steps: Steps = field_and_message) -> list[list[JournalEntry]]:
    """The changes that are measured."""
    return [
        [entry(number, records, steps) for number in range(at, at + BATCH)] for at in range(0, BATCH * _BATCHES, BATCH)
    ]


def seconds_of(cold: ColdStore, records: int, steps: Steps = field_and_message) -> float:
    """Seconds that the store takes for all the batches of so many records, in a partition of its own."""
    cursor = cold.mint(records, None)
    assert cursor is not None
    offset, event = 0, ""
    given = batches(records, steps)
    began = time.perf_counter()
    for entries in given:
        assert cold.archive([Batch(records, cursor.epoch, offset, entries, event)])
        offset, event = entries[-1].offset, entries[-1].event
    return time.perf_counter() - began


_KEEP = """
INSERT INTO {table}r (namespace, record, partition, scope, epoch, version, created_ms, updated_ms, listed_ms, deleted)
VALUES ('n', %s, 0, 'session', '1-5c582acb', %s, %s, %s, %s, false)
ON CONFLICT (namespace, record) DO UPDATE
SET epoch = excluded.epoch, version = excluded.version, updated_ms = excluded.updated_ms
"""
More = Callable[[psycopg.Connection[Any], str, Sequence[JournalEntry]], None]


def _keep_heads(connection: psycopg.Connection[Any], table: str, entries: Sequence[JournalEntry]) -> None:
    """How each record stands after these, one row each."""
    last = {entry.record: entry for entry in entries}.values()
    rows = [(each.record, each.version, each.time_ms, each.time_ms, each.time_ms) for each in last]
    with connection.cursor() as cursor:
        cursor.executemany(_KEEP.format(table=table).encode(), rows)


def _bare(url: str, records: int, *more: More) -> float:
    with psycopg.connect(url.replace("+psycopg", "")) as connection:
        table = f"bare{records}_{time.monotonic_ns()}"
        connection.execute(f"CREATE TABLE {table} (LIKE changes INCLUDING ALL)")
        connection.execute(f"CREATE TABLE {table}m (LIKE messages INCLUDING ALL)")
        connection.execute(f"CREATE TABLE {table}r (LIKE records INCLUDING ALL) WITH (fillfactor = 50)")
        connection.commit()
        given = batches(records)
        began = time.perf_counter()
        for entries in given:
            changes: list[Any] = [_change(each, records) for each in entries]
            messages: list[Any] = [(each.offset % records, each.version, each.version, _TEXT) for each in entries]
            for name, rows in ((table, changes), (f"{table}m", messages)):
                marks = ", ".join(["%s"] * len(rows[0]))
                with connection.cursor() as cursor:
                    cursor.executemany(f"INSERT INTO {name} VALUES ({marks})", rows)
            for each in more:
                each(connection, table, entries)
            connection.commit()
        return time.perf_counter() - began


def _change(entry: JournalEntry, records: int) -> tuple[Any, ...]:
    place = (entry.offset % records, entry.version, entry.offset, entry.time_ms, entry.token, "1-5c582acb", entry.event)
    return (*place, entry.kind, entry.actor, None, entry.data[:20])


def archiving(sizes: Sequence[int], progress: Progress) -> list[Curve]:
    """The archiver's time over that of psycopg's executemany, which inserts the same rows; in turns, the median.

    Its time for one change: what is left of a second is how many changes one archiver carries. And beside a program
    that keeps a row for each record as well, as whoever lists conversations has to.
    """
    ratios: dict[int, list[float]] = {size: [] for size in sizes}
    alike: dict[int, list[float]] = {size: [] for size in sizes}
    taken: dict[int, list[float]] = {size: [] for size in sizes}
    with postgres_server() as database:
        for turn in range(3):
            for size in sizes:
                progress(f"{size} records, turn {turn + 1} of 3")
                cold = ColdStore.open(database.url, f"n{size}-{turn}")
                try:
                    taken[size].append(seconds_of(cold, size))
                finally:
                    cold.close()
                ratios[size].append(taken[size][-1] / _bare(database.url, size))
                alike[size].append(taken[size][-1] / _bare(database.url, size, _keep_heads))
    of = "active records"
    each = [median(taken[size]) / CHANGES * 1e6 for size in sizes]
    bare, heads = ([median(found[size]) for size in sizes] for found in (ratios, alike))
    return [
        Curve("archiver : bare psycopg", "", of, list(sizes), bare, 1 / 0.9),
        Curve("archiver into PostgreSQL", "us a change", of, list(sizes), each, 50.0),
        Curve("archiver : bare psycopg that keeps a row of each record", "", of, list(sizes), heads, 1 / 0.9),
    ]
