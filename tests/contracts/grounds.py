"""The implementations on which the contract of `Port` is tested, each with an environment that can fail.

Law: a test is written once. It is a coroutine that awaits only its port and its ground. It is run by asyncio, by the
scheduler of the simulator, or step by step as blocking code; in the last case each of its tasks is a thread.

By default a test runs on one kind of ground of each sort: embedded, simulated and real, of which the kinds take turns
from test to test, as the APIs do. `--wide` runs it on every kind, `--full` on every kind and API.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import socket
import threading
import time
import uuid
import zlib
from collections.abc import Awaitable, Callable, Collection, Coroutine, Generator, Sequence
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

import redis
from below import relocated
from combinations import APIS
from proxy import Proxy

from distributed_state.errors import WarmUnavailable
from distributed_state.port.addresses import host_and_port
from distributed_state.port.background import finish
from distributed_state.port.connections import Connections
from distributed_state.port.shared import SharedPort
from distributed_state.programs.servers import ClusterNode, RedisCluster, begin_move, end_move, move_keys
from distributed_state.values.keys import tag
from tests.simulation import cluster as model
from tests.simulation import world
from tests.simulation.fleet import Fleet
from tests.simulation.node import Node, Persistence
from tests.simulation.port import SimulatedConnections, SimulatedPort
from tests.simulation.world import Process, World

# "redis" is the oldest server that the package serves; "sentinel" watches what "redis" is, "cluster" is of Valkey.
REAL = ("valkey", "redis", "sentinel", "cluster")
SIMULATED = ("simulated", "simulated sentinel", "simulated cluster")
EMBEDDED = ("embedded",)
NETWORK = (*REAL, *SIMULATED)
EVERY = (*EMBEDDED, *NETWORK)
SINGLE = ("valkey", "redis", "simulated")
SENTINEL = ("sentinel", "simulated sentinel")
CLUSTER = ("cluster", "simulated cluster")
LIMIT = 30.0  # seconds: a test whose wait for an answer takes longer has failed
SEEDS = range(1, 9)  # number of orders in which the steps of a test run
_LONGEST = 1000.0  # seconds of simulated time
_NODES = 3  # of a simulated cluster
Test = Callable[..., Coroutine[Any, Any, None]]


class Case(NamedTuple):
    """On which ground a test runs, and who calls its port: tasks ("asyncio") or blocking code."""

    kind: str
    api: str

    def __str__(self) -> str:
        return f"{self.api} {self.kind}"


def on(kinds: Collection[str], *, api: str = "") -> Callable[[Test], Callable[..., None]]:
    """Run a test on these kinds of ground, on both APIs or this one."""

    def decorate(test: Test) -> Callable[..., None]:
        @wraps(test)
        def whole(ground: Ground, **given: Any) -> None:
            ground.run(partial(test, **given))

        vars(whole)["kinds"], vars(whole)["apis"] = kinds, (api,) if api else APIS
        return whole

    return decorate


def cases(name: str, kinds: Collection[str], apis: Sequence[str], mode: str = "") -> list[Case]:
    """The cases of the test of this name in a run that is "wide", "full" or neither; the first are those of neither."""
    turn = zlib.crc32(name.encode())
    sorts = [[each for each in sort if each in kinds] for sort in (EMBEDDED, SIMULATED, REAL)]
    chosen = [sort.pop(turn % len(sort)) for sort in sorts if sort]
    chosen += itertools.chain(*sorts) if mode else ()
    # The kinds and the APIs are chosen by different digits, so that every two of them meet.
    found = [Case(kind, apis[(turn // 100 + at) % len(apis)]) for at, kind in enumerate(chosen)]
    every = [Case(kind, api) for kind in chosen for api in apis]
    return found + [each for each in every if each not in found] if mode == "full" else found


class Begun(Protocol):
    """A task or a thread that a test started."""

    def ended(self) -> bool:
        """Whether it has ended."""
        ...

    def cancel(self) -> None:
        """Cancel it, if it is a task."""
        ...

    async def result(self) -> Any:
        """The result of the work, or its error, once it has ended."""
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
    is_simulated = False
    port: Any
    kind = ""

    def run(self, test: Test) -> None:
        """Run a test."""
        raise NotImplementedError

    def open(self, timeout: float = LIMIT, retry_for: float = 0.0) -> Any:
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
        """The server that had this test's keys in the beginning: in a cluster its first, which is also asked PING."""
        return str(self.port.nodes()[0])

    def key(self, name: str = "key") -> bytes:
        """A key that only this test uses. All of them are in one slot."""
        raise NotImplementedError

    def key_of(self, node: str) -> bytes:
        """A key that only this test uses, and that this server of a cluster has."""
        names = (self.key().replace(b"}", b"%d}" % number) for number in itertools.count())
        return next(each for each in names if self.port.node_of(each) == node)

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
        """Freeze the server that has the keys: it accepts connections and does not answer."""
        raise NotImplementedError

    def thaw(self) -> None:
        """Let the server continue."""
        raise NotImplementedError

    def other_data(self) -> None:
        """New connections find other data; present connections continue."""
        raise NotImplementedError

    # For Sentinels and clusters only

    def demote(self) -> None:
        """Make the server that has the keys a replica; connections to it stay open. The Sentinels do not act."""
        raise NotImplementedError

    def promote(self) -> None:
        """Make it the primary again, with the data that it has."""
        raise NotImplementedError

    def replace(self) -> None:
        """Let the Sentinels promote another server."""
        raise NotImplementedError

    def begin_move(self) -> str:
        """Begin to move the slot of the keys to another server, and return which; the keys stay where they are."""
        raise NotImplementedError

    def move(self, *keys: bytes) -> None:
        """Move these keys of the slot."""
        raise NotImplementedError

    def end_move(self) -> None:
        """Give the slot to the other server; clients are not notified."""
        raise NotImplementedError

    def give_up_slot(self) -> None:
        """Let the server that has the keys give up their slot, which then has no owner."""
        raise NotImplementedError

    def take_slot(self) -> None:
        """Let it take the slot again."""
        raise NotImplementedError


# The real port


class Proxies:
    """A proxy before each server, made when it is first connected to."""

    def __init__(self, stack: ExitStack, url: str) -> None:
        self._stack, self._url = stack, url
        self._mutex = threading.Lock()
        self.made: dict[str, Proxy] = {}

    def before(self, node: str) -> Proxy:
        """The proxy before this server."""
        with self._mutex:
            if node not in self.made:
                self.made[node] = self._stack.enter_context(Proxy(relocated(self._url, node)))
            return self.made[node]


class ProxiedConnections(Connections):
    """Connections through these proxies. Sentinels are connected to directly."""

    def __init__(self, proxies: Proxies, url: str, timeout: float, *, retry_for: float) -> None:
        self._proxies = proxies
        super().__init__(url, timeout, retry_for=retry_for)

    def _before(self, node: str) -> str:
        if self.address.kind == "sentinel" and node in self.address.seeds:
            return node
        return urlsplit(self._proxies.before(node).url).netloc.rpartition("@")[2]

    def _blocking(self, node: str, options: dict[str, Any], timeout: float = 0) -> Any:
        return super()._blocking(self._before(node), options, timeout)

    def _asyncio(self, node: str) -> Any:
        return super()._asyncio(self._before(node))


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
    """The shared port on the embedded server, or on real ones. `faults`: each real one is behind a proxy."""

    def __init__(self, kind: str, servers: Any, *, faults: bool) -> None:
        self.kind, self._servers, self._faults = kind, servers, faults
        self._url: str = servers.warm("fake" if kind == "embedded" else kind) or ""
        self._name = uuid.uuid4().hex[:12]
        self._tag = b""
        self._ports: list[Any] = []

    def run(self, test: Test) -> None:
        with ExitStack() as self._stack:
            self._proxies = Proxies(self._stack, self._url)
            self._run(self._whole(test))

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run(work)

    async def _whole(self, test: Test) -> None:
        self.port = self.open()
        await self.again(self.port.open)
        tags = (f"{self._name}.{number}".encode() for number in itertools.count())
        self._tag = next(each for each in tags if self.port.node_of(b"{%b}" % each) == self.node)
        try:
            await test(self)
        finally:
            for port in reversed(self._ports):
                await port.close()

    def open(self, timeout: float = LIMIT, retry_for: float = 0.0) -> Any:
        if self._faults:
            connections: Connections = ProxiedConnections(self._proxies, self._url, timeout, retry_for=retry_for)
        else:
            connections = Connections(self._url or None, timeout, retry_for=retry_for)
        return self._opened(connections)

    def open_at(self, url: str) -> Any:
        """Open a port with another URL, without a proxy, closed after the test."""
        return self._opened(Connections(url, LIMIT))

    def _opened(self, connections: Connections) -> SharedPort:
        port = SharedPort(connections, "replica")
        self._ports.append(port)
        return port

    @property
    def url(self) -> str:
        """The URL of the servers."""
        return self._url

    def key(self, name: str = "key") -> bytes:
        return b"{%b}:%b" % (self._tag, name.encode())

    def hold(self, needle: bytes, count: int = 1) -> HeldByProxy:
        return HeldByProxy(self._proxies.before(self.node), needle, count, shared=self.suspends)

    def cut(self) -> None:
        for proxy in list(self._proxies.made.values()):
            proxy.cut()

    def mute(self) -> None:
        for proxy in list(self._proxies.made.values()):
            proxy.mute(b"")

    def freeze(self) -> None:
        silent = self._stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        proxy = self._proxies.before(self.node)
        proxy.lead_to(f"redis://127.0.0.1:{silent.getsockname()[1]}")
        proxy.mute(b"")

    def thaw(self) -> None:
        proxy = self._proxies.before(self.node)
        proxy.lead_to(relocated(self._url, self.node))
        proxy.cut()

    def other_data(self) -> None:
        other = self._servers.redis("redis" if self.kind == "valkey" else "valkey").url
        with redis.Redis.from_url(other) as client:
            client.execute_command("ACL", "SETUSER", "default", f">{self._password}")  # an additional password
        self._proxies.before(self.node).lead_to(other)

    # Sentinels and clusters

    @property
    def _password(self) -> str:
        return urlsplit(self._url).netloc.rpartition("@")[0].rpartition(":")[2]

    def ask(self, *words: Any) -> Any:
        """The answer of the server that had the keys in the beginning; it may not have them now."""
        host, port = host_and_port(self.home)
        with redis.Redis(host=host, port=port, password=self._password) as client:
            return client.execute_command(*words)

    @property
    def home(self) -> str:
        """The server that had the keys when this was first asked."""
        return str(vars(self).setdefault("_home", self.node))

    def afterwards(self, undo: Callable[[], Any]) -> None:
        """Call this after the test: its servers are others' too."""
        self._stack.callback(undo)

    def demote(self) -> None:
        self.afterwards(self._settled)
        self.afterwards(self.promote)
        self.ask("REPLICAOF", "127.0.0.1", 1)  # where nobody listens, so its data stays

    def promote(self) -> None:
        self.ask("REPLICAOF", "NO", "ONE")

    def _settled(self) -> None:
        if self.kind == "sentinel":
            self._servers.sentinel().wait_converged()

    def replace(self) -> None:
        self._servers.sentinel().failover()

    @property
    def _cluster(self) -> RedisCluster:
        found: RedisCluster = self._servers.cluster()
        return found

    @property
    def _slot(self) -> int:
        return model.slot_of(self.key())

    def _nodes(self) -> list[ClusterNode]:
        """The server that had the keys in the beginning, and the others."""
        port = host_and_port(self.home)[1]
        return sorted(self._cluster.nodes, key=lambda node: (node.port != port, node.port))

    def begin_move(self) -> str:
        source, target, *_ = self._nodes()
        self.afterwards(self._move_back)
        begin_move(self._slot, source, target)
        return f"127.0.0.1:{target.port}"

    def move(self, *keys: bytes) -> None:
        source, target, *_ = self._nodes()
        words = ("127.0.0.1", target.port, "", 0, 5000, "AUTH", target.password, "KEYS")
        source.ask("MIGRATE", *words, *(key.decode() for key in keys))

    def end_move(self) -> None:
        source, target, *others = self._nodes()
        end_move(self._slot, source, target, others)

    def _move_back(self) -> None:
        source, target, *_ = self._nodes()
        if target.itself().owns(self._slot):
            self._cluster.move_slots([self._slot], source)
        else:
            source.ask("CLUSTER", "SETSLOT", self._slot, "STABLE")  # or it would redirect what comes back
            move_keys(self._slot, target, source)
        for node in self._cluster.nodes:
            node.ask("CLUSTER", "SETSLOT", self._slot, "STABLE")
        self._cluster.wait_converged()

    def give_up_slot(self) -> None:
        self.afterwards(self._cluster.wait_converged)
        self.afterwards(self.take_slot)
        self.ask("CLUSTER", "DELSLOTS", self._slot)

    def take_slot(self) -> None:
        source, *_ = self._nodes()
        if not source.itself().owns(self._slot):
            self.ask("CLUSTER", "ADDSLOTS", self._slot)


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

    def __init__(self, kind: str, *, in_thread: bool = False) -> None:
        self.kind, self.suspends = kind, not in_thread

    def run(self, test: Test) -> None:
        for seed in SEEDS:
            self.world = World(seed)
            with self.world.rules():
                self.fleet = self._fleet()
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

    def _fleet(self) -> Fleet:
        if self.kind == "simulated":
            return Fleet(self.world, Persistence("always"))
        if self.kind == "simulated cluster":
            return Fleet(self.world, Persistence("always"), primaries=_NODES, namespace="contract", partitions=_NODES)
        fleet = Fleet(self.world, Persistence("always"), lags=(0.001,), watched=True)
        assert fleet.sentinels is not None
        for each in fleet.sentinels.all.values():
            each.alone_until = math.inf  # nobody is replaced while no test asks for it
        return fleet

    def _task(self, work: Coroutine[Any, Any, Any], name: str) -> world.Task:
        return world.Task(self.process, work, name, in_thread=not self.suspends, is_awaited=True)

    async def _whole(self, test: Test) -> None:
        self.port = self.open()
        await self.port.open()
        await test(self)
        for port in reversed(self._ports):
            await port.close()

    def open(self, timeout: float = LIMIT, retry_for: float = 0.0) -> Any:
        port = SimulatedPort(
            SimulatedConnections(self.fleet, self.process, self.fleet.url, timeout, retry_for=retry_for), "replica"
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
        return f"{{{tag(0, _NODES)}}}:contract:{name}".encode()  # only slots of partitions may move

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

    def other_data(self) -> None:
        old = self.fleet.server
        made = self.fleet.network.nodes[old.name] = old.rebuilt(self.world.now, self.fleet._identity())
        if old.member is not None:
            made.member, old.member.node = old.member, made

    # Sentinels and clusters

    @property
    def _copy(self) -> Node:
        return next(each for each in self.fleet.group.nodes() if each.link is not None)

    def demote(self) -> None:
        self.fleet.server.follow(self._copy, 0.0, self.world.now)

    def promote(self) -> None:
        self.fleet.server.promote(self.fleet._identity().data)

    def replace(self) -> None:
        sentinels = self.fleet.sentinels
        assert sentinels is not None
        for each in sentinels.all.values():
            each.alone_until = 0.0
        sentinels.hand_over()

    @property
    def _cluster(self) -> model.Cluster:
        assert self.fleet.cluster is not None
        return self.fleet.cluster

    @property
    def _slot(self) -> int:
        return model.slot_of(self.key())

    @property
    def _both(self) -> tuple[model.Member, model.Member]:
        """The first server of the cluster, which has the keys in the beginning, and the second."""
        first, second, *_ = self._cluster.members.values()
        return first, second

    def begin_move(self) -> str:
        source, target = self._both
        source.migrating[self._slot], target.importing[self._slot] = target.name, source.name
        return target.name

    def move(self, *keys: bytes) -> None:
        source, target = self._both
        for key in keys:
            model.hand_over(key, source.node, target.node)

    def end_move(self) -> None:
        self._cluster._take(self._slot, *self._both)

    def give_up_slot(self) -> None:
        source, _ = self._both
        source.owners[self._cluster.slots.piece(self._slot)] = ""

    def take_slot(self) -> None:
        source, _ = self._both
        source.owners[self._cluster.slots.piece(self._slot)] = source.name
