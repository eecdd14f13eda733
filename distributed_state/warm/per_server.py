"""A background job for each of several servers. Law: a server that does not answer holds up only its own work.

Design: section 20.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Hashable
from functools import partial
from typing import Any, Generic, TypeVar

from distributed_state.errors import WarmUnavailable
from distributed_state.port import Job, Port

T = TypeVar("T", bound=Hashable)
_IDLE_SECONDS = 60.0


class PerServer(Generic[T]):
    """Hands items to the job of the server that has their keys; each job serves all that were handed to it."""

    def __init__(self, port: Port, name: str, serve: Callable[[list[T]], Coroutine[Any, Any, None]]) -> None:
        self._port = port
        self._name = name
        self._serve = serve
        self._mutex = port.mutex()
        self._servers: dict[str, _Server[T]] = {}

    def hand(self, key: bytes, item: T) -> None:
        """Give an item to the job of the server that has this key now, without waiting."""
        try:
            node = self._port.node_of(key)
        except WarmUnavailable:
            node = ""  # no server has it now; the job finds out where it is
        with self._mutex:
            server = self._servers.get(node)
            if server is None:
                server = self._servers[node] = _Server(self._port)
                server.job = self._port.spawn(partial(self._run, node, server), self._name)
            server.due[item] = None
        server.handed.set()

    async def _run(self, node: str, server: _Server[T]) -> None:
        """Serve the items of one server; end when it has been idle for a while."""
        while True:
            server.handed.clear()  # first: items handed out from here on end the wait below
            with self._mutex:
                due, server.due = server.due, {}
            if due:
                await self._serve(list(due))
            elif not await server.handed.wait(_IDLE_SECONDS):
                with self._mutex:
                    if not server.due:
                        del self._servers[node]
                        return

    async def close(self) -> None:
        """End the jobs."""
        servers = list(self._servers.values())
        self._servers = {}
        for server in servers:
            if server.job is not None:
                await server.job.stop()


class _Server(Generic[T]):
    """The items to serve next at one server, in order."""

    def __init__(self, port: Port) -> None:
        self.due: dict[T, None] = {}
        self.handed = port.signal()
        self.job: Job | None = None
