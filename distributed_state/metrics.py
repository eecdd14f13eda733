"""Figures of a store for Prometheus. Law: collecting asks nobody anything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.registry import Collector


class _Figures(Collector):
    def __init__(self, store: Any) -> None:
        self._store = store

    def collect(self) -> Iterator[GaugeMetricFamily]:
        figures = self._store.tiers().figures()
        for name, value in {**figures.positions, **figures.stats}.items():
            yield GaugeMetricFamily(f"distributed_state_{name}", name.replace("_", " "), value)


def collector(store: Any) -> Collector:
    """What `CollectorRegistry.register` takes, to be collected in the event loop of the store."""
    return _Figures(store)
