"""An agent that is sent signals. The environment's GIVEN is what it is to do, as JSON.

One line on stdout for each thing that happened.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import os
import signal
import time
from typing import Any

from distributed_state import Agent, AsyncAgent, AsyncStateStore, StateStore


def say(*words: Any) -> None:
    print(json.dumps(words), flush=True)  # noqa: T201 - the pipe to the test


class Told(logging.Handler):
    """What the agent logs, on the same pipe."""

    def emit(self, record: logging.LogRecord) -> None:
        say("log", record.levelname, str(record.args[0] if record.args else record.msg), getattr(record, "fields", {}))


async def now(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


class Signalled:
    """Says what it is told, and works on one conversation, a turn after another."""

    work: str

    async def initialize(self) -> None:
        if self.work == "hang early":
            say("working")
            await asyncio.sleep(60)

    async def start(self) -> None:
        say("started")

    async def main_loop(self) -> None:
        it: Any = self
        if self.work == "hang":
            say("working")
            # Asleep in C, as blocking code is; the asyncio API's is cancelled.
            await asyncio.sleep(60) if isinstance(it, AsyncAgent) else time.sleep(60)
        while await now(it.wait(0.01)):
            if self.work == "turns":
                await self.turn()

    async def turn(self) -> None:
        it: Any = self
        turn = it.store.session("c").turn()
        it_turn = await turn.__aenter__() if isinstance(it, AsyncAgent) else turn.__enter__()
        it_turn["n"] = it_turn.get("n", 0) + 1
        say("in a turn", it_turn["n"])
        await asyncio.sleep(0.5)
        say("stopping", it.stopping)
        await now(turn.__aexit__(None, None, None) if isinstance(it, AsyncAgent) else turn.__exit__(None, None, None))
        say("turn done")

    async def on_config_update(self, config: Any, changed: set[str]) -> None:
        say("config", config, sorted(changed))

    async def on_status(self) -> None:
        say("status")

    async def on_shutdown(self) -> None:
        say("shutdown")

    async def cleanup(self) -> None:
        say("cleanup")


async def inside(agent: Any) -> None:
    async with agent:
        await asyncio.sleep(60)


def main(api: str, work: str, place: dict[str, Any], config: str | None, shutdown_timeout: float = 20.0) -> None:
    logging.getLogger("distributed_state.agent").addHandler(Told())
    logging.getLogger("distributed_state.agent").setLevel(logging.INFO)
    more = {"work": work, "shutdown_timeout": shutdown_timeout}
    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)]  # nohup has the latter ignored
    if work == "with":
        more |= {"work": "turns"}
    if api == "asyncio":
        agent: Any = type("Signalled", (Signalled, AsyncAgent), more)(
            lambda: AsyncStateStore.open(**place), config=config
        )
        asyncio.run(inside(agent) if work == "with" else agent.run())
    else:
        agent = type("Signalled", (Signalled, Agent), more)(lambda: StateStore.open(**place), config=config)
        if work == "with":
            with agent:
                time.sleep(60)
        else:
            agent.run()
    after = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)]
    say("handlers", *(one == other for one, other in zip(before, after, strict=True)))


if __name__ == "__main__":
    main(**json.loads(os.environ["GIVEN"]))
