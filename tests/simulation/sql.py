"""The SQL database of a run: the real cold tier on SQLite in memory, called inline, with faults around each call.

Law: a call happens as a whole or not at all, like its transaction; only its answer may be lost.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from sqlalchemy import event, select

from distributed_state.cold import opening
from distributed_state.cold.engine import Database
from distributed_state.cold.store import ColdStore
from distributed_state.cold.tables import branches, changes, metadata, quarantine, records
from distributed_state.cold.values import RESOLVED
from distributed_state.errors import ColdUnavailable
from tests.simulation.world import EPOCH, Future, Process, World

_KEPT_ASIDE = ("replaced by", "acknowledged under epoch", RESOLVED)


class SimulatedSql:
    """One database, for all replicas of a run."""

    # Shared by the process, so that statements are compiled and tables created only once.
    _database: Database | None = None
    _empty: sqlite3.Connection | None = None
    _present: SimulatedSql | None = None

    def __init__(self, world: World) -> None:
        self.world = world
        self.loss = 0.0  # fraction of calls that are lost: half before they begin, half after they have committed
        self.away_until = 0.0
        self.frozen_until = 0.0
        self.calls = self.lost = 0
        self.is_older = False  # whether it was restored
        SimulatedSql._present = self
        if SimulatedSql._database is None:
            SimulatedSql._database = Database("memory")
            event.listen(SimulatedSql._database._engine, "connect", _with_this_clock)
            opening.ready(SimulatedSql._database, True)
            SimulatedSql._database.opened = True
            SimulatedSql._empty = self.photograph()
        self.database = SimulatedSql._database
        self.database.away = ""
        # A new connection: statements that SQLite prepared on the old one refer to the old database.
        self.database._engine.dispose()
        self._restore(SimulatedSql._empty)

    def _raw(self) -> Any:
        assert SimulatedSql._database is not None, "it is made first"
        return SimulatedSql._database._engine.raw_connection().driver_connection

    def photograph(self) -> sqlite3.Connection:
        """A copy of the whole database."""
        copy = sqlite3.connect(":memory:")
        self._raw().backup(copy)
        return copy

    def _restore(self, photograph: sqlite3.Connection) -> None:
        photograph.backup(self._raw())

    def put_back(self, photograph: sqlite3.Connection) -> None:
        """Restore an earlier state of the database."""
        self.world.note("sql is older")
        self.is_older = True
        self._restore(photograph)

    def contents(self) -> bytes:
        """Every value of every row."""
        with self.database.read() as connection:
            rows = [row for table in metadata.sorted_tables for row in connection.execute(select(table))]
        return b"\n".join(value if isinstance(value, bytes) else str(value).encode() for row in rows for value in row)

    def refused(self) -> list[str]:
        """The rows in quarantine, except those that were quarantined because another epoch had replaced them."""
        q = quarantine.c
        with self.database.read() as connection:
            rows = connection.execute(select(q.record, q.version, q.reason)).all()
        return [f"{row.record} {row.version}: {row.reason}" for row in rows if not row.reason.startswith(_KEPT_ASIDE)]

    def given(self) -> list[tuple[str, str, int, str]]:
        """Each archived commit: record, epoch, version and event. Commits packed into blocks are left out."""
        c, r, b = changes.c, records.c, branches.c
        with self.database.read() as connection:
            rows = connection.execute(select(r.record, c.epoch, c.version, c.event).where(c.record == r.key)).all()
            aside = connection.execute(select(b.record, b.epoch, b.version, b.event)).all()
        return [(row.record, row.epoch, row.version, row.event) for row in (*rows, *aside)]

    def cold(self, namespace: str, snapshot_every: int) -> ColdStore:
        """The cold tier of one replica."""
        return ColdStore(self.database, namespace, snapshot_every, ExitStack())

    def fill_disk(self, seconds: float) -> None:
        """Let the database not grow for this many seconds."""
        raw = self._raw()
        used = raw.execute("PRAGMA page_count").fetchone()[0]
        raw.execute(f"PRAGMA max_page_count = {used}")
        self.world.after(seconds, lambda: raw.execute("PRAGMA max_page_count = 1073741823"))

    def _time(self) -> float:
        return self.world.chance.expovariate(1000)

    async def run(
        self, process: Process, call: Callable[..., Any], arguments: tuple[Any, ...], lend: Callable[[Future], None]
    ) -> Any:
        """The result or error of the call. It continues if its caller is cancelled; then `lend` receives it."""
        self.calls += 1
        outcome = Future()
        lend(outcome)
        self.world.after(self._time(), lambda: self._begin(process, call, arguments, outcome))
        return await outcome

    def _begin(self, process: Process, call: Callable[..., Any], arguments: tuple[Any, ...], outcome: Future) -> None:
        world = self.world
        if process.is_dead:
            return
        if self.frozen_until > world.now:
            world.after(self.frozen_until - world.now, lambda: self._begin(process, call, arguments, outcome))
            return
        fate = world.chance.random() / self.loss if self.loss else 1.0
        name = getattr(call, "__name__", type(call).__name__)
        if self.away_until > world.now or fate < 0.5:
            world.note("sql refused", process.name, name)
            self.lost += 1
            world.after(self._time(), lambda: outcome.settle(error=ColdUnavailable("SQL: no connection")))
            return
        value: Any = None
        error: BaseException | None = None
        try:
            value = call(*arguments)
        except Exception as problem:  # noqa: BLE001 - whoever awaits the call gets what it raised
            error = problem
        world.note("sql", process.name, name, f"{type(error).__name__}: {error}"[:100] if error else "")
        if error is None and fate < 1.0:
            world.note("sql answer lost", process.name, name)
            self.lost += 1
            error = ColdUnavailable("SQL: the connection was lost; it may have committed")
        world.after(self._time(), lambda: outcome.settle(value, error))


def _with_this_clock(raw: Any, _: object) -> None:
    """Replace the clock of SQLite, which is the machine's."""
    raw.create_function("julianday", 1, lambda _: (EPOCH + SimulatedSql._present.world.now) / 86400.0 + 2440587.5)
