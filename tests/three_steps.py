"""The steps of a workflow that looks at three things. Law: each look is a step, and its call's result names it."""

from __future__ import annotations

from typing import Any

from distributed_state import AgentState, ToolCall


def plan(state: AgentState, turn: Any) -> AgentState:
    """Three steps, whatever was asked."""
    return state.with_memory(state.memory.plan("a", "b", "c")).to_executing()


def work(state: AgentState, turn: Any) -> AgentState:
    """One of them."""
    pending = state.memory.pending_steps()
    if not pending:
        return state.to_reflecting()
    call = ToolCall(tool_name="look", arguments={"at": pending[0]}, result=turn.request_id)
    state = state.record_observation(f"I look at {pending[0]}", call)
    return state.with_memory(state.memory.complete(pending[0]))


def reflect(state: AgentState, turn: Any) -> AgentState:
    """The answer."""
    return state.to_done(f"saw {len(state.memory.tool_calls)}")


STEPS = {"planning": plan, "executing": work, "reflecting": reflect}
