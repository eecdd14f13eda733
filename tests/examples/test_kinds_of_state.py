"""The kinds of state that an agent has, each where it belongs, and all of them in one prompt.

A conversation and its phase live in the session; a task has a record of its own, a user's facts outlive every session,
and what all share belongs to the app. Any worker sees the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from distributed_state import TASK_MACHINE, InvalidTransition, InvalidValue, TaskState, UserState


async def test_each_kind_of_state_has_its_place(store: Any) -> None:
    session = store.session("trip-1", user="ada")
    await session.append({"role": "user", "content": "A flight to Lisbon"}, {"role": "assistant", "content": "When?"})
    await session.set("destination", "Lisbon")

    task = store.task("booking-1", user="ada", schema=TaskState)
    await task.create(TaskState(goal="Book a flight to Lisbon", status="in_progress", steps_remaining=3))
    async with task.edit() as work:
        work.steps_completed += 1
        work.steps_remaining -= 1
        work.current_step = "compare prices"
        work.data["options"] = [{"flight": "TP 561", "price": 140}]

    user = store.user("ada", schema=UserState)
    await user.update("preferences", {"seat": "aisle"})
    await user.update("preferences", {"airline": "TAP"})
    await store.app("travel").set("opening_hours", "9 to 5")

    context = await session.context(last=10, beside=[user, task, store.app("travel")])
    assert [message.role for message in context.messages] == ["user", "assistant"]
    assert context.facts["user:ada"]["preferences"] == {"seat": "aisle", "airline": "TAP"}
    assert context.facts["task:booking-1"]["steps_completed"] == 1
    assert 'current_step: "compare prices"' in context.render()
    assert context.context_tokens > 20

    # Another session of the same user knows the same of the user, and nothing of the first conversation.
    other = await store.session("trip-2", user="ada").context(beside=[user])
    assert other.messages == ()
    assert other.facts["user:ada"]["preferences"]["seat"] == "aisle"


async def test_stored_state_is_not_trusted_blindly(store: Any) -> None:
    task = store.task("booking-1", schema=TaskState)
    await task.create(TaskState(task_id="booking-1", goal="Pay"))
    for wrong in ({"steps_completed": -1}, {"status": "maybe"}, {"goal": None}, {"amount": 5}):
        with pytest.raises(InvalidValue):
            await task.set_many(wrong)
    assert await task.load() == TaskState(task_id="booking-1", goal="Pay")


class Worker:
    """Works off one task, as far as it comes; whoever takes over goes on in the same phase."""

    def __init__(self, session: Any, answers: list[str]) -> None:
        self.session, self.answers = session, answers

    async def step(self, phase: str) -> str:
        """Do what a phase asks for and return the event that it ends with."""
        does: dict[str, Callable[[], Any]] = {"planning": self.plan, "executing": self.execute}
        return str(await (does.get(phase) or self.wait)())

    async def plan(self) -> str:
        await self.session.set("steps", ["look", "ask", "book"])
        return "plan_ready"

    async def execute(self) -> str:
        steps = await self.session.get("steps")
        if not steps:
            return "task_complete"
        if steps[0] == "ask" and not await self.session.get("answer"):
            return "needs_input"
        await self.session.set("steps", steps[1:])
        return "step_complete"

    async def wait(self) -> str:
        await self.session.set("answer", self.answers.pop())
        return "input_received"

    async def run(self, most: int) -> None:
        """At most so many steps."""
        for _ in range(most):
            phase = await self.session.phase() or TASK_MACHINE.initial
            if phase in TASK_MACHINE.final:
                return
            event = "new_task" if phase == TASK_MACHINE.initial else await self.step(phase)
            await self.session.transition(event, machine=TASK_MACHINE)


async def test_a_task_is_worked_off_along_its_table_by_one_worker_after_another(store: Any) -> None:
    for _ in range(5):
        await Worker(store.session("job"), ["Monday"]).run(most=2)
    session = store.session("job")
    assert await session.phase() == "done"
    assert await session.get("answer") == "Monday"
    moves = [change.phase for change in await session.history() if change.phase]
    assert moves == [
        "planning", "executing", "executing", "waiting_feedback", "executing", "executing", "executing", "done",
    ]  # fmt: skip
    with pytest.raises(InvalidTransition, match="done"):
        await session.transition("plan_ready", machine=TASK_MACHINE)
