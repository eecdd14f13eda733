"""Whether this worker can serve. Law: each server gets at most one small probe a second, however many ask."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from distributed_state.errors import StateError
from distributed_state.port import Port
from distributed_state.store.asyncio import AsyncStateStore


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


async def any_server(port: Port) -> None:
    """Reach one server of a cluster: a worker that is taken out for one that is away serves the others no more.

    Raises WarmUnavailable if none answers.
    """
    asked = [asyncio.ensure_future(port.command_with(node, b"PING")) for node in port.nodes()]
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
        for ping in asked:
            ping.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


def probes(store: AsyncStateStore, seconds: float) -> dict[str, Probe]:
    """A probe of each server of a store."""
    tiers = store.tiers()
    return {
        "redis": Probe(lambda: any_server(tiers.port), seconds),
        "sql": Probe(lambda: tiers.port.sql(tiers.cold.cursor, 0), seconds),
    }
