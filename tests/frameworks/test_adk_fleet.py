"""Google ADK: four workers on the same sessions, killed in the middle of their turns; and what a peer makes of that."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from frameworks.adk_worker import EVENTS, SESSIONS
from google.adk.integrations.redis._redis_session_service import RedisSessionService, RedisSessionServiceConfig

from distributed_state.adapters.adk import DistributedSessionService

ROOT = Path(__file__).parents[2]
WHERE = {"app_name": "shop", "user_id": "ada"}


class Nursery:
    """The process that workers are forked from."""

    def __init__(self) -> None:
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-W", "ignore", str(ROOT / "tests/frameworks/adk_worker.py")]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path}, text=True
        )

    def worker(self, said: Path, **arguments: str) -> Worker:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"said": str(said), **arguments}) + "\n")
        self.process.stdin.flush()
        return Worker(said, int(self.process.stdout.readline()))

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate()


@dataclass
class Worker:
    """One of them; what it says is in a file that outlives it."""

    said: Path
    process: int

    def lines(self) -> list[str]:
        """What it said, without the line that it was at when it was killed."""
        return self.said.read_text().rpartition("\n")[0].splitlines() if self.said.exists() else []

    def busy(self) -> bool:
        """Whether it has done more than a turn."""
        return len(self.lines()) > EVENTS + 1

    def kill(self) -> None:
        os.kill(self.process, signal.SIGKILL)


def fleet(kind: str, opener: Any, folder: Path, kills: int) -> list[tuple[str, str]]:
    """Four workers, of which one after the other is killed and replaced; what they had acknowledged."""
    every: list[Worker] = []
    given = {"kind": kind, "url": opener.url, "archive": opener.archive, "namespace": opener.namespace}
    with Nursery() as nursery:

        def start() -> Worker:
            me = f"w{len(every)}"
            every.append(nursery.worker(folder / f"{kind}-{me}", me=me, **given))
            return every[-1]

        living = [start() for _ in range(4)]
        try:
            for _ in range(kills):
                victim = random.randrange(4)
                wait_for(living[victim].busy)
                time.sleep(random.random() * 0.01)  # somewhere in a turn
                living[victim].kill()
                living[victim] = start()
            for worker in living:
                wait_for(worker.busy)
        finally:
            for each in living:
                each.kill()
    said = [line for each in every for line in each.lines() if line != "ready"]
    return [tuple(line.split(" ")) for line in said]  # type: ignore[misc] # a session and a text


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


async def outcome(service: Any, acknowledged: list[tuple[str, str]]) -> dict[str, int]:
    """What is missing of what was acknowledged, and how many turns have another's events among theirs."""
    found = Counter[str]()
    for id in SESSIONS:
        session = await service.get_session(**WHERE, session_id=id)
        texts = [event.content.parts[0].text for event in session.events]
        mine = [text for place, text in acknowledged if place == id]
        found["events lost"] += len(set(mine) - set(texts))
        found["events twice"] += len(texts) - len(set(texts))
        found["keys lost"] += sum(f"k.{text}" not in session.state for text in mine)
        for place in ("user", "app"):
            found[f"{place} keys lost"] += sum(f"{place}:{text}" not in session.state for text in mine)
        turns = [text.partition(".")[0] for text in texts]
        found["turns mixed"] += len([*itertools.groupby(turns)]) - len(set(turns))
    return {name: count for name, count in found.items() if count}


@pytest.mark.only(face="asyncio", warm=("valkey", "redis"), cold="postgres")
@pytest.mark.replicas
@pytest.mark.timeout(180)
async def test_workers_that_are_killed_lose_nothing_and_mix_no_turns(opener: Any, tmp_path: Path) -> None:
    ours = DistributedSessionService(await opener())
    peer = RedisSessionService(RedisSessionServiceConfig(uri=opener.url, key_prefix=f"peer{opener.namespace}:"))
    for service in (ours, peer):
        for id in SESSIONS:
            await service.create_session(**WHERE, session_id=id)
    acknowledged = fleet("ours", opener, tmp_path, kills=8)
    assert len(acknowledged) > 50
    assert await outcome(ours, acknowledged) == {}
    lost = await outcome(peer, fleet("peer", opener, tmp_path, kills=2))
    await peer._get_redis().aclose()
    assert lost["user keys lost"] > 0
    assert lost["app keys lost"] > 0
    assert lost["turns mixed"] > 0, "four workers do meet: who does not look for stale sessions mixes turns"
