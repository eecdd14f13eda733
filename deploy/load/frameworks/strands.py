"""Beside Strands' own session manager of files: what a turn calls as a conversation grows, and lost turns."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

from strands.session import FileSessionManager
from strands.types.exceptions import SessionException
from strands.types.session import SessionAgent, SessionMessage

from deploy.load.rows import Row, at_most, interleaved
from distributed_state import StateStore
from distributed_state.adapters.strands import DistributedSessionManager

NAME, PEER, AGENT = "Strands", "FileSessionManager", "a1"
LENGTHS = (10, 100)
TURNS, WORKERS = 3, 8
Make = Callable[[str], Any]


def rows(redis: str, archive: str) -> list[Row]:
    """Ours on this Redis and this archive, theirs on files of a folder."""
    with (
        StateStore.open(redis, archive=archive, namespace="adapters") as store,
        tempfile.TemporaryDirectory() as folder,
    ):

        def ours(id: str) -> Any:
            return DistributedSessionManager(id, store)

        def theirs(id: str) -> Any:
            return FileSessionManager(id, folder)

        return [*_growing(ours, theirs), _race(ours, theirs)]


def _agent() -> SessionAgent:
    return SessionAgent(agent_id=AGENT, state={"n": 0}, conversation_manager_state={})


def _message(number: int) -> SessionMessage:
    """Half a kilobyte."""
    return SessionMessage.from_message({"role": "user", "content": [{"text": f"{number} " + "a" * 500}]}, number)


def _growing(ours: Make, theirs: Make) -> list[Row]:
    id = uuid4().hex
    pair = {"ours": ours(id), "theirs": theirs(id)}
    for manager in pair.values():
        manager.create_agent(id, _agent())
    stored = dict.fromkeys(pair, 0)
    found: list[Row] = []

    def adding(name: str) -> Callable[[], None]:
        def add() -> None:
            pair[name].create_message(id, AGENT, _message(stored[name]))
            stored[name] += 1

        return add

    for length in LENGTHS:
        for name in pair:
            while stored[name] < length:
                adding(name)()
        took = interleaved({name: (adding(name), 1) for name in pair})
        found.append(at_most(f"{NAME}: add a message at {length}", took["ours"], took["theirs"], 1.2, "us", PEER))
        calls = {name: (lambda manager=each: manager.list_messages(id, AGENT), 3) for name, each in pair.items()}  # type: ignore[misc] # bound now
        took = interleaved(calls)
        found.append(at_most(f"{NAME}: read {length} messages", took["ours"], took["theirs"], 1.2, "us", PEER))
    return found


def _race(ours: Make, theirs: Make) -> Row:
    """Workers that continue one conversation, each from what it read; a refused turn is repeated."""
    (mine, of_mine), (other, of_other) = _lost(ours), _lost(theirs)
    name = f"{NAME}: acknowledged messages that are lost, of {WORKERS} workers on one conversation"
    return Row(
        name, f"{mine} of {of_mine}", f"{PEER}: {other} of {of_other}", mine / max(other, 1), "= none", mine == 0
    )


def _lost(make: Make) -> tuple[int, int]:
    id = uuid4().hex
    make(id).create_agent(id, _agent())

    def work(worker: int) -> list[str]:
        acknowledged = []
        while len(acknowledged) < TURNS:
            manager = make(id)
            following = len(manager.list_messages(id, AGENT))
            said = _message(following)
            text = f"{worker}.{len(acknowledged)}"
            said.message["content"] = [{"text": text}]
            try:
                manager.create_message(id, AGENT, said)
            except SessionException:
                continue
            acknowledged.append(text)
        return acknowledged

    with ThreadPoolExecutor(WORKERS) as workers:
        sent = {text for each in workers.map(work, range(WORKERS)) for text in each}
    kept = {each.message["content"][0]["text"] for each in make(id).list_messages(id, AGENT)}
    return len(sent - kept), len(sent)
