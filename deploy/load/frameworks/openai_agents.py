"""Beside RedisSession of the OpenAI Agents SDK: adding, reading, 50 writers, turns of two replicas."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from typing import Any

from agents import Agent, RunConfig, Runner
from agents.extensions.memory.redis_session import RedisSession
from agents.memory.session import SessionABC
from agents.testing import ScriptedModel
from openai.types.responses import ResponseOutputMessage, ResponseOutputText

from deploy.load.rows import Row, at_least, at_most
from distributed_state import AsyncStateStore
from distributed_state.adapters.openai_agents import DistributedSession

ROUNDS, CALLS, WRITERS = 15, 40, 50
NAME = "OpenAI Agents"
QUIET = RunConfig(tracing_disabled=True)
Make = Callable[[str], SessionABC]


def _items(text: str) -> list[Any]:
    """What a turn adds: 0.5 KB."""
    answer = {"type": "output_text", "text": f"{text} " + "b" * 200, "annotations": []}
    return [
        {"role": "user", "content": f"{text} " + "a" * 200},
        {"type": "message", "role": "assistant", "id": text, "status": "completed", "content": [answer]},
    ]


@asynccontextmanager
async def _opened(redis: str, archive: str, replicas: int) -> AsyncIterator[tuple[list[Make], list[Make]]]:
    """So many makers of our sessions and of theirs, each with a connection of its own."""
    async with AsyncExitStack() as stack:
        ours: list[Make] = []
        theirs: list[Make] = []
        for _ in range(replicas):
            store = await stack.enter_async_context(
                AsyncStateStore.open(redis, archive=archive, namespace="adapters", recent_messages=200)
            )
            ours.append(lambda id, store=store: DistributedSession(id, store))  # type: ignore[misc]  # bound now

            def make(id: str) -> RedisSession:
                session = RedisSession.from_url(id, url=redis)
                stack.push_async_callback(session.close)
                return session

            theirs.append(make)
        yield ours, theirs


async def _medians(calls: Sequence[Callable[[], Awaitable[Any]]]) -> list[float]:
    """Microseconds a call of each, in turn."""
    taken: list[list[float]] = [[] for _ in calls]
    for round in range(ROUNDS + 1):
        for at, call in enumerate(calls):
            began = time.perf_counter()
            for _ in range(CALLS):
                await call()
            if round:  # the first is to get warm
                taken[at].append((time.perf_counter() - began) / CALLS * 1e6)
    return [statistics.median(each) for each in taken]


async def _alone(ours: Make, theirs: Make) -> list[Row]:
    rows: list[Row] = []
    pair = [make(uuid.uuid4().hex) for make in (ours, theirs)]
    mine, other = await _medians([lambda session=session: session.add_items(_items("t")) for session in pair])  # type: ignore[misc]
    rows.append(at_most(f"{NAME}: add_items, two", mine, other, 1.2, "us", "RedisSession"))
    for length in (20, 200):
        pair = [make(uuid.uuid4().hex) for make in (ours, theirs)]
        for session in pair:
            await session.add_items([item for number in range(length // 2) for item in _items(f"t{number}")])
        mine, other = await _medians([session.get_items for session in pair])
        rows.append(at_most(f"{NAME}: get_items of {length}", mine, other, 1.2, "us", "RedisSession"))
    return rows


async def _crowd(makers: Sequence[Make], each: int, rate: float = 0.0) -> tuple[float, float, int, int]:
    """Turns a second of 50 writers on one session, microseconds of a read meanwhile, acknowledged, kept.

    With `rate` they add no more than so many turns a second.
    """
    id = uuid.uuid4().hex
    sessions = [makers[at % len(makers)](id) for at in range(WRITERS)]
    reader = makers[0](id)
    await sessions[0].add_items(_items("first"))
    acknowledged: set[str] = set()
    reads: list[float] = []

    async def write(at: int) -> None:
        for number in range(each):
            await sessions[at].add_items(_items(f"{at}-{number}"))
            acknowledged.add(f"{at}-{number}")
            if rate:
                await asyncio.sleep(WRITERS / rate)

    writing = asyncio.gather(*map(write, range(WRITERS)))
    began = time.perf_counter()
    while not writing.done():
        asked = time.perf_counter()
        await reader.get_items(20)
        reads.append((time.perf_counter() - asked) * 1e6)
    await writing
    took = time.perf_counter() - began
    kept = {item["content"].split()[0] for item in await reader.get_items() if item.get("role") == "user"}  # type: ignore[union-attr]
    return len(acknowledged) / took, statistics.median(reads), len(acknowledged), len(acknowledged & kept)


async def _crowds(ours: Sequence[Make], theirs: Sequence[Make]) -> list[Row]:
    mine = await _crowd(ours, 40)
    other = await _crowd(theirs, 3)
    as_theirs = await _crowd(ours, 3, other[0])
    return [
        at_least(f"{NAME}: add_items, {WRITERS} writers on a session", mine[0], other[0], 20, "/s", "RedisSession"),
        at_most(f"{NAME}: get_items(20) during as many adds", as_theirs[1], other[1], 1.2, "us", "RedisSession"),
        Row(
            f"{NAME}: acknowledged items of these writers that were kept", f"{mine[3]} of {mine[2]}",
            f"RedisSession: {other[3]} of {other[2]}", mine[3] / mine[2], "= all", mine[3] == mine[2],
        ),
    ]  # fmt: skip


def _agent(turn: str) -> Agent[Any]:
    content = ResponseOutputText(text=turn, type="output_text", annotations=[])
    answer = ResponseOutputMessage(id=turn, type="message", role="assistant", content=[content], status="completed")
    return Agent(name="a", model=ScriptedModel([[answer]]))


async def _mixed(makers: Sequence[Make]) -> int:
    """Of 40 runs on one session, by two replicas at once, how many are not in one piece."""
    id = uuid.uuid4().hex
    sessions = [make(id) for make in makers]

    async def turns(at: int) -> None:
        for number in range(20):
            turn, session = f"{at}-{number}", sessions[at]
            async with session.lock() if isinstance(session, DistributedSession) else nullcontext():
                await Runner.run(_agent(turn), turn, session=session, run_config=QUIET)

    await asyncio.gather(*map(turns, range(2)))
    said: list[Any] = await sessions[0].get_items()
    texts = [each["content"] if isinstance(each["content"], str) else each["content"][0]["text"] for each in said]
    runs = [(turn, len(list(group))) for turn, group in itertools.groupby(texts)]
    return 40 - sum(length == 2 for _, length in runs)


async def _turns(ours: Sequence[Make], theirs: Sequence[Make]) -> list[Row]:
    mine, other = await _mixed(ours[:2]), await _mixed(theirs[:2])
    name = f"{NAME}: runs of two replicas that mix on one session, under `lock()`"
    return [Row(name, f"{mine} of 40", f"RedisSession: {other} of 40", mine / max(other, 1), "= none", mine == 0)]


async def _rows(redis: str, archive: str) -> list[Row]:
    async with _opened(redis, archive, 2) as (ours, theirs):
        return [*await _alone(ours[0], theirs[0]), *await _crowds(ours, theirs), *await _turns(ours, theirs)]


def rows(redis: str, archive: str) -> list[Row]:
    """Measure on this server and database."""
    return asyncio.run(_rows(redis, archive))
