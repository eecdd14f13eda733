"""Whose background work a thread or task does. Law: it is for logs alone, and costs nothing to import.

Design: section 27.
"""

from __future__ import annotations

from contextvars import ContextVar

REPLICA: ContextVar[str] = ContextVar("distributed_state_replica", default="")
"""The replica of the store that began this work; "" in a caller's."""
