"""Sessions of Google ADK kept in a store: `DistributedSessionService(store)`, or `register()` for its command line."""

from distributed_state.adapters.adk.service import DistributedSessionService
from distributed_state.adapters.adk.uris import register

__all__ = ["DistributedSessionService", "register"]
