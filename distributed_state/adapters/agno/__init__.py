"""Agno's sessions, runs and user memories kept in a store: `DistributedDb(store)`, `AsyncDistributedDb(store)`."""

from distributed_state.adapters.agno.databases import AsyncDistributedDb, DistributedDb

__all__ = ["AsyncDistributedDb", "DistributedDb"]
