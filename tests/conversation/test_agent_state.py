"""An agent's state as a value: it never changes in place, and JSON brings it back as it was."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from enum import Enum
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from distributed_state import (
    DEFAULT,
    AgentPhase,
    AgentState,
    InvalidTransition,
    InvalidValue,
    Message,
    Role,
    TooLarge,
    ToolCall,
    WorkingMemory,
    formats,
)

pytestmark = pytest.mark.unit

always = settings(derandomize=True, deadline=None, database=None)
texts = st.text(max_size=20)
times = st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | times | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(texts, values, max_size=3)
messages = st.builds(
    lambda role, rest: Message(role=role, **rest),
    st.sampled_from([role.value for role in Role]),
    st.fixed_dictionaries(
        {},
        optional={
            "content": st.none() | texts | st.lists(values, max_size=3),
            "name": st.none() | texts,
            "tool_calls": st.none() | st.lists(objects, max_size=2),
            "tool_call_id": texts,
            "timestamp": times,
            "metadata": objects,
            "refusal": values,
        },
    ),
)
calls = st.builds(
    ToolCall,
    tool_name=st.text(min_size=1, max_size=9),
    arguments=objects,
    result=values,
    error=st.none() | texts,
    duration_ms=st.none() | times,
)
steps = st.lists(texts, max_size=4)
memories = st.builds(
    WorkingMemory,
    goal=texts,
    plan_steps=steps,
    completed_steps=steps,
    notes=objects,
    tool_calls=st.lists(calls, max_size=3),
)
states = st.builds(
    AgentState,
    phase=st.text(min_size=1, max_size=9),
    history=st.lists(messages, max_size=4),
    memory=memories,
    iteration=st.integers(0, 10**6),
    final_answer=st.none() | texts,
    error_message=st.none() | texts,
    created_at=times,
)


@always
@given(states)
def test_json_brings_a_state_back_as_it_was(state: AgentState) -> None:
    for again in (
        AgentState.model_validate_json(state.model_dump_json()),
        AgentState.model_validate(json.loads(json.dumps(state.model_dump(mode="json")))),
        pickle.loads(pickle.dumps(state)),
        copy.deepcopy(state),
    ):
        assert again == state
        # Equal is not all: True equals 1, and a field that is null is not one that is absent.
        assert repr(again) == repr(state)
        assert [each.to_dict() for each in again.history] == [each.to_dict() for each in state.history]


@always
@given(memories, calls, texts, values)
def test_a_memory_changes_in_place(memory: WorkingMemory, call: ToolCall, key: str, value: Any) -> None:
    notes, calls = {**memory.notes}, [*memory.tool_calls]
    assert memory.note(key, value) is memory.record_tool_call(call) is memory.plan("a", "b") is memory
    assert memory.notes == {**notes, key: value}
    assert memory.tool_calls == [*calls, call]
    assert memory.pending_steps() == ["a", "b"]
    memory.complete("b")
    assert (memory.completed_steps, memory.pending_steps()) == (["b"], ["a"])


def test_a_time_may_be_given_as_a_datetime() -> None:
    time = datetime(2026, 5, 1, 9, 30, 0, 250_000, tzinfo=timezone(timedelta(hours=2)))
    for made in (
        Message(role="user", content="hi", timestamp=time),  # type: ignore[arg-type]
        ToolCall(tool_name="look", timestamp=time),  # type: ignore[arg-type]
    ):
        assert type(made.timestamp) is float
        assert made.timestamp == time.timestamp()
    assert AgentState(created_at=time).created_at == time.timestamp()  # type: ignore[arg-type]
    assert json.loads(Message(role="user", timestamp=time).model_dump_json())["timestamp"] == time.timestamp()  # type: ignore[arg-type]
    for kind, fields in ((Message, {"role": "user"}), (ToolCall, {"tool_name": "look"})):
        with pytest.raises(ValidationError, match="time zone"):
            kind(**fields, timestamp=time.replace(tzinfo=None))


def test_states_share_the_memory_that_they_were_made_with() -> None:
    state = AgentState.from_user_input("fly")
    moved = state.to_executing()
    state.memory.note("city", "Oslo")
    seen = moved.record_observation("so", ToolCall(tool_name="f"))
    assert state.memory is moved.memory is seen.memory
    assert (seen.memory.notes, len(seen.memory.tool_calls)) == ({"city": "Oslo"}, 1)
    with pytest.raises(InvalidTransition):
        seen.to_done("x").record_observation("so", ToolCall(tool_name="f"))
    assert len(seen.memory.tool_calls) == 1, "a refused observation changes nothing"
    assert seen.to_done("x").new_task("stay").memory is not seen.memory
    assert seen.memory.current_goal == "fly"


class Speaker(str, Enum):  # noqa: UP042 - as many programs still define it
    """A reader's own enum of roles."""

    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


def test_a_reader_that_was_written_for_plain_messages_reads_the_history() -> None:
    call = ToolCall(tool_name="look", arguments={"at": "a"}, result="blue", call_id="c1")
    state = AgentState.from_user_input("what colour?").to_executing().record_observation("I look", call)
    request: list[dict[str, Any]] = []
    for message in state.to_done("blue").history:
        extra = {"tool_call_id": message.metadata.get("call_id")} if message.role == Speaker.TOOL else {}
        request.append({"role": message.role, "content": message.content, **extra})
        assert message.metadata.get("never", "given") == "given"
    assert [each["role"] for each in request] == [Speaker.USER, Speaker.TOOL, Speaker.ASSISTANT]
    assert request[1] == {"role": "tool", "content": "blue", "tool_call_id": "c1"}
    assert (call.to_message().metadata or {})["call_id"] == "c1"
    assert "metadata" not in Message(role="user", content="hi").to_dict(), "what was not given is not stored"


def test_roles_are_those_of_a_message() -> None:
    of_a_chat, none = get_args(Message.model_fields["role"].annotation)
    assert [role.value for role in Role] == list(get_args(of_a_chat))
    assert none is type(None)
    assert Message(role=Role.USER, content="hi").to_dict() == {"role": "user", "content": "hi"}
    with pytest.raises(ValueError, match="robot"):
        Role("robot")


# Tool calls


def test_every_tool_call_has_an_id_and_a_time_of_its_own() -> None:
    made = [ToolCall(tool_name="search") for _ in range(100)]
    assert len({call.call_id for call in made}) == 100
    assert 0 <= made[-1].timestamp - made[0].timestamp < 10
    assert made[0].timestamp > 1.7e9


@pytest.mark.parametrize(
    ("fields", "observation"),
    [
        ({"result": "12 degrees"}, "12 degrees"),
        ({"result": ""}, ""),
        ({"result": {"t": [12, None]}}, '{"t":[12,null]}'),
        ({"result": False}, "false"),
        ({"result": 2**70}, str(2**70)),
        ({}, "weather returned nothing"),
        ({"error": "timeout"}, "[Tool Error] weather failed: timeout"),
        ({"error": "", "result": "half"}, "[Tool Error] weather failed: "),
    ],
)
def test_the_model_is_told_what_came_of_a_call(fields: dict[str, Any], observation: str) -> None:
    call = ToolCall(tool_name="weather", **fields)
    assert call.succeeded is ("error" not in fields)
    assert call.to_observation() == observation


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tool_name": ""},
        {"tool_name": "f", "call_id": ""},
        {"tool_name": "f", "arguments": {"a": {1, 2}}},
        {"tool_name": "f", "arguments": {1: 2}},
        {"tool_name": "f", "arguments": ["a"]},
        {"tool_name": "f", "result": float("nan")},
        {"tool_name": "f", "result": (1, 2)},
        {"tool_name": "f", "result": object()},
        {"tool_name": "f", "duration_ms": float("inf")},
        {"tool_name": "f", "outcome": 1},
    ],
)
def test_a_tool_call_that_json_cannot_hold_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ToolCall(**fields)


# Working memory


def test_steps_are_completed_in_any_order_and_each_once() -> None:
    memory = WorkingMemory().plan("search", "compare", "search", "book")
    memory = memory.complete("compare").complete("search")
    assert memory.pending_steps() == ["search", "book"]
    memory = memory.complete("search").complete("book")
    assert memory.pending_steps() == []
    with pytest.raises(InvalidValue, match="'search' is not pending; pending are \\[\\]"):
        memory.complete("search")
    with pytest.raises(InvalidValue, match="'fly'"):
        WorkingMemory().plan("walk").complete("fly")


@pytest.mark.parametrize(
    "change",
    [
        lambda memory: memory.note(7, "x"),
        lambda memory: memory.note("k", {1, 2}),
        lambda memory: memory.note("k", float("nan")),
        lambda memory: memory.record_tool_call({"tool_name": "f"}),
        lambda memory: memory.plan("a", 2),
        lambda memory: memory.complete(["a"]),
    ],
)
def test_a_memory_takes_nothing_that_it_could_not_give_back(change: Callable[[Any], Any]) -> None:
    with pytest.raises(InvalidValue):
        change(WorkingMemory())


# Transitions


def in_phase(phase: str) -> AgentState:
    return AgentState(session_id="s", phase=phase)


BUT_DONE = {"idle", "planning", "executing", "reflecting", "waiting_feedback", "error"}
MOVES: dict[str, tuple[Callable[[AgentState], AgentState], set[str], str]] = {
    "new_task": (lambda state: state.new_task("go"), {"idle", "done", "error"}, "planning"),
    "to_executing": (AgentState.to_executing, {"planning", "reflecting", "waiting_feedback"}, "executing"),
    "to_reflecting": (AgentState.to_reflecting, {"executing"}, "reflecting"),
    "to_planning": (AgentState.to_planning, {"executing", "reflecting", "waiting_feedback"}, "planning"),
    "to_waiting": (AgentState.to_waiting, {"planning", "executing", "reflecting"}, "waiting_feedback"),
    "to_done": (lambda state: state.to_done("42"), BUT_DONE, "done"),
    "to_error": (lambda state: state.to_error("no"), BUT_DONE, "error"),
    "record_observation": (
        lambda state: state.record_observation("so", ToolCall(tool_name="f")),
        {"executing"},
        "executing",
    ),
}
PHASES = ("idle", "planning", "executing", "reflecting", "waiting_feedback", "done", "error", "negotiating")


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("phase", PHASES)
def test_a_transition_follows_the_table_or_raises(move: str, phase: str) -> None:
    change, allowed, target = MOVES[move]
    state = in_phase(phase)
    before = state.model_dump_json(exclude={"memory"})
    if phase in allowed:
        moved = change(state)
        assert moved.phase == target
        assert moved.iteration == (0 if move == "new_task" else 1)
        assert moved.updated_at >= state.updated_at
        assert moved.created_at == state.created_at
    else:
        with pytest.raises(InvalidTransition) as caught:
            change(state)
        assert caught.value.phase == phase
        possible = str(caught.value).partition("possible methods of the state: ")[2].split(", ")
        assert set(possible) == ({each for each, (_, some, _) in MOVES.items() if phase in some} or {"none"})
        assert isinstance(caught.value, ValueError)
    assert state.model_dump_json(exclude={"memory"}) == before


def test_the_phases_have_names_that_are_equal_to_what_is_stored() -> None:
    assert set(AgentPhase) == DEFAULT.states
    assert AgentState().phase == AgentPhase.IDLE
    state = AgentState(phase=AgentPhase.EXECUTING)
    assert state == AgentState(**{**state.__dict__, "phase": "executing"})
    assert state.to_done("42").phase in (AgentPhase.DONE, AgentPhase.ERROR)
    assert AgentState.model_validate_json(state.model_dump_json()) == state
    assert type(state.phase) is str


def test_a_goal_may_be_called_current_goal() -> None:
    memory = WorkingMemory(current_goal="fly")  # type: ignore[call-arg]  # the name that others give it
    assert (memory.goal, memory.current_goal) == ("fly", "fly")
    assert memory == WorkingMemory(goal="fly")
    assert "current_goal" not in memory.model_dump()
    assert AgentState.from_user_input("fly").memory.current_goal == "fly"
    with pytest.raises(ValidationError):
        WorkingMemory(goal="fly", current_goal="stay")  # type: ignore[call-arg]


def test_a_state_begins_with_what_the_user_said() -> None:
    assert AgentState.from_user_input(user_input="hi").memory.goal == "hi"
    state = AgentState.from_user_input("Weather in Oslo?")
    assert state.session_id != AgentState.from_user_input("Weather in Oslo?").session_id
    assert (state.phase, state.iteration, state.memory.goal) == ("planning", 0, "Weather in Oslo?")
    assert [(each.role, each.content) for each in state.history] == [("user", "Weather in Oslo?")]
    assert AgentState.from_user_input("hi", session_id="s").session_id == "s"


def test_an_answer_is_the_last_message_and_an_error_is_none() -> None:
    state = AgentState.from_user_input("6 * 7?").to_executing()
    done = state.to_done("42")
    assert (done.final_answer, done.history[-1].role, done.history[-1].content) == ("42", "assistant", "42")
    failed = state.to_error("no calculator")
    assert (failed.error_message, failed.final_answer, failed.history) == ("no calculator", None, state.history)


def test_the_next_task_starts_with_an_empty_memory_and_the_whole_history() -> None:
    state = AgentState.from_user_input("one").to_executing().record_observation("", ToolCall(tool_name="f"))
    state = state.to_done("1").new_task("two")
    assert state.memory == WorkingMemory(goal="two")
    assert (state.phase, state.iteration, state.final_answer) == ("planning", 0, None)
    assert [each.role for each in state.history] == ["user", "tool", "assistant", "user"]


def test_the_task_after_a_failed_one_keeps_the_error_in_the_history() -> None:
    failed = AgentState.from_user_input("one").to_executing().to_error("no calculator")
    state = failed.new_task("two")
    assert (state.phase, state.error_message, state.memory) == ("planning", None, WorkingMemory(goal="two"))
    assert [(each.role, each.content) for each in state.history] == [
        ("user", "one"),
        ("assistant", "[Error] no calculator"),
        ("user", "two"),
    ]
    answered = failed.to_done("42").new_task("two")
    assert [each.content for each in answered.history] == ["one", "42", "two"]


@pytest.mark.parametrize("thought", ["I should look it up", ""])
def test_an_observation_is_one_message_that_keeps_its_call(thought: str) -> None:
    call = ToolCall(tool_name="weather", arguments={"city": "Zürich", "days": 2}, result={"t": 3}, duration_ms=12.5)
    state = AgentState.from_user_input("hi").to_executing().record_observation(thought, call)
    assert [message.role for message in state.history] == ["user", "tool"]
    told = state.history[-1]
    assert (told.content, told.tool_call_id) == ('{"t":3}', call.call_id)
    assert (told.metadata["call_id"], told.metadata["tool_name"]) == (call.call_id, "weather")
    assert state.memory.tool_calls == [call]
    for orphans in ("repair", "refuse"):
        asked, answered = formats.to_openai(state.history, orphans=orphans)[1:]
        assert (asked["role"], asked["content"]) == ("assistant", thought or None)
        [request] = asked["tool_calls"]
        assert request["id"] == answered["tool_call_id"] == call.call_id
        assert (request["type"], request["function"]["name"]) == ("function", "weather")
        assert json.loads(request["function"]["arguments"]) == call.arguments


def test_an_observation_of_a_call_in_the_history_answers_it() -> None:
    call = ToolCall(tool_name="weather", result="rain")
    state = AgentState.from_user_input("hi").to_executing()
    state = state.with_messages({"role": "assistant", "content": "so", "tool_calls": [call.to_request()]})
    sent = formats.to_openai(state.record_observation("so", call).history)
    assert [message["role"] for message in sent] == ["user", "assistant", "tool"]


def test_a_model_api_takes_the_history() -> None:
    """As the types of the OpenAI client see it."""
    types = pytest.importorskip("openai.types.chat")
    from pydantic import TypeAdapter

    state = AgentState.from_user_input("hi").to_executing()
    for thought in ("so", ""):
        state = state.record_observation(thought, ToolCall(tool_name="f", arguments={"a": 1}, error="away"))
    kinds = {
        "user": types.ChatCompletionUserMessageParam,
        "assistant": types.ChatCompletionAssistantMessageParam,
        "tool": types.ChatCompletionToolMessageParam,
    }
    for message in formats.to_openai(state.to_done("bye").history):
        TypeAdapter(kinds[message["role"]]).validate_python(message, strict=False)


@pytest.mark.parametrize(
    "make",
    [
        lambda: AgentState.from_user_input(7),  # type: ignore[arg-type]
        lambda: AgentState.from_user_input("hi", session_id=""),
        lambda: AgentState.from_user_input("hi", session_id=7),  # type: ignore[arg-type]
        lambda: in_phase("planning").to_done(None),  # type: ignore[arg-type]
        lambda: in_phase("planning").to_error(OSError("x")),  # type: ignore[arg-type]
        lambda: in_phase("executing").record_observation(None, ToolCall(tool_name="f")),  # type: ignore[arg-type]
        lambda: in_phase("executing").record_observation("so", {"tool_name": "f"}),  # type: ignore[arg-type]
        lambda: in_phase("idle").with_messages({"role": "robot", "content": "hi"}),
        lambda: in_phase("idle").with_memory({"goal": "x"}),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_state_is_refused_with_the_reason(make: Callable[[], AgentState]) -> None:
    with pytest.raises(InvalidValue):
        make()


def test_what_pydantic_builds_pydantic_refuses() -> None:
    for fields in (
        {"history": [{"role": "robot", "content": "hi"}]},
        {"phase": ""},
        {"iteration": -1},
        {"created_at": float("nan")},
        {"session_id": ""},
        {"surprise": 1},
        {"memory": {"notes": {"k": {1, 2}}}},
    ):
        with pytest.raises(ValidationError):
            AgentState(**fields)
    with pytest.raises(TooLarge):
        AgentState.from_user_input("hi", session_id="x" * 2000)


def test_frozen_means_frozen() -> None:
    state = AgentState.from_user_input("hi")
    call = ToolCall(tool_name="f")
    for it, name, value in ((state, "phase", "done"), (state, "memory", WorkingMemory()), (call, "error", "x")):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(it, name, value)
    assert type(state.history) is tuple
    for name, value in (("goal", 7), ("plan_steps", [b"x"]), ("notes", {"k": {1}}), ("goals", "x")):
        with pytest.raises(ValidationError):
            setattr(state.memory, name, value)
