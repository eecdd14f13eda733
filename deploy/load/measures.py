"""What was measured, put together. Law: a request that was never answered counts with the time that it waited."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hdrh.histogram import HdrHistogram

PERCENTILES = (50.0, 75.0, 90.0, 99.0, 99.9, 99.99, 100.0)
_HOUR_US = 3_600_000_000
_WAITED = 0.1  # seconds, above which a request did not just take its time


def histogram() -> Any:
    """Of microseconds up to an hour, to three digits."""
    return HdrHistogram(1, _HOUR_US, 3)


class Recorder:
    """What one process measured: a histogram, and what a timeline needs since it was last taken."""

    def __init__(self, begin: float) -> None:
        self.begin = begin
        self.histogram = histogram()
        self.answered = self.failed = self.retries = 0
        self.errors: dict[str, int] = {}
        self._ends = array("f")
        self._latencies = array("f")

    def answer(self, due: float, now: float) -> None:
        """A request that was due then is answered now."""
        self.answered += 1
        self._record(due, now)
        self._ends.append(now - self.begin)
        self._latencies.append(now - due)

    def fail(self, due: float, now: float, reason: str) -> None:
        """It was given up now."""
        self.failed += 1
        self.error(reason)
        self._record(due, now)

    def retry(self, reason: str) -> None:
        """It is to be repeated."""
        self.retries += 1
        self.error(reason)

    def error(self, reason: str) -> None:
        """Count why."""
        self.errors[reason] = self.errors.get(reason, 0) + 1

    def _record(self, due: float, now: float) -> None:
        self.histogram.record_value(min(max(round((now - due) * 1e6), 1), _HOUR_US))

    def taken(self) -> tuple[list[float], list[float]]:
        """When requests were answered since this was last asked, in seconds from the start, and after how long."""
        taken = self._ends.tolist(), self._latencies.tolist()
        self._ends = array("f")
        self._latencies = array("f")
        return taken

    def part(self, late: float) -> Part:
        """All of it, to be sent to another process."""
        encoded = self.histogram.encode().decode("ascii")  # it is base64
        return Part(encoded, self.answered, self.failed, self.retries, dict(self.errors), late)


@dataclass(frozen=True, slots=True)
class Part:
    """What a process measured in a phase."""

    histogram: str
    answered: int
    failed: int
    retries: int
    errors: dict[str, int]
    late: float


@dataclass(frozen=True, slots=True)
class Result:
    """One phase: offered and answered in requests a second, latency in seconds by percentile."""

    scenario: str
    rate: float
    seconds: float
    offered: int
    answered: int
    failed: int
    retries: int
    per_second: float
    latency: dict[str, float]
    curve: list[tuple[float, float]]
    errors: dict[str, int] = field(default_factory=dict)
    late: float = 0.0

    @property
    def p50(self) -> float:
        return self.latency["50"]

    @property
    def p99(self) -> float:
        return self.latency["99"]

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def carried(result: Result, max_p99: float) -> bool:
    """Whether a rate was borne."""
    return result.failed == 0 and result.per_second >= 0.97 * result.rate and result.p99 <= max_p99


def without_lost(result: Result) -> Result:
    """The result without the requests that were given up because their conversation was gone, or older than it was."""
    theirs = ("given up: 404", "given up: 409")
    gone = sum(count for reason, count in result.errors.items() if reason.startswith(theirs))
    return replace(result, failed=result.failed - gone)


@dataclass(frozen=True, slots=True)
class Outage:
    """What a replaced primary meant for those who had to wait for the new one, in seconds; None if that never ended.

    `without` is the longest that one of them waited, `after` the time from the election to the first that was answered.
    """

    without: float | None
    after: float | None


class Timeline:
    """When requests were answered, in seconds from the start of the whole run."""

    def __init__(self) -> None:
        self.ends = array("d")
        self.latencies = array("f")

    def add(self, offset: float, ends: Sequence[float], latencies: Sequence[float]) -> int:
        """Take what a recorder had `taken`; how many that were."""
        self.ends.extend(offset + each for each in ends)
        self.latencies.extend(latencies)
        return len(ends)

    def first_due_after(self, moment: float) -> float | None:
        """When the first request was answered that was answered after this moment."""
        return min((end for end in self.ends if end >= moment), default=None)

    def outage(self, began: float, elected: float) -> Outage:
        """What stood still from a fault's beginning on, until a new primary that was elected then answered.

        In a cluster the others' requests are answered all the while, so only those count that had to wait.
        """
        pairs = zip(self.ends, self.latencies, strict=True)
        waited = [
            (end, latency) for end, latency in pairs
            if latency >= _WAITED and began - _WAITED <= end - latency <= elected and end > began
        ]  # fmt: skip
        # The election is seen a moment after it was.
        answered = [end for end, _ in waited if end >= elected - _WAITED]
        if answered:
            return Outage(max(latency for _, latency in waited), max(min(answered) - elected, 0.0))
        # Nobody had to wait for it: the new one took over between two requests.
        first = self.first_due_after(elected)
        return Outage(None, None) if first is None else Outage(0.0, first - elected)

    def by_second(self) -> list[tuple[int, int, float, float]]:
        """Second, requests answered in it, and their p50 and p99."""
        slots: dict[int, list[float]] = {}
        for end, latency in zip(self.ends, self.latencies, strict=True):
            slots.setdefault(int(end), []).append(latency)
        rows = []
        for second in range(max(slots, default=-1) + 1):
            found = sorted(slots.get(second, ()))
            half, most = (found[int(len(found) * share)] if found else 0.0 for share in (0.5, 0.99))
            rows.append((second, len(found), half, most))
        return rows


def combine(scenario: str, rate: float, seconds: float, parts: Iterable[Part], *, took: float) -> Result:
    """Put the processes' parts together; `took` is how long it lasted until the last answer."""
    whole = histogram()
    parts = list(parts)
    errors: dict[str, int] = {}
    for part in parts:
        whole.decode_and_add(part.histogram)
        for reason, count in part.errors.items():
            errors[reason] = errors.get(reason, 0) + count
    answered, failed = (sum(getattr(part, name) for part in parts) for name in ("answered", "failed"))
    latency = {f"{each:g}": whole.get_value_at_percentile(each) / 1e6 for each in PERCENTILES}
    curve = [(each, whole.get_value_at_percentile(each) / 1e6) for each in _curve()]
    return Result(
        scenario, rate, seconds, answered + failed, answered, failed, sum(part.retries for part in parts),
        answered / took if took else 0.0, latency, curve, errors, max((part.late for part in parts), default=0.0),
    )  # fmt: skip


def _curve() -> list[float]:
    """Percentiles ever closer to 100."""
    return [0.0, *(100 - 100 / 2 ** (step / 4) for step in range(1, 60))]
