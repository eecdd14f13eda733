"""The port of a simulated replica. Law: it keeps the rules of the real ports; breaking a rule produces false faults.

A user's task may be cancelled at each await. A thread of the store ends only where it waits, after it was asked to end.
SQL and user code in threads continue when the task that waits for them is cancelled.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from concurrent import futures
from contextlib import AbstractContextManager, nullcontext, suppress
from contextvars import Context, copy_context
from functools import partial
from typing import TYPE_CHECKING, Any

import redis.exceptions as driver

from distributed_state.errors import ColdUnavailable, StateError, WarmUnavailable
from distributed_state.port import identities, waited
from distributed_state.port.background import CUT, JOINED, REPLICA, JobStopped
from distributed_state.port.commands import translate
from distributed_state.port.connections import Connections
from distributed_state.port.routing import Router
from distributed_state.port.sockets import LATE
from distributed_state.port.waited import Waited
from tests.simulation.network import Connection, Network, Wire
from tests.simulation.watch import SimulatedWatch
from tests.simulation.world import Future, Process, RunOver, Task

if TYPE_CHECKING:  # a cold tier needs a fleet, which needs this module
    from tests.simulation.fleet import Fleet

_LENT = 4  # threads of a pool, as in port/asyncio.py
_INSTANT = 1e-9  # seconds, in which no wait takes place
_PAUSE, _QUICK = 0.06, 1.0  # seconds: see port/topology.py


class SimulatedConnections(Connections):
    """The servers of a run, as one replica sees them."""

    def __init__(self, fleet: Fleet, process: Process, url: str, timeout: float, *, retry_for: float) -> None:
        super().__init__(url, timeout, retry_for=retry_for)
        self.fleet, self.process = fleet, process
        self.looking: Future | None = None  # set during a look
        if self._watch is not None:
            self._watch = SimulatedWatch(self)  # the listeners of the real one are threads

    def executor(self, count: int) -> futures.Executor:
        return AtOnce()

    def ask(self, node: str, *commands: Any, timeout: float, sentinel: bool = False) -> list[Any]:
        found = self.fleet.who_is(node)
        if not self.fleet.network.is_heard(self.process, found):
            raise WarmUnavailable(f"{node}: connection refused")
        mode = b"standalone" if found.member is None else b"cluster"
        answers = [[b"mode", mode] if words[0] == b"HELLO" else found.answer([words])[0] for words in commands]
        for answer in answers:
            if isinstance(answer, Exception):
                raise translate(answer, self.place) from answer
        return answers

    async def look_again(self) -> None:
        """Look, because the keys may be elsewhere."""
        self.topology.doubt()
        with suppress(StateError):
            await self.look_later(math.inf)

    async def look_later(self, seconds: float) -> None:
        """Look, which takes a moment; others continue meanwhile with the old topology. Raises as `look`."""
        topology, world = self.topology, self.fleet.world
        end = time.monotonic() + min(seconds, self.limits.total)
        while self.looking is not None:
            ended = Future()
            self.looking.calls.append(ended.settle)
            world.after(end - time.monotonic(), ended.settle)
            await ended
            if time.monotonic() >= end:
                raise WarmUnavailable(f"{self.place}: the server that has the keys is not known yet")
        if not topology.doubted:
            return
        self.looking = Future()
        try:
            # The real look pauses between two attempts, which would block here, and waits for silent servers.
            pause = topology._looked + _PAUSE - time.monotonic()
            before = bool(topology.nodes())
            topology.doubted = not before
            await world.sleep(max(self.fleet.network.delay(), pause) + self._silence(end))
            again, topology.doubted = topology.doubted and before, True
            self.look(max(0.01, end - time.monotonic()))
            topology.doubted = topology.doubted or again
        finally:
            looking, self.looking = self.looking, None
            looking.settle()

    def _silence(self, end: float) -> float:
        """Seconds for which a caller that asks all servers waits for those that do not answer."""
        network = self.fleet.network
        names = self.address.seeds if self.topology.kind == "sentinel" else sorted(self.topology._known)
        nodes = [self.fleet.who_is(name) for name in names]
        silent = [each for each in nodes if not each.is_down and not network.is_heard(self.process, each)]
        if not silent:
            return 0.0
        enough = 2 * (len(nodes) - len(silent)) > len(nodes)
        return 0.1 if enough else max(0.0, min(2.0 * _QUICK, 2 * self.timeout, end - time.monotonic()))


class AtOnce(futures.Executor):
    """An executor without threads: it runs each call at once."""

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **named: Any) -> futures.Future[Any]:
        done: futures.Future[Any] = futures.Future()
        try:
            done.set_result(call(*arguments, **named))
        except StateError as error:
            done.set_exception(error)
        return done


class Pool:
    """A pool of threads that run work for tasks. If none is free, the work waits in order, and is always completed."""

    def __init__(self, threads: int) -> None:
        self._free = threads
        self._queue: deque[Future] = deque()

    async def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of the work."""
        if self._free:
            self._free -= 1
        else:
            turn = Future()
            self._queue.append(turn)
            await turn
        try:
            return await work
        finally:
            if self._queue:
                self._queue.popleft().settle()
            else:
                self._free += 1


class InContext:
    """Work that a thread does for its caller, in a copy of the caller's context."""

    def __init__(self, work: Coroutine[Any, Any, Any]) -> None:
        self._work = work

    def __await__(self) -> Generator[Any, None, Any]:
        context = copy_context()
        step = partial(context.run, self._work.send, None)
        while True:
            try:
                found = step()
            except StopIteration as done:
                return done.value
            try:
                yield found
                step = partial(context.run, self._work.send, None)
            except BaseException as error:  # noqa: BLE001 - the work gets it
                step = partial(context.run, self._work.throw, error)


class SimulatedPort(Router):
    """The only access of one replica's core to the outside."""

    def __init__(self, connections: SimulatedConnections, replica: str = "") -> None:
        super().__init__(connections)
        self._there = connections
        self.process, self.replica = connections.process, replica
        self.world, self._fleet = self.process.world, connections.fleet
        self.monotonic = self.process.clock.monotonic
        self._network: Network = self._fleet.network
        self._shared: dict[tuple[str, str], Connection] = {}  # by server and use
        self._connecting: dict[tuple[str, str], Future] = {}
        self._free: dict[str, list[Connection]] = defaultdict(list)
        # All connections, including links and those in a handshake; and the data id of each server.
        self._made: dict[Connection, None] = {}
        self._used: dict[Connection, None] = {}
        self._jobs: list[SimulatedJob] = []
        self._passes, self._starts = Pool(_LENT), Pool(_LENT)
        self._lent: dict[Future, None] = {}  # work that continues although its caller has left
        self._is_closed = self._is_over = self._is_cut = False
        self._parting: Waited | None = None  # of the call that closes
        self._cutting: Future | None = None  # settled when nothing must be cut any longer
        connections.used(self._gone)

    # The caller

    @property
    def _task(self) -> Task:
        if Future.over:
            raise RunOver
        assert self.world.current is not None, "nobody calls"
        return self.world.current

    @property
    def suspends(self) -> bool:
        return not self._task.in_thread

    def here(self) -> object:
        return None if self._task.in_thread else self.process

    def holds_up(self, here: object) -> bool:
        return False

    def loop_of(self, owner: object) -> object:
        return owner.process if isinstance(owner, Task) and not owner.in_thread else None

    def when_a_loop_ends(self, call: Callable[[object], None]) -> None:
        """A process and its loop end together."""

    def owner(self) -> object:
        return self._task

    def wall(self) -> float:
        return self.process.clock.wall()

    # Connections

    async def open(self) -> None:
        await self.command(b"PING")

    async def close(self) -> None:
        self._is_closed = True
        self.ask_all()
        self._connections.unused(self._gone)
        # The work in progress in threads is completed first; the receiver of a subscription ends it.
        for connection in (*self._shared.values(), *(each for free in self._free.values() for each in free)):
            connection.fail("closed")
        self._free.clear()
        if self._cutting is not None:
            self._cutting.settle()
        end = self.monotonic() + self._timeout
        for outcome in list(self._lent):
            await self.ends(outcome, end - self.monotonic())
        self._is_over = True

    def abandon(self) -> None:
        raise AssertionError("a simulated process does not fork")

    async def look(self) -> None:
        account, began = waited.present(), self.monotonic()
        left = account.left(began, "", self._limits) if account is not None else math.inf
        try:
            await self._there.look_later(left)
        except StateError:
            if account is not None:
                account.add(began, "")
            raise
        if account is not None:
            account.add(began)

    def _gone(self, node: str) -> None:
        """A server is no longer used, or has another data id: callers that wait for its answers get an error.

        Under another data id, subscriptions continue, and connections in a handshake will get the new one.
        """
        for connection in list(self._used if node in self._topology.nodes() else self._made):
            if connection.node.name == node:
                connection.fail("another server has its keys now")

    def _cut(self, parting: Waited | None) -> None:
        """End every present and future wait of a thread for an answer. Only the call that parts may connect again."""
        self._is_cut, self._parting = True, parting
        self._free.clear()
        for connection in [each for each in self._made if each not in self._shared.values()]:
            connection.fail("the store is closed")

    async def _connect(self, node: str, kind: Callable[..., Connection], seconds: float) -> Connection:
        """A new connection. The handshake is one exchange, so INFO may be lost like any other command."""
        server = self._network.nodes[node]
        if self._task.in_thread and self._is_cut and (self._parting is None or waited.present() is not self._parting):
            raise WarmUnavailable(f"{self._place}: the store is closed, and Redis did not answer")
        if server.is_down:
            await self.world.sleep(self._network.delay())
            self._topology.doubt()
            raise WarmUnavailable(f"{node}: connection refused")
        made = kind(self._network, self.process, server)
        for known in (self._made, self._used):
            for each in [each for each in known if each.broken is not None]:
                del known[each]
        self._made[made] = None
        try:
            if self._topology.kind == "sentinel":
                (role,) = await self._within(made, made.send([(b"ROLE",)]), min(seconds, self._timeout))
                try:
                    self._connections._require_primary(node, role)
                except driver.ConnectionError as error:
                    raise translate(error, self._place) from error
            (answer,) = await self._within(made, made.send([identities.INFO]), min(seconds, self._timeout))
            made.data_id = self._connections.met(node, identities.read(answer))
        except BaseException as error:
            made.fail("its caller left")
            if isinstance(error, StateError):
                self._topology.doubt()
            raise
        if not isinstance(made, Wire):
            self._used[made] = None
        return made

    async def _pipe(self, node: str, use: str, end: float) -> Connection:
        """The connection that all tasks of a process share; one task makes it, and the others wait for it."""
        at = node, use
        while True:
            found = self._shared.get(at)
            if found is not None and found.broken is None:
                return found
            left = end - self.monotonic()
            connecting = self._connecting.get(at)
            if connecting is not None:
                if not await self.ends(connecting, left):
                    raise WarmUnavailable(f"{self._place}: no answer in time")
                continue
            connecting = self._connecting[at] = Future()
            try:
                made = self._shared[at] = await self._connect(node, self._plain(node), left)
            finally:
                del self._connecting[at]
                connecting.settle()
            if self._is_closed:
                made.fail("closed")
            return made

    def _plain(self, node: str) -> Callable[..., Connection]:
        return lambda *of: Connection(*of, partial(self._refused, node), self._topology.doubt)

    async def _within(self, connection: Connection, answer: Future, seconds: float) -> Any:
        """Wait for an answer on the caller's own connection, which is closed if the answer is late."""
        if not await self.ends(answer, seconds):
            connection.fail("no answer in time")
        return await answer

    async def exchange_with(self, node: str, commands: Sequence[Any]) -> list[Any]:
        return await self._exchange("shared", node, commands) if commands else []

    async def exchange_apart(self, node: str, commands: Sequence[Any]) -> list[Any]:
        return await self._exchange("apart", node, commands)

    async def _exchange(self, use: str, node: str, commands: Sequence[Any]) -> list[Any]:
        account = waited.present()
        began, left = self.monotonic(), math.inf
        if account is not None:
            left = account.left(began, node, self._limits)
        try:
            if self._task.in_thread:
                answers = await self._alone(node, commands, left, account)
            else:
                answers = await self._together_with_others(use, node, commands, began + left)
        except StateError as error:
            if account is not None:
                account.add(began, node)
            raise translate(error, self._place) from error
        if account is not None and account.silent:
            account.silent.discard(node)
        return answers

    async def _alone(self, node: str, commands: Sequence[Any], left: float, account: Waited | None) -> list[Any]:
        """Use a connection of the thread's own, taken from a pool and returned to it."""
        free = self._free[node]
        try:
            if free:
                connection = free.pop()
            else:
                began = self.monotonic()
                connection = await self._connect(node, self._plain(node), left)
                left -= self.monotonic() - began if account is not None else 0.0
            answer = connection.send(commands)
            if self.several:
                self.world.after(LATE, lambda: answer.done or self._late())
            answers: list[Any] = await self._within(connection, answer, min(left, self._timeout))
        except StateError:
            self._topology.doubt()
            while free:
                free.pop().fail("closed")
            raise
        if self._is_closed:
            connection.fail("closed")
        else:
            free.append(connection)
        return answers

    async def _together_with_others(self, use: str, node: str, commands: Sequence[Any], end: float) -> list[Any]:
        """Use the connection that tasks share. A late answer closes it: the next callers could get wrong answers."""
        if self._is_closed:
            raise WarmUnavailable(f"{self._place}: the store was closed meanwhile")
        connection = await self._pipe(node, use, end)
        answer = connection.send(commands)
        self.world.after(self._timeout, lambda: answer.done or connection.fail("no answer in time"))
        if self.several:
            self.world.after(LATE, lambda: answer.done or self._late())
        left = end - self.monotonic()
        if left < self._timeout and not await self.ends(answer, left):
            raise WarmUnavailable(f"{self._place}: no answer in time")
        answers: list[Any] = await answer
        return answers

    def _late(self) -> None:
        """Look whether another server has the keys now; if so, callers that wait for this one get an error."""
        if not self.process.is_dead and not self._is_closed and self._there.looking is None:
            Task(self.process, self._there.look_again(), f"{self.process.name}/look", in_thread=True)

    async def exchange_with_all(self, groups: dict[str, list[Any]]) -> dict[str, Any]:
        task = self._task
        name = f"{self.process.name}/exchange"
        asked = {
            node: Task(self.process, self._tried(node, sent), name, in_thread=task.in_thread, is_awaited=True)
            for node, sent in groups.items()
        }
        try:
            found = {node: await each.ended for node, each in asked.items()}
        except asyncio.CancelledError:
            for each in asked.values():
                each.cancel()
            raise
        for part in found.values():
            if isinstance(part, StateError) and not isinstance(part, WarmUnavailable):
                raise part
        return found

    async def _tried(self, node: str, commands: list[Any]) -> Any:
        try:
            return await self.exchange_with(node, commands)
        except StateError as error:
            return error

    async def wire(self, node: str) -> Any:
        made = await self._connect(node, Wire, self._timeout)
        assert isinstance(made, Wire)
        return SimulatedWire(self, made)

    # Waiting

    def end_if_stopped(self) -> None:
        """Raise JobStopped in a thread that was asked to end."""
        task = self._task
        if task.in_thread and task.asked.done:
            raise JobStopped

    async def ends(self, future: Future, seconds: float | None, *others: Future) -> bool:
        """Wait for one of these futures, even if asked to end. Return whether the first was settled in time."""
        if not future.done:
            either = Future()
            if seconds is not None and seconds < math.inf:
                self.world.after(seconds / self.process.clock.rate, either.settle)
            for each in (future, *others):
                each.calls.append(either.settle)
            try:
                await either
            finally:
                for each in (future, *others):
                    with suppress(ValueError):
                        each.calls.remove(either.settle)
        return future.done

    async def wait(self, future: Future, seconds: float | None) -> bool:
        """Wait for a future; False if it took longer. Raises JobStopped in a thread that was asked to end."""
        self.end_if_stopped()
        task = self._task
        await self.ends(future, seconds, *([task.asked] if task.in_thread else []))
        self.end_if_stopped()
        return future.done

    async def sleep(self, seconds: float) -> None:
        await self.wait(Future(), max(0.0, seconds))

    async def sql(self, call: Callable[..., Any], *arguments: Any) -> Any:
        if self._is_over and not self._task.in_thread:
            raise ColdUnavailable("the store was closed meanwhile")
        return await self._fleet.sql.run(self.process, call, arguments, self._lend)

    def _lend(self, outcome: Future) -> None:
        """Register work that continues, so that `close` waits for it."""
        self._lent[outcome] = None
        outcome.calls.append(lambda: self._lent.pop(outcome, None))

    async def thread(self, call: Callable[..., Any], *arguments: Any) -> Any:
        if self._task.in_thread:
            return call(*arguments)

        async def run() -> Any:
            return call(*arguments)

        return await Task(self.process, run(), f"{self.process.name}/thread", in_thread=True, is_awaited=True).ended

    async def complete(self, work: Awaitable[Any]) -> Any:
        try:
            return await work
        except asyncio.CancelledError as error:
            if self._task.cancelling:
                raise
            raise RuntimeError("the awaited result was cancelled") from error

    async def shield(self, work: Coroutine[Any, Any, Any]) -> Any:
        return await self._shielded(work, work, in_thread=False)

    async def drive(self, work: Coroutine[Any, Any, Any]) -> Any:
        return await self._driven(self._passes, work)

    async def drive_start(self, work: Coroutine[Any, Any, Any]) -> Any:
        return await self._driven(self._starts, work)

    async def _driven(self, pool: Pool, work: Coroutine[Any, Any, Any]) -> Any:
        if self._is_closed and not Future.over and not self._task.in_thread:
            work.close()
            raise WarmUnavailable("the store was closed meanwhile")
        return await self._shielded(work, pool.run(work), in_thread=True)

    async def _shielded(
        self, work: Coroutine[Any, Any, Any], lent: Coroutine[Any, Any, Any], *, in_thread: bool
    ) -> Any:
        if Future.over or self._task.in_thread:
            if lent is not work:
                lent.close()
            if Future.over:
                work.close()
                raise RunOver
            return await InContext(work)
        name = f"{self.process.name}/{work.__qualname__}"
        task = Task(self.process, lent, name, in_thread=in_thread, is_awaited=True)
        if in_thread:
            self._lend(task.ended)
        try:
            return await task.ended
        except asyncio.CancelledError:
            if task.ended.done and isinstance(task.ended.error, asyncio.CancelledError):
                raise
            # A caller that is cancelled leaves when the work is done, or after a time limit.
            if await self.ends(task.ended, self._timeout) and task.ended.error is not None:
                task.blame(task.ended.error)
            raise

    def spawn(self, job: Callable[[], Coroutine[Any, Any, None]], name: str) -> SimulatedJob:
        made = SimulatedJob(self, job, name, in_thread=True)
        self._jobs = [each for each in self._jobs if not each.task.ended.done]
        self._jobs.append(made)
        if self._is_closed:
            made.ask()
        return made

    def spawn_here(self, job: Callable[[], Coroutine[Any, Any, None]], name: str) -> SimulatedJob:
        return SimulatedJob(self, job, name, in_thread=self._task.in_thread)

    def ask_all(self) -> None:
        if self._cutting is None:
            # A job that waits for the answer of a frozen server does not notice that it was asked to end.
            cutting = self._cutting = Future()
            account, now = waited.present(), self.monotonic()
            left = self._limits.total - (account.seconds(now) if account is not None else 0.0)

            async def cut() -> None:
                if account is not None:
                    account.add(now)
                self._cut(account)

            def due() -> None:
                if not cutting.done and not self.process.is_dead:
                    Task(self.process, cut(), f"{self.process.name}/cut", in_thread=True)

            self.world.after(max(0.0, min(left, CUT)), due)
        for job in self._jobs:
            job.ask()

    def mutex(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def signal(self) -> SimulatedSignal:
        return SimulatedSignal(self)

    def guard(self) -> SimulatedGuard:
        return SimulatedGuard(self._task)


class SimulatedJob:
    """A thread or a task of the store."""

    def __init__(
        self, port: SimulatedPort, job: Callable[[], Coroutine[Any, Any, None]], name: str, *, in_thread: bool
    ) -> None:
        async def run() -> None:
            REPLICA.set(port.replica)
            await job()

        self._port = port
        self._until = math.inf  # the end of the time for which its end is awaited
        self._is_asked = False
        # A thread starts with a context of its own.
        context = Context() if in_thread else None
        self.task = Task(port.process, run(), f"{port.process.name}/{name}", in_thread=in_thread, context=context)

    def ask(self) -> None:
        """Ask it to end."""
        self._until = min(self._until, self._port.monotonic() + JOINED)
        asked, self._is_asked = self._is_asked, True
        if self.task.in_thread:
            self.task.asked.settle()
        elif not asked:
            self.task.cancel()

    async def stop(self) -> None:
        """Ask it to end, and wait until it has ended, unless it is the caller."""
        self.ask()
        if self._port.world.current is self.task:
            return
        if self.task.in_thread:
            await self._port.ends(self.task.ended, self._until - self._port.monotonic())
        else:
            await self._port.wait(self.task.ended, JOINED)


class SimulatedSignal:
    """Wakes all waiters. Stays set until cleared."""

    def __init__(self, port: SimulatedPort) -> None:
        self._port, self._set, self._waking = port, False, Future()

    def set(self) -> None:
        """Wake all waiters."""
        self._set = True
        waking, self._waking = self._waking, Future()
        waking.settle()

    def clear(self) -> None:
        """Make later waits block; also those of a waiter that was woken but has not checked yet."""
        self._set = False

    async def wait(self, seconds: float | None = None) -> bool:
        """Wait until set, at most `seconds`; True if it was set."""
        port = self._port
        task = port._task
        end = math.inf if seconds is None else port.monotonic() + seconds
        while not self._set:
            port.end_if_stopped()
            left = end - port.monotonic()
            if left < _INSTANT:
                if left > 0:  # advance the time: a caller that computes the rest would loop forever
                    await port.ends(Future(), _INSTANT)
                return self._set
            await port.ends(self._waking, left, *([task.asked] if task.in_thread else []))
        return True


class SimulatedGuard:
    """Cancels the task that entered it, and distinguishes its own cancellation from others', like asyncio.timeout."""

    def __init__(self, task: Task) -> None:
        self._task: Task | None = None if task.in_thread else task
        self._world = task.process.world
        self._before = task.cancelling
        self._fired = False

    @property
    def fired(self) -> bool:
        """Whether an interruption has reached the body."""
        return self._fired

    def interrupt(self, error: Exception | None = None) -> None:
        """Interrupt the body now."""
        if self._task is not None and not self._task.ended.done:
            self._fired = True
            self._task.cancel()

    def check(self) -> None:
        """A task is interrupted by itself."""

    async def absorb(self, error: BaseException | None) -> BaseException | None:
        """Return the error with which the body ended, or the interruption that is still on its way to it."""
        if self._fired and error is None:
            try:
                await self._world.sleep(0)
            except asyncio.CancelledError as late:
                return late
        return error

    def leave(self, error: BaseException | None) -> bool:
        """Return whether `error` is the interruption that this guard caused."""
        task, self._task = self._task, None
        if not self._fired or task is None:
            return False
        task.take_back()
        return task.cancelling <= self._before and isinstance(error, asyncio.CancelledError)


class SimulatedWire:
    """One subscription, as seen by the port."""

    def __init__(self, port: SimulatedPort, wire: Wire) -> None:
        self._port, self._wire = port, wire
        self.post, self.post_all = wire.post, wire.post_all

    async def receive(self) -> list[Any]:
        """The next message. Raises WarmUnavailable when the connection is lost or closed."""
        wire = self._wire
        while True:
            self._port.end_if_stopped()
            if wire.broken is not None:
                raise WarmUnavailable(f"{wire.node.name}: link lost: {wire.broken}")
            if wire.messages:
                return wire.messages.popleft()
            if wire.arrived.done:
                wire.arrived = Future()
            await self._port.wait(wire.arrived, None)

    def close(self) -> None:
        """Close the connection; a receiver gets an error."""
        self._wire.fail("the link is closed")
