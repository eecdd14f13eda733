"""A page of records that have a tag, or whose ids begin alike, takes as long among few as among many."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any

import psycopg

from deploy.load.curves.curve import Curve, Progress, flat
from distributed_state import AsyncStateStore, StateStore
from distributed_state.programs.servers import postgres_server, redis_server

_ROUNDS = 100
_PAGE = 50  # so many records have a tag of their own
_AT_ONCE = 500
_SHOWN = {
    "tag": "50 records of a tag of theirs",
    "common": "a page of 50 of a tag that all have, at any depth",
    "prefix": "50 records whose ids begin alike",
    "fresh": "50 records of a tag of theirs, fresh",
}


def _id(number: int) -> str:
    return f"{number // _PAGE:06}-{number % _PAGE:02}"


async def _fill(url: str, settings: dict[str, Any], records: int, progress: Progress) -> None:
    async with AsyncStateStore.open(url, **settings) as store:
        for first in range(0, records, _AT_ONCE):
            progress(f"{first} of {records} records are tagged")
            some = range(first, min(first + _AT_ONCE, records))
            writes = (
                store.session(_id(number)).write(set={"a": 1}, tag={"group": f"{number // _PAGE:06}", "of": "all"})
                for number in some
            )
            await asyncio.gather(*writes)
        await store.admin.archive()


class _Records:
    """A store over so many records."""

    def __init__(self, url: str, database: str, records: int, progress: Progress, stack: ExitStack) -> None:
        name, plain = f"tagged{records}", database.replace("+psycopg", "")
        with psycopg.connect(plain, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        settings: dict[str, Any] = {"archive": database.rpartition("/")[0] + f"/{name}", "namespace": name}
        asyncio.run(_fill(url, settings, records, progress))
        with psycopg.connect(plain.rpartition("/")[0] + f"/{name}", autocommit=True) as connection:
            connection.execute("VACUUM ANALYZE")  # which PostgreSQL does by itself within a minute or so
        self.store = stack.enter_context(StateStore.open(url, archiver=False, **settings))
        self.groups, self._random = records // _PAGE, random.Random(records)
        self.cursors: list[str | None] = [None]
        while len(page := self.store.sessions(tags={"of": "all"}, limit=1_000, after=self.cursors[-1])) == 1_000:
            self.cursors.append(page[-1].cursor)

    def read(self) -> dict[str, float]:
        """The milliseconds of each page, of a group that is drawn."""
        group, cursor = f"{self._random.randrange(self.groups):06}", self._random.choice(self.cursors)
        calls: dict[str, tuple[Callable[[], Sequence[Any]], int]] = {
            "tag": (lambda: self.store.sessions(tags={"group": group}, limit=_PAGE), _PAGE),
            "common": (lambda: self.store.sessions(tags={"of": "all"}, limit=_PAGE, after=cursor), 0),
            "prefix": (lambda: self.store.sessions(prefix=f"{group}-", limit=_PAGE), _PAGE),
            "fresh": (lambda: self.store.sessions(tags={"group": group}, limit=_PAGE, fresh=True), _PAGE),
        }
        found = {}
        for name, (call, expected) in calls.items():
            began = time.perf_counter()
            rows = call()
            found[name] = (time.perf_counter() - began) * 1000
            assert len(rows) >= expected, f"{name}: {len(rows)} of {expected}"
        return found


def tagged(sizes: Sequence[int], progress: Progress, *, rounds: int = _ROUNDS) -> list[Curve]:
    """Listings by tag and by prefix among so many records, all sizes in turns."""
    taken: dict[str, dict[int, list[float]]] = {name: {size: [] for size in sizes} for name in _SHOWN}
    with ExitStack() as stack:
        server, database = stack.enter_context(redis_server()), stack.enter_context(postgres_server())
        records = {size: _Records(server.url, database.url, size, progress, stack) for size in sizes}
        for round in range(rounds):
            progress(f"round {round} of {rounds}")
            for size in sizes:
                for name, milliseconds in records[size].read().items():
                    taken[name][size].append(milliseconds)
    return [
        flat(shown, "ms", "records", sizes, [median(taken[name][size]) for size in sizes], 1.5)
        for name, shown in _SHOWN.items()
    ]
