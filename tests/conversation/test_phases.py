"""Tables of phases and events. Law: a bad table is refused when it is made, a bad event when it is asked for."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from distributed_state import (
    DEFAULT,
    REASONING_MACHINE,
    TASK_MACHINE,
    InvalidTransition,
    InvalidValue,
    StateError,
    StateMachine,
)

pytestmark = pytest.mark.unit

LIGHT = {("red", "go"): "green", ("green", "slow"): "yellow", ("yellow", "stop"): "red"}


def test_an_event_leads_from_one_state_to_the_next() -> None:
    light = StateMachine(LIGHT, initial="red")
    assert [light.next("red", "go"), light.next("green", "slow"), light.next("yellow", "stop")] == [
        "green",
        "yellow",
        "red",
    ]
    assert light.states == {"red", "green", "yellow"}
    assert light.final == frozenset()


def test_an_event_that_leads_nowhere_says_what_is_allowed() -> None:
    with pytest.raises(InvalidTransition) as caught:
        TASK_MACHINE.next("executing", "plan_ready")
    error = caught.value
    assert (error.phase, error.event) == ("executing", "plan_ready")
    for word in ("task machine", "'plan_ready'", "'executing'", "step_complete, needs_input, task_complete"):
        assert word in str(error)
    assert isinstance(error, StateError)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.phase, again.event) == (str(error), "executing", "plan_ready")


def test_a_state_that_the_table_does_not_know_allows_nothing() -> None:
    with pytest.raises(InvalidTransition, match="allowed there: none"):
        DEFAULT.next("negotiating", "plan_ready")
    assert DEFAULT.events("negotiating") == ()


@pytest.mark.parametrize("event", [None, 7, ("executing", "fail"), ["fail"]])
def test_an_event_is_a_text(event: Any) -> None:
    with pytest.raises(InvalidValue, match="an event is a str"):
        DEFAULT.next("executing", event)


@pytest.mark.parametrize(
    ("table", "initial", "match"),
    [
        ({}, "red", "non-empty mapping"),
        (None, "red", "non-empty mapping"),
        ([("red", "go", "green")], "red", "non-empty mapping"),
        ({"red": "green"}, "red", "a row is"),
        ({("red",): "green"}, "red", "a row is"),
        ({("red", "go", "now"): "green"}, "red", "a row is"),
        ({("red", 1): "green"}, "red", "a row is"),
        ({("red", "go"): None}, "red", "a row is"),
        ({("red", "go"): ""}, "red", "a row is"),
        ({("", "go"): "green"}, "", "a row is"),
        (LIGHT, "blue", "'blue'"),
        (LIGHT, None, "None"),
        ({("red", "go"): "green"}, "green", "no row leads out of the initial state 'green'"),
    ],
)
def test_a_bad_table_is_refused(table: Any, initial: Any, match: str) -> None:
    with pytest.raises(InvalidValue, match=match):
        StateMachine(table, initial=initial)


def test_a_bad_name_or_final_state_is_refused() -> None:
    with pytest.raises(InvalidValue, match="name"):
        StateMachine(LIGHT, initial="red", name="")
    with pytest.raises(InvalidValue, match="'blue' is in no row"):
        StateMachine(LIGHT, initial="red", final=frozenset({"blue"}))


def test_a_machine_is_a_frozen_value() -> None:
    given = dict(LIGHT)
    light = StateMachine(given, initial="red", name="light")
    given["red", "go"] = "blue"
    assert light.next("red", "go") == "green"
    with pytest.raises(TypeError):
        light.table["red", "go"] = "blue"  # type: ignore[index]  # what must not work
    with pytest.raises(FrozenInstanceError):
        light.initial = "green"  # type: ignore[misc]  # what must not work
    for equal in (StateMachine(LIGHT, initial="red", name="light"), copy.deepcopy(light)):
        assert equal == light
        assert hash(equal) == hash(light)
    assert pickle.loads(pickle.dumps(DEFAULT)) == DEFAULT


def test_the_default_covers_both_examples() -> None:
    for machine in (TASK_MACHINE, REASONING_MACHINE):
        assert machine.table.items() <= DEFAULT.table.items()
        assert machine.initial == DEFAULT.initial == "idle"
    assert DEFAULT.states == {"idle", "planning", "executing", "reflecting", "waiting_feedback", "done", "error"}
    assert TASK_MACHINE.final == {"done"}
    assert REASONING_MACHINE.final == DEFAULT.final == {"done", "error"}


def test_every_phase_but_done_can_end_and_can_be_reached() -> None:
    for state in DEFAULT.states - {"done"}:
        assert DEFAULT.next(state, "fail") == "error"
        assert DEFAULT.next(state, "task_complete") == "done"
    for machine in (DEFAULT, TASK_MACHINE, REASONING_MACHINE):
        reached = {machine.initial}
        for _ in machine.states:
            reached |= {following for (state, _), following in machine.table.items() if state in reached}
        assert reached == machine.states


def test_the_next_task_begins_after_an_answer_and_after_an_error() -> None:
    assert DEFAULT.events("done") == ("new_task",)
    assert set(DEFAULT.events("error")) == {"new_task", "task_complete", "fail"}
