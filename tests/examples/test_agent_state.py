"""An agent that plans, looks and answers, and whose state outlives its worker.

The state is one frozen value. Each step makes a new one and saves it; whichever worker comes next loads it and goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from distributed_state import DEFAULT, AgentState, Conflict, InvalidTransition, Message, StateMachine, ToolCall

PRICES = {"Oslo": 140, "Bergen": 95}


def plan(state: AgentState) -> AgentState:
    """Decide what to look up. A model would do this; the cities of the question do here."""
    cities = [city for city in PRICES if city in state.memory.goal]
    return state.with_memory(state.memory.plan(*cities)).to_executing()


def look_up(state: AgentState) -> AgentState:
    """Work on the next step of the plan, or look back when nothing is left."""
    pending = state.memory.pending_steps()
    if not pending:
        return state.to_reflecting()
    call = ToolCall(tool_name="price", arguments={"city": pending[0]}, result=PRICES[pending[0]], duration_ms=3.2)
    state = state.record_observation(f"What does {pending[0]} cost?", call)
    return state.with_memory(state.memory.complete(pending[0]).note(pending[0], call.result))


def conclude(state: AgentState) -> AgentState:
    """Answer from the notes; without any there is nothing to say."""
    if not state.memory.notes:
        return state.to_error("no city that I know a price of")
    return state.to_done(f"{min(state.memory.notes, key=state.memory.notes.__getitem__)} is cheapest.")


STEPS: dict[str, Callable[[AgentState], AgentState]] = {
    "planning": plan,
    "executing": look_up,
    "reflecting": conclude,
}


async def run(store: Any, text: str, session_id: str, *, steps: int = 20) -> AgentState:
    """Go on with a session, or begin it; one commit a step."""
    session = store.session(session_id)
    state = await session.load_state()
    if state is None:
        state = await session.save_state(AgentState.from_user_input(text, session_id))
    for _ in range(steps):
        if state.phase in DEFAULT.final:
            break
        state = await session.save_state(STEPS[state.phase](state))
    return state


async def test_an_agent_reaches_its_answer(store: Any) -> None:
    state = await run(store, "Oslo or Bergen?", "trip")
    assert state.final_answer == "Bergen is cheapest."
    assert state.memory.notes == PRICES
    assert [call.succeeded for call in state.memory.tool_calls] == [True, True]
    assert [message.role for message in await store.session("trip").messages()] == [
        "user", "tool", "tool", "assistant",
    ]  # fmt: skip
    assert (await run(store, "Anything?", "odd")).error_message == "no city that I know a price of"


@pytest.mark.replicas
async def test_another_worker_goes_on_where_one_stopped(opener: Any) -> None:
    first, second = await opener(), await opener()
    stopped = await run(first, "Oslo or Bergen?", "trip", steps=2)
    assert (stopped.phase, stopped.memory.pending_steps()) == ("executing", ["Bergen"])
    state = await run(second, "Oslo or Bergen?", "trip")
    assert state.final_answer == "Bergen is cheapest."
    assert len(state.memory.tool_calls) == 2, "no step was taken twice"


@pytest.mark.replicas
async def test_a_worker_that_is_behind_cannot_overwrite_the_one_ahead(opener: Any) -> None:
    first, second = (await opener()).session("trip"), (await opener()).session("trip")
    await first.save_state(AgentState.from_user_input("Oslo or Bergen?", "trip"))
    slow = await second.load_state()
    await first.save_state((await first.load_state()).to_executing())
    with pytest.raises(Conflict):
        await second.save_state(slow.to_error("gave up"))
    assert (await second.load_state()).phase == "executing"


async def test_the_same_conversation_takes_the_next_task(store: Any) -> None:
    state = await run(store, "Oslo or Bergen?", "trip")
    session = store.session("trip")
    await session.save_state(state.new_task("And only Oslo?"))
    state = await run(store, "", "trip")
    assert state.final_answer == "Oslo is cheapest."
    assert len(state.history) == 7


def test_a_phase_is_not_skipped() -> None:
    state = AgentState.from_user_input("Oslo or Bergen?")
    with pytest.raises(InvalidTransition, match="'reflect' is not allowed in phase 'planning'"):
        state.to_reflecting()
    over = state.to_done("Bergen")
    with pytest.raises(InvalidTransition):
        over.to_executing()


# Without an AgentState: the phase of a session alone, along a table of one's own.

REFUND = StateMachine(
    {
        ("requested", "approve"): "approved",
        ("requested", "reject"): "rejected",
        ("approved", "pay"): "paid",
    },
    initial="requested",
    name="refund",
)


async def test_a_refund_is_decided_once(store: Any) -> None:
    session = store.session("refund-7")
    note = Message(role="assistant", content="Your refund is on its way.")
    assert await session.transition("approve", machine=REFUND, set={"by": "alice"}, append=[note]) == "approved"
    with pytest.raises(InvalidTransition) as caught:
        await session.transition("reject", machine=REFUND, set={"by": "bob"})
    assert caught.value.phase == "approved"
    assert await session.get("by") == "alice"
    assert await session.transition("pay", machine=REFUND) in REFUND.final
