"""Workers that change Agno's sessions until they are killed. Law: a line on stdout for each change acknowledged."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import Any

from agno.agent import Agent
from agno.db.redis import RedisDb
from agno.run.agent import RunOutput
from frameworks.nursery import say, serve

from distributed_state import StateStore
from distributed_state.adapters.agno import DistributedDb

SESSIONS = ("s0", "s1")


async def work(db: Any, me: str) -> None:
    """Set a key as Agno's agents do, and store a run."""
    agent = Agent(id="a1", db=db)
    say("ready")
    for number in itertools.count():
        id, name = SESSIONS[random.randrange(len(SESSIONS))], f"{me}-{number}"
        agent.update_session_state({name: number}, session_id=id)
        say(f"{id} {name}")
        db.upsert_run(RunOutput(run_id=name, session_id=id, agent_id="a1", content=name), id, "ada", run_index=number)
        say(f"{id} run:{name}")
        await asyncio.sleep(random.random() * 0.01)


async def main(kind: str, me: str, url: str, archive: str, namespace: str) -> None:
    if kind == "ours":
        with StateStore.open(url, archive=archive, namespace=namespace) as store:
            await work(DistributedDb(store), me)
    else:
        await work(RedisDb(db_url=url, db_prefix=f"peer{namespace}"), me)


if __name__ == "__main__":
    serve(main)
