"""The databases of ADK's own service, read. Law: what is there is read as it is, and nothing is made beside it."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

from google.adk.sessions.database_session_service import DatabaseSessionService
from google.adk.sessions.schemas import v0, v1
from sqlalchemy import Connection, exc, inspect

from distributed_state import NotFound
from distributed_state.adapters.databases import Needed, demand


class _Reading(DatabaseSessionService):  # type: ignore[misc, unused-ignore] # it has no types
    """ADK's service for tables that are there, by the schema that they are of."""

    async def prepare_tables(self) -> None:
        """Nothing: ADK's own makes tables and indexes here."""

    async def look(self) -> None:
        """Find out which schema it is. Raises NotFound if the tables are of none."""
        try:
            async with self.db_engine.connect() as connection:
                self._db_schema_version = await connection.run_sync(_version)
        except exc.DatabaseError as error:
            if error.connection_invalidated or "not a database" not in str(error.orig):
                raise
            raise NotFound(f"no tables of ADK in the source: {error.orig}") from error


async def opened_service(stack: AsyncExitStack, url: str) -> Any:
    """The service of a database that has ADK's tables, closed with the stack. Raises NotFound if it has none."""
    service = _Reading(url)
    stack.push_async_callback(service.close)
    await service.look()
    return service


def _version(connection: Connection) -> str:
    looked = inspect(connection)
    columns = {each["name"] for each in looked.get_columns("events")} if looked.has_table("events") else set()
    is_former = "actions" in columns and "event_data" not in columns
    demand(connection, "ADK", _tables(v0 if is_former else v1))
    return "0" if is_former else "1"


def _tables(schema: Any) -> Needed:
    return {table.name: [column.name for column in table.columns] for table in schema.Base.metadata.sorted_tables}
