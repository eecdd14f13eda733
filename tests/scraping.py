"""What Prometheus would read of a store."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from sync_api import Blocking

from distributed_state.store.metrics import collector

Samples = dict[tuple[Any, ...], float]


def undressed(store: Any) -> Any:
    return store.it if isinstance(store, Blocking) else store


class Scrape:
    """What Prometheus would read of a store, each time anew."""

    def __init__(self, store: Any, **options: Any) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(collector(undressed(store), **options))

    def all(self) -> Samples:
        text = generate_latest(self.registry).decode()
        families = text_string_to_metric_families(text)
        return {(each.name, *sorted(each.labels.values())): each.value for one in families for each in one.samples}

    def __call__(self, name: str, *labels: str) -> float | None:
        return self.all().get((f"distributed_state_{name}", *sorted(labels)))
