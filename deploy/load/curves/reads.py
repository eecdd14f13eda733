"""Reads of an archive take as long among few sessions as among many. Law: all sizes in one run, in turns.

Each size has a database of its own, because tables and indexes of more rows are deeper. Redis has none of the sessions,
so that each is read from SQL the first time. All have the same shape: 8 commits of a field and a message.
"""

from __future__ import annotations

import logging
import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any

import psycopg

from deploy.load.curves.archiving import field_and_message
from deploy.load.curves.curve import Curve, Progress, flat
from distributed_state import StateStore
from distributed_state.cold.store import ColdStore
from distributed_state.cold.values import Batch
from distributed_state.programs.servers import PostgresServer, postgres_server, redis_server
from distributed_state.values.journal import JournalEntry, pack
from distributed_state.values.keys import Keys

_VERSIONS = 8
_PARTITIONS = 64
_AT_ONCE = 500  # sessions in one transaction
_ROUNDS = 200
_PAGE = 50
_READS = {
    "page": "a page of 50 sessions, at any depth",
    "hydrate": "read of a session that left Redis",
    "history": "a session's history of 8 commits",
    "at": "a session's state at a version",
    "fork": "fork of a session",
}


def _id(number: int) -> str:
    return f"conversation-{number:06}"


def _entries(numbers: Sequence[int], keys: Keys, offsets: dict[int, int]) -> dict[int, list[JournalEntry]]:
    """All commits of these sessions by partition, each after the last of that."""
    found: dict[int, list[JournalEntry]] = defaultdict(list)
    for number in numbers:
        record = f"session:{_id(number)}"
        partition = keys.partition_of(record)
        for version in range(1, _VERSIONS + 1):
            offsets[partition] = offset = offsets[partition] + 1
            found[partition].append(JournalEntry(
                offset, f"3f9a1c0b77de.{number}-{version}.9c1e22aa", record, version,
                1_750_000_000_000 + number * _VERSIONS + version, "write", "", 0,
                pack(field_and_message(version)), total_bytes=0,
            ))  # fmt: skip
    return found


def fill(archive: str, namespace: str, sessions: int, progress: Progress) -> None:
    """Archive so many sessions, without Redis, as many at a time as are quick."""
    keys = Keys(namespace, _PARTITIONS)
    cold = ColdStore.open(archive, namespace)
    try:
        cold.register(_PARTITIONS)
        epochs = {each: minted.epoch for each in range(_PARTITIONS) if (minted := cold.mint(each, None))}
        offsets, events = defaultdict[int, int](int), defaultdict[int, str](str)
        for first in range(0, sessions, _AT_ONCE):
            progress(f"{first} of {sessions} sessions are archived")
            found = _entries(range(first, min(first + _AT_ONCE, sessions)), keys, offsets)
            batches = [
                Batch(partition, epochs[partition], entries[0].offset - 1, entries, events[partition])
                for partition, entries in found.items()
            ]
            assert cold.archive(batches).keys() == set(found), "somebody else archives"
            events.update((partition, entries[-1].event) for partition, entries in found.items())
    finally:
        cold.close()


class Archive:
    """A store over so many sessions, and what is read of it one after the other."""

    def __init__(self, url: str, database: PostgresServer, sessions: int, progress: Progress, stack: ExitStack) -> None:
        namespace = f"reads{sessions}"
        server = database.url.replace("+psycopg", "")
        with psycopg.connect(server, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {namespace}")
        archive = database.url.rpartition("/")[0] + f"/{namespace}"
        fill(archive, namespace, sessions, progress)
        with psycopg.connect(archive.replace("+psycopg", ""), autocommit=True) as connection:
            connection.execute("VACUUM ANALYZE")  # which PostgreSQL does by itself within a minute or so
        settings: dict[str, Any] = {"archive": archive, "namespace": namespace, "archiver": False}
        self.store = stack.enter_context(StateStore.open(url, partitions=_PARTITIONS, **settings))
        self._random = random.Random(sessions)
        self._cursors: list[str | None] = [None]
        while len(page := self.store.sessions(limit=_AT_ONCE, after=self._cursors[-1])) == _AT_ONCE:
            self._cursors.append(page[-1].cursor)
        self.numbers = list(range(sessions))
        self._random.shuffle(self.numbers)
        self._touch(Keys(namespace, _PARTITIONS))

    def _touch(self, keys: Keys) -> None:
        """Read a session of each partition, so that all of these have begun."""
        some = {keys.partition_of(f"session:{_id(number)}"): number for number in self.numbers}
        logging.disable()  # SQL has what an empty Redis has not: of each partition it is said that Redis lost it
        for number in some.values():
            self.store.session(_id(number)).get("step")
            self.numbers.remove(number)
        logging.disable(logging.NOTSET)

    def read(self) -> dict[str, float]:
        """The milliseconds of each read, of a session that was not read before."""
        session = self.store.session(_id(self.numbers.pop()))
        cursor = self._random.choice(self._cursors)
        calls: dict[str, Callable[[], Any]] = {
            "page": lambda: self.store.sessions(limit=_PAGE, after=cursor),
            "hydrate": lambda: session.get("step"),
            "history": lambda: session.history(limit=_PAGE),
            "at": lambda: session.at(version=_VERSIONS // 2),
            "fork": lambda: session.fork(f"{session.id}-fork"),
        }
        found = {}
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            found[name] = (time.perf_counter() - began) * 1000
        return found


def reads(sizes: Sequence[int], progress: Progress, *, rounds: int = _ROUNDS) -> list[Curve]:
    """A page of the listing, and of one session after the other the first read, history, a former state, and a fork."""
    taken: dict[str, dict[int, list[float]]] = {name: {size: [] for size in sizes} for name in _READS}
    with ExitStack() as stack:
        server, database = stack.enter_context(redis_server()), stack.enter_context(postgres_server())
        archives = {size: Archive(server.url, database, size, progress, stack) for size in sizes}
        left = min(len(archive.numbers) for archive in archives.values())
        if not left:
            raise ValueError(
                f"{min(sizes)} sessions are too few: one of each of {_PARTITIONS} partitions is read before"
            )
        for at in range(min(rounds, left)):
            progress(f"round {at + 1} of {rounds}")
            for size, archive in archives.items():
                for name, each in archive.read().items():
                    taken[name][size].append(each)
    return [
        flat(_READS[name], "ms", "sessions in SQL", sizes, [median(each) for each in found.values()])
        for name, found in taken.items()
    ]
