"""LangGraph on a store: `DistributedStateSaver(store)` keeps checkpoints, `DistributedStateStore(store)` memories."""

from distributed_state.adapters.langgraph.saver import DistributedStateSaver
from distributed_state.adapters.langgraph.store import DistributedStateStore

__all__ = ["DistributedStateSaver", "DistributedStateStore"]
