"""What operators and load balancers ask a worker: whether it can serve, and what it measures.

Law: each server gets at most one small probe a second, however many ask, and a scrape asks nothing but this process.

Design: section 27.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from distributed_state.errors import InvalidValue, StateError
from distributed_state.port import Port
from distributed_state.programs.service.answers import answer, refusal
from distributed_state.store.asyncio import AsyncStateStore
from distributed_state.store.metrics import process
from distributed_state.values.keys import Keys

log = logging.getLogger(__name__)
_NOT_USABLE = "cannot be used now; the log says why"
_PREFIX = "distributed_state_http"
_OTHERS = "others"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


# Readiness


def probes(store: AsyncStateStore, seconds: float) -> dict[str, Probe]:
    """A probe of each server of a store."""
    tiers = store.tiers()
    return {
        "redis": Probe("redis", lambda: any_server(tiers.port, store.keys), seconds),
        "sql": Probe("sql", lambda: tiers.port.sql(tiers.cold.cursor, 0), seconds),
    }


async def any_server(port: Port, keys: Keys) -> None:
    """Check that one server of a cluster takes a write.

    A worker that failed its probe because one server is unavailable could serve none of the others.

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
        """Log a new result once: callers of /readyz may not be shown it."""
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


# Metrics, for Prometheus


class Measures:
    """Counts requests, and shows how many run, how many read events, and whether the worker serves at all."""

    def __init__(
        self, *, running: Callable[[], float], streams: Callable[[], float], ready: Callable[[], float]
    ) -> None:
        self.registry = CollectorRegistry()
        self._most = 0  # tenants that have counters of their own
        process(self.registry)
        self._requests = Counter(
            f"{_PREFIX}_requests", "Requests answered.", ["method", "route", "status"], registry=self.registry
        )
        self._seconds = Histogram(
            f"{_PREFIX}_request_seconds", "Time until the answer.", ["method", "route"], registry=self.registry,
            buckets=_SECONDS,
        )  # fmt: skip
        for name, text, read in (
            ("requests_running", "Requests that are running.", running),
            ("event_streams", "Readers of events.", streams),
            ("ready", "Whether this worker serves: 0 until it has opened its store, and while it ends.", ready),
        ):
            Gauge(f"{_PREFIX}_{name}", text, registry=self.registry).set_function(read)

    def by_tenant(self, most: int) -> None:
        """Count also by tenant from now on: the first `most` of them, and all others as one."""
        self._named, self._most = set[str](), most
        text, labels = "of a tenant; those that came behind the most that are told apart are 'others'.", ["tenant"]
        prefix = "distributed_state_tenant"
        self._of_tenant = Counter(
            f"{prefix}_requests", f"Requests answered, {text}", [*labels, "status"], registry=self.registry
        )
        self._bytes = Counter(f"{prefix}_bytes", f"Bytes of bodies and answers, {text}", labels, registry=self.registry)

    def of_tenant(self, tenant: str, status: int, size: int) -> None:
        """Count one request of a tenant, with the bytes of its body and its answer."""
        if not self._most:
            return
        if tenant not in self._named:
            if len(self._named) >= self._most:
                tenant = _OTHERS
            else:
                self._named.add(tenant)
        self._of_tenant.labels(tenant, status).inc()
        self._bytes.labels(tenant).inc(size)

    def begin(self, store: Collector) -> None:
        """Show what a store knows, too, from now on."""
        self.registry.register(store)

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count one request."""
        self._requests.labels(method, route, status).inc()
        self._seconds.labels(method, route).observe(seconds)

    def shown(self) -> Response:
        """All of it, as Prometheus reads it."""
        return Response(generate_latest(self.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})
