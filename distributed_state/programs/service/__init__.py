"""The store over HTTP, for workers in containers: `distributed-state serve`."""

from distributed_state.programs.service.app import Service
from distributed_state.programs.service.authentication import Access, Issuer, callers_policy
from distributed_state.programs.service.limits import Limits
from distributed_state.programs.service.running import serve

__all__ = ["Access", "Issuer", "Limits", "Service", "callers_policy", "serve"]
