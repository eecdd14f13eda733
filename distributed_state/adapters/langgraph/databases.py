"""The savers of LangGraph's own databases, by URL. Law: they are opened only where their tables are, and to be read.

Design: section 22.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from langgraph.checkpoint.base import BaseCheckpointSaver

from distributed_state import InvalidValue
from distributed_state.adapters.adopting import sqlite_path
from distributed_state.adapters.databases import demand_in_file, demand_in_postgresql, read_only

_NAMED = ("thread_id", "checkpoint_ns", "checkpoint_id")
_SQLITE = {"checkpoints": (*_NAMED, "metadata"), "writes": (*_NAMED, "task_id", "idx")}
_POSTGRES = {
    "checkpoints": (*_NAMED, "metadata"),
    "checkpoint_blobs": ("thread_id", "checkpoint_ns", "channel", "version"),
    "checkpoint_writes": (*_NAMED, "task_id", "task_path"),
}


def saver_of(url: str) -> Any:
    """What opens the saver of a URL of PostgreSQL or SQLite. Raises NotFound if it has no tables of LangGraph."""
    path = sqlite_path(url)
    if path is not None:
        demand_in_file(path, "LangGraph", _SQLITE)
        return _sqlite_saver(path)
    if url.startswith(("postgres://", "postgresql")):
        from langgraph.checkpoint.postgres import PostgresSaver

        url = "postgresql://" + url.partition("://")[2]
        demand_in_postgresql(url, "LangGraph", _POSTGRES)
        return PostgresSaver.from_conn_string(url)
    raise InvalidValue(f"{url.partition('://')[0]}:// is none of postgresql, sqlite; name a saver as module:NAME")


@contextmanager
def _sqlite_saver(path: str) -> Iterator[BaseCheckpointSaver[Any]]:
    from langgraph.checkpoint.sqlite import SqliteSaver

    with closing(sqlite3.connect(read_only(path), uri=True, check_same_thread=False)) as connection:
        saver = SqliteSaver(connection)
        saver.is_setup = True  # it would make its tables and another journal before it reads
        yield saver
