"""What a run must reach. Law: pure, and a threshold that cannot be judged is missed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deploy.load.measures import Outage, Result


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Seconds, requests a second, a share of all requests; None is not asked for."""

    max_p50: float | None = None
    max_p99: float | None = None
    min_rate: float | None = None
    max_errors: float | None = None
    max_recovery: float | None = None
    max_after_election: float | None = None

    def missed(
        self, results: Sequence[Result], recoveries: Sequence[float | None], outages: Sequence[Outage] = ()
    ) -> Iterator[str]:
        """Say which were missed, by which phase."""
        if not results and any(
            each is not None for each in (self.max_p50, self.max_p99, self.min_rate, self.max_errors)
        ):
            yield "nothing was measured"
        for result in results:
            for name, limit in (("50", self.max_p50), ("99", self.max_p99)):
                if limit is not None and (result.answered == 0 or result.latency[name] > limit):
                    yield f"{result.scenario}: p{name} {result.latency[name]:.3f} s is more than {limit:g} s"
            if self.min_rate is not None and result.per_second < self.min_rate:
                yield f"{result.scenario}: {result.per_second:.1f}/s is less than {self.min_rate:g}/s"
            share = result.failed / result.offered if result.offered else 1.0
            if self.max_errors is not None and share > self.max_errors:
                yield f"{result.scenario}: {share:.2%} failed, more than {self.max_errors:.2%}"
        if self.max_recovery is not None:
            for seconds in recoveries:
                if seconds is None or seconds > self.max_recovery:
                    said = "never" if seconds is None else f"{seconds:.1f} s after the end of a fault"
                    yield f"first success {said}, more than {self.max_recovery:g} s"
        if self.max_after_election is not None:
            for outage in outages:
                if outage.after is None or outage.after > self.max_after_election:
                    said = "never" if outage.after is None else f"{outage.after:.1f} s after the election of a primary"
                    yield f"first success {said}, more than {self.max_after_election:g} s"
