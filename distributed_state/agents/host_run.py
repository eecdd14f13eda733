"""One run of a host's agents: configs, defaults, hooks, events, signals, shutdown. Law: work that started is finished.

All hooks of a process except `main_loop` run in one thread (one task under asyncio), including those for signals. An
exception of a `main_loop` is logged at once and raised when the agents have ended: it ends `run()`, but not the body of
a `with`. Shutdown takes a limited time. An agent's figures are gathered on request; heartbeats contain a summary.

Design: section 12.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from distributed_state.agents.agent import BaseAgent, check_defaults
from distributed_state.agents.dispatcher import ConfigUpdates, Dispatcher
from distributed_state.agents.display import Status, memory_mb
from distributed_state.agents.hooks import check
from distributed_state.agents.worker import HookRunner, MainLoops, Shutdown, Worker
from distributed_state.errors import StateError
from distributed_state.events.consumer import AsyncEvents
from distributed_state.port import Job
from distributed_state.store.services import Store, StoreServices
from distributed_state.values.model import Ref

log = logging.getLogger(__name__)
_TAKEN_OVER = 100  # events that wait for hooks in the worker's inbox; further ones wait in the subscription
_LOOK_EVERY = 1.0  # seconds
_BEFORE_DELETION = 10.0
_LONG = ("system_prompt", "sections", "commands")  # left out of a heartbeat that would be too large


class HostRun:
    """The agents' run, from the opening of their store to its closing."""

    def __init__(self, agents: Sequence[BaseAgent], store: Store) -> None:
        self._agents = agents
        self._services = StoreServices(store)
        self._port = self._services.port
        self._here = self._port.here()
        self._shutdown = Shutdown(self._port)
        self.loops = MainLoops(agents, self._port, self._shutdown, self.stop)
        self._runner = HookRunner(self._port)
        self._configs = ConfigUpdates(self._services, self._runner)
        self._dispatcher = Dispatcher(agents, self._services, self._runner, self._configs)
        self._report = HostReport(self._services, agents)
        self._worker = Worker(
            self._port,
            self._shutdown,
            dispatch=self._dispatcher.dispatch,
            after_each=self._report.update,
            when_idle=partial(self._configs.watch, agents),
            stop=self.stop,
        )
        self._jobs: list[Job] = []
        self.events: AsyncEvents | None = None
        self._noticed: tuple[float, str] | None = None

    @property
    def waiting(self) -> int:
        """The number of events that wait for their hooks."""
        return self._worker.waiting + (0 if self.events is None else self.events.waiting)

    @property
    def working(self) -> bool:
        """Whether hooks run, or events wait for them."""
        return self._worker.working or self.waiting > 0

    @property
    def position(self) -> str:
        """The position after the last event whose hooks have run, for `since=`."""
        return self._dispatcher.position

    @property
    def stopping(self) -> bool:
        """Whether the agents are stopping."""
        return self._shutdown.requested

    # The beginning

    async def begin(self) -> None:
        """Take the configs, set defaults, run `initialize`, follow the events, run `start`, begin the main loops."""
        for agent in self._agents:
            check(agent)
            for name in ("persistent_defaults", "conversation_defaults"):
                check_defaults(agent, name)
        await self._configs.begin(self._agents)
        for agent in self._agents:
            record = self._services.store.app(agent.agent_context.persistent_id)
            await agent.agent_context.put_in_defaults(record, agent.persistent_defaults)
        self._spawn(self._worker.run, "agents")
        await self._on_each("initialize")
        self.events = self._services.store.events("*", since=self._agents[0].agent_context.since)
        await self.events.__aenter__()
        await self._dispatcher.reach(self.events.position)
        # A config that was set while `initialize` ran is not announced by a later event.
        await self._worker.do(partial(self._configs.catch_up, self._agents))
        self._services.add_deletion_hook(self._before_deletion)
        self._spawn(partial(self._read, self.events), "agents' events")
        await self._on_each("start")
        for agent in self._agents:
            agent.agent_context.display.notify("started", {})
        self.loops.begin()

    def _spawn(self, job: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        self._jobs.append(self._port.spawn_here(job, f"distributed-state {name}"))

    async def _on_each(self, hook: str) -> None:
        """Run a hook that has to succeed."""
        for agent in self._agents:
            await self._worker.do(partial(self._runner.run_required, agent, hook))

    # Events

    async def _read(self, events: AsyncEvents) -> None:
        while True:
            try:
                event = await events.next(_LOOK_EVERY)
            except StateError as error:
                log.warning("events for the agents cannot be read: %s", error)
                await self._port.sleep(_LOOK_EVERY)
                continue
            if event is not None:
                self._worker.add(event)
                if event.partition < 0:  # a resync: after its hooks have run, events continue after the gap
                    self._worker.add_task(partial(self._dispatcher.reach, events.position))
            self._notice_hanging()
            while self._worker.waiting > _TAKEN_OVER:
                await self._port.sleep(0.01)

    def _notice_hanging(self) -> None:
        running = self._runner.running
        if running is not None and running is not self._noticed:
            since, name = running
            limit = min(agent.stuck_hook for agent in self._agents)
            if self._port.monotonic() - since > limit:
                self._noticed = running
                log.error("%s has been running for %s s, and %d events are waiting", name, limit, self.waiting)

    def _waits(self) -> bool:
        """Whether the caller can wait for the hooks.

        It cannot in a forked child, or while it blocks their event loop.
        """
        return self._services.port is self._port and not self._port.holds_up(self._here)

    async def _before_deletion(self, ref: Ref) -> None:
        if ref.scope != "session" or self._shutdown.requested or not self._waits():
            return  # the hooks run after the deletion, as on other replicas
        if self._runner.calls_us():
            await self._dispatcher.before_deletion(ref)
        else:
            await self._worker.do(partial(self._dispatcher.before_deletion, ref), limit=_BEFORE_DELETION)

    # Requests to a running agent

    async def status(self, agent: str) -> Status:
        """Return and log the agent's status on this replica, after its `on_status` has run."""
        found: Status = await self._worker.do(partial(self._report_status, self._named(agent)), urgent=True)
        return found

    async def reload(self, agent: str) -> None:
        """Read the agent's config file again."""
        await self._worker.do(partial(self._configs.reload, self._named(agent)), urgent=True)

    def request_status(self) -> None:
        """Have every agent log its status soon, for SIGUSR1."""
        self._request(self._report_status)

    def request_reload(self) -> None:
        """Have every agent read its config file soon, for SIGHUP."""
        self._request(self._configs.reload)

    def _request(self, work: Callable[[BaseAgent], Awaitable[Any]]) -> None:
        async def each() -> None:
            for agent in self._agents:
                try:
                    await work(agent)
                except Exception:
                    log.exception("agent %s: the action requested by a signal failed", agent.agent_context.name)

        self._worker.add_task(each, urgent=True)

    async def _report_status(self, agent: BaseAgent) -> Status:
        status = await measure(agent, self.waiting)
        await self._runner.run(agent, "on_status", {"status": status})
        return status

    def _named(self, name: str) -> BaseAgent:
        return next(agent for agent in self._agents if agent.agent_context.name == name)

    async def wait(self, agent: str, seconds: float | None) -> bool:
        """Wait `seconds`, and longer while the agent is paused; False as soon as it is stopping."""
        return await self.loops.wait(agent, seconds)

    def wake(self, agent: str) -> None:
        """Wake the waits for a change of the agent; may be called from any thread."""
        self.loops.wake(agent)
        self._worker.awake.set()

    # The end

    def stop(self) -> None:
        """Stop the agents, from any thread; a second call stops them without waiting for running work."""
        self._shutdown.request(max(each.shutdown_timeout for each in self._agents))
        for agent in self._agents:
            self.wake(agent.agent_context.name)
        self.loops.over.set()

    async def close(self, error: BaseException | None) -> None:
        """End the agents, close a store opened for the run, and raise the exception of a failed `main_loop`.

        The exception is dropped if `error` is already being raised. Closing finishes running work, runs `on_shutdown`
        and `cleanup`, and archives unarchived commits.
        """
        try:
            await self._end()
        finally:
            for agent in self._agents:
                agent.agent_context.end()
            if callable(self._agents[0].agent_context.source):
                await self._services.store.close()
        if error is None and self._shutdown.failure is not None:
            raise self._shutdown.failure

    async def _end(self) -> None:
        if not self._shutdown.requested:
            self.stop()
        for agent in self._agents:
            agent.agent_context.display.log("INFO", "ending", {"waits_for": f"{agent.shutdown_timeout} s"})
        if not await self._shutdown.wait_until(self._is_idle):
            hanging = self._runner.running
            what = "main_loop or a command" if hanging is None else hanging[1]
            log.error("%s did not end within shutdown_timeout; shutting down without waiting for it", what)
        self._services.remove_deletion_hook(self._before_deletion)
        if self._jobs:  # otherwise the start failed before any hook could run
            await self._last_hooks()
        self._worker.end()
        self._report.end()
        for job in [*self._jobs, *self.loops.jobs]:
            await job.stop()
        if self.events is not None:
            await self.events.__aexit__(None, None, None)
        await self._archive()

    def _is_idle(self) -> bool:
        busy = any(each.agent_context.busy for each in self._agents)
        return not self.loops.running and self._runner.running is None and not busy

    async def _last_hooks(self) -> None:
        hangs = False
        for hook in ("on_shutdown", "cleanup"):
            for agent in self._agents:
                run = partial(self._runner.run, agent, hook, {})
                # If another hook hangs in the worker, run this one outside of the worker.
                hangs = hangs or self._runner.running is not None
                await (run() if hangs else self._worker.do(run, limit=self._shutdown.time_left()))

    async def _archive(self) -> None:
        """Archive unarchived commits, within the remaining time."""
        done = self._port.signal()

        async def archive() -> None:
            try:
                await self._services.archive()
            except StateError as error:
                log.warning(
                    "some commits are not archived yet; another replica or the next start archives them: %s", error
                )
            finally:
                done.set()

        job = self._port.spawn_here(archive, "distributed-state last archiving")
        left = self._shutdown.time_left()
        if not await done.wait(left):
            log.warning(
                "some commits were not archived within %.1f s; another replica or the next start archives them", left
            )
        await job.stop()


async def measure(agent: BaseAgent, waiting: int) -> Status:
    """Gather an agent's figures and log them, with a warning for each beyond its limit. `waiting` counts events."""
    context = agent.agent_context
    services = context.services
    try:
        tiers = await services.store.admin.stats()
    except StateError as error:
        tiers = {}
        context.display.log("WARNING", "no figures of the tiers", {"error": str(error)})
    status = Status(
        agent=agent.agent_context.name,
        replica=services.store.replica,
        uptime=round(services.port.monotonic() - context.began, 3) if context.began else 0.0,
        requests=context.requests,
        errors=context.errors,
        error_rate=round(100 * context.errors / context.requests, 2) if context.requests else 0.0,
        queue_size=agent.queue_size + waiting,
        memory_mb=round(memory_mb(), 1),
        conversations=context.conversations,
        lag=round(context.lag, 3),
        active=bool(agent.active),
        paused=context.paused,
        tiers=tiers,
    )
    context.last_status = status.to_dict()
    context.display.log("INFO", "status", context.last_status)
    for words, name, found, allowed in status.warnings(agent.limits):
        context.display.log("WARNING", words, {name: found, "limit": allowed})
    return status


class HostReport:
    """The agents' part of this replica's heartbeats."""

    def __init__(self, services: StoreServices, agents: Sequence[BaseAgent]) -> None:
        self._services = services
        self._agents = agents
        self._announced: list[dict[str, Any]] = []

    def update(self) -> None:
        """Announce what the agents display, if it changed; the long parts are left out if it is too large. No I/O."""
        shown = [each.shown for each in self._agents]
        if shown == self._announced:
            return
        self._announced = shown
        try:
            self._services.announce({"agents": shown})
        except StateError as error:
            short = [{name: value for name, value in each.items() if name not in _LONG} for each in shown]
            log.warning("the heartbeat leaves out %s of the agents: %s", ", ".join(_LONG), error)
            self._services.announce({"agents": short})

    def end(self) -> None:
        """Stop announcing the agents."""
        self._services.announce({"agents": None})
