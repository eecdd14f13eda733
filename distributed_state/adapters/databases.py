"""Databases from which threads are copied. Law: they are read, and no framework makes or changes a table in them.

Most classes of frameworks make their tables where they find none: what has to be there is looked for before.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, create_engine, exc, inspect
from sqlalchemy.pool import NullPool

from distributed_state import NotFound

Needed = Mapping[str, Collection[str]]  # columns by table


def read_only(path: str) -> str:
    """The URI by which SQLite opens a file for reading alone."""
    return f"{Path(path).resolve().as_uri()}?mode=ro"


def read_only_url(path: str, driver: str = "sqlite") -> str:
    """The same for SQLAlchemy."""
    return f"{driver}:///{read_only(path)}&uri=true"


def demand_in_file(path: str, framework: str, needed: Needed) -> None:
    """Raise NotFound unless a file of SQLite has these tables with these columns."""
    engine = create_engine(read_only_url(path), poolclass=NullPool)
    try:
        with engine.connect() as connection:
            demand(connection, framework, needed)
    except exc.DatabaseError as error:
        raise NotFound(f"no tables of {framework} in the source: {error.orig}") from error


def demand_in_postgresql(url: str, framework: str, needed: Needed) -> None:
    """Raise NotFound unless a database of PostgreSQL has these tables with these columns."""
    import psycopg

    # By its own reading of the URL, which may name several hosts.
    connect: Any = psycopg.connect
    engine = create_engine("postgresql+psycopg://", creator=lambda: connect(url), poolclass=NullPool)
    with engine.connect() as connection:
        demand(connection, framework, needed)


def demand(connection: Connection, framework: str, needed: Needed) -> None:
    """Raise NotFound unless these tables are there with these columns."""
    looked = inspect(connection)
    for table in needed:
        if not looked.has_table(table):
            raise NotFound(f"no tables of {framework} in the source: it has no {table!r}")
    for table, columns in needed.items():
        there = {column["name"] for column in looked.get_columns(table)}
        if lacking := sorted(set(columns) - there):
            raise NotFound(
                f"no tables of {framework} in the source that can be read: {table!r} has no column {lacking[0]!r}. If "
                f"they were made by an older release, let {framework} bring them up to date first"
            )
