"""Prometheus metrics of a store (extra `telemetry`). Law: a scrape asks no server; it shows what the store knows.

Design: section 9.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from distributed_state.errors import ConfigurationError
from distributed_state.store.asyncio import AsyncStateStore
from distributed_state.store.blocking import StateStore
from distributed_state.store.figures import BY_PARTITION, FIGURES, Figure, Labelled
from distributed_state.store.twins import twin_of
from distributed_state.tiers.assembly import Tiers
from distributed_state.warm.telemetry import Times

try:
    from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ConfigurationError(
        "prometheus-client is not installed: pip install 'distributed-state[telemetry]'"
    ) from error

PREFIX = "distributed_state_"
_MANY_PARTITIONS = 64

# Name, help, labels; of what `telemetry` calls by the first word of its operations.
OPERATIONS = (
    "operation_duration_seconds", "What left the process, and how long it took", ("operation", "tier", "outcome"),
)  # fmt: skip
LOCK_WAITS = "lock_wait_seconds", "How long locks were waited for, by what came of it", ("outcome",)
TURN_PARTS = (
    "turn_seconds", "Where the time of turns went: lock, read, tool, model, elsewhere, commit; of all tools together",
    ("part",),
)  # fmt: skip
HISTOGRAMS = OPERATIONS, LOCK_WAITS, TURN_PARTS


class StoreCollector(Collector):
    """What prometheus_client asks at each scrape. May be used from any thread."""

    def __init__(self, store: AsyncStateStore, by_partition: bool) -> None:
        self._store = store
        self._figures = FIGURES + (BY_PARTITION if by_partition else ())
        self._tiers()

    def _tiers(self) -> Tiers | None:
        """The tiers, if the store is open; they take times once they are seen here."""
        tiers = self._store.tiers_in_use
        if tiers is not None:
            tiers.telemetry.measure()
        return tiers

    def describe(self) -> Iterator[Metric]:
        """The metrics without values."""
        for figure in self._figures:
            yield _family(figure)
        for name, text, labels in HISTOGRAMS:
            yield HistogramMetricFamily(PREFIX + name, text, labels=labels)

    def collect(self) -> Iterator[Metric]:
        """The metrics as they are now."""
        tiers = self._tiers()
        if tiers is None:
            return
        for figure in self._figures:
            family = _family(figure)
            for labels, value in _values(figure, tiers).items():
                family.add_metric(labels, value)
            yield family
        times = dict(tiers.telemetry.times)
        operations = {key: each for key, each in times.items() if key[0] != "lease.acquire"}
        waits = {(outcome,): each for (name, _, outcome), each in times.items() if name == "lease.acquire"}
        yield _histogram(OPERATIONS, operations)
        yield _histogram(LOCK_WAITS, waits)
        yield _histogram(TURN_PARTS, {(part,): each for part, each in dict(tiers.telemetry.turn_parts).items()})


def collector(store: StateStore | AsyncStateStore, *, by_partition: bool | None = None) -> StoreCollector:
    """Make the collector of a store, to be registered: `REGISTRY.register(collector(store))`. One store a registry.

    From now on the store takes times. `by_partition` says whether journals and lags are also reported one by one;
    without it, if there are at most 64. Neither this nor a scrape asks any server.
    """
    twin: AsyncStateStore = twin_of(store)
    few = twin.settings.partitions <= _MANY_PARTITIONS
    return StoreCollector(twin, few if by_partition is None else by_partition)


@contextmanager
def serve(store: StateStore | AsyncStateStore, port: int, host: str = "0.0.0.0") -> Iterator[int]:
    """Answer GET /metrics inside `with`, for a process that has no server of its own; the port, also for 0: any."""
    registry = CollectorRegistry()
    process(registry)
    registry.register(collector(store))
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigurationError(f"metrics cannot be served on {host}:{port}: {error}") from error
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def process(registry: CollectorRegistry) -> None:
    """Show the process itself, too: its memory, its time on processors, its open files. On Linux alone.

    prometheus_client's own registry does so without this.
    """
    ProcessCollector(registry=registry)


def _family(figure: Figure) -> Any:
    kind = CounterMetricFamily if figure.kind == "counter" else GaugeMetricFamily
    return kind(PREFIX + figure.name, figure.help, labels=figure.labels)


def _values(figure: Figure, tiers: Tiers) -> Labelled:
    value = figure.read(tiers)
    return {} if value is None else value if isinstance(value, dict) else {(): value}


def _histogram(what: tuple[str, str, tuple[str, ...]], times: dict[Any, Times]) -> HistogramMetricFamily:
    name, text, labels = what
    family = HistogramMetricFamily(PREFIX + name, text, labels=labels)
    for key, each in sorted(times.items()):
        sofar = 0
        buckets = []
        for limit, count in zip([*map(str, each.buckets), "+Inf"], each.counts, strict=True):
            sofar += count
            buckets.append((limit, sofar))
        family.add_metric(key, buckets, each.seconds)
    return family
