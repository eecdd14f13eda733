"""What the processes of CrewAI's fleet do until they are killed. Law: a line is printed when a flow has ended."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from contextlib import redirect_stdout
from typing import Any

from crewai.flow.flow import Flow, listen, start
from crewai.flow.persistence import FlowPersistence, SQLiteFlowPersistence, persist

from distributed_state import StateStore
from distributed_state.adapters.crewai import DistributedFlowPersistence

FLOWS = ("f0", "f1")


@persist()
class Notes(Flow):
    """A flow that notes something in its state, and then something else."""

    @start()
    def note(self) -> None:
        self.state[self.state["now"]] = 1
        time.sleep(random.random() * 0.01)

    @listen(note)
    def again(self) -> None:
        self.state[f"{self.state['now']}/again"] = 2


def _notes(persistence: FlowPersistence, me: str) -> None:
    for number in range(1_000_000):
        id, name = random.choice(FLOWS), f"{me}-{number}"
        with redirect_stdout(sys.stderr):  # CrewAI prints, too
            Notes(persistence=persistence, suppress_flow_events=True).kickoff(inputs={"id": id, "now": name})
        print(id, name, flush=True)  # noqa: T201 - to the test


def ours(me: str, settings: dict[str, Any], path: str) -> None:
    with StateStore.open(**settings) as store:
        _notes(DistributedFlowPersistence(store), me)


def theirs(me: str, settings: dict[str, Any], path: str) -> None:
    _notes(SQLiteFlowPersistence(path), me)


if __name__ == "__main__":
    globals()[sys.argv[1]](**json.loads(os.environ["ARGUMENTS"]))
