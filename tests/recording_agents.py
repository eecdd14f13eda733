"""Agents of either API for tests that are written once. Law: a test's hooks are `async def`, which both APIs run."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from sync_api import Blocking, in_thread, unwrap

from distributed_state import Agent, AsyncAgent, AsyncHost, Host


def made(kind: type, store: Any, **options: Any) -> Any:
    """An agent with the hooks of `kind`, of the API that the store has."""
    base = Agent if isinstance(store, Blocking) else AsyncAgent
    return type(kind.__name__, (kind, base), {})(unwrap(store), **options)


async def now(value: Any) -> Any:
    """Return the result of a call, which is awaitable on the asyncio API."""
    return await value if inspect.isawaitable(value) else value


async def ask(agent: Any, method: str, *args: Any, **named: Any) -> Any:
    """Call a method of an agent as a task or thread of its own would."""
    call = getattr(agent, method)
    if isinstance(agent, AsyncAgent):
        return await now(call(*args, **named))
    return await in_thread(lambda: call(*args, **named))


@asynccontextmanager
async def hosted(*agents: Any) -> AsyncIterator[Any]:
    """The agents on one host, until the end of the block."""
    if isinstance(agents[0], AsyncAgent):
        async with AsyncHost(*agents) as host:
            yield host
    else:
        host = Host(*agents)
        await in_thread(host.__enter__)
        try:
            yield host
        finally:
            await in_thread(lambda: host.__exit__(None, None, None))


@asynccontextmanager
async def entered(agent: Any) -> AsyncIterator[Any]:
    """`with agent:`, as each API writes it."""
    if isinstance(agent, AsyncAgent):
        async with agent:
            yield agent
        return
    await in_thread(agent.__enter__)
    try:
        yield agent
    except BaseException as error:
        given = (type(error), error, error.__traceback__)
        await in_thread(lambda: agent.__exit__(*given))
        raise
    await in_thread(lambda: agent.__exit__(None, None, None))


class Recorder:
    """Hooks that note what they were given, and what they found in the conversation."""

    conversation_defaults = {"notes": [], "theme": "light"}  # noqa: RUF012 - as a user writes it

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.saw: list[tuple[Any, ...]] = []

    async def field(self, key: str) -> Any:
        it: Any = self
        return await now(it.conversation.get(key))

    async def on_new_conversation(self, conversation_id: str, is_clear: bool) -> None:
        self.saw.append(("new", conversation_id, is_clear, await self.field("notes")))

    async def on_conversation_switched(self, conversation_id: str, previous_id: str, message_count: int) -> None:
        self.saw.append(("switched", conversation_id, previous_id, message_count, await self.field("notes")))

    async def on_conversation_deleted(self, conversation_id: str) -> None:
        it: Any = self
        there = await now(it.conversation.exists())
        self.saw.append(("deleted", conversation_id, there, await self.field("notes")))

    async def on_agent_activated(self, previous_agent: str | None, conversation_id: str) -> None:
        self.saw.append(("activated", previous_agent, conversation_id))

    async def on_agent_deactivated(self, next_agent: str | None) -> None:
        self.saw.append(("deactivated", next_agent))

    async def on_invocation_directory_changed(self, old_path: str, new_path: str) -> None:
        self.saw.append(("directory", old_path, new_path))

    async def on_config_update(self, config: Any, changed: set[str]) -> None:
        self.saw.append(("config", config, changed))

    async def on_event(self, event: Any) -> None:
        self.saw.append(("event", event.type))

    def of(self, kind: str) -> list[tuple[Any, ...]]:
        """What was seen of one kind."""
        return [each for each in self.saw if each[0] == kind]


def run_of(agent: Any) -> Any:
    """The run that the agent is in, None before it began."""
    return agent.agent_context.host
