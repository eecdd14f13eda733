"""What is reported of agents: figures when asked, a summary with heartbeats. Law: nothing is gathered unasked.

Design: section 12.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from distributed_state.agents.base_agent import BaseAgent
from distributed_state.agents.status import Status, memory_mb
from distributed_state.errors import StateError
from distributed_state.store.services import StoreServices

log = logging.getLogger(__name__)
_LONG = ("system_prompt", "sections", "commands")  # what is left out of a heartbeat that would be too large


async def measure(agent: BaseAgent, waiting: int) -> Status:
    """Gather an agent's figures and log them, with a warning for each beyond its limit. `waiting` counts events."""
    context = agent.agent_context
    services = context.services
    try:
        tiers = await services.store.stats()
    except StateError as error:
        tiers = {}
        context.display.log("WARNING", "no figures of the tiers", {"error": str(error)})
    status = Status(
        agent=agent.name,
        replica=services.store.replica,
        uptime=round(services.port.monotonic() - context.began, 3) if context.began else 0.0,
        requests=agent.requests,
        errors=agent.errors,
        error_rate=round(100 * agent.errors / agent.requests, 2) if agent.requests else 0.0,
        queue_size=agent.queue_size + waiting,
        memory_mb=round(memory_mb(), 1),
        conversations=context.conversations,
        lag=round(context.lag, 3),
        active=bool(agent.active),
        paused=context.paused,
        tiers=tiers,
    )
    context.last_status = status.to_dict()
    context.display.log("INFO", "status", context.last_status)
    for words, name, found, allowed in status.warnings(agent.limits):
        context.display.log("WARNING", words, {name: found, "limit": allowed})
    return status


class Heartbeat:
    """The agents' part of what this replica announces with its heartbeats."""

    def __init__(self, services: StoreServices, agents: Sequence[BaseAgent]) -> None:
        self._services = services
        self._agents = agents
        self._announced: list[dict[str, Any]] = []

    def update(self) -> None:
        """Announce what the agents show, if it changed; without its long parts if it is too large. No I/O."""
        shown = [each.shown for each in self._agents]
        if shown == self._announced:
            return
        self._announced = shown
        try:
            self._services.announce({"agents": shown})
        except StateError as error:
            short = [{name: value for name, value in each.items() if name not in _LONG} for each in shown]
            log.warning("the heartbeat lists the agents without %s: %s", ", ".join(_LONG), error)
            self._services.announce({"agents": short})

    def end(self) -> None:
        """Announce the agents no more."""
        self._services.announce({"agents": None})
