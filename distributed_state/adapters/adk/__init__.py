"""Sessions of Google ADK kept in a store: `DistributedSessionService(store)`, or `register()` for its command line."""

from distributed_state.adapters.stores import lacking

try:
    from distributed_state.adapters.adk.service import DistributedSessionService, register, stream
except ImportError as error:
    raise lacking("adk", error) from error

__all__ = ["DistributedSessionService", "register", "stream"]
