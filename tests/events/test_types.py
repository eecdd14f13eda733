"""The table of events is what the package publishes, and what each holds."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import distributed_state
from distributed_state import AsyncStateStore
from distributed_state.events.types import TYPES

PACKAGE = Path(distributed_state.__file__).parent
KNOWN = {each.name: set(each.data) for each in TYPES}
# What others publish through a store: a daemon's lifecycle and the demonstration's own events.
ELSEWHERE = ("adapters/", "programs/demo/", "programs/replay/")


def published() -> set[str]:
    """Every text in the source that is given to `emit`, or stands in an event's place."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        if str(path.relative_to(PACKAGE)).startswith(ELSEWHERE):
            continue
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "").endswith(("emit", "emit_once")):
                texts = [each.value for each in node.args if isinstance(each, ast.Constant)]
                found |= {each for each in texts if isinstance(each, str) and re.fullmatch(r"[a-z]+\.[a-z]+", each)}
        found |= set(re.findall(r'\(b"[eE]", b"([a-z]+\.[a-z]+)"', text))
    return found


@pytest.mark.wide
def test_what_is_published_is_in_the_table_and_nothing_else() -> None:
    # A resync is made by the replica that receives it; a repair writes its events to SQL alone.
    assert published() == set(KNOWN) - {"resync", "conversation.repaired"}
    assert len(KNOWN) == len(TYPES)


async def test_events_hold_what_the_table_says() -> None:
    async with AsyncStateStore.open(archive="memory") as store, store.events() as events:
        session = store.session("c1", user="u1")
        await session.create({"n": 1}, is_clear=True)
        await session.write(phase="planning")
        await session.switch(client="web")
        await session.checkpoint("here")
        await session.set("n", 2)
        await session.rollback(label="here")
        await session.clear(messages=True)
        await store.activate_agent("notes", client="web")
        await store.change_directory("/home", client="web")
        await store.admin.reload_config({"model": {"size": 3}})
        await store.delete("c1")
        received = {}
        while len(received) < 10:
            event = await events.next(timeout=10)
            received.setdefault(event.type, set()).update(event.data)
    assert received == {name: KNOWN[name] for name in received}
    # Those that take a failure, time or a command: `tests/faults`, the other files of this folder,
    # `tests/store/test_planned_maintenance.py` and `tests/store/test_work.py` have each of them.
    assert set(KNOWN) - set(received) == {
        "conversation.diverged", "conversation.repaired", "session.expired", "lock.lost", "replica.lost", "resync",
        "maintenance.announced", "maintenance.ended", "turn.failed",
    }  # fmt: skip
