"""The defaults of an agent's records. Law: put in once for the fleet, and shown for what cannot be read.

Design: section 12.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from distributed_state.agents.context import AgentContext
from distributed_state.agents.hooks import call
from distributed_state.errors import ConfigurationError, CorruptState
from distributed_state.records.record import AsyncRecord
from distributed_state.store.services import Handle, acting_by_default, with_stand_in

# A mapping, or a function that returns one and may take the record's id.
Defaults = Mapping[str, Any] | Callable[..., Any]


def check(agent: object, name: str) -> None:
    """Raise ConfigurationError if what the agent has under this name can be no defaults."""
    found = getattr(agent, name)
    if not callable(found) and not isinstance(found, Mapping):
        text = f"{type(agent).__name__}.{name} is a mapping or a function that returns one"
        raise ConfigurationError(f"{text}, not {type(found).__name__}")


async def put_in(context: AgentContext, record: AsyncRecord, defaults: Defaults) -> None:
    """Set those fields of a record that are not there yet, unless a replica of this agent did so before."""
    if not defaults:
        return
    services = context.services

    async def made() -> Mapping[str, Any]:
        if isinstance(defaults, Mapping):
            return defaults
        found: Mapping[str, Any] = await call(services.port, defaults, {"id": record.ref.id})
        return found

    with acting_by_default(context.persistent_id):
        await services.initialize(record, context.persistent_id, made)


def tolerant(context: AgentContext, handle: Handle, defaults: Defaults) -> Handle:
    """The handle, which gives the default for a field that cannot be read, and logs that."""

    def stand_in(error: CorruptState, field: str, default: Any) -> Any:
        log_unreadable(context, error, handle.ref.text, field)
        return copy.deepcopy(defaults.get(field)) if default is None and isinstance(defaults, Mapping) else default

    return with_stand_in(handle, stand_in)


def log_unreadable(context: AgentContext, error: CorruptState, record: str, field: str) -> None:
    """Warn of stored state that cannot be read; "*" is every field."""
    fields = {"record": record[:200], "field": field, "error": str(error)}
    context.display.log("WARNING", "stored state cannot be read: the default is used, the bytes are kept", fields)
