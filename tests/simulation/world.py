"""The scheduler, the clocks and the processes of one run. Law: nothing here waits for real time or real I/O.

Coroutines are stepped by hand. All ready tasks are in one list, from which the seed picks. If no task is ready, time
jumps to the next timer. So a thousand seconds of sleep cost nothing, and every order of steps is possible.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import os
import platform
import random
import time
import warnings
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import Context, copy_context
from typing import Any
from unittest import mock

from distributed_state.errors import StateError
from distributed_state.port.background import JobStopped
from distributed_state.values import chance

EPOCH = 1_700_000_000.0  # seconds since 1970 at the start of a run
_BUSY = 20_000  # steps within one moment
real_perf_counter = time.perf_counter


class RunOver(BaseException):
    """Raised at every await of code left over from a run, so that its `finally` blocks have no effect."""


class Stalled(AssertionError):
    """An operation does not end: a deadlock, or an endless loop."""


class Future:
    """The only awaitable of the scheduler. Its waiters continue when it is settled."""

    __slots__ = ("calls", "done", "error", "value")
    over = False

    def __init__(self) -> None:
        self.done = False
        self.value: Any = None
        self.error: BaseException | None = None
        self.calls: list[Callable[[], None]] = []

    def settle(self, value: Any = None, error: BaseException | None = None) -> None:
        """Let all waiters continue with a value, or an error. Only the first call has an effect."""
        if self.done:
            return
        self.done, self.value, self.error = True, value, error
        calls, self.calls = self.calls, []
        for call in calls:
            call()

    def __await__(self) -> Generator[Future, None, Any]:
        if Future.over:
            raise RunOver
        while not self.done:
            yield self
        if self.error is not None:
            raise self.error
        return self.value


class Task:
    """A coroutine of one process.

    `in_thread`: it stands for blocking code in a thread of the store, which cannot be cancelled; `asked` is settled
    when this thread is asked to end. `context`: its initial context, by default a copy of its maker's. `is_awaited`:
    its maker receives the error that it raises.
    """

    def __init__(
        self,
        process: Process,
        work: Coroutine[Any, Any, Any],
        name: str,
        *,
        in_thread: bool = False,
        context: Context | None = None,
        is_awaited: bool = False,
    ) -> None:
        self.process, self.work, self.name, self.in_thread = process, work, name, in_thread
        self._is_awaited = is_awaited
        self.ended = Future()
        self.asked = Future()
        self.cancelling = 0  # cancellations that were not taken back, as asyncio counts them
        self._world = process.world
        self._context = copy_context() if context is None else context
        self._on: Future | None = None
        self._raising: BaseException | None = None
        self.is_ready = False
        process.tasks[self] = None
        self.wake()

    def wake(self) -> None:
        """Let the seed decide when it is stepped."""
        if not self.is_ready and not self.process.is_dead:
            self.is_ready = True
            self._world.ready.append(self)

    def cancel(self) -> None:
        """Raise CancelledError at its present await, as asyncio does."""
        if self.ended.done:
            return
        self.cancelling += 1
        if self._raising is None:
            self._raising = asyncio.CancelledError()
            if self._on is not None and self.wake in self._on.calls:
                self._on.calls.remove(self.wake)
            self.wake()

    def step(self) -> None:
        """Run it up to its next await."""
        error, self._raising, self._on = self._raising, None, None
        try:
            if error is None:
                found = self._context.run(self.work.send, None)
            else:
                found = self._context.run(self.work.throw, error)
        except StopIteration as done:
            self._end(done.value, None)
            return
        except BaseException as problem:  # noqa: BLE001 - whatever ends a task is what its awaiter gets
            self._end(None, problem)
            return
        if not isinstance(found, Future):
            raise AssertionError(f"{self.name} awaits {found!r}, which is not the simulation's")
        self._on = found
        if found.done or self._raising is not None:
            self.wake()
        else:
            found.calls.append(self.wake)

    def _end(self, value: Any, error: BaseException | None) -> None:
        self.process.tasks.pop(self, None)
        self.ended.settle(value, error)
        if error is not None and not self._is_awaited:
            self.blame(error)

    def blame(self, error: BaseException) -> None:
        """Record an error that no caller receives, unless a task may end with it."""
        if not isinstance(error, StateError | JobStopped | asyncio.CancelledError):
            self._world.failures.append((self.name, error))

    def take_back(self) -> None:
        """Take one cancellation back, as asyncio's `uncancel`; with the last one, drop what was not raised yet."""
        self.cancelling -= 1
        if self.cancelling == 0:
            self._raising = None


class Clock:
    """The time that a process sees: a wall clock that may be set, and a monotonic one that may run fast or slow."""

    def __init__(self, world: World, ahead: float = 0.0, rate: float = 1.0) -> None:
        self._world = world
        self.ahead, self.rate = ahead, rate

    def monotonic(self) -> float:
        """Seconds since the machine was started."""
        return 1000.0 + self._world.now * self.rate

    def wall(self) -> float:
        """Seconds since 1970."""
        return EPOCH + self._world.now * self.rate + self.ahead


class Process:
    """The tasks, connections and clock of one replica, which die together."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        world.processes.append(self)
        self.clock = Clock(world, world.chance.uniform(-0.5, 0.5), 1 + world.chance.uniform(-1e-4, 1e-4))
        self.tasks: dict[Task, None] = {}
        self.connections: list[Any] = []
        self.is_dead = False
        self.died = Future()
        self.frozen_until = 0.0

    def crash(self) -> None:
        """Nothing of it runs any longer, not even a `finally` block."""
        self.world.note("crash", self.name)
        self.is_dead = True
        # A coroutine runs its `finally` when it is collected: keep those of dead processes until the run ends.
        self.world.dead += self.tasks
        for connection in self.connections:
            connection.vanish()
        self.died.settle()

    def freeze(self, seconds: float) -> None:
        """Let nothing of it run for this many seconds, as SIGSTOP does; messages to it still arrive."""
        self.world.note("freeze", self.name, f"{seconds:.3f}")
        self.frozen_until = max(self.frozen_until, self.world.now + seconds)


class World:
    """One run: its random generator, its time, and the tasks and timers that are due."""

    def __init__(self, seed: int, *, trace: bool = False) -> None:
        self.seed = seed
        self.chance = random.Random(seed)
        self.now = 0.0
        self.ready: list[Task] = []
        self.failures: list[tuple[str, BaseException]] = []
        self.dead: list[Task] = []
        self.processes: list[Process] = []
        self.lines: list[str] | None = [] if trace else None
        self.steps = 0
        self.current: Task | None = None
        self.server_clock: Clock | None = None  # set while a server executes commands
        self.outside = Process(self, "outside")
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._digest = hashlib.blake2b(digest_size=8)

    # Timers

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call this in this many seconds."""
        self.at(self.now + max(0.0, seconds), call)

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Call this at that time, after all calls already due then."""
        self._count += 1
        heapq.heappush(self._timers, (when, self._count, call))

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        future = Future()
        self.after(seconds, future.settle)
        await future

    def run_until(self, done: Future, limit: float) -> None:
        """Run until this is settled. Raises Stalled if it is not settled within `limit` seconds of simulated time."""
        end = self.now + limit
        ready, timers, draw = self.ready, self._timers, self.chance.random
        moved, steps = self.now, self.steps
        while not done.done:
            if self.now > moved:
                moved, steps = self.now, self.steps
            elif self.steps > steps + _BUSY:
                raise Stalled(f"{_BUSY} steps took no time: somebody goes round in a circle")
            if ready:
                at = int(draw() * len(ready))
                ready[at], ready[-1] = ready[-1], ready[at]
                self._step(ready.pop())
            elif timers:
                due, _, call = heapq.heappop(timers)
                if due > end:
                    raise Stalled(f"nothing came of it within {limit:g} s")
                self.now = max(self.now, due)
                call()
            else:
                raise Stalled("nobody is ready, and nothing is due")

    def _step(self, task: Task) -> None:
        task.is_ready = False
        process = task.process
        if process.is_dead or task.ended.done:
            return
        if process.frozen_until > self.now:
            self.after(process.frozen_until - self.now, task.wake)
            return
        self.steps += 1
        self.note("step", task.name)
        self.current = task
        task.step()
        self.current = None

    # The trace

    def note(self, *words: str, more: Callable[[], str] | None = None) -> None:
        """Add a line to the trace of this run; `more` is called only if the trace is kept."""
        line = f"{self.now:.6f} {' '.join(words)}"
        self._digest.update(line.encode())
        if self.lines is not None:
            self.lines.append(f"{line} {more()}\n" if more else f"{line}\n")

    @property
    def digest(self) -> str:
        """A hash of everything that happened so far: equal for equal runs."""
        return self._digest.hexdigest()

    # In place of the process's own clocks and random numbers

    @contextmanager
    def rules(self) -> Iterator[None]:
        """Inside, all code that asks for the time or for random numbers gets those of this run."""

        def clock() -> Clock:
            if self.server_clock is not None:
                return self.server_clock
            return (self.current.process if self.current else self.outside).clock

        def never(_: float) -> None:
            raise AssertionError("somebody sleeps in real time")

        with ExitStack() as stack:
            for where, name, stand_in in (
                (time, "time", lambda: clock().wall()),
                (time, "monotonic", lambda: clock().monotonic()),
                (time, "perf_counter", lambda: clock().monotonic()),
                (time, "sleep", never),
                (os, "getpid", lambda: 4242),
                (os, "getloadavg", lambda: (0.0, 0.0, 0.0)),
                (platform, "node", lambda: "host"),
            ):
                stack.enter_context(mock.patch.object(where, name, stand_in))
            stack.enter_context(chance.seeded(self.seed ^ 0x5EED))
            # Libraries use the random numbers of the process: tenacity does, to choose how long to wait.
            stack.callback(random.setstate, random.getstate())
            random.seed(self.seed)
            yield

    def bury(self) -> None:
        """End everything that a run left behind, without effects."""
        Future.over = True
        left = [*self.dead, *(each for process in self.processes for each in process.tasks)]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # what a `finally` block began is never awaited
                for task in left:
                    with suppress(BaseException):
                        task.work.close()
        finally:
            Future.over = False
            self.dead.clear()
