"""What a store tells of its work: spans for OpenTelemetry, and how long things took, for histograms.

Law: off, it costs one look at a flag; on, it tells kinds and outcomes, and never a user's value.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from distributed_state.errors import (
    Backpressure,
    Conflict,
    Deleted,
    DurabilityUnknown,
    Fenced,
    InvalidValue,
    Locked,
    LockTimeout,
    NotFound,
    Unavailable,
)
from distributed_state.keys import RecordKeys
from distributed_state.settings import Settings

trace: Any
try:
    from opentelemetry import trace
except ImportError:  # the extra `telemetry` is not installed: then there are no spans
    trace = None

P = ParamSpec("P")
T = TypeVar("T")
Facts = dict[str, str | int]
BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_FAILED = ("backpressure", "unavailable", "unconfirmed", "error")
_OUTCOMES: tuple[tuple[type[Exception], str], ...] = (
    (Fenced, "fenced"),
    (LockTimeout, "timeout"),
    (Locked, "locked"),
    (Conflict, "conflict"),
    (Deleted, "deleted"),
    (NotFound, "absent"),
    (InvalidValue, "invalid"),
    (Backpressure, "backpressure"),
    (Unavailable, "unavailable"),
    (DurabilityUnknown, "unconfirmed"),
    (Exception, "error"),
)


class Times:
    """How often something took how long: as many as there are buckets, and one for what took longer.

    Updated without a lock: of two threads at once one may go uncounted, and no more than that.
    """

    __slots__ = ("counts", "seconds")

    def __init__(self) -> None:
        self.counts, self.seconds = [0] * (len(BUCKETS) + 1), 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS, seconds)] += 1
        self.seconds += seconds


class Telemetry:
    """Of one replica. Spans are switched on by settings, times by whoever collects them."""

    def __init__(self, settings: Settings, clock: Callable[[], float]) -> None:
        self._clock, self._ids = clock, settings.trace_ids
        self._tracer: Any = trace.get_tracer("distributed_state") if settings.traces and trace is not None else None
        self.measures, self.on = False, self._tracer is not None
        self.times: dict[tuple[str, str, str], Times] = {}

    def measure(self) -> None:
        """Take times from now on."""
        self.measures = self.on = True

    async def watch(self, operation: str, tier: str, facts: Facts, work: Coroutine[Any, Any, T]) -> T:
        """Do the work, as a span, and note how long it took and what came of it."""
        began, outcome = self._clock(), "ok"
        with self._span(operation, tier, facts) as span:
            try:
                return await work
            except BaseException as error:
                outcome = _outcome(error)
                raise
            finally:
                if self.measures:
                    self._add((operation, tier, outcome), self._clock() - began)
                if span is not None:
                    _conclude(span, outcome)

    def _span(self, operation: str, tier: str, facts: Facts) -> AbstractContextManager[Any]:
        if self._tracer is None:
            return nullcontext()
        # The text of an exception names records: only what became of the work is told.
        return self._tracer.start_as_current_span(  # type: ignore[no-any-return]  # the package may be absent
            f"distributed_state.{operation}",
            attributes=_attributes(facts | {"tier": tier}),
            record_exception=False,
            set_status_on_exception=False,
        )

    def _add(self, key: tuple[str, str, str], seconds: float) -> None:
        times = self.times.get(key)
        if times is None:
            times = self.times.setdefault(key, Times())
        times.add(seconds)

    def begin(self, operation: str, names: RecordKeys) -> Any:
        """A span of something that lasts, as holding a lease; None without spans. `finish` ends it."""
        if self._tracer is None:
            return None
        facts = _attributes(self.of(names) | {"tier": "warm"})
        return self._tracer.start_span(f"distributed_state.{operation}", attributes=facts)

    def finish(self, span: Any, outcome: str) -> None:
        """End what `begin` began, if there is something to end."""
        if span is not None:
            _conclude(span, outcome)
            span.end()

    def of(self, names: RecordKeys) -> Facts:
        """What a span tells of a record: its id only if that is asked for."""
        facts: Facts = {"scope": names.ref.scope, "partition": names.partition}
        return facts | {"record": names.ref.text} if self._ids else facts


class Observed(Protocol):
    """What does work that is told of."""

    @property
    def telemetry(self) -> Telemetry: ...


O = TypeVar("O", bound=Observed)  # noqa: E741 - of `Observed`
Work = Callable[Concatenate[O, P], Coroutine[Any, Any, T]]


def observed(operation: str, tier: str, facts: Callable[..., Facts | None]) -> Callable[[Work[O, P, T]], Work[O, P, T]]:
    """Have a coroutine function told of whenever telemetry is on.

    Its first argument has the telemetry. `facts` makes of its positional arguments what spans tell; None says that
    there is nothing to do, and so nothing to tell.
    """

    def decorate(work: Work[O, P, T]) -> Work[O, P, T]:
        @functools.wraps(work)
        def watched(place: O, /, *arguments: P.args, **named: P.kwargs) -> Coroutine[Any, Any, T]:
            telemetry = place.telemetry
            if telemetry.on:
                found = facts(place, *arguments)
                if found is not None:
                    return telemetry.watch(operation, tier, found, work(place, *arguments, **named))
            return work(place, *arguments, **named)

        return watched

    return decorate


def record(place: Observed, names: RecordKeys, *rest: Any) -> Facts:
    """Of work on one record."""
    facts = place.telemetry.of(names)
    kind = getattr(rest[0], "kind", None) if rest else None
    return facts | {"kind": kind} if kind else facts


def several(place: Observed, many: Any) -> Facts | None:
    """Of work on several records or partitions at once."""
    return {"count": len(many)} if many else None


def _attributes(facts: Facts) -> Facts:
    return {f"distributed_state.{name}": value for name, value in facts.items()}


def _conclude(span: Any, outcome: str) -> None:
    span.set_attribute("distributed_state.outcome", outcome)
    if outcome in _FAILED:
        span.set_status(trace.Status(trace.StatusCode.ERROR))


def _outcome(error: BaseException) -> str:
    return next((outcome for kind, outcome in _OUTCOMES if isinstance(error, kind)), "cancelled")
