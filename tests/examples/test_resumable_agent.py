"""An agent with a plan and a tool that goes on where its worker died, on any other worker.

The worker dies by an exception here; `tests/faults/test_dying_agents.py` kills processes between any two lines.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import pytest

from distributed_state import AgentState, Workflow, tool

PRICES = {"Oslo": 140, "Bergen": 95, "Paris": 80}
mails_sent: list[str] = []


@tool
def look_up(state: MutableMapping[str, Any], city: str) -> int:
    """Find the price of a flight."""
    state["looked_up"] = state.get("looked_up", 0) + 1
    return PRICES[city]


class PowerCut(Exception):
    """The worker is gone."""


def agent_of(store: Any, cuts: set[str]) -> Workflow:
    """The agent; in a step whose name is in `cuts`, its worker dies after all has been done but the commit."""

    def cut(turn: Any) -> None:
        if turn.request_id in cuts:
            cuts.remove(turn.request_id)
            raise PowerCut

    async def plan(state: AgentState, turn: Any) -> AgentState:
        cities = [city for city in PRICES if city in state.memory.goal]
        cut(turn)
        return state.with_memory(state.memory.plan(*cities)).to_executing()

    async def work(state: AgentState, turn: Any) -> AgentState:
        pending = state.memory.pending_steps()
        if not pending:
            return state.to_reflecting()
        call = await turn.call(look_up, {"city": pending[0]}, call_id="call_0")
        # Outside the store: may happen again, so the step's name goes along and the other side can tell.
        mails_sent.append(turn.request_id)
        cut(turn)
        state = state.record_observation(f"What does {pending[0]} cost?", call)
        return state.with_memory(state.memory.complete(pending[0]).note(pending[0], call.result))

    async def reflect(state: AgentState, turn: Any) -> AgentState:
        cut(turn)
        return state.to_done(min(state.memory.notes, key=state.memory.notes.__getitem__))

    return Workflow({"planning": plan, "executing": work, "reflecting": reflect}, max_steps=10)


@pytest.mark.only(api="asyncio")
async def test_a_worker_that_dies_loses_at_most_its_step(store: Any) -> None:
    mails_sent.clear()
    agent = agent_of(store, {"trip/0", "trip/2", "trip/4"})
    for _ in range(3):
        with pytest.raises(PowerCut):
            await store.run(agent, "Oslo or Bergen?", session_id="trip", request_id="r1")
    state = await store.run(agent, "Oslo or Bergen?", session_id="trip", request_id="r1")
    assert state.final_answer == "Bergen"
    assert [call.result for call in state.memory.tool_calls] == [140, 95]
    assert await store.session("trip").get("looked_up") == 2, "the tool of the step that was cut off counts once"
    assert mails_sent == ["trip/1", "trip/2", "trip/2"], "what is outside happened twice, under one name"
    again = await store.run(agent, "Oslo or Bergen?", session_id="trip", request_id="r1")
    assert again == state, "a request that was answered begins nothing"


@pytest.mark.only(api="asyncio")
async def test_the_conversation_goes_on_with_the_next_task(store: Any) -> None:
    agent = agent_of(store, set())
    await store.run(agent, "Oslo or Bergen?", session_id="trip")
    state = await store.run(agent, "And Paris?", session_id="trip")
    assert state.final_answer == "Paris"
    assert [message.content for message in state.history if message.role == "user"] == ["Oslo or Bergen?", "And Paris?"]
