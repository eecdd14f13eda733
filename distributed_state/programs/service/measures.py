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
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Measures:
    """Counts requests, and shows how many run, how many read events, and whether the worker serves at all."""

    def __init__(
        self, *, running: Callable[[], float], streams: Callable[[], float], ready: Callable[[], float]
    ) -> None:
        self.registry = CollectorRegistry()
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
