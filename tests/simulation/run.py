"""One run: a fleet is opened, used, harmed, healed and judged. Law: a run is a function of its plan."""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from distributed_state import AsyncStateStore
from distributed_state.errors import StateError
from distributed_state.results import Ended
from tests.simulation import checks
from tests.simulation.checks import Befell, Broken, Harm
from tests.simulation.fleet import Fleet
from tests.simulation.listening import Listening
from tests.simulation.live import HANDLER, Follower, Live, LiveCaller, follow_to_the_end, wake_of
from tests.simulation.network import FROM, SLOW, TO, Silence
from tests.simulation.node import Persistence
from tests.simulation.plan import Fault, Operation, Plan
from tests.simulation.replication import Loss
from tests.simulation.watched import harm
from tests.simulation.workload import ACKNOWLEDGED, PRIVATE, REFUSED, Outcome, Withheld, fork_of, short
from tests.simulation.world import Clock, Future, Process, Stalled, Task, World

_LONGEST = 60.0  # seconds of its own time that one operation may take
_REACHED = 2.5  # seconds that a read may take once nothing fails any longer
_STALENESS = 2.0
_ENDED = 90.0  # seconds: if Redis lost everything, expired sessions are looked for once a minute
_WORKED = 40.0  # seconds in which workers serve what waits: a turn that failed several times is tried again later
_LOOKED = 3.0  # seconds in which a follower finds out how its request ended
_LONG = {"move slot", "old map", "cut off", "server away", "server stands still"}
_OF_A_SERVER = {"freeze server", "power cut", "restart server", "evict", "server away", "server stands still"}
_AGAIN = {"turn", "live", "post"}  # repeated if their outcome is not known
_ELSEWHERE = {"live", "follow"}  # continued on another replica
_OF_ONE = {"silence", "freeze replica", "crash replica", "clock jump"}  # faults of one replica


@dataclass(slots=True)
class Result:
    """The result of a run. `broken`: the promise that was broken, "" if none."""

    plan: Plan
    digest: str = ""
    broken: str = ""
    seconds: float = 0.0
    operations: int = 0
    states: Counter[str] = field(default_factory=Counter)
    lines: list[str] = field(default_factory=list)
    met: Counter[str] = field(default_factory=Counter)  # how often each check of live turns had a case


@contextmanager
def uncollected() -> Iterator[None]:
    """Inside, collect no garbage: collection ends weak references, and its moment depends on the process's past."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Run:
    """Runs a plan."""

    def __init__(self, plan: Plan, *, trace: bool = False) -> None:
        self.plan, self.shape = plan, plan.shape
        self.world = World(plan.seed, trace=trace)
        self.outcomes: list[Outcome] = []
        self.harms: list[Harm] = []
        self.joined: dict[str, float] = {}
        self._behind = 0.0  # seconds by which servers' clocks were set back: their keys live that much longer
        self.turns: list[Outcome] = []
        self.stores: list[tuple[AsyncStateStore, Process]] = []
        self.listening: Listening | None = None
        self.live = Live()
        self._opened = 0
        self._healed = False

    def result(self) -> Result:
        """Run the plan and return the result."""
        world, result = self.world, Result(self.plan)
        with world.rules():
            kinds = self.shape.persistence
            lags = tuple(0.05 * (at + 1) for at in range(self.shape.copies))
            settings: dict[str, Any] = {"namespace": "sim", "max_staleness": _STALENESS} | dict(self.shape.settings)
            primaries = self.shape.primaries[self.plan.seed % len(self.shape.primaries)]
            watched = self.shape.watched[self.plan.seed % len(self.shape.watched)]
            persistence = Persistence(kinds[self.plan.seed % len(kinds)])
            self.fleet = Fleet(world, persistence, lags, primaries, watched=watched, **settings)
            if self.shape.copies and self.plan.seed % 3 == 0:
                for node in self.fleet.group.nodes():
                    node.least = 1
        if self.shape.listens:
            self.listening = Listening(
                self.fleet, [each for each in self.plan.faults if f"f{each.number}" not in self.plan.left_out]
            )
        with self.fleet.rules(), uncollected():
            root = self.fleet.run(world.outside, self._all(), "run")
            try:
                world.run_until(root.ended, 3600.0)
                if root.ended.error is not None:
                    raise root.ended.error
                for name, error in world.failures:
                    raise Broken("bug", f"{name} ended with {type(error).__name__}: {error}") from error
            except (Broken, Stalled, StateError) as error:
                result.broken = f"{type(error).__name__}: {error}" if not isinstance(error, Broken) else str(error)
            finally:
                world.bury()
        result.digest, result.seconds = world.digest, world.now
        result.operations = len(self.outcomes)
        result.states = Counter(f"{each.operation.kind} {each.state}" for each in self.outcomes)
        result.lines = world.lines or []
        result.met = self.live.met
        return result

    @property
    def losses(self) -> list[tuple[float, float]]:
        """The intervals in which servers wrote what they lost."""
        return [(each.since, each.until) for group in self.fleet.groups for each in group.losses]

    def _befell(self) -> Befell:
        staleness = float(self.fleet.settings["max_staleness"])
        takeovers = [loss for group in self.fleet.groups for loss in group.takeovers]
        flushes = [(each.since, each.until) for group in self.fleet.groups for each in group.losses if each.is_flush]
        return Befell(self.losses, self.harms, self.joined, staleness, self.shape.ttl, takeovers, flushes)

    # The phases of a run

    async def _all(self) -> None:
        for _ in range(self.shape.replicas):
            await self._open()
        for fault in self.plan.faults:
            if f"f{fault.number}" not in self.plan.left_out:
                self.world.after(fault.at, lambda fault=fault: self._harm(fault))
        clients = [self.fleet.run(self.world.outside, self._client(at), f"c{at}") for at in range(self.shape.clients)]
        for client in clients:
            await client.ended
        await self._heal()
        await self._judge()

    async def _open(self) -> None:
        self._opened += 1
        number = self._opened
        store, process = await self.fleet.open(f"r{number}")
        self.stores.append((store, process))
        self.joined[process.name] = self.world.now
        if self.shape.works:
            self.live.works = True
            store.handler(HANDLER, partial(self._handle, random.Random(number), process.name))
            working = store.work(concurrency=4, ttl=self.shape.ttl, max_attempts=10_000, shutdown_timeout=1.0)
            self.fleet.run(process, working, "work")
        if self.listening is not None and not self._healed:
            begin = self.listening.begin(number, store, process)
            await self._over(self.fleet.run(process, begin, "listen"))

    async def _handle(self, chance: random.Random, name: str, turn: Any) -> None:
        """Take inputs, and now and then fail."""
        turn.append(*(each.message for each in turn.take()))
        await self.world.sleep(chance.uniform(0.0, 0.3))
        if chance.random() < 0.3:
            await turn.arrived()
            turn.append(*(each.message for each in turn.take()))
        turn["served"] = name
        if chance.random() < 0.1:
            raise Withheld

    async def _client(self, number: int) -> None:
        for operation in self.plan.operations:
            if operation.client == number and f"o{operation.number}" not in self.plan.left_out:
                await self.world.sleep(operation.pause)
                await self._do(operation)

    async def _do(self, operation: Operation) -> None:
        chance = random.Random(operation.draw)
        writer = operation.name
        records = [f"s{operation.record}"]
        if operation.kind in PRIVATE or operation.kind in ("write short", "compact"):
            records = []  # it affects other records, which are checked separately
        if operation.kind == "batch":
            records.append(f"s{(operation.record + 1) % self.shape.records}")
        turns = [each for each in self.turns if each.operation.kind == operation.kind]
        if turns and chance.random() < 0.2:
            again = chance.choice(turns)  # a client that did not get the answer, or sends everything twice
            writer, records = again.writer, list(again.records)
        for attempt in range(3):
            outcome = await self._once(operation, writer, tuple(records), attempt)
            if operation.kind in _AGAIN:
                self.turns.append(outcome)
            if operation.kind == "follow":
                follower = self.live.followers.get(writer)  # its replica may have died before it followed
                if attempt == 2 or (follower is not None and follower.over):
                    return
            elif outcome.state != "unknown" or operation.kind not in _AGAIN or attempt == 2:
                return
            await self.world.sleep(chance.uniform(0, 0.5))

    async def _once(self, operation: Operation, writer: str, records: tuple[str, ...], attempt: int) -> Outcome:
        world = self.world
        while not (live := [each for each in self.stores if not each[1].is_dead]):
            await world.sleep(0.05)
        elsewhere = attempt if operation.kind in _ELSEWHERE else 0
        store, process = live[(operation.draw + elsewhere) % len(live)]
        outcome = Outcome(operation, writer, world.now, records, process.name)
        self.outcomes.append(outcome)
        world.note("begins", process.name, writer, operation.kind, *records)
        caller = LiveCaller(world, store, outcome, self.shape.ttl)
        caller.levels, caller.live, caller.stretch = self.shape.levels, self.live, attempt
        task = self.fleet.run(process, caller.run(), writer)
        if operation.cancel_after is not None:
            world.after(operation.cancel_after, task.cancel)
        await self._over(task)
        if not outcome.ended:
            outcome.ended, outcome.error = world.now, "its replica died"
        world.note("ends", process.name, writer, outcome.state, outcome.error[:60])
        return outcome

    async def _over(self, task: Task) -> None:
        """Wait until the task has ended, or its process died. Raises Stalled if neither happens."""
        either = Future()
        task.ended.calls.append(either.settle)
        task.process.died.calls.append(either.settle)
        self.world.after(_LONGEST + max(0.0, task.process.frozen_until - self.world.now), either.settle)
        if not task.ended.done and not task.process.is_dead:
            await either
        if not task.ended.done and not task.process.is_dead:
            raise Stalled(f"{task.name} does not end")

    # Faults

    def _harm(self, fault: Fault) -> None:
        if self._healed:
            return
        world, fleet = self.world, self.fleet
        world.note("fault", fault.kind, f"{fault.lasts:.3f}", f"{fault.amount:.3f}")
        live = [process for _, process in self.stores if not process.is_dead]
        who = live[fault.who % len(live)] if live else None
        drawn = int(fault.amount * 1_000_000)
        group = fleet.groups[drawn % len(fleet.groups)]
        server = group.primary
        harmed = who.name if who is not None and fault.kind in _OF_ONE else ""
        until = world.now + (6.0 + 4 * fault.lasts if fault.kind in _LONG else 2 * fault.lasts)
        only = group.names[0] if fleet.cluster is not None and fault.kind in _OF_A_SERVER else ""
        self.harms.append(Harm(fault.kind, harmed, world.now, until, only))
        match fault.kind:
            case "lose messages":
                fleet.network.loss = 0.02 + 0.2 * fault.amount
                world.after(fault.lasts, lambda: setattr(fleet.network, "loss", 0.0))
            case "slow messages":
                fleet.network.slow = 0.02 + 0.2 * fault.amount
                world.after(2 * fault.lasts, lambda: setattr(fleet.network, "slow", SLOW))
            case "restart past a writer" if who is not None:
                who.freeze(2.0 + 2 * fault.lasts)  # it does not report its unarchived commits
                group.stop(server.name, away=0.1, power_cut=True)
            case "silence" if who is not None:
                direction = TO if fault.amount < 0.5 else FROM
                fleet.network.silences.append(Silence(who.name, direction, world.now + 2 * fault.lasts))
            case "freeze replica" if who is not None:
                who.freeze(2 * fault.lasts)
            case "freeze server":
                fleet.freeze_server(server, fault.lasts)
            case "crash replica" if who is not None and len(live) > 1:
                who.crash()
                fleet.run(world.outside, self._replace(), "replace")
            case "power cut" | "restart server":
                group.stop(server.name, away=fault.lasts / 2, power_cut=fault.kind == "power cut")
            case _ if fleet.sentinels is not None and harm(fleet, fleet.sentinels, fault, live):
                pass
            case "evict":
                fleet.evict(server)
            case "flush":
                server.carry_out([(b"FLUSHALL",)])
                group.losses.append(Loss(-1.0, world.now, is_flush=True))
            case "forget scripts":
                server.fake.script_cache.clear()
            case "drop subscribers":
                group.drop_subscribers()
            case "clock jump" if who is not None:
                who.clock.ahead += 600 * (fault.amount - 0.5)
            case "server clock jump":
                # A new clock: what was written before is replayed by the old one.
                server.clock = Clock(world, server.clock.ahead + 20 * (fault.amount - 0.5))
                self._behind += max(0.0, 20 * (0.5 - fault.amount))
            case "server away":
                group.stop(server.name, away=4 * fault.lasts, power_cut=fault.amount < 0.5)
            case "server stands still":
                fleet.freeze_server(server, 4 * fault.lasts)
            case "move slot":
                fleet.move_slot(drawn, 0.2 * fault.lasts)
            case "cut off" if fleet.cluster is not None:
                fleet.cluster.cut_off(server.member, 4 * fault.lasts)
            case "old map" if server.member is not None:
                server.member.deaf_until = world.now + 4 * fault.lasts
            case "silence of a server":
                direction = TO if fault.amount < 0.5 else FROM
                fleet.network.silences.append(Silence("", direction, world.now + 2 * fault.lasts, server.name))
            case "sql away":
                fleet.sql.away_until = world.now + 2 * fault.lasts
            case "sql frozen":
                fleet.sql.frozen_until = world.now + 2 * fault.lasts
            case "sql loses answers":
                fleet.sql.loss = 0.3 * fault.amount
                world.after(fault.lasts, lambda: setattr(fleet.sql, "loss", 0.0))
            case "restore sql":
                world.after(2 * fault.lasts, partial(fleet.sql.put_back, fleet.sql.photograph()))
            case "disk full":
                fleet.sql.fill_disk(fault.lasts)

    async def _replace(self) -> None:
        for _ in range(20):
            await self.world.sleep(0.3)
            try:
                await self._open()
                return
            except StateError as error:
                self.world.note("cannot open", type(error).__name__)

    # The end

    async def _heal(self) -> None:
        """End all faults, and wait until their effects have been repaired."""
        world, fleet = self.world, self.fleet
        self._healed = True
        fleet.network.loss = fleet.sql.loss = 0.0
        fleet.network.slow = SLOW
        fleet.network.silences.clear()
        if fleet.sentinels is not None:
            fleet.sentinels.heal()
        while not fleet.is_sound() or self._is_sql_away():
            await world.sleep(0.1)
        if fleet.cluster is not None:
            fleet.cluster.tidy()
        await world.sleep(self.shape.ttl + 1.0 + self._behind)

    def _is_sql_away(self) -> bool:
        return max(self.fleet.sql.away_until, self.fleet.sql.frozen_until) > self.world.now

    async def _judge(self) -> None:
        await self._open()
        store, process = self.stores[-1]
        dead = {process.name for _, process in self.stores if process.is_dead}
        unknown = set[str]()  # requests of which an attempt's replica died
        for outcome in self.outcomes:
            # A later attempt may have been answered from the request log; then the writer is the replica that died.
            if outcome.replica in dead:
                unknown.add(outcome.writer)
            outcome.died = outcome.writer in unknown
        if self.fleet.cluster is not None:
            await self._reach()
        reading = self.fleet.run(process, self._read(store), "judge")
        await self._over(reading)
        found = await reading.ended
        befell = self._befell()
        for each in found:
            checks.judge(each, self.outcomes, befell)
        if self.live.attempts:
            self.live.judge(found, befell, await self._follow(store, process))
        checks.judge_errors(self.outcomes)
        checks.judge_leases(self.live.left_alone(self.outcomes), befell)
        if self.fleet.cluster is not None and not self.fleet.cluster.is_whole:
            homes = {f"s{at}": self.fleet.home(f"session:s{at}") for at in range(self.shape.records)}
            checks.judge_spared(self.outcomes, homes, self.harms)
        if (
            not self.shape.copies and not self.fleet.sql.is_older
        ):  # else two servers may have accepted writes under one epoch
            checks.judge_versions(self.fleet.sql.given())
        if refused := self.fleet.sql.refused():
            raise Broken("archive", f"SQL refused {refused}")
        checks.judge_erased(self.fleet.everything(), self.outcomes)
        if self.listening is not None:
            learning = self.fleet.run(process, self.listening.learn(store), "audit")
            await self._over(learning)
            await learning.ended
            await self.listening.catch_up()
        await self._close()
        if self.listening is not None:
            self.listening.judge(self.outcomes, self.losses)
            self.listening.judge_rest()

    async def _reach(self) -> None:
        """After all faults have ended, every replica finds every record, wherever it is now."""

        async def reach(store: AsyncStateStore, name: str) -> None:
            for at in range(self.shape.records):
                began = self.world.now
                try:
                    await store.session(f"s{at}").version(fresh=True)
                except StateError as error:
                    raise Broken("progress", f"{name} does not reach s{at}: {error}") from error
                if self.world.now - began > _REACHED:
                    raise Broken("progress", f"{name} takes {self.world.now - began:.1f} s to reach s{at}")

        for store, process in self.stores:
            if not process.is_dead:
                reaching = self.fleet.run(process, reach(store, process.name), "reach")
                await self._over(reaching)
                await reaching.ended

    async def _read(self, store: AsyncStateStore) -> list[checks.Found]:
        named: set[str] = set()
        if self.fleet.sql.is_older:
            named.update(each.id for each in (await store.admin.repair()).lost)
        await self._await_ends(store)
        await store.admin.archive()
        if self.plan.seed % 2:
            await store.admin.compact(older_than=store.settings.op_window)
        writers = {each.writer: each for each in self.outcomes}
        if self.shape.works:
            await self._await_work(store)
        found = []
        for at in range(self.shape.records):
            found.append(await checks.read(store, f"s{at}", writers, named=named))
            if any(each.operation.kind == "post" for each in self.outcomes):
                session = store.session(f"s{at}")
                if self.shape.works:
                    names = {each.writer: wake_of(each.operation) for each in self.outcomes}
                    checks.judge_work(found[-1], [*await session.inbox(), *await session.wakes()], names)
                checks.judge_inbox(found[-1], await session.inbox())
                await self._follow_inputs(store, found[-1])
        for each in self.outcomes:
            if each.operation.kind == "fork" and each.state == ACKNOWLEDGED:
                await self._judge_fork(store, each, found[each.operation.record], writers)
        await checks.judge_short(store, self.outcomes, self._befell())
        if self.listening is None and self.plan.seed % 4 < 2:
            for each in found:
                await checks.judge_purged(store, each)
        return found

    async def _follow(self, store: AsyncStateStore, process: Process) -> list[Follower]:
        """Follow every request now that everything is over."""
        last = self.live.last()
        for each in last:
            following = self.fleet.run(process, follow_to_the_end(store, each, _LOOKED), "follow")
            await self._over(following)
            await following.ended
        return last

    async def _follow_inputs(self, store: AsyncStateStore, found: checks.Found) -> None:
        """Follow what was posted, now that it was served."""
        served = checks.served(found.main)
        for request, change in served.items():
            last = Follower(f"last of {request}", found.id, request)
            await follow_to_the_end(store, last, _LOOKED)
            if not any(isinstance(part, Ended) for _, part in last.parts):
                raise Broken("output", f"{request} of {found.id} was served by {change.actor}; shown: {last.parts}")
            # One that followed while it was served may have seen a turn that Redis lost later.
            for each in (last, *(() if self.losses else self.live.posted)):
                if (each.record, each.request) == (found.id, request):
                    checks.judge_followed(request, [part for _, part in each.parts], change)

    async def _await_work(self, store: AsyncStateStore) -> None:
        """Wait, within a limit, until nothing waits in any session, and end the workers."""
        began = self.world.now
        for at in range(self.shape.records):
            session = store.session(f"s{at}")
            while self.world.now < began + _WORKED and (await session.inbox() or await session.wakes()):
                await self.world.sleep(0.5)
        for each, process in self.stores:
            if not process.is_dead:
                each.stop_working()
        await self.world.sleep(2.0)
        await store.admin.archive()

    async def _await_ends(self, store: AsyncStateStore) -> None:
        """Wait, within a limit, until sessions with a lifetime have ended."""
        began = self.world.now
        for each in self.outcomes:
            if each.operation.kind == "write short" and each.state != REFUSED:
                while await store.session(short(each.operation)).exists(fresh=True) and self.world.now < began + _ENDED:
                    await self.world.sleep(0.5)

    async def _judge_fork(
        self, store: AsyncStateStore, each: Outcome, of: checks.Found, writers: dict[str, Outcome]
    ) -> None:
        source = of.main.state(each.target)
        fork = await checks.read(store, fork_of(each), writers, source or checks.EMPTY)
        if not fork.main.changes and not fork.branches and each.writer not in fork.aside:
            checks.judge_loss(each, self._befell())
        elif source is not None and not of.branches and (line := (fork.branches or [fork.main])[0]).changes:
            made = fork.main.states[1] if fork.main.changes else line.states[1]
            if made != source:
                raise Broken("G9", f"{each} made {made} of {source}")

    async def _close(self) -> None:
        """Close everything, and check that nothing is left over."""
        for store, process in self.stores:
            if not process.is_dead:
                closing = self.fleet.run(process, store.close(), "close")
                await self._over(closing)
                await closing.ended
        for task in self.listening.tasks if self.listening is not None else ():
            await self._over(task)  # each ends by itself when its store is closed
        await self.world.sleep(self.shape.ttl + 1.0)
        if left := self.fleet.left_over():
            raise Broken("left over", f"after all stores were closed: {', '.join(left)}")
        for _, process in self.stores:
            if not process.is_dead and process.tasks:
                raise Broken("left over", f"{process.name}: {', '.join(task.name for task in process.tasks)}")
