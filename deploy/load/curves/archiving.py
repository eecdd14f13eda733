"""What it takes to carry commits into PostgreSQL, beside a program that does nothing but insert the same rows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import psycopg

from deploy.load.curves.curve import Curve, Progress
from distributed_state.cold.store import ColdStore
from distributed_state.cold.values import Batch
from distributed_state.programs.servers import postgres_server
from distributed_state.values.journal import JournalEntry, pack

_BATCH = 1_000
_BATCHES = 12
_TEXT = b'{"role":"assistant","content":"' + b"There are three flights that day, 07:15, 11:40 and 18:05. " * 4 + b'"}'


def _entry(number: int, records: int) -> JournalEntry:
    version, record = number // records + 1, number % records
    steps = [(b"s", b"step", b"%d" % version), (b"m", b"%d" % (version - 1), _TEXT)]
    name = f"session:conversation-{record}"
    return JournalEntry(
        number + 1, f"3f9a1c0b77de.{number + 1}.9c1e22aa", name, version, 1_750_000_000_000 + number, "write", "", 0,
        pack(steps), total_bytes=0,
    )  # fmt: skip


def _batches(records: int) -> list[list[JournalEntry]]:
    return [
        [_entry(number, records) for number in range(at, at + _BATCH)] for at in range(0, _BATCH * _BATCHES, _BATCH)
    ]


def seconds_of(cold: ColdStore, records: int) -> float:
    """Seconds that the store takes for all the batches of so many records, in a partition of its own."""
    cursor = cold.mint(records, None)
    assert cursor is not None
    offset, event = 0, ""
    began = time.perf_counter()
    for entries in _batches(records):
        assert cold.archive([Batch(records, cursor.epoch, offset, entries, event)])
        offset, event = entries[-1].offset, entries[-1].event
    return time.perf_counter() - began


def _bare(url: str, records: int) -> float:
    with psycopg.connect(url.replace("+psycopg", "")) as connection:
        table = f"bare{records}_{time.monotonic_ns()}"
        connection.execute(f"CREATE TABLE {table} (LIKE changes INCLUDING ALL)")
        connection.execute(f"CREATE TABLE {table}m (LIKE messages INCLUDING ALL)")
        connection.commit()
        began = time.perf_counter()
        for entries in _batches(records):
            changes: list[Any] = [_change(each, records) for each in entries]
            messages: list[Any] = [(each.offset % records, each.version, each.version, _TEXT) for each in entries]
            for name, rows in ((table, changes), (f"{table}m", messages)):
                marks = ", ".join(["%s"] * len(rows[0]))
                with connection.cursor() as cursor:
                    cursor.executemany(f"INSERT INTO {name} VALUES ({marks})", rows)
            connection.commit()
        return time.perf_counter() - began


def _change(entry: JournalEntry, records: int) -> tuple[Any, ...]:
    place = (entry.offset % records, entry.version, entry.offset, entry.time_ms, entry.token, "1-5c582acb", entry.event)
    return (*place, entry.kind, entry.actor, None, entry.data[:20])


def archiving(sizes: Sequence[int], progress: Progress) -> Curve:
    """The archiver's time over that of psycopg's executemany, which inserts the same rows; in turns, the median."""
    costs = []
    with postgres_server() as database:
        for size in sizes:
            ratios = []
            for turn in range(3):
                progress(f"{size} records, turn {turn + 1} of 3")
                cold = ColdStore.open(database.url, f"n{size}-{turn}")
                try:
                    ratios.append(seconds_of(cold, size) / _bare(database.url, size))
                finally:
                    cold.close()
            costs.append(median(ratios))
    return Curve("archiver : bare psycopg", "", "active records", list(sizes), costs, 1 / 0.9)
