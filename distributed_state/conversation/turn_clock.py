"""Measures how a turn spends its time. Law: the clock is monotonic, and each second counts once.

Runs that overlap are measured separately; "elsewhere" is the time in which nothing measured ran.

Design: section 13.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from distributed_state.errors import InvalidValue
from distributed_state.results import TimedRun, TurnTimes
from distributed_state.values.turn_times import MOST_RUNS, Ran
from distributed_state.values.usage import Tokens, checked_tokens


class TurnClock:
    """The times of one turn, from `begin` until `stop`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began: float | None = None
        self._stopped: float | None = None
        self._commit: float | None = None
        self._lock = self._read = 0.0
        self._runs: list[TimedRun] = []
        self._more, self._more_seconds = 0, 0.0
        self._running = 0  # number of measured runs under way
        self._since = 0.0  # since when at least one is under way
        self._measured = 0.0  # seconds in which at least one was under way
        self._before = self._before_elsewhere = 0.0  # a client's time before it sent the turn
        self._ran: dict[str, float] = {}  # seconds of all runs, by kind

    def begin(self) -> None:
        """Start measuring."""
        self._began = self._clock()

    def held(self, waited: float) -> None:
        """Note that the lease was taken after this wait, and that the record was read."""
        if self._began is not None:
            self._measured = max(waited, self._clock() - self._began)
            self._lock, self._read = waited, self._measured - waited

    def reading(self) -> AbstractContextManager[None]:
        """Measure a read of Redis or SQL inside `with`."""
        return _Measured(self, None, "")

    def running(self, kind: Ran, name: str) -> AbstractContextManager[None]:
        """Measure a tool or a model inside `with`."""
        if not isinstance(name, str) or not name:
            raise InvalidValue(f"the name of a {kind} is a non-empty str, not {name!r:.80}")
        return _Measured(self, kind, name)

    def reported(self, seconds: float, runs: Sequence[TimedRun]) -> None:
        """Note the runs that a client reports, in the given seconds before it sent the turn."""
        for each in runs:
            self._note(each)
        ran = sum(each.seconds for each in runs)
        self._before = max(seconds, ran)
        self._before_elsewhere = self._before - ran

    def stop(self) -> None:
        """Note that the commit is sent now, or that there is nothing to commit."""
        if self._stopped is None:
            self._stopped = self._clock()

    def committed(self) -> None:
        """Note that the commit was answered."""
        if self._stopped is not None:
            self._commit = self._clock() - self._stopped

    @property
    def times(self) -> TurnTimes:
        """The times so far."""
        now = self._clock() if self._stopped is None else self._stopped
        total = 0.0 if self._began is None else now - self._began
        measured = self._measured + (now - self._since if self._running else 0.0)
        return TurnTimes(
            total=self._before + total,
            lock=self._lock,
            read=self._read,
            elsewhere=self._before_elsewhere + max(0.0, total - measured),
            runs=tuple(self._runs),
            more=self._more,
            more_seconds=self._more_seconds,
            commit=self._commit,
        )

    @property
    def parts(self) -> dict[str, float]:
        """The seconds of each part of the turn, with those of all tools and all models added up."""
        known = self.times
        parts = {"lock": known.lock, "read": known.read, "elsewhere": known.elsewhere, **self._ran}
        return parts if known.commit is None else parts | {"commit": known.commit}

    def enter(self) -> float:
        """Note that a measured run begins; returns the time."""
        now = self._clock()
        if not self._running:
            self._since = now
        self._running += 1
        return now

    def leave(self, began: float, kind: Ran | None, name: str) -> None:
        """Note the end of a measured run: a read, or a run of this kind."""
        now = self._clock()
        self._running -= 1
        if not self._running:
            self._measured += now - self._since
        if kind is None:
            self._read += now - began
        else:
            self._note(TimedRun(kind, name, now - began))

    def _note(self, run: TimedRun) -> None:
        self._ran[run.kind] = self._ran.get(run.kind, 0.0) + run.seconds
        self._runs.append(run)
        if len(self._runs) > MOST_RUNS:
            seconds = [each.seconds for each in self._runs]
            quickest = self._runs.pop(seconds.index(min(seconds)))
            self._more += 1
            self._more_seconds += quickest.seconds


class ModelCall(AbstractContextManager["ModelCall"]):
    """A call of a model: `with` measures it, and `used` notes its tokens."""

    __slots__ = ("_clock", "_measured", "_name", "_use")

    def __init__(self, clock: TurnClock, name: str, use: Callable[[str, Tokens], None]) -> None:
        self._clock, self._name, self._use = clock, name, use

    def used(self, *, input_tokens: int = 0, output_tokens: int = 0, calls: int = 1) -> None:
        """Note the tokens that the model read and wrote, in one call or several. May be called again for further calls.

        `input_tokens` include those that the provider read from its cache.
        """
        self._use(self._name, checked_tokens(input_tokens, output_tokens, calls))

    def __enter__(self) -> ModelCall:
        self._measured = self._clock.running("model", self._name)
        self._measured.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._measured.__exit__(None, None, None)


class _Measured(AbstractContextManager[None]):
    """The `with` around one measured run; a generator's would cost more time than the run that it measures."""

    __slots__ = ("_began", "_clock", "_kind", "_name")

    def __init__(self, clock: TurnClock, kind: Ran | None, name: str) -> None:
        self._clock, self._kind, self._name = clock, kind, name

    def __enter__(self) -> None:
        self._began = self._clock.enter()

    def __exit__(self, *error: object) -> None:
        self._clock.leave(self._began, self._kind, self._name)
