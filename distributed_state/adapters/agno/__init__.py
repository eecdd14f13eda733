"""Agno's sessions, runs and user memories kept in a store: `DistributedDb(store)`, `AsyncDistributedDb(store)`."""

from distributed_state.adapters.stores import lacking

try:
    from distributed_state.adapters.agno.databases import AsyncDistributedDb, DistributedDb, stream
except ImportError as error:
    raise lacking("agno", error) from error

__all__ = ["AsyncDistributedDb", "DistributedDb", "stream"]
