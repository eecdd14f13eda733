"""The implementations on which the contract of `Port` is tested, each with an environment that can fail.

Law: a test is written once. It is a coroutine that awaits only its port and its ground. It is run by asyncio, by the
scheduler of the simulator, or step by step as blocking code; in the last case each of its tasks is a thread.
"""

from __future__ import annotations

import asyncio
import math
import socket
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any, Protocol
from urllib.parse import urlsplit

import redis
from proxy import Proxy

from distributed_state.errors import WarmUnavailable
from distributed_state.port.background import finish
from distributed_state.port.connections import Connections
from distributed_state.port.shared import SharedPort
from tests.simulation import world
from tests.simulation.fleet import SERVER, Fleet
from tests.simulation.node import Persistence
from tests.simulation.port import SimulatedConnections, SimulatedPort
from tests.simulation.world import Process, World

EMBEDDED, REAL = {"asyncio-embedded", "blocking-embedded"}, {"asyncio", "blocking"}
TASKS = {"asyncio-embedded", "asyncio", "simulated"}
NETWORK = {*REAL, "simulated", "simulated-thread"}
EVERY = EMBEDDED | NETWORK
PATIENCE = 30.0  # seconds: a test whose wait for an answer takes longer has failed
SEEDS = range(1, 9)  # number of orders in which the steps of a test run
_LONGEST = 1000.0  # seconds of simulated time
Test = Callable[..., Coroutine[Any, Any, None]]


def on(kinds: set[str]) -> Callable[[Test], Callable[..., None]]:
    """Run a test on these kinds of ground."""

    def decorate(test: Test) -> Callable[..., None]:
        @wraps(test)
        def whole(ground: Ground, **given: Any) -> None:
            ground.run(partial(test, **given))

        vars(whole)["kinds"] = kinds
        return whole

    return decorate


class Begun(Protocol):
    """A task or a thread that a test started."""

    def ended(self) -> bool:
        """Whether it has ended."""
        ...

    def cancel(self) -> None:
        """Cancel it, if it is a task."""
        ...

    async def result(self) -> Any:
        """What it returned, or raised, once it has ended."""
        ...


class Held(Protocol):
    """Requests that were sent to the server, which has not executed them yet."""

    def arrived(self) -> bool:
        """Whether they have arrived."""
        ...

    def go(self) -> None:
        """Let the server execute them."""
        ...


class Steps:
    """An awaitable that counts how often the work suspends."""

    def __init__(self, work: Coroutine[Any, Any, Any]) -> None:
        self._work, self.count = work, 0

    def __await__(self) -> Generator[Any, Any, Any]:
        while True:
            try:
                found = self._work.send(None)
            except StopIteration as done:
                return done.value
            self.count += 1
            yield found


class Ground:
    """One running implementation of the port. `suspends`: its callers are tasks, which can be cancelled."""

    suspends = True
    has_network = True
    is_simulated = False
    port: Any

    def run(self, test: Test) -> None:
        """Run a test."""
        raise NotImplementedError

    def open(self, timeout: float = PATIENCE, retry_for: float = 0.0) -> Any:
        """Open another port, closed after the test."""
        raise NotImplementedError

    def begin(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run this concurrently with the test."""
        raise NotImplementedError

    async def pause(self) -> None:
        """Let other tasks run for a moment."""
        raise NotImplementedError

    def gate(self) -> Any:
        """An event on which code in a thread may `wait` until it is `set`. Meanwhile simulated threads do not run."""
        return threading.Event()

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait for a condition."""
        while not condition():
            await self.pause()

    async def again(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """The result of this call once the server can be reached."""
        while True:
            try:
                return await call()
            except WarmUnavailable:
                await self.pause()

    async def in_job(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """The result or error of this work in one of the store's own threads."""
        found: list[tuple[Any, BaseException | None]] = []

        async def job() -> None:
            try:
                found.append((await work(), None))
            except Exception as error:  # noqa: BLE001 - the test gets it
                found.append((None, error))

        self.port.spawn(job, "contract")
        await self.until(lambda: found)
        ((value, problem),) = found
        if problem is not None:
            raise problem
        return value

    @property
    def node(self) -> str:
        """The name of the server."""
        (found,) = self.port.nodes()
        return str(found)

    def key(self, name: str = "key") -> bytes:
        """A key that only this test uses."""
        raise NotImplementedError

    def drop(self, port: Any) -> None:
        """Let a port drop its connections, as if another server had the keys."""
        port._connections.topology.drop(self.node)

    def hold(self, needle: bytes, count: int = 1) -> Any:
        """Hold requests that contain these bytes before the server; `count` requests if each has its own connection."""
        raise NotImplementedError

    def cut(self) -> None:
        """Cut all connections."""
        raise NotImplementedError

    def mute(self) -> None:
        """From now on, present connections stay open but transmit nothing."""
        raise NotImplementedError

    def freeze(self) -> None:
        """Freeze the server: it accepts connections and does not answer."""
        raise NotImplementedError

    def thaw(self) -> None:
        """Let the server continue."""
        raise NotImplementedError

    def another_life(self) -> None:
        """New connections find other data; present connections continue."""
        raise NotImplementedError


# The real port


class HeldByProxy:
    """Requests held by a proxy. `shared`: they share one connection, on which all wait for the first."""

    def __init__(self, proxy: Proxy, needle: bytes, count: int, shared: bool) -> None:
        self._delays = [proxy.hold(needle) for _ in range(1 if shared else count)]

    def arrived(self) -> bool:
        return all(each.arrived.is_set() for each in self._delays)

    def go(self) -> None:
        for each in self._delays:
            each.go.set()


class RealGround(Ground):
    """The shared port on the embedded server, or on a real one behind a proxy. `other`: the URL of another server."""

    def __init__(self, url: str | None, other: str = "") -> None:
        self._url, self._other = url, other
        self.has_network = url is not None
        self._name = uuid.uuid4().hex[:12]
        self._ports: list[Any] = []

    def run(self, test: Test) -> None:
        with ExitStack() as self._stack:
            if self._url is not None:
                self._proxy = self._stack.enter_context(Proxy(self._url))
            self._run(self._whole(test))

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run(work)

    async def _whole(self, test: Test) -> None:
        self.port = self.open()
        await self.port.open()
        try:
            await test(self)
        finally:
            for port in reversed(self._ports):
                await port.close()

    def open(self, timeout: float = PATIENCE, retry_for: float = 0.0) -> Any:
        url = None if self._url is None else self._proxy.url
        port = SharedPort(Connections(url, timeout, retry_for=retry_for), "replica")
        self._ports.append(port)
        return port

    def key(self, name: str = "key") -> bytes:
        return f"{self._name}:{name}".encode()

    def hold(self, needle: bytes, count: int = 1) -> HeldByProxy:
        return HeldByProxy(self._proxy, needle, count, shared=self.suspends)

    def cut(self) -> None:
        self._proxy.cut()

    def mute(self) -> None:
        self._proxy.mute(b"")

    def freeze(self) -> None:
        silent = self._stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self._proxy.lead_to(f"redis://127.0.0.1:{silent.getsockname()[1]}")
        self._proxy.mute(b"")

    def thaw(self) -> None:
        self._proxy.lead_to(self._url or "")
        self._proxy.cut()

    def another_life(self) -> None:
        password = urlsplit(self._url).password
        with redis.Redis.from_url(self._other) as client:
            client.execute_command("ACL", "SETUSER", "default", f">{password}")  # an additional password
        self._proxy.lead_to(self._other)


class BegunTask:
    """An asyncio task."""

    def __init__(self, work: Coroutine[Any, Any, Any]) -> None:
        self.task = asyncio.create_task(work)
        self.ended, self.cancel = self.task.done, self.task.cancel

    async def result(self) -> Any:
        return await self.task


class AsyncioGround(RealGround):
    """The port as tasks of an event loop call it."""

    def begin(self, work: Coroutine[Any, Any, Any]) -> BegunTask:
        return BegunTask(work)

    async def pause(self) -> None:
        await asyncio.sleep(0.001)


class BegunThread:
    """A thread, which cannot be cancelled."""

    def __init__(self, work: Coroutine[Any, Any, Any]) -> None:
        self._work = work
        self._found: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._do, daemon=True)
        self._thread.start()

    def _do(self) -> None:
        try:
            self._found = finish(self._work)
        except BaseException as error:  # noqa: BLE001 - the test gets it
            self._error = error

    def ended(self) -> bool:
        return not self._thread.is_alive()

    def cancel(self) -> None:
        raise AssertionError("nothing cancels a thread")

    async def result(self) -> Any:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._found


class BlockingGround(RealGround):
    """The port as blocking code calls it, in any thread."""

    suspends = False

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        finish(work)

    def begin(self, work: Coroutine[Any, Any, Any]) -> BegunThread:
        return BegunThread(work)

    async def pause(self) -> None:
        time.sleep(0.001)


# The simulated port


class BegunSimulated:
    """A task of the scheduler."""

    def __init__(self, task: world.Task) -> None:
        self.task = task
        self.cancel = task.cancel

    def ended(self) -> bool:
        return self.task.ended.done

    async def result(self) -> Any:
        return await self.task.ended


class HeldOnTheWay:
    """Requests held in the network."""

    def __init__(self, ground: SimulatedGround, needle: bytes, count: int) -> None:
        self._ground, self._count = ground, count
        ground.fleet.network.held = needle

    def arrived(self) -> bool:
        return sum(len(each._inbox) for each in self._ground.process.connections) >= self._count

    def go(self) -> None:
        self._ground.fleet.network.held = b""
        self._ground.thaw()


class NoGate:
    """The gate of a simulated thread, which runs as one step when its time has come."""

    def wait(self) -> None: ...

    def set(self) -> None: ...


class SimulatedGround(Ground):
    """The simulated port in a world of its own; a test runs with several orders of its steps."""

    is_simulated = True

    def __init__(self, *, in_thread: bool = False) -> None:
        self.suspends = not in_thread

    def run(self, test: Test) -> None:
        for seed in SEEDS:
            self.world = World(seed)
            with self.world.rules():
                self.fleet = Fleet(self.world, Persistence("always"))
                self.process = Process(self.world, "replica")
                self._ports: list[Any] = []
                root = self._task(self._whole(test), "test")
                try:
                    self.world.run_until(root.ended, _LONGEST)
                    failures = list(self.world.failures)
                finally:
                    self.world.bury()
            if root.ended.error is not None:
                root.ended.error.add_note(f"seed {seed}")
                raise root.ended.error
            assert not failures, f"seed {seed}"

    def _task(self, work: Coroutine[Any, Any, Any], name: str) -> world.Task:
        return world.Task(self.process, work, name, in_thread=not self.suspends, is_awaited=True)

    async def _whole(self, test: Test) -> None:
        self.port = self.open()
        await self.port.open()
        await test(self)
        for port in reversed(self._ports):
            await port.close()

    def open(self, timeout: float = PATIENCE, retry_for: float = 0.0) -> Any:
        url = f"redis://{SERVER}"
        port = SimulatedPort(
            SimulatedConnections(self.fleet, self.process, url, timeout, retry_for=retry_for), "replica"
        )
        self._ports.append(port)
        return port

    def begin(self, work: Coroutine[Any, Any, Any]) -> BegunSimulated:
        return BegunSimulated(self._task(work, "begun"))

    async def pause(self) -> None:
        await self.world.sleep(0.001)

    def gate(self) -> NoGate:
        return NoGate()

    def key(self, name: str = "key") -> bytes:
        return f"contract:{name}".encode()

    def hold(self, needle: bytes, count: int = 1) -> HeldOnTheWay:
        return HeldOnTheWay(self, needle, count)

    def cut(self) -> None:
        for each in list(self.process.connections):
            each.fail("cut")

    def mute(self) -> None:
        for each in self.process.connections:
            each._is_cut = True

    def freeze(self) -> None:
        self.fleet.server.frozen_until = math.inf

    def thaw(self) -> None:
        self.fleet.server.frozen_until = 0.0
        for each in self.process.connections:
            each.serve()

    def another_life(self) -> None:
        nodes = self.fleet.network.nodes
        nodes[SERVER] = nodes[SERVER].rebuilt(self.world.now, self.fleet._life())
