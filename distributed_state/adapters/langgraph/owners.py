"""Whose a thread is: an entry of "configurable", by its name. Law: no thread begins without, where a saver has owners.

Design: section 22.
"""

from __future__ import annotations

from typing import Any

from distributed_state import InvalidValue
from distributed_state.adapters.langgraph.configs import id_of
from distributed_state.adapters.langgraph.threads import Thread


def owner_of(config: Any, name: str | None) -> str | None:
    """The owner that a config names, None if it names none."""
    owner = (config or {}).get("configurable", {}).get(name) if name else None
    return None if owner is None else str(owner)


def demand_owner(thread: Thread, config: Any, name: str | None) -> None:
    """Refuse to begin a thread that nobody would own. One that is there is owned by who began it.

    Configs that LangGraph hands out, of a state or of its history, name a thread and no owner.
    """
    if name is None or owner_of(config, name) is not None:
        return
    if thread.known.head is None if thread.known.known else id_of(config) is None:
        raise InvalidValue(
            f"thread {thread.id!r:.80} would begin without an owner: with user={name!r}, "
            f'a run says in config["configurable"][{name!r}] whose thread it is'
        )
