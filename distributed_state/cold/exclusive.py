"""An archive that one embedded store has to itself. Law: free again when that store is closed or its process dies.

Of SQLite the whole file, by a lock on another one beside it. Of PostgreSQL the namespace, by an advisory lock. A
transaction holds that, open for as long as the store is, on a connection apart: behind PgBouncer a session's lock would
stay with a connection that is lent to others. Such a transaction has no snapshot, so it holds up no vacuum.

Design: section 14.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from filelock import FileLock, Timeout
from sqlalchemy import Connection, func, select, text
from sqlalchemy.engine import URL

from distributed_state.cold import private_files
from distributed_state.cold.engine import Database
from distributed_state.cold.urls import parse_url, sqlite_file
from distributed_state.errors import ConfigurationError

_ADVICE = "another store has it open embedded; give all workers one Redis url to share it"
_PATIENCE = 1.0  # PostgreSQL notices a moment later that a process was killed
_UNLIMITED = text(
    "SELECT set_config(name, '0', true) FROM pg_settings "
    "WHERE name IN ('idle_in_transaction_session_timeout', 'transaction_timeout')"
)


@contextmanager
def file(url: str | URL) -> Iterator[None]:
    """Have SQLite's file alone; nothing where there is none. Raises ConfigurationError if somebody else has it."""
    path = sqlite_file(parse_url(url))
    if path is None:
        yield
        return
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise ConfigurationError(f"{path}: there is no folder {folder}")  # FileLock would make it
    private_files.create(f"{path}.lock")
    # Opened in one thread, perhaps closed in another.
    lock = FileLock(f"{path}.lock", blocking=False, thread_local=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise ConfigurationError(f"{path}: {_ADVICE}") from error
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be opened: {error}") from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def namespace(database: Database, name: str) -> Iterator[None]:
    """Have a namespace of PostgreSQL alone; nothing elsewhere. Raises ConfigurationError if somebody else has it."""
    if database.dialect != "postgresql":
        yield
        return
    digest = hashlib.blake2b(f"distributed-state embedded {name}".encode(), digest_size=8).digest()
    hold = select(func.pg_try_advisory_xact_lock(int.from_bytes(digest, signed=True)))

    def take(connection: Connection) -> None:
        deadline = time.monotonic() + _PATIENCE
        while not connection.execute(hold).scalar():
            if time.monotonic() > deadline:
                raise ConfigurationError(f"{database.name}, namespace {name!r}: {_ADVICE}")
            time.sleep(0.02)
        # Last, because it has no parameters: what has some keeps its snapshot until the next statement.
        connection.execute(_UNLIMITED)

    with database.apart(take):
        yield
