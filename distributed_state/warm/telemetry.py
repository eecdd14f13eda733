"""Telemetry of a store: spans for OpenTelemetry, and durations for histograms.

Law: switched off, it costs one check of a flag; on, it reports kinds and outcomes, and never a user's value.

Design: section 12.
"""

from __future__ import annotations

import functools
import os
from bisect import bisect_left
from collections.abc import Callable, Coroutine, Mapping
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
from distributed_state.settings import Settings
from distributed_state.values.keys import RecordKeys
from distributed_state.values.usage import OTHERS, Tokens, Usage

context: Any
trace: Any
try:
    from opentelemetry import context, trace
except ImportError:  # without the extra `telemetry` there are no spans
    context = trace = None

P = ParamSpec("P")
T = TypeVar("T")
Facts = dict[str, str | int]
BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
TURN_BUCKETS = (0.001, 0.01, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)  # long, because models are slow
TOKEN_BUCKETS = tuple(4.0**power for power in range(14))  # those that OpenTelemetry's conventions name
_SLOW = BUCKETS.index(0.1) + 1  # the buckets of longer durations
_MODELS = 50  # whose tokens have a label of their own
# The names of these attributes are in development, and are only used where they are asked for:
# https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-agent-spans/
_OPT_IN, _GENAI = "OTEL_SEMCONV_STABILITY_OPT_IN", "gen_ai_latest_experimental"
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
    """A histogram, of durations or other numbers: a count for each bucket, and one for larger numbers.

    Updated without a lock: with two threads at once, one measurement may be lost.
    """

    __slots__ = ("buckets", "counts", "sum")

    def __init__(self, buckets: tuple[float, ...] = BUCKETS) -> None:
        self.buckets = buckets
        self.counts = [0] * (len(buckets) + 1)
        self.sum = 0.0

    def add(self, number: float) -> None:
        """Add one duration in seconds, or another number."""
        self.counts[bisect_left(self.buckets, number)] += 1
        self.sum += number


class Telemetry:
    """The telemetry of one replica. Settings switch spans on; collecting metrics switches times on."""

    def __init__(self, settings: Settings, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ids = settings.trace_ids
        self._tracer: Any = trace.get_tracer("distributed_state") if settings.traces and trace is not None else None
        self.measures = False
        self.on = self._tracer is not None
        self.times: dict[tuple[str, str, str], Times] = {}
        self.turn_parts: dict[str, Times] = {}
        self.tokens: dict[tuple[str, str], Times] = {}  # by model, and "input" or "output"
        self.genai = _GENAI in [each.strip() for each in os.environ.get(_OPT_IN, "").split(",")]

    def measure(self) -> None:
        """Measure times from now on."""
        self.measures = self.on = True

    async def watch(self, operation: str, tier: str, facts: Callable[[], Facts], work: Coroutine[Any, Any, T]) -> T:
        """Run the work within a span, and note its duration and outcome."""
        began = self._clock()
        outcome = "ok"
        span = None
        inside = None
        if self._tracer is not None:
            span = self._span(operation, tier, facts())
            inside = context.attach(trace.set_span_in_context(span))
        try:
            return await work
        except BaseException as error:
            outcome = _outcome(error)
            raise
        finally:
            if self.measures:
                self._add((operation, tier, outcome), self._clock() - began)
            if span is not None:
                context.detach(inside)
                self.finish(span, outcome)

    def _span(self, operation: str, tier: str, facts: Facts) -> Any:
        attributes = {f"distributed_state.{name}": value for name, value in (facts | {"tier": tier}).items()}
        return self._tracer.start_span(f"distributed_state.{operation}", attributes=attributes)

    def _add(self, key: tuple[str, str, str], seconds: float) -> None:
        times = self.times.get(key)
        if times is None:
            times = self.times.setdefault(key, Times())
        times.add(seconds)

    def turn(self, parts: Mapping[str, float]) -> None:
        """Note how the time of a turn was spent: seconds by part."""
        for part, seconds in parts.items():
            if part not in self.turn_parts:
                self.turn_parts[part] = Times(TURN_BUCKETS)
            self.turn_parts[part].add(seconds)

    def used(self, model: str, tokens: Tokens) -> None:
        """Note the tokens that a call of a model used."""
        if (model, "input") not in self.tokens and len(self.tokens) >= 2 * _MODELS:
            model = OTHERS
        for type, number in ("input", tokens.input_tokens), ("output", tokens.output_tokens):
            self.tokens.setdefault((model, type), Times(TOKEN_BUCKETS)).add(number)

    def began(self, span: Any, keys: RecordKeys, agent: str | None) -> None:
        """Say on the span of a lease that it is a turn's: an agent's, if the session has a handler."""
        if self.genai:
            facts = {"gen_ai.operation.name": "invoke_agent"}
            facts |= {} if agent is None else {"gen_ai.agent.name": agent}
            span.set_attributes(facts | ({"gen_ai.conversation.id": keys.ref.id} if self._ids else {}))

    def ends(self, span: Any, usage: Usage) -> None:
        """Say on the span of a turn's lease which tokens it used, if it named any."""
        if self.genai and usage.calls:
            facts: Facts = {"gen_ai.usage.input_tokens": usage.input_tokens}
            facts |= {"gen_ai.usage.output_tokens": usage.output_tokens}
            if len(usage.models) == 1:
                facts |= {"gen_ai.request.model": next(iter(usage.models))}
            span.set_attributes(facts)

    def totals(self) -> dict[str, int]:
        """Return the number of operations, their total time, and the number of slow ones; empty without times."""
        if not self.measures:
            return {}
        times = list(self.times.values())
        return {
            "operations": sum(sum(each.counts) for each in times),
            "operation_us": int(sum(each.sum for each in times) * 1e6),
            "slow_operations": sum(sum(each.counts[_SLOW:]) for each in times),
        }

    def begin(self, operation: str, keys: RecordKeys) -> Any:
        """Begin a span for a lasting state, such as holding a lease; None without spans. `finish` ends it."""
        if self._tracer is None:
            return None
        return self._span(operation, "warm", self.of(keys))

    def finish(self, span: Any, outcome: str) -> None:
        """End the span of `begin`."""
        # The text of an exception may contain a user's value: only the outcome is reported.
        span.set_attribute("distributed_state.outcome", outcome)
        if outcome in _FAILED:
            span.set_status(trace.Status(trace.StatusCode.ERROR))
        span.end()

    def of(self, keys: RecordKeys) -> Facts:
        """Return a span's attributes for a record; its id only if settings ask for it."""
        facts: Facts = {"scope": keys.ref.scope, "partition": keys.partition}
        return facts | {"record": keys.ref.text} if self._ids else facts


class Observed(Protocol):
    """An object whose work is observed."""

    @property
    def telemetry(self) -> Telemetry:
        """The telemetry to which its work is reported."""
        ...


O = TypeVar("O", bound=Observed)  # noqa: E741 - of `Observed`
Work = Callable[Concatenate[O, P], Coroutine[Any, Any, T]]


def observed(operation: str, tier: str, facts: Callable[..., Facts]) -> Callable[[Work[O, P, T]], Work[O, P, T]]:
    """Observe a coroutine function whenever telemetry is on.

    Its first argument has the telemetry; `facts` makes the attributes of a span from its positional arguments. Calls
    with an empty list are not observed.
    """

    def decorate(work: Work[O, P, T]) -> Work[O, P, T]:
        @functools.wraps(work)
        def watched(place: O, /, *arguments: P.args, **named: P.kwargs) -> Coroutine[Any, Any, T]:
            doing = work(place, *arguments, **named)
            telemetry = place.telemetry
            if not telemetry.on or (arguments and arguments[0] == []):
                return doing
            return telemetry.watch(operation, tier, lambda: facts(place, *arguments), doing)

        return watched

    return decorate


def record(place: Observed, keys: RecordKeys, *rest: Any) -> Facts:
    """Return the attributes for work on one record."""
    facts = place.telemetry.of(keys)
    kind = getattr(rest[0], "kind", None) if rest else None
    return facts | {"kind": kind} if kind else facts


def several(place: Observed, many: Any, *rest: Any) -> Facts:
    """Return the attributes for work on several records or partitions."""
    return {"count": len(many)}


def _outcome(error: BaseException) -> str:
    return next((outcome for kind, outcome in _OUTCOMES if isinstance(error, kind)), "cancelled")
