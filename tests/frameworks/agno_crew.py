"""What the processes of Agno's fleet do until they are killed. Law: a line is printed when a change is acknowledged."""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import time
from typing import Any

from agno.agent import Agent
from agno.db.redis import RedisDb
from agno.run.agent import RunOutput

from distributed_state import StateStore
from distributed_state.adapters.agno import DistributedDb

SESSIONS = ("s0", "s1")


def peer(settings: dict[str, Any]) -> RedisDb:
    """Agno's own database, on the same server."""
    return RedisDb(db_url=settings["url"], db_prefix=f"peer{settings['namespace']}")


def _changes(db: Any, me: str) -> None:
    """Set a key as Agno's agents do, and store a run."""
    agent = Agent(id="a1", db=db)
    for number in itertools.count():
        id, name = random.choice(SESSIONS), f"{me}-{number}"
        agent.update_session_state({name: number}, session_id=id)
        print(id, name, flush=True)  # noqa: T201 - the pipe to the test
        db.upsert_run(RunOutput(run_id=name, session_id=id, agent_id="a1", content=name), id, "ada", run_index=number)
        print(id, f"run:{name}", flush=True)  # noqa: T201
        time.sleep(random.random() * 0.01)


def ours(me: str, settings: dict[str, Any]) -> None:
    """Changes of our sessions."""
    with StateStore.open(**settings) as store:
        _changes(DistributedDb(store), me)


def theirs(me: str, settings: dict[str, Any]) -> None:
    """The same on Agno's own Redis database."""
    _changes(peer(settings), me)


if __name__ == "__main__":
    globals()[sys.argv[1]](**json.loads(os.environ["ARGUMENTS"]))
