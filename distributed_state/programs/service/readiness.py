"""Whether this worker can serve. Law: asking costs a server at most one small question a second, however many ask."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from distributed_state.errors import StateError
from distributed_state.store.asyncio import AsyncStateStore


class Probe:
    """One server, asked now and then. A question that hangs is waited for again, and no second one is asked."""

    def __init__(self, ask: Callable[[], Awaitable[Any]], seconds: float) -> None:
        self._ask = ask
        self._seconds = seconds
        self._asking: asyncio.Task[str] | None = None
        self._said = ""
        self._until = 0.0

    async def complaint(self) -> str:
        """Why the server is not usable, "" if it is."""
        if time.monotonic() >= self._until:
            if self._asking is None:
                self._asking = asyncio.create_task(self._asked())
            asking = self._asking
            await asyncio.wait((asking,), timeout=self._seconds)
            if asking.done():
                self._said = asking.result()
                self._asking = None
            else:
                self._said = f"no answer within {self._seconds:g} s"
            self._until = time.monotonic() + self._seconds
        return self._said

    async def _asked(self) -> str:
        try:
            await self._ask()
        except StateError as error:
            return str(error)
        return ""

    async def close(self) -> None:
        """Stop asking."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait((self._asking,))


def probes(store: AsyncStateStore, seconds: float) -> dict[str, Probe]:
    """A probe of each server of a store."""
    tiers = store.tiers()
    return {
        "redis": Probe(lambda: tiers.port.command(b"PING"), seconds),
        "sql": Probe(lambda: tiers.port.sql(tiers.cold.cursor, 0), seconds),
    }
