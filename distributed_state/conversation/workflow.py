"""A loop of steps that survives a crash of its worker. Law: a step is one commit; a committed step is not run again.

A step is a turn: it loads the agent's state, decides what comes next, and commits the new state. A worker that dies
loses its current step; the next worker that runs the session begins that step again.

As the handler of a session (`serve`), a workflow needs no caller: the commit of a step sets a wake that is due at once,
until the task has ended or waits.

Design: sections 13, 31.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any

from distributed_state.conversation import asks, dataclass_state, inbox
from distributed_state.conversation.agent_state import ERROR_MESSAGE, AgentState, checked_kind, saved_of
from distributed_state.conversation.phases import DEFAULT
from distributed_state.conversation.turn import AsyncTurn
from distributed_state.errors import InvalidValue, NotFound
from distributed_state.formats import text_of
from distributed_state.hot.cached_record import CachedRecord
from distributed_state.records.access import MESSAGES
from distributed_state.records.context import RecordContext
from distributed_state.results import Input
from distributed_state.tiers import commit as write_path
from distributed_state.tiers import read as read_path
from distributed_state.values.model import PHASE, Message, log_fields

log = logging.getLogger(__name__)
Step = Callable[[Any, Any], Any]
Call = Callable[[Step, Any], Awaitable[Any]]
"""Calls a step with a state, and returns what the step returns."""

SLOT = "workflow step"
"""The slot of the turns that are steps, and the name of the wake that lets a worker do the next one."""

_NEXT = "workflow.next"  # the number of the next step
_FIRST = "workflow.first"  # the number of the first step after the last input
_INPUT = "workflow.input"  # the input that the task of a dataclass began with
_FAILED = "workflow.failed"  # the phase of the step that ended the task in phase "error"


@dataclass(frozen=True, slots=True)
class Workflow:
    """An agent's steps by phase: `{"planning": plan, "executing": work, "reflecting": look_back}`.

    A step takes the AgentState and its turn, and returns the next state. Changes by tools through `turn.call`, and the
    step's own changes of the turn's fields, are committed with it. `turn.request_id` names the step, and is the same
    when the step is repeated after a crash: pass it to external side effects, which may happen again. A task that takes
    more than `max_steps` steps after its last input ends in phase "error", and `session.retry()` lets it go on; a step
    longer than `step_timeout` seconds raises Fenced, and may be run again. `state` is the class of the states:
    AgentState, your subclass with fields of its own, or a dataclass with a field `phase`, a class method
    `from_user_input(text)`, and a method `to_error(message)`.
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
        turn: AsyncTurn = session.turn(limit=workflow.step_timeout, slot=SLOT, **lease)
        turn.serve(request_id)
        async with turn:
            # Another worker that runs this session may have done the step meanwhile.
            saved = saved_of(state)
            if saved is None or (saved.epoch, saved.version) != (turn.epoch, turn.version):
                state = await _loaded(turn, workflow.state)
            if _unfinished(state, workflow):
                following = await _step(workflow, state, turn, session.ref.id, _call_of(turn, dressed))
                await turn.save_state(following)
        turn.end_if_stopped()
        state = turn.state or state
    return state


def _call_of(turn: AsyncTurn, dressed: Callable[[Any], Any]) -> Call:
    async def call(step: Step, state: Any) -> Any:
        if inspect.iscoroutinefunction(step) and not turn.suspends:
            raise InvalidValue(f"the step of phase {_phase(state)!r} is a coroutine function, for asyncio only")
        following = step(state, dressed(turn))
        return await following if inspect.isawaitable(following) else following

    return call


async def serve(workflow: Workflow, turn: AsyncTurn, session_id: str, call: Call) -> None:
    """Give the inputs that wait to the session's task, and do its next step, in one turn of a worker.

    While the task has steps to do, the commit sets a wake that is due at once.
    """
    state = await turn.load_state(workflow.state)
    inputs = [each for each in turn.inbox if each.wake != SLOT]
    if dataclass_state.is_one(workflow.state):
        # It takes no further input: those that came meanwhile wait for the end of the task.
        inputs = [] if state is not None and _under_way(state, workflow) else inputs[:1]
    numbers = [each.number for each in turn.inbox if each.wake == SLOT or each in inputs]
    if numbers:
        turn.take(*numbers)
    for each in inputs:
        state = await _given(turn, state, workflow.state, session_id, _message_of(each))
    if inputs:
        turn[_FIRST] = turn.get(_NEXT, 0)
    if state is None:
        return
    if _unfinished(state, workflow):
        state = await _step(workflow, state, turn, session_id, call)
    elif not inputs:
        return
    await turn.save_state(state)
    if _unfinished(state, workflow) and not turn.stopping:
        turn.wake(after=0, name=SLOT)


def _message_of(input: Input) -> Message:
    """The message of an input. That of a wake names the wake, as that of an answer names its question."""
    if input.wake is None:
        return input.message
    return input.message.model_copy(update={"metadata": {"wake": input.wake}})


def _unfinished(state: Any, workflow: Workflow) -> bool:
    phase = _phase(state)
    return phase not in DEFAULT.final and (phase != asks.PHASE or phase in workflow.steps)


def _under_way(state: Any, workflow: Workflow) -> bool:
    return _unfinished(state, workflow) and _phase(state) != DEFAULT.initial


def is_unfinished(entry: CachedRecord) -> bool:
    """Whether the session has a workflow that has more steps to do."""
    phase = _stored_phase(entry)
    return _NEXT.encode() in entry.fields and phase not in {*DEFAULT.final, asks.PHASE, ""}


def _stored_phase(entry: CachedRecord) -> str:
    return "" if entry.deleted else entry.fields.get(PHASE, b"").decode()


async def _begin(session: Any, kind: type[Any], text: str | None, request_id: str | None, lease: dict[str, Any]) -> Any:
    """Put the user's input into the state as a new task or an answer, unless the state has it already."""
    turn: AsyncTurn = session.turn(request_id=request_id, **lease)
    async with turn:
        state = await turn.load_state(kind)
        if state is None and (turn.repeated or text is None):
            raise NotFound(f"{session.ref.text[:200]}: there is no task to continue")
        if turn.repeated:
            return state
        given: list[Message] = []
        if text is None:
            if isinstance(state, AgentState) and _phase(state) == asks.PHASE and turn.inbox:
                given = [_message_of(each) for each in turn.take()]  # answers
        elif state is None or text != _input_of(turn, state):
            given = [Message(role="user", content=text)]
        else:
            about = session.ref.text
            log.info("%s: continues in phase %s", about[:200], _phase(state), extra=log_fields(about))
        if not given:
            return state
        for each in given:
            state = await _given(turn, state, kind, session.ref.id, each)
        turn[_FIRST] = turn.get(_NEXT, 0)
        await turn.save_state(state)
    return turn.state


def _input_of(turn: AsyncTurn, state: Any) -> str | None:
    """The input that began the task which is under way; None if none is."""
    if _phase(state) in (*DEFAULT.final, DEFAULT.initial):
        return None
    if not isinstance(state, AgentState):
        found: str | None = turn.get(_INPUT)
        return found
    return None if _phase(state) == asks.PHASE else state.memory.goal


async def _given(turn: AsyncTurn, state: Any, kind: type[Any], session_id: str, message: Message) -> Any:
    """The state with a further input: of a new task, an answer, or a message for the task that is under way."""
    text = text_of(message.content)
    text = text if isinstance(text, str) else ""
    begins = state is None or _phase(state) in (*DEFAULT.final, DEFAULT.initial)
    if dataclass_state.is_one(kind):
        if begins:
            turn[_INPUT] = text
            begun = kind.from_user_input(text)
            has_id = "session_id" in {each.name for each in fields(kind)}
            return replace(begun, session_id=session_id) if has_id else begun
        way = f"give None to go on, or make {kind.__name__} a subclass of AgentState, which takes further inputs"
        raise InvalidValue(f"session:{session_id[:200]}: is in phase {_phase(state)!r:.80} of another task; {way}")
    if begins:
        if state is None:
            state = kind(session_id=session_id, history=tuple(await turn.messages()))
        begun = state.new_task(text)
        if message.to_dict() == {"role": "user", "content": text}:
            return begun
        return begun.model_copy(update={"history": (*begun.history[:-1], message)})  # with its metadata
    return (state.to_executing() if _phase(state) == asks.PHASE else state).with_messages(message)


async def _loaded(turn: AsyncTurn, kind: type[Any]) -> Any:
    state = await turn.load_state(kind)
    if state is None:
        raise NotFound("the session's task was removed while it ran")
    return state


async def _step(workflow: Workflow, state: Any, turn: AsyncTurn, session_id: str, call: Call) -> Any:
    """Do a step; return the next state, which is not saved yet."""
    number, phase, before = turn.get(_NEXT, 0), _phase(state), turn.phase
    turn.request_id = f"{session_id}/{number}"
    turn[_NEXT] = number + 1
    if number - turn.get(_FIRST, 0) >= workflow.max_steps:
        following = state.to_error(f"no answer after {workflow.max_steps} steps")
    else:
        step = workflow.steps.get(phase)
        if step is None:
            known = ", ".join(workflow.steps)
            raise InvalidValue(f"the workflow has no step for phase {phase!r:.80}, only for {known}")
        following = await call(step, state)
    if not isinstance(following, workflow.state):
        wanted = workflow.state.__name__
        raise InvalidValue(f"the step of phase {phase!r} returned {following!r:.80}, not the next {wanted}")
    if _phase(following) not in DEFAULT.states:
        raise InvalidValue(f"the step of phase {phase!r} returned a state in phase {_phase(following)!r:.80}")
    asked = turn.phase == _phase(following) == asks.PHASE
    if turn.pending or (turn.phase != before and not asked):
        raise InvalidValue("a step returns its messages and phase in an AgentState, not through its turn")
    if _phase(following) == "error":
        turn[_FAILED] = phase
    return following


async def retry(context: RecordContext) -> bool:
    """Let a session go on whose handler failed, or whose workflow failed or was stopped: see `session.retry`."""
    context.allow("write", MESSAGES)

    async def once() -> bool:
        entry = await read_path.read(context.tiers, context.keys, fresh=True)
        schedule = inbox.schedule_of(entry)
        if schedule is not None and schedule.failed:
            await inbox.forget_failures(context, schedule.handler)
            return True
        if schedule is None and (entry.deleted or _NEXT.encode() not in entry.fields):
            raise NotFound(f"{context.text[:200]}: it has no handler and no workflow")
        changes = context.changes()
        if _stored_phase(entry) == "error" and _FAILED.encode() in entry.fields:
            changes.phase(entry.value(_FAILED, None))
            changes.set(_FIRST, entry.value(_NEXT, 0))
            if ERROR_MESSAGE.encode() in entry.fields:
                changes.delete(ERROR_MESSAGE)
        elif schedule is None or schedule.due is not None or not is_unfinished(entry):
            return False
        if schedule is not None:
            inbox.Later("", 0.0, None, None).add(changes, SLOT)
        draft = changes.draft("transition", expected=entry.version, epoch=entry.epoch)
        await context.commit(draft if schedule is None else draft.scheduled(schedule.handler))
        return True

    return await write_path.until_no_conflict(context.tiers, once)
