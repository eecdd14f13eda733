"""Whether this worker can serve. Law: each server gets at most one small probe a second, however many ask."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from distributed_state.errors import StateError
from distributed_state.port import Port
from distributed_state.store.asyncio import AsyncStateStore
from distributed_state.values.keys import Keys


class Probe:
    """A probe of one server, its result cached. While one hangs, no second one is started."""

    def __init__(self, ask: Callable[[], Awaitable[Any]], seconds: float) -> None:
        self._ask = ask
        self._seconds = seconds
        self._running: asyncio.Task[str] | None = None
        self._result = ""
        self._until = 0.0

    async def problem(self) -> str:
        """Why the server is not usable, "" if it is."""
        if time.monotonic() >= self._until:
            if self._running is None:
                self._running = asyncio.create_task(self._probed())
            running = self._running
            await asyncio.wait((running,), timeout=self._seconds)
            if running.done():
                self._result = running.result()
                self._running = None
            else:
                self._result = f"no answer within {self._seconds:g} s"
            self._until = time.monotonic() + self._seconds
        return self._result

    async def _probed(self) -> str:
        try:
            await self._ask()
        except StateError as error:
            return str(error)
        return ""

    async def close(self) -> None:
        """Stop asking."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait((self._running,))


async def any_server(port: Port, keys: Keys) -> None:
    """Have one server of a cluster take a write: a worker that is taken out for one that is away serves no other.

    A PING is answered by a replica, by a server that is full, and for a user who may do nothing. `SET XX` of a key that
    is never there writes nothing, and is refused as a commit is. Raises what the first server says if none takes it.
    """
    owned: dict[str, bytes] = {}
    for partition in range(keys.partitions):
        key = keys.probe(partition)
        owned.setdefault(port.node_of(key), key)
    asked = [asyncio.ensure_future(port.command_with(node, b"SET", key, b"", b"XX")) for node, key in owned.items()]
    errors = list[StateError]()
    try:
        for each in asyncio.as_completed(asked):
            try:
                await each
                return
            except StateError as error:
                errors.append(error)
        raise errors[0]
    finally:
        for command in asked:
            command.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


def probes(store: AsyncStateStore, seconds: float) -> dict[str, Probe]:
    """A probe of each server of a store."""
    tiers = store.tiers()
    return {
        "redis": Probe(lambda: any_server(tiers.port, store.keys), seconds),
        "sql": Probe(lambda: tiers.port.sql(tiers.cold.cursor, 0), seconds),
    }
