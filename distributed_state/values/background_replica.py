"""Whose background work runs. Law: it is set where a job begins, and read by logs alone.

Design: section 27.
"""

from __future__ import annotations

from contextvars import ContextVar

REPLICA: ContextVar[str] = ContextVar("distributed_state_replica", default="")
"""The replica of the store that began the present job; "" outside of any."""
