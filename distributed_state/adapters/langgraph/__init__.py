"""LangGraph on a store: `DistributedStateSaver(store)` keeps checkpoints, `DistributedStateStore(store)` memories."""

from distributed_state.adapters.stores import lacking

try:
    from distributed_state.adapters.langgraph.saver import DistributedStateSaver, resume, stream
    from distributed_state.adapters.langgraph.store import DistributedStateStore
except ImportError as error:
    raise lacking("langgraph", error) from error

__all__ = ["DistributedStateSaver", "DistributedStateStore", "resume", "stream"]
