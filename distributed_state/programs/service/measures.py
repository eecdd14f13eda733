"""What a worker measures of its own requests, for Prometheus. Law: a scrape asks nothing but this process.

Design: section 27.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.registry import Collector
from starlette.responses import Response

from distributed_state.store.metrics import process

_PREFIX = "distributed_state_http"
_OTHERS = "others"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Measures:
    """Counts requests, and shows how many run, how many read events, and whether the worker serves at all."""

    def __init__(
        self, *, running: Callable[[], float], streams: Callable[[], float], ready: Callable[[], float]
    ) -> None:
        self.registry = CollectorRegistry()
        self._most = 0  # tenants that are told apart
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
        """Count also by tenant from now on: so many of them, those that come first, and all others as one."""
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
