"""One process of the generator. Law: it does what its parent says, and ends when the parent does.

<- Phase      prepare, answer ("ready",), and wait for:
<- float      begin then, by time.monotonic(), which is one clock for all processes of a machine
<- "stop"     end the phase early
-> ("progress", ends, latencies, failed)    twice a second
-> ("done", Part, [Expected], [complaint], moment of the last answer)
<- [Expected]  read them back -> ("verified", [difference])
<- None       end
"""

from __future__ import annotations

import asyncio
import gc
import signal
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from deploy.load.client import Client, Target
from deploy.load.measures import Recorder
from deploy.load.scenarios import SCENARIOS, Caller, Refused, Scenario, read_back
from deploy.load.schedule import arrivals, drive
from deploy.load.verifying import Expected, Source, differences


@dataclass(frozen=True, slots=True)
class Phase:
    """A scenario at a constant rate. `patience` is how long a request is repeated before it is given up."""

    number: int
    scenario: str
    rate: float
    seconds: float
    patience: float = 30.0


@dataclass(frozen=True, slots=True)
class Setup:
    """What a process of the generator is told at its start."""

    process: int
    of: int
    run: str
    targets: list[Target]
    source: Source
    subscribers: int = 10


def main(pipe: Connection, setup: Setup) -> None:
    """Serve the parent until it says so, or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is for the parent, who then ends us
    gc.collect()
    gc.freeze()  # a full collection of all that is loaded would hold requests up that are due
    asyncio.run(Generator(pipe, setup).serve())


class Generator:
    """Speaks with the parent and runs one phase at a time."""

    def __init__(self, pipe: Connection, setup: Setup) -> None:
        self._pipe = pipe
        self._setup = setup
        self._said: asyncio.Queue[Any] = asyncio.Queue()
        self._stopped = asyncio.Event()
        self._last = 0.0

    async def serve(self) -> None:
        """Until the parent says None or is gone."""
        asyncio.get_running_loop().add_reader(self._pipe.fileno(), self._hear)
        while (order := await self._said.get()) is not None:
            if isinstance(order, Phase):
                await self._phase(order)
            elif isinstance(order, list):
                self._pipe.send(("verified", await self._verify(order)))

    def _hear(self) -> None:
        try:
            said = self._pipe.recv()
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(self._pipe.fileno())
            self._stopped.set()
            said = None
        if said == "stop":
            self._stopped.set()
        else:
            self._said.put_nowait(said)

    async def _phase(self, phase: Phase) -> None:
        setup = self._setup
        self._stopped.clear()
        client = Client(setup.targets)
        caller = Caller(client, setup.source, Recorder(0.0), setup.run, setup.process, phase.patience)
        scenario = SCENARIOS[phase.scenario](caller, phase.number)
        scenario.subscribers = setup.subscribers  # type: ignore[attr-defined]  # of Events
        complaints = []
        try:
            await scenario.prepare()
        except (OSError, Refused) as error:
            complaints.append(f"{phase.scenario}: cannot be prepared: {error or type(error).__name__}")
            self._stopped.set()
        self._pipe.send(("ready",))
        begin = await self._said.get()
        if begin is None:
            return
        caller.recorder = Recorder(begin)
        self._last = begin
        telling = asyncio.create_task(self._tell(caller.recorder))
        due = arrivals(phase.rate, phase.seconds, process=setup.process, of=setup.of, burst=scenario.burst)
        running, late = await drive(due, begin, lambda at: self._one(scenario, caller, at), stopped=self._stopped)
        if running:
            await asyncio.wait(running, timeout=2.0 if self._stopped.is_set() else phase.patience + 1)
        for task in list(running):
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        complaints += await scenario.finish()
        telling.cancel()
        client.close()
        self._progress(caller.recorder)
        self._pipe.send(("done", caller.recorder.part(late), list(caller.expected.values()), complaints, self._last))

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
        self._pipe.send(("progress", ends, latencies, recorder.failed))

    async def _verify(self, all_expected: list[Expected]) -> list[str]:
        client = Client(self._setup.targets, connections=8)
        found = []
        left = iter(all_expected)

        async def some() -> None:
            for expected in left:
                try:
                    messages = await read_back(client, expected.id)
                except OSError as error:
                    found.append(str(error))
                    continue
                found.extend(differences(self._setup.source, expected, messages))

        await asyncio.gather(*(some() for _ in range(8)))
        client.close()
        return found
