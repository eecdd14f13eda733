"""What frameworks keep by themselves, small, for tests of `distributed-state adopt`, and how these adopt it."""

from __future__ import annotations

import sqlite3
from contextlib import AsyncExitStack, closing
from pathlib import Path
from typing import Any

from langgraph.checkpoint.base import empty_checkpoint
from langgraph.checkpoint.base.id import uuid6
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver

from distributed_state.adapters.adopting import Adopted, adopt


async def run(part: Any, store: Any, source: Any, *, more: Any = None, **options: Any) -> Adopted:
    async with AsyncExitStack() as stack:
        return await adopt(await part.threads(stack, store, source, **(more or {})), store, **options)


def counts(done: Adopted) -> tuple[int, int, dict[str, str], dict[str, str]]:
    return done.copied, done.there, done.differ, done.failed


def config_of(thread: str, checkpoint_id: str | None = None, namespace: str = "") -> Any:
    named = {} if checkpoint_id is None else {"checkpoint_id": checkpoint_id}
    return {"configurable": {"thread_id": thread, "checkpoint_ns": namespace, **named}}


def add(saver: Any, thread: str, step: int, parent: Any = None, namespace: str = "", **values: Any) -> Any:
    """One more checkpoint; what names it."""
    versions = dict.fromkeys(values, f"{step:032}.5")
    checkpoint = empty_checkpoint() | {
        "id": str(uuid6(clock_seq=step)),
        "channel_values": values,
        "channel_versions": versions,
        "versions_seen": {"node": versions},
    }
    metadata = {"source": "loop", "step": step, "parents": {}, "run_id": f"run-{step % 3}"}
    given = saver.put(parent or config_of(thread, namespace=namespace), checkpoint, metadata, versions)
    return config_of(thread, given["configurable"]["checkpoint_id"], namespace)


def thread(saver: Any, name: str) -> None:
    """Three checkpoints one after the other, a branch, a subgraph's, writes of tasks that are in no order of ids."""
    first = add(saver, name, 1, messages=["hello"], tags={"a", "b"})
    saver.put_writes(first, [("messages", f"a of {name}"), ("big", b"x" * 5000)], "task-2", "~__pregel_pull, a")
    saver.put_writes(first, [("messages", "b"), ("messages", "c")], "task-1", "~__pregel_pull, b")
    second = add(saver, name, 2, first, messages=["hello", "you"], big="y" * 9000)
    saver.put_writes(second, [("__error__", "it broke")], "task-3")
    add(saver, name, 3, second, messages=["hello", "you", "there"])
    add(saver, name, 4, first, messages=["hello", "branch"])
    add(saver, name, 1, None, "sub:task-1", inner=1.5)


def sqlite_saver(path: Path, threads: int) -> str:
    """A database of a SqliteSaver; its URL."""
    with closing(sqlite3.connect(path, check_same_thread=False, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode=MEMORY")
        connection.execute("PRAGMA synchronous=OFF")
        saver = SqliteSaver(connection)
        for number in range(threads):
            thread(saver, f"t{number}")
    return f"sqlite:///{path}"


def memory_saver() -> InMemorySaver:
    """A saver in memory, as a program names it."""
    saver = InMemorySaver()
    thread(saver, "t0")
    return saver
