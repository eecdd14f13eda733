"""What `distributed-state opperator module:NAME` may name, and an agent that gets signals before it runs."""

from __future__ import annotations

import os
import signal
from typing import Any

from distributed_state import Agent, AsyncAgent, StateStore

if "EARLY_SIGNALS" in os.environ:
    for number in (signal.SIGHUP, signal.SIGUSR1):
        os.kill(os.getpid(), number)


class Own(Agent):
    """As the SDK has it written: the name is given by a constructor without parameters."""

    def __init__(self) -> None:
        super().__init__("own")
        self.answer = "own"

    def initialize(self) -> None:
        self.register_command("who", self.who)
        self.register_command("fleet", self.fleet)

    def fleet(self) -> list[str]:
        return [agent["name"] for each in self.store.admin.replicas() for agent in each.status.get("agents", [])]

    def who(self) -> list[Any]:
        self.persistent.increment("asked")
        return [self.answer, self.name, self.config]


class Taking(Own):
    def __init__(self, store: Any) -> None:
        Agent.__init__(self, store, name="taking")
        self.answer = "taking"


class Needing(Own):
    def __init__(self, database: str) -> None:
        super().__init__()


class Coroutines(AsyncAgent):
    def __init__(self) -> None:
        super().__init__("coroutines")

    async def initialize(self) -> None:
        self.register_command("who", self.who)

    async def who(self) -> list[Any]:
        await self.persistent.increment("asked")
        return ["coroutines", self.name, self.config]


instance = Own()
instance.answer = "instance"


def factory() -> Own:
    made = Own()
    made.answer = "factory"
    return made


async def coroutine() -> Own:
    return Own()


number = 7


class Early(Own):
    """Gets signals while its store opens, too."""

    def __init__(self) -> None:
        Agent.__init__(self, self.open, name="early")

    def open(self) -> StateStore:
        for each in (signal.SIGHUP, signal.SIGUSR1):
            os.kill(os.getpid(), each)
        return StateStore.open(archive="memory")

    def on_status(self) -> None:
        self.log("INFO", "hook", hook="status", given=[])
