"""An agent whose workers die: the environment's PLACE is that of the store as JSON, argv how many deaths are wanted.

Each session's first worker is a forked child that is killed before it executes its n-th line, counted over this
package and this file; n moves through a whole run. A second worker goes on. One line on stdout for each session.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from typing import Any

from dying import Lines, in_child

from distributed_state import AgentState, StateStore, ToolCall, Turn, Workflow, tool


@tool
def buy(state: dict[str, Any], user_state: dict[str, Any], item: str) -> int:
    """Buy one thing: count it for the session and for the user."""
    state["bought"] = [*state.get("bought", []), item]
    user_state["bought"] = user_state.get("bought", 0) + 1
    return len(state["bought"])


def plan(state: AgentState, turn: Turn) -> AgentState:
    """Two things."""
    return state.with_memory(state.memory.plan("bread", "milk")).to_executing()


def work(state: AgentState, turn: Turn) -> AgentState:
    """Buy the next."""
    pending = state.memory.pending_steps()
    if not pending:
        return state.to_reflecting()
    call: ToolCall = turn.call(buy, {"item": pending[0]})
    state = state.record_observation(f"I buy {pending[0]}", call)
    return state.with_memory(state.memory.complete(pending[0]))


def reflect(state: AgentState, turn: Turn) -> AgentState:
    """Say what was bought."""
    return state.to_done("bought " + ", ".join(turn["bought"]))


AGENT = Workflow({"planning": plan, "executing": work, "reflecting": reflect})


def run(place: dict[str, Any], session: str, last_line: int) -> int:
    """Run the agent and count the lines; be killed before the given one."""
    lines = Lines(__file__, last_line)
    with StateStore.open(**place) as store:
        sys.settrace(lines.trace)
        store.run(AGENT, "breakfast", session_id=session, user=session, request_id="r", ttl=0.3, wait=20)
        sys.settrace(None)
    return lines.count


def main() -> None:
    """Let a worker die at points spread over a whole run, each in a session of its own."""
    place, deaths = json.loads(os.environ["PLACE"]), int(sys.argv[1])
    _, lines = in_child(partial(run, place, "whole"))
    for death in range(deaths):
        session, line = f"s{death}", 1 + lines * death // deaths
        killed, _ = in_child(partial(run, place, session), line)
        in_child(partial(run, place, session))
        print(json.dumps([session, line, killed]), flush=True)  # noqa: T201 - the pipe to the test


if __name__ == "__main__":
    main()
