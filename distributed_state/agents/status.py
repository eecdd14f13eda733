"""How a replica of an agent is. Law: figures are read when somebody asks, and asking costs one look.

Design: section 12.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

MB = 2**20


@dataclass(frozen=True, slots=True)
class Limits:
    """The values beyond which a figure is worth a warning. `error_rate` is in percent, `memory_mb` 0 is no limit."""

    error_rate: float = 10.0
    queue_size: int = 1000
    lag: float = 10.0
    memory_mb: float = 0.0


@dataclass(frozen=True, slots=True)
class Status:
    """How one replica of an agent is.

    `requests` counts commands and hooks run, `errors` those that failed, `error_rate` is in percent; `queue_size` are
    events that wait and what the agent counts itself; `lag` is how many seconds ago the event last handled had happened
    when its turn came; `tiers` is `store.stats()`, empty while servers are away.
    """

    agent: str
    replica: str
    uptime: float
    requests: int
    errors: int
    error_rate: float
    queue_size: int
    memory_mb: float
    conversations: int
    lag: float
    active: bool
    paused: bool
    tiers: Mapping[str, int]

    def to_dict(self) -> dict[str, Any]:
        """The figures as JSON values."""
        return asdict(self)

    def warnings(self, limits: Limits) -> Iterator[tuple[str, str, float, float]]:
        """Each figure beyond its limit: what is wrong in words, the figure's name, its value, its limit."""
        if self.error_rate > limits.error_rate:
            yield "high error rate", "error_rate", self.error_rate, limits.error_rate
        if self.queue_size > limits.queue_size:
            yield "long queue", "queue_size", self.queue_size, limits.queue_size
        if self.lag > limits.lag:
            yield "far behind", "lag", self.lag, limits.lag
        if limits.memory_mb and self.memory_mb > limits.memory_mb:
            yield "much memory", "memory_mb", self.memory_mb, limits.memory_mb


def memory_mb() -> float:
    """What this process occupies now; else, where only that is known, the most it ever did; else 0."""
    with suppress(OSError, ValueError, IndexError), open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MB
    try:
        import resource
    except ImportError:
        return 0.0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / MB if sys.platform == "darwin" else most / 1024
