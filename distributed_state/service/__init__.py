"""The store over HTTP, for workers in containers: `distributed-state serve`. A program beside the core."""

from distributed_state.service.app import Service
from distributed_state.service.limits import Limits
from distributed_state.service.running import serve

__all__ = ["Limits", "Service", "serve"]
