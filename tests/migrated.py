"""Brings empty databases to this release's tables by the statements that Alembic executed for the first of them.

Law: only a database at no revision is filled so, and a test can ask for Alembic itself (`real_migrations`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection, event

from distributed_state.cold import opening
from distributed_state.cold.engine import Sql
from distributed_state.cold.tables import HEAD

Upgrade = Callable[[Connection, str], None]


class Replayed:
    """Alembic takes thirty milliseconds for an empty database, and a run of all tests makes thousands of them."""

    def __init__(self, upgrade: Upgrade) -> None:
        self.upgrade = upgrade
        self._executed: dict[str, list[str]] = {}

    def __call__(self, connection: Connection, wanted: str) -> None:
        dialect = connection.dialect.name
        if wanted != HEAD or opening.revision(Sql(connection, "")) is not None:
            self.upgrade(connection, wanted)
        elif dialect in self._executed:
            # Through the driver: there are fifty, and SQLAlchemy takes as long for each as the database does.
            cursor = connection.connection.cursor()
            for statement in self._executed[dialect]:
                cursor.execute(statement)
            cursor.close()
        else:
            executed = self._recorded(connection, wanted)
            self._executed[dialect] = [";\n".join(executed)] if dialect == "postgresql" else executed

    def _recorded(self, connection: Connection, wanted: str) -> list[str]:
        executed = list[str]()

        def record(_: Any, __: Any, statement: str, parameters: Any, *___: Any) -> None:
            if not statement.startswith(("SELECT", "PRAGMA")):
                assert not parameters, f"a migration gives parameters, which are not replayed: {statement}"
                executed.append(statement)

        event.listen(connection, "before_cursor_execute", record)
        try:
            self.upgrade(connection, wanted)
        finally:
            event.remove(connection, "before_cursor_execute", record)
        return executed
