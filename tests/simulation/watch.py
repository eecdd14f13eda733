"""How a simulated replica receives failover messages. Law: a message of a Sentinel is only a reason to look."""

from __future__ import annotations

from contextvars import Context
from typing import TYPE_CHECKING

from tests.simulation.network import FROM
from tests.simulation.world import Future, Task

if TYPE_CHECKING:  # these modules use this one
    from tests.simulation.port import SimulatedConnections

_EVERY = 1.0  # seconds between two attempts to reach a Sentinel that is away: see port/topology.py


class SimulatedWatch:
    """Looks when any Sentinel publishes that another server is the primary; replaces `SentinelWatch`."""

    def __init__(self, connections: SimulatedConnections) -> None:
        self._connections, self._process = connections, connections.process
        self._world = connections.process.world
        self._stopped: Future | None = None

    def begin(self) -> None:
        """Listen from now on."""
        if self._stopped is None:
            stopped = self._stopped = Future()
            for seed in self._connections.address.seeds:
                name = f"{self._process.name}/{seed}"
                Task(self._process, self._listen(seed, stopped), name, in_thread=True, context=Context())

    def end(self) -> None:
        """Stop listening."""
        stopped, self._stopped = self._stopped, None
        if stopped is not None:
            stopped.settle()

    def inherited(self) -> None:
        """A simulated process does not fork."""
        raise AssertionError

    async def _listen(self, seed: str, stopped: Future) -> None:
        fleet, world = self._connections.fleet, self._world
        assert fleet.sentinels is not None
        sentinel = fleet.sentinels.all[seed]
        while not fleet.network.is_heard(self._process, sentinel):
            if await self._is_over(_EVERY, stopped):
                return
        said = [Future()]

        def hear() -> None:
            world.at(fleet.network.arrives(self._process, sentinel, FROM, 0.0), lambda: said[0].settle())

        sentinel.hears[hear] = None
        try:
            while not stopped.done:
                # Look first, too: it receives no messages that were sent before it listened.
                await self._connections.look_again()
                await self._is_over(None, stopped, said[0])
                said[0] = Future()
        finally:
            sentinel.hears.pop(hear, None)

    async def _is_over(self, seconds: float | None, stopped: Future, *others: Future) -> bool:
        """Wait for one of these futures, or this long. Return whether the watch must stop."""
        either = Future()
        if seconds is not None:
            self._world.after(seconds, either.settle)
        for each in (stopped, *others):
            each.calls.append(either.settle)
        if not any(each.done for each in (stopped, *others)):
            await either
        return stopped.done
