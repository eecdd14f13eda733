"""Whether this worker can serve. Law: each server gets at most one small probe a second, however many ask."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from distributed_state.errors import StateError
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


def probes(store: AsyncStateStore, seconds: float) -> dict[str, Probe]:
    """A probe of each server of a store."""
    tiers = store.tiers()
    return {
        "redis": Probe(lambda: tiers.port.command(b"PING"), seconds),
        "sql": Probe(lambda: tiers.port.sql(tiers.cold.cursor, 0), seconds),
    }
