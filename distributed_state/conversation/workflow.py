"""A loop of steps that survives a crash of its worker. Law: a step is one commit; a committed step is not run again.

A step is a turn: it loads the agent's state, decides what comes next, and commits the new state. A worker that dies
loses its current step; the next worker that runs the session begins that step again.

Design: section 13.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any

from distributed_state.conversation import dataclass_state
from distributed_state.conversation.agent_state import AgentState, checked_kind, saved_of
from distributed_state.conversation.phases import DEFAULT
from distributed_state.conversation.turn import AsyncTurn
from distributed_state.errors import InvalidValue, NotFound
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.values.model import PHASE, log_fields

log = logging.getLogger(__name__)
Step = Callable[[Any, Any], Any]
_NEXT = "workflow.next"
_FIRST = "workflow.first"  # the number of the first step after the last input
_INPUT = "workflow.input"  # the input that the task of a dataclass began with


@dataclass(frozen=True, slots=True)
class Workflow:
    """An agent's steps by phase: `{"planning": plan, "executing": work, "reflecting": look_back}`.

    A step takes the AgentState and its turn, and returns the next state. Changes by tools through `turn.call`, and the
    step's own changes of the turn's fields, are committed with it. `turn.request_id` names the step, and is the same
    when the step is repeated after a crash: pass it to external side effects, which may happen again. A task that takes
    more than `max_steps` after its last input ends in phase "error"; a step longer than `step_timeout` seconds raises Fenced, and may be run
    again. `state` is the class of the states: AgentState, your subclass with fields of its own, or a dataclass with
    a field `phase`, a class method `from_user_input(text)`, and a method `to_error(message)`.
    """

    steps: Mapping[str, Step]
    max_steps: int = 20
    step_timeout: float | None = None
    state: type[Any] = AgentState

    def __post_init__(self) -> None:
        if not isinstance(self.steps, Mapping) or not self.steps:
            raise InvalidValue(f"steps are functions by phase, as {{'planning': plan}}, not {self.steps!r:.80}")
        for phase, step in self.steps.items():
            if phase not in DEFAULT.states - DEFAULT.final:
                allowed = ", ".join(sorted(DEFAULT.states - DEFAULT.final))
                raise InvalidValue(f"there is no step to do in phase {phase!r:.80}; phases with steps: {allowed}")
            if not callable(step):
                raise InvalidValue(f"the step of phase {phase!r} is a function, not {step!r:.80}")
        _check_kind(self.state)
        if type(self.max_steps) is not int or self.max_steps < 1:
            raise InvalidValue(f"max_steps is an int from 1 on, not {self.max_steps!r:.80}")
        seconds = self.step_timeout
        if seconds is not None and (
            isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0
        ):
            raise InvalidValue(f"step_timeout is in seconds and more than 0, not {self.step_timeout!r:.80}")


def _check_kind(kind: Any) -> None:
    if not dataclass_state.is_one(kind):
        checked_kind(kind)
    elif "phase" not in {each.name for each in fields(kind)} or not (
        hasattr(kind, "from_user_input") and hasattr(kind, "to_error")
    ):
        needs = "a field `phase`, a class method from_user_input(text) and a method to_error(message)"
        raise InvalidValue(f"{kind.__name__}: the state of a workflow is an AgentState, or a dataclass with {needs}")


def _phase(state: Any) -> Any:
    return state.phase.value if isinstance(state.phase, Enum) else state.phase


async def run(
    session: Any,
    workflow: Workflow,
    text: str | None,
    request_id: str | None,
    dressed: Callable[[Any], Any],
    **lease: Any,
) -> Any:
    """Run a session's task until it is done, has failed or waits for its user; return the state."""
    if not isinstance(workflow, Workflow):
        raise InvalidValue(f"run takes a Workflow, not {workflow!r:.80}")
    if text is not None and not isinstance(text, str):
        raise InvalidValue(f"the user's input is a str or None, not {text!r:.80}")
    state = await _begin(session, workflow.state, text, request_id, lease)
    while _unfinished(state, workflow):
        turn: AsyncTurn = session.turn(limit=workflow.step_timeout, slot="workflow step", **lease)
        turn.serve(request_id)
        async with turn:
            # Another worker that runs this session may have done the step meanwhile.
            saved = saved_of(state)
            if saved is None or (saved.epoch, saved.version) != (turn.epoch, turn.version):
                state = await _loaded(turn, workflow.state)
            if _unfinished(state, workflow):
                await _step(workflow, state, turn, session.ref.id, dressed)
        turn.end_if_stopped()
        state = turn.state or state
    return state


def _unfinished(state: Any, workflow: Workflow) -> bool:
    phase = _phase(state)
    return phase not in DEFAULT.final and (phase != "waiting_feedback" or phase in workflow.steps)


def is_unfinished(entry: CachedRecord) -> bool:
    """Whether the session has a workflow that has more steps to do."""
    phase = entry.fields.get(PHASE, b"").decode()
    return _NEXT.encode() in entry.fields and phase not in {*DEFAULT.final, "waiting_feedback", ""}


async def _begin(session: Any, kind: type[Any], text: str | None, request_id: str | None, lease: dict[str, Any]) -> Any:
    """Put the user's input into the state as a new task or an answer, unless the state has it already."""
    turn: AsyncTurn = session.turn(request_id=request_id, **lease)
    async with turn:
        state = await turn.load_state(kind)
        if turn.repeated or text is None:
            if state is None:
                raise NotFound(f"{session.ref.text[:200]}: there is no task to continue")
            return state
        take = _with_dataclass_input if dataclass_state.is_one(kind) else _with_input
        following = await take(turn, state, kind, session.ref.id, text)
        if following is None:
            assert state is not None
            about = session.ref.text
            log.info("%s: continues in phase %s", about[:200], _phase(state), extra=log_fields(about))
            return state
        turn[_FIRST] = turn.get(_NEXT, 0)
        await turn.save_state(following)
    assert turn.state is not None
    return turn.state


async def _with_input(
    turn: AsyncTurn, state: AgentState | None, kind: type[AgentState], session_id: str, text: str
) -> AgentState | None:
    """The state with the user's input; None if the task that this input began is already under way."""
    if state is None:
        return kind(session_id=session_id, history=tuple(await turn.messages())).new_task(text)
    if state.phase in (*DEFAULT.final, DEFAULT.initial):
        return state.new_task(text)
    if state.phase == "waiting_feedback":
        return state.with_messages({"role": "user", "content": text}).to_executing()
    if text == state.memory.goal:
        return None
    return state.with_messages({"role": "user", "content": text})


async def _with_dataclass_input(turn: AsyncTurn, state: Any, kind: type[Any], session_id: str, text: str) -> Any:
    """The state of a new task; None if the task that this input began is already under way."""
    if state is None or _phase(state) in (*DEFAULT.final, DEFAULT.initial):
        turn[_INPUT] = text
        begun = kind.from_user_input(text)
        has_id = "session_id" in {each.name for each in fields(kind)}
        return replace(begun, session_id=session_id) if has_id else begun
    if text == turn.get(_INPUT):
        return None
    way = f"give None to go on, or make {kind.__name__} a subclass of AgentState, which takes further inputs"
    raise InvalidValue(f"session:{session_id[:200]}: is in phase {_phase(state)!r:.80} of another task; {way}")


async def _loaded(turn: AsyncTurn, kind: type[Any]) -> Any:
    state = await turn.load_state(kind)
    if state is None:
        raise NotFound("the session's task was removed while it ran")
    return state


async def _step(
    workflow: Workflow, state: Any, turn: AsyncTurn, session_id: str, dressed: Callable[[Any], Any]
) -> None:
    number = turn.get(_NEXT, 0)
    phase = _phase(state)
    turn.request_id = f"{session_id}/{number}"
    turn[_NEXT] = number + 1
    if number - turn.get(_FIRST, 0) >= workflow.max_steps:
        await turn.save_state(state.to_error(f"no answer after {workflow.max_steps} steps"))
        return
    step = workflow.steps.get(phase)
    if step is None:
        raise InvalidValue(f"the workflow has no step for phase {phase!r:.80}, only for {', '.join(workflow.steps)}")
    if inspect.iscoroutinefunction(step) and not turn.suspends:
        raise InvalidValue(f"the step of phase {phase!r} is a coroutine function, for asyncio only")
    following = step(state, dressed(turn))
    if inspect.isawaitable(following):
        following = await following
    if not isinstance(following, workflow.state):
        wanted = workflow.state.__name__
        raise InvalidValue(f"the step of phase {phase!r} returned {following!r:.80}, not the next {wanted}")
    if _phase(following) not in DEFAULT.states:
        raise InvalidValue(f"the step of phase {phase!r} returned a state in phase {_phase(following)!r:.80}")
    if turn.pending or turn.phase != phase:
        raise InvalidValue("a step returns its messages and phase in an AgentState, not through its turn")
    await turn.save_state(following)
