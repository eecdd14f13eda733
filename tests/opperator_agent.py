"""The agents that tests run under an Opperator daemon, as `distributed-state opperator opperator_agent:Noted` does."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from examples.test_note_agent import NoteAgent

from distributed_state import Agent, AsyncAgent, CommandArgument

print("a module may print")  # noqa: T201 - it must not reach the daemon as a message


class Noted(NoteAgent):
    """The note-taking agent, which says in its log which hooks ran."""

    def initialize(self) -> None:
        print("a hook may print")  # noqa: T201 - as above
        os.system("echo and so may a child")
        super().initialize()

    def on_new_conversation(self, conversation_id: str, is_clear: bool) -> None:
        super().on_new_conversation(conversation_id, is_clear)
        self.log("INFO", "hook", hook="new", given=[conversation_id, is_clear])

    def on_conversation_switched(self, conversation_id: str, previous_id: str, message_count: int) -> None:
        super().on_conversation_switched(conversation_id, previous_id, message_count)
        self.log("INFO", "hook", hook="switched", given=[conversation_id, previous_id, message_count])

    def on_conversation_deleted(self, conversation_id: str) -> None:
        self.log("INFO", "hook", hook="deleted", given=[conversation_id, len(self.conversation.get("notes", []))])

    def on_agent_activated(self, previous_agent: str | None, conversation_id: str) -> None:
        self.log("INFO", "hook", hook="activated", given=[previous_agent, conversation_id])

    def on_agent_deactivated(self, next_agent: str | None) -> None:
        self.log("INFO", "hook", hook="deactivated", given=[next_agent])

    def on_invocation_directory_changed(self, old_path: str, new_path: str) -> None:
        self.log("INFO", "hook", hook="directory", given=[old_path, new_path])

    def on_config_update(self, config: dict[str, Any]) -> None:
        self.log("INFO", "hook", hook="config", given=[config])

    def on_shutdown(self) -> None:
        self.log("INFO", "hook", hook="shutdown", given=[])


class Troubled(Agent):
    """Commands that go wrong, each in its way."""

    def initialize(self) -> None:
        self.register_section("doomed", "Doomed", "soon gone", collapsed=True)
        self.unregister_section("doomed")
        self.set_system_prompt("You are troubled.")
        number = [CommandArgument("number", "integer", required=True), CommandArgument("factor", "integer", default=0)]
        self.register_command("double", self.double, description="Twice a number", arguments=number)
        for command in (self.fail, self.leave, self.odd, self.where, self.slow, self.flood):
            self.register_command(command.__name__, command)

    def double(self, number: int, progress: Callable[..., None]) -> int:
        progress("half way", progress=0.5, status="counting", number=number)
        time.sleep(0.02 * (number % 3))
        return 2 * number

    def fail(self) -> None:
        raise ValueError("it is the first of April")

    def leave(self) -> None:
        sys.exit(3)

    def odd(self) -> Any:
        self.log("INFO", "odd", nan=float("nan"), keys={(1, 2): 3}, thing=object)
        return {1, 2}

    def where(self) -> list[str]:
        return [self.conversation_id, self.get_invocation_directory()]

    def slow(self) -> str:
        self.log("INFO", "slow begins")
        time.sleep(1)
        self.persistent.set("slow", "done")
        return "done"

    def flood(self) -> None:
        for number in range(3000):
            self.log("INFO", "x" * 1000, number=number)


class Noting(Agent):
    """Keeps its user's conversation and the notes in attributes, as agents of the daemon's SDK do."""

    beside = False  # whether its command runs beside the switches

    def initialize(self) -> None:
        self.at = ""
        self.notes: dict[str, list[str]] = {}
        self.moved = threading.Condition()
        self.register_command("add", self.add, arguments=[CommandArgument("note")], async_enabled=self.beside)

    def on_conversation_switched(self, conversation_id: str) -> None:
        with self.moved:
            self.at = conversation_id
            self.moved.notify_all()

    def add(self, note: str) -> str:
        with self.moved:
            if self.beside:
                self.moved.wait_for(lambda: self.at != self.conversation_id, 0.5)  # else the last ones wait for ever
            self.notes.setdefault(self.at, []).append(note)
            return self.at


class Waiting(AsyncAgent):
    """An agent of asyncio."""

    conversation_defaults = {"seen": 0}  # noqa: RUF012 - as a user writes it

    async def initialize(self) -> None:
        self.register_command("seen", self.seen)

    async def on_conversation_switched(self, conversation_id: str) -> None:
        await self.conversation.increment("seen")

    async def seen(self) -> list[Any]:
        return [self.conversation_id, await self.conversation.get("seen")]
