"""The life of agents in a process: start, events, signals, end. Law: what was begun is finished, in a limited time.

All hooks of a process but `main_loop` run in one thread (one task under asyncio), those for signals too. What a
`main_loop` raises is logged at once, and raised where the agents end: it ends `run()`, but not the body of a `with`.
"""

from __future__ import annotations

import inspect
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from types import TracebackType
from typing import Any, Self

from distributed_state.agents.base_agent import LONG, BaseAgent, core, defaults_of
from distributed_state.agents.blocking_deleted_state import LastState
from distributed_state.agents.dispatcher import Hearing
from distributed_state.agents.hooks import call, check
from distributed_state.agents.status import Status
from distributed_state.errors import ConfigurationError, InvalidValue, StateError
from distributed_state.port import Job, Port
from distributed_state.port.signals import HAS_RELOAD, listening
from distributed_state.values.model import Ref
from distributed_state.values.results import Event

log = logging.getLogger(__name__)
_WAITING = 100  # events that are taken over at once; the others wait where they arrive
_TICK = 1.0
_LAST_WORDS = 5.0  # seconds that the end's hooks and the archive get, however late it is
_BEFORE_DELETION = 10.0


class Task:
    """Something to be done between events."""

    def __init__(self, work: Callable[[], Awaitable[Any]], port: Port) -> None:
        self._work = work
        self.done = port.signal()
        self.result: Any = None
        self.error: BaseException | None = None

    async def run(self) -> None:
        """Do the work and keep what came of it."""
        try:
            self.result = await self._work()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - raised where it is waited for
            self.error = error
        finally:
            self.done.set()


class AsyncHost:
    """Runs one or several agents of one store in this process: `async with AsyncHost(a, b)`, or `await host.run()`.

    Example::

        class Notes(AsyncAgent):
            name = "notes"

        class Prices(AsyncAgent):
            name = "prices"

        async with AsyncHost(Notes(store), Prices(store)):
            await session.set("city", "Oslo")  # each replica's hooks hear of it

    Raises InvalidValue for agents of the same name, ConfigurationError for agents of several stores.
    """

    def __init__(self, *agents: BaseAgent) -> None:
        names = [agent.name for agent in agents]
        if not agents or len(set(names)) < len(names):
            raise InvalidValue(f"a host runs agents with a name each, not {', '.join(names) or 'none'}")
        if len({id(agent._source) for agent in agents}) > 1:
            raise ConfigurationError(f"the agents {', '.join(names)} of one host use one store")
        if len({agent._since for agent in agents}) > 1:
            raise ConfigurationError(f"the agents {', '.join(names)} of one host go on from one position")
        self.agents = agents
        self._hearing = Hearing(agents, self._past)
        self.stopping = False
        self._inbox: deque[Event | Task] = deque()
        self._failed: BaseException | None = None
        self._clear()

    def _clear(self) -> None:
        self._jobs: list[Job] = []
        self._loops: list[Job] = []
        self._events: Any = None
        self._looping = 0
        self._port: Port | None = None
        self._deadline = 0.0
        self._shown: list[Any] = []
        self._looked: dict[str, float] = {}
        self._noticed: tuple[float, str] | None = None

    def _past(self, past: Any) -> Any:
        return past if self._port is None or self._port.suspends else LastState(past)

    @property
    def waiting(self) -> int:
        """How many events wait for their hooks."""
        return len(self._inbox) + (0 if self._events is None else self._events.waiting)

    @property
    def position(self) -> str:
        """How far the hooks are."""
        return self._hearing.position

    # Beginning

    async def run(self) -> None:
        """Run until the agents end or SIGTERM or SIGINT comes, finish what was begun, and return.

        SIGHUP reads the config files again, SIGUSR1 logs the status of the agents. Raises what a `main_loop` raised.
        """
        await self._open_store()
        port = self._running()
        told = {"SIGTERM": self.stop, "SIGINT": self.stop, "SIGHUP": self._ask_reload, "SIGUSR1": self._ask_status}
        with listening({name: partial(port.soon, heard) for name, heard in told.items()}) as hears:
            if not hears:
                log.warning("signals are heard in the main thread only, and this is another one")
            try:
                await self._open()
                self._begin_loops()
                while self._looping and not self.stopping and self._failed is None:
                    await self._over.wait(_TICK)
                    self._over.clear()
            finally:
                await self.close()
        if self._failed is not None:
            raise self._failed

    async def __aenter__(self) -> Self:
        await self._open_store()
        try:
            await self._open()
            self._begin_loops()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
        if error is None and self._failed is not None:
            raise self._failed

    async def _open_store(self) -> None:
        if self._port is not None or any(agent._host not in (None, self) for agent in self.agents):
            raise ConfigurationError(f"{', '.join(each.name for each in self.agents)}: runs already")
        source = self.agents[0]._source
        store = source() if callable(source) else source
        store = await store if inspect.isawaitable(store) and callable(source) else store
        self._owned = callable(source)
        self._face = store
        self._store = core(store)
        self._port = port = self._store.tiers().port
        self._wake = port.signal()
        self._over = port.signal()
        self._worked = port.signal()
        self._changed = {agent.name: port.signal() for agent in self.agents}
        self._hearing._port = port
        self._hearing._store = self._store
        self.stopping = False
        self._failed = None
        self._ended = False
        self._inbox.clear()
        for agent in self.agents:
            agent._store = store
            agent._host = self
            agent._began = port.monotonic()

    async def _open(self) -> None:
        for agent in self.agents:
            check(agent)
            defaults_of(agent)
            agent._config.begin(await self._hearing.spread(agent))
            await agent._set_defaults(agent.persistent, agent.persistent_defaults)
        self._spawn(self._work, "agents")
        await self._on_each("initialize")
        self._events = self._store.events("*", since=self.agents[0]._since)
        await self._events.__aenter__()
        await self._hearing.reach(self._events.position)
        await self.do(self._hearing.catch_up)
        self._store.deleting.append(self._before_deletion)
        self._spawn(self._read, "agents' events")
        await self._on_each("start")
        for agent in self.agents:
            agent._tell("started", {})

    def _spawn(self, job: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        self._jobs.append(self._running().spawn(job, f"distributed-state {name}"))

    def _running(self) -> Port:
        if self._port is None:
            raise ConfigurationError(f"{', '.join(each.name for each in self.agents)}: does not run")
        return self._port

    async def _on_each(self, hook: str) -> None:
        """Run a hook that has to succeed."""
        for agent in self.agents:
            await self.do(partial(self._hearing.begin, agent, hook))

    # The agents' own thread or task

    async def _work(self) -> None:
        try:
            while not self._ended:
                await self._wake.wait(_TICK)
                self._wake.clear()
                while self._inbox:
                    it = self._inbox.popleft()
                    if isinstance(it, Task):
                        await it.run()
                    elif not self.stopping:
                        await self._hear(it)
                    self._announce()
                await self._watch_files()
                self._announce()
        finally:
            self._worked.set()

    async def _hear(self, event: Event) -> None:
        try:
            await self._hearing.hear(event)
        except SystemExit as error:
            # As in any program; but in a thread nobody would notice.
            self._failed = self._failed or error
            self.stop()
        except Exception:  # the next event is not to blame
            log.exception("event %s of type %s could not be handled", event.id, event.type)

    async def _read(self) -> None:
        port = self._running()
        events = self._events
        while True:
            try:
                event = await events.next(_TICK)
            except StateError as error:
                log.warning("agents' events: %s", error)
                await port.sleep(_TICK)
                continue
            if event is not None:
                self._inbox.append(event)
                if event.partition < 0:  # behind what was missed, once the hooks for that have run
                    self._inbox.append(Task(partial(self._hearing.reach, events.position), port))
                self._wake.set()
            self._notice_hanging()
            while len(self._inbox) > _WAITING:
                await port.sleep(0.01)

    def _notice_hanging(self) -> None:
        running = self._hearing.running
        if running is not None and running is not self._noticed:
            since, name = running
            limit = min(agent.stuck_hook for agent in self.agents)
            if self._running().monotonic() - since > limit:
                self._noticed = running
                log.error("%s has been running for %s s, and %d events wait behind it", name, limit, self.waiting)

    async def do(self, work: Callable[[], Awaitable[Any]], *, limit: float | None = None, urgent: bool = False) -> Any:
        """Have something done where the hooks run, and return what it returns; None if it took longer than `limit`.

        Without a limit it is given up when the agents have to end.
        """
        port = self._running()
        task = Task(work, port)
        (self._inbox.appendleft if urgent else self._inbox.append)(task)
        self._wake.set()
        began = port.monotonic()
        while not await task.done.wait(0.5):
            now = port.monotonic()
            if now >= began + limit if limit is not None else self.stopping and now >= self._deadline:
                log.warning("gave up waiting for the agents' hooks after %.0f s", now - began)
                return None
            if await self._worked.wait(0):
                return None
        if task.error is not None:
            raise task.error
        return task.result

    async def _before_deletion(self, ref: Ref) -> None:
        if ref.scope != "session" or self.stopping or self._store.tiers().port is not self._port:
            return  # on another event loop nobody can wait for this one's hooks: they run after, as elsewhere
        if self._hearing.in_a_hook():
            await self._hearing.deleting(ref)
        else:
            await self.do(partial(self._hearing.deleting, ref), limit=_BEFORE_DELETION)

    def _announce(self) -> None:
        """Tell of what the agents show, if that is another thing now."""
        shown = [each.shown for each in self.agents]
        if shown == self._shown:
            return
        self._shown = shown
        try:
            self._store.tiers().presence.announce({"agents": shown})
        except StateError as error:
            short = [{name: value for name, value in each.items() if name not in LONG} for each in shown]
            log.warning("the replica tells of its agents without %s: %s", ", ".join(LONG), error)
            self._store.tiers().presence.announce({"agents": short})

    # Being asked

    def _ask(self, work: Callable[[BaseAgent], Awaitable[Any]]) -> None:
        async def each() -> None:
            for agent in self.agents:
                try:
                    await work(agent)
                except Exception:
                    log.exception("agent %s: what a signal asked for failed", agent.name)

        if self._port is not None:  # it is heard until the very end
            self._inbox.appendleft(Task(each, self._port))
            self._wake.set()

    def _ask_reload(self) -> None:
        self._ask(self._hearing.reload)

    def _ask_status(self) -> None:
        self._ask(self._tell_status)

    async def _tell_status(self, agent: BaseAgent) -> Status:
        status = await agent._status()
        await self._hearing.hook(agent, "on_status", {"status": status})
        return status

    async def status(self, agent: BaseAgent) -> Status:
        """How the agent is on this replica; logged, and its `on_status` has run."""
        found: Status = await self.do(partial(self._tell_status, agent), urgent=True)
        return found

    async def reload(self, agent: BaseAgent) -> None:
        """Read the agent's config file again."""
        await self.do(partial(self._hearing.reload, agent), urgent=True)

    async def _watch_files(self) -> None:
        now = self._running().monotonic()
        for agent in self.agents:
            every = (0.0 if HAS_RELOAD else 5.0) if agent.watch_config is None else agent.watch_config
            if every and now - self._looked.get(agent.name, 0.0) >= every:
                self._looked[agent.name] = now
                if await self._running().thread(agent._config.touched):
                    await self._hearing.reload(agent)

    # Background work

    def _begin_loops(self) -> None:
        port = self._running()
        agents = () if self.stopping else self.agents
        self._looping = len(agents)
        self._loops = [port.spawn(partial(self._loop, agent), f"{agent.name} main loop") for agent in agents]

    async def _loop(self, agent: BaseAgent) -> None:
        try:
            await call(self._running(), agent.main_loop, {})
        except SystemExit as error:
            self._failed = self._failed or error
            self.stop()
        except Exception as error:  # noqa: BLE001 - raised at the end
            agent.errors += 1
            agent._log("ERROR", "main_loop failed", {"error": f"{type(error).__name__}: {error}"}, error)
            self._failed = self._failed or error
        finally:
            self._looping -= 1
            self._over.set()

    async def wait(self, agent: BaseAgent, seconds: float | None) -> bool:
        """Wait so many seconds, and on while the agent is paused; False as soon as it is to end."""
        port = self._running()
        signal = self._changed[agent.name]
        end = None if seconds is None else port.monotonic() + seconds
        while not self.stopping:
            left = _TICK if end is None else end - port.monotonic()
            if left <= 0 and not agent.paused:
                return True
            await signal.wait(min(left, _TICK) if left > 0 else _TICK)
            signal.clear()
        return False

    def wake(self, agent: BaseAgent) -> None:
        """Something about the agent changed; from any thread."""
        port = self._port  # once: the run may end meanwhile
        if port is not None:
            port.soon(self._changed[agent.name].set)
            port.soon(self._wake.set)

    def stop(self) -> None:
        """Let the agents end, from any thread; called again, without waiting for what runs."""
        if self._port is None:
            return
        if self.stopping:
            self._deadline = 0.0
        else:
            self.stopping = True
            self._deadline = self._port.monotonic() + max(each.shutdown_timeout for each in self.agents)
        for agent in self.agents:
            self.wake(agent)
        self._port.soon(self._over.set)

    # The end

    async def close(self) -> None:
        """Finish what runs, run `on_shutdown` and `cleanup`, archive, and close the store if it was opened here."""
        if self._port is None:
            return
        port = self._port
        if not self.stopping:
            self.stop()
        for agent in self.agents:
            agent._log("INFO", "ending", {"waits_for": f"{agent.shutdown_timeout} s"})
        if not await self._finished(self._idle):
            hanging = self._hearing.running
            what = "main_loop or a command" if hanging is None else hanging[1]
            log.error("%s did not end within shutdown_timeout and is left alone", what)
        try:
            if self._before_deletion in self._store.deleting:
                self._store.deleting.remove(self._before_deletion)
            # Not even a worker: it failed before it began.
            hangs = False
            for hook in ("on_shutdown", "cleanup") if self._jobs else ():
                for agent in self.agents:
                    run = partial(self._hearing.hook, agent, hook, {})
                    # Where hooks run another one hangs: better elsewhere than never.
                    hangs = hangs or not self._idle_hooks()
                    await (run() if hangs else self.do(run, limit=self._left()))
            self._ended = True
            self._wake.set()
            self._store.tiers().presence.announce({"agents": None})
            for job in [*self._jobs, *self._loops]:
                await job.stop()
            if self._events is not None:
                await self._events.__aexit__(None, None, None)
            await self._drain(port)
        finally:
            for agent in self.agents:
                agent._host = None
                agent._store = None if self._owned else agent._store
            store = self._store
            owned = self._owned
            self._clear()
            if owned:
                await store.close()

    def _left(self) -> float:
        return max(self._deadline - self._running().monotonic(), _LAST_WORDS)

    def _idle(self) -> bool:
        return not self._looping and self._idle_hooks() and not any(each._busy for each in self.agents)

    def _idle_hooks(self) -> bool:
        return self._hearing.running is None

    async def _finished(self, condition: Callable[[], bool]) -> bool:
        port = self._running()
        while not condition():
            if port.monotonic() >= self._deadline:
                return False
            await port.sleep(0.01)
        return True

    async def _drain(self, port: Port) -> None:
        """Archive what was written, in the time that is left."""
        done = port.signal()

        async def archive() -> None:
            try:
                await self._store.tiers().archiver.drain()  # the host's own work: no policy is asked for it
            except StateError as error:
                log.warning("not everything is archived yet; another replica or the next start does it: %s", error)
            finally:
                done.set()

        job = port.spawn(archive, "distributed-state last archiving")
        left = self._left()
        if not await done.wait(left):
            log.warning("not everything is archived within %.1f s; another replica or the next start does it", left)
        await job.stop()
