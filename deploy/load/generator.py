"""One process of the generator. Law: it does what its parent says, and ends when the parent does.

They speak JSON lines, orders on stdin and reports on stdout:

    -> Setup
    -> {"order": "phase", "phase": Phase}          prepare, report ready, and wait for:
    -> {"order": "begin", "at": moment}            by time.monotonic(), which is one clock for all of a machine
    -> {"order": "stop"}                           end the phase early
    -> {"order": "verify", "expected": [Expected]} read them back
    <- {"report": "ready"}
    <- {"report": "progress", "ends": [...], "latencies": [...], "failed": n}    twice a second
    <- {"report": "done", "part": Part, "expected": [Expected], "complaints": [...], "last": moment of the last answer}
    <- {"report": "verified", "differences": [Difference]}
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from deploy.load.client import Client, Target
from deploy.load.measures import Recorder
from deploy.load.scenarios import SCENARIOS, Caller, Refused, Scenario, read_back
from deploy.load.schedule import arrivals, drive
from deploy.load.verifying import Difference, Expected, Source, differences
from distributed_state.programs.worker_processes import Message, Parent


@dataclass(frozen=True, slots=True)
class Phase:
    """A scenario at a constant rate. `retry_for` is how long a request is repeated before it is given up."""

    number: int
    scenario: str
    rate: float
    seconds: float
    retry_for: float = 30.0


@dataclass(frozen=True, slots=True)
class Setup:
    """What a process of the generator is told at its start."""

    process: int
    of: int
    run: str
    targets: list[Target]
    source: Source
    subscribers: int = 10
    balanced: bool = False
    attempts: int | None = None

    @classmethod
    def read(cls, fields: dict[str, Any]) -> Setup:
        """What `asdict` made of one, after it was JSON."""
        return cls(**fields | {"targets": [(host, port) for host, port in fields["targets"]]})


def main() -> None:
    """Serve the parent until it says no more, or is gone."""
    parent = Parent()
    orders = parent.orders()
    setup = Setup.read(next(orders))
    gc.collect()
    gc.freeze()  # a full collection of all that is loaded would hold requests up that are due
    asyncio.run(Generator(parent, setup).serve(orders))


class Generator:
    """Speaks with the parent and runs one phase at a time."""

    def __init__(self, parent: Parent, setup: Setup) -> None:
        self._parent = parent
        self._setup = setup
        self._said: asyncio.Queue[Message | None] = asyncio.Queue()
        self._stopped = asyncio.Event()
        self._last = 0.0

    async def serve(self, orders: Iterator[Message]) -> None:
        """Until there are no more."""
        loop = asyncio.get_running_loop()

        def listen() -> None:
            for order in orders:
                loop.call_soon_threadsafe(self._hear, order)
            loop.call_soon_threadsafe(self._hear, None)

        threading.Thread(target=listen, daemon=True).start()
        while (order := await self._said.get()) is not None:
            if order["order"] == "phase":
                await self._phase(Phase(**order["phase"]))
            elif order["order"] == "verify":
                expected = [Expected.read(fields) for fields in order["expected"]]
                found = [asdict(each) for each in await self._verify(expected)]
                self._parent.send({"report": "verified", "differences": found})

    def _hear(self, order: Message | None) -> None:
        if order is None or order["order"] == "stop":
            self._stopped.set()
        if order is None or order["order"] != "stop":
            self._said.put_nowait(order)

    async def _phase(self, phase: Phase) -> None:
        setup = self._setup
        self._stopped.clear()
        client = Client(setup.targets, tries=setup.attempts)
        recorder = Recorder(0.0)
        caller = Caller(client, setup.source, recorder, setup.run, setup.process, phase.retry_for, setup.attempts)
        scenario = SCENARIOS[phase.scenario](caller, phase.number)
        scenario.subscribers = setup.subscribers  # type: ignore[attr-defined]  # of Events
        balancing = asyncio.create_task(client.balance()) if setup.balanced else None
        complaints = []
        try:
            await scenario.prepare()
        except (OSError, Refused) as error:
            complaints.append(f"{phase.scenario}: cannot be prepared: {error or type(error).__name__}")
            self._stopped.set()
        self._parent.send({"report": "ready"})
        order = await self._said.get()
        if order is None:
            self._said.put_nowait(None)
            return
        begin: float = order["at"]
        caller.recorder = Recorder(begin)
        self._last = begin
        telling = asyncio.create_task(self._tell(caller.recorder))
        due = arrivals(phase.rate, phase.seconds, process=setup.process, of=setup.of, burst=scenario.burst)
        running, late = await drive(due, begin, lambda at: self._one(scenario, caller, at), stopped=self._stopped)
        if running:
            await asyncio.wait(running, timeout=2.0 if self._stopped.is_set() else phase.retry_for + 1)
        for task in list(running):
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        complaints += await scenario.finish()
        telling.cancel()
        if balancing is not None:
            balancing.cancel()
        client.close()
        self._progress(caller.recorder)
        part = asdict(caller.recorder.part(late))
        expected = [asdict(each) for each in caller.expected.values()]
        self._parent.send(
            {"report": "done", "part": part, "expected": expected, "complaints": complaints, "last": self._last}
        )

    async def _one(self, scenario: Scenario, caller: Caller, due: float) -> None:
        recorder = caller.recorder
        try:
            await scenario.request(due)
        except asyncio.CancelledError:
            recorder.fail(due, time.monotonic(), "not answered in time")
        except (OSError, Refused, TimeoutError) as error:
            recorder.fail(due, time.monotonic(), f"given up: {error or type(error).__name__}")
        else:
            self._last = time.monotonic()
            recorder.answer(due, self._last)

    async def _tell(self, recorder: Recorder) -> None:
        while True:
            await asyncio.sleep(0.5)
            self._progress(recorder)

    def _progress(self, recorder: Recorder) -> None:
        ends, latencies = recorder.taken()
        report = {"report": "progress", "ends": ends, "latencies": latencies, "failed": recorder.failed}
        self._parent.send(report)

    async def _verify(self, all_expected: list[Expected]) -> list[Difference]:
        client = Client(self._setup.targets, connections=8)
        found: list[Difference] = []
        left = iter(all_expected)

        async def some() -> None:
            for expected in left:
                try:
                    messages = await read_back(client, expected.id)
                except OSError as error:
                    found.append(Difference(str(error)))
                    continue
                found.extend(differences(self._setup.source, expected, messages))

        await asyncio.gather(*(some() for _ in range(8)))
        client.close()
        return found


if __name__ == "__main__":
    main()
