"""An agent that shows everything that happens around it: conversations, who talks to whom, folders, config, status.

Asyncio, on two replicas. What a client did on one replica, the agent hears on both.
"""

from __future__ import annotations

import os.path
from pathlib import Path
from typing import Any

import pytest
from below import until
from pydantic import BaseModel

from distributed_state import AsyncAgent

pytestmark = [pytest.mark.replicas, pytest.mark.only(api="asyncio")]


class LifecycleAgent(AsyncAgent):
    """Demonstrates every hook."""

    name = "lifecycle_agent"
    pause_when_inactive = True
    conversation_defaults = {"seen": 0}  # noqa: RUF012 - as a user writes it

    class Config(BaseModel):
        poll_interval: float = 60.0
        features: dict[str, bool] = {}

    async def initialize(self) -> None:
        self.set_description("Demonstrates lifecycle events")
        self.register_section("status", "Status", "initializing")
        self.register_section("context", "Context", "no conversation", collapsed=True)

    async def start(self) -> None:
        self.update_section("status", "running")

    async def on_new_conversation(self, conversation_id: str, is_clear: bool) -> None:
        self.update_section("context", f"{'cleared' if is_clear else 'new'}: {conversation_id}")

    async def on_conversation_switched(self, conversation_id: str, previous_id: str, message_count: int) -> None:
        await self.conversation.increment("seen")
        self.update_section("context", f"{previous_id or 'nowhere'} -> {conversation_id}, {message_count} messages")

    async def on_conversation_deleted(self, conversation_id: str) -> None:
        self.update_section("context", f"deleted: {conversation_id}, seen {await self.conversation.get('seen')} times")

    async def on_agent_activated(self, previous_agent: str | None, conversation_id: str) -> None:
        self.update_section("status", f"active, after {previous_agent or 'nobody'}")
        self.set_system_prompt(f"You are active in {conversation_id or 'no conversation'}.")

    async def on_agent_deactivated(self, next_agent: str | None) -> None:
        self.update_section("status", f"inactive, {next_agent or 'nobody'} is")
        self.set_system_prompt("You are inactive.")

    async def on_invocation_directory_changed(self, old_path: str, new_path: str) -> None:
        self.update_section("context", f"{os.path.basename(old_path)} -> {os.path.basename(new_path)}")

    async def on_config_update(self, config: Config, changed: set[str]) -> None:
        self.log("INFO", "config", interval=config.poll_interval, changed=sorted(changed))

    async def on_status(self) -> None:
        self.log("INFO", "still here", active=self.active, conversation=self.conversation_id)


async def test_every_replica_shows_what_happened_on_any(opener: Any, tmp_path: Path, caplog: Any) -> None:
    caplog.set_level("INFO")
    file = tmp_path / "agents.yaml"
    file.write_text("poll_interval: 5\n")
    here, there = await opener(), await opener()
    async with LifecycleAgent(here, config=file) as first, LifecycleAgent(there, config=file) as second:

        async def both_show(section: str, content: str) -> None:
            for agent in (first, second):
                await until(lambda agent=agent: agent.visible["sections"][section]["content"] == content)

        assert second.config.poll_interval == 5
        await both_show("status", "running")

        await here.session("a").append({"role": "user", "content": "hello"})
        await both_show("context", "new: a")
        await here.session("b").switch(previous_id="a")
        await both_show("context", "a -> b, 0 messages")
        await there.session("a").switch()
        await both_show("context", "nowhere -> a, 1 messages")
        await there.session("a").clear(messages=True)
        await both_show("context", "cleared: a")

        await first.activate(conversation_id="a")
        await both_show("status", "active, after nobody")
        assert (first.active, second.active, first.paused) == (True, True, False)
        assert second.visible["system_prompt"] == "You are active in a."
        await there.activate_agent("another")
        await both_show("status", "inactive, another is")
        assert (first.active, second.paused) == (False, True)

        await here.change_directory("/src/one")
        await there.change_directory("/src/two")
        await both_show("context", "one -> two")
        assert second.get_invocation_directory() == "/src/two"
        assert second.get_working_directory() == os.getcwd()

        await here.delete("b")
        await both_show("context", "deleted: b, seen 2 times")  # once by each replica

        file.write_text("poll_interval: 7\nfeatures: {fast: true}\n")
        await first.reload()  # as SIGHUP does
        assert (first.config.poll_interval, second.config.poll_interval) == (7, 5)
        await here.admin.reload_config(file)
        await until(lambda: second.config.poll_interval == 7)
        assert second.config.features == {"fast": True}

        await second.status()  # as SIGUSR1 does
        assert [r.fields["conversation"] for r in caplog.records if r.getMessage().startswith("still here")] == ["a"]
