"""A state in a dataclass of its own. Law: it is saved and run like an AgentState, and nobody overwrites another."""

from __future__ import annotations

import copy
import dataclasses
import enum
import pickle
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from distributed_state import AgentState, Conflict, CorruptState, InvalidValue, Workflow


class Phase(str, enum.Enum):  # noqa: UP042 - as many programs define it
    """Phases of a program."""

    PLANNING = "planning"
    EXECUTING = "executing"
    DONE = "done"
    ERROR = "error"


@dataclasses.dataclass
class Line:
    """A message of the program's own."""

    role: str
    content: str
    time: datetime = dataclasses.field(default_factory=lambda: datetime.now(UTC))


@dataclasses.dataclass
class Trip:
    """A state as a program writes it that saves JSON files."""

    session_id: str = "s"
    phase: Phase = Phase.PLANNING
    history: list[Line] = dataclasses.field(default_factory=list)
    notes: dict[str, str] = dataclasses.field(default_factory=dict)
    answer: str | None = None
    iteration: int = 0

    @classmethod
    def from_user_input(cls, text: str) -> Trip:
        """Begin."""
        return cls(session_id="of its own", history=[Line("user", text)])

    def to(self, phase: Phase, answer: str | None = None) -> Trip:
        """The next state: a copy that shares what it holds."""
        following = copy.copy(self)
        following.phase, following.answer, following.iteration = phase, answer, self.iteration + 1
        return following

    def to_error(self, message: str) -> Trip:
        """End."""
        return self.to(Phase.ERROR, message)


@dataclasses.dataclass(frozen=True)
class Point:
    """A state that never changes in place."""

    x: int = 0


async def test_a_dataclass_is_saved_and_read_back(store: Any) -> None:
    session, state = store.session("s"), Trip(history=[Line("user", "Oslo?")])
    assert await session.load_state(Trip) is None
    assert await session.save_state(state) is state
    found = await session.load_state(Trip)
    assert type(found) is Trip
    assert found == state
    assert await session.phase() == "planning"
    state.history.append(Line("assistant", "Yes"))
    state.notes["k"] = "v"
    await session.save_state(state.to(Phase.EXECUTING))
    change = (await session.history())[-1]
    assert set(change.set) == {f"agent.own.{name}" for name in ("history", "notes", "phase", "iteration")}
    assert change.phase == await session.phase() == "executing"
    assert (await session.load_state(Trip)).history == state.history
    assert await session.load_state() is None, "it is not an AgentState"
    with pytest.raises(InvalidValue, match="holds a state already"):
        await session.save_state(AgentState(session_id="s"))


@pytest.mark.parametrize("copied", [lambda it: pickle.loads(pickle.dumps(it)), copy.deepcopy, copy.copy, lambda it: it])
async def test_a_loop_may_save_the_same_dataclass_or_a_copy(store: Any, copied: Callable[[Trip], Trip]) -> None:
    session, state = store.session("s"), Trip()
    for number in range(3):
        state = copied(state)
        state.iteration = number
        await session.save_state(state)
    assert await session.version() == 3
    assert (await session.load_state(Trip)).iteration == 2


async def test_one_of_two_that_save_a_dataclass_gets_conflict(store: Any) -> None:
    session = store.session("s")
    await session.save_state(Trip())
    first, second = [await session.load_state(Trip) for _ in range(2)]
    first.notes["k"], second.notes["k"] = "first", "second"
    await session.save_state(first)
    with pytest.raises(Conflict, match="go on from load_state"):
        await session.save_state(second)
    with pytest.raises(InvalidValue, match="holds a state already"):
        await session.save_state(dataclasses.replace(first))
    assert (await session.load_state(Trip)).notes == {"k": "first"}


async def test_a_turn_takes_a_replaced_dataclass_and_notices_an_older_one(store: Any) -> None:
    session = store.session("s")
    async with session.turn() as turn:
        await turn.save_state(Point(1))
    async with session.turn() as turn:
        await turn.save_state(dataclasses.replace(await turn.load_state(Point), x=2))
    older = await session.load_state(Point)
    await session.save_state(turn.state)
    assert await session.version() == 2, "the turn's state knows that it is saved"
    await session.set("other", 1)
    with pytest.raises(Conflict):
        async with session.turn() as turn:
            await turn.save_state(older)
    assert await session.load_state(Point) == Point(2)


async def test_a_change_after_the_save_of_a_turn_is_saved_by_the_next_one(store: Any) -> None:
    session, state = store.session("s"), Trip()
    async with session.turn() as turn:
        await turn.save_state(state)
        state.notes["k"] = "later"
    assert (await session.load_state(Trip)).notes == {}
    await session.save_state(state)
    assert (await session.load_state(Trip)).notes == {"k": "later"}


@dataclasses.dataclass(slots=True)
class Slotted:
    """A dataclass that cannot note its version."""

    x: int = 0


async def test_a_dataclass_that_cannot_be_saved_or_read_is_refused(store: Any) -> None:
    session = store.session("s")
    for wrong, match in (
        (Slotted(), "slots=True"),
        (Trip("t"), "make the state with session_id='s'"),
        (Trip(iteration="many"), "iteration"),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidValue, match=match):
            await session.save_state(wrong)
    assert await session.version() == 0
    await session.save_state(Trip())
    await session.set("agent.own.iteration", "many")
    with pytest.raises(CorruptState, match="holds no Trip that can be read: iteration"):
        await session.load_state(Trip)


def plan(state: Trip, turn: Any) -> Trip:
    """The first step."""
    state.notes["planned"] = "yes"
    return state.to(Phase.EXECUTING)


def work(state: Trip, turn: Any) -> Trip:
    """The second, which makes a state without a note of its version."""
    return dataclasses.replace(state.to(Phase.DONE, state.history[0].content.upper()))


async def test_a_workflow_runs_with_a_dataclass(store: Any) -> None:
    agent = Workflow({Phase.PLANNING: plan, Phase.EXECUTING: work}, state=Trip)
    state = await store.run(agent, "Oslo", session_id="s", request_id="r1")
    assert (state.phase, state.answer, state.notes, state.session_id) == (Phase.DONE, "OSLO", {"planned": "yes"}, "s")
    session = store.session("s")
    assert await session.load_state(Trip) == state == await store.run(agent, "Oslo", session_id="s", request_id="r1")
    assert (await session.version(), await session.phase()) == (3, "done")
    assert (await store.run(agent, "Bergen", session_id="s")).answer == "BERGEN", "the next task"


async def test_another_worker_continues_the_task_of_a_dataclass(store: Any) -> None:
    def broken(state: Trip, turn: Any) -> Trip:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await store.run(Workflow({"planning": plan, "executing": broken}, state=Trip), "Oslo", session_id="s")
    agent = Workflow({"planning": plan, "executing": work}, state=Trip)
    with pytest.raises(InvalidValue, match="of another task; give None to go on"):
        await store.run(agent, "Bergen", session_id="s")
    assert (await store.run(agent, "Oslo", session_id="s")).answer == "OSLO"
    endless = Workflow({"planning": lambda state, turn: state.to(Phase.PLANNING)}, max_steps=2, state=Trip)
    state = await store.run(endless, "Oslo", session_id="t")
    assert (state.phase, state.answer) == (Phase.ERROR, "no answer after 2 steps")


@pytest.mark.unit
@pytest.mark.parametrize("kind", [Point, Slotted, dict])
def test_a_class_that_is_not_a_state_is_not_run(kind: type[Any]) -> None:
    with pytest.raises(InvalidValue):
        Workflow({"planning": plan}, state=kind)
