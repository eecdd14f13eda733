"""The port of a simulated replica. Law: it keeps the rules of the real ones; one that breaks them invents faults.

A user's task may be cancelled at each await. A thread of the store's own ends only where it waits, once it is asked
to. SQL and user code in threads go on when the task that waits for them was cancelled.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from distributed_state.errors import StateError, WarmUnavailable
from distributed_state.port import waited
from distributed_state.port.background import JOINED, Stopped
from distributed_state.port.connections import Connections
from distributed_state.port.errors import translate
from distributed_state.port.routing import Router
from distributed_state.values.background_replica import REPLICA
from tests.simulation.network import Connection, Network, Wire
from tests.simulation.world import Future, Process, RunOver, Task

if TYPE_CHECKING:  # a cold tier needs a fleet, which needs this
    from tests.simulation.fleet import Fleet


class SimulatedConnections(Connections):
    """Where the servers of a run are, as one replica sees it."""

    def __init__(self, fleet: Fleet, process: Process, url: str, timeout: float, *, retry_for: float) -> None:
        super().__init__(url, timeout, retry_for=retry_for)
        self.fleet, self.process = fleet, process

    def ask(self, node: str, *commands: Any, timeout: float, sentinel: bool = False) -> list[Any]:
        found = self.fleet.network.nodes[node]
        if found.is_down or found.frozen_until > self.fleet.world.now:
            raise WarmUnavailable(f"{node}: connection refused")
        return [[b"mode", b"standalone"] if words[0] == b"HELLO" else found.carry_out([words])[0] for words in commands]


class SimulatedPort(Router):
    """Everything that the core of one replica may ask of the outside."""

    def __init__(self, connections: SimulatedConnections, replica: str = "") -> None:
        super().__init__(connections)
        self.process, self.replica = connections.process, replica
        self.world, self._fleet = self.process.world, connections.fleet
        self.monotonic = self.process.clock.monotonic
        self._network: Network = self._fleet.network
        self._shared: dict[tuple[str, str], Connection] = {}  # by server and use
        self._connecting: dict[tuple[str, str], Future] = {}
        self._free: dict[str, list[Connection]] = defaultdict(list)
        self._used: dict[Connection, None] = {}
        self._jobs: list[SimulatedJob] = []
        self._is_closed = False
        connections.used(self._gone)

    # Who calls

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

    def ended(self, owner: object) -> bool:
        return isinstance(owner, Task) and (owner.ended.done or owner.process.is_dead)

    def wall(self) -> float:
        return self.process.clock.wall()

    # Connections

    async def open(self) -> None:
        await self.command(b"PING")

    async def close(self) -> None:
        self._is_closed = True
        self.ask_all()
        self._connections.unused(self._gone)
        for connection in list(self._used):
            connection.fail("closed")

    def abandon(self) -> None:
        raise AssertionError("a simulated process does not fork")

    async def look(self) -> None:
        await self.sleep(self._network.delay())
        self._connections.look()

    def _gone(self, node: str) -> None:
        """A server is no longer asked, or is in another life: the connections that knew it end."""
        for connection in [each for each in self._used if each.node.name == node]:
            connection.fail("another server has its keys now")

    async def _connect(self, node: str, kind: Callable[..., Connection]) -> Connection:
        """A new connection: the handshake is one exchange, so that INFO may be lost like everything else."""
        server = self._network.nodes[node]
        if self._is_closed:
            raise WarmUnavailable(f"{self._place}: the store was closed meanwhile")
        if server.is_down:
            await self.world.sleep(self._network.delay())
            self._topology.doubt()
            raise WarmUnavailable(f"{node}: connection refused")
        made = kind(self._network, self.process, server)
        self._used[made] = None
        try:
            if isinstance(made, Wire):
                await self.world.sleep(self._network.delay())
            else:
                await self._within(made, made.send([(b"INFO",)]), self._timeout)
        except BaseException:
            made.fail("its caller left")
            self._used.pop(made, None)
            raise
        self._connections.met(node, made.node.life)
        return made

    async def _pipe(self, node: str, use: str) -> Connection:
        """The connection that all tasks of a process share; one task makes it, and the others wait for that."""
        at = node, use
        while True:
            found = self._shared.get(at)
            if found is not None and found.broken is None:
                return found
            connecting = self._connecting.get(at)
            if connecting is not None:
                await connecting
                continue
            connecting = self._connecting[at] = Future()
            try:
                self._shared[at] = await self._connect(node, self._plain(node))
            finally:
                del self._connecting[at]
                connecting.settle()
            return self._shared[at]

    def _plain(self, node: str) -> Callable[..., Connection]:
        return lambda *of: Connection(*of, on_error=partial(self._refused, node))

    async def _within(self, connection: Connection, answer: Future, seconds: float) -> Any:
        """Wait for an answer; a connection whose answer is late is over, as later ones could be taken for others'."""
        either = Future()
        answer.calls.append(either.settle)
        self.world.after(seconds, either.settle)
        if answer.done:
            either.settle()
        await either
        if not answer.done:
            if seconds >= self._timeout or self._task.in_thread:
                connection.fail("no answer in time")
            raise WarmUnavailable(f"{self._place}: no answer in time")
        if answer.error is not None:
            raise answer.error
        return answer.value

    async def exchange_with(self, node: str, commands: Sequence[Any]) -> list[Any]:
        return await self._exchange("shared", node, commands) if commands else []

    async def exchange_apart(self, node: str, commands: Sequence[Any]) -> list[Any]:
        return await self._exchange("apart", node, commands)

    async def _exchange(self, use: str, node: str, commands: Sequence[Any]) -> list[Any]:
        account = waited.present()
        began, left = self.monotonic(), self._timeout
        if account is not None:
            left = self._connections.left(account, began, node)
        free = self._free[node]
        try:
            if not self._task.in_thread:
                connection = await self._pipe(node, use)
                answers = await self._within(connection, connection.send(commands), left)
            else:
                while free and free[-1].broken is not None:
                    free.pop()
                connection = free.pop() if free else await self._connect(node, self._plain(node))
                answers = await self._within(connection, connection.send(commands), left)
                free.append(connection)
        except StateError as error:
            if account is not None:
                account.add(began, node)
            raise translate(error, self._place) from error
        if account is not None and account.silent:
            account.silent.discard(node)
        return answers

    async def exchange_with_all(self, groups: dict[str, list[Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for node, commands in groups.items():
            try:
                found[node] = await self.exchange_with(node, commands)
            except WarmUnavailable as error:
                found[node] = error
        return found

    async def wire(self, node: str) -> Any:
        made = await self._connect(node, Wire)
        assert isinstance(made, Wire)
        return SimulatedWire(self, made)

    # Waiting

    async def wait(self, future: Future, seconds: float | None) -> bool:
        """Wait for a future; False if it took longer. Raises Stopped in a thread that is asked to end."""
        task = self._task
        if task.in_thread and task.asked.done:
            raise Stopped
        if future.done:
            return True
        either = Future()
        future.calls.append(either.settle)
        if seconds is not None:
            self.world.after(seconds / self.process.clock.rate, either.settle)
        if task.in_thread:
            task.asked.calls.append(either.settle)
        try:
            await either
        finally:
            for each in (future, task.asked):
                with suppress(ValueError):
                    each.calls.remove(either.settle)
        if task.in_thread and task.asked.done:
            raise Stopped
        return future.done

    async def sleep(self, seconds: float) -> None:
        await self.wait(Future(), max(0.0, seconds))

    async def sql(self, call: Callable[..., Any], *arguments: Any) -> Any:
        return await self._fleet.sql.run(self.process, call, arguments)

    async def thread(self, call: Callable[..., Any], *arguments: Any) -> Any:
        await self.world.sleep(0.0)
        return call(*arguments)

    async def complete(self, work: Awaitable[Any]) -> Any:
        return await work

    async def shield(self, work: Coroutine[Any, Any, Any]) -> Any:
        return await self._shielded(work, in_thread=False)

    async def drive(self, work: Coroutine[Any, Any, Any]) -> Any:
        return await self._shielded(work, in_thread=True)

    drive_start = drive

    async def _shielded(self, work: Coroutine[Any, Any, Any], *, in_thread: bool) -> Any:
        if Future.over:
            work.close()
            raise RunOver
        if self._task.in_thread:
            return await work
        task = Task(self.process, work, f"{self.process.name}/{work.__qualname__}", in_thread=in_thread)
        try:
            return await task.ended
        except asyncio.CancelledError:
            if task.ended.done and isinstance(task.ended.error, asyncio.CancelledError):
                raise
            # Whoever is cancelled leaves when the work is done, or after so long.
            await self.wait(task.ended, self._timeout)
            raise

    def spawn(self, job: Callable[[], Coroutine[Any, Any, None]], name: str) -> SimulatedJob:
        return self._job(job, name, in_thread=True)

    def spawn_here(self, job: Callable[[], Coroutine[Any, Any, None]], name: str) -> SimulatedJob:
        return self._job(job, name, in_thread=self._task.in_thread)

    def _job(self, job: Callable[[], Coroutine[Any, Any, None]], name: str, *, in_thread: bool) -> SimulatedJob:
        made = SimulatedJob(self, job, name, in_thread=in_thread)
        self._jobs = [each for each in self._jobs if not each.task.ended.done]
        self._jobs.append(made)
        if self._is_closed:
            made.ask()
        return made

    def ask_all(self) -> None:
        for job in self._jobs:
            if job.task.in_thread:
                job.ask()

    def mutex(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def signal(self) -> SimulatedSignal:
        return SimulatedSignal(self)

    def guard(self) -> SimulatedGuard:
        return SimulatedGuard(self._task)


class SimulatedJob:
    """A thread or a task of the store's own."""

    def __init__(
        self, port: SimulatedPort, job: Callable[[], Coroutine[Any, Any, None]], name: str, *, in_thread: bool
    ) -> None:
        async def run() -> None:
            REPLICA.set(port.replica)
            await job()

        self._port = port
        self.task = Task(port.process, run(), f"{port.process.name}/{name}", in_thread=in_thread)

    def ask(self) -> None:
        """Ask it to end."""
        if self.task.in_thread:
            self.task.asked.settle()
        elif not self.task.cancelling:
            self.task.cancel()

    async def stop(self) -> None:
        """Ask it to end, and wait for that unless it is the caller."""
        self.ask()
        if self._port.world.current is not self.task:
            with suppress(Stopped):
                await self._port.wait(self.task.ended, JOINED)


class SimulatedSignal:
    """Wakes whoever waits. Stays set until cleared."""

    def __init__(self, port: SimulatedPort) -> None:
        self._port, self._future = port, Future()

    def set(self) -> None:
        """Wake all who wait."""
        self._future.settle(True)

    def clear(self) -> None:
        """Let whoever waits from now on wait."""
        if self._future.done:
            self._future = Future()

    async def wait(self, seconds: float | None = None) -> bool:
        """Wait until set, at most `seconds`; True if it was set."""
        return await self._port.wait(self._future, seconds)


class SimulatedGuard:
    """Cancels the task that entered it, and knows its own cancellation from others', as asyncio.timeout does."""

    def __init__(self, task: Task) -> None:
        self._task: Task | None = None if task.in_thread else task
        self._before = task.cancelling
        self._fired = False

    def interrupt(self) -> None:
        """End the body now."""
        if self._task is not None and not self._task.ended.done:
            self._fired = True
            self._task.cancel()

    def leave(self, error: BaseException | None) -> bool:
        """True if `error` is the interruption that this guard caused."""
        task, self._task = self._task, None
        if not self._fired or task is None:
            return False
        task.cancelling -= 1
        return task.cancelling <= self._before and isinstance(error, asyncio.CancelledError)


class SimulatedWire:
    """One subscription, as the port has it."""

    def __init__(self, port: SimulatedPort, wire: Wire) -> None:
        self._port, self._wire = port, wire
        self.post, self.post_all = wire.post, wire.post_all

    async def receive(self) -> list[Any]:
        """The next message. Raises WarmUnavailable when the connection is lost or closed."""
        wire = self._wire
        while True:
            if wire.broken is not None:
                raise WarmUnavailable(f"{wire.node.name}: link lost: {wire.broken}")
            if wire.messages:
                return wire.messages.popleft()
            if wire.arrived.done:
                wire.arrived = Future()
            await self._port.wait(wire.arrived, None)

    def close(self) -> None:
        """Drop the connection; whoever receives gets an error."""
        self._wire.fail("the link is closed")
