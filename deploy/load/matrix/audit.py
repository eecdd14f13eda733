"""Reads back what is there, by a store that wrote nothing and from the rows of SQL. Law: it does not judge."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import sql

from deploy.load.matrix.histories import Found, names_in
from distributed_state import StateError, StateStore
from distributed_state.programs.servers import RedisServer
from distributed_state.values.model import Ref

_DRAINED = 12.0
_READ = 4.0
_ASIDE = ("branches", "quarantine")
_CAUSES = ("cause", "reason")


@dataclass(slots=True)
class Audit:
    """What was found: each record, what the doctor advises, how many epochs followed others, and each event's id."""

    found: dict[str, Found] = field(default_factory=dict)
    advice: list[str] = field(default_factory=list)
    epochs: int = 0
    events: dict[tuple[int, str, int], str] = field(default_factory=dict)
    undrained: str = ""


def audit(settings: dict[str, Any], records: Iterable[str], servers: Iterable[RedisServer]) -> Audit:
    """Archive what is left, and read everything. The writers still have their stores open."""
    result = Audit()
    with StateStore.open(**settings, archiver=False) as store:
        result.undrained = _drain(store)
        rows = Rows(settings["archive"], settings["namespace"])
        warm = frozenset(name for server in servers for name in _in_redis(server))
        for record in records:
            result.found[record] = _found(store, record, rows, warm)
        result.epochs, result.events = rows.epochs, rows.events
        with suppress(StateError):
            result.advice = [f"{each.name}: {each.found}" for each in store.admin.doctor() if not each.ok]
    return result


def _drain(store: StateStore) -> str:
    """Archive everything; what is left and why if it does not end."""
    said = ""
    deadline = time.monotonic() + _DRAINED
    while time.monotonic() < deadline:
        try:
            store.admin.archive()
            left = store.admin.stats()["unarchived"]
            said = f"{left} commits are not archived"
            if not left:
                return ""
        except StateError as error:
            said = f"{type(error).__name__}: {error}"
        time.sleep(0.2)
    return said


def _found(store: StateStore, record: str, rows: Rows, warm: frozenset[str]) -> Found:
    problem = ""
    shown: list[str] = []
    count = version = 0
    try:
        session = store.session(record)
        fields = _with_retry(lambda: session.get_all(fresh=True))
        version = _with_retry(lambda: session.version(fresh=True))
        shown = [name for message in _with_retry(session.raw_messages) for name in names_in(message["content"])]
        count = fields.get("n", 0)
    except StateError as error:
        problem = f"{type(error).__name__}: {error}"
    return Found(
        record, version, count, tuple(shown), tuple(rows.changes(record)), rows.aside("branches", record),
        rows.aside("quarantine", record), warm, problem,
    )  # fmt: skip


def _in_redis(server: RedisServer) -> Iterator[str]:
    """The writes of which anything stands in a hash or a stream there."""
    with server.connect() as connection:
        at = "0"
        while True:
            at, keys = connection.ask("SCAN", at, "COUNT", 1000)
            for key in keys:
                kind = connection.ask("TYPE", key)
                if kind == "hash":
                    yield from names_in("\n".join(connection.ask("HVALS", key)))
                elif kind == "stream":
                    entries = connection.ask("XRANGE", key, "-", "+")
                    yield from names_in("\n".join(text for _, entry in entries for text in entry))
            if at == "0":
                return


def _with_retry(read: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + _READ
    while True:
        try:
            return read()
        except StateError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


class Rows:
    """The rows of a namespace, read once. The names of writes stand in them as they were written."""

    def __init__(self, archive: str, namespace: str) -> None:
        with psycopg.connect(archive.replace("+psycopg", ""), connect_timeout=10) as connection:
            self._changes = connection.execute(
                "SELECT r.record, c.version, c.epoch, c.data || coalesce(string_agg(m.data, '' ORDER BY m.seq), '') "
                "FROM changes c JOIN records r ON r.key = c.record "
                "LEFT JOIN messages m ON m.record = c.record AND m.version = c.version WHERE r.namespace = %s "
                "GROUP BY r.record, c.record, c.version ORDER BY c.version",
                (namespace,),
            ).fetchall()
            query = 'SELECT partition, epoch, "offset", id FROM events WHERE namespace = %s'
            self.events = {(at, epoch, number): id for at, epoch, number, id in connection.execute(query, (namespace,))}
            row = connection.execute(
                "SELECT count(*) - count(DISTINCT partition) FROM cursors WHERE namespace = %s", (namespace,)
            ).fetchone()
            self.epochs = row[0] if row else 0
            self._aside = {table: list(_aside(connection, table, namespace)) for table in _ASIDE}

    def changes(self, record: str) -> Iterator[tuple[str, int, str]]:
        """The writes in a record's history, with epoch and version."""
        for name, version, epoch, data in self._changes:
            if name == Ref("session", record).text:
                yield from ((epoch, version, each) for each in names_in(bytes(data)))

    def aside(self, table: str, record: str) -> dict[str, str]:
        """The writes that were put aside there, with the cause that the row names."""
        place = Ref("session", record).text
        return {name: cause for kept, cause, names in self._aside[table] if kept == place for name in names}


def _aside(connection: psycopg.Connection[Any], table: str, namespace: str) -> Iterator[tuple[str, str, list[str]]]:
    known = [
        row[0]
        for row in connection.execute(
            "SELECT column_name FROM information_schema.columns WHERE table_name = %s AND table_schema = 'public'",
            (table,),
        )
    ]
    if "record" not in known:  # this release has no such table
        return
    query = sql.SQL("SELECT * FROM {} WHERE namespace = %s").format(sql.Identifier(table))
    cursor = connection.execute(query, (namespace,))
    columns = [column.name for column in cursor.description or ()]
    for row in cursor:
        fields = dict(zip(columns, row, strict=True))
        cause = next((str(fields[name]) for name in _CAUSES if fields.get(name)), "")
        names = [each for value in row if isinstance(value, bytes) for each in names_in(value)]
        yield fields["record"], cause, names
