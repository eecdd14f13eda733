"""Beside the session services of Google ADK: append and read as a session grows, and keys that many set at once."""

from __future__ import annotations

import asyncio
import tempfile
import time
from statistics import median
from typing import Any
from uuid import uuid4

from google.adk.errors import StaleSessionError
from google.adk.events.event import Event
from google.adk.events.event_actions import EventActions
from google.adk.integrations.redis._redis_session_service import RedisSessionService, RedisSessionServiceConfig
from google.adk.sessions.database_session_service import DatabaseSessionService
from google.genai import types

from deploy.load.rows import Row, at_most
from distributed_state import AsyncStateStore
from distributed_state.adapters.adk import DistributedSessionService

NAME, APP, USER = "Google ADK", "bench", "ada"
LENGTHS, TIMES = (10, 100, 300), 10  # the peers take minutes to fill a longer one
REDIS, SQL = "RedisSessionService", "DatabaseSessionService (SQLite)"
Kept = tuple[int, int]  # of so many keys whose setting was acknowledged


def rows(redis: str, archive: str) -> list[Row]:
    """Ours on this Redis and this archive, theirs on the same Redis, and theirs of SQL on a file."""
    return asyncio.run(_rows(redis, archive))


async def _rows(redis: str, archive: str) -> list[Row]:
    async with AsyncStateStore.open(redis, archive=archive, namespace="adapters") as store:
        ours = await _measured(DistributedSessionService(store))
    peer = RedisSessionService(RedisSessionServiceConfig(uri=redis, key_prefix=f"peer{uuid4().hex[:8]}:"))
    theirs = {REDIS: await _measured(peer)}
    await peer._get_redis().aclose()
    with tempfile.TemporaryDirectory() as folder:
        async with DatabaseSessionService(f"sqlite+aiosqlite:///{folder}/adk.db") as service:
            theirs[SQL] = await _measured(service)
    found = []
    for name, (times, kept) in theirs.items():
        for what, mine in ours[0].items():
            # Reading a whole session is mostly making its events, which is ADK's own work.
            goal = 1.0 if what.startswith("append") else 3.0
            found.append(at_most(f"{NAME}: {what}", mine, times[what], goal, "us", name))
        found += [_kept(place, ours[1][place], kept[place], name) for place in ("user", "app")]
    return found


def _kept(place: str, mine: Kept, other: Kept, name: str) -> Row:
    what = f"{NAME}: acknowledged `{place}:` keys kept, set by 20 sessions at once"
    measured, baseline = (f"{kept} of {acknowledged}" for kept, acknowledged in (mine, other))
    return Row(what, measured, f"{name}: {baseline}", mine[0] / mine[1], "= all", mine[0] == mine[1])


def _event(text: str, **delta: Any) -> Event:
    """An event of a kilobyte."""
    content = types.Content(role="model", parts=[types.Part(text=text.ljust(1000, "."))])
    return Event(author="agent", content=content, actions=EventActions(state_delta=delta))


async def _measured(service: Any) -> tuple[dict[str, float], dict[str, Kept]]:
    """Microseconds of an append and of reading the whole session at each length, and the keys kept of two races."""
    found: dict[str, float] = {}
    session = await service.create_session(app_name=APP, user_id=USER)
    for length in LENGTHS:
        appends = await _fill(service, session, length)
        found[f"append at {length:,} events"] = median(appends[-TIMES:])
        found[f"get at {length:,} events"] = median([await _read(service, session.id) for _ in range(TIMES)])
    return found, {place: await _race(service, place) for place in ("user", "app")}


async def _fill(service: Any, session: Any, length: int) -> list[float]:
    taken = []
    for number in range(len(session.events), length):
        began = time.perf_counter()
        await service.append_event(session, _event(f"e{number}", k=number))
        taken.append((time.perf_counter() - began) * 1e6)
    return taken


async def _read(service: Any, id: str) -> float:
    began = time.perf_counter()
    await service.get_session(app_name=APP, user_id=USER, session_id=id)
    return (time.perf_counter() - began) * 1e6


async def _race(service: Any, place: str) -> Kept:
    """Twenty sessions of one user set ten keys each at once. One that is refused as stale is not acknowledged."""
    sessions = [await service.create_session(app_name=APP, user_id="raced") for _ in range(20)]
    acknowledged = 0

    async def write(at: int) -> None:
        nonlocal acknowledged
        for key in range(10):
            try:
                await service.append_event(sessions[at], _event("e", **{f"{place}:{at}.{key}": 1}))
            except StaleSessionError:
                continue
            acknowledged += 1

    await asyncio.gather(*map(write, range(20)))
    last = await service.get_session(app_name=APP, user_id="raced", session_id=sessions[0].id)
    return sum(key.startswith(f"{place}:") for key in last.state), acknowledged
