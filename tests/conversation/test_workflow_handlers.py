"""Workflows that workers run, as handlers of sessions. Law: a task goes on by itself until it has ended or waits."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import Any

import pytest
from below import keys_of, redis_of, said, until
from three_steps import STEPS, plan, reflect, work
from working import due_set, quick, retried, schedule, working

from distributed_state import (
    AgentState,
    AsyncStateStore,
    InvalidValue,
    NotFound,
    Stopped,
    WarmUnavailable,
    Workflow,
    tool,
)
from distributed_state.tiers import commit as write_path
from distributed_state.values.schedule import Schedule

AGENT = Workflow(STEPS)


async def phase_of(session: Any, *phases: str) -> None:
    """Wait until the session is in one of these phases, and has nothing to do."""
    async with asyncio.timeout(60):
        while await session.phase(fresh=True) not in phases or await session.inbox():
            await asyncio.sleep(0.01)


def ask(state: AgentState, turn: Any) -> AgentState:
    """Ask for the place, and say what was answered."""
    last = state.history[-1]
    if "answers" in (last.metadata or {}) or "wake" in (last.metadata or {}):
        return state.to_done(f"{last.metadata} {last.content}")
    turn.ask("Where to?", name="place", expires=3600)
    return state.to_waiting()


ASKING = Workflow({"planning": ask, "executing": ask})


async def test_a_posted_input_runs_the_task_to_its_end_and_the_next_one_begins_another(store: Any) -> None:
    session = store.session("s")
    async with working(store, {"a": AGENT}):
        await session.post(said("look"), handler="a", request_id="r")
        await phase_of(session, "done")
        state = await session.load_state()
        assert (state.final_answer, state.memory.goal) == ("saw 3", "look")
        assert [call.result for call in state.memory.tool_calls] == ["s/1", "s/2", "s/3"]
        # The post, then one commit a step; the first step's has the input, too.
        assert [change.kind for change in await session.history()] == ["post", *["turn"] * 6]
        await session.post(said("again"))
        await until(lambda: schedule(store, "s") == Schedule("a"))
        await phase_of(session, "done")
    messages = await session.messages(fresh=True)
    assert [each.content for each in messages if each.role == "user"] == ["look", "again"]
    assert (schedule(store, "s"), due_set(store, "s")) == (Schedule("a"), {})
    assert await session.wakes() == []


async def test_what_a_task_asks_is_answered_and_what_comes_without_an_answer_is_given_to_it(store: Any) -> None:
    session = store.session("s", user="u")
    async with working(store, {"a": ASKING}):
        await session.post(said("book"), handler="a")
        await phase_of(session, "waiting_feedback")
        [found] = await store.asks(fresh=True)
        assert (found.name, found.question) == ("place", "Where to?")
        await session.post(said("What does it cost?"))
        await until(lambda: schedule(store, "s") is not None)
        while len([each for each in await session.messages(fresh=True) if each.role == "user"]) < 2:
            await asyncio.sleep(0.01)
        await phase_of(session, "waiting_feedback")
        assert await session.answer("Oslo", "place") is True
        await phase_of(session, "done")
    assert (await session.load_state()).final_answer == "{'answers': 'place'} Oslo"
    assert await store.asks(fresh=True) == []
    assert await session.wakes() == []


async def test_a_question_that_expires_goes_on_with_a_message_that_names_the_wake(store: Any) -> None:
    def hurry(state: AgentState, turn: Any) -> AgentState:
        following = ask(state, turn)
        if following.phase == "waiting_feedback":
            turn.ask("Where to?", name="place", expires=0.2)
        return following

    session = store.session("s")
    async with working(store, {"a": Workflow({"planning": hurry, "executing": hurry})}):
        await session.wake("book", after=0, name="early", handler="a")
        await phase_of(session, "done")
    state = await session.load_state()
    assert state.final_answer == "{'wake': 'early'} book"
    await session.post(said("book"))
    async with working(store, {}):
        while (await session.load_state()).final_answer != "{'wake': 'ask place'} Where to?":
            await asyncio.sleep(0.01)
    assert await session.phase(fresh=True) == "done"


async def test_an_answer_reaches_a_task_that_is_run_by_a_program(store: Any) -> None:
    session = store.session("s")
    assert (await store.run(ASKING, "book", session_id="s")).phase == "waiting_feedback"
    assert (await store.run(ASKING, session_id="s")).phase == "waiting_feedback"
    assert [each.name for each in await store.asks(fresh=True)] == ["place"]
    assert await session.answer("Oslo", "place") is True
    assert (await store.run(ASKING, session_id="s")).final_answer == "{'answers': 'place'} Oslo"
    assert await session.inbox() == []


async def test_a_step_asks_only_if_it_waits(store: Any) -> None:
    def hasty(state: AgentState, turn: Any) -> AgentState:
        turn.ask("Where to?")
        return state.to_executing()

    with pytest.raises(InvalidValue, match="returns its messages and phase"):
        await store.run(Workflow({"planning": hasty}), "book", session_id="s")
    assert await store.asks(fresh=True) == []


async def test_a_step_that_fails_is_repeated_until_the_session_is_stuck_and_retry_goes_on(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(monkeypatch)
    ran: list[str] = []
    broken = True

    def failing(state: AgentState, turn: Any) -> AgentState:
        ran.append(turn.request_id)
        if broken and len(state.memory.tool_calls) == 1:
            turn["spoiled"] = True
            raise ZeroDivisionError
        return work(state, turn)

    session = store.session("s")
    async with working(store, {"a": Workflow({**STEPS, "executing": failing})}, max_attempts=3):
        await session.post(said("look"), handler="a")
        await until(lambda: (schedule(store, "s") or Schedule("a")).stuck)
        assert ran == ["s/1", "s/2", "s/2", "s/2"]
        assert await session.get("spoiled", fresh=True) is None
        broken = False
        assert await retried(session)
        await phase_of(session, "done")
    assert ran[4:] == ["s/2", "s/3", "s/4"]
    assert (await session.load_state()).final_answer == "saw 3"
    assert await session.retry() is False


async def test_phase_error_is_not_the_end(store: Any) -> None:
    broken = True

    def failing(state: AgentState, turn: Any) -> AgentState:
        return state.to_error("no network") if broken else work(state, turn)

    session = store.session("s")
    async with working(store, {"a": Workflow({**STEPS, "executing": failing})}):
        await session.post(said("look"), handler="a")
        await phase_of(session, "error")
        assert (await session.load_state()).error_message == "no network"
        assert (await store.sessions(phase="error", fresh=True))[0].id == "s"
        broken = False
        assert await retried(session)
        await phase_of(session, "done")
    state = await session.load_state()
    assert (state.final_answer, state.error_message) == ("saw 3", None)
    assert [each.content for each in state.history if each.role == "user"] == ["look"]
    assert await session.retry() is False


async def test_a_task_that_a_program_ran_goes_on_after_a_retry(store: Any) -> None:
    session, rounds = store.session("s"), []

    def around(state: AgentState, turn: Any) -> AgentState:
        rounds.append(turn.request_id)
        return state.to_reflecting() if len(rounds) == 8 else state.with_memory(state.memory.plan("a"))

    agent = Workflow({**STEPS, "executing": around}, max_steps=5)
    with pytest.raises(NotFound, match="no handler and no workflow"):
        await session.retry()
    state = await store.run(agent, "look", session_id="s")
    assert (state.phase, state.error_message) == ("error", "no answer after 5 steps")
    assert await session.retry() is True
    assert await session.phase(fresh=True) == "executing"
    assert await session.retry() is False, "nobody has failed since"
    assert schedule(store, "s") is None
    state = await store.run(agent, session_id="s")
    assert (state.phase, state.error_message, len(rounds)) == ("done", None, 8)


async def test_the_steps_of_an_answer_count_by_themselves(store: Any) -> None:
    """A conversation that never ends is not a task that takes too many steps."""

    def talk(state: AgentState, turn: Any) -> AgentState:
        return state.with_messages({"role": "assistant", "content": "And?"}).to_waiting()

    session = store.session("s")
    async with working(store, {"a": Workflow({"planning": talk, "executing": talk}, max_steps=2)}):
        for number in range(5):
            await session.post(said(str(number)), handler="a")
            while len(await session.messages(fresh=True)) < 2 * (number + 1):
                await asyncio.sleep(0.01)
    assert await session.phase(fresh=True) == "waiting_feedback"


async def test_what_arrives_while_a_task_runs_is_added_to_it(store: Any) -> None:
    session = store.session("s")
    began, go = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow(state: AgentState, turn: Any) -> AgentState:
        loop.call_soon_threadsafe(began.set)
        while not go.is_set():
            time.sleep(0.01)
        return plan(state, turn)

    async with working(store, {"a": Workflow({**STEPS, "planning": slow})}):
        await session.post(said("look"), handler="a")
        await began.wait()
        await session.post(said("and hurry"))
        go.set()
        await phase_of(session, "done")
    state = await session.load_state()
    assert [each.content for each in state.history if each.role == "user"] == ["look", "and hurry"]
    assert (state.memory.goal, state.final_answer) == ("look", "saw 3")


@dataclasses.dataclass
class Trip:
    """A state of a program's own."""

    phase: str = "planning"
    asked: str = ""

    @classmethod
    def from_user_input(cls, text: str) -> Trip:
        """Begin."""
        return cls(asked=text)

    def to_error(self, message: str) -> Trip:
        """End."""
        return dataclasses.replace(self, phase="error", asked=message)


async def test_the_task_of_a_dataclass_ends_before_the_next_input_is_given(store: Any) -> None:
    seen: list[str] = []

    def step(state: Trip, turn: Any) -> Trip:
        seen.append(f"{state.phase} {state.asked}")
        return dataclasses.replace(state, phase="executing" if state.phase == "planning" else "done")

    session = store.session("s")
    for text in ("Oslo", "Bergen"):
        await session.post(said(text), handler="a")
    async with working(store, {"a": Workflow({"planning": step, "executing": step}, state=Trip)}):
        await until(lambda: len(seen) == 4)
        await phase_of(session, "done")
    assert seen == ["planning Oslo", "executing Oslo", "planning Bergen", "executing Bergen"]
    assert schedule(store, "s") == Schedule("a")


@pytest.mark.parametrize("keep", [False, True])
async def test_a_task_that_is_stopped_rests_until_somebody_continues_it(store: Any, keep: bool) -> None:
    began, calls = asyncio.Event(), []
    loop = asyncio.get_running_loop()

    def work_until_stopped(state: AgentState, turn: Any) -> AgentState:
        if not calls.append("work") and len(calls) > 1:
            return state.to_reflecting()
        loop.call_soon_threadsafe(began.set)
        try:
            with turn.stoppable():
                while True:
                    time.sleep(0.01)
                    turn.stream(".")
        except Stopped:
            if not keep:
                raise
        return state

    async def await_until_stopped(state: AgentState, turn: Any) -> AgentState:
        if not calls.append("work") and len(calls) > 1:
            return state.to_reflecting()
        began.set()
        try:
            async with turn.stoppable():
                await asyncio.sleep(30)
        except Stopped:
            if not keep:
                raise
        return state

    step = await_until_stopped if isinstance(store, AsyncStateStore) else work_until_stopped
    session = store.session("s")
    async with working(store, {"a": Workflow({**STEPS, "executing": step})}):
        await session.post(said("look"), handler="a")
        await began.wait()
        assert (await session.stop(reason="enough")).state == "stopped"
        await until(lambda: schedule(store, "s") == Schedule("a"))
        assert await session.phase(fresh=True) == "executing"
        assert len(calls) == 1
        assert await retried(session)
        await phase_of(session, "done")
    assert len(calls) == 2


async def test_a_stop_reaches_a_task_whose_steps_are_short(store: Any) -> None:
    steps: list[str] = []

    def again(state: AgentState, turn: Any) -> AgentState:
        steps.append(turn.request_id)
        return state.with_memory(state.memory.plan("a"))

    session = store.session("s")
    async with working(store, {"a": Workflow({**STEPS, "executing": again}, max_steps=100_000)}):
        await session.post(said("look"), handler="a")
        await until(lambda: len(steps) > 3)
        async with asyncio.timeout(20):
            while schedule(store, "s") != Schedule("a"):
                await session.stop()
        before = len(steps)
        await session.set("n", 1)
        assert len(steps) == before
    assert await session.inbox() == []


async def test_a_stop_between_two_steps_prevents_the_next_one(store: Any) -> None:
    ran: list[str] = []

    def first(state: AgentState, turn: Any) -> AgentState:
        ran.append("first")
        store.stop_working()
        return plan(state, turn)

    def second(state: AgentState, turn: Any) -> AgentState:
        ran.append("second")
        return work(state, turn)

    def asked() -> bool:
        with redis_of(store) as redis:
            return bool(redis.exists(keys_of(store, "s").stop_of("")))

    session = store.session("s")
    await session.post(said("look"), handler="a")
    async with working(store, {"a": Workflow({**STEPS, "planning": first, "executing": second})}):
        await until(lambda: ran == ["first"])
    assert schedule(store, "s") != Schedule("a")
    stopping = asyncio.create_task(session.stop(wait=30))
    await until(asked)
    async with working(store, {}):
        assert (await stopping).state == "stopped"
        await until(lambda: schedule(store, "s") == Schedule("a"))
    assert ran == ["first"]


async def test_a_step_that_takes_too_long_counts_as_failed(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)
    calls: list[str] = []

    def slow(state: AgentState, turn: Any) -> AgentState:
        calls.append("slow")
        while not turn.lost:
            time.sleep(0.01)
        return work(state, turn)

    async def slow_too(state: AgentState, turn: Any) -> AgentState:
        calls.append("slow")
        await asyncio.sleep(30)
        return work(state, turn)

    step = slow_too if isinstance(store, AsyncStateStore) else slow
    async with working(store, {"a": Workflow({**STEPS, "planning": step}, step_timeout=0.2)}, max_attempts=2):
        await store.session("s").post(said("look"), handler="a")
        await until(lambda: (schedule(store, "s") or Schedule("a")).stuck)
    assert calls == ["slow", "slow"]


@tool
def tick(state: Any, user_state: Any) -> None:
    """Count, for the session and for the user."""
    state["ticks"] = state.get("ticks", 0) + 1
    user_state["ticks"] = user_state.get("ticks", 0) + 1


async def test_tools_of_a_step_count_once_though_the_user_was_away(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)

    def blocking_step(state: AgentState, turn: Any) -> AgentState:
        turn.call(tick)
        return work(state, turn)

    async def step(state: AgentState, turn: Any) -> AgentState:
        await turn.call(tick)
        return work(state, turn)

    agent = Workflow({**STEPS, "executing": step if isinstance(store, AsyncStateStore) else blocking_step})
    commit = write_path.commit
    died: list[int] = []

    async def half(tiers: Any, keys: Any, draft: Any, **more: Any) -> Any:
        if keys.ref.scope == "user" and len(died) < 2:
            died.append(1)
            raise WarmUnavailable("the worker died here")
        return await commit(tiers, keys, draft, **more)

    monkeypatch.setattr(write_path, "commit", half)
    session = store.session("s", user="u")
    async with working(store, {"a": agent}, ttl=1.0):
        await session.post(said("look"), handler="a")
        await phase_of(session, "done")
    assert len(died) == 2
    assert await session.get("ticks", fresh=True) == 4
    assert await store.user("u").get("ticks", fresh=True) == 4


@pytest.mark.only(api="asyncio")
async def test_steps_are_coroutines_or_run_in_threads(store: Any) -> None:
    threads: list[str] = []

    async def later(state: AgentState, turn: Any) -> AgentState:
        await asyncio.sleep(0)
        return plan(state, turn)

    def beside(state: AgentState, turn: Any) -> AgentState:
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        threads.append("beside")
        return reflect(state, turn)

    session = store.session("s")
    async with working(store, {"a": Workflow({**STEPS, "planning": later, "reflecting": beside})}):
        await session.post(said("look"), handler="a")
        await phase_of(session, "done")
    assert threads == ["beside"]


@pytest.mark.only(api="blocking")
async def test_blocking_code_is_told_of_steps_that_it_cannot_run(store: Any) -> None:
    async def later(state: AgentState, turn: Any) -> AgentState:
        return plan(state, turn)

    store.handler("a", Workflow({**STEPS, "planning": later}))
    with pytest.raises(InvalidValue, match="for asyncio only"):
        await store.work()
