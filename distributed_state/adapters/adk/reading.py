"""How sessions are read. Law: what is read is what the server has, and of one version of each record."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from google.adk.sessions.base_session_service import GetSessionConfig

from distributed_state import AsyncRecord, AsyncSession, AsyncStateStore
from distributed_state.adapters.adk.layout import UPDATED, joined, parted

_PAGE = 100
_ROUNDS = 20


@dataclass(frozen=True, slots=True)
class Seen:
    """A session at one version: its fields, and the messages that were asked for."""

    fields: dict[str, Any]
    messages: list[dict[str, Any]]


async def look(record: AsyncSession, config: GetSessionConfig | None) -> Seen | None:
    """The session as the server has it, with the events that `config` asks for; None if there is none."""
    version = await record.version(fresh=True)
    for _ in range(_ROUNDS):
        # From here on without a question to the server, as long as nobody writes.
        fields = await record.get_all()
        if UPDATED not in fields:
            return None
        messages = await _messages(record, config or GetSessionConfig())
        now = await record.version()
        if now == version:
            break
        version = now
    # Somebody writes all the while. Then the fields are the older part, and who appends is stale at most.
    return Seen(fields, messages)


async def _messages(record: AsyncSession, config: GetSessionConfig) -> list[dict[str, Any]]:
    if config.after_timestamp is None:
        return await record.raw_messages(last=config.num_recent_events)
    if config.num_recent_events is not None:
        page = await record.raw_messages(last=config.num_recent_events)
        return page[_first_after(page, config.after_timestamp) :]
    found: list[dict[str, Any]] = []
    before = None
    while page := await record.raw_messages(last=_PAGE, before=before):
        first = _first_after(page, config.after_timestamp)
        found = page[first:] + found
        if first or len(page) < _PAGE:
            break
        before = page[0]["number"]
    return found


def _first_after(page: list[dict[str, Any]], timestamp: float) -> int:
    """How many of a page, counted from its beginning, end with an event that is older."""
    for at in range(len(page), 0, -1):
        if page[at - 1].get("event", {}).get("timestamp", timestamp) < timestamp:
            return at
    return 0


async def newest(records: Iterable[AsyncRecord]) -> list[dict[str, Any]]:
    """The fields of records as the server has them now; what is asked at once leaves in one write."""
    many = list(records)
    found: list[dict[str, Any]] = []
    for at in range(0, len(many), _PAGE):
        found += await asyncio.gather(*(record.get_all(fresh=True) for record in many[at : at + _PAGE]))
    return found


async def listed(store: AsyncStateStore, app: str, user: str | None) -> list[tuple[str, str, str]]:
    """The sessions of an app, or of one of its users: each its app, user and id."""
    names = [app] if user is None else [app, user]
    # With an owner, who may see only what is their own may ask.
    owner = None if user is None else joined(*names)
    found: list[tuple[str, str, str]] = []
    after = None
    # In the order of ids, in which nothing that is written meanwhile moves past the pages.
    while page := await store.sessions(prefix=joined(*names, ""), user=owner, fresh=True, limit=1000, after=after):
        parts = [parted(info.id) for info in page]
        # What has more parts is none of ADK: somebody forked a session to a name below its own.
        found += [(each[0], each[1], each[2]) for each in parts if len(each) == len(("app", "user", "id"))]
        after = page[-1].cursor
    return found
