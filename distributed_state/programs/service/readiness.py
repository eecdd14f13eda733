"""Whether this worker can serve. Law: each server gets at most one small probe a second, however many ask."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from distributed_state.errors import InvalidValue, StateError
from distributed_state.port import Port
from distributed_state.programs.service.answers import answer, refusal
from distributed_state.store.asyncio import AsyncStateStore
from distributed_state.values.keys import Keys

log = logging.getLogger(__name__)
_NOT_USABLE = "cannot be used now; the log says why"


class Probe:
    """A probe of one server, its result cached. While one hangs, no second one is started."""

    def __init__(self, name: str, ask: Callable[[], Awaitable[Any]], seconds: float) -> None:
        self._name = name
        self._ask = ask
        self._seconds = seconds
        self._running: asyncio.Task[str] | None = None
        self._result = self._logged = ""
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
            self._log()
        return self._result

    def _log(self) -> None:
        """Log what has become of it, once: who asks may not be told."""
        if self._result != self._logged:
            self._logged = self._result
            if self._result:
                log.warning("not ready: %s: %s", self._name, self._result)

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
        "redis": Probe("redis", lambda: any_server(tiers.port, store.keys), seconds),
        "sql": Probe("sql", lambda: tiers.port.sql(tiers.cold.cursor, 0), seconds),
    }


async def ready(request: Request, probes: Mapping[str, Probe], *, public: bool) -> Response:
    """The answer to GET /readyz, or ?need=redis. If `public`, without what a server said, which names addresses."""
    needed = request.query_params.get("need", "redis,sql").split(",")
    try:
        asked = {name: probes[name] for name in needed}
    except KeyError as error:
        return refusal(InvalidValue(f"need lists redis and sql, not {error.args[0]!r:.40}"), request)
    found = await asyncio.gather(*(probe.problem() for probe in asked.values()))
    said = {
        name: (_NOT_USABLE if public else problem) if problem else "answers"
        for name, problem in zip(asked, found, strict=True)
    }
    if any(found):
        return answer({"status": "not ready", **said}, 503, headers={"Retry-After": "1"})
    return answer({"status": "ready", **said})
