"""What a config of LangGraph's names. Law: an id that is empty is none.

Design: section 22.
"""

from __future__ import annotations

from typing import Any

from langgraph.checkpoint.base import get_checkpoint_id

from distributed_state import InvalidValue


def thread_of(config: Any) -> str:
    """The thread's id, as text. Raises InvalidValue if there is none: all runs that forgot it would be one thread."""
    id = config["configurable"].get("thread_id")
    if id is None:
        raise InvalidValue("a run says in config['configurable']['thread_id'] which thread it is of")
    return str(id)


def namespace_of(config: Any) -> str:
    """The namespace of checkpoints; the root's is empty."""
    return str(config["configurable"].get("checkpoint_ns") or "")


def id_of(config: Any) -> str | None:
    """The checkpoint's id, None if the newest is meant."""
    return get_checkpoint_id(config) or None


def root_of(config: Any, metadata: Any) -> str | None:
    """The id of the root namespace's checkpoint from which a subgraph runs, None if nothing says so."""
    named = config["configurable"].get("checkpoint_map") or metadata.get("parents") or {}
    return named.get("")
