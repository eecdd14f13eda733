"""Tells errors of a row from errors of SQL. Law: a row is blamed only for an error that waiting would not cure.

| fault | errors | what becomes of the row |
|---|---|---|
| `ROW` | a value that does not fit: too long for an index, out of range, not in the database's encoding, refused by a constraint or by a trigger of the owner's; a history that cannot be read | it is put into quarantine, the others go on |
| `PLACE` | a part of the database takes nothing: a tablespace is full, a file is damaged, a right or a column is missing | its partition waits there and says so, the others go on |
| none | SQL is away, busy or being restored; SQLite is full, which is one file | all wait |

PostgreSQL's codes are in its manual, appendix A. An error of a kind that is not known here waits: nothing is lost by that.

Design: section 9.
"""  # noqa: E501  # a table's row is a line

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from sqlalchemy import Connection, exc

from distributed_state.errors import ColdUnavailable, CorruptState

# data_exception, integrity_constraint_violation, with_check_option_violation, program_limit_exceeded, PL/pgSQL's RAISE
_ROW = ("22", "23", "44", "54", "P0")
# connection_exception, invalid_transaction_state, transaction_rollback, insufficient_resources,
# object_not_in_prerequisite_state, operator_intervention; tables that are not there: a dump is being restored
_AWAY = ("08", "25", "40", "53", "55", "57", "42P01", "3F000")
_FULL = "53100"


class Fault(Enum):
    """The cause for which SQL refused rows."""

    ROW = "row"
    PLACE = "place"


class Stopped(ColdUnavailable):
    """SQL refuses an entry for now. `places` are its offset and the reason, by partition; nothing was archived."""

    def __init__(self, places: Mapping[int, tuple[int, str]]) -> None:
        super().__init__("; ".join(f"partition {each}: {why}" for each, (_, why) in places.items()))
        self.places = places


def fault_of(connection: Connection, error: Exception) -> Fault | None:
    """Whose fault an error is; None if all that was sent may be taken later, or the error is a bug of ours."""
    if isinstance(error, (ValueError, OverflowError, CorruptState)):
        return Fault.ROW
    driver: Any = connection.dialect.dbapi
    original = error.orig if isinstance(error, exc.DBAPIError) else error
    if not isinstance(original, driver.Error) or (isinstance(error, exc.DBAPIError) and error.connection_invalidated):
        return None
    if isinstance(original, (driver.DataError, driver.IntegrityError)):
        return Fault.ROW
    code = getattr(original, "sqlstate", None) or getattr(original, "pgcode", None)
    if code is None or (code.startswith(_AWAY) and code != _FULL):
        return None
    return Fault.ROW if code.startswith(_ROW) else Fault.PLACE


def is_collision(connection: Connection, error: Exception) -> bool:
    """Whether a row stands where another one was to be inserted, or a constraint refused it."""
    driver: Any = connection.dialect.dbapi
    return isinstance(error.orig if isinstance(error, exc.DBAPIError) else error, driver.IntegrityError)


def reason_of(error: Exception) -> str:
    """Why SQL refused something, in one line."""
    return f"{type(error).__name__}: {getattr(error, 'orig', None) or error}".strip().partition("\n")[0]
